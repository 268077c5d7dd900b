"""A stand-in for the interpreter: programs that tests start are forked from a process that has torch imported, which takes seconds.

`ForkedPython.path` is an executable for the place of `sys.executable`. It hands its arguments, environment, folder, namespaces and
open descriptors to a server and stays: it passes signals on, and ends as the program does. The program is forked by the server, and
so is what it starts by its own `sys.executable`. Options, and variables that Python or torch read at their start, are not imitated:
with these the stand-in becomes the real interpreter.

What differs from a real one: the program's process is not the one that was started (SIGKILL ends both, SIGSTOP stops the stand-in
only); hashes of strings are the same in all; modules are imported that it never asked for; there is one OpenMP thread unless
OMP_NUM_THREADS says more; if QUICK_END_VARIABLE is set, modules and static objects of C++ are not taken down at the end. Tests that
are about such things take the real one, and so does one test at least of each kind of program.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import importlib
import marshal
import os
import resource
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Standard library only, and as little of it as possible: this is what each program costs.
STAND_IN = """#!{python} -IS
import _signal, _socket, marshal, os, sys

def becomes_real():
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

def signals():
    for name in ("HUP", "INT", "QUIT", "ABRT", "USR1", "USR2", "ALRM", "TERM", "CONT"):
        number = getattr(_signal, "SIG" + name)
        if _signal.getsignal(number) is not _signal.SIG_IGN:
            yield number

options = sys.argv[1:]
unbuffered = options[:1] == ["-u"]
options = options[unbuffered:]
if not options or not (options[0] in ("-m", "-c") and options[1:] or os.path.isfile(options[0])):
    becomes_real()
early = {{k: v for k, v in os.environ.items() if k.startswith({early!r}) and not k.startswith({late!r})}}
if early != {values!r}:
    becomes_real()
names = [f"/proc/self/ns/{{name}}" for name in {namespaces!r}]
numbers = [int(name) for name in os.listdir("/proc/self/fd")]
numbers = [number for number in numbers if os.path.exists(f"/proc/self/fd/{{number}}")]  # without that of the listing
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect({address!r})
request = marshal.dumps((options, unbuffered, dict(os.environ), os.getcwd(), os.umask(0), numbers))
descriptors = [os.open(name, os.O_RDONLY) for name in names] + numbers
rights = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
server.sendmsg([len(request).to_bytes(8, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
server.sendall(request)
for number in signals():
    _signal.signal(number, lambda number, frame: server.send(bytes([number])))
answer = server.recv(4)
if len(answer) != 4:
    os.write(2, b"the process that forks programs for the tests has ended; {log} has its output\\n")
    os._exit(70)
code = int.from_bytes(answer, "big", signed=True)
if code < 0:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if code not in (-_signal.SIGKILL, -_signal.SIGSTOP):
        _signal.signal(-code, _signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
EARLY = ("TORCH", "LOGLEVEL", "MKL_", "KMP_", "LD_", "GLIBC_", "MALLOC_", "DS_ACCELERATOR", "ACCELERATE_", "PYTHON")
#: Of these: read when a process group is made, or by the program itself, or imitated here, or without a meaning to programs.
LATE = (
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_FR_",
    "TORCH_NCCL_",
    "TORCH_GLOO_",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_CACHE_DIR",  # set by torch._inductor when something imports that
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "PYTHONDONTWRITEBYTECODE",
)
NAMESPACES = ("net", "uts", "mnt")
MODULES = ("torch.distributed.run", "ncclguard.faults.prefork", "ncclguard.bench.job", "ncclguard.explain")
_MOST = 253  # descriptors that one message can carry


class ForkedPython:
    """A server and the executable that has programs forked by it; with the first it imports `modules`. Ends with its owner."""

    def __init__(self, folder: Path, modules: Sequence[str], env: Mapping[str, str]) -> None:
        from ncclguard.faults.janitor import JOB_VARIABLE
        from ncclguard.faults.prefork import ROOM

        folder.mkdir()
        self.path = folder / "python"
        address, log = str(folder / "socket"), folder / "output"
        env = {**env, "OMP_NUM_THREADS": "1", JOB_VARIABLE: ROOM}
        values = {name: value for name, value in env.items() if name.startswith(EARLY) and not name.startswith(LATE)}
        self.path.write_text(
            STAND_IN.format(
                python=sys.executable,
                early=EARLY,
                late=LATE,
                values=values,
                namespaces=NAMESPACES,
                address=address,
                log=log,
            )
        )
        self.path.chmod(0o700)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, log.open("wb") as output:
            listener.bind(address)
            listener.listen(64)  # from now on: programs wait for the imports
            command = [sys.executable, __file__, str(listener.fileno()), JOB_VARIABLE, str(self.path), *modules]
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,  # its end is this process's end
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
                cwd=Path(__file__).parents[1],
                start_new_session=True,
            )

    def close(self) -> None:
        """End it, and what it has forked and still runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


@dataclass(frozen=True, slots=True)
class Request:
    """A program to be run, as the stand-in describes it."""

    options: list[str]
    unbuffered: bool
    env: dict[str, str]
    folder: str
    umask: int
    numbers: list[int]
    descriptors: list[int]  # of the namespaces, then those that are to have these numbers

    @classmethod
    def received(cls, connection: socket.socket) -> Request:
        """Read it from a stand-in. Raises EOFError when that has ended meanwhile."""
        header, descriptors, _, _ = socket.recv_fds(connection, 8, _MOST)
        body = b""
        while header and len(body) < int.from_bytes(header, "big"):
            part = connection.recv(1 << 20)
            if not part:
                break
            body += part
        if not body or len(body) < int.from_bytes(header, "big"):
            for descriptor in descriptors:
                os.close(descriptor)
            raise EOFError
        return cls(*marshal.loads(body), descriptors)


def serve(listener: socket.socket) -> Request:
    """Fork a program for each stand-in and tell it how that ended; returns in the programs only."""
    connections: dict[int, tuple[socket.socket, int]] = {}  # pidfd -> its stand-in, its pid
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, "start")
        selector.register(0, selectors.EVENT_READ, "end")
        while True:
            for key, _ in selector.select():
                if key.data == "end":
                    for _, pid in connections.values():
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                elif key.data == "start":
                    connection, _ = listener.accept()
                    try:
                        request = Request.received(connection)
                    except (EOFError, ConnectionError):
                        connection.close()
                        continue
                    pid = os.fork()
                    if pid == 0:
                        for pidfd, (other, _) in connections.items():
                            os.close(pidfd)
                            other.close()
                        connection.close()
                        listener.close()
                        return request
                    for descriptor in request.descriptors:
                        os.close(descriptor)
                    pidfd = os.pidfd_open(pid)
                    connections[pidfd] = connection, pid
                    selector.register(pidfd, selectors.EVENT_READ, "ended")
                    selector.register(connection, selectors.EVENT_READ, pid)
                elif key.data == "ended":
                    connection, pid = connections.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    if connection.fileno() >= 0:
                        selector.unregister(connection)
                    _, status = os.waitpid(pid, 0)
                    answer(connection, os.waitstatus_to_exitcode(status))
                else:
                    pass_on(selector, key)


def pass_on(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """The signals that a stand-in got go to its program; so does its end."""
    assert isinstance(key.fileobj, socket.socket)
    if key.fileobj.fileno() < 0:  # its program has ended just now
        return
    try:
        numbers = key.fileobj.recv(64) or bytes([signal.SIGKILL])
    except ConnectionError:
        numbers = bytes([signal.SIGKILL])
    for number in numbers:
        os.kill(key.data, number)  # not collected yet: the pid is still its own
    if signal.SIGKILL in numbers:
        selector.unregister(key.fileobj)
        key.fileobj.close()


def answer(connection: socket.socket, code: int) -> None:
    """Tell a stand-in, if it is still there, how its program ended."""
    with connection:
        if connection.fileno() >= 0:
            try:
                connection.send(code.to_bytes(4, "big", signed=True))
            except ConnectionError:
                return


def become(request: Request, library: Sequence[str]) -> None:
    """Make this process what the real interpreter would be at its start."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the server
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, descriptor in zip(NAMESPACES, request.descriptors, strict=False):
        if os.fstat(descriptor).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino and libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"entering another {name} namespace")
        os.close(descriptor)
    os.umask(request.umask)
    os.chdir(request.folder)
    place(request.descriptors[len(NAMESPACES) :], request.numbers)
    unbuffered = request.unbuffered or bool(request.env.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=unbuffered or os.isatty(1))  # type: ignore[union-attr]
    if request.env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    entries = filter(None, request.env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = ["", *dict.fromkeys(map(os.path.abspath, entries)), *library]
    importlib.invalidate_caches()
    import torch
    import torch.distributed as dist

    dist.set_debug_level_from_env()
    if request.env.get("OMP_NUM_THREADS", "").isdigit():
        torch.set_num_threads(int(request.env["OMP_NUM_THREADS"]))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def replace_environment(env: Mapping[str, str], mark: str, room: int) -> None:
    """Set all variables; the job's mark in place, where /proc shows it, and where a program that forks ranks looks for it."""
    for name in [name for name in os.environ if name != mark or mark not in env]:
        del os.environ[name]
    for name, value in env.items():
        if name == mark:
            ctypes.memmove(room, value.encode(), len(value))
            os.environ._data[os.environ.encodekey(mark)] = os.environ.encodevalue(value)  # type: ignore[attr-defined]
        else:
            os.environ[name] = value


def place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors the numbers that they have in the stand-in."""
    free = max((*descriptors, *numbers)) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, free) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def run(options: Sequence[str]) -> None:
    """What Python does with `-m MODULE`, `-c CODE` or a script, and the arguments after it."""
    kind, *rest = options
    program = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = program
    if kind == "-m":
        sys.argv = rest
        sys.path[0] = os.getcwd()
        for name in (rest[0], f"{rest[0]}.__main__"):
            sys.modules.pop(name, None)
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]  # as `python -m` does
        return
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        source: str | bytes = rest[0]
        name = "<string>"
    else:
        sys.argv = list(options)
        sys.path[0] = os.path.dirname(os.path.realpath(kind))
        program.__file__ = name = os.path.abspath(kind)
        source = Path(kind).read_bytes()
    exec(compile(source, name, "exec", dont_inherit=True), program.__dict__)  # noqa: S102 - the program itself


def run_and_end_quickly(options: Sequence[str], end: Callable[[int], None]) -> None:
    """Leave by `end`; returns, by an exception, only where Python is to end the program by a signal."""
    code: object = 0
    try:
        run(options)
    except SystemExit as leaving:
        code = leaving.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except Exception:  # noqa: BLE001 - the program's, to be shown as Python does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    end((code or 0) & 0xFF)


def without_frames_of_this_file(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """The excepthook of the programs."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    this = sys.modules["__main__"]  # kept: a program replaces it
    descriptor, mark, executable, *modules = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.excepthook = without_frames_of_this_file  # before ncclguard, which puts its own over it, is imported
    sys.path[0] = ""
    listener = socket.socket(fileno=int(descriptor))
    if 0 in select.select([listener, 0], [], [])[0]:
        sys.exit()  # nobody has needed it
    for module in (*MODULES, *modules):
        importlib.import_module(module)
    prefork = sys.modules["ncclguard.faults.prefork"]
    room = prefork.address_of(mark)
    own = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    library = [entry for entry in sys.path[1:] if entry not in own]
    gc.collect()
    gc.freeze()
    request = serve(listener)
    replace_environment(request.env, mark, room)
    become(request, library)
    sys.executable = executable
    if prefork.QUICK_END_VARIABLE in request.env:
        prefork.forget_finalizers()
        run_and_end_quickly(request.options, prefork.end_quickly)
    run(request.options)
