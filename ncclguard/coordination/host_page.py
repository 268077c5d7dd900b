"""A small file in memory in which the ranks of one host share what they have read of the job's store.

A rank that wants to know whether there is anything new looks here first, and asks the store only when what stands here
is too old and no other rank of the host is asking just now. So the requests of ranks that wait grow with hosts, not
with ranks, and nobody is elected: whoever finds the page too old speaks for the host, this time. One that is stopped or
killed while it asks is passed by as soon as its answer is overdue.

The page is a cache and nothing rests on it. It holds counters that only grow and values that are written once; each
record carries its own checksum, so that there are no locks: what two processes write at the same time, or one that
was stopped in the middle, reads as "not known", and the store is asked. Times are those of this host's own monotonic
clock. Without a page (no shared memory, another container, a full disk) a rank is simply a host of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import stat
import struct
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from ncclguard import lifecycle

_T = TypeVar("_T")

#: Records, how many of them one key may stand in, and bytes of each.
SLOTS: Final = 512
WAYS: Final = 4
SLOT: Final = 64
#: Bytes of texts, the oldest of which give way; where they begin, after a word that says where the next one goes.
TEXTS: Final = 1 << 20
_TEXTS_AT: Final = SLOTS * SLOT + SLOT
SIZE: Final = _TEXTS_AT + TEXTS
#: A text longer than this is left to the store.
LONGEST_TEXT: Final = TEXTS // 4
#: Where the file is made: the first folder in which that is possible; "" stands for the folder of temporary files.
FOLDERS: Final = ("/dev/shm", "")
#: Beginning of the file's name, and seconds after which one that no process holds is taken for left behind.
PREFIX: Final = "ncclguard-page-"
LEFT_BEHIND: Final = 60.0

#: Seconds after which a rank that went to ask is taken for stopped or killed, at the latest.
CLAIM_HOLDS: Final = 0.5
#: When the store was asked, of a key that somebody has only gone to ask for.
NEVER: Final = float("-inf")

# Key, when it was asked, value, where the text is and its length, digest of the text, checksum; apart from these: when
# somebody last went to ask.
_RECORD: Final = struct.Struct("<QdQIIQ")
_CHECK: Final = struct.Struct("<Q")
_CLAIM: Final = struct.Struct("<d")
_CLAIM_AT: Final = _RECORD.size + _CHECK.size


@dataclass(frozen=True, slots=True)
class Known:
    """An entry of the page for one key: what the store said to a question of `asked`, by time.monotonic().

    `value` is the counter, or for a value that is written once whether it is there; `text` is that value, None where
    the page has no room for it; `claimed` is when a rank of this host last went to ask; where `asked` is `NEVER`, no
    answer has been entered yet.
    """

    asked: float
    claimed: float
    value: int
    text: bytes | None

    def fresh(self, now: float, within: float) -> bool:
        """Return whether this will do for somebody who wants what the store said in the last `within` seconds."""
        return 0.0 <= now - self.asked < within or self.asked_for(now, within)

    def asked_for(self, now: float, within: float) -> bool:
        """Return whether a rank of this host went to ask in the last `within` seconds, and may still bring it."""
        return 0.0 <= now - self.claimed < min(within, CLAIM_HOLDS)


class HostPage:
    """Used by one thread of each process. `now` is time.monotonic() throughout.

    `ranks`: how many of this host there are, where that is known: the file loses its name when all have opened it, so
    that nothing is left behind when all of them are killed.

    >>> page, other_rank = open_page("a session", "this host"), open_page("a session", "this host")
    >>> page.publish("events", 100.0, 7)
    >>> known = other_rank.look("events")
    >>> known.value, known.fresh(100.04, within=0.05), known.fresh(100.06, within=0.05)
    (7, True, False)
    >>> page.close(), other_rank.close()
    (None, None)
    """

    def __init__(self, memory: SharedFile, ranks: int = 0) -> None:
        self._memory: SharedFile | None = memory
        self._awaited = ranks

    def look(self, key: str) -> Known | None:
        """Return what is known of a key; None for nothing."""
        return self._try(lambda memory: _find(memory, _hash(key))[1])

    def claim(self, key: str, now: float) -> None:
        """This rank goes to ask the store; others need not for a while."""

        def write(memory: SharedFile) -> None:
            number = _hash(key)
            at, known = _find(memory, number)
            if known is None:
                record = _RECORD.pack(number, NEVER, 0, 0, 0, 0)
                memory.write(at, record + _CHECK.pack(_digest(record)))
            memory.write(at + _CLAIM_AT, _CLAIM.pack(now))

        self._try(write)

    def publish(self, key: str, asked: float, value: int, text: bytes | None = None) -> None:
        """Enter what the store said to a question of `asked`, unless the page knows something newer."""

        def write(memory: SharedFile) -> None:
            number = _hash(key)
            at, known = _find(memory, number)
            if known is not None and known.asked > asked:
                return
            place, length, digest = 0, 0, 0
            if text is not None and len(text) <= LONGEST_TEXT:
                place, length, digest = _add_text(memory, text), len(text), _digest(text)
            record = _RECORD.pack(number, asked, value, place, length, digest)
            memory.write(at, record + _CHECK.pack(_digest(record)) + _CLAIM.pack(0.0))

        self._try(write)

    def turn(self, key: str, now: float, within: float) -> bool:
        """Return whether it is for this rank to do what one rank of the host does every `within` seconds."""
        known = self.look(key)
        if known is not None and 0.0 <= now - known.asked < within:
            return False
        self.publish(key, now, 0)
        return True

    def opened_by(self, ranks: int) -> None:
        """So many ranks of this host are known to have opened their page: once all have, nobody looks for it again."""
        if self._awaited and ranks >= self._awaited and self._memory is not None:
            self._awaited = 0
            self._memory.hide()

    def close(self) -> None:
        """The page is not used by this process any more; the last one removes the file. Safe to call twice."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _try(self, use: Callable[[SharedFile], _T]) -> _T | None:
        if self._memory is None:
            return None
        try:
            return use(self._memory)
        except OSError:  # the disk is full, the file is damaged: this rank goes on as a host of its own
            self.close()
            return None


def _find(memory: SharedFile, number: int) -> tuple[int, Known | None]:
    """Find the record of a key and what it says; else None, and where it may be put: over the oldest there."""
    start = number % (SLOTS // WAYS) * WAYS * SLOT
    block = memory.read(start, WAYS * SLOT)
    oldest = (float("inf"), start)
    for at in range(0, WAYS * SLOT, SLOT):
        record = block[at : at + _RECORD.size]
        key, asked, value, place, length, digest = _RECORD.unpack(record)
        if key == number:
            if _CHECK.unpack_from(block, at + _RECORD.size)[0] != _digest(record):
                return start + at, None
            (claimed,) = _CLAIM.unpack_from(block, at + _CLAIM_AT)
            text = memory.read(_TEXTS_AT + place, length) if length else None
            if text is not None and _digest(text) != digest:  # overwritten since
                text = None
            return start + at, Known(asked, claimed, value, text)
        oldest = min(oldest, (asked, start + at))
    return oldest[1], None


def _add_text(memory: SharedFile, text: bytes) -> int:
    """Put a text after the last one, over the oldest; returns where."""
    (place,) = _CHECK.unpack(memory.read(SLOTS * SLOT, _CHECK.size))
    if place + len(text) > TEXTS:
        place = 0
    memory.write(SLOTS * SLOT, _CHECK.pack(place + len(text)))
    memory.write(_TEXTS_AT + place, text)
    return int(place)


@functools.lru_cache(maxsize=1024)
def _hash(key: str) -> int:
    return _digest(key.encode())


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class SharedFile:
    """A file of this user's that the ranks of one host find by its name. Raises OSError where it cannot be had whole.

    It is read and written by calls instead of being mapped: a file that somebody cuts short is an error then, and
    never ends a process. Each process holds a shared lock, by which the last one to leave, and those who look for
    files that were left behind, see that nobody else does.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found = os.fstat(self._file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(f"{path} is not a file that only this user may open")
            os.posix_fallocate(self._file, 0, SIZE)  # where memory lacks, now rather than in the middle
        except OSError:
            self.close()
            raise
        _open.add(self)

    def read(self, at: int, size: int) -> bytes:
        data = os.pread(self._file, size, at)
        if len(data) < size:
            raise OSError(f"{self._path} ends after {at + len(data)} bytes")
        return data

    def write(self, at: int, data: bytes) -> None:
        if os.pwrite(self._file, data, at) < len(data):
            raise OSError(f"{self._path} takes no more")

    def hide(self) -> None:
        """Remove its name: those who have it open keep it."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def close(self) -> None:
        """Give the file up; remove it where nobody else has it."""
        file, self._file = self._file, -1
        if file < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(self._path)
        os.close(file)

    def close_in_child(self) -> None:
        """A forked child shares the lock of its parent, and must not release it."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


_open: weakref.WeakSet[SharedFile] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for file in list(_open):
        file.close_in_child()


lifecycle.in_child(_close_all_in_child)


def open_page(session: str, host_key: str, ranks: int = 0) -> HostPage | None:
    """The page of this host in a session of the job; None where there is no memory for one.

    `ranks`: how many of them this host has, 0 where nobody says. `host_key` is equal for those processes only that
    share a host; see `liveness.host_key`.
    """
    try:
        clock = os.readlink("/proc/self/ns/time")
    except OSError:  # a kernel without namespaces of time
        clock = ""
    text = f"{os.geteuid()} {session} {host_key} {clock}"
    name = PREFIX + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    for folder in FOLDERS:
        try:
            folder = folder or tempfile.gettempdir()
            _remove_left_behind(folder)
            return HostPage(SharedFile(os.path.join(folder, name)), ranks)
        except OSError:
            continue
    return None


def _remove_left_behind(folder: str) -> None:
    """Remove pages of jobs all of whose ranks were killed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(PREFIX):
                continue
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if found.st_uid != os.geteuid() or time.time() - found.st_mtime < LEFT_BEHIND:
                    continue
                file = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
                finally:
                    os.close(file)
