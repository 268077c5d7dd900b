"""Backup memory: reused between operations, aligned, and never reused while something may still write into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ncclguard.transport import memory
from ncclguard.transport.memory import ALIGNMENT, Arena, aligned

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _empty_pool() -> None:
    memory._idle.clear()


def test_the_largest_buffer_is_used_again() -> None:
    first = Arena(4096, CPU)
    address = first.take(1024, torch.float32).data_ptr()
    first.release()
    second = Arena(2048, CPU)
    assert second.take(512, torch.float32).data_ptr() == address


def test_memory_that_may_still_be_written_is_not_used_again() -> None:
    first = Arena(4096, CPU)
    held = first.take(1024, torch.float32)  # as an operation in flight does
    first.release(reusable=False)
    second = Arena(4096, CPU)
    assert second.take(1024, torch.float32).data_ptr() != held.data_ptr()


def test_two_operations_at_a_time_have_different_memory() -> None:
    first, second = Arena(4096, CPU), Arena(4096, CPU)
    one, two = first.take(1024, torch.float32), second.take(1024, torch.float32)
    one.fill_(1.0)
    two.fill_(2.0)
    assert bool((one == 1.0).all())


def test_parts_are_aligned_and_do_not_overlap() -> None:
    arena = Arena(aligned(3) + aligned(40), CPU)
    first, second = arena.take(3, torch.uint8), arena.take(10, torch.float32)
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT
    first.fill_(7)
    second.fill_(1.0)
    assert first.tolist() == [7, 7, 7]


def test_more_memory_than_there_is_raises_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes on cpu"):
        Arena(1 << 60, CPU)


class Gpu:
    """Streams and a buffer that write down what is asked of them; the stream that is current can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = torch.device("cuda", 0)
        self.log: list[str] = []
        self.current = ""
        self.broken = False
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, self.current))
        monkeypatch.setattr(torch, "empty", lambda numel, **_: Buffer(self, numel))


class Stream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def record_event(self) -> str:
        if self.gpu.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return f"end of {self.name}"

    def wait_event(self, event: str) -> None:
        self.gpu.log.append(f"{self.name} waits for the {event}")


class Buffer:
    is_cuda = True

    def __init__(self, gpu: Gpu, numel: int) -> None:
        self.gpu, self.size, self.device = gpu, numel, gpu.device
        gpu.log.append(f"allocated on {gpu.current}")

    def numel(self) -> int:
        return self.size

    def record_stream(self, stream: Any) -> None:
        self.gpu.log.append(f"used on {stream.name}")


def test_on_a_gpu_the_next_user_waits_for_what_the_last_one_still_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are copied out asynchronously: the buffer is handed over at once, to a guard on another stream as well."""
    gpu = Gpu(monkeypatch)
    gpu.current = "training"
    Arena(4096, gpu.device).release()
    gpu.current = "evaluation"
    Arena(2048, gpu.device).release()
    Arena(8192, gpu.device).release()  # the smaller one is freed, which its allocator must not do under the copies
    assert gpu.log == [
        "allocated on training",
        "used on training",
        "evaluation waits for the end of training",
        "used on evaluation",
        "allocated on evaluation",
        "used on evaluation",
    ]


def test_giving_memory_back_raises_nothing_where_cuda_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of the cleaning up after the error that the caller is to see."""
    gpu = Gpu(monkeypatch)
    arena = Arena(4096, gpu.device)
    gpu.broken = True
    arena.release()
    assert not memory._idle
