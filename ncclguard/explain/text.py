"""Make records out of the lines that people have: prefixes off, wrapped lines joined, glued records apart.

What stands in a file is rarely what torch printed. Launchers and shippers put tags in front of every line, terminals
and shippers break a line anywhere, a progress bar has no newline, an issue form loses them all. A pattern must see
none of that, so it happens here, before any pattern is tried.
"""

from __future__ import annotations

import itertools
import json
import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Physical lines that one record may be spread over.
MAX_JOINED = 24
#: A line above this many characters is cut: it is data, not a message.
LONGEST = 1 << 16

# Colours, also those whose escape character a copy and paste has lost.
_ANSI = re.compile(
    r"\^\[\[[0-9;?>]*[A-Za-z]|\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\[(?:\d{1,3};)*\d{0,3}m(?=[\s(\[]|\w)|\[0m$|\[0m"
)
_RANK = re.compile(r"\[rank ?(\d{1,6})\]")
_REPEATED = re.compile(r"\[repeated (\d+)x across (?:the )?cluster\]")
_GLOG = re.compile(r"(?<![\w])[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_ISO = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_US = re.compile(r"(\d\d)/(\d\d)/(\d{4}) (\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_DAYS = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)

_STAMP = r"\[?\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z| ?[+-]\d\d:?\d\d)?\]?"
#: What may stand in front of a line, outermost first, as often as it comes. The named groups are kept.
_OUTER = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?:> ?)+(?=\S)",  # a quotation in a mail or an issue
        r"\[\d+,(?:mpirank:)?(?P<task>\d{1,6})(?:,[^\]]*)?\]<std(?:out|err)>:\s?",  # mpirun --tag-output, SageMaker
        r"\s*(?P<srun>\d{1,6}): (?=\S)",  # srun -l
        r"\[(?P<host>[A-Za-z][\w.\-]*):(?P<place>\d{1,6})\]:\s?",
        r"\[(?!rank\d)(?:default|[A-Za-z_]\w*?)(?P<local>\d{1,4})\]:",  # torchrun --tee, with the role's name
        r"\[pod/(?P<pod>[^\]\s]+)\] ?",  # kubectl logs --prefix
        r"[\w./-]+\s*\|(?: |$)(?!\d)",  # docker compose, SageMaker
        rf"{_STAMP}(?: std(?:out|err) (?P<cri>[FP]) |\t| )",  # CRI, kubectl, docker
        r"\d{13}\t",  # CloudWatch in milliseconds
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?P<syshost>[\w.\-]+) [\w./\-]+(?:\[\d+\])?: ",  # syslog, journalctl
        (
            r"\((?P<actor>[A-Za-z_][\w.:#]*(?:\([^)]*\))?)(?: rank=(?P<actor_rank>\d+))?(?:,? pid=(?P<pid>\d+))"
            r"(?:, ip=(?P<ip>[\d.:a-f]+))?\) ?"
        ),  # Ray, vLLM
        r"std(?:err|out): ",
        r"(?P<pdsh>(?:[A-Za-z][\w.\-]*\d[\w.\-]*|\d{1,3}(?:\.\d{1,3}){3})): (?=\[|Traceback|  |\w+Error|std|\S+:\d+:\d+ \[)",
        r"[Rr]ank[ _=:\-]?(?P<own>\d{1,6}): ",
    )
)
_RAY = _OUTER[10]
#: Where a record begins in the middle of a line.
_HEAD = re.compile(
    r"\[rank\d{1,6}\]:(?=\s?\[[EWIF])|\[rank\d{1,6}\]: |"
    r"(?<![\]:\s])(?<!\]: )\[[EWIF](?:\d{3,4} \d\d:\d\d:[\d.]+)? ?\w+\.(?:cpp|hpp|cc):\d+\]|"
    r"[\w.\-]+:\d+:\d+ \[\d+\] (?:NCCL (?:INFO|WARN)|\S+:\d+ NCCL WARN)|"
    r"(?<=[^\s\]:])\s*Traceback \(most recent call last\):|(?<=\s)(?:ERROR|WARNING|INFO):torch[\w.]*:"
)
_INNER = re.compile(r"\[rank\d{1,6}\]|\[[EWIF]\d{3,4} |\[[EWIF] \w+\.cpp|[EWIF]\d{4} \d\d:\d\d:\d\d")
#: A line that begins like this goes on nothing.
_STARTS = re.compile(
    r"\s*(?:\[rank\d+\]|\[[EWIF](?:\d{3,4})? |[EWIF]\d{4} \d\d:|Traceback \(|terminate called|what\(\): |File \"|"
    r"Exception raised from|frame #\d|Root Cause|Thread 0x|Fatal Python|[\w.\-]+:\d+:\d+ \[\d+\] |srun: |slurmstepd: |"
    r"(?:INFO|WARNING|ERROR|DEBUG|WARN|CRITICAL)[: ]|(?:\w+\.)*[A-Z]\w*(?:Error|Exception): |\{\"|<<<<|={4}|-{4})"
)
_DIGITS = re.compile(r"\d+")
_BAR = re.compile(r"\d{1,3}%\|[^|]*\|")

# A construct that has begun and not ended goes on in the next line: (begin, end). Blanks may have been lost.
_OPEN = tuple(
    (re.compile(begin.replace(" ?", " ").replace(" ", r"\s*")), re.compile(end.replace(" ?", " ").replace(" ", r"\s*")))
    for begin, end in (
        (r"Work[A-Z]\w*\(", r"\)"),
        (r"(?:Watchdog caught|Caught collective|caught collective)", r"ran for \d+ milli"),
        (r"timed out in blocking|Work Work\w+\([^)]*\) timed", r"blocking wait"),
        (r"\[PG(?: ID)? \d", r"\]"),
        (r"is running (?:inconsistent )?collective: (?!Coll)", r"CollectiveFingerPrint\("),
        (r"(?:detected by watchdog at work|Timeout at NCCL work)", r"ast completed (?:NCCL )?work: -?\d+"),
        (r"dump signal due to a coll", r"ast completed (?:NCCL )?work: -?\d+"),
        (r"store based barrier", r"timeout=[^)]*\)"),
        (r"Timed out initializing process", r"timeout=[^)]*\)"),
        (r"failed \(exitcode:", r"local_rank: \d+ \((?:pid|process ID): \d+\)"),
        (r"Got completion", r"vendor.err.? ?\d+"),
        (r"setting up NCCL communicator", r"got error: \S{4}"),
        (r"Ranks? [\d, ]+ failed(?: to)?(?: pass)?", r"in \d+ ms"),
        (r"hccl (?:fftsplus|aicpu|task)", r"timeout:? ?\d+\D"),
        (r"exits with|sigkill_handler\] \[", r"return code = -?\d"),
        (r"Timed out waiting", r"operation to complete|clients joined|\]"),
        (r"wait timeout after", r"keys: \S+"),
        (r"client socket has (?:timed out|failed)", r"\)"),
        (r"\[rank\d*$|\[[EWIF]\d{3,4} [^\]]*$", r"\]\s*\S"),
        (r"EI0002", r"rankSize ?:?\[?\d+|rank size"),
        (r"Operation timed out after", r"\d+ ms"),
        (r"agging ranks|\[\d+(?:, \d+)*\] (?:joined but|finished coll)", r"#\d+|timeout"),
        (r"NCCL WARN", r"\w{3}"),
        (r"exited on", r"signal \d+"),
        (r"terminated with (?:si|ex)", r"(?:signal|exit code|code) \S+"),
    )
)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What stands in front of a message: a global rank (or None), how it is known, the rest of the line, a clock."""

    text: str
    rank: int | None = None
    basis: str = ""
    when: float | None = None
    hidden: int = 0
    tag: str = ""
    local_rank: int | None = None
    node: int | None = None
    pid: int | None = None
    partial: bool = False
    host: str = ""


def strip_ansi(text: str) -> str:
    """Return the text without terminal colours."""
    return _ANSI.sub("", text) if "\x1b" in text or "m" in text and "[" in text else text


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


def _unwrapped(text: str) -> str:
    """Return the message of a line that a shipper wrote as JSON (docker's json-file, Fluent Bit, Stackdriver)."""
    if not text.startswith("{") or '"' not in text[:4]:
        return text
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for name in ("log", "message", "msg", "textPayload", "line"):
        if isinstance(data, dict) and isinstance(data.get(name), str):
            return str(data[name]).rstrip("\n")
    return text


def split_prefix(raw: str) -> Prefix:
    """Split one line into its prefixes and its message.

    Example:
        >>> split_prefix("11: [rank11]:[E617 10:00:00.5 ProcessGroupNCCL.cpp:632] hello").rank
        11
    """
    text = _unwrapped(strip_ansi(raw))
    when = clock(text[:200])
    rank = local = node = pid = None
    basis = tag = host = ""
    partial = False
    for _ in range(8):
        for pattern in _OUTER:
            found = pattern.match(text)
            if found and found.end():
                break
        else:
            break
        said = found.groupdict()
        if said.get("task") is not None:
            rank, basis = int(said["task"]), "launcher"
        elif said.get("srun") is not None:
            rank, node, basis = int(said["srun"]), int(said["srun"]), "task"
        elif said.get("local") is not None:
            local = int(said["local"])
        elif said.get("actor") is not None:
            pid = int(said["pid"])
            if said.get("actor_rank") is not None:
                rank, basis = int(said["actor_rank"]), "launcher"
        elif said.get("own") is not None:
            rank, basis = int(said["own"]), "launcher"
        partial |= said.get("cri") == "P"
        host = said.get("pdsh") or said.get("host") or said.get("pod") or said.get("syshost") or host
        tag, text = tag + found[0], text[found.end() :]
    if "pid=" in text[:400] and pid is None:  # behind a progress bar
        found = _RAY.search(text[:400])
        if found:
            tag, pid = tag + found[0], int(found["pid"])
            if found["actor_rank"] is not None:
                rank, basis = int(found["actor_rank"]), "launcher"
            text = text[found.end() :]
    hidden = 0
    more = _REPEATED.search(text)
    if more:
        hidden = int(more[1])
        text = text[: more.start()].rstrip()
    found = _RANK.search(text)
    if found:
        rank, basis, tag = int(found[1]), "prefix", tag + found[0]
    return Prefix(text, rank, basis, when, hidden, tag, local, node, pid, partial, host)


def message_of(text: str) -> str:
    """Return the part after `[rank3]: ` (and whatever a progress bar left in front of it)."""
    found = _RANK.search(text)
    if found is None:
        return text
    rest = text[found.end() :]
    rest = rest.removeprefix(":")
    return rest.removeprefix(" ")


def unfinished(text: str) -> int:
    """Return how many constructs of a message have begun and not ended.

    Example:
        >>> unfinished("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpTy")
        2
    """
    count = 0
    for begin, end in _OPEN:
        last = None
        for last in begin.finditer(text):
            pass
        if last is not None and end.search(text, last.end()) is None:
            count += 1
    start = text.find('{"')
    if 0 <= start < 80 and text.count("{", start) > text.count("}", start):
        count += 1
    at = text.rfind("CollectiveFingerPrint(")
    if at >= 0:
        depth = 0
        for letter in text[at:]:
            depth += (letter == "(") - (letter == ")")
            if depth == 0 and letter == ")":
                break
        else:
            if "SequenceNumber=0OpType" not in text[at:]:
                count += 1
    return count


def _headless(text: str) -> bool:
    """Whether a line may be the rest of another: it has no head of its own."""
    return bool(text.strip()) and _STARTS.match(text) is None


def _looks_broken(text: str) -> bool:
    """Whether a line with a C++ head stops in the middle of a sentence."""
    end = text.rstrip()[-1:]
    return _INNER.search(text) is not None and len(text) >= 30 and (end.isalpha() or end in ",:[(=-_/")


def _rest(previous: str, line: str) -> str:
    """Return what a physical line adds to the one before: without a prefix that both carry."""
    common = os.path.commonprefix((previous, line))
    cut = max(common.rfind(letter) for letter in " ]>|:\t") + 1
    if cut >= 4 and any(letter.isalnum() for letter in common[:cut]):
        line = line[cut:]
    return split_prefix(line).text.strip()


def _width(lines: Sequence[str]) -> int:
    """Return the width at which these lines were cut, 0 where nothing says that they were."""
    lengths = [len(line.rstrip()) for line in lines]
    width = max(lengths, default=0)
    return width if width >= 60 and lengths.count(width) >= 2 else 0


def _alike(first: str, second: str) -> bool:
    """Whether two lines begin with the same words: two records of one kind, not one in two pieces."""
    return _DIGITS.sub("", first[:20]) == _DIGITS.sub("", second[:20])


def join(lines: Sequence[str], at: int) -> tuple[int, int, str]:
    """Return (first, last, text) of the record that line `at` belongs to; `text` is raw, with its first prefix.

    A line goes on in the next one when a construct in it is not finished, when it stops in the middle of a sentence
    that
    has a head, or when several lines here end at the same column. Wrapped pieces are joined without a blank: the break
    may stand inside a word or a number, so patterns allow for blanks that are missing.
    """
    width = _width(lines)
    first = at
    while first > 0 and at - first < 8 and _headless(split_prefix(lines[first]).text):
        before = split_prefix(lines[first - 1]).text
        full = (
            width
            and len(lines[first - 1].rstrip()) >= width - 1
            and not _alike(before, split_prefix(lines[first]).text)
        )
        if not full and not unfinished(before) and not _looks_broken(before):
            break
        first -= 1
    text, last = lines[first].rstrip(), first
    best = (unfinished(text) + (first < at), text, first)
    start = split_prefix(lines[first])
    partial, opening = start.partial, start.text
    skipped = 0
    for index in range(first + 1, min(len(lines), first + 1 + MAX_JOINED)):
        full = bool(width) and len(lines[index - 1].rstrip()) >= width - 1
        if last >= at and best[0] == 0 and not full and not partial:
            break
        line = lines[index]
        prefix = split_prefix(line)
        body = prefix.text
        if not body.strip() or (_BAR.search(body) and _INNER.search(body) is None):
            skipped += 1
            if skipped > 2:
                break
            continue
        if not _headless(body) or (best[0] == 0 and not partial and _alike(opening, body)):
            break
        text = text + _rest(lines[index - 1], line)
        last, partial = index, prefix.partial
        if len(text) > LONGEST:
            break
        left = unfinished(text)
        if left < best[0] or (last <= at and left <= best[0]) or (left <= best[0] and full):
            best = (left, text, last)
    _, text, last = best
    if last < at:  # the pieces did not fit: the line stands for itself
        return at, at, lines[at].rstrip()
    return first, last, text


def pieces(text: str) -> list[str]:
    """Return the records that one line holds: it is cut wherever a head stands in the middle.

    Example:
        >>> pieces("a timeout.[rank2]:[E801 14:37:42.7 x.cpp:1] b")
        ['a timeout.', '[rank2]:[E801 14:37:42.7 x.cpp:1] b']
    """
    starts = [found.start() for found in _HEAD.finditer(text) if found.start() > 0]
    if not starts:
        return [text]
    bounds = [0, *starts, len(text)]
    return [piece for a, b in itertools.pairwise(bounds) if (piece := text[a:b]).strip()]
