"""What `explain` says of ncclguard's own incidents is what their panel said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from explain_logs import timeout

from ncclguard.incident.model import Incident
from ncclguard.incident.report import show
from ncclguard_explain import Report, explain
from ncclguard_explain.cause import (
    ADVICE,
    ADVICE_ABORTED,
    ADVICE_INTERRUPTED,
    ADVICE_SOURCE_FIRST,
    ADVICE_WATCHED,
    Cause,
)
from ncclguard_explain.language import choose, said

Explain = Callable[..., Report]

WATCHED = Path(__file__).parents[3] / "docs" / "gallery" / "watch-late"
WRITTEN = json.loads((WATCHED / "incident.json").read_text())
INCIDENT = Incident.model_validate(WRITTEN["incident"] | {"further": "`watch()` only observes. A guarded call ends."})


def panel(folder: Path, language: str, incident: Incident = INCIDENT) -> Path:
    """A log with the panel of the incident."""
    choose(language)
    try:
        with (folder / "job.log").open("w") as file:
            show(incident, file)
    finally:
        choose(None)
    return folder / "job.log"


def written(folder: Path) -> Path:
    (folder / "incident.json").write_text(json.dumps(WRITTEN | {"incident": INCIDENT.model_dump(mode="json")}))
    return folder


@pytest.mark.parametrize("of", ["json", "en", "zh"])
def test_a_late_rank_of_watch_has_the_panels_stack_and_advice_and_no_other(of: str, tmp_path: Path) -> None:
    report = explain([os.fspath(written(tmp_path) if of == "json" else panel(tmp_path, of))])
    assert (report.culprits, report.cause.value, report.decision) == ((2,), "late", "fix-code")
    (stack,) = report.stacks
    assert (stack.rank, stack.frames[0]) == (
        2,
        'train.py:50 in <module>: watched() if os.environ.get("WATCHED") else main()',
    )
    assert any(frame.endswith("_be_late: late(fault.seconds or 0.0)") for frame in stack.frames), stack.frames
    advice = (INCIDENT.advice, INCIDENT.further)
    if of == "zh":
        assert report.next_step.startswith("先看") or "timeout" in report.next_step, report.next_step
        assert not any("py-spy" in text or "TORCH_FR" in text for text in report.advice)
    else:
        assert (report.next_step, report.advice) == (advice[0], advice)
    assert not report.reason.endswith((".", "。"))
    assert {row.rank: row.state for row in report.ranks} == {0: "waiting", 1: "waiting", 2: "missing"}
    if of == "json":
        assert (report.world_size, report.world_size_basis) == (3, "stated")


#: The log of a job that went on without a rank, up to then, and its steps behind that.
WENT_ON = [
    *(f"step {n}: loss 1.2" for n in range(1, 5)),
    "ncclguard run: rank 2 has ended with exit code -9; ranks 0-1 may go on without it",
    "ncclguard incident 7f565216-0-cpu-39.0: all_reduce(float32[2420], SUM) failed after 0.0108 s: rank 2 lost. cause: lost",
    "ncclguard: went on without rank 2 after 0.2 s",
]
STEPS = [f"step {n}: loss 1.1" for n in range(5, 11)]
OF_LOST = {
    "cause": "lost", "op": "all_reduce", "culprits": [2],
    "summary": "all_reduce(float32[2420], SUM) failed after 0.0108 s: rank 2 lost.",
    "afterwards": [{"kind": "went on", "ranks": [2], "participants": 2, "seconds": 0.2, "step": None}],
}  # fmt: skip


@pytest.mark.parametrize("reports", [False, True])
def test_a_job_that_went_on_without_a_rank_and_steps_on_has_no_incident(reports: bool, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("\n".join([*WENT_ON, *STEPS]) + "\n")
    if reports:
        (tmp_path / "incident.json").write_text(json.dumps(WRITTEN | {"incident": WRITTEN["incident"] | OF_LOST}))
    report = explain([os.fspath(tmp_path)])
    assert not report.incident, report.summary
    assert "The job went on after: all_reduce(float32[2420], SUM) failed" in report.summary, report.summary
    other = OF_LOST | {"summary": "barrier() failed after 9 s: rank 1 late.", "culprits": [1], "cause": "late"}
    (tmp_path / "later.json").write_text(json.dumps(WRITTEN | {"incident": WRITTEN["incident"] | other}))
    assert explain([os.fspath(tmp_path)]).culprits == (1,)  # of which the log says nothing


@pytest.mark.parametrize("of", ["json", "en", "zh"])
def test_a_job_that_went_on_and_does_not_say_what_became_of_it_need_not_be_started_again(
    of: str, tmp_path: Path
) -> None:
    said = {"en": WENT_ON[-1], "zh": "ncclguard: 0.2 s 后在没有 rank 2 的情况下继续训练"}
    if of == "json":
        (tmp_path / "incident.json").write_text(json.dumps(WRITTEN | {"incident": WRITTEN["incident"] | OF_LOST}))
    else:
        (tmp_path / "job.log").write_text("\n".join([*WENT_ON[:-1], said[of]]) + "\n")
    report = explain([os.fspath(tmp_path)])
    assert (report.culprits, report.decision) == ((2,), "unknown")
    assert report.decision_reason == "the job went on without rank 2, and nothing here says that it has ended"
    (tmp_path / "other.log").write_text("\n".join(WENT_ON[:-1]) + "\n")
    (tmp_path / ("incident.json" if of == "json" else "job.log")).unlink()
    assert explain([os.fspath(tmp_path)]).decision_reason.startswith("a process was killed from outside")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_panel_says_the_same_wherever_its_lines_are_cut(language: str, tmp_path: Path) -> None:
    for length in range(48):
        call = f"all_reduce(float32[2], SUM, name='{'x' * length}')"
        incident = INCIDENT.model_copy(update={"summary": f"{call} failed after 3.02 s: rank 2 late."})
        report = explain([os.fspath(panel(tmp_path, language, incident))])
        assert (report.culprits, report.cause, report.decision) == ((2,), Cause.LATE, "fix-code"), length
        assert len(report.ranks) == 3, length


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_panel_behind_the_lines_of_the_ranks_is_read(language: str, tmp_path: Path) -> None:
    log = panel(tmp_path, language)
    alone = explain([os.fspath(log)])
    said = {"en": "stood still for 3.02 s: rank 2 late.", "zh": "停滞了 3.02 s：rank 2 迟到。"}[language]
    line = f"ncclguard incident {INCIDENT.id}: {INCIDENT.summary.split(' stood')[0]} {said}"
    by = {"en": " (rank 0 reports)", "zh": " （由 rank 0 报告）"}[language]
    log.write_text(f"{line}{by}\n{line}\n{log.read_text()}")
    report = explain([os.fspath(log)])
    assert (report.next_step, report.ranks, report.decision) == (alone.next_step, alone.ranks, alone.decision)
    assert report.notes == alone.notes


def test_a_launcher_that_writes_in_front_of_each_line_changes_nothing(tmp_path: Path) -> None:
    log = panel(tmp_path, "en")
    alone = explain([os.fspath(log)])
    log.write_text("".join(f"[default0]:{line}\n" for line in log.read_text().splitlines()))
    report = explain([os.fspath(log)])
    assert (report.reason, report.next_step, report.ranks) == (alone.reason, alone.next_step, alone.ranks)
    assert [stack.frames for stack in report.stacks] == [stack.frames for stack in alone.stacks]


@pytest.mark.parametrize("of", ["json", "en", "zh"])
def test_what_ranks_called_that_differ_is_told_with_who_did(of: str, tmp_path: Path) -> None:
    calls = {"all_reduce(float32[1000], SUM)": (0, 1), f"broadcast(float32[999], src=0, name='{'x' * 60}')": (2,)}
    incident = INCIDENT.model_copy(
        update={
            "summary": "all_reduce(float32[1000], SUM) failed after 0.03 s: rank 2 diverged.",
            "cause": Cause.DIVERGED, "sides": tuple(calls.items()),
        }
    )  # fmt: skip
    if of == "json":
        (tmp_path / "a.json").write_text(json.dumps(WRITTEN | {"incident": incident.model_dump(mode="json")}))
    report = explain([os.fspath(tmp_path if of == "json" else panel(tmp_path, of, incident))])
    assert {side.what: side.ranks for side in report.sides} == calls
    assert {row.rank: row.state for row in report.ranks} == {0: "waiting", 1: "waiting", 2: "different"}


def test_the_page_of_a_report_is_not_read_beside_its_json(tmp_path: Path) -> None:
    (tmp_path / "incident-a.json").write_text(json.dumps(WRITTEN))
    (tmp_path / "incident-a.html").write_text("<p>ValueError: of another rank</p>")
    assert [Path(name).name for name in explain([os.fspath(tmp_path)]).inputs] == ["incident-a.json"]
    (tmp_path / "incident-a.json").unlink()
    assert [Path(name).name for name in explain([os.fspath(tmp_path)]).inputs] == ["incident-a.html"]


#: Of a job whose evaluation failed, and that went on.
EVALUATED = """\
ncclguard: rank 1: evaluation evaluate() at step 9 failed here: KeyError: 'label'
ncclguard incident a3a4fbdf-0-cpu-1.0: all_reduce(float32[3], SUM, phase='evaluation evaluate() at step 9, try 1') failed \
after 0.454 s: rank 1 raised KeyError at train.py:19 in metric: 'label'.
ncclguard evaluation evaluate() at step 9: failed after 1 try; NaN is returned, because no `fallback=` was given, and \
training goes on.
"""


def test_an_evaluation_that_ended_is_no_incident_unless_something_came_after_it(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(EVALUATED)
    report = explain([os.fspath(log)])
    assert not report.incident and "rank 1 raised KeyError" in report.summary, report.summary
    log.write_text(
        EVALUATED + EVALUATED.replace("step 9", "step 18").replace("'label'", "'other'")
    )  # the next one, too
    assert not explain([os.fspath(log)]).incident
    log.write_text(f'{EVALUATED}Traceback (most recent call last):\n  File "train.py", line 3\nValueError: later\n')
    assert explain([os.fspath(log)]).incident
    zh = "ncclguard evaluation evaluate() at step 9：1 次尝试后失败；返回 NaN，训练继续。"
    log.write_text("\n".join([*EVALUATED.splitlines()[:-1], zh]) + "\n")
    assert not explain([os.fspath(log)]).incident


def later(folder: Path, name: str, at: str, rank: int) -> Report:
    """The report on a folder to which an incident of this rank and time is added."""
    incident = WRITTEN["incident"] | {"culprits": [rank], "summary": f"barrier() failed after 3 s: rank {rank} late."}
    (folder / name).write_text(json.dumps(WRITTEN | {"written_at": at, "incident": incident}))
    return explain([os.fspath(folder)])


def test_of_several_incidents_the_latest_is_told_and_the_others_are_named(tmp_path: Path) -> None:
    assert later(tmp_path, "b.json", "2026-11-20T10:00:00+00:00", rank=1).notes == ()
    report = later(tmp_path, "a.json", "2026-11-20T11:00:00+00:00", rank=2)
    assert report.culprits == (2,)
    assert report.notes[0].startswith(
        "2 incidents of ncclguard are in these inputs, and the answer is about the latest"
    )
    assert "b.json: barrier() failed after 3 s: rank 1 late" in report.notes[0]


FAILED = "all_reduce(Float [4], group 0 default_pg, number 9) stood still for 4.02 s"
#: What torch prints of a rank that somebody interrupts while it is at work of its own.
INTERRUPTED = [
    "[rank{rank}]: Traceback (most recent call last):",
    '[rank{rank}]:   File "/job/train.py", line 40, in <module>',
    "[rank{rank}]:     main()",
    '[rank{rank}]:   File "/job/train.py", line 31, in main',
    "[rank{rank}]:     {line}",
    "[rank{rank}]: KeyboardInterrupt",
]


def test_the_limit_and_the_stack_are_those_of_the_incident_that_is_told(tmp_path: Path) -> None:
    for name, hour, limit in (("a", "08", 2.0), ("b", "09", 4.9995)):
        one = INCIDENT.model_copy(
            update={"id": name, "timeout": limit, "summary": f"all_reduce() of {name} failed: rank 2 late."}
        )
        at = {"incident": one.model_dump(mode="json"), "written_at": f"2026-11-20T{hour}:00:00+00:00"}
        (tmp_path / f"{name}.json").write_text(json.dumps(WRITTEN | at))
    report = explain([os.fspath(tmp_path)])
    assert "of b failed" in report.reason
    assert report.effective_timeout_ms == 5000
    (stack,) = report.stacks
    assert stack.rank == 2 and stack.file.endswith("b.json")


def interrupted(rank: int, line: str = "batch = augment(rows)") -> list[str]:
    return [row.format(rank=rank, line=line) for row in INTERRUPTED]


@pytest.mark.parametrize(
    "told",
    [
        "the ranks called different operations, and no side is a majority.",
        "the ranks were in different operations, and nothing tells who is wrong.",
    ],
)
def test_where_the_ranks_could_name_nobody_a_silent_one_is_not_named(told: str, explain_lines: Explain) -> None:
    """Rank 0 ended without a word, and the others say what they waited for."""
    lines = [f"ncclguard incident 7c1-0-gloo-9.0: {FAILED}: {told} (rank 1 reports it)"]
    lines += [line for rank in range(1, 8) for line in timeout(rank)]
    assert explain_lines(lines[1:]).culprits == (0,)  # what silence says
    report = explain_lines(lines)
    assert (report.culprits, report.cause.value) == ((), "diverged")
    assert told.rstrip(".") in report.reason


def test_who_interrupts_a_job_that_hangs_changes_nothing_of_its_incident(explain_lines: Explain) -> None:
    lines = [
        f"ncclguard incident 7c1-0-gloo-9.0: {FAILED}: rank 2 late. (rank 0 reports it)",
        f"ncclguard incident 7c1-0-gloo-9.1: {FAILED}: rank 2 raised KeyboardInterrupt at train.py:31. (rank 0 reports it)",
        *interrupted(2),
    ]
    report = explain_lines(lines)
    assert (report.culprits, report.cause.value) == ((2,), "late")


@pytest.mark.parametrize(
    "why",
    [
        "all ranks were ended from outside, with Ctrl-C",
        "rank 1 (gpu-02) raised KeyboardInterrupt at train.py:22 in step",
    ],
)
def test_the_panel_of_an_interruption_is_of_no_class_of_crashes(why: str, explain_lines: Explain) -> None:
    said = f"all_reduce(float32[9], SUM) failed after 5.5 s: {why}."
    panel = of_panel("60e4359b-0-cpu-10.0", said, "cause: failed", f"what to do: {ADVICE_INTERRUPTED}")
    report = explain_lines(panel)
    assert (report.decision, report.cause_class) == ("unknown", "unknown")
    assert report.advice[0] == ADVICE_INTERRUPTED


def test_a_healthy_job_that_somebody_interrupts_is_no_incident(explain_lines: Explain) -> None:
    assert not explain_lines([*interrupted(0), *interrupted(1)]).incident
    in_a_collective = [*interrupted(0), *interrupted(1)]
    in_a_collective[4:4] = ['[rank0]:   File "/x/torch/distributed/distributed_c10d.py", line 3252, in all_reduce']
    assert explain_lines(in_a_collective).incident


def test_frames_of_cpp_that_construct_an_error_are_no_exception(explain_lines: Explain) -> None:
    frame = "frame #{n}: c10::{name}::{name}(c10::SourceLocation, std::string) + 0x72 (0x7fa99 in /x/libc10.so)"
    names = ("DistError", "DistNetworkError", "DistStoreError", "OutOfMemoryError")
    assert not explain_lines([frame.format(n=n, name=name) for n, name in enumerate(names)]).incident


def test_a_job_that_has_told_of_itself_is_not_advised_to(explain_lines: Explain) -> None:
    lines = [line for rank in (0, 1, 3) for line in timeout(rank)]
    assert any("ncclguard.watch()" in text for text in explain_lines(lines).advice)
    told = f"ncclguard incident 7c1-0-gloo-9.0: {FAILED}: rank 2 late. (rank 0 reports it)"
    assert not any("ncclguard.watch()" in text for text in explain_lines([told, *lines]).advice)


@pytest.mark.parametrize(
    "why", ["all ranks were ended from outside, with Ctrl-C; rank 1 had not come to it", "the rank did not come"]
)
def test_an_end_from_outside_is_told_as_one(explain_lines: Explain, why: str) -> None:
    line = "ncclguard incident 1f3fcaed-0-gloo-19.0: all_reduce(Float [], group 0 default_pg, number 19) stood still for 13.9 s: {}. (rank 0 reports it)"
    report = explain_lines([line.format(why), "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:38313"])
    assert report.culprits == () and report.decision == "unknown"
    assert ("from outside" in report.decision_reason) == ("outside" in why)


def test_an_error_that_says_more_than_the_panel_is_of_the_same_incident(explain_lines: Explain) -> None:
    said = "all_reduce(float32[], SUM) failed after 0.00484 s: rank 1 diverged."
    sides = "Ranks 0, 2 called all_reduce(float32[], SUM); rank 1 called all_reduce(float32[3], SUM)."
    frame = '[rank0]:   File "/job/train.py", line 9, in <module>'
    error = f"[rank0]: ncclguard.errors.CollectiveMismatch: failure of all_reduce (0:cpu/19) after 0.066 s: {said} {sides} {ADVICE[Cause.DIVERGED]}"
    panel = [
        f"╭─ ncclguard incident 710735a8-0-cpu-19.0 {'─' * 30}╮",
        f"│ {said} │",
        "│ cause: diverged │",
        "╰" + "─" * 70 + "╯",
    ]
    report = explain_lines(["[rank0]: Traceback (most recent call last):", frame, error, *panel])
    assert report.culprits == (1,)
    assert not any("2 incidents" in note for note in report.notes), report.notes


def of_panel(identifier: str, *said: str) -> list[str]:
    """A panel whose lines are wrapped, as the terminal makes it."""
    return [f"╭─ ncclguard incident {identifier} {'─' * 30}╮", *(f"│ {line} │" for line in said), "╰" + "─" * 70 + "╯"]


SAID = "all_reduce(float32[68], SUM) failed after 0.0395 s: rank 1 raised ValueError at pl.py:15 in training_step:"


def test_the_panel_of_a_rank_that_raised_says_what_to_the_end_of_its_sentence(explain_lines: Explain) -> None:
    panel = of_panel(
        "c58331bf-0-cpu-27.0", SAID, "bad batch.", "cause: failed, raised an exception while the others waited"
    )
    report = explain_lines(panel)
    assert report.culprits == (1,)
    assert report.reason.endswith("in training_step: bad batch")
    assert report.decision == "fix-code"


@pytest.mark.parametrize(
    ("do", "wrapped", "last"),
    [
        (
            "what to do: Restart it, unless the job goes on without it",
            '(`resilient_step`, or on_lost="shrink").',
            "(operation 0:cpu:1/4, group 0)",
        ),
        (
            "怎么办：看日志。如果作业没有不带它继续下去",
            '（`resilient_step`，或 on_lost="shrink"），就重启它。',
            "（操作 0:cpu:1/4，组 0）",
        ),
    ],
)
def test_an_advice_goes_on_where_a_line_begins_with_a_bracket(
    do: str, wrapped: str, last: str, explain_lines: Explain
) -> None:
    panel = of_panel("c5-0-cpu-4.0", "all_reduce(float32[4], SUM) failed after 0.1 s: rank 1 lost.", do, wrapped, last)
    report = explain_lines(panel)
    assert report.culprits == (1,)
    assert wrapped in report.next_step and last not in report.next_step


@pytest.mark.parametrize("by", ["Got the following error when running the callback: ", ""])
def test_the_error_that_torch_hands_on_is_that_of_its_incident(by: str, explain_lines: Explain) -> None:
    """Rank 0's RuntimeError is no failure of its own, and the incident is one, whoever tells of it."""
    traceback = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/job/pl.py", line 15, in training_step',
        "[rank1]: ValueError: bad batch",
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/job/pl.py", line 29, in <module>',
        (
            f"[rank0]: RuntimeError: {by}PeerFailed: failure of all_reduce "
            f"(0:cpu:backend:c4a31b5e/27) after 0.0702 s: {SAID} bad batch. {ADVICE[Cause.FAILED]}"
        ),
    ]
    panel = of_panel(
        "c58331bf-0-cpu-27.0", SAID, "bad batch.", "cause: failed, raised an exception while the others waited"
    )
    for lines in (traceback, [*traceback[:3], *panel, *traceback[3:]]):
        report = explain_lines(lines)
        assert (report.culprits, report.cause.value) == ((1,), "failed")
        assert not any("2 incidents" in note for note in report.notes), report.notes


@pytest.mark.parametrize("steps_on", [False, True])
def test_a_job_that_is_ended_while_it_stands_still_stood_still_for_what_was_told_before(
    steps_on: bool, explain_lines: Explain
) -> None:
    lines = [
        (
            "ncclguard incident 5b2e6f38-0-gloo-10.0: all_reduce(Float [68], group 0 default_pg, number 10) stood still for 6.03 s: "
            "the ranks called different operations, and no side is a majority. Rank 0 called all_gather_object(sizes, "
            "name='evaluation evaluate() at step 3, beginning of try 1'); rank 1 called all_reduce(Float [68]). (rank 0 reports it)"
        ),
        "ncclguard: all_gather_object(sizes, name='evaluation evaluate() at step 3, beginning of try 1') has been waiting for 30 s",
        *[f"step {step}: loss 2.{step}" for step in range(11, 40) if steps_on],
        *of_panel(
            "5b2e6f38-0-cpu-c4a31b5e-1.0",
            "all_gather_object(sizes, name='evaluation evaluate() at step 3, beginning of try 1') failed after 69 s:",
            "all ranks were ended from outside, with SIGTERM.",
            "cause: unknown, there is no evidence",
        ),
    ]
    report = explain_lines(lines)
    assert (report.cause.value, report.decision) == (("unknown", "unknown") if steps_on else ("diverged", "fix-code"))


def test_what_ends_behind_a_lost_rank_is_no_second_incident(explain_lines: Explain) -> None:
    told = "all_gather(float32[1], phase='evaluation evaluate() at step 3, try 1') failed after 0.282 s: rank 1 lost."
    report = explain_lines(
        [
            "ncclguard: the fault of incident e2a6c99b-0-cpu-1.0 goes on: all_gather_object(sizes) failed after 0.0046 s: rank 1 lost.",
            *of_panel("e2a6c99b-0-cpu-1.0", told, "cause: lost, its process or host is gone"),
        ]
    )
    assert (report.culprits, report.collective and report.collective.op) == ((1,), "all_gather")
    assert not any("2 incidents" in note for note in report.notes), report.notes


def test_a_rank_that_is_lost_again_after_another_incident_is_a_new_one(explain_lines: Explain) -> None:
    lines = [
        "ncclguard incident aaaaaaaa-0-cpu-4.0: all_reduce(float32[9], SUM) failed after 1 s: rank 1 lost. (rank 0 reports it)",
        "ncclguard incident aaaaaaaa-0-cpu-9.0: all_reduce(float32[9], SUM) failed after 8 s: rank 3 late. (rank 0 reports it)",
        "ncclguard incident bbbbbbbb-0-cpu-4.0: all_reduce(float32[9], SUM) failed after 2 s: rank 1 lost. (rank 0 reports it)",
    ]
    report = explain_lines(lines)
    assert (report.culprits, report.cause.value) == ((1,), "lost")
    assert any("3 incidents" in note for note in report.notes), report.notes


def test_a_job_that_is_ended_in_another_collective_had_gone_on(explain_lines: Explain) -> None:
    stood = "all_reduce(Float [68], group 0 default_pg, number {}) stood still for 6.03 s: {}. (rank 0 reports it)"
    lines = [
        f"ncclguard incident 5b2e6f38-0-gloo-10.0: {stood.format(10, 'rank 2 late')}",
        f"ncclguard incident 5b2e6f38-0-gloo-9000.0: {stood.format(9000, 'all ranks were ended from outside, with SIGTERM')}",
    ]
    report = explain_lines(lines)
    assert (report.culprits, report.decision) == ((), "unknown")


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "SystemExit: 0", "RuntimeError: Connection closed by peer"])
def test_what_follows_from_others_is_no_code_to_fix_in_an_incident_either(raised: str, explain_lines: Explain) -> None:
    said = f"all_reduce(float32[68], SUM) failed after 0.0395 s: rank 1 raised {raised}."
    report = explain_lines(
        of_panel("c58331bf-0-cpu-27.0", said, "cause: failed, raised an exception while the others waited")
    )
    assert (report.culprits, report.decision) == ((1,), "unknown")


def test_who_has_not_imported_the_package_is_told_to(explain_lines: Explain) -> None:
    lines = [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/w/s.py", line 2, in <module>',
        '[rank0]:     dist.init_process_group("ncclguard")',
        "[rank0]: AssertionError: Unknown backend type ncclguard",
    ]
    report = explain_lines(lines)
    assert report.next_step.startswith("Write `import ncclguard` before init_process_group"), report.next_step


@pytest.mark.parametrize(
    ("advice", "of", "first"),
    [
        (ADVICE_ABORTED, "panel", "It aborted itself"),
        (ADVICE_ABORTED, "log", "Compare what the ranks call"),
        (ADVICE_WATCHED[Cause.LOST], "log", "See the launcher's"),
    ],
    ids=["aborted", "aborted-for-a-size", "killed"],
)
def test_what_a_rank_aborted_for_is_advised_about_where_its_output_says_so(
    advice: str, of: str, first: str, tmp_path: Path
) -> None:
    """A rank that calls with another size than the others is ended by gloo, and no memory has to be looked for."""
    lost = INCIDENT.model_copy(
        update={
            "cause": Cause.LOST, "summary": "all_reduce(Float [1000], group 0 default_pg, number 6) stood still for 0.117 s: rank 2 lost.",
            "advice": advice,
        }
    )  # fmt: skip
    lost = lost.model_copy(update={"ranks": [one for one in lost.ranks if one.rank != 2]})
    log = panel(tmp_path, "en", lost)
    if of == "log":
        said = (
            "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at pair.cc:456] "
            "op.preamble.length <= op.nbytes. 500 vs 452. Received data size doesn't match expected size. Is there a "
            "distributed collective mismatch in your code?\n"
        )
        log.write_text(said + log.read_text())
    report = explain([os.fspath(log)])
    assert report.culprits == (2,)
    assert report.next_step.startswith(first)
    assert advice in report.advice and report.next_step not in report.further


@pytest.mark.parametrize(("steps", "cause"), [(0, "diverged"), (3, "exited")])
def test_a_rank_that_made_another_call_and_then_left_early_is_told_of_as_diverged(
    explain_lines: Explain, steps: int, cause: str
) -> None:
    """Unless the job has gone on for some steps in between."""
    told = "ncclguard incident 62602160-0-cpu-{}: all_reduce(float32[10], SUM) failed after {} s: rank 1 {}. cause: {}"
    between = [f"step {n}: loss 1.1" for n in range(steps)]
    lines = [
        told.format("3.0", "4.01", "diverged", "diverged"),
        *between,
        told.format("6.3", "0.492", "exited", "exited"),
    ]
    report = explain_lines(lines, world_size=3)
    assert report.culprits == (1,) and report.cause == cause


def test_all_incidents_that_a_job_went_on_after_are_told_of(explain_lines: Explain) -> None:
    told = "ncclguard incident 62602160-0-cpu-{0}.0: all_reduce(float32[{0}], SUM) failed after 4 s: rank {0} lost. cause: lost"
    ended = "ncclguard run: rank {0} has ended with exit code -9; ranks 0 may go on without it"
    lines = [
        line
        for n in (1, 2)
        for line in (ended.format(n), told.format(n), f"ncclguard: went on without rank {n} after 0.2 s")
    ]
    report = explain_lines(["step 1: loss 1.2", *lines, *STEPS], world_size=3)
    assert not report.incident and report.summary.startswith("No incident in these inputs has stopped the job.")
    assert all(f"float32[{n}]" in report.summary for n in (1, 2)), report.summary


STOOD = "all_reduce(Float [68], group 0 default_pg, number 10) {} 1.14 s{}"
CALLED = ["{} all_reduce(Float [68], group 0 default_pg, number 10)", "{} barrier(group 0 default_pg, number 10)"]


@pytest.mark.parametrize(
    "said, sides",
    [
        (STOOD.format("stood still for", ": rank 1 diverged."), ("ranks 0, 2 called", "rank 1 called")),
        (STOOD.format("停滞了", "：rank 1 调用不一致。"), ("rank 0、2 调用了", "rank 1 调用了")),
    ],
    ids=["en", "zh"],
)
def test_ranks_in_different_operations_are_not_said_to_differ_in_shapes(
    said: str, sides: tuple[str, str], explain_lines: Explain
) -> None:
    rows = [line.format(who) for line, who in zip(CALLED, sides, strict=True)]
    report = explain_lines(of_panel("512d19d6-0-gloo-10.0", said, *rows))
    assert (report.culprits, report.cause_class) == ((1,), "rank_divergence")


def test_what_an_evaluation_raises_when_it_gives_up_is_no_fault_of_its_rank(explain_lines: Explain) -> None:
    said = "all_reduce(float32[], SUM, phase='evaluation evaluate() at step 4, try 1') failed after 0.3 s: rank 1 raised OSError: no such file."
    gave_up = "ncclguard.errors.GuardError: ncclguard evaluation evaluate() at step 4: stopped after 1 try: the job cannot go on."
    lines = of_panel("9868ee5a-0-cpu-5.0", said, "cause: failed, raised an exception while the others waited")
    for rank in (0, 2):
        lines += [
            f"[rank{rank}]: {line}"
            for line in ("Traceback (most recent call last):", '  File "e.py", line 28, in <module>', gave_up)
        ]
    assert explain_lines(lines).culprits == (1,)


def test_an_incident_of_an_evaluation_that_was_left_out_stands_behind_the_end_of_the_job(
    explain_lines: Explain,
) -> None:
    said = "all_gather_object(sizes, name='evaluation evaluate() at step 4, beginning of try 1') failed after 8 s: rank 1 diverged."
    over = "ncclguard evaluation evaluate() at step 4: left out because not all ranks came; NaN is returned, and training goes on."
    report = explain_lines([over, "step 5 loss 1.0", "done", *of_panel("02443fc1-0-cpu-9.0", said, "cause: diverged")])
    assert not report.incident


def test_a_line_of_another_rank_in_front_of_a_panel_is_not_told_twice(explain_lines: Explain) -> None:
    said = "all_reduce(Float [68], group 0 default_pg, number 10) 停滞了 5.03 s：rank 1 迟到。"
    lines = [f"ncclguard incident 83cc589a-0-gloo-10.0: {said}（由 rank 0 报告）",
             *of_panel("83cc589a-0-gloo-10.0", said, "原因：迟到（late），进程活着，在跑别的代码，没有进入这次操作")]  # fmt: skip
    report = explain_lines(lines)
    assert report.culprits == (1,)
    assert report.reason.count("停滞了") == 1, report.reason


def test_a_job_that_was_ended_with_ctrl_c_is_not_said_to_stand_still(explain_lines: Explain) -> None:
    lines = ["step 1 loss 2.0", "W1129 00:28:36.423000 7408 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 7448 closing signal SIGINT"]  # fmt: skip
    for rank in range(3):
        lines += [f"[rank{rank}]: {line}" for line in ("Traceback (most recent call last):", '  File "t.py", line 4, in <module>', "KeyboardInterrupt")]  # fmt: skip
    lines += ["Traceback (most recent call last):", '  File "/v/torchrun", line 8, in <module>',
              "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7408 got signal: 2"]  # fmt: skip
    report = explain_lines(lines)
    assert (report.incident, report.summary) == (
        False,
        "No incident found in these inputs: the job was ended with Ctrl-C.",
    )


def test_who_called_an_evaluation_alone_is_shown_and_who_left_in_order_is_not_named(explain_lines: Explain) -> None:
    said = "all_gather_object(sizes, name='evaluation evaluate() at step 2, beginning of try 1') failed after 0.5 s: ranks 1-2 exited."
    report = explain_lines(of_panel("03a85a40-0-cpu-3.2", said, "cause: exited, left while the others waited"))
    assert (report.culprits, report.suspects) == ((), (0,))
    assert report.reason.endswith("rank 0 alone called this evaluation")


def test_an_end_that_the_launcher_tells_with_its_code_is_told(explain_lines: Explain) -> None:
    lines = [f"[rank{rank}]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:90" for rank in (0, 2)]  # fmt: skip
    lines += ["E1129 00:44:23.759000 30478 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 3) local_rank: 1 (pid: 30493) of binary: python"]  # fmt: skip
    report = explain_lines(lines, world_size=3)
    assert report.culprits == (1,)
    assert report.reason.startswith("rank 1 ended first, with exit code 3"), report.reason
    assert report.next_step == "Read the end of the log of rank 1."


def test_a_program_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")\n')
    report = explain([tmp_path / "train.py"])
    assert not report.incident
    assert any(note.endswith("train.py: a program, and no log") for note in report.notes)


def test_a_fault_that_goes_on_is_the_one_of_its_first_incident(explain_lines: Explain) -> None:
    def raised(name: str, number: int, text: str) -> list[str]:
        error = f"[rank0]: ncclguard.errors.{name}: failure of barrier (0:cpu:865c6391/{number}) after 0.1 s: {text}"
        return [
            "[rank0]: Traceback (most recent call last):",
            '[rank0]:   File "/x/train.py", line 54, in <module>',
            error,
        ]

    first = raised("CollectiveMismatch", 6, "barrier() failed after 0.004 s: rank 0 diverged.")
    later = raised(
        "CollectiveFailed", 7, "barrier() failed after 0.491 s: ranks 1-2 failed. Fix the exception of that rank."
    )
    goes_on = "ncclguard: the fault of incident e9511fea-0-cpu-865c6391-6.0 goes on: barrier() failed after 0.491 s: ranks 1-2 failed."
    report = explain_lines([*first, goes_on, *later])
    assert (report.culprits, report.cause) == ((0,), "diverged")
    assert explain_lines([*first, *later]).culprits == (1, 2), "another one"


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("all_reduce(float32[1000], SUM)", "all_reduce(float64[1000], SUM)", "of one shape, with another dtype"),
        ("all_reduce(float32[1000], SUM)", "all_reduce(float32[999], SUM)", "tensors of different shapes"),
    ],
)
def test_what_the_sides_of_one_operation_differ_in(explain_lines: Explain, ours: str, theirs: str, said: str) -> None:
    panel = [
        "╭─ ncclguard incident 8068ab43-0-cpu-2.0 ──────╮",
        f"│ {ours} failed after 0.004 s: rank 1 diverged. │",
        "│ cause: diverged, in another collective than the others, or in the same with another shape, dtype, ... │",
        "│ rank 1 (host vm, pid 2936): diverged │",
        f"│ ranks 0, 2 called {ours} │",
        f"│ rank 1 called {theirs} │",
        "╰──────╯",
    ]
    assert said in explain_lines(panel).class_reason


def test_the_same_call_on_another_group_is_a_divergence(explain_lines: Explain) -> None:
    panel = of_panel(
        "8068ab43-0-cpu-2.0",
        "all_reduce(float32[9], SUM) failed after 0.004 s: rank 1 diverged: the same call on another group.",
        "cause: diverged, in another collective than the others",
        "ranks 0, 2 called all_reduce(float32[9], SUM)",
        "rank 1 called all_reduce(float32[9], SUM) of group 3",
    )
    report = explain_lines(panel)
    assert (report.culprits, report.cause_class) == ((1,), "rank_divergence")
    assert "on different groups" in report.class_reason


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("rank 1 has not come: it is at data.py:44 in fetch", (1,)),
        ("rank 1 没有来：它在 data.py:44 in fetch", (1,)),
        ("rank 1 has not come: it waits in barrier()", ()),
        ("rank 1 has not come: it is at data.py:44 in fetch; rank 2 has not come: it waits in barrier()", ()),
        ("every rank has entered: the transfer itself is slow or stalled", ()),
    ],
)
def test_who_was_awaited_when_the_job_was_ended_is_late(
    explain_lines: Explain, said: str, named: tuple[int, ...]
) -> None:
    waits = f"ncclguard: all_reduce(float32[9], SUM) has been waiting for 20 s (deadline in 40 s): {said}"
    ended = "slurmstepd: error: *** STEP 7.0 ON a01 CANCELLED AT 2026-01-30T02:00:00 DUE TO TIME LIMIT ***"
    report = explain_lines(["step 3 loss 1.0", waits, ended], world_size=3)
    assert report.incident and report.culprits == named
    if named:
        assert (report.cause, report.decision) == ("late", "fix-code")
        assert "data.py:44 in fetch" in report.reason


def test_who_came_after_all_is_not_late(explain_lines: Explain) -> None:
    waits = "ncclguard: all_reduce() has been waiting for 20 s (deadline in 40 s): rank 1 has not come: it is at data.py:44 in fetch"
    steps = [f"step {n} loss 1.0" for n in range(4, 9)]
    assert not explain_lines([waits, *steps]).incident
    assert (
        explain_lines(
            [
                waits,
                *steps,
                "slurmstepd: error: *** STEP 7.0 ON a01 CANCELLED AT 2026-01-30T02:00:00 DUE TO TIME LIMIT ***",
            ]
        ).culprits
        == ()
    )


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (ADVICE_WATCHED[Cause.NETWORK], "compare that first"),
        (ADVICE_SOURCE_FIRST, "Compare the source or destination that each rank gives"),
    ],
)
def test_a_call_whose_source_is_not_recorded_is_compared_first(
    explain_lines: Explain, hint: str, words: str, language: str
) -> None:
    advice = said(hint, language)
    verdict = "broadcast(float32[9]) stood still for 5 s: cause: network."
    report = explain_lines([f"ncclguard incident 83cc589a-0-gloo-10.0: {verdict} {advice}"])
    assert report.cause == "network"
    assert words in report.next_step


@pytest.mark.parametrize(
    ("ended", "diverged"),
    [
        ("has ended, and not all ranks called the same", "rank 1 diverged"),
        ("已经结束，但各 rank 调用的并不相同", "rank 1 调用不一致"),
    ],
    ids=["en", "zh"],
)
@pytest.mark.parametrize("stepped", [False, True])
def test_a_call_that_has_ended_with_wrong_values_is_an_incident_also_where_the_job_goes_on(
    explain_lines: Explain, ended: str, diverged: str, stepped: bool
) -> None:
    call = "all_reduce(Float [3], group 0 default_pg, number 47)"
    panel = of_panel(
        "18bfb2a8-0-gloo-47.0",
        f"{call} {ended}{': ' if ended.isascii() else '：'}{diverged}.",
        f"ranks 0, 2 called {call}",
        f"rank 1 called {call.replace('Float', 'Int')}",
    )
    steps = [f"step {n} loss {1 / n:.3f}" for n in range(40, 60)] if stepped else []
    report = explain_lines(["step 38 loss 0.1", "step 39 loss 0.1", *panel, *steps, "training complete"], world_size=3)
    assert (report.incident, report.culprits, report.cause) == (True, (1,), "diverged"), report.summary


def test_a_job_that_was_ended_in_a_hang_is_explained_by_what_it_said_before(explain_lines: Explain) -> None:
    """What its ranks print when their connections break is a consequence of the end."""
    waits = "ncclguard: all_reduce(number 6) has made no progress for 30 s on rank 0: rank 1 has not come: it is at x.py:5 in f"
    outside = "all_reduce(number 6) stood still for 38 s: all ranks were ended from outside, with SIGTERM"
    ended = [
        "W1129 16:26:43.896000 8503 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 8654 closing signal SIGTERM",
        f"[rank0]: ncclguard incident bf1ae8de-0-gloo-6.0: {outside}.",
        "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:20909.",
        *of_panel("bf1ae8de-0-gloo-6.0", f"{outside}.", "cause: unknown, there is no evidence"),
    ]
    report = explain_lines([waits, *ended], world_size=3)
    assert (report.culprits, report.cause, report.cause_class) == ((1,), "late", "slow_rank_side_work"), report.summary
    report = explain_lines(
        [line.replace("SIGTERM.", "SIGTERM; rank 1 had not come to it.") for line in ended], world_size=3
    )
    assert (report.culprits, report.suspects, report.cause_class) == ((), (1,), "unknown"), report.summary


def test_an_evaluation_that_one_rank_calls_is_told_as_that_also_after_the_others_have_left(
    explain_lines: Explain,
) -> None:
    call = "all_gather_object(sizes, name='evaluation evaluate() at step {}, beginning of try 1')"
    first = of_panel("6a173389-0-cpu-1.0", f"{call.format(0)} failed after 5 s: rank 0 diverged.")
    last = of_panel("6a173389-0-cpu-2.1", f"{call.format(5)} failed after 0.3 s: ranks 1-2 exited.")
    report = explain_lines([*first, *last], world_size=3)
    assert (report.culprits, report.cause) == ((0,), "diverged"), report.summary
