"""How results are shown: the table on a terminal or in a pipe, the JSON file, the plot."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ncclguard.bench.arguments import BenchError, Settings
from ncclguard.bench.machine import Environment
from ncclguard.bench.results import BenchResult, SizeResult, VariantResult

if TYPE_CHECKING:
    from typing_extensions import Self


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
    """The lines above the rows: the machine, the job, what the columns mean."""
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
    """Where the lines go: plain lines in a pipe; on a terminal the same lines above a progress bar."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        """The next size, `what`, starts."""
        self._what, self._sizes_done = what, sizes_done
        self.advance(0.0)

    def advance(self, part: float) -> None:
        """`part` of the present size is done, from 0 to 1."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=self._what, completed=self._sizes_done + part)
            now = time.monotonic()
            if now - self._drawn > _REDRAW:
                self._drawn = now
                self._progress.refresh()


def check_outputs(settings: Settings) -> None:
    """See before any work that the files can be written.

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
