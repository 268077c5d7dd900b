"""The CPU communicator on real ranks: its end from any thread, and construction in bounded time."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import psutil
import pytest

from ncclguard import faults

ALONE = {"NCCLGUARD_AUTOSTART": "0"}  # the transport alone: no monitor thread beside it
CASES = Path(__file__).with_name("stream_transport_cases.py")


def test_stop_ends_blocked_and_queued_operations_and_a_late_peer_changes_nothing_afterwards() -> None:
    with faults.start_ranks(f"{CASES}:stop_while_blocked", 3, env=ALONE, timeout=60) as job:
        job.wait_for("quiet", [0, 1])
        job.tell("come")
        job.wait_for("late", [2])
        job.tell("look")
        result = job.wait().check()
    for rank in (0, 1):
        reports = result[rank].reports
        # Whoever is first ends the others too.
        assert "stopped on this rank" in reports["texts"][0] or "broke" in reports["texts"][0]
        assert len(reports["texts"]) == 4  # those that were started behind it have failed as well
        assert reports["quiet"] and reports["unchanged"]
        assert "was stopped" in reports["refused"]
        assert reports["stop_took"] < 2.0
    assert "broke" in result[2].reports["late"]
    assert result[2].reports["late_peer"] in (0, 1)
    assert result[2].reports["late_after"] < 5.0


def test_stop_works_idle_repeated_from_many_threads_and_from_a_signal_handler() -> None:
    result = faults.run_ranks(f"{CASES}:stop_in_every_way", 2, env=ALONE, timeout=90).check()
    for rank in range(2):
        reports = result[rank].reports
        assert reports["idle"][0] is True
        assert reports["busy"] == reports["many"] == reports["signalled"] == [True, True, True]
        assert reports["last"] == 4.0


def test_stop_beside_a_stopped_peer_ends_the_transfer_and_the_peer_fails_when_it_wakes() -> None:
    with faults.start_ranks(f"{CASES}:stop_beside_a_stopped_peer", 3, env=ALONE, timeout=60) as job:
        job.wait_for("quiet", [0, 2])
        job.send_signal(1, signal.SIGCONT)
        result = job.wait().check()
    assert result.values("quiet") == {0: True, 1: True, 2: True}
    assert result[1].reports["woken"]


def test_stop_ends_the_transfer_when_the_peer_host_is_unreachable() -> None:
    reason = faults.namespaces_available()
    if reason is not None:
        pytest.skip(reason)
    with (
        faults.Hosts(2) as hosts,
        faults.start_ranks(f"{CASES}:lose_the_network", 2, env=ALONE, hosts=hosts, timeout=60) as job,
    ):
        job.wait_for("ready")
        hosts.partition(hosts.names[1])
        result = job.wait().check()
    assert result.values("quiet") == {0: True, 1: True}
    assert all(seconds < 5.0 for seconds in result.values("ended").values())


def test_stop_is_noticed_by_the_peer_although_a_forked_child_holds_the_connections() -> None:
    result = faults.run_ranks(f"{CASES}:stop_beside_a_forked_child", 2, env=ALONE, timeout=60).check()
    assert result[0].reports["sum"] == 2.0
    assert "was stopped" in result[0].reports["in_child"]
    assert result[1].reports["peer"] == 0
    assert result[1].reports["released"] < 5.0


def test_a_killed_peer_is_an_error_that_names_its_rank() -> None:
    with faults.start_ranks(f"{CASES}:survive_a_kill", 2, env=ALONE, timeout=60) as job:
        job.wait_for("ready")
        job.send_signal(1, signal.SIGKILL)
        result = job.wait()
    assert result[0].ok, str(result)
    assert result[0].reports["peer"] == 1


def test_closing_as_soon_as_the_own_part_is_complete_harms_no_peer() -> None:
    result = faults.run_ranks(f"{CASES}:close_early", 3, env=ALONE, timeout=90).check()
    assert all(sums == [9_000_000.0] * 8 for sums in result.values("sums").values())


def test_interpreter_exit_with_an_operation_in_flight_is_clean() -> None:
    with faults.start_ranks(f"{CASES}:leave_without_closing", 2, env=ALONE, timeout=60) as job:
        end = time.monotonic() + 30
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and been waited for
            rank = psutil.Process(job.pid(0))
            while rank.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
                time.sleep(0.05)
        ended_alone = time.monotonic() < end
        job.tell("leave")
        job.wait().check()
    assert ended_alone  # and not only once rank 1 had left


def test_build_gives_up_in_time_when_a_peer_does_not_come() -> None:
    with faults.start_ranks(f"{CASES}:build_without_a_peer", 3, env=ALONE, timeout=60) as job:
        job.wait_for("error", [0, 1])
        job.tell("leave")
        result = job.wait().check()
    for rank in (0, 1):
        assert "the ranks at [2] of the group did not come" in result[rank].reports["error"]
        assert result[rank].reports["after"] < 5.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_build_gives_up_in_time_when_a_peer_ends_just_before_connecting(number: signal.Signals) -> None:
    with faults.start_ranks(f"{CASES}:build_with_a_peer_that_ends", 3, env=ALONE, timeout=60) as job:
        job.wait_for("ready", [2])
        job.send_signal(2, number)
        job.wait_for("error", [0, 1])
        if number == signal.SIGSTOP:
            job.send_signal(2, signal.SIGKILL)
        result = job.wait()
    for rank in (0, 1):
        assert result[rank].ok, str(result)
        assert result[rank].reports["error"] != "built"
        assert result[rank].reports["after"] < 10.0


def test_build_gives_up_in_time_when_the_store_host_is_stopped_and_leaves_no_thread() -> None:
    with faults.start_ranks(f"{CASES}:build_on_a_stopped_store", 3, env=ALONE, timeout=60) as job:
        job.wait_for("cloned", [1, 2])
        job.send_signal(0, signal.SIGSTOP)
        job.tell("build")
        job.wait_for("left", [1, 2])
        job.send_signal(0, signal.SIGCONT)
        result = job.wait()
    for rank in (1, 2):
        assert result[rank].ok, str(result)
        assert "given up" in result[rank].reports["error"]
        assert result[rank].reports["after"] < 5.0
        assert result[rank].reports["left"] == []
