"""JSON documents: torchelastic's error files and events, Kubernetes objects, NCCL's RAS report, ncclguard's own
incidents.

Each reader takes plain data and yields facts; what it does not know it leaves alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ncclguard.explain.facts import Fact, Kind, Work
from ncclguard.explain.patterns import parse_text


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        items = value.get("items")
        yield from _objects(items) if isinstance(items, list) else iter([value])
    elif isinstance(value, list):
        for one in value[:100_000]:
            yield from _objects(one)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)) and abs(value) < 1 << 53:
        return int(value)
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,15}", value) else None


def read(value: object, make: Fact) -> list[Fact]:
    """Return the facts of one JSON document; an empty list for one that is none of these."""
    found: list[Fact] = []
    for one in _objects(value):
        if isinstance(one.get("communicators"), list):
            found += _ras(one, make)
        elif "culprits" in one and "op_id" in one:
            found += _incident(one, make)
        elif isinstance(one.get("incident"), Mapping):
            found += read(one["incident"], make)
        elif "involvedObject" in one or one.get("kind") == "Event":
            found += _event(one, make)
        elif isinstance(one.get("status"), Mapping) and "containerStatuses" in one["status"]:
            found += _pod(one, make)
        elif str(one.get("name", "")).startswith("torchelastic.worker.status"):
            found += _elastic_event(one, make)
        elif isinstance(one.get("message"), (str, Mapping)) and ("extraInfo" in str(one)[:100_000]):
            found += _error_file(one, make)
    return found


def read_line(text: str, make: Fact) -> list[Fact]:
    """Return the facts of one line of a log that holds a JSON object, wherever it begins."""
    start = text.find("{")
    if start < 0:
        return []
    try:
        value, _ = json.JSONDecoder().raw_decode(text[start:])
    except (ValueError, RecursionError):
        return []
    return read(value, make)


def _error_file(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """torch/distributed/elastic/multiprocessing/errors/error_handler.py, 1.9 to 2.15: what @record leaves."""
    message = one["message"]
    extra: Any = {}
    if isinstance(message, Mapping):
        extra = message.get("extraInfo") or {}
        text = str(message.get("message", ""))
    else:
        text = str(message)
    frames = (
        tuple(
            f"{found[1]}:{found[2]} in {found[3]}"
            for found in re.finditer(r'File "([^"]+)", line (\d+),? in (\S+)', str(extra.get("py_callstack", "")))
        )
        if isinstance(extra, Mapping)
        else ()
    )
    facts = [fact.clone(frames=frames[-12:]) for fact in parse_text(text, make.clone(text=text[:600]))]
    if not any(fact.kind is Kind.EXCEPTION for fact in facts) and not facts:
        facts = [
            make.clone(kind=Kind.EXCEPTION, name="Exception", detail=text[:600], text=text[:600], frames=frames[-12:])
        ]
    return facts


def _elastic_event(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """torch/distributed/elastic/events/api.py, 1.9 to 2.15: one event for each worker."""
    metadata = one.get("metadata")
    raw = metadata.get("raw_error") if isinstance(metadata, Mapping) else None
    state = str(one.get("name")).rsplit(".", 1)[-1]
    data: Mapping[str, Any] = {**one, **metadata} if isinstance(metadata, Mapping) else one
    rank = _number(data.get("global_rank"))
    if state != "FAILED" or rank is None:
        return []
    fact = make.clone(
        kind=Kind.LAUNCHER,
        rank=rank,
        rank_basis="text",
        local_rank=_number(data.get("local_rank")),
        number=_number(data.get("exit_code")),
        pid=_number(data.get("worker_id")),
        name="event",
        detail=str(raw or "")[:400],
    )
    facts = [fact]
    if isinstance(raw, str):
        try:
            inner = json.loads(raw)
        except (ValueError, RecursionError):
            inner = None
        own = make.clone(rank=rank, rank_basis="text")
        if isinstance(inner, Mapping) and "message" in inner:
            facts += _error_file(inner, own)
        for found in re.finditer(r"Signal (\d+) \(", raw):
            fact.number = -int(found[1])
    return facts


_REASONS = frozenset(
    ["OOMKilled", "OOMKilling", "SystemOOM", "Evicted", "Preempted", "Preempting", "NodeNotReady", "NodeLost",
     "TaintManagerEviction", "DeviceUnhealthy", "UnexpectedAdmissionError", "NodeShutdown"]
)  # fmt: skip


def _event(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """Kubernetes core/v1 and events.k8s.io/v1 Event, 1.20 to 1.34."""
    target = one.get("involvedObject") or one.get("regarding") or {}
    reason = str(one.get("reason", ""))
    text = str(one.get("message") or one.get("note") or "")
    facts = list(parse_text(text, make.clone(text=text[:400])))
    if reason in _REASONS:
        kind = str(target.get("kind", "")).lower() if isinstance(target, Mapping) else ""
        name = str(target.get("name", "")) if isinstance(target, Mapping) else ""
        facts.append(
            make.clone(
                kind=Kind.SCHEDULER,
                name=reason,
                host=f"{kind}/{name}",
                detail=text[:300],
                text=f"{reason} {kind}/{name} {text}"[:400],
            )
        )
    return facts


def _pod(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """Kubernetes core/v1 Pod with its containers' ends."""
    facts = []
    metadata = one.get("metadata")
    name = str(metadata.get("name", "")) if isinstance(metadata, Mapping) else ""
    if str(one["status"].get("reason", "")) in _REASONS:
        facts.append(
            make.clone(
                kind=Kind.SCHEDULER,
                name=str(one["status"]["reason"]),
                host=f"pod/{name}",
                text=f"{one['status']['reason']} pod/{name}",
            )
        )
    for status in _list(one["status"]["containerStatuses"]):
        for when in ("state", "lastState"):
            end = (
                status.get(when, {}).get("terminated")
                if isinstance(status, Mapping) and isinstance(status.get(when), Mapping)
                else None
            )
            if isinstance(end, Mapping) and str(end.get("reason")) in _REASONS:
                reason = str(end["reason"])
                facts.append(
                    make.clone(
                        kind=Kind.SCHEDULER,
                        name=reason,
                        host=f"pod/{name}",
                        number=_number(end.get("exitCode")),
                        text=f"{reason} pod/{name}",
                    )
                )
    return facts


def _ras(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """NCCL src/ras, JSON of 2.28.7 and newer: counts per rank and the ranks that did not answer."""
    facts: list[Fact] = []
    base = make.clone(kind=Kind.RAS, rank=None, rank_basis="")
    for comm in one["communicators"]:
        if not isinstance(comm, Mapping):
            continue
        size = _number(comm.get("size"))
        counts: dict[int, int] = {}
        places: dict[int, tuple[str, int | None]] = {}
        for row in _list(comm.get("ranks")):
            if not isinstance(row, Mapping) or (rank := _number(row.get("rank"))) is None:
                continue
            done = row.get("collective_counts")
            if isinstance(done, Mapping):
                counts[rank] = sum(_number(value) or 0 for value in done.values())
            places[rank] = (str(row.get("host", "")), _number(row.get("pid")))
            status = row.get("status")
            error = status.get("async_error") if isinstance(status, Mapping) else None
            if error not in (None, 0, "0", "ncclSuccess", "ok", False):
                facts.append(
                    base.clone(
                        name="error",
                        peers=(rank,),
                        detail=f"asynchronous error {error}",
                        completed=size,
                        host=places[rank][0],
                    )
                )
        kinds = Counter(counts.values()).most_common()
        if len(kinds) > 1:
            most = kinds[0][0]
            odd = tuple(sorted(rank for rank, number in counts.items() if number != most))
            low = all(counts[rank] < most for rank in odd)
            facts.append(
                base.clone(
                    name="behind" if low else "ahead",
                    peers=odd,
                    number=min(counts.values()),
                    completed=size,
                    host=places[odd[0]][0],
                    detail="; ".join(f"{count} ranks at {number}" for number, count in kinds),
                )
            )
        for row in _list(comm.get("missing_ranks")):
            if isinstance(row, Mapping) and (rank := _number(row.get("rank"))) is not None:
                status = row.get("status")
                dead = isinstance(status, Mapping) and bool(status.get("considered_dead"))
                facts.append(
                    base.clone(
                        name="dead" if dead else "silent",
                        peers=(rank,),
                        completed=size,
                        host=str(row.get("host", "")),
                        pid=_number(row.get("pid")),
                        detail=f"rank {rank} does not answer",
                    )
                )
    for fact in facts:
        fact.text = f"RAS: {fact.name} {', '.join(map(str, fact.peers))} {fact.detail}"[:400]
    return facts


def _incident(one: Mapping[str, Any], make: Fact) -> list[Fact]:
    """ncclguard's own incident: the verdict that the ranks agreed on while they lived."""
    culprits = one.get("culprits")
    ranks = (
        tuple(number for value in culprits if (number := _number(value)) is not None)
        if isinstance(culprits, list)
        else ()
    )
    frames: tuple[str, ...] = ()
    for row in _list(one.get("ranks")):
        if isinstance(row, Mapping) and row.get("rank") in ranks and isinstance(row.get("stack"), list):
            frames = tuple(str(frame) for frame in row["stack"])[-12:]
            break
    participants = one.get("participants")
    timeout = one.get("timeout")
    return [
        make.clone(
            kind=Kind.GUARD,
            name=str(one.get("cause", "unknown")),
            peers=ranks,
            work=Work(str(one.get("op")) if one.get("op") else None),
            seconds=float(timeout) if isinstance(timeout, (int, float)) else None,
            completed=len(participants) if isinstance(participants, list) else None,
            detail=str(one.get("summary", ""))[:600],
            text=str(one.get("summary", "") or one.get("op_id", ""))[:600],
            frames=frames,
        )
    ]
