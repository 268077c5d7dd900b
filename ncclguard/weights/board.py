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
from ncclguard.process_group.joined import answers, store_at
from ncclguard.torch_compat import Store, TCPStore
from ncclguard_explain.language import told

log = logging.getLogger("ncclguard")

#: Seconds between two looks.
PERIOD: Final = 0.05
#: Seconds that the end of the thread may take, before and after its connection is cut.
STOP_WITHIN: Final = 1.0
#: Seconds without an answer from which on the store is silent: less may be a busy machine.
MOMENT: Final = 1.0
#: Silences that are remembered: more than there are in the limit of a `publish`, as a rule.
_REMEMBERED: Final = 256


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
    with `changed` held, on which callers wait. Where the connection breaks it is made anew, as soon as somebody listens
    at its address again, and `renewed(store)` is called first: another store may be there, with none of the keys.
    """

    def __init__(
        self, store: Store, look: Callable[[AgreementStore], None], renewed: Callable[[AgreementStore], None]
    ) -> None:
        self._look, self._renewed = look, renewed
        self._given = store
        self._clone = torch_compat.clone_store(store)
        self._store = AgreementStore(self._clone, "board")
        self._broken = False
        self._asked: float | None = None  # when the thread asked what has no answer yet; `changed` guards these two
        self._silences: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # when each began and ended
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
        while not self._stop:
            self._wake.wait(1.0 if self._broken else PERIOD)
            self._wake.clear()
            with self.changed:
                self._asked = self._asked or time.monotonic()
            try:
                if self._stop:
                    return
                if self._broken:
                    self._renew()
                while self._posts and not self._stop:
                    self._write(self._posts[0])
                    self._posts.popleft()
                if not self._stop:
                    self._look(self._store)
                self._answered()
            except StoreUnavailable as error:
                if not self._broken and not self._stop:
                    log.warning(
                        "%s",
                        told(
                            "ncclguard: the store of the weights does not answer ({error}); nothing has to be restarted here: this "
                            "goes on once a store listens at its address again",
                            error=error,
                        ),
                    )
                self._broken = True
            except Exception:
                log.exception(
                    "ncclguard: %s", told("something in the store of the weights cannot be read; the rest is", "log")
                )
                self._answered()
            with self.changed:
                self.changed.notify_all()

    def _answered(self) -> None:
        with self.changed:
            if self._asked is not None and time.monotonic() - self._asked >= MOMENT:
                self._silences.append((self._asked, time.monotonic()))
            self._asked = None

    def silence(self, since: float) -> float:
        """Return for how many seconds since then (time.monotonic()) the store was silent, as this thread has met it."""
        now = time.monotonic()
        with self.changed:
            silences = [*self._silences, *([] if self._asked is None else [(self._asked, now)])]
        return sum(max(0.0, end - max(began, since)) for began, end in silences if end - began >= MOMENT)

    def _write(self, write: Callable[[AgreementStore], object]) -> None:
        try:
            write(self._store)
        except StoreUnavailable:
            raise
        except Exception:  # it would be the same another time, and hold up what comes after it
            log.exception(
                "ncclguard: %s", told("something cannot be written to the store of the weights; the rest is", "log")
            )

    def _renew(self) -> None:
        """Connect anew. Raises StoreUnavailable while nobody listens."""
        base = torch_compat.base_store(self._given)
        if isinstance(base, TCPStore) and not answers(base.host, base.port, within=0.0):
            raise StoreUnavailable(f"nobody listens at {base.host}:{base.port}")
        try:
            self._clone = torch_compat.clone_store(self._given)
        except RuntimeError as error:
            raise StoreUnavailable(str(error)) from error
        self._store = AgreementStore(self._clone, "board")
        self._renewed(self._store)
        self._broken = False
        log.warning("%s", told("ncclguard: the store of the weights answers again"))

    def wait_for(self, ready: Callable[[], bool], until: float) -> bool:
        """Wait until `ready()`, by what the thread has read, or until then (time.monotonic()); return whether it is."""
        with self.changed:
            return self.changed.wait_for(ready, timeout=max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End the thread, also where the store does not answer; what was posted before is written where it does."""
        self.post(lambda _: setattr(self, "_stop", True))
        self._stop = self._stop or self._broken
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(STOP_WITHIN)
            if self._thread.is_alive():
                self._stop = True
                torch_compat.disconnect(self._clone)
                torch_compat.cut_clone(self._given)
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
