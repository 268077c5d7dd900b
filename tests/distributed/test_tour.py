"""The tour's commands run as they stand on the page, and print what the page says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(script: str, folder: Path) -> str:
    """What bash prints, stdout and stderr as they come; it stops at the first command that fails."""
    # The programs of the environment that runs the tests come first, so that `python3` is one that the project takes.
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = subprocess.Popen(
        ["bash", "-e"],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(script, timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun's ranks lead sessions of their own: it ends them
            process.wait(timeout=30)
    assert process.returncode == 0, output
    return output


def said(expected: str, output: str) -> bool:
    """Whether a line of the page was printed, with anything where the page has `...`; ranks may end each other's lines."""
    return re.search(re.escape(expected.strip()).replace(r"\.\.\.", ".*"), output) is not None


@pytest.mark.slow
@pytest.mark.timeout(240)  # half a minute on two idle cores; the limit is for busy ones
def test_the_tour_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    """In one shell, from the root of what looks like a clone and takes files of its own."""
    for path in ROOT.iterdir():
        if path.name != "tour":
            (tmp_path / path.name).symlink_to(path)
    blocks = BLOCK.findall((ROOT / "docs" / "tour.md").read_text())
    output = run("".join(text for kind, text in blocks if kind == "sh"), tmp_path)
    missing = [line for kind, text in blocks if kind == "text" for line in text.splitlines() if not said(line, output)]
    assert not missing, f"{missing}\nwere not printed:\n{output}"
    assert len(blocks) > 8
    assert list((tmp_path / "tour" / "ncclguard-incidents").glob("*.html"))
