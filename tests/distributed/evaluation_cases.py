"""A plain DDP training whose evaluations fail in all the ways that evaluations fail; run by test_evaluation.py."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from ncclguard.evaluation import NOT_EVALUATED, record_partial
from ncclguard.faults.injection import reset_own_connections
from ncclguard.torch_compat.sockets import connections

CULPRIT = 2
TIMEOUT = 3.0
BATCHES = 4
OTHER = 1  # has a fault of its own beside rank 2's in "both"
FAIL = ("metric", "end", "partial", "batches")
FAIL_ONCE = ("oom", "late", "file", "both")


class Monitor:
    """Takes metrics as trainers' monitors do."""

    def __init__(self) -> None:
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None) -> None:
        self.logged.append((step, metrics))


class Trainer:
    """Trains a model with dropout, so that random numbers matter, and batch norm, whose buffers DDP broadcasts."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1)]
        self.model = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.monitor = Monitor()
        self.eval_batch_size = 8
        self.fault = ""
        self.tried: list[int] = []
        self.older: set[int] = set()  # ports of connections that training uses: a reset must not hit those
        torch.manual_seed(100 + dist.get_rank())

    def train(self) -> float:
        """One step; the loss is the mean over all ranks."""
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 8)).square().mean()
        loss.backward()
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    def evaluate(self, step: int | None = None) -> tuple[float, float]:
        """The sum over all ranks of what they find, batch by batch; the fault strikes in the middle."""
        self.tried.append(self.eval_batch_size)
        self.model.eval()
        self.optimizer.zero_grad()  # what a careless evaluation may do, too
        mine = dist.get_rank() == CULPRIT
        batches = BATCHES - 2 if mine and self.fault == "batches" else BATCHES
        total = torch.zeros(1)
        with torch.no_grad():
            for number in range(batches):
                if mine and number == 2:
                    self.misbehave()
                if self.fault == "both" and dist.get_rank() == OTHER and number == 2 and len(self.tried) == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                if self.fault in FAIL or (self.fault in FAIL_ONCE and len(self.tried) == 1):
                    torch.rand(3)  # a try that succeeds may move the random numbers, one that fails may not
                output = self.model(torch.ones(self.eval_batch_size, 8))
                found = torch.ones(1) + 0 * output.sum()
                dist.all_reduce(found)
                total += found
                parts = [torch.empty(20_000) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, torch.full((20_000,), float(dist.get_rank())))
                if self.fault != "alone":
                    assert [float(part[-1]) for part in parts] == [0.0, 1.0, 2.0, 3.0]
                if self.fault == "partial":
                    record_partial((float(total), 0.5), done=number + 1, total=BATCHES)
        self.model.train()
        if mine and self.fault == "end":  # the collectives are over: nothing is raised on the other ranks
            raise KeyError("f1")
        return float(total), 1.0

    def misbehave(self) -> None:
        """What rank 2 does in the middle of an evaluation."""
        if self.fault == "oom" and self.eval_batch_size > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.fault == "late" and len(self.tried) == 1:
            time.sleep(2 * TIMEOUT + 1)
        elif self.fault in ("metric", "partial") or (self.fault == "both" and len(self.tried) == 1):
            raise KeyError("f1")
        elif self.fault == "file" and len(self.tried) == 1:
            raise OSError("stale file handle")
        elif self.fault == "reset":
            assert reset_own_connections(self.older) > 0
            self.fault = ""
        elif self.fault == "kill":
            os._exit(9)


def ports_in_use() -> set[int]:
    """Both ports of every connection of this process."""
    return {port for c in connections(lambda *_: True) for port in (c.local[1], c.remote[1])}


def run(trainer: Trainer, names: list[str], *, evaluate: bool) -> dict[str, Any]:
    """Two steps of training, an evaluation with a fault, and so on."""
    found: dict[str, Any] = {"losses": []}
    for number, name in enumerate(names):
        found["losses"] += [trainer.train(), trainer.train()]
        if not evaluate or (name == "skip" and dist.get_rank() == CULPRIT):
            continue
        trainer.fault, trainer.tried, logged = name, [], len(trainer.monitor.logged)
        trainer.older = trainer.older or ports_in_use()
        started = time.monotonic()
        result = trainer.evaluate(step=number)
        report = trainer.evaluate.report
        found[name] = {
            "result": "not evaluated" if result is NOT_EVALUATED else result,
            "seconds": time.monotonic() - started,
            "tried": trainer.tried,
            "logged": trainer.monitor.logged[logged:],
            "report": [report.action.value, str(report.cause), list(report.culprits), report.attempts],
            "text": str(report),
            "modes": all(module.training for module in trainer.model.modules()),
        }
    found["losses"] += [trainer.train(), trainer.train()]
    return found


def guard(trainer: Trainer, **options: Any) -> None:
    """Make its evaluation survive."""
    options = {"timeout": TIMEOUT, "barrier_timeout": TIMEOUT, "batch_size": "eval_batch_size", **options}
    trainer.evaluate = ng.resilient_evaluate(trainer.evaluate, **options)  # type: ignore[method-assign]


def guarded(names: list[str]) -> None:
    """The same training twice: without any evaluation, and with those that fail."""
    dist.init_process_group("gloo")
    control = run(Trainer(), names, evaluate=False)["losses"]
    trainer = Trainer()
    guard(trainer)
    faults.report(control=control, **run(trainer, names, evaluate=True))
    dist.barrier()
    dist.destroy_process_group()


def raises_in_each_try(kind: str) -> None:
    """Rank 1 raises the same error in each try, which for an error of memory are two, while the others wait for it."""
    dist.init_process_group("gloo")

    def score() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory") if kind == "memory" else KeyError("f1")

    @ng.resilient_evaluate(timeout=20, barrier_timeout=20, max_attempts=2)
    def evaluate(step: int | None = None) -> float:
        if dist.get_rank() == 1:
            score()
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    evaluate(step=0)
    dist.destroy_process_group()


def held_up(folder: str) -> None:
    """Rank 1 comes to its evaluation once the others have given it up; twice, and a third time all are in time."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier(timeout=60).raise_if_failed()  # on a busy machine the ranks come here seconds apart

    @ng.resilient_evaluate(timeout=4.0, barrier_timeout=4.0, max_attempts=2)
    def evaluate(step: int) -> float:
        while rank == 1 and not Path(folder, f"given up {step}").exists():
            time.sleep(0.05)
        found = torch.ones(1)
        dist.all_reduce(found)
        return float(found)

    for step in (10, 20):
        assert evaluate(step) is NOT_EVALUATED
        Path(folder, f"given up {step}").touch()
        faults.report(**{f"report{step}": str(evaluate.report)})
        ng.safe_barrier(timeout=60).raise_if_failed()
    dist.destroy_process_group()


def not_looked_at() -> None:
    """Each rank's evaluation ignores that its first all-reduce has failed, for which rank 1 came too late; so does training before."""
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=60).raise_if_failed()
    if dist.get_rank() == 1:
        time.sleep(2.0)
    ng.safe_barrier(timeout=1.0)
    tries: list[int] = []

    @ng.resilient_evaluate(timeout=20.0)
    def evaluate(step: int) -> float:
        tries.append(step)
        found = torch.ones(1)
        if dist.get_rank() == 1 and len(tries) == 1:
            time.sleep(2.0)
        ng.safe_all_reduce(found, timeout=1.0 if len(tries) == 1 else 20.0)
        return float(found)

    value = evaluate(10)
    faults.report(value=value, tries=len(tries), report=str(evaluate.report))
    dist.barrier()
    dist.destroy_process_group()


def interrupted(how: str, then: str) -> None:
    """Rank 1's evaluation of step 1 is interrupted; the program catches whatever comes and goes on, as notebooks do.

    Or it ends there, with `then` "end".
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    @ng.resilient_evaluate(timeout=20.0, barrier_timeout=20.0)
    def evaluate(step: int) -> float:
        if rank == 1 and step == 1:
            raise KeyboardInterrupt if how == "KeyboardInterrupt" else SystemExit(9)
        found = torch.ones(1)
        dist.all_reduce(found)
        return float(found)

    for step in range(3):
        began = time.monotonic()
        try:
            value: object = evaluate(step)
        except BaseException as error:
            value = f"{type(error).__name__}: {error}"
            if then == "end":
                faults.report(**{f"step {step}": value, f"seconds {step}": time.monotonic() - began})
                raise
        faults.report(**{f"step {step}": value, f"seconds {step}": time.monotonic() - began})
    dist.destroy_process_group()


def lost(saved_to: str) -> None:
    """Rank 2 ends in the middle of an evaluation: the others save what they have, then end with the report."""
    dist.init_process_group("gloo")
    trainer = Trainer()
    guard(trainer, on_lost="checkpoint", save=lambda: save(trainer, saved_to))
    trainer.train()
    trainer.fault = "kill"
    try:
        trainer.evaluate(step=1)
    except ng.GuardError as error:
        report = trainer.evaluate.report  # type: ignore[attr-defined]
        faults.report(error=type(error).__name__, text=str(error), report=str(report), culprits=list(report.culprits))
        raise


def save(trainer: Trainer, folder: str) -> None:
    """A checkpoint as people write them, with a barrier that cannot be passed any more."""
    started = time.monotonic()
    torch.save(trainer.model.module.state_dict(), f"{folder}/rank{dist.get_rank()}.pt")
    try:
        dist.barrier()
    except ng.GuardError as error:
        faults.report(barrier=type(error).__name__, barrier_seconds=time.monotonic() - started)


def switches() -> None:
    """Evaluation off, smaller, and on one rank; each said by one rank alone."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainer = Trainer()
    guard(trainer, timeout=30, barrier_timeout=30)
    evaluate: Any = trainer.evaluate
    trainer.train()
    evaluate.enabled = rank != 3
    off = evaluate(step=1) is NOT_EVALUATED
    evaluate.enabled, evaluate.divisor = True, 4 if rank == 1 else 1
    trainer.tried = []
    smaller, sizes = evaluate(step=2), trainer.tried
    evaluate.divisor, evaluate.single_rank = 1, 1 if rank == 0 else None
    trainer.tried, trainer.fault = [], "alone"
    single, alone = evaluate(step=3), trainer.tried
    faults.report(off=off, smaller=smaller, sizes=sizes, single=single, alone=alone, loss=trainer.train())
    dist.barrier()
    dist.destroy_process_group()


def unguarded(name: str) -> None:
    """The same fault without the guard, with short limits."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    trainer = Trainer()
    trainer.older = ports_in_use()
    trainer.train()
    trainer.older |= ports_in_use() if name != "reset" else set()
    trainer.fault = name
    if name != "skip" or dist.get_rank() != CULPRIT:
        with contextlib.suppress(Exception):  # as the usual advice has it
            trainer.evaluate(step=1)
    faults.report(loss=trainer.train())


class Unreadable:
    """Pickled on any rank, it cannot be read on rank 1."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return read, ()


def read() -> str:
    if dist.get_rank() == 1:
        raise LookupError("not here")
    return "read"


def own_code(names: list[str]) -> None:
    """What the program hands over cannot be sent, read or combined on one rank alone, or its keeper raises there."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def result(step: int | None = None) -> Any:
        return (lambda: None) if rank == 0 else step

    def unreadable(step: int | None = None) -> Any:
        return Unreadable()

    def single(step: int | None = None) -> Any:
        return lambda: None

    def part(step: int | None = None) -> Any:
        record_partial((lambda: None) if rank == 1 else 1.0, done=1, total=2)
        if step is None and rank == 2:
            raise KeyError("f1")
        return step

    def combined(step: int | None = None) -> Any:
        record_partial(rank, done=1, total=2)
        if rank == 2:
            raise KeyError("f1")

    def total(parts: list[int]) -> float:
        if rank == 1:
            raise ZeroDivisionError("no samples here")
        return float(sum(parts))

    def keeper() -> Any:
        if rank == 1:
            raise OSError("the loader has no state")
        return lambda: None

    options: dict[str, Any] = {"max_attempts": 1, "fallback": "fallback", "timeout": 20, "barrier_timeout": 20}
    cases: dict[str, tuple[Any, Any]] = {
        "result": (ng.resilient_evaluate(result, same_result=True, **options), None),
        "unreadable": (ng.resilient_evaluate(unreadable, same_result=True, **options), None),
        "single": (ng.resilient_evaluate(single, **options), None),
        "part": (ng.resilient_evaluate(part, combine=sum, **options), None),
        "part not needed": (ng.resilient_evaluate(part, combine=sum, **options), 7),
        "combine": (ng.resilient_evaluate(combined, combine=total, **options), None),
        "combined": (ng.resilient_evaluate(combined, combine=sum, **options), None),
        "keeper": (ng.resilient_evaluate(lambda step: step, keepers=[keeper], **options), 7),
    }
    cases["single"][0].single_rank = 1
    for name in names:
        evaluate, step = cases[name]
        found = evaluate(step)
        report = evaluate.report
        accused = [[list(failure.culprits), failure.errors[0][1]] for failure in report.failures]
        faults.report(**{name: {"result": found, "action": report.action.value, "accused": accused}})
    sum_of = torch.ones(1)
    dist.all_reduce(sum_of)
    faults.report(after=float(sum_of))
    dist.barrier()
    dist.destroy_process_group()


def leaves_out(called: str) -> None:
    """Two evaluations in each of three steps; in the second step the last rank leaves the first of them out.

    ``called``: the two by "lines" of their own, in a "loop" by one line, or as two "functions".
    """
    dist.init_process_group("gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    options: dict[str, Any] = {"fallback": None, "max_attempts": 1, "barrier_timeout": 20}

    def evaluate(value: float, step: int) -> float:
        total = torch.tensor([value])
        dist.all_reduce(total)
        return float(total)

    def test(value: float, step: int) -> float:
        return evaluate(value, step)

    first = ng.resilient_evaluate(evaluate, **options)
    second = ng.resilient_evaluate(test, **options) if called == "functions" else first
    values, reports = [], []

    def keep(of: Any, value: float | None) -> None:
        values.append(value)
        reports.append([of.report.label, of.report.action.value, str(of.report)])

    for step in range(3):
        left_out = last and step == 1
        if called == "loop":
            for value in (1.0, 100.0):
                if not (left_out and value == 1.0):
                    keep(first, first(value, step))
        else:
            if not left_out:
                keep(first, first(1.0, step))
            keep(second, second(100.0, step))
    if last:  # two branches of one evaluation
        keep(first, first(3.0, 3))
    else:
        keep(first, first(3.0, 3))
    faults.report(values=values, reports=reports)
    dist.barrier()
    dist.destroy_process_group()


def in_branches(step: int | None) -> None:
    """A healthy program: all evaluate in every branch in turn, and by lines that depend on the rank ever after."""
    dist.init_process_group("gloo")
    rank, values = dist.get_rank(), []

    @ng.resilient_evaluate(fallback=None, max_attempts=1, barrier_timeout=20)
    def evaluate(value: float, step: int | None = None) -> float:
        total = torch.tensor([value])
        dist.all_reduce(total)
        return float(total)

    for number in range(2 + dist.get_world_size()):
        if number == 0 or number - 2 == rank:
            values.append(evaluate(float(number), step))
        else:
            values.append(evaluate(float(number), step))
    faults.report(values=values)
    dist.barrier()
    dist.destroy_process_group()


def of_two_classes() -> None:
    """Two functions of one name at each step, of which the last rank leaves the first out once; it comes late to the rest."""
    dist.init_process_group("gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    options: dict[str, Any] = {"fallback": None, "max_attempts": 1, "barrier_timeout": 20}

    class First:
        @ng.resilient_evaluate(**options)
        def evaluate(self, step: int) -> float:
            total = torch.tensor([1.0])
            dist.all_reduce(total)
            return float(total)

    class Second:
        @ng.resilient_evaluate(**options)
        def evaluate(self, step: int) -> float:
            total = torch.tensor([100.0])
            dist.all_reduce(total)
            return float(total)

    values = []
    for step in range(4):
        for each in (First(), Second()):
            if last and step == 1 and isinstance(each, First):
                continue
            if dist.get_rank() == 1 and step == 1:
                time.sleep(0.5)  # the others know that they are in different ones before this rank has come
            values.append(each.evaluate(step))
    faults.report(values=values)
    dist.barrier()
    dist.destroy_process_group()
