"""The motion of a rank between two looks, by what /proc counts of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from ncclguard.hang.looks import Counters, Look, count, is_doubtful, observe, started_by
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


@pytest.mark.parametrize(
    ("place", "motion"),
    [
        (Place(Kind.COLLECTIVE, "safe_all_reduce", guarded=True), Motion.WAKING),
        (Place(Kind.STORE, "wait"), Motion.WAKING),
        (Place(Kind.PYTHON), Motion.MOVING),
    ],
    ids=["guarded", "store", "program"],
)
def test_who_wakes_up_to_ask_is_not_at_work_for_being_met_running(place: Place, motion: Motion) -> None:
    """On a busy host it waits for a processor each time, and is met so at many a look."""
    counted = [
        Counters("R", {10: (0, 5 * second)}, None, 0, frozenset(["pt_gloo_runloop"]), running=frozenset([10]))
        for second in range(2)
    ]
    looks = [Look(float(second), one, place, 10, (10,)) for second, one in enumerate(counted)]
    assert observe(looks).motion is motion


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


WATCH = frozenset([12])
LASTING = {
    "a report that was written between two looks": ([0, 10**7, 10**7, 10**7], WATCH, Motion.STILL),
    "what goes on until the last look": ([0, 10**7, 2 * 10**7, 3 * 10**7], WATCH, Motion.MOVING),
    "what began between the last two": ([0, 0, 10**7], WATCH, Motion.MOVING),
    "a rank without this library": ([0, 10**7, 10**7, 10**7], frozenset[int](), Motion.MOVING),
}


@pytest.mark.parametrize("by", ["threads that have ended", "processes that have ended"])
@pytest.mark.parametrize("case", LASTING)
def test_what_has_ended_in_a_rank_with_this_library_moves_it_while_it_goes_on(case: str, by: str) -> None:
    """The thread that writes a report has ended in the next look, and all that is left of it is in the process's sum."""
    done, own, motion = LASTING[case]
    looks = watched_looks(done, own, Place(Kind.FILE, stack=("train.py:4 load",)), by.startswith("threads"))
    assert observe(looks).motion is motion
    assert is_doubtful(looks) is bool(own)


@pytest.mark.parametrize("place", [BACKWARD, Place(Kind.SLEEP, stack=("train.py:4 pause",))], ids=["inside", "asleep"])
def test_a_thread_that_has_ended_moves_no_rank_in_a_collective_beside_this_library(place: Place) -> None:
    """Those that exchange its data are there before and after: a report that takes long is no progress."""
    done = [0, 10**7, 2 * 10**7]
    assert observe(watched_looks(done, WATCH, place, True)).motion is Motion.STILL
    assert observe(watched_looks(done, frozenset(), BACKWARD, True)).motion is Motion.SPINNING
    exchanged = [
        replace(one, counters=replace(one.counters, transfers={10: 0, 11: some}))
        for one, some in zip(watched_looks(done, WATCH, place, True), done, strict=True)
        if one.counters is not None
    ]
    assert observe(exchanged).motion is not Motion.STILL


def watched_looks(done: list[int], own: frozenset[int], place: Place, by_threads: bool) -> list[Look]:
    """Return looks at a process, of which threads or processes that have ended have done this much."""
    threads, transfers = {10: (0, 5), 11: (0, 1), 12: (0, 9)}, {10: 0, 11: 0, 12: 0}
    return [
        Look(
            float(second),
            Counters("S", threads, *((some, 0) if by_threads else (0, some // 10**5)), transfers=transfers),
            place,
            10,
            (10, 12),
            own_threads=own,
        )
        for second, some in enumerate(done)
    ]


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
