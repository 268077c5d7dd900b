"""What a drilled rank runs and writes down: the jobs of `ncclguard drill` without a command, and the recorder.

The recorder writes one file a rank, one JSON object a line, moments by CLOCK_MONOTONIC, which all processes of one
host share. It listens to events when NCCLGUARD_FAULT was armed, and only then.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import events, lifecycle, torch_compat
from ncclguard.faults.fault import EVENTS_VARIABLE

if TYPE_CHECKING:
    from ncclguard.coordination.group_state import OpenCall
    from ncclguard.incident.model import Incident, MembershipChange
    from ncclguard.outcome import Outcome


_PAUSE: Final = 0.001  # seconds between two looks at the sequence number

_path: Path | None = None
_calls = 0


def start() -> None:
    """Begin to record if this process is a rank of a drill; once."""
    global _path
    folder = os.environ.get(EVENTS_VARIABLE)
    if folder is None or _path is not None:
        return
    _path = Path(folder, f"rank{dist.get_rank()}.{os.getpid()}.events")
    event("started", rank=dist.get_rank(), world_size=dist.get_world_size(), pid=os.getpid())
    events.listen(_Recorder())
    lifecycle.before_end(lambda: event("ended", calls=_calls))


class _Recorder(events.Listener):
    """Writes down what every call came to, and what `watch` has found."""

    def call_started(self, group: str, call: OpenCall) -> None:
        count(_calls + 1)

    def call_ended(self, group: str, call: OpenCall, outcome: Outcome | None) -> None:
        if outcome is not None:
            _note(outcome)

    def call_refused(self, group: str, outcome: Outcome) -> None:
        count(_calls + 1)
        _note(outcome)

    def incident_found(self, incident: Incident) -> None:
        event("failed", **_fields(incident), op_id=incident.op_id, seconds=None, torn=False, summary=incident.summary)
        values = {"op": "the job", "op_id": incident.op_id, "participants": list(incident.participants)}
        after_next_collective(lambda: event("went on", **values))

    def membership_changed(self, change: MembershipChange) -> None:
        event("membership", change=change.kind, ranks=list(change.ranks), seconds=change.seconds, text=str(change))


def count(calls: int) -> None:
    """Note how many calls there were, guarded ones or, in a raw drill, collectives."""
    global _calls
    _calls = max(_calls, calls)


def event(kind: str, **values: Any) -> None:
    """Write one line; what cannot be written is not worth an error in the job."""
    if _path is None:
        return
    line = json.dumps({"event": kind, "at": time.monotonic(), **values}, default=str)
    try:
        descriptor = os.open(_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode() + b"\n")  # one write, and no buffer that a SIGKILL could lose
        finally:
            os.close(descriptor)
    except OSError:
        return


def issued() -> int:
    """The collectives that this process has issued in the default group, whoever called them; 0 where there is none."""
    group = dist.group.WORLD
    try:
        return 0 if group is None else torch_compat.sequence_number(group) or 0
    except (RuntimeError, ValueError):  # destroyed meanwhile
        return 0


def wait_for_collectives(number: int) -> bool:
    """Block until so many collectives have been issued in the default group; False when the program ended before."""
    while threading.main_thread().is_alive():
        found = issued()
        count(found)
        if dist.is_initialized() and found >= number:
            return True
        time.sleep(_PAUSE)
    return False


def after_next_collective(then: Callable[[], object]) -> None:
    """Call `then` in a thread once one more collective has been issued in the default group than now."""
    number = issued() + 1
    threading.Thread(target=lambda: wait_for_collectives(number) and then(), name="ncclguard drill progress").start()


_state: tuple[bool, tuple[int, ...]] | None = None  # of the operation before: success, participants


def _fields(incident: Incident) -> dict[str, object]:
    culprits = list(incident.culprits)
    return {"op": incident.op, "cause": str(incident.cause), "culprits": culprits, "agreed": incident.agreed}


def _note(outcome: Outcome) -> None:
    """Write failures down, and the first success after one or with other participants."""
    global _state
    before, _state = _state, (outcome.cause is None, outcome.participants)
    if outcome.cause is not None:
        event(
            "failed",
            op_id=outcome.op_id,
            op=outcome.op,
            cause=str(outcome.cause),
            culprits=list(outcome.culprits),
            agreed=outcome.agreed,
            seconds=outcome.seconds,
            torn=outcome.torn,
            summary="" if outcome.incident is None else outcome.incident.summary,
        )
    elif before is not None and before != _state:
        event("went on", op_id=outcome.op_id, op=outcome.op, participants=list(outcome.participants))


#: Seconds that a step takes beside its collective.
STEP: Final = 0.1


def train(steps: int, timeout: float, numel: int, seed: int) -> None:
    """Run `steps` steps on this rank, each with one all-reduce of `numel` elements that has `timeout` seconds."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed + dist.get_rank())
    weights = torch.zeros(numel)
    on_lost: Literal["fail", "shrink"] = "fail"
    for step in range(steps):
        gradient = torch.randn(numel)
        time.sleep(STEP)
        outcome = ng.safe_all_reduce(gradient, timeout=timeout, on_lost=on_lost)
        if outcome:
            weights -= 0.01 * gradient / len(outcome.participants)
        elif dist.get_rank() in outcome.culprits and not outcome.agreed:
            raise SystemExit(f"step {step}: {outcome.error}")
        else:
            on_lost = "shrink"  # the same on all ranks, as the verdict is
            print(f"rank {dist.get_rank()}: step {step} is left out: {outcome.cause}, ranks {outcome.culprits}")
    dist.destroy_process_group()


def train_watched(steps: int, timeout: float, numel: int, seed: int) -> None:
    """Run `steps` steps of DistributedDataParallel with about `numel` parameters, each limited by `watch` only."""
    dist.init_process_group("gloo")
    ng.watch(timeout=timeout)
    torch.manual_seed(seed)
    width = max(1, int(numel**0.5))
    model = DistributedDataParallel(torch.nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        time.sleep(STEP)
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
