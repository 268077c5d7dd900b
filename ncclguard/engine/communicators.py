"""Communicators of one guarded group: built, handed out and retired.

There is one for each generation, first build and rebuild alike.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping

from ncclguard import torch_compat
from ncclguard.coordination.group_state import GroupState
from ncclguard.coordination.monitor import Monitor
from ncclguard.coordination.store import ROOT, AgreementStore, StoreUnavailable
from ncclguard.protocol import codec
from ncclguard.protocol.decision import TroubleKind
from ncclguard.protocol.timing import period
from ncclguard.torch_compat.groups import Store
from ncclguard.transport.base import Builder, Communicator, TransportError
from ncclguard.transport.bounded import bounded
from ncclguard_explain.language import joined, told, tr

log = logging.getLogger("ncclguard")

#: Seconds between two looks at whether everybody is ready to build; doubled up to the
#: longest, which grows with the group.
READY_POLL = (0.002, 0.05)


class BuildRefused(Exception):
    """This rank's group-wide settings differ from those of the rank that came first."""


class Revoked(Exception):
    """The generation is frozen: the verdict decides."""


class OutOfTime(Exception):
    """This rank's deadline has passed."""


class Communicators:
    """Constructed by a helper thread in bounded slices, so that the caller stays revocable.

    ``store`` is the connection of the monitor, which only short questions are asked; `connect` makes one of its own.
    Each connection costs the store's host a descriptor, and a look-up of a name in the one thread that serves all.
    """

    def __init__(
        self,
        state: GroupState,
        monitor: Monitor,
        builder: Builder,
        store: Store,
        connect: Callable[[], Store],
        terms: dict[str, object],
        build_slice: float,
    ) -> None:
        self.device = builder.device
        self.in_flight = builder.max_in_flight
        self._state = state
        self._monitor = monitor
        self._builder = builder
        self._store = store
        self._connect = connect
        self._terms = terms
        self._build_slice = build_slice
        self._communicator: Communicator | None = None
        self._building: set[int] = set()
        self._refused = ""
        self._threads: list[threading.Thread] = []
        self._closed = False

    def get(self, generation: int, deadline: float, slice_seconds: float) -> Communicator:
        """Return this generation's communicator, building it first; raises TransportError when that is not possible."""
        current = self._communicator
        if current is not None and current.generation == generation:
            return current
        state = self._state
        with state.condition:
            while True:
                current = self._communicator
                if current is not None and current.generation == generation:
                    return current
                if self._refused:
                    why, self._refused = self._refused, ""
                    raise BuildRefused(why)
                if state.member.frozen or state.member.generation != generation:
                    raise Revoked
                if state.unavailable:
                    raise TransportError(state.unavailable)
                if time.monotonic() >= deadline:
                    raise OutOfTime
                if generation not in self._building:
                    self._start(generation)
                state.condition.wait(min(slice_seconds, max(deadline - time.monotonic(), 0.001)))

    def stop(self, generation: int) -> None:
        """End everything in flight on this generation; from any thread."""
        current = self._communicator
        if current is not None and current.generation == generation:
            current.stop()

    def quiet(self, generation: int, seconds: float) -> bool:
        """True once nothing of this generation can write into anybody's memory any more."""
        current = self._communicator
        if current is None or current.generation != generation:
            return True
        return current.quiet(seconds)

    def donated(self, sequence: int, seconds: float) -> str | None:
        """The result another rank has left for a call that came late; None where there is none within `seconds`."""

        def read() -> tuple[str | None]:
            store = AgreementStore(self._connect(), f"{ROOT}/{self._monitor.nonce}")
            return (store.read(f"{self._state.key}/result/{sequence}"),)

        try:
            # Not in this thread: the store's host may be stopped.
            return bounded("reading a result", read, max(seconds, 0.0), lambda: None)[0]
        except (StoreUnavailable, TransportError) as error:
            log.warning(
                "ncclguard: %s",
                told(
                    "the result of operation {number} could not be read: {error}", "log", number=sequence, error=error
                ),
            )
            return None

    def gone(self, rank: int, since: float) -> str:
        """Local evidence that a rank's process is gone, and has not ended because a call failed there `since` then."""
        return "" if self._monitor.gave_up(rank, self._state.key, since) else self._monitor.neighbours.gone(rank)

    def gives_up(self) -> None:
        """A call is about to return without a verdict."""
        self._monitor.gives_up(self._state.key)

    def close(self) -> None:
        """Release the communicator and wait, bounded, for a build in progress."""
        with self._state.condition:
            self._closed = True
            current, self._communicator = self._communicator, None
            threads, self._threads = self._threads, []
        if current is not None:
            if self._state.call is not None:  # of another thread
                current.stop()
            current.close()
        for thread in threads:
            thread.join(self._build_slice + 1.0)

    def _start(self, generation: int) -> None:
        self._building.add(generation)
        participants = self._state.member.participants
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(
            target=self._build, args=(generation, participants), name=f"ncclguard-build-{generation}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _build(self, generation: int, participants: tuple[int, ...]) -> None:
        state = self._state
        try:
            while not self._monitor.session_ready.wait(0.05):
                if self._abandoned(generation):
                    return
            prefix = f"{ROOT}/{self._monitor.nonce}/{state.key}/{generation}"
            if not self._everybody_ready(AgreementStore(self._store, prefix), generation, participants):
                return
            built = self._builder.build(
                self._store if self._builder.shares else self._connect(),
                f"{prefix}/communicator",
                participants,
                participants.index(state.member.rank),
                generation,
                self._build_slice,
                lambda: not self._closed and state.member.generation == generation,
            )
        except Exception as error:  # whatever it is: a caller waits for this thread
            if not isinstance(error, (TransportError, StoreUnavailable, RuntimeError)):
                log.exception(
                    "ncclguard: %s",
                    told("building the communicator of generation {generation} failed", "log", generation=generation),
                )
            kind = TroubleKind.RAISED if torch_compat.of_own_device(error) else TroubleKind.TRANSPORT
            state.trouble(generation, kind, tr("the communicator could not be built: {error}", error=error))
            self._monitor.wake()
            with state.condition:
                state.condition.notify_all()
            return
        self._hand_over(built, generation)

    def _everybody_ready(self, store: AgreementStore, generation: int, participants: tuple[int, ...]) -> bool:
        """Announce readiness and wait until all have; False when the build is not wanted any more."""
        mine = json.dumps({**self._terms, "participants": codec.ranges(participants)}, sort_keys=True)
        first = store.first("terms", mine)
        if first != mine:
            self._refuse(_differences(json.loads(mine), json.loads(first)))
            return False
        if store.count("ready", 1) == len(participants):
            store.first("go", "1")
        pause, longest = READY_POLL[0], max(READY_POLL[1], period(len(participants)))
        while store.read("go") is None:
            if self._abandoned(generation):
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return not self._abandoned(generation)

    def _refuse(self, why: str) -> None:
        with self._state.condition:
            self._refused = why
            self._state.condition.notify_all()

    def _abandoned(self, generation: int) -> bool:
        member = self._state.member
        return self._closed or member.frozen or member.generation != generation or bool(self._state.unavailable)

    def _hand_over(self, built: Communicator, generation: int) -> None:
        with self._state.condition:
            wanted = not self._closed and self._state.member.generation == generation
            old = self._communicator if wanted else None
            if wanted:
                self._communicator = built
                self._state.condition.notify_all()
        if wanted and self._state.member.frozen:
            built.stop()
        for retired in (old,) if wanted else (built,):
            if retired is not None:
                retired.stop()
                retired.close()


def _differences(mine: Mapping[str, object], first: Mapping[str, object]) -> str:
    """Return the settings of the whole group in which this rank differs from the one that came first."""
    names = sorted(name for name in {**mine, **first} if mine.get(name) != first.get(name))
    told = (
        tr("{name} is {value} here and {other} there", name=name, value=mine.get(name), other=first.get(name))
        for name in names
    )
    return tr(
        "settings that are the whole group's differ from those of the rank that came first: {settings}; configure the same on "
        "all ranks",
        settings=joined("; ", told),
    )
