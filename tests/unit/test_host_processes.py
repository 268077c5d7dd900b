"""Stacks that another process wrote or was read from: their texts, and whose signals are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def running(code: str) -> Iterator[tuple[subprocess.Popen[str], stacks.Offer]]:
    """A process that prints how to reach it."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child, stacks.Offer(*map(int, child.stdout.readline().split()))
        finally:
            child.kill()


CHURNS = """
import threading, time
from ncclguard.incident import stacks
offer = stacks.offer("auto", threading.get_native_id())
def deep(depth):
    return [deep(depth - 1)] if depth else []
def spin():
    while True:
        deep(30)
def start_threads():
    while True:
        one = threading.Thread(target=deep, args=(5,))
        one.start()
        one.join()
for target in {targets}:
    threading.Thread(target=target, daemon=True).start()
print(offer.signal, offer.thread, offer.descriptor, offer.main, flush=True)
time.sleep(60)
"""


def until(offer: stacks.Offer, pid: int, holds: Callable[[stacks.Fetched], bool]) -> stacks.Fetched:
    """Look until it is so, at most 30 times: on a busy machine threads may get no processor for a moment."""
    found = stacks.observe(pid, offer)
    for _ in range(30):
        if holds(found):
            break
        found = stacks.observe(pid, offer)
    assert holds(found), found
    return found


@pytest.mark.processes
@pytest.mark.parametrize("targets", ["[spin, spin]", "[start_threads]"])
def test_no_process_is_asked_by_a_signal_while_frames_come_and_go_that_it_would_read(targets: str) -> None:
    """Without the GIL `faulthandler` reads frames that threads have left meanwhile: SIGSEGV after 7,000 signals."""
    with running(CHURNS.format(targets=targets)) as (child, offer):
        found = until(offer, child.pid, lambda found: "several of its threads run" in found.note)
        assert found.runs and not found.written


@pytest.mark.processes
def test_the_one_thread_that_runs_stands_still_while_it_writes() -> None:
    with running(CHURNS.format(targets="[spin]")) as (child, offer):
        until(offer, child.pid, lambda found: "in spin" in found.written.partition("Current thread")[2])


KEEPS = """
import ctypes, hashlib, threading, time
from ncclguard.incident import stacks
def monitor():
    global offer
    offer = stacks.offer("auto", threading.get_native_id())
    while True: time.sleep(0.01)
threading.Thread(target=monitor, daemon=True).start()
time.sleep(0.1)
for _ in range(2):
    threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"x", b"y", 10**9), daemon=True).start()
print(offer.signal, offer.thread, offer.descriptor, offer.main, flush=True)
ctypes.PyDLL(None).sleep(60)
"""


@pytest.mark.processes
def test_a_process_that_keeps_the_gil_is_asked_whatever_else_runs_in_it() -> None:
    """NCCL's and OpenMP's threads run beside it, and by their names they could be Python's."""
    with running(KEEPS) as (child, offer):
        found = until(offer, child.pid, lambda found: bool(found.written) and not found.runs)
        assert "in <module>" in found.stack[-1]


def test_writings_of_two_threads_that_stand_where_they_stood_are_equal() -> None:
    """Each heads its own part otherwise, and who gets the signal depends on what runs."""
    other = WRITTEN.replace("Thread 0x00007f1", "Current thread 0x00007f1").replace(
        "Current thread 0x00007f2", "Thread 0x00007f2"
    )
    assert not stacks._goes_on(WRITTEN, other)
    assert stacks._goes_on(WRITTEN, other.replace("line 7", "line 8")) and stacks._goes_on(WRITTEN, None)


BUSY = """
import ctypes, os, re, threading
from ncclguard.incident import stacks
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
offer = stacks.offer("auto", threading.get_native_id())
print(offer.signal, offer.thread, offer.descriptor, offer.main, flush=True)
work, number = input(), 0
def odd(bits, depth):
    if depth:
        (odd if bits & 1 else even)(bits >> 1, depth - 1)
def even(bits, depth):
    if depth:
        (odd if bits & 1 else even)(bits >> 1, depth - 1)
while work == "asleep": ctypes.PyDLL(None).pause()
while work == "in C": re.match("(a+)+$", "a" * 60 + "b")
while work == "in Python":
    odd(number, 12)
    number += 1
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("work", "beside", "runs", "says"),
    [
        pytest.param("asleep", 0, False, "without the GIL", id="it stands still, and needs no processor"),
        pytest.param("in Python", 0, True, "it went on between two looks", id="it goes on"),
        pytest.param("in C", 12, True, "its host is overloaded", id="it stands still, and gets no processor"),
    ],
)
def test_a_process_is_seen_to_run_or_to_be_kept_from_it(work: str, beside: int, runs: bool, says: str) -> None:
    """A rank that answers nobody is stuck only where it could have gone on; all processes share one processor."""
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    offer = stacks.Offer(*map(int, child.stdout.readline().split()))
    first = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{first}}})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(beside)]
    try:
        child.stdin.write(f"{work}\n")
        child.stdin.flush()
        found = stacks.observe(child.pid, offer)
        for _ in range(30):  # until all of them are at work
            if found.runs == runs and says in found.note:
                break
            found = stacks.observe(child.pid, offer)
        assert found.runs == runs and says in found.note, found
        assert found.stack, found
    finally:
        for each in (child, *others):
            each.kill()
            each.wait()
        child.stdin.close()
        child.stdout.close()
