"""A later incident repeats an earlier one only where the ranks to blame have not got any further since."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ncclguard import lifecycle
from ncclguard.coordination import incidents
from ncclguard.coordination.group_state import GroupState
from ncclguard.coordination.incidents import goes_on, has_no_report_beside, summarise
from ncclguard.incident.model import Incident, RankReport
from ncclguard.protocol.decision import INTERRUPTED, Action, Departure, Report, Trouble, TroubleKind, Verdict, decide
from ncclguard.watch.coordination import WatchState
from ncclguard_explain.cause import ADVICE_EVALUATION_IN_PART, Cause
from tests.unit.reports import entered, outside


def incident(cause: Cause, *culprits: RankReport) -> Incident:
    ranks = tuple(report.rank for report in culprits)
    return Incident(
        id="5e-0-3.0", op="barrier", op_id="0/3", group="0", generation=0, cause=cause, culprits=ranks, agreed=True,
        deadline_expired=True, attempts=1, participants=(0, 1, 2), ranks=culprits, summary="late", advice="look",
    )  # fmt: skip


def late(rank: int, calls: int | None = 7, pid: int = 50, state: str = "none", **more: object) -> RankReport:
    return RankReport.model_validate({"rank": rank, "entered": calls, "pid": pid, "state": state, **more})


@pytest.mark.parametrize(
    ("later", "same"),
    [
        (incident(Cause.LATE, late(1)), True),
        (incident(Cause.LATE, late(1, calls=8)), False),  # it has been in a guarded call since
        (incident(Cause.LATE, late(1, pid=51)), False),  # another process
        (incident(Cause.LATE, late(2)), False),
        (incident(Cause.LATE, late(1), late(2)), False),
        (incident(Cause.STUCK, late(1)), False),
        (incident(Cause.LATE, late(1, calls=None)), False),  # how far it got is not known
        (incident(Cause.LATE, late(1, exception="KeyError: 'f1'")), False),
    ],
)
def test_the_fault_goes_on_only_for_the_same_ranks_that_began_nothing_since(later: Incident, same: bool) -> None:
    assert goes_on(incident(Cause.LATE, late(1)), later) == same


@pytest.mark.parametrize(
    ("exceptions", "same"),
    [
        (("CollectiveTimeout: timeout of barrier (0/3) after 2 s: rank 1 late.",) * 2, True),
        (("CollectiveTimeout: timeout of barrier (0/33) after 2 s: rank 1 late.",) * 2, False),  # of another operation
        (("CollectiveTimeout: timeout of barrier (0/3) after 2 s: rank 1 late.", "KeyError: 'f1'"), False),
    ],
)
def test_the_error_of_a_failure_that_nobody_looked_at_is_no_new_fault(exceptions: tuple[str, str], same: bool) -> None:
    raised = [late(rank, state="running", exception=text) for rank, text in zip((0, 2), exceptions, strict=True)]
    assert goes_on(incident(Cause.LATE, late(1)), incident(Cause.FAILED, *raised)) == same


def test_a_rank_that_is_lost_is_lost_once_in_a_session() -> None:
    """The evaluation in which it was killed fails, and then the ranks' meeting about that."""

    def lost(*ranks: int) -> Incident:
        return incident(Cause.LOST, *(late(rank, cause=Cause.LOST, calls=None, state="departed") for rank in ranks))

    assert goes_on(lost(1, 2), lost(1))
    assert not goes_on(lost(1), lost(1, 2)), "one more"
    assert not goes_on(lost(1), lost(1).model_copy(update={"id": "6f-0-3.0"})), "a new process has taken its place"
    raised = incident(Cause.LOST, late(1, cause=Cause.LOST), late(2, cause=Cause.FAILED))
    assert not goes_on(lost(1), raised)
    for group, one_report in (("job", True), ("0:ncclguard", True), ("0:nccl", False)):
        watched = lost(1).model_copy(update={"group": group})
        assert incidents.has_no_report_beside(lost(1), watched, guarded=False) == one_report, group
    assert not goes_on(incident(Cause.LATE, late(1, cause=Cause.LATE)), lost(1))


def in_try(number: int, line: int = 4, step: int = 5, where: str = "beginning of ") -> Incident:
    text = f"all_gather_object(67 bytes, name='evaluation evaluate() at step {step}, {where}try {number}')"
    return incident(Cause.LATE, late(1, calls=7 + number, operation=text, stack=(f"eval.py:{line} in evaluate",)))


def test_a_rank_late_at_one_place_in_each_try_of_an_evaluation_has_one_fault() -> None:
    """Each try begins with calls of its own, so that the rank has been in guarded ones since."""
    assert goes_on(in_try(1), in_try(2)) and goes_on(in_try(1), in_try(3))
    assert goes_on(in_try(1, where=""), in_try(2, where="end of "))
    assert not goes_on(in_try(1), in_try(2, line=9)), "another place"
    assert not goes_on(in_try(1), in_try(2, step=6)), "another evaluation"
    assert not goes_on(in_try(2), in_try(1)), "the next evaluation"


def test_of_a_rank_that_never_answered_the_stack_tells() -> None:
    silent = {"calls": None, "state": "silent"}
    before = incident(Cause.STUCK, late(1, stack=("a.py:1 in f",), **silent))
    assert goes_on(before, incident(Cause.STUCK, late(1, stack=("a.py:1 in f",), **silent)))
    assert not goes_on(before, incident(Cause.STUCK, late(1, stack=("a.py:9 in g",), **silent)))
    nobody = incident(Cause.NETWORK)
    assert not goes_on(nobody, nobody)


def test_the_coordinator_says_which_incident_is_repeated() -> None:
    state = GroupState("0:cpu", 0, (0, 1))
    reports = {0: entered(0), 1: replace(outside(1), details={"pid": 50, "entered": 7})}
    verdict = Verdict(0, 1, Action.FAIL, Cause.LATE, ((1, Cause.LATE),), (0, 1))
    first = Incident.from_json(summarise(verdict, reports, {}, {}, state))
    assert first.repeats is None
    again = Incident.from_json(summarise(verdict, reports, {}, {}, state, [first]))
    assert again.repeats == first.id


def test_an_exception_that_each_try_of_an_evaluation_raises_is_one_fault() -> None:
    """Wherever the rank that raised it is by then, whose own last call was in another evaluation."""

    def attempt(number: int, step: int = 10, text: str = "MemoryError at a.py:1 in f") -> Incident:
        call = f"all_reduce(float32[], SUM, phase='evaluation evaluate() at step {step}, try {number}')"
        before = f"all_reduce(float32[], SUM, phase='evaluation evaluate() at step {step - 5}, try 1')"
        raised = late(1, calls=7 + number, exception=text, operation=before, stack=(f"a.py:{number} in g",))
        waits = late(0, state="running", operation=call)
        return incident(Cause.FAILED, raised).model_copy(update={"ranks": (waits, raised)})

    assert goes_on(attempt(1), attempt(2))
    assert not goes_on(attempt(2), attempt(1))
    assert not goes_on(attempt(1), attempt(2, text="MemoryError at a.py:2 in f"))
    assert not goes_on(attempt(1, step=5), attempt(2))


def test_the_advice_fits_a_rank_without_memory_and_one_that_came_too_late() -> None:
    def advice(cause: Cause, *ranks: RankReport) -> str:
        return str(incidents._advice(cause, SimpleNamespace(guarded=True, outside=False), "barrier()", ranks=ranks))  # type: ignore[arg-type]

    texts = ("torch.OutOfMemoryError at a.py:1 in f: CUDA out of memory.", "MemoryError at a.py:1 in f")
    without = [RankReport(rank=n, cause=Cause.FAILED, state="none", exception=text) for n, text in enumerate(texts)]
    wrong = RankReport(rank=2, cause=Cause.FAILED, state="none", exception="KeyError at a.py:1 in f: 'x'")
    assert "smaller batches" in advice(Cause.FAILED, *without)
    assert "smaller batches" not in advice(Cause.FAILED, *without, wrong)
    came = RankReport(rank=1, cause=Cause.LATE, state="running")
    assert advice(Cause.LATE, came).startswith("See what it did before this call")
    assert not advice(Cause.LATE, came, came.model_copy(update={"state": "none"})).startswith("See what it did before")


@pytest.mark.parametrize(
    ("raised", "fix"),
    [
        (("KeyboardInterrupt", "KeyboardInterrupt at train.py:37 in main"), False),
        (("", "KeyboardInterrupt at train.py:37 in main"), False),
        (("SystemExit: 143", "SystemExit: 143"), False),
        (("", "SystemExit at train.py:37 in stop: 0"), False),
        (("", "SystemExit at train.py:37 in evaluate: metric file is missing"), True),
        (("KeyboardInterrupt", "ValueError at train.py:37 in main: bad batch"), True),
    ],
)
def test_nobody_is_told_to_fix_an_interruption(raised: tuple[str, str], fix: bool) -> None:
    """Rank 0 is in the call, and rank 1 is not."""
    trouble = Trouble(TroubleKind.RAISED, raised[0]) if raised[0] else None
    causes = tuple((rank, Cause.FAILED) for rank, text in enumerate(raised) if text)
    verdict = Verdict(0, 1, Action.FAIL, Cause.FAILED, causes, (0, 1))
    left = {1: Departure(1, Cause.FAILED, raised[1])}
    state = GroupState("0", 0, (0, 1))
    incident = Incident.from_json(summarise(verdict, {0: entered(0, trouble=trouble)}, left, {}, state))
    assert ("Fix the exception" in incident.advice, "an interruption" in incident.advice) == (fix, not fix)


@pytest.mark.parametrize(
    ("other", "in_part"),
    [
        ("all_reduce(float32[4], SUM)", True),
        ("all_gather_object(sizes, name='evaluation of() after 7 optimizer steps, beginning of try 1')", False),
        ("all_reduce(float32[4], SUM, name='evaluation evaluate() after 7 optimizer steps, inside try 1')", False),
    ],
)
def test_an_evaluation_that_some_ranks_call_is_told_to_be_called_on_all(other: str, in_part: bool) -> None:
    """Rank 0 evaluates; the others reduce something, or are in an evaluation too."""
    begins = "all_gather_object(sizes, name='evaluation evaluate() after 7 optimizer steps, beginning of try 1')"
    verdict = Verdict(
        0, 1, Action.FAIL, Cause.DIVERGED, ((0, Cause.DIVERGED),), (0, 1, 2), sides=((other, (1, 2)), (begins, (0,)))
    )
    reports = {rank: entered(rank) for rank in (0, 1, 2)}
    incident = Incident.from_json(summarise(verdict, reports, {}, {}, GroupState("0", 0, (0, 1, 2))))
    assert ("on all ranks or on none" in incident.advice) is in_part
    assert not (in_part and incident.further)


def of_two_groups(*sides: tuple[str, tuple[int, ...]], culprits: tuple[int, ...] = (1,), group: str = "0") -> Incident:
    """A verdict on ranks that wait for each other in two groups, as one of these groups sees it."""
    causes = tuple((rank, Cause.DIVERGED) for rank in culprits)
    verdict = Verdict(0, 1, Action.FAIL, Cause.DIVERGED, causes, (0, 1, 2), sides=sides)
    reports = {rank: entered(rank) for rank in (0, 1, 2)}
    return Incident.from_json(summarise(verdict, reports, {}, {}, GroupState(group, 0, (0, 1, 2))))


def test_a_fault_that_two_groups_feel_is_one() -> None:
    """The same ranks on the same sides, each call without its group in the group's own verdict."""
    first = of_two_groups(("all_reduce(f)", (0, 2)), ("all_reduce(f) of group 1:cpu (ranks 0-2)", (1,)))
    second = of_two_groups(("all_reduce(f) of group 2:cpu (ranks 0-2)", (0, 2)), ("all_reduce(f)", (1,)), culprits=())
    assert goes_on(first, second)
    assert "nothing tells who is wrong" in second.summary and "no side is a majority" not in second.summary
    named = second.model_copy(update={"culprits": (1,)})
    assert not goes_on(first, named), "it may be another one"
    assert goes_on(first, named.model_copy(update={"group": "2:cpu"})), "both of its groups may name the same rank"
    assert not goes_on(first, named.model_copy(update={"group": "2:cpu", "culprits": (0,)}))
    ddp = "all_reduce(Float [577], group 0 default_pg, number 18)"
    guarded = of_two_groups(("all_reduce(f)", (0, 2)), (ddp, (1,)))
    watched = of_two_groups(("all_reduce(f) of group 0:cpu (ranks 0-2)", (0, 2)), (ddp, (1,)))
    assert incidents.has_no_report_beside(guarded, watched, guarded=False)
    other = of_two_groups(("all_reduce(f) of group 0:cpu (ranks 0-2)", (0, 1)), (ddp, (2,)), culprits=(2,))
    assert not incidents.has_no_report_beside(guarded, other, guarded=False)


def test_who_ended_by_an_earlier_error_has_nothing_to_fix() -> None:
    """The verdict of another group has ended rank 2, whose error names that operation."""
    text = "CollectiveMismatch (2:cpu:865c6391/1)"
    verdict = Verdict(0, 1, Action.FAIL, Cause.FAILED, ((2, Cause.FAILED),), (0, 1, 2))
    left = {2: Departure(2, Cause.FAILED, text)}
    incident = Incident.from_json(summarise(verdict, {1: entered(1)}, left, {}, GroupState("1", 1, (0, 1, 2))))
    assert "the error of an earlier call" in incident.summary
    assert "Fix the exception" not in incident.advice


def test_sigterm_on_a_call_that_waits_says_who_had_not_come() -> None:
    """A scheduler ends the job at its limit."""
    stack = ["train.py:12 in <module>: main()", "train.py:8 in save: write()"]
    text = "was sent SIGTERM"
    left = {rank: Departure(rank, Cause.LOST, text, terminated=True, details={"stack": stack}) for rank in (0, 1, 2)}
    reports = {0: entered(0), 2: entered(2)}
    verdict = decide(0, (0, 1, 2), reports, left, {})
    incident = Incident.from_json(summarise(verdict, reports, left, {}, GroupState("0", 0, (0, 1, 2))))
    assert incident.culprits == ()
    assert "with SIGTERM; rank 1 had not come to it, interrupted at train.py:8 in save: write()." in incident.summary


def test_who_was_aborted_by_what_the_others_sent_stands_in_the_panel() -> None:
    """gloo ended rank 0, and of two that differ nobody is named."""
    sides = (("all_reduce(Double)", (1,)), ("all_reduce(Float)", (2,)))
    verdict = Verdict(0, 1, Action.FAIL, Cause.DIVERGED, (), (1, 2), sides=sides)
    left = {0: Departure(0, Cause.LOST, "process 7 of rank 0 on vm has ended: killed by SIGABRT")}
    reports = {rank: entered(rank) for rank in (1, 2)}
    incident = Incident.from_json(summarise(verdict, reports, left, {}, WatchState("watch", 1, (0, 1, 2))))
    assert "ended since: process 7 of rank 0 on vm has ended: killed by SIGABRT" in str(incident)
    assert "gloo aborts (SIGABRT) a rank that is sent more than it expects" in incident.advice
    calm = Incident.from_json(summarise(verdict, reports, {}, {}, WatchState("watch", 1, (0, 1, 2))))
    assert "ended since" not in str(calm)
    assert "SIGABRT" not in calm.advice


@pytest.mark.parametrize(
    ("sent", "left", "summary", "culprits"),
    [
        (True, "KeyboardInterrupt at train.py:37 in save", "rank 2 had not come to it, interrupted at train.py:37", ()),
        (True, None, "all ranks were ended from outside, with Ctrl-C.", ()),  # all three were in the call
        (False, "KeyboardInterrupt at train.py:37 in save", "ranks 0, 2 failed", (0, 2)),  # rank 1 goes on
        (True, "ValueError at train.py:37 in save: no", "rank 2 raised ValueError", (2,)),
    ],
)
def test_ctrl_c_on_a_call_that_waits_is_nobodys_fault(
    sent: bool, left: str | None, summary: str, culprits: tuple[int, ...]
) -> None:
    """Rank 0 has raised it already, rank 1 has been sent it, and rank 2 may be elsewhere."""
    trouble = Trouble(TroubleKind.RAISED, "KeyboardInterrupt")
    reports = {0: entered(0, trouble=trouble), 1: replace(entered(1), details={INTERRUPTED: True} if sent else {})}
    departed = {}
    if left is None:
        reports[2] = entered(2, trouble=trouble)
    else:
        departed = {2: Departure(2, Cause.FAILED, left, details={"stack": ["train.py:37 in save: write()"]})}
    verdict = decide(0, (0, 1, 2), reports, departed, {})
    incident = Incident.from_json(summarise(verdict, reports, departed, {}, GroupState("0", 0, (0, 1, 2))))
    assert (verdict.action, incident.culprits) == (Action.FAIL, culprits), incident
    assert summary in incident.summary
    assert ("Ctrl-C" in incident.summary) == (not culprits)


@pytest.mark.parametrize(
    ("how", "aborted", "killed"),
    [
        ("", True, True),
        (": killed by SIGABRT", True, False),
        (": killed by SIGKILL", False, True),
        (": exit code 3", False, True),
    ],
)
def test_the_advice_speaks_of_gloos_abort_only_where_that_may_be(how: str, aborted: bool, killed: bool) -> None:
    state = WatchState("watch", 0, (0, 1))
    gone = {1: Departure(1, Cause.LOST, f"process 51 of rank 1 on a has ended{how}")}
    verdict = Verdict(0, 1, Action.FAIL, Cause.LOST, ((1, Cause.LOST),), (0, 1))
    incident = Incident.from_json(summarise(verdict, {0: entered(0)}, gone, {}, state))
    assert ("SIGABRT" in incident.advice, "out-of-memory killer" in incident.advice) == (aborted, killed)


@pytest.mark.parametrize(("culprits", "sequel"), [((), True), ((0, 1), True), ((2,), False)])
def test_the_end_of_ranks_that_were_sent_sigterm_in_a_known_standstill_is_no_incident_of_its_own(
    culprits: tuple[int, ...], sequel: bool
) -> None:
    """Who has read the incident of a job that hangs ends it; rank 2 was killed by itself."""
    state = WatchState("watch", 0, (0, 1, 2))
    reports = {rank: entered(rank) for rank in range(3)}
    ended = {r: Departure(r, Cause.LOST, "was sent SIGTERM", terminated=r < 2 or not culprits) for r in range(3)}
    verdict = Verdict(0, 1, Action.FAIL, Cause.LATE, ((1, Cause.LATE),), (0, 1, 2))
    first = Incident.from_json(summarise(verdict, reports, {}, {}, state))
    then = Verdict(
        1,
        1,
        Action.FAIL,
        Cause.LOST if culprits else Cause.UNKNOWN,
        tuple((r, Cause.LOST) for r in culprits),
        (0, 1, 2),
    )
    again = Incident.from_json(summarise(then, reports, ended, {}, state, [first]))
    assert again.repeats == (first.id if sequel else None)
    assert ("ended from outside, with SIGTERM" in again.summary) == (not culprits)
    elsewhere = first.model_copy(update={"op_id": "watch/0"})
    assert Incident.from_json(summarise(then, reports, ended, {}, state, [elsewhere])).repeats is None


@pytest.mark.parametrize(("done", "sequel"), [(0, True), (1, False)])
def test_the_end_of_a_job_refers_to_the_incident_that_still_holds_it(done: int, sequel: bool) -> None:
    """Gloo has let the others go on to the next collective, and the job is ended; unless the rank had come on too."""
    state = WatchState("watch", 0, (0, 1, 2))
    verdict = Verdict(0, 1, Action.FAIL, Cause.DIVERGED, ((1, Cause.DIVERGED),), (0, 1, 2))
    first = Incident.from_json(summarise(verdict, {rank: entered(rank) for rank in range(3)}, {}, {}, state))
    reports = {0: replace(entered(0), operation=replace(entered(0).operation, sequence=2), age=30.0, budget=-26.0)}
    ended = {r: Departure(r, Cause.LOST, "was sent SIGTERM", terminated=True, done=done) for r in range(3)}
    then = Verdict(1, 2, Action.FAIL, Cause.UNKNOWN, (), (0, 1, 2))
    again = Incident.from_json(summarise(then, reports, ended, {}, state, [first]))
    assert again.repeats == (first.id if sequel else None)
    assert again.deadline_expired == (again.timeout is not None and reports[0].age > again.timeout)


@pytest.mark.parametrize(
    "name", ["evaluation evaluate() at step 5, beginning of try 1", "evaluation evaluate() at step 5, try 1"]
)
def test_who_does_not_come_to_an_evaluation_may_not_call_it(name: str) -> None:
    text = f"all_gather_object(67 bytes, name='{name}')"
    advice = incidents._advice(Cause.LATE, SimpleNamespace(guarded=True, outside=False), text)  # type: ignore[arg-type]
    assert ("an evaluation is called on all ranks or on none" in advice) == ("beginning" in name)


def test_who_has_left_before_an_evaluation_may_not_call_it() -> None:
    state: Any = SimpleNamespace(guarded=True, outside=False)
    for name, told in (("evaluation evaluate() at step 5, beginning of try 1", True), ("loss", False)):
        advice = str(incidents._advice(Cause.EXITED, state, f"all_gather_object(67 bytes, name='{name}')"))
        assert ("call it on all ranks, not under `if rank == 0:`" in advice) == told


@pytest.mark.parametrize(("in_use", "launched", "goes_on"), [(True, "1", True), (True, "", False), (False, "1", False)])
def test_what_a_lost_rank_means_for_the_others_is_what_they_can_do(
    in_use: bool, launched: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_goes_on", False)
    monkeypatch.setenv(lifecycle.RUN_FOLDER, launched)
    if in_use:
        lifecycle.going_on()
    state: Any = SimpleNamespace(guarded=True, outside=False)
    inside = "all_reduce(float32[1], SUM, phase='evaluation evaluate() at step 5, try 1')"
    for text in ("barrier()", inside):
        advice = str(incidents._advice(Cause.LOST, state, text))
        assert ("The others go on without it" in advice) == goes_on
        assert ('on_lost="checkpoint"' in advice) == (not goes_on and text == inside)
        assert ('on_lost="shrink"' in advice) == (not goes_on and text != inside)


def test_a_rank_of_a_group_outside_the_job_is_started_again_alone() -> None:
    lost = RankReport(rank=2, cause=Cause.LOST, state="departed")
    for joined in (False, True):
        state: Any = SimpleNamespace(guarded=True, outside=joined)
        advice = str(incidents._advice(Cause.LOST, state, "broadcast()", ranks=[lost]))
        further = str(incidents._further("broadcast()", Cause.LOST, state))
        assert ("Start it again: it can join the others anew" in advice) == joined
        assert ("resilient_step" in advice + further) != joined


@pytest.mark.parametrize(
    ("raised", "follows"),
    [("CollectiveMismatch: failure of barrier (0/3) after 2 s: rank 0 diverged.", True), ("KeyError: 'f1'", False)],
)
def test_who_ended_by_the_error_of_another_is_told_whose_it_is(raised: str, follows: bool) -> None:
    """Its exception is not to be fixed: the incident that it comes of is."""
    known = incident(Cause.DIVERGED, late(0))
    verdict = Verdict(0, 4, Action.FAIL, Cause.FAILED, ((1, Cause.FAILED),), (0, 1))
    left = {1: Departure(1, Cause.FAILED, raised)}
    later = Incident.from_json(summarise(verdict, {0: entered(0)}, left, {}, GroupState("0", 0, (0, 1)), [known]))
    assert later.repeats == (known.id if follows else None)
    assert later.advice.startswith(f"It follows from incident {known.id}" if follows else "Fix the exception")


def in_evaluations(step: int, cause: str, culprits: tuple[int, ...], *, alone: bool = True) -> Incident:
    """Rank 0 begins the evaluation of a step, and the others train, or have ended."""
    text = f"all_gather_object(sizes, name='evaluation evaluate() at step {step}, beginning of try 1')"
    first = of_two_groups((text, (0,)), ("all_reduce(f, number 8)", (1, 2)))
    ranks = tuple(
        report.model_copy(
            update={"operation": text if report.rank == 0 else None, "state": "running" if report.rank == 0 else "none"}
        )
        for report in first.ranks
    )
    advice = ADVICE_EVALUATION_IN_PART if alone else "Compare what the ranks called."
    return first.model_copy(
        update={"cause": Cause(cause), "culprits": culprits, "ranks": ranks, "advice": advice, "sides": ()}
    )


@pytest.mark.parametrize("guarded", [True, False])
def test_an_evaluation_that_one_rank_calls_is_one_fault_at_each_step(guarded: bool) -> None:
    """Also at the job's end, when the others have left, and seen by a watch as ranks that train without it."""
    first = in_evaluations(0, "diverged", (0,))
    assert has_no_report_beside(first, in_evaluations(5, "diverged", (0,)), guarded)
    assert has_no_report_beside(first, in_evaluations(10, "exited", (1, 2), alone=False), guarded)
    assert not has_no_report_beside(first, in_evaluations(5, "diverged", (1,)), guarded)
    assert not has_no_report_beside(first, in_evaluations(5, "exited", (1,), alone=False), guarded)
    assert not has_no_report_beside(
        first.model_copy(update={"advice": ""}), in_evaluations(5, "diverged", (0,)), guarded
    )


def test_ranks_that_differ_in_each_try_of_an_evaluation_have_one_report() -> None:
    """Of two ranks one returns early: nobody can be named, and the number of the try is all that differs."""

    def of_try(number: int, step: int = 2) -> Incident:
        call = f"all_reduce(f, phase='evaluation f() at step {step}, try {number}')"
        sides = (call, (0,)), (f"nothing more: it has finished evaluation f() at step {step}, try {number}", (1,))
        found = of_two_groups(*sides, culprits=())
        ranks = tuple(report.model_copy(update={"operation": call}) for report in found.ranks)
        return found.model_copy(update={"ranks": ranks})

    assert goes_on(of_try(1), of_try(2)) and not goes_on(of_try(1), of_try(2, step=3))


@pytest.mark.parametrize(("done", "repeats"), [(0, True), (7, False)], ids=["nothing since", "the job has gone on"])
def test_ranks_that_leave_during_an_evaluation_have_a_report_where_calls_have_succeeded_since(
    done: int, repeats: bool
) -> None:
    text = "all_gather_object(sizes, name='evaluation f() at step {}, beginning of try 1')"
    state = GroupState("0:cpu", 0, (0, 1, 2))

    def begins(step: int, sequence: int) -> Report:
        report = replace(entered(0, sequence=sequence), done=done)
        assert report.operation is not None
        said = text.format(step)
        return replace(report, operation=replace(report.operation, text=said), details={"call": said})

    verdict = Verdict(0, 1, Action.FAIL, Cause.DIVERGED, ((0, Cause.DIVERGED),), (0, 1, 2))
    sides = ((text.format(0), (0,)), ("all_reduce(f)", (1, 2)))
    reports = {0: begins(0, 1), 1: outside(1), 2: outside(2)}
    first = Incident.from_json(summarise(replace(verdict, sides=sides), reports, {}, {}, state))
    assert first.advice == ADVICE_EVALUATION_IN_PART
    left = {rank: Departure(rank, Cause.EXITED, "ended its program", done=done) for rank in (1, 2)}
    gone = tuple((rank, Cause.EXITED) for rank in (1, 2))
    later = Verdict(1, done + 2, Action.FAIL, Cause.EXITED, gone, (0,), departed=gone)
    incident = Incident.from_json(summarise(later, {0: begins(5, done + 2)}, left, {}, state, [first]))
    assert (incident.repeats == first.id) is repeats, incident
