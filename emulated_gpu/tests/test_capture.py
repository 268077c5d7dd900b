"""Stream capture and graphs: what may happen beside a capture, and what a replay does.

Rules: "CUDA C++ Programming Guide", section "Creating a Graph Using Stream Capture" (guide), and "CUDA Runtime API"
(reference), 13.0.
"""

from __future__ import annotations

import ctypes
import threading

from api import (
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_MERGE,
    CAPTURE_UNJOINED,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    GLOBAL,
    RELAXED,
    SUCCESS,
    THREAD_LOCAL,
    Buffer,
    Gate,
    cuda,
    event,
    handle,
    note,
    query,
    stream,
)
from ranks import Rank, check, run


def begin(on: ctypes.c_void_p, mode: int = GLOBAL) -> None:
    cuda.cudaStreamBeginCapture(on, mode)


def end(on: ctypes.c_void_p) -> tuple[int, ctypes.c_void_p]:
    graph = ctypes.c_void_p()
    return cuda.raw("cudaStreamEndCapture", on, ctypes.byref(graph)), graph


def replays(_: Rank) -> tuple[list[str], list[str], bool]:
    one, done = stream(), []
    begin(one)
    kept = [note(one, done, "first"), note(one, done, "second")]
    result, graph = end(one)
    assert result == SUCCESS
    captured_only = list(done)
    executable = handle("cudaGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    gate = Gate(one)
    cuda.cudaGraphLaunch(executable, one)
    cuda.cudaGraphLaunch(executable, one)
    waiting = not done and not query(one)
    gate.open()
    cuda.cudaStreamSynchronize(one)
    assert kept
    return captured_only, done, waiting


def test_captured_work_runs_at_each_launch_of_its_graph_in_order_of_the_stream_and_not_before() -> None:
    """guide: work is appended to the graph, not enqueued; reference, cudaGraphLaunch: ordered on its stream."""
    assert check(run(replays, 1)) == [([], ["first", "second"] * 2, True)]


def forked(_: Rank, join: bool) -> int:
    one, other, fork, joined, done = stream(), stream(), event(), event(), []
    begin(one)
    cuda.cudaEventRecord(fork, one)
    cuda.cudaStreamWaitEvent(other, fork, 0)
    status = ctypes.c_int()
    cuda.cudaStreamIsCapturing(other, ctypes.byref(status))
    assert status.value == 1
    kept = note(other, done, "")
    cuda.cudaEventRecord(joined, other)
    if join:
        cuda.cudaStreamWaitEvent(one, joined, 0)
    result, _graph = end(one)
    assert kept and query(other)
    return result


def test_a_stream_that_waits_for_an_event_of_a_capture_joins_it_and_must_lead_back() -> None:
    """guide, "Cross-stream Dependencies and Events"; cudaErrorStreamCaptureUnjoined."""
    assert check(run(forked, 1, True)) == [SUCCESS]
    assert check(run(forked, 1, False)) == [CAPTURE_UNJOINED]


UNSAFE = {
    "cudaMalloc": lambda: cuda.raw("cudaMalloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(512)),
    "cudaDeviceSynchronize": lambda: cuda.raw("cudaDeviceSynchronize"),
    "cudaStreamQuery": lambda: cuda.raw("cudaStreamQuery", stream()),
}


def unsafe_in_another_thread(_: Rank, call: str, mode: int, thread_mode: int) -> tuple[int, int]:
    one, mark, results = stream(), event(), []
    cuda.cudaEventRecord(mark, stream())
    cuda.cudaEventSynchronize(mark)
    begin(one, mode)

    def other() -> None:
        exchanged = ctypes.c_int(thread_mode)
        cuda.cudaThreadExchangeStreamCaptureMode(ctypes.byref(exchanged))
        if call == "cudaEventQuery":
            results.append(cuda.raw("cudaEventQuery", mark))
        else:
            results.append(UNSAFE[call]())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    return results[0], end(one)[0]


def test_an_unsafe_call_of_another_thread_breaks_a_global_capture() -> None:
    """reference, cudaThreadExchangeStreamCaptureMode; guide, "Prohibited and Unhandled Operations"."""
    for call in ("cudaMalloc", "cudaDeviceSynchronize", "cudaStreamQuery", "cudaEventQuery"):
        ended = check(run(unsafe_in_another_thread, 1, call, GLOBAL, GLOBAL))
        assert ended == [(CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED)], call


def test_an_unsafe_call_of_another_thread_is_allowed_beside_a_capture_of_another_mode_or_in_another_mode() -> None:
    """reference, cudaThreadExchangeStreamCaptureMode: thread-local captures concern their thread, relaxed ones nobody."""
    for mode, thread_mode in ((THREAD_LOCAL, GLOBAL), (RELAXED, GLOBAL), (GLOBAL, THREAD_LOCAL), (GLOBAL, RELAXED)):
        ended = check(run(unsafe_in_another_thread, 1, "cudaEventQuery", mode, thread_mode))
        assert ended == [(SUCCESS, SUCCESS)], (mode, thread_mode)


def unsafe_in_the_same_thread(_: Rank, mode: int) -> tuple[int, int]:
    one = stream()
    begin(one, mode)
    return UNSAFE["cudaMalloc"](), end(one)[0]


def test_an_unsafe_call_of_the_capturing_thread_is_allowed_in_relaxed_mode_only() -> None:
    """reference, cudaStreamBeginCapture, its modes."""
    for mode in (GLOBAL, THREAD_LOCAL):
        assert check(run(unsafe_in_the_same_thread, 1, mode)) == [(CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED)]
    assert check(run(unsafe_in_the_same_thread, 1, RELAXED)) == [(SUCCESS, SUCCESS)]


def asks_the_captured_stream(_: Rank) -> tuple[int, int]:
    one = stream()
    begin(one, RELAXED)
    return cuda.raw("cudaStreamSynchronize", one), end(one)[0]


def test_a_captured_stream_cannot_be_waited_for_in_any_mode() -> None:
    """guide, "Prohibited and Unhandled Operations": to synchronize or query a captured stream is invalid."""
    assert check(run(asks_the_captured_stream, 1)) == [(CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED)]


def asks_a_captured_event(_: Rank) -> tuple[int, int]:
    one, mark = stream(), event()
    begin(one, RELAXED)
    cuda.cudaEventRecord(mark, one)
    return cuda.raw("cudaEventQuery", mark), cuda.raw("cudaEventSynchronize", mark)


def test_an_event_that_was_recorded_in_a_capture_cannot_be_asked() -> None:
    """reference, cudaErrorCapturedEvent."""
    assert check(run(asks_a_captured_event, 1)) == [(CAPTURED_EVENT, CAPTURED_EVENT)]


def waits_for_outside(_: Rank) -> tuple[int, int]:
    one, mark = stream(), event()
    cuda.cudaEventRecord(mark, stream())
    begin(one)
    return cuda.raw("cudaStreamWaitEvent", one, mark, 0), end(one)[0]


def test_captured_work_cannot_depend_on_work_outside() -> None:
    """reference, cudaErrorStreamCaptureIsolation."""
    assert check(run(waits_for_outside, 1)) == [(CAPTURE_ISOLATION, CAPTURE_INVALIDATED)]


def merges(_: Rank) -> tuple[int, int, int]:
    one, other, mark = stream(), stream(), event()
    begin(one)
    begin(other)
    cuda.cudaEventRecord(mark, one)
    return cuda.raw("cudaStreamWaitEvent", other, mark, 0), end(one)[0], end(other)[0]


def test_two_captures_cannot_be_merged() -> None:
    """reference, cudaErrorStreamCaptureMerge; guide: it invalidates both."""
    assert check(run(merges, 1)) == [(CAPTURE_MERGE, CAPTURE_INVALIDATED, CAPTURE_INVALIDATED)]


def copies_at_replay(_: Rank) -> list[float]:
    one, source, target = stream(), Buffer([1.0]), Buffer([0.0])
    begin(one)
    cuda.cudaMemcpyAsync(target.pointer, source.pointer, ctypes.c_size_t(4), 3, one)
    _result, graph = end(one)
    executable = handle("cudaGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    seen = target.read()
    for value in (2.0, 3.0):
        source.write([value])
        cuda.cudaGraphLaunch(executable, one)
        cuda.cudaStreamSynchronize(one)
        seen += target.read()
    return seen


def test_a_graph_reads_its_memory_when_it_is_launched() -> None:
    """guide, "CUDA Graphs": addresses are those of the capture, contents those of the launch."""
    assert check(run(copies_at_replay, 1)) == [[0, 2, 3]]
