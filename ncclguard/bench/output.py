"""The files a run leaves behind: JSON and a plot. Neither ever replaces a file."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ncclguard.bench.arguments import BenchError, Settings
from ncclguard.bench.results import BenchResult


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
