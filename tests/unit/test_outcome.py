"""Outcomes, the errors they turn into, and bus bandwidth."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from ncclguard.engine.table import bus_factor
from ncclguard.errors import (
    CollectiveFailed,
    CollectiveMismatch,
    CollectiveTimeout,
    GuardConfigError,
    GuardError,
    PeerFailed,
    PeerLost,
    error_for,
)
from ncclguard.incident.model import Incident
from ncclguard.outcome import Cause, Outcome
from ncclguard_explain import language


def fields(cause: Cause | None = None, *, expired: bool | None = None) -> dict[str, Any]:
    """The fields of an outcome; `expired` gives it an incident that ended at the deadline, or before."""
    incident = None
    if expired is not None and cause is not None:
        incident = Incident(
            id="i", op="all_reduce", op_id="0/7", group="0", generation=0, cause=cause, culprits=(2,), agreed=True,
            deadline_expired=expired, attempts=1, participants=(0, 1), summary="What happened.", advice="What to do.",
        )  # fmt: skip
    return {
        "agreed": True, "op": "all_reduce", "op_id": "0/7", "cause": cause,
        "culprits": () if cause is None else (2,), "attempts": 1, "chunks": 1, "numel": 10, "nbytes": 40,
        "seconds": 2.5, "algbw": 16.0, "busbw": 21.3, "participants": (0, 1, 2), "torn": False, "incident": incident,
    }  # fmt: skip


def test_the_truth_value_is_ok() -> None:
    assert Outcome(**fields())
    assert not Outcome(**fields(Cause.LATE))


def test_a_success_has_no_error_and_returns_itself() -> None:
    outcome = Outcome(**fields())
    assert outcome.error is None
    assert outcome.raise_if_failed() is outcome
    with pytest.raises(ValueError, match="succeeded and has no error"):
        error_for(outcome)


def test_an_outcome_is_printed_as_its_one_sentence_which_acknowledges_nothing() -> None:
    failed = Outcome(**fields(Cause.LATE, expired=True))
    assert str(Outcome(**fields())) == "all_reduce succeeded on ranks 0-2 in 2.5 s."
    assert str(failed) == "What happened."
    assert str(Outcome(**fields(Cause.LOST))) == "all_reduce failed after 2.5 s: lost by rank 2."
    assert not failed.acknowledged
    assert "busbw=21.3" in repr(failed)


def test_an_outcome_is_frozen_and_takes_keywords_only() -> None:
    outcome = Outcome(**fields())
    with pytest.raises(dataclasses.FrozenInstanceError):
        outcome.agreed = False  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):  # TypeError of a frozen class with slots, before Python 3.12
        outcome.ok = False  # type: ignore[misc]
    with pytest.raises(TypeError):
        Outcome(True)  # type: ignore[call-arg]
    assert [field.name for field in dataclasses.fields(Outcome) if field.init] == list(fields())


@pytest.mark.parametrize(
    ("cause", "expired", "expected"),
    [
        (Cause.LATE, None, CollectiveTimeout),
        (Cause.LATE, False, CollectiveTimeout),
        (Cause.STUCK, False, CollectiveTimeout),
        (Cause.UNKNOWN, True, CollectiveTimeout),
        (Cause.NETWORK, True, CollectiveTimeout),
        (Cause.UNKNOWN, False, CollectiveFailed),
        (Cause.NETWORK, False, CollectiveFailed),
        (Cause.NETWORK, None, CollectiveFailed),
        (Cause.DIVERGED, True, CollectiveMismatch),
        (Cause.LOST, True, PeerLost),
        (Cause.FAILED, False, PeerFailed),
        (Cause.EXITED, True, PeerFailed),
    ],
)
def test_every_cause_has_its_error(cause: Cause, expired: bool | None, expected: type[CollectiveFailed]) -> None:
    outcome = Outcome(**fields(cause, expired=expired))
    with pytest.raises(CollectiveFailed) as caught:
        outcome.raise_if_failed()
    assert type(caught.value) is expected
    assert type(outcome.error) is expected
    assert caught.value.outcome is outcome
    assert isinstance(caught.value, GuardError)
    assert isinstance(caught.value, TimeoutError) == (expected is CollectiveTimeout)
    assert ("timeout" in str(caught.value)) == (expected is CollectiveTimeout)


def test_every_cause_was_covered_above() -> None:
    """A new cause must be given an error on purpose."""
    assert {cause.value for cause in Cause} == {
        "late", "diverged", "failed", "exited", "lost", "stuck", "network", "unknown",
    }  # fmt: skip


def test_the_text_has_what_happened_and_what_to_do() -> None:
    text = str(Outcome(**fields(Cause.LOST, expired=False)).error)
    assert text == "failure of all_reduce (0/7), decided after 2.5 s: What happened. What to do."


def test_the_text_without_an_incident_names_the_ranks() -> None:
    assert "lost by rank 2. See the logs" in str(Outcome(**fields(Cause.LOST)).error)
    many = {**fields(Cause.LOST), "culprits": tuple(range(2, 1000))}
    assert "lost by ranks 2-999. See the logs" in str(Outcome(**many).error)
    assert "unknown. See the logs" in str(Outcome(**{**fields(Cause.UNKNOWN), "culprits": ()}).error)


def test_an_error_survives_pickling_with_its_outcome() -> None:
    """Process pools and launchers send exceptions that way."""
    error = Outcome(**fields(Cause.LATE, expired=True)).error
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is CollectiveTimeout
    assert str(again) == str(error)
    assert again.outcome == Outcome(**fields(Cause.LATE, expired=True))


def test_the_exception_tree() -> None:
    assert issubclass(GuardConfigError, ValueError)
    assert issubclass(GuardConfigError, GuardError)
    for error in (CollectiveTimeout, CollectiveMismatch, PeerLost, PeerFailed):
        assert issubclass(error, CollectiveFailed)
    assert issubclass(CollectiveFailed, GuardError)


class TestAcknowledgement:
    """A failure knows whether the program asked how the collective ended; reading what happened is no such question."""

    @pytest.mark.parametrize(
        "ask",
        [bool, lambda o: not o, lambda o: o.ok, lambda o: o.error, lambda o: o.acknowledge()],
        ids=["bool", "not", "ok", "error", "acknowledge"],
    )
    def test_asking_whether_it_succeeded_counts(self, ask: Any) -> None:
        outcome = Outcome(**fields(Cause.LATE))
        assert not outcome.acknowledged
        ask(outcome)
        assert outcome.acknowledged
        ask(outcome)  # again changes nothing
        assert outcome.acknowledged

    def test_raising_counts(self) -> None:
        outcome = Outcome(**fields(Cause.LATE))
        with pytest.raises(CollectiveTimeout):
            outcome.raise_if_failed()
        assert outcome.acknowledged

    @pytest.mark.parametrize(
        "look",
        [repr, str, "{}".format, copy.copy, copy.deepcopy, dataclasses.astuple, lambda o: o == o,  # noqa: PLR0124
         lambda o: isinstance(o, Outcome)],
        ids=["repr", "str", "format", "copy", "deepcopy", "astuple", "==", "isinstance"],
    )  # fmt: skip
    def test_printing_copying_and_comparing_do_not_count(self, look: Any) -> None:
        outcome = Outcome(**fields(Cause.LATE, expired=True))
        look(outcome)
        assert not outcome.acknowledged

    @pytest.mark.parametrize("name", [*fields(), "failed", "acknowledged"])
    def test_reading_a_field_does_not_count(self, name: str) -> None:
        outcome = Outcome(**fields(Cause.LATE, expired=True))
        getattr(outcome, name)
        assert not outcome.acknowledged

    def test_failed_tells_without_counting(self) -> None:
        assert Outcome(**fields(Cause.LATE)).failed
        assert not Outcome(**fields()).failed

    def test_what_the_text_shows_has_nothing_of_it(self) -> None:
        outcome = Outcome(**fields(Cause.LATE))
        before = repr(outcome)
        outcome.acknowledge()
        assert repr(outcome) == before
        assert "acknowledged" not in before

    def test_acknowledging_one_is_not_acknowledging_another(self) -> None:
        first, second = (Outcome(**fields(Cause.LATE)) for _ in range(2))
        assert not first.ok
        assert not second.acknowledged
        assert first == second


def test_the_error_of_a_mismatch_says_on_every_rank_what_each_called() -> None:
    found = fields(Cause.DIVERGED, expired=False)
    found["incident"] = found["incident"].model_copy(
        update={"sides": (("all_reduce(float32[2], SUM)", (0, 2)), ("barrier()", (1,)))}
    )
    text = str(error_for(Outcome(**found)))
    assert "What happened. Ranks 0, 2 called all_reduce(float32[2], SUM); rank 1 called barrier(). What to do." in text
    language.choose("zh")
    try:
        text = str(error_for(Outcome(**found)))
    finally:
        language.choose(None)
    assert "What happened. rank 0、2 调用了 all_reduce(float32[2], SUM)；rank 1 调用了 barrier()。" in text


def test_who_takes_an_outcome_for_the_reduced_tensor_is_told_where_that_is() -> None:
    outcome = Outcome(**fields(None))
    with pytest.raises(
        AttributeError, match="no attribute 'item': the result is in the tensor that the call was given"
    ):
        outcome.item()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'seconds_'$"):
        outcome.seconds_  # type: ignore[attr-defined]  # noqa: B018
    assert copy.deepcopy(outcome) == pickle.loads(pickle.dumps(outcome)) == outcome


@pytest.mark.parametrize("cause", list(Cause))
def test_a_cause_is_its_value_as_text(cause: Cause) -> None:
    assert str(cause) == f"{cause}" == cause.value == cause
    assert Cause(str(cause)) is cause


@pytest.mark.parametrize(
    ("op", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_reduce", 1, 0.0),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("broadcast", 8, 1.0),
        ("barrier", 8, 0.0),
        ("something_else", 8, 1.0),
    ],
)
def test_bus_factor_is_that_of_nccl_tests(op: str, ranks: int, factor: float) -> None:
    assert bus_factor(op, ranks) == factor
