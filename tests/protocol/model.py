"""A model of everything around the protocol's production code: callers, monitors, store and wire, with every order of steps.

The state machine and the decisions are the real ones (`Member`, `decide`); what is modelled is how they are driven. One `World` is one
state; `steps()` lists what may happen next, each a name and a function that changes a copy. Time is not modelled: a deadline may
pass at any step, a coordinator may take over at any step. Tensors are modelled by piece: "I" holds the input, "T" is torn, a
tuple of ranks holds the complete sum over them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ncclguard.agreement.decision import (
    Action,
    Departure,
    Operation,
    Phase,
    Report,
    Trouble,
    TroubleKind,
    Verdict,
    decide,
)
from ncclguard.agreement.protocol import Entry, Member, Resolution
from ncclguard.outcome import Cause

Label = tuple[str, int, int]  # what is sent: "open" | "piece" | "close", sequence, fingerprint or piece
Content = str | tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of a rank's program."""

    fingerprint: int
    closing: bool
    pieces: int = 1
    shrink: bool = False


@dataclass(frozen=True)
class Result:
    """What a call returned."""

    call: int
    sequence: int
    ok: bool
    agreed: bool
    cause: Cause | None
    culprits: tuple[int, ...]
    content: tuple[Content, ...]


@dataclass(slots=True)
class Rank:
    """One process: its member, where its caller is, and its tensor."""

    member: Member
    at: str = "idle"  # idle | queued | open | piece | close | wait | end
    call: int = 0
    generation: int = 0
    index: int = 0  # collectives sent on this generation; the current one is the last
    piece: int = 0
    content: tuple[Content, ...] = ()
    results: tuple[Result, ...] = ()
    resolution: tuple[Resolution, Verdict, tuple[int, ...] | None] | None = None
    stopped: int = -1  # the transport of generations up to this one is stopped here
    answered: int = -1
    draft: Verdict | None = None  # decided, not yet written
    read: frozenset[int] = frozenset()  # whose reports the draft rests on
    alive: bool = True
    paused: bool = False
    ended: bool = False
    late: bool = False  # a deadline of the current call has passed


class Broken(AssertionError):
    """An invariant does not hold."""


class World:
    """One state of the whole job."""

    def __init__(
        self, scripts: tuple[tuple[Call, ...], ...], faults: int, kinds: frozenset[str], mutant: str = ""
    ) -> None:
        members = tuple(range(len(scripts)))
        self.scripts = scripts
        self.kinds = kinds
        self.mutant = mutant
        self.budget = faults
        self.deadlines = 2
        self.ranks = [Rank(Member(rank, members)) for rank in members]
        self.sent: dict[tuple[int, int], tuple[Label, ...]] = {}  # generation, rank -> labels in order
        self.revoked: frozenset[int] = frozenset()
        self.reports: dict[tuple[int, int], Report] = {}
        self.verdicts: dict[int, Verdict] = {}
        self.covered: dict[int, frozenset[int]] = {}  # generation -> ranks whose report the verdict rests on
        self.results: dict[int, tuple[int, ...]] = {}  # donated results: sequence -> participants
        self.departed: dict[int, Departure] = {}
        self.faulty: frozenset[int] = frozenset()
        self.broken: frozenset[int] = frozenset()  # generations on which the transport failed somewhere

    def copy(self) -> World:
        world = copy.copy(self)
        world.ranks = [copy.copy(rank) for rank in self.ranks]
        for rank in world.ranks:
            rank.member = copy.copy(rank.member)
        for name in ("sent", "reports", "verdicts", "covered", "results", "departed"):
            setattr(world, name, dict(getattr(self, name)))
        return world

    def key(self) -> object:
        """Everything that distinguishes two states."""
        ranks = tuple(
            (_member_key(r.member), r.at, r.call, r.generation, r.index, r.piece, r.content, r.results, r.resolution,
             r.stopped, r.answered, _verdict_key(r.draft), r.read, r.alive, r.paused, r.ended, r.late)
            for r in self.ranks
        )  # fmt: skip
        store = (
            self.revoked, frozenset((k, _report_key(v)) for k, v in self.reports.items()),
            frozenset((k, _verdict_key(v)) for k, v in self.verdicts.items()), frozenset(self.results.items()),
            frozenset((k, v.cause, v.done) for k, v in self.departed.items()), frozenset(self.covered.items()),
        )  # fmt: skip
        return hash((ranks, frozenset(self.sent.items()), store, self.budget, self.deadlines, self.faulty, self.broken))

    # ------------------------------------------------------------------ what may happen next

    def steps(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        """Every step that is possible now, free steps first; faults as long as the budget lasts."""
        for rank, state in enumerate(self.ranks):
            if not state.alive:
                if rank not in self.departed and "witnessed" in self.kinds:
                    yield f"witness {rank}", lambda w, r=rank: w.witness(r)
                continue
            if state.paused:
                yield f"resume {rank}", lambda w, r=rank: setattr(w.ranks[r], "paused", False)
                continue
            yield from self._caller_steps(rank, state)
            yield from self._monitor_steps(rank, state)
            if self.budget and not state.ended:
                yield from self._fault_steps(rank, state)

    def _caller_steps(self, rank: int, state: Rank) -> Iterator[tuple[str, Callable[[World], None]]]:
        if state.at in ("idle", "queued") and not state.ended:
            if state.call == len(self.scripts[rank]):
                yield f"end {rank}", lambda w, r=rank: w.end(r)
            elif state.at == "idle" or not state.member.frozen:
                yield f"enter {rank}", lambda w, r=rank: w.enter(r)
        elif state.at in ("open", "piece", "close"):
            if state.stopped < state.generation and self._everybody_sent(rank, state):
                yield f"pass {rank}", lambda w, r=rank: w.passed(r)
            if state.stopped >= state.generation or self._cut(rank, state):
                yield f"error {rank}", lambda w, r=rank: w.trouble(r, TroubleKind.TRANSPORT)
            if self.deadlines and not state.late:
                yield f"deadline {rank}", lambda w, r=rank: w.deadline(r)
            for other, departure in self.departed.items():
                operation = state.member.operation
                if operation and other in state.member.participants and departure.done < operation.sequence:
                    yield f"told {rank}", lambda w, r=rank: w.trouble(r, TroubleKind.DEPARTED)
        elif state.at == "checked":  # the mutant without a lock, between looking and acting
            yield f"act {rank}", lambda w, r=rank: w.act(r)
        elif state.at == "wait" and state.resolution is not None:
            yield f"resolve {rank}", lambda w, r=rank: w.resolve(r)

    def _monitor_steps(self, rank: int, state: Rank) -> Iterator[tuple[str, Callable[[World], None]]]:
        member = state.member
        generation = member.generation
        if rank not in member.participants or (state.ended and rank in self.departed):
            return
        if generation in self.verdicts:
            yield f"adopt {rank}", lambda w, r=rank: w.adopt(r)
            if self.mutant == "no compare-and-set" and state.draft is not None:
                yield f"write {rank}", lambda w, r=rank: w.write(r)
            return
        if generation not in self.revoked:
            if member.trouble is not None:
                yield f"revoke {rank}", lambda w, r=rank: w.revoke(r)
            return
        if state.answered < generation:
            yield f"answer {rank}", lambda w, r=rank: w.answer(r)
        elif state.draft is not None:
            yield f"write {rank}", lambda w, r=rank: w.write(r)
        elif self._may_decide(rank, generation):
            yield f"decide {rank}", lambda w, r=rank: w.decide(r)

    def _fault_steps(self, rank: int, state: Rank) -> Iterator[tuple[str, Callable[[World], None]]]:
        if "crash" in self.kinds:
            yield f"crash {rank}", lambda w, r=rank: w.crash(r)
        if "pause" in self.kinds:
            yield f"pause {rank}", lambda w, r=rank: w.pause(r)
        if state.at in ("open", "piece", "close"):
            if "reset" in self.kinds:
                yield f"reset {rank}", lambda w, r=rank: w.reset(r)
            if "raise" in self.kinds:
                yield f"raise {rank}", lambda w, r=rank: w.raises(r)
        if "exit" in self.kinds and state.at == "idle" and state.call < len(self.scripts[rank]):
            yield f"exit {rank}", lambda w, r=rank: w.exits(r)

    def _everybody_sent(self, rank: int, state: Rank) -> bool:
        return all(
            len(self.sent.get((state.generation, other), ())) >= state.index for other in state.member.participants
        )

    def _cut(self, rank: int, state: Rank) -> bool:
        """A peer's end of this generation is stopped, or its process is gone: the wait may fail."""
        return state.generation in self.broken or any(
            not self.ranks[other].alive or self.ranks[other].ended or self.ranks[other].stopped >= state.generation
            for other in state.member.participants
        )

    def _may_decide(self, rank: int, generation: int) -> bool:
        missing = self._missing(rank, generation)
        return not missing or any(r.late for r in self.ranks if r.generation == generation or r.at == "wait")

    def _missing(self, rank: int, generation: int) -> list[int]:
        members = self.ranks[rank].member.participants
        return [m for m in members if (generation, m) not in self.reports and m not in self.departed]

    # ------------------------------------------------------------------ the caller

    def enter(self, rank: int) -> None:
        state = self.ranks[rank]
        call = self.scripts[rank][state.call]
        operation = Operation(0, call.fingerprint, closing=call.closing, shrink=call.shrink)
        entry, verdict = state.member.enter(operation)
        state.content = ("I",) * call.pieces
        state.late = False
        if entry is Entry.WAIT:
            state.at = "queued"
        elif entry is Entry.START:
            state.generation = state.member.generation
            self._begin(rank, 0)
        elif entry is Entry.SETTLED and verdict is not None:
            if call.fingerprint not in verdict.fingerprints:
                raise Broken(f"rank {rank} took the verdict of another operation")
            ok = verdict.action is Action.COMMIT
            if ok:
                state.content = (self.results[verdict.sequence],) * call.pieces
            self._return(rank, verdict.sequence, ok, verdict.cause, verdict.culprit_ranks)
        else:
            lost = tuple(sorted(r for r, _ in state.member.lost))
            sequence = state.member.next_sequence - 1
            cause = state.member.lost[0][1] if lost else Cause.LATE
            self._return(rank, sequence, False, cause, lost, agreed=entry is Entry.LOST)

    def _begin(self, rank: int, piece: int) -> None:
        state = self.ranks[rank]
        state.generation = state.member.generation
        state.index = len(self.sent.get((state.generation, rank), ()))
        state.piece = piece
        operation = state.member.operation
        assert operation is not None
        self._send(rank, "open", operation.fingerprint)

    def _send(self, rank: int, kind: str, value: int) -> None:
        state = self.ranks[rank]
        operation = state.member.operation
        assert operation is not None
        key = (state.generation, rank)
        self.sent[key] = (*self.sent.get(key, ()), (kind, operation.sequence, value))
        state.index = len(self.sent[key])
        state.at = kind

    def passed(self, rank: int) -> None:
        """The collective this rank waits in has passed here; what comes next."""
        state = self.ranks[rank]
        member, call = state.member, self.scripts[rank][state.call]
        labels = {self.sent[state.generation, other][state.index - 1] for other in member.participants}
        if state.at == "open":
            if len(labels) > 1:
                if any(kind == "piece" for kind, _, _ in labels):
                    raise Broken("a round met data")
                self.trouble(rank, TroubleKind.MISMATCH)
            elif not member.opened(state.generation):
                state.at = "wait"
            else:
                self._next_piece(rank, call)
            return
        if len(labels) > 1:
            raise Broken(f"different operations exchanged data: {labels}")
        if state.at == "piece":
            content = list(state.content)
            content[state.piece] = member.participants
            state.content = tuple(content)
            state.piece += 1
            if not member.progressed(state.generation, state.piece, 0) and self.mutant != "no promise":
                state.at = "wait"
                return
            self._next_piece(rank, call)
        else:
            self._finish(rank)

    def _next_piece(self, rank: int, call: Call) -> None:
        state = self.ranks[rank]
        if state.piece < call.pieces:
            content = list(state.content)
            if content[state.piece] != "I":
                raise Broken(f"rank {rank} sends a piece that does not hold its input")
            content[state.piece] = "T"
            state.content = tuple(content)
            self._send(rank, "piece", state.piece)
        elif call.closing and self.mutant == "no lock":
            frozen = state.member.frozen or state.member.generation != state.generation
            state.at = "wait" if frozen else "checked"
        elif call.closing and self.mutant != "no closing round":
            if state.member.ready(state.generation) or self.mutant == "no promise":
                self._send(rank, "close", 0)
            else:
                state.at = "wait"
        else:
            if call.closing:
                state.member.ready(state.generation)
            self._finish(rank)

    def act(self, rank: int) -> None:
        """What `ready` does after it has looked, without looking again."""
        state = self.ranks[rank]
        if state.member.operation is None or state.resolution is not None:
            state.at = "wait"
            return
        state.member.phase = Phase.READY
        self._send(rank, "close", 0)

    def _finish(self, rank: int) -> None:
        state = self.ranks[rank]
        operation = state.member.operation
        done = state.member.done(state.generation)
        if done or (self.mutant == "no promise" and operation is not None):
            assert operation is not None
            self._return(rank, operation.sequence, True, None, ())
        else:
            state.at = "wait"

    def trouble(self, rank: int, kind: TroubleKind) -> None:
        state = self.ranks[rank]
        if kind is TroubleKind.TRANSPORT:
            self.broken |= {state.generation}
        state.member.in_trouble(state.generation, Trouble(kind))
        state.stopped = max(state.stopped, state.generation)
        state.at = "wait"

    def resolve(self, rank: int) -> None:
        state = self.ranks[rank]
        assert state.resolution is not None
        (resolution, verdict, donated), state.resolution = state.resolution, None
        call = self.scripts[rank][state.call]
        sequence = state.member.next_sequence - 1
        if resolution is Resolution.COMMITTED:
            self._return(rank, sequence, True, None, ())
        elif resolution is Resolution.DONATED and donated is not None:
            state.content = (donated,) * call.pieces
            self._return(rank, sequence, True, None, ())
        elif resolution in (Resolution.RESUMED, Resolution.RESTARTED):
            piece = verdict.from_piece if resolution is Resolution.RESUMED else 0
            kept = state.content[:piece]
            if any(content in ("I", "T") for content in kept):
                raise Broken(
                    f"rank {rank} resumes at piece {piece}, but an earlier one is not complete: {state.content}"
                )
            state.content = kept + ("I",) * (call.pieces - piece)
            self._begin(rank, piece)
        elif resolution is Resolution.LOST:
            state.content = ("I",) * call.pieces
            cause = verdict.departed[0][1]
            self._return(rank, sequence, False, cause, tuple(sorted(r for r, _ in verdict.departed)))
        else:
            state.content = ("I",) * call.pieces
            agreed = resolution is Resolution.FAILED
            self._return(rank, sequence, False, verdict.cause, verdict.culprit_ranks, agreed=agreed)

    def _return(
        self, rank: int, sequence: int, ok: bool, cause: Cause | None, culprits: tuple[int, ...], agreed: bool = True
    ) -> None:
        state = self.ranks[rank]
        result = Result(state.call, sequence, ok, agreed, cause, culprits, state.content)
        state.results = (*state.results, result)
        state.call += 1
        state.at = "idle"
        state.late = False
        self._check_result(rank, result)

    def end(self, rank: int) -> None:
        """The program has ended: a departure with what was completed."""
        state = self.ranks[rank]
        state.ended = True
        state.at = "end"
        self._leave_result(state)
        self.departed.setdefault(rank, Departure(rank, Cause.EXITED, done=state.member.completed))

    # ------------------------------------------------------------------ the monitor and the store

    def revoke(self, rank: int) -> None:
        self.revoked |= {self.ranks[rank].member.generation}

    def answer(self, rank: int) -> None:
        state = self.ranks[rank]
        generation = state.member.generation
        report = state.member.freeze()
        if self.mutant == "no promise":
            state.member.frozen = state.member.trouble is not None
        self._leave_result(state)
        self.reports[generation, rank] = report
        state.answered = generation
        state.stopped = max(state.stopped, generation) if self.mutant != "no promise" else state.stopped

    def _leave_result(self, state: Rank) -> None:
        if state.member.kept:
            for result in state.results:
                if result.sequence == state.member.kept and result.ok:
                    content = result.content[0]
                    assert isinstance(content, tuple)
                    self.results.setdefault(result.sequence, content)

    def decide(self, rank: int) -> None:
        state = self.ranks[rank]
        generation, members = state.member.generation, state.member.participants
        reports = {m: self.reports[generation, m] for m in members if (generation, m) in self.reports}
        gone = {m: d for m, d in self.departed.items() if m in members}
        silent = {m: Cause.STUCK for m in self._missing(rank, generation)}
        state.read = frozenset(reports)
        state.draft = decide(generation, members, reports, gone, silent, coordinator=rank)
        if self.mutant == "resume at the maximum":
            furthest = max((r.first_incomplete for r in reports.values()), default=0)
            state.draft = replace(state.draft, from_piece=furthest)

    def write(self, rank: int) -> None:
        state = self.ranks[rank]
        verdict, state.draft = state.draft, None
        generation = state.member.generation
        assert verdict is not None
        if verdict.generation == generation and (
            generation not in self.verdicts or self.mutant == "no compare-and-set"
        ):
            self.verdicts[generation] = verdict
            self.covered[generation] = state.read

    def adopt(self, rank: int) -> None:
        state = self.ranks[rank]
        member = state.member
        generation = member.generation
        state.draft = None
        verdict = self.verdicts[generation]
        operation = member.operation
        if self.mutant == "no generation" and generation > 0:
            verdict = replace(self.verdicts[0], generation=generation)
        resolution = member.adopt(verdict)
        donated = self.results.get(operation.sequence) if operation is not None else None
        if resolution is Resolution.DONATED and donated is None:
            resolution = Resolution.MISSED
        state.stopped = max(state.stopped, generation)
        if resolution is not None:
            state.resolution = (resolution, verdict, donated)
            state.at = "wait"

    # ------------------------------------------------------------------ faults

    def _fault(self, rank: int, blame: bool = True) -> Rank:
        self.budget -= 1
        if blame:
            self.faulty |= {rank}
        return self.ranks[rank]

    def crash(self, rank: int) -> None:
        self._fault(rank).alive = False

    def witness(self, rank: int) -> None:
        self.departed[rank] = Departure(rank, Cause.LOST)

    def pause(self, rank: int) -> None:
        self._fault(rank).paused = True

    def reset(self, rank: int) -> None:
        self._fault(rank, blame=False)
        self.trouble(rank, TroubleKind.TRANSPORT)

    def raises(self, rank: int) -> None:
        self._fault(rank)
        self.trouble(rank, TroubleKind.RAISED)

    def exits(self, rank: int) -> None:
        self._fault(rank)
        self.end(rank)

    def deadline(self, rank: int) -> None:
        self.deadlines -= 1
        self.ranks[rank].late = True
        self.trouble(rank, TroubleKind.DEADLINE)

    # ------------------------------------------------------------------ invariants

    def _check_result(self, rank: int, result: Result) -> None:
        """Intact, one verdict, nobody healthy named: checked as soon as a call returns."""
        if result.ok and (len(set(result.content)) > 1 or any(c in ("I", "T") for c in result.content)):
            raise Broken(f"rank {rank} returns a success with {result.content}")
        if not result.ok and any(c != "I" for c in result.content):
            raise Broken(f"rank {rank} returns a failure with {result.content}")
        for other, state in enumerate(self.ranks):
            for theirs in state.results:
                if other == rank or theirs.sequence != result.sequence or not (theirs.agreed and result.agreed):
                    continue
                same = (theirs.ok, theirs.cause, theirs.culprits) == (result.ok, result.cause, result.culprits)
                if not same and not self._excused(rank, result) and not self._excused(other, theirs):
                    raise Broken(f"operation {result.sequence}: rank {rank} {result}, rank {other} {theirs}")
                if theirs.ok and result.ok and set(theirs.content) != set(result.content):
                    raise Broken(
                        f"operation {result.sequence}: two different sums, {theirs.content} and {result.content}"
                    )

    def _excused(self, rank: int, result: Result) -> bool:
        """A rank that was silent when the verdict on the operation was written, and has completed it without closing round."""
        return result.ok and any(
            verdict.sequence == result.sequence and verdict.action is Action.FAIL and rank not in self.covered[g]
            for g, verdict in self.verdicts.items()
        )

    def check_verdicts(self, scripted_odd: frozenset[int]) -> None:
        """Only ranks at which a fault was injected are named; deadlines and scripts that differ count for those they hold up."""
        for verdict in self.verdicts.values():
            named = set(verdict.culprit_ranks)
            allowed = self.faulty | scripted_odd
            wrong = {
                r
                for r, cause in verdict.culprits
                if r not in allowed
                and cause is not Cause.LATE
                and cause is not Cause.EXITED
                and cause is not Cause.STUCK
            }
            if wrong:
                raise Broken(f"healthy ranks {sorted(wrong)} of {sorted(named)} are named: {verdict}")

    def check_end(self) -> None:
        """Nothing can happen any more: every live rank that runs has ended its program."""
        for rank, state in enumerate(self.ranks):
            if state.alive and not state.paused and not state.ended:
                raise Broken(f"rank {rank} never ends: {state.at} in call {state.call}, {state.member}")
        for rank, state in enumerate(self.ranks):
            for result in state.results:
                if self._excused(rank, result) and state.alive and not self._was_told(state, result):
                    raise Broken(f"rank {rank} was never told that operation {result.sequence} failed for the others")

    def _was_told(self, state: Rank, result: Result) -> bool:
        return any(v.sequence == result.sequence for v in state.member.overruled) or rank_departed(self, state)


def rank_departed(world: World, state: Rank) -> bool:
    """It had left before the verdict, so there was nobody to tell."""
    return state.member.rank in world.departed


def _member_key(m: Member) -> object:
    return (
        m.participants, m.generation, m.next_sequence, m.completed, m.kept, m.operation, m.phase, m.first_incomplete,
        m.attempt, m.frozen, m.trouble, tuple(_verdict_key(v) for v in m.settled), m.committed_through,
        len(m.overruled), m.lost, m.fenced,
    )  # fmt: skip


def _report_key(r: Report) -> object:
    return (r.rank, r.generation, r.done, r.operation, r.phase, r.first_incomplete, r.attempt, r.trouble)


def _verdict_key(v: Verdict | None) -> object:
    if v is None:
        return None
    return (
        v.generation,
        v.sequence,
        v.action,
        v.cause,
        v.culprits,
        v.participants,
        v.departed,
        v.from_piece,
        v.attempt,
    )
