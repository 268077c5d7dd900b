"""`ncclguard top` and `ncclguard set` against a process that serves them, and what they refuse."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import ncclguard as ng
from ncclguard.__main__ import main as ncclguard
from ncclguard.metrics import control, exchange
from ncclguard.metrics.monitoring import answer
from ncclguard.metrics.records import ChannelStatus
from ncclguard.metrics.registry import RecordingListener
from ncclguard.metrics.top_command import job_view, view
from ncclguard_explain import language
from tests.unit import observed
from tests.unit.test_metrics_sinks import SLOW

Serve = Callable[..., control.ControlSocket]


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for sockets of this test alone."""
    base = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    monkeypatch.setattr(control, "folders", lambda: [base / "ncclguard"])
    exchange.forget()
    return base / "ncclguard"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serve as a rank does; nothing but the number of the rank is made up."""
    opened_sockets: list[control.ControlSocket] = []

    def start(job: str = "job1", rank: int = 0) -> control.ControlSocket:
        listener = RecordingListener(job, lambda record: None)
        observed.succeed(listener)
        opened = control.open_control(job, rank, lambda question: answer(question, lambda: listener.snapshot({})))
        assert opened is not None
        opened_sockets.append(opened)
        return opened

    yield start
    for each in opened_sockets:
        each.close()


def test_only_the_user_may_enter_the_folder(serve: Serve, folder: Path) -> None:
    serve()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "job1.0.sock").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_may_enter_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    assert control.open_control("job1", 0, dict) is None
    assert "only this user may enter" in caplog.text


def test_a_socket_that_a_killed_process_left_is_replaced_and_a_living_one_is_not(
    serve: Serve, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(mode=0o700)
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(folder / "job1.0.sock"))
    left.close()
    serve()
    assert control.ask(folder / "job1.0.sock", {"command": "status"})["snapshot"]["job"] == "job1"
    assert control.open_control("job1", 0, dict) is None
    assert "another process answers" in caplog.text


def test_a_job_of_which_only_sockets_of_killed_processes_are_left_is_none(serve: Serve, folder: Path) -> None:
    serve()
    for name in ("dead.0.sock", "dead.1.sock", "job1.1.sock"):
        left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        left.bind(str(folder / name))
        left.close()
    assert control.choose(None) == ("job1", {rank: folder / f"job1.{rank}.sock" for rank in (0, 1)})


def test_a_rank_removes_what_killed_processes_of_other_jobs_have_left_but_nothing_new(
    serve: Serve, folder: Path
) -> None:
    """A new one that nobody answers at may be about to: between bind(2) and listen(2)."""
    folder.mkdir(mode=0o700)
    for name in ("old.0.sock", "new.0.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
            left.bind(str(folder / name))
    living = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    living.bind(str(folder / "living.0.sock"))
    living.listen()
    for name in ("old.0.sock", "living.0.sock"):
        os.utime(folder / name, (1.0, 1.0))
    serve()
    control.ask(folder / "job1.0.sock", {"command": "status"})
    assert sorted(path.name for path in folder.iterdir()) == ["job1.0.sock", "living.0.sock", "new.0.sock"]
    living.close()


def test_closing_removes_the_socket_and_ends_the_thread(serve: Serve, folder: Path) -> None:
    serve().close()
    assert list(folder.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "ncclguard-control"]


@pytest.mark.usefixtures("many_open_files")
def test_it_answers_in_a_process_with_more_than_1024_open_files(serve: Serve, folder: Path) -> None:
    serve()
    for _ in range(2):
        assert control.ask(folder / "job1.0.sock", {"command": "status"})["snapshot"]["job"] == "job1"


@pytest.mark.parametrize("sent", [b"no json\n", b"[1]\n", b"x" * 70_000 + b"\n", b"{}", b""])
def test_nonsense_does_not_stop_it(serve: Serve, folder: Path, sent: bytes) -> None:
    serve()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(folder / "job1.0.sock"))
        try:
            connection.sendall(sent)
        except BrokenPipeError:
            pass
    assert "snapshot" in control.ask(folder / "job1.0.sock", {"command": "status"})


@pytest.mark.parametrize("off", [{"statistics_every": 0}, {"rounds": False}])
def test_set_without_an_exchange_says_how_to_get_one(
    serve: Serve, capsys: pytest.CaptureFixture[str], off: dict[str, Any]
) -> None:
    ng.configure(**off)
    serve()
    assert ncclguard(["set", "timeout=900"]) == 2
    assert "without NCCLGUARD_STATISTICS_EVERY=0 and NCCLGUARD_ROUNDS=false" in capsys.readouterr().err


def test_what_cannot_be_set_is_refused(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    ng.configure(stuck_timeout=5)
    serve()
    for word, text in {
        "poll_idle=1": "write NAME=VALUE, with one of timeout, timeout_train",
        "timeout": "has no number: write for example timeout=900",
        "timeout=soon": "has no number",
        "timeout=-1": "timeout is -1.0; allowed: 1 ms to 1e9 s",
        "timeout=2": "every timeout must exceed stuck_timeout",
        "chunk_numel=0.5": "chunk_numel is 0.5",
        "stuck_timeout=300": "every timeout must exceed stuck_timeout",
        "warn_after=none": "warn_after is None",
        "statistics_every=10": "cannot be set in a running job",
    }.items():
        assert ncclguard(["set", word]) == 2, word
        assert text in capsys.readouterr().err
    assert exchange.proposals.newest() == (0, ())


def test_a_proposal_contains_those_before_it(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serve()
    assert ncclguard(["set", "timeout=900", "chunk_numel=5e7", "--wait", "0"]) == 1
    first, _ = exchange.proposals.newest()
    assert ncclguard(["set", "timeout_eval=none", "--wait", "0"]) == 2
    assert ncclguard(["set", "timeout=none", "--wait", "0", "--job", "job1"]) == 1
    second, values = exchange.proposals.newest()
    assert second > first
    assert values == (("timeout", None), ("chunk_numel", 50_000_000))
    said = capsys.readouterr().out
    assert "has no guarded group yet" in said
    assert "is proposed and not in force: no guarded group has begun" in said


def test_the_job_must_be_known_and_named_when_there_are_two(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert ncclguard(["top", "--once"]) == 2
    assert "can be asked; one can be once its program calls setup_nccl_monitoring()" in capsys.readouterr().err
    serve("job1")
    serve("job2")
    assert ncclguard(["top", "--once"]) == 2
    said = capsys.readouterr().err
    here = rf"\(pid {os.getpid()}: .+\)"
    assert re.search(rf"name the job with --job; there are job1 {here}, job2 {here}", said), said
    assert ncclguard(["top", "--once", "--job", "job3"]) == 2
    assert ncclguard(["top", "--once", "--job", "job2"]) == 0
    assert "job job2: 1 of 1 ranks" in capsys.readouterr().out


def test_top_shows_a_rank_that_does_not_answer(serve: Serve, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve(rank=0)
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_STREAM
    ) as stopped:  # accepts no connection: its interpreter does not run
        stopped.bind(str(folder / "job1.1.sock"))
        assert ncclguard(["top", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("all_reduce" in line and "0:cpu" in line for line in lines)
    assert any("does not answer" in line for line in lines)


def test_chinese_where_it_is_asked_for_and_can_be_written(
    serve: Serve, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(language.VARIABLE, "zh")
    assert ncclguard(["top", "--once"]) == 2
    assert capsys.readouterr().err.startswith("ncclguard top: 当前用户在本机上没有可以查询的作业；程序调用")
    serve(rank=0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stopped:
        stopped.bind(str(folder / "job1.1.sock"))
        assert ncclguard(["top", "--once"]) == 0
    text = capsys.readouterr().out
    assert "作业 job1：1 个 rank 中有 2 个在本机（" in text
    assert "job1.1.sock 处的 rank 没有回答（" in text
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True))
    assert ncclguard(["top", "--once"]) == 0
    assert b"ranks are on this host" in sys.stdout.buffer.getvalue()  # type: ignore[attr-defined]


def status(rank: int, **changes: Any) -> dict[str, Any]:
    """A rank's answer, by way of JSON as over the socket."""
    listener = RecordingListener("job1", lambda record: None)
    for _ in range(3):
        observed.succeed(listener, 4_000_000_000, 0.5, 0.25)
    listener.registry.failure("0:cpu:ab12", "barrier", "eval", 0, 60.0, 1, "late", (2,))
    snapshot = json.loads(json.dumps(listener.snapshot({}).to_dict()))
    row = {
        "rank": 2,
        "host": "node2",
        "pid": 7,
        "last": 9,
        "behind": 0.25,
        "behind_longest": 0.5,
        "held_up": 2.0,
        "waited": 0.001,
    }
    table = {"group": "0:cpu", "through": "0:cpu:ab12/10", "age": 12.4, "operations": 10, "rows": [row]}
    call = {
        "group": "0:cpu",
        "op_id": "0:cpu:ab12/11",
        "text": "barrier(phase='eval')",
        "age": 31.5,
        "limit": 300.0,
        "late": True,
    }
    snapshot |= {"rank": rank, "world_size": 4, "hang": True, "open": [call], "stragglers": [table]}
    snapshot |= {"slow": {**asdict(SLOW), "ranks": [2], "hosts": ["node2"]}}
    snapshot |= {"settings": {"0:cpu": {"timeout": 900.0, "chunk_numel": None}}}
    answer = {"snapshot": snapshot, "statistics_every": 10, "proposal": 5, "proposed": {"timeout": 800.0}}
    return {**answer, "adopted": {"0:cpu": [4, "0:cpu:ab12/10"]}, **changes}


def shown(statuses: dict[int, dict[str, Any] | str]) -> str:
    console = Console(width=150, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(view("job1", statuses))
    return console.export_text()


def test_the_view_names_who_waits_in_what_and_who_comes_last() -> None:
    text = shown({0: status(0), 1: status(1), 3: "the rank at job1.3.sock does not answer"})
    for part in (
        "job job1: 3 of 4 ranks are on this host",
        "of the others only arrivals are known here",
        "WAITING FOR LONG: ranks 0, 1",
        "barrier(phase='eval')",
        "31.5",
        "does not answer",
        "arrivals in group 0:cpu, 10 operations through 0:cpu:ab12/10; exchanged 12 s ago",
        "250.00",
        "1 late",
        "slow: rank 2 on node2, 1.20 times the others' time in each step, which costs the job 15% of its time; in loading data",
        "changed in group 0:cpu: timeout=900, chunk_numel=not set",
        "proposed, not yet in force in group 0:cpu: timeout=800",
    ):
        assert part in text, part


def test_the_view_rounds_limits_and_has_no_quantile_above_the_longest() -> None:
    """A limit is known to the time between its setting and the call's begin, a quantile to within a bucket."""
    told = status(0)
    (call,) = told["snapshot"]["open"]
    call |= {"age": 0.7, "limit": 59.9998}
    (series, *_) = told["snapshot"]["series"]
    series["longest"] = 0.3
    cells = {tuple(cell.strip() for cell in line.split("│")[1:-1]) for line in shown({0: told}).splitlines()}
    (waits,) = (row for row in cells if "barrier(phase='eval')" in row)
    assert "60" in waits and "59.9998" not in waits
    figures = [row[-4:-1] for row in cells if row[-2:-1] == ("300",)]
    assert figures and all(float(median) <= float(most) <= float(longest) for median, most, longest in figures)


@pytest.fixture
def chinese() -> Iterator[None]:
    language.choose("zh")
    yield
    language.choose(None)


def english_of(text: str) -> list[str]:
    """Words that follow each other with a space, other than lines of a program and names of commands."""
    ours = re.sub(r"\w+\.py:\d+ in \w+|`ncclguard (?:hang|top --all)`", "", text)
    return re.findall(r"[A-Za-z]{2,} [a-z]{2,}", ours)


def test_the_view_in_chinese(chinese: None) -> None:
    told = status(0)
    told["snapshot"] |= {"verdict": "barrier() failed after 3 s: rank 2 late.", "watched": {"0:gloo": 7}}
    told["snapshot"]["channels"] = [asdict(ChannelStatus(channel="weights", end="trainer", failed=2))]
    early = {"statistics_every": 0}
    for text in (shown({0: told, 1: status(1)}), shown({0: status(0, **early)}), shown({})):
        assert not english_of(text), text
    text = shown({0: told, 1: status(1)})
    for part in (
        "作业 job1：4 个 rank 中有 2 个在本机（",
        "等待过久：rank 0、1",
        "barrier() 在 3 s 后失败：rank 2 迟到。",
        "node2 上的 rank 2",
        "观察到的操作",
        "组 0:cpu 的到达情况：到 0:cpu:ab12/10 为止的 10 次操作；12 s 前交换",
        "1 迟到",
        "组 0:cpu 中已更改：timeout=900, chunk_numel=未设置",
    ):
        assert part in text, part


def test_the_view_shows_what_watch_has_counted_only_where_it_is_on() -> None:
    text = shown({0: status(0)})
    assert "guarded" in text and "watched" not in text
    counted = status(1)
    counted["snapshot"]["watched"] = {"0:gloo": 4000, "1:gloo": 711}
    (row,) = (line for line in shown({0: status(0), 1: counted}).splitlines() if line.startswith("│    1 │"))
    assert [cell.strip() for cell in row.split("│")[6:9]] == ["4711", "4", "1"]


def test_the_view_without_answers_and_without_exchange() -> None:
    assert "0 of ? ranks" in shown({})
    assert "without NCCLGUARD_STATISTICS_EVERY=0" in shown({0: status(0, statistics_every=0)})
    waiting = status(0)
    waiting["snapshot"]["stragglers"] = []
    assert "known after operation 10" in shown({0: waiting})


def test_the_view_of_many_ranks_keeps_those_that_wait_longest() -> None:
    statuses: dict[int, dict[str, Any] | str] = {}
    for rank in range(200):
        statuses[rank] = status(rank)
        statuses[rank]["snapshot"]["open"][0]["age"] = float(rank)  # type: ignore[index]
    text = shown(statuses)
    assert " 199.0 " in text
    assert " 168.0 " in text  # the 32nd
    assert " 167.0 " not in text


def job_answer(ranks: int, slow: int, **changes: Any) -> dict[str, Any]:
    """What rank 0 knows of a job on hosts of 8 ranks, one of which comes last by 300 ms."""
    rows = [
        [rank, f"node{rank // 8:04}", 1, 90 * (rank == slow), 0.3 if rank == slow else 1e-4, 0.5, 0.1, 0.01]
        for rank in range(ranks)
    ]
    table = {"group": "0:cpu", "through": "0:cpu:ab12/100", "age": 12.4, "operations": 100, "rows": rows}
    call = {"group": "0:cpu", "op_id": "0:cpu:ab12/101", "text": "barrier()", "age": 47.0, "limit": 300.0, "late": True}
    lines = [f"rank {slow} on host node{slow // 8:04} has not come: it is at train.py:8 in save"]
    awaited = {
        "group": "0:cpu:ab12",
        "generation": 0,
        "sequence": 101,
        "by": 9,
        "text": "barrier()",
        "age": 30.1,
        "lines": lines,
    }
    answer = {
        "rank": 0,
        "world_size": ranks,
        "statistics_every": 100,
        "warn_after": 30.0,
        "time": 1000.0,
        "open": [call],
        "watched": {},
        "guarded": True,
    }
    return {**answer, "tables": {"0:cpu:ab12": table}, "awaited": [awaited], **changes}


def shown_job(answers: dict[int, dict[str, Any] | str]) -> str:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(job_view("job1", answers))
    return console.export_text()


@pytest.mark.parametrize("ranks", [16, 512, 10_000, 16_384])
def test_the_view_of_a_job_has_few_lines_however_many_ranks_there_are(ranks: int) -> None:
    text = shown_job({0: job_answer(ranks, 11)})
    assert f"{ranks:,} on {ranks // 8:,} hosts are known here" in text
    assert "waiting: barrier() (0:cpu:ab12/101), for 47.0 s of 300 s on rank 0" in text
    assert "rank 11 on host node0001 has not come: it is at train.py:8 in save" in text
    assert "asked by rank 9, when it had waited for 30.1 s" in text
    assert "arrivals in group 0:cpu, 100 operations through 0:cpu:ab12/100; exchanged 12 s ago" in text
    assert "rank 11 on host node0001" in text
    assert "300.00" in text
    if ranks > 16:
        assert f"{ranks - 1:,} ranks, all but rank 11 on host node0001" in text
    assert len(text.splitlines()) < 30


def test_the_view_of_a_job_says_what_is_not_known() -> None:
    assert "does not answer" in shown_job({0: "the rank at job1.0.sock does not answer"})
    young = {
        "group": "0:cpu",
        "op_id": "0:cpu:ab12/101",
        "text": "barrier()",
        "age": 7.0,
        "limit": 300.0,
        "late": False,
    }
    assert "asked who is awaited 30 s after the first began" in shown_job(
        {0: job_answer(16, 1, awaited=[], open=[young])}
    )
    assert "is in the log of the rank that has asked the others" in shown_job({0: job_answer(16, 1, awaited=[])})
    assert "1 on this host answer" in shown_job({0: job_answer(16, 1, tables={}, guarded=False)})
    assert "the job's store did not answer in time" in shown_job({0: job_answer(16, 1, awaited=None)})
    assert "without NCCLGUARD_STATISTICS_EVERY=0" in shown_job({0: job_answer(16, 1, statistics_every=0)})
    assert "the others share no group with a rank on this host" in shown_job({0: job_answer(16, 1, world_size=64)})
    late_here = shown_job({0: job_answer(16, 1, open=[])})
    assert "waiting: barrier() (0:cpu:ab12/101), not entered by a rank on this host" in late_here
    assert "no operation waits on this host" in shown_job({0: job_answer(16, 1, open=[], awaited=[])})


def test_the_view_of_a_job_in_chinese(chinese: None) -> None:
    awaited = job_answer(64, 11)["awaited"]
    awaited[0]["lines"] = ["rank 11 on host node0001 has not come: it is at train.py:8 in save"]
    young = {**job_answer(64, 11)["open"][0], "age": 7.0}
    for changes in (
        {"awaited": awaited},
        {"awaited": None, "open": [young]},
        {"awaited": [], "open": [young]},
        {"awaited": [], "world_size": 99},
        {"awaited": [], "open": [], "statistics_every": 0},
        {"awaited": awaited, "open": [], "tables": {}},
    ):
        text = shown_job({0: job_answer(64, 11, **changes)})
        assert not english_of(text), text
    text = shown_job({0: job_answer(64, 11, awaited=awaited)})
    assert "等待中：barrier()（0:cpu:ab12/101），rank 0 已等 47.0 s，时限 300 s" in text
    assert "主机 node0001 上的 rank 11 没有来：" in text


def watched_answers(**issued: int) -> dict[int, dict[str, Any] | str]:
    """Ranks that were asked at one moment; those that have issued number 11 have waited in it for 5 s."""
    call = {"group": "0:gloo", "op_id": "0:gloo/11", "text": "all_reduce", "age": 5.0, "limit": 300.0, "late": False}
    quiet = {"awaited": [], "tables": {}, "guarded": False, "world_size": 4}
    return {
        int(name[1:]): job_answer(4, 0, open=[call] if number == 11 else [], watched={"0:gloo": number}, **quiet)
        for name, number in issued.items()
    }


def test_a_rank_here_that_has_not_issued_what_others_wait_in_has_not_come_yet() -> None:
    assert "not come yet, of the ranks on this host: ranks 1-2\n" in shown_job(
        watched_answers(r0=11, r1=10, r2=9, r3=11)
    )


@pytest.mark.parametrize(
    ("rank", "changes"),
    [
        (1, {"time": 994.9}),  # asked before it had begun on rank 0
        (1, {"watched": {"0:gloo": 11}}),  # it has come meanwhile
        (1, {"watched": {"1:gloo": 3}}),  # not in the group
        (0, {"watched": {"0:gloo": 3}}),  # the number in the id counts something else
        (0, {"watched": {}}),  # nothing counts them
    ],
)
def test_nobody_is_said_not_to_have_come_by_a_guess(rank: int, changes: dict[str, Any]) -> None:
    answers = watched_answers(r0=11, r1=10)
    assert "not come yet" in shown_job(answers)
    answers[rank] |= changes  # type: ignore[operator]
    assert "not come yet" not in shown_job(answers)


def test_a_job_of_a_version_that_counts_nothing_is_shown() -> None:
    old = status(1)
    del old["snapshot"]["watched"]
    assert "rank" in shown({0: status(0), 1: old})
    answers = watched_answers(r0=11, r1=10)
    for one in answers.values():
        for name in ("watched", "time"):
            del one[name]  # type: ignore[union-attr]
    assert "not come yet" not in shown_job(answers)


def test_a_rank_answers_for_the_job_and_leaves_out_tables_that_are_known(serve: Serve, folder: Path) -> None:
    serve()
    answer = control.ask(folder / "job1.0.sock", {"command": "job", "known": []})
    assert (answer["rank"], answer["tables"], answer["awaited"], answer["watched"]) == (0, {}, [], {})
