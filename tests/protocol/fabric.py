"""All ranks together: what may happen next in a state of the model, and what it leads to.

A state is a tuple of small integers: one per rank for its `Process`, one for what they share. Every step of a rank is computed once by
the production code and remembered, so that exploring is looking up. Which steps are left out, and why nothing is lost by it,
is said at `Fabric.successors`; `reduced=False` leaves out none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from ncclguard.agreement.decision import Action, Departure, Operation, Phase, Report, TroubleKind, Verdict, decide
from ncclguard.outcome import Cause
from tests.protocol.process import IN_CALL, Broken, Call, Driver, Label, Process, Step, mask
from tests.protocol.shared import Shared, decided, put, returned

State = tuple[int, ...]
Name = tuple[object, ...]
Decide = Callable[..., Verdict]

#: A rank that stops again and again, each time before it answers, is followed for so many generations.
GENERATIONS = 6
#: After so many, all ended by the transport, an operation fails.
ATTEMPTS = Operation(0, 0).max_attempts
#: Faults that cost one of the budget each.
FAULTS = ("crash", "stop", "reset", "deadline", "raise", "exit", "give up")


@dataclass(frozen=True)
class Job:
    """What is explored: one program per rank, how many faults of which kinds."""

    programs: tuple[tuple[Call, ...], ...]
    faults: int
    kinds: tuple[str, ...] = FAULTS
    odd: int = 0  # ranks whose program differs, as a bit mask: they may be named for it
    reduced: bool = True

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(len(self.programs)))


class Info:
    """What choosing the next step needs of a process, once computed."""

    __slots__ = (
        "alive",
        "at",
        "attempt",
        "completed",
        "due",
        "frozen",
        "generation",
        "group",
        "in_call",
        "index",
        "lengths",
        "over",
        "participants",
        "sequence",
        "troubled",
    )  # fmt: skip

    def __init__(self, process: Process, driver: Driver) -> None:
        member = process.member
        self.at = process.at
        self.alive = process.at not in ("end", "dead")
        self.in_call = process.at in IN_CALL
        self.frozen = member.frozen
        self.troubled = member.trouble is not None
        self.generation = member.generation
        self.attempt = driver.channel(process.generation)
        self.lengths = {generation: len(labels) for generation, labels in process.logs}
        self.index = self.lengths.get(self.attempt, 0)
        self.group = process.group
        self.over = process.call >= len(driver.program)
        self.participants = member.participants
        self.sequence = member.operation.sequence if member.operation is not None else 0
        self.completed = member.completed
        self.due = self.sequence or member.next_sequence  # the operation whose result is returned here next


class Fabric:
    """The steps of one job; `explore` in exhaustive.py walks them."""

    driver_class: type[Driver] = Driver
    decide: Decide = staticmethod(decide)

    def __init__(self, job: Job) -> None:
        self.job = job
        self.members = job.members
        self.everybody = mask(self.members)
        self.drivers = [self.driver_class(rank, self.members, job.programs[rank]) for rank in self.members]
        self.processes: list[Process] = []
        self.infos: list[Info] = []
        self._process_ids: dict[Process, int] = {}
        self.shareds: list[Shared] = []
        self._shared_ids: dict[Shared, int] = {}
        self.reports: list[Report] = []
        self._report_ids: dict[object, int] = {}
        self.verdicts: list[Verdict] = []
        self._verdict_ids: dict[object, int] = {}
        self._steps: dict[tuple[object, ...], tuple[int, Step]] = {}
        self._decisions: dict[tuple[object, ...], int] = {}

    def start(self) -> State:
        processes = [self.process_id(driver.start(), rank) for rank, driver in enumerate(self.drivers)]
        return (*processes, self.shared_id(Shared(self.job.faults, reports=(-1,) * len(self.members))))

    def describe(self, state: State) -> str:
        """For people: the state behind the numbers."""
        lines = [
            f"  rank {rank}: {self.processes[state[rank]]._replace(snapshot=None)} {self.processes[state[rank]].member}"
            for rank in self.members
        ]  # type: ignore[arg-type]
        return "\n".join([*lines, f"  {self.shareds[state[-1]]}"])

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

    def _may_pass(self, infos: list[Info], info: Info) -> bool:
        """Whether everybody has sent what this rank waits in."""
        attempt, index = info.attempt, info.index
        return all(infos[other].lengths.get(attempt, 0) >= index for other in info.group)

    def _same(self, state: State, info: Info) -> bool:
        labels: set[Label] = {self.processes[state[other]].log(info.attempt)[info.index - 1] for other in info.group}
        if len({label[0] for label in labels}) > 1:
            raise Broken(f"a round met data: {labels}")
        return len(labels) == 1

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
                    steps.append((("forgo", rank), self._own(state, rank, "forgo", shared=gave_up)))
            elif "give up" in kinds and info.at == "idle" and not (info.over or info.frozen or shared.gave_up & bit):
                gave_up = unlucky._replace(gave_up=shared.gave_up | bit)
                steps.append((("forgo", rank), self._own(state, rank, "no_turn", shared=gave_up)))

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

    # ------------------------------------------------------------------ single steps

    def _own(self, state: State, rank: int, name: str, *arguments: object, shared: Shared | None = None) -> State:
        """A step of one rank's caller."""
        if shared is None:
            shared = self.shareds[state[-1]]
        number, step = self._step(state[rank], rank, name, *arguments)
        if step.revoke and self.infos[number].generation == shared.top:
            shared = shared._replace(revoked=True)
        if step.result is not None:
            shared = returned(shared, rank, step.result)
            if step.result.ok and step.result.closing:
                self._check_closed(state, rank, step.result.sequence)
        after = [*state[:-1]]
        after[rank] = number
        return self._tidy(after, shared)

    def _check_closed(self, state: State, rank: int, sequence: int) -> None:
        """DONE anywhere means READY everywhere."""
        for other in self.processes[state[rank]].group:
            process = self.processes[state[other]]
            member = process.member
            if process.at in ("dead", "end") or member.generation > self.processes[state[rank]].generation:
                continue  # gone, or bound by a verdict, which `_write` has checked
            operation = member.operation
            ready = operation is not None and operation.sequence == sequence and member.phase is Phase.READY
            if not ready and member.completed < sequence:
                raise Broken(f"rank {rank} is DONE with operation {sequence}, rank {other} not READY: {member}")

    def _hear(self, state: State, rank: int) -> State:
        shared = self.shareds[state[-1]]
        number, step = self._step(state[rank], rank, "hear")
        assert step.report is not None
        reports = list(shared.reports)
        reports[rank] = self.report_id(step.report)
        shared = shared._replace(reports=tuple(reports))
        return self._shown(state, rank, number, step, shared)

    def _adopt(self, state: State, rank: int) -> State:
        shared = self.shareds[state[-1]]
        info = self.infos[state[rank]]
        verdict = self._verdict_for(shared, rank, info.generation)
        donated = dict(shared.results).get(info.sequence, 0)
        number, step = self._step(state[rank], rank, "adopt", verdict, donated)
        if step.revoke and self.infos[number].generation == shared.top:
            shared = shared._replace(revoked=True)
        if step.result is not None:
            shared = returned(shared, rank, step.result)
        after = [*state[:-1]]
        after[rank] = number
        return self._tidy(after, shared)

    def _verdict_for(self, shared: Shared, rank: int, generation: int) -> int:
        return dict(shared.verdicts)[generation]

    def _end(self, state: State, rank: int, shared: Shared) -> State:
        number, step = self._step(state[rank], rank, "end")
        return self._shown(state, rank, number, step, shared)

    def _crash(self, state: State, rank: int, infos: list[Info], shared: Shared) -> State:
        info = infos[rank]
        if info.at == "close" and self._may_pass(infos, info):
            _, step = self._step(state[rank], rank, "passed", self._same(state, info))
            if step.result is not None:  # it may have returned just before
                shared = returned(shared, rank, step.result)
        number, step = self._step(state[rank], rank, "crash")
        return self._shown(state, rank, number, step, shared)

    def _shown(self, state: State, rank: int, number: int, step: Step, shared: Shared) -> State:
        if step.donation is not None:
            sequence, total = step.donation
            # Overwrites: after a shrink the operation is done again, and a donor that is gone may have left the first result.
            shared = shared._replace(results=put(shared.results, sequence, total))
        after = [*state[:-1]]
        after[rank] = number
        return self._tidy(after, shared)

    def _step(self, number: int, rank: int, name: str, *arguments: object) -> tuple[int, Step]:
        key = (number, name, *arguments)
        known = self._steps.get(key)
        if known is None:
            process = self.processes[number]
            if name == "adopt":
                verdict, donated = arguments
                assert isinstance(verdict, int)
                arguments = (self.verdicts[verdict], donated)
            step = getattr(self.drivers[rank], name)(process, *arguments)
            known = self._steps[key] = (self.process_id(step.process, rank), step)
        return known

    def _tidy(self, numbers: list[int], shared: Shared) -> State:
        """Forget what nobody can read any more: sent collectives and verdicts of generations that everybody has left."""
        oldest = min((self.infos[n].generation for n in numbers if self.infos[n].alive), default=shared.top)
        if shared.verdicts and shared.verdicts[0][0] < oldest:
            shared = shared._replace(verdicts=tuple(pair for pair in shared.verdicts if pair[0] >= oldest))
        if shared.records or shared.results:
            due = min((self.infos[n].due for n in numbers if self.infos[n].alive), default=1 << 30)
            if (shared.records and shared.records[0][0] < due) or (shared.results and shared.results[0][0] < due):
                shared = shared._replace(
                    records=tuple(pair for pair in shared.records if pair[0] >= due),
                    results=tuple(pair for pair in shared.results if pair[0] >= due),
                )
        for rank, number in enumerate(numbers):
            if any(generation < oldest for generation in self.infos[number].lengths):
                numbers[rank] = self._pruned(number, rank, oldest)
        return (*numbers, self.shared_id(shared))

    def _pruned(self, number: int, rank: int, oldest: int) -> int:
        key = (number, "prune", oldest)
        known = self._steps.get(key)
        if known is None:
            process = self.processes[number]
            process = process._replace(logs=tuple(pair for pair in process.logs if pair[0] >= oldest))
            known = self._steps[key] = (self.process_id(process, rank), Step(process))
        return known[0]

    # ------------------------------------------------------------------ numbers for values

    def process_id(self, process: Process, rank: int) -> int:
        number = self._process_ids.get(process)
        if number is None:
            number = self._process_ids[process] = len(self.processes)
            self.processes.append(process)
            self.infos.append(Info(process, self.drivers[rank]))
        return number

    def shared_id(self, shared: Shared) -> int:
        number = self._shared_ids.get(shared)
        if number is None:
            number = self._shared_ids[shared] = len(self.shareds)
            self.shareds.append(shared)
        return number

    def report_id(self, report: Report) -> int:
        key = (
            report.rank, report.generation, report.done, report.operation, report.phase, report.first_incomplete,
            report.restorable_from, report.attempt, report.trouble,
        )  # fmt: skip
        number = self._report_ids.get(key)
        if number is None:
            number = self._report_ids[key] = len(self.reports)
            self.reports.append(report)
        return number

    def verdict_id(self, verdict: Verdict) -> int:
        number = self._verdict_ids.get(verdict)
        if number is None:
            number = self._verdict_ids[verdict] = len(self.verdicts)
            self.verdicts.append(verdict)
        return number
