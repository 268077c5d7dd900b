"""What a rank tells its launcher: that it goes on when others are lost, and without whom it has gone on.

A file for each rank, in a folder that `ncclguard run` makes on each host: neither side waits for the other or for a
store, and what a rank has said stays said when it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: The folder; set by `ncclguard run`, and empty or missing under any other launcher.
FOLDER: Final = "NCCLGUARD_RUN_DIR"


def going_on(rank: int, without: Sequence[int]) -> None:
    """This rank goes on when others are lost, and has gone on `without` these (global ranks); also called again."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    path = Path(folder, f"{rank}.json")
    with contextlib.suppress(OSError):  # then the launcher ends all ranks, as torchrun does
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"pid": os.getpid(), "without": list(without)}))
        draft.replace(path)


def read(folder: str, rank: int) -> tuple[int, ...] | None:
    """Without whom a rank has gone on; None for a rank that has not said that it goes on."""
    try:
        said = json.loads(Path(folder, f"{rank}.json").read_text())
        return tuple(int(lost) for lost in said["without"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
