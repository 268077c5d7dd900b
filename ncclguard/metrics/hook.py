"""The one place where the engine tells the monitoring something; it costs a comparison with None when there is none.

Imports nothing at run time, because the engine's hot path imports it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ncclguard.agreement.seat import Seat
    from ncclguard.incident.model import Incident
    from ncclguard.metrics.adjust import SettingChange
    from ncclguard.metrics.exchange import Exchange
    from ncclguard.outcome import Cause


class Observer(Protocol):
    """Hears of every guarded operation that has ended, in the caller's thread; raises nothing. Times in seconds."""

    def succeeded(self, group: str, op: str, nbytes: int, seconds: float, waited: float, attempts: int) -> None:
        """`waited`: from the call until all ranks had come, negative where that is not known."""

    def failed(
        self,
        op_id: str,
        op: str,
        nbytes: int,
        seconds: float,
        attempts: int,
        cause: Cause | None,
        culprits: tuple[int, ...],
        agreed: bool,
        incident: Incident | None,
    ) -> None:
        """The arguments are the fields of the outcome, which counts as read once somebody looks at it."""

    def changed(self, op_id: str, changes: Sequence[SettingChange]) -> None:
        """All ranks of a group have changed settings after this operation."""


#: None unless `setup_nccl_monitoring` was called.
observer: Observer | None = None

_lock = threading.Lock()
_seats: weakref.WeakKeyDictionary[Seat, Exchange | None] = weakref.WeakKeyDictionary()


def register(seat: Seat, exchange: Exchange | None) -> None:
    """A guard was made: its open calls can be looked at, and its exchange of statistics, if it has one."""
    with _lock:
        _seats[seat] = exchange


def guarded() -> list[tuple[Seat, Exchange | None]]:
    """The guards of this process."""
    with _lock:
        return list(_seats.items())


def after_fork() -> None:
    """In a forked child nothing is observed, and a lock held by another thread of the
    parent would never be released.
    """
    global observer, _lock
    observer = None
    _lock = threading.Lock()
    _seats.clear()
