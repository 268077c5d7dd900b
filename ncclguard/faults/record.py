"""What a drilled rank writes down for `ncclguard drill`: when the fault struck,
what each call came to, how the program ended.

One file a rank, one JSON object a line, moments by CLOCK_MONOTONIC, which all processes of one host share. Nothing of
this is in the path of a job that is not drilled: the recorder puts itself around `Guard.run`, and around what `watch`
does with an incident, when NCCLGUARD_FAULT was armed, and only then.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ncclguard.agreement.decision import Verdict
    from ncclguard.execution import Execution
    from ncclguard.guard import Guard
    from ncclguard.incident.model import Incident
    from ncclguard.outcome import Outcome
    from ncclguard.request import Request

#: The folder for the files; set by `ncclguard drill` and read by nobody else.
VARIABLE: Final = "_NCCLGUARD_DRILL_DIR"

_path: Path | None = None
_calls = 0


def start() -> None:
    """Begin to record if this process is a rank of a drill; once."""
    global _path
    folder = os.environ.get(VARIABLE)
    if folder is None or _path is not None:
        return
    import torch.distributed as dist

    from ncclguard.errors import CollectiveFailed
    from ncclguard.faults import raw
    from ncclguard.guard import Guard
    from ncclguard.watch.watcher import Watcher

    _path = Path(folder, f"rank{dist.get_rank()}.{os.getpid()}.events")
    event("started", rank=dist.get_rank(), world_size=dist.get_world_size(), pid=os.getpid())
    run = Guard.run

    def recorded(self: Guard, work: Execution, request: Request, timeout: float) -> Outcome:
        count(_calls + 1)
        try:
            outcome = run(self, work, request, timeout)
        except CollectiveFailed as error:
            _note(error.outcome)
            raise
        _note(outcome)
        return outcome

    def concluded(self: Watcher, incident: Incident, verdict: Verdict | None) -> None:
        event("failed", **_fields(incident), op_id=incident.op_id, seconds=None, torn=False, summary=incident.summary)
        told = {"op": "the job", "op_id": incident.op_id, "participants": list(incident.participants)}
        raw.when_more(raw.issued(), lambda: event("went on", **told))
        conclude(self, incident, verdict)

    conclude = Watcher._conclude
    Watcher._conclude = concluded  # type: ignore[method-assign]
    Guard.run = recorded  # type: ignore[method-assign]
    atexit.register(lambda: event("ended", calls=_calls))


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


_state: tuple[bool, tuple[int, ...]] | None = None  # of the operation before: success, participants


def _fields(incident: Incident) -> dict[str, object]:
    culprits = list(incident.culprits)
    return {"op": incident.op, "cause": str(incident.cause), "culprits": culprits, "agreed": incident.agreed}


def _note(outcome: Outcome) -> None:
    """Write failures down, and the first success after one or with other participants;
    by that nobody has looked at the outcome.
    """
    global _state
    read = functools.partial(object.__getattribute__, outcome)
    before, _state = _state, (read("ok"), tuple(read("participants")))
    if not read("ok"):
        event(
            "failed",
            op_id=read("op_id"),
            op=read("op"),
            cause=str(read("cause")),
            culprits=list(read("culprits")),
            agreed=read("agreed"),
            seconds=read("seconds"),
            torn=read("torn"),
            summary=getattr(read("incident"), "summary", ""),
        )
    elif before is not None and before != _state:
        event("went on", op_id=read("op_id"), op=read("op"), participants=list(read("participants")))
