"""One lane per rank on one axis, made of what each rank remembers on its own clock.

An operation that completed ended on all its ranks at nearly the same moment, because none can leave before the last has
come. So a rank's clock is laid over the reference rank's by the ends of the operations both completed: the median of
the differences. Clocks of two hosts are never compared. Where two ranks have no operation in common, their answers to
the revoke are laid on each other, which is as exact as the monitors' period.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from ncclguard.incident.model import Incident, Text

#: Common operations from which the alignment is taken: the latest ones.
ALIGN_BY: Final = 16

Key = tuple[str, int]


class Bar(BaseModel):
    """One operation of one rank; seconds from the moment of divergence. `end` is None while it was still in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group: Text
    sequence: int
    text: Text
    start: float
    end: float | None
    ok: bool


class Lane(BaseModel):
    """What one rank did. `clock` says how its clock was laid over the others'; `spread` how well that fits, in seconds.

    `asked`: when it answered the revoke or announced that it leaves; its open operation is known up to there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    clock: Literal["reference", "operations", "answer"]
    common: int = 0
    spread: float | None = None
    asked: float
    bars: tuple[Bar, ...]


class Timeline(BaseModel):
    """The lanes in order of rank. Zero is the moment of divergence: when the first rank entered the failed operation.

    `given_up`: when the first rank answered the revoke, in seconds. Ranks that said nothing have no lane.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    group: Text
    sequence: int
    given_up: float
    lanes: tuple[Lane, ...]

    def lane(self, rank: int) -> Lane | None:
        """The lane of a rank, if it has one."""
        return next((lane for lane in self.lanes if lane.rank == rank), None)


def build(incident: Incident, histories: Mapping[int, Any]) -> Timeline | None:
    """Lay the ranks' histories (see `incident.history.snapshot`) over each other; None when there is nothing to show.

    A history that is no such data is left out: it came from another process.
    """
    group, _, number = incident.op_id.rpartition("/")
    sequence = int(number) if number.isdigit() else 0
    lanes = {rank: lane for rank, data in sorted(histories.items()) if (lane := _own_clock(rank, data)) is not None}
    if not lanes:
        return None
    reference = max(lanes.values(), key=lambda lane: (len(_ends(lane)), -lane.rank))
    aligned = [_aligned(lane, reference) for lane in lanes.values()]
    entries = [bar.start for lane in aligned for bar in lane.bars if (bar.group, bar.sequence) == (group, sequence)]
    zero = min(entries, default=min(lane.asked for lane in aligned))
    moved = tuple(_moved(lane, -zero) for lane in aligned)
    return Timeline(group=group, sequence=sequence, given_up=min(lane.asked for lane in moved), lanes=moved)


def _own_clock(rank: int, data: Any) -> Lane | None:
    """A rank's history on its own clock, zero at its answer."""
    try:
        groups, texts = data["groups"], data["texts"]
        bars = [
            Bar(
                group=groups[group],
                sequence=sequence,
                text=texts[text],
                start=-begun,
                end=None if ended is None else -ended,
                ok=bool(ok),
            )
            for group, sequence, text, begun, ended, ok in data["rows"]
        ]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return Lane(rank=rank, clock="answer", asked=0.0, bars=tuple(sorted(bars, key=lambda bar: bar.start)))


def _ends(lane: Lane) -> dict[Key, float]:
    """When its completed operations ended: the moments that all ranks share."""
    return {(bar.group, bar.sequence): bar.end for bar in lane.bars if bar.ok and bar.end is not None}


def _aligned(lane: Lane, reference: Lane) -> Lane:
    if lane is reference:
        return lane.model_copy(update={"clock": "reference"})
    ours, theirs = _ends(lane), _ends(reference)
    common = sorted(ours.keys() & theirs.keys(), key=lambda key: ours[key])[-ALIGN_BY:]
    if not common:
        return lane
    differences = [theirs[key] - ours[key] for key in common]
    offset = median(differences)
    spread = median(abs(one - offset) for one in differences)
    update = {"clock": "operations", "common": len(common), "spread": round(spread, 6)}
    return _moved(lane, offset).model_copy(update=update)


def _moved(lane: Lane, by: float) -> Lane:
    bars = tuple(
        bar.model_copy(
            update={
                "start": round(bar.start + by, 6),
                "end": None if bar.end is None else round(bar.end + by, 6),
            }
        )
        for bar in lane.bars
    )
    return lane.model_copy(update={"bars": bars, "asked": round(lane.asked + by, 6)})
