"""Cuts this process off from the network without root and without a reset, the way a switch that drops everything does.

Every TCP socket gets a key for signatures (RFC 2385, TCP_MD5SIG in tcp(7)) that its peers do not have. From then on
each side drops what it receives from the other before TCP sees it, and neither is told. When the key is taken away TCP
sends again what was lost, so the connections live on, as after a link that came back.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from typing import Final

from ncclguard import _sockets

# linux/tcp.h; Python's socket module has no names for them.
_TCP_MD5SIG_EXT: Final = 32
_PREFIX: Final = 1  # TCP_MD5SIG_FLAG_PREFIX: the key is for all addresses that begin alike, here for all
_ANY: Final = struct.pack("=HHI120x", socket.AF_INET, 0, 0)
_ANY_MAPPED: Final = struct.pack("=HHI16sI100x", socket.AF_INET6, 0, 0, b"\0" * 10 + b"\xff" * 2 + b"\0" * 4, 0)
_ANY6: Final = struct.pack("=HHI16sI100x", socket.AF_INET6, 0, 0, b"\0" * 16, 0)
_PAUSE: Final = 0.005  # seconds between two looks for connections that are new


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
        time.sleep(_PAUSE)
    for _, found in _sockets.tcp_sockets():
        if os.fstat(found.fileno()).st_ino in cut:
            _set_key(found, b"")


def _cut_all(cut: set[int], key: bytes) -> list[OSError]:
    """Cut the sockets off that are not yet; returns what the kernel said where it could not."""
    failures = []
    for _, found in _sockets.tcp_sockets():
        inode = os.fstat(found.fileno()).st_ino
        if inode not in cut:
            try:
                _set_key(found, key)
                cut.add(inode)
            except OSError as error:
                failures.append(error)
    return failures


def _set_key(found: socket.socket, key: bytes) -> None:
    """Set the key for all peers, or take it away where it is empty."""
    addresses = (_ANY,) if found.family == socket.AF_INET else (_ANY6, _ANY_MAPPED)
    for number, address in enumerate(addresses):
        # struct tcp_md5sig: address, flags, prefix length, key length, interface, key.
        value = address + struct.pack("=BBHi80s", _PREFIX, 0, len(key), 0, key)
        with contextlib.suppress(OSError) if number or not key else contextlib.nullcontext():
            found.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, value)
