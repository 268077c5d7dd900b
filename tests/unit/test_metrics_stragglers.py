"""The table of stragglers, out of what all ranks have told at several exchanges."""

from __future__ import annotations

import math
import types

import hypothesis
import numpy as np
import pytest
from hypothesis import given, strategies as st

from ncclguard.metrics import statistics as module
from ncclguard.metrics.records import StragglerTable
from ncclguard.metrics.statistics import WINDOW, RankStatistics, Stragglers, combine, encode


def told(waits: list[float], number: int) -> RankStatistics:
    return RankStatistics(pid=100 + number, host=f"node{number}", waits=tuple(waits))


def table_of(*exchanges: tuple[tuple[int, ...], list[RankStatistics]]) -> StragglerTable:
    """The table after exchanges of (ranks, what they told)."""
    stragglers = Stragglers("0:cpu")
    assert stragglers.table() is None
    for ranks, gathered in exchanges:
        stragglers.add(ranks, combine([encode(one) for one in gathered]), "0:cpu:ab/30")
    table = stragglers.table()
    assert table is not None
    return table


def test_who_waits_least_came_last() -> None:
    """Rank 5 comes 0.3 s, then 0.1 s after the first; rank 3 once 0.2 s after it."""
    found = table_of(((1, 3, 5), [told([0.3, 0.1, 0.2], 1), told([0.29, 0.1, 0.0], 3), told([0.0, 0.0, 0.2], 5)]))
    assert (found.operations, found.through) == (3, "0:cpu:ab/30")
    assert [row.rank for row in found.rows] == [5, 3, 1]
    slowest = found.slowest
    assert slowest is not None
    assert (slowest.host, slowest.pid, slowest.last) == ("node5", 105, 2)
    assert slowest.behind == pytest.approx((0.3 + 0.1 + 0.0) / 3)
    assert slowest.behind_longest == pytest.approx(0.3)
    assert slowest.held_up == pytest.approx(0.29 + 0.1)  # without it the next to last would have been waited for
    assert found.rows[1].held_up == pytest.approx(0.2)


def test_operations_that_one_rank_has_not_measured_are_left_out() -> None:
    assert table_of(((0, 1), [told([0.3, -1.0, 0.2], 0), told([-1.0, 0.1, 0.0], 1)])).operations == 1
    nothing = table_of(((0, 1), [told([-1.0], 0), told([0.1], 1)]))
    assert (nothing.operations, nothing.rows, nothing.slowest) == (0, (), None)


@hypothesis.settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 40))
def test_the_table_looks_back_on_a_bounded_number_of_operations(size: int, exchanges: int) -> None:
    ranks = tuple(range(size))
    found = table_of(*((ranks, [told([0.1 * number] * 16, one) for one in ranks]) for number in range(exchanges)))
    assert found.operations == min(WINDOW, 16 * exchanges)
    assert all(math.isclose(row.behind, 0) for row in found.rows)


def test_ranks_that_have_gone_leave_the_table() -> None:
    found = table_of(
        ((0, 1, 2), [told([0.1], one) for one in range(3)]), ((0, 2), [told([0.1, 0.2], one) for one in (0, 2)])
    )
    assert sorted(row.rank for row in found.rows) == [0, 2]
    assert found.operations == 2


def test_a_thousand_ranks_stay_within_the_memory() -> None:
    ranks, rng = tuple(range(1000)), np.random.default_rng(0)
    gathered = [told(list(rng.random(32)), one) for one in ranks]
    found = table_of(*[(ranks, gathered)] * 40)
    assert found.operations == WINDOW
    assert len(found.rows) == 1000


def test_a_table_says_how_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank on another host it is all that is known, and in a hang it stands still."""
    now = 100.0
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now))
    stragglers = Stragglers("0:cpu")
    stragglers.add((0, 1), combine([encode(told([0.1], one)) for one in range(2)]), "0:cpu:ab/30")
    now = 107.0
    table = stragglers.table()
    assert table is not None
    assert table.age == 7.0
