"""What the NCCL communicator does around the calls of torch, which are faked: nothing here shows that NCCL does its part."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from ncclguard.transport import bounded, memory, nccl
from ncclguard.transport.base import TransportError
from ncclguard.transport.nccl import NcclCommunicator
from tests.unit.transport.nccl_fakes import CPU, FakeGroup, FakeVotes, Gpu, pretend_cuda


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return pretend_cuda(monkeypatch)


@pytest.fixture
def group(gpu: Gpu) -> FakeGroup:
    return FakeGroup()


@pytest.fixture
def communicator(group: FakeGroup, gpu: Gpu) -> Iterator[NcclCommunicator]:
    made = NcclCommunicator(group, FakeVotes(), CPU)  # type: ignore[arg-type]
    yield made
    gpu.idle.set()
    made.close()


def finish(pending: Any) -> None:
    assert any(pending.wait(0.1) for _ in range(100))


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# --- results and memory ---------------------------------------------------------------------------------------------


def test_collectives_of_lists_go_through_one_flat_tensor(communicator: NcclCommunicator, gpu: Gpu) -> None:
    gpu.idle.set()
    for dtype in (torch.float32, torch.complex64, torch.int16):
        mine, output = torch.tensor([1, 2, 3]).to(dtype), torch.zeros(3, dtype=dtype)
        finish(communicator.all_gather([output], mine))
        assert torch.equal(output, mine)
    mine, output = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
    finish(communicator.reduce_scatter(output, [mine], ReduceOp.SUM))
    assert torch.equal(output, mine)


def test_results_may_be_inference_tensors(communicator: NcclCommunicator, gpu: Gpu) -> None:
    gpu.idle.set()
    with torch.inference_mode():
        mine, output = torch.ones(3), torch.zeros(3)
        finish(communicator.all_gather([output], mine))
    assert torch.equal(output, mine)


def test_the_flat_input_of_a_reduce_scatter_lives_until_its_kernel_has_ended_and_no_longer(
    communicator: NcclCommunicator, group: FakeGroup, gpu: Gpu
) -> None:
    """torch gives the tensors of a work up when any stream waits for it (2.8 on)."""
    pending = communicator.reduce_scatter(torch.zeros(2), [torch.ones(2)], ReduceOp.SUM)
    until(lambda: gpu.events)
    (held,) = communicator._flying.values()
    flat = weakref.ref(held[1])
    del held
    gc.collect()
    assert group.works[0].hidden == []
    assert flat() is not None
    gpu.idle.set()
    finish(pending)
    gc.collect()
    assert flat() is None


def test_what_nobody_waits_for_is_forgotten_with_the_next_operation(communicator: NcclCommunicator, gpu: Gpu) -> None:
    communicator.all_reduce(torch.ones(1), ReduceOp.SUM)
    until(lambda: gpu.events)
    gpu.idle.set()
    communicator.all_reduce(torch.ones(1), ReduceOp.SUM)
    assert len(communicator._flying) == 1


def test_avg_of_floats_is_nccls_own_and_not_divided_again() -> None:
    how = memory.reduction("AVG", "cuda")
    assert (how.wire, how.average) == (ReduceOp.AVG, False)
    assert memory.NCCL.wire_op(ReduceOp.AVG, torch.float16) == ReduceOp.AVG
    memory.NCCL.check("all_reduce", torch.complex64, ReduceOp.AVG)
    with pytest.raises(ValueError, match="not a whole number"):
        memory.NCCL.check("all_reduce", torch.int32, ReduceOp.AVG)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "meant"),
    [
        (RuntimeError("NCCL communicator was aborted on rank 0"), TransportError),
        (torch.OutOfMemoryError("CUDA out of memory"), MemoryError),
        (ValueError("input tensor must be the same size"), ValueError),
    ],
)
def test_errors_of_a_launch_are_those_the_guard_knows(
    communicator: NcclCommunicator, group: FakeGroup, raised: Exception, meant: type[Exception]
) -> None:
    def fail() -> None:
        raise raised

    group.launch = fail
    with pytest.raises(meant, match=str(raised)[:10]):
        finish(communicator.all_reduce(torch.ones(1), ReduceOp.SUM))


def test_memory_that_a_collective_of_a_list_cannot_get_is_a_memory_error(
    communicator: NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "cat", fail)
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        communicator.reduce_scatter(torch.zeros(2), [torch.ones(2)], ReduceOp.SUM)


def test_an_error_that_nccl_has_seen_ends_the_wait_although_the_kernel_has_not_ended(
    communicator: NcclCommunicator, group: FakeGroup, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_ASK_EVERY", 0.0)
    pending = communicator.all_reduce(torch.ones(1), ReduceOp.SUM)
    until(lambda: gpu.events)
    group.works[0].error = RuntimeError("ncclRemoteError: remote process exited")
    with pytest.raises(TransportError, match="remote process exited"):
        finish(pending)


def test_a_kernel_that_ends_because_of_an_error_is_not_taken_for_complete(
    communicator: NcclCommunicator, group: FakeGroup, gpu: Gpu
) -> None:
    pending = communicator.all_reduce(torch.ones(1), ReduceOp.SUM)
    until(lambda: gpu.events)
    group.works[0].error = RuntimeError("ncclInternalError")
    gpu.idle.set()
    with pytest.raises(TransportError, match="ncclInternalError"):
        finish(pending)


def test_nccl_is_asked_once_for_an_operation_that_takes_less_than_a_question_is_due(
    communicator: NcclCommunicator, group: FakeGroup, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_ASK_EVERY", 3600.0)
    pending = communicator.all_reduce(torch.ones(1), ReduceOp.SUM)
    assert not pending.wait(0.05)
    gpu.idle.set()
    finish(pending)
    assert group.works[0].asked == 1


# --- stopping -------------------------------------------------------------------------------------------------------


def test_a_launch_that_blocks_is_an_operation_that_is_not_complete_and_a_stop_ends_the_wait(
    communicator: NcclCommunicator, group: FakeGroup, gpu: Gpu
) -> None:
    blocked = threading.Event()

    def block() -> None:
        blocked.wait(60)
        raise RuntimeError("NCCL timeout")

    group.launch = block
    pending = communicator.all_reduce(torch.ones(1), ReduceOp.SUM)
    behind = communicator.all_reduce(torch.ones(1), ReduceOp.SUM)
    gpu.idle.set()
    assert not pending.wait(0.05)
    assert not communicator.quiet(0.05)
    stopper = threading.Timer(0.1, communicator.stop)
    stopper.start()
    with pytest.raises(TransportError, match="was stopped"):
        finish(pending)
    stopper.join()
    assert not communicator.quiet(0.05)  # it may still be launched, and write
    blocked.set()
    assert communicator.quiet(30.0)
    with pytest.raises(TransportError, match="was stopped"):
        behind.wait(0.0)
    assert group.works == []  # what waited for its turn is not launched any more


def test_a_launch_that_failed_may_have_queued_something_until_an_abort_has_come_back(
    communicator: NcclCommunicator, group: FakeGroup, gpu: Gpu
) -> None:
    def fail() -> None:
        raise RuntimeError("NCCL timeout")

    group.launch = fail
    group.abort_blocks = threading.Event()
    gpu.idle.set()
    with pytest.raises(TransportError):
        finish(communicator.all_reduce(torch.ones(1), ReduceOp.SUM))
    communicator.stop()
    assert not communicator.quiet(0.05)
    group.abort_blocks.set()
    assert communicator.quiet(30.0)


def test_nobody_asks_nccl_while_an_abort_holds_its_lock(
    communicator: NcclCommunicator, group: FakeGroup, gpu: Gpu
) -> None:
    """The lock is that of torch's communicator, and an abort may hang for ever."""
    group.abort_blocks = threading.Event()
    pending = communicator.all_reduce(torch.ones(1), ReduceOp.SUM)
    until(lambda: gpu.events)
    communicator.stop()
    until(lambda: group.aborts)
    with pytest.raises(TransportError, match="was stopped"):
        communicator.ask(group.works[0])  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="was stopped"):
        pending.wait(0.0)
    assert group.works[0].asked == 0
    group.abort_blocks.set()


def test_an_abort_that_raises_is_logged_and_leaves_the_group_behind(
    communicator: NcclCommunicator, group: FakeGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(nccl, "keep_for_ever", kept.append)
    monkeypatch.setattr(nccl, "_CLOSE_WAIT", 0.01)

    def fail(_: object, __: object) -> None:
        raise RuntimeError("Future for ProcessGroup abort timed out after 60000 ms")

    monkeypatch.setattr(nccl, "abort_group", fail)
    communicator.stop()
    communicator.close()
    assert group in kept
    assert "abort timed out" in caplog.text


def test_a_healthy_group_is_shut_and_not_aborted(communicator: NcclCommunicator, group: FakeGroup, gpu: Gpu) -> None:
    gpu.idle.set()
    finish(communicator.all_reduce(torch.ones(1), ReduceOp.SUM))
    communicator.close()
    until(lambda: group.shut)
    assert group.aborts == 0


# --- threads and the end of the process -----------------------------------------------------------------------------

EXIT = """
import threading, torch
from ncclguard.transport.nccl import Launch, Launcher
launcher = Launcher("launching")
first = Launch(lambda: 1)
launcher.submit(first)
assert first.ended(30) and first.result == 1
{more}
print("end", flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("more", ["", "launcher.submit(Launch(lambda: threading.Event().wait(30)))"])
def test_the_process_ends_in_bounded_time_and_well_with_the_thread_idle_and_with_a_launch_that_blocks(
    more: str,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT.format(more=more)], capture_output=True, text=True, timeout=25, check=False
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


@pytest.mark.processes
def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    """At its exit, which a child of os.fork runs in full."""
    program = EXIT.format(
        more="""
import os
from ncclguard.transport import bounded
pid = os.fork()
if pid == 0:
    os._exit(len(bounded._running))
assert len(bounded._running) == 1
assert os.waitpid(pid, 0)[1] == 0
"""
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_the_thread_that_launches_is_on_the_communicators_device(communicator: NcclCommunicator, gpu: Gpu) -> None:
    gpu.idle.set()
    finish(communicator.all_reduce(torch.ones(1), ReduceOp.SUM))
    assert gpu.devices == [("ncclguard-launching on generation 7", CPU)]


def test_a_forked_child_has_nothing_to_wait_for_at_its_end(communicator: NcclCommunicator, gpu: Gpu) -> None:
    """Where CUDA cannot be asked whether a kernel has ended."""
    communicator.all_reduce(torch.ones(1), ReduceOp.SUM)
    until(lambda: gpu.events)
    communicator.leave_to_parent()
    assert communicator.quiet(0)


def test_the_thread_ends_when_the_communicator_is_closed(communicator: NcclCommunicator, gpu: Gpu) -> None:
    def launching() -> list[object]:
        return [call for call in tuple(bounded._running) if "generation 7" in call.name]

    assert launching()
    communicator.close()
    until(lambda: not launching())
