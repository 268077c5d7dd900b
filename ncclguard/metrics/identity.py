"""Which process of which job this is."""

from __future__ import annotations

import os
import re
import socket

import torch.distributed as dist

#: Variables that name a job, the first that is set counts; a launcher's or scheduler's.
JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PBS_JOBID", "LSB_JOBID")


def host() -> str:
    """This machine's name."""
    return socket.gethostname()


def rank() -> int:
    """The global rank; by RANK before `init_process_group`, 0 where nothing says."""
    if initialised():
        return dist.get_rank()
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def world_size() -> int:
    """The number of ranks; by WORLD_SIZE before `init_process_group`, 1 where nothing says."""
    if initialised():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


def initialised() -> bool:
    """Whether there is a process group, so that rank and size are known."""
    return dist.is_available() and dist.is_initialized()


def job_name(given: str | None = None) -> str:
    """A name that all ranks of the job on a host find by themselves: given, the scheduler's, else by the master's port.

    Only letters, digits, `.`, `_` and `-`, because it is part of a file name. Raises ValueError for a given name with
    others.
    """
    if given is not None:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,47}", given):
            raise ValueError(f"job is {given!r}: give 1 to 48 letters, digits, '.', '_' or '-', not beginning with '.'")
        return given
    for variable in JOB_VARIABLES:
        text = re.sub(r"[^A-Za-z0-9_-]", "-", os.environ.get(variable, ""))
        if text and text != "none":  # torchrun's run id when nobody gave one
            return text[:48]
    port = os.environ.get("MASTER_PORT", "")
    return f"port{port}" if port.isdecimal() else f"pid{os.getpid()}"
