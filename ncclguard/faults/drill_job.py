"""The jobs that `ncclguard drill` runs without a command, and the recorder of a drilled rank or end of a channel.

The recorder writes one file a process, one JSON object a line, moments by CLOCK_MONOTONIC, which all processes of one
host share. It listens to events when NCCLGUARD_FAULT was armed, and only then.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
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
from ncclguard.faults.fault import EVENTS_VARIABLE, Fault
from ncclguard_explain.cause import WORD, Cause
from ncclguard_explain.language import say, speaking_to, told
from ncclguard_explain.ranks import ranks_text

if TYPE_CHECKING:
    from ncclguard.coordination.group_state import OpenCall
    from ncclguard.incident.model import Incident, MembershipChange
    from ncclguard.metrics.records import SlowRanks
    from ncclguard.outcome import Outcome


_PAUSE: Final = 0.001  # seconds between two readings of the sequence number
_KNOWN_WITHIN: Final = 5.0  # seconds for which `watch` may wait until the others know of this rank

_path: Path | None = None
_calls = 0  # guarded calls
_collectives = 0  # collectives of the default group at the last reading
_watched = False


def start() -> None:
    """Start recording if this process is a rank of a drill; a second call does nothing."""
    global _path
    folder = os.environ.get(EVENTS_VARIABLE)
    if folder is None or _path is not None:
        return
    _path = Path(folder, f"rank{dist.get_rank()}.{os.getpid()}.events")
    event("started", rank=dist.get_rank(), world_size=dist.get_world_size(), pid=os.getpid())
    events.listen(_Recorder())
    lifecycle.before_end(lambda: event("ended", calls=_calls, collectives=issued(), watched=_watched))


class _Recorder(events.Listener):
    """Writes down the result of every call, and the findings of `watch`."""

    def call_started(self, group: str, call: OpenCall) -> None:
        _count_call()

    def call_ended(self, group: str, call: OpenCall, outcome: Outcome | None) -> None:
        if outcome is not None:
            _note(outcome)

    def call_refused(self, group: str, outcome: Outcome) -> None:
        _count_call()
        _note(outcome)

    def watch_started(self, known: threading.Event) -> None:
        global _watched
        known.wait(
            _KNOWN_WITHIN
        )  # who is struck before is a stranger to the others; not for ever: the store may not answer
        _watched = True

    def incident_found(self, incident: Incident) -> None:
        event("failed", **_fields(incident), op_id=incident.op_id, seconds=None, torn=False, summary=incident.summary)
        values = {"op": "the job", "op_id": incident.op_id, "participants": list(incident.participants)}
        after_next_collective(lambda: event("went on", **values))

    def slow_found(self, slow: SlowRanks | None) -> None:
        if slow is not None:
            summary = say(slow.text)
            event("failed", cause="slow", culprits=list(slow.ranks), agreed=True, torn=False, summary=summary)
            event("went on", op="the job", participants=list(range(dist.get_world_size())))

    def membership_changed(self, change: MembershipChange) -> None:
        event("membership", change=change.kind, ranks=list(change.ranks), seconds=change.seconds, text=str(change))


def _count_call() -> None:
    global _calls
    _calls += 1


def event(kind: str, **values: Any) -> None:
    """Write one line; ignore errors, because the job matters more than the record."""
    if _path is not None:
        _append(_path, kind, values)


def channel_event(kind: str, **values: Any) -> None:
    """Write one line for an end of a weight channel, which need not be a rank of a job; nothing outside a drill."""
    folder = os.environ.get(EVENTS_VARIABLE)
    if folder is not None:
        _append(Path(folder, f"channel.{os.getpid()}.events"), kind, values)


def has_struck(fault: Fault) -> bool:
    """Return whether an end of a channel, perhaps one that has ended, was struck by this fault in this drill."""
    folder = os.environ.get(EVENTS_VARIABLE)
    struck = f'"fault": {json.dumps(str(fault))}'
    files = () if folder is None else Path(folder).glob("channel.*.events")
    return any(struck in file.read_text(errors="replace") for file in files)


def _append(path: Path, kind: str, values: dict[str, Any]) -> None:
    line = json.dumps({"event": kind, "at": time.monotonic(), **values}, default=str)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode() + b"\n")  # one unbuffered write, so that a SIGKILL loses nothing
        finally:
            os.close(descriptor)
    except OSError:
        return


def issued() -> int:
    """Return how many collectives this process has issued in the default group, whoever called them."""
    global _collectives
    group = dist.group.WORLD
    with contextlib.suppress(RuntimeError, ValueError):  # destroyed meanwhile
        _collectives = max(_collectives, 0 if group is None else torch_compat.sequence_number(group) or 0)
    return _collectives


def wait_for_collectives(number: int, only_watched: bool = False) -> bool:
    """Block until so many collectives have been issued in the default group; False when the program ended before.

    With `only_watched`, until `watch` observes them too; False once the program makes a guarded call.
    """
    while threading.main_thread().is_alive():
        if only_watched and _calls:
            return False
        if dist.is_initialized() and issued() >= number and (_watched or not only_watched):
            return True
        time.sleep(_PAUSE)
    return False


def after_next_collective(then: Callable[[], object]) -> None:
    """Call `then` in a thread once one more collective has been issued in the default group than now."""
    number = issued() + 1
    threading.Thread(target=lambda: wait_for_collectives(number) and then(), name="ncclguard drill progress").start()


_state: tuple[bool, tuple[int, ...]] | None = None  # the last operation's success and participants


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
            with speaking_to(sys.stdout):
                left_out = told(
                    "rank {rank}: step {number} is left out: {cause}, {ranks}",
                    rank=dist.get_rank(),
                    number=step,
                    cause=WORD[outcome.cause or Cause.UNKNOWN],
                    ranks=ranks_text(outcome.culprits),
                )
            print(left_out)
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
