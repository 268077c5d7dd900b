"""What somebody tried who had read only the documentation: faults inside a transfer, in two groups at once, twice in a row, on side streams.

Most need the emulated GPU, where a transfer can be made slow and a device be broken in the middle of a call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from tests.gpu.parts import NEEDS_EMULATED, NEEDS_GPU, SHARED_GPU, emulate, join

pytestmark = NEEDS_GPU

CULPRIT = 1
ENV = {**SHARED_GPU, "NCCLGUARD_AUTOSTART": "1", "NCCLGUARD_REPORT_DIR": "none"}
SLOW = {"EMULATED_NCCL_LINK_MBPS": "20"}  # 20 million elements need several seconds
LARGE = 20_000_000


def mine(numel: int = 1000) -> torch.Tensor:
    return torch.full((numel,), float(dist.get_rank() + 1), device="cuda")


def report(name: str, outcome: Any, tensor: torch.Tensor, value: float) -> None:
    """The verdict, and whether every element of ``tensor`` is ``value``."""
    verdict = [outcome.ok, None if outcome.ok else str(outcome.cause), list(outcome.culprits)]
    faults.report(**{name: [*verdict, bool((tensor == value).all())]})


def works(name: str = "after", group: Any = None, total: float | None = None) -> None:
    """A call that has to succeed."""
    tensor, size = mine(), dist.get_world_size()
    outcome = ng.safe_all_reduce(tensor, group=group, timeout=30)
    report(name, outcome, tensor, total or size * (size + 1) / 2)


def fails(name: str = "failed", numel: int = 1000, timeout: float = 30, **options: Any) -> None:
    """A call that has to fail, and to leave its input."""
    tensor = mine(numel)
    report(name, ng.safe_all_reduce(tensor, timeout=timeout, **options), tensor, dist.get_rank() + 1)


def strike(seconds: float, number: int) -> None:
    """Send a signal to this process while its main thread is in a call."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


# --- a device that breaks inside a call -------------------------------------------------------------------------------


def broken_inside(occasion: int, warm: bool) -> None:
    """Rank 1's device breaks at the Nth kernel, copy or collective of a guarded call."""
    rank = join("nccl")
    if warm:
        works("before")
    tensor = mine(300_000)
    torch.cuda.synchronize()
    ng.safe_barrier(timeout=30).raise_if_failed()
    if rank == CULPRIT:
        emulate("EMULATED_CUDA_ERROR_AT", occasion)
        with contextlib.suppress(RuntimeError):
            ng.safe_all_reduce(tensor, timeout=20)
        os._exit(0)
    started = time.monotonic()
    outcome = ng.safe_all_reduce(tensor, timeout=20)
    faults.report(seconds=time.monotonic() - started)
    report("failed", outcome, tensor, rank + 1)


@NEEDS_EMULATED
@pytest.mark.parametrize(("occasion", "warm"), [(1, True), (2, True), (1, False), (3, False)])
def test_a_device_that_breaks_inside_a_call_is_its_ranks_failure(occasion: int, warm: bool) -> None:
    """Not the network's: the other ranks are told who, and at once, also while NCCL connects."""
    result = faults.run_ranks(broken_inside, 3, args=[occasion, warm], env=ENV, timeout=60)
    assert result.values("failed") == {rank: [False, "failed", [CULPRIT], True] for rank in (0, 2)}, str(result)
    assert all(seconds < 10 for seconds in result.values("seconds").values()), str(result)


# --- what held --------------------------------------------------------------------------------------------------------


def interrupted_in_flight() -> None:
    """Ctrl-C on rank 1 while the data moves."""
    rank = join("nccl")
    works("before")
    if rank == CULPRIT:
        strike(1.0, signal.SIGINT)
        tensor = mine(LARGE)
        try:
            ng.safe_all_reduce(tensor, timeout=30)
        except KeyboardInterrupt:
            faults.report(failed=[False, "failed", [CULPRIT], bool((tensor == rank + 1).all())])
    else:
        fails(numel=LARGE)
    works()


def killed_transposed() -> None:
    """Rank 1 is killed in the middle of a tensor that is not contiguous."""
    rank = join("nccl")
    works("before")
    tensor = mine(LARGE).view(4000, 5000).t()
    if rank == CULPRIT:
        strike(1.0, signal.SIGKILL)
    outcome = ng.safe_all_reduce(tensor, timeout=30)
    report("failed", outcome, tensor, rank + 1)
    fails("again")


def stopped_in_flight() -> None:
    """Rank 1 is stopped while the data moves, and goes on after the deadline."""
    rank = join("nccl")
    works("before")
    if rank == CULPRIT:
        child = os.fork()
        if child == 0:
            time.sleep(1.0)
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(8.0)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
    fails(numel=LARGE, timeout=4)
    works()


def link_drops() -> None:
    """The connections of rank 1 are cut once: the call is tried again by itself."""
    rank = join("nccl")
    works("before")
    if rank == CULPRIT:
        emulate("EMULATED_NCCL_LINK_DROPS_AT", 1)
    works()


def outsider_killed() -> None:
    """Rank 1 is no member of the group."""
    rank = join("nccl")
    group = dist.new_group([0, 2])
    works("before")
    if rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGKILL)
    works("after", group, 4.0)
    fails()


def own_collective_waits_too() -> None:
    """A plain collective of the program waits for rank 1 on another stream meanwhile, and completes when it comes."""
    rank = join("nccl")
    plain = mine()
    dist.all_reduce(plain)
    works("before")
    if rank == CULPRIT:
        time.sleep(4)
    plain = mine()
    work = dist.all_reduce(plain, async_op=True)
    fails(timeout=2)
    work.wait()
    torch.cuda.synchronize()
    faults.report(plain=bool((plain == 6).all()))
    works()


def one_group_of_three() -> None:
    """Three threads with a group each; rank 1 is late in one of them."""
    rank = join("nccl")
    groups = [dist.new_group() for _ in range(3)]
    wrong: list[str] = []

    def busy(group: Any) -> None:
        for k in range(20):
            tensor = torch.full((1000,), float(rank + k), device="cuda")
            outcome = ng.safe_all_reduce(tensor, group=group, timeout=30)
            if not outcome or not bool((tensor == 3 + 3 * k).all()):
                wrong.append(f"{k}: {outcome}")

    threads = [threading.Thread(target=busy, args=(group,)) for group in groups[1:]]
    for thread in threads:
        thread.start()
    if rank == CULPRIT:
        time.sleep(4)
    tensor = mine()
    outcome = ng.safe_all_reduce(tensor, group=groups[0], timeout=2)
    # A thread of the late rank may wait in another group at that moment: then it has diverged.
    told = str(outcome.cause).replace("diverged", "late")
    faults.report(failed=[outcome.ok, told, list(outcome.culprits), bool((tensor == rank + 1).all())])
    for thread in threads:
        thread.join(60)
    faults.report(wrong=wrong)
    works(group=groups[0])


def freed_at_once() -> None:
    """Tensors are freed right after the call, on two streams, and their memory is written again."""
    rank = join("nccl")
    side, wrong = torch.cuda.Stream(), []
    for k in range(40):
        with torch.cuda.stream(side if k % 2 else torch.cuda.current_stream()):
            tensor = torch.full((1000 + 37 * k,), float(rank + k), device="cuda")
            outcome = ng.safe_all_reduce(tensor, timeout=30)
            kept = tensor * 1
            del tensor
            other = torch.full_like(kept, -7.0)
            if not outcome or not bool((kept == 3 + 3 * k).all()) or not bool((other == -7).all()):
                wrong.append(k)
    faults.report(wrong=wrong)
    works()


def late_then_killed() -> None:
    """A second fault after the group has recovered from a first one, under inference mode."""
    rank = join("nccl")
    with torch.inference_mode():
        works("before")
        if rank == CULPRIT:
            time.sleep(3)
        fails("late", timeout=1.5)
        works("between")
        if rank == CULPRIT:
            os.kill(os.getpid(), signal.SIGKILL)
        fails()


LOST = [False, "lost", [CULPRIT], True]
LATE = [False, "late", [CULPRIT], True]
OK = [True, None, [], True]
REST = (0, 2)
ALL = (0, 1, 2)

Expected = dict[str, tuple[tuple[int, ...], Any]]

ATTACKS: list[tuple[Callable[[], None], dict[str, str], Expected]] = [
    (interrupted_in_flight, SLOW, {"failed": (ALL, [False, "failed", [CULPRIT], True]), "after": (ALL, OK)}),
    (killed_transposed, SLOW, {"failed": (REST, LOST), "again": (REST, LOST)}),
    (stopped_in_flight, SLOW, {"failed": (ALL, [False, "stuck", [CULPRIT], True]), "after": (ALL, OK)}),
    (link_drops, {}, {"after": (ALL, OK)}),
    (outsider_killed, {}, {"after": (REST, OK), "failed": (REST, LOST)}),
    (own_collective_waits_too, {}, {"failed": (ALL, LATE), "plain": (ALL, True), "after": (ALL, OK)}),
    (one_group_of_three, {}, {"failed": (ALL, LATE), "wrong": (ALL, []), "after": (ALL, OK)}),
    (freed_at_once, {}, {"wrong": (ALL, []), "after": (ALL, OK)}),
    (late_then_killed, {}, {"late": (ALL, LATE), "between": (ALL, OK), "failed": (REST, LOST)}),
]


@NEEDS_EMULATED
@pytest.mark.parametrize(("attack", "env", "expected"), ATTACKS, ids=[attack.__name__ for attack, _, _ in ATTACKS])
def test_attack(attack: Callable[[], None], env: dict[str, str], expected: Expected) -> None:
    result = faults.run_ranks(attack, 3, env={**ENV, **env}, timeout=80)
    for name, (ranks, value) in expected.items():
        assert result.values(name) == dict.fromkeys(ranks, value), f"{name}: {result}"
