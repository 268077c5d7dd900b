"""A plain DDP training on 4 ranks whose evaluations fail on rank 2: it goes on with the losses it would have had without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclguard import faults
from tests import gloo_aborts
from tests.distributed.evaluation_cases import (
    CULPRIT,
    OTHER,
    TIMEOUT,
    guarded,
    held_up,
    in_branches,
    interrupted,
    leaves_out,
    lost,
    not_looked_at,
    of_two_classes,
    own_code,
    raises_in_each_try,
    switches,
    unguarded,
)

WHOLE = [16.0, 1.0]
#: fault -> (result, action, cause, culprits, tries, waits that end with a failure or take up to their limit)
CASES = {
    "none": (WHOLE, "accept", "None", [], 1, 1),
    "oom": (WHOLE, "accept", "failed", [CULPRIT], 2, 2),
    "metric": ("not evaluated", "give up", "failed", [CULPRIT], 1, 2),
    "end": ("not evaluated", "give up", "failed", [CULPRIT], 1, 2),
    "partial": ([8.0, 0.5], "accept a partial result", "failed", [CULPRIT], 1, 2),
    "file": (WHOLE, "accept", "failed", [CULPRIT], 2, 2),
    "both": (WHOLE, "accept", "failed", [OTHER, CULPRIT], 2, 2),
    "batches": ("not evaluated", "give up", "diverged", [CULPRIT], 3, 4),
    "reset": (WHOLE, "accept", "None", [], 1, 1),
    "late": (WHOLE, "accept", "late", [CULPRIT], 2, 3),
    "skip": ("not evaluated", "give up", "diverged", [CULPRIT], 0, 1),
}


@pytest.mark.slow
def test_training_goes_on_with_the_losses_of_a_run_without_evaluation() -> None:
    """Out of memory, metric code that raises, other batch counts, a reset, a late rank, one that skips: nothing of it shows.

    An error of the program's own on rank 2 costs one try, also where nothing is raised on the other ranks; a file that could not
    be read, and the same error beside a rank that has no memory, are tried again.
    """
    names = [*CASES, "none again"]
    job = faults.run_ranks(guarded, 4, args=[names], timeout=180)
    assert all(rank.exit_code == 0 for rank in job), str(job)
    for name, (result, action, cause, culprits, tries, waits) in CASES.items():
        found = job.values(name)
        assert sorted(found) == [rank for rank in range(4) if (name, rank) != ("skip", CULPRIT)]
        for rank, values in found.items():
            assert values["result"] == result, (name, rank, values)
            assert values["report"] == [action, cause, culprits, tries], (name, rank, values)
            assert values["seconds"] < waits * (TIMEOUT + 2), (name, rank, values)
            assert values["modes"], (name, rank)
            assert ("no other try was made" in values["text"]) == (name in ("metric", "end", "partial")), (name, values)
        failed = [metrics for values in found.values() for _, metrics in values["logged"]]
        assert len(failed) == (0 if action == "accept" else 1), (name, failed)
        assert all(metrics["eval/evaluation_failed"] == 1.0 for metrics in failed)
        assert all(metrics["eval/evaluation_culprit"] == CULPRIT for metrics in failed)
    assert job[0].reports["oom"]["tried"] == [8, 4]
    assert "KeyError" in job[0].reports["metric"]["text"]
    assert "evaluation_cases.py" in job[0].reports["metric"]["text"]
    assert job[0].reports["partial"]["logged"][0][1]["eval/evaluation_partial_done"] == 2.0
    assert all(values["result"] == WHOLE for values in job.values("none again").values())
    for rank in range(4):
        assert job[rank].reports["losses"] == job[rank].reports["control"] == job[0].reports["losses"]


@pytest.mark.parametrize(
    ("how", "told"),
    [("KeyboardInterrupt", "KeyboardInterrupt at"), ("SystemExit", "SystemExit at")],
)
def test_an_interruption_ends_the_evaluation_on_all_ranks_at_once_and_leaves_them_in_step(how: str, told: str) -> None:
    """It ended in a wait of 17 times the limit on the others, and the next evaluation met the calls of this one."""
    job = faults.run_ranks(interrupted, 3, args=[how, "go on"], timeout=120)
    assert all(rank.exit_code == 0 for rank in job), str(job)
    for rank in range(3):
        said = job[rank].reports
        assert said["step 0"] == said["step 2"] == 3.0, said
        assert said["seconds 1"] < 20.0, said
        assert said["step 1"].startswith(how if rank == 1 else "GuardError"), said
        assert rank == 1 or f"rank 1: {told}" in said["step 1"], said


def test_an_exit_inside_an_evaluation_is_told_to_the_others_and_keeps_its_code() -> None:
    job = faults.run_ranks(interrupted, 3, args=["SystemExit", "end"], timeout=120)
    assert [rank.exit_code for rank in job] == [1, 9, 1], str(job)
    for rank in (0, 2):
        said = job[rank].reports
        assert said["seconds 1"] < 20.0 and "rank 1: SystemExit at" in said["step 1"], said


def test_a_fault_is_reported_once_and_what_else_it_breaks_refers_to_that(tmp_path: Path) -> None:
    """One late rank breaks a try, its end and the next beginning: one panel, one page. The next time it is late is another."""
    job = faults.run_ranks(held_up, 3, args=[str(tmp_path)], env={"NCCLGUARD_REPORT_DIR": str(tmp_path)}, timeout=90)
    assert all(rank.exit_code == 0 for rank in job), str(job)
    output = "".join(rank.output for rank in job)
    pages = sorted(page.stem for page in tmp_path.glob("*.html"))
    assert len(pages) == len(list(tmp_path.glob("*.json"))) == output.count("─ ncclguard incident ") == 2, output
    report = job[0].reports["report10"]
    first = next(page.removeprefix("incident-") for page in pages if page.removeprefix("incident-") in report)
    given_up = "failed after 1 try; NaN is returned, because no `fallback=` was given, and training goes on."
    assert report.splitlines() == [
        f"ncclguard evaluation evaluate() at step 10: {given_up}",
        f"  try 1: late, rank 1 (incident {first})",
        f"  before try 2: late, rank 1 (incident {first})",
    ]
    assert all(rank.reports["report10"] == report for rank in job)
    again = [line for line in output.splitlines() if f"the fault of incident {first} goes on: " in line]
    assert len(again) == 2, output
    assert all(line.endswith("rank 1 late.") for line in again)
    assert output.count("what to do: ") == 2, output


def test_a_failure_that_the_evaluation_does_not_look_at_fails_its_try() -> None:
    """Else its value would be that of a tensor which was never reduced."""
    job = faults.run_ranks(not_looked_at, 3, timeout=90)
    assert all(rank.exit_code == 0 for rank in job), str(job)
    assert [rank.reports["value"] for rank in job] == [3.0] * 3, str(job)
    assert [rank.reports["tries"] for rank in job] == [2] * 3
    assert all("try 1: late, rank 1" in rank.reports["report"] for rank in job), str(job)
    assert all(rank.output.count("not looked at before the evaluation") == 1 for rank in job), str(job)
    assert not any("goes on: all_gather_object(sizes" in rank.output for rank in job), str(job)


@pytest.mark.parametrize("fault", ["metric", "skip"])
def test_without_the_guard_an_exception_that_is_caught_ends_the_job(fault: str) -> None:
    """The usual try/except around evaluate: rank 2 is in training and the others in evaluation, or the other way round.

    No rank gets through the next step. Where rank 2 skips the evaluation, its operations meet the others' of another size, for which
    gloo may end its process.
    """
    job = faults.run_ranks(unguarded, 4, args=[fault], timeout=40)
    aborted = {rank.rank for rank in job if gloo_aborts.aborted(rank)}
    assert {rank.end for rank in job if rank.rank not in aborted} == {"exit 1"}, str(job)
    assert aborted <= ({CULPRIT} if fault == "skip" else set()), str(job)
    assert job.values("loss") == {}, str(job)


def test_a_rank_that_is_gone_ends_the_job_with_the_report_after_a_checkpoint(tmp_path: Path) -> None:
    job = faults.run_ranks(lost, 4, args=[str(tmp_path)], timeout=60)
    rest = [0, 1, 3]
    assert sorted(job.values("error")) == rest, str(job)
    for rank in rest:
        reports = job[rank].reports
        assert reports["error"] == "PeerLost"
        assert reports["culprits"] == [CULPRIT]
        assert "Restart the job from its last checkpoint" in reports["report"]
        assert reports["barrier"] == "PeerLost"
        assert reports["barrier_seconds"] < TIMEOUT + 2
        assert (tmp_path / f"rank{rank}.pt").exists()
        assert job[rank].exit_code == 1
    assert not (tmp_path / f"rank{CULPRIT}.pt").exists()


def test_evaluation_can_be_switched_off_made_smaller_or_left_to_one_rank() -> None:
    job = faults.run_ranks(switches, 4, timeout=90)
    assert all(rank.exit_code == 0 for rank in job), str(job)
    for rank in job:
        assert rank.reports["off"]
        assert (rank.reports["smaller"], rank.reports["sizes"]) == (WHOLE, [2])
        assert rank.reports["single"] == [4.0, 1.0]
        assert rank.reports["alone"] == ([8] if rank.rank == 1 else [])
        assert rank.reports["loss"] == job[0].reports["loss"]
    assert "waiting for the evaluation evaluate() at step 3 on rank 1" in job[0].output


#: What goes wrong -> (result, action, (rank at fault, its exception) of each failure, in order)
OWN_CODE = {
    "result": ("fallback", "give up", [([0], "cannot be pickled")]),
    "unreadable": ("fallback", "give up", [([1], "LookupError")]),
    "single": ("fallback", "give up", [([1], "cannot be pickled")]),
    "part": ("fallback", "give up", [([1], "cannot be pickled"), ([2], "KeyError")]),
    "part not needed": (7, "accept", []),
    "combine": ("fallback", "give up", [([2], "KeyError"), ([1], "ZeroDivisionError")]),
    "combined": (3, "accept a partial result", [([2], "KeyError")]),
    "keeper": (7, "accept", []),
}


def test_what_the_program_hands_over_and_one_rank_cannot_use_ends_alike_on_all() -> None:
    """A result or a part that cannot be pickled or read, `combine` or a keeper that raises: never an exception, never a wait."""
    job = faults.run_ranks(own_code, 3, args=[list(OWN_CODE)], timeout=60)
    assert all(rank.exit_code == 0 for rank in job), str(job)
    for name, (result, action, accused) in OWN_CODE.items():
        assert sorted(job.values(name)) == [0, 1, 2], (name, str(job))
        for rank, found in job.values(name).items():
            assert (found["result"], found["action"]) == (result, action), (name, rank, found)
            assert [culprits for culprits, _ in found["accused"]] == [culprits for culprits, _ in accused], (name, rank)
            for (_, text), (_, error) in zip(found["accused"], accused, strict=True):
                assert error in text, (name, rank, text)
    assert job.values("after") == dict.fromkeys(range(3), 3.0)


#: How the two evaluations of a step are called -> (values of ranks 0 and 1 in the step in which rank 2 leaves the first
#: out, those of rank 2, where rank 2 is said to be)
LEFT_OUT = {
    "lines": ([102.0, None], [102.0], "rank 2: evaluation evaluate() at step 2, called at"),
    "loop": ([102.0, None], [102.0], "rank 2: evaluation evaluate() at step 2, called at"),
    "functions": ([None, 300.0], [300.0], "rank 2: evaluation test() at step 1, called at"),
}


@pytest.mark.parametrize("called", list(LEFT_OUT))
def test_an_evaluation_that_one_rank_leaves_out_shifts_no_other_and_is_told_of(called: str) -> None:
    """Of two functions it is skipped. Of one function another was taken for it: a line tells of it, and the report."""
    others, mine, where = LEFT_OUT[called]
    job = faults.run_ranks(leaves_out, 3, args=[called], timeout=60).check()
    before, after = [3.0, 300.0], [3.0, 300.0, 9.0]
    expected = {0: before + others + after, 1: before + others + after, 2: before + mine + after}
    assert job.values("values") == expected
    for rank in (0, 1):
        ended = [text for _, action, text in job[rank].reports["reports"] if action == "give up"]
        assert len(ended) == 1
        assert "skipped, because the ranks are in different evaluations" in ended[0]
        assert "before try 1: diverged, rank 2\n" in ended[0]
        assert where in ended[0], ended[0]
        assert "do not trust the values of those before this one at its step" in ended[0]
    told = job[0].output.count("the ranks called it in different places")
    assert told == (2 if called == "lines" else 1)  # and once of the branches at the end
    # The names are those of what all ranks do together.
    met = [[label for label, action, _ in rank.reports["reports"] if action == "accept"] for rank in job]
    assert met[0] == met[1] == met[2]
    assert len(set(met[0])) == len(met[0])


@pytest.mark.parametrize("step", [None, 7])
def test_branches_are_one_evaluation_also_where_all_ranks_have_met_in_each(step: int | None) -> None:
    job = faults.run_ranks(in_branches, 3, args=[step], timeout=60).check()
    assert job.values("values") == {rank: [0.0, 3.0, 6.0, 9.0, 12.0] for rank in range(3)}


def test_functions_of_one_name_are_told_apart_and_a_rank_that_is_not_there_yet_is_waited_for() -> None:
    job = faults.run_ranks(of_two_classes, 3, timeout=60).check()
    whole = [3.0, 300.0, None, 300.0, 3.0, 300.0, 3.0, 300.0]
    assert job.values("values") == {0: whole, 1: whole, 2: [value for value in whole if value is not None]}


@pytest.mark.parametrize("kind", ["memory", "key"])
def test_who_raises_prints_its_traceback_once_and_the_incident_has_its_stack(kind: str, tmp_path: Path) -> None:
    """Not where it waits for the others afterwards; for memory once no other try with smaller batches is left."""
    job = faults.run_ranks(
        raises_in_each_try, 3, args=[kind], env={"NCCLGUARD_REPORT_DIR": str(tmp_path)}, timeout=90
    ).check()
    assert [rank.output.count("Traceback (most recent call last)") for rank in job] == [0, 1, 0], str(job)
    tried_again = [rank.output.count("; trying again") for rank in job]
    assert tried_again == [1 if kind == "memory" else 0, 0, 0], str(job)
    assert "in score" in job[1].output.partition("Traceback (most recent call last)")[2], job[1].output
    (incident,) = (json.loads(file.read_text())["incident"] for file in tmp_path.glob("*.json"))
    (culprit,) = (rank for rank in incident["ranks"] if rank["rank"] == 1)
    assert (incident["cause"], incident["culprits"]) == ("failed", [1])
    assert [" in evaluate" in culprit["stack"][0], " in score" in culprit["stack"][-1]] == [True, True], culprit[
        "stack"
    ]
