"""`ncclguard drill --fault KIND --rank R -- COMMAND ...`: inject a fault into a
real run and see what the job makes of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ncclguard.config import GuardConfig
from ncclguard.errors import GuardConfigError
from ncclguard.faults import record
from ncclguard.faults.fault import PARAMETERS, PERMISSION, VARIABLE, Fault, parse
from ncclguard.faults.verdict import Verdict, judge, read_events

USAGE: Final = 2
#: Seconds between SIGTERM and SIGKILL for a command that has not ended at the timeout.
_GRACE: Final = 10.0
#: The built-in job: its ranks, steps and elements, and how long a lasting fault outlasts its limit, in seconds.
_RANKS, _NUMEL, _LONGER = 4, 100_000, 4.0
#: Its steps after the one that is struck; while a partition lasts and TCP finds back, several of them fail.
_STEPS, _STEPS_OF_PARTITION = 4, 9
#: Where the fault strikes when nobody says; a watched job has set its model up by then.
_OPERATIONS: Final = range(2, 9)
_COLLECTIVES: Final = range(10, 17)
_SCHEMA_VERSION: Final = 1


@dataclass(frozen=True)
class Ended:
    """How the job came to its end, in words, and after how many seconds."""

    text: str
    seconds: float


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    made = argparse.ArgumentParser(
        prog="ncclguard drill",
        usage="ncclguard drill --fault KIND [--rank R] [options] [-- COMMAND ...]",
        description="Inject a fault into one rank of a real run, without changing the program, and print what happened, how long "
        "until everyone knew, who was named and whether the job went on. Without a command a small built-in job is run.",
        epilog=f"Refuses to run unless {PERMISSION}=1 is set. Exit code 0 when the struck rank was named by all others (or the "
        "fault was over in time), 1 when not, 2 for a wrong call.",
    )
    made.add_argument("--fault", required=True, choices=sorted(PARAMETERS), help="what happens to the rank")
    made.add_argument("--rank", type=int, help="the global rank that is struck (built-in job: by the seed)")
    made.add_argument("--op", type=int, help="its guarded operation at which it strikes, from 0 (default: by the seed)")
    made.add_argument(
        "--raw", action="store_true", help="--op counts the collectives of the default group, in a job under watch()"
    )
    made.add_argument("--seconds", type=float, help="how long late, stop, gil and partition last")
    made.add_argument("--of", choices=("shape", "dtype"), help="what differs in a mismatch")
    made.add_argument("--seed", type=int, default=0, help="chooses what is not given; 0 by default")
    made.add_argument("--limit", type=float, default=5.0, help="time limit of the built-in job's collectives, in s")
    made.add_argument("--ranks", type=int, default=_RANKS, help="ranks of the built-in job")
    made.add_argument("--timeout", type=float, default=900.0, help="end the job after this many seconds")
    made.add_argument(
        "--json", metavar="FILE", help="write the findings as JSON too; - for stdout, which then holds nothing else"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one drill; returns 0 when it went as it should, 1 when not, 2 for a wrong call or without permission."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    arguments, command = parser().parse_args(words[:at]), words[at + 1 :]
    if os.environ.get(PERMISSION) != "1":
        print(
            f"ncclguard drill: a drill breaks the job on purpose, and {PERMISSION} is not 1; set {PERMISSION}=1 where that may "
            "happen, and never in production",
            file=sys.stderr,
        )
        return USAGE
    try:
        fault, reports = chosen(arguments, bool(command)), _report_folder()
    except GuardConfigError as error:
        print(f"ncclguard drill: {error}", file=sys.stderr)
        return USAGE
    out = sys.stderr if arguments.json == "-" else sys.stdout
    print(f"ncclguard drill: {fault} (seed {arguments.seed})", file=out, flush=True)
    with tempfile.TemporaryDirectory(prefix="ncclguard-drill-", ignore_cleanup_errors=True) as folder:
        before = set(reports.glob("incident-*.html")) if reports is not None else set()
        env = {VARIABLE: str(fault), PERMISSION: "1", record.VARIABLE: folder}
        env |= {"NCCLGUARD_REPORT_DIR": "none" if reports is None else str(reports)}
        try:
            ended = _command(command, env, arguments.timeout) if command else _toy(arguments, fault, env)
        except OSError as error:
            print(f"ncclguard drill: {shlex.join(command)} cannot be run: {error}", file=sys.stderr)
            return USAGE
        verdict = judge(fault.fault, fault.rank, read_events(Path(folder)), fault.raw)
        pages = sorted(set(reports.glob("incident-*.html")) - before) if reports is not None else []
    job = shlex.join(command) if command else f"the built-in one, {arguments.ranks} ranks, limit {arguments.limit:g} s"
    for what, text in [("job", job), *verdict.lines(), ("ended", f"{ended.text}, {ended.seconds:.1f} s in all")]:
        print(f"  {what + ':':<11}{text}", file=out)
    for page in pages:
        print(f"  {'report:':<11}{os.path.relpath(page)}", file=out)
    print(f"  {'drill:':<11}{'passed' if verdict.passed else 'FAILED'}", file=out, flush=True)
    if arguments.json is not None:
        _write(arguments.json, fault, arguments.seed, verdict, ended, pages)
    return 0 if verdict.passed else 1


def chosen(arguments: argparse.Namespace, has_command: bool) -> Fault:
    """The fault that the arguments and the seed make. Raises GuardConfigError for one that cannot be."""
    draw = random.Random(arguments.seed)
    rank = draw.randrange(1, max(arguments.ranks, 2))
    op = draw.choice(_COLLECTIVES if arguments.raw else _OPERATIONS)
    if arguments.rank is None and has_command:
        raise GuardConfigError("which rank is to be struck? give --rank R with a command")
    seconds = arguments.seconds
    if seconds is None and arguments.fault in ("late", "stop", "gil", "partition"):
        if has_command:
            raise GuardConfigError(
                f"how long is {arguments.fault} to last? give --seconds, longer than the job's limit"
            )
        seconds = arguments.limit + _LONGER
    fault = Fault(
        fault=arguments.fault,
        rank=rank if arguments.rank is None else arguments.rank,
        op=op if arguments.op is None else arguments.op,
        seconds=seconds,
        of=arguments.of or "shape",
        raw=arguments.raw,
    )
    if not has_command and fault.rank >= arguments.ranks:
        raise GuardConfigError(f"--rank {fault.rank} is not one of the {arguments.ranks} ranks; they count from 0")
    parse(str(fault))
    return fault


def _command(command: Sequence[str], env: Mapping[str, str], timeout: float) -> Ended:
    """Run the user's command in a process group of its own; its output stays where it goes."""
    started = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, **env}, start_new_session=True)
    try:
        code = process.wait(timeout)
        text = f"exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    except subprocess.TimeoutExpired:
        text = f"not by itself: ended after --timeout {timeout:g} s"
    finally:
        _end(process)
    return Ended(text, time.monotonic() - started)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the command: torchrun ends its ranks at SIGTERM, a stopped one only at SIGKILL."""
    for number, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
        if process.poll() is None or number is signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def _toy(arguments: argparse.Namespace, fault: Fault, env: Mapping[str, str]) -> Ended:
    """Run the built-in job."""
    from ncclguard.faults.launcher import run_ranks

    after = _STEPS_OF_PARTITION if fault.fault == "partition" else _STEPS
    values = [fault.op + after, arguments.limit, _NUMEL, arguments.seed]
    program = "ncclguard.faults.toy:train_watched" if fault.raw else "ncclguard.faults.toy:train"
    result = run_ranks(program, arguments.ranks, args=values, env=env, timeout=arguments.timeout, launcher="fork")
    for rank in result:
        sys.stderr.write(rank.output)
    ends: dict[str, list[str]] = {}
    for rank in result:
        ends.setdefault(rank.end, []).append(str(rank.rank))
    return Ended("; ".join(f"{end}: {', '.join(ranks)}" for end, ranks in ends.items()), result.seconds)


def _report_folder() -> Path | None:
    folder = GuardConfig().report_dir
    return None if folder is None else Path(os.path.abspath(os.path.expanduser(folder)))


def _write(name: str, fault: Fault, seed: int, verdict: Verdict, ended: Ended, pages: Sequence[Path]) -> None:
    data = {
        "schema_version": _SCHEMA_VERSION,
        "passed": verdict.passed,
        "absorbed": verdict.absorbed,
        **asdict(verdict),
        "fault": str(fault),
        "seed": seed,
        "ended": ended.text,
        "seconds": ended.seconds,
        "reports": [str(page) for page in pages],
    }
    text = json.dumps(data, indent=2) + "\n"
    if name == "-":
        sys.stdout.write(text)
    else:
        Path(name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
