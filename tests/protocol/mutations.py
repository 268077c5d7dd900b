"""Ways to break the protocol, one rule each: the checker has to catch every one, or it proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ncclguard.outcome import Cause
from ncclguard.protocol import decision
from ncclguard.protocol.decision import Action, Departure, Operation, Phase, Report, Verdict
from ncclguard.protocol.member import Entry, Member
from tests.protocol.fabric import Fabric, Name
from tests.protocol.process import Call, Draft, Driver, Process, Step
from tests.protocol.shared import Shared, put
from tests.protocol.steps import Info, State

MUTATIONS: dict[str, type[Fabric]] = {}
_OVERWRITTEN = 1_000_000  # where the second verdict of a generation is kept


def mutation(name: str) -> Callable[[type[Fabric]], type[Fabric]]:
    def register(fabric: type[Fabric]) -> type[Fabric]:
        MUTATIONS[name] = fabric
        return fabric

    return register


# ---------------------------------------------------------------------- the promise and the lock


class _KeepsMoving(Member):
    def freeze(self) -> Report:
        before = self.frozen
        report = Member.freeze(self)
        self.frozen = before
        return report


class _KeepsMovingDriver(Driver):
    member_class = _KeepsMoving


@mutation("the promise: a rank goes on moving after its report")
class NoPromise(Fabric):
    driver_class = _KeepsMovingDriver


class _CompletesFrozen(Member):
    def done(self, generation: int) -> bool:
        frozen, self.frozen = self.frozen, False
        completed = Member.done(self, generation)
        self.frozen = frozen
        return completed


class _CompletesFrozenDriver(Driver):
    member_class = _CompletesFrozen


@mutation("the promise without closing round: a small operation completes after its report")
class SmallCompletesFrozen(Fabric):
    driver_class = _CompletesFrozenDriver


class _CheckThenAct(Driver):
    def _close(self, draft: Draft, sequence: int) -> Step:
        if draft.member.frozen or draft.member.generation != draft.generation:
            return self._wait(draft)
        draft.at = "checked"  # here the lock is free, and the monitor may answer a revoke
        return draft.end()

    def act(self, process: Process) -> Step:
        draft = Draft(process)
        operation = draft.member.operation
        if operation is None:
            return self._wait(draft)
        draft.member.phase = Phase.READY
        self._send(draft, "close", operation.sequence)
        return draft.end()


@mutation("the lock: ready() checks in one lock section and acts in another")
class NoLock(Fabric):
    driver_class = _CheckThenAct


# ---------------------------------------------------------------------- the closing round, the generation


class _NoClosing(Driver):
    def _close(self, draft: Draft, sequence: int) -> Step:
        return self._finish(draft) if draft.member.ready(draft.generation) else self._wait(draft)


@mutation("the closing round: a large operation completes straight after its data")
class NoClosingRound(Fabric):
    driver_class = _NoClosing


@mutation("the generation: the verdict of the first generation is taken for every later one")
class StaleVerdict(Fabric):
    def _write(self, state: State, infos: list[Info], shared: Shared, number: int, covered: int) -> State:
        after = super()._write(state, infos, shared, number, covered)
        if shared.top:
            return after
        kept = self.shareds[after[-1]]
        return (*after[:-1], self.shared_id(kept._replace(verdicts=put(kept.verdicts, _OVERWRITTEN, number))))

    def _verdict_for(self, shared: Shared, rank: int, generation: int) -> int:
        first = self.verdicts[dict(shared.verdicts)[_OVERWRITTEN]]
        return self.verdict_id(replace(first, generation=generation))


@mutation("the generation: reports of the generation before count")
class StaleReports(Fabric):
    def _write(self, state: State, infos: list[Info], shared: Shared, number: int, covered: int) -> State:
        after = super()._write(state, infos, shared, number, covered)
        return (*after[:-1], self.shared_id(self.shareds[after[-1]]._replace(reports=shared.reports)))


class _OneCommunicator(Driver):
    def channel(self, generation: int) -> int:
        return 0


@mutation("the generation: rounds and data of the generation before count")
class StaleRounds(Fabric):
    driver_class = _OneCommunicator

    def _tidy(self, numbers: list[int], shared: Shared) -> State:
        return (*numbers, self.shared_id(shared))


# ---------------------------------------------------------------------- data that are their own opening round


class _ComparesNothing(Driver):
    def passed(self, process: Process, same: bool) -> Step:
        return super().passed(process, same or (process.at == "open" and self.program[process.call].meets))


@mutation("the mark: what streams carry is taken without comparing what they begin with")
class NoMark(Fabric):
    driver_class = _ComparesNothing


class _OpensEarly(Driver):
    def _begin(self, draft: Draft, piece: int) -> Step:
        draft.member.opened(draft.member.generation)
        return super()._begin(draft, piece)


@mutation("the mark: an operation counts as opened before the data of all have come")
class OpensEarly(Fabric):
    driver_class = _OpensEarly


# ---------------------------------------------------------------------- the verdict


@mutation("commit on a subset: one rank that is READY is enough")
class CommitOnSubset(Fabric):
    @staticmethod
    def decide(
        generation: int,
        members: tuple[int, ...],
        reports: dict[int, Report],
        departed: dict[int, Departure],
        silent: dict[int, Cause],
    ) -> Verdict:
        verdict = decision.decide(generation, members, reports, departed, silent)
        if any(report.phase_at(verdict.sequence) >= Phase.READY for report in reports.values()):
            return replace(verdict, action=Action.COMMIT, cause=None, culprits=())
        return verdict


@mutation("the resume point: the furthest piece instead of the first that is missing anywhere")
class ResumeAtMaximum(Fabric):
    @staticmethod
    def decide(
        generation: int,
        members: tuple[int, ...],
        reports: dict[int, Report],
        departed: dict[int, Departure],
        silent: dict[int, Cause],
    ) -> Verdict:
        verdict = decision.decide(generation, members, reports, departed, silent)
        return replace(verdict, from_piece=max((report.first_incomplete for report in reports.values()), default=0))


@mutation("compare-and-set: a second coordinator overwrites the verdict")
class NoCompareAndSet(Fabric):
    def _verdict_steps(
        self, state: State, infos: list[Info], shared: Shared, idle: bool, steps: list[tuple[Name, State]]
    ) -> None:
        first: list[tuple[Name, State]] = []
        super()._verdict_steps(state, infos, shared, idle, first)
        steps.extend(first)
        numbers = {dict(self.shareds[after[-1]].verdicts)[shared.top] for _, after in first}
        for name, after in first:
            written = self.shareds[after[-1]]
            for number in numbers - {dict(written.verdicts)[shared.top]}:
                verdicts = put(written.verdicts, _OVERWRITTEN + shared.top, number)
                both = written._replace(verdicts=verdicts)
                steps.append((("overwritten", *name), (*after[:-1], self.shared_id(both))))

    def _verdict_for(self, shared: Shared, rank: int, generation: int) -> int:
        verdicts = dict(shared.verdicts)
        return verdicts.get(_OVERWRITTEN + generation, verdicts[generation]) if rank == 0 else verdicts[generation]


@mutation("coverage: the verdict is written before everybody has answered")
class NoCoverage(Fabric):
    def _readings(
        self, rank: int, info: Info, shared: Shared, late: bool
    ) -> list[tuple[int, Departure | None, Cause | None]]:
        return super()._readings(rank, info, shared, late) or [(-1, None, None)]


# ---------------------------------------------------------------------- tensors, late calls, local verdicts


class _SubmitsFirst(Driver):
    def _submit(self, draft: Draft, call: Call, operation: Operation) -> bool:
        self._send_piece(draft, call, operation)
        return draft.member.progressed(draft.generation, draft.piece, call.restorable_after(draft.piece))


@mutation("the backup window: a piece is submitted before the report says what it overwrites")
class SubmitFirst(Fabric):
    driver_class = _SubmitsFirst


class _LeavesNothing(Driver):
    def hear(self, process: Process) -> Step:
        return super().hear(process)._replace(donation=None)


@mutation("the donation: a rank reports a small operation as done and does not leave its result")
class NoDonation(Fabric):
    driver_class = _LeavesNothing


class _TakesAnyVerdict(Member):
    def enter(self, operation: Operation) -> tuple[Entry, Verdict | None]:
        if self.settled and self.settled[0].sequence == self.next_sequence:
            verdict, self.settled = self.settled[0], self.settled[1:]
            self.next_sequence += 1
            return Entry.SETTLED, verdict
        return Member.enter(self, operation)


class _TakesAnyVerdictDriver(Driver):
    member_class = _TakesAnyVerdict


@mutation("late calls: the stored verdict is taken whatever was called")
class AnyVerdict(Fabric):
    driver_class = _TakesAnyVerdictDriver


class _Forgets(Member):
    def give_up(self) -> None:
        self._drop()


class _ForgetsDriver(Driver):
    member_class = _Forgets


@mutation("giving up: a local verdict forgets that the closing round was sent")
class GiveUpForgets(Fabric):
    driver_class = _ForgetsDriver


class _KeepsPlace(Member):
    def skip(self, operation: Operation) -> None:
        """Does not take a place in the sequence."""


class _KeepsPlaceDriver(Driver):
    member_class = _KeepsPlace

    def skip(self, process: Process) -> Step:
        step = super().skip(process)
        result = step.result
        assert result is not None
        return step._replace(result=result._replace(sequence=result.sequence + 1))


@mutation("giving up: a call that could not enter takes no place in the sequence")
class SkipKeepsPlace(Fabric):
    driver_class = _KeepsPlaceDriver
