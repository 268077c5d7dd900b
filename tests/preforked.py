"""Lets the Python programs that tests start be forks of a process that has imported torch: five seconds of a core less each.

Unlike those of ncclguard.faults.fork they are to whoever starts them what a process of its own would be: a child under the
pid that `subprocess.Popen` has, in its session, with its descriptors, and with its variables in /proc. So torchrun is one,
and its ranks are again. Not as in a process of its own: /proc/PID/cmdline, what torch reads of the variables while it is
imported, and the last half of Python's exit. Where one of these matters, a test does without `preforked`.

A server forks a process in the middle, which forks the program and ends; the orphan becomes the child of the nearest
process above that adopts (PR_SET_CHILD_SUBREAPER), and that is who has asked.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import pickle
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ncclguard.faults import fork, hosts

ROOT = Path(__file__).resolve().parents[1]
#: Imported by nearly all programs; torch._dynamo by the first step of DistributedDataParallel.
MODULES = ("torch.distributed.run", "torch._dynamo", "numpy", "ncclguard", "rich.panel")
#: Programs that are modules: others are few, and may not be there at all.
OWN = ("ncclguard", "ncclguard.bench", "ncclguard.faults", "torch.distributed.run", "deepspeed.launcher.launch")
#: Folders that PYTHONPATH may name; another could hold what is imported already, or a sitecustomize.
KNOWN = {str(ROOT), str(ROOT / "explain"), ""}
_ROOM = "PREFORKED_ROOM"  # as many bytes as a program's variables may take in /proc
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
_LARGEST = 100_000  # bytes of a request; a socket's buffer holds more
#: The arguments of `Popen._execute_child`.
_NAMES = subprocess.Popen._execute_child.__code__.co_varnames[1 : subprocess.Popen._execute_child.__code__.co_argcount]
_begin = subprocess.Popen._execute_child

_lock = threading.Lock()
_server: socket.socket | None = None
_modules: tuple[str, ...] = ()
_started_with: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Program:
    """What a fork is to become."""

    arguments: Sequence[str]  # after the interpreter
    env: Mapping[str, str]
    folder: str
    entrance: Sequence[str]  # of `Hosts.entrance`
    descriptors: Sequence[int]  # the numbers of those that come along
    session: bool
    group: int


@contextlib.contextmanager
def programs(*more: str) -> Iterator[None]:
    """Within, each `Popen` of this process whose program can be a fork makes one, with `more` modules imported too."""
    _serve_here((*MODULES, *more))
    subprocess.Popen._execute_child = _execute_child
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _begin


def _serve_here(modules: tuple[str, ...]) -> None:
    """Start the server of this process, unless it has one with these modules."""
    global _server, _started_with, _modules
    if modules == _modules:
        return
    if _server is not None:
        _server.close()  # and so it ends
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {**os.environ, _ROOM: "0" * 65536, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'explain'}"}
    env.pop("PYTEST_CURRENT_TEST", None)
    bare = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    look = [sys.executable, "-c", "import sys, json; print(json.dumps(sys.path[1:]))"]
    path = subprocess.run(look, env=bare, cwd="/", capture_output=True, text=True, check=True).stdout
    command = [
        sys.executable,
        "-c",
        "from tests import preforked; preforked.main()",
        str(theirs.fileno()),
        path,
        *modules,
    ]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, env=env, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=nothing, stdout=nothing)
    theirs.close()
    atexit.register(_end, ours, process)
    _server, _started_with, _modules = ours, fork.early(env), modules


def _end(server: socket.socket, process: subprocess.Popen[bytes]) -> None:
    server.close()
    process.wait()


def _execute_child(process: subprocess.Popen[Any], *positional: Any) -> None:
    """Take the place of `Popen._execute_child`: fork the program, or start it where it cannot be a fork."""
    given = dict(zip(_NAMES, positional, strict=True))
    program = _program(given)
    request = b"" if program is None else pickle.dumps(program)
    standard = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    descriptors = [number if own == -1 else own for number, own in enumerate(standard)] + [*given["pass_fds"]]
    pid = b"" if program is None or len(request) > _LARGEST else _fork(request, descriptors)
    if not pid:
        _begin(process, *positional)
        return
    sys.audit("subprocess.Popen", sys.executable, given["args"], given["cwd"], given["env"])
    process.pid = int(pid)
    process._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(given[name] for name in pipes))


def _fork(request: bytes, descriptors: Sequence[int]) -> bytes:
    """Return the pid of a new child of this process, or nothing where there is none."""
    libc = ctypes.CDLL(None)
    with _lock, contextlib.suppress(OSError):
        libc.prctl(_ADOPT, 1, 0, 0, 0)
        try:
            assert _server is not None
            socket.send_fds(_server, [request], descriptors)
            return _server.recv(32).replace(b"none", b"")
        finally:
            libc.prctl(_ADOPT, 0, 0, 0, 0)
    return b""


def _program(given: Mapping[str, Any]) -> Program | None:
    """Return what `Popen` was asked to start, or None where only a process of its own is that."""
    plain = {
        "preexec_fn": None,
        "executable": None,
        "shell": False,
        "uid": None,
        "gid": None,
        "gids": None,
        "umask": -1,
    }
    if any(given[name] != value for name, value in plain.items()) or isinstance(given["args"], (str, bytes, Path)):
        return None
    arguments, entrance = [os.fspath(argument) for argument in given["args"]], []
    if arguments[1:3] == ["netns", "exec"] and arguments[8:9] == [hosts.ENTER]:  # Hosts.command
        entrance, arguments = [arguments[3], *arguments[10:12]], arguments[12:]
    env = dict(os.environ if given["env"] is None else given["env"])
    if not arguments or not all(isinstance(text, str) for text in (*arguments, *env, *env.values())):
        return None
    interpreter, *rest = _interpreted(arguments, env)
    folder = os.path.abspath(given["cwd"] or ".")
    fits = (
        interpreter == sys.executable
        and os.path.isdir(folder)
        and _can_run(rest, folder)
        and fork.early(env) == _started_with
        and KNOWN.issuperset(env.get("PYTHONPATH", "").split(os.pathsep))
        and sum(len(name) + len(value) + 8 for name, value in env.items()) < 60_000
    )
    if not fits:
        return None
    standard = [0, 1, 2, *given["pass_fds"]]
    group = given.get("process_group", -1)  # from Python 3.11 on
    return Program(rest, env, folder, entrance, standard, given["start_new_session"], -1 if group is None else group)


def _interpreted(arguments: list[str], env: Mapping[str, str]) -> list[str]:
    """Return the command with its interpreter: `python` is this one, and `torchrun` a script of this environment."""
    file, own = shutil.which(arguments[0], path=env.get("PATH")), Path(sys.executable)
    if file is None or Path(file).parent != own.parent:
        return arguments
    if os.path.realpath(file) == os.path.realpath(own):
        return [sys.executable, *arguments[1:]]
    with open(file, "rb") as script:
        first = script.readline()
    return [sys.executable, file, *arguments[1:]] if first.strip() == b"#!" + os.fsencode(own) else arguments


def _can_run(arguments: Sequence[str], folder: str) -> bool:
    """Return whether `_run` understands this command line."""
    begin = 1 if arguments[:1] == ["-u"] else 0
    match arguments[begin : begin + 2]:
        case ["-m", module]:
            return module in OWN
        case ["-c", _]:
            return True
        case [file, *_]:
            return not file.startswith("-") and os.path.isfile(os.path.join(folder, file))
    return False


def _serve(channel: socket.socket, path: Sequence[str]) -> NoReturn:
    """Fork what is asked for until whoever may ask has gone."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, 2 * _LARGEST, 250)
        if not request:
            os._exit(0)
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            above = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == above:  # or the program would see this one as its parent
                time.sleep(0.0005)
            os.close(channel.detach())
            os.close(reader)
            _become(pickle.loads(request), descriptors, writer, path)
        for own in (writer, *descriptors):
            os.close(own)
        os.waitpid(middle, 0)
        channel.send(os.read(reader, 32) or b"none")
        os.close(reader)


def _become(program: Program, descriptors: Sequence[int], ready: int, path: Sequence[str]) -> NoReturn:
    """Make this fork what a new process with this program would be, tell its pid, and run it."""
    gc.freeze()  # a collection would write into all that was imported, and so copy the server's memory
    if program.session:
        os.setsid()
    elif program.group >= 0:
        os.setpgid(0, program.group)
    *aside, told = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 300) for descriptor in (*descriptors, ready)]
    for descriptor in (*descriptors, ready):
        os.close(descriptor)
    for descriptor, number in zip(aside, program.descriptors, strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(program.env)
    _show(program.env)
    os.chdir(program.folder)
    os.write(told, str(os.getpid()).encode())
    os.close(told)
    if program.entrance:
        fork.enter_host(*program.entrance)
    if "RANK" not in program.env:  # a launcher, or like one: what it starts are forks too
        _serve_below(program, path)
    _run(program, path)


def _serve_below(program: Program, path: Sequence[str]) -> None:
    """Fork a server of this process's own while nothing has run in it yet."""
    global _server, _started_with
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        for number in program.descriptors[3:]:
            os.close(number)
        _show({})  # it is no rank, and ends with the program
        _serve(theirs, path)
    theirs.close()
    _server, _started_with = ours, fork.early(program.env)
    subprocess.Popen._execute_child = _execute_child


def _show(env: Mapping[str, str]) -> None:
    """Put variables where /proc shows them; nothing else points there, since `os.environ` was cleared."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    if len(text) > end - start:
        raise RuntimeError(f"{len(text)} bytes of variables do not fit into {end - start}")
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _run(program: Program, path: Sequence[str]) -> NoReturn:
    """Do what Python does with a command line, and end with the program's exit code."""
    env, arguments = program.env, [*program.arguments]
    through = bool(env.get("PYTHONUNBUFFERED"))
    if arguments[0] == "-u":
        through = bool(arguments.pop(0))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=through, line_buffering=stream is sys.stderr or stream.isatty())
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    fork.read_again(env)
    tempfile.tempdir = None
    sys.orig_argv = [sys.executable, *program.arguments]
    sys.path[:] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *path]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    code = 0
    try:
        exec(_code(arguments, main), main.__dict__)  # noqa: S102 - the program that was asked for
    except BaseException as error:  # noqa: BLE001 - the program's own, to be shown as Python does
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # without this function
        code = fork.shown(error)
    fork.end(code)


def _code(arguments: list[str], main: ModuleType) -> Any:
    """Return what to run as `__main__`, with `sys.argv` and the names of that module as Python sets them."""
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        return compile(arguments[1], "<string>", "exec")
    if arguments[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = ["-m", *arguments[2:]]
        _, spec, code = runpy._get_module_details(arguments[1])
        own = {"__spec__": spec, "__loader__": spec.loader, "__file__": spec.origin, "__package__": spec.parent}
        main.__dict__.update(own)
        sys.argv[0] = spec.origin
        return code
    file = os.path.abspath(arguments[0])
    sys.argv = [*arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(file))
    main.__dict__.update({"__file__": file, "__cached__": None})
    return compile(Path(file).read_bytes(), file, "exec")


def main() -> NoReturn:
    """Be the server of the process that has started this one."""
    number, path, *modules = sys.argv[1:]
    for name in modules:
        with contextlib.suppress(ModuleNotFoundError):  # a framework that is not installed
            importlib.import_module(name)
    _serve(socket.socket(fileno=int(number)), json.loads(path))
