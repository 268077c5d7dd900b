"""A server that speaks the protocol of NCCL's RAS (src/ras/client_support.cc), or whatever a test has it say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Talk = Callable[[socket.socket], None]


@contextmanager
def serving(*talks: Talk, host: str = "127.0.0.1") -> Iterator[str]:
    """Yield the address of a server that gives each talk, in turn, one connection, and has the last go on."""
    ended = threading.Event()

    def serve() -> None:
        number = 0
        while True:
            connection, _ = server.accept()
            if ended.is_set():
                connection.close()
                return
            talk = talks[min(number, len(talks) - 1)]
            number += 1
            threading.Thread(target=one, args=(connection, talk), daemon=True).start()

    def one(connection: socket.socket, talk: Talk) -> None:
        with connection:
            try:
                talk(connection)
            except OSError:  # the client has gone
                return

    with socket.create_server((host, 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        try:
            yield f"{host}:{port}"
        finally:
            ended.set()
            socket.create_connection((host, port)).close()
            thread.join()


def answering(text: str, json: bool = True, asked: list[str] | None = None) -> Talk:
    """Answer as RAS does; without `json` as before NCCL 2.28.7. The commands go to `asked`."""

    def talk(connection: socket.socket) -> None:
        with connection.makefile("rw") as lines:
            for line in lines:
                command = line.strip()
                if asked is not None:
                    asked.append(command)
                if command.lower().endswith("status"):
                    lines.write(text)
                    return
                known = json or not command.startswith("SET FORMAT")
                version = "SERVER PROTOCOL 2\n" if command.startswith("CLIENT PROTOCOL") else "OK\n"
                lines.write(version if known else f"ERROR: Unknown command {command}\n")
                lines.flush()

    return talk
