"""Take the prefixes of launchers, loggers and progress bars off a line, and keep what they say."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
_RANK = re.compile(r"\[rank(\d{1,6})\]")
_MPI = re.compile(r"^\[\d+,(\d{1,6})\]<std(?:out|err)>:\s?")
_SRUN = re.compile(r"^\s*(\d{1,6}): ")
_HOST_RANK = re.compile(r"^\[([A-Za-z][\w.\-]*):(\d{1,6})\]:\s?")
_LOCAL = re.compile(r"^\[(?!rank\d)(?:default|[A-Za-z_]\w*?)(\d{1,4})\]:")
_RAY = re.compile(
    r"\((?P<actor>[A-Za-z_][\w.:]*)(?: rank=(?P<rank>\d+))? pid=(?P<pid>\d+)(?:, ip=(?P<ip>[\d.:a-f]+))?\)\s?"
)
_REPEATED = re.compile(r"\[repeated (\d+)x across (?:the )?cluster\]")
_GLOG = re.compile(r"(?<![\w])[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_ISO = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_US = re.compile(r"(\d\d)/(\d\d)/(\d{4}) (\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_DAYS = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What stands in front of a message: a global rank (or None), how it is known, the rest of the line, a clock."""

    text: str
    rank: int | None
    basis: str
    when: float | None
    hidden: int
    tag: str


def strip_ansi(text: str) -> str:
    """Return the text without terminal colours."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def _seconds(month: int, day: int, hour: int, minute: int, second: int, fraction: str | None) -> float:
    part = float("0." + fraction) if fraction else 0.0
    days = _DAYS[month - 1] + day if 1 <= month <= 12 else day
    return ((days * 24 + hour) * 60 + minute) * 60.0 + second + part


def clock(text: str) -> float | None:
    """Return the line's time in seconds since the start of some year, or None; hosts' clocks are never compared."""
    for pattern, order in ((_GLOG, (1, 2, 3, 4, 5, 6)), (_ISO, (2, 3, 4, 5, 6, 7)), (_US, (1, 2, 4, 5, 6, 7))):
        found = pattern.search(text)
        if found:
            month, day, hour, minute, second = (int(found.group(index)) for index in order[:5])
            return _seconds(month, day, hour, minute, second, found.group(order[5]))
    return None


def split_prefix(raw: str) -> Prefix:
    """Split one line into its prefixes and its message.

    Example:
        >>> split_prefix("11: [rank11]:[E617 10:00:00.5 ProcessGroupNCCL.cpp:632] hello").rank
        11
    """
    text = strip_ansi(raw)
    rank: int | None = None
    basis = tag = ""
    hidden = 0
    found = _MPI.match(text)
    if found:
        rank, basis, text, tag = int(found[1]), "launcher", text[found.end() :], found[0]
    else:
        found = _SRUN.match(text)
        if found:
            rank, basis, text, tag = int(found[1]), "task", text[found.end() :], found[0]
        else:
            found = _HOST_RANK.match(text) or _LOCAL.match(text)
            if found:
                tag, text = found[0], text[found.end() :]
    found = _RAY.search(text[:400])
    if found:
        tag += found[0]
        if found["rank"] is not None:
            rank, basis = int(found["rank"]), "launcher"
        text = text[found.end() :]
    more = _REPEATED.search(text)
    if more:
        hidden = int(more[1])
        text = text[: more.start()].rstrip()
    found = _RANK.search(text)
    if found:
        rank, basis, tag = int(found[1]), "prefix", tag + found[0]
    return Prefix(text, rank, basis, clock(text), hidden, tag)


def message_of(text: str) -> str:
    """Return the part after `[rank3]: ` (and whatever a progress bar left in front of it)."""
    found = _RANK.search(text)
    if found is None:
        return text
    rest = text[found.end() :]
    rest = rest.removeprefix(":")
    return rest.removeprefix(" ")
