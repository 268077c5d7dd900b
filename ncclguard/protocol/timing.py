"""Times of the agreement in one place, from the size of the job.

They fit each other and are equal on all ranks.

One budget: a caller returns within ``2 s + ranks / 5,000 s`` after its deadline. In that time the ranks must hear of
the revoke and answer, the coordinator must read the answers and decide, and the ranks must read the verdict: a few
looks at the store, one after the other, and for each rank some requests that the store's host works off one after the
other. So the period between two looks may grow with the job, to spare that host, but not beyond `LONGEST`.

Where the machines or the store are slower than that, a verdict of all a little later is worth more than one of each
rank for itself: a caller whose process still gets answers from the store waits up to `RESERVE` seconds longer, and the
coordinator calls nobody silent while answers keep coming, or before it has waited in proportion to the delays it has
met itself (`Pace`). Waits only ever grow by what is measured. So nobody gives up before the verdict of an undisturbed
coordinator can be there, whatever different ranks have measured. A process that gets no answers from the store does
not wait: it returns within the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Seconds after its deadline at which a caller of a small job stops waiting for a verdict; with the
#: cleaning up it has returned after 2.
GRACE: Final = 1.8
#: What each rank of the job adds, in seconds: some ten requests of 12 to 16 µs at the store's host.
SHARE: Final = 1 / 5000
#: Seconds that a caller waits longer, at most, while the store answers its process; and for which an answer counts.
#: The latter is less than GRACE: of a store that has stopped before the deadline nothing is awaited beyond that.
RESERVE: Final = 10.0
ALIVE: Final = 1.5
#: Seconds of one turn of a caller that waits, which should take a tenth of a second, from which on its process was
#: stopped or did not get its turn: it waits ALIVE longer, in which its monitor asks the store.
HELD_UP: Final = 0.5
#: Seconds without a further answer before those that have not answered may be called silent.
QUIET: Final = 0.3
#: How often a delay that the coordinator has met itself is added to its patience: what it is beyond COVERED, for which
#: the patience has room (and that of the request which all ranks make at once), and up to LONGEST_DELAY, in seconds.
#: Together less than half of RESERVE, so that callers are still there for the verdict.
PER_DELAY: Final = 4.0
COVERED: Final = 0.15
LONGEST_DELAY: Final = 1.0
#: Looks a second of all ranks together while a call is pending, where each rank asks for itself. Each costs the
#: store's host one to two requests, of 12 to 16 µs on one core (measured, TCPStore of torch 2.13): about half of what
#: it can do.
LOOKS: Final = 25_000
#: The period in seconds that is reached at 5,000 ranks; and looks a second beyond 12,000, divided by the ranks of a
#: host, which look together: with hosts of 8 they cost the store's host some 13 % of its time at any size.
LONGEST: Final = 0.2
MOST_LOOKS: Final = 60_000
#: Seconds beyond the coordinator's patience in which callers are still there at any rate: stacks that somebody is
#: fetching may come a little later.
WAIT_FOR_STACKS: Final = 0.25


def period(world_size: int) -> float:
    """Seconds between two looks of each of so many ranks, for the store's host to have time for all."""
    return min(world_size / LOOKS, max(LONGEST, world_size / MOST_LOOKS))


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds; the defaults are those of up to 400 ranks.

    >>> Timing.of(64).grace, Timing.of(64).patience
    (1.813, 1.206)
    >>> Timing.of(4000).period, Timing.of(4000).patience, Timing.of(4000).grace
    (0.16, 1.47, 2.6)
    """

    period: float = 0.05  # between two looks at the store while something is pending
    idle: float = 0.5  # the same while nothing is; hearing, answering and being read must fit the patience
    aside: float = 0.05  # between two looks at what only matters later: departures, who else is on this host
    patience: float = (
        1.2  # after the revoke (or the deadline, if later), until members that have not answered are silent
    )
    hold: float = 0.0  # for how long a rank leaves what another of its host has begun to ask for to that one
    look_after: float = 0.35  # after the revoke (or the deadline, if later), until a host's silent ranks are looked at
    covered: float = COVERED  # what the longest delay may be without the coordinator waiting longer
    takeover: float = 0.6  # without a moving pulse after which the next rank coordinates, times its place in the group
    handshake: float = 0.01  # between two tries to join the session
    leave: float = 1.0  # that a process which is ended waits for a verdict in progress, and then for its announcement
    linger: float = 0.5  # in which the others read rank 0's last verdict, and what they ask it, before it ends
    grace: float = GRACE  # after its deadline, until a caller stops waiting for a verdict

    @classmethod
    def of(cls, world_size: int, poll_active: float = 0.05, poll_idle: float = 0.5) -> Timing:
        """Return the timing of a job of so many ranks, whose monitors are to look so often, in seconds."""
        small = cls()
        look = max(poll_active, period(world_size))
        share = SHARE * world_size
        aside = max(look, min(world_size / 8000, 1.0))
        patience = round(min(small.patience, GRACE - WAIT_FOR_STACKS - 3 * look) + share / 2, 3)
        return cls(
            period=look,
            idle=max(look, round(min(poll_idle, patience - 2 * look - 0.1), 3)),
            aside=aside,
            hold=look if aside > look else 0.0,
            patience=patience,
            look_after=max(small.look_after, round(0.3 * patience, 3)),
            covered=round(COVERED + share / 8, 3),
            takeover=max(small.takeover, 4 * look) + share / 2,
            handshake=min(max(min(small.handshake, poll_active), world_size / 10_000), poll_idle),
            leave=round(small.leave + share, 3),
            linger=round(small.linger + share, 3),
            grace=round(GRACE + share, 3),
        )

    def departures(self, begun: bool) -> float:
        """Return how old knowledge of departures may be; the first is announced in the job's log (`begun`)."""
        return self.aside if begun or self.aside <= self.period else 4 * self.aside

    def caller_waits(self, since_answer: float) -> float:
        """Seconds after its deadline for which a caller waits, when the store last answered its process so long ago."""
        return self.grace + (RESERVE if since_answer < ALIVE else 0.0)

    def is_silence(self, overdue: float, since_arrival: float, delay: float) -> bool:
        """Return whether members that have not answered may be called silent.

        They should have `overdue` seconds ago; `since_arrival`: seconds since the last answer of another; `delay`: the
        longest that the coordinator has met of late.
        """
        slack = self._slack(delay)
        if self.is_over(overdue):
            return True
        return overdue >= self.patience + slack and since_arrival >= QUIET + slack

    def is_over(self, overdue: float) -> bool:
        """Return whether the coordinator waits for no answer any more, also of members that are seen to run."""
        return overdue >= self.patience + RESERVE / 2

    def taken_over(self, place: int, standing: float, delay: float) -> bool:
        """Return whether the rank at this place coordinates, the pulse having stood still for so many seconds."""
        return standing >= self.takeover * (1 + place) + self._slack(delay)

    def _slack(self, delay: float) -> float:
        """Return what is added to the coordinator's patience for a delay that it has met."""
        return PER_DELAY * max(0.0, min(delay, LONGEST_DELAY) - self.covered)


class Pace:
    """The longest delay lately: of a request to the store, or of this thread's own turn on the machine.

    A delay counts for half after `HALVED_AFTER` seconds, for a quarter after twice that: a machine that is busy delays
    again, and after one that was not the coordinator does not wait for it in later verdicts.

    >>> pace = Pace()
    >>> pace.met(0.4, now=100.0)
    >>> pace.delay(now=100.0), pace.delay(now=102.0), pace.delay(now=104.0)
    (0.4, 0.2, 0.1)
    """

    HALVED_AFTER: Final = 2.0

    def __init__(self) -> None:
        self._longest = (0.0, 0.0)  # as it was met, and when: all decay alike, so the longest stays the longest

    def met(self, seconds: float, now: float) -> None:
        seconds = min(seconds, LONGEST_DELAY)
        if seconds >= self.delay(now):
            self._longest = seconds, now

    def delay(self, now: float) -> float:
        seconds, when = self._longest
        return float(seconds * 0.5 ** ((now - when) / self.HALVED_AFTER))
