"""Score diagnoses on cases with known truth: ncclguard explain, and what others make of flight-recorder dumps.

    python benchmarks/diagnosis/score.py [--verbose] [--nvrx CHECKOUT] [FOLDER ...]

A case is a folder with a `truth.json` and the files that a job left. Without arguments: the cases beside this script,
and the recordings of plain NCCL jobs in tests/unguarded_logs. Printed are tables in Markdown.

`--nvrx` names a checkout of github.com/NVIDIA/nvidia-resiliency-ext: its analyser of dumps is scored beside torch's,
and all three are scored on the traces of its own tests (16 ranks, with the ranks that were struck).

`truth.json`: `culprits` (list; empty: nobody can be named; absent: not known), `suspects` (who may then be said to be
worth a look), `places` (names of processes that are no ranks), `classes`, `decisions` (any of them is right),
`incident`, `op`, `seq`, `numel_in`, `timeout_ms`, `world_size` (told to the tool). The recordings have `expected`
instead: for each kind of evidence the lists of culprits that may come out, and `struck`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ncclguard_explain import explain

HERE = Path(__file__).parent
DEFAULT = (HERE / "cases", HERE.parents[1] / "tests" / "unguarded_logs")
OURS, TORCH, NVRX = "ncclguard explain", "torch.distributed.flight_recorder", "nvidia-resiliency-ext"

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
        prefix = "_dump_" if os.path.exists(os.path.join(folder, "_dump_0")) else "comm_lib_trace_rank_"
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(BaseException):
            fr_trace.main([folder, "-p", prefix, "--allow-incomplete-ranks"])
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


_NVRX = """
import json, sys
from nvidia_resiliency_ext.attribution.trace_analyzer.fr_attribution import CollectiveAnalyzer
for folder in sys.argv[1:]:
    settings = {"fr_path": folder, "pattern": "*_*[0-9]", "model": None, "verbose": False, "health_check": False,
                "llm_analyze": False, "threshold": None}
    analyzer = CollectiveAnalyzer(settings)
    text = analyzer._loop.run_until_complete(analyzer.preprocess_FR_dumps())
    packed, _ = analyzer._loop.run_until_complete(analyzer.print_output(text))
    print(json.dumps([folder, packed["hanging_ranks"]]))
"""


def by_nvrx(folders: Sequence[Path], checkout: Path) -> dict[Path, set[int]]:
    """Return, for folders of dumps, the ranks that nvidia-resiliency-ext calls hanging, without a language model."""
    done = subprocess.run(
        [sys.executable, "-c", _NVRX, *map(str, folders)],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(checkout / "src")},
    )  # fmt: skip
    rows = [json.loads(row) for row in done.stdout.splitlines() if row.startswith("[")]
    return {Path(folder): {int(rank) for rank in re.findall(r"\d+", text)} for folder, text in rows}


def score_traces(checkout: Path, tools: Mapping[str, Callable[[Sequence[Path]], dict[Path, set[int]]]]) -> None:
    """Print what each tool says of the traces in nvidia-resiliency-ext's tests, beside the ranks that were struck."""
    folders = sorted(path.parent for path in checkout.glob("tests/attribution/unit/fr_traces/*/fault_injection.log"))
    print(
        f"\n| traces of nvidia-resiliency-ext's tests | struck | {' | '.join(tools)} |\n|---|---|{'---|' * len(tools)}"
    )
    found = {title: tool(folders) for title, tool in tools.items()}
    for folder in folders:
        struck = re.findall(r"\d+", (folder / "fault_injection.log").read_text().splitlines()[0])
        named = [", ".join(map(str, sorted(ranks.get(folder, ())))) or "nobody" for ranks in found.values()]
        print(f"| {folder.name} | {', '.join(struck)} | {' | '.join(named)} |")


def by_explain(folders: Sequence[Path]) -> dict[Path, set[int]]:
    """Return, for folders of dumps, the ranks that ncclguard explain names."""
    dumps = {folder: [str(path) for path in sorted(folder.glob("*_[0-9]*"))] for folder in folders}
    return {folder: set(explain(paths).culprits) for folder, paths in dumps.items()}


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
        if "suspects" in truth:
            check("suspects where nobody can be named", list(report.suspects) == truth["suspects"], report.suspects)
        if "places" in truth:
            check("processes named as the log calls them", list(report.places) == truth["places"], report.places)
        sure = report.culprit_confidence if report.culprits or report.places else "nobody named"
        check(f"culprits, {sure}", list(report.culprits) == truth["culprits"], report.culprits)
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
        check(f"class, {report.confidence}", report.cause_class in truth["classes"], report.cause_class)
    if truth.get("decisions"):
        check("decision", report.decision in truth["decisions"], report.decision)
    return wrong


def score_recording(
    folder: Path, truth: dict[str, Any], count: Counter[str], theirs: Mapping[str, Mapping[Path, set[int]]]
) -> list[str]:
    """Count all tools on a recording: the struck rank named, nobody else named."""
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
        for tool, ranks in {
            OURS: set(named),
            **{tool: found[folder / "dumps"] for tool, found in theirs.items()},
        }.items():
            count[f"dumps {tool}"] += 1
            count[f"dumps {tool} struck"] += ranks == {truth["struck"]}
            count[f"dumps {tool} among"] += truth["struck"] in ranks
            count[f"dumps {tool} healthy"] += bool(ranks - {truth["struck"]})
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print each case that is not right")
    parser.add_argument("--nvrx", type=Path, metavar="CHECKOUT", help="score the analyser of nvidia-resiliency-ext too")
    arguments = parser.parse_args()
    count: Counter[str] = Counter()
    paths = [path for root in arguments.folders or DEFAULT for path in sorted(root.rglob("truth.json"))]
    dumps = [path.parent / "dumps" for path in paths if (path.parent / "dumps").is_dir()]
    tools: dict[str, Callable[[Sequence[Path]], dict[Path, set[int]]]] = {TORCH: by_torch}
    if arguments.nvrx is not None:
        tools[NVRX] = partial(by_nvrx, checkout=arguments.nvrx.resolve())
    theirs = {title: tool(dumps) for title, tool in tools.items()} if dumps else {}
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
    for name in ("processes named as the log calls them", "suspects where nobody can be named"):
        print(f"| {name} | {count[f'{name} ok']} | {count[name]} |")
    print(f"| cases with a healthy rank named | {count['healthy named']} | {count['culprits exact']} |")
    print("\n| how sure it said it is | right | of |\n|---|---|---|")
    for what in ("culprits", "class"):
        for sure in ("high", "medium", "low", "nobody named"):
            if name := f"{what}, {sure}" if count[f"{what}, {sure}"] else "":
                print(f"| {name} | {count[f'{name} ok']} | {count[name]} |")
    print(
        f"\n| recordings of plain NCCL jobs (logs, dumps, both) | right | of |\n|---|---|---|\n| as the evidence allows | {count['recordings ok']} | {count['recordings']} |"
    )
    print(
        f"| the struck rank, and only it | {count['recordings struck']} | {count['recordings']} |\n| a healthy rank named | {count['recordings healthy']} | {count['recordings']} |"
    )
    print("\n| dumps alone | the struck rank, only | among others | a healthy rank named | of |\n|---|---|---|---|---|")
    for tool in (OURS, *theirs):
        row = [count[f"dumps {tool}{column}"] for column in (" struck", " among", " healthy", "")]
        print(f"| {tool} | {' | '.join(map(str, row))} |")
    if arguments.nvrx is not None:
        score_traces(arguments.nvrx.resolve(), {OURS: by_explain, **tools})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
