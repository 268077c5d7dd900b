"""From the durations of all ranks to figures: the statistics, and the model that is also the JSON file's schema."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from ncclguard.bench.machine import Environment
from ncclguard.bench.measure import PLAIN, Array, Samples, Variant
from ncclguard.bench.operations import Shape


def percentile(samples: Sequence[float] | Array, percent: float) -> float:
    """The smallest sample that at least `percent` % of all samples do not exceed (nearest rank): always a real sample.

    Raises:
        ValueError: no samples, or a percentage outside 0 to 100.

    Example:
        >>> percentile([3.0, 1.0, 2.0], 50), percentile([3.0, 1.0, 2.0], 99)
        (2.0, 3.0)
    """
    if len(samples) == 0 or not 0 <= percent <= 100:
        raise ValueError("a percentile needs samples and a percentage from 0 to 100.")
    ordered = sorted(float(sample) for sample in samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio over cycles: the median and the quartiles, `cycles` pairs."""

    median: float
    low: float
    high: float
    cycles: int


def ratio(numerator: Sequence[float] | Array, denominator: Sequence[float] | Array) -> Ratio:
    """Compare two variants cycle by cycle, so that what slows a whole cycle down slows both.

    Raises:
        ValueError: not the same number of cycles, or none.

    Example:
        >>> ratio([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
        Ratio(median=3.0, low=2.5, high=3.5, cycles=3)
    """
    if len(numerator) != len(denominator) or len(numerator) == 0:
        raise ValueError("a ratio needs the same cycles, at least one, of both variants.")
    pairs = np.asarray(numerator, dtype=np.float64) / np.asarray(denominator, dtype=np.float64)
    low, median, high = np.quantile(pairs, (0.25, 0.5, 0.75))
    return Ratio(float(median), float(low), float(high), len(pairs))


def slowest_rank_times(durations: Array) -> Array:
    """Time of each call: that of the rank that took longest. `durations` has shape (ranks, cycles, calls)."""
    return np.asarray(durations.max(axis=0), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Lag:
    """The rank that arrives last, and by how many seconds (median over the cycles) after the first."""

    rank: int
    seconds: float


def slowest(waits: Array) -> Lag:
    """Who arrives last, from how long each rank waits in a barrier: who waits least arrived last.

    `waits` has shape (ranks, cycles). All ranks leave a barrier together, so a rank's lateness against the first to
    arrive is the longest wait minus its own. Only durations of one host's clock each go in.

    Example:
        >>> slowest(np.array([[0.5, 0.5, 0.7], [0.1, 0.1, 0.1]])).rank
        1
    """
    lateness = np.median(waits.max(axis=0) - waits, axis=1)
    rank = int(lateness.argmax())
    return Lag(rank, float(lateness[rank]))


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class RatioResult(_Record):
    """This variant's time over plain's, cycle by cycle: median and quartiles."""

    median: float
    low: float
    high: float


class VariantResult(_Record):
    """One row: seconds and bytes per second. A call's time is that of the rank that took longest."""

    variant: str
    guarded: bool
    atomic: bool
    calls: int
    cycles: int
    seconds_p50: float
    seconds_p99: float
    seconds_min: float
    algbw: float
    busbw: float
    wrong: int
    checked: int
    ratio: RatioResult | None
    slowest_rank: int
    lag_seconds: float
    cycle_seconds: tuple[float, ...]


class SizeResult(_Record):
    """All variants at one size; `complete` is False when Ctrl-C cut it short."""

    numel: int
    nbytes: int
    complete: bool
    variants: tuple[VariantResult, ...]


class BenchResult(_Record):
    """A whole run. `verdict` is its last line."""

    schema_version: Literal[1] = 1
    started_at: str
    command: tuple[str, ...]
    environment: Environment
    op: str
    dtype: str
    rounds: bool
    timeout: float
    sizes: tuple[SizeResult, ...]
    peak_resident_bytes: tuple[int | None, ...]
    interrupted: bool
    failure: str | None
    ok: bool
    verdict: str


def summarize(
    shape: Shape, variants: Sequence[Variant], everybody: Sequence[Mapping[str, Samples]], complete: bool
) -> SizeResult | None:
    """The figures of one size from the samples of all ranks; None when not one cycle was complete."""
    if not everybody[0][PLAIN.name].durations:
        return None
    plain_cycles = _cycle_times(everybody, PLAIN.name)
    rows = []
    for variant in variants:
        mine = [samples[variant.name] for samples in everybody]
        times = slowest_rank_times(np.stack([samples.duration_array() for samples in mine])).ravel()
        cycles = _cycle_times(everybody, variant.name)
        share = ratio(cycles, plain_cycles)
        compared = RatioResult(median=share.median, low=share.low, high=share.high) if variant.guarded else None
        lag = slowest(np.asarray([samples.waits for samples in mine], dtype=np.float64))
        p50 = percentile(times, 50)
        rows.append(
            VariantResult(
                variant=variant.name,
                guarded=variant.guarded,
                atomic=variant.atomic,
                calls=len(times),
                cycles=len(cycles),
                seconds_p50=p50,
                seconds_p99=percentile(times, 99),
                seconds_min=float(times.min()),
                algbw=shape.nbytes / p50,
                busbw=shape.nbytes / p50 * shape.bus_factor,
                wrong=sum(samples.wrong for samples in mine),
                checked=sum(samples.checked for samples in mine),
                ratio=compared,
                slowest_rank=lag.rank,
                lag_seconds=lag.seconds,
                cycle_seconds=tuple(cycles),
            )
        )
    return SizeResult(numel=shape.numel, nbytes=shape.nbytes, complete=complete, variants=tuple(rows))


def _cycle_times(everybody: Sequence[Mapping[str, Samples]], name: str) -> list[float]:
    """One time per cycle: the median of its calls."""
    calls = slowest_rank_times(np.stack([samples[name].duration_array() for samples in everybody]))
    return [percentile(cycle, 50) for cycle in calls]


def judge(sizes: Sequence[SizeResult], interrupted: bool, failure: str | None) -> tuple[bool, str]:
    """Whether nothing was wrong, and the one line that says so."""
    rows = [(size, row) for size in sizes for row in size.variants]
    wrong = [(size, row) for size, row in rows if row.wrong]
    checked = sum(row.checked for _, row in rows)
    seen = f"{len(sizes)} size{'' if len(sizes) == 1 else 's'}, {checked:,} result elements checked"
    if wrong:
        size, row = wrong[0]
        return False, (
            f"WRONG: {sum(row.wrong for _, row in wrong):,} elements in {len(wrong)} rows, first in {row.variant} at "
            f"{size.numel:,} elements ({seen}). Do not trust results of this machine; look for memory or driver errors."
        )
    if failure is not None:
        return False, f"FAILED: {failure} ({seen}, none wrong)"
    if interrupted:
        return False, f"INTERRUPTED: {seen}, none wrong; the rows above are what there is."
    return True, f"OK: {seen}, none wrong{_overhead(sizes)}."


def _overhead(sizes: Sequence[SizeResult]) -> str:
    largest = max(sizes, key=lambda size: size.nbytes, default=None)
    if largest is None:
        return ""
    parts = [
        f"{row.variant} {row.ratio.median:.2f} ({row.ratio.low:.2f} to {row.ratio.high:.2f})"
        for row in largest.variants
        if row.ratio is not None
    ]
    return f"; time against plain at {largest.numel:,} elements: {', '.join(parts)}" if parts else ""
