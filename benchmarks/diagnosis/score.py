"""Score diagnoses on cases with known truth: ncclguard explain, and torch's own flight-recorder analysis.

    python benchmarks/diagnosis/score.py [--verbose] [FOLDER ...]

A case is a folder with a `truth.json` and the files that a job left. Without arguments: the cases beside this
script, and
the recordings of plain NCCL jobs in tests/unguarded_logs. Printed is a table in Markdown: the line that results/ keeps.

`truth.json`: `culprits` (list; empty: nobody can be named; absent: not known), `classes`, `decisions` (any of them
is right),
`incident`, `op`, `seq`, `numel_in`, `timeout_ms`, `world_size` (told to the tool). The recordings have `expected`
instead: for each
kind of evidence the lists of culprits that may come out, and `struck`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ncclguard.explain import explain

HERE = Path(__file__).parent
DEFAULT = (HERE / "cases", HERE.parents[1] / "tests" / "unguarded_logs")


_TORCH = """
import contextlib, io, json, os, sys
from torch.distributed.flight_recorder import fr_trace
for folder in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        text = io.StringIO()
        import logging
        logging.basicConfig(stream=text, level=logging.INFO, force=True)
        for name in list(logging.root.manager.loggerDict):
            logging.getLogger(name).handlers = [logging.StreamHandler(text)]
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(BaseException):
            fr_trace.main([folder, "-p", "comm_lib_trace_rank_", "--allow-incomplete-ranks"])
        os.write(1, (json.dumps([folder, text.getvalue()]) + chr(10)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
"""


def by_torch(folders: Sequence[Path]) -> dict[Path, set[int]]:
    """Return, for folders of dumps, the ranks that torch's flight-recorder analysis calls missing or culprit."""
    done = subprocess.run(
        [sys.executable, "-c", _TORCH, *map(str, folders)], capture_output=True, text=True, check=True
    )
    named: dict[Path, set[int]] = {}
    for row in done.stdout.splitlines():
        folder, text = json.loads(row)
        ranks = named.setdefault(Path(folder), set())
        for found in re.finditer(r"missing ranks: \{([\d, ]+)\}|Culprit rank (\d+)", text):
            ranks |= {int(part) for part in re.findall(r"\d+", found[1] or found[2])}
    return named


def score_own(folder: Path, truth: dict[str, Any], count: Counter[str]) -> list[str]:
    """Count what is right about one case of our own form and return what is wrong."""
    report = explain(
        [str(path) for path in sorted(folder.iterdir()) if path.name != "truth.json"],
        world_size=truth.get("world_size"),
    )
    wrong: list[str] = []

    def check(what: str, right: bool, got: object) -> None:
        count[what] += 1
        count[f"{what} ok"] += right
        if not right:
            wrong.append(f"{what}: {got}")

    if "culprits" in truth:
        check("culprits exact", list(report.culprits) == truth["culprits"], report.culprits)
        count["healthy named"] += bool(set(report.culprits) - set(truth["culprits"]))
    check("incident seen", report.incident == truth.get("incident", True), report.incident)
    for name in ("op", "seq", "numel_in"):
        if name in truth:
            check(
                "op, seq, numel, timeout",
                getattr(report.collective, name, None) == truth[name],
                f"{name} {getattr(report.collective, name, None)}",
            )
    if "timeout_ms" in truth:
        check(
            "op, seq, numel, timeout",
            report.effective_timeout_ms == truth["timeout_ms"],
            f"timeout {report.effective_timeout_ms}",
        )
    if truth.get("classes"):
        check("class", report.cause_class in truth["classes"], report.cause_class)
    if truth.get("decisions"):
        check("decision", report.decision in truth["decisions"], report.decision)
    return wrong


def score_recording(
    folder: Path, truth: dict[str, Any], count: Counter[str], theirs: Mapping[Path, set[int]]
) -> list[str]:
    """Count both tools on a recording: the struck rank named, nobody else named."""
    wrong: list[str] = []
    for kind, allowed in truth["expected"].items():
        inputs = [folder / "logs", folder / "dumps"] if kind == "both" else [folder / kind]
        named = list(explain([str(path) for path in inputs]).culprits)
        count["recordings"] += 1
        count["recordings ok"] += named in allowed
        count["recordings struck"] += named == [truth["struck"]]
        count["recordings healthy"] += bool(set(named) - {truth["struck"]})
        if named not in allowed:
            wrong.append(f"{kind}: {named}")
        if kind != "dumps":
            continue
        for tool, ranks in (("ours", set(named)), ("torch", theirs.get(folder / "dumps", set()))):
            count[f"dumps {tool}"] += 1
            count[f"dumps {tool} struck"] += ranks == {truth["struck"]}
            count[f"dumps {tool} among"] += truth["struck"] in ranks
            count[f"dumps {tool} healthy"] += bool(ranks - {truth["struck"]})
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print each case that is not right")
    arguments = parser.parse_args()
    count: Counter[str] = Counter()
    paths = [path for root in arguments.folders or DEFAULT for path in sorted(root.rglob("truth.json"))]
    dumps = [path.parent / "dumps" for path in paths if (path.parent / "dumps").is_dir()]
    theirs = by_torch(dumps) if dumps else {}
    for path in paths:
        truth = json.loads(path.read_text(encoding="utf-8"))
        if "expected" in truth:
            wrong = score_recording(path.parent, truth, count, theirs)
        else:
            wrong = score_own(path.parent, truth, count)
        if wrong and arguments.verbose:
            print(f"{path.parent.name}: {'; '.join(wrong)}")
    print("\n| ncclguard explain, logs | right | of |\n|---|---|---|")
    for name in ("culprits exact", "incident seen", "op, seq, numel, timeout", "class", "decision"):
        print(f"| {name} | {count[f'{name} ok']} | {count[name]} |")
    print(f"| cases with a healthy rank named | {count['healthy named']} | {count['culprits exact']} |")
    print(
        f"\n| recordings of plain NCCL jobs (logs, dumps, both) | right | of |\n|---|---|---|\n| as the evidence allows | {count['recordings ok']} | {count['recordings']} |"
    )
    print(
        f"| the struck rank, and only it | {count['recordings struck']} | {count['recordings']} |\n| a healthy rank named | {count['recordings healthy']} | {count['recordings']} |"
    )
    print("\n| dumps alone | the struck rank, only | among others | a healthy rank named | of |\n|---|---|---|---|---|")
    for tool, title in (("ours", "ncclguard explain"), ("torch", "torch.distributed.flight_recorder")):
        row = (
            count[f"dumps {tool} struck"],
            count[f"dumps {tool} among"],
            count[f"dumps {tool} healthy"],
            count[f"dumps {tool}"],
        )
        print(f"| {title} | {' | '.join(map(str, row))} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
