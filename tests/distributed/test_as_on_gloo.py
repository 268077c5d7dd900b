"""What a program that was written for gloo finds on the guarded backend: its calls, its exceptions, and its words."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

import ncclguard as ng
from ncclguard import faults

LIMIT = 8.0
#: The limit of a call that nobody meets.
SHORT = 3.0
#: What torch's own test of a barrier that times out looks for, and what other programs do.
TIMED_OUT = (r" (Timed out|closed|timeout) ", r"[Tt]imed out")


def wait_for(stage: str, ranks: tuple[int, ...]) -> None:
    """Wait, in no operation of the group, until these ranks have come to their end of a stage."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() in ranks:
        store.set(f"{stage} {dist.get_rank()}", "")
    while not store.check([f"{stage} {rank}" for rank in ranks]):
        time.sleep(0.05)


def raised(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call raises to a program that expects what gloo raises."""
    started = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        culprits = list(error.outcome.culprits) if isinstance(error, ng.CollectiveFailed) else None
        found = {"error": type(error).__name__, "text": str(error), "culprits": culprits}
        return found | {"seconds": time.monotonic() - started}
    return {"error": ""}


def expects_gloo() -> None:
    """Stages on one group, which has to work again after each."""
    dist.init_process_group("ncclguard", timeout=timedelta(seconds=LIMIT))
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    for stage in (
        late,
        absent_from_a_monitored_barrier,
        no_time_at_all,
        whoever_is_first,
        nobody_sends,
        mean_of_integers,
        what_a_program_reads,
        shards,
    ):
        ng.safe_barrier(timeout=30).raise_if_failed()
        faults.report(**{stage.__name__: stage(rank, pair)})
        ng.safe_barrier(timeout=30).raise_if_failed()
    total = torch.ones(1)
    dist.all_reduce(total)
    faults.report(total=float(total))
    faults.report(all_have_left=all_have_left(rank))
    if rank == 0:
        dist.destroy_process_group()


def late(rank: int, _: Any) -> Any:
    if rank == 2:
        time.sleep(LIMIT + 4)
    return raised(dist.barrier)


def absent_from_a_monitored_barrier(rank: int, pair: Any) -> Any:
    """All but rank 1 come; then none but rank 0; then it is alone in a group of two, whose limit is a float."""
    dist.monitored_barrier(timeout=timedelta(seconds=LIMIT))
    found = []
    calls: list[tuple[Any, Any, bool, tuple[int, ...]]] = [
        (None, timedelta(seconds=SHORT), False, (0, 2)),
        (None, timedelta(seconds=SHORT), True, (0,)),
        (pair, SHORT, False, (0,)),
    ]
    for number, (group, limit, all_of_them, present) in enumerate(calls):
        if rank in present:
            found.append(raised(partial(dist.monitored_barrier, group, limit, all_of_them)))
        wait_for(f"absent {number}", present)
        ng.safe_barrier(timeout=30).raise_if_failed()
    if rank == 2:
        dist.monitored_barrier(pair, SHORT)  # it is not in the group
    return found


def no_time_at_all(rank: int, _: Any) -> Any:
    group: Any = dist.group.WORLD
    found = raised(lambda: group.monitored_barrier(timedelta(0))) if rank == 0 else {}
    wait_for("no time", (0,))
    return found


def whoever_is_first(rank: int, _: Any) -> Any:
    """Two that wait in a send already, and messages that come later, are told by source and tag, beside named receives."""
    found = []
    if rank != 0:
        for number, tag in enumerate((0, 7, 7)):
            if rank == 2 and number == 2:
                time.sleep(0.5)
            dist.send(torch.tensor([100 * rank + number]), 0, tag=tag)
        return []
    time.sleep(0.3)
    for tag, source in ((0, None), (0, None), (7, 1), (7, None), (7, None), (7, None)):
        tensor = torch.zeros(1, dtype=torch.int64)
        if tag and source is None:
            work = dist.irecv(tensor, tag=tag)
            assert work is not None and work.wait()
            found.append([work._source_rank(), int(tensor)])
        else:
            found.append([dist.recv(tensor, source, tag=tag), int(tensor)])
    return found


def nobody_sends(rank: int, _: Any) -> Any:
    """One rank sends, with another tag: it waits for a receive, and gets it when the other has given up."""
    if rank == 1:
        dist.send(torch.ones(2), 0, tag=4)
    if rank != 0:
        return {}
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=SHORT))
    found = raised(lambda: dist.recv(torch.zeros(2), tag=3))
    group.set_timeout(timedelta(seconds=LIMIT))
    return found | {"after": dist.recv(torch.zeros(2), tag=4)}


def mean_of_integers(rank: int, _: Any) -> Any:
    """gloo refuses it, so frameworks ask for it where they do not find gloo; as on NCCL it is rounded towards zero."""
    tensor, part = torch.tensor([-int(rank > 0), 5 + int(rank > 1)]), torch.zeros(2, dtype=torch.int32)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    dist.reduce_scatter(part, [torch.tensor([rank, 7 + rank], dtype=torch.int32)] * 3, dist.ReduceOp.AVG)
    narrow = torch.tensor([rank, 2 * rank], dtype=torch.uint8)
    dist.reduce(narrow, 0, dist.ReduceOp.AVG)
    return [tensor.tolist(), part.tolist(), narrow.tolist() if rank == 0 else [1, 2]]


def what_a_program_reads(rank: int, _: Any) -> Any:
    """Results and futures of gathers and barriers, the count of collectives, the limit, and a refused all-to-all."""
    group: Any = dist.group.WORLD
    before, slots, own = group._get_sequence_number_for_group(), [torch.zeros(1) for _ in range(3)], torch.ones(1)
    gather = dist.all_gather(slots, own + rank, async_op=True)
    assert gather is not None
    to_one = dist.gather(own + rank, slots if rank == 0 else None, async_op=True)
    barrier = dist.barrier(async_op=True)
    assert to_one is not None and barrier is not None
    found = {
        "all_gather": [[float(tensor) for tensor in gather.get_future().wait()], len(gather.result())],
        "gather": [float(tensor) for tensor in to_one.get_future().wait()],
        "barrier": [barrier.get_future().wait(), barrier.result()],
        "counted": group._get_sequence_number_for_group() - before,
        "limit": group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
    }
    for name, call in (
        ("transposed", lambda: dist.all_to_all_single(torch.zeros(3, 3), torch.zeros(3, 3).t())),
        ("nothing", lambda: dist.all_reduce_coalesced([])),
    ):
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


def shards(rank: int, _: Any) -> Any:
    """A tensor of shards is gathered where torch thinks that the backend's tensors are: on the CPU, where no GPU is."""
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{other}/cpu" for other in range(3)])
    whole = torch.zeros(3, 2) if rank == 0 else None
    sharded_tensor.ones(spec, 3, 2).gather(0, whole)
    return None if whole is None else whole.flatten().tolist()


def all_have_left(rank: int) -> Any:
    """Long before the limit."""
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=60))
    return raised(lambda: dist.recv(torch.zeros(2))) if rank == 0 else {}


def test_a_program_for_gloo_finds_its_calls_exceptions_and_words() -> None:
    """`recv` from any source, `monitored_barrier`, RuntimeError, and torch's words for a limit that has passed."""
    result = faults.run_ranks(expects_gloo, 3, timeout=110)
    reports = [result[rank].reports for rank in range(3)]
    assert all(found["total"] == 3.0 for found in reports), result
    for rank, found in enumerate(reports):
        assert found["late"]["error"] == "CollectiveTimeout", found
        assert all(re.search(words, found["late"]["text"]) for words in TIMED_OUT), found
        for error in found["absent_from_a_monitored_barrier"]:
            assert error["error"] == "CollectiveTimeout", error
            assert error["seconds"] < SHORT + 2, error
            assert f"Rank {rank} timed out in monitoredBarrier. " in error["text"], error
    for error in (reports[0]["absent_from_a_monitored_barrier"][0], *reports[2]["absent_from_a_monitored_barrier"]):
        assert error["culprits"] == [1] and "Rank 1 failed to pass monitoredBarrier in " in error["text"], error
    assert all(found["mean_of_integers"] == [[0, 5], [1, 8], [1, 2]] for found in reports), reports
    for rank, found in enumerate(reports):
        read = found["what_a_program_reads"]
        assert read["all_gather"] == [[1.0, 2.0, 3.0], 3] and read["gather"] == [1.0, 2.0, 3.0][: 3 * (rank == 0)], read
        assert (read["barrier"], read["counted"], read["limit"]) == ([[], []], 3, LIMIT), read
        assert "Tensors must be contiguous" in read["transposed"], read
        assert "requires non-empty tensor list" in read["nothing"], read
    assert [found["shards"] for found in reports] == [[1.0] * 6, None, None]
    everybody, of_the_pair = reports[0]["absent_from_a_monitored_barrier"][1:]
    assert "Ranks 1, 2 failed to pass monitoredBarrier in " in everybody["text"], everybody
    assert "Rank 1 failed to pass monitoredBarrier in " in of_the_pair["text"], of_the_pair
    assert "Rank 0 timed out in monitoredBarrier." in reports[0]["no_time_at_all"]["text"], reports[0]
    received = reports[0]["whoever_is_first"]
    assert sorted(received[:2]) == [[1, 100], [2, 200]] and received[2] == [1, 101], received
    assert sorted(received[3:]) == [[1, 102], [2, 201], [2, 202]], received
    nothing = reports[0]["nobody_sends"]
    assert (nothing["error"], nothing["culprits"], nothing["after"]) == ("CollectiveTimeout", [], 1), nothing
    assert "no rank has sent a message with tag 3" in nothing["text"] and nothing["seconds"] < SHORT + 2, nothing
    gone = reports[0]["all_have_left"]
    assert (gone["error"], gone["culprits"]) == ("PeerFailed", [1, 2]) and gone["seconds"] < 20, gone
