"""NCCL communicators that are stopped, left alone, or never come about; on real ranks that share one GPU, skipped where there is none."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import torch
from torch.distributed import ReduceOp

from ncclguard import faults, torch_compat
from ncclguard.transport.base import TransportError
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, build, build_again, error_of, finish, join

pytestmark = NEEDS_GPU

# A launch that waits for a missing peer, or a build, ends when torch's own limit for it is over (TORCH_NCCL_NONBLOCKING_TIMEOUT).
NATIVE_LIMIT = float(torch_compat.spin_limit(2))


def stop_at_random() -> None:
    """64 operations are launched while another thread stops the communicator; ten times, on each rank at another moment."""
    rank = join()
    chance = random.Random(rank)
    odd = []
    for generation in range(1, 11):
        communicator = build(generation)
        tensors = [torch.ones(100_000, device="cuda") for _ in range(64)]
        stopper = threading.Timer(0.05 * chance.random(), communicator.stop)
        stopper.start()
        try:
            pending = [communicator.all_reduce(tensor, ReduceOp.SUM) for tensor in tensors]
            for one in pending:
                finish(one)
        except TransportError:
            pass
        except Exception as error:  # noqa: BLE001 - what the test looks for
            odd.append(f"{type(error).__name__}: {error}")
        stopper.join()
        if not communicator.quiet(0.5 * NATIVE_LIMIT):  # beside an abort no launch spins until that is over
            odd.append(f"generation {generation} did not become quiet")
        communicator.close()
    last = build(11)
    tensor = torch.ones(1, device="cuda")
    finish(last.all_reduce(tensor, ReduceOp.SUM))
    faults.report(odd=odd, last=float(tensor))
    last.close()


def test_a_stop_at_any_moment_of_64_launches_is_a_transport_error_and_nothing_else() -> None:
    result = faults.run_ranks(stop_at_random, 2, env=SHARED_GPU, timeout=280).check()
    assert result.values("odd") == {0: [], 1: []}
    assert result.values("last") == {0: 2.0, 1: 2.0}


def first_of_its_kind() -> None:
    """Rank 0 alone calls a collective whose connections are not there yet, so that launching it blocks on rank 1."""
    rank = join()
    communicator = build(1)
    if rank == 0:
        outputs = [torch.zeros(1_000_000, device="cuda") for _ in range(2)]
        pending = communicator.all_gather(outputs, torch.ones(1_000_000, device="cuda"))
        start = time.monotonic()
        waits = [pending.wait(0.1) for _ in range(10)]
        took = time.monotonic() - start
        communicator.stop()
        faults.report(waits=waits, bounded=took < 10.0, error=error_of(lambda: finish(pending)))
        faults.report(quiet=communicator.quiet(NATIVE_LIMIT + 10.0))
    else:
        faults.wait_until_told("stop", seconds=200)
        communicator.stop()
    communicator.close()
    build_again(seconds=100.0)


def test_a_launch_that_blocks_on_a_missing_rank_is_waited_for_in_slices_and_stopped() -> None:
    with faults.start_ranks(first_of_its_kind, 2, env=SHARED_GPU, timeout=280) as job:
        job.wait_for("quiet", seconds=200, ranks=[0])
        job.tell("stop")
        result = job.wait().check()
    assert not any(result[0].reports["waits"])
    assert result[0].reports["bounded"]
    assert "was stopped" in result[0].reports["error"]
    assert result[0].reports["quiet"]
    assert result.values("again") == {0: 2.0, 1: 2.0}


def stopped_while_it_is_built() -> None:
    """Rank 1 is stopped by a signal after the votes are connected, before NCCL is."""
    rank = join()
    if rank == 1:
        original = torch_compat.new_nccl_group

        def stop(*args: Any) -> Any:
            torch_compat.new_nccl_group = original
            os.kill(os.getpid(), signal.SIGSTOP)
            return original(*args)

        torch_compat.new_nccl_group = stop  # type: ignore[assignment]
    start = time.monotonic()
    error = error_of(lambda: build(1, seconds=10.0))
    faults.report(error=error, took=time.monotonic() - start)
    build_again(seconds=100.0)


def test_a_build_with_a_stopped_peer_is_given_up_in_time_and_the_next_one_works() -> None:
    with faults.start_ranks(stopped_while_it_is_built, 2, env=SHARED_GPU, timeout=280) as job:
        job.wait_for("error", seconds=120, ranks=[0])
        job.send_signal(1, signal.SIGCONT)
        result = job.wait().check()
    assert result[0].reports["error"]
    assert result[0].reports["took"] < 20.0
    assert result.values("again") == {0: 2.0, 1: 2.0}


HEARTBEAT = 5


def beside_a_group_with_a_monitor() -> None:
    """The program's own group is NCCL with a watchdog and a monitor that would end the process within two heartbeats of a report."""
    rank = join("nccl")
    communicator = build(1)
    faults.report(ready=1)
    if rank == 1:
        faults.wait_until_told("never")
    pending = communicator.all_reduce(torch.ones(1_000_000, device="cuda"), ReduceOp.SUM)
    end = time.monotonic() + 5.0
    error_of(lambda: [pending.wait(0.1) for _ in iter(lambda: time.monotonic() < end, False)])
    communicator.stop()
    faults.report(quiet=communicator.quiet(15.0))
    communicator.close()
    store: Any = torch_compat.base_store(torch_compat.default_store())
    end = time.monotonic() + 4 * HEARTBEAT
    reported = False
    while time.monotonic() < end and not reported:
        reported = store.check(["exception_dump"])
        time.sleep(0.5)
    faults.report(reported=reported)
    os._exit(0)  # destroying the program's group would wait for the peer


def test_a_killed_peer_makes_the_guards_group_tell_the_job_nothing() -> None:
    env = {**SHARED_GPU, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(HEARTBEAT), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    with faults.start_ranks(beside_a_group_with_a_monitor, 2, env=env, timeout=200) as job:
        job.wait_for("ready", seconds=120)
        job.send_signal(1, signal.SIGKILL)
        result = job.wait()
    assert result[0].ok, str(result)
    assert result[0].reports["quiet"]
    assert result[0].reports["reported"] is False


def ends_in_flight() -> None:
    rank = join()
    communicator = build(1)
    if rank == 0:
        pending = communicator.all_reduce(torch.ones(1_000_000, device="cuda"), ReduceOp.SUM)
        faults.report(complete=pending.wait(1.0))
    else:
        faults.wait_until_told("leave")  # a peer that has ended is another fault: NCCL reports it


def test_a_process_ends_well_with_an_operation_in_flight() -> None:
    with faults.start_ranks(ends_in_flight, 2, env=SHARED_GPU, timeout=200) as job:
        job.wait_for("complete", seconds=120, ranks=[0])
        job.tell("leave")
        result = job.wait().check()
    assert result[0].reports["complete"] is False
