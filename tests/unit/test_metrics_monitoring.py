"""`setup_nccl_monitoring` in one process: what it counts, when it says hang, and that the process ends whatever a sink does."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

import ncclguard as ng
from ncclguard.coordination.group_state import OpenCall
from ncclguard.metrics import records
from ncclguard.metrics.records import Record, Snapshot
from tests.unit import observed
from tests.unit.observed import KEY


def wait_for(seen: list[Record], kind: str) -> Record:
    """The first record of that kind; fails when none comes."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for record in list(seen):
            if record.kind == kind:
                return record
        time.sleep(0.005)
    raise AssertionError(f"no {kind} among {seen}")


def observe_one_success() -> None:
    observed.succeed(observed.listener())


def test_nothing_is_observed_before_and_after() -> None:
    assert observed.listening() == []
    with ng.setup_nccl_monitoring(lambda record: None, serve=False):
        assert len(observed.listening()) == 1
    assert observed.listening() == []


def test_snapshots_come_every_interval_and_at_the_end() -> None:
    seen: list[Record] = []
    with ng.setup_nccl_monitoring(
        seen.append, interval=timedelta(milliseconds=20), job="j1", serve=False
    ) as monitoring:
        with ng.phase("eval"):
            observe_one_success()
        wait_for(seen, "snapshot")
        (series,) = monitoring.snapshot().series
        assert (series.op, series.phase, series.count) == ("all_reduce", "eval", 1)
        observe_one_success()
    last = seen[-1]
    assert isinstance(last, Snapshot)
    assert sum(series.count for series in last.series) == 2
    assert (last.job, last.rank, last.world_size, last.hang) == ("j1", 0, 1, False)


def test_a_failure_is_handed_over_at_once() -> None:
    seen: list[Record] = []
    with ng.setup_nccl_monitoring(seen.append, interval=3600, serve=False):
        observed.fail(observed.listener(), 3.0)
        record = wait_for(seen, "failure")
    values = record.to_dict()
    assert (values["op_id"], values["cause"], values["culprits"], values["agreed"]) == (f"{KEY}/7", "late", (2,), True)


def test_a_call_that_is_open_for_too_long_is_a_hang_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclguard.metrics.monitoring.TICK", 0.01)
    seen: list[Record] = []
    now = time.monotonic()
    with ng.setup_nccl_monitoring(seen.append, interval=3600, serve=False) as monitoring:
        short, long = (OpenCall("barrier()", now - age, now - age + 300, 0, sequence=8) for age in (10, 31))
        observed.listener().call_started(KEY, short)
        assert monitoring.snapshot().hang is False  # warn_after is 30 s
        observed.listener().call_ended(KEY, short, None)
        observed.listener().call_started(KEY, long)
        hang = wait_for(seen, "snapshot")
        observed.listener().call_ended(KEY, long, None)
        until = time.monotonic() + 60
        while len(seen) < 2 and time.monotonic() < until:
            time.sleep(0.005)
    assert isinstance(hang, Snapshot)
    assert hang.hang
    (call,) = hang.open
    assert (call.group, call.op_id, call.text, call.late) == ("0:cpu", f"{KEY}/8", "barrier()", True)
    assert call.limit == pytest.approx(300)
    assert isinstance(seen[1], Snapshot)
    assert not seen[1].hang


def test_setting_up_again_replaces_what_was_there() -> None:
    first, second = [], []
    before = ng.setup_nccl_monitoring(first.append, serve=False)
    after = ng.setup_nccl_monitoring(second.append, serve=False)
    observe_one_success()
    before.close()  # was closed already
    after.close()
    assert sum(one.count for one in first[-1].series) == 0
    assert sum(one.count for one in second[-1].series) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"interval": 0}, ValueError),
        ({"interval": None}, TypeError),
        ({"interval": "1s"}, TypeError),
        ({"job": "a/b"}, ValueError),
    ],
)
def test_a_wrong_call_is_refused(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        ng.setup_nccl_monitoring(**options)  # type: ignore[arg-type]
    assert observed.listening() == []


def test_the_arguments() -> None:
    """Part of what users type."""
    assert str(inspect.signature(ng.setup_nccl_monitoring)) == (
        "(*sinks: 'SinkLike', interval: 'float | timedelta' = 30.0, job: 'str | None' = None, serve: 'bool' = True) -> 'Monitoring'"
    )


def test_the_name_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*records.JOB_VARIABLES, "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    assert records.job_name().startswith("pid")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert records.job_name() == "port29500"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert records.job_name() == "port29500"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "my run/7")
    assert records.job_name() == "my-run-7"
    assert records.job_name("mine") == "mine"


PROGRAM = """
import sys, time
import ncclguard as ng
class Sink:
    def write(self, record):
        {write}
    def close(self):
        print("closed", flush=True)
ng.setup_nccl_monitoring(Sink(), {folder!r}, interval=0.01, serve=False)
from tests.unit import observed
observed.succeed(observed.listener(), 1)
time.sleep(0.05)
{end}
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("write", "end", "code", "closed"),
    [
        ("pass", "", 0, True),
        ("raise OSError('disk full')", "", 0, True),
        ("pass", "raise SystemExit(3)", 3, True),
        ("time.sleep(3600)", "", 0, False),
    ],
    ids=["healthy", "fails", "exit code", "hangs"],
)
def test_the_process_ends_with_its_own_exit_code(write: str, end: str, code: int, closed: bool, tmp_path: Path) -> None:
    """The last records are written at exit; a sink that hangs is left behind after 5 s."""
    program = PROGRAM.format(write=write, end=end, folder=f"jsonl:{tmp_path}/x.jsonl")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, done.stderr
    assert ("closed" in done.stdout) == closed
    assert '"count": 1' in (tmp_path / "x.jsonl").read_text().splitlines()[-1]
    assert ("not done within 5 s" in done.stderr) == (not closed)


@pytest.mark.processes
def test_a_forked_child_observes_nothing_and_ends() -> None:
    """DataLoader workers are forked: they have none of the threads, and closing there must not wait for them."""
    program = """
import os, sys, ncclguard as ng
from tests.unit import observed
monitoring = ng.setup_nccl_monitoring(lambda record: None, interval=0.01, serve=False)
child = os.fork()
if child == 0:
    assert observed.listening() == []
    monitoring.close()
    sys.exit(5)  # with the atexit handlers, as a careless child does
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), len(observed.listening()) == 1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "5 True"), done.stderr
