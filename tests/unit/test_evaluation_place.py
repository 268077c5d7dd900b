"""Ranks in different evaluations: which of them go on and which wait, decided from the places alone, alike on all ranks."""

from __future__ import annotations

import inspect
import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import ncclguard as ng
from ncclguard.evaluation.place import Place, Places, behind, described, elsewhere, start_counting

FIRST = Place("ev", 5, 40, 0, ("train.py:31 in main",), (), 0)


def at(line: int, known: int | None = 0, **changed: object) -> Place:
    return replace(FIRST, lines=(f"train.py:{line} in main",), known=known, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("places", "left"),
    [
        ((at(31), at(31), at(31)), ()),
        ((at(31), at(31, step=6), at(31, step=6)), (0,)),
        ((at(31, known=0), at(32, known=1)), (0,)),  # rank 1 left out the first of two
        ((at(31, known=0, number=1), at(32, known=1)), (1,)),
        ((at(31, number=2), at(31, step=6)), (0,)),  # of a loop with fewer rounds on rank 1
        ((at(31, known=None), at(32, known=None)), ()),  # two branches of the program
        ((at(31, known=None), at(32, known=7)), ()),
        ((at(31, words=("val",)), at(31, words=("test",), known=1)), (0,)),
        ((at(31, step=None), at(31, step=None, updates=41)), (0,)),
        ((at(31), at(31, updates=41)), ()),  # the step is given, so that the count of updates says nothing
        ((at(31), at(31, step=None)), (0, 1)),  # nobody can tell
        ((at(31, known=None), at(31, function="other", known=None)), (0,)),
    ],
)
def test_those_behind_go_on(places: tuple[Place, ...], left: tuple[int, ...]) -> None:
    assert behind(places) == frozenset(left)


def test_a_rank_outside_the_majority_is_named_and_nobody_without_one() -> None:
    assert elsewhere((at(31), at(31), at(32))) == {2}
    assert elsewhere((at(31), at(32))) == frozenset()
    assert described((at(31), at(31), at(32, step=6)), (4, 5, 6)) == (
        (4, "evaluation ev() at step 5, called at train.py:31 in main"),
        (6, "evaluation ev() at step 6, called at train.py:32 in main"),
    )


def test_whatever_a_rank_leaves_out_all_meet_again_and_never_in_different_evaluations() -> None:
    """Each rank leaves out evaluations at random; the last one nobody does. Those in a loop carry a name."""
    for seed in range(300):
        chance = random.Random(seed)
        calls = [(31, ()), (32, ()), (33, ("val",)), (33, ("test",)), (34, ())]
        steps = [(step, call) for step in range(6) for call in calls]
        order = {call: number for number, call in enumerate(calls)}
        programs = [
            [one for one in steps if one[0] == 0 or one == steps[-1] or chance.random() < 0.7] for _ in range(3)
        ]
        seen: list[int] = [0, 0, 0]
        together = []
        for _ in range(1000):
            here = [program[position] for program, position in zip(programs, seen, strict=True)]
            places = [at(call[0], order[call], step=step, words=call[1]) for step, call in here]
            left = behind(places) or frozenset(range(3))
            if len(left) == 3:
                assert len(set(here)) == 1, here
                together.append(here[0])
            for rank in left:
                seen[rank] += 1
            if seen[0] == len(programs[0]):
                break
        assert together[-1] == steps[-1]
        everywhere = [one for one in steps if all(one in program for program in programs)]
        assert together == everywhere, "one that all ranks called was lost"


def test_places_follow_training_so_that_a_skipped_evaluation_shifts_nothing() -> None:
    start_counting()
    places = Places("evaluate")

    def label(step: int | None) -> str:
        return places.next(step, (), (0,)).label()

    assert label(100) == "evaluation evaluate() at step 100"
    assert label(100) == "evaluation evaluate() at step 100, number 2 there"
    assert label(200) == "evaluation evaluate() at step 200"
    first = label(None)
    assert first.startswith("evaluation evaluate() after ")
    assert label(None) == f"{first}, number 2 there"
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()
    steps = int(first.split()[3])
    assert label(None) == f"evaluation evaluate() after {steps + 1} optimizer steps"


def test_ranks_that_meet_agree_on_a_name_that_no_other_evaluation_has() -> None:
    members = (0, 1)
    one, other = Places("evaluate"), Places("evaluate")
    left_out = one.next(5, (), members)
    mine, others = one.next(5, (), members), other.next(5, (), members)
    assert one.meet((mine, others), members) == other.meet((mine, others), members)
    assert one.meet((mine, others), members) != left_out.label()
    assert other.next(5, (), members).label() == one.next(5, (), members).label()


def test_lines_tell_calls_apart_and_known_ones_are_remembered() -> None:
    members = (70, 71)
    places = Places("evaluate")
    here = inspect.currentframe()
    assert here is not None
    first, second = (places.next(1, (), members), places.next(1, (), members))
    assert first.lines[0].startswith(f"tests/unit/test_evaluation_place.py:{here.f_lineno - 1} in test_lines")
    assert first.known is None
    assert second.number == 1
    for expected, step in itertools.product((None, 0), (2,)):
        place = places.next(step, ("val",), members)
        assert place.known == expected
        places.meet((place, place), members)


@pytest.mark.parametrize("kind", ["generator", "coroutine", "asynchronous generator"])
def test_a_function_whose_call_runs_nothing_is_refused(kind: str) -> None:
    def generator():  # type: ignore[no-untyped-def]
        yield 1

    async def coroutine() -> None: ...

    async def asynchronous_generator():  # type: ignore[no-untyped-def]
        yield 1

    function = {"generator": generator, "coroutine": coroutine, "asynchronous generator": asynchronous_generator}[kind]
    with pytest.raises(TypeError, match="its call evaluates nothing yet"):
        ng.resilient_evaluate(function)
