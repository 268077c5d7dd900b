"""How long a revoked generation waits for a member that does not answer."""

from __future__ import annotations

import json
import threading
import time

import pytest
from torch.distributed import HashStore

from ncclguard.coordination.group_state import GroupState, OpenCall
from ncclguard.coordination.revocation import Revocation
from ncclguard.coordination.store import AgreementStore, Entries
from ncclguard.outcome import Cause
from ncclguard.protocol import codec
from ncclguard.protocol.decision import Action, Departure, Operation, Phase, Report, TroubleKind, Verdict
from ncclguard.protocol.member import Entry
from ncclguard.protocol.timing import ALIVE, GRACE, QUIET, RESERVE, Pace, Timing

REVOKED = 100.0
PATIENCE = Timing().patience


def state_of_rank_0() -> GroupState:
    return GroupState("group", 0, (0, 1, 2))


def step(revocation: Revocation, now: float) -> bool:
    """Work on it as rank 0's monitor; ranks 1 and 2 never answer and nothing is known of them."""
    return revocation.step(now, {}, lambda state, report: report, lambda rank: Cause.UNKNOWN, lambda *known: "")


def test_the_processes_of_silent_ranks_are_looked_for_before_they_are_judged() -> None:
    """A far process needs a moment to answer, and one after the other they would not have it."""
    state = state_of_rank_0()
    sought: list[tuple[list[int], float, float]] = []
    revocation = Revocation(AgreementStore(HashStore()), state, 0, 0, REVOKED)

    def work(now: float) -> bool:
        return revocation.step(
            now,
            {},
            lambda state, report: report,
            lambda rank: Cause.STUCK if sought else Cause.UNKNOWN,
            lambda *known: "",
            seek=lambda ranks, since: sought.append((list(ranks), since, now)),
        )

    enter(state, 0.0)
    state.trouble(0, TroubleKind.DEADLINE, "not complete")
    assert not work(REVOKED) and not sought  # they may only be a little slow to answer
    assert not work(REVOKED + PATIENCE / 2 + 0.01)
    assert not work(REVOKED + PATIENCE - 0.1)
    assert work(REVOKED + PATIENCE)
    assert [(ranks, since) for ranks, since, _ in sought] == 3 * [([1, 2], REVOKED + PATIENCE / 2 + 0.01)]
    assert revocation.verdict is not None
    assert dict(revocation.verdict.culprits) == {1: Cause.STUCK, 2: Cause.STUCK}


def enter(state: GroupState, budget: float) -> None:
    call = OpenCall("barrier()", 0.0, 0.0, 0)
    entry, _ = state.member.enter(Operation(sequence=0, fingerprint=1, text="barrier()", closing=False))
    assert entry is Entry.START
    call.entered, call.deadline = time.monotonic(), time.monotonic() + budget
    state.wait_in(call)


def test_with_nobody_in_a_call_silence_is_over_after_patience_and_nobody_is_blamed() -> None:
    """Else the group could never be used again: every later call would wait for this verdict."""
    state = state_of_rank_0()
    revocation = Revocation(AgreementStore(HashStore()), state, 0, 0, REVOKED)
    assert not step(revocation, REVOKED)
    assert not step(revocation, REVOKED + PATIENCE - 0.01)
    assert step(revocation, REVOKED + PATIENCE)
    assert state.member.generation == 1
    assert state.member.enter(Operation(sequence=0, fingerprint=1, text="barrier()", closing=False))[0] is Entry.START


def test_a_call_that_was_given_up_has_no_time_left() -> None:
    state = state_of_rank_0()
    enter(state, 0.0)
    state.trouble(0, TroubleKind.DEADLINE, "not complete")
    state.member.give_up()
    state.wait_in(None)
    revocation = Revocation(AgreementStore(HashStore()), state, 0, 0, REVOKED)
    assert not step(revocation, REVOKED)
    assert step(revocation, REVOKED + PATIENCE)
    assert revocation.verdict is not None
    assert revocation.verdict.action is Action.FAIL
    assert revocation.verdict.culprit_ranks == ()  # as its caller was told, though ranks 1 and 2 are silent
    assert revocation.verdict.cause is Cause.UNKNOWN


@pytest.mark.parametrize("budget", [5.0, 50.0])
def test_a_call_with_time_left_is_waited_for_until_its_deadline(budget: float) -> None:
    state = state_of_rank_0()
    enter(state, budget)
    revocation = Revocation(AgreementStore(HashStore()), state, 0, 0, REVOKED)
    assert not step(revocation, REVOKED)
    assert not step(revocation, REVOKED + budget - 1.0 + PATIENCE)
    assert step(revocation, REVOKED + budget + PATIENCE)


def test_nobody_is_called_silent_while_answers_keep_coming_but_not_for_ever() -> None:
    """On a machine where 64 ranks share two cores they answer one after the other, for seconds."""
    store, state = AgreementStore(HashStore()), GroupState("group", 0, tuple(range(50)))
    enter(state, 0.0)
    state.trouble(0, TroubleKind.DEADLINE, "not complete")
    revocation, arrivals = Revocation(store, state, 0, 0, REVOKED), Entries("reports", "arrival")
    below = store.below("group/0")
    for rank in range(1, 10):
        below.first(f"report/{rank}", codec.dumps(Report(rank, 0)))
        arrivals.add(below, str(rank))
        last = REVOKED + 0.25 * rank
        assert not step(revocation, last), rank
    assert last > REVOKED + PATIENCE + QUIET
    assert not step(revocation, last + QUIET - 0.01)
    assert step(revocation, last + QUIET + 0.01)
    assert revocation.verdict is not None
    assert dict(revocation.verdict.culprits).keys() == {*range(1, 50)}  # late the first nine, unknown the others
    assert state.decided_after == pytest.approx(last + QUIET + 0.01 - REVOKED)
    assert Timing().is_silence(PATIENCE + RESERVE / 2, since_arrival=0.0, delay=1.0)


def test_a_coordinator_that_took_long_to_answer_itself_gives_the_others_time_for_it() -> None:
    """All of them read the same source files, from a disk that may be slow, and describe themselves on one machine."""
    state = state_of_rank_0()
    enter(state, 0.0)
    state.trouble(0, TroubleKind.DEADLINE, "not complete")
    revocation = Revocation(AgreementStore(HashStore()), state, 0, 0, REVOKED)

    def slow(state: GroupState, report: Report) -> Report:
        time.sleep(0.5)
        return report

    def work(now: float) -> bool:
        return revocation.step(now, {}, slow, lambda rank: Cause.STUCK, lambda *known: "")

    assert not work(REVOKED)
    assert not work(REVOKED + 0.5)  # which knows of the delay
    assert not work(REVOKED + PATIENCE + 1.0)
    assert work(REVOKED + PATIENCE + RESERVE / 2)  # but not for ever


def test_a_rank_that_takes_over_decides_once_it_has_read_who_departed() -> None:
    """Until then it has read only some departures, and would name ranks that a launcher ended beside the one to blame."""
    state = state_of_rank_0()
    enter(state, 0.0)
    revocation = Revocation(AgreementStore(HashStore()), state, 0, 2, REVOKED)
    departed: dict[int, Departure] = {}

    def work(now: float) -> bool:
        return revocation.step(now, departed, lambda state, report: report, lambda rank: Cause.LOST, lambda *known: "")

    assert not work(REVOKED)
    assert not work(REVOKED + 10.0)
    assert revocation.coordinates  # so its monitor reads them all before the next step
    departed[1] = Departure(1, Cause.LOST, "was sent SIGTERM", terminated=True)
    departed[2] = Departure(2, Cause.FAILED, "ValueError")
    assert work(REVOKED + 10.1)
    assert revocation.verdict is not None
    assert dict(revocation.verdict.culprits) == {2: Cause.FAILED}


def test_a_coordinator_whose_own_turn_comes_late_gives_the_others_as_much_more_time() -> None:
    state, pace = state_of_rank_0(), Pace()
    pace.met(0.65, REVOKED)
    revocation = Revocation(AgreementStore(HashStore()), state, 0, 0, REVOKED, pace=pace)
    assert not step(revocation, REVOKED)
    assert not step(revocation, REVOKED + PATIENCE + 1.9)
    assert step(revocation, REVOKED + PATIENCE + 2.01)


def test_a_delay_of_an_earlier_round_does_not_make_the_verdict_of_a_later_one_late() -> None:
    """The store's host was cut off for seconds, and came back; then a rank is silent."""
    state, pace = state_of_rank_0(), Pace()
    pace.met(5.0, REVOKED - 6.0)
    revocation = Revocation(AgreementStore(HashStore()), state, 0, 0, REVOKED, pace=pace)
    assert not step(revocation, REVOKED)
    assert step(revocation, REVOKED + PATIENCE + 0.1)


@pytest.mark.parametrize("size", [2, 64, 1000, 16_384, 100_000])
def test_callers_are_still_there_when_the_slowest_coordinator_decides(size: int) -> None:
    timing = Timing.of(size)
    assert timing.caller_waits(since_answer=ALIVE) == timing.grace < 2.0 + size / 5000
    waits = timing.caller_waits(since_answer=0.0)
    assert waits == timing.grace + RESERVE
    assert timing.is_silence(timing.patience + RESERVE / 2, since_arrival=0.0, delay=9.0)
    assert timing.patience + RESERVE / 2 + 2.0 + 6 * timing.period < waits


def test_a_caller_waits_beyond_its_budget_only_while_the_store_answers() -> None:
    """A verdict of all, a little later, is worth more than one of each rank for itself."""
    state, grace = state_of_rank_0(), [GRACE + RESERVE]
    state.serve("session", "", lambda incident: None, lambda: None, waits=lambda: grace[0])
    enter(state, -GRACE - 0.1)
    call = state.call
    assert call is not None
    started = time.monotonic()

    def no_more() -> None:
        time.sleep(0.2)
        grace[0] = GRACE

    thread = threading.Thread(target=no_more)
    thread.start()
    assert state.await_verdict(0.01, call) is None
    assert time.monotonic() - started >= 0.2
    thread.join()


def test_a_caller_whose_process_was_held_up_waits_until_its_monitor_can_have_asked_the_store() -> None:
    """It was stopped, or had no turn on a busy machine: the verdict of the others is there, and nobody has read it."""
    state = state_of_rank_0()
    enter(state, -GRACE - 1.0)
    call = state.call
    assert call is not None
    call.entered = call.deadline - 1.0
    verdict = Verdict(0, 1, Action.FAIL, Cause.STUCK, ((2, Cause.STUCK),), (0, 1, 2))
    thread = threading.Timer(0.2, state.adopt, (verdict, None))
    thread.start()
    decided = state.await_verdict(0.01, call)
    assert decided is not None and decided[1] is verdict
    thread.join()


def test_the_process_that_has_the_store_adopts_a_verdict_last() -> None:
    """Its program may end at once, and the others could not read the verdict any more."""
    store, states = AgreementStore(HashStore()), [GroupState("group", rank, (0, 1, 2)) for rank in range(3)]
    for state in states:
        enter(state, 0.0)
    first, second, _ = (Revocation(store, state, 0, 0, REVOKED, has_store=state.member.rank == 0) for state in states)
    assert not step(second, REVOKED)
    assert not step(first, REVOKED)
    assert not step(first, REVOKED + PATIENCE)  # it has decided: rank 2 did not answer
    assert first.verdict is None and states[0].decided is None
    assert step(second, REVOKED + PATIENCE + 0.1) and second.verdict is not None
    assert step(first, REVOKED + PATIENCE + 0.2)
    assert first.verdict == second.verdict


def test_the_process_that_has_the_store_does_not_wait_for_ever_for_one_that_has_answered_and_is_gone() -> None:
    store, states = AgreementStore(HashStore()), [GroupState("group", rank, (0, 1, 2)) for rank in range(3)]
    for state in states:
        enter(state, 0.0)
    first, second = (Revocation(store, states[rank], 0, 0, REVOKED, has_store=rank == 0) for rank in range(2))
    assert not step(second, REVOKED)
    assert not step(first, REVOKED)
    assert not step(first, REVOKED + PATIENCE)
    assert step(first, REVOKED + PATIENCE + Timing().linger)


def revoked_over_the_limit() -> tuple[Revocation, AgreementStore]:
    """The revocation of a call of rank 0's whose limit is over, and its part of the store."""
    store, state = AgreementStore(HashStore()), state_of_rank_0()
    enter(state, 0.0)
    state.trouble(0, TroubleKind.DEADLINE, "not complete")
    return Revocation(store, state, 0, 0, REVOKED), store.below("group/0")


@pytest.mark.parametrize("seen", [{"runs": True}, None])
def test_a_silent_rank_that_is_seen_to_run_is_waited_for_and_not_called_stuck(seen: dict[str, bool] | None) -> None:
    """Nor is one that is still being looked at: on a busy machine both take long. With the others it is as ever."""
    revocation, below = revoked_over_the_limit()
    arrival = Report(2, 0, operation=revocation.state.member.operation, phase=Phase.RUNNING, age=3.0)

    def work(now: float) -> bool:
        return revocation.step(now, {}, lambda state, report: report, lambda rank: Cause.STUCK, lambda *known: "")

    assert not work(REVOKED)
    below.first("report/2", codec.dumps(arrival))
    Entries("reports", "arrival").add(below, "2")
    below.count("fetchers", 1)
    below.first("fetcher/1", "2")
    if seen is not None:
        below.first("stacks/1", json.dumps(seen))
    assert not work(REVOKED + PATIENCE)
    assert not work(REVOKED + PATIENCE + RESERVE / 2 - 0.01)
    assert work(REVOKED + PATIENCE + RESERVE / 2)
    assert revocation.verdict is not None
    assert (revocation.verdict.action, revocation.verdict.cause) == (Action.FAIL, Cause.UNKNOWN)
    assert revocation.verdict.culprits == ()


def test_a_silent_rank_is_not_waited_for_because_one_that_does_not_answer_either_was_to_look_at_it() -> None:
    revocation, below = revoked_over_the_limit()
    below.count("fetchers", 1)
    below.first("fetcher/1", "2")
    assert not step(revocation, REVOKED)
    assert step(revocation, REVOKED + PATIENCE)


def test_what_a_rank_of_the_same_host_has_seen_counts_where_the_coordinator_can_see_nothing() -> None:
    """The host was cut off and is not long back: from outside nobody knows whether its ranks could have answered by now."""
    revocation, below = revoked_over_the_limit()
    below.count("fetchers", 1)
    below.first("fetcher/1", "3")
    below.first("stacks/1", json.dumps({"stopped": True}))
    assert not step(revocation, REVOKED)
    assert step(revocation, REVOKED + PATIENCE)
    assert revocation.verdict is not None
    assert dict(revocation.verdict.culprits) == {1: Cause.STUCK, 2: Cause.UNKNOWN}


def test_a_rank_tells_of_the_call_that_it_is_about_to_return_from_in_failure() -> None:
    """On a busy machine the caller gets no processor for a while, and another group asks meanwhile."""
    state = state_of_rank_0()
    enter(state, 0.0)
    state.trouble(0, TroubleKind.DEADLINE, "not complete")
    assert state.call is not None and state.waiting() == (state.call.text, 0.0)
    assert state.member.operation is not None
    sequence = state.member.operation.sequence
    state.adopt(Verdict(0, sequence, Action.FAIL, Cause.LATE, ((1, Cause.LATE),), (0, 1, 2)), None)
    text, ended = state.waiting()
    assert (text, 0.0 < ended < 5.0) == (state.call.text, True)
