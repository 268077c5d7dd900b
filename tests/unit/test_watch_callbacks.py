"""The program's functions that a watch calls: in order, in a thread of their own, and warned of where they block."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from ncclguard.watch.watcher import CALLBACK_TAKES, Callbacks


def test_they_are_called_in_order_also_after_one_that_fails() -> None:
    callbacks, said = Callbacks(), []

    def fail() -> None:
        said.append("fails")
        raise SystemExit(3)

    callbacks.call("on_incident", fail)
    callbacks.call("on_slow", lambda: said.append("second"))
    callbacks.finish(30)
    callbacks.call("on_incident", lambda: said.append("third"))
    callbacks.finish(30)
    assert said == ["fails", "second", "third"]


def test_one_that_blocks_is_warned_of_once_and_waited_for_no_longer_than_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callbacks, begun, over = Callbacks(), threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        over.wait()

    callbacks.call("on_incident", block)
    assert begun.wait(30)
    callbacks.finish(0.01)
    later = time.monotonic() + CALLBACK_TAKES
    with caplog.at_level(logging.WARNING, "ncclguard"):
        callbacks.warn(time.monotonic())
        assert not caplog.messages
        callbacks.warn(later)
        callbacks.warn(later)
    assert len(caplog.messages) == 1
    assert "on_incident has not returned for 10 s: the watch goes on" in caplog.messages[0]
    over.set()
    callbacks.finish(30)
