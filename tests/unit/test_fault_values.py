"""Faults as values: what can be armed, what NCCLGUARD_FAULT may say, and that nothing strikes uninvited."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclguard import GuardConfigError, faults
from ncclguard.faults import injection
from ncclguard.faults.fault import PARAMETERS, Alteration, parse


@pytest.fixture(autouse=True)
def nothing_stays_armed() -> Iterator[None]:
    faults.disarm()
    yield
    faults.disarm()


@pytest.mark.parametrize(
    "text",
    [
        "kill@rank=2,op=3",
        "kill@rank=0,op=0,after=0.5,after_bytes=1000,children=2",
        "late@rank=1,op=0,seconds=5.0",
        "stop@rank=1,op=7,seconds=0.5",
        "gil@rank=1,op=7,seconds=0.5,after=1.0",
        "exit@rank=1,op=7,code=3",
        "mismatch@rank=1,op=7,of=dtype",
        "reset@rank=1,op=7,after_bytes=65536,times=3",
        "late@rank=1,op=12,seconds=5.0,raw=1",
        "stop@rank=1,op=0,seconds=5.0,engine=engine 2",
    ],
)
def test_a_fault_and_its_text_are_the_same(text: str) -> None:
    (fault,) = parse(text)
    assert str(fault) == text
    assert parse(str(fault)) == (fault,)


def test_every_fault_can_be_written_with_rank_op_and_what_it_needs() -> None:
    for name, takes in PARAMETERS.items():
        needs = ",seconds=1" if "seconds!" in takes else ""
        assert parse(f"{name}@rank=0,op=0{needs}")[0].fault == name


def test_several_faults_are_separated_by_semicolons_and_may_have_spaces() -> None:
    assert [str(fault) for fault in parse(" exception@rank=0,op=1 ; oom@rank = 1 , op = 2 ")] == [
        "exception@rank=0,op=1",
        "oom@rank=1,op=2",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no @"),
        ("kill", "has no @"),
        ("kill@rank=2", "does not say its op"),
        ("kill@", "is no name=value"),
        ("kill@rank=2,op=3;", "has no @"),
        ("kil@rank=2,op=3", "did you mean kill"),
        ("kill@rank=2,op=3,op=4", "op is given twice"),
        ("kill@rank=two,op=3", "rank='two'"),
        ("kill@rank=-1,op=3", "0 or more"),
        ("kill@rank=2,op=3.5", "not a whole number"),
        ("kill@rank=2,op=3,seconds=1", "kill takes no seconds; it takes children, after, after_bytes"),
        ("skip@rank=2,op=3,after=1", "skip takes no after; it takes nothing but rank and op"),
        ("late@rank=2,op=3", "late needs seconds"),
        ("late@rank=2,op=3,seconds=-1", "0 or more"),
        ("late@rank=2,op=3,seconds=inf", "finite"),
        ("late@rank=2,op=3,seconds=nan", "finite"),
        ("mismatch@rank=2,op=3,of=colour", "of=shape or of=dtype"),
        ("reset@rank=2,op=3,times=0", "1 or more"),
        ("reset@rank=2,op=3,times=2", "needs after_bytes"),
        ("reset@rank=2,op=3,colour=red", "is no name=value; names: rank, op"),
        ("reset@rank=0,op=1,engine=A", "reset cannot strike an engine; late, kill"),
        ("kill@rank=0,op=1,raw=1,engine=A", "kill strikes 'A' in its update op; leave raw"),
        ("mismatch@rank=0,op=1,of=dtype,engine=A", "leave raw, watched_op, after_bytes and of out"),
    ],
)
def test_what_the_variable_may_not_say_is_refused_with_the_offending_part(text: str, says: str) -> None:
    with pytest.raises(GuardConfigError, match=re.escape(says)):
        faults.from_environment({"NCCLGUARD_FAULT": text, "NCCLGUARD_ALLOW_DRILL": "1"})
    assert faults.armed() == ()


@pytest.mark.parametrize("permission", [{}, {"NCCLGUARD_ALLOW_DRILL": "0"}, {"NCCLGUARD_ALLOW_DRILL": "yes"}])
def test_the_variable_alone_breaks_no_job(permission: dict[str, str]) -> None:
    with pytest.raises(GuardConfigError, match="set NCCLGUARD_ALLOW_DRILL=1 for a drill, or unset NCCLGUARD_FAULT"):
        faults.from_environment({"NCCLGUARD_FAULT": "kill@rank=0,op=0", **permission})
    assert faults.armed() == ()


def test_without_the_variable_nothing_is_armed() -> None:
    assert faults.from_environment({"NCCLGUARD_ALLOW_DRILL": "1"}) == ()
    assert faults.before_operation(0, 0) is None


def test_a_name_that_the_variable_cannot_hold_is_refused() -> None:
    with pytest.raises(GuardConfigError, match="give one without , and ;"):
        faults.at(rank=0, op=0, fault="kill", engine="a, b")


def test_a_fault_of_an_engine_strikes_no_rank_and_no_other_engine() -> None:
    faults.at(rank=0, op=1, fault="exception", engine="A")
    assert faults.before_operation(0, 1) is None
    assert injection.before_bucket("B", 0, 1) is None and injection.before_bucket("A", 0, 0) is None
    with pytest.raises(faults.InjectedFault, match="engine=A"):
        injection.before_bucket("A", 0, 1)
    assert faults.armed() == ()


def test_an_engine_that_is_started_again_in_a_drill_is_not_struck_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("_NCCLGUARD_DRILL_DIR", str(tmp_path))
    environ = {"NCCLGUARD_FAULT": "mismatch@rank=0,op=1,engine=A", "NCCLGUARD_ALLOW_DRILL": "1"}
    for expected in (Alteration.OTHER_SHAPE, None):
        monkeypatch.setattr(injection, "_engines_armed", False)  # as in a new process
        injection.for_engines(environ)
        injection.for_engines(environ)  # by the next receiver of the process
        assert injection.before_bucket("A", 0, 1) is expected


def test_the_variable_alone_breaks_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injection, "_engines_armed", False)
    with pytest.raises(GuardConfigError, match="set NCCLGUARD_ALLOW_DRILL=1 for a drill, or unset NCCLGUARD_FAULT"):
        injection.for_engines({"NCCLGUARD_FAULT": "kill@rank=0,op=0,engine=A"})


def test_an_unknown_keyword_is_refused() -> None:
    with pytest.raises(GuardConfigError, match="colour"):
        faults.at(rank=0, op=0, fault="kill", colour="red")


@pytest.mark.parametrize("rank", [True, "2", 2.0, None])
def test_a_rank_that_is_no_whole_number_is_refused(rank: object) -> None:
    with pytest.raises(GuardConfigError, match="rank of kill"):
        faults.at(rank=rank, op=0, fault="kill")  # type: ignore[arg-type]


def test_a_fault_strikes_its_rank_at_its_operation_and_only_once() -> None:
    faults.at(rank=1, op=2, fault="exception")
    for rank, sequence in ((0, 2), (1, 1), (1, 3)):
        assert faults.before_operation(rank, sequence) is None
    with pytest.raises(faults.InjectedFault, match="exception@rank=1,op=2"):
        faults.before_operation(1, 2)
    assert faults.before_operation(1, 2) is None
    assert faults.armed() == ()


def test_exit_ends_the_program_with_its_code() -> None:
    faults.at(rank=0, op=0, fault="exit", code=3)
    with pytest.raises(SystemExit) as ended:
        faults.before_operation(0, 0)
    assert ended.value.code == 3


def test_oom_raises_what_torch_raises() -> None:
    import torch

    faults.at(rank=0, op=0, fault="oom")
    with pytest.raises(torch.OutOfMemoryError):
        faults.before_operation(0, 0)


@pytest.mark.parametrize(
    ("how", "alteration"),
    [
        ({"fault": "skip"}, faults.Alteration.SKIP),
        ({"fault": "extra"}, faults.Alteration.EXTRA),
        ({"fault": "mismatch"}, faults.Alteration.OTHER_SHAPE),
        ({"fault": "mismatch", "of": "dtype"}, faults.Alteration.OTHER_DTYPE),
    ],
)
def test_what_only_the_caller_can_alter_is_told_to_it_once(how: dict[str, str], alteration: faults.Alteration) -> None:
    faults.at(rank=0, op=0, **how)  # type: ignore[arg-type]
    assert faults.before_operation(0, 0) is alteration
    assert faults.before_operation(0, 0) is None
