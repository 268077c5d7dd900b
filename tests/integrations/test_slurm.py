"""The how-to for Slurm and operations/slurm/prolog.sh as they stand, by a real controller and two nodes, both this host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # a job of two ranks takes some seconds on an idle machine
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") for name in PROGRAMS),
        reason="needs root and Slurm: Debian's slurm-wlm and munge",
    ),
]

CONF = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
MessageTimeout=100
TCPTimeout=30
Prolog={folder}/prolog
EpilogSlurmctld={folder}/epilog
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=8 RealMemory=2000
NodeName={host}-2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=8 RealMemory=2000
PartitionName=all Nodes=ALL Default=YES
"""
#: What a site puts around the scripts: where ncclguard is, and where the controller's programs find their configuration.
SITE = "#!/bin/bash\nexport SLURM_CONF={folder}/slurm.conf NCCLGUARD_BIN={bin} NCCLGUARD_PROLOG_LOG={folder}/doctor.json\nexec {script}\n"
TRAIN = """
import os, torch, torch.distributed as dist, ncclguard as ng
dist.init_process_group("gloo")
for step in range(3):
    if step == 1 and str(dist.get_rank()) == os.environ.get("RAISES"):
        raise RuntimeError("injected")
    ng.safe_all_reduce(torch.ones(10), timeout=60).raise_if_failed()
os.write(1, f"rank {dist.get_rank()} done\\n".encode())  # in one piece
dist.destroy_process_group()
"""


class Cluster:
    """Two nodes, the first of which has this host's name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, socket.gethostname().split(".")[0]
        self.bin = folder / "bin"
        path = f"{self.bin}:{Path(sys.executable).parent}:{ROOT}/operations/hooks:{os.environ['PATH']}:/usr/sbin"
        self.environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf", "PATH": path, "PYTHONPATH": str(ROOT)}

    def run(self, *command: str, **variables: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder / "job", env={**self.environment, **variables}, capture_output=True, text=True,
            timeout=200, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def submit(self, script: str, **variables: str) -> str:
        """Run a batch script to its end and return what it printed."""
        (self.folder / "job" / "job.sbatch").write_text(script)
        output = self.folder / "job" / f"{time.monotonic_ns()}.out"
        said = self.run("sbatch", "--wait", f"--output={output}", "job.sbatch", **variables)
        assert output.exists(), said
        return output.read_text()

    def state(self) -> str:
        return self.run("sinfo", "--noheader", "--format=%T %E")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("slurm"))
    folder = found.folder
    for name in ("state", "job", "bin"):
        (folder / name).mkdir()
    ports = {"controller": free_port(), "first": free_port(), "second": free_port()}
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=found.host, **ports))
    for name, script in (("prolog", "prolog.sh"), ("epilog", "epilog-slurmctld.sh")):
        bins = f"{found.bin}:{Path(sys.executable).parent}"
        text = SITE.format(folder=folder, bin=bins, script=ROOT / "operations" / "slurm" / script)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "job" / "train.py").write_text(TRAIN)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    munge = [f"--key-file={key}", f"--socket={folder}/munge.sock", f"--pid-file={folder}/munge.pid"]
    munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed", "--force", "--foreground"]
    programs = [["munged", *munge], ["slurmctld", "-D"]]
    programs += [["slurmd", "-D", "-N", node] for node in (found.host, f"{found.host}-2")]
    started = []
    try:
        for program in programs:
            started.append(
                subprocess.Popen(
                    program, env=found.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )  # fmt: skip
            time.sleep(1.0)
        until = time.monotonic() + 60
        while found.state().split() != ["idle", "none"]:
            assert time.monotonic() < until, found.state() + (folder / "slurmctld.log").read_text()[-3000:]
            time.sleep(0.5)
        yield found
    finally:
        for process in reversed(started):  # at SIGTERM they take half a minute each to save what nobody reads
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def blocks() -> list[str]:
    """The how-to's scripts, for a host without GPUs on which others compute too."""
    found = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "how-to" / "slurm.md").read_text(), re.DOTALL)
    changes = {" --gpus-per-node=8": "", "8 \\": "2 \\", " --fail-on-warnings": ""}
    changes |= {"29500": str(free_port())}
    for old, new in changes.items():
        assert old in found[0], old
        found = [text.replace(old, new) for text in found]
    return found


def test_the_how_to_runs_with_torchrun_on_each_host_and_with_a_task_for_each_rank(cluster: Cluster) -> None:
    one, each = blocks()[:2]
    output = cluster.submit(one)
    assert all(f"rank {rank} done" in output for rank in range(4)), output
    assert "connections" in output, output  # doctor's table
    head = "\n".join(line for line in one.splitlines() if line.startswith(("#!", "#SBATCH", "export")))
    output = cluster.submit(head.replace("--ntasks-per-node=1", "--ntasks-per-node=2") + "\n" + each)
    assert all(f"rank {rank} done" in output for rank in range(4)), output


def test_explain_names_the_rank_that_raised_on_the_second_node(cluster: Cluster) -> None:
    """From srun's own output, whose prefixes are task numbers: with one task for each rank these are the ranks."""
    one, each = blocks()[:2]
    head = "\n".join(line for line in one.splitlines() if line.startswith(("#!", "#SBATCH", "export")))
    script = head.replace("--ntasks-per-node=1", "--ntasks-per-node=2") + "\n" + each.replace("srun ", "srun --label ")
    output = cluster.submit(script, RAISES="3")
    (cluster.folder / "job" / "failed.out").write_text(output)
    report = json.loads(cluster.run("ncclguard", "explain", "--json", "-", "failed.out"))
    assert report["culprits"] == [3], output


HANGS = """
import os, time, torch, torch.distributed as dist
rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method=os.environ["MEET"], rank=rank, world_size=size)
dist.barrier()
open(os.environ["READY"] + os.environ["SLURM_PROCID"], "w").close()
def save_checkpoint():
    time.sleep(600)
if rank == 3:
    save_checkpoint()
dist.all_reduce(torch.ones(4))
"""


def test_hang_asks_all_nodes_of_a_job_and_leaves_other_jobs_alone(cluster: Cluster) -> None:
    """Two jobs of two nodes with two ranks each, nothing prepared in them; rank 3 of each sleeps."""
    (cluster.folder / "job" / "hangs.py").write_text(HANGS)
    jobs = []
    try:
        for name in ("first", "second"):
            ready = cluster.folder / "job" / f"{name}-ready-"
            script = f"#!/bin/bash\nsrun {sys.executable} hangs.py\n"
            (cluster.folder / "job" / "hangs.sbatch").write_text(script)
            size = ["--nodes=2", "--ntasks-per-node=2", "--overcommit", "--parsable"]
            size.append(f"--output={name}.out")
            said = cluster.run("sbatch", *size, "hangs.sbatch", READY=str(ready), MEET=f"file://{ready}meet")
            assert said.strip().isdigit(), said
            jobs.append((said.strip(), ready))
        until = time.monotonic() + 250
        while not all(Path(f"{ready}{rank}").exists() for _, ready in jobs for rank in range(4)):
            outputs = [
                file.read_text()
                for name in ("first", "second")
                for file in (cluster.folder / "job").glob(name + ".out")
            ]
            assert time.monotonic() < until, "\n".join([cluster.run("squeue"), *outputs])
            time.sleep(0.5)
        said = cluster.run(sys.executable, "-m", "ncclguard", "hang", "--slurm", jobs[1][0], "--json", "-")
        report = json.loads(said)
        (job,) = report["jobs"]
        assert (job["world_size"], job["culprits"], job["cause"], job["unseen"]) == (4, [3], "late", []), said
        assert job["name"] == f"Slurm job {jobs[1][0]}"
        assert report["silent"] == []
    finally:
        for number, _ in jobs:
            cluster.run("scancel", "--full", number)
    said = cluster.run(sys.executable, "-m", "ncclguard", "hang", "--slurm", "4711")
    assert re.search(r"squeue: .*Invalid job id", said), said
