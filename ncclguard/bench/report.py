"""The table on the terminal, or in a pipe, as users of nccl-tests know it."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ncclguard.bench.arguments import Settings
from ncclguard.bench.machine import Environment
from ncclguard.bench.results import SizeResult, VariantResult

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
