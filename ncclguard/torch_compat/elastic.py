"""torch's elastic agent, which `torchrun` is made of: its private names, in the form that `ncclguard run` needs.

Ran on torch 2.13.0 (CPU). `check` says what a version lacks, before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher import api as launcher

#: Exit codes by global rank of the workers of this host, None for one that runs; what becomes of them, see `Agent`.
Codes = dict[int, "int | None"]
Judge = Callable[[Codes], "str | None"]


def check() -> str:
    """What this torch lacks for an agent of our own; empty where it has all."""
    wanted = [
        (local_elastic_agent.LocalElasticAgent, "_monitor_workers"),
        (local_elastic_agent.LocalElasticAgent, "_start_workers"),
        (launcher, "LocalElasticAgent"),
        (torchrun, "get_args_parser"),
        (SubprocessContext, "_capture_process_failures"),
    ]
    missing = [f"{getattr(owner, '__name__', owner)}.{name}" for owner, name in wanted if not hasattr(owner, name)]
    return f"torch {torch.__version__} has no {', '.join(missing)}" if missing else ""


class Agent(local_elastic_agent.LocalElasticAgent):
    """torch's agent, which asks `judge` when a worker has failed.

    The judge says "wait" (the others are left alone), "succeeded" (all have ended, and well), or None: torch's own
    behaviour, which ends all workers. `started` is called before workers are started, also again.
    """

    judge: Judge = staticmethod(lambda codes: None)
    started: Callable[[], None] = staticmethod(lambda: None)

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        type(self).started()
        return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        context = self._pcontext
        if isinstance(context, SubprocessContext):  # a function as entry point has no command that may go on
            codes = {
                worker_group.workers[local_rank].global_rank: handler.proc.poll()
                for local_rank, handler in context.subprocess_handlers.items()
            }
            if any(codes.values()):
                said = type(self).judge(codes)
                if said == "wait":
                    return RunResult(state=WorkerState.HEALTHY)
                if said == "succeeded":
                    context.close()  # which ends the copying of logs
                    return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(codes))
        return super()._monitor_workers(worker_group)  # type: ignore[no-any-return]


def parser() -> Any:
    """torchrun's own, to which options may be added."""
    return torchrun.get_args_parser()


def launch(arguments: Any, judge: Judge, started: Callable[[], None]) -> None:
    """Do what torchrun does with these parsed arguments, with an agent that asks `judge`.

    Raises ChildFailedError as torchrun does when workers have failed.
    """
    agent = type("Agent", (Agent,), {"judge": staticmethod(judge), "started": staticmethod(started)})
    before = vars(launcher)["LocalElasticAgent"]
    vars(launcher)["LocalElasticAgent"] = agent  # where `launch_agent` looks it up; there is no argument for it
    try:
        record(torchrun.run)(arguments)
    finally:
        vars(launcher)["LocalElasticAgent"] = before


def failed(error: BaseException) -> bool:
    """Whether the exception says that workers failed, and torch has written about them already."""
    return type(error).__name__ == "ChildFailedError"


__all__: Sequence[str] = ["Agent", "Codes", "Judge", "check", "failed", "launch", "parser"]
