"""Terms of explaining: a `Fact`, one statement of a log, and a `Verdict`, the rules' answer on all of them.

Readers (`patterns`, `passages`, `recorder`) yield facts, `evidence` puts them together, rules (`failures`, `culprits`,
`causes`) judge them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from ncclguard_explain.cause import Cause
from ncclguard_explain.language import Message

#: No job has more ranks; a larger number is damage.
MAX_RANK = 1_000_000


class Kind(str, Enum):
    """The kinds of statements that a line can make. The text of each member is what the JSON report shows."""

    TIMEOUT = "watchdog_timeout"
    BLOCKING = "blocking_wait_timeout"
    STATUS = "watchdog_status"
    DUMP_RECEIVED = "dump_signal_received"
    DUMP_OBSERVED = "dump_signal_observed"
    DUMP_FIRST = "dump_signal_first"
    HEARTBEAT = "heartbeat_stuck"
    WATCHDOG_EXCEPTION = "watchdog_exception"
    ASYNC_ERROR = "async_error"
    REMOTE_ERROR = "remote_error"
    ABORTED = "communicator_aborted"
    TEARDOWN = "teardown"
    DESYNC = "desync_report"
    FINGERPRINT = "collective_mismatch"
    RECORDER = "flight_recorder"
    BARRIER_MISSING = "monitored_barrier_missing"
    BARRIER_REACHED = "monitored_barrier_reached"
    GLOO_TIMEOUT = "gloo_timeout"
    GLOO_CLOSED = "gloo_connection_closed"
    GLOO_ABORT = "gloo_abort"
    STORE_TIMEOUT = "store_timeout"
    STORE_KEY = "store_key_missing"
    STORE_LOST = "store_lost"
    STORE_BARRIER = "store_barrier"
    RENDEZVOUS = "rendezvous"
    NCCL_WARN = "nccl_warn"
    NCCL_INFO = "nccl_info"
    JOINED = "communicator_joined"
    PEER_CLOSED = "peer_closed"
    RAS = "nccl_ras"
    EXCEPTION = "python_exception"
    STACK = "stack"
    EXIT = "exit"
    LAUNCHER = "launcher_summary"
    ENDED_BY_LAUNCHER = "ended_by_launcher"
    SCHEDULER = "scheduler_event"
    GUARD = "ncclguard_incident"
    KERNEL_OOM = "kernel_oom"
    XID = "kernel_xid"
    NIC = "kernel_network"
    CUDA = "cuda_error"
    WORKER_DIED = "worker_died"
    ENGINE_WAIT = "engine_wait"
    ENGINE_END = "engine_ended"
    ACCUSED = "named_by_tool"
    ENVIRONMENT = "environment_fault"
    UNUSED = "ddp_unused_parameters"
    TRACE_INVALIDATED = "deepspeed_trace_invalidated"
    DATALOADER = "dataloader_warning"
    RETRIED = "retried"
    ALIVE = "alive"
    PROGRESS = "progress"
    PHASE = "phase"
    NOTE = "note"


# A rank that printed one of these was waiting for its peers inside a collective (or a barrier, or the store).
WAITING = frozenset(
    {Kind.TIMEOUT, Kind.BLOCKING, Kind.STATUS, Kind.GLOO_TIMEOUT, Kind.GLOO_CLOSED, Kind.BARRIER_REACHED,
     Kind.STORE_TIMEOUT, Kind.STORE_KEY, Kind.STORE_BARRIER}
)  # fmt: skip
# These follow from a stall or a death; they never are the reason for one.
CONSEQUENCES = frozenset(
    {Kind.HEARTBEAT, Kind.DUMP_OBSERVED, Kind.DUMP_FIRST, Kind.TEARDOWN, Kind.ABORTED, Kind.REMOTE_ERROR,
     Kind.GLOO_CLOSED, Kind.STORE_LOST, Kind.LAUNCHER, Kind.ENDED_BY_LAUNCHER, Kind.PEER_CLOSED, Kind.ENGINE_END,
     Kind.ENGINE_WAIT}
)  # fmt: skip
# A limit ran out; before torch gives up on a peer its whole limit has passed.
EXPIRED = frozenset(
    {Kind.TIMEOUT, Kind.BLOCKING, Kind.STATUS, Kind.DUMP_RECEIVED, Kind.DUMP_OBSERVED, Kind.GLOO_TIMEOUT,
     Kind.STORE_TIMEOUT}
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """One collective as `WorkNCCL(...)` shows it; element counts, milliseconds."""

    op: str | None
    seq: int | None = None
    numel_in: int | None = None
    numel_out: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    timeout_ms: int | None = None
    ran_ms: int | None = None

    def signature(self) -> tuple[object, ...]:
        """Return what all ranks of a group must agree on: sequence, operation, and sizes where those are equal."""
        if self.op is None or self.op.startswith("ALLTOALL"):
            return (self.seq, self.op)
        if self.op in ("GATHER", "SCATTER", "REDUCE"):  # the root has other sizes than the rest
            return (self.seq, self.op, max(self.numel_in or 0, 0) if self.op != "SCATTER" else None)
        return (self.seq, self.op, self.numel_in, self.numel_out, self.shape)

    def same_seq(self, other: Work | None) -> bool:
        """Return whether nothing says that the other is another call: the numbers agree, or one is not known."""
        return other is None or self.seq is None or other.seq is None or self.seq == other.seq

    @property
    def ratio(self) -> int | None:
        """The group's size as the element counts of an all-gather or reduce-scatter tell it, or None."""
        if self.op is None or not self.numel_in or not self.numel_out:
            return None
        small, big = sorted((self.numel_in, self.numel_out))
        gathers = any(word in self.op.upper() for word in ("ALLGATHER", "ALL_GATHER", "REDUCE_SCATTER"))
        return big // small if gathers and big % small == 0 and 1 < big // small <= MAX_RANK else None


def united(first: Work | None, second: Work | None) -> Work | None:
    """Return what two lines say together about one collective; the first one's word counts where both speak."""
    if first is None or second is None:
        return first or second
    return replace(first, **{name: value for name, value in vars(second).items() if getattr(first, name) is None})


@dataclass(frozen=True)
class Group:
    """A process group as a log line names it: `key` is the GUID where there is one, else the local number."""

    key: str
    number: str | None = None
    description: str | None = None

    @property
    def is_default(self) -> bool:
        return self.description in ("default_pg", "default") or (
            self.description is None and self.key in ("0", "default")
        )

    def __str__(self) -> str:
        return f"{self.key} ({self.description})" if self.description else self.key


@dataclass
class Fact:
    """One statement, with where it stands.

    `rank` is a global rank, `rank_basis` how it is known: "prefix" ([rank3]), "launcher" (srun, mpirun), "file" (its
    name), "text" (the message names it), "group" (only the rank inside a group is known and taken for the global one),
    "local" (a rank on one node), "pid" (the process is known by another line), "name" (the pod in front of the line
    is). `local_rank`, `node` (the task or node number in front of the line), `host` and `pid` are what the line itself
    says about its speaker or its subject; `place` is the name that an inference engine or Ray gives its speaker
    ("Worker_DP1_TP3"), `where` the host, pod or container in front of the line.
    """

    kind: Kind
    file: str
    line: int
    text: str
    source: int = 0
    order: int = 0
    when: float | None = None
    rank: int | None = None
    rank_basis: str = ""
    group_rank: int | None = None
    local_rank: int | None = None
    node: int | None = None
    host: str = ""
    place: str = ""
    where: str = ""
    pid: int | None = None
    group: Group | None = None
    work: Work | None = None
    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None
    peers: tuple[int, ...] = ()
    name: str = ""
    detail: str = ""
    number: int | None = None
    seconds: float | None = None
    repeated: int = 1
    until: int = 0  # the line of its last copy, if it has copies
    hidden: int = 0
    after_symptom: bool = False
    quoted: str = ""  # in a "talk" with a model, or a "sentence" of an explanation
    frames: tuple[str, ...] = field(default_factory=tuple)
    code: str = ""  # the source line of the last frame, where a traceback has it
    advice: tuple[str, ...] = ()  # of an incident of ncclguard's own: what to do, and what would have made more of it
    waiting: tuple[int, ...] = ()  # of an incident of ncclguard's own: who was in the call
    sides: tuple[tuple[str, tuple[int, ...]], ...] = ()  # of one: what ranks called that differ

    def clone(self, **changes: object) -> Fact:
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass
class Verdict:
    """The answer on who held the others up. `culprits` is empty without proof; `suspects` are worth a look besides.

    `places` names culprits of which no global rank is proved: "EP rank 11", "TP 3 of EngineCore_DP1", a host. `facts`
    carry the verdict; `overturned` says, in sentences, what would prove it wrong.
    """

    culprits: tuple[int, ...] = ()
    cause: Cause = Cause.UNKNOWN
    confidence: str = "low"
    rule: str = "none"
    reason: str = ""
    facts: list[Fact] = field(default_factory=list)
    suspects: tuple[int, ...] = ()
    sides: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    work: Work | None = None
    group: Group | None = None
    overturned: list[Message] = field(default_factory=list)
    places: tuple[str, ...] = ()
