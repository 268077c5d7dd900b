"""The drill of a weight channel: its findings, and the channel that `ncclguard drill --engine` runs by itself."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

import ncclguard as ng
from ncclguard.faults.fault import EVENTS_VARIABLE, Fault
from ncclguard.faults.injection import InjectedFault
from ncclguard_explain.cause import WORD, Cause
from ncclguard_explain.language import Message, joined, tr

#: The right cause for each fault.
EXPECTED: Final[dict[str, tuple[str, ...]]] = {
    "late": ("late",),
    "kill": ("lost",),
    "stop": ("stuck",),
    "gil": ("stuck",),
    "exception": ("failed", "exited"),
    "oom": ("failed", "exited"),
    "exit": ("exited",),
    "mismatch": ("diverged",),
}
#: Faults that may be over before the limit.
ABSORBED: Final = frozenset({"late", "stop", "gil"})
#: Faults after which the engine's process goes on, so that it has to come back by itself.
GOES_ON: Final = frozenset({*ABSORBED, "mismatch"})
#: Seconds that a `publish` may take beyond its limit, for the last verdict.
LAST_VERDICT: Final = 2.0


@dataclass(frozen=True)
class Event:
    """One line of the file of a process; `at` in seconds by CLOCK_MONOTONIC of the host."""

    kind: str
    at: float
    values: dict[str, Any]


@dataclass(frozen=True)
class ChannelFindings:
    """The result of the drill of a channel.

    `known`: the engines that had begun before the fault struck. `publishes`: how many were over in the whole drill,
    `afterwards`: how many after the struck one. `version`, `took` (seconds), `limit`, `engines`, `left_out` (causes by
    name, "" for a reason without one) and `summary` are those of the publish that was struck, None and empty where none
    ended. `others`: who had the version before it, or had begun, beside the struck engine. `back`: the version with
    which the struck engine was taken back, and the seconds from the fault to it.
    """

    fault: str
    engine: str
    worker: int
    known: tuple[str, ...] = ()
    struck: bool = False
    publishes: int = 0
    version: str | int | None = None
    took: float = 0.0
    limit: float = 0.0
    engines: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    summary: str = ""
    others: tuple[str, ...] = ()
    afterwards: int = 0
    back: tuple[str | int, float] | None = None

    @property
    def in_time(self) -> bool:
        """Return whether the struck publish came back within its limit."""
        return self.version is not None and self.took <= self.limit + LAST_VERDICT

    @property
    def absorbed(self) -> bool:
        """Return whether nobody was left out, as is right for a fault that was over in time."""
        return self.fault in ABSORBED and not self.left_out and self.engine in self.engines

    @property
    def right(self) -> bool:
        """Return whether the struck engine alone was left out, by a fitting cause."""
        return list(self.left_out) == [self.engine] and self.left_out[self.engine] in EXPECTED[self.fault]

    @property
    def passed(self) -> bool:
        """Return whether the publish ended in time, the others have the version, and the struck engine is back."""
        if not self.struck or not self.in_time or not set(self.others) <= set(self.engines):
            return False
        return self.absorbed or (self.right and (self.back is not None or self.fault not in GOES_ON))

    def lines(self) -> list[tuple[str, str]]:
        """Return the findings for people, as (what, text)."""
        if not self.struck:
            return [("happened", self._nowhere())]
        struck = tr(
            "{engine}, worker {worker}, was struck as a version arrived", engine=self.engine, worker=self.worker
        )
        found: list[tuple[str, str]] = [("happened", struck)]
        if self.version is None:
            return [*found, ("not known", tr("by the trainer: no publish ended after that"))]
        published = tr(
            "by the trainer: it published version {version} in {seconds:.2f} s, its limit is {limit:g} s",
            version=self.version,
            seconds=self.took,
            limit=self.limit,
        )
        found.append(("known" if self.in_time else "not known", published))
        if self.absorbed:
            nobody = tr("nobody: the fault was over in time")
            longer = tr("to see it named, give more --seconds than a third of the limit of publish")
            return [*found, ("named", joined("; ", (nobody, longer)))]
        parts = [_said(name, cause) for name, cause in self.left_out.items()] or [tr("nobody")]
        judged = tr("right") if self.right else tr("wrong: it was {engine}", engine=self.engine)
        found.append(("named", tr("{who}: {judged}", who=joined("; ", parts), judged=judged)))
        if self.summary:
            found.append(("said", self.summary))
        missing = sorted(set(self.others) - set(self.engines))
        if self.engines:
            had = tr("yes, version {version} is on {engines}", version=self.version, engines=", ".join(self.engines))
        else:
            had = tr("no, version {version} is on no engine", version=self.version)
        lacks = [tr("it is not on {engines}", engines=", ".join(missing))] if missing and self.engines else []
        found.append(("went on", joined("; ", [had, *lacks])))
        return [*found, ("back", self._return())]

    def _return(self) -> Message:
        if self.back is not None:
            version, seconds = self.back
            return tr(
                "{engine} has version {version}, {seconds:.1f} s after it was struck",
                engine=self.engine,
                version=version,
                seconds=seconds,
            )
        none = tr("no: {engine} has none of the {count} versions after that", engine=self.engine, count=self.afterwards)
        if self.fault not in GOES_ON:
            return joined("; ", (none, tr("its process has ended, and nothing has started it again in time")))
        return joined("; ", (none, tr("let the trainer publish for longer, or give less --seconds")))

    def _nowhere(self) -> Message:
        """Return why the fault did not strike, and what to do."""
        if not self.known:
            return tr("nothing: no Receiver of ncclguard.weights was made on this host")
        if self.engine not in self.known:
            none = tr("nothing: the channel has no engine {engine}", engine=repr(self.engine))
            return joined("; ", (none, tr("it has {engines}", engines=", ".join(self.known))))
        nothing = tr("nothing: worker {worker} of {engine} had no such update", worker=self.worker, engine=self.engine)
        return joined("; ", (nothing, tr("choose a lower --op or another worker with --rank")))


def _said(name: str, cause: str) -> Message:
    if not cause:
        return Message(name)
    return tr("{engine}, {cause}", engine=name, cause=WORD[Cause(cause)])


def read_events(folder: Path) -> list[Event]:
    """Read all events of a channel's ends, in order of time; half a line of a killed process is left out."""
    events = []
    for file in folder.glob("channel.*.events"):
        for line in file.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError):
                data = json.loads(line)
                events.append(Event(data.pop("event"), data.pop("at"), data))
    return sorted(events, key=lambda event: event.at)


def findings_of(fault: Fault, events: Sequence[Event]) -> ChannelFindings:
    """Put the findings together."""
    struck = next((event for event in events if event.kind == "struck"), None)
    published = [event for event in events if event.kind == "published"]
    at = math.inf if struck is None else struck.at
    known = {event.values["engine"]: None for event in events if event.kind == "began" and event.at < at}
    after = [event for event in published if event.at >= at]
    found = ChannelFindings(
        fault=fault.fault,
        engine=fault.engine,
        worker=fault.rank,
        known=tuple(sorted(known)),
        struck=struck is not None,
        publishes=len(published),
    )
    if not after:
        return found
    first, rest = after[0].values, after[1:]
    before = [event.values["engines"] for event in published if event.at < at]
    back = next((event for event in rest if fault.engine in event.values["engines"]), None)
    return replace(
        found,
        version=first["version"],
        took=first["seconds"],
        limit=first["limit"],
        engines=tuple(first["engines"]),
        left_out={name: cause for name, (cause, _) in first["left_out"].items()},
        summary=next((text for name, (_, text) in first["left_out"].items() if name == fault.engine), ""),
        others=tuple(sorted({*(before[-1] if before else known)} - {fault.engine})),
        afterwards=len(rest),
        back=None if back is None else (back.values["version"], back.at - at),
    )


#: Seconds between two versions of the built-in trainer, and how long it waits for the struck engine to come back.
_PAUSE: Final = 0.5
_BACK_WITHIN: Final = 60.0
#: Seconds that its engines have to end.
_ENDS_WITHIN: Final = 5.0
#: Its versions from the struck one on, where nobody is left out.
_VERSIONS: Final = 3


def run(limit: float, engine: str, op: int, engines: int) -> None:
    """Run a process of the built-in channel: a trainer, its engines, and one that stands by to be the struck one."""
    rank, folder = int(os.environ["RANK"]), Path(os.environ[EVENTS_VARIABLE])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if rank == 0:
        _train(address, limit, engine, op, engines, folder)
    elif rank <= engines or _is_wanted(folder, engine):
        _serve(address, f"engine {rank}" if rank <= engines else engine, folder / "over")
        (folder / f"over.{rank}").touch()


def _train(address: str, limit: float, engine: str, op: int, engines: int, folder: Path) -> None:
    state = {"layer.weight": torch.zeros(1 << 19), "layer.bias": torch.zeros(1 << 10)}
    with ng.weights.Sender(address, timeout=limit) as sender:
        sender.wait_for(engines, within=60.0)
        left_out, back, until, version = False, False, math.inf, 0
        while version < op + _VERSIONS or (left_out and not back and time.monotonic() < until):
            published = sender.publish(state, version)
            print(published, flush=True)
            back = left_out and engine in published.engines
            if engine in published.left_out and not left_out:
                left_out, until = True, time.monotonic() + _BACK_WITHIN
            version += 1
            time.sleep(_PAUSE)
        (folder / "over").touch()
        until = time.monotonic() + _ENDS_WITHIN
        while len(list(folder.glob("over.*"))) < engines and time.monotonic() < until:
            time.sleep(0.1)  # this process has the store


def _serve(address: str, engine: str, over: Path) -> None:
    with ng.weights.Receiver(address, engine=engine) as receiver:
        while not over.exists():
            update = receiver.next(timeout=1.0)
            if update is None:
                continue
            try:
                staged = dict(update)
            except (InjectedFault, torch.OutOfMemoryError) as error:
                print(f"{engine}: {error}", flush=True)
                continue
            if update.commit():
                print(f"{engine} serves version {update.version}, {len(staged)} tensors", flush=True)


def _is_wanted(folder: Path, engine: str) -> bool:
    """Wait until the trainer has left the engine out; False when the drill is over before."""
    while not (folder / "over").exists():
        published = [event for event in read_events(folder) if event.kind == "published"]
        if any(engine in event.values["left_out"] for event in published):
            return True
        time.sleep(0.1)
    return False
