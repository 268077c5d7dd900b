"""The place of a lost rank that no process of its own host takes: offered to hosts that stand by.

The first of the ranks that go on offers the place of a missing rank when nobody has waited for it for some seconds, and
counts while it does. A process of `ncclguard run --stand-by` takes an offer whose counter moves: so nobody takes the
place of a rank that is back, or one in a job that is gone. These keys lie beneath the prefixes that torch gives the
ranks' store, because who stands by has no rank and does not know them.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from ncclguard import lifecycle, torch_compat
from ncclguard.coordination.store import AgreementStore

if TYPE_CHECKING:
    from ncclguard.training.joining import Waiting

PREFIX: Final = "ncclguard/places"
#: Seconds between two looks at the store, on either side.
LOOK_EVERY: Final = 0.5
#: Seconds for a process of the rank's own host to wait for the place first: a spare of that host takes about two.
OWN_HOST_FIRST: Final = 5.0
#: Seconds for who has taken a place to wait for it; then it is offered again.
TAKEN_FOR: Final = 20.0
#: So many places are offered at a time, and so many offers are looked at.
AT_MOST: Final = 256

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
class Place:
    """A rank's place: its number among all that were offered in this job, and the variables of its process."""

    number: int
    rank: int
    env: dict[str, str]

    def to_json(self) -> str:
        """As a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Place:
        """The place that `to_json` wrote."""
        said = json.loads(text)
        return cls(int(said["number"]), int(said["rank"]), {str(key): str(value) for key, value in said["env"].items()})


class Offers:
    """On the first rank that goes on: the places of missing ranks that nobody waits for, in the monitor's thread."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._due: dict[int, float] = {}  # missing ranks -> when their places are offered
        self._open: dict[int, int] = {}  # of those, the number of the offer
        self._next_look = 0.0

    def look(self, now: float, store: AgreementStore) -> None:
        """Offer what is due, show that the offers still hold, and withdraw those that somebody has taken."""
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY
        missing = sorted(self._waiting.missing)[:AT_MOST]
        self._due = {rank: self._due.get(rank, now + OWN_HOST_FIRST) for rank in missing}
        self._open = {rank: number for rank, number in self._open.items() if rank in self._due}
        if not missing:
            return
        places = AgreementStore(torch_compat.base_store(store.connection.store), PREFIX)
        for rank, due in self._due.items():
            if self._waiting.is_awaited(rank, now):
                self._due[rank] = now + OWN_HOST_FIRST
                self._open.pop(rank, None)
                continue
            if now < due:
                continue
            if rank not in self._open:
                self._open[rank] = number = places.count("offers", 1)
                places.first(f"offer/{number}", Place(number, rank, _environment(rank)).to_json())
            number = self._open[rank]
            if places.read(f"taken/{number}") is None:
                places.count(f"open/{number}", 1)
            else:
                self._due[rank] = now + TAKEN_FOR
                del self._open[rank]


class Search:
    """On a host that stands by: the first offer that still holds, for one process; `who` is told to nobody else."""

    def __init__(self, places: AgreementStore, who: str) -> None:
        self._places = places
        self._who = who
        self._counted: dict[int, int | None] = {}  # number of an offer -> its counter at the last look
        self._known = 0

    def look(self) -> Place | None:
        """A place that is now this process's; None where none is offered. Raises StoreUnavailable when the job ends."""
        known = self._places.count("offers")
        self._counted |= dict.fromkeys(range(max(self._known, known - AT_MOST) + 1, known + 1))
        self._known = known
        for number in sorted(self._counted)[:-AT_MOST]:
            del self._counted[number]
        for number, before in self._counted.items():
            self._counted[number] = count = self._places.count(f"open/{number}")
            if before is None or count == before:
                continue
            text = self._places.read(f"offer/{number}")
            if text is not None and self._places.first(f"taken/{number}", self._who) == self._who:
                return Place.from_json(text)
        return None


def ended(places: AgreementStore, number: int, code: int) -> None:
    """The process that had taken this place has ended with this exit code."""
    places.first(f"ended/{number}", str(code))


def elsewhere(places: AgreementStore) -> tuple[set[int], set[int]]:
    """Ranks whose place a host that stood by has taken: those whose process runs there, and those that ended well."""
    last: dict[int, str | None] = {}
    for number in range(1, places.count("offers") + 1):
        text = places.read(f"offer/{number}")
        if text is not None and places.read(f"taken/{number}") is not None:
            last[Place.from_json(text).rank] = places.read(f"ended/{number}")
    return {rank for rank, code in last.items() if code is None}, {rank for rank, code in last.items() if code == "0"}


def _environment(rank: int) -> dict[str, str]:
    env = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
    group = rank // max(1, int(env.get("LOCAL_WORLD_SIZE", "1")))
    return env | {"RANK": str(rank), "ROLE_RANK": str(rank), "GROUP_RANK": str(group), lifecycle.JOINS: "1"}
