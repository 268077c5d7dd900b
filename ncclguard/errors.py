"""The exceptions, and when each is raised.

GuardError
├── GuardConfigError (also ValueError)        a setting, an environment value or a pair of limits cannot be
├── ReplicasDiffer                            replicas of a model are not alike; carries `.report`
├── CorruptState                              tensors of a saved state are not as they were; carries `.names`
└── CollectiveFailed (also RuntimeError)      a guarded collective failed; carries `.outcome`
    ├── CollectiveTimeout (also TimeoutError)   a rank was late or stuck, or the deadline passed
    ├── CollectiveMismatch                    the ranks did not call the same operation
    ├── PeerLost                              a process or host is gone
    └── PeerFailed                            a rank raised, or ended its program, while the others waited

`safe_*` raise these only when asked (`outcome.raise_if_failed()`, `on_failure="raise"`), for a failed outcome that
nobody has acknowledged, and GuardError itself when the job's store cannot be reached at the start. A wrong call raises
TypeError or ValueError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ncclguard_explain.cause import WORD, Cause
from ncclguard_explain.language import Message, beside, joined, read, received, told, tr
from ncclguard_explain.ranks import called, ranks_text

if TYPE_CHECKING:
    from ncclguard.incident.model import Incident
    from ncclguard.outcome import Outcome
    from ncclguard.replicas import ReplicaReport


class GuardError(Exception):
    """The base class of the errors that ncclguard raises by itself."""


class GuardConfigError(GuardError, ValueError):
    """Invalid settings: raised before anything is sent.

    A setting, an environment value or a combination of limits is not allowed, or a job of several ranks has no process
    group.
    """


class ReplicasDiffer(GuardError):
    """Replicas are not alike, and `check_replicas` was to stop then, or could not repair them; the same on all ranks.

    `report` is the `ReplicaReport`, whose `ranks` are those that differ from the majority.
    """

    def __init__(self, report: ReplicaReport) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[ReplicasDiffer], tuple[ReplicaReport]]:
        return type(self), (self.report,)


class CorruptState(GuardError):
    """Tensors of a state are not as they were when their checksums were taken; raised by `verified`.

    `names`: of these tensors; `count`: how many the state has.
    """

    def __init__(self, names: tuple[str, ...], count: int) -> None:
        some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        text = told(
            "{number} of {count} tensors are not as they were when their checksums were taken: {some}. Load an older "
            "checkpoint, and look for what wrote or kept this one",
            number=len(names),
            count=count,
            some=some,
        )
        super().__init__(text)
        self.names, self.count = names, count

    def __reduce__(self) -> tuple[type[CorruptState], tuple[tuple[str, ...], int]]:
        return type(self), (self.names, self.count)


class CollectiveFailed(GuardError, RuntimeError):
    """A guarded collective failed; raised as itself for a cause that is `network` or `unknown` before the deadline.

    `outcome` is the failed `Outcome`. The text has what happened and what to do next. It is a RuntimeError because
    torch's own backends raise that, so that a program which catches it for them goes on as it is.
    """

    kind: ClassVar[str] = "failure"
    _given_up = False  # set where it only says that this process has given the group up meanwhile

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(_text(self.kind, outcome))
        self.outcome = outcome

    def __reduce__(self) -> tuple[type[CollectiveFailed], tuple[Outcome]]:
        return type(self), (self.outcome,)


def repeats(error: BaseException) -> str:
    """Name an error of an earlier verdict and its operation, "CollectiveTimeout (0/7)"; "" for any other exception."""
    return f"{type(error).__name__} ({error.outcome.op_id})" if isinstance(error, CollectiveFailed) else ""


def is_repeat(text: str) -> bool:
    """Return whether a text is what `repeats` says of an error."""
    kinds: list[type[CollectiveFailed]] = [CollectiveFailed, *CollectiveFailed.__subclasses__()]
    return text.partition(" (")[0] in {kind.__name__ for kind in kinds} and text.endswith(")")


class CollectiveTimeout(CollectiveFailed, TimeoutError):
    """A rank was late or stuck, or the deadline passed (`network`, `unknown`); see `_text` for words in it."""

    kind = "timeout"


class CollectiveMismatch(CollectiveFailed):
    """The ranks called different operations, or the same one with another shape, dtype, reduce op or source."""


class PeerLost(CollectiveFailed):
    """A rank's process or host is gone."""


class PeerFailed(CollectiveFailed):
    """A rank raised an exception, or ended its program, while the others waited for it."""


def error_for(outcome: Outcome) -> CollectiveFailed:
    """Return the typed error of a failed outcome, not raised. Raises ValueError for one that is a success.

    Late and stuck ranks end in CollectiveTimeout however the call was ended; `network` and `unknown` only at the
    deadline.
    """
    if not outcome.failed:
        text = told(
            "{op} {op_id} succeeded and has no error; test the outcome's truth value first",
            op=outcome.op,
            op_id=outcome.op_id,
        )
        raise ValueError(text)
    expired = outcome.incident is not None and outcome.incident.deadline_expired
    if outcome.cause is Cause.DIVERGED:
        return CollectiveMismatch(outcome)
    if outcome.cause is Cause.LOST:
        return PeerLost(outcome)
    if outcome.cause in (Cause.FAILED, Cause.EXITED):
        return PeerFailed(outcome)
    if outcome.cause in (Cause.LATE, Cause.STUCK) or expired:
        return CollectiveTimeout(outcome)
    return CollectiveFailed(outcome)


def sentence(outcome: Outcome) -> str:
    """Say in one sentence, in the language of this process, how a call ended."""
    op, seconds = outcome.op, outcome.seconds
    if outcome.cause is None:
        who = ranks_text(outcome.participants)
        return told("{op} succeeded on {ranks} in {seconds:.3g} s.", op=op, ranks=who, seconds=seconds)
    if outcome.incident is not None:
        return headline(outcome.incident)
    why = _blamed(outcome.cause, outcome.culprits)
    return told("{op} failed after {seconds:.3g} s: {cause}.", op=op, seconds=seconds, cause=why)


def _blamed(cause: Cause, culprits: tuple[int, ...]) -> Message:
    return tr("{cause} by {ranks}", cause=WORD[cause], ranks=ranks_text(culprits)) if culprits else WORD[cause]


def _text(kind: str, outcome: Outcome) -> str:
    """Build an error's text in the language of this process: what happened, and what to do."""
    incident = outcome.incident
    what, seconds = {"op": outcome.op, "op_id": received(outcome.op_id)}, outcome.seconds
    head = tr("failure of {op} ({op_id}) after {seconds:.3g} s", **what, seconds=seconds)
    if incident is not None:  # whose summary has how long the ranks waited before the failure
        head = tr("failure of {op} ({op_id}), decided after {seconds:.3g} s", **what, seconds=seconds)
    if kind == "timeout":  # in every language in words that programs look for in the errors of torch's own backends
        head = tr("{op} ({op_id}) timed out (collective timeout after {seconds:.3g} s)", **what, seconds=seconds)
        if incident is not None and incident.deadline_expired and incident.timeout:
            limit = incident.timeout
            head = tr(
                "{op} ({op_id}) timed out (collective timeout after the limit of {limit:.3g} s)", **what, limit=limit
            )
    if incident is not None:
        summary = headline(incident)
        return told("{head}: {summary} {advice}", head=head, summary=summary, advice=read(incident.advice))
    who = _blamed(outcome.cause or Cause.UNKNOWN, outcome.culprits)
    return told("{head}: {cause}. See the logs of all ranks: no incident could be recorded here.", head=head, cause=who)


def headline(incident: Incident) -> str:
    """Say in one line what happened, and of a mismatch what the largest sides called."""
    summary = read(incident.summary)
    if len({text for text, _ in incident.sides}) < 2:
        return summary
    calls = [called(ranks_text(ranks), text) for text, ranks in incident.sides[:4]]
    return beside(f"{summary} ", told("{meaning}.", meaning=joined("; ", calls).capitalised()))
