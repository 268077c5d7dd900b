"""The command `ncclguard drill`: inject a fault into a real run and see what the job makes of it.

The ranks write events (drill_job.py), and `findings_of` tells from these who was struck, who knew of it and when,
who was named, and who went on.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ncclguard.command_line import described, progress
from ncclguard.config import GuardConfig
from ncclguard.errors import GuardConfigError
from ncclguard.faults.fault import EVENTS_VARIABLE, PARAMETERS, PERMISSION, VARIABLE, Fault, parse
from ncclguard.faults.launcher import run_ranks
from ncclguard.incident.model import ranks_text

#: The cause that each fault should be called by; several where it depends on what the others can see.
EXPECTED: Final[dict[str, tuple[str, ...]]] = {
    "late": ("late",),
    "kill": ("lost",),
    "stop": ("stuck",),
    "gil": ("stuck",),
    "exception": ("failed",),
    "oom": ("failed",),
    "exit": ("exited",),
    "mismatch": ("diverged",),
    "skip": ("diverged", "exited", "late"),
    "extra": ("diverged", "late"),
    "reset": ("network",),
    "partition": ("stuck", "unknown", "late"),
}
#: What the struck rank is called where the others went on without it in the same call, and so got no failed outcome.
GONE: Final = "gone"
#: Faults that a guard may absorb without a failed call: a rank that is back in time, a transfer that is tried again.
ABSORBED: Final = frozenset({"late", "stop", "gil", "reset", "partition"})


@dataclass(frozen=True)
class Event:
    """One line of a rank's file; `at` in seconds by CLOCK_MONOTONIC of the host."""

    rank: int
    kind: str
    at: float
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """What a drill came to: seconds since the fault struck, None for never; `named` is what the others agreed on.

    `went_on`: when each rank had its next collective, or, where the job goes on without lost ranks, was to begin its
    step again. `afterwards`: what became of the job, in the words of the incident's report; empty where nobody says.
    """

    fault: str
    rank: int
    ranks: tuple[int, ...]
    struck_after: float | None
    known_by: dict[int, float]
    named: tuple[int, ...]
    cause: str
    summary: str
    torn: tuple[int, ...]
    alone: tuple[int, ...]
    went_on: dict[int, float]
    participants: tuple[int, ...]
    calls: int
    raw: bool = False
    afterwards: tuple[str, ...] = ()

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks that were not struck."""
        return tuple(rank for rank in self.ranks if rank != self.rank)

    @property
    def absorbed(self) -> bool:
        """Whether no call failed, as is right for a fault that was over in time."""
        return self.struck_after is not None and not self.known_by and self.fault in ABSORBED

    @property
    def right(self) -> bool:
        """Whether the struck rank alone was named, by a fitting cause; with a broken transfer nobody may be."""
        nobody = self.fault in ("reset", "partition") and not self.named and self.cause in ("network", "unknown")
        return (self.named == (self.rank,) and self.cause in (*EXPECTED[self.fault], GONE)) or nobody

    @property
    def passed(self) -> bool:
        """Whether the drill went as it should: struck, known by all others and rightly named, or absorbed."""
        if self.struck_after is None:
            return False
        return self.absorbed or (set(self.others) <= set(self.known_by) and self.right)

    def lines(self) -> list[tuple[str, str]]:
        """The findings for people, as (what, text)."""
        if not self.ranks:
            text = "no rank came up with ncclguard: does the program import it before init_process_group?"
            return [("happened", text)]
        if self.struck_after is None:
            what = "collectives in the default group" if self.raw else "guarded calls"
            text = f"nothing: rank {self.rank} made no such operation; the ranks made up to {self.calls} {what}"
            other = "" if self.raw else ", or --raw for the collectives that watch() observes"
            return [("happened", f"{text}; choose a lower --op{other}")]
        found = [("happened", f"rank {self.rank} was struck {self.struck_after:.1f} s after the ranks had started")]
        if self.absorbed:
            return [*found, ("known", "no call failed: the fault was over in time, or the transfer was tried again")]
        missing = sorted(set(self.others) - set(self.known_by))
        if self.known_by:
            first, last = min(self.known_by.values()), max(self.known_by.values())
            who = f"all {len(self.others)} others" if not missing else f"{ranks_text(self.known_by)}"
            found.append(("known", f"by {who} within {last:.2f} s, by the first after {first:.2f} s"))
        if missing:
            found.append(("not known", f"by {ranks_text(missing)}"))
        if self.known_by:
            who = ranks_text(self.named) if self.named else "nobody"
            judged = "right" if self.right else f"wrong: it was rank {self.rank}"
            found.append(("named", f"{who}, {self.cause}: {judged}"))
            found.append(("said", self.summary))
        if self.alone:
            text = f"{ranks_text(self.alone)} could not agree with the others, and had verdicts of their own"
            found.append(("alone", text))
        if not self.raw:  # watch() has no hand in them
            which = f"torn on {ranks_text(self.torn)}" if self.torn else "intact wherever a call failed"
            found.append(("tensors", which))
        if self.went_on:
            text = f"yes, {ranks_text(self.went_on)} within {max(self.went_on.values()):.2f} s"
            found.append(("went on", f"{text}, as {ranks_text(self.participants)}"))
            found += [("then", change) for change in self.afterwards]
        else:
            no_more = "no collective was issued" if self.raw else "no guarded call succeeded"
            found.append(("went on", f"no: {no_more} afterwards"))
        return found


def read_events(folder: Path) -> list[Event]:
    """All events of a drill, in order of time; half a line of a killed rank is left out."""
    events = []
    for file in sorted(folder.glob("rank*.events")):
        rank = int(file.name.split(".")[0].removeprefix("rank"))
        for line in file.read_text(errors="replace").splitlines():
            try:
                data = json.loads(line)
                events.append(Event(rank, data.pop("event"), data.pop("at"), data))
            except (ValueError, KeyError):
                continue
    return sorted(events, key=lambda event: event.at)


def findings_of(fault: str, rank: int, events: list[Event], raw: bool = False) -> Findings:
    """Put the findings together: `rank` was to be struck by the fault `fault`, in a job under `watch` if `raw`."""
    begun = [event for event in events if event.kind == "started"]
    struck = next((event for event in events if event.kind == "struck"), None)
    after = [event for event in events if struck is not None and event.at >= struck.at]
    failed: dict[int, Event] = {}
    went_on: dict[int, Event] = {}
    changes = [event for event in after if event.kind == "membership" and event.rank != rank]
    for event in after:
        if event.kind == "failed":
            failed.setdefault(event.rank, event)
        elif event.kind == "went on" and event.rank != rank and event.rank not in failed:
            failed[event.rank] = went_on[event.rank] = event  # went on without the rank, in the same call
        elif event.kind == "went on":
            went_on.setdefault(event.rank, event)
    resumed = {event.rank: event for event in reversed(changes) if event.values["change"] == "went on"}
    since = struck.at if struck is not None else 0.0
    told = [event for other, event in failed.items() if other != rank and event.kind == "failed"]
    agreed = [event.values for event in told if event.values["agreed"]]
    lost = next((event for other, event in failed.items() if other != rank and event.kind == "went on"), None)
    ranks = tuple(sorted({event.rank for event in begun}))
    verdict: dict[str, Any] = agreed[0] if agreed else told[0].values if told else {}
    if not verdict and lost is not None:
        gone = sorted(set(ranks) - set(lost.values["participants"]))
        verdict = {
            "culprits": gone,
            "cause": GONE,
            "summary": f"{lost.values['op']} went on without {ranks_text(gone)}",
        }
    differ = {json.dumps([values["cause"], values["culprits"]]) for values in agreed}
    return Findings(
        fault=fault,
        rank=rank,
        ranks=ranks,
        struck_after=None if struck is None else since - max(event.at for event in begun),
        known_by={other: event.at - since for other, event in failed.items() if other != rank},
        named=tuple(verdict.get("culprits", ())) if len(differ) <= 1 else (),
        cause=str(verdict.get("cause", "")) if len(differ) <= 1 else "different verdicts",
        summary=str(verdict.get("summary", "")),
        torn=tuple(sorted(other for other, event in failed.items() if event.values.get("torn"))),
        alone=tuple(sorted(other for other, event in failed.items() if event.values.get("agreed") is False)),
        went_on={other: event.at - since for other, event in sorted((resumed or went_on).items())},
        participants=tuple(next(iter(went_on.values())).values["participants"]) if went_on else (),
        calls=max((event.values["calls"] for event in events if event.kind == "ended"), default=0),
        raw=raw,
        afterwards=tuple(dict.fromkeys(event.values["text"] for event in changes if event.rank == changes[0].rank)),
    )


USAGE: Final = 2
EXIT_CODES: Final = {
    0: "all others named the struck rank and nobody else, or the fault was over in time",
    1: "they did not, or the fault never struck",
    USAGE: f"a wrong call, or {PERMISSION} is not 1",
}
EXAMPLES: Final = {
    f"{PERMISSION}=1 ncclguard drill --fault late": "the built-in job, with a rank that comes too late",
    f"{PERMISSION}=1 ncclguard drill --fault kill --rank 2 -- torchrun --nproc-per-node 4 train.py": "a program of one's own",
    f"{PERMISSION}=1 ncclguard drill --fault stop --rank 1 --seconds 60 --raw -- torchrun ... train.py": "under watch()",
}
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


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    made = argparse.ArgumentParser(
        prog="ncclguard drill",
        usage="ncclguard drill --fault KIND [--rank R] [options] [-- COMMAND ...]",
        description="Inject a fault into one rank of a real run, without changing the program, and print what happened, how long "
        "until everyone knew, who was named and whether the job went on. Without a command a small built-in job is run. "
        f"Refuses to run unless {PERMISSION}=1 is set.",
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
    return described(made, EXAMPLES, EXIT_CODES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one drill; returns 0 when it went as it should, 1 when not, 2 for a wrong call or without permission."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    arguments, command = build_parser().parse_args(words[:at]), words[at + 1 :]
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
        env = {VARIABLE: str(fault), PERMISSION: "1", EVENTS_VARIABLE: folder}
        env |= {"NCCLGUARD_REPORT_DIR": "none" if reports is None else str(reports)}
        try:
            ended = _command(command, env, arguments.timeout) if command else _built_in(arguments, fault, env)
        except OSError as error:
            print(f"ncclguard drill: {shlex.join(command)} cannot be run: {error}", file=sys.stderr)
            return USAGE
        findings = findings_of(fault.fault, fault.rank, read_events(Path(folder)), fault.raw)
        pages = sorted(set(reports.glob("incident-*.html")) - before) if reports is not None else []
    job = shlex.join(command) if command else f"the built-in one, {arguments.ranks} ranks, limit {arguments.limit:g} s"
    for what, text in [("job", job), *findings.lines(), ("ended", f"{ended.text}, {ended.seconds:.1f} s in all")]:
        print(f"  {what + ':':<11}{text}", file=out)
    for page in pages:
        print(f"  {'report:':<11}{os.path.relpath(page)}", file=out)
    print(f"  {'drill:':<11}{'passed' if findings.passed else 'FAILED'}", file=out, flush=True)
    if arguments.json is not None:
        _write(arguments.json, fault, arguments.seed, findings, ended, pages)
    return 0 if findings.passed else 1


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


def _built_in(arguments: argparse.Namespace, fault: Fault, env: Mapping[str, str]) -> Ended:
    """Run the built-in job."""
    after = _STEPS_OF_PARTITION if fault.fault == "partition" else _STEPS
    values = [fault.op + after, arguments.limit, _NUMEL, arguments.seed]
    program = "ncclguard.faults.drill_job:train_watched" if fault.raw else "ncclguard.faults.drill_job:train"
    events = Path(env[EVENTS_VARIABLE])
    with progress(lambda: _state_of(arguments.ranks, read_events(events))):
        result = run_ranks(program, arguments.ranks, args=values, env=env, timeout=arguments.timeout, launcher="fork")
    for rank in result:
        sys.stderr.write(rank.output)
    ends: dict[str, list[str]] = {}
    for rank in result:
        ends.setdefault(rank.end, []).append(str(rank.rank))
    return Ended("; ".join(f"{end}: {', '.join(ranks)}" for end, ranks in ends.items()), result.seconds)


def _state_of(ranks: int, events: Sequence[Event]) -> str:
    """How far a drill is, for people."""
    kinds = {kind: {event.rank for event in events if event.kind == kind} for kind in ("started", "failed", "went on")}
    if not any(event.kind == "struck" for event in events):
        return f"{len(kinds['started'])} of {ranks} ranks have started"
    if not kinds["failed"] | kinds["went on"]:
        return "the fault has struck, and nobody knows of it yet"
    known = ranks_text(kinds["failed"]) if kinds["failed"] else "nobody had to give up a call"
    return f"{known}; went on: {ranks_text(kinds['went on'])}" if kinds["went on"] else f"known by {known}"


def _report_folder() -> Path | None:
    folder = GuardConfig().report_dir
    return None if folder is None else Path(os.path.abspath(os.path.expanduser(folder)))


def _write(name: str, fault: Fault, seed: int, findings: Findings, ended: Ended, pages: Sequence[Path]) -> None:
    data = {
        "schema_version": _SCHEMA_VERSION,
        "passed": findings.passed,
        "absorbed": findings.absorbed,
        **asdict(findings),
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
