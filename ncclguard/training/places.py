"""The place of a lost rank that no process of its own host takes: offered to hosts that stand by.

The first of the ranks that go on offers the place of a missing rank when nobody has waited for it for some seconds, and
counts while it does. A process of `ncclguard run --stand-by` takes an offer whose counter moves: so nobody takes the
place of a rank that is back, or one in a job that is gone. From then on its launcher counts while that process is there
and not stopped; when it does not, the place is offered again. Who has joined is written by the first rank, too.

These keys lie beneath the prefixes that torch gives the ranks' store, because who stands by has no rank and does not
know them. An offer holds for the generation in which it was made: agents that all start their ranks again begin
another.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ncclguard import lifecycle, torch_compat
from ncclguard.coordination.store import AgreementStore, Stored
from ncclguard.training import declaration
from ncclguard_explain.language import told

if TYPE_CHECKING:
    from ncclguard.training.joining import Waiting

log = logging.getLogger("ncclguard")

PREFIX: Final = "ncclguard/places"
#: Seconds between two looks at the store, on either side.
LOOK_EVERY: Final = 0.5
#: Seconds for a process of the rank's own host to wait for the place first: a spare of that host takes about two.
OWN_HOST_FIRST: Final = 5.0
#: Seconds in which the launcher of who has taken a place must have counted; then the place is offered again.
VOUCHED_FOR: Final = 20.0
#: The same at the end of the job, when nothing is lost by patience.
PATIENCE: Final = 60.0
#: Seconds between two looks, beyond which an offer's counter may have moved long ago.
FRESH: Final = 3.0
#: So many places are offered at a time, and so many offers are looked at.
AT_MOST: Final = 256

#: In the place of a counter: the process has ended.
ENDED: Final = "ended"
_GENERATION: Final = "TORCHELASTIC_RESTART_COUNT"

#: What a process that takes a place has to have as the others do; its own are RANK and LOCAL_RANK.
_ENVIRONMENT: Final = (
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@dataclass(frozen=True, slots=True)
class Place(Stored):
    """A rank's place: its number among all that were offered in this job, and the variables of its process."""

    number: int
    rank: int
    env: dict[str, str]

    @property
    def generation(self) -> str:
        """Return the generation in which it is to be had; see `generation`."""
        return self.env.get(_GENERATION, "0")


class _Vouched:
    """A place that was taken, as far as the launcher of who took it counts."""

    def __init__(self, number: int, now: float) -> None:
        self._number = number
        self._said: str | None = None
        self._moved = now

    def holds(self, places: AgreementStore, now: float, within: float) -> bool:
        """Return whether it has counted within so many seconds."""
        said = places.read(f"alive/{self._number}")
        if said != self._said:
            self._said, self._moved = said, now
        return said != ENDED and now - self._moved <= within


def beneath(store: Any) -> AgreementStore:
    """Return the same connection for the keys of this module."""
    return AgreementStore(torch_compat.base_store(store), PREFIX)


class Offers:
    """On the first rank that goes on: the places of missing ranks that nobody waits for, in the monitor's thread."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._due: dict[int, float] = {}  # missing ranks -> when their places are offered
        self._open: dict[int, int] = {}  # of those, the number of the offer
        self._taken: dict[int, _Vouched] | None = None  # of those, who has taken it; unknown to a new first rank
        self._next_look = 0.0

    def look(self, now: float, store: AgreementStore) -> None:
        """Offer what is due, show that the offers still hold, and withdraw those that somebody has taken."""
        places = beneath(store.connection.store)
        for rank, number in self._waiting.joined():  # at once: the job may end with the next step
            said = json.dumps([rank, number, _own_generation()])
            places.first(f"join/{places.count('joins', 1)}", said)
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY
        missing = sorted(self._waiting.missing)[:AT_MOST]
        self._due = {rank: self._due.get(rank, now + OWN_HOST_FIRST) for rank in missing}
        if not missing:
            return
        taken = _taken(places, now) if self._taken is None else self._taken
        self._open = {rank: number for rank, number in self._open.items() if rank in self._due}
        self._taken = {rank: vouched for rank, vouched in taken.items() if rank in self._due}
        for rank in missing:
            self._offer(rank, now, places, self._taken)

    def _offer(self, rank: int, now: float, places: AgreementStore, taken: dict[int, _Vouched]) -> None:
        if self._waiting.is_awaited(rank, now):
            self._due[rank] = now + OWN_HOST_FIRST
            self._open.pop(rank, None)
            return
        if rank in taken:
            if taken[rank].holds(places, now, VOUCHED_FOR):
                return
            del taken[rank]
        if now < self._due[rank]:
            return
        if rank not in self._open:
            if places.read(f"refused/{_own_generation()}/{rank}") is not None:
                self._due[rank] = now + OWN_HOST_FIRST
                return
            self._open[rank] = number = places.count("offers", 1)
            places.first(f"offer/{number}", Place(number, rank, _environment(rank, number)).to_json())
        number = self._open[rank]
        if places.read(f"taken/{number}") is None:
            places.count(f"open/{number}", 1)
        else:
            taken[rank] = _Vouched(number, now)
            del self._open[rank]


class Search:
    """On a host that stands by: the first offer that still holds, for one process; `who` is told to nobody else."""

    def __init__(self, places: AgreementStore, who: str) -> None:
        self._places = places
        self._who = who
        self._counted: dict[int, tuple[int, float] | None] = {}  # number of an offer -> its counter, and when that was
        self._known = 0

    def look(self) -> Place | None:
        """A place that is now this process's; None where none is offered. Raises StoreUnavailable when the job ends."""
        known = self._places.count("offers")
        self._counted |= dict.fromkeys(range(max(self._known, known - AT_MOST) + 1, known + 1))
        self._known = known
        for number in sorted(self._counted)[:-AT_MOST]:
            del self._counted[number]
        for number, before in self._counted.items():
            count, now = self._places.count(f"open/{number}"), time.monotonic()
            self._counted[number] = count, now
            if before is None or count == before[0] or now - before[1] > FRESH:
                continue
            text = self._places.read(f"offer/{number}")
            place = None if text is None else Place.from_json(text)
            if place is None or place.generation != generation(self._places):
                continue
            if self._places.read(f"refused/{place.generation}/{place.rank}") is not None:
                continue  # said after the place was offered: its process had ended slowly
            if self._places.first(f"taken/{number}", self._who) == self._who:
                return place
        return None


class Seat:
    """On a rank that has taken a place: end it when the others are started again, without it."""

    def __init__(self) -> None:
        self._next_look = 0.0

    def look(self, now: float, store: AgreementStore) -> None:
        """In the monitor's thread."""
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY
        if generation(beneath(store.connection.store)) != _own_generation():
            text = told("the ranks of this job were started again; this one ends, for another to take its place")
            log.error("ncclguard: %s", text)
            declaration.superseded()
            os.kill(os.getpid(), signal.SIGTERM)


def begin(store: Any, generation: int, host: int, hosts: int) -> None:
    """An agent starts its ranks, for the first time (0) or again; not acknowledged."""
    places = beneath(store)
    places.put("hosts", str(hosts))
    places.put(f"generation/{host}", str(generation))


def generation(places: AgreementStore) -> str:
    """Return how often all agents have started their ranks again: as long as one has not, its ranks go on."""
    if (places.read("generation/0") or "0") == "0":
        return "0"
    hosts = int(places.read("hosts") or 1)
    said = places.read_many([f"generation/{host}" for host in range(hosts)])
    return str(min(map(int, said.values()))) if len(said) == hosts else "0"


def refuse(places: AgreementStore, rank: int, generation: str) -> None:
    """A new process of this rank would end as those before: nobody is to take its place. Not acknowledged."""
    places.put(f"refused/{generation}/{rank}", "")


def vouch(places: AgreementStore, number: int, count: int | None) -> None:
    """The launcher of who has taken a place: it is there (None: it has ended). Not acknowledged: this never waits."""
    places.put(f"alive/{number}", ENDED if count is None else str(count))


class Guests:
    """Ranks that run where they have no launcher among the agents, as an agent sees them at the end."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # rank -> number of the place that its last process has taken, 0: none
        self._generation = ""
        self._known = 0
        self._vouched: dict[int, _Vouched] = {}

    def look(self, places: AgreementStore, now: float) -> tuple[set[int], set[int]]:
        """Return those that run, and all whose last process had joined from elsewhere."""
        there, known = generation(places), places.count("joins")
        if there != self._generation:  # all ranks were started where they belong
            self._generation, self._last = there, {}
        for number in range(self._known + 1, known + 1):
            text = places.read(f"join/{number}")
            if text is not None:
                rank, place, generated = json.loads(text)
                if generated == there:
                    self._last[rank] = place
        self._known = known
        guests = {rank: place for rank, place in self._last.items() if place}
        running = {
            rank
            for rank, place in guests.items()
            if self._vouched.setdefault(place, _Vouched(place, now)).holds(places, now, PATIENCE)
        }
        return running, set(guests)


def _taken(places: AgreementStore, now: float) -> dict[int, _Vouched]:
    found: dict[int, _Vouched] = {}
    known = places.count("offers")
    for number in range(max(0, known - AT_MOST) + 1, known + 1):
        text = places.read(f"offer/{number}")
        place = None if text is None else Place.from_json(text)
        if place is None or place.generation != _own_generation():
            continue
        if places.read(f"taken/{number}") is not None:
            found[place.rank] = _Vouched(number, now)
    return found


def _own_generation() -> str:
    return os.environ.get(_GENERATION, "0")


def _environment(rank: int, number: int) -> dict[str, str]:
    env = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
    group = rank // max(1, int(env.get("LOCAL_WORLD_SIZE", "1")))
    own = {"RANK": str(rank), "ROLE_RANK": str(rank), "GROUP_RANK": str(group)}
    return env | own | {lifecycle.JOINS: "1", declaration.PLACE: str(number)}
