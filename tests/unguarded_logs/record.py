"""Records what plain NCCL jobs leave behind when a rank is struck: logs and flight-recorder dumps, kept under this folder.

    python -m tests.unguarded_logs.record [BACKEND-FAULT[-torchrun] ...] [--at-once N]

Run it with a CUDA build of torch, on GPUs or on the emulated one; ``legacy`` is torch's ProcessGroupNCCL, ``nccl2`` the
backend that carries the name "nccl" from torch 2.15 on. Each folder holds ``logs/rankR.log`` (stdout and stderr of the rank),
``dumps/`` (what its flight recorder wrote) and ``truth.json``; those named ``*-torchrun`` hold torchrun's own log folder.

What is changed on the way: folders of the machine, its name, the lines that the emulated GPU prints itself, and all but
the first frames of torch's C++ stacks. `truth.json` says by hand what the evidence proves: it is kept when it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.ports import free_port
from tests.unguarded_logs.job import STRUCK_STEP

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
RANKS = 3
LONGEST = 150.0  # seconds from the fault on: the limit of 6 s, and what torch takes for its dumps
STARTS_WITHIN = 300.0  # seconds; several torch processes start at a time
FRAMES = 1  # of a C++ stack that are kept
FAULTS = {
    "late": 2,
    "late-then-comes": 1,
    "kill": 2,
    "stop": 1,
    "gil": 2,
    "exception": 2,
    "oom": 1,
    "exit": 2,
    "mismatch-shape": 1,
    "mismatch-dtype": 2,
    "skip": 2,
    "extra": 1,
    "reset": 2,
    "partition": 2,
}
CAUSES = {"late-then-comes": "late", "exception": "failed", "oom": "failed", "exit": "exited", "kill": "lost"}
CAUSES |= {"stop": "stuck", "gil": "stuck", "late": "late", "reset": "network", "partition": "network"}
UNDER_TORCHRUN = ("late", "kill", "exception", "oom", "exit")


def environment(folder: Path, backend: str, port: int) -> dict[str, str]:
    dumps = folder / "dumps"
    dumps.mkdir(parents=True)
    prefix = str(dumps / "comm_lib_trace_rank_")
    chosen = {
        "NCCLGUARD_AUTOSTART": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000",  # torch waits for it, and four times as long before it ends
        "TORCH_DIST_USE_NCCL2": "0" if backend == "legacy" else "1",
        # Where all ranks share one GPU: see tests/gpu/parts.py.
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
    }
    chosen["TORCH_FR_DUMP_TEMP_FILE" if RELEASE >= (2, 9) else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = prefix
    return {**os.environ, **chosen}


def run_ranks(folder: Path, backend: str, fault: str, struck: int) -> dict[str, Any]:
    """One process a rank, as srun starts them: each goes on until its own end."""
    env = environment(folder, backend, free_port())
    logs = folder / "logs"
    logs.mkdir()
    command = [sys.executable, "-m", "tests.unguarded_logs.job", "nccl", fault, str(struck)]
    processes = []
    for rank in range(RANKS):
        with open(logs / f"rank{rank}.log", "wb") as log:
            own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"node{rank}"}
            processes.append(subprocess.Popen(command, env=own, cwd=folder, stdout=log, stderr=subprocess.STDOUT))
    wait_until_struck(logs, struck)
    end = time.monotonic() + LONGEST
    others = [process for rank, process in enumerate(processes) if rank != struck]
    for process in others:
        wait(process, end)
    if fault not in ("late", "stop", "gil", "partition"):
        wait(processes[struck], end)
    ended_by_recorder = []
    for rank, process in enumerate(processes):
        if process.poll() is None:
            ended_by_recorder.append(rank)
            process.send_signal(signal.SIGKILL)
    return {
        "exit_codes": [process.wait() for process in processes],
        "ended_by_recorder": ended_by_recorder,
    }


def wait_until_struck(logs: Path, struck: int) -> None:
    """Until the rank has done its last step before the fault."""
    last = f"rank {struck} step {STRUCK_STEP - 1} loss"
    end = time.monotonic() + STARTS_WITHIN
    while not any(last in path.read_text(errors="replace") for path in logs.rglob("*.log") if path.is_file()):
        if time.monotonic() > end:
            raise TimeoutError(f"rank {struck} did not come to its fault within {STARTS_WITHIN:g} s: see {logs}")
        time.sleep(0.5)


def wait(process: subprocess.Popen[bytes], end: float) -> None:
    try:
        process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass


def run_torchrun(folder: Path, backend: str, fault: str, struck: int) -> dict[str, Any]:
    """Under torchrun with a log folder: the first rank that ends with an error ends the others too."""
    env = environment(folder, backend, free_port())
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--redirects=3"]
    command += [f"--log-dir={folder / 'torchrun'}", f"--master-port={env['MASTER_PORT']}"]
    command += ["-m", "tests.unguarded_logs.job", "nccl", fault, str(struck)]
    with open(folder / "launcher.log", "wb") as log:
        process = subprocess.Popen(
            command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        wait_until_struck(folder / "torchrun", struck)
        wait(process, time.monotonic() + LONGEST)
        by_recorder = process.poll() is None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return {"exit_codes": [process.wait()], "ended_by_recorder": [struck] if by_recorder else []}


def anonymous(text: str, folder: Path) -> str:
    """Without what belongs to this machine."""
    prefixes = {str(folder): "/job", str(ROOT): "/job", str(Path(torch.__file__).parent.parent): "/venv/site-packages"}
    prefixes |= {sys.prefix: "/venv", sys.base_prefix: "/usr", socket.gethostname(): "node0", str(Path.home()): "/home"}
    site = Path(torch.__file__).parent.parent
    if site.is_relative_to(ROOT):
        prefixes[str(site.relative_to(ROOT))] = "/venv/site-packages"  # as torchrun shortens it
    for found in sorted(prefixes, key=len, reverse=True):  # one may lie in another
        if len(found) > 1:
            text = text.replace(found, prefixes[found])
    return text


def kept_lines(lines: list[str]) -> Iterator[str]:
    frames = 0
    for line in lines:
        if line.startswith("emulated "):
            continue
        frames = frames + 1 if re.match(r"frame #\d+: ", line) else 0
        if frames <= FRAMES:
            yield line


def clean(folder: Path, to: Path) -> None:
    """Copy a recording to its place, made small and anonymous; truth.json stays."""
    for old in ("logs", "dumps", "torchrun", "launcher.log"):
        path = to / old
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.stat().st_size == 0:
            continue
        relative = path.relative_to(folder)
        if relative.parts[0] == "torchrun":  # its folder has a random name between
            relative = Path("torchrun", *relative.parts[2:])
        target = to / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if relative.parts[0] == "dumps":
            with open(path, "rb") as file:
                trace = pickle.load(file)  # written by torch, a moment ago
            target.write_bytes(pickle.dumps(renamed(trace, folder), protocol=2))
        else:
            text = anonymous(path.read_text(errors="replace"), folder)
            target.write_text("".join(kept_lines(text.splitlines(keepends=True))))


def renamed(value: Any, folder: Path) -> Any:
    if isinstance(value, str):
        return anonymous(value, folder)
    if isinstance(value, list):
        return [renamed(item, folder) for item in value]
    if isinstance(value, Mapping):
        return {renamed(key, folder): renamed(item, folder) for key, item in value.items()}
    return value


def record(name: str, backend: str, fault: str, torchrun: bool) -> str:
    struck, to = FAULTS[fault], HERE / name
    with tempfile.TemporaryDirectory(prefix="unguarded-") as temporary:
        folder = Path(temporary)
        started = time.monotonic()
        ended = (run_torchrun if torchrun else run_ranks)(folder, backend, fault, struck)
        seconds = time.monotonic() - started
        to.mkdir(exist_ok=True)
        clean(folder, to)
    truth = to / "truth.json"
    before = json.loads(truth.read_text()) if truth.exists() else {}
    data = {
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "device": torch.cuda.get_device_name(),
        "backend": backend,
        "ranks": RANKS,
        "fault": fault,
        "struck": struck,
        "cause": CAUSES.get(fault, "diverged"),
        **ended,
        "expected": before.get("expected", {}),
    }
    truth.write_text(json.dumps(data, indent=2) + "\n")
    return f"{name}: {seconds:.0f} s, {ended}"


def everything() -> list[str]:
    """What this torch records: from 2.15 on nccl2, and the old backend where its lines are others."""
    if RELEASE < (2, 15):
        return [f"legacy-{fault}" for fault in FAULTS] + [f"legacy-{fault}-torchrun" for fault in UNDER_TORCHRUN]
    names = [f"nccl2-{fault}" for fault in FAULTS] + [f"nccl2-{fault}-torchrun" for fault in UNDER_TORCHRUN]
    return [*names, "legacy-late", "legacy-kill", "legacy-mismatch-shape"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="such as legacy-kill; all that this torch can record by default")
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run beside each other")
    arguments = parser.parse_args()
    jobs = []
    for name in arguments.names or everything():
        backend, _, fault = name.removesuffix("-torchrun").partition("-")
        folder = name if RELEASE < (2, 15) else name.replace("legacy", "legacy2.15")
        jobs.append((folder, backend, fault, name.endswith("-torchrun")))
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for line in pool.map(lambda job: record(*job), jobs):
            print(line, flush=True)


if __name__ == "__main__":
    main()
