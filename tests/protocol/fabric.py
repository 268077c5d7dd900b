"""All ranks together: what may happen next in a state of the model, and what it leads to.

A state is a tuple of small integers: one per rank for its `Process`, one for what they share. Every step of a rank is computed once by
the production code and remembered, so that exploring is looking up. Which steps are left out, and why nothing is lost by it,
is said at `Fabric.successors`; `reduced=False` leaves out none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Action, Departure, Operation, TroubleKind, Verdict, decide
from tests.protocol.process import Broken, mask
from tests.protocol.shared import Shared, decided, put
from tests.protocol.steps import Info, Job, State, Steps

Name = tuple[object, ...]
Decide = Callable[..., Verdict]

#: A rank that stops again and again, each time before it answers, is followed for so many generations.
GENERATIONS = 6
#: After so many, all ended by the transport, an operation fails.
ATTEMPTS = Operation(0, 0).max_attempts


class Fabric(Steps):
    """The steps of one job; `explore` in exhaustive.py walks them."""

    decide: Decide = staticmethod(decide)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._decisions: dict[tuple[object, ...], int] = {}

    # ------------------------------------------------------------------ what may happen next

    def successors(self, state: State) -> list[tuple[Name, State]]:
        """Every step that may be next, with the state it leads to; raises Broken where an invariant does not hold.

        Left out when `reduced` (each of these commutes with every step of other ranks, so doing it first loses nothing):
        a frozen rank adopts a verdict that is there at once; a rank that is frozen by its own trouble outside of the closing
        round, and cannot be silent, answers at once, because its answer cannot change any more.
        """
        infos = [self.infos[number] for number in state[:-1]]
        shared = self.shareds[state[-1]]
        if self.job.reduced:
            for rank, info in enumerate(infos):
                if not (info.alive and info.frozen):
                    continue
                if info.generation < shared.top:
                    return [(("adopt", rank), self._adopt(state, rank))]
                if shared.stopped >> rank & 1 or (shared.budget and "stop" in self.job.kinds):
                    continue  # whether it answers before it is called silent matters
                if info.troubled and info.at != "close" and shared.revoked and shared.reports[rank] < 0:
                    return [(("hear", rank), self._hear(state, rank))]
            if not shared.budget and not self.job.odd:
                only = self._only_step(state, infos, shared)
                if only is not None:
                    return [only]
        free: list[tuple[Name, State]] = []
        slack: list[tuple[Name, State]] = []  # of ranks that may be silent
        for rank, info in enumerate(infos):
            if info.alive:
                self._rank_steps(state, rank, infos, shared, slack if shared.stopped >> rank & 1 else free)
        if shared.revoked:
            self._verdict_steps(state, infos, shared, False, free)
        faults: list[tuple[Name, State]] = []
        if not free:
            self._time_steps(state, infos, shared, slack, faults)
        if shared.budget:
            self._fault_steps(state, infos, shared, free, slack, faults)
        return [*free, *slack, *faults]

    def _only_step(self, state: State, infos: list[Info], shared: Shared) -> tuple[Name, State] | None:
        """With all faults spent: a step that no other step can disturb, if there is one."""
        if any(not info.alive or (info.at == "idle" and info.over) for info in infos):
            return None  # a process that ends is a departure: when it does matters
        if shared.revoked:
            if any(report < 0 for report in shared.reports):
                return None
            steps: list[tuple[Name, State]] = []
            self._verdict_steps(state, infos, shared, False, steps)
            return steps[0] if len(steps) == 1 else None
        if shared.stopped:
            return None
        for rank in self.members:
            steps = []
            self._rank_steps(state, rank, infos, shared, steps)
            if len(steps) == 1:
                return steps[0]
        return None

    def _rank_steps(
        self, state: State, rank: int, infos: list[Info], shared: Shared, steps: list[tuple[Name, State]]
    ) -> None:
        info = infos[rank]
        if info.generation < shared.top:
            steps.append((("adopt", rank), self._adopt(state, rank)))
        elif shared.revoked and shared.reports[rank] < 0 and rank in info.participants:
            steps.append((("hear", rank), self._hear(state, rank)))
        if info.at == "idle":
            if info.over:
                steps.append((("end", rank), self._end(state, rank, shared)))
            elif (after := self._own(state, rank, "enter")) != state:  # unless it waits for the verdict
                steps.append((("enter", rank), after))
        elif info.at == "checked":
            steps.append((("act", rank), self._own(state, rank, "act")))
        elif info.in_call:
            self._transport_steps(state, rank, infos, shared, steps)

    def _transport_steps(
        self, state: State, rank: int, infos: list[Info], shared: Shared, steps: list[tuple[Name, State]]
    ) -> None:
        info = infos[rank]
        promised = info.frozen and shared.reports[rank] >= 0 and info.at == "close"
        if promised and self.job.reduced and not shared.budget and not self.job.odd:
            return  # `_write` checks the verdict as if it had passed
        if self._may_pass(infos, info):
            after = self._own(state, rank, "passed", self._same(state, info))
            moved = self.infos[after[rank]]
            stopped = info.frozen and moved.at == "wait" and moved.lengths == info.lengths
            if not (stopped and self.job.reduced):  # a frozen rank that goes on waiting has not moved
                steps.append((("pass", rank), after))
        if not info.frozen and any(not infos[other].alive and infos[other].at != "stopped" for other in info.group):
            steps.append((("cut", rank), self._own(state, rank, "trouble", TroubleKind.TRANSPORT)))

    def _time_steps(
        self,
        state: State,
        infos: list[Info],
        shared: Shared,
        slack: list[tuple[Name, State]],
        steps: list[tuple[Name, State]],
    ) -> None:
        """Nothing happens by itself any more on ranks that run: time passes, deadlines with it; or all have ended."""
        if shared.revoked:
            self._verdict_steps(state, infos, shared, True, steps)
        if steps:
            return
        running = [rank for rank, info in enumerate(infos) if info.alive and not shared.stopped >> rank & 1]
        waiting = [rank for rank in running if infos[rank].in_call and not infos[rank].frozen]
        if not waiting and not slack:
            running = [rank for rank, info in enumerate(infos) if info.alive]
            waiting = [rank for rank in running if infos[rank].in_call and not infos[rank].frozen]
        for rank in waiting:
            steps.append((("time", rank), self._own(state, rank, "trouble", TroubleKind.DEADLINE)))
        if not waiting and running and shared.top < GENERATIONS:
            raise Broken(f"ranks {running} never end")

    def _fault_steps(
        self,
        state: State,
        infos: list[Info],
        shared: Shared,
        free: list[tuple[Name, State]],
        slack: list[tuple[Name, State]],
        steps: list[tuple[Name, State]],
    ) -> None:
        kinds = self.job.kinds
        spent = shared._replace(budget=shared.budget - 1)
        unlucky = spent._replace(unlucky=True)
        movers = {name[1] for name, _ in free}
        for rank, info in enumerate(infos):
            if not info.alive:
                continue
            bit = 1 << rank
            if "crash" in kinds:
                steps.append(
                    (("crash", rank), self._crash(state, rank, infos, unlucky._replace(crashed=shared.crashed | bit)))
                )
            if "stop" in kinds and movers == {rank} and not shared.stopped & bit:
                # Being stopped shows only once the others have nothing left to do but wait.
                stopped = unlucky._replace(stopped=shared.stopped | bit)
                steps.append((("stop", rank), (*state[:-1], self.shared_id(stopped))))
            if "exit" in kinds and info.at == "idle" and not info.over:
                steps.append((("exit", rank), self._end(state, rank, unlucky._replace(left=shared.left | bit))))
            if info.in_call and not info.frozen:
                if "reset" in kinds:
                    steps.append(
                        (("reset", rank), self._own(state, rank, "trouble", TroubleKind.TRANSPORT, shared=spent))
                    )
                if "deadline" in kinds:
                    hurried = unlucky._replace(hurried=True)
                    steps.append(
                        (("deadline", rank), self._own(state, rank, "trouble", TroubleKind.DEADLINE, shared=hurried))
                    )
                if "raise" in kinds:
                    raised = unlucky._replace(raised=shared.raised | bit)
                    steps.append(
                        (("raise", rank), self._own(state, rank, "trouble", TroubleKind.RAISED, shared=raised))
                    )
            elif "give up" in kinds and info.frozen and not shared.gave_up & bit:
                gave_up = unlucky._replace(gave_up=shared.gave_up | bit)
                if info.in_call and info.troubled:
                    steps.append((("give up", rank), self._own(state, rank, "give_up", shared=gave_up)))
                elif info.at == "idle" and not info.over and self._own(state, rank, "enter") == state:
                    steps.append((("skip", rank), self._own(state, rank, "skip", shared=gave_up)))
            elif "give up" in kinds and info.at == "idle" and not (info.over or info.frozen or shared.gave_up & bit):
                gave_up = unlucky._replace(gave_up=shared.gave_up | bit)
                steps.append((("skip", rank), self._own(state, rank, "no_turn", shared=gave_up)))

    # ------------------------------------------------------------------ verdicts

    def _verdict_steps(
        self, state: State, infos: list[Info], shared: Shared, idle: bool, steps: list[tuple[Name, State]]
    ) -> None:
        """Every verdict that somebody may write now: it depends on what the coordinator has read."""
        top = shared.top
        views = {
            info.participants
            for rank, info in enumerate(infos)
            if info.alive and info.generation == top and shared.reports[rank] >= 0
        }
        if not views:
            return
        late = idle or any(
            number >= 0
            and (trouble := self.reports[number].trouble) is not None
            and trouble.kind is TroubleKind.DEADLINE
            for number in shared.reports
        )
        found: dict[tuple[int, int], Name] = {}
        for members in views:
            choices = [self._readings(rank, infos[rank], shared, late) for rank in members]
            for reading in product(*choices):
                verdict = self._decision(top, members, reading)
                covered = mask([rank for rank, (report, _, _) in zip(members, reading) if report >= 0])
                found.setdefault((verdict, covered), ("verdict", self.verdicts[verdict].action.value, reading))
        for (verdict, covered), name in found.items():
            steps.append((name, self._write(state, infos, shared, verdict, covered)))

    def _readings(
        self, rank: int, info: Info, shared: Shared, late: bool
    ) -> list[tuple[int, Departure | None, Cause | None]]:
        """What a coordinator may know of a member: its report, its departure, that it is silent."""
        report = shared.reports[rank]
        if info.alive:
            if report >= 0:
                return [(report, None, None)]
            return [(-1, None, Cause.STUCK)] if late and shared.stopped >> rank & 1 and shared.top < GENERATIONS else []
        dead = info.at == "dead"
        departure = Departure(rank, Cause.LOST if dead else Cause.EXITED, done=info.completed)
        choices: list[tuple[int, Departure | None, Cause | None]] = [(-1, departure, None)]
        if report >= 0:
            choices += [(report, None, None), (report, departure, None)]
        elif late and dead:
            choices.append((-1, None, Cause.UNKNOWN))
        return choices

    def _decision(
        self, generation: int, members: tuple[int, ...], reading: tuple[tuple[int, Departure | None, Cause | None], ...]
    ) -> int:
        key = (generation, members, reading)
        known = self._decisions.get(key)
        if known is None:
            reports = {rank: self.reports[number] for rank, (number, _, _) in zip(members, reading) if number >= 0}
            departed = {rank: departure for rank, (_, departure, _) in zip(members, reading) if departure is not None}
            silent = {rank: cause for rank, (_, _, cause) in zip(members, reading) if cause is not None}
            verdict = replace(self.decide(generation, members, reports, departed, silent), sides=())
            known = self._decisions[key] = self.verdict_id(verdict)
        return known

    def _write(self, state: State, infos: list[Info], shared: Shared, number: int, covered: int) -> State:
        verdict = self.verdicts[number]
        self._check_named(verdict, infos, shared)
        closing = any(
            call.closing
            for program in self.job.programs
            for call in program
            if call.fingerprint in verdict.fingerprints
        )
        if verdict.action is not Action.COMMIT and closing:
            for rank, info in enumerate(infos):
                if (
                    info.at == "close"
                    and info.sequence == verdict.sequence
                    and info.generation == shared.top
                    and self._may_pass(infos, info)
                ):
                    raise Broken(f"rank {rank} can still complete operation {verdict.sequence}: {verdict}")
        if verdict.action is not Action.COMMIT:
            done = [rank for rank, info in enumerate(infos) if info.alive and info.completed >= verdict.sequence]
            if any(closing or covered >> rank & 1 for rank in done):
                raise Broken(f"ranks {done} have completed operation {verdict.sequence}: {verdict}")
        if verdict.action is Action.FAIL and verdict.attempt < ATTEMPTS and not (shared.unlucky or self.job.odd):
            raise Broken(f"only the transport broke: {verdict}")
        shared = decided(shared, verdict, covered, self.everybody & ~covered, closing)
        shared = shared._replace(
            top=shared.top + 1, revoked=False, reports=(-1,) * len(self.members), raised=0, hurried=False,
            verdicts=put(shared.verdicts, shared.top, number),
        )  # fmt: skip
        return self._tidy([*state[:-1]], shared)

    def _check_named(self, verdict: Verdict, infos: list[Info], shared: Shared) -> None:
        """Every culprit has the fault that it is named for."""
        allowed = {
            Cause.LOST: shared.crashed,
            Cause.UNKNOWN: shared.crashed,
            Cause.STUCK: shared.stopped,
            Cause.FAILED: shared.raised,
            # With programs of different lengths whoever ends first has left the others waiting.
            Cause.EXITED: self.everybody if self.job.odd else shared.left | shared.gave_up,
            Cause.DIVERGED: self.job.odd,
            Cause.LATE: self.everybody if shared.hurried else shared.stopped | self.job.odd | shared.gave_up,
        }
        for rank, cause in verdict.culprits:
            if not allowed.get(cause, 0) >> rank & 1:
                raise Broken(f"rank {rank} is named {cause}, which it is not: {verdict}")
