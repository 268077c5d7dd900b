"""The fast tier starts no process: the check that tests/conftest.py makes for each of its tests works."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

STARTS: dict[str, Callable[[], object]] = {
    "subprocess.Popen": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "os.system": lambda: os.system("true"),
    "os.posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "os.fork": lambda: multiprocessing.get_context("fork").Process(target=int).start(),
}


@pytest.mark.parametrize("event", STARTS)
def test_a_process_is_refused_and_noted(event: str, no_process_in_the_fast_tier: list[str]) -> None:
    with pytest.raises(AssertionError, match="mark the test with pytest.mark.processes"):
        STARTS[event]()
    assert [text.split()[0] for text in no_process_in_the_fast_tier] == [event]
    no_process_in_the_fast_tier.clear()  # or this test would fail for it, also if it had caught the error


@pytest.mark.processes
def test_with_the_marker_a_process_may_be_started() -> None:
    STARTS["subprocess.Popen"]()
