"""One rank's side of the agreement: a state machine without clock, threads or I/O.

`Member` belongs to one group on one rank. The caller's thread moves an operation forward (`enter`, `opened`, `ready`,
`done`), the monitor answers revokes (`freeze`) and brings verdicts (`adopt`). Both call it under one local lock that is
never held across I/O, and every method is atomic under it: that, and the promise in `freeze`, are what the invariants
in docs/protocol.md rest on. The same code runs under the real store and under the simulator in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ncclguard.protocol.decision import EVERYBODY, Action, Operation, Phase, Report, Trouble, TroubleKind, Verdict
from ncclguard_explain.cause import Cause


class Entry(Enum):
    """The state that a call finds when it enters."""

    START = "start"  # run it on the current generation
    WAIT = "wait"  # the generation is revoked: wait for its verdict, then enter again
    SETTLED = "settled"  # the others have ended this operation already: take the stored verdict
    MISSED = "missed"  # the others have completed it without this rank and its result is not kept
    LOST = "lost"  # an agreed verdict says that a member is gone, and this call does not go on without it
    FENCED = "fenced"  # this rank was shrunk away


class Resolution(Enum):
    """The meaning of a verdict for the operation in progress on this rank."""

    COMMITTED = "committed"  # success, the own result is complete
    DONATED = "donated"  # success, with the result another rank has left in the store
    FAILED = "failed"
    RESUMED = "resumed"  # run again on the next generation, from `verdict.from_piece`
    RESTARTED = "restarted"  # the verdict is about an earlier operation: run on the next generation, from the start
    LOST = "lost"  # the verdict is about an earlier operation; a member is gone that this one cannot go on without
    MISSED = "missed"  # committed by the others while this rank was silent; its own result is incomplete
    FENCED = "fenced"


@dataclass(slots=True)
class Member:
    """A rank's view of its group: where it is, what it has promised, what was decided.

    Every field is immutable by value, so a shallow copy is a snapshot and equal states compare equal.
    """

    rank: int
    members: tuple[int, ...]
    participants: tuple[int, ...] = ()
    generation: int = 0
    next_sequence: int = 1
    completed: int = 0  # highest sequence returned as a success
    kept: int = 0  # sequence of the small operation whose result is kept for donation, 0 for none
    operation: Operation | None = None
    phase: Phase = Phase.NONE
    first_incomplete: int = 0
    restorable_from: int = 0
    attempt: int = 1
    frozen: bool = False
    trouble: Trouble | None = None
    settled: tuple[Verdict, ...] = ()  # about operations this rank has not called yet
    committed_through: int = 0
    overruled: tuple[Verdict, ...] = ()  # verdicts that failed what had been returned as a success here
    abandoned: tuple[Operation, ...] = ()  # calls that returned without a verdict; the first of them is `operation`
    lost: tuple[tuple[int, Cause], ...] = ()  # participants that an agreed verdict found gone
    named: tuple[int, ...] = ()  # those of the lost and the left whom a verdict has named
    left: tuple[tuple[int, Cause], ...] = ()  # members that do not take part any more, and why
    fenced: bool = False
    fenced_for: tuple[tuple[int, Cause], ...] = ()  # whom the verdict named that left this rank out
    exchange_every: int = 0  # every so many-th operation carries the exchange of statistics; 0 for none
    numbered: bool = True  # whether verdicts are numbered by the calls of this group; not so where torch's are watched

    def __post_init__(self) -> None:
        if not self.participants:
            self.participants = self.members

    # ------------------------------------------------------------------ the caller

    def enter(self, operation: Operation) -> tuple[Entry, Verdict | None]:
        """Begin a call; its sequence number is assigned here and can be read from `self.operation` after START.

        A call that comes late takes the stored verdict of the operation it belongs to, which it recognises by the
        fingerprint; an operation whose fingerprint differs was skipped on this rank, and the call goes on to the next.
        """
        ended = self._ended_already(operation)
        if ended is not None:
            return ended
        if self.frozen:
            return Entry.WAIT, None
        if not self._goes_on_without_lost(operation):
            self.next_sequence += 1
            return Entry.LOST, None
        if self.operation is not None:
            raise RuntimeError("a guarded group runs one operation at a time")
        self.operation = operation.at(self.next_sequence, closing=self.exchanges(self.next_sequence))
        self.next_sequence += 1
        self.phase = Phase.RUNNING
        self.first_incomplete = self.restorable_from = 0
        self.attempt = 1
        return Entry.START, None

    def exchanges(self, sequence: int) -> bool:
        """Return whether the operation with this number carries the statistics, and so has a closing round."""
        return self.exchange_every > 0 and sequence % self.exchange_every == 0

    def missing(self, operation: Operation) -> tuple[tuple[int, Cause], ...]:
        """Members that are gone, and why, and that this operation cannot go on without."""
        if operation.needs == EVERYBODY:
            return (*self.left, *self.lost)
        lost = () if operation.shrink else self.lost
        return (*lost, *(gone for gone in (*self.left, *self.lost) if gone[0] == operation.needs and gone not in lost))

    @property
    def is_ended(self) -> bool:
        """Return whether the others have been at the next place in the sequence before, and gone on."""
        there = any(verdict.sequence == self.next_sequence for verdict in self.settled)
        return self.fenced or there or self.next_sequence <= self.committed_through

    def opened(self, generation: int) -> bool:
        """The opening round has passed: everybody has entered, so nobody needs the previous result any more."""
        if not self._moves(generation):
            return False
        self.kept = 0
        return True

    def progressed(self, generation: int, first_incomplete: int, restorable_from: int) -> bool:
        """Record the first piece that is not complete here, and the first whose input can still be restored."""
        if not self._moves(generation):
            return False
        self.first_incomplete = first_incomplete
        self.restorable_from = restorable_from
        return True

    def ready(self, generation: int) -> bool:
        """The own result is complete; True allows the closing round to be sent, False means: wait for the verdict."""
        if not self._moves(generation):
            return False
        self.phase = Phase.READY
        return True

    def done(self, generation: int) -> bool:
        """Complete the operation as a success; False means: wait for the verdict.

        With a closing round this may happen after the freeze: the round has passed, so every rank was READY before it
        answered and no verdict can be anything but COMMIT. Without one the promise of `freeze` forbids it.
        """
        operation = self.operation
        if operation is None or generation != self.generation:
            return False
        if operation.closing:
            if self.phase is not Phase.READY:
                return False
        elif self.frozen:
            return False
        else:
            self.kept = operation.sequence
        self._complete(operation.sequence)
        return True

    def in_trouble(self, generation: int, trouble: Trouble) -> bool:
        """Stop moving and ask for a revoke; False when that generation has had its verdict already.

        The first trouble of a generation is the one that is reported.
        """
        if generation != self.generation:
            return False
        if self.trouble is None:
            self.trouble = trouble
        self.frozen = True
        return True

    def give_up(self) -> None:
        """The caller returns a local verdict because none came; what it has sent and promised stays until one does."""
        if self.frozen and self.operation is not None:
            self.abandoned = (self.operation,)
        else:
            self._drop()

    def skip(self, operation: Operation) -> None:
        """Take the call's place in the sequence, so that none shifts.

        Its caller returns a local verdict from WAIT, or got no turn.

        Unless the others have ended the operation already, it is in `abandoned` afterwards, and has to fail for them.
        """
        if self._ended_already(operation) is not None:
            return
        if not self.frozen and not self._goes_on_without_lost(operation):
            self.next_sequence += 1
            return
        operation = operation.at(self.next_sequence, closing=self.exchanges(self.next_sequence))
        self.next_sequence += 1
        self.abandoned = (*self.abandoned, operation)
        if self.operation is None:
            self.operation = operation
            self.phase = Phase.RUNNING
            self.first_incomplete = self.restorable_from = 0
            self.attempt = 1
            if self.trouble is not None:  # it was about the operation before
                self.trouble = Trouble(TroubleKind.UNANSWERED, "it returned without a verdict")

    # ------------------------------------------------------------------ the monitor

    def freeze(self) -> Report:
        """Answer a revoke of the current generation. The answer is a promise.

        An operation reported NONE or RUNNING will never send its closing round, nor complete without one, in this
        generation.
        """
        self.frozen = True
        return self.report()

    def report(self) -> Report:
        """Report where this rank is. Without the freeze it is no promise."""
        return Report(
            rank=self.rank,
            generation=self.generation,
            done=self.completed,
            operation=self.operation,
            phase=self.phase,
            first_incomplete=self.first_incomplete,
            restorable_from=self.restorable_from,
            attempt=self.attempt,
            trouble=self.trouble,
            returned=bool(self.abandoned),
        )

    def adopt(self, verdict: Verdict) -> Resolution | None:
        """Take the verdict on the current generation, and move on; return what it means for the running call."""
        if verdict.generation != self.generation:
            raise ValueError(f"verdict of generation {verdict.generation} at generation {self.generation}")
        resolution = self._resolve(verdict)
        self.generation += 1
        self.frozen = False
        self.trouble = None
        self.participants = verdict.participants
        remaining = frozenset(verdict.participants) if verdict.departed else frozenset()  # thousands of each
        self.lost = tuple(gone for gone in verdict.departed if gone[0] in remaining)
        self._leave_out(gone for gone in verdict.departed if gone[0] not in remaining)
        if verdict.culprits:
            named = {*self.named, *verdict.culprit_ranks}
            self.named = tuple(rank for rank, _ in (*self.left, *self.lost) if rank in named)
        if self.numbered:
            known = self.settled[-1].sequence if self.settled else self.next_sequence - 1
            if verdict.action is not Action.RESUME and verdict.sequence > known:
                self.settled = (*self.settled, verdict)
            self.committed_through = max(self.committed_through, verdict.sequence - 1)
        if self.rank not in verdict.participants:
            self.fenced, self.fenced_for = True, verdict.culprits
        if self.abandoned:
            self._carry_over(verdict)
        if resolution is Resolution.RESTARTED and self.operation and not self._goes_on_without_lost(self.operation):
            self._drop()
            return Resolution.LOST
        return resolution

    # ------------------------------------------------------------------ inside

    def _ended_already(self, operation: Operation) -> tuple[Entry, Verdict | None] | None:
        """Use up the call's place where the others have been there before; None where this rank has to take part."""
        if self.fenced:
            return Entry.FENCED, None
        while self.settled and self.settled[0].sequence == self.next_sequence:
            verdict, self.settled = self.settled[0], self.settled[1:]
            self.next_sequence += 1
            if operation.fingerprint in verdict.fingerprints:
                return Entry.SETTLED, verdict
        if self.next_sequence <= self.committed_through:
            self.next_sequence += 1
            return Entry.MISSED, None
        return None

    def _moves(self, generation: int) -> bool:
        return self.operation is not None and generation == self.generation and not self.frozen

    def _goes_on_without_lost(self, operation: Operation) -> bool:
        """Leave out the participants that are gone, if the operation may."""
        if self.missing(operation):
            return False
        if self.lost:
            gone = dict(self.lost)
            self.participants = tuple(rank for rank in self.participants if rank not in gone)
            self._leave_out(self.lost)
            self.lost = ()
        return True

    def _leave_out(self, gone: Iterable[tuple[int, Cause]]) -> None:
        self.left = tuple(sorted({**dict(self.left), **dict(gone)}.items()))

    def _complete(self, sequence: int) -> None:
        self.completed = sequence
        self._drop()

    def _drop(self) -> None:
        self.operation = None
        self.phase = Phase.NONE

    def _carry_over(self, verdict: Verdict) -> None:
        """Have what this rank has given up after that verdict failed on the next generation: others go on with it."""
        through = verdict.sequence - 1 if verdict.action is Action.RESUME else verdict.sequence
        self.abandoned = tuple(operation for operation in self.abandoned if operation.sequence > through)
        self._drop()
        if self.abandoned and self.missing(self.abandoned[0]):
            self.abandoned = ()  # the others do not go on with it either
        if self.abandoned and not self.fenced:
            self.operation = self.abandoned[0]
            self.phase = Phase.RUNNING
            self.first_incomplete = 0
            self.frozen = True
            self.trouble = Trouble(TroubleKind.UNANSWERED, "it had returned without a verdict before")

    def _resolve(self, verdict: Verdict) -> Resolution | None:
        operation = self.operation
        failed = verdict.action is Action.FAIL
        if failed and self.completed >= verdict.sequence > 0:
            self.overruled = (*self.overruled, verdict)
            self.completed = verdict.sequence - 1
            self.kept = 0
        if operation is None or self.abandoned:
            return None
        if self.rank not in verdict.participants:
            self._drop()
            return Resolution.FENCED
        if operation.sequence > verdict.sequence:
            self.attempt = 1
            self.phase = Phase.RUNNING
            self.first_incomplete = 0
            return Resolution.RESTARTED
        if operation.sequence < verdict.sequence or verdict.action is Action.COMMIT:
            return self._commit(operation)
        if failed:
            self._drop()
            return Resolution.FAILED
        self.attempt = verdict.attempt
        self.phase = Phase.RUNNING
        self.first_incomplete = verdict.from_piece
        return Resolution.RESUMED

    def _commit(self, operation: Operation) -> Resolution:
        if self.phase is Phase.READY:
            self._complete(operation.sequence)
            return Resolution.COMMITTED
        if operation.closing:
            self._drop()
            return Resolution.MISSED
        self._complete(operation.sequence)
        return Resolution.DONATED
