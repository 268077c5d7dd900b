"""Streams, events and memory of the CUDA runtime: the rules that torch and NCCL build on.

Each test names where the rule is written, in "CUDA C++ Programming Guide" (guide) or "CUDA Runtime API" (reference).
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

from api import (
    INITIALIZATION_ERROR,
    NOT_READY,
    OUT_OF_MEMORY,
    SUCCESS,
    Buffer,
    Gate,
    cuda,
    event,
    handle,
    held_up,
    note,
    query,
    set_knob,
    stream,
    wait_until,
)
from ranks import Rank, check, run


def _size(number: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(number)


def order_on_a_stream(_: Rank) -> list[str]:
    one, done = stream(), []
    gate = Gate(one)
    kept = [note(one, done, str(k)) for k in range(100)]
    assert not query(one) and not done
    gate.open()
    cuda.cudaStreamSynchronize(one)
    assert query(one) and len(kept) == 100
    return done


def test_work_of_one_stream_runs_in_the_order_of_its_launch() -> None:
    """guide, "Streams": a stream is a sequence of commands that execute in order."""
    assert check(run(order_on_a_stream, 1)) == [[str(k) for k in range(100)]]


def two_streams(_: Rank) -> tuple[bool, list[str]]:
    one, other, done = stream(), stream(), []
    gate = Gate(one)
    kept = note(other, done, "other")
    cuda.cudaStreamSynchronize(other)
    held = not query(one)
    gate.open()
    cuda.cudaStreamSynchronize(one)
    assert kept
    return held, done


def test_streams_do_not_wait_for_each_other() -> None:
    """guide, "Concurrent Execution between Host and Device", "Streams": different streams may run concurrently."""
    assert check(run(two_streams, 1)) == [(True, ["other"])]


def waits_for_an_event(_: Rank) -> list[str]:
    one, other, done, mark = stream(), stream(), [], event()
    gate = Gate(one)
    first = note(one, done, "before")
    cuda.cudaEventRecord(mark, one)
    late = Gate(one)  # not waited for: it comes after the record
    cuda.cudaStreamWaitEvent(other, mark, 0)
    second = note(other, done, "after")
    assert cuda.raw("cudaEventQuery", mark) == NOT_READY and not done
    gate.open()
    cuda.cudaStreamSynchronize(other)
    assert cuda.raw("cudaEventQuery", mark) == SUCCESS and not query(one)
    late.open()
    assert first and second
    return done


def test_a_stream_that_waits_for_an_event_waits_for_what_was_before_its_record_and_no_more() -> None:
    """reference, cudaStreamWaitEvent and cudaEventRecord: the event captures the work of the stream at that time."""
    assert check(run(waits_for_an_event, 1)) == [["before", "after"]]


def waits_for_the_latest_record(_: Rank) -> bool:
    one, other, mark = stream(), stream(), event()
    cuda.cudaEventRecord(mark, one)
    cuda.cudaStreamSynchronize(one)
    cuda.cudaStreamWaitEvent(other, mark, 0)  # the record of now, not of later
    gate = Gate(one)
    cuda.cudaEventRecord(mark, one)
    cuda.cudaStreamSynchronize(other)
    pending = cuda.raw("cudaEventQuery", mark) == NOT_READY
    gate.open()
    cuda.cudaEventSynchronize(mark)
    return pending


def test_a_wait_is_for_the_latest_record_at_its_call() -> None:
    """reference, cudaEventRecord: a wait uses the most recent record; later records do not affect it."""
    assert check(run(waits_for_the_latest_record, 1)) == [True]


def never_recorded(_: Rank) -> tuple[int, int]:
    one, mark = stream(), event()
    cuda.cudaStreamWaitEvent(one, mark, 0)
    cuda.cudaStreamSynchronize(one)
    return cuda.raw("cudaEventQuery", mark), cuda.raw("cudaEventSynchronize", mark)


def test_an_event_that_was_never_recorded_counts_as_complete() -> None:
    """reference, cudaEventQuery and cudaStreamWaitEvent: without a record the call acts as if it were complete."""
    assert check(run(never_recorded, 1)) == [(SUCCESS, SUCCESS)]


def elapsed(_: Rank) -> float:
    one, start, end = stream(), event(), event()
    cuda.cudaEventRecord(start, one)
    gate = Gate(one)
    cuda.cudaEventRecord(end, one)
    milliseconds = ctypes.c_float()
    assert cuda.raw("cudaEventElapsedTime", ctypes.byref(milliseconds), start, end) == NOT_READY
    gate.reached.wait()  # the start has been passed
    time.sleep(0.2)
    gate.open()
    cuda.cudaEventSynchronize(end)
    cuda.cudaEventElapsedTime(ctypes.byref(milliseconds), start, end)
    return milliseconds.value


def test_the_time_between_events_is_that_of_the_stream() -> None:
    """reference, cudaEventElapsedTime: milliseconds between two completed events, else cudaErrorNotReady."""
    (milliseconds,) = check(run(elapsed, 1))
    assert milliseconds >= 199


def queue(_: Rank) -> tuple[float, float]:
    set_knob("EMULATED_CUDA_QUEUE", 8)
    one, done = stream(), []
    gate = Gate(one)
    gate.reached.wait()
    kept = [note(one, done, "") for _ in range(8)]
    start = time.monotonic()
    threading.Timer(0.3, gate.open).start()
    kept.append(note(one, done, ""))
    blocked = time.monotonic() - start
    cuda.cudaStreamSynchronize(one)
    return blocked, len(done)


def test_a_launch_into_a_full_queue_blocks_its_thread_until_there_is_room() -> None:
    """guide, "Asynchronous execution": launches block once the bounded queue of pending ones is full (about 1,000)."""
    ((blocked, ran),) = check(run(queue, 1))
    assert blocked > 0.25 and ran == 9


def device_synchronize(_: Rank) -> list[str]:
    done: list[str] = []
    streams = [stream() for _ in range(3)]
    kept = [(note(one, done, "done")) for one in streams]
    cuda.cudaDeviceSynchronize()
    assert kept
    return done


def test_a_device_is_synchronized_when_all_its_streams_are() -> None:
    """reference, cudaDeviceSynchronize: blocks until the device has completed all preceding tasks."""
    assert check(run(device_synchronize, 1)) == [["done"] * 3]


def free_waits(_: Rank) -> tuple[bool, bool]:
    one, memory = stream(), handle("cudaMalloc", _size(1 << 20))
    gate = Gate(one)
    return held_up(lambda: cuda.cudaFree(memory), gate.open)


def test_freeing_memory_waits_for_the_device() -> None:
    """guide, "Stream Ordered Memory Allocator": cudaFree synchronizes; it hangs beside a hanging kernel."""
    assert check(run(free_waits, 1)) == [(True, False)]


def memory_is_given_back(_: Rank) -> tuple[int, int, int]:
    def free() -> int:
        left, total = ctypes.c_size_t(), ctypes.c_size_t()
        cuda.cudaMemGetInfo(ctypes.byref(left), ctypes.byref(total))
        return left.value

    before = free()
    memory = handle("cudaMalloc", _size(100 << 20))
    during = free()
    cuda.cudaFree(memory)
    return before - during, free() - before, cuda.raw("cudaFree", memory)


def test_memory_counts_until_it_is_freed_and_is_freed_once() -> None:
    """reference, cudaMemGetInfo and cudaFree (cudaErrorInvalidValue for what was freed before)."""
    assert check(run(memory_is_given_back, 1)) == [(100 << 20, 0, 1)]


def pageable_copy(_: Rank) -> list[float]:
    one, buffer = stream(), Buffer([0.0, 0.0])
    gate = Gate(one)
    data = (ctypes.c_float * 2)(1, 2)
    cuda.cudaMemcpyAsync(buffer.pointer, data, _size(8), 1, one)
    data[0] = data[1] = 9  # was read before the call returned
    early = buffer.read()
    gate.open()
    cuda.cudaStreamSynchronize(one)
    return early + buffer.read()


def test_a_copy_from_pageable_memory_reads_it_at_once_and_writes_in_order_of_the_stream() -> None:
    """reference, "API synchronization behavior": staged first; the transfer to the device may be later."""
    assert check(run(pageable_copy, 1)) == [[0, 0, 1, 2]]


def pinned_copy(_: Rank) -> tuple[bool, list[float]]:
    one, buffer = stream(), Buffer([3.0, 4.0])
    pinned = handle("cudaHostAlloc", _size(8), 0)
    gate = Gate(one)
    cuda.cudaMemcpyAsync(pinned, buffer.pointer, _size(8), 2, one)
    returned_early = not query(one)
    gate.open()
    cuda.cudaStreamSynchronize(one)
    return returned_early, list((ctypes.c_float * 2).from_address(pinned.value or 0))


def test_a_copy_to_pinned_memory_is_asynchronous() -> None:
    """reference, "API synchronization behavior": fully asynchronous between pinned memory and the device."""
    assert check(run(pinned_copy, 1)) == [(True, [3, 4])]


def destroyed(_: Rank) -> list[str]:
    one, done = stream(), []
    gate = Gate(one)
    kept = note(one, done, "ran")
    cuda.cudaStreamDestroy(one)
    gate.open()
    wait_until(lambda: bool(done))
    assert kept
    return done


def test_a_destroyed_stream_ends_its_work_first() -> None:
    """reference, cudaStreamDestroy: returns at once; resources go when the device has completed the work."""
    assert check(run(destroyed, 1)) == [["ran"]]


def threads_of_streams(_: Rank) -> int:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    done: list[str] = []
    streams = [stream() for _ in range(20)]
    kept = [note(one, done, "") for one in streams]
    cuda.cudaDeviceSynchronize()
    assert threads() >= before + 20 and kept
    for one in streams:
        cuda.cudaStreamDestroy(one)
    wait_until(lambda: threads() <= before)
    return threads() - before


def test_destroyed_streams_leave_nothing_behind() -> None:
    """The emulator's own rule: a thread for each stream, for as long as the stream is there."""
    assert check(run(threads_of_streams, 1)) == [0]


def forks(_: Rank) -> tuple[int, int]:
    stream()
    child = os.fork()
    if not child:
        os._exit(cuda.raw("cudaDeviceSynchronize"))
    _pid, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), cuda.raw("cudaDeviceSynchronize")


def test_a_process_that_was_forked_after_cuda_was_used_cannot_use_it() -> None:
    """guide, "Multi-Process": a context does not survive fork; calls give cudaErrorInitializationError."""
    assert check(run(forks, 1)) == [(INITIALIZATION_ERROR, SUCCESS)]


def too_much(_: Rank) -> tuple[int, int]:
    out = ctypes.c_void_p()
    return cuda.raw("cudaMalloc", ctypes.byref(out), _size(101 << 20)), cuda.raw("cudaGetLastError")


def test_memory_is_limited() -> None:
    """reference, cudaMalloc: cudaErrorMemoryAllocation, which cudaGetLastError tells once."""
    assert check(run(too_much, 1, settings={"EMULATED_CUDA_MEMORY_MB": 100})) == [(OUT_OF_MEMORY, OUT_OF_MEMORY)]
