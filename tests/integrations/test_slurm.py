"""The how-to for Slurm and operations/slurm/prolog.sh as they stand, by a real controller and a node of this host's own."""

from __future__ import annotations

import contextlib
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

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # a job of two ranks takes some seconds on an idle machine
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
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
Prolog={folder}/prolog
EpilogSlurmctld={folder}/epilog
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=2000
PartitionName=all Nodes=ALL Default=YES
"""
#: What a site puts around the scripts: where ncclguard is, and where the controller's programs find their configuration.
SITE = "#!/bin/bash\nexport SLURM_CONF={folder}/slurm.conf NCCLGUARD_BIN={bin} NCCLGUARD_PROLOG_LOG={folder}/doctor.json\nexec {script}\n"
TRAIN = """
import os, torch, torch.distributed as dist, ncclguard as ng
dist.init_process_group("gloo")
for step in range(3):
    if step == 1 and dist.get_rank() == 1 and os.environ.get("RAISES"):
        raise RuntimeError("injected")
    ng.safe_all_reduce(torch.ones(10), timeout=60).raise_if_failed()
os.write(1, f"rank {dist.get_rank()} done\\n".encode())  # in one piece
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Cluster:
    """One node that is this host."""

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
    for name in ("state", "spool", "job", "bin"):
        (folder / name).mkdir()
    ports = {"controller": free_port(), "node": free_port()}
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
    programs = [["munged", *munge], ["slurmctld", "-D"], ["slurmd", "-D", "-N", found.host]]
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
        while "idle" not in found.state():
            assert time.monotonic() < until, found.state() + (folder / "slurmctld.log").read_text()[-3000:]
            time.sleep(0.5)
        yield found
    finally:
        for process in reversed(started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def blocks() -> list[str]:
    """The how-to's scripts, for one host without GPUs on which others compute too."""
    found = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "how-to" / "slurm.md").read_text(), re.DOTALL)
    changes = {" --gpus-per-node=8": "", "--nodes=2": "--nodes=1", "8 \\": "2 \\", " --fail-on-warnings": ""}
    changes |= {"29500": str(free_port())}
    for old, new in changes.items():
        assert old in found[0], old
        found = [text.replace(old, new) for text in found]
    return found


def test_the_how_to_runs_with_torchrun_on_each_host_and_with_a_task_for_each_rank(cluster: Cluster) -> None:
    one, each = blocks()[:2]
    output = cluster.submit(one)
    assert "rank 0 done" in output and "rank 1 done" in output, output
    assert "connections" in output, output  # doctor's table
    head = "\n".join(line for line in one.splitlines() if line.startswith(("#!", "#SBATCH", "export")))
    output = cluster.submit(head.replace("--ntasks-per-node=1", "--ntasks-per-node=2") + "\n" + each)
    assert "rank 0 done" in output and "rank 1 done" in output, output
