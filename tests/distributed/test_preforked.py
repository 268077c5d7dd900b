"""A program that is a fork (tests/preforked.py) is to those who start and see it what a process of its own is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import preforked

TELLS = """
import json, os, sys
import __main__
here = {"argv": sys.argv, "orig": sys.orig_argv, "path": sys.path[0], "folder": os.getcwd(), "name": __name__}
here |= {"file": getattr(__main__, "__file__", None), "own": sys.modules["__main__"].__dict__ is globals()}
here |= {"parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "mine": os.environ.get("MINE")}
shown = open("/proc/self/environ").read().split("\\0")
here |= {"shown": [text for text in shown if text.startswith("MINE")], "in": sys.stdin.read()}
print(json.dumps(here))
print("on the other", file=sys.stderr)
sys.exit(int(os.environ.get("ENDS_WITH", 0)))
"""
AS_EVER = pytest.mark.parametrize(
    "end", ["return", "raise ValueError('of its own')", "raise SystemExit('a word')", "raise KeyboardInterrupt"]
)


@pytest.fixture
def both() -> Iterator[Callable[..., list[Any]]]:
    """Run something with programs of their own, and with forks."""

    def run(what: Callable[[], Any]) -> list[Any]:
        found = []
        for programs in (nullcontext(), preforked.programs()):
            with programs:
                found.append(what())
        return found

    yield run


def ended(*command: str, **options: Any) -> tuple[int, str, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("way", ["script", "-c", "-u"])
def test_it_sees_what_a_process_of_its_own_sees(
    both: Callable[..., list[Any]], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "tells.py").write_text(TELLS)
    begin = {"script": ["tells.py"], "-c": ["-c", TELLS], "-u": ["-u", "tells.py"]}[way]
    env = {**os.environ, "MINE": "and no other", "ENDS_WITH": "7"}
    options = {"env": env, "cwd": tmp_path, "input": "said", "start_new_session": True}
    own, forked = both(lambda: ended(sys.executable, *begin, "one", "-m", **options))
    assert own == forked
    assert own[0] == 7 and f'"parent": {os.getpid()}' in own[1] and '"leads": true' in own[1]


@AS_EVER
def test_it_ends_like_one(both: Callable[..., list[Any]], end: str, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(f"def ends():\n    {end}\n\nends()\n")
    own, forked = both(lambda: ended(sys.executable, str(script)))
    assert own == forked


def test_it_is_a_child_that_can_be_signalled_and_waited_for() -> None:
    with preforked.programs():
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
            command = [sys.executable, "-c", "import time; print('runs', flush=True); time.sleep(100)"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
                assert process.stdout is not None and process.stdout.readline() == "runs\n"
                assert psutil.Process(process.pid).ppid() == os.getpid()
                process.send_signal(number)
                assert process.wait(60) == -number


def test_the_ranks_of_a_launcher_are_its_children_and_end_with_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "began = time.process_time()\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "sys.stdout.write(f'{os.getppid()} {time.process_time() - began < 1.0}\\n')\n"
        "sys.stdout.flush()\n"
        "time.sleep(100)\n"
    )
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(script)]
    with (
        preforked.programs(),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as job,
    ):
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == [f"{job.pid} True\n"] * 2
        below = psutil.Process(job.pid).children(recursive=True)
        job.terminate()
        job.wait(60)
        _, alive = psutil.wait_procs(below, timeout=60)
        assert not alive


def test_what_cannot_be_a_fork_is_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('customized')")
    with preforked.programs():
        assert ended(sys.executable, "-c", "0", env={**os.environ, "PYTHONPATH": str(tmp_path)})[1] == "customized\n"
        assert ended(sys.executable, "-S", "-c", "import sys; print('torch' in sys.modules)")[1] == "False\n"
        assert ended(sys.executable, "-c", "import sys; print('torch' in sys.modules)")[1] == "True\n"
        with pytest.raises(FileNotFoundError):
            ended(sys.executable, "-c", "0", cwd=tmp_path / "none")
