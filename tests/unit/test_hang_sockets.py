"""The members of a group of gloo, by the connections between ranks: only where one group alone is possible."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ncclguard.hang import sockets
from ncclguard.hang.sockets import Socket, groups_of_calls, tcp_sockets

PIDS = {rank: 1000 + rank for rank in range(4)}
LONG_AGO = 60_000


class Host:
    """The sockets of ranks that have made groups; in each the later one of two in `order` waits for the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sockets: list[Socket] = []
        self.owners: dict[int, set[int]] = {pid: set() for pid in PIDS.values()}
        self._port = 0
        monkeypatch.setattr(sockets, "_inodes", lambda pid: self.owners[pid])

    def _add(self, rank: int, port: int, other: int, listens: bool, written: int) -> None:
        inode = len(self.sockets)
        self.owners[PIDS[rank]].add(inode)
        here, there = port.to_bytes(2, "big"), other.to_bytes(2, "big")
        self.sockets.append(Socket(inode, here, there, here, listens, written))

    def store(self) -> None:
        """Let rank 0 have the store of the job, to which all connect and which they have asked last."""
        self._port += 1
        listening = self._port
        self._add(0, listening, 0, True, LONG_AGO)
        for rank in PIDS:
            self._port += 1
            self._add(0, listening, self._port, False, 1)
            self._add(rank, self._port, listening, False, 1)

    def group(self, order: Sequence[int], written: int = LONG_AGO) -> None:
        listening = {rank: self._port + n for n, rank in enumerate(order, 1)}
        self._port += len(order)
        for at, rank in enumerate(order):
            self._add(rank, listening[rank], 0, True, LONG_AGO)
            for other in order[:at]:
                self._port += 1
                self._add(rank, listening[rank], self._port, False, written)
                self._add(other, self._port, listening[rank], False, written)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(monkeypatch)
    made.store()
    made.group([2, 0, 3, 1])
    return made


def members_of(known: dict[int, tuple[int, int] | None], sockets: list[Socket]) -> dict[int, frozenset[int]]:
    return groups_of_calls(PIDS, known, sockets)[0]


def test_the_group_that_a_rank_has_written_to_last_is_the_one_it_waits_in(host: Host) -> None:
    host.group([1, 0], written=5)
    host.group([0, 2])
    assert members_of({0: (0, 2)}, host.sockets) == {0: {0, 1}}


def test_a_group_of_which_it_has_another_rank_or_another_size_is_not_it(host: Host) -> None:
    host.group([1, 0], written=5)
    for told in ((1, 2), (0, 3)):
        assert members_of({0: told}, host.sockets) == {}


def test_of_two_groups_that_it_has_written_to_at_one_time_neither_is_told(host: Host) -> None:
    host.group([1, 0], written=5)
    host.group([0, 2], written=5)
    assert members_of({0: (0, 2)}, host.sockets) == {}


def test_groups_of_the_same_ranks_are_not_told_apart(host: Host) -> None:
    """Ranks 0, 1 and 3 have written to the second group last, rank 2 to the third; nothing says which ports are whose."""
    host.group([2, 0, 3, 1], written=50)
    host.group([2, 0, 3, 1])
    for one in host.sockets[-12:]:
        if one.inode in host.owners[PIDS[2]] and not one.listens:
            host.sockets[one.inode] = replace(one, written=5)
    found, _ = groups_of_calls(PIDS, dict.fromkeys(range(4)), host.sockets)
    assert found == dict.fromkeys(range(4), frozenset(range(4)))


def test_a_port_that_may_be_of_two_groups_tells_neither(host: Host) -> None:
    """Ranks 0, 2 and 3 are connected to rank 3 in the group of all, and in a group of their own."""
    host.group([2, 0, 3], written=5)
    assert members_of({0: None}, host.sockets) == {}
    host.group([1, 0], written=2)
    assert members_of({0: None}, host.sockets) == {0: {0, 1}}


def test_without_connections_nothing_is_told(host: Host) -> None:
    assert members_of({0: (0, 2)}, []) == {}


def test_the_kernel_tells_who_is_connected_and_when_it_has_written() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(b"x")
        port = server.getsockname()[1].to_bytes(2, "big")
        found = tcp_sockets()
        assert any(one.listens and one.port == port for one in found)
        (wrote,) = [one for one in found if one.there.endswith(port) and not one.listens]
        assert wrote.written < LONG_AGO
