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

from rich.cells import cell_len

from ncclguard.arguments import positive_seconds, whole_from
from ncclguard.config import GuardConfig
from ncclguard.errors import GuardConfigError
from ncclguard.faults import drill_channel
from ncclguard.faults.drill_channel import ChannelFindings
from ncclguard.faults.fault import ALTERS, EVENTS_VARIABLE, PARAMETERS, PERMISSION, VARIABLE, Fault, parse
from ncclguard.faults.job import JobResult
from ncclguard.faults.launcher import run_ranks
from ncclguard_explain.cause import WORD, Cause
from ncclguard_explain.command_line import Parser, described, progress
from ncclguard_explain.language import Message, joined, say, speaking_to, told, tr
from ncclguard_explain.ranks import ranks_text

#: The right cause for each fault; several where it depends on what the others can see.
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
    "slow": ("slow",),
}
#: The cause where the others went on without the struck rank in the same call, and so got no failed outcome.
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
    """The result of a drill: seconds since the fault struck, None for never; `named` are the ranks agreed on.

    `went_on`: when each rank had its next collective, or, where the job goes on without lost ranks, was to begin its
    step again. `afterwards`: what became of the job, in the words of the incident's report, if it says so.
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
    collectives: int = 0
    watched: bool = False
    afterwards: tuple[str, ...] = ()

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if rank != self.rank)

    @property
    def absorbed(self) -> bool:
        """Return whether no call failed, as is right for a fault that was over in time."""
        return self.struck_after is not None and not self.known_by and self.fault in ABSORBED

    @property
    def right(self) -> bool:
        """Return whether the struck rank alone was named, by a fitting cause; with a broken transfer nobody may be."""
        nobody = self.fault in ("reset", "partition") and not self.named and self.cause in ("network", "unknown")
        return (self.named == (self.rank,) and self.cause in (*EXPECTED[self.fault], GONE)) or nobody

    @property
    def passed(self) -> bool:
        """Return whether the drill went as it should: struck, known by all others and rightly named, or absorbed."""
        if self.struck_after is None:
            return False
        return self.absorbed or (set(self.others) <= set(self.known_by) and self.right)

    def lines(self) -> list[tuple[str, str]]:
        """Return the findings for people, as (what, text)."""
        if not self.ranks:
            text = tr("no rank came up with ncclguard: does the program import it before init_process_group?")
            return [("happened", text)]
        if self.struck_after is None:
            return [("happened", self._nowhere())]
        struck = tr(
            "rank {rank} was struck {seconds:.1f} s after the ranks had started",
            rank=self.rank,
            seconds=max(0.0, self.struck_after),
        )
        found: list[tuple[str, str]] = [("happened", struck)]
        if self.absorbed:
            over = tr("no call failed: the fault was over in time, or the transfer was tried again")
            longer = tr("to see it named, give more --seconds than the limit of the job")
            return [*found, ("known", over if self.fault == "reset" else joined("; ", (over, longer)))]
        missing = sorted(set(self.others) - set(self.known_by))
        if self.known_by:
            first, last = min(self.known_by.values()), max(self.known_by.values())
            who = (
                tr("all {count} others", count=len(self.others))
                if len(self.others) > 1 and not missing
                else ranks_text(self.known_by)
            )
            known = tr(
                "by {who} within {last:.2f} s, by the first after {first:.2f} s", who=who, last=last, first=first
            )
            found.append(("known", known))
        if missing:
            found.append(("not known", tr("by {ranks}", "drill", ranks=ranks_text(missing))))
        if self.known_by:
            who = ranks_text(self.named) if self.named else tr("nobody")
            judged = tr("right") if self.right else tr("wrong: it was rank {rank}", rank=self.rank)
            if self.named == (self.rank,) and not self.right:
                causes = joined(", ", map(_word, EXPECTED[self.fault]))
                judged = tr("the right rank, by a wrong cause: it was {cause}", cause=causes)
            named = tr("{who}, {cause}: {judged}", who=who, cause=_word(self.cause), judged=judged)
            found += [("named", named), ("said", self.summary)]
        if self.alone:
            text = tr(
                "{ranks} could not agree with the others, and had verdicts of their own", ranks=ranks_text(self.alone)
            )
            found.append(("alone", text))
        if not self.raw:  # watch() has no hand in them
            torn = tr("torn on {ranks}", ranks=ranks_text(self.torn))
            found.append(("tensors", torn if self.torn else tr("intact wherever a call failed")))
        if self.went_on:
            text = tr(
                "yes, {ranks} within {seconds:.2f} s, as {others}",
                ranks=ranks_text(self.went_on),
                seconds=max(self.went_on.values()),
                others=ranks_text(self.participants),
            )
            found.append(("went on", text))
            found += [("then", change) for change in self.afterwards]
        elif self.raw:
            found.append(("went on", tr("no: no collective was issued afterwards")))
        else:
            found.append(("went on", tr("no: no guarded call succeeded afterwards")))
        return found

    def _nowhere(self) -> Message:
        """Return why the fault did not strike, and what to do."""
        if self.rank not in self.ranks:
            none = tr("nothing: the job has no rank {rank}", rank=self.rank)
            return joined("; ", (none, tr("it has {ranks}", ranks=ranks_text(self.ranks))))
        nothing = tr("nothing: rank {rank} made no such operation", rank=self.rank)
        lower = tr("choose a lower --op")
        if self.raw or (self.watched and not self.calls and self.fault not in ALTERS):
            watched = tr("the ranks issued up to {count} collectives in the default group", count=self.collectives)
            return joined("; ", (nothing, watched, lower))
        if self.calls:
            guarded = tr("the ranks made up to {count} guarded calls", count=self.calls)
            raw = tr("choose a lower --op, or --raw for the collectives that watch() observes")
            return joined("; ", (nothing, guarded, raw if self.watched else lower))
        if self.watched:
            changes = tr(
                "{kind} changes a guarded call, and this job only has watch(); choose another fault", kind=self.fault
            )
            return joined(": ", (nothing, changes))
        silent = tr(
            "this job makes no guarded call and does not call watch(), so that nobody would say what became of a fault; "
            "call ncclguard.watch(timeout=...) after init_process_group"
        )
        return joined(": ", (nothing, silent))


#: The words before each line of the findings.
HEADS: Final = {
    "happened": tr("happened", "drill"),
    "known": tr("known", "drill"),
    "not known": tr("not known", "drill"),
    "named": tr("named", "drill"),
    "said": tr("said", "drill"),
    "alone": tr("alone", "drill"),
    "tensors": tr("tensors", "drill"),
    "went on": tr("went on", "drill"),
    "back": tr("back", "drill"),
    "then": tr("then", "drill"),
    "job": tr("job", "drill"),
    "ended": tr("ended", "drill"),
    "report": tr("report", "drill"),
    "drill": tr("drill", "drill"),
}
#: Causes that a drill has beside those of an incident.
_OWN_CAUSES: Final = {
    GONE: tr("gone", "drill"),
    "different verdicts": tr("different verdicts"),
    "slow": tr("slow", "drill"),
}


def _word(cause: str) -> str:
    return WORD[Cause(cause)] if cause in set(Cause) else _OWN_CAUSES.get(cause, cause)


def _line(what: str, text: str) -> str:
    """Format one line of the findings, in the language of this process."""
    head = told("{what}:", what=HEADS[what])
    return f"  {head}{' ' * max(11 - cell_len(head), 1)}{say(text)}"


def read_events(folder: Path) -> list[Event]:
    """Read all events of a drill, in order of time; half a line of a killed rank is left out."""
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
    """Put the findings together: `rank` was to be struck by the fault `fault`, as a raw one if `raw`."""
    begun = [event for event in events if event.kind == "started"]
    struck = next((event for event in events if event.kind == "struck"), None)
    ended = [event.values for event in events if event.kind == "ended"]
    after = [event for event in events if struck is not None and event.at >= struck.at]
    failed: dict[int, Event] = {}
    went_on: dict[int, Event] = {}
    changes = [event for event in after if event.kind == "membership" and event.rank != rank]
    for event in after:
        if event.kind == "failed":
            failed.setdefault(event.rank, event)
        elif event.kind == "went on" and event.rank != rank and event.rank not in failed:
            failed[event.rank] = went_on[event.rank] = event  # went on in the same call, without the struck rank
        elif event.kind == "went on":
            went_on.setdefault(event.rank, event)
    resumed = {event.rank: event for event in reversed(changes) if event.values["change"] == "went on"}
    since = struck.at if struck is not None else 0.0
    verdicts = [event for other, event in failed.items() if other != rank and event.kind == "failed"]
    agreed = [event.values for event in verdicts if event.values["agreed"]]
    lost = next((event for other, event in failed.items() if other != rank and event.kind == "went on"), None)
    ranks = tuple(sorted({event.rank for event in begun}))
    verdict: dict[str, Any] = agreed[0] if agreed else verdicts[0].values if verdicts else {}
    if not verdict and lost is not None:
        gone = sorted(set(ranks) - set(lost.values["participants"]))
        verdict = {
            "culprits": gone,
            "cause": GONE,
            "summary": tr("{operation} went on without {ranks}", operation=lost.values["op"], ranks=ranks_text(gone)),
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
        summary=verdict.get("summary", ""),
        torn=tuple(sorted(other for other, event in failed.items() if event.values.get("torn"))),
        alone=tuple(sorted(other for other, event in failed.items() if event.values.get("agreed") is False)),
        went_on={other: event.at - since for other, event in sorted((resumed or went_on).items())},
        participants=tuple(next(iter(went_on.values())).values["participants"]) if went_on else (),
        calls=max((values["calls"] for values in ended), default=0),
        raw=raw or (struck is not None and bool(struck.values.get("raw"))),
        collectives=max((values["collectives"] for values in ended), default=0),
        watched=any(values["watched"] for values in ended),
        afterwards=tuple(dict.fromkeys(event.values["text"] for event in changes if event.rank == changes[0].rank)),
    )


USAGE: Final = 2
EXIT_CODES: Final = {
    0: "all others named the struck rank or engine and nobody else, or the fault was over in time",
    1: "they did not, or the fault never struck",
    USAGE: tr("a wrong call, or {variable} is not 1", "help", variable=PERMISSION),
}
EXAMPLES: Final = {
    f"{PERMISSION}=1 ncclguard drill --fault late": "the built-in job, with a rank that comes too late",
    f"{PERMISSION}=1 ncclguard drill --fault kill --rank 2 -- torchrun --nproc-per-node 4 train.py": "a program of one's own",
    f"{PERMISSION}=1 ncclguard drill --fault stop --engine 'engine 2'": "a weight channel, with an engine that stands still",
    f"{PERMISSION}=1 ncclguard drill --fault stop --rank 1 --seconds 60 -- torchrun ... train.py": "the same where it only calls watch()",
}
#: Seconds between SIGTERM and SIGKILL for a command that has not ended at the timeout.
_GRACE: Final = 10.0
#: The built-in job: its ranks, steps and elements, and how long a lasting fault outlasts its limit, in seconds.
_RANKS, _NUMEL, _LONGER = 4, 100_000, 4.0
_LIMIT, _LIMIT_OF_PUBLISH = 5.0, 15.0
#: Its steps after the one that is struck; while a partition lasts and TCP finds back, several of them fail.
_STEPS, _STEPS_OF_PARTITION = 4, 9
#: As many as take about 70 s: who is slow is told after 43 s or more.
_STEPS_OF_SLOW: Final = 450
#: The default operation at which the fault strikes; a watched job has set its model up by then.
_OPERATIONS: Final = range(2, 9)
_COLLECTIVES: Final = range(10, 17)
_SCHEMA_VERSION: Final = 1


@dataclass(frozen=True)
class Ended:
    """The end of the job, in words, and after how many seconds."""

    text: str
    seconds: float


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = Parser(
        prog="ncclguard drill",
        usage=tr("ncclguard drill --fault KIND [--rank R | --engine NAME] [options] [-- COMMAND ...]", "help"),
        description=tr(
            "Inject a fault into one rank of a real run, without changing the program, and print what happened, how long "
            "until everyone knew, who was named and whether the job went on. Without a command a small built-in job is run. "
            "With --engine, into an engine of a weight channel: whether publish came back in time, and the engine is taken back. "
            "Refuses to run unless {variable}=1 is set.",
            "help",
            variable=PERMISSION,
        ),
    )
    made.add_argument("--fault", required=True, choices=sorted(PARAMETERS), help="what happens to the rank")
    made.add_argument("--rank", type=whole_from(0), help="the global rank that is struck (built-in job: by the seed)")
    made.add_argument(
        "--engine",
        metavar="NAME",
        help="strike this engine of a weight channel instead, in its worker --rank (default 0)",
    )
    made.add_argument(
        "--op",
        type=whole_from(0),
        help="its guarded operation at which it strikes, from 0, or where the job only has watch(), its collective in the "
        "default group (default: by the seed); of an engine, its update (default 1, the second)",
    )
    made.add_argument(
        "--raw", action="store_true", help="--op counts those collectives, also where the job makes guarded calls"
    )
    made.add_argument("--seconds", type=positive_seconds, help="how long late, stop, gil, partition and slow last")
    made.add_argument("--factor", type=float, help="how many times as long a slow rank takes for a step (default 1.5)")
    made.add_argument("--of", choices=("shape", "dtype"), help="what differs in a mismatch")
    made.add_argument("--seed", type=int, default=0, help="chooses what is not given; 0 by default")
    made.add_argument(
        "--limit",
        type=positive_seconds,
        help="time limit of the built-in job's collectives (default 5), or publish (15), in s",
    )
    made.add_argument(
        "--ranks", type=whole_from(2), default=_RANKS, help="ranks of the built-in job, or a trainer and its engines"
    )
    made.add_argument("--timeout", type=positive_seconds, default=900.0, help="end the job after this many seconds")
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
        with speaking_to(sys.stderr):
            refused = told(
                "a drill breaks the job on purpose, and {variable} is not 1; set {variable}=1 where that may happen, and "
                "never in production",
                variable=PERMISSION,
            )
        print(f"ncclguard drill: {refused}", file=sys.stderr)
        return USAGE
    choose = chosen if arguments.engine is None else chosen_of_engine
    try:
        fault, reports = choose(arguments, bool(command)), _report_folder()
    except GuardConfigError as error:
        print(f"ncclguard drill: {error}", file=sys.stderr)
        return USAGE
    out = sys.stderr if arguments.json == "-" else sys.stdout
    built_in = (
        tr(
            "the built-in channel of a trainer and {engines}, limit of publish {limit:g} s",
            engines=", ".join(_engines(arguments)),
            limit=_limit(arguments),
        )
        if fault.engine
        else tr("the built-in one, {count} ranks, limit {limit:g} s", count=arguments.ranks, limit=_limit(arguments))
    )
    job = Message(shlex.join(command)) if command else built_in
    with speaking_to(out):
        head = told("ncclguard drill: {operation} (seed {number})", operation=str(fault), number=arguments.seed)
        print(head, file=out, flush=True)
        print(_line("job", job), file=out, flush=True)
        if fault.fault == "slow" and not command:
            print(
                _line("job", tr("its watch() compares the ranks for about 70 s before it names one")),
                file=out,
                flush=True,
            )
    with tempfile.TemporaryDirectory(prefix="ncclguard-drill-", ignore_cleanup_errors=True) as folder:
        before = set(reports.glob("incident-*.html")) if reports is not None else set()
        env = {VARIABLE: str(fault), PERMISSION: "1", EVENTS_VARIABLE: folder}
        env |= {"NCCLGUARD_REPORT_DIR": "none" if reports is None else str(reports)}
        try:
            ended = _command(command, env, arguments.timeout) if command else _built_in(arguments, fault, env)
        except OSError as error:
            with speaking_to(sys.stderr):
                cannot = told("{operation} cannot be run: {error}", operation=shlex.join(command), error=error)
            print(f"ncclguard drill: {cannot}", file=sys.stderr)
            return USAGE
        findings: Findings | ChannelFindings = (
            drill_channel.findings_of(fault, drill_channel.read_events(Path(folder)))
            if fault.engine
            else findings_of(fault.fault, fault.rank, read_events(Path(folder)), fault.raw)
        )
        pages = sorted(set(reports.glob("incident-*.html")) - before) if reports is not None else []
    end = tr("{how}, {seconds:.1f} s in all", how=ended.text, seconds=ended.seconds)
    passed = tr("passed", "drill") if findings.passed else tr("FAILED", "drill")
    reports_of = [("report", Message(os.path.relpath(page))) for page in pages]
    with speaking_to(out):
        for what, text in [*findings.lines(), ("ended", end), *reports_of, ("drill", passed)]:
            print(_line(what, text), file=out, flush=True)
    if arguments.json is not None:
        _write(arguments.json, fault, arguments.seed, findings, ended, pages)
    return 0 if findings.passed else 1


def chosen(arguments: argparse.Namespace, has_command: bool) -> Fault:
    """Return the fault that the arguments and the seed make. Raises GuardConfigError for an invalid one."""
    draw = random.Random(arguments.seed)
    rank = draw.randrange(1, max(arguments.ranks, 2))
    op = draw.choice(_COLLECTIVES if arguments.raw or arguments.fault == "slow" else _OPERATIONS)
    watched_op = None
    if has_command and not arguments.raw and arguments.fault not in ALTERS:
        watched_op = draw.choice(_COLLECTIVES) if arguments.op is None else arguments.op
    if arguments.rank is None and has_command:
        raise GuardConfigError(told("which rank is to be struck? give --rank R with a command"))
    seconds = arguments.seconds
    if seconds is None and arguments.fault in ("late", "stop", "gil", "partition"):
        if has_command:
            refusal = told(
                "how long is {kind} to last? give --seconds, longer than the job's limit", kind=arguments.fault
            )
            raise GuardConfigError(refusal)
        seconds = _limit(arguments) + _LONGER
    fault = Fault(
        fault=arguments.fault,
        rank=rank if arguments.rank is None else arguments.rank,
        op=op if arguments.op is None else arguments.op,
        seconds=seconds,
        of=arguments.of or "shape",
        factor=1.5 if arguments.factor is None else arguments.factor,
        raw=arguments.raw or (arguments.fault == "slow" and not has_command),
        watched_op=watched_op,
    )
    if not has_command and fault.rank >= arguments.ranks:
        text = told(
            "--rank {rank} is not one of the {count} ranks; they count from 0",
            rank=fault.rank,
            count=arguments.ranks,
        )
        raise GuardConfigError(text)
    parse(str(fault))
    return fault


def chosen_of_engine(arguments: argparse.Namespace, has_command: bool) -> Fault:
    """Return the fault of an engine that the arguments make. Raises GuardConfigError for an invalid one."""
    seconds = arguments.seconds
    if seconds is None and arguments.fault in drill_channel.ABSORBED:
        if has_command:
            refusal = told(
                "how long is {kind} to last? give --seconds, longer than a third of the limit of publish",
                kind=arguments.fault,
            )
            raise GuardConfigError(refusal)
        seconds = _limit(arguments) / 3 + _LONGER  # the first of the three tries has a third
    names = _engines(arguments)
    if not has_command and (arguments.engine not in names or arguments.rank):
        text = told(
            "the built-in channel has no worker {worker} of {engine}; it has {engines}, each with a worker 0",
            worker=arguments.rank or 0,
            engine=repr(arguments.engine),
            engines=", ".join(names) or told("no engine"),
        )
        raise GuardConfigError(text)
    fault = Fault(
        fault=arguments.fault,
        rank=arguments.rank or 0,
        op=1 if arguments.op is None else arguments.op,
        seconds=seconds,
        of=arguments.of or "shape",
        factor=1.5 if arguments.factor is None else arguments.factor,
        raw=arguments.raw,
        engine=arguments.engine,
    )
    parse(str(fault))
    return fault


def _limit(arguments: argparse.Namespace) -> float:
    """Return the limit of the built-in job's collectives, or of its publish, in seconds."""
    if arguments.limit is not None:
        return float(arguments.limit)
    return _LIMIT if arguments.engine is None else _LIMIT_OF_PUBLISH


def _engines(arguments: argparse.Namespace) -> list[str]:
    """Return the names of the built-in channel's engines."""
    return [f"engine {number}" for number in range(1, arguments.ranks)]


def _command(command: Sequence[str], env: Mapping[str, str], timeout: float) -> Ended:
    """Run the user's command in a process group of its own; its output stays where it goes."""
    started = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, **env}, start_new_session=True)
    try:
        code = process.wait(timeout)
        text = (
            tr("exit code {code}", "drill", code=code)
            if code >= 0
            else tr("by {signal}", signal=signal.Signals(-code).name)
        )
    except subprocess.TimeoutExpired:
        text = tr("not by itself: ended after --timeout {limit:g} s", limit=timeout)
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
    events = Path(env[EVENTS_VARIABLE])
    if fault.engine:
        engines, stands_by = arguments.ranks - 1, fault.fault in ("kill", "exit")
        program, ranks = "ncclguard.faults.drill_channel:run", 1 + engines + stands_by
        values: list[Any] = [_limit(arguments), fault.engine, fault.op, engines]
        result = run_ranks(program, ranks, args=values, env=env, timeout=arguments.timeout, launcher="fork")
        return _ends(result)
    after = {"partition": _STEPS_OF_PARTITION, "slow": _STEPS_OF_SLOW}.get(fault.fault, _STEPS)
    values = [fault.op + after, _limit(arguments), _NUMEL, arguments.seed]
    program = "ncclguard.faults.drill_job:train_watched" if fault.raw else "ncclguard.faults.drill_job:train"
    with progress(lambda: _state_of(arguments.ranks, read_events(events))):
        result = run_ranks(program, arguments.ranks, args=values, env=env, timeout=arguments.timeout, launcher="fork")
    return _ends(result)


def _ends(result: JobResult) -> Ended:
    """Print what the ranks have written, and return how they ended."""
    for rank in result:
        sys.stderr.write(rank.output)
    ends: dict[str, list[str]] = {}
    for rank in result:
        ends.setdefault(rank.end, []).append(str(rank.rank))
    parts = [tr("{how}: {numbers}", how=_end_of(end), numbers=", ".join(ranks)) for end, ranks in ends.items()]
    return Ended(joined("; ", parts), result.seconds)


def _end_of(end: str) -> Message:
    """Return the end of a rank as a text that can be translated; a signal keeps its name."""
    if end.startswith("exit "):
        return tr("exit {code}", "drill", code=end.removeprefix("exit "))
    return {"still running": tr("still running", "drill"), "unknown": tr("unknown", "drill")}.get(end, Message(end))


def _state_of(ranks: int, events: Sequence[Event]) -> str:
    """Describe the progress of a drill for people."""
    kinds = {kind: {event.rank for event in events if event.kind == kind} for kind in ("started", "failed", "went on")}
    if not any(event.kind == "struck" for event in events):
        return told("{count} of {ranks} ranks have started", count=len(kinds["started"]), ranks=ranks)
    if not kinds["failed"] | kinds["went on"]:
        return told("the fault has struck, and nobody knows of it yet")
    known = ranks_text(kinds["failed"]) if kinds["failed"] else tr("nobody had to give up a call")
    if not kinds["went on"]:
        return told("known by {ranks}", ranks=known)
    return told("{who}; went on: {ranks}", who=known, ranks=ranks_text(kinds["went on"]))


def _report_folder() -> Path | None:
    folder = GuardConfig().report_dir
    return None if folder is None else Path(os.path.abspath(os.path.expanduser(folder)))


def _write(
    name: str, fault: Fault, seed: int, findings: Findings | ChannelFindings, ended: Ended, pages: Sequence[Path]
) -> None:
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
