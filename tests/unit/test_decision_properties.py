"""What must hold of a verdict for any set of reports."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings, strategies as st

from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Action, Departure, Phase, Report, Trouble, TroubleKind, Verdict, decide
from tests.unit.reports import entered, outside


@st.composite
def situations(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], dict[int, Report], dict[int, Departure], dict[int, Cause]]:
    """A generation as a coordinator may find it: each member has reported, departed, both, or is silent."""
    members = tuple(range(draw(st.integers(1, 6))))
    furthest = draw(st.integers(1, 3))
    closing, shrink = draw(st.booleans()), draw(st.booleans())
    needs, attempts = draw(st.sampled_from((-1, 0, 1))), draw(st.integers(1, 3))
    kinds = (*([None] * 4), *TroubleKind)
    reports: dict[int, Report] = {}
    departed: dict[int, Departure] = {}
    silent: dict[int, Cause] = {}
    for rank in members:
        how = "reported" if rank == 0 else draw(st.sampled_from(("reported", "reported", "departed", "both", "silent")))
        if how == "silent":
            silent[rank] = draw(st.sampled_from((Cause.STUCK, Cause.UNKNOWN)))
            continue
        if how in ("departed", "both"):
            cause = draw(st.sampled_from((Cause.LOST, Cause.EXITED, Cause.FAILED)))
            departed[rank] = Departure(rank, cause, done=draw(st.integers(0, furthest)))
        if how == "departed":
            continue
        kind = draw(st.sampled_from(kinds))
        trouble = None if kind is None else Trouble(kind)
        sequence = draw(st.integers(max(furthest - 1, 1), furthest))
        if draw(st.booleans()):
            first = draw(st.integers(0, 4))
            phase = draw(st.sampled_from((Phase.RUNNING, Phase.READY))) if closing else Phase.RUNNING
            reports[rank] = entered(
                rank, draw(st.sampled_from((7, 7, 7, 9, 11))), sequence, closing=closing, shrink=shrink, needs=needs,
                phase=phase, trouble=trouble, age=draw(st.floats(0, 100)), first=first,
                restorable=draw(st.integers(0, first)), attempt=attempts,
            )  # fmt: skip
        else:
            reports[rank] = outside(rank, draw(st.integers(0, sequence)), draw(st.sampled_from(("", "", "b"))), trouble)
    return members, reports, departed, silent


Situation = tuple[tuple[int, ...], dict[int, Report], dict[int, Departure], dict[int, Cause]]


def majority(found: Verdict, reports: Mapping[int, Report]) -> int | None:
    """The fingerprint that more than half of those that entered have."""
    prints = [
        r.operation.fingerprint for r in reports.values() if r.operation and r.operation.sequence == found.sequence
    ]
    return next((f for f in set(prints) if 2 * prints.count(f) > len(prints)), None)


@settings(max_examples=400, deadline=None)
@given(situations())
def test_no_rank_that_entered_with_the_majority_is_named_but_one_that_came_last_raised_or_left(s: Situation) -> None:
    members, reports, departed, silent = s
    found = decide(0, members, reports, departed, silent)
    usual = majority(found, reports)
    for rank, cause in found.culprits:
        report = reports.get(rank)
        if report is None or rank in departed or report.operation is None:
            continue
        with_it = report.operation.sequence == found.sequence and report.operation.fingerprint == usual
        raised = report.trouble is not None and report.trouble.kind in (TroubleKind.RAISED, TroubleKind.GAVE_UP)
        if with_it and not raised:
            assert cause is Cause.LATE
            assert found.deadline_expired
            assert not silent
            assert not found.sides
            longest = max(r.age for r in reports.values())
            assert len(found.culprits) * 2 < len(members) or report.age < longest / 4


@settings(max_examples=400, deadline=None)
@given(situations())
def test_what_may_have_been_returned_as_a_success_is_committed_and_nothing_else_is(s: Situation) -> None:
    members, reports, departed, silent = s
    found = decide(0, members, reports, departed, silent)
    phases = [r.phase_at(found.sequence) for r in reports.values()]
    completed = Phase.DONE in phases or any(d.done >= found.sequence for d in departed.values())
    if completed:
        assert found.action is Action.COMMIT
    elif min(phases) < Phase.READY:
        assert found.action is not Action.COMMIT
    if found.action is Action.COMMIT:
        assert found.cause is None
        assert found.culprits == ()
    else:
        assert found.cause is not None


@settings(max_examples=400, deadline=None)
@given(situations())
def test_a_resume_starts_where_every_rank_can_and_takes_along_every_rank_that_is_not_gone(s: Situation) -> None:
    members, reports, departed, silent = s
    found = decide(0, members, reports, departed, silent)
    if found.action is not Action.RESUME:
        assert found.participants == members
        return
    taking_part = [r for r in reports.values() if r.operation and r.operation.sequence == found.sequence]
    assert not silent
    assert not any(r.trouble is not None and r.trouble.kind is TroubleKind.DEADLINE for r in taking_part)
    assert set(members) - set(departed) <= set(found.participants)
    assert all(r.restorable_from <= found.from_piece <= r.first_incomplete for r in taking_part)
    if found.participants != members:
        assert found.from_piece == 0
        assert set(found.participants).isdisjoint(departed)


@settings(max_examples=200, deadline=None)
@given(situations(), st.randoms(use_true_random=False))
def test_the_order_in_which_reports_were_read_changes_nothing(s: Situation, random: object) -> None:
    members, reports, departed, silent = s
    ranks = list(reports)
    random.shuffle(ranks)  # type: ignore[attr-defined]
    shuffled = {rank: reports[rank] for rank in ranks}
    assert decide(0, members, shuffled, departed, silent) == decide(0, members, reports, departed, silent)
