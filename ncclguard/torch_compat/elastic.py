"""torch's elastic agent, which `torchrun` is made of: its private names, in the form that `ncclguard run` needs.

Ran on torch 2.6, 2.9, 2.13 and 2.15. `check` says what a version lacks, before anything is started.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, run as torchrun  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from torch.distributed.launcher import api as launcher

from ncclguard_explain.language import told

log = logging.getLogger("ncclguard")

#: Keys in the agents' store, for each host: its ranks, and, once they have ended, the ranks that took part then.
_RANKS: Final = "ncclguard/run/{}/ranks"
_ENDED: Final = "ncclguard/run/{}/ended"
#: Seconds between two checks whether the others have ended.
_POLL: Final = 0.2

#: Exit codes by global rank of the workers of this host, None for one that runs; see `Agent`.
Codes = dict[int, "int | None"]


@dataclass(frozen=True, slots=True)
class Host:
    """The actions that a judge may take on the ranks of its host."""

    #: Return how many spares wait, without those that have died.
    spares: Callable[[], int]
    #: Give the place of a rank that has ended to a new process, or to a waiting one (`spare`), with further variables;
    #: return its pid.
    start: Callable[[int, Mapping[str, str], bool], int]
    #: End the process of a rank at once.
    kill: Callable[[int], None]


class Judge(Protocol):
    """Decides what becomes of the workers of this host."""

    def judge(self, codes: Codes, host: Host) -> str | None:
        """Return "wait" or "succeeded", or None for torch's own behaviour.

        "wait" leaves the running workers alone; "succeeded": the job has ended well, and workers that still run are
        ended. torch's own behaviour ends all workers when one has failed.
        """

    def starting(self, store: Any, restarts: int, host: int, hosts: int) -> None:
        """Note that workers are about to start on host number ``host`` of ``hosts``, after ``restarts`` restarts."""

    def taking_part(self, ranks: Iterable[int]) -> set[int] | None:
        """Return the ranks that take part in the job, as these ranks of this host know; None if none has said it."""

    def elsewhere(self, store: Any) -> tuple[set[int], set[int]]:
        """Return the ranks on hosts without an agent, by this store, and all ranks that came from such hosts."""


def check() -> str:
    """Return a sentence on the parts of torch's agent that this version lacks; "" if it has all."""
    wanted = [
        (local_elastic_agent.LocalElasticAgent, "_monitor_workers"),
        (local_elastic_agent.LocalElasticAgent, "_start_workers"),
        (local_elastic_agent.LocalElasticAgent, "_exit_barrier"),
        (launcher, "LocalElasticAgent"),
        (torchrun, "get_args_parser"),
        (SubprocessHandler, "_popen"),
    ]
    missing = [f"{getattr(owner, '__name__', owner)}.{name}" for owner, name in wanted if not hasattr(owner, name)]
    if "subprocess_handlers" not in SubprocessContext.pids.__code__.co_names:  # an attribute that instances have
        missing.append("SubprocessContext.subprocess_handlers")
    return f"torch {torch.__version__} has no {', '.join(missing)}" if missing else ""


class _Spare:
    """A process of `ncclguard.training.spare`, and the pipe that it waits at."""

    def __init__(self, shown: Sequence[str]) -> None:
        reader, self._writer = os.pipe()
        command = [sys.executable, "-u", "-m", "ncclguard.training.spare", str(reader), *shown]
        env = {**os.environ, "NCCLGUARD_PLACE": " " * 512}  # see `training.spare`
        try:
            self.process = subprocess.Popen(command, env=env, pass_fds=(reader,), start_new_session=True)
        finally:
            os.close(reader)

    def give(self, place: Mapping[str, object]) -> None:
        with os.fdopen(self._writer, "wb") as pipe:
            pipe.write(json.dumps(place).encode())

    def end(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._writer)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # a spare has no state to save, and may be importing
        self.process.wait()


class _Successor(SubprocessHandler):
    """The process that has a lost rank's place; its output goes behind that of the one before."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        outputs: Sequence[str],
        local_rank: int,
        spare: _Spare | None,
    ) -> None:
        self.local_rank_id = local_rank
        files = [Path(path).open("a") if path and spare is None else None for path in outputs]  # noqa: SIM115
        self._stdout, self._stderr = files
        if spare is None:
            self.proc = self._popen(tuple(command), {**os.environ, **env})
            return
        stdout, stderr = outputs
        spare.give({"env": dict(env), "command": list(command), "stdout": stdout, "stderr": stderr})
        self.proc = spare.process


class Agent(local_elastic_agent.LocalElasticAgent):
    """torch's agent, which asks `judge` what becomes of its workers.

    `spares`: how many processes wait for a lost rank's place. At the end the launchers wait for each other, as torch's
    do, but not for a host whose ranks are all gone, according to those that went on; and for ranks that a host which
    stood by has taken over.
    """

    judge: Judge
    spares = 0
    waiting: list[_Spare] = []  # noqa: RUF012 - `launch` ends them, whatever becomes of the agent

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        self.judge.starting(self._store, restarts, worker_group.group_rank, worker_group.group_world_size)
        ranks = [worker.global_rank for worker in worker_group.workers]
        store: Any = self._store
        store.set(_RANKS.format(worker_group.group_rank), json.dumps(ranks))
        self._count_spares()
        while len(self.waiting) < type(self).spares:
            self.waiting.append(_Spare([str(argument) for argument in worker_group.spec.args if argument != "-u"]))
        return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        context = self._pcontext
        if isinstance(context, SubprocessContext):  # a function as entry point has no command that may go on
            codes = {
                worker_group.workers[local_rank].global_rank: handler.proc.poll()
                for local_rank, handler in context.subprocess_handlers.items()
            }
            host = Host(
                self._count_spares,
                lambda rank, env, spare: self._succeed(context, worker_group, rank, env, spare),
                lambda rank: self._kill(context, worker_group, rank),
            )
            decision = self.judge.judge(codes, host)
            if decision == "succeeded":
                context.close()  # ends the copying of logs, and processes that are not needed any more
                return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(codes))
            # torch reads the exit codes again, and would end all workers for an exit that the judge has not seen yet.
            if decision == "wait" or (None in codes.values() and not any(codes.values())):
                return self._healthy(worker_group)
        return super()._monitor_workers(worker_group)  # type: ignore[no-any-return]

    def _exit_barrier(self) -> None:
        group: Any = self._worker_group
        store: Any = self._store
        hosts = [host for host in range(group.group_world_size) if host != group.group_rank]
        self._in_exit_barrier = True  # read by the health check of newer versions of torch
        try:
            if hosts and not store.check([_RANKS.format(host) for host in hosts]):  # a host has torch's own agent
                super()._exit_barrier()  # type: ignore[no-untyped-call]
                return
            ranks = {host: set(json.loads(store.get(_RANKS.format(host)))) for host in hosts}
            own = self.judge.taking_part([worker.global_rank for worker in group.workers])
            store.set(_ENDED.format(group.group_rank), json.dumps(None if own is None else sorted(own)))
            took_part = [] if own is None else [own]  # the ranks at the end, as each host that has ended says
            end, guests = time.monotonic() + self._exit_barrier_timeout, set[int]()
            while time.monotonic() < end:
                for host in [host for host in ranks if store.check([_ENDED.format(host)])]:
                    members = json.loads(store.get(_ENDED.format(host)))
                    took_part += [] if members is None else [set(members)]
                    del ranks[host]
                guests, came = self.judge.elsewhere(store)
                there = [members - came for members in took_part]
                for host in [host for host, theirs in ranks.items() if not all(theirs & members for members in there)]:
                    del ranks[host]
                if not ranks and not (took_part and guests.intersection(*took_part)):
                    break
                time.sleep(_POLL)
        except (RuntimeError, ValueError) as error:  # the host with the store has seen before that all have ended
            log.info(
                "ncclguard run: %s",
                told("the launchers of the other hosts cannot be waited for any more: {error}", "log", error=error),
            )

    def _healthy(self, worker_group: Any) -> RunResult:
        timeout = getattr(self, "_uninterruptible_state_timeout", 0)
        unhealthy = self._check_uninterruptible_state_timeout(worker_group, timeout) if timeout > 0 else None
        return unhealthy or RunResult(state=WorkerState.HEALTHY)

    def _count_spares(self) -> int:
        for spare in [spare for spare in self.waiting if spare.process.poll() is not None]:
            print(
                f"ncclguard run: a spare (process {spare.process.pid}) has ended with exit code {spare.process.returncode} "
                "while it waited",
                file=sys.stderr,
                flush=True,
            )
            self.waiting.remove(spare)
            spare.end()
        return len(self.waiting)

    def _succeed(
        self, context: SubprocessContext, worker_group: Any, rank: int, env: Mapping[str, str], spare: bool
    ) -> int:
        local_rank, worker = next(
            (local_rank, worker) for local_rank, worker in enumerate(worker_group.workers) if worker.global_rank == rank
        )
        before = context.subprocess_handlers[local_rank]
        for file in (before._stdout, before._stderr):
            if file:
                file.close()
        Path(context.error_files[local_rank]).unlink(missing_ok=True)
        handler = _Successor(
            [str(context.entrypoint), *map(str, context.args[local_rank])],
            {**context.envs[local_rank], **env},
            [context.stdouts[local_rank], context.stderrs[local_rank]],
            local_rank,
            self.waiting.pop(0) if spare else None,
        )
        context.subprocess_handlers[local_rank] = handler
        context._running_local_ranks.add(local_rank)
        worker.id = handler.proc.pid
        return int(handler.proc.pid)

    def _kill(self, context: SubprocessContext, worker_group: Any, rank: int) -> None:
        for local_rank, worker in enumerate(worker_group.workers):
            if worker.global_rank == rank:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(context.subprocess_handlers[local_rank].proc.pid, signal.SIGKILL)


def parser() -> Any:
    """Return torchrun's own parser, to which options may be added."""
    return torchrun.get_args_parser()


def launch(arguments: Any, judge: Judge, spares: int = 0) -> None:
    """Do what torchrun does with these parsed arguments, with an agent that asks `judge`.

    Raises ChildFailedError as torchrun does when workers have failed.
    """
    waiting: list[_Spare] = []
    agent = type("Agent", (Agent,), {"judge": judge, "spares": spares, "waiting": waiting})
    before = vars(launcher)["LocalElasticAgent"]
    vars(launcher)["LocalElasticAgent"] = agent  # where `launch_agent` looks it up; there is no argument for it
    try:
        record(torchrun.run)(arguments)
    finally:
        vars(launcher)["LocalElasticAgent"] = before
        for spare in waiting:
            spare.end()


def failed(error: BaseException) -> bool:
    """Return whether the exception says that workers failed, and torch has written about them already."""
    return type(error).__name__ == "ChildFailedError"


def is_taken(error: BaseException) -> bool:
    """Return whether the exception says that the port at which all hosts meet is another process's."""
    return isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in str(error)


def launched(arguments: Any) -> tuple[list[str], int]:
    """Return the command of each rank by these arguments, and the number of ranks on this host. Raises ValueError."""
    ranks, command, rest = configured(arguments)
    if callable(command):
        text = told("--run-path is a function of the launcher's; a rank that may be replaced has a command")
        raise ValueError(text)  # noqa: TRY004 - a wrong option
    return [str(command), *map(str, rest)], ranks


def configured(arguments: Any) -> tuple[int, Any, list[Any]]:
    """Return the number of ranks on this host, the entrypoint and its arguments.

    Raises ValueError or RuntimeError for arguments that cannot be.
    """
    config, command, rest = torchrun.config_from_args(arguments)
    if config.nproc_per_node < 1:
        given = arguments.nproc_per_node
        raise ValueError(told("--nproc-per-node {given} is no process: give 1 or more", given=given))
    return int(config.nproc_per_node), command, rest


def check_script(arguments: Any) -> None:
    """Raise ValueError where the script is no file: each rank would say so, and then torch at length."""
    if not (arguments.module or arguments.no_python or arguments.run_path or Path(arguments.training_script).exists()):
        raise ValueError(
            told("there is no file {path} here: give a script, or -m and a module", path=arguments.training_script)
        )


def store_address(arguments: Any) -> tuple[str, int]:
    """Return the address of the store of agents and ranks, by these parsed arguments. Raises ValueError without one."""
    if arguments.standalone or arguments.rdzv_backend != "static" or arguments.rdzv_endpoint:
        text = told(
            "a host that stands by meets the others at --master-addr and --master-port: leave --standalone, "
            "--rdzv-backend and --rdzv-endpoint out, here and on them"
        )
        raise ValueError(text)
    port = 29500 if arguments.master_port is None else int(arguments.master_port)  # as torchrun's
    if not 0 < port < 65536:
        raise ValueError(told("--master-port {number} is no port: give one from 1 to 65535", number=port))
    return str(arguments.master_addr or "127.0.0.1"), port


def was_here(arguments: Any) -> bool:
    """Return whether the job runs already, and the host of this `--node-rank` has had ranks in it: it is started again.

    The others do not wait for its agent at the end any more. Waits for the job's store as torch's agent does. Only a
    job with --master-addr is asked: by c10d, hosts have no numbers of their own.
    """
    try:
        host, port = store_address(arguments)
    except ValueError:
        return False
    if int(arguments.node_rank) == 0:
        return False
    config, _, _ = torchrun.config_from_args(arguments)
    timeout = timedelta(seconds=float(config.rdzv_configs.get("timeout", 600)))
    store: Any = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store = PrefixStore(config.run_id, store)
    if not store.check([_RANKS.format(arguments.node_rank)]):
        return False
    store.set(_ENDED.format(arguments.node_rank), json.dumps(None))
    return True
