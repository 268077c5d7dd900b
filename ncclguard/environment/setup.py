"""``setup_env()``: put the environment in order before ``init_process_group``, and report what is wrong.

Three things follow from one another: the profile (what to set for which network, by the ports that the kernel shows),
the ladder of time limits, and the variables. The ladder: guard deadline < process-group timeout < heartbeat monitor <
launcher. Each limit has to leave the one below it time to act. The guard names the culprit and lets the job go on; the
process group's watchdog ends the process with a flight-recorder dump; the heartbeat monitor ends it when the watchdog
itself hangs; the launcher ends the job. In another order the coarser measure strikes first and the finer one explains
nothing.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel
from rich.cells import cell_len

from ncclguard.config import current_config, seconds
from ncclguard.environment.catalogue import (
    CATALOGUE,
    FALSE_WORDS,
    TRUE_WORDS,
    WATCHED_PREFIXES,
    Reader,
    Variable,
    closest,
    lookup,
    name_for,
)
from ncclguard.environment.network import (
    InterfaceChoice,
    Link,
    Prose,
    choose_interface,
    read_job,
    read_links,
)
from ncclguard.environment.versions import Versions, detect_versions, within
from ncclguard.spelling import hinted
from ncclguard_explain.host import read_conf, read_file
from ncclguard_explain.language import Message, current, joined, received, said, say, told, tr

Severity = Literal["error", "warning"]


class Finding(BaseModel, frozen=True):
    """Something wrong: what it is, and what to do next. ``name`` is the variable it is about."""

    name: str
    severity: Severity
    detail: Prose
    advice: Prose

    @property
    def text(self) -> Message:
        """One line: how bad it is, what it is, and what to do."""
        return joined(": ", (_SEVERITY[self.severity], joined("; ", (self.detail, self.advice))))

    def __str__(self) -> str:
        return say(self.text)


_SEVERITY: Mapping[str, Message] = {"error": tr("error", "setup"), "warning": tr("warning", "setup")}


def _finding(name: str, severity: Severity, detail: str, advice: str) -> Finding:
    return Finding(name=name, severity=severity, detail=detail, advice=advice)


def watched(name: str) -> bool:
    """Return whether a variable of the environment is looked at."""
    return name in CATALOGUE or name.startswith(WATCHED_PREFIXES)


def check_names(environ: Mapping[str, str], versions: Versions) -> list[Finding]:
    """Find names that the installed versions do not read, and deprecated ones."""
    found = (_check_name(name, environ, versions) for name in sorted(environ) if watched(name))
    return [finding for finding in found if finding is not None]


def _check_name(name: str, environ: Mapping[str, str], versions: Versions) -> Finding | None:
    shown = f"{name}={environ[name]}"
    variable = lookup(name)
    if variable is None:
        meant = closest(name, versions)
        if meant is not None:
            return _finding(
                name,
                "warning",
                tr("nothing known reads {setting}", setting=shown),
                tr("did you mean {name}? If so, rename it", name=meant),
            )
        return None  # a plug-in's or another program's name, of which nothing is known
    if variable.reader is Reader.NOTHING:
        unread = tr("{setting} has no effect: nothing reads it", setting=shown)
        return _finding(name, "warning", unread, tr("use {name}", name=variable.instead))
    if variable.is_deprecated(versions):
        return _check_deprecated(variable, environ)
    if variable.is_read(versions) is False:
        unread = tr("{setting} has no effect: {why}", setting=shown, why=_outside(variable, versions))
        return _finding(name, "warning", unread, _other_name(variable))
    return None


def _check_deprecated(variable: Variable, environ: Mapping[str, str]) -> Finding:
    new, old = str(variable.replaced_by), variable.name
    if new in environ and environ[new] != environ[old]:
        return _finding(
            old,
            "warning",
            tr(
                "{setting} is deprecated and {other} takes precedence",
                setting=f"{old}={environ[old]}",
                other=f"{new}={environ[new]}",
            ),
            tr("remove {name}", name=old),
        )
    deprecated = tr("{name} is deprecated since torch {version}", name=old, version=variable.deprecated_since)
    return _finding(old, "warning", deprecated, tr("rename it to {name}", name=new))


def _outside(variable: Variable, versions: Versions) -> Message:
    if variable.not_by_nccl2 and versions.nccl2:
        return tr('the backend nccl2, which "nccl" is on torch {version}, does not heed it', version=versions.torch)
    version = variable.version_of_reader(versions)
    reader = "NCCL" if variable.reader is Reader.NCCL else "torch"
    if variable.until:
        first = variable.since or tr("the first")
        span = tr("only {first} to {last} read it", first=first, last=variable.until)
    else:
        span = tr("versions from {version} on do", version=variable.since)
    return joined(", ", (tr("{name} {version} does not read it", name=reader, version=version), span))


def _other_name(variable: Variable) -> Message:
    if variable.not_by_nccl2:
        return tr("remove it, or set TORCH_DIST_USE_NCCL2=0 to have the backend of before")
    for other in CATALOGUE.values():
        if other.replaced_by == variable.name:
            return tr("use {name} with this version, or upgrade", name=other.name)
    return tr("remove it")


def check_values(environ: Mapping[str, str], versions: Versions) -> list[Finding]:
    """Find values that the reader refuses or misunderstands."""
    found = []
    for name in sorted(environ):
        variable = CATALOGUE.get(name)
        if variable is None or variable.is_read(versions) is False:
            continue
        fault = variable.fault_of(environ[name])
        if fault is not None:
            detail = tr("{setting}: {name} {text}", setting=f"{name}={environ[name]}", name=name, text=fault)
            found.append(_finding(name, "error", detail, tr("correct or remove it")))
    return found


def check_interfaces(environ: Mapping[str, str], choice: InterfaceChoice, links: Sequence[Link]) -> list[Finding]:
    """Check that the user's interfaces exist, are up, and lead to the master."""
    found = []
    for name, reader in (("NCCL_SOCKET_IFNAME", match_nccl), ("GLOO_SOCKET_IFNAME", match_gloo)):
        if name in environ:
            found += _check_interface(name, environ[name], reader, choice, links)
    return found


def match_nccl(value: str, links: Sequence[Link]) -> list[Link]:
    """Return the links that a value of ``NCCL_SOCKET_IFNAME`` selects: prefixes, ``=`` names, ``^`` all but these."""
    excluding, exact, entries = _list_of_nccl(value)
    names = [entry.partition(":")[0] for entry in entries]
    return [
        link
        for link in links
        if any(link.name == name if exact else link.name.startswith(name) for name in names) is not excluding
    ]


def _matching_ports(value: str, ports: Sequence[Port]) -> list[Port]:
    """Return the ports that a value of ``NCCL_IB_HCA`` selects: the same for ``name[:port]``."""
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
    """Return whether a list as NCCL takes it excludes (``^``), whether it has exact names (``=``), and its entries."""
    excluding = value.startswith("^")
    rest = value[1:] if excluding else value
    exact = rest.startswith("=")
    return excluding, exact, [entry for entry in (rest[1:] if exact else rest).split(",") if entry]


def match_gloo(value: str, links: Sequence[Link]) -> list[Link]:
    """Return the links that a value of ``GLOO_SOCKET_IFNAME`` selects: exact names, separated by commas."""
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
        detail = tr("{setting} matches no interface of this host ({some})", setting=shown, some=there)
        if match is match_gloo and value[:1] in "^=":
            detail = joined("; ", (detail, tr("{name} takes exact names only", name=name)))
        return [_finding(name, "error", detail, use)]
    if not any(link.up and link.running for link in matched):
        states = [tr("{name} ({state})", name=link.name, state=link.describe()) for link in matched]
        return [_finding(name, "error", joined(": ", (shown, joined(", ", states))), use)]
    if choice.name is None or choice.name in [link.name for link in matched]:
        return []
    if choice.kind == "loopback":  # all ranks are on this host, where each of its addresses leads to them
        return []
    if all(link.loopback for link in matched):
        detail = tr(
            "{setting} is the loopback, but the master is not on this host alone ({evidence}: {name})",
            setting=shown,
            evidence=choice.evidence,
            name=choice.name,
        )
        return [_finding(name, "error", detail, use)]
    names = ", ".join(link.name for link in matched)
    detail = tr(
        "{setting} selects {some}, but {name} leads to the master ({evidence})",
        setting=shown,
        some=names,
        name=choice.name,
        evidence=choice.evidence,
    )
    advice = tr("if the other hosts are not on the network of {some}: {advice}", some=names, advice=use)
    return [_finding(name, "warning", detail, advice)]


def _use(name: str, choice: InterfaceChoice) -> Message:
    if choice.name is None:
        return tr("correct or remove {name}", name=name)
    wanted = f"={choice.name}" if name == "NCCL_SOCKET_IFNAME" else choice.name
    return tr("remove {name}, or set it to {value}", name=name, value=wanted)


#: Legal values that do harm: the variable, the values, their effect (as it follows name and "="), and what to do.
_HARMFUL: tuple[tuple[str, frozenset[str], Message, Message], ...] = (
    (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        frozenset({"0"}),
        tr("TORCH_NCCL_ASYNC_ERROR_HANDLING=0: an unguarded collective that hangs is never ended"),
        tr("set it to 3"),
    ),
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        TRUE_WORDS,
        tr("TORCH_NCCL_BLOCKING_WAIT=1 switches watchdog, monitor and automatic dump off"),
        tr("remove it"),
    ),
    (
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC",
        TRUE_WORDS,
        tr(
            "TORCH_NCCL_EXTRA_DUMP_ON_EXEC=1: when the guard aborts its own NCCL communicator to end a collective, torch "
            "tells all ranks to write a dump and end their process"
        ),
        tr("remove it: torch writes dumps at a timeout without it"),
    ),
    (
        "NCCL_P2P_DISABLE",
        frozenset({"1"}),
        tr("NCCL_P2P_DISABLE=1 sends everything between the GPUs of a host through its memory"),
        tr("remove it, unless direct access fails on this machine"),
    ),
)


def check_harm(environ: Mapping[str, str], ports: Sequence[Port]) -> list[Finding]:
    """Find legal values that switch off the fast path, or the means against a hang."""
    found = [
        _finding(name, "warning", effect, advice)
        for name, values, effect, advice in _HARMFUL
        if environ.get(name, "").strip().lower() in values
    ]
    active = [port.name for port in ports if port.active and port.layer in ("InfiniBand", "Ethernet")]
    if environ.get("NCCL_IB_DISABLE") == "1" and active:
        detail = tr("NCCL_IB_DISABLE=1 leaves the active ports {some} unused", some=", ".join(active))
        found.append(_finding("NCCL_IB_DISABLE", "warning", detail, tr("remove it, unless they are not for this job")))
    if "NCCL_IB_HCA" in environ and ports and not _matching_ports(environ["NCCL_IB_HCA"], ports):
        there = ", ".join(port.name for port in ports)
        setting = f"NCCL_IB_HCA={environ['NCCL_IB_HCA']}"
        detail = tr("{setting} matches no port of this host ({some})", setting=setting, some=there)
        found.append(_finding("NCCL_IB_HCA", "error", detail, tr("correct or remove it")))
    return found


_log = logging.getLogger("ncclguard.environment")

# The values that earlier calls in this process wrote, so that a second call tells them from the user's.
_written: dict[str, str] = {}
_lock = threading.Lock()

# ----------------------------------------------------------------------------------------------------- the report


class Setting(BaseModel, frozen=True):
    """A variable with the value it was given, and why."""

    name: str
    value: str
    why: Prose


class Late(Setting, frozen=True):
    """A variable that was not set, and what has happened already that reads it."""

    after: Prose

    @property
    def text(self) -> Message:
        """The variable, and why it is too late for it."""
        setting = f"{self.name}={self.value}"
        return tr("{setting}: {why} ({because})", setting=setting, why=self.why, because=self.after)


class Kept(BaseModel, frozen=True):
    """A variable that was set before.

    ``origin`` is "environment" or the file that sets it; ``proposed`` is the value that ncclguard would have given it.
    """

    name: str
    value: str
    origin: str = "environment"
    proposed: str | None = None

    @property
    def text(self) -> Message:
        """The variable, where it is from, and what it is instead of."""
        setting = f"{self.name}={self.value}"
        origin = tr("environment", "setup") if self.origin == "environment" else self.origin
        if self.proposed in (None, self.value):
            return tr("{setting} (from {origin})", setting=setting, origin=origin)
        return tr("{setting} (from {origin}, instead of {value})", setting=setting, origin=origin, value=self.proposed)


class EnvironmentReport(BaseModel, frozen=True):
    """The outcome of :func:`ncclguard.setup_env`.

    ``set`` holds what ncclguard set, ``kept`` what was there before, ``translated`` the settings that carry the value
    of a deprecated name over to the new one (they are in ``set`` as well), ``wrong`` the findings and ``too_late`` what
    would have been set before ``init_process_group``.
    """

    versions: Versions
    profile: Profile
    interface: InterfaceChoice
    limits: Ladder
    set: tuple[Setting, ...] = ()
    kept: tuple[Kept, ...] = ()
    translated: tuple[tuple[str, str], ...] = ()
    wrong: tuple[Finding, ...] = ()
    too_late: tuple[Late, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether nothing is an error and nothing came too late."""
        return not self.too_late and not any(finding.severity == "error" for finding in self.wrong)

    @property
    def one_line(self) -> Message:
        """The line that rank 0 logs."""
        name = self.interface.name or tr("unknown", "setup")
        parts = [
            tr("interface {name} ({evidence})", name=name, evidence=self.interface.evidence),
            tr("profile {name}", name=self.profile.name),
            tr("{count} variables set, {number} kept", count=len(self.set), number=len(self.kept)),
            self.limits.one_line,
        ]
        for after in dict.fromkeys(setting.after for setting in self.too_late):
            names = ", ".join(setting.name for setting in self.too_late if setting.after == after)
            parts.append(tr("too late, {because}, for {some}", because=after, some=names))
        if self.wrong:
            parts.append(tr("wrong: {text}", text=joined(" | ", [finding.text for finding in self.wrong])))
        return joined("; ", parts)

    def __str__(self) -> str:
        versions, interface, profile = self.versions, self.interface, self.profile
        nccl = versions.nccl or tr("none ({text})", text=received(versions.nccl_source))
        reached = joined(": ", (interface.name or tr("unknown", "setup"), interface.evidence))
        lines = [tr("torch {torch}, NCCL {nccl}", torch=versions.torch, nccl=nccl).said(current())]
        lines.append(_row(tr("interface", "setup"), reached))
        lines += [_row("", note) for note in interface.notes]
        lines.append(_row(tr("profile", "setup"), joined(": ", (profile.name, profile.reason))))
        lines += [_row(tr("set", "setup"), joined(": ", (f"{one.name}={one.value}", one.why))) for one in self.set]
        lines += [_row(tr("kept", "setup"), one.text) for one in self.kept]
        lines += [_row(tr("too late", "setup"), one.text) for one in self.too_late]
        lines += [_row(_SEVERITY[one.severity], joined("; ", (one.detail, one.advice))) for one in self.wrong]
        return "\n".join([*lines, told("limits", "setup"), *(f"  {rung}" for rung in self.limits.rungs)])


def _row(head: str, text: str) -> str:
    return f"{_padded(say(head), 10)} {say(text)}"


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


# ----------------------------------------------------------------- the plan, in the names that the versions read

NcclDebug = Literal["warn", "info", "all"]

#: Entries of the flight recorder: enough for several steps of a large model.
RECORDER_ENTRIES = 16384

_DEBUG_SETTINGS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "warn": (("NCCL_DEBUG", "WARN", tr("names the peer of a connection that broke")),),
    "info": (
        ("NCCL_DEBUG", "INFO", tr("asked for")),
        ("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,ENV,NET", tr("what NCCL chose at start, without a line a collective")),
    ),
    "all": (
        ("NCCL_DEBUG", "INFO", tr("asked for")),
        ("NCCL_DEBUG_SUBSYS", "ALL", tr("asked for; logs every collective")),
    ),
}


def _interface(choice: InterfaceChoice) -> Sequence[tuple[str, str, str]]:
    if choice.name is None:
        return []
    settings = [
        ("NCCL_SOCKET_IFNAME", f"={choice.name}", choice.evidence),
        ("GLOO_SOCKET_IFNAME", choice.name, tr("the same for gloo, which carries the control traffic")),
    ]
    if choice.ipv6:
        settings.append(
            ("NCCL_SOCKET_FAMILY", "AF_INET6", tr("the master is reached from {address}", address=choice.address))
        )
    return settings


def _error_handling(ladder: Ladder) -> Sequence[tuple[str, str, str]]:
    settings = [
        (
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "3",
            tr("a hang outside the guard ends the process at its group's timeout"),
        ),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", tr("the flight recorder's entries are written when that happens")),
        ("TORCH_FR_BUFFER_SIZE", str(RECORDER_ENTRIES), tr("the flight recorder keeps the last collectives")),
    ]
    if ladder.heartbeat.seconds is not None:
        settings += [
            ("TORCH_NCCL_ENABLE_MONITORING", "1", tr("a watchdog that hangs is noticed")),
            (
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
                str(ladder.proposed_heartbeat),
                tr("more than the process-group timeout ({seconds:g} s)", seconds=ladder.process_group.seconds),
            ),
        ]
    return settings


def _deepspeed(ladder: Ladder, wanted: bool) -> Sequence[tuple[str, str, str]]:
    if not wanted:
        return []
    minutes = -(-int(ladder.process_group.seconds or 0) // 60)
    return [("DEEPSPEED_TIMEOUT", str(minutes), tr("the process-group timeout, in minutes, for DeepSpeed's own call"))]


def make_plan(
    choice: InterfaceChoice,
    profile: Profile,
    ladder: Ladder,
    versions: Versions,
    *,
    nccl_debug: NcclDebug = "warn",
    deepspeed: bool | None = None,
) -> tuple[Setting, ...]:
    """Return the settings, most important first. ``deepspeed=None`` includes DeepSpeed's where it is installed.

    Names are those of the installed versions; a setting that they have no name for is left out.
    """
    if deepspeed is None:
        deepspeed = importlib.util.find_spec("deepspeed") is not None
    wanted = [
        *_interface(choice),
        *profile.settings,
        ("NCCL_P2P_DISABLE", "0", tr("the default: GPUs of a host talk directly")),
        *_error_handling(ladder),
        *_DEBUG_SETTINGS[nccl_debug],
        *_deepspeed(ladder, deepspeed),
    ]
    plan = []
    for newest, value, why in wanted:
        name = name_for(newest, versions)
        if name is not None:
            plan.append(Setting(name=name, value=value, why=why))
    return tuple(plan)


def translate(environ: Mapping[str, str], versions: Versions) -> dict[str, tuple[str, str]]:
    """Return new names of which only the deprecated alias is set: new name to (old name, its value)."""
    found: dict[str, tuple[str, str]] = {}
    for variable in CATALOGUE.values():
        new = variable.replaced_by
        if new is None or new in environ or variable.name not in environ:
            continue
        if variable.is_deprecated(versions) and CATALOGUE[new].is_read(versions):
            found.setdefault(new, (variable.name, environ[variable.name]))
    return found


# ------------------------------------------------------------------------------------------------ carrying it out


@dataclass(frozen=True, slots=True)
class _Situation:
    """Everything the decision rests on, read once."""

    versions: Versions
    links: tuple[Link, ...]
    ports: tuple[Port, ...]
    choice: InterfaceChoice
    profile: Profile
    ladder: Ladder


def guard_deadline() -> float:
    """Return the longest time in seconds that a guarded collective may take by the current configuration."""
    config = current_config()
    return max(config.timeout or 0.0, config.timeout_eval, config.timeout_train, config.timeout_small)


def _read_situation(
    environ: Mapping[str, str],
    profile: str,
    process_group_timeout: float | None,
    launcher_timeout: float | None,
) -> _Situation:
    versions = detect_versions()
    links = read_links()
    ports = read_ports()
    return _Situation(
        versions=versions,
        links=links,
        ports=ports,
        choice=choose_interface(read_job(environ), links),
        profile=choose_profile(profile, ports, versions),
        ladder=compute_ladder(
            guard_deadline(),
            versions,
            environ,
            process_group_timeout=process_group_timeout,
            launcher_timeout=launcher_timeout,
        ),
    )


def process_group_exists() -> bool:
    """Return whether ``init_process_group`` has been called; does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def _late_after(name: str) -> str:
    """Return the event that makes setting a variable too late; "" for none."""
    if process_group_exists():  # also for DeepSpeed's variables: it uses an existing group as it is
        return tr("init_process_group has been called")
    read_by_deepspeed = CATALOGUE[name].read_at == "import deepspeed" and "deepspeed" in sys.modules
    return tr("deepspeed has been imported") if read_by_deepspeed else ""


def _findings(situation: _Situation, theirs: Mapping[str, str]) -> list[Finding]:
    """Return what is wrong with the variables that ncclguard did not set, and with the situation."""
    found = []
    choice = situation.choice
    if choice.trouble is not None:
        found.append(_finding("MASTER_ADDR", "error", choice.trouble, choice.advice or tr("check it")))
    if situation.profile.trouble is not None:
        advice = tr("see `ibstat` and `rdma link`, or choose another profile")
        found.append(_finding("NCCL_IB_HCA", "warning", situation.profile.trouble, advice))
    found += _family_finding(choice, situation.links)
    found += check_names(theirs, situation.versions)
    found += check_values(theirs, situation.versions)
    found += check_interfaces(theirs, choice, situation.links)
    found += check_harm(theirs, situation.ports)
    advice = tr(
        "proposed: process group {seconds:g} s, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={number}",
        seconds=situation.ladder.process_group.seconds or 0.0,
        number=situation.ladder.proposed_heartbeat,
    )
    return found + [_finding("limits", "error", problem, advice) for problem in situation.ladder.problems]


def _family_finding(choice: InterfaceChoice, links: tuple[Link, ...]) -> list[Finding]:
    """Warn if the interface's first address, which gloo gives its peers, is not the one that reaches the master."""
    link = next((link for link in links if link.name == choice.name), None)
    if link is None or choice.address is None or choice.kind == "loopback":
        return []
    first = next(iter(link.addresses), choice.address)
    if first == choice.address:
        return []
    detail = tr(
        "the master is reached from {address}, but gloo gives its peers the first address of {name}, {first}",
        address=choice.address,
        name=link.name,
        first=first,
    )
    advice = tr("make sure that the other hosts reach {address}, or remove that address", address=first)
    return [_finding("GLOO_SOCKET_IFNAME", "warning", detail, advice)]


def _apply(
    environ: MutableMapping[str, str],
    plan: tuple[Setting, ...],
    written: dict[str, str],
    conf: Mapping[str, tuple[str, str]],
    *,
    may_be_late: bool,
) -> tuple[list[Setting], list[Kept], list[Late]]:
    """Write the plan where nothing else is set; return what ncclguard set, what was kept and what came too late."""
    done: list[Setting] = []
    kept: list[Kept] = []
    late: list[Late] = []
    for setting in plan:
        name, value = setting.name, setting.value
        present = environ.get(name)
        if present is not None and written.get(name) != present:
            kept.append(Kept(name=name, value=present, proposed=value))
        elif present is None and name in conf:
            kept.append(Kept(name=name, value=conf[name][0], origin=conf[name][1], proposed=value))
        elif present == value:
            done.append(setting)
        elif may_be_late and (after := _late_after(name)):
            late.append(Late(name=name, value=value, why=setting.why, after=after))
        else:
            environ[name] = written[name] = value
            done.append(setting)
    return done, kept, late


def plan_environment(
    environ: MutableMapping[str, str],
    *,
    profile: ProfileName | str = "auto",
    process_group_timeout: float | None = None,
    launcher_timeout: float | None = None,
    nccl_debug: NcclDebug = "warn",
    deepspeed: bool | None = None,
    written: dict[str, str] | None = None,
) -> EnvironmentReport:
    """Do to a mapping what :func:`setup_env` does to the environment of this process; times are in seconds.

    Never "too late" when ``written`` is None: the mapping is then for processes that are yet to start.
    """
    live = written is not None
    written = {} if written is None else written
    theirs = {name: value for name, value in environ.items() if written.get(name) != value}
    situation = _read_situation(theirs, profile, process_group_timeout, launcher_timeout)
    plan = make_plan(
        situation.choice,
        situation.profile,
        situation.ladder,
        situation.versions,
        nccl_debug=nccl_debug,
        deepspeed=deepspeed,
    )
    carried = translate(theirs, situation.versions)
    plan = tuple(setting for setting in plan if setting.name not in carried) + tuple(
        Setting(name=new, value=value, why=tr("the value of the deprecated {name}", name=old))
        for new, (old, value) in sorted(carried.items())
    )
    done, kept, late = _apply(environ, plan, written, read_conf(theirs), may_be_late=live)
    planned = {setting.name for setting in plan}
    kept += [
        Kept(name=name, value=value) for name, value in sorted(theirs.items()) if watched(name) and name not in planned
    ]
    return EnvironmentReport(
        versions=situation.versions,
        profile=situation.profile,
        interface=situation.choice,
        limits=situation.ladder,
        set=tuple(done),
        kept=tuple(kept),
        translated=tuple((old, new) for new, (old, _) in sorted(carried.items())),
        wrong=tuple(_findings(situation, theirs)),
        too_late=tuple(late),
    )


@hinted
def setup_env(
    profile: ProfileName | str = "auto",
    *,
    process_group_timeout: float | timedelta | None = None,
    launcher_timeout: float | timedelta | None = None,
    nccl_debug: NcclDebug = "warn",
) -> EnvironmentReport:
    """Set the variables for interface, network, error handling and recorder; call it before ``init_process_group``.

    A variable that is already set, in the environment or in NCCL's files, is never overwritten, only checked.
    Calling it again changes nothing. After ``init_process_group`` it sets nothing, and the report says what came too
    late.

    ``profile`` is "auto", "infiniband", "roce" or "ethernet". ``process_group_timeout`` is what the program passes to
    ``init_process_group`` and ``launcher_timeout`` the launcher's limit, both in seconds or as ``timedelta``; without
    them a process-group timeout is computed (``report.limits.process_group_timeout``). ``nccl_debug`` is "warn", "info"
    or "all".

    Raises ValueError for an unknown profile or a time that is not positive, GuardConfigError for a wrong configuration.

    >>> report = setup_env()
    >>> report.limits.process_group_timeout > timedelta(seconds=report.limits.guard.seconds)
    True
    """
    with _lock:
        report = plan_environment(
            os.environ,
            profile=profile,
            process_group_timeout=seconds(process_group_timeout, "process_group_timeout"),
            launcher_timeout=seconds(launcher_timeout, "launcher_timeout"),
            nccl_debug=nccl_debug,
            written=_written,
        )
    if read_job(os.environ).is_rank_zero:
        _log.log(logging.INFO if report.ok and not report.wrong else logging.WARNING, "%s", say(report.one_line))
    return report


#: The name by which users of the original recipe know it.
setup_nccl_timeout_env = setup_env


#: Seconds of a process group beyond the guard's deadline: for the verdict (2 s), and ranks that arrive one by one.
PROCESS_GROUP_MARGIN = 120.0
#: Seconds of the heartbeat monitor beyond the watchdog's own end, which sleeps during the flight-recorder dump.
HEARTBEAT_MARGIN = 60.0


class Rung(BaseModel, frozen=True):
    """One limit in seconds. None: it does not exist, or nobody knows it; ``origin`` says which, or where it is from."""

    name: Prose
    seconds: float | None
    origin: Prose

    def said(self, language: str) -> str:
        """Return the limit as a row of a table, in a language."""
        figure = tr("none", "doctor").said(language) if self.seconds is None else f"{self.seconds:g} s"
        name, origin = (str(said(text, language)) for text in (self.name, self.origin))
        return f"{_padded(name, 22)} {' ' * (9 - cell_len(figure))}{figure}  {origin}"

    def __str__(self) -> str:
        return self.said(current())


class Ladder(BaseModel, frozen=True):
    """The four limits in the order in which they have to grow, and what is wrong with them."""

    guard: Rung
    process_group: Rung
    heartbeat: Rung
    launcher: Rung
    proposed_heartbeat: int

    @property
    def rungs(self) -> tuple[Rung, ...]:
        return (self.guard, self.process_group, self.heartbeat, self.launcher)

    @property
    def problems(self) -> tuple[str, ...]:
        """A sentence for each pair of limits in the wrong order; empty when the ladder holds."""
        known = [rung for rung in self.rungs if rung.seconds is not None]
        return tuple(
            tr(
                "the {upper} ({more}) must exceed the {lower} ({less})",
                upper=upper.name,
                more=joined(", ", (f"{upper.seconds:g} s", upper.origin)),
                lower=lower.name,
                less=joined(", ", (f"{lower.seconds:g} s", lower.origin)),
            )
            for lower, upper in itertools.pairwise(known)
            if upper.seconds is not None and lower.seconds is not None and upper.seconds <= lower.seconds
        )

    @property
    def process_group_timeout(self) -> timedelta:
        """The value for ``init_process_group(timeout=...)``."""
        return timedelta(seconds=self.process_group.seconds or 0.0)

    @property
    def one_line(self) -> Message:
        """The limits in one line."""
        none = tr("none", "doctor")
        figures = joined(" < ", (none if rung.seconds is None else f"{rung.seconds:g}" for rung in self.rungs))
        return tr("limits in s (guard < process group < heartbeat < launcher): {figures}", figures=figures)

    def said(self, language: str) -> str:
        """Return the limits as a table, in a language."""
        wrong = [tr("wrong: {text}", text=problem).said(language) for problem in self.problems]
        return "\n".join([*(rung.said(language) for rung in self.rungs), *wrong])

    def __str__(self) -> str:
        return self.said(current())


def _up_to_minutes(seconds: float) -> int:
    return math.ceil(seconds / 60.0) * 60


def _number(environ: Mapping[str, str], name: str) -> float | None:
    try:
        return float(environ[name])
    except (KeyError, ValueError):  # absent, or no number, which the check of the value reports
        return None


def _flag(environ: Mapping[str, str], name: str, default: bool) -> bool:
    value = environ.get(name, "").lower()
    return value in TRUE_WORDS if value in TRUE_WORDS | FALSE_WORDS else default


def _process_group(guard: float, given: float | None, environ: Mapping[str, str]) -> Rung:
    if given is not None:
        return Rung(name=tr("process-group timeout"), seconds=given, origin="init_process_group(timeout=...)")
    minutes = _number(environ, "DEEPSPEED_TIMEOUT")
    if minutes is not None:
        return Rung(name=tr("process-group timeout"), seconds=minutes * 60, origin=f"DEEPSPEED_TIMEOUT={minutes:g} min")
    return Rung(
        name=tr("process-group timeout"),
        seconds=_up_to_minutes(guard + PROCESS_GROUP_MARGIN),
        origin=tr("computed: pass it to init_process_group(timeout=...)"),
    )


def _heartbeat(proposed: int, environ: Mapping[str, str], versions: Versions) -> Rung:
    name = tr("heartbeat monitor")
    if _flag(environ, "TORCH_NCCL_BLOCKING_WAIT", False) or _flag(environ, "NCCL_BLOCKING_WAIT", False):
        return Rung(name=name, seconds=None, origin=tr("off: TORCH_NCCL_BLOCKING_WAIT is set"))
    if not within(versions.torch, "2.2", None):
        return Rung(name=name, seconds=None, origin=tr("off: torch before 2.2 has none"))
    if not _flag(environ, "TORCH_NCCL_ENABLE_MONITORING", True):
        return Rung(name=name, seconds=None, origin=tr("off: TORCH_NCCL_ENABLE_MONITORING=0"))
    given = _number(environ, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    if given is not None:
        return Rung(name=name, seconds=given, origin="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    return Rung(name=name, seconds=proposed, origin=tr("computed: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"))


def _launcher(given: float | None, environ: Mapping[str, str]) -> Rung:
    if given is not None:
        return Rung(name=tr("launcher"), seconds=given, origin=tr("given", "setup"))
    start, end = _number(environ, "SLURM_JOB_START_TIME"), _number(environ, "SLURM_JOB_END_TIME")
    if start is not None and end is not None and end > start:
        return Rung(name=tr("launcher"), seconds=end - start, origin=tr("time limit of the Slurm job"))
    return Rung(name=tr("launcher"), seconds=None, origin=tr("unknown: its limit has to exceed those above"))


def compute_ladder(
    guard_deadline: float,
    versions: Versions,
    environ: Mapping[str, str],
    *,
    process_group_timeout: float | None = None,
    launcher_timeout: float | None = None,
) -> Ladder:
    """Return the limits that hold, or that ``setup_env()`` proposes, for a longest guard deadline in seconds.

    >>> versions = Versions(torch="2.13.0", nccl="2.29.7", nccl_source="example")
    >>> print(compute_ladder(1800, versions, {}).one_line)
    limits in s (guard < process group < heartbeat < launcher): 1800 < 1920 < 2040 < none
    """
    process_group = _process_group(guard_deadline, process_group_timeout, environ)
    dump = _number(environ, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
    # Since torch 2.8 the watchdog sleeps four times the dump's time before it throws (ProcessGroupNCCL.cpp).
    sleeping = 4 * (15.0 if dump is None else dump / 1000.0) if within(versions.torch, "2.8", None) else 60.0
    proposed = _up_to_minutes((process_group.seconds or 0.0) + sleeping + HEARTBEAT_MARGIN)
    return Ladder(
        guard=Rung(
            name=tr("guard deadline"), seconds=guard_deadline, origin=tr("the longest of GuardConfig's timeouts")
        ),
        process_group=process_group,
        heartbeat=_heartbeat(proposed, environ, versions),
        launcher=_launcher(launcher_timeout, environ),
        proposed_heartbeat=proposed,
    )


SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Gid:
    """One address in a port's table: its index, type ("RoCE v2", "IB/RoCE v1", ...) and value."""

    index: int
    kind: str
    value: str

    @property
    def carries_ipv4(self) -> bool:
        """Return whether it is an IPv4-mapped address, which a routed network needs."""
        return self.value.startswith("0000:0000:0000:0000:0000:ffff:")


@dataclass(frozen=True, slots=True)
class Port:
    """One port. ``rate`` is in Gbit/s; ``layer`` is "InfiniBand" or "Ethernet" (RoCE, iWARP), else unusable by NCCL."""

    device: str
    number: int
    state: str
    physical_state: str
    layer: str
    rate: float | None
    netdev: str | None = None
    gids: tuple[Gid, ...] = ()

    @property
    def active(self) -> bool:
        """Return whether the subnet manager (or the Ethernet link) has brought it up."""
        return self.state == "ACTIVE"

    @property
    def roce(self) -> bool:
        return self.layer == "Ethernet"

    @property
    def name(self) -> str:
        """``device:port``, as ``NCCL_IB_HCA`` takes it."""
        return f"{self.device}:{self.number}"


def _gids(folder: Path) -> tuple[Gid, ...]:
    found = []
    entries = (folder / "gids").glob("*") if (folder / "gids").is_dir() else ()
    for entry in sorted(entries, key=lambda path: int(path.name)):
        value = read_file(entry).strip()  # empty for an unused entry, which cannot be read
        if value and value.strip("0:"):
            found.append(Gid(int(entry.name), read_file(folder / "gid_attrs" / "types" / entry.name).strip(), value))
    return tuple(found)


def _port(device: str, folder: Path) -> Port:
    rate = re.match(r"[\d.]+", read_file(folder / "rate").strip())
    return Port(
        device=device,
        number=int(folder.name),
        state=read_file(folder / "state").strip().partition(":")[2].strip(),
        physical_state=read_file(folder / "phys_state").strip().partition(":")[2].strip(),
        layer=read_file(folder / "link_layer").strip(),
        rate=float(rate.group()) if rate else None,
        netdev=read_file(folder / "gid_attrs" / "ndevs" / "0").strip() or None,
        gids=_gids(folder),
    )


def read_ports(sysfs: Path = SYSFS) -> tuple[Port, ...]:
    """Return all ports of all adapters of this host, by name; none where there is no RDMA hardware."""
    if not sysfs.is_dir():
        return ()
    return tuple(
        _port(device.name, folder)
        for device in sorted(sysfs.iterdir())
        for folder in sorted((device / "ports").glob("[0-9]*"), key=lambda path: int(path.name))
    )


ProfileName = Literal["auto", "infiniband", "roce", "ethernet"]
PROFILE_NAMES: tuple[str, ...] = get_args(ProfileName)


class Profile(BaseModel, frozen=True):
    """A network profile: its name, why it was taken, and the (variable, value, reason) it asks for."""

    name: str
    reason: Prose
    ports: tuple[str, ...] = ()
    settings: tuple[tuple[str, str, Prose], ...] = ()
    trouble: Prose | None = None


def compute_ports(ports: Sequence[Port], *, roce: bool) -> tuple[Port, ...]:
    """Return the active ports of one kind that carry the job: the fastest; slower ones serve storage or management."""
    active = [port for port in ports if port.active and port.layer == ("Ethernet" if roce else "InfiniBand")]
    fastest = max((port.rate or 0.0 for port in active), default=0.0)
    return tuple(port for port in active if (port.rate or 0.0) == fastest)


def _gid_for_roce(ports: Sequence[Port]) -> Gid | None:
    """Return the RoCE v2 address with an IPv4 that all ports have at one index, as NCCL takes one index for all."""
    common: set[int] | None = None
    for port in ports:
        indices = {gid.index for gid in port.gids if gid.kind == "RoCE v2" and gid.carries_ipv4}
        common = indices if common is None else common & indices
    if not common:
        return None
    return next(gid for gid in ports[0].gids if gid.index == min(common))


def _hca_settings(ports: Sequence[Port]) -> list[tuple[str, str, str]]:
    settings: list[tuple[str, str, str]] = [
        ("NCCL_IB_DISABLE", "0", tr("RDMA hardware is there and is to be used")),
        ("NCCL_IB_TIMEOUT", "22", tr("about 2 minutes of tries, so that a switch that reroutes does not end the job")),
        ("NCCL_IB_RETRY_CNT", "7", tr("the most tries the hardware takes")),
    ]
    if ports:
        names = ",".join(port.name for port in ports)
        settings.insert(1, ("NCCL_IB_HCA", f"={names}", tr("the active ports, by exact name")))
    return settings


def _infiniband(ports: Sequence[Port], reason: str) -> Profile:
    used = compute_ports(ports, roce=False)
    trouble = None if used else tr("profile infiniband, but no InfiniBand port is active on this host")
    names = tuple(port.name for port in used)
    return Profile(name="infiniband", reason=reason, ports=names, settings=tuple(_hca_settings(used)), trouble=trouble)


def _roce(ports: Sequence[Port], reason: str, versions: Versions) -> Profile:
    used = compute_ports(ports, roce=True)
    settings = _hca_settings(used)
    trouble = None if used else tr("profile roce, but no RoCE port is active on this host")
    nccl = versions.nccl_for_names
    if used and nccl is not None and not within(nccl, "2.21", None):
        # NCCL before 2.21 takes index 0, a RoCE v1 address that no router forwards; later ones look for a v2 address.
        gid = _gid_for_roce(used)
        if gid is None:
            trouble = tr("no RoCE v2 address with an IPv4 in it is at the same index of all ports")
        else:
            settings.append(
                (
                    "NCCL_IB_GID_INDEX",
                    str(gid.index),
                    tr("the {kind} address; NCCL {version} takes index 0", kind=gid.kind, version=nccl),
                )
            )
    names = tuple(port.name for port in used)
    return Profile(name="roce", reason=reason, ports=names, settings=tuple(settings), trouble=trouble)


def _ethernet(ports: Sequence[Port], reason: str, *, named: bool) -> Profile:
    unused = [port.name for port in ports if port.active and port.layer in ("InfiniBand", "Ethernet")]
    disable = ("1", tr("profile ethernet leaves {some} aside", some=", ".join(unused))) if named and unused else None
    value, why = disable or ("0", tr("the default: RDMA is used where it is there"))
    return Profile(
        name="ethernet",
        reason=reason,
        settings=(
            ("NCCL_IB_DISABLE", value, why),
            ("NCCL_BUFFSIZE", "8388608", tr("8 MiB a channel keep a TCP connection with latency full")),
        ),
    )


def choose_profile(name: str, ports: Sequence[Port], versions: Versions) -> Profile:
    """Return the profile of a name, or for "auto" by the active ports. Raises ValueError for an unknown name."""
    if name not in PROFILE_NAMES:
        raise ValueError(
            told("profile {name} does not exist; it is one of {some}", name=repr(name), some=", ".join(PROFILE_NAMES))
        )
    if name == "infiniband":
        return _infiniband(ports, tr("asked for"))
    if name == "roce":
        return _roce(ports, tr("asked for"), versions)
    if name == "ethernet":
        return _ethernet(ports, tr("asked for"), named=True)
    fast = compute_ports(ports, roce=False)
    if fast:
        return _infiniband(ports, tr("{count} active InfiniBand ports", count=len(fast)))
    fast = compute_ports(ports, roce=True)
    if fast:
        return _roce(ports, tr("{count} active RoCE ports", count=len(fast)), versions)
    inactive = ", ".join(f"{port.name} {port.state or 'unknown'} {port.layer}" for port in ports)
    reason = tr("no usable RDMA port ({some})", some=inactive) if inactive else tr("no RDMA hardware")
    return _ethernet(ports, reason, named=False)
