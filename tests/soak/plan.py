"""What a round of the soak does, and on which data: the same in every process, from the seed alone."""

from __future__ import annotations

import functools
import math
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

#: Bytes of the largest operation, all ranks' parts together where they are gathered or scattered.
LARGEST: Final = 48 << 20
#: Ranks up to which that holds; where they are more on one machine, they share the memory of so many.
MANY: Final = 8
#: Elements after which the data repeats: a prime, so that no piece or segment begins where another does.
PERIOD: Final = 8191
#: A limit that no operation needs on a machine that is busy, and the one of the operations that show that all is well.
GENEROUS: Final = 30.0
#: A rank that is stopped for more seconds than this misses a limit of 1 s and the verdict about it.
LONG: Final = 4.0
REDUCTIONS: Final = (
    *(("float32", op) for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")),
    *(("float64", "SUM"), ("float16", "SUM"), ("bfloat16", "SUM"), ("bfloat16", "MAX"), ("int64", "BXOR")),
    *(("int32", "SUM"), ("int16", "MIN"), ("int8", "SUM"), ("uint8", "BOR"), ("bool", "SUM"), ("int32", "BAND")),
)
OPS: Final = ("all_reduce", "all_reduce", "all_gather", "all_gather_object", "reduce_scatter", "broadcast", "barrier")
FAULTS: Final = {
    "none": 2,
    "limit": 3,  # passes in mid-transfer, or does not
    "late": 1,
    "hesitant": 1,  # late, but not too late
    "stop": 3,
    "kill": 1,
    "reset": 2,
    "half": 2,  # connections ended at one end only
    "shape": 1,
}
#: More of them where the ranks are on several hosts: one is cut off, for longer than the limit or for less.
CUTS: Final = {"cut": 3}


@dataclass(frozen=True)
class Call:
    """One call of all ranks. `numel` is of one rank's part, in bytes for objects."""

    op: str
    dtype: str
    reduction: str
    numel: int
    chunk: int | None
    atomic: bool
    timeout: float
    source: int
    looks: bool  # whether the ranks look at their tensors when it has failed, before they free them

    @property
    def element(self) -> int:
        """Bytes of one."""
        return 1 if self.op in ("all_gather_object", "barrier") else int(getattr(torch, self.dtype).itemsize)

    def __str__(self) -> str:
        reduction = self.reduction if "reduce" in self.op else ""
        options = f"{self.dtype}[{self.numel}] {reduction} limit {self.timeout:.3g} s chunk {self.chunk}"
        return f"{self.op}({options}{'' if self.atomic else ' not atomic'})"


@dataclass(frozen=True)
class Plan:
    """One round: its calls, and the fault that strikes `victim`, `delay` seconds after the start; below 0: before.

    With `hosts` (0: all ranks are on one) the `victim` of a cut is a host.
    """

    number: int
    fault: str
    victim: int
    delay: float
    seconds: float  # how long it is late or stopped
    calls: tuple[Call, ...]
    hosts: int = 0

    def on_host(self, size: int) -> list[int]:
        """The ranks of the host that is cut off."""
        share = size // self.hosts
        return list(range(self.victim * share, (self.victim + 1) * share))

    @property
    def ends_job(self) -> bool:
        return self.fault == "kill"

    def __str__(self) -> str:
        whom = "host" if self.fault == "cut" else "rank"
        fault = f"{self.fault} {whom} {self.victim} at {self.delay:.3g} s for {self.seconds:.3g} s"
        return f"round {self.number}: {fault}: {'; '.join(map(str, self.calls))}"


def plan_of(seed: int, number: int, size: int, hosts: int = 0) -> Plan:
    """The same in every process."""
    rng = random.Random(f"{seed}/{number}/{size}/{hosts}" if hosts else f"{seed}/{number}/{size}")
    faults = {**FAULTS, **CUTS} if hosts else FAULTS
    fault = rng.choices(list(faults), list(faults.values()))[0]
    victim = rng.randrange(size) if rng.random() < 0.3 else rng.randrange(1, size)
    delay = rng.choice((-1.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, 0.3)))
    seconds, timeout = 0.0, GENEROUS
    if fault in ("reset", "half"):
        delay = abs(delay) if delay >= 0 else 0.0
    elif fault in ("late", "hesitant"):
        timeout = rng.uniform(0.3, 1.5) if fault == "late" else GENEROUS
        seconds = timeout + rng.uniform(2.2, 3.0) if fault == "late" else rng.uniform(0.01, 1.0)
    elif fault == "cut":
        victim, delay, away = rng.randrange(hosts), -1.0, rng.random() < 0.5
        # Without the host of the store nothing can be agreed: it is away for less than the limit, as is any other at times.
        if victim and away:
            timeout = rng.uniform(1.0, 2.0)
            seconds = timeout + rng.uniform(3.0, 4.0)
        else:
            seconds = rng.uniform(1.0, 5.0)
    elif fault == "stop":
        long, around, short = (1.0, rng.uniform(4.6, 5.5)), (1.0, rng.uniform(0.8, 3.0)), (GENEROUS, rng.uniform(0, 2))
        timeout, seconds = rng.choice((long, around, short))
    counts = {"none": (1, 2, 3, 4), "limit": (1, 2, 3, 4), "reset": (3, 4, 5, 6), "half": (3, 4, 5, 6), "kill": (1, 2)}
    count = rng.choice(counts.get(fault, (1,)))
    large = fault in ("limit", "reset", "half") or (fault in ("stop", "kill") and delay >= 0)
    calls = []
    for _ in range(count):
        if fault == "limit":
            timeout = rng.choice((rng.uniform(0.01, 0.05), rng.uniform(0.01, 0.25)))
        calls.append(call_of(rng, size, timeout, large and rng.random() < 0.8, shaped=fault == "shape"))
    return Plan(number, fault, victim, delay, seconds, tuple(calls), hosts)


def call_of(rng: random.Random, size: int, timeout: float, large: bool, shaped: bool) -> Call:
    """`shaped`: one that can be called with another shape."""
    unfit = ("all_gather_object", "barrier") if shaped else ("barrier",) if large else ()
    op = rng.choice([op for op in OPS if op not in unfit])
    dtype, reduction = rng.choice(REDUCTIONS)
    itemsize = 1 if op == "all_gather_object" else getattr(torch, dtype).itemsize
    parts = size if op in ("all_gather", "all_gather_object", "reduce_scatter") else 1
    most = LARGEST * MANY // max(size, MANY) // itemsize // parts
    numel = rng.randint(most // 6, most) if large else int(math.exp(rng.uniform(0.0, math.log(most))))
    chunk = max(1, numel // rng.randint(2, 40)) if rng.random() < 0.5 else None
    return Call(
        op,
        dtype,
        reduction,
        max(1, numel),
        chunk,
        rng.random() < 0.75,
        timeout,
        rng.randrange(size),
        rng.random() < 0.5,
    )


def block(seed: int, number: int, index: int, call: Call, rank: int, slot: int = 0) -> torch.Tensor:
    """One period of a tensor: numbers whose sums and products are exact in any order, and equal bits for each zero."""
    generator = torch.Generator().manual_seed(random.Random(f"{seed}/{number}/{index}/{rank}/{slot}").getrandbits(60))
    dtype = torch.uint8 if call.op == "all_gather_object" else getattr(torch, call.dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, (PERIOD,), generator=generator).to(torch.bool)
    if call.reduction == "PRODUCT":
        return torch.tensor([1, 2, 0.5, -1, -2, -0.5])[torch.randint(0, 6, (PERIOD,), generator=generator)].to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -8, 9, (PERIOD,), generator=generator).to(dtype)


def tensor_of(period: torch.Tensor, numel: int) -> torch.Tensor:
    tensor = torch.empty(numel, dtype=period.dtype)
    rows = numel // PERIOD
    tensor[: rows * PERIOD].view(rows, PERIOD).copy_(period)
    tensor[rows * PERIOD :].copy_(period[: numel - rows * PERIOD])
    return tensor


def checksum(tensor: torch.Tensor, before: int = 0) -> int:
    return zlib.crc32(tensor.view(torch.uint8).numpy().data, before)


def checksum_of(period: torch.Tensor, numel: int, before: int = 0) -> int:
    """`checksum(tensor_of(period, numel))` without the tensor."""
    data = period.view(torch.uint8).numpy().tobytes()
    for _ in range(numel // PERIOD):
        before = zlib.crc32(data, before)
    return zlib.crc32(data[: numel % PERIOD * period.element_size()], before)


def reduced(blocks: list[torch.Tensor], reduction: str) -> torch.Tensor:
    """What the tensors of all ranks add up to, computed apart from everything that is tested."""
    dtype = blocks[0].dtype
    if dtype is torch.bool:
        return torch.stack(blocks).any(0)
    if reduction in ("BXOR", "BAND", "BOR"):
        return functools.reduce(getattr(torch, f"bitwise_{reduction[1:].lower()}"), blocks)
    exact = torch.stack([one.double() for one in blocks])
    if reduction == "AVG":
        return exact.sum(0).to(dtype) / len(blocks)
    found: Mapping[str, Callable[[], torch.Tensor]] = {
        "SUM": lambda: exact.sum(0),
        "PRODUCT": lambda: exact.prod(0),
        "MIN": lambda: exact.amin(0),
        "MAX": lambda: exact.amax(0),
    }
    return found[reduction]().to(dtype)


def expected(seed: int, plan: Plan, index: int, rank: int, size: int, ok: bool) -> int | None:
    """The checksum of what a rank's call has to leave behind; None where that is nothing."""
    call = plan.calls[index]
    of = functools.partial(block, seed, plan.number, index, call)
    numel = call.numel + (1 if plan.fault == "shape" and rank == plan.victim else 0)
    if call.op == "barrier" or (call.op == "all_gather_object" and not ok):
        return None
    if call.op == "all_reduce":
        return checksum_of(reduced([of(r) for r in range(size)], call.reduction) if ok else of(rank), numel)
    if call.op == "broadcast":
        return checksum_of(of(call.source if ok else rank), numel)
    if call.op == "reduce_scatter":
        result = reduced([of(r, rank) for r in range(size)], call.reduction) if ok else of(rank, size)
        return checksum_of(result, numel)
    total = 0
    for other in range(size):
        if call.op == "all_gather":
            total = checksum_of(of(other) if ok else of(rank, 1 + other), numel, total)
        else:
            total = checksum_of(of(other), call.numel + other, total)
    return total
