"""What ``setup_env()`` would like to see in the environment, in the names that the installed versions read."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Literal

from ncclguard.environment.catalogue import CATALOGUE, name_for
from ncclguard.environment.interface import InterfaceChoice
from ncclguard.environment.limits import Ladder
from ncclguard.environment.profiles import Profile
from ncclguard.environment.report import Setting
from ncclguard.environment.versions import Versions

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
