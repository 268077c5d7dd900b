"""Find the inputs and stream them: files, folders, gzip, stdin, in blocks of 1 MiB, never a whole log in memory."""

from __future__ import annotations

import gzip
import io
import re
import select
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

BLOCK = 1 << 20
_SNIFF = 1 << 16
_SKIP = frozenset(
    [".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".npz", ".npy", ".png", ".jpg", ".jpeg", ".gif", ".mp4", ".so",
     ".whl", ".zip", ".tar", ".tgz", ".parquet", ".arrow", ".pyc", ".py", ".h5"]
)  # fmt: skip
# A file that belongs to one rank: rank_3.log, rank3.err, 3/stderr.log of torchrun's --log-dir, comm_lib_trace_rank_3,
# _dump_3.
_RANK_NAME = re.compile(r"(?:^|[^a-z])(?:global_?|local_?)?rank[_\-.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
_TORCHRUN = re.compile(r"attempt_(\d+)/(\d{1,5})/(?:stdout|stderr|error)[^/]*$")
_SLURM_NAME = re.compile(r"(?:slurm|log|out|err)[-_.].*?[-_.](?:task|t)[-_.]?(\d{1,5})(?!\d)", re.IGNORECASE)
_DUMP_NAME = re.compile(r"(\d{1,6})(?:\.(?:pkl|pickle|json|gz))*$")
_NODE_NAME = re.compile(r"(?:^|[^a-z])(?:node|host|worker|pod)[_\-.]?(\d{1,5})(?!\d)", re.IGNORECASE)


#: Words of the JSON documents that are read whole: dumps, torchelastic's error files, Kubernetes, RAS, our incidents.
_DOCUMENTS = (
    b'"entries"', b'"pg_config"', b'"pg_status"', b'"extraInfo"', b'"involvedObject"', b'"communicators"', b'"containerStatuses"',
    b'"culprits"',
)  # fmt: skip


class UnusableInput(Exception):
    """Raised when a path cannot be read at all; the command ends with exit code 2."""


@dataclass(frozen=True, slots=True)
class Source:
    """One input: `rank` and `attempt` as its name says, `kind` text, pickle or json; `size` in bytes, 0 if unknown."""

    index: int
    name: str
    kind: str
    size: int
    path: Path | None = None
    rank: int | None = None
    rank_is_local: bool = False
    attempt: int | None = None
    one_node: bool = False


def _rank_of(path: str, kind: str) -> tuple[int | None, bool, int | None]:
    """Return (rank, whether it is that of a node, attempt of torchrun) as the name of a file tells them."""
    found = _TORCHRUN.search(path)
    if found:
        return int(found[2]), True, int(found[1])
    folder, name = path.split("/")[-2:] if "/" in path else ("", path)
    found = _RANK_NAME.search(name) or _RANK_NAME.search(folder)
    if found:
        return int(found[1]), "local_rank" in name.lower(), None
    found = _SLURM_NAME.search(name) or (_DUMP_NAME.search(name) if kind != "text" else None)
    return (int(found[1]) if found else None), False, None


def _kind_of(head: bytes) -> str:
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    start = head.lstrip()
    if start[:1] in (b"{", b"[") and any(word in head for word in _DOCUMENTS):
        first, _, rest = start.partition(b"\n")
        if rest.lstrip()[:1] == b"{" and first.rstrip()[-1:] == b"}":
            return "text"  # a JSON object on every line: a log
        return "json"
    return "text"


def open_source(path: Path) -> BinaryIO:
    """Open a file for reading bytes, through gzip when its first two bytes say so."""
    with path.open("rb") as probe:
        magic = probe.read(2)
    return cast(BinaryIO, gzip.open(path, "rb")) if magic == b"\x1f\x8b" else path.open("rb")


def read_all(source: Source, limit: int) -> bytes:
    """Return a whole dump of at most `limit` bytes; raises UnusableInput above it or when it cannot be read."""
    if source.path is None:
        raise UnusableInput(f"{source.name}: not a file")
    try:
        with open_source(source.path) as stream:
            data = stream.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UnusableInput(f"{source.name}: {error}") from error
    if len(data) > limit:
        raise UnusableInput(f"{source.name}: larger than {limit >> 20} MiB, too large to be read whole")
    return data


def _describe(path: Path, index: int, in_folder: bool) -> Source | None:
    try:
        with open_source(path) as stream:
            try:
                head = stream.read(_SNIFF)
            except (EOFError, zlib.error, gzip.BadGzipFile):
                head = b""
    except OSError as error:
        if in_folder:
            return None
        raise UnusableInput(f"{path}: {error.strerror or error}") from error
    kind = _kind_of(head)
    if in_folder and kind == "text" and head.count(0) * 20 > len(head) and head[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        return None
    rank, local, attempt = _rank_of(path.as_posix(), kind)
    node = kind == "text" and rank is None and _NODE_NAME.search(path.name) is not None
    return Source(index, str(path), kind, path.stat().st_size, path, rank, local, attempt, node)


def find_sources(paths: Sequence[str]) -> list[Source]:
    """List the inputs behind the given paths; "-" is stdin, a folder is searched at any depth.

    Raises:
        UnusableInput: a path does not exist or cannot be read, or a folder holds nothing to read.
    """
    found: list[Source] = []
    seen: set[Path] = set()
    for name in paths:
        if name == "-":
            found.append(Source(len(found), "<stdin>", "text", 0))
            continue
        path = Path(name)
        if not path.exists():
            raise UnusableInput(f"{name}: no such file or folder")
        if path.is_dir():
            before = len(found)
            for member in sorted(path.rglob("*")):
                if not member.is_file() or member.suffix.lower() in _SKIP or member.resolve() in seen:
                    continue
                seen.add(member.resolve())
                source = _describe(member, len(found), in_folder=True)
                if source is not None:
                    found.append(source)
            if len(found) == before:
                raise UnusableInput(f"{name}: no log and no flight-recorder dump in this folder")
        elif path.resolve() not in seen:
            seen.add(path.resolve())
            source = _describe(path, len(found), in_folder=False)
            if source is not None:
                found.append(source)
    return found


def blocks(source: Source) -> Iterator[tuple[bytes, bool]]:
    """Yield (bytes, damaged) until the end; a truncated gzip member yields what could be read, with damaged=True."""
    raw: BinaryIO = cast(BinaryIO, sys.stdin.buffer) if source.path is None else open_source(source.path)
    with raw if source.path is not None else io.BytesIO():
        if source.path is None:
            head = raw.read(2)
            if head == b"\x1f\x8b":
                raw = cast(BinaryIO, gzip.GzipFile(fileobj=_Joined(head, raw)))
                head = b""
        else:
            head = raw.read(2)
        encoding = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(head)
        pending = b"" if encoding else head
        while True:
            try:
                data = raw.read(BLOCK)
            except (OSError, EOFError, zlib.error):
                yield pending, True
                return
            if encoding:
                data = data.decode(encoding, "replace").encode("utf-8", "replace")
            if not data:
                if pending:
                    yield pending, False
                return
            yield pending + data, False
            pending = b""


class Tail:
    """A text input that may grow: `read` returns what is new, b"" for nothing now; `ended`: nothing will come."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.ended = False
        self.settled = True
        self._stream: BinaryIO = cast(BinaryIO, sys.stdin.buffer) if source.path is None else open_source(source.path)

    def close(self) -> None:
        """Let go of the file."""
        if self.source.path is not None:
            self._stream.close()

    def read(self) -> bytes:
        """Return up to a block of new bytes; of a pipe, what has come, waiting for it at most half a second."""
        if self.ended:
            return b""
        if self.source.path is None:
            try:
                waiting, _, _ = select.select([self._stream], [], [], 0.5)
            except (OSError, ValueError):  # no real file: it can only be read to its end
                waiting = [self._stream]
            if not waiting:
                return b""
            data = self._stream.read1(BLOCK) if hasattr(self._stream, "read1") else self._stream.read(BLOCK)
            self.ended = not data
            self.settled = False
            return data
        try:
            data = self._stream.read(BLOCK)
        except (OSError, EOFError, zlib.error):
            self.ended, data = True, b""
        self.settled = self.settled and not data
        return data


class _Joined(io.RawIOBase):
    """Bytes already read from stdin, followed by the rest of it."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        super().__init__()
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._head:
            data, self._head = self._head, b""
            return data
        return self._rest.read(size)
