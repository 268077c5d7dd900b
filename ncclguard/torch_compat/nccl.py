"""torch's private names for NCCL process groups, for its flight recorders, and for what its own watchdogs have found.

Written from the sources of torch 2.6, 2.9 and a later main branch; the bindings were looked at in CUDA builds of 2.6.0
and 2.15.0. Run on torch 2.6.0, 2.8.0, 2.11.0, 2.13.0 and 2.15.0 (CPU, gloo), and NCCL on an emulated GPU with 2.8.0,
2.10.0 (parts), 2.11.0, 2.13.0 and 2.15.0; the versions between are declared, not run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c
from torch.distributed import distributed_c10d as c10d

from ncclguard.torch_compat import groups

# With blocking wait ProcessGroupNCCL starts neither watchdog nor monitor (ProcessGroupNCCL.cpp: "NO watchdog thread is
# created"). From 2.8 on a watchdog that sees an error reports it to the whole job, whatever its error handling
# (Watchdog::runLoop, broadcastDumpSignal): `exception_dump` in the default store makes the monitor of every rank end
# its process. The other effect of blocking wait, on wait(), is avoided by make_stream_wait(). Without a watchdog nobody
# retires the flight recorder's entries, which point at the events; those of the cache are never freed.
_WITHOUT_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_CUDA_EVENT_CACHE": "1"}

# Before, only the watchdog takes an operation back out of the count that a capture waits for, without a limit
# (CUDAGraph.cpp, num_pending_event_queries): without it the program's next CUDA graph would hang. Its report can be
# switched off there.
_HARMLESS_WATCHDOG = {
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # 1 and 3 end the process on an error that the guard handles
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the same, for errors that NCCL reports asynchronously
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # turns error handling 0 into 3
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # ends the process when the watchdog is busy
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # makes the report to the job, and sleeps for a minute
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}

# How long torch waits for NCCL in abort(). A watchdog would log a timeout of operations that take longer, so it gets
# the backstop.
_ABORT_LIMIT = timedelta(seconds=60)

# How long torch spins for a call of a non-blocking communicator that does not come back; 1800 s by default, and an
# abort does not end it (NCCLUtils.hpp, C10D_NCCL_CHECK_TIMEOUT). Read once, at the process's first communicator.
_SPINS_FOR = "TORCH_NCCL_NONBLOCKING_TIMEOUT"

_environment = threading.Lock()


def new_nccl_group(store: groups.Store, name: str, ranks: tuple[int, ...], index: int, backstop: timedelta) -> Any:
    """Make a bare NCCL process group that never ends the process: unknown to torch, its watchdog absent or harmless.

    ``name``: what the flight recorder calls it. The variables that ProcessGroupNCCL reads are set while it is
    constructed only, so that the groups of the program keep theirs. Its operations must be waited for by
    `make_stream_wait`, never by ``wait``, which would block. Non-blocking communicators where torch and NCCL have
    working ones (2.10 and 2.26; hangs before: pytorch #153960, #154055, #169484), because only with those does NCCL
    promise that an abort is safe. Raises RuntimeError where torch was built without NCCL.
    """
    needs_watchdog = graphs_count_operations()
    group_type, options = _type_and_options(name, ranks, backstop if needs_watchdog else _ABORT_LIMIT)
    non_blocking = groups.VERSION >= (2, 10) and torch.cuda.nccl.version() >= (2, 26)  # type: ignore[no-untyped-call]
    if non_blocking:
        options.config.blocking = False
    with _environment:
        if non_blocking and "TORCH_NCCL_USE_COMM_NONBLOCKING" not in os.environ:  # else the program uses the limit too
            os.environ.setdefault(_SPINS_FOR, str(spin_limit(dist.get_world_size() if dist.is_initialized() else 1)))
        if not needs_watchdog:
            with _variables(_WITHOUT_WATCHDOG):
                return group_type(store, index, len(ranks), options)
        with _variables(_HARMLESS_WATCHDOG), _no_debugging():
            return group_type(store, index, len(ranks), options)


#: The limit of torch's watchdog for an operation; the guard's limits end the operation before.
_NEVER = timedelta(days=30)


def new_enqueued_group(store: groups.Store, name: str, ranks: tuple[int, ...], index: int) -> Any:
    """Make an NCCL process group whose operations are used like torch's own: ``wait`` makes the stream wait.

    Its watchdog only logs, whatever the program has set for its own groups. Communicators are blocking, as torch's are
    by default: with non-blocking ones ``all_to_all_single`` raises "NCCL operation in progress" (2.13, 2.15). Always
    ProcessGroupNCCL, also on 2.15, whose nccl2 ends the process or the collective by itself. Raises RuntimeError where
    torch was built without NCCL.
    """
    group_type, options = _type_and_options(name, ranks, _NEVER)
    with _environment, _variables(_HARMLESS_WATCHDOG), _no_debugging():
        made = group_type(store, index, len(ranks), options)
    made._set_sequence_number_for_group()
    return made


def _type_and_options(name: str, ranks: tuple[int, ...], limit: timedelta) -> tuple[Any, Any]:
    group_type: Any = getattr(_c, "ProcessGroupNCCL", None)
    if group_type is None:
        raise RuntimeError(
            "this torch was built without NCCL: install a CUDA build of torch, or move the tensor to the CPU"
        )
    options = group_type.Options()
    options._timeout = limit
    options.group_name = name
    options.global_ranks_in_group = list(ranks)
    return group_type, options


def plain_group(backend: Any, store: groups.Store) -> Any:
    """Make a ProcessGroup of torch's own that has an NCCL backend for CUDA tensors; unknown to torch.

    It keeps its first backend for good: torch ignores a second one of the same type (ProcessGroup.hpp, ``setBackend``).
    """
    kind: Any = dist.ProcessGroup
    plain = kind(store, backend.rank(), backend.size())
    plain._set_default_backend(kind.BackendType.NCCL)
    plain._register_backend(torch.device("cuda"), kind.BackendType.NCCL, backend)
    return plain


def spin_limit(ranks: int) -> int:
    """Return the seconds that a launch or a connection of a job of so many ranks may take.

    As short as can be, because a launch whose peer died keeps a core busy and its staging memory taken for that
    long; but connecting has the same limit, and takes longer the more ranks there are.
    """
    return min(20 + ranks // 25, 60)


#: cudaErrorNvlinkUncorrectable, which a healthy GPU also reports when a peer's GPU has failed.
_NVLINK = 220


def of_own_device(error: BaseException) -> bool:
    """Return whether CUDA itself failed in this process: the error lasts, and another communicator does not help.

    torch raises AcceleratorError for what the CUDA runtime answers (older ones a RuntimeError whose text begins with
    "CUDA error:"), and DistBackendError for what NCCL answers, whose cause may be any rank.
    """
    kind: Any = getattr(torch, "AcceleratorError", None)
    if kind is None:
        return isinstance(error, RuntimeError) and str(error).startswith("CUDA error: ") and "NVLink" not in str(error)
    return isinstance(error, kind) and getattr(error, "error_code", None) != _NVLINK


@functools.lru_cache(maxsize=1)
def graphs_count_operations() -> bool:
    """Return whether capturing a graph waits until a watchdog has seen all operations end: in 2.6, not from 2.8 on."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    try:
        library = ctypes.CDLL(str(path))  # which is loaded already
    except OSError:
        return groups.VERSION < (2, 8)
    return hasattr(library, "_ZN2at4cuda9CUDAGraph25inc_pending_event_queriesEv")


def error_of(work: dist.Work) -> BaseException | None:
    """Return the error with which an operation that torch counts as complete has ended; None also where it cannot tell.

    pybind11 has no conversion for what ``exception`` returns in torch 2.11, and raises TypeError whatever it is; in
    2.13 it has. The replacement, wait(), would abort the communicator on an error, in this thread, which could not
    leave an abort that hangs behind. torch warns once in a process that exception() is deprecated.
    """
    try:
        error: BaseException | None = work.exception()
        return error
    except TypeError:
        return None


def make_stream_wait(work: dist.Work) -> None:
    """Have the current stream wait for an operation, and not this thread.

    ``block_current_stream`` is the same function without its warning (ProcessGroupNCCL.hpp, ``WorkNCCL``); older torch,
    2.6 and 2.8 among it, has ``synchronize`` only, which prints from 2.8 on that it is being deprecated.
    """
    (work.block_current_stream if hasattr(work, "block_current_stream") else work.synchronize)()


def shut_nccl_group(group: Any) -> None:
    """Release a healthy NCCL group once its operations are done everywhere; blocks until then."""
    (group.shutdown if hasattr(group, "shutdown") else group._shutdown)()


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _no_debugging() -> Iterator[None]:
    """Lower TORCH_DISTRIBUTED_DEBUG=DETAIL to INFO inside a block: with DETAIL a watchdog ends the process again."""
    before = _c.get_debug_level()
    if before == _c.DebugLevel.DETAIL:
        _c.set_debug_level(_c.DebugLevel.INFO)
    try:
        yield
    finally:
        _c.set_debug_level(before)


# The dump that has the collectives of each kind of backend; gloo since torch 2.8, ProcessGroupNCCL since 2.6. Others
# (nccl2, which torch 2.15 calls "nccl", and nccl-lazy) have a recorder of their own name.
_RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}


def switch_recorders_on() -> None:
    """Have the flight recorders of this process record where torch has them off by default: before 2.11.

    The variable is read with the process's first gloo group, and by NCCL's recorder with the first NCCL collective;
    one that the program has set, also to 0, stays.
    """
    if groups.VERSION < (2, 11) and not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & {*os.environ}:
        name = "TORCH_FR_BUFFER_SIZE" if groups.VERSION >= (2, 8) else "TORCH_NCCL_TRACE_BUFFER_SIZE"
        os.environ[name] = "2000"  # the default since (FlightRecorder.hpp)


def recorder_name(group: dist.ProcessGroup, backend: str) -> str:
    """Return the name of the recorder for one of the group's backends: "gloo", "nccl", "nccl2", ...

    ``backend`` is the name given to torch, which on 2.15 stands for another implementation than before.
    """
    found = _backend_object(group, backend)
    return backend if found is None else str(found.name())


def _backend_object(group: dist.ProcessGroup, backend: str) -> Any:
    """Return the object behind a backend's name in a group; None where there is none, as in a group written in Python.

    A group written in Python that has one of torch's beneath says so by its property ``beneath``.
    """
    if hasattr(group, "beneath"):
        return group.beneath
    for pair in dist.get_backend_config(group).split(","):
        device, _, name = pair.rpartition(":")
        if name != backend:
            continue
        try:
            found: Any = group._get_backend(torch.device(device or "cpu"))
        except RuntimeError:
            continue
        while isinstance(found, _c._ProcessGroupWrapper):
            found = found.wrapped_pg
        return found
    return None


def records_itself(backend: str) -> None:
    """Tell torch that groups of this backend, which registers no `Backend` object, need no flight-recorder hook.

    torch 2.15 attaches one to every group whose backend is not in this set, and raises for a group without a backend.
    """
    known = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(known, set):
        known.add(backend)


def recorded_name(group: dist.ProcessGroup) -> str:
    """Return the flight recorders' name of a group: its own, or the `recorded_as` of a group written in Python."""
    found = getattr(group, "recorded_as", None)
    return groups.group_name(group) if found is None else str(found)


def recorded_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of a group, or of those that take part in one that is written in Python."""
    found: tuple[int, ...] = getattr(group, "members", ())
    return found or groups.group_ranks(group)


def recorder_dump(recorder: str, entries: bool) -> dict[str, Any] | None:
    """Return the dump of torch's flight recorder under a name of `recorder_name`; None where it holds nothing.

    That is where it is off, where this torch has none, and before the first collective of a lazily connected backend.
    Without ``entries`` the counters of each group, in 30 µs; with them 2,000 collectives in 50 ms (torch 2.13, gloo).
    """
    try:
        if recorder in _RECORDERS:
            text = getattr(_c, _RECORDERS[recorder])(entries, False)
        else:
            text = getattr(_c, "_dump_fr_trace_json")(entries, False, recorder)  # noqa: B009 - a CPU build has none
        trace: dict[str, Any] = json.loads(text)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # by version
        return None
    return trace if trace.get("pg_config") else None


def recorded_stacks(recorder: str) -> list[dict[str, Any]]:
    """Return the collectives of such a dump, each with its "frames", innermost first; empty where it cannot be told.

    Takes 30 ms for 1,500 (torch 2.13, gloo). For it torch imports its compiler, which takes a second or two: so only
    where the program has, as DDP and FSDP do.
    """
    compiler = getattr(sys.modules.get("torch._dynamo"), "__spec__", None)
    if compiler is None or getattr(compiler, "_initializing", False):
        return []
    try:
        if recorder in _RECORDERS:
            dump = getattr(_c, _RECORDERS[recorder].removesuffix("_json"))(True, True, False)
        else:
            dump = getattr(_c, "_dump_fr_trace")(True, True, False, recorder)  # noqa: B009 - a CPU build has none
        found: list[dict[str, Any]] = pickle.loads(dump).get("entries", [])  # which torch has just written
    except (AttributeError, RuntimeError, TypeError, ValueError):  # by version
        return []
    return found


def recorded_end(entry: dict[str, Any]) -> bool:
    """Return whether a collective in such a dump has ended."""
    # gloo's entries stay "scheduled" for good, also after they ended; then they are marked as retired.
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def sequence_number(group: dist.ProcessGroup, backend: str | None = None) -> int | None:
    """Return how many collectives this process has issued on a group or backend, also in C++; None if not counted."""
    handle: Any = group if backend is None else _backend_object(group, backend) or group
    try:
        return int(handle._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return None


def backend_error(group: dist.ProcessGroup, backend: str) -> str | None:
    """Return what torch's watchdog has found on one of the group's backends: "TIMEOUT", "COMM_ERROR", "REMOTE_ERROR".

    None where it has found nothing, and where this torch cannot tell (before 2.7, gloo). ProcessGroupNCCL ends the
    process a minute later by default, nccl2 after 15 s.
    """
    found = _backend_object(group, backend)
    try:
        name = str(found.get_error().name)
    except (AttributeError, RuntimeError):
        return None
    return None if name == "SUCCESS" else name
