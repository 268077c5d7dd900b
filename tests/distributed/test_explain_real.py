"""`ncclguard explain` on what really hanging jobs leave: torchrun with gloo, one fault each, explained from the log
folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from ncclguard.outcome import Cause
from ncclguard_explain import Report, explain

pytestmark = [pytest.mark.usefixtures("preforked_programs"), pytest.mark.slow]
THOROUGH = pytest.mark.thorough
WORLD = 4
ENDS_BY = 120.0  # seconds; a job hangs for 15 s at most

JOB = textwrap.dedent(
    """
    import datetime, os, signal, sys, time
    import torch
    import torch.distributed as dist

    fault = sys.argv[1]
    # The limit holds for connecting too; where torch compares the calls, or a rank raises, nobody waits for it.
    limit = 60 if fault in ("operation", "shape", "raise", "kill", "exit", "unused") else 15
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=limit))
    rank = dist.get_rank()
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    print(f"rank {rank} starts", flush=True)
    if fault == "late":
        if rank == 1:
            time.sleep(60)  # until the launcher ends it, however long the others take to exit
        dist.all_reduce(tensor)
    elif fault == "barrier":
        if rank == 1:
            time.sleep(12)
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=5))
    elif fault == "barrier_all":
        if rank in (1, 2):
            time.sleep(12)
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=5), wait_all_ranks=True)
    elif fault == "operation":
        if rank == 1:
            dist.broadcast(torch.ones(7), 0)
        else:
            dist.all_reduce(tensor)
    elif fault == "shape":
        dist.all_reduce(torch.ones(5 if rank == 2 else 4))
    elif fault == "raise":
        if rank == 1:
            raise ValueError("bad sample 17")
        dist.all_reduce(tensor)
    elif fault == "kill":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(tensor)
    elif fault == "exit":
        if rank == 1:
            sys.exit(0)
        dist.all_reduce(tensor)
    elif fault == "unused":
        class Two(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

            def forward(self, x, skip):
                return self.a(x) if skip else self.b(self.a(x))

        model = torch.nn.parallel.DistributedDataParallel(Two())
        for _ in range(3):
            model(torch.ones(2, 4), rank == 1).sum().backward()
    elif fault == "recorder":
        import threading
        from torch._C._distributed_c10d import _dump_fr_trace

        def dump():
            with open(os.path.join(sys.argv[2], f"comm_lib_trace_rank_{rank}"), "wb") as file:
                file.write(_dump_fr_trace())

        if rank == 1:
            time.sleep(3)
            dump()
            time.sleep(60)  # until the launcher ends it, whose others fail at their limit: a later dump would say more
        timer = threading.Timer(2.0, dump)
        timer.start()
        dist.all_reduce(tensor)
    """
)


def run_job(folder: Path, fault: str, detail: bool = False, arguments: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Run the job under torchrun to its end; return the log folder and the launcher's own output."""
    script, logs, output = folder / "job.py", folder / "logs", folder / "launcher.txt"
    script.write_text(JOB)
    logs.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "200"}
    environment.pop("TORCH_DISTRIBUTED_DEBUG", None)
    if detail:
        environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    command += [f"--log-dir={logs}", "--redirects=3", str(script), fault, *arguments]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            process.wait(timeout=ENDS_BY)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    return logs, output


def everything(logs: Path) -> str:
    """What the ranks have said."""
    return "\n".join(f"--- {file}\n{file.read_text()}" for file in sorted(logs.rglob("*.log")))


@pytest.mark.parametrize(
    ("fault", "detail", "culprits", "cause", "with_launcher"),
    [
        ("late", False, (1,), Cause.LATE, True),
        pytest.param("late", True, (1,), Cause.LATE, True, marks=THOROUGH),
        pytest.param("barrier", False, (1,), Cause.LATE, True, marks=THOROUGH),
        pytest.param("barrier_all", False, (1, 2), Cause.LATE, True, marks=THOROUGH),
        ("operation", True, (1,), Cause.DIVERGED, False),
        pytest.param("shape", True, (2,), Cause.DIVERGED, False, marks=THOROUGH),
        pytest.param("raise", False, (1,), Cause.FAILED, False, marks=THOROUGH),
        ("kill", False, (1,), Cause.LOST, True),
        ("unused", False, (1,), Cause.DIVERGED, False),
    ],
)
def test_culprit_of_a_real_job_is_named(
    tmp_path: Path,
    fault: str,
    detail: bool,
    culprits: tuple[int, ...],
    cause: Cause,
    with_launcher: bool,
) -> None:
    """The fault's ranks, and no other, from the logs (with the launcher's output where only that tells the cause)."""
    logs, output = run_job(tmp_path, fault, detail)
    alone = explain([str(logs)], world_size=WORLD)
    assert set(alone.culprits) <= set(culprits), alone.summary
    report = explain([str(logs), str(output)] if with_launcher else [str(logs)])
    assert report.culprits == culprits, f"{report.summary}\n{output.read_text()}\n{everything(logs)}"
    # Before torch 2.10 its launcher does not say of the ranks that it ends itself what they ended with: they may have been
    # gone before.
    silent = cause is Cause.LATE and not hasattr(SubprocessContext, "_capture_process_failures")
    assert report.cause is (Cause.UNKNOWN if silent else cause)


def test_rank_that_left_early_is_the_only_one_that_may_be_named(tmp_path: Path) -> None:
    """The launcher ends the survivors within 100 ms, so not all get to print; nobody else is ever named."""
    logs, output = run_job(tmp_path, "exit")
    report = explain([str(logs), str(output)])
    assert set(report.culprits) <= {1}
    assert report.cause in (Cause.EXITED, Cause.UNKNOWN)


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8),
    reason="gloo's collectives are recorded from torch 2.8 on",
)
def test_flight_recorder_dumps_of_a_real_gloo_job_name_the_late_rank(tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    run_job(tmp_path, "recorder", arguments=(str(dumps),))
    assert len(list(dumps.iterdir())) == WORLD
    report: Report = explain([str(dumps)])
    assert report.culprits == (1,)
    assert report.collective is not None and report.collective.op == "all_reduce"
    (dumps / "comm_lib_trace_rank_1").unlink()
    assert explain([str(dumps)]).culprits == (1,)
