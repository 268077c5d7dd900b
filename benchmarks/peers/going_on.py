"""A rank of a training is killed: how long the training stands, and which steps it computes again, with each way.

    python -m benchmarks.peers.going_on [--ways plain surviving ...] [--faults "2 forward" ...] [--runs 3] [--json FILE]

The trainings are in `trainings/`, each as its way's documentation has it written and with that documentation's time
limits; they differ from `plain.py` in nothing else. 4 ranks, steps of 0.1 s, a checkpoint every 10 steps; the rank is
killed (SIGKILL) in step 16. Measured from the kill: until the first step is complete that was not complete before, and
until as many ranks as before train again. The lines that a way changes in the script are counted by a diff that ignores
indentation, comments and docstrings.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.metadata
import io
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import cost
from benchmarks.peers.trainings import parts
from ncclguard.faults.launcher import reserve_port

RANKS: Final = 4
#: Seconds that a training may take until the kill, and after it.
BEFORE: Final = 240.0
LIMIT: Final = 180.0
FOLDER: Final = Path(__file__).parent / "trainings"
FAULTS: Final = ("2 forward", "0 forward", "2 optimizer", "0 optimizer")
#: Way -> name for people, package, how it is started.
WAYS: Final = {
    "plain": ("torchrun, checkpoints", "torch", "torchrun --max-restarts 3"),
    "surviving": ("ncclguard", "ncclguard", "ncclguard run"),
    "surviving-again": ("ncclguard, new process", "ncclguard", "ncclguard run --restart-lost 1"),
    "surviving-spare": ("ncclguard, spare", "ncclguard", "ncclguard run --spares 1"),
    "replicas": ("torchft", "torchft", "torchft_lighthouse, and a torchrun --max-restarts 3 for each rank"),
    "replicas-pure": ("torchft, its DDP in Python", "torchft", "as above"),
    "inprocess": ("nvidia-resiliency-ext", "nvidia-resiliency-ext", "a process for each rank, without torchrun"),
}


@dataclass(frozen=True)
class Run:
    """What one kill came to; seconds since it. `again`: steps that a rank had completed, and then it or its successor
    computed again.
    """

    way: str
    fault: str
    stood: float | None
    again: int
    size: int
    whole: float | None
    steps: int
    ends: tuple[int, ...]


def commands(way: str) -> tuple[list[list[str]], list[dict[str, str]]]:
    """The processes of a way: their commands and environments."""
    script = ["-m", f"benchmarks.peers.trainings.{module(way)}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3"]
    if way == "plain":
        # Else a restart's gloo finds the addresses of the processes before it in the agent's store (torch 2.13).
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return [[*torchrun, "--standalone", "--nproc-per-node", str(RANKS), *script]], [own]
    if way.startswith("surviving"):
        command = [sys.executable, "-m", "ncclguard", *WAYS[way][2].split()[1:], "--standalone"]
        return [[*command, "--nproc-per-node", str(RANKS), *script]], [{}]
    if way.startswith("replicas"):
        own = {"PEERS_PURE": "1"} if way == "replicas-pure" else {}
        each = [[*torchrun, "--standalone", "--nproc-per-node", "1", *script] for _ in range(RANKS)]
        return each, [{**own, "REPLICA_GROUP_ID": str(rank), "NUM_REPLICA_GROUPS": str(RANKS)} for rank in range(RANKS)]
    with contextlib.closing(reserve_port()) as reserved:
        port = str(reserved.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
    each = [[sys.executable, *script] for _ in range(RANKS)]
    return each, [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]


def module(way: str) -> str:
    """Of the training's script."""
    return way.partition("-")[0]


def run(way: str, fault: str, log: Path) -> Run:
    """One training with one kill."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        env = {**os.environ, "PEERS_FOLDER": str(folder), "PEERS_STRIKE": fault, "OMP_NUM_THREADS": "1"}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCLGUARD_REPORT_DIR": "none", "NCCLGUARD_REPORT_PANEL": "false"}
        if way.startswith("replicas"):
            env["TORCHFT_LIGHTHOUSE"] = stack.enter_context(cost.lighthouse())
        output = stack.enter_context(log.open("a"))
        print(f"===== {way}, {fault}", file=output, flush=True)
        processes = [
            stack.enter_context(ended(subprocess.Popen(
                command, env={**env, **own}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )))
            for command, own in zip(*commands(way), strict=True)
        ]  # fmt: skip
        struck, until = False, time.monotonic() + BEFORE
        while time.monotonic() < until and any(process.poll() is None for process in processes):
            time.sleep(0.2)
            if not struck and (folder / "struck").exists():
                struck, until = True, time.monotonic() + LIMIT
        ends = tuple(process.poll() if process.poll() is not None else 1000 for process in processes)
        return found(way, fault, folder, ends)


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process and its children are gone at the end."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def found(way: str, fault: str, folder: Path, ends: tuple[int, ...]) -> Run:
    """What the ranks have written down."""
    lines = [json.loads(line) for file in folder.glob("steps.*") for line in file.read_text().splitlines()]
    struck = json.loads((folder / "struck").read_text()) if (folder / "struck").exists() else None
    if struck is None:
        return Run(way, fault, None, 0, 0, None, len({line["step"] for line in lines}), ends)
    before = {line["step"] for line in lines if line["at"] < struck}
    known = {(line["name"], line["step"]) for line in lines if line["at"] < struck}
    after = sorted((line for line in lines if line["at"] >= struck), key=lambda line: line["at"])
    # A rank that is started again when the others have ended finds nobody to train with.
    last = min((line["at"] for line in after if line["step"] == parts.STEPS - 1), default=float("inf"))
    after = [line for line in after if line["at"] <= last]
    # A step that was all but complete is, on those that were not killed; the next one needs them to go on.
    finished = {line["step"] for line in after if line["at"] < struck + 0.02}
    new = [line for line in after if line["step"] not in before | finished]
    # With the number that was there before, after the killed process, or its successor, is one of them again.
    back = [line["at"] for line in new if line["size"] == RANKS and line["name"] == fault.split()[0]]
    return Run(
        way=way,
        fault=fault,
        stood=round(new[0]["at"] - struck, 2) if new else None,
        again=len({line["step"] for line in after if (line["name"], line["step"]) in known}),
        size=new[0]["size"] if new else 0,
        whole=round(back[0] - struck, 2) if back else None,
        steps=len({line["step"] for line in lines}),
        ends=ends,
    )


def code(file: Path) -> list[str]:
    """The lines of a script without indentation, comments, docstrings and empty lines."""
    kept: dict[int, str] = {}
    lines = file.read_text().splitlines()
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        docstring = token.type == tokenize.STRING and token.string.startswith('"""')
        if token.string.strip() and token.type != tokenize.COMMENT and not docstring:
            for number in range(token.start[0], token.end[0] + 1):
                kept[number] = lines[number - 1].split("  #")[0].strip()
    return [kept[number] for number in sorted(kept)]


def changed(way: str) -> tuple[int, int]:
    """Lines that are new, and lines of plain.py that are gone."""
    plain = code(FOLDER / "plain.py")
    words = [line[0] for line in difflib.ndiff(plain, code(FOLDER / f"{module(way)}.py"))]
    return words.count("+"), words.count("-")


def version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(runs: Sequence[Run]) -> str:
    """One row for each way and fault; medians over the runs."""
    head = ("killed", "way", "stood", "again", "went on with", "all ranks again", "steps", "ended well")
    rows = [head]
    for fault in dict.fromkeys(one.fault for one in runs):
        for way in dict.fromkeys(one.way for one in runs):
            same = [one for one in runs if (one.way, one.fault) == (way, fault)]
            stood = [one.stood for one in same if one.stood is not None]
            whole = [one.whole for one in same if one.whole is not None]
            killed = 1 if way == "inprocess" else 0  # it has no launcher that starts it again
            well = sum(one.ends.count(0) >= len(one.ends) - killed for one in same)
            rows.append((
                f"rank {fault.replace(' ', ', in ')}", WAYS[way][0],
                f"{statistics.median(stood):.1f} s" if len(stood) == len(same) else "does not go on",
                f"{statistics.median(one.again for one in same):g} steps",
                "-" if not stood else " or ".join(sorted({f"{one.size} ranks" for one in same if one.size})),
                f"after {statistics.median(whole):.1f} s" if whole else "no",
                f"{min(one.steps for one in same)} of {parts.STEPS}", f"{well} of {len(same)}",
            ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> int:
    """Run everything asked for, print the tables, and return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), help='rank and moment, such as "2 forward"')
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write everything here; never overwrites a file")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the trainings print is added here")
    parser.add_argument("--read", type=Path, nargs="+", help="print the table of these files, and run nothing")
    options = parser.parse_args()
    if options.read:
        kept = [one for file in options.read for one in json.loads(file.read_text())["runs"]]
        print(table([Run(**{**one, "ends": tuple(one["ends"])}) for one in kept]))
        return 0
    if options.json is not None and options.json.exists():
        parser.error(f"{options.json} exists and is never overwritten; choose another name")
    versions = {name: version(WAYS[name][1]) for name in options.ways}
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    print(f"# {RANKS} ranks on one host, gloo; SIGKILL in step {parts.STRIKE}; {machine}")
    for way, known in versions.items():
        new, gone = changed(way)
        lines = "" if way == "plain" else f"; {new} lines new, {gone} gone of {len(code(FOLDER / 'plain.py'))}"
        print(f"# {WAYS[way][0]} {known or 'is not installed: not measured'}, {WAYS[way][2]}{lines}", flush=True)
    runs: list[Run] = []
    content: dict[str, Any] = {"schema_version": 1, "machine": machine, "versions": versions, "runs": []}
    content["lines"] = {way: changed(way) for way in options.ways}
    for fault in options.faults:
        for _ in range(options.runs):
            for way in (name for name, known in versions.items() if known is not None):
                runs.append(run(way, fault, options.log))
                print(f"# {runs[-1]}", file=sys.stderr, flush=True)
                content["runs"].append(asdict(runs[-1]))
                if options.json is not None:
                    options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"# load at the end {os.getloadavg()[0]:.1f}\n{table(runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
