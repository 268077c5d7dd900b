"""The table of message formats: one row for each thing that a line can say. To add a format, add a row.

A row is a regular expression in which a blank stands for any number of blanks or none (a wrapped line has lost
them), and
whose groups are named after the fields of a `Fact`:

    rank, local_rank, node, pid, host, number, name, detail, completed, enqueued, started   as in `Fact`
    own            the rank that the message gives its speaker; counts where no prefix tells it
    peers          numbers, single or listed, with ranges
    seconds, ms, minutes, delta ("0:30:00")   a time, kept in seconds
    seq, op, nin, nout, shape, dtype, limit, ran   the collective (`Work`)

`kind` and `fields` are what a match means. Rows are tried in order; a match that overlaps an earlier row's is
dropped, so
what is specific stands above what is general. `source` says which file of which project prints it, and in which
versions.
Every `yes` must be read as this row's kind, with these values, and no `no` may be: the tests run them all, through the
same prefilter as a log.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ncclguard_explain import quotations
from ncclguard_explain.facts import Fact, Group, Kind, Work
from ncclguard_explain.records import message_of

Values = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One format; a text of it has one of the words of `anchor`, which are separated by "|"."""

    kind: Kind
    source: str
    regex: str
    anchor: str
    yes: tuple[tuple[str, Values], ...]
    no: tuple[str, ...] = ()
    fields: Values = field(default_factory=dict)
    more: Callable[[re.Match[str], str, Fact], Fact | None] | None = None
    pattern: re.Pattern[str] = field(init=False, repr=False)
    needles: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        words = self.anchor.split("|")
        object.__setattr__(self, "needles", tuple(dict.fromkeys([*words, *(word.replace(" ", "") for word in words)])))
        object.__setattr__(self, "pattern", re.compile(self.regex.replace(" ?", " ").replace(" ", r"\s*")))


_OPS = (
    "ALLREDUCE", "ALLREDUCE_SPARSE", "ALLREDUCE_COALESCED", "ALLGATHER", "_ALLGATHER_BASE", "ALLGATHER_COALESCED",
    "ALLGATHER_INTO_TENSOR_COALESCED", "REDUCE", "REDUCE_SCATTER", "_REDUCE_SCATTER_BASE", "REDUCE_SCATTER_TENSOR_COALESCED",
    "BROADCAST", "_BROADCAST_OOP", "_REDUCE_OOP", "GATHER", "SCATTER", "ALLTOALL", "ALLTOALL_BASE", "BARRIER", "SEND", "RECV",
    "RECVANYSOURCE", "COALESCED",
)  # fmt: skip


def whole_op(name: str) -> str | None:
    """Return the operation that a cut name begins, where only one family of operations does.

    Example:
        >>> whole_op("ALLR"), whole_op("_ALLG"), whole_op("ALL")
        ('ALLREDUCE', '_ALLGATHER_BASE', None)
    """
    if name in _OPS:
        return name
    fits = [op for op in _OPS if op.startswith(name)]
    shortest = min(fits, key=len, default=None)
    return shortest if shortest is not None and all(op.startswith(shortest) for op in fits) else None


def numbers(text: str) -> tuple[int, ...]:
    """Return the whole numbers of a text, with ranges written out.

    Example:
        >>> numbers("0-2, 5,")
        (0, 1, 2, 5)
    """
    found: list[int] = []
    for part in re.finditer(r"(?<!\d)(\d{1,9})(?!\d)(?:\s*-\s*(\d{1,9})(?!\d))?", text):
        low, high = int(part[1]), int(part[2] or part[1])
        found.extend(range(low, min(high, low + 4096) + 1))
    return tuple(found)


def _delta(text: str) -> float:
    """Return the seconds of a printed timedelta: "0:30:00", "1 day, 0:00:00"."""
    days = re.search(r"(\d+) ?days?", text)
    clock = re.search(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", text)
    total = 86400.0 * int(days[1]) if days else 0.0
    return total + (int(clock[1]) * 3600 + int(clock[2]) * 60 + float(clock[3]) if clock else 0.0)


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None


_OF_LAUNCHERS = frozenset(
    {Kind.LAUNCHER, Kind.EXIT, Kind.ENDED_BY_LAUNCHER, Kind.KERNEL_OOM, Kind.SCHEDULER, Kind.PEER_CLOSED, Kind.XID,
     Kind.WORKER_DIED}
)  # fmt: skip


def build(row: Row, found: re.Match[str], text: str, make: Fact) -> Fact | None:
    """Return the fact of one match."""
    if row.kind in _OF_LAUNCHERS:
        make = make.clone(local_rank=None)  # the launcher speaks of another process than the prefix does
    said = {name: value.strip() for name, value in found.groupdict().items() if value is not None}
    fact = make.clone(kind=row.kind, **row.fields)
    for name in ("number", "completed", "enqueued", "started", "pid", "node", "local_rank", "group_rank"):
        if name in said:
            setattr(fact, name, _int(said[name]))
    for name in ("name", "detail", "host"):
        if name in said:
            setattr(fact, name, " ".join(said[name].split())[:600])
    if "peers" in said:
        fact.peers = numbers(said["peers"])
    if "rank" in said:
        fact.rank, fact.rank_basis = int(said["rank"]), "text"
    if "own" in said:
        fact.group_rank = int(said["own"])
        if make.rank is None or (make.rank_basis == "task" and make.rank != fact.group_rank):
            fact.rank, fact.rank_basis = int(said["own"]), "text"
    for name, unit in (("seconds", 1.0), ("ms", 0.001), ("minutes", 60.0)):
        if name in said:
            fact.seconds = float(said[name]) * unit
    if "delta" in said:
        fact.seconds = _delta(said["delta"])
    if said.keys() & {"seq", "op", "nin", "limit", "shape"}:
        fact.work = Work(
            op=whole_op(said["op"]) or said["op"] if "op" in said else None,
            seq=_int(said.get("seq")),
            numel_in=_int(said.get("nin")),
            numel_out=_int(said.get("nout")),
            shape=numbers(said["shape"]) if "shape" in said else None,
            dtype=said.get("dtype"),
            timeout_ms=_int(said.get("limit")),
            ran_ms=_int(said.get("ran")),
        )
    return row.more(found, text, fact) if row.more is not None else fact


_PG_NEW = re.compile(
    r"\[PG\s*ID\s*(?P<id>\d+)\s*PG\s*GUID\s*(?P<guid>[^\s(\]]+?)\s*(?:\((?P<desc>[^)]*)\))?\s*Rank\s*(?P<rank>\d+)\]"
)
_PG_OLD = re.compile(r"\[PG\s*(?:GUID\s*)?(?P<guid>[^\s(\]]+?)\s*(?:\((?P<desc>[^)]*)\))?\s*Rank\s*(?P<rank>\d+)\]")
_INNER = re.compile(r"\[Rank\s*(\d+)\]")
_TORCHCOMM = re.compile(r"\[TC\]\s*\[rank=(\d+)\]\s*\[name=([^\]]*)\]")


def group_of(text: str) -> tuple[Group | None, int | None]:
    """Return the process group that a line names and the rank inside it."""
    found = _PG_NEW.search(text) or _PG_OLD.search(text)
    if found:
        said = found.groupdict()
        return Group(said["guid"], said.get("id") or said["guid"], said["desc"] or None), int(said["rank"])
    found = _TORCHCOMM.search(text)
    if found:
        return Group(found[2]), int(found[1])
    inner = _INNER.search(text)
    return None, int(inner[1]) if inner else None


# What a warning's text means. The first that matches counts; NCCL 2.3 to 2.30 wordings.
_WARNINGS: tuple[tuple[str, str], ...] = (
    ("size_mismatch", r"collective mismatch|[Mm]essage truncated|Mismatch(?:ed)? (?:size|count)"),
    ("version", r"Mismatched NCCL version"),
    ("shm", r"shared memory|/dev/shm|shm_open|No space left on device"),
    ("oom", r"out of memory|Failed to CUDA [cm]alloc"),
    ("gpu", r"ECC|fallen off the bus"),
    ("cuda", r"Cuda failure|CUDA failure|HIP failure"),
    ("ib_async", r"async fatal event|Got async (?:error )?event"),
    ("ib", (r"NET/IB ?\d* ?: ?Got completion|Got completion (?:from peer|with)|ibv_\w+ failed|Call to ibv_|NET/IB ?: ?Unable|"
     r"No IB device|NET/IB .*(?:error|failed)|NET/OFI .*(?:error|UNDELIVERABLE|failed)")),
    ("no_interface", r"no socket interface found|No interface found|Could not find any (?:socket )?interface|Unable to find .*interface"),
    ("connect", (r"[Cc]onnect(?: to \S+)? (?:timeout|returned|failed)|Call to connect|exceeded error retry count|No route to host|"
     r"Network is unreachable")),
    ("closed", r"Connection closed by remote peer|Connection reset|Broken pipe|Accept failed|Call to (?:recv|send)"),
    ("duplicate_gpu", r"Duplicate GPU"),
    ("p2p", r"peer access|P2P|peer mapping|cuIpc|IpcOpen|Could not enable P2P|NVLS|Multicast"),
)  # fmt: skip
_FAMILIES = tuple((name, re.compile(pattern.replace(" ", r"\s?"))) for name, pattern in _WARNINGS)


def warning_class(text: str) -> str:
    """Return the family of an NCCL warning's text: ib, connect, closed, shm, p2p, cuda, ... or "other"."""
    for name, pattern in _FAMILIES:
        if pattern.search(text):
            return name
    return "other"


# ncclGetErrorString (NCCL 2.x) and the names of ncclResult_t.
_FAILURES = (
    ("unhandled system error", "system"), ("ncclSystemError", "system"), ("remote process exited", "remote"),
    ("ncclRemoteError", "remote"), ("unhandled cuda error", "cuda"), ("ncclUnhandledCudaError", "cuda"),
    ("internal error", "internal"), ("ncclInternalError", "internal"),
)  # fmt: skip


def nccl_error_family(text: str) -> str | None:
    """Return the family of the NCCL error inside an exception's text, or None when it holds none."""
    if "NCCL" not in text and "nccl" not in text:
        return None
    kind = warning_class(text)
    return next((family for word, family in _FAILURES if word in text), None) if kind == "other" else kind


#: Of the port at which NCCL's RAS is asked: where another job has it nobody can ask, which the job does not need.
_RAS_PORT = "ras/client_support.cc"


def _warning(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    if _RAS_PORT in text:
        return None
    fact.name = warning_class(fact.detail)
    status = re.search(r"(?:with error |status=(?:\w+\()?)(\d+)", fact.detail)
    fact.number = int(status[1]) if status else None
    return fact if fact.detail else None


def _async_or_timeout(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    """A `WorkNCCL(...)` is quoted by the watchdog's timeout, by blocking wait, and by exceptions about other errors."""
    flat = re.sub(r"\s", "", text[max(0, found.start() - 160) : found.end() + 60])
    if "asyncexception" in flat:
        return fact.clone(kind=Kind.ASYNC_ERROR, detail=text[text.find("async") :][:400])
    if "blockingwait" in flat or "timedoutinblocking" in flat:
        return fact.clone(kind=Kind.BLOCKING)
    ran_out = "operationtimeout" in flat or (fact.work is not None and fact.work.ran_ms is not None)
    if ran_out or ("operation" in flat and "imeout:" in flat):
        return fact
    cut = found["close"] is None  # a line that ends inside the brackets: whoever printed it was waiting
    return fact if cut and ("atchdog" in flat or "aught" in flat or "imeout:" in flat) else None


def _counters(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    tail = text[found.start() :]
    for name, word in (("enqueued", "enqueued"), ("completed", "completed"), ("started", "started")):
        hit = re.search(rf"[Ll]ast\s*{word}\s*(?:NCCL\s*)?work:\s*(-?\d+)(?:\s*\((\w+)\))?", tail)
        if hit:
            setattr(fact, name, int(hit[1]))
            if name == "started" and hit[2]:
                fact.name = hit[2]
    return fact


def _fingerprint(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    """Name a fingerprint: "own" of the printing rank, "peer" of the one it compared with, "absent" for zeros."""
    bare = found["shape"] is None and found["dtype"] is None and (found["seq"] or "0") == "0"
    first = re.search(r"CollectiveFingerPrint\(", text)
    own = first is not None and found.start() <= first.start() < found.end("head") + 30
    fact.name = "absent" if bare and found["op"] == "REDUCE" else "own" if own else "peer"
    difference = re.search(r"differ in the following aspects:\s*(.*)", text)
    fact.detail = " ".join(difference[1].split())[:300] if difference else ""
    fact.group_rank = fact.rank
    return fact


def _spawned(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    word = found["signal"].upper()
    fact.number = _SIGNALS.get(word.removeprefix("SIG"), -int(word) if word.isdigit() else None)
    return fact if fact.number is not None else None


_SIGNALS = {"KILL": -9, "SEGV": -11, "ABRT": -6, "BUS": -7, "ILL": -4, "FPE": -8, "TERM": -15, "INT": -2, "HUP": -1}


def _ended(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    if found["signal"]:
        return _spawned(found, text, fact)
    code = fact.number or 0
    return fact.clone(number=128 - code if 128 < code < 160 else code) if code else None


_SHELL_ENDS = {"killed": -9, "segmentation fault": -11, "bus error": -7, "aborted": -6, "illegal instruction": -4, "floating point exception": -8}  # fmt: skip


def _of_shell(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    return fact.clone(number=_SHELL_ENDS[found["signal"].lower()])


def _negative(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    fact.number = -(fact.number or 0)
    return fact


_SRUN_ENDS = {"Killed": -9, "Out Of Memory": -9, "Segmentation fault": -11, "Bus error": -7, "Aborted": -6, "Terminated": -15}  # fmt: skip


def _srun(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    fact.number = _SRUN_ENDS.get(found["name"], _int(found["code"]))
    fact.detail = found["name"]
    if fact.number is not None and 128 < fact.number < 160:
        fact.number = 128 - fact.number
    if len(fact.peers) > 1 and fact.number is not None and fact.number >= 0:
        return fact.clone(kind=Kind.NOTE, name="tasks_ended")  # one of them may be the first, which is not told
    if not fact.peers:
        return None
    fact.rank, fact.rank_basis, fact.node = fact.peers[0], "srun", fact.peers[0]
    if fact.number == -15:
        return fact.clone(kind=Kind.ENDED_BY_LAUNCHER)
    return fact.clone(name="oom" if found["name"] == "Out Of Memory" else "tasks" if len(fact.peers) > 1 else "")


def _exception(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    fact.name = fact.name.rsplit(".", 1)[-1]
    return None if fact.name in ("Error", "Exception") and not fact.detail else fact


def _trace_step(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    fact.number, fact.enqueued, fact.completed = (_int(found[name]) for name in ("step", "expected", "got"))
    return fact


def _joined(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    head = re.match(r"\S*?([\w.\-]+):(\d+):\d+ \[\d+\]", text.strip())
    if head:
        fact.host, fact.pid = head[1], int(head[2])
    return fact


def _ray_node(found: re.Match[str], text: str, fact: Fact) -> Fact | None:
    """A node that was told to go is no broken one."""
    if re.search(r"expected termination: ?idle", text):
        return None
    told = "preempted" in text or "terminated expectedly" in text or "expected termination" in text
    return fact.clone(name="PREEMPTION") if told else fact


def _arrived(found: re.Match[str], text: str, fact: Fact) -> Fact:
    """Count who is absent, where all that have come are listed."""
    if found["peers"]:
        return fact
    here, size = numbers(found["here"] or ""), fact.number or 0
    absent = tuple(sorted(set(range(min(size, 65_536))) - set(here))) if len(set(here)) == fact.completed else ()
    return fact.clone(peers=absent) if absent else fact.clone(kind=Kind.ENGINE_WAIT)


_PLACES = re.compile(r"(src|dst) (RDMA|nvl|NVL|IB)(?: lane)?:? (\d+)")
PER_NODE = 8  # DeepEP csrc/kernels/configs.cuh: NUM_MAX_NVL_PEERS


def _deepep(found: re.Match[str], text: str, fact: Fact) -> Fact:
    """A place in DeepEP's group is RDMA times 8 plus nvl; only a "src" that is awaited is proof that nothing came."""
    rdma, nvl = int(found["rdma"]), int(found["nvl"])
    told = {
        (side, "rdma" if what in ("RDMA", "IB") else "nvl"): int(number)
        for side, what, number in _PLACES.findall(found["rest"])
    }
    awaited = told.get(("src", "rdma"), rdma if ("src", "nvl") in told else None)
    peers = () if awaited is None else (awaited * PER_NODE + told.get(("src", "nvl"), nvl),)
    return fact.clone(group_rank=rdma * PER_NODE + nvl, peers=peers)


_WORK = (
    r"Work[A-Z]\w*\((?:SeqNum=(?P<seq>\d+)(?=[,)]),? ?)?(?:OpType=(?P<op>\w+)(?P<opend>,)? ?)?(?:TensorShape=\[(?P<shape>[^\]]*)\],? ?)?"
    r"(?:NumelIn=(?P<nin>\d+)(?=,), ?)?(?:NumelOut=(?P<nout>\d+)(?=,), ?)?(?:Timeout\(ms\)=(?P<limit>\d+)(?=\)))?[^)]{0,40}?(?P<close>\))?"
    r"(?(close) (?:ran for (?P<ran>\d+) milli)?|$)"
)
_HOST = r"(?:(?P<host>[\w.\-]+):(?P<pid>\d+):\d+ \[\d+\] )"
_ELASTIC = "torch/distributed/elastic/multiprocessing/api.py"
_PGNCCL = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
_WATCHDOG = (
    "[rank3]:[E801 14:37:42.731552721 ProcessGroupNCCL.cpp:632] [PG ID 0 PG GUID 0(default_pg) Rank 3] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600029 milliseconds "
    "before timing out."
)

_ITS_PROCESS = re.compile(r"\bprocess\s*\(?pid[ =](\d+)")


def _will_end(found: re.Match[str], text: str, fact: Fact) -> Fact:
    own = _ITS_PROCESS.search(text, found.start())
    wide = "hard-kill" in text or "peer" in text or "all ranks" in text
    return fact.clone(detail="all" if wide else "", **({} if own is None else {"pid": int(own[1])}))


ROWS: tuple[Row, ...] = (
    # --- torch's collectives -------------------------------------------------------------------------------------
    Row(
        Kind.FINGERPRINT,
        "torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp, 1.9 to 2.15 (TORCH_DISTRIBUTED_DEBUG=DETAIL)",
        r"(?P<head>Rank (?P<rank>\d+) is running (?:inconsistent )?collective: CollectiveFingerPrint\()(?:SequenceNumber=(?P<seq>\d+),? ?)?"
        r"OpType=(?P<op>[A-Z_]+)(?:, ?TensorShape=\[(?P<shape>[^\]]*)\])?(?:, ?TensorDtypes=(?P<dtype>\w+))?",
        "CollectiveFingerPrint(",
        (
            (
                ("RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
                "CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[4], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(...))"),
                {"rank": 1, "name": "own"},
            ),
            ("Rank 0 is running inconsistent collective: CollectiveFingerPrint(OpType=ALLGATHER, TensorShape=[41, 256], TensorDtypes=Float", {"rank": 0}),
            ("but Rank 7 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)", {"rank": 7, "name": "absent"}),
        ),
        ("CollectiveFingerPrint of all ranks agree",),
        more=_fingerprint,
    ),
    Row(
        Kind.TIMEOUT,
        f"{_PGNCCL}, 1.10 to 2.15; ProcessGroupHCCL and ProcessGroupXCCL print the same",
        _WORK,
        "Work",
        (
            (_WATCHDOG, {"rank": 3}),
            ("[Rank 1] Caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802246 milliseconds before timing out.", {"group_rank": 1}),
            ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=143, OpType=BROADCAST, TensorShape=[1], Timeout(ms)=3600000) ran for 3600089 milliseconds", {}),
            ("[Rank 1] Watchdog caught collective operation timeout: WorkHCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=31, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds", {}),
            ("[Rank 1] Watchdog caught collective operation timeout: WorkXCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=31, NumelOut=31, Timeout(ms)=600000) ran for 600001 milliseconds", {}),
            ("[rank1]:[E ProcessGroupNCCL.cpp:523] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLR", {"rank": 1}),
        ),
        ("WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) was enqueued, timeout not reached",),
        more=_async_or_timeout,
    ),
    Row(
        Kind.TIMEOUT,
        f"{_PGNCCL}, 2.0 to 2.15, where the line is cut before the collective",
        r"[Ww]atchdog caught collective(?: oper[a-z]*)?(?: tim[a-z]*)?:?(?: Work\w*)?$",
        "atchdog caught",
        (("[rank5]:[E114 03:22:11.5 ProcessGroupNCCL.cpp:616] [Rank 5] Watchdog caught collective operation timeout:", {"rank": 5}),),
        ("the watchdog caught no collective in time, timeout is fine",),
    ),
    Row(
        Kind.DUMP_RECEIVED,
        f"{_PGNCCL}, 2.4 to 2.15",
        r"Received a dump signal due to a collective timeout from (?:this local rank|rank (?P<peers>\d+))",
        "dump signal",
        ((("[rank4]:[E1] [PG ID 0 PG GUID 0(default_pg) Rank 4] Received a dump signal due to a collective timeout from  rank 1 and we will try our best to dump the debug info. "
          "Last enqueued NCCL work: 99, last completed NCCL work: 98."), {"rank": 4, "peers": (1,), "enqueued": 99, "completed": 98}),),
        more=_counters,
    ),
    Row(
        Kind.STATUS,
        f"{_PGNCCL}, 2.2 to 2.15",
        r"(?:at NCCL work|at work sequence id|detected by watchdog at work): (?P<number>-?\d+)(?=.*?ast enqueued)",
        "ast enqueued",
        (
            ("[rank0]:[E1] [PG 1 Rank 0] Timeout at NCCL work: 100, last enqueued NCCL work: 103, last completed NCCL work: 99.", {"number": 100, "enqueued": 103, "completed": 99}),
            (("[PG ID 0 PG GUID 0(default_pg) Rank 0]  failure detected by watchdog at work sequence id: 100 PG status: last enqueued work: 103, last started work: 100 (ALLREDUCE), "
             "last completed work: 99"), {"number": 100, "started": 100}),
        ),
        more=_counters,
    ),
    Row(Kind.STATUS, f"{_PGNCCL}, 2.2 to 2.15, where the line is cut in front", r"[Ll]ast enqueued (?:NCCL )?work: -?\d+", "ast enqueued",
        (("tatus: last enqueued work: 103, last completed work: 99", {"enqueued": 103}),), more=_counters),
    Row(Kind.DUMP_OBSERVED, f"{_PGNCCL}, 2.3 to 2.15", r"Observed flight recorder dump signal", "dump signal",
        (("[rank1]:[E1] Observed flight recorder dump signal from another rank via TCPStore.", {"rank": 1}),)),
    Row(Kind.DUMP_FIRST, f"{_PGNCCL}, 2.5 to 2.15", r"First PG on this rank to signal dumping", "to signal dumping",
        (("[rank1]:[E1] First PG on this rank to signal dumping.", {}),)),
    Row(Kind.HEARTBEAT, f"{_PGNCCL}, 2.2 to 2.15", r"watchdog got stuck for (?P<seconds>\d+) ?seconds", "atchdog got stuck",
        (("ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress", {"seconds": 480.0}),)),
    Row(Kind.HEARTBEAT, f"{_PGNCCL}, 2.1 to 2.15", r"Could not acquire GIL|Heartbeat monitor timed out|NCCL monitor thread timeout", "",
        (("Heartbeat monitor timed out! Process will be terminated after dumping debug info.", {}), ("Could not acquire GIL within 300 ms on exit, possible GIL induced hang", {}))),
    Row(Kind.NOTE, f"{_PGNCCL}, 2.1 to 2.8", r"failed to retrieve (?:TORCH_)?NCCL_DESYNC_DEBUG report", "DESYNC_DEBUG",
        (("[Rank 0] failed to retrieve NCCL_DESYNC_DEBUG report. Please file an issue. Error: Socket Timeout", {"name": "no_desync_report"}),), fields={"name": "no_desync_report"}),
    Row(Kind.WATCHDOG_EXCEPTION, f"{_PGNCCL}, 1.13 to 2.15", r"watchdog thread terminated with exception: (?P<detail>(?!.*(?:Watchdog|Work[A-Z]\w+\()).*)", "atchdog thread",
        (("[rank1]:[E801 1] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered", {"rank": 1}),)),
    Row(Kind.REMOTE_ERROR, f"{_PGNCCL}, 2.6 to 2.15", r"remote error detected from rank:? (?P<peers>\d+)", "remote error",
        (("[rank0]:[E1] [PG ID 0] remote error detected from rank: 3", {"peers": (3,)}),)),
    Row(Kind.ABORTED, f"{_PGNCCL}, 1.10 to 2.15", r"communicator was aborted on rank (?P<peers>\d+)", "communicator was aborted",
        (("DistBackendError: NCCL communicator was aborted on rank 2.", {"peers": (2,)}),)),
    Row(Kind.TEARDOWN, f"{_PGNCCL}, 1.10 to 2.15", r"NCCL operations have failed or timed out", "operations have failed",
        (("[E ProcessGroupNCCL.cpp:577] [Rank 1] Some NCCL operations have failed or timed out.", {}),)),
    Row(Kind.BLOCKING, f"{_PGNCCL}, 1.6 to 2.15", r"Work(?! Work) \S* ?timed out in blocking wait", "blocking wait",
        (("[rank0]:[E1] [Rank 0] Work timed out in blocking wait", {"rank": 0}),)),
    # --- torch's second NCCL backend (2.15: the default under the name "nccl") --------------------------------------
    Row(Kind.TIMEOUT, "torch/csrc/distributed/c10d/nccl2/WorkNCCL.cpp, 2.15", r"\[TC\] \[rank=(?P<own>\d+)\] \[name=[^\]]*\] Operation timed out after (?P<ms>\d+) ms", "imed out after",
        (("[rank0]:[E1122 11:36:09.317629544 WorkNCCL.cpp:372] [TC][rank=0][name=0] Operation timed out after 5996 ms", {"rank": 0, "seconds": 5.996}),), fields={"name": "nccl2"}),
    Row(Kind.TIMEOUT, "torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.cpp, 2.15", r"Aborting process on rank (?P<own>\d+) due to timeout - (?P<detail>[\w ]+)", "due to timeout",
        (("[rank2]:[E1122 11:36:11.1 ProcessGroupNCCL.cpp:638] [TC][rank=2][name=0] Aborting process on rank 2 due to timeout - timeout watchdog detected operation timeout", {"rank": 2}),), fields={"name": "nccl2"}),
    Row(Kind.ASYNC_ERROR, "torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCLUtils.cpp and ProcessGroupNCCL.cpp, 2.15",
        r"nccl hit async error(?: on rank (?P<own>\d+))?: (?P<detail>.*)|Aborting process on rank (?P<peers>\d+) due to error - .*", "async error",
        (("[rank0]:[E1122 1 ProcessGroupNCCLUtils.cpp:333] [TC][rank=0][name=0] nccl hit async error on rank 0: remote process exited or there was a network error", {"rank": 0}),),
        fields={"name": "nccl2"}),
    Row(Kind.DUMP_OBSERVED, "torch/csrc/distributed/c10d/FlightRecorderHook.cpp, 2.15", r"FlightRecorderHook: dumping trace", "dumping trace",
        (("[rank0]:[E1122 1 FlightRecorderHook.cpp:600] FlightRecorderHook: dumping trace on collective failure", {}),)),
    # --- Ascend ---------------------------------------------------------------------------------------------------
    Row(Kind.TIMEOUT, "Huawei CANN (HCCL), EI0002, 6.x to 8.x",
        r"(?=.*remote rank:? ?\[(?:(?P<peers>\d+)|unknown)\])(?=(?:.*tag ?:?\[(?P<detail>[^\]]*)\])?)(?=(?:.*rankSize ?:?\[(?P<number>\d+)\])?)(?=(?:.*rankId ?:?\[(?P<own>\d+)[\] ])?).*?Notify register",
        "Notify register",
        ((("EI0002: 2024-05-01 The wait execution of the Notify register times out. Reason: The Notify register has not received the Notify record from remote rank:[24]. "
          "base information: [streamID:[3], tag[AllReduce_group_name_0]] communicator information: [group:[g], rankSize[32], rankId[5]]"), {"peers": (24,), "number": 32, "rank": 5}),),
        fields={"name": "hccl"}),
    Row(Kind.TIMEOUT, "Huawei CANN (runtime), 6.x to 8.x", r"hccl (?:fftsplus |aicpu )?task timeout.*?timeout:? ?(?:(?P<minutes>\d+) ?min|(?P<seconds>\d+))", "task timeout",
        (("[ERROR] RUNTIME(1,python):2024 [stream.cc:12] hccl fftsplus task timeout, device_id:0, stream_id:2, timeout:1836.", {"seconds": 1836.0}),
         ("EI9999: hccl fftsplus task timeout occurred during task execution, stream_id:5, stuck notify num:1, timeout:30min(default).", {"seconds": 1800.0})), fields={"name": "hccl"}),
    Row(Kind.FINGERPRINT, "Huawei CANN (HCCL), EI0005, 7.x to 8.x",
        r"EI0005.*?inconsistent between ranks.*?(?:tag \[(?:Hccl)?(?P<op>[A-Za-z]+).*?)?parameter \[(?P<detail>\w+)\], local \[[^\]]*\](?: \(rank (?P<rank>\d+)\))?, remote", "EI0005",
        (("EI0005: 2026-03-01 The arguments for collective communication are inconsistent between ranks: tag [HcclAllreduce_group_0], parameter [count], local [4096] (rank 2), remote [8192] (rank 3)", {"rank": 2, "name": "hccl", "detail": "count"}),),
        fields={"name": "hccl"}, more=lambda found, text, fact: fact.clone(work=Work(found["op"].upper()) if found["op"] else None)),
    Row(Kind.RENDEZVOUS, "Huawei CANN (HCCL), EI0006, 6.x to 8.x", r"EI0006.*?Getting socket times out(?P<detail>.{0,200})", "EI0006",
        (("[rank1]: EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank did not send the data in time.", {"name": "gloo_mesh"}),), fields={"name": "gloo_mesh"}),
    # --- gloo, monitored barrier, the store -------------------------------------------------------------------------
    Row(Kind.BARRIER_MISSING, "torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, 1.8 to 2.15",
        r"(?:\[Rank (?P<own>\d+)\]:? ?)?(?<!\[)Ranks? (?P<peers>\d+(?:, ?\d+)*) failed to pass monitoredBarrier in (?P<ms>\d+) ?ms", "onitoredBarrier",
        (
            ("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 30000 ms", {"peers": (1,), "seconds": 30.0}),
            ("RuntimeError: Rank 1 failed to pass monitoredBarrier in 30000 ms", {"peers": (1,)}),
            ("[rank0]: RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 2000 ms", {"peers": (1, 2)}),
        ), ("Rank 3 successfully reached monitoredBarrier",), fields={"work": Work("BARRIER")}),
    Row(Kind.BARRIER_REACHED, "torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, 1.8 to 2.15", r"Rank (?P<own>\d+) successfully reached monitoredBarrier(?:, but received errors while waiting for send/recv from rank (?P<peers>\d+))?", "onitoredBarrier",
        (("RuntimeError: Rank 3 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.", {"rank": 3, "peers": (0,)}),)),
    Row(Kind.STORE_BARRIER, "torch/distributed/distributed_c10d.py (_store_based_barrier), 1.8 to 2.15",
        r"(?P<name>Waiting|Timed out).{0,60}?store based barrier.*?rank:? ?(?P<own>\d+).*?world_size=(?P<number>\d+), ?(?:worker_count|num_workers_joined)=(?P<completed>\d+), ?timeout=(?P<delta>[^)]*)", "store based barrier",
        (
            ("INFO:root:Waiting in store based barrier to initialize process group for rank: 0, key: store_based_barrier_key:1 (world_size=8, worker_count=7, timeout=0:30:00)",
             {"rank": 0, "number": 8, "completed": 7, "seconds": 1800.0, "name": "Waiting"}),
            ("RuntimeError: Timed out initializing process group in store based barrier on rank: 6, for key: store_based_barrier_key:1 (world_size=8, worker_count=7, timeout=1 day, 0:00:00)",
             {"rank": 6, "seconds": 86400.0, "name": "Timed out"}),
        ), ("Rank 0: Completed store-based barrier for key:store_based_barrier_key:1 with 8 nodes.",)),
    Row(Kind.NOTE, "torch/distributed/distributed_c10d.py (_store_based_barrier), 1.8 to 2.2", r"Added key: (?P<detail>store_based_barrier_key:\d+) to store for rank: (?P<own>\d+)", "to store for rank",
        (("INFO:torch.distributed.distributed_c10d:Added key: store_based_barrier_key:1 to store for rank: 3", {"rank": 3, "detail": "store_based_barrier_key:1"}),), fields={"name": "entered"}),
    Row(Kind.NOTE, "torch/distributed/distributed_c10d.py (_store_based_barrier), 1.8 to 2.2", r"Completed store-?based barrier for key", "based barrier",
        (("INFO:torch.distributed.distributed_c10d:Rank 0: Completed store-based barrier for key:store_based_barrier_key:1 with 8 nodes.", {"name": "barrier_completed"}),), fields={"name": "barrier_completed"}),
    Row(Kind.STORE_KEY, f"{_PGNCCL}, 1.7 to 2.15",
        r"\[(?P<own>\d+)\] is setting up NCCL communicator and retr?(?:ei|ie)ving ncclUniqueId from \[(?P<peers>\d+)\].*?by key '(?P<name>[^']*)'.*?got error: ?(?P<detail>.*)",
        "setting up NCCL communicator",
        (("RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Timeout waiting for key: 0 after 1800000 ms",
          {"rank": 1, "peers": (0,)}),),
        more=lambda found, text, fact: fact.clone(seconds=int(hit[1]) / 1000 if (hit := re.search(r"after\s*(\d+)\s*ms", fact.detail)) else None)),
    Row(Kind.GLOO_TIMEOUT, "gloo/transport/tcp/unbound_buffer.cc", r"Timed out waiting (?P<ms>\d+) ?ms for (?P<detail>\w+) operation", "imed out waiting",
        (("RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete", {"seconds": 1800.0, "detail": "recv"}),)),
    Row(Kind.GLOO_ABORT, "gloo/transport/tcp/pair.cc", r"EnforceNotMet|op\.preamble\.length", "",
        (("what():  [enforce fail at pair.cc:416] op.preamble.length <= op.nbytes. 16 vs 8, Error", {}),), ("preamble",), fields={"detail": "a message of another size arrived"}),
    Row(Kind.RENDEZVOUS, "torch/csrc/distributed/c10d/ProcessGroupGloo.cpp and gloo, 1.8 to 2.15", r"[Gg]loo connectFull[mM]esh failed(?: with (?P<detail>.*))?", "onnectFull",
        (("RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error", {"name": "gloo_mesh"}),), fields={"name": "gloo_mesh"}),
    # It prints the first whole second after the limit.
    Row(Kind.RENDEZVOUS, "torch/csrc/distributed/c10d/TCPStore.cpp, 1.9 to 2.15", r"[Tt]imed out after (?P<seconds>\d+) ?s(?:ec(?:ond)?s?)? waiting for clients(?:\. (?P<detail>\d+/\d+ clients joined))?", "waiting for clients",
        (("torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 3/4 clients joined.", {"seconds": 300.0, "detail": "3/4 clients joined"}), ("Timed out after 601s waiting for clients", {"seconds": 600.0})),
        fields={"name": "clients"}, more=lambda found, text, fact: fact.clone(seconds=max((fact.seconds or 0.0) - 1, 1.0))),
    Row(Kind.RENDEZVOUS, "torch/csrc/distributed/c10d/socket.cpp, 1.9 to 2.15",
        r"timed out after (?:(?P<ms>\d+) ?ms|(?P<seconds>\d+) ?s(?:econds)?) while trying to connect(?: to)?(?: \(?(?P<detail>[^)\n]*)\)?)?", "trying to connect",
        (("DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500).", {"seconds": 60.0}),
         ("TimeoutError: The client socket has timed out after 900s while trying to connect to (10.0.0.1, 29500).", {"seconds": 900.0})), fields={"name": "connect"}),
    Row(Kind.NOTE, "torch/csrc/distributed/c10d/socket.cpp, 1.11 to 2.15", r"The IPv[46] network addresses of \((?P<detail>[^,)\s]+), \d+\) cannot be retrieved", "cannot be retrieved",
        (("[W socket.cpp:601] [c10d] The IPv4 network addresses of (node0, 29500) cannot be retrieved (gai error: -2 - Name or service not known).", {"name": "no_address", "detail": "node0"}),), fields={"name": "no_address"}),
    Row(Kind.RENDEZVOUS, "torch/csrc/distributed/c10d/socket.cpp, 1.11 to 2.15", r"failed to connect to any network address(?: of)?(?: \(?(?P<detail>[^)\n]*)\)?)?", "network address",
        (("[W socket.cpp:601] [c10d] The client socket has failed to connect to any network address of (node0, 29500). Will retry.", {}),), fields={"name": "address"}),
    Row(Kind.RENDEZVOUS, "torch/distributed/elastic/rendezvous, 1.9 to 2.15", r"^(?!.*failed to shutdown the rendezvous).*?(?:RendezvousConnectionError|(?P<detail>RendezvousTimeoutError)(?:.{0,120}?\b(?:within|after|in) (?P<seconds>\d+(?:\.\d+)?) ?s)?|RendezvousClosedError)", "Rendezvous",
        (("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", {}), ("RendezvousTimeoutError: rendezvous 'j' did not complete within 120 s", {"seconds": 120.0})),
        ("The node 'n02_21_0' has failed to shutdown the rendezvous 'none' due to an error of type RendezvousConnectionError.",), fields={"name": "connect"}),
    Row(Kind.RENDEZVOUS, "torch/csrc/distributed/c10d/socket.cpp, 1.9 to 2.15", r"(?:The server socket has failed to (?:listen|bind)|EADDRINUSE|Address already in use)(?P<detail>.*)", "",
        (("RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).", {"name": "port"}),), fields={"name": "port"}, more=lambda found, text, fact: None if _RAS_PORT in text else fact),
    Row(Kind.STORE_TIMEOUT, "torch/csrc/distributed/c10d/TCPStore.cpp, 2.2 to 2.15", r"wait timeout after (?P<ms>\d+) ?ms, keys: (?P<name>\S.*)", "wait timeout",
        (("torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda/ready", {"seconds": 300.0}),)),
    Row(Kind.STORE_TIMEOUT, "torch/csrc/distributed/c10d/FileStore.cpp and PrefixStore.cpp", r"Timeout waiting for key: (?P<name>\S+) after (?P<ms>\d+) ?ms", "waiting for key",
        (("RuntimeError: Timeout waiting for key: default_pg/0/1 after 1800000 ms", {"seconds": 1800.0}),)),
    Row(Kind.STORE_TIMEOUT, "torch/csrc/distributed/c10d/TCPStore.cpp, 2.4 to 2.15", r"waitForInput.*(?:timed out|time ?out) after (?P<ms>\d+) ?ms|waitForInput.*likely a timeout|(?<![\w])Socket Timeout\b", "imeout",
        (("torch.distributed.DistStoreError: Socket Timeout", {}),)),
    Row(Kind.STORE_LOST, "torch/csrc/distributed/c10d/TCPStore.cpp, 2.0 to 2.15", r"Failed to recv, got 0 bytes|sendBytes failed|recvBytes failed|TCPStore server has shut down|Failed to check the \"should dump\"", "",
        (("[W TCPStore.cpp:115] recvValue failed on SocketImpl(fd=3): Failed to recv, got 0 bytes. Connection was likely closed.", {}),)),
    Row(Kind.GLOO_CLOSED, "gloo/transport/tcp/pair.cc",
        r"Connection closed by peer|(?:Read|Write|read|write)(?: error|v?).{0,60}(?:Connection reset by peer|Broken pipe)|Application timeout caused pair closure|"
        r"(?:pair|unbound_buffer)\.cc:\d+\].*(?:Connection|Broken pipe)", "",
        (("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4040", {"detail": "closed"}),), fields={"detail": "closed"}),
    # --- NCCL -------------------------------------------------------------------------------------------------------
    Row(Kind.PEER_CLOSED, "NCCL src/proxy.cc, 2.12 to 2.30", r"(?:(?P<host>[\w.\-]+):(?P<pid>\d+):\d+ \[(?P<number>\d+)\] )?NCCL INFO \[Service thread\] Connection closed by localRank (?P<local_rank>\d+)", "closed by localRank",
        (("node1:4000:4100 [0] NCCL INFO [Service thread] Connection closed by localRank 7", {"local_rank": 7, "pid": 4000}),)),
    Row(Kind.NOTE, "NCCL src/init.cc, 2.4 to 2.30", rf"{_HOST}?NCCL INFO comm \S+ rank (?P<number>\d+)(?: n[Rr]anks (?P<completed>\d+))?.*?(?:Abort COMPLETE|abort COMPLETE)", "bort COMPLETE",
        (("node1:4000:4100 [0] NCCL INFO comm 0x55 rank 3 nranks 8 cudaDev 3 busId 7000 - Abort COMPLETE", {"number": 3, "completed": 8}),), fields={"name": "abort_complete"}),
    Row(Kind.NCCL_WARN, "NCCL 2.3 to 2.30, all files", rf"{_HOST}?(?:\S+:\d+ )?NCCL WARN (?P<detail>(?!.*\bfalling back\b).*)", "NCCL WARN",
        (("node1:1:2 [0] transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129", {"name": "ib", "number": 12}),), more=_warning),
    Row(Kind.NCCL_WARN, "aws-ofi-nccl, 1.4 to 1.14", r"NET/OFI (?P<detail>.{0,200}?(?:completed with error|UNDELIVERABLE|RC: -?\d+).*)", "NET/OFI",
        (("NET/OFI Request 0x7f completed with error. RC: 113. Error: 6 (UNDELIVERABLE). Completed length: 0", {"name": "ib"}),), more=lambda found, text, fact: fact.clone(name="ib")),
    Row(Kind.NCCL_WARN, "NCCL src/transport/net_ib.cc, 2.3 to 2.30, without its head", r"(?P<detail>Got completion (?:from peer|with (?:error|status)).*)", "Got completion",
        (("NET/IB : Got completion from peer 10.0.0.2<4791> with error 12, opcode 0, len 0, vendor err 129", {"name": "ib", "number": 12}),), more=_warning),
    Row(Kind.NCCL_WARN, "NCCL src/misc/shmutils.cc, 2.9 to 2.30", r"(?P<detail>.*shared memory segment.*)", "shared memory segment",
        (("Error while creating shared memory segment /dev/shm/nccl-XXXX (size 7340384), NCCL error", {"name": "shm"}),), fields={"name": "shm"}),
    Row(Kind.NCCL_WARN, "NCCL src/init.cc, 2.5 to 2.30, as torch repeats it", r"(?P<detail>Duplicate GPU detected.*)", "Duplicate GPU",
        (("[rank0]: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 4b000", {"name": "duplicate_gpu"}),), fields={"name": "duplicate_gpu"}),
    Row(Kind.CUDA, "ROCm ROCr-Runtime (VM fault handler), 4.0 to 6.4", r"(?P<detail>Memory access fault by GPU.*)", "access fault by GPU",
        (("[rank2]: Memory access fault by GPU node-6 (Agent handle: 0x8b1a2c0) on address 0x7f3c81200000. Reason: Unknown.", {"rank": 2}),)),
    Row(Kind.NCCL_WARN, "NCCL src/graph, 2.20 to 2.30", r"(?P<detail>.*Asymmetric link.*)", "Asymmetric link", (("NCCL INFO Asymmetric link detected between ranks", {"name": "topology"}),), fields={"name": "topology"}),
    Row(Kind.JOINED, "NCCL src/init.cc, 2.4 to 2.30", r"NCCL INFO (?:ncclCommInit\w+ )?comm \S+ rank (?P<number>\d+) n[Rr]anks (?P<completed>\d+)(?: nNodes (?P<node>\d+) localRanks (?P<local_rank>\d+))?", "anks ",
        (("node1:4000:4100 [3] NCCL INFO ncclCommInitRankConfig comm 0x5 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 9 commId 0x1 - Init COMPLETE", {"number": 3, "completed": 8, "pid": 4000}),), fields={"name": "init"}, more=_joined),
    Row(Kind.JOINED, "NCCL src/transport.cc, 2.3 to 2.30", r"NCCL INFO Channel \d+(?:/\d+)? ?: (?P<number>\d+)\[\w+\](?: \[\w+\])? -> \d+\[\w+\](?: \[\w+\])? via ", "NCCL INFO Channel",
        (("node1:4000:4100 [3] NCCL INFO Channel 00/0 : 3[3] -> 4[4] via P2P/IPC", {"number": 3}),
         ("node1:4000:4100 [3] NCCL INFO Channel 01 : 3[1b000] -> 4[1c000] via SHM", {"number": 3})), ("NCCL INFO Channel 00/02 :    0   1   2   3",), fields={"name": "channel"}, more=_joined),
    Row(Kind.NCCL_INFO, "NCCL src/bootstrap.cc, 2.3 to 2.30", r"NCCL.*?(?P<detail>[Uu]sing (?:network )?interface.*)", "sing ", (("NCCL INFO NET/Socket : Using interface eth0", {}),), fields={"name": "interface"}),
    Row(Kind.NCCL_INFO, "NCCL src/bootstrap.cc, 2.3 to 2.30: the address that the others are to reach", rf"{_HOST}NCCL INFO Bootstrap ?: Using (?:\[\d+\])?(?P<name>[\w.\-]+):(?P<detail>[\da-f.:]+)<", "Bootstrap",
        (("train-b:2200:2200 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>", {"host": "train-b", "name": "docker0", "detail": "172.17.0.1"}),)),
    Row(Kind.NCCL_INFO, "NCCL src/misc/socket.cc, 2.9 to 2.30", r"(?P<detail>socket\.cc:\d+ -> \d+)", "socket.cc", (("NCCL INFO misc/socket.cc:57 -> 3 timeout", {}),)),
    # --- inference engines: who waits, what follows, who is named ---------------------------------------------------
    Row(Kind.ENGINE_WAIT, "vLLM vllm/v1/executor/multiproc_executor.py, 0.8 to 0.33", r"RPC call to (?P<detail>\w+) timed out", "RPC call to",
        (("(EngineCore pid=71) ERROR 11-20 10:02:11 [core.py:981] TimeoutError: RPC call to sample_tokens timed out.", {"name": "rpc", "detail": "sample_tokens"}),), fields={"name": "rpc"}),
    Row(Kind.NOTE, "vLLM vllm/distributed/device_communicators/shm_broadcast.py, 0.8 to 0.33", r"No available (?:shared memory|block|shared memory broadcast block).{0,30}?found in (?P<seconds>\d+) ?s", "o available",
        (("INFO 11-20 10:02:11 [shm_broadcast.py:501] No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging", {"name": "shm_broadcast", "seconds": 60.0}),), fields={"name": "shm_broadcast"}),
    Row(Kind.ENGINE_WAIT, "Ray, compiled graphs, 2.9 to 2.50", r"Timed out waiting for object available to read|RayChannelTimeoutError|RayChannelError: Channel closed", "",
        (("ray.exceptions.RayChannelTimeoutError: System error: Timed out waiting for object available to read. ObjectID: 00fc", {"name": "channel"}),), fields={"name": "channel"}),
    Row(Kind.ENGINE_WAIT, "Ray, 2.0 to 2.50", r"GetTimeoutError(?::? (?P<detail>.{0,120}))?", "GetTimeoutError",
        (("ray.exceptions.GetTimeoutError: Get timed out: some object(s) not ready.", {"name": "get"}),), fields={"name": "get"}),
    Row(Kind.ENGINE_WAIT, "SGLang srt/managers/scheduler.py and srt/utils/watchdog.py, 0.4 to 0.5", r"(?:\w+ )?[Ww]atchdog timeout \(self\.watchdog_timeout=(?P<seconds>[\d.]+)(?:, ?self\.soft=(?P<detail>\w+))?\)", "atchdog timeout",
        (("[2026-11-20 10:02:11 DP1 TP3 EP3] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", {"name": "scheduler", "seconds": 300.0}),
         ("[2026-11-20 10:02:11 TP4] Watchdog timeout (self.watchdog_timeout=300)", {"name": "scheduler"})), fields={"name": "scheduler"},
        more=lambda found, text, fact: fact.clone(kind=Kind.NOTE) if fact.detail == "True" else fact),
    Row(Kind.EXCEPTION, "TensorRT-LLM _torch/pyexecutor/py_executor.py, 0.17 to 1.2", r"Error in event loop: (?P<detail>.*(?:[Ee]rror|ERROR|[Aa]ssert|xception|ailed).*)", "Error in event loop",
        (("[TRT-LLM] [RANK 5] [E] Error in event loop: cuBLAS failed", {"rank": 5, "name": "EventLoopError", "detail": "cuBLAS failed"}),), fields={"name": "EventLoopError"}),
    Row(Kind.EXCEPTION, "TensorRT-LLM cpp/tensorrt_llm/common/assert.h, 0.9 to 1.2: of a request, where no rank is told", r"^(?:\[TensorRT-LLM\]\[ERROR\] )?(?:\[rank (?P<own>\d+)\] )?(?P<name>Assertion failed): (?P<detail>.+ \(/\S+\.(?:h|cpp|cu):\d+\))", "Assertion failed",
        (("[TensorRT-LLM][ERROR] [rank 2] Assertion failed: Error opening engine file: /e/rank2.engine (/w/rawEngine.h:71)", {"rank": 2, "name": "Assertion failed"}),),
        ("[TensorRT-LLM][ERROR] Assertion failed: of one request (/w/a.cpp:7)",), more=lambda found, text, fact: fact if fact.rank is not None else None),
    Row(Kind.ENGINE_WAIT, "TensorRT-LLM _torch/pyexecutor/hang_detector.py, 1.2", r"Hang detected (?:after (?P<seconds>[\d.]+) seconds|on rank (?P<own>\d+) in (?P<detail>\w+))", "ang detected",
        (("Hang detected after 300 seconds.", {"name": "hang", "seconds": 300.0}), ("Hang detected on rank 2 in PyExecutor; hard-killing and propagating to peer ranks.", {"rank": 2})), fields={"name": "hang"}),
    Row(Kind.ENGINE_WAIT, "SGLang, LMDeploy: health checks of a server", r"Health check failed\. Server couldn't get a response|Backend health probe timed out(?: after (?P<seconds>[\d.]+)s)?", "ealth ",
        (("Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 10:02:11.", {"name": "health"}),), fields={"name": "health"}),
    Row(Kind.ENGINE_WAIT, "vLLM vllm/v1/engine, 0.8 to 0.33", r"Timed out waiting for engine (?:core )?processes to start.*?(?:Waited (?P<seconds>\d+)s)?|Did not receive response from front-end process|failed to report ZMQ addresses|Engine iteration timed out", "",
        (("TimeoutError: Timed out waiting for engine core processes to start. This may be slow", {"name": "start"}),), fields={"name": "start"}),
    Row(Kind.ACCUSED, "SGLang srt/disaggregation, 0.4 to 0.5", r"Losing connection with (?:prefill|decode) instance \(bootstrap_addr: (?P<host>[\w.\-]+)", "Losing connection",
        (("[2026-11-20 13:03:07 TP0] Losing connection with prefill instance (bootstrap_addr: 10.2.1.23:8998), 4 requests affected", {"host": "10.2.1.23", "name": "instance"}),), fields={"name": "instance", "rank": None, "rank_basis": ""}),
    Row(Kind.ACCUSED, "SGLang's router (sgl-router), 0.2 to 0.3", r"Circuit breaker state transition: worker=(?:\w+://)?(?P<host>[\w.\-]+)\S* from=\w+ to=Open\b", "ircuit breaker",
        (("WARN sglang_router_rs::core::circuit_breaker: Circuit breaker state transition: worker=http://10.2.1.23:8000 from=Closed to=Open", {"host": "10.2.1.23"}),), fields={"name": "instance", "rank": None, "rank_basis": ""}),
    Row(Kind.ALIVE, "SGLang's router (sgl-router), 0.2 to 0.3", r"Circuit breaker state transition: worker=\S+ from=\w+ to=Closed\b", "ircuit breaker",
        (("INFO Circuit breaker state transition: worker=http://10.2.1.23:8000 from=HalfOpen to=Closed", {"name": "serve"}),), fields={"name": "serve", "after_symptom": True, "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "SGLang srt/disaggregation, Mooncake", r"(?P<detail>KVTransferError.{0,120}|timed out after [\d.]+s in KVPoll\.\w+|Decode instance could be dead, remote mooncake session \S+)", "",
        (("[2026-11-20 10:02:11 TP1] Request 7310 timed out after 300.0s in KVPoll.Bootstrapping", {"name": "request"}),), fields={"name": "request"}),
    Row(Kind.ENGINE_END, "vLLM vllm/v1/engine: what follows from a worker or from a wait",
        r"EngineDeadError|EngineGenerateError|EngineCore (?:encountered (?:a fatal error|an issue)|failed to start)|AsyncLLM output_handler failed|Executor failed|\(engine dead\)|"
        r"WorkerProc (?:was terminated|failed to start|failed|initialization failed)|One or more workers failed|Engine core initialization failed|Parent process exited, terminating worker", "",
        (("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.", {}),), fields={"name": "engine"}),
    Row(Kind.ENGINE_END, "vLLM vllm/v1/engine/core.py, 0.8 to 0.33: the worker's exception, quoted", r"Worker failed with error '?(?P<detail>[^\n]{0,300})", "Worker failed with",
        (("RuntimeError: Worker failed with error 'CUDA out of memory. Tried to allocate 2.00 GiB.', please check the stack trace above for the root cause", {"name": "echo"}),), fields={"name": "echo"}),
    Row(Kind.ENGINE_END, "SGLang srt/managers, LMDeploy: what a parent sees of a child's end", r"Received sigquit from a child proces|SIGQUIT received\. signum|Task <EngineMainLoop> failed|ZMQ engine process is not alive|Rank \d+ scheduler is dead", "",
        (("SIGQUIT received. signum=3, frame=None. It usually means one child failed.", {}), ("Received sigquit from a child proces. It usually means the child failed.", {}), ("Rank 0 scheduler is dead. Please check if there are relevant logs.", {})), fields={"name": "child"}),
    Row(Kind.ENGINE_END, "Open MPI, TensorRT-LLM: an abort of all ranks", r"MPI_ABORT was invoked on rank (?P<own>\d+)|propagating hard-kill to all ranks", "",
        (("MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD with errorcode 137", {}),), fields={"name": "abort"}),
    Row(Kind.EXIT, "SGLang srt/entrypoints/engine.py and srt/utils/watchdog.py, 0.4 to 0.5", r"Subprocess (?P<name>\w+?)_(?P<local_rank>\d+) \(pid=(?P<pid>\d+)\) crashed with exit code (?P<number>-?\d+)", "crashed with exit",
        (("Subprocess scheduler_0 (pid=812) crashed with exit code -9. Triggering SIGQUIT for cleanup...", {"local_rank": 0, "number": -9}),), fields={"rank": None, "rank_basis": ""},
        more=lambda found, text, fact: fact.clone(name="local") if found["name"] == "scheduler" else fact.clone(kind=Kind.ENGINE_END)),
    Row(Kind.EXIT, "SGLang srt/entrypoints/engine.py, 0.5", r"Rank (?P<local_rank>\d+) scheduler died during initialization \(exit code: (?P<number>-?\d+)\)", "scheduler died",
        (("Rank 3 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer.", {"local_rank": 3, "number": -9}),), fields={"name": "local", "rank": None, "rank_basis": ""}),
    Row(Kind.LAUNCHER, "vLLM vllm/v1/executor/multiproc_executor.py, 0.8 to 0.33", r"Worker proc \w*?Worker\w*?-(?P<rank>\d+) died unexpectedly(?: \(exit code: (?P<number>-?\d+)\))?", "died unexpectedly",
        (("ERROR 05-01 10:00:00 [multiproc_executor.py:140] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.", {"rank": 1}),
         ("(EngineCore pid=7) ERROR [multiproc_executor.py:281] Worker proc VllmWorker-3 died unexpectedly (exit code: -9), shutting down executor.", {"rank": 3, "number": -9})), fields={"name": "first"}),
    Row(Kind.LAUNCHER, "vLLM vllm/v1/executor/ray_executor_v2.py, 0.20 to 0.33", r"RayWorkerProc rank=\[(?P<peers>[\d, ]+)\] died unexpectedly", "died unexpectedly",
        (("RayWorkerProc rank=[5] died unexpectedly, shutting down executor.", {"peers": (5,)}),), fields={"name": "first", "rank": None},
        more=lambda found, text, fact: fact.clone(rank=fact.peers[0], rank_basis="text", group_rank=fact.peers[0]) if len(fact.peers) == 1 else fact),
    Row(Kind.WORKER_DIED, "vLLM vllm/v1/engine/utils.py, 0.8 to 0.33: an engine's process; its number is that of a replica", r"Engine core proc (?P<host>EngineCore_?\w*) died unexpectedly|Failed core proc\(s\): \{'(?P<detail>\w+)': (?P<number>-\d+)\}|Worker VllmWorkerProcess pid (?P<pid>\d+) died, exit code: -(?:9|11)\b", "",
        (("Engine core proc EngineCore_DP1 died unexpectedly, shutting down client.", {"detail": "EngineCore_DP1"}), ("Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP3': -9}", {})),
        fields={"rank": None, "rank_basis": "", "name": "replica"}, more=lambda found, text, fact: fact.clone(host="", detail=fact.host or fact.detail or "a worker")),
    Row(Kind.ENVIRONMENT, "vLLM, 0.33: shared memory", r"Insufficient space in /dev/shm.*", "/dev/shm", (("RuntimeError: Insufficient space in /dev/shm for x: 64 MiB required, 12 MiB free. Increase /dev/shm", {"name": "shm"}),), fields={"name": "shm"}),
    Row(Kind.ENVIRONMENT, "SGLang srt/model_executor/model_runner.py, 0.4 to 0.5; vLLM vllm/v1/worker/gpu_worker.py, 0.8 to 0.33: what others hold as they start", r"memory capacity is unbalanced|Free memory on device \([\d.]+/[\d.]+ GiB\) on startup is less than", "is unbalanced|on startup is less",
        (("ValueError: Free memory on device (5.21/79.15 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB).", {"name": "gpu_taken"}), ("ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=7.1", {"name": "gpu_taken"}),), fields={"name": "gpu_taken"}),
    Row(Kind.ENVIRONMENT, "Ray, NeMo-RL, vLLM: placement groups", r"Timed out waiting for placement groups? to be ready|Cannot provide a placement group", "placement group", (("ValueError: Cannot provide a placement group of 8 GPUs within 1800 seconds.", {"name": "resources"}),), fields={"name": "resources"}),
    Row(Kind.ENVIRONMENT, "TRL trl/extras/vllm_client.py, 0.15 to 1.16", r"vLLM server can't be reached at (?P<host>\S+) after (?P<seconds>[\d.]+) seconds|Weight update group already initialized", "", (("ConnectionError: The vLLM server can't be reached at http://0.0.0.0:8000 after 240.0 seconds. Make sure", {"name": "server"}),), fields={"name": "server"},
        more=lambda found, text, fact: fact.clone(host="")),
    Row(Kind.ENVIRONMENT, "NVSHMEM 2.x and 3.x at set-up", r"Unable to create ah|nvshmem setup connections failed|init failed for transport: IBGDA|ibv_modify_qp failed", "", (("/src/modules/transport/ibgda/ibgda.cpp:2234: NULL value Unable to create ah.", {"name": "rdma"}),), fields={"name": "rdma"}),
    Row(Kind.ENVIRONMENT, "Intel oneCCL, 2021 to 2026", r"\|CCL_ERROR\| (?P<detail>(?!.*peer connection lost).*)", "CCL_ERROR", (("2026:11:20-10:02:11:(4711) |CCL_ERROR| atl_mpi_comm.cpp:94 init_transport: comm_create error", {"name": "oneccl"}),), fields={"name": "oneccl"}),
    Row(Kind.ENVIRONMENT, "Huawei CANN (HCCL), EI0011, EI0019, 7.x to 8.x", r"EI00(?:11|19)\b(?P<detail>.{0,160})", "EI00", (("EI0019: [PID: 71] Failed to bind the IP port 16666.", {"name": "hccl"}),), fields={"name": "hccl"}),
    Row(Kind.ENVIRONMENT, "Huawei CANN (HCCL), EI0013, 7.x to 8.x", r"EI0013\b(?P<detail>.{0,200})|An error CQE occurred(?P<cqe>.{0,200})", "", (("EI0013: An error CQE occurred during operator execution. Local information: server 10.0.3.5, device ID 0. Peer information: server 10.0.3.6, device ID 1.", {"name": "fabric"}),), fields={"name": "fabric"}),
    Row(Kind.ENGINE_WAIT, "Mooncake mooncake-integration/transfer_engine, 0.3", r"[Ff]ailed to complete transfers after (?P<seconds>\d+) seconds", "complete transfers",
        (("E0707 10:00:10.1 transfer_engine_py.cpp:401] Failed to complete transfers after 30 seconds, use MC_TRANSFER_TIMEOUT to configure", {"name": "transfer", "seconds": 30.0}),), fields={"name": "transfer"}),
    Row(Kind.ENVIRONMENT, "Mooncake mooncake-transfer-engine/src/transport/rdma_transport/worker_pool.cpp, 0.3; NIXL src/core/nixl_agent.cpp, 0.5",
        r"(?P<nixl>NIXL_ERR_\w+|NIXL transfer failure: \w+|SocketHandShakePlugin: connect\(\).{0,80})|worker_pool\.cpp:\d+\] Worker: Process failed for slice(?P<detail>.{0,300})", "",
        (("E0917 16:03:40.176716 1192408 worker_pool.cpp:281] Worker: Process failed for slice (opcode: 0, length: 65536, local_nic: mlx5_3): transport retry counter exceeded", {"name": "kv"}),
         ("E0822 09:03:05.400112     770 nixl_agent.cpp:1022] postXferReq: backend 'UCX' returned error status NIXL_ERR_REMOTE_DISCONNECT", {"name": "kv"})),
        fields={"name": "kv"}, more=lambda found, text, fact: fact.clone(name="kv", rank=None, rank_basis="", detail=(found["detail"] or found["nixl"]).strip())),
    # --- expert parallelism: DeepEP prints the waiter and the awaited, as places in its own group -------------------
    Row(Kind.ENGINE_WAIT, "DeepEP csrc/kernels/internode_ll.cu, 1.1 to 2.0", r"DeepEP timeout for (?P<detail>(?:dispatch|combine) receive|barrier), rank (?P<group_rank>\d+),(?: local_expert_idx \d+,)? (?:src|dst)_rank (?P<peers>\d+)", "DeepEP timeout",
        (("Warning: DeepEP timeout for dispatch receive, rank 3, local_expert_idx 2, src_rank 11", {"name": "deepep", "group_rank": 3, "peers": (11,)}),), fields={"name": "deepep"}),
    Row(Kind.ENGINE_WAIT, "DeepEP csrc/kernels/legacy/utils.cuh, 1.0 to 2.0", r"DeepEP timeout check failed: (?:rank = )?(?P<group_rank>\d+), (?:thread = )?(?P<peers>\d+)(?:, value = (?P<number>-?\d+))?\)?", "DeepEP timeout",
        (("DeepEP timeout check failed: rank = 2, thread = 4, value = 1024)", {"name": "deepep_node", "group_rank": 2, "peers": (4,), "number": 1024}),), fields={"name": "deepep_node"},
        more=lambda found, text, fact: fact.clone(peers=()) if fact.number is not None and fact.number <= 0 else fact),
    Row(Kind.ENGINE_WAIT, "DeepEP csrc/kernels/internode.cu, 1.0 to 2.0",
        r"DeepEP (?P<detail>(?:dispatch|combine) .{0,60}?) ?timeout(?: \([^)]*\))?, (?:channel|chunk)[^,]*, (?:RDMA|IB):? (?P<rdma>\d+), (?:nvl|NVL):? (?P<nvl>\d+)(?P<rest>.{0,200})", "DeepEP ",
        (("DeepEP dispatch NVL receiver timeout, channel: 9, RDMA: 1, nvl: 2, src RDMA: 0, src nvl: 5, start: 0, end: 0", {"name": "deepep", "group_rank": 10, "peers": (5,)}),
         ("DeepEP dispatch forwarder timeout (RDMA meta), channel: 11, RDMA: 0, nvl: 3, src RDMA lane: 1, dst NVL: 2, meta: 0, 0, 0, 0", {"group_rank": 3, "peers": (11,)})), fields={"name": "deepep"}, more=_deepep),
    Row(Kind.ENGINE_WAIT, "DeepEP csrc/kernels/impls, 2.0", r"DeepEP notify timeout, rank: (?P<group_rank>\d+), thread: (?P<peers>\d+), count: -1", "DeepEP notify",
        (("DeepEP notify timeout, rank: 2, thread: 5, count: -1", {"name": "deepep_notify", "group_rank": 2, "peers": (5,)}),), fields={"name": "deepep_notify"}),
    Row(Kind.ENGINE_WAIT, "DeepEP csrc, 1.0 to 2.0: the CPU's wait, and every other form", r"DeepEP(?: error)?:? ?(?P<detail>(?:timeout|CPU recv timeout|[\w ()\-]{0,60}timeout).{0,200})|Dispatch CPU wait", "",
        (("RuntimeError: DeepEP error: timeout (dispatch CPU)", {"name": "deepep"}), ("RuntimeError: DeepEP error: CPU recv timeout", {"name": "deepep"}),
         ("DeepEP NVLink barrier timeout, tag: 0, nvl: 3, thread: 0, status: 0, signal: 7, phase: 0, target: 8", {})), fields={"name": "deepep"}),
    # --- reinforcement learning: Ray's drivers, weight synchronisation ----------------------------------------------
    Row(Kind.ENGINE_WAIT, "cosmos-rl, 2026: the mesh of replicas", r"Timed out building the global mesh communicator(?: for \S+)?.{0,20}?\(?rank=(?P<group_rank>\d+), ?world_size=(?P<number>\d+)\)?", "mesh communicator",
        (("Timed out building the global mesh communicator for c07e91b2 (rank=2, world_size=6)", {"name": "mesh", "group_rank": 2, "number": 6}),), fields={"name": "mesh"}),
    Row(Kind.ENGINE_WAIT, "cosmos-rl, prime-rl, NeMo-RL, verl: queues and servers",
        r"wait for nccl comm ready timeout|non-blocking enqueue timed out|RolloutStall: no rollout committed|RDT stall: no progress|Server failed to become healthy|Inference server is not ready after (?P<seconds>\d+)|only \d+/\d+ rollout replicas posted", "",
        (("RolloutStall: no rollout committed and no train step completed in 1800s (12 rollouts in flight, stall_timeout_s=1800)", {"name": "queue"}),), fields={"name": "queue"}),
    Row(Kind.ENGINE_END, "NeMo-RL, SGLang, prime-rl: what follows from an engine's or a trainer's end", r"Updating weights for the generation policy failed|Failed to update parameter online|(?:Orchestrator|Trainer) failed with exit code \d+|Failed to initialize custom process group", "",
        (("Error: Updating weights for the generation policy failed during refit.", {}),), fields={"name": "refit"}),
    Row(Kind.NOTE, "prime-rl src/prime_rl, 0.2 to 0.4: a trainer's first rank waits for the orchestrator", r"Waiting for path (?P<detail>\S+)", "Waiting for path",
        (("[rank0]: Waiting for path /o/broadcasts/step_7/NCCL_READY", {"rank": 0, "name": "waits_elsewhere"}),), fields={"name": "waits_elsewhere"}),
    Row(Kind.EXIT, "LMDeploy lmdeploy/pytorch/engine/model_agent.py, 0.6 to 0.10", r"lmdeploy.{0,80}Rank\[(?P<rank>\d+)\] failed", "] failed",
        (("2026-11-20 10:02:11 - lmdeploy - ERROR - model_agent.py:512 - Rank[1] failed.", {"rank": 1, "number": 1}),), fields={"name": "first", "number": 1}),
    Row(Kind.EXIT, "text-generation-inference launcher/src/main.rs, 0.9 to 3.3", r"text_generation_launcher: Shard process was signaled to shutdown with signal (?P<number>\d+) rank=(?P<rank>\d+)", "was signaled to",
        (("2024-05-21T08:11:35.4Z ERROR text_generation_launcher: Shard process was signaled to shutdown with signal 9 rank=1", {"rank": 1, "number": -9}),), fields={"name": "first", "rank_basis": "launcher"},
        more=lambda found, text, fact: fact.clone(number=-int(found["number"]))),
    Row(Kind.EXIT, "text-generation-inference launcher/src/main.rs, 0.9 to 3.3", r"text_generation_launcher: Shard (?P<rank>\d+) (?:failed to start|crashed)", "text_generation_launcher",
        (("2024-05-21T08:11:35.4Z ERROR text_generation_launcher: Shard 1 failed to start", {"rank": 1, "number": 1}), ("2024-01-09T10:00:02.1Z ERROR text_generation_launcher: Shard 3 crashed", {"rank": 3})),
        ("2024-05-21T08:11:33.7Z ERROR text_generation_launcher: Error when initializing model",), fields={"name": "first", "number": 1, "rank_basis": "launcher"}),
    # --- JAX, TPU ---------------------------------------------------------------------------------------------------
    Row(Kind.ENGINE_WAIT, "XLA xla/tsl/distributed_runtime/coordination/coordination_service.cc, 2023 to 2026", r"Barrier timed out\. Id: ?(?P<detail>\S+?)\.? .*?tasks that reached the barrier: (?P<completed>\d+)/(?P<number>\d+)", "Barrier timed out",
        (("DEADLINE_EXCEEDED: Barrier timed out. Id: ckpt_commit.4.0. This usually happens because a task did not come. # of tasks that reached the barrier: 6/8.", {"name": "barrier", "completed": 6, "number": 8}),), fields={"name": "barrier"}),
    Row(Kind.ACCUSED, "XLA coordination_service.cc, 2023 to 2026", r"/task:(?P<peers>\d+) has been set to ERROR in coordination service: (?P<detail>.{0,160})", "has been set to ERROR",
        (("/job:jax_worker/replica:0/task:3 has been set to ERROR in coordination service: UNAVAILABLE: Task heartbeat timeout.", {"name": "unhealthy", "peers": (3,)}),), fields={"name": "unhealthy"}),
    Row(Kind.ACCUSED, "XLA coordination_service.cc, 2023 to 2026", r"/task:(?P<peers>\d+) unexpectedly tried to connect with a different incarnation", "different incarnation",
        (("ABORTED: /job:jax_worker/replica:0/task:7 unexpectedly tried to connect with a different incarnation. It has likely restarted.", {"name": "restarted", "peers": (7,)}),), fields={"name": "restarted"}),
    Row(Kind.NOTE, "XLA coordination_service_agent.cc, 2023 to 2026: a task that does not reach the coordinator", r"Failed to send heartbeat to coordination service: (?:DEADLINE_EXCEEDED|UNAVAILABLE)", "send heartbeat",
        (("W0224 19:18:11.1 4102 coordination_service_agent.cc:421] Failed to send heartbeat to coordination service: DEADLINE_EXCEEDED: Deadline Exceeded [10.4.0.10:1234]; will retry.", {"name": "cut_off"}),), fields={"name": "cut_off"}),
    Row(Kind.ENGINE_END, "XLA, JAX: an error that all tasks share", r"Polled an error from coordination service|JAX distributed service detected fatal errors|Failed to send RPC to coordination service", "",
        (("Polled an error from coordination service (this can be an error from this or another task).", {}),), fields={"name": "shared"}),
    Row(Kind.ENGINE_WAIT, "XLA xla/service/rendezvous.cc, 2024 to 2026", r"Termination timeout for .{0,80}?(?: of (?P<limit_s>\d+) seconds)? exceeded|(?P<detail>This thread has been waiting for .{0,160}?for (?P<seconds>\d+) ?seconds and may be stuck)", "",
        (("[id=1] This thread has been waiting for `acquire clique for rank 2; clique=devices=[8,9,10,11]; run_id=-155` for 10 seconds and may be stuck.", {"name": "xla", "seconds": 10.0}),
         ("[id=0] Termination timeout for `first call to collective operation 190; run_id=-85` of 40 seconds exceeded. Exiting to ensure a consistent program state.", {"name": "xla_limit", "seconds": 40.0})), fields={"name": "xla"},
        more=lambda found, text, fact: fact if found["limit_s"] is None else fact.clone(name="xla_limit", seconds=float(found["limit_s"]))),
    Row(Kind.NOTE, "XLA xla/service/rendezvous.cc, 2024 to 2026", r"[Tt]hread is unstuck(?:! Warning above was a false-positive| waiting for)", "is unstuck", (("Thread is unstuck! Warning above was a false-positive.", {"name": "unstuck"}),), fields={"name": "unstuck"}),
    Row(Kind.ENGINE_WAIT, "Megascale (libtpu), 2025 to 2026", r"Megascale hang detected: (?P<detail>.{0,160})", "Megascale hang", (("Megascale hang detected: Timed out waiting for 2 graphs to complete at launch_id 2207.", {"name": "megascale"}),), fields={"name": "megascale"}),
    # --- AMD, Ascend ------------------------------------------------------------------------------------------------
    Row(Kind.CUDA, "ROCm ROCr-Runtime, 5.0 to 7.0", r"(?P<detail>HW Exception by GPU node-\d+ .*?reason ?:? ?GPU Hang)", "HW Exception",
        (("HW Exception by GPU node-3 (Agent handle: 0x55) reason :GPU Hang", {"name": "gpu_hang"}),), fields={"name": "gpu_hang", "rank": None, "rank_basis": ""}),
    Row(Kind.CUDA, "Ascend runtime (CANN), EZ9999, 6.x to 8.x", r"(?:\[PID: (?P<pid>\d{1,9})\][^\n]{0,200}?)?(?P<detail>there is an exception of \w+ aivector error|there is an aivec error exception|\[aicore exception\])", "",
        (("[rank5]: EZ9999: The error from device(chipId:5, dieId:0), serial number is 3, there is an exception of fftsplus aivector error, core id is 17", {"rank": 5}),
         ("[PID: 40311] 2025-07-02-09:21:09.988.140 AICORE_Error(EZ9999): The error from device(chipId:6, dieId:0), serial number is 1, there is an exception of fftsplus aivector error", {"pid": 40311}),
         ("rtStreamSynchronize execute failed, reason=[aicore exception][FUNC:FuncErrorReason]", {})), fields={"name": "npu"}),
    Row(Kind.CUDA, "Intel Gaudi synapse under habana_frameworks, 1.10 to 1.20", r"\[Rank:(?P<rank>\d{1,6})\] FATAL ERROR :: (?!.*acquire).*(?P<detail>synStatus=8 \[Device not found\])", "synStatus=8",
        (("[Rank:3] FATAL ERROR :: MODULE:SYNHELPER workspace Allocation of size ::1048576 failed! synStatus=8 [Device not found]", {"rank": 3, "name": "hardware"}),), fields={"name": "hardware"}),
    Row(Kind.ENGINE_WAIT, "Ascend runtime (CANN) under torch_npu", r"error code is 5070(?:11|14|18)|query event recorded status failed|aicore execution times out", "",
        (("NPU function error: call aclrtSynchronizeDevice failed, error code is 507014", {"name": "kernel"}),), fields={"name": "kernel"}),
    Row(Kind.ACCUSED, "Huawei CANN (HCCL), EI0015, 8.x", r"List of unconnected ranks: ?\"?\[(?P<peers>[\d, ]+)\]", "unconnected ranks",
        (("Communicator root detection (EI0015): No rank in the communicator can connect to the root node within the timeout period. List of unconnected ranks: \"[2,6,]\".", {"name": "unconnected", "peers": (2, 6)}),), fields={"name": "unconnected"}),
    Row(Kind.ACCUSED, "Huawei CANN (HCCL), EI0002 with a cluster exception, 7.x to 8.x", r"Cluster Exception Location\[IP/ID\]:\[(?P<host>[\w.:\-]+)/(?P<local_rank>\d+)\].{0,200}?ExceptionType:\[(?P<detail>[^\]]*)\]", "Exception Location",
        (("there are(is) 1 abnormal device(s): Cluster Exception Location[IP/ID]:[10.0.3.7/1], Arrival Time:[Fri], Discoverer:[10.0.3.8/0], ExceptionType:[Heartbeat Lost Occurred], Possible Reason:1. Process has exited",
          {"name": "location", "host": "10.0.3.7", "local_rank": 1}),), fields={"name": "location", "rank": None, "rank_basis": ""}),
    Row(Kind.ACCUSED, "Huawei CANN (HCCL), run log, 7.x to 8.x", r"crimer rank \[(?P<host>[\w.:\-]+)/(?P<local_rank>\d+)\] status\[(?P<detail>\w+)\]", "crimer rank",
        (("[HeartbeatAbnormal]local rank [10.0.3.5/1]: crimer rank [10.0.3.7/2] status[LOST] by informer rank [10.0.3.8/3]", {"name": "location", "local_rank": 2}),), fields={"name": "location", "rank": None, "rank_basis": ""}),
    Row(Kind.TIMEOUT, "Huawei CANN (HCCL), LINK_ERROR_INFO, 7.x to 8.x", r"\| ?[\d.]+\((?P<peers>\d+)\) \| \d+ \| [\d.]+\((?P<own>\d+)\) \| \d+ \| (?:client|server) \| (?P<detail>time ?out)", "| time",
        (("| 192.0.2.9(0) | 16666 | 192.0.3.8(1) | 32344 | client | time out | DISABLE |", {"peers": (0,), "rank": 1}),), fields={"name": "hccl"}, more=lambda found, text, fact: fact.clone(detail="")),
    Row(Kind.EXCEPTION, "Huawei CANN, 6.x to 8.x: another process has the device", r"EJ0001: .{0,60}?(?P<detail>Failed to initialize the HCCP process.*)", "EJ0001",
        (("EJ0001: 2026-05-21-14:22:19.167.645 Failed to initialize the HCCP process. Reason: Maybe the last training process is running.", {"name": "EJ0001"}),), fields={"name": "EJ0001"}),
    Row(Kind.TIMEOUT, "Huawei CANN (HCCL), links, 6.x to 8.x", r"createLink para: ?rank\[\d+\]-localUserrank\[(?P<own>\d+)\].{0,120}?(?:remoteRank|dst_rank)\[\d+\]-remoteUserrank\[(?P<peers>\d+)\](?:.{0,80}?tag\[(?P<detail>[^\]]*)\])?", "createLink para",
        (("Transport init error! createLink para:rank[1]-localUserrank[1]-localIpAddr[10.0.0.1], remoteRank[0]-remoteUserrank[0]-remoteIpAddr[10.0.0.2], tag[HcomAllReduce_6629]", {"peers": (0,), "rank": 1}),), fields={"name": "hccl"}),
    Row(Kind.TIMEOUT, "Huawei CANN (HCCL), the links of EI0006, 7.x to 8.x", r"localUserrank\[(?P<group_rank>\d+)\].{0,60}?remote rank:? ?\[(?P<peers>\d+)\](?:.{0,120}?timeout:? ?\[?(?P<seconds>\d+) ?s)?", "localUserrank",
        (("[rank11]:        [Transport] localUserrank[3]-localIpAddr[10.20.8.13], remote rank:[2]-remote_ip_addr[10.20.8.12], group [group_name_33], state [connecting], timeout 120 s", {"rank": 11, "group_rank": 3, "peers": (2,), "seconds": 120.0}),), fields={"name": "hccl"}),
    Row(Kind.TIMEOUT, "Huawei CANN (HCCL), sockets, 6.x to 8.x", r"wait socket establish timeout, role\[\d\] rank\[(?P<own>\d+)\] timeout\[(?P<seconds>\d+) ?s?\]|device\[\d+\] rank\[(?P<group_rank>\d+)\] get socket timeout", "socket",
        (("wait socket establish timeout, role[1] rank[12] timeout[120 s]", {"rank": 12, "seconds": 120.0}),), fields={"name": "hccl"}),
    # --- watchers, trainers -----------------------------------------------------------------------------------------
    Row(Kind.ENGINE_WAIT, "nvidia-resiliency-ext rank_monitor_server.py, 0.3 to 0.6", r"(?:RankMon(?:itor)?Server(?:\d*@(?P<host>[\w.\-]+))?:(?P<own>\d+)(?:@\S+)?\] )?(?:Did not get (?:subsequent|initial) heartbeat(?:\. Waited (?P<seconds>[\d.]+) seconds)?|(?:Section '(?P<detail>[^']*)' has been open|(?P<outside>Was out of section)) for [\d.]+ seconds\. (?:Timeout is|Setting it as timed out \(limit) (?P<limit_s>[\d.]+))", "",
        (("[Cycle 2] Did not get subsequent heartbeat. Waited 300.00 seconds.", {"name": "monitor", "seconds": 300.0}),
         ("[RankMonitorServer:34@n4] Section 'checkpointing' has been open for 900.14 seconds. Setting it as timed out (limit 900.00 s).", {"rank": 34, "detail": "checkpointing", "seconds": 900.0}),
         ("[RankMonServer7012@dgx-044:12] Section 'dataload' has been open for 302.47 seconds. Timeout is 300.00 seconds.", {"rank": 12, "host": "dgx-044", "detail": "dataload"}),
         ("[RankMonitorServer:19@n3] Was out of section for 302.40 seconds. Timeout is 300.00 seconds.", {"rank": 19, "detail": "out of section", "seconds": 300.0})), fields={"name": "monitor"},
        more=lambda found, text, fact: fact if found["limit_s"] is None else fact.clone(seconds=float(found["limit_s"]), detail=found["detail"] or "out of section")),
    Row(Kind.ENGINE_END, "nvidia-resiliency-ext ft_launcher, 0.3 to 0.6", r"Progress tracker detected no progress|Attribution recommended stopping|reported a no-restart decision", "",
        (("Progress tracker detected no progress across restarts. No more restarts will be attempted.", {"name": "stopped"}),), fields={"name": "stopped"}),
    Row(Kind.ACCUSED, "Megatron-LM megatron/core/rerun_state_machine.py, 0.9 to 0.16", r"(?:Rank (?P<peers>\d+)(?:, node \S+, device \d+, iteration \d+)?: (?:found NaN in local|Unexpected result (?:nan|inf))|Unexpected result (?:tensor\()?(?:nan|inf)(?:, [^)]*\))?\S* on rank (?P<second>\d+))(?P<detail>.{0,160})", "",
        (("AssertionError: Rank 5: found NaN in local forward loss calculation. Device: 5, node: n7", {"name": "nan", "peers": (5,)}), ("Unexpected result nan on rank 6 at iteration #41 invocation #2 (message='found NaN in local grad norm')", {"peers": (6,)})),
        fields={"name": "nan"}, more=lambda found, text, fact: fact if found["peers"] else fact.clone(peers=(int(found["second"]),))),
    Row(Kind.ACCUSED, "Megatron-LM megatron/core/rerun_state_machine.py, 0.9 to 0.16: what the second run has shown", r"Rank (?P<peers>\d+), node (?P<host>[^\s,]+), device \d+(?:, \w+ \d+)?: (?=[Pp]ossible (?:transient|persistent) error)", "ossible ",
        (("Rank 77, node h-91, device 5: Possible transient error!", {"name": "nan", "peers": (77,), "host": "h-91"}),), fields={"name": "nan"}),
    Row(Kind.ACCUSED, "Lightning pytorch_lightning/strategies/ddp.py, 1.5 to 1.9", r"DeadLock detected from rank: ?(?P<peers>\d+)(?P<detail>.{0,160})", "DeadLock detected",
        (("DeadlockDetectedException: DeadLock detected from rank: 2", {"name": "raised", "peers": (2,)}),), fields={"name": "raised"}),
    Row(Kind.ACCUSED, "torch/distributed/checkpoint/api.py, 2.0 to 2.15", r"CheckpointException ranks: ?(?:dict_keys\()?\[(?P<peers>[\d, ]+)\]", "CheckpointException",
        (("torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([3, 7])", {"name": "checkpoint", "peers": (3, 7)}),), fields={"name": "checkpoint"}),
    Row(Kind.ACCUSED, "programs that wait for all their ranks with a limit",
        r"(?=.*(?:[Tt]imed out|[Tt]imeout))(?:.*?(?P<completed>\d+)/(?P<number>\d+) ranks arrived(?:: ?\[(?P<here>[\d, ]+)\])?|.*?[^\[](?:[Mm]issing|[Aa]bsent) ranks:? ?\[(?P<peers>[\d, ]+)\])", "ranks",
        (("barrier timed out after 600 s: 3/4 ranks arrived: [0, 1, 3]", {"name": "barrier", "peers": (2,)}), ("RuntimeError: timed out in gather, missing ranks: [5]", {"peers": (5,)})),
        ("gather went on, missing ranks: [3, 5]", "all ranks arrived in time, no timeout"), fields={"name": "barrier", "rank": None, "rank_basis": ""}, more=_arrived),
    Row(Kind.NOTE, "Ray Train python/ray/train/v2/_internal/execution/worker_group/poll.py, 2.43 to 2.52: whose traceback follows", r"^\[Rank (?P<peers>\d+) Error Snippet\]:", "Error Snippet",
        (("[Rank 4 Error Snippet]:", {"peers": (4,), "name": "snippet"}),), fields={"name": "snippet", "rank": None, "rank_basis": ""}),
    Row(Kind.ENGINE_WAIT, "Ray Train v2, 2.43 to 2.50", r"worker health check has been hanging for (?P<seconds>[\d.]+) seconds|WorkerGroupStartupTimeoutError", "",
        (("A worker health check has been hanging for 601.20 seconds. Marking the worker as dead.", {"name": "health"}),), fields={"name": "health"}),
    Row(Kind.ENGINE_WAIT, "torchcomms CTRAN, 2026", r"collective TIMED OUT for graph \d+ collective \d+ on rank (?P<own>\d+)(?: - elapsed \d+ms > timeout (?P<ms>\d+)ms)?|Communicator aborted \(timeout\) on rank (?P<group_rank>\d+)", "",
        (("[TC][rank=5][name=0] Graph monitor: collective TIMED OUT for graph 3 collective 12 on rank 5 - elapsed 30010ms > timeout 30000ms", {"name": "graph", "seconds": 30.0}),), fields={"name": "graph"}),
    Row(Kind.NOTE, "NeMo nemo/utils/callbacks (straggler_det_callback.py), 1.23 to 2.2", r"STRAGGLER DETECTION WARNING: .*?Affected ranks: (?P<detail>.*)", "STRAGGLER DETECT",
        (("STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected ranks: Rank=11 (score 0.41 < threshold 0.7)", {"peers": (11,)}),), fields={"name": "straggler", "rank": None, "rank_basis": ""},
        more=lambda found, text, fact: fact.clone(peers=tuple(int(rank) for rank in re.findall(r"[Rr]ank[ =](\d+)", fact.detail)))),
    Row(Kind.ENGINE_END, "NeMo nemo/utils/callbacks (straggler_det_callback.py), 1.23 to 2.2", r"Detected stragglers[.:] [Tt]erminating training", "etected stragglers",
        (("[NeMo E 2025-02-02 02:03:00 straggler_det_callback:131] Detected stragglers. Terminating training...", {"name": "straggler"}),), fields={"name": "straggler"}),
    Row(Kind.ENGINE_WAIT, "Horovod horovod/common/stall_inspector.cc, 0.18 to 0.28", r"(?:is|are) stalled for longer than (?P<seconds>\d+) seconds\. Will shutdown", "stalled for longer",
        (('One or more rank (marked by "!") is stalled for longer than 300 seconds. Will shutdown.', {"seconds": 300.0, "name": "horovod"}),), fields={"name": "horovod", "rank": None, "rank_basis": ""}),
    Row(Kind.ALIVE, "vLLM, SGLang, uvicorn: a server's answer to a probe", r"\"GET /health\w* HTTP/1\.[01]\" 200", "/health",
        (('INFO:     10.1.7.7:50230 - "GET /health_generate HTTP/1.1" 200 OK', {"name": "generate"}),), ('"GET /health HTTP/1.1" 503 Service Unavailable',), fields={"name": "generate", "after_symptom": True, "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "trainers that begin again where they were", r"[Rr]esum(?:e|ed|es|ing) (?:training )?(?:from|at) (?:(?:\w+ ){0,2}(?:step|iteration|epoch|checkpoint)|(?:\S*/)?\w*(?:ckpt|checkpoint|step|iter)\S*|/\S*\d)|Restored all states from the checkpoint|\bloaded checkpoint .{0,120}\biter(?:ation)? \d+", "",
        (("[rank0] resumed from step 7140", {"name": "resumed"}), ("resuming from /mnt/ckpt/s_9000", {}), ("resuming from /data/run/it900", {}), ("Restored all states from the checkpoint at /ck/hpc_ckpt_3.ckpt", {})), fields={"name": "resumed", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "torchft torchft/manager.py, 2025 to 2026: a replica group has made a step with the others", r"torchft\S*manager(?::| - \w+ - )\[(?P<detail>[\w.\-]+?)(?::[\w\-]+)?/\d+ - step \d+\] should_commit=True", "should_commit=True",
        (("INFO:torchft.manager:[ddp_1:aa1f-1/0 - step 59] should_commit=True enough_replicas=True, errored=None", {"name": "committed", "detail": "ddp_1"}),
         ("2026-02-14 14:00:01,000 - torchft.manager - INFO - [ddp_0:1c2d/0 - step 9] should_commit=True enough_replicas=True", {"detail": "ddp_0"})),
        ("INFO:torchft.manager:[ddp_0:aa1f-0/0 - step 20] should_commit=False enough_replicas=True, errored=RuntimeError",), fields={"name": "committed", "rank": None, "rank_basis": ""}),
    Row(Kind.ACCUSED, "Mooncake mooncake-ep (mooncake_worker.cu), 0.3", r"Rank (?P<number>\d+): no response from peer rank (?P<peers>\d+) within (?P<us>\d+) us", "no response from peer",
        (("W20260502 10:14:16.122346 3202 mooncake_worker.cu:311] Rank 2: no response from peer rank 5 within 10000000 us, marking it broken; active_ranks=[1,1,1,1,1,0,1,1]", {"number": 2, "peers": (5,), "seconds": 10.0}),),
        fields={"name": "silent", "rank": None, "rank_basis": ""}, more=lambda found, text, fact: fact.clone(seconds=int(found["us"]) / 1e6)),
    Row(Kind.ACCUSED, "Linux kernel/hung_task.c, 3.0 to 6.15", r"INFO: task (?P<detail>python[\w.]*|pt_main_thread):(?P<pid>\d+) blocked for more than \d+ seconds", "blocked for more than",
        (("[Wed Oct  9 16:12:41 2024] INFO: task python:40117 blocked for more than 120 seconds.", {"pid": 40117}),), fields={"name": "blocked", "rank": None, "rank_basis": ""}),
    Row(Kind.KERNEL_OOM, "IBM Spectrum LSF, 10", r"TERM_MEMLIMIT: (?P<detail>job killed.*)", "TERM_", (("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", {"name": "lsf"}),), fields={"name": "lsf", "rank": None, "rank_basis": ""}),
    Row(Kind.SCHEDULER, "IBM Spectrum LSF, 10", r"TERM_RUNLIMIT: job killed", "TERM_", (("TERM_RUNLIMIT: job killed after reaching LSF run time limit.", {"name": "TIME LIMIT"}),), fields={"name": "TIME LIMIT", "rank": None, "rank_basis": "", "host": ""}),
    Row(Kind.ACCUSED, "Horovod horovod/common/stall_inspector.cc, 0.13 to 0.28", r"(?P<detail>[\w./\-]+)!? ?\[missing ranks: (?P<peers>[\d, ]+)\]", "[missing ranks",
        (("Stalled ops: HorovodAllreduce_g_0 [missing ranks: 3, 5]", {"name": "horovod", "peers": (3, 5)}),), fields={"name": "horovod"}),
    Row(Kind.ACCUSED, "Horovod horovod/common/operations.cc, 0.9 to 0.15", r"(?P<detail>[\w./\-]+)!? ?\[ready ranks: (?P<peers>[\d, ]+)\]", "[ready ranks",
        (("HorovodAllreduce_g_0 [ready ranks: 5, 0, 2]", {"name": "horovod_ready", "peers": (5, 0, 2)}),), fields={"name": "horovod_ready"}),
    Row(Kind.SCHEDULER, "Ray, 2.5 to 2.50: the end of a node", r"(?:its node has died|node with node id:?.{0,80}?address: ?(?P<host>[\w.:\-]+).{0,40}?marked dead(?! because.{0,80}(?:idle|expected) termination)|actor's node was terminated unexpectedly)(?P<detail>.{0,120})", "",
        (("The node with node id: 0f2a and address: 10.0.3.7 and node name: 10.0.3.7 has been marked dead because the detector has missed too many heartbeats from it.", {"host": "10.0.3.7", "name": "NODE FAILURE"}),),
        fields={"name": "NODE FAILURE", "rank": None, "rank_basis": ""}, more=_ray_node),
    Row(Kind.ACCUSED, "Ray Train (python/ray/train/v2/_internal/execution/checkpoint/sync_actor.py, 2.47 to 2.60)", r"[Tt]he following ranks have not called it: \[(?P<peers>[\d, ]+)\]", "have not called it",
        (("The following ranks have not called it: [2]", {"name": "barrier", "peers": (2,)}),), fields={"name": "barrier"}),
    Row(Kind.NOTE, f"{_ELASTIC.replace('multiprocessing', 'agent/server')}, 1.9 to 2.15", r"Rendezvous complete for workers\. Result: restart_count=[1-9]", "Rendezvous complete",
        (("I0915 01:01:24.000000 3300 torch/distributed/elastic/agent/server/api.py:525] [default] Rendezvous complete for workers. Result: restart_count=1 group_rank=0", {"name": "restarted"}),), fields={"name": "restarted"}),
    Row(Kind.NOTE, f"{_ELASTIC.replace('multiprocessing', 'agent/server')}, 1.9 to 2.15", r"Worker group \w+\. \d+/\d+ attempts left; will restart worker group", "will restart worker",
        (("W1103 10:02:09.300000 41801 torch/distributed/elastic/agent/server/api.py:887] [default] Worker group FAILED. 1/1 attempts left; will restart worker group", {"name": "restarts"}),), fields={"name": "restarts", "rank": None, "rank_basis": ""}),
    Row(Kind.KERNEL_OOM, "Ray memory monitor, 2.4 to 2.50", r"where the (?:task|lease) \((?:actor ID: \w+, |task ID: \w+, )?name=(?P<place>[^,]*), pid=(?P<pid>\d+), memory used=", "memory used=",
        (("Memory on the node (IP: 10.2.1.5, ID: c1a2e3) where the task (actor ID: 50c1, name=07GxWorkerDict_0:3, pid=87687, memory used=141.02GB) was running was 953.11GB / 1002.40GB", {"pid": 87687, "name": "ray", "place": "07GxWorkerDict_0:3"}),
         ("Memory on the node (IP: 10.2.1.5, ID: c1a2e3) where the lease (actor ID: 50c1, name=07GxWorkerDict_0:3:WorkerDict.__init__, pid=87687, memory used=141.02GB) was running", {"pid": 87687, "place": "07GxWorkerDict_0:3:WorkerDict.__init__"})),
        fields={"name": "ray", "rank": None, "rank_basis": ""}, more=lambda found, text, fact: fact.clone(place=found["place"])),
    Row(Kind.KERNEL_OOM, "Ray memory monitor, 2.2 to 2.50", r"(?P<number>[1-9]\d*) Workers? \(tasks / actors\) killed due to memory pressure.{0,120}?IP: (?P<host>[\w.:\-]+)\)|NODE_OUT_OF_MEMORY", "",
        (("2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons at node (ID: 3f, IP: 10.0.3.7) over the last time period.", {"host": "10.0.3.7", "number": 2}),),
        fields={"name": "ray", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "watchdogs and monitors that announce that they end a process themselves (nvidia-resiliency-ext, TensorRT-LLM, torch and others)",
        r"(?i:\bprocess \(?pid[ =]\d+\)? will be (?:terminated|killed|aborted)|hard-kill|"
        r"(?:watchdog|hang\b|hang[- ]?detect|hung|monitor|heartbeat|stall|timed? ?out|no progress|unresponsive|stuck)[^|]{0,160}?"
        r"(?:\b(?:hard-)?killing\b|\b(?:aborting|terminating)\b|\b(?:will|going to|to) (?:now )?(?:be )?(?:kill|abort|terminat)(?:e|ed)?\b|\bsending SIG(?:KILL|ABRT|TERM)\b|\btaking the entire process down)|"
        r"\b(?:killing|aborting|terminating|sending SIG(?:KILL|ABRT|TERM) to)\b[^|]{0,120}\b(?:watchdog|hang|hung|stuck|stalled|unresponsive|heartbeats?|no progress|timed out|timeout)\b)", "kill|Kill|KILL|bort|BORT|erminat|ERMINAT|entire process",
        (("[RankMonitorServer:2] Rank process (pid=4412) will be terminated with signal SIGKILL", {"pid": 4412, "name": "will_end"}),
         ("[TRT-LLM] [RANK 2] [E] hard-killing and propagating to peer ranks.", {"detail": "all"}),
         ("[rank3] training watchdog: no progress for 900 s, killing this process", {"name": "will_end"}), ("[health] killing rank 3: no heartbeat for 120 s", {})),
        ("Slurm: Killing JobId=77 on failed node h7", "retry after a timeout of 3 s"),
        fields={"name": "will_end"}, more=_will_end),
    # --- processes that die, as launchers tell it -------------------------------------------------------------------
    Row(Kind.EXIT, f"{_ELASTIC}, 1.9 to 2.15", r"failed \(exitcode: (?P<number>-?\d+)\)(?: for binary located at .*? with)? local_rank: (?P<local_rank>\d+) \((?:pid|process ID): (?P<pid>\d+|…)\)", "local_rank: ",
        (
            ("ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 (pid: 812917) of binary: /usr/bin/python", {"number": -9, "local_rank": 3, "pid": 812917}),
            ("[2023-10-13 17:40:02,544] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: -11) local_rank: 0 (pid: 62498) of binary: /x", {"number": -11}),
            ("E0813 06:19:49.809000 161210 site-packages/torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 7 (pid: 9) of binary: /x", {"number": 1, "local_rank": 7}),
            ("0: E0813 06:19:49.809000 1 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 2 (pid: 7) of binary: /x", {"local_rank": 2, "node": 0}),
            ("failed (exitcode: -9) for binary located at /opt/bin/python with local_rank: 0 (process ID: 71)", {"local_rank": 0, "pid": 71}),
        ), ("traceback : exitcode : 1 (pid: 4100) local_rank: 3",), fields={"name": "local", "rank": None, "rank_basis": ""}),
    Row(Kind.ENDED_BY_LAUNCHER, f"{_ELASTIC}, 1.9 to 2.15", r"Sending process (?P<pid>\d+) closing signal (?P<name>SIG\w+)", "closing signal",
        (("W1223 05:17:58.996000 3304089 torch/distributed/elastic/multiprocessing/api.py:908] Sending process 3304210 closing signal SIGTERM", {"pid": 3304210}),)),
    Row(Kind.NOTE, f"{_ELASTIC}, 1.9 to 2.15", r"Unable to shutdown process (?P<number>\d+) via (?:Signals\.)?\w+", "to shutdown process",
        (("Unable to shutdown process 4100 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL", {"name": "forced_kill"}),), fields={"name": "forced_kill"}),
    Row(Kind.LAUNCHER, "torch/multiprocessing/spawn.py, 1.0 to 2.15", r"process (?P<local_rank>\d+) terminated with signal (?P<signal>\w+)", "terminated with signal",
        (("torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL", {"local_rank": 0, "number": -9}),), fields={"name": "first", "rank": None}, more=_spawned),
    Row(Kind.EXIT, "torch/multiprocessing/spawn.py, 1.0 to 2.15", r"process (?P<local_rank>\d+) terminated with exit code (?P<number>\d+)|Process (?P<local>\d+) terminated with the following error", "terminated with",
        (("ProcessExitedException: process 1 terminated with exit code 1", {"local_rank": 1, "number": 1}), ("-- Process 2 terminated with the following error:", {"local_rank": 2})),
        fields={"name": "local", "rank": None, "rank_basis": ""},
        more=lambda found, text, fact: fact if found["local"] is None else fact.clone(local_rank=int(found["local"]), number=1)),
    Row(Kind.LAUNCHER, "Open MPI orte, prterun, 1.8 to 5.0; MPICH hydra says it by host", r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<host>\S+) exited on signal (?P<number>\d+)", "exited on",
        (("mpirun noticed that process rank 1 with PID 12345 on node gpu1 exited on signal 9 (Killed).", {"rank": 1, "number": -9, "host": "gpu1"}),),
        fields={"name": "first", "rank_basis": "launcher"}, more=_negative),
    Row(Kind.LAUNCHER, "Open MPI opal/util/stacktrace.c, 1.6 to 5.0, in the process that crashes", r"\[(?P<host>[\w.\-]+):(?P<pid>\d+)\] Signal: [\w ]+ \((?P<number>\d+)\)", "] Signal: ",
        (("[c2:21879] Signal: Segmentation fault (11)", {"host": "c2", "pid": 21879, "number": -11}),), more=_negative),
    Row(Kind.LAUNCHER, "HPE Cray PALS (mpiexec, aprun), 1.0 to 1.6", r"rank (?P<rank>\d+) died from signal (?P<number>\d+)", "died from signal",
        (("x3005c0s7b1n0.hsn.cm: rank 17 died from signal 11 and dumped core", {"rank": 17, "number": -11}),), fields={"name": "first"},
        more=lambda found, text, fact: fact.clone(kind=Kind.ENDED_BY_LAUNCHER) if fact.number == 15 else fact.clone(number=-(fact.number or 0))),
    Row(Kind.SCHEDULER, "HPE Cray PALS (mpiexec, aprun), 1.0 to 1.6: what starts the ranks of a host", r"(?<![A-Za-z\-])(?P<host>[A-Za-z][\w\-]*)[\w.\-]*: shepherd died from signal (?!15\b)\d+", "died from signal",
        (("x3005c0s7b1n0.hsn.cm: shepherd died from signal 9", {"host": "x3005c0s7b1n0", "name": "shepherd"}),), ("x3005c0s7b1n0.hsn.cm: shepherd died from signal 15",), fields={"name": "shepherd"}),
    Row(Kind.LAUNCHER, "gcloud compute tpus tpu-vm ssh --worker=all, 400 to 540", r"Command execution on worker (?P<rank>\d+) failed with exit status (?P<number>\d+)", "Command execution",
        (("##### Command execution on worker 2 failed with exit status 137. Continuing.", {"rank": 2, "number": -9}), ("##### Command execution on worker 0 failed with exit status 134. Continuing.", {"number": -6})),
        fields={"name": "event", "rank_basis": "launcher"}, more=lambda found, text, fact: fact.clone(number=128 - (fact.number or 0)) if 128 < (fact.number or 0) < 160 else fact),
    Row(Kind.LAUNCHER, "PaddlePaddle paddle.distributed.launch, 2.3 to 3.1", r"Container rank (?P<rank>\d+) status failed .*\bcode (?P<number>-?\d+)", "Container rank",
        (("Container rank 3 status failed cmd ['/usr/bin/python3', '-u', 'run.py'] code -9 log log/workerlog.3", {"rank": 3, "number": -9}), ("Container rank 0 status failed cmd ['python'] code 1 log log/workerlog.0", {"rank": None, "number": 1})),
        fields={"name": "first", "rank_basis": "launcher"}, more=lambda found, text, fact: fact if (fact.number or 0) < 0 or fact.rank else fact.clone(rank=None, rank_basis="")),  # it tells the first in its list of those that have failed
    Row(Kind.LAUNCHER, "IBM Spectrum LSF jsrun, 10", r"One or more process \(first noticed rank (?P<rank>\d+)\) terminated with signal (?P<number>\d+)", "first noticed rank",
        (("ERROR:  One or more process (first noticed rank 37) terminated with signal 9", {"rank": 37, "number": -9}),), fields={"name": "first", "rank_basis": "launcher"},
        more=lambda found, text, fact: fact.clone(kind=Kind.ENDED_BY_LAUNCHER) if fact.number == 15 else fact.clone(number=-(fact.number or 0))),
    Row(Kind.LAUNCHER, "Flux flux-core src/shell/doom.c, 0.46 to 0.80", r"doom: .{0,80}?rank (?P<rank>\d+) on host (?P<host>\S+) exited and exit-timeout=(?P<seconds>[\d.]+)s", "doom: ",
        (("flux-shell[0]: FATAL: doom: python3: rank 3 on host node1 exited and exit-timeout=30s has expired", {"rank": 3, "host": "node1", "seconds": 30.0}),), fields={"name": "first", "rank_basis": "launcher", "number": None}),
    Row(Kind.LAUNCHER, "Lightning lightning/fabric/strategies/launchers/subprocess_script.py, 2.0 to 2.5", r"\[rank: (?:0|(?P<local_rank>\d+))\] Child process with PID (?P<pid>\d+) terminated with code (?P<number>-?\d+)", "terminated with code",
        (("[rank: 3] Child process with PID 4711 terminated with code -9. Forcefully terminating all other processes to avoid zombies", {"local_rank": 3, "number": -9}),
         ("[rank: 0] Child process with PID 4711 terminated with code -9.", {"local_rank": None, "pid": 4711})), fields={"name": "first", "rank": None, "rank_basis": ""}),
    Row(Kind.LAUNCHER, "DeepSpeed launcher/launch.py, 0.5 to 0.18", r"(?:--local[_-]rank=(?P<local_rank>0)(?!\d).*)?exits with return code = (?P<number>-?\d+)", "return code = ",
        # The command is the one that the launcher started last, whichever process ended (launch.py: `cmd` of its loop);
        # it names the process that ended only where it is the only one.
        (("[ERROR] [launch.py:322:sigkill_handler] ['python', '-u', 'a.py', '--local_rank=6'] exits with return code = -11", {"local_rank": None, "number": -11}),
         ("[ERROR] [launch.py:322:sigkill_handler] ['python', '-u', 'a.py', '--local_rank=0'] exits with return code = -11", {"local_rank": 0})), fields={"name": "first", "rank": None, "rank_basis": ""}),
    Row(Kind.ENDED_BY_LAUNCHER, "DeepSpeed launcher/launch.py, 0.5 to 0.18", r"sigkill_handler\] Killing subprocess (?P<pid>\d+)", "Killing subprocess",
        (("[2024-05-01 10:00:00,1] [INFO] [launch.py:316:sigkill_handler] Killing subprocess 4100", {"pid": 4100}),)),
    Row(Kind.NOTE, "ncclguard ncclguard/training/step.py", r"ncclguard: (?:went on without ranks? (?P<peers>\d[\d, \-]*) after|[\d.]+ s 后在没有 rank (?P<second>\d[\d、 \-]*) 的情况下继续训练)", "went on without|的情况下继续训练",
        (("ncclguard: went on without ranks 2-3, 5 after 0.2 s", {"name": "went on", "peers": (2, 3, 5)}), ("ncclguard: 0.2 s 后在没有 rank 2 的情况下继续训练", {"peers": (2,)})),
        fields={"name": "went on"}, more=lambda found, text, fact: fact.clone(peers=numbers(found["peers"] or found["second"]))),
    Row(Kind.NOTE, "ncclguard ncclguard/coordination/inquiry.py: a rank that is awaited, and where it is", r"(?:\brank |的 rank )(?P<number>\d+)(?: [^:;：；]{1,80}?)?(?: has not come: | 没有来：)(?:it is at |它在 )(?P<detail>[^;；]+)", "has not come: |没有来：",
        (("ncclguard: all_reduce() has been waiting for 20 s (deadline in 40 s): rank 1 has not come: it is at data.py:44 in fetch", {"name": "not come", "number": 1, "detail": "data.py:44 in fetch"}),
         ("ncclguard: all_reduce() 已等待 20 s（40 s 后到时限）：rank 1 没有来：它在 data.py:44 in fetch", {"name": "not come", "number": 1})),
        ("rank 1 has not come: it waits in barrier()", "rank 1 has not come: where it is, is unknown"), fields={"name": "not come", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "ncclguard ncclguard/engine/runtime.py: a later incident of a known fault", r"ncclguard: (?:the fault of incident \S+ goes on: |事故 \S+ 的故障仍在继续：)(?P<detail>.*)", "the fault of incident|的故障仍在继续",
        (("ncclguard: the fault of incident e9511fea-0-cpu-865c6391-6.0 goes on: barrier() failed after 0.491 s: ranks 1-2 failed.", {"name": "fault goes on", "detail": "barrier() failed after 0.491 s: ranks 1-2 failed."}),
         ("ncclguard: 事故 e9511fea-0-cpu-865c6391-6.0 的故障仍在继续：barrier() 在 0.491 s 后失败：rank 1-2 出错。", {"name": "fault goes on"})), fields={"name": "fault goes on"}),
    Row(Kind.NOTE, "ncclguard ncclguard/evaluation/decision.py", r"ncclguard (?:evaluation |\S+ [^：]*?的评估 ).*?(?:, and training goes on\.|训练继续。)", "training goes on.|训练继续。",
        (("ncclguard evaluation evaluate() at step 9: failed after 1 try; NaN is returned, because no `fallback=` was given, and training goes on.", {"name": "evaluation over"}),
         ("ncclguard 第 9 步的评估 evaluate()：1 次尝试后失败；返回 NaN，训练继续。", {"name": "evaluation over"})), fields={"name": "evaluation over"}),
    Row(Kind.LAUNCHER, "Slurm srun, 20 to 25", r"srun: error: (?P<host>\S+?): tasks? (?P<peers>[\d,\- ]+): (?P<name>Killed|Out Of Memory|Segmentation fault|Bus error|Aborted|Terminated|Unspecified error|Exited with exit code (?P<code>\d+))", "srun: error",
        (("srun: error: node1: task 5: Out Of Memory", {"node": 5, "number": -9, "host": "node1"}), ("srun: error: node1: task 3: Segmentation fault (core dumped)", {"number": -11}),
         ("srun: error: node1: task 3: Exited with exit code 137", {"number": -9})),
        fields={"rank": None}, more=_srun),
    Row(Kind.KERNEL_OOM, "Slurm slurmstepd, 18 to 25", r"slurmstepd: error: (?P<detail>Detected \d+ oom[_-]kill event.*|.*Exceeded (?:job|step) memory limit.*)", "slurmstepd",
        (("slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed.", {}),), fields={"name": "slurm"}),
    Row(Kind.SCHEDULER, "Slurm slurmstepd and srun, 18 to 25", r"(?:slurmstepd|srun): (?:error: )?.*?CANCELLED AT \S+ DUE (?:TO|to) (?P<name>TIME LIMIT|NODE FAILURE|PREEMPTION|JOB REQUEUE)", "DUE ",
        (("slurmstepd: error: *** STEP 123.0 ON node1 CANCELLED AT 2024-05-01T10:00:00 DUE TO TIME LIMIT ***", {"name": "TIME LIMIT", "host": ""}),)),
    Row(Kind.ENDED_BY_LAUNCHER, "Slurm, 18 to 25", r"(?:slurmstepd|srun): (?:error: )?.*?(?:CANCELLED AT(?!.*DUE (?:TO|to) [A-Z])|Terminating (?:StepId|job step)|Job step aborted|forcing job termination)", "",
        (("slurmstepd: error: *** STEP 123.0 ON node1 CANCELLED AT 2024-05-01T10:00:00 ***", {}),)),
    Row(Kind.SCHEDULER, "Slurm srun, 18 to 25", r"srun: error: Node failure on (?P<host>\S+)", "Node failure", (("srun: error: Node failure on gpu-07", {"host": "gpu-07"}),), fields={"name": "NODE FAILURE"}),
    Row(Kind.NOTE, "systemd src/shared/wall.c, 240 to 257; Google Compute Engine", r"^The system (?:will|is going to|is going down for) (?:power ?off|halt|reboot|system halt) (?i:now)\b(?!.*cancel)|^(?!.*\b(?:when|if|until|before)\b).*\b(?:instance|VM) is being preempted\b", "The system will |The system is going |is being preempted",
        (("The system will power off now!", {"name": "taken"}), ("The system is going down for reboot NOW!", {"name": "taken"}), ("(GCE: instance is being preempted)", {"name": "taken"})),
        ("The system will reboot at Tue 2025-06-03 02:00 UTC!",), fields={"name": "taken", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "systemd src/core/unit.c, 243 to 257", r"[\w@.\-]+\.service: A process of this unit has been killed by the OOM killer", "killed by the OOM killer",
        (("systemd[1]: ddp@2.service: A process of this unit has been killed by the OOM killer.", {"name": "unit_oom"}),), fields={"name": "unit_oom", "rank": None, "rank_basis": ""}),
    Row(Kind.KERNEL_OOM, "Flux flux-shell (oom), 0.60 to 0.80", r"flux-shell\[\d+\]: ERROR: oom: (?P<detail>Memory cgroup out of memory: killed \d+ tasks? on (?P<host>[\w.\-]+\w))", "Memory cgroup out of memory",
        (("402.117s: flux-shell[1]: ERROR: oom: Memory cgroup out of memory: killed 1 task on tuolumne1044.", {"name": "flux", "host": "tuolumne1044"}),), fields={"name": "flux", "rank": None, "rank_basis": ""}),
    Row(Kind.SCHEDULER, "Slurm slurmctld's log, scontrol and sinfo, 18 to 25",
        r"(?:Nodes? (?P<host>[\w.\-]+) not responding, setting|[Nn]ode (?P<name>[\w.\-]+) (?:(?:is )?now|is|was|marked|set(?: to)?|state set to)) DOWN\b|on failed node (?P<detail>[\w.\-]+)|\bNodeName=(?P<listed>[\w.\-]+) .*\bState=DOWN\b", "",
        (("[2026-01-03T10:34:13.402] error: Nodes h7 not responding, setting DOWN", {"host": "h7", "name": "NODE FAILURE"}), ("[2026-01-03T10:34:13.403] Killing JobId=77 on failed node h7", {"host": "h7"}),
         ("slurmctld: node gpu-3 state set to DOWN", {"host": "gpu-3"}), ("NodeName=gpu-3 Arch=x86_64 State=DOWN ThreadsPerCore=2", {"host": "gpu-3"})), ("error: Nodes h7 not responding",),
        fields={"rank": None, "rank_basis": ""},
        more=lambda found, text, fact: fact.clone(host=next(filter(None, found.groups())), name="NODE FAILURE", detail="")),
    Row(Kind.SCHEDULER, "Flux job-manager and flux-shell, 0.50 to 0.80", r"\btype=\"?node-failure\b.*?node failure on (?P<host>[\w.\-]+)", "node-failure",
        (("960.214s: job.exception type=node-failure severity=0 node failure on tuo1187 (shell rank 5)", {"host": "tuo1187", "name": "NODE FAILURE"}),
         ('1775.91 exception type="node-failure" severity=0 userid=55 note="node failure on n12 (shell rank 5)"', {"host": "n12"})), fields={"name": "NODE FAILURE", "rank": None, "rank_basis": ""}),
    Row(Kind.SCHEDULER, "Flux flux-shell, 0.50 to 0.80", r"flux-shell\[\d+\]: .*?shell rank \d+ \(on (?P<host>[\w.\-]+)\): lost contact", "lost contact",
        (("960.301s: flux-shell[0]: ERROR: output: shell rank 5 (on tuo1187): lost contact, output may be incomplete", {"host": "tuo1187", "name": "NODE FAILURE"}),), fields={"name": "NODE FAILURE", "rank": None, "rank_basis": ""}),
    Row(Kind.SCHEDULER, "Kubernetes events (kubectl get events, describe pod), 1.20 to 1.34",
        r"\b(?P<name>OOMKilled|OOMKilling|Evicted|Preempted|Preempting|NodeNotReady|TaintManagerEviction)\b(?: (?P<host>(?:pod|node)/\S+))?(?P<detail>.*)", "",
        (("12m   Warning   Evicted   pod/train-worker-2   The node was low on resource: memory. Threshold quantity: 100Mi", {"name": "Evicted", "host": "pod/train-worker-2"}),
         ("      Reason:       OOMKilled", {"name": "OOMKilled"}), ("3m  Normal  NodeNotReady  node/gpu-17  Node gpu-17 status is now: NodeNotReady", {"host": "node/gpu-17"})), fields={"rank": None, "rank_basis": ""}),
    Row(Kind.SCHEDULER, "Volcano's events as YAML, 1.8 to 1.12", r"^\s*reason: Evict$", "reason: Evict", (("reason: Evict", {"name": "Evicted"}),), fields={"name": "Evicted"}),
    Row(Kind.EXIT, "accelerate, subprocess (CPython), 3.8 to 3.13", r"died with <Signals\.(?P<signal>SIG\w+): \d+>", "died with", (("subprocess.CalledProcessError: Command '[...]' died with <Signals.SIGKILL: 9>.", {"number": -9}),),
        fields={"name": "command", "rank": None, "rank_basis": ""}, more=_spawned),
    Row(Kind.EXIT, "bash jobs.c, 3.2 to 5.2: a program that a signal ended", r"^(?P<signal>Killed|Segmentation fault|Bus error|Aborted|Illegal instruction)(?: \(core dumped\))?$", "",
        (("Killed", {"number": -9}), ("Segmentation fault (core dumped)", {"number": -11})), ("Killed by the user", "Aborted!"),
        fields={"name": "shell", "rank": None, "rank_basis": ""}, more=_of_shell),
    Row(Kind.EXIT, "bash jobs.c, 3.2 to 5.2, and zsh: a script's process that a signal ended", r"^(?:\S+: line \d+: |\[\d+\] [+\-]? )(?P<pid>\d+) (?i:(?P<signal>killed|segmentation fault|bus error|aborted|illegal instruction|floating point exception))\b", "",
        (("run.sh: line 12:  4188 Killed                  python train.py --rank 2", {"pid": 4188, "number": -9}), ("[1]  + 4188 segmentation fault (core dumped)  python train.py --rank 2", {"pid": 4188, "number": -11})),
        ("run.sh: line 12: 4188 Terminated              python train.py",), fields={"name": "command", "rank": None, "rank_basis": ""}, more=_of_shell),
    Row(Kind.EXIT, "scripts that print how containers with a RANK in their environment ended", r"(?<![A-Z_])RANK=(?P<rank>\d{1,6})\b.{0,120}?(?<![\w\-])exit(?:_?[Cc]ode)?=(?P<number>\d{1,3})\b", "RANK=",
        (("RANK=3 node=legacy-pool-04 exit=132 at=2025-04-09T13:26:59Z", {"rank": 3, "number": -4}), ("RANK=0 node=pool-a-71 exit=1", {"rank": 0, "number": 1})),
        more=lambda found, text, fact: fact.clone(number=128 - (fact.number or 0)) if 128 < (fact.number or 0) < 160 else fact if fact.number else None),
    Row(Kind.LAUNCHER, "launchers of whatever kind that say how a rank has ended",
        r"(?<!of\s)(?<!for\s)\b[Rr]ank[ =:#]*(?P<rank>\d{1,6})\)?(?:,? \(?pid[ =:]?(?P<pid>\d+)\)?,?)?(?: on \S+)? (?:has |was )?(?:exited|died|terminated|crashed|killed|ended) (?:with|by|on|from) (?:(?:exit )?(?:code|status)[ =:]*(?P<number>-?\d{1,3})\b|signal[ =:]*(?P<signal>(?:SIG)?[A-Z]+|\d{1,2})\b)", "",
        (("worker 4 (rank 4) exited with code -11 after 3211s", {"rank": 4, "number": -11}), ("rank 7 (pid 4188) was killed by signal 9", {"rank": 7, "pid": 4188, "number": -9}), ("Rank 2 exited with status 139", {"rank": 2, "number": -11})),
        ("rank 3 exited with code 0",), fields={"name": "first", "rank_basis": "launcher"}, more=_ended),
    Row(Kind.EXIT, "launchers of whatever kind that say how a process has ended", r"(?<![\w.])pid[ =:]*(?P<pid>\d{2,9})\)?:? (?:has |was )?(?:exited|died|terminated|crashed|killed|ended)[:,]? (?:(?:with|by|on|from) )?(?:signal[ =:]*)(?P<signal>(?:SIG)?[A-Z]+|\d{1,2})\b", "",
        (("worker[1] pid 3302 exited: signal 9 (SIGKILL)", {"pid": 3302, "number": -9}), ("process (pid 77) was killed by signal 9", {"pid": 77, "number": -9})), ("pid 77 exited: signal 15",),
        fields={"name": "command", "rank": None, "rank_basis": ""}, more=lambda found, text, fact: _spawned(found, text, fact) if found["signal"].removeprefix("SIG") not in ("TERM", "15") else None),
    Row(Kind.EXCEPTION, "Ray src/ray/util/logging.cc, 2.0 to 2.60", r"Unhandled exception: (?P<name>\S+?)\. what\(\): (?P<detail>.+)", "Unhandled exception",
        (("[2026-01-02 15:40:11,227 E 19045 21937] logging.cc:97: Unhandled exception: St12out_of_range. what(): no such key", {"name": "St12out_of_range", "detail": "no such key"}),)),
    Row(Kind.WORKER_DIED, "Ray, 2.0 to 2.50",
        r"(?P<detail>(?:worker died|SYSTEM_ERROR|The actor (?:is dead|died)|ActorDiedError|RayActorError|WorkerCrashedError|NodeDiedError|ActorUnavailableError).*)", "",
        (("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", {}),), fields={"rank": None, "rank_basis": ""}),
    Row(Kind.KERNEL_OOM, "Ray memory monitor, 2.2 to 2.50", r"(?P<detail>(?:ray\.exceptions\.OutOfMemoryError|killed due to the node running low on memory|node was running low on memory).*)", "emory",
        (("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", {}),), fields={"name": "ray", "rank": None, "rank_basis": ""}),
    # --- kernel, driver, GPU  ---
    Row(Kind.XID, "NVIDIA driver (dmesg), 390 to 580", r"NVRM: Xid \((?:PCI:)?(?P<name>[0-9a-fA-F:.]+)\): (?P<number>\d+)(?:, (?:pid=(?P<pid>\d+|'?<unknown>'?)?,?)?(?P<detail>.*))?", "NVRM: ",
        (("[ 5321.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=4100, GPU has fallen off the bus.", {"number": 79, "pid": 4100}), ("NVRM: Xid (PCI:0000:86:00): 63, Row Remapper: New row marked", {"number": 63})), fields={"rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "Linux arch/x86/mm/fault.c (dmesg), 4.x to 6.x", r"(?!(?:ipython|jupyter))\b[\w:.\-]+\[(?P<pid>\d+)\]: segfault at .* in (?P<detail>[^\s\[]+)\[", "segfault at",
        (("[812900.4] python3[1423]: segfault at 7f3a00000018 ip 00007f52c1d0a33b sp 00007ffe6c1b7d10 error 4 in libnvjpeg.so.12.4.0.76[7f52c1c00000+3a1000]", {"pid": 1423, "detail": "libnvjpeg.so.12.4.0.76"}),
         ("python3[77]: segfault at 0 ip 00007f52 sp 00007ffe error 4 in libc.so.6[7f52c1c00000+3a1000]", {"pid": 77})),
        ("ipython[77]: segfault at 0 ip 00007f52 sp 00007ffe error 4 in libc.so.6[7f52c1c00000+3a1000]",), fields={"name": "segfault", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "Linux amd_iommu (dmesg)", r"(?P<detail>.*(?:IO_PAGE_FAULT).*)", "IO_PAGE_FAULT", (("AMD-Vi: Event logged [IO_PAGE_FAULT device=3b:00.0 domain=0x1]", {"name": "iommu_fault"}),), fields={"name": "iommu_fault"}),
    Row(Kind.KERNEL_OOM, "Linux mm/oom_kill.c (dmesg), 4.x to 6.x", r"(?P<detail>(?:[Oo]ut of memory: Killed process (?P<pid>\d+)|Memory cgroup out of memory: Kill(?:ed)? process (?P<inside>\d+)|oom-kill:|oom_reaper: reaped process).*)", "",
        (("[ 99.1] Out of memory: Killed process 4100 (python) total-vm:99kB", {"pid": 4100}), ("Memory cgroup out of memory: Killed process 77 (python3) total-vm:1kB", {"pid": 77})),
        fields={"rank": None, "rank_basis": ""}, more=lambda found, text, fact: fact if found["inside"] is None else fact.clone(pid=int(found["inside"]))),
    Row(Kind.NOTE, "Linux fs/nfs (dmesg), 3.x to 6.x; Lustre client, 2.5 to 2.16", r"nfs: server (?P<host>\S+) not responding|Lustre: \S+: Connection to \S+ \(at (?P<detail>\S+)\) was lost", "",
        (("[Sun Aug  4 15:13:50 2024] nfs: server nas03 not responding, still trying", {"host": "nas03"}),
         ("Lustre: scratch-OST0017-osc-ffff9d: Connection to scratch-OST0017 (at 172.16.5.23@o2ib) was lost; in progress operations using this service will wait for recovery", {"name": "storage"})), fields={"name": "storage", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "Linux fs/nfs (dmesg), 3.x to 6.x; Lustre client, 2.5 to 2.16", r"nfs: server (?P<host>\S+) OK\b|Lustre: \S+: Connection restored to .*\(at (?P<detail>\S+)\)", "",
        (("[Sun Aug  4 15:20:01 2024] nfs: server nas03 OK", {"host": "nas03", "name": "storage_back"}),), fields={"name": "storage_back", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "vLLM vllm/v1/engine/core.py, 0.15 to 0.33: an end in order", r"\[core\.py:\d+\] Shutdown (?:initiated|complete)|EngineCore (?:shutting down gracefully|exited cleanly)", "",
        (("(EngineCore pid=7) INFO 05-12 11:36:40 [core.py:1201] Shutdown initiated (timeout=0)", {"name": "shut_down"}),), fields={"name": "shut_down"}),
    Row(Kind.NOTE, "uvicorn/server.py, 0.13 to 0.38", r"INFO: Shutting down$", "Shutting down",
        (("(APIServer pid=11) INFO:     Shutting down", {"name": "server_down"}),), fields={"name": "server_down"}),
    Row(Kind.NOTE, "vLLM vllm/entrypoints/launcher.py, 0.6 to 0.33", r"\[launcher\.py:\d+\] Shutting down FastAPI HTTP server", "Shutting down",
        (("(APIServer pid=1) INFO 11-18 14:20:01 [launcher.py:110] Shutting down FastAPI HTTP server.", {"name": "http_down"}),), fields={"name": "http_down"}),
    Row(Kind.NOTE, "switches: a link that has come up again (NX-OS, IOS)", r"-IF_UP: |-UPDOWN: .* changed state to up", "",
        (("2024-06-01 %ETHPORT-5-IF_UP: Interface Ethernet1/4 is up", {"name": "switch_up"}),), ("%LINK-3-UPDOWN: Interface Ethernet1/4, changed state to down",), fields={"name": "switch_up"}),
    Row(Kind.NOTE, "df: no shared memory is left", r"\b100% /dev/shm\b", "/dev/shm",
        (("tmpfs  64M  64M  0 100% /dev/shm", {"name": "shm_full"}),), fields={"name": "shm_full"}),
    Row(Kind.NOTE, "clouds that take a machine back", r"preemption notice|[Ss]pot interruption", "",
        (("Shutdown manager detected shutdown event (preemption notice)", {"name": "taken_back"}),), fields={"name": "taken_back"}),
    Row(Kind.NOTE, "Megatron-LM megatron/core/rerun_state_machine.py, 0.9 to 0.16", r"[Pp]ossible (?:transient|persistent) error|persistent hardware fault", "rerun",
        (("[rerun_state_machine] First rerun: unexpected result is not reproducible within the tolerance. Possible transient error!", {"name": "corruption"}),), fields={"name": "corruption"}),
    Row(Kind.NIC, "Linux mlx5, bonding, e1000, netdev (dmesg)",
        r"(?P<detail>mlx\d_core \S+.*?(?:[Ll]ink (?:[Dd]own|DOWN)|health compromised|reset|device's health|FW fatal|timeout)|\S+: (?:NIC )?[Ll]ink is [Dd]own.*|\S+: link status definitely down.*|NETDEV WATCHDOG.*)", "mlx|ink is |link status|NETDEV WATCHDOG",
        (("[ 881.2] mlx5_core 0000:3b:00.0: mlx5_health_try_recover: reset requested", {}), ("[ 9.1] mlx5_core 0000:3b:00.0 ens1: Link down", {}), ("NETDEV WATCHDOG: ens5 (ena): transmit queue 0 timed out", {})), fields={"rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "Linux mlx5, e1000, netdev (dmesg)", r"(?P<detail>mlx\d_core \S+(?: \w+)?|\S+): (?:NIC )?[Ll]ink (?:is )?[Uu]p\b", "ink ",
        (("[ 563.0] mlx5_core 0000:9a:00.0 ibs4: Link up", {"name": "link_up", "detail": "mlx5_core 0000:9a:00.0 ibs4"}),), fields={"name": "link_up", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "Linux /proc/PID/stack of NFS, Lustre, Ceph and FUSE, 4.x to 6.x", r"^\[<[0-9a-f]+>\] (?P<detail>\w+)\+0x.*\[(?:nfsv?\d?|sunrpc|lustre|ptlrpc|ceph|fuse)\]", "[<",
        (("[<0>] nfs4_do_close+0x2e1/0x3c0 [nfsv4]", {"name": "storage", "detail": "nfs4_do_close"}),), fields={"name": "storage", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "a terminal and programs that somebody interrupts", r"^\^C|\b(?:[Rr]eceived|[Gg]ot|[Cc]aught) (?:signal )?SIGINT\b", "",
        (("^CReceived SIGINT, exiting", {"name": "interrupted"}), ("[rank0] caught SIGINT", {})), fields={"name": "interrupted", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "CPython Lib/pdb.py and IPython's ipdb, 3.8 to 3.14: a prompt that waits for somebody", r"^\(Pdb(?:\+\+)?\)|^ipdb>", "db",
        (("(Pdb) ", {"name": "debugger"}),), fields={"name": "debugger"}),
    Row(Kind.NOTE, "Kubernetes' scheduler (kubectl describe pod), 1.20 to 1.34", r"FailedScheduling\b.*?(?P<detail>\d+/\d+ nodes are available.{0,200})", "FailedScheduling",
        (("Warning  FailedScheduling  6m  default-scheduler  0/16 nodes are available: 15 Insufficient nvidia.com/gpu.", {"name": "unschedulable"}),), fields={"name": "unschedulable", "rank": None, "rank_basis": ""}),
    Row(Kind.SCHEDULER, "Amazon EC2's instance metadata (spot/instance-action)", r"instance-action\b.{0,20}\{\"action\": ?\"(?:terminate|stop|hibernate)\"(?:.*?\} (?:on|for) (?P<host>[\w.\-]+))?", "instance-action",
        (('[imds] spot instance-action: {"action": "terminate", "time": "2026-02-14T05:55:00Z"} on ip-10-0-5-9', {"name": "PREEMPTION", "host": "ip-10-0-5-9"}),
         ('spot/instance-action: {"action":"stop","time":"2026-02-14T05:55:00Z"}', {"name": "PREEMPTION"})),
        ("spot/instance-action: 404 Not Found",), fields={"name": "PREEMPTION", "rank": None, "rank_basis": ""}),
    Row(Kind.SCHEDULER, "Google Compute Engine's metadata (maintenance-event) and gcloud compute tpus list", r"maintenance-event\b.*TERMINATE_ON_HOST_MAINTENANCE|^\S+ v\d\S* PREEMPTED\s*$", "",
        (("google_metadata_watcher: maintenance-event changed: NONE -> TERMINATE_ON_HOST_MAINTENANCE", {"name": "PREEMPTION"}), ("spot-v5p    v5p-32            PREEMPTED", {"name": "PREEMPTION"})),
        fields={"name": "PREEMPTION", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "limits that a hint tells: Huawei CANN (HCCL), 6.x to 8.x; Ray's compiled graphs, 2.32 to 2.50; XLA's coordination service, 2023 to 2026",
        r"(?:execution|connect) timeout interval \((?P<seconds>\d+) ?s\)|RAY_CGRAPH_get_timeout which is currently (?P<ray>\d+) seconds|initialization timeout.{0,80}currently set to:? ?(?P<minutes>\d+)m\b", "imeout",
        (("earliest and latest errors is greater than the execution timeout interval (1836s).", {"name": "limit", "seconds": 1836.0}),
         ("increase RAY_CGRAPH_get_timeout which is currently 300 seconds.", {"seconds": 300.0}), ("Consider setting a longer initialization timeout if such delays are expected, the timeout is currently set to: 5m.", {"seconds": 300.0})),
        ("is greater than the connect timeout interval (120s by default)",),
        fields={"name": "limit"}, more=lambda found, text, fact: fact.clone(seconds=float(found["ray"])) if found["ray"] else fact),
    Row(Kind.NOTE, "drivers that gather the state of their executors, as JSON or logfmt (MegaScale, arXiv:2402.15627, and others)",
        r"^(?=.*\bstep\"?[=:] ?(?P<number>\d+)\b)(?:.*[\s{,\"])?rank\"?[=:] ?(?P<rank>\d+)\b.*?[\s,\"](?:coll(?:ective)?_)?seq(?:_id|_num)?\"?[=:] ?(?P<enqueued>\d+)\b", "seq",
        (('{"ev": "heartbeat", "node": "mc-088", "rank": 707, "world": 1024, "step": 44122, "stage": "dataloader.wait", "coll_seq": 881280}', {"rank": 707, "enqueued": 881280, "number": 44122, "name": "snapshot"}),
         ("ts=07:08:20 rank=7 step=44122 stage=dp_allgather seq=881281", {"rank": 7, "enqueued": 881281})), fields={"name": "snapshot"}),
    Row(Kind.NOTE, "programs that say how many batches each of their ranks has", r"(?i:(?<!skipped\s)(?<!dropped\s)(?<!bad\s)\b(?:\w*batches|steps[ _]per[ _]epoch|len\(\w*(?:loader|sampler)\)))(?: per rank)?[\"']? ?[:=]+ ?(?P<number>\d+)\b", "atches|ATCHES|teps|TEPS|len(|LEN(",
        (("[rank3]: number of batches: 1249", {"rank": 3, "number": 1249, "name": "batches"}), ("[rank 6] Anzahl Trainingsbatches: 1250 (Sampler: eigener)", {"number": 1250}), ("[rank0]: len(train_loader) = 88", {"number": 88})), fields={"name": "batches"}),
    Row(Kind.NOTE, "nvidia-smi, 390 to 580: a process and the memory of a GPU that it has", r"\| (?P<number>\d+)\s+(?:N/A N/A\s+)?(?P<pid>\d+)\s+[CGM+]+\s+\S.{0,120}?\s(?P<detail>\d+)MiB \|", "MiB |",
        (("|    2   N/A  N/A          998877      C   /opt/other/bin/python                   70112MiB |", {"number": 2, "pid": 998877, "detail": "70112", "name": "holds"}), ("|    0      4188      C   python        8000MiB |", {"pid": 4188})),
        ("| N/A   31C    P0    62W / 400W |  70112MiB / 81920MiB |      0%      Default |",), fields={"name": "holds", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "programs and people who say that a process of others has a GPU",
        r"(?=.*\b(?i:GPU|CUDA|device)\b)(?=.*\b(?i:(?:another|other|foreign|unrelated|stale|orphan(?:ed)?|zombie|left-?over|previous|different) (?:\w+ ){0,2}(?:user|job|process|run|tenant|container)|\b(?:not|no) (?:\w+ ){0,4}?(?:ours|this job|our job)\b))(?:.*\b(?:[Gg][Pp][Uu]|cuda|device)[ :#]*(?P<number>\d{1,2})\b)?.*?\b(?:pid|PID|[Pp]rocess)[ =:#]*(?P<pid>\d{2,9})\b(?=.*?(?P<detail>\d[\d.]* ?[GM]i?B))", "pid|PID|rocess",
        (("GPU 3: pid 998877 of another user (bob) holds 70112 MiB", {"number": 3, "pid": 998877, "name": "held"}), ("preflight: stale process 998877 on cuda:2 uses 61.2 GiB", {"pid": 998877})),
        ("GPU 3: pid 4188 of rank 3 holds 70112 MiB", "another process 4188 waits for a GPU"), fields={"name": "held", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "tuners that end a trial early on purpose: Ray Tune, Optuna, W&B sweeps, Katib, Determined, NNI, and others",
        r"^(?!.*(?i:rror|fail|crash|exception|memory|\boom\b|evict|preempt|timed out|time limit)).*?(?i:(?<![a-z])trials?(?![a-z]).{0,160}?\b(?:prun\w+|early[- _]?stop\w*|stopped|stopping|terminat(?:ed|ing)|halted|interrupted|cancell?ed|sigterm)\b|"
        r"\b(?:prun|stopp|terminat|halt|kill|cancell?|clos|interrupt)(?:ed|ing)\b.{0,40}(?<![a-z])trials?(?![a-z])|"
        r"\b(?:run|sweep|sweep agent|experiment|config(?:uration)?|candidate|arm)\b.{0,120}?\b(?:pruned|pruning|early[- _]?stop\w*|stop(?:ped|ping|s)? early)\b|"
        r"\b(?:asha|hyper_?band|median[- _]?stop\w*|pruner)\w*\b.{0,80}?\b(?:stop\w*|prun\w+|terminat\w+|kill\w*)\b|\bwandb\b.{0,60}received command: (?:stop|exit))|^[│|] ?\S+\s+TERMINATED\b",
        "trial|Trial|prun|early|ASHA|yperband|yperBand|received command|TERMINATED",
        (("[I 2026-11-20 10:10:00,000] Trial 3 pruned. ", {"name": "pruned"}), ("2026-11-20 INFO tune.py:616 -- trial_0007 STOPPED by ASHAScheduler (rung 2)", {}), ("DEBUG async_hyperband.py:203 -- ASHA decision for a1: STOP", {}),
         ("HyperBand: terminating trial t9", {}), ("wandb: Sweep Agent: run 7 stopped early by hyperband", {}), ("Trial bayes-7 is EarlyStopped", {}), ("[hpo] run 17: loss 3.1 > median 2.2 -> stopping early", {}), ("│ train_a1  TERMINATED │", {})),
        ("Trial 3 stopped: worker crashed", "Trial train_1 errored after 3 iterations", "Trial 4 finished with value: 0.3", "a trial of patience", "a run that stops", "nearly done"), fields={"name": "pruned", "rank": None, "rank_basis": ""}),
    # Thrown by none: the interpreter ends threads that ask for its lock while it is gone, below C++ frames.
    Row(Kind.NOTE, "training loops whose loader has no more batches on a rank", r"\b[Rr]ank ?(?P<rank>\d+)\b[^|]{0,40}?\b(?:StopIteration|(?:ran|is) out of (?:data|batches|samples))\b.{0,20}?\bafter (?P<number>\d+)\b", "StopIteration|out of data|out of batches|out of samples",
        (("loop: rank 14: StopIteration after 148 batches, leaving epoch", {"rank": 14, "number": 148, "name": "no_more"}), ("[rank 3] ran out of data after 77 steps", {"rank": 3})), ("rank 2: StopIteration",), fields={"name": "no_more"}),
    Row(Kind.NOTE, "people who say that a job stands still", r"(?i)^(?:\[[\d:apm ]+\] ?)?(?:\w+: )?(?!.*(?:\berror:|watchdog|time(?:d )?out\b|[{}|]|\[rank))(?=(?:\S{1,30}\s){5})[^\[:]*\b(?:hangs?|hung|hanging|stuck|froze|frozen)\b[^\[]*$", " hang| hung| stuck| froze",
        (("[10:02] dora: the 4 gpu run froze again at the end of epoch 0, no error at all", {"name": "stands still"}), ("anyone seen slime hang right after rollout? no error at all for 40 min", {})),
        ("[rank0] WARNING: step 3 seems to be stuck: rank 3 is slow", "it is stuck"), fields={"name": "stands still", "rank": None, "rank_basis": ""}),
    Row(Kind.RENDEZVOUS, "Open MPI orte, PRRTE, 1.8 to 5.0: a node's daemon has not come up", r"An? (?:ORTE|PRTE) daemon has unexpectedly failed after launch", "daemon has unex",
        (("An ORTE daemon has unexpectedly failed after launch and before", {"name": "connect"}),), fields={"name": "connect", "rank": None, "rank_basis": ""}),
    Row(Kind.EXCEPTION, "TensorRT-LLM cpp/tensorrt_llm/executor, 0.9 to 1.2", r"Failed to load executor: (?:\[TensorRT-LLM\]\[ERROR\] )?(?P<detail>.+)", "Failed to load ex",
        (("[TensorRT-LLM][ERROR] Failed to load executor: [TensorRT-LLM][ERROR] Assertion failed: Error opening engine file: /e/rank3.engine", {"name": "LoadError", "detail": "Assertion failed: Error opening engine file: /e/rank3.engine"}),), fields={"name": "LoadError"}),
    Row(Kind.NOTE, "SGLang srt/layers/quantization/deep_gemm_wrapper, 0.4 to 0.5: kernels that a rank compiles, which takes minutes", r"DeepGEMM JIT (?:code generation|Pre-?Compile|Compiling)", "DeepGEMM JIT",
        (("[2026-04-17 21:06:02 DP8 TP8 EP8] DeepGEMM JIT code generation <gemm_fp8>: M=8192", {"name": "compiles"}),), fields={"name": "compiles"}),
    Row(Kind.NOTE, "servers and those who run them, of an end that is planned: Kubernetes, Ray Serve, text-generation-inference, and others",
        r"(?i)^(?!.*\b(?:(?:loss|lr|grad\w*|rope) scaling|preempt\w*|spot|evict\w*|oom\w*|memory|fail\w*|unhealthy|dead|lost|errors?|timeout|watchdog|xid|ecc|time limit|nodes?|enabled?|handlers?|registered|installed|supported|is on|if|when|will|login|motd|prefetch\w*|KeyboardInterrupt)\b|.*\bon (?:SIG|\^C)|.*\bof service ).*?(?:\bscal(?:e|ed|ing)[\s-]?(?:down|in)\b|\bdown-?scal(?:e|ed|ing)\b|\bscal(?:ed|ing) .{0,80}\bfrom (?P<enqueued>\d+) (?:replicas? )?to (?P<completed>\d+)\b|"
        r"\brolling (?:update|upgrade|restart)\b|\brollout (?:status|restart)\b|\bsuccessfully rolled out\b|\bdrain(?:ing|ed)\b(?=.*\b(?:requests?|connections?|in-?flight|webserver|server|replicas?)\b)|\b(?:requests?|connections?|replicas?)\b.{0,40}\bdrained\b|\bgraceful(?:ly)? (?:shut|stop|terminat|exit)\w*|\b(?:shutting|shut) ?down gracefully\b|\bplanned (?:maintenance|shutdown|restart)\b(?! (?:of|on|for|at)\b))",
        "scaling |Scaling |caled down|ownscaling|rolling u|rolling r|rolled out|ollout status|ollout restart|drained|draining|Draining|raceful|lanned ",
        (("2025-09-01T13:01:09.07Z  INFO text_generation_launcher: received SIGTERM (rolling update a -> b), shutting down gracefully", {"name": "planned end"}),
         ("INFO controller 101 -- Downscaling Deployment 'llm' from 3 to 1 replicas", {}), ("hpa: scaling deployment chat from 4 to 2 replicas", {}), ("INFO router: drained, webserver stopped", {})),
        ("hpa: scaling deployment chat from 2 to 4 replicas", "slurmctld: draining node gpu-3", "spot instance drained, preempted",
         "trainer: graceful shutdown on SIGTERM enabled", "planned maintenance of the login servers on 2025-11-12", "loader: prefetch queue drained", "Detected KeyboardInterrupt, attempting graceful shutdown ...",
         "signal handler: graceful stop at the next step", "controller: draining connections of service chat-v1"), fields={"name": "planned end", "rank": None, "rank_basis": ""},
        more=lambda found, text, fact: None if fact.enqueued is not None and (fact.completed or 0) >= fact.enqueued else fact.clone(enqueued=None, completed=None)),
    Row(Kind.NOTE, "Kubernetes: a pod that a quota forbids", r"\bpods? \\?\"(?P<host>[\w.\-]+)\\?\" is forbidden: (?P<detail>exceeded quota: .{0,120})", "exceeded quota",
        (('Error creating: pods "sft-worker-2" is forbidden: exceeded quota: gpu-quota, requested: requests.nvidia.com/gpu=8', {"name": "not started", "host": "sft-worker-2"}),), fields={"name": "not started", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "gcloud compute operations list", r"^compute\.instances\.hostError\b", "instances.hostError",
        (("compute.instances.hostError             DONE    2025-06-05T18:19:02.118-00:00", {"name": "host_error"}),), fields={"name": "host_error", "rank": None, "rank_basis": ""}),
    Row(Kind.NOTE, "libstdc++, as a Python process ends beside torch's threads (seen with torch 2.13, gloo)", r"^(?:\[.{0,40}\]:?)?terminate called without an active exception", "terminate called",
        (("terminate called without an active exception", {"name": "ended"}),), ("terminate called after throwing an instance of 'c10::Error'",), fields={"name": "ended"}),
    Row(Kind.CUDA, "Intel Level Zero, unified runtime (oneAPI, 2024 to 2026)", r"(?P<detail>.{0,80}(?:UR|ZE)_RESULT_ERROR_DEVICE_LOST.*)", "DEVICE_LOST",
        (("terminate called, what():  level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", {"name": "hardware"}),), fields={"name": "hardware"}),
    Row(Kind.CUDA, "Intel compute-runtime (drm_neo.cpp), 23.30 to 25.40", r"(?P<detail>Segmentation fault from GPU at .*)", "fault from GPU",
        (("[rank2]: Segmentation fault from GPU at 0xff00000c3f2a0000, ctx_id: 1 (CCS) type: 0 (NotPresent), level: 1 (PDE), access: 1 (Write), banned: 1, aborting.", {"rank": 2}),)),
    Row(Kind.CUDA, "AWS Neuron runtime (NRT), 2.15 to 2.27; Intel Gaudi (Habana), 1.10 to 1.22; Huawei CANN, 7.x to 8.x",
        r"(?P<detail>.{0,80}(?:NRT_EXEC_HW_ERR_\w+|[Uu]ncorrectable HBM memory error|[Cc]atastrophic event: device is in hard reset|Device reset has occurred|HBM MULTI BIT ECC).*)", "NRT_EXEC_HW_ERR|ncorrectable HBM|atastrophic event|Device reset has|HBM MULTI BIT",
        (('[rank3]: RuntimeError: Execution failed, status=1200 message="NRT_EXEC_HW_ERR_HBM_UE"', {"rank": 3, "name": "hardware"}),
         ("[rank3]: RuntimeError: [Rank:3] FATAL ERROR :: MODULE:PT_DEVMEM Received catastrophic event: device is in hard reset. synStatus=1", {"rank": 3, "name": "hardware"}),
         ("[rank3]: HBM MULTI BIT ECC, Uncorrectable ECC. The memory address is 0x12c1", {"rank": 3, "name": "hardware"})), fields={"name": "hardware"}),
    Row(Kind.CUDA, "Linux drivers/accel/habanalabs, 5.0 to 6.15; amdgpu, 5.4 to 6.15; xe, 6.8 to 6.15",
        r"(?:habanalabs|amdgpu|xe) (?:\w+ )?(?P<detail>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d.*(?:H/W error interrupt|going to be hard-reset|Failed to reset device|GPU reset\(\d+\) failed|uncorrectable hardware error|declared wedged).*)", "",
        (("[ 812.1] habanalabs hl2 0000:9a:00.0 accel3: H/W error interrupt HBM_1_DERR, device is going to be hard-reset", {"name": "hardware"}),
         ("amdgpu 0000:d9:00.0: amdgpu: GPU reset(2) failed", {"name": "hardware"}),
         ("amdgpu 0000:c1:00.0: amdgpu: uncorrectable hardware error (ERREVENT_ATHUB_INTERRUPT) detected!", {"name": "hardware"})),
        fields={"name": "hardware", "rank": None, "rank_basis": ""}),
    Row(Kind.CUDA, "Intel Gaudi (PyTorch bridge), 1.10 to 1.23", r"\[Rank:(?P<rank>\d+)\] FATAL ERROR :: MODULE:\w+ (?P<detail>.*critical device event.*)", "critical device",
        (("what():  [Rank:6] FATAL ERROR :: MODULE:PT_SYNHELPER Event handler: critical device event, DEVICE RESET", {"rank": 6, "name": "hardware"}),), fields={"name": "hardware"}),
    Row(Kind.CUDA, "Linux mm/memory-failure.c, 3.10 to 6.15: memory of the host", r"Memory failure: \S+ Sending SIGBUS to (?P<detail>[^:\s]+):(?P<pid>\d+) due to hardware memory corruption", "Sending SIGBUS",
        (("[Fri Mar  8 10:41:18 2024] Memory failure: 0x3c1f8a2: Sending SIGBUS to python3:6500 due to hardware memory corruption", {"pid": 6500, "name": "host_memory"}),),
        fields={"name": "host_memory", "rank": None, "rank_basis": ""}),
    Row(Kind.ENGINE_WAIT, "AWS Neuron runtime (TDRV), 2.15 to 2.27; Intel Gaudi (HCL), 1.10 to 1.22",
        r"encountered timeout, (?P<seconds>\d+) sec, on worker|checkTerminationSignal: rank (?P<own>\d+): no progress on stream .*? for (?P<s>\d+) seconds", "",
        (("TDRV:exec_consume_tpb_status_notifications (FATAL-RT-UNDEFINED-STATE) encountered timeout, 120 sec, on worker [ND 0][NC 0]", {"name": "kernel", "seconds": 120.0}),
         ("[08:46:18.3][HCL ][error][tid:8893] checkTerminationSignal: rank 3: no progress on stream archStreamIdx 0 for 300 seconds, comm 0", {"rank": 3, "name": "kernel"})), fields={"name": "kernel"},
        more=lambda found, text, fact: fact.clone(seconds=float(found["s"])) if found["s"] else fact),
    Row(Kind.CUDA, "CUDA runtime and NVIDIA driver", r"(?P<detail>.{0,60}(?:uncorrectable (?:NVLink )?(?:ECC )?error(?!s? ?[:=(]? ?(?:count\w* ?[:=]? ?)?0\b)|ECC errors?(?! ?(?:counters?|counts?|[:=(]? ?0\b))|fallen off the bus|GPU is lost).*)", "uncorrectable|ECC error|fallen off|GPU is lost",
        (("[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered", {"rank": 3, "name": "hardware"}),), fields={"name": "hardware"}),
    # --- frameworks  ---
    Row(Kind.UNUSED, "torch/csrc/distributed/c10d/reducer.cpp, 1.5 to 2.15", r"(?:Parameter indices|Parameters) which did not receive grad for rank (?P<rank>\d+): ?(?P<detail>.{0,200})", "not receive grad",
        (("Parameter indices which did not receive grad for rank 1: 2 3", {"rank": 1, "detail": "2 3"}),)),
    Row(Kind.UNUSED, "torch/csrc/distributed/c10d/reducer.cpp, 1.5 to 2.15", r"Expected to have finished reduction in the prior iteration", "finished reduction",
        (("[rank1]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.", {"rank": 1}),)),
    Row(Kind.TRACE_INVALIDATED, "DeepSpeed runtime/zero/partitioned_param_coordinator.py, 0.5 to 0.18",
        r"[Ii]nvalidate trace cache(?: @ step (?P<step>\d+)(?: and module \d+)?:? (?:cache has only \d+ modules|expected module (?P<expected>\d+), but got module (?P<got>\d+)))?", "nvalidate trace",
        (("Invalidate trace cache @ step 3: expected module 2, but got module 1", {"number": 3}),), more=_trace_step),
    Row(Kind.DATALOADER, "torch/utils/data/dataloader.py, 1.0 to 2.15; decord", r"^(?!.*Error: DataLoader worker)(?P<detail>.*(?:DataLoader worker \(pid\(?s?\)? ?[\d, ]+\)? (?:is killed by signal|exited unexpectedly)|decord).*)", "",
        (("WARNING: DataLoader worker (pid 4100) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory", {}),),
        ("RuntimeError: DataLoader worker (pid 4100) is killed by signal: Killed.",)),
    Row(Kind.CUDA, "c10/cuda and CUDA runtime", r"(?:CUDA|HIP) error: (?P<detail>.*)|(?:CUDA runtime error in .{0,200}?|Queue 0x[0-9a-f]+ aborting with error) ?: (?P<other>.*)|Cuda failure(?: \d+)? '(?P<name>[^']*)'", "rror",
        (("RuntimeError: CUDA error: an illegal memory access was encountered", {"detail": "an illegal memory access was encountered"}),
         (":0:rocdevice.cpp :3030: 4819 us: Callback: Queue 0x7f6a aborting with error : HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception. code: 0x1016", {})),
        more=lambda found, text, fact: fact.clone(detail=(fact.detail or found["other"] or fact.name)[:200], name="")),
    Row(Kind.RETRIED, "vLLM vllm/entrypoints/openai, 0.5 to 0.33: a request that was refused", r"\[serving_\w+\.py:\d+\] (?:\w+\.)*ValueError: .*(?:maximum (?:context|model) len|max(?:_completion)?_tokens|[Pp]rompt.* too long).*", "] ValueError|.ValueError",
        (("ERROR 05-30 18:44:02 [serving_chat.py:197] ValueError: This model's maximum context length is 8192 tokens.", {}),)),
    Row(Kind.RETRIED, "MosaicML Composer composer/trainer/trainer.py, 0.10 to 0.32: a microbatch that is found by trying", r"\bmicrobatch size \d+ raised: CUDA out of memory.*|CUDA out of memory detected\. \w+ microbatch size will be decreased", "microbatch size",
        (("composer.trainer.trainer: CUDA out of memory detected. Train microbatch size will be decreased from 32 -> 16.", {}),)),
    Row(Kind.RETRIED, "trainers", r"\b(?:[Rr]etrying\b(?! \(?(?P<all>\d+)(?:/| of )(?P=all)\b)|[Rr]etry \d|[Rr]etry with\b|will be retried|entering retry loop|Using batch[- ]size \d)|\(caught\b|\b(?:[Ff]alling|[Ff]ell) back (?:to|on)\b|\b[Ss]kipping (?:(?:this|the|a|bad|corrupt\w*|broken) )?(?:batch|sample|step|iteration|file|shard|record|example|update|image)|\b[Cc]ontinuing (?:without|with|anyway|training|from)\b|\bHandling \w+ error \(.*\)\. Ignoring|(?:rror|imeout|imed out|ailed)\b.{0,120}?\battempt (?P<nth>\d+)/(?!(?P=nth)\b)\d+|\battempt (?P<next>\d+)/(?:(?!(?P=next)\b)\d+|∞|inf(?:inite|inity)?|unlimited): .{0,40}?(?:rror|imeout|imed out|ailed)\b|\bcaught[,:] (?=.*(?:[Rr]etr|[Ss]kip|[Cc]ontinu|[Ii]gnor|memory))|Decreasing batch size to", "etry|retried|alling back |fell back |kipping |ontinuing |(caught|Handling |attempt |caught|Decreasing batch|Using batch",
        (("[rank2]: retrying the batch after ValueError", {"rank": 2}), ("wandb: Network error (ConnectionError), entering retry loop.", {}), ("AutoBatch: Using batch-size 80 for CUDA:0 23.91G/39.39G (61%)", {}), ('WARNING:root:Handling webdataset error (UnidentifiedImageError("x")). Ignoring.', {}),
         ("WARNING - shards - s3://b/shard-17.tar: ReadTimeoutError on endpoint URL, attempt 3/10", {}), ("WARNING reader: s3://b/shard-17 attempt 9/∞: ClientError: An error occurred (503)", {})), ("reader: attempt 3/3: ClientError: gone", "exceeded error retry count after 35 attempts",)),
    Row(Kind.NOTE, "CPython Modules/faulthandler.c (dump_traceback_later), 3.8 to 3.14", r"(?:^|\]:)Timeout \((?P<delta>\d+:\d\d:\d\d)\S*\)!", "imeout",
        (("Timeout (0:15:00)!", {"name": "dumped", "seconds": 900.0}),), fields={"name": "dumped"}),
    Row(Kind.NOTE, "CPython Lib/sys.unraisablehook and Lib/atexit.py, 3.8 to 3.14: nobody sees the exception that follows", r"^Exception ignored (?:in|on|while)\b|^Error in atexit\._run_exitfuncs:|^Error in sys\.excepthook:", "",
        (("Exception ignored in: <function Writer.__del__ at 0x7f11>", {"name": "ignored"}), ("Error in atexit._run_exitfuncs:", {"name": "ignored"})), fields={"name": "ignored"}),
    Row(Kind.NOTE, "torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, 1.9 to 2.15: its limit, where it is set", r"\bjoin_timeout['\"]?[=: ]+(?P<seconds>\d+)\b", "join_timeout",
        (("torchrun --rdzv_backend=c10d --rdzv_conf=join_timeout=300 t.py", {"seconds": 300.0, "name": "join_limit"}), ("  rdzv_configs     : {'join_timeout': 120}", {"seconds": 120.0})), fields={"name": "join_limit"}),
    Row(Kind.ENGINE_WAIT, "coordination services and programs whose barrier ran out of time: JAX, Orbax, TensorFlow, etcd, and others",
        r"(?!.*\b[Rr]etr[yi])(?i:(?<![a-z_])(?<!based\s)barrier\b[^|]{0,120}?\b(?:timed out|deadline_?\s?exceeded)\b|\b(?:timed out|deadline_?\s?exceeded)\b(?!.{0,40}store)[^|;]{0,80}?(?<![a-z_])barrier\b(?!-))"
        r"(?:[^|]{0,60}?(?<![\d.:])(?:(?P<seconds>\d+(?:\.\d+)?) ?s(?:ec\w*)?\b|(?P<minutes>\d+) ?m(?:0s|in\w*)?(?!\w)))?", "arrier",
        (("coordination_service.cc:1000] Barrier sync:ckpt_7 timed out after 10m0s, 7/8 tasks at the barrier", {"name": "barrier", "seconds": 600.0}),
         ("RuntimeError: barrier timed out in save after 600 s", {"seconds": 600.0}), ("[process=0] barrier 'save.12' DEADLINE_EXCEEDED after 300 seconds", {"seconds": 300.0}),
         ("Timed out waiting in barrier /sync", {}), ("Barrier 5 of 'train_sync' has timed out (600s)", {"seconds": 600.0})),
        ("barrier timeout: 600 s", "barrier passed, no timeout", "store based barrier timed out"), fields={"name": "barrier"}),
    # --- exceptions of Python, of whatever kind; last, so that what is known of them stands above  ---
    Row(Kind.EXCEPTION, "CPython", r"(?<![\w./])(?!LustreError|LNetError|java\.(?:util\.concurrent|net)\.)(?P<name>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|OutOfMemory)|[A-Z]+Error_\w+|SystemExit))(?:: (?P<detail>.+)|:?$)", "r",
        (("[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", {"rank": 2, "name": "OutOfMemoryError"}), ("ValueError: bad sample 17", {"name": "ValueError"})),
        ("the words Error handling",), more=_exception),
    Row(Kind.EXCEPTION, "c10/cuda/CUDACachingAllocator.cpp, 1.0 to 2.15, without the exception's name", r"(?P<detail>CUDA out of memory\. .*)", "ut of memory",
        (("CUDA out of memory. Tried to allocate 2.00 GiB", {"name": "OutOfMemoryError"}),), fields={"name": "OutOfMemoryError"}),
)  # fmt: skip


def _words(parsed: Any) -> tuple[str, ...]:
    """Return words of which one stands in every match of a parsed pattern, as long as they can be; ("",) for none."""
    found: list[tuple[str, ...]] = []
    run = ""
    for op, value in [*parsed, (None, None)]:
        name = str(op)
        if name == "LITERAL":
            run += chr(value)
            continue
        found.append((run,))
        run = ""
        if name == "SUBPATTERN" and not value[1] & re.IGNORECASE:
            found.append(_words(value[3]))
        elif name == "BRANCH":
            found.append(tuple(word for way in value[1] for word in _words(way)))
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] > 0:
            found.append(_words(value[2]))
    return max(found, key=lambda words: min(map(len, words)))


def _needles_of(row: Row) -> tuple[str, ...]:
    """Return the needles of a row; of one that is told by none, what its pattern asks for."""
    if all(row.needles) or row.pattern.flags & re.IGNORECASE:
        return row.needles
    try:
        parser = importlib.import_module("re._parser")
    except ImportError:  # before Python 3.11
        parser = importlib.import_module("sre_parse")
    return tuple(dict.fromkeys(_words(parser.parse(row.pattern.pattern))))


#: Letters of a needle by which the rows are found: a text has fewer triples than there are needles.
_TRIPLE = 3


def _triples(text: str) -> set[str]:
    """Return all triples of letters in a text, and the empty one, by which a needle of two letters is found."""
    return {"", *(text[at : at + _TRIPLE] for at in range(len(text) - _TRIPLE + 1))}


def _by_triples() -> dict[str, list[tuple[str, int]]]:
    """Return the needles, each with the place of its row, by the triple in them that is in the fewest needles."""
    needles = [(needle, at) for at, row in enumerate(ROWS) for needle in _needles_of(row)]
    common = Counter(triple for needle, _ in needles for triple in _triples(needle))
    owners: dict[str, list[tuple[str, int]]] = {}
    for needle, at in needles:
        owners.setdefault(min(sorted(_triples(needle)), key=common.__getitem__), []).append((needle, at))
    return owners


_OWNERS = _by_triples()


def _rows_of(text: str) -> list[Row]:
    """Return the rows of which a needle stands in the text, in their order."""
    there = _OWNERS.keys() & _triples(text)
    return [ROWS[at] for at in sorted({at for triple in there for needle, at in _OWNERS[triple] if needle in text})]


def parse_text(text: str, make: Fact) -> Iterator[Fact]:
    """Yield the facts of one record, in the order of the rows; `make` carries its place, rank and clock.

    What stands in backticks is quoted, and what somebody says that one will see: by documentation, by advice.
    """
    rows = _rows_of(text)
    if not rows:
        return
    quoted = quotations.spans(text)
    group, inner = group_of(text)
    if group is not make.group or inner != make.group_rank:
        make = make.clone(group=group, group_rank=inner)
    taken: list[tuple[int, int]] = []
    for row in rows:
        target = text if row.kind is not Kind.EXCEPTION else message_of(text)
        shift = len(text) - len(target)
        for found in row.pattern.finditer(target):
            start, end = found.start() + shift, found.end() + shift
            if start == end or any(start < b and a < end for a, b in taken) or any(a < start < b for a, b in quoted):
                continue
            fact = build(row, found, target, make)
            if fact is not None:
                taken.append((start, end))
                yield fact
