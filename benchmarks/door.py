"""What the guarded process group costs beside gloo, in turn in one run: single
calls, and steps of DistributedDataParallel.

    python benchmarks/door.py [--ranks 2] [--cycles 40] [--parameters 4e6] [--json FILE]

One element blocking, one element with `async_op=True` and a wait, and a whole step of DDP (forward, backward with its
all-reduces issued from C++, optimizer). Each on groups of their own, order alternating; the sum of the parameters must
be the same in the end. Ratios are medians over cycles with quartiles, by the same code as `ncclguard bench`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from peers import HEADS, columns, figures, write

import ncclguard  # noqa: F401 - registers the backend
from ncclguard import faults
from ncclguard.bench.machine import describe
from ncclguard.bench.sizes import parse_size
from ncclguard.bench.world import World

BACKENDS = ("gloo", "ncclguard")
WIDTH, BATCH = 1024, 64
CALLS = {"one element": 50, "one element, async": 50, "DDP step": 3}  # in a cycle
WARMUP = 3  # cycles


def step_of(backend: str, parameters: int) -> tuple[Callable[[], None], torch.nn.Module]:
    """One step of training, with a model of its own on a group of its own."""
    torch.manual_seed(3)
    depth = max(1, parameters // WIDTH**2)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
    wrapped = DistributedDataParallel(model, process_group=dist.new_group(backend=backend))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        wrapped(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def run_rank(cycles: int, parameters: int) -> None:
    """One rank: each kind of call on each backend in turn; reports the seconds of every call."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.zeros(1)
    calls: dict[str, dict[str, Callable[[], object]]] = {kind: {} for kind in CALLS}
    models = []
    for backend in BACKENDS:
        group = dist.new_group(backend=backend)
        step, model = step_of(backend, parameters)
        models.append(model)
        calls["one element"][backend] = lambda group=group: dist.all_reduce(tensor, group=group)
        calls["one element, async"][backend] = lambda group=group: dist.all_reduce(
            tensor, group=group, async_op=True
        ).wait()
        calls["DDP step"][backend] = step
    seconds: dict[str, dict[str, list[list[float]]]] = {kind: {name: [] for name in BACKENDS} for kind in CALLS}
    for cycle in range(-WARMUP, cycles):
        for kind, count in CALLS.items():
            order = list(calls[kind].items())
            for backend, call in order if cycle % 2 == 0 else reversed(order):
                dist.barrier()
                durations = []
                for _ in range(count):
                    started = time.perf_counter()
                    call()
                    durations.append(time.perf_counter() - started)
                if cycle >= 0:
                    seconds[kind][backend].append(durations)
    sums = [float(sum(parameter.double().sum() for parameter in model.parameters())) for model in models]
    environment = describe(World(rank, size, rank, size, "ncclguard.faults"), "gloo", torch.device("cpu"), [])
    faults.report(seconds=seconds, equal=sums[0] == sums[1], environment=environment.model_dump())
    dist.destroy_process_group()


def table(result: faults.JobResult) -> list[dict[str, Any]]:
    """A row per kind of call and backend."""
    everybody = result.values("seconds")
    return [
        {"call": kind, "backend": name, **row}
        for kind in CALLS
        for name, row in figures({rank: said[kind] for rank, said in everybody.items()}, BACKENDS[0]).items()
    ]


def main() -> int:
    """Run the ranks, print the table, and return 0 if both backends trained the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=40, help=f"timed cycles of {CALLS} calls")
    parser.add_argument("--parameters", type=parse_size, default=parse_size("4e6"), help="of the model, float32")
    parser.add_argument("--json", type=Path, help="write the figures here; never overwrites a file")
    options = parser.parse_args()
    if options.json is not None and options.json.exists():
        parser.error(f"{options.json} exists and is never overwritten; choose another name")
    parameters = options.parameters.numel(element_size=4)
    result = faults.run_ranks(run_rank, options.ranks, args=[options.cycles, parameters], timeout=600).check()
    environment = result[0].reports["environment"]
    rows = table(result)
    print(
        f"# {options.ranks} ranks on one host, {parameters} parameters in float32; torch {environment['torch']}, "
        f"Python {environment['python']}, {environment['cores']} cores ({environment['cpu']})"
    )
    print(f"# {'call':<20} {'backend':<10} {HEADS}  time / gloo (quartiles)")
    for row in rows:
        print(f"  {row['call']:<20} {row['backend']:<10} {columns(row)}")
    equal = all(result.values("equal").values())
    print(f"# the same parameters in the end: {'yes' if equal else 'no'}")
    if options.json is not None:
        write(options.json, {"schema_version": 1, "environment": environment, "rows": rows, "equal": equal})
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
