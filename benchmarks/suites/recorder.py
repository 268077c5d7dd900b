"""A plugin of pytest (`-p benchmarks.suites.recorder`): a line of JSON for each test that has ended, in SUITES_RECORD.

A run that has to be ended still tells what had passed before.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

#: What a rank that failed has raised, in the report of torch's own rig.
RAISED = re.compile(
    r"^(?:E\s+|\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Lost|Failed|Timeout|Mismatch)\b.*)$", re.MULTILINE
)


def pytest_runtest_logreport(report: Any) -> None:
    """Note a test that has ended, or that ended before its body."""
    if report.when != "call" and report.outcome == "passed":
        return
    said = ""
    if report.outcome == "skipped":
        said = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    elif report.outcome == "failed":
        raised = RAISED.findall(str(report.longrepr))
        said = raised[-1] if raised else str(report.longrepr).strip().rpartition("\n")[2]
    line = {"test": report.nodeid.partition("::")[2], "end": report.outcome, "seconds": round(report.duration, 2)}
    with open(os.environ["SUITES_RECORD"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line | {"said": said[:300]}) + "\n")
