"""Runs one rank beneath torchrun and writes down how it ended: torchrun itself keeps neither time nor signal of each.

Standard library only, run by its path: ``python supervise.py DIRECTORY COMMAND...``. It ends the way its child ended.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time


def main() -> int:
    """Run the command with its output in ``rank<r>.output``; ``rank<r>.ended`` gets its return code and the time."""
    directory, command = sys.argv[1], sys.argv[2:]
    base = os.path.join(directory, f"rank{os.environ['RANK']}")
    with open(f"{base}.output", "ab") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # torchrun signals the whole group: the child decides, this one records
    write(f"{base}.pid", f"{child.pid}")
    code = child.wait()
    write(f"{base}.ended", f"{code} {time.monotonic()}")  # CLOCK_MONOTONIC is one clock for all processes of a host
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def write(path: str, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    with open(f"{path}.part", "w") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    sys.exit(main())
