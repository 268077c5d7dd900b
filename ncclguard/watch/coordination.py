"""The monitor's side of `watch`: this rank's state in the agreement on torch's collectives, and all that needs a store.

One for all, because a rank that hangs in one group makes others wait in every group they share: only together do the
reports tell the rank that holds everybody up from those that pass the delay on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ncclguard import torch_compat
from ncclguard.coordination.group_state import KINDS, GroupState, OpenCall, Subject, Summarise
from ncclguard.coordination.incidents import ISSUERS, NOBODY_WAITS, summarise
from ncclguard.coordination.inquiry import ALL_ENTERED, Question, not_answering, not_come
from ncclguard.coordination.liveness import silent_cause
from ncclguard.coordination.monitor import Monitor
from ncclguard.coordination.store import AgreementStore, HighWaterMarks
from ncclguard.engine.description import CALLER
from ncclguard.incident import model
from ncclguard.incident.model import Incident
from ncclguard.incident.stacks import call_site_of, place_of, programs_thread, recorded_line, recorded_stack
from ncclguard.protocol.codec import ranges
from ncclguard.protocol.decision import (
    TELLING_AFTER,
    Departure,
    Issued,
    Phase,
    Report,
    Silent,
    TroubleKind,
    Verdict,
    Waiting,
    Watched,
    elsewhere_long_enough,
    is_interrupt,
)
from ncclguard.protocol.member import Member
from ncclguard.watch.judge import (
    CALLED,
    COMPARES,
    MESSAGE,
    PLACES,
    STARTED,
    analyse,
    expired,
    has_issued,
    is_consequence,
    verdict_of,
)
from ncclguard.watch.recorder import FEWEST_LAST, LAST_CALLS, MOST_LAST, Calls, Observation, Pending, Recorder
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import joined, received, told, tr
from ncclguard_explain.ranks import SHOWN_GROUPS, ranks_text

KEY: Final = "watch"
#: The recorder is not read again for another report before so many seconds.
FRESH: Final = 0.05


class WatchState(GroupState):
    """The state that reports what torch's flight recorder says, also where `watch` was not called; settles nothing."""

    guarded = False

    def __init__(self, key: str, rank: int, members: tuple[int, ...]) -> None:
        super().__init__(key, rank, members)
        self.member = Member(rank, members, numbered=False)  # operations are numbered by torch's groups
        self.recorder = Recorder()
        self.reading = threading.Lock()
        self.observation = Observation()
        self.broken = ""  # an exception of a broken collective that nobody caught, in words
        #: The channel of a call that the ranks are asked about, and this rank's, where it is known.
        self.differing: tuple[str, Pending | None] | None = None
        self.unproved: set[str] = set()  # channels that they were asked about, and the answers showed no difference
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

    def calls(self) -> dict[str, Calls]:
        """Read what each group has called, as far as the recorder remembers; any thread."""
        with self.reading:
            return self.recorder.calls()

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
        """Return what this rank has issued, so that the others know at once whether they wait for it in vain."""
        observation = self.read()
        return Watched(done=observation.done, issued=observation.issued, recent=_recent(observation))

    def last_calls(self) -> Report | None:
        """Return what this rank has called last in each group, where that is watched."""
        if self._limit is None or torch_compat.under_detail():  # the recorder mixes the groups up there
            return None
        most = min(max(LAST_CALLS // len(self.member.members), FEWEST_LAST), MOST_LAST)
        calls = [call for one in self.calls().values() for call in one.latest(most)]
        last = sorted(calls, key=lambda call: call.issued)[-most:]
        called = any(self.read().issued.values()) or self.recorder.has_recorded()
        details = {COMPARES: True, PLACES: self._places(last), CALLED: called}
        said = Watched(compared=tuple(_waiting(call, 0.0) for call in last))
        return Report(self.member.rank, self.member.generation, watched=said, details=details)

    def _made_at(self, call: Pending) -> dict[str, object]:
        """Return the stack in which a call was made, as torch has recorded it, or none: the present one is of later."""
        with self.reading:
            entry = self.recorder.stacks().get(call.channel, {}).get(call.sequence, {})
        if not entry.get("frames"):
            return {"stack": [], "threads": []}
        place, stack = recorded_stack(entry["frames"])
        main = int(entry.get("thread_id") or 0) in (0, threading.main_thread().ident)
        thread = "" if main else str(entry.get("thread_name", ""))
        return {"call_site": place, "stack": list(stack), "thread": thread, "threads": []}

    def _places(self, calls: Sequence[Pending]) -> dict[str, dict[str, str]]:
        """Return by channel and line of the program the numbers of the calls that it has made."""
        found: dict[str, dict[str, list[int]]] = {}
        with self.reading:
            stacks = self.recorder.stacks()
        for call in calls:
            frames = stacks.get(call.channel, {}).get(call.sequence, {}).get("frames")
            if frames:
                found.setdefault(call.channel, {}).setdefault(recorded_line(frames), []).append(call.sequence)
        return {channel: {place: ranges(n) for place, n in places.items()} for channel, places in found.items()}

    def torchs_own(self) -> Watched:
        """Return also what this rank waits in, each since it was issued."""
        observation = self.read()
        waits = [_waiting(p, max(self.age(p), _since_issued(p))) for p in observation.pending]
        return Watched(waits=tuple(waits), issued=observation.issued)

    # ------------------------------------------------------------------ the agreement

    def answer(self) -> Report:
        self.settled.clear()
        report = self._with_evidence(super().answer())
        if self.differing is None or report.watched is None:
            return report
        called = self.differing[1]
        compared = () if called is None else (_waiting(called, 0.0),)
        details = {**report.details, COMPARES: True, **({} if called is None else self._made_at(called))}
        return replace(report, watched=replace(report.watched, compared=compared), details=details)

    def glance(self) -> Report:
        self.asked = time.monotonic()
        return self._with_evidence(super().glance())

    def judge(
        self,
        generation: int,
        members: tuple[int, ...],
        reports: Mapping[int, Report],
        departed: Mapping[int, Departure],
        silent: Silent,
        coordinator: int,
        summarise: Summarise,
    ) -> Verdict:
        overdue = expired(reports)
        finding = analyse(reports, departed, silent, overdue)
        verdict = verdict_of(finding, generation, members, departed=departed, expired=overdue, coordinator=coordinator)
        if verdict.cause is None:
            return verdict
        named = _Named(finding.channel or NOBODY_WAITS, self)
        incident = summarise(verdict, finding.reports, departed, silent, named)
        return replace(verdict, sides=model.sides(verdict.sides), incident=incident)

    def judge_last_calls(self, reports: Mapping[int, Report]) -> str:
        """Return the incident, as JSON, where the last calls of ranks that have left are not the same; else ""."""
        own = self.member
        return self.judge(own.generation, own.participants, reports, {}, {}, own.rank, summarise).incident

    def adopt(self, verdict: Verdict, donated: str | None) -> None:
        with self.condition:
            super().adopt(verdict, donated)
            self.verdicts.append(verdict)
        if self.differing is not None and verdict.cause is None:
            self.unproved.add(self.differing[0])
        self.differing = None
        self.settled.set()
        self._on_verdict()

    def make_unavailable(self, why: str) -> None:
        super().make_unavailable(why)
        self._on_verdict()

    def _with_evidence(self, report: Report) -> Report:
        observation = self.read()
        # What this rank has just read first may have stood for as long as tells where a rank is.
        waits = [_waiting(p, max(self.age(p), min(_since_issued(p), TELLING_AFTER))) for p in observation.pending]
        latest = observation.latest
        oldest = max(observation.pending, key=self.age, default=None)
        details: dict[str, object] = {}
        if oldest is not None:
            details |= {"call": oldest.text, "call_site": call_site_of(oldest.thread)}
            details[STARTED] = [p.channel for p in observation.pending if p.started]
            report = replace(report, age=self.age(oldest))
        elif latest is not None:
            details |= {"last": latest.text, CALLER: latest.thread}
        threads = observation.threads.items()
        details[ISSUERS] = {channel: name for channel, one in threads if (name := programs_thread(one))}
        if observation.message:
            details[MESSAGE] = observation.message
        if self.broken and latest is not None:
            waits = [_waiting(latest, _since_issued(latest), broken=True)]
            details |= {"call": latest.text, "call_site": place_of(self.broken)}
        call = latest if self.broken else oldest
        limit = torch_compat.limit_passed(self.broken)  # shorter than ours, and what the verdict is about
        if limit is None and call is not None and self._limit is not None:
            limit = self._limit(call)
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
    """Return whether this rank asks because another is gone, or because a limit has passed.

    If another is gone for certain, silence of a third one is held against nobody; if a limit has passed, be it
    torch's own, it is.
    """
    return report.trouble is not None and report.trouble.kind in (TroubleKind.DEPARTED, TroubleKind.DEADLINE)


def _waiting(pending: Pending, age: float, broken: bool = False) -> Waiting:
    return Waiting(
        pending.channel, pending.ranks, pending.sequence, pending.fingerprint, pending.text, round(age, 3), broken
    )


def _since_issued(pending: Pending) -> float:
    return (time.time_ns() - pending.issued) / 1e9 if pending.issued else 0.0


def _recent(observation: Observation) -> tuple[Issued, ...]:
    return tuple(
        Issued(p.channel, p.sequence, p.fingerprint, p.text, round(_since_issued(p), 3) if p.issued else None)
        for p in observation.recent
    )


class _Named:
    """The parts of a state that the summary needs, for one of the groups behind it."""

    guarded = False
    outside = False

    def __init__(self, key: str, state: Subject) -> None:
        self.key = key
        self.session = state.session
        self.sightings = state.sightings
        self.decided_after = state.decided_after
        self.hosts = state.hosts


def open_call(pending: Pending, age: float, limit: float) -> OpenCall:
    """The oldest pending collective as the monitor needs to see it, so that it looks often."""
    now = time.monotonic()
    return OpenCall(pending.text, now - age, now - age + limit, pending.thread, sequence=pending.sequence)


KINDS[KEY] = WatchState


log = logging.getLogger("ncclguard")

#: Seconds a rank that left without saying what it issued is not held to account: that may still be on its way.
LEFT_GRACE = 0.5
#: The same for one that had issued what is awaited.
ISSUED_GRACE = 5.0
_GONE = (Cause.LOST, Cause.FAILED, Cause.EXITED)  # causes of ranks that will not come any more
_WAITING = "running"  # the state, in an incident, of a rank that is in the collective
#: How the evidence reads of a process that was ended by abort(3).
ABORTED = "killed by SIGABRT"
#: Seconds after a process ended without a goodbye at which that is an incident although nobody waits in a collective.
LOST_GRACE = 0.7
#: The same of one that a guarded call of this rank waits for.
GUARDED_GRACE = 5.0
#: Collectives before the one it waits in that a rank compares with what the others called.
COMPARED = 2
#: Collectives of a group whose callers are kept in the store, each in a key of its own until a later one needs it.
KEPT_OPEN = 4
#: Seconds after which a process that ended is spoken of although the monitor has not come to it: the store blocks.
SPEAK_AFTER = 1.0


@dataclass(kw_only=True)
class _Question(Question):
    pending: Pending


class WatchCoordination:
    """`step` is called by the monitor; `process_ended`, `overdue` and `waiting` belong to the watcher's thread.

    Once some rank of the job has left or died, `hurried` is set and `hurry` called: from then on a stop is soon
    suspect. ``last`` is to be the last incident, ``given_up`` the channels in which torch's own limit has passed here.
    """

    def __init__(
        self,
        monitor: Monitor,
        state: WatchState,
        rank: int,
        warn_after: float,
        ask: Callable[[TroubleKind, str], None],
        hurry: Callable[[], None],
    ) -> None:
        self.waiting: tuple[Pending, ...] = ()
        self.hurried = False
        self.last: Incident | None = None
        self.given_up: set[str] = set()
        self._monitor = monitor
        self._state = state
        self._rank = rank
        self._warn_after = warn_after
        self._ask = ask
        self._hurry = hurry
        self._lock = threading.Lock()
        self._ended: dict[int, tuple[str, float]] = {}  # as seen here: evidence, when; until the monitor has come to it
        self._known: dict[int, float] = {}  # departed rank -> when this rank heard of it
        self._handled: set[int] = set()
        self._looked = 0.0
        self._marks = HighWaterMarks()
        self._published: dict[str, tuple[int, int]] = {}  # key -> generation and number of what was written there last
        self._warned: dict[str, tuple[int, float]] = {}  # channel -> number of the collective last warned of, its age
        self._question: _Question | None = None
        #: The last answer to this rank's question who is awaited: in what, after how many seconds, and in words.
        self.answered: tuple[Pending, float, list[str]] | None = None
        self._asked = 0

    # ------------------------------------------------------------------ the watcher's thread

    def process_ended(self, rank: int, evidence: str) -> None:
        """A peer's process on this host has ended; whether it said goodbye, the store knows."""
        with self._lock:
            self._ended[rank] = (evidence, time.monotonic())
        self._monitor.wake()

    def left_well(self, rank: int) -> bool:
        """Return whether a rank of this host has ended as it should, and nothing here waits for it."""
        return self._monitor.left(rank) is not None and not any(rank in pending.ranks for pending in self.waiting)

    def somebody_is_gone(self) -> bool:
        """Return whether a rank of this host has ended without a word, and has no verdict yet; any thread."""
        participants, neighbours = self._state.member.participants, self._monitor.neighbours
        here = [peer.rank for peer in neighbours.here if peer.rank in participants]
        return any(neighbours.gone(rank) and self._monitor.left(rank) is None for rank in here)

    def delivered(self) -> None:
        """A verdict has been delivered, which may have taken long: the monitor comes first to what was put off."""
        with self._lock:
            self._ended = {rank: (evidence, time.monotonic()) for rank, (evidence, _) in self._ended.items()}
        self._monitor.wake()

    def overdue(self, now: float) -> None:
        """Speak of an ended process by oneself, where the monitor does not: the store does not answer then."""
        if self._state.verdicts:  # it may have ended because of that, and the next is asked about after its delivery
            return
        with self._lock:
            left = {
                rank: evidence
                for rank, (evidence, seen) in self._ended.items()
                if self._monitor.unavailable or now - seen > self._grace(rank, SPEAK_AFTER)
            }
            for rank in left:
                del self._ended[rank]
        for rank, evidence in left.items():
            if self.left_well(rank):
                continue
            self._lost(rank, evidence)
            if self._follows(rank, evidence):
                continue
            self._ask(TroubleKind.DEPARTED, f"rank {rank} lost: {evidence}")

    # ------------------------------------------------------------------ the monitor's thread

    def step(self, now: float, store: AgreementStore) -> None:
        """Do what can be done without waiting."""
        if self._monitor.departures_begun and not self.hurried:
            self.hurried = True
            self._hurry()
        if not self._state.verdicts:  # what is seen now may follow from one, or be told of in it
            self._look_at_departures(now)
            self._publish(store)
        if self._question is not None:
            self._collect(self._question, now, store)
        else:
            self._ask_if_due(now, store)

    def _look_at_departures(self, now: float) -> None:
        if not (self._ended or self.waiting or self._state.member.trouble or self._known.keys() - self._handled):
            return
        with self._lock:
            ended = dict(self._ended)
        departed = self._monitor.read_departures()
        for rank, (evidence, _) in ended.items():
            if rank not in departed:
                departed[rank] = self._monitor.witness(self._departure(rank, evidence))
                if departed[rank].cause is Cause.LOST:
                    self._lost(rank, evidence)
            with self._lock:  # only now: where the store is gone, what is above fails, and `overdue` speaks of them
                self._ended.pop(rank, None)
        participants = self._state.member.participants
        for rank, departure in departed.items():
            self._known.setdefault(rank, now)
            if rank in self._handled or rank not in participants or rank == self._rank:
                self._handled.add(rank)
            elif self._matters(departure, now - self._known[rank], now):
                self._handled.add(rank)
                self._ask(TroubleKind.DEPARTED, f"rank {rank} {departure.cause.value}: {departure.text}")

    def _matters(self, departure: Departure, known: float, now: float) -> bool:
        """Return whether this rank waits, or will wait in vain, for one that is gone."""
        if departure.cause is Cause.FAILED and is_consequence(departure.text):
            return False  # it ended because its collective broke: who broke that is being found out
        if departure.cause is Cause.LOST and self._follows(departure.rank, departure.text):
            return False
        if known < 2 * LOST_GRACE and now - self._looked >= 0.2:
            self._looked = now
            self._state.read()
        awaited = any(departure.rank in pending.ranks for pending in self._state.observation.pending)
        if departure.cause is Cause.EXITED or departure.terminated or is_interrupt(departure):
            return self._in_vain(departure, known)
        return awaited or (departure.cause is Cause.LOST and known >= self._grace(departure.rank, LOST_GRACE))

    def _grace(self, rank: int, seconds: float) -> float:
        """Return for how long it is kept back that a rank is gone: a guarded call may be about to say it."""
        return GUARDED_GRACE if self._monitor.in_call_with(rank) else seconds

    def _in_vain(self, departure: Departure, known: float) -> bool:
        """Return whether this rank waits for a collective that one which left has not issued."""
        awaited = {pending.channel: pending.sequence for pending in self.waiting if departure.rank in pending.ranks}
        if not awaited:
            return False
        if departure.watched is None or (is_interrupt(departure) and known < LEFT_GRACE):  # others were sent it too
            return known >= LEFT_GRACE
        return known >= ISSUED_GRACE or not has_issued(departure, awaited)

    def _departure(self, rank: int, evidence: str) -> Departure:
        details = {p.rank: {"host": p.host, "pid": p.pid} for p in self._monitor.neighbours.here}
        departure = self._monitor.seen_gone(rank, evidence, details.get(rank))
        return replace(departure, terminated=departure.terminated or self._follows(rank, evidence))

    def _follows(self, rank: int, evidence: str) -> bool:
        """Return whether the end of a process is what the last incident has led to, and not another one.

        torch ends a process whose collective has failed, or has not ended within torch's own limit
        (ProcessGroupNCCL.cpp, ``Watchdog::run``; nccl2 likewise). So that collective must not have ended since, and the
        rank have waited in it.
        """
        last = self.last
        if last is None or not any(found.rank == rank and found.state == _WAITING for found in last.ranks):
            return False
        channel, _, sequence = last.op_id.rpartition("/")
        observation = self._state.read()
        if channel not in observation.issued or observation.done.get(channel, 0) >= int(sequence):
            return False  # it has ended, or its communicator has, and the program has gone on with another
        if any(found.cause in _GONE for found in last.ranks):
            return True
        if "killed by" in evidence and ABORTED not in evidence:
            return False
        waits = any((p.channel, p.sequence) == (channel, int(sequence)) for p in observation.pending)
        return channel in self.given_up or not waits

    def _lost(self, rank: int, evidence: str) -> None:
        text = told(
            "rank {rank} is lost: {because} (seen by rank {peer})",
            rank=rank,
            because=received(evidence),
            peer=self._rank,
        )
        log.warning("ncclguard: %s", text)

    # ------------------------------------------------------------------ mismatches

    def _publish(self, store: AgreementStore) -> None:
        """The first that waits writes down what it called; the others compare, so that a mismatch is known in seconds.

        Also what it called just before: a mismatch may have ended here, with rubbish, and not on the others.
        """
        generation = self._state.member.generation
        before = [
            ended
            for ended in self._state.observation.recent
            if any(p.channel == ended.channel and 0 < p.sequence - ended.sequence <= COMPARED for p in self.waiting)
        ]
        for pending in (*self.waiting, *before):
            key = f"{KEY}/open/{pending.channel}/{pending.sequence % KEPT_OPEN}"
            place = (generation, pending.sequence)
            if not pending.fingerprint or self._published.get(key) == place:
                continue
            self._published[key] = place
            mine: list[int | str] = [pending.fingerprint, self._rank, pending.text]
            first = self._marks.enter(store, key, place, mine)
            if first is not None and first[0] != pending.fingerprint:
                _, rank, other = first
                why = f"rank {rank} is in {other}, rank {self._rank} in {pending.text}"
                self._ask(TroubleKind.MISMATCH, why)

    # ------------------------------------------------------------------ who is awaited

    def _ask_if_due(self, now: float, store: AgreementStore) -> None:
        """After `warn_after`, and each time it has doubled: one rank of the job asks all, and logs what they answer."""
        pending = max(self.waiting, key=self._state.age, default=None)
        if pending is None or self._state.member.frozen:
            return
        number, last = self._warned.get(pending.channel, (-1, 0.0))
        age = self._state.age(pending)
        if age < (2 * last if number == pending.sequence else self._warn_after):
            return
        self._warned[pending.channel] = (pending.sequence, max(age, self._warn_after))
        if now - self._state.asked < self._warn_after / 2:
            return  # somebody else has just asked, maybe because of another group
        level = len([1 for double in range(30) if age >= self._warn_after * 2**double])
        place = (self._state.member.generation, pending.sequence, level)
        if self._marks.enter(store, f"{KEY}/ask/{pending.channel}", place, [self._rank]) != [self._rank]:
            return
        self._asked += 1
        self._question = _Question(asker=f"{KEY}{self._rank}", number=self._asked, asked=now, pending=pending)
        self._monitor.post(self._question.entry(self._state, self._rank, store))

    def _collect(self, question: _Question, now: float, store: AgreementStore) -> None:
        silent = question.silent(self._state.member.participants, now, store)
        if silent is None:
            return
        if silent and not question.sought:
            question.sought = True
            self._monitor.neighbours.seek(silent, now)
            return
        self._question = None
        if any((p.channel, p.sequence) == (question.pending.channel, question.pending.sequence) for p in self.waiting):
            self._warn(question, silent)

    def _warn(self, question: _Question, silent: list[int]) -> None:
        sights = {rank: self._monitor.neighbours.look(rank) for rank in silent}
        causes = {rank: silent_cause(sight) for rank, (sight, _) in sights.items()}
        finding = analyse(elsewhere_long_enough(question.answers), {}, causes, overdue=True)
        lines = not_come({rank: question.answers[rank] for rank in finding.causes if rank not in sights})
        lines += not_answering(sights)
        lines += [
            tr("{ranks} in {operation}", ranks=ranks_text(ranks), operation=text)
            for text, ranks in finding.sides[:SHOWN_GROUPS]
        ]
        lines = lines or [ALL_ENTERED]
        age = self._state.age(question.pending)
        self.answered = question.pending, age, [str(line) for line in lines]
        text = told(
            "{operation} has made no progress for {age:.0f} s on rank {rank}: {details}",
            operation=question.pending.text,
            age=age,
            rank=self._rank,
            details=joined("; ", lines),
        )
        log.warning("ncclguard: %s", text)
