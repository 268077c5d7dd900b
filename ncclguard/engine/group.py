"""One guarded group of one process: runs its operations one after the other, each to its verdict, with retries."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable

from ncclguard import events
from ncclguard.config import GuardConfig
from ncclguard.coordination.group_state import GroupState, OpenCall
from ncclguard.deadlines import enter_engine, leave_engine, remaining_limit
from ncclguard.engine import outcomes
from ncclguard.engine.attempt import SLICE, Attempts, Statistics
from ncclguard.engine.call import Call
from ncclguard.engine.communicators import Communicators
from ncclguard.engine.execution import Execution, InUse, encode
from ncclguard.errors import CollectiveFailed, repeats
from ncclguard.outcome import Outcome
from ncclguard.protocol.decision import Action, Operation, TroubleKind, Verdict
from ncclguard.protocol.group_key import GroupKey
from ncclguard.protocol.member import Entry, Resolution
from ncclguard.transport.memory import drained, queues
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import told, tr

log = logging.getLogger("ncclguard")

#: Seconds a stopped transport may take until nothing of it can write any more.
QUIET = 1.0
#: Seconds for which a rank that has to decide alone looks for ranks whose process is gone.
EVIDENCE = 0.3


class GuardedGroup:
    """One group on one device. One operation runs at a time; a second thread waits for its turn within its own budget.

    `name`: for people. `calls`: how many calls there were.
    """

    def __init__(
        self,
        state: GroupState,
        communicators: Communicators,
        wake: Callable[[], None],
        config: GuardConfig,
        statistics: Statistics | None = None,
    ) -> None:
        self.rank = state.member.rank
        self.name = GroupKey.parse(state.key).short
        self.device = communicators.device
        self.calls = 0
        self.closing_nbytes = config.closing_nbytes  # which all ranks have agreed on
        self._state = state
        self._member = state.member
        self._queues = queues(communicators.device)
        self._communicators = communicators
        self._wake = wake
        self._raise_failures = config.on_failure == "raise"
        self._turn = threading.Lock()
        self._attempts = Attempts(state, communicators, config.rounds, statistics, self._trouble)
        self._unread: Outcome | None = None  # the last failure, until somebody has acknowledged it
        self._skipped: list[Operation] = []  # calls that another thread's kept from entering: their places are due
        state.attach(communicators.stop, lambda: encode(self._attempts.kept))

    # ------------------------------------------------------------------ the call

    def run(self, call: Call, work: Execution, timeout: float) -> Outcome:
        """Run one operation within `timeout` seconds; raises only what the caller's own thread was interrupted with."""
        started = time.monotonic()
        limit = remaining_limit()
        budget = max(timeout if limit is None else min(timeout, limit), 0.001)
        if self._turn.acquire(timeout=budget):
            try:
                self.calls += 1
                enter_engine()
                try:
                    outcome = self._run(call, work, started, started + budget, overdue=timeout <= 0.0)
                finally:
                    leave_engine()
            finally:
                self._end_turn()
        else:
            outcome = outcomes.busy(self._state, call, started, budget)
            self._refused(outcome)
            self._skip(call.operation)
        if outcome.cause is not None:
            if self._raise_failures:
                outcome.raise_if_failed()
            self._unread = outcome
        return outcome

    def _run(self, call: Call, work: Execution, started: float, deadline: float, overdue: bool) -> Outcome:
        opened = OpenCall(call.operation.text, started, deadline, threading.get_ident(), overdue=overdue)
        outcome: Outcome | None = None
        try:
            # Behind a kernel that is stuck nothing would move, and an abort would hang: this rank has not come yet.
            if self._queues and not drained(
                self.device, deadline, lambda: bool(self._state.unavailable) or self._member.is_ended
            ):
                opened.entered = time.monotonic()
            entry, verdict = self._state.enter(call.operation, opened, SLICE)
            if self._unread is not None or self._member.overruled:
                self._raise_unread()  # in its place in the sequence: the others are in this operation, or will be
            if entry is Entry.START:
                for tell in events.call_started:
                    tell(self._state.key, opened)
                work.closing = work.closing or opened.exchange
                outcome = self._until_verdict(call, work, opened)
            else:
                outcome = self._not_started(entry, verdict, call, work, opened)
        except BaseException as interruption:
            self._interrupted(call.operation, work, opened, interruption)
            raise
        finally:
            self._state.end(opened, failed=outcome is None or outcome.cause is not None)
            work.release()
            for tell_end in events.call_ended:
                tell_end(self._state.key, opened, outcome)
        return outcome

    def _not_started(
        self, entry: Entry, verdict: Verdict | None, call: Call, work: Execution, opened: OpenCall
    ) -> Outcome:
        """The others have ended this operation already, or none can be begun."""
        if entry is Entry.SETTLED and verdict is not None and verdict.action is Action.COMMIT:
            donated = self._communicators.donated(opened.sequence, opened.deadline - time.monotonic())
            if donated is None:
                return outcomes.missed(self._state, call, opened.sequence, opened.entered)
            opened.participants = verdict.participants
            return self._take_donated(call, work, opened, verdict.attempt, donated)
        missing = dict(self._member.missing(call.operation)) if entry is Entry.LOST else {}
        return outcomes.not_started(entry, self._state, call, opened.sequence, opened.entered, verdict, missing)

    def _refused(self, outcome: Outcome) -> None:
        for listener in events.listeners:
            listener.call_refused(self._state.key, outcome)

    def _skip(self, operation: Operation) -> None:
        """A call that got no turn takes its place all the same, or calls of two ranks would be paired wrongly."""
        with self._state.condition:
            self._skipped.append(operation)
        if self._turn.acquire(blocking=False):  # else whoever has it does this
            self._end_turn()

    def _end_turn(self) -> None:
        """Give the turn to the next thread, once the calls that got none have taken their places."""
        while True:
            try:
                if self._skipped:
                    self._settle_skipped()
            finally:
                self._turn.release()
            if not self._skipped or not self._turn.acquire(blocking=False):  # one may have come since
                return

    def _settle_skipped(self) -> None:
        with self._state.condition:
            skipped, self._skipped = self._skipped, []
            self._state.skip(skipped)
            generation, unanswered = self._member.generation, bool(self._member.abandoned)
        if unanswered:
            self._trouble(generation, TroubleKind.UNANSWERED, tr("another thread of its process kept it from entering"))

    # ------------------------------------------------------------------ tries and verdicts

    def _until_verdict(self, call: Call, work: Execution, opened: OpenCall) -> Outcome:
        from_piece, attempts, reserved = 0, 1, False
        named: dict[int, Cause] = {}  # by verdicts after which this operation is tried again
        while True:
            generation = opened.generation
            try:
                if not reserved and time.monotonic() < opened.deadline:
                    work.obtain(call.atomic, self._communicators.in_flight, call.operation.text)
                    reserved = True
                work.renew(from_piece)
                if self._attempts.run(generation, work, from_piece, opened):
                    return self._succeed(call, work, opened, attempts)
            except (MemoryError, InUse) as error:
                self._trouble(generation, TroubleKind.RAISED, f"{type(error).__name__}: {error}")
            decided = self._state.await_verdict(SLICE, opened)
            self._communicators.stop(generation)
            work.busy = not self._communicators.quiet(generation, QUIET) or work.busy
            if decided is None:
                return self._conclude_alone(call, work, opened, attempts)
            resolution, verdict, donated = decided
            if resolution in (Resolution.RESUMED, Resolution.RESTARTED):
                from_piece = verdict.from_piece if resolution is Resolution.RESUMED else 0
                attempts = verdict.attempt if resolution is Resolution.RESUMED else 1
                named |= dict(verdict.culprits)
                work.restore(from_piece)
                opened.generation, opened.participants = verdict.generation + 1, self._state.takes_part(verdict)
                continue
            if resolution is Resolution.COMMITTED:
                return self._succeed(call, work, opened, attempts)
            if resolution is Resolution.DONATED and donated is not None:
                return self._take_donated(call, work, opened, attempts, donated)
            work.abandon()
            return outcomes.from_verdict(resolution, verdict, self._state, call, opened, work.may_be_torn, named)

    def _trouble(self, generation: int, kind: TroubleKind, text: str, peer: int = -1) -> None:
        self._state.trouble(generation, kind, text, peer)
        self._wake()
        self._communicators.stop(generation)

    def _succeed(self, call: Call, work: Execution, opened: OpenCall, attempts: int) -> Outcome:
        work.finish(opened.participants)
        # The copies are queued on the current stream; others, and callbacks, may use the memory after this.
        if self._queues and not drained(self.device, max(opened.deadline, time.monotonic() + QUIET)):
            log.warning(
                "ncclguard: %s",
                told(
                    "the result of {operation} will be there when the CUDA stream has come to it",
                    "log",
                    operation=call.text,
                ),
            )
        return outcomes.success(self._state.key, call, opened, attempts, work.pieces)

    def _take_donated(self, call: Call, work: Execution, opened: OpenCall, attempts: int, donated: str) -> Outcome:
        work.accept(donated)
        return self._succeed(call, work, opened, attempts)

    def _conclude_alone(self, call: Call, work: Execution, opened: OpenCall, attempts: int) -> Outcome:
        work.abandon()
        # A process that is killed closes its connections a moment before it can be seen to be gone.
        end = min(opened.deadline, time.monotonic() + EVIDENCE)
        self._communicators.gives_up()
        gone = functools.partial(self._communicators.gone, since=opened.entered)
        while self._state.unavailable and time.monotonic() < end and not any(map(gone, opened.participants)):
            time.sleep(0.01)
        return outcomes.local(self._state, call, opened, attempts, work.may_be_torn, gone)

    # ------------------------------------------------------------------ interruptions

    def _interrupted(
        self, operation: Operation, work: Execution, opened: OpenCall, interruption: BaseException
    ) -> None:
        """Ctrl-C or any other exception in this thread: tell the others and restore the input; it goes on."""
        text, kind = repeats(interruption), TroubleKind.REPEATED
        if not text:
            text = type(interruption).__name__ + "".join(f": {line}" for line in str(interruption).splitlines()[:1])
            kind = TroubleKind.RAISED
        end, generations = time.monotonic() + self._state.grace, list[int]()
        work.busy = True  # until it is known that nothing writes any more
        while True:
            try:
                self._withdraw(operation, opened, kind, text, end, generations)
                work.busy = not all(self._communicators.quiet(generation, QUIET) for generation in generations)
                with contextlib.suppress(Exception):  # the interruption matters more than what restoring may raise
                    work.abandon()
                return
            except BaseException:  # Ctrl-C again: no more waiting for the verdict, but the input is the caller's
                log.debug("ncclguard: interrupted again while %s is restored", operation.text, exc_info=True)
                end = 0.0

    def _withdraw(
        self,
        operation: Operation,
        opened: OpenCall,
        kind: TroubleKind,
        text: str,
        end: float,
        generations: list[int],
    ) -> None:
        """Have the operation failed for the others, waiting until `end`; `generations`: those it was stopped on."""
        state, member = self._state, self._member
        with state.condition:
            begun = member.operation is not None and not member.abandoned
            if not begun and not opened.sequence:  # while it waited to enter
                opened.sequence = state.skip([operation])
                generations += [member.generation] if member.abandoned else []
        for generation in generations:
            self._trouble(generation, kind, text)
        while begun:
            generations.append(member.generation)
            self._trouble(member.generation, kind, text)
            with state.condition:
                decided = state.verdict_within(end - time.monotonic())
                # The verdict on an earlier trouble: the others try again, and would wait for this rank.
                begun = decided is not None and decided[0] in (Resolution.RESUMED, Resolution.RESTARTED)
                if not begun:
                    member.give_up()

    def call_off(self, text: str) -> None:
        """From another thread: fail the operation in progress, as if this rank had raised what `text` says."""
        with self._state.condition:
            generation, operation = self._member.generation, self._member.operation
        if operation is not None:
            self._trouble(generation, TroubleKind.RAISED, text)

    # ------------------------------------------------------------------ failures that nobody acknowledged, and the end

    @property
    def unread(self) -> Outcome | None:
        """The last failure, unless the program has looked at it; the next call raises it."""
        unread = self._unread
        return None if unread is None or unread.acknowledged else unread

    def _raise_unread(self) -> None:
        """A failure that nobody acknowledged must not pass in silence, nor one that was only decided afterwards."""
        unread = self._log_unread()
        error = None if unread is None else unread.error
        if error is not None:
            if sys.version_info >= (3, 11):
                text = told("It is the failure of an earlier call, whose outcome the program had not looked at.")
                error.add_note(text)
            raise error
        overruled = self._state.take_overruled()
        if overruled:
            raise CollectiveFailed(outcomes.overruled(self._state.key, overruled[-1]))

    def _log_unread(self) -> Outcome | None:
        unread, self._unread = self._unread, None
        if unread is None or unread.acknowledged:
            return None
        text = told(
            "{summary} The outcome ({op_id}) was never looked at: test it (`if not outcome:`), or call its raise_if_failed()",
            summary=str(unread),
            op_id=unread.op_id,
        )
        log.error("ncclguard: %s", text)
        return unread

    @property
    def given_up(self) -> bool:
        """Return whether this process has left the group or destroyed it."""
        return self._state.given_up

    def close(self, why: str) -> None:
        """Release the communicator; a call in progress in another thread ends without a verdict."""
        self._state.given_up = True
        self._state.make_unavailable(why)
        self._log_unread()
        self._communicators.close()
