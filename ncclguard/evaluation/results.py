"""What ranks tell each other about one try of an evaluation, what they decide from it, and the report for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ncclguard.agreement.incidents import ADVICE
from ncclguard.incident.render import ranks_text
from ncclguard.outcome import Cause


class Kind(str, Enum):
    """How one rank's try ended."""

    FINE = "fine"
    OUT_OF_MEMORY = "out of memory"
    RAISED = "raised"  # an exception of its own
    COLLECTIVE = "collective"  # a guarded collective failed: the reason is with the culprits of its verdict


@dataclass(frozen=True, slots=True)
class Terms:
    """What one rank brings to the beginning of a try."""

    enabled: bool = True
    divisor: int = 1  # of the batch size
    single_rank: int | None = None  # evaluate on this rank only
    sink: bool = False  # whether it has a place to log metrics to


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank brings to the end of a try."""

    rank: int
    kind: Kind = Kind.FINE
    error: str = ""  # type, place and message of the exception
    cause: Cause | None = None  # of the failed collective
    culprits: tuple[int, ...] = ()
    done: tuple[int, ...] = ()  # the counts at which a partial result was recorded
    total: int = 0  # what `done` would be in the end, 0 where it is not known
    part: Any = None  # the latest partial result, pickled, where parts of ranks are combined
    unsent: str = ""  # why it could not be pickled
    result: Any = None  # the first rank's, pickled, where all ranks return that

    @property
    def fine(self) -> bool:
        return self.kind is Kind.FINE


@dataclass(frozen=True, slots=True)
class Met:
    """All ranks were there; `values` in the order of the group's ranks."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class NotMet:
    """The ranks did not come together; with `agreed` all of them know, with `gone` a process has ended."""

    cause: Cause
    culprits: tuple[int, ...]
    agreed: bool = True
    gone: bool = False
    report: str = ""
    error: Exception | None = field(default=None, compare=False)


Meeting = Met | NotMet


class Action(str, Enum):
    """What all ranks do next."""

    RUN = "run"
    RUN_SINGLE = "run on a single rank"
    SKIP = "skip"  # switched off
    ACCEPT = "accept"
    RETRY = "try again"
    PARTIAL = "accept a partial result"
    GIVE_UP = "give up"
    STOP = "stop"  # a process is gone, or there is no agreement: end the job with the report


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one try failed; the same on all ranks."""

    attempt: int
    cause: Cause
    culprits: tuple[int, ...]
    errors: tuple[tuple[int, str], ...] = ()  # by rank
    out_of_memory: bool = False
    report: str = ""

    def __str__(self) -> str:
        by = f", {ranks_text(self.culprits)}" if self.culprits else ""
        memory = ", out of memory" if self.out_of_memory else ""
        errors = "".join(f"\n    rank {rank}: {error}" for rank, error in self.errors)
        return f"try {self.attempt}: {self.cause}{memory}{by}{errors}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do after they met, or failed to."""

    action: Action
    failure: Failure | None = None
    done: int = 0  # count at which all ranks recorded a partial result in this try
    total: int = 0
    divisor: int = 1
    single_rank: int = 0


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """What became of one evaluation; the same on all ranks that could agree.

    Attributes: `label` (which evaluation); `action` (the last one taken: ACCEPT, PARTIAL, GIVE_UP, SKIP or STOP);
    `failures` (of each try that failed, and of combining partial results, in order); `attempts` (tries that were
    begun); `done`, `total` (what the partial result covers); `cause`, `culprits` (of the last failure). `str()` is for
    people.
    """

    label: str
    action: Action
    failures: tuple[Failure, ...] = ()
    attempts: int = 0
    done: int = 0
    total: int = 0

    @property
    def failed(self) -> bool:
        """Whether no complete result came out although one was wanted."""
        return self.action in (Action.PARTIAL, Action.GIVE_UP, Action.STOP)

    @property
    def cause(self) -> Cause | None:
        return self.failures[-1].cause if self.failures else None

    @property
    def culprits(self) -> tuple[int, ...]:
        return self.failures[-1].culprits if self.failures else ()

    def __str__(self) -> str:
        lines = [f"ncclguard {self.label}: {self._what()}"]
        lines += [f"  {failure}" for failure in self.failures]
        reports = [failure.report for failure in self.failures if failure.report]
        if reports:
            lines.append(reports[-1])
        if self.failures:
            lines.append(f"  what to do: {self._advice()}")
        return "\n".join(lines)

    def _what(self) -> str:
        tries = f"{self.attempts} {'try' if self.attempts == 1 else 'tries'}"
        of = f"{self.done} of {self.total}" if self.total else str(self.done)
        return {
            Action.ACCEPT: f"complete after {tries}.",
            Action.PARTIAL: f"failed after {tries}; a partial result is returned, from {of}.",
            Action.GIVE_UP: f"failed after {tries}; the fallback is returned and training goes on."
            if self.attempts
            else "skipped, because not all ranks arrived; the fallback is returned and training goes on.",
            Action.SKIP: "skipped, because it is switched off; the fallback is returned.",
        }.get(self.action, f"stopped after {tries}: the job cannot go on.")

    def _advice(self) -> str:
        last = self.failures[-1]
        if self.action is Action.STOP:
            return "Restart the job from its last checkpoint, after a look at the ranks above."
        if last.out_of_memory:
            return (
                "Evaluate with smaller batches, or say with `batch_size` where their size is, so that it can be halved."
            )
        return ADVICE[last.cause]
