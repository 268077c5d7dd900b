"""Which Pythons and versions of torch work: `scripts/matrix [--python 3.10 ...] [--torch 2.6 ...] [--write FILE]`.

For each pair it makes an empty environment in `.matrix/`, installs that torch and the project with its tests, runs the
fast tier and `scripts/smoke.py`, and removes the environment. What cannot be installed is a row of the table that says
why. The standard library alone is used.
"""

from __future__ import annotations

import argparse
import datetime
import glob
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from environment import CPU_INDEX

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".matrix"
#: The pairs that are run when nobody names others: the ends of both ranges, and what people have most.
PAIRS = (("3.10", "2.6"), ("3.11", "2.13"), ("3.12", "2.15"), ("3.13", "2.6"), ("3.13", "2.15"))
#: Seconds for an installation, for the fast tier and for the smoke run.
INSTALL, FAST, SMOKE = 1800, 1500, 700
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


@dataclass(frozen=True)
class Row:
    """What one pair came to; `torch` is the version that was installed, or the one that was asked for."""

    python: str
    torch: str
    build: str
    fast: str
    smoke: str
    failed: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Whether everything passed."""
        return self.smoke == "passed" and not self.failed and "passed" in self.fast and "failed" not in self.fast


class Unavailable(Exception):
    """A pair cannot be run here; the text says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all pairs one after the other, print the table, and return 0 when everything passed."""
    parser = argparse.ArgumentParser(prog="scripts/matrix", description="Prove the table of supported versions.")
    parser.add_argument("--python", nargs="+", metavar="X.Y", help="Pythons; with --torch every pair of the two")
    parser.add_argument("--torch", nargs="+", metavar="X.Y", help="versions of torch")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page with the table, docs/support.md")
    options = parser.parse_args(arguments)
    pairs: Sequence[tuple[str, str]] = PAIRS
    if options.python or options.torch:
        pythons, torches = options.python or ["3.11"], options.torch or ["2.13"]
        pairs = [(python, torch) for python in pythons for torch in torches]
    began = time.monotonic()
    rows: list[Row] = []
    command = shlex.join(["./scripts/matrix", *(sys.argv[1:] if arguments is None else arguments)])
    for number, (python, torch) in enumerate(pairs, 1):
        rows.append(run(python, torch))
        print("| " + " | ".join(cells(rows[-1])) + " |", flush=True)
        if options.write is not None:  # after each, because the whole takes long and may be ended
            left = [Row(python, torch, "-", "not run", "not run") for python, torch in pairs[number:]]
            options.write.write_text(page([*rows, *left], command, (time.monotonic() - began) / 60))
    return 0 if all(row.works for row in rows) else 1


def run(python: str, torch: str) -> Row:
    """Install and test one pair."""
    folder = FOLDER / f"{python}-{torch}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        interpreter = make(folder, find_python(python), torch)
        found = output(interpreter, "-c", "import platform, torch; print(platform.python_version(), torch.__version__)")
        full, version = found.splitlines()[-1].split()
        build = output(interpreter, "-c", "import torch; print(torch.version.cuda or '')").splitlines()
        kind = f"CUDA {build[-1]}, no GPU" if build and build[-1] else "CPU"
        say(f"{python}, torch {version}: the fast tier")
        fast, failed = run_fast(interpreter)
        say(f"{python}, torch {version}: two ranks")
        return Row(full, version, kind, fast, run_smoke(interpreter), failed)
    except Unavailable as error:
        return Row(python, torch, "-", f"not run: {error}", "not run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_python(version: str) -> str:
    """The interpreter of that version on the path or among pyenv's. Raises Unavailable."""
    found = shutil.which(f"python{version}")
    if found is not None and subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode == 0:
        return found  # pyenv's shims are on the path for versions too that it refuses to run
    root = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    installed = sorted(glob.glob(f"{root}/versions/{version}.*/bin/python"))
    if not installed:
        raise Unavailable(f"there is no Python {version} here")
    return installed[-1]


def make(folder: Path, python: str, torch: str) -> Path:
    """The Python of a new environment with that torch and the project. Raises Unavailable."""
    say(f"{folder.name}: installing")
    if subprocess.run([python, "-m", "venv", folder], check=False, capture_output=True).returncode:
        raise Unavailable(f"{Path(python).name} makes no environments")
    interpreter = folder / "bin" / "python"
    pip = [str(interpreter), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    required = f"torch=={torch}.*"
    steps = [
        [[*pip, required, "--index-url", CPU_INDEX, "--retries", "0", "--timeout", "10"], [*pip, required]],
        [[*pip, "--editable", f"{ROOT}[test,prometheus]"]],
    ]
    for alternatives in steps:
        for command in alternatives:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=INSTALL)
            if done.returncode == 0:
                break
        else:
            reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
            raise Unavailable(f"pip: {reasons[-1].removeprefix('ERROR: ')}")
    return interpreter


def run_fast(interpreter: Path) -> tuple[str, tuple[str, ...]]:
    """Counts of the fast tier, and the names of what failed."""
    command: list[str | Path] = [interpreter, "-m", "pytest", "-q", "-m", "fast", "-n", "2", "tests/unit"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=FAST
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {FAST} s", ("all",)
    lines = done.stdout.strip().splitlines() or [""]
    counts = ", ".join(f"{number} {what}" for number, what in COUNTS.findall(lines[-1]))
    if not counts:
        (FOLDER / "failed.txt").write_text(done.stdout + done.stderr)
        return f"ended with {done.returncode}: {lines[-1][:100]}", ("all",)
    failed = tuple(dict.fromkeys(FAILED.findall(done.stdout)))
    if failed:
        (FOLDER / f"{interpreter.parents[1].name}.txt").write_text(done.stdout)
    return counts, failed


def run_smoke(interpreter: Path) -> str:
    """Whether two ranks do what `scripts/smoke.py` asks of them."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [interpreter, ROOT / "scripts" / "smoke.py"]
    try:
        done = subprocess.run(
            command, check=False, cwd="/", env=environment, capture_output=True, text=True, timeout=SMOKE
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {SMOKE} s"
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
    return "passed" if done.returncode == 0 else f"failed with {done.returncode}"


def cells(row: Row) -> list[str]:
    """A row of the table."""
    return [row.python, row.torch, row.build, row.fast, row.smoke]


def page(rows: Sequence[Row], command: str, minutes: float) -> str:
    """The page with the table, which says where it is from."""
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    machine = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores"
    lines = [
        "# Supported versions",
        "",
        "Declared: Linux, Python 3.10 to 3.13, torch 2.6 and newer. What follows was run; the page is written by the",
        "command, and edits of it are lost.",
        "",
        "```sh",
        command,
        "```",
        "",
        f"On {day}, {machine}, {minutes:.0f} minutes. Each pair had an empty environment with what pip found for it.",
        "*fast tier*: `pytest -m fast tests/unit`, which starts no process. *two ranks*: `scripts/smoke.py` under",
        "torchrun, gloo beside it: collectives that succeed, one with a late rank that is named on both ranks, and its",
        "page. The multi-rank tests, and CUDA tensors on an emulated GPU, run in `.ci/run` with Python 3.11: see the",
        "status table of [README.md](../README.md).",
        "",
        "| Python | torch | build | fast tier | two ranks |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
    ]
    for row in rows:
        if row.failed and row.failed != ("all",):
            lines += ["", f"Failed with Python {row.python} and torch {row.torch}:", ""]
            lines += [f"- `{name}`" for name in row.failed]
    return "\n".join(lines) + "\n"


def output(*command: str | Path) -> str:
    """What a command prints. Raises Unavailable when it fails."""
    done = subprocess.run(list(command), check=False, capture_output=True, text=True, cwd="/")
    if done.returncode:
        raise Unavailable((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return done.stdout.strip()


def say(text: str) -> None:
    """Tell the user which step takes the time."""
    print(f"matrix: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    sys.exit(main())
