"""Whom NCCL's counts of launches show as awaited, in `ncclguard hang`, and when they show nobody."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from ncclguard.environment.ras import Communicator, Rank
from ncclguard.hang.launches import Launches, behind, of_job, strayed
from ncclguard.hang.stacks import Kind, Motion, Place
from ncclguard.hang.verdict import Evidence, Seen, judge
from ncclguard_explain.cause import Cause
from tests.unit.ras_server import answering, serving

ON_DEVICE = Place(Kind.DEVICE, "synchronize", stack=("train.py:6 step",))
SLEEP = Place(Kind.SLEEP, stack=("train.py:8 pause",))
OTHER = Place(Kind.LOCK, stack=("train.py:9 lock",))
SAVE = Place(Kind.FILE, stack=("train.py:7 save",))


def communicator(
    launched: Mapping[int, int | Mapping[str, int]], name: str = "a", first_pid: int = 100
) -> Communicator:
    """Return one whose ranks have launched so many all-reduces, or whatever is given."""
    counts = {rank: {"AllReduce": many} if isinstance(many, int) else dict(many) for rank, many in launched.items()}
    ranks = [Rank(rank=rank, pid=first_pid + rank, collective_counts=own) for rank, own in counts.items()]
    return Communicator(hash=name, size=len(ranks), ranks=tuple(ranks))


def rank(number: int, place: Place = ON_DEVICE, motion: Motion = Motion.SPINNING) -> Seen:
    return Seen(number, "S", motion, place, "gpu-01", 100 + number)


def job(struck: Sequence[Seen], *communicators: Communicator, size: int = 4) -> Evidence:
    others = [rank(number) for number in range(size) if number not in {one.rank for one in struck}]
    return Evidence(size, [*others, *struck], seconds=2.5, communicators=communicators)


LATE = communicator({0: 5, 1: 5, 2: 4, 3: 5})
NAMED = {
    "asleep": (job([rank(2, SLEEP, Motion.STILL)], LATE), "high"),
    "asleep, and waking up for it": (job([rank(2, SLEEP, Motion.WAKING)], LATE), "high"),
    "in a file, which may answer": (job([rank(2, SAVE, Motion.STILL)], LATE), "medium"),
    "while another one that waits for it sleeps too": (
        job([rank(2, SLEEP, Motion.STILL), rank(1, OTHER, Motion.STILL)], LATE), "high",
    ),
    "at the end of a chain of groups": (
        job([rank(2, SLEEP, Motion.STILL)], communicator({0: 5, 1: 4}), communicator({1: 3, 2: 2}, "b")), "high",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_the_rank_that_has_launched_less_and_does_not_move_is_named(case: str) -> None:
    evidence, confidence = NAMED[case]
    verdict = judge(evidence)
    assert (verdict.culprits, verdict.cause, verdict.confidence) == ((2,), Cause.LATE, confidence), verdict
    assert "AllReduce launched" in verdict.reason


def test_two_that_have_launched_less_are_both_named_wherever_they_stand() -> None:
    uneven = communicator({0: 5, 1: 5, 2: 4, 3: 4})
    verdict = judge(job([rank(2, SLEEP, Motion.STILL), rank(3, OTHER, Motion.STILL)], uneven))
    assert (verdict.culprits, verdict.cause) == ((2, 3), Cause.LATE)
    without = judge(job([rank(2, SLEEP, Motion.STILL), rank(3, OTHER, Motion.STILL)]))
    assert without.culprits == ()


NOBODY = {
    "it works": (job([rank(2, SAVE, Motion.MOVING)], LATE), (2,)),
    "its own device may compute": (job([], LATE), (2,)),
    "it was not seen": (Evidence(8, [rank(0), rank(1)], communicators=(communicator({0: 5, 1: 5, 7: 4}),)), (7,)),
    "those that wait for it move": (job([rank(2, SLEEP, Motion.WAKING), rank(1, SAVE, Motion.MOVING)], LATE), ()),
}


@pytest.mark.parametrize("case", NOBODY)
def test_nobody_is_named_where(case: str) -> None:
    evidence, awaited = NOBODY[case]
    verdict = judge(evidence)
    assert verdict.culprits == ()
    assert set(awaited) <= set(verdict.awaited)


def test_a_rank_alone_in_another_order_has_diverged_and_of_two_sides_neither() -> None:
    most, odd = {"AllReduce": 5, "AllGather": 1}, {"AllReduce": 4, "AllGather": 2}
    uneven = communicator({0: most, 1: most, 2: odd, 3: most})
    assert strayed(uneven) == [2]
    verdict = judge(job([], uneven))
    assert (verdict.culprits, verdict.cause, verdict.confidence) == ((2,), Cause.DIVERGED, "medium")
    sides = communicator({0: most, 1: most, 2: odd, 3: odd})
    assert strayed(sides) == []
    assert judge(job([], sides)).culprits == ()


def test_a_rank_that_is_ahead_has_not_strayed() -> None:
    assert strayed(communicator({0: {"AllReduce": 5, "AllGather": 1}, 1: {"AllReduce": 6, "AllGather": 2}, 2: 4})) == []


def test_who_waits_for_whom_is_told_for_each_group() -> None:
    waits = behind([communicator({0: 5, 1: 4}), communicator({1: 3, 2: 2}, "b")])
    assert waits == {0: {1}, 1: {2}, 2: set()}


def test_ranks_of_a_group_get_the_jobs_numbers_by_their_processes() -> None:
    pids = {0: 100, 1: 101, 2: 102, 3: 103}
    group = communicator({0: 5, 1: 4}, first_pid=102)
    assert [one.rank for one in of_job([group], pids, 4)[0].ranks] == [2, 3]
    assert of_job([communicator({0: 5, 1: 4}, first_pid=500)], pids, 4) == []  # another job's
    assert of_job([group], pids | {1: 102}, 4) == []  # of two hosts, on which these processes have the same number


def test_the_whole_jobs_communicator_needs_not_all_hosts() -> None:
    whole = communicator({0: 5, 1: 5, 2: 4, 3: 5})
    assert [one.rank for one in of_job([whole], {0: 100, 1: 101}, 4)[0].ranks] == [0, 1, 2, 3]
    assert of_job([whole], {0: 101, 1: 100}, 4) == []  # its numbers are others than the job's


def said(launched: Mapping[int, int]) -> str:
    ranks = [one.model_dump() for one in communicator(launched).ranks]
    one = {"hash": "a", "size": len(ranks), "ranks": ranks, "missing_ranks": []}
    return json.dumps({"nccl_version": "2.30.7", "communicators": [one]})


def asked(*answers: str) -> Launches:
    with serving(*map(answering, answers)) as address:
        launches = Launches([{"NCCL_RAS_ADDR": address}, {"NCCL_RAS_ADDR": address}, {"NCCL_RAS_ENABLE": "0"}])
        for _ in answers:
            launches.ask()
    return launches


def test_counts_that_move_are_those_of_a_job_that_moves() -> None:
    still = asked(said({0: 5, 1: 4}), said({0: 5, 1: 4}))
    assert ([one.hash for one in still.standing], still.troubles) == (["a"], ())
    moves = asked(said({0: 5, 1: 4}), said({0: 6, 1: 5}))
    assert ([one.hash for one in moves.uneven], moves.standing) == (["a"], [])
    assert asked(said({0: 5, 1: 5}), said({0: 5, 1: 5})).uneven == []


WORDS = """NCCL version 2.27.5 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  MISMATCH
    1         4         2         1         2         8   RUNNING  OK

Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  5 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 2 -- GPU 2 managed by process 102 on node 172.16.64.210
  Rank 3 -- GPU 3 managed by process 103 on node 172.16.64.210
  Rank 7 has launched up to operation 6648 -- GPU 3 managed by process 107 on node 172.16.64.211
  Communicator ranks have different AllGather operation counts
  7 ranks have launched up to operation 12
  Rank 7 has not launched any operations -- GPU 3 managed by process 107 on node 172.16.64.211

"""


def test_what_older_versions_say_in_words_is_read() -> None:
    """The words are those of NCCL 2.24 to 2.28 (rasClientRunComms)."""
    launches = asked(WORDS, WORDS)
    (one,) = launches.standing
    assert (one.hash, one.size, [rank.pid for rank in one.ranks]) == (
        "27a079b828ff1a75",
        8,
        [0, 0, 102, 103, 0, 0, 0, 107],
    )
    launched = [(rank.collective_counts["AllReduce"], rank.collective_counts["AllGather"]) for rank in one.ranks]
    assert launched == [(6650, 12)] * 2 + [(6649, 12)] * 2 + [(6650, 12)] * 3 + [(6648, 0)]
    (own,) = of_job([one], {2: 102, 3: 103}, 8)
    assert behind([own])[2] == {7} and behind([own])[0] == {2, 3, 7}


def test_why_there_are_no_counts_is_said() -> None:
    gone = Launches([{"NCCL_RAS_ADDR": "127.0.0.1:1"}])
    gone.ask()
    assert "nobody listens at 127.0.0.1:1" in gone.troubles[0]
