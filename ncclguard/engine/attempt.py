"""One try of one operation on one generation of its group: the opening round, the pieces, and the closing round."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from ncclguard.coordination.group_state import GroupState, OpenCall
from ncclguard.engine.communicators import BuildRefused, Communicators, OutOfTime, Revoked
from ncclguard.engine.execution import Execution
from ncclguard.protocol.decision import TroubleKind
from ncclguard.transport.base import Agreement, Communicator, Disagreement, Pending, TransportError
from ncclguard_explain.language import tr

#: Seconds of one uninterrupted wait, so that signals, revokes and deadlines are noticed in between.
SLICE = 0.1
_MASK = (1 << 63) - 1
_CLOSING = 1 << 62  # tells the vote at the end of an operation from the one at its beginning

#: Told of what went wrong: generation, kind, text, and the rank at the other end of a broken connection or -1.
Trouble = Callable[[int, TroubleKind, str, int], None]


class Statistics(Protocol):
    """Statistics that ride along with some operations of a group: bytes of each rank, and everybody's handed to all."""

    def payload(self, call: OpenCall) -> bytes:
        """This rank's bytes, of the same length on all ranks; the opening round has passed."""

    def gathered(self, call: OpenCall, ranks: tuple[int, ...], parts: list[bytes]) -> None:
        """Return everybody's, in the order of `ranks`; the operation may still fail."""


class Attempts:
    """Makes the tries of one group's operations. `kept`: the last small result, for ranks that may miss it."""

    def __init__(
        self,
        state: GroupState,
        communicators: Communicators,
        rounds: bool,
        statistics: Statistics | None,
        trouble: Trouble,
    ) -> None:
        self.kept: list[bytes] = []
        self._state = state
        self._member = state.member
        self._communicators = communicators
        self._rounds = rounds
        self._statistics = statistics
        self._trouble = trouble

    def run(self, generation: int, work: Execution, from_piece: int, call: OpenCall) -> bool:
        """One try on one generation; True when the operation is complete, False when the verdict decides."""
        try:
            return self._run(generation, work, from_piece, call)
        except Revoked:
            return False
        except OutOfTime as error:
            waited = time.monotonic() - call.entered
            self._trouble(
                generation,
                TroubleKind.DEADLINE,
                str(error) or tr("not complete after {waited:.3g} s", waited=waited),
                -1,
            )
        except Disagreement:
            self._trouble(generation, TroubleKind.MISMATCH, tr("not all ranks called the same operation"), -1)
        except BuildRefused as error:
            self._trouble(generation, TroubleKind.RAISED, str(error), -1)
        except TransportError as error:
            self._trouble(generation, TroubleKind.TRANSPORT, str(error), -1 if error.peer is None else error.peer)
        return False

    def _run(self, generation: int, work: Execution, from_piece: int, call: OpenCall) -> bool:
        if call.overdue:  # others may still be on their way here from the one before: nobody is late for this one
            self._trouble(generation, TroubleKind.OVERDUE, tr("its limit passed before its turn came"), -1)
            return False
        if time.monotonic() >= call.deadline:
            raise OutOfTime(tr("its limit passed before it could begin"))
        communicator = self._communicators.get(generation, call.deadline, SLICE)
        communicator.mark = mark = self._mark(call.sequence, from_piece)
        communicator.closes = work.closing and self._rounds
        payload = work.payload(communicator.payload_nbytes)
        # Then the data themselves are the opening round: each stream of them begins with the mark.
        opens = payload is None and work.pieces > 0 and work.meets and communicator.compares_marks
        if opens:
            call.opened = self._move(communicator, work, generation, from_piece, call.deadline)
        elif self._rounds or payload is not None:
            opening = self._vote(communicator, mark, payload, generation, call)
            call.opened = time.monotonic()
        if payload is not None:  # before the next vote overwrites what has come
            work.collect(opening, communicator.ranks)
            if not work.closing:
                return self._complete_small(generation, work.keep())
        with self._state.lock:
            if not self._member.opened(generation):
                return False
        if call.exchange and self._statistics is not None:
            self._exchange(self._statistics, communicator, generation, call)
        if payload is None and not opens:
            self._move(communicator, work, generation, from_piece, call.deadline)
        if work.closing:
            with self._state.condition:
                if not self._member.ready(generation):
                    return False
            if self._rounds:
                self._vote(communicator, mark ^ _CLOSING, None, generation, call)
        else:
            self.kept = work.keep()
        with self._state.condition:
            return self._member.done(generation)

    def _vote(
        self,
        communicator: Communicator,
        mark: int,
        payload: torch.Tensor | None,
        generation: int,
        call: OpenCall,
    ) -> Agreement:
        """Meet all ranks; raises Disagreement where one is in another operation."""
        vote = communicator.agree(mark, payload)
        self._wait(vote, generation, call.deadline)
        if not vote.agreed:
            raise Disagreement(tr("a round has found different operations"))
        return vote

    def _complete_small(self, generation: int, kept: list[bytes]) -> bool:
        """Return whether everybody has entered, and all data has come with that; False when the verdict decides."""
        with self._state.lock:
            if not self._member.opened(generation):
                return False
            self.kept = kept  # no other rank needs the result before, and this one may be asked for from here on
            return self._member.done(generation)

    def _mark(self, sequence: int, from_piece: int) -> int:
        operation = self._member.operation
        fingerprint = 0 if operation is None else operation.fingerprint
        return (fingerprint + sequence * 0x9E3779B97F4A7C15 + from_piece) & _MASK

    def _move(
        self, communicator: Communicator, work: Execution, generation: int, from_piece: int, deadline: float
    ) -> float:
        """Keep `Builder.max_in_flight` pieces moving; they complete in order. Returns `Pending.met` of the first."""
        flying: deque[Pending] = deque()
        complete, met = from_piece, 0.0
        for piece in range(from_piece, work.pieces):
            if len(flying) >= self._communicators.in_flight:
                met = self._complete(flying.popleft(), generation, deadline, met)
                complete += 1
            if work.pieces > 1:
                # Before the submission overwrites the backup of an earlier piece: what was promised must be restorable.
                self._progress(generation, complete, work.restorable_after(piece))
            flying.append(work.submit(communicator, piece))
        while flying:
            met = self._complete(flying.popleft(), generation, deadline, met)
            complete += 1
        if work.pieces > 1:
            self._progress(generation, complete, work.restorable_from)
        return met

    def _progress(self, generation: int, complete: int, restorable: int) -> None:
        with self._state.condition:
            if not self._member.progressed(generation, complete, restorable):
                raise Revoked

    def _complete(self, pending: Pending, generation: int, deadline: float, met: float) -> float:
        self._wait(pending, generation, deadline)
        return met or pending.met

    def _exchange(self, statistics: Statistics, communicator: Communicator, generation: int, call: OpenCall) -> None:
        """Gather everybody's statistics: with a vote where they fit into one, else as a collective.

        Over the host's network, also in a group on GPUs: a copy to the device would wait, without a bound, for all that
        is queued there.
        """
        host = communicator.host
        mine = torch.frombuffer(bytearray(statistics.payload(call)), dtype=torch.uint8)  # read while it is waited for
        if mine.numel() <= host.payload_nbytes:
            vote = host.agree(call.sequence, mine)
            self._wait(vote, generation, call.deadline)
            parts = [vote.payload(index) for index in range(len(communicator.ranks))]
        else:
            slots = [torch.empty_like(mine) for _ in communicator.ranks]
            self._wait(host.all_gather(slots, mine), generation, call.deadline)
            parts = [slot.numpy().tobytes() for slot in slots]
        statistics.gathered(call, communicator.ranks, parts)

    def _wait(self, pending: Pending, generation: int, deadline: float) -> None:
        member = self._member
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise OutOfTime
            if pending.wait(min(SLICE, remaining)):
                return
            if member.frozen or member.generation != generation:
                raise Revoked
