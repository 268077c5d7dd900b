"""The program of each rank: steps of two all-reduces, in which one rank is struck by a fault; it writes events down.

Each rank contributes a power of two of its own, so that a result says who took part in it, and a wrong one shows.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.peers.ways import LIMIT, WAYS, Failed, Setting
from ncclguard.faults import injection

STRUCK: Final = 2
STRIKE: Final = 4  # the step
STEPS: Final = 10
LARGE, SMALL = 1000, 1
#: Seconds that late and stopped ranks are away.
AWAY: Final = 1.5 * LIMIT
#: Failed steps after which the program gives up.
PATIENCE: Final = 3
_STEP: Final = 0.05  # seconds of computation

#: What the faults are, for the table.
FAULTS: Final = {
    "late": f"late by {AWAY:g} s",
    "kill": "killed",
    "stop": f"stopped for {AWAY:g} s",
    "raise": "raised an exception",
    "shape": "another shape",
    "op": "another collective",
    "skip": "skipped one call",
    "cut": "connections cut",
}


class Injected(RuntimeError):
    """What the struck rank's own code raises."""


class Program:
    """The loop of one rank, which a way may call again from the start of a step."""

    def __init__(self, way: str, fault: str, folder: str, ports: list[int], lighthouse: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.fault = fault
        self.file = Path(folder, f"rank{self.rank}.events")
        self.size = int(os.environ["WORLD_SIZE"])  # now, as nvidia-resiliency-ext gives new numbers after a restart
        self.struck = False
        self.failures = 0
        self.way = WAYS[way](Setting((ports[0], ports[1]), lighthouse, lambda text: self.event("said", text=text)))

    def event(self, kind: str, **values: Any) -> None:
        """Write one line, which survives a SIGKILL."""
        line = json.dumps({"event": kind, "at": time.monotonic(), **values})
        descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, line.encode() + b"\n")
        os.close(descriptor)

    def loop(self) -> None:
        """Steps until all are done or the program gives up."""
        while self.way.step < STEPS:
            time.sleep(_STEP)
            calls: list[Any] = [(self.way.all_reduce, LARGE), (self.way.all_reduce, SMALL)]
            self.way.begin()
            if self.rank == STRUCK and self.way.step >= STRIKE and not self.struck:
                self.struck = True
                calls = self.strike(calls)
            step, masks = self.way.step, []
            tensor = before = torch.zeros(0)
            try:
                for call, numel in calls:
                    tensor = torch.full((numel,), 2.0**self.rank)
                    before = tensor.clone()
                    call(tensor)
                    masks.append(mask(tensor, self.size))
                self.way.commit()
            except Exception as error:
                named = error.named if isinstance(error, Failed) else None
                text = f"{type(error).__name__}: {error}"
                self.event("failed", step=step, text=text, named=named, tensor=state(tensor, before, self.size))
                self.failures += 1
                if self.failures == PATIENCE:
                    self.event("gave up")
                    raise
                self.way.recover()
            else:
                self.failures = 0
                self.event("ok", step=step, masks=masks)
        self.event("done")

    def strike(self, calls: list[Any]) -> list[Any]:
        """Do what the fault is, and return the calls that this rank makes in the step."""
        self.event("struck")
        if self.fault == "late":
            time.sleep(AWAY)
        elif self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "stop":
            injection.stop(AWAY)
        elif self.fault == "raise":
            raise Injected("the struck rank's own code")
        elif self.fault == "shape":
            return [(calls[0][0], LARGE - 1), calls[1]]
        elif self.fault == "op":
            return [(self.way.broadcast, LARGE), calls[1]]
        elif self.fault == "skip":
            return calls[1:]
        elif self.fault == "cut":
            self.event("cut", connections=injection.reset_own_connections(self.way.keep_ports()))
        return calls


def mask(tensor: torch.Tensor, size: int) -> int | None:
    """Who took part, one bit a rank; None if the result is no sum of what the ranks had."""
    value = float(tensor[0])
    if not bool((tensor == value).all()) or not value.is_integer() or not 0 < value < 2**size:
        return None
    return int(value)


def state(tensor: torch.Tensor, before: torch.Tensor, size: int) -> str:
    """What a failed call has left of the tensor."""
    if torch.equal(tensor, before):
        return "intact"
    return "torn" if mask(tensor, size) is None else "result"


def run_rank(way: str, fault: str, folder: str, ports: list[int], lighthouse: str) -> None:
    """One rank."""
    program = Program(way, fault, folder, ports, lighthouse)
    program.event("started")
    try:
        program.way.run(program.loop)
    except BaseException as error:
        program.event("ended by", text=f"{type(error).__name__}: {error}"[:2000])
        raise
