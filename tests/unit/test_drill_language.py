"""What `ncclguard drill` says in Chinese, for all that a drill may come to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from ncclguard.faults import drill
from ncclguard.faults.drill import Findings, main
from ncclguard.faults.drill_channel import ChannelFindings
from ncclguard_explain import language

#: Two English words in a row; what a program, an option or the data is called is one word, or code.
SENTENCE = re.compile(r"\b[a-z]{2,} [a-z]{2,}\b")
CODE = re.compile(r"ncclguard drill|\w+\(.*?\)|--?\w+")


@pytest.fixture
def chinese() -> Iterator[None]:
    language.choose("zh")
    yield
    language.choose(None)


def found(**changed: object) -> Findings:
    values = {
        "fault": "kill", "rank": 2, "ranks": (0, 1, 2, 3), "struck_after": 0.5, "known_by": {0: 0.2, 1: 0.3, 3: 0.3},
        "named": (2,), "cause": "lost", "summary": "all_reduce(float32[10], SUM) failed after 0.2 s: rank 2 lost.",
        "torn": (), "alone": (), "went_on": {0: 1.0, 1: 1.0, 3: 1.1}, "participants": (0, 1, 3), "calls": 9,
        "afterwards": ("went on without rank 2 after 1.8 s",),
    }  # fmt: skip
    return Findings(**{**values, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "findings",
    [
        found(),
        found(known_by={0: 0.2}, named=(), cause="different verdicts", alone=(0, 1), torn=(1,), went_on={}),
        found(named=(1,), raw=True, went_on={}),
        found(cause="stuck"),
        found(cause="gone", summary=language.tr("{operation} went on without {ranks}", operation="all_reduce", ranks="rank 2")),
        found(fault="late", known_by={}),
        found(fault="reset", known_by={}),
        found(ranks=()),
        found(struck_after=None),
        found(struck_after=None, watched=True),
        found(struck_after=None, watched=True, calls=0),
        found(struck_after=None, watched=True, calls=0, fault="skip"),
        found(struck_after=None, calls=0),
        found(struck_after=None, rank=7),
    ],
)  # fmt: skip
def test_no_sentence_of_the_findings_stays_english(findings: Findings, chinese: None) -> None:
    lines = [drill._line(what, text) for what, text in findings.lines()]
    assert not [line for line in lines if SENTENCE.search(CODE.sub("", line))], lines
    assert all(re.search(r"[\u4e00-\u9fff]", line) for line in lines)
    assert all("\u4e00" > letter for what, text in findings.lines() for letter in f"{what}{text}"), "data is English"


def test_the_struck_rank_by_another_cause_is_told_apart_from_another_rank() -> None:
    said = {
        name: dict(found(**how).lines())["named"]
        for name, how in {"cause": {"cause": "stuck"}, "rank": {"named": (1,)}}.items()
    }
    assert said == {
        "cause": "rank 2, stuck: the right rank, by a wrong cause: it was lost",
        "rank": "rank 1, lost: wrong: it was rank 2",
    }


def channel(**changed: object) -> ChannelFindings:
    values = {
        "fault": "stop", "engine": "B", "worker": 0, "known": ("A", "B", "C"), "struck": True, "publishes": 5, "version": 1,
        "took": 3.0, "limit": 9.0, "engines": ("A", "C"), "left_out": {"B": "stuck"}, "others": ("A", "C"), "afterwards": 3,
        "summary": "broadcast(uint8[10], src=0) failed after 3 s: rank 2 stuck.", "back": (4, 12.5),
    }  # fmt: skip
    return ChannelFindings(**{**values, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("findings", "passed"),
    [
        (channel(), True),
        (channel(fault="kill", left_out={"B": "lost"}, back=None), True),
        (channel(left_out={}, engines=("A", "B", "C"), back=(2, 1.0)), True),
        (channel(back=None), False),
        (channel(took=11.5), False),
        (channel(engines=("A",)), False),
        (channel(engines=()), False),
        (channel(left_out={"A": "late", "B": "stuck"}), False),
        (channel(left_out={"B": "late"}), False),
        (channel(left_out={"B": ""}), False),
        (channel(left_out={}), False),
        (channel(version=None), False),
        (channel(struck=False), False),
        (channel(struck=False, known=()), False),
        (channel(struck=False, known=("A",)), False),
    ],
)
def test_the_findings_of_a_channel_are_judged_and_said_in_chinese(
    findings: ChannelFindings, passed: bool, chinese: None
) -> None:
    assert findings.passed is passed
    lines = [drill._line(what, text) for what, text in findings.lines()]
    assert not [line for line in lines if SENTENCE.search(CODE.sub("", line))], lines
    assert all("\u4e00" > letter for what, text in findings.lines() for letter in f"{what}{text}"), "data is English"


def test_who_knew_stands_apart_from_the_words_after_it(chinese: None) -> None:
    line = drill._line("known", dict(found(known_by={0: 0.2}).lines())["known"])
    assert line.endswith("rank 0 在 0.20 s 内知道，最早的在 0.20 s 后")


def test_the_refusal_is_chinese(
    chinese: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCLGUARD_ALLOW_DRILL", raising=False)
    assert main(["--fault", "late"]) == 2
    text = capsys.readouterr().err
    assert "NCCLGUARD_ALLOW_DRILL=1" in text and not SENTENCE.search(CODE.sub("", text))


@pytest.mark.parametrize("end", ["exit 1", "still running", "unknown"])
def test_the_end_of_a_rank_is_chinese(end: str, chinese: None) -> None:
    assert drill._end_of(end) == end
    assert re.search(r"[\u4e00-\u9fff]", language.say(drill._end_of(end)))


@pytest.mark.processes
def test_a_drill_of_a_command_is_chinese_and_its_json_is_not(
    chinese: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("NCCLGUARD_ALLOW_DRILL", "1")
    assert main(["--fault", "kill", "--rank", "1", "--json", f"{tmp_path}/found.json", "--", "true"]) == 1
    shown = capsys.readouterr().out.splitlines()[1:]
    assert not [line for line in shown if SENTENCE.search(CODE.sub("", line))]
    assert shown[0] == "  作业：     true" and shown[-1] == "  演练：     未通过"
    with open(f"{tmp_path}/found.json", encoding="utf-8") as file:
        assert json.load(file)["ended"] == "exit code 0"


def test_a_rank_that_the_job_does_not_have_is_said_to_be_none() -> None:
    said = dict(found(struck_after=None, rank=7).lines())
    assert str(said["happened"]) == "nothing: the job has no rank 7; it has ranks 0-3"
