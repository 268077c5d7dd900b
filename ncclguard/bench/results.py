"""From the durations of all ranks to figures: the statistics, the JSON file's schema, the table and the plot."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ncclguard.bench.arguments import BenchError, Settings
from ncclguard.bench.machine import Environment
from ncclguard.bench.measure import PLAIN, Array, Samples, Shape, Variant

if TYPE_CHECKING:
    from typing_extensions import Self


def percentile(samples: Sequence[float] | Array, percent: float) -> float:
    """Return the smallest sample that at least `percent` % of all samples do not exceed (nearest rank).

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
    """Return the rank that arrives last, by the ranks' waits in a barrier: whoever waits least arrived last.

    `waits` has shape (ranks, cycles). All ranks leave a barrier together, so a rank's lateness against the first to
    arrive is the longest wait minus its own. Only durations of one host's clock each go in.

    Example:
        >>> slowest(np.array([[0.5, 0.5, 0.7], [0.1, 0.1, 0.1]])).rank
        1
    """
    lateness = np.median(waits.max(axis=0) - waits, axis=1)
    rank = int(lateness.argmax())
    return Lag(rank, float(lateness[rank]))


class RatioResult(BaseModel, frozen=True):
    """This variant's time over plain's, cycle by cycle: median and quartiles."""

    median: float
    low: float
    high: float


class VariantResult(BaseModel, frozen=True):
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


class SizeResult(BaseModel, frozen=True):
    """All variants at one size; `complete` is False when Ctrl-C cut it short."""

    numel: int
    nbytes: int
    complete: bool
    variants: tuple[VariantResult, ...]


class BenchResult(BaseModel, frozen=True):
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
    """Return the figures of one size from the samples of all ranks; None when no cycle was complete."""
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
    """Return whether nothing was wrong, and the one line that says so."""
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


_NAMES = (
    f"#{'bytes':>12} {'numel':>12}  {'variant':<21}{'calls':>6} {'p50':>12} {'p99':>12} {'algbw':>8} {'busbw':>8} "
    f"{'#wrong':>7}  {'ratio':<20} {'slowest':>7} {'lag':>9}"
)
_UNITS = (
    f"#{'(B)':>12} {'(elements)':>12}  {'':<21}{'':>6} {'(us)':>12} {'(us)':>12} {'(GB/s)':>8} {'(GB/s)':>8} "
    f"{'':>7}  {'(time / plain)':<20} {'(rank)':>7} {'(us)':>9}"
)

_REDRAW = 0.2  # seconds between two drawings of the bar


def header(settings: Settings, environment: Environment) -> list[str]:
    """Return the lines above the rows: the machine, the job, what the columns mean."""
    reduce_op = " sum" if settings.op in ("all_reduce", "reduce_scatter") else ""
    rounds = "with" if settings.rounds else "without"
    return [
        *environment.lines(),
        f"# {settings.op}{reduce_op}, {settings.dtype}; plain torch.distributed and guarded ({rounds} rounds) in turn",
        "# in one run, order alternating; every result element checked. Time of a call: the rank that took longest.",
        "# algbw, busbw as in nccl-tests, at p50; GB = 1e9 bytes. ratio: median over the cycles (quartiles).",
        "# slowest: the rank that reaches the barrier before the call last; lag: how long after the first.",
        _NAMES,
        _UNITS,
    ]


def row(size: SizeResult, variant: VariantResult) -> str:
    """One variant at one size."""
    compared = variant.ratio
    share = "1" if compared is None else f"{compared.median:.3f} ({compared.low:.3f}-{compared.high:.3f})"
    rates = ("-", "-") if size.nbytes == 0 else (f"{variant.algbw / 1e9:.3f}", f"{variant.busbw / 1e9:.3f}")
    wrong = "-" if variant.checked == 0 else str(variant.wrong)
    return (
        f" {size.nbytes:>12} {size.numel:>12}  {variant.variant:<21}{variant.calls:>6} "
        f"{variant.seconds_p50 * 1e6:>12.1f} {variant.seconds_p99 * 1e6:>12.1f} {rates[0]:>8} {rates[1]:>8} "
        f"{wrong:>7}  {share:<20} {variant.slowest_rank:>7} {variant.lag_seconds * 1e6:>9.1f}"
    )


class Screen:
    """The output of the bench: plain lines in a pipe; on a terminal the same lines above a progress bar."""

    def __init__(self, sizes: int, enabled: bool = True) -> None:
        """`enabled` is False on all ranks but the one that prints."""
        self._enabled = enabled
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._drawn = 0.0
        self._what, self._sizes_done = "", 0
        if enabled and sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            # No refreshing thread: it would wake up in the middle of timed calls.
            self._progress = Progress(*columns, console=Console(), transient=True, auto_refresh=False)
            self._task = self._progress.add_task("", total=float(sizes))

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def line(self, text: str) -> None:
        if not self._enabled:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def size(self, result: SizeResult) -> None:
        for variant in result.variants:
            self.line(row(result, variant))

    def begin(self, what: str, sizes_done: int) -> None:
        """Begin the next size, `what`."""
        self._what, self._sizes_done = what, sizes_done
        self.advance(0.0)

    def advance(self, part: float) -> None:
        """Show that `part` of the present size is done, from 0 to 1."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=self._what, completed=self._sizes_done + part)
            now = time.monotonic()
            if now - self._drawn > _REDRAW:
                self._drawn = now
                self._progress.refresh()


def check_outputs(settings: Settings) -> None:
    """Check before any work that the output files can be written.

    Raises:
        BenchError: one exists, its folder is missing or closed, both are the same, or matplotlib is needed and absent.
    """
    for option, path in (("--json", settings.json_path), ("--plot", settings.plot_path)):
        if path is None:
            continue
        if os.path.lexists(path):  # also a symbolic link that leads nowhere
            raise BenchError(f"{option}: {path} exists and is never overwritten; choose another name or move it away.")
        folder = path.absolute().parent
        if not folder.is_dir():
            raise BenchError(f"{option}: the folder {folder} does not exist; create it first.")
        if not os.access(folder, os.W_OK):
            raise BenchError(f"{option}: the folder {folder} is not writable; choose another.")
    if settings.plot_path is None:
        return
    if settings.json_path is not None and settings.json_path.resolve() == settings.plot_path.resolve():
        raise BenchError(f"--json and --plot both name {settings.plot_path}; choose another name for one of them.")
    if settings.plot_path.suffix.lower() != ".png":
        raise BenchError(f"--plot writes PNG; name the file {settings.plot_path.with_suffix('.png').name}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib, which is not installed: pip install 'ncclguard[plot]'.")


def write_json(result: BenchResult, path: Path) -> None:
    """Write the result.

    Raises:
        FileExistsError: somebody created the file since `check_outputs`.
    """
    with path.open("x", encoding="utf-8") as file:
        file.write(result.model_dump_json(indent=2) + "\n")


def write_plot(result: BenchResult, path: Path) -> None:
    """Draw bus bandwidth and the time ratio over the size, one line per variant, with the quartiles shaded.

    Raises:
        FileExistsError: somebody created the file since `check_outputs`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bandwidth, share) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    names = list(dict.fromkeys(row.variant for size in result.sizes for row in size.variants))
    for number, name in enumerate(names):
        rows = [(size.nbytes, row) for size in result.sizes for row in size.variants if row.variant == name]
        color = f"C{number}"
        bandwidth.plot([n for n, _ in rows], [row.busbw / 1e9 for _, row in rows], "o-", color=color, label=name)
        compared = [(n, row.ratio) for n, row in rows if row.ratio is not None]
        if compared:
            sizes = [n for n, _ in compared]
            share.plot(sizes, [each.median for _, each in compared], "o-", color=color, label=name)
            share.fill_between(
                sizes, [each.low for _, each in compared], [each.high for _, each in compared], color=color, alpha=0.2
            )
    share.axhline(1.0, color="black", linewidth=0.8)
    environment = result.environment
    figure.suptitle(
        f"{result.op} {result.dtype}, {environment.world_size} ranks, {environment.backend}, torch {environment.torch}"
    )
    for axes, label in ((bandwidth, "bus bandwidth (GB/s)"), (share, "time / plain time")):
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlabel("size (bytes)")
        axes.set_ylabel(label)
        axes.grid(visible=True, alpha=0.3)
        if axes.has_data():
            axes.legend()
    with path.open("xb") as file:
        figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)
