"""Runs an evaluation to a result that all ranks share: try, agree, try again with
smaller batches, or give up together.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ncclguard.errors import CollectiveFailed, GuardError
from ncclguard.evaluation import decision, partial, scope, state
from ncclguard.evaluation.batches import BatchSize, divided
from ncclguard.evaluation.meeting import gather, tell
from ncclguard.evaluation.results import (
    Action,
    Decision,
    EvaluationReport,
    Failure,
    Kind,
    Meeting,
    Met,
    NotMet,
    RankResult,
    Terms,
)
from ncclguard.evaluation.single import alone_in_the_world, countdown
from ncclguard.incident.render import ranks_text
from ncclguard.incident.stacks import describe_exception
from ncclguard.outcome import Outcome

log = logging.getLogger("ncclguard")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of an evaluation: what to run, on what, and how. Times in seconds."""

    label: str
    run: Callable[[int], Any]  # evaluates with batches that many times smaller
    owner: Any
    models: Sequence[torch.nn.Module]
    keepers: Iterable[state.Keeper]
    group: dist.ProcessGroup | None
    timeout: float
    barrier_timeout: float
    max_attempts: int
    fallback: Any
    batch_size: BatchSize
    combine: Callable[[list[Any]], Any] | None
    accept_partial: bool
    same_result: bool
    terms: Terms


@dataclass(frozen=True)
class Ended:
    """What an evaluation returns, why, and the rank that logs it."""

    result: Any
    report: EvaluationReport
    logging_rank: int
    error: Exception | None = None  # of what stopped it


@dataclass(frozen=True, slots=True)
class Part:
    """The partial result that covers most so far; with `combine`, the ranks' own parts as they were sent."""

    done: int
    total: int
    result: Any


class Evaluation:
    """The tries of one evaluation on this rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._members = scope.members_of(job.group)
        self._rank = dist.get_rank() if len(self._members) > 1 else self._members[0]
        self._failures: list[Failure] = []
        self._attempts = 0
        self._part: Part | None = None
        self._logging_rank = self._members[0]
        self._restore = state.keep(job.keepers)

    def run(self) -> Ended:
        """Try until all ranks are content, or all give up; raises only what interrupts the program itself."""
        for attempt in range(1, self._job.max_attempts + 1):
            opening = self._open(attempt)
            decided = decision.at_opening(opening, attempt, self._members)
            if decided.action not in (Action.RUN, Action.RUN_SINGLE):
                return self._end(decided, opening)
            self._attempts = attempt
            divisor = decided.divisor * 2 ** (attempt - 1)
            if decided.action is Action.RUN_SINGLE:
                decided, met, result = self._try_on_one(attempt, divisor, decided.single_rank)
            else:
                decided, met, result = self._try(attempt, divisor)
            if decided.action is not Action.ACCEPT:
                self._restore()
                state.release_memory()
            if decided.action is not Action.RETRY:
                return self._end(decided, met, result)
            self._note(decided)
            log.warning("ncclguard: %s: %s; trying again", self._job.label, decided.failure)
        raise AssertionError("the last try is decided by at_end")

    # ------------------------------------------------------------------ one try

    def _open(self, attempt: int) -> Meeting:
        name = f"{self._job.label}, beginning of try {attempt}"
        meeting = self._gather(self._job.terms, name, self._job.barrier_timeout, repeat=False)
        if isinstance(meeting, Met):
            self._logging_rank = decision.first_with_sink(meeting.values, self._members)
        return meeting

    def _try(self, attempt: int, divisor: int) -> tuple[Decision, Meeting, Any]:
        job = self._job
        shares = job.same_result and self._rank == self._members[0]

        def evaluate() -> tuple[Any, Any]:
            with divided(job.owner, job.batch_size, divisor):
                result = job.run(divisor)
            return result, self._packed(result, "the result") if shares else None

        recorder = partial.begin(latest_only=job.combine is not None)
        try:
            found, mine = self._inside(f"{job.label}, try {attempt}", evaluate)
        finally:
            partial.end()
        result, shared = found or (None, None)
        mine = replace(self._with_part(mine, recorder), result=shared)
        decided, meeting = self._meet(mine, f"{job.label}, end of try {attempt}", attempt, job.max_attempts)
        self._weigh_part(decided, meeting, recorder, attempt)
        if job.same_result and decided.action is Action.ACCEPT and isinstance(meeting, Met):
            return self._taken(meeting.values[0].result, attempt)
        return decided, meeting, result

    def _try_on_one(self, attempt: int, divisor: int, chosen: int) -> tuple[Decision, Meeting, Any]:
        job = self._job
        sent: tuple[Any, RankResult] | None = None
        if self._rank == chosen:
            restore = state.keep(job.keepers)
            partial.begin()
            try:
                with divided(job.owner, job.batch_size, divisor), alone_in_the_world(job.models):
                    sent = self._packed(job.run(divisor), "the result"), RankResult(chosen)
            except Exception as error:  # noqa: BLE001 - whatever the evaluation raises is what this is for
                sent = None, self._result_of(error)
            finally:
                partial.end()
            restore()  # the other ranks have not evaluated: whatever is equal on all ranks stays equal
        waiting = nullcontext() if sent is not None else countdown(f"the {job.label} on rank {chosen}", job.timeout)
        with waiting:
            meeting = self._tell(sent, chosen, f"{job.label} on rank {chosen}, try {attempt}")
        shared = None
        if isinstance(meeting, Met):
            shared, told = meeting.values[0]
            meeting = Met((told,))
        decided = decision.at_single_end(meeting, attempt, job.max_attempts)
        return self._taken(shared, attempt) if decided.action is Action.ACCEPT else (decided, meeting, None)

    def _taken(self, shared: Any, attempt: int) -> tuple[Decision, Meeting, Any]:
        """The result of one rank, once every rank could read it: where one cannot, none returns it."""
        try:
            result, mine = self._unpacked(shared), RankResult(self._rank)
        except Exception as error:  # noqa: BLE001 - whatever reading an object of the program's own raises
            result, mine = None, self._result_of(error)
        name = f"{self._job.label}, result of try {attempt}"
        decided, meeting = self._meet(mine, name, attempt, self._job.max_attempts)
        return decided, meeting, result

    def _inside(self, name: str, work: Callable[[], Any]) -> tuple[Any, RankResult]:
        """What the program's own code gives on this rank, and how it went; no exception of it goes further."""
        inside = scope.Try()
        try:
            with scope.one_try(name, self._members, self._job.timeout) as inside:
                return work(), RankResult(self._rank)
        except Exception as error:  # noqa: BLE001 - whatever the evaluation raises is what this is for
            return None, self._result_of(error, inside.failures)

    def _meet(self, mine: RankResult, name: str, attempt: int, max_attempts: int) -> tuple[Decision, Meeting]:
        """Tell the others how it went here, and decide with them."""
        meeting = self._gather(mine, name, self._job.timeout, repeat=True)
        scope.settle(self._members)
        return decision.without_followers(decision.at_end(meeting, attempt, max_attempts), mine), meeting

    def _result_of(self, error: Exception, failures: Sequence[Outcome] = ()) -> RankResult:
        """What this rank says of its exception; the exception itself is let go, with all that its frames hold."""
        outcome = _failed_collective(error, failures)
        if outcome is not None:
            text = outcome.incident.summary if outcome.incident is not None else str(outcome.error)
            log.info("ncclguard: rank %d: %s ended here: %s", self._rank, self._job.label, text)
            return RankResult(self._rank, Kind.COLLECTIVE, text, outcome.cause, outcome.culprits)
        text = describe_exception(error)
        log.warning("ncclguard: rank %d: %s failed here: %s", self._rank, self._job.label, text)
        return RankResult(self._rank, Kind.OUT_OF_MEMORY if _is_out_of_memory(error) else Kind.RAISED, text)

    # ------------------------------------------------------------------ partial results

    def _with_part(self, mine: RankResult, recorder: partial.Recorder) -> RankResult:
        """With what was recorded. A part that cannot be sent fails nothing as long as no rank needs it."""
        mine = replace(mine, done=tuple(sorted(recorder.results)), total=recorder.total)
        if self._job.combine is None or not self._job.accept_partial or not mine.done:
            return mine
        try:
            return replace(mine, part=self._packed(recorder.latest, "the partial result"))
        except ValueError as error:
            log.warning("ncclguard: rank %d: %s: %s", self._rank, self._job.label, error)
            return replace(mine, unsent=describe_exception(error))

    def _weigh_part(self, decided: Decision, meeting: Meeting, recorder: partial.Recorder, attempt: int) -> None:
        """Keep the partial result that covers most; which one is the same on all ranks."""
        if decided.action is Action.ACCEPT or not isinstance(meeting, Met) or not self._job.accept_partial:
            return
        best = self._part.done if self._part is not None else 0
        if self._job.combine is None:
            if decided.done > best:
                self._part = Part(decided.done, decided.total, recorder.results[decided.done])
            return
        unsent = [replace(value, kind=Kind.RAISED, error=value.unsent) for value in meeting.values if value.unsent]
        if unsent:
            self._failures.append(decision.failure_of(unsent, attempt))
            return
        done = sum(max(value.done, default=0) for value in meeting.values)
        if done > best:
            total = sum(value.total for value in meeting.values)
            self._part = Part(done, total, [value.part for value in meeting.values if value.done])

    def _combined(self, part: Part, combine: Callable[[list[Any]], Any]) -> tuple[Decision, Meeting, Any]:
        """The parts of all ranks combined, if that goes well on every rank; else none has a partial result."""
        name = f"{self._job.label}, combining"
        result, mine = self._inside(name, lambda: combine([self._unpacked(each) for each in part.result]))
        decided, meeting = self._meet(mine, f"end of {name}", self._attempts, self._attempts)
        self._restore()
        return decided, meeting, result

    # ------------------------------------------------------------------ the end

    def _note(self, decided: Decision) -> None:
        if decided.failure is not None:
            self._failures.append(decided.failure)

    def _end(self, decided: Decision, meeting: Meeting, result: Any = None) -> Ended:
        self._note(decided)
        part, done, total = self._part, 0, 0
        if decided.action is Action.GIVE_UP and part is not None:
            decided = Decision(Action.ACCEPT)
            result = part.result
            if self._job.combine is not None:
                decided, meeting, result = self._combined(part, self._job.combine)
                self._note(decided)
            if decided.action is Action.ACCEPT:
                decided, done, total = Decision(Action.PARTIAL), part.done, part.total
        action = decided.action
        if action not in (Action.ACCEPT, Action.PARTIAL):
            result = self._job.fallback
        report = EvaluationReport(self._job.label, action, tuple(self._failures), self._attempts, done, total)
        error = meeting.error if isinstance(meeting, NotMet) and action is Action.STOP else None
        return Ended(result, report, self._logging_rank, error)

    # ------------------------------------------------------------------ meeting

    def _packed(self, value: Any, what: str) -> Any:
        """As it is sent to other ranks. Raises ValueError here, and not in the exchange that the others wait in."""
        if len(self._members) == 1:
            return value
        try:
            return pickle.dumps(value)
        except Exception as error:  # whatever an object's own reduction raises
            raise ValueError(
                f"{what} cannot be pickled ({error}): use plain data, such as numbers, lists and tensors"
            ) from error

    def _unpacked(self, sent: Any) -> Any:
        return sent if len(self._members) == 1 else pickle.loads(sent)

    def _gather(self, value: Any, name: str, timeout: float, *, repeat: bool) -> Meeting:
        if len(self._members) == 1:
            return Met((value,))
        return gather(value, len(self._members), name, timeout, self._job.group, repeat)

    def _tell(self, value: Any, source: int, name: str) -> Meeting:
        if len(self._members) == 1:
            return Met((value,))
        return tell(value, source, name, self._job.timeout, self._job.group)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in str(error).lower()


def _failed_collective(error: BaseException, failures: Sequence[Outcome]) -> Outcome | None:
    """The outcome of the failed collective that an exception is, or came from; None for
    a failure of this rank's own.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, CollectiveFailed):
            return current.outcome
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    if isinstance(error, RuntimeError) and not _is_out_of_memory(error) and failures:
        return failures[0]  # through C++, such as a hook of DDP, the error comes as a plain RuntimeError
    return None


def stopped(ended: Ended) -> Exception:
    """What is raised when the job cannot go on."""
    if ended.error is not None:
        return ended.error
    return GuardError(f"{ended.report}\n({ranks_text(ended.report.culprits)})")
