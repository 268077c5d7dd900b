"""Unmodified DeepSpeed on the guarded process group: the losses of plain gloo, and evaluations that run beside its groups."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults, torch_compat
from ncclguard.engine import runtime
from ncclguard.process_group import GuardedProcessGroup, redirected

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

STEPS = 4
LIMIT = 3.0


def engine_of(stage: int) -> Any:
    """A small model under a real engine; every parameter is partitioned, and buckets are small enough to be several."""
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3)
    )
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": 1000,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    return engine


def step(engine: Any, generator: torch.Generator) -> float:
    x, y = torch.randn(8, 20, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    loss = torch.nn.functional.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def train(backend: str) -> None:
    """ZeRO 1, 2 and 3 one after the other in one job."""
    import deepspeed

    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    assert isinstance(dist.group.WORLD, GuardedProcessGroup) == (backend == "ncclguard")
    for stage in (1, 2, 3):
        engine, generator = engine_of(stage), torch.Generator().manual_seed(dist.get_rank())
        faults.report(**{f"zero{stage}": [step(engine, generator) for _ in range(STEPS)]})
        engine.destroy()
    dist.destroy_process_group()


def evaluate(engine: Any, late: bool) -> str:
    """A forward pass, which gathers what ZeRO-3 has partitioned, and a metric that rank 1 may come late for."""
    with redirected(timeout=LIMIT) as scope, torch.no_grad():
        engine.eval()
        loss = engine(torch.ones(8, 20)).sum()
        if late and dist.get_rank() == 1:
            time.sleep(LIMIT + 5)
        try:
            dist.all_reduce(loss)
        except ng.CollectiveFailed as error:
            assert scope.failures == (error.outcome,)
            return f"{type(error).__name__} {error.outcome.culprits}"
        finally:
            engine.train()
    return f"{loss.item():.6f}"


def train_and_evaluate() -> None:
    """ZeRO-3 over plain gloo, with one evaluation that works and one that fails between the steps."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, generator = engine_of(3), torch.Generator().manual_seed(dist.get_rank())
    losses = [step(engine, generator) for _ in range(2)]
    results = []
    for late in (False, True):
        results.append(evaluate(engine, late))
        ng.safe_barrier(timeout=30).raise_if_failed()
    losses += [step(engine, generator) for _ in range(2)]
    # DeepSpeed gathers on a group of its own making.
    calls = sum(
        runtime.current().group(group, torch.device("cpu"), "backend").calls for group in torch_compat.known_groups()
    )
    faults.report(zero3=losses, results=results, gathers=calls - 2)
    dist.destroy_process_group()


def test_losses_are_those_of_plain_gloo() -> None:
    """Under `init_distributed(dist_backend="ncclguard")`, for ZeRO 1, 2 and 3; and with evaluations in between.

    The guarded ranks are processes of their own, which end like any program's.
    """
    plain = faults.run_ranks(train, 2, args=["gloo"], timeout=110)
    guarded = faults.run_ranks(train, 2, args=["ncclguard"], timeout=110, launcher="processes")
    evaluated = faults.run_ranks(train_and_evaluate, 2, timeout=110)
    for rank in range(2):
        expected = plain[rank].reports
        for stage in ("zero1", "zero2", "zero3"):
            assert guarded[rank].reports[stage] == pytest.approx(expected[stage], rel=1e-6), (stage, str(guarded))
        assert evaluated[rank].reports["zero3"] == expected["zero3"], str(evaluated)
        worked, failed = evaluated[rank].reports["results"]
        assert worked == evaluated[0].reports["results"][0]
        assert failed == "CollectiveTimeout (1,)", str(evaluated)
        assert evaluated[rank].reports["gathers"] >= 1, str(evaluated)
