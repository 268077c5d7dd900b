"""The comparison of what the ranks have called, although nothing stands still: it may have ended, with wrong values.

NCCL ends collectives of different sizes, and gloo those of dtypes with as many bytes. Now and then the first rank asks:
then each reads torch's flight recorder once, the first rank of each group writes down what it has called last, and the
others compare theirs with that. Where they differ, all ranks are asked about that one call, and agree on who is odd.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ncclguard import torch_compat
from ncclguard.coordination.monitor import Monitor
from ncclguard.coordination.store import AgreementStore, HighWaterMarks
from ncclguard.protocol import codec
from ncclguard.protocol.decision import TroubleKind
from ncclguard.watch.coordination import KEY, WatchState
from ncclguard.watch.recorder import Calls
from ncclguard_explain.language import tr

#: Seconds between two comparisons, at first and at most; each time twice as many, where something was called since.
FIRST: Final = 1.0
LONGEST: Final = 60.0
#: A reading may take this part of the time, at most.
SHARE: Final = 0.001
#: Collectives of a group that its first rank writes down, the last ones. The ranks read at slightly different moments.
LAST: Final = 512
#: Seconds between two looks for what a first rank writes, and those after which it is looked for no more.
AGAIN: Final = 0.5
WITHIN: Final = 10.0
#: Seconds for which a rank keeps what it has read: until it is asked about, the recorder may have forgotten it.
KEPT: Final = 30.0
#: Differences of a group that are asked about although the answers to the earlier ones showed none.
TRIES: Final = 3

_COMPARE: Final = "compare"
_DIFFERS: Final = "differs"


@dataclass(slots=True)
class _Reading:
    """The calls of this rank for the comparison of this `number`; `open`: the channels that are not compared yet."""

    number: int
    calls: dict[str, Calls]
    open: set[str]
    since: float
    due: float


class Comparison:
    """`read` is called by the watcher's thread, all else by the monitor's.

    `moved` counts calls, and `concerns` tells by the name of a channel whether it is watched.
    """

    def __init__(
        self,
        monitor: Monitor,
        state: WatchState,
        moved: Callable[[], int],
        concerns: Callable[[str], bool],
        ask: Callable[[TroubleKind, str], None],
        wake: Callable[[], None],
    ) -> None:
        self._monitor, self._state, self._moved, self._concerns = monitor, state, moved, concerns
        self._ask, self._wake = ask, wake
        self._marks = HighWaterMarks()
        self._compared = 0  # what `moved` said when calls were last compared
        self._interval = FIRST
        self._due = time.monotonic() + FIRST
        self._wanted = self._begun = 0  # numbers of comparisons: the last asked for, and the last read for
        self._took = 0.0  # seconds of the last reading
        self._reading: _Reading | None = None  # the last one, for a while
        self._known: set[str] = set()  # channels of which it is known that they differ
        self._told: Counter[str] = Counter()  # channels that were asked about, and how often

    @property
    def hearers(self) -> dict[str, Callable[[dict[str, Any]], None]]:
        """The functions that take entries of the job's log, by kind."""
        return {_COMPARE: self._hear_compare, _DIFFERS: self._hear_differs}

    def read(self) -> None:
        """Read the recorder, where that is asked for."""
        wanted = self._wanted
        if wanted == self._begun or torch_compat.under_detail():  # the recorder mixes the groups up there
            return
        began = time.thread_time()
        calls = {channel: one for channel, one in self._state.calls().items() if self._concerns(channel)}
        self._begun, self._took = wanted, time.thread_time() - began
        now = time.monotonic()
        self._reading = _Reading(wanted, calls, {*calls}, now, now + AGAIN)
        self._monitor.wake()

    def step(self, now: float, store: AgreementStore) -> None:
        """Ask where it is time, write what this rank has called, and compare with what the others have."""
        if now >= self._due:
            self._ask_all(now)
        while self._state.unproved:
            channel = self._state.unproved.pop()
            if self._told[channel] < TRIES:
                self._known.discard(channel)
        reading = self._reading
        if reading is None:
            return
        if now - reading.since > KEPT and self._reading is reading:
            self._reading = None
        for channel in sorted(reading.open):
            calls = reading.calls[channel]
            if calls.ranks[0] == self._monitor.rank:
                store.put(_key(channel, calls), _written(reading.number, calls))
                reading.open.discard(channel)
        if reading.open and reading.due <= now < reading.since + WITHIN:
            reading.due = now + AGAIN
            self._compare(reading, store)

    def _ask_all(self, now: float) -> None:
        self._due = now + FIRST
        moved = self._moved()
        if moved == self._compared or self._state.member.frozen:
            return
        gone = self._monitor.read_departures()
        ranks = [rank for rank in self._state.member.participants if rank not in gone]
        self._compared = moved
        self._due = now + max(self._interval, self._took / SHARE)
        self._interval = min(2 * self._interval, LONGEST)
        if ranks[:1] == [self._monitor.rank]:
            self._monitor.post({"kind": _COMPARE, "members": ranks, "number": self._wanted + 1})

    def _compare(self, reading: _Reading, store: AgreementStore) -> None:
        keys = {_key(channel, reading.calls[channel]): channel for channel in sorted(reading.open)}
        for key, text in store.read_many(list(keys)).items():
            number, ranks, first, marks = json.loads(text)
            channel = keys[key]
            calls = reading.calls[channel]
            if number != reading.number:
                continue
            reading.open.discard(channel)
            different = _first_different(calls, first, marks) if codec.ranks_of(ranks) == calls.ranks else None
            if different is not None and channel not in self._known:
                place = (self._state.member.generation, number)
                own = self._monitor.rank
                if self._marks.enter(store, f"{key}/{_DIFFERS}", place, [own]) == [own]:
                    entry = {"channel": channel, "sequence": different, "by": own}
                    self._monitor.post({"kind": _DIFFERS, "members": list(calls.ranks), **entry})

    def _hear_compare(self, entry: Mapping[str, Any]) -> None:
        self._wanted = int(entry["number"])
        self._wake()

    def _hear_differs(self, entry: Mapping[str, Any]) -> None:
        """Be ready to say what this rank called there; who found it asks, behind this in the job's log."""
        channel, sequence = str(entry["channel"]), int(entry["sequence"])
        self._known.add(channel)
        self._told[channel] += 1
        calls = None if self._reading is None else self._reading.calls.get(channel)
        self._state.differing = channel, None if calls is None else calls.pending(sequence)
        if entry["by"] == self._monitor.rank:
            text = tr(
                "collective {number} of group {group} is not the same on all ranks", number=sequence, group=channel
            )
            self._ask(TroubleKind.MISMATCH, text)


def _key(channel: str, calls: Calls) -> str:
    """Return the key of the first rank's entry; groups of equal name may have different members."""
    return f"{KEY}/calls/{channel}/{calls.ranks[0]}"


def _written(number: int, calls: Calls) -> str:
    """The last calls of a group, 16 bits of each fingerprint."""
    first = max(1, calls.last - LAST + 1)
    marks = [_mark(calls, sequence) for sequence in range(first, calls.last + 1)]
    return json.dumps([number, codec.ranges(calls.ranks), first, "".join(marks)])


def _mark(calls: Calls, sequence: int) -> str:
    return f"{calls.fingerprint(sequence) & 0xFFFF:04x}"


def _first_different(calls: Calls, first: int, marks: str) -> int | None:
    """Return the lowest number under which both have called something, and not the same."""
    unknown = f"{0:04x}"
    for sequence in range(first, first + len(marks) // 4):
        at = 4 * (sequence - first)
        own, other = _mark(calls, sequence), marks[at : at + 4]
        if own != other and unknown not in (own, other):
            return sequence
    return None
