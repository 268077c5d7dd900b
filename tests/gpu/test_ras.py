"""NCCL's RAS in the reports of incidents, and `doctor` beside a job: a witness that is quoted, and never a judge."""

from __future__ import annotations

import html
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import ncclguard as ng
from ncclguard import faults, torch_compat
from ncclguard.environment.doctor.checks import Check, check_ras, read_context
from ncclguard.incident.timeline import Document, RasQuote
from ncclguard.transport.nccl import NcclBuilder
from tests.gpu.parts import DEVICE, NEEDS_GPU, SHARED_GPU, join
from tests.gpu.test_watch import CULPRIT, LIMIT, RANKS, watched

JSON_FROM = (2, 28, 7)  # NCCL's release notes

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.nccl.version() < JSON_FROM,  # type: ignore[no-untyped-call]
        reason="RAS of this NCCL answers in text only (tests/unit/test_ras_report.py), and says less",
    ),
]


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which nobody listens, below those that the kernel gives to connections."""
    for number in range(28_100 + os.getpid() % 1000, 32_000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", number))
            except OSError:
                continue
        yield number
        return


def settings(port: int, folder: Path | str) -> dict[str, str]:
    return {**SHARED_GPU, "NCCL_RAS_ADDR": f"127.0.0.1:{port}", "NCCLGUARD_REPORT_DIR": str(folder)}


def reported(folder: Path) -> tuple[Document, RasQuote]:
    """Return the one report, once it has what RAS said."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for file in folder.glob("*.json"):
            found = Document.model_validate_json(file.read_text())
            if found.ras is not None:
                assert [file] == list(folder.glob("*.json"))
                page = file.with_suffix(".html").read_text()
                assert "What NCCL's RAS says" in html.unescape(page)
                return found, found.ras
        time.sleep(0.1)
    raise AssertionError(f"no report with an answer of RAS: {list(folder.iterdir())}")


def late_beside_another_communicator() -> None:
    """Rank 2 is late; ranks 0 and 1 have a communicator that torch has no process group for, with one launch by rank 0."""
    ng.watch(timeout=LIMIT, on_incident=lambda incident: faults.report(named=[str(incident.cause), *incident.culprits]))
    rank = join("nccl")
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    pending = None
    if rank != CULPRIT:
        store = torch_compat.clone_store(torch_compat.default_store())
        other = NcclBuilder(DEVICE).build(store, "weights", (0, 1), rank, 0, 60.0)
        if rank == 0:
            pending = other.all_reduce(torch.ones(1, device="cuda"), ReduceOp.SUM)
    dist.barrier()
    if rank == CULPRIT:
        faults.wait_until_told("end", seconds=120)
        os._exit(0)
    dist.all_reduce(tensor, async_op=True)
    faults.wait_until_told("end", seconds=120)
    del pending
    os._exit(0)


def test_it_sees_communicators_that_torch_has_no_group_for(port: int, tmp_path: Path) -> None:
    with faults.start_ranks(late_beside_another_communicator, RANKS, env=settings(port, tmp_path), timeout=150) as job:
        named = job.wait_for("named", seconds=120)
        found, said = reported(tmp_path)
        job.tell("end")
        job.wait()
    assert list(named.values()) == [["late", CULPRIT]] * RANKS, str(found.incident)
    assert found.incident.culprits == (CULPRIT,)
    assert said.reason is None and said.count == 2, said
    other, world = said.communicators
    assert (other.groups, other.size) == ((), 2)
    assert other.members == "ranks 0-1, for which torch has no process group here"
    # One more than on rank 1: the guard launches one of its own when it makes a communicator.
    assert other.troubles == ("AllReduce launched 2 by rank 0, 1 by rank 1",), other
    assert (world.groups, world.size) == (("0",), 3)
    assert any(trouble.endswith("by rank 2") for trouble in world.troubles), world


def test_a_rank_that_is_stopped_does_not_answer_and_the_verdict_is_that_of_the_ranks(port: int, tmp_path: Path) -> None:
    """RAS waits for the stopped process, and the report does not wait for RAS."""
    args = ["stop", "raw", True]
    with faults.start_ranks(watched, RANKS, args=args, env=settings(port, tmp_path), timeout=150) as job:
        job.wait_for("incidents", ranks=[0, 1], seconds=120)
        found, said = reported(tmp_path)
        job.send_signal(CULPRIT, signal.SIGCONT)
        job.tell("end")
        job.wait()
    assert (str(found.incident.cause), found.incident.culprits) == ("stuck", (CULPRIT,))
    (world,) = said.communicators
    assert any(
        trouble.startswith(f"rank {CULPRIT} (pid ") and trouble.endswith("does not answer RAS")
        for trouble in world.troubles
    ), said


def guarded_late() -> None:
    rank = join("nccl")
    tensor = torch.ones(1000, device="cuda")
    ng.safe_all_reduce(tensor, timeout=60).raise_if_failed()
    if rank == CULPRIT:
        time.sleep(LIMIT + 5)
    outcome = ng.safe_all_reduce(tensor, timeout=LIMIT)
    faults.report(named=[str(outcome.cause), *outcome.culprits])
    faults.wait_until_told("end", seconds=120)


def test_an_incident_of_a_guarded_call_quotes_it_too(port: int, tmp_path: Path) -> None:
    with faults.start_ranks(guarded_late, RANKS, env=settings(port, tmp_path), timeout=150) as job:
        named = job.wait_for("named", seconds=120)
        found, said = reported(tmp_path)
        job.tell("end")
        job.wait()
    assert list(named.values()) == [["late", CULPRIT]] * RANKS
    assert found.incident.culprits == (CULPRIT,)
    if said.reason is None:
        assert said.count is not None and said.count >= 1, said
    else:  # a real NCCL has ended the communicator of the call by then
        assert "knows of no communicator" in said.reason, said


def test_a_silent_server_on_the_port_delays_no_verdict(tmp_path: Path) -> None:
    """NCCL cannot listen there, and whoever asks gets no answer: the report says so."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = settings(server.getsockname()[1], tmp_path)
        with faults.start_ranks(watched, RANKS, args=["late", "raw", True], env=env, timeout=150) as job:
            struck = job.wait_for("struck", ranks=[CULPRIT], seconds=120)[CULPRIT]
            incidents = job.wait_for("incidents", seconds=40)
            found, said = reported(tmp_path)
            job.tell("end")
            job.wait()
    for known in incidents.values():
        assert known[0]["at"] - struck < LIMIT + 4.0  # as in test_watch.py
    assert found.incident.culprits == (CULPRIT,)
    assert said.reason is not None and "without an answer in 6 s" in said.reason


def running() -> None:
    join("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    faults.report(running=True)
    faults.wait_until_told("end", seconds=120)
    os._exit(0)


def test_doctor_says_what_it_reports_of_a_job_that_runs(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{port}")

    def check() -> Check:
        return check_ras(read_context())

    before = check()
    assert before.status == "skipped" and "nobody listens" in before.detail
    with faults.start_ranks(running, RANKS, env=settings(port, "none"), timeout=150) as job:
        job.wait_for("running", seconds=120)
        whole = check()
        job.send_signal(CULPRIT, signal.SIGSTOP)
        answers: list[Check] = []
        asking = threading.Thread(target=lambda: answers.append(check()))
        asking.start()
        asking.join(30)
        job.send_signal(CULPRIT, signal.SIGCONT)
        job.tell("end")
        job.wait()
    assert (whole.status, whole.advice) == ("ok", ""), whole
    assert "for 1 communicators, every rank answers" in whole.detail
    (stopped,) = answers
    assert stopped.status == "warning" and "explain --ras" in stopped.advice
    assert f"rank {CULPRIT} (pid " in stopped.detail and "does not answer RAS" in stopped.detail
