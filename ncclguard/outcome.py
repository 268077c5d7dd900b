"""The result of a guarded collective."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from ncclguard.errors import CollectiveFailed, error_for, sentence
from ncclguard.spelling import no_attribute
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import told

if TYPE_CHECKING:
    from ncclguard.incident.model import Incident

__all__ = ["Cause", "Outcome", "of_incident"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict on one guarded collective, equal on all ranks that could agree; its truth value is `ok`.

    Attributes: `agreed` (False: this rank could not reach the others' verdict and never counts it as a success);
    `op`; `op_id` (equal on all ranks); `cause` (None for a success); `culprits` (sorted global ranks); `attempts`;
    `chunks` (pieces moved); `numel`; `nbytes`; `seconds`; `algbw`, `busbw` (bytes/s, by nccl-tests' definitions);
    `participants` (global ranks that took part); `torn` (the tensor does not hold its input any more); `incident`.

    A failure must be acknowledged: by its truth value, `ok`, `error`, `raise_if_failed()` or `acknowledge()`. The next
    guarded call of the group raises the typed error of a failure that nobody has acknowledged.

    >>> import torch, ncclguard
    >>> bool(ncclguard.safe_all_reduce(torch.ones(3)))  # a single process: a successful no-op
    True
    """

    agreed: bool = True
    op: str
    op_id: str
    cause: Cause | None = None
    culprits: tuple[int, ...] = ()
    attempts: int = 1
    chunks: int = 0
    numel: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    algbw: float = 0.0
    busbw: float = 0.0
    participants: tuple[int, ...] = ()
    torn: bool = False
    incident: Incident | None = None
    _acknowledged: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    def __bool__(self) -> bool:
        return self.ok

    if not TYPE_CHECKING:  # a type checker is to see that there is no such attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Tell of the tensor that was given where somebody takes the outcome for the reduced one."""
            tensor = getattr(sys.modules.get("torch"), "Tensor", None)
            meant = hasattr(tensor, name) and not name.startswith("__")
            hint = told("the result is in the tensor that the call was given, and this tells how the call ended")
            raise no_attribute(self, name, hint if meant else "")

    def __str__(self) -> str:
        """Say how the call ended, in one sentence; acknowledges nothing. `repr` has every field."""
        return sentence(self)

    @property
    def ok(self) -> bool:
        """Return whether the collective succeeded; asking acknowledges a failure."""
        self.acknowledge()
        return self.cause is None

    @property
    def failed(self) -> bool:
        """Return whether the collective failed; asking acknowledges nothing."""
        return self.cause is not None

    @property
    def acknowledged(self) -> bool:
        """Return whether the program has asked how the collective ended."""
        return bool(self._acknowledged)

    def acknowledge(self) -> None:
        """Take note of a failure, so that the next guarded call does not raise its error."""
        if not self._acknowledged:
            self._acknowledged.append(True)

    @property
    def error(self) -> CollectiveFailed | None:
        """The typed error of a failed outcome, not raised; None on success."""
        return None if self.ok else error_for(self)

    def raise_if_failed(self) -> Outcome:
        """Return this outcome if it is a success, else raise its typed error (see docs/errors.md)."""
        error = self.error
        if error is not None:
            raise error
        return self


def of_incident(incident: Incident, seconds: float, torn: bool) -> Outcome:
    """Build the failure of a collective that the guard did not carry out: an incident, and no figures but the time."""
    return Outcome(
        agreed=incident.agreed,
        op=incident.op,
        op_id=incident.op_id,
        cause=incident.cause,
        culprits=incident.culprits,
        seconds=seconds,
        torn=torn,
        incident=incident,
    )
