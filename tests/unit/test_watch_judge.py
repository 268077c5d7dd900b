"""Who is blamed for a raw collective that stands still: the rules, without processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ncclguard.coordination.incidents import ISSUERS, says_nothing_new
from ncclguard.incident.model import Incident
from ncclguard.outcome import Cause
from ncclguard.protocol import codec
from ncclguard.protocol.decision import INTERRUPTED, Departure, Issued, Report, Trouble, TroubleKind, Waiting, Watched
from ncclguard.watch.judge import (
    BROKEN,
    COMPARES,
    CONNECTS_WITHIN,
    MESSAGE,
    STARTED,
    Finding,
    analyse,
    expired,
    has_issued,
    is_consequence,
    verdict_of,
)

WORLD = (0, 1, 2, 3)


def said(
    rank: int, *waits: tuple[str, tuple[int, ...], int, str], done: Mapping[str, int] | None = None, **facts: Any
) -> Report:
    """A rank's report: channel, members, number and text of what it waits in; `done` up to where it has ended."""
    items = tuple(
        Waiting(c, members, s, hash(text) | 1, f"{text}(group {c}, number {s})", 5.0) for c, members, s, text in waits
    )
    numbers = {c: s - 1 for c, _, s, _ in waits} | dict(done or {})
    return Report(rank=rank, generation=0, watched=Watched(waits=items, done=numbers), **facts)


def world(sequence: int, text: str = "all_reduce") -> tuple[str, tuple[int, ...], int, str]:
    return ("0:gloo", WORLD, sequence, text)


def issued(report: Report, sequence: int, text: str) -> Report:
    """The report of a rank for which this collective has ended already."""
    recent = (
        Issued("0:gloo", sequence - 1, hash("all_reduce") | 1, "all_reduce"),
        Issued("0:gloo", sequence, hash(text) | 1, text),
    )
    assert report.watched is not None
    return replace(report, watched=replace(report.watched, recent=recent))


def with_waits(report: Report, sequence: int, text: str) -> Report:
    """The report of a rank that waits in this collective of the world too."""
    waits = said(report.rank, world(sequence, text)).watched
    assert waits is not None and report.watched is not None
    return replace(report, watched=replace(report.watched, waits=waits.waits))


def judged(*reports: Report, departed: Mapping[int, Departure] | None = None, **facts: Any) -> Finding:
    return analyse({r.rank: r for r in reports}, departed or {}, facts.get("silent", {}), facts.get("overdue", True))


def test_a_rank_that_has_not_come_is_late() -> None:
    found = judged(*(said(r, world(7)) for r in (0, 1, 3)), said(2, done={"0:gloo": 6}))
    assert (found.causes, found.channel, found.sequence) == ({2: Cause.LATE}, "0:gloo", 7)


def connecting(rank: int, age: float, sequence: int = 1) -> Report:
    waits = (Waiting("0:nccl", WORLD, sequence, 0, "collective(it is connecting still)", age),)
    return Report(rank=rank, generation=0, watched=Watched(waits=waits, done={"0:nccl": sequence - 1}))


def test_ranks_that_connect_have_time_for_it_once_all_have_come() -> None:
    ages = (30.0, 31.0, 29.0)
    assert judged(*(connecting(r, age) for r, age in enumerate((*ages, 30.0)))).channel == ""  # go on waiting
    absent = Report(rank=3, generation=0, watched=Watched(done={"0:nccl": 0}))
    assert judged(*(connecting(r, age) for r, age in enumerate(ages)), absent).causes == {3: Cause.LATE}
    connected = [said(r, ("0:nccl", WORLD, 1, "all_reduce")) for r in (1, 2, 3)]
    assert judged(connecting(0, 30.0), *connected).channel == ""
    assert judged(connecting(0, CONNECTS_WITHIN + 1.0), *connected).cause is Cause.NETWORK
    assert judged(*(connecting(r, CONNECTS_WITHIN + 1.0) for r in WORLD)).cause is Cause.NETWORK
    assert judged(*(connecting(r, 30.0, sequence=2) for r in WORLD)).cause is Cause.NETWORK


def test_where_the_last_rank_comes_as_the_limit_passes_nobody_waits_in_vain_yet() -> None:
    def waiting(rank: int, age: float, limit: float = 3.0, **facts: Any) -> Report:
        report = said(rank, world(7), **facts)
        assert report.watched is not None
        waits = (replace(report.watched.waits[0], age=age),)
        return replace(report, watched=replace(report.watched, waits=waits, limit=limit))

    first = [waiting(r, 3.02) for r in (0, 1, 3)]
    assert judged(*first, waiting(2, 0.001)).channel == ""
    assert judged(*first, waiting(2, 1.2)).cause is Cause.NETWORK
    short = [waiting(r, 0.5, limit=0.5) for r in (0, 1, 3)]
    assert judged(*short, waiting(2, 0.45, limit=0.5)).cause is Cause.NETWORK
    by_torch = [waiting(r, 3.02, limit=60.0) for r in (0, 1, 3)]
    assert judged(*by_torch, waiting(2, 0.001, limit=60.0)).cause is Cause.NETWORK
    broke = waiting(3, 3.02, trouble=Trouble(TroubleKind.TRANSPORT, "connection reset"))
    assert judged(*first[:2], broke, waiting(2, 0.001)).cause is Cause.NETWORK


def begun(report: Report, *channels: str) -> Report:
    """The report of a rank whose device has come to what it waits in, in these channels."""
    return replace(report, details={STARTED: list(channels)})


def test_a_rank_whose_device_has_not_come_to_what_it_has_issued_is_late() -> None:
    reports = [begun(said(r, world(7)), "0:gloo") for r in (0, 1, 3)]
    assert judged(*reports, begun(said(2, world(7)))).causes == {2: Cause.LATE}
    assert judged(*reports, begun(said(2, world(7))), overdue=False).causes == {}


def waiting_in_a_message(report: Report) -> Report:
    return replace(report, details={**report.details, MESSAGE: "recv 3<-2(group 0)"})


def test_a_stage_whose_device_waits_for_the_message_of_a_late_one_is_not_late() -> None:
    """All hosts are ahead; the device of rank 2 hangs, and that of rank 3 has not come past its receive from it."""
    reports = [begun(said(r, world(7)), "0:gloo") for r in (0, 1)]
    behind = [begun(said(2, world(7))), waiting_in_a_message(begun(said(3, world(7))))]
    assert judged(*reports, *behind).causes == {2: Cause.LATE}


def test_a_stage_whose_host_waits_for_the_message_of_a_late_one_is_not_late() -> None:
    idle = said(2, done={"0:gloo": 6}), waiting_in_a_message(said(3, done={"0:gloo": 6}))
    assert judged(*(said(r, world(7)) for r in (0, 1)), *idle).causes == {2: Cause.LATE}


def test_where_every_rank_that_is_missing_waits_for_a_message_nobody_is_named() -> None:
    found = judged(*(said(r, world(7)) for r in (0, 1, 2)), waiting_in_a_message(said(3, done={"0:gloo": 6})))
    assert found.causes == {}


def test_a_rank_whose_device_waits_in_another_group_passes_the_delay_on() -> None:
    other = ("b:gloo", (2, 3), 4, "all_gather")
    reports = [begun(said(r, world(7)), "0:gloo") for r in (0, 1)]
    found = judged(*reports, begun(said(2, world(7), other), "b:gloo"), begun(said(3, world(7), other)))
    assert found.causes == {3: Cause.LATE}


def test_where_starts_are_not_recorded_nobody_is_late_that_has_come() -> None:
    assert judged(*(begun(said(r, world(7))) for r in WORLD)).causes == {}


def test_before_the_limit_nobody_is_late_or_silent() -> None:
    reports = [said(r, world(7)) for r in (0, 1)]
    found = judged(*reports, said(2, done={"0:gloo": 6}), silent={3: Cause.STUCK}, overdue=False)
    assert found.causes == {}


def test_a_silent_rank_that_runs_is_not_named_and_nobody_is_in_its_place() -> None:
    found = judged(*(said(r, world(7)) for r in (0, 1, 2)), silent={3: None})
    assert (found.causes, found.cause) == ({}, Cause.UNKNOWN)
    assert judged(*(said(r, world(7)) for r in (0, 1)), silent={2: Cause.STUCK, 3: None}).causes == {2: Cause.STUCK}


def test_a_rank_that_has_ended_it_already_is_not_behind() -> None:
    """A broadcast ends at its source before the others have received it; the source may be in the next one already."""
    found = judged(
        said(0, world(8)), said(1, world(7, "broadcast")), said(2, done={"0:gloo": 6}), said(3, world(7, "broadcast"))
    )
    assert found.causes == {2: Cause.LATE}
    assert found.sequence == 7


def test_who_only_passes_the_delay_on_is_not_named() -> None:
    """0 waits for 1 in one group, 1 for 2 in another: 2 it is."""
    left, right = ("a:nccl", (0, 1), 3, "all_gather"), ("b:nccl", (1, 2), 9, "all_reduce")
    found = judged(said(0, left), said(1, right, done={"a:nccl": 2}), said(2, done={"b:nccl": 8}), said(3))
    assert (found.causes, found.channel) == ({2: Cause.LATE}, "b:nccl")


def aged(report: Report, **ages: float) -> Report:
    """The report with these ages of what it waits in, by the name of its group."""
    assert report.watched is not None
    waits = tuple(replace(w, age=ages.get(w.channel.partition(":")[0], w.age)) for w in report.watched.waits)
    return replace(report, watched=replace(report.watched, waits=waits))


SIDE, STEPS = ("a:gloo", (0, 1, 2), 2, "barrier"), ("b:gloo", WORLD, 40, "all_reduce")


def test_who_is_at_work_in_another_thread_meanwhile_does_not_wait_there() -> None:
    """Group a stands still for 1, whose main thread trains in group b, a moment ahead of 3 and of 2, in neither."""
    found = judged(
        aged(said(0, SIDE, done={"b:gloo": 39})),
        aged(said(1, STEPS, done={"a:gloo": 1}, details={ISSUERS: {"a:gloo": "checkpoints"}}), b=0.05),
        aged(said(2, SIDE, STEPS), b=0.02),
        said(3, done={"b:gloo": 39}),
    )
    assert (found.causes, found.channel, found.sides) == ({1: Cause.LATE}, "a:gloo", ())
    assert found.reports[1].elsewhere == ""


@pytest.mark.parametrize(
    ("age", "silent", "causes"),
    [
        (1.5, {}, {3: Cause.LATE}),
        (0.9, {}, {}),  # it may have waited there many times before, as behind a slow stage of a pipeline
        (0.9, {3: Cause.STUCK}, {3: Cause.STUCK}),
    ],
)
def test_who_waits_in_another_group_with_the_same_thread_only_passes_the_delay_on(
    age: float, silent: dict[int, Cause | None], causes: dict[int, Cause]
) -> None:
    """Rank 1 is never named for it, nor rank 3 for having been away for a moment."""
    ranks = [
        said(0, SIDE, done={"b:gloo": 39}),
        aged(said(1, STEPS, done={"a:gloo": 1}), b=age),
        said(2, SIDE, done={"b:gloo": 40}),
        said(3, done={"b:gloo": 39}),
    ]
    found = judged(*[one for one in ranks if one.rank not in silent], silent=silent)
    assert (found.causes, found.sides) == (causes, ())
    assert found.cause is Cause.UNKNOWN or causes


def test_a_cycle_shows_both_sides_and_names_nobody() -> None:
    left, right = ("a:nccl", (0, 1), 3, "all_gather"), ("b:nccl", (0, 1), 9, "all_reduce")
    found = judged(said(0, left, done={"b:nccl": 8}), said(1, right, done={"a:nccl": 2}))
    assert (found.causes, found.cause) == ({}, Cause.DIVERGED)
    assert sorted(ranks for _, ranks in found.sides) == [(0,), (1,)]


def test_another_collective_at_the_same_number() -> None:
    found = judged(*(said(r, world(7)) for r in (0, 1, 3)), said(2, world(7, "barrier")), overdue=False)
    assert found.causes == {2: Cause.DIVERGED}


def test_another_collective_that_has_ended_with_rubbish() -> None:
    """gloo does not compare what it carries: a broadcast may take a piece of another operation for its own, and return."""
    ended = issued(said(2, done={"0:gloo": 7}), 7, "broadcast")
    found = judged(*(said(r, world(7)) for r in (0, 1, 3)), ended, overdue=False)
    assert found.causes == {2: Cause.DIVERGED}


def test_another_collective_after_which_its_rank_waits_in_a_later_one() -> None:
    later = issued(said(2, world(9)), 7, "broadcast")
    found = judged(*(said(r, world(7)) for r in (0, 1, 3)), later, overdue=False)
    assert found.causes == {2: Cause.DIVERGED}
    assert found.sequence == 7


def test_a_rank_that_a_mismatch_killed_is_not_blamed() -> None:
    """gloo aborts a rank that receives more than it expects. What it had called is unknown, and counts against the majority."""
    lost = {1: Departure(1, Cause.LOST, "its process has ended")}
    odd = said(2, world(7, "barrier"))
    two = judged(*(said(r, world(7)) for r in (0, 3)), odd, departed=lost, overdue=False)
    assert (two.causes, two.cause) == ({}, Cause.DIVERGED)
    assert [ranks for _, ranks in two.sides] == [(0, 3), (2,)]
    five = ("0:gloo", (*WORLD, 4), 7, "all_reduce")
    odd = said(2, (*five[:3], "barrier"))
    three = judged(*(said(r, five) for r in (0, 3, 4)), odd, departed=lost, overdue=False)
    assert three.causes == {2: Cause.DIVERGED}
    last_words = Watched(recent=(Issued("0:gloo", 7, hash("all_reduce") | 1, "all_reduce"),))
    told = {1: Departure(1, Cause.LOST, "was sent SIGTERM", watched=last_words)}
    assert judged(*(said(r, world(7)) for r in (0, 3)), odd, departed=told, overdue=False).causes == {2: Cause.DIVERGED}


def test_a_killed_rank_is_named_where_all_others_called_the_same() -> None:
    lost = {2: Departure(2, Cause.LOST, "its process has ended")}
    assert judged(*(said(r, world(7)) for r in (0, 1, 3)), departed=lost, overdue=False).causes == {2: Cause.LOST}


def test_all_have_come() -> None:
    found = judged(*(said(r, world(7)) for r in WORLD))
    assert (found.causes, found.cause) == ({}, Cause.NETWORK)


def test_what_broke_before_all_had_come_is_no_fault_of_the_network() -> None:
    found = judged(*(said(r, world(7)) for r in (0, 1, 3)), said(2, done={"0:gloo": 6}), overdue=False)
    assert (found.causes, found.cause) == ({}, Cause.UNKNOWN)


def test_the_first_to_die_is_named_and_not_those_that_its_death_ended() -> None:
    broken = "RuntimeError at train.py:3 in step: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    departed = {
        1: Departure(1, Cause.FAILED, broken),
        2: Departure(2, Cause.LOST, "its process has ended"),
        3: Departure(3, Cause.LOST, "was sent SIGTERM", terminated=True),
    }
    assert judged(said(0, world(7)), departed=departed, overdue=False).causes == {2: Cause.LOST}


@pytest.mark.parametrize("overdue", [False, True])
def test_a_rank_that_its_launcher_ended_is_not_named_while_another_one_gives_no_sign_of_life(overdue: bool) -> None:
    """The silent rank was killed before it had told the others of itself, and the launcher then ended rank 0."""
    ended = {0: Departure(0, Cause.LOST, "was sent SIGTERM", terminated=True)}
    silent = {1: Cause.UNKNOWN}
    found = judged(said(0, world(7)), departed=ended, silent=silent, overdue=overdue)
    assert found.causes == ({1: Cause.UNKNOWN} if overdue else {})
    assert found.cause is Cause.UNKNOWN or overdue
    assert judged(said(0, world(7)), said(1, world(7)), departed=ended, overdue=overdue).causes == {0: Cause.LOST}


def test_an_exception_of_its_own_comes_before_those_who_left() -> None:
    departed = {2: Departure(2, Cause.FAILED, "ValueError: boom"), 3: Departure(3, Cause.EXITED, "ended its program")}
    assert judged(said(0, world(7)), departed=departed, overdue=False).causes == {2: Cause.FAILED}


def left(rank: int, **issued: int) -> dict[int, Departure]:
    """It ended its program after it had issued so many in the world and in group b."""
    numbers = {{"world": "0:gloo"}.get(name, f"{name}:gloo"): number for name, number in issued.items()}
    return {rank: Departure(rank, Cause.EXITED, "ended its program", watched=Watched(issued=numbers))}


def test_a_rank_that_left_before_it_issued_what_is_awaited_is_named() -> None:
    waits = [said(r, world(7)) for r in (0, 1, 3)]
    assert judged(*waits, departed=left(2, world=6), overdue=False).causes == {2: Cause.EXITED}


def test_one_that_left_after_that_is_not_while_somebody_else_is_late() -> None:
    """It did its part and may go; who is awaited is rank 3."""
    waits = [said(r, world(7)) for r in (0, 1)]
    late = said(3, done={"0:gloo": 6})
    assert judged(*waits, late, departed=left(2, world=7)).causes == {3: Cause.LATE}


def test_it_is_named_when_nobody_else_can_be() -> None:
    """All have come, and what it had issued died with its process."""
    waits = [said(r, world(7)) for r in (0, 1, 3)]
    found = judged(*waits, departed=left(2, world=9), overdue=False)
    assert (found.causes, found.channel) == ({2: Cause.EXITED}, "0:gloo")


def test_what_it_issued_counts_by_group() -> None:
    waits = [said(r, world(7)) for r in (0, 1)]
    other = said(3, ("b:gloo", (2, 3), 4, "all_gather"), done={"0:gloo": 6})
    assert judged(*waits, other, departed=left(2, world=7, b=3), overdue=False).causes == {2: Cause.EXITED}
    departure = left(2, world=7, b=3)[2]
    assert has_issued(departure, {"0:gloo": 7})
    assert not has_issued(departure, {"0:gloo": 7, "b:gloo": 4})
    assert not has_issued(departure, {"c:gloo": 1})
    assert not has_issued(Departure(2, Cause.EXITED, "ended its program"), {"0:gloo": 1})


def test_the_limit_is_the_callers_also_where_nobody_is_to_be_waited_for() -> None:
    """A rank that saw its collective break, or a peer gone, reports no budget: that is about answers, not about the limit."""
    report = said(0, world(7), budget=0.0)
    assert report.watched is not None
    dead = {2: Departure(2, Cause.LOST, "killed")}
    found = judged(replace(report, watched=replace(report.watched, limit=60.0)), departed=dead).reports[0]
    assert (found.age, found.budget) == (5.0, 55.0)
    assert judged(report, departed=dead).reports[0].budget is None


def test_a_rank_that_left_after_the_work_is_nobodys_business() -> None:
    found = judged(said(0), said(1), departed={2: Departure(2, Cause.EXITED, "ended its program")}, overdue=False)
    verdict = verdict_of(found, 0, WORLD, departed={}, expired=False, coordinator=0)
    assert (found.causes, verdict.cause) == ({}, None)


def test_a_rank_without_a_recorder_is_not_called_late() -> None:
    found = judged(*(said(r, world(7)) for r in (0, 1, 3)), Report(rank=2, generation=0))
    assert found.causes == {2: Cause.UNKNOWN}


def test_only_a_deadline_holds_absence_against_a_rank() -> None:
    report = said(0, world(7))
    assert not expired({0: replace(report, trouble=Trouble(TroubleKind.TRANSPORT))})
    assert expired({0: replace(report, trouble=Trouble(TroubleKind.DEADLINE))})


def test_what_counts_as_a_consequence() -> None:
    assert is_consequence(
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    )
    nccl2 = "RuntimeError: NCCL Broadcast failed in all_gather: remote process exited or there was a network error"
    assert is_consequence(f"{nccl2} \nNCCL Last Error: the communicator has an error already")
    assert is_consequence("DistBackendError: Watchdog caught collective operation timeout: NCCL operation timed out")
    assert is_consequence("RuntimeError: NCCL communicator was aborted after a previous error")
    assert is_consequence(f"MyError: step 3 {BROKEN}")
    assert not is_consequence("ValueError at nccl_train.py:3 in gloo_step: boom")


def test_what_a_rank_says_of_torchs_collectives_reaches_the_others_as_it_was() -> None:
    """Through the store's JSON, in a report and in the departure of a rank."""
    watched = Watched(
        waits=(Waiting("0:nccl", (0, 1, 2, 5), 7, 3, "all_reduce()", 1.5, broken=True),), done={"0:nccl": 6},
        issued={"0:nccl": 7}, recent=(Issued("0:nccl", 6, 2, "broadcast()"),), limit=60.0,
    )  # fmt: skip
    report = Report(rank=1, generation=2, watched=watched)
    assert codec.loads_report(codec.dumps(report)) == report
    left = Departure(1, Cause.EXITED, "ended its program", watched=watched)
    assert codec.loads_departure(codec.dumps_departure(left, {}, 0)) == (left, {})
    assert codec.loads_report(codec.dumps(Report(rank=1, generation=2))).watched is None


def test_what_breaks_after_its_incident_and_is_not_understood_is_no_second_one() -> None:
    """A rank that gloo kept waiting raises when the others have ended: the first incident says why."""
    first = Incident(
        id="0-2.0", op="all_reduce", op_id="0:gloo/2", group="0:gloo", generation=0, cause=Cause.DIVERGED, culprits=(),
        deadline_expired=False, agreed=True, attempts=1, participants=(0, 1, 2, 3), summary="diverged", advice="compare",
    )  # fmt: skip
    broke = first.model_copy(update={"id": "0-2.1", "generation": 1, "cause": Cause.UNKNOWN})
    assert says_nothing_new(broke, first)
    assert says_nothing_new(broke.model_copy(update={"cause": Cause.NETWORK}), first), "an abort broke it elsewhere"
    assert says_nothing_new(first.model_copy(update={"generation": 1}), first)
    assert not says_nothing_new(broke.model_copy(update={"op_id": "0:gloo/3"}), first)
    assert not says_nothing_new(broke.model_copy(update={"cause": Cause.LOST, "culprits": (1,)}), first)
    assert not says_nothing_new(broke.model_copy(update={"culprits": (1,)}), first)


def test_where_all_ranks_were_sent_sigterm_nobody_is_named_for_it() -> None:
    """A scheduler ends the job: what broke thereby is no fault of the network either."""
    ended = {rank: Departure(rank, Cause.LOST, "was sent SIGTERM", terminated=True) for rank in WORLD}
    broke = [said(rank, world(7), trouble=Trouble(TroubleKind.TRANSPORT, BROKEN)) for rank in WORLD]
    found = judged(*broke, departed=ended, overdue=False)
    assert (found.causes, found.cause) == ({}, Cause.UNKNOWN)
    del ended[0]
    assert set(judged(*broke, departed=ended, overdue=False).causes) == {1, 2, 3}
    late = [*broke[:3], said(3, done={"0:gloo": 6})]
    assert judged(*late, departed=ended | {0: ended[1]}, overdue=True).causes == {3: Cause.LATE}


def test_ctrl_c_on_all_ranks_is_nobodys_fault_and_on_one_it_is_that_ranks() -> None:
    """The rank that was not in a collective raises first; the others' main threads sit in C++, but have the signal."""
    key = {1: Departure(1, Cause.FAILED, "KeyboardInterrupt at train.py:82 in main", watched=Watched())}
    waiting = [said(rank, world(7), details={INTERRUPTED: True}) for rank in (0, 2, 3)]
    found = judged(*waiting, departed=key, overdue=False)
    assert (found.causes, found.cause) == ({}, Cause.UNKNOWN)
    alone = [said(rank, world(7)) for rank in (0, 2, 3)]
    assert judged(*alone, departed=key, overdue=False).causes == {1: Cause.FAILED}
    raised = {2: Departure(2, Cause.FAILED, "ValueError: bad batch")}
    assert judged(*waiting[::2], departed=key | raised, overdue=False).causes == {2: Cause.FAILED}


def test_the_error_of_a_guarded_call_is_no_cause_of_its_own() -> None:
    """Rank 1 ended with the verdict on its barrier, and gloo broke in the collective that the others wait in."""
    departed = {1: Departure(1, Cause.FAILED, "CollectiveTimeout (0:cpu:865c6391/1)")}
    found = judged(*(said(rank, world(7)) for rank in (0, 2, 3)), departed=departed, overdue=False)
    assert (found.causes, found.cause) == ({}, Cause.UNKNOWN)


def test_a_rank_that_makes_a_group_waits_for_others_and_is_not_named() -> None:
    making = said(2, done={"0:gloo": 6}, elsewhere="new_group(ranks 2-3)")
    found = judged(*(said(rank, world(7)) for rank in (0, 1, 3)), making)
    assert (found.causes, found.cause) == ({}, Cause.DIVERGED)
    assert found.sides[1] == ("new_group(ranks 2-3)", (2,))


@pytest.mark.parametrize(
    ("calls", "named", "count"),
    [
        ({0: "float", 1: "int", 2: "float", 3: "float"}, {1}, 2),
        (
            {0: "int", 1: "float", 2: "float"},
            set(),
            2,
        ),  # rank 3, of which it is not known, may have been on either side
        ({0: "int", 1: "float", 2: "int", 3: "float"}, set(), 2),
        ({0: "int", 1: "float"}, set(), 2),
        ({1: "float", 2: "float", 3: "float"}, set(), 0),
        ({}, set(), 0),
    ],
)
def test_of_what_has_ended_the_odd_ones_are_named_by_a_majority_of_all(
    calls: dict[int, str], named: set[int], count: int
) -> None:
    """They wait in nothing, and are asked about one call that the comparison has found."""
    reports = []
    for rank in WORLD:
        report = said(rank, done={"0:gloo": 30})
        kind = calls.get(rank)
        assert report.watched is not None
        asked = () if kind is None else (Waiting("0:gloo", WORLD, 21, hash(kind) | 1, f"all_reduce({kind})", 0.0),)
        reports.append(
            codec.loads_report(codec.dumps(replace(report, watched=replace(report.watched, compared=asked))))
        )
    finding = judged(*reports, overdue=False)
    assert (set(finding.causes), len(finding.sides)) == (named, count), finding
    if count:
        waiting = [with_waits(report, 31, calls.get(report.rank, "?")) for report in reports]  # in a later one
        busy = judged(*waiting, overdue=False)
        assert (busy.sequence, busy.causes, busy.sides) == (21, finding.causes, finding.sides)
        called = {rank: report.operation.sequence for rank, report in busy.reports.items() if report.operation}
        assert {rank: called[rank] for rank in calls} == dict.fromkeys(calls, 21)
        assert (finding.channel, finding.sequence, finding.cause) == ("0:gloo", 21, "diverged")
    else:
        assert finding.channel == ""
        # Asked because of a difference that the answers do not show: what is on its way meanwhile is no incident.
        busy = [replace(with_waits(report, 31, "all_reduce"), details={COMPARES: True}) for report in reports]
        facts: dict[str, Any] = {"departed": {}, "expired": False, "coordinator": 0}
        assert verdict_of(judged(*busy, overdue=False), 0, WORLD, **facts).cause is None
        broken = [replace(busy[0], trouble=Trouble(TroubleKind.TRANSPORT, "closed")), *busy[1:]]
        assert verdict_of(judged(*broken, overdue=False), 0, WORLD, **facts).cause is not None


def ended_well(rank: int, issued: int, **facts: Any) -> Departure:
    """A rank whose program has ended after so many collectives."""
    said = Watched(issued={"0:gloo": issued})
    return Departure(rank, Cause.EXITED, "ended its program", watched=said, **facts)


@pytest.mark.parametrize(
    ("issued", "cause", "culprits"),
    [
        ({0: 8, 2: 8, 3: 8}, "diverged", {1}),  # a loader has one batch more on rank 1
        ({0: 8, 2: 8, 3: 7}, "exited", {0, 2, 3}),  # they have not ended alike
        ({2: 8, 3: 8}, "exited", {2, 3}),  # rank 0 is elsewhere, and two of four are no majority
        ({3: 8}, "exited", {3}),
    ],
)
def test_who_calls_more_than_most_that_have_ended_is_odd(
    issued: dict[int, int], cause: str, culprits: set[int]
) -> None:
    left = {rank: ended_well(rank, number) for rank, number in issued.items()}
    others = [said(rank, done={"0:gloo": 8}) for rank in WORLD if rank not in left and rank != 1]
    finding = judged(said(1, world(9)), *others, departed=left, overdue=False)
    assert (set(finding.causes), {str(one) for one in finding.causes.values()}) == (culprits, {cause}), finding
    assert (len(finding.sides) == 2) == (cause == "diverged")
    if cause == "diverged":
        assert finding.sides[0] == ("nothing more: ended its program", (0, 2, 3))


def test_ranks_that_were_sent_sigterm_have_not_ended_well() -> None:
    left = {rank: ended_well(rank, 8, terminated=True) for rank in (0, 2, 3)}
    assert "diverged" not in {
        str(one) for one in judged(said(1, world(9)), departed=left, overdue=False).causes.values()
    }


@pytest.mark.parametrize("sent", [True, False])
def test_who_is_killed_because_it_does_not_react_to_ctrl_c_is_not_lost(sent: bool) -> None:
    """Torchrun sends SIGINT to all, and SIGKILL to those that are in a call of gloo's after 30 s."""
    left = {rank: Departure(rank, Cause.LOST, "process 7 has ended: killed by SIGKILL") for rank in (0, 1)}
    live = [said(rank, world(9), details={INTERRUPTED: True} if sent else {}) for rank in (2, 3)]
    finding = judged(*live, departed=left, overdue=False)
    assert set(finding.causes) == (set() if sent else {0, 1}), finding
    assert str(finding.cause) == "unknown"


def test_a_rank_that_has_just_left_another_call_lets_what_waited_for_it_go_on() -> None:
    """The others' guarded call failed at the same limit, and they have come since: the network is not at fault."""
    came = [said(rank, done={"0:gloo": 9}, elsewhere="all_reduce()", free_for=0.1) for rank in (0, 2, 3)]
    trouble = Trouble(TroubleKind.DEADLINE, "late")
    assert judged(said(1, world(9), trouble=trouble), *came).channel == ""
    long_ago = [replace(report, free_for=4.0) for report in came]
    assert str(judged(said(1, world(9), trouble=trouble), *long_ago).cause) == "network"


@pytest.mark.parametrize(
    ("done", "age", "named", "cause"),
    [(9, 5.01, set(), None), (8, 5.01, {0}, Cause.EXITED), (9, 10.1, set(), Cause.NETWORK)],
    ids=["ended for the others", "not ended", "long ago"],
)
def test_who_has_completed_a_late_call_and_left_is_not_why_it_is_not_over_here(
    done: int, age: float, named: set[int], cause: Cause | None
) -> None:
    """The others came as rank 1's limit passed, and have ended their programs before they were asked."""
    waiting = said(1, world(9), trouble=Trouble(TroubleKind.DEADLINE, "limit"))
    assert waiting.watched is not None
    waits = tuple(replace(wait, age=age) for wait in waiting.watched.waits)
    waiting = replace(waiting, watched=replace(waiting.watched, waits=waits, limit=5.0))
    left = Watched(issued={"0:gloo": 9}, done={"0:gloo": done})
    departed = {0: Departure(0, Cause.EXITED, "called destroy_process_group()", watched=left)}
    others = [said(rank, done={"0:gloo": 9}) for rank in (2, 3)]
    finding = judged(waiting, *others, departed=departed)
    assert set(finding.causes) == named
    verdict = verdict_of(finding, 0, WORLD, departed=departed, expired=True, coordinator=1)
    assert verdict.cause is cause, verdict


@pytest.mark.parametrize(("age", "cause"), [(0.05, None), (4.9, Cause.NETWORK)])
def test_a_call_that_its_last_rank_has_just_made_is_not_stuck(age: float, cause: Cause | None) -> None:
    """Rank 0 came as rank 2's limit passed, and for it and the others the broadcast is over already."""
    waiting = said(2, world(5, "broadcast"), trouble=Trouble(TroubleKind.DEADLINE, "limit"))
    assert waiting.watched is not None
    waiting = replace(waiting, watched=replace(waiting.watched, limit=5.0))
    others = []
    for rank, ago in ((0, age), (1, 5.0), (3, 5.0)):
        report = said(rank, done={"0:gloo": 5})
        assert report.watched is not None
        recent = (Issued("0:gloo", 5, hash("broadcast") | 1, "broadcast", ago),)
        others.append(replace(report, watched=replace(report.watched, recent=recent)))
    finding = judged(waiting, *(codec.loads_report(codec.dumps(report)) for report in others))
    verdict = verdict_of(finding, 0, WORLD, departed={}, expired=True, coordinator=1)
    assert verdict.cause is cause, verdict
