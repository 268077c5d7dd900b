"""`ncclguard observe -- COMMAND`: `watch()` in every rank of a program that is not changed.

The command is run with NCCLGUARD_OBSERVE=1, which Python processes read at their start (`ncclguard_observe`): by the
.pth file of an installed wheel, or else by a `sitecustomize` in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import ncclguard_observe
from ncclguard_explain.command_line import Parser, described
from ncclguard_explain.language import say, told, tr

_NOT_FOUND: Final = 127
_NOT_RUN: Final = 126
EXIT_CODES: Final = {
    0: "that of the command, and so is every other code",
    2: "a wrong option, or no command",
    _NOT_RUN: "the command cannot be executed",
    _NOT_FOUND: "there is no such command",
}
_EXAMPLES: Final = {
    "ncclguard observe -- torchrun --nproc-per-node 8 train.py": "a rank that holds the others up is named",
    "NCCLGUARD_TIMEOUT=120 ncclguard observe -- srun python train.py": "after two minutes",
}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = Parser(
        prog="ncclguard observe",
        usage="ncclguard observe [-h] -- COMMAND [ARGUMENT ...]",
        description="Run a command, and watch() in every rank that it starts: the program is not changed, nothing of what it "
        "computes, and nothing ends it. Where the command cannot be changed, NCCLGUARD_OBSERVE=1 in its environment does the same (not from an "
        "editable install).",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what starts the ranks, with its arguments")
    return described(parser, _EXAMPLES, EXIT_CODES)


def main(argv: Sequence[str] | None = None) -> int:
    """Become the command; returns only where that is impossible."""
    parser = build_parser()
    words: list[str] = parser.parse_args(argv).command
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        parser.error(told("give a command: {example}", example=next(iter(_EXAMPLES))))
    try:
        os.execvpe(words[0], words, observing(os.environ))
    except OSError as error:
        text = f"ncclguard observe: {words[0]}: {error.strerror}"
        if words[0].endswith(".py"):
            text += "; " + told("give the command that starts it, such as torchrun")
        print(text, file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUN


def observing(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which the Python processes of a command observe, and torch's flight recorder is on."""
    found = {**environ, ncclguard_observe.VARIABLE: "1"}
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:
        found.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the default from torch 2.11 on, 0 before
    if not _read_at_start(found):
        folder = str(Path(ncclguard_observe.__file__).parent)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, found.get("PYTHONPATH"))))
    return found


def _read_at_start(environ: Mapping[str, str]) -> bool:
    """Return whether this Python reads the variable by itself, so that nobody's `sitecustomize` needs to stand back."""
    look = "import sys; sys.exit('ncclguard_observe' not in sys.modules)"
    return subprocess.run([sys.executable, "-c", look], env=dict(environ), check=False).returncode == 0


def begin() -> None:
    """Watch this process, unless its program does so itself, and say on rank 0 what is reported when."""
    import torch.distributed as dist

    from ncclguard import torch_compat
    from ncclguard.watch import watcher

    world = dist.group.WORLD
    if watcher.ensure() and world is not None and world.rank() == 0:
        for text in _said(world.size(), torch_compat.time_limit(world)):
            print(f"ncclguard: {say(text)}", file=sys.stderr, flush=True)


def _said(ranks: int, own: float | None) -> Iterator[str]:
    """Return what the limits of this job come to; `own` is torch's, in seconds."""
    from ncclguard.phases import resolve_timeout

    short, long = (resolve_timeout(None, numel) for numel in (0, sys.maxsize))
    limit = (
        f"{short:g} s" if short == long else tr("{short} s to {long} s, by size", short=f"{short:g}", long=f"{long:g}")
    )
    yield tr(
        "observes the {number} ranks of this job; a collective that stands still is reported after {limit}, a rank that "
        "ends at once (NCCLGUARD_TIMEOUT sets the limit)",
        number=ranks,
        limit=limit,
    )
    if own is not None and own < long:
        yield tr(
            "torch itself gives up after {seconds} s: set NCCLGUARD_TIMEOUT below that, so that the ranks still answer "
            "when they are asked who is late",
            seconds=f"{own:g}",
        )
