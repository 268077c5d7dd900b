"""Find the inputs and turn their bytes into records: the lines that matter, without what stands in front, and joined.

Files, folders, gzip and pipes are streamed in blocks of 1 MiB, never a whole log in memory.

Launchers (srun, mpirun, torchrun, Ray) and shippers (kubectl, docker, CloudWatch, journald) put a prefix before every
line and break a line anywhere, a progress bar has no newline, an issue form loses them all. A pattern must see none of
that, so it is undone before any pattern is tried.

A log is searched block by block for short byte strings ("needles"). One combined regular expression runs at some
20 MB/s; instead, of lines that differ in figures only one is searched, and where no two are alike the words of a block
are searched, each once, and then the block for the few needles that these leave possible. Only lines with a needle, and
their neighbours, are decoded. What a rank printed last before the incident, and last of all, is kept too: a progress
bar that goes on after the timeout says that the rank is alive.
Memory is bounded by two blocks, and of a line that comes in thousands of copies a few thousand are read.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import io
import json
import os.path
import re
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from ncclguard_explain import quotations
from ncclguard_explain.language import tr
from ncclguard_explain.quotations import Following

BLOCK = 1 << 20
_SNIFF = 1 << 16
_SKIP = frozenset(
    [".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".npz", ".npy", ".png", ".jpg", ".jpeg", ".gif", ".mp4", ".so",
     ".whl", ".zip", ".tar", ".tgz", ".parquet", ".arrow", ".pyc", ".py", ".h5"]
)  # fmt: skip
# A file that belongs to one rank: rank_3.log, rank3.err, 3/stderr.log of torchrun's --log-dir, comm_lib_trace_rank_3,
# _dump_3.
_RANK_NAME = re.compile(r"(?:^|[^a-z])(?:global_?|local_?)?rank[_\-.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
#: AzureML's logs of processes.
_PROCESS_NAME = re.compile(r"std_log_process_(\d{1,6})(?!\d)")
_TORCHRUN = re.compile(r"attempt_(\d+)/(\d{1,5})/(?:stdout|stderr|error)[^/]*$")
_SLURM_NAME = re.compile(r"(?:slurm|log|out|err)[-_.].*?[-_.](?:task|t)[-_.]?(\d{1,5})(?!\d)", re.IGNORECASE)
_DUMP_NAME = re.compile(r"(\d{1,6})(?:\.(?:pkl|pickle|json|gz))*$")
_NODE_NAME = re.compile(r"(?:^|[^a-z])(?:node|host|worker|pod)[_\-.]?(\d{1,5})(?!\d)", re.IGNORECASE)


#: Words of the JSON documents that are read whole: dumps, torchelastic's error files, Kubernetes, RAS, our incidents.
_DOCUMENTS = (
    b'"entries"', b'"pg_config"', b'"pg_status"', b'"extraInfo"', b'"involvedObject"', b'"communicators"', b'"containerStatuses"',
    b'"culprits"', b'"server_list"',
)  # fmt: skip


class UnusableInput(Exception):
    """Raised when a path cannot be read at all; the command ends with exit code 2."""


@dataclass(frozen=True)
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
    found = _RANK_NAME.search(name) or _RANK_NAME.fullmatch(folder) or _PROCESS_NAME.match(name)
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


#: How compressed files begin, and the modules that read them; a Python may lack one (zstd's came with 3.14).
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\x00": "lzma", b"\x28\xb5\x2f\xfd": "compression.zstd"}
_MAGIC = 6


def open_source(path: Path) -> BinaryIO:
    """Open a file for reading bytes, decompressed if its first bytes say so. Raises UnusableInput where it cannot."""
    with path.open("rb") as probe:
        head = probe.read(_MAGIC)
    return _decompressed(head, path, str(path)) or path.open("rb")


def _decompressed(head: bytes, file: Path | BinaryIO, name: str) -> BinaryIO | None:
    module = next((module for magic, module in _COMPRESSED.items() if head.startswith(magic)), None)
    if module is None:
        return None
    try:
        return cast(BinaryIO, importlib.import_module(module).open(file, "rb"))
    except ImportError:
        program = module.rpartition(".")[2]
        text = tr(
            "{name}: compressed with {program}, which this Python cannot read; decompress it first",
            name=name,
            program=program,
        )
        raise UnusableInput(text) from None


def _piece(read: Callable[[int], bytes], size: int) -> bytes | None:
    """Return the next bytes of a file, b"" at its end, None where it is damaged."""
    try:
        return read(size)
    except Exception:  # noqa: BLE001 - zlib.error, LZMAError, ZstdError, EOFError, OSError: of whatever decompresses
        return None


# Bytes that stand in no text: control characters without tab, line ends, backspace and escape.
_NO_TEXT = bytes(sorted({*range(0x20), 0x7F} - {0x08, 0x09, 0x0A, 0x0C, 0x0D, 0x1B}))
_KANA = re.compile("[\u3040-\u30ff]")
BINARY = "binary"


def encoding_of(head: bytes) -> str:
    """Return the encoding of a text that begins like this, "utf-8" when in doubt, or `BINARY`.

    >>> encoding_of("タイム".encode("cp932")), encoding_of("等待超时".encode("gbk")), encoding_of(bytes(range(32)))
    ('cp932', 'gb18030', 'binary')
    """
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    head = head[:_SNIFF]
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) * 8 > len(head) and min(even, odd) * 20 < max(even, odd):
        return "utf-16-le" if odd > even else "utf-16-be"
    head = head.lstrip(b"\x00")  # a log that was truncated while its writer had it open begins with a hole
    if (len(head) - len(head.translate(None, _NO_TEXT))) * 20 > len(head):
        return BINARY
    text = head.decode("utf-8", "replace")
    wrong = text.count("\ufffd")
    if wrong <= 1 or 2 * wrong < sum(character > "\x7f" for character in text):
        return "utf-8"
    found = "utf-8"
    for encoding in ("gb18030", "cp932"):
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(head)
        except UnicodeError:
            continue
        if encoding == "gb18030" or found == "utf-8" or 4 * len(_KANA.findall(text)) > sum(map("\x7f".__lt__, text)):
            found = encoding
    return found


def read_all(source: Source, limit: int) -> bytes:
    """Return a whole dump of at most `limit` bytes; raises UnusableInput above it or when it cannot be read."""
    if source.path is None:
        raise UnusableInput(tr("{name}: not a file", name=source.name))
    try:
        with open_source(source.path) as stream:
            data = _piece(stream.read, limit + 1)
    except OSError as error:
        raise UnusableInput(f"{source.name}: {error}") from error
    if data is None:
        raise UnusableInput(tr("{name}: truncated", name=source.name))
    if len(data) > limit:
        text = tr("{name}: larger than {size} MiB, too large to be read whole", name=source.name, size=limit >> 20)
        raise UnusableInput(text)
    return data


def _describe(path: Path, index: int, in_folder: bool) -> Source | None:
    try:
        with open_source(path) as stream:
            head = _piece(stream.read, _SNIFF) or b""
    except OSError as error:
        if in_folder:
            return None
        raise UnusableInput(f"{path}: {error.strerror or error}") from error
    except UnusableInput:
        if not in_folder:
            raise
        head = b""  # reading it says why it cannot be read
    kind = _kind_of(head)
    if in_folder and kind == "text" and encoding_of(head) == BINARY:
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
            raise UnusableInput(tr("{name}: no such file or folder", name=name))
        if path.is_dir():
            before = len(found)
            for member in sorted(path.rglob("*")):
                if not member.is_file() or member.suffix.lower() in _SKIP or member.resolve() in seen:
                    continue
                if member.match("incident-*.html") and member.with_suffix(".json").exists():
                    continue  # the page of ncclguard's report, which says the same
                seen.add(member.resolve())
                source = _describe(member, len(found), in_folder=True)
                if source is not None:
                    found.append(source)
            if len(found) == before:
                raise UnusableInput(tr("{name}: no log and no flight-recorder dump in this folder", name=name))
        elif path.resolve() not in seen:
            seen.add(path.resolve())
            source = _describe(path, len(found), in_folder=False)
            if source is not None:
                found.append(source)
    return found


def blocks(source: Source) -> Iterator[tuple[bytes, bool]]:
    """Yield (bytes, damaged) until the end, as they are; of a damaged file what could be read, with damaged=True.

    Raises UnusableInput where this Python cannot decompress it.
    """
    raw: BinaryIO = cast(BinaryIO, sys.stdin.buffer) if source.path is None else open_source(source.path)
    with raw if source.path is not None else io.BytesIO():
        if source.path is None:
            head = raw.read(_MAGIC)
            joined = cast(BinaryIO, _Joined(head, raw))
            raw = _decompressed(head, joined, source.name) or joined
        read = getattr(raw, "read1", raw.read)  # `read` forgets what it has, where it meets the damage
        damaged = ended = False
        while not ended:
            parts: list[bytes] = []
            while not ended and sum(map(len, parts)) < BLOCK:
                piece = _piece(read, BLOCK)
                damaged, ended = piece is None, not piece
                parts.append(piece or b"")
            yield b"".join(parts), damaged


class Recoder:
    """Turns the bytes of one log into UTF-8, whatever its `encoding`, which its first bytes tell."""

    def __init__(self) -> None:
        self.encoding = ""
        self._decoder: codecs.IncrementalDecoder | None = None

    def __call__(self, data: bytes) -> bytes:
        if not self.encoding and data:
            self.encoding = encoding_of(data)
            if self.encoding not in ("utf-8", BINARY):
                self._decoder = codecs.getincrementaldecoder(self.encoding)("replace")
        return data if self._decoder is None else self._decoder.decode(data).encode("utf-8", "replace")


class Tail:
    """A text input that may grow: `read` returns what is new, b"" for nothing now; `ended`: nothing will come."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.ended = False
        self.settled = True
        self._stream: BinaryIO = cast(BinaryIO, sys.stdin.buffer) if source.path is None else open_source(source.path)

    def close(self) -> None:
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
        piece = _piece(self._stream.read, BLOCK)
        self.ended, data = piece is None, piece or b""
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
        if self._head and size:
            size = len(self._head) if size < 0 else size
            data, self._head = self._head[:size], self._head[size:]
            return data
        return self._rest.read(size)


#: Physical lines that one record may be spread over.
MAX_JOINED = 24
#: A line above this many characters is cut: it is data, not a message.
LONGEST = 1 << 16

# Colours, also those whose escape character a copy and paste has lost.
_ANSI = re.compile(
    r"\^\[\[[0-9;?>]*[A-Za-z]|\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\[(?:\d{1,3};)*\d{1,3}m(?=[\s(\[]|\w)|\[m(?=[\s(\[A-Z\d])|\[0m$|\[0m"
)
_RANK = re.compile(r"\[rank ?(\d{1,6})\]")
# nvidia-resiliency-ext log_manager.py; torch_npu: the job's rank among other numbers of the speaker.
_SAID_BY = re.compile(r"\[workload:(\d{1,6})\(\d+\)|\(PID:\d+, Device:\d+, RankID:(\d{1,6})\)")
_REPEATED = re.compile(r"\[repeated (\d+)x across (?:the )?cluster\]")
_GLOG = re.compile(r"(?<![\w])[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_ISO = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[ T_\-](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_US = re.compile(r"(\d\d)/(\d\d)/(\d{4}) (\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_SYSLOG = re.compile(r"(?:^|\[[A-Z][a-z]{2} )([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d)")  # and dmesg -T
_TIME_OF_DAY = re.compile(r"\d\d:\d\d:\d\d")  # all of them have one
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAYS = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)

_STAMP = r"\[?\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z| ?[+-]\d\d:?\d\d)?\]?"
_TIMED = re.compile(_STAMP)
_RAY = re.compile(  # Ray, vLLM
    r"\((?P<actor>[A-Za-z_][\w.:#\-]*(?:\[rank=\d+\])?(?:\([^)]*\))?)(?: rank=(?P<actor_rank>\d+))?(?:,? pid=(?P<pid>\d+))(?:, ip=(?P<ip>[\d.:a-f]+))?\) ?"
)
#: Huawei CANN (slog), 6.x to 8.x: the process in front of a message of one of its modules, or behind an error's number.
_CANN = re.compile(
    r"(?:\[(?:ERROR|WARNING|INFO|EVENT)\] )?[A-Z]{2,12}\((?P<module>\d{1,9}),[\w.\-]+\):|E[A-Z]\d{4}: \[PID: (?P<error>\d{1,9})\]"
)
#: SGLang heads a line with the time and its places in groups.
_SGLANG = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?(?P<coordinates>(?: (?:ATTN_CP|MOE_DP|DP|PP|CP|TP|EP)\d+)+)\] ?"
#: What may stand in front of a line, outermost first, as often as it comes. The named groups are kept.
_OUTER = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?:> ?)+(?=\S)",  # a quotation in a mail or an issue
        r"\[(?:(?:\d+|prterun-[\w.\-]+@\d+),)?(?:mpirank:)?(?P<task>\d{1,6})(?:,[^\]]*)?\]<std(?:out|err)>:\s?",  # mpirun --tag-output, SageMaker, horovodrun
        r"\s*(?P<srun>\d{1,6}): (?=\S)",  # srun -l
        r"\[(?P<host>[A-Za-z][\w.\-]*):(?P<place>\d{1,6})\]:\s?",
        r"(?=[a-zA-Z\-]{1,40}\d)(?P<onhost>[\w\-]{2,60}):(?P<ontask>\d{1,5}): (?=\S)",  # a host and its task
        _SGLANG,
        r"\[(?!rank\d)(?:default|[A-Za-z_]\w*?)(?P<local>\d{1,4})\]:",  # torchrun --tee, with the role's name
        r"\[pod/(?P<pod>[^\]\s]+)\] ?",  # kubectl logs --prefix
        r"\[(?P<pod>[a-z][a-z0-9]*(?:-[a-z0-9]+)+-\d{1,4})\] (?=\S)",  # stern and others
        r"(?:(?P<container>[A-Za-z][\w./-]*\d[\w./-]*)|[\w./-]+)\s*\|(?: |$)(?!\d)",  # docker compose, SageMaker
        r"[\[(]pid[ =:]?(?P<logged>\d{1,9})[\])]:? ?",  # loggers that print the process
        rf"{_STAMP}(?: std(?:out|err) (?P<cri>[FP]) |\t| )",  # CRI, kubectl, docker
        r"\d{13}\t",  # CloudWatch in milliseconds
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?P<syshost>[\w.\-]+) [\w./\-]+(?:\[\d+\])?: ",  # syslog, journalctl
        _RAY.pattern,
        r"std(?:err|out): ",
        r"(?P<dashed>[A-Za-z]\w*-[\w.\-]+): (?=\[[\d\-]{10} [\d:,]+\] \[[A-Z]+\] \[\w+\.py:\d+:|\[[EWIF] \w+\.cpp:\d+\])",  # pdsh too
        r"(?!EI\d{4}:)(?P<pdsh>(?:[A-Za-z][\w.\-]*\d[\w.\-]*|\d{1,3}(?:\.\d{1,3}){3})): (?=\[|Traceback|  |\w+Error|std|[EWIF]\d{4} |\S+:\d+:\d+ \[)",
        r"[Rr]ank[ _=:\-]?(?P<own>\d{1,6}): ",
        # Loggers of programs: loguru's, and Python's with the level in front.
        r"(?:\| )?(?:TRACE|DEBUG|INFO|SUCCESS|WARNING|ERROR|CRITICAL)(?: +\| [\w.<>]+:[\w.<>]+:\d+ -)? +\[rank (?P<own>\d{1,6})/\d{1,6}\]:? (?=\S)",
        r"(?:\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4}\] |\[ *\d+\.\d+\] )?(?P<syshost>[A-Za-z][\w.\-]{1,60}) kernel: (?:\[ *\d+\.\d+\] )?(?=\S)",
        r"(?:\[[\d/:\-]+\] )?\[TRT-LLM\] ?(?:\[\w+\] ?){0,2}\[RANK (?P<mpi>\d{1,6})\] (?:\[[A-Z]\] )?",
        r"(?:[0-9a-f]{6,12} \|\| )?\[rank=(?P<determined>\d{1,6})\] ",  # Determined
        r"rank=(?P<pairs>\d{1,6}) (?:[\w.\-]+=\S+ ){0,4}(?=(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL) )",  # loggers of pairs
        r"(?:\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]? (?:\| )?)?[Rr]ank[ _=:\-]{1,3}(?P<said>\d{1,6}) \| +(?=\S)",  # loguru and others, in columns
    )
)
#: All of them at once, without the names of their groups, which several may have.
_ANY_OUTER = re.compile("|".join(re.sub(r"\(\?P<\w+>", "(?:", f"(?:{pattern.pattern})") for pattern in _OUTER))
#: Where a record begins in the middle of a line.
_HEAD = re.compile(
    r"\[rank\d{1,6}\]:(?=\s?\[[EWIF])|\[rank\d{1,6}\]: |"
    r"(?<![\]:\s])(?<!\]: )\[[EWIF](?:\d{3,4} \d\d:\d\d:[\d.]+)? ?\w+\.(?:cpp|hpp|cc):\d+\]|"
    r"[\w.\-]+:\d+:\d+ \[\d+\] (?:NCCL (?:INFO|WARN)|\S+:\d+ NCCL WARN)|"
    rf"(?<=\])(?:{_SGLANG})|"  # behind a progress bar
    r"(?<=[^\s\]:])\s*Traceback \(most recent call last\):|(?<=\s)(?:ERROR|WARNING|INFO):torch[\w.]*:"
)
#: One of these words is in each of them, or "][".
_OF_HEADS = ("[rank", ".cpp:", ".hpp:", ".cc:", "] NCCL ", " NCCL WARN", "Traceback (most", ":torch")
_INNER = re.compile(r"\[rank\d{1,6}\]|\[[EWIF]\d{3,4} |\[[EWIF] \w+\.cpp|[EWIF]\d{4} \d\d:\d\d:\d\d")
#: A line that begins like this goes on nothing.
_STARTS = re.compile(
    r"[$+]+ [\w./]|(?:dmesg: )?\[ *\d+\.\d{1,9}\] |\S{1,60} kernel: |NVRM: |\s*(?:\[rank\d+\]|\[[EWIF](?:\d{3,4})? |[EWIF]\d{4} \d\d:|Traceback \(|terminate called|what\(\): |File \"|"
    r"Exception raised from|frame #\d|Root Cause|Thread 0x|(?:mpirun|prterun|mpiexec) |Subprocess \w+_\d+ \(pid|Fatal Python|[\w.\-]+:\d+:\d+ \[\d+\] |srun: |slurmstepd: |\S+: line \d+: |[\w.\-]+: rank \d+ died from |"
    r"\[?(?:INFO|WARNING|ERROR|DEBUG|WARN|CRITICAL)[: \]]|(?:\w+\.)*[A-Z]\w*(?:Error|Exception): |\{\"|<<<<|={4}|-{4})"
)
_DIGITS = re.compile(r"\d+")
_BAR = re.compile(r"\d{1,3}%\|[^|]*\|")

# A construct that has begun and not ended goes on in the next line: (begin, end). Blanks may have been lost.
_OPEN = tuple(
    (re.compile(begin.replace(" ?", " ").replace(" ", r"\s*")), re.compile(end.replace(" ?", " ").replace(" ", r"\s*")))
    for begin, end in (
        (r"Work[A-Z]\w*\(", r"\)"),
        (r"(?:Watchdog caught|Caught collective|caught collective)", r"ran for \d+ milli"),
        (r"timed out in blocking|Work Work\w+\([^)]*\) timed", r"blocking wait"),
        (r"\[PG(?: ID)? \d", r"\]"),
        (r"is running (?:inconsistent )?collective: (?!Coll)", r"CollectiveFingerPrint\("),
        (r"(?:detected by watchdog at work|Timeout at NCCL work)", r"ast completed (?:NCCL )?work: -?\d+"),
        (r"dump signal due to a coll", r"ast completed (?:NCCL )?work: -?\d+"),
        (r"store based barrier", r"timeout=[^)]*\)"),
        (r"Timed out initializing process", r"timeout=[^)]*\)"),
        (r"failed \(exitcode:", r"local_rank: \d+ \((?:pid|process ID): \d+\)"),
        (r"Got completion", r"vendor.err.? ?\d+"),
        (r"setting up NCCL communicator", r"got error: \S{4}"),
        (r"Ranks? [\d, ]+ failed(?: to)?(?: pass)?", r"in \d+ ms"),
        (r"reached monitoredBarrier, but", r"from rank \d+"),
        (r"hccl (?:fftsplus|aicpu|task)", r"timeout:? ?\d+\D"),
        (r"exits with|sigkill_handler\] \[", r"return code = -?\d"),
        (r"Timed out waiting", r"operation to complete|clients joined|\]"),
        (r"wait timeout after", r"keys: \S+"),
        (r"client socket has (?:timed out|failed)", r"\)"),
        (r"\[rank\d*$|\[[EWIF]\d{3,4} [^\]]*$", r"\]\s*\S"),
        (r"EI0002", r"rankSize ?:?\[?\d+|rank size"),
        (r"Operation timed out after", r"\d+ ms"),
        (r"agging ranks|\[\d+(?:, \d+)*\] (?:joined but|finished coll)", r"#\d+|timeout"),
        (r"NCCL WARN", r"\w{3}"),
        (r"exited on", r"signal \d+"),
        (r"terminated with (?:si|ex)", r"(?:gnal|code) \S+"),
    )
)


@dataclass(frozen=True)
class Prefix:
    """The words in front of a message: a global rank (or None), how it is known, the rest of the line, a clock."""

    text: str
    rank: int | None = None
    basis: str = ""
    when: float | None = None
    hidden: int = 0
    tag: str = ""
    local_rank: int | None = None
    node: int | None = None
    pid: int | None = None
    partial: bool = False
    host: str = ""
    place: str = ""
    container: str = ""


def strip_ansi(text: str) -> str:
    return _ANSI.sub("", text) if "\x1b" in text or "m" in text and "[" in text else text


def _seconds(month: int, day: int, hour: int, minute: int, second: int, fraction: str | None) -> float:
    part = float("0." + fraction) if fraction else 0.0
    days = _DAYS[month - 1] + day if 1 <= month <= 12 else day
    return ((days * 24 + hour) * 60 + minute) * 60.0 + second + part


def clock(text: str) -> float | None:
    """Return the line's time in seconds since the start of some year, or None; hosts' clocks are never compared."""
    if _TIME_OF_DAY.search(text) is None:
        return None
    for pattern, order in ((_GLOG, (1, 2, 3, 4, 5, 6)), (_ISO, (2, 3, 4, 5, 6, 7)), (_US, (1, 2, 4, 5, 6, 7))):
        found = pattern.search(text)
        if found:
            month, day, hour, minute, second = (int(found.group(index)) for index in order[:5])
            return _seconds(month, day, hour, minute, second, found.group(order[5]))
    found = _SYSLOG.search(text)
    if found and found[1] in _MONTHS:
        day, hour, minute, second = (int(part) for part in found.groups()[1:])
        return _seconds(_MONTHS.index(found[1]) + 1, day, hour, minute, second, None)
    return None


def _unwrapped(text: str) -> str:
    """Return the message of a line that a shipper wrote as JSON (docker's json-file, Fluent Bit, Stackdriver)."""
    if not text.startswith("{") or '"' not in text[:4]:
        return text
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for name in ("log", "message", "msg", "textPayload", "line"):
        if isinstance(data, dict) and isinstance(data.get(name), str):
            return str(data[name]).rstrip("\n")
    fields, span = (data.get(name) if isinstance(data, dict) else None for name in ("fields", "span"))
    if isinstance(fields, dict) and isinstance(fields.get("message"), str) and "target" in data:  # Rust's tracing
        rank = f" rank={span['rank']}" if isinstance(span, dict) and "rank" in span else ""
        return f"{data.get('timestamp', '')} {data.get('level', '')} {data['target']}: {fields['message']}{rank}"
    return text


def split_prefix(raw: str) -> Prefix:
    """Split one line into its prefixes and its message.

    Example:
        >>> split_prefix("11: [rank11]:[E617 10:00:00.5 ProcessGroupNCCL.cpp:632] hello").rank
        11
    """
    return _split_again(raw) if len(raw) <= _OFTEN_SPLIT else _split(raw)


def _split(raw: str) -> Prefix:
    text = _unwrapped(strip_ansi(raw))
    when = clock(text[:200])
    rank = local = node = pid = None
    basis = tag = host = place = container = ""
    partial = False
    for _ in range(8):
        if _ANY_OUTER.match(text) is None:
            break
        found = next(found for pattern in _OUTER if (found := pattern.match(text)))
        said = found.groupdict()
        if said.get("task") is not None:
            rank, basis = int(said["task"]), "launcher"
        elif said.get("srun") is not None:
            rank, node, basis = int(said["srun"]), int(said["srun"]), "task"
        elif said.get("ontask") is not None:
            rank, node, basis, host = int(said["ontask"]), int(said["ontask"]), "task", said["onhost"]
        elif said.get("local") is not None:
            local = int(said["local"])
        elif said.get("actor") is not None:
            pid, place, host = int(said["pid"]), said["actor"], said["ip"] or host
            if said.get("actor_rank") is not None:
                rank, basis = int(said["actor_rank"]), "launcher"
        elif said.get("coordinates") is not None:
            place = f"{place} {said['coordinates'].strip()}".strip()
        elif own := next(filter(None, map(said.get, ("own", "said", "pairs", "mpi", "determined"))), None):
            rank, basis = int(own), "launcher"
        elif said.get("logged") is not None:
            pid = int(said["logged"])
        partial |= said.get("cri") == "P"
        container = said.get("container") or container
        host = (
            said.get("pdsh") or said.get("dashed") or said.get("host") or said.get("pod") or said.get("syshost") or host
        )
        tag, text = tag + found[0], text[found.end() :]
    if "pid=" in text[:400] and pid is None:  # behind a progress bar
        found = _RAY.search(text[:400])
        if found:
            tag, pid, place = tag + found[0], int(found["pid"]), found["actor"]
            if found["actor_rank"] is not None:
                rank, basis = int(found["actor_rank"]), "launcher"
            text = "^C" * text.startswith("^C") + text[found.end() :]
    if pid is None and (found := _CANN.match(text)):
        pid = int(found["module"] or found["error"])
    hidden = 0
    more = _REPEATED.search(text)
    if more:
        hidden = int(more[1])
        text = text[: more.start()].rstrip()
    found = _RANK.search(text)
    if found:
        rank, basis, tag = int(found[1]), "prefix", tag + found[0]
    elif found := _SAID_BY.search(text[:400]):  # the number in front is another one: of srun, or of the device
        rank, basis, tag = int(found[1] or found[2]), "text", tag + found[0]
    return Prefix(text, rank, basis, when, hidden, tag, local, node, pid, partial, host, place, container)


#: Lines around one that matters are split again and again; the longest of which the answer is remembered.
_OFTEN_SPLIT = 1024
_split_again = functools.lru_cache(maxsize=2048)(_split)


def message_of(text: str) -> str:
    """Return the part after `[rank3]: ` (and whatever a progress bar left in front of it)."""
    found = _RANK.search(text)
    if found is None:
        return text
    rest = text[found.end() :]
    rest = rest.removeprefix(":")
    return rest.removeprefix(" ")


def unfinished(text: str) -> int:
    """Return how many constructs of a message have begun and not ended.

    Example:
        >>> unfinished("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpTy")
        2
    """
    count = 0
    for begin, end in _OPEN:
        last = None
        for last in begin.finditer(text):
            pass
        if last is not None and end.search(text, last.end()) is None:
            count += 1
    start = text.find('{"')
    if 0 <= start < 80 and text.count("{", start) > text.count("}", start):
        count += 1
    at = text.rfind("CollectiveFingerPrint(")
    if at >= 0:
        depth = 0
        for letter in text[at:]:
            depth += (letter == "(") - (letter == ")")
            if depth == 0 and letter == ")":
                break
        else:
            if "SequenceNumber=0OpType" not in text[at:]:
                count += 1
    return count


def headless(text: str) -> bool:
    """Return whether a line may be the rest of another: it has no head of its own."""
    return bool(text.strip()) and _STARTS.match(text) is None


def _looks_broken(text: str) -> bool:
    """Return whether a line with a C++ head stops in the middle of a sentence."""
    end = text.rstrip()[-1:]
    return _INNER.search(text) is not None and len(text) >= 30 and (end.isalpha() or end in ",:[(=-_/")


# How lines of incidents begin, and words that they are known by, of which a cut may leave the first letters.
_BEGINS = re.compile(
    r"\[rank\d+\]:?\s?\[[EF][\d ]|\[[EFW](?:\d{3,4}[^\]]*)? ?(?:Process|socket|TCP)|[EFW]\d{4} \d\d:\d\d|Traceback|"
    r"terminate called|\s*what\(\):|(?:srun|slurmstepd): |\[?ERROR[:\] ]|Fatal Python|INFO:\S+:Wait|\[.{0,60}\[launch\.py|"
    r"\[\s*\d+\.\d+\] (?:NVRM|mlx5|Out o)|[\w.\-]+:\d+:\d+ \[\d+\] (?!NCCL INFO )[\w/]{2}|.*NCCL INFO \[Serv|mpirun not|"
    r"\[rank: \d+\] Ch|EI\d{4}|(?:\[rank\d+\]: )?(?:torch\.(?:distributed|multiprocessing|cuda|Out)|ray\.exceptions)|"
    r"\s+- \[\d+\] Tim|\{\"name\": \"torchelas|\s+\d+ (?:job process|rank has)|\s+Process \d+ on node|.*Warning +Evict"
)
_WORDS = (
    "RuntimeError", "ValueError", "OutOfMemoryError", "AssertionError", "DistBackendError", "NCCL WARN", "watchdog got stuck",
    "Traceback (most recent call last)", "Timed out waiting", "timed out in blocking", "closing signal", "out of memory",
    "Connection closed by peer", "died unexpectedly", "exits with return code", "terminated with signal", "job aborted",
)  # fmt: skip


#: Columns of terminals and of boxes that paste text.
_TERMINALS = frozenset({80, 100, 120, 132, 160, 211})


def torn(line: str, rest: str) -> str:
    """Return the message of a line that begins like one of an incident and is torn within a word, else an empty string.

    Example:
        >>> torn("ERROR 05-01 10:00:00 [multiproc_executor.py:140] Worker proc VllmWorker-1 died u", "nexpectedly")[-6:]
        'died u'
    """
    within_a_word = line[-1:].isalpha() and rest[:1].islower() and len(line) in _TERMINALS
    return breaks_off(line) if within_a_word else ""


def breaks_off(line: str) -> str:
    """Return the message of a last line that begins like one of an incident and is not finished, else an empty string.

    Example:
        >>> breaks_off("[rank3]:[E801 14:37:42.731 ProcessGroupN"), breaks_off("step 12 loss 0.3")
        ('[rank3]:[E801 14:37:42.731 ProcessGroupN', '')
    """
    text = split_prefix(line).text.rstrip()
    if re.search(r"(?:(?:^| )[\w'\"()]*[a-z]\.|[)}!])['\"]*$", text) and not unfinished(text):
        return ""  # a sentence that has an end
    known = [needle.decode() for needle in NEEDLES if len(needle) >= 10]  # shorter ones stand in ordinary lines too
    words = (*_WORDS, *known)
    part = any(text.endswith(word[:count]) for word in words for count in range(max(6, len(word) // 2), len(word)))
    return text if part or any(word in text for word in known) or _BEGINS.match(text) else ""


def _rest(previous: str, line: str) -> str:
    """Return what a physical line adds to the one before: without a prefix that both carry."""
    common = os.path.commonprefix((previous, line))
    cut = max(common.rfind(letter) for letter in " ]>|:\t") + 1
    if cut >= 4 and any(letter.isalnum() for letter in common[:cut]):
        line = line[cut:]
    return split_prefix(line).text.strip()


def _width(lines: Sequence[str]) -> int:
    """Return the width at which these lines were cut, 0 where nothing says that they were.

    What several ranks print alike has one length by itself: that was cut where its rest follows more than once.
    """
    lengths = [len(line.rstrip()) for line in lines]
    width = max(lengths, default=0)
    if width < 60 or lengths.count(width) < 2:
        return 0
    shapes = {_DIGITS.sub("", line.rstrip()) for line in lines if len(line.rstrip()) == width}
    rests = [
        after
        for line, after in zip(lines, lines[1:])
        if len(line.rstrip()) == width > len(after.rstrip()) and headless(split_prefix(after).text)
    ]
    return width if len(shapes) > 1 or len(rests) > 1 else 0


def _alike(first: str, second: str) -> bool:
    """Return whether two lines begin with the same words: two records of one kind, not one in two pieces."""
    return _DIGITS.sub("", first[:40])[:16] == _DIGITS.sub("", second[:40])[:16]


def _other(own: Prefix, before: Prefix) -> bool:
    """Return whether a line is headed with another rank than the one that it might go on, or alone with a time."""
    timed = _TIMED.match(own.tag) is not None and (own.tag[0] == "[" or _TIMED.match(before.tag) is None)
    return timed or (own.basis == "launcher" and own.rank != before.rank)


def join(lines: Sequence[str], at: int) -> tuple[int, int, str]:
    """Return (first, last, text) of the record that line `at` belongs to; `text` is raw, with its first prefix.

    A line goes on in the next one when a construct in it is not finished, when it stops in the middle of a sentence
    that has a head, or when several lines here end at the same column. Wrapped pieces are joined without a blank: the
    break may stand inside a word or a number, so patterns allow for blanks that are missing.
    """
    if "╭" in lines[at]:  # the frame of a panel, whose lines have one width, and are no pieces of one
        return at, at, lines[at].rstrip()
    width = _width(lines)
    first = at
    while first > 0 and at - first < 8 and headless(split_prefix(lines[first]).text):
        above, full = split_prefix(lines[first - 1]), bool(width) and len(lines[first - 1].rstrip()) >= width - 1
        own = split_prefix(lines[first])
        if above.local_rank != own.local_rank or (own.place and own.place != above.place) or _other(own, above):
            break  # torchrun, Ray, SGLang and TensorRT-LLM head lines with their speaker
        before = above.text
        full = full and not _alike(before, split_prefix(lines[first]).text) and not before.rstrip().endswith(".")
        if not full and not unfinished(before) and not _looks_broken(before):
            break
        first -= 1
    text, last = lines[first].rstrip(), first
    best = (unfinished(text) + (first < at), text, first)
    start = split_prefix(lines[first])
    partial, opening = start.partial, start.text
    skipped = 0
    for index in range(first + 1, min(len(lines), first + 1 + MAX_JOINED)):
        above_it = lines[index - 1].rstrip()
        full = bool(width) and len(above_it) >= width - 1 and (best[0] > 0 or not above_it.endswith("."))
        if last >= at and best[0] == 0 and not full and not partial:
            break
        line = lines[index]
        prefix = split_prefix(line)
        body = prefix.text
        if not body.strip() or (_BAR.search(body) and _INNER.search(body) is None):
            skipped += 1
            if skipped > 2:
                break
            continue
        if (
            prefix.local_rank != start.local_rank
            or (prefix.place and prefix.place != start.place)
            or _other(prefix, start)
            or not headless(body)
            or (best[0] == 0 and not partial and _alike(opening, body))
        ):
            break
        text = text + _rest(lines[index - 1], line)
        last, partial = index, prefix.partial
        if len(text) > LONGEST:
            break
        left = unfinished(text)
        if left < best[0] or (last <= at and left <= best[0]) or (left <= best[0] and full):
            best = (left, text, last)
    _, text, last = best
    if last < at:  # the pieces did not fit: the line stands for itself
        return at, at, lines[at].rstrip()
    return first, last, text


def pieces(text: str) -> list[str]:
    """Return the records that one line holds: it is cut wherever a head stands in the middle.

    Example:
        >>> pieces("a timeout.[rank2]:[E801 14:37:42.7 x.cpp:1] b")
        ['a timeout.', '[rank2]:[E801 14:37:42.7 x.cpp:1] b']
    """
    if "][" not in text and all(text.find(word, 1) < 0 for word in _OF_HEADS):
        return [text]
    starts = [found.start() for found in _HEAD.finditer(text) if found.start() > 0]
    if not starts:
        return [text]
    bounds = [0, *starts, len(text)]
    return [piece for a, b in zip(bounds, bounds[1:]) if (piece := text[a:b]).strip()]


#: Bytes after a hit that must be there before it is read: a message may go on.
FOLLOW_BYTES = 1 << 16
#: Bytes within which a line behind a hit mostly ends; where fewer lines do than are asked for, all is read.
NEAR_BYTES = 256
#: Bytes before a hit that are kept: a wrapped line may have begun there; and what stands around an incident.
CONTEXT_BYTES = 8192
#: Bytes before a hit that are kept besides: what has printed it may stand there.
QUOTED_BYTES = 1 << 15
#: Hits of a general needle in one source, and lines that differ in their numbers only: more of them say nothing new,
#: unless another rank says them.
HITS_PER_NEEDLE = 10_000
SAME_SHAPE = 4096

# General words that stand in ordinary output too, so their number is bounded: the timeouts of torch, gloo and the
# store; exceptions of every kind, of NCCL, CUDA and launchers; connections that closed, were reset or refused.
GENERAL: tuple[bytes, ...] = (
    b"timeout", b"Timeout", b"imed out", b"rror", b"xception", b"connect", b"Connect", b"etrying", b"NCCL INFO Channel",
)  # fmt: skip
# Any number, of four bytes and more. A general word costs the reading of every line that has it.
NEEDLES: tuple[bytes, ...] = (
    # torch: collectives, the watchdog, reports of the flight recorder and of DETAIL, DDP, barriers
    b"Timeout(ms)=", b"OpType=", b"atchdog", b"acquire GIL", b"ast enqueued", b"FlightRecorderHook", b"DESYNC_DEBUG",
    b"collective #", b"latest states", b"Culprit rank", b"Collective sequence number", b"ranks joining", b"Process failed for slice", b"EI0005:", b"NIXL_ERR_", b"NIXL transfer", b"HandShakePlugin", b"complete transfers", b"reset has occurred", b"Decreasing batch", b"Using batch", b"have not called it", b"Rendezvous complete", b"DEVICE_LOST", b"memory used=", b"RUNNING AT", b"yspy dump for", b"CollectiveFingerPrint(",
    b"onitoredBarrier", b"based barrier", b"Bytes failed", b"Failed to recv", b"EnforceNotMet", b"op.preamble", b"not receive grad",
    b"finished reduction", b"DataLoader worker",
    b"killing", b"Killing", b"aborting", b"terminating", b"Terminating",
    b"ignal",  # dump signal, "to signal dumping", Signals.SIGTERM, "killed by signal", "exited on signal"
    b"most recent call", b'"MainThread"',  # tracebacks and faulthandler; py-spy dump
    # NCCL, its RAS, aws-ofi-nccl, HCCL
    b"NCCL WARN", b"Duplicate GPU", b"access fault by GPU", b"NET/OFI", b"Got completion", b"bort COMPLETE", b"operation counts", b"considered dead",
    b"Missing communicator", b"Notify register", b"Getting socket", b"task timeout",
    # launchers, frameworks, ncclguard's own incident
    b"local_rank: ", b"first observed failure", b"sigkill_handler", b"return code = ", b"terminated with ",
    b"Worker proc ", b"(exitcode:", b"worker died", b"torchelastic.worker.status", b"nvalidate trace", b"decord",
    b"ncclguard incident ", b"the fault of incident", "的故障仍在继续".encode(), b'"culprits"', b"scaling d", b"Scaling d", b"scaling in", b"caled down", b"ownscaling", b"rolling u", b"rolling r", b"rolled out", b"ollout status", b"ollout restart", b"drained", b"draining", b"Draining", b"raceful", b"lanned ",
    b" hang", b" hung", b" stuck", b" froze", b"daemon has unex", b"Failed to load ex", b"DeepGEMM JIT", b"DeepGEMM warmup",
    b"alling back ", b"fell back ", b"kipping ", b"ontinuing ", b"StopIteration", b"out of data", b"out of batches", b"out of samples", b"exceeded quota", b"instances.hostError", b"went on without", b"has not come: ", "没有来：".encode(), "的情况下继续训练".encode(), b"and training goes on", "训练继续".encode(),
    # engines, Ray, JAX, Ascend, Horovod, watchers; most of theirs are found by the words above
    b"roadcast block", b"ang detected", b"died unexpectedly", b"DeepEP ", b"mesh comm", b"RolloutStall", b"RDT stall",
    b"EngineCore encountered", b"text_generation_launcher: Shard", b"being preempted", b"Process index: ", b"killed by the OOM killer", b"synStatus=8", b"The system will ", b"The system is going ", b"Shutting down", b"(engine dead)", b"SIGQUIT received", b"received sigquit", b"eceived sigquit", b"scheduler is dead", b"scheduler died", b"crashed with exit", b"MPI_ABORT", b"Assertion failed: ", b"cannot be retrieved",
    b"propagating hard-kill", b"is unbalanced", b"on startup is less", b"placement group", b"Insufficient space", b"Weight update group", b"Unable to create ah",
    b"setup connections", b"transport: IBGDA", b"CCL_ERROR", b"An error CQE", b"EI0011:", b"EI0013:", b"EI0019:", b"become healthy", b"is not ready after",
    b"rollout replicas", b"tried to connect", b"coordination service", b"stopped sending", b"may be stuck",
    b"is unstuck", b"Megascale", b"culprit workers", b"HW Exception", b"code is 507", b"aicore execution", b"query event recorded", b"Cluster Exception",
    b"crimer rank", b"| client |", b"createLink", b"heartbeat", b"has been open for", b"Progress tracker", b"no-restart decision",
    b"found NaN in", b"Unexpected result", b"DeadLock detected", b"health check", b"Health check", b"TIMED OUT", b"aborted (timeout)",
    b"[ready ranks", b"Process name: ", b"died from signal", b"exited with", b"died with", b"ranks arrived", b"Missing ranks", b"missing ranks", b"Stalled ranks", b"submitted to be", b"Executor failed", b"core initialization", b"core proc", b"Waiting for path", b"] failed.", b"workers failed", b"WorkerProc", b"actor died", b"actor is dead",
    b"lost communication", b"aicore", b"aivector", b"exit=0", b"Command execution", b"Container rank", b"exit_code=0", b"blocked for more than", b"TERM_", b"no response from peer", b"torchft", b"for process ", b"localUserrank", b"nfs: server", b"Lustre: ", b"ossible transient", b"ossible persistent", b"hardware fault", b"MainThread stack", b"succeeded", b"terminate called", b"first noticed rank", b"doom: ", b"STRAGGLER DETECT", b"etected stragglers", b"to store for rank", b"stalled for longer", b"/health", b"esum", b"heck sum", b"crc", b"CRC", b"hash", b"digest", b"ingerprint", b"sha256", b"md5", b"ismatch", b"nconsisten", b"oaded checkpoint", b"estored all", b"Worker exit type", b"pressure (OOM)", b"marked dead", b"parallel_size=", b"couldn't get a response",
    b"MiB |", b"DEADLINE_EXCEEDED", b"Deadline Exceeded", b"join_timeout", b"nother user", b"nother job", b"nother process", b"foreign process", b"tale process", b"ombie", b"rphan", b"eftover", b"of this job", b"trial", b"Trial", b"pruned", b"pruning", b"stopping early", b"stopped early", b"early stop", b"early_stop", b"ASHA", b"yperband", b"yperBand", b"received command", b"  TERMINATED", b"] Shutdown ", b"-IF_UP: ", b"-UPDOWN: ", b"% /dev/shm", b"preemption notice", b"pot interruption",
    # kernel, driver, cluster
    b"ut of memory", b"OOMKill", b"oom-kill", b"NVRM: Xid", b"instance-action", b"NRT_EXEC_HW_ERR", b"Uncorrectable HBM", b"uncorrectable HBM", b"atastrophic event", b"MULTI BIT ECC", b"Sending SIGBUS", b"encountered timeout", b"no progress on stream", b"Error Snippet", b"fallen off", b"IO_PAGE_FAULT", b"mlx5_core", b"ink is Up", b"[<0>] ", b"FailedScheduling", b"state=s", b"hard-reset", b"critical device", b"H/W error", b"reset device", b"hardware error", b"wedged", b"Reason: ", b"(Pdb)", b"Killed", b"core dumped", b'seq": ', b" seq=", b"egmentation fault", b"ipdb>", b"maintenance-event", b"PREEMPTED",
    b"Losing connection", b"ircuit breaker", b"node-failure", b"lost contact", b"segfault at", b"SIGINT", b"^C",
    b"NETDEV WATCHDOG", b"ink is Down", b"definitely down", b"NodeNotReady", b"setting DOWN", b"on failed node", b"state set to", b"now DOWN", b"set DOWN", b"is DOWN", b"marked DOWN", b"State=DOWN", b"Evict", b"Preempt",
)  # fmt: skip
# What a job prints while it starts; looked for in the first blocks only.
STARTING: tuple[bytes, ...] = (
    b"orld_size", b"orld size", b"ORLD_SIZE", b"um_processes", b"nodes", b"NODES", b"num_machines", b"proc_per_node",
    b"proc-per-node", b"torchrun", b"distributed.run", b"distributed.launch", b"accelerate launch", b"ft_launcher", b"elastic/", b"Pods", b" pods", b"osts", b"achines", b"Knoten", b"Rechner", "台".encode(), "节点".encode(), "ノード".encode(), "机".encode(), "узл".encode(), "машин".encode(), b"group_world_size", b"rdzv", b"ode-rank", b"ode_rank", b"rank_mapping", b"ODE_RANK", b"SLURM_PROCID", b"LOCALID", b"/gpu: ", b" on nid", b" on gpu", b" on node", b" on host", b" on ip-", b"rank=", b"RANK=", b"RANK: ", b"(pid ", b"machine_rank", b"spawned with command", b"JAX process: ", b"process_id=", b"Name: ", b"py-spy dump", b"Bootstrap", b"kubectl ", b" host=", b"NTasks", b"ocal_rank", b"[rank ", b"atches", b"per epoch", b"per_epoch", b"loader) ", b"dmesg", b"journalctl", b" GPUs", b"-rank ", b"lobal rank", b"NODE_RANK:", b"PER_NODE:", b"world_rank=", b"hostname", b" pod=", b"ranks ", b"Ranks ", b"sing interface", b"Asymmetric link", b":00.0",
)  # fmt: skip
STARTING_BYTES = 16 << 20

#: Ray's prefix, and torch's behind it: which process is which rank.
_PROCESS_BYTES = re.compile(rb"pid=(\d{1,9})(?:, ip=[\d.]+)?\)(?:\x1b\[0m)? \[rank(\d{1,6})\]")
_RANK_BYTES = re.compile(rb"\[rank(\d{1,6})\]")
#: The processes that a launcher has started, in their order ("[2] launched pid=4423"), and the host of each rank, as
#: `srun -l hostname` and `mpirun --tag-output hostname` print it.
_STARTED_BYTES = re.compile(
    rb"(?m)^(?![^\n]*[Ll]oad)[^\n|]{0,60}?(?:\[(\d{1,5})\]|\b(?:[Ww]orker|[Pp]rocess|[Cc]hild|[Tt]ask|[Pp]roc)[ #]?(\d{1,5}))"
    rb"(?: ->|:|=)? (?:[a-z]+ ){0,3}\(?(?:pid|PID)[ =:]{1,2}(\d{2,9})\b"
)
_HOST_BYTES = re.compile(
    rb"(?m)^\s*(?:\[1,(\d{1,6})\]<stdout>:|(?:[Rr]ank[ =#]?)?(\d{1,6})(?:: | -> | => | @ | on ))([A-Za-z][\w\-]*\d[\w.\-]*)\s*$"
)
_ERROR_HEAD = re.compile(rb"\[rank(\d{1,6})\]:(?:\s?\[[EF][^\n]*)?$")
_ON_HOST = re.compile(rb"(?m)^(?=[a-zA-Z\-]{1,40}\d)([\w\-]{2,60}):(\d{1,5}): \S")
_TASK = re.compile(rb"^\s*(\d{1,6}): \S", re.MULTILINE)


#: Turns all that is no letter into blanks: in letters alone the words of a log are few.
_LETTERS = bytes(byte if chr(byte).isalpha() and byte < 0x80 else 0x20 for byte in range(256))


@functools.cache
def _fragments(needle: bytes) -> tuple[bytes, ...]:
    """Return the words of a needle, the longest first, which most texts lack."""
    return tuple(sorted(needle.translate(_LETTERS).split(), key=len, reverse=True))


def _finds(data: bytes, needle: bytes, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    at = data.find(needle, begin, end)
    while at >= 0:
        yield at, needle
        at = data.find(needle, at + len(needle), end)


def _possible(data: bytes, needles: tuple[bytes, ...]) -> list[bytes]:
    """Return the needles that may stand in a text: all their words in letters stand in one of its own.

    A block of a log has some hundred words, which are searched in the time that few searches of the block take.
    """
    words = b" ".join(set(data.translate(_LETTERS).split()))
    stands: dict[bytes, bool] = {}

    def is_there(word: bytes) -> bool:
        if word not in stands:
            stands[word] = word in words
        return stands[word]

    return [needle for needle in needles if all(map(is_there, _fragments(needle)))]


def _places(data: bytes, needles: tuple[bytes, ...], begin: int, end: int) -> list[tuple[int, bytes]]:
    """Return (position, needle) in order."""
    region = data[begin : end + max(map(len, needles))]
    possible = _possible(region, needles)
    return sorted(hit for needle in possible for hit in _finds(data, needle, begin, end + len(needle) - 1))


_FIGURES = b"0123456789"
#: Shapes of lines that are remembered, and their longest; and the bytes by which it is told whether a log has few.
_SHAPES, _SHAPE, _SAMPLE = 20_000, 1024, 1 << 15


@functools.lru_cache(maxsize=2)  # the needles that are asked for change a few times while a log is read
def _shapes(needles: tuple[bytes, ...]) -> dict[bytes, tuple[bytes, ...]]:
    """Return, for shapes of lines (without their figures), the needles that can stand in one; it grows."""
    return {}


def _places_by_shape(data: bytes, needles: tuple[bytes, ...], begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield what `_places` does. Most lines of a log differ in figures only, and of a kind one is searched."""
    known = _shapes(needles)
    sample = data[begin : min(end, begin + _SAMPLE)].translate(None, _FIGURES).replace(b"\r", b"\n").split(b"\n")
    if end - begin > _SAMPLE and sum(shape not in known for shape in set(sample)) > len(sample) // 2:
        yield from _places(data, needles, begin, end)  # to remember lines of which none comes again costs more
        return
    # Within a line that has no end, a needle may reach beyond it.
    region = data[begin : end if data[end - 1 : end] == b"\n" else end + max(map(len, needles))]
    region = region.replace(b"\r", b"\n")  # the states of a progress bar are lines that differ in figures
    shapes = region.translate(None, _FIGURES).split(b"\n")
    if len(known) > _SHAPES:
        known.clear()
    found = {shape: known.get(shape) for shape in set(shapes)}
    new = [shape for shape, there in found.items() if there is None]
    if new:
        bare = {needle: needle.translate(None, _FIGURES) for needle in _possible(b"\n".join(new), needles)}
        for shape in new:
            found[shape] = there = tuple(needle for needle, word in bare.items() if word in shape)
            if len(shape) <= _SHAPE:
                known[shape] = there
    loud = {shape: there for shape, there in found.items() if there}
    if loud:
        at = begin
        for line, shape in zip(region.split(b"\n"), shapes):
            if shape in loud:
                hits = sorted(hit for needle in loud[shape] for hit in _finds(data, needle, at, at + len(line)))
                yield from (hit for hit in hits if hit[0] < end)
            at += len(line) + 1


@dataclass(frozen=True)
class Record:
    """One record worth reading: its place, its prefixes, its message, and a way to the raw lines after and up to it.

    `context`: it is read only for what the rank was doing; `last`: it stands at the end of its source.
    """

    source: Source
    number: int
    prefix: Prefix
    following: Following
    context: bool = False
    last: bool = False
    preceding: Callable[[], Sequence[str]] = tuple

    @property
    def text(self) -> str:
        return self.prefix.text


def _lines(data: bytes) -> list[str]:
    text = data.decode("utf-8", "replace").replace("\x00", "")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.split("\n")


class Scanner:
    """Take one source's bytes as they come and yield the records that matter, in order."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.size = 0
        self.ranks: set[int] = set()
        self.processes: dict[int, int] = {}  # pid -> rank, by prefixes
        self.started: dict[int, int] = {}  # pid -> its place in what a launcher has started
        self.hosts: dict[int, str] = {}  # rank -> host, of a list
        self.tasks: set[int] = set()
        self.places: dict[int, set[bytes]] = {}  # a number behind the host in front of lines -> such hosts
        self.cut: int | None = None  # the rank whose error line is the last one: it may have been cut off
        self.open_line = 0  # the number of a last line that has no end
        self.broken_off = ""  # the last line, where it begins like one of an incident and is not finished
        self._buffer = b""
        self._done = 0  # what stands before it in the buffer has been read
        self._line = 1  # the number of the line at _done
        self._left = dict.fromkeys(GENERAL, HITS_PER_NEEDLE)
        self._shapes: dict[bytes, int] = {}
        self._heard: dict[bytes, set[int]] = {}
        self._seen_context = False

    def feed(self, data: bytes, final: bool = False, settle: bool = False) -> Iterator[Record]:
        """Yield the records that the bytes complete; `final`: nothing follows; `settle`: nothing follows for now."""
        first = self.size == 0
        self.size += len(data)
        self._buffer = self._buffer[max(0, self._done - QUOTED_BYTES) :] + data
        self._done = min(self._done, QUOTED_BYTES)
        if first or final:
            self._speakers(self._buffer[-(1 << 20) :])
        if final:
            limit = len(self._buffer)
        elif settle:
            limit = self._buffer.rfind(b"\n") + 1
        else:
            limit = self._buffer.rfind(b"\n", 0, max(0, len(self._buffer) - FOLLOW_BYTES)) + 1
            if limit <= self._done and len(self._buffer) - self._done > 8 * LONGEST:
                limit = len(self._buffer) - FOLLOW_BYTES  # a line without an end
        if limit > self._done:
            yield from self._read(limit)
        if final:
            lines = self._buffer[-4096:].rstrip().rsplit(b"\n", 1)
            cut = _ERROR_HEAD.search(lines[-1])
            self.cut = int(cut[1]) if cut else None
            if not self._buffer.endswith((b"\n", b"\r")) or cut:
                self.broken_off = breaks_off(_lines(lines[-1])[-1])
            elif len(lines) == 2:
                self.broken_off = torn(_lines(lines[0])[-1], _lines(lines[1])[-1])
            if not self._buffer.endswith((b"\n", b"\r")):
                self.open_line = self._line
            yield from self._context(self._buffer[-CONTEXT_BYTES:], self._line, last=True)

    def _speakers(self, data: bytes) -> None:
        """Note which ranks speak at all, at both ends of the source."""
        self.ranks.update(int(number) for number in _RANK_BYTES.findall(data))
        if b"pid=" in data and self.size <= STARTING_BYTES:
            self.processes.update((int(found[1]), int(found[2])) for found in _PROCESS_BYTES.finditer(data))
        if self.size <= STARTING_BYTES:
            self.started.update((int(hit[3]), int(hit[1] or hit[2])) for hit in _STARTED_BYTES.finditer(data))
            self.hosts.update((int(hit[1] or hit[2]), hit[3].decode()) for hit in _HOST_BYTES.finditer(data))
        self.tasks.update(int(number) for number in _TASK.findall(data))
        for host, number in _ON_HOST.findall(data):
            self.places.setdefault(int(number), set()).add(host)

    def _read(self, limit: int) -> Iterator[Record]:
        buffer, number, counted, end = self._buffer, self._line, self._done, self._done
        for start in self._hits(limit):
            if start < end:
                continue
            number += buffer.count(b"\n", counted, start)
            counted = start
            stop = self._line_end(start)
            shape = buffer[start : min(stop, start + 160)].translate(None, _FIGURES)
            copies = self._shapes.get(shape, 0)
            if (copies >= SAME_SHAPE and not self._speaks_first(shape, start)) or (
                copies == 0 and len(self._shapes) >= 100_000
            ):
                continue
            self._shapes[shape] = copies + 1
            raw = buffer[start:stop]
            if not self._seen_context and (b"imeout" in raw or b"imed out" in raw):
                self._seen_context = True
                yield from self._context(buffer[max(0, start - CONTEXT_BYTES) : start], number, last=False)
            last_end, records = self._record(start, stop, number)
            end = max(end, last_end)
            yield from records
        limit = max(limit, min(end, len(buffer)))
        self._line = number + buffer.count(b"\n", counted, limit)
        self._done = limit

    def _speaks_first(self, shape: bytes, start: int) -> bool:
        """Return whether the line is of a rank of which none of this shape has been met beyond `SAME_SHAPE`."""
        found = _RANK_BYTES.search(self._buffer, start, start + 64)
        if found is None:
            return False
        before = self._heard.setdefault(shape, set())
        new = int(found[1]) not in before
        before.add(int(found[1]))
        return new

    def _line_end(self, at: int) -> int:
        end = self._buffer.find(b"\n", at, at + LONGEST)
        if end < 0:
            end = min(len(self._buffer), at + LONGEST)
        back = self._buffer.find(b"\r", at, end)
        return back if back >= 0 else end

    def _hits(self, limit: int) -> list[int]:
        """Return where the lines with a needle begin, in order; a carriage return ends a line too (progress bars)."""
        buffer, begin, left = self._buffer, self._done, self._left
        needles = tuple(needle for needle in GENERAL if left[needle] > 0) + NEEDLES
        if self.size <= STARTING_BYTES:
            needles += STARTING
        found: list[int] = []
        end = begin
        for at, needle in _places_by_shape(buffer, needles, begin, limit):
            if at < end:
                continue  # on a line that is taken already
            if needle in left:
                if left[needle] <= 0:
                    continue
                left[needle] -= 1
            start = buffer.rfind(b"\n", max(begin, at - LONGEST), at) + 1 or max(begin, at - LONGEST)
            back = buffer.rfind(b"\r", start, at)
            found.append(back + 1 if back >= 0 else start)
            end = self._line_end(at)
        return found

    def _record(self, start: int, stop: int, number: int) -> tuple[int, list[Record]]:
        """Return where the record ends and what it holds; lines before and after are joined where it was wrapped."""
        buffer = self._buffer
        before = _lines(buffer[max(0, start - 4096) : start])[-9:-1] if start else []
        after = _lines(buffer[stop : stop + 8192])[1:28]
        lines = [*before, *_lines(buffer[start:stop])[:1], *after]
        at = len(before)
        first, last, text = join(lines, at)
        end = stop
        for _ in range(last - at):
            end = self._line_end(min(len(buffer), end + (2 if buffer[end : end + 2] == b"\r\n" else 1)))
        number -= at - first

        def following(count: int) -> Sequence[str]:
            near = _lines(buffer[end : end + min(count * NEAR_BYTES, FOLLOW_BYTES)])
            if len(near) < count + 2:  # the last one may be cut
                near = _lines(buffer[end : end + FOLLOW_BYTES])
            return near[1 : count + 1]

        def preceding() -> Sequence[str]:
            return _lines(buffer[max(0, start - QUOTED_BYTES) : stop])

        line = split_prefix(quotations.without_talk(text))
        if quotations.is_in_table(lines[at], lines[:at]) or quotations.passes(lines[at]):
            return end, []
        if quotations.is_data(line.text, buffer) or quotations.is_of_rules(line.text):
            return end, []
        window = buffer[max(0, start - 8192) : end]
        if quotations.may_be_found(window) and quotations.are_found(_lines(window)):
            return end, []
        records = []
        parts = pieces(line.text)
        of_a_model = quotations.is_of_a_model(message_of(parts[0]))
        if of_a_model and (parts[0].count('"') % 2 or parts[0].rstrip().endswith((":", "=", "\\n"))):
            return end, []  # the text goes on in what looks like a record
        for index, piece in enumerate(parts[of_a_model:], int(of_a_model)):
            own = split_prefix(piece) if index or piece is not line.text else line
            if own is not line:  # a record behind another one on a line has its prefixes, where it has none of its own
                untold = own.rank is None and (index == 0 or not piece.startswith("["))
                own = replace(
                    own,
                    rank=line.rank if untold else own.rank,
                    basis=line.basis if untold else own.basis,
                    when=own.when or line.when,
                    tag=line.tag or own.tag,
                    node=line.node,
                    hidden=own.hidden or line.hidden,
                    local_rank=line.local_rank if own.local_rank is None else own.local_rank,
                    pid=own.pid or line.pid,
                    host=own.host or line.host,
                    place=own.place or line.place,
                    container=own.container or line.container,
                )
            records.append(Record(self.source, number, own, following, preceding=preceding))
        return end, records

    def _context(self, data: bytes, number: int, last: bool) -> Iterator[Record]:
        """Yield the last lines before the incident, or of the file, as context."""
        first = max(1, number - data.count(b"\n"))
        parts = [
            (line, piece) for line, row in enumerate(data.split(b"\n"), first) for piece in row.split(b"\r")
        ]  # of a progress bar
        for line, piece in parts[len(data) >= CONTEXT_BYTES :]:  # the first one may lack its beginning
            if piece.strip():
                prefix = split_prefix(piece[:LONGEST].decode("utf-8", "replace").replace("\x00", ""))
                yield Record(self.source, line, prefix, lambda count: [], context=True, last=last)
