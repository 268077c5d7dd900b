"""Variables that torch itself and the gloo in it read. Defaults are those of torch 2.13 unless another is named."""

from __future__ import annotations

from dataclasses import replace

from ncclguard.environment.variable import Kind, Reader, Variable

_HEADER = "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
_CPP = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
_RECORDER = "torch/csrc/distributed/c10d/FlightRecorder.hpp"


def _switch(name: str, default: str, since: str, sentence: str, source: str = _HEADER) -> Variable:
    """A boolean that ProcessGroupNCCL reads when it is constructed."""
    return Variable(name, Reader.TORCH_NCCL, sentence, source, since=since, default=default, kind=Kind.BOOL)


def _number(name: str, default: str, unit: str, since: str, sentence: str, low: int = 0) -> Variable:
    """A whole number that ProcessGroupNCCL reads when it is constructed."""
    return Variable(
        name, Reader.TORCH_NCCL, sentence, _HEADER, since=since, default=default, unit=unit, kind=Kind.INTEGER, low=low
    )


def _alias(name: str, new: str, since: str | None, deprecated: str, kind: Kind, reader: Reader) -> Variable:
    """A name of old that torch still reads after the new one, with a warning."""
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
        "What the watchdog does when a collective fails or passes the process group's timeout: 0 nothing, 1 abort the "
        "communicators and end the process, 2 abort and live on, 3 end the process without an abort that may hang.",
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
        "TORCH_NCCL_ENABLE_MONITORING", "1 (0 in 2.2)", "2.2", "The monitor ends a process whose watchdog stands still."
    ),
    _number(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        "480 (120 in 2.2, 600 in 2.3 and 2.4)",
        "seconds",
        "2.2",
        "How long the watchdog may stand still before the heartbeat monitor ends the process.",
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
        "How many collectives the flight recorder keeps, 0 for none; since torch 2.8 it records gloo too.",
        "torch/csrc/distributed/c10d/FlightRecorder.hpp",
        since="2.8",
        default="2000",
        unit="entries",
        kind=Kind.INTEGER,
        low=0,
        read_at="first process group",
    ),
    Variable(
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        Reader.TORCH,
        "The name of TORCH_FR_BUFFER_SIZE before torch 2.8; ProcessGroupNCCL still looks at it before it dumps.",
        _HEADER,
        since="2.2",
        default="2000 (0 before 2.6)",
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
        "Writes the flight recorder's entries to a file when a collective times out or fails.",
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
        "A named pipe <text><rank>.pipe; a byte written to it causes a dump.",
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
        "The interface gloo listens on, and so the address it gives its peers: exact names separated by commas, no "
        "prefixes, no '^', no '='.",
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
    # The gloo in torch 2.6 has none of the following four, that in 2.13 has them.
    Variable("GLOO_LOG_LEVEL", Reader.GLOO, "Log level of gloo.", "gloo/common/logging.cc", since="2.7"),
    Variable(
        "GLOO_DISABLE_CONNECTION_RETRIES",
        Reader.GLOO,
        "Gives up at the first refused connection.",
        "gloo/common/utils.cc",
        since="2.7",
    ),
    Variable(
        "GLOO_ENABLE_STORE_V2_API",
        Reader.GLOO,
        "Reads the store in one request for many keys.",
        "gloo/common/utils.cc",
        since="2.7",
    ),
    Variable(
        "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER",
        Reader.GLOO,
        "Uses ranks as connection numbers, which saves store traffic.",
        "gloo/common/utils.cc",
        since="2.7",
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
