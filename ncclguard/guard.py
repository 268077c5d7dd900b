"""One guarded group: runs an operation to its verdict, with retries, on a communicator of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from ncclguard import outcomes
from ncclguard.agreement.decision import Action, Operation, TroubleKind, Verdict
from ncclguard.agreement.protocol import Entry, Resolution
from ncclguard.agreement.seat import OpenCall, Seat
from ncclguard.agreement.timing import GRACE
from ncclguard.assembly import Assembly, BuildRefused, OutOfTime, Revoked
from ncclguard.config import GuardConfig
from ncclguard.deadlines import enter_engine, leave_engine, remaining_limit
from ncclguard.errors import CollectiveFailed
from ncclguard.execution import Execution, InUse, encode
from ncclguard.outcome import FailedOutcome, Outcome
from ncclguard.request import Request
from ncclguard.streams import drained, queues
from ncclguard.transport.base import Communicator, Disagreement, Pending, TransportError

log = logging.getLogger("ncclguard")

#: Seconds of one uninterrupted wait, so that signals, revokes and deadlines are noticed in between.
SLICE = 0.1
#: Seconds a stopped transport may take until nothing of it can write any more.
QUIET = 1.0
#: Seconds for which a rank that has to decide alone looks for ranks whose process is gone.
EVIDENCE = 0.3
_MASK = (1 << 63) - 1
_CLOSING = 1 << 62  # tells the vote at the end of an operation from the one at its beginning


class Guard:
    """One guarded group on one device. One operation at a time; a second thread queues within its own budget."""

    def __init__(self, seat: Seat, assembly: Assembly, wake: Callable[[], None], config: GuardConfig) -> None:
        self._seat = seat
        self._member = seat.member
        self.rank = seat.member.rank
        self.device = assembly.device
        self._queues = queues(assembly.device)
        self._assembly = assembly
        self._wake = wake
        self._rounds = config.rounds
        self._raise_failures = config.on_failure == "raise"
        self._turn = threading.Lock()
        self.calls = 0  # made on this guard so far, for faults that are injected at one of them
        self._kept: list[bytes] = []
        self._ignored: FailedOutcome | None = None
        self._owed: list[Operation] = []  # calls that another thread's kept from entering: their places in the sequence
        seat.stop_transport = assembly.stop
        seat.kept_result = lambda: encode(self._kept)

    # ------------------------------------------------------------------ the call

    def run(self, work: Execution, request: Request, timeout: float) -> Outcome:
        """Run one operation within `timeout` seconds; raises only what the caller's own thread was interrupted with."""
        started = time.monotonic()
        limit = remaining_limit()
        budget = max(timeout if limit is None else min(timeout, limit), 0.001)
        deadline = started + budget
        operation = request.operation(work.closing)
        if self._turn.acquire(timeout=budget):
            try:
                self.calls += 1
                enter_engine()
                try:
                    outcome = self._run(work, request, operation, started, deadline)
                finally:
                    leave_engine()
            finally:
                self._end_turn()
        else:
            outcome = outcomes.busy(self._seat, request, started, budget)
            self._owe(operation)
        if isinstance(outcome, FailedOutcome):  # reading a field of it would count as having looked
            if self._raise_failures:
                outcome.raise_if_failed()
            self._ignored = outcome
        return outcome

    def _run(self, work: Execution, request: Request, operation: Operation, started: float, deadline: float) -> Outcome:
        call = OpenCall(request.text, started, deadline, threading.get_ident())
        try:
            # Behind a kernel that is stuck nothing would move, and an abort would hang: this rank has not come yet.
            if self._queues and not drained(
                self.device, deadline, lambda: bool(self._seat.unavailable) or self._member.is_ended
            ):
                call.entered = time.monotonic()
            entry, verdict = self._enter(operation, call, deadline)
            if self._ignored is not None or self._member.overruled:
                self._raise_ignored()  # in its place in the sequence: the others are in this operation, or will be
            if entry is not Entry.START:
                return self._not_started(entry, verdict, work, request, operation, call)
            work.closing = work.closing or call.exchange
            return self._until_verdict(work, request, call)
        except BaseException as interruption:
            self._interrupted(work, operation, call, interruption)
            raise
        finally:
            with self._seat.lock:
                if self._seat.call is call:
                    self._seat.call = None
                    self._seat.last_text = request.text
                    self._seat.remember(call)
            work.release()

    def _not_started(
        self,
        entry: Entry,
        verdict: Verdict | None,
        work: Execution,
        request: Request,
        operation: Operation,
        call: OpenCall,
    ) -> Outcome:
        """The others have ended this operation already, or none can be begun."""
        if entry is Entry.SETTLED and verdict is not None and verdict.action is Action.COMMIT:
            donated = self._assembly.donated(call.sequence, call.deadline - time.monotonic())
            if donated is None:
                return outcomes.missed(self._seat, request, call.sequence, call.entered)
            call.participants = verdict.participants
            return self._take_donated(work, request, call, verdict.attempt, donated)
        missing = dict(self._member.missing(operation)) if entry is Entry.LOST else {}
        return outcomes.not_started(entry, self._seat, request, call.sequence, call.entered, verdict, missing)

    def _owe(self, operation: Operation) -> None:
        """A call that got no turn takes its place all the same, or calls of two ranks would be paired wrongly."""
        with self._seat.condition:
            self._owed.append(operation)
        if self._turn.acquire(blocking=False):  # else whoever has it does this
            self._end_turn()

    def _end_turn(self) -> None:
        """Give the turn to the next thread, once the calls that got none have taken their places."""
        while True:
            try:
                if self._owed:
                    self._settle_owed()
            finally:
                self._turn.release()
            if not self._owed or not self._turn.acquire(blocking=False):  # one may have come since
                return

    def _settle_owed(self) -> None:
        with self._seat.condition:
            owed, self._owed = self._owed, []
            for operation in owed:
                self._member.forgo(operation)
            generation, unanswered = self._member.generation, bool(self._member.given_up)
        if unanswered:
            self._trouble(generation, TroubleKind.UNANSWERED, "another thread of its process kept it from entering")

    def _enter(self, operation: Operation, call: OpenCall, deadline: float) -> tuple[Entry, Verdict | None]:
        """Take the next place in the group's sequence, waiting for the verdict of a revoked generation first."""
        seat = self._seat
        with seat.lock:
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
                if not reserved and time.monotonic() < call.deadline:
                    work.obtain(request.atomic, self._assembly.in_flight, request.text)
                    reserved = True
                work.renew(from_piece)
                if self._attempt(generation, work, from_piece, call):
                    return self._succeed(work, request, call, attempts)
            except (MemoryError, InUse) as error:
                self._trouble(generation, TroubleKind.RAISED, f"{type(error).__name__}: {error}")
            decided = self._await_verdict(call)
            self._assembly.stop(generation)
            work.busy = not self._assembly.quiet(generation, QUIET) or work.busy
            if decided is None:
                return self._conclude_alone(work, request, call, attempts)
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
            return outcomes.from_verdict(resolution, verdict, self._seat, request, call, work.may_be_torn)

    def _attempt(self, generation: int, work: Execution, from_piece: int, call: OpenCall) -> bool:
        """One try on one generation; True when the operation is complete, False when the verdict decides."""
        try:
            if time.monotonic() >= call.deadline:
                raise OutOfTime("its limit passed before it could begin")
            communicator = self._assembly.communicator(generation, call.deadline, SLICE)
            communicator.mark = mark = self._mark(call.sequence, from_piece)
            communicator.closes = work.closing and self._rounds
            payload = work.payload(communicator.payload_nbytes)
            # Then the data themselves are the opening round: each stream of them begins with the mark.
            opens = payload is None and work.pieces > 0 and work.meets and communicator.compares_marks
            if opens:
                call.opened = self._move(communicator, work, generation, from_piece, call.deadline)
            elif self._rounds or payload is not None:
                opening = communicator.agree(mark, payload)
                self._wait(opening, generation, call.deadline)
                if not opening.agreed:
                    raise Disagreement("the opening round has found different operations")
                call.opened = time.monotonic()
            if payload is not None:  # before the next vote overwrites what has come
                work.collect(opening, communicator.ranks)
                if not work.closing:
                    return self._complete_small(generation, work.keep())
            with self._seat.lock:
                if not self._member.opened(generation):
                    return False
            if call.exchange and self._seat.exchange is not None:
                self._wait(self._seat.exchange.gather(communicator, call), generation, call.deadline)
            if payload is None and not opens:
                self._move(communicator, work, generation, from_piece, call.deadline)
            if work.closing:
                with self._seat.condition:
                    if not self._member.ready(generation):
                        return False
                if self._rounds:
                    closing = communicator.agree(mark ^ _CLOSING)
                    self._wait(closing, generation, call.deadline)
                    if not closing.agreed:
                        raise Disagreement("the closing round has found different operations")
            else:
                self._kept = work.keep()
            with self._seat.condition:
                return self._member.done(generation)
        except Revoked:
            return False
        except OutOfTime as error:
            waited = time.monotonic() - call.entered
            self._trouble(generation, TroubleKind.DEADLINE, str(error) or f"not complete after {waited:.3g} s")
        except Disagreement:
            self._trouble(generation, TroubleKind.MISMATCH, "not all ranks called the same operation")
        except BuildRefused as error:
            self._trouble(generation, TroubleKind.RAISED, str(error))
        except TransportError as error:
            peer = -1 if error.peer is None else error.peer
            self._trouble(generation, TroubleKind.TRANSPORT, str(error), peer)
        return False

    def _complete_small(self, generation: int, kept: list[bytes]) -> bool:
        """Everybody has entered, and all data has come with that; False when the verdict decides."""
        with self._seat.lock:
            if not self._member.opened(generation):
                return False
            self._kept = kept  # no other rank needs the result before, and this one may be asked for from here on
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
            if len(flying) >= self._assembly.in_flight:
                met = self._complete(flying.popleft(), generation, deadline, met)
                complete += 1
            if work.pieces > 1:
                # Before the submission overwrites the backup of an earlier piece: what was promised must be restorable.
                with self._seat.condition:
                    if not self._member.progressed(generation, complete, work.restorable_after(piece)):
                        raise Revoked
            flying.append(work.submit(communicator, piece))
        while flying:
            met = self._complete(flying.popleft(), generation, deadline, met)
            complete += 1
        if work.pieces > 1:
            with self._seat.condition:
                if not self._member.progressed(generation, complete, work.restorable_from):
                    raise Revoked
        return met

    def _complete(self, pending: Pending, generation: int, deadline: float, met: float) -> float:
        self._wait(pending, generation, deadline)
        return met or pending.met

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

    def _trouble(self, generation: int, kind: TroubleKind, text: str, peer: int = -1) -> None:
        self._seat.trouble(generation, kind, text, peer)
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
        # The copies are queued on the current stream; others, and callbacks, may use the memory after this.
        if self._queues and not drained(self.device, max(call.deadline, time.monotonic() + QUIET)):
            log.warning("ncclguard: the result of %s will be there when the CUDA stream has come to it", request.text)
        return outcomes.success(self._seat, request, call, attempts, work.pieces, call.participants)

    def _take_donated(self, work: Execution, request: Request, call: OpenCall, attempts: int, donated: str) -> Outcome:
        work.accept(donated)
        return self._succeed(work, request, call, attempts)

    def _conclude_alone(self, work: Execution, request: Request, call: OpenCall, attempts: int) -> Outcome:
        work.abandon()
        # A process that is killed closes its connections a moment before it can be seen to be gone.
        end = min(call.deadline, time.monotonic() + EVIDENCE)
        while (
            self._seat.unavailable and time.monotonic() < end and not any(map(self._assembly.gone, call.participants))
        ):
            time.sleep(0.01)
        return outcomes.local(self._seat, request, call, attempts, work.may_be_torn, self._assembly.gone)

    def _interrupted(self, work: Execution, operation: Operation, call: OpenCall, interruption: BaseException) -> None:
        """Ctrl-C or any other exception in this thread: tell the others and restore the input; it goes on."""
        text = type(interruption).__name__ + "".join(f": {line}" for line in str(interruption).splitlines()[:1])
        end, generations = time.monotonic() + GRACE, list[int]()
        work.busy = True  # until it is known that nothing writes any more
        while True:
            try:
                self._withdraw(operation, call, text, end, generations)
                work.busy = not all(self._assembly.quiet(generation, QUIET) for generation in generations)
                with contextlib.suppress(Exception):  # the interruption matters more than what restoring may raise
                    work.abandon()
                return
            except BaseException:  # Ctrl-C again: no more waiting for the verdict, but the input is the caller's
                log.debug("ncclguard: interrupted again while %s is restored", operation.text, exc_info=True)
                end = 0.0

    def _withdraw(self, operation: Operation, call: OpenCall, text: str, end: float, generations: list[int]) -> None:
        """Have the operation failed for the others, waiting until `end`; `generations`: those it was stopped on."""
        seat, member = self._seat, self._member
        with seat.condition:
            begun = member.operation is not None and not member.given_up
            if not begun and not call.sequence:  # while it waited to enter
                member.forgo(operation)
                call.sequence = member.next_sequence - 1
                generations += [member.generation] if member.given_up else []
        for generation in generations:
            self._trouble(generation, TroubleKind.RAISED, text)
        while begun:
            generations.append(member.generation)
            self._trouble(member.generation, TroubleKind.RAISED, text)
            with seat.condition:
                seat.condition.wait_for(lambda: seat.resolution is not None, timeout=max(0.0, end - time.monotonic()))
                decided, seat.resolution = seat.resolution, None
                # The verdict on an earlier trouble: the others try again, and would wait for this rank.
                begun = decided is not None and decided[0] in (Resolution.RESUMED, Resolution.RESTARTED)
                if not begun:
                    member.give_up()

    def _raise_ignored(self) -> None:
        """A failure that nobody looked at must not pass in silence, nor one that was only decided afterwards."""
        ignored = self._log_ignored()
        if ignored is not None:
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

    def close(self, why: str) -> None:
        """Release the communicator; a call in progress in another thread ends without a verdict."""
        self._seat.set_unavailable(why)
        self._log_ignored()
        self._assembly.close()

    def _log_ignored(self) -> FailedOutcome | None:
        ignored, self._ignored = self._ignored, None
        if ignored is None or ignored.examined:
            return None
        log.error("ncclguard: the failed outcome of %s was never looked at", ignored.op_id)
        return ignored
