"""The code inside a rank that `run_ranks` has started: its entry, and its reports to the process that started it.

`python -m ncclguard.faults MODULE[=FILE] FUNCTION JSON_ARGUMENTS` calls one function. `python rank.py FOLDER COMMAND`,
by the file's path and with the standard library only, runs one rank beneath torchrun and writes down how that rank
ended: torchrun itself keeps neither time nor signal of each rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

REPORT_VARIABLE = "_NCCLGUARD_REPORT_DIR"
PATH_VARIABLE = "_NCCLGUARD_PARENT_PATH"  # the import path of the process that called run_ranks


def report(**values: Any) -> None:
    """Hand JSON-able values to the process that called ``run_ranks``; they survive a SIGKILL right after the call.

    Raises TypeError for a value that JSON cannot carry. Outside ``run_ranks`` the values are printed, so that a program
    also runs by hand.

    >>> report(loss=0.5)
    report of rank 0: {"loss": 0.5}
    """
    line = json.dumps(values)
    rank = os.environ.get("RANK", "0")
    directory = os.environ.get(REPORT_VARIABLE)
    if directory is None:
        print(f"report of rank {rank}: {line}", flush=True)
        return
    descriptor = os.open(report_file(Path(directory), int(rank)), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode() + b"\n")  # one write, so that no other thread's report comes in between
    finally:
        os.close(descriptor)


def wait_until_told(word: str, seconds: float = 60.0) -> None:
    """Block until the parent called ``job.tell(word)``; TimeoutError after ``seconds``, RuntimeError outside a job."""
    directory = os.environ.get(REPORT_VARIABLE)
    if directory is None:
        raise RuntimeError(f"nobody can tell {word!r}: this process was not started by faults.start_ranks; start it so")
    started = time.monotonic()
    file = word_file(Path(directory), word)
    while not file.exists():
        waited = time.monotonic() - started
        if waited > seconds:
            raise TimeoutError(
                f"the parent did not call tell({word!r}) within {seconds:g} s; check that the test reaches it"
            )
        time.sleep(min(0.05, 0.005 + waited / 50))  # longer and longer: dozens of ranks may wait


def report_file(directory: Path, rank: int) -> Path:
    """Return the file of a rank's reports, one JSON object a line."""
    return directory / f"rank{rank}.reports"


def word_file(directory: Path, word: str) -> Path:
    """Return the file whose existence says that the parent has told ``word``."""
    return directory / f"told.{word}"


def read_reports(directory: Path, rank: int) -> dict[str, Any]:
    """Read all values that a rank has reported so far; a later value of a key replaces an earlier one.

    A line without its end is still being written: a file grows page by page under a reader.
    """
    values: dict[str, Any] = {}
    file = report_file(directory, rank)
    if file.exists():
        whole, _, _ = file.read_text().rpartition("\n")
        for line in whole.splitlines():
            values.update(json.loads(line))
    return values


def load(module: str) -> ModuleType:
    """Import a module by its name, or by ``name=file`` where the name alone may not be importable here."""
    name, _, file = module.partition("=")
    if not file:
        return importlib.import_module(name)
    try:
        found = importlib.import_module(name)
        if found.__file__ is not None and os.path.samefile(found.__file__, file):
            return found
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module was found; something that it imports is missing
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file; give run_ranks a .py file")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def main() -> None:
    """Call the function with the arguments; what it returns, unless None, is reported as ``returned``."""
    module, name, arguments = sys.argv[1:]
    sys.path.extend(entry for entry in json.loads(os.environ.get(PATH_VARIABLE, "[]")) if entry not in sys.path)
    function: Callable[..., Any] | Any = load(module)
    for part in name.split("."):
        function = getattr(function, part)
    value = function(*json.loads(arguments))
    if value is not None:
        report(returned=value)


def supervise(directory: str, command: list[str]) -> int:
    """Run a rank with its output in ``rank<r>.output``, write down its end and the time, and end in the same way."""
    base = os.path.join(directory, f"rank{os.environ['RANK']}")
    with open(f"{base}.output", "ab") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun signals the whole group: the rank decides how it ends
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
    sys.exit(supervise(sys.argv[1], sys.argv[2:]))
