"""The verdict on a job that hangs, by where its ranks stand: who is named, and when nobody is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclguard.hang.names import Pid
from ncclguard.hang.stacks import RAY_REPORT, Kind, Motion, Place
from ncclguard.hang.verdict import Evidence, Seen, judge
from ncclguard_explain.cause import Cause

REDUCE = Place(Kind.COLLECTIVE, "all_reduce", True, stack=("train.py:2 step", "all_reduce"))
BARRIER = Place(Kind.COLLECTIVE, "barrier", True, stack=("train.py:3 step", "barrier"))
OF_A_GROUP = replace(REDUCE, world=False)
BACKWARD = Place(Kind.BACKWARD, "backward", True, stack=("train.py:4 step", "backward"))
REPORT = Place(Kind.COLLECTIVE, RAY_REPORT, True, stack=("train.py:7 step", "ray.train.report 6"))
SETUP = Place(Kind.SETUP, "init_process_group", True, stack=("train.py:1 main", "init_process_group"))
RECEIVE = Place(Kind.P2P, "recv", True, 2, stack=("train.py:5 step", "recv"))
CALL = Place(Kind.RPC, "rpc_sync", stack=("train.py:11 ask", "rpc_sync"))
ON_DEVICE = Place(Kind.DEVICE, "synchronize", stack=("train.py:6 step",))
SAVE = Place(Kind.FILE, stack=("train.py:9 save",))
SLEEP = Place(Kind.SLEEP, stack=("train.py:8 pause",))
QUEUE = Place(Kind.IDLE, stack=("engine.py:7 run_busy_loop",))
DOWNLOAD = Place(Kind.NETWORK, stack=("train.py:10 download",))
EXIT = Place(Kind.EXIT, stack=("train.py:1 <module>",))


def rank(number: int, place: Place | None = REDUCE, motion: Motion = Motion.STILL, state: str = "S") -> Seen:
    return Seen(number, state, motion, place, "gpu-01", 100 + number)


def job(struck: Seen | None = None, others: Place | None = REDUCE, size: int = 4, **more: object) -> Evidence:
    """Ranks that all wait, but one; without `struck` rank 2 is not there."""
    seen = [rank(number, others) for number in range(size) if number != 2]
    return Evidence(size, [*seen, struck] if struck is not None else seen, seconds=2.5, **more)  # type: ignore[arg-type]


NAMED = [
    (rank(2, SLEEP), REDUCE, Cause.LATE, "high"),
    (rank(2, SLEEP, Motion.WAKING), REDUCE, Cause.LATE, "medium"),
    (rank(2, SLEEP), BACKWARD, Cause.LATE, "high"),
    (rank(2, SLEEP), SETUP, Cause.LATE, "high"),
    (rank(2, SAVE), REDUCE, Cause.LATE, "medium"),
    (rank(2, DOWNLOAD), REDUCE, Cause.LATE, "medium"),
    (rank(2, SAVE), OF_A_GROUP, Cause.LATE, "medium"),
    (rank(2, replace(SLEEP, holds_gil=True)), REDUCE, Cause.STUCK, "high"),
    (rank(2, EXIT), REDUCE, Cause.EXITED, "high"),
    (rank(2, REDUCE, state="T"), REDUCE, Cause.STUCK, "high"),
    (rank(2, None, state="T"), REDUCE, Cause.STUCK, "high"),
    (rank(2, SLEEP), RECEIVE, Cause.LATE, "high"),
    (rank(2, SLEEP), replace(RECEIVE, peer=None), Cause.LATE, "medium"),
    (rank(2, replace(SLEEP, serves=True)), CALL, Cause.LATE, "high"),
    (rank(2, replace(SLEEP, holds_gil=True)), CALL, Cause.STUCK, "high"),
    (rank(2, BARRIER), REDUCE, Cause.DIVERGED, "medium"),
    (rank(2, BARRIER), BACKWARD, Cause.DIVERGED, "medium"),
]


@pytest.mark.parametrize(("struck", "others", "cause", "confidence"), NAMED)
def test_the_rank_that_is_not_where_the_others_wait_is_named(
    struck: Seen, others: Place, cause: Cause, confidence: str
) -> None:
    verdict = judge(job(struck, others))
    assert (verdict.culprits, verdict.cause, verdict.confidence) == ((2,), cause, confidence)


def test_who_joins_a_job_and_has_the_store_is_at_work_and_waits() -> None:
    seen = [rank(0, SETUP, Motion.SPINNING), rank(1, SETUP, Motion.WAKING), rank(2, SLEEP), rank(3, SETUP)]
    verdict = judge(Evidence(4, seen))
    assert (verdict.culprits, verdict.cause) == ((2,), Cause.LATE)


def test_ranks_that_all_ask_for_a_lock_file_do_not_move() -> None:
    """A compilation of torch's extensions that was ended leaves its file behind, and all ask for it for ever."""
    baton = Place(Kind.LOCK, stack=("train.py:6 <module>", "torch/utils/file_baton.py:50 wait"))
    verdict = judge(Evidence(2, [rank(number, baton, Motion.WAKING) for number in range(2)]))
    assert verdict.stands and not verdict.culprits and "lock file" in verdict.summary
    compiling = Place(Kind.CHILD, stack=("train.py:6 <module>", "torch/utils/cpp_extension.py:2500 run_ninja"))
    one_compiles = [rank(0, compiling, Motion.MOVING), rank(1, baton, Motion.WAKING)]
    assert not judge(Evidence(2, one_compiles)).stands


def test_who_waits_in_a_report_of_ray_train_asks_again_and_again() -> None:
    for place, culprits in ((REPORT, (2,)), (BARRIER, ())):
        seen = [rank(number, place, Motion.WAKING) for number in (0, 1, 3)]
        assert judge(Evidence(4, [*seen, rank(2, SLEEP)])).culprits == culprits


GATHER = replace(
    REDUCE, op="all_gather_into_tensor", stack=("torch/distributed/fsdp/_fully_shard.py:2 unshard", "all_gather")
)


@pytest.mark.parametrize("others", [BACKWARD, GATHER])
def test_who_waits_for_a_message_within_a_step_of_training_is_named(others: Place) -> None:
    """Nobody serves in the middle of a step, but may have been told nothing by a controller, or wait with a limit."""
    verdict = judge(job(rank(2, QUEUE), others))
    assert (verdict.culprits, verdict.cause, verdict.confidence) == ((2,), Cause.LATE, "medium")
    told = replace(QUEUE, stack=("ray/_private/worker.py:1069 main_loop",))
    for struck in (rank(2, QUEUE, Motion.WAKING), rank(2, told)):
        assert judge(job(struck, others)).culprits == ()


def of(*members: int, place: Place = OF_A_GROUP) -> dict[str, object]:
    """The place in a call of a group, with its members."""
    return {"place": replace(place, group=(0, len(members))), "members": frozenset(members)}


CHAINS = {
    "a stage that sleeps, and one ahead of it that waits for a file": Evidence(
        4, [rank(3, RECEIVE), rank(2, SLEEP), rank(1, SAVE), rank(0, SAVE)]
    ),
    "a stage that sleeps, and others that work": Evidence(
        4, [rank(3, RECEIVE), rank(2, SLEEP), rank(1, SAVE, Motion.MOVING), rank(0, SAVE, Motion.MOVING)]
    ),
    "a chain of stages": Evidence(4, [rank(0, replace(RECEIVE, peer=3)), rank(3, RECEIVE), rank(2, SLEEP), rank(1, QUEUE)]),
    "its group, while another one goes on": Evidence(
        4, [replace(rank(3), **of(2, 3)), rank(2, SLEEP), rank(0, OF_A_GROUP, Motion.MOVING), rank(1, QUEUE)]
    ),
    "a chain over two groups": Evidence(
        4, [replace(rank(0), **of(0, 1)), replace(rank(1), **of(1, 2)), rank(2, SLEEP), rank(3, SAVE, Motion.MOVING)]
    ),
    "an RPC from within an RPC": Evidence(
        4, [rank(0, CALL), rank(1, replace(CALL, serves=True)), rank(2, replace(SLEEP, serves=True)), rank(3, QUEUE)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHAINS)
def test_the_rank_at_the_end_of_what_others_wait_for_is_named(case: str) -> None:
    verdict = judge(CHAINS[case])
    assert (verdict.culprits, verdict.cause) == ((2,), Cause.LATE), verdict


def test_ranks_that_wait_for_each_other_are_shown() -> None:
    receives = rank(0, replace(RECEIVE, peer=1))
    for awaited, others in (
        ((0, 1), [rank(1, replace(RECEIVE, peer=0)), rank(2, SAVE, Motion.MOVING)]),
        ((1,), [rank(1, BARRIER), rank(2, BARRIER), rank(3, BARRIER)]),
    ):
        verdict = judge(Evidence(1 + len(others), [receives, *others]))
        assert (verdict.culprits, verdict.cause, verdict.awaited) == ((), Cause.DIVERGED, awaited), verdict
        assert "rank 0 waits in recv for rank 1" in verdict.reason


ENDS = [(-9, Cause.LOST), (-11, Cause.LOST), (1, Cause.FAILED), (0, Cause.EXITED), (None, Cause.LOST)]


@pytest.mark.parametrize(("code", "cause"), ENDS)
def test_the_rank_that_has_ended_is_named(code: int | None, cause: Cause) -> None:
    verdict = judge(job(ended={2: code}))
    assert (verdict.culprits, verdict.cause) == ((2,), cause)


VICTIMS = {
    "by torch's watchdog": {2: -9, 3: -6},
    "by an exception in C++": {2: -11, 0: -6, 3: -6},
    "by the launcher": {2: -11, 0: -15, 3: -9},
    "by a broken pipe": {2: -9, 3: -13},
}


@pytest.mark.parametrize("case", VICTIMS)
def test_those_that_ended_because_of_a_killed_rank_are_not_named(case: str) -> None:
    codes = VICTIMS[case]
    verdict = judge(Evidence(4, [rank(n) for n in range(4) if n not in codes], codes))
    assert (verdict.culprits, verdict.cause) == ((2,), Cause.LOST)


def test_a_rank_that_was_killed_is_named_and_not_those_that_raised_because_of_it() -> None:
    verdict = judge(Evidence(4, [rank(0), rank(1, EXIT)], {2: -9, 3: 1}))
    assert (verdict.culprits, verdict.cause) == ((2,), Cause.LOST)


NOBODY = {
    "a rank that works": job(rank(2, SAVE, Motion.MOVING)),
    "a rank of which no stack could be read": job(rank(2, None)),
    "a rank whose second stack is missing": job(rank(2, SLEEP, Motion.UNKNOWN)),
    "all wait in the same": job(rank(2)),
    "all sleep": job(rank(2, SLEEP), SLEEP),
    "a job that moves": Evidence(4, [rank(n, REDUCE, Motion.WAKING) for n in range(4)]),
    "a job whose others move": Evidence(4, [rank(2, SLEEP), *(rank(n, REDUCE, Motion.MOVING) for n in (0, 1, 3))]),
    "one that sleeps because another works": Evidence(4, [rank(0), rank(1), rank(2, SLEEP), rank(3, SAVE, Motion.MOVING)]),
    "two outside, in different places": Evidence(4, [rank(0), rank(1), rank(2, SLEEP), rank(3, SAVE)]),
    "two outside of a group of unknown members": Evidence(
        4, [rank(0, OF_A_GROUP), rank(1, OF_A_GROUP), rank(2, SLEEP), rank(3, SLEEP)]
    ),
    "most look again and again for what one is to do": Evidence(
        3, [rank(0), rank(1, SLEEP, Motion.WAKING), rank(2, SLEEP, Motion.WAKING)]
    ),
    "two sides": Evidence(4, [rank(0), rank(1), rank(2, BARRIER), rank(3, BARRIER)]),
    "a job of two": Evidence(2, [rank(0), rank(1, BARRIER)]),
    "alone in a collective of some group": job(rank(2, replace(BARRIER, world=False))),
    "a stage that sends while the others reduce": job(rank(2, Place(Kind.P2P, "send", True, 3, stack=("p.py:1 f", "send")))),
    "one outside of a group that has ranks which were not seen": Evidence(
        8, [rank(0, OF_A_GROUP), rank(1, OF_A_GROUP), rank(2, SLEEP)]
    ),
    "ranks that were not seen": Evidence(8, [rank(n) for n in range(4)]),
    "another collective, and ranks that were not seen": job(rank(2, BARRIER)).__class__(
        8, [rank(0), rank(1), rank(2, BARRIER), rank(3)]
    ),
    "all stopped": Evidence(2, [rank(0, state="T"), rank(1, state="T")]),
    "two ended by exit codes": Evidence(4, [rank(0), rank(1)], {2: 1, 3: 1}),
    "the normal end": Evidence(4, [rank(n, EXIT) for n in (0, 1, 3)], {2: 0}),
    "one ended and the others go on": Evidence(4, [rank(n, SAVE, Motion.MOVING) for n in (0, 1, 3)], {2: -9}),
    "one aborted, as torch's watchdog does": job(ended={2: -6}),
    "aborted because of one that sleeps": Evidence(4, [rank(2, SLEEP), rank(0)], {1: -6, 3: -6}),
    "raised because of one that sleeps": Evidence(4, [rank(0), rank(1), rank(2, SLEEP)], {3: 1}),
    "killed by a launcher that ends the job": Evidence(4, [rank(0)], {1: -15, 2: -9, 3: -9}),
    "raised, perhaps because of a rank on another host": Evidence(8, [rank(0), rank(1), rank(2)], {3: 1}),
    "no process, perhaps because of a rank on another host": Evidence(8, [rank(0), rank(1), rank(2)], {3: None}),
    "an engine without requests": job(rank(2, QUEUE)),
    "RPC servers of which none is seen to answer": Evidence(3, [rank(0, CALL), rank(1, QUEUE), rank(2, QUEUE)]),
    "a group of its own that another rank is awaited in": Evidence(
        4, [replace(rank(0), **of(0, 1)), rank(1, SAVE, Motion.MOVING), rank(2, SLEEP), rank(3, SLEEP)]
    ),
    "DDP's reduction, perhaps over the ranks of a group": Evidence(
        4, [rank(0, BACKWARD), rank(1, replace(OF_A_GROUP, group=(0, 2))), rank(2, SLEEP), rank(3, SLEEP)]
    ),
    "an engine that asks for requests again and again": job(rank(2, QUEUE, Motion.WAKING)),
    "a rank whose device may compute": job(rank(2, ON_DEVICE)),
    "two engines, and one that sleeps": Evidence(4, [rank(0), rank(1, QUEUE), rank(2, QUEUE), rank(3, SLEEP)]),
    "an idle engine beside devices that spin": Evidence(
        4, [rank(2, QUEUE), *(rank(n, ON_DEVICE, Motion.SPINNING) for n in (0, 1, 3))]
    ),
    "all ended": Evidence(4, [], dict.fromkeys(range(4))),
}  # fmt: skip


@pytest.mark.parametrize("case", NOBODY)
def test_nobody_is_named_without_proof(case: str) -> None:
    verdict = judge(NOBODY[case])
    assert verdict.culprits == (), verdict
    assert verdict.summary


@pytest.mark.parametrize(("ended", "said"), [({2: -6}, "Rank 2 has ended"), ({2: 1, 3: 1}, "Ranks 2-3 have ended")])
def test_those_that_have_ended_are_told_as_one_or_several(ended: dict[int, int], said: str) -> None:
    assert judge(Evidence(4, [rank(0), rank(1)], dict(ended))).summary.startswith(said)


def spinning(place: Place, struck: Seen) -> Evidence:
    """All but one compute in one call, as the host does while it waits for NCCL's kernels."""
    return Evidence(4, [struck, *(rank(n, place, Motion.SPINNING) for n in (0, 1, 3))], seconds=2.5)


@pytest.mark.parametrize("place", [ON_DEVICE, REDUCE, BACKWARD])
def test_a_rank_that_has_not_run_at_all_is_named_while_the_others_spin(place: Place) -> None:
    verdict = judge(spinning(place, rank(2, SLEEP)))
    assert (verdict.culprits, verdict.cause, verdict.confidence) == ((2,), Cause.LATE, "medium")


@pytest.mark.parametrize(
    "struck", [rank(2, SLEEP, Motion.WAKING), rank(2, SAVE, Motion.MOVING), rank(2, ON_DEVICE, Motion.SPINNING)]
)
def test_nobody_is_named_while_devices_may_compute(struck: Seen) -> None:
    verdict = judge(spinning(ON_DEVICE, struck))
    assert (verdict.culprits, verdict.stands) == ((), False)


def test_of_a_call_in_torchs_own_code_the_programs_line_is_told() -> None:
    inner = replace(REDUCE, stack=("train.py:2 step", "torch/distributed/fsdp/f.py:1 unshard", "all_gather_single"))
    assert "at train.py:2 step -> all_gather_single;" in judge(job(rank(2, SLEEP), inner)).reason


def test_of_a_wait_in_libraries_the_programs_line_is_told_too() -> None:
    inner = Place(
        Kind.LOADER, stack=("train.py:67 main", "torch/utils/data/dataloader.py:1 f", "selectors.py:415 select")
    )
    reason = judge(job(rank(2, inner))).reason
    assert "rank 2 waiting for a data loader, at train.py:67 main -> selectors.py:415 select" in reason


def test_of_other_hosts_ranks_that_were_not_seen_less_is_said() -> None:
    for place in (SLEEP, replace(SLEEP, holds_gil=True), EXIT):
        verdict = judge(Evidence(8, [rank(0), rank(1), rank(2, place)]))
        assert (verdict.culprits, verdict.confidence) == ((2,), "medium")


def test_processes_that_tell_no_rank_are_told_by_their_numbers() -> None:
    seen = [replace(rank(number), rank=Pid(4711 + number)) for number in range(3)]
    verdict = judge(Evidence(3, [*seen[:2], replace(seen[2], place=SLEEP)], counted=True))
    assert verdict.culprits == (4713,)
    assert verdict.summary == "Process 4713 held up the job: late."
    assert "processes 4711, 4712 at train.py:2 step" in verdict.reason


def test_a_job_on_gloo_is_not_sent_to_nccl() -> None:
    for gloo in (True, False):
        verdict = judge(Evidence(4, [replace(rank(number), gloo=gloo) for number in range(4)]))
        assert ("NCCL" in verdict.next_step) is not gloo


def test_an_idle_server_is_no_job_that_stands() -> None:
    verdict = judge(job(rank(2, QUEUE)))
    assert (verdict.awaited, verdict.stands) == ((2,), False)
    assert "requests" in verdict.summary


def test_a_rank_at_work_is_awaited() -> None:
    verdict = judge(job(rank(2, SAVE, Motion.MOVING)))
    assert verdict.awaited == (2,)
    assert "at work" in verdict.summary


def test_a_rank_that_stands_still_is_shown_beside_those_at_work() -> None:
    verdict = judge(Evidence(4, [rank(0, SLEEP, Motion.MOVING), rank(1), rank(2, SLEEP), rank(3)]))
    assert (verdict.culprits, verdict.awaited) == ((), (0, 2))
    assert "at work" in verdict.summary and "rank 2, where nothing moves" in verdict.summary


def test_ranks_of_other_hosts_are_asked_for() -> None:
    verdict = judge(Evidence(8, [rank(n) for n in range(4)]))
    assert verdict.awaited == (4, 5, 6, 7)
    assert "--collect" in verdict.next_step


def test_without_stacks_a_rank_that_was_killed_is_still_named() -> None:
    verdict = judge(Evidence(4, [rank(n, None) for n in (0, 1, 3)], {2: -9}))
    assert (verdict.culprits, verdict.cause, verdict.confidence) == ((2,), Cause.LOST, "medium")


@pytest.mark.parametrize(("size", "said"), [(5, "rank 4 was not seen"), (6, "ranks 4-5 were not seen")])
def test_one_rank_or_several_were_not_seen(size: int, said: str) -> None:
    assert said in str(judge(Evidence(size, [rank(n) for n in range(4)])).summary)
