"""The weight sync of TRL's AsyncGRPOTrainer over the channel of weights, with TRL's own trainer, client and stubs of servers."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest

from ncclguard import faults
from tests.integrations import trl_cases as cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed"),
]


def test_training_goes_on_with_the_servers_that_can_be_updated(own_store: str, free_ports: list[int]) -> None:
    """B is stopped in version 2, back for 3, and killed in version 5."""
    ports = free_ports[:2]
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1"}
    with faults.start_ranks(cases.job, 3, args=[own_store, ports], env=quiet, timeout=280, launcher="processes") as job:
        job.wait_for("ready", [1, 2], seconds=150)
        job.tell("go")
        job.wait_for("struck 2", [0], seconds=150)
        os.kill(job.pid(2), signal.SIGCONT)
        job.wait_for("error", [2], seconds=90)
        job.tell("go on after 2")
        job.wait_for("struck 5", [0], seconds=90)
        job.tell("go on after 5")
        job.wait_for("sent", [0], seconds=90)
        os.kill(job.pid(1), signal.SIGKILL)  # a server serves for ever
        result = job.wait()
    sent = result[0].reports["sent"]
    both, rest = ["A", "B"], ["A"]
    assert [engines for _, engines, _ in sent] == [both, rest, both, both, rest, rest], result
    assert "stuck" in sent[1][2]["B"] and "lost" in sent[4][2]["B"] and sent[5][2]["B"], sent
    assert result[1].reports["served"] == [digest for digest, _, _ in sent], result
    assert result[2].reports["served"] == [sent[number][0] for number in (0, 2, 3)], result
    assert result[0].reports["version"] == cases.VERSIONS, result
