"""The exceptions, and when each is raised.

GuardError
├── GuardConfigError (also ValueError)        a setting, an environment value or a pair of limits cannot be
└── CollectiveFailed                          a guarded collective failed; carries `.outcome`
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

from ncclguard.cause import WORD, Cause
from ncclguard.incident.model import ranks_text
from ncclguard.language import Message, read, told, tr

if TYPE_CHECKING:
    from ncclguard.outcome import Outcome


class GuardError(Exception):
    """Everything that ncclguard raises by itself."""


class GuardConfigError(GuardError, ValueError):
    """A setting, an environment value or a combination of limits that cannot be; raised before anything is sent."""


class CollectiveFailed(GuardError):
    """A guarded collective failed; raised as itself for a cause that is `network` or `unknown` before the deadline.

    `outcome` is the failed `Outcome`. The text has what happened and what to do next.
    """

    kind: ClassVar[str] = "failure"

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(_text(self.kind, outcome))
        self.outcome = outcome

    def __reduce__(self) -> tuple[type[CollectiveFailed], tuple[Outcome]]:
        return type(self), (self.outcome,)


class CollectiveTimeout(CollectiveFailed, TimeoutError):
    """A rank was late or stuck, or the deadline passed (`network`, `unknown`); "timeout" is in the text."""

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
        raise ValueError(
            f"{outcome.op} {outcome.op_id} succeeded and has no error; test the outcome's truth value first"
        )
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


def _text(kind: str, outcome: Outcome) -> str:
    """What happened and what to do, in the language of this process."""
    incident = outcome.incident
    head = tr(
        "{kind} of {op} ({op_id}) after {seconds:.3g} s",
        kind=_KINDS[kind],
        op=outcome.op,
        op_id=outcome.op_id,
        seconds=outcome.seconds,
    )
    if incident is not None:
        return told(
            "{head}: {summary} {advice}", head=head, summary=read(incident.summary), advice=read(incident.advice)
        )
    who: Message = WORD[outcome.cause or Cause.UNKNOWN]
    who = tr("{cause} by {ranks}", cause=who, ranks=ranks_text(outcome.culprits)) if outcome.culprits else who
    return told("{head}: {cause}. See the logs of all ranks: no incident could be recorded here.", head=head, cause=who)


#: "timeout" stays in the text in every language: programs look for it there.
_KINDS = {"failure": tr("failure"), "timeout": tr("timeout")}
