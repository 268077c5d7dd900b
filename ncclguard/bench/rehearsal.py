"""The --fault job: one rank misbehaves in a guarded all_reduce, and every rank shows what the guard says and does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.bench.arguments import BenchError, Settings
from ncclguard.bench.job import join, objection
from ncclguard.bench.measure import AllReduce, count_wrong, raise_first, shape_for
from ncclguard.bench.ranks import Heartbeat, World
from ncclguard.outcome import Outcome
from ncclguard_explain.cause import Cause

_HEALTHY_LIMIT = 60.0  # seconds for the calls in which nothing is injected, also while a late rank comes back
_AWAY = 1.5  # seconds beyond the deadline that a late or stopped rank stays away

#: fault -> the cause that the verdict must name; None: the guard retries and the call succeeds.
EXPECTED: dict[str, Cause | None] = {
    "late": Cause.LATE,
    "kill": Cause.LOST,
    "stop": Cause.STUCK,
    "mismatch": Cause.DIVERGED,
    "reset": None,
}
_WHAT = {
    "late": "sleeps through the deadline instead of calling",
    "kill": "ends itself with SIGKILL",
    "stop": "stops itself with SIGSTOP until after the deadline",
    "mismatch": "calls with half of the elements",
    "reset": "loses all its connections in the middle of the transfer",
}


@dataclass(frozen=True, slots=True)
class Record:
    """One rank's observations of the call with the fault and of the call after it."""

    rank: int
    ok: bool
    agreed: bool
    cause: str | None
    culprits: tuple[int, ...]
    op_id: str
    attempts: int
    seconds: float
    tensor_right: bool
    next_ok: bool
    next_right: bool
    participants: tuple[int, ...]


def check_fault(settings: Settings, ranks: int, launcher: str | None) -> None:
    """Refuse what cannot be rehearsed, before anything is started.

    Raises:
        BenchError: fewer than 3 ranks, a rank that is not there, or a launcher that ends the job with the first death.
    """
    if settings.fault is None:
        return
    if ranks < 3:
        raise BenchError(
            f"--fault needs at least 3 ranks, two to agree on the third; there are {ranks}: use --ranks 3."
        )
    if settings.fault_rank is not None and settings.fault_rank >= ranks:
        raise BenchError(f"--rank {settings.fault_rank}: there are only ranks 0 to {ranks - 1}; choose one of them.")
    if settings.fault == "kill" and launcher in ("torchrun", "srun"):
        raise BenchError(
            f"--fault kill: {launcher} ends the whole job when one rank dies, so nothing could be shown; "
            f"run python -m ncclguard.bench --fault kill without it."
        )


def run_fault(settings: Settings, world: World) -> int:
    """Run one healthy call, one with the fault and one after it; return this rank's exit code, 0 if all was right.

    Raises:
        BenchError: some rank objects to the start; nothing was allocated.
    """
    assert settings.fault is not None
    assert settings.fault_rank is not None
    heartbeat = Heartbeat()
    ng.configure(rounds=settings.rounds, atomic=True, on_lost="fail")  # whatever is set outside
    device, _ = join(settings, world)
    objections: list[str | None] = [None] * world.size
    ng.safe_all_gather_object(objections, objection(settings, world, device), timeout=_HEALTHY_LIMIT).raise_if_failed()
    raise_first(objections)
    rehearsal = _Rehearsal(settings, world, device, settings.fault, settings.fault_rank, heartbeat)
    return rehearsal.run()


class _Rehearsal:
    def __init__(
        self, settings: Settings, world: World, device: torch.device, fault: str, culprit: int, heartbeat: Heartbeat
    ) -> None:
        self.settings, self.world, self.fault, self.culprit = settings, world, fault, culprit
        self.heartbeat = heartbeat
        shape = shape_for("all_reduce", settings.numels[0], settings.torch_dtype, world.size)
        self.workload = AllReduce(shape, 1, world.rank, device, settings.timeout)
        self.reporter = 0 if culprit != 0 else 1  # prints the lines that are for all ranks

    def run(self) -> int:
        settings, world = self.settings, self.world
        self._tell(
            f"# all_reduce sum, {settings.dtype}, {self.workload.shape.numel:,} elements on {world.size} ranks, limit "
            f"{settings.timeout:g} s, {'with' if settings.rounds else 'without'} rounds. "
            f"Fault: rank {self.culprit} {_WHAT[self.fault]}."
        )
        healthy, _ = self._call(salt=0, limit=_HEALTHY_LIMIT)  # builds the communicator, and touches its memory first
        healthy, seconds = self._call(salt=0, limit=_HEALTHY_LIMIT) if healthy else (healthy, 0.0)
        if not healthy:
            self._say(f"the call before the fault failed: {healthy.incident or healthy}")
            return 1
        self._tell(f"call 1, nothing injected: ok in {seconds:.2f} s, {self._wrong(healthy, salt=0)} wrong elements")
        outcome, seconds = self._call_with_fault(seconds)
        right = self._wrong(outcome, salt=1) == 0 if outcome else self._unchanged(salt=1)
        self._say(f"call 2, the fault: {_sentence(outcome, seconds)}; {_tensor(outcome, right)}")
        if outcome.incident is not None:
            self._tell(f"\n{outcome.incident}\n")
        self.heartbeat.beat()

        following, next_seconds = self._call(salt=2, limit=_HEALTHY_LIMIT, shrink=self.fault == "kill")
        next_right = self._wrong(following, salt=2) == 0 if following else self._unchanged(salt=2)
        self._tell(f"call 3, the next one: {_sentence(following, next_seconds)}; {_tensor(following, next_right)}")
        return self._conclude(outcome, right, following, next_right, seconds)

    def _call(
        self, salt: int, limit: float, shrink: bool = False, tensor: torch.Tensor | None = None
    ) -> tuple[Outcome, float]:
        """Fill and reduce; return the outcome, and the seconds that the call took here."""
        if tensor is None:
            self.workload.fill(salt)
            tensor = self.workload.data
        started = time.perf_counter()
        outcome = ng.safe_all_reduce(tensor, timeout=limit, on_lost="shrink" if shrink else "fail", name="rehearsal")
        return outcome, time.perf_counter() - started

    def _call_with_fault(self, healthy_seconds: float) -> tuple[Outcome, float]:
        self.workload.fill(salt=1)
        tensor = self.workload.data
        if self.world.rank == self.culprit:
            self._say(f"call 2: {_WHAT[self.fault]}")
            tensor = self._misbehave(tensor, healthy_seconds)
        return self._call(salt=1, limit=self.settings.timeout, tensor=tensor)

    def _misbehave(self, tensor: torch.Tensor, healthy_seconds: float) -> torch.Tensor:
        """Commit the fault; return the tensor to call with afterwards."""
        away = self.settings.timeout + _AWAY
        if self.fault == "late":
            time.sleep(away)
        elif self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "stop":
            waker = subprocess.Popen(["/bin/sh", "-c", f"sleep {away:g}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            waker.wait()
        elif self.fault == "mismatch":
            return tensor[: max(1, tensor.numel() // 2)] if tensor.numel() > 1 else torch.cat((tensor, tensor))
        elif self.fault == "reset":
            threading.Thread(target=self._reset, args=(healthy_seconds / 3,), daemon=True).start()
        return tensor

    def _reset(self, delay: float) -> None:
        """Reset every connection of this process but those to the store."""
        time.sleep(delay)
        count = faults.reset_own_connections(keep_ports=[int(os.environ["MASTER_PORT"])])
        self._say(f"reset {count} connections after {delay:.2f} s")

    def _unchanged(self, salt: int) -> bool:
        return count_wrong(self.workload.data, self.workload.blocks.contribution(self.world.rank, salt)) == 0

    def _wrong(self, outcome: Outcome, salt: int) -> int:
        """Return how many elements are not the exact sum over the participants."""
        parts = [self.workload.blocks.contribution(rank, salt) for rank in outcome.participants]
        return count_wrong(self.workload.data, torch.stack(parts).sum(0, dtype=self.settings.torch_dtype))

    def _conclude(self, outcome: Outcome, right: bool, following: Outcome, next_right: bool, seconds: float) -> int:
        mine = Record(
            rank=self.world.rank,
            ok=outcome.ok,
            agreed=outcome.agreed,
            cause=None if outcome.cause is None else str(outcome.cause),
            culprits=outcome.culprits,
            op_id=outcome.op_id,
            attempts=outcome.attempts,
            seconds=seconds,
            tensor_right=right,
            next_ok=following.ok,
            next_right=next_right,
            participants=following.participants,
        )
        everybody: list[Record | None] = [None] * self.world.size
        gathered = ng.safe_all_gather_object(everybody, mine, timeout=_HEALTHY_LIMIT, on_lost="shrink")
        records = [record for record in everybody if record is not None] if gathered else [mine]
        gone = self.fault == "kill"
        complaint = judge_records(records, self.fault, self.culprit, self.world.size - gone)
        self._tell(f"# {'OK' if complaint is None else 'FAILED'}: {complaint or self._success(records)}")
        dist.destroy_process_group()
        return 0 if complaint is None else 1

    def _success(self, records: Sequence[Record]) -> str:
        first = records[0]
        took_part = ", ".join(map(str, first.participants))
        if self.fault == "reset":
            head = f"all {len(records)} ranks recovered in {first.attempts} attempts with the exact sum"
        else:
            slowest = max(record.seconds for record in records)
            head = (
                f"all {len(records)} live ranks say {first.cause}, rank {self.culprit}, operation {first.op_id}, "
                f"within {slowest:.2f} s; every tensor is as it was before the call"
            )
        return f"{head}; the next call succeeded on ranks {took_part}."

    def _say(self, text: str) -> None:
        """Print a line of this rank in one write, so that lines of several ranks do not mix."""
        sys.stdout.write(f"[rank {self.world.rank}] {text}\n")
        sys.stdout.flush()

    def _tell(self, text: str) -> None:
        """Print a line on the reporting rank only."""
        if self.world.rank == self.reporter:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


def judge_records(records: Sequence[Record], fault: str, culprit: int, live: int) -> str | None:
    """Return which promise of the guard is broken: one verdict, tensors right, the next call good; None for none."""
    if len(records) != live:
        return f"only {len(records)} of {live} live ranks could tell their verdict."
    verdicts = {(record.ok, record.cause, record.culprits, record.op_id) for record in records}
    if len(verdicts) > 1:
        return f"the ranks disagree: {sorted(map(str, verdicts))}."
    first, cause = records[0], EXPECTED[fault]
    if cause is None:
        if not first.ok:
            return f"the call did not recover: {first.cause}, culprits {list(first.culprits)}."
        if first.attempts < 2:
            return "the call was over before the connections broke; take a larger --numel."
    elif first.ok or first.cause != str(cause) or first.culprits != (culprit,):
        found = f"{first.cause or 'ok'}, culprits {list(first.culprits)}"
        return f"the verdict is {found}; expected {cause}, rank {culprit}."
    wrong = [record.rank for record in records if not (record.agreed and record.tensor_right)]
    if wrong:
        return f"the tensor is not what it must be, or the verdict not agreed, on ranks {wrong}."
    failed = [record.rank for record in records if not (record.next_ok and record.next_right)]
    if failed:
        return f"the next call failed or had a wrong sum on ranks {failed}."
    return None


def _sentence(outcome: Outcome, seconds: float) -> str:
    if outcome:
        return f"ok after {seconds:.2f} s, attempts {outcome.attempts}, ranks {list(outcome.participants)}"
    agreed = "agreed" if outcome.agreed else "NOT agreed"
    culprits = ", ".join(map(str, outcome.culprits)) or "unknown"
    return (
        f"failed after {seconds:.2f} s: {outcome.cause}, culprit rank {culprits} ({agreed}, operation {outcome.op_id})"
    )


def _tensor(outcome: Outcome, right: bool) -> str:
    if outcome:
        return "the sum is exact" if right else "the sum is WRONG"
    return "the tensor is as before" if right else "the tensor was CHANGED"
