"""Reports, verdicts and departures as JSON: what goes through the store is data, never code."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ncclguard.protocol.decision import (
    Action,
    Departure,
    Issued,
    Operation,
    Phase,
    Report,
    Trouble,
    TroubleKind,
    Verdict,
    Waiting,
    Watched,
)
from ncclguard_explain.cause import Cause


def dumps(value: Report | Verdict | Departure | Operation) -> str:
    """Serialise; details that are not plain data become strings."""
    data = dataclasses.asdict(value)
    if isinstance(value, Verdict):  # of thousands of ranks
        data |= {
            "culprits": _by_cause(value.culprits),
            "departed": _by_cause(value.departed),
            "participants": ranges(value.participants),
            "sides": [[text, ranges(ranks)] for text, ranks in value.sides],
        }
    elif isinstance(value, Report):
        data |= {"watched": _dumped(value.watched), "awaited": ranges(value.awaited)}
    return json.dumps(data, separators=(",", ":"), default=str)


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks as a short text, in their order; `ranks_of` reads it.

    >>> ranges([0, 1, 2, 5, 3]), ranks_of("0-2,5,3")
    ('0-2,5,3', (0, 1, 2, 5, 3))
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@functools.lru_cache(maxsize=64)
def ranks_of(text: str) -> tuple[int, ...]:
    """The ranks that `ranges` wrote; one object for all that read the same."""
    runs = [part.partition("-") for part in text.split(",")] if text else []
    return tuple(rank for first, _, last in runs for rank in range(int(first), int(last or first) + 1))


def loads_report(text: str) -> Report:
    data: dict[str, Any] = json.loads(text)
    if data["operation"] is not None:
        data["operation"] = Operation(**data["operation"])
    if data["trouble"] is not None:
        data["trouble"] = Trouble(**{**data["trouble"], "kind": TroubleKind(data["trouble"]["kind"])})
    data["phase"] = Phase(data["phase"])
    data["watched"] = _loaded(data.get("watched"))
    data["awaited"] = ranks_of(data["awaited"])
    return Report(**data)


def loads_verdict(text: str) -> Verdict:
    data: dict[str, Any] = json.loads(text)
    data["action"] = Action(data["action"])
    data["cause"] = None if data["cause"] is None else Cause(data["cause"])
    data["culprits"] = _causes(data["culprits"])
    data["departed"] = _causes(data["departed"])
    data["participants"] = ranks_of(data["participants"])
    data["fingerprints"] = tuple(data["fingerprints"])
    data["sides"] = tuple((text, ranks_of(ranks)) for text, ranks in data["sides"])
    return Verdict(**data)


def loads_departure(text: str) -> tuple[Departure, dict[str, int]]:
    """Return the departure and, per group, the highest sequence it completed there."""
    data: dict[str, Any] = json.loads(text)
    return (
        Departure(
            data["rank"],
            Cause(data["cause"]),
            data["text"],
            details=data.get("details", {}),
            terminated=data.get("terminated", False),
            follows=data.get("follows", False),
            watched=_loaded(data.get("watched")),
        ),
        {str(group): int(done) for group, done in data["done"].items()},
    )


def dumps_departure(departure: Departure, done: dict[str, int], by: int) -> str:
    """Serialise a departure, with the rank that writes it.

    What two witnesses write is never equal, so each knows whose came first.
    """
    return json.dumps(
        {
            "by": by,
            "rank": departure.rank,
            "cause": departure.cause.value,
            "text": departure.text,
            "done": done,
            "details": dict(departure.details),
            "terminated": departure.terminated,
            "follows": departure.follows,
            "watched": _dumped(departure.watched),
        },
        separators=(",", ":"),
        default=str,
    )


def _dumped(watched: Watched | None) -> dict[str, Any] | None:
    """Short: every rank of a job says it at once, and groups have thousands of members."""
    if watched is None:
        return None
    said = {
        "waits": _dumped_waits(watched.waits),
        "done": dict(watched.done),
        "issued": dict(watched.issued),
        "recent": [dataclasses.astuple(one) for one in watched.recent],
        "limit": watched.limit,
        "compared": _dumped_waits(watched.compared),
    }
    return {name: value for name, value in said.items() if value}


def _dumped_waits(waits: Iterable[Waiting]) -> list[list[Any]]:
    return [[one.channel, ranges(one.members), *dataclasses.astuple(one)[2:]] for one in waits]


def _loaded_waits(said: Iterable[Sequence[Any]]) -> tuple[Waiting, ...]:
    return tuple(Waiting(one[0], ranks_of(one[1]), *one[2:]) for one in said)


def _loaded(said: dict[str, Any] | None) -> Watched | None:
    if said is None:
        return None
    return Watched(
        waits=_loaded_waits(said.get("waits", ())),
        done=said.get("done", {}),
        issued=said.get("issued", {}),
        recent=tuple(Issued(*one) for one in said.get("recent", ())),
        limit=said.get("limit"),
        compared=_loaded_waits(said.get("compared", ())),
    )


def _by_cause(pairs: Iterable[tuple[int, Cause]]) -> list[list[str]]:
    runs: list[tuple[Cause, list[int]]] = []
    for rank, cause in pairs:
        if not runs or runs[-1][0] is not cause:
            runs.append((cause, []))
        runs[-1][1].append(rank)
    return [[ranges(ranks), cause.value] for cause, ranks in runs]


def _causes(runs: list[list[str]]) -> tuple[tuple[int, Cause], ...]:
    return tuple((rank, Cause(cause)) for ranks, cause in runs for rank in ranks_of(ranks))
