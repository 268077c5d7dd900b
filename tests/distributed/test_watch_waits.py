"""`watch()` where no process group follows, or none is there any more: nobody takes silence for observation."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

from ncclguard import torch_compat

BEGIN = (
    "import logging, os; logging.basicConfig(level=logging.INFO); import ncclguard as ng, torch.distributed as dist\n"
)
INIT = "dist.init_process_group('gloo', init_method='file://' + os.environ['MEETING'], rank=0, world_size=1)\n"
WAITS = "watch() observes from init_process_group on, which has not been called yet"
NOTHING = "watch() has observed nothing: 2 ranks were launched, and init_process_group was not called after watch()"
DESTROYED = "watch() was called after destroy_process_group: nothing is observed until the next init_process_group"


def said(program: str, meeting: object, **environ: str) -> str:
    """What a process says that a launcher seems to have started."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        env={"PATH": "/usr/bin:/bin", "RANK": "0", "WORLD_SIZE": "2", "MEETING": f"{meeting}/store", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_job_that_never_makes_its_group_is_told_at_its_end(tmp_path: object) -> None:
    text = said("handle = ng.watch()", tmp_path)
    assert text.count(WAITS) == 1 and text.count(NOTHING) == 1, text


@pytest.mark.parametrize(
    "program",
    ["ng.watch()\n" + INIT, INIT + "ng.watch()", "with ng.watch(): pass"],
    ids=["before", "after", "stopped"],
)
def test_nothing_is_said_at_the_end_where_it_began_or_was_stopped(program: str, tmp_path: object) -> None:
    text = said(program, tmp_path)
    assert "has observed nothing" not in text and "Traceback" not in text, text


def test_where_the_making_of_the_group_failed_nobody_is_told_that_it_was_not_called(tmp_path: object) -> None:
    never_comes = "import datetime\nng.watch()\n" + INIT.replace(
        "size=1", "size=2, timeout=datetime.timedelta(seconds=1)"
    )
    text = said(never_comes, tmp_path)
    assert "watch() has observed nothing: init_process_group failed on rank 0" in text and NOTHING not in text, text


def test_one_process_is_told_nothing(tmp_path: object) -> None:
    assert "watch()" not in said("ng.watch()", tmp_path, WORLD_SIZE="1")


def test_after_the_end_of_the_group_it_says_that_it_waits_for_the_next(tmp_path: object) -> None:
    """It does not raise: a program that is restarted within its process destroys its group and begins anew."""
    text = said(INIT + "dist.destroy_process_group()\nng.watch()", tmp_path)
    assert DESTROYED in text and NOTHING in text, text


def test_a_wrong_variable_is_an_error_at_once(tmp_path: object) -> None:
    text = said("ng.watch()\nprint('went on')", tmp_path, NCCLGUARD_TIMEOUT="abc")
    assert "GuardConfigError: the environment variable NCCLGUARD_TIMEOUT is 'abc'" in text, text
    assert "went on" not in text


def test_an_error_of_ours_after_init_is_said_before_where_it_came_from(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of ours may break init_process_group, so that it is logged; what is wrong comes first."""

    def begin() -> None:
        raise ValueError("the environment variable NCCLGUARD_TIMEOUT is 'abc'")

    torch_compat.groups._call_all([begin, functools.partial(begin)])
    for text in caplog.messages:
        assert text.startswith("ncclguard: ValueError: the environment variable NCCLGUARD_TIMEOUT is 'abc'; ")
        assert "<function" not in text and "begin was skipped" in text
    assert len(caplog.messages) == 2
