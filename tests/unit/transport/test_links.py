"""Connections between ranks: who is let in, what strangers cost, and what two processes of one host find out of each other."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from torch.distributed import HashStore

from ncclguard.environment import network
from ncclguard.transport import links as module
from ncclguard.transport.base import TransportError
from ncclguard.transport.links import Address, Links, advance, connect, distances, neighbours
from ncclguard.transport.streams import StreamBuilder

from .stream_ranks import links, on_all


class Visited(HashStore):
    """Strangers come to whoever's address is asked for, before the one who asks does."""

    def __init__(self, words: list[bytes], stay: bool) -> None:
        super().__init__()
        self.words = words
        self.stay = stay
        self.open: list[socket.socket] = []

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = super().multi_get(keys)
        for address in map(Address.from_json, found):
            for words in self.words:
                stranger = socket.create_connection((address.host, address.port), timeout=5)
                stranger.sendall(words)
                if self.stay:
                    self.open.append(stranger)
                else:
                    stranger.close()
        return found


class Asked(HashStore):
    """Counts the calls that wait where a key is not there."""

    blocking = 0

    def get(self, key: str) -> bytes:
        self.blocking += 1
        return super().get(key)

    def wait(self, *arguments: object) -> None:
        self.blocking += 1
        super().wait(*arguments)  # type: ignore[call-overload]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.blocking += not self.check(keys)
        return super().multi_get(keys)


@pytest.mark.parametrize("stay", [True, False])
@pytest.mark.parametrize(
    "words",
    [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(16), os.urandom(4096), b"\0" * 16],
    ids=["silent", "http", "wrong key", "noise", "zeros"],
)
def test_strangers_cost_a_socket_and_no_time(words: bytes, stay: bool) -> None:
    keys = Visited([words] * 5, stay)
    start = time.monotonic()
    with links(3, keys) as made:
        assert all(sorted(one.peers) == neighbours(3, index) for index, one in enumerate(made))
        assert time.monotonic() - start < 5.0  # none of them was waited for
    for stranger in keys.open:
        stranger.close()


def test_more_silent_strangers_than_are_kept_do_not_shut_a_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STRANGERS", 4)
    keys = Visited([b""] * 40, stay=True)
    with links(2, keys) as made:
        assert 0 in made[1].peers and 1 in made[0].peers
    for stranger in keys.open:
        stranger.close()


def test_the_right_key_from_a_place_that_has_no_reason_to_connect_is_refused() -> None:
    """A rank that is already connected, itself, one above, and one that does not exist."""
    with links(3) as made:
        listening = made[2]
        for place in (0, 2, 7):
            with socket.create_connection((listening.own.host, listening.own.port), timeout=5) as stranger:
                stranger.sendall(listening.own.key + module._CARD.pack(place, os.getpid(), 0, b""))
                end = time.monotonic() + 5
                meeting = listening.meet([])
                while listening._accept() or listening._greetings:
                    for greeting in tuple(listening._greetings):
                        listening._hear(greeting)
                    assert time.monotonic() < end
                stranger.settimeout(5)
                assert stranger.recv(1) == b""
                meeting.close()
        assert sorted(listening.peers) == [0, 1]


def test_a_peer_that_does_not_come_is_an_error_in_time_that_names_its_place() -> None:
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"the ranks at \[0\] of the group did not come"):
        connect(HashStore(), "127.0.0.1", 2, 1, time.monotonic() + 0.5, True)
    keys = HashStore()
    keys.set("streams/1", Address("127.0.0.1", 1, b"k" * 16).to_json())
    with pytest.raises(TransportError, match="connecting with the rank at 1 of the group: .*refused"):
        connect(keys, "127.0.0.1", 2, 0, time.monotonic() + 0.5, True)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("waits", ["for an address", "for a connection"])
def test_connecting_ends_as_soon_as_nobody_wants_it(waits: str) -> None:
    keys, began = HashStore(), time.monotonic()
    other = Links("127.0.0.1", 2, 1, True)
    try:
        if waits == "for a connection":  # to rank 1, which is known and does not answer
            keys.set("prefix/streams/1", other.own.to_json())
        with pytest.raises(TransportError, match="not wanted any more"):
            StreamBuilder().build(keys, "prefix", (0, 1), 0, 0, 30.0, lambda: time.monotonic() < began + 0.3)
    finally:
        other.close()
    assert time.monotonic() - began < 5
    assert not [thread for thread in threading.enumerate() if "connecting rank 0" in thread.name]


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"host": "h", "port": "x", "key": "zz"}), "null"])
def test_what_is_no_address_in_the_store_is_an_error(text: str) -> None:
    keys = HashStore()
    keys.set("streams/1", text)
    with pytest.raises(TransportError):
        connect(keys, "127.0.0.1", 2, 0, time.monotonic() + 0.5, True)


def test_nothing_is_left_open_after_a_connection_that_failed() -> None:
    before = psutil.Process().num_fds()
    for _ in range(5):
        with pytest.raises(TransportError):
            connect(HashStore(), "127.0.0.1", 2, 1, time.monotonic() + 0.05, True)
    assert psutil.Process().num_fds() <= before


def test_listening_is_on_one_address_only() -> None:
    with links(2, host="127.0.0.1") as made:
        assert made[1]._listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError):  # another address of the same host
            socket.create_connection(("127.0.0.2", made[1].own.port), timeout=5).close()


def test_ipv6() -> None:
    if not network._can_listen(socket.AF_INET6, ("::1", 0)):
        pytest.skip("this host has no IPv6")
    with links(3, host="::1") as made:
        assert all(one.socket.family == socket.AF_INET6 for links_ in made for one in links_.peers.values())
        assert Address.unpack(made[0].own.pack()) == made[0].own


def test_processes_that_may_read_each_other_find_it_out_and_others_do_not() -> None:
    with links(2) as made:
        assert [(link.reads, link.is_read) for one in made for link in one.peers.values()] == [(True, True)] * 2
    with links(2, direct=False) as made:
        assert [(link.reads, link.is_read) for one in made for link in one.peers.values()] == [(False, False)] * 2


@pytest.mark.parametrize("error", [PermissionError("not permitted"), ProcessLookupError("no such process")])
def test_where_the_kernel_refuses_one_direction_only_that_one_uses_the_socket(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refused(self: Links, pid: int, where: int, number: bytes) -> bool:
        return self.index != 0 and original(self, pid, where, number)

    original = Links._can_read
    monkeypatch.setattr(Links, "_can_read", refused)
    with links(2) as (low, high):
        assert (low[1].reads, low[1].is_read) == (False, True)
        assert (high[0].reads, high[0].is_read) == (True, False)


def test_a_process_with_the_same_number_elsewhere_is_not_taken_for_the_peer() -> None:
    """Another number lies where the peer's should: this is another process, such as one of another container."""
    with links(2) as (low, _):
        card = bytes(low._number)
        where = module.ctypes.addressof(low._number)
        assert low._can_read(os.getpid(), where, card)
        assert not low._can_read(os.getpid(), where, bytes(16))
        assert not low._can_read(os.getpid(), 8, card)  # nothing is mapped there
        assert not low._can_read(2**22 + 1, where, card)  # no process has this number


@pytest.mark.parametrize(
    ("size", "cores", "local", "star"),
    [(4, 2, "4", True), (4, 4, "4", False), (2, 2, "4", False), (4, 2, "2", False), (4, 2, "", False)],
    ids=["more ranks than cores", "as many", "two ranks", "two hosts", "not told"],
)
def test_ranks_of_one_host_go_through_the_first_where_they_are_more_than_its_cores(
    size: int, cores: int, local: str, star: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    if not local:
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with links(size, star=None) as made:
        assert [one.star for one in made] == [star] * size
        assert all(sorted(one.peers) == neighbours(size, one.index, star) for one in made)


@pytest.mark.parametrize("size", [3, 4, 5, 64])
def test_in_a_star_all_but_the_first_have_three_connections(size: int) -> None:
    for index in range(1, size):
        peers = neighbours(size, index, star=True)
        assert 0 in peers and len(peers) <= 3
        assert all(index in neighbours(size, peer, star=True) for peer in peers)


def test_an_address_that_comes_late_is_waited_for_without_holding_the_connection_to_the_store() -> None:
    """Others use that connection too: what is asked of it is answered at once, and no `get` waits in it."""
    keys = Asked()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connect, keys, "127.0.0.1", 3, 1, time.monotonic() + 0.4, True, False)
        with pytest.raises(TransportError, match=r"the ranks at \[0, 2\] of the group did not come"):
            waiting.result(20)
    assert keys.blocking == 0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13, 64, 1000])
def test_a_rank_has_no_more_connections_than_two_for_each_hop(size: int) -> None:
    for index in (0, size // 2, size - 1):
        peers = neighbours(size, index)
        assert len(peers) <= 2 * len(distances(size))
        assert index not in peers
        assert all(index in neighbours(size, peer) for peer in peers)


def test_further_connections_are_made_when_all_are_in_the_same_operation() -> None:
    with links(6) as made:
        assert 3 not in made[0].peers
        for one in made:
            one.addresses.update({peer: other.own for peer, other in enumerate(made)})
        on_all(made, lambda _, one: advance(one.meet(range(6)), time.monotonic() + 20))
        assert all(sorted(one.peers) == [peer for peer in range(6) if peer != one.index] for one in made)
