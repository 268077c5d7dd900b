"""What the ranks tell each other while the doctor runs: over a TCPStore, every call bounded."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from ncclguard._torch_stores import PrefixStore, TCPStore
from ncclguard.environment.doctor.context import Context

T = TypeVar("T")

#: How long a store host may take to answer; it takes well under a millisecond.
ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.02


class Unreachable(Exception):
    """The store host could not be reached, or did not answer in time."""


class Bounded:
    """Runs calls that may never return, each with a time limit. ``abandoned`` is True when one is still running."""

    def __init__(self) -> None:
        self.abandoned = False

    def call(self, function: Callable[[], T], seconds: float, what: str) -> T:
        """The function's result; Unreachable when it takes longer than ``seconds`` or raises RuntimeError."""
        results: list[T] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                results.append(function())
            except Exception as caught:  # noqa: BLE001 - handed to the caller below
                errors.append(caught)

        thread = threading.Thread(target=work, name="ncclguard-doctor", daemon=True)
        thread.start()
        thread.join(seconds)
        if results:
            return results[0]
        if errors and not isinstance(errors[0], RuntimeError):  # torch's store errors are RuntimeErrors
            raise errors[0]
        if errors:
            raise Unreachable(str(errors[0]).splitlines()[0])
        self.abandoned = True
        raise Unreachable(f"{what}: no answer within {seconds:g} s")


class Exchange:
    """The ranks' shared notes."""

    def __init__(self, context: Context, connect_seconds: float) -> None:
        """Connects to the store (rank 0 hosts it, unless the launcher does); raises Unreachable."""
        self.bounded = Bounded()
        self._rank, self._world_size = context.rank, context.world_size
        job, environ = context.job, context.environ
        hosted_by_launcher = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        limit = timedelta(seconds=connect_seconds)

        def connect() -> TCPStore:
            return TCPStore(
                job.master_addr or "localhost",
                job.master_port,
                self._world_size,
                self._rank == 0 and not hosted_by_launcher,
                limit,
                wait_for_workers=False,
            )

        store = self.bounded.call(connect, connect_seconds + 2.0, "connecting to the store")
        generation = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"ncclguard-doctor/{generation}", store)

    def answer_seconds(self) -> float:
        """The round trip of one acknowledged store operation."""
        begun = time.perf_counter()
        self._call(lambda: self._store.add("roundtrip", 1))
        return time.perf_counter() - begun

    def put(self, key: str, value: Any) -> None:
        """Write this rank's JSON-able value for the others, once for each key."""
        text = json.dumps(value)
        self._call(lambda: self._store.set(f"{key}/{self._rank}", text))
        self._call(lambda: self._store.add(f"{key}/count", 1))

    def gather(self, key: str, value: Any, seconds: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """This rank's value to all, and what ``ranks`` (all, without it) have written within ``seconds``."""
        self.put(key, value)
        return self.collect(key, range(self._world_size) if ranks is None else ranks, seconds)

    def collect(self, key: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """What ranks have written under a key within ``seconds``; silent ones are missing."""
        wanted = list(ranks)
        deadline = time.monotonic() + seconds
        while True:
            # One request a turn, however many ranks there are; who has written is asked only at the end.
            count = self._call(lambda: self._store.add(f"{key}/count", 0))
            late = time.monotonic() > deadline
            if count >= len(wanted) or late:
                there = [rank for rank in wanted if self._has(f"{key}/{rank}")]
                if late or len(there) == len(wanted):
                    break
            time.sleep(_POLL_SECONDS)
        texts = self._call(lambda: self._store.multi_get([f"{key}/{rank}" for rank in there])) if there else []
        return {rank: json.loads(text) for rank, text in zip(there, texts, strict=True)}

    def _has(self, name: str) -> bool:
        return self._call(lambda: self._store.check([name]))

    def _call(self, function: Callable[[], T]) -> T:
        return self.bounded.call(function, ANSWER_SECONDS, "the store host")
