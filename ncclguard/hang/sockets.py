"""The groups of gloo, by the connections between ranks of one host: who has connected to whom, and who wrote last.

gloo connects each member of a group with each other one, and torch lets each group listen at ports of its own. A rank
writes to its group as it enters a call, so what it has written last belongs to the call that it waits in.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set as AbstractSet
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


#: The members of a group of gloo; nothing tells which ports of several groups of the same members belong together.
Group = frozenset[int]


def groups_of_calls(
    pids: Mapping[int, int], known: Mapping[int, tuple[int, int] | None], sockets: list[Socket]
) -> tuple[dict[int, Group], set[Group]]:
    """Return the group that each rank waits in, where only one group is possible, and all groups that there are.

    `pids` has the processes of all ranks of the job, `known` the rank within its group and the size of that group, None
    where these are not known.
    """
    owner = {inode: rank for rank, pid in pids.items() for inode in _inodes(pid)}
    own = [one for one in sockets if one.inode in owner]
    ports = {(owner[one.inode], one.port) for one in own if one.listens}
    ends = {(one.here, one.there): owner[one.inode] for one in own if not one.listens}
    met: dict[_Port, set[int]] = defaultdict(set)
    wrote: dict[int, list[tuple[int, _Port]]] = defaultdict(list)
    stores = set()
    for one in own:
        rank, peer = owner[one.inode], ends.get((one.there, one.here))
        if one.listens or peer is None:
            continue
        port = (rank, one.port) if (rank, one.port) in ports else (peer, one.there[-2:])
        met[port] |= {rank, peer}
        wrote[rank].append((one.written, port))
        if peer == rank:  # as the rank connects that has torch's store, and no member of a group
            stores.add(port)
    for port in stores:
        del met[port]
    groups = _groups(met)
    whole, unclear = set(groups.values()), _unclear(groups, met)
    found = {}
    for rank, told in known.items():
        last = min((written for written, port in wrote[rank] if port in met), default=0)
        ports_of = [port for written, port in wrote[rank] if written == last and port in met]
        if told is None:
            fit = {groups[port] for port in ports_of if port not in unclear and rank in groups[port]}
        else:
            like = {some for some in whole if rank in some and (sorted(some).index(rank), len(some)) == told}
            called = [{some for some in like if met[port] <= some} for port in ports_of]
            fit = like.intersection(*filter(None, called)) if any(called) else set()
        if len(fit) == 1:
            (found[rank],) = fit
    return found, whole


def _groups(met: Mapping[_Port, set[int]]) -> dict[_Port, Group]:
    """Return the group of each port, by who is connected to which.

    Of two members the one with the higher address waits for the other to connect: all but itself have connected to the
    last one, to the one before it all of these but the last, and so on.
    """
    groups: dict[_Port, Group] = {}
    left = dict(met)
    while left:
        port, some = max(left.items(), key=lambda item: len(item[1]))
        group = frozenset(some)
        theirs: AbstractSet[int] = some
        while port in left:
            groups[port] = group
            del left[port]
            theirs = theirs - {port[0]}
            port = next((other for other, own in left.items() if own == theirs), port)
    return groups


def _unclear(groups: Mapping[_Port, Group], met: Mapping[_Port, set[int]]) -> set[_Port]:
    """Return the ports that may be of another group, of other members, by who is connected to them."""
    alike: dict[tuple[int, frozenset[int]], set[_Port]] = defaultdict(set)
    for port in groups:
        alike[port[0], frozenset(met[port])].add(port)
    return {port for same in alike.values() for port in same if len({groups[one] for one in same}) > 1}
