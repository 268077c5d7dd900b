"""What a guarded subgroup held is given back when it is destroyed, and a group that gets its name again begins anew."""

from __future__ import annotations

import threading
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults

pytestmark = pytest.mark.usefixtures("own_processes")

ROUNDS = 6


def held() -> list[int]:
    """Descriptors and threads of this process."""
    process = psutil.Process()
    return [process.num_fds(), process.num_threads()]


def groups(local: bool, backend: str) -> None:
    """One short-lived group after the other over the same ranks."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier(timeout=30).raise_if_failed()
    seen: list[Any] = []
    for number in range(ROUNDS):
        group = dist.new_group([0, 1, 2], backend=backend, use_local_synchronization=local)
        tensor = torch.full((7,), float(rank + number))
        if backend == "ncclguard":
            dist.all_reduce(tensor, group=group)
            attempts = 1
        else:
            outcome = ng.safe_all_reduce(tensor, group=group, timeout=30)
            attempts = outcome.attempts if outcome else 0
        dist.barrier()  # everybody has the result before the first one destroys the group
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="destroyed"):
            ng.safe_barrier(group=group)
        del group
        seen.append([attempts, float(tensor[0]), *held()])
    faults.report(seen=seen)
    ng.safe_barrier(timeout=30).raise_if_failed()
    dist.destroy_process_group()
    faults.report(threads=[thread.name for thread in threading.enumerate() if thread.name.startswith("ncclguard")])


@pytest.mark.parametrize(("local", "backend"), [(False, "gloo"), (False, "ncclguard"), (True, "ncclguard")])
def test_destroyed_groups_leave_nothing_behind_and_their_names_can_be_used_again(local: bool, backend: str) -> None:
    """With `use_local_synchronization` torch names the group by its ranks: the same name each time, met by no old key.

    gloo itself cannot be made again under a name it had: it meets its own old keys, and hangs (torch 2.13).
    """
    result = faults.run_ranks(groups, 3, args=[local, backend], timeout=90)
    assert all(rank.ok for rank in result), str(result)
    for seen in result.values("seen").values():
        assert [row[:2] for row in seen] == [[1, 3.0 + 3 * number] for number in range(ROUNDS)], seen
        for column in (2, 3):  # one more or less belongs to a thread that is about to end
            assert seen[-1][column] <= max(row[column] for row in seen[:2]) + 1, seen
    assert result.values("threads") == {rank: [] for rank in range(3)}
