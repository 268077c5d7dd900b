"""What ranks decide after they met, or failed to: pure functions, so equal input gives an equal decision on every rank."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from ncclguard.evaluation import decision
from ncclguard.evaluation.decision import (
    Action,
    EvaluationReport,
    Failure,
    Kind,
    Met,
    NotMet,
    RankResult,
    Terms,
)
from ncclguard.outcome import Cause
from ncclguard_explain import language
from ncclguard_explain.cause import ADVICE

ALL = (0, 1, 2, 3)
OOM = RankResult(2, Kind.OUT_OF_MEMORY, "torch.OutOfMemoryError at eval.py:7 in step: no memory")
TOLD = RankResult(0, Kind.COLLECTIVE, "all_reduce failed: rank 2 failed", Cause.FAILED, (2,))


def met(*results: RankResult) -> Met:
    return Met(results)


def test_all_fine_is_accepted() -> None:
    assert decision.at_end(met(*map(RankResult, ALL)), 3, 3).action is Action.ACCEPT


@pytest.mark.parametrize(("attempt", "action"), [(1, Action.RETRY), (2, Action.RETRY), (3, Action.GIVE_UP)])
def test_a_rank_out_of_memory_is_named_and_the_last_try_is_the_last(attempt: int, action: Action) -> None:
    found = decision.at_end(met(TOLD, RankResult(1), OOM, RankResult(3)), attempt, 3)
    assert found.action is action
    assert found.failure == Failure(attempt, Cause.FAILED, (2,), ((2, OOM.error),), out_of_memory=True)


WRONG = RankResult(2, Kind.WRONG, "KeyError at eval.py:9 in step: 'f1'")


def collective(rank: int, cause: Cause, *culprits: int) -> RankResult:
    """The result of a rank whose try ended with the verdict of a collective."""
    return RankResult(rank, Kind.COLLECTIVE, "all_reduce failed", cause, culprits)


@pytest.mark.parametrize(
    ("others", "action"),
    [
        ((), Action.GIVE_UP),  # nothing was raised on any other rank
        ((TOLD,), Action.GIVE_UP),
        ((TOLD, collective(1, Cause.FAILED, 0)), Action.GIVE_UP),  # rank 0 had given up because of rank 2
        ((collective(0, Cause.DIVERGED, 2),), Action.GIVE_UP),
        ((collective(0, Cause.DIVERGED),), Action.GIVE_UP),
        ((collective(0, Cause.LATE, 2),), Action.GIVE_UP),  # and then it raised
        ((RankResult(3, Kind.WRONG, "KeyError: 'f1'"),), Action.GIVE_UP),
        ((RankResult(3, Kind.OUT_OF_MEMORY, "MemoryError"),), Action.RETRY),
        ((RankResult(3, Kind.RAISED, "OSError: stale file handle"),), Action.RETRY),
        ((collective(0, Cause.LATE, 3), collective(3, Cause.LATE, 3)), Action.RETRY),
        ((collective(0, Cause.DIVERGED, 1, 2),), Action.RETRY),
        ((collective(0, Cause.NETWORK),), Action.RETRY),
    ],
)
def test_an_error_of_the_program_that_explains_all_ends_the_tries(
    others: tuple[RankResult, ...], action: Action
) -> None:
    found = {rank: RankResult(rank) for rank in ALL} | {result.rank: result for result in (WRONG, *others)}
    decided = decision.at_end(met(*found.values()), 1, 3)
    assert decided.action is action
    assert decided.failure is not None
    assert decided.failure.final == (action is Action.GIVE_UP)
    last = decision.at_end(met(*found.values()), 3, 3)
    assert last.action is Action.GIVE_UP
    assert last.failure is not None
    assert not last.failure.final  # there was no other try to make


def test_those_who_only_waited_are_not_named() -> None:
    late = RankResult(0, Kind.COLLECTIVE, "failed after 3 s: rank 2 late", Cause.LATE, (2,))
    network = RankResult(1, Kind.COLLECTIVE, "broke", Cause.NETWORK, ())
    failure = decision.failure_of((network, late, RankResult(2), RankResult(3)), 1)
    assert (failure.cause, failure.culprits, failure.errors) == (Cause.LATE, (2,), ((0, late.error),))


def test_a_rank_that_gave_up_after_a_verdict_is_not_blamed_by_one_that_went_on_for_a_moment() -> None:
    """Rank 0 did not look at the collective that failed, and was in the next one when rank 3 left the try because of it."""
    first = RankResult(3, Kind.COLLECTIVE, "all_reduce failed: rank 2 diverged", Cause.DIVERGED, (2,))
    later = RankResult(0, Kind.COLLECTIVE, "barrier failed: rank 3 raised CollectiveMismatch", Cause.FAILED, (3,))
    failure = decision.failure_of((later, RankResult(1), RankResult(2), first), 1)
    assert (failure.cause, failure.culprits, failure.errors) == (Cause.DIVERGED, (2,), ((3, first.error),))
    assert decision.failure_of((later, RankResult(1), RankResult(2), RankResult(3)), 1).culprits == (3,)


def test_without_any_evidence_nobody_is_named() -> None:
    assert decision.failure_of((RankResult(0, Kind.COLLECTIVE),), 1).cause is Cause.UNKNOWN


def test_ranks_that_did_not_meet_try_again_unless_one_is_gone() -> None:
    late = NotMet(Cause.LATE, (2,), report="incident")
    assert decision.at_end(late, 1, 3).action is Action.RETRY
    assert decision.at_end(late, 3, 3).action is Action.GIVE_UP
    assert decision.at_end(NotMet(Cause.LOST, (2,), gone=True), 1, 3).action is Action.STOP
    assert decision.at_end(NotMet(Cause.UNKNOWN, (), agreed=False), 1, 3).action is Action.STOP
    assert decision.at_opening(late, 1, ALL).action is Action.GIVE_UP
    assert decision.at_opening(late, 1, ALL).failure == Failure(1, Cause.LATE, (2,), report="incident", began=False)


def test_one_rank_that_switches_off_decides_for_all() -> None:
    assert decision.at_opening(Met((Terms(), Terms(enabled=False))), 1, ALL).action is Action.SKIP
    assert decision.at_opening(Met((Terms(), Terms(divisor=4))), 1, ALL).divisor == 4
    single = decision.at_opening(Met((Terms(), Terms(single_rank=3), Terms(single_rank=1))), 1, ALL)
    assert (single.action, single.single_rank) == (Action.RUN_SINGLE, 1)
    assert decision.at_opening(Met((Terms(single_rank=9),)), 1, ALL).action is Action.RUN


def test_metrics_are_logged_by_the_first_rank_that_can() -> None:
    assert decision.first_with_sink((Terms(), Terms(), Terms(sink=True), Terms(sink=True)), ALL) == 2
    assert decision.first_with_sink((Terms(), Terms()), (4, 6)) == 4


def test_a_partial_result_is_one_that_every_rank_has() -> None:
    recorded = [RankResult(0, done=(1, 2, 3), total=5), RankResult(1, done=(1, 2), total=5)]
    assert decision.common_part(recorded) == (2, 5)
    assert decision.common_part([*recorded, RankResult(2)]) == (0, 0)
    assert decision.common_part([]) == (0, 0)


results = st.builds(
    RankResult,
    rank=st.integers(0, 7),
    kind=st.sampled_from(Kind),
    cause=st.none() | st.sampled_from(Cause),
    culprits=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    done=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    total=st.integers(0, 9),
)


@given(st.lists(results, min_size=1, max_size=6), st.integers(1, 3))
def test_every_exchange_leads_to_one_decision_that_survives_the_wire(values: list[RankResult], attempt: int) -> None:
    sent = pickle.loads(pickle.dumps(Met(tuple(values))))
    found = decision.at_end(sent, attempt, 3)
    assert found == decision.at_end(Met(tuple(values)), attempt, 3)
    assert (found.action is Action.ACCEPT) == all(value.fine for value in values)
    assert (found.failure is None) == (found.action is Action.ACCEPT)
    own = {v.rank for v in values if v.kind in (Kind.OUT_OF_MEMORY, Kind.RAISED, Kind.WRONG, Kind.INTERRUPTED)}
    if any(v.kind is Kind.INTERRUPTED for v in values):
        assert found.action is Action.STOP
    if found.action is Action.GIVE_UP and attempt < 3:
        assert any(v.kind is Kind.WRONG for v in values)
    if own and found.failure is not None:
        assert set(found.failure.culprits) == own


def test_the_report_says_what_happened_and_what_to_do() -> None:
    failures = (
        Failure(1, Cause.FAILED, (2,), ((2, OOM.error),), True),
        Failure(2, Cause.LATE, (1,)),
    )
    text = str(EvaluationReport("evaluation evaluate() at step 7", Action.GIVE_UP, failures, 2))
    assert "at step 7: failed after 2 tries; the fallback is returned, and training goes on" in text
    assert "try 1: failed, out of memory, rank 2" in text
    assert "\n  try 2: late, rank 1\n" in text
    assert f"what to do: {ADVICE[Cause.LATE]}" in text
    assert "from 2 of 5" in str(EvaluationReport("e", Action.PARTIAL, failures[:1], 1, 2, 5))
    assert "smaller batches" in str(EvaluationReport("e", Action.GIVE_UP, failures[:1], 1))
    assert "not all ranks arrived" in str(EvaluationReport("e", Action.GIVE_UP, failures[1:], 0))


def test_the_report_refers_to_that_of_the_incident_which_has_the_stacks_and_the_advice() -> None:
    late = decision.at_opening(NotMet(Cause.LATE, (1,), incident="5e-0-4.1"), 2, range(3)).failure
    assert late is not None
    known = EvaluationReport(
        "evaluation e", Action.GIVE_UP, (Failure(1, Cause.LATE, (1,), incident="5e-0-3.0"), late), 1
    )
    assert str(known) == (
        "ncclguard evaluation e: failed after 1 try; the fallback is returned, and training goes on.\n"
        "  try 1: late, rank 1 (incident 5e-0-3.0)\n"
        "  before try 2: late, rank 1 (incident 5e-0-4.1)"
    )
    assert known.headline.endswith("training goes on. (before try 2: late, rank 1 (incident 5e-0-4.1))")
    off = replace(known, failures=(Failure(1, Cause.LATE, (1,), report="the whole incident"),))
    assert str(off).endswith("try 1: late, rank 1\nthe whole incident")
    memory = replace(late, out_of_memory=True)
    assert "what to do: Evaluate with smaller batches" in str(replace(known, failures=(memory,)))


@pytest.mark.parametrize("cause", (Cause.DIVERGED, Cause.LATE, Cause.FAILED))
def test_an_evaluation_that_only_some_ranks_call_is_told_to_be_called_on_all(cause: Cause) -> None:
    never = decision.at_opening(NotMet(cause, (1,), incident="5e-0-4.1"), 1, range(2)).failure
    assert never is not None
    skipped = EvaluationReport("evaluation e", Action.GIVE_UP, (never,))
    assert "what to do: If some ranks were not to come to this evaluation at all, call it on all ranks" in str(skipped)
    stopped = replace(skipped, action=Action.STOP)
    assert "what to do: Restart the job" in str(stopped) and "call it on all ranks" in str(stopped)
    assert "call it on all ranks" not in str(replace(skipped, attempts=1))  # they came to the first try
    lost = replace(skipped, failures=(replace(never, cause=Cause.LOST),))
    assert "call it on all ranks" not in str(lost)


def test_ranks_that_left_because_of_the_first_are_not_blamed() -> None:
    """Rank 2 was killed; by the time this rank came to the end, rank 3 had raised for it and was gone too."""
    later = decision.at_end(NotMet(Cause.FAILED, (2, 3), gone=True), 1, 3)
    mine = RankResult(0, Kind.COLLECTIVE, "all_reduce failed: rank 2 lost", Cause.LOST, (2,))
    found = decision.without_followers(later, mine)
    assert found.action is Action.STOP
    assert found.failure is not None
    assert (found.failure.cause, found.failure.culprits) == (Cause.LOST, (2,))
    assert decision.without_followers(later, RankResult(0)) is later
    assert decision.without_followers(later, OOM) is later


def test_an_error_that_another_rank_has_sent_is_told_in_the_readers_language() -> None:
    sent = "all_reduce(float32[]) failed after 0.0121 s: rank 1 diverged."
    failure = Failure(1, Cause.DIVERGED, (1,), ((0, sent),))
    language.choose("zh")
    try:
        assert (
            str(failure)
            == "第 1 次尝试：调用不一致，rank 1\n    rank 0：all_reduce(float32[]) 在 0.0121 s 后失败：rank 1 调用不一致。"
        )
    finally:
        language.choose(None)
