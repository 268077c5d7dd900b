"""Questions to this host beside its files: the addresses of names, and the files that hold NCCL's variables."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: The last of the files from which NCCL takes what the environment does not have (NCCL source, src/misc/param.cc).
SYSTEM_FILE = Path("/etc/nccl.conf")


def conf_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The files in the order in which NCCL reads them; the first that has a name wins."""
    named = environ.get("NCCL_CONF_FILE")
    if named:
        return (Path(named), SYSTEM_FILE)
    import pwd  # of Unix alone

    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a container's user without an entry: NCCL skips the file too
        return (SYSTEM_FILE,)
    return (home / ".nccl.conf", SYSTEM_FILE)


def read_conf(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The variables set in these files: name to (value, file). Unreadable files count as absent, as for NCCL."""
    found: dict[str, tuple[str, str]] = {}
    for path in conf_files(environ):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                found.setdefault(name, (value, str(path)))
    return found


def read_file(path: str | Path) -> str:
    """Read a file of the kernel's; "" when the kernel lacks the file or does not let this process read it."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def resolve(name: str, seconds: float = 5.0) -> tuple[str, ...]:
    """The addresses of a host name, in the resolver's order; none when it has none or does not answer in time.

    >>> resolve("127.0.0.1")
    ('127.0.0.1',)
    """
    found: list[str] = []

    def ask() -> None:
        found.extend(str(address[0]).partition("%")[0] for _, address in lookup(name.strip("[]")))

    wait_for(ask, seconds)
    return tuple(dict.fromkeys(found))


def lookup(name: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Family and socket address, port 0, of all addresses of a name; none when the resolver knows none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys((entry[0], entry[4]) for entry in found))


def wait_for(ask: Callable[[], None], seconds: float) -> None:
    """The system's resolver takes no time limit, so it runs in a thread that is left behind when it is too slow."""
    thread = threading.Thread(target=ask, name="ncclguard-resolve", daemon=True)
    thread.start()
    thread.join(seconds)
