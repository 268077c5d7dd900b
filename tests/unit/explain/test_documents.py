"""JSON documents are witnesses: torchelastic's error file, Kubernetes events, RAS, ncclguard's own incident."""

from __future__ import annotations

import json
from pathlib import Path

from ncclguard.outcome import Cause
from ncclguard_explain import Report, explain


def read(tmp_path: Path, name: str, value: object) -> Report:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return explain([str(tmp_path)])


def test_error_file_of_a_rank_names_it(tmp_path: Path) -> None:
    message = {
        "message": "AssertionError: loss is nan",
        "extraInfo": {
            "py_callstack": 'Traceback (most recent call last):\n  File "train.py", line 9, in main\n',
            "timestamp": "1",
        },
    }
    report = read(tmp_path, "none_x/attempt_0/1/error.json", {"message": message})
    assert report.culprits == (1,) and report.decision == "fix-code"
    assert report.stacks[0].frames == ("train.py:9 in main",)


def test_kubernetes_events_say_that_memory_ran_out(tmp_path: Path) -> None:
    event = {
        "kind": "Event",
        "reason": "OOMKilling",
        "message": "Memory cgroup out of memory",
        "involvedObject": {"kind": "Pod", "name": "train-worker-2"},
    }
    report = read(tmp_path, "events.json", {"kind": "List", "items": [event]})
    assert report.incident and report.decision == "fix-environment" and report.cause_class == "oom_or_crash_other_rank"


def test_ras_json_names_the_rank_that_does_not_answer(tmp_path: Path) -> None:
    ranks = [{"rank": rank, "host": "a", "pid": 10 + rank, "collective_counts": {"AllReduce": 7}} for rank in range(7)]
    missing = [{"rank": 7, "host": "b", "pid": 99, "status": {"considered_dead": True}}]
    report = read(
        tmp_path, "ras.json", {"communicators": [{"hash": "0x1", "size": 8, "ranks": ranks, "missing_ranks": missing}]}
    )
    assert report.culprits == (7,) and report.cause is Cause.LOST


def test_own_incident_is_taken_at_its_word(tmp_path: Path) -> None:
    incident = {
        "op_id": "0/17",
        "op": "barrier",
        "cause": "late",
        "culprits": [2],
        "participants": [0, 1, 2],
        "summary": "barrier() failed: rank 2 late.",
        "timeout": 300.0,
        "ranks": [],
    }
    for name, value in (("incident.json", incident), ("events.jsonl", incident)):
        folder = tmp_path / name
        report = read(folder, name, value)
        assert report.culprits == (2,) and report.cause is Cause.LATE and report.effective_timeout_ms == 300000


def test_foreign_json_leaves_a_note(tmp_path: Path) -> None:
    report = read(
        tmp_path, "x.json", {"extraInfo": 3, "message": 5, "communicators": [7, {"ranks": [3], "missing_ranks": 4}]}
    )
    assert not report.incident and report.culprits == ()
