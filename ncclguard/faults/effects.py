"""What each fault does to the process it strikes."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable

from ncclguard._sockets import Connection, connections, hold
from ncclguard.faults.connections import disconnect

_CHILD_LIVES = 60.0  # seconds that a forked child keeps the sockets open, unless the launcher ends it before
_PAUSE = 0.001  # seconds between two looks at the bytes that connections have carried
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
    """Raise what torch raises when a device has no memory left."""
    raise out_of_memory()


def out_of_memory() -> Exception:
    """What torch raises when a device has no memory left."""
    import torch  # only here: rehearsing without torch stays possible

    return torch.OutOfMemoryError("injected fault: out of memory. Tried to allocate more than there is.")


def store_ports() -> set[int]:
    """The port of the job's store, whose connections a network fault of the transport leaves alone."""
    ports = {int(os.environ["MASTER_PORT"])} if os.environ.get("MASTER_PORT", "").isdigit() else set()
    if "torch" in sys.modules:
        import torch.distributed as dist

        from ncclguard import _torch_stores

        if dist.is_available() and dist.is_initialized():
            ports.add(getattr(_torch_stores.base_store(_torch_stores.default_store()), "port", 0))
    return ports


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
    """Bytes that each of this process's connections has received, or sent and had
    acknowledged; by the socket's inode.
    """
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
    from ncclguard.transport.memory import bytes_read  # needs torch

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
