"""Backup memory: reused between operations, aligned, and never reused while something may still write into it."""

from __future__ import annotations

import pytest
import torch

from ncclguard.buffers import ALIGNMENT, Arena, aligned, drop_idle

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _empty_pool() -> None:
    drop_idle()


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
