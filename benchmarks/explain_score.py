"""Score `ncclguard explain` on incidents: logs are rendered from facts, explained, compared with the labels.

    python benchmarks/explain_score.py incidents.jsonl [--verbose] [--blind]

Prints: entries parsed without loss; entries whose odd ranks are exactly right, and healthy ranks named; entries with
the right class of cause, over all labelled ones and over those whose facts leave any line in a log. `--blind` never
passes `--world-size`; otherwise it is passed where the report stated it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from explain_render import Renderer, render

from ncclguard_explain import Report, explain

FIELDS = {
    "seq": "seq",
    "op": "op",
    "numel_in": "numel_in",
    "numel_out": "numel_out",
    "timeout_ms": "timeout_ms",
    "ran_ms": "ran_ms",
    "dtype": "dtype",
    "last_enqueued": "enqueued",
    "last_completed": "completed",
    "seconds": "seconds",
    "shape": "shape",
    "group_rank": "group_rank",
}
NO_LINE = {"hang", "note"}  # facts that no log line carries


def losses(entry: Mapping[str, Any], report: Report) -> Iterator[str]:
    """Yield every figure of an entry's facts that the parsed events do not hold."""
    renderer = Renderer(entry)
    for event in entry["events"]:
        kind = event["kind"]
        if kind in NO_LINE | {"progress", "stack"}:
            continue
        if kind == "collective_mismatch" and event.get("shape") is None and event["op"] == "REDUCE":
            kind = "collective_mismatch"
        wanted = {theirs: event[ours] for ours, theirs in FIELDS.items() if event.get(ours) is not None}
        if isinstance(wanted.get("op"), str) and not wanted["op"].replace("_", "").isalnum():
            wanted.pop("op")
        for rank in (
            renderer.ranks(event)
            if kind not in ("exit", "flight_recorder", "launcher_summary", "nccl_warn", "python_exception", "nccl_info")
            else [None]
        ):
            figures = {**wanted, **({"rank": rank} if rank is not None else {})}
            found: dict[str, bool] = dict.fromkeys(figures, False)
            for parsed in report.events:
                if rank is not None and parsed.rank != rank:
                    continue
                for name, value in figures.items():
                    got = getattr(parsed, name, None)
                    found[name] |= got == value or (isinstance(value, list) and got is not None and list(got) == value)
            yield from (f"{kind} rank {rank}: {name}={figures[name]}" for name, ok in found.items() if not ok)
        expected = {
            "nccl_warn": "nccl_warn",
            "flight_recorder": "flight_recorder",
            "desync_report": "desync_report",
            "heartbeat_stuck": "heartbeat_stuck",
        }.get(kind)
        if expected and not any(parsed.kind == expected for parsed in report.events):
            yield f"{kind}: no such event"
        if kind == "flight_recorder" and {rank for parsed in report.events for rank in parsed.peers} != set(
            event["culprit"]
        ):
            yield f"{kind}: culprits"
        if kind == "desync_report" and not any(
            parsed.name == "lagging" and list(parsed.peers) == event["lagging"] for parsed in report.events
        ):
            yield f"{kind}: lagging"


def explain_text(text: str, world: int | None) -> Report:
    """Explain one rendered log."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        path.write_text(text, encoding="utf-8")
        return explain([str(path)], world_size=world)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("incidents", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print every entry that is not right")
    parser.add_argument("--blind", action="store_true", help="never pass the world's size")
    arguments = parser.parse_args()
    count: Counter[str] = Counter()
    for row in arguments.incidents.read_text(encoding="utf-8").splitlines():
        entry = json.loads(row)
        use = set(entry["use_for"])
        known = entry["world_size"] if entry["world_size_source"] == "stated" and not arguments.blind else None
        report = explain_text(render(entry), known)
        wrong: list[str] = []
        if "parse" in use:
            count["parse"] += 1
            lost = list(losses(entry, report))
            count["parse ok"] += not lost
            wrong += [f"lost {item}" for item in lost]
        if "missing_or_divergent_rank" in use:
            label = entry["missing_or_divergent_ranks"]
            count["ranks"] += 1
            count["ranks ok"] += list(report.culprits) == label
            count["healthy named"] += len(set(report.culprits) - set(label))
            if list(report.culprits) != label:
                wrong.append(f"ranks {list(report.culprits)}, expected {label}")
        elif entry["missing_or_divergent_ranks"] is None and report.culprits:
            count["named without a label"] += 1
            wrong.append(f"named {list(report.culprits)} ({report.culprit_confidence}), no label")
        if "cause_class" in use:
            lines = any(event["kind"] not in NO_LINE for event in entry["events"])
            right = report.cause_class == entry["root_cause_class"]
            for group in ["class"] + (["class with lines"] if lines else []):
                count[group] += 1
                count[f"{group} ok"] += right
                count[f"{group} unknown"] += report.cause_class == "unknown"
            if not right:
                wrong.append(
                    f"class {report.cause_class}, expected "
                    f"{entry['root_cause_class']}{'' if lines else ' (no log line)'}"
                )
        if arguments.verbose and wrong:
            print(f"{entry['id']}: {'; '.join(wrong)}")
    for name, title in (
        ("parse", "parsed without loss"),
        ("ranks", "odd ranks exactly right"),
        ("class", "class of cause right, all labelled"),
        ("class with lines", "class of cause right, facts with a log line"),
    ):
        total, good = count[name], count[f"{name} ok"]
        extra = f", {count[f'{name} unknown']} answered unknown" if name.startswith("class") else ""
        print(f"{title:45s} {good:3d} of {total:3d}  {100 * good / max(total, 1):5.1f} %{extra}")
    print(f"{'healthy ranks named':45s} {count['healthy named']:3d}")
    print(f"{'named where no label says who':45s} {count['named without a label']:3d}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
