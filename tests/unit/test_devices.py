"""One communicator serves one device: that of the first tensor, whatever the current device is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import torch_compat
from ncclguard.engine import runtime
from ncclguard.process_group import work_queue
from ncclguard.process_group.work_queue import GuardedWork
from ncclguard.transport.nccl import NcclBuilder


def test_the_communicator_is_built_on_the_device_of_the_tensor() -> None:
    """Programs that say `model.to(rank)` and never call `torch.cuda.set_device` have the wrong current device."""
    made = runtime.builder(torch.device("cuda", 3))
    assert isinstance(made, NcclBuilder)
    assert made.device == torch.device("cuda", 3)


def test_a_tensor_on_another_device_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def guarded(group: object, device: torch.device, *_: object) -> Any:
        asked.append(device)
        return SimpleNamespace(device=torch.device("cuda", 0))

    monkeypatch.setattr(runtime, "current", lambda seconds: SimpleNamespace(group=guarded))
    monkeypatch.setattr(torch_compat, "group_ranks", lambda _: (0, 1))
    ng.configure(autostart=False)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with pytest.raises(ValueError, match="first operation of this group was on cuda:0"):
            ng.safe_all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
    assert asked == [torch.device("cpu")]


@pytest.mark.parametrize("blocking", [True, False])
def test_the_work_of_a_guarded_group_ends_when_the_last_copies_have(
    monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    """Some collectives spread a flat result over the caller's tensors after the guard has returned."""
    order: list[str] = []
    work = GuardedWork("all_reduce", [], None)

    def drained(device: torch.device, end: float) -> bool:
        assert not work.is_completed()
        order.append(f"drained {device}")
        return True

    monkeypatch.setattr(work_queue, "drained", drained)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    stream: Any = SimpleNamespace(device=torch.device("cuda", 1))
    row = work_queue.WorkQueue("collectives", lambda outcome: None)
    row.issue(work_queue.Task("all_reduce", lambda: order.append("performed"), work, stream), blocking)
    work.wait()
    assert order == ["performed", "drained cuda:1"]
    row.close("the test is over")
    row.join(10)
