"""NCCL's contract: what a collective does to its stream, groups, non-blocking communicators, split, shrink and the end.

Rules: NCCL's source (src/..., version 2.30.7) and its user guide (guide), section named.
"""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
from api import (
    AVERAGE,
    CAPTURE_INVALIDATED,
    FLOAT,
    GLOBAL,
    IN_PROGRESS,
    INTERNAL_ERROR,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    NCCL_SUCCESS,
    REMOTE_ERROR,
    SUM,
    Buffer,
    Communicator,
    Gate,
    connected,
    cuda,
    handle,
    held_up,
    nccl,
    note,
    query,
    stream,
    wait_until,
)
from ranks import Rank, check, run


def results(rank: Rank) -> dict[str, list[float]]:
    comm, size, me = Communicator.make(rank), rank.size, float(rank.rank)
    summed, averaged, sent = Buffer([me + 1, 10]), Buffer([me, 3]), Buffer([me, me])
    assert comm.all_reduce(summed, op=SUM) == comm.all_reduce(averaged, op=AVERAGE) == NCCL_SUCCESS
    assert comm.broadcast(sent, 1) == NCCL_SUCCESS
    gathered, mine = Buffer([0.0] * size), Buffer([me])
    assert comm.all_gather(mine, gathered) == NCCL_SUCCESS
    scattered, whole = Buffer([0.0]), Buffer([me * 10 + k for k in range(size)])
    count = ctypes.c_size_t(1)
    nccl.ncclReduceScatter(whole.pointer, scattered.pointer, count, FLOAT, SUM, comm.handle, None)
    exchanged = Buffer([0.0] * size)
    nccl.ncclAlltoAll(whole.pointer, exchanged.pointer, count, FLOAT, comm.handle, None)
    at_root = Buffer([me])
    nccl.ncclReduce(at_root.pointer, at_root.pointer, count, FLOAT, SUM, 2, comm.handle, None)
    around = Buffer([0.0])
    nccl.ncclGroupStart()
    assert comm.send(mine, (rank.rank + 1) % size) == comm.receive(around, (rank.rank - 1) % size) == NCCL_SUCCESS
    nccl.ncclGroupEnd()
    values = {
        "sum": summed, "average": averaged, "broadcast": sent, "gather": gathered, "scatter": scattered,
        "exchange": exchanged, "root": at_root, "around": around,
    }  # fmt: skip
    return {name: buffer.read() for name, buffer in values.items()}


def test_each_operation_gives_the_result_that_its_definition_says() -> None:
    """guide, "Collective Operations" and "Point-to-point communication"."""
    for me, got in enumerate(check(run(results, 3))):
        assert got == {
            "sum": [6, 30], "average": [1, 3], "broadcast": [1, 1], "gather": [0, 1, 2], "scatter": [30 + 3 * me],
            "exchange": [me, 10 + me, 20 + me], "root": [3] if me == 2 else [me], "around": [(me - 1) % 3],
        }  # fmt: skip


def late_rank(rank: Rank) -> tuple[bool, bool]:
    comm, one, buffer = connected(rank)
    rank.barrier()
    if rank.rank == 1:
        rank.read("seen")
    start = time.monotonic()
    assert comm.all_reduce(buffer, one) == NCCL_SUCCESS
    returned_at_once = time.monotonic() - start < 1
    held = not query(one)
    if rank.rank != 1:
        time.sleep(0.2)
        held = held and not query(one)
        rank.publish(f"held-{rank.rank}")
    if rank.rank == 0:
        rank.read("held-2")
        rank.publish("seen")
    cuda.cudaStreamSynchronize(one)
    return returned_at_once, held or rank.rank == 1


def test_a_collective_returns_at_once_and_holds_its_stream_until_all_ranks_have_come() -> None:
    """guide, "Stream semantics": the call returns when the operation is enqueued; it completes on the stream."""
    assert check(run(late_rank, 3)) == [(True, True)] * 3


def ordered(rank: Rank) -> list[str]:
    comm, one, done, buffer = Communicator.make(rank), stream(), [], Buffer([1.0])
    gate = Gate(one)
    assert comm.all_reduce(buffer, one) == NCCL_SUCCESS
    kept = note(one, done, "after")
    rank.barrier()
    assert not done
    gate.open()
    cuda.cudaStreamSynchronize(one)
    assert kept and buffer.read() == [2]
    return done


def test_a_collective_waits_for_what_is_before_it_on_its_stream_and_holds_what_is_after() -> None:
    """guide, "Stream semantics"."""
    assert check(run(ordered, 2, settings={"EMULATED_NCCL_RUNTIME_CONNECT": 0})) == [["after"]] * 2


def two_streams(rank: Rank) -> tuple[list[str], list[float]]:
    comm, one, other, done, buffer = Communicator.make(rank), stream(), stream(), [], Buffer([1.0])
    gate = Gate(one)
    comm.all_reduce(buffer, one)
    kept = [note(one, done, "first")]
    comm.all_reduce(buffer, other)
    kept.append(note(other, done, "second"))
    time.sleep(0.2)
    assert not done, "the second may not overtake the first, which waits for its stream"
    gate.open()
    cuda.cudaDeviceSynchronize()
    assert kept
    return sorted(done), buffer.read()


def test_operations_of_a_communicator_run_in_the_order_of_their_launch_also_on_different_streams() -> None:
    """src/enqueue.cc, ncclLaunchPrepare and ncclLaunchFinish: each launch waits for the communicator's stream."""
    assert (
        check(run(two_streams, 2, settings={"EMULATED_NCCL_RUNTIME_CONNECT": 0})) == [(["first", "second"], [4.0])] * 2
    )


def default_stream(rank: Rank) -> tuple[bool, bool, list[float]]:
    comm, buffer = Communicator.make(rank, device=1), Buffer([1.0])
    cuda.cudaSetDevice(0)
    if rank.rank == 1:
        rank.read("seen")
    assert comm.all_reduce(buffer) == NCCL_SUCCESS
    idle = query(ctypes.c_void_p())
    cuda.cudaSetDevice(1)
    held = not query(ctypes.c_void_p())
    if rank.rank == 0:
        rank.publish("seen")
    return idle, held or rank.rank == 1, buffer.read()


def test_the_default_stream_is_that_of_the_communicators_device_whatever_the_current_one_is() -> None:
    """src/group.cc, doLaunches: cudaSetDevice(comm->cudaDev). torch ends coalesced calls on any current device."""
    settings = {"EMULATED_NCCL_RUNTIME_CONNECT": 0, "EMULATED_GPUS": 2}
    assert check(run(default_stream, 2, settings=settings)) == [(True, True, [2.0])] * 2


def both_directions(rank: Rank) -> list[float]:
    comm, peer = Communicator.make(rank), 1 - rank.rank
    sent, received = Buffer([float(rank.rank)] * 2_000_000), Buffer([-1.0] * 2_000_000)
    nccl.ncclGroupStart()
    comm.send(sent, peer)
    comm.receive(received, peer)
    pending = Buffer([0.0]).read() == [0.0]
    nccl.ncclGroupEnd()
    assert pending
    return sorted(set(received.read()))


def test_sends_and_receives_of_a_group_do_not_block_each_other() -> None:
    """guide, "Point-to-point communication", "Sendrecv"."""
    assert check(run(both_directions, 2)) == [[1.0], [0.0]]


def group_end_without_start(_: Rank) -> int:
    cuda.cudaSetDevice(0)
    return nccl.raw("ncclGroupEnd")


def test_a_group_that_was_not_begun_cannot_end() -> None:
    """src/group.cc, ncclGroupEndInternal: ncclInvalidUsage, "not in a group call"."""
    assert check(run(group_end_without_start, 1)) == [INVALID_USAGE]


def nothing_before_the_end(rank: Rank) -> tuple[bool, list[float]]:
    comm, one, buffer = Communicator.make(rank), stream(), Buffer([1.0])
    nccl.ncclGroupStart()
    comm.all_reduce(buffer, one)
    comm.all_reduce(buffer, one)
    idle = query(one)
    nccl.ncclGroupEnd()
    cuda.cudaStreamSynchronize(one)
    return idle, buffer.read()


def test_operations_of_a_group_are_launched_at_its_end() -> None:
    """guide, "Group Calls": ncclGroupEnd returns when all operations since ncclGroupStart are enqueued."""
    assert check(run(nothing_before_the_end, 2)) == [(True, [4.0])] * 2


# --- non-blocking communicators ---


def begins_alone(rank: Rank) -> tuple[int, int, int]:
    if rank.rank == 1:
        rank.read("asked")
    comm, result = Communicator.begin(rank, blocking=False)
    state = comm.error()
    if rank.rank == 0:
        count = ctypes.c_int()
        early = nccl.raw("ncclCommCount", comm.handle, ctypes.byref(count))
        rank.publish("asked")
    else:
        early = INVALID_ARGUMENT
    return result, early, comm.settle() if state == IN_PROGRESS else state


def test_a_non_blocking_communicator_is_in_progress_until_all_have_come() -> None:
    """guide, "Creating a communicator with options"; src/init.cc, ncclCommEnsureReady: not to be used before."""
    assert check(run(begins_alone, 2)) == [(IN_PROGRESS, INVALID_ARGUMENT, NCCL_SUCCESS)] * 2


def non_blocking_launch(rank: Rank) -> tuple[int, int, list[float]]:
    comm, buffer = Communicator.make(rank, blocking=False), Buffer([1.0])
    result = comm.all_reduce(buffer)
    state = comm.settle()
    cuda.cudaDeviceSynchronize()
    return result, state, buffer.read()


def test_each_call_of_a_non_blocking_communicator_is_in_progress_first() -> None:
    """src/group.cc, ncclGroupEndInternal: a thread launches; the call returns ncclInProgress."""
    for result, state, value in check(run(non_blocking_launch, 2)):
        assert result in (IN_PROGRESS, NCCL_SUCCESS) and state == NCCL_SUCCESS and value == [2]


def first_use_blocks(rank: Rank, blocking: bool) -> bool:
    comm, one, buffer = Communicator.make(rank, blocking), stream(), Buffer([1.0])
    if rank.rank == 1:
        rank.read("waited", 60)
    start = time.monotonic()
    thread = threading.Thread(target=comm.all_reduce, args=(buffer, one))
    thread.start()
    thread.join(0.4)
    waits = thread.is_alive() if blocking else comm.error() == IN_PROGRESS
    if rank.rank == 0:
        rank.publish("waited")
    thread.join()
    comm.settle()
    cuda.cudaStreamSynchronize(one)
    assert time.monotonic() - start < 30
    return waits


@pytest.mark.parametrize("blocking", [True, False])
def test_the_first_use_of_an_algorithm_waits_on_the_host_for_the_peers(blocking: bool) -> None:
    """src/group.cc, ncclCollPreconnect (NCCL_RUNTIME_CONNECT, default 1): connections are made with the peers then."""
    assert check(run(first_use_blocks, 2, blocking))[0] is True


def abort_beside_a_launch(rank: Rank) -> tuple[int, float]:
    comm, buffer = Communicator.make(rank, blocking=False), Buffer([1.0])
    if rank.rank == 1:
        rank.read("aborted")
        return 0, 0.0
    comm.all_reduce(buffer)  # its connections wait for rank 1
    time.sleep(0.2)
    assert comm.error() == IN_PROGRESS
    start = time.monotonic()
    result = comm.abort()
    rank.publish("aborted")
    return result, time.monotonic() - start


def test_an_abort_ends_a_launch_that_waits_for_its_peers() -> None:
    """src/init.cc, ncclCommAbort: sets the flag, then joins the thread of the group (ncclGroupJobAbort)."""
    result, seconds = check(run(abort_beside_a_launch, 2))[0]
    assert result == NCCL_SUCCESS and seconds < 5


def blocking_init_ends(rank: Rank) -> int:
    if rank.rank == 1:
        rank.read("ended")
        return 0
    comm, _ = Communicator.begin(rank, blocking=False)
    time.sleep(0.2)
    result = comm.abort()
    rank.publish("ended")
    return result


def test_an_abort_ends_an_initialization_that_waits() -> None:
    """src/init.cc, ncclCommAbort: "init thread must be joined before we destroy the comm"."""
    assert check(run(blocking_init_ends, 2)) == [NCCL_SUCCESS, 0]


# --- aborts ---


def aborts(rank: Rank) -> tuple[int, int, list[str]]:
    comm, one, buffer = connected(rank)
    done: list[str] = []
    if rank.rank == 1:
        rank.read("done")
        return 0, 0, []
    comm.all_reduce(buffer, one)
    comm.all_reduce(buffer, one)  # queued behind the one that hangs
    kept = note(one, done, "after")
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(comm.abort()))
    time.sleep(0.1)
    assert not done
    thread.start()
    cuda.cudaStreamSynchronize(one)  # ends although rank 1 never came
    thread.join()
    rank.publish("done")
    assert kept
    return results[0], cuda.raw("cudaGetLastError"), done


def test_an_abort_from_another_thread_ends_the_kernels_and_frees_the_stream() -> None:
    """guide, "Aborting a communicator"; src/init.cc, setCommAbortFlags. The stream goes on as after a success."""
    assert check(run(aborts, 2))[0] == (NCCL_SUCCESS, 0, ["after"])


def abort_waits_for_the_stream(rank: Rank) -> tuple[bool, bool]:
    comm, one, buffer = connected(rank)
    gate = Gate(one)
    comm.all_reduce(buffer, one)
    return held_up(comm.abort, gate.open)


def test_an_abort_waits_for_kernels_that_wait_behind_other_work() -> None:
    """src/init.cc, commDestroySync: synchronizes the communicator's stream, which is behind each of its launches."""
    assert check(run(abort_waits_for_the_stream, 2)) == [(True, False)] * 2


def aborts_in_a_group(rank: Rank) -> tuple[bool, bool] | None:
    first, second = Communicator.make(rank, name="first"), Communicator.make(rank, name="second")
    one, buffer = stream(), Buffer([1.0])
    for comm in (first, second):
        comm.all_reduce(buffer, one)
    cuda.cudaStreamSynchronize(one)
    if rank.rank == 1:
        rank.read("ended")
        return None
    first.all_reduce(buffer, one)
    second.all_reduce(buffer, one)  # behind the other on the stream
    hangs = held_up(second.abort, first.abort)  # the kernel of the first holds the stream
    rank.publish("ended")
    return hangs


def test_aborting_one_of_two_communicators_on_a_stream_waits_for_the_other() -> None:
    """src/init.cc, commDestroySync; guide, "Aborting a communicator": several are aborted in a group, or by threads."""
    assert check(run(aborts_in_a_group, 2)) == [(True, False), None]


def two_aborts_in_a_group(rank: Rank) -> float:
    comms = [Communicator.make(rank, name=name) for name in ("first", "second")]
    one, buffer = stream(), Buffer([1.0])
    for comm in comms:
        comm.all_reduce(buffer, one)
    cuda.cudaStreamSynchronize(one)
    if rank.rank == 1:
        rank.read("ended")
        return 0
    for comm in comms:
        comm.all_reduce(buffer, one)
    start = time.monotonic()
    nccl.ncclGroupStart()
    for comm in reversed(comms):
        assert comm.abort() == NCCL_SUCCESS
    nccl.ncclGroupEnd()
    rank.publish("ended")
    return time.monotonic() - start


def test_aborts_in_a_group_set_all_flags_before_any_waits() -> None:
    """src/init.cc, ncclCommAbort: the flag is set by the call, what waits runs at the end of the group."""
    assert check(run(two_aborts_in_a_group, 2))[0] < 5


def used_after_its_end(rank: Rank) -> tuple[int, int, int]:
    comm, buffer = Communicator.make(rank), Buffer([1.0])
    comm.abort()
    untouched = ctypes.c_int(77)
    state = nccl.raw("ncclCommGetAsyncError", comm.handle, ctypes.byref(untouched))
    return comm.all_reduce(buffer), state, untouched.value


def test_an_aborted_handle_is_refused_and_an_answer_left_as_it_was() -> None:
    """src/misc/argcheck.cc, CommCheck: ncclInvalidArgument, "corrupted comm object"; the output is not written."""
    assert check(run(used_after_its_end, 2)) == [(INVALID_ARGUMENT, INVALID_ARGUMENT, 77)] * 2


def no_communicator(_: Rank) -> tuple[int, int, int]:
    cuda.cudaSetDevice(0)
    untouched = ctypes.c_int(77)
    return (
        nccl.raw("ncclCommGetAsyncError", None, ctypes.byref(untouched)),
        untouched.value,
        nccl.raw("ncclCommAbort", None),
    )


def test_a_null_handle_is_refused_except_by_those_that_end_it() -> None:
    """src/init.cc, ncclCommAbort and ncclCommGetAsyncError."""
    assert check(run(no_communicator, 1)) == [(INVALID_ARGUMENT, 77, NCCL_SUCCESS)]


def graph_holds(rank: Rank) -> tuple[list[float], bool, bool]:
    comm, one, buffer = connected(rank)
    cuda.cudaStreamBeginCapture(one, GLOBAL)
    assert comm.all_reduce(buffer, one) == NCCL_SUCCESS
    graph = ctypes.c_void_p()
    cuda.cudaStreamEndCapture(one, ctypes.byref(graph))
    executable = handle("cudaGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    for _ in range(3):
        cuda.cudaGraphLaunch(executable, one)
        comm.all_reduce(buffer, one)  # between replays, in the order of the launches
    cuda.cudaStreamSynchronize(one)
    value = buffer.read()

    def destroy() -> None:
        cuda.cudaGraphDestroy(graph)
        cuda.cudaGraphExecDestroy(executable)

    return value, *held_up(comm.abort, destroy)


def test_a_captured_collective_runs_at_each_replay_and_its_graph_keeps_the_communicator_from_ending() -> None:
    """guide, "Using NCCL with CUDA Graphs"; src/init.cc, commDestroySync: polls until no graph refers to it."""
    assert check(run(graph_holds, 2)) == [([128.0], True, False)] * 2


def aborts_beside_a_capture(rank: Rank) -> int:
    comm, _, _ = connected(rank)
    captured = stream()
    cuda.cudaStreamBeginCapture(captured, GLOBAL)
    assert comm.abort() == NCCL_SUCCESS
    return cuda.raw("cudaStreamEndCapture", captured, ctypes.byref(ctypes.c_void_p()))


def test_an_abort_breaks_a_capture_of_another_stream() -> None:
    """Measured with NCCL 2.28.9 on an H200, whatever the mode of the thread that aborts."""
    assert check(run(aborts_beside_a_capture, 2)) == [CAPTURE_INVALIDATED] * 2


# --- errors ---


def peer_dies(rank: Rank) -> tuple[int, bool, int, int]:
    comm, one, buffer = connected(rank)
    rank.barrier()
    if rank.rank == 1:
        raise SystemExit
    comm.all_reduce(buffer, one)
    wait_until(lambda: comm.error() != NCCL_SUCCESS)
    state = comm.error()
    spins = not query(one)
    refused = comm.all_reduce(buffer, one)
    aborted = comm.abort()
    cuda.cudaStreamSynchronize(one)
    return state, spins, refused, aborted


def test_a_peers_death_is_an_asynchronous_error_and_the_kernel_spins_until_the_abort() -> None:
    """guide, "Asynchronous errors and error handling"; src/proxy.cc, ncclProxyProgress sets asyncResult."""
    ended = run(peer_dies, 3)
    assert check(ended, 0, 2) == [(REMOTE_ERROR, True, REMOTE_ERROR, NCCL_SUCCESS)] * 2


def nobody_is_there_to_notice(rank: Rank) -> int:
    comm, buffer = Communicator.make(rank), Buffer([1.0])
    comm.all_reduce(buffer)
    cuda.cudaDeviceSynchronize()
    rank.barrier()
    if rank.rank == 1:
        raise SystemExit
    time.sleep(0.5)
    return comm.error()


def test_a_peers_death_is_not_noticed_while_nothing_runs() -> None:
    """src/proxy.cc: the proxy thread makes progress only for operations under way."""
    assert check(run(nobody_is_there_to_notice, 2), 0) == [NCCL_SUCCESS]


def differs(rank: Rank) -> bool:
    comm, one, buffer, two = Communicator.make(rank), stream(), Buffer([1.0, 1.0]), Buffer([0.0] * 4)
    comm.all_reduce(buffer, one)
    comm.all_gather(buffer, two, one)
    cuda.cudaStreamSynchronize(one)
    comm.all_reduce(buffer, one) if rank.rank else comm.all_gather(buffer, two, one)
    time.sleep(0.3)
    hangs = not query(one) and comm.error() == NCCL_SUCCESS
    rank.barrier()
    comm.abort()
    cuda.cudaStreamSynchronize(one)
    return hangs


def test_ranks_that_call_different_collectives_hang() -> None:
    """guide, "Collective Operations": all ranks must call the same; else "hangs, crashes, or data corruption"."""
    assert check(run(differs, 2)) == [True, True]


# --- communicators from communicators ---


def splits(rank: Rank, blocking: bool) -> tuple[int, int, list[float]] | None:
    comm = Communicator.make(rank, blocking)
    color = -1 if rank.rank == 1 else 7
    out, result = comm.split(color, -rank.rank)  # in reverse order
    if not blocking:
        assert result == IN_PROGRESS and (comm.settle() == NCCL_SUCCESS)
    if rank.rank == 1:
        assert out.value is None
        return None
    child, buffer = Communicator(out), Buffer([float(rank.rank)])
    child.all_reduce(buffer)
    child.settle()
    cuda.cudaDeviceSynchronize()
    return child.number("ncclCommCount"), child.number("ncclCommUserRank"), buffer.read()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_split_makes_a_communicator_of_each_color_ordered_by_key(blocking: bool) -> None:
    """guide, ncclCommSplit; src/init.cc, ncclCommInitChildComm: the handle is null until the parent is ready."""
    assert check(run(splits, 3, blocking)) == [(2, 1, [2.0]), None, (2, 0, [2.0])]


def shrinks(rank: Rank, abort: bool) -> tuple[int, list[float]] | None:
    comm, one, buffer = connected(rank)
    rank.barrier()
    if rank.rank == 1:
        rank.read("shrunk-2")
        return None
    if abort:
        comm.all_reduce(buffer, one)  # hangs: rank 1 does not come
        time.sleep(0.2)
    out, result = comm.shrink([1], abort)
    assert result == NCCL_SUCCESS
    cuda.cudaStreamSynchronize(one)
    child, ones = Communicator(out), Buffer([1.0])
    child.all_reduce(ones)
    value = ones.read()
    rank.publish(f"shrunk-{rank.rank}")
    return child.number("ncclCommUserRank"), value


@pytest.mark.parametrize("abort", [True, False])
def test_a_shrink_leaves_ranks_out_and_ends_what_runs_if_asked_to(abort: bool) -> None:
    """guide, ncclCommShrink, NCCL_SHRINK_ABORT; src/init.cc, ncclCommShrink."""
    assert check(run(shrinks, 3, abort)) == [(0, [2.0]), None, (1, [2.0])]


def shrinks_after_a_death(rank: Rank) -> int:
    comm, buffer = Communicator.make(rank), Buffer([1.0])
    comm.all_reduce(buffer)
    cuda.cudaDeviceSynchronize()
    rank.barrier()
    if rank.rank == 1:
        raise SystemExit
    comm.all_reduce(buffer, stream())
    wait_until(lambda: comm.error() != NCCL_SUCCESS)
    return comm.shrink([1], abort=True)[1]


def test_a_shrink_is_refused_once_a_link_has_failed() -> None:
    """src/init.cc, ncclCommInitChildComm asks ncclCommEnsureReady, which sees the proxy's error."""
    assert check(run(shrinks_after_a_death, 3), 0, 2) == [REMOTE_ERROR] * 2


def revokes(rank: Rank) -> tuple[int, int, list[float]]:
    comm, one, buffer = connected(rank)
    rank.barrier()
    if rank.rank == 0:
        comm.all_reduce(buffer, one)
        time.sleep(0.1)
    result = nccl.raw("ncclCommRevoke", comm.handle, 0)
    cuda.cudaStreamSynchronize(one)
    refused = comm.all_reduce(buffer, one)
    out, made = comm.split(0, rank.rank)
    assert made == NCCL_SUCCESS
    ones = Buffer([1.0])
    Communicator(out).all_reduce(ones)
    assert result == NCCL_SUCCESS
    return result, refused, ones.read()


def test_a_revoked_communicator_runs_nothing_more_but_can_be_split() -> None:
    """src/init.cc, ncclCommRevoke; src/enqueue.cc, ncclEnqueueCheck: ncclInvalidUsage."""
    assert check(run(revokes, 2)) == [(NCCL_SUCCESS, INVALID_USAGE, [2.0])] * 2


def finalizes(rank: Rank) -> tuple[bool, int]:
    comm, one, buffer = connected(rank)
    waited = True
    if rank.rank == 1:
        rank.read("waited")
    comm.all_reduce(buffer, one)
    if rank.rank == 0:
        results: list[int] = []
        thread = threading.Thread(target=lambda: results.append(nccl.raw("ncclCommFinalize", comm.handle)))
        thread.start()
        thread.join(0.3)
        waited = thread.is_alive()
        rank.publish("waited")
        thread.join()
    else:
        nccl.ncclCommFinalize(comm.handle)
    return waited, nccl.raw("ncclCommDestroy", comm.handle)


def test_finalizing_waits_for_what_was_launched() -> None:
    """guide, "Finalizing a communicator": flushes all operations, without ending them."""
    assert check(run(finalizes, 2)) == [(True, NCCL_SUCCESS)] * 2


def bootstrap_ends(rank: Rank) -> int:
    if rank.rank == 2:
        return 0  # never comes
    if rank.rank == 1:
        return Communicator.begin(rank, blocking=True)[1]
    Communicator.begin(rank, blocking=False)
    time.sleep(0.3)
    raise SystemExit


def test_a_blocking_initialization_fails_when_the_process_of_the_unique_id_ends() -> None:
    """src/bootstrap.cc: connections to the root, ncclRemoteError when it goes away."""
    ended = run(bootstrap_ends, 3, seconds=15)
    assert check(ended, 1)[0] in (REMOTE_ERROR, INTERNAL_ERROR)
