"""Starts real rank processes on this machine, for rehearsing faults and for tests."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import site
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ncclguard.environment.network import RES_OPTIONS
from ncclguard.faults import fork, rank
from ncclguard.faults.cleanup import JOB_VARIABLE
from ncclguard.faults.job import Command, Job, JobResult

if TYPE_CHECKING:
    from ncclguard.faults.hosts import Hosts  # which needs torch

Program = str | Path | Callable[..., Any]
Launcher = Literal["processes", "fork", "torchrun"]
#: The launcher where a call names none; the tests of this project set it to "fork".
DEFAULT: Launcher = "processes"

# Variables by which a surrounding job, launcher or scheduler describes itself; the ranks must not inherit them.
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR")
_NOT_INHERITED_PREFIX = ("TORCHELASTIC_", "PYTEST_")


def run_ranks(
    program: Program,
    world_size: int,
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    hosts: Hosts | None = None,
    launcher: Launcher | None = None,
) -> JobResult:
    """Run a program as ``world_size`` rank processes and return how each ended; it always ends by itself.

    ``program`` is a script's path, ``"module:function"``, ``"file.py:function"`` or a module-level function; a function
    gets ``args`` (JSON-able), a script gets them as its arguments. Each rank has RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT, so ``init_process_group`` needs nothing more. With ``hosts`` the ranks are spread over
    its network namespaces in blocks. ``launcher``: "processes" (the default) starts each by itself; "fork" forks the
    ranks of functions from a process of multiprocessing's that has torch imported, and is kept for later jobs (a script
    that calls this needs the usual ``if __name__ == "__main__"``); "torchrun". At ``timeout`` (seconds) whoever still
    runs writes its stacks and is killed; forked children and stopped processes too.
    Raises ValueError for a program or a world size that cannot be started.

    >>> from ncclguard import faults
    >>> result = faults.run_ranks("math:factorial", 2, args=[5])
    >>> result.values("returned")
    {0: 120, 1: 120}
    """
    with start_ranks(program, world_size, args=args, env=env, timeout=timeout, hosts=hosts, launcher=launcher) as job:
        return job.wait()


def start_ranks(
    program: Program,
    world_size: int,
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    hosts: Hosts | None = None,
    launcher: Launcher | None = None,
) -> Job:
    """Start rank processes as ``run_ranks`` does and return at once, for acting on them while they run.

    >>> from ncclguard import faults
    >>> with faults.start_ranks("time:sleep", 2, args=[60]) as job:
    ...     job.send_signal(1, 9)
    ...     job.send_signal(0, 15)
    ...     [rank.end for rank in job.wait()]
    ['SIGTERM', 'SIGKILL']
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; give the number of ranks, 1 or more")
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; give the seconds after which the ranks are ended, above 0")
    launcher = DEFAULT if launcher is None else launcher
    if launcher not in get_args(Launcher):
        raise ValueError(f"launcher is {launcher!r}; it is one of {', '.join(map(repr, get_args(Launcher)))}")
    rank_command = command_of(program, args)
    directory = Path(tempfile.mkdtemp(prefix="ncclguard-ranks-"))
    name = uuid.uuid4().hex
    reserved = reserve_port() if hosts is None else None  # in a namespace of the job's own nobody else takes a port
    if reserved is not None:
        address, port = "127.0.0.1", reserved.getsockname()[1]
    elif hosts is not None:
        address, port = hosts.address(hosts.names[0]), hosts.next_port()
    job = Job(name, directory, world_size, timeout, reserved)
    try:
        common = environment_of(env, hosts)
        common |= {JOB_VARIABLE: name, rank.REPORT_VARIABLE: str(directory), rank.PATH_VARIABLE: json.dumps(sys.path)}
        plan = Plan(rank_command, world_size, common, directory, address, port, hosts)
        if launcher == "torchrun":
            job.start(torchrun_commands(plan))
        else:
            is_function = rank_command[1:3] == ["-m", __package__]
            job.start(rank_commands(plan, forked=launcher == "fork" and is_function and fork.possible(common)))
    except BaseException:
        job.close()
        raise
    return job


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings that the ranks of one job have in common."""

    rank_command: Sequence[str]
    world_size: int
    env: Mapping[str, str]
    directory: Path
    address: str
    port: int
    hosts: Hosts | None


def rank_commands(plan: Plan, forked: bool) -> list[Command]:
    """Return a command for each rank."""
    commands = []
    known = [str(hosts_file(plan.directory))] if forked and plan.hosts is None else []
    for number, own in enumerate(variables(plan)):
        argv: Sequence[str] = plan.rank_command
        entrance: Sequence[str] = known
        if plan.hosts is not None:
            host = plan.hosts.names[int(own["GROUP_RANK"])]
            argv, entrance = (argv, plan.hosts.entrance(host)) if forked else (plan.hosts.command(host, argv), ())
        output = plan.directory / f"rank{number}.output"
        env = {**plan.env, **own}
        commands.append(Command(argv, env, output, (number,), is_rank=True, forked=forked, entrance=entrance))
    return commands


def hosts_file(directory: Path) -> Path:
    """Write this host's /etc/hosts with a name for the address by which a TCPStore knows who connects on this host.

    It asks for that name at each connection and serves nobody meanwhile (torch/csrc/distributed/c10d/socket.cpp). No
    /etc/hosts has one, so that a name server is asked: an answer that was lost has cost 64 ranks 1 s, and without
    `RES_OPTIONS` 5 s and more.
    """
    file = directory / "hosts"
    with contextlib.suppress(OSError):
        file.write_text(Path("/etc/hosts").read_text() + "\n::ffff:127.0.0.1 localhost.mapped\n::1 localhost.mapped\n")
    return file


def variables(plan: Plan) -> list[dict[str, str]]:
    """Return the variables that a launcher sets for each rank."""
    return [
        {
            "RANK": str(number),
            "WORLD_SIZE": str(plan.world_size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": plan.address,
            "MASTER_PORT": str(plan.port),
        }
        for node, ranks in enumerate(blocks(plan.world_size, plan.hosts))
        for local, number in enumerate(ranks)
    ]


def torchrun_commands(plan: Plan) -> list[Command]:
    """Return a torchrun for each host; the ranks use its store, as they do in a real torchrun job."""
    nodes = blocks(plan.world_size, plan.hosts)
    if len({len(ranks) for ranks in nodes}) > 1:
        raise ValueError(f"torchrun wants equally many ranks on each host, not {plan.world_size} on {len(nodes)}")
    commands = []
    for node, ranks in enumerate(nodes):
        argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(nodes)), "--node-rank", str(node)]
        argv += [
            "--nproc-per-node",
            str(len(ranks)),
            "--master-addr",
            plan.address,
            "--master-port",
            str(plan.port),
            "--no-python",
        ]
        argv += [sys.executable, "-I", "-S", rank.__file__, str(plan.directory), *plan.rank_command]
        if plan.hosts is not None:
            argv = plan.hosts.command(plan.hosts.names[node], argv)
        commands.append(
            Command(
                argv,
                dict(plan.env),
                plan.directory / f"torchrun{node}.output",
                tuple(ranks),
                is_rank=False,
                ends_all=True,
            )
        )
    return commands


def blocks(world_size: int, hosts: Hosts | None) -> list[range]:
    """Return the ranks of each host: consecutive, one more on the first hosts where the division leaves a rest."""
    nodes = 1 if hosts is None else len(hosts.names)
    if world_size < nodes:
        raise ValueError(f"{world_size} ranks cannot be spread over {nodes} hosts; give each host one rank at least")
    share, rest = divmod(world_size, nodes)
    starts = [node * share + min(node, rest) for node in range(nodes + 1)]
    return [range(starts[node], starts[node + 1]) for node in range(nodes)]


def command_of(program: Program, args: Sequence[Any]) -> list[str]:
    """Return the command line that runs ``program`` in one rank."""
    if callable(program):
        name = getattr(program, "__qualname__", "")
        file = inspect.getsourcefile(program)
        if not name.isidentifier() or file is None:
            raise ValueError(f"{program!r} cannot be found again in another process; give a module-level function")
        module = "ncclguard_ranks_main" if program.__module__ == "__main__" else program.__module__
        return function_command(f"{module}={os.path.abspath(file)}", name, args)
    text = os.fspath(program)
    if text.endswith(".py") or os.path.isfile(text):
        if not os.path.isfile(text):
            raise ValueError(f"there is no script {text}; give the path of an existing file")
        return [sys.executable, text, *map(str, args)]
    module, colon, name = text.rpartition(":")
    if not colon or not module or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{text!r} is neither a script nor 'module:function'; give one of these, or a function")
    if module.endswith(".py"):
        if not os.path.isfile(module):
            raise ValueError(f"there is no file {module}; give the path of an existing file before the colon")
        return function_command(f"{Path(module).stem}={os.path.abspath(module)}", name, args)
    return function_command(module, name, args)


def function_command(module: str, name: str, args: Sequence[Any]) -> list[str]:
    return [sys.executable, "-m", __package__, module, name, json.dumps(list(args))]


def environment_of(env: Mapping[str, str] | None, hosts: Hosts | None) -> dict[str, str]:
    """Return the variables of every rank: this process's without another job's, this package importable, stacks on."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_PREFIX)
    }
    package_parent = str(Path(__file__).resolve().parents[2])
    if package_parent not in (*site.getsitepackages(), site.getusersitepackages()):
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (package_parent, inherited.get("PYTHONPATH"))))
    inherited["PYTHONFAULTHANDLER"] = "1"
    inherited["PYTHONUNBUFFERED"] = "1"
    inherited.setdefault("OMP_NUM_THREADS", "1")
    # TCPStore looks up the name of whoever connects (torch/csrc/distributed/c10d/socket.cpp) and serves nobody
    # meanwhile: by default 5 s and more for each answer of a name server that is lost.
    inherited.setdefault("RES_OPTIONS", RES_OPTIONS)
    inherited.setdefault("NCCLGUARD_REPORT_DIR", "none")  # faults made on purpose leave no files unless asked for
    interface = "lo" if hosts is None else hosts.interface
    if hosts is not None or "GLOO_SOCKET_IFNAME" not in inherited:
        inherited["GLOO_SOCKET_IFNAME"] = interface  # else gloo resolves the hostname, which may lead anywhere
    return {**inherited, **(env or {})}


def reserve_port() -> socket.socket:
    """Return a socket bound to a free port that nobody else is given while it stays open; its owner never listens.

    Linux hands a port with a bound socket to no ``bind(0)`` and no ``connect``, but lets a listener that asks for
    exactly this port with SO_REUSEADDR have it, as TCPStore does.
    """
    reserved = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reserved.family == socket.AF_INET6:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.bind(("", 0))
    return reserved
