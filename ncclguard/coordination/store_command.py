"""`ncclguard store`: the store where the processes of groups outside a job meet, in a process that is nobody's."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from ncclguard_explain.command_line import Parser, described
from ncclguard_explain.language import told

EXIT_CODES: Final = {
    0: "ended by Ctrl-C or SIGTERM",
    1: "could not listen at the address",
    2: "wrong arguments",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = Parser(
        prog="ncclguard store",
        description="Have the store where the processes of `ncclguard.join` meet, until Ctrl-C or SIGTERM. It is torch's "
        "TCPStore, which asks nobody who they are: listen on a network of the job's own.",
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", required=True, help="the address and port of this host to listen at"
    )
    examples = {
        "ncclguard store --listen 10.0.0.1:29700": 'for ncclguard.join("tcp://10.0.0.1:29700", ...) in each process',
        "ncclguard store --listen [::]:29700": "at all addresses of this host, IPv6 and IPv4",
    }
    return described(parser, examples, EXIT_CODES)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; return the exit code."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    host, _, port = arguments.listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        parser.error(
            told("{value} is no address: give HOST:PORT, such as 10.0.0.1:29700", value=repr(arguments.listen))
        )
    ended = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)  # before torch's threads are made, which would take them
    from ncclguard.torch_compat import TCPStore

    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, int(port)), family=family, backlog=1024, dualstack_ipv6=host == "::")
        store = TCPStore(
            host,
            int(port),
            None,
            True,
            timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
        )
    except (OSError, RuntimeError) as error:
        text = told(
            "cannot listen at {address}: {error}", address=arguments.listen, error=str(error).partition("\n")[0]
        )
        print(f"ncclguard store: {text}", file=sys.stderr)
        return 1
    print(told("ncclguard store: listening at tcp://{address}", address=arguments.listen), flush=True)
    signal.sigwait(ended)
    del store
    return 0
