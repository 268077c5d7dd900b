"""Pending collectives of this process, and the sends and receives it waits for.

They come from torch's flight recorder, or from sequence numbers where it is off.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import torch.distributed as dist

from ncclguard import torch_compat
from ncclguard.coordination.incidents import GUARDED
from ncclguard.deadlines.stopping import backends
from ncclguard.frames import frames_of_threads, local_of
from ncclguard.watch.monitored_barriers import MonitoredBarrier, monitored_barriers
from ncclguard.watch.point_to_point import Transfer, transfers

#: Operations of which the inputs must have equal sizes and dtypes on all ranks: where a list of tensors is not even,
#: torch records another name. Of `_EQUAL_SUMS` the sizes are added up, of `_EQUAL_TYPES` the dtypes must be equal. Of
#: the others only the name is compared.
_EQUAL_SIZES: Final = frozenset(
    {
        "all_reduce",
        "allreduce",
        "broadcast",
        "reduce",
        "all_gather",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
    }
)
_EQUAL_SUMS: Final = frozenset({"reduce_scatter"})
_EQUAL_TYPES: Final = frozenset({"all_to_all", "gather"})
#: Two functions of torch for one operation, with a list of tensors or with one of all: these fit each other.
_ONE_OPERATION: Final = {"_all_gather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}
#: Collectives of which a rank says what they were after they have ended: a mismatch
#: may end on some ranks, with rubbish.
RECENT: Final = 8
#: What the ranks of a job say of their last calls when they leave, a hundred bytes for each: all together, and of one.
LAST_CALLS: Final = 20_000
FEWEST_LAST: Final = 16
MOST_LAST: Final = 512
#: Frames in which a thread waits for a collective, for the fallback.
_NO_GROUP: Final = object()
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
    issued: int = 0  # by time.time_ns(), 0 if not known
    started: bool = False  # its stream has come to it, as far as that is recorded


@dataclass(frozen=True, slots=True)
class Observation:
    """The oldest pending collective of each channel, the last one issued, and that up to which all have ended."""

    pending: tuple[Pending, ...] = ()
    issued: dict[str, int] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    recent: tuple[Pending, ...] = ()  # the last collectives issued in any group, ended or not, the latest last
    message: str = ""  # NCCL's send or receive that the device waits in, in words
    threads: dict[str, int] = field(default_factory=dict)  # by channel, which issued its last collective

    @property
    def latest(self) -> Pending | None:
        """The last collective issued in any group, ended or not."""
        return self.recent[-1] if self.recent else None


class Calls:
    """The collectives of one channel that a recorder still has whole, ended or not, by their numbers.

    What is issued together is recorded one by one under one number: of the first it may have forgotten some (`whole`:
    it has forgotten nothing so far), and of the last NCCL may be about to record more. What was issued before `since`,
    by the clock of `time.time_ns`, may be an earlier group's of that name.
    """

    def __init__(
        self,
        channel: str,
        ranks: tuple[int, ...],
        entries: Iterable[dict[str, Any]],
        recorder: str,
        *,
        since: int = 0,
        whole: bool = True,
    ) -> None:
        self.ranks = ranks
        self._channel, self._recorder = channel, recorder
        self._entries: dict[int, list[dict[str, Any]]] = {}
        for entry in entries:
            if int(entry.get("time_created_ns") or 0) < since:
                whole = False
            else:
                self._entries.setdefault(int(entry["collective_seq_id"]), []).append(entry)
        if min(self._entries, default=1) > 1 or not whole:
            self._entries.pop(min(self._entries, default=0), None)
        if recorder != "gloo":
            self._entries.pop(self.last, None)

    @property
    def last(self) -> int:
        """The number of the last one, 0 for none."""
        return max(self._entries, default=0)

    def fingerprint(self, sequence: int) -> int:
        """Return what must be equal on all ranks, in 63 bits; 0 where it is not known."""
        return _digest(tuple(_compared(entry, ended=True) for entry in self._entries.get(sequence, ())))

    def latest(self, number: int) -> tuple[Pending, ...]:
        """Return the last ones in full."""
        found = (self.pending(sequence) for sequence in sorted(self._entries)[-number:])
        return tuple(one for one in found if one is not None)

    def pending(self, sequence: int) -> Pending | None:
        """Return one of them in full."""
        entries = self._entries.get(sequence)
        if not entries:
            return None
        first = _pending(self._channel, self.ranks, entries[0], self._recorder)
        return replace(first, fingerprint=self.fingerprint(sequence))


@dataclass(frozen=True, slots=True)
class _Channel:
    group: dist.ProcessGroup
    name: str
    backend: str  # as the program calls it
    recorder: str  # as the recorder calls it
    ranks: tuple[int, ...]
    since: int  # time.time_ns() when it was not there yet, or first seen


class Recorder:
    """Reads the recorders of all backends that the process has groups of; one thread at a time."""

    def __init__(self) -> None:
        self._groups: tuple[tuple[dist.ProcessGroup, str, bool], ...] = ()
        self._learned = 0  # time.time_ns() when it was last looked which there are
        self._channels: dict[str, _Channel] = {}
        self._recorders: tuple[str, ...] = ()
        self._covered: set[str] = set()  # recorders that have shown something
        self._connected: set[str] = set()  # channels of which it is known, or not asked any more
        self._blind: dict[str, int] = {}  # channel -> collectives issued on it
        self._moved: dict[str, tuple[int, float]] = {}  # channel -> sequence number, when it was first seen
        torch_compat.on_destroy(_note_all)
        torch_compat.on_destroy_group(_note)

    @property
    def blind(self) -> tuple[str, ...]:
        """Channels with collectives that no recorder covers: of these only sequence numbers are known.

        Not one whose first collective has not come back yet: NCCL connects in it, and is recorded when it has. Nor one
        of the guard's own backend, which says by itself what was called.
        """
        return tuple(
            channel
            for channel, issued in self._blind.items()
            if issued > 1 and self._channels[channel].backend != GUARDED
        )

    def status(self) -> dict[str, tuple[int, int]]:
        """For each group the last collective issued and ended, under a key of the recorder's own; takes about 50 µs."""
        self._learn_groups()
        uncovered = self._issued_uncovered()
        found: dict[str, tuple[int, int]] = {}
        for recorder in self._recorders:
            trace = torch_compat.recorder_dump(recorder, entries=False)
            if trace is None:
                continue
            self._covered.add(recorder)
            for name, counters in trace.get("pg_status", {}).items():
                numbers = (int(counters["last_enqueued_collective"]), int(counters["last_completed_collective"]))
                found[f"{recorder}/{name}"] = numbers
        self._blind = {c: n for c, n in uncovered.items() if self._channels[c].recorder not in self._covered}
        found |= {channel: (1, -1) for channel in self._maybe_connecting()}
        now = time.monotonic()
        for channel, issued in self._blind.items():
            if self._moved.get(channel, (-1, 0.0))[0] != issued:
                self._moved[channel] = (issued, now)
            found[channel] = (issued, -1)
        found |= {transfer.pair.channel: (transfer.number, -1) for _, transfer in transfers.awaited()}
        found |= {barrier.channel: (barrier.number, -1) for barrier in monitored_barriers.waiting()}
        return found

    def flight(self) -> tuple[int, bool] | None:
        """Return how many collectives this process has issued, and whether it may be waiting for any; takes 50 µs.

        None where it has groups of another backend than gloo: a device has not come to what its host has issued.
        """
        self._learn_groups()
        issued, waits = 0, False
        for recorder in self._recorders:
            trace = torch_compat.recorder_dump(recorder, entries=False) if recorder == "gloo" else None
            if trace is None:
                return None
            for counters in trace.get("pg_status", {}).values():
                begun, ended = (int(counters[f"last_{what}_collective"]) for what in ("enqueued", "completed"))
                issued, waits = issued + max(begun, 0), waits or begun > ended
        waits = waits or any(True for _ in transfers.awaited()) or bool(monitored_barriers.waiting())
        return issued, waits

    def issued(self) -> dict[str, int]:
        """Return how many collectives this process has issued on each channel that `status` has found; any thread.

        By the backends' own counters, so no recorder is read: takes about 20 µs for each.
        """
        found = {}
        for channel, own in list(self._channels.items()):
            with contextlib.suppress(TypeError, ValueError, LookupError, RuntimeError):  # its group was destroyed since
                if (number := _collectives_issued(own)) is not None:
                    found[channel] = max(number, 0)
        return found

    def errors(self) -> dict[str, str]:
        """Channels whose backend has found an error by itself, with its kind: see `torch_compat.backend_error`."""
        found = {}
        for channel, own in self._channels.items():
            with contextlib.suppress(TypeError, ValueError, LookupError):  # its group was destroyed since
                if (kind := torch_compat.backend_error(own.group, own.backend)) is not None:
                    found[channel] = kind
        return found

    def observe(self) -> Observation:
        """Read everything; takes up to 50 ms with a full recorder, so not on the healthy path."""
        self._learn_groups()
        pending: list[Pending] = []
        issued: dict[str, int] = {}
        done: dict[str, int] = {}
        recent: list[tuple[int, tuple[str, tuple[int, ...], dict[str, Any], str]]] = []
        message = ""
        threads: dict[str, int] = {}
        for recorder in self._recorders:
            trace = torch_compat.recorder_dump(recorder, entries=True)
            dump = (trace or {}).get("entries", ())
            calls = _calls(dump) if recorder == "nccl" else {}
            for own in self._channels.values():
                if own.name in calls and hasattr(own.group, "has_reached"):
                    _find_started(calls[own.name], own.group.has_reached)
            found, messages = _by_group(dump)
            for channel, own in self._channels.items():
                if own.recorder != recorder or channel in self._blind:
                    continue
                entries = found.get(own.name, [])
                message = message or messages.get(own.name, "")
                if entries:
                    self._connected.add(channel)
                    threads[channel] = int(entries[-1].get("thread_id") or 0)
                waiting = [entry for entry in entries if not torch_compat.recorded_end(entry)]
                issued[channel] = done[channel] = _issued(own, entries)
                last = entries[-RECENT:]
                recent += [(int(e.get("time_created_ns", 0)), (channel, own.ranks, e, recorder)) for e in last]
                if waiting:
                    oldest = min(waiting, key=lambda entry: int(entry["collective_seq_id"]))
                    done[channel] = int(oldest["collective_seq_id"]) - 1
                    pending.append(_pending(channel, own.ranks, oldest, recorder))
        self._observe_connecting(pending, issued, done)
        self._observe_blind(pending, issued, done)
        _observe_transfers(pending, issued, done)
        _observe_monitored_barriers(pending, issued, done)
        recent.sort(key=lambda item: item[0])
        latest = tuple(_pending(*found) for _, found in recent[-RECENT:])
        if (failed := monitored_barriers.failed) is not None:  # behind which this thread has issued nothing yet
            with contextlib.suppress(ValueError):  # its group was destroyed meanwhile
                latest = (*latest, _entered(failed))
        return Observation(tuple(pending), issued, done, latest, message, threads)

    def calls(self) -> dict[str, Calls]:
        """Return what the recorders have of each group, but for those whose own backend compares its calls.

        It takes as long as `observe`.
        """
        self._learn_groups()
        found = {}
        for recorder in self._recorders:
            dump = (torch_compat.recorder_dump(recorder, entries=True) or {}).get("entries", ())
            whole = not dump or dump[0].get("record_id") == 0
            entries, _ = _by_group(dump)
            for channel, own in self._channels.items():
                compares_itself = hasattr(own.group, "has_reached")
                if own.recorder == recorder and channel not in self._blind and not compares_itself:
                    of_it = entries.get(own.name, ())
                    found[channel] = Calls(channel, own.ranks, of_it, recorder, since=own.since, whole=whole)
        return found

    def has_recorded(self) -> bool:
        """Return whether any collective or message is on record, also of groups that were destroyed since."""
        dumps = (torch_compat.recorder_dump(recorder, entries=True) or {} for recorder in self._recorders)
        return bool(transfers.issued()) or bool(monitored_barriers.issued()) or any(one.get("entries") for one in dumps)

    def stacks(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Return the last collectives, by channel and number, with the "frames" in which each was called.

        Takes a little longer than `observe`.
        """
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for recorder in self._recorders:
            entries, _ = _by_group(torch_compat.recorded_stacks(recorder))
            for channel, own in self._channels.items():
                of_it = entries.get(own.name, ()) if own.recorder == recorder else ()
                new = [entry for entry in of_it if int(entry.get("time_created_ns") or 0) >= own.since]
                found.setdefault(channel, {}).update({int(entry["collective_seq_id"]): entry for entry in new})
        return found

    def _learn_groups(self) -> None:
        now = time.time_ns()
        groups = tuple(_told_apart(group) for group in torch_compat.known_groups())
        before, self._learned = self._learned or now, now  # a group that is new was not there before
        if groups == self._groups:
            return
        channels: dict[str, _Channel] = {}
        for group, name, connected in groups:
            ranks = torch_compat.recorded_ranks(group)
            if len(ranks) > 1 and connected:
                for backend in sorted(_backends(group)):
                    recorder = torch_compat.recorder_name(group, backend)
                    former = self._channels.get(f"{name}:{backend}")
                    since = former.since if former is not None and former.group is group else before
                    channels[f"{name}:{backend}"] = _Channel(group, name, backend, recorder, ranks, since)
        self._channels = channels
        self._recorders = tuple(sorted({channel.recorder for channel in channels.values()}))
        self._covered &= set(self._recorders)
        self._connected = {channel for channel, own in channels.items() if own.backend == "gloo"}  # it was when made
        self._blind = {}
        self._groups = groups

    def _issued_uncovered(self) -> dict[str, int]:
        """Channels of recorders that have shown nothing so far, with the number of collectives that were issued."""
        unseen = {c: own for c, own in self._channels.items() if own.recorder not in self._covered}
        counted = {c: _collectives_issued(own) for c, own in unseen.items()}
        return {channel: number for channel, number in counted.items() if number}

    def _maybe_connecting(self) -> list[str]:
        """Channels of recorders that show others, whose first collective was issued and has not been seen there."""
        found = []
        for channel, own in self._channels.items():
            if channel not in self._connected and own.recorder in self._covered:
                issued = torch_compat.sequence_number(own.group, own.backend) or 0
                if issued == 1:
                    found.append(channel)
                elif issued > 1:
                    self._connected.add(channel)
        return found

    def _observe_connecting(self, pending: list[Pending], issued: dict[str, int], done: dict[str, int]) -> None:
        """NCCL connects in the first collective of a group made without a device, and it is recorded afterwards."""
        for channel in self._maybe_connecting():
            own = self._channels[channel]
            thread = _thread_calling(own.group)
            if thread:
                pending.append(self._unrecorded(channel, 1, "it is connecting still", thread))
                issued[channel], done[channel] = 1, 0
            elif not _waiting_thread():
                self._connected.add(channel)

    def _unrecorded(self, channel: str, number: int, why: str, thread: int) -> Pending:
        text = f"collective(number {number} of group {channel}; {why}, so its kind is unknown)"
        return Pending(channel, self._channels[channel].ranks, number, 0, text, 0, thread, channel)

    def _observe_blind(self, pending: list[Pending], issued: dict[str, int], done: dict[str, int]) -> None:
        """Without a recorder: a thread that is inside a collective waits in the group whose number moved last."""
        for channel, number in self._blind.items():
            issued[channel] = done[channel] = number
        moved = [(self._moved[c][1], c) for c in self._blind if c in self._moved and self._moved[c][0] > 0]
        thread = _waiting_thread() if moved else 0
        if not thread:
            return
        channel = max(moved)[1]
        why = "torch's flight recorder is off" if done[channel] > 1 else "it is connecting still, or not recorded"
        pending.append(self._unrecorded(channel, done[channel], why, thread))
        done[channel] -= 1


# When groups were destroyed, by name: a recorder keeps what was pending in them, and later groups have their names.
_destroyed: dict[str, int] = {}


def _note(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(ValueError):  # destroyed already
        _destroyed[torch_compat.group_name(group)] = time.time_ns()


def _note_all() -> None:
    for group in torch_compat.known_groups():
        _note(group)


def _told_apart(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, str, bool]:
    """A group, what the recorder calls it now, and whether it has anything to record."""
    return group, torch_compat.recorded_name(group), getattr(group, "beneath", group) is not None


def _backends(group: dist.ProcessGroup) -> frozenset[str]:
    try:
        return backends(group)
    except (RuntimeError, ValueError, LookupError):  # destroyed meanwhile
        return frozenset()


def _by_group(entries: Iterable[dict[str, Any]]) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """The collectives of each living group, and the message that its device waits in, in words; by the group's name.

    What ends several messages that were issued together is one of them: torch records that behind them, as an operation
    with the number of the collective before. Only it tells then whether the device has come to them.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    begun: dict[str, str] = {}
    messages: set[str] = set()  # groups whose last entry was one
    for entry in entries:
        name = str(entry["process_group"][0])
        if _is_of_destroyed(entry):
            continue
        if entry.get("is_p2p") or (name in messages and _name(entry) == "coalesced"):
            messages.add(name)
            if entry.get("state") == "started" and not torch_compat.recorded_end(entry):
                begun.setdefault(name, _message(entry))
            continue
        messages.discard(name)
        found.setdefault(name, []).append(entry)
    return found, begun


def _calls(entries: Iterable[dict[str, Any]]) -> dict[str, list[list[dict[str, Any]]]]:
    """The entries of each call, by the group's name, in the order of issue; all of one call end with the last.

    ProcessGroupNCCL records what is issued together one by one, under equal numbers, and the whole behind it. Only the
    whole has events of its own: the others keep pointing at ones that are given to other calls, or stay "scheduled".
    """
    found: dict[str, dict[tuple[int, int], list[dict[str, Any]]]] = {}
    for entry in entries:
        if not _is_of_destroyed(entry):
            numbers = int(entry["collective_seq_id"]), int(entry["p2p_seq_id"])
            found.setdefault(str(entry["process_group"][0]), {}).setdefault(numbers, []).append(entry)
    calls = {name: [*by_numbers.values()] for name, by_numbers in found.items()}
    for *parts, whole in (call for of_group in calls.values() for call in of_group):
        for part in parts:
            part["retired"] = torch_compat.recorded_end(whole)
            part["state"] = "scheduled" if part.get("is_p2p") else whole.get("state")
    return calls


def _find_started(calls: Iterable[list[dict[str, Any]]], reached: Callable[[int], bool]) -> None:
    """Note as started what the device of a group is in, as torch does with TORCH_NCCL_ENABLE_TIMING=1.

    That is the first call that has not ended, where its device has come to it: a communicator that was connected ahead
    serializes its calls, messages too (ProcessGroupNCCL.cpp, "eager initialization").
    """
    for call in calls:
        whole = call[-1]
        if not torch_compat.recorded_end(whole):
            if reached(int(whole["time_created_ns"])):
                for entry in call:
                    if entry is whole or not entry.get("is_p2p"):
                        entry["state"] = "started"
            return


def _is_of_destroyed(entry: dict[str, Any]) -> bool:
    return int(entry.get("time_created_ns", 0)) < _destroyed.get(str(entry["process_group"][0]), 0)


def _message(entry: dict[str, Any]) -> str:
    """In words, without a number, which is not alike on both ends."""
    name = "batch_isend_irecv" if _name(entry) == "coalesced" else _name(entry)
    return f"{name}(group {entry['process_group'][0]})"


def _issued(channel: _Channel, entries: list[dict[str, Any]]) -> int:
    """The number of the last collective; the recorder forgets the older ones, the backend's own counter does not."""
    recorded = max((int(entry["collective_seq_id"]) for entry in entries), default=0)
    return max(recorded, _collectives_issued(channel) or 0)


def _collectives_issued(channel: _Channel) -> int | None:
    """The backend's own counter, without what gloo counts with its collectives; None where it has none."""
    number = torch_compat.sequence_number(channel.group, channel.backend)
    if channel.backend != "gloo" or number is None:
        return number
    return number - transfers.total(channel.group) - monitored_barriers.messages(channel.group, number)


def _observe_transfers(pending: list[Pending], issued: dict[str, int], done: dict[str, int]) -> None:
    """Sends and receives: a rank has not come to one that it has not issued; which it waits for, its threads know."""
    for pair, number in transfers.issued().items():
        issued[pair.channel] = done[pair.channel] = number
    for thread, transfer in transfers.awaited():
        channel = transfer.pair.channel
        issued.setdefault(channel, transfer.number)
        done[channel] = transfer.number - 1
        pending.append(_waited_for(transfer, thread))


def _observe_monitored_barriers(pending: list[Pending], issued: dict[str, int], done: dict[str, int]) -> None:
    for channel, number in monitored_barriers.issued().items():
        issued[channel] = done[channel] = number
    for barrier in monitored_barriers.waiting():
        with contextlib.suppress(ValueError):  # its group was destroyed meanwhile
            pending.append(_entered(barrier))
            done[barrier.channel] = barrier.number - 1


def _entered(barrier: MonitoredBarrier) -> Pending:
    channel = barrier.channel
    return Pending(
        channel, barrier.ranks, barrier.number, 0, barrier.text, 0, barrier.thread, channel, issued=barrier.since
    )


def _waited_for(transfer: Transfer, thread: int) -> Pending:
    channel = transfer.pair.channel
    return Pending(channel, transfer.ranks, transfer.number, 0, transfer.text, transfer.numel, thread, channel)


def _pending(channel: str, ranks: tuple[int, ...], entry: dict[str, Any], recorder: str) -> Pending:
    sizes = entry.get("input_sizes", [])
    return Pending(
        channel=channel,
        ranks=ranks,
        sequence=int(entry["collective_seq_id"]),
        fingerprint=_digest((_compared(entry),)),
        text=_text(entry),
        numel=max((_numel(size) for size in (*sizes, *entry.get("output_sizes", []))), default=0),
        thread=int(entry.get("thread_id") or 0),
        key=f"{recorder}/{entry.get('pg_id')}",
        issued=int(entry.get("time_created_ns") or 0),
        started=entry.get("state") == "started",
    )


def _compared(entry: dict[str, Any], ended: bool = False) -> tuple[object, ...]:
    """Return what must be equal on all ranks; of what has `ended`, not the dtype of parts, which may be empty."""
    name = _ONE_OPERATION.get(_name(entry), _name(entry))
    types, numels = entry.get("input_dtypes", []), [_numel(size) for size in entry.get("input_sizes", [])]
    if ended and (name in _EQUAL_TYPES or not any(numels)):
        return name, *(numels if name in _EQUAL_SIZES else ())
    if name in _EQUAL_SUMS:
        return name, sum(numels), *sorted(set(types))
    if name in _EQUAL_SIZES:
        return name, *numels, *types
    return (name, *sorted(set(types))) if name in _EQUAL_TYPES else (name,)


@lru_cache(maxsize=4096)
def _digest(compared: tuple[object, ...]) -> int:
    """Return 63 bits, 0 for nothing."""
    digest = hashlib.blake2b(repr(compared).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 1 or 1) if compared else 0


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
    for ident, frames in frames_of_threads().items():
        if any(frame.f_globals.get("__name__") in _WAITING for frame in frames):
            return ident
    return 0


def _thread_calling(group: dist.ProcessGroup) -> int:
    """The ident of a thread that is inside a collective of torch.distributed on this very group, or 0."""
    for ident, frames in frames_of_threads().items():
        for frame in frames:
            if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
                called_on = local_of(frame, "group", _NO_GROUP)
                if (dist.group.WORLD if called_on is None else called_on) is group:
                    return ident
    return 0
