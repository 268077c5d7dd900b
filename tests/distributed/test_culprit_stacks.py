"""The stack of a culprit whose interpreter does not run is in the incident of every other rank."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults

CULPRIT = 2
TIMEOUT = 3.0


def catastrophic(seconds: float) -> None:
    """Backtrack in C, with the GIL held, for at least so long."""
    length, took = 18, 0.0
    while took < seconds:
        started = time.monotonic()
        re.match(r"(a+)+$", "a" * length + "b")
        took = time.monotonic() - started
        length += (
            2 if took < seconds / 60 else max(1, math.ceil(math.log2(seconds / took)))
        )  # each "a" doubles the time


def asleep_with_the_gil(seconds: float) -> None:
    """The same without the load: a PyDLL keeps the GIL."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def other_work() -> None:
    """A second thread of the program."""
    threading.Event().wait(120)


def job() -> None:
    """Rank 2 holds the GIL during a guarded call, then while the others are in a raw one; then it is stopped."""
    threading.Thread(target=other_work, name="program-thread", daemon=True).start()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier(timeout=60).raise_if_failed()
    if rank == CULPRIT:
        catastrophic(TIMEOUT + 4)
        ng.safe_barrier(timeout=TIMEOUT).acknowledge()
    else:
        outcome = ng.safe_barrier(timeout=TIMEOUT)
        outcome.acknowledge()
        faults.report(guarded=outcome.incident.to_json(), verdict=[outcome.agreed, str(outcome.cause)])
    ng.watch(timeout=TIMEOUT, on_incident=lambda incident: faults.report(raw=incident.to_json()))
    ng.safe_barrier(timeout=60).raise_if_failed()
    if rank == CULPRIT:
        time.sleep(1)  # by then the others are in the next one: on a busy machine they leave the barrier later
        asleep_with_the_gil(TIMEOUT + 4)
    dist.all_reduce(torch.ones(3))
    ng.safe_barrier(timeout=60).raise_if_failed()
    if rank == CULPRIT:
        child = os.fork()
        if child == 0:  # resumes its parent: a stopped process cannot
            time.sleep(TIMEOUT + 4)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, 0)
        ng.safe_barrier(timeout=TIMEOUT).acknowledge()
    else:
        outcome = ng.safe_barrier(timeout=TIMEOUT)
        faults.report(stopped=outcome.incident.to_json())
    dist.destroy_process_group()


#: What a note says where two looks alike could not be had: on a busy machine, or of a process with several threads at work.
UNSURE = ("its host is overloaded", "it went on between two looks", "several of its threads run")


def test_stacks_of_a_rank_that_holds_the_gil_and_of_one_that_is_stopped() -> None:
    """Main thread first, other threads by name; a stopped rank is said to be stopped.

    The first one needs a processor all the while: on a machine that has none for it, it is not known to be stuck.
    """
    result = faults.run_ranks(job, 3, timeout=200)
    for key in ("guarded", "raw", "stopped"):
        texts = {rank: result[rank].reports.get(key) for rank in (0, 1)}
        assert all(texts.values()), str(result)
        incident = ng.Incident.from_json(texts[0])
        assert texts[0] == texts[1]
        culprit = next(report for report in incident.ranks if report.rank == CULPRIT)
        unsure = any(words in str(culprit.note) for words in UNSURE)
        if key == "guarded" and unsure:  # nobody can tell then, or it had come to its end
            assert (str(incident.cause), incident.culprits) == ("unknown", ()), incident
            continue
        assert (str(incident.cause), incident.culprits) == ("stuck", (CULPRIT,)), incident
        assert culprit.pid == result[CULPRIT].pid
        assert culprit.note
        if key == "stopped":
            assert "stopped by a signal (state T" in culprit.note, culprit
            assert f"`kill -CONT {culprit.pid}`" in incident.advice, incident.advice
            assert any("in job" in frame for frame in culprit.stack) == ("read by py-spy" in culprit.note), culprit
            continue
        if key == "guarded":
            assert "re.match" in culprit.stack[-2] or "catastrophic" in culprit.stack[-2], culprit
        else:
            assert "asleep_with_the_gil" in culprit.stack[-1], culprit
        assert any("in job" in frame for frame in culprit.stack[:-1]), culprit
        assert any("other_work" in frame for _, frames in culprit.threads for frame in frames), culprit
        assert ("catastrophic" if key == "guarded" else "asleep_with_the_gil") in str(incident)
    assert result[CULPRIT].ok, str(result)


def keeps_the_interpreter(seconds: float) -> None:
    """Run Python only, and let no other thread of this process have a turn, as where a machine is overloaded."""
    sys.setswitchinterval(3600)
    end, bits = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        bits += 1
        odd(bits, 12)
    sys.setswitchinterval(0.005)


def odd(bits: int, depth: int) -> None:
    if depth:
        (odd if bits & 1 else even)(bits >> 1, depth - 1)


def even(bits: int, depth: int) -> None:
    if depth:
        (odd if bits & 1 else even)(bits >> 1, depth - 1)


def silent_but_running() -> None:
    """Rank 2 is late, and has no turn for an answer until some time after the others' limit."""
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=60).raise_if_failed()
    if dist.get_rank() == CULPRIT:
        keeps_the_interpreter(TIMEOUT + 3)
    outcome = ng.safe_barrier(timeout=TIMEOUT)
    outcome.acknowledge()
    faults.report(verdict=[outcome.agreed, str(outcome.cause), list(outcome.culprits)])
    dist.destroy_process_group()


def test_a_rank_that_does_not_answer_but_is_seen_to_run_is_not_called_stuck() -> None:
    """Its answer is waited for: it has not come to the barrier."""
    result = faults.run_ranks(silent_but_running, 3, timeout=120).check()
    assert [result[rank].reports["verdict"] for rank in range(3)] == 3 * [[True, "late", [CULPRIT]]], str(result)


def in_a_thread() -> None:
    """The program runs in a thread, as under Ray, whose main thread does something of its own."""
    thread = threading.Thread(target=threads_program, name="train")
    thread.start()
    thread.join()
    dist.destroy_process_group()


def threads_program() -> None:
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=60).raise_if_failed()
    if dist.get_rank() == 1:
        asleep_in_the_thread(2 * TIMEOUT)
    outcome = ng.safe_barrier(timeout=TIMEOUT)
    outcome.acknowledge()
    if dist.get_rank() == 0:
        faults.report(incident=outcome.incident.to_json(), shown=str(outcome.incident))


def asleep_in_the_thread(seconds: float) -> None:
    time.sleep(seconds)


def test_the_stack_of_a_late_rank_is_that_of_the_thread_which_made_its_calls() -> None:
    result = faults.run_ranks(in_a_thread, 2, timeout=200)
    found = result[0].reports
    culprit = ng.Incident.from_json(found["incident"]).ranks[1]
    assert culprit.thread == "train" and "in asleep_in_the_thread: time.sleep(seconds)" in culprit.stack[-1], culprit
    assert culprit.threads[0][0] == "MainThread" and any("in in_a_thread" in frame for frame in culprit.threads[0][1])
    assert "thread 'train', innermost last:" in found["shown"] and "in asleep_in_the_thread" in found["shown"]


def from_dead_storage(file: str) -> None:
    """The program's file is on storage that answers no more: rank 2 waits for it, and so would all who read the file."""
    specification = importlib.util.spec_from_file_location("program", file)
    assert specification is not None and specification.loader is not None
    program = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(program)
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=60).raise_if_failed()
    if dist.get_rank() == 0:
        os.remove(file)
        os.mkfifo(file)  # who opens it for reading waits for a writer, as for a server that is gone
    ng.safe_barrier(timeout=60).raise_if_failed()
    outcome = program.step(ng, dist.get_rank() == CULPRIT, TIMEOUT)
    outcome.acknowledge()
    culprit = next(report for report in outcome.incident.ranks if report.rank == CULPRIT)
    faults.report(
        verdict=[outcome.agreed, str(outcome.cause), list(outcome.culprits)],
        stack=culprit.stack,
        seconds=outcome.seconds,
    )
    dist.destroy_process_group()  # and the process ends, although a thread of it still waits for the storage


PROGRAM = """
import time

def step(ng, late, timeout):
    if late:
        time.sleep(timeout + 4)
    return ng.safe_barrier(timeout=timeout)
"""


def test_ranks_whose_source_files_cannot_be_read_any_more_answer_all_the_same(tmp_path: Path) -> None:
    """Dead storage makes one rank late; the others, who would quote its lines, must not be held up by it too."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    result = faults.run_ranks(from_dead_storage, 3, args=[str(file)], timeout=120).check()
    for rank in range(3):
        said = result[rank].reports
        assert said["verdict"] == [True, "late", [CULPRIT]], str(result)
        assert any("program.py:6 in step" in frame for frame in said["stack"]), said
    assert result[0].reports["seconds"] < TIMEOUT + 3.0, str(result)
