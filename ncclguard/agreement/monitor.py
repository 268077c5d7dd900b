"""The one thread of a process that talks to the store, so that no caller ever waits for it.

It revokes on behalf of callers in trouble, answers revokes and questions of other ranks, coordinates when it is its
turn, and brings verdicts. Idle it looks at one counter twice a second; while a call is open for longer than a moment,
20 times a second.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ncclguard.agreement import codec
from ncclguard.agreement.decision import Departure, Phase, Report, TroubleKind
from ncclguard.agreement.departures import Departures
from ncclguard.agreement.entries import Entries
from ncclguard.agreement.handshake import Handshake
from ncclguard.agreement.inquiry import Inquiries, Patience
from ncclguard.agreement.liveness import Identity, Liveness, Sight
from ncclguard.agreement.neighbours import Neighbours
from ncclguard.agreement.revocation import Revocation, leave_result, read_revoke, revoke
from ncclguard.agreement.seat import Seat
from ncclguard.agreement.sections import Sections
from ncclguard.agreement.settings import MonitorSettings
from ncclguard.agreement.store import AgreementStore, StoreUnavailable
from ncclguard.outcome import Cause

log = logging.getLogger("ncclguard")

#: Seconds a call may be open before the monitor looks at the store 20 times a second.
ATTENTION = 0.25
#: A rank that lost the race to revoke announces it itself when the winner has not after this many seconds.
ANNOUNCE_AGAIN = 0.5
#: Seconds for which the handshake of a new session is hurried: the ranks start together, or will take a while.
EAGER = 5.0


class Monitor:
    """Owns the seats of this process. `start`, then `seat` for each guarded group, `wake` when a call is in trouble."""

    def __init__(
        self, store: AgreementStore, rank: int, world_size: int, liveness: Liveness, settings: MonitorSettings
    ) -> None:
        self.rank = rank
        self.session_ready = threading.Event()
        self.nonce = ""
        self.make_seat: Callable[[str, int, tuple[int, ...]], Seat] = Seat
        self.also: Callable[[float, AgreementStore], None] | None = None  # done in every step of the monitor
        self._root = store
        self._store = store
        self._settings = settings
        self._handshake: Handshake | None = Handshake(store, rank, world_size)
        self._neighbours = Neighbours(rank, world_size, liveness, settings.timing.aside)
        self._inquiries = Inquiries(rank, self)
        self.sections = Sections(rank, self.wake)
        self._seats: dict[str, Seat] = {}
        self._seats_lock = threading.Lock()
        self._unchecked: set[str] = set()
        self._revocations: dict[str, Revocation] = {}
        self._announce_by: dict[tuple[str, int], float] = {}
        self._bell = Entries("bell", "entry")
        self._departures = Departures(rank)
        self._aside = True  # whether this step looks at what only matters later, too
        self._next_aside = 0.0
        self.departures_begun = False  # as far as the job's log says
        self._leaving: Departure | None = None
        self._left = threading.Event()
        self._goodbyes = 0
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._unavailable = ""
        self._eager_until = time.monotonic() + EAGER
        self._thread = threading.Thread(target=self._run, name="ncclguard-monitor", daemon=True)

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    @property
    def unavailable(self) -> str:
        """Why no agreement is possible any more, or empty."""
        return self._unavailable

    def seat(self, key: str, members: tuple[int, ...]) -> Seat:
        """Return this rank's seat in a group, made on first use by a caller or by another rank's revoke."""
        with self._seats_lock:
            seat = self._seats.get(key)
            if seat is None:
                seat = self._seats[key] = self.make_seat(key, self.rank, members)
                seat.unavailable = self._unavailable
                seat.session = self.nonce
                seat.publish_alone = self._settings.publish_alone
                seat.standing = self.sections.standing
                self._unchecked.add(key)
            return seat

    def seats(self) -> list[Seat]:
        with self._seats_lock:
            return list(self._seats.values())

    def depart(
        self,
        cause: Cause,
        text: str,
        seconds: float,
        details: Mapping[str, object] | None = None,
        *,
        told: bool = False,
    ) -> bool:
        """Tell the others that this process leaves, with what it completed; True when it has been written in time."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            return False
        if self._leaving is None:  # the first reason stands
            self._leaving = Departure(self.rank, cause, text, details=details or {}, told=told)
        self._wake.set()
        return self._left.wait(seconds)

    def settle(self, seconds: float, begins_within: float = 0.0) -> None:
        """Wait until no verdict is in progress; `begins_within` seconds one may still begin."""
        now = time.monotonic()
        while self._thread.is_alive() and not self._unavailable and time.monotonic() < now + seconds:
            if not self._revocations and time.monotonic() >= now + begins_within:
                return
            time.sleep(0.01)

    def stop(self, seconds: float) -> bool:
        """End the thread; False when it is inside a store call that does not answer."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def goodbyes(self) -> int:
        """How many ranks of the job are known to have left; counted while this one leaves."""
        return self._goodbyes

    def peers_here(self) -> list[Identity]:
        """The other ranks of this host, as far as they are known yet."""
        return self._neighbours.here()

    def first_here(self) -> bool:
        """Whether no live rank of this host is lower, as far as is known: it speaks where no agreement can be had."""
        return self._neighbours.first_here()

    def gone(self, rank: int) -> str:
        """Local evidence that a peer's process is gone, for verdicts that could not be agreed; empty for none."""
        return self._neighbours.gone(rank)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if not self._unavailable:
                    self._step(time.monotonic())
            except StoreUnavailable as error:
                self._lose_store(str(error))
            except Exception:
                log.exception("ncclguard: the monitor of rank %d met an unexpected error and goes on", self.rank)
            self._wake.wait(self._interval())
            self._wake.clear()

    def _interval(self) -> float:
        timing = self._settings.timing
        if self._unavailable:
            return timing.idle
        if self._handshake is not None and time.monotonic() < self._eager_until:
            return timing.handshake * (0.5 + self.rank * 0.618034 % 1)  # so that the ranks do not come all at once
        return timing.period if self._attentive(time.monotonic()) else timing.idle

    def _attentive(self, now: float) -> bool:
        return self._leaving is not None or self._pending(now)

    def _pending(self, now: float) -> bool:
        """Whether something is to be agreed, or may soon have to be."""
        if self._revocations or self.sections.waiting:
            return True
        for seat in self.seats():
            if seat.member.trouble is not None:
                return True
            call = seat.call
            if call is not None and now - call.entered > ATTENTION:
                return True
        return self._inquiries.busy

    def _step(self, now: float) -> None:
        if self._handshake is not None:
            finished = self._handshake.step()
            if self._handshake.nonce is not None and not self.session_ready.is_set():
                self._begin_session(self._handshake.nonce)
            if finished:
                self._handshake = None
        if not self.session_ready.is_set():
            return
        if self._leaving is not None and not self._left.is_set():
            self._announce_departure(self._leaving)
        if self._leaving is not None:
            self._goodbyes = self._departures.count(self._store)
        self._aside = self._settings.timing.aside <= self._settings.timing.period or now >= self._next_aside
        if self._aside:
            self._next_aside = now + self._settings.timing.aside
        pending = self._pending(now)
        self._neighbours.step(now, pending or self._leaving is not None)
        self._ring_for_callers(now)
        if self._aside or not self._revocations:  # who has answered a revoke waits for its verdict
            self._hear_bell(now)
        self.sections.step(now, self.post, self.seats())
        if pending:  # not by ranks that only leave: at the end of every job all do, and there are as many entries
            self.read_departures()
        if pending or self._leaving is not None:
            self._witness_departures()
            self._apply_departures()
            self._ring_for_callers(now)
        for seat in self.seats():
            if seat.key in self._unchecked:
                self._unchecked.discard(seat.key)
                self._look_for_revoke(seat, now)
        for key, revocation in list(self._revocations.items()):
            departed = self._departures.among(revocation.seat.member.participants, revocation.seat.key)
            if revocation.step(
                now,
                departed,
                self._settings.describe,
                self._neighbours.silent_cause,
                self._settings.summarise,
                [peer.rank for peer in self._neighbours.here()],
                self._neighbours.fetch_stacks,
                self._neighbours.seek,
            ):
                del self._revocations[key]
                self._settings.publish(revocation)
                self._look_for_revoke(revocation.seat, now)
        if self.also is not None:
            self.also(now, self._store)
        self._inquiries.step(now, self._store)

    def _begin_session(self, nonce: str) -> None:
        self.nonce = nonce
        self._store = self._root.below(nonce)
        self._neighbours.register(self._store, self._settings.offer_stacks(threading.get_native_id()))
        self.session_ready.set()
        for seat in self.seats():
            with seat.condition:
                seat.session = nonce
                seat.condition.notify_all()

    def _lose_store(self, why: str) -> None:
        self._unavailable = f"the store cannot be used any more ({why})"
        log.warning("ncclguard: rank %d: %s; verdicts are local from now on", self.rank, self._unavailable)
        self._left.set()
        for seat in self.seats():
            seat.set_unavailable(self._unavailable)

    # ------------------------------------------------------------------ revokes

    def _ring_for_callers(self, now: float) -> None:
        for seat in self.seats():
            with seat.condition:
                trouble, generation = seat.member.trouble, seat.member.generation
            if trouble is None:
                continue
            if seat.key not in self._revocations:
                winner = revoke(self._store, seat.key, generation, self.rank)
                self._begin_revocation(seat, generation, winner, now)
                if winner == self.rank:
                    self._announce_revoke(seat, generation)
                else:
                    place = seat.member.participants.index(self.rank)
                    self._announce_by[seat.key, generation] = now + ANNOUNCE_AGAIN * (1 + place)
        for (key, generation), due in list(self._announce_by.items()):
            if key not in self._revocations:
                del self._announce_by[key, generation]
            elif now >= due:
                del self._announce_by[key, generation]
                self._announce_revoke(self._revocations[key].seat, generation)

    def _begin_revocation(self, seat: Seat, generation: int, ringer: int, now: float) -> None:
        if self.rank in seat.member.participants:
            self._revocations[seat.key] = Revocation(self._store, seat, generation, ringer, now, self._settings.timing)

    def _announce_revoke(self, seat: Seat, generation: int) -> None:
        self.post({"kind": "revoke", "group": seat.key, "generation": generation, "members": list(seat.member.members)})

    def _look_for_revoke(self, seat: Seat, now: float) -> None:
        if seat.key in self._revocations:
            return
        generation = seat.member.generation
        ringer = read_revoke(self._store, seat.key, generation)
        if ringer is not None:
            self._begin_revocation(seat, generation, ringer, now)

    # ------------------------------------------------------------------ the job's log: one counter, few entries

    def post(self, entry: dict[str, object]) -> None:
        """Append an entry that every monitor of the job reads; `members`, where it has them, are whom it concerns."""
        members = entry.get("members")
        short = {**entry, "members": codec.ranges(members)} if isinstance(members, (list, tuple)) else entry
        self._bell.add(self._store, json.dumps(short))

    def _hear_bell(self, now: float) -> None:
        for text in self._bell.new(self._store):
            self._hear(json.loads(text), now)

    def _hear(self, entry: dict[str, object], now: float) -> None:
        if entry["kind"] == "departed":
            self.departures_begun = self._aside = True  # read them in this step
        members = codec.ranks_of(str(entry.get("members", "")))
        if self.rank not in members:
            return
        if entry["kind"] == "revoke":
            self._announce_by.pop((str(entry["group"]), int(str(entry["generation"]))), None)
            self._look_for_revoke(self.seat(str(entry["group"]), members), now)
        elif entry["kind"] == "question":
            self._inquiries.answer(self._store, entry, members)
        elif entry["kind"] == "section":
            self.sections.hear(entry)

    # ------------------------------------------------------------------ departures

    def _announce_departure(self, departure: Departure) -> None:
        done: dict[str, int] = {}
        for seat in self.seats():
            done[seat.key] = seat.member.completed
            leave_result(self._store.below(f"{seat.key}/result"), seat)
            if departure.cause is Cause.EXITED:
                departure = replace(departure, details={**departure.details, **seat.last_words()})
        self.witness(departure, done)
        self._left.set()

    def _witness_departures(self) -> None:
        for departure in self._neighbours.departures():
            if departure.rank not in self._departures:
                self.witness(departure)
                self._departures.read(self._store)

    def _apply_departures(self) -> None:
        for seat in self.seats():
            waiting = seat.waited_for()
            if waiting is None or not self._departures:
                continue
            _, sequence = waiting
            with seat.condition:
                generation, participants = seat.member.generation, seat.member.participants
            for rank, departure in self._departures.among(participants, seat.key).items():
                if departure.done < sequence:
                    seat.trouble(
                        generation, TroubleKind.DEPARTED, f"rank {rank} {departure.cause.value}: {departure.text}"
                    )

    # ------------------------------------------------------------------ what the inquiries need

    def waiting_elsewhere(self, key: str) -> str:
        """The call of another group this rank is waiting in."""
        for seat in self.seats():
            if seat.key != key and seat.member.phase is not Phase.NONE:
                text = seat.waiting_text()
                if text:
                    return text
        return ""

    def read_departures(self) -> dict[int, Departure]:
        """Every departure that is known to the store, or was a moment ago; from the monitor's own thread only."""
        if self._aside or any(revocation.coordinates for revocation in self._revocations.values()):
            self._departures.read(self._store)
        return self._departures.all()

    def witness(self, departure: Departure, done: dict[str, int] | None = None) -> None:
        """Enter a departure for all; from the monitor's own thread only."""
        if self._departures.post(self._store, departure, done or {}):
            self.post({"kind": "departed"})

    def describe(self, seat: Seat, report: Report) -> Report:
        return self._settings.describe(seat, report)

    def seek(self, ranks: Sequence[int], since: float) -> None:
        self._neighbours.seek(ranks, since)

    def sight(self, rank: int) -> tuple[Sight, str]:
        return self._neighbours.look(rank)

    def patience(self, seat: Seat) -> Patience:
        return self._settings.patience(seat)
