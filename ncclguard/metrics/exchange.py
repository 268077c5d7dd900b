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

import torch

from ncclguard.config import GuardConfig, current_config
from ncclguard.metrics import hook, identity, settings, statistics
from ncclguard.metrics.adjust import Bounds, SettingChange, decide
from ncclguard.metrics.combined import combine
from ncclguard.metrics.records import StragglerTable
from ncclguard.metrics.settings import LIMITS, SETTINGS, Settings, shown
from ncclguard.metrics.statistics import MAX_WAITS, PHASES, RankStatistics
from ncclguard.metrics.stragglers import Stragglers
from ncclguard.outcome import Cause
from ncclguard.phases import current_phase
from ncclguard.transport.base import Pending

if TYPE_CHECKING:
    from ncclguard.agreement.protocol import Member
    from ncclguard.agreement.seat import OpenCall, Seat
    from ncclguard.incident.model import Incident
    from ncclguard.request import Request
    from ncclguard.transport.base import Agreement, Communicator

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


class Gathering(Pending):
    """Everybody's bytes, in the order of the group's `ranks`: with a vote where they
    fit into one, else as a collective.

    Over the host's network, also in a group on GPUs: a copy to the device would wait, without a bound, for all that is
    queued there.
    """

    def __init__(self, communicator: Communicator, mine: bytes, sequence: int) -> None:
        self.sequence = sequence
        self.ranks = communicator.ranks
        self.gathered: list[bytes] = []
        self._vote: Agreement | None = None
        self._slots: list[torch.Tensor] = []
        self._mine = torch.frombuffer(bytearray(mine), dtype=torch.uint8)  # read while it is waited for
        host = communicator.host
        if len(mine) <= host.payload_nbytes:
            self._vote = host.agree(sequence, self._mine)
            return
        self._slots = [torch.empty_like(self._mine) for _ in self.ranks]
        self._pending = host.all_gather(self._slots, self._mine)

    def wait(self, seconds: float) -> bool:
        if self._vote is not None:
            if not self._vote.wait(seconds):
                return False
            self.gathered = [self._vote.payload(index) for index in range(len(self.ranks))]
            return True
        if not self._pending.wait(seconds):
            return False
        self.gathered = [slot.numpy().tobytes() for slot in self._slots]
        return True


class Exchange:
    """One group's exchange on this rank. The caller's thread does everything; `table`
    and `settings` may be read by any thread.
    """

    def __init__(self, key: str, config: GuardConfig, names: tuple[str, ...] = SETTINGS) -> None:
        self.every = config.exchange_every
        self.group = key.rpartition(":")[0]
        self.settings = Settings()
        self.adopted_after = ""  # the operation after which the newest proposal came into force
        self._key = key
        self._process_group = key.partition(":")[0]
        self._bounds = Bounds.of(config, names)
        self._stragglers = Stragglers(self.group)
        self._waits: list[tuple[int, float]] = [(0, 0.0)] * min(self.every, MAX_WAITS)
        self._gathering: Gathering | None = None
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

    # ------------------------------------------------------------------ called by the guard, on every operation

    def entered(self, member: Member, call: OpenCall) -> None:
        """The call has its number, under the seat's lock: if it is one that carries the
        exchange, it has a closing round.
        """
        operation = member.operation
        if operation is not None and operation.sequence % self.every == 0:
            call.exchange = True
            member.operation = replace(operation, closing=True)

    def gather(self, communicator: Communicator, call: OpenCall) -> Pending:
        """Start to gather everybody's numbers; the opening round has passed."""
        self._wait(call)
        self._gathering = Gathering(communicator, statistics.encode(self._mine(call)), call.sequence)
        return self._gathering

    def completed(self, request: Request, call: OpenCall, attempts: int, chunks: int, seconds: float) -> None:
        """A success of this group; never raises."""
        try:
            if attempts > 1:
                self._retries += attempts - 1
                self._waits[call.sequence % len(self._waits)] = (0, 0.0)  # of a later try: not who came last
            elif not call.exchange:
                self._wait(call)
            self._operations += 1
            phase = _PHASES[current_phase() or "none"]
            self._longest[phase] = max(self._longest[phase], seconds)
            if request.nbytes >= LARGE and chunks and request.op in ("all_reduce", "broadcast"):
                self._moved_bytes += request.nbytes
                self._moved_seconds += seconds - max(0.0, call.opened - call.entered)
                self._piece = max(self._piece, -(-request.numel // chunks))
            if call.exchange:
                self._conclude(call)
        except Exception:
            log.exception("ncclguard: the statistics of group %s could not be used; the job goes on", self.group)

    def failed(self, agreed: bool, cause: Cause | None, incident: Incident | None) -> None:
        """A failure of this group; only agreed ones count, so that all ranks count the same."""
        if agreed and cause in (Cause.LATE, Cause.NETWORK) and incident is not None and incident.deadline_expired:
            self._expired[_PHASES[current_phase() or "none"]] += 1

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
        gathering, self._gathering = self._gathering, None
        if gathering is None or gathering.sequence != call.sequence:
            return
        ranks = gathering.ranks
        everybody = combine(gathering.gathered)
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
        observer = hook.observer
        if observer is not None and changes:
            observer.changed(op_id, changes)


def config_of(process_group: str, config: GuardConfig) -> GuardConfig:
    """The configuration that calls on a process group have."""
    changed = settings.adjusted.get(process_group)
    return config if changed is None else changed.over(config)


def config_of_seat(key: str) -> GuardConfig:
    """The configuration that calls of a guard have now, by its key."""
    return config_of(key.partition(":")[0], current_config())


def start(seat: Seat, config: GuardConfig) -> None:
    """A guard is made for this seat: give it an exchange, if there is to be one, and let the monitoring see it."""
    names = _names(seat.key)
    exchange = Exchange(seat.key, config, names) if config.exchange_every and names else None
    seat.exchange = exchange
    hook.register(seat, exchange)


def _names(key: str) -> tuple[str, ...]:
    """The settings that a guard's exchange may change, by its key:
    `group:device[:lane]:members`; none for a lane of two ranks.

    A lane runs calls that were made before the calls ahead of them have ended. A length of pieces would change for some
    ranks' next call and for others' next but one, which a limit may.
    """
    device, *lane = key.split(":")[1:-1] or [""]
    if device not in ("cpu", "cuda") or len(lane) > 1:
        return ()
    return LIMITS if lane else SETTINGS


def forget() -> None:
    """The process group has ended: the next one begins with the configuration."""
    settings.adjusted.clear()
    proposals.forget()
