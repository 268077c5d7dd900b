"""vLLM's own factories, base classes, clients and reloading on CPUs, with the weight transfer "ncclguard"."""

from __future__ import annotations

import importlib.util
import os
import signal
from typing import Any

import pytest

from ncclguard import faults
from tests.integrations import vllm_cases as cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_an_engine_that_is_struck_is_left_out_and_the_others_have_the_version(
    own_store: str, free_ports: list[int]
) -> None:
    """B is stopped in version 2, cannot load version 4, is killed in version 6; it is back for 3 and 5."""
    ports = free_ports[:2]
    with faults.start_ranks(cases.job, 3, args=[own_store, ports], timeout=280, launcher="processes") as job:
        job.wait_for("ready", [1, 2], seconds=150)
        job.tell("go")
        for version in cases.STRIKES:
            job.wait_for(f"struck {version}", [0], seconds=90)
            if version == 2:
                os.kill(job.pid(2), signal.SIGCONT)
                job.wait_for("error", [2], seconds=60)
            job.tell(f"go on after {version}")
        job.wait_for("done", [0], seconds=60)
        os.kill(job.pid(1), signal.SIGKILL)  # a server serves for ever
        result = job.wait()
    sent: list[dict[str, Any]] = result[0].reports["sent"]
    assert [each["error"] for each in sent] == [""] * cases.VERSIONS, result
    engines = {each["version"]: each["engines"] for each in sent}
    assert engines == {1: ["A", "B"], 2: ["A"], 3: ["A", "B"], 4: ["A"], 5: ["A", "B"], 6: ["A"], 7: ["A"]}, result
    reasons = {each["version"]: each["failed"].get("B", "") for each in sent}
    assert all(how in reasons[version] for version, how in {2: "stuck", 4: "size mismatch", 6: "lost"}.items()), result
    assert reasons[7] and not any(reasons[version] for version in (1, 3, 5)), result
    digests = {str(each["version"]): each["digest"] for each in sent}
    assert dict(result[1].reports["served"]) == digests, result
    assert dict(result[2].reports["served"]) == {version: digests[version] for version in ("1", "3", "5")}, result
