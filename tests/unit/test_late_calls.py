"""A call that comes after the others have completed its operation takes the result they left, without a communicator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ncclguard.config import GuardConfig
from ncclguard.coordination.group_state import GroupState
from ncclguard.engine.call import Call
from ncclguard.engine.chunking import plan
from ncclguard.engine.execution import AllGather, AllReduce, encode
from ncclguard.engine.group import GuardedGroup
from ncclguard.protocol.decision import Action, Operation, Verdict
from ncclguard.transport import memory
from ncclguard.transport.memory import copied

RANKS = (0, 1, 2, 3)
RESULT = torch.arange(8.0)


class Left:
    """What a late call needs of `Communicators`."""

    device = torch.device("cpu")
    in_flight = 2

    def __init__(self, donated: str) -> None:
        self.donated = lambda sequence, seconds: donated
        self.stop = lambda generation: None


def late_guard(donated: str) -> GuardedGroup:
    """Of rank 2, for which the first operation of the group is over."""
    state = GroupState("0:cpu", 2, RANKS)
    state.adopt(Verdict(0, 1, Action.COMMIT, participants=RANKS, fingerprints=(7,)), None)
    assembly: Any = Left(donated)
    return GuardedGroup(state, assembly, lambda: None, GuardConfig())


def call(op: str) -> Call:
    return Call(op, 8, 32, True, Operation(0, 7, f"{op}(...)", closing=False))


@pytest.mark.parametrize("layout", [torch.clone, lambda tensor: torch.stack([tensor, tensor], 1)[:, 0]])
def test_it_is_written_where_no_memory_can_be_had(
    layout: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No staging memory: it would be reserved outside of what gives it back, and its lack raised to the caller."""

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(memory.Arena, "__init__", no_memory)
    tensor = layout(torch.ones(8))
    work = AllReduce(tensor, "AVG", plan(8), False, staged=False)
    assert late_guard(encode([copied(4 * RESULT)])).run(call("all_reduce"), work, 5.0).ok
    assert torch.equal(tensor, RESULT)

    slots = [layout(torch.zeros(8)) for _ in RANKS]
    gather = AllGather(slots, torch.ones(8), RANKS, plan(8), False)
    text = encode([copied(rank + RESULT) for rank in RANKS])
    assert late_guard(text).run(call("all_gather"), gather, 5.0).ok
    assert all(torch.equal(slot, rank + RESULT) for rank, slot in enumerate(slots))
