"""What of CUDA and of torch's NCCL group `NcclCommunicator` touches, without a GPU: tensors on the CPU, events that a test reaches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")


class FakeEvent:
    """Reached when the `Gpu` says so, as an event behind all kernels would be."""

    gpu: Gpu

    def record(self, stream: object) -> None:
        self.gpu.events.append(self)

    def query(self) -> bool:
        return self.gpu.idle.is_set()


class Gpu:
    """Whether all kernels have ended."""

    def __init__(self) -> None:
        self.idle = threading.Event()
        self.events: list[FakeEvent] = []
        self.devices: list[tuple[str, torch.device]] = []  # set as the current one, by the threads of these names


class FakeWork:
    """As torch's with blocking wait: `wait` blocks, `synchronize` does not; both give up what the work alone held."""

    def __init__(self, group: FakeGroup, hidden: list[torch.Tensor]) -> None:
        self.group = group
        self.hidden = hidden
        self.asked = 0
        self.error: Exception | None = None

    def wait(self) -> bool:
        raise AssertionError("wait() blocks the host until its timeout")

    def synchronize(self) -> None:
        self.hidden.clear()

    def is_completed(self) -> bool:
        self.asked += 1
        with self.group.mutex:  # as NCCLComm::isAborted
            return True

    def exception(self) -> Exception | None:
        return self.error


class FakeGroup:
    """Of one rank. `launch` runs in every collective first: it may block or raise."""

    def __init__(self) -> None:
        self.launch: Callable[[], object] = lambda: None
        self.abort_blocks: threading.Event | None = None
        self.mutex = threading.Lock()
        self.works: list[FakeWork] = []
        self.aborts = 0
        self.shut = 0

    def _work(self, *tensors: torch.Tensor) -> FakeWork:
        self.launch()
        self.works.append(FakeWork(self, list(tensors)))
        return self.works[-1]

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> FakeWork:
        return self._work(*tensors)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor) -> FakeWork:
        output.copy_(tensor)
        return self._work(output, tensor)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> FakeWork:
        output.copy_(tensor)
        return self._work(output, tensor)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.launch()

    def abort(self) -> None:
        self.aborts += 1
        with self.mutex:
            if self.abort_blocks is not None:
                self.abort_blocks.wait(60)

    def shutdown(self) -> None:
        self.shut += 1


class FakeVotes:
    """The communicator of the votes, of one rank."""

    ranks, index, size, generation = (0,), 0, 1, 7

    def stop(self) -> None: ...

    def close(self) -> None: ...

    def quiet(self, seconds: float) -> bool:
        return True


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Put the names of `torch.cuda` that the transport uses in the place of the real ones."""
    gpu = Gpu()

    def event() -> FakeEvent:
        made = FakeEvent()
        made.gpu = gpu
        return made

    def context(_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    for name, value in {
        "Event": event,
        "Stream": lambda device: object(),
        "current_stream": lambda device=None: object(),
        "stream": context,
        "device": context,
        "set_device": lambda device: gpu.devices.append((threading.current_thread().name, device)),
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return gpu
