"""Which collectives of this process are pending, from torch's flight recorder, or
from sequence numbers where it is off.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import torch.distributed as dist

from ncclguard import _torch
from ncclguard.deadlines.stopping import backends

#: Operations whose sizes must be equal on all ranks; of the others only the name is compared.
_EQUAL_SIZES: Final = frozenset({"all_reduce", "allreduce", "broadcast", "reduce"})
#: Collectives of which a rank says what they were after they have ended: a mismatch
#: may end on some ranks, with rubbish.
RECENT: Final = 8
#: Frames in which a thread waits for a collective, for the fallback.
_WAITING: Final = ("torch.distributed.distributed_c10d", "torch.autograd.graph", "torch.autograd")


@dataclass(frozen=True, slots=True)
class Pending:
    """The oldest collective of one group that this process has issued and that has not ended."""

    channel: str  # group name and backend, such as "0:gloo"; groups of equal name have equal members
    ranks: tuple[int, ...]
    sequence: int  # its number in the group, from 1
    fingerprint: int  # 0 where nothing is known to compare
    text: str
    numel: int
    thread: int  # threading.get_ident() of the one that issued it, 0 if not known
    key: str  # of the counter in `Recorder.status` that moves when it ends


@dataclass(frozen=True, slots=True)
class Observation:
    """Per channel: the oldest pending collective, the number of the last one issued,
    and that up to which all have ended.
    """

    pending: tuple[Pending, ...] = ()
    issued: dict[str, int] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    recent: tuple[Pending, ...] = ()  # the last collectives issued in any group, ended or not, the latest last

    @property
    def latest(self) -> Pending | None:
        """The last collective issued in any group, ended or not."""
        return self.recent[-1] if self.recent else None


class Recorder:
    """Reads the recorders of all backends that the process has groups of; one thread at a time."""

    def __init__(self) -> None:
        self._groups: tuple[dist.ProcessGroup, ...] = ()
        self._channels: dict[str, tuple[dist.ProcessGroup, str, tuple[int, ...]]] = {}
        self._backends: tuple[str, ...] = ()
        self._blind: tuple[str, ...] = ()
        self._moved: dict[str, tuple[int, float]] = {}  # channel -> sequence number, when it was first seen

    @property
    def blind(self) -> tuple[str, ...]:
        """Channels that no recorder covers: of these only sequence numbers are known."""
        return self._blind

    def status(self) -> dict[str, tuple[int, int]]:
        """For each group the last collective issued and ended, under a key of the recorder's own; takes about 50 µs."""
        self._learn_groups()
        found: dict[str, tuple[int, int]] = {}
        for backend in self._backends:
            trace = _torch.recorder_dump(backend, entries=False)
            for name, counters in (trace or {}).get("pg_status", {}).items():
                numbers = (int(counters["last_enqueued_collective"]), int(counters["last_completed_collective"]))
                found[f"{backend}/{name}"] = numbers
        now = time.monotonic()
        for channel in self._blind:
            issued = _torch.sequence_number(self._channels[channel][0]) or 0
            if self._moved.get(channel, (-1, 0.0))[0] != issued:
                self._moved[channel] = (issued, now)
            found[channel] = (issued, -1 if issued else 0)
        return found

    def observe(self) -> Observation:
        """Read everything; takes up to 50 ms with a full recorder, so not on the healthy path."""
        self._learn_groups()
        pending: list[Pending] = []
        issued: dict[str, int] = {}
        done: dict[str, int] = {}
        recent: list[tuple[int, tuple[str, tuple[int, ...], dict[str, Any], str]]] = []
        for backend in self._backends:
            trace = _torch.recorder_dump(backend, entries=True)
            found = _by_channel(backend, (trace or {}).get("entries", ()))
            for channel, (group, own, ranks) in self._channels.items():
                if own != backend or channel in self._blind:
                    continue
                entries = found.get(channel, [])
                waiting = [entry for entry in entries if not _torch.recorded_end(entry)]
                issued[channel] = done[channel] = _issued(group, entries, len(_backends(group)) == 1)
                last = entries[-RECENT:]
                recent += [(int(e.get("time_created_ns", 0)), (channel, ranks, e, backend)) for e in last]
                if waiting:
                    oldest = min(waiting, key=lambda entry: int(entry["collective_seq_id"]))
                    done[channel] = int(oldest["collective_seq_id"]) - 1
                    pending.append(_pending(channel, ranks, oldest, backend))
        self._observe_blind(pending, issued, done)
        recent.sort(key=lambda item: item[0])
        return Observation(tuple(pending), issued, done, tuple(_pending(*found) for _, found in recent[-RECENT:]))

    def _learn_groups(self) -> None:
        groups = _torch.known_groups()
        if groups == self._groups:
            return
        channels = {}
        for group in groups:
            ranks = _torch.group_ranks(group)
            if len(ranks) > 1:
                for backend in sorted(_backends(group)):
                    channels[f"{_torch.group_name(group)}:{backend}"] = (group, backend, ranks)
        self._channels = channels
        self._backends = tuple(sorted({backend for _, backend, _ in channels.values()}))
        covered = {backend for backend in self._backends if _torch.recorder_dump(backend, entries=False) is not None}
        self._blind = tuple(name for name, (_, backend, _) in channels.items() if backend not in covered)
        self._groups = groups

    def _observe_blind(self, pending: list[Pending], issued: dict[str, int], done: dict[str, int]) -> None:
        """Without a recorder: a thread that is inside a collective waits in the group whose number moved last."""
        for channel in self._blind:
            issued[channel] = done[channel] = _torch.sequence_number(self._channels[channel][0]) or 0
        moved = [(self._moved[c][1], c) for c in self._blind if c in self._moved and self._moved[c][0] > 0]
        thread = _waiting_thread() if moved else 0
        if not thread:
            return
        channel = max(moved)[1]
        text = f"collective(number {done[channel]} of group {channel}; torch's flight recorder is off, so its kind is unknown)"
        pending.append(Pending(channel, self._channels[channel][2], done[channel], 0, text, 0, thread, channel))
        done[channel] -= 1


def _backends(group: dist.ProcessGroup) -> frozenset[str]:
    try:
        return backends(group)
    except (RuntimeError, ValueError, LookupError):  # destroyed meanwhile
        return frozenset()


def _by_channel(backend: str, entries: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            found.setdefault(f"{entry['process_group'][0]}:{backend}", []).append(entry)
    return found


def _issued(group: dist.ProcessGroup, entries: list[dict[str, Any]], alone: bool) -> int:
    """The number of the last collective; the recorder forgets the older ones, the group's own counter does not."""
    recorded = max((int(entry["collective_seq_id"]) for entry in entries), default=0)
    counted = _torch.sequence_number(group) if alone else None
    return max(recorded, counted or 0)


def _pending(channel: str, ranks: tuple[int, ...], entry: dict[str, Any], backend: str) -> Pending:
    name = _name(entry)
    sizes, types = entry.get("input_sizes", []), entry.get("input_dtypes", [])
    compared = (name, [_numel(size) for size in sizes], types) if name in _EQUAL_SIZES else (name,)
    digest = hashlib.blake2b(repr(compared).encode(), digest_size=8).digest()
    return Pending(
        channel=channel,
        ranks=ranks,
        sequence=int(entry["collective_seq_id"]),
        fingerprint=int.from_bytes(digest, "big") >> 1 or 1,
        text=_text(entry),
        numel=max((_numel(size) for size in (*sizes, *entry.get("output_sizes", []))), default=0),
        thread=int(entry.get("thread_id") or 0),
        key=f"{backend}/{entry.get('pg_id')}",
    )


def _name(entry: dict[str, Any]) -> str:
    return str(entry.get("profiling_name", "")).rpartition(":")[2] or "collective"


def _numel(size: Iterable[int]) -> int:
    total = 1
    for length in size:
        total *= length
    return total


def _text(entry: dict[str, Any]) -> str:
    """In words, and equal on all ranks of the group that issued the same."""
    types = sorted({str(kind) for kind in entry.get("input_dtypes", [])})
    sizes = [str(list(size)) for size in entry.get("input_sizes", [])[:4]]
    tensors = f"{'/'.join(types)} {', '.join(sizes)}, " if sizes else ""
    group, description = (str(part) for part in (*entry["process_group"], "", "")[:2])
    named = f" {description}" if description not in ("", "undefined") else ""
    return f"{_name(entry)}({tensors}group {group}{named}, number {entry['collective_seq_id']})"


def _waiting_thread() -> int:
    """The ident of a thread that is inside a collective or a backward pass, or 0."""
    for ident, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_globals.get("__name__") in _WAITING:
                return ident
            frame = frame.f_back
    return 0
