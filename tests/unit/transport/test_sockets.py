"""Connections are found, told apart by inode, and shut down without side effects."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ncclguard.deadlines import stopping
from ncclguard.torch_compat import sockets

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, which is Linux's")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listening socket and both ends of a connection to it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
    ):
        server, _ = listening.accept()
        with server:
            yield listening, client, server


def test_only_connected_tcp_sockets_are_found(pair: tuple[socket.socket, socket.socket, socket.socket]) -> None:
    listening, client, server = pair
    port = listening.getsockname()[1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        datagram.connect(("127.0.0.1", port))
        found = sockets.connections(lambda local, remote: port in (local[1], remote[1]))
    assert {one.fd for one in found} == {client.fileno(), server.fileno()}
    assert {one.local for one in found} == {client.getsockname(), server.getsockname()}


def test_a_default_timeout_does_not_make_the_programs_sockets_non_blocking(
    pair: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    _, client, _ = pair
    socket.setdefaulttimeout(5.0)
    try:
        found = sockets.connections(lambda *_: True)
        for held in sockets.hold(found):
            held.close()
    finally:
        socket.setdefaulttimeout(None)
    assert not fcntl.fcntl(client, fcntl.F_GETFL) & os.O_NONBLOCK


def test_shut_reaches_the_peer_although_another_copy_is_open_and_data_sent_before_arrives(
    pair: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    _, client, server = pair
    copy = client.dup()  # what a forked child has
    client.sendall(b"last words")
    own = [one for one in sockets.connections(lambda *_: True) if one.fd == client.fileno()]
    assert sockets.shut(own) == 1
    assert server.recv(100) == b"last words"
    assert server.recv(100) == b""
    copy.close()


def test_a_descriptor_that_was_given_to_another_socket_is_left_alone(
    pair: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    listening, client, _ = pair
    old = [one for one in sockets.connections(lambda *_: True) if one.fd == client.fileno()]
    with socket.create_connection(listening.getsockname()) as newer:
        os.dup2(newer.fileno(), client.fileno())
        peer, _ = listening.accept()
        with peer:
            assert sockets.shut(old) == 0
            newer.sendall(b"alive")
            assert peer.recv(10) == b"alive"


@pytest.mark.parametrize("published", [b"", b"\x00" * 8, b"\xff" * 40, b"\x01" + b"\x00" * 200])
def test_an_address_that_cannot_be_read_is_none(published: bytes) -> None:
    assert sockets.gloo_address(published) is None


def test_a_running_thread_is_not_asleep_and_a_sleeping_one_is() -> None:
    stop, ids = threading.Event(), {}

    def run(name: str) -> None:
        ids[name] = threading.get_native_id()
        while name == "busy" and not stop.is_set():
            sum(range(1000))
        stop.wait()

    threads = [threading.Thread(target=run, args=(name,)) for name in ("busy", "asleep")]
    for thread in threads:
        thread.start()
    while len(ids) < 2:
        time.sleep(0.001)
    try:
        assert not stopping.asleep(frozenset({ids["busy"], ids["asleep"]}))
        end = time.monotonic() + 20
        while not stopping.asleep(frozenset({ids["asleep"]})):
            assert time.monotonic() < end
        assert not stopping.asleep(frozenset())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    end = time.monotonic() + 20
    while not stopping.asleep(frozenset({ids["asleep"]})):  # has ended: sleeps for good, soon after join() returns,
        assert time.monotonic() < end  # which waits for the last Python of the thread, not for the kernel's


def test_threads_that_wake_up_every_ten_milliseconds_are_not_asleep_for_a_tenth_of_a_second() -> None:
    """What tells gloo's threads, which never sleep longer, from those that wait for each other for ever."""
    over = threading.Event()
    ticking = threading.Thread(target=lambda: [None for _ in iter(lambda: over.wait(0.01), True)])
    stuck = threading.Thread(target=over.wait)
    for thread in (ticking, stuck):
        thread.start()
    try:
        ids = [frozenset({thread.native_id or 0}) for thread in (ticking, stuck)]
        while not stopping.asleep(ids[1], 0.1):  # it may still be starting
            pass
        assert not stopping.asleep(ids[0] | ids[1], 0.1)
    finally:
        over.set()
        for thread in (ticking, stuck):
            thread.join()
