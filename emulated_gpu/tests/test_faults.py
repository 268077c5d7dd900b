"""Each knob of the emulator does what README.md says of it."""

from __future__ import annotations

import ctypes
import signal
import threading
import time

import pytest
from api import (
    ILLEGAL_ADDRESS,
    IN_PROGRESS,
    INVALID_USAGE,
    NCCL_SUCCESS,
    OUT_OF_MEMORY,
    REMOTE_ERROR,
    SUCCESS,
    UNHANDLED_CUDA_ERROR,
    Buffer,
    Communicator,
    cuda,
    event,
    handle,
    query,
    set_knob,
    stream,
    wait_until,
)
from ranks import Rank, check, run

UNKNOWN_ERROR = 999


def connected(rank: Rank, device: int = 0) -> tuple[Communicator, ctypes.c_void_p, Buffer]:
    """Return a communicator whose channels are connected, a stream, and a buffer with a one."""
    comm = Communicator.make(rank, device=device)
    one, buffer = stream(), Buffer([1.0])
    comm.all_reduce(buffer, one)
    cuda.cudaStreamSynchronize(one)
    rank.barrier()
    return comm, one, Buffer([1.0])


# --- of the device ---


def illegal_access(_: Rank) -> tuple[int, ...]:
    one, other, buffer, mark = stream(), stream(), Buffer([0.0]), event()
    set_knob("EMULATED_CUDA_ERROR_AT", 2)
    size = ctypes.c_size_t(4)
    cuda.cudaMemsetAsync(buffer.pointer, 0, size, one)
    cuda.cudaStreamSynchronize(one)
    cuda.cudaMemsetAsync(buffer.pointer, 0, size, one)
    asynchronous = cuda.raw("cudaStreamSynchronize", one)
    assert cuda.raw("cudaEventRecord", mark, other) == ILLEGAL_ADDRESS
    sticky = cuda.raw("cudaMalloc", ctypes.byref(ctypes.c_void_p()), size), cuda.raw("cudaGetLastError")
    return asynchronous, *sticky, cuda.raw("cudaGetLastError"), cuda.raw("cudaFree", buffer.pointer)


def test_a_sticky_error_comes_with_the_nth_piece_of_work_and_stays() -> None:
    """EMULATED_CUDA_ERROR_AT; CUDA Runtime API, cudaErrorIllegalAddress: "any further CUDA work will return" it."""
    assert check(run(illegal_access, 1)) == [(ILLEGAL_ADDRESS,) * 5]


def peers_of_a_broken_device(rank: Rank) -> tuple[int, int, bool]:
    comm, one, buffer = connected(rank)
    if rank.rank == 1:
        set_knob("EMULATED_CUDA_ERROR_AT", 1)
    comm.all_reduce(buffer, one)
    if rank.rank == 1:
        broken = cuda.raw("cudaStreamSynchronize", one)
        refused = comm.all_reduce(buffer, one)
        rank.read("seen")
        return broken, refused, comm.abort() == NCCL_SUCCESS
    time.sleep(0.5)
    hangs = not query(one)
    state = comm.error()
    rank.publish("seen")
    comm.abort()
    return cuda.raw("cudaStreamSynchronize", one), state, hangs


def test_the_peers_of_a_rank_whose_device_is_in_an_error_hang_unnoticed() -> None:
    """The kernel of one rank is gone, its process and its links are not: nobody else is told."""
    assert check(run(peers_of_a_broken_device, 2)) == [
        (SUCCESS, NCCL_SUCCESS, True),
        (ILLEGAL_ADDRESS, UNHANDLED_CUDA_ERROR, True),
    ]


def lost(_: Rank) -> tuple[int, int, int]:
    one = stream()
    set_knob("EMULATED_CUDA_LOST", 1)
    return cuda.raw("cudaStreamSynchronize", one), cuda.raw("cudaSetDevice", 0), cuda.raw("cudaGetLastError")


def test_a_lost_device_fails_every_call_without_any_work() -> None:
    """EMULATED_CUDA_LOST, as after Xid 79."""
    assert check(run(lost, 1)) == [(UNKNOWN_ERROR,) * 3]


def endless(_: Rank) -> tuple[bool, bool, int]:
    one, other, buffer, mark = stream(), stream(), Buffer([0.0]), event()
    set_knob("EMULATED_CUDA_ENDLESS_KERNEL_AT", 1)
    cuda.cudaMemsetAsync(buffer.pointer, 0, ctypes.c_size_t(4), one)
    wait_until(lambda: not query(one))
    time.sleep(0.2)
    cuda.cudaMemsetAsync(buffer.pointer, 0, ctypes.c_size_t(4), other)
    cuda.cudaEventRecord(mark, other)
    cuda.cudaEventSynchronize(mark)
    waiting = threading.Thread(target=cuda.raw, args=("cudaDeviceSynchronize",), daemon=True)
    waiting.start()
    waiting.join(0.3)
    return not query(one), waiting.is_alive(), cuda.raw("cudaStreamQuery", other)


def test_an_endless_kernel_holds_its_stream_and_no_other() -> None:
    """EMULATED_CUDA_ENDLESS_KERNEL_AT."""
    assert check(run(endless, 1)) == [(True, True, SUCCESS)]


def out_of_memory(_: Rank) -> list[int]:
    set_knob("EMULATED_CUDA_OUT_OF_MEMORY_AT", 2)

    def allocate() -> int:
        return cuda.raw("cudaMalloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(512))

    results = [allocate() for _ in range(3)]
    set_knob("EMULATED_CUDA_OUT_OF_MEMORY_AT", 0)
    return [*results, allocate()]


def test_memory_runs_out_with_the_nth_allocation_until_there_is_some_again() -> None:
    """EMULATED_CUDA_OUT_OF_MEMORY_AT: torch frees its cache and tries again, so that one failure is no fault for it."""
    assert check(run(out_of_memory, 1)) == [[SUCCESS, OUT_OF_MEMORY, OUT_OF_MEMORY, SUCCESS]]


def speed(_: Rank) -> list[float]:
    seconds = []
    size = ctypes.c_size_t(32 << 20)
    for device in range(2):
        cuda.cudaSetDevice(device)
        one, start, end = stream(), event(), event()
        memory = handle("cudaMalloc", size)
        cuda.cudaMemsetAsync(memory, 1, size, one)  # touches the pages
        tries = []
        for _ in range(8):  # other programs lengthen a try, and never shorten one
            cuda.cudaEventRecord(start, one)
            cuda.cudaMemsetAsync(memory, 1, size, one)
            cuda.cudaEventRecord(end, one)
            cuda.cudaEventSynchronize(end)
            milliseconds = ctypes.c_float()
            cuda.cudaEventElapsedTime(ctypes.byref(milliseconds), start, end)
            tries.append(milliseconds.value)
        seconds.append(min(tries))
    return seconds


def test_a_slow_device_takes_longer_for_its_work() -> None:
    """EMULATED_CUDA_SPEEDS."""
    ((fast, slow),) = check(run(speed, 1, settings={"EMULATED_GPUS": 2, "EMULATED_CUDA_SPEEDS": "1,0.05"}))
    assert slow > 4 * fast


def devices(_: Rank) -> int:
    count = ctypes.c_int()
    cuda.cudaGetDeviceCount(ctypes.byref(count))
    return count.value


def test_there_are_as_many_devices_as_asked_for() -> None:
    """EMULATED_GPUS."""
    assert check(run(devices, 1, settings={"EMULATED_GPUS": 5})) == [5]


# --- of NCCL and its links ---


def dies(rank: Rank) -> tuple[int, bool]:
    comm, one, buffer = connected(rank)
    if rank.rank == 1:
        raise SystemExit
    comm.all_reduce(buffer, one)
    time.sleep(0.5)
    state, held = comm.error(), not query(one)
    comm.abort()
    cuda.cudaStreamSynchronize(one)
    return state, held


def test_a_death_can_go_unnoticed() -> None:
    """EMULATED_NCCL_DEATH_UNNOTICED, as over NVLink or shared memory, where no proxy thread sees a connection end."""
    assert check(run(dies, 2, settings={"EMULATED_NCCL_DEATH_UNNOTICED": 1}), 0) == [(NCCL_SUCCESS, True)]
    assert check(run(dies, 2), 0) == [(REMOTE_ERROR, True)]


def slow_abort(rank: Rank) -> tuple[float, float]:
    comm, one, buffer = connected(rank)
    if rank.rank == 1:
        rank.read("done")
        return 0, 0
    comm.all_reduce(buffer, one)
    start = time.monotonic()
    thread = threading.Thread(target=comm.abort)
    thread.start()
    cuda.cudaStreamSynchronize(one)
    freed_stream = time.monotonic() - start
    thread.join()
    rank.publish("done")
    return freed_stream, time.monotonic() - start


@pytest.mark.parametrize("knob", [{"EMULATED_NCCL_ABORT_HANGS_S": 1.5}, {"EMULATED_NCCL_FREE_MS": 1500}])
def test_an_abort_can_hang_and_freeing_can_be_slow_after_the_kernels_ended(knob: dict[str, float]) -> None:
    """EMULATED_NCCL_ABORT_HANGS_S, EMULATED_NCCL_FREE_MS: the flag is set first (src/init.cc, ncclCommAbort)."""
    freed_stream, returned = check(run(slow_abort, 2, of_rank={0: knob}))[0]
    assert freed_stream < 1.2 and returned >= 1.5


def fails_to_connect(rank: Rank) -> int:
    comm, result = Communicator.begin(rank, blocking=False)
    if rank.rank == 1:
        state = comm.settle()
        rank.publish("failed")
        return state
    assert result == IN_PROGRESS
    rank.read("failed")
    time.sleep(0.2)
    state = comm.error()
    assert comm.abort() == NCCL_SUCCESS
    return state


def test_a_connection_can_fail_while_a_communicator_is_made() -> None:
    """EMULATED_NCCL_CONNECT_FAILS_AT: an error on the rank itself; those it should have connected to wait."""
    ended = run(fails_to_connect, 2, of_rank={1: {"EMULATED_NCCL_CONNECT_FAILS_AT": 1}})
    assert check(ended) == [IN_PROGRESS, REMOTE_ERROR]


def same_device(rank: Rank) -> int:
    comm, _ = Communicator.begin(rank, blocking=False)
    state = comm.settle()
    assert comm.abort() == NCCL_SUCCESS
    return state


def test_ranks_of_one_host_cannot_share_a_device() -> None:
    """NCCL: "Duplicate GPU detected". They can as hosts of their own (NCCL_HOSTID), as they are in all other tests."""
    assert check(run(same_device, 2, settings={"NCCL_HOSTID": "one"})) == [INVALID_USAGE] * 2


def link(rank: Rank, knob: str, value: int, of: int) -> tuple[int, bool]:
    comm, one, _ = connected(rank)
    buffer = Buffer([1.0] * 50_000)
    if rank.rank == of:
        set_knob(knob, value)
    comm.all_reduce(buffer, one)
    comm.all_reduce(buffer, one)
    comm.all_reduce(buffer, one)
    rank.barrier()
    time.sleep(0.7)
    state, held = comm.error(), not query(one)
    rank.barrier()
    comm.abort()
    cuda.cudaStreamSynchronize(one)
    return state, held


@pytest.mark.parametrize(("knob", "value"), [("STALLS_AT", 2), ("STALLS_AFTER_BYTES", 300_000)])
def test_a_link_can_stall_without_an_error(knob: str, value: int) -> None:
    """EMULATED_NCCL_LINK_STALLS_AT and _STALLS_AFTER_BYTES: the data stops, the connections stay."""
    assert check(run(link, 2, f"EMULATED_NCCL_LINK_{knob}", value, 1)) == [(NCCL_SUCCESS, True)] * 2


@pytest.mark.parametrize(("knob", "value"), [("DROPS_AT", 2), ("DROPS_AFTER_BYTES", 300_000)])
def test_a_link_can_drop_with_an_error_on_both_sides(knob: str, value: int) -> None:
    """EMULATED_NCCL_LINK_DROPS_AT and _DROPS_AFTER_BYTES."""
    assert check(run(link, 2, f"EMULATED_NCCL_LINK_{knob}", value, 1)) == [(REMOTE_ERROR, True)] * 2


def timed(rank: Rank) -> float:
    comm, one, _ = connected(rank)
    buffer = Buffer([1.0] * 1_000_000)
    start = time.monotonic()
    comm.all_reduce(buffer, one)
    cuda.cudaStreamSynchronize(one)
    return time.monotonic() - start


def test_a_link_can_be_slow() -> None:
    """EMULATED_NCCL_LINK_MBPS: megabytes a second and rank; 4 MB at 10 MB/s are at least 0.4 s."""
    assert min(check(run(timed, 2, settings={"EMULATED_NCCL_LINK_MBPS": 10}))) > 0.35


def does_not_wait(rank: Rank) -> bool:
    comm, one, buffer = Communicator.make(rank), stream(), Buffer([1.0])
    if rank.rank == 1:
        rank.read("launched")
    comm.all_reduce(buffer, one)
    held = rank.rank == 1 or not query(one)
    if rank.rank == 0:
        rank.publish("launched")
    cuda.cudaStreamSynchronize(one)
    return held


def test_connections_can_be_made_with_the_communicator_instead_of_at_first_use() -> None:
    """EMULATED_NCCL_RUNTIME_CONNECT=0, as NCCL_RUNTIME_CONNECT=0: the first launch does not wait on the host."""
    assert check(run(does_not_wait, 2, settings={"EMULATED_NCCL_RUNTIME_CONNECT": 0})) == [True, True]


def use_after_free(rank: Rank) -> None:
    comm = Communicator.make(rank)
    comm.abort()
    comm.all_reduce(Buffer([1.0]))


def test_the_use_of_an_ended_communicator_can_end_the_process() -> None:
    """EMULATED_NCCL_CRASH_ON_USE_AFTER_FREE: a real one is freed memory by then."""
    ended = run(use_after_free, 1, settings={"EMULATED_NCCL_CRASH_ON_USE_AFTER_FREE": 1})
    assert ended[0].code in (-signal.SIGILL, -signal.SIGTRAP)


def refused(_: Rank, name: str, value: object) -> str:
    try:
        set_knob(name, value)
    except AssertionError as error:
        return str(error)
    return "taken"


def test_a_wrong_name_or_value_is_refused() -> None:
    """A test that misspells a fault must not pass for want of it."""
    assert "README.md" in check(run(refused, 1, "EMULATED_NCCL_DEATH", 1))[0]
    assert "number" in check(run(refused, 1, "EMULATED_CUDA_QUEUE", "many"))[0]
    assert "numbers" in check(run(refused, 1, "EMULATED_CUDA_SPEEDS", "1,fast"))[0]
    assert check(run(refused, 1, "EMULATED_CUDA_QUEUE", 16)) == ["taken"]
