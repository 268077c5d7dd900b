"""Measure the report of an incident, the picture of `top --all` and the page of `explain` by the number of ranks.

    python benchmarks/report_scale.py [--ranks 16 512 10000 16384]

Ranks on hosts of 8, one of them late; what the ranks say goes through the same bounds as in a job. Given are seconds of
this process (CPU time, the least of three) and bytes, of the panel lines. `explain` reads one merged log in which all
ranks but one print a timeout.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from ncclguard import explain
from ncclguard.coordination import incidents
from ncclguard.coordination.group_state import GroupState
from ncclguard.engine.description import shortened
from ncclguard.incident import timeline
from ncclguard.incident.model import Incident
from ncclguard.incident.page import render_html
from ncclguard.incident.report import show
from ncclguard.incident.timeline import Document
from ncclguard.metrics.top_command import job_view
from ncclguard.protocol.decision import Operation, Phase, Report, Trouble, TroubleKind
from ncclguard_explain.render import render_html as explain_page

T = TypeVar("T")
TEXT = "all_reduce(float32[467019003], SUM)"
KEY = "0:cpu:ab12"
LINE = (
    "[rank{r}]:[E709 17:05:38.162555850 ProcessGroupNCCL.cpp:632] [PG ID 0 PG GUID 0(default_pg) Rank {r}] [Rank {r}] "
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=56731, OpType=ALLREDUCE, NumelIn=467019003, "
    "NumelOut=467019003, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
)


def least(work: Callable[[], T], times: int = 3) -> tuple[float, T]:
    """The least seconds of CPU time, and what came of it."""
    found = []
    for _ in range(times):
        begin = time.process_time()
        made = work()
        found.append(time.process_time() - begin)
    return min(found), made


def answers(size: int, late: int) -> dict[int, Report]:
    """What each rank says: a stack, and twenty operations."""
    found = {}
    waits = Trouble(TroubleKind.DEADLINE, "not complete")
    for rank in range(size):
        past = [timeline.Past(n, TEXT, n + 0.01 * (rank % 7), n + 0.5, True) for n in range(1, 21)]
        inside = [] if rank == late else [(KEY, 21, TEXT, 21.0)]
        details = {
            "host": f"node{rank // 8:04}", "pid": 1000 + rank, "history": timeline.snapshot({KEY: past}, inside, 51.0),
            "stack": [f"train.py:{line} in step: loss = model(batch)" for line in range(20)],
            "call_site": "" if rank == late else "train.py:211 in step", "call": "" if rank == late else TEXT, "last": TEXT,
        }  # fmt: skip
        operation = None if rank == late else Operation(21, 7, TEXT)
        phase = Phase.NONE if rank == late else Phase.RUNNING
        found[rank] = Report(
            rank, 0, 20, operation, phase, age=30.0, budget=0.0, trouble=None if rank == late else waits,
            details=shortened(details, size),
        )  # fmt: skip
    return found


def measure(size: int) -> None:
    """One line for this number of ranks."""
    late = size // 2 - 1
    reports = answers(size, late)
    group = GroupState(KEY, 0, tuple(range(size)))
    judged, verdict = least(
        lambda: group.judge(0, tuple(range(size)), reports, {}, {}, 0, incidents.summarise), times=1
    )
    histories = {int(r): one for r, one in json.loads(incidents.histories(reports, {}, (late,))).items()}
    incident = Incident.from_json(verdict.incident)
    panel, stream = least(lambda: _panel(incident))
    laid, lanes = least(lambda: timeline.build(incident, histories))
    document = Document(
        written_at="2026-01-01T00:00:00+00:00", written_by=0, host="node0000", job="ab", world_size=size, ncclguard="0",
        torch="2", incident=incident, timeline=lanes,
    )  # fmt: skip
    page, html = least(lambda: render_html(document))
    data = document.model_dump_json()
    rows = [(rank, f"node{rank // 8:04}", 1, int(rank == late) * 90, 0.3 if rank == late else 1e-4, 0.5, 0.1, 0.01) for rank in range(size)]  # fmt: skip
    table = {"group": "0:cpu", "through": f"{KEY}/20", "age": 3.0, "operations": 100, "rows": rows}
    answer = {
        "rank": 0, "world_size": size, "statistics_every": 100, "warn_after": 30.0, "open": [], "tables": {KEY: table},
        "awaited": [],
    }  # fmt: skip
    top, picture = least(lambda: _printed(job_view("job", {0: answer})))
    print(
        f"{size:>6} ranks: verdict {judged:.2f} s, incident {len(verdict.incident):,} bytes; panel {panel:.3f} s, "
        f"{stream.count(chr(10))} lines, {len(stream.encode()):,} bytes; timeline {laid:.2f} s; page {page:.2f} s, "
        f"{len(html.encode()):,} bytes; JSON {len(data):,} bytes; top {top:.2f} s, {picture.count(chr(10))} lines of "
        f"{len(json.dumps(answer)):,} bytes",
        flush=True,
    )


def _panel(incident: Incident) -> str:
    stream = io.StringIO()
    show(incident, stream)
    return stream.getvalue()


def _printed(what: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160).print(what)
    return stream.getvalue()


def measure_explain(size: int) -> None:
    """The log of all ranks but one, read and shown."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.log").write_text("".join(LINE.format(r=r) for r in range(size) if r != size // 2 - 1))
        read, report = least(lambda: explain.explain([folder], world_size=size), times=1)
    page, html = least(lambda: explain_page(report))
    named = ", ".join(map(str, report.culprits[:3]))
    print(
        f"{size:>6} ranks: explain read {read:.1f} s, named {named}; page {page:.2f} s, {len(html):,} bytes", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 512, 10_000, 16_384])
    for size in parser.parse_args().ranks:
        measure(size)
        measure_explain(size)


if __name__ == "__main__":
    main()
