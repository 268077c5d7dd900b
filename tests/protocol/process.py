"""One rank of the model: the production `Member`, driven as the guard and its monitor drive it, in immutable steps.

A `Process` is a value; every step takes one and returns the next. What a step touches outside of its rank comes back with it:
a result, a revoke, a report. Tensors are modelled by piece: `INPUT`, `TORN`, `GARBAGE` (restored from a backup that is not its own),
or the set of ranks whose sum is complete, as a bit mask.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

from ncclguard.outcome import Cause
from ncclguard.protocol.decision import PRECEDENCE, Action, Operation, Report, Trouble, TroubleKind, Verdict
from ncclguard.protocol.member import Entry, Member, Resolution

INPUT, TORN, GARBAGE = 0, -1, -2
IN_CALL = frozenset({"open", "piece", "close"})

Label = tuple[
    object, ...
]  # what a collective is: ("open", sequence, fingerprint, from piece), ("piece", sequence, piece), ...


class Broken(AssertionError):
    """An invariant of docs/protocol.md does not hold."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a rank's program. `window` is the number of pieces whose inputs are kept; 0 keeps all (`atomic=True`).

    Where all ranks `meet` in its data, these are the opening round: each stream begins with the mark, and no rank can
    complete its first piece before all have entered.
    """

    fingerprint: int
    closing: bool
    pieces: int = 1
    shrink: bool = False
    window: int = 0
    meets: bool = False

    def restorable_after(self, piece: int) -> int:
        """The first piece that can be restored once `piece` has been submitted."""
        return max(0, piece + 1 - self.window) if self.window else 0


class Result(NamedTuple):
    """What a call returned; `total` is the set of ranks in the sum, as a bit mask, 0 on failure."""

    sequence: int
    ok: bool
    agreed: bool
    cause: Cause | None
    culprits: tuple[int, ...]
    total: int
    fingerprint: int
    closing: bool


class Snapshot:
    """A member that does not change any more; equal ones are the same object."""

    __slots__ = ("key", "member")
    _all: ClassVar[dict[tuple[object, ...], Snapshot]] = {}
    _fields = tuple(field.name for field in fields(Member))

    def __init__(self, member: Member, key: tuple[object, ...]) -> None:
        self.member = member
        self.key = key

    @classmethod
    def of(cls, member: Member) -> Snapshot:
        key = (type(member), *(getattr(member, name) for name in cls._fields))
        found = cls._all.get(key)
        if found is None:
            found = cls._all[key] = cls(member, key)
        return found


class Process(NamedTuple):
    """One process: its member, where its caller is, and its tensor."""

    snapshot: Snapshot
    at: str = "idle"  # idle | open | piece | close | checked | wait | end | dead
    call: int = 0
    generation: int = 0  # of the attempt
    group: tuple[int, ...] = ()  # participants of the attempt
    logs: tuple[tuple[int, tuple[Label, ...]], ...] = ()  # generation -> collectives sent on it
    piece: int = 0
    content: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()  # which piece's input each backup slot holds
    keep: int = 0  # the sum that is kept for donation

    @property
    def member(self) -> Member:
        return self.snapshot.member

    def log(self, generation: int) -> tuple[Label, ...]:
        for number, labels in self.logs:
            if number == generation:
                return labels
        return ()


class Step(NamedTuple):
    """Where a step leads, and what it shows to the others."""

    process: Process
    result: Result | None = None
    revoke: bool = False
    report: Report | None = None
    donation: tuple[int, int] | None = None  # sequence, sum


def mask(ranks: Sequence[int]) -> int:
    return sum(1 << rank for rank in ranks)


class Draft:
    """A process in the middle of a step."""

    def __init__(self, process: Process) -> None:
        self.before = process
        self.member = copy.copy(process.member)
        self.at = process.at
        self.call = process.call
        self.generation = process.generation
        self.group = process.group
        self.logs = dict(process.logs)
        self.piece = process.piece
        self.content = list(process.content)
        self.slots = list(process.slots)
        self.keep = process.keep

    def end(self, result: Result | None = None, **shown: object) -> Step:
        if self.member.operation is None:  # nobody reads these then: fewer states
            self.member.first_incomplete = self.member.restorable_from = 0
            self.member.attempt = 1
        process = Process(
            Snapshot.of(self.member), self.at, self.call, self.generation, self.group, tuple(sorted(self.logs.items())),
            self.piece, tuple(self.content), tuple(self.slots), self.keep,
        )  # fmt: skip
        return Step(process, result, **shown)  # type: ignore[arg-type]


class Driver:
    """The steps of one rank's caller and monitor. Mutations override what they break."""

    member_class: type[Member] = Member

    def __init__(self, rank: int, members: tuple[int, ...], program: tuple[Call, ...]) -> None:
        self.rank = rank
        self.members = members
        self.program = program

    def start(self) -> Process:
        return Process(Snapshot.of(self.member_class(self.rank, self.members)))

    # ------------------------------------------------------------------ the caller

    def enter(self, process: Process) -> Step:
        """Begin the next call; while the generation is frozen the caller waits for the verdict first."""
        draft = Draft(process)
        call = self.program[process.call]
        entry, verdict = draft.member.enter(Operation(0, call.fingerprint, closing=call.closing, shrink=call.shrink))
        if entry is Entry.WAIT:
            return draft.end()
        draft.content, draft.slots = [INPUT] * call.pieces, [-1] * call.window
        if entry is Entry.START:
            return self._begin(draft, 0)
        sequence = draft.member.next_sequence - 1
        if entry is Entry.SETTLED:
            assert verdict is not None
            if call.fingerprint not in verdict.fingerprints or verdict.sequence != sequence:
                raise Broken(f"rank {self.rank} takes the verdict of another operation: {verdict}")
            if verdict.action is Action.COMMIT:
                raise Broken(f"operation {sequence} was committed before rank {self.rank} called it")
            return self._return(draft, sequence, False, verdict.cause, verdict.culprit_ranks)
        if entry is Entry.LOST:
            return self._lost(draft, sequence)
        return self._return(draft, sequence, False, None, (), agreed=False)

    def passed(self, process: Process, same: bool) -> Step:
        """The collective this rank waits in has passed here; `same`: every rank sent the same one."""
        draft = Draft(process)
        if process.at == "open":
            if not same:
                revoke = draft.member.in_trouble(draft.generation, Trouble(TroubleKind.MISMATCH))
                return draft.end(revoke=revoke)
            if not self.program[process.call].meets:
                return self._next(draft) if draft.member.opened(draft.generation) else self._wait(draft)
        if not same:
            raise Broken(f"different collectives exchanged data: {process.log(process.generation)}")
        if process.at in ("open", "piece"):
            draft.content[draft.piece] = mask(draft.group)
            draft.piece += 1
            return self._next(draft)
        return self._finish(draft)

    def act(self, process: Process) -> Step:
        """The second half of a step that a mutation has split in two."""
        raise NotImplementedError

    def trouble(self, process: Process, kind: TroubleKind) -> Step:
        draft = Draft(process)
        return draft.end(revoke=draft.member.in_trouble(draft.generation, Trouble(kind)))

    def give_up(self, process: Process) -> Step:
        """Return a local verdict because none came."""
        draft = Draft(process)
        operation = draft.member.operation
        assert operation is not None
        draft.member.give_up()
        return self._return(draft, operation.sequence, False, None, (), agreed=False)

    def skip(self, process: Process) -> Step:
        """Give up a call that could not even enter, because the verdict on the generation before did not come."""
        draft = Draft(process)
        call = self.program[process.call]
        draft.member.skip(Operation(0, call.fingerprint, closing=call.closing, shrink=call.shrink))
        return self._return(draft, draft.member.next_sequence - 1, False, None, (), agreed=False)

    def no_turn(self, process: Process) -> Step:
        """Give up a call that another thread's kept from entering; it has to fail for the others."""
        draft = Draft(process)
        call = self.program[process.call]
        draft.member.skip(Operation(0, call.fingerprint, closing=call.closing, shrink=call.shrink))
        revoke = bool(draft.member.abandoned)
        if revoke:
            draft.member.in_trouble(draft.member.generation, Trouble(TroubleKind.UNANSWERED))
        sequence = draft.member.next_sequence - 1
        return self._return(draft, sequence, False, None, (), agreed=False)._replace(revoke=revoke)

    def _begin(self, draft: Draft, piece: int) -> Step:
        operation = draft.member.operation
        assert operation is not None
        draft.generation, draft.group = draft.member.generation, draft.member.participants
        draft.piece = piece
        if self.program[draft.call].meets:
            draft.at = "begun"
            return self._next(draft)
        self._send(draft, "open", operation.sequence, operation.fingerprint, piece)
        return draft.end()

    def _send(self, draft: Draft, *label: object) -> None:
        channel = self.channel(draft.generation)
        draft.logs[channel] = (*draft.logs.get(channel, ()), label)
        draft.at = str(label[0])

    def channel(self, generation: int) -> int:
        """The communicator of a generation: each has its own."""
        return generation

    def _next(self, draft: Draft) -> Step:
        operation, call = draft.member.operation, self.program[draft.call]
        if operation is None:
            return self._wait(draft)
        if draft.piece < call.pieces:
            return draft.end() if self._submit(draft, call, operation) else self._wait(draft)
        restorable = call.restorable_after(call.pieces - 1)
        if call.pieces > 1 and not draft.member.progressed(draft.generation, draft.piece, restorable):
            return self._wait(draft)
        if call.meets and not draft.member.opened(draft.generation):
            return self._wait(draft)
        return self._close(draft, operation.sequence) if call.closing else self._finish(draft)

    def _close(self, draft: Draft, sequence: int) -> Step:
        """All data is complete here: say so, and only then send the closing round."""
        if not draft.member.ready(draft.generation):
            return self._wait(draft)
        self._send(draft, "close", sequence)
        return draft.end()

    def _submit(self, draft: Draft, call: Call, operation: Operation) -> bool:
        """What can be restored is recorded before the next piece overwrites it: the report must hold when it is read."""
        if call.pieces > 1:
            restorable = call.restorable_after(draft.piece)
            if not draft.member.progressed(draft.generation, draft.piece, restorable):
                return False
        self._send_piece(draft, call, operation)
        return True

    def _send_piece(self, draft: Draft, call: Call, operation: Operation) -> None:
        if draft.content[draft.piece] != INPUT:
            raise Broken(f"rank {self.rank} sends piece {draft.piece}, which does not hold its input: {draft.content}")
        if call.window:
            draft.slots[draft.piece % call.window] = draft.piece
        draft.content[draft.piece] = TORN
        if draft.at == "begun":
            self._send(draft, "open", operation.sequence, operation.fingerprint, draft.piece)
        else:
            self._send(draft, "piece", operation.sequence, draft.piece)

    def _finish(self, draft: Draft) -> Step:
        operation = draft.member.operation
        if operation is None or not draft.member.done(draft.generation):
            return self._wait(draft)
        if not operation.closing:
            draft.keep = mask(draft.group)
        return self._return(draft, operation.sequence, True, None, ())

    def _lost(self, draft: Draft, sequence: int) -> Step:
        lost = draft.member.lost
        cause = min((cause for _, cause in lost), key=PRECEDENCE.index)
        return self._return(draft, sequence, False, cause, tuple(rank for rank, _ in lost))

    def _wait(self, draft: Draft) -> Step:
        draft.at = "wait"
        return draft.end()

    def _return(
        self,
        draft: Draft,
        sequence: int,
        ok: bool,
        cause: Cause | None,
        culprits: tuple[int, ...],
        agreed: bool = True,
    ) -> Step:
        call = self.program[draft.call]
        total = 0
        if ok:
            totals = set(draft.content) or {mask(draft.group)}  # a barrier has no data
            total = totals.pop()
            if totals or total <= 0:
                raise Broken(f"rank {self.rank} returns a success with {draft.content}")
        draft.at, draft.call, draft.piece = "idle", draft.call + 1, 0
        draft.generation, draft.group, draft.content, draft.slots = 0, (), [], []
        return draft.end(Result(sequence, ok, agreed, cause, culprits, total, call.fingerprint, call.closing))

    # ------------------------------------------------------------------ the monitor

    def hear(self, process: Process) -> Step:
        """Answer the revoke: freeze, leave the kept result, report."""
        draft = Draft(process)
        report = draft.member.freeze()
        donation = (draft.member.kept, draft.keep) if draft.member.kept else None
        return draft.end(report=report, donation=donation)

    def adopt(self, process: Process, verdict: Verdict, donated: int) -> Step:
        """Take the verdict; the caller picks the resolution up at once."""
        draft = Draft(process)
        member, operation = draft.member, draft.member.operation
        overruled = verdict.action is Action.FAIL and member.completed >= verdict.sequence > 0
        resolution = member.adopt(verdict)
        if overruled and verdict not in member.overruled:
            raise Broken(f"rank {self.rank} is not told that operation {verdict.sequence} failed")
        member.overruled = ()
        if not member.kept:
            draft.keep = 0
        if resolution is None:
            return draft.end(revoke=member.trouble is not None)  # what was given up has to fail for the others
        assert operation is not None
        sequence = operation.sequence
        if resolution is Resolution.COMMITTED:
            return self._return(draft, sequence, True, None, ())
        if resolution is Resolution.DONATED:
            if not donated:
                raise Broken(f"operation {sequence} is committed, but nobody has left its result for rank {self.rank}")
            draft.content = [donated] * len(draft.content)
            draft.group = tuple(rank for rank in self.members if donated >> rank & 1)
            return self._return(draft, sequence, True, None, ())
        if resolution is Resolution.FAILED:
            return self._return(draft, sequence, False, verdict.cause, verdict.culprit_ranks)
        if resolution is Resolution.LOST:
            return self._lost(draft, sequence)
        if resolution in (Resolution.MISSED, Resolution.FENCED):
            return self._return(draft, sequence, False, None, (), agreed=False)
        piece = verdict.from_piece if resolution is Resolution.RESUMED else 0
        self._restore(draft, piece)
        return self._begin(draft, piece)

    def _restore(self, draft: Draft, from_piece: int) -> None:
        call = self.program[draft.call]
        for piece in range(from_piece, call.pieces):
            kept = not call.window or draft.slots[piece % call.window] == piece or draft.content[piece] == INPUT
            draft.content[piece] = INPUT if kept else GARBAGE

    # ------------------------------------------------------------------ the end of the process

    def end(self, process: Process) -> Step:
        """The program is over, or leaves early: what was completed is announced, the kept result is left."""
        member = process.member
        donation = (member.kept, process.keep) if member.kept else None
        return Step(self._corpse(process, "end", member.completed), donation=donation)

    def crash(self, process: Process) -> Step:
        return Step(self._corpse(process, "dead", 0))

    def _corpse(self, process: Process, at: str, completed: int) -> Process:
        """All that others can still see: what it has sent, and of a departure that was announced, what it completed."""
        member = self.member_class(self.rank, self.members, completed=completed)
        return Process(Snapshot.of(member), at, logs=process.logs)
