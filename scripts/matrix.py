"""Which Pythons and versions of torch work: `scripts/matrix [--pair 3.10:2.6 ...] [--write docs/support.md]`.

For each pair it makes an empty environment in `.matrix/`, uses the wheel there (scripts/wheel.py: two ranks, the tour),
runs the fast tier and the multi-rank tests below, and removes the environment. What fails is run once more, alone, and
the table says what failed then too. What cannot be installed is a row that says why. The results are kept beside the
page, in the JSON file of its name: without names, only pairs that have not passed yet are run. The standard library
alone is used.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import wheel

FOLDER: Final = wheel.ROOT / ".matrix"
#: The pairs that are run when nobody names others: the ends of both ranges, what CI has, and one between.
PAIRS: Final = ("3.10:2.6", "3.13:2.6", "3.12:2.9", "3.11:2.13", "3.10:2.15", "3.13:2.15")
#: What touches torch most: every collective, the contract under faults, facts about torch, the two other ways in, and
#: what is made of torch's launcher, logs and DistributedDataParallel.
MULTI_RANK: Final = (
    "collectives contract mechanisms process_group watch multiprocessing training run explain_real timeout_handler"
)
SELECTIONS: Final = {
    "fast": ["-m", "fast", "tests/unit"],
    "ranks": [f"tests/distributed/test_{name}.py" for name in MULTI_RANK.split()],
}
OLDEST: Final = 10  # Python 3.10, as in pyproject.toml
#: Seconds for a selection of tests, and for those of them that failed when they run again.
SUITE: Final = 2400
FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
COUNTS: Final = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


@dataclass(frozen=True)
class Row:
    """The result of one pair. Counts are pytest's; `failed` are tests that failed in the suite and again when alone."""

    pair: str
    python: str
    torch: str
    build: str
    installed: str
    fast: str = "not run"
    ranks: str = "not run"
    failed: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()  # failed in the suite, and passed alone
    ncclguard: str = ""
    day: str = ""
    minutes: float = 0.0
    load: float = 0.0

    @property
    def works(self) -> bool:
        """Return whether everything passed, if need be alone."""
        return self.installed == "passed" and "passed" in self.fast and "passed" in self.ranks and not self.failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run pairs one after the other, print the table, and return 0 when all that are listed have passed."""
    parser = argparse.ArgumentParser(prog="scripts/matrix", description="Prove the table of supported versions.")
    parser.add_argument("--pair", nargs="+", metavar="PYTHON:TORCH", help="run these, such as 3.10:2.6, also again")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page, docs/support.md; results are kept beside")
    parser.add_argument("--keep", action="store_true", help="keep the environments in .matrix, and take what is there")
    options = parser.parse_args(arguments)
    for pair in options.pair or ():
        if not re.fullmatch(r"3\.\d+:\d+\.\d+(\.\d+)?", pair):
            parser.error(f"{pair!r} is no pair of a Python and a torch, such as 3.10:2.6")
        if int(pair.partition(":")[0].removeprefix("3.")) < OLDEST:
            parser.error(f"{pair!r}: ncclguard needs Python 3.{OLDEST} or later; name a pair of one that it supports")
    FOLDER.mkdir(exist_ok=True)
    kept = options.write.with_suffix(".json") if options.write is not None else None
    rows = read(kept)
    wanted = options.pair or [pair for pair in PAIRS if pair not in rows or not rows[pair].works]
    with tempfile.TemporaryDirectory(prefix="ncclguard-matrix-") as folder:
        packages = wheel.build(Path(folder)) if wanted else []
        for pair in wanted:
            rows[pair] = run(pair, packages, options.keep)
            print("| " + " | ".join(cells(rows[pair])) + " |", flush=True)
            if kept is not None:  # after each, because the whole takes long and may be ended
                kept.write_text(json.dumps([asdict(rows[pair]) for pair in ordered(rows)], indent=1) + "\n")
                options.write.write_text(page(rows))
    if kept is not None:
        options.write.write_text(page(rows))
    listed = options.pair or PAIRS
    return 0 if all(pair in rows and rows[pair].works for pair in listed) else 1


def read(kept: Path | None) -> dict[str, Row]:
    """Return what earlier runs have left."""
    if kept is None or not kept.exists():
        return {}
    found = [
        Row(**{**row, "failed": tuple(row["failed"]), "busy": tuple(row["busy"])})
        for row in json.loads(kept.read_text())
    ]
    return {row.pair: row for row in found}


def run(pair: str, packages: Sequence[Path], keep: bool) -> Row:
    """Install and test one pair."""
    python, torch = pair.split(":")
    folder = FOLDER / pair.replace(":", "-")
    interpreter = folder / "bin" / "python"
    began, day = time.monotonic(), datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    try:
        if not (keep and interpreter.exists()):
            wheel.make(folder, wheel.find_python(python), torch)
        wheel.install(interpreter, "--force-reinstall", "--no-deps", *map(str, packages))
        wheel.install(interpreter, *map(str, packages))
        versions = (
            "import platform, torch, ncclguard as n; print(platform.python_version(), torch.__version__, n.__version__)"
        )
        full, version, own = wheel.output(interpreter, "-c", versions).splitlines()[-1].split()
        build = wheel.output(interpreter, "-c", "import torch; print('CUDA', torch.version.cuda)").splitlines()[-1]
        say(f"{full}, torch {version}: the wheel and the tour")
        try:
            wheel.use(interpreter)
            installed = "passed"
        except wheel.Broken as error:
            installed = "failed"
            (FOLDER / f"{folder.name}-wheel.txt").write_text(f"{error}\n")
        # The tests are those of the clone, with what it has: the package from there too.
        wheel.install(
            interpreter, "--editable", f"{wheel.ROOT}/explain", "--editable", f"{wheel.ROOT}[test,prometheus]"
        )
        results = {}
        for name, selection in SELECTIONS.items():
            say(f"{full}, torch {version}: pytest {' '.join(selection)}")
            results[name] = suite(interpreter, selection, FOLDER / f"{folder.name}-{name}.txt")
    except wheel.Unavailable as error:
        return Row(pair, python, torch, "-", f"not run: {error}", day=day)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return Row(
        pair,
        full,
        version,
        "CPU" if build.endswith("None") else f"{build}, no GPU",
        installed,
        results["fast"][0],
        results["ranks"][0],
        failed=(*results["fast"][1], *results["ranks"][1]),
        busy=(*results["fast"][2], *results["ranks"][2]),
        ncclguard=own,
        day=day,
        minutes=round((time.monotonic() - began) / 60, 1),
        load=round(os.getloadavg()[2], 1),
    )


def suite(interpreter: Path, selection: Sequence[str], log: Path) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Counts of a selection of the suite, what failed in it and alone, and what failed in it only."""
    output, code = pytest(interpreter, "-n", "2", *selection)
    log.write_text(output)
    lines = output.strip().splitlines() or [""]
    counts = ", ".join(f"{number} {what}" for number, what in COUNTS.findall(lines[-1]))
    if not counts:
        return f"ended with {code}: {lines[-1][:100]}", ("all",), ()
    first = tuple(dict.fromkeys(FAILED.findall(output)))
    if not first:
        return counts, (), ()
    again, _ = pytest(interpreter, *first)
    log.write_text(f"{output}\n{again}")
    second = tuple(name for name in first if name in FAILED.findall(again))
    return counts, second, tuple(name for name in first if name not in second)


def pytest(interpreter: Path, *arguments: str) -> tuple[str, int]:
    """Return what pytest prints, in the clone, and its exit code."""
    done = wheel.run(interpreter, "-m", "pytest", "-q", *arguments, limit=SUITE, cwd=wheel.ROOT)
    return done.stdout + done.stderr, done.returncode


def ordered(rows: dict[str, Row]) -> list[str]:
    """The pairs by torch, then by Python."""
    return sorted(
        rows, key=lambda pair: [[int(part) for part in half.split(".")] for half in reversed(pair.split(":"))]
    )


def cells(row: Row) -> list[str]:
    """A row of the table."""
    return [row.python, row.torch, row.build, row.installed, row.fast, row.ranks, row.day, f"{row.load:g}"]


def page(rows: dict[str, Row]) -> str:
    """The page with the table, which says where it is from."""
    rows = dict(rows)
    for pair in PAIRS:
        python, torch = pair.split(":")
        rows.setdefault(pair, Row(pair, python, torch, "-", "not run"))
    lines = [
        "# Supported versions",
        "",
        "Declared: Linux, Python 3.10 to 3.13, torch 2.6 and newer. What follows was run; the page is written by the",
        "command, and edits of it are lost. A pair that is not in the table was not run.",
        "",
        "```sh",
        "./scripts/matrix --write docs/support.md   # the pairs that have not passed yet; --pair 3.10:2.6 runs one again",
        "```",
        "",
        f"{wheel.machine()}. Each pair had an empty environment with what pip found for it.",
        "",
        "- *wheel, tour*: the wheel is installed where nothing but torch is. Every command's `--help`, completion, two",
        "  ranks under torchrun (collectives that succeed, one with a late rank that is named on both), and all commands",
        "  of the [tour](tour.md), which must print what its page shows.",
        "- *fast tier*: `pytest -m fast tests/unit`, which starts no process.",
        "- *ranks*: real process groups on CPU: `tests/distributed/` " + MULTI_RANK.replace(" ", ", ") + ".",
        "- *load*: the machine's load average of 15 minutes at the end; more than the cores means that others used it.",
        "",
        "The whole suite, and CUDA tensors on an emulated GPU with torch 2.13 and 2.15, run in `.ci/run` with Python 3.11;",
        "[status.md](status.md) says what was run where. Which tests of torch, Accelerate, Lightning and others pass on the backend",
        '"ncclguard", and with which versions: [compatibility.md](compatibility.md).',
        "",
        "| Python | torch | build | wheel, tour | fast tier | ranks | day | load |",
        "|---|---|---|---|---|---|---|---|",
        *("| " + " | ".join(cells(rows[pair])) + " |" for pair in ordered(rows)),
    ]
    for pair in ordered(rows):
        row = rows[pair]
        for names, what in ((row.failed, "failed"), (row.busy, "failed beside the others and passed alone")):
            if names:
                lines += [
                    "",
                    f"Python {row.python}, torch {row.torch}, {what}:",
                    "",
                    *(f"- `{name}`" for name in names),
                ]
    return "\n".join(lines) + "\n"


def say(text: str) -> None:
    """Tell the user which step takes the time."""
    print(f"matrix: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
