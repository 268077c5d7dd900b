"""The messages between the sender and the workers of a channel, in its store, read by a thread of its own.

The store may not answer, so nobody who waits asks it: a caller waits for what the thread has read, for as long as it
likes. The workers ask to be members, in a list below the name of the sender's incarnation; the sender's news replace
each other, and say who the members are now. A key is never written twice.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ncclguard import lifecycle, torch_compat
from ncclguard.coordination.store import AgreementStore, Entries, Stored, StoreUnavailable
from ncclguard.process_group.joined import store_at
from ncclguard.torch_compat import Store

log = logging.getLogger("ncclguard")

#: Seconds between two looks.
PERIOD: Final = 0.05
#: Seconds that the end of the thread may take, before and after its connection is cut.
STOP_WITHIN: Final = 1.0


@dataclass(frozen=True, slots=True)
class Ask(Stored):
    """A worker asks to be a member, under a `nonce` that nobody had before; with 0 `workers`, to be none any more."""

    engine: str
    worker: int
    workers: int
    nonce: str


@dataclass(frozen=True, slots=True)
class News(Stored):
    """The last word of the sender.

    `epoch`: 0 before the first group; `members` of it, in order of their ranks from 1. `number` counts the tries to
    send; each collective of it has `limit` seconds. `left_out`: who has to ask anew to be a member, by nonce.
    """

    sender: str
    number: int = 0
    version: str | int = ""
    epoch: int = 0
    members: tuple[str, ...] = ()
    limit: float = 0.0
    left_out: tuple[str, ...] = ()
    device: str = "cpu"


class Board:
    """One connection to the channel's keys in the store, and the thread that alone reads and writes there.

    `look(store)` is called in that thread, at least every `PERIOD`, with `changed` not held; what it finds it enters
    with `changed` held, on which callers wait.
    """

    def __init__(self, store: Store, look: Callable[[AgreementStore], None]) -> None:
        self._look = look
        self._clone = torch_compat.clone_store(store)
        self._store = AgreementStore(self._clone, "board")
        self._posts: deque[Callable[[AgreementStore], object]] = deque()
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="ncclguard-weights", daemon=True)
        self.changed = threading.Condition()
        _open.add(self)
        self._thread.start()

    def post(self, write: Callable[[AgreementStore], object]) -> None:
        """Have the thread write something next, in the order of these calls; returns at once."""
        self._posts.append(write)
        self._wake.set()

    def _run(self) -> None:
        silent = False
        while True:
            self._wake.wait(1.0 if silent else PERIOD)
            self._wake.clear()
            try:
                while self._posts and not self._stop:
                    self._posts[0](self._store)
                    self._posts.popleft()
                if self._stop:
                    return
                self._look(self._store)
                silent = False
            except StoreUnavailable as error:
                if not silent and not self._stop:
                    log.warning("ncclguard: the store of the weights does not answer (%s); it is tried again", error)
                silent = True
            except Exception:
                log.exception("ncclguard: something in the store of the weights cannot be read; the rest is")
            with self.changed:
                self.changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], until: float) -> bool:
        """Wait until `ready()`, by what the thread has read, or until then (time.monotonic()); return whether it is."""
        with self.changed:
            return self.changed.wait_for(ready, timeout=max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End the thread, also where the store does not answer; what was posted before is written where it does."""
        self.post(lambda _: setattr(self, "_stop", True))
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(STOP_WITHIN)
            if self._thread.is_alive():
                self._stop = True
                torch_compat.disconnect(self._clone)
                self._thread.join(STOP_WITHIN)
        _open.discard(self)


_open: weakref.WeakSet[Board] = weakref.WeakSet()


def _close_all() -> None:
    for board in tuple(_open):
        board.close()


lifecycle.at_end(lifecycle.End.JOB, _close_all)
lifecycle.in_child(_open.clear)


def read_news(store: AgreementStore, known: int) -> tuple[int, News | None]:
    """Return the number of the last news and, where it is not the one that is known, these."""
    count = store.count("news")
    if count == known:
        return count, None
    text = store.read(f"news/{count}")
    return (known, None) if text is None else (count, News.from_json(text))


def write_news(store: AgreementStore, news: News) -> None:
    """Replace the news."""
    store.first(f"news/{store.count('news', 1)}", news.to_json())


def asks_of(sender: str) -> Entries:
    """Return the list of those that ask a sender to be members."""
    return Entries(f"asks/{sender}", f"ask/{sender}")


def connected(address: str | Store, name: str, limit: float, sends: bool) -> Store:
    """Return the channel's keys in the store at an address, or in a store; the sender has it where nobody listens."""
    store = store_at(address, name, 0 if sends else 1, limit)[0] if isinstance(address, str) else address
    return torch_compat.PrefixStore(f"ncclguard/weights/{name}", store)
