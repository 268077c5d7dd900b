"""A new process takes a lost rank's place in a training that runs: how it is found, met, and given the state.

The newcomer begins a session of its own in the store, and leaves a note there. At a boundary of two steps the first of
the ranks that go on tells all what it has read. They make themselves known in the newcomer's session, agree in their
own that all have, and go over to it: no key, departure or verdict of the lost rank is in there, and one that was only
stopped is not either. Then a survivor's state is broadcast. Whoever is lost meanwhile, the newcomer too, is left out as
in any other meeting. No caller waits for the store but the newcomer.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from ncclguard.checksum import checksum
from ncclguard.coordination.liveness import Identity, Sight, host_key, look_here
from ncclguard.coordination.store import AgreementStore, Entries, Stored
from ncclguard.errors import GuardError
from ncclguard_explain.language import told, tr

#: Bytes of the state that one broadcast carries.
PIECE = 32 << 20
#: How often a state that does not arrive as it was sent is sent.
TRIES = 3
#: Seconds between two looks of the first rank at the notes, and of a newcomer at whether it is awaited.
LOOK_EVERY = 0.5
#: Seconds in which a newcomer that waits must have shown that it does.
SILENT = 10.0
#: Seconds for the state to be given to a newcomer, in which nobody else is looked for.
GIVEN_WITHIN = 60.0

#: What a monitor does in each of its steps, with the store that all sessions are in.
Look = Callable[[float, AgreementStore], None]

_NOTES = ("joins", "join")
_REFUSED = "refused"
_TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Note(Stored):
    """A newcomer's note in the store: its rank, its session, the step that it wants to join at, its process.

    `place`: the number of the place that it has taken on a host that stands by; 0 on the rank's own.
    """

    rank: int
    session: str
    step: str
    identity: str
    place: int = 0


class Newcomer(NamedTuple):
    """The first rank's word to all others on a note: whom they take in."""

    rank: int
    session: str
    place: int


@dataclass(frozen=True, slots=True)
class Invitation(Stored):
    """The survivors' word to the newcomer: who meets, how often they have, and before which call of a step."""

    members: tuple[int, ...]
    meetings: int
    calls: int


@dataclass(slots=True)
class _Heard:
    note: Note
    count: int
    moved: float


class Waiting:
    """The newcomers that wait, as the monitor of the first rank that goes on has read in the store.

    All ranks know whom they have taken in, because each may become the first.
    """

    def __init__(self) -> None:
        self.missing: frozenset[int] = frozenset()
        self._notes = Entries(*_NOTES)
        self._heard: dict[str, _Heard] = {}
        self._lock = threading.Lock()
        self._next_look = 0.0
        self._used: set[str] = set()  # sessions that the ranks have tried to go over to, or never will
        self._refused: dict[str, str] = {}  # sessions to which nobody comes, and why, until that is written
        self._begun = False
        self._coming: dict[int, float] = {}  # ranks -> when all have gone over to the session of its newcomer
        self._places: dict[int, int] = {}  # of ranks that have joined; 0 for the rank's own host
        self._untold: set[int] = set()  # of these, those that `joined` has not told

    @property
    def places(self) -> dict[int, int]:
        """The places that those who have joined last have taken."""
        with self._lock:
            return dict(self._places)

    @places.setter
    def places(self, places: dict[int, int]) -> None:
        """A newcomer is told by another rank."""
        with self._lock:
            self._places, self._untold = dict(places), set(places)

    def used(self, newcomer: Newcomer, came: bool) -> None:
        """The ranks have gone over to a newcomer's session, or could not all; it has to begin another one then."""
        with self._lock:
            self._used.add(newcomer.session)
            if came:
                self._coming[newcomer.rank] = time.monotonic()
                self._places[newcomer.rank] = newcomer.place
                self._untold.add(newcomer.rank)
            else:
                self._refused[newcomer.session] = _REFUSED

    def miss(self, ranks: Iterable[int]) -> None:
        """These ranks are missing now, and no others."""
        with self._lock:
            self.missing = frozenset(ranks)
            self._coming = {rank: since for rank, since in self._coming.items() if rank in self.missing}

    def is_awaited(self, rank: int, now: float) -> bool:
        """Return whether a newcomer waits for this rank's place, or is given the state now."""
        with self._lock:
            return now - self._coming.get(rank, float("-inf")) <= GIVEN_WITHIN or any(
                one.note.rank == rank and one.note.session not in self._used and now - one.moved <= SILENT
                for one in self._heard.values()
            )

    def joined(self) -> list[tuple[int, int]]:
        """Ranks whose newcomers all have gone over to since this was asked, and the places that these have taken."""
        with self._lock:
            joined = [(rank, self._places[rank]) for rank in sorted(self._untold)]
            self._untold.clear()
        return joined

    def look(self, now: float, store: AgreementStore) -> None:
        """In the monitor's thread: read what has come since, and who still shows that it waits."""
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY
        new = [_Heard(Note.from_json(text), 0, now) for text in self._notes.new(store)]
        if not self._begun:  # these may be old: who left them has to show that it is there
            for one in new:
                one.count, one.moved = store.count(f"joining/{one.note.session}"), float("-inf")
        self._begun = True
        with self._lock:
            self._heard |= {one.note.session: one for one in new}
            heard = [one for one in self._heard.values() if one.note.session not in self._used]
            for one in [one for one in heard if self._is_taken(one.note)]:
                self._used.add(one.note.session)
                self._refused[one.note.session] = _TAKEN
            refused, self._refused = self._refused, {}
        for session, why in refused.items():
            store.first(invitation_key(session), why)
        for one in heard:
            count = store.count(f"joining/{one.note.session}")
            if count != one.count:
                one.count, one.moved = count, now

    def _is_taken(self, note: Note) -> bool:
        """Return whether a process of another host has the place; one of its own host comes when that has ended."""
        return note.rank not in self.missing and self._places.get(note.rank, note.place) != note.place

    def first(self, step: str) -> Note | None:
        """A newcomer for one of the missing ranks that wants to join at this step, and is there; the latest."""
        now = time.monotonic()
        with self._lock:
            heard = [one for one in self._heard.values() if one.note.session not in self._used]
        for one in reversed(heard):
            note = one.note
            if note.rank not in self.missing or note.step != step:
                continue
            if not one.count or now - one.moved > SILENT:
                continue
            identity = Identity.from_json(note.identity)
            if identity.host_key == host_key() and look_here(identity)[0] in (Sight.GONE, Sight.STOPPED):
                continue
            return note
        return None


class PlaceTaken(GuardError):
    """A newcomer is not needed any more: another host was faster."""


class Asking:
    """A newcomer's side: leaves its note and shows that it waits, until it is invited; in the monitor's thread."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._left = False
        self._taken = False
        self._invitation: Invitation | None = None
        self.invited = threading.Event()

    def look(self, now: float, store: AgreementStore) -> None:
        """In the monitor's thread."""
        if self.invited.is_set():
            return
        store.count(f"joining/{self._note.session}", 1)
        if not self._left:
            self._left = True
            Entries(*_NOTES).add(store, self._note.to_json())
        said = store.read(invitation_key(self._note.session))
        if said is not None:
            self._taken = said == _TAKEN
            self._invitation = None if said in (_REFUSED, _TAKEN) else Invitation.from_json(said)
            self.invited.set()

    def invitation(self, end: float, wake: Callable[[], None], trouble: Callable[[], str]) -> Invitation | None:
        """Wait for it, until `end` by time.monotonic(); None where a rank was lost before all were in this session.

        Raises GuardError when there is no answer, or without the store, and PlaceTaken.
        """
        while not self.invited.wait(0.1):
            if trouble():
                raise GuardError(
                    told("rank {rank} cannot join the others: {trouble}", rank=self._note.rank, trouble=trouble())
                )
            if time.monotonic() > end:
                raise GuardError(
                    told(
                        "rank {rank} has waited in vain to join the others at {step}: that is where they must "
                        "come to again and again, while a rank is missing",
                        rank=self._note.rank,
                        step=self._note.step,
                    )
                )
            wake()
        if self._taken:
            raise PlaceTaken(
                told(
                    "rank {rank} cannot join the others: a process of another host has taken its place; nothing "
                    "is to be done",
                    rank=self._note.rank,
                )
            )
        return self._invitation


def invite(session: str, invitation: Invitation) -> Look:
    """Let the newcomer know, from a survivor's monitor, that all survivors are in its session."""
    written = False

    def look(_: float, store: AgreementStore) -> None:
        nonlocal written
        if not written:
            store.first(invitation_key(session), invitation.to_json())
            written = True

    return look


def all_of(looks: Sequence[Look]) -> Look | None:
    """All of them as one."""
    if not looks:
        return None

    def look(now: float, store: AgreementStore) -> None:
        for each in looks:
            each(now, store)

    return look


def invitation_key(session: str) -> str:
    """Return where the survivors' invitation to a newcomer's session is."""
    return f"joining/{session}/invitation"


# ---------------------------------------------------------------------- the state


class Stateful(Protocol):
    """An object whose state a newcomer is given: a step, with its model, optimizer, loader and what it keeps."""

    name: str

    def state_for_newcomer(self) -> Any:
        """Tensors in dicts, lists and tuples, and anything that pickles."""

    def take_state(self, state: Any) -> None:
        """Take what `state_for_newcomer` returned on a survivor."""


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, those too that no state_dict has."""
    named = {f"parameter {name}": value for name, value in model.named_parameters()}
    return named | {f"buffer {name}": value for name, value in model.named_buffers()}


def take_model_state(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Write a survivor's parameters and buffers over these. Raises GuardError for another model."""
    own = model_state(model)
    here, there = ({name: tuple(value.shape) for name, value in one.items()} for one in (own, state))
    odd = next((name for name in [*there, *here] if here.get(name) != there.get(name)), None)
    if odd is not None:
        shapes = [str(found[odd]) if odd in found else tr("not there") for found in (here, there)]
        raise GuardError(
            told(
                "the model of the new rank is not that of the others: {odd} is {here} here and {there} on "
                "them; make it alike on all ranks",
                odd=odd,
                here=shapes[0],
                there=shapes[1],
            )
        )
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)


def take_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load as `load_state_dict` does, but each floating-point state with its own dtype, not its parameter's."""
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        loaded = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and loaded[name].dtype != value.dtype:
                loaded[name] = value.to(loaded[name].device)


def seed_newcomer(completed: int) -> int:
    """Random numbers of a rank that joins after so many steps: from the seed that its program set, and that number.

    The lost rank's own are nowhere any more; these are the same whenever the same rank joins after the same step.
    """
    text = f"{torch.initial_seed()} joins after {completed}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    return seed


class _Pickler(pickle.Pickler):
    """Leaves the tensors out, and lists them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        self.tensors.append(value.detach())
        return len(self.tensors) - 1, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    """Makes a tensor, to be filled, for each that was left out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_load(self, told: Any) -> torch.Tensor:
        _, dtype, shape = told
        made = torch.empty(shape, dtype=dtype)
        self.tensors.append(made)
        return made


def packed(state: Any) -> torch.Tensor:
    """Return a state in bytes: how long its description is, the description, and its tensors in order."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(state)
    described = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    length = torch.tensor([described.numel()]).view(torch.uint8)
    return torch.cat([length, described, *(_bytes_of(tensor.cpu()) for tensor in pickler.tensors)])


def unpacked(row: torch.Tensor) -> Any:
    """Return the state that `packed` has made these bytes of, with tensors in memory of their own."""
    end = 8 + int(row[:8].view(torch.int64))
    unpickler = _Unpickler(io.BytesIO(row[8:end].numpy().tobytes()))
    state = unpickler.load()
    for tensor in unpickler.tensors:
        own = _bytes_of(tensor)
        begin, end = end, end + own.numel()
        own.copy_(row[begin:end])
    return state


#: Broadcasts one tensor from the source to all members; raises as a guarded collective does.
Broadcast = Callable[[torch.Tensor], None]


class Damaged(GuardError):
    """The state did not arrive as it was sent: on the newcomer, before anything of it is used."""


class NotGiven(GuardError):
    """The source's state cannot be sent: on all members, at the same place."""


def send(state: Callable[[], Any], broadcast: Broadcast) -> int:
    """On the source: give what `state` returns to all that `receive` or `stand_by`; returns how many bytes it has.

    Raises NotGiven on all members where it raises, or does not pickle.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(state())
    except Exception as error:
        broadcast(torch.tensor([-1, 0, 0, 0]))
        raise NotGiven(
            told("its state cannot be given to a new rank: {kind}: {error}", kind=type(error).__name__, error=error)
        ) from error
    described = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    total = sum(tensor.numel() * tensor.element_size() for tensor in pickler.tensors)
    sums, filled = [checksum(described)], 0
    broadcast(torch.tensor([described.numel(), total, *sums[0].tolist()]))
    broadcast(described)
    buffer = torch.empty(min(PIECE, total), dtype=torch.uint8)
    for tensor in pickler.tensors:
        own = _bytes_of(tensor.cpu())
        while own.numel():
            part = min(own.numel(), buffer.numel() - filled)
            buffer[filled : filled + part] = own[:part]
            own, filled = own[part:], filled + part
            if filled == buffer.numel():
                sums.append(checksum(buffer))
                broadcast(buffer)
                filled = 0
    if filled:
        sums.append(checksum(buffer[:filled]))
        broadcast(buffer[:filled])
    broadcast(checksum(torch.stack(sums)))
    return described.numel() + total


def receive(broadcast: Broadcast) -> Any:
    """On the newcomer: the source's state, with tensors in host memory. Raises Damaged where it is another one."""
    length, total, said = _lengths(broadcast)
    described = torch.empty(length, dtype=torch.uint8)
    broadcast(described)
    sums = [checksum(described)]
    if not torch.equal(sums[0], said):  # what is damaged is not unpickled
        _pass(broadcast, total)
        raise Damaged(_DAMAGED)
    unpickler = _Unpickler(io.BytesIO(described.numpy().tobytes()))
    state = unpickler.load()
    buffer = torch.empty(min(PIECE, total), dtype=torch.uint8)
    arrived = buffer[:0]
    for tensor in unpickler.tensors:
        own = _bytes_of(tensor)
        while own.numel():
            if not arrived.numel():
                arrived = buffer[: min(buffer.numel(), total)]
                total -= arrived.numel()
                broadcast(arrived)
                sums.append(checksum(arrived))
            part = min(own.numel(), arrived.numel())
            own[:part] = arrived[:part]
            own, arrived = own[part:], arrived[part:]
    broadcast(said)
    if not torch.equal(said, checksum(torch.stack(sums))):
        raise Damaged(_DAMAGED)
    return state


def stand_by(broadcast: Broadcast) -> None:
    """On all others: take part, so that all have one verdict, and keep nothing."""
    length, total, _ = _lengths(broadcast)
    broadcast(torch.empty(length, dtype=torch.uint8))
    _pass(broadcast, total)


def _pass(broadcast: Broadcast, total: int) -> None:
    """Take part in what follows the description."""
    buffer = torch.empty(min(PIECE, total), dtype=torch.uint8)
    while total:
        part = min(PIECE, total)
        broadcast(buffer[:part])
        total -= part
    broadcast(torch.zeros(2, dtype=torch.int64))


_DAMAGED = "the state did not arrive as it was sent: look at the network and the memory of both hosts"


def _lengths(broadcast: Broadcast) -> tuple[int, int, torch.Tensor]:
    """Return the bytes of the description and of all tensors, and the checksum of the description."""
    lengths = torch.zeros(4, dtype=torch.int64)
    broadcast(lengths)
    if int(lengths[0]) < 0:
        raise NotGiven(
            told("the state that is there cannot be given to a new rank: see the log of the first that goes on")
        )
    return int(lengths[0]), int(lengths[1]), lengths[2:]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------------- what the first rank tells all


class Vote:
    """The steps after which the first rank tells the others whether a newcomer waits, as it says each time.

    A vote waits for all ranks once more in a step. It comes about twice a second, and seldom enough to cost half a
    percent; without a rank missing there is none.
    """

    LENGTH = 256

    def __init__(self) -> None:
        self.due = 0  # the number of the call with the next one
        self._last: tuple[float, int] | None = None
        self._cost = 1.0

    def soon(self, calls: int) -> None:
        """Have the next one in this call, and learn the pace anew."""
        self.due, self._last = calls, None

    def ballot(self, calls: int, note: Note | None) -> torch.Tensor:
        """On the first rank: what is broadcast; of the note what a `Newcomer` has."""
        now, after = time.monotonic(), 1
        if self._last is not None and calls > self._last[1]:
            step = (now - self._last[0]) / (calls - self._last[1])
            after = max(1, min(1000, round(max(LOOK_EVERY, 200 * self._cost) / max(step, 1e-6))))
        self._last = now, calls
        text = json.dumps([after, None if note is None else [note.rank, note.session, note.place]]).encode()
        return torch.frombuffer(bytearray(text.ljust(self.LENGTH)), dtype=torch.uint8)

    def counted(self, calls: int, ballot: torch.Tensor, seconds: float) -> Newcomer | None:
        """On all ranks, when the broadcast has succeeded: the newcomer to meet."""
        self._cost = min(2 * self._cost, seconds)
        after, note = json.loads(ballot.numpy().tobytes())
        self.due = calls + int(after)
        return None if note is None else Newcomer(*note)


def numbered(states: Sequence[Stateful]) -> dict[str, Stateful]:
    """The steps by name; those of one name are numbered in the order in which they were made."""
    found: dict[str, Stateful] = {}
    for one in states:
        name, number = one.name, 2
        while name in found:
            name, number = f"{one.name} ({number})", number + 1
        found[name] = one
    return found
