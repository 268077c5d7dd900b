"""`ncclguard doctor` and NCCL's RAS: skipped plainly where there is none, a warning where it does not answer or has found something."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ncclguard.environment.doctor import checks
from ncclguard.environment.doctor.checks import Check, Context, Status
from ncclguard.environment.network import read_job
from tests.unit.ras_server import answering, serving

OLD = "NCCL version 2.27.5 compiled with CUDA 12.9\n\nErrors\n======\n\nDEAD\n  1 job process is considered dead\n\nWarnings\n========\n\n"


def check(address: str, nccl: str | None = "2.30.7", **environ: str) -> Check:
    """The check in a process with that NCCL; nothing else of its surroundings matters."""
    environ = {"NCCL_RAS_ADDR": address, "NCCL_CONF_FILE": "/dev/null", **environ}
    report: Any = SimpleNamespace(versions=SimpleNamespace(nccl=nccl))
    return checks.check_ras(Context(read_job(environ), "node0", environ, report, (), (), Path("/")))


def assert_says(found: Check, status: Status, *texts: str) -> None:
    assert (found.name, found.status) == ("ras", status), found
    for text in texts:
        assert text in f"{found.detail} {found.advice}", found
    assert bool(found.advice) == (status == "warning")


def document(launched: int = 3, missing: bool = False) -> str:
    ranks = [{"rank": n, "pid": 10 + n, "collective_counts": {"AllReduce": 3 if n == 0 else launched}} for n in (0, 1)]
    absent = [{"rank": 1, "host": "10.0.0.2", "pid": 77, "status": {"unresponsive": True, "considered_dead": False}}]
    one = {"hash": "0xa", "size": 2, "ranks": ranks[: 1 if missing else 2], "missing_ranks": absent if missing else []}
    return json.dumps({"nccl_version": "2.30.7", "communicators": [one]})


@pytest.mark.parametrize(("nccl", "text"), [(None, "has no NCCL"), ("2.23.4", "2.23.4 has none; it came with 2.24")])
def test_without_an_nccl_that_has_it_it_is_skipped(nccl: str | None, text: str) -> None:
    assert_says(check("localhost:1", nccl), "skipped", text)


def test_switched_off_it_is_skipped_with_the_variable_that_does_so() -> None:
    assert_says(check("localhost:1", NCCL_RAS_ENABLE="0"), "skipped", "switched off by NCCL_RAS_ENABLE=0")


def test_where_no_job_runs_it_is_skipped_with_the_command_for_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert_says(check(address), "skipped", f"nobody listens at {address}", f"explain --ras {address}")


@pytest.mark.parametrize("launched", [3, 2])
def test_a_job_in_order_is_ok_also_while_its_ranks_run_at_their_own_pace(launched: int) -> None:
    with serving(answering(document(launched))) as address:
        found = check(address)
    assert_says(found, "ok", f"NCCL 2.30.7 answers at {address} for 1 communicators, every rank answers")
    assert ("as in any job that runs" in found.detail) is (launched != 3)


def test_a_rank_that_does_not_answer_is_a_warning() -> None:
    with serving(answering(document(missing=True))) as address:
        told = check(address)
    assert_says(told, "warning", "0xa of 2 ranks: rank 1 (pid 77 on 10.0.0.2) does not answer RAS", f"--ras {address}")


def test_an_older_nccl_is_understood_in_text() -> None:
    with serving(answering(OLD, json=False)) as address:
        assert_says(
            check(address, "2.27.5"), "warning", "NCCL 2.27.5 answers", "DEAD; 1 job process is considered dead"
        )
    with serving(answering(OLD.replace("DEAD\n  1 job process is considered dead\n", ""), json=False)) as address:
        assert_says(check(address, "2.27.5"), "ok", "in text")


def test_another_server_on_the_port_is_a_warning_that_says_what_to_set() -> None:
    def web(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.recv(100)

    with serving(web) as address:
        assert_says(check(address), "warning", "something else than RAS", "NCCL_RAS_ADDR=localhost:PORT")
