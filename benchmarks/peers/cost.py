"""What a small all-reduce costs beside the alternatives, in turn in one run on gloo, as ratios to plain torch.

    python -m benchmarks.peers.cost [--ranks 2] [--numel 1] [--cycles 60] [--json FILE]

Beside each other: plain torch, TORCH_DISTRIBUTED_DEBUG=DETAIL, monitored_barrier before the call, the guarded call
with and without its opening round, and torchft's process groups where torchft is installed. nvidia-resiliency-ext has
no row: it restarts the process or the function around the training loop and touches no collective, so a call costs
what plain costs. Every result is checked. Ratios are medians over cycles with quartiles, by the same code as
`ncclguard bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.bench.arguments import parse_size
from ncclguard.bench.machine import describe
from ncclguard.bench.measure import Blocks, choose_pattern, count_wrong, fill
from ncclguard.bench.ranks import World
from ncclguard.bench.results import percentile, ratio, slowest_rank_times
from ncclguard.faults.launcher import reserve_port

Call = Callable[[torch.Tensor], object]
PLAIN = "plain torch"
MANAGED = "torchft step"
SLOTS = 32  # calls back to back in a cycle, each on a tensor of its own
WARMUP = 5  # cycles
FEW = {MANAGED: 2}  # calls in a cycle of what takes milliseconds
LIMIT = timedelta(seconds=60)
HEADS = f"{'calls':>6} {'p50 (us)':>10} {'p99 (us)':>10}"


def guarded(rounds: bool) -> Call:
    """A guarded call on a group of its own: rounds are a property of the group, fixed with its first guarded call."""
    ng.configure(rounds=rounds)
    group = dist.new_group(backend="gloo", timeout=LIMIT)
    ng.safe_barrier(group).raise_if_failed()
    return lambda tensor: ng.safe_all_reduce(tensor, group=group, timeout=60).raise_if_failed()


def detail() -> Call:
    """A group as TORCH_DISTRIBUTED_DEBUG=DETAIL makes it: wrapped when it is created, so the others stay plain."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(backend="gloo", timeout=LIMIT)
    dist.set_debug_level(before)
    return lambda tensor: dist.all_reduce(tensor, group=group)


def monitored() -> Call:
    """monitored_barrier and then the call, on one group."""
    group = dist.new_group(backend="gloo", timeout=LIMIT)

    def call(tensor: torch.Tensor) -> None:
        dist.monitored_barrier(group, timeout=LIMIT)
        dist.all_reduce(tensor, group=group)

    return call


def torchft(kind: str) -> Call:
    """One of torchft's reconfigurable process groups, called as its users do."""
    from torch.distributed import AllreduceOptions
    from torchft import process_group

    group = getattr(process_group, kind)(timeout=LIMIT)
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}/peers/{kind}"
    group.configure(address, f"rank_{dist.get_rank()}", dist.get_rank(), dist.get_world_size())
    return lambda tensor: group.allreduce([tensor], AllreduceOptions()).wait(LIMIT)


@contextlib.contextmanager
def lighthouse() -> Iterator[str]:
    """torchft's lighthouse, started by its command with the options of its README."""
    with contextlib.closing(reserve_port()) as reserved:
        port = reserved.getsockname()[1]
        command = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"[::]:{port}"]
        command += ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield f"http://localhost:{port}"
        finally:
            process.kill()
            process.wait()


def managed(address: str) -> Call:
    """A step of torchft's Manager with one all-reduce: the quorum, the call, and the vote whether the step counts."""
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size = dist.get_world_size()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=size,
        load_state_dict=lambda state: None,
        state_dict=dict,
        replica_id=f"rank_{dist.get_rank()}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        init_sync=False,
    )

    def call(tensor: torch.Tensor) -> None:
        manager.start_quorum()
        manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
        if not manager.should_commit():
            raise RuntimeError(f"torchft's step does not count: {manager.errored()}")

    call.keeps = (store, manager)  # type: ignore[attr-defined]
    return call


def variants(address: str) -> dict[str, Call]:
    """Everything that can be run here, by the name in the table; each on a communicator of its own."""
    group = dist.new_group(backend="gloo", timeout=LIMIT)
    found: dict[str, Call] = {
        PLAIN: lambda tensor: dist.all_reduce(tensor, group=group),
        "DETAIL": detail(),
        "monitored_barrier": monitored(),
        "guarded": guarded(rounds=True),
        "guarded, no rounds": guarded(rounds=False),
    }
    if importlib.util.find_spec("torchft") is not None:
        found["torchft gloo"] = torchft("ProcessGroupGloo")
        found["torchft baby gloo"] = torchft("ProcessGroupBabyGloo")
        found[MANAGED] = managed(address)
    return found


def run_rank(numel: int, cycles: int, address: str) -> None:
    """One rank: each variant in turn, order alternating; reports the seconds of every call and the wrong elements."""
    dist.init_process_group("gloo", timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = variants(address)
    data = torch.empty(SLOTS * numel)
    if "torchft baby gloo" in calls:
        data.share_memory_()  # else its own copy into shared memory would be timed with it
    blocks = Blocks(choose_pattern(torch.float32, size), data.numel(), torch.device("cpu"))
    tensors = data.split(numel)
    seconds: dict[str, list[list[float]]] = {name: [] for name in calls}
    wrong = dict.fromkeys(calls, 0)
    for cycle in range(-WARMUP, cycles):
        order = list(calls.items())
        for name, call in order if cycle % 2 == 0 else reversed(order):
            fill(data, blocks.contribution(rank, cycle))
            dist.barrier()
            durations = []
            slots = FEW.get(name, SLOTS)
            for tensor in tensors[:slots]:
                started = time.perf_counter()
                call(tensor)
                durations.append(time.perf_counter() - started)
            wrong[name] += count_wrong(data[: slots * numel], blocks.total(cycle)[: slots * numel])
            if cycle >= 0:
                seconds[name].append(durations)
    environment = describe(World(rank, size, rank, size, "ncclguard.faults"), "gloo", torch.device("cpu"), [])
    faults.report(seconds=seconds, wrong=wrong, environment=environment.model_dump())
    dist.destroy_process_group()


def figures(everybody: dict[int, dict[str, list[list[float]]]], plain: str) -> dict[str, dict[str, Any]]:
    """What is written down of each variant, from the seconds of all ranks; `plain` is what the ratios are to."""
    times = {
        name: slowest_rank_times(np.array([everybody[rank][name] for rank in sorted(everybody)]))
        for name in everybody[0]
    }
    cycles = {name: [percentile(cycle, 50) for cycle in found] for name, found in times.items()}
    rows = {}
    for name, found in times.items():
        share = ratio(cycles[name], cycles[plain])
        rows[name] = {
            "calls": found.size,
            "seconds_p50": percentile(found.ravel(), 50),
            "seconds_p99": percentile(found.ravel(), 99),
            "ratio": [share.low, share.median, share.high],
        }
    return rows


def columns(row: dict[str, Any]) -> str:
    """The numbers of a row as text, beneath `HEADS`."""
    low, median, high = row["ratio"]
    return (
        f"{row['calls']:>6} {row['seconds_p50'] * 1e6:>10.1f} {row['seconds_p99'] * 1e6:>10.1f}  "
        f"{median:.2f} ({low:.2f}-{high:.2f})"
    )


def measure(ranks: int, numel: int, cycles: int) -> dict[str, Any]:
    """Run the ranks; returns the environment, a row for each variant, and how many elements were wrong."""
    with lighthouse() if importlib.util.find_spec("torchft") is not None else contextlib.nullcontext("") as address:
        result = faults.run_ranks(run_rank, ranks, args=[numel, cycles, address], timeout=600).check()
    return {
        "ranks": ranks,
        "numel": numel,
        "environment": result[0].reports["environment"],
        "rows": [{"variant": name, **row} for name, row in figures(result.values("seconds"), PLAIN).items()],
        "wrong": sum(sum(counts.values()) for counts in result.values("wrong").values()),
    }


def text(found: dict[str, Any]) -> str:
    """What `measure` found, as a table."""
    environment = found["environment"]
    machine = f"Python {environment['python']}, {environment['cores']} cores ({environment['cpu']})"
    what = f"{found['ranks']} ranks on one host, gloo, all_reduce of {found['numel']} float32"
    lines = [
        f"# {what}; torch {environment['torch']}, {machine}",
        f"# {'variant':<20} {HEADS}  time / plain (quartiles)",
        *(f"  {row['variant']:<20} {columns(row)}" for row in found["rows"]),
        f"# wrong elements: {found['wrong']}",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the ranks, print the table, and return 0 if no element was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=parse_size, default=parse_size("1"), help="float32 elements of each call")
    parser.add_argument("--cycles", type=int, default=60, help=f"timed cycles of {SLOTS} calls per variant")
    parser.add_argument("--json", type=Path, help="write the figures here; never overwrites a file")
    options = parser.parse_args()
    if options.json is not None and options.json.exists():
        parser.error(f"{options.json} exists and is never overwritten; choose another name")
    found = measure(options.ranks, options.numel.numel(element_size=4), options.cycles)
    print(text(found))
    if options.json is not None:
        write(options.json, {"schema_version": 1, **found})
    return 0 if found["wrong"] == 0 else 1


def write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON into a new file."""
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
