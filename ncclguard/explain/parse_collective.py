"""Lines of torch's own watchdog: timeouts, status, dump signals, desync reports, collective fingerprints."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ncclguard.explain.facts import Fact, Group, Kind, Work
from ncclguard.explain.scan import Line

WORK = re.compile(
    r"Work[A-Za-z]+\((?:SeqNum=(?P<seq>\d+), ?)?OpType=(?P<op>\w+), ?"
    r"(?:TensorShape=\[(?P<shape>[^\]]*)\], ?)?(?:NumelIn=(?P<nin>\d+), ?NumelOut=(?P<nout>\d+), "
    r"?)?Timeout\(ms\)=(?P<limit>\d+)\)"
)
_RAN = re.compile(r"\s*ran for (\d+) milliseconds")
_PG_NEW = re.compile(r"\[PG ID (?P<id>\d+) PG GUID (?P<guid>[^\s(\]]+) ?(?:\((?P<desc>[^)]*)\))? ?Rank (?P<rank>\d+)\]")
_PG_OLD = re.compile(r"\[PG (?P<guid>[^\s(\]]+) ?(?:\((?P<desc>[^)]*)\))? ?Rank (?P<rank>\d+)\]")
_INNER = re.compile(r"\[Rank (\d+)\]")
_AT = re.compile(r"(?:at NCCL work|at work sequence id|detected by watchdog at work|at work): (-?\d+)")
_ENQUEUED = re.compile(r"[Ll]ast enqueued (?:NCCL )?work: (-?\d+)")
_STARTED = re.compile(r"[Ll]ast started (?:NCCL )?work: (-?\d+)(?: \((\w+)\))?")
_COMPLETED = re.compile(r"[Ll]ast completed (?:NCCL )?work: (-?\d+)")
_DUMP_FROM = re.compile(r"Received a dump signal due to a collective timeout from\s+(?:this local rank|rank (\d+))")
_STUCK = re.compile(r"watchdog got stuck for (\d+) ?seconds")
_WATCHDOG_END = re.compile(r"watchdog thread terminated with exception: ?(.*)")
_REMOTE = re.compile(r"remote error detected from rank:? (\d+)")
_ABORTED = re.compile(r"communicator was aborted on rank (\d+)")
_FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d+) is running (?P<old>inconsistent )?collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(?P<seq>\d+),? ?)?OpType=(?P<op>\w+)(?:, ?TensorShape=\[(?P<shape>[^\]]*)\])?(?:, "
    r"?TensorDtypes=(?P<dtype>[\w]+))?"
)
_DIFFERENCE = re.compile(r"differ in the following aspects:\s*(.*)")
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
_FR_NAME = re.compile(r"collective: (?:nccl:|gloo:)?(\w+)")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _maybe(text: str | None) -> int | None:
    return int(text) if text else None


def work_of(text: str) -> Work | None:
    """Return the first `WorkNCCL(...)` of a text, of any torch version from 1.10 to 2.13."""
    found = WORK.search(text)
    if found is None:
        return None
    ran = _RAN.match(text, found.end())
    shape = found["shape"]
    return Work(
        op=found["op"],
        seq=_maybe(found["seq"]),
        numel_in=_maybe(found["nin"]),
        numel_out=_maybe(found["nout"]),
        shape=_numbers(shape) if shape is not None else None,
        timeout_ms=int(found["limit"]),
        ran_ms=int(ran[1]) if ran else None,
    )


def group_of(text: str) -> tuple[Group | None, int | None]:
    """Return the process group that a line names and the rank inside it."""
    found = _PG_NEW.search(text)
    if found:
        return Group(found["guid"], found["id"], found["desc"] or None), int(found["rank"])
    found = _PG_OLD.search(text)
    if found:
        return Group(found["guid"], found["guid"], found["desc"] or None), int(found["rank"])
    inner = _INNER.search(text)
    return None, int(inner[1]) if inner else None


def _counters(fact: Fact, text: str) -> None:
    for pattern, name in ((_ENQUEUED, "enqueued"), (_COMPLETED, "completed"), (_STARTED, "started")):
        found = pattern.search(text)
        if found:
            setattr(fact, name, int(found[1]))
            if name == "started" and found[2]:
                fact.name = found[2]


def parse(line: Line, make: Fact) -> Iterator[Fact]:
    """Yield the facts of one line about collectives; `make` carries its place, rank and clock."""
    text = line.text
    group, inner = group_of(text)
    make.group, make.group_rank = group, inner
    if "CollectiveFingerPrint(" in text:
        yield from _fingerprints(text, make)
        return
    if "Culprit rank" in text or "Collective sequence number" in text:
        yield from _recorder(line, make)
        return
    if "collective" in text or "agging" in text or "latest states" in text:
        desync = list(_desync(line, make))
        if desync:
            yield from desync
            return
    work = work_of(text)
    if work is not None:
        if "async exception" in text:
            yield make.clone(kind=Kind.ASYNC_ERROR, work=work, detail=text[text.find("async exception") :][:400])
        elif "blocking wait" in text:
            yield make.clone(kind=Kind.BLOCKING, work=work)
        elif "collective operation timeout" in text or work.ran_ms is not None:
            yield make.clone(kind=Kind.TIMEOUT, work=work)
        return
    yield from _signals(text, make)


def _signals(text: str, make: Fact) -> Iterator[Fact]:
    found = _DUMP_FROM.search(text)
    if found:
        fact = make.clone(kind=Kind.DUMP_RECEIVED, peers=(int(found[1]),) if found[1] else ())
        _counters(fact, text)
        yield fact
    elif "ast enqueued" in text:
        at = _AT.search(text)
        fact = make.clone(kind=Kind.STATUS, number=int(at[1]) if at else None)
        _counters(fact, text)
        yield fact
    elif "Observed flight recorder dump signal" in text:
        yield make.clone(kind=Kind.DUMP_OBSERVED)
    elif "to signal dumping" in text:
        yield make.clone(kind=Kind.DUMP_FIRST)
    elif (found := _STUCK.search(text)) is not None:
        yield make.clone(kind=Kind.HEARTBEAT, seconds=float(found[1]))
    elif (
        "Could not acquire GIL" in text
        or "Heartbeat monitor timed out" in text
        or "NCCL monitor thread timeout" in text
    ):
        yield make.clone(kind=Kind.HEARTBEAT)
    elif (found := _WATCHDOG_END.search(text)) is not None:
        yield make.clone(kind=Kind.WATCHDOG_EXCEPTION, detail=found[1][:400])
    elif (found := _REMOTE.search(text)) is not None:
        yield make.clone(kind=Kind.REMOTE_ERROR, peers=(int(found[1]),))
    elif (found := _ABORTED.search(text)) is not None:
        yield make.clone(kind=Kind.ABORTED, peers=(int(found[1]),))
    elif "NCCL operations have failed or timed out" in text:
        yield make.clone(kind=Kind.TEARDOWN)


def _fingerprints(text: str, make: Fact) -> Iterator[Fact]:
    """Yield one fact per fingerprint.

    `name` is "own" for the printing rank's, "peer" for the rank it compared itself with.
    """
    difference = _DIFFERENCE.search(text)
    for index, found in enumerate(_FINGERPRINT.finditer(text)):
        shape = found["shape"]
        zeroed = shape is None and found["dtype"] is None and found["op"] == "REDUCE" and (found["seq"] or "0") == "0"
        work = Work(
            found["op"],
            _maybe(found["seq"]),
            shape=_numbers(shape) if shape is not None else None,
            dtype=found["dtype"],
        )
        yield make.clone(
            kind=Kind.FINGERPRINT,
            rank=int(found["rank"]),
            rank_basis="text",
            group_rank=int(found["rank"]),
            work=work,
            name="absent" if zeroed else ("own" if index == 0 else "peer"),
            detail=" ".join(difference[1].split())[:300] if difference else "",
            peers=(make.rank,) if make.rank is not None else (),
        )


def _desync(line: Line, make: Fact) -> Iterator[Fact]:
    text = line.text
    base = make.clone(kind=Kind.DESYNC)
    for found in _DESYNC_AT.finditer(text):
        yield base.clone(
            name="timeout", rank=int(found[1]), rank_basis="text", work=Work(found[2]), number=int(found[3])
        )
    for found in _NEVER.finditer(text):
        yield base.clone(name="lagging", peers=_numbers(found[1]), number=0, detail="never joined any collective")
    for found in _UNFINISHED.finditer(text):
        yield base.clone(
            name="unfinished", peers=_numbers(found[1]), number=int(found[2]), detail="joined but did not finish"
        )
    for found in _NOT_JOINED.finditer(text):
        yield base.clone(
            name="lagging", peers=_numbers(found[1]), number=int(found[2]), detail=f"did not join #{found[3]}"
        )
    if "latest states" in text:
        state = ""
        for row in [text, *line.following(64)]:
            for head in re.split(r"(?=#\d+ (?:started|finished) ranks:)", row):
                start = _STATE_HEAD.search(head)
                if start:
                    state = f"{start[1]} {start[2]}"
                for found in _STATE.finditer(head):
                    number, word = state.split() if state else ("0", "")
                    yield base.clone(name=word, peers=_numbers(found[1]), number=int(number), work=Work(found[2]))


def _recorder(line: Line, make: Fact) -> Iterator[Fact]:
    """Read the printed verdict of torch's own analyser; it takes the first rank as its reference, only evidence."""
    text, seq, name = line.text, None, ""
    rows = [text, *line.following(16)] if "Collective sequence number" in text else [text]
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
