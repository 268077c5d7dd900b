"""Ranks that processes announce in lines of one form, in whatever words: each has one, and all are there from 0 on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from ncclguard_explain.records import Prefix

#: Forms of lines that are kept, and characters of a form, to bound memory and time.
MOST_FORMS: Final = 300
_SHOWN: Final = 60
#: Lines that are looked at: announcements come before the training.
MOST_LINES: Final = 50_000
#: Words before "rank" with which it is another number than the rank in the job, or of another process.
_OTHER: Final = frozenset(
    ["local", "node", "machine", "group", "tensor", "parallel", "tp", "pp", "dp", "cp", "ep", "mp", "sp", "etp",
     "replica", "host", "cross", "stage", "pipeline", "data", "expert", "context", "model", "shard", "sub", "intra",
     "inter", "remote", "peer", "src", "source", "dst", "root", "from", "to", "for", "by", "of", "other", "master",
     "neighbor", "sequence", "attn", "moe"]
)  # fmt: skip
_RANK = re.compile(
    r"(?:(?<![A-Za-z])([A-Za-z]+)[ _\-])?(?<![A-Za-z])(?:[Rr]ank|RANK|PROCID)(?:[ =:#\]]{1,3}|' ?: ?|\()(\d{1,6})\b(?!/\d+\])"
)
_PID = re.compile(
    r"\b(?:[Pp][Ii][Dd]|[Pp]rocess)[ =:(#]{1,3}(\d{2,9})\b|/proc/(\d{2,9})/environ|^(?:[\w.\-]+)\[(\d{2,9})\]:? "
)
_HOST = re.compile(r"([A-Za-z][\w.\-]*)\[\d+\]:? ")
_DIGITS = re.compile(r"\d+")

#: What stands in front of a line, where that is a rank.
LABEL = re.compile(r"\[(\d{1,6})\] ")
_WRONG: Final = -1
_Process = tuple[str, int]  # its host, which may be "", and its number


@dataclass
class Census:
    """The numbers that lines of each form give to processes; a form that gives one process two numbers is none."""

    _forms: dict[str, dict[_Process, int]] = field(default_factory=dict)
    _labels: dict[int, set[int]] = field(default_factory=dict)  # input -> the ranks whose lines begin with them
    _lines: int = 0

    def read(self, text: str, prefix: Prefix, source: int) -> None:
        """Note whose rank a line of an input tells, if it tells one rank and one process."""
        if self._lines >= MOST_LINES:
            return
        self._lines += 1
        found = [((one[1] or "").lower(), one) for one in _RANK.finditer(text)]
        told = [one for word, one in found if word not in _OTHER]
        is_local = not told
        told = told or [one for word, one in found if word == "local"]
        rank = int(told[0][2]) if len({one[2] for one in told}) == 1 else None
        if (label := LABEL.match(text)) is not None and rank is not None and not is_local:
            self._labels.setdefault(source, set()).add(rank if rank == int(label[1]) else _WRONG)
        pids = {int(next(filter(None, one.groups()))) for one in _PID.finditer(text)}
        pid = prefix.pid if not pids else pids.pop() if len(pids) == 1 else None
        if pid is None:
            return
        if rank is not None:
            start, end = told[0].start(2), told[0].end(2)
            form = text[max(start - _SHOWN, 0) : start] + "*" + text[end : end + 8]
        elif not told and prefix.basis in ("task", "launcher") and prefix.rank is not None:
            rank, form, is_local = prefix.rank, text[:_SHOWN], False
        else:
            return
        form = ("local " if is_local else "") + _DIGITS.sub("0", form)
        if form not in self._forms and len(self._forms) >= MOST_FORMS:
            return
        host = prefix.host or (named[1] if (named := _HOST.match(text)) else "")
        known = self._forms.setdefault(form, {})
        if known.setdefault((host, pid), rank) != rank:
            known[host, pid] = _WRONG

    def proved(self, world: int | None, highest: int) -> Iterator[tuple[str, int, int]]:
        """Yield host, number and rank of each process that forms tell which have all ranks, each of one process.

        `world`: the stated number of ranks, without which local ranks prove nothing, `highest`: the highest rank seen.
        """
        for form, known in self._forms.items():
            size = len(known)
            if size < 2 or size != (world or size) or highest >= size or set(known.values()) != set(range(size)):
                continue
            for (host, pid), rank in known.items() if world or not form.startswith("local ") else ():
                yield host, pid, rank

    def labelled(self) -> frozenset[int]:
        """Return the inputs of which each line begins with its rank, as `mpiexec -prepend-rank` has it: "[17] loss"."""
        return frozenset(source for source, ranks in self._labels.items() if len(ranks) > 1 and _WRONG not in ranks)
