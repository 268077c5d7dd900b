"""The files from which NCCL takes variables that the environment does not have (``src/misc/param.cc`` of NCCL)."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

SYSTEM_FILE = Path("/etc/nccl.conf")


def conf_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The files in the order in which NCCL reads them; the first that has a name wins."""
    named = environ.get("NCCL_CONF_FILE")
    if named:
        return (Path(named), SYSTEM_FILE)
    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a container's user without an entry: NCCL skips the file too
        return (SYSTEM_FILE,)
    return (home / ".nccl.conf", SYSTEM_FILE)


def read_conf(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The variables set in these files: name to (value, file). Unreadable files count as absent, as for NCCL."""
    found: dict[str, tuple[str, str]] = {}
    for path in conf_files(environ):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                found.setdefault(name, (value, str(path)))
    return found
