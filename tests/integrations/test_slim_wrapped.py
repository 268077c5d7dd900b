"""Slim outputs under every way to wrap a model on several ranks, and compiled."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.insert(0, str(Path(__file__).parent))
import qwen_cases as cases
from ncclguard.integrations.qwen2_5_vl import slim_outputs

from ncclguard import faults

CASES = Path(__file__).with_name("wrapped_cases.py")


@pytest.fixture(scope="module")
def wrapped() -> dict[str, list[dict[str, Any]]]:
    """Every wrapping on two ranks: unpatched, patched through it, restored, and wrapped after it was patched."""
    names = ["ddp", "ddp finding unused", "ddp static", "fsdp", "fsdp2"]
    if importlib.util.find_spec("deepspeed"):
        names += ["zero 1", "zero 2", "zero 3"]
    return faults.run_ranks(f"{CASES}:slimmed", 2, args=[names], timeout=115).check()[1].reports


@pytest.mark.parametrize(
    "name", ["ddp", "ddp finding unused", "ddp static", "fsdp", "fsdp2", "zero 1", "zero 2", "zero 3"]
)
def test_under_every_wrapping(wrapped: dict[str, Any], name: str) -> None:
    if name not in wrapped:
        pytest.skip("deepspeed is not installed")
    before, after, restored, patched_first = wrapped[name]
    for fat_one in (before, restored):
        assert fat_one["training"]["items"] == cases.fat()
    for slim_one in (after, patched_first):
        for mode, expected in (("training", ["loss", "logits"]), ("evaluation", ["logits"])):
            assert slim_one[mode]["items"] == expected
            assert slim_one[mode]["length"] == 12
            assert slim_one[mode]["logits"] == before[mode]["logits"]
    assert after["asked"] == ["logits", "hidden_states"]


@pytest.mark.parametrize("first", [pytest.param("compiled", marks=pytest.mark.thorough), "patched"])
def test_compiled_as_one_graph(first: str) -> None:
    torch._dynamo.reset()
    model = cases.classifier(output_hidden_states=True)
    model(**cases.text_batch())  # transformers itself cannot install its hooks for hidden states inside a graph
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        if first == "compiled":
            assert list(compiled(**cases.text_batch())) == cases.fat()[1:]
        slim_outputs(compiled if first == "compiled" else model)
        for length in (9, 12):
            output = compiled(**cases.text_batch(length=length))
            assert list(output) == ["logits"]
            assert output.last_hidden_state.size(1) == length
        torch.testing.assert_close(output.logits, model(**cases.text_batch(length=12)).logits)
        if first == "patched":
            assert list(compiled(**cases.text_batch(), output_hidden_states=True)) == ["logits", "hidden_states"]
