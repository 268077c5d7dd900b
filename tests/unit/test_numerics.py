"""`watch_numerics` on one process, and what ranks that have heard of each other say whose the first NaN was."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ncclguard as ng
from ncclguard.coordination import nonfinite
from ncclguard.coordination.nonfinite import KIND, NonFinite, NonFinites
from ncclguard.engine.inputs import non_finite

NAN, INF = float("nan"), float("inf")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def learn(net: nn.Module, times: float = 1.0, rows: torch.Tensor | None = None) -> None:
    (net(torch.ones(5, 3) if rows is None else rows).square().sum() * times).backward()
    net.zero_grad()


# ---------------------------------------------------------------------- one process


def test_the_first_gradient_in_the_order_of_the_backward_pass_is_found_and_no_later_one() -> None:
    net, heard = model(), list[Any]()
    with ng.watch_numerics(net, on_found=heard.append) as numerics:
        learn(net)
        assert numerics.first == ()
        learn(net, NAN)
        learn(net, INF)
    (found,) = numerics.first
    assert (found.rank, found.number, found.kind, found.name, found.before) == (0, 2, "gradient", "2.bias", None)
    assert (found.nan, found.infinite, found.index) == (2, 0, (0,))
    assert heard == [(found,)]


def test_the_output_that_had_a_nan_before_is_told_with_the_gradient() -> None:
    net = model()
    with ng.watch_numerics(net) as numerics:
        learn(net)
        with torch.no_grad():
            net[0].weight[1, 2] = NAN
        learn(net)
    assert numerics.first[0].before == ("output", "0 (Linear)")
    assert "the output of 0 (Linear) had a NaN before" in str(numerics.first[0])


def test_a_nan_of_the_input_or_of_padding_that_reaches_no_gradient_is_none() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(rows.nan_to_num()).masked_fill(torch.eye(5, 2, dtype=torch.bool), 0)
            return found

    net = Masked()
    with ng.watch_numerics(net) as numerics:
        learn(net, rows=torch.full((5, 3), NAN))
    assert numerics.first == ()


def test_a_step_that_a_loss_scaler_leaves_out_is_none_and_the_first_of_those_that_do_not_end_is() -> None:
    net = model()

    def scaled(times: float) -> None:
        with torch.autocast("cpu", torch.float16):
            learn(net, times)

    with ng.watch_numerics(net) as numerics:
        scaled(INF)
        scaled(1.0)
        assert numerics.first == ()
        scaled(INF)
        with torch.no_grad():
            net[0].weight.fill_(NAN)
        scaled(1.0)
    assert numerics.first[0].number == 3


def test_a_copy_of_the_model_is_not_watched_and_a_closed_watch_has_no_hooks() -> None:
    net = model()
    numerics = ng.watch_numerics(net)
    learn(net)
    learn(copy.deepcopy(net), NAN)
    assert numerics.first == ()
    numerics.close()
    learn(net, NAN)
    assert numerics.first == ()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in net.modules())
    assert not any(parameter._backward_hooks for parameter in net.parameters())


def test_parameters_that_are_trained_later_are_looked_at_then() -> None:
    net = model()
    net[2].requires_grad_(requires_grad=False)
    with ng.watch_numerics(net) as numerics:
        learn(net)
        net[2].requires_grad_(requires_grad=True)
        learn(net, NAN)
    assert numerics.first[0].name == "2.bias"


def test_a_compiled_model_is_not_broken_up() -> None:
    net = model()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    with ng.watch_numerics(compiled) as numerics:
        learn(compiled)
        learn(compiled, NAN)
    assert numerics.first[0].number == 2


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="give the model that is trained"):
        ng.watch_numerics(torch.optim.SGD(model().parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_numbers_are_counted_where_the_sum_is_not_finite_and_some_of_them_are_not(dtype: torch.dtype) -> None:
    tensor = torch.full((3, 4), 3e38 if dtype in (torch.float32, torch.bfloat16) else 6e4, dtype=dtype)
    assert non_finite(tensor) is None
    tensor[1, 2], tensor[2, 0] = -INF, NAN
    assert non_finite(tensor) == (1, 1, (1, 2))
    assert non_finite(torch.ones(3, dtype=torch.int64)) is None
    assert non_finite(torch.empty(0)) is None


# ---------------------------------------------------------------------- several ranks, without processes


def finding(rank: int, number: int, place: int = 1) -> NonFinite:
    return NonFinite(
        rank=rank, scope="model", number=number, place=place, kind="gradient", name="w", nan=1, infinite=0, index=(0,)
    )  # fmt: skip


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NonFinites]]:
    """Four ranks, of which each hears what another one posts in its next step."""
    monkeypatch.setattr(nonfinite.lifecycle, "before_end", lambda hook: None)
    yield [NonFinites((0, 1, 2, 3), rank, lambda: None) for rank in range(4)]


def step(ranks: list[NonFinites], now: float = 0.0) -> None:
    posted = list[dict[str, Any]]()
    for rank in ranks:
        rank.step(now, posted.append)
    for entry in posted:
        assert entry["kind"] == KIND
        for rank in ranks:
            rank.hear(entry)


def test_the_lowest_pass_is_the_first_in_whatever_order_ranks_hear_of_it(
    ranks: list[NonFinites], caplog: pytest.LogCaptureFixture
) -> None:
    heard = list[Any]()
    ranks[1].listen("model", heard.append)
    ranks[3].tell(finding(3, 8))
    step(ranks)
    ranks[2].tell(finding(2, 7))
    ranks[0].tell(finding(0, 8))
    step(ranks)
    assert [rank.first("model") for rank in ranks] == [(finding(2, 7),)] * 4
    assert not heard
    with caplog.at_level(logging.WARNING, "ncclguard"):
        step(ranks, float("inf"))
    assert heard == [(finding(2, 7),)]
    assert len(caplog.records) == 2  # the lowest rank's, and that of the one whose it is
    assert "rank 2: the gradient of w had a NaN" in caplog.text


def test_a_rank_that_has_heard_of_an_earlier_one_says_nothing(ranks: list[NonFinites]) -> None:
    ranks[2].tell(finding(2, 7))
    step(ranks)
    ranks[1].tell(finding(1, 8))
    posted = list[Any]()
    ranks[1].step(0.0, posted.append)
    assert posted == []


def test_ranks_that_had_theirs_at_the_same_place_are_all_named(ranks: list[NonFinites]) -> None:
    for rank in (1, 3):
        ranks[rank].tell(finding(rank, 7))
    ranks[2].tell(finding(2, 7, place=2))
    step(ranks)
    assert [one.rank for one in ranks[0].first("model")] == [1, 3]
    assert "rank 1: " in nonfinite.verdict(ranks[0].first("model"))


def test_a_listener_that_raises_ends_nothing(ranks: list[NonFinites], caplog: pytest.LogCaptureFixture) -> None:
    def fails(first: object) -> None:
        raise ValueError("no")

    heard = list[Any]()
    ranks[0].listen("model", fails)
    ranks[0].listen("model", heard.append)
    ranks[0].tell(finding(0, 7))
    step(ranks, float("inf"))
    assert len(heard) == 1
    assert "on_found raised" in caplog.text
