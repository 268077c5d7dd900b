"""Monitoring of a real job: the table of stragglers, settings that all ranks change at the same operation, and faults in between."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.__main__ import main as ncclguard
from ncclguard.config import STATISTICS_EVERY, current_config
from ncclguard.metrics import control
from ncclguard.metrics.exchange import Exchange, exchanges, proposals
from ncclguard.metrics.records import Change, Record, Snapshot
from ncclguard.metrics.settings import config_of

EVERY = 10
LIMIT = 3.0
SETTINGS = {
    "NCCLGUARD_STATISTICS_EVERY": str(EVERY),
    "NCCLGUARD_ADJUST": "true",
    "NCCLGUARD_ADJUST_TIMEOUT_MIN": "1",
    "NCCLGUARD_ADJUST_TIMEOUT_MAX": str(2 * LIMIT),
    "NCCLGUARD_TIMEOUT_SMALL": str(LIMIT),
    "NCCLGUARD_WARN_AFTER": "1",
    "NCCLGUARD_REPORT_DIR": "none",
}


def the_exchange() -> Exchange:
    (exchange,) = exchanges()
    return exchange


def told(word: str) -> bool:
    with contextlib.suppress(TimeoutError):
        faults.wait_until_told(word, 0.001)
        return True
    return False


def barriers_until_the_exchange(**options: Any) -> None:
    """The next operation is one that carries the exchange; all ranks know its number."""
    while True:
        outcome = ng.safe_barrier(timeout=60, **options).raise_if_failed()
        if int(outcome.op_id.rpartition("/")[2]) % EVERY == EVERY - 1:
            return


def monitored(log: str) -> None:
    """Rank 1 has no monitoring of its own: agreeing needs none."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seen: list[Record] = []
    if rank != 1:
        ng.setup_nccl_monitoring(seen.append, f"jsonl:{log}", interval=0.2, job="monitored")

    for _ in range(3 * EVERY):  # rank 1 is slow to arrive
        if rank == 1:
            time.sleep(0.2)
        ng.safe_all_reduce(torch.ones(400)).raise_if_failed()
    table = the_exchange().table
    assert table is not None
    faults.report(table=table.through, rows=[[row.rank, row.last, row.behind, row.held_up] for row in table.rows])

    stop, steps = torch.zeros(1), []  # settings are changed from outside
    while not stop.item():
        if rank == 0 and told("stop"):
            stop.fill_(1)
        ng.safe_broadcast(stop, 0).raise_if_failed()
        outcome = ng.safe_all_reduce(torch.ones(400)).raise_if_failed()
        steps.append((outcome.op_id, outcome.chunks))
        time.sleep(0.002)
    chunks = [count for _, count in steps]
    faults.report(
        chunks=[chunks[0], chunks[-1]],
        turned=sum(one != other for one, other in itertools.pairwise(chunks)),
        first=next(op_id for op_id, count in steps if count == 4),
        after=the_exchange().adopted_after,
        settings=dict(the_exchange().settings.changed()),
    )

    barriers_until_the_exchange()  # a deadline passes in the very operation that carries the exchange
    if rank == 2:
        time.sleep(LIMIT + 2.5)
    with ng.phase("small"):
        outcome = ng.safe_barrier()
    faults.report(late=[outcome.ok, outcome.agreed, str(outcome.cause), list(outcome.culprits), outcome.op_id])
    for _ in range(EVERY):
        ng.safe_barrier(timeout=60).raise_if_failed()
    faults.report(limit=the_exchange().settings.get("timeout_small"))

    barriers_until_the_exchange()  # and a rank dies before it
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(400)
    outcome = ng.safe_all_reduce(total, on_lost="shrink", timeout=60)
    for _ in range(2 * EVERY):
        ng.safe_barrier(timeout=60, on_lost="shrink").raise_if_failed()
    table = the_exchange().table
    assert table is not None
    faults.report(
        shrunk=[outcome.ok, list(outcome.participants), total.unique().tolist()],
        survivors=sorted(row.rank for row in table.rows),
        changes=[[one.op_id, one.name, one.old, one.new, one.reason] for one in seen if isinstance(one, Change)],
        hang=any(one.hang for one in seen if isinstance(one, Snapshot)),
    )
    dist.destroy_process_group()


def run(command: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command for the job."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = ncclguard([command, "--job", "monitored", *arguments])
    return code, output.getvalue()


def slow_rank_is_known(rank0: Path) -> bool:
    tables = control.ask(rank0, {"command": "status"})["snapshot"]["stragglers"]
    return bool(tables) and tables[0]["operations"] >= 3 * EVERY


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One job for all tests here, with both commands run beside it."""
    with pytest.MonkeyPatch.context() as patch:
        base = tmp_path_factory.mktemp("run")
        log = base / "rank{rank}.jsonl"
        patch.setenv("XDG_RUNTIME_DIR", str(base))
        found: dict[str, Any] = {"log": log}
        with faults.start_ranks(monitored, 3, args=[str(log)], env=SETTINGS, timeout=100) as started:
            until = time.monotonic() + 60
            while len(control.jobs().get("monitored", {})) < 2 and time.monotonic() < until:
                time.sleep(0.05)
            rank0 = control.jobs()["monitored"][0]
            while not slow_rank_is_known(rank0) and time.monotonic() < until:
                time.sleep(0.05)
            found["set"], found["set text"] = run("set", "chunk_numel=100", "timeout_train=77", "--wait", "60")
            found["top"], found["top text"] = run("top", "--once")
            time.sleep(0.2)
            started.tell("stop")
            found["result"] = started.wait()
        return found


def of_all(job: dict[str, Any], name: str, ranks: tuple[int, ...] = (0, 1, 2)) -> Any:
    """What was reported under a name, which must be the same on all ranks."""
    values = [job["result"].values(name).get(rank) for rank in ranks]
    assert all(value == values[0] for value in values), (values, job["result"])
    assert values[0] is not None, job["result"]
    return values[0]


def test_the_rank_that_comes_last_is_named_on_all_ranks(job: dict[str, Any]) -> None:
    """0.2 s in each of 30 operations, by what each rank waited itself."""
    assert of_all(job, "table").endswith("/30")
    slowest, last, behind, held_up = of_all(job, "rows")[0]
    assert slowest == 1
    assert last >= 24
    assert behind >= 0.12
    assert held_up >= 3


def test_set_changes_all_ranks_after_the_same_operation(job: dict[str, Any]) -> None:
    assert job["set"] == 0, (job["set text"], job["result"])
    after = of_all(job, "after")
    assert f"is in force on all ranks of group 0:cpu of job monitored, since operation {after}" in job["set text"]
    number = int(after.rpartition("/")[2])
    assert number % EVERY == 0
    first = int(of_all(job, "first").rpartition("/")[2])
    assert number < first <= number + 2  # the very next all-reduce, of every second operation
    assert of_all(job, "chunks") == [1, 4]
    assert of_all(job, "turned") == 1
    assert of_all(job, "settings") == {"timeout_train": 77.0, "chunk_numel": 100}


def test_top_shows_the_ranks_that_serve_it_and_the_stragglers(job: dict[str, Any]) -> None:
    assert job["top"] == 0
    text = job["top text"]
    assert "job monitored: 2 of 3 ranks are on this host" in text
    assert "arrivals in group 0:cpu" in text
    assert "all_reduce" in text
    assert "timeout_train=77" in text


def test_an_exchange_that_fails_has_the_verdict_of_its_operation(job: dict[str, Any]) -> None:
    """Rank 2 came after the deadline to an operation that carried the exchange, and took the verdict too."""
    ok, agreed, cause, culprits, op_id = of_all(job, "late")
    assert (ok, agreed, cause, culprits) == (False, True, "late", [2])
    assert int(op_id.rpartition("/")[2]) % EVERY == 0


def test_a_limit_that_was_too_short_is_raised_on_all_ranks_at_the_same_operation(job: dict[str, Any]) -> None:
    assert of_all(job, "limit") == 2 * LIMIT
    changes = of_all(job, "changes", (0,))
    (raised,) = (one for one in changes if one[1] == "timeout_small")
    op_id, _, old, new, reason = raised
    assert (old, new) == (LIMIT, 2 * LIMIT)
    assert reason == "a deadline passed 1 times while all ranks were alive"
    assert int(op_id.rpartition("/")[2]) == int(of_all(job, "late")[4].rpartition("/")[2]) + EVERY


def test_a_rank_that_dies_at_the_exchange_is_left_out_of_the_next(job: dict[str, Any]) -> None:
    result = job["result"]
    assert [rank.end for rank in result] == ["exit 0", "exit 0", "SIGKILL"], result
    assert of_all(job, "shrunk", (0, 1)) == [True, [0, 1], [2.0]]
    assert of_all(job, "survivors", (0, 1)) == [0, 1]


def test_what_happened_is_in_the_json_log(job: dict[str, Any]) -> None:
    assert job["result"].values("hang")[0] is True  # while the others waited for rank 2
    lines = Path(str(job["log"]).format(rank=0)).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert {record["kind"] for record in records} == {"snapshot", "failure", "change"}
    (failure,) = (record for record in records if record["kind"] == "failure")
    assert (failure["cause"], failure["culprits"], failure["phase"]) == ("late", [2], "small")
    counted = {(one["op"], one["phase"]): one for one in records[-1]["series"]}
    assert counted["barrier", "small"]["failures"] == {"late": 1}
    assert counted["all_reduce", "none"]["count"] >= 3 * EVERY


def looking_for_the_length_of_pieces() -> None:
    """Large operations, with an exchange after every fourth."""
    ng.configure(
        statistics_every=4, adjust=True, chunk_numel=200_000, adjust_chunk_min=50_000, adjust_chunk_max=1_000_000,
        report_dir=None,
    )  # fmt: skip
    dist.init_process_group("gloo")
    pieces, right = [], True
    for turn in range(40):
        tensor = torch.full((1_000_000,), float(turn + dist.get_rank()))
        pieces.append(ng.safe_all_reduce(tensor, timeout=60).raise_if_failed().chunks)
        right = right and bool((tensor == 2 * turn + 1).all())
    faults.report(pieces=pieces, right=right, numel=config_of("0", current_config()).chunk_numel)
    dist.destroy_process_group()


def test_all_ranks_change_the_length_of_pieces_at_the_same_operation() -> None:
    """Doubled after the first exchange, to see whether that is faster; what follows depends on the machine."""
    result = faults.run_ranks(looking_for_the_length_of_pieces, 2, timeout=110).check()
    pieces = result[0].reports["pieces"]
    assert pieces == result[1].reports["pieces"]
    assert pieces[:5] == [5, 5, 5, 5, 3]
    assert 1 <= min(pieces) <= max(pieces) <= 20  # within the bounds
    assert result[0].reports["numel"] == result[1].reports["numel"]
    assert all(rank.reports["right"] for rank in result)
    assert "chunk_numel is 400000 on all ranks, was 200000" in result[0].output


def through_a_process_group() -> None:
    """Asynchronous collectives of a guarded process group; a proposal that only rank 1 knows."""
    dist.init_process_group("gloo")
    group = dist.new_group(backend="ncclguard")
    assert group is not None
    if dist.get_rank() == 1:
        proposals.make({"timeout": 50.0, "chunk_numel": 7})
    works = [dist.all_reduce(torch.ones(100), group=group, async_op=True) for _ in range(2 * EVERY + 2)]
    for work in works:
        assert work is not None
        work.wait()
    exchange = the_exchange()
    table = exchange.table
    assert table is not None
    faults.report(
        group=exchange.group, operations=table.operations, settings=dict(exchange.settings.changed()),
        limit=group.limit(), known=dict(proposals.newest()[1]),
    )  # fmt: skip
    dist.destroy_process_group()


def test_a_guarded_process_group_takes_limits_only() -> None:
    """Its calls are made before those ahead of them have ended: another length of pieces would divide the ranks."""
    settings = {"NCCLGUARD_STATISTICS_EVERY": str(EVERY), "NCCLGUARD_REPORT_DIR": "none"}
    result = faults.run_ranks(through_a_process_group, 2, env=settings, timeout=60)
    assert result.values("settings") == {0: {"timeout": 50.0}, 1: {"timeout": 50.0}}, result
    assert result.values("limit") == {0: 50.0, 1: 50.0}
    assert set(result.values("operations").values()) == {2 * EVERY}
    assert result.values("known")[0] == {"timeout": 50.0, "chunk_numel": 7}


class SaysWhoIsAwaited(logging.Handler):
    """Reports the monitor's warning, which comes in its own thread."""

    def emit(self, record: logging.LogRecord) -> None:
        if "has been waiting for" in record.getMessage():
            faults.report(warned=record.getMessage())


def by_default(late: float) -> None:
    """A program that sets nothing and is asked for its monitoring; rank 1 comes late to each operation."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seen: list[Record] = []
    if rank == 0:
        logging.getLogger("ncclguard").addHandler(SaysWhoIsAwaited())
        ng.setup_nccl_monitoring(seen.append, job="monitored")
    stop, limits = torch.zeros(1), []
    while not stop.item():
        if rank == 0 and len(limits) >= STATISTICS_EVERY and told("stop"):  # looking takes rank 0 some time too
            stop.fill_(1)
        if rank == 1:
            time.sleep(late)
        outcome = ng.safe_broadcast(stop, 0).raise_if_failed()
        limits.append((int(outcome.op_id.rpartition("/")[2]), config_of("0", current_config()).timeout))
        if limits[-1][0] == STATISTICS_EVERY:
            table = the_exchange().table
            assert table is not None
            faults.report(
                table=table.through, age=table.age, rows=[[row.rank, row.last, row.behind] for row in table.rows]
            )
    if rank == 1:
        faults.wait_until_told("come")
    ng.safe_barrier().raise_if_failed()
    faults.report(
        first=next(number for number, limit in limits if limit == 77.0),
        after=the_exchange().adopted_after,
        settings=dict(the_exchange().settings.changed()),
        before={one.name: one.old for one in seen if isinstance(one, Change)},
    )
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def unset(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A job with the default configuration, and `ncclguard set` beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        with faults.start_ranks(by_default, 2, args=[0.05], timeout=100) as started:
            started.wait_for("rows")
            found = {"set": run("set", "timeout=77", "warn_after=0.5", "stuck_timeout=70", "--wait", "60")}
            found["top"] = run("top", "--once")
            started.tell("stop")
            # With the 30 s of the start there would be none yet.
            found["warned"] = started.wait_for("warned", [0], seconds=20)[0]
            started.tell("come")
            found["result"] = started.wait()
        return found


def test_a_late_rank_is_named_without_any_setting(unset: dict[str, Any]) -> None:
    """50 ms in each of 100 operations, of which the table has the last 32."""
    assert of_all(unset, "table", (0, 1)).endswith(f"/{STATISTICS_EVERY}")
    slowest, last, behind = of_all(unset, "rows", (0, 1))[0]
    assert slowest == 1
    assert last >= 24
    assert behind >= 0.03
    code, text = unset["top"]
    assert code == 0
    assert "job monitored: 1 of 2 ranks are on this host" in text
    assert "arrivals in group 0:cpu, " in text
    assert " s ago" in text


def test_settings_change_in_a_job_that_was_started_without_any(unset: dict[str, Any]) -> None:
    """On all ranks after the same operation; the monitor, which the job started with 30 s, then warns after 0.5."""
    code, text = unset["set"]
    assert code == 0, (text, unset["result"])
    after = of_all(unset, "after", (0, 1))
    assert int(after.rpartition("/")[2]) % STATISTICS_EVERY == 0
    assert of_all(unset, "first", (0, 1)) == int(after.rpartition("/")[2])
    assert of_all(unset, "settings", (0, 1)) == {"timeout": 77.0, "stuck_timeout": 70.0, "warn_after": 0.5}
    assert of_all(unset, "before", (0,)) == {"timeout": None, "stuck_timeout": None, "warn_after": 30.0}
    assert "rank 1 has not come" in unset["warned"]


def disagreeing() -> None:
    dist.init_process_group("gloo")
    ng.configure(statistics_every=EVERY if dist.get_rank() == 0 else 0)
    outcome = ng.safe_barrier(timeout=20)
    incident = outcome.incident
    faults.report(ok=outcome.ok, cause=str(outcome.cause), text="" if incident is None else incident.to_json())
    dist.destroy_process_group()


def test_ranks_that_are_configured_differently_are_told_so_at_once() -> None:
    """Else one rank would send what the others do not expect."""
    result = faults.run_ranks(disagreeing, 2, env={"NCCLGUARD_REPORT_DIR": "none"}, timeout=60)
    assert result.values("ok") == {0: False, 1: False}, result
    assert result.values("cause") == {0: "failed", 1: "failed"}
    assert all("settings that are the whole group's differ" in text for text in result.values("text").values())


def with_one_rank_that_serves() -> None:
    """Only rank 0 can be asked. Rank 3 does not come to the last operation, until it is told to."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        ng.setup_nccl_monitoring(lambda record: None, job="monitored")
    for _ in range(2 * EVERY):
        if rank == 2:  # comes last
            time.sleep(0.2)
        ng.safe_all_reduce(torch.ones(4)).raise_if_failed()
    faults.report(exchanged=True)
    if rank == 3:
        faults.wait_until_told("come")
    ng.safe_barrier(timeout=60).raise_if_failed()
    ng.safe_barrier(timeout=60).raise_if_failed()
    faults.report(came=True)
    if rank == 0:
        faults.wait_until_told("end")
    ng.safe_barrier(timeout=60).raise_if_failed()
    dist.destroy_process_group()


def test_one_rank_answers_for_the_whole_job_and_says_who_is_awaited(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of rank 3 are those of its last exchange; that it is awaited is what the ranks were asked since."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    settings = {
        "NCCLGUARD_STATISTICS_EVERY": str(EVERY),
        "NCCLGUARD_WARN_AFTER": "1",
        "NCCLGUARD_REPORT_DIR": "none",
        "NCCLGUARD_REPORT_PANEL": "false",
    }
    with faults.start_ranks(with_one_rank_that_serves, 4, env=settings, timeout=100) as started:
        started.wait_for("exchanged")
        until, hanging = time.monotonic() + 40, ""
        while "asked by rank" not in hanging and time.monotonic() < until:
            time.sleep(0.2)
            code, hanging = run("top", "--once", "--all")
            assert code in (0, 2), hanging  # 2: before rank 0 serves
        started.tell("come")
        started.wait_for("came")
        _, after = run("top", "--once", "--all")
        started.tell("end")
        result = started.wait()
    assert [rank.end for rank in result] == ["exit 0"] * 4, result
    assert "job monitored: 4 ranks; 4 on 1 hosts are known here" in hanging
    assert "waiting: barrier(" in hanging
    assert "rank 3 has not come: it is at" in hanging
    assert f"{2 * EVERY} operations through 0:cpu:" in hanging
    (slowest,) = (line for line in hanging.splitlines() if line.startswith("│ rank 2 on host"))
    assert int(slowest.split("│")[3]) > EVERY, slowest  # came last
    assert "rank 3 has not come" not in after
