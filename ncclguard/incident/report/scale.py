"""From moments to places on the axis: what went before the divergence on the left, the wait after it on the right."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from statistics import median
from typing import Final

from ncclguard.incident.report.timeline import Timeline

#: Where the divergence stands when there is something before it, and where the report ends, in parts of the width.
DIVERGED: Final = 0.62
DIVERGED_AT_ONCE: Final = 0.06
GIVEN_UP: Final = 0.97
#: A stretch longer than so many median stretches is drawn shorter and marked.
_LONG: Final = 6.0


class Scale:
    """Piecewise linear and increasing. `cuts`: (begin, end, seconds) of what is drawn
    shorter than it was, in parts of the width.
    """

    def __init__(self, timeline: Timeline) -> None:
        knots = _knots(timeline)
        spans = [b - a for a, b in itertools.pairwise(knots)]
        limit = _LONG * median(spans) if spans else 0.0
        drawn = [min(span, limit) if limit > 0 else span for span in spans]
        start = DIVERGED if len(knots) > 1 else DIVERGED_AT_ONCE
        total = sum(drawn) or 1.0
        places = [0.01]
        for width in drawn:
            places.append(places[-1] + width / total * (start - 0.01))
        self._moments = [*knots] if len(knots) > 1 else [knots[0]]
        self._places = places if len(knots) > 1 else [start]
        self.diverged = start
        self.begin = self._moments[0]
        self.given_up = max(timeline.given_up, 1e-6)
        self._moments.append(self.given_up)
        self._places.append(GIVEN_UP)
        self.cuts = [
            (places[i], places[i + 1], span) for i, span in enumerate(spans) if limit > 0 and span > 1.5 * limit
        ]

    def place(self, moment: float) -> float:
        """The place of a moment, 0 to 1; what lies outside is put on the edge.

        A moment is in seconds from the divergence.
        """
        moments, places = self._moments, self._places
        if moment <= moments[0]:
            return places[0]
        if moment >= moments[-1]:
            return places[-1]
        right = bisect_right(moments, moment)
        left = right - 1
        share = (moment - moments[left]) / (moments[right] - moments[left])
        return places[left] + share * (places[right] - places[left])


def _knots(timeline: Timeline) -> list[float]:
    """Begin and end of each operation over all ranks, up to the divergence, which is the last knot."""
    envelopes: dict[tuple[str, int], list[float]] = {}
    for lane in timeline.lanes:
        for bar in lane.bars:
            if bar.end is None:
                continue
            span = envelopes.setdefault((bar.group, bar.sequence), [bar.start, bar.end])
            span[:] = min(span[0], bar.start), max(span[1], bar.end)
    moments = sorted({moment for span in envelopes.values() for moment in span if moment < 0.0})
    return [*_apart(moments), 0.0]


def _apart(moments: Sequence[float]) -> list[float]:
    """Without moments that lie within a microsecond of the one before."""
    kept: list[float] = []
    for moment in moments:
        if not kept or moment - kept[-1] > 1e-6:
            kept.append(moment)
    return kept
