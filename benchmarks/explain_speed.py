"""Measure how fast `ncclguard explain` reads: MB/s of log text and peak memory, on synthetic logs.

    python benchmarks/explain_speed.py [--mb 1024]

Four logs: "plain", ordinary training output with a timeout at its end, 20,000 lines again and again; "unlike", such
lines in letters that are others in each page, so that no two lines of the log are alike; "prefixed", every line with
[rankN]; "noisy", a warning that matters on every 50th line. Each is read in a process of its own, so that its peak
memory is its own. With `--without-numpy` as where only ncclguard-explain is installed. The figures to reach: 1 GB in at
most 30 s and 100 MB.
"""

from __future__ import annotations

import argparse
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
KINDS = ("plain", "unlike", "prefixed", "noisy")
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


def write_log(path: Path, kind: str, megabytes: int) -> None:
    """Write a log of about that size; the same seed gives the same text."""
    random.seed(7)
    page: list[str] = []
    for number in range(20_000):
        text = " ".join(
            random.choice(WORDS) + (f"={random.random():.4f}" if random.random() < 0.3 else "") for _ in range(14)
        )
        head = f"[rank{number % 8}]: " if kind == "prefixed" else f"2026-05-01 10:{number % 60:02d}:00,000 [INFO] "
        page.append(WARNING if kind == "noisy" and number % 50 == 0 else f"{head}{text}\n")
    block = "".join(page)
    with path.open("w", encoding="utf-8") as out:
        for _ in range(max(1, (megabytes << 20) // len(block))):
            letters = random.sample(LETTERS, len(LETTERS)) if kind == "unlike" else LETTERS
            out.write(
                block.translate(dict(zip(map(ord, LETTERS), letters, strict=True))) if kind == "unlike" else block
            )
        out.writelines(INCIDENT.format(r=rank) for rank in range(8) if rank != 3)


def measure(path: Path, without_numpy: bool) -> None:
    """Explain one file in this process and print the figures."""
    from ncclguard_explain import explain, records

    if without_numpy:
        records._numpy = lambda: None
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
    parser.add_argument("--without-numpy", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measure(arguments.measure, arguments.without_numpy)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.kind or KINDS:
            path = Path(folder) / f"{kind}.log"
            write_log(path, kind, arguments.mb)
            command = [sys.executable, __file__, "--measure", str(path)]
            subprocess.run([*command, *(["--without-numpy"] if arguments.without_numpy else [])], check=True)
            path.unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
