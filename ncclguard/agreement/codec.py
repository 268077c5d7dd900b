"""Reports, verdicts and departures as JSON: what goes through the store is data, never code."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ncclguard.agreement.decision import (
    Action,
    Departure,
    Operation,
    Phase,
    Report,
    Trouble,
    TroubleKind,
    Verdict,
)
from ncclguard.outcome import Cause


def dumps(value: Report | Verdict | Departure | Operation) -> str:
    """Serialise; details that are not plain data become strings."""
    return json.dumps(dataclasses.asdict(value), separators=(",", ":"), default=str)


def loads_report(text: str) -> Report:
    data: dict[str, Any] = json.loads(text)
    if data["operation"] is not None:
        data["operation"] = Operation(**data["operation"])
    if data["trouble"] is not None:
        data["trouble"] = Trouble(TroubleKind(data["trouble"]["kind"]), data["trouble"]["text"])
    data["phase"] = Phase(data["phase"])
    return Report(**data)


def loads_verdict(text: str) -> Verdict:
    data: dict[str, Any] = json.loads(text)
    data["action"] = Action(data["action"])
    data["cause"] = None if data["cause"] is None else Cause(data["cause"])
    data["culprits"] = _causes(data["culprits"])
    data["departed"] = _causes(data["departed"])
    data["participants"] = tuple(data["participants"])
    data["fingerprints"] = tuple(data["fingerprints"])
    data["sides"] = tuple((text, tuple(ranks)) for text, ranks in data["sides"])
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
            told=data.get("told", False),
        ),
        {str(group): int(done) for group, done in data["done"].items()},
    )


def dumps_departure(departure: Departure, done: dict[str, int]) -> str:
    return json.dumps(
        {
            "rank": departure.rank,
            "cause": departure.cause.value,
            "text": departure.text,
            "done": done,
            "details": dict(departure.details),
            "told": departure.told,
        },
        separators=(",", ":"),
        default=str,
    )


def _causes(pairs: list[list[Any]]) -> tuple[tuple[int, Cause], ...]:
    return tuple((int(rank), Cause(cause)) for rank, cause in pairs)
