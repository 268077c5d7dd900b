"""The part of one rank in a bench, from init_process_group to the verdict line."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard.bench.arguments import Settings
from ncclguard.bench.machine import (
    describe,
    free_device_bytes,
    free_host_bytes,
    hostname,
    need,
    peak_resident_bytes,
    shortage,
)
from ncclguard.bench.measure import (
    WORKLOADS,
    Control,
    GuardedCallFailed,
    choose_pattern,
    measure,
    plan_for,
    shape_for,
    variants_for,
)
from ncclguard.bench.ranks import World, choose_backend, device_of, ranks_sharing, rendezvous_variables
from ncclguard.bench.results import (
    BenchResult,
    Screen,
    SizeResult,
    check_outputs,
    header,
    judge,
    summarize,
    write_json,
    write_plot,
)

#: Seconds at least for joining and for the bench's own group, where ranks start at
#: different times: --timeout is about the calls.
JOIN_LIMIT = 60.0


def run_rank(settings: Settings, world: World, argv: Sequence[str]) -> int:
    """Run this rank's part and return its exit code.

    Raises:
        BenchError: some rank objects to the start; nothing was allocated.
    """
    # First: rounds are a property of a group, compared when it is built. A lost rank ends
    # the bench, whatever is set outside.
    ng.configure(rounds=settings.rounds, on_lost="fail")
    device, backend = join(settings, world)
    control = Control(max(settings.timeout, JOIN_LIMIT))
    control.agree_to_start(objection(settings, world, device))
    environment = describe(world, backend, device, control.gather(hostname()))
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    control.catch_signals()

    sizes: list[SizeResult] = []
    with Screen(len(settings.numels), enabled=world.rank == 0) as screen:
        for line in header(settings, environment):
            screen.line(line)
        interrupted, failure = _sweep(settings, world, device, control, screen, sizes)
        ok, verdict = judge(sizes, interrupted, failure)
        peaks = (None,) if failure else tuple(control.gather(peak_resident_bytes()))
        result = BenchResult(
            started_at=started_at,
            command=("python", "-m", "ncclguard.bench", *argv),
            environment=environment,
            op=settings.op,
            dtype=settings.dtype,
            rounds=settings.rounds,
            timeout=settings.timeout,
            sizes=tuple(sizes),
            peak_resident_bytes=peaks,
            interrupted=interrupted,
            failure=failure,
            ok=ok,
            verdict=verdict,
        )
        screen.line(f"# {verdict}")
        if world.rank == 0:
            ok = _write_files(settings, result) and ok
    if failure is None:
        dist.destroy_process_group()
    return 130 if interrupted else 0 if ok else 1


def join(settings: Settings, world: World) -> tuple[torch.device, str]:
    """Join the world and return this rank's device and the backend's name."""
    backend = choose_backend(settings.backend)
    device = device_of(world, backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.update(rendezvous_variables(world, os.environ))
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=max(settings.timeout, JOIN_LIMIT)))
    return device, backend


def objection(settings: Settings, world: World, device: torch.device | None) -> str | None:
    """Return the reason against starting that this process sees, or None; allocates nothing.

    `device` is None in the process that starts the ranks, which looks at host memory only.
    """
    on_cuda = device is not None and device.type == "cuda"
    sharing = world.local_size if device is None else ranks_sharing(world, device)
    try:
        if world.rank == 0:
            check_outputs(settings)
        if settings.op in ("all_reduce", "reduce_scatter"):
            choose_pattern(settings.torch_dtype, world.size)
    except ValueError as error:
        return str(error)
    largest = shape_for(settings.op, max(settings.numels), settings.torch_dtype, world.size)
    required = need(largest, largest.slots, guarded=True, on_cuda=on_cuda)
    if device is not None and on_cuda:
        return shortage(required, sharing, free_device_bytes(device), f"GPU {device.index} of {hostname()}")
    return shortage(required, sharing, free_host_bytes(), hostname())


def _sweep(
    settings: Settings, world: World, device: torch.device, control: Control, screen: Screen, sizes: list[SizeResult]
) -> tuple[bool, str | None]:
    """Fill `sizes` row by row; return whether Ctrl-C ended that, and the failure, if there was one."""
    variants = variants_for(settings.op, settings.atomics)
    for number, numel in enumerate(settings.numels):
        shape = shape_for(settings.op, numel, settings.torch_dtype, world.size)
        plan = plan_for(shape.nbytes, shape.slots, settings.iters, settings.warmup, settings.seconds)
        what = f"{shape.numel:,} x {settings.dtype}"
        screen.begin(what, number)
        try:
            workload = WORKLOADS[settings.op](shape, plan.slots, world.rank, device, settings.timeout)
            mine, interrupted = measure(workload, variants, plan, control, advance=screen.advance)
            everybody = control.gather(mine)
        except GuardedCallFailed as failed:
            return False, f"a guarded {settings.op} of {shape.numel:,} elements failed: {failed}"
        except RuntimeError as error:
            sentence = f"rank {world.rank} at {shape.numel:,} elements: {type(error).__name__}: {error}"
            if world.rank != 0:  # rank 0 has it in its verdict line
                print(f"[rank {world.rank}] {sentence}", file=sys.stderr, flush=True)
            return False, sentence
        del workload  # its buffers go before those of the next size come
        result = summarize(shape, variants, everybody, complete=not interrupted)
        if result is not None:
            sizes.append(result)
            screen.size(result)
        if interrupted:
            return True, None
    return False, None


def _write_files(settings: Settings, result: BenchResult) -> bool:
    """Write the requested files and return whether that succeeded; the printed results are not lost if it fails."""
    try:
        if settings.json_path is not None:
            write_json(result, settings.json_path)
        if settings.plot_path is not None and result.sizes:
            write_plot(result, settings.plot_path)
    except OSError as error:
        print(f"ncclguard bench: a file could not be written: {error}", file=sys.stderr, flush=True)
        return False
    return True
