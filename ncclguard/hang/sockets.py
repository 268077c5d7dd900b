"""The groups of gloo, by the connections between ranks of one host: who has connected to whom, and who wrote last.

gloo connects each member of a group with each other one, and torch lets each group listen at ports of its own. A rank
writes to its group as it enters a call, so what it has written last belongs to the call that it waits in.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from ncclguard.hang.processes import PROC

#: A request for all sockets of TCP, and what the kernel answers (linux/inet_diag.h, linux/tcp.h).
_BY_FAMILY, _ROOT_AND_MATCH, _REQUEST, _DONE = 20, 0x300, 1, 3
_ESTABLISHED, _LISTEN = 1, 10
_INFO: Final = 2
_MESSAGE: Final = struct.Struct("=BBBB2s2s16s16s4x8x4x4x4x4xI")
_LAST_DATA_SENT: Final = 44
_WITHIN: Final = 2.0


_Port = tuple[int, bytes]  # of a rank


@dataclass(frozen=True, slots=True)
class Socket:
    """A socket of TCP that listens, or is connected; `written` is how many milliseconds ago it was last written to."""

    inode: int
    here: bytes
    there: bytes
    port: bytes
    listens: bool
    written: int


def tcp_sockets() -> list[Socket]:
    """Return the sockets of this network namespace, nothing where the kernel does not tell them."""
    try:
        return [one for family in (socket.AF_INET, socket.AF_INET6) for one in _dumped(family)]
    except (OSError, struct.error):
        return []


def _dumped(family: int) -> Iterator[Socket]:
    states = 1 << _ESTABLISHED | 1 << _LISTEN
    asked = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), states)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as link:  # NETLINK_SOCK_DIAG
        link.settimeout(_WITHIN)
        link.send(struct.pack("=IHHII", 16 + len(asked), _BY_FAMILY, _ROOT_AND_MATCH | _REQUEST, 1, 0) + asked)
        while True:
            data = link.recv(1 << 17)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind != _BY_FAMILY:
                    return
                yield _socket(data[16:length])
                data = data[length + 3 & ~3 :]


def _socket(message: bytes) -> Socket:
    _, state, _, _, port, other, here, there, inode = _MESSAGE.unpack_from(message)
    written, rest = 1 << 31, message[_MESSAGE.size :]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if kind == _INFO:
            (written,) = struct.unpack_from("=I", rest, 4 + _LAST_DATA_SENT)
        rest = rest[max(length + 3 & ~3, 4) :]
    return Socket(inode, here + port, there + other, port, state == _LISTEN, written)


def _inodes(pid: int) -> set[int]:
    """Return the sockets of a process."""
    found = set()
    folder = f"{PROC}/{pid}/fd"
    try:
        for name in os.listdir(folder):
            target = os.readlink(f"{folder}/{name}")
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    except OSError:
        pass
    return found


def members_of(
    pids: Mapping[int, int], groups: Mapping[int, tuple[int, int]], sockets: list[Socket]
) -> dict[int, frozenset[int]]:
    """Return the members of the group that each rank waits in, of those where only one group is possible.

    `pids` has the processes of all ranks of the job, `groups` the rank within its group and the size of that group.
    """
    owner = {inode: rank for rank, pid in pids.items() for inode in _inodes(pid)}
    own = [one for one in sockets if one.inode in owner]
    ports = {(owner[one.inode], one.port) for one in own if one.listens}
    ends = {(one.here, one.there): owner[one.inode] for one in own if not one.listens}
    met: dict[_Port, set[int]] = defaultdict(set)
    wrote: dict[int, list[tuple[int, _Port]]] = defaultdict(list)
    for one in own:
        rank, peer = owner[one.inode], ends.get((one.there, one.here))
        if not one.listens and peer is not None and peer != rank:
            port = (rank, one.port) if (rank, one.port) in ports else (peer, one.there[-2:])
            met[port] |= {rank, peer}
            wrote[rank].append((one.written, port))
    whole = _groups(met)
    found = {}
    for rank, (place, size) in groups.items():
        last = min((written for written, _ in wrote[rank]), default=0)
        fit = [some for some in whole if len(some) == size and rank in some and sorted(some).index(rank) == place]
        called = [{some for some in fit if met[port] <= some} for written, port in wrote[rank] if written == last]
        common = set(fit).intersection(*filter(None, called)) if any(called) else set()
        if len(common) == 1:
            (found[rank],) = common
    return found


def _groups(met: Mapping[_Port, set[int]]) -> set[frozenset[int]]:
    """Return the groups, by who is connected to which port.

    Of two members the one with the higher address waits for the other to connect: all but itself have connected to the
    last one, to the one before it all of these but the last, and so on.
    """
    groups = set()
    left = dict(met)
    while left:
        port, some = max(left.items(), key=lambda item: len(item[1]))
        groups.add(frozenset(some))
        theirs: AbstractSet[int] = some
        while port in left:
            del left[port]
            theirs = theirs - {port[0]}
            port = next((other for other, own in left.items() if own == theirs), port)
    return groups
