"""The monitor: the one thread of a process that talks to the store, so that no caller ever waits for the store.

The monitor revokes generations on behalf of callers in trouble, answers the revokes and questions of other ranks,
coordinates when it is its turn, and brings verdicts. Idle it looks at one counter twice a second; while a call is open
for longer than a moment, 20 times a second.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ncclguard.coordination.envelopes import Envelopes
from ncclguard.coordination.group_state import GroupState, Summarise, make_state
from ncclguard.coordination.host_page import HostPage
from ncclguard.coordination.inquiry import Inquiries, Patience
from ncclguard.coordination.liveness import Liveness, Neighbours
from ncclguard.coordination.nonfinite import KIND as NON_FINITE, NonFinites
from ncclguard.coordination.revocation import Revocation, leave_result, read_revoke, revoke
from ncclguard.coordination.sections import Sections
from ncclguard.coordination.store import AgreementStore, Departures, Entries, Handshake, StoreUnavailable
from ncclguard.incident.model import Incident
from ncclguard.incident.stacks import Offer
from ncclguard.protocol import codec
from ncclguard.protocol.decision import Departure, Report, TroubleKind, is_interrupt
from ncclguard.protocol.group_key import GroupKey
from ncclguard.protocol.timing import Timing
from ncclguard_explain.cause import WORD, Cause
from ncclguard_explain.language import told, tr
from ncclguard_explain.ranks import ranks_text


@dataclass(frozen=True)
class MonitorSettings:
    """`describe` adds to a report what only this process knows, `summarise` writes the incident.

    `patience` is asked anew for each look at a call, because it may change in a running job.
    """

    timing: Timing
    patience: Callable[[GroupState], Patience]
    describe: Callable[[GroupState, Report], Report]
    summarise: Summarise
    publish: Callable[[Revocation], None] = lambda revocation: None
    revoked: Callable[[GroupState], None] = lambda state: None  # a revocation begins; returns at once
    publish_alone: Callable[[Incident], None] = lambda incident: None
    offer_stacks: Callable[[int], Offer | None] = lambda thread: None  # given the monitor's own thread
    open_page: Callable[[str], HostPage | None] = lambda session: None  # what the ranks of this host share, if they do
    about: str = ""  # what must be equal on all ranks, in words
    has_store: bool = False  # this process may have the store: others cannot read a verdict once it has ended


log = logging.getLogger("ncclguard")


@dataclass(frozen=True)
class Session:
    """A session that is given instead of agreed on: its name in the store, and the ranks that have no process in it."""

    nonce: str
    absent: tuple[int, ...] = ()


#: Seconds a call may be open before the monitor looks at the store 20 times a second.
ATTENTION = 0.25
#: A rank that lost the race to revoke announces it itself when the winner has not after this many seconds.
ANNOUNCE_AGAIN = 0.5
#: Seconds for which what a rank of this host has seen will do for another that looks whether a generation is revoked.
CHECKED_HERE = 2.0
#: Seconds for which the handshake of a new session is hurried: the ranks start together, or will take a while.
EAGER = 5.0


class Monitor:
    """Owns the group states of this process. `start`, then `state` for each group, `wake` when a call is in trouble."""

    def __init__(
        self,
        store: AgreementStore,
        rank: int,
        world_size: int,
        liveness: Liveness,
        settings: MonitorSettings,
        session: Session | None = None,
    ) -> None:
        self.rank = rank
        self.session_ready = threading.Event()
        self.nonce = ""
        self.on_step: Callable[[float, AgreementStore], None] | None = None  # done in every step of the monitor
        #: Functions that are given the entries of the job's log, by kind, which this module does not know.
        self.hearers: dict[str, Callable[[dict[str, Any]], None]] = {}
        self.above_sessions: Callable[[float, AgreementStore], None] | None = (
            None  # also, with the store of all sessions
        )
        self._root = store
        self._connection = store.connection
        self._store = store
        self._settings = settings
        self.timing = settings.timing
        self._given = session
        self._handshake: Handshake | None = (
            Handshake(store, rank, world_size, settings.about) if session is None else None
        )
        self.neighbours = Neighbours(rank, world_size, liveness, settings.timing.aside)
        self._inquiries = Inquiries(rank, self, settings.timing.period)
        self.sections = Sections(rank, self.wake)
        self.envelopes = Envelopes(self.wake)
        self.nonfinite = NonFinites(tuple(range(world_size)), rank, self.wake)
        self._states: dict[str, GroupState] = {}
        self._all: tuple[GroupState, ...] = ()
        self._states_lock = threading.Lock()
        self._unchecked: set[str] = set()
        self._revocations: dict[str, Revocation] = {}
        self._announce_by: dict[tuple[str, int], tuple[float, int]] = {}  # when, and who revoked
        self._events = Entries("events", "event")
        self._departures = Departures(rank)
        self._aside = True  # whether this step looks at what only matters later, too
        self._departed = 0  # how many departures there are at least, as somebody has said in the job's log
        self._next_aside = 0.0
        self.departures_begun = False  # as far as the job's log says
        self._leaving: Departure | None = None
        self._follows: Callable[[], bool] = lambda: False
        self._left = threading.Event()
        self.goodbyes = 0  # ranks of the job that are known to have left; counted while this one leaves
        self._wake = threading.Event()
        self._stop = threading.Event()
        self.unavailable = ""  # why no agreement is possible any more
        self._eager_until = time.monotonic() + EAGER
        self._thread = threading.Thread(target=self._run, name="ncclguard-monitor", daemon=True)

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def take_over(self, nonfinite: NonFinites) -> None:
        """Go on with what a monitor before this one, of another session of the same job, knows of numbers."""
        self.nonfinite = nonfinite
        nonfinite.wake = self.wake

    def state(self, key: str, members: tuple[int, ...]) -> GroupState:
        """Return this rank's state in a group, made on first use by a caller or by another rank's revoke."""
        with self._states_lock:
            state = self._states.get(key)
            if state is None:
                state = self._states[key] = make_state(key, self.rank, members)
                settings, standing = self._settings, self.sections.standing
                state.serve(
                    self.nonce,
                    self.unavailable,
                    settings.publish_alone,
                    standing,
                    self.timing.grace,
                    self.caller_waits,
                    self.neighbours.hosts,
                )
                self._unchecked.add(key)
                self._all = tuple(self._states.values())
            return state

    def states(self) -> tuple[GroupState, ...]:
        return self._all

    def depart(
        self,
        cause: Cause,
        text: str,
        seconds: float,
        details: Mapping[str, object] | None = None,
        *,
        terminated: bool = False,
        follows: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Tell the others that this process leaves, with what it completed; True when it has been written in time.

        `follows` is asked in the monitor's thread, after what it has published: whether this follows from a fault that
        all know.
        """
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            return False
        if self._leaving is None:  # the first reason stands
            self._follows = follows
            self._leaving = Departure(self.rank, cause, text, details=details or {}, terminated=terminated)
            if self.session_ready.is_set() and (cause is Cause.EXITED or terminated):
                # For those that cannot ask the store any more, and for the end before the monitor's next turn.
                self._store.tell_host(f"left/{self.rank}", cause.value)
        self._wake.set()
        return self._left.wait(seconds)

    def settle(self, seconds: float, begins_within: float = 0.0) -> None:
        """Wait until no verdict is in progress; `begins_within` seconds one may still begin."""
        now = time.monotonic()
        while self._thread.is_alive() and not self.unavailable and time.monotonic() < now + seconds:
            if not self._revocations and time.monotonic() >= now + begins_within:
                return
            time.sleep(0.01)

    def stop(self, seconds: float) -> bool:
        """End the thread; False when it is inside a store call that does not answer."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        page, self._connection.page = self._connection.page, None
        if page is not None:
            page.close()
        return True

    def caller_waits(self) -> float:
        """For how many seconds after its deadline a caller of this process waits for a verdict, as things are now."""
        return self.timing.caller_waits(time.monotonic() - self._connection.answered)

    def gives_up(self, key: str) -> None:
        """A call of this rank is about to return without a verdict, and its program may end: tell this host's ranks."""
        if self.session_ready.is_set():
            self._store.tell_host(f"{key}/alone/{self.rank}", str(time.monotonic()))

    def gave_up(self, rank: int, key: str, since: float) -> bool:
        """Return whether a rank of this host has told `since` then that a call of it returns without a verdict."""
        told = self._store.told_here(f"{key}/alone/{rank}") if self.session_ready.is_set() else None
        return told is not None and float(told) >= since

    def left(self, rank: int) -> Cause | None:
        """Return how a rank of this host has told it that it ends as it should, or None; known without the store."""
        told = self._store.told_here(f"left/{rank}") if self.session_ready.is_set() else None
        return None if told is None else Cause(told)

    def seen_gone(self, rank: int, evidence: str, details: Mapping[str, object] | None = None) -> Departure:
        """Return the departure of a rank of this host that is gone without a word in the store."""
        left = self.left(rank)
        terminated = left is Cause.LOST  # it has told so when it was sent SIGTERM
        return Departure(rank, left or Cause.LOST, evidence, details=details or {}, terminated=terminated)

    def in_call_with(self, rank: int) -> bool:
        """Return whether this process is in a guarded call that a rank is part of, which ends if that one is gone."""
        states = [state for state in self.states() if state.guarded and state.call is not None]
        return any(rank in state.member.participants for state in states)

    def awaited(self, seconds: float) -> list[dict[str, Any]] | None:
        """Return who is awaited in open operations, see `Inquiries.awaited`; None: no answer in time."""
        if self.unavailable or not self._thread.is_alive():
            return None
        return self._inquiries.awaited(seconds)

    # ------------------------------------------------------------------ the thread

    def read_last_calls(self) -> dict[int, Report]:
        """Return what the ranks that have left well called last, where it is watched; once this monitor has stopped."""
        watched = [state for state in self.states() if not state.guarded]
        keys = {_last(state.key, rank): rank for state in watched for rank in state.member.members}
        found = self._store.read_many(list(keys))
        return {keys[name]: codec.loads_report(text) for name, text in found.items()}

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if not self.unavailable:
                    self._step(time.monotonic())
            except StoreUnavailable as error:
                self._lose_store(str(error))
            except Exception:
                log.exception(
                    "ncclguard: %s",
                    told("the monitor of rank {rank} met an unexpected error and goes on", "log", rank=self.rank),
                )
            interval, now = self._interval(), time.monotonic()
            if not self._wake.wait(interval):
                now, slept = time.monotonic(), time.monotonic() - now
                self._connection.pace.met(max(0.0, slept - interval), now)  # the machine is busy, or the interpreter
            self._wake.clear()
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        """Announce the departure of a process that has ended this thread before its next turn."""
        if self._leaving is None or self._left.is_set() or not self.session_ready.is_set() or self.unavailable:
            return
        try:
            self._announce_departure(self._leaving)
        except StoreUnavailable as error:
            self._lose_store(str(error))
        except Exception:
            log.exception(
                "ncclguard: %s", told("the monitor of rank {rank} could not say that it leaves", "log", rank=self.rank)
            )

    def _interval(self) -> float:
        timing = self.timing
        if self.unavailable:
            return timing.idle
        if self._handshake is not None and time.monotonic() < self._eager_until:
            return timing.handshake * (0.5 + self.rank * 0.618034 % 1)  # so that the ranks do not come all at once
        return self._within(self._leaving is not None or self._pending(time.monotonic()))

    def _within(self, attentive: bool) -> float:
        """Seconds between two looks at whether there is anything new, and how old what the host knows of it may be."""
        timing = self.timing
        if attentive:
            return timing.period
        # What another rank of this host has read may be that old, so that both together are as late as one alone.
        return timing.idle / 2 if self._connection.page is not None else timing.idle

    def _pending(self, now: float) -> bool:
        """Return whether something is to be agreed, or may soon have to be."""
        if self._revocations or self.sections.waiting or self.envelopes.busy:
            return True
        for state in self.states():
            if state.member.trouble is not None:
                return True
            call = state.call
            if call is not None and now - call.entered > ATTENTION:
                return True
        return self._inquiries.busy

    @property
    def _decides(self) -> bool:
        """Return whether this rank coordinates a revocation."""
        return any(revocation.coordinates for revocation in self._revocations.values())

    def _only_awaits_verdicts(self) -> bool:
        """Return whether this rank has answered the revoke of each of its calls, and others are to decide."""
        if not self._revocations or self._decides:
            return False
        return all(state.call is None or state.key in self._revocations for state in self.states())

    def _step(self, now: float) -> None:
        if self._given is not None and not self.session_ready.is_set():
            self._begin_session(self._given.nonce, self._given.absent)
        if self._handshake is not None:
            finished = self._handshake.step()
            if self._handshake.nonce is not None and not self.session_ready.is_set():
                self._compare(self._handshake.about_first)  # before its program goes on, and perhaps ends
                self._begin_session(self._handshake.nonce)
            if finished:
                self._handshake = None
        if not self.session_ready.is_set():
            return
        if self._leaving is not None and not self._left.is_set():
            self.neighbours.look_at_once()  # a launcher ends this process because another one is gone
            self._announce_departure(self._leaving)
        if self._leaving is not None:
            self.goodbyes = self._departures.count(self._store, self.timing.period)
        self._aside = self.timing.aside <= self.timing.period or now >= self._next_aside
        if self._aside:
            self._next_aside = now + self.timing.aside
        pending = self._pending(now)
        attentive = pending or self._leaving is not None
        self.neighbours.step(now, attentive)
        if self._connection.page is not None:
            self._connection.page.opened_by(1 + len(self.neighbours.here))
        self._revoke_for_callers(now)
        if self._aside or not self._revocations:  # who has answered a revoke waits for its verdict
            self._hear_events(now, self._within(attentive))
        self.sections.step(now, self.post, self.states())
        self.nonfinite.step(now, self.post)
        # Not by ranks that only leave or wait for a verdict: where all are ended, there are as many entries as ranks.
        if pending and not self._only_awaits_verdicts():
            self.read_departures()
        if attentive:
            self._witness_departures()
            self._apply_departures()
            self._revoke_for_callers(now)
        for state in self.states():
            if state.key in self._unchecked and state.key not in self._revocations:
                self._unchecked.discard(state.key)
                self._look_for_revoke(state, now)
        self.envelopes.step(self._store, self.post, self._departures.all() if self.envelopes.busy else {})
        if self._departures.more and self._decides:
            self.read_departures()  # it may have become the coordinator in this step
        for key, revocation in list(self._revocations.items()):
            departed = self._departures.among(revocation.state.member.participants, revocation.state.key)
            if revocation.step(
                now,
                departed,
                self._settings.describe,
                self.neighbours.silent_cause,
                self._settings.summarise,
                [peer.rank for peer in self.neighbours.here],
                self.neighbours.fetch_stacks,
                self.neighbours.seek,
            ):
                del self._revocations[key]
                self._settings.publish(revocation)
                self._look_for_revoke(revocation.state, now)
        if self.on_step is not None:
            self.on_step(now, self._store)
        if self.above_sessions is not None:
            self.above_sessions(now, self._root)
        self._inquiries.step(now, self._store)

    def _compare(self, about_first: str) -> None:
        """Say it loudly when this rank was not started like the others: what follows may be anything."""
        if about_first != self._settings.about:
            log.error(
                "ncclguard: %s",
                told(
                    "rank {rank} was not started like rank 0: it has {given}, and rank 0 has {other}; ranks that differ may refuse each "
                    "other's calls or wait for each other: start all ranks in the same environment, with the same number of ranks",
                    "log",
                    rank=self.rank,
                    given=self._settings.about,
                    other=about_first or tr("another version of ncclguard"),
                ),
            )

    def _begin_session(self, nonce: str, absent: Sequence[int] = ()) -> None:
        self.nonce = nonce
        self._store = self._root.below(nonce)
        self._connection.page = self._settings.open_page(nonce)
        self.neighbours.register(self._store, self._settings.offer_stacks(threading.get_native_id()))
        for rank in absent:
            self.witness(Departure(rank, Cause.LOST, "was lost before this session began"))
        self.session_ready.set()
        for state in self.states():
            state.begin_session(nonce)

    def _lose_store(self, why: str) -> None:
        self.unavailable = tr("the store cannot be used any more ({why})", why=why)
        log.warning(
            "ncclguard: %s",
            told("rank {rank}: {why}; verdicts are local from now on", "log", rank=self.rank, why=self.unavailable),
        )
        self._left.set()
        try:
            for key, revocation in list(self._revocations.items()):
                if revocation.step_without_store():
                    del self._revocations[key]
                    self._settings.publish(revocation)
        except Exception:
            log.exception(
                "ncclguard: %s",
                told("the monitor of rank {rank} met an unexpected error and goes on", "log", rank=self.rank),
            )
        for state in self.states():
            state.make_unavailable(self.unavailable)

    # ------------------------------------------------------------------ revokes

    def _revoke_for_callers(self, now: float) -> None:
        for state in self.states():
            with state.condition:
                trouble, generation = state.member.trouble, state.member.generation
            if trouble is None:
                continue
            if state.key not in self._revocations:
                winner = revoke(self._store, state.key, generation, self.rank, self.timing.hold)
                if winner is None:
                    continue
                self._begin_revocation(state, generation, winner, now)
                if winner == self.rank:
                    self._announce_revoke(state, generation, winner)
                else:
                    again = max(ANNOUNCE_AGAIN, 2 * self.timing.aside)
                    due = now + again * (1 + state.member.participants.index(self.rank))
                    self._announce_by[state.key, generation] = due, winner
        for (key, generation), (due, winner) in list(self._announce_by.items()):
            if key not in self._revocations:
                del self._announce_by[key, generation]
            elif now >= due:
                del self._announce_by[key, generation]
                self._announce_revoke(self._revocations[key].state, generation, winner)

    def _begin_revocation(self, state: GroupState, generation: int, revoker: int, now: float) -> None:
        if self.rank in state.member.participants:
            self._settings.revoked(state)
            self._revocations[state.key] = Revocation(
                self._store, state, generation, revoker, now, self.timing, self._connection.pace,
                has_store=self._settings.has_store,
            )  # fmt: skip

    def _announce_revoke(self, state: GroupState, generation: int, by: int) -> None:
        members = list(state.member.members)
        self.post({"kind": "revoke", "group": state.key, "generation": generation, "by": by, "members": members})

    def _hear_revoke(self, state: GroupState, generation: int, revoker: int, now: float) -> None:
        self._announce_by.pop((state.key, generation), None)
        if state.key not in self._revocations and generation == state.member.generation:
            self._begin_revocation(state, generation, revoker, now)
        elif generation > state.member.generation:  # this rank has not come to that yet
            self._unchecked.add(state.key)

    def _look_for_revoke(self, state: GroupState, now: float) -> None:
        """Take up what another rank of this host has just heard: news of a later revoke is in the job's log."""
        if state.key in self._revocations:
            return
        generation = state.member.generation
        revoker = read_revoke(self._store, state.key, generation, CHECKED_HERE)
        if revoker is not None:
            self._begin_revocation(state, generation, revoker, now)

    # ------------------------------------------------------------------ the job's log: one counter, few entries

    def post(self, entry: dict[str, object]) -> None:
        """Append an entry that every monitor of the job reads; `members`, where it has them, are whom it concerns."""
        members = entry.get("members")
        short = {**entry, "members": codec.ranges(members)} if isinstance(members, (list, tuple)) else entry
        self._events.add(self._store, json.dumps(short))

    def _hear_events(self, now: float, within: float) -> None:
        for text in self._events.new(self._store, within):
            self._hear(json.loads(text), now)

    def _hear(self, entry: dict[str, object], now: float) -> None:
        if entry["kind"] == "departed":
            self.departures_begun = self._aside = True  # read them in this step
            self._departed = max(self._departed, int(str(entry["count"])))
        members = codec.ranks_of(str(entry.get("members", "")))
        if self.rank not in members:
            return
        if entry["kind"] == "revoke":
            state = self.state(str(entry["group"]), members)
            self._hear_revoke(state, int(str(entry["generation"])), int(str(entry["by"])), now)
        elif entry["kind"] == "question":
            self._inquiries.answer(self._store, entry, members)
        elif entry["kind"] == "section":
            self.sections.hear(entry)
        elif entry["kind"] == "receives":
            self.envelopes.hear(str(entry["box"]))
        elif entry["kind"] == NON_FINITE:
            self.nonfinite.hear(entry)
        elif (hear := self.hearers.get(str(entry["kind"]))) is not None:
            hear(entry)

    # ------------------------------------------------------------------ departures

    def _announce_departure(self, departure: Departure) -> None:
        departure = replace(departure, follows=self._follows())
        done: dict[str, int] = {}
        for state in self.states():
            done[state.key] = state.member.completed
            state.terminated = departure.text if departure.terminated else ""
            leave_result(self._store.below(f"{state.key}/result"), state)
            calls = state.last_calls() if departure.cause is Cause.EXITED else None
            if calls is not None:  # not in the departure, which all that are still there read
                guarded = max((one.member.completed for one in self.states() if one.guarded), default=0)
                calls = replace(calls, done=guarded, details={**calls.details, **departure.details})
                self._store.put(_last(state.key, self.rank), codec.dumps(calls))
            if departure.cause is Cause.EXITED or departure.terminated or is_interrupt(departure):
                departure = replace(departure, watched=state.last_words() or departure.watched)
        self.witness(departure, done)
        self._left.set()

    def _witness_departures(self) -> None:
        for rank, evidence in self.neighbours.departures(self.timing.period):
            if rank not in self._departures:
                self.witness(self.seen_gone(rank, evidence))

    def _apply_departures(self) -> None:
        for state in self.states() if self._departures else ():
            waiting = state.waited_for()
            if waiting is None:
                continue
            _, sequence = waiting
            with state.condition:
                generation, participants = state.member.generation, state.member.participants
            for rank, departure in self._departures.among(participants, state.key).items():
                if departure.done < sequence:
                    state.trouble(
                        generation,
                        TroubleKind.DEPARTED,
                        tr("rank {rank} {cause}: {text}", rank=rank, cause=WORD[departure.cause], text=departure.text),
                    )

    # ------------------------------------------------------------------ what the inquiries need

    def waiting_elsewhere(self, key: str) -> tuple[str, tuple[int, ...], float]:
        """The call of another group that this rank waits in, else one that failed; its members, and how long ago.

        With its group: the same call on another one is what is wrong where ranks were given different groups.
        """
        found = [(state, *state.waiting()) for state in self.states() if state.key != key]
        waiting = min((one for one in found if one[1]), key=lambda one: one[2], default=None)
        if waiting is None:
            return "", (), 0.0
        state, text, ended = waiting
        if state.guarded:  # what is watched says its group by itself
            group, ranks = GroupKey.parse(state.key).short, ranks_text(state.member.members)
            text = tr("{operation} of group {name} ({ranks})", operation=text, name=group, ranks=ranks)
        return text, state.member.members if state.guarded else (), ended

    def read_departures(self) -> dict[int, Departure]:
        """Every departure that is known to the store, or was a moment ago; from the monitor's own thread only."""
        decides = self._decides
        if self._aside or decides or self._departures.more:
            timing = self.timing
            within = timing.period if decides else timing.departures(self.departures_begun)
            self._departures.read(self._store, within, self._departed, in_portions=not decides)
        return self._departures.all()

    def witness(self, departure: Departure, done: dict[str, int] | None = None) -> Departure:
        """Enter a departure for all, and return it as it was entered first; from the monitor's own thread only."""
        count = self._departures.post(self._store, departure, done or {})
        if count:
            self.post({"kind": "departed", "count": count})
        return self._departures.all()[departure.rank]

    def describe(self, state: GroupState, report: Report) -> Report:
        return self._settings.describe(state, report)

    def patience(self, state: GroupState) -> Patience:
        return self._settings.patience(state)


def _last(key: str, rank: int) -> str:
    return f"{key}/last/{rank}"
