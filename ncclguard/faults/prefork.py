"""Starts the ranks of one job as forks of a process that has imported torch, which takes a second or more, once for all.

Run by its path: ``python prefork.py DIRECTORY RANKS MODULE FUNCTION JSON_ARGUMENTS``, where RANKS is a JSON list of the variables that each rank
has of its own. It must not import ncclguard, which is off in forks of a rank. Keeps the same files as supervise.py.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time

PRELOADED = ("torch.distributed", "numpy", "psutil", "pydantic", "pydantic_settings")
#: In a job's environment: further modules, separated by blanks, for ranks that all import something slow.
PRELOAD_VARIABLE = "_NCCLGUARD_PRELOAD"


def main() -> None:
    """Fork the ranks, write down how each ends, and end with the last; in a fork: run the function and end like any program."""
    directory, ranks, *function = sys.argv[1:]
    sys.path[0] = ""
    for module in (*PRELOADED, *os.environ.get(PRELOAD_VARIABLE, "").split()):
        importlib.import_module(module)
    children: dict[int, str] = {}
    for own in json.loads(ranks):
        base = os.path.join(directory, f"rank{own['RANK']}")
        pid = os.fork()
        if pid == 0:
            become_rank(base, own)
            sys.argv = ["ncclguard.faults", *function]
            runpy.run_module("ncclguard.faults", run_name="__main__", alter_sys=True)
            return
        write(f"{base}.pid", f"{pid}")
        children[pid] = base
    while children:
        pid, status = os.wait()
        if pid in children:
            code = os.waitstatus_to_exitcode(status)
            write(f"{children.pop(pid)}.ended", f"{code} {time.monotonic()}")


def become_rank(base: str, own: dict[str, str]) -> None:
    """A session, an output file and variables of this rank's own."""
    os.setsid()
    output = os.open(f"{base}.output", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.update(own)


def write(path: str, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    with open(f"{path}.part", "w") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    main()
