"""The state of this rank in the agreement about collectives that the guard does not carry: one for all torch's groups.

One for all, because a rank that hangs in one group makes others wait in every group they share: only together do the
reports tell the rank that holds everybody up from those that pass the delay on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from ncclguard.cause import Cause
from ncclguard.coordination.group_state import KINDS, GroupState, OpenCall, Sightings, Summarise
from ncclguard.incident import bounds
from ncclguard.incident.stacks import program_place
from ncclguard.protocol.decision import (
    Departure,
    Issued,
    Phase,
    Report,
    TroubleKind,
    Verdict,
    Waiting,
    Watched,
)
from ncclguard.protocol.member import Member
from ncclguard.watch.judge import analyse, expired, verdict_of
from ncclguard.watch.recorder import Observation, Pending, Recorder

KEY: Final = "watch"
#: The recorder is not read again for another report before so many seconds.
FRESH: Final = 0.05


class WatchState(GroupState):
    """Reports what torch's flight recorder says; never settles anything. Works also on
    ranks that did not call `watch`.
    """

    guarded = False

    def __init__(self, key: str, rank: int, members: tuple[int, ...]) -> None:
        super().__init__(key, rank, members)
        self.member = Member(rank, members, numbered=False)  # operations are numbered by torch's groups
        self.recorder = Recorder()
        self.reading = threading.Lock()
        self.observation = Observation()
        self.broken = ""  # an exception of a broken collective that nobody caught, in words
        self._limit: Callable[[Pending], float] | None = None
        self.asked: float = 0.0  # time.monotonic() when somebody last asked who is awaited
        self.verdicts: deque[Verdict] = deque()
        self.settled = threading.Event()  # set while no verdict is awaited
        self._on_verdict: Callable[[], None] = lambda: None
        self._since: dict[tuple[str, int], float] = {}
        self._read_at = 0.0
        self.settled.set()

    # ------------------------------------------------------------------ the watcher's thread

    def observe(self, limit: Callable[[Pending], float], on_verdict: Callable[[], None]) -> None:
        """A watcher begins: the limit of each collective, in seconds, and whom to wake with a verdict."""
        self._limit, self._on_verdict = limit, on_verdict

    def observe_no_more(self) -> None:
        """The watcher ends."""
        self.wait_in(None)
        self._on_verdict = lambda: None

    def broke(self, text: str) -> None:
        """An exception of a broken collective, in words, ends the program."""
        self.broken = text

    # ------------------------------------------------------------------ what this rank sees

    def read(self) -> Observation:
        """Read the recorder again; any thread."""
        with self.reading:
            now = time.monotonic()
            if now - self._read_at < FRESH:
                return self.observation
            observation = self.recorder.observe()
            self._read_at = time.monotonic()
            pending = {(p.channel, p.sequence) for p in observation.pending}
            self._since = {key: self._since.get(key, now) for key in pending}
            self.observation = observation
            return observation

    def began(self, pending: Pending, since: float) -> None:
        """A collective is known to have been the oldest pending one since a time before it was first read."""
        with self.reading:
            key = (pending.channel, pending.sequence)
            self._since[key] = min(self._since.get(key, since), since)

    def age(self, pending: Pending) -> float:
        """Seconds for which nothing has ended before this collective, as far as it was seen."""
        now = time.monotonic()
        return now - self._since.get((pending.channel, pending.sequence), now)

    def open_calls(self) -> list[tuple[str, int, str, float]]:
        """The collectives this rank waits in, in all groups."""
        now = time.monotonic()
        return [(p.channel, p.sequence, p.text, now - self.age(p)) for p in self.observation.pending]

    def last_words(self) -> Watched:
        """What this rank has issued, so that the others know at once whether they wait for it in vain."""
        observation = self.read()
        return Watched(issued=observation.issued, recent=_recent(observation))

    # ------------------------------------------------------------------ the agreement

    def answer(self) -> Report:
        self.settled.clear()
        return self._with_evidence(super().answer())

    def glance(self) -> Report:
        self.asked = time.monotonic()
        return self._with_evidence(super().glance())

    def judge(
        self,
        generation: int,
        members: tuple[int, ...],
        reports: Mapping[int, Report],
        departed: Mapping[int, Departure],
        silent: Mapping[int, Cause],
        coordinator: int,
        summarise: Summarise,
    ) -> Verdict:
        overdue = expired(reports)
        finding = analyse(reports, departed, silent, overdue)
        verdict = verdict_of(finding, generation, members, departed=departed, expired=overdue, coordinator=coordinator)
        if verdict.cause is None:
            return verdict
        named = _Named(finding.channel or "job", self.session, self.sightings)
        incident = summarise(verdict, finding.reports, departed, silent, named)
        return replace(verdict, sides=bounds.sides(verdict.sides), incident=incident)

    def adopt(self, verdict: Verdict, donated: str | None) -> None:
        with self.condition:
            super().adopt(verdict, donated)
            self.verdicts.append(verdict)
        self.settled.set()
        self._on_verdict()

    def make_unavailable(self, why: str) -> None:
        super().make_unavailable(why)
        self._on_verdict()

    def _with_evidence(self, report: Report) -> Report:
        observation = self.read()
        waits = [_waiting(p, self.age(p)) for p in observation.pending]
        latest = observation.latest
        oldest = max(observation.pending, key=self.age, default=None)
        details: dict[str, object] = {}
        if oldest is not None:
            details |= {"call": oldest.text, "call_site": program_place(oldest.thread)}
            report = replace(report, age=self.age(oldest))
        elif latest is not None:
            details["last"] = latest.text
        if self.broken and latest is not None:
            waits = [_waiting(latest, 0.0, broken=True)]
            details["call"] = latest.text
        call = latest if self.broken else oldest
        limit = None if call is None or self._limit is None else self._limit(call)
        if limit is not None and oldest is not None:
            report = replace(report, budget=limit - (report.age or 0.0))
        if (self.broken and latest is not None) or _waits_no_longer(report):
            report = replace(report, budget=0.0)  # so that nobody waits for the answer of a rank that is busy
        watched = Watched(
            waits=tuple(waits),
            done=observation.done,
            issued=observation.issued,
            recent=_recent(observation),
            limit=limit,
        )
        phase = Phase.RUNNING if waits else Phase.NONE
        return replace(report, details=details, watched=watched, phase=phase)


def _waits_no_longer(report: Report) -> bool:
    """Whether this rank asks because another is gone for certain, so that silence of a third one is held against
    nobody; or because a limit has passed, be it torch's own, so that silence is.
    """
    return report.trouble is not None and report.trouble.kind in (TroubleKind.DEPARTED, TroubleKind.DEADLINE)


def _waiting(pending: Pending, age: float, broken: bool = False) -> Waiting:
    return Waiting(
        pending.channel, pending.ranks, pending.sequence, pending.fingerprint, pending.text, round(age, 3), broken
    )


def _recent(observation: Observation) -> tuple[Issued, ...]:
    return tuple(Issued(p.channel, p.sequence, p.fingerprint, p.text) for p in observation.recent)


class _Named:
    """What the summary needs of a state, for one of the groups behind it."""

    guarded = False

    def __init__(self, key: str, session: str, sightings: Sightings) -> None:
        self.key = key
        self.session = session
        self.sightings = sightings


def open_call(pending: Pending, age: float, limit: float) -> OpenCall:
    """The oldest pending collective as the monitor needs to see it, so that it looks often."""
    now = time.monotonic()
    return OpenCall(pending.text, now - age, now - age + limit, pending.thread, sequence=pending.sequence)


KINDS[KEY] = WatchState
