"""How long `ncclguard hang` takes on the ranks of one host, and what its looks cost the steps of a job beside it.

    python -m benchmarks.hang_cost [--ranks 16] [--rounds 5]

First the whole command on a job of which rank 2 sleeps. Then steps of an all-reduce of four ranks and of some work
between: rounds with looks at them by turns with rounds without, with the median and the longest step of each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ncclguard.hang.looks import Lines, find_spy, look

JOBS = Path(__file__).parent.parent / "tests" / "distributed" / "hang_jobs.py"
SECONDS = 4.0


@contextmanager
def job(ranks: int, case: str, stderr: int = subprocess.DEVNULL) -> Iterator[list[int]]:
    environment = {**os.environ, "HANG_JOB_ROOM": " " * 400}
    with subprocess.Popen(
        [sys.executable, str(JOBS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
        env=environment,
    ) as server:  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        server.stdout.readline()
        server.stdin.write(f"{ranks} {case}\n")
        server.stdin.flush()
        yield list(map(int, server.stdout.readline().split()))
        server.stdin.close()


def command_seconds(ranks: int, rounds: int) -> list[float]:
    times = []
    with job(ranks, "raw:sleep") as pids:
        time.sleep(2)
        for _ in range(rounds):
            start = time.monotonic()
            command = [sys.executable, "-m", "ncclguard", "hang", "--pid", str(pids[0])]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            times.append(time.monotonic() - start)
            assert "Rank 2 held up the job: late." in said, said
    return times


def step_times(rounds: int, file: Path) -> dict[str, list[float]]:
    """Seconds of each step of rank 0, by whether the ranks were looked at once a second meanwhile."""
    spy, lines = find_spy(), Lines()
    os.environ["HANG_JOB_STEPS"] = str(file)
    with job(4, "timed") as pids:
        time.sleep(2)
        spans = []
        for number in range(2 * rounds):
            begin, looks = time.monotonic(), number % 2 == 1
            while (left := begin + SECONDS - time.monotonic()) > 0:
                if looks:
                    look({pid: () for pid in pids}, spy, lines)
                time.sleep(min(left, 1.0))
            spans.append((begin, time.monotonic(), "looks" if looks else "none"))
    found: dict[str, list[float]] = {"none": [], "looks": []}
    for row in file.read_text().splitlines():
        at, took = map(float, row.split())
        for begin, end, kind in spans:
            if begin <= at < end:
                found[kind].append(took)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    times = command_seconds(arguments.ranks, arguments.rounds)
    print(
        f"ncclguard hang, {arguments.ranks} ranks: median {statistics.median(times):.1f} s, longest {max(times):.1f} s"
    )
    file = Path(f"/tmp/hang-steps-{os.getpid()}")
    try:
        for kind, steps in step_times(arguments.rounds, file).items():
            ordered = sorted(steps)
            print(
                f"steps, {kind:5}: {len(ordered)}, median {1e3 * statistics.median(ordered):.2f} ms, "
                f"99 % {1e3 * ordered[int(len(ordered) * 0.99)]:.1f} ms, longest {1e3 * ordered[-1]:.1f} ms"
            )
    finally:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
