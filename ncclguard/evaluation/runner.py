"""Runs one evaluation to a result that all ranks share: try, agree, then try again, take what there is, or give up."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from ncclguard.cause import Cause
from ncclguard.collectives import safe_all_gather_object, safe_broadcast_object_list
from ncclguard.config import current_config, seconds
from ncclguard.errors import CollectiveFailed, GuardConfigError, GuardError
from ncclguard.evaluation import decision, inside, state
from ncclguard.evaluation.decision import (
    Action,
    Decision,
    Failure,
    Kind,
    Meeting,
    Met,
    NotMet,
    RankResult,
    Terms,
)
from ncclguard.evaluation.inside import BatchSize
from ncclguard.evaluation.report import EvaluationReport
from ncclguard.incident.stacks import describe_exception
from ncclguard.incident.text import ranks_text
from ncclguard.outcome import Outcome

log = logging.getLogger("ncclguard")

#: How often ranks meet again at the end of a try because a rank was still inside it, in a collective that met theirs.
REPEATS = 16
#: Such a verdict says that not all ranks had come to the end yet. They will, because those inside have failed with it.
_STILL_INSIDE = (Cause.DIVERGED, Cause.FAILED)
#: Exceptions that say that the program or its data is wrong. With the state as it was before, each try raises them,
#: while the reason of others, such as an OSError or a RuntimeError of torch, may be gone in the next try.
_WRONG = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError, TypeError,
    ValueError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `resilient_evaluate`, which says what each means, checked once. Times in seconds.

    Raises GuardConfigError, TypeError or ValueError for options that cannot be.
    """

    timeout: float = 1800.0
    barrier_timeout: float = 300.0
    max_attempts: int = 3
    fallback: Any = (0.0, 0.0)
    batch_size: BatchSize = None
    metric_prefix: str = "eval/"
    monitor: Any = None
    accept_partial: bool = True
    same_result: bool = False
    combine: Callable[[list[Any]], Any] | None = None
    on_lost: Literal["fail", "checkpoint"] = "fail"
    save: Callable[[], object] | None = None
    group: dist.ProcessGroup | None = None
    models: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    keepers: Sequence[state.Keeper] = ()

    def __post_init__(self) -> None:
        for name in ("timeout", "barrier_timeout"):
            value = seconds(getattr(self, name), name)
            if value is None:
                raise TypeError(f"{name} must be seconds or a timedelta, not None: give for example 300")
            object.__setattr__(self, name, value)
        if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int):
            raise TypeError(f"max_attempts must be a whole number, not {type(self.max_attempts).__name__}")
        if self.max_attempts < 1:
            raise GuardConfigError(f"max_attempts must be at least 1, got {self.max_attempts}")
        if self.on_lost not in ("fail", "checkpoint"):
            raise GuardConfigError(f'on_lost must be "fail" or "checkpoint", got {self.on_lost!r}')
        if (self.on_lost == "checkpoint") != (self.save is not None):
            raise GuardConfigError('on_lost="checkpoint" and save=, a function without arguments, need each other')


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of an evaluation: what to run, and on what."""

    label: str
    run: Callable[[int], Any]  # evaluates with batches that many times smaller
    owner: Any
    models: Sequence[torch.nn.Module]
    keepers: Iterable[state.Keeper]
    options: Options
    terms: Terms


@dataclass(frozen=True)
class Ended:
    """What an evaluation returns, why, and the rank that logs it."""

    result: Any
    report: EvaluationReport
    logging_rank: int
    error: Exception | None = None  # of the meeting that failed, where the job cannot go on


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
        self._options = job.options
        self._members = inside.members_of(job.options.group)
        self._rank = dist.get_rank() if len(self._members) > 1 else self._members[0]
        self._failures: list[Failure] = []
        self._attempts = 0
        self._part: Part | None = None
        self._logging_rank = self._members[0]
        self._restore = state.keep(job.keepers)

    def run(self) -> Ended:
        """Try until all ranks are content, or all give up; raises only what interrupts the program itself."""
        for attempt in range(1, self._options.max_attempts + 1):
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
        meeting = self._gather(self._job.terms, name, self._options.barrier_timeout, repeat=False)
        if isinstance(meeting, Met):
            self._logging_rank = decision.first_with_sink(meeting.values, self._members)
        return meeting

    def _try(self, attempt: int, divisor: int) -> tuple[Decision, Meeting, Any]:
        job = self._job
        shares = self._options.same_result and self._rank == self._members[0]

        def evaluate() -> tuple[Any, Any]:
            with inside.divided(job.owner, self._options.batch_size, divisor):
                result = job.run(divisor)
            return result, self._packed(result, "the result") if shares else None

        with inside.recorded(latest_only=self._options.combine is not None) as recorder:
            found, mine = self._inside(f"{job.label}, try {attempt}", evaluate)
        result, shared = found or (None, None)
        mine = replace(self._with_part(mine, recorder), result=shared)
        decided, meeting = self._meet(mine, f"{job.label}, end of try {attempt}", attempt, self._options.max_attempts)
        self._weigh_part(decided, meeting, recorder, attempt)
        if self._options.same_result and decided.action is Action.ACCEPT and isinstance(meeting, Met):
            return self._taken(meeting.values[0].result, attempt)
        return decided, meeting, result

    def _try_on_one(self, attempt: int, divisor: int, chosen: int) -> tuple[Decision, Meeting, Any]:
        job = self._job
        sent: tuple[Any, RankResult] | None = None
        if self._rank == chosen:
            restore = state.keep(job.keepers)
            smaller = inside.divided(job.owner, self._options.batch_size, divisor)
            try:
                with inside.recorded(), smaller, inside.alone_in_the_world(job.models):
                    sent = self._packed(job.run(divisor), "the result"), RankResult(chosen)
            except Exception as error:  # noqa: BLE001 - whatever the evaluation raises is what this is for
                sent = None, self._result_of(error)
            restore()  # the other ranks have not evaluated: whatever is equal on all ranks stays equal
        what = f"the {job.label} on rank {chosen}"
        with nullcontext() if sent is not None else inside.countdown(what, self._options.timeout):
            meeting = self._tell(sent, chosen, f"{job.label} on rank {chosen}, try {attempt}")
        shared = None
        if isinstance(meeting, Met):
            shared, result = meeting.values[0]
            meeting = Met((result,))
        decided = decision.at_end(meeting, attempt, self._options.max_attempts)
        return self._taken(shared, attempt) if decided.action is Action.ACCEPT else (decided, meeting, None)

    def _taken(self, shared: Any, attempt: int) -> tuple[Decision, Meeting, Any]:
        """The result of one rank, if every rank can read it; where one rank cannot, no rank returns it."""
        try:
            result, mine = self._unpacked(shared), RankResult(self._rank)
        except Exception as error:  # noqa: BLE001 - whatever reading an object of the program's own raises
            result, mine = None, self._result_of(error)
        name = f"{self._job.label}, result of try {attempt}"
        decided, meeting = self._meet(mine, name, attempt, self._options.max_attempts)
        return decided, meeting, result

    def _inside(self, name: str, work: Callable[[], Any]) -> tuple[Any, RankResult]:
        """What the program's own code returns on this rank, and how the try ended; its exceptions go no further."""
        redirection = None
        try:
            with inside.one_try(name, self._members, self._options.timeout) as redirection:
                return work(), RankResult(self._rank)
        except Exception as error:  # noqa: BLE001 - whatever the evaluation raises is what this is for
            return None, self._result_of(error, redirection.failures if redirection is not None else ())

    def _meet(self, mine: RankResult, name: str, attempt: int, max_attempts: int) -> tuple[Decision, Meeting]:
        """Exchange with the other ranks how the try ended, and decide what all do next."""
        meeting = self._gather(mine, name, self._options.timeout, repeat=True)
        inside.settle(self._members)
        decided = decision.at_end(meeting, attempt, max_attempts)
        if isinstance(meeting, NotMet):
            decided = decision.without_followers(decided, mine)
        return decided, meeting

    def _result_of(self, error: Exception, failures: Sequence[Outcome] = ()) -> RankResult:
        """What this rank says of its exception, which itself is not kept, because its frames hold memory."""
        outcome = _failed_collective(error, failures)
        if outcome is not None:
            text = outcome.incident.summary if outcome.incident is not None else str(outcome.error)
            log.info("ncclguard: rank %d: %s ended here: %s", self._rank, self._job.label, text)
            return RankResult(self._rank, Kind.COLLECTIVE, text, outcome.cause, outcome.culprits)
        text = describe_exception(error)
        log.warning("ncclguard: rank %d: %s failed here: %s", self._rank, self._job.label, text)
        if any(map(_is_out_of_memory, _with_origins(error))):
            return RankResult(self._rank, Kind.OUT_OF_MEMORY, text)
        wrong = isinstance(error, _WRONG) and not isinstance(error, OSError) and not failures
        return RankResult(self._rank, Kind.WRONG if wrong else Kind.RAISED, text)

    # ------------------------------------------------------------------ partial results

    def _with_part(self, mine: RankResult, recorder: inside.Recorder) -> RankResult:
        """Add what was recorded; a part that cannot be sent fails nothing as long as no rank needs it."""
        mine = replace(mine, done=tuple(sorted(recorder.results)), total=recorder.total)
        if self._options.combine is None or not self._options.accept_partial or not mine.done:
            return mine
        try:
            return replace(mine, part=self._packed(recorder.latest, "the partial result"))
        except ValueError as error:
            log.warning("ncclguard: rank %d: %s: %s", self._rank, self._job.label, error)
            return replace(mine, unsent=describe_exception(error))

    def _weigh_part(self, decided: Decision, meeting: Meeting, recorder: inside.Recorder, attempt: int) -> None:
        """Keep the partial result that covers most; all ranks choose the same."""
        if decided.action is Action.ACCEPT or not isinstance(meeting, Met) or not self._options.accept_partial:
            return
        best = self._part.done if self._part is not None else 0
        if self._options.combine is None:
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
            if self._options.combine is not None:
                decided, meeting, result = self._combined(part, self._options.combine)
                self._note(decided)
            if decided.action is Action.ACCEPT:
                decided, done, total = Decision(Action.PARTIAL), part.done, part.total
        action = decided.action
        if action not in (Action.ACCEPT, Action.PARTIAL):
            result = self._options.fallback
        report = EvaluationReport(self._job.label, action, tuple(self._failures), self._attempts, done, total)
        error = meeting.error if isinstance(meeting, NotMet) and action is Action.STOP else None
        return Ended(result, report, self._logging_rank, error)

    # ------------------------------------------------------------------ meeting

    def _packed(self, value: Any, what: str) -> Any:
        """Pickle what other ranks will read. Raises ValueError now, and not in the exchange where the ranks wait."""
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
        """Exchange an object with all ranks; with `repeat`, wait for ranks whose try has only just failed."""
        group = self._options.group

        def once() -> tuple[Outcome, tuple[Any, ...]]:
            slots: list[Any] = [None] * len(self._members)
            outcome = safe_all_gather_object(slots, value, group, timeout=timeout, name=name, on_lost="fail")
            return outcome, tuple(slots)

        return Met((value,)) if len(self._members) == 1 else meet(once, repeat)

    def _tell(self, value: Any, source: int, name: str) -> Meeting:
        """Give all ranks the object of global rank `source`; the other ranks wait for it here."""
        timeout, group = self._options.timeout, self._options.group

        def once() -> tuple[Outcome, tuple[Any, ...]]:
            slots = [value]
            outcome = safe_broadcast_object_list(slots, source, group, timeout=timeout, name=name, on_lost="fail")
            return outcome, tuple(slots)

        return Met((value,)) if len(self._members) == 1 else meet(once, repeat=True)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in str(error).lower()


def _with_origins(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that it was raised from or while they were handled."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or current.__context__


def _failed_collective(error: BaseException, failures: Sequence[Outcome]) -> Outcome | None:
    """The outcome of the failed collective that an exception is, or came from; None for an error of this rank's own."""
    for each in _with_origins(error):
        if isinstance(each, CollectiveFailed):
            return each.outcome
    if isinstance(error, RuntimeError) and not _is_out_of_memory(error) and failures:
        return failures[0]  # through C++, such as a hook of DDP, the error comes as a plain RuntimeError
    return None


def stopped(ended: Ended) -> Exception:
    """What is raised when the job cannot go on."""
    if ended.error is not None:
        return ended.error
    return GuardError(f"{ended.report}\n({ranks_text(ended.report.culprits)})")


# ---------------------------------------------------------------------- meeting


def meet(once: Callable[[], tuple[Outcome, tuple[Any, ...]]], repeat: bool) -> Meeting:
    """Communicate once, or with `repeat` until nobody is in the try any more; a failure is returned, never raised."""
    for _ in range(REPEATS if repeat else 1):
        outcome, values = _outcome_of(once)
        if outcome.ok:
            return Met(values)
        gone = _gone(outcome)
        if gone or not outcome.agreed or outcome.cause not in _STILL_INSIDE:
            break
    return NotMet(
        outcome.cause or Cause.UNKNOWN,
        outcome.culprits,
        agreed=outcome.agreed,
        gone=gone,
        report=str(outcome.incident or ""),
        error=outcome.error,
    )


def _outcome_of(once: Callable[[], tuple[Outcome, tuple[Any, ...]]]) -> tuple[Outcome, tuple[Any, ...]]:
    """The outcome of this exchange, also where failures are raised, and not that of an older call nobody looked at."""
    while True:
        try:
            return once()
        except CollectiveFailed as error:
            if current_config().on_failure == "raise":
                return error.outcome, ()
            # A failure that the evaluation ignored, raised by the next call on the group; each is raised once.
            log.warning("ncclguard: the evaluation did not look at a failed outcome: %s", error)


def _gone(outcome: Outcome) -> bool:
    """Whether the process of a culprit has ended, and not only its try."""
    if outcome.cause in (Cause.LOST, Cause.EXITED):
        return True
    ranks = outcome.incident.ranks if outcome.incident is not None else ()
    return any(report.rank in outcome.culprits and report.state == "departed" for report in ranks)
