"""What happens in guarded groups, for those who listen: metrics, the history of incidents, and drills.

A listener never changes what it is told of. Nothing is imported at run time, because every guarded call comes by here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ncclguard.coordination.group_state import OpenCall
    from ncclguard.incident.model import Incident, MembershipChange
    from ncclguard.metrics.exchange import SettingChange
    from ncclguard.outcome import Outcome


class Listener:
    """Does nothing; override what is of interest. Every method is quick and raises nothing."""

    def call_started(self, group: str, call: OpenCall) -> None:
        """A call has its place in a guarded group, by the text of its `GroupKey`; in the caller's thread."""

    def call_ended(self, group: str, call: OpenCall, outcome: Outcome | None) -> None:
        """A call returns, with None where an exception such as Ctrl-C interrupts it; in the caller's thread."""

    def call_refused(self, group: str, outcome: Outcome) -> None:
        """A call returns that had no turn in its group, or never began there; in the caller's thread."""

    def settings_changed(self, op_id: str, changes: Sequence[SettingChange]) -> None:
        """All ranks of a group have changed settings after this operation; in the caller's thread."""

    def incident_found(self, incident: Incident) -> None:
        """`watch` has the agreed incident of a collective that the guard does not carry; in the watcher's thread."""

    def membership_changed(self, change: MembershipChange) -> None:
        """The job goes on without lost ranks, or ranks came back; once on each rank, in the caller's thread."""


#: Everybody who listens, and who of them to call for what: only methods that a listener has of its own. All are
#: replaced and never changed in place, so that they can be read without a lock.
listeners: tuple[Listener, ...] = ()
call_started: tuple[Callable[[str, OpenCall], None], ...] = ()
call_ended: tuple[Callable[[str, OpenCall, Outcome | None], None], ...] = ()


def listen(listener: Listener) -> None:
    """Tell `listener` everything from now on."""
    _replace((*listeners, listener))


def leave(listener: Listener) -> None:
    """Tell `listener` no more; one that never listened is no error."""
    _replace(tuple(one for one in listeners if one is not listener))


def _replace(wanted: tuple[Listener, ...]) -> None:
    global listeners, call_started, call_ended
    listeners = wanted
    call_started = tuple(one.call_started for one in wanted if type(one).call_started is not Listener.call_started)
    call_ended = tuple(one.call_ended for one in wanted if type(one).call_ended is not Listener.call_ended)
