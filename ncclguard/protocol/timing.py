"""The times of the agreement in one place, from the size of the job, so that they
fit each other and are equal on all ranks.

A caller returns within 2 s after its deadline, whatever the size. In that time the ranks must hear of the revoke and
answer, the coordinator must read the answers and decide, and the ranks must read the verdict: a few looks at the store,
one after the other. So the period between two looks may grow with the job, to spare the store's host, but not beyond
`LONGEST`; and what is left of the 2 s for silent ranks shrinks as the period grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Seconds after its deadline at which a caller stops waiting for a verdict; with the
#: cleaning up it has returned after 2.
GRACE: Final = 1.8
#: Looks a second of all ranks together while a call is pending. Each costs the store's host one to two
#: requests, of 12 to 16 µs on one core (measured, TCPStore of torch 2.13): about half of what it can do.
LOOKS: Final = 25_000
#: The longest period, in seconds: reached at 5,000 ranks, beyond which the store's host has to do more.
LONGEST: Final = 0.2
#: Seconds that the coordinator waits beyond its patience for stacks that somebody is fetching.
WAIT_FOR_STACKS: Final = 0.25


def period(world_size: int) -> float:
    """Seconds between two looks of each of so many ranks, for the store's host to have time for all."""
    return min(world_size / LOOKS, LONGEST)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds; the defaults are those of up to 400 ranks.

    >>> Timing.of(4000).period, Timing.of(4000).patience
    (0.16, 1.07)
    """

    period: float = 0.05  # between two looks at the store while something is pending
    idle: float = 0.5  # the same while nothing is; hearing, answering and being read must fit the patience
    aside: float = 0.05  # between two looks at what only matters later: departures, who else is on this host
    patience: float = (
        1.2  # after the revoke (or the deadline, if later), until members that have not answered are silent
    )
    takeover: float = 0.6  # without a moving pulse after which the next rank coordinates, times its place in the group
    handshake: float = 0.01  # between two tries to join the session

    @classmethod
    def of(cls, world_size: int, poll_active: float = 0.05, poll_idle: float = 0.5) -> Timing:
        """Those of a job of so many ranks, in which the monitors are to look so often, in seconds, if they can."""
        small = cls()
        look = max(poll_active, period(world_size))
        patience = round(min(small.patience, GRACE - WAIT_FOR_STACKS - 3 * look), 3)
        return cls(
            period=look,
            idle=max(look, round(min(poll_idle, patience - 2 * look - 0.1), 3)),
            aside=max(look, min(world_size / 8000, 1.0)),
            patience=patience,
            takeover=max(small.takeover, 4 * look),
            handshake=min(max(min(small.handshake, poll_active), world_size / 10_000), poll_idle),
        )
