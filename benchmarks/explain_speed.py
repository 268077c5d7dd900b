"""Measure how fast `ncclguard explain` reads: MB/s of log text and peak memory, on synthetic logs.

    python benchmarks/explain_speed.py [--mb 1024]

Eight logs, each with a timeout at its end: "plain", ordinary training output, 20,000 lines again and again; "unlike",
such lines in letters that are others in each page, so that no two lines of the log are alike; "prefixed", every line
with [rankN]; "noisy", a warning that matters on every 50th line; "json", the lines of a container as Docker keeps them;
"bars", 50 states of a progress bar on a line, with carriage returns; "nccl", NCCL_DEBUG=INFO of 64 ranks, with
addresses; "tracebacks", those of eight ranks, interleaved. Each is read in a process of its own, so that its peak
memory is its own. The figures to reach: 1 GB in at most 30 s and 100 MB.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = [
    "step",
    "loss",
    "lr",
    "grad_norm",
    "epoch",
    "batch",
    "time",
    "data",
    "model",
    "layer",
    "attention",
    "forward",
    "INFO",
    "NCCL",
    "Loading",
    "checkpoint",
    "shards",
    "samples",
    "per",
    "second",
    "trainer",
    "process",
    "tokens",
    "memory",
    "reserved",
    "Channel",
    "via",
    "P2P/IPC",
    "Connected",
    "rings",
    "the",
    "of",
    "and",
    "to",
    "in",
]
KINDS = ("plain", "unlike", "prefixed", "noisy", "json", "bars", "nccl", "tracebacks")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
INCIDENT = (
    "[rank{r}]:[E709 17:05:38.162555850 ProcessGroupNCCL.cpp:632] [PG ID 0 PG GUID 0(default_pg) Rank {r}] "
    "[Rank {r}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=56731, OpType=ALLREDUCE, NumelIn=467019003, NumelOut=467019003, Timeout(ms)=600000) ran "
    "for 600029 milliseconds before timing out.\n"
)
WARNING = (
    "node1:4000:4100 [0] transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4791> "
    "with status=12 opcode=1 len=0 vendor err 129\n"
)


def ordinary(number: int) -> str:
    """Return the words of one line of training output."""
    return " ".join(
        random.choice(WORDS) + (f"={random.random():.4f}" if random.random() < 0.3 else "") for _ in range(14)
    )


def bar(number: int) -> str:
    """Return 50 states of a progress bar, as a terminal is sent them."""
    states = range(number * 50, number * 50 + 50)
    return "\r".join(
        f"Epoch 3: {n % 20000 // 200:3d}%|{'█' * (n % 20000 // 2000):10s}| {n % 20000}/20000 "
        f"[{n // 600 % 60:02d}:{n // 10 % 60:02d}<{n % 60:02d}:07, {random.uniform(8, 12):5.2f}it/s]"
        for n in states
    )


def nccl(number: int) -> str:
    """Return one line of NCCL."""
    rank = random.randrange(64)
    head = f"gpu{rank // 8:02d}:{5000 + rank}:{6000 + rank} [{rank % 8}] NCCL INFO"
    if random.random() < 0.3:
        return f"{head} Channel {number % 32:02d}/0 : {rank}[{rank % 8}] -> {(rank + 1) % 64}[{(rank + 1) % 8}] via P2P/CUMEM"
    places = " ".join(f"{name} 0x{random.getrandbits(48):x}" for name in ("sendbuff", "recvbuff", "comm", "stream"))
    return f"{head} AllReduce: opCount {number:x} {places} count {random.getrandbits(28)} datatype 9 op 0 root 0"


def traceback_line(number: int) -> str:
    """Return a line of one of the tracebacks that eight ranks print at once, 20 frames each."""
    place, rank = divmod(number, 8)
    place %= 42
    if place == 0:
        return f"[rank{rank}]: Traceback (most recent call last):"
    if place == 41:
        return f"[rank{rank}]: ValueError: sample {number} cannot be read"
    if place % 2:
        return f'[rank{rank}]:   File "/workspace/train/loop{place}.py", line {number % 900}, in step_{place}'
    return f"[rank{rank}]:     loss = self.layers[{place}](hidden, mask)"


def line(kind: str, number: int) -> str:
    """Return one line of a log of that kind."""
    if kind == "noisy" and number % 50 == 0:
        return WARNING.rstrip()
    if kind == "prefixed":
        return f"[rank{number % 8}]: {ordinary(number)}"
    other = {"bars": bar, "nccl": nccl, "tracebacks": traceback_line}.get(kind)
    if other is not None:
        return other(number)
    text = f"2026-05-01 10:{number % 60:02d}:00,000 [INFO] {ordinary(number)}"
    return (
        json.dumps({"log": f"{text}\n", "stream": "stderr", "time": "2026-05-01T10:00:00Z"}) if kind == "json" else text
    )


def write_log(path: Path, kind: str, megabytes: int) -> None:
    """Write a log of about that size; the same seed gives the same text."""
    random.seed(7)
    page = [f"{line(kind, number)}\n" for number in range(2000 if kind == "bars" else 20_000)]
    block = "".join(page)
    with path.open("w", encoding="utf-8") as out:
        for _ in range(max(1, (megabytes << 20) // len(block.encode()))):
            letters = random.sample(LETTERS, len(LETTERS)) if kind == "unlike" else LETTERS
            out.write(
                block.translate(dict(zip(map(ord, LETTERS), letters, strict=True))) if kind == "unlike" else block
            )
        out.writelines(INCIDENT.format(r=rank) for rank in range(8) if rank != 3)


def measure(path: Path) -> None:
    """Explain one file in this process and print the figures."""
    from ncclguard_explain import explain

    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, busy = time.perf_counter(), time.process_time()
    report = explain([str(path)])
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = path.stat().st_size / 1e6
    print(
        f"{path.stem:10s} {size:7.0f} MB {seconds:6.2f} s {size / seconds:7.1f} MB/s ({size / busy:.1f} per CPU "
        f"second), peak {peak / 1024:6.0f} "
        f"MiB ({(peak - base) / 1024:+.0f}), culprits {list(report.culprits)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this log")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measure(arguments.measure)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.kind or KINDS:
            path = Path(folder) / f"{kind}.log"
            write_log(path, kind, arguments.mb)
            subprocess.run([sys.executable, __file__, "--measure", str(path)], check=True)
            path.unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
