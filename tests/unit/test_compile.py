"""Guarded calls in code that `torch.compile` compiles: they break the graph, and nobody is warned of the guard's own code."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("preforked_programs")

PROGRAM = """
import {first}
import {second}
import torch, ncclguard as ng

def step(x):
    y = x * 2
    with ng.phase("eval"):
        outcome = ng.safe_all_reduce(y, timeout=30)
    if not outcome:
        raise outcome.error
    ng.safe_barrier()
    return y + 1

graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

assert torch.compile(step, backend=backend)(torch.ones(3)).tolist() == [3.0] * 3
assert graphs
"""


@pytest.mark.processes
@pytest.mark.parametrize(("first", "second"), [("ncclguard", "torch"), ("torch._dynamo", "ncclguard")])
def test_a_guarded_call_is_a_silent_graph_break(first: str, second: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(first=first, second=second)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
