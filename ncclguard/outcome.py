"""What a guarded collective returns, and the words for what can go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclguard.errors import CollectiveFailed
    from ncclguard.incident.model import Incident


class Cause(str, Enum):
    """Why an operation failed, and why a rank is to blame; the log analyser uses the same words."""

    LATE = "late"  # alive, running other code; has not entered this operation
    DIVERGED = "diverged"  # in another collective, or the same with another shape, dtype, reduce op or source
    FAILED = "failed"  # raised while its peers waited
    EXITED = "exited"  # left normally
    LOST = "lost"  # the process or host is gone, by positive evidence
    STUCK = "stuck"  # the process exists but its interpreter does not run
    NETWORK = "network"  # every rank arrived; the transfer itself stalled or broke
    UNKNOWN = "unknown"  # evidence is absent

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict on one guarded collective, equal on all ranks that could agree; its truth value is `ok`.

    Attributes: `ok`; `agreed` (False: this rank could not reach the others' verdict and never counts it as a success);
    `op`; `op_id` (equal on all ranks); `cause` (None when ok); `culprits` (sorted global ranks); `attempts`; `chunks`
    (pieces moved); `numel`; `nbytes`; `seconds`; `algbw`, `busbw` (bytes/s, by nccl-tests' definitions);
    `participants` (global ranks that took part); `torn` (the tensor does not hold its input any more); `incident`.

    >>> import torch, ncclguard
    >>> bool(ncclguard.safe_all_reduce(torch.ones(3)))  # a single process: a successful no-op
    True
    """

    ok: bool
    agreed: bool
    op: str
    op_id: str
    cause: Cause | None
    culprits: tuple[int, ...]
    attempts: int
    chunks: int
    numel: int
    nbytes: int
    seconds: float
    algbw: float
    busbw: float
    participants: tuple[int, ...]
    torn: bool
    incident: Incident | None

    def __bool__(self) -> bool:
        return self.ok

    @property
    def error(self) -> CollectiveFailed | None:
        """The typed error of a failed outcome, not raised; None on success."""
        if self.ok:
            return None
        from ncclguard.errors import error_for

        return error_for(self)

    def raise_if_failed(self) -> Outcome:
        """Return this outcome if it is a success, else raise its typed error (see docs/errors.md)."""
        error = self.error
        if error is not None:
            raise error
        return self


_UNREAD = ("examined", "op_id", "raise_if_failed", "error", "__class__", "__dict__", "_looks")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedOutcome(Outcome):
    """A failure that knows whether anybody looked at it: the next guarded call raises one that nobody did."""

    _looks: list[bool] = field(default_factory=lambda: [False], init=False, repr=False, compare=False)

    def __getattribute__(self, name: str) -> Any:
        if name not in _UNREAD and not name.startswith("__"):
            object.__getattribute__(self, "_looks")[0] = True
        return object.__getattribute__(self, name)

    @property
    def examined(self) -> bool:
        """Whether the caller read the truth value or a field of this outcome."""
        return self._looks[0]


#: Operations whose bytes are those of the whole that is gathered or scattered, as
#: nccl-tests count; of all others, one rank's tensor.
OF_THE_WHOLE = frozenset({"all_gather", "all_gather_object", "reduce_scatter"})


def bus_factor(op: str, ranks: int) -> float:
    """Return `busbw` / `algbw` of an operation on `ranks` ranks: how much of its bytes the busiest link has to carry.

    By nccl-tests (doc/PERFORMANCE.md): all-reduce 2(n-1)/n, all-gather and reduce-scatter (n-1)/n, where bytes are
    those of the gathered or scattered whole; broadcast 1; a barrier has no bytes, so 0. 1 for any other name.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("barrier", 4)
    (1.5, 0.75, 0.0)
    """
    if op == "barrier":
        return 0.0
    share = (ranks - 1) / ranks if ranks > 0 else 0.0
    if op == "all_reduce":
        return 2 * share
    if op in OF_THE_WHOLE:
        return share
    return 1.0
