"""The incident: what it holds, that it travels as JSON, and what a person reads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from ncclguard.incident.model import Incident, RankReport
from ncclguard.outcome import Cause
from ncclguard_explain.cause import MEANING
from ncclguard_explain.ranks import ranks_text

TEXT = "all_reduce(float32[1000], SUM)"
STACK = tuple(f"train.py:{line} in step{line}: call()" for line in range(1, 12))


def incident(**changes: Any) -> Incident:
    """Rank 2 of 4 is late; ranks 0 and 1 wait, rank 3 gave no answer."""
    values: dict[str, Any] = {
        "id": "0-17.0", "op": "all_reduce", "op_id": "0/17", "group": "0", "generation": 0, "cause": Cause.LATE,
        "culprits": (2,), "deadline_expired": True, "timeout": 600.0, "agreed": True, "attempts": 1,
        "participants": (0, 1, 2, 3), "summary": f"{TEXT} failed after 601 s: rank 2 late.", "advice": "See its stack.",
        "ranks": (
            RankReport(rank=0, state="running", operation=TEXT, call_site="train.py:211 in step", age=600.2),
            RankReport(rank=1, state="running", operation=TEXT, call_site="train.py:211 in step", age=601.4),
            RankReport(
                rank=2, host="gpu-07", pid=4242, cause=Cause.LATE, state="none", operation="barrier()",
                call_site="train.py:90 in setup", stack=STACK,
            ),
            RankReport(rank=3, state="silent"),
        ),
    }  # fmt: skip
    return Incident(**{**values, **changes})


class TestModel:
    def test_json_gives_an_equal_incident_back(self) -> None:
        there = incident(sides=((TEXT, (0, 1)), ("barrier()", (2,))))
        assert Incident.from_json(there.to_json()) == there
        assert '"schema_version":1' in there.to_json()

    @given(st.text(st.characters(exclude_categories=[])), st.text(st.characters(exclude_categories=[])))
    def test_any_text_that_a_program_can_hold_travels(self, message: str, frame: str) -> None:
        """Lone surrogates too: they stand for undecodable bytes in file names."""
        there = incident(summary=message, ranks=(RankReport(rank=2, state="none", exception=message, stack=(frame,)),))
        assert Incident.from_json(there.to_json()) == there
        assert str(there).encode()

    def test_another_version_is_refused_with_what_to_do(self) -> None:
        text = incident().to_json().replace('"schema_version":1', '"schema_version":2')
        with pytest.raises(ValidationError, match="schema version 2, this ncclguard reads 1: read it with the version"):
            Incident.from_json(text)

    @pytest.mark.parametrize("text", ["", "{}", "[]", "null", "{"])
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="validation error"):
            Incident.from_json(text)

    def test_it_is_frozen(self) -> None:
        with pytest.raises(ValidationError):
            incident().cause = Cause.LOST
        with pytest.raises(ValidationError):
            incident().ranks[0].pid = 1

    def test_ranks_and_culprits_are_sorted(self) -> None:
        reports = tuple(RankReport(rank=rank, state="none") for rank in (3, 1, 2))
        there = incident(culprits=(3, 1, 3), ranks=reports)
        assert there.culprits == (1, 3)
        assert [report.rank for report in there.ranks] == [1, 2, 3]

    @pytest.mark.parametrize("changes", [{"cause": "tired"}, {"culprits": ("two",)}, {"colour": "red"}, {"id": None}])
    def test_what_cannot_be_is_refused(self, changes: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            incident(**changes)


class TestText:
    def test_who_why_where_and_what_to_do(self) -> None:
        text = str(incident())
        first, *_ = text.splitlines()
        assert first == f"ncclguard incident 0-17.0: {TEXT} failed after 601 s: rank 2 late."
        assert "rank 2 (host gpu-07, pid 4242): late" in text
        assert MEANING[Cause.LATE] in text
        assert "last was in barrier(), called at train.py:90 in setup" in text
        assert f"waiting for up to 601 s (10 min): ranks 0-1 in {TEXT}, called at train.py:211 in step" in text
        assert "no answer from rank 3" in text
        assert "limit 600 s (10 min), deadline passed" in text
        assert "what to do: See its stack." in text

    def test_the_innermost_frames_are_shown_and_the_others_counted(self) -> None:
        text = str(incident())
        assert "3 outer frames left out" in text
        assert "step3:" not in text
        assert text.index("step4:") < text.index("step11:")

    def test_diverged_shows_both_sides(self) -> None:
        sides = ((TEXT, (0, 1)), ("all_reduce(float32[999], SUM)", (2, 3)))
        text = str(incident(cause=Cause.DIVERGED, culprits=(), sides=sides))
        assert f"ranks 0-1 called {TEXT}" in text
        assert "ranks 2-3 called all_reduce(float32[999], SUM)" in text

    def test_an_exception_is_shown(self) -> None:
        report = RankReport(rank=2, cause=Cause.FAILED, state="none", exception="KeyError at eval.py:3 in f: 'x'\nmore")
        assert "raised KeyError at eval.py:3 in f: 'x'" in str(incident(cause=Cause.FAILED, ranks=(report,)))

    def test_what_is_not_known_is_said(self) -> None:
        assert "rank 2: nothing more is known" in str(incident(ranks=()))
        report = RankReport(rank=2, cause=Cause.LATE, state="none")
        assert "stack: unknown, the rank sent none" in str(incident(ranks=(report,)))
        assert "limit" not in str(incident(timeout=None))

    def test_a_view_that_is_not_agreed_and_a_torn_tensor_are_said(self) -> None:
        text = str(incident(agreed=False, torn=True))
        assert "the view of one rank" in text
        assert "the tensor is torn" in text
        assert "torn" not in str(incident())
        assert "view of one rank" not in str(incident())

    def test_a_thousand_ranks_stay_readable(self) -> None:
        reports = [RankReport(rank=rank, state="running", operation=TEXT, age=30.0) for rank in range(500)]
        reports += [RankReport(rank=rank, state="none", cause=Cause.LATE, stack=STACK) for rank in range(500, 1000)]
        text = str(incident(culprits=tuple(range(500, 1000)), ranks=tuple(reports)))
        assert "ranks 0-499 in" in text
        assert "and ranks 508-999: see to_json()" in text
        assert len(text.splitlines()) < 150

    def test_control_characters_of_others_do_not_reach_the_terminal(self) -> None:
        report = RankReport(rank=2, state="none", exception="Boom \x1b[2J\x07", note="a\tb")
        text = str(incident(ranks=(report,)))
        assert "\x1b" not in text
        assert "Boom \\x1b[2J\\x07" in text

    def test_every_cause_has_its_meaning(self) -> None:
        assert set(MEANING) == set(Cause)


@given(st.sets(st.integers(0, 10_000), max_size=14))
def test_shortened_ranks_say_the_same(ranks: set[int]) -> None:
    text = ranks_text(ranks)
    if not ranks:
        assert text == "no rank"
        return
    head, _, numbers = text.partition(" ")
    assert head == ("rank" if len(ranks) == 1 else "ranks")
    told: set[int] = set()
    for part in numbers.split(", "):
        first, _, last = part.partition("-")
        told |= set(range(int(first), int(last or first) + 1))
    assert told == ranks


def test_many_scattered_ranks_are_counted() -> None:
    assert ranks_text(range(0, 200, 2)).endswith(", 30, ... (100 in all)")
