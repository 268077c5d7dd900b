"""`ncclguard.watch` over FSDP, DeepSpeed and Accelerate on gloo: a rank that they wait for is named, whatever they wait in."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import ncclguard as ng
from ncclguard import faults
from ncclguard.faults.job import JobResult
from tests.integrations.evaluation_parts import CULPRIT

PROGRAM = Path(__file__).with_name("watch_cases.py")
LIMIT = 6.0
#: case -> the package it needs, and the first collective of a step, in which the others wait
FRAMEWORKS = {
    "fsdp2": ("torch", "all_gather"),
    "fsdp1": ("torch", "all_gather"),
    "zero2": ("deepspeed", "all_reduce"),
    "zero3": ("deepspeed", "all_gather"),
    "accelerate": ("accelerate", "all_reduce"),
}


def named(job: JobResult, key: str, ranks: tuple[int, ...]) -> ng.Incident:
    """The incident that was reported under this key: the same on all these ranks, agreed, and about rank 2 only."""
    texts = {rank: job[rank].reports.get(key, {}).get("json") for rank in ranks}
    assert all(texts.values()), str(job)
    assert len(set(texts.values())) == 1, texts
    incident = ng.Incident.from_json(texts[ranks[0]])
    assert (incident.agreed, incident.culprits) == (True, (CULPRIT,)), incident
    return incident


def check_late(incident: ng.Incident, collective: str) -> None:
    """With the stack of the late rank, and what the others wait in."""
    assert (str(incident.cause), incident.deadline_expired) == ("late", True), incident
    assert incident.op == collective
    ranks = {report.rank: report for report in incident.ranks}
    assert "load_the_next_shard" in ranks[CULPRIT].stack[-1], incident
    for rank in (0, 1):
        assert ranks[rank].state == "running", incident
        assert collective in str(ranks[rank].operation)
        assert " in " in str(ranks[rank].call_site)  # file, line and function of the program


@pytest.mark.slow
@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_a_late_rank_and_a_killed_one_are_named(framework: str) -> None:
    """Late beyond the limit: named, and the training goes on. Killed: named at once, and nobody hangs."""
    package, collective = FRAMEWORKS[framework]
    pytest.importorskip(package)
    job = faults.run_ranks(f"{PROGRAM}:late_and_killed", 3, args=[framework], timeout=200)
    assert list(job.values("incidents").values()) == [[0, 1, 0]] * 3, str(job)
    check_late(named(job, "late", (0, 1, 2)), collective)
    killed = named(job, "killed", (0, 1))
    assert str(killed.cause) == "lost", killed
    assert killed.op == collective
    for rank in (0, 1):
        reports = job[rank].reports
        assert reports["late"]["at"] - job[CULPRIT].reports["late_from"] < LIMIT + 3
        assert reports["killed"]["at"] - job[CULPRIT].reports["killed_at"] < 15  # of a limit of 60 s
        assert job[rank].exit_code == 1, str(job)
    assert job[CULPRIT].signal is signal.SIGKILL
    assert not job.still_running


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["fsdp2", "zero3"])
def test_abort_ends_a_training_that_nothing_else_would_end(framework: str) -> None:
    """The late rank is alive and keeps its connections: without the abort the others would wait for torch's 1800 s."""
    package, collective = FRAMEWORKS[framework]
    pytest.importorskip(package)
    job = faults.run_ranks(f"{PROGRAM}:hangs", 3, args=[framework], timeout=200)
    check_late(named(job, "late", (0, 1, 2)), collective)
    for rank in (0, 1):
        assert job[rank].reports["ended_at"] - job[CULPRIT].reports["late_from"] < LIMIT + 5, str(job)
    assert [rank.exit_code for rank in job] == [1, 1, 1], str(job)
    assert not job.still_running
