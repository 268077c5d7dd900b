"""Messages of many lines: tracebacks, stacks, a launcher's summary, desync and RAS reports, torch's printed analysis.

Each reader takes the record that opens the message and the raw lines after it, and follows only lines that can belong
to it: those with the same prefix where there is one, since the lines of several ranks interleave.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from ncclguard.explain.facts import Fact, Kind, Work
from ncclguard.explain.patterns import numbers
from ncclguard.explain.text import Prefix, message_of, split_prefix

Following = Callable[[int], Sequence[str]]

_EXCEPTION = re.compile(r"^(?P<type>(?:[a-zA-Z_]\w*\.)*[A-Z]\w*)(?:: ?(?P<text>.*))?$")
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
_PYSPY = re.compile(r"^\s+(\S+) \(([^()]+):(\d+)\)$")
_SPY_HEAD = re.compile(r"Thread (?:0x)?[\w]+ \([\w+ ]+\)|Process (\d+): ")
_SUMMARY_RANK = re.compile(r"rank\s*: (\d+) \(local_rank: (\d+)\)")
_SUMMARY_EXIT = re.compile(r"exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_SUMMARY_TRACE = re.compile(r"traceback\s*: (.*)")
_SUMMARY_HOST = re.compile(r"host\s*: (\S+)")
_DESYNC_AT = re.compile(r"\[(\d+)\] Timeout at collective: (\w+), #(\d+)")
_NEVER = re.compile(r"ranks \[([\d, ]+)\] are the lagging ranks that caused this timeout")
_UNFINISHED = re.compile(r"\[([\d, ]+)\] joined but didn't finish collective #(\d+)")
_NOT_JOINED = re.compile(r"\[([\d, ]+)\] finished collective #(\d+), but didn't join collective #(\d+)")
_STATE_HEAD = re.compile(r"#(\d+) (started|finished) ranks:")
_STATE = re.compile(r"\[([\d, ]+)\] (?:started|finished) (\w+)")
_CULPRIT = re.compile(
    r"Culprit rank (\d+); Error type: (\w+)(?:, (?:Expected ([^:']*): '(.*?)' does not match found [^:']*: "
    r"'(.*?)'|([^,]*)))?"
)
_FR_SEQ = re.compile(r"Collective sequence number: (\d+)")
_FR_NAME = re.compile(r"collective: (?:nccl2?:|gloo:)?(\w+)")


def read(text: str, prefix: Prefix, following: Following, make: Fact) -> tuple[list[Fact], bool]:
    """Return the facts of the message that a record opens, and whether it was one: then no row need be tried on it."""
    if "Traceback (most" in text:
        fact = _traceback(text, prefix, following, make)
        return ([fact] if fact is not None else []), True
    if "most recent call first" in text or "Fatal Python error" in text or '"MainThread"' in text:
        if "Exception raised from" in text:
            return [], True
        fact = _stack(following, make)
        return ([fact] if fact is not None else []), fact is not None
    if ("(local_rank: " in text or "first observed failure" in text) and "failed (exitcode" not in text:
        found = list(_summary(text, following, make))
        return found, bool(found)
    if "Culprit rank" in text or "Collective sequence number" in text:
        return list(_analysis(text, following, make)), True
    if "operation counts" in text or "job process" in text or "unresponsive" in text or "Missing communicator" in text:
        found = list(_ras(text, following, make))
        return found, bool(found)
    if "collective" in text or "agging" in text or "latest states" in text:
        found = list(_desync(text, following, make))
        return found, bool(found)
    if "Last error:" in text:
        return list(_last_error(text, following, make)), False
    return [], False


def _last_error(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    from ncclguard.explain.patterns import warning_class

    rest = text[text.find("Last error:") + 11 :].strip() or " ".join(
        message_of(split_prefix(row).text).strip() for row in following(1)
    )
    if rest:
        yield make.clone(kind=Kind.NCCL_WARN, name=warning_class(rest), detail=rest[:400], text=rest[:400])


def _flat_traceback(text: str, make: Fact) -> Fact | None:
    """Read a traceback whose newlines are lost."""
    frames = [f"{found[1]}:{found[2]} in {found[3]}" for found in _FRAME.finditer(text)]
    last = None
    for last in re.finditer(r"(?<![\w.])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): (.*)", text):
        pass
    if not frames or last is None:
        return None
    return make.clone(
        kind=Kind.EXCEPTION, name=last[1], detail=last[2][:600], text=last[0][:600], frames=tuple(frames[-12:])
    )


def _traceback(text: str, prefix: Prefix, following: Following, make: Fact) -> Fact | None:
    """Follow one traceback to its last line; lines of other ranks in between are skipped."""
    if 'File "' in text:
        flat = _flat_traceback(text, make)
        if flat is not None:
            return flat
    own = re.sub(r"\d{4}[-/]\d\d[-/]\d\d[ T][\d:.,]+Z?", "", prefix.tag)
    frames: list[str] = []
    tail = ""
    for raw in following(400):
        row = split_prefix(raw)
        if own and re.sub(r"\d{4}[-/]\d\d[-/]\d\d[ T][\d:.,]+Z?", "", row.tag) != own:
            continue
        body = message_of(row.text).rstrip()
        if not body or body.startswith((" ", "\t", "^")):
            found = _FRAME.search(body)
            if found:
                frames.append(f"{found[1]}:{found[2]} in {found[3]}")
            continue
        if body.startswith("Traceback") or "direct cause" in body or "During handling" in body:
            tail = ""
            continue
        found = _EXCEPTION.match(body)
        if found is None:
            frame = _FRAME.search(body)
            if frame:  # the indentation is lost
                frames.append(f"{frame[1]}:{frame[2]} in {frame[3]}")
                continue
            if own or not frames:
                return None
            tail = tail or body
            continue
        return make.clone(
            kind=Kind.EXCEPTION,
            name=found["type"],
            detail=(found["text"] or "")[:600],
            text=body[:600],
            frames=tuple(frames[-12:]),
        )
    return make.clone(kind=Kind.STACK, frames=tuple(frames[-12:])) if frames else None


def _stack(following: Following, make: Fact) -> Fact | None:
    """Read a stack printed by faulthandler or py-spy (innermost frame first) into outermost-first order."""
    frames: list[str] = []
    for raw in following(60):
        body = message_of(split_prefix(raw).text)
        found = _FRAME.search(body)
        if found:
            frames.append(f"{found[1]}:{found[2]} in {found[3]}")
            continue
        spy = _PYSPY.match(body.rstrip())
        if spy:
            frames.append(f"{spy[2]}:{spy[3]} in {spy[1]}")
        elif frames:
            break
    return make.clone(kind=Kind.STACK, frames=tuple(reversed(frames[:12]))) if frames else None


def _summary(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    """Read one entry of torchelastic's summary; `name` is "first" for the first failure seen."""
    first = "first observed failure" in text
    rank = local = code = pid = None
    trace = host = ""
    for row in [text, *following(9 if first else 4)]:
        found = _SUMMARY_HOST.search(row)
        if found and not host:
            host = found[1]
        found = _SUMMARY_RANK.search(row)
        if found:
            if rank is not None:
                break
            rank, local = int(found[1]), int(found[2])
        found = _SUMMARY_EXIT.search(row)
        if found and rank is not None:
            code, pid = int(found[1]), int(found[2])
        found = _SUMMARY_TRACE.search(row)
        if found and rank is not None:
            trace = found[1][:300]
            break
    if rank is not None and code is not None:
        yield make.clone(
            kind=Kind.LAUNCHER,
            rank=rank,
            rank_basis="text",
            local_rank=local,
            number=code,
            pid=pid,
            host=host,
            name="first" if first else "failure",
            detail=trace,
        )


def _desync(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    """TORCH_NCCL_DESYNC_DEBUG (torch/csrc/distributed/c10d/TraceUtils.h, 1.11 to 2.13)."""
    base = make.clone(kind=Kind.DESYNC)
    for found in _DESYNC_AT.finditer(text):
        yield base.clone(
            name="timeout", rank=int(found[1]), rank_basis="text", work=Work(found[2]), number=int(found[3])
        )
    for found in _NEVER.finditer(text):
        yield base.clone(name="lagging", peers=numbers(found[1]), number=0, detail="never joined any collective")
    for found in _UNFINISHED.finditer(text):
        yield base.clone(
            name="unfinished", peers=numbers(found[1]), number=int(found[2]), detail="joined but did not finish"
        )
    for found in _NOT_JOINED.finditer(text):
        yield base.clone(
            name="lagging", peers=numbers(found[1]), number=int(found[2]), detail=f"did not join #{found[3]}"
        )
    if "latest states" in text:
        state = ""
        for row in [text, *following(64)]:
            for head in re.split(r"(?=#\d+ (?:started|finished) ranks:)", row):
                start = _STATE_HEAD.search(head)
                if start:
                    state = f"{start[1]} {start[2]}"
                for found in _STATE.finditer(head):
                    number, word = state.split() if state else ("0", "")
                    yield base.clone(name=word, peers=numbers(found[1]), number=int(number), work=Work(found[2]))


def _analysis(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    """Read the printed verdict of torch's own analyser; it takes the first rank as its reference, only evidence."""
    seq, name = None, ""
    rows = [text, *following(16)] if "Collective sequence number" in text else [text]
    for row in rows:
        found = _FR_SEQ.search(row)
        if found and seq is not None and row is not text:
            return
        seq = int(found[1]) if found else seq
        found = _FR_NAME.search(row)
        name = found[1] if found and not name else name
        if row is not text and "Culprit rank" not in row:
            continue
        for hit in _CULPRIT.finditer(row):
            detail = f"expected {hit[4]} found {hit[5]}" if hit[4] is not None else (hit[6] or "")
            yield make.clone(
                kind=Kind.RECORDER,
                name=hit[2],
                peers=(int(hit[1]),),
                detail=detail,
                number=seq,
                work=Work(name, seq) if name else None,
            )


_RAS_NEXT = re.compile(r"#\d+-\d+ |[A-Z]+$|[A-Z][a-z]+$|=+\s*$")
_LAUNCHED = re.compile(r"(\d+) ranks? ha(?:s|ve) launched up to operation (\d+)")
_RAS_RANK = re.compile(r"Rank (\d+) -- GPU \S+ managed by process (\d+) on node (\S+)")
_RAS_PROCESS = re.compile(r"Process (\d+) on node (\S+) managing GPUs? ([\d,]+)")
_RAS_MISSING = re.compile(r"The (?:missing|unresponsive|unknown) ranks?: ([\d,\- ]+)")


def _ras(text: str, following: Following, make: Fact) -> Iterator[Fact]:
    """NCCL's RAS report as text (src/ras/client_support.cc, 2.24 to 2.30), as `ncclras` prints it.

    The ranks that a MISMATCH lists are those whose count is not the most frequent one; `name` is "behind" or "ahead".
    """
    base = make.clone(kind=Kind.RAS, rank=None, rank_basis="", local_rank=None, pid=None)
    rows = [split_prefix(row).text for row in following(200)]
    rows = list(itertools.takewhile(lambda row: _RAS_NEXT.match(row) is None, rows))
    if "operation counts" in text:
        counts: list[tuple[int, int]] = []
        ranks: list[int] = []
        at = ""
        for row in rows:
            found = _LAUNCHED.search(row)
            if found:
                counts.append((int(found[1]), int(found[2])))
                continue
            found = _RAS_RANK.search(row)
            if found:
                ranks.append(int(found[1]))
                at = at or found[3]
                continue
        if len(counts) > 1:
            most = max(counts)
            rare = [count for count in counts if count is not most]
            low = all(number < most[1] for _, number in rare)
            whole = len(rare) == 1 and rare[0][0] == len(ranks)
            yield base.clone(
                name="behind" if low else "ahead",
                peers=tuple(sorted(ranks)) if whole or len(ranks) == sum(count for count, _ in rare) else (),
                number=min(number for _, number in counts),
                completed=sum(count for count, _ in counts),
                host=at,
                detail="; ".join(f"{count} ranks at {number}" for count, number in counts),
            )
        return
    if "considered dead" in text or "unresponsive" in text or "Missing communicator" in text:
        dead = "considered dead" in text
        for row in rows[:64]:
            found = _RAS_PROCESS.search(row)
            missing = _RAS_MISSING.search(row)
            ranked = _RAS_RANK.search(row)
            if found:
                yield base.clone(
                    name="dead" if dead else "silent", pid=int(found[1]), host=found[2], detail=row.strip()
                )
            elif missing:
                yield base.clone(name="dead" if dead else "silent", peers=numbers(missing[1]), detail=row.strip())
            elif ranked:
                yield base.clone(
                    name="dead" if dead else "silent", peers=(int(ranked[1]),), pid=int(ranked[2]), host=ranked[3]
                )
