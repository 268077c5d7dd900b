"""Every guarded collective against plain torch.distributed on real gloo ranks: same results, same kinds of input."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import ncclguard as ng
from ncclguard import faults

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.complex64, torch.bool,
)  # fmt: skip
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def all_dtypes_and_ops() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    compared, wrong = 0, []
    for dtype in DTYPES:
        for name in OPS:
            op = getattr(ReduceOp, name)
            mine = (torch.arange(6).reshape(2, 3) + rank).to(dtype)
            theirs = mine.clone()
            try:
                dist.all_reduce(theirs, op)
            except (RuntimeError, ValueError, TypeError):
                continue  # plain torch refuses it; the guard may refuse it too, or do better
            try:
                ng.safe_all_reduce(mine, op).raise_if_failed()
            except (ValueError, TypeError) as error:
                wrong.append(f"{dtype} {name}: {error}")
                continue
            compared += 1
            if not torch.equal(mine, theirs):
                wrong.append(f"{dtype} {name}: {mine.tolist()} instead of {theirs.tolist()}")
    average = torch.full((3,), float(rank))
    ng.safe_all_reduce(average, ReduceOp.AVG).raise_if_failed()
    faults.report(compared=compared, wrong=wrong, average=average.tolist())
    dist.destroy_process_group()


def test_all_reduce_gives_what_torch_gives_for_every_dtype_and_op() -> None:
    """10 dtypes x 8 ops: equal wherever plain torch gives a result; AVG, which older torch lacks on gloo, is exact."""
    result = faults.run_ranks(all_dtypes_and_ops, 3, timeout=90)
    assert result.values("wrong") == {rank: [] for rank in range(3)}, result
    assert min(result.values("compared").values()) >= 40, result
    assert result.values("average") == {rank: [1.0] * 3 for rank in range(3)}


def kinds_of_tensors() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(size)))
    right: dict[str, bool] = {}

    transposed = torch.full((3, 4), float(rank)).t()
    right["non-contiguous"] = ng.safe_all_reduce(transposed).ok and bool((transposed == total).all())
    sliced = torch.full((4, 6), float(rank))
    right["slice"] = ng.safe_all_reduce(sliced[:, ::2]).ok and bool((sliced[:, ::2] == total).all())
    right["slice's neighbours"] = bool((sliced[:, 1::2] == rank).all())
    right["no elements"] = ng.safe_all_reduce(torch.zeros(0)).ok
    scalar = torch.tensor(float(rank))
    right["0-dim"] = ng.safe_all_reduce(scalar).ok and scalar.item() == total
    with torch.inference_mode():
        inference = torch.full((4,), float(rank))
        right["inference mode"] = ng.safe_all_reduce(inference).ok and inference[0].item() == total
    right["inference tensor outside"] = ng.safe_all_reduce(inference).ok and inference[0].item() == total * size
    parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
    right["parameter"] = ng.safe_all_reduce(parameter).ok and parameter[0].item() == total and parameter.requires_grad
    for atomic in (True, False):
        large = torch.full((1_000_000,), float(rank))
        outcome = ng.safe_all_reduce(large, chunk_numel=90_000, atomic=atomic)
        right[f"pieces, atomic={atomic}"] = outcome.chunks == 12 and bool((large == total).all())
    small = torch.full((100,), float(rank))
    right["small in pieces"] = ng.safe_all_reduce(small, chunk_numel=7).chunks == 15 and bool((small == total).all())
    faults.report(right=right)
    dist.destroy_process_group()


def test_all_kinds_of_tensors() -> None:
    """Non-contiguous, empty, 0-dim, inference, parameters, in pieces: right sums, and nothing beside the view is touched."""
    result = faults.run_ranks(kinds_of_tensors, 3, timeout=90)
    assert result.ok, result
    for rank in range(3):
        wrong = [name for name, right in result[rank].reports["right"].items() if not right]
        assert wrong == [], (rank, wrong)


def other_collectives() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    right: dict[str, bool] = {}
    for numel, chunk in ((5, None), (300_000, 70_000)):
        tensor = torch.full((numel,), float(rank))
        right[f"broadcast {numel}"] = ng.safe_broadcast(tensor, 1, chunk_numel=chunk).ok and bool((tensor == 1).all())
        slots = [torch.full((numel,), -1.0) for _ in range(size)]
        gathered = ng.safe_all_gather(slots, torch.full((numel,), float(rank)), chunk_numel=chunk)
        right[f"all_gather {numel}"] = gathered.ok and all(bool((slot == r).all()) for r, slot in enumerate(slots))
        output = torch.zeros(numel)
        inputs = [torch.full((numel,), float(r + rank)) for r in range(size)]
        scattered = ng.safe_reduce_scatter(output, inputs, chunk_numel=chunk)
        right[f"reduce_scatter {numel}"] = scattered.ok and bool((output == size * rank + sum(range(size))).all())
        right[f"reduce_scatter inputs {numel}"] = all(bool((t == r + rank).all()) for r, t in enumerate(inputs))
    objects: list[Any] = [None] * size
    together = ng.safe_all_gather_object(objects, {"rank": rank, "text": "x" * 50_000 * rank})
    right["all_gather_object"] = together.ok
    # Of the whole, as busbw's factor (n - 1) / n wants it; each rank's object is padded to the longest.
    right["bytes of objects"] = 3 * 100_000 < together.nbytes < 3 * 101_000 and together.nbytes == together.numel
    right["busbw of objects"] = abs(together.busbw / together.algbw - 2 / 3) < 1e-9
    right["objects"] = [o["rank"] for o in objects] == list(range(size)) and len(objects[2]["text"]) == 100_000
    values: list[Any] = ["a", {"b": 1}] if rank == 2 else [None, None]
    right["broadcast_object_list"] = ng.safe_broadcast_object_list(values, 2).ok and values == ["a", {"b": 1}]
    right["barrier"] = ng.safe_barrier(timeout=20).ok
    faults.report(right=right)
    dist.destroy_process_group()


def test_the_other_collectives_small_and_in_pieces() -> None:
    """Broadcast, all-gather, reduce-scatter, the object collectives and the barrier give what their names promise."""
    result = faults.run_ranks(other_collectives, 3, timeout=90)
    assert result.ok, result
    for rank in range(3):
        wrong = [name for name, right in result[rank].reports["right"].items() if not right]
        assert wrong == [], (rank, wrong)


def a_closing_round_for_all() -> None:
    """Small operations whose data come with the opening round, and are written after the closing one."""
    ng.configure(closing_nbytes=0, statistics_every=2)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for turn in range(6):
        tensor = torch.arange(4.0) + rank + turn
        ng.safe_all_reduce(tensor).raise_if_failed()
        found.append(tensor.tolist() == [sum(place + other + turn for other in range(size)) for place in range(4)])
        sent = torch.tensor([rank, turn])
        ng.safe_broadcast(sent, src=1).raise_if_failed()
        slots = [torch.empty(1) for _ in range(size)]
        ng.safe_all_gather(slots, torch.tensor([rank + 0.5])).raise_if_failed()
        found += [sent.tolist() == [1, turn], [slot.item() for slot in slots] == [other + 0.5 for other in range(size)]]
    kept = torch.arange(4.0)
    if rank == 1:
        time.sleep(8)
    late = ng.safe_all_reduce(kept, timeout=3)
    found += [not late.ok, late.culprits == (1,), torch.equal(kept, torch.arange(4.0))]
    faults.report(found=found, table=ng.safe_all_reduce(kept).ok)
    dist.destroy_process_group()


def test_small_operations_with_a_closing_round() -> None:
    """And with an exchange of statistics in every second one, whose vote comes in between."""
    result = faults.run_ranks(a_closing_round_for_all, 3, timeout=60).check()
    for rank in result:
        assert rank.reports["found"] == [True] * 21, rank
        assert rank.reports["table"]


def groups_and_threads() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
    refused, sums, from_threads = "", [], []
    for group, members in ((left, (0, 1)), (right, (1, 2))):
        tensor = torch.ones(3)
        try:
            outcome = ng.safe_all_reduce(tensor, group=group)
            sums.append([outcome.ok, tensor[0].item(), list(outcome.participants) == list(members)])
        except ValueError as error:
            refused = str(error)

    def work() -> None:
        for _ in range(20):
            tensor = torch.ones(2)
            ng.safe_all_reduce(tensor, timeout=30).raise_if_failed()
            from_threads.append(tensor[0].item())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A failure in one group leaves the other alone.
    if rank == 0:
        time.sleep(8)
    late = ng.safe_barrier(left, timeout=3).culprits if rank < 2 else None
    fine = ng.safe_barrier(right, timeout=20).ok if rank > 0 else None
    plain = torch.ones(1)
    dist.all_reduce(plain)
    faults.report(refused=refused, sums=sums, threads=from_threads, late=late, fine=fine, plain=plain.item())
    dist.destroy_process_group()


def test_subgroups_threads_and_the_callers_own_groups() -> None:
    """Members only; two threads queue; a failed subgroup poisons neither another guarded group nor the caller's own."""
    result = faults.run_ranks(groups_and_threads, 3, timeout=90)
    assert result.ok, result
    assert result.values("sums") == {0: [[True, 2.0, True]], 1: [[True, 2.0, True]] * 2, 2: [[True, 2.0, True]]}
    assert "rank 2 is not a member of the group" in result[2].reports["refused"]
    assert result.values("threads") == {rank: [3.0] * 40 for rank in range(3)}
    assert result.values("late") == {0: [0], 1: [0], 2: None}
    assert result.values("fine") == {0: None, 1: True, 2: True}
    assert result.values("plain") == dict.fromkeys(range(3), 3.0)


def bad_input() -> None:
    dist.init_process_group("gloo")
    tensor = torch.ones(4)
    sparse = torch.eye(3).to_sparse()
    destroyed = dist.new_group([0, 1])
    dist.destroy_process_group(destroyed)
    calls: dict[str, Any] = {
        "negative timeout": lambda: ng.safe_all_reduce(tensor, timeout=-1),
        "zero timeout": lambda: ng.safe_barrier(timeout=0),
        "timeout of a wrong type": lambda: ng.safe_all_reduce(tensor, timeout="5"),
        "no tensor": lambda: ng.safe_all_reduce([1.0]),
        "sparse": lambda: ng.safe_all_reduce(sparse),
        "meta": lambda: ng.safe_all_reduce(torch.ones(3, device="meta")),
        "op": lambda: ng.safe_all_reduce(tensor, "SUM"),
        "op for the dtype": lambda: ng.safe_all_reduce(tensor, ReduceOp.BAND),
        "attempts": lambda: ng.safe_all_reduce(tensor, max_attempts=0),
        "on_lost": lambda: ng.safe_all_reduce(tensor, on_lost="ignore"),
        "atomic": lambda: ng.safe_all_reduce(tensor, atomic="maybe"),
        "chunk": lambda: ng.safe_all_reduce(tensor, chunk_numel=0),
        "source": lambda: ng.safe_broadcast(tensor, 7),
        "outputs": lambda: ng.safe_all_gather([tensor], tensor),
        "shapes": lambda: ng.safe_all_gather([tensor, torch.ones(3)], tensor),
        "destroyed group": lambda: ng.safe_barrier(destroyed),
        "unpicklable": lambda: ng.safe_all_gather_object([None, None], lambda: None),
    }
    texts = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            texts[name] = str(error)
    faults.report(
        missing=sorted(set(calls) - set(texts)), untouched=tensor.tolist(), next=ng.safe_barrier(timeout=20).ok
    )
    dist.destroy_process_group()


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    """17 wrong calls: each a TypeError or ValueError on its own rank, the tensor untouched, and the next operation works."""
    result = faults.run_ranks(bad_input, 2, timeout=60)
    assert result.values("missing") == {0: [], 1: []}, result
    assert result.values("untouched") == {0: [1.0] * 4, 1: [1.0] * 4}
    assert result.values("next") == {0: True, 1: True}
