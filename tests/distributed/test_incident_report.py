"""Real incidents: one report for each, whatever the disk does; a rank that is told to end says so and ends as it would have."""

from __future__ import annotations

import signal
from pathlib import Path

from ncclguard import faults
from ncclguard.incident.timeline import Document

CASES = Path(__file__).with_name("incident_report_cases.py")
CULPRIT = 2
SUMMARY, IDENTIFIER, SECONDS = 3, 4, 5


def documents(folder: Path) -> list[Document]:
    found = [Document.model_validate_json(file.read_text()) for file in sorted(folder.glob("incident-*.json"))]
    return sorted(found, key=lambda document: document.incident.generation)


def test_one_report_for_each_incident_of_each_job_with_every_rank_on_its_timeline(tmp_path: Path) -> None:
    """Late, then out of memory; two such jobs in one folder."""
    env = {"NCCLGUARD_REPORT_DIR": str(tmp_path)}
    jobs = [faults.start_ranks(f"{CASES}:late_then_raises", 4, env=env, timeout=80) for _ in range(2)]
    results = [job.wait() for job in jobs]
    assert len(list(tmp_path.glob("incident-*.html"))) == len(list(tmp_path.iterdir())) / 2 == 4, list(
        tmp_path.iterdir()
    )
    found = documents(tmp_path)
    for result in results:
        panels = [rank.output.count("─ ncclguard incident") for rank in result]
        assert panels == [2, 0, 0, 0], str(result)
        for rank in (0, 1, 3):
            raised = result[rank].reports["raised"]
            assert raised[:3] == [False, "failed", [CULPRIT]], str(result)
            assert raised[SECONDS] < 15.0, str(result)  # of a limit of 60 s
            assert "rank 2 raised torch.OutOfMemoryError at " in raised[SUMMARY]
            assert "incident_report_cases.py:" in raised[SUMMARY]
            assert "CUDA out of memory" in raised[SUMMARY]
    jobs_named = {document.job for document in found}
    assert len(jobs_named) == 2
    for name in jobs_named:
        late, raised = (document for document in found if document.job == name)
        assert late.incident.id in {result[0].reports["late"][IDENTIFIER] for result in results}
        assert (late.incident.culprits, str(late.incident.cause)) == ((CULPRIT,), "late")
        assert any("slow_checkpoint" in frame for frame in late.incident.ranks[CULPRIT].stack)
        assert any("late_then_raises" in frame for frame in raised.incident.ranks[CULPRIT].stack)
        for document in (late, raised):
            assert document.written_by == 0
            timeline = document.timeline
            assert timeline is not None
            assert [lane.rank for lane in timeline.lanes] == [0, 1, 2, 3]
            for lane in timeline.lanes:
                done = [bar.sequence for bar in lane.bars if bar.ok]
                assert done[:5] == [1, 2, 3, 4, 5], lane
                assert lane.clock in ("reference", "operations")
                waiting = [bar for bar in lane.bars if bar.end is None]
                assert len(waiting) == (0 if lane.rank == CULPRIT else 1), lane
            ends = [
                bar.end for lane in timeline.lanes for bar in lane.bars if bar.sequence == 5 and bar.end is not None
            ]
            assert max(ends) - min(ends) < 5.0  # one operation ends on all at once, whatever their clocks say


def test_a_full_disk_changes_nothing_for_the_job(full_disk: Path, tmp_path: Path) -> None:
    """Nor does SIGTERM where the program has set a handler that calls the one before it."""
    spare = tmp_path / "spare"
    spare.mkdir()
    env = {"NCCLGUARD_REPORT_DIR": str(full_disk / "reports"), "TMPDIR": str(spare)}
    result = faults.run_ranks(f"{CASES}:one_is_late", 3, env=env, timeout=60).check()
    assert result.values("handled") == {0: True, 1: True, 2: True}
    assert all(values[:3] == [False, "late", [CULPRIT]] for values in result.values("late").values())
    assert "No space left on device" in result[0].output
    assert "─ ncclguard incident" in result[0].output
    assert len(list(spare.rglob("incident-*.html"))) == 1


def test_sigterm_is_told_to_the_others_and_ends_the_rank_as_before() -> None:
    """Also while its main thread is in C. A handler of the program's own, and a signal for a forked child, announce nothing."""
    with faults.start_ranks(f"{CASES}:told_to_end", 4, timeout=60) as job:
        job.wait_for("ready")
        job.send_signal(1, signal.SIGTERM)
        job.wait_for("handled", ranks=[1])
        job.send_signal(CULPRIT, signal.SIGTERM)
        result = job.wait()
    assert result[CULPRIT].signal is signal.SIGTERM, str(result)
    assert result[CULPRIT].reports["child"] == signal.SIGTERM
    for rank in (0, 1, 3):
        assert result[rank].ok, str(result)
        told = result[rank].reports["told"]
        assert told[:3] == [False, "lost", [CULPRIT]], str(result)
        assert "rank 2 was sent SIGTERM" in told[SUMMARY]
        assert told[SECONDS] < 20.0  # of a limit of 60 s; most of it is waiting for the signal
    assert "was sent SIGTERM" in result[0].output  # in the panel


def test_sigterm_while_a_rank_ends_by_itself_does_not_cut_its_report_off(tmp_path: Path) -> None:
    env = {"NCCLGUARD_REPORT_DIR": str(tmp_path)}
    result = faults.run_ranks(f"{CASES}:ended_while_it_reports", 2, env=env, timeout=60)
    assert [document.incident.culprits for document in documents(tmp_path)] == [(1,)], str(result)
    assert "─ ncclguard incident" in result[0].output


def test_ranks_that_torchrun_ends_because_of_a_killed_one_are_not_blamed(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    result = faults.run_ranks(
        f"{CASES}:killed_under_torchrun",
        4,
        args=[str(tmp_path)],
        env={"NCCLGUARD_REPORT_DIR": str(reports)},
        launcher="torchrun",
        timeout=80,
    )
    assert not result.timed_out, str(result)
    found = documents(reports)
    assert [document.incident.culprits for document in found] == [(CULPRIT,)], str(result)
    for values in result.values("killed").values():
        assert values[:3] == [False, "lost", [CULPRIT]], str(result)
