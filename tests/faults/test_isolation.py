"""A process that is cut off: nothing gets in or out, nobody is told, and the connections live on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ncclguard.faults import injection

PROGRAM = """
import socket, sys
from ncclguard.faults.injection import cut_off
server = socket.create_server((sys.argv[1], 0), family=int(sys.argv[2]), dualstack_ipv6=False)
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
for line in sys.stdin:
    if line == "cut\\n":
        cut_off(5.0)
    else:
        peer.sendall(line.encode())
    print("done", flush=True)
"""


@contextmanager
def peer(address: str, family: int) -> Iterator[tuple[socket.socket, subprocess.Popen[str]]]:
    """A process that sends what it is told to, and the connection with it."""
    command = [sys.executable, "-c", PROGRAM, address, str(family)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with socket.create_connection((address, int(process.stdout.readline())), timeout=20) as connection:
            yield connection, process
        process.kill()


def tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_process_that_is_cut_off_is_silent_in_both_directions_and_comes_back(address: str, family: int) -> None:
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with peer(address, family) as (connection, process):
        tell(process, "before")
        assert connection.recv(100) == b"before\n"
        tell(process, "cut")
        tell(process, "while it is cut off")
        connection.settimeout(0.7)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        connection.settimeout(20)
        assert connection.recv(100) == b"while it is cut off\n"  # the connection lives on, and nothing is lost


def test_looking_for_connections_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    """It looks every 5 ms, and a descriptor may be one that Python cannot make a socket object of."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        path = os.open(tmp_path / "socket", os.O_PATH)  # a socket to fstat(), and to nothing else
        try:
            before = os.listdir("/proc/self/fd")
            known = {os.fstat(int(name)).st_ino for name in before if os.path.exists(f"/proc/self/fd/{name}")}
            assert injection._cut_all(known, b"") == []  # all are said to be cut off: none is touched
            assert len(os.listdir("/proc/self/fd")) == len(before)
        finally:
            os.close(path)
