"""`ncclguard.watch` over plain DDP on gloo: whoever holds a collective up is named on every rank, and healthy ranks never are."""

from __future__ import annotations

import ctypes
import io
import json
import logging
import logging.handlers
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from ncclguard.engine import runtime
from ncclguard.metrics import control, records, registry, top_command
from ncclguard.watch import watcher
from ncclguard.watch.recorder import Recorder
from ncclguard_explain import explain
from tests import gloo_aborts

CULPRIT = 2
#: fault -> cause
ENDS = {"kill": "lost", "raise": "failed", "exit": "exited"}
#: Seconds within which all the others know of an end, long before the limit of 60 s.
AT_ONCE = 10.0
LIMIT = 6.0
#: torch 2.8 and later; without it a collective has a number and no name, and nothing can be compared.
recorded = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"),
    reason="this torch does not record gloo's collectives",
)


class Training:
    """A small DDP model, one step a call."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 2)))

    def steps(self, number: int = 5) -> None:
        """Forward and backward; the all-reduce is issued by DDP in C++."""
        for _ in range(number):
            self._model(torch.ones(4, 20)).sum().backward()


class Warnings(logging.Handler):
    """Counts the log lines that say who is awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        if "made no progress" in record.getMessage():
            self.texts.append(record.getMessage())


def told(key: str) -> Any:
    """An on_incident that reports the incident and when it came."""
    return lambda incident: faults.report(**{key: {"at": time.time(), "json": incident.to_json()}})


def meet_watched(backend: str = "gloo", seconds: float = 60, **options: Any) -> watcher.Watch:
    """Watch with these options from where all ranks are: on a busy machine they come from `init_process_group` seconds apart.

    The watch before that is for torch before 2.11, which records gloo's collectives from its start or not at all.
    """
    ng.watch(timeout=60)
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    ng.safe_barrier(timeout=60).raise_if_failed()
    return ng.watch(**options)


def know_each_other() -> None:
    """Before, nobody knows which process a rank is, and whether it is gone: it is `unknown`."""
    while len(runtime.current().monitor.neighbours.here) < dist.get_world_size() - 1:
        time.sleep(0.05)


def ends(fault: str, watched: bool, culprit: int = CULPRIT) -> None:
    """Rank 2 ends between two steps; the others are in backward."""
    if watched:
        ng.watch(timeout=60, on_incident=told("incident"))
    dist.init_process_group("gloo")
    training = Training()
    training.steps()
    if watched:
        know_each_other()
    training.steps()
    if dist.get_rank() == culprit:
        faults.report(ended=time.time())
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "raise":
            raise ValueError("boom in rank 2")
        sys.exit(0)
    training.steps(1000)


@recorded
@pytest.mark.parametrize("fault", list(ENDS))
def test_a_rank_that_ends_is_named_on_every_survivor(fault: str) -> None:
    """Killed, raised or left while the others are in a step of DDP: one incident, equal on all, naming rank 2 only."""
    cause = ENDS[fault]
    result = faults.run_ranks(ends, 4, args=[fault, True], timeout=90)
    ended = result[CULPRIT].reports["ended"]
    found = {rank: result[rank].reports.get("incident") for rank in (0, 1, 3)}
    assert all(found.values()), str(result)
    for rank, said in found.items():
        assert said["at"] - ended < AT_ONCE, (rank, said["at"] - ended)
        incident = ng.Incident.from_json(said["json"])
        assert (str(incident.cause), incident.culprits, incident.agreed) == (cause, (CULPRIT,), True), incident
        assert said["json"] == found[0]["json"]
        assert "all_reduce" in incident.op
    text = str(ng.Incident.from_json(found[0]["json"]))
    if fault == "raise":
        assert "ValueError" in text
        assert "boom in rank 2" in text
    assert all(incident.summary in result[rank].output for rank in found), str(result)
    assert "on_lost" not in incident.advice  # which only guarded calls have


def dies_in_a_guarded_call(backend: str) -> None:
    """Rank 1 is killed while the others are in a guarded call, and they do not wait in any other."""
    known = threading.Event()

    def tell(incident: ng.Incident) -> None:
        told("watched")(incident)
        known.set()

    meet_watched(backend, timeout=5, on_incident=tell)
    for _ in range(5):
        dist.all_reduce(torch.ones(3))
    know_each_other()
    time.sleep(1.0)  # the others are to know as much
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = ng.safe_all_reduce(torch.ones(3), timeout=20)
    faults.report(cause=str(outcome.cause), culprits=list(outcome.culprits))
    known.wait(20)
    time.sleep(2.0)  # a second panel would be there by then
    os._exit(0)


@recorded
@pytest.mark.parametrize("backend", ["gloo", "ncclguard"])
def test_who_was_lost_in_a_guarded_call_has_one_panel(backend: str) -> None:
    result = faults.run_ranks(dies_in_a_guarded_call, 3, args=[backend], timeout=60)
    for rank in (0, 2):
        assert (result[rank].reports["cause"], result[rank].reports["culprits"]) == ("lost", [1]), result
        watched = ng.Incident.from_json(result[rank].reports["watched"]["json"])  # the program is told all the same
        assert watched.culprits == (1,), result
        assert "torch's flight recorder does not cover" not in result[rank].output, result
    assert sum(rank.output.count("╭─ ncclguard incident") for rank in result) == 1, result


def dies_in_a_guarded_call_beside_an_abort() -> None:
    meet_watched(timeout=5, on_hang="abort")
    dist.all_reduce(torch.ones(3))
    know_each_other()
    time.sleep(1.0)  # the others are to know as much
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ng.safe_all_reduce(torch.ones(3), timeout=20)
    time.sleep(4.0)
    os._exit(0)


def test_an_abort_is_for_a_rank_that_was_lost_in_a_guarded_call_too() -> None:
    result = faults.run_ranks(dies_in_a_guarded_call_beside_an_abort, 3, timeout=60)
    for rank in (0, 2):
        assert "ending the collectives of this process" in result[rank].output, result


def is_late_on_the_guards_backend() -> None:
    meet_watched("ncclguard", timeout=3, on_incident=told("watched"))
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 1:
        time.sleep(7.0)
    dist.all_reduce(torch.ones(3))


def test_the_limit_of_a_watch_is_for_the_guards_own_backend_too() -> None:
    result = faults.run_ranks(is_late_on_the_guards_backend, 3, timeout=60).check()
    incident = ng.Incident.from_json(result[0].reports["watched"]["json"])
    assert (str(incident.cause), incident.culprits) == ("late", (1,)), result


def in_phases() -> None:
    """Rank 1 comes late to each of three collectives: in a phase, issued in one and waited for outside, in none."""
    watching = meet_watched()
    dist.barrier()
    found: dict[str, int] = {}

    def late(seconds: float = 5.0) -> None:
        if dist.get_rank() == 1:
            time.sleep(seconds)

    with ng.phase("eval"):
        late()
        dist.all_reduce(torch.ones(1))
        found["inside"] = len(watching.incidents)
        late()
        with ng.phase("eval"):
            work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    found["issued inside"] = len(watching.incidents)
    late(9.0)
    dist.all_reduce(torch.ones(3))
    found["outside"] = len(watching.incidents)
    faults.report(found=found)
    dist.destroy_process_group()


@recorded
def test_the_limit_of_a_watched_call_is_that_of_the_phase_it_was_issued_in() -> None:
    variables = {"NCCLGUARD_TIMEOUT": "3", "NCCLGUARD_TIMEOUT_EVAL": "60"}
    result = faults.run_ranks(in_phases, 2, env=variables, timeout=90).check()
    expected = {"inside": 0, "issued inside": 0, "outside": 1}
    assert result.values("found") == {0: expected, 1: expected}, result


def shown_by_top() -> None:
    """Rank 1 comes late; meanwhile rank 0 is asked as `ncclguard top` asks, until there is a verdict."""
    ng.watch(timeout=3)
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 1:
        while not store.check(["looked"]):
            time.sleep(0.05)
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
        return
    work, said, ranks = dist.all_reduce(torch.ones(3), async_op=True), {}, {}
    counted: dict[int, int] = {}
    end = time.monotonic() + 20.0
    while time.monotonic() < end and not (said.get("open") and said["verdict"] and len(counted) == 2):
        time.sleep(0.2)
        ranks = control.jobs().get(records.job_name(), {})
        answers = top_command.statuses(ranks)
        snapshots = {rank: one["snapshot"] for rank, one in answers.items() if not isinstance(one, str)}
        said, counted = snapshots.get(0, {}), {rank: sum(one["watched"].values()) for rank, one in snapshots.items()}
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(top_command.view("job", answers))
    shown = console.export_text()
    console.print(top_command.job_view("job", top_command.job_answers(ranks)))
    store.set("looked", "")
    work.wait()
    faults.report(
        ranks=sorted(ranks),
        open=[call["text"] for call in said.get("open", ())],
        counted=counted,
        shown=shown,
        whole=console.export_text(),
    )
    time.sleep(1.0)
    answers = top_command.statuses(ranks)
    faults.report(later=answers[0]["snapshot"]["verdict"] if isinstance(answers.get(0), dict) else "?")  # type: ignore[index]
    dist.destroy_process_group()
    faults.report(afterwards=sorted(control.jobs().get(records.job_name(), {})))


@recorded
def test_top_sees_the_ranks_of_a_job_that_is_only_watched() -> None:
    result = faults.run_ranks(shown_by_top, 2, timeout=60).check()
    reports = result[0].reports
    assert reports["ranks"] == [0, 1], result
    assert len(reports["open"]) == 1 and "all_reduce" in reports["open"][0].replace("allreduce", "all_reduce"), result
    verdicts = [line for line in reports["shown"].splitlines() if "all_reduce" in line and "rank 1 late" in line]
    assert len(verdicts) == 1, reports["shown"]
    assert reports["counted"] == {"0": 2, "1": 1}, result
    assert "not come yet, of the ranks on this host: rank 1\n" in reports["whole"], reports["whole"]
    assert reports["later"] == "", result
    assert 0 not in reports["afterwards"], result


def counts_what_it_has_issued() -> None:
    dist.init_process_group("gloo")
    group, recorder = dist.new_group([0, 1]), Recorder()
    for other in (None, group, group):
        dist.all_reduce(torch.ones(1), group=other)
    recorder.status()
    faults.report(both=sorted(recorder.issued().values()))
    dist.destroy_process_group(group)
    faults.report(one=sorted(recorder.issued().values()))
    dist.destroy_process_group()
    faults.report(none=recorder.issued())


def test_a_group_that_is_destroyed_is_counted_no_more() -> None:
    """Before `status` has found that out: `ncclguard top` may ask at any moment."""
    for rank in faults.run_ranks(counts_what_it_has_issued, 2, timeout=60).check():
        assert rank.reports == {"both": [1, 2], "one": [1], "none": {}}, rank


def wait_for_incident(watch: Any) -> None:
    end = time.monotonic() + 20.0
    while not watch.incidents and time.monotonic() < end:
        time.sleep(0.1)


def is_late_in_the_fourth_step() -> None:
    watch = ng.watch(timeout=3)
    dist.init_process_group("gloo")
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    for step in range(4):
        if step == 3 and dist.get_rank() == 1:
            wait_for_incident(watch)
        parameter.grad = torch.ones(2)
        dist.all_reduce(parameter.grad)
        optimizer.step()
    wait_for_incident(watch)  # which each rank is told at a time of its own
    (incident,) = watch.incidents
    faults.report(steps={report.rank: report.steps for report in incident.ranks}, text=str(incident))
    dist.barrier()
    dist.destroy_process_group()


def test_an_incident_tells_how_many_optimizer_steps_there_were_before() -> None:
    for rank in faults.run_ranks(is_late_in_the_fourth_step, 2, timeout=60).check():
        assert rank.reports["steps"] == {"0": 3, "1": 3}, rank
        assert "\n  optimizer steps seen: 3\n" in rank.reports["text"], rank


def test_the_host_of_the_store_is_killed() -> None:
    """Rank 0 took the store with it: nothing can be agreed any more, and each survivor names it by what it sees itself."""
    result = faults.run_ranks(ends, 4, args=["kill", True, 0], timeout=90)
    for rank in (1, 2, 3):
        said = result[rank].reports.get("incident")
        assert said, str(result)
        incident = ng.Incident.from_json(said["json"])
        assert (str(incident.cause), incident.culprits, incident.agreed) == ("lost", (0,), False), incident
        assert said["at"] - result[0].reports["ended"] < AT_ONCE


def computes_while_the_others_end() -> None:
    """Rank 0 takes the store with it, rank 1 leaves, and rank 2 waits for nobody for a while."""
    kept = logging.handlers.BufferingHandler(1000)
    logging.getLogger("ncclguard").addHandler(kept)
    watch = ng.watch(timeout=60)
    dist.init_process_group("gloo")
    know_each_other()
    dist.barrier()
    time.sleep(1.5)  # all are out of the barrier
    if dist.get_rank() == 0:
        os._exit(0)
    if dist.get_rank() == 2:
        time.sleep(8)
    dist.destroy_process_group()
    lines = [record.getMessage() for record in kept.buffer]
    faults.report(lines=lines, incidents=[str(incident) for incident in watch.incidents])


def test_a_rank_that_left_well_is_not_named_when_the_store_is_gone() -> None:
    """Rank 1 could tell the store no more that it leaves; it told its host. Rank 0 ended without a word."""
    result = faults.run_ranks(computes_while_the_others_end, 3, timeout=60)
    lines = [line for lines in result.values("lines").values() for line in lines]
    assert [line for line in lines if "rank 0 is lost" in line], lines  # as far as rank 2 can know
    assert not [line for line in lines if "rank 1 is lost" in line], lines
    assert result.values("incidents")[1] == []
    assert all("rank 0 lost" in incident for incident in result.values("incidents")[2]), result


def test_without_watch_a_killed_rank_is_named_by_nobody() -> None:
    """Plain DDP: the survivors get an error with an address, and no rank."""
    result = faults.run_ranks(ends, 4, args=["kill", False], timeout=90)
    for rank in (0, 1, 3):
        assert result[rank].exit_code == 1
        assert "/gloo/" in result[rank].output
        assert "rank 2" not in result[rank].output.lower(), result[rank].output


def hold_gil(seconds: float) -> None:
    """As `pickle.loads` of a large checkpoint does: no thread of the interpreter runs."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL keeps the GIL during the call


def is_late_while_its_monitor_is_slow() -> None:
    """For 5 s the others of the host get no answer, and see that a thread of the interpreter goes on."""
    ng.watch(timeout=60)
    dist.init_process_group("gloo")
    monitor = runtime.current().monitor
    assert monitor.session_ready.wait(30)
    dist.all_reduce(torch.ones(2))
    ng.safe_barrier(timeout=60).raise_if_failed()
    ng.watch(timeout=2)  # only now: on a busy machine the ranks come to their first collective seconds apart
    if dist.get_rank() == CULPRIT:
        step, end = monitor._step, time.monotonic() + 7

        def goes_deeper(depth: int) -> None:
            if time.monotonic() < end:
                time.sleep(0.05)
                goes_deeper(depth + 1)

        def is_slow(now: float) -> None:
            goes_deeper(0)
            step(now)

        monitor._step = is_slow  # type: ignore[method-assign]
        time.sleep(10)
    dist.all_reduce(torch.ones(2))


def test_a_rank_that_is_slow_to_answer_is_waited_for_and_makes_one_incident(tmp_path: Path) -> None:
    env = {"NCCLGUARD_REPORT_DIR": str(tmp_path)}
    result = faults.run_ranks(is_late_while_its_monitor_is_slow, 3, timeout=90, env=env).check()
    (incident,) = [json.loads(file.read_text())["incident"] for file in tmp_path.glob("*.json")]
    assert (incident["cause"], incident["culprits"]) == ("late", [CULPRIT]), result


def killed_beside_a_silent_one() -> None:
    """Rank 1 is killed while rank 2 holds the GIL and rank 0 waits for rank 2, in a group that rank 1 is no member of."""
    ng.watch(timeout=60, on_incident=told("incident"))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    dist.barrier()
    ng.safe_barrier(timeout=30).raise_if_failed()
    if rank == 1:
        time.sleep(1.0)
        faults.report(ended=time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        hold_gil(14.0)
        faults.report(released=time.time())
    dist.all_reduce(torch.ones(1), group=pair)
    time.sleep(1.0)  # rank 2 has the verdict to read yet


def test_a_killed_rank_is_named_although_another_does_not_answer() -> None:
    """Who is gone is known for certain, so nobody waits for the answer of a rank that is busy; and that one is not named."""
    result = faults.run_ranks(killed_beside_a_silent_one, 3, timeout=60)
    said = [result[rank].reports.get("incident") for rank in (0, 2)]
    assert all(said), str(result)
    assert said[0]["json"] == said[1]["json"]
    incident = ng.Incident.from_json(said[0]["json"])
    assert (str(incident.cause), incident.culprits, incident.agreed) == ("lost", (1,), True), incident
    assert incident.timeout == pytest.approx(60, abs=0.01)
    assert said[0]["at"] - result[1].reports["ended"] < AT_ONCE
    assert said[0]["at"] < result[2].reports["released"]


def mismatches(rows: int, factor: int, seconds: float) -> None:
    """Rank 2 brings `factor` times as many elements as the others; then all go on. `seconds`: gloo's own limit."""
    ng.watch(timeout=60, on_incident=told("incident"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    dist.all_reduce(torch.ones(10))
    faults.report(started=time.time())
    dist.all_reduce(torch.ones(rows * (factor if dist.get_rank() == CULPRIT else 1)))
    dist.all_reduce(torch.ones(10))


@recorded
def test_a_mismatch_that_has_ended_on_some_ranks_with_rubbish_is_known_in_seconds() -> None:
    """gloo carries pieces of one operation for those of another: some ranks wait in the next collective, some in this one."""
    with faults.start_ranks(mismatches, 4, args=[4_000_000, 2, 60], timeout=90) as job:
        job.wait_for("incident")
        for number in range(4):  # they would wait until gloo's limit
            job.send_signal(number, signal.SIGKILL)
        result = job.wait()
    for rank in result:
        incident = ng.Incident.from_json(rank.reports["incident"]["json"])
        assert (str(incident.cause), incident.culprits, incident.agreed) == ("diverged", (CULPRIT,), True), incident
        assert [ranks for _, ranks in incident.sides] == [(0, 1, 3), (CULPRIT,)]
        assert rank.reports["incident"]["at"] - rank.reports["started"] < 15.0  # 1.6 s on an idle machine


@recorded
def test_a_healthy_rank_that_a_mismatch_killed_is_not_named() -> None:
    """gloo aborts rank 1, which is sent more than it expects: seen from outside it is a rank that died."""
    result = faults.run_ranks(mismatches, 4, args=[1000, 2, 20], timeout=90)
    aborted = [rank.rank for rank in result if gloo_aborts.aborted(rank)]
    assert aborted, str(result)
    assert CULPRIT not in aborted, str(result)
    for rank in result:
        if rank.rank not in aborted:
            incident = ng.Incident.from_json(rank.reports["incident"]["json"])
            assert str(incident.cause) == "diverged", incident
            assert set(incident.culprits) <= {CULPRIT}, incident
            assert [ranks for _, ranks in incident.sides][-1] == (CULPRIT,), incident


#: Who is awaited is said after these seconds, and again after twice as many: half as many beyond them are for the first.
WARN_AFTER = 4.0


def stalls() -> None:
    """Rank 2 is slow but within the limit, holds the GIL, is late, and then in a collective of another group; one job for all."""
    ng.configure(warn_after=WARN_AFTER)
    warnings = Warnings()
    logging.getLogger("ncclguard").addHandler(warnings)
    watch = ng.watch(timeout=30)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training()
    training.steps()
    ng.safe_barrier(timeout=60).raise_if_failed()
    warnings.texts.clear()  # on a busy machine the ranks come to the first steps seconds apart
    over, seen = threading.Event(), list[Any]()

    def look() -> None:
        """Look at what `ncclguard top --all` shows, again and again."""
        while not over.wait(0.1):
            seen.extend(registry.awaited_in_watched())

    looking = threading.Thread(target=look)
    looking.start()
    if rank == CULPRIT:
        time.sleep(1.5 * WARN_AFTER)
    training.steps()
    over.set()
    looking.join()
    faults.report(warnings=warnings.texts, awaited=seen[-1:])
    if rank == CULPRIT:
        hold_gil(1.5 * WARN_AFTER)
    training.steps()
    short = ng.watch(timeout=LIMIT, on_incident=told("late"))
    other = dist.new_group()
    if rank == CULPRIT:
        time.sleep(LIMIT / 3)
    training.steps()  # stood still for a while; from now on idle for longer than the limit, while another group works
    for _ in range(20):
        dist.all_reduce(torch.ones(1), group=other)
        time.sleep(LIMIT / 15)
    faults.report(healthy=len(watch.incidents) + len(short.incidents))
    training.steps()
    started = time.time()
    if rank == CULPRIT:
        time.sleep(LIMIT + 3)
    training.steps()
    faults.report(went_on=True, late_started=started)
    ng.watch(timeout=LIMIT, on_hang="abort", on_incident=told("other"))
    training.steps()
    if rank == CULPRIT:
        dist.barrier(group=other)
    else:
        training.steps()
    time.sleep(60)  # aborted, or hangs for good


@pytest.fixture(scope="module")
def stalled() -> faults.JobResult:
    """The job, whose parts the tests below look at."""
    return faults.run_ranks(stalls, 4, timeout=200)


@recorded
def test_a_slow_rank_makes_one_warning_by_one_rank_that_says_where_it_is(stalled: faults.JobResult) -> None:
    (warning,) = [text for texts in stalled.values("warnings").values() for text in texts]
    assert f"rank {CULPRIT} has not come" in warning
    assert "sleep" in warning


@recorded
def test_who_has_asked_shows_in_top_who_is_awaited(stalled: faults.JobResult) -> None:
    (found,) = [one for seen in stalled.values("awaited").values() for one in seen]
    assert f"rank {CULPRIT} has not come" in found["lines"][0] and "sleep" in found["lines"][0], found
    assert found["group"] == "0:gloo" and found["by"] != CULPRIT and found["age"] >= WARN_AFTER, found


@recorded
def test_ranks_that_are_back_in_time_and_idle_groups_make_no_incident(stalled: faults.JobResult) -> None:
    assert stalled.values("healthy") == dict.fromkeys(range(4), 0), str(stalled)


@recorded
def test_a_rank_late_beyond_the_limit_is_named_by_all_in_time(stalled: faults.JobResult) -> None:
    for rank in stalled:
        late = ng.Incident.from_json(rank.reports["late"]["json"])
        assert (str(late.cause), late.culprits, late.agreed) == ("late", (CULPRIT,), True), late
        assert late.deadline_expired
        if rank.rank != CULPRIT:
            assert rank.reports["late"]["at"] - rank.reports["late_started"] < LIMIT + 2.0


@recorded
def test_an_incident_of_a_late_rank_shows_where_it_was(stalled: faults.JobResult) -> None:
    incident = ng.Incident.from_json(stalled[0].reports["late"]["json"])
    culprit = next(rank for rank in incident.ranks if rank.rank == CULPRIT)
    assert any("time.sleep" in frame for frame in culprit.stack), culprit


@recorded
def test_after_an_incident_that_is_only_reported_the_job_goes_on(stalled: faults.JobResult) -> None:
    assert stalled.values("went_on") == dict.fromkeys(range(4), True), str(stalled)


@recorded
def test_a_rank_in_a_collective_of_another_group_is_named_by_all(stalled: faults.JobResult) -> None:
    for rank in stalled:
        other = ng.Incident.from_json(rank.reports["other"]["json"])
        assert (str(other.cause), other.culprits) == ("diverged", (CULPRIT,)), other


@recorded
def test_an_abort_ends_the_collectives_so_that_the_ranks_end_by_themselves(stalled: faults.JobResult) -> None:
    assert not stalled.still_running, str(stalled)
    assert [rank.exit_code for rank in stalled] == [1] * 4, str(stalled)


def hangs_and_is_ended(number: int) -> None:
    """Rank 1 does not come; once that is known, all ranks are sent a signal, as by `scancel`, `torchrun` or Ctrl-C."""
    rank = int(os.environ["RANK"])
    pids: list[int] = [0] * 3

    def end(incident: ng.Incident) -> None:
        faults.report(**{f"incident {incident.id}": list(incident.culprits)})
        if rank == 0:
            threading.Timer(4.0, lambda: [os.kill(pid, number) for pid in pids]).start()

    ng.watch(timeout=60)
    dist.init_process_group("gloo")
    dist.all_gather_object(pids, os.getpid())
    ng.safe_barrier(timeout=60).raise_if_failed()
    ng.watch(
        timeout=3, on_incident=end
    )  # only now: on a busy machine the ranks come to the first collective seconds apart
    if rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(10))


@recorded
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_of_a_job_that_hangs_is_no_second_incident(number: signal.Signals, tmp_path: Path) -> None:
    """One incident, one panel, and the log's answer is the rank that was late, not those that were ended after it."""
    result = faults.run_ranks(hangs_and_is_ended, 3, args=[int(number)], timeout=60)
    known = [{key: named for key, named in rank.reports.items() if key.startswith("incident")} for rank in result]
    assert [list(named.values()) for named in known] == [[[1]]] * 3, str(result)
    log = "".join(rank.output for rank in result)
    assert log.count("╭─ ncclguard incident") == 1, log
    assert log.count("ended from outside, with SIGTERM") <= 1, log
    (tmp_path / "job.log").write_text(log)
    if number == signal.SIGTERM:
        assert explain([os.fspath(tmp_path / "job.log")]).culprits == (1,)


def is_ended_because_another_is_gone() -> None:
    """Rank 1 is killed while the others compute; each of them is sent SIGTERM as soon as that can be seen."""
    ng.watch(timeout=60, on_incident=told("incident"))
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(10))
    know_each_other()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not runtime.current().monitor.neighbours.gone(1):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def test_sigterm_from_a_launcher_waits_for_the_verdict_on_the_rank_that_is_gone() -> None:
    """Else one survivor has gone before it hears of the verdict that another one reports."""
    result = faults.run_ranks(is_ended_because_another_is_gone, 3, timeout=60)
    for rank in (0, 2):
        assert result[rank].signal is signal.SIGTERM, str(result)
        incident = ng.Incident.from_json(result[rank].reports["incident"]["json"])
        assert (str(incident.cause), incident.culprits) == ("lost", (1,)), str(result)


def is_interrupted_before_its_limit(guarded: bool = False) -> None:
    """Rank 1 does not come, and after three seconds of a limit of 60 somebody presses Ctrl-C."""
    pids: list[int] = [0] * 3
    ng.watch(timeout=60, on_incident=told("incident"))
    dist.init_process_group("gloo")
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        threading.Timer(3.0, lambda: [os.kill(pid, signal.SIGINT) for pid in pids]).start()
        time.sleep(60)
    if guarded:
        ng.safe_all_reduce(torch.ones(10), timeout=60)
    dist.all_reduce(torch.ones(10))


@recorded
def test_ctrl_c_before_the_limit_is_told_as_what_it_is() -> None:
    result = faults.run_ranks(is_interrupted_before_its_limit, 3, timeout=60)
    for rank in (0, 2):
        incident = ng.Incident.from_json(result[rank].reports["incident"]["json"])
        assert (str(incident.cause), incident.culprits) == ("unknown", ()), str(result)
        assert "with Ctrl-C; rank 1 had not come to it, interrupted at " in incident.summary
        assert "KeyboardInterrupt" in str(incident.ranks[1].exception)


def test_ctrl_c_on_a_guarded_call_that_waits_blames_nobody_and_says_who_had_not_come(tmp_path: Path) -> None:
    env = {"NCCLGUARD_REPORT_DIR": str(tmp_path)}
    result = faults.run_ranks(is_interrupted_before_its_limit, 3, args=[True], env=env, timeout=60)
    (report,) = tmp_path.glob("*.json")
    incident = ng.Incident.from_json(json.dumps(json.loads(report.read_text())["incident"]))
    assert (str(incident.cause), incident.culprits) == ("unknown", ()), str(result)
    assert "with Ctrl-C; rank 1 had not come to it, interrupted at " in incident.summary


def be_late_twice() -> None:
    """Rank 1 comes late to two collectives; then the ranks meet."""
    for _ in range(2):
        if dist.get_rank() == 1:
            time.sleep(7)
        dist.all_reduce(torch.ones(10))
    ng.safe_barrier(timeout=30)


def calls_exit_in_its_callback() -> None:
    """Rank 1 is late twice, longer than the limit; the program wants to end at the first time, in the wrong thread."""
    found = []

    def end(incident: ng.Incident) -> None:
        found.append(list(incident.culprits))
        sys.exit(3)

    handle = meet_watched(timeout=3, on_incident=end)
    be_late_twice()
    faults.report(found=found, active=handle.active)


@recorded
def test_sys_exit_in_a_callback_ends_neither_the_watch_nor_the_program_and_is_said() -> None:
    result = faults.run_ranks(calls_exit_in_its_callback, 2, timeout=60).check()
    for rank in result:
        assert rank.reports == {"found": [[1], [1]], "active": True}, str(result)
        assert "on_incident called sys.exit(), which ends no program from the thread it is called in" in rank.output


def blocks_in_its_callback(on_hang: Literal["report", "abort"]) -> None:
    """Rank 1 is late twice, and rank 0's callback, a request without a limit, never returns."""
    forever = threading.Event()

    def ask_a_service(incident: ng.Incident) -> None:
        if dist.get_rank() == 0:
            forever.wait()

    handle = meet_watched(timeout=3, on_hang=on_hang, on_incident=ask_a_service)
    be_late_twice()
    faults.report(found=[list(incident.culprits) for incident in handle.incidents], active=handle.active)


@recorded
def test_after_a_callback_that_does_not_return_later_hangs_are_reported_on_all_ranks() -> None:
    result = faults.run_ranks(blocks_in_its_callback, 3, args=["report"], timeout=60).check()
    assert [rank.reports for rank in result] == [{"found": [[1], [1]], "active": True}] * 3, str(result)


@recorded
def test_an_abort_does_not_wait_for_a_callback() -> None:
    result = faults.run_ranks(blocks_in_its_callback, 3, args=["abort"], timeout=60)
    assert not result.still_running, str(result)
    assert [rank.exit_code for rank in result] == [1] * 3, str(result)
    assert "ending the collectives of this process" in result[0].output


def writes_checkpoints_in_a_thread() -> None:
    """Rank 1's other thread, which has a group of its own, does not come to its second barrier; training goes on."""
    meet_watched(timeout=3, on_incident=told("incident"))
    group = dist.new_group()

    def write() -> None:
        dist.barrier(group)
        if dist.get_rank() == 1:
            time.sleep(8)
        dist.barrier(group)

    writer = threading.Thread(target=write, name="checkpoints")
    writer.start()
    for _ in range(80):
        dist.all_reduce(torch.ones(10))
        time.sleep(0.1)
    writer.join()


@recorded
def test_the_stack_is_that_of_the_thread_which_holds_its_group_up() -> None:
    result = faults.run_ranks(writes_checkpoints_in_a_thread, 3, timeout=60).check()
    incident = ng.Incident.from_json(result[0].reports["incident"]["json"])
    assert (str(incident.cause), incident.culprits) == ("late", (1,)), incident
    assert incident.ranks[1].thread == "checkpoints"
    assert any("time.sleep(8)" in frame for frame in incident.ranks[1].stack), incident.ranks[1]
    assert [name for name, _ in incident.ranks[1].threads] == ["MainThread"]
    assert "thread 'checkpoints', innermost last" in str(incident)


def is_late_in_another_group() -> None:
    """Rank 0 waits for rank 1 in one group, and that for rank 2 in another, with the shortest limit."""
    ng.watch(timeout=60)
    dist.init_process_group("gloo")
    left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
    dist.barrier()
    ng.safe_barrier(timeout=60).raise_if_failed()
    ng.watch(timeout=1, on_incident=told("incident"))  # only now: on a busy machine the ranks come here seconds apart
    if dist.get_rank() == 2:
        time.sleep(5)
    if dist.get_rank() >= 1:
        dist.barrier(right)
    if dist.get_rank() <= 1:
        dist.barrier(left)


@recorded
def test_with_the_shortest_limit_too_who_passes_the_delay_on_is_not_named() -> None:
    result = faults.run_ranks(is_late_in_another_group, 3, timeout=60).check()
    incident = ng.Incident.from_json(result[0].reports["incident"]["json"])
    assert (str(incident.cause), incident.culprits) == ("late", (2,)), incident


def leaves_out_a_group() -> None:
    """Rank 3 does not call the `new_group` that rank 2 waits in."""
    meet_watched(seconds=20, timeout=3, on_incident=told("incident"))
    if dist.get_rank() != 3:
        dist.new_group([2, 3])
    dist.barrier()


@recorded
def test_a_rank_that_waits_for_the_members_of_a_new_group_is_not_late() -> None:
    result = faults.run_ranks(leaves_out_a_group, 4, timeout=60)
    incident = ng.Incident.from_json(result[0].reports["incident"]["json"])
    assert (str(incident.cause), incident.culprits) == ("diverged", ()), incident
    assert [ranks for _, ranks in incident.sides] == [(0, 1, 3), (2,)]
    assert incident.sides[1][0] == "new_group(ranks 2-3)"


def calls_another() -> None:
    meet_watched(seconds=20, timeout=3)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.barrier()


def test_of_two_ranks_that_diverge_the_line_in_the_log_of_each_shows_both_sides() -> None:
    result = faults.run_ranks(calls_another, 2, timeout=60)
    for rank in result:
        line = next(line for line in rank.output.splitlines() if line.startswith("ncclguard incident "))
        assert "no side is a majority. Rank 0 called all_reduce(Float [3]" in line, str(result)
        assert "; rank 1 called barrier(group 0 default_pg, number 1)." in line, str(result)
