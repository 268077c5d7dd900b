"""The exchange of statistics in one guarded group: every so many-th operation carries it, on all ranks alike.

It rides in the operation itself, between the opening round (all ranks are in the same operation) and the closing round,
which such an operation always has: whoever completes it has everybody's numbers. What follows from them is a pure
function, so that all ranks change at the same operation. The number of an operation is agreed by the protocol, so
nothing else needs to be.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ncclguard import events
from ncclguard.cause import Cause
from ncclguard.config import GuardConfig, current_config
from ncclguard.metrics import identity, settings, statistics
from ncclguard.metrics.adjust import Bounds, SettingChange, decide
from ncclguard.metrics.records import StragglerTable
from ncclguard.metrics.settings import LIMITS, SETTINGS, Settings, config_of, shown
from ncclguard.metrics.statistics import MAX_WAITS, PHASES, RankStatistics
from ncclguard.metrics.stragglers import Stragglers
from ncclguard.outcome import Outcome
from ncclguard.phases import current_phase
from ncclguard.protocol.group_key import GroupKey

if TYPE_CHECKING:
    from ncclguard.coordination.group_state import OpenCall

log = logging.getLogger("ncclguard")

#: Bytes from which an operation says something about the length of pieces.
LARGE = 1 << 20
_PHASES = {name: index for index, name in enumerate(PHASES)}


class Proposals:
    """The newest proposal this process has heard of, from outside or from other ranks;
    each contains those before it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.number = 0
        self.values: tuple[tuple[str, float | None], ...] = ()

    def make(self, values: Mapping[str, float | None]) -> int:
        """Propose settings to all groups of this process and return the proposal's number."""
        with self._lock:
            merged = {**dict(self.values), **values}
            self.values = tuple((name, merged[name]) for name in SETTINGS if name in merged)
            self.number = max(self.number + 1, int(time.time() * 1e3))
            return self.number

    def learn(self, number: int, values: tuple[tuple[str, float | None], ...]) -> None:
        """Another rank knows this one."""
        with self._lock:
            if number > self.number:
                self.number, self.values = number, values

    def newest(self) -> tuple[int, tuple[tuple[str, float | None], ...]]:
        with self._lock:
            return self.number, self.values

    def forget(self) -> None:
        """The job's process group has ended."""
        with self._lock:
            self.number, self.values = 0, ()


proposals = Proposals()


def terms(config: GuardConfig) -> dict[str, object]:
    """What must be equal on all ranks for a guarded group with an exchange; nothing where there is none."""
    if not config.exchange_every:
        return {}
    return {
        "statistics_every": config.exchange_every,
        "statistics": statistics.LAYOUT,
        "bounds": repr(Bounds.of(config)),
    }


class Exchange(events.Listener):
    """One group's exchange on this rank: what it says, and what follows from what all have said.

    The caller's thread does everything; `table` and `settings` may be read by any thread. `every`: how many operations
    of the group there are for one that carries the exchange.
    """

    def __init__(self, key: GroupKey, config: GuardConfig, names: tuple[str, ...] = SETTINGS) -> None:
        self.every = config.exchange_every
        self.group = key.short
        self.settings = Settings()
        self.adopted_after = ""  # the operation after which the newest proposal came into force
        self._key = str(key)
        self._process_group = key.process_group
        self._bounds = Bounds.of(config, names)
        self._stragglers = Stragglers(self.group)
        self._waits: list[tuple[int, float]] = [(0, 0.0)] * min(self.every, MAX_WAITS)
        self._gathered: tuple[int, tuple[int, ...], list[bytes]] | None = None
        self._reset()

    @property
    def table(self) -> StragglerTable | None:
        """Who comes last; None before the first exchange."""
        return self._stragglers.table()

    def _reset(self) -> None:
        self._longest = [0.0] * len(PHASES)
        self._expired = [0] * len(PHASES)
        self._operations = self._retries = self._piece = 0
        self._moved_bytes = self._moved_seconds = 0.0

    # ------------------------------------------------------------------ the operation that carries the exchange

    def payload(self, call: OpenCall) -> bytes:
        """This rank's numbers; the opening round has passed."""
        self._wait(call)
        return statistics.encode(self._mine(call))

    def gathered(self, call: OpenCall, ranks: tuple[int, ...], parts: list[bytes]) -> None:
        """Everybody's numbers, which count once the operation has succeeded."""
        self._gathered = call.sequence, ranks, parts

    # ------------------------------------------------------------------ every operation

    def call_ended(self, group: str, call: OpenCall, outcome: Outcome | None) -> None:
        if group == self._key and outcome is not None:
            if outcome.cause is None:
                self._succeeded(call, outcome)
            else:
                self.call_refused(group, outcome)

    def call_refused(self, group: str, outcome: Outcome) -> None:
        incident = outcome.incident
        # Only agreed failures count, so that all ranks count the same.
        if group != self._key or not outcome.agreed or incident is None or not incident.deadline_expired:
            return
        if outcome.cause in (Cause.LATE, Cause.NETWORK):
            self._expired[_PHASES[current_phase() or "none"]] += 1

    def _succeeded(self, call: OpenCall, outcome: Outcome) -> None:
        try:
            if outcome.attempts > 1:
                self._retries += outcome.attempts - 1
                self._waits[call.sequence % len(self._waits)] = (0, 0.0)  # of a later try: not who came last
            elif not call.exchange:
                self._wait(call)
            self._operations += 1
            phase = _PHASES[current_phase() or "none"]
            self._longest[phase] = max(self._longest[phase], outcome.seconds)
            if outcome.nbytes >= LARGE and outcome.chunks and outcome.op in ("all_reduce", "broadcast"):
                self._moved_bytes += outcome.nbytes
                self._moved_seconds += outcome.seconds - max(0.0, call.opened - call.entered)
                self._piece = max(self._piece, -(-outcome.numel // outcome.chunks))
            if call.exchange:
                self._conclude(call)
        except Exception:
            log.exception("ncclguard: the statistics of group %s could not be used; the job goes on", self.group)

    # ------------------------------------------------------------------ numbers of this rank

    def _wait(self, call: OpenCall) -> None:
        if call.opened > 0.0:
            self._waits[call.sequence % len(self._waits)] = (call.sequence, call.opened - call.entered)

    def _mine(self, call: OpenCall) -> RankStatistics:
        config = config_of(self._process_group, current_config())
        number, proposed = proposals.newest()
        length = len(self._waits)
        waits = []
        for sequence in range(call.sequence - length + 1, call.sequence + 1):
            of, wait = self._waits[sequence % length]
            waits.append(wait if of == sequence and sequence > 0 else -1.0)
        return RankStatistics(
            pid=os.getpid(), host=identity.host(), waits=tuple(waits),
            limits=(config.timeout, config.timeout_train, config.timeout_eval, config.timeout_small),
            longest=tuple(self._longest), expired=tuple(self._expired), operations=self._operations,
            retries=self._retries, moved_bytes=self._moved_bytes, moved_seconds=self._moved_seconds, piece=self._piece,
            proposal=number, proposed=proposed, settings=self.settings,
        )  # fmt: skip

    # ------------------------------------------------------------------ everybody's

    def _conclude(self, call: OpenCall) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is None or gathered[0] != call.sequence:
            return
        _, ranks, parts = gathered
        everybody = statistics.combine(parts)
        op_id = f"{self._key}/{call.sequence}"
        self._stragglers.add(ranks, everybody, op_id)
        proposals.learn(everybody.newest.proposal, everybody.newest.proposed)
        before = self.settings.proposal
        self.settings, changes = decide(everybody, self._bounds)
        changes = tuple(map(self._with_old, changes))
        if self.settings.proposal != before:
            self.adopted_after = op_id
        settings.apply(self._process_group, self.settings, self._bounds.names)
        self._reset()
        self._report(op_id, changes, leads=ranks[0] == identity.rank())

    def _with_old(self, change: SettingChange) -> SettingChange:
        """What is not in the exchange, this rank knows of itself: for people, nothing is decided by it."""
        config = config_of(self._process_group, current_config())  # of before: nothing is applied yet
        return change if change.old is not None else replace(change, old=getattr(config, change.name))

    def _report(self, op_id: str, changes: tuple[SettingChange, ...], leads: bool) -> None:
        for change in changes:
            log.log(
                logging.WARNING if leads else logging.DEBUG,
                "ncclguard: after operation %s, %s is %s on all ranks, was %s: %s",
                op_id, change.name, shown(change.new), shown(change.old), change.reason,
            )  # fmt: skip
        if changes:
            for listener in events.listeners:
                listener.settings_changed(op_id, changes)


def of_group(key: GroupKey, config: GuardConfig) -> Exchange | None:
    """The exchange of a guarded group that is being made, which listens from now on; None where there is to be none."""
    names = _names(key)
    if not (config.exchange_every and names):
        return None
    exchange = Exchange(key, config, names)
    for old in [one for one in exchanges() if one._key == exchange._key]:
        events.leave(old)
    events.listen(exchange)
    return exchange


def exchanges() -> list[Exchange]:
    """The exchanges of this process, in the order in which their groups were made."""
    return [listener for listener in events.listeners if isinstance(listener, Exchange)]


def _names(key: GroupKey) -> tuple[str, ...]:
    """The settings that a group's exchange may change; none for messages between two ranks.

    The backend's queue runs calls that were made before the calls ahead of them have ended. A length of pieces would
    change for some ranks' next call and for others' next but one, which a limit may.
    """
    if key.device not in ("cpu", "cuda") or ":" in key.queue:
        return ()
    return LIMITS if key.queue else SETTINGS


def forget() -> None:
    """The process group has ended: the next one begins with the configuration."""
    settings.adjusted.clear()
    proposals.forget()
    for exchange in exchanges():
        events.leave(exchange)
