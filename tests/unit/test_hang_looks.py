"""The motion of a rank between two looks, by what /proc counts of it."""

from __future__ import annotations

import pytest

from ncclguard.hang.looks import Counters, Look, observe
from ncclguard.hang.stacks import Kind, Motion, Place

BACKWARD = Place(Kind.BACKWARD, "backward", True, stack=("train.py:4 step", "backward"))
THREADS = {
    "gloo's": ({"python", "pt_gloo_runloop"}, Motion.MOVING),
    "NCCL's": ({"python", "pt_nccl_watchdg"}, Motion.SPINNING),
    "both": ({"pt_gloo_runloop", "NCCL Progress 0"}, Motion.SPINNING),
    "none that are known": ({"python"}, Motion.SPINNING),
}


@pytest.mark.parametrize("case", THREADS)
def test_who_computes_inside_a_call_waits_there_on_nccl_alone(case: str) -> None:
    """gloo has a thread sleep that waits for peers; NCCL has the host ask its device all the time."""
    names, motion = THREADS[case]
    looks = [
        Look(float(second), Counters("R", {10: (100 * second, 5)}, None, 0, frozenset(names)), BACKWARD, 10, (10,))
        for second in range(2)
    ]
    found = observe(looks)
    assert (found.motion, found.gloo) == (motion, case == "gloo's")
