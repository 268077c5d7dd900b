"""The motion of a rank between two looks, by what /proc counts of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from ncclguard.hang.looks import Counters, Look, count, observe, started_by
from ncclguard.hang.stacks import Kind, Motion, Place

BACKWARD = Place(Kind.BACKWARD, "backward", True, stack=("train.py:4 step", "backward"))
THREADS = {
    "gloo's": ({"python", "pt_gloo_runloop"}, Motion.MOVING),
    "NCCL's": ({"python", "pt_nccl_watchdg"}, Motion.SPINNING),
    "both": ({"pt_gloo_runloop", "NCCL Progress 0"}, Motion.SPINNING),
    "none that are known": ({"python"}, Motion.SPINNING),
}


@pytest.mark.parametrize("case", THREADS)
def test_who_computes_inside_a_call_waits_there_on_nccl_alone(case: str) -> None:
    """gloo has a thread sleep that waits for peers; NCCL has the host ask its device all the time."""
    names, motion = THREADS[case]
    looks = [
        Look(float(second), Counters("R", {10: (100 * second, 5)}, None, 0, frozenset(names)), BACKWARD, 10, (10,))
        for second in range(2)
    ]
    found = observe(looks)
    assert (found.motion, found.gloo) == (motion, case == "gloo's")


def test_a_main_thread_that_runs_says_nothing_of_the_one_that_trains() -> None:
    """Ray's main thread wakes up all the time, and on a busy host it waits for a processor."""
    counted = Counters("R", {10: (0, 5), 12: (0, 5)}, None, 0, running=frozenset([10]))
    looks = {at: [Look(float(second), counted, BACKWARD, at, (10, 12)) for second in range(2)] for at in (10, 12)}
    assert {at: observe(some).motion for at, some in looks.items()} == {10: Motion.SPINNING, 12: Motion.STILL}


def test_a_report_that_is_being_written_moves_no_rank() -> None:
    """The threads of `watch` compute and write for a second when a limit has passed: nobody trains meanwhile."""
    looks = [
        Look(
            float(second),
            Counters("S", {10: (0, 5), 12: (80 * second, 9)}, 10**6 * second, 50 * second),
            BACKWARD,
            10,
            (10, 12),
        )
        for second in range(2)
    ]
    assert observe(looks).motion is Motion.SPINNING
    assert observe([replace(one, own_threads=frozenset([12])) for one in looks]).motion is Motion.STILL


@pytest.mark.parametrize("who", ["this library", "torch's store", "the program"])
def test_what_the_watch_and_the_store_transfer_moves_no_rank(who: str) -> None:
    """They ask and answer all the time, with many ranks for megabytes a second, and hardly compute for it."""
    stores = frozenset([12]) if who == "torch's store" else frozenset[int]()
    looks = [
        Look(
            float(second),
            Counters("S", {10: (0, 5), 12: (0, 9)}, 10**6 * second, 0, transfers={10: 0, 12: 10**6 * second}, stores=stores),
            BACKWARD,
            10,
            (10, 12),
            own_threads=frozenset([12]) if who == "this library" else frozenset[int](),
        )
        for second in range(2)
    ]  # fmt: skip
    assert (observe(looks).motion is Motion.STILL) is (who != "the program")


def test_a_look_that_failed_between_two_others_says_nothing() -> None:
    counted = Counters("S", {10: (0, 5)}, None, 0)
    looks = [Look(float(second), counted, None if second == 1 else BACKWARD, 10, (10,)) for second in range(3)]
    assert observe(looks).motion is Motion.STILL
    assert observe(looks[1:]).motion is Motion.UNKNOWN


@pytest.mark.processes
def test_what_a_process_has_started_since_works_for_it_also_when_it_has_ended() -> None:
    text = (
        "import subprocess, sys\n"
        "for line in sys.stdin: print(subprocess.run([sys.executable, '-S', '-c', 'sum(range(10**7))']), flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        before = count(process.pid, started_by())
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline()
        after = count(process.pid, started_by())
        process.stdin.close()
    assert before is not None and after is not None
    assert after.helpers > before.helpers
