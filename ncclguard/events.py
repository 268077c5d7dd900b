"""Events of guarded groups and their listeners: metrics, the history of incidents, and drills.

A listener never changes what it is told of. Nothing of the package is imported at run time: every call passes here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ncclguard.coordination.group_state import OpenCall
    from ncclguard.incident.model import Incident, MembershipChange
    from ncclguard.metrics.exchange import SettingChange
    from ncclguard.metrics.records import SlowRanks
    from ncclguard.outcome import Outcome


class Listener:
    """The base class of listeners, whose methods do nothing; every method is quick and raises nothing."""

    def call_started(self, group: str, call: OpenCall) -> None:
        """A call has its place in the group's sequence; `group` is the text of a `GroupKey`. In the caller's thread."""

    def call_ended(self, group: str, call: OpenCall, outcome: Outcome | None) -> None:
        """A call returns; `outcome` is None where an exception such as Ctrl-C interrupts it. In the caller's thread."""

    def call_refused(self, group: str, outcome: Outcome) -> None:
        """A call returns that never started: refused, or without its turn in the group; in the caller's thread."""

    def settings_changed(self, op_id: str, changes: Sequence[SettingChange]) -> None:
        """All ranks of a group have changed settings, with effect after this operation; in the caller's thread."""

    def watch_started(self, known: threading.Event) -> None:
        """`watch` observes from now on; in the caller's thread. `known` is set once others can know of this process."""

    def incident_found(self, incident: Incident) -> None:
        """`watch` has the agreed incident of a collective that the guard does not carry; in the watcher's thread."""

    def slow_found(self, slow: SlowRanks | None) -> None:
        """`watch` has found who makes the job slow; None: nobody does any more. In the watcher's thread."""

    def membership_changed(self, change: MembershipChange) -> None:
        """The job goes on without lost ranks, or ranks are back; once on each rank, in the caller's thread."""


#: All listeners, and for the two frequent events the methods that listeners override. The tuples are replaced and
#: never changed in place, so that they can be read without a lock.
listeners: tuple[Listener, ...] = ()
call_started: tuple[Callable[[str, OpenCall], None], ...] = ()
call_ended: tuple[Callable[[str, OpenCall, Outcome | None], None], ...] = ()
_changing = threading.RLock()  # reentrant: a signal handler may listen, too


def listen(listener: Listener) -> None:
    """Send all events to `listener` from now on."""
    with _changing:
        _replace((*listeners, listener))


def leave(listener: Listener) -> None:
    """Send no more events to `listener`; does nothing for one that never listened."""
    with _changing:
        _replace(tuple(other for other in listeners if other is not listener))


def _replace(wanted: tuple[Listener, ...]) -> None:
    global listeners, call_started, call_ended
    listeners = wanted
    call_started = tuple(each.call_started for each in wanted if type(each).call_started is not Listener.call_started)
    call_ended = tuple(each.call_ended for each in wanted if type(each).call_ended is not Listener.call_ended)
