"""`ncclguard run`: torchrun, except that the ranks that go on when one is lost are left alone.

torchrun ends all ranks of a job when one fails. This does so too, unless every rank of this host that still runs has
said that it goes on without those that are lost (see `declaration`; `resilient_step` does), and within a time says
without whom. A spare, or a new process, takes the place of a lost rank (see `joining`), unless it ended for a reason
that would end the new one too.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclguard import lifecycle
from ncclguard.arguments import positive_seconds, whole_from
from ncclguard.config import current_config
from ncclguard.coordination.store import StoreUnavailable
from ncclguard.torch_compat import elastic
from ncclguard.torch_compat.elastic import Codes, Host
from ncclguard.training import declaration, places, stand_by
from ncclguard_explain import language
from ncclguard_explain.command_line import Parser, described
from ncclguard_explain.language import Message, joined, tr
from ncclguard_explain.ranks import ranks_text

log = logging.getLogger("ncclguard")

#: Seconds in which survivors have to say that they have gone on; a rank may be in a long computation till then.
WITHIN = 300.0
#: Seconds in which losses are counted.
PERIOD = 3600.0
#: Losses that the last line of a job that ended well tells of.
SHOWN_LOSSES = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """`within`: seconds in which survivors go on. `restarts`: how many lost ranks are started again on this host.

    `losses`, `period`: with more losses than that in so many seconds all ranks are ended; 0: no limit.
    """

    within: float = WITHIN
    restarts: int = 0
    losses: int = 0
    period: float = PERIOD


@dataclass(slots=True)
class _Loss:
    rank: int
    number: int  # how often this rank was lost before, and now
    code: int
    found: float
    why: Message | str


class Survivors:
    """Decides for the agent of one host, from exit codes and from what the ranks have declared in `folder`.

    `other_hosts`: whether the job has any, where a new process may find others when nobody is left here.
    """

    def __init__(
        self,
        folder: str,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        *,
        other_hosts: bool = False,
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._other_hosts = other_hosts
        self._clock = clock
        self._restarts = limits.restarts
        self._guests = places.Guests()
        self._store: Any = None
        self._generation = "0"
        self._reasons: set[str] = set()  # for which processes have ended by themselves
        self.started()

    def starting(self, store: Any, restarts: int, host: int, hosts: int) -> None:
        """Workers are about to start, again if there were restarts: what earlier ones have said is not theirs."""
        self._store, self._generation = store, str(restarts)
        with contextlib.suppress(StoreUnavailable):
            places.begin(store, restarts, host, hosts)
        self.started()

    def started(self) -> None:
        """Forget what workers have said."""
        self._losses: list[_Loss] = []
        self._unconfirmed: list[_Loss] = []  # without whom nobody has said that it goes on
        self._down: dict[int, str] = {}  # ranks without a process -> why it is not started again, or nothing
        self._newcomers: dict[int, int] = {}  # ranks whose process has not joined yet -> how many there were before
        self._lives: Counter[int] = Counter()  # of the new processes of each rank
        self._there: set[int] | None = None  # who takes part, as all ranks of this host have said
        for file in Path(self._folder).iterdir():
            file.unlink()

    def judge(self, codes: Codes, host: Host) -> str | None:
        """Decide what to do about the workers; see `torch_compat.elastic.Agent`."""
        now = self._clock()
        for rank in [rank for rank in self._newcomers if declaration.read(self._folder, rank) is not None]:
            del self._newcomers[rank]
        ended = [rank for rank, code in codes.items() if code and rank not in self._down]
        members = [rank for rank in codes if rank not in ended and rank not in self._down]
        members = [rank for rank in members if rank not in self._newcomers]
        self._say_who_is_back(codes, members)
        if not (ended or self._down or self._losses or declaration.given_up(self._folder, members)):
            return None
        declared = {rank: declaration.read(self._folder, rank) for rank in members}
        running = [rank for rank in members if codes[rank] is None]
        go_on = bool(declared) and all(said is not None for said in declared.values())
        for rank in ended:
            self._ended(rank, codes[rank] or 0, now, running if go_on else [], host.spares() > 0)
        if not go_on:
            # Nobody is left here, or somebody does not go on; but a new process may still come to the others elsewhere.
            joining = self._other_hosts and any(codes[rank] is None for rank in self._newcomers)
            return "wait" if joining and not members else None
        self._confirm(members, [said for said in declared.values() if said is not None])
        if running:
            if self._too_many(now) or self._overdue(now):
                return None
            self._end_given_up(codes, declared, host)
            for rank, why in self._down.items():
                if not why:
                    self._start(rank, host)
            for rank in self._newcomers:
                self._down.pop(rank, None)
            return "wait"
        # All have ended. One that was killed when the others had nothing to agree on any more does not matter either;
        # one that raised then does.
        if any(loss.code > 0 for loss in self._unconfirmed):
            return None
        if self._newcomers:
            newcomers = ranks_text(sorted(self._newcomers))
            say(tr("the training has ended before the new process of {ranks} had joined it", ranks=newcomers))
        if self._losses:
            lost = [tr("rank {rank}: {why}", rank=loss.rank, why=loss.why) for loss in self._losses[:SHOWN_LOSSES]]
            more = (
                [tr("and {count} more", count=len(self._losses) - SHOWN_LOSSES)] if self._losses[SHOWN_LOSSES:] else []
            )
            say(tr("the script has ended well; lost on the way: {ranks}", ranks=joined("; ", (*lost, *more))))
        return "succeeded"

    def taking_part(self, ranks: Iterable[int]) -> set[int] | None:
        """Return who takes part by what these ranks of this host have said last; None where nobody has said it."""
        said = [found for rank in ranks if (found := declaration.taking_part(self._folder, rank)) is not None]
        return set().union(*said) if said else None

    def elsewhere(self, store: Any) -> tuple[set[int], set[int]]:
        """Ranks whose place a host that stood by has taken: those that run there, and all."""
        try:
            return self._guests.look(places.beneath(store), time.monotonic())
        except StoreUnavailable:
            return set(), set()  # the host with the store has ended

    def _say_who_is_back(self, codes: Codes, members: Iterable[int]) -> None:
        """Say once that a process of another host has taken the place of a lost rank, of this host or of another."""
        said = [declaration.taking_part(self._folder, rank) for rank in members if codes[rank] is None]
        known = [set(ranks) for ranks in said if ranks is not None]
        if not known or len(known) < len(said):
            return
        there, before = set.intersection(*known), self._there
        self._there = there
        back = sorted(rank for rank in there - (there if before is None else before) if codes.get(rank, 0) is not None)
        if back:
            say(
                tr("{ranks} take part again, in processes of another host", ranks=ranks_text(back))
                if back[1:]
                else tr("{ranks} takes part again, in a process of another host", ranks=ranks_text(back))
            )

    def _end_given_up(self, codes: Codes, declared: Iterable[int], host: Host) -> None:
        for rank in declaration.given_up(self._folder, declared):
            if codes[rank] is None:
                say(tr("rank {rank} does not run, and the others go on without it: its process is ended", rank=rank))
                host.kill(rank)

    def _ended(self, rank: int, code: int, now: float, running: list[int], spare: bool) -> None:
        kind, text, same = declaration.withdraw(self._folder, rank)
        reason: Message | str = ""
        why = tr("it ended with {what}", what=text) if text else tr("it ended with exit code {code}", code=code)
        if kind == "mismatch":
            reason = tr("{why}, which a new process would do too: ranks call different collectives", why=why)
        elif kind == "device":
            reason = tr("{why}, and the device lasts longer than the process", why=why)
        elif kind == "taken":
            reason = tr("a process of another host has its place")
        elif code > 0 and (same or str(code)) in self._reasons:
            reason = tr("{why}, as one before", why=why)
        if code > 0 and kind != "taken":
            self._reasons.add(same or str(code))
        if rank in self._newcomers:
            del self._newcomers[rank]
            say(
                tr(
                    "the new process of rank {rank} has ended with exit code {code} before it joined",
                    rank=rank,
                    code=code,
                )
            )
        else:
            loss = _Loss(rank, 1 + sum(loss.rank == rank for loss in self._losses), code, now, why)
            self._losses.append(loss)
            self._unconfirmed.append(loss)
            if running:
                say(
                    tr(
                        "rank {rank} has ended with exit code {code}; {others} may go on without it",
                        rank=rank,
                        code=code,
                        others=ranks_text(running),
                    )
                )
        self._down[rank] = reason
        if reason and running and (spare or self._limits.restarts or self._other_hosts):  # else nobody expects it
            say(tr("rank {rank} is not started again: {reason}", rank=rank, reason=reason))
        if reason and kind not in ("taken", "device") and self._store is not None:  # nor on a host that stands by
            with contextlib.suppress(StoreUnavailable):
                places.refuse(places.beneath(self._store), rank, self._generation)

    def _confirm(self, members: list[int], declared: list[tuple[int, ...]]) -> None:
        """A process that has joined since knows nothing of earlier losses, but who takes part."""
        there = self.taking_part(members)
        self._unconfirmed = [
            loss
            for loss in self._unconfirmed
            if not any(said.count(loss.rank) >= loss.number for said in declared)
            and (there is None or loss.rank in there)
        ]

    def _overdue(self, now: float) -> bool:
        overdue = [loss.rank for loss in self._unconfirmed if now - loss.found > self._limits.within]
        if overdue:
            say(
                tr(
                    "nobody has gone on without {ranks} in {seconds:.0f} s; all ranks are ended",
                    ranks=ranks_text(overdue),
                    seconds=self._limits.within,
                )
            )
        return bool(overdue)

    def _too_many(self, now: float) -> bool:
        recent = sum(now - loss.found <= self._limits.period for loss in self._losses)
        exceeded = 0 < self._limits.losses < recent
        if exceeded:
            say(
                tr(
                    "{count} ranks were lost in {seconds:.0f} s, more than --max-losses {most}; all ranks are ended",
                    count=recent,
                    seconds=self._limits.period,
                    most=self._limits.losses,
                )
            )
        return exceeded

    def _start(self, rank: int, host: Host) -> None:
        spare = host.spares() > 0
        if not spare and not self._restarts:
            if self._limits.restarts:
                self._down[rank] = tr("no spare is left, and --restart-lost is used up")
                say(tr("rank {rank} is not started again: {reason}", rank=rank, reason=self._down[rank]))
            else:
                self._down[rank] = tr("no spare is left")
            return
        self._restarts -= not spare
        self._lives[rank] += 1
        self._newcomers[rank] = self._lives[rank]
        pid = host.start(rank, {lifecycle.JOINS: str(self._lives[rank])}, spare)
        if spare:
            say(tr("a spare takes the place of rank {rank} (process {pid})", rank=rank, pid=pid))
        else:
            say(tr("rank {rank} is started again (process {pid})", rank=rank, pid=pid))


def say(text: str) -> None:
    """A line of the launcher's own: on stderr, and beside the reports of incidents."""
    text = language.say(text)
    print(f"ncclguard run: {text}", file=sys.stderr, flush=True)
    folder = current_config().report_dir
    if folder is not None:
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            with Path(folder, f"launcher-{socket.gethostname()}-{os.getpid()}.log").open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


EXIT_CODES = {
    0: "the script ended well on all ranks, or on all that went on",
    1: "ranks failed, and the others did not go on; which and why is on stderr",
    2: "this torch has no elastic agent that can be used, or a wrong option",
}
EXAMPLES = {
    "ncclguard run --nproc-per-node 4 examples/train_surviving.py": "four ranks on this host; kill one and look",
    "ncclguard run --nproc-per-node 4 --spares 1 examples/train_surviving.py": "a process waits to take a lost one's place",
    "ncclguard run --nnodes 2 --node-rank 0 --master-addr node0 --nproc-per-node 8 train.py": "on each host, as torchrun",
    "ncclguard run --stand-by --master-addr node0 --nproc-per-node 8 train.py": "on a host that takes a lost one's place",
}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command: its own, and then torchrun's."""
    own = argparse.ArgumentParser(add_help=False)

    def option(name: str, **said: Any) -> None:  # with either spelling, as torchrun's
        own.add_argument(f"--{name}", f"--{name.replace('-', '_')}", **said)

    option(
        "go-on-within",
        type=positive_seconds,
        default=WITHIN,
        help="Seconds in which the survivors of a lost rank must have gone on; else all are ended, as by torchrun.",
    )
    own.add_argument(
        "--spares",
        type=whole_from(0),
        default=0,
        help="Processes of this host that wait to take a lost rank's place; they have imported torch.",
    )
    own.add_argument(
        "--stand-by",
        "--stand_by",
        "--standby",
        action="store_true",
        help="This host has no ranks: its --nproc-per-node processes wait to take the places of ranks that are lost "
        "elsewhere and not started again there. --master-addr and --master-port as on the others. "
        "A launcher that is started again with a --node-rank that had ranks in the job stands by too.",
    )
    option(
        "restart-lost",
        type=whole_from(0),
        default=0,
        help="How many lost ranks of this host are started again, once no spare is left.",
    )
    option(
        "max-losses",
        type=whole_from(0),
        default=0,
        help="End all when more ranks of this host were lost within --losses-within seconds; 0: no limit.",
    )
    option(
        "losses-within",
        type=positive_seconds,
        default=PERIOD,
        help="Seconds in which the losses of --max-losses are counted.",
    )
    parser = Parser(
        prog="ncclguard run",
        description="Start a training as torchrun does, with torchrun's options, and leave alone the ranks that go on without a "
        "lost one.",
        parents=[own, elastic.parser()],
        add_help=False,  # torchrun's parser has it
    )
    return described(parser, EXAMPLES, EXIT_CODES)


def _check_has_no_ranks(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Raise ValueError for options about the ranks of a host where it stands by, and has none."""
    about = ("spares", "restart_lost", "go_on_within", "max_losses", "losses_within")
    given = [name for name in about if getattr(arguments, name) != parser.get_default(name)]
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(
            tr("{some} is about a host's own ranks, of which one that stands by has none: leave it out", some=options)
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a training script on several ranks, as torchrun does; returns the exit code."""
    lacking = elastic.check()
    if lacking:
        print(f"ncclguard run: {lacking}; use torchrun, or torch 2.13", file=sys.stderr)
        return 2
    parser = build_parser()
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    stands_by = arguments.stand_by
    try:
        if stands_by:
            _check_has_no_ranks(parser, arguments)
            elastic.store_address(arguments)
            elastic.launched(arguments)
        else:
            elastic.configured(arguments)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    try:
        elastic.check_script(arguments)
    except ValueError as error:  # no option is wrong: forty lines of them would hide it
        print(f"ncclguard run: {error}", file=sys.stderr)
        return 2
    folder = tempfile.mkdtemp(prefix="ncclguard-run-")
    limits = Limits(arguments.go_on_within, arguments.restart_lost, arguments.max_losses, arguments.losses_within)
    survivors = Survivors(folder, limits, other_hosts=str(arguments.nnodes) != "1")
    os.environ[declaration.FOLDER] = folder
    try:
        if stands_by or elastic.was_here(arguments):
            return stand_by.run(elastic.store_address(arguments), *elastic.launched(arguments), folder, say)
        elastic.launch(arguments, survivors, arguments.spares)
    except Exception as error:
        said = str(error)
        if elastic.is_taken(error):
            said = (
                f"another process listens at port {arguments.master_port} of this host: choose another for all hosts "
                "with --master-port, or --standalone where there is one host"
            )
        elif not elastic.failed(error):
            raise
        print(f"ncclguard run: {said}", file=sys.stderr)
        return 1
    finally:
        os.environ.pop(declaration.FOLDER, None)
        shutil.rmtree(folder, ignore_errors=True)
    return 0
