"""Commands on the same host reach a rank over a Unix socket that only its user may use; and `ncclguard set`.

One line of JSON asks, one line answers, and a connection is for one question. No question can hold the job up: one
small thread answers it, in bounded time. This module imports no torch, so that the commands start at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import select
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ncclguard.arguments import seconds_or_zero
from ncclguard.metrics.settings import SETTINGS
from ncclguard.spelling import meant
from ncclguard_explain.command_line import Parser, described
from ncclguard_explain.language import joined, say, speaking_to, told, tr

log = logging.getLogger("ncclguard")

#: Bytes of a question; an answer may have more.
MAX_QUESTION = 65536
#: Seconds for one connection, so that a silent client does not keep the others out.
PATIENCE = 2.0
SUFFIX = ".sock"
#: Seconds that a socket nobody answers at has been there before it is taken for a dead one: between bind(2) and
#: listen(2) nobody answers either.
BEGINS_WITHIN = 60.0


#: Answers a question; both are dictionaries that JSON can carry.
Answer = Callable[[dict[str, Any]], dict[str, Any]]


class ControlError(Exception):
    """The rank could not be reached, or refused; the text says why and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text  # str(error) has lost the template, by which it can be translated


class ControlSocket:
    """Answers questions in a thread of its own until `close`."""

    def __init__(self, listener: socket.socket, path: Path, answer: Answer) -> None:
        self._listener = listener
        self._path = path
        self._answer = answer
        self._closed = False
        self._stop, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="ncclguard-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and remove the socket; returns within a few seconds."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(2 * PATIENCE)
        for each in (self._listener, self._stop, self._wake):
            each.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _serve(self) -> None:
        _remove_all_dead(self._path.parent)
        waiting = select.poll()  # select() takes no descriptor above 1023, and loaders may keep more files open
        for each in (self._listener, self._stop):
            waiting.register(each, select.POLLIN)
        while not self._closed:
            waiting.poll()
            if self._closed:
                return
            try:
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(PATIENCE)
                    if _peer(connection)[1] in (os.getuid(), 0):
                        self._talk(connection)
            except (OSError, ValueError) as error:
                log.debug("ncclguard: a question to this rank was not answered: %s", error)
            except Exception:
                log.exception("ncclguard: %s", told("answering a command failed; the job goes on", "log"))

    def _talk(self, connection: socket.socket) -> None:
        question = json.loads(_line(connection, MAX_QUESTION))
        answer = self._answer(question) if isinstance(question, dict) else {"error": "a JSON object is needed"}
        connection.sendall(json.dumps(answer).encode() + b"\n")


def open_control(job: str, rank: int, answer: Answer) -> ControlSocket | None:
    """Answer questions to this rank of the job; None, with a line in the log, where that is not possible."""
    try:
        path = _folder() / f"{job}.{rank}{SUFFIX}"
        _remove_dead(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            os.chmod(path, 0o600)
            listener.listen(8)
        except BaseException:
            listener.close()
            raise
        return ControlSocket(listener, path, answer)
    except OSError as error:
        log.warning(
            "ncclguard: %s",
            told(
                "`ncclguard top` and `ncclguard set` cannot reach this rank: {error}; the job goes on",
                "log",
                error=error,
            ),
        )
        return None


# ---------------------------------------------------------------------- the folder


def folders() -> list[Path]:
    """Return the folders where sockets of this user's jobs may be on this host, the preferred one first.

    All are searched: a job's environment and that of the shell beside it often differ in XDG_RUNTIME_DIR.
    """
    bases = [os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"]
    found = [Path(base) / "ncclguard" for base in bases if base and os.path.isdir(base) and os.access(base, os.W_OK)]
    return list(dict.fromkeys([*found, Path(tempfile.gettempdir()) / f"ncclguard-{os.getuid()}"]))


def _folder() -> Path:
    """Make the folder if need be. Raises OSError unless it belongs to this user alone."""
    folder = folders()[0]
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only this user may enter: remove it, or chmod it to 700")
    return folder


def _remove_dead(path: Path) -> None:
    """Remove a socket that a killed process left behind. Raises OSError when somebody answers there."""
    if not path.exists():
        return
    if not _is_open(path):
        path.unlink(missing_ok=True)
        return
    raise FileExistsError(f"another process answers at {path}: give setup_nccl_monitoring another job name")


def _remove_all_dead(folder: Path) -> None:
    """Remove what killed processes of any job have left: nobody else does."""
    before = time.time() - BEGINS_WITHIN
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):  # another rank of the host was faster
            if path.lstat().st_mtime < before and not _is_open(path):
                path.unlink()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process at the other end and its user, by their ids."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", data)
    return int(pid), int(user)


def _line(connection: socket.socket, limit: int) -> bytes:
    """Read one line. Raises ValueError for a longer one, TimeoutError when it takes too long."""
    data, until = b"", time.monotonic() + PATIENCE
    while not data.endswith(b"\n"):
        if len(data) > limit or time.monotonic() > until:
            raise ValueError(f"no line within {limit} bytes and {PATIENCE:g} s")
        part = connection.recv(65536)
        if not part:
            break
        data += part
    return data


# ---------------------------------------------------------------------- the other side


def jobs() -> dict[str, dict[int, Path]]:
    """Return the jobs of this user on this host that still have a process: by name, the socket of each rank."""
    found: dict[str, dict[int, Path]] = {}
    for name, rank, path in _sockets():
        found.setdefault(name, {})[rank] = path
    return {name: ranks for name, ranks in found.items() if any(map(_is_open, ranks.values()))}


def _is_open(path: Path) -> bool:
    """Return whether a process has the socket open; one that does not answer may be stopped."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _process(ranks: dict[int, Path]) -> str:
    """Return by what somebody knows a job again: a process of it, and the words after its interpreter."""
    with contextlib.suppress(OSError, IndexError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(str(ranks[min(ranks)]))
        pid, _ = _peer(connection)
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:]
        return f"pid {pid}: {b' '.join(words).decode(errors='replace').strip()[:60]}"
    return "?"


def ask(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Return the rank's answer. Raises ControlError when there is none, or when the rank refused."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(2 * PATIENCE)
            connection.connect(str(path))
            connection.sendall(json.dumps(question).encode() + b"\n")
            answered = json.loads(_line(connection, 1 << 26))
    except (OSError, ValueError) as error:
        text = tr(
            "the rank at {name} does not answer ({error}): it has ended, or its interpreter does not run",
            name=path.name,
            error=error,
        )
        raise ControlError(text) from error
    if "error" in answered:
        raise ControlError(str(answered["error"]))
    return dict(answered)


def choose(wanted: str | None) -> tuple[str, dict[int, Path]]:
    """Return the job of that name, or the only one, with the sockets of its ranks on this host. Raises ControlError."""
    found = jobs()
    if wanted is not None and wanted in found:
        return wanted, found[wanted]
    if found:
        processes = [tr("{name} ({details})", name=name, details=_process(ranks)) for name, ranks in found.items()]
        known = tr("there are {jobs}", jobs=joined(", ", processes))
    else:
        known = tr("one can be once its program calls setup_nccl_monitoring() or watch()")
    if wanted is not None:
        raise ControlError(
            tr("there is no job {name} of this user on this host; {known}", name=repr(wanted), known=known)
        )
    if len(found) == 1:
        return next(iter(found.items()))
    if found:
        raise ControlError(tr("name the job with --job; {known}", known=known))
    raise ControlError(tr("no job of this user here can be asked; {known}", known=known))


def first_answer(ranks: dict[int, Path], question: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the answer of the lowest rank that gives one. Raises ControlError when none does, or when it refuses."""
    unanswered: ControlError | None = None
    for _, path in sorted(ranks.items()):
        try:
            return path, ask(path, question)
        except ControlError as error:
            if not isinstance(error.__cause__, (OSError, ValueError)):
                raise  # it answered, with a refusal
            unanswered = error
    raise unanswered or ControlError(tr("the job has no rank on this host"))


def _sockets() -> Iterator[tuple[str, int, Path]]:
    for path in (path for folder in folders() if folder.is_dir() for path in sorted(folder.glob(f"*{SUFFIX}"))):
        name, _, rank = path.name.removesuffix(SUFFIX).rpartition(".")
        if name and rank.isdecimal():
            yield name, int(rank), path


EXIT_CODES = {
    0: "in force on all ranks of all groups of the rank that was asked",
    1: "proposed, and not yet in force after --wait seconds",
    2: "refused, or there is no such job",
}
EXAMPLES = {
    "ncclguard set timeout_eval=3600": "an hour for collectives of evaluation, on all ranks",
    "ncclguard set timeout=none chunk_numel=5e7 --job 4711": "two settings of one of several jobs",
    "ncclguard set warn_after=10 --wait 0": "propose, and do not wait for the agreement",
}
#: Seconds between two questions whether the ranks have agreed.
LOOK = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Propose the settings and wait for the agreement; 0: in force, 1: not yet, 2: refused or not possible."""
    options = build_parser().parse_args(argv)
    try:
        job, ranks = choose(options.job)
        values = dict(map(_assignment, options.settings))
        path, answer = first_answer(ranks, {"command": "set", "values": values})
        with speaking_to(sys.stdout):
            return _wait(job, path, int(answer["proposal"]), values, options.wait)
    except (ControlError, ValueError) as error:
        with speaking_to(sys.stderr):
            print(
                f"ncclguard set: {say(error.text if isinstance(error, ControlError) else str(error))}", file=sys.stderr
            )
        return 2


def _wait(job: str, path: Path, proposal: int, values: dict[str, float | None], seconds: float) -> int:
    text = ", ".join(f"{name}={'none' if value is None else f'{value:g}'}" for name, value in values.items())
    until = time.monotonic() + seconds
    said = False
    while True:
        status = ask(path, {"command": "status"})
        groups, every = status["adopted"], status["statistics_every"]
        pending = [group for group, (number, _) in groups.items() if number < proposal]
        if not groups and not said:
            said = True
            none = told("job {name} has no guarded group yet, and `watch()` alone takes no setting", name=job)
            waits = told("waiting up to {number:g} s for one", number=seconds)
            print(f"{none}: {waits}" if seconds else none, flush=True)
        if groups and not pending:
            for group, (_, after) in groups.items():
                print(
                    told(
                        "{setting} is in force on all ranks of group {group} of job {name}, since operation {number}",
                        setting=text,
                        group=group,
                        name=job,
                        number=after,
                    )
                )
            return 0
        if time.monotonic() >= until:
            break
        time.sleep(LOOK)
    if not groups:
        print(
            told("{setting} is proposed and not in force: no guarded group has begun that could take it", setting=text)
        )
        return 1
    print(
        told(
            "{setting} is proposed; {some} will take it with the next exchange: every {number}th operation of a group has one",
            setting=text,
            some=joined(", ", [tr("group {name}", name=group) for group in pending]) or tr("the job"),
            number=every,
        )
    )
    return 1


def _assignment(text: str) -> tuple[str, float | None]:
    name, _, value = text.partition("=")
    if name not in SETTINGS:
        some = ", ".join(SETTINGS)
        there = tr("write NAME=VALUE, with one of {some}", some=some)
        refused = tr("{setting} cannot be set in a running job", setting=repr(text))
        raise ValueError(say(joined(": ", (refused, meant(name, SETTINGS, "{}=") or there))))
    if value.lower() == "none":
        return name, None
    try:
        return name, float(value.replace("_", ""))
    except ValueError:
        raise ValueError(
            told("{setting} has no number: write for example {name}=900, or {name}=none", setting=repr(text), name=name)
        ) from None


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = Parser(
        prog="ncclguard set",
        description="Change settings of a running job, on all its ranks after the same operation. The job needs "
        "setup_nccl_monitoring(); what the program gives as an argument stays.",
    )
    parser.add_argument(
        "settings",
        nargs="+",
        metavar="NAME=VALUE",
        help=tr("{some}; seconds or a number, or none", "help", some=", ".join(SETTINGS)),
    )
    parser.add_argument("--job", help="name of the job; not needed when there is one on this host")
    parser.add_argument(
        "--wait", type=seconds_or_zero, default=30.0, help="seconds to wait for the agreement (default 30)"
    )
    return described(parser, EXAMPLES, EXIT_CODES)
