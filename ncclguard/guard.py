"""One guarded group: runs an operation to its verdict, with retries, on a communicator of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ncclguard import outcomes
from ncclguard.agreement.decision import Action, Operation, TroubleKind, Verdict
from ncclguard.agreement.protocol import Entry, Resolution
from ncclguard.agreement.seat import OpenCall, Seat
from ncclguard.assembly import Assembly, BuildRefused, OutOfTime, Revoked
from ncclguard.config import GuardConfig
from ncclguard.deadlines import engine_section, remaining_limit
from ncclguard.errors import CollectiveFailed
from ncclguard.execution import Execution, encode
from ncclguard.outcome import FailedOutcome, Outcome
from ncclguard.transport.base import Communicator, Pending, TransportError

log = logging.getLogger("ncclguard")

#: Seconds of one uninterrupted wait, so that signals, revokes and deadlines are noticed in between.
SLICE = 0.1
#: Seconds after its deadline at which a caller stops waiting for a verdict; with the cleaning up it has returned after 2.
GRACE = 1.8
#: Seconds a stopped transport may take until nothing of it can write any more.
QUIET = 1.0
#: Seconds after its deadline at which the backend itself ends an operation that could not be stopped.
BACKSTOP = GRACE + 1.0
_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One kind of call, as the guard needs it."""

    op: str
    text: str
    fingerprint: int
    max_attempts: int
    shrink: bool
    atomic: bool | str
    numel: int
    nbytes: int
    needs: int = -1


class _Mismatch(Exception):
    """The opening round found that not all ranks are in the same operation."""


class Guard:
    """One guarded group on one kind of device. One operation at a time; a second thread queues within its own budget."""

    def __init__(self, seat: Seat, assembly: Assembly, wake: Callable[[], None], config: GuardConfig) -> None:
        self._seat = seat
        self._member = seat.member
        self.rank = seat.member.rank
        self._assembly = assembly
        self._wake = wake
        self._rounds = config.rounds
        self._raise_failures = config.on_failure == "raise"
        self._turn = threading.Lock()
        self.calls = 0  # made on this guard so far, for faults that are injected at one of them
        self._kept: list[bytes] = []
        self._ignored: FailedOutcome | None = None
        seat.stop_transport = assembly.stop
        seat.kept_result = lambda: encode(self._kept)

    # ------------------------------------------------------------------ the call

    def run(self, work: Execution, request: Request, timeout: float) -> Outcome:
        """Run one operation within `timeout` seconds; raises only what the caller's own thread was interrupted with."""
        started = time.monotonic()
        limit = remaining_limit()
        budget = max(timeout if limit is None else min(timeout, limit), 0.001)
        deadline = started + budget
        if not self._turn.acquire(timeout=budget):
            return outcomes.busy(self._seat, request, started, budget)
        try:
            self.calls += 1
            self._raise_ignored()
            with engine_section():
                outcome = self._run(work, request, started, deadline)
        finally:
            self._turn.release()
        if isinstance(outcome, FailedOutcome):  # reading a field of it would count as having looked
            if self._raise_failures:
                outcome.raise_if_failed()
            self._ignored = outcome
        return outcome

    def _run(self, work: Execution, request: Request, started: float, deadline: float) -> Outcome:
        call = OpenCall(request.text, started, deadline, threading.get_ident())
        operation = Operation(
            sequence=0,
            fingerprint=request.fingerprint,
            text=request.text,
            closing=work.closing,
            shrink=request.shrink,
            needs=request.needs,
            max_attempts=request.max_attempts,
        )
        entry, verdict = self._enter(operation, call, deadline)
        sequence = call.sequence
        if entry is Entry.SETTLED and verdict is not None and verdict.action is Action.COMMIT:
            donated = self._assembly.donated(sequence)
            if donated is None:
                return outcomes.missed(self._seat, request, sequence, started)
            call.participants = verdict.participants
            return self._take_donated(work, request, call, verdict.attempt, donated)
        if entry is not Entry.START:
            return outcomes.not_started(entry, self._seat, request, sequence, started, verdict)
        work.closing = work.closing or call.exchange
        try:
            return self._until_verdict(work, request, call)
        except BaseException as interruption:
            self._interrupted(work, interruption)
            raise
        finally:
            with self._seat.condition:
                self._seat.call = None
                self._seat.last_text = request.text
                self._seat.remember(call)
            work.release()

    def _enter(self, operation: Operation, call: OpenCall, deadline: float) -> tuple[Entry, Verdict | None]:
        """Take the next place in the group's sequence, waiting for the verdict of a revoked generation first."""
        seat = self._seat
        with seat.condition:
            while True:
                entry, verdict = seat.member.enter(operation)
                if entry is not Entry.WAIT:
                    call.sequence = seat.member.next_sequence - 1
                    if entry is Entry.START:
                        call.generation, call.participants = seat.member.generation, seat.member.participants
                        seat.resolution = None
                        seat.call = call
                        if seat.exchange is not None:
                            seat.exchange.entered(seat.member, call)
                    return entry, verdict
                if seat.unavailable or time.monotonic() > deadline + GRACE:
                    seat.member.forgo(operation)
                    call.sequence = seat.member.next_sequence - 1
                    return entry, None
                seat.condition.wait(SLICE)

    # ------------------------------------------------------------------ attempts

    def _until_verdict(self, work: Execution, request: Request, call: OpenCall) -> Outcome:
        from_piece, attempts, reserved = 0, 1, False
        while True:
            generation = call.generation
            try:
                if not reserved:
                    _reserve(work, request, self._assembly.in_flight)
                    reserved = True
                if self._attempt(generation, work, from_piece, call):
                    return self._succeed(work, request, call, attempts)
            except MemoryError as error:
                self._trouble(generation, TroubleKind.RAISED, f"MemoryError: {error}")
            decided = self._await_verdict(call)
            self._assembly.stop(generation)
            quiet = self._assembly.quiet(generation, QUIET)
            work.busy = work.busy or not quiet
            if decided is None:
                return self._conclude_alone(work, request, call, attempts, quiet)
            resolution, verdict, donated = decided
            if resolution in (Resolution.RESUMED, Resolution.RESTARTED):
                from_piece = verdict.from_piece if resolution is Resolution.RESUMED else 0
                attempts = verdict.attempt if resolution is Resolution.RESUMED else 1
                work.restore(from_piece)
                call.generation, call.participants = verdict.generation + 1, self._seat.takes_part(verdict)
                continue
            if resolution is Resolution.COMMITTED:
                return self._succeed(work, request, call, attempts)
            if resolution is Resolution.DONATED and donated is not None:
                return self._take_donated(work, request, call, attempts, donated)
            work.abandon()
            torn = work.torn or not quiet
            return outcomes.from_verdict(resolution, verdict, self._seat, request, call, torn)

    def _attempt(self, generation: int, work: Execution, from_piece: int, call: OpenCall) -> bool:
        """One try on one generation; True when the operation is complete, False when the verdict decides."""
        try:
            communicator = self._assembly.communicator(generation, call.deadline, SLICE)
            mark = self._mark(call.sequence, from_piece)
            payload = work.payload(communicator.payload_nbytes)
            if self._rounds or payload is not None:
                opening = communicator.agree(mark, payload)
                self._wait(opening, generation, call.deadline)
                if not opening.agreed:
                    raise _Mismatch
                call.opened = time.monotonic()
            with self._seat.condition:
                if not self._member.opened(generation):
                    return False
            if payload is not None:  # before the next vote overwrites what has come
                work.collect(opening, communicator.ranks)
            if call.exchange and self._seat.exchange is not None:
                self._wait(self._seat.exchange.gather(communicator, call), generation, call.deadline)
            if payload is None:
                communicator.set_backstop(call.deadline - time.monotonic() + BACKSTOP)
                self._move(communicator, work, generation, from_piece, call.deadline)
            if work.closing:
                with self._seat.condition:
                    if not self._member.ready(generation):
                        return False
                if self._rounds:
                    self._wait(communicator.agree(mark), generation, call.deadline)
            else:
                self._kept = work.keep()
            with self._seat.condition:
                return self._member.done(generation)
        except Revoked:
            return False
        except OutOfTime:
            waited = time.monotonic() - call.entered
            self._trouble(generation, TroubleKind.DEADLINE, f"not complete after {waited:.3g} s")
        except _Mismatch:
            self._trouble(generation, TroubleKind.MISMATCH, "not all ranks called the same operation")
        except BuildRefused as error:
            self._trouble(generation, TroubleKind.RAISED, str(error))
        except TransportError as error:
            self._trouble(generation, TroubleKind.TRANSPORT, str(error))
        return False

    def _mark(self, sequence: int, from_piece: int) -> int:
        operation = self._member.operation
        fingerprint = 0 if operation is None else operation.fingerprint
        return (fingerprint + sequence * 0x9E3779B97F4A7C15 + from_piece) & _MASK

    def _move(
        self, communicator: Communicator, work: Execution, generation: int, from_piece: int, deadline: float
    ) -> None:
        """Keep `max_in_flight` pieces moving; they complete in order."""
        flying: deque[Pending] = deque()
        complete = from_piece
        for piece in range(from_piece, work.pieces):
            if len(flying) >= communicator.max_in_flight:
                self._wait(flying.popleft(), generation, deadline)
                complete += 1
            if work.pieces > 1:
                # Before the submission, which overwrites the backup of an earlier piece: what was promised to be restorable must be.
                with self._seat.condition:
                    if not self._member.progressed(generation, complete, work.restorable_after(piece)):
                        raise Revoked
            flying.append(work.submit(communicator, piece))
        while flying:
            self._wait(flying.popleft(), generation, deadline)
            complete += 1
        if work.pieces > 1:
            with self._seat.condition:
                if not self._member.progressed(generation, complete, work.restorable_from):
                    raise Revoked

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

    # ------------------------------------------------------------------ trouble and its end

    def _trouble(self, generation: int, kind: TroubleKind, text: str) -> None:
        self._seat.trouble(generation, kind, text)
        self._wake()
        self._assembly.stop(generation)

    def _await_verdict(self, call: OpenCall) -> tuple[Resolution, Verdict, str | None] | None:
        """Wait for the verdict on local state with this rank's own clock; None when none came in time."""
        seat = self._seat
        with seat.condition:
            while seat.resolution is None:
                if seat.unavailable or time.monotonic() >= call.deadline + GRACE:
                    seat.member.give_up()
                    return None
                seat.condition.wait(SLICE)
            decided, seat.resolution = seat.resolution, None
            return decided

    def _succeed(self, work: Execution, request: Request, call: OpenCall, attempts: int) -> Outcome:
        work.finish(call.participants)
        return outcomes.success(self._seat, request, call, attempts, work.pieces, call.participants)

    def _take_donated(self, work: Execution, request: Request, call: OpenCall, attempts: int, donated: str) -> Outcome:
        if not work.result():
            work.reserve(False, 1)
        work.accept(donated)
        return self._succeed(work, request, call, attempts)

    def _conclude_alone(self, work: Execution, request: Request, call: OpenCall, attempts: int, quiet: bool) -> Outcome:
        work.abandon()
        return outcomes.local(self._seat, request, call, attempts, work.torn or not quiet, self._assembly.gone)

    def _interrupted(self, work: Execution, interruption: BaseException) -> None:
        """Ctrl-C or any other exception in this thread: the others are told, the input is restored, the exception goes on."""
        with self._seat.condition:
            generation, operation = self._member.generation, self._member.operation
        if operation is not None:
            text = (
                f"{type(interruption).__name__}: {interruption}" if str(interruption) else type(interruption).__name__
            )
            self._trouble(generation, TroubleKind.RAISED, text)
            with self._seat.condition:
                self._seat.condition.wait_for(lambda: self._seat.resolution is not None, timeout=GRACE)
                self._seat.resolution = None
                self._member.give_up()
        work.busy = not self._assembly.quiet(generation, QUIET)
        with contextlib.suppress(Exception):  # the interruption matters more than what restoring may raise
            work.abandon()

    def _raise_ignored(self) -> None:
        """A failure that nobody looked at must not pass in silence, nor one that was only decided afterwards."""
        ignored, self._ignored = self._ignored, None
        if ignored is not None and not ignored.examined:
            log.error("ncclguard: the failed outcome of %s was never looked at", ignored.op_id)
            ignored.raise_if_failed()
        with self._seat.condition:
            overruled, self._member.overruled = self._member.overruled, ()
        if overruled:
            raise CollectiveFailed(outcomes.overruled(self._seat, overruled[-1]))

    def call_off(self, text: str) -> None:
        """From another thread: fail the operation in progress, as if this rank had raised what `text` says."""
        with self._seat.condition:
            generation, operation = self._member.generation, self._member.operation
        if operation is not None:
            self._trouble(generation, TroubleKind.RAISED, text)

    def close(self) -> None:
        """Release the communicator; a call in progress in another thread ends without a verdict."""
        self._seat.set_unavailable("this process has left the job")
        self._assembly.close()


def _reserve(work: Execution, request: Request, in_flight: int) -> None:
    """Get the memory for the copy; without it an atomic call goes on not atomic, unless that was required."""
    try:
        work.reserve(bool(request.atomic), in_flight)
    except MemoryError:
        if request.atomic == "require" or not request.atomic:
            raise
        log.warning("ncclguard: no memory to back up %s; a failure may leave it torn", request.text)
        work.reserve(False, in_flight)
