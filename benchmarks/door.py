"""What the guarded process group costs beside gloo, in turn in one run: single
calls, and steps of DistributedDataParallel, FSDP2 and DeepSpeed ZeRO-2.

    python benchmarks/door.py [--ranks 2] [--cycles 40] [--parameters 4e6] [--json FILE]

One element blocking, one element with `async_op=True` and a wait, and whole steps (forward, backward, optimizer): of
DDP, whose all-reduces are issued from C++, of FSDP2, and of ZeRO-2 where DeepSpeed is installed. Each on groups of
their own, order alternating; the parameters must be the same in the end. Ratios are medians over cycles with
quartiles, by the same code as `ncclguard bench`.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
import ncclguard  # noqa: F401 - registers the backend
from benchmarks.peers.cost import HEADS, columns, figures, write
from ncclguard import faults
from ncclguard.bench.arguments import parse_size
from ncclguard.bench.machine import describe
from ncclguard.bench.ranks import World

BACKENDS = ("gloo", "ncclguard")
WIDTH, BATCH = 1024, 64
CALLS = {"one element": 50, "one element, async": 50, "DDP step": 3, "FSDP2 step": 3, "ZeRO-2 step": 3}  # in a cycle
WARMUP = 3  # cycles


Step = tuple[Callable[[], None], torch.nn.Module]


def model_of(parameters: int) -> torch.nn.Sequential:
    """The same on all ranks and backends."""
    torch.manual_seed(3)
    depth = max(1, parameters // WIDTH**2)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def inputs_of_rank() -> torch.Tensor:
    """Others on each rank."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def ddp_step(backend: str, parameters: int) -> Step:
    """One step of DistributedDataParallel, with a model of its own on a group of its own."""
    model, inputs = model_of(parameters), inputs_of_rank()
    wrapped = DistributedDataParallel(model, process_group=dist.new_group(backend=backend))
    return _plain_step(wrapped, torch.optim.SGD(model.parameters(), lr=1e-4), inputs), model


def fsdp2_step(backend: str, parameters: int) -> Step:
    """The same of FSDP2, each layer a unit of its own."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model, inputs = model_of(parameters), inputs_of_rank()
    mesh = DeviceMesh.from_group(dist.new_group(backend=backend), "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_step(model, torch.optim.SGD(model.parameters(), lr=1e-4), inputs), model


def _plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class OneGroup:
    """What DeepSpeed asks of a model-parallel library, where all ranks are data-parallel in one group."""

    def __init__(self, group: Any) -> None:
        self._group, self._alone = group, [dist.new_group([rank]) for rank in range(dist.get_world_size())]

    def get_data_parallel_group(self) -> Any:
        return self._group

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_group(self) -> Any:
        return self._alone[dist.get_rank()]

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1


def zero2_step(backend: str, parameters: int) -> Step:
    """The same of DeepSpeed ZeRO-2."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    model, inputs = model_of(parameters), inputs_of_rank()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        mpu=OneGroup(dist.new_group(backend=backend)),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 2_000_000, "allgather_bucket_size": 2_000_000},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step() -> None:
        engine.backward(engine(inputs).square().mean())
        engine.step()

    return step, model


STEPS = {"DDP step": ddp_step, "FSDP2 step": fsdp2_step, "ZeRO-2 step": zero2_step}


def run_rank(cycles: int, parameters: int) -> None:
    """One rank: each kind of call on each backend in turn; reports the seconds of every call."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.zeros(1)
    calls: dict[str, dict[str, Callable[[], object]]] = {kind: {} for kind in CALLS}
    kinds = [kind for kind in CALLS if kind != "ZeRO-2 step" or importlib.util.find_spec("deepspeed") is not None]
    models: dict[str, list[torch.nn.Module]] = {}
    for backend in BACKENDS:
        group = dist.new_group(backend=backend)
        calls["one element"][backend] = lambda group=group: dist.all_reduce(tensor, group=group)
        calls["one element, async"][backend] = lambda group=group: dist.all_reduce(
            tensor, group=group, async_op=True
        ).wait()
        for kind in kinds:
            if kind in STEPS:
                calls[kind][backend], model = STEPS[kind](backend, parameters)
                models.setdefault(kind, []).append(model)
    seconds: dict[str, dict[str, list[list[float]]]] = {kind: {name: [] for name in BACKENDS} for kind in kinds}
    for cycle in range(-WARMUP, cycles):
        for kind in kinds:
            count = CALLS[kind]
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
    equal = all(_parameters(plain).equal(_parameters(guarded)) for plain, guarded in models.values())
    environment = describe(World(rank, size, rank, size, "ncclguard.faults"), "gloo", torch.device("cpu"), [])
    faults.report(seconds=seconds, equal=equal, environment=environment.model_dump())
    dist.destroy_process_group()


def _parameters(model: torch.nn.Module) -> torch.Tensor:
    """All of this rank's, bit for bit, of sharded ones its own part."""
    own = [getattr(parameter, "_local_tensor", parameter).detach().reshape(-1) for parameter in model.parameters()]
    return torch.cat(own).view(torch.int32)


def table(result: faults.JobResult) -> list[dict[str, Any]]:
    """A row per kind of call and backend."""
    everybody = result.values("seconds")
    return [
        {"call": kind, "backend": name, **row}
        for kind in everybody[0]
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
