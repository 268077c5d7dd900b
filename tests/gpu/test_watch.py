"""`ncclguard.watch` over plain NCCL groups: whoever holds a collective up is named on every rank, once, and nobody else is.

The groups are made as most programs make them, without a device: NCCL then connects in the first collective.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from tests.gpu.frameworks import FRAMEWORKS, build, skip_unless_installed
from tests.gpu.parts import EMULATED, NCCL_BACKENDS, NEEDS_GPU, SHARED_GPU, join, nccl2

pytestmark = NEEDS_GPU

RANKS, CULPRIT = 3, 2
LIMIT = 3.0
LATE = LIMIT + 5.0
LATER = 40.0  # the time that torch's own limits need
# fault -> (cause, ranks that hear of it, seconds within which they know; the contract's figures plus room for few cores)
FAULTS = {
    "late": ("late", (0, 1, 2), LIMIT + 4.0),
    "stop": ("stuck", (0, 1), LIMIT + 6.0),
    "kill": ("lost", (0, 1), 3.0),
    "raise": ("failed", (0, 1), 4.0),
    "exit": ("exited", (0, 1), 3.0),
    "mismatch": ("diverged", (0, 1, 2), 4.0),
    "first": ("late", (0, 1, 2), LIMIT + 4.0),
    "new group": ("late", (0, 1, 2), LIMIT + 4.0),
    "elsewhere": ("diverged", (0, 1, 2), LIMIT + 4.0),
}
LATE_FAULTS = ("late", "first", "new group")  # after which the training goes on


#: The framework's collectives are in a group that it makes itself, and the additional one of the struck rank is not.
OWN_GROUPS = ("zero2",)


def steps_of(framework: str) -> Callable[[], None]:
    """What a rank does again and again: a collective, or a step of training."""
    if framework == "raw":
        tensor = torch.ones(1000, device="cuda")

        def step() -> None:
            dist.all_reduce(tensor)
            tensor.div_(dist.get_world_size())
            torch.cuda.synchronize()

    else:
        train, batch = build(framework), torch.ones(8, 20, device="cuda")

        def step() -> None:
            train(batch)
            torch.cuda.synchronize()

    return step


def strike(fault: str, seconds: float, group: dist.ProcessGroup | None) -> None:
    faults.report(struck=time.time())
    if fault in LATE_FAULTS:
        time.sleep(seconds)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raise":
        raise ValueError("boom in rank 2")
    elif fault == "exit":
        sys.exit(0)
    elif fault in ("mismatch", "elsewhere"):
        dist.all_reduce(torch.ones(999, device="cuda"), group=group)
        torch.cuda.synchronize()


def watched(
    fault: str,
    framework: str,
    before: bool,
    backend: str = "nccl",
    limit: float = LIMIT,
    torchs: float = 120.0,
    patience: int = 500,
) -> None:
    """Rank 2 is struck at its sixth step, or before its first collective; the process ends when it is told to.

    ``limit`` is that of `watch`, ``torchs`` that of the process group. When torch has found an error it ends rank 1 after
    ``patience`` milliseconds, rank 0 much later.
    """
    found: list[Any] = []

    def told(incident: ng.Incident) -> None:
        found.append({"at": time.time(), "json": incident.to_json()})
        faults.report(incidents=found)

    def end() -> None:
        faults.wait_until_told("end", seconds=120)
        faults.report(steps=steps)
        os._exit(0)  # a collective that hangs would hold up any other end

    steps = 0
    # nccl2 waits for so long before it ends the process, ProcessGroupNCCL four times as long.
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = str(patience if os.environ["RANK"] == "1" else 15_000)
    # A framework imports and compiles for seconds between its first collectives, at another time on each rank.
    preparing = contextlib.nullcontext() if framework == "raw" else ng.phase("eval")
    os.environ["NCCLGUARD_TIMEOUT"] = str(limit)
    if before:
        ng.watch(on_incident=told)
    rank = join(backend, torchs)
    if not before:
        ng.watch(on_incident=told)
    threading.Thread(target=end, daemon=True).start()
    away = LATE if limit == LIMIT else LATER
    # NCCL connects it in its first collective, and until then nothing of it is recorded.
    group = dist.new_group() if fault in ("new group", "elsewhere") else None
    if fault == "first" and rank == CULPRIT:
        strike(fault, away, group)
    with preparing:
        step = steps_of(framework)
        if framework != "raw":
            step()
    while True:
        step()
        steps += 1
        if steps == 5:
            time.sleep(1.0)  # so that all that were issued are known to have ended
        if steps == 5 and rank == CULPRIT and fault != "first":
            strike(fault, away, group)
        if steps == 5 and fault == "new group":
            dist.all_reduce(torch.ones(10, device="cuda"), group=group)
            torch.cuda.synchronize()
        faults.report(steps=steps)
        time.sleep(0.02)


def run(fault: str, framework: str = "raw", before: bool = True, backend: str = "nccl") -> None:
    cause, ranks, bound = FAULTS["elsewhere" if fault == "mismatch" and framework in OWN_GROUPS else fault]
    env = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none", "NCCLGUARD_TIMEOUT_EVAL": "60"}
    with faults.start_ranks(watched, RANKS, args=[fault, framework, before, backend], env=env, timeout=120) as job:
        struck = job.wait_for("struck", ranks=[CULPRIT], seconds=60)[CULPRIT]
        job.wait_for("incidents", ranks=ranks, seconds=40)
        if fault in LATE_FAULTS:
            before_it = {rank: job.reports(rank).get("steps", 0) for rank in range(RANKS)}
            end = time.monotonic() + LATE + 10.0
            while any(job.reports(rank).get("steps", 0) < before_it[rank] + 3 for rank in range(RANKS)):
                assert time.monotonic() < end, "the training did not go on after the late rank had come"
                time.sleep(0.1)
        else:
            time.sleep(4.0)  # torch ends the survivors of most of these by itself: that is no second incident
        said = {rank: job.reports(rank)["incidents"] for rank in ranks}  # before the ranks end, each at its own moment
        if fault == "stop":
            job.send_signal(CULPRIT, signal.SIGCONT)
        job.tell("end")
        result = job.wait()
    for rank in ranks:
        incidents = [ng.Incident.from_json(one["json"]) for one in said[rank]]
        named = [(str(one.cause), one.culprits, one.agreed) for one in incidents]
        assert named == [(cause, (CULPRIT,), True)], "\n".join(map(str, [rank, *incidents, result]))
        assert ("emulated" in str(incidents[0])) is EMULATED
        assert said[rank][0]["at"] - struck < bound, (rank, said[rank][0]["at"] - struck)
    assert "does not cover" not in str(result)


#: On a real GPU NCCL ends a collective that has another size on one rank, with rubbish, and those behind it: nothing
#: stands still. Of a framework's step one rank then lacks the last.
STANDS_STILL = pytest.mark.skipif(
    not EMULATED, reason="NCCL ends collectives of different sizes, so watch() sees nothing"
)


@pytest.mark.parametrize("backend", NCCL_BACKENDS)
@pytest.mark.parametrize("fault", [pytest.param(name, marks=[STANDS_STILL] * (name == "mismatch")) for name in FAULTS])
def test_called_before_the_group_is_made_it_names_the_struck_rank(fault: str, backend: str) -> None:
    run(fault, backend=backend)


@pytest.mark.parametrize("fault", ["late", "kill"])
def test_called_after_the_group_is_made_it_names_the_struck_rank(fault: str) -> None:
    run(fault, before=False)


@pytest.mark.parametrize("framework", list(FRAMEWORKS))
@pytest.mark.parametrize("fault", ["late", "kill", "raise", "mismatch"])
def test_under_frameworks_it_names_the_struck_rank(fault: str, framework: str) -> None:
    skip_unless_installed(framework)
    run(fault, framework)


@pytest.mark.parametrize("fault", ["late", "stop"])
def test_torch_gives_up_first_and_the_one_it_waited_for_is_named_not_those_it_ends(fault: str) -> None:
    """torch's limit is 4 s, that of watch() 60: torch ends rank 1 some seconds later, and rank 0 is still there to see it."""
    env = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none"}
    args = [fault, "raw", True, "nccl", 60.0, 4.0, 6000 if nccl2() else 1500]
    with faults.start_ranks(watched, RANKS, args=args, env=env, timeout=120) as job:
        job.wait_for("incidents", ranks=[0, 1], seconds=60)
        end = time.monotonic() + 15.0
        while psutil.pid_exists(job.pid(1)) and psutil.Process(job.pid(1)).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "torch did not end rank 1"
            time.sleep(0.1)
        time.sleep(2.0)  # for another incident, which there must not be
        said = job.reports(0)["incidents"]
        job.tell("end")
        if fault == "stop":
            job.send_signal(CULPRIT, signal.SIGCONT)
        result = job.wait()
    incidents = [ng.Incident.from_json(one["json"]) for one in said]
    named = [(str(one.cause), one.culprits) for one in incidents]
    assert named == [(FAULTS[fault][0], (CULPRIT,))], "\n".join(map(str, [*incidents, result]))


def aborted(wait: str) -> None:
    """Rank 2 stays away beyond the limit; the others wait for the result on the host, each in one of the usual ways."""
    ng.watch(timeout=LIMIT, on_hang="abort", on_incident=lambda incident: faults.report(told=str(incident.cause)))
    rank = join("nccl")
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == CULPRIT:
        time.sleep(LATE)
    try:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if wait == "synchronize":
            torch.cuda.synchronize()
        elif wait == "item":
            work.wait()  # of the stream for the operation
            tensor[0].item()
        elif wait == "poll":
            while not work.is_completed():
                time.sleep(0.01)
            work.wait()
            torch.cuda.synchronize()
        faults.report(went_on=True)
    except Exception as error:
        faults.report(raised=[kind.__name__ for kind in type(error).__mro__], text=str(error))
        raise


@pytest.mark.parametrize("wait", ["synchronize", "item", "poll"])
def test_no_rank_goes_on_with_a_result_that_was_never_reduced(wait: str) -> None:
    env = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none"}
    result = faults.run_ranks(aborted, RANKS, args=[wait], env=env, timeout=60)
    for rank in result:
        assert rank.reports.get("told") == "late", str(result)
        assert "went_on" not in rank.reports, str(result)
        assert not rank.ok, str(result)  # it has raised, and the program ends with that
    for rank in (0, 1):
        # `is_completed` asks torch, which raises an error of its own where it gets to it first, or ends the process
        # before this program has reported what it raised.
        if wait != "poll":
            assert "CollectiveTimeout" in result[rank].reports["raised"], str(result)
            assert "rank 2 late" in result[rank].reports["text"]
    assert not result.still_running
