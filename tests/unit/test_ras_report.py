"""What RAS says, read and quoted: missing ranks, errors and counts, of communicators that torch knows and of others."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ncclguard.environment import ras
from ncclguard.environment.ras import QUOTED, Witness, quote
from ncclguard.incident.model import Incident
from ncclguard.incident.report import Writer, main
from ncclguard.incident.timeline import Document, RasQuote
from ncclguard.outcome import Cause
from ncclguard_explain.ras import NoWitness
from tests.unit.ras_server import Talk, answering, serving

RECORDED = Path(__file__).parent.parent / "ras_answers"

TEXT = """NCCL version 2.27.5 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 77 on node 10.0.0.2 managing GPU 1

Warnings
========

"""


def rank(number: int, pid: int, launched: int = 3, **status: int | bool) -> dict[str, Any]:
    return {
        "rank": number, "host": "10.0.0.1", "pid": pid, "cuda_dev": 0, "nvml_dev": 0,
        "status": {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
        | status,
        "collective_counts": {"Broadcast": 1, "AllReduce": launched},
    }  # fmt: skip


def missing(number: int, pid: int, unresponsive: bool = True, dead: bool = False) -> dict[str, Any]:
    status = {"unresponsive": unresponsive, "considered_dead": dead}
    return {"rank": number, "host": "10.0.0.2", "pid": pid, "status": status}


def communicator(name: str, *members: dict[str, Any]) -> dict[str, Any]:
    there = [one for one in members if "collective_counts" in one]
    return {
        "hash": name,
        "size": len(members),
        "ranks": there,
        "missing_ranks": [one for one in members if one not in there],
    }


def document(*communicators: dict[str, Any]) -> str:
    return json.dumps({"nccl_version": "2.30.7", "communicators": communicators, "ras": {"timeouts_count": 0}})


def answer(*communicators: dict[str, Any]) -> ras.Report:
    with serving(answering(document(*communicators))) as address:
        return ras.report(address, within=10)


@pytest.mark.parametrize(
    ("members", "troubles"),
    [
        ([rank(0, 10), rank(1, 11)], []),
        ([rank(0, 10), missing(1, 77)], ["rank 1 (pid 77 on 10.0.0.2) does not answer RAS"]),
        ([rank(0, 10), missing(1, 77, dead=True)], ["rank 1 (pid 77 on 10.0.0.2) considered dead by RAS"]),
        (
            [rank(0, 10), missing(1, 77, unresponsive=False)],
            ["rank 1 (pid 77 on 10.0.0.2) has left it: the process answers RAS"],
        ),
        (
            [rank(0, 10, async_error=6), rank(1, 11, async_error=6), rank(2, 12)],
            ["ranks 0-1 (pid 10 on 10.0.0.1, pid 11 on 10.0.0.1) have met a remote process error"],
        ),
        ([rank(0, 10, init_state=3), rank(1, 11)], ["rank 0 (pid 10 on 10.0.0.1) has met an internal error"]),
        ([rank(0, 10, async_error=99), rank(1, 11)], ["rank 0 (pid 10 on 10.0.0.1) has met error 99"]),
        ([rank(0, 10, init_state=7), rank(1, 11)], ["rank 0 (pid 10 on 10.0.0.1) has not finished making it"]),
        ([rank(0, 10, async_error=7), rank(1, 11)], []),  # ncclInProgress
        ([rank(0, 10, abort_flag=True), rank(1, 11)], ["rank 0 (pid 10 on 10.0.0.1) is aborting it"]),
        ([rank(0, 10), rank(1, 11, 2), rank(2, 12)], ["AllReduce launched 3 by ranks 0, 2, 2 by rank 1"]),
        ([rank(0, 10), *(missing(n, 70 + n) for n in range(1, 9))], ["ranks 1-8 do not answer RAS"]),
    ],
)
def test_each_thing_that_is_not_in_order_is_one_clause(members: list[dict[str, Any]], troubles: list[str]) -> None:
    (found,) = answer(communicator("0xa", *members)).communicators or ()
    assert list(found.troubles()) == troubles
    assert found.pids == tuple(one["pid"] for one in members)


@pytest.mark.parametrize(("file", "says"), [("stopped", "does not answer RAS"), ("dead", "considered dead by RAS")])
def test_what_nccl_2_28_9_says_of_a_missing_rank_is_no_json_and_is_read(file: str, says: str) -> None:
    """Recorded on an H200: three ranks, of which one was stopped, and then killed."""
    text = (RECORDED / f"2.28.9-rank-{file}.json.txt").read_text()
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    with serving(answering(text)) as address:
        (found,) = ras.report(address, within=10).communicators or ()
    assert found.troubles() == (f"rank 2 (pid 653 on 127.0.0.1) {says}",)


def test_what_nccl_2_28_9_says_in_text_is_quoted() -> None:
    with serving(answering((RECORDED / "2.28.9-rank-dead.txt").read_text(), json=False)) as address:
        found = ras.report(address, within=10)
    assert found.lines == (
        "DEAD",
        "1 job process is considered dead (unreachable via the RAS network)",
        "Process 653 on node 127.0.0.1 managing GPU 0",
        "#0-0 (dcda7415d19ae7e1) INCOMPLETE",
        "Missing communicator data from 1 rank",
        "Rank 2 -- GPU 0 managed by process 653 on node 127.0.0.1",
    )


def test_a_guarded_call_whose_communicator_was_ended_before_ras_was_asked_is_no_other_job() -> None:
    quoted = quote(answer(), {}, {}, own=1)
    assert quoted.reason is not None and "knows of no communicator" in quoted.reason


def test_an_older_nccl_is_quoted_in_its_own_words() -> None:
    with serving(answering(TEXT, json=False)) as address:
        found = ras.report(address, within=10)
    assert (found.nccl_version, found.communicators) == ("2.27.5", None)
    quoted = quote(found, {}, {}, own=1)
    assert quoted.evidence[0] == f"NCCL's RAS ({found.address}, NCCL 2.27.5): " + (
        "its errors and warnings, of this job or of another on this host, which it does not tell"
    )
    assert [line.strip() for line in quoted.evidence[1:]] == [
        "INCOMPLETE",
        "Missing communicator data from 1 job process",
        "Process 77 on node 10.0.0.2 managing GPU 1",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (document(communicator("0xa", rank(0, 10)))[:-40], "cannot be read"),
        ("", "is none of RAS"),
        ("Welcome to another service", "is none of RAS; it begins with 'Welcome to another service'"),
        ("{}", "nccl_version: Field required"),
        ('{"nccl_version": "2.30.7", "communicators": [{"hash": "0xa"}]}', "communicators: 0: size: Field required"),
        ("[]", "is none of RAS"),
    ],
)
def test_half_an_answer_or_another_is_no_witness(text: str, reason: str) -> None:
    with serving(answering(text)) as address, pytest.raises(NoWitness) as error:
        ras.report(address, within=10)
    assert reason in str(error.value) and address in str(error.value)


def test_communicators_without_a_process_group_come_first_and_are_told_from_those_that_have_one() -> None:
    """Rank 1 of the job is in torch's group 0 and, with a process of an inference engine, in a communicator of another."""
    found = answer(
        communicator("0xa", rank(0, 10), rank(1, 11, 2)),
        communicator("0xb", rank(0, 10), rank(1, 11)),
        communicator("0xc", rank(0, 11), missing(1, 77)),
        communicator("0xd", rank(0, 11), rank(1, 10, 4)),
    )
    quoted = quote(found, {"0": (0, 1), "dp": (0, 1), "3": (0,)}, {0: 10, 1: 11}, own=10)
    assert quoted.heading.endswith("3 of 4 communicators not in order")
    assert list(quoted.statements) == [
        "0xc, rank 1 and 1 other process, for which torch has no process group here: rank 1 (pid 77 on 10.0.0.2) "
        + "does not answer RAS",
        "0xd, ranks 0-1, for which torch has no process group here: AllReduce launched 4 by rank 1, 3 by rank 0",
        "0xa, the ranks of process groups 0, dp: AllReduce launched 3 by rank 0, 2 by rank 1",
    ]
    assert [one.groups for one in quoted.communicators] == [(), (), ("0", "dp")]


def test_processes_that_are_not_known_do_not_make_a_group_another_one() -> None:
    """Of ranks on other hosts only what the incident says is known; a number that two hosts have says nothing."""
    found = answer(communicator("0xa", rank(0, 10), rank(1, 11), rank(2, 12, 1)))
    (quoted,) = quote(found, {"0": (0, 1, 2)}, {0: 10}, own=10).communicators
    assert quoted.groups == ("0",)
    (quoted,) = quote(found, {}, {0: 10, 1: 12, 5: 12}, own=10).communicators
    assert quoted.members == "rank 0 and 2 other processes, for which torch has no process group here"


def test_an_answer_about_another_job_is_not_quoted() -> None:
    quoted = quote(answer(communicator("0xa", rank(0, 20), missing(1, 77))), {"0": (0, 1)}, {0: 10, 1: 11}, own=10)
    assert quoted.communicators == () and quoted.evidence == ()
    assert quoted.reason is not None and "this process (10) is in none" in quoted.reason


def test_of_many_communicators_some_are_quoted() -> None:
    found = answer(*(communicator(f"0x{n}", rank(0, 10), missing(1, 77)) for n in range(QUOTED + 3)))
    quoted = quote(found, {}, {}, own=10)
    assert len(quoted.communicators) == QUOTED
    assert f"{QUOTED + 3} of {QUOTED + 3} communicators" in quoted.heading
    assert quoted.statements[-1].startswith("and 3 more")


def incident() -> Incident:
    return Incident(
        id="ab-0-17.0", op="all_reduce", op_id="0/17", group="0", generation=0, cause=Cause.LATE, culprits=(2,),
        deadline_expired=True, agreed=True, attempts=1, participants=(0, 1, 2), summary="all_reduce failed: rank 2 late.",
        advice="See what rank 2 did instead.",
    )  # fmt: skip


@contextmanager
def asked(
    monkeypatch: pytest.MonkeyPatch, *talks: Talk, pids: Mapping[int, int], wanted: bool = True
) -> Iterator[Witness]:
    """A witness that asks a server, of a job whose rank 0 is this process."""
    with serving(*talks) as address:
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        yield Witness(lambda: wanted, lambda _: ({"0": tuple(sorted(pids))}, pids))


def written(folder: Path) -> tuple[Document, str]:
    (data,), (page,) = folder.glob("*.json"), folder.glob("*.html")
    return Document.model_validate_json(data.read_text()), page.read_text()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("os.getpid", lambda: 10)
    return 10


def test_the_report_quotes_it_as_text_page_and_data_and_the_incident_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], own: int
) -> None:
    said = document(communicator("0xa<b>", rank(0, own), missing(1, 77)))
    with asked(monkeypatch, answering(said), pids={0: own, 1: 77}) as witness:
        writer = Writer(str(tmp_path), True, 0, 2, witness)
        writer.expect()
        assert witness.quote(incident(), 10) is not None  # it has answered before the verdict
        writer.submit(incident(), "ab", {})
        assert writer.wait(30)
    found, page = written(tmp_path)
    assert found.incident == incident()
    assert found.ras is not None and found.ras.reason is None
    line = "the ranks of process group 0: rank 1 (pid 77 on 10.0.0.2) does not answer RAS"
    assert line in found.ras.statements[0]
    assert "0xa&lt;b&gt;, the ranks of process group 0: rank 1" in page and "0xa<b>" not in page
    assert "A witness only: nobody is named because of it" in page
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert line in shown
    (file,) = tmp_path.glob("*.json")
    assert main([str(file)]) == 0
    assert line in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_an_answer_that_takes_long_comes_after_the_report_which_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, own: int
) -> None:
    reported = threading.Event()

    def late(connection: socket.socket) -> None:
        assert reported.wait(10)
        answering(document(communicator("0xa", rank(0, own), missing(1, 77))))(connection)

    monkeypatch.setattr("ncclguard_explain.ras.FIRST_LINE", 10.0)
    monkeypatch.setattr(ras, "WITHIN", 20.0)
    with asked(monkeypatch, late, pids={0: own, 1: 77}) as witness, caplog.at_level(logging.WARNING):
        writer = Writer(str(tmp_path), False, 0, 2, witness)
        writer.submit(incident(), "ab", {})
        end = time.monotonic() + 10
        while not list(tmp_path.glob("*.html")):
            assert time.monotonic() < end, "the report waits for RAS"
            time.sleep(0.01)
        assert written(tmp_path)[0].ras is None
        reported.set()
        assert writer.wait(30)
    found, page = written(tmp_path)
    assert found.ras is not None and "does not answer RAS" in found.ras.statements[0] and "does not answer RAS" in page
    assert "to incident ab-0-17.0: NCCL's RAS" in caplog.text and "does not answer RAS" in caplog.text
    assert caplog.text.count("the report of incident") == 1


def test_where_there_is_no_answer_the_files_say_why_and_the_panel_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_RAS_ENABLE", "0")
    with asked(monkeypatch, answering(TEXT), pids={0: 10}) as witness:
        writer = Writer(str(tmp_path), True, 0, 2, witness)
        writer.submit(incident(), "ab", {})
        assert writer.wait(30)
    found, page = written(tmp_path)
    assert found.ras == RasQuote(reason="RAS is switched off by NCCL_RAS_ENABLE=0")
    assert "NCCL&#39;s RAS is no witness here: RAS is switched off" in page
    assert "RAS" not in capsys.readouterr().err


def test_a_process_without_cuda_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[str] = []
    with asked(monkeypatch, answering(TEXT, asked=commands), pids={0: 10}, wanted=False) as witness:
        writer = Writer(str(tmp_path), False, 0, 2, witness)
        writer.expect()
        writer.submit(incident(), "ab", {})
        assert writer.wait(30)
    assert written(tmp_path)[0].ras is None and commands == []


def test_incidents_of_one_moment_share_an_answer(monkeypatch: pytest.MonkeyPatch, own: int) -> None:
    """A rank that is away holds up all of its groups, and each question has all processes of the job answer."""
    commands: list[str] = []
    with asked(
        monkeypatch, answering(document(communicator("0xa", rank(0, own))), asked=commands), pids={0: own}
    ) as it:
        for _ in range(5):
            started = time.monotonic()
            assert it.begin()
            assert time.monotonic() - started < 1.0
        assert it.quote(incident(), 10) is not None
        assert it.begin() and it.quote(incident(), 0.0) is not None
    assert commands.count("VERBOSE STATUS") == 1
