"""Cuts this process off from the network without root and without a reset, the way a switch that drops everything does.

A classic BPF filter that accepts nothing (SO_ATTACH_FILTER, socket(7)) makes the kernel drop every packet for a socket before TCP
sees it; a pacing rate of one byte a second (SO_MAX_PACING_RATE) keeps what is sent from leaving, but for one packet. Neither side
is told. When both are taken away TCP sends again what was lost, so the connections live on, as after a link that came back.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

# asm-generic/socket.h; Python's socket module has no names for them.
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
_SO_MAX_PACING_RATE: Final = 47
_UNPACED: Final = 0xFFFFFFFF
_PAUSE: Final = 0.005  # seconds between two looks for connections that are new
# One instruction of struct sock_filter: BPF_RET | BPF_K, 0 bytes of the packet to keep (linux/filter.h).
_NOTHING: Final = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))


def cut_off(seconds: float) -> threading.Thread:
    """Drop what this process's TCP sockets send and receive, the store's and new ones too; heals after `seconds`.

    Returns at once, with the thread that heals; one packet of each connection may still get out. Raises RuntimeError where the kernel
    is not Linux's.
    """
    if sys.platform != "linux":
        raise RuntimeError("a partition can be injected on Linux only; choose another fault")
    cut: set[int] = set()
    _cut_all(cut)
    thread = threading.Thread(target=_keep_cut, args=(seconds, cut), name="ncclguard drill partition", daemon=True)
    thread.start()
    return thread


def _keep_cut(seconds: float, cut: set[int]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _cut_all(cut)
        time.sleep(_PAUSE)
    for inode, copy in _tcp_sockets():
        if inode in cut:
            with contextlib.suppress(OSError):
                copy.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                copy.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", _UNPACED))


def _cut_all(cut: set[int]) -> None:
    program = struct.pack("@HP", 1, ctypes.addressof(_NOTHING))  # struct sock_fprog, with its padding
    for inode, copy in _tcp_sockets():
        if inode not in cut:
            with contextlib.suppress(OSError):
                copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                copy.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", 1))
                cut.add(inode)


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Every TCP socket of this process, listening ones too, as (inode, a socket object on a duplicate of its descriptor)."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            status = os.fstat(copy)
            if not stat.S_ISSOCK(status.st_mode):
                os.close(copy)
                continue
            # With this type the socket object leaves the shared flags of the connection alone; see ncclguard/_sockets.py.
            with socket.socket(-1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, -1, copy) as found:
                internet = found.family in (socket.AF_INET, socket.AF_INET6)
                if internet and found.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM:
                    yield status.st_ino, found
