"""Counts what the engine reports, and turns failures and changes of settings into records."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from ncclguard.incident.model import Incident
from ncclguard.metrics import hook, identity
from ncclguard.metrics.adjust import SettingChange
from ncclguard.metrics.exchange import config_of_seat
from ncclguard.metrics.records import Change, Failure, OpenOperation, Record, Snapshot
from ncclguard.metrics.registry import NO_PHASE, Registry
from ncclguard.outcome import Cause
from ncclguard.phases import current_phase


class RecordingObserver:
    """See `hook.Observer`. `emit` is given failures and changes; it must not wait."""

    def __init__(self, job: str, emit: Callable[[Record], None]) -> None:
        self.registry = Registry()
        self._job = job
        self._emit = emit
        self._started = time.monotonic()

    def succeeded(self, group: str, op: str, nbytes: int, seconds: float, waited: float, attempts: int) -> None:
        self.registry.success(group, op, current_phase(), nbytes, seconds, waited, attempts)

    def failed(
        self,
        op_id: str,
        op: str,
        nbytes: int,
        seconds: float,
        attempts: int,
        cause: Cause | None,
        culprits: tuple[int, ...],
        agreed: bool,
        incident: Incident | None,
    ) -> None:
        with contextlib.suppress(Exception):  # counting must not turn a failed outcome into an exception
            phase, word = current_phase(), "unknown" if cause is None else cause.value
            self.registry.failure(op_id.rpartition("/")[0], op, phase, nbytes, seconds, attempts, word, culprits)
            summary = "" if incident is None else incident.summary
            self._emit(
                Failure(
                    **self.origin(), op_id=op_id, op=op, phase=phase or NO_PHASE, cause=word, culprits=culprits,
                    agreed=agreed, attempts=attempts, seconds=seconds, summary=summary,
                )
            )  # fmt: skip

    def changed(self, op_id: str, changes: Sequence[SettingChange]) -> None:
        group = short_group(op_id.rpartition("/")[0])
        for change in changes:
            self._emit(
                Change(
                    **self.origin(), group=group, op_id=op_id, name=change.name, old=change.old, new=change.new,
                    reason=change.reason,
                )
            )  # fmt: skip

    def snapshot(self, dropped: dict[str, int]) -> Snapshot:
        """Everything since the start, and what is open now."""
        exchanges = [exchange for _, exchange in hook.guarded() if exchange is not None]
        tables = [exchange.table for exchange in exchanges]
        calls = open_operations()
        return Snapshot(
            **self.origin(),
            world_size=identity.world_size(),
            uptime=time.monotonic() - self._started,
            hang=any(call.late for call in calls),
            open=calls,
            series=self.registry.snapshot(),
            stragglers=tuple(table for table in tables if table is not None),
            settings={exchange.group: exchange.settings.changed() for exchange in exchanges},
            dropped=dropped,
        )

    def origin(self) -> dict[str, Any]:
        """The fields that all records share."""
        return {
            "time": time.time(), "job": self._job, "rank": identity.rank(), "host": identity.host(), "pid": os.getpid(),
        }  # fmt: skip


def open_operations() -> tuple[OpenOperation, ...]:
    """The calls of this process that have not returned."""
    now = time.monotonic()
    found = []
    for seat, _ in hook.guarded():
        call = seat.call
        if call is not None:
            age = now - call.entered
            found.append(
                OpenOperation(
                    group=short_group(seat.key), op_id=f"{seat.key}/{call.sequence}", text=call.text, age=age,
                    limit=call.deadline - call.entered, late=age > config_of_seat(seat.key).warn_after,
                )
            )  # fmt: skip
    return tuple(found)


def short_group(key: str) -> str:
    """A seat's key without the hash of its members: "0:cpu"."""
    return key.rpartition(":")[0] or key
