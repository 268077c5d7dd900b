"""Resets established TCP connections of other processes, the way a failing network does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Sequence
from typing import Final

from ncclguard._sockets import adopt
from ncclguard.faults.janitor import SEARCH

_OWNER: Final = re.compile(r"pid=(\d+),fd=(\d+)")
_PIDFD_GETFD: Final = 438  # the system call's number, the same on every architecture (Linux 5.6)


def tool(name: str) -> str:
    """The path of a system tool; RuntimeError that names the package to install when it is not there."""
    path = shutil.which(name, path=SEARCH)
    if path is None:
        package = {"iptables": "iptables", "unshare": "util-linux", "nsenter": "util-linux"}.get(name, "iproute2")
        raise RuntimeError(f"{name} is not installed; install the system package {package}")
    return path


def run_tool(argv: Sequence[str]) -> str:
    """Run a system tool to its end and return its stdout; RuntimeError with its own words when it fails."""
    done = subprocess.run([tool(argv[0]), *argv[1:]], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        text = (done.stderr or done.stdout).strip()
        raise RuntimeError(f"{' '.join(argv)} failed: {text}; where permissions are missing, run as root")
    return done.stdout


def reset_connections(pid: int, keep_ports: Iterable[int] = ()) -> int:
    """Reset the established TCP connections of a process, for both ends; returns how many were reset.

    Connections with a local or remote port in ``keep_ports`` (the store's, as a rule) stay. Works across network
    namespaces. Needs root, the system tool ``ss``, and Linux 5.6 or CONFIG_INET_DIAG_DESTROY; RuntimeError says what is
    missing. Of this process itself: ``reset_own_connections``, which needs none of them.
    """
    return reset_where(("nsenter", f"--net=/proc/{pid}/ns/net"), keep_ports=keep_ports, pid=pid)


def reset_where(
    prefix: Sequence[str], filter_words: Sequence[str] = (), keep_ports: Iterable[int] = (), pid: int | None = None
) -> int:
    """Reset what ``ss`` lists behind a prefix that enters a network namespace; of one process only where given."""
    keep, count = set(keep_ports), 0
    ss, established = (*prefix, tool("ss")), ("-H", "-n", "-t", "state", "established")
    for line in run_tool((*ss, "-p", *established, *filter_words)).splitlines():
        _, _, local, remote, *users = line.split()
        ports = (int(local.rpartition(":")[2]), int(remote.rpartition(":")[2]))
        owners = [(int(owner), int(fd)) for owner, fd in _OWNER.findall("".join(users))]
        if not keep & set(ports) and (pid is None or pid in {owner for owner, _ in owners}):
            if any(_reset(*owner, ports) for owner in owners):
                count += 1
            else:  # no owner left, or a kernel that does not hand out the descriptors of others
                count += len(run_tool((*ss, "-K", *established, "src", local, "dst", remote)).splitlines())
    return count


def _reset(pid: int, fd: int, ports: tuple[int, int]) -> bool:
    """Reset a connection of another process by its descriptor there, if that still is the one between these ports.

    ``ss -K`` would end it as well, but the own end then finds ECONNABORTED, which no network sends, and for which gloo
    ends the process where it meets it in its own thread.
    """
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        copy = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if copy < 0:
        return False
    connection = adopt(copy)
    if connection is None:
        return False
    with connection, contextlib.suppress(OSError):  # not connected any more
        if (connection.getsockname()[1], connection.getpeername()[1]) == ports:
            return disconnect(connection)
    return False


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
