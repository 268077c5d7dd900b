"""A call that blocks is given up in time, and its thread ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from ncclguard.transport import bounded as bounded_module
from ncclguard.transport.base import TransportError
from ncclguard.transport.bounded import bounded


def test_the_result_and_every_kind_of_error_come_back() -> None:
    def fail(error: Exception) -> None:
        raise error

    assert bounded("adding", lambda: 1 + 1, 5.0, lambda: None) == 2
    with pytest.raises(TransportError, match="adding failed: no route"):
        bounded("adding", lambda: fail(RuntimeError("no route")), 5.0, lambda: None)
    with pytest.raises(KeyError):
        bounded("adding", lambda: fail(KeyError("x")), 5.0, lambda: None)


def test_a_call_that_blocks_is_released_and_given_up() -> None:
    release = threading.Event()
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"waiting took longer than 0\.1 s"):
        bounded("waiting", lambda: release.wait(30), 0.1, release.set)
    release.clear()
    with pytest.raises(TransportError, match="waiting is not wanted any more and was given up"):
        bounded("waiting", lambda: release.wait(30), 30.0, release.set, lambda: False)
    assert bounded("adding", lambda: 1 + 1, 5.0, lambda: None, lambda: True) == 2
    assert time.monotonic() - start < 10.0
    assert release.is_set()


def test_a_call_that_ignores_its_release_is_left_behind() -> None:
    blocked = threading.Event()
    with pytest.raises(TransportError, match="given up"):
        bounded("waiting", lambda: blocked.wait(30), 0.1, lambda: None)
    blocked.set()


@pytest.mark.processes
def test_interpreter_exit_releases_a_call_that_still_runs_and_is_clean() -> None:
    """The call was given up, ends only at its second release, and the process exits with 0 well before the call's 30 s."""
    program = """
import threading
from ncclguard.transport import bounded as bounded_module
from ncclguard.transport.base import TransportError
from ncclguard.transport.bounded import bounded
gate, calls = threading.Event(), []
def release():
    calls.append(1)
    if len(calls) == 2:
        gate.set()
try:
    bounded("waiting", lambda: gate.wait(30), 0.1, release)
except TransportError:
    print("given up", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "given up\n"), done.stderr


def test_a_call_for_which_no_thread_can_be_started_fails_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Python 3.12 when the program has ended."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(TransportError, match="was not begun: can't create new thread"):
        bounded("connecting", lambda: 1, 5.0, lambda: None)
    assert not bounded_module._running


def test_a_signal_handler_may_begin_a_call_while_its_thread_begins_another() -> None:
    """As when a communicator is stopped by the handler of an alarm."""
    with bounded_module._lock:
        call = bounded_module.in_background("aborting", lambda: None)
    assert call is not None
    assert call.ended(30)


def test_what_a_call_in_the_background_raises_is_kept() -> None:
    def fail() -> None:
        raise RuntimeError("no route")

    call = bounded_module.in_background("aborting", fail)
    assert call is not None
    assert call.ended(30)
    assert str(call.error) == "no route"
