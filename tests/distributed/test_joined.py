"""Groups of processes that are in different jobs, or in none: one verdict on all, and no verdict crosses over."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import ncclguard as ng
from ncclguard import faults
from ncclguard.engine import runtime
from tests.ports import free_port

LIMIT = 3.0


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """The address of a store in a process of its own."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "ncclguard", "store", "--listen", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"ncclguard store: listening at tcp://{address}\n"
        yield f"tcp://{address}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def jobs() -> tuple[int, int]:
    """Ranks 0 and 1 are a trainer's job on gloo, rank 2 a job of its own, rank 3 in none; the rank among the joined.

    Trainer 1 joins nothing. Returns the rank among those that join, and their number; -1 for trainer 1.
    """
    rank = int(os.environ["RANK"])
    if rank < 2:
        dist.init_process_group("gloo", world_size=2, rank=rank)
    elif rank == 2:
        dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    return {0: 0, 1: -1, 2: 1, 3: 2}[rank], 3


def label_of(rank: int) -> str:
    return "trainer" if rank == 0 else f"engine {rank}"


def told(outcome: ng.Outcome) -> dict[str, Any]:
    return {
        "ok": outcome.ok, "cause": str(outcome.cause), "culprits": outcome.culprits, "agreed": outcome.agreed,
        "text": str(outcome.incident),
    }  # fmt: skip


def sends_weights(address: str, fault: str) -> None:
    rank, size = jobs()
    mine = torch.ones(3)
    if rank >= 0:
        group = ng.join(address, name=f"weights {fault}", rank=rank, world_size=size, label=label_of(rank), timeout=60)
        struck = rank == 2
        for version in range(3):
            weights = torch.full((70_000,), float(version) if rank == 0 else -1.0)
            if version == 1 and struck:
                strike(fault)
                weights = weights[:10] if fault == "shape" else weights
            began = time.monotonic()
            outcome = ng.safe_broadcast(weights, src=0, group=group, timeout=LIMIT)
            if version == 1:
                faults.report(**told(outcome), seconds=time.monotonic() - began)
            elif version == 0:
                faults.report(first=bool((weights == 0.0).all()))
            elif fault in ("late", "shape", "none"):
                faults.report(last=bool(outcome) and bool((weights == 2.0).all()))
        dist.destroy_process_group(group)
    if int(os.environ["RANK"]) < 2:  # the job's own group knows nothing of it
        assert ng.safe_all_reduce(mine, timeout=30)
        faults.report(job=float(mine[0]))
        dist.destroy_process_group()


def strike(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "late":
        time.sleep(1.5 * LIMIT)  # in the middle of the others' next call
    elif fault == "raise":
        raise ValueError("the engine has no memory left")
    elif fault == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("none", "None"), ("kill", "lost"), ("stop", "stuck"), ("late", "late"), ("raise", "failed"), ("shape", "diverged"),
     ("sigterm", "lost")],
)  # fmt: skip
def test_one_verdict_for_a_trainer_and_engines_of_other_jobs(store: str, fault: str, cause: str) -> None:
    with faults.start_ranks(sends_weights, 4, args=[store, fault], timeout=90) as job:
        if fault == "stop":
            job.wait_for("job", ranks=[0, 1], seconds=80)
            job.send_signal(3, signal.SIGKILL)  # the third of those that joined
        result = job.wait()
    for rank in (0, 2):
        said = result[rank].reports
        assert said["first"], result
        assert (said["ok"], said["cause"]) == (fault == "none", cause), result
        assert said["culprits"] == ([] if fault == "none" else [2]) and said["agreed"], result
        assert said["seconds"] < LIMIT + 2, result
        if fault not in ("none", "kill"):
            assert "(engine 2)" in said["text"], result
    if fault in ("none", "late", "shape"):
        assert result.values("last") == {0: True, 2: True, 3: True}, result
    assert result.values("job") == {0: 2.0, 1: 2.0}, result
    assert not result.left_running


def ends_at_once(address: str, how: str) -> None:
    """Rank 0 has the store, and ends as soon as it knows the verdict on rank 2; or it is stopped, and rank 1 ends so."""
    rank = int(os.environ["RANK"])
    group = ng.join(address, name="ends", rank=rank, world_size=3, timeout=60)
    assert ng.safe_barrier(group, timeout=30)
    if how == "stopped" and rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "late" and rank == 2:
        time.sleep(LIMIT + 3)
        return
    outcome = ng.safe_barrier(group, timeout=LIMIT + rank)  # so that the lowest decides, or gives up first
    faults.report(cause=str(outcome.cause), culprits=outcome.culprits, agreed=outcome.agreed)
    if rank == (0 if how == "late" else 1):
        os._exit(0)


def test_all_have_the_verdict_of_one_that_has_the_store_and_ends_at_once() -> None:
    looks_rarely = {"NCCLGUARD_POLL_ACTIVE": "0.2"}
    address = f"tcp://127.0.0.1:{free_port()}"
    result = faults.run_ranks(ends_at_once, 3, args=[address, "late"], env=looks_rarely, timeout=60)
    for rank in (0, 1):
        assert result[rank].reports == {"cause": "late", "culprits": [2], "agreed": True}, result


def test_one_that_ends_for_want_of_a_verdict_is_not_called_lost() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with faults.start_ranks(ends_at_once, 3, args=[address, "stopped"], timeout=90) as job:
        job.wait_for("cause", ranks=[1, 2], seconds=80)
        job.send_signal(0, signal.SIGKILL)
        result = job.wait()
    for rank in (1, 2):
        assert result[rank].reports == {"cause": "unknown", "culprits": [], "agreed": False}, result


def in_two_groups(address: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    groups = [ng.join(address, name=f"group {n}", rank=(rank + n) % 3, world_size=3, timeout=60) for n in range(2)]
    verdicts = []
    for round_ in range(12):
        late = (round_ % 2, round_ % 3)  # the group and, in it, the rank that does not come in time
        for n, group in enumerate(groups):
            if round_ % 4 == 3 and (n, group.rank()) == late:
                time.sleep(7)
            outcome = ng.safe_all_reduce(torch.ones(4), group=group, timeout=3 if round_ % 4 == 3 else 20)
            verdicts.append([round_, n, "None" if outcome.ok else str(outcome.cause), *outcome.culprits])
        own = ng.safe_all_reduce(torch.ones(2), timeout=20)
        verdicts.append([round_, "job", str(own.cause), *own.culprits])
    faults.report(verdicts=verdicts)
    for group in groups:
        dist.destroy_process_group(group)
    dist.destroy_process_group()


def test_no_verdict_crosses_over_between_two_groups_and_the_job(store: str) -> None:
    result = faults.run_ranks(in_two_groups, 3, args=[store], timeout=120).check()
    first, *others = result.values("verdicts").values()
    assert others == [first, first], result
    failed = [verdict for verdict in first if verdict[2] != "None"]
    assert failed == [[3, 1, "late", 0], [7, 1, "late", 1], [11, 1, "late", 2]], result


def missing(address: str, absent: int, how: str) -> None:
    rank = int(os.environ["RANK"])
    if rank == absent:
        return
    faults.report(ready=True)
    faults.wait_until_told("go")
    began = time.monotonic()
    try:
        ng.join(address, name=f"missing {absent} {how}", rank=rank, world_size=3, timeout=4)
    except ng.GuardError as error:
        faults.report(error=type(error).__name__, text=str(error), seconds=time.monotonic() - began)


def without(absent: int, address: str, how: str) -> faults.JobResult:
    """The end of two ranks that join at the same time, however far apart they have started, and of one that does not."""
    with faults.start_ranks(missing, 3, args=[address, absent, how], timeout=90) as job:
        job.wait_for("ready", ranks={0, 1, 2} - {absent})
        job.tell("go")
        return job.wait().check()


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named_within_the_limit(store: str, absent: int) -> None:
    result = without(absent, store, "store")
    for rank in {0, 1, 2} - {absent}:
        said = result[rank].reports
        assert said["seconds"] < 4 + 10, result  # its own is 1 s; the rest is for a machine without time
        if absent == 0:
            assert said["error"] == "GuardError" and "rank 0 has not come to group" in said["text"], result
        else:
            assert said["error"] == "GuardError" and "rank 2 of 3 did not come to group" in said["text"], result


def test_where_nobody_listens_rank_0_has_the_store_and_the_others_are_told_when_it_does_not_come() -> None:
    result = without(2, f"tcp://127.0.0.1:{free_port()}", "own")
    assert "rank 2 of 3 did not come" in result[0].reports["text"], result
    assert "this process, rank 0, has the store of group" in result[0].output
    result = without(0, f"tcp://127.0.0.1:{free_port()}", "own")
    assert "no store has answered at tcp://127.0.0.1:" in result[1].reports["text"], result


def test_a_port_that_the_system_has_given_to_a_connection_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        other.connect(listener.getsockname())
        began = time.monotonic()
        with pytest.raises(ng.GuardError, match=rf"cannot listen at tcp://127.0.0.1:{port}.*give a port that no other"):
            ng.join(f"tcp://127.0.0.1:{port}", name="taken", rank=0, world_size=2, timeout=300)
        assert time.monotonic() - began < 30


def test_a_probe_that_connects_to_itself_has_not_found_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give a connection the very port it is to reach: TCP then connects it to itself."""
    connect = socket.create_connection
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # not a reserved one: a connection from there does not ask with SO_REUSEADDR

    def given_this_port(address: tuple[str, int], timeout: float) -> socket.socket:
        return connect(address, timeout=timeout, source_address=("127.0.0.1", port))

    with given_this_port(("127.0.0.1", port), 1.0) as itself:
        assert itself.getsockname() == itself.getpeername()
    monkeypatch.setattr(socket, "create_connection", given_this_port)
    with pytest.raises(ng.GuardError, match="no store has answered"):
        ng.join(f"tcp://127.0.0.1:{port}", name="itself", rank=1, world_size=2, timeout=1)


def again(address: str) -> None:
    rank = int(os.environ["RANK"])
    found = []
    for life in range(3):
        group = ng.join(address, name="again", rank=rank, world_size=2, timeout=30)
        value = torch.full((5,), float(life + rank))
        dist.all_reduce(value, group=group)
        found.append(float(value[0]))
        if life == 1:
            dist.init_process_group("gloo")
            dist.destroy_process_group()  # and with it, as torch has it, all groups
        else:
            dist.destroy_process_group(group)
    faults.report(found=found)


def test_a_group_can_be_joined_again_under_its_name(store: str) -> None:
    result = faults.run_ranks(again, 2, args=[store], timeout=90).check()
    assert result.values("found") == {0: [1.0, 3.0, 5.0], 1: [1.0, 3.0, 5.0]}


def used_after_its_end(address: str) -> None:
    """As a collective that waits in a queue while another thread destroys the group."""
    group = ng.join(address, name="ended", rank=int(os.environ["RANK"]), world_size=2, timeout=60)
    assert ng.safe_barrier(group, timeout=20)
    runtime.end_outside(group, ng.Cause.EXITED, "destroyed its process group")  # the first that destroying it does
    try:
        runtime.of(group)
    except ng.GuardError as error:
        faults.report(said=str(error))
    dist.destroy_process_group(group)


def test_what_is_queued_when_a_group_is_destroyed_waits_for_nobody(store: str) -> None:
    result = faults.run_ranks(used_after_its_end, 2, args=[store], timeout=60).check()
    assert result.values("said") == dict.fromkeys(range(2), "the process group was destroyed"), result


def made_by_hand(port: int, backend: str, fault: str) -> None:
    """A group as SGLang, slime and others make it: torch's helper with a store of its own, beside the job's group."""
    rank, size = jobs()
    if rank >= 0:
        store = dist.TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=30), wait_for_workers=False)
        store.set(f"here {rank}", "")
        store.wait([f"here {number}" for number in range(size)])  # rank 0 has connected the job's gloo before
        named = {
            "timeout": timedelta(seconds=LIMIT if backend == "ncclguard" else 30)
        }  # that of gloo is for connecting
        keys = dist.PrefixStore("weights", store)
        group, _ = c10d._new_process_group_helper(size, rank, [], c10d.Backend(backend), keys, "weights", **named)
        c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
        weights = torch.full((1000,), 7.0 if rank == 0 else 0.0)
        if backend == "gloo":  # of which the guard knows from the first guarded call on
            assert ng.safe_barrier(group, timeout=30)
        if fault == "late" and rank == 2:
            time.sleep(LIMIT + 2)
        if backend == "gloo":
            faults.report(**told(ng.safe_broadcast(weights, src=0, group=group, timeout=LIMIT)))
        else:
            try:
                works = [dist.broadcast(weights, src=0, group=group, async_op=True) for _ in range(3)]
                for work in works:
                    work.wait()
                faults.report(ok=True, cause="None", culprits=[])
            except ng.CollectiveFailed as error:
                faults.report(**told(error.outcome))
        faults.report(arrived=bool((weights == 7.0).all()))
        store.set(f"done {rank}", "")
        while rank == 0 and not store.check([f"done {number}" for number in range(size)]):
            time.sleep(0.05)  # the store is rank 0's


@pytest.mark.parametrize("backend", ["ncclguard", "gloo"])
@pytest.mark.parametrize("fault", ["none", "late"])
def test_a_group_that_others_make_by_hand_has_one_verdict_too(backend: str, fault: str) -> None:
    result = faults.run_ranks(made_by_hand, 4, args=[free_port(), backend, fault], timeout=60)
    for rank in (0, 2, 3):
        said = result[rank].reports
        assert said["ok"] is (fault == "none"), result
        assert (said["cause"], said["culprits"]) == (("None", []) if fault == "none" else ("late", [2])), result
        assert fault == "late" or said["arrived"], result


def wrong() -> None:
    store = dist.HashStore()
    told_of = {}
    calls = {
        "address": lambda: ng.join("10.0.0.1:29700", name="w", rank=0, world_size=2),
        "kind": lambda: ng.join(29700, name="w", rank=0, world_size=2),  # type: ignore[arg-type]
        "rank": lambda: ng.join(store, name="w", rank=2, world_size=2),
        "name": lambda: ng.join(store, name="", rank=0, world_size=2),
        "number": lambda: ng.join(store, name="w", rank="0", world_size=2),  # type: ignore[arg-type]
        "timeout": lambda: ng.join(store, name="w", rank=0, world_size=2, timeout=0),
        "twice": lambda: [ng.join(store, name="one", rank=0, world_size=1) for _ in range(2)],
    }
    for what, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            told_of[what] = str(error)
    faults.report(told=told_of)


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    said = faults.run_ranks(wrong, 1, timeout=60).check()[0].reports["told"]
    parts = {
        "address": 'give it as "tcp://HOST:PORT"', "kind": "not int", "rank": "rank is 2 of 2: give one of 0 to 1",
        "name": "give a text", "number": "rank must be a whole number, not str", "timeout": "timeout must be a positive",
        "twice": "this process has a group 'one' already",
    }  # fmt: skip
    assert {what: part in said.get(what, "") for what, part in parts.items()} == dict.fromkeys(parts, True), said


def misplaced(address: str, what: str) -> None:
    """Of four processes two are rank 1, or one counts four ranks, or two are rank 0."""
    number = int(os.environ["RANK"])
    rank, size = {"twice": ((0, 1, 1, 2), 3), "size": ((0, 1, 2, 3), 4), "zero": ((0, 1, 0, 2), 3)}[what]
    mine = size - 1 if what == "size" and number == 1 else size
    if what != "size":
        time.sleep({2: 1, 3: 2 if what == "zero" else 0}.get(number, 0))
    try:
        group = ng.join(address, name=what, rank=rank[number], world_size=mine, timeout=8 if what != "size" else 40)
        faults.report(ok=bool(ng.safe_barrier(group, timeout=20)))
    except ng.GuardError as error:
        faults.report(text=str(error), kind=type(error).__name__)


def test_a_rank_that_is_taken_and_another_number_of_ranks_are_told_at_once(store: str) -> None:
    result = faults.run_ranks(misplaced, 4, args=[store, "twice"], timeout=60).check()
    texts = [rank.reports["text"] for rank in result if "text" in rank.reports]
    assert len(texts) == 1 and (
        "has joined as rank 1 already" in texts[0] or "another process is its rank 1" in texts[0]
    ), result
    assert sum(rank.reports.get("ok", False) for rank in result) == 3, result
    result = faults.run_ranks(misplaced, 4, args=[store, "size"], timeout=60).check()
    texts = [rank.reports["text"] for rank in result]
    assert sum("world_size is " in text for text in texts) >= 3, texts  # its own, or what the others raised
    assert result.seconds < 30, result


def test_a_second_rank_0_is_told_of(store: str) -> None:
    result = faults.run_ranks(misplaced, 4, args=[store, "zero"], timeout=60).check()
    texts = [result[number].reports.get("text", "") for number in (0, 2)]
    assert any("another process has joined group 'zero' as rank 0" in text for text in texts), result
