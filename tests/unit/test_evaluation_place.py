"""Ranks in different evaluations: which of them go on and which wait, decided from the places alone, alike on all ranks."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import ncclguard as ng
from ncclguard import optimizer_steps
from ncclguard.evaluation import place as module
from ncclguard.evaluation.place import (
    Place,
    Places,
    behind,
    described,
    elsewhere,
    position,
    start_counting,
    step_of,
    take_position,
)
from ncclguard.optimizer_steps import uncounted

FIRST = Place("job.ev", "ev", 5, 0, 0, 0, ("train.py:31 in main",))


def at(step: int | None = 5, repeated: int = 0, line: int = 31, **changed: object) -> Place:
    lines = (f"train.py:{line} in main",)
    return replace(FIRST, step=step, repeated=repeated, lines=lines, **changed)  # type: ignore[arg-type]


OTHER = at(function="job.other", name="other", known=1)


@pytest.mark.parametrize(
    ("places", "left"),
    [
        ((at(), at(), at()), ()),
        ((at(), at(6), at(6)), (0,)),
        ((at(repeated=2), at(6)), (0,)),  # rank 1 left one of three out
        ((at(line=31), at(line=32)), ()),  # two branches of the program, for all that can be known
        ((at(None, updates=40), at(None, updates=40)), ()),
        ((at(None, updates=40), at(None, updates=40, repeated=1)), (0,)),
        ((at(None, updates=40), at(None, updates=41)), (0, 1)),  # a rank may make more steps than others
        ((at(), at(None, updates=5)), (0, 1)),
        ((at(), OTHER), (0,)),  # which all met in after the first
        ((at(known=2), OTHER), (1,)),
    ],
)
def test_those_behind_go_on(places: tuple[Place, ...], left: tuple[int, ...]) -> None:
    assert behind(places) == frozenset(left)


def test_a_rank_outside_the_majority_is_named_and_nobody_without_one() -> None:
    assert elsewhere((at(), at(), at(6))) == {2}
    assert elsewhere((at(), at(6))) == frozenset()
    assert described((at(), at(), at(6, line=32)), (4, 5, 6)) == (
        (4, "evaluation ev() at step 5, called at train.py:31 in main"),
        (6, "evaluation ev() at step 6, called at train.py:32 in main"),
    )


def test_whatever_a_rank_leaves_out_all_meet_again_and_never_in_different_functions_or_steps() -> None:
    """Each rank leaves out evaluations at random; at the first step and the last it leaves out none."""
    names = ("validate", "ev", "test")
    for seed in range(300):
        chance = random.Random(seed)
        steps = [(step, name) for step in range(6) for name in names]
        programs = [[one for one in steps if one[0] in (0, 5) or chance.random() < 0.7] for _ in range(3)]
        seen: list[int] = [0, 0, 0]
        together = []
        for _ in range(1000):
            here = [program[position] for program, position in zip(programs, seen, strict=True)]
            places = [at(step, function=name, name=name, known=names.index(name)) for step, name in here]
            left = behind(places) or frozenset(range(3))
            if len(left) == 3:
                assert len(set(here)) == 1, here
                together.append(here[0])
            for rank in left:
                seen[rank] += 1
            if seen[0] == len(programs[0]):
                break
        assert together == [one for one in steps if all(one in program for program in programs)]


def evaluate() -> None: ...


def test_places_follow_training_so_that_a_skipped_evaluation_shifts_nothing() -> None:
    start_counting()
    places = Places(evaluate)

    def label(step: int | None) -> str:
        return places.next(step, (0,)).label

    assert label(100) == "evaluation evaluate() at step 100"
    assert label(100) == "evaluation evaluate() at step 100, number 2 there"
    assert label(200) == "evaluation evaluate() at step 200"
    first = label(None)
    assert first.startswith("evaluation evaluate() after ")
    assert label(None) == f"{first}, number 2 there"
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with uncounted():
        optimizer.step()  # of a probe, say
    assert label(None) == f"{first}, number 3 there"
    optimizer.step()
    assert label(None) == f"evaluation evaluate() after {int(first.split()[3]) + 1} optimizer steps"


def test_who_takes_a_lost_ranks_place_is_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In optimizer steps, in the evaluations at one step, and in the order in which the functions were first called."""

    def other() -> None: ...

    members = (60, 61)
    for name, empty in (("_counters", {}), ("_met", {}), ("_before", 0)):
        monkeypatch.setattr(module, name, empty)
    monkeypatch.setattr(optimizer_steps, "_made", 7)
    for function, step in ((evaluate, None), (other, 5), (other, 5)):
        places = Places(function)
        places.meet([places.next(step, members)] * 2, members)
    said = position()
    theirs = [Places(evaluate).next(None, members), Places(other).next(5, members)]
    for name, empty in (("_counters", {}), ("_met", {}), ("_before", 0)):
        monkeypatch.setattr(module, name, empty)
    monkeypatch.setattr(optimizer_steps, "_made", 3)
    take_position(said)
    mine = [Places(evaluate).next(None, members), Places(other).next(5, members)]
    assert [(p.at, p.repeated, p.known) for p in mine] == [((None, 7), 1, 0), ((5, 0), 2, 1)]
    assert [p.evaluation for p in mine] == [p.evaluation for p in theirs]
    assert not behind([mine[1], theirs[1]])


def test_after_one_was_left_out_all_count_on_from_the_furthest() -> None:
    members = (80, 81)
    places = Places(evaluate)
    mine = places.next(7, members)
    places.miss((mine, replace(mine, repeated=4), replace(mine, step=8, repeated=9)), members)
    assert places.next(7, members).repeated == 5
    places.miss((mine,), members)
    assert places.next(7, members).repeated == 6


def test_a_function_that_is_decorated_again_counts_on() -> None:
    assert Places(evaluate).next(7, (3, 4)).repeated == 0
    assert Places(evaluate).next(7, (3, 4)).repeated == 1
    assert Places(evaluate).next(7, (3, 5)).repeated == 0, "of another group"


def test_different_lines_are_told_of_once_and_always_after_an_evaluation_was_left_out_beside_them() -> None:
    members = (70, 71)
    places = Places(evaluate)
    here = inspect.currentframe()
    assert here is not None
    mine = places.next(1, members)
    assert mine.lines[0] == f"tests/unit/test_evaluation_place.py:{here.f_lineno - 1} in {here.f_code.co_name}"
    split = (mine, replace(mine, lines=("train.py:32 in main",)))
    assert not places.meet((mine, mine), members)
    assert places.meet(split, members)
    assert not places.meet(split, members)
    places.miss(split, members)
    assert places.meet(split, members) and places.meet(split, members)


@pytest.mark.parametrize("step", [7, np.int64(7), torch.tensor(7)])
def test_a_step_is_any_whole_number(step: object) -> None:
    assert step_of(lambda step: None, None, (step,), {}) == 7
    assert step_of(lambda step: None, None, (True,), {}) is None
    assert step_of(lambda step: None, None, (torch.tensor([1.5, 2.0]),), {}) is None


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
