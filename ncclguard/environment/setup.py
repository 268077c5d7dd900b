"""``setup_env()``: put the environment in order before ``init_process_group``, and report what was done."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ncclguard.config import current_config, seconds
from ncclguard.environment import checks
from ncclguard.environment.catalogue import CATALOGUE, name_for
from ncclguard.environment.checks import Finding
from ncclguard.environment.interface import InterfaceChoice, choose_interface, read_job
from ncclguard.environment.limits import Ladder, compute_ladder
from ncclguard.environment.nccl_names import read_conf
from ncclguard.environment.network import Link, read_links
from ncclguard.environment.profiles import Port, Profile, ProfileName, choose_profile, read_ports
from ncclguard.environment.versions import Versions, detect_versions

_log = logging.getLogger("ncclguard.environment")

# What earlier calls in this process wrote, so that a second call tells its own values from the user's.
_written: dict[str, str] = {}
_lock = threading.Lock()

# ----------------------------------------------------------------------------------------------------- the report


class Setting(BaseModel):
    """A variable with the value it was given, and why."""

    model_config = ConfigDict(frozen=True)

    name: str
    value: str
    why: str


class Kept(BaseModel):
    """A variable that was set before.

    ``origin`` is "environment" or the file that sets it; ``proposed`` is the value that ncclguard would have given it.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    value: str
    origin: str = "environment"
    proposed: str | None = None


class EnvironmentReport(BaseModel):
    """The outcome of :func:`ncclguard.setup_env`.

    ``set`` holds what ncclguard set, ``kept`` what was there before, ``translated`` the settings that carry the value
    of a deprecated name over to the new one (they are in ``set`` as well), ``wrong`` the findings and ``too_late`` what
    would have been set before ``init_process_group``.
    """

    model_config = ConfigDict(frozen=True)

    versions: Versions
    profile: Profile
    interface: InterfaceChoice
    limits: Ladder
    set: tuple[Setting, ...] = ()
    kept: tuple[Kept, ...] = ()
    translated: tuple[tuple[str, str], ...] = ()
    wrong: tuple[Finding, ...] = ()
    too_late: tuple[Setting, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is an error and nothing came too late."""
        return not self.too_late and not any(finding.severity == "error" for finding in self.wrong)

    @property
    def one_line(self) -> str:
        """The line that rank 0 logs."""
        parts = [
            f"interface {self.interface.name or 'unknown'} ({self.interface.evidence})",
            f"profile {self.profile.name}",
            f"{len(self.set)} variables set, {len(self.kept)} kept",
            self.limits.one_line,
        ]
        if self.too_late:
            names = ", ".join(setting.name for setting in self.too_late)
            parts.append(f"too late, init_process_group has been called, for {names}")
        if self.wrong:
            parts.append("wrong: " + " | ".join(str(finding) for finding in self.wrong))
        return "; ".join(parts)

    def __str__(self) -> str:
        nccl = self.versions.nccl or f"none ({self.versions.nccl_source})"
        lines = [
            f"torch {self.versions.torch}, NCCL {nccl}",
            f"interface  {self.interface.name or 'unknown'}: {self.interface.evidence}",
            *(f"           {note}" for note in self.interface.notes),
            f"profile    {self.profile.name}: {self.profile.reason}",
        ]
        lines += [f"set        {entry.name}={entry.value}: {entry.why}" for entry in self.set]
        lines += [_kept_line(entry) for entry in self.kept]
        lines += [f"too late   {entry.name}={entry.value}: {entry.why}" for entry in self.too_late]
        lines += [f"{finding.severity:<10} {finding.detail}; {finding.advice}" for finding in self.wrong]
        return "\n".join([*lines, "limits", *(f"  {rung}" for rung in self.limits.rungs)])


def _kept_line(entry: Kept) -> str:
    proposed = f", instead of {entry.proposed}" if entry.proposed not in (None, entry.value) else ""
    return f"kept       {entry.name}={entry.value} (from {entry.origin}{proposed})"


# ----------------------------------------------------------------- the plan, in the names that the versions read

NcclDebug = Literal["warn", "info", "all"]

#: Entries of the flight recorder: enough for several steps of a large model.
RECORDER_ENTRIES = 16384

_DEBUG_SETTINGS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "warn": (("NCCL_DEBUG", "WARN", "names the peer of a connection that broke"),),
    "info": (
        ("NCCL_DEBUG", "INFO", "asked for"),
        ("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,ENV,NET", "what NCCL chose at start, without a line a collective"),
    ),
    "all": (
        ("NCCL_DEBUG", "INFO", "asked for"),
        ("NCCL_DEBUG_SUBSYS", "ALL", "asked for; logs every collective"),
    ),
}


def _interface(choice: InterfaceChoice) -> list[tuple[str, str, str]]:
    if choice.name is None:
        return []
    settings = [
        ("NCCL_SOCKET_IFNAME", f"={choice.name}", choice.evidence),
        ("GLOO_SOCKET_IFNAME", choice.name, "the same for gloo, which carries the control traffic"),
    ]
    if choice.ipv6:
        settings.append(("NCCL_SOCKET_FAMILY", "AF_INET6", f"the master is reached from {choice.address}"))
    return settings


def _error_handling(ladder: Ladder) -> list[tuple[str, str, str]]:
    settings = [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "a hang outside the guard ends the process at its group's timeout"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "the flight recorder's entries are written when that happens"),
        ("TORCH_FR_BUFFER_SIZE", str(RECORDER_ENTRIES), "the flight recorder keeps the last collectives"),
    ]
    if ladder.heartbeat.seconds is not None:
        settings += [
            ("TORCH_NCCL_ENABLE_MONITORING", "1", "a watchdog that hangs is noticed"),
            (
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
                str(ladder.proposed_heartbeat),
                f"more than the process-group timeout ({ladder.process_group.seconds:g} s)",
            ),
        ]
    return settings


def _deepspeed(ladder: Ladder, wanted: bool) -> list[tuple[str, str, str]]:
    if not wanted:
        return []
    minutes = -(-int(ladder.process_group.seconds or 0) // 60)
    return [("DEEPSPEED_TIMEOUT", str(minutes), "the process-group timeout, in minutes, for DeepSpeed's own call")]


def make_plan(
    choice: InterfaceChoice,
    profile: Profile,
    ladder: Ladder,
    versions: Versions,
    *,
    nccl_debug: NcclDebug = "warn",
    deepspeed: bool | None = None,
) -> tuple[Setting, ...]:
    """The settings, most important first. ``deepspeed=None`` includes DeepSpeed's where it is installed.

    Names are those of the installed versions; a setting that they have no name for is left out.
    """
    if deepspeed is None:
        deepspeed = importlib.util.find_spec("deepspeed") is not None
    wanted = [
        *_interface(choice),
        *profile.settings,
        ("NCCL_P2P_DISABLE", "0", "the default: GPUs of a host talk directly"),
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
    """New names whose deprecated alias alone is set: new name to (old name, its value)."""
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
    """The longest time in seconds that a guarded collective may take by the current configuration."""
    config = current_config()
    if config.timeout is not None:
        return max(config.timeout, config.timeout_eval, config.timeout_train, config.timeout_small)
    return max(config.timeout_eval, config.timeout_train, config.timeout_small)


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
    """Whether ``init_process_group`` has been called; does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def _is_late(name: str) -> bool:
    if CATALOGUE[name].read_at == "import deepspeed" and "deepspeed" in sys.modules:
        return True
    return process_group_exists()  # DeepSpeed takes a group that exists as it is


def _findings(situation: _Situation, theirs: Mapping[str, str]) -> list[Finding]:
    """What is wrong with the variables that ncclguard did not set, and with the situation."""
    found = []
    choice = situation.choice
    if choice.trouble is not None:
        found.append(
            Finding(name="MASTER_ADDR", severity="error", detail=choice.trouble, advice=choice.advice or "check it")
        )
    if situation.profile.trouble is not None:
        found.append(
            Finding(
                name="NCCL_IB_HCA",
                severity="warning",
                detail=situation.profile.trouble,
                advice="see `ibstat` and `rdma link`, or choose another profile",
            )
        )
    found += _family_finding(choice, situation.links)
    found += checks.check_names(theirs, situation.versions)
    found += checks.check_values(theirs, situation.versions)
    found += checks.check_interfaces(theirs, choice, situation.links)
    found += checks.check_harm(theirs, situation.ports)
    found += [
        Finding(
            name="limits",
            severity="error",
            detail=problem,
            advice=f"proposed: process group {situation.ladder.process_group.seconds:g} s, "
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={situation.ladder.proposed_heartbeat}",
        )
        for problem in situation.ladder.problems
    ]
    return found


def _family_finding(choice: InterfaceChoice, links: tuple[Link, ...]) -> list[Finding]:
    """gloo gives its peers the first address of the interface, IPv4 before IPv6, and cannot be told otherwise."""
    link = next((link for link in links if link.name == choice.name), None)
    if link is None or choice.address is None or choice.kind == "loopback":
        return []
    first = next(iter(link.addresses), choice.address)
    if first == choice.address:
        return []
    return [
        Finding(
            name="GLOO_SOCKET_IFNAME",
            severity="warning",
            detail=f"the master is reached from {choice.address}, but gloo gives its peers the first address of "
            f"{link.name}, {first}",
            advice=f"make sure that the other hosts reach {first}, or remove that address",
        )
    ]


def _apply(
    environ: MutableMapping[str, str],
    plan: tuple[Setting, ...],
    written: dict[str, str],
    conf: Mapping[str, tuple[str, str]],
    *,
    may_be_late: bool,
) -> tuple[list[Setting], list[Kept], list[Setting]]:
    """Writes the plan where nothing else is set; returns what ncclguard set, what was kept and what came too late."""
    done: list[Setting] = []
    kept: list[Kept] = []
    late: list[Setting] = []
    for setting in plan:
        name, value = setting.name, setting.value
        present = environ.get(name)
        if present is not None and written.get(name) != present:
            kept.append(Kept(name=name, value=present, proposed=value))
        elif present is None and name in conf:
            kept.append(Kept(name=name, value=conf[name][0], origin=conf[name][1], proposed=value))
        elif present == value:
            done.append(setting)
        elif may_be_late and _is_late(name):
            late.append(setting)
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
    """Does to a mapping what :func:`setup_env` does to the environment of this process; times are in seconds.

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
        Setting(name=new, value=value, why=f"the value of the deprecated {old}")
        for new, (old, value) in sorted(carried.items())
    )
    done, kept, late = _apply(environ, plan, written, read_conf(theirs), may_be_late=live)
    planned = {setting.name for setting in plan}
    kept += [
        Kept(name=name, value=value)
        for name, value in sorted(theirs.items())
        if checks.watched(name) and name not in planned
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


def setup_env(
    profile: ProfileName | str = "auto",
    *,
    process_group_timeout: float | timedelta | None = None,
    launcher_timeout: float | timedelta | None = None,
    nccl_debug: NcclDebug = "warn",
) -> EnvironmentReport:
    """Sets the variables for interface, network, error handling and recorder; call it before ``init_process_group``.

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
        _log.log(logging.INFO if report.ok and not report.wrong else logging.WARNING, "%s", report.one_line)
    return report


#: The name that the users of the original recipe know.
setup_nccl_timeout_env = setup_env
