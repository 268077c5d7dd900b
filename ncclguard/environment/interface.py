"""Which interface the job's traffic should use: the one that reaches the master, whom the launcher's variables name.

Order of the evidence: the job runs on this host only; the kernel's route to ``MASTER_ADDR``; its route to 8.8.8.8 (and
the IPv6 counterpart); the default routes; the only interface that is up. A bridge, a veth, a tunnel or an interface
without a carrier is taken only when nothing else reaches the master.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from ncclguard.environment import network
from ncclguard.environment.network import Link, Route, Routes, family_of, read_links, read_routes

_DEFAULT_PORT = 29500  # torch/distributed/run.py, DeepSpeed's TORCH_DISTRIBUTED_DEFAULT_PORT


class Job(BaseModel):
    """The job as its launcher describes it; None where it says nothing."""

    model_config = ConfigDict(frozen=True)

    launcher: str | None = None
    rank: int | None = None
    world_size: int | None = None
    hosts: int | None = None
    master_addr: str | None = None
    master_port: int = _DEFAULT_PORT

    @property
    def single_host(self) -> bool:
        """Whether all ranks are known to run on this host."""
        if self.hosts is not None:
            return self.hosts == 1
        return self.master_addr is not None and is_loopback_name(self.master_addr)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process speaks for the job (also when no launcher says otherwise)."""
        return self.rank in (None, 0)


def is_loopback_name(address: str) -> bool:
    """Whether a master address means "this host" by itself.

    127.0.1.1 does not: Debian gives that address to the host's own name.
    """
    return address.lower() in ("localhost", "127.0.0.1", "::1", "[::1]", "localhost.localdomain", "ip6-localhost")


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        text = environ.get(name, "").strip()
        if text.isdigit():
            return int(text)
    return None


def _launcher(environ: Mapping[str, str]) -> str | None:
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if "CROSS_SIZE" in environ and "LOCAL_SIZE" in environ:
        return "deepspeed"
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return "mpirun"
    if "SLURM_PROCID" in environ:
        return "srun"
    return None


def _hosts(environ: Mapping[str, str], world_size: int | None) -> int | None:
    if world_size == 1:
        return 1
    told = _number(environ, "GROUP_WORLD_SIZE", "CROSS_SIZE")
    if told is not None:
        return told
    local = _number(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    if world_size is not None and local:
        return -(-world_size // local)  # hosts with fewer ranks than this one still count as one each, at least
    return _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def read_job(environ: Mapping[str, str]) -> Job:
    """The job that torchrun, DeepSpeed's launcher, mpirun, srun or a hand-written script describes.

    >>> read_job({"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}).hosts
    2
    """
    world_size = _number(environ, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return Job(
        launcher=_launcher(environ),
        rank=_number(environ, "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
        world_size=world_size,
        hosts=_hosts(environ, world_size),
        master_addr=environ.get("MASTER_ADDR", "").strip() or None,
        master_port=_number(environ, "MASTER_PORT") or _DEFAULT_PORT,
    )


# Addresses that every routed network has a way to: Google's public name servers. Nothing is sent to them.
_OUTSIDE = ("8.8.8.8", "2001:4860:4860::8888")


class InterfaceChoice(BaseModel):
    """The interface for the job's traffic, or None with the reason.

    ``address`` is the one that peers are given. ``evidence`` says what decided; ``notes`` hold what a person should
    know about it. ``trouble`` is set when the master cannot be reached the way the environment says, with ``advice``.
    """

    model_config = ConfigDict(frozen=True)

    name: str | None
    address: str | None = None
    kind: str | None = None
    evidence: str
    notes: tuple[str, ...] = ()
    trouble: str | None = None
    advice: str | None = None

    @property
    def ipv6(self) -> bool:
        """Whether the address that peers are given is an IPv6 one."""
        return self.address is not None and family_of(self.address) == socket.AF_INET6


# Grades of links, best first.
_PROPER, _VETH, _AVOIDED, _NO_CARRIER, _LAST = range(5)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A link that something speaks for; ``address`` is None for its first one."""

    link: Link
    address: str | None
    evidence: str


class _Chooser:
    """One decision; collects the notes on the way."""

    def __init__(
        self,
        job: Job,
        links: Sequence[Link],
        routes: Routes,
        resolve: Callable[[str], tuple[str, ...]],
        answers: Callable[[str, int, str], bool],
    ) -> None:
        self._job = job
        self._links = {link.name: link for link in links}
        self._routes = routes
        self._resolve = resolve
        self._answers = answers
        self._notes: list[str] = []
        self._trouble: str | None = None
        self._advice: str | None = None
        self._found: list[_Candidate] = []

    def choose(self) -> InterfaceChoice:
        self._check_loopback()
        choice = self._single_host() or self._by_master()
        if choice is not None:
            return choice
        self._look_outside()
        self._look_at_default_routes()
        self._look_for_the_only_one()
        best = min(self._found, key=lambda candidate: self._grade(candidate.link), default=None)
        if best is None:
            return self._nothing()
        self._warn_about(best.link)
        return self._chosen(best.link, best.address, best.evidence)

    def _chosen(self, link: Link, address: str | None, evidence: str) -> InterfaceChoice:
        return InterfaceChoice(
            name=link.name,
            address=address or next(iter(link.global_addresses), None),
            kind=link.kind,
            evidence=evidence,
            notes=tuple(self._notes),
            trouble=self._trouble,
            advice=self._advice,
        )

    def _single_host(self) -> InterfaceChoice | None:
        if not self._job.single_host:
            return None
        for link in self._links.values():
            if link.loopback and link.up and "127.0.0.1" in link.addresses:
                return self._chosen(link, "127.0.0.1", "all ranks run on this host")
        # NCCL skips ::1, so a loopback without 127.0.0.1 is of no use to it.
        self._notes.append("all ranks run on this host, but the loopback interface is down or has no 127.0.0.1")
        return None

    def _check_loopback(self) -> None:
        """Linux sends what a host says to itself over lo, also when it is said to the address of another interface."""
        if any(link.loopback and not link.up for link in self._links.values()):
            self._fail(
                "the loopback interface is down, so the processes of this host cannot connect to each other",
                "bring it up: ip link set lo up",
            )

    def _by_master(self) -> InterfaceChoice | None:
        master = self._job.master_addr
        if master is None:
            return None
        if self._job.hosts not in (None, 1) and is_loopback_name(master):
            self._fail(
                f"MASTER_ADDR={master} means this host, but the job has {self._job.hosts} hosts",
                "set MASTER_ADDR to the name or address of the host of rank 0, as the other hosts see it",
            )
            return None
        addresses = self._resolve(master)
        if not addresses:
            self._fail(
                f"MASTER_ADDR={master} does not resolve on this host",
                "use an address, or add the name to the name server or to /etc/hosts on every host",
            )
            return None
        for address in addresses:
            route = self._routes.to(address)
            if route is None:
                continue
            choice = self._local_master(master, address) if route.local else self._remote_master(master, address, route)
            if choice is not None:
                return choice
        if self._trouble is None and not self._notes:
            self._fail(
                f"no route to MASTER_ADDR={master} ({', '.join(addresses)})",
                "check addresses, netmask and default route of this host: ip address; ip route get <master>",
            )
        return None

    def _local_master(self, master: str, address: str) -> InterfaceChoice | None:
        for link in self._links.values():
            if address not in link.addresses or link.loopback:
                continue
            evidence = f"MASTER_ADDR={master} is an address of this interface"
            if self._avoided(link) and address != master.strip("[]"):
                # A name that leads to docker0 on its own host: the other hosts resolve it to something else.
                self._notes.append(f"MASTER_ADDR={master} resolves to {address} here, which is on {link.name}")
                self._found.append(_Candidate(link, address, evidence))
                return None
            self._warn_about(link)
            return self._chosen(link, address, evidence)
        if not self._job.single_host:
            self._notes.append(
                f"MASTER_ADDR={master} resolves to {address} here, which other hosts cannot reach; where they resolve "
                "it to another address the job works, else give the host's real address"
            )
        return None

    def _remote_master(self, master: str, address: str, route: Route) -> InterfaceChoice | None:
        link = self._links.get(route.device)
        if link is None:
            return None
        evidence = f"the route to MASTER_ADDR={master} ({address}) goes over it"
        grade = self._grade(link)
        if grade == _PROPER:
            return self._chosen(link, route.source or link.address_of(family_of(address)), evidence)
        # A bridge, a tunnel or a dead link: another one is taken only if the master answers there.
        for other in self._routes.matching(address):
            candidate = self._links.get(other.device)
            if candidate is None or self._grade(candidate) >= grade:
                continue
            if self._answers(address, self._job.master_port, candidate.name):
                self._notes.append(
                    f"the kernel's route to {address} goes over {link.name} ({link.describe()}); the master also "
                    f"answers over {candidate.name}"
                )
                return self._chosen(
                    candidate, candidate.address_of(family_of(address)), f"MASTER_ADDR={master} answers through it"
                )
        self._warn_about(link)
        return self._chosen(link, route.source or link.address_of(family_of(address)), evidence)

    def _look_outside(self) -> None:
        for address in _OUTSIDE:
            route = self._routes.to(address)
            link = self._links.get(route.device) if route is not None else None
            if route is not None and link is not None and not route.local:
                self._found.append(_Candidate(link, route.source, f"the route to {address} goes over it"))

    def _look_at_default_routes(self) -> None:
        for route in self._routes.defaults():
            link = self._links.get(route.device)
            if link is not None:
                evidence = f"a default route (metric {route.metric}) goes over it"
                self._found.append(_Candidate(link, route.source, evidence))

    def _look_for_the_only_one(self) -> None:
        usable = [link for link in self._links.values() if not link.loopback and link.usable]
        for grade in (_PROPER, _VETH, _AVOIDED):
            alike = [link for link in usable if self._grade(link) == grade]
            if len(alike) == 1:
                others = "" if len(usable) == 1 else " and no bridge, tunnel or veth"
                self._found.append(_Candidate(alike[0], None, f"the only interface that is up{others}"))
            if alike:
                return
        for link in self._links.values():
            if link.loopback and link.up and "127.0.0.1" in link.addresses:
                self._found.append(_Candidate(link, "127.0.0.1", "no other interface is up"))

    def _nothing(self) -> InterfaceChoice:
        usable = [link for link in self._links.values() if not link.loopback and link.usable]
        names = ", ".join(f"{link.name} ({link.describe()})" for link in usable) or "none"
        return InterfaceChoice(
            name=None,
            evidence=f"nothing tells which interface reaches the other hosts; candidates: {names}",
            notes=tuple(self._notes),
            trouble=self._trouble or f"no interface could be chosen; candidates: {names}",
            advice=self._advice or "set MASTER_ADDR before, or NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME by hand",
        )

    def _grade(self, link: Link) -> int:
        """How good a kind and state of link is; a lower grade is taken before a higher one, whatever the evidence."""
        if not link.usable:
            return _NO_CARRIER if link.global_addresses else _LAST
        if link.loopback:
            return _LAST
        if not self._avoided(link):
            return _PROPER
        # In a container the interface to the outside is a veth; a bridge or a tunnel beside it leads further inside.
        return _VETH if link.kind == "veth" else _AVOIDED

    def _avoided(self, link: Link) -> bool:
        """Whether a link is taken only as the last way. A bridge with a wire in it carries the host's own address."""
        if not link.avoided:
            return False
        members = (other for other in self._links.values() if other.master == link.name)
        return not (link.kind in ("bridge", "openvswitch") and any(not member.avoided for member in members))

    def _fail(self, trouble: str, advice: str) -> None:
        if self._trouble is None:
            self._trouble, self._advice = trouble, advice

    def _warn_about(self, link: Link) -> None:
        if not link.running:
            self._notes.append(f"{link.name} has no carrier")
        better = [other.name for other in self._links.values() if self._grade(other) < self._grade(link)]
        if self._avoided(link) and better:
            self._notes.append(f"{link.name} is a {link.kind}; {', '.join(better)} did not lead to the master")


def choose_interface(
    job: Job,
    links: Sequence[Link] | None = None,
    routes: Routes | None = None,
    *,
    resolve: Callable[[str], tuple[str, ...]] = network.resolve,
    answers: Callable[[str, int, str], bool] = network.answers,
) -> InterfaceChoice:
    """The interface over which this host reaches the job's master.

    Sends nothing, except when the kernel's route to the master goes over a bridge, a tunnel or a dead link while
    another route exists: then one connection to the master's port is tried through each, at most a second long.

    >>> choose_interface(Job(hosts=1)).name
    'lo'
    """
    links = read_links() if links is None else links
    routes = read_routes(links) if routes is None else routes
    return _Chooser(job, links, routes, resolve, answers).choose()
