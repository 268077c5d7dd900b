"""The ranks of the jobs that run on this host, as /proc shows them."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ncclguard.hang.environment import environ_now
from ncclguard.hang.names import Pid
from ncclguard_explain.host import read_file
from ncclguard_explain.language import tr
from ncclguard_explain.places import coordinates

PROC: Final = Path("/proc")
#: Variables in which launchers tell a process its rank and the number of ranks, the most specific first: torchrun's,
#: those of Open MPI, of MPICH and Intel MPI, and Slurm's.
RANK_VARIABLES: Final = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
#: The same for the ranks of one host: this one's place among them, and their number.
_LOCAL_VARIABLES: Final = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
#: The number of hosts, as launchers tell it.
_HOSTS_VARIABLES: Final = (
    "SLURM_STEP_NUM_NODES",
    "SLURM_NNODES",
    "GROUP_WORLD_SIZE",
    "CROSS_SIZE",
    "OMPI_MCA_orte_num_nodes",
)
_JOB_VARIABLES: Final = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
#: What inference servers write over their command line, and with it over their environment.
_TITLES: Final = (
    (re.compile(r"VLLM::Worker\S*"), "vLLM worker"),
    (re.compile(r"sglang::scheduler\S*"), "SGLang scheduler"),
)
#: The title of an actor of Ray, with its class, behind its name where it has one.
_RAY: Final = re.compile(r"ray::(?!IDLE|SPILL|RESTORE)(?:[^.(\s\0]*:)?([^.:(\s\0]+)")
_SPAWNED: Final = re.compile(r"multiprocessing\.spawn\b.*\bspawn_main\b", re.DOTALL)
#: Launchers, by the name of their program or by the module that Python runs.
_LAUNCHERS: Final = frozenset(
    ["torchrun", "accelerate", "accelerate-launch", "deepspeed", "deepspeed.pt", "ds", "ncclguard", "ray", "mpirun", "mpiexec",
     "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli",
     "deepspeed.launcher.runner", "deepspeed.launcher.launch", "ray.scripts.scripts"]
)  # fmt: skip
NO_RANKS: Final = tr("these processes tell no rank: each is shown by its own number")
#: Options of Python that have a word of their own after them.
_WITH_A_WORD: Final = ("-W", "-X", "--check-hash-based-pycs")
#: What ranks start, and what may outlive them.
_HELPER: Final = re.compile(r"compile_worker|multiprocessing[./]\w*(?:resource_tracker|forkserver)")
#: A variable that a process of `ncclguard run` has until it gets the place of a lost rank; see `training.spare`.
_WAITS_FOR_A_PLACE: Final = "NCCLGUARD_PLACE"


@dataclass(frozen=True)
class Process:
    """One process: `state` is the letter of /proc/PID/stat, `ticks` its CPU time, `environ` None where it is hidden.

    `exit_status` is that of a process which its parent has not collected, None where it may not be seen. `name` is what
    the kernel calls it, also after its end.
    """

    pid: int
    parent: int
    state: str
    ticks: int
    started: int
    uid: int = -1
    command: str = ""
    environ: Mapping[str, str] | None = None
    exit_status: int | None = None
    name: str = ""

    @property
    def is_python(self) -> bool:
        """Tell whether its program is a Python, or its command names one where the program cannot be seen."""
        try:
            program = os.readlink(PROC / str(self.pid) / "exe")
        except OSError:
            program = self.command.partition("\0")[0]
        return "python" in os.path.basename(program) or "pypy" in os.path.basename(program)


@dataclass(frozen=True)
class Member:
    """One rank of a job on this host, and the numbers of the processes that it has started."""

    rank: int
    process: Process
    helpers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ended:
    """A rank of which no process is left; `code` is its exit code, negative for a signal, None where nobody knows."""

    rank: int
    code: int | None = None


@dataclass
class Job:
    """The ranks of one job on this host; `counted` where they tell no ranks, and their processes stand for them."""

    name: str
    world_size: int
    members: list[Member]
    ended: list[Ended] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counted: bool = False


def read_process(pid: int) -> Process | None:
    """Return what /proc says of a process, None when it has ended."""
    folder = PROC / str(pid)
    try:
        text = (folder / "stat").read_text(errors="replace")
        uid = folder.stat().st_uid
    except OSError:
        return None
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    command, environ = "", None
    try:
        command = (folder / "cmdline").read_bytes().decode(errors="replace").strip("\0")
        raw = (folder / "environ").read_bytes().decode(errors="replace")
        environ = dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)
    except OSError:
        pass
    # Of another user's process the kernel shows 0 instead of its exit status (fs/proc/array.c, `permitted`).
    shown = fields[0] == "Z" and len(fields) > 49 and os.geteuid() in (0, uid)
    status = int(fields[49]) if shown else None
    ticks = int(fields[11]) + int(fields[12])
    return Process(pid, int(fields[1]), fields[0], ticks, int(fields[19]), uid, command, environ, status,
                   head.partition("(")[2])  # fmt: skip


def read_processes() -> dict[int, Process]:
    """Return all processes that this user can see, by number, without this command itself."""
    found = (read_process(int(name)) for name in os.listdir(PROC) if name.isdigit() and int(name) != os.getpid())
    return {process.pid: process for process in found if process is not None and not _looks_itself(process)}


def _looks_itself(process: Process) -> bool:
    """Tell whether it is this command, which srun and mpirun give a rank too."""
    words = process.command.split("\0")[:4]
    return "hang" in words and any("ncclguard" in word for word in words)


def rank_of(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return rank and world size as a launcher told them to a process.

    >>> rank_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "RANK": "5", "WORLD_SIZE": "8"}), rank_of({"RANK": "0"})
    ((5, 8), None)
    """
    return _numbers(environ, RANK_VARIABLES)


def _numbers(environ: Mapping[str, str], variables: Iterable[tuple[str, str]]) -> tuple[int, int] | None:
    for place, size in variables:
        try:
            told = int(environ[place]), int(environ[size])
        except (KeyError, ValueError):
            continue
        if 0 <= told[0] < told[1]:
            return told
    return None


def find_jobs(processes: Mapping[int, Process]) -> list[Job]:
    """Return the jobs whose ranks are among the processes.

    The rank is the first Python on the way down from its launcher: what it starts itself (data loaders, compilers)
    has inherited its variables.
    """
    processes = {pid: _with_own_rank(process) for pid, process in processes.items()}
    told: dict[int, tuple[int, int]] = {}
    for process in processes.values():
        found = rank_of(process.environ or {})
        no_rank = process.state in "ZX" or _is_beside_ranks(process) or _launches(process)
        if found is not None and process.is_python and not no_rank:
            told[process.pid] = found
    jobs: dict[tuple[str | None, ...], list[Member]] = defaultdict(list)
    for pid, (rank, size) in told.items():
        environ = processes[pid].environ or {}
        if any(told.get(above) == told[pid] for above in ancestors(processes[pid], processes)):
            continue
        if "RANK" in environ or "MASTER_ADDR" in environ or _has_torch(pid):  # srun and mpirun start anything
            jobs[(str(size), *(environ.get(name) for name in _JOB_VARIABLES))].append(Member(rank, processes[pid]))
    found_jobs = [job for key, members in jobs.items() for job in _split(key, members)]
    for job in found_jobs:
        job.ended = _find_ended(job, processes)
    taken = {member.process.pid for job in found_jobs for member in job.members}
    for job in (more := [*_titled(processes, taken), *_spawned(processes, taken)]) + found_jobs:
        below: dict[int, list[int]] = defaultdict(list)
        pids = {member.process.pid for member in job.members}
        for process in processes.values():
            for above in ancestors(process, processes):
                if above in pids:
                    below[above].append(process.pid)
        job.members = [Member(one.rank, one.process, tuple(below[one.process.pid])) for one in job.members]
    return found_jobs + more


def _with_own_rank(process: Process) -> Process:
    """Return a process that Ray or multiprocessing has started with the rank that was set in it since its start."""
    started_later = _RAY.match(process.command) or _SPAWNED.search(process.command)
    if not started_later or process.state in "ZX" or rank_of(process.environ or {}) or not _has_torch(process.pid):
        return process
    environ = environ_now(process.pid)
    return replace(process, environ=environ) if rank_of(environ) and "MASTER_ADDR" in environ else process


def hidden_ranks(processes: Mapping[int, Process]) -> list[Process]:
    """Return the Pythons that a launcher has started and whose environment may not be read from here."""
    launchers = {process.pid for process in processes.values() if _launches(process)}
    return [one for one in processes.values() if one.environ is None and one.parent in launchers and one.is_python]


def _is_beside_ranks(process: Process) -> bool:
    """Tell whether a process helps ranks, or waits for the place of a lost one with the rank that Slurm told it."""
    return bool(_HELPER.search(process.command)) or _WAITS_FOR_A_PLACE in (process.environ or {})


def _launches(process: Process) -> bool:
    """Tell whether a process is a launcher, which itself may have got a rank of Slurm or MPI."""
    return program_of(process.command.split("\0")) in _LAUNCHERS


def program_of(words: Sequence[str]) -> str:
    """Return the name of the program that a command runs: of Python, its script's or its module's.

    >>> program_of(["python", "-u", "-m", "torch.distributed.run", "train.py"]), program_of(["python", "/bin/torchrun"])
    ('torch.distributed.run', 'torchrun')
    >>> program_of(["python", "-X", "dev", "train.py", "--deepspeed"]), program_of(["python", "-c", "torchrun()"])
    ('train.py', '')
    """
    name = os.path.basename(words[0])
    if not name.startswith(("python", "pypy")):
        return name
    rest = iter(words[1:])
    for word in rest:
        if word in _WITH_A_WORD:
            next(rest, "")
        elif word.startswith("-") and not word.startswith("--") and word[-1] in "mc":
            return next(rest, "") if word[-1] == "m" else ""
        elif not word.startswith("-"):
            return os.path.basename(word)
    return ""


def _split(key: tuple[str | None, ...], members: list[Member]) -> list[Job]:
    """Return one job, or one for each launcher where several share a port."""
    size, address, port, _, slurm, _ = key
    name = ":".join(part for part in (address, port) if part) or (f"Slurm job {slurm}" if slurm else "MPI")
    by_rank: dict[int, list[Member]] = defaultdict(list)
    for member in members:
        by_rank[member.rank].append(member)
    if all(len(same) == 1 for same in by_rank.values()):
        return [Job(name, int(size or 0), sorted(members, key=lambda one: one.rank))]
    by_parent: dict[int, dict[int, Member]] = defaultdict(dict)
    for member in sorted(members, key=lambda one: one.process.started):
        by_parent[member.process.parent].setdefault(member.rank, member)
    if len(by_parent) > 1:  # what ranks that have ended had started goes on alone, and is no rank
        by_parent.pop(1, None)
    note = tr("{count} jobs of this host have one address, {name}: told apart by what started them",
              count=len(by_parent), name=name)  # fmt: skip
    return [
        Job(f"{name} ({parent})", int(size or 0), [own[rank] for rank in sorted(own)],
            notes=[note] if len(by_parent) > 1 else [])
        for parent, own in sorted(by_parent.items())
    ]  # fmt: skip


def _find_ended(job: Job, processes: Mapping[int, Process]) -> list[Ended]:
    """Return the ranks of this host that have no process, as far as it is proved that they belong to this host.

    Nothing where a process may be one of them: its environment may be hidden, or written over by a title.
    """
    if job.counted:
        return []
    expected = {rank for member in job.members for rank in _ranks_beside(member, job.world_size)}
    here = {member.rank for member in job.members}
    missing = sorted(expected - here)
    parents = {member.process.parent for member in job.members} - {1}
    pids = {member.process.pid for member in job.members}
    beside = [one for one in processes.values() if one.parent in parents and one.pid not in pids]
    if any(one.state not in "ZX" and one.is_python and not _is_beside_ranks(one) for one in beside):
        return []
    names = {member.process.name for member in job.members}
    uncollected = [one for one in beside if one.state == "Z" and (one.name in names or one.name.startswith("python"))]
    if len(missing) != len(uncollected):
        return [Ended(rank) for rank in missing]
    uncollected.sort(key=lambda one: (one.started, one.pid))  # a launcher starts its ranks in their order
    return [Ended(rank, exit_code(one.exit_status)) for rank, one in zip(missing, uncollected, strict=True)]


def _ranks_beside(member: Member, world_size: int) -> range:
    """Return the ranks that run on the host of one of them.

    torch's agents give each host ranks that follow one another; MPI and Slurm deal them out as they were told to. A
    loopback address reaches this host only, unless the program connects by another one.
    """
    environ = member.process.environ or {}
    local = _numbers(environ, _LOCAL_VARIABLES)
    if local is not None and "TORCHELASTIC_RUN_ID" in environ:
        first = member.rank - local[0]
        return range(max(first, 0), min(first + local[1], world_size))
    hosts = [environ[name] for name in _HOSTS_VARIABLES if name in environ]
    alone = local[1] == world_size if local is not None else environ.get("MASTER_ADDR", "") in LOOPBACK
    return range(world_size) if alone and all(number == "1" for number in hosts) else range(0)


def without(job: Job, pids: AbstractSet[int], processes: Mapping[int, Process]) -> Job:
    """Return the job without processes that are no ranks any more, and their ranks among `ended`."""
    alive = [one for one in job.members if one.process.pid not in pids]
    if len(alive) == len(job.members):
        return job
    gone = {one.rank for one in job.members} - {one.rank for one in alive}
    left = replace(job, members=alive, ended=[])
    known = {one.rank: one for one in [*job.ended, *_find_ended(left, processes)]}
    left.ended = [known.get(rank, Ended(rank)) for rank in sorted(gone | set(known))]
    return left


def with_late(jobs: Sequence[Job], now: Sequence[Job]) -> list[Job]:
    """Return the jobs without ended ranks that run now: they had not been started yet."""
    running = {(job.name, job.world_size, one.rank) for job in now for one in job.members}
    return [
        replace(job, ended=[one for one in job.ended if (job.name, job.world_size, one.rank) not in running])
        for job in jobs
    ]


def exit_code(status: int | None) -> int | None:
    """Return the exit code in a status as wait() gives it, negative for a signal.

    >>> exit_code(9), exit_code(3 << 8), exit_code(None)
    (-9, 3, None)
    """
    if status is None:
        return None
    return -(status & 0x7F) if status & 0x7F else status >> 8


def _titled(processes: Mapping[int, Process], taken: set[int]) -> list[Job]:
    """Return the workers of inference servers and Ray's actors, which have written over their environment."""
    servers: dict[tuple[int, str], list[Process]] = defaultdict(list)
    actors: dict[tuple[int, str], list[Process]] = defaultdict(list)
    for process in processes.values():
        if process.pid in taken or process.state in "ZX":
            continue
        kind = next((kind for pattern, kind in _TITLES if pattern.match(process.command)), None)
        if kind is not None:
            servers[process.parent, kind].append(process)
        elif (found := _RAY.match(process.command)) and _has_torch(process.pid):
            above = processes.get(process.parent)
            if above is None or not _RAY.match(above.command):  # what an actor forks has its title
                actors[process.parent, found[1]].append(process)
    jobs = [_counted(f"Ray {name} ({parent})", found) for (parent, name), found in actors.items()]
    for (parent, kind), some in servers.items():
        jobs += _engines(f"{kind} ({parent})", some)
    return [job for job in jobs if len(job.members) > 1]


def _engines(name: str, some: Sequence[Process]) -> Iterator[Job]:
    """Yield the jobs of workers that one process has started, one a replica where their titles tell these apart."""
    at = {one.pid: coordinates(one.command.split("\0")[0]) for one in some}
    inner = ("PP", "PCP", "TP")
    replicas: dict[int | None, list[Process]] = defaultdict(list)
    distinct = len({tuple(at[one.pid].get(axis) for axis in inner) for one in some}) == len(some)
    for one in some:
        replicas[None if distinct else at[one.pid].get("DP")].append(one)
    for replica, own in sorted(replicas.items(), key=lambda item: item[0] or 0):
        sizes = {axis: 1 + max(at[one.pid].get(axis, 0) for one in own) for axis in inner}
        ranks = {one.pid: 0 for one in own}
        for axis in inner:
            ranks = {pid: rank * sizes[axis] + at[pid].get(axis, 0) for pid, rank in ranks.items()}
        if len(set(ranks.values())) == len(own):
            members = sorted((Member(ranks[one.pid], one) for one in own), key=lambda member: member.rank)
            note = tr("the ranks are those of one engine, by the titles of its workers")
            shown = name if replica is None else f"{name} DP{replica}"
            yield Job(shown, sizes["PP"] * sizes["PCP"] * sizes["TP"], members, notes=[note])


def _counted(name: str, some: Iterable[Process]) -> Job:
    """Return a job of processes that tell no rank."""
    members = [Member(Pid(one.pid), one) for one in sorted(some, key=lambda one: one.pid)]
    return Job(name, len(members), members, notes=[NO_RANKS], counted=True)


def without_servers(job: Job, pids: AbstractSet[int]) -> Job:
    """Return a job that was counted without processes that have turned out to be no ranks."""
    kept = [one for one in job.members if one.process.pid not in pids]
    return replace(job, members=kept, world_size=len(kept)) if job.counted else job


def with_ranks(job: Job, groups: Mapping[int, tuple[int, int]], variables: Mapping[int, int]) -> Job:
    """Return a job that was counted with its ranks, where what its processes stand in proves them.

    `groups` has rank and size within the default group, of those that are in a call of it. `variables` has the
    program's own variables named rank, which count for the others where they are right for these.
    """
    sizes = {size for _, size in groups.values()}
    if not job.counted or len(sizes) != 1:
        return job
    (size,) = sizes
    ranks = {pid: rank for pid, (rank, _) in groups.items()}
    left = [one.process.pid for one in job.members if one.process.pid not in ranks]
    if len(left) == 1 and size == len(job.members):
        ranks[left[0]] = sum(range(size)) - sum(ranks.values())
    elif all(variables.get(pid) == rank for pid, rank in ranks.items()):
        ranks.update((pid, variables[pid]) for pid in left if pid in variables)
    distinct = {rank for rank in ranks.values() if 0 <= rank < size}
    if len(distinct) < len(job.members) or len(ranks) > len(job.members):
        return job
    members = sorted((replace(one, rank=ranks[one.process.pid]) for one in job.members), key=lambda one: one.rank)
    return Job(job.name, size, members, counted=False)


def _spawned(processes: Mapping[int, Process], taken: set[int]) -> list[Job]:
    """Return what multiprocessing has started with torch in it and no rank in its environment (`mp.spawn`)."""
    groups: dict[int, list[Process]] = defaultdict(list)
    for process in processes.values():
        if (
            _SPAWNED.search(process.command)
            and process.state not in "ZX"
            and not taken.intersection(ancestors(process, processes))
        ):
            above = processes.get(process.parent)
            if process.pid not in taken and rank_of((above.environ if above else None) or {}) is None:
                groups[process.parent].append(process)
    jobs = [
        _counted(f"multiprocessing ({parent})", (one for one in found if _has_torch(one.pid)))
        for parent, found in groups.items()
    ]
    return [job for job in jobs if len(job.members) > 1]


def ancestors(process: Process, processes: Mapping[int, Process]) -> Iterator[int]:
    """Yield the processes that have started a process, the nearest first."""
    seen: set[int] = set()
    while process.parent in processes and process.parent not in seen:
        seen.add(process.parent)
        process = processes[process.parent]
        yield process.pid


def _has_torch(pid: int) -> bool:
    return "libtorch" in read_file(PROC / str(pid) / "maps")
