"""One revoked generation of one group, from the revoke to the adopted verdict, as the monitor works it off.

Where a rank does not answer in time, a live rank of its host fetches its stacks for the verdict.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from ncclguard.coordination.group_state import GroupState, Summarise
from ncclguard.coordination.incidents import histories
from ncclguard.coordination.store import BATCH, AgreementStore, Entries, StoreUnavailable
from ncclguard.incident.stacks import frame_text
from ncclguard.protocol import codec
from ncclguard.protocol.decision import (
    Action,
    Departure,
    Report,
    TroubleKind,
    Verdict,
    elsewhere_long_enough,
    waits_outside,
)
from ncclguard.protocol.timing import Pace, Timing
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import received, told

log = logging.getLogger("ncclguard")

#: How much later than the first each further rank of the host looks at one that has not answered, should those before
#: it not.
NEXT_AFTER: Final = 0.15
#: How many ranks look from the beginning whether a coordinator is at work.
FIRST_PLACES: Final = 4

Details = dict[str, object]
Fetch = Callable[[int], Details | None]


class StackFetcher:
    """Belongs to one revocation; `step` in every step of it, by the monitor."""

    def __init__(self, store: AgreementStore, rank: int, look_after: float) -> None:
        self._store = store
        self._look_after = look_after
        self._rank = rank
        self._members: dict[int, bool] = {}  # rank of this host -> whether it is a member
        self._claimed: dict[int, bool] = {}  # rank -> whether it is for this one to look at it
        self._found: dict[int, Details] = {}
        self._written: set[int] = set()
        self.closed = False

    def step(self, overdue: float, members: Sequence[int], here: Sequence[int], fetch: Fetch) -> None:
        """Look at those `here`, on this host, that are members and have not answered.

        `overdue`, from `look_after` on: the seconds since they should have.
        """
        # Each of them is looked up once: the group may have thousands of members, and this is done in every step.
        self._members.update({rank: rank in members for rank in here if rank not in self._members})
        neighbours = sorted(rank for rank in here if self._members[rank])
        order = sorted({*neighbours, self._rank}).index(self._rank)
        for rank in neighbours:
            if rank not in self._claimed and overdue >= self._look_after + NEXT_AFTER * order:
                answered = self._store.written(f"report/{rank}", NEXT_AFTER)
                others = answered or self._store.written(f"fetcher/{rank}", NEXT_AFTER)
                mine = not others and self._store.first(f"fetcher/{rank}", str(self._rank)) == str(self._rank)
                self._store.tell_host(f"fetcher/{rank}")
                self._claimed[rank] = mine
                if mine:
                    self._store.count("fetchers", 1)
                    threading.Thread(target=self._run, args=(rank, fetch), name="ncclguard-stacks", daemon=True).start()
        for rank, details in list(self._found.items()):
            if rank not in self._written:
                self._written.add(rank)
                self._store.first(f"stacks/{rank}", json.dumps(details, default=str))

    def sightings(self, ranks: Sequence[int]) -> tuple[dict[int, Details], set[int]]:
        """Return for the coordinator what was fetched of these ranks, and of whom one that answers still fetches it.

        Where they are many it is that of the first ones.
        """
        found: dict[int, Details] = {}
        pending: set[int] = set()
        for rank in ranks[:BATCH] if self._store.count("fetchers") else ():
            text = self._store.read(f"stacks/{rank}")
            if text is not None:
                found[rank] = json.loads(text)
            elif (fetcher := self._store.read(f"fetcher/{rank}")) is not None and int(fetcher) not in ranks:
                pending.add(rank)
        return found, pending

    def _run(self, rank: int, fetch: Fetch) -> None:
        try:
            details = fetch(rank) or {}
        except Exception:
            log.exception("ncclguard: %s", told("the stacks of rank {rank} could not be fetched", "log", rank=rank))
            details = {}
        self._found[rank] = details
        if self.closed and details:  # the verdict could not wait for them
            frames = details.get("stack")
            shown = [frame_text(str(frame)) for frame in frames] if isinstance(frames, (list, tuple)) else []
            note = told("rank {rank}: {text}", "log", rank=rank, text=received(str(details.get("note"))))
            log.error("ncclguard: %s", "\n  ".join([note, *shown]))


Witness = Callable[[int], Cause]
Seek = Callable[[Sequence[int], float], None]
Describe = Callable[[GroupState, Report], Report]


class Revocation:
    """Answers once, coordinates when it is this rank's turn, and adopts the verdict whoever wrote it."""

    def __init__(
        self,
        store: AgreementStore,
        state: GroupState,
        generation: int,
        revoker: int,
        now: float,
        timing: Timing | None = None,
        pace: Pace | None = None,
        has_store: bool = False,
    ) -> None:
        self.state = state
        self.generation = generation
        self._store = store.below(f"{state.key}/{generation}")
        self._results = store.below(f"{state.key}/result")
        self._members = state.member.participants
        self._rank = state.member.rank
        self._revoker = revoker
        self._since = now
        self._timing = timing or Timing()
        self._pace = pace or Pace()
        self._delay = 0.0  # the longest that was met from the revoke on, and what was left then of earlier ones
        self._answered = False
        self._pulse = (-1, now)
        # The first ranks look at once; the others, which are thousands, once these would have taken over.
        self._next_pulse = now if self._members.index(self._rank) < FIRST_PLACES else now + self._timing.takeover
        self._arrivals = Entries("reports", "arrival")
        self._reports: dict[int, Report] = {}
        self._last_arrival = now
        self._deadline: float | None = None
        self._sought = 0.0  # when the processes of those that had not answered were first looked for
        self._fetcher = StackFetcher(self._store, self._rank, self._timing.look_after)
        self._has_store = has_store
        self._decided = 0.0  # when the verdict was there
        self.verdict: Verdict | None = None

    @property
    def coordinates(self) -> bool:
        """Return whether this rank is to decide."""
        return self._revoker == self._rank

    def step(
        self,
        now: float,
        departed: dict[int, Departure],
        describe: Describe,
        witness: Witness,
        summarise: Summarise,
        here: Sequence[int] = (),
        fetch: Fetch | None = None,
        seek: Seek | None = None,
    ) -> bool:
        """Do what can be done without waiting; True once the verdict is adopted."""
        self._delay = max(self._delay, self._pace.delay(now))
        text = self._store.find("verdict", self._timing.period)
        if text is not None:
            return self._end(codec.loads_verdict(text), now)
        if not self._answered:
            self._answer(describe, now)
        overdue = self._overdue(now)
        if fetch is not None and overdue >= self._timing.look_after:
            awaited = [rank for rank in here if rank not in departed and rank not in self._reports]
            self._fetcher.step(overdue, self._members, awaited, fetch)
        coordinated = self.coordinates
        if not self._my_turn(now):
            return False
        self._gather(now)
        if not coordinated:  # who only waits does not read all departures: `departed` lacks some until the next step
            return False
        missing = [r for r in self._members if r not in self._reports and r not in departed]
        silent: dict[int, Cause | None] = {}
        if missing:
            if seek is not None and overdue >= self._timing.look_after:
                self._sought = self._sought or now
                seek(missing, self._sought)
            if not self._patience_over(now):
                return False
            self._read_reports(missing[:BATCH], now)  # of ranks that ended before they could say that theirs is there
            still = [rank for rank in missing if rank not in self._reports]
            sightings, fetching = self._fetcher.sightings(still)
            # One that runs is not stuck: its machine is busy, and its answer will come. That may be so as well where
            # it takes long to see whether it does.
            running = fetching | {rank for rank, details in sightings.items() if details.get("runs")}
            if running and not self._timing.is_over(overdue):
                return False
            self.state.saw(sightings)
            # What a rank of its host has seen holds also where the host was cut off, and is not long back.
            stopped = {rank for rank, details in sightings.items() if details.get("stopped")}
            silent = {rank: Cause.STUCK if rank in stopped else witness(rank) for rank in still}
            silent.update(dict.fromkeys(running))
        among = frozenset(self._members)
        gone = {rank: d for rank, d in departed.items() if rank in among}
        self.state.decides(now - self._since)
        reports = waits_outside(elsewhere_long_enough(self._reports))
        verdict = self.state.judge(self.generation, self._members, reports, gone, silent, self._rank, summarise)
        if verdict.incident:
            self._store.put(
                "histories", histories(self._reports, gone, verdict.culprit_ranks)
            )  # before the verdict, on the same connection
        text = self._store.first("verdict", codec.dumps(verdict))
        self._store.tell_host("verdict", text)
        return self._end(codec.loads_verdict(text), now)

    def step_without_store(self) -> bool:
        """Adopt the verdict where a rank of this host has told it; True once it is."""
        text = self._store.told_here("verdict")
        if text is None:
            return False
        try:
            self._adopt(codec.loads_verdict(text))
        except StoreUnavailable:  # it has to have the result from there
            return False
        return True

    def _answer(self, describe: Describe, now: float) -> None:
        began = time.monotonic()
        report = describe(self.state, self.state.answer())
        took = time.monotonic() - began  # what took long here may take as long on the others
        self._pace.met(took, now + took)
        self._delay = max(self._delay, took)
        leave_result(self._results, self.state)  # before the report, on the same connection
        self._store.first(f"report/{self._rank}", codec.dumps(report))
        self._store.tell_host(f"report/{self._rank}")
        self._arrivals.add(self._store, str(self._rank))
        self._reports[self._rank] = report
        self._answered = True
        self._note_deadline(report, self._since)
        self.state.stop_transport(self.generation)

    def _my_turn(self, now: float) -> bool:
        if self.coordinates:
            return True
        if now < self._next_pulse:
            return False
        place = self._members.index(self._rank)
        # A late place has time: in a large job most never look twice.
        self._next_pulse = now + self._timing.takeover * (1 + place) / 4
        pulse = self._store.recent("pulse", self._timing.period)
        if pulse != self._pulse[0]:
            self._pulse = (pulse, now)
        if not self._timing.taken_over(place, now - self._pulse[1], self._delay):
            return False
        self._revoker = self._rank
        return True

    def _gather(self, now: float) -> None:
        """Read the reports that have come since; the pulse moves in between, because there may be thousands."""
        self._store.count("pulse", 1)
        self._read_reports([int(rank) for rank in self._arrivals.new(self._store)], now)

    def _read_reports(self, ranks: list[int], now: float) -> None:
        for start in range(0, len(ranks), BATCH):
            some = {f"report/{rank}": rank for rank in ranks[start : start + BATCH] if rank not in self._reports}
            for key, text in self._store.read_many(list(some)).items():
                self._reports[some[key]] = codec.loads_report(text)
                self._last_arrival = now
                self._note_deadline(self._reports[some[key]], now)
            if start:
                self._store.count("pulse", 1)

    def _note_deadline(self, report: Report, now: float) -> None:
        if report.budget is not None:
            stuck = report.trouble is not None and report.trouble.kind is TroubleKind.STUCK
            deadline = now + (0.0 if stuck else max(report.budget, 0.0))
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _patience_over(self, now: float) -> bool:
        """Return whether a silent rank has had its time.

        Silence never ends an operation before its deadline; one whose caller has gone,
        or that nobody is in, has none left.
        """
        return self._timing.is_silence(self._overdue(now), now - self._last_arrival, self._delay)

    def _overdue(self, now: float) -> float:
        """Seconds since the members should have answered."""
        return now - (self._since if self._deadline is None else max(self._since, self._deadline))

    def histories(self) -> str | None:
        """Return what the ranks remember of their last operations, left by the coordinator beside its verdict."""
        with contextlib.suppress(StoreUnavailable):  # the verdict is there
            return self._store.read("histories")
        return None

    def _end(self, verdict: Verdict, now: float) -> bool:
        """Adopt the verdict; in the process that may have the store only once the others have, or after a moment.

        Its program may end at once, by `os._exit` say, and nobody could read the verdict any more.
        """
        self._decided = self._decided or now
        if self._has_store and verdict.action is not Action.RESUME and now < self._decided + self._timing.linger:
            others = self._arrivals.count(self._store) - self._answered  # those that are silent do not come for it
            if self._store.count("adopted") < others:
                return False
        self._adopt(verdict)
        return True

    def _adopt(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self._fetcher.closed = True
        with self.state.condition:
            operation = self.state.member.operation
        # A result is of use only where the others have completed what this rank is in.
        over = operation is not None and (verdict.action is Action.COMMIT or operation.sequence < verdict.sequence)
        wanted = operation is not None and not operation.closing and over
        donated = self._results.read(str(operation.sequence)) if operation is not None and wanted else None
        with contextlib.suppress(StoreUnavailable):  # the verdict is there
            self._store.count("adopted", 1)
        self.state.adopt(verdict, donated)
        self.state.stop_transport(self.generation)


def leave_result(results: AgreementStore, state: GroupState) -> None:
    """Leave the result this rank keeps, under its sequence number; every donor has the same one."""
    kept = state.kept_result()
    if kept is not None:
        number, result = kept
        results.put(str(number), result)


def read_revoke(store: AgreementStore, key: str, generation: int, within: float = 0.0) -> int | None:
    """The rank that revoked this generation first, or None; as it was in the last `within` seconds."""
    text = store.find(f"{key}/{generation}/revoke", within)
    return None if text is None else int(json.loads(text)["by"])


def revoke(store: AgreementStore, key: str, generation: int, rank: int, hold: float = 0.0) -> int | None:
    """Revoke a generation; returns the rank whose revoke came first.

    None where another rank of this host went to do so in the last `hold` seconds, and its answer is not here yet.
    """
    key = f"{key}/{generation}/revoke"
    text = store.told_here(key)
    if text is None:
        if store.left_to_another(key, hold):
            return None
        text = store.first(key, json.dumps({"by": rank}))
        store.tell_host(key, text)
    return int(json.loads(text)["by"])
