"""Faults armed in a rank: each strikes when the rank enters its operation, or in the middle of it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist

from ncclguard import torch_compat
from ncclguard.errors import GuardConfigError
from ncclguard.faults import drill_job
from ncclguard.faults.fault import PERMISSION, VARIABLE, Alteration, Fault, parse
from ncclguard.torch_compat.sockets import Connection, connections, hold, tcp_sockets
from ncclguard.transport.memory import bytes_read
from ncclguard_explain.language import told

_CHILD_LIVES = 60.0  # seconds that a forked child keeps the sockets open, unless the launcher ends it before
_PAUSE = 0.001  # seconds between two readings of the bytes that connections have carried
# In struct tcp_info (linux/tcp.h, since 4.1), in bytes from its start: two 64-bit counters, one after the other.
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128


class InjectedFault(RuntimeError):
    """Raised by the fault ``exception``: what a rank's own code might have raised."""


def late(seconds: float) -> None:
    """Sleep with the GIL released: other threads of the process go on."""
    time.sleep(seconds)


def kill(children: int) -> None:
    """SIGKILL this process; ``children`` forked before live on with copies of all its descriptors, as workers do."""
    for _ in range(children):
        if os.fork() == 0:
            time.sleep(_CHILD_LIVES)
            os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def stop(seconds: float | None) -> None:
    """SIGSTOP this process; a helper process continues it after ``seconds``, nobody if None."""
    if seconds is None:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    program = f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", program], start_new_session=True):
        os.kill(os.getpid(), signal.SIGSTOP)


def hold_gil(seconds: float) -> None:
    """Sleep in a C call that does not release the GIL, so that no Python thread of this process runs."""
    usleep = ctypes.PyDLL(None).usleep  # PyDLL, unlike CDLL, keeps the GIL during the call
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:  # a signal ends usleep early
        usleep(ctypes.c_uint(min(int(left * 1e6) + 1, 2**31)))


def run_out_of_memory() -> None:
    """Raise the error that torch raises when a device has no memory left."""
    raise out_of_memory()


def out_of_memory() -> Exception:
    """Make the error that torch raises when a device has no memory left."""
    return torch.OutOfMemoryError("injected fault: out of memory. Tried to allocate more than there is.")


def store_ports() -> set[int]:
    """Return the port of the job's store, whose connections a network fault of the transport leaves alone."""
    ports = {int(os.environ["MASTER_PORT"])} if os.environ.get("MASTER_PORT", "").isdigit() else set()
    if dist.is_available() and dist.is_initialized():
        ports.add(getattr(torch_compat.base_store(torch_compat.default_store()), "port", 0))
    return ports


def disconnect(connection: socket.socket) -> bool:
    """Reset a connection, so that both sides find it reset; False where the kernel refuses.

    On Linux ``connect`` to AF_UNSPEC sends RST at once (tcp_disconnect in net/ipv4/tcp.c). The own side is then not
    readable yet, and gloo would not look; ``shutdown`` makes it so, though it says "not connected" (inet_shutdown in
    af_inet.c).
    """
    unspecified = ctypes.create_string_buffer(16)  # struct sockaddr with sa_family AF_UNSPEC = 0
    if ctypes.CDLL(None).connect(connection.fileno(), unspecified, 16) != 0:
        return False
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    return True


def reset_own_connections(keep_ports: Iterable[int] | None = None) -> int:
    """Reset this process's TCP connections, but those with a local or remote port in ``keep_ports``; returns how many.

    Needs no root. ``keep_ports`` is the job's store by default. Each side finds it reset, as after an RST
    segment: the first call there says so, later ones find the connection closed.
    """
    count = 0
    for copy in hold(_data_connections(keep_ports)):
        with copy:
            count += disconnect(copy)
    return count


def bytes_carried(keep_ports: Iterable[int] | None = None) -> dict[int, int]:
    """Return the bytes that each connection has received, or sent and had acknowledged; by the socket's inode."""
    carried: dict[int, int] = {}
    for connection in _data_connections(keep_ports):
        for copy in hold([connection]):
            with copy:
                information = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            counters = (information[at : at + 8] for at in (_BYTES_ACKED, _BYTES_RECEIVED))
            carried[connection.inode] = sum(int.from_bytes(counter, sys.byteorder) for counter in counters)
    return carried


def wait_for_traffic(nbytes: int) -> None:
    """Block until this process's connections together have carried ``nbytes`` more bytes than now.

    What it has read from the memory of other ranks counts as well: it would have come over a connection else.
    """
    ports = store_ports()
    before, read = bytes_carried(ports), bytes_read()
    while True:
        carried = sum(max(0, now - before.get(inode, 0)) for inode, now in bytes_carried(ports).items())
        if carried + bytes_read() - read >= nbytes:
            return
        time.sleep(_PAUSE)


def _data_connections(keep_ports: Iterable[int] | None) -> tuple[Connection, ...]:
    keep = store_ports() if keep_ports is None else set(keep_ports)
    return connections(lambda local, remote: not {local[1], remote[1]} & keep)


# Cutting off works without root and without a reset, as a switch does that drops everything: each TCP socket gets a key
# for signatures (RFC 2385, TCP_MD5SIG in tcp(7)) that its peers do not have. Each side then drops what it receives from
# the other before TCP sees it, and neither is told. When the key is taken away, TCP sends again what was lost, so the
# connections live on, as after a link that came back. The constants are those of linux/tcp.h.
_TCP_MD5SIG_EXT: Final = 32
_PREFIX: Final = 1  # TCP_MD5SIG_FLAG_PREFIX: the key is for all addresses with a prefix, here of length 0
_ANY: Final = struct.pack("=HHI120x", socket.AF_INET, 0, 0)
_ANY_MAPPED: Final = struct.pack("=HHI16sI100x", socket.AF_INET6, 0, 0, b"\0" * 10 + b"\xff" * 2 + b"\0" * 4, 0)
_ANY6: Final = struct.pack("=HHI16sI100x", socket.AF_INET6, 0, 0, b"\0" * 16, 0)
_CUT_AGAIN: Final = 0.005  # seconds between two searches for new connections


def cut_off(seconds: float) -> threading.Thread:
    """Drop what this process's TCP sockets send and receive, the store's and new ones too; heals after `seconds`.

    Returns at once, with the thread that heals. TCP finds back within about as long again as it was cut off. Raises
    RuntimeError where the kernel has no TCP_MD5SIG.
    """
    key = os.urandom(16)
    cut: set[int] = set()
    failures = _cut_all(cut, key)
    if failures and not cut:
        raise RuntimeError(f"this kernel cannot cut connections off ({failures[0]}); choose another fault")
    thread = threading.Thread(target=_keep_cut, args=(seconds, cut, key), name="ncclguard drill partition", daemon=True)
    thread.start()
    return thread


def _keep_cut(seconds: float, cut: set[int], key: bytes) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _cut_all(cut, key)
        time.sleep(_CUT_AGAIN)
    for _, found in tcp_sockets():
        if os.fstat(found.fileno()).st_ino in cut:
            _set_key(found, b"")


def _cut_all(cut: set[int], key: bytes) -> list[OSError]:
    """Cut off the sockets that are not cut yet; return the kernel's error where it refuses."""
    failures = []
    for _, found in tcp_sockets():
        inode = os.fstat(found.fileno()).st_ino
        if inode not in cut:
            try:
                _set_key(found, key)
                cut.add(inode)
            except OSError as error:
                failures.append(error)
    return failures


def _set_key(found: socket.socket, key: bytes) -> None:
    """Set the key for all peers, or remove it if it is empty."""
    addresses = (_ANY,) if found.family == socket.AF_INET else (_ANY6, _ANY_MAPPED)
    for number, address in enumerate(addresses):
        # struct tcp_md5sig: address, flags, prefix length, key length, interface, key.
        value = address + struct.pack("=BBHi80s", _PREFIX, 0, len(key), 0, key)
        with contextlib.suppress(OSError) if number or not key else contextlib.nullcontext():
            found.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, value)


log = logging.getLogger("ncclguard")

_lock = threading.Lock()
_armed: tuple[Fault, ...] | None = None  # None, and not an empty tuple, so that a check costs one comparison
_engines_armed = False  # those of the environment


def at(*, rank: int, op: int, fault: str, **how: Any) -> Fault:
    """Arm a fault: at rank 2's operation 3, be late by 5 seconds. It strikes once; call this on any rank, or on all.

    Operations are counted from 0, in each group for itself; the first that fits is struck. Faults and what they take:

    - ``late`` (seconds): sleeps before it enters the operation
    - ``kill`` (children, after, after_bytes): SIGKILL; ``children`` forked before keep its sockets open
    - ``stop`` (seconds, after, after_bytes): SIGSTOP, and SIGCONT after ``seconds``
    - ``gil`` (seconds, after, after_bytes): a C call that holds the GIL
    - ``exception``: raises InjectedFault; ``oom``: raises torch.OutOfMemoryError
    - ``exit`` (code): ends the program normally, early
    - ``mismatch`` (of="shape" or "dtype"), ``skip``, ``extra``: another call than the peers', none, or one more
    - ``reset`` (times, after, after_bytes): resets the process's connections, but those to the store
    - ``partition`` (seconds, after, after_bytes): drops all that its connections send and receive, the store's too, in
      silence
    - ``slow`` (factor, seconds): from then on sleeps after each collective of the default process group, so that it
      takes ``factor`` times as long from one to the next as before; to the end, or for ``seconds``

    ``raw=True``: ``op`` counts the collectives of the default process group instead, whoever issues them (DDP, FSDP,
    DeepSpeed). The fault then strikes from outside, so not in the call: all but ``mismatch``, ``skip`` and ``extra``
    can. ``watched_op``: strike like that at this collective where the program calls ``watch()`` and nothing guarded.
    ``engine="engine 2"``: strikes worker ``rank`` of that engine of a weight channel, in the middle of its update
    ``op``; ``late``, ``kill``, ``stop``, ``gil``, ``exception``, ``exit``, ``oom`` and ``mismatch`` can.

    Raises GuardConfigError for a fault or a combination that cannot be.

    >>> from ncclguard import faults
    >>> str(faults.at(rank=2, op=3, fault="late", seconds=5))
    'late@rank=2,op=3,seconds=5'
    >>> faults.disarm()
    """
    try:
        made = Fault(fault=fault, rank=rank, op=op, **how)
    except TypeError as error:  # an unknown keyword
        raise GuardConfigError(f"{error}; see help(ncclguard.faults.at)") from None
    _arm((made,))
    return made


def from_environment(environ: Mapping[str, str] = os.environ) -> tuple[Fault, ...]:
    """Arm the faults that NCCLGUARD_FAULT names, so that an unmodified program can be drilled; returns them.

    Refused with GuardConfigError unless NCCLGUARD_ALLOW_DRILL is 1: a variable left in a shell must not break a run.

    >>> from ncclguard import faults
    >>> faults.from_environment({})
    ()
    """
    found = _allowed(environ)
    of_ranks = tuple(fault for fault in found if not fault.engine)
    if of_ranks:
        _arm(of_ranks)
        drill_job.start()
    return found


def for_engines(environ: Mapping[str, str] = os.environ) -> None:
    """Arm the faults of engines that NCCLGUARD_FAULT names, once; called by each end of a channel that receives.

    In one drill each strikes once, also where the engine is started again. Refused as by `from_environment`.
    """
    global _engines_armed
    found = _allowed(environ)
    with _lock:
        armed_before, _engines_armed = _engines_armed, True
    if not armed_before:
        _arm(tuple(fault for fault in found if fault.engine and not drill_job.has_struck(fault)))


def _allowed(environ: Mapping[str, str]) -> tuple[Fault, ...]:
    text = environ.get(VARIABLE)
    if text is None:
        return ()
    if environ.get(PERMISSION) != "1":
        raise GuardConfigError(
            f"{VARIABLE} is set to {text!r}, which would break this job, and {PERMISSION} is not 1; "
            f"set {PERMISSION}=1 for a drill, or unset {VARIABLE}"
        )
    return parse(text)


def disarm() -> None:
    """Forget every fault that has not struck yet."""
    global _armed
    with _lock:
        _armed = None


def armed() -> tuple[Fault, ...]:
    """Return the faults that have not struck yet."""
    return _armed or ()


def before_operation(rank: int, sequence: int) -> Alteration | None:
    """Let the faults strike that are armed for this rank and operation; called on entering each guarded operation.

    Costs one comparison when none is armed. Returns what the caller must do to its call itself.
    """
    if _armed is None:
        return None
    return _strike_all("", rank, sequence)


def before_bucket(engine: str, worker: int, update: int) -> Alteration | None:
    """Let the faults strike that are armed for this worker of an engine; called in the middle of each of its updates.

    As `before_operation` in all else.
    """
    if _armed is None:
        return None
    return _strike_all(engine, worker, update)


def _arm(faults: tuple[Fault, ...]) -> None:
    global _armed
    with _lock:
        _armed = (*(_armed or ()), *(fault for fault in faults if not fault.raw)) or None
    for fault in faults:
        if fault.raw or fault.watched_op is not None:
            # No daemon thread: it would be inside torch's C++ when the interpreter ends.
            threading.Thread(target=_follow, args=(fault,), name=f"ncclguard drill {fault}").start()


def _strike_all(engine: str, rank: int, sequence: int) -> Alteration | None:
    global _armed
    with _lock:
        struck = [fault for fault in _armed or () if (fault.engine, fault.rank, fault.op) == (engine, rank, sequence)]
        _armed = tuple(fault for fault in _armed or () if fault not in struck) or None
    alteration = None
    for fault in struck:
        _say(fault)
        alteration = _strike(fault) or alteration
    return alteration


def _strike(fault: Fault) -> Alteration | None:
    if fault.after or fault.after_bytes:
        threading.Thread(target=_strike_later, args=(fault,), name=f"ncclguard drill {fault}", daemon=True).start()
    elif fault.fault == "late":
        late(fault.seconds or 0.0)
    elif fault.fault == "exception":
        raise InjectedFault(f"injected fault: {fault}")
    elif fault.fault == "exit":
        sys.exit(fault.code)
    elif fault.fault == "oom":
        run_out_of_memory()
    elif fault.fault == "slow":  # no daemon, as in `_arm`
        threading.Thread(target=_slow_down, args=(fault,), name=f"ncclguard drill {fault}").start()
    elif fault.fault == "mismatch":
        return Alteration.OTHER_SHAPE if fault.of == "shape" else Alteration.OTHER_DTYPE
    elif fault.fault in ("skip", "extra"):
        return Alteration(fault.fault)
    else:
        _strike_process(fault)
    return None


def _strike_later(fault: Fault) -> None:
    """Wait in a thread of its own for a moment in mid-operation, then strike."""
    time.sleep(fault.after)
    for _ in range(fault.times):
        if fault.after_bytes:
            wait_for_traffic(fault.after_bytes)
        _strike_process(fault)


def _strike_process(fault: Fault) -> None:
    if fault.fault == "kill":
        kill(fault.children)
    elif fault.fault == "stop":
        stop(fault.seconds)
    elif fault.fault == "gil":
        hold_gil(fault.seconds or 0.0)
    elif fault.fault == "partition":
        cut_off(fault.seconds or 0.0)
    else:
        log.warning("%s", told("injected fault: {count} connections reset", "log", count=reset_own_connections()))


# A raw fault strikes a rank by the number of collectives that torch has counted in the default group, whoever issues
# them. It is for jobs under `watch`: such a collective does not pass through ncclguard, so a thread reads the sequence
# number of the group and strikes from outside. Where only the main thread can act, it is made to between two of its
# bytecodes.

_CALLBACK: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_callbacks: list[object] = []  # kept alive, because C code holds them
#: Collectives whose distance in time tells a slow rank how long it takes from one to the next without the fault.
_MEASURED: Final = 20


def _in_main_thread(action: Callable[[], object]) -> None:
    """Make the main thread call this; it does not while it is in a C call."""

    def call(_: object) -> int:
        action()
        return 0

    callback = _CALLBACK(call)
    _callbacks.append(callback)
    ctypes.pythonapi.Py_AddPendingCall(callback, None)


def _slow_down(fault: Fault) -> None:
    """Make the main thread sleep after each collective; strikes once it is known how far apart they are."""
    first, began = drill_job.issued(), time.monotonic()
    if not drill_job.wait_for_collectives(first + _MEASURED):
        return
    done = drill_job.issued()
    pause = (fault.factor - 1.0) * (time.monotonic() - began) / (done - first)
    if fault.raw:
        _say(fault)
    end = time.monotonic() + (math.inf if fault.seconds is None else fault.seconds)

    def call(_: object) -> int:
        time.sleep(pause)
        return 0

    sleep = _CALLBACK(call)
    _callbacks.append(sleep)
    while time.monotonic() < end and drill_job.wait_for_collectives(done + 1):
        for _ in range(drill_job.issued() - done):
            ctypes.pythonapi.Py_AddPendingCall(sleep, None)
            done += 1


def _raise_in_main_thread(error: BaseException) -> None:
    """Raise an error in the main thread, as a class without arguments: asynchronous exceptions are classes."""
    kind = type(error)
    members = {
        "__init__": lambda self: kind.__init__(self, *error.args),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    made = type(kind.__name__, (kind,), members)
    ident = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), ctypes.py_object(made))


def _follow(fault: Fault) -> None:
    """Strike in the struck rank once its default group has issued so many collectives; at once if it has."""
    global _armed
    number = fault.op if fault.watched_op is None else fault.watched_op
    if not drill_job.wait_for_collectives(number, only_watched=not fault.raw) or dist.get_rank() != fault.rank:
        return
    with _lock:
        _armed = tuple(one for one in _armed or () if one is not fault) or None
    fault = replace(fault, op=number, raw=True, watched_op=None)
    if fault.fault == "late":
        _in_main_thread(lambda: _be_late(fault))
        return
    if fault.fault == "slow":
        _slow_down(fault)
        return
    _say(fault)
    if fault.fault == "exception":
        _raise_in_main_thread(InjectedFault(f"injected fault: {fault}"))
    elif fault.fault == "oom":
        _raise_in_main_thread(out_of_memory())
    elif fault.fault == "exit":
        _raise_in_main_thread(SystemExit(fault.code))
    else:
        _strike(fault)


def _be_late(fault: Fault) -> None:
    _say(fault)
    late(fault.seconds or 0.0)


def _say(fault: Fault) -> None:
    if fault.engine:
        text = told(
            "injected fault on {engine}, worker {worker}: {name}", engine=fault.engine, worker=fault.rank, name=fault
        )
        log.warning("%s", text)
        drill_job.channel_event("struck", engine=fault.engine, worker=fault.rank, fault=str(fault))
        return
    log.warning("%s", told("injected fault on rank {rank}: {name}", rank=fault.rank, name=fault))
    drill_job.event("struck", rank=fault.rank, fault=str(fault), raw=fault.raw)
