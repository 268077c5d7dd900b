"""Which device times of NCCL collectives tell who is slow: two measures beside the truth, on an emulated GPU.

    ./scripts/emulated-gpu python -m benchmarks.device_waits [--kinds ddp,fsdp2] [--factors 1,1.02,1.2] [--runs 3]
    ./scripts/emulated-gpu python -m benchmarks.device_waits --cost

Four ranks with 12 layers that take 6 ms forward and 12 ms backward each, with 3 % of noise; rank 1 takes `factor` times
as long. CUDA events with timing are recorded at all calls of 24 windows of two steps (`--window`), and give two shares
of each rank's time:

- `outstanding`: what enqueueing a collective can tell: from when the caller's stream came to it, or the one before it
  had ended, until it ended. DDP and FSDP2 compute meanwhile.
- `exposed`: how long the computing stream waited: between an event before and one behind each wait of that stream
  (`Stream.wait_event`, `Work.wait`), in a call that was put on that stream, and, as DDP waits in C++ for what it issued
  there, from its last call until the optimizer's step or until that call has ended.

Each is given to the judgement of `ncclguard.watch.slow`. What is printed: whom that names over all windows, whom it
would have told of as they came, the share of the time that it says is lost, and the medians of the shares by rank.
`truth` is the share that is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ncclguard import faults
from ncclguard.metrics.records import SlowRanks
from ncclguard.process_group.operators import Kernels, Operator, _asked
from ncclguard.torch_compat.groups import boxed_work
from ncclguard.watch.slow import Pace, Told, judge
from tests.gpu.parts import SHARED_GPU, join, leave, run_together

RANKS, SLOW = 4, 1
LAYERS = 12
MS = int(1.98e6)  # cycles of a millisecond
WINDOWS = 24
KINDS = ("ddp", "fsdp2", "blocking")
MEASURES = ("outstanding", "exposed")
OPERATORS = ("allreduce_", "_allgather_base_", "_reduce_scatter_base_")

Event = torch.cuda.Event
Span = tuple[float, float]


class Busy(torch.autograd.Function):
    """Takes as many milliseconds as `milliseconds` says, and twice as many backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, milliseconds: Callable[[], float]) -> torch.Tensor:
        ctx.milliseconds = milliseconds
        torch.cuda._sleep(int(milliseconds() * MS))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.cuda._sleep(int(2 * ctx.milliseconds() * MS))
        return gradient.clone(), None


class Layer(nn.Module):
    def __init__(self, milliseconds: Callable[[], float], blocking: bool) -> None:
        super().__init__()
        self.linear, self.milliseconds, self.blocking = nn.Linear(64, 64), milliseconds, blocking

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Busy.apply(self.linear(x), self.milliseconds)
        if self.blocking:
            dist.all_reduce(x.detach().clone())
        return x


class Events(Kernels):
    """Records events at the collectives and waits of this process, while it is `on`."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self.on = False
        self.calls: list[tuple[Event, Event, bool, bool]] = []  # ready, end, on the computing stream, issued by C++
        self.waits: list[tuple[Event, Event]] = []
        self.steps: list[Event] = []
        self._computing = torch.cuda.current_stream()
        self._aside = torch.cuda.Stream()
        self._wrap(torch.cuda.Stream, "wait_event", lambda stream: stream)
        self._wrap(dist.Work, "wait", lambda _: torch.cuda.current_stream())

    def _collective(self, operator: Operator, *given: Any) -> Any:
        if not self.on:
            return super()._collective(operator, *given)
        tensors, group, rest = given[: operator.tensors], given[operator.tensors], given[operator.tensors + 1 :]
        asked = _asked(operator.options, **dict(zip((*operator.fields, "asyncOp", "timeout"), rest)))
        ready, stream = recorded(torch.cuda.current_stream()), torch.cuda.current_stream()
        work = getattr(self._target(group, tensors), operator.method)(*tensors, asked)
        if work is None:  # it was put on the caller's stream
            end = recorded(stream)
        else:
            with torch.cuda.stream(self._aside):
                work.get_future().wait()  # of the stream; Work.wait would let go of the tensors
                end = recorded(self._aside)
        self.calls.append((ready, end, work is None and stream == self._computing, not _called_by_python()))
        boxed = boxed_work(work)
        return (tensors[0], boxed) if operator.returns_tensors else boxed

    def _wrap(self, owner: Any, name: str, stream_of: Callable[[Any], torch.cuda.Stream]) -> None:
        waits = getattr(owner, name)

        def recorded_wait(this: Any, *given: Any) -> Any:
            stream = stream_of(this)
            if not self.on or stream != self._computing:
                return waits(this, *given)
            before = recorded(stream)
            result = waits(this, *given)
            self.waits.append((before, recorded(stream)))
            return result

        setattr(owner, name, recorded_wait)

    def shares(self, base: Event, window: int) -> dict[str, list[float]]:
        """Return each measure's share of every window."""
        at = base.elapsed_time
        steps = [at(step) for step in self.steps]
        calls = [(at(ready), at(end)) for ready, end, *_ in self.calls]
        exposed = [(at(before), at(behind)) for before, behind in self.waits]
        exposed += [call for call, (_, _, computing, _) in zip(calls, self.calls) if computing]
        of_cpp = [call for call, (*_, cpp) in zip(calls, self.calls) if cpp]
        for before, step in pairwise(steps):
            issued = [call for call in of_cpp if before <= call[0] < step]
            if issued:
                exposed.append((max(issued)[0], min(step, max(end for _, end in issued))))
        windows = list(zip(steps[::window], steps[window::window]))
        return {
            name: [covered(spans, span) / (span[1] - span[0]) for span in windows]
            for name, spans in zip(MEASURES, (calls, exposed))
        }


def recorded(stream: torch.cuda.Stream) -> Event:
    event = Event(enable_timing=True)
    event.record(stream)
    return event


def _called_by_python() -> bool:
    """Return whether there is a frame above the kernel: where DDP issues, in a thread of autograd's, there is none."""
    return sys._getframe(1).f_back is not None


def covered(spans: Iterable[Span], window: Span) -> float:
    """Return how much of the window some span covers."""
    total, until = 0.0, window[0]
    for begin, end in sorted(spans):
        begin, end = max(begin, until), min(end, window[1])
        if end > begin:
            total, until = total + end - begin, end
    return total


def train(kind: str, factor: float, seed: int, window: int) -> None:
    """Report the shares of this rank."""
    rank = join("nccl")
    drawn = random.Random(f"{seed} {rank}")
    mine = factor if rank == SLOW else 1.0
    torch.manual_seed(0)
    layers = [Layer(lambda: 6.0 * mine * max(0.1, drawn.gauss(1.0, 0.03)), kind == "blocking") for _ in range(LAYERS)]
    model: nn.Module = nn.Sequential(*layers).cuda()
    if kind == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.016)
    elif kind == "fsdp2":
        mesh = dist.init_device_mesh("cuda", (RANKS,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    events, batch = Events(), torch.ones(4, 64, device="cuda")
    events.install(*OPERATORS)
    optimizer.register_step_pre_hook(
        lambda *_: events.steps.append(recorded(torch.cuda.current_stream())) if events.on else None
    )

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    base, events.on = recorded(torch.cuda.current_stream()), True
    for _ in range(WINDOWS * window + 1):
        step()
    events.on = False
    torch.cuda.synchronize()
    faults.report(shares=events.shares(base, window))
    leave()


def cost() -> None:
    """Report microseconds of the host for an asynchronous all-reduce, in turns: as it is, not sampled, sampled."""
    join("nccl")
    tensor, events = torch.ones(10, device="cuda"), Events()
    took: dict[str, list[float]] = {"plain": [], "not sampled": [], "sampled": []}
    switched = []
    for _ in range(40):
        for name, times in took.items():
            began = time.perf_counter()
            if name != "plain":
                events.install(*OPERATORS)
                switched.append(time.perf_counter() - began)
            events.on = name == "sampled"
            for _ in range(20):
                began = time.perf_counter()
                dist.all_reduce(tensor, async_op=True)
                times.append(time.perf_counter() - began)
            events.on = False
            events.remove()
            torch.cuda.synchronize()
            events.calls.clear()
    faults.report(cost={name: round(median(times) * 1e6, 1) for name, times in took.items()} | {
        "hooks in": round(median(switched) * 1e6, 1)
    })  # fmt: skip
    leave()


def judged(shares: dict[int, list[float]], windows: int = WINDOWS) -> SlowRanks | None:
    """Return whom the judgement names by the first windows."""
    return judge(Pace(rank, "node", tuple(of[:windows]), 1.0, {}) for rank, of in shares.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--factors", default="1,1.02,1.2,1.5")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--window", type=int, default=2, help="steps of a window")
    parser.add_argument("--cost", action="store_true")
    given = parser.parse_args()
    env = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none"}
    if given.cost:
        print(json.dumps(run_together(cost, 2, env=env).check()[0].reports["cost"]))
        return
    for kind in given.kinds.split(","):
        for factor in map(float, given.factors.split(",")):
            for seed in range(given.runs):
                result = run_together(
                    train, RANKS, args=[kind, factor, seed, given.window], env=env, timeout=600
                ).check()
                shares = {rank: result[rank].reports["shares"] for rank in range(RANKS)}
                line: dict[str, Any] = {"kind": kind, "factor": factor, "load": round(os.getloadavg()[0], 1)}
                line["truth"] = round(1 - 1 / factor, 3)
                for name in MEASURES:
                    paces = {rank: of[name] for rank, of in shares.items()}
                    slow, told = judged(paces), Told()
                    heard = [told.now for n in range(WINDOWS) if told.add(judged(paces, n + 1)) and told.now]
                    line[name] = {
                        "named": [] if slow is None else list(slow.ranks),
                        "told": [list(one.ranks) for one in heard],
                        "lost": 0.0 if slow is None else round(slow.lost, 3),
                        "medians": [round(median(of), 3) for of in paces.values()],
                    }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
