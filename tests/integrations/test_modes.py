"""Wrapper and inner module are in the same mode, whatever the wrapping."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from ncclguard.integrations.modes import set_eval_mode, set_train_mode, unwrap
from torch import nn

from ncclguard import faults

CASES = Path(__file__).with_name("wrapped_cases.py")


@pytest.fixture(scope="module")
def found() -> dict[str, list[list[bool]]]:
    """For each wrapping the modes found after ``eval()``, after set_eval_mode and after set_train_mode."""
    for name in ("transformers", "deepspeed"):
        if not importlib.util.find_spec(name):
            pytest.skip(f"{name} is not installed")
    return faults.run_ranks(f"{CASES}:modes", 1, timeout=110).check()[0].reports


WRAPPINGS = [
    "ddp",
    "ddp finding unused",
    "ddp static",
    "fsdp",
    "fsdp2",
    "zero 2",
    "zero 3",
    "compiled",
    "ddp of compiled",
]
WRAPPINGS += ["compiled ddp", "held engine", "nested engine"]


@pytest.mark.parametrize("name", WRAPPINGS)
def test_all_agree_in_every_wrapping(found: dict[str, Any], name: str) -> None:
    assert found[name][1:] == [[False], [True]]


@pytest.mark.parametrize("name", ["zero 2", "zero 3", "nested engine", "held engine"])
def test_eval_alone_leaves_them_apart(found: dict[str, Any], name: str) -> None:
    """What the functions are for: the engine's own ``eval()`` leaves its ``training`` True."""
    assert True in found[name][0]


def test_a_part_that_a_model_keeps_in_evaluation_mode_stays_there() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = nn.Dropout(), nn.Linear(2, 2)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.backbone.eval()
            return self

    model = nn.DataParallel(Frozen())
    set_train_mode(model)
    assert (model.training, model.module.training, model.module.head.training) == (True, True, True)
    assert not model.module.backbone.training


def test_a_model_with_a_part_called_module_is_no_wrapper() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    model = Model()
    assert unwrap(model) is model
    assert unwrap(torch.compile(nn.DataParallel(model), backend="eager")) is model


@pytest.mark.parametrize("function", [set_eval_mode, set_train_mode])
def test_what_is_no_model_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"str is no torch\.nn\.Module"):
        function("model")


def test_the_model_comes_back() -> None:
    model = nn.Linear(2, 2)
    assert set_eval_mode(model) is model
    assert not model.training
