"""What a device is in, of all that its host has issued on groups of the backend "ncclguard-nccl"."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ncclguard import faults
from ncclguard.process_group.starts import Marks
from ncclguard.watch.recorder import Recorder
from tests.gpu.parts import DEVICE, NEEDS_GPU, SHARED_GPU, hang_device, join, leave, run_together

pytestmark = NEEDS_GPU

ENV = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none"}
NAME = "ncclguard-nccl"

Seen = tuple[dict[int, bool], str]


def seen(awaited: Callable[[Seen], bool]) -> Seen:
    """The elements of what is pending, each with whether it has started, and the message; once that is as awaited."""
    recorder, end = Recorder(), time.monotonic() + 20
    while True:
        observed = recorder.observe()
        found = {one.numel: one.started for one in observed.pending}, observed.message.partition("(")[0]
        if awaited(found) or time.monotonic() > end:
            return found
        time.sleep(0.01)


def meet() -> None:
    """Meet on the host."""
    dist.all_reduce(torch.ones(1))


def one_waits_for_the_other() -> None:
    """Rank 0 issues, and says what its device is in; then rank 1 issues the same, so that all of it ends."""
    rank = join(NAME, 100.0)
    other, second = 1 - rank, dist.new_group(backend=NAME)
    x, y = torch.ones(10, device="cuda"), torch.ones(20, device="cuda")

    def message() -> list[dist.Work]:
        call = dist.irecv if rank == 0 else dist.isend  # a small send ends without its receiver
        return dist.batch_isend_irecv([dist.P2POp(call, torch.ones(7, device="cuda"), other)])

    def collective_then_message() -> None:
        dist.all_reduce(x, async_op=True)
        message()

    def message_then_collective() -> None:
        message()
        dist.all_reduce(x, async_op=True)

    def behind_another_group() -> None:
        work = dist.all_reduce(y, group=second, async_op=True)
        assert work is not None
        work.wait()
        dist.all_reduce(x)

    def together() -> None:
        with dist._coalescing_manager(device=DEVICE, async_ops=True):
            dist.all_reduce(x)
            dist.all_reduce(x)

    found: dict[str, object] = {}
    dist.all_reduce(y, group=second)
    for program in (message_then_collective, collective_then_message, behind_another_group, together):
        program()  # what connects on the host has
        dist.barrier()
    for program in (message_then_collective, collective_then_message, behind_another_group, together):
        if rank == 0:
            program()
            in_message = program is message_then_collective
            found[program.__name__] = seen(lambda now, m=in_message: bool(now[1]) if m else any(now[0].values()))  # type: ignore[misc]
        meet()
        if rank == 1:
            program()
        dist.barrier()
    uneven = [torch.empty(3, device="cuda"), torch.empty(5, device="cuda")]
    dist.all_gather(uneven, torch.ones_like(uneven[rank]))  # one broadcast from each rank, as one
    dist.barrier()
    faults.report(found=found, last=seen(lambda now: not now[0]))
    leave()


def test_a_device_is_in_the_first_call_that_has_not_ended_where_its_stream_has_come_to_it() -> None:
    result = run_together(one_waits_for_the_other, 2, env=ENV, timeout=120).check()
    found = result[0].reports["found"]
    if found["together"] == [{"0": True}, ""]:  # torch 2.15 records the whole only, which has no sizes
        found["together"] = [{"10": True}, ""]
    assert found == {
        "message_then_collective": [{"10": False}, "batch_isend_irecv"],
        "collective_then_message": [{"10": True}, ""],
        "behind_another_group": [{"20": True, "10": False}, ""],
        "together": [{"10": True}, ""],
    }
    assert result[0].reports["last"] == [{}, ""]


def marks_of_a_stream_that_hangs() -> None:
    torch.cuda.set_device(0)
    x = torch.ones(10, device="cuda")
    marks, few = Marks(DEVICE), Marks(DEVICE, capacity=4)
    unknown = marks.reached(time.time_ns())
    marks.mark()
    before = time.time_ns()
    x.mul_(1.0)
    torch.cuda.synchronize()
    few.mark()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="relaxed")
    hang_device(x, beside_capture=True)
    marks.mark()
    after = time.time_ns()
    with torch.cuda.stream(side):
        marks.mark()
    found = {"unknown": unknown, "before": marks.reached(before), "after": marks.reached(after)}
    found["behind a capture"] = marks.reached(time.time_ns())
    few.mark()
    issued = time.time_ns()
    found["kept"] = few.reached(issued)
    for _ in range(4):
        few.mark()
    found["forgotten"] = few.reached(issued)
    faults.report(found=found)
    leave()


def test_a_device_has_not_come_to_what_is_behind_a_kernel_that_hangs_and_who_cannot_know_says_it_has() -> None:
    result = run_together(marks_of_a_stream_that_hangs, 1, env=ENV, timeout=60)
    assert result[0].reports.get("found") == {
        "unknown": True,
        "before": True,
        "after": False,
        "behind a capture": False,
        "kept": False,
        "forgotten": True,
    }, str(result)


def asked_beside_a_capture() -> None:
    """The watcher's thread asks for what is pending while the program captures, in the mode that breaks by most calls."""
    torch.cuda.set_device(0)
    x = torch.ones(10, device="cuda")
    marks, side, graph = Marks(DEVICE), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x.mul_(1.0)
    torch.cuda.synchronize()
    found = []
    with torch.cuda.stream(side):
        graph.capture_begin()
        y = torch.ones(10, device="cuda") + 1
    hang_device(x, beside_capture=True)
    marks.mark()
    with torch.cuda.stream(side):
        watcher = threading.Thread(target=lambda: found.append(marks.reached(time.time_ns())))
        watcher.start()
        watcher.join()
        graph.capture_end()
    faults.report(found=found, captured=list(y.shape))
    leave()


def test_asking_where_a_device_is_breaks_no_capture_of_the_program() -> None:
    result = run_together(asked_beside_a_capture, 1, env=ENV, timeout=60)
    assert result[0].reports.get("found") == [False], str(result)
    assert result[0].reports["captured"] == [10]
