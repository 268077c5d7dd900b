"""The one catalogue of environment variables: what the code sets, what the docs list and what ``doctor`` checks.

Facts come from the source and the binaries of the versions named: torch wheels 2.2 to 2.13 (strings, and the header
``torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp`` that every wheel carries), NCCL source tags 2.3.5 to 2.30.7.
"""

from __future__ import annotations

import difflib

from ncclguard.environment.nccl_names import NCCL_NAMES, NEWEST_READ
from ncclguard.environment.variable import Kind, Reader, Variable
from ncclguard.environment.variables_nccl import NCCL_VARIABLES
from ncclguard.environment.variables_torch import TORCH_VARIABLES
from ncclguard.environment.versions import Versions

#: Names that are recommended in public and that nothing reads, with what does the job instead.
UNREAD_VARIABLES: tuple[Variable, ...] = tuple(
    Variable(name, Reader.NOTHING, sentence, source, instead=instead)
    for name, sentence, source, instead in (
        (
            "NCCL_TIMEOUT",
            "Nothing reads this name: it is in no NCCL from 2.3.5 to 2.30.7 and in no torch from 2.0 to 2.13.",
            "source of 62 NCCL tags; strings of the torch 2.0 to 2.13 and libnccl 2.29.7 binaries",
            "init_process_group(timeout=timedelta(seconds=...)) for torch, NCCLGUARD_TIMEOUT for guarded collectives",
        ),
        (
            "NCCL_TIMEOUT_MINS",
            "Nothing reads this name.",
            "source of 62 NCCL tags; strings of the torch 2.13 and libnccl 2.29.7 binaries",
            "init_process_group(timeout=timedelta(minutes=...)) for torch, NCCLGUARD_TIMEOUT for guarded collectives",
        ),
        (
            "TORCH_NCCL_TIMEOUT",
            "Nothing reads this name.",
            "strings of the torch 2.13 binaries",
            "init_process_group(timeout=timedelta(seconds=...))",
        ),
        (
            "GLOO_TIMEOUT",
            "Nothing reads this name.",
            "strings of the torch 2.13 binaries",
            "init_process_group(timeout=timedelta(seconds=...)) or new_group(timeout=...)",
        ),
        (
            "TORCH_DISTRIBUTED_TIMEOUT",
            "Nothing reads this name.",
            "strings and Python files of torch 2.13",
            "init_process_group(timeout=timedelta(seconds=...))",
        ),
    )
)

DEEPSPEED_VARIABLES: tuple[Variable, ...] = (
    Variable(
        "DEEPSPEED_TIMEOUT",
        Reader.DEEPSPEED,
        "Time limit in minutes, not seconds, of the process group that deepspeed.init_distributed creates.",
        "DeepSpeed, deepspeed/constants.py (since October 2023; default 30, and 10 since August 2026)",
        default="10 or 30",
        unit="minutes",
        kind=Kind.INTEGER,
        low=1,
        read_at="import deepspeed",
    ),
)

#: Every documented variable by name.
CATALOGUE: dict[str, Variable] = {
    variable.name: variable for variable in (*TORCH_VARIABLES, *NCCL_VARIABLES, *DEEPSPEED_VARIABLES, *UNREAD_VARIABLES)
}

#: Names with these beginnings are looked at when the environment is checked.
WATCHED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "TORCH_GLOO_")


def lookup(name: str) -> Variable | None:
    """The entry of a name; for an NCCL variable that is not described here, one with its versions only."""
    known = CATALOGUE.get(name)
    if known is not None or name not in NCCL_NAMES:
        return known
    since, until = NCCL_NAMES[name]
    return Variable(
        name,
        Reader.NCCL,
        "An NCCL setting that ncclguard neither sets nor describes.",
        f"NCCL source, tags 2.3.5 to {NEWEST_READ}",
        since=since,
        until=until,
        read_at="first NCCL communicator",
    )


def name_for(name: str, versions: Versions) -> str | None:
    """The name under which the installed versions read what the newest ones call ``name``; None when none does.

    >>> name_for("TORCH_FR_BUFFER_SIZE", Versions(torch="2.7.0", nccl=None, nccl_source="test"))
    'TORCH_NCCL_TRACE_BUFFER_SIZE'
    """
    variable = CATALOGUE[name]
    if variable.is_read(versions) is not False:
        return name
    for alias in CATALOGUE.values():
        if alias.replaced_by == name and alias.is_read(versions):
            return alias.name
    return None


def closest(name: str, versions: Versions) -> str | None:
    """The name that is read and looks most like this one (a misspelling), or None."""
    candidates = [known for known in (*CATALOGUE, *NCCL_NAMES) if (entry := lookup(known)) and entry.is_read(versions)]
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.85)
    return matches[0] if matches else None
