"""What a drill came to, out of the events its ranks wrote: who was struck, who knew
when, who was named, who went on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ncclguard.incident.render import ranks_text

#: The cause that each fault should be called by; several where it depends on what the others can see.
EXPECTED: Final[dict[str, tuple[str, ...]]] = {
    "late": ("late",),
    "kill": ("lost",),
    "stop": ("stuck",),
    "gil": ("stuck",),
    "exception": ("failed",),
    "oom": ("failed",),
    "exit": ("exited",),
    "mismatch": ("diverged",),
    "skip": ("diverged", "exited", "late"),
    "extra": ("diverged", "late"),
    "reset": ("network",),
    "partition": ("stuck", "unknown", "late"),
}
#: What the struck rank is called where the others went on without it in the same call, and so got no failed outcome.
GONE: Final = "gone"
#: Faults that a guard may absorb without a failed call: a rank that is back in time, a transfer that is tried again.
ABSORBED: Final = frozenset({"late", "stop", "gil", "reset", "partition"})


@dataclass(frozen=True)
class Event:
    """One line of a rank's file; `at` in seconds by CLOCK_MONOTONIC of the host."""

    rank: int
    kind: str
    at: float
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The findings; seconds are since the fault struck, None for never. `named` is what the others agreed on."""

    fault: str
    rank: int
    ranks: tuple[int, ...]
    struck_after: float | None
    known_by: dict[int, float]
    named: tuple[int, ...]
    cause: str
    summary: str
    torn: tuple[int, ...]
    alone: tuple[int, ...]
    went_on: dict[int, float]
    participants: tuple[int, ...]
    calls: int
    raw: bool = False

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks that were not struck."""
        return tuple(rank for rank in self.ranks if rank != self.rank)

    @property
    def absorbed(self) -> bool:
        """Whether no call failed, as is right for a fault that was over in time."""
        return self.struck_after is not None and not self.known_by and self.fault in ABSORBED

    @property
    def right(self) -> bool:
        """Whether the struck rank, and nobody else, was named, by a fitting cause; with a
        broken transfer nobody may be.
        """
        nobody = self.fault in ("reset", "partition") and not self.named and self.cause in ("network", "unknown")
        return (self.named == (self.rank,) and self.cause in (*EXPECTED[self.fault], GONE)) or nobody

    @property
    def passed(self) -> bool:
        """Whether the drill went as it should: struck, known by all others and rightly named, or absorbed."""
        if self.struck_after is None:
            return False
        return self.absorbed or (set(self.others) <= set(self.known_by) and self.right)

    def lines(self) -> list[tuple[str, str]]:
        """The findings for people, as (what, text)."""
        if not self.ranks:
            return [
                ("happened", "no rank came up with ncclguard: does the program import it before init_process_group?")
            ]
        if self.struck_after is None:
            what = "collectives in the default group" if self.raw else "guarded calls"
            text = f"nothing: rank {self.rank} made no such operation; the ranks made up to {self.calls} {what}"
            other = "" if self.raw else ", or --raw for the collectives that watch() observes"
            return [("happened", f"{text}; choose a lower --op{other}")]
        found = [("happened", f"rank {self.rank} was struck {self.struck_after:.1f} s after the ranks had started")]
        if self.absorbed:
            return [*found, ("known", "no call failed: the fault was over in time, or the transfer was tried again")]
        missing = sorted(set(self.others) - set(self.known_by))
        if self.known_by:
            first, last = min(self.known_by.values()), max(self.known_by.values())
            who = f"all {len(self.others)} others" if not missing else f"{ranks_text(self.known_by)}"
            found.append(("known", f"by {who} within {last:.2f} s, by the first after {first:.2f} s"))
        if missing:
            found.append(("not known", f"by {ranks_text(missing)}"))
        if self.known_by:
            who = ranks_text(self.named) if self.named else "nobody"
            judged = "right" if self.right else f"wrong: it was rank {self.rank}"
            found.append(("named", f"{who}, {self.cause}: {judged}"))
            found.append(("said", self.summary))
        if self.alone:
            found.append(
                ("alone", f"{ranks_text(self.alone)} could not agree with the others, and had verdicts of their own")
            )
        if not self.raw:  # watch() has no hand in them
            which = f"torn on {ranks_text(self.torn)}" if self.torn else "intact wherever a call failed"
            found.append(("tensors", which))
        if self.went_on:
            text = f"yes, {ranks_text(self.went_on)} within {max(self.went_on.values()):.2f} s"
            found.append(("went on", f"{text}, as {ranks_text(self.participants)}"))
        else:
            no_more = "no collective was issued" if self.raw else "no guarded call succeeded"
            found.append(("went on", f"no: {no_more} afterwards"))
        return found


def read_events(folder: Path) -> list[Event]:
    """All events of a drill, in order of time; half a line of a killed rank is left out."""
    events = []
    for file in sorted(folder.glob("rank*.events")):
        rank = int(file.name.split(".")[0].removeprefix("rank"))
        for line in file.read_text(errors="replace").splitlines():
            try:
                data = json.loads(line)
                events.append(Event(rank, data.pop("event"), data.pop("at"), data))
            except (ValueError, KeyError):
                continue
    return sorted(events, key=lambda event: event.at)


def judge(fault: str, rank: int, events: list[Event], raw: bool = False) -> Verdict:
    """Put the findings together. `rank` is the one to be struck by the fault named
    `fault`; `raw`: in a job under `watch`.
    """
    begun = [event for event in events if event.kind == "started"]
    struck = next((event for event in events if event.kind == "struck"), None)
    after = [event for event in events if struck is not None and event.at >= struck.at]
    failed: dict[int, Event] = {}
    went_on: dict[int, Event] = {}
    for event in after:
        if event.kind == "failed":
            failed.setdefault(event.rank, event)
        elif event.kind == "went on" and event.rank != rank and event.rank not in failed:
            failed[event.rank] = went_on[event.rank] = event  # went on without the rank, in the same call
        elif event.kind == "went on":
            went_on.setdefault(event.rank, event)
    since = struck.at if struck is not None else 0.0
    told = [event for other, event in failed.items() if other != rank and event.kind == "failed"]
    agreed = [event.values for event in told if event.values["agreed"]]
    lost = next((event for other, event in failed.items() if other != rank and event.kind == "went on"), None)
    ranks = tuple(sorted({event.rank for event in begun}))
    verdict: dict[str, Any] = agreed[0] if agreed else told[0].values if told else {}
    if not verdict and lost is not None:
        gone = sorted(set(ranks) - set(lost.values["participants"]))
        verdict = {
            "culprits": gone,
            "cause": GONE,
            "summary": f"{lost.values['op']} went on without {ranks_text(gone)}",
        }
    differ = {json.dumps([values["cause"], values["culprits"]]) for values in agreed}
    return Verdict(
        fault=fault,
        rank=rank,
        ranks=ranks,
        struck_after=None if struck is None else since - max(event.at for event in begun),
        known_by={other: event.at - since for other, event in failed.items() if other != rank},
        named=tuple(verdict.get("culprits", ())) if len(differ) <= 1 else (),
        cause=str(verdict.get("cause", "")) if len(differ) <= 1 else "different verdicts",
        summary=str(verdict.get("summary", "")),
        torn=tuple(sorted(other for other, event in failed.items() if event.values.get("torn"))),
        alone=tuple(sorted(other for other, event in failed.items() if event.values.get("agreed") is False)),
        went_on={other: event.at - since for other, event in sorted(went_on.items())},
        participants=tuple(next(iter(went_on.values())).values["participants"]) if went_on else (),
        calls=max((event.values["calls"] for event in events if event.kind == "ended"), default=0),
        raw=raw,
    )
