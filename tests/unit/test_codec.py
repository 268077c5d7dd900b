"""Reports, verdicts and departures come out of the store as they went in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from ncclguard.outcome import Cause
from ncclguard.protocol import codec
from ncclguard.protocol.decision import Action, Departure, Operation, Phase, Report, Trouble, TroubleKind, Verdict

ranks = st.integers(0, 5000)
words = st.text(max_size=20)
seconds = st.floats(allow_nan=False, allow_infinity=False)
causes = st.sampled_from(Cause)
named = st.lists(st.tuples(ranks, causes), max_size=4).map(tuple)
operations = st.builds(
    Operation,
    sequence=st.integers(0, 2**40),
    fingerprint=st.integers(0, 2**63 - 1),
    text=words,
    closing=st.booleans(),
    shrink=st.booleans(),
    needs=st.integers(-1, 5000),
    max_attempts=st.integers(1, 9),
)
reports = st.builds(
    Report,
    rank=ranks,
    generation=st.integers(0, 1000),
    done=st.integers(0, 2**40),
    operation=st.none() | operations,
    phase=st.sampled_from(Phase),
    first_incomplete=st.integers(0, 99),
    restorable_from=st.integers(0, 99),
    attempt=st.integers(1, 9),
    trouble=st.none() | st.builds(Trouble, st.sampled_from(TroubleKind), words, ranks, words),
    age=seconds,
    budget=st.none() | seconds,
    elsewhere=words,
    awaited=st.lists(ranks, max_size=5).map(tuple),
    details=st.dictionaries(words, words | st.integers() | st.lists(words, max_size=3), max_size=3),
)
verdicts = st.builds(
    Verdict,
    generation=st.integers(0, 1000),
    sequence=st.integers(0, 2**40),
    action=st.sampled_from(Action),
    cause=st.none() | causes,
    culprits=named,
    participants=st.lists(ranks, max_size=5).map(tuple),
    departed=named,
    from_piece=st.integers(0, 99),
    attempt=st.integers(1, 9),
    fingerprints=st.lists(st.integers(0, 2**63 - 1), max_size=3).map(tuple),
    sides=st.lists(st.tuples(words, st.lists(ranks, max_size=3).map(tuple)), max_size=3).map(tuple),
    deadline_expired=st.booleans(),
    coordinator=st.integers(-1, 5000),
    incident=words,
)


@given(reports)
def test_a_report_comes_back_as_it_was(report: Report) -> None:
    back = codec.loads_report(codec.dumps(report))
    assert back == report
    assert type(back.phase) is Phase  # compares equal to a plain number, so equality would not tell


@given(verdicts)
def test_a_verdict_comes_back_as_it_was_and_can_be_hashed(verdict: Verdict) -> None:
    back = codec.loads_verdict(codec.dumps(verdict))
    assert back == verdict
    assert hash(back) == hash(verdict)
    assert all(type(cause) is Cause for _, cause in (*back.culprits, *back.departed))


@given(ranks, causes, words, st.dictionaries(words, st.integers(0, 2**40), max_size=4))
def test_a_departure_comes_back_with_what_was_completed_in_each_group(
    rank: int, cause: Cause, text: str, done: dict[str, int]
) -> None:
    back, completed = codec.loads_departure(codec.dumps_departure(Departure(rank, cause, text), done, by=0))
    assert back == Departure(rank, cause, text)
    assert completed == done


def test_details_that_are_not_plain_data_become_text_and_never_fail_the_report() -> None:
    text = codec.dumps(Report(0, 0, details={"error": ValueError("x"), "kind": Cause.LATE}))
    assert codec.loads_report(text).details == {"error": "x", "kind": "late"}


def test_what_is_written_is_one_json_object_without_line_breaks() -> None:
    text = codec.dumps(Verdict(0, 1, Action.COMMIT, incident="two\nlines"))
    assert "\n" not in text
    assert json.loads(text)["action"] == "commit"


@pytest.mark.parametrize("text", ["", "{}", '{"action": "guess"}', "[1, 2]"])
def test_what_is_no_verdict_is_refused(text: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        codec.loads_verdict(text)
