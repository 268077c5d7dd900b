"""The first NaN of a job on CUDA tensors: the hooks do not wait for the device, and all ranks are told whose it was."""

from __future__ import annotations

import pytest
import torch

import ncclguard as ng
from benchmarks.numerics import KINDS, RANKS, campaign
from ncclguard import faults
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, join, leave, run_together

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_whose_number_was_the_first_to_be_none_is_named_on_all_ranks(kind: str) -> None:
    job = faults.run_ranks(campaign, RANKS, args=[kind, 100, 3, "cuda", "nccl"], env=SHARED_GPU, timeout=150).check()
    assert [rank.reports["wrong"] for rank in job] == [[]] * RANKS


def captured() -> None:
    """Passes, then one that is captured and replayed, then one whose gradients are no numbers."""
    join("nccl")
    model, x = torch.nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
    numerics = ng.watch_numerics(model)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()
    torch.cuda.synchronize()
    model.zero_grad()
    with torch.cuda.graph(graph):
        model(x).sum().backward()
    graph.replay()
    torch.cuda.synchronize()
    assert model.weight.grad is not None
    faults.report(replayed=float(model.weight.grad[0, 0]), none=not numerics.first)
    with torch.cuda.stream(side):
        (model(x).sum() * float("nan")).backward()
    faults.report(found=str(numerics.first))
    leave()


def test_a_pass_that_is_captured_is_not_looked_at_and_those_after_it_are() -> None:
    result = run_together(captured, 1, env=SHARED_GPU, timeout=60).check()
    assert result[0].reports["replayed"] == 2.0 and result[0].reports["none"]
    assert "gradient" in result[0].reports["found"]
