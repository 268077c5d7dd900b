"""What an exchange carries, and what follows from it: pure functions of what all ranks have gathered."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, strategies as st

from ncclguard.config import GuardConfig, configure
from ncclguard.coordination.group_state import GroupState, OpenCall
from ncclguard.coordination.inquiry import Patience
from ncclguard.engine import runtime
from ncclguard.engine.attempt import Attempts
from ncclguard.errors import GuardConfigError
from ncclguard.metrics import exchange, settings
from ncclguard.metrics.exchange import Bounds, SettingChange
from ncclguard.metrics.settings import SETTINGS, Settings
from ncclguard.metrics.statistics import MAX_WAITS, PHASES, Combined, RankStatistics, combine, decode, encode, size
from ncclguard.protocol.group_key import GroupKey

OFF = Bounds(adjust=False, timeout=(60.0, 3600.0), chunk_numel=(1_000_000, 100_000_000))
ON = replace(OFF, adjust=True)
TRAIN = PHASES.index("train")
LIMITS = (None, 600.0, 1800.0, 300.0)


def rank(**changes: Any) -> RankStatistics:
    return RankStatistics(**{"pid": 1, "host": "node1", "waits": (), "limits": LIMITS, "operations": 100, **changes})


def by_phase(value: Any, zero: Any = 0) -> tuple[Any, ...]:
    return tuple(value if index == TRAIN else zero for index in range(len(PHASES)))


def together(ranks: Sequence[RankStatistics]) -> Combined:
    """As every rank receives it."""
    return combine([encode(one) for one in ranks])


def decide(ranks: Sequence[RankStatistics], bounds: Bounds) -> tuple[Settings, tuple[SettingChange, ...]]:
    return exchange.decide(together(ranks), bounds)


# ---------------------------------------------------------------------- the bytes of an exchange

seconds = st.floats(min_value=0, max_value=1e6)
value = st.none() | st.floats(min_value=0.001, max_value=1e9)
values = st.lists(st.tuples(st.sampled_from(SETTINGS), value), max_size=len(SETTINGS)).map(
    lambda pairs: tuple((name, dict(pairs)[name]) for name in SETTINGS if name in dict(pairs))
)
statistics = st.builds(
    RankStatistics,
    pid=st.integers(0, 1 << 22),
    host=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=32),
    waits=st.lists(st.floats(min_value=-1, max_value=1e5, width=32), max_size=64).map(tuple),
    limits=st.tuples(value, value, value, value),
    longest=st.tuples(seconds, seconds, seconds, seconds),
    expired=st.tuples(*[st.integers(0, 1000)] * 4),
    operations=st.integers(0, 1 << 40),
    retries=st.integers(0, 100),
    moved_bytes=st.floats(0, 1e18),
    moved_seconds=st.just(0.0) | st.floats(min_value=1e-6, max_value=1e6),
    piece=st.integers(0, 1 << 50),
    proposal=st.integers(0, 1 << 50),
    proposed=values,
    settings=st.builds(Settings, values, st.integers(0, 1 << 50), st.floats(0, 1e15), st.sampled_from([-1, 0, 1])),
)


@hypothesis.settings(max_examples=50)
@given(statistics)
def test_statistics_come_out_as_they_went_in(one: RankStatistics) -> None:
    data = encode(one)
    assert len(data) == size(len(one.waits))
    assert decode(data) == one


def test_bytes_of_another_version_are_refused() -> None:
    with pytest.raises(ValueError, match="same version"):
        decode(b"\0" * 17)


# ---------------------------------------------------------------------- proposals


def test_without_proposal_and_measurements_nothing_changes() -> None:
    assert decide([rank(), rank()], OFF) == (Settings(), ())
    assert decide([rank(), rank()], ON) == (Settings(), ())


def test_the_newest_proposal_of_any_rank_is_taken_once() -> None:
    proposed = (("timeout_train", 900.0), ("chunk_numel", None))
    gathered = [rank(proposal=3, proposed=(("timeout", 1.0),)), rank(proposal=7, proposed=proposed), rank()]
    settled, changes = decide(gathered, OFF)
    assert settled.changed() == {"timeout_train": 900.0, "chunk_numel": None}
    assert settled.proposal == 7
    assert [(change.name, change.old, change.new) for change in changes] == [
        ("timeout_train", 600.0, 900.0),
        ("chunk_numel", None, None),
    ]
    again = [replace(one, settings=settled, proposal=7, proposed=proposed) for one in gathered]
    assert decide(again, OFF) == (settled, ())


def test_a_queue_of_the_backend_takes_limits_only() -> None:
    gathered = [rank(proposal=7, proposed=(("timeout", 900.0), ("chunk_numel", 5e7)), piece=8_000_000, retries=1)]
    settled, changes = decide(gathered, replace(ON, names=settings.LIMITS))
    assert settled.changed() == {"timeout": 900.0}
    assert [change.name for change in changes] == ["timeout"]
    settings.apply("g", Settings((("timeout", 5.0), ("chunk_numel", 7.0))))
    settings.apply("g", settled, settings.LIMITS)
    assert settings.adjusted.pop("g").settings.changed() == {"chunk_numel": 7.0, "timeout": 900.0}


@pytest.mark.parametrize(
    ("key", "exchanges"),
    [
        ("0:cpu:ab12", settings.SETTINGS),
        ("0:cuda:ab12", settings.SETTINGS),
        ("0:cpu:backend:ab12", settings.LIMITS),
        ("0:cpu:backend:0>1:ab12", None),
        ("anything", None),
    ],
)
def test_which_groups_exchange_what(key: str, exchanges: tuple[str, ...] | None) -> None:
    try:
        made = exchange.of_group(GroupKey.parse(key), GuardConfig())
        assert (None if made is None else made._bounds.names) == exchanges
        assert exchange.exchanges() == ([] if made is None else [made])
        again = exchange.of_group(GroupKey.parse(key), GuardConfig())
        assert exchange.exchanges() == ([] if again is None else [again])  # that of the group before listens no more
        assert exchange.of_group(GroupKey.parse(key), GuardConfig(statistics_every=0)) is None
    finally:
        exchange.forget()
    assert exchange.exchanges() == []


def test_a_rank_that_missed_an_exchange_is_in_step_after_the_next() -> None:
    ours = Settings((("timeout", 900.0),), proposal=7)
    settled, _ = decide([rank(settings=ours, proposal=7), rank()], OFF)
    assert settled == ours


@hypothesis.settings(max_examples=30)
@given(st.lists(statistics, min_size=1, max_size=4))
def test_what_is_combined_is_what_each_rank_has_told(ranks: list[RankStatistics]) -> None:
    ranks = [replace(one, waits=one.waits[:3] + (-1.0,) * (3 - len(one.waits[:3]))) for one in ranks]
    found = together(ranks)
    assert (found.first, found.newest) == (ranks[0], max(ranks, key=lambda one: one.proposal))
    for index in range(len(PHASES)):
        limits = [one.limits[index] for one in ranks]
        assert found.limits[index] == (None if None in limits else max(limit for limit in limits if limit is not None))
        assert found.longest[index] == max(one.longest[index] for one in ranks)
        assert found.expired[index] == max(one.expired[index] for one in ranks)
    assert (found.operations, found.retries) == (min(r.operations for r in ranks), max(r.retries for r in ranks))
    assert found.piece == max(one.piece for one in ranks)
    idle = any(one.moved_seconds <= 0 for one in ranks)
    assert found.rate == (0.0 if idle else min(one.moved_bytes / one.moved_seconds for one in ranks))
    assert found.waits.tolist() == [list(one.waits) for one in ranks]
    assert [(host.decode(), int(pid)) for host, pid in found.processes.tolist()] == [(r.host, r.pid) for r in ranks]


def test_statistics_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="same version"):
        together([rank(waits=(0.1,)), rank()])


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("changes", "expected", "why"),
    [
        ({"expired": by_phase(2)}, 1200.0, "a deadline passed 2 times"),
        ({"longest": by_phase(400.0, 0.0)}, 1200.0, "an operation took 400 s of 600 s"),
        ({"longest": by_phase(1.0, 0.0)}, 300.0, "no operation took more than 1 s"),
        ({"longest": by_phase(20.0, 0.0)}, 400.0, "no operation took more than 20 s"),
        ({"longest": by_phase(1.0, 0.0), "limits": (None, 70.0, 1800.0, 300.0)}, None, "a lower bound of 60 is no change worth it"),
        ({"longest": by_phase(1.0, 0.0), "operations": 3}, None, "three operations say little"),
        ({"longest": by_phase(100.0, 0.0)}, None, "a sixth of the limit is as it should be"),
        ({"expired": by_phase(1), "limits": (None, 3600.0, 1800.0, 300.0)}, None, "at the upper bound"),
        ({"expired": by_phase(1), "limits": (None, 7200.0, 1800.0, 300.0)}, None, "never lowered by a failure"),
        ({"longest": by_phase(1.0, 0.0), "limits": (None, 40.0, 1800.0, 300.0)}, None, "never raised by a success"),
    ],
)  # fmt: skip
def test_a_limit_moves_with_what_was_measured(changes: dict[str, Any], expected: float | None, why: str) -> None:
    """On one rank is enough."""
    limits = changes.get("limits", LIMITS)
    settled, made = decide([rank(limits=limits), rank(**changes), rank(limits=limits)], ON)
    assert settled.get("timeout_train") == expected, why
    if expected is not None:
        assert [change.name for change in made] == ["timeout_train"]
        assert why in made[0].reason
    assert decide([rank(**changes)] * 2, OFF) == (Settings(), ())


def test_limits_that_go_by_size_are_left_alone() -> None:
    longest = (1000.0, 0.0, 0.0, 0.0)
    assert decide([rank(longest=longest, expired=(1, 0, 0, 0))], ON) == (Settings(), ())
    settled, _ = decide([rank(longest=longest, limits=(1200.0, 600.0, 1800.0, 300.0))], ON)
    assert settled.changed() == {"timeout": 2400.0}


def test_what_was_set_from_outside_is_not_adjusted_at_the_same_time() -> None:
    gathered = [rank(proposal=1, proposed=(("timeout_train", 100.0),), expired=by_phase(1))]
    settled, changes = decide(gathered, ON)
    assert settled.changed() == {"timeout_train": 100.0}
    assert len(changes) == 1


# ---------------------------------------------------------------------- pieces


def search(rate_of: Any, start: int, exchanges: int = 12) -> tuple[list[float | None], tuple[SettingChange, ...]]:
    """The lengths that a search goes through when pieces of a length move at `rate_of(length)` bytes/s."""
    settled, seen, made = Settings(), [], ()
    for _ in range(exchanges):
        length = settled.get("chunk_numel") or start
        moved = {"moved_bytes": rate_of(length), "moved_seconds": 1.0, "piece": start}
        settled, changes = decide([rank(settings=settled, **moved)] * 2, ON)
        made += changes
        seen.append(settled.get("chunk_numel"))
    return seen, made


def test_pieces_grow_as_long_as_it_helps_and_then_stay() -> None:
    seen, changes = search(lambda length: 1e9 * min(length, 8e6) / 8e6, 2_000_000)
    assert seen[:2] == [4e6, 8e6]
    assert seen[-1] == seen[-4]
    assert seen[-1] == 16e6  # neither better nor worse than 8e6
    assert all(change.name == "chunk_numel" and "GB/s" in change.reason for change in changes)


def test_pieces_shrink_when_that_helps() -> None:
    seen, _ = search(lambda length: 1e9 * 4e6 / max(length, 4e6), 32_000_000)
    assert seen[-1] == seen[-4]
    assert seen[-1] == 2e6  # neither better nor worse than 4e6


@hypothesis.settings(max_examples=50)
@given(st.integers(1024, 1 << 33), st.floats(0.1, 10), st.floats(1e4, 1e10))
def test_the_search_ends_within_the_bounds(start: int, slope: float, best: float) -> None:
    seen, changes = search(lambda length: 1e9 * math.exp(-slope * abs(math.log(length / best))), start, exchanges=40)
    assert seen[-1] == seen[-8]
    assert all(length is None or ON.chunk_numel[0] <= length <= ON.chunk_numel[1] for length in seen)
    assert all(change.old != change.new for change in changes)


def test_pieces_are_halved_when_tries_are_repeated() -> None:
    settled, changes = decide([rank(piece=8_000_000), rank(piece=8_000_000, retries=2)], ON)
    assert settled.get("chunk_numel") == 4_000_000
    assert changes[0].reason == "2 tries were repeated"
    at_bound = [rank(piece=1_000_000, retries=1)]
    assert decide(at_bound, ON)[1] == ()


# ---------------------------------------------------------------------- settings of a group


def test_a_group_with_changed_settings_has_a_configuration_of_its_own() -> None:
    config = GuardConfig(timeout=100)
    changed = settings.AdjustedConfig(Settings((("timeout", 900.0), ("chunk_numel", 5e7), ("max_attempts", 2.0))))
    over = changed.over(config)
    assert (over.timeout, over.chunk_numel, over.max_attempts) == (900.0, 50_000_000, 2)
    assert isinstance(over.chunk_numel, int)
    assert changed.over(config) is over
    assert over.timeout_eval == config.timeout_eval
    assert changed.over(GuardConfig(timeout_eval=7)).timeout_eval == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"statistics_every": 10, "rounds": False},
        {"adjust": True, "statistics_every": 0},
        {"adjust": True, "rounds": False},
        {"adjust_timeout_min": 100, "adjust_timeout_max": 50},
        {"adjust_chunk_min": 5000, "adjust_chunk_max": 2000},
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(GuardConfigError, match=next(iter(wrong))):
        GuardConfig(**wrong)


@pytest.mark.parametrize(
    ("given", "every"),
    [
        ({}, 100),
        ({"rounds": False}, 0),
        ({"rounds": False, "statistics_every": 0}, 0),
        ({"statistics_every": 0}, 0),
        ({"statistics_every": 7, "adjust": True}, 7),
        ({"adjust": True}, 100),
    ],
)
def test_statistics_are_exchanged_wherever_they_can_be(given: dict[str, Any], every: int) -> None:
    config = GuardConfig(**given)
    assert config.exchange_every == every
    assert exchange.terms(config).get("statistics_every", 0) == every
    assert exchange.terms(config) == exchange.terms(GuardConfig(**{**given, "statistics_every": every}))


def test_patience_is_that_of_now() -> None:
    """The monitor asks for it at each look: a job that has started takes what is configured, and what its group agreed on."""
    state = GroupState("0:cpu:ab12", 0, (0, 1))
    try:
        assert runtime._patience(state) == Patience(30.0, None)
        configure(warn_after=7)
        settings.apply("0", Settings((("stuck_timeout", 60.0),)))
        assert runtime._patience(state) == Patience(7.0, 60.0)
        assert runtime._patience(GroupState("1:cpu:ab12", 0, (0, 1))) == Patience(7.0, None)
    finally:
        exchange.forget()


# ---------------------------------------------------------------------- how the bytes travel


class OnGpus:
    """A communicator whose own votes have no room, and which has another for the host's memory."""

    ranks, payload_nbytes = (0, 1, 2), 0

    def __init__(self, host: TogetherOnOneRank) -> None:
        self.host = host


class TogetherOnOneRank:
    """A communicator of three ranks that all tell the same, with or without room in its votes."""

    ranks = (0, 1, 2)

    def __init__(self, payload_nbytes: int) -> None:
        self.payload_nbytes = payload_nbytes
        self.votes = 0
        self.memory = torch.empty(0)
        self.host = self

    def agree(self, value: int, payload: torch.Tensor) -> TogetherOnOneRank:
        self.votes += 1
        self.memory = payload.clone()
        return self

    def all_gather(self, slots: list[torch.Tensor], mine: torch.Tensor) -> TogetherOnOneRank:
        for slot in slots:
            slot.copy_(mine)
        return self

    def wait(self, seconds: float) -> bool:
        return True

    def payload(self, index: int) -> bytes:
        return self.memory.numpy().tobytes()


class Told:
    """Statistics that are any bytes, and what came of all ranks."""

    def __init__(self, mine: bytes) -> None:
        self.mine = mine
        self.everybody: tuple[tuple[int, ...], list[bytes]] | None = None

    def payload(self, call: OpenCall) -> bytes:
        return self.mine

    def gathered(self, call: OpenCall, ranks: tuple[int, ...], parts: list[bytes]) -> None:
        self.everybody = ranks, parts


@pytest.mark.parametrize("gpus", [False, True])
@pytest.mark.parametrize(("room", "votes"), [(496, 1), (0, 0)])
def test_an_exchange_rides_in_a_vote_of_the_host_where_it_fits(room: int, votes: int, gpus: bool) -> None:
    """It does with the 496 bytes that a vote carries in groups of up to 64 ranks; there a collective would cost ten times as much."""
    told = encode(rank(waits=(0.1,) * MAX_WAITS))
    communicator = TogetherOnOneRank(room)
    statistics, call = Told(told), OpenCall("barrier()", 0.0, time.monotonic() + 60, 0, sequence=20)
    attempts: Any = Attempts(GroupState("0:cpu:ab12", 0, (0, 1, 2)), Any, True, statistics, Any)  # type: ignore[arg-type]
    attempts._exchange(statistics, OnGpus(communicator) if gpus else communicator, 0, call)
    communicator.memory.fill_(0)  # the closing round
    assert statistics.everybody == ((0, 1, 2), [told] * 3)
    assert communicator.votes == votes
