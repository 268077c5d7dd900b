"""What torch and gloo really do: the advice that does not work, and the mechanisms that the guard is built on.

Nothing of the guard runs here. Where a test fails with a new torch, docs/protocol.md rests on something that changed.
"""

from __future__ import annotations

import http.client
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _WorkerServer

from ncclguard import faults

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

UNGUARDED = {"NCCLGUARD_AUTOSTART": "0"}
CASES = Path(__file__).with_name("mechanisms_cases.py")


def ask(port: int, handler: str, within: float) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=within)
    try:
        connection.request("POST", f"/handler/{handler}")
        return "answered" if connection.getresponse().status == 200 else "refused"
    except OSError:
        return "silent"
    finally:
        connection.close()


def test_an_alarm_around_all_reduce_raises_only_after_the_operation_completed() -> None:
    """Rank 1 is 6 s late, the alarm is set to 0.5 s: it raises when all is done, late and a false failure."""
    reports = faults.run_ranks(f"{CASES}:alarm_around_all_reduce", 2, env=UNGUARDED, timeout=60).check()[0].reports
    assert reports["raised"]
    assert reports["tensor"] == [2.0] * 4  # the operation that "timed out" has succeeded
    assert reports["after"] > 1.0


def test_wait_with_a_limit_abandons_the_operation_which_later_writes_into_the_tensor() -> None:
    """Rank 1 arrives after rank 0's wait expired: it succeeds there, and rank 0's tensor changes behind its back."""
    with faults.start_ranks(f"{CASES}:wait_then_go_on", 2, env=UNGUARDED, timeout=60) as job:
        job.wait_for("abandoned", [0])
        job.tell("come")
        job.wait_for("sum", [1])
        time.sleep(0.5)
        job.tell("look")
        result = job.wait().check()
    reports = result[0].reports
    assert "Operation timed out" in reports["error"]
    assert not reports["completed"]
    assert reports["after"] < 5.0
    assert reports["later"] != [100.0] * 4
    assert result[1].reports["sum"][0] > 1.0


def test_abort_and_shutdown_of_gloo_unblock_nothing_and_deleting_the_group_blocks() -> None:
    """The group's timeout is 12 s: only then does its destructor come back."""
    with faults.start_ranks(f"{CASES}:abort_and_shutdown", 2, env=UNGUARDED, timeout=60) as job:
        job.wait_for("deleted", [0])
        job.tell("leave")
        reports = job.wait().check()[0].reports
    assert reports["returned"] < 1.0
    assert not reports["unblocked"]
    assert reports["deleted"] > 1.0


def test_nccl_timeout_in_the_environment_changes_nothing() -> None:
    """NCCL_TIMEOUT=1 with a rank 2 s late: no such variable exists, limits stay 10 and 30 minutes."""
    result = faults.run_ranks(
        f"{CASES}:late_by_two_seconds", 2, env={**UNGUARDED, "NCCL_TIMEOUT": "1"}, timeout=60
    ).check()
    for rank in range(2):
        assert result[rank].reports == {**result[rank].reports, "sum": 2.0, "nccl": 600.0, "other": 1800.0}


@pytest.mark.skipif(
    VERSION < (2, 7), reason="gloo of torch 2.6 waits for its group's timeout, whatever an operation has"
)
def test_a_per_operation_timeout_really_ends_the_operation_on_its_rank_and_on_who_waits_for_that_rank() -> None:
    """Rank 1 waits for the missing rank 2 alone, so rank 0's end does not reach it; the late rank 2 fails on arrival."""
    with faults.start_ranks(f"{CASES}:time_out_one_operation", 3, env=UNGUARDED, timeout=60) as job:
        job.wait_for("error", [0, 1])
        job.tell("come")
        job.wait_for("arrived", [2])
        job.tell("look")
        result = job.wait().check()
    reports = [result[rank].reports for rank in range(3)]
    assert "Timed out waiting 1000ms" in reports[0]["error"]
    assert "Timed out waiting 8000ms" in reports[1]["error"]
    assert "Connection closed by peer" in reports[2]["error"]
    assert reports[2]["after"] < 10.0  # at once: its own timeout is 60 s
    assert reports[0]["unchanged"] and reports[1]["unchanged"]
    assert [one["again"] for one in reports] == [3.0] * 3  # a new group on the same store works


def test_a_killed_peer_is_an_error_for_the_survivors_which_names_an_address_and_leaves_a_torn_tensor() -> None:
    with faults.start_ranks(f"{CASES}:lose_a_peer", 3, env=UNGUARDED, timeout=60) as job:
        job.wait_for("moved", [0, 1])
        job.send_signal(2, signal.SIGKILL)
        result = job.wait()
    assert result[0].ok and result[1].ok, str(result)
    reports = [result[rank].reports for rank in (0, 1)]
    # A process that ends with data unread sends a reset.
    broken = re.compile(r"(Connection closed by peer \[127\.0\.0\.1\]|\[127\.0\.0\.1\]:\d+: Connection reset by peer)")
    assert all(broken.search(one["error"]) for one in reports), "\n".join(map(str, reports))
    assert not any("rank 2" in one["error"] for one in reports)
    assert any(0 < one["changed"] < 3_000_000 for one in reports)  # some elements are partial sums
    assert all(one["complete"] < 3_000_000 for one in reports)


def test_a_receive_nobody_answers_and_a_socket_shutdown_end_a_blocked_operation_on_their_own_rank() -> None:
    with faults.start_ranks(f"{CASES}:abort_from_another_thread", 4, env=UNGUARDED, timeout=60) as job:
        job.wait_for("waiting", [0, 1, 2])
        time.sleep(0.3)
        job.tell("first")
        job.wait_for("error", [0])
        time.sleep(1.0)
        others = [job.reports(rank).get("error") for rank in (1, 2)]
        job.tell("second")
        job.wait_for("error", [1, 2])
        job.tell("leave")
        result = job.wait().check()
    assert others == [None, None]  # it is not transitive: a rank that waits for a third one goes on waiting
    assert "Application timeout caused pair closure" in result[0].reports["error"]
    assert "Connection closed by peer" in result[1].reports["error"]
    assert "Application timeout caused pair closure" in result[2].reports["error"]
    assert result[1].reports["connections"] >= 3
    for rank in range(3):
        assert result[rank].reports["after"] < 5.0


def test_shutting_gloos_listening_socket_down_ends_the_process() -> None:
    with faults.start_ranks(f"{CASES}:shut_the_listening_socket", 2, env=UNGUARDED, timeout=60) as job:
        job.wait_for("found")
        job.tell("shut")
        result = job.wait()
    for rank in range(2):
        assert result[rank].reports == {"found": 1}
        assert result[rank].signal == signal.SIGABRT, str(result)


def test_another_size_ends_the_receiver_of_the_longer_message_with_sigabrt() -> None:
    """4 elements against 1000 on two ranks: no ``except`` can catch it, so sizes must agree before data moves."""
    result = faults.run_ranks(f"{CASES}:other_sizes", 2, env=UNGUARDED, timeout=60)
    aborted = [rank for rank in result if rank.signal == signal.SIGABRT]
    assert aborted, str(result)
    assert all("EnforceNotMet" in rank.output and "end" not in rank.reports for rank in aborted)


def test_a_wait_of_less_than_a_millisecond_has_no_limit_at_all() -> None:
    reports = faults.run_ranks(f"{CASES}:wait_less_than_a_millisecond", 2, env=UNGUARDED, timeout=60).check()[0].reports
    assert reports["error"] == ""
    assert reports["after"] > 0.5  # rank 1 was five seconds late


def test_a_blocked_wait_has_released_the_gil_so_another_thread_reads_the_main_threads_stack() -> None:
    with faults.start_ranks(f"{CASES}:read_the_stack_of_a_blocked_rank", 2, env=UNGUARDED, timeout=60) as job:
        names = job.wait_for("names", [0])[0]
        job.tell("come")
        job.wait().check()
    assert "all_reduce" in names
    assert "read_the_stack_of_a_blocked_rank" in names


def test_ddp_runs_unmodified_on_a_process_group_written_in_python() -> None:
    result = faults.run_ranks(f"{CASES}:train_through_a_python_group", 2, env=UNGUARDED, timeout=60).check()
    assert result[0].reports["weights"] == result[1].reports["weights"]
    assert result[0].reports["calls"]["allreduce"] >= 3


@pytest.mark.skipif(VERSION < (2, 8), reason="gloo's collectives are recorded from torch 2.8 on")
def test_the_flight_recorder_records_gloo_too() -> None:
    result = faults.run_ranks(
        f"{CASES}:record_gloo", 2, env={**UNGUARDED, "TORCH_FR_BUFFER_SIZE": "100"}, timeout=60
    ).check()
    assert result[0].reports["names"].count("gloo:all_reduce") == 3


def test_deepspeed_eval_leaves_the_engines_own_flag_in_training() -> None:
    deepspeed = pytest.importorskip("deepspeed", reason="the extra ncclguard[deepspeed] is not installed")
    engine = deepspeed.DeepSpeedEngine.__new__(deepspeed.DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    engine.module = torch.nn.Linear(1, 1)
    engine.warn_unscaled_loss = False
    deepspeed.DeepSpeedEngine.eval(engine)
    assert engine.training
    assert not engine.module.training


def test_several_pieces_of_one_tensor_may_be_in_flight_at_a_time() -> None:
    assert faults.run_ranks(f"{CASES}:keep_pieces_in_flight", 3, env=UNGUARDED, timeout=60).check().values("exact") == {
        0: True,
        1: True,
        2: True,
    }


def test_a_store_wait_on_several_keys_waits_for_all_and_logs_two_lines_each_time(
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=5), wait_for_workers=False)
    store.set("there", "1")
    store.wait(["there"], timedelta(seconds=1))
    with pytest.raises(dist.DistStoreError, match="/missing"):
        store.wait(["/there", "/missing"], timedelta(milliseconds=50))
    warnings = [line for line in capfd.readouterr().err.splitlines() if "waitForInput" in line]
    assert len(warnings) == 2


@pytest.mark.skipif(
    not hasattr(_WorkerServer, "port"), reason="this torch's worker server does not say which port it has"
)
@pytest.mark.parametrize("what", ["hold the GIL", "be stopped"])
def test_the_worker_server_answers_a_ping_with_the_gil_held_but_no_traceback_and_nothing_when_stopped(
    what: str,
) -> None:
    with faults.start_ranks(f"{CASES}:serve_and_misbehave", 1, args=[what], env=UNGUARDED, timeout=90) as job:
        port = job.wait_for("port")[0]
        assert (ask(port, "ping", 20), ask(port, "dump_traceback", 20)) == ("answered", "answered")
        job.tell("go")
        if what == "hold the GIL":
            job.wait_for("holding")
            time.sleep(0.3)
            answers = (ask(port, "ping", 5), ask(port, "dump_traceback", 1))
            still_held = "held" not in job.reports(0)
            assert still_held, "the machine was faster than this test: it has shown nothing"
            assert answers == ("answered", "silent")
        else:
            job.send_signal(0, signal.SIGSTOP)
            while psutil.Process(job.pid(0)).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            assert (ask(port, "ping", 1), ask(port, "dump_traceback", 1)) == ("silent", "silent")
            job.send_signal(0, signal.SIGCONT)
            job.tell("leave")
        job.wait().check()
