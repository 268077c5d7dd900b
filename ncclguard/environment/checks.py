"""What is wrong with the values that are there: names that nothing reads, values that are refused or do harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ncclguard.environment.catalogue import CATALOGUE, TRUE_WORDS, WATCHED_PREFIXES, Reader, Variable, closest, lookup
from ncclguard.environment.interface import InterfaceChoice
from ncclguard.environment.network import Link
from ncclguard.environment.profiles import Port
from ncclguard.environment.versions import Versions

Severity = Literal["error", "warning"]


class Finding(BaseModel):
    """Something wrong: what it is, and what to do next. ``name`` is the variable it is about."""

    model_config = ConfigDict(frozen=True)

    name: str
    severity: Severity
    detail: str
    advice: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.detail}; {self.advice}"


def _finding(name: str, severity: Severity, detail: str, advice: str) -> Finding:
    return Finding(name=name, severity=severity, detail=detail, advice=advice)


def watched(name: str) -> bool:
    """Whether a variable of the environment is looked at."""
    return name in CATALOGUE or name.startswith(WATCHED_PREFIXES)


def check_names(environ: Mapping[str, str], versions: Versions) -> list[Finding]:
    """Names that the installed versions do not read, and deprecated ones."""
    found = (_check_name(name, environ, versions) for name in sorted(environ) if watched(name))
    return [finding for finding in found if finding is not None]


def _check_name(name: str, environ: Mapping[str, str], versions: Versions) -> Finding | None:
    shown = f"{name}={environ[name]}"
    variable = lookup(name)
    if variable is None:
        meant = closest(name, versions)
        if meant is not None:
            return _finding(name, "warning", f"nothing known reads {shown}", f"did you mean {meant}? If so, rename it")
        return None  # a plug-in's or another program's name: nothing is known of it
    if variable.reader is Reader.NOTHING:
        return _finding(name, "warning", f"{shown} has no effect: nothing reads it", f"use {variable.instead}")
    if variable.is_deprecated(versions):
        return _check_deprecated(variable, environ)
    if variable.is_read(versions) is False:
        return _finding(
            name, "warning", f"{shown} has no effect: {_outside(variable, versions)}", _other_name(variable)
        )
    return None


def _check_deprecated(variable: Variable, environ: Mapping[str, str]) -> Finding:
    new, old = str(variable.replaced_by), variable.name
    if new in environ and environ[new] != environ[old]:
        return _finding(
            old,
            "warning",
            f"{old}={environ[old]} is deprecated and {new}={environ[new]} takes precedence",
            f"remove {old}",
        )
    return _finding(
        old, "warning", f"{old} is deprecated since torch {variable.deprecated_since}", f"rename it to {new}"
    )


def _outside(variable: Variable, versions: Versions) -> str:
    if variable.not_by_nccl2 and versions.nccl2:
        return f'the backend nccl2, which "nccl" is on torch {versions.torch}, does not heed it'
    version = variable.version_of_reader(versions)
    name = "NCCL" if variable.reader is Reader.NCCL else "torch"
    span = f"only {variable.since or 'the first'} to {variable.until} read it" if variable.until else ""
    return f"{name} {version} does not read it, {span or f'versions from {variable.since} on do'}"


def _other_name(variable: Variable) -> str:
    if variable.not_by_nccl2:
        return "remove it, or set TORCH_DIST_USE_NCCL2=0 to have the backend of before"
    for other in CATALOGUE.values():
        if other.replaced_by == variable.name:
            return f"use {other.name} with this version, or upgrade"
    return "remove it"


def check_values(environ: Mapping[str, str], versions: Versions) -> list[Finding]:
    """Values that the reader refuses or misunderstands."""
    found = []
    for name in sorted(environ):
        variable = CATALOGUE.get(name)
        if variable is None or variable.is_read(versions) is False:
            continue
        fault = variable.fault_of(environ[name])
        if fault is not None:
            found.append(_finding(name, "error", f"{name}={environ[name]}: {name} {fault}", "correct or remove it"))
    return found


def check_interfaces(environ: Mapping[str, str], choice: InterfaceChoice, links: Sequence[Link]) -> list[Finding]:
    """The interfaces that the user named: whether they are there, run, and lead to the master."""
    found = []
    for name, reader in (("NCCL_SOCKET_IFNAME", match_nccl), ("GLOO_SOCKET_IFNAME", match_gloo)):
        if name in environ:
            found += _check_interface(name, environ[name], reader, choice, links)
    return found


def match_nccl(value: str, links: Sequence[Link]) -> list[Link]:
    """The links that a value of ``NCCL_SOCKET_IFNAME`` selects: prefixes, ``=`` exact names, ``^`` all others."""
    excluding, exact, entries = _list_of_nccl(value)
    names = [entry.partition(":")[0] for entry in entries]
    return [
        link
        for link in links
        if any(link.name == name if exact else link.name.startswith(name) for name in names) is not excluding
    ]


def _matching_ports(value: str, ports: Sequence[Port]) -> list[Port]:
    """The ports that a value of ``NCCL_IB_HCA`` selects: the same for ``name[:port]``."""
    excluding, exact, entries = _list_of_nccl(value)
    wanted = [entry.split(":") for entry in entries]

    def selected(port: Port) -> bool:
        for entry in wanted:
            fits = port.device == entry[0] if exact else port.device.startswith(entry[0])
            if fits and (len(entry) == 1 or entry[1] == str(port.number)):
                return True
        return False

    return [port for port in ports if selected(port) is not excluding]


def _list_of_nccl(value: str) -> tuple[bool, bool, list[str]]:
    """Whether a list as NCCL takes it excludes (``^``), whether it has exact names (``=``), and its entries."""
    excluding = value.startswith("^")
    rest = value[1:] if excluding else value
    exact = rest.startswith("=")
    return excluding, exact, [entry for entry in (rest[1:] if exact else rest).split(",") if entry]


def match_gloo(value: str, links: Sequence[Link]) -> list[Link]:
    """The links that a value of ``GLOO_SOCKET_IFNAME`` selects: exact names, separated by commas."""
    return [link for entry in value.split(",") for link in links if link.name == entry]


def _check_interface(
    name: str,
    value: str,
    match: Callable[[str, Sequence[Link]], list[Link]],
    choice: InterfaceChoice,
    links: Sequence[Link],
) -> list[Finding]:
    shown, use = f"{name}={value}", _use(name, choice)
    matched = match(value, links)
    if not matched:
        there = ", ".join(link.name for link in links)
        hint = f"; {name} takes exact names only" if match is match_gloo and value[:1] in "^=" else ""
        return [_finding(name, "error", f"{shown} matches no interface of this host ({there}){hint}", use)]
    if not any(link.up and link.running for link in matched):
        states = ", ".join(f"{link.name} ({link.describe()})" for link in matched)
        return [_finding(name, "error", f"{shown}: {states}", use)]
    if choice.name is None or choice.name in [link.name for link in matched]:
        return []
    if all(link.loopback for link in matched) and choice.kind != "loopback":
        detail = f"{shown} is the loopback, but the master is not on this host alone ({choice.evidence}: {choice.name})"
        return [_finding(name, "error", detail, use)]
    names = ", ".join(link.name for link in matched)
    detail = f"{shown} selects {names}, but {choice.name} leads to the master ({choice.evidence})"
    return [_finding(name, "warning", detail, f"if the other hosts are not on the network of {names}: {use}")]


def _use(name: str, choice: InterfaceChoice) -> str:
    if choice.name is None:
        return f"correct or remove {name}"
    return f"remove {name}, or set it to {'=' if name == 'NCCL_SOCKET_IFNAME' else ''}{choice.name}"


#: Legal values that do harm: the variable, the values, what they do (after name and "="), and what to do.
_HARMFUL: tuple[tuple[str, frozenset[str], str, str], ...] = (
    (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        frozenset({"0"}),
        "0: an unguarded collective that hangs is never ended",
        "set it to 3",
    ),
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        TRUE_WORDS,
        "1 switches watchdog, monitor and automatic dump off",
        "remove it",
    ),
    (
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC",
        TRUE_WORDS,
        (
            "1: when the guard aborts its own NCCL communicator to end a collective, torch tells all ranks to write a "
            "dump and end their process"
        ),
        "remove it: torch writes dumps at a timeout without it",
    ),
    (
        "NCCL_P2P_DISABLE",
        frozenset({"1"}),
        "1 sends everything between the GPUs of a host through its memory",
        "remove it, unless direct access fails on this machine",
    ),
)


def check_harm(environ: Mapping[str, str], ports: Sequence[Port]) -> list[Finding]:
    """Legal values that switch off what keeps a job from hanging, or the fast path."""
    found = [
        _finding(name, "warning", f"{name}={effect}", advice)
        for name, values, effect, advice in _HARMFUL
        if environ.get(name, "").strip().lower() in values
    ]
    active = [port.name for port in ports if port.active and port.layer in ("InfiniBand", "Ethernet")]
    if environ.get("NCCL_IB_DISABLE") == "1" and active:
        detail = f"NCCL_IB_DISABLE=1 leaves the active ports {', '.join(active)} unused"
        found.append(_finding("NCCL_IB_DISABLE", "warning", detail, "remove it, unless they are not for this job"))
    if "NCCL_IB_HCA" in environ and ports and not _matching_ports(environ["NCCL_IB_HCA"], ports):
        there = ", ".join(port.name for port in ports)
        detail = f"NCCL_IB_HCA={environ['NCCL_IB_HCA']} matches no port of this host ({there})"
        found.append(_finding("NCCL_IB_HCA", "error", detail, "correct or remove it"))
    return found
