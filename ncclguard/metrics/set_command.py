"""`ncclguard set`: change settings of a running job, on all its ranks at the same operation."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ncclguard.metrics.control import ControlError, ask, choose, first_answer
from ncclguard.metrics.settings import SETTINGS

#: Seconds between two looks at whether the ranks have agreed.
LOOK = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Propose the settings and wait for the agreement; 0: in force, 1: not yet, 2: refused or not possible."""
    options = _parser().parse_args(argv)
    try:
        job, ranks = choose(options.job)
        values = dict(map(_assignment, options.settings))
        path, answer = first_answer(ranks, {"command": "set", "values": values})
        return _wait(job, path, int(answer["proposal"]), values, options.wait)
    except (ControlError, ValueError) as error:
        print(f"ncclguard set: {error}", file=sys.stderr)
        return 2


def _wait(job: str, path: Path, proposal: int, values: dict[str, float | None], seconds: float) -> int:
    text = ", ".join(f"{name}={'none' if value is None else f'{value:g}'}" for name, value in values.items())
    until = time.monotonic() + seconds
    while True:
        status = ask(path, {"command": "status"})
        groups, every = status["adopted"], status["statistics_every"]
        pending = [group for group, (number, _) in groups.items() if number < proposal]
        if groups and not pending:
            for group, (_, after) in groups.items():
                print(f"{text} is in force on all ranks of group {group} of job {job}, since operation {after}")
            return 0
        if time.monotonic() >= until:
            break
        time.sleep(LOOK)
    where = f"groups {', '.join(pending)}" if pending else "the job, which has no guarded group yet,"
    print(
        f"{text} is proposed; {where} will take it with the next exchange: every {every}th operation of a group has one"
    )
    return 1 if seconds > 0 else 0


def _assignment(text: str) -> tuple[str, float | None]:
    name, equals, value = text.partition("=")
    if not equals or name not in SETTINGS:
        raise ValueError(
            f"{text!r} cannot be set in a running job: write NAME=VALUE, with one of {', '.join(SETTINGS)}"
        )
    if value.lower() == "none":
        return name, None
    try:
        return name, float(value.replace("_", ""))
    except ValueError:
        raise ValueError(f"{text!r} has no number: write for example {name}=900, or {name}=none") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ncclguard set",
        description="Change settings of a running job, on all its ranks after the same operation. The job needs "
        "setup_nccl_monitoring(); what the program gives as an argument stays.",
    )
    parser.add_argument(
        "settings", nargs="+", metavar="NAME=VALUE", help=f"{', '.join(SETTINGS)}; seconds or a number, or none"
    )
    parser.add_argument("--job", help="name of the job; not needed when there is one on this host")
    parser.add_argument("--wait", type=float, default=30.0, help="seconds to wait for the agreement (default 30)")
    return parser
