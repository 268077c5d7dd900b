"""The guard's own threads get no turn for seconds, as on a busy machine: the verdict is the one that all others have."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.coordination.monitor import Monitor
from ncclguard.coordination.revocation import Revocation
from ncclguard.engine import runtime
from ncclguard.watch.watcher import Watcher
from tests.distributed.test_watch import know_each_other, recorded
from tests.ports import free_port


def hold(owner: type, name: str, seconds: float, when: Callable[[Any], bool], after: bool = False) -> None:
    """Have the thread that calls a method get no turn for so long, once: before the call, or `after` it."""
    method, held = getattr(owner, name), []

    def late(self: Any, *arguments: Any) -> Any:
        value = method(self, *arguments) if after else None
        if not held and when(self):
            held.append(time.sleep(seconds))
        return value if after else method(self, *arguments)

    setattr(owner, name, late)


def hold_monitor(seconds: float) -> None:
    """Return once the monitor's thread gets no turn for so long."""
    holding = threading.Event()

    def holds(monitor: Monitor) -> bool:
        holding.set()
        return True

    hold(Monitor, "_interval", seconds, holds)
    runtime.current().monitor.wake()
    holding.wait()


def meet() -> None:
    """Begin together, and know each other's processes."""
    ng.safe_barrier(timeout=60).raise_if_failed()
    know_each_other()
    dist.barrier()


def told(directory: Path) -> list[tuple[str, list[int]]]:
    """The cause and the ranks of each incident that has a page."""
    incidents = [json.loads(file.read_text())["incident"] for file in directory.glob("*.json")]
    return [(incident["cause"], incident["culprits"]) for incident in incidents]


def takes_the_store_away(address: str) -> None:
    """Rank 0 has the store and ends with its verdict; rank 1, which has answered, has no turn until it is gone."""
    rank = int(os.environ["RANK"])
    group = ng.join(address, name="ends", rank=rank, world_size=3, timeout=60)
    assert ng.safe_barrier(group, timeout=30)
    if rank == 2:
        time.sleep(8)
        return
    if rank == 1:
        hold(Revocation, "_answer", 3.0, lambda revocation: True, after=True)
    outcome = ng.safe_barrier(group, timeout=4 if rank == 0 else 30)  # so that rank 0 decides
    faults.report(cause=str(outcome.cause), culprits=outcome.culprits, agreed=outcome.agreed)
    os._exit(0)


def test_who_was_held_up_until_the_store_is_gone_has_the_verdict_of_its_host() -> None:
    result = faults.run_ranks(takes_the_store_away, 3, args=[f"tcp://127.0.0.1:{free_port()}"], timeout=60)
    for rank in (0, 1):
        assert result[rank].reports == {"cause": "late", "culprits": [2], "agreed": True}, result


def leaves(held_for: float) -> None:
    """Rank 1 ends well while the others wait for it, and its monitor has no turn to say so."""
    dist.init_process_group("gloo")
    ng.watch(timeout=60, on_incident=lambda incident: faults.report(told=[str(incident.cause), *incident.culprits]))
    meet()
    if dist.get_rank() == 1:
        hold_monitor(held_for)
        sys.exit(0)
    dist.all_reduce(torch.ones(10))


@recorded
@pytest.mark.parametrize("held_for", [1.5, 20.0])
def test_a_rank_that_left_before_its_monitor_could_say_so_is_not_lost(held_for: float) -> None:
    """It is said by the monitor before it ends, or by the page that the ranks of a host share."""
    result = faults.run_ranks(leaves, 3, args=[held_for], timeout=90)
    for rank in (0, 2):
        assert result[rank].reports == {"told": ["exited", 1]}, result


def dies_in_a_guarded_call() -> None:
    """Rank 1 is killed, and rank 2 takes long to answer those who agree on the guarded call."""
    dist.init_process_group("gloo")
    ng.watch(timeout=60)
    meet()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 2:
        hold_monitor(2.0)
    outcome = ng.safe_all_reduce(torch.ones(3), timeout=20)
    faults.report(cause=str(outcome.cause), culprits=list(outcome.culprits))
    time.sleep(4.0)


@recorded
def test_who_was_lost_in_a_guarded_call_is_told_of_once_where_a_rank_is_slow_to_answer(tmp_path: Path) -> None:
    result = faults.run_ranks(dies_in_a_guarded_call, 3, timeout=60, env={"NCCLGUARD_REPORT_DIR": str(tmp_path)})
    for rank in (0, 2):
        assert result[rank].reports == {"cause": "lost", "culprits": [1]}, result
    assert sum(rank.output.count("╭─ ncclguard incident") for rank in result) == 1, result
    assert told(tmp_path) == [("lost", [1])], result


def aborts_before_all_are_told(then: str) -> None:
    """Rank 2 is in a collective of another group, and hears of it after the others have ended what it waits in."""
    dist.init_process_group("gloo")
    ng.watch(timeout=3, on_hang="abort")
    meet()
    other = dist.new_group()
    dist.barrier(group=other)
    hold(Watcher, "_deliver", 5.0 if dist.get_rank() == 2 else 1.0, lambda watcher: bool(watcher._state.verdicts))
    if dist.get_rank() == 2:
        dist.barrier(group=other)
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.ones(10))
    if then == "dies" and dist.get_rank() == 1:
        os.abort()  # as torch's own threads do
    time.sleep(8)  # there to be asked


@recorded
@pytest.mark.parametrize("then", ["stays", "dies"])
def test_what_an_abort_breaks_on_a_rank_that_is_still_to_be_told_is_no_second_incident(
    then: str, tmp_path: Path
) -> None:
    result = faults.run_ranks(
        aborts_before_all_are_told, 4, args=[then], timeout=60, env={"NCCLGUARD_REPORT_DIR": str(tmp_path)}
    )
    assert not result.still_running, str(result)
    assert told(tmp_path) == [("diverged", [2])], str(result)
