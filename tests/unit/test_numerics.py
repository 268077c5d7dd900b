"""`watch_numerics` on one process, and what ranks that have heard of each other say whose the first NaN was."""

from __future__ import annotations

import copy
import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import ncclguard as ng
from ncclguard.coordination.nonfinite import KIND, NO_SIGN, NonFinite, NonFinites, Tensor
from ncclguard.engine.inputs import non_finite

NAN, INF = float("nan"), float("inf")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def wait_until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


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
    assert (found.rank, found.number, found.tensor, found.before) == (0, 2, ("gradient", "2.bias"), None)
    assert (found.nan, found.infinite, found.index) == (2, 0, (0,))
    wait_until(lambda: heard == [(found,)])


def test_the_output_that_had_a_nan_before_is_told_with_the_gradient() -> None:
    net = model()
    with ng.watch_numerics(net) as numerics:
        learn(net)
        with torch.no_grad():
            net[0].weight[1, 2] = NAN
        learn(net)
    assert numerics.first[0].before == Tensor("output", "0 (Linear)")
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

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def scaled(times: float, *, step: bool) -> None:
        with torch.autocast("cpu", torch.float16):
            (net(torch.ones(5, 3)).square().sum() * times).backward()
        if step:
            optimizer.step()
        optimizer.zero_grad()

    with ng.watch_numerics(net) as numerics:
        scaled(INF, step=False)
        scaled(1.0, step=True)
        scaled(1.0, step=True)
        assert numerics.first == ()
        scaled(INF, step=True)
        scaled(1.0, step=True)
    assert numerics.first[0].number == 4


def test_padding_beside_what_a_loss_scaler_leaves_out_is_none() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.padding = model(), nn.Identity()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.padding(torch.full((2,), NAN))
            found: torch.Tensor = self.inner(rows)
            return found

    net = Padded()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.forward = torch.autocast("cpu", torch.float16)(net.forward)  # type: ignore[method-assign]
    with ng.watch_numerics(net) as numerics:
        for times in (INF, 1.0, 1.0):
            (net(torch.ones(5, 3)).square().sum() * times).backward()
            if times == 1.0:
                optimizer.step()
            optimizer.zero_grad()
    assert numerics.first == ()


def test_passes_are_counted_by_backward_passes_however_often_and_by_whatever_way_the_model_is_called() -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.utils.checkpoint.checkpoint(self.inner, rows, use_reentrant=False)
            return found

    net = Called()
    with ng.watch_numerics(net) as numerics, ng.watch_numerics(net.inner) as inner:
        with torch.no_grad():
            net(torch.ones(5, 3))
        for times in (1.0, 1.0, NAN):
            net(torch.ones(1, 3))
            learn(net, times)
        assert numerics.first[0].number == inner.first[0].number == 3
    with ng.watch_numerics(net) as numerics:
        for times in (1.0, NAN):
            (net.forward(torch.ones(5, 3)).sum() * times).backward()
    assert numerics.first[0].number == 2


def test_a_program_that_sees_its_loss_and_ends_is_told_what_the_first_output_was() -> None:
    net = model()
    numerics = ng.watch_numerics(net)
    learn(net)
    net(torch.full((5, 3), NAN))
    numerics._findings.settle()
    assert (numerics.first[0].tensor, numerics.first[0].number) == (Tensor("input", ""), 2)


@pytest.mark.parametrize("kind", ["meta", "vmap", "nested", "cyclic"])
def test_tensors_of_other_kinds_end_nothing(kind: str) -> None:
    net: nn.Module = nn.Linear(3, 2, device="meta") if kind == "meta" else model() if kind == "vmap" else nn.Identity()
    with ng.watch_numerics(net):
        if kind == "meta":
            net(torch.ones(2, 3, device="meta"))
        elif kind == "vmap":
            assert torch.vmap(net)(torch.ones(2, 3)).shape == (2, 2)
        elif kind == "nested":
            net(torch.nested.nested_tensor([torch.full((2,), NAN), torch.ones(3)], layout=torch.jagged))
        else:
            rows: dict[str, Any] = {"rows": torch.ones(2)}
            rows["again"] = rows
            net(rows)


def test_a_watch_that_nobody_closes_goes_with_its_model() -> None:
    net = model()
    learnt = weakref.ref(ng.watch_numerics(net))
    del net
    gc.collect()
    assert learnt() is None


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


def test_a_closed_watch_tells_nothing_at_the_end_of_the_program() -> None:
    net = model()
    with ng.watch_numerics(net) as numerics:
        net(torch.full((5, 3), NAN))
    numerics._findings.settle()
    assert numerics.first == ()


def test_parameters_that_are_trained_later_are_looked_at_then() -> None:
    net = model()
    net[2].requires_grad_(requires_grad=False)
    with ng.watch_numerics(net) as numerics:
        learn(net)
        net[2].requires_grad_(requires_grad=True)
        learn(net, NAN)
    assert numerics.first[0].tensor == Tensor("gradient", "2.bias")


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


def finding(rank: int, number: int, place: int = NO_SIGN) -> NonFinite:
    return NonFinite(
        rank=rank, scope="model", number=number, place=place, tensor=Tensor("gradient", "w"), nan=1, infinite=0, index=(0,)
    )  # fmt: skip


@pytest.fixture
def ranks() -> list[NonFinites]:
    """Four ranks, of which each hears what another one posts in its next step."""
    return [NonFinites((0, 1, 2, 3), rank, lambda: None) for rank in range(4)]


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
    wait_until(lambda: heard == [(finding(2, 7),)])
    assert len(caplog.records) == 2  # the lowest rank's, and that of the one whose it is
    assert "rank 2: the gradient of w had a NaN" in caplog.text


def test_an_earlier_one_that_is_heard_of_late_is_spoken_of_once_more(ranks: list[NonFinites]) -> None:
    heard = list[Any]()
    ranks[0].listen("model", heard.append)
    for finding_ in (finding(3, 8), finding(2, 7), finding(1, 9)):
        ranks[0].hear({"finding": asdict(finding_)})
        ranks[0].step(float("inf"), lambda entry: None)
    wait_until(lambda: sorted(heard, key=str) == [(finding(2, 7),), (finding(3, 8),)])


def test_a_rank_that_has_heard_of_an_earlier_one_says_nothing(ranks: list[NonFinites]) -> None:
    ranks[2].tell(finding(2, 7))
    step(ranks)
    ranks[1].tell(finding(1, 8))
    posted = list[Any]()
    ranks[1].step(0.0, posted.append)
    assert posted == []


def test_ranks_that_had_theirs_in_the_same_pass_are_all_named(ranks: list[NonFinites]) -> None:
    for rank in (1, 3):
        ranks[rank].tell(finding(rank, 7))
    step(ranks)
    assert [one.rank for one in ranks[0].first("model")] == [1, 3]


def test_a_sign_in_the_forward_pass_comes_before_those_whom_communication_there_has_brought_it(
    ranks: list[NonFinites], caplog: pytest.LogCaptureFixture
) -> None:
    for rank, place in ((0, 5), (1, 5), (2, 4), (3, NO_SIGN)):
        ranks[rank].tell(finding(rank, 7, place))
    step(ranks)
    assert [one.rank for one in ranks[0].first("model")] == [2]
    with caplog.at_level(logging.WARNING, "ncclguard"):
        step(ranks, float("inf"))
    assert "In the same pass ranks 0-1, 3 had theirs, later" in caplog.text


def test_the_end_of_the_program_waits_until_an_earlier_one_may_have_been_heard_of(ranks: list[NonFinites]) -> None:
    ranks[1].before_end(lambda: ranks[1].tell(finding(1, 8)))
    ended = threading.Thread(target=ranks[1].settle)
    ended.start()
    ranks[2].tell(finding(2, 7))
    wait_until(lambda: bool(ranks[1].first("model")))
    step(ranks)
    assert ranks[1].first("model") == (finding(2, 7),)
    assert ended.is_alive()
    step(ranks, float("inf"))
    ended.join(60)


def test_a_listener_that_ends_its_thread_ends_nothing(
    ranks: list[NonFinites], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(first: object) -> None:
        sys.exit(3)

    heard = list[Any]()
    ranks[0].listen("model", fails)
    ranks[0].listen("model", heard.append)
    ranks[0].tell(finding(0, 7))
    step(ranks, float("inf"))
    wait_until(lambda: len(heard) == 1 and "on_found raised" in caplog.text)
