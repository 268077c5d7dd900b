"""RAS: what NCCL's server answers of the communicators of a job.

Rules: NCCL 2.30.7, src/ras/client_support.cc (the commands in rasClientEventLoop, text in rasClientRunComms, JSON in
rasDumpCommsToJSON), src/ras/client.cc (the client); guide, "RAS".
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from typing import Any

from api import REMOTE_ERROR, Buffer, Communicator, Gate, connected, cuda, stream, wait_until
from ranks import Rank, check, run


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def address() -> dict[str, str]:
    return {"NCCL_RAS_ADDR": f"localhost:{_free_port()}"}


def connect() -> socket.socket:
    """Return a connection to a process that answers.

    All processes of a node listen on the one port, and the kernel gives a client to any of them, a stopped one too.
    """
    host, _, port = os.environ.get("NCCL_RAS_ADDR", "localhost:28028").partition(":")
    for _ in range(50):
        server = socket.create_connection((host, int(port)), timeout=2)
        server.sendall(b"client protocol 2\n")
        try:
            assert server.recv(100) == b"SERVER PROTOCOL 2\n"
        except TimeoutError:
            server.close()
            continue
        server.settimeout(20)
        return server
    raise AssertionError("no process answers")


def talk(*commands: str) -> list[str]:
    """Say commands as ncclras does and return the answers, the last until the server closes the connection."""
    with connect() as server, server.makefile("rw") as lines:
        answers = []
        for command in commands:
            lines.write(command + "\n")
            lines.flush()
            answers.append(lines.read() if command.endswith("status") else lines.readline())
        return answers


def status(timeout: int = 5) -> dict[str, Any]:
    *settings, answer = talk(f"timeout {timeout}", "set format json", "verbose status")
    assert settings == ["OK\n", "OK\n"]
    parsed: dict[str, Any] = json.loads(answer)
    return parsed


def counts(communicator: dict[str, Any]) -> dict[int, int]:
    return {rank["rank"]: rank["collective_counts"]["AllReduce"] for rank in communicator["ranks"]}


def healthy(rank: Rank) -> dict[str, Any]:
    comm, buffer = Communicator.make(rank), Buffer([1.0])
    for _ in range(3):
        comm.all_reduce(buffer)
    comm.broadcast(buffer, 0)
    out, _ = comm.split(rank.rank % 2, 0)
    cuda.cudaDeviceSynchronize()
    rank.barrier()
    answer = status() if rank.rank == 1 else {}
    rank.barrier()
    assert out
    return {**answer, "pid": os.getpid()}


def test_json_tells_each_communicator_with_its_ranks_and_counts() -> None:
    """rasDumpCommsToJSON: names and types of all members."""
    ended = check(run(healthy, 3, settings=address()))
    answer, pids = ended[1], [end["pid"] for end in ended]
    assert re.fullmatch(r"\d+\.\d+\.\d+", answer["nccl_version"]) and isinstance(answer["cuda_runtime_version"], int)
    assert answer["ras"]["timeouts_count"] == 0 and answer["communicators_count"] == 3
    assert sorted(comm["size"] for comm in answer["communicators"]) == [1, 2, 3]
    (world,) = (comm for comm in answer["communicators"] if comm["size"] == 3)
    assert re.fullmatch(r"0x[0-9a-f]+", world["hash"]) and re.fullmatch(
        r"0x[0-9a-f]+:0x[0-9a-f]+", world["secondary_hash"]
    )
    assert (world["ranks_count"], world["missing_ranks_count"], world["missing_ranks"]) == (3, 0, [])
    assert [rank["pid"] for rank in world["ranks"]] == pids
    assert world["ranks"][0] == {
        "rank": 0, "host": "127.0.0.1", "pid": pids[0], "cuda_dev": 0, "nvml_dev": 0,
        "status": {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False},
        "collective_counts": {"Broadcast": 1, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 3},
    }  # fmt: skip


def late(rank: Rank) -> tuple[dict[int, int], str]:
    comm, one, buffer = connected(rank)
    rank.barrier()
    if rank.rank != 1:
        comm.all_reduce(buffer, one)
    rank.barrier()
    answer = counts(status()["communicators"][0]), talk("verbose status")[0]
    rank.barrier()
    if rank.rank == 1:
        comm.all_reduce(buffer, one)
    cuda.cudaStreamSynchronize(one)
    return answer


def test_a_late_rank_is_the_one_with_the_lower_count_while_the_others_wait() -> None:
    """rasClientRunComms, "different ... operation counts": counts are those of launches."""
    for seen, text in check(run(late, 3, settings=address())):
        assert seen == {0: 2, 1: 1, 2: 2}
        assert "\n    0         1         1         3         3         3   RUNNING  MISMATCH\n" in text
        assert (
            "  Communicator ranks have different AllReduce operation counts\n  2 ranks have launched up to operation 2\n"
            in text
        )
        assert re.search(
            r"  Rank 1 has launched up to operation 1 -- GPU 0 managed by process \d+ on node 127.0.0.1\n", text
        )


def dead(rank: Rank) -> dict[str, Any]:
    comm, one, buffer = connected(rank)
    rank.barrier()
    if rank.rank == 1:
        raise SystemExit
    comm.all_reduce(buffer, one)
    wait_until(lambda: comm.error() == REMOTE_ERROR)
    rank.publish(f"seen-{rank.rank}")
    rank.read(f"seen-{2 - rank.rank}")
    answer = {**status(), "text": talk("status")[0]}
    rank.publish(f"answered-{rank.rank}")
    rank.read(f"answered-{2 - rank.rank}")
    return answer


def test_a_rank_whose_process_is_gone_is_missing_and_unresponsive_and_not_yet_dead() -> None:
    """rasDumpCommsToJSON, missing_ranks; RAS_PEER_DEAD_TIMEOUT is a minute; async_error of the others."""
    for answer in check(run(dead, 3, settings=address()), 0, 2):
        (world,) = answer["communicators"]
        (missing,) = world["missing_ranks"]
        assert missing["rank"] == 1 and missing["status"] == {"unresponsive": True, "considered_dead": False}
        assert [rank["status"]["async_error"] for rank in world["ranks"]] == [REMOTE_ERROR] * 2
        assert "INCOMPLETE\n  Missing communicator data from 1 job process\n" in answer["text"]
        assert "INCOMPLETE,ERROR" in answer["text"] and "  2 ranks reported Remote process error\n" in answer["text"]


def stopped(rank: Rank) -> tuple[float, dict[str, Any]] | None:
    Communicator.make(rank)
    rank.publish(f"pid-{rank.rank}", os.getpid())
    rank.barrier()
    if rank.rank == 1:
        rank.read("done", 60)
        return None
    victim = rank.read("pid-1")
    os.kill(victim, signal.SIGSTOP)
    start = time.monotonic()
    answer = status(timeout=1)
    seconds = time.monotonic() - start
    os.kill(victim, signal.SIGCONT)
    rank.publish("done")
    return seconds, answer


def test_a_stopped_process_is_waited_for_as_long_as_the_client_says() -> None:
    """The command "timeout", in seconds; timeouts_count."""
    seconds, answer = check(run(stopped, 2, settings=address()))[0]
    assert seconds > 0.9 and answer["ras"]["timeouts_count"] == 1
    assert answer["communicators"][0]["missing_ranks"][0]["status"]["unresponsive"] is True


def aborted(rank: Rank) -> dict[str, Any]:
    comm, _, _ = connected(rank)
    rank.barrier()
    if rank.rank == 1:
        comm.abort()
    rank.barrier()
    answer = {**status(), "text": talk("status")[0]}
    rank.barrier()
    return answer


def test_a_rank_that_has_aborted_is_missing_and_its_process_responds() -> None:
    """rasClientRunComms, status NOCOMM: reachable, without the communicator."""
    for answer in check(run(aborted, 2, settings=address())):
        (missing,) = answer["communicators"][0]["missing_ranks"]
        assert missing["rank"] == 1 and missing["status"] == {"unresponsive": False, "considered_dead": False}
        assert "  Communicator ranks have different status\n" in answer["text"]
        assert re.search(
            r"  Rank 1 has status NOCOMM -- GPU 0 managed by process \d+ on node 127.0.0.1\n", answer["text"]
        )


def commands(rank: Rank) -> list[str]:
    Communicator.make(rank)
    rank.barrier()
    answers = talk("CLIENT PROTOCOL 2", "timeout -1", "timeout x", "set format xml", "what", "status")
    rank.barrier()
    return answers


def test_commands_are_answered_line_by_line_and_a_status_ends_the_conversation() -> None:
    """rasClientEventLoop; the first lines of the text are those of rasClientRunInit."""
    *answers, text = check(run(commands, 2, settings=address()))[0]
    assert answers == [
        "SERVER PROTOCOL 2\n", "ERROR: Invalid timeout value -1\n", "ERROR: Invalid timeout value x\n",
        "ERROR: Invalid format xml\n", "ERROR: Unknown command what\n",
    ]  # fmt: skip
    assert re.match(r"NCCL version \d+\.\d+\.\d+ compiled with CUDA \d+\.\d+\nCUDA runtime version \d+, driver version \d+\n\n"
                    r"Job summary\n===========\n\n  Nodes  Processes", text)  # fmt: skip
    assert "      1          2            1          2        2\n" in text
    assert "\nGroup     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n" in text
    assert "    0         1         1         2         2         2   RUNNING      OK\n" in text
    assert text.endswith("\nErrors\n======\n\nWarnings\n========\n\n")


def switched_off(rank: Rank) -> bool:
    Communicator.make(rank)
    rank.barrier()
    try:
        talk("status")
    except ConnectionRefusedError:
        return True
    return False


def test_it_can_be_switched_off() -> None:
    """NCCL_RAS_ENABLE=0."""
    assert check(run(switched_off, 2, settings={**address(), "NCCL_RAS_ENABLE": 0})) == [True, True]


def answers_beside_a_hanging_stream(rank: Rank) -> dict[int, int]:
    comm, one, buffer = Communicator.make(rank), stream(), Buffer([1.0])
    gate = Gate(one)
    comm.all_reduce(buffer, one)  # launched, and held by the stream on both ranks
    rank.barrier()
    seen = counts(status()["communicators"][0])
    rank.barrier()
    gate.open()
    cuda.cudaStreamSynchronize(one)
    return seen


def test_a_launch_counts_before_it_runs() -> None:
    """src/plugin/profiler.cc: seqNumber, which RAS tells, is counted when the kernel is launched."""
    settings = {**address(), "EMULATED_NCCL_RUNTIME_CONNECT": 0}
    assert check(run(answers_beside_a_hanging_stream, 2, settings=settings)) == [{0: 1, 1: 1}] * 2
