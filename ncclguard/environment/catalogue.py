"""The one catalogue of environment variables: what the code sets, what ``doctor`` checks, and the tables of the docs.

Facts come from the source and the binaries of the versions named: torch wheels 2.2 to 2.13 (strings, and the header
``torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp`` that every wheel carries), NCCL source tags 2.3.5 to 2.30.7.
Defaults are those of torch 2.13 unless another version is named.

``python -m ncclguard.environment.catalogue docs/environment.md`` writes the tables.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from ncclguard.environment.nccl_names import NCCL_NAMES, NEWEST_READ
from ncclguard.environment.versions import BUNDLED_NCCL, Versions, within
from ncclguard_explain.language import Message, tr


class Reader(str, Enum):
    """The program that reads a variable, whose version counts."""

    TORCH = "torch"  # every build
    TORCH_NCCL = "torch with NCCL"  # CUDA builds: ProcessGroupNCCL
    GLOO = "gloo"  # comes with every torch
    NCCL = "NCCL"
    DEEPSPEED = "DeepSpeed"
    NOTHING = "nothing"


class Kind(str, Enum):
    """The form that a value must have."""

    TEXT = "text"
    BOOL = "boolean"
    INTEGER = "integer"
    CHOICE = "one of"


# torch's getCvarBool (torch/csrc/distributed/c10d/Utils.hpp) takes these words in any case, and raises on others.
TRUE_WORDS = frozenset({"y", "yes", "1", "t", "true"})
FALSE_WORDS = frozenset({"n", "no", "0", "f", "false"})


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable.

    ``since`` and ``until`` are versions of the reader, both inclusive; ``until=None`` means that the newest known one
    still reads it. ``default`` is what holds when the variable is absent. ``read_at`` is the moment from which on a
    change has no effect. ``replaced_by`` names the variable that took its place (it is then a deprecated alias from
    ``deprecated_since`` on), ``instead`` says what to use where nothing reads the name. ``not_by_nccl2``: torch 2.15's
    nccl2 does not heed it (tried there).
    """

    name: str
    reader: Reader
    sentence: str
    source: str
    since: str | None = None
    until: str | None = None
    default: str = ""
    unit: str = ""
    kind: Kind = Kind.TEXT
    choices: tuple[str, ...] = ()
    low: int | None = None
    high: int | None = None
    read_at: str = "init_process_group"
    replaced_by: str | None = None
    deprecated_since: str | None = None
    instead: str | None = None
    differs_per_host: bool = False
    not_by_nccl2: bool = False

    def version_of_reader(self, versions: Versions) -> str | None:
        """Return the installed version that counts for this variable; None when it is unknown."""
        if self.reader is Reader.NCCL:
            return versions.nccl_for_names
        if self.reader in (Reader.TORCH, Reader.TORCH_NCCL, Reader.GLOO):
            return versions.torch
        return None

    def is_read(self, versions: Versions) -> bool | None:
        """Return whether the installed versions read the name; None when that is not known."""
        if self.reader is Reader.NOTHING or (self.not_by_nccl2 and versions.nccl2):
            return False
        version = self.version_of_reader(versions)
        if version is None:
            return None
        return within(version, self.since, self.until)

    def is_deprecated(self, versions: Versions) -> bool:
        """Return whether the installed version reads the name only as an alias of ``replaced_by``."""
        if self.replaced_by is None:
            return False
        version = self.version_of_reader(versions)
        return version is not None and within(version, self.deprecated_since, None)

    def fault_of(self, value: str) -> Message | None:
        """Return what is wrong with a value, as a sentence that continues the name; None when nothing is.

        >>> Variable("X", Reader.TORCH, "", "", kind=Kind.BOOL).fault_of("maybe")
        'takes 1/0, true/false, yes/no, t/f or y/n'
        """
        if self.kind is Kind.BOOL and value.lower() not in TRUE_WORDS | FALSE_WORDS:
            return tr("takes 1/0, true/false, yes/no, t/f or y/n")
        if self.kind is Kind.CHOICE and value.upper() not in self.choices:
            return tr("takes one of {some}", some=", ".join(self.choices))
        if self.kind is Kind.INTEGER:
            return self._fault_of_integer(value)
        return None

    def _fault_of_integer(self, value: str) -> Message | None:
        wanted = tr("a whole number of {unit}", unit=self.unit) if self.unit else tr("a whole number")
        if re.fullmatch(r"\s*[+-]?\d+\s*", value) is None:
            return tr("takes {wanted}", wanted=wanted)
        number = int(value)
        if self.low is not None and number < self.low:
            return tr("takes {wanted} of at least {number}", wanted=wanted, number=self.low)
        if self.high is not None and number > self.high:
            return tr("takes {wanted} of at most {number}", wanted=wanted, number=self.high)
        return None

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        if self.kind is Kind.CHOICE:
            return ", ".join(self.choices)
        if self.kind is Kind.INTEGER and (self.low is not None or self.high is not None):
            low = "" if self.low is None else str(self.low)
            high = "" if self.high is None else str(self.high)
            return f"{low}..{high}"
        return str(self.kind.value)


_HEADER = "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
_CPP = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
_RECORDER = "torch/csrc/distributed/c10d/FlightRecorder.hpp"


def _switch(name: str, default: str, since: str, sentence: str, source: str = _HEADER) -> Variable:
    """Describe a boolean that ProcessGroupNCCL reads when it is constructed."""
    return Variable(name, Reader.TORCH_NCCL, sentence, source, since=since, default=default, kind=Kind.BOOL)


def _number(name: str, default: str, unit: str, since: str, sentence: str, low: int = 0) -> Variable:
    """Describe a whole number that ProcessGroupNCCL reads when it is constructed."""
    return Variable(
        name, Reader.TORCH_NCCL, sentence, _HEADER, since=since, default=default, unit=unit, kind=Kind.INTEGER, low=low
    )


def _alias(name: str, new: str, since: str | None, deprecated: str, kind: Kind, reader: Reader) -> Variable:
    """Describe an old name that torch still reads after the new one, with a warning."""
    return Variable(
        name,
        reader,
        f"The name of old of {new}; torch reads it when the new one is absent, and warns.",
        _HEADER if reader is Reader.TORCH_NCCL else _RECORDER,
        since=since,
        kind=kind,
        replaced_by=new,
        deprecated_since=deprecated,
    )


_ERROR_HANDLING = (
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        Reader.TORCH_NCCL,
        tr(
            "What the watchdog does when a collective fails or passes the process group's timeout: 0 nothing, 1 abort the "
            "communicators and end the process, 2 abort and live on, 3 end the process without an abort that may hang."
        ),
        _HEADER,
        since="2.2",
        default="3",
        kind=Kind.INTEGER,
        low=0,
        high=3,
    ),
    _switch(
        "TORCH_NCCL_BLOCKING_WAIT",
        "0",
        "2.2",
        "With 1, wait() blocks the host until the timeout and raises; watchdog and heartbeat monitor are then off.",
    ),
    _switch(
        "TORCH_NCCL_ENABLE_MONITORING",
        "1 (0 in 2.2)",
        "2.2",
        tr("The monitor ends a process whose watchdog stands still."),
    ),
    _number(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        "480 (120 in 2.2, 600 in 2.3 and 2.4)",
        "seconds",
        "2.2",
        tr("How long the watchdog may stand still before the heartbeat monitor ends the process."),
        low=1,
    ),
    _switch(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "1",
        "2.4",
        "With 0, watchdog errors without 'CUDA Error' in them are logged and the process lives on.",
    ),
    _switch(
        "TORCH_NCCL_PROPAGATE_ERROR",
        "0",
        "2.7",
        "Tells the other ranks of an error through the store; unblocks nothing.",
    ),
    Variable(
        "TORCH_NCCL_NONBLOCKING_TIMEOUT",
        Reader.TORCH_NCCL,
        "Time limit for creating, finalising and aborting a non-blocking communicator.",
        "torch/csrc/distributed/c10d/NCCLUtils.cpp",
        since="2.1",
        default="1800",
        unit="seconds",
        kind=Kind.INTEGER,
        low=1,
        read_at="first NCCL communicator",
    ),
    _switch("TORCH_NCCL_USE_COMM_NONBLOCKING", "0", "2.1", "Creates non-blocking NCCL communicators.", _CPP),
    _switch(
        "TORCH_NCCL_NAN_CHECK", "0", "2.4", "Asserts on the device that inputs hold no NaN; the CUDA error then stays."
    ),
)

_RECORDER_VARIABLES = (
    Variable(
        "TORCH_FR_BUFFER_SIZE",
        Reader.TORCH,
        tr("How many collectives the flight recorder keeps, 0 for none; since torch 2.8 it records gloo too."),
        "torch/csrc/distributed/c10d/FlightRecorder.hpp",
        since="2.8",
        default="2000 (0 before 2.11)",
        unit="entries",
        kind=Kind.INTEGER,
        low=0,
        read_at="first process group",
    ),
    Variable(
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        Reader.TORCH,
        tr("The name of TORCH_FR_BUFFER_SIZE before torch 2.8; ProcessGroupNCCL still looks at it before it dumps."),
        _HEADER,
        since="2.2",
        default="2000 (0 before 2.11)",
        unit="entries",
        kind=Kind.INTEGER,
        low=0,
        read_at="first process group",
        replaced_by="TORCH_FR_BUFFER_SIZE",
        deprecated_since="2.8",
    ),
    Variable(
        "TORCH_FR_CPP_STACK",
        Reader.TORCH,
        "Records C++ frames too, which costs time at every collective.",
        "torch/csrc/distributed/c10d/FlightRecorder.hpp",
        since="2.8",
        default="0",
        kind=Kind.BOOL,
        read_at="first process group",
    ),
    _alias("TORCH_NCCL_TRACE_CPP_STACK", "TORCH_FR_CPP_STACK", "2.2", "2.8", Kind.BOOL, Reader.TORCH),
    Variable(
        "TORCH_FR_DUMP_TEMP_FILE",
        Reader.TORCH,
        "Where the recorder's dump goes: this text with the global rank appended.",
        "torch/csrc/distributed/c10d/FlightRecorder.cpp",
        since="2.8",
        default="~/.cache/torch/comm_lib_trace_rank_",
        read_at="first dump",
    ),
    _alias("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE", "2.2", "2.8", Kind.TEXT, Reader.TORCH),
    Variable(
        "TORCH_FR_DUMP_DYNAMIC_FILE_NAME",
        Reader.TORCH,
        "Reads TORCH_FR_DUMP_TEMP_FILE again at every dump.",
        "torch/csrc/distributed/c10d/FlightRecorder.cpp",
        since="2.10",
        default="0",
        kind=Kind.BOOL,
    ),
    Variable(
        "TORCH_INCLUDE_STACK_TRACE",
        Reader.TORCH,
        "Whether a dump holds Python stacks.",
        _RECORDER,
        since="2.10",
        default="1",
        kind=Kind.BOOL,
    ),
    Variable(
        "TORCH_INCLUDE_ONLY_ACTIVE",
        Reader.TORCH,
        "Whether a dump holds only collectives that are not complete.",
        _RECORDER,
        since="2.10",
        default="0",
        kind=Kind.BOOL,
    ),
    _switch(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "1 (0 before 2.7)",
        "2.2",
        tr("Writes the flight recorder's entries to a file when a collective times out or fails."),
    ),
    _number(
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "15000 (60000 before 2.8)",
        "milliseconds",
        "2.3",
        "Time given to the dump; since torch 2.8 the watchdog sleeps four times as long before it ends the process.",
    ),
    _number(
        "TORCH_NCCL_COORD_CHECK_MILSEC", "1000", "milliseconds", "2.3", "How often the store is asked for a dump.", 1
    ),
    Variable(
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
        Reader.TORCH_NCCL,
        "A named pipe `<text><rank>.pipe`; a byte written to it causes a dump.",
        _CPP,
        since="2.3",
    ),
    _switch("TORCH_NCCL_EXTRA_DUMP_ON_EXEC", "0", "2.10", "Dumps also at abort() and at watchdog errors."),
    _switch("TORCH_NCCL_DESYNC_DEBUG", "0", "2.2", "Desync report through the store: two store writes a collective."),
    _switch("TORCH_NCCL_ENABLE_TIMING", "0", "2.2", "Records when a collective starts, and so its duration."),
    _switch(
        "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN", "1", "2.5", "Logs C++ stacks when the monitor ends the process."
    ),
)

_OTHER = (
    Variable(
        "TORCH_DISTRIBUTED_DEBUG",
        Reader.TORCH,
        "DETAIL compares shapes and types of every collective over an extra gloo group: about 4.5 times the time of "
        "a small one.",
        "torch/csrc/distributed/c10d/debug.cpp",
        default="OFF",
        kind=Kind.CHOICE,
        choices=("OFF", "INFO", "DETAIL"),
        read_at="import torch.distributed",
    ),
    Variable(
        "TORCH_CPP_LOG_LEVEL",
        Reader.TORCH,
        "Lowest level that the C++ part logs; INFO shows aborts and dump signals.",
        "c10/util/Logging.cpp",
        default="WARNING",
        kind=Kind.CHOICE,
        choices=("INFO", "WARNING", "ERROR", "FATAL", "0", "1", "2", "3"),
        read_at="import torch",
    ),
    Variable(
        "TORCH_SHOW_CPP_STACKTRACES",
        Reader.TORCH,
        "Adds the C++ stack to errors.",
        "torch/csrc/Exceptions.cpp",
        default="0",
        read_at="import torch",
    ),
    Variable(
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        Reader.TORCH_NCCL,
        "Without effect in torch 2.13, where it is the default, and not there any more in 2.15.",
        _HEADER,
        since="2.1",
        until="2.14",
        default="0",
        kind=Kind.BOOL,
    ),
    _switch("TORCH_NCCL_HIGH_PRIORITY", "0", "2.4", "Puts NCCL on high-priority streams."),
    _switch("TORCH_NCCL_CUDA_EVENT_CACHE", "1 (0 in 2.5)", "2.5", "Keeps CUDA events for reuse by the watchdog."),
    _switch("TORCH_NCCL_BCAST_UNIQUEID", "", "2.5", "Shares the NCCL id through the store."),
    _number("TORCH_NCCL_RANKS_PER_ROOT", "", "ranks", "2.7", "Ranks for each root when a communicator is created.", 1),
    _switch(
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
        "1",
        "2.9",
        "Warns that point-to-point operations on an eagerly created group run one after the other.",
    ),
    _switch(
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
        "0",
        "2.2",
        "Registers allocator memory with the communicators.",
    ),
    Variable(
        "GLOO_SOCKET_IFNAME",
        Reader.GLOO,
        tr(
            "The interface gloo listens on, and so the address it gives its peers: exact names separated by commas, no "
            "prefixes, no '^', no '='."
        ),
        "torch/csrc/distributed/c10d/init.cpp; gloo/transport/tcp/device.cc",
        default="the address that the host's own name resolves to, else loopback",
        read_at="every gloo group",
        differs_per_host=True,
    ),
    Variable(
        "GLOO_DEVICE_TRANSPORT",
        Reader.GLOO,
        "The transport of gloo: TCP, TCP_TLS or IBVERBS.",
        "torch/csrc/distributed/c10d/GlooDeviceFactory.cpp",
        default="TCP",
    ),
    Variable(
        "TORCH_GLOO_LAZY_INIT",
        Reader.GLOO,
        "Connects a pair of ranks when it is first used.",
        "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp",
        since="2.8",
        default="0",
        kind=Kind.BOOL,
    ),
    # Looked up in the libraries of torch 2.6.0, 2.7.1, 2.8.0, 2.9.1, 2.10.0, 2.11.0, 2.12.0 and 2.13.0.
    Variable("GLOO_LOG_LEVEL", Reader.GLOO, "Log level of gloo.", "gloo/common/logging.cc", since="2.11"),
    Variable(
        "GLOO_DISABLE_CONNECTION_RETRIES",
        Reader.GLOO,
        "Gives up at the first refused connection.",
        "gloo/common/utils.cc",
        since="2.8",
    ),
    Variable(
        "GLOO_ENABLE_STORE_V2_API",
        Reader.GLOO,
        "Reads the store in one request for many keys.",
        "gloo/common/utils.cc",
        since="2.8",
    ),
    Variable(
        "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER",
        Reader.GLOO,
        "Uses ranks as connection numbers, which saves store traffic.",
        "gloo/common/utils.cc",
        since="2.8",
    ),
)

_ALIASES = (
    _alias(
        "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2.0", "2.2", Kind.INTEGER, Reader.TORCH_NCCL
    ),
    _alias("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT", "2.0", "2.2", Kind.BOOL, Reader.TORCH_NCCL),
    _alias("NCCL_DESYNC_DEBUG", "TORCH_NCCL_DESYNC_DEBUG", "2.0", "2.2", Kind.BOOL, Reader.TORCH_NCCL),
    _alias("NCCL_ENABLE_TIMING", "TORCH_NCCL_ENABLE_TIMING", None, "2.2", Kind.BOOL, Reader.TORCH_NCCL),
    _alias(
        "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
        "2.2",
        "2.2",
        Kind.BOOL,
        Reader.TORCH_NCCL,
    ),
)

_GONE = (
    Variable(
        "TORCH_ENABLE_NCCL_HEALTH_CHECK",
        Reader.TORCH_NCCL,
        "Checked that a communicator can be created; torch 2.2 is the last that read it.",
        _CPP,
        until="2.2",
        kind=Kind.BOOL,
    ),
    Variable(
        "TORCH_NCCL_ABORT_IN_DESTROY_PG",
        Reader.TORCH_NCCL,
        "Aborted the communicators in destroy_process_group; only torch 2.3 read it.",
        _CPP,
        since="2.3",
        until="2.3",
        kind=Kind.BOOL,
    ),
)

_NCCL2 = (
    Variable(
        "TORCH_DIST_USE_NCCL2",
        Reader.TORCH,
        'With 0, "nccl" is ProcessGroupNCCL, as before torch 2.15, and not nccl2; the backend "nccl-legacy" is too.',
        "torch/distributed/distributed_c10d.py",
        since="2.15",
        default="1",
        kind=Kind.BOOL,
    ),
)

# Seen on torch 2.15 with nccl2, on an emulated GPU: no difference with any value.
_NOT_BY_NCCL2 = {
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_PROPAGATE_ERROR",
}

TORCH_VARIABLES: tuple[Variable, ...] = tuple(
    replace(variable, not_by_nccl2=True) if variable.name in _NOT_BY_NCCL2 else variable
    for variable in (*_ERROR_HANDLING, *_RECORDER_VARIABLES, *_OTHER, *_NCCL2, *_ALIASES, *_GONE)
)


_GUIDE = "NCCL user guide, Environment Variables"


def _nccl(
    name: str,
    default: str,
    sentence: str,
    source: str = _GUIDE,
    *,
    unit: str = "",
    kind: Kind = Kind.TEXT,
    choices: tuple[str, ...] = (),
    low: int | None = None,
    high: int | None = None,
    differs_per_host: bool = False,
) -> Variable:
    since, until = NCCL_NAMES[name]
    return Variable(
        name,
        Reader.NCCL,
        sentence,
        source,
        since=since,
        until=until,
        default=default,
        unit=unit,
        kind=kind,
        choices=choices,
        low=low,
        high=high,
        read_at="first NCCL communicator",
        differs_per_host=differs_per_host,
    )


NCCL_VARIABLES: tuple[Variable, ...] = (
    _nccl(
        "NCCL_SOCKET_IFNAME",
        "all but lo and docker*",
        tr(
            "The interfaces for NCCL's sockets: prefixes separated by commas; a leading '^' excludes, a leading '=' asks "
            "for exact names."
        ),
        "NCCL source, findInterfaces (src/misc/socket.cc, src/os/linux.cc)",
        differs_per_host=True,
    ),
    _nccl(
        "NCCL_SOCKET_FAMILY",
        "either, IPv4 first",
        tr("Restricts NCCL's sockets to one address family."),
        kind=Kind.CHOICE,
        choices=("AF_INET", "AF_INET6"),
    ),
    _nccl("NCCL_SOCKET_RETRY_CNT", "34", "How often a refused connection is tried again.", kind=Kind.INTEGER, low=0),
    _nccl("NCCL_SOCKET_RETRY_SLEEP_MSEC", "100", "Step by which the pause between tries grows.", unit="milliseconds"),
    _nccl("NCCL_SOCKET_POLL_TIMEOUT_MSEC", "0", "Saves CPU while a communicator is created; not a time limit."),
    _nccl("NCCL_SOCKET_NTHREADS", "by platform", "Threads that serve the sockets of one connection."),
    _nccl("NCCL_NSOCKS_PERTHREAD", "by platform", "Sockets for each of these threads."),
    _nccl("NCCL_NET", "IB, else Socket", "The network module by name: IB, Socket or that of a plug-in."),
    _nccl("NCCL_NET_PLUGIN", "libnccl-net.so", "The network plug-in to load."),
    _nccl(
        "NCCL_IB_DISABLE",
        "0",
        tr("1 makes NCCL use sockets although InfiniBand or RoCE is there."),
        kind=Kind.INTEGER,
        low=0,
        high=1,
    ),
    _nccl(
        "NCCL_IB_HCA",
        "all active ports",
        tr(
            "The adapters to use: prefixes name[:port] separated by commas; '^' in front excludes, '=' is for exact names."
        ),
        differs_per_host=True,
    ),
    _nccl(
        "NCCL_IB_TIMEOUT",
        "20 (18 before 2.23, 14 before 2.14)",
        tr("Exponent of the transport's timeout, 4.096 us x 2^value a try: 20 and 7 tries make about 30 s, 22 2 min."),
        kind=Kind.INTEGER,
        low=1,
        high=31,
    ),
    _nccl("NCCL_IB_RETRY_CNT", "7", tr("Tries of the InfiniBand transport."), kind=Kind.INTEGER, low=0, high=7),
    _nccl(
        "NCCL_IB_GID_INDEX",
        "-1 (found by NCCL; 0 before 2.21)",
        tr("The index of the address that RoCE uses on its port; it has to be a RoCE v2 one to cross a router."),
        kind=Kind.INTEGER,
        differs_per_host=True,
    ),
    _nccl("NCCL_IB_ROCE_VERSION_NUM", "2", "Which RoCE version the automatic choice of the address takes."),
    _nccl("NCCL_IB_SL", "0", "InfiniBand service level.", kind=Kind.INTEGER),
    _nccl("NCCL_IB_TC", "0", "InfiniBand traffic class: the lossless one of the fabric, where RoCE needs it."),
    _nccl("NCCL_IB_QPS_PER_CONNECTION", "1", "Queue pairs for each connection."),
    _nccl("NCCL_IB_RETURN_ASYNC_EVENTS", "1", "Ends communication on a fatal event of the adapter.", kind=Kind.INTEGER),
    _nccl("NCCL_IB_RESILIENCY_PORT_FAILOVER", "0", "Moves operations in flight to another port when one fails."),
    _nccl(
        "NCCL_BUFFSIZE",
        "4194304",
        tr(
            "The buffer of each channel between two peers; more helps long-latency Ethernet; not a limit on message size."
        ),
        unit="bytes",
        kind=Kind.INTEGER,
        low=4096,
    ),
    _nccl(
        "NCCL_P2P_DISABLE",
        "0",
        tr("1 forbids direct access between the GPUs of a host, NVLink included."),
        kind=Kind.INTEGER,
        low=0,
        high=1,
    ),
    _nccl("NCCL_P2P_LEVEL", "by topology", "How far apart two GPUs may be for direct access."),
    _nccl("NCCL_SHM_DISABLE", "0", "1 forbids shared memory between the ranks of a host.", kind=Kind.INTEGER),
    _nccl("NCCL_NVLS_ENABLE", "2", "NVLink SHARP; 2 is automatic."),
    _nccl("NCCL_CUMEM_ENABLE", "by driver", "Uses CUDA's virtual memory functions."),
    _nccl("NCCL_NET_GDR_LEVEL", "by topology", "How far apart GPU and adapter may be for GPUDirect RDMA."),
    _nccl("NCCL_CROSS_NIC", "2", "Whether a ring may use different adapters on different hosts; 2 is automatic."),
    _nccl("NCCL_ALGO", "by tuning", "Restricts the algorithms."),
    _nccl("NCCL_PROTO", "by tuning", "Restricts the protocols."),
    _nccl(
        "NCCL_COMM_BLOCKING", "by caller", "Overrides whether communicators block; 0 makes all of them non-blocking."
    ),
    _nccl(
        "NCCL_DEBUG",
        "none",
        tr("What NCCL logs; WARN names the peer of a connection that broke, INFO also shows what it chose at start."),
        kind=Kind.CHOICE,
        choices=("VERSION", "WARN", "INFO", "ABORT", "TRACE"),
    ),
    _nccl(
        "NCCL_DEBUG_SUBSYS",
        "INIT,BOOTSTRAP,ENV",
        tr("Which parts log at INFO; ALL logs every collective, which is much and slow."),
    ),
    _nccl("NCCL_DEBUG_FILE", "standard output", "Where the log goes; %h and %p stand for host and process."),
    _nccl(
        "NCCL_CONF_FILE",
        "~/.nccl.conf",
        "A file of NAME=value lines, read for names that are not in the environment; /etc/nccl.conf is read after it.",
    ),
    _nccl("NCCL_RAS_ENABLE", "1", "A thread that answers questions about the state of all communicators."),
    _nccl("NCCL_RAS_ADDR", "localhost:28028", "Where that thread listens."),
    _nccl("NCCL_HOSTID", "host name and boot id", "What NCCL tells hosts apart by.", "NCCL source, src/misc/utils.cc"),
    _nccl("NCCL_COMM_ID", "none", "Address of the bootstrap root, host:port.", differs_per_host=False),
)


#: Names that are recommended in public although nothing reads them, and the ones that do the job.
UNREAD_VARIABLES: tuple[Variable, ...] = tuple(
    Variable(name, Reader.NOTHING, sentence, source, instead=instead)
    for name, sentence, source, instead in (
        (
            "NCCL_TIMEOUT",
            tr("Nothing reads this name: it is in no NCCL from 2.3.5 to 2.30.7 and in no torch from 2.0 to 2.13."),
            "source of 62 NCCL tags; strings of the torch 2.0 to 2.13 and libnccl 2.29.7 binaries",
            tr(
                "init_process_group(timeout=timedelta(seconds=...)) for torch, NCCLGUARD_TIMEOUT for guarded collectives"
            ),
        ),
        (
            "NCCL_TIMEOUT_MINS",
            tr("Nothing reads this name."),
            "source of 62 NCCL tags; strings of the torch 2.13 and libnccl 2.29.7 binaries",
            tr(
                "init_process_group(timeout=timedelta(minutes=...)) for torch, NCCLGUARD_TIMEOUT for guarded collectives"
            ),
        ),
        (
            "TORCH_NCCL_TIMEOUT",
            tr("Nothing reads this name."),
            "strings of the torch 2.13 binaries",
            "init_process_group(timeout=timedelta(seconds=...))",
        ),
        (
            "GLOO_TIMEOUT",
            tr("Nothing reads this name."),
            "strings of the torch 2.13 binaries",
            tr("init_process_group(timeout=timedelta(seconds=...)) or new_group(timeout=...)"),
        ),
        (
            "TORCH_DISTRIBUTED_TIMEOUT",
            tr("Nothing reads this name."),
            "strings and Python files of torch 2.13",
            "init_process_group(timeout=timedelta(seconds=...))",
        ),
    )
)

DEEPSPEED_VARIABLES: tuple[Variable, ...] = (
    Variable(
        "DEEPSPEED_TIMEOUT",
        Reader.DEEPSPEED,
        tr("Time limit in minutes, not seconds, of the process group that deepspeed.init_distributed creates."),
        "DeepSpeed, deepspeed/constants.py (since October 2023; default 30, and 10 since August 2026)",
        default="10 or 30",
        unit="minutes",
        kind=Kind.INTEGER,
        low=1,
        read_at="import deepspeed",
    ),
)

#: Every documented variable by name.
CATALOGUE: dict[str, Variable] = {
    variable.name: variable for variable in (*TORCH_VARIABLES, *NCCL_VARIABLES, *DEEPSPEED_VARIABLES, *UNREAD_VARIABLES)
}

#: The prefixes of names that are checked.
WATCHED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "TORCH_GLOO_")


def lookup(name: str) -> Variable | None:
    """Return the entry of a name; for an NCCL variable that is not described here, one with its versions only."""
    known = CATALOGUE.get(name)
    if known is not None or name not in NCCL_NAMES:
        return known
    since, until = NCCL_NAMES[name]
    return Variable(
        name,
        Reader.NCCL,
        "An NCCL setting that ncclguard neither sets nor describes.",
        f"NCCL source, tags 2.3.5 to {NEWEST_READ}",
        since=since,
        until=until,
        read_at="first NCCL communicator",
    )


def name_for(name: str, versions: Versions) -> str | None:
    """Return the name by which the installed versions read the newest versions' ``name``; None when none does.

    >>> name_for("TORCH_FR_BUFFER_SIZE", Versions(torch="2.7.0", nccl=None, nccl_source="test"))
    'TORCH_NCCL_TRACE_BUFFER_SIZE'
    """
    variable = CATALOGUE[name]
    if variable.is_read(versions) is not False:
        return name
    for alias in CATALOGUE.values():
        if alias.replaced_by == name and alias.is_read(versions):
            return alias.name
    return None


def closest(name: str, versions: Versions) -> str | None:
    """Return the known name that looks most like this one (a misspelling), or None."""
    candidates = [known for known in (*CATALOGUE, *NCCL_NAMES) if (entry := lookup(known)) and entry.is_read(versions)]
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.85)
    return matches[0] if matches else None


#: The line that ends the text written by hand; the rest of the page is made from the catalogue.
MARK = "<!-- Below: `python -m ncclguard.environment.catalogue docs/environment.md`; a test compares. -->"

_HINT = """
## The catalogue

Versions are those of the reader, both inclusive. "torch with NCCL" means that ProcessGroupNCCL reads the variable. The
CUDA wheels of torch bring: """


def _versions(variable: Variable) -> str:
    since = variable.since or ""
    if variable.until:
        return f"{since} to {variable.until}".strip()
    return f"{since} on" if since else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(variable: Variable) -> str:
    unit = f" {variable.unit}" if variable.unit and variable.default else ""
    default = f"{variable.default}{unit}"
    sentence = variable.sentence
    if variable.replaced_by:
        sentence += f" Deprecated since {variable.deprecated_since}; use `{variable.replaced_by}`."
    cells = (f"`{variable.name}`", _versions(variable), variable.reader.value, default, variable.allowed)
    return "| " + " | ".join(_cell(cell) for cell in (*cells, variable.read_at, sentence, variable.source)) + " |"


def _table(title: str, variables: Sequence[Variable]) -> list[str]:
    return [
        "",
        f"### {title}",
        "",
        "| name | versions | reader | default | values | read at | meaning | source |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(variable) for variable in variables),
    ]


def with_tables(page: str) -> str:
    """Return the page with its tables made anew below `MARK`. Raises ValueError for a text without the mark."""
    bundled = ", ".join(f"{torch}: NCCL {nccl}" for torch, nccl in BUNDLED_NCCL.items())
    head = page[: page.index(MARK)] + MARK
    lines = [f"{head}\n{_HINT}{bundled}."]
    lines += [
        "",
        "### Names that nothing reads",
        "",
        "| name | what is known | use instead | source |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{entry.name}` | {entry.sentence} | {_cell(entry.instead or '')} | {entry.source} |"
        for entry in UNREAD_VARIABLES
    ]
    lines += _table("torch and gloo", TORCH_VARIABLES)
    lines += _table("NCCL", NCCL_VARIABLES)
    lines += _table("DeepSpeed", DEEPSPEED_VARIABLES)
    described = {variable.name for variable in NCCL_VARIABLES}
    lines += [
        "",
        "### All other NCCL variables",
        "",
        f"Found in the source of NCCL 2.3.5 to {NEWEST_READ}: name, first version, and last one where it is gone.",
        "",
    ]
    lines += [
        f"- `{name}` {since}{f' to {until}' if until else ''}"
        for name, (since, until) in NCCL_NAMES.items()
        if name not in described
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_tables(file.read_text()))
