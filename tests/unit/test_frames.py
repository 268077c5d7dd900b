"""Frames of other threads: the interpreter survives that they are read while those threads return from them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

import ncclguard.lifecycle  # noqa: F401 - holds the reader around a fork
from ncclguard.frames import frames_of_threads, local_of, thread_frames

# Objects whose end lets other threads run are collected as soon as the reader makes a frame: what a program's own
# garbage does by chance. Without the guard CPython 3.11 dies of it, or follows frames in a circle for good.
READ_WHILE_COLLECTING = """
    import gc, random, sys, threading, time
    from ncclguard.frames import frames_of_threads, local_of

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            time.sleep(0.0001)
            if not stop.is_set():
                Cycle()

    def small(n):
        return n if n <= 0 else random.choice(FUNCTIONS)(n - 1)

    def large(n, a=1, b=2):
        c, d, e = [n], (a,), {b}
        return n if n <= 0 else random.choice(FUNCTIONS)(n - 1) + len(c + [d, e])

    def generator(n):
        return n if n <= 0 else sum(random.choice(FUNCTIONS)(n - 1) for _ in range(1))

    FUNCTIONS = [small, large, generator]

    def work():
        while not stop.is_set():
            random.choice(FUNCTIONS)(random.randrange(200))

    stop = threading.Event()
    worker = threading.Thread(target=work)
    worker.start()
    sys.setswitchinterval(1e-5)
    gc.set_threshold(1)
    gc.disable()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        Cycle()
        gc.enable()
        for frame in frames_of_threads().get(worker.ident, []):
            local_of(frame, "n")
        gc.disable()
    stop.set()
    worker.join()
    print("alive")
"""


@pytest.mark.processes
def test_reading_frames_survives_a_collection_that_lets_their_thread_go_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READ_WHILE_COLLECTING)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_the_frames_of_a_thread_are_innermost_first() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def outer() -> None:
        inner("what it waits for")

    def inner(argument: str) -> None:
        inside.set()
        go_on.wait(30)

    thread = threading.Thread(target=outer)
    thread.start()
    assert inside.wait(30) and thread.ident is not None
    frames = [frame for frame in thread_frames(thread.ident) if frame.f_code.co_filename == __file__]
    everybodys = [frame for frame in frames_of_threads()[thread.ident] if frame.f_code.co_filename == __file__]
    found = local_of(frames[0], "argument"), local_of(frames[0], "none", "of that name")
    go_on.set()
    thread.join()
    assert [frame.f_code.co_name for frame in frames] == ["inner", "outer"] and everybodys == frames
    assert found == ("what it waits for", "of that name")
    assert thread_frames(thread.ident) == []


def test_the_collector_is_left_as_the_program_has_it() -> None:
    assert gc.isenabled()
    frames_of_threads()
    assert gc.isenabled()
    gc.disable()
    try:
        frames_of_threads()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.processes
def test_a_process_that_is_forked_while_a_thread_reads_can_read_too() -> None:
    """The lock of the reader stays locked in a child that has not got the reader's thread."""
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            frames_of_threads()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        codes = []
        for _ in range(20):
            child = os.fork()
            if not child:
                signal.alarm(20)
                os._exit(0 if gc.isenabled() and frames_of_threads() else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        stop.set()
        reader.join()
    assert codes == [0] * 20
