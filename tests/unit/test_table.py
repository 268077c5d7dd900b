"""The table of collectives, row by row: what is compared, who is needed, when ranks meet once more, how bytes count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ncclguard as ng
from ncclguard import collectives
from ncclguard.engine import table
from ncclguard.engine.chunking import ONE, plan
from ncclguard.engine.execution import Execution
from ncclguard.engine.table import TABLE, Arguments, Collective, Conditions, bus_factor
from ncclguard.outcome import Outcome
from ncclguard.protocol.decision import EVERYBODY, NOBODY

RANKS, RANK, ROOT = (2, 4, 6, 8), 4, 6
T, SLOTS = torch.ones(8), [torch.zeros(8) for _ in RANKS]
WITH_OP, WITH_ROOT = Arguments(T, op="SUM"), Arguments(T, root=ROOT)
SMALL, LARGE, KEPT = 32, 1 << 20, 4096  # bytes of one rank; up to how many a result is kept for ranks that miss it

#: Arguments -> detail for people, key for the comparison, who is needed, closing rounds of a small and a large call, factor of 4 ranks.
ROWS: dict[str, tuple[Arguments, str, tuple[object, ...], int, tuple[bool, bool], float]] = {
    "all_reduce": (WITH_OP, "SUM", ("SUM",), NOBODY, (False, True), 1.5),
    "barrier": (Arguments(), "", (), NOBODY, (False, False), 0.0),
    "broadcast": (WITH_ROOT, "src=6", (ROOT,), ROOT, (False, True), 1.0),
    "all_gather": (Arguments(T, SLOTS), "", (), NOBODY, (False, True), 0.75),
    "reduce_scatter": (Arguments(T, SLOTS, op="AVG"), "AVG", ("AVG",), EVERYBODY, (True, True), 0.75),
    "all_gather_object": (Arguments(T, SLOTS), "", (), NOBODY, (False, True), 0.75),
    "broadcast_object_list": (WITH_ROOT, "src=6", (ROOT,), ROOT, (False, True), 1.0),
    "send_recv": (WITH_ROOT, "src=6", (ROOT,), ROOT, (False, True), 1.0),
    "reduce": (Arguments(T, op="MAX", root=ROOT), "MAX, dst=6", ("MAX", ROOT), ROOT, (True, True), 1.0),
    "gather": (Arguments(T, SLOTS, root=ROOT), "dst=6", (ROOT,), EVERYBODY, (True, True), 1.0),
    "scatter": (Arguments(T, SLOTS, root=ROOT), "src=6", (ROOT,), EVERYBODY, (True, True), 1.0),
    "all_to_all": (Arguments(others=SLOTS, outputs=SLOTS), "", (), EVERYBODY, (True, True), 0.75),
}  # fmt: skip


def test_every_row_is_tested_here() -> None:
    assert list(ROWS) == list(TABLE)
    rows = {id(row) for row in TABLE.values()}
    others = [row for row in vars(table).values() if isinstance(row, Collective) and id(row) not in rows]
    assert others == [table.SPARSE_ALL_REDUCE]  # of the backend, another way to carry an all-reduce
    assert others[0].name in TABLE


@pytest.mark.parametrize("name", ROWS)
def test_what_people_read_and_ranks_compare(name: str) -> None:
    arguments, detail, key, _, _, _ = ROWS[name]
    row = TABLE[name]
    assert row.name == name
    assert row.detail(arguments) == detail
    assert row.key(arguments) == key


@pytest.mark.parametrize("name", ROWS)
def test_whom_it_cannot_go_on_without(name: str) -> None:
    arguments, _, _, awaited, _, _ = ROWS[name]
    assert TABLE[name].awaited(arguments) == awaited


@pytest.mark.parametrize("name", ROWS)
def test_when_all_ranks_meet_once_more(name: str) -> None:
    """Else a rank might miss a result that nobody has any more, or, where every result is its own, that nobody had."""
    _, _, _, _, (small, large), _ = ROWS[name]
    row = TABLE[name]
    assert row.closes(SMALL, len(RANKS), KEPT) is small
    assert row.closes(LARGE, len(RANKS), KEPT) is large
    assert row.closes(0, len(RANKS), 0) is (row.closing == "always")


@pytest.mark.parametrize(("name", "ranks"), [("all_reduce", 1), ("all_gather", 4)])
def test_a_result_is_kept_up_to_the_bytes_of_the_whole(name: str, ranks: int) -> None:
    """A gathered one is as large as those of all ranks together."""
    assert not TABLE[name].closes(KEPT // ranks, 4, KEPT)
    assert TABLE[name].closes(KEPT // ranks + 1, 4, KEPT)


@pytest.mark.parametrize("name", ROWS)
def test_how_its_bytes_count(name: str) -> None:
    assert bus_factor(name, 4) == ROWS[name][-1]


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_what_moves_its_data_is_made_of_its_arguments(name: str, closing: bool) -> None:
    cut = plan(8, 4) if name in ("all_reduce", "broadcast", "all_gather") else plan(0) if name == "barrier" else ONE
    made = TABLE[name].execution(ROWS[name][0], Conditions(RANKS, RANK, cut, closing))
    assert isinstance(made, Execution)
    assert made.plan.numel == cut.numel
    assert made.closing is {"by size": closing, "always": True, "never": False}[TABLE[name].closing]
    made.release()


def test_a_part_of_a_larger_operation_has_its_name_and_is_else_the_same() -> None:
    part = TABLE["all_gather"].named("all_to_all")
    assert part.name == "all_to_all"
    assert part.execution is TABLE["all_gather"].execution
    assert TABLE["all_gather"].name == "all_gather"


ALONE: dict[str, Callable[[], Outcome]] = {
    "safe_all_reduce": lambda: ng.safe_all_reduce(torch.ones(2)),
    "safe_barrier": lambda: ng.safe_barrier(),
    "safe_broadcast": lambda: ng.safe_broadcast(torch.ones(2), 0),
    "safe_all_gather": lambda: ng.safe_all_gather([torch.ones(2)], torch.ones(2)),
    "safe_reduce_scatter": lambda: ng.safe_reduce_scatter(torch.ones(2), [torch.ones(2)]),
    "safe_all_gather_object": lambda: ng.safe_all_gather_object([None], 1),
    "safe_broadcast_object_list": lambda: ng.safe_broadcast_object_list([1], 0),
}


def test_every_safe_function_is_called_here() -> None:
    functions: dict[str, Any] = vars(collectives)
    assert set(ALONE) == {name for name in functions if name.startswith("safe_")}
    assert set(ALONE) == {name for name in ng.__all__ if name.startswith("safe_")}


@pytest.mark.parametrize("name", ALONE)
def test_a_safe_function_runs_the_row_of_its_name(name: str) -> None:
    outcome = ALONE[name]()
    assert outcome.ok
    assert outcome.op == name.removeprefix("safe_")
    assert outcome.op in TABLE
