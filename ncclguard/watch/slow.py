"""The judgement who makes the job slow without hanging, a pure function of what each rank has measured of itself.

A rank that is late in a collective finds the others there and waits least, while they wait for it: who is slow spends
the smallest share of its time in collectives. Each rank measures that share by its own clock, and shares are compared,
never clocks. Nobody is named unless the distance is large, well above the noise, and there is a gap to all others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_high
from typing import Any, Final

from ncclguard.metrics.records import SlowRanks

#: What a rank was seen to do, and which kind of slowness more of it is.
COMPUTING: Final = "computing"
LOADING: Final = "data loading"
SAVING: Final = "saving"
COLLECTING: Final = "garbage collection"
WAITING: Final = "waiting"
#: Kinds that are told by other signs.
HOST: Final = "one host"
PHASE: Final = "one phase"
PERIODIC: Final = "periodic"

#: Windows that a judgement rests on: the fewer are enough for a large distance. A rank keeps the shares of as many.
#: With six, a healthy rank was named that had shared a core with other programs for 20 s (two cores, a load of 30).
LENGTHS: Final = (12, 24)
WINDOWS, KEPT = LENGTHS[0], LENGTHS[-1]
#: The smallest share of the job's time that is worth a name; of fewer than `FEW` ranks, whose noise shows less.
LEAST: Final = 0.06
LEAST_OF_FEW: Final = 0.1
FEW: Final = 4
#: The distance to the others, in standard errors of a median of windows, that is taken for more than noise.
SURE: Final = 5.0
#: The ratio of a median's standard error to a mean's, and of the standard deviation to the median deviation.
OF_MEDIAN, OF_DEVIATION = 1.25, 1.48
#: The share of the windows that may look otherwise than the judgement says.
ODD: Final = 1 / 6
#: Ranks that issue collectives at rates within this factor of each other do the same work, and are compared.
ALIKE: Final = 1.25
#: Of `KEPT` windows, those with the longest waits that are left out when pauses are looked for: one may be in three.
ONCE: Final = 3
#: Judgements in a row that must say the same before anybody is told, and that must name nobody before it is over.
AGAIN: Final = 6
#: The share of the excess that one kind or place must have to be named for it.
MOST: Final = 0.5


@dataclass(frozen=True, slots=True)
class Doing:
    """A state of a rank's main thread: a kind, the line of the program, and the phase, where it has one."""

    kind: str
    place: str
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """The figures that one rank has measured of itself, all by its own clock.

    `waited`: the share of the time that it was in collectives, a number for each window, oldest first. `calls`:
    collectives that it issued in a second. `doings`: shares of the time of the last `WINDOWS` windows.
    """

    rank: int
    host: str
    waited: tuple[float, ...]
    calls: float
    doings: Mapping[Doing, float]

    def to_json(self) -> list[Any]:
        """Return plain values for `of_json`."""
        doings = [[doing.kind, doing.place, doing.phase, round(share, 4)] for doing, share in self.doings.items()]
        return [self.rank, self.host, [round(share, 4) for share in self.waited], round(self.calls, 4), doings]

    @classmethod
    def of_json(cls, values: Sequence[Any]) -> Pace:
        """Read what `to_json` returned."""
        rank, host, waited, calls, doings = values
        return cls(rank, host, tuple(waited), calls, {Doing(*doing): share for *doing, share in doings})


class Told:
    """The finding that all ranks have been told. `add` is given one judgement after the other, as their windows end."""

    def __init__(self) -> None:
        self.now: SlowRanks | None = None
        self._last: deque[SlowRanks | None] = deque(maxlen=AGAIN)

    def add(self, found: SlowRanks | None) -> bool:
        """Take a judgement; return whether `now` has changed by it: who is slow, of what kind, or nobody any more."""
        self._last.append(found)
        same = len(self._last) == AGAIN and all(_what(one) == _what(found) for one in self._last)
        if not same or _what(found) == _what(self.now):
            return False
        self.now = found
        return True


def _what(slow: SlowRanks | None) -> tuple[tuple[int, ...], str] | None:
    return None if slow is None else (slow.ranks, slow.kind)


def judge(paces: Iterable[Pace]) -> SlowRanks | None:
    """Return who makes the job slow now, of what kind, and what it costs; None where nobody can be named.

    Of several groups of ranks that do the same work, the one that loses most is told of.
    """
    groups = [group for group in _alike(paces) if len(group) > 1]
    found = [slow for group in groups if (slow := _slow_among(group)) is not None]
    return max(found, key=lambda slow: slow.lost, default=None)


def _alike(paces: Iterable[Pace]) -> Iterator[list[Pace]]:
    """Put ranks together that issue collectives equally often; those with other roles are not to be compared."""
    together: list[Pace] = []
    for pace in sorted((pace for pace in paces if pace.waited and pace.calls > 0), key=lambda pace: pace.calls):
        if together and pace.calls > ALIKE * together[0].calls:
            yield together
            together = []
        together.append(pace)
    yield together


def _slow_among(group: Sequence[Pace]) -> SlowRanks | None:
    """Judge ranks that do the same work: first who is slow in nearly every window, then who is so again and again."""
    for length in LENGTHS:
        slow = _apart(group, length, median)
        if slow is not None:
            return slow
    return _apart(group, KEPT, _without_longest) if len(group) >= FEW else None


def _apart(group: Sequence[Pace], length: int, middle: Callable[[Sequence[float]], float]) -> SlowRanks | None:
    """Return the ranks that are apart from all others by what is in the `middle` of their last `length` windows."""
    if min(len(pace.waited) for pace in group) < length:
        return None
    steady = middle is median
    last = {pace.rank: pace.waited[-length:] for pace in group}
    waited = {rank: middle(shares) for rank, shares in last.items()}
    usual = median_high(waited.values())
    # Where a rank pauses, the others' shares go up and down with that, and its own do not: so the noise is in these.
    noisy = waited if steady else [min(waited, key=lambda rank: waited[rank])]
    medians = {rank: median(last[rank]) for rank in noisy}
    deviation = median(abs(share - medians[rank]) for rank in noisy for share in last[rank])
    least = LEAST if len(group) >= FEW else LEAST_OF_FEW
    needed = max(least, SURE * OF_MEDIAN * OF_DEVIATION * deviation / length**0.5)
    slow = [pace for pace in group if usual - waited[pace.rank] >= needed]
    others = [pace for pace in group if pace not in slow]
    if not slow or 2 * len(slow) > len(group) or (len(slow) > 1 and not steady):
        return None
    of_others = [waited[pace.rank] for pace in others]
    nearest = min(of_others) - max(waited[pace.rank] for pace in slow)
    # The others differ for reasons of their own, too: they must be nearer to each other than to those who are slow.
    if nearest < max(needed / 2, max(of_others) - min(of_others)):
        return None
    if steady and any(sum(share >= usual for share in last[pace.rank]) > ODD * length for pace in slow):
        return None
    lost = usual - min(waited[pace.rank] for pace in slow)
    kind, place = _kind(slow, others, lost)
    return SlowRanks(
        ranks=tuple(sorted(pace.rank for pace in slow)),
        hosts=tuple(sorted({pace.host for pace in slow})),
        kind=PERIODIC if kind == COMPUTING and not steady else kind,
        place=place,
        awaited_at=_most(_excess(others, slow, "place", [WAITING]), lost),
        factor=(1.0 - usual + lost) / max(1.0 - usual, 0.01),
        lost=lost,
        sure=lost >= 2 * needed,
    )


def _without_longest(shares: Sequence[float]) -> float:
    """Return the mean without the windows of the longest waits, so that pauses count only if they come again."""
    return fmean(sorted(shares)[: len(shares) - ONCE])


def _kind(slow: Sequence[Pace], others: Sequence[Pace], lost: float) -> tuple[str, str]:
    """Return what the slow ranks do more of than the others, and the line of the program where they do; "" for many."""
    outside = [COMPUTING, LOADING, SAVING]
    kind, place = _most(_excess(slow, others, "kind", [*outside, COLLECTING]), lost), ""
    if kind != COLLECTING:
        place = _most(_excess(slow, others, "place", outside), lost)
    hosts = {pace.host for pace in slow}
    if len(slow) > 1 and len(hosts) == 1 and not hosts & {pace.host for pace in others}:
        return HOST, place
    if kind in (LOADING, SAVING, COLLECTING):
        return kind, place
    phases = {doing.phase for pace in (*slow, *others) for doing in pace.doings if doing.kind != WAITING}
    phase = _most(_excess(slow, others, "phase", outside), lost, 0.8)
    if phase and len(phases) > 1:
        return f"{PHASE}: {phase}", place
    return COMPUTING, place


def _excess(these: Sequence[Pace], those: Sequence[Pace], by: str, kinds: Sequence[str]) -> dict[str, float]:
    """Return by how much larger the share of each kind, place or phase is, in the medians over ranks; only what is."""
    names = {getattr(doing, by) for pace in these for doing in pace.doings if doing.kind in kinds}
    found = {name: _share(these, by, name, kinds) - _share(those, by, name, kinds) for name in names}
    return {name: more for name, more in found.items() if more > 0.0}


def _share(paces: Sequence[Pace], by: str, name: str, kinds: Sequence[str]) -> float:
    return median(
        sum(share for doing, share in pace.doings.items() if getattr(doing, by) == name and doing.kind in kinds)
        for pace in paces
    )


def _most(excess: Mapping[str, float], lost: float, share: float = MOST) -> str:
    """Return the one that has at least this share of all that is in excess, and of what is lost; "" where none has."""
    name, most = max(excess.items(), key=lambda item: item[1], default=("", 0.0))
    return name if most >= share * max(sum(excess.values()), lost) and most > 0.0 else ""


def kept_doings(counted: Counter[Doing], samples: float, most: int = 12) -> dict[Doing, float]:
    """Return the shares of the commonest doings, for a `Pace`."""
    return {doing: count / samples for doing, count in counted.most_common(most)} if samples else {}
