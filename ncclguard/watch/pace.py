"""Samples of what this process does: how much of its time it spends in collectives, and where it is in the rest.

torch's flight recorder has no end of a gloo collective, only counters of what was issued and what has ended. So the
watcher's thread looks at them 25 times a second, at irregular moments, and at where the main thread is. No call is
touched. The ranks' figures meet in the job's store, where one rank judges them (`ncclguard.watch.slow`).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import FrameType
from typing import Any, Final

from ncclguard.coordination.monitor import Monitor
from ncclguard.coordination.store import AgreementStore
from ncclguard.frames import thread_frames
from ncclguard.metrics import records
from ncclguard.metrics.records import SlowRanks
from ncclguard.phases import phases_of
from ncclguard.watch import slow
from ncclguard.watch.coordination import KEY
from ncclguard.watch.recorder import Recorder
from ncclguard.watch.slow import (
    COLLECTING,
    COMPUTING,
    KEPT,
    LOADING,
    SAVING,
    WAITING,
    WINDOWS,
    Doing,
    Pace,
    Told,
    judge,
)

log = logging.getLogger("ncclguard")

#: Seconds between two samples on average, between two while nothing can be seen, and of a window at least.
PERIOD: Final = 0.04
BLIND_PERIOD: Final = 1.0
WINDOW: Final = 2.5
#: A window has the time of so many of the longest pauses between two collectives in it, so of a step or more.
PAUSES: Final = 3.0
#: Collectives before the first window: what comes between them is the program's start.
BEGUN: Final = 20
#: Seconds between two records of a rank in the store for each rank of the job, so that its server has few to take.
SPACED: Final = 0.01
#: Modules in which a thread waits for collectives, or starts what does; a function that waits for a `Work` calls these.
_WAITING: Final = (
    "torch.distributed", "torch.autograd", "torch.nn.parallel",
    "ncclguard.deadlines", "ncclguard.engine", "ncclguard.process_group", "ncclguard.transport",
)  # fmt: skip
_WAITS: Final = frozenset({"wait", "wait_tensor", "synchronize"})
_KINDS: Final = {
    "torch.utils.data": LOADING,
    "torch.serialization": SAVING,
    "torch.distributed.checkpoint": SAVING,
    "safetensors": SAVING,
}
_LIBRARIES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", os.path.dirname(os.__file__))
_OWN: Final = os.path.dirname(os.path.dirname(__file__))


class Sampler:
    """`sample` is called by the watcher's thread after every `pause`; `pace` may be read by any thread.

    One that is not `wanted` never looks.
    """

    def __init__(self, recorder: Recorder, rank: int, in_guarded_call: Callable[[], bool], wanted: bool = True) -> None:
        self.pace: Pace | None = None
        self.windows = 0
        self._recorder = recorder
        self._random = random.Random()  # the program's own numbers stay as they are
        self._rank = rank
        self._in_guarded_call = in_guarded_call
        self._shares: deque[float] = deque(maxlen=KEPT)
        self._tallies: deque[_Tally] = deque(maxlen=WINDOWS)
        self._collecting_since = 0.0
        self._collected = 0.0  # seconds, all in all
        self._issued: int | None = None
        self._moved = 0.0  # when that last grew
        self._tally = _Tally(time.monotonic(), 0.0)
        self._blind = False
        self._last = time.monotonic()
        self._planned = self._last if wanted else float("inf")
        self._used = time.process_time()
        if wanted:
            gc.callbacks.append(self._note_collection)

    def close(self) -> None:
        """Look no more."""
        if self._note_collection in gc.callbacks:
            gc.callbacks.remove(self._note_collection)

    def pause(self) -> float:
        """Return the seconds until the next sample; irregular, so that no step keeps pace with it."""
        now = time.monotonic()
        if self._planned <= now:
            self._planned = now + (BLIND_PERIOD if self._blind else PERIOD) * self._random.uniform(0.5, 1.5)
        return max(self._planned - now, 0.001)

    def sample(self) -> None:
        """Look once, if it is time."""
        now, used = time.monotonic(), time.process_time()
        if now < self._planned:
            return
        late, worked = now - self._planned, used - self._used
        whole, self._last, self._used = now - self._last, now, used
        flight = self._recorder.flight()
        self._blind = flight is None
        if flight is None:  # what runs on a device is not seen from here
            self._issued = None
            return
        issued, waits = flight
        frames = thread_frames(threading.main_thread().ident or 0)
        if self._issued is None or issued < max(self._issued, BEGUN):  # the first ones, or groups were destroyed
            self._issued, self._moved = issued, now
            self._tally = _Tally(now, self._collected)
            return
        if issued > self._issued:
            self._tally.calls += issued - self._issued
            self._issued, self._moved = issued, now
        self._tally.pause = max(self._tally.pause, now - self._moved)
        doing = _doing(frames, waits or self._in_guarded_call())
        self._tally.doings[doing] += 1
        if late > PERIOD and worked > whole / 2 and doing.kind == WAITING:
            # The interpreter was held by a call that did not let it go, so this process was at work until now.
            self._tally.doings[Doing(COMPUTING, doing.place, doing.phase)] += round(late / PERIOD)
        tally, lasted = self._tally, now - self._tally.began
        if lasted >= max(WINDOW, PAUSES * tally.pause) and tally.calls:
            self._finish(now, lasted)

    def _finish(self, now: float, lasted: float) -> None:
        tally, self._tally = self._tally, _Tally(now, self._collected)
        tally.lasted, tally.collecting = lasted, self._collected - tally.collecting
        total = sum(tally.doings.values())
        self._shares.append(sum(n for doing, n in tally.doings.items() if doing.kind == WAITING) / total)
        self._tallies.append(tally)
        doings: Counter[Doing] = Counter()
        for one in self._tallies:
            doings.update(one.doings)
        shares = slow.kept_doings(doings, sum(doings.values()))
        lasted = sum(one.lasted for one in self._tallies)
        shares[Doing(COLLECTING, "")] = sum(one.collecting for one in self._tallies) / lasted
        calls = sum(one.calls for one in self._tallies) / lasted
        self.pace = Pace(self._rank, records.host(), tuple(self._shares), calls, shares)
        self.windows += 1

    def _note_collection(self, phase: str, _: dict[str, int]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._collecting_since = now
        else:
            self._collected += now - self._collecting_since


class _Tally:
    """The counts of one window."""

    def __init__(self, began: float, collected: float) -> None:
        self.began = began
        self.collecting = collected  # seconds: until its end, of all before it
        self.lasted = 0.0
        self.calls = 0
        self.pause = 0.0
        self.doings: Counter[Doing] = Counter()


def _doing(frames: Sequence[FrameType], in_flight: bool) -> Doing:
    """Return what a thread does, by its Python frames, innermost first; it waits only where it is where one waits.

    A gloo group's counters may say for a while that its last collective has not ended, because its threads end them in
    any order, and it goes by the number that ended last.
    """
    kind, place, waits = COMPUTING, "", in_flight and bool(frames) and _may_wait(frames[0])
    for frame in frames:
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if kind == COMPUTING:
            kind = next((found for name, found in _KINDS.items() if module.startswith(name)), kind)
        if not place and _of_program(file):
            place = f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
    phases = phases_of(threading.main_thread().ident or 0, time.time_ns())
    if waits and kind != LOADING:  # a loader waits for its workers
        kind = WAITING
    return Doing(kind, place, str(phases[-1]) if phases else "")


def _may_wait(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(_WAITING) or not _WAITS.isdisjoint(frame.f_code.co_names)


def _of_program(file: str) -> bool:
    return not (file.startswith(("<", _OWN)) or any(part in file for part in _LIBRARIES))


class SlowSearch:
    """Brings the ranks' figures together: `step` and `hear` are called by the monitor's thread."""

    def __init__(self, monitor: Monitor, sampler: Sampler, found: Callable[[SlowRanks | None, int], None]) -> None:
        self._monitor = monitor
        self._sampler = sampler
        self._found = found
        self._written = 0
        self._due = 0.0
        self._told = Told()

    def step(self, now: float, store: AgreementStore, participants: tuple[int, ...]) -> None:
        """Write this rank's figures where they are new; on the first rank that is there, judge those of all."""
        pace, windows = self._sampler.pace, self._sampler.windows
        if pace is None or windows == self._written or now < self._due:
            return
        gone = self._monitor.read_departures()
        ranks = [rank for rank in participants if rank not in gone]
        self._written, self._due = windows, now + SPACED * len(ranks)
        store.put(_key(pace.rank), json.dumps(pace.to_json()))
        if pace.rank == ranks[0]:
            written = store.read_many([_key(rank) for rank in ranks])
            if self._told.add(judge(Pace.of_json(json.loads(text)) for text in written.values())):
                found = None if self._told.now is None else asdict(self._told.now)
                self._monitor.post({"kind": "slow", "members": ranks, "by": pace.rank, "slow": found})

    def hear(self, entry: dict[str, Any]) -> None:
        """Take what the judging rank has told all; another one judges once that has left."""
        told = entry["slow"]
        found = told and SlowRanks(**{**told, "ranks": tuple(told["ranks"]), "hosts": tuple(told["hosts"])})
        self._told.now = found
        self._found(found, entry["by"])


def _key(rank: int) -> str:
    return f"{KEY}/pace/{rank}"
