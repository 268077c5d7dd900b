"""The client of NCCL's RAS against real sockets: whatever listens there, it ends in time, with an answer or one reason."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ncclguard.environment import ras
from ncclguard_explain.ras import NoWitness, address_of, ask
from tests.ports import free_port
from tests.unit.ras_server import Talk, answering, serving

TEXT = "NCCL version 2.27.5 compiled with CUDA 12.9\n\nErrors\n======\n\nWarnings\n========\n\n"
#: Seconds that a test gives the client, and that it may take beyond them on a busy machine.
WITHIN, SLACK = 1.5, 2.0


def refusal(address: str, within: float = WITHIN, at_most: int = ras.AT_MOST) -> str:
    """Return the reason that `ask` gives, which it does in time."""
    started = time.monotonic()
    with pytest.raises(NoWitness) as error:
        ask(address, within=within, form="json", at_most=at_most)
    assert time.monotonic() - started < within + SLACK
    reason = str(error.value)
    assert "\n" not in reason
    return reason


def test_an_answer_is_the_whole_document() -> None:
    asked: list[str] = []
    with serving(answering(TEXT, asked=asked)) as address:
        assert ask(address, within=10, form="json") == TEXT
    assert asked[0] == "CLIENT PROTOCOL 2"
    assert re.fullmatch(r"TIMEOUT [1-9]", asked[1])  # a whole number, which NCCL 2.24 reads too, and less than `within`
    assert asked[2:] == ["SET FORMAT json", "VERBOSE STATUS"]


def test_one_that_knows_no_json_answers_in_text() -> None:
    with serving(answering(TEXT, json=False)) as address:
        assert ask(address, within=10, form="json") == TEXT


def test_an_answer_in_small_pieces_is_put_together() -> None:
    def slowly(connection: socket.socket) -> None:
        connection.recv(100)
        for letter in b"SERVER PROTOCOL 2\nOK\nOK\n" + TEXT.encode():
            connection.sendall(bytes([letter]))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(100):
            pass

    with serving(slowly) as address:
        assert ask(address, within=10, form="json") == TEXT


def silent(connection: socket.socket) -> None:
    while connection.recv(1000):
        pass


def closing(connection: socket.socket) -> None:
    connection.recv(1000)


def web(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    silent(connection)


def endless_line(connection: socket.socket) -> None:
    connection.recv(1000)
    while True:
        connection.sendall(b"x" * 1000)


def half_a_line(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"SERVER PROTOCOL 2\nO")


def trickling(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.02)


def huge(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n")
    while True:
        connection.sendall(b" " * 65536)


def stopping_within(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n" + TEXT.encode()[:20])
    silent(connection)
    time.sleep(60)


@pytest.mark.parametrize(
    ("talk", "reason"),
    [
        (silent, "3 connections without an answer in 1.5 s"),
        (closing, "closed without an answer, 3 times"),
        (web, "something else than RAS listens there; its first line is 'HTTP/1.1 400 Bad Request'"),
        (endless_line, "something else than RAS listens there"),
        (half_a_line, "closed within the answer"),
        (trickling, "no whole answer within 1.5 s"),
        (stopping_within, "no whole answer within 1.5 s"),
        (huge, "longer than 1 MiB"),
    ],
)
def test_what_does_not_answer_as_ras_does_is_no_witness(talk: Talk, reason: str) -> None:
    with serving(talk) as address:
        found = refusal(address, at_most=1 << 20)
    assert reason in found and address in found


def test_a_first_line_that_does_not_come_is_asked_of_the_next_process() -> None:
    """All processes of a host share the port, and a stopped one takes connections that it never answers."""
    with serving(silent, answering(TEXT)) as address:
        assert ask(address, within=10, form="json") == TEXT


def test_a_process_that_is_about_to_end_is_no_reason_to_give_up() -> None:
    with serving(closing, closing, answering(TEXT)) as address:
        assert ask(address, within=10, form="json") == TEXT


@pytest.mark.processes
def test_a_stopped_process_takes_connections_and_answers_none() -> None:
    code = "import socket, sys\nwith socket.create_server(('127.0.0.1', 0)) as s:\n print(s.getsockname()[1], flush=True)\n s.accept()[0].recv(1)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        process.send_signal(signal.SIGSTOP)
        assert "what listens there may be stopped" in refusal(f"127.0.0.1:{port}")
        process.kill()


def test_a_port_on_which_nobody_listens() -> None:
    port = free_port()
    assert refusal(f"127.0.0.1:{port}").startswith(f"nobody listens at 127.0.0.1:{port}")


def test_a_server_whose_queue_is_full_takes_no_connection() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        time.sleep(0.1)
        assert "1.5 s" in refusal(f"127.0.0.1:{address[1]}")
        for one in waiting:
            one.close()


def test_localhost_is_asked_on_all_of_its_addresses() -> None:
    with serving(answering(TEXT)) as address:
        assert ask(f"localhost:{address.rpartition(':')[2]}", within=10, form="text") == TEXT


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", "localhost:x", "localhost:0", "localhost:65536"])
def test_an_address_without_a_port_is_refused(address: str) -> None:
    assert refusal(address) == f"{address} is no address of RAS: give HOST:PORT"


def test_a_name_that_does_not_exist() -> None:
    assert "cannot be resolved" in refusal("no-such-host.invalid:28028", within=20)


def test_the_address_is_that_of_the_environment_or_of_the_files_of_nccl(tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_RAS_ADDR=10.0.0.1:5\n")
    files = {"NCCL_CONF_FILE": str(file)}
    assert address_of({}) == "localhost:28028"
    assert address_of({"NCCL_RAS_ADDR": "[::1]:7"}) == "[::1]:7"
    assert address_of(files) == "10.0.0.1:5"
    assert address_of({**files, "NCCL_RAS_ADDR": "localhost:9"}) == "localhost:9"


@pytest.mark.parametrize("value", ["0", "2", "0x0"])
def test_it_is_not_asked_where_it_is_switched_off(value: str) -> None:
    with pytest.raises(NoWitness, match=f"NCCL_RAS_ENABLE={value}"):
        address_of({"NCCL_RAS_ENABLE": value})


@pytest.mark.parametrize("value", ["1", "yes"])
def test_a_value_that_nccl_does_not_understand_leaves_it_on(value: str) -> None:
    assert address_of({"NCCL_RAS_ENABLE": value}) == "localhost:28028"


@pytest.mark.processes
def test_the_client_needs_no_torch() -> None:
    code = "import sys, ncclguard.environment.ras; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
