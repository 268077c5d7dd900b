"""What a caller waits on never depends on the store, and a rank always ends with exit code 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.engine import runtime

pytestmark = pytest.mark.usefixtures("own_processes")


def store_host_fails(how: str) -> None:
    """Rank 0 hosts the store; it is killed or stopped, with an operation of the others waiting for it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier().raise_if_failed()
    tensor = torch.arange(100.0) * (rank + 1)
    before = tensor.clone()
    time.sleep(0.5)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    started = time.monotonic()
    outcome = ng.safe_all_reduce(tensor, timeout=3)
    faults.report(
        seconds=time.monotonic() - started,
        verdict=[outcome.ok, outcome.agreed, str(outcome.cause), list(outcome.culprits)],
        intact=torch.equal(tensor, before),
    )


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_store_host_killed_or_stopped_costs_nobody_more_than_the_deadline(how: str) -> None:
    """Within deadline + 2 s every other rank has a local verdict, never a success, the tensor intact, and ends with exit code 0."""
    with faults.start_ranks(store_host_fails, 3, args=[how], timeout=60) as job:
        job.wait_for("verdict", ranks=[1, 2], seconds=40)
        if how == "stop":
            time.sleep(6)  # long enough for the others to end while rank 0 is stopped
            job.send_signal(0, signal.SIGKILL)
        result = job.wait()
    for rank in (1, 2):
        reports = result[rank].reports
        assert reports["verdict"][:2] == [False, False], result
        assert reports["verdict"][3] in ([], [0]), result
        assert reports["intact"]
        assert reports["seconds"] < 3 + 2 + 1, result
        assert result[rank].end == "exit 0", result
    if how == "kill":
        assert result[1].reports["verdict"][2:] == ["lost", [0]], result


def ends(mode: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for _ in range(3):
        ng.safe_all_reduce(torch.ones(10)).raise_if_failed()
    if mode == "destroy":
        dist.destroy_process_group()
    if mode == "uneven" and rank == 1:
        time.sleep(0.3)


@pytest.mark.parametrize(
    "mode", ["destroy", *(pytest.param(m, marks=pytest.mark.thorough) for m in ("leave", "uneven"))]
)
def test_a_normal_end_has_exit_code_0(mode: str) -> None:
    """With and without destroy_process_group, together and one after the other."""
    for _ in range(3):
        result = faults.run_ranks(ends, 3, args=[mode], timeout=60)
        assert result.ok, result
        assert result.left_running == ()


def a_thread_that_goes_on(how: str) -> None:
    """The program ends, or destroys its group, while another thread still calls, and tries again until it is refused."""
    dist.init_process_group("gloo")
    ng.safe_barrier().raise_if_failed()
    refused = threading.Event()

    tensor = torch.ones(10)

    def calls() -> None:
        while not refused.is_set():
            try:
                ng.safe_all_reduce(tensor, timeout=1).raise_if_failed()
            except ng.GuardError as error:
                if "has left the job" in str(error):
                    refused.set()

    threading.Thread(target=calls, daemon=True).start()
    time.sleep(0.2)
    if how == "destroy":
        runtime._before_destroy()  # torch's own part of it follows, some time later
        refused.wait(10)
        faults.report(refused=refused.is_set())


@pytest.mark.parametrize("how", ["end", "destroy"])
def test_a_thread_that_goes_on_after_the_departure_does_not_start_the_guard_again(how: str) -> None:
    """A monitor that starts while the interpreter ends comes back from the store into nothing: SIGABRT, in 7 of 10 exits."""
    result = faults.run_ranks(a_thread_that_goes_on, 3, args=[how], timeout=60)
    assert [rank.end for rank in result.ranks] == ["exit 0"] * 3, result
    assert not result.timed_out
    if how == "destroy":
        assert [rank.reports["refused"] for rank in result.ranks] == [True] * 3, result


def a_second_life() -> None:
    """Groups are destroyed and made again over a store that outlives them (on a new prefix, which torch itself needs)."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        os.environ["RANK"] == "0",
    )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    totals = []
    for life in range(3):
        lived = dist.PrefixStore(f"life{life}", store)
        dist.init_process_group("gloo", store=lived, rank=rank, world_size=size)
        tensor = torch.full((3,), float(life))
        ng.safe_all_reduce(tensor, timeout=20).raise_if_failed()
        if life == 1:  # end this life with a failed operation
            if rank == 1:
                time.sleep(2.5)
            assert not ng.safe_barrier(timeout=1)
        totals.append(tensor[0].item())
        dist.destroy_process_group()
    faults.report(totals=totals)
    if rank == 0:
        time.sleep(1)  # the store lives here


def test_a_job_that_initialises_again_over_the_same_store_works_in_each_life() -> None:
    """Three lives of the default group on one store: right sums in each, although a failed verdict lies in the second."""
    result = faults.run_ranks(a_second_life, 3, timeout=90)
    assert result.values("totals") == {rank: [0.0, 3.0, 6.0] for rank in range(3)}, result


def over(init_method: str) -> None:
    dist.init_process_group(
        "gloo", init_method=init_method, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    ng.safe_barrier(timeout=60).raise_if_failed()  # on a busy machine the ranks come here seconds apart
    if dist.get_rank() == 1:
        time.sleep(7)
    failed = ng.safe_barrier(timeout=3)
    faults.report(
        failed=[failed.ok, str(failed.cause), list(failed.culprits)]
    )  # before the next: unread failures raise there
    faults.report(worked=ng.safe_barrier(timeout=20).ok)
    dist.barrier()
    dist.destroy_process_group()


def test_a_job_over_a_file_store_agrees_as_well(tmp_path: object) -> None:
    """init_method=file://: a late rank is named on all, and the next barrier passes."""
    result = faults.run_ranks(over, 3, args=[f"file://{tmp_path}/store"], timeout=60)
    assert result.values("failed") == {rank: [False, "late", [1]] for rank in range(3)}, result
    assert result.values("worked") == dict.fromkeys(range(3), True), result


def test_under_torchrun_with_its_agent_store() -> None:
    """Unchanged under torchrun: a late rank is named on all, and the next barrier passes."""
    result = faults.run_ranks(over, 3, args=["env://"], timeout=90, launcher="torchrun")
    assert result.values("failed") == {rank: [False, "late", [1]] for rank in range(3)}, result
    assert result.values("worked") == dict.fromkeys(range(3), True), result


def first_call_without_a_store(port: int) -> None:
    """The guard is not started with the process group, and when the first guarded call comes the store's host is stopped."""
    ng.configure(autostart=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()
    faults.report(ready=True)
    faults.wait_until_told("stopped")
    started = time.monotonic()
    try:
        ng.safe_all_reduce(torch.ones(4), timeout=2)
    except ng.GuardError as error:
        faults.report(error=str(error), seconds=time.monotonic() - started)
    faults.wait_until_told("resumed")
    faults.report(works=ng.safe_barrier(timeout=30).ok)


def test_the_first_call_ends_too_when_the_store_does_not_answer() -> None:
    """A typed error within the call's budget, and the next call works once the store does."""
    program = (
        "import time, torch.distributed as d\n"
        "store = d.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\ntime.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        try:
            port = int(host.stdout.readline())
            with faults.start_ranks(first_call_without_a_store, 2, args=[port], timeout=60) as job:
                job.wait_for("ready")
                host.send_signal(signal.SIGSTOP)
                job.tell("stopped")
                job.wait_for("error", seconds=30)
                host.send_signal(signal.SIGCONT)
                job.tell("resumed")
                result = job.wait()
        finally:
            host.kill()
    for reports in (result[0].reports, result[1].reports):
        assert "cannot be reached" in reports["error"], result
        assert reports["seconds"] < 2 + 2, result
        assert reports["works"], result
    assert all(rank.ok for rank in result), result
