"""Ranks that leave: who is named when a launcher ends the healthy ones too, in whose words, and who writes the report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from ncclguard.coordination import incidents
from ncclguard.coordination.group_state import GroupState
from ncclguard.coordination.store import AgreementStore, Departures
from ncclguard.incident.model import Incident, RankReport
from ncclguard.outcome import Cause
from ncclguard.protocol import codec
from ncclguard.protocol.decision import (
    Action,
    Departure,
    Operation,
    Phase,
    Report,
    Trouble,
    TroubleKind,
    Verdict,
    decide,
)

OPERATION = Operation(sequence=7, fingerprint=1, text="barrier()")
HISTORY = {"groups": ["0"], "texts": ["barrier()"], "rows": [[0, 7, 0, 1.0, None, 0]]}


def waiting(rank: int) -> Report:
    details = {"history": HISTORY, "host": f"gpu-{rank}", "pid": 100 + rank}
    return Report(rank, 0, 6, OPERATION, Phase.RUNNING, age=1.0, budget=9.0, details=details)


def told(rank: int) -> Departure:
    return Departure(rank, Cause.LOST, "was sent SIGTERM", 6, {"stack": ["train.py:3 in step: x"]}, terminated=True)


def verdict(waits: list[int], departed: list[Departure]) -> Verdict:
    gone = {departure.rank: departure for departure in departed}
    return decide(0, (0, 1, 2, 3), {rank: waiting(rank) for rank in waits}, gone, {})


def incident_of(waits: list[int], departed: list[Departure]) -> Incident:
    reports, gone = {rank: waiting(rank) for rank in waits}, {departure.rank: departure for departure in departed}
    decided = verdict(waits, departed)
    return Incident.from_json(incidents.summarise(decided, reports, gone, {}, GroupState("0:cpu", 0, (0, 1, 2, 3))))


def test_ranks_that_a_launcher_ends_because_another_is_gone_are_not_named() -> None:
    found = verdict([0], [told(1), Departure(2, Cause.LOST, "its pid is gone"), told(3)])
    assert found.action is Action.FAIL
    assert found.culprit_ranks == (2,)
    assert dict(found.departed) == {1: Cause.LOST, 2: Cause.LOST, 3: Cause.LOST}  # gone they are all the same


def test_nor_are_they_when_another_raised() -> None:
    assert verdict([0], [told(1), Departure(2, Cause.FAILED, "ValueError"), told(3)]).culprit_ranks == (2,)


def test_ranks_that_were_sent_sigterm_and_nothing_else_are_named() -> None:
    assert verdict([0, 1], [told(2), told(3)]).culprit_ranks == (2, 3)


def test_those_that_give_a_group_up_because_of_another_are_not_named_with_or_without_it() -> None:
    followers = [Departure(rank, Cause.EXITED, "destroyed its process group", follows=True) for rank in (1, 3)]
    assert verdict([0], [*followers, Departure(2, Cause.EXITED, "destroyed its process group")]).culprit_ranks == (2,)
    alone = verdict([0, 2], followers)
    assert (alone.action, alone.cause, alone.culprit_ranks) == (Action.FAIL, Cause.UNKNOWN, ())


@pytest.mark.parametrize(
    ("left", "summary"),
    [
        (told(2), "rank 2 was sent SIGTERM."),
        (
            Departure(2, Cause.FAILED, "torch.OutOfMemoryError at train.py:211 in step: no memory"),
            "rank 2 raised torch.OutOfMemoryError at train.py:211 in step: no memory.",
        ),
        (Departure(2, Cause.LOST, "its pid is gone"), "rank 2 lost."),
        (Departure(2, Cause.EXITED, "ended its program"), "rank 2 exited."),
    ],
)
def test_one_culprit_is_told_of_in_its_own_words(left: Departure, summary: str) -> None:
    assert incident_of([0, 1, 3], [left]).summary.endswith(summary)


def test_a_departure_travels_with_its_stack_and_history() -> None:
    left = told(2)
    (back, done) = codec.loads_departure(codec.dumps_departure(left, {"0:cpu": 6}, by=1))
    assert (back.rank, back.cause, back.text, back.terminated, dict(back.details)) == (
        2, Cause.LOST, "was sent SIGTERM", True, dict(left.details),
    )  # fmt: skip
    assert done == {"0:cpu": 6}
    follows = Departure(1, Cause.EXITED, "destroyed its process group", follows=True)
    assert codec.loads_departure(codec.dumps_departure(follows, {}, by=1))[0].follows
    report = incident_of([0, 1, 3], [left]).ranks[2]
    assert (report.state, report.stack) == ("departed", ("train.py:3 in step: x",))


def test_the_verdict_carries_no_history_and_the_table_beside_it_does() -> None:
    reports = {rank: waiting(rank) for rank in (0, 1, 3)}
    assert "rows" not in incident_of([0, 1, 3], [told(2)]).to_json()
    assert json.loads(incidents.histories(reports, {2: told(2)})) == {"0": HISTORY, "1": HISTORY, "3": HISTORY}


@pytest.mark.parametrize(
    ("states", "culprits", "writer"),
    [
        (["running", "running", "none"], (2,), 0),
        (["none", "running", "running"], (0,), 1),  # rather one that is not to blame
        (["silent", "departed", "running"], (0, 1), 2),
        (["none", "silent", "silent"], (0,), 0),
        (["silent", "silent", "departed"], (), -1),
    ],
)
def test_one_rank_writes_the_report(states: list[str], culprits: tuple[int, ...], writer: int) -> None:
    found = incident_of([0, 1, 3], [told(2)])
    ranks = tuple(RankReport.model_validate({"rank": rank, "state": state}) for rank, state in enumerate(states))
    assert incidents.writer(found.model_copy(update={"ranks": ranks, "culprits": culprits})) == writer


def test_the_id_of_an_incident_is_a_file_name_and_no_other_jobs() -> None:
    group = GroupState("default_pg/../x y:cpu", 0, (0, 1, 2, 3))
    group.begin_session("0123456789ab")
    decided = verdict([0, 1, 3], [told(2)])
    found = Incident.from_json(incidents.summarise(decided, {0: waiting(0)}, {2: told(2)}, {}, group))
    assert found.id == "01234567-default_pg-..-x-y-cpu-7.0"
    assert "/" not in found.id


def test_two_witnesses_with_the_same_words_count_as_one_goodbye() -> None:
    """Else rank 0 counts more goodbyes than there are, and takes the store away before the others are done with it."""
    store, witnesses = AgreementStore(HashStore()), [Departures(rank) for rank in range(2)]
    seen = Departure(2, Cause.LOST, "its pid does not exist any more")
    assert [witness.post(store, seen, {}) for witness in witnesses] == [True, False]
    assert witnesses[0].count(store) == 1
    assert 2 in witnesses[1]  # without reading the list: it has just been told


def test_all_are_told_of_the_first_the_second_and_the_fourth_that_leaves() -> None:
    """So that who waits looks at once, and a job of a thousand ranks ends without a million messages."""
    store, departures = AgreementStore(HashStore()), Departures(0)
    news = [departures.post(store, Departure(rank, Cause.EXITED, "ended its program"), {}) for rank in range(9)]
    assert [rank for rank, told_of in enumerate(news) if told_of] == [0, 1, 3, 7]
    assert not departures.post(store, Departure(0, Cause.LOST, "seen by a witness"), {})  # it is known already
    departures.read(store)
    assert {rank: departure.cause for rank, departure in departures.all().items()} == dict.fromkeys(
        range(9), Cause.EXITED
    )


def test_many_ranks_are_named_by_their_runs_in_a_summary_and_in_what_one_rank_says_alone() -> None:
    """It is a line of the log of every rank."""
    members = tuple(range(1000))
    asked = Trouble(TroubleKind.DEADLINE)
    reports = {rank: Report(rank=rank, generation=0, done=6) for rank in members[1:]}
    reports[0] = replace(waiting(0), trouble=asked)
    decided = decide(0, members, reports, {}, {})
    assert decided.culprit_ranks == members[1:]
    group = GroupState("0:cpu", 0, members)
    found = Incident.from_json(incidents.summarise(decided, reports, {}, {}, group))
    assert found.summary == "barrier() failed after 1 s: ranks 1-999 late."
    causes = dict.fromkeys(members[1:], Cause.LOST)
    alone = incidents.alone(group, "barrier", "barrier()", 7, Cause.LOST, causes, "the store is gone")
    assert alone.summary == "barrier() failed: ranks 1-999 lost; the store is gone."


@pytest.mark.parametrize(
    ("seen", "advised"),
    [
        ({"stopped": True, "stack": ["train.py:3 in step: x"]}, "`kill -CONT 102` on its host has it go on"),
        ({"stopped": False, "stack": ["train.py:3 in step: x"]}, "See in its stack, in this report"),
        ({"stopped": False}, "`py-spy dump --pid`"),
    ],
)
def test_what_was_seen_of_a_stuck_rank_decides_what_is_advised(seen: dict[str, object], advised: str) -> None:
    group = GroupState("0:cpu", 0, (0, 1, 2))
    group.saw({2: {"pid": 102, **seen}})
    silent, reports = {2: Cause.STUCK}, {rank: waiting(rank) for rank in (0, 1)}
    decided = decide(0, (0, 1, 2), reports, {}, silent)
    assert advised in Incident.from_json(incidents.summarise(decided, reports, {}, silent, group)).advice


def test_a_rank_that_is_lost_while_nobody_waits_holds_up_no_operation() -> None:
    group = GroupState("job", 0, (0, 1, 2, 3))
    group.guarded = False
    gone = {2: Departure(2, Cause.LOST, "its pid is gone")}
    decided = Verdict(0, 0, Action.FAIL, Cause.LOST, ((2, Cause.LOST),), (0, 1, 3))
    found = Incident.from_json(incidents.summarise(decided, {}, gone, {}, group))
    assert found.summary == "rank 2 lost; no rank was waiting in a collective of torch's own."


TORCHS = ["train.py:9 in step: dist.barrier()", "torch/distributed/distributed_c10d.py:5 in barrier: work.wait()"]


@pytest.mark.parametrize("entered", [True, False])
def test_only_a_rank_that_has_not_entered_is_told_to_wait_in_a_collective_of_torchs_own(entered: bool) -> None:
    """On the backend "ncclguard" every call comes through torch's functions, also the one that differs."""
    odd = replace(waiting(1), details={"stack": TORCHS}, operation=Operation(7, 2, "all_reduce()"))
    late = Trouble(TroubleKind.DEADLINE)
    reports = {rank: replace(waiting(rank), trouble=late) for rank in (0, 2, 3)}
    reports[1] = odd if entered else Report(1, 0, 6, details={"stack": TORCHS})
    decided = decide(0, (0, 1, 2, 3), reports, {}, {})
    found = incidents.summarise(decided, reports, {}, {}, GroupState("0:cpu", 0, (0, 1, 2, 3)))
    assert decided.culprit_ranks == (1,)
    assert ("a collective of torch's own" in Incident.from_json(found).advice) is not entered
