"""Who is told when a rank raises, or comes to the end, in a section that others are still in; and what the verdict says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ncclguard.coordination import sections as module
from ncclguard.coordination.group_state import GroupState, OpenCall
from ncclguard.coordination.sections import FINISHED_AFTER, Sections
from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Operation, Phase, Report, Trouble, TroubleKind, decide
from ncclguard.protocol.member import Entry

ALL = (0, 1, 2, 3)


def waiting_state(rank: int = 0, members: tuple[int, ...] = ALL, entered: float | None = None) -> GroupState:
    """A rank in a collective that has not ended."""
    state = GroupState("g", rank, members)
    entry, _ = state.member.enter(Operation(0, 7, "all_reduce()"))
    assert entry is Entry.START
    now = time.monotonic() if entered is None else entered
    state.wait_in(OpenCall("all_reduce()", now, now + 100, threading.get_ident(), sequence=1, participants=members))
    return state


def served(state: GroupState, standing: Callable[[], Trouble | None]) -> None:
    """As the monitor takes a group on."""
    state.serve("session", "", lambda incident: None, standing)


def inside(rank: int, posted: list[dict[str, Any]] | None = None) -> Sections:
    sections = Sections(rank, lambda: None)
    sections.enter("evaluation, try 1", ALL)
    return sections


def news(rank: int, what: TroubleKind) -> dict[str, object]:
    return {"section": "evaluation, try 1", "rank": rank, "what": what.value, "text": "KeyError: 'f1'"}


def test_a_rank_that_raises_says_so_once_and_reports_it_until_all_have_met() -> None:
    sections, posted = inside(2), []
    sections.step(time.monotonic(), posted.append, [])
    assert posted == []
    sections.leave("KeyError: 'f1'")
    assert sections.waiting
    for _ in range(2):
        sections.step(time.monotonic(), posted.append, [])
    assert [(entry["rank"], entry["what"], entry["text"], entry["members"]) for entry in posted] == [
        (2, "raised", "KeyError: 'f1'", list(ALL))
    ]
    state = GroupState("g", 2, ALL)
    served(state, sections.standing)
    assert state.answer().trouble == Trouble(TroubleKind.RAISED, "KeyError: 'f1'")
    sections.settle()
    assert sections.standing() is None


def test_a_rank_that_left_because_a_collective_failed_says_that_it_is_not_its_own_fault() -> None:
    sections, posted = inside(2), []
    sections.leave("PeerLost: rank 1 lost", follows=True)
    sections.step(time.monotonic(), posted.append, [])
    assert posted[0]["what"] == "gave up"
    assert sections.standing() == Trouble(TroubleKind.GAVE_UP, "PeerLost: rank 1 lost")


def test_a_rank_that_finished_says_so_only_when_nobody_follows() -> None:
    sections, posted = inside(2), []
    sections.leave()
    now = time.monotonic()
    sections.step(now, posted.append, [])
    assert posted == []
    sections.step(now + FINISHED_AFTER + 0.1, posted.append, [])
    assert posted[0]["what"] == "finished"


def test_who_waits_for_a_rank_that_raised_stops_at_once() -> None:
    sections, state = inside(0), waiting_state()
    sections.hear(news(2, TroubleKind.RAISED))
    sections.step(time.monotonic(), lambda entry: None, [state])
    assert state.member.trouble == Trouble(TroubleKind.TOLD, "rank 2: KeyError: 'f1'")


def test_who_waits_for_a_rank_that_finished_stops_after_a_moment() -> None:
    sections = inside(0)
    sections.hear(news(2, TroubleKind.FINISHED))
    state = waiting_state()
    now = time.monotonic()
    sections.step(now, lambda entry: None, [state])
    assert state.member.trouble is None
    sections.step(now + FINISHED_AFTER + 0.1, lambda entry: None, [state])
    assert state.member.trouble is not None


def test_calls_that_have_nothing_to_do_with_it_go_on() -> None:
    sections = inside(0)
    before, without = waiting_state(entered=time.monotonic() - 5), waiting_state(members=(0, 1, 3))
    sections.hear(news(2, TroubleKind.RAISED))
    sections.hear({**news(2, TroubleKind.RAISED), "section": "evaluation, try 2"})
    sections.step(time.monotonic(), lambda entry: None, [before, without])
    sections.leave()
    after = waiting_state()
    sections.step(time.monotonic(), lambda entry: None, [after])
    assert all(state.member.trouble is None for state in (before, without, after))


def test_news_of_past_sections_do_not_pile_up() -> None:
    sections = inside(0)
    for number in range(200):
        sections.hear({**news(2, TroubleKind.RAISED), "section": str(number)})
    assert len(sections._news) == module.REMEMBERED


def entered(rank: int) -> Report:
    told = Trouble(TroubleKind.TOLD, "rank 2 will not come")
    return Report(rank, 0, operation=Operation(1, 7, "all_reduce()"), phase=Phase.RUNNING, trouble=told)


def verdict(*reports: Report) -> Any:
    return decide(0, tuple(r.rank for r in reports), {r.rank: r for r in reports}, {}, {})


def test_the_verdict_names_the_rank_that_raised() -> None:
    found = verdict(entered(0), entered(1), Report(2, 0, trouble=Trouble(TroubleKind.RAISED, "KeyError")))
    assert (found.cause, found.culprits) == (Cause.FAILED, ((2, Cause.FAILED),))


def test_the_verdict_names_the_smaller_side_where_one_has_finished() -> None:
    done = Trouble(TroubleKind.FINISHED, "it has finished evaluation, try 1")
    found = verdict(entered(0), entered(1), Report(2, 0, trouble=done))
    assert (found.cause, found.culprits) == (Cause.DIVERGED, ((2, Cause.DIVERGED),))
    assert found.sides == (("all_reduce()", (0, 1)), ("nothing more: it has finished evaluation, try 1", (2,)))
    more = verdict(entered(0), Report(1, 0, trouble=done), Report(2, 0, trouble=done))
    assert more.culprits == ((0, Cause.DIVERGED),)
    assert verdict(entered(0), Report(1, 0, trouble=done)).culprits == ()


def test_a_mismatch_at_the_end_is_put_down_to_the_rank_that_raised() -> None:
    state = waiting_state(rank=2)
    raised = Trouble(TroubleKind.RAISED, "KeyError")
    served(state, lambda: raised)
    state.trouble(0, TroubleKind.MISMATCH, "others are elsewhere")
    assert state.answer().trouble == raised
    late = waiting_state(rank=2)
    served(late, lambda: raised)
    late.trouble(0, TroubleKind.DEADLINE, "3 s")
    assert late.answer().trouble == Trouble(TroubleKind.DEADLINE, "3 s")
