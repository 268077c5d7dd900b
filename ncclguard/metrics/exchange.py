"""The exchange of statistics in one guarded group, at every so many-th operation, and the settings that follow from it.

It is part of the operation itself, between the opening round (all ranks are in the same operation) and the closing
round, which such an operation always has: a rank that completes it has the numbers of all ranks. A pure function makes
the settings of them, so that all ranks change at the same operation. The protocol agrees on the number of an operation,
so nothing else needs agreement.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ncclguard import events
from ncclguard.config import GuardConfig, current_config
from ncclguard.metrics import records, settings, statistics
from ncclguard.metrics.records import StragglerTable
from ncclguard.metrics.settings import LIMITS, SETTINGS, Settings, config_of, shown
from ncclguard.metrics.statistics import MAX_WAITS, PHASES, RankStatistics, Stragglers
from ncclguard.outcome import Outcome
from ncclguard.phases import current_phase
from ncclguard.protocol.group_key import GroupKey
from ncclguard_explain.cause import Cause

if TYPE_CHECKING:
    from ncclguard.coordination.group_state import OpenCall
from dataclasses import dataclass

from ncclguard.metrics.statistics import Combined
from ncclguard_explain.language import told

#: Share of a limit that an operation may use before the limit is raised.
NEAR = 0.5
#: A limit is not lowered below this many times the longest operation seen.
ROOM = 20.0
#: Successes of the group between two exchanges before a limit is lowered.
ENOUGH = 8
#: A change by less than this factor is not worth one.
WORTH = 1.25
#: A longer or shorter piece must change the rate by more than this to count as better or worse.
BETTER, WORSE = 1.05, 0.95
_LIMITS = {"none": "timeout", "train": "timeout_train", "eval": "timeout_eval", "small": "timeout_small"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds within which measurements may move settings; seconds and elements, equal on all ranks.

    `adjust`: whether they may move any. `names`: the settings that can change at all in this group.
    """

    adjust: bool
    timeout: tuple[float, float]
    chunk_numel: tuple[int, int]
    names: tuple[str, ...] = SETTINGS

    @classmethod
    def of(cls, config: GuardConfig, names: tuple[str, ...] = SETTINGS) -> Bounds:
        """Return the bounds that are configured."""
        return cls(
            config.adjust,
            (config.adjust_timeout_min, config.adjust_timeout_max),
            (config.adjust_chunk_min, config.adjust_chunk_max),
            names,
        )


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One setting before and after, and why; None means not set."""

    name: str
    old: float | None
    new: float | None
    reason: str


def decide(gathered: Combined, bounds: Bounds) -> tuple[Settings, tuple[SettingChange, ...]]:
    """Decide the settings of the group from now on; return them and the changes.

    The first rank's settings are where it starts from, so that a rank which missed an exchange is in step again after
    the next.
    """
    settings = gathered.first.settings
    settings, changes = _proposed(settings, gathered, bounds.names)
    if bounds.adjust:
        taken = {change.name for change in changes}
        for index, phase in enumerate(PHASES):
            if _LIMITS[phase] not in taken:
                settings, change = _limit(settings, gathered, index, bounds.timeout)
                changes += change
        if "chunk_numel" not in taken and "chunk_numel" in bounds.names:
            settings, change = _pieces(settings, gathered, bounds.chunk_numel)
            changes += change
    return settings, changes


def _proposed(
    settings: Settings, gathered: Combined, names: tuple[str, ...]
) -> tuple[Settings, tuple[SettingChange, ...]]:
    newest = gathered.newest
    if newest.proposal <= settings.proposal:
        return settings, ()
    changes = []
    proposed = [(name, value) for name, value in newest.proposed if name in names]
    for name, value in proposed:
        if settings.has(name) and settings.get(name) == value:
            continue  # a proposal contains those before it
        old = _in_force(name, settings, gathered)
        changes.append(SettingChange(name, old, value, f"set from outside, proposal {newest.proposal}"))
    settings = _with(settings, dict(proposed))
    return replace(settings, proposal=newest.proposal, rate=0.0, direction=1), tuple(changes)


def _limit(
    settings: Settings, gathered: Combined, index: int, bounds: tuple[float, float]
) -> tuple[Settings, tuple[SettingChange, ...]]:
    name = _LIMITS[PHASES[index]]
    limit, longest, expired = gathered.limits[index], gathered.longest[index], gathered.expired[index]
    if limit is None:
        return settings, ()  # by size: there is no one limit to move
    lowest, highest = bounds
    if expired:
        wanted, why = 2 * limit, f"a deadline passed {expired} times while all ranks were alive"
    elif longest > NEAR * limit:
        wanted, why = 2 * limit, f"an operation took {longest:.3g} s of {limit:g} s"
    elif 0.0 < longest * ROOM < limit and gathered.operations >= ENOUGH:
        wanted, why = max(ROOM * longest, limit / 2), f"no operation took more than {longest:.3g} s of {limit:g} s"
    else:
        return settings, ()
    wanted = min(max(wanted, lowest), highest)
    if (wanted > limit) != (expired > 0 or longest > NEAR * limit) or not _worth(limit, wanted):
        return settings, ()  # the bounds leave no room in that direction
    return _with(settings, {name: wanted}), (SettingChange(name, limit, wanted, why),)


def _pieces(
    settings: Settings, gathered: Combined, bounds: tuple[int, int]
) -> tuple[Settings, tuple[SettingChange, ...]]:
    if gathered.piece == 0:
        return settings, ()
    current = settings.get("chunk_numel") or float(gathered.piece)
    rate, before, direction = gathered.rate, settings.rate, settings.direction
    if gathered.retries:
        return _resize(replace(settings, rate=0.0), current, -1, 0, bounds, f"{gathered.retries} tries were repeated")
    if rate <= 0.0 or direction == 0:
        return settings, ()
    settings = replace(settings, rate=rate)
    why = f"large operations moved {rate / 1e9:.3g} GB/s, {before / 1e9:.3g} before"
    if before <= 0.0:
        why = f"large operations move {rate / 1e9:.3g} GB/s: looking whether another length is faster"
        return _resize(settings, current, direction, direction, bounds, why)
    if rate > before * BETTER:
        return _resize(settings, current, direction, direction, bounds, why)
    if rate < before * WORSE:  # go back, and try the other direction once
        return _resize(settings, current, -direction, -1 if direction > 0 else 0, bounds, why)
    return replace(settings, direction=0), ()


def _resize(
    settings: Settings, current: float, step: int, direction: int, bounds: tuple[int, int], why: str
) -> tuple[Settings, tuple[SettingChange, ...]]:
    """Double (`step` 1) or halve (-1) the length, and say where to look next; at a bound the search turns or ends."""
    wanted = float(int(min(max(current * 2.0**step, bounds[0]), bounds[1])))
    if not _worth(current, wanted) or (wanted > current) != (step > 0):
        return replace(settings, direction=-1 if direction > 0 else 0), ()
    settings = _with(replace(settings, direction=direction), {"chunk_numel": wanted})
    return settings, (SettingChange("chunk_numel", current, wanted, why),)


def _in_force(name: str, settings: Settings, gathered: Combined) -> float | None:
    """Return the first rank's setting: its limits are in the exchange, others are known only if changed before."""
    for index, phase in enumerate(PHASES):
        if _LIMITS[phase] == name:
            return gathered.first.limits[index]
    return settings.get(name)


def _with(settings: Settings, values: dict[str, float | None]) -> Settings:
    merged = {**dict(settings.values), **values}
    return replace(settings, values=tuple((name, merged[name]) for name in SETTINGS if name in merged))


def _worth(old: float, new: float) -> bool:
    return max(old, new) / min(old, new) >= WORTH


log = logging.getLogger("ncclguard")

#: Bytes of the smallest operation whose rate depends on the length of pieces.
LARGE = 1 << 20
_PHASES = {name: index for index, name in enumerate(PHASES)}


class Proposals:
    """The newest proposal that this process knows, made here or on other ranks; each contains those before it."""

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
        """Adopt a proposal of another rank, if it is newer."""
        with self._lock:
            if number > self.number:
                self.number, self.values = number, values

    def newest(self) -> tuple[int, tuple[tuple[str, float | None], ...]]:
        with self._lock:
            return self.number, self.values

    def forget(self) -> None:
        """Drop the proposals when the job's process group has ended."""
        with self._lock:
            self.number, self.values = 0, ()


proposals = Proposals()


def terms(config: GuardConfig) -> dict[str, object]:
    """Return the terms of an exchange, which all ranks of a guarded group must have alike; {} without an exchange."""
    if not config.exchange_every:
        return {}
    return {
        "statistics_every": config.exchange_every,
        "statistics": statistics.LAYOUT,
        "bounds": repr(Bounds.of(config)),
    }


#: Returns the results of the last inquiry of each group; its argument is the seconds that it may take.
Awaited = Callable[[float], "list[dict[str, Any]] | None"]


class Exchange(events.Listener):
    """One group's exchange on this rank: it sends this rank's numbers, and applies what follows from all ranks'.

    The caller's thread does everything; `table` and `settings` may be read by any thread. `every`: how many operations
    of the group there are for one that carries the exchange.
    """

    def __init__(
        self, key: GroupKey, config: GuardConfig, names: tuple[str, ...] = SETTINGS, awaited: Awaited | None = None
    ) -> None:
        self.every = config.exchange_every
        self.group = key.short
        #: `Monitor.awaited`, which says which ranks are awaited in any group; None where there is no monitor.
        self.awaited = awaited
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
        """The table of ranks by how late they arrive; None before the first exchange."""
        return self._stragglers.table()

    def _reset(self) -> None:
        self._longest = [0.0] * len(PHASES)
        self._expired = [0] * len(PHASES)
        self._operations = self._retries = self._piece = 0
        self._moved_bytes = self._moved_seconds = 0.0

    # ------------------------------------------------------------------ the operation that carries the exchange

    def payload(self, call: OpenCall) -> bytes:
        """Encode this rank's numbers, after the opening round."""
        self._wait(call)
        return statistics.encode(self._mine(call))

    def gathered(self, call: OpenCall, ranks: tuple[int, ...], parts: list[bytes]) -> None:
        """Keep the numbers of all ranks until the operation has succeeded, when they count."""
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
                self._waits[call.sequence % len(self._waits)] = (0, 0.0)  # a later try does not show who came last
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
            log.exception(
                "ncclguard: %s",
                told("the statistics of group {group} could not be used; the job goes on", "log", group=self.group),
            )

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
            pid=os.getpid(), host=records.host(), waits=tuple(waits),
            limits=(config.timeout, config.timeout_train, config.timeout_eval, config.timeout_small),
            longest=tuple(self._longest), expired=tuple(self._expired), operations=self._operations,
            retries=self._retries, moved_bytes=self._moved_bytes, moved_seconds=self._moved_seconds, piece=self._piece,
            proposal=number, proposed=proposed, settings=self.settings,
        )  # fmt: skip

    # ------------------------------------------------------------------ numbers of all ranks

    def _conclude(self, call: OpenCall) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is None or gathered[0] != call.sequence:
            return
        _, ranks, parts = gathered
        combined = statistics.combine(parts)
        op_id = f"{self._key}/{call.sequence}"
        self._stragglers.add(ranks, combined, op_id)
        proposals.learn(combined.newest.proposal, combined.newest.proposed)
        before = self.settings.proposal
        self.settings, changes = decide(combined, self._bounds)
        changes = tuple(map(self._with_old, changes))
        if self.settings.proposal != before:
            self.adopted_after = op_id
        settings.apply(self._process_group, self.settings, self._bounds.names)
        self._reset()
        self._report(op_id, changes, leads=ranks[0] == records.rank())

    def _with_old(self, change: SettingChange) -> SettingChange:
        """Add the old value as this rank knows it, if the exchange has none; it is for the log only."""
        config = config_of(self._process_group, current_config())  # the old one: no change is applied yet
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


def of_group(key: GroupKey, config: GuardConfig, awaited: Awaited | None = None) -> Exchange | None:
    """Make the exchange of a guarded group, which listens from now on; None for a group without one."""
    names = _names(key)
    if not (config.exchange_every and names):
        return None
    exchange = Exchange(key, config, names, awaited)
    for old in [other for other in exchanges() if other._key == exchange._key]:
        events.leave(old)
    events.listen(exchange)
    return exchange


def exchanges() -> list[Exchange]:
    """Return the exchanges of this process, in the order in which their groups were made."""
    return [listener for listener in events.listeners if isinstance(listener, Exchange)]


def _names(key: GroupKey) -> tuple[str, ...]:
    """Return the settings that a group's exchange may change; none for messages between two ranks.

    The backend's queue runs calls that were made before the calls ahead of them have ended. A length of pieces would
    change for some ranks' next call and for others' next but one, which a limit may.
    """
    if key.device not in ("cpu", "cuda") or ":" in key.queue:
        return ()
    return LIMITS if key.queue else SETTINGS


def forget() -> None:
    """Forget all exchanges and changed settings: the next process group begins with the configuration."""
    settings.adjusted.clear()
    proposals.forget()
    for exchange in exchanges():
        events.leave(exchange)
