"""Other ways to meet a collective that does not end, beside ncclguard on this machine: what each fault comes to, and
what a call costs.

    python -m benchmarks.peers [--ways plain guarded ...] [--faults late kill ...] [--ranks 4] [--json FILE]

Each way is set up as its own documentation says (ways.py); what is not installed is listed as not measured. The
faults are those of `ncclguard drill`; one rank is struck, and the table says what became of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import cost
from benchmarks.peers.findings import Findings, findings_of, table
from benchmarks.peers.job import FAULTS, STRUCK, run_rank
from benchmarks.peers.ways import LIMIT, WAYS, version
from ncclguard import faults
from ncclguard.faults.launcher import reserve_port

_RUN = 90.0  # seconds after which a run is ended


def run(way: str, fault: str, ranks: int) -> Findings:
    """One way under one fault, in a job of its own."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-"))
        ports = [stack.enter_context(contextlib.closing(reserve_port())).getsockname()[1] for _ in range(2)]
        address = stack.enter_context(cost.lighthouse()) if way.startswith("torchft") else ""
        result = faults.run_ranks(
            run_rank,
            ranks,
            args=[way, fault, folder, ports, address],
            env={"NCCLGUARD_REPORT_PANEL": "false"},
            timeout=_RUN,
            launcher="processes" if WAYS[way].alone else "fork",
        )
        events = {
            rank: [json.loads(line) for line in read(Path(folder, f"rank{rank}.events"))] for rank in range(ranks)
        }
    ends = {rank.rank: rank.end for rank in result}
    return findings_of(way, fault, events, ends)


def read(file: Path) -> list[str]:
    """The lines of a rank's file."""
    return file.read_text().splitlines() if file.exists() else []


def keep(path: Path | None, content: dict[str, Any]) -> None:
    """Write what there is so far: a run of all faults takes a quarter of an hour."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Run everything asked for, print the tables, and return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cycles", type=int, default=60, help="timed cycles of the costs; 0: no costs")
    parser.add_argument("--json", type=Path, help="write everything here; never overwrites a file")
    options = parser.parse_args()
    if options.json is not None and options.json.exists():
        parser.error(f"{options.json} exists and is never overwritten; choose another name")
    if options.ranks <= STRUCK:
        parser.error(f"--ranks is {options.ranks}; rank {STRUCK} is struck, so give {STRUCK + 1} or more")
    chosen = [name for name in options.ways if version(WAYS[name]) is not None and WAYS[name].there]
    versions = {WAYS[name].package: version(WAYS[name]) for name in WAYS}
    machine = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "torch build": torch.__version__,
    }
    print(f"# {options.ranks} ranks on one host, gloo; rank {STRUCK} is struck; limit {LIMIT:g} s; {machine}")
    print("# " + ", ".join(f"{name} {found or 'not installed: not measured'}" for name, found in versions.items()))
    content: dict[str, Any] = {"schema_version": 1, "machine": machine, "versions": versions, "limit": LIMIT}
    content |= {"ranks": options.ranks, "faults": [], "costs": {}}
    if options.json is not None:
        cost.write(options.json, content)
    for fault in options.faults:
        rows = [run(way, fault, options.ranks) for way in chosen]
        print(f"\n{fault}: {FAULTS[fault]}\n{table(rows)}", flush=True)
        content["faults"] += [row.as_json() for row in rows]
        keep(options.json, content)
    if options.cycles:
        content["costs"] = cost.measure(2, 1, options.cycles)
        print("\n" + cost.text(content["costs"]))
        keep(options.json, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
