"""``setup_env()``: put the environment in order before ``init_process_group``, and say what was done."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta

from ncclguard.config import current_config, seconds
from ncclguard.environment import checks
from ncclguard.environment.catalogue import CATALOGUE
from ncclguard.environment.infiniband import Port, read_ports
from ncclguard.environment.interface import InterfaceChoice, choose_interface
from ncclguard.environment.job import read_job
from ncclguard.environment.limits import Ladder, compute_ladder
from ncclguard.environment.links import Link, read_links
from ncclguard.environment.nccl_conf import read_conf
from ncclguard.environment.plan import NcclDebug, make_plan, translate
from ncclguard.environment.profiles import Profile, ProfileName, choose_profile
from ncclguard.environment.report import EnvironmentReport, Finding, Kept, Setting
from ncclguard.environment.versions import Versions, detect_versions

_log = logging.getLogger("ncclguard.environment")

# What earlier calls in this process wrote, so that a second call tells its own values from the user's.
_written: dict[str, str] = {}
_lock = threading.Lock()


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
