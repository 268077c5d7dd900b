"""A plugin of pytest (`-p benchmarks.suites.recorder`): a line of JSON for each test that has ended, in SUITES_RECORD.

A run that has to be ended still tells what had passed before. A test that takes longer than SUITES_LIMIT seconds is
ended with all its processes, and has failed. Ranks that a suite would start as new processes are forks of the one that
runs pytest, which has imported torch already.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.context
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.suites import job

LIMIT = float(os.environ.get("SUITES_LIMIT", "0"))
PLACE = os.environ.get("SUITES_PLACE", "gloo")
#: The groups that were made before, and the classes with a test that made one: others do not ask for gloo's.
MADE: dict[Any, int] = {}

#: What a rank that failed has raised, in the report of torch's own rig.
RAISED = re.compile(
    r"^(?:E\s+|\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Lost|Failed|Timeout|Mismatch)\b.*)$", re.MULTILINE
)


def pytest_configure() -> None:
    """Have "spawn" and "forkserver" fork: with them each rank of each test imports torch anew.

    This process has asked how many GPUs there are, after which no fork of it may use one: ranks that do are forks of a
    server that has only imported torch.
    """
    known: dict[str, Any] = vars(multiprocessing.context)["_concrete_contexts"]
    if PLACE == "gloo":
        known.update(spawn=known["fork"], forkserver=known["fork"])
    else:
        more = os.environ.get("SUITES_PRELOADED", "").split()
        multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel", *more])
        known.update(spawn=known["forkserver"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Bound a test, whatever waits in it; a second time where its end takes as long again."""

    def over(*_: Any) -> None:
        job.end_all()
        pytest.fail(f"had not ended after {LIMIT:.0f} s", pytrace=False)  # which nothing on the way takes for its own

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, LIMIT, LIMIT)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note a test that has ended, or that ended before its body."""
    report: Any = yield
    if groups_made() > MADE.get("groups", 0):
        MADE.update({"groups": groups_made(), item.parent: 1})
    if report.when != "call" and report.outcome == "passed":
        return report
    end, said = report.outcome, ""
    if end == "skipped":
        said = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    elif item.parent not in MADE:
        end, said = "skipped", f"makes no group of {PLACE}'s"
    elif end == "failed":
        raised = RAISED.findall(str(report.longrepr))
        said = raised[-1] if raised else str(report.longrepr).strip().rpartition("\n")[2]
    line = {"test": report.nodeid.partition("::")[2], "end": end, "seconds": round(report.duration, 2)}
    with open(os.environ["SUITES_RECORD"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line | {"said": of_any_machine(said)}) + "\n")
    return report


def of_any_machine(said: str) -> str:
    """Return the beginning of what was said, with files by their names alone: their folders are of this machine."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\"()]+/)+", "", said)[:300]


def groups_made() -> int:
    """Count the groups that were made in gloo's place, or by gloo, since the run began (place/sitecustomize.py)."""
    try:
        return os.path.getsize(os.environ["SUITES_MADE"])
    except OSError:
        return 0
