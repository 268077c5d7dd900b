"""The messages of ranks about one try of an evaluation, the decision that follows from them, and the report.

The decisions are pure functions of what all ranks exchanged, or of the agreed verdict on an exchange that failed: equal
input on every rank, equal decision on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ncclguard.protocol.decision import PRECEDENCE
from ncclguard_explain.cause import ADVICE, WORD, Cause
from ncclguard_explain.language import Message, joined, received, say, told, tr
from ncclguard_explain.ranks import ranks_text


class Kind(str, Enum):
    """The way in which the try of one rank ended."""

    FINE = "fine"
    OUT_OF_MEMORY = "out of memory"
    RAISED = "raised"  # the rank's own exception, whose reason may be gone in the next try, such as an unreadable file
    WRONG = "wrong"  # the rank's own exception, which each try would raise: the program or its data is wrong
    INTERRUPTED = "interrupted"  # by Ctrl-C or sys.exit, say: the program will probably end there
    COLLECTIVE = "collective"  # a guarded collective failed: the reason is with the culprits of its verdict


@dataclass(frozen=True, slots=True)
class Terms:
    """One rank's message at the beginning of a try."""

    enabled: bool = True
    divisor: int = 1  # of the batch size
    single_rank: int | None = None  # evaluate on this rank only
    sink: bool = False  # whether the rank has a place to log metrics to


@dataclass(frozen=True, slots=True)
class RankResult:
    """One rank's message at the end of a try."""

    rank: int
    kind: Kind = Kind.FINE
    error: str = ""  # type, place and message of the exception
    cause: Cause | None = None  # of the failed collective
    culprits: tuple[int, ...] = ()
    incident: str = ""  # of the failed collective, by which its report is found
    done: tuple[int, ...] = ()  # the counts at which a partial result was recorded
    total: int = 0  # what `done` would be in the end, 0 where it is not known
    part: Any = None  # the latest partial result, pickled, where parts of ranks are combined
    unsent: str = ""  # why the latest partial result could not be pickled
    result: Any = None  # of the first rank, pickled, where all ranks return that rank's result

    @property
    def fine(self) -> bool:
        return self.kind is Kind.FINE


@dataclass(frozen=True, slots=True)
class Met:
    """The messages of all ranks at a meeting; `values` are in the order of the group's ranks."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class NotMet:
    """The reason why a meeting failed; with `agreed` all ranks know the same, with `gone` a process has ended.

    With `elsewhere` the ranks that had come were at the beginning of an evaluation, but not of the same one.
    """

    cause: Cause
    culprits: tuple[int, ...]
    agreed: bool = True
    gone: bool = False
    incident: str = ""
    report: str = ""
    elsewhere: bool = False
    errors: tuple[tuple[int, str], ...] = ()  # by rank: the evaluation that it is in
    error: Exception | None = field(default=None, compare=False)


Meeting = Met | NotMet


class Action(str, Enum):
    """The next step of all ranks."""

    RUN = "run"
    RUN_SINGLE = "run on a single rank"
    SKIP = "skip"  # switched off
    ACCEPT = "accept"
    RETRY = "try again"
    PARTIAL = "accept a partial result"
    GIVE_UP = "give up"
    STOP = "stop"  # a process is gone or interrupted, or there is no agreement: end the job with the report


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why one try failed; the same on all ranks."""

    attempt: int
    cause: Cause
    culprits: tuple[int, ...]
    errors: tuple[tuple[int, str], ...] = ()  # by rank
    out_of_memory: bool = False
    incident: str = ""  # whose report has the stacks and says what to do
    report: str = ""  # the whole incident, where reports are switched off
    final: bool = False  # the remaining tries were not made, because each would raise the same error
    began: bool = True  # False: not all ranks came to the beginning of the try

    @property
    def summary(self) -> Message:
        """The failed try, the reason and the ranks to blame, in one line."""
        cause: Message = WORD[self.cause]
        if self.out_of_memory:
            cause = tr("{cause}, out of memory", cause=cause)
        if self.culprits:
            cause = joined(", ", (cause, ranks_text(self.culprits)))
        if self.incident:
            cause = tr("{cause} (incident {name})", cause=cause, name=self.incident)
        if self.began:
            return tr("try {number}: {cause}", number=self.attempt, cause=cause)
        return tr("before try {number}: {cause}", number=self.attempt, cause=cause)

    @property
    def details(self) -> str:
        """The ranks' errors, each as a line of its own that begins with a line break."""
        lines = (joined(": ", (ranks_text([rank]), received(error))) for rank, error in self.errors)
        return "".join(f"\n    {say(line)}" for line in lines)

    def __str__(self) -> str:
        return f"{say(self.summary)}{self.details}"


@dataclass(frozen=True, slots=True)
class Decision:
    """The next step of all ranks, after a meeting or after one that failed."""

    action: Action
    failure: Failure | None = None
    done: int = 0  # count at which all ranks recorded a partial result in this try
    total: int = 0
    divisor: int = 1
    single_rank: int = 0


# ---------------------------------------------------------------------- decisions


def at_opening(meeting: Meeting, attempt: int, ranks: Sequence[int]) -> Decision:
    """Decide from the `Terms` of all ranks whether to run a try; not if a rank is switched off or missing."""
    if isinstance(meeting, NotMet):
        return Decision(_unmet(meeting, Action.GIVE_UP), replace(_failure_to_meet(meeting, attempt), began=False))
    terms: Sequence[Terms] = meeting.values
    if not all(term.enabled for term in terms):
        return Decision(Action.SKIP)
    divisor = max(term.divisor for term in terms)
    chosen = [term.single_rank for term in terms if term.single_rank is not None]
    if chosen and min(chosen) in ranks:
        return Decision(Action.RUN_SINGLE, divisor=divisor, single_rank=min(chosen))
    return Decision(Action.RUN, divisor=divisor)


def at_end(meeting: Meeting, attempt: int, max_attempts: int) -> Decision:
    """Decide what follows a try, from the `RankResult` of each rank that evaluated.

    Whether a partial result is taken in place of GIVE_UP is the caller's to decide.
    """
    again = Action.RETRY if attempt < max_attempts else Action.GIVE_UP
    if isinstance(meeting, NotMet):
        return Decision(_unmet(meeting, again), _failure_to_meet(meeting, attempt))
    results: Sequence[RankResult] = meeting.values
    done, total = common_part(results)
    if all(result.fine for result in results):
        return Decision(Action.ACCEPT, done=done, total=total)
    failure = failure_of(results, attempt)
    if any(result.kind is Kind.INTERRUPTED for result in results):
        again = Action.STOP
    if again is Action.RETRY and would_fail_again(results):
        again, failure = Action.GIVE_UP, replace(failure, final=True)
    return Decision(again, failure, done=done, total=total)


def would_fail_again(results: Sequence[RankResult]) -> bool:
    """Return whether errors of the program are the whole reason why a try failed, so that each try would fail.

    A failed collective is a part of that reason only where its verdict names a rank whose error it is, or a rank that
    itself gave up the try, or where nobody was missing but the ranks were in different calls. Whatever else went wrong
    beside such an error, such as a lack of memory or a late rank, may have brought it about.
    """
    wrong = {result.rank for result in results if result.kind is Kind.WRONG}
    failed = {result.rank for result in results if not result.fine}

    def explained(result: RankResult) -> bool:
        if result.kind is not Kind.COLLECTIVE:
            return result.fine or result.kind is Kind.WRONG
        if result.cause is Cause.FAILED:
            return set(result.culprits) <= failed
        return set(result.culprits) <= wrong and (bool(result.culprits) or result.cause is Cause.DIVERGED)

    return bool(wrong) and all(map(explained, results))


def failure_of(results: Sequence[RankResult], attempt: int) -> Failure:
    """Return why a try failed, blaming ranks that raised exceptions of their own, else those that the verdicts name."""
    own = [
        result for result in results if result.kind in (Kind.OUT_OF_MEMORY, Kind.RAISED, Kind.WRONG, Kind.INTERRUPTED)
    ]
    if own:
        return Failure(
            attempt,
            Cause.FAILED,
            tuple(sorted(result.rank for result in own)),
            tuple(sorted((result.rank, result.error) for result in own)),
            any(result.kind is Kind.OUT_OF_MEMORY for result in own),
            _incident_of(result for result in results if set(result.culprits) <= {other.rank for other in own}),
        )
    with_verdict = [result for result in results if result.cause is not None]
    # No rank has an exception of its own, so "rank 3 failed" means that rank 3 gave up the try after a verdict.
    with_verdict = [result for result in with_verdict if result.cause is not Cause.FAILED] or with_verdict
    cause = min((result.cause for result in with_verdict if result.cause), key=PRECEDENCE.index, default=None)
    decisive = [result for result in with_verdict if result.cause is cause]
    culprits = {rank for result in decisive for rank in result.culprits}
    errors = tuple(sorted((result.rank, result.error) for result in decisive))[:1]
    return Failure(
        attempt, cause or Cause.UNKNOWN, tuple(sorted(culprits)), errors, incident=_incident_of(iter(decisive))
    )


def _incident_of(results: Iterator[RankResult]) -> str:
    return next((result.incident for result in results if result.incident), "")


def without_followers(decided: Decision, mine: RankResult) -> Decision:
    """Blame the ranks that this rank's own verdict named, and not those that left because the try had failed."""
    failure = decided.failure
    if failure is None or not mine.culprits or not set(mine.culprits) < set(failure.culprits):
        return decided
    own = replace(failure, cause=mine.cause or failure.cause, culprits=mine.culprits, incident=mine.incident)
    return replace(decided, failure=own)


def common_part(results: Sequence[RankResult]) -> tuple[int, int]:
    """Return the largest count at which *every* rank recorded a partial result, and the total; (0, 0) for none."""
    common = set(results[0].done) if results else set()
    for result in results[1:]:
        common &= set(result.done)
    done = max(common, default=0)
    return (done, max(result.total for result in results)) if done else (0, 0)


def first_with_sink(terms: Sequence[Terms], ranks: Sequence[int]) -> int:
    """Return the rank that logs metrics, so that each is logged once: the first that has a place to log them to."""
    return next((rank for rank, term in zip(ranks, terms, strict=True) if term.sink), ranks[0])


def _unmet(meeting: NotMet, otherwise: Action) -> Action:
    return Action.STOP if meeting.gone or not meeting.agreed else otherwise


def _failure_to_meet(meeting: NotMet, attempt: int) -> Failure:
    return Failure(
        attempt, meeting.cause, meeting.culprits, meeting.errors, incident=meeting.incident, report=meeting.report
    )


log = logging.getLogger("ncclguard")

#: Why no other try was made although more were allowed.
_FINAL = tr("an exception of this type says that the program or its data is wrong, so each try would raise it.")

_ON_ALL_RANKS = tr(
    "If some ranks were not to come to this evaluation at all, call it on all ranks, not under `if rank == 0:`: each "
    "rank takes part in it."
)


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The report of one evaluation; the same on all ranks that could agree.

    Attributes: `label` (which evaluation); `action` (the last one taken: ACCEPT, PARTIAL, GIVE_UP, SKIP or STOP);
    `failures` (of each try that failed, and of combining partial results, in order); `attempts` (tries that were
    begun); `done`, `total` (what the partial result covers); `fallback` (whether the program has given one);
    `cause`, `culprits` (of the last failure). `str()` is for people; it refers to the report of an incident, which has
    the stacks, by the incident's name.
    """

    label: str
    action: Action
    failures: tuple[Failure, ...] = ()
    attempts: int = 0
    done: int = 0
    total: int = 0
    fallback: bool = True

    @property
    def failed(self) -> bool:
        """Return whether no complete result came out although one was wanted."""
        return self.action in (Action.PARTIAL, Action.GIVE_UP, Action.STOP)

    @property
    def cause(self) -> Cause | None:
        return self.failures[-1].cause if self.failures else None

    @property
    def culprits(self) -> tuple[int, ...]:
        return self.failures[-1].culprits if self.failures else ()

    @property
    def headline(self) -> str:
        """The result of the evaluation, and the reason why the last try failed, in one line."""
        text = told("ncclguard {name}: {text}", name=self.label, text=self._what())
        if not self.failures:
            return text
        return told("{headline} ({failure})", headline=text, failure=say(self.failures[-1].summary))

    def __str__(self) -> str:
        lines = [told("ncclguard {name}: {text}", name=self.label, text=self._what())]
        lines += [f"  {failure}" for failure in self.failures]
        reports = [failure.report for failure in self.failures if failure.report]
        if reports:
            lines.append(reports[-1])
        if any(failure.final for failure in self.failures):
            lines.append(f"  {told('no other try was made: {because}', because=_FINAL)}")
        advice = self._advice()
        if advice:
            lines.append(f"  {told('what to do: {advice}', advice=advice)}")
        return "\n".join(lines)

    def _what(self) -> Message:
        tries = tr("1 try") if self.attempts == 1 else tr("{count} tries", count=self.attempts)
        of = tr("{done} of {count}", done=self.done, count=self.total) if self.total else str(self.done)
        instead = tr("the fallback is returned")
        if not self.fallback:
            instead = tr("NaN is returned, because no `fallback=` was given")
        if self.action is Action.ACCEPT:
            return tr("complete after {tries}.", tries=tries)
        if self.action is Action.PARTIAL:
            return tr("failed after {tries}; a partial result is returned, from {part}.", tries=tries, part=of)
        if self.action is Action.GIVE_UP and self.attempts:
            return tr("failed after {tries}; {text}, and training goes on.", tries=tries, text=instead)
        if self.action is Action.GIVE_UP and self._elsewhere:
            return tr(
                "skipped, because the ranks are in different evaluations; {text}, and training goes on.", text=instead
            )
        if self.action is Action.GIVE_UP:
            return tr("skipped, because not all ranks arrived; {text}, and training goes on.", text=instead)
        if self.action is Action.SKIP:
            return tr("skipped, because it is switched off; {text}.", text=instead)
        return tr("stopped after {tries}: the job cannot go on.", tries=tries)

    @property
    def _elsewhere(self) -> bool:
        """Return whether the ranks told each other that they are in different evaluations."""
        return bool(self.failures) and not self.failures[-1].began and bool(self.failures[-1].errors)

    def _advice(self) -> Message | str:
        """Return what to do next; "" where an incident's report, or the lines above, say it."""
        if not self.failures:
            return ""
        last = self.failures[-1]
        if self._elsewhere:
            return tr(
                "Call each evaluation on all ranks or on none: a rank has left one out. Where there are several at one "
                "step, nobody can tell which: do not trust the values of those before this one at its step."
            )
        absent = not self.attempts and last.cause in (Cause.LATE, Cause.DIVERGED, Cause.FAILED, Cause.EXITED)
        if self.action is Action.STOP:
            restart = tr("Restart the job from its last checkpoint, after a look at the ranks above.")
            return joined(" ", (restart, _ON_ALL_RANKS)) if absent else restart
        if absent:
            return _ON_ALL_RANKS
        if last.out_of_memory:
            return tr(
                "Evaluate with smaller batches, or say with `batch_size` where their size is, so that it can be halved."
            )
        return "" if last.incident or last.report else ADVICE[last.cause]


def metrics_of(report: EvaluationReport, prefix: str) -> dict[str, float]:
    """Return the metrics of a failed evaluation: numbers only, since not every sink takes text.

    >>> from ncclguard.evaluation import Action, EvaluationReport, Failure
    >>> from ncclguard import Cause
    >>> report = EvaluationReport("evaluation", Action.GIVE_UP, (Failure(1, Cause.LATE, (2,)),), 1)
    >>> for name, value in metrics_of(report, "eval/").items():
    ...     print(name, value)
    eval/evaluation_failed 1.0
    eval/evaluation_attempts 1.0
    eval/evaluation_cause_late 1.0
    eval/evaluation_culprit 2.0
    """
    metrics = {f"{prefix}evaluation_failed": 1.0, f"{prefix}evaluation_attempts": float(report.attempts)}
    if report.cause is not None:
        metrics[f"{prefix}evaluation_cause_{report.cause.value}"] = 1.0
    if report.culprits:
        metrics[f"{prefix}evaluation_culprit"] = float(report.culprits[0])
    if report.action is Action.PARTIAL:
        metrics[f"{prefix}evaluation_partial_done"] = float(report.done)
        if report.total:
            metrics[f"{prefix}evaluation_partial_total"] = float(report.total)
    return metrics


def log_to(sink: Any, metrics: Mapping[str, float], step: int | None) -> bool:
    """Log metrics with the program's logger, of whatever kind; return whether it took them.

    An exception of the sink is logged and goes no further. What a sink has is looked for in this order:
    `log_metrics(metrics, step)`; `add_scalar(name, value, step)` (TensorBoard's SummaryWriter); `log(metrics,
    step=step)` (a W&B run, an Accelerator); a callable `(metrics, step)`.
    """
    if sink is None:
        return False
    try:
        if hasattr(sink, "log_metrics"):
            sink.log_metrics(dict(metrics), step)
        elif hasattr(sink, "add_scalar"):
            for name, value in metrics.items():
                sink.add_scalar(name, value, step)
        elif hasattr(sink, "log"):
            current = getattr(sink, "step", None)  # W&B drops what is logged for a step that is over
            over = step is None or (isinstance(current, int) and step < current)
            sink.log(dict(metrics), **({} if over else {"step": step}))
        elif callable(sink):
            sink(dict(metrics), step)
        else:
            log.warning(
                "ncclguard: %s",
                told(
                    "{kind} has none of log_metrics, add_scalar and log: metrics go nowhere",
                    "log",
                    kind=type(sink).__name__,
                ),
            )
            return False
    except Exception:
        log.exception(
            "ncclguard: %s", told("the metrics of a failed evaluation could not be logged; training goes on", "log")
        )
        return False
    return True
