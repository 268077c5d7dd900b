"""What a run came to, from the events of its ranks: did it end, when, who was named, was it the same on all ranks, was
the tensor intact, did the job go on."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.peers.job import STRIKE, STRUCK
from benchmarks.peers.ways import WAYS
from ncclguard_explain.ranks import ranks_text

#: How the ways that have no field for it name ranks in their texts: the first of these that a text fits counts; the
#: group is the rank, or a list of ranks. nvidia-resiliency-ext lists all whose function was interrupted: where it knows
#: that some are gone, these are whom it names.
NAMING = (
    r"Ranks? ([\d, ]+) failed to pass monitoredBarrier",
    r"but Rank (\d+) is running collective",
    r"watch: \w+ \[([\d, ]*)\]",
    r"Interruption\.TERMINATED on ranks=\{([\d, ]+)\}",
    r"Interruption\.\w+ on ranks=\{([\d, ]+)\}",
)


@dataclass(frozen=True)
class Findings:
    """One way under one fault. Seconds count from the strike; ranks are those that were not struck."""

    way: str
    fault: str
    #: What each other rank met first after the strike: "failed", "ok", "ended by ...", "nothing".
    met: dict[int, str]
    seconds: dict[int, float]
    named: dict[int, list[int]]
    texts: dict[int, str]
    tensors: dict[int, str]
    wrong: dict[int, int]
    went_on: dict[int, float]
    participants: list[int]
    ends: dict[int, str]

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {"title": WAYS[self.way].title, **asdict(self)}


def findings_of(way: str, fault: str, events: dict[int, list[dict[str, Any]]], ends: dict[int, str]) -> Findings:
    """Put the findings together."""
    struck = next((event["at"] for event in events[STRUCK] if event["event"] == "struck"), math.inf)
    met, seconds, named, texts, tensors, wrong, went_on = {}, {}, {}, {}, {}, {}, {}
    participants: set[int] = set()
    for rank, everything in events.items():
        after = [event for event in everything if event["at"] >= struck]
        wrong[rank] = sum(None in event["masks"] for event in after if event["event"] == "ok")
        if rank == STRUCK:
            continue
        first = next((event for event in after if event["event"] in ("failed", "ok", "ended by")), None)
        said = [event["text"] for event in after if event["event"] in ("said", "failed", "ended by")]
        met[rank] = first["event"] if first is not None else f"nothing, then {ends[rank]}"
        if first is not None:
            seconds[rank] = first["at"] - struck
        if first is not None and first["event"] == "failed":
            tensors[rank] = first["tensor"]
        named[rank] = names(said, first)
        texts[rank] = "\n".join(said)[:3000]
        on = [
            event for event in after if event["event"] == "ok" and event["step"] > STRIKE and None not in event["masks"]
        ]
        if on:
            went_on[rank] = on[0]["at"] - struck
            participants |= {other for other in events if on[-1]["masks"][0] >> other & 1}
    return Findings(way, fault, met, seconds, named, texts, tensors, wrong, went_on, sorted(participants), {**ends})


def names(said: list[str], first: dict[str, Any] | None) -> list[int]:
    """The ranks that a rank was told are responsible."""
    if first is not None and first.get("named") is not None:
        return sorted(first["named"])
    everything = "\n".join(said)
    for pattern in NAMING:
        if found := re.findall(pattern, everything):
            return sorted({int(number) for ranks in found for number in re.findall(r"\d+", ranks)})
    return []


def table(rows: list[Findings]) -> str:
    """The findings of one fault, a way a line."""
    heads = ("", "ends", "within", "named", "on", "tensor", "goes on", "wrong results")
    lines = [heads, *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def cells(row: Findings) -> tuple[str, ...]:
    """A line of the table."""
    others = sorted(row.met)
    if not row.seconds and not any(row.texts.values()):
        return (WAYS[row.way].title, "not measured: the fault did not strike, see the JSON", *[""] * 6)
    hung = [rank for rank in others if rank not in row.seconds]
    who = {tuple(row.named[rank]) for rank in others}
    named = [rank for rank in others if row.named[rank]]
    told = "; ".join(sorted({ranks_text(row.named[rank]) for rank in named})) or "nobody"
    tensors = sorted(set(row.tensors.values())) or ["-"]
    wrong = [rank for rank, count in row.wrong.items() if count]
    return (
        WAYS[row.way].title,
        "yes" if not hung else f"not {ranks_text(hung)}",
        f"{max(row.seconds.values()):.1f} s" if row.seconds else "-",
        told,
        "all" if len(who) == 1 and named else (ranks_text(named) if named else "-"),
        ", ".join(tensors),
        f"{max(row.went_on.values()):.1f} s, as {ranks_text(row.participants)}"
        if set(row.went_on) == set(others)
        else (f"only {ranks_text(row.went_on)}" if row.went_on else "no"),
        f"on {ranks_text(wrong)}" if wrong else "none",
    )
