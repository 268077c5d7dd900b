"""Runs other people's tests with the backend "ncclguard" in gloo's place or NCCL's, and with that beside it.

    python -m benchmarks.suites NAME [--ranks N] [--backend ncclguard] [--select TEXT] [--source FOLDER] [--out FILE]
    python -m benchmarks.suites --table

A suite is not changed: it asks for gloo or NCCL, and `place/sitecustomize.py` has torch make another backend's groups.
Those that ask for NCCL run under `scripts/emulated-gpu --gpus 4` where there is no GPU. What has failed on one of the
two is run once more, alone. Everything ends by itself, and leaves no process behind. Nothing is installed: what is
missing is named.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.suites import job, recorder, table
from benchmarks.suites.catalogue import SUITES, Part, Suite

ROOT = Path(__file__).parents[2]
NO_TESTS = 5  # pytest's code where all are deselected
Ends = dict[str, dict[str, dict[str, Any]]]  # by backend and test


def run(
    part: Part, backend: str, folder: Path, select: str = "", only: str = "", place: str = "gloo"
) -> dict[str, dict[str, Any]]:
    """Run one part with a backend in `place`, or `only` one test of it, and return how each of its tests ended."""
    record, log = folder / "record.jsonl", folder / f"{part.name}-{backend}.log"
    record.unlink(missing_ok=True)
    (folder / "made").unlink(missing_ok=True)
    path = [str(Path(__file__).parent / "place"), str(ROOT), str(ROOT / "explain")]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    env = {
        **part.env, "SUITES_PLACE": place, "SUITES_BACKEND": backend, "SUITES_RECORD": str(record), "SUITES_MADE": str(folder / "made"), "PYTHONPATH": os.pathsep.join(path),
        "NCCLGUARD_REPORT_DIR": str(folder), "NCCLGUARD_REPORT_PANEL": "false", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = part.command
    if part.pytest:
        options = ("-q", "-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider")
        command = (sys.executable, "-m", "pytest", *options, "-p", recorder.__name__, "-k", select)
        file, *more = part.command
        env["PYTHONPATH"] += f"{os.pathsep}{Path(file).parent}"  # as where torch runs a file itself: for its neighbours
        command += (f"{file}::{only.removeprefix(part.prefix)}" if only else file, *more)
    ended = job.run(command, env, folder, part.limit, log)
    if part.pytest:
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        found = {part.prefix + line.pop("test"): line for line in map(json.loads, lines)}
        if found or ended.code == NO_TESTS:
            return found
        return {part.prefix + "(all)": {"end": "failed", "seconds": round(ended.seconds, 1), "said": last_words(ended)}}
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
    others = "ChildFailedError", "Error while importing test module"  # behind them stands what it was
    raised = [text for text in recorder.RAISED.findall(ended.text) if not any(other in text for other in others)]
    said = [line for line in ended.text.splitlines() if line.strip("=- ")]
    return recorder.of_any_machine(raised[0] if raised else said[-1] if said else f"ended with {ended.code}")


#: Tests of a part that may have failed by chance: more have a reason in common, and each would start a run of its own.
CHANCE = 20


def run_parts(parts: list[Part], backends: list[str], folder: Path, select: str) -> Iterator[Ends]:
    """Run each part on each backend, and once more what did worse on one; yield all ends so far after each part.

    The first backend is torch's own, in whose place the second is.
    """
    place = backends[0]
    ends: Ends = {backend: {} for backend in backends}
    for part in parts:
        here = {}
        for backend in backends:
            here[backend] = run(part, backend, folder, select, place=place)
            say(f"{part.name} on {backend}: {counts(here[backend])}")
        for backend in backends:
            passed = {test for by in here.values() for test, end in by.items() if end["end"] == "passed"}
            worse = [test for test in sorted(passed) if here[backend].get(test, {"end": "failed"})["end"] == "failed"]
            for test in worse if len(worse) <= CHANCE else ():
                again = run(part, backend, folder, only=test if part.pytest else "", place=place).get(test)
                if again is not None:
                    here[backend][test] = again | {"tries": 2}
                    say(f"{test} on {backend} once more: {again['end']} {again.get('said', '')}")
            ends[backend] |= here[backend]
        yield ends


def counts(ends: dict[str, dict[str, Any]]) -> str:
    """Count how tests ended."""
    found = [end["end"] for end in ends.values()]
    return ", ".join(f"{found.count(end)} {end}" for end in dict.fromkeys(found))


def versions(suite: Suite, source: Path | None) -> dict[str, str]:
    """Return the versions of what takes part, and the commit of the tests where a repository has them."""
    names: dict[str, None] = dict.fromkeys(("torch", *suite.packages, "ncclguard"))
    found = {name: importlib.metadata.version(name) for name in names if name not in ("pytest", "expecttest")}
    if suite.repository is None or source is None:
        return found
    return found | {"/".join(suite.repository.url.split("/")[-2:]): commit_of(source)}


def commit_of(source: Path) -> str:
    """Return the commit of a checkout, or what `version.txt` says in a folder that is none."""
    command = ("git", "-C", str(source), "log", "-1", "--format=%h")
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or (source / "version.txt").read_text(encoding="utf-8").strip()


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
    parser.add_argument("--backend", default="ncclguard", help="the backend in the place of torch's own")
    parser.add_argument("--select", default="", help="only tests whose names have this, as pytest's -k")
    parser.add_argument(
        "--files", nargs="+", default=[""], help="of a suite's files only those whose paths have one of these"
    )
    parser.add_argument(
        "--source", type=Path, help="the checkout that has the suite's tests, where no package has them"
    )
    parser.add_argument(
        "--out", type=Path,
        help="write FILE, with .json, and the same with .md; never overwrites one, and goes on with one that was broken off",
    )  # fmt: skip
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
    repository = suite.repository
    if repository is not None and options.source is None:
        parser.error(f"--source FOLDER is missing; make it with: git clone {repository.url} FOLDER && "
                     f"git -C FOLDER checkout {repository.commit}")  # fmt: skip
    there = options.out is not None and options.out.exists()
    earlier = json.loads(options.out.read_text(encoding="utf-8")) if there else None
    if earlier is not None and not table.is_broken_off(earlier):
        parser.error(f"{options.out} exists and is never overwritten; choose another name")
    job.adopt_orphans()
    ranks, began = options.ranks or suite.ranks[0], datetime.datetime.now(datetime.timezone.utc)
    backends = [suite.place, options.backend]
    source = options.source.resolve() if repository is not None else None
    known = versions(suite, source)
    with tempfile.TemporaryDirectory(prefix="suites-", ignore_cleanup_errors=True) as name:
        parts = suite.parts(ranks, source or Path(name))
        parts = [
            part
            for part in parts
            if any(name in part.prefix for name in options.files) and (part.pytest or options.select in part.name)
        ]
        page, results = "", {"suite": options.name, "backends": backends, "tests": {}}
        first = 0 if earlier is None else earlier["parts"][0]
        for done, ends in enumerate(run_parts(parts[first:], backends, Path(name), options.select), first + 1):
            tests, skipped = table.merged(ends)
            results = {
                "schema_version": 1, "suite": options.name, "about": suite.about, "ranks": ranks, "backends": backends,
                "command": f"python -m benchmarks.suites {shlex.join(sys.argv[1:])}", "versions": known,
                "machine": {"day": began.date().isoformat(), "python": platform.python_version(), "kernel": platform.release(),
                            "cores": os.cpu_count(), "load": round(os.getloadavg()[2], 1)},
                "seconds": {backend: round(sum(end["seconds"] for end in by_name.values()), 1) for backend, by_name in ends.items()},
                "parts": [done, len(parts)], "tests": tests, "skipped": skipped,
            }  # fmt: skip
            results = results if earlier is None else table.continued(earlier, results)
            page = table.rendered(results)
            if options.out is not None:  # after each part: what is broken off has taken hours
                options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                options.out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)
    return 1 if table.without_reason(results) else 0


if __name__ == "__main__":
    sys.exit(main())
