"""What of a replica is compared, by which names, what is refused, and who is in the majority."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ncclguard as ng
from ncclguard.checksum import checksum
from ncclguard.replicas import check
from ncclguard.replicas.tensors import collect


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[2].bias = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def names(*given: Any, **options: Any) -> list[str]:
    return [item.name for item in collect(*given, **options).items]


def test_everything_that_a_step_uses_is_compared_each_once() -> None:
    model, optimizer = trained()
    model.append(model[0])  # shared by two modules
    found = names([model], [optimizer])
    assert len(set(found)) == len(found)
    assert {"0.weight", "1.running_mean", "1.num_batches_tracked", "optimizer.2.bias.momentum_buffer"} <= set(found)
    assert {"optimizer.param_groups.0.lr", "optimizer.param_groups.0.momentum"} <= set(found)
    assert "optimizer.param_groups.0.nesterov" in dict(collect([model], [optimizer]).lines)
    both = names([model, nn.Linear(1, 1)], [optimizer, torch.optim.SGD(model.parameters(), lr=1)])
    assert {"0.0.weight", "1.bias", "optimizer.0.0.0.weight.momentum_buffer", "optimizer.1.param_groups.0.lr"} <= set(
        both
    )


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # LBFGS of torch 2.8
def test_state_of_any_form_is_compared() -> None:
    """LBFGS keeps lists of tensors and numbers; a parameter of no model is named by its place."""
    model, loose = nn.Linear(3, 1), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([*model.parameters(), loose], max_iter=3)
    data = torch.randn(8, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(data).sin() + loose.sum()).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = names([model], [optimizer])
    assert "optimizer.weight.old_dirs.0" in found and "optimizer.weight.n_iter" in found
    assert "optimizer.param_groups.0.params.2.momentum_buffer" in names(
        [model], [stepped(torch.optim.SGD([*model.parameters(), loose], lr=0.1, momentum=0.9))]
    )


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.step()
    return optimizer


def test_a_number_is_written_back_where_it_was() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    items = {item.name: item for item in collect([model], [optimizer]).items}
    for name, value in (("lr", 0.25), ("betas.1", 0.5), ("betas.0", 0.125)):
        write = items[f"optimizer.param_groups.0.{name}"].write
        assert write is not None
        write(value)
    assert optimizer.param_groups[0]["lr"] == 0.25 and optimizer.param_groups[0]["betas"] == (0.125, 0.5)


def test_what_cannot_be_compared_is_left_out_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.LazyLinear(2), nn.Linear(2, 2))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    report = ng.check_replicas(model)
    assert report and report.tensors == 2
    assert report.left_out.keys() == {"0.weight", "0.bias", "1.weight", "1.bias", "sparse"}
    assert "0.weight, 0.bias (it is on meta, without memory)" in str(report)


def test_names_and_patterns_leave_out_what_they_match() -> None:
    model, optimizer = trained()
    report = ng.check_replicas(model, optimizer, ignore=["1.running_*", "optimizer.*.momentum_buffer"])
    assert {"1.running_mean", "1.running_var", "optimizer.0.weight.momentum_buffer"} < report.left_out.keys()
    assert "1.num_batches_tracked" not in report.left_out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ignore": ["1.runing_mean"]}, "there is no '1.runing_mean': did you mean '1.running_mean'"),
        ({"ignore": ["*.nothing"]}, "there is no '\\*.nothing'"),
        ({"ignore": "0.weight"}, "ignore must be a list of names"),
        ({"ignore": [3]}, "ignore must be a list of names"),
        ({"on_difference": "rapair"}, "on_difference must be"),
        ({"model": []}, "there is no model"),
        ({"model": [nn.Linear(1, 1), 3]}, "model is a int"),
        ({"optimizer": nn.Linear(1, 1)}, "optimizer is a Linear"),
        ({"timeout": -1}, "timeout"),
    ],
)
def test_a_wrong_call_raises(given: dict[str, Any], said: str) -> None:
    model, optimizer = trained()
    with pytest.raises((ValueError, TypeError), match=said):
        ng.check_replicas(**{"model": model, "optimizer": optimizer, **given})
    with pytest.raises(TypeError, match="did you mean ignore="):
        ng.check_replicas(model, ignored=[])


class FullyShardedDataParallel(nn.Linear):
    """Known by its name."""


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Known by its name."""


def test_what_has_no_replicas_by_its_nature_is_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ng.GuardConfigError, match="FullyShardedDataParallel has no replicas to compare: FSDP1"):
        ng.check_replicas(nn.Sequential(FullyShardedDataParallel(1, 1)))
    with pytest.raises(ng.GuardConfigError, match="each parameter's state on one rank only: check the model alone"):
        ng.check_replicas(model, ZeroRedundancyOptimizer(model.parameters(), lr=0.1))
    model.weight.ds_id = 3  # type: ignore[assignment]
    with pytest.raises(ng.GuardConfigError, match="ZeRO-3"):
        ng.check_replicas(model)


@pytest.mark.parametrize("value", [-1, True, 2.5, "3"])
def test_check_every_is_a_number_of_steps(value: Any) -> None:
    with pytest.raises(ng.GuardConfigError, match="check_every must be a number of steps"):
        ng.resilient_step(nn.Linear(1, 1), check_every=value)(print)


def test_a_step_without_a_model_has_nothing_to_check() -> None:
    with pytest.raises(ng.GuardConfigError, match="there is no model"):
        ng.resilient_step(check_every=5)(print)


def test_two_against_two_are_no_majority() -> None:
    assert check.majority({3: (1, 1), 5: (2, 2), 6: (2, 2), 9: (1, 1)}) == (None, ())
    assert check.majority({3: (1, 1), 5: (2, 2), 6: (2, 2)}) == (5, (3,))
    assert check.majority(dict.fromkeys(range(4), (0,)) | {9: (1,)}) == (0, (9,))


class Played:
    """The exchange of rank 0 with others whose tensors are what rank 0's are, but as `change` makes them."""

    ranks, index = (0, 1, 2), 0

    def __init__(self) -> None:
        self.calls = 0

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.stack([tensor] * 3)

    def broadcast(self, tensor: torch.Tensor, index: int) -> None:
        raise AssertionError


def test_where_all_agree_one_exchange_does_and_each_tensor_is_summed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    options, exchange = check.Options((model,), (optimizer,), (), "report"), Played()
    assert check.compare(options, exchange).ok and exchange.calls == 1
    summed: list[int] = []
    monkeypatch.setattr(
        "ncclguard.replicas.tensors.checksum", lambda tensor: (summed.append(tensor.numel()), checksum(tensor))[1]
    )
    periodic, parts = check.PeriodicCheck(options, 4), []
    for call in range(8):
        before = len(summed)
        report = periodic.step(exchange, "same")
        parts.append(len(summed) - before)
        assert (report is not None) == (call in (3, 7))
    assert exchange.calls == 3 and sum(parts[:4]) == sum(parts[4:]) == len(options.collected().items)
    periodic.step(exchange, "same")
    assert periodic.step(exchange, "other") is None
    assert [periodic.step(exchange, "other") is None for _ in range(3)] == [True, True, False]  # four calls anew


def test_a_process_alone_compares_nothing() -> None:
    periodic = check.PeriodicCheck(check.Options((nn.Linear(1, 1),), (), (), "stop"), 1)
    assert periodic.step(check.SafeExchange(None, None), None) is None
    assert ng.check_replicas(nn.Linear(1, 1), on_difference="stop").participants == (0,)
