"""Ranks of the job that processes, pods, local ranks, GPUs and engines' workers are, from the lines that prove it.

Lines are read one by one: each may tie a rank to a process number, a host, a pod or a local rank. What two ranks claim
is nobody's. A local rank becomes a global one with the first rank of its node, and that counts for the node alone of
which it is told: the host or the pod in front of the line, the file, or the folder of torchrun's --log-dir.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ncclguard_explain import places
from ncclguard_explain.census import Census
from ncclguard_explain.facts import MAX_RANK, Fact, Kind
from ncclguard_explain.records import Prefix, Source, split_prefix

Key = TypeVar("Key")
#: The rank of what several ranks claim.
NOBODY = -1
#: Statements of each kind that are kept, to bound memory.
MOST = 100_000

# The rank of the speaker, as Lightning, Megatron, Ray Train, Slurm, vLLM and JAX programs print it; not of a peer.
_OWN_RANK = re.compile(
    r"(?<!for )(?<!from )(?<!to )(?<!by )(?<!of )(?<!remote )(?<!peer )"
    r"(?:\bGLOBAL_RANK: |\b[Gg]lobal[ _]rank[ =:]+|\bworld_rank=|\bSLURM_PROCID[ =:]+|\bJAX process: |^Process index: | - rank\[(?=\d+\] - )|\bprocess_id=(?=\d+,? num_processes=)|\bRANK=(?=\d+(?: WORLD_SIZE=\d+)? LOCAL_RANK=)|\[rank=(?=\d+, world_size=)|^rank[= ](?=\d+ world(?:_size)?[= ]\d)"
    r"|\brank (?=\d+ in world size \d+ is assigned as )|\b[Rr]ank (?=\d+ of \d+ on host )|\bRank (?=\d+: Completed store-based barrier)|\b[Rr]ank[ =:]+(?=.*\blocal[_ ]rank))(\d{1,6})\b(?! ?[*+] )"
)
# In front of a program's own lines; in lower case it is vLLM's, of a group.
_OF_ALL = re.compile(r"\[(?:RANK|Rank) (\d{1,6})/(\d{1,6})\] ")
_LOCAL_RANK = re.compile(r"\b(?:LOCAL_RANK|local[ _]rank)[ =:]+(\d{1,4})\b")
# The environment of one rank, as a container's entry point prints it.
_ONE_PROCESS = re.compile(r"\bNPROC(?:_PER_NODE)?=1\b")
#: The name of a pod or host right before its RANK.
_NAME_BEFORE = re.compile(r"(?:^|[\s\]])([a-z][a-z0-9]*(?:-[a-z0-9]+)*-\d+) RANK=")
#: The store of a program, and not of a launcher, was waited in until so many of the ranks had come.
_CLIENTS = re.compile(r"waiting for clients\. \d+/(\d+) clients joined")
_ENVIRONMENT = re.compile(r"(?:^(?=.*\bWORLD_SIZE=).*(?<![A-Z_])RANK=(\d{1,6})\b|^(?:export )?RANK[=:] ?(\d{1,6})\s*$)")
_WORLD = re.compile(r"\bWORLD_SIZE=(\d{1,6})\b")
# What `kubectl describe` and `kubectl get` head, in a log of commands.
_DESCRIBED = re.compile(
    r"^Name: +(\S+)$|\bkubectl (?:-\S+ \S+ )*(?:get|describe|logs) (?:pods?[ /])?([a-z0-9][a-z0-9.\-]*\d)\b"
)
_NEXT_COMMAND = re.compile(r"[$#+>] |={3,}|-{3}|[\w.\-]+@\S+ ?.*[$#] |.*\bkubectl ")
# Rows of `kubectl get pods`, which may have been joined: pod and status.
_LISTED = re.compile(r"(?<![\w.\-/])(?:pod/)?([a-z0-9][a-z0-9.\-]*\d\w*) +\d+/\d+ +(\w+)")
# "gpu-17: ranks 8-15", as launchers and people write it; "NODE_RANK: 2" in `kubectl describe` of a pod
_RANGES = re.compile(
    r"(?<![\w.\-])([A-Za-z][\w.\-]*\w)(?:: | ?[=\-]> |(?<=\d) (?:has |holds |runs )?)(?:(?i:node[_ ]rank)[ =:]+(?P<node>\d+),? (?:-> )?)?(?:global )?ranks (\d{1,6})(?:-|\.\.)(\d{1,6})\b"
)
#: "10.4.0.11 ranks 0-7", "trt-b slots=8 (ranks 8-15)", "rank 4-7 ip-10-0-2-44", "ranks 8-15: gpu-b".
_HOST_NAME = r"((?:[A-Za-z][a-zA-Z.\-]{0,40}\d[\w.\-]{0,60}|(?<==)[A-Za-z]\w{0,40}-[\w\-]{0,60}|\d{1,3}(?:\.\d{1,3}){3})(?<![.\-]))"
_HAS_RANGE = re.compile(
    rf"(?<![\w.\-/:])(?:\w+=)?{_HOST_NAME}(?: slots=\d+)?(?::? | ?[=\-]> ?|: ?)(?:\((?:global )?ranks? (\d{{1,6}})-(\d{{1,6}})\)|(?:global )?ranks? (\d{{1,6}})-(\d{{1,6}})\b)"
)
_NUMBERED_NODE = re.compile(r"(?i)\bnode[_ ]rank\b")
_RANGE_HAS = re.compile(
    rf"\b[Rr]anks? (\d{{1,6}})-(\d{{1,6}})(?: ?: ?| ?[=\-]> ?| @ ?| )(?!in\b|of\b){_HOST_NAME}(?![\w.:/])"
)
_LISTED_ON = re.compile(
    r"(?<![\w.\-])([A-Za-z][\w.\-]*\d\w*)(?:: | ?[=\-]> )(?:global )?ranks (\d{1,6}(?:, ?\d{1,6})+)\b"
)
_RANGES_ON = re.compile(
    r"\b[Rr]anks? (\d{1,6})(?:-|\.\.)(\d{1,6}) (?:\w+ )?on (?:node |host |pod )?([a-z][\w.\-]*\d)\b"
)
# A row of a table, in columns of which the first are names of a host: "i-0ce6d3  p5-3  impaired  ranks 24-31"
_TABLE = re.compile(
    r"([A-Za-z][\w.\-]*\d[\w.\-]*) {2,}(?:([A-Za-z][\w.\-]*\d[\w.\-]*) {2,})?(?:.* )?ranks? (\d{1,6})-(\d{1,6})\b"
)
_DEVICE = re.compile(r"\(PID:(\d+), Device:(\d{1,3}), RankID:(\d{1,6})\)")  # torch_npu
_ADDRESS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]*\d)")
_SENDS = re.compile(r"Channel \d+(?:/\d+)? ?: (\d+)\[\w+\] -> (\d+)\[\w+\] \[(send|receive)\]")  # NCCL transport/net.cc
_ENGINE = re.compile(r"EngineCore_DP(\d{1,6})$")
_NODE_OF_POD = re.compile(r"^\s+NODE_RANK: +(\d{1,5})\b")
_RANK_OF_POD = re.compile(r"^\s+RANK: +(\d{1,6})\s*$")
_GPUS_OF_POD = re.compile(r"^\s+(?:nvidia|amd)\.com/gpu: +(\d{1,3})\s*$")
_WORLD_OF_POD = re.compile(r"^\s+WORLD_SIZE: +(\d{1,6})\s*$")
_OF_GROUP = re.compile(r"\[rank (\d{1,6})/(\d{1,6})\]")  # vLLM: in a group of that size
_OF_GLOO = re.compile(r"\[Gloo\] Rank (\d{1,6}) is connected to (\d{1,6}) peer ranks")
_PROCESS = re.compile(
    r"(?<!local )(?<!from )(?<!for )(?<!to )(?<!remote )(?:\b|\b(?:global|GLOBAL|world|WORLD)_)(?:[Rr]ank|RANK)[ =:]+(?P<rank>\d{1,6})\b[^|;]{0,40}?\bpid[ =:]+(?P<pid>\d{1,9})\b"
)
_LISTED_RANK = re.compile(
    r"\bpid[ =:]+(\d{1,9})\b[^|;]{0,120}?(?:(?<![A-Z_])RANK[=:]|(?<![\w\-])(?:--(?:global[_-])?rank[ =]|(?:(?:global|world)[_ ])?rank=|(?:global|world)[_ ]rank:? ?))(\d{1,6})\b"
)
# A command line behind its process, as shells report an end ("a.sh: line 3: 4188 Killed  python ...") and ps lists it.
# With `--multiprocessing-distributed` of torch's ImageNet example it is the node that has this rank.
_COMMAND = re.compile(
    r"^(?!.*multiprocessing[_-]distributed)(?:\S*: line \d+: +|\[\d+\] *[+\-]? +|[a-z_][\w.\-]*\+? +)?(\d{2,9})(?= ).*?"
    r"(?<![\w\-])--(?:global[_-])?rank[ =](\d{1,6})\b"
)
#: The host whose kernel's log a command prints: of the prompt, or of ssh.
_KERNEL_OF = re.compile(
    r"(?:^\[?(?:[\w.\-]+@)?([A-Za-z][\w.\-]*\d)\b[^$#>]{0,60}[$#>] ?|\bssh (?:-\S+ )*(?:\w+@)?([A-Za-z][\w.\-]*\w) .*)"
    r".*\b(?:dmesg|journalctl)\b"
)
_SPIED = re.compile(
    r"(?:py-spy dump\b.*?(?:--pid|-p)[ =]|^Process (?=\d+: )|^={2,} (?=\d+ ))(\d{1,9})\b.*?\b(?:RANK|[Rr]ank)[ =:]*(\d{1,6})\b"
)
_ON_POD = re.compile(r"\b(?:RANK|rank)[ =:]+(\d{1,6})\b.{0,30}?\bpod[ =:]+([a-z0-9][a-z0-9.\-]*[a-z0-9])")
_OWN_PID = re.compile(r"(?:\[rank \d{1,6}\] ?)?pid[ =:]+(\d{1,9})\b")
# setproctitle of the engines
#: A process of which a command prints the environment.
_RANK_ALONE = re.compile(r"(LOCAL_)?RANK=(\d{1,6})\s*")
_PID_ALONE = re.compile(r"={0,3} ?(?:pid[ =:]*)?(\d{2,9})\s*={0,3}", re.IGNORECASE)
_SPIED_PLACE = re.compile(r"(?:^Process |--pid )(\d{1,9}) ?: (?:sglang::scheduler_|VLLM::)(\w+)")
_OF_SPY = re.compile(r"^Process (\d{1,9}): .*--local[-_]rank[ =](\d{1,4})\b")  # py-spy's head of a dump
# A group that a trainer and its engines build, by OpenRLHF's and others' words: in it each has its number.
_JOINS = re.compile(r"\binit_process_group: .*?\brank=(\d{1,6}), world_size=(\d{1,6}), group_name=")
# Ray Train (python/ray/train/_internal/worker_group.py and v2, 2.7 to 2.60): where each rank runs.
_PLACED = re.compile(r"ip=([\d.]+), pid=(\d{1,9})\) world_rank=(\d{1,6})")
_ON_HOST = re.compile(
    r"(?<!to )(?<!remote )(?<!for )(?<!from )\bhost(?:name)?(?:[=:] ?| )([A-Za-z][\w.\-]*\d[\w.\-]*)(?!:\d)\b"
)
_HOST_OF_RANK = re.compile(
    r"^([A-Za-z][\w\-]*\d[\w.\-]*):? (?=\S*RANK|SLURM_)|\b(?:SLURMD_NODENAME|HOSTNAME|NODE_?NAME)[=:] ?([A-Za-z][\w.\-]*\d[\w.\-]*)"
)
_TASK_ON = re.compile(r"\b(?:task|rank|process) (\d{1,6}) on (?:node |host )?([A-Za-z][\w.\-]*\d(?:[\w.\-]*\w)?)")
#: What a task of srun says of itself: "rank 12/16 on gpu-3", behind the number that srun gives it.
_OF_TASK = re.compile(
    r"(?:hvd |horovod |global )?[Rr]ank +(\d{1,6})/\d{1,6} (?:local(?:[_ ]rank)? \d+ )?on (?:node |host )?([A-Za-z][\w.\-]*\d(?:[\w.\-]*\w)?)\b"
)
_OF_NCCL = re.compile(r"([A-Za-z][\w.\-]*):(\d+):\d+ \[\d+\] (?:\S+ )?NCCL ")  # behind a task's number
# SGLang (python/sglang/srt/utils/common.py, 0.4 to 0.5)
_DUMPED = re.compile(r"(?:\[[^\]]*?((?: (?:DP|PP|TP|EP)\d+)+)\] )?[Pp]yspy dump for PID (\d+)")
# The node's place in the job and the ranks on a node. torchrun takes --node_rank for its static rendezvous alone.
_NODE_RANK = re.compile(r"(?:--?|\b|PET_)(?:node|machine|NODE|MACHINE)[_-](?:rank|RANK)['\"]?[\s=:]+['\"]?(\d{1,5})\b")
#: The host of which a line is that tells a node's rank: in front of it, behind ssh, or named.
_HOST_TOLD = re.compile(
    r"^\[?(?:\w+@)?([A-Za-z][\w.\-]*\d[\w.\-]*)(?:(?:\]:?|:|\$| \||>) | (?=NODE_RANK=))|\bssh (?:-\S+ )*(?:\w+@)?([A-Za-z][\w.\-]*\d)\b|"
    r"\b(?:HOSTNAME|SLURMD_NODENAME|(?i:host(?:name)?|on node|on host|on))[=: ]+([A-Za-z][\w\-]*\d[\w.\-]*)"
)
_PER_NODE = re.compile(
    r"(?:nproc[_-]per[_-]node|NPROC_PER_NODE|num_local_procs|gpus_per_node|GPUS_PER_NODE)['\"]?[\s=:]+['\"]?(\d{1,3})\b"
)
_ACCELERATE = re.compile(r"--num_processes[ =](\d{1,6})\b.*--num_machines[ =](\d{1,5})\b")
_ASSIGNED_BY_STORE = re.compile(r"rdzv[_-](?:backend|endpoint)")
_BACKEND = re.compile(r"rdzv[_-]backend['\"]?[\s=:]+['\"]?(?!static\b)\w")
_GLOBAL_RANKS = re.compile(r"\bglobal_ranks=\[([\d, ]+)\]")  # torchelastic's agent/server/api.py, 1.9 to 2.15
# DeepSpeed launcher/launch.py, 0.5 to 0.18
_MAPPING = re.compile(r"global_rank_mapping=.*?(\{.*\})")
_SPAWNED = re.compile(r"process (\d{1,9}) spawned with command:.*--local[_-]rank=(\d{1,4})\b")
_BUS = re.compile(r"\bcudaDev (\d{1,3})(?:.*?\bbusId ([0-9a-f]{1,8}))?")
# A table of programs: "rank 5: cuda:5 PCI 0000:9b:00.0"
_BUS_OF = re.compile(r"\b[0-9a-f]{4,8}:([0-9a-f]{2}:[0-9a-f]{2})\.0\b", re.IGNORECASE)
_NAMED_HOST = re.compile(r"\b(?:host(?:name)?|node)[ =:]+([A-Za-z][\w.\-]*\w)\b")
_RANK_OF_BUS = re.compile(r"\W*[Rr]ank[ =:]*(\d{1,6})\b")
_OTHER_GPU = re.compile(r"\bGPU [1-9]\b|\bcuda:[1-9]\b")  # not the one GPU of a container with one rank
_TROUBLE = re.compile(r"rror|xception|imed out|imeout|fail|kill")
#: What is said of a host and not of the process that prints it.
OF_A_HOST = frozenset(
    {Kind.EXIT, Kind.WORKER_DIED, Kind.KERNEL_OOM, Kind.XID, Kind.NIC, Kind.SCHEDULER, Kind.RAS, Kind.GUARD}
)


def blocks_of(told: Mapping[str, set[int]], size: int | None = None) -> tuple[int, dict[str, int]]:
    """Return the length of the blocks in which hosts have their ranks, and each host's number; 0 where they do not.

    The block of each lies between two multiples of that length, and is no other's. Where the `size` is not given, one
    host at least has its block full.
    """
    size = size or max(map(len, told.values()), default=0)
    blocks = {host: {rank // size for rank in ranks} for host, ranks in told.items()}
    apart = all(len(block) == 1 for block in blocks.values()) and len({*map(min, blocks.values())}) == len(told)
    return (size, {host: min(block) for host, block in blocks.items()}) if apart else (0, {})


def _in_communicator(facts: Sequence[Fact], told_world: int) -> dict[str, set[int]]:
    """Return the ranks of each host of which NCCL's communicator of the whole job shows all: equal blocks, one each."""
    inits = [fact for fact in facts if fact.kind is Kind.JOINED and fact.name == "init" and fact.number is not None]
    seen: dict[str, set[int]] = {}
    for fact in inits:
        seen.setdefault(fact.host, set()).add(fact.number or 0)
    size, blocks = blocks_of(seen)
    whole = {fact.completed for fact in inits} == {told_world} == {size * len(blocks)}
    if not whole or any(fact.name == "JOB REQUEUE" for fact in facts) or "" in seen:
        return {}
    return {host: ranks for host, ranks in seen.items() if len(ranks) == size}


def _are_local(found: re.Match[str]) -> bool:
    """Return whether a node's ranks are counted from its own first one."""
    first, last = int(found[3]), int(found[4])
    return found["node"] is not None and first != int(found["node"]) * (last - first + 1)


def _prove(known: dict[Key, int], key: Key, rank: int) -> None:
    if len(known) < MOST or key in known:
        known[key] = rank if known.get(key, rank) == rank else NOBODY


@dataclass
class RankMap:
    """The proofs in a log of which rank is which; `settled` puts them together.

    A scope is what a local rank counts in: the name in front of the lines, "#3" for the fourth input, or a folder.
    """

    processes: dict[tuple[str, int], int] = field(default_factory=dict)  # (host, pid), the host may be ""
    hosts: dict[str, set[int]] = field(default_factory=dict)  # host or pod -> the ranks whose lines name it
    speakers: dict[str, set[int]] = field(default_factory=dict)  # name or "#3" -> the ranks that speak under it
    environments: dict[str, set[int]] = field(default_factory=dict)  # the same, by the RANK of a container
    worlds: set[int] = field(default_factory=set)  # WORLD_SIZE beside these
    _pods: dict[str, set[int]] = field(default_factory=dict)  # the same, by the name before it
    with_local: set[int] = field(default_factory=set)  # those of these ranks that say their LOCAL_RANK too
    described: dict[int, str] = field(default_factory=dict)  # input -> the pod that its last lines are about
    kernels: dict[int, str] = field(default_factory=dict)  # input -> the host whose kernel its last lines are of
    first: dict[str, int] = field(default_factory=dict)  # scope -> the rank that is its local rank 0
    by_device: dict[str, int] = field(default_factory=dict)  # host -> the same, if NCCL's devices are local ranks
    places: dict[str, int] = field(default_factory=dict)  # name of an engine's process -> its rank
    parallel: dict[str, int] = field(default_factory=dict)  # sizes of groups that an engine states: tp, pp, dp, ep
    replicas: bool = False  # the log is of several copies of one engine
    shared: bool = False  # vLLM's engines share the experts of one model, and so one world
    _engines: dict[int, int] = field(default_factory=dict)  # pid of an engine -> its place among vLLM's replicas
    _buses: dict[tuple[str, str], int] = field(default_factory=dict)  # (host, bus as NCCL prints it)
    _gpus: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # (host, rank) -> the buses that a table tells
    _names: set[str] = field(default_factory=set)
    _actors: dict[str, set[tuple[str, int]]] = field(default_factory=dict)  # name of a class of actors -> (host, pid)
    _local: dict[tuple[str, int], int] = field(default_factory=dict)  # (scope, pid) -> local rank
    _local_of: dict[int, int] = field(default_factory=dict)  # pid -> local rank, NOBODY where two nodes have it
    _nodes: dict[str, int] = field(default_factory=dict)  # scope -> node, of DeepSpeed's launcher
    _of_host: set[str] = field(default_factory=set)  # those of these scopes that are hosts of which a line tells it
    _started: list[dict[int, int]] = field(default_factory=list)  # pid -> its number, of each list of an input
    _headed: dict[str, set[tuple[int, int]]] = field(default_factory=dict)  # pod -> rank and size before its lines
    _spans: dict[str, range] = field(default_factory=dict)  # host -> its ranks, as a line tells them last
    _gpus_of: dict[str, set[int]] = field(default_factory=dict)  # pod -> what its containers may use at most
    _worlds_of_pods: set[int] = field(default_factory=set)  # WORLD_SIZE in their descriptions
    _assigned: bool = False  # torchrun's store gives the nodes their ranks, whatever they were given
    _of_group: dict[tuple[int, int], int] = field(default_factory=dict)  # (pid, rank) -> the group's size

    _of_gloo: dict[tuple[str, int, int], int] = field(default_factory=dict)  # (host, pid, rank) -> the group's size
    _sizes: set[int] = field(default_factory=set)  # the numbers of processes that torchrun's nodes are told to start
    _per_node: set[int] = field(default_factory=set)  # the numbers of processes that DeepSpeed's launchers start
    _tasks: dict[str, dict[int, set[int]]] = field(default_factory=dict)  # host -> task of srun -> its processes
    labelled: frozenset[int] = frozenset()  # inputs of which each line begins with its rank
    _census: Census = field(default_factory=Census)

    # --- reading ---

    def process(self, pid: int | None, rank: int, host: str = "") -> None:
        """Note that a process is a rank."""
        if pid is not None:
            for where in {host, ""}:
                _prove(self.processes, (where, pid), rank)

    def listed(self, started: Mapping[int, int], hosts: Mapping[int, str]) -> None:
        """Note what an input lists: its processes, if they are numbered from 0 on, and the hosts of ranks."""
        if len(started) > 1 and set(started.values()) == set(range(len(started))):
            self._started.append(dict(started))
        for rank, host in hosts.items() if len(hosts) > 1 else ():
            self.hosts.setdefault(host, set()).add(rank)

    def table(self, servers: Sequence[object]) -> int:
        """Note the ranks of HCCL's rank table, by server and device; return how many it has."""
        count = 0
        for server in servers:
            name, devices = (
                (server.get("server_id"), server.get("device")) if isinstance(server, Mapping) else ("", None)
            )
            for device in devices if isinstance(devices, list) else ():
                rank, at = (
                    str(device.get(name)) if isinstance(device, Mapping) else "" for name in ("rank_id", "device_id")
                )
                if rank.isdecimal() and at.isdecimal():
                    _prove(self.first, str(name), max(int(rank) - int(at), NOBODY))
                    count += 1
        return count

    def read(self, text: str, prefix: Prefix, source: Source, following: Callable[[int], Sequence[str]]) -> None:
        """Note what a line proves."""
        where = prefix.host or prefix.container
        scope = where or f"#{source.index}"
        if ("dmesg" in text or "journalctl" in text) and (kernel := _KERNEL_OF.search(text)):
            self.kernels[source.index] = kernel[1] or kernel[2]
        if ("Name: " in text or "kubectl " in text) and (described := _DESCRIBED.search(text)):
            self.described[source.index] = described[1] or described[2]
            if described[2] and " logs " in text:
                self._of_log(described[2], following(200))
        rank = prefix.rank if prefix.basis == "prefix" and (prefix.rank or 0) < MAX_RANK else None
        if rank is not None and not places.coordinates(prefix.place):
            self.process(prefix.pid, rank, prefix.host)
            if prefix.local_rank is not None:  # torchrun --tee, in front of the rank's own
                _prove(self.first, scope, max(rank - prefix.local_rank, NOBODY))
        headed = rank if prefix.basis != "launcher" else prefix.rank  # mpirun's own number in front of a line
        if "pid" in text and headed is not None and (own := _OWN_PID.match(text)):
            self.process(int(own[1]), headed)
        if "[rank=" in prefix.place and (told := places.rank_of(prefix.place, {})) is not None:
            self.process(prefix.pid, told, prefix.host)
        if prefix.place and len(self._names) < MOST:
            self._names.add(prefix.place)
            if prefix.pid is not None and len(self._actors) < MOST:
                self._actors.setdefault(prefix.place, set()).add((prefix.host, prefix.pid))
        announces = "ank" in text or "RANK" in text or "PROCID" in text or prefix.basis in ("task", "launcher")
        if announces and rank is None and not _TROUBLE.search(text):
            self._census.read(text, prefix, source.index)
        if rank is None and (
            "ank" in text
            or "RANK" in text
            or "PROCID" in text
            or "process: " in text
            or "process_id=" in text
            or "Process index: " in text
        ):
            rank = self._told(text, prefix, scope)
        if rank is not None and where:
            self.hosts.setdefault(where, set()).add(rank)
        if rank is not None and (task := _TASK_ON.search(text)) and int(task[1]) == rank:
            self.hosts.setdefault(task[2], set()).add(rank)
        number = prefix.node if prefix.basis == "task" else prefix.rank if prefix.basis == "launcher" else None
        if number is not None and (task := _OF_TASK.match(text)) and int(task[1]) == number:
            self.hosts.setdefault(task[2], set()).add(int(task[1]))
        if prefix.basis == "task" and "NCCL" in text and (task := _OF_NCCL.match(text)):
            self._tasks.setdefault(task[1], {}).setdefault(prefix.node or 0, set()).add(int(task[2]))
        if rank is not None and "host" in text and (found := _ON_HOST.search(text)):
            self.hosts.setdefault(found[1], set()).add(rank)
            if (local := _LOCAL_RANK.search(text)) and not _TROUBLE.search(text):
                _prove(self.first, found[1], rank - int(local[1]))
        elif rank is not None and (found := _HOST_OF_RANK.search(text)):
            self.hosts.setdefault(found[1] or found[2], set()).add(rank)
        if rank is not None:
            self.speakers.setdefault(scope, set()).add(rank)
        self._assigned |= "rdzv" in text and _BACKEND.search(text) is not None
        if "ank" in text or "spawned" in text or "RANK" in text or "Rendezvous" in text:
            self._of_nodes(text, prefix, scope, following)
        if ("ranks " in text or ".." in text or "rank " in text) and not _TROUBLE.search(text):
            spans = [(one[1], one[3], one[4]) for one in _RANGES.finditer(text) if not _are_local(one)]
            spans += [(host, low, high) for low, high, host in _RANGES_ON.findall(text)]
            spans += [
                (one[0], one[1] or one[3], one[2] or one[4])
                for one in _HAS_RANGE.findall(text)
                if not _NUMBERED_NODE.search(text)
            ]
            spans += [(host, low, high) for low, high, host in _RANGE_HAS.findall(text)]
            if row := _TABLE.match(text):
                spans += [(name, row[3], row[4]) for name in row.groups()[:2] if name]
            for host, listed in _LISTED_ON.findall(text):
                self.hosts.setdefault(host, set()).update(int(number) for number in listed.split(","))
            for host, low, high in spans if "group" not in text else ():
                if int(low) <= int(high) < int(low) + 4096:
                    self._span(host, range(int(low), int(high) + 1))
        if "RankID:" in text and (device := _DEVICE.search(text)):
            self.process(int(device[1]), int(device[3]), prefix.host)
            _prove(self.first, scope, max(int(device[3]) - int(device[2]), NOBODY))
        if prefix.pid is not None and (engine := _ENGINE.match(prefix.place)):
            self._engines.setdefault(prefix.pid, int(engine[1]))
        self.shared |= "enable-expert-parallel" in text or "enable_expert_parallel" in text
        pod = self.described.get(source.index, "")
        if pod and text.startswith(" ") and (node := _NODE_OF_POD.match(text)):
            _prove(self._nodes, pod, int(node[1]))
        if pod and text.startswith(" ") and (own_rank := _RANK_OF_POD.match(text)):
            self.environments.setdefault(pod, set()).add(int(own_rank[1]))
        if pod and text.startswith(" ") and (gpus := _GPUS_OF_POD.match(text)):
            self._gpus_of.setdefault(pod, set()).add(int(gpus[1]))
        if pod and text.startswith(" ") and (size := _WORLD_OF_POD.match(text)):
            self._worlds_of_pods.add(int(size[1]))
        if "pod" in text and (on_pod := _ON_POD.search(text)):
            self.hosts.setdefault(on_pod[2], set()).add(int(on_pod[1]))
        if "::" in text and (placed := _SPIED_PLACE.search(text)):
            of_place = places.rank_of(placed[2], self.parallel)
            if of_place is not None:
                self.process(int(placed[1]), of_place)
        if ":00." in text and not _TROUBLE.search(text) and len(buses := _BUS_OF.findall(text)) == 1:
            row = _RANK_OF_BUS.match(text)
            of_bus = int(row[1]) if row else prefix.rank if prefix.basis == "launcher" else None
            if of_bus is not None:
                on = where or (named[1] if (named := _NAMED_HOST.search(text)) else "")
                self._gpus.setdefault((on, of_bus), set()).add(f"{buses[0].lower().replace(':', '')}0".lstrip("0"))
        if "RANK=" in text and (alone := _RANK_ALONE.fullmatch(text)):
            beside = next((hit for row in following(1) if (hit := _PID_ALONE.fullmatch(row))), None)
            if beside is not None and alone[1]:
                _prove(self._local, (scope, int(beside[1])), int(alone[2]))
            elif beside is not None:
                self.process(int(beside[1]), int(alone[2]), prefix.host)
        if "ocal" in text and (spied := _OF_SPY.search(text)):
            _prove(self._local, (scope, int(spied[1])), int(spied[2]))
        if "yspy dump for" in text and (dumped := _DUMPED.search(text)) and (dumped[1] or dumped.start() == 0):
            of_place = places.rank_of((dumped[1] or prefix.place).strip(), self.parallel)  # lines may have been joined
            if of_place is not None:
                self.process(int(dumped[2]), of_place)

    def _span(self, host: str, ranks: range) -> None:
        """Note a host's ranks: of a job that was started anew the last that was said of a host, or of ranks, counts."""
        earlier = self._spans.get(host)
        if earlier is not None and earlier != ranks:
            self.hosts.get(host, set()).difference_update(earlier)
        for other in [name for name, there in self._spans.items() if name != host and there == ranks]:
            self.hosts.get(other, set()).difference_update(self._spans.pop(other))
        self._spans[host] = ranks
        self.hosts.setdefault(host, set()).update(ranks)

    def _of_log(self, pod: str, rows: Sequence[str]) -> None:
        """Note the ranks that speak in a pod's log, which `kubectl logs` prints up to the next command or heading."""
        for row in itertools.takewhile(lambda row: _NEXT_COMMAND.match(row) is None, rows):
            own, told = split_prefix(row), _OWN_RANK.search(row)
            if headed := _OF_ALL.match(own.text):
                self._headed.setdefault(pod, set()).add((int(headed[1]), int(headed[2])))
            if own.rank is not None and own.basis == "prefix":
                self.hosts.setdefault(pod, set()).add(own.rank)
            elif told is not None and not _TROUBLE.search(row):
                self.hosts.setdefault(pod, set()).add(int(told[1]))

    def _told(self, text: str, prefix: Prefix, scope: str) -> int | None:
        """Return the rank that a line without `[rank3]` says its speaker is; note processes that it lists."""
        if placed := _PLACED.search(text):
            self.process(int(placed[2]), int(placed[3]), placed[1])
            self.hosts.setdefault(placed[1], set()).add(int(placed[3]))
            return None
        if "-rank" in text and (command := _COMMAND.match(text)):
            self.process(int(command[1]), int(command[2]), prefix.host)
            return None
        if _TROUBLE.search(text):
            return None
        if spied := _SPIED.search(text):
            self.process(int(spied[1]), int(spied[2]))
            return None
        if joins := _JOINS.search(text):
            self.process(prefix.pid, int(joins[1]), prefix.host)
            return None
        if of_group := _OF_GROUP.search(text):
            if prefix.pid is not None and len(self._of_group) < MOST:
                self._of_group[prefix.pid, int(of_group[1])] = int(of_group[2])
            return None
        if of_gloo := _OF_GLOO.search(text):
            if prefix.pid is not None and len(self._of_gloo) < MOST:
                self._of_gloo[prefix.host, prefix.pid, int(of_gloo[1])] = int(of_gloo[2]) + 1
            return None
        for listed in _PROCESS.finditer(text):
            self.process(int(listed["pid"]), int(listed["rank"]), prefix.host)
        for pid, number in _LISTED_RANK.findall(text):
            self.process(int(pid), int(number), prefix.host)
        found = _OWN_RANK.search(text)
        if found is not None and "ranks " in text and _HAS_RANGE.search(text):  # what is said of a node
            return None
        if found is None or int(found[1]) >= MAX_RANK or (found[0].startswith("RANK=") and _WORLD.search(text)):
            if own := _ENVIRONMENT.search(text):
                self.environments.setdefault(scope, set()).add(int(own[1] or own[2]))
                self.worlds |= {int(size[1])} if (size := _WORLD.search(text)) else set()
                if _LOCAL_RANK.search(text) or _ONE_PROCESS.search(text):  # of a process, and not of a container
                    self.with_local |= {int(own[1] or own[2])}
                    self.process(prefix.pid, int(own[1] or own[2]), prefix.host)
                if name := _NAME_BEFORE.search(text):
                    self._pods.setdefault(name[1], set()).add(int(own[1] or own[2]))
            return None
        rank = int(found[1])
        self.process(prefix.pid, rank, prefix.host)
        local = _LOCAL_RANK.search(text)
        if local:
            _prove(self.first, scope, rank - int(local[1]))
        return rank

    def _of_nodes(self, text: str, prefix: Prefix, scope: str, following: Callable[[int], Sequence[str]]) -> None:
        """Note the first rank of a node, as launchers tell it."""
        if "Rendezvous complete for workers" in text:
            after = [split_prefix(row) for row in following(40)]
            speaker = prefix.host, prefix.container, prefix.pid, prefix.node
            rows = [text, *(row.text for row in after if (row.host, row.container, row.pid, row.node) == speaker)][:12]
            told = next((found for row in rows if (found := _GLOBAL_RANKS.search(row))), None)
            if told:
                if any(re.search(r"restart_count=[1-9]", row) for row in rows):
                    self.first.pop(scope, None)  # the nodes have come in another order
                ranks = [int(number) for number in re.findall(r"\d+", told[1])]
                _prove(self.first, scope, ranks[0])
                if not scope.startswith("#") and ranks == [*range(ranks[0], ranks[0] + len(ranks))]:
                    self._span(scope, range(ranks[0], ranks[0] + len(ranks)))
        elif "spawned with command" in text and (spawned := _SPAWNED.search(text)):
            _prove(self._local, (scope, int(spawned[1])), int(spawned[2]))
        elif mapping := _MAPPING.search(text):
            lists = re.findall(r"['\"]([^'\"]+)['\"]: \[([\d, ]+)\]", mapping[1])
            node = self._nodes.get(scope, NOBODY)
            told_of = [(scope, lists[node][1])] if 0 <= node < len(lists) else lists
            for host, numbers in told_of:
                _prove(self.first, host, int(re.split(r"\D+", numbers)[0]))
        elif node_rank := _NODE_RANK.search(text):
            if told := _HOST_TOLD.search(text):
                scope = next(filter(None, told.groups()))
                self._of_host.add(scope)
            per_node, accelerate = _PER_NODE.search(text), _ACCELERATE.search(text)
            if "num_local_procs" in text:
                _prove(self._nodes, scope, int(node_rank[1]))
                self._per_node |= {int(per_node[1])} if per_node else set()
            elif per_node and not _ASSIGNED_BY_STORE.search(text):
                self._sizes.add(int(per_node[1]))
                if len(self._sizes) == 1:
                    _prove(self.first, scope, int(node_rank[1]) * int(per_node[1]))
                else:  # of nodes of different sizes no product tells where one begins
                    self.first.clear()
            elif accelerate and int(accelerate[1]) % max(int(accelerate[2]), 1) == 0:
                _prove(self.first, scope, int(node_rank[1]) * (int(accelerate[1]) // int(accelerate[2])))
            elif scope in self._of_host and not per_node and not self._assigned:
                _prove(self._nodes, scope, int(node_rank[1]))

    # --- putting it together ---

    def host_of(self, file: str) -> str:
        """Return the known host or pod that an input is named after, an empty string where there is none."""
        name = file.rsplit("/", 1)[-1]
        known = {*self.hosts, *(host for host, _ in self.processes)} - {""}
        fits = [one for one in known if re.search(rf"(?<![^\W_]){re.escape(one)}(?![^\W_]|-)", name)]
        return max(fits, key=len, default="")

    def ranks_on(self, host: str, local_size: int | None) -> set[int]:
        """Return the ranks that ran on a host or in a pod, as far as the log proves them."""
        found = {rank for name, there in self.hosts.items() if name.split("/")[0] == host for rank in there}
        first = self.first.get(host, NOBODY)
        return found | set(range(first, first + local_size)) if first >= 0 and local_size else found

    def place_of(self, name: str) -> int | None:
        """Return the rank behind the name of an engine's process; a place in one of several copies is none."""
        return places.rank_of(name, self.parallel) if "[rank=" in name or not self.replicas else None

    def pod_of(self, fact: Fact) -> str:
        """Return the pod that a message of Kubernetes without a name is about, as far as the lines around it tell."""
        listed = [name for name, status in _LISTED.findall(fact.text) if status == fact.name]
        return listed[0] if len(listed) == 1 else "" if listed else self.described.get(fact.source, "")

    def settled(
        self,
        facts: Sequence[Fact],
        sources: Iterable[Source],
        stated_world: int | None,
        local_size: int | None,
        told_world: int,
    ) -> RankMap:
        """Return the map with what NCCL's communicators, launchers and the names of inputs prove besides.

        `told_world`: the number of ranks that a launcher or a program tells, 0 where only communicators do.
        """
        spoken = {rank for ranks in self.speakers.values() for rank in ranks}
        # Kubeflow's RANK is that of the pod, in which torchrun starts as many ranks as it likes.
        told = {rank for ranks in self.environments.values() for rank in ranks}
        of_ranks = (
            (local_size or 1) == 1
            and max(spoken, default=0) < min(self.worlds, default=MAX_RANK)
            and (
                told <= self.with_local
                or len(told) == max(self.worlds, default=0)
                or self._have_one_gpu(spoken, stated_world)
                or self._one_rank_each(facts, sources, stated_world)
                or (bool(self.worlds) and self.worlds == _sizes_of_stores(facts))
            )
            and not any(_OTHER_GPU.search(fact.text) or _OTHER_GPU.search(fact.detail) for fact in facts)
        )
        found = RankMap(
            dict(self.processes), {host: set(ranks) for host, ranks in self.hosts.items()},
            {name: set(ranks) for name, ranks in self.speakers.items()},
            self.environments if of_ranks else {}, first=dict(self.first),
            places={name: rank for name in self._names if (rank := self.place_of(name)) is not None},
            replicas=self.replicas,
            parallel=self.parallel,
            labelled=self._census.labelled(),
        )  # fmt: skip
        for started in self._started if len(self._started) == 1 else ():  # all processes of the job
            for pid, number in started.items() if len(started) == stated_world else ():
                found.process(pid, number)
        if len({*self._of_group.values(), *([stated_world] if stated_world else [])}) == 1:  # the group is the job
            for pid, rank in self._of_group:
                found.process(pid, rank)
        whole = [member for member, size in self._of_gloo.items() if size == stated_world]
        if len({rank for *_, rank in whole}) == len(whole):  # else several groups have this size, and none is the job
            for host, number, rank in whole:
                found.process(number, rank, host)
        local_ranks: dict[str, set[int]] = {}
        if len(self._per_node) == 1 and sorted(self._nodes.values()) == [*range(len(self._nodes))]:
            for scope, node in self._nodes.items():
                _prove(found.first, scope, node * next(iter(self._per_node)))
        for (scope, _), local in self._local.items():
            local_ranks.setdefault(scope, set()).add(local)
        for scope, ranks in local_ranks.items():
            if ranks == set(range(stated_world or 0)):  # as many as the job has: one node
                found.first.setdefault(scope, 0)
        for (scope, pid), local in self._local.items():
            _prove(found._local_of, pid, local)
            first = found.first.get(scope, NOBODY)
            _prove(found.processes, (scope, pid), first + local if first != NOBODY and local != NOBODY else NOBODY)
            _prove(found.processes, ("", pid), first + local if first != NOBODY and local != NOBODY else NOBODY)
        for pod, node in self._nodes.items():
            if local_size and node != NOBODY and pod in self.described.values():
                found.hosts.setdefault(pod, set()).update(range(node * local_size, (node + 1) * local_size))
            elif local_size and node != NOBODY and pod in self._of_host and not self._assigned:
                _prove(found.first, pod, node * local_size)
        if self.shared and self.parallel.get("tp") == 1 and self.parallel.get("pp", 1) == 1:
            for pid, place in self._engines.items():  # a worker of its own is no process of its own
                found.process(pid, place)
        highest = max((fact.rank for fact in facts if fact.rank is not None), default=0)
        for host, pid, rank in self._census.proved(stated_world, highest):
            found.process(pid, rank, host)
        for members in self._actors.values():
            unknown = [one for one in members if one not in found.processes]
            known = {found.processes[one] for one in members if one in found.processes} - {NOBODY}
            absent = set(range(len(members))) - known
            if len(members) == stated_world and len(unknown) == len(absent) == 1:  # all its ranks, of which one is left
                found.process(unknown[0][1], absent.pop(), unknown[0][0])
        for (host, rank), told_buses in self._gpus.items():
            if len(told_buses) == 1:
                _prove(found._buses, (host, next(iter(told_buses))), rank)
        found._communicators(facts, stated_world)
        for fact in facts:
            if fact.kind is Kind.LAUNCHER and fact.rank is not None and fact.pid is not None and not fact.place:
                found.processes.setdefault(("", fact.pid), fact.rank)
            if fact.kind is Kind.LAUNCHER and fact.rank is not None and fact.host and fact.local_rank is not None:
                _prove(found.first, fact.host, fact.rank - fact.local_rank)
        for host, ranks in _in_communicator(facts, told_world).items():
            found.hosts.setdefault(host, set()).update(ranks)
        requeued = any(fact.name == "JOB REQUEUE" for fact in facts)  # the hosts may be of another attempt
        for host, there in self._of_tasks(local_size, stated_world).items() if not requeued else ():
            found.hosts.setdefault(host, set()).update(there)
        for pod, rank in self._of_headed_pods(stated_world):
            found.hosts.setdefault(pod, set()).add(rank)
        for pod, named in self._pods.items() if of_ranks else ():
            if len(named) == 1:
                found.hosts.setdefault(pod, set()).update(named)
        for name, ranks in found.environments.items():
            if not name.startswith("#"):
                found.hosts.setdefault(name, set()).update(ranks)
        for source in sources:
            of_input = found.first.get(f"#{source.index}")
            if of_input is None:
                continue
            folder, _, file = source.name.rpartition("/")
            for name in [*([folder] if folder else []), *_ADDRESS.findall(file)]:
                _prove(found.first, name, of_input)
        return found

    def _of_tasks(self, local_size: int | None, stated_world: int | None) -> dict[str, range]:
        """Return the ranks of the hosts that NCCL names behind the tasks of srun, each of one process, in blocks.

        A task that starts several ranks is a node. Hosts of which not all tasks speak need the size that is told.
        """
        told = {host: set(tasks) for host, tasks in self._tasks.items()}
        if any(len(processes) > 1 for tasks in self._tasks.values() for processes in tasks.values()):
            return {}
        spoken = sum(map(len, told.values()))
        full = len({*map(len, told.values())}) == 1 and local_size is None and stated_world in (None, spoken)
        size, blocks = blocks_of(told, None if full else local_size)
        known = size > 1 and (full or local_size is not None) and len(told) > 1
        return {host: range(size * block, size * (block + 1)) for host, block in blocks.items()} if known else {}

    def _of_headed_pods(self, stated_world: int | None) -> Iterator[tuple[str, int]]:
        """Yield the rank of each of several pods whose lines begin with one of their own, of one number of ranks."""
        told = {pod: next(iter(headed)) for pod, headed in self._headed.items() if len(headed) == 1}
        sizes = {size for headed in self._headed.values() for _, size in headed} | (
            {stated_world} if stated_world else set()
        )
        ranks = {rank for rank, _ in told.values()}
        if len(told) > 1 and len(sizes) == 1 and len(ranks) == len(told) and max(ranks) < min(sizes):
            yield from ((pod, rank) for pod, (rank, _) in told.items())

    def _have_one_gpu(self, spoken: set[int], stated_world: int | None) -> bool:
        """Return whether the pods that are described have one GPU each, and so one rank, and are of this job."""
        size = min(self._worlds_of_pods, default=0)
        alone = all(self._gpus_of.get(pod) == {1} for pod in self.environments)
        return (
            alone and self._worlds_of_pods == {size} and stated_world in (None, size) and max(spoken, default=0) < size
        )

    def _one_rank_each(self, facts: Iterable[Fact], sources: Iterable[Source], stated_world: int | None) -> bool:
        """Return whether the logs of pods have one rank each, of which two are neighbours: so none has several.

        They are named as the pod that is described, up to its kind and number: "bert-master-0", "bert-worker-1".
        """
        job = {
            re.sub(r"(?:-(?:master|worker|launcher|chief))?-\d+$", "", pod)
            for pod in self.environments
            if "#" not in pod
        }
        of_pods = [
            one.index for one in sources if any(f"{name}-" in one.name.rsplit("/", 1)[-1] for name in job if name)
        ]
        spoken: dict[int, set[int]] = {}
        for fact in facts:
            number = fact.rank if fact.rank is not None else fact.group_rank
            if number is not None and fact.source in of_pods:
                spoken.setdefault(fact.source, set()).add(number)
        ranks = {rank for own in spoken.values() for rank in own}
        apart = all(len(own) == 1 for own in spoken.values()) and len(ranks) == len(spoken)
        return apart and any(rank + 1 in ranks for rank in ranks) and self.worlds <= {stated_world}

    def _communicators(self, facts: Iterable[Fact], stated_world: int | None) -> None:
        """Note the processes, devices and GPUs of NCCL's largest communicator, if there is one of its size."""
        joined = [fact for fact in facts if fact.kind is Kind.JOINED and fact.pid is not None]
        inits = [fact for fact in joined if fact.name == "init"]
        largest = max((fact.completed or 0 for fact in inits), default=0)
        alone = {fact.completed for fact in inits} == {largest}  # no other communicator whose channels these may be
        inits = [fact for fact in inits if fact.completed == largest and fact.number is not None]
        members: dict[int, set[tuple[str, int]]] = {}
        for fact in inits:
            members.setdefault(fact.number or 0, set()).add((fact.host, fact.pid or 0))
        if any(len(processes) > 1 for processes in members.values()):
            return  # parts of the job, each with a rank 0
        ends = [(fact, link) for fact in joined if (link := _SENDS.search(fact.text))]
        links = {(fact.host, fact.pid or 0, int(link[1 if link[3] == "send" else 2])) for fact, link in ends}
        numbers = {number for *_, number in links}
        # Without a line that tells the size: each process has one number, no two the same, and the last is the job's.
        apart = (
            len(links) == len(numbers) == len({link[:2] for link in links})
            and max(numbers, default=-1) + 1 == stated_world
        )
        if alone or (not inits and apart):
            for host, pid, number in links:
                self.process(pid, number, host)
        for fact in inits:
            rank = fact.number or 0
            self.processes[fact.host, fact.pid or 0] = self.processes["", fact.pid or 0] = rank
            device = _BUS.search(fact.text)
            if device:
                _prove(self.by_device, fact.host, rank - int(device[1]))
            if device and device[2]:
                for host in {fact.host, ""}:
                    _prove(self._buses, (host, device[2]), rank)

    def _process_of(self, fact: Fact) -> int | None:
        host = fact.host or fact.where
        pid = fact.pid if fact.pid is not None else NOBODY
        rank = self.processes.get((host, pid))
        if rank is None and host:
            told = {where for where, number in self.processes if number == pid and where}
            address = host.replace(".", "").isdecimal()
            if told and all(where.replace(".", "").isdecimal() == address for where in told):
                return None  # a process of another host
        return self.processes.get(("", pid)) if rank is None else rank

    def _gpu_of(self, fact: Fact) -> int | None:
        """Return the rank on the GPU of a message of the driver, whose bus NCCL prints without its colons."""
        name = fact.name if fact.kind is Kind.XID else ""
        if fact.name == "hardware" and (told := _BUS_OF.search(fact.detail)):
            name = told[1]
        bus, device = ["", "", *name.lower().split(":")][-2:]
        key = f"{bus}{device[:2]}0".lstrip("0")
        host = fact.where.split(".")[0]
        known = {name.split(".")[0] for name, _ in self._buses if name}
        if not bus or (host and host not in known):
            return None
        return next((r for (name, at), r in self._buses.items() if name.split(".")[0] == host and at == key), None)

    def of_file(self, source: Source) -> int | None:
        """Return the rank whose output torchrun wrote to a file of its --log-dir, NOBODY where two are told."""
        first = self.first.get(source.name.rsplit("/attempt_", 1)[0]) if source.attempt is not None else None
        return first if first in (None, NOBODY) else first + (source.rank or 0)

    def _first_of(self, fact: Fact) -> int | None:
        """Return the rank of local rank 0 beside the process that a fact is about, NOBODY where two are told."""
        scopes = [scope for scope in (fact.host, fact.where) if scope] or [f"#{fact.source}"]
        known = [first for scope in scopes if (first := self.first.get(scope)) is not None]
        return known[0] if known else next((self.by_device[one] for one in scopes if one in self.by_device), None)

    def speaker(self, name: str) -> int | None:
        """Return the one rank that speaks under a name in front of lines, or in an input ("#3").

        That it is the only one is proved by RANK and WORLD_SIZE of several containers, or where each of the ranks from
        0 on has a name of its own.
        """
        for known, whole in ((self.environments, False), (self.speakers, True)):
            kind = {one: ranks for one, ranks in known.items() if one.startswith("#") == name.startswith("#")}
            ranks = {rank for own in kind.values() for rank in own}
            apart = len(kind) > 1 and all(len(own) == 1 for own in kind.values()) and len(ranks) == len(kind)
            if name in kind and apart and (not whole or ranks == set(range(len(kind)))):
                return next(iter(kind[name]))
        return None

    def rank_of(self, fact: Fact, one_node: bool, local_size: int | None) -> tuple[int, str] | None:
        """Return the rank that a fact is about and how it is known, None where nothing proves it."""
        if fact.pid is not None and fact.kind is not Kind.ENDED_BY_LAUNCHER:
            rank = self._process_of(fact)
            if rank not in (None, NOBODY):
                return rank, "pid"
            local = (
                self._local_of.get(fact.pid, NOBODY)
                if fact.name != "segfault" or not (fact.where or fact.host)
                else NOBODY
            )
            if local != NOBODY and fact.local_rank is None:
                rank = self._local_rank(fact.clone(local_rank=local), one_node, local_size)
                if rank is not None:
                    return rank, "local"
        if (rank := self._gpu_of(fact)) not in (None, NOBODY):
            return rank, "pid"
        if fact.local_rank is not None and fact.kind is not Kind.JOINED and fact.name != "command":
            rank = self._local_rank(fact, one_node, local_size)
            return (rank, "local") if rank is not None else None
        if (
            fact.where
            and fact.kind not in OF_A_HOST
            and not fact.place
            and (rank := self.speaker(fact.where)) is not None
        ):
            return rank, "name"
        return None

    def _local_rank(self, fact: Fact, one_node: bool, local_size: int | None) -> int | None:
        local = fact.local_rank or 0
        first = self._first_of(fact)
        if first is not None:
            return None if first == NOBODY else first + local
        if fact.node is not None and fact.kind is Kind.EXIT:  # srun started a launcher on each node
            return local if fact.node == 0 else fact.node * local_size + local if local_size else None
        several = len(set(self.first.values())) > 1 or any(first > 0 for first in self.first.values())
        return local if one_node and not several else None


def _sizes_of_stores(facts: Iterable[Fact]) -> set[int]:
    """Return the sizes of the jobs whose programs, and not launchers, have waited for their clients."""
    told = [
        fact
        for fact in facts
        if any("init_process_group" in frame or "_env_rendezvous" in frame for frame in fact.frames)
    ]
    return {int(found[1]) for fact in told if (found := _CLIENTS.search(fact.detail))}


def place_rank(known: RankMap, fact: Fact, local_size: int | None) -> None:
    """Give a fact of an engine's process its rank, and take one that counts only inside one of several engines."""
    if not fact.place:
        return
    if fact.kind in (Kind.WORKER_DIED, Kind.KERNEL_OOM):
        actor = places.rank_of_actor(fact.place, local_size)
        if fact.rank is None and actor is not None:
            fact.rank, fact.rank_basis = actor, "text"
        return
    at = places.coordinates(fact.place)
    if fact.kind is Kind.LAUNCHER and places.is_parent(fact.place):  # a scheduler tells of one of its own workers
        one = any(name.startswith("Worker") and "DP" not in places.coordinates(name) for name in known.places)
        one = one and at.get("DP") == 0 and known.parallel.get("dp", 1) == 1  # names leave out what has the size 1
        if ("DP" in at or known.parallel.get("dp", 1) > 1) and fact.rank is not None and not one:
            fact.rank, fact.rank_basis, fact.group_rank = None, "", fact.rank
        return
    rank = known.place_of(fact.place)
    if fact.rank_basis == "text" and fact.rank is not None:
        return
    if rank is not None:
        fact.rank, fact.rank_basis = rank, "prefix"
        known.places[fact.place] = rank
    elif at and not places.is_parent(fact.place) and not (fact.rank_basis == "prefix" and "EP" in at):
        fact.rank, fact.rank_basis = None, ""
