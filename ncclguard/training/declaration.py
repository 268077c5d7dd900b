"""Words of a rank to its launcher: that it goes on when others are lost, without whom it has, and what ended it.

A file for each rank, in a folder that `ncclguard run` makes on each host: neither side waits for the other or for a
store, and what a rank has said stays said when it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from ncclguard import lifecycle, torch_compat
from ncclguard.errors import CollectiveMismatch
from ncclguard.training.joining import PlaceTaken

#: The folder; set by `ncclguard run`, and empty or missing under any other launcher.
FOLDER: Final = lifecycle.RUN_FOLDER
#: The number of the place that a process has taken on a host that stands by; see `places`.
PLACE: Final = "NCCLGUARD_PLACE_NUMBER"


def going_on(
    rank: int, lost: Sequence[int], given_up: Sequence[int] = (), *, ranks: Sequence[int] | None = None
) -> None:
    """This rank goes on when others are lost, and has gone on without these (global ranks, each as often as it was).

    `given_up`: ranks whose process is there and does not run any more, without which it would go on. `ranks`: who takes
    part now, where that is known.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    path = Path(folder, f"{rank}.json")
    with contextlib.suppress(OSError):  # then the launcher ends all ranks, as torchrun does
        draft = path.with_suffix(f".{os.getpid()}")
        said = {"lost": list(lost), "given up": list(given_up), "ranks": ranks, "place": [os.environ.get(PLACE, "0")]}
        draft.write_text(json.dumps(said))
        draft.replace(path)


_watches = False


def watch_end() -> None:
    """Have an exception that ends this process written down for the launcher; once."""
    global _watches
    if not _watches and os.environ.get(FOLDER):
        _watches = True
        lifecycle.watch_uncaught(_ends)


def _ends(error: BaseException) -> None:
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK")
    if not folder or not rank or isinstance(error, KeyboardInterrupt):
        return
    kind = "exception"
    if isinstance(error, PlaceTaken):
        kind = "taken"
    elif isinstance(error, CollectiveMismatch):
        kind = "mismatch"
    elif torch_compat.of_own_device(error):
        kind = "device"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    _write_end(folder, rank, kind, text[:400], f"{type(error).__name__}{where}")


def superseded() -> None:
    """This rank ends because all others are started again."""
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK")
    if folder and rank:
        _write_end(folder, rank, "superseded", "", "")


def _write_end(folder: str, rank: str, kind: str, text: str, same: str) -> None:
    with contextlib.suppress(OSError), Path(folder, f"{rank}.end").open("x") as file:  # what was first is the reason
        json.dump({"kind": kind, "text": text, "same": same}, file)


def withdraw(folder: str, rank: int) -> tuple[str, str, str]:
    """The process of a rank has ended: what it has said is not what its successor says; returns what ended it."""
    Path(folder, f"{rank}.json").unlink(missing_ok=True)
    return ended_by(folder, rank)


def ended_by(folder: str, rank: int) -> tuple[str, str, str]:
    """Return what has ended a process, for its launcher; said once.

    It is "exception", "mismatch", "device", "taken", "superseded" or nothing; then in words; then what is equal when
    the same exception ends another process.
    """
    path = Path(folder, f"{rank}.end")
    try:
        said = json.loads(path.read_text())
        path.unlink()
        return str(said["kind"]), str(said["text"]), str(said["same"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", "", ""


def has_launcher() -> bool:
    """Return whether there is somebody to tell."""
    return bool(os.environ.get(FOLDER))


def given_up(folder: str, ranks: Iterable[int]) -> set[int]:
    """Return, of these ranks of a host, those that do not run, without which all others of them would go on."""
    said = {rank: set(_said(folder, rank, "given up") or ()) for rank in ranks}
    named = set[int]().union(*said.values())
    others = [theirs for rank, theirs in said.items() if rank not in named]
    return named.intersection(said, *others) if others else set()


def read(folder: str, rank: int) -> tuple[int, ...] | None:
    """Without whom a rank has gone on, as `going_on` was told; None for a rank that has not said that it goes on."""
    return _said(folder, rank, "lost")


def taking_part(folder: str, rank: int) -> tuple[int, ...] | None:
    """Return who takes part, as `going_on` was told last; None for a rank that has not said it."""
    return _said(folder, rank, "ranks")


def has_joined(folder: str, rank: int, place: int) -> bool:
    """Return whether the process that has taken this place goes on as this rank."""
    return _said(folder, rank, "place") == (place,)


def _said(folder: str, rank: int, key: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(one) for one in json.loads(Path(folder, f"{rank}.json").read_text())[key])
    except (OSError, ValueError, KeyError, TypeError):
        return None
