"""Sinks: what they write can be read back by their own tools, and one that fails or is slow holds nobody up."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pytest

from ncclguard.metrics.records import (
    TIME_BOUNDS,
    Change,
    ChannelStatus,
    Failure,
    Membership,
    OpenOperation,
    Record,
    SlowRanks,
    Snapshot,
    StragglerRow,
    StragglerTable,
)
from ncclguard.metrics.registry import Registry
from ncclguard.metrics.sinks import (
    QUEUE_LENGTH,
    JsonlSink,
    LogSink,
    PrometheusSink,
    SinkThread,
    TensorBoardSink,
    WandbSink,
    make_sinks,
)

ORIGIN: dict[str, Any] = {"time": 1700000000.0, "job": "job1", "rank": 1, "host": "node1", "pid": 42}
SLOW = SlowRanks(
    ranks=(2,), hosts=("node2",), kind="data loading", place="train.py:9 in batch", awaited_at="", factor=1.2, lost=0.15,
    sure=True,
)  # fmt: skip


CHANNEL = ChannelStatus(
    channel="weights", end="trainer", version=17, age=40.0, seconds=2.1, versions=18, failed=1, engines=("A", "B"),
    stale=("C",), left_out={"C": 3},
)  # fmt: skip


def snapshot(*, hang: bool = False, uptime: float = 60.0) -> Snapshot:
    registry = Registry()
    for _ in range(9):
        registry.success("0:cpu:ab12", "all_reduce", "train", 4096, 0.002, 0.001, 1)
    registry.failure("0:cpu:ab12", "all_reduce", "train", 4096, 60.0, 1, "late", (2,))
    row = StragglerRow(rank=2, host="node2", pid=7, last=9, behind=0.25, behind_longest=0.5, held_up=2.0, waited=0.001)
    call = OpenOperation(group="0:cpu", op_id="0:cpu:ab12/11", text="barrier()", age=31.0, limit=300.0, late=True)
    return Snapshot(
        **ORIGIN, world_size=4, uptime=uptime, hang=hang, open=(call,) if hang else (), series=registry.snapshot(),
        stragglers=(StragglerTable(group="0:cpu", through="0:cpu:ab12/10", age=2.0, operations=10, rows=(row,)),),
        settings={"0:cpu": {"timeout": 900.0, "chunk_numel": None}}, losses=2, rejoins=1, lost_seconds=5.5, slow=SLOW,
        channels=(CHANNEL,),
    )  # fmt: skip


FAILURE = Failure(
    **ORIGIN, op_id="0:cpu:ab12/10", op="all_reduce", phase="train", cause="late", culprits=(2,), agreed=True, attempts=1,
    seconds=60.0, summary="all_reduce(float32[1024], SUM) failed after 60 s: rank 2 late.",
)  # fmt: skip
CHANGE = Change(
    **ORIGIN, group="0:cpu", op_id="0:cpu:ab12/10", name="timeout", old=None, new=900.0, reason="set from outside"
)

MEMBERSHIP = Membership(
    **ORIGIN,
    change="went on",
    ranks=(3,),
    participants=3,
    seconds=1.8,
    step=None,
    text="went on without rank 3 after 1.8 s",
)


def finish(thread: SinkThread) -> None:
    thread.finish()
    assert thread.join(time.monotonic() + 60)


# ---------------------------------------------------------------------- the thread


def test_a_sink_that_raises_is_logged_once_and_gets_the_next_record(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Record] = []

    class Broken:
        name = "broken"

        def write(self, record: Record) -> None:
            seen.append(record)
            raise OSError("no space left on device")

        def close(self) -> None:
            raise OSError("still no space")

    thread = SinkThread(Broken())
    for _ in range(3):
        thread.put(FAILURE)
    finish(thread)
    assert len(seen) == 3
    (message,) = (record.getMessage() for record in caplog.records if "broken" in record.getMessage())
    assert message.startswith(
        "ncclguard: the monitoring sink broken failed (OSError: no space left on device): the job goes on"
    )


def test_a_sink_that_hangs_never_makes_put_wait_and_loses_the_oldest() -> None:
    release, began, seen = threading.Event(), threading.Event(), []

    class Slow:
        def write(self, record: Record) -> None:
            began.set()
            assert release.wait(60)
            seen.append(record)

        def close(self) -> None:
            """Nothing to close."""

    thread = SinkThread(Slow())
    thread.put(snapshot(uptime=0))
    assert began.wait(60)
    for number in range(1, QUEUE_LENGTH + 11):  # would block for ever if `put` waited
        thread.put(snapshot(uptime=number))
    assert thread.dropped == 10
    release.set()
    finish(thread)
    assert thread.dropped == 11  # the word that it is the end needs a place too
    assert seen[0].uptime == 0
    assert seen[-1].uptime == QUEUE_LENGTH + 10


# ---------------------------------------------------------------------- by name


def test_a_function_an_object_and_names_are_sinks(tmp_path: Path) -> None:
    seen: list[Record] = []
    path = tmp_path / "deep" / "guard-{rank}.jsonl"
    sinks = make_sinks([seen.append, LogSink(), "log", f"jsonl:{path}"], rank=3)
    assert len(sinks) == 4
    for sink in sinks:
        sink.write(FAILURE)
        sink.close()
    assert seen == [FAILURE]
    assert (tmp_path / "deep" / "guard-3.jsonl").is_file()


@pytest.mark.parametrize("wrong", ["statsd", "jsonl", "jsonl:", "prometheus:http", "prometheus:70000"])
def test_a_name_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="sink"):
        make_sinks([wrong], rank=0)


def test_what_is_no_sink_is_refused() -> None:
    with pytest.raises(TypeError, match="a sink must be a name"):
        make_sinks([42], rank=0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'log:x' takes nothing after its name"):
        make_sinks(["log:x"], rank=0)
    with pytest.raises(ValueError, match=r"has \{rnk\}, which stands for nothing: write \{rank\}"):
        make_sinks(["jsonl:a-{rnk}-{rank}.jsonl"], rank=0)


def test_of_a_port_that_is_taken_it_says_how_each_rank_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    first = PrometheusSink(0)
    assert make_sinks([f"prometheus:{first.port}"], rank=1) == []
    assert f'give each a port of its own: f"prometheus:{{{first.port} + int(' in caplog.text
    first.close()


def test_a_sink_without_its_package_or_folder_is_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it raises ImportError
    (tmp_path / "file").write_text("")
    sinks = make_sinks(["log", "wandb", f"jsonl:{tmp_path}/file/x.jsonl"], rank=0)
    assert [type(sink) for sink in sinks] == [LogSink]
    assert "pip install wandb" in caplog.text
    assert "the job goes on without this sink" in caplog.text


# ---------------------------------------------------------------------- log and JSON


def test_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ncclguard.metrics")
    sink = LogSink()
    for record in (snapshot(), FAILURE, CHANGE, snapshot(hang=True), MEMBERSHIP):
        sink.write(record)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING", "INFO", "WARNING", "WARNING"]
    messages = [record.getMessage() for record in caplog.records]
    assert "10 guarded operations, 1 failed; 2 ranks lost, 1 came back, 5.5 s;" in messages[0]
    said = "channel weights, trainer: version 17 since 40 s, after 2.1 s; on A, B; not on C; 1 versions failed; left out: C (3)"
    assert said in messages[0]
    assert "slowest to arrive in group 0:cpu: rank 2, 250 ms after the first on average, last in 9 of 10" in messages[0]
    assert messages[1] == "rank 1: all_reduce(float32[1024], SUM) failed after 60 s: rank 2 late."
    assert messages[2] == "rank 1: timeout of group 0:cpu is 900, was not set: set from outside"
    assert "barrier() open for 31 of 300 s" in messages[3]
    assert messages[4] == "rank 1: went on without rank 3 after 1.8 s"


def test_every_line_of_a_rotated_json_file_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "guard.jsonl"
    size = len(json.dumps(FAILURE.to_dict())) + 1
    sink = JsonlSink(path, max_bytes=3 * size, backups=2)
    for _ in range(10):
        sink.write(FAILURE)
    sink.close()
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["guard.jsonl", "guard.jsonl.1", "guard.jsonl.2"]  # the oldest three records are gone
    counts = [len((tmp_path / file).read_text().splitlines()) for file in files]
    assert counts == [1, 3, 3]
    assert all((tmp_path / file).stat().st_size <= 3 * size for file in files)
    for file in files:
        for text in (tmp_path / file).read_text().splitlines():
            assert json.loads(text) == json.loads(json.dumps(FAILURE.to_dict()))
    again = JsonlSink(path, max_bytes=3 * size, backups=2)  # goes on with the file of before
    again.write(snapshot())
    again.close()
    assert json.loads(path.read_text().splitlines()[-1])["kind"] == "snapshot"


def test_a_rotated_file_without_backups_starts_anew(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "guard.jsonl", max_bytes=10, backups=0)
    for _ in range(3):
        sink.write(CHANGE)
    sink.close()
    assert [len(file.read_text().splitlines()) for file in tmp_path.iterdir()] == [1]
    with pytest.raises(ValueError, match="max_bytes"):
        JsonlSink(tmp_path / "x", max_bytes=0)


# ---------------------------------------------------------------------- their own clients


def test_prometheus_scrapes_what_its_own_parser_reads() -> None:
    client = pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    from prometheus_client.parser import text_string_to_metric_families

    registry = client.CollectorRegistry()
    sink = PrometheusSink(0, address="127.0.0.1", registry=registry)
    sink.write(snapshot(hang=True))
    sink.write(FAILURE)
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=30) as response:
        text = response.read().decode()
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    labels = (("group", "0:cpu"), ("op", "all_reduce"), ("phase", "train"), ("rank", "1"))
    assert samples["ncclguard_hang", (("rank", "1"),)] == 1
    assert samples["ncclguard_losses_total", (("rank", "1"),)] == 2
    assert samples["ncclguard_rejoins_total", (("rank", "1"),)] == 1
    assert samples["ncclguard_lost_seconds_total", (("rank", "1"),)] == 5.5
    assert samples["ncclguard_operations_total", labels] == 10
    assert samples["ncclguard_bytes_total", labels] == 40960
    assert samples["ncclguard_duration_seconds_count", labels] == 10
    assert samples["ncclguard_wait_seconds_sum", labels] == pytest.approx(0.009)
    assert samples["ncclguard_failures_total", (("cause", "late"), *labels)] == 1
    assert samples["ncclguard_culprits_total", (("culprit", "2"), *labels)] == 1
    assert samples["ncclguard_behind_seconds", (("group", "0:cpu"), ("rank", "1"), ("straggler", "2"))] == 0.25
    assert samples["ncclguard_slow_lost_ratio", (("kind", "data loading"), ("rank", "1"), ("slow", "2"))] == 0.15
    channel = (("channel", "weights"), ("end", "trainer"), ("rank", "1"))
    assert samples["ncclguard_weights_versions_total", channel] == 18
    assert samples["ncclguard_weights_failed_versions_total", channel] == 1
    assert samples["ncclguard_weights_version_seconds", channel] == 2.1
    assert samples["ncclguard_weights_stale_engines", channel] == 1
    engines = {
        dict(found)["engine"]: value
        for (name, found), value in samples.items()
        if name == "ncclguard_weights_left_out_total"
    }
    assert engines == {"A": 0, "B": 0, "C": 3}
    buckets = {
        float(dict(found)["le"]): value
        for (name, found), value in samples.items()
        if name == "ncclguard_duration_seconds_bucket"
    }
    assert {bound: value for bound, value in buckets.items() if bound < 2**-8} == dict.fromkeys(TIME_BOUNDS[:12], 0)
    assert {value for bound, value in buckets.items() if 2**-8 <= bound < 64} == {9}  # nine of 2 ms, one of a minute
    assert {value for bound, value in buckets.items() if bound >= 64} == {10}
    assert max(buckets) == float("inf")
    sink.write(snapshot())
    assert registry.get_sample_value("ncclguard_hang", {"rank": "1"}) == 0
    sink.close()
    assert registry.get_sample_value("ncclguard_hang", {"rank": "1"}) is None
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=5)


def test_tensorboard_writes_what_its_own_reader_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        sink = TensorBoardSink(tmp_path / "run-{rank}", rank=1)
        for record in (snapshot(uptime=30), FAILURE, snapshot(hang=True, uptime=60)):
            sink.write(record)
        sink.close()
        events = EventAccumulator(str(tmp_path / "run-1"))
        events.Reload()
        hang = [(event.step, event.value) for event in events.Scalars("ncclguard/hang")]
        median = events.Scalars("ncclguard/0:cpu/all_reduce/train/median_ms")[-1].value
    assert hang == [(30, 0.0), (60, 1.0)]
    assert 1.0 <= median <= 4.0
    assert "ncclguard/failure/text_summary" in events.Tags()["tensors"]


@pytest.mark.processes
def test_wandb_logs_offline_with_its_own_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wandb's own
        wandb = pytest.importorskip("wandb", reason="needs wandb")
        for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
            monkeypatch.setenv(name, value)
        sink = WandbSink(project="ncclguard-test")
        run = wandb.run
        sink.write(snapshot())
        sink.write(FAILURE)
        sink.write(snapshot(hang=True))
        summary = dict(run.summary)
        sink.close()
        wandb.teardown()  # waits for the process that writes the file
    assert summary["ncclguard/hang"] == 1.0
    assert summary["ncclguard/0:cpu/all_reduce/train/count"] == 10
    assert "rank 2 late" in summary["ncclguard/last_failure"]
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("*.wandb")):
        assert time.monotonic() < deadline, "wandb wrote no run"
        time.sleep(0.1)


@pytest.mark.processes
def test_in_a_run_of_the_program_wandb_keeps_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's `log` calls, with steps of their own, must neither be shifted nor dropped, and its run not be finished."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wandb's own
        wandb = pytest.importorskip("wandb", reason="needs wandb")
        monkeypatch.setenv("WANDB_SILENT", "true")
        run = wandb.init(project="ncclguard-test", mode="offline", dir=str(tmp_path))
        sink = WandbSink()
        for step in (5, 6):
            run.log({"loss": float(step)}, step=step)
            writer = threading.Thread(target=sink.write, args=(snapshot(hang=True),))  # as the sink's own thread does
            writer.start()
            writer.join()
        sink.close()
        assert run.step == 6
        run.log({"loss": 7.0}, step=7, commit=True)
        assert (run.summary["loss"], run.summary["ncclguard/hang"]) == (7.0, 1.0)
        run.finish()
