"""What a rank of the soak does, and what it reports."""

from __future__ import annotations

import contextlib
import functools
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.torch_compat.sockets import connections
from ncclguard.transport.base import live
from tests.soak.plan import GENEROUS, MANY, Plan, block, checksum, plan_of, tensor_of


class Prepared:
    """One call of this rank: its tensors, made beforehand."""

    def __init__(self, seed: int, plan: Plan, index: int, rank: int, size: int) -> None:
        self.call = call = plan.calls[index]
        of = functools.partial(block, seed, plan.number, index, call, rank)
        numel = call.numel + (1 if plan.fault == "shape" and rank == plan.victim else 0)
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.objects: list[Any] = [None] * size
        self.sent = b""
        if call.op in ("all_reduce", "broadcast"):
            self.outputs = [tensor_of(of(), numel)]
        elif call.op == "all_gather":
            self.inputs = [tensor_of(of(), numel)]
            self.outputs = [tensor_of(of(1 + slot), numel) for slot in range(size)]
        elif call.op == "reduce_scatter":
            self.inputs = [tensor_of(of(slot), numel) for slot in range(size)]
            self.outputs = [tensor_of(of(size), numel)]
        elif call.op == "all_gather_object":
            self.sent = tensor_of(of(), numel + rank).numpy().tobytes()
        self.sums = [checksum(tensor) for tensor in self.inputs]

    def run(self) -> ng.Outcome:
        call = self.call
        if call.op == "barrier":
            return ng.safe_barrier(timeout=call.timeout)
        if call.op == "all_gather_object":
            return ng.safe_all_gather_object(self.objects, self.sent, timeout=call.timeout)
        how: dict[str, Any] = {"timeout": call.timeout, "chunk_numel": call.chunk, "atomic": call.atomic}
        if call.op == "broadcast":
            return ng.safe_broadcast(self.outputs[0], call.source, **how)
        if call.op == "all_gather":
            return ng.safe_all_gather(self.outputs, self.inputs[0], **how)
        op = getattr(dist.ReduceOp, call.reduction)
        if call.op == "reduce_scatter":
            return ng.safe_reduce_scatter(self.outputs[0], self.inputs, op, **how)
        return ng.safe_all_reduce(self.outputs[0], op, **how)

    def found(self) -> int | None:
        """The checksum of what the caller has; None for nothing."""
        total = 0
        if self.call.op == "all_gather_object":
            for value in self.objects:
                total = total if value is None else zlib.crc32(value, total)
            return None if all(value is None for value in self.objects) else total
        for tensor in self.outputs:
            total = checksum(tensor, total)
        return total if self.outputs else None

    def free(self) -> list[int]:
        """Give all memory back; returns how many bytes each tensor had."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in (*self.outputs, *self.inputs)]
        self.inputs, self.outputs, self.objects, self.sent = [], [], [], b""
        return sizes


def waited_for_a_core() -> float:
    """Seconds that this thread was ready to run and no core was free."""
    return _waited(Path("/proc/thread-self"))


def threads_waited() -> dict[str, float]:
    """The same for each thread of this process."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[thread.name] = _waited(thread)
    return found


def _waited(thread: Path) -> float:
    return int((thread / "schedstat").read_text().split()[1]) / 1e9


def be_a_rank(seed: int, first: int, last: int, folder: str, hosts: int = 0) -> None:
    """The program of a rank: the rounds from `first` to before `last`, each when the parent has written its start."""
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=120).raise_if_failed()
    for number in range(first, last):
        one_round(seed, plan_of(seed, number, dist.get_world_size(), hosts), Path(folder))
    dist.destroy_process_group()


def one_round(seed: int, plan: Plan, folder: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    prepared = [Prepared(seed, plan, index, rank, size) for index in range(len(plan.calls))]
    faults.report(**{f"ready{plan.number}": ends()})
    file = folder / f"start{plan.number}"
    while not file.exists():
        time.sleep(0.002 if size <= MANY else 0.02)
    start, before = float(file.read_text()), threads_waited()
    if rank == plan.victim and plan.fault in ("late", "hesitant"):
        start += plan.seconds
    time.sleep(max(0.0, start - time.monotonic()))
    told: list[dict[str, Any]] = []
    patterns: list[torch.Tensor] = []
    mark = 1 + plan.number % 250
    while prepared:
        one = prepared.pop(0)
        told.append(tell(one.run, one))
        if not told[-1]["ok"]:
            patterns += [torch.full((nbytes,), mark, dtype=torch.uint8) for nbytes in one.free()]
    after: list[dict[str, Any]] = []
    while len(after) < 3 and not (after and after[-1]["ok"]):
        tensor = torch.zeros(size, dtype=torch.int64)
        tensor[rank] = 1
        again = functools.partial(ng.safe_all_reduce, tensor, timeout=GENEROUS / 2, on_lost="shrink")
        after.append(tell(again) | {"counted": tensor.nonzero()[:, 0].tolist(), "most": int(tensor.max())})
    time.sleep(0.02)
    changed = sum(int(one.min()) != mark or int(one.max()) != mark for one in patterns)
    starved = max(seconds - before.get(thread, 0.0) for thread, seconds in threads_waited().items())
    done = {"calls": told, "after": after, "changed": changed, "starved": starved}
    faults.report(**{f"done{plan.number}": done})


def tell(run: Callable[[], ng.Outcome], one: Prepared | None = None) -> dict[str, Any]:
    """Make a call and say what it came to."""
    held, entered = waited_for_a_core(), time.monotonic()
    try:
        outcome = run()
    except ng.CollectiveFailed as error:  # what an earlier call had returned as a success, see docs/protocol.md
        raised = {"ok": False, "raised": str(error), "entered": entered, "seconds": time.monotonic() - entered}
        return raised | {"held": waited_for_a_core() - held, "culprits": list(error.outcome.culprits)}
    seconds = time.monotonic() - entered
    answer: dict[str, Any] = {
        "ok": outcome.ok,
        "agreed": outcome.agreed,
        "cause": str(outcome.cause),
        "culprits": list(outcome.culprits),
        "op_id": outcome.op_id,
        "attempts": outcome.attempts,
        "participants": list(outcome.participants),
        "torn": outcome.torn,
        "entered": entered,
        "seconds": seconds,
        "held": waited_for_a_core() - held,
        "why": "" if outcome.incident is None else outcome.incident.summary,
    }
    if one is not None and (outcome.ok or one.call.looks):
        answer |= {"sum": one.found(), "read_only": [checksum(tensor) for tensor in one.inputs] == one.sums}
    return answer


def ends() -> dict[str, Any]:
    """The guard's own connections by the ports of both ends, and the ports of all others, which no fault is to touch."""
    own = []
    for communicator in tuple(live):
        for link in communicator._links.peers.values():
            with contextlib.suppress(OSError):  # broken already, or closed
                own.append((*link.socket.getsockname()[:2], *link.socket.getpeername()[:2]))
    ports = {(end[1], end[3]) for end in own}
    rest = connections(lambda local, remote: (local[1], remote[1]) not in ports)
    return {"own": own, "keep": sorted({port for one in rest for port in (one.local[1], one.remote[1])})}
