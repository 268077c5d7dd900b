"""verl's own workers and managers of updates on CPUs, with a stub of a trainer and of rollouts: tests/integrations/verl_job.py.

In one job, since each of its processes takes ten seconds to import verl.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None or importlib.util.find_spec("ray") is None,
        reason="verl and ray are not installed",
    ),
]
JOB = Path(__file__).with_name("verl_job.py")
ALL, REST = ["0.0", "1.0", "1.1"], ["0.0"]


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, dict[str, Any]]]:
    """What came of each version."""
    folder = tmp_path_factory.mktemp("verl")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (folder / "stderr").open("w") as stderr, subprocess.Popen(
        [sys.executable, str(JOB), str(folder)], env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=stderr,
        text=True, start_new_session=True,
    ) as job:  # fmt: skip
        try:
            output, _ = job.communicate(timeout=500)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, (folder / "stderr").read_text()[-6000:]
    said = [json.loads(line) for line in output.splitlines() if line.startswith('{"version"')]
    yield {each["version"]: each for each in said}


def has(update: dict[str, Any]) -> list[str]:
    """The workers that have a version, all of it as it was sent."""
    assert set(update["has"].values()) <= {update["sent"]}, update
    return sorted(update["has"])


@pytest.mark.parametrize("version", [1, 3, 4, 6, 9, 11])
def test_every_worker_has_what_was_sent(updates: dict[int, dict[str, Any]], version: int) -> None:
    """Version 3 follows one for which a replica was stopped, 6 one for which it raised: it is back."""
    assert has(updates[version]) == ALL, updates[version]
    assert (updates[version]["error"], updates[version]["left_out"]) == ("", {}), updates[version]


@pytest.mark.parametrize(
    ("version", "how"), [(2, "stuck"), (5, "exited"), (10, "timed out"), (12, "lost"), (13, "lost")]
)
def test_a_replica_that_is_struck_is_left_out_and_the_others_have_the_version(
    updates: dict[int, dict[str, Any]], version: int, how: str
) -> None:
    """Stopped, raising, stopped before the update, killed; the last version comes without it."""
    update = updates[version]
    assert has(update) == REST and update["error"] == "", update
    assert list(update["left_out"]) == ["1"] and how in update["left_out"]["1"], update


def test_the_manager_of_verl_ends_the_update_with_who_was_stopped(updates: dict[int, dict[str, Any]]) -> None:
    """With verl's own manager the limit and the verdict are the checkpoint engine's."""
    assert not updates[7]["hangs"] and "stuck" in updates[7]["error"], updates[7]
    assert has(updates[7]) == [], updates[7]


def test_the_manager_of_verl_hangs_where_a_worker_is_stopped_between_updates(
    updates: dict[int, dict[str, Any]],
) -> None:
    """And ends the run where one is gone."""
    assert updates[8]["hangs"], updates[8]
    assert updates[14]["error"].startswith("ActorDiedError"), updates[14]
