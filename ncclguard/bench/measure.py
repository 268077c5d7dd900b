"""The timed loop: all variants in turn on the same buffers, aligned by a barrier of the bench's own small group."""

from __future__ import annotations

import datetime
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ncclguard.bench.arguments import BenchError
from ncclguard.bench.operations import Workload
from ncclguard.bench.ranks import Heartbeat
from ncclguard.outcome import Outcome


class Wish(IntEnum):
    """What a rank wants next; the strongest wish of all ranks counts."""

    GO_ON = 0
    ENOUGH = 1  # honoured between two cycles
    STOP = 2  # Ctrl-C: honoured before the next call


class Control:
    """A gloo group beside those that are compared, so that neither slows the other down or breaks it."""

    def __init__(self, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.interrupted = False
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        self._heartbeat = Heartbeat()
        self._wish = torch.zeros(1, dtype=torch.int64)

    def beat(self) -> None:
        """Show that this rank moves on, in a step that may take long."""
        self._heartbeat.beat()

    def align(self, wish: Wish = Wish.GO_ON) -> tuple[float, Wish]:
        """Wait for all ranks: the seconds that took here, and the strongest wish."""
        self.beat()
        self._wish.fill_(int(Wish.STOP if self.interrupted else wish))
        started = time.perf_counter()
        dist.all_reduce(self._wish, dist.ReduceOp.MAX, group=self._group)
        return time.perf_counter() - started, Wish(int(self._wish.item()))

    def gather(self, mine: object) -> list[Any]:
        """Everybody's object, in the order of the ranks, on all ranks."""
        self.beat()
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, mine, group=self._group)
        return everybody

    def agree_to_start(self, objection: str | None) -> None:
        """Go on only if no rank objects.

        Raises:
            BenchError: on every rank, with the objection of the lowest rank that has one.
        """
        raise_first(self.gather(objection))

    def catch_signals(self) -> None:
        """Turn SIGINT and SIGTERM into a wish to stop, so that all ranks leave together and print what there is."""

        def note(number: int, frame: FrameType | None) -> None:
            self.interrupted = True

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)


def raise_first(objections: Sequence[str | None]) -> None:
    """Raise a BenchError with the objection of the lowest rank, if any rank has one."""
    for rank, text in enumerate(objections):
        if text is not None:
            raise BenchError(text if rank == 0 else f"rank {rank}: {text}")


Array = npt.NDArray[np.float64]

LEAST_CYCLES = 5
MOST_CYCLES = 200
_LONG_NBYTES = 1 << 26  # from here one warm-up cycle is enough: the call is long against what it warms


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to call the operation: plain torch, or guarded with or without a copy of the input."""

    name: str
    guarded: bool
    atomic: bool


PLAIN = Variant("plain", guarded=False, atomic=False)


def variants_for(op: str, atomics: Sequence[bool]) -> tuple[Variant, ...]:
    """What is compared: plain first. A barrier has no tensor, so nothing to copy."""
    if op == "barrier":
        return (PLAIN, Variant("guarded", guarded=True, atomic=False))
    return (PLAIN, *(Variant(f"guarded atomic={atomic}", guarded=True, atomic=atomic) for atomic in atomics))


@dataclass(frozen=True, slots=True)
class Plan:
    """How often: `warmup` cycles untimed, then `cycles` timed ones, or as many as fit in `seconds`."""

    slots: int
    warmup: int
    cycles: int | None
    seconds: float

    @property
    def most(self) -> int:
        return MOST_CYCLES if self.cycles is None else self.cycles


def plan_for(nbytes: int, slots: int, iters: int | None, warmup: int | None, seconds: float) -> Plan:
    """Cycles for at least `iters` calls per variant; without it by time, at least `LEAST_CYCLES`."""
    if warmup is None:
        warmup = 1 if nbytes >= _LONG_NBYTES else 3
    if iters is None:
        return Plan(slots, warmup, None, seconds)
    slots = min(slots, max(1, iters // LEAST_CYCLES))  # several cycles, so that the ratio has a spread
    return Plan(slots, warmup, -(-iters // slots), seconds)


class GuardedCallFailed(Exception):
    """A guarded call of a healthy job returned a failed outcome; the bench ends with it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome.incident or outcome))
        self.outcome = outcome


@dataclass(slots=True)
class Samples:
    """What one rank measured of one variant. Only whole cycles of all variants are kept."""

    durations: list[list[float]] = field(default_factory=list)  # seconds: cycles x calls back to back
    waits: list[float] = field(default_factory=list)  # seconds in the barrier before each cycle
    wrong: int = 0
    checked: int = 0

    def duration_array(self) -> Array:
        return np.asarray(self.durations, dtype=np.float64)


def measure(
    workload: Workload,
    variants: Sequence[Variant],
    plan: Plan,
    control: Control,
    group: dist.ProcessGroup | None = None,
    advance: Callable[[float], None] = lambda part: None,
) -> tuple[dict[str, Samples], bool]:
    """Run `plan` on this rank: the samples by variant name, and whether Ctrl-C cut it short.

    `advance` is told the part of the work that is done, from 0 to 1.

    Raises:
        GuardedCallFailed: a guarded call failed, with its outcome.
        RuntimeError: a plain call failed, as torch raises it.
    """
    samples = {variant.name: Samples() for variant in variants}
    started = time.perf_counter()
    for cycle in range(-plan.warmup, plan.most):
        if cycle == 0:
            started = time.perf_counter()
        spent = time.perf_counter() - started
        enough = plan.cycles is None and cycle >= LEAST_CYCLES and spent >= plan.seconds and control.rank == 0
        _, wish = control.align(Wish.ENOUGH if enough else Wish.GO_ON)
        if wish is Wish.ENOUGH:
            break
        order = variants if cycle % 2 == 0 else tuple(reversed(variants))
        found = None if wish is Wish.STOP else _cycle(workload, order, cycle + plan.warmup, control, group)
        if found is None:
            return samples, True
        if cycle >= 0:
            for name, (durations, wait, wrong) in found.items():
                kept = samples[name]
                kept.durations.append(durations)
                kept.waits.append(wait)
                kept.wrong += wrong
                kept.checked += workload.checked
            by_count, by_time = (cycle + 1) / plan.most, (time.perf_counter() - started) / plan.seconds
            by_time = min(by_time, (cycle + 1) / LEAST_CYCLES)
            advance(min(1.0, by_count if plan.cycles is not None else max(by_count, by_time)))
    return samples, False


def _cycle(
    workload: Workload, order: Sequence[Variant], salt: int, control: Control, group: dist.ProcessGroup | None
) -> dict[str, tuple[list[float], float, int]] | None:
    """Each variant once: fill, wait for all ranks, the timed calls, check. None when the ranks agreed to stop."""
    found: dict[str, tuple[list[float], float, int]] = {}
    for variant in order:
        workload.fill(salt)
        _synchronize(workload.device)
        wait, wish = control.align()
        if wish is Wish.STOP:
            return None
        durations = _timed(workload, variant, group)
        control.beat()
        found[variant.name] = (durations, wait, workload.count_wrong(salt))
    return found


def _timed(workload: Workload, variant: Variant, group: dist.ProcessGroup | None) -> list[float]:
    durations: list[float] = []
    for slot in range(workload.slots):
        started = time.perf_counter()
        if variant.guarded:
            outcome = workload.guarded(slot, variant.atomic, group)
            if not outcome:
                raise GuardedCallFailed(outcome)
        else:
            workload.plain(slot)
        _synchronize(workload.device)
        durations.append(time.perf_counter() - started)
    return durations


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
