"""`ncclguard run`: torchrun, except that the ranks that go on when one is lost are left alone.

torchrun ends all ranks of a job when one fails. This does so too, unless every rank of this host that still runs has
said that it goes on without those that are lost (see `declaration`; `resilient_step` does), and within a time says
without whom. The launcher starts no rank again yet.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ncclguard.command_line import described
from ncclguard.incident.model import ranks_text
from ncclguard.torch_compat import elastic
from ncclguard.training import declaration

log = logging.getLogger("ncclguard")

#: Seconds in which survivors have to say that they have gone on; a rank may be in a long computation till then.
WITHIN = 300.0


class Survivors:
    """Decides for the agent of one host, from exit codes and from what the ranks have declared in `folder`."""

    def __init__(self, folder: str, within: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._within = within
        self._clock = clock
        self._lost: dict[int, float] = {}  # rank -> when it was found to have failed

    def started(self) -> None:
        """Workers are about to start: what earlier ones have said is not theirs."""
        self._lost.clear()
        for file in Path(self._folder).iterdir():
            file.unlink()

    def judge(self, codes: dict[int, int | None]) -> str | None:
        """What to do about workers of which some have failed; see `torch_compat.elastic.Agent`."""
        now = self._clock()
        failed = [rank for rank, code in codes.items() if code]
        running = [rank for rank, code in codes.items() if code is None]
        declared = {rank: declaration.read(self._folder, rank) for rank in codes if rank not in failed}
        for rank in failed:
            if rank not in self._lost:
                self._lost[rank] = now
                if all(said is not None for said in declared.values()) and running:
                    print(
                        f"ncclguard run: rank {rank} has ended with exit code {codes[rank]}; {ranks_text(running)} "
                        f"may go on without it",
                        file=sys.stderr,
                        flush=True,
                    )
        if not declared or any(said is None for said in declared.values()):
            return None  # nobody is left here, or somebody does not go on
        without = [set(said) for said in declared.values() if said is not None]
        unconfirmed = [rank for rank in failed if not any(rank in said for said in without)]
        if running:
            overdue = [rank for rank in unconfirmed if now - self._lost[rank] > self._within]
            if overdue:
                print(
                    f"ncclguard run: nobody has gone on without {ranks_text(overdue)} in {self._within:.0f} s; "
                    "all ranks are ended",
                    file=sys.stderr,
                    flush=True,
                )
            return None if overdue else "wait"
        # All have ended. One that was killed when the others had nothing to agree on any more does not matter either;
        # one that raised then does.
        raised = [rank for rank in unconfirmed if (codes[rank] or 0) > 0]
        return None if raised else "succeeded"


EXIT_CODES = {
    0: "the script ended well on all ranks, or on all that went on",
    1: "ranks failed, and the others did not go on; which and why is on stderr",
    2: "this torch has no elastic agent that can be used, or a wrong option",
}
EXAMPLES = {
    "ncclguard run --nproc-per-node 4 examples/train_surviving.py": "four ranks on this host; kill one and look",
    "ncclguard run --nnodes 2 --node-rank 0 --master-addr node0 --nproc-per-node 8 train.py": "on each host, as torchrun",
}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command: torchrun's, and one of its own."""
    parser: argparse.ArgumentParser = elastic.parser()
    parser.prog = "ncclguard run"
    parser.add_argument(
        "--go-on-within",
        "--go_on_within",
        type=float,
        default=WITHIN,
        help="Seconds in which the survivors of a lost rank must have gone on; else all are ended, as by torchrun.",
    )
    return described(parser, EXAMPLES, EXIT_CODES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a training script on several ranks, as torchrun does; returns the exit code."""
    lacking = elastic.check()
    if lacking:
        print(f"ncclguard run: {lacking}; use torchrun, or torch 2.13", file=sys.stderr)
        return 2
    arguments = build_parser().parse_args(list(sys.argv[1:] if argv is None else argv))
    folder = tempfile.mkdtemp(prefix="ncclguard-run-")
    survivors = Survivors(folder, arguments.go_on_within)
    os.environ[declaration.FOLDER] = folder
    try:
        elastic.launch(arguments, survivors.judge, survivors.started)
    except Exception as error:
        if not elastic.failed(error):
            raise
        print(f"ncclguard run: {error}", file=sys.stderr)
        return 1
    finally:
        os.environ.pop(declaration.FOLDER, None)
        shutil.rmtree(folder, ignore_errors=True)
    return 0
