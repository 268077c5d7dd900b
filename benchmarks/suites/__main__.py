"""Runs other people's tests with the backend "ncclguard" in gloo's place, and with gloo beside it.

    python -m benchmarks.suites NAME [--ranks N] [--backend ncclguard] [--select TEXT] [--out FILE]
    python -m benchmarks.suites --table

A suite is not changed: it asks for gloo, and `place/sitecustomize.py` has torch make another backend's groups. What has
failed on one of the two is run once more, alone. Everything ends by itself, and leaves no process behind. Nothing is
installed: what is missing is named.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.suites import job, recorder, table
from benchmarks.suites.catalogue import SUITES, Part, Suite

ROOT = Path(__file__).parents[2]


def run(part: Part, backend: str, folder: Path, select: str = "", only: str = "") -> dict[str, dict[str, Any]]:
    """Run one part on one backend, or `only` one test of it, and return how each of its tests ended."""
    record, log = folder / "record.jsonl", folder / f"{part.name}-{backend}.log"
    record.unlink(missing_ok=True)
    path = [str(Path(__file__).parent / "place"), str(ROOT), str(ROOT / "explain")]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    env = {
        **part.env, "SUITES_BACKEND": backend, "SUITES_RECORD": str(record), "PYTHONPATH": os.pathsep.join(path),
        "NCCLGUARD_REPORT_DIR": str(folder), "NCCLGUARD_REPORT_PANEL": "false", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = part.command
    if part.pytest:
        options = ("-q", "-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider")
        command = (sys.executable, "-m", "pytest", *options, "-p", recorder.__name__, "-k", select)
        command += tuple(f"{path}::{only}" for path in part.command if only) or part.command
    ended = job.run(command, env, folder, part.limit, log)
    if part.pytest:
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        found = {line.pop("test"): line for line in map(json.loads, lines)}
        return found or {part.name: {"end": "failed", "seconds": round(ended.seconds, 1), "said": last_words(ended)}}
    end: dict[str, Any] = {"end": "passed" if ended.code == 0 else "failed", "seconds": round(ended.seconds, 1)}
    printed = [line for line in ended.text.splitlines() if line.startswith("RESULT ")]
    if ended.code != 0:
        end["said"] = last_words(ended)
        if end["said"].startswith("ModuleNotFoundError"):  # of a package that only some programs of a suite need
            end["end"] = "skipped"
    elif printed:
        end["result"] = printed[-1].removeprefix("RESULT ")
    return {part.name: end}


def last_words(ended: job.Ended) -> str:
    """Say why a program failed: the exception that it, or its first rank to fail, has raised."""
    if ended.code is None:
        return f"had not ended after {ended.seconds:.0f} s"
    raised = [text for text in recorder.RAISED.findall(ended.text) if "ChildFailedError" not in text]
    said = [line for line in ended.text.splitlines() if line.strip("=- ")]
    return (raised[0] if raised else said[-1] if said else f"ended with {ended.code}")[:300]


def run_suite(suite: Suite, ranks: int, backends: list[str], select: str) -> dict[str, Any]:
    """Run a suite on each backend, and once more what failed on one; return how tests ended, by backend and test."""
    ends: dict[str, dict[str, dict[str, Any]]] = {backend: {} for backend in backends}
    with tempfile.TemporaryDirectory(prefix="suites-", ignore_cleanup_errors=True) as name:
        parts = suite.parts(ranks, Path(name))
        for part in parts:
            if not part.pytest and select not in part.name:
                continue
            for backend in backends:
                ends[backend] |= run(part, backend, Path(name), select)
                say(f"{part.name} on {backend}: {counts(ends[backend])}")
        for part in parts:
            for backend in backends:
                failed = [test for test, end in ends[backend].items() if end["end"] == "failed"]
                failed = [
                    test for test in failed if any(by[test]["end"] == "passed" for by in ends.values() if test in by)
                ]
                failed = [test for test in failed if part.pytest or test == part.name]
                for test in failed:
                    again = run(part, backend, Path(name), only=test if part.pytest else "").get(test)
                    if again is not None:
                        ends[backend][test] = again | {"tries": 2}
                        say(f"{test} on {backend} once more: {again['end']}")
    return ends


def counts(ends: dict[str, dict[str, Any]]) -> str:
    """Count how tests ended."""
    found = [end["end"] for end in ends.values()]
    return ", ".join(f"{found.count(end)} {end}" for end in dict.fromkeys(found))


def versions(suite: Suite) -> dict[str, str]:
    """Return the versions of what takes part."""
    names = dict.fromkeys(
        ("torch", *(name for name in suite.packages if name not in ("pytest", "expecttest")), "ncclguard")
    )
    return {name: importlib.metadata.version(name) for name in names}


def say(text: str) -> None:
    """Tell the user what is done."""
    print(f"suites: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Run a suite, write its table, and return 1 where a test is ours and has no reason."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("name", nargs="?", choices=list(SUITES), help="the suite")
    parser.add_argument(
        "--ranks", type=int, help="ranks of each job; by default the first number that the suite is run with"
    )
    parser.add_argument("--backend", default="ncclguard", help="the backend in gloo's place")
    parser.add_argument("--select", default="", help="only tests whose names have this, as pytest's -k")
    parser.add_argument("--out", type=Path, help="write FILE, with .json, and the same with .md; never overwrites one")
    parser.add_argument("--table", action="store_true", help="print the table of all committed results")
    options = parser.parse_args()
    if options.table:
        print("\n".join([*table.header(), *map(table.row, table.newest())]))
        return 0
    if options.name is None:
        parser.error(f"name a suite: {', '.join(SUITES)}")
    suite = SUITES[options.name]
    if suite.missing():
        parser.error(f"{', '.join(suite.missing())} is not installed: pip install {suite.install}")
    if options.out is not None and options.out.exists():
        parser.error(f"{options.out} exists and is never overwritten; choose another name")
    job.adopt_orphans()
    ranks, began = options.ranks or suite.ranks[0], datetime.datetime.now(datetime.timezone.utc)
    backends = ["gloo", options.backend]
    ends = run_suite(suite, ranks, backends, options.select)
    tests, skipped = table.merged(ends)
    results = {
        "schema_version": 1, "suite": options.name, "about": suite.about, "ranks": ranks, "backends": backends,
        "command": " ".join(["python -m benchmarks.suites", *sys.argv[1:]]), "versions": versions(suite),
        "machine": {"day": began.date().isoformat(), "python": platform.python_version(), "kernel": platform.release(),
                    "cores": os.cpu_count(), "load": round(os.getloadavg()[2], 1)},
        "seconds": {backend: round(sum(end["seconds"] for end in by_name.values()), 1) for backend, by_name in ends.items()},
        "tests": tests, "skipped": skipped,
    }  # fmt: skip
    page = table.rendered(results)
    print(page)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        options.out.with_suffix(".md").write_text(page, encoding="utf-8")
    return 1 if table.without_reason(results) else 0


if __name__ == "__main__":
    sys.exit(main())
