"""The wait for processes that end: whoever wakes it, also once it is over."""

from __future__ import annotations

import os
import time

import pytest

from ncclguard.watch.watcher import Processes


def test_a_wake_ends_the_wait() -> None:
    processes = Processes()
    processes.wake()
    began = time.monotonic()
    assert processes.wait(30.0) == []
    assert time.monotonic() - began < 15.0
    processes.close()


def test_a_wake_after_the_end_raises_nothing_and_writes_to_nobody() -> None:
    """The number of the descriptor is soon that of another file."""
    reader, writer = os.pipe()
    processes = Processes()
    bell = processes._bell
    processes.close()
    os.dup2(writer, bell)
    os.set_blocking(reader, False)
    processes.wake()
    with pytest.raises(BlockingIOError):  # there is nothing
        os.read(reader, 8)
    for descriptor in {reader, writer, bell}:
        os.close(descriptor)
