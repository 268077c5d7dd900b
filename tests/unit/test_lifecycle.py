"""The order of a process's end and what a forked child does, in interpreters of their own: the hooks there are one for a process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ncclguard
from ncclguard import lifecycle
from ncclguard.protocol.decision import INTERRUPT_COUNTS

pytestmark = pytest.mark.processes

SAY = """
import atexit, os
def say(word):
    return lambda: print(word, flush=True)
def fail():
    raise RuntimeError("of the callback")
atexit.register(say("a handler from before"))
from ncclguard import lifecycle
from ncclguard.lifecycle import End
atexit.register(say("a sink's handler"))
"""


def lines(program: str) -> tuple[list[str], str]:
    """What the program prints, line by line, and its log; it has to succeed."""
    code = [sys.executable, "-c", SAY + program]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_the_stages_of_the_end_come_in_their_order_whenever_they_were_registered() -> None:
    said, log = lines("""
for stage in (End.CALLS, End.TRANSPORT, End.QUEUES, End.JOB):
    lifecycle.at_end(stage, say(stage.name))
lifecycle.at_end(End.JOB, say("JOB, registered last"))
lifecycle.before_end(say("the first before"))
lifecycle.before_end(say("the last before"))
forgotten = say("forgotten")
lifecycle.before_end(forgotten)
lifecycle.forget(forgotten)
print("the program", flush=True)
""")
    assert said == [
        "the program",
        "the last before",
        "the first before",
        "a sink's handler",
        "JOB",
        "JOB, registered last",
        "QUEUES",
        "TRANSPORT",
        "CALLS",
        "a handler from before",
    ]
    assert log == ""


def test_a_failing_callback_keeps_none_from_running() -> None:
    """Whatever is left out there would be a thread that comes back into a dying interpreter."""
    said, log = lines("""
lifecycle.at_end(End.JOB, fail)
lifecycle.at_end(End.JOB, say("JOB"))
lifecycle.at_end(End.CALLS, say("CALLS"))
lifecycle.before_end(fail)
""")
    assert said == ["a sink's handler", "JOB", "CALLS", "a handler from before"]
    assert log.count("RuntimeError: of the callback") == 2
    assert log.count("failed and was skipped") == 1


def test_stages_that_are_reached_early_are_done_in_order_and_at_the_end_again() -> None:
    """`destroy_process_group` does two of them, and the program may make a process group again afterwards."""
    said, _ = lines("""
for stage in End:
    lifecycle.at_end(stage, say(stage.name))
lifecycle.reach(End.QUEUES, End.JOB)
print("the program goes on", flush=True)
""")
    stages = [stage.name for stage in lifecycle.End]
    assert said == [
        "JOB", "QUEUES", "the program goes on", "a sink's handler", *stages, "a handler from before",
    ]  # fmt: skip


def test_a_forked_child_does_what_is_for_a_child_and_nothing_of_the_parents_end() -> None:
    said, log = lines("""
for number in "12":
    lifecycle.around_fork(say(f"before {number}"), say(f"after {number}"))
    lifecycle.in_child(say(f"child {number}"))
    lifecycle.in_child(fail)
lifecycle.at_end(End.JOB, say("JOB"))
told, tell = os.pipe()
printed = os.dup(1)
os.dup2(tell, 1)  # the child's lines are printed by the parent, after its own
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
os.dup2(printed, 1)
os.close(tell)
found = os.read(told, 1000).decode().split("\\n")
print("parent:", *[line for line in found if "child" not in line], sep="|")
print("child:", *[line for line in found if "child" in line], sep="|")
""")
    assert said[:2] == ["parent:|before 2|before 1|after 1|after 2|", "child:|child 1|child 2"]
    assert said[2:] == ["a sink's handler", "JOB", "a handler from before"]
    assert log.count("failed and was skipped") == 2


def test_no_other_module_of_the_library_registers_hooks_with_python() -> None:
    """Else the order of the end would be an accident of imports. Tools that run ranks are processes of their own."""
    package = Path(ncclguard.__file__).parent
    tools = {package / "faults", package / "bench", package / "training" / "stand_by.py"}
    files = [file for file in package.rglob("*.py") if not tools & {file, *file.parents}]
    found = {
        file.relative_to(package).as_posix()
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and (
            ast.unparse(node) in ("atexit.register", "os.register_at_fork", "signal.signal", "signal.set_wakeup_fd")
            or (node.attr == "excepthook" and isinstance(node.ctx, ast.Store))
        )
    }
    assert len(files) > 50
    assert found == {"lifecycle.py"}


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("y")])
def test_an_exception_that_ends_the_program_is_announced_before_it_is_printed(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, raised, trace: heard.append(("printed", raised)))
    lifecycle.watch_uncaught(lambda raised: heard.append(("announced", raised)))
    sys.excepthook(type(error), error, None)
    assert heard == [("announced", error), ("printed", error)]


def test_importing_it_needs_no_torch() -> None:
    said, _ = lines("import sys; print('torch' in sys.modules, flush=True); os._exit(0)")
    assert said == ["False"]


def test_an_interrupt_counts_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook goes on after it, and what befalls a rank an hour later is no Ctrl-C on the job."""
    now = 1000.0
    monkeypatch.setattr(lifecycle, "_interrupted", -float("inf"))
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: now)
    assert lifecycle.since_interrupt() == float("inf")
    lifecycle._note_interrupt()
    assert lifecycle.since_interrupt() == 0.0
    now += INTERRUPT_COUNTS
    assert lifecycle.since_interrupt() >= INTERRUPT_COUNTS
