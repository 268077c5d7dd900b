"""Stacks that another process wrote or was read from: their texts, and whose signals are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from ncclguard.incident import stacks

WRITTEN = """\
Thread 0x00007f1 [loader] (most recent call first):
  File "/app/data.py", line 7 in fetch
  File "/app/data.py", line 3 in run

Current thread 0x00007f2 (most recent call first):
  File "/app/train.py", line 166 in match
  File "/app/train.py", line 14 in <module>
"""
SPIED = """\
Process 12: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 12 (idle)
    step (/app/train.py:9)
    <module> (/app/train.py:20)
Thread 13 (idle): "loader"
    fetch (/app/data.py:7)
Thread 14 (idle): "ncclguard-monitor"
    _run (/x/monitor.py:1)
"""


def test_the_main_thread_comes_first_and_outermost_first() -> None:
    stack, threads = stacks.parse(WRITTEN, main=0x7F2)
    assert stack == ("app/train.py:14 in <module>", "app/train.py:166 in match")
    assert threads == (("loader", ("app/data.py:3 in run", "app/data.py:7 in fetch")),)


def test_the_same_from_py_spy() -> None:
    stack, threads = stacks.parse_spied(SPIED)
    assert stack == ("app/train.py:20 in <module>", "app/train.py:9 in step")
    assert threads == (("loader", ("app/data.py:7 in fetch",)),)


def test_garbage_is_no_stack() -> None:
    assert stacks.parse("\x00\xff no stack at all", 1) == ((), ())
    assert stacks.parse_spied("Error: Permission denied") == ((), ())


def run(code: str) -> str:
    """Run a program that prints, in an interpreter of its own: handlers are for the whole process."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.processes
def test_a_signal_that_the_program_handles_is_never_taken() -> None:
    """Neither one handled before nor one handled since; and the program's handler is not replaced."""
    found = run(
        """
        import signal, threading
        from ncclguard.incident import stacks
        mine = lambda *_: None
        signal.signal(signal.SIGUSR2, mine)
        signal.signal(stacks.CANDIDATES[0], mine)
        print(stacks.offer("SIGUSR2", 1))
        offer = stacks.offer("auto", threading.get_native_id())
        print(offer.signal == stacks.CANDIDATES[1], signal.getsignal(signal.SIGUSR2) is mine, stacks.offer("none", 1))
        signal.signal(offer.signal, mine)
        print(stacks.offer("auto", 1))
        """
    )
    assert found.split("\n") == ["None", "True True None", "None"]


@pytest.mark.processes
def test_a_process_that_does_not_handle_the_signal_gets_none() -> None:
    """It would be ended by it."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = stacks.fetch(child.pid, stacks.Offer(stacks.CANDIDATES[0], child.pid, 5, 1))
        assert "does not handle signal" in found.note
        assert child.poll() is None
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert "stopped by a signal (state T" in stacks.fetch(child.pid, None).note
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    assert "unknown state" in stacks.fetch(child.pid, None).note
