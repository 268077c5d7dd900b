"""Resets established TCP connections of other processes, the way a failing network does."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence

from ncclguard.faults.janitor import SEARCH


def tool(name: str) -> str:
    """The path of a system tool; RuntimeError that names the package to install when it is not there."""
    path = shutil.which(name, path=SEARCH)
    if path is None:
        package = {"iptables": "iptables", "unshare": "util-linux", "nsenter": "util-linux"}.get(name, "iproute2")
        raise RuntimeError(f"{name} is not installed; install the system package {package}")
    return path


def run_tool(argv: Sequence[str]) -> str:
    """Run a system tool to its end and return its stdout; RuntimeError with its own words when it fails."""
    done = subprocess.run([tool(argv[0]), *argv[1:]], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        text = (done.stderr or done.stdout).strip()
        raise RuntimeError(f"{' '.join(argv)} failed: {text}; where permissions are missing, run as root")
    return done.stdout


def reset_connections(pid: int, keep_ports: Iterable[int] = ()) -> int:
    """Reset the established TCP connections of a process with ``ss -K``; returns how many were reset.

    Connections with a local or remote port in ``keep_ports`` (the store's, as a rule) stay. Needs root and a kernel
    with CONFIG_INET_DIAG_DESTROY; RuntimeError says what is missing. Works across network namespaces.
    """
    keep = set(keep_ports)
    enter = ("nsenter", f"--net=/proc/{pid}/ns/net")
    count = 0
    for line in run_tool([*enter, tool("ss"), "-H", "-n", "-t", "-p", "state", "established"]).splitlines():
        _, _, local, remote, *users = line.split()
        ports = {int(end.rpartition(":")[2]) for end in (local, remote)}
        if f"pid={pid}," in "".join(users) and not ports & keep:
            count += kill_sockets(enter, ("src", local, "dst", remote))
    return count


def kill_sockets(prefix: Sequence[str], filter_words: Sequence[str]) -> int:
    """``ss -K`` behind a prefix that enters a network namespace; returns how many sockets it closed."""
    words = [*prefix, tool("ss"), "-K", "-H", "-n", "-t", "state", "established", *filter_words]
    return len([line for line in run_tool(words).splitlines() if line.strip()])
