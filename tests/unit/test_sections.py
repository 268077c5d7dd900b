"""Who is told when a rank raises, or comes to the end, in a section that others are still in; and what the verdict says."""

from __future__ import annotations

import threading
import time
from typing import Any

from ncclguard.agreement import sections as module
from ncclguard.agreement.decision import Operation, Phase, Report, Trouble, TroubleKind, decide
from ncclguard.agreement.protocol import Entry
from ncclguard.agreement.seat import OpenCall, Seat
from ncclguard.agreement.sections import FINISHED_AFTER, Sections
from ncclguard.outcome import Cause

ALL = (0, 1, 2, 3)


def waiting_seat(rank: int = 0, members: tuple[int, ...] = ALL, entered: float | None = None) -> Seat:
    """A rank in a collective that has not ended."""
    seat = Seat("g", rank, members)
    entry, _ = seat.member.enter(Operation(0, 7, "all_reduce()"))
    assert entry is Entry.START
    now = time.monotonic() if entered is None else entered
    seat.call = OpenCall("all_reduce()", now, now + 100, threading.get_ident(), sequence=1, participants=members)
    return seat


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
    seat = Seat("g", 2, ALL)
    seat.standing = sections.standing
    assert seat.answer().trouble == Trouble(TroubleKind.RAISED, "KeyError: 'f1'")
    sections.settle()
    assert sections.standing() is None


def test_a_rank_that_finished_says_so_only_when_nobody_follows() -> None:
    sections, posted = inside(2), []
    sections.leave()
    now = time.monotonic()
    sections.step(now, posted.append, [])
    assert posted == []
    sections.step(now + FINISHED_AFTER + 0.1, posted.append, [])
    assert posted[0]["what"] == "finished"


def test_who_waits_for_a_rank_that_raised_stops_at_once() -> None:
    sections, seat = inside(0), waiting_seat()
    sections.hear(news(2, TroubleKind.RAISED))
    sections.step(time.monotonic(), lambda entry: None, [seat])
    assert seat.member.trouble == Trouble(TroubleKind.TOLD, "rank 2: KeyError: 'f1'")


def test_who_waits_for_a_rank_that_finished_stops_after_a_moment() -> None:
    sections = inside(0)
    sections.hear(news(2, TroubleKind.FINISHED))
    seat = waiting_seat()
    now = time.monotonic()
    sections.step(now, lambda entry: None, [seat])
    assert seat.member.trouble is None
    sections.step(now + FINISHED_AFTER + 0.1, lambda entry: None, [seat])
    assert seat.member.trouble is not None


def test_calls_that_have_nothing_to_do_with_it_go_on() -> None:
    sections = inside(0)
    before, without = waiting_seat(entered=time.monotonic() - 5), waiting_seat(members=(0, 1, 3))
    sections.hear(news(2, TroubleKind.RAISED))
    sections.hear({**news(2, TroubleKind.RAISED), "section": "evaluation, try 2"})
    sections.step(time.monotonic(), lambda entry: None, [before, without])
    sections.leave()
    after = waiting_seat()
    sections.step(time.monotonic(), lambda entry: None, [after])
    assert all(seat.member.trouble is None for seat in (before, without, after))


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
    seat = waiting_seat(rank=2)
    seat.standing = lambda: Trouble(TroubleKind.RAISED, "KeyError")
    seat.trouble(0, TroubleKind.MISMATCH, "others are elsewhere")
    assert seat.answer().trouble == Trouble(TroubleKind.RAISED, "KeyError")
    late = waiting_seat(rank=2)
    late.standing = seat.standing
    late.trouble(0, TroubleKind.DEADLINE, "3 s")
    assert late.answer().trouble == Trouble(TroubleKind.DEADLINE, "3 s")
