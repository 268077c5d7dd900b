"""Several hosts on one machine: network namespaces, each with its own address and hostname, joined by a router."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ncclguard.faults.cleanup import SEARCH, Cleaner, remove_namespace
from ncclguard.faults.injection import disconnect
from ncclguard.torch_compat.sockets import adopt

if TYPE_CHECKING:
    from typing_extensions import Self


_OWNER: Final = re.compile(r"pid=(\d+),fd=(\d+)")
_PIDFD_GETFD: Final = 438  # the system call's number, the same on every architecture (Linux 5.6)


def tool(name: str) -> str:
    """Return the path of a system tool; RuntimeError that names the package to install when it is not there."""
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
    """Reset the established TCP connections of a process, for both ends; returns how many were reset.

    Connections with a local or remote port in ``keep_ports`` (the store's, as a rule) stay. Works across network
    namespaces. Needs root, the system tool ``ss``, and Linux 5.6 or CONFIG_INET_DIAG_DESTROY; RuntimeError says what is
    missing. Of this process itself: ``reset_own_connections``, which needs none of them.
    """
    return reset_where(("nsenter", f"--net=/proc/{pid}/ns/net"), keep_ports=keep_ports, pid=pid)


def reset_where(
    prefix: Sequence[str], filter_words: Sequence[str] = (), keep_ports: Iterable[int] = (), pid: int | None = None
) -> int:
    """Reset the connections that ``ss`` lists in a network namespace, entered by a prefix; of one process if given."""
    keep, count = set(keep_ports), 0
    ss, established = (*prefix, tool("ss")), ("-H", "-n", "-t", "state", "established")
    for line in run_tool((*ss, "-p", *established, *filter_words)).splitlines():
        _, _, local, remote, *users = line.split()
        ports = (int(local.rpartition(":")[2]), int(remote.rpartition(":")[2]))
        owners = [(int(owner), int(fd)) for owner, fd in _OWNER.findall("".join(users))]
        if not keep & set(ports) and (pid is None or pid in {owner for owner, _ in owners}):
            if any(_reset(*owner, ports) for owner in owners):
                count += 1
            else:  # no owner is left, or the kernel does not give out other processes' descriptors
                count += len(run_tool((*ss, "-K", *established, "src", local, "dst", remote)).splitlines())
    return count


def _reset(pid: int, fd: int, ports: tuple[int, int]) -> bool:
    """Reset a connection of another process by its descriptor there, if that still is the one between these ports.

    ``ss -K`` would end it as well, but the own end then finds ECONNABORTED, which no network sends, and for which gloo
    ends the process where it meets it in its own thread.
    """
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        copy = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if copy < 0:
        return False
    connection = adopt(copy)
    if connection is None:
        return False
    with connection, contextlib.suppress(OSError):  # not connected any more
        if (connection.getsockname()[1], connection.getpeername()[1]) == ports:
            return disconnect(connection)
    return False


Ports = tuple[int, int]  # the first and the last port, both inclusive

# In the namespace's own mount and UTS namespaces: its /etc/hosts and hostname, then the program under the same pid.
ENTER = 'mount --bind "$1" /etc/hosts && echo "$2" > /proc/sys/kernel/hostname && shift 2 && exec "$@"'


@functools.cache
def namespaces_available() -> str | None:
    """Return None where ``Hosts`` works, else the reason, for a test's skip message.

    >>> namespaces_available()  # doctest: +SKIP
    'creating network namespaces needs root (run as root, or in a privileged container)'
    """
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "creating network namespaces needs root (run as root, or in a privileged container)"
    try:
        for name in ("ip", "iptables", "ss", "unshare"):
            tool(name)
        with Hosts(1) as hosts:
            hosts.run(hosts.names[0], ["true"])
            hosts.partition(hosts.names[0])
    except RuntimeError as error:
        return str(error)
    return None


class Hosts:
    """A context manager for hosts that ``run_ranks(..., hosts=...)`` can use and whose network can be broken.

    ``hosts`` is a number or the hosts' names. Each host ``i`` has the address 10.77.<i>.2 on its interface ``eth0`` and
    a router at 10.77.<i>.1; faults are made in the router, so the hosts see lost or refused packets and no local error.
    Namespaces carry a random id; they are removed on leaving the block, and by a process of its own when this process
    dies. Raises RuntimeError where namespaces cannot be made: ask ``namespaces_available()`` first.

    >>> with Hosts(2) as hosts:  # doctest: +SKIP
    ...     job = start_ranks("train.py", 4, hosts=hosts)
    ...     hosts.partition("host1")
    """

    interface = "eth0"

    def __init__(self, hosts: int | Sequence[str] = 2) -> None:
        self.names = tuple(f"host{index}" for index in range(hosts)) if isinstance(hosts, int) else tuple(hosts)
        if not 1 <= len(self.names) <= 250 or len(set(self.names)) < len(self.names):
            raise ValueError(f"hosts is {hosts!r}; give 1 to 250 hosts with different names")
        self._id = uuid.uuid4().hex[:8]
        self._router = f"ng-{self._id}-router"
        self._ports = itertools.count(29500)
        self._rules: list[tuple[tuple[str, ...], tuple[str, ...]]] = []  # the hosts that a rule is about, the rule
        self._directory = Path(tempfile.mkdtemp(prefix="ncclguard-hosts-"))
        self._cleaner = Cleaner()
        self._cleaner.watch("directory", str(self._directory))
        try:
            self._create()
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        known = [("127.0.0.1", "localhost"), ("::1", "localhost"), *((self.address(name), name) for name in self.names)]
        # TCPStore asks for the name of an address when somebody connects, and would wait, as no name server can be
        # reached. These names are extra ones, so that a host's own name has no such address.
        known += [(f"::ffff:{address}", f"{name}.mapped") for address, name in known if ":" not in address]
        (self._directory / "hosts").write_text("".join(f"{address} {name}\n" for address, name in known))
        for namespace in (self._router, *map(self.namespace, self.names)):
            self._cleaner.watch("namespace", namespace)  # before it exists, so that no moment is uncovered
            run_tool(["ip", "netns", "add", namespace])
            run_tool(["ip", "-n", namespace, "link", "set", "lo", "up"])
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        run_tool(["ip", "netns", "exec", self._router, "sh", "-c", forward])
        for index, name in enumerate(self.names):
            host, port = self.namespace(name), self._port(name)
            ends = ((self.interface, "netns", host), (port, "netns", self._router))
            run_tool(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
            for namespace, device, last in ((self._router, port, 1), (host, self.interface, 2)):
                run_tool(["ip", "-n", namespace, "address", "add", f"10.77.{index}.{last}/24", "dev", device])
                run_tool(["ip", "-n", namespace, "link", "set", device, "up"])
            run_tool(["ip", "-n", host, "route", "add", "default", "via", f"10.77.{index}.1"])

    def address(self, host: str) -> str:
        """Return a host's IPv4 address."""
        return f"10.77.{self._index(host)}.2"

    def namespace(self, host: str) -> str:
        """Return the name under which ``ip netns`` knows a host."""
        return f"ng-{self._id}-{self._index(host)}"

    def next_port(self) -> int:
        """Return a port that no other job in these hosts has used."""
        return next(self._ports)

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs ``argv`` inside a host, under the pid of the process that runs it."""
        enter = [tool("ip"), "netns", "exec", self.namespace(host), tool("unshare"), "--uts", "sh", "-c", ENTER, "sh"]
        return [*enter, str(self._directory / "hosts"), host, *argv]

    def entrance(self, host: str) -> list[str]:
        """Return the arguments with which a fork enters a host by itself; see fork.py."""
        return [self.namespace(host), str(self._directory / "hosts"), host]

    def run(self, host: str, argv: Sequence[str]) -> str:
        """Run a short command inside a host and return its stdout; RuntimeError with its words when it fails."""
        return run_tool(self.command(host, argv))

    def partition(self, host: str, ports: Ports | None = None) -> None:
        """Drop every packet between a host and all others, or only TCP from and to a range of ports."""
        for direction in (("-i", self._port(host)), ("-o", self._port(host))):
            for match in _port_matches(ports):
                self._add_rule((host,), (*direction, *match, "-j", "DROP"))

    def drop_one_way(self, source: str, destination: str, ports: Ports | None = None) -> None:
        """Drop the packets from one host to another; those of the other direction pass."""
        for match in _port_matches(ports):
            way = ("-i", self._port(source), "-o", self._port(destination))
            self._add_rule((source, destination), (*way, *match, "-j", "DROP"))

    def reject(self, host: str, ports: Ports | None = None) -> None:
        """Answer TCP connections to a host with a reset, as a rejecting firewall does: its ports look closed."""
        match = () if ports is None else ("--dport", f"{ports[0]}:{ports[1]}")
        rule = ("-o", self._port(host), "-p", "tcp", *match, "-j", "REJECT", "--reject-with", "tcp-reset")
        self._add_rule((host,), rule)

    def until_settled(self, seconds: float = 20.0) -> None:
        """Wait until the kernel has noted which links have a carrier, a second or less; TimeoutError."""
        expected = {"LOWER_UP": ("UP", "UNKNOWN"), "NO-CARRIER": ("DOWN", "LOWERLAYERDOWN")}
        deadline = time.monotonic() + seconds
        while odd := [
            f"{link['ifname']} of {name}"
            for name in self.names
            for link in json.loads(run_tool(["ip", "-n", self.namespace(name), "-j", "link"]))
            for flag, states in expected.items()
            if flag in link["flags"] and link["operstate"] not in states
        ]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(odd)} did not settle within {seconds:g} s; look at `ip link` there")
            time.sleep(0.02)

    def heal(self, host: str | None = None) -> None:
        """Undo ``partition``, ``drop_one_way`` and ``reject`` that name this host, or all of them."""
        for rule in [rule for rule in self._rules if host is None or host in rule[0]]:
            self._iptables("-D", rule[1])
            self._rules.remove(rule)

    def link_down(self, host: str) -> None:
        """Pull a host's cable: its interface loses the carrier and keeps its address."""
        run_tool(["ip", "-n", self._router, "link", "set", self._port(host), "down"])

    def link_up(self, host: str) -> None:
        """Plug a host's cable in again."""
        run_tool(["ip", "-n", self._router, "link", "set", self._port(host), "up"])

    def shape(self, host: str, megabits: float) -> None:
        """Limit a host's link to ``megabits`` per second in each direction; RuntimeError where ``tc`` has no tbf."""
        burst = max(65536, int(megabits * 1e6 / 8 / 100))  # bytes; what passes in 10 ms, or one offloaded packet
        words = ["root", "tbf", "rate", f"{megabits}mbit", "burst", str(burst), "latency", "50ms"]
        for namespace, device in self._ends(host):
            run_tool(["tc", "-n", namespace, "qdisc", "replace", "dev", device, *words])

    def unshape(self, host: str) -> None:
        """Undo ``shape``; RuntimeError when the host's link is not shaped."""
        for namespace, device in self._ends(host):
            run_tool(["tc", "-n", namespace, "qdisc", "delete", "dev", device, "root"])

    def reset_connections(self, host: str, between: str | None = None, keep_ports: Iterable[int] = ()) -> int:
        """Reset a host's established TCP connections to the others, or to the one named ``between``; returns how many.

        Connections with a local or remote port in ``keep_ports`` (the store's, as a rule) stay.
        """
        others = "10.77.0.0/16" if between is None else self.address(between)
        return reset_where(("ip", "netns", "exec", self.namespace(host)), ("dst", others), keep_ports)

    def close(self) -> None:
        """Kill what runs in the hosts and remove them; safe to call twice."""
        for namespace in (*map(self.namespace, self.names), self._router):
            remove_namespace(namespace)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._cleaner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _index(self, host: str) -> int:
        if host not in self.names:
            raise ValueError(f"there is no host {host!r}; the hosts are {', '.join(self.names)}")
        return self.names.index(host)

    def _port(self, host: str) -> str:
        return f"port{self._index(host)}"

    def _ends(self, host: str) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.namespace(host), self.interface), (self._router, self._port(host))

    def _add_rule(self, hosts: tuple[str, ...], rule: tuple[str, ...]) -> None:
        self._iptables("-A", rule)
        self._rules.append((hosts, rule))

    def _iptables(self, action: str, rule: Sequence[str]) -> None:
        words = ["ip", "netns", "exec", self._router, tool("iptables"), "-w", action, "FORWARD", *rule]
        run_tool(words)


def _port_matches(ports: Ports | None) -> tuple[tuple[str, ...], ...]:
    """Return the iptables matches for all packets, or for TCP from or to a range of ports."""
    if ports is None:
        return ((),)
    span = f"{ports[0]}:{ports[1]}"
    return ("-p", "tcp", "--dport", span), ("-p", "tcp", "--sport", span)
