"""The place where a rank stands, by the Python stack that py-spy has read: inside a collective, or in what instead."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final


class Kind(str, Enum):
    """The kind of call that a thread stands in."""

    COLLECTIVE = "collective"
    P2P = "p2p"
    BACKWARD = "backward"  # DDP's reducer waits inside of it, in C++, without a frame
    SETUP = "setup"  # joining the job, or making a group
    STORE = "store"
    RPC = "rpc"
    DEVICE = "device"
    EXIT = "exit"
    WORKER = "worker"  # of a data loader: no rank
    MANAGER = "manager"  # multiprocessing's server of shared objects: no rank
    IDLE = "idle"  # a server, an engine or an actor that waits for requests; who reads a queue or a pipe
    LOADER = "loader"
    CHILD = "child"
    NETWORK = "network"
    LOCK = "lock"
    DEBUGGER = "debugger"
    SLEEP = "sleep"
    FILE = "file"
    PYTHON = "python"  # anything else

    def __str__(self) -> str:
        return self.value


class Motion(str, Enum):
    """The motion of a rank between looks."""

    STILL = "still"  # has not run at all, or for far less time than work takes
    WAKING = "waking"  # the same call, and wakes up without working: it asks again and again, or makes short steps
    SPINNING = "spinning"  # the same call for peers or for the device, and computes: it transfers, or asks all the time
    MOVING = "moving"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


#: Threads of this library that call functions of the program, which may hang.
_CALL_THE_PROGRAM: Final = frozenset(["ncclguard-callbacks", "ncclguard-on-found"])
#: Kinds in which a rank waits for its peers as soon as it does not move.
INSIDE: Final = frozenset([Kind.COLLECTIVE, Kind.P2P, Kind.BACKWARD, Kind.SETUP, Kind.STORE, Kind.RPC])


@dataclass(frozen=True, slots=True)
class Frame:
    """One call: the function, its file, the line; and of functions of torch.distributed what they were called with.

    `group` is the address of the process group that the call is for, 0 where it is not known. `rank` is the value of a
    local variable of that name.
    """

    function: str
    file: str
    line: int
    arguments: tuple[tuple[str, str], ...] = ()
    group: int = 0
    rank: int | None = None

    def __str__(self) -> str:
        return f"{short(self.file)}:{self.line} {self.function}"


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread's frames, outermost first."""

    tid: int
    name: str
    holds_gil: bool
    frames: tuple[Frame, ...]

    @property
    def is_guards(self) -> bool:
        """Tell whether it is one of this library's, at its own work and not in a function of the program."""
        return self.name.startswith("ncclguard") and self.name not in _CALL_THE_PROGRAM


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a rank stands: the kind, torch's function, and the program's own line.

    `world` is true where the call is known to be for the default group. `peer` is the rank that a send or receive is
    for. `stack` has the program's frames, outermost first, with torch's function as the last. `serves` is true of the
    handler of another rank's RPC. `group` is
    the rank within the group that the call is for, and the size of that group. `guarded` is true where this library
    carries the call out.
    """

    kind: Kind
    op: str = ""
    world: bool = False
    peer: int | None = None
    holds_gil: bool = False
    stack: tuple[str, ...] = ()
    serves: bool = False
    group: tuple[int, int] | None = None
    guarded: bool = False

    @property
    def inside(self) -> bool:
        """Tell whether it is a call that peers have to make too."""
        return self.kind in INSIDE

    @property
    def asks(self) -> bool:
        """Tell whether who waits there asks the store or Ray again and again."""
        return self.kind in (Kind.SETUP, Kind.STORE) or self.op == RAY_REPORT

    @property
    def wakes(self) -> bool:
        """Tell whether who waits there wakes up for it: it may be running, or want a processor, at any moment."""
        return self.asks or (self.inside and self.guarded)


_P2P: Final = frozenset(["send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"])
_SETUP: Final = frozenset(
    ["init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group",
     "_new_process_group_helper", "_store_based_barrier", "init_device_mesh", "init_rpc"]
)  # fmt: skip
_COLLECTIVES: Final = frozenset(
    ["all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
     "all_gather_object", "all_gather_single", "_all_gather_base", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
     "_reduce_scatter_base", "broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "gather",
     "gather_object", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "_coalescing_manager",
     "wait_tensor", "_sync_buffers", "_distributed_broadcast_coalesced", "_default_broadcast_coalesced",
     "_sync_module_states", "_sync_params_and_buffers", "_verify_param_shape_across_processes"]
)  # fmt: skip
#: Ray Train's own calls that all its workers have to make. A report waits until all workers have come to it, or until
#: the one before has been taken from all; while it asks Ray it wakes up, and its number tells that it is the same one.
_RAY_TRAIN: Final = "ray/train/v2/_internal/execution/"
_RAY_BARRIERS: Final = f"{_RAY_TRAIN}collective_impl.py"
_RAY_REPORTS: Final = frozenset(["_sync_checkpoint_dir_name_across_ranks", "_wait_then_report"])
_RAY_NUMBER: Final = "report_call_index"
RAY_REPORT: Final = "ray.train.report"
#: Where Ray Train runs the program's function in a thread of its own; the main thread answers Ray meanwhile.
_TRAINS: Final = ((f"{_RAY_TRAIN}worker_group/thread_runner.py", "_run_target"),
                  ("ray/air/_internal/util.py", "run"))  # fmt: skip
_EXIT: Final = (("threading.py", "_shutdown"), ("multiprocessing/util.py", "_exit_function"),
                ("concurrent/futures/thread.py", "_python_exit"),
                ("torch/distributed/distributed_c10d.py", "destroy_process_group"))  # fmt: skip
_RPC_FILES: Final = "torch/distributed/rpc/"
#: Where debuggers wait for a person, at a prompt or in an editor.
_PROMPTS: Final = frozenset(["interaction", "do_wait_suspend", "wait_for_client"])
_DEBUGGERS: Final = re.compile(r"^(?:pdb\.py|IPython/\S*debugger\.py|ipdb/|pudb/|debugpy/|(?:_pydevd|pydevd))")
#: Where a thread does the work of a future, and where one waits for the processes of a pool.
_EXECUTOR: Final = "concurrent/futures/thread.py"
_POOLS: Final = frozenset(["multiprocessing/pool.py", "multiprocess/pool.py"])
#: Functions of torch that pickle an object beside the exchange of it, and call the program's own code for that.
_PICKLING: Final = frozenset(["_object_to_tensor", "_tensor_to_object"])
#: The arguments that tell group and peer.
_ARGUMENTS: Final = frozenset(["group", "src", "dst", "args", "kwargs", "to"])
#: Wrappers around what was called.
_AROUND: Final = ("torch/distributed/c10d_logger.py", "torch/utils/_contextlib.py", "torch/_ops.py", "contextlib.py",
                   "deepspeed/utils/nvtx.py")  # fmt: skip
_DISTRIBUTED: Final = re.compile(
    r"^torch/distributed/(?!elastic/|checkpoint/|run\.py|launcher/)|^torch/nn/parallel/distributed\.py"
)
#: Clients, which wait for an answer; who reads a socket without one may be a server that waits for a request.
_NETWORK: Final = re.compile(r"(?:^|/)(?:http/client|urllib/request|urllib3/\S+|requests/\S+|httpx/\S+)\.py$")
_LOCKS: Final = re.compile(
    r"(?:^|/)(?:threading|multiprocessing/(?:synchronize|popen_\w+|process)|filelock/\S+)\.py$"
    r"|^torch/utils/file_baton\.py$"
)
#: Where a process waits for work: queues and pipes, event loops, servers, RPC, and the loops of engines.
_IDLE: Final = re.compile(
    r"(?:^|/)(?:queue|selectors|socket|ssl|socketserver|asyncio/\w+|multiprocessing/(?:queues|connection|managers))\.py$"
    r"|^(?:uvloop|zmq|grpc)/|^torch/distributed/rpc/(?!internal)|^(?:vllm|sglang)/\S*(?:shm_broadcast|message_queue|zmq)\w*\.py$"
)
_IDLE_FUNCTIONS: Final = frozenset(
    ["serve_forever", "wait_for_termination", "run_forever", "main_loop", "run_busy_loop", "worker_busy_loop",
     "event_loop_normal", "event_loop_overlap"]
)  # fmt: skip
#: Waits for another thread's or process's word: of conditions, events, futures and semaphores.
_SIGNALS: Final = frozenset(["threading.py", "multiprocessing/synchronize.py"])
#: How many of the innermost frames may be those of a wait: threading's beneath a queue's, selectors' beneath asyncio's.
_INNERMOST: Final = 4
#: What a line calls tells what it stands in, where that is in C.
_LINES: Final = (
    (re.compile(r"\bstore\.(?:get|wait|set|add|check)\(|_store\(\)\.(?:get|wait)\("), Kind.STORE),
    (re.compile(r"\.to_here\("), Kind.RPC),
    (re.compile(r"\bos\.wait"), Kind.CHILD),
    (re.compile(r"(?<!event)\.wait\(\)|\bwork\.wait\(|\breq\w*\.wait\(|handle\w*\.wait\("), Kind.COLLECTIVE),
    (re.compile(r"\.(?:item|cpu|tolist|synchronize)\("), Kind.DEVICE),
    (re.compile(r"queue\w*\.get\(|\.recv\w*\(|\.accept\(|\binput\(|\bselect\.select\(|\.poll\(|signal\.(?:pause|sigwait)\w*\("),
     Kind.IDLE),
    (re.compile(r"\bsleep\("), Kind.SLEEP),
    (re.compile(r"\.acquire\(|\bwith \S*lock\b|\.join\(\)"), Kind.LOCK),
    (re.compile(r"\.(?:connect|sendall)\("), Kind.NETWORK),
    (re.compile(r"\bopen\(|\.(?:read|readline|readinto|write|flush)\(|\bos\.(?:read|write)\(|sync\(|flock\(|\b(?:save|load)\w*\("),
     Kind.FILE),
)  # fmt: skip
#: The place of a process of which no Python runs any more: C's exit handlers do, or a finalizer in C.
PAST_THE_END: Final = "(after the last line of Python)"
#: Package folders, which are left out of a file's name.
_PACKAGES: Final = re.compile(r"^.*/(?:site|dist)-packages/|^.*/lib/python3\.\d+/")
#: This library's own folder, and that beside which it lies.
_OWN: Final = str(Path(__file__).resolve().parents[1]) + "/"
_BESIDE: Final = str(Path(__file__).resolve().parents[2]) + "/"
_STANDARD: Final = re.compile(r"/lib/python3\.\d+/(?!(?:site|dist)-packages/)")
#: The outermost call of every program, until it ends.
_BEGINS: Final = re.compile(r"^<frozen|runpy\.py | <module>$")
#: Frames below every program.
_BELOW: Final = re.compile(r"^<frozen|(?:^|/)(?:runpy|threading)\.py$")


def short(file: str) -> str:
    """Return a file's name as a reader knows it: below its packages' folder, else its own name alone.

    >>> short("/opt/venv/lib/python3.11/site-packages/torch/optim/adam.py"), short("/home/me/job/train.py")
    ('torch/optim/adam.py', 'train.py')
    """
    if file.startswith(_OWN):  # not in a packages' folder where it is installed for development
        return file.removeprefix(_BESIDE)
    inside = _PACKAGES.sub("", file)
    return inside if inside != file else file.rpartition("/")[2]


def programs_line(stack: Sequence[str]) -> int | None:
    """Return which frame of a stack is the program's own innermost, None where no frame is.

    That is one of a file in no package; of a program that is installed, the innermost of neither torch, Ray nor Python.

    >>> programs_line(["train.py:67 main", "torch/utils/data/dataloader.py:725 __next__"])
    0
    """
    others = [number for number, frame in enumerate(stack) if ":" in frame and not _is_torchs_or_pythons(frame)]
    own = [number for number in others if "/" not in stack[number]]
    return max(own or others, default=None)


def _is_torchs_or_pythons(frame: str) -> bool:
    top = re.split(r"[/:]", frame, maxsplit=1)[0].removesuffix(".py")
    return top in ("torch", "ray") or top.startswith("<") or top in sys.stdlib_module_names


def parse(text: str) -> list[Thread]:
    """Return the threads in the output of `py-spy dump --json`. Raises ValueError for what is none."""
    threads = []
    try:
        for one in json.loads(text):
            frames = [
                Frame(frame["name"].rpartition(".")[2], frame["filename"], int(frame["line"]), *_known(frame))
                for frame in reversed(one["frames"])
            ]
            tid = int(one["os_thread_id"] or 0)
            threads.append(Thread(tid, one["thread_name"] or "", bool(one["owns_gil"]), tuple(frames)))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the output of py-spy: {error!r}") from error
    return threads


def _known(frame: dict[str, Any]) -> tuple[tuple[tuple[str, str], ...], int, int | None]:
    """Return the arguments of torch.distributed's functions, the group's address, and a rank; nothing else is kept."""
    values = {one["name"]: one for one in frame.get("locals") or []}
    if _RAY_TRAIN in frame["filename"] and _RAY_NUMBER in values:
        return ((_RAY_NUMBER, str(values[_RAY_NUMBER]["repr"])),), 0, None
    if "torch/distributed/" not in frame["filename"]:
        told = str(values["rank"]["repr"]) if "rank" in values else ""
        return (), 0, int(told) if told.isdigit() else None
    arguments = tuple((name, str(one["repr"])) for name, one in values.items() if name in _ARGUMENTS)
    group = values.get("group") or {}
    return arguments, int(group.get("addr") or 0) if "ProcessGroup " in str(group.get("repr")) else 0, None


def place_of(threads: Sequence[Thread], pid: int, source: Callable[[str, int], str]) -> tuple[Place, int] | None:
    """Return where a rank stands and in which of its threads; None without a stack.

    That is its main thread, or the one in which Ray Train runs the program, unless another one keeps the GIL, or it
    waits for another thread: one that is inside a collective (notebooks train in a thread), that answers another rank's
    RPC, or that does what a future stands for. The threads of this library are none of these: they take the GIL for
    moments, and wait for messages of their own. `source` returns a line of a file.
    """
    trains = next((one for one in threads if any((short(f.file), f.function) in _TRAINS for f in one.frames)), None)
    main = trains or next((one for one in threads if one.tid == pid or one.name == "MainThread"), None)
    if main is None:
        return None
    place = classify(main.frames, main.holds_gil, source)
    began = main is trains or (main.frames and _BEGINS.search(f"{main.frames[0].file} {main.frames[0].function}"))
    if main.frames and not place.inside and not began:
        place = replace(place, kind=Kind.EXIT)  # a callback of atexit, or a finalizer
    programs = [one for one in threads if one is not main and one.frames and not one.is_guards]
    keeps = next((one for one in programs if one.holds_gil), None)
    if keeps is not None and not place.inside:
        return classify(keeps.frames, True, source), keeps.tid
    if place.kind not in (Kind.LOCK, Kind.IDLE, Kind.EXIT, Kind.RPC) and not any(
        "/ray/" in f.file for f in main.frames
    ):
        return place, main.tid
    others = [(classify(one.frames, one.holds_gil, source), one) for one in programs]
    if place.kind is not Kind.RPC:
        for there, one in others:
            if there.kind in (Kind.COLLECTIVE, Kind.P2P, Kind.BACKWARD):
                return there, one.tid
    answers = sorted(((there, one) for there, one in others if there.serves), key=lambda pair: pair[0].inside)
    for there, one in answers if place.kind is not Kind.RPC else [pair for pair in answers if not pair[0].inside]:
        return there, one.tid
    if any(short(frame.file).startswith("concurrent/futures/") for frame in main.frames[-_INNERMOST:]):
        for there, one in others:
            if there.kind is not Kind.IDLE and any(
                short(f.file) == _EXECUTOR and f.function == "run" for f in one.frames
            ):
                return there, one.tid
    if place.kind is Kind.LOCK and any(there.kind is Kind.IDLE for there, _ in others):
        place = replace(place, kind=Kind.IDLE)  # it may wait for the thread that serves
    return place, main.tid


def classify(frames: Sequence[Frame], holds_gil: bool, source: Callable[[str, int], str]) -> Place:
    """Return where a thread stands, by its frames, outermost first; without any of them Python has come to its end."""
    if not frames:
        return Place(Kind.EXIT, holds_gil=holds_gil, stack=(PAST_THE_END,))
    kind, op, first = _kind(frames, source)
    world, peer = False, None
    if kind in INSIDE:
        inner = frames[first:]
        of_all = kind is Kind.BACKWARD or any(short(frame.file).startswith(_RAY_TRAIN) for frame in inner[:1])
        world = of_all or (_of_all(op, inner) if kind is Kind.SETUP else _for_world(inner))
        peer = _peer(inner) if kind is Kind.P2P else None
    programs = frames[:first] if kind in INSIDE else frames
    own = [frame for frame in programs if not _BELOW.search(short(frame.file))]
    numbers = [dict(frame.arguments).get(_RAY_NUMBER) for frame in frames if op == RAY_REPORT]
    report = next(filter(None, numbers), None)
    stack = tuple(str(frame) for frame in own) + ((f"{op} {report}" if report else op,) if kind in INSIDE else ())
    serves = any(frame.function == "_run_function" and short(frame.file).startswith(_RPC_FILES) for frame in frames)
    guarded = kind in INSIDE and any(short(frame.file).startswith("ncclguard/engine/") for frame in frames[first:])
    return Place(kind, op, world, peer, holds_gil, stack or (str(frames[-1]),), serves, guarded=guarded)


def _kind(frames: Sequence[Frame], source: Callable[[str, int], str]) -> tuple[Kind, str, int]:
    """Return the kind, torch's function, and from which frame on the stack is torch's."""
    files = [short(frame.file) for frame in frames]
    pickles = any(frame.function in _PICKLING and _DISTRIBUTED.search(short(frame.file)) for frame in frames)
    for number, (file, frame) in enumerate(zip(files, frames, strict=True)):
        if (file, frame.function) in _EXIT:
            return Kind.EXIT, frame.function, number
        if file == "torch/utils/data/_utils/worker.py":
            return Kind.WORKER, "", len(frames) - 1
        if (file, frame.function) == ("multiprocessing/managers.py", "serve_forever"):
            return Kind.MANAGER, "", len(frames) - 1
        if frame.function == "rpc_sync" and file.startswith(_RPC_FILES):
            return Kind.RPC, _rpc_sync(frame), number
        if _DISTRIBUTED.search(file) and not pickles:
            for names, kind in ((_SETUP, Kind.SETUP), (_P2P, Kind.P2P), (_COLLECTIVES, Kind.COLLECTIVE)):
                if frame.function in names:
                    return kind, frame.function.lstrip("_"), _before(files, number)
        if file in ("ncclguard/collectives.py", _RAY_BARRIERS):
            return Kind.COLLECTIVE, frame.function, number
        if file == f"{_RAY_TRAIN}context.py" and frame.function in _RAY_REPORTS:
            return Kind.COLLECTIVE, RAY_REPORT, number
    last = len(frames) - 1
    while last > 0 and files[last] in _AROUND:
        last -= 1
    inner = frames[last]
    if pickles and _DISTRIBUTED.search(files[last]):
        return Kind.PYTHON, "", last  # in C, and of no line that would tell
    if files[last].endswith("torch/distributed/rendezvous.py"):
        return Kind.SETUP, "rendezvous", last
    if inner.function == "_engine_run_backward":
        while last > 0 and files[last - 1].startswith("torch/"):
            last -= 1
        return Kind.BACKWARD, "backward", last
    return _other(frames, files, last, source)


def _other(
    frames: Sequence[Frame], files: Sequence[str], last: int, source: Callable[[str, int], str]
) -> tuple[Kind, str, int]:
    """Return the same for other code; a function in C is told by the line that calls it."""
    inner = frames[last]
    if "torch/utils/data/dataloader.py" in files:
        return Kind.LOADER, "", last
    if any(one.function in _PROMPTS and _DEBUGGERS.search(file) for file, one in zip(files, frames, strict=True)):
        return Kind.DEBUGGER, "", last
    if "subprocess.py" in files or _POOLS.intersection(files[-_INNERMOST:]):
        return Kind.CHILD, "", last
    if inner.function == "accept":
        return Kind.IDLE, "", last
    if any(_NETWORK.search(file) for file in files[-6:]) or inner.function == "create_connection":
        return Kind.NETWORK, "", last
    innermost = range(max(last - _INNERMOST + 1, 0), last + 1)
    if any(files[at] == "queue.py" and frames[at].function in ("put", "join") for at in innermost):
        return Kind.LOCK, "", last
    asks = inner.function == "wait" and files[last] in _SIGNALS or files[last].startswith("ray/_private/")
    if asks or any(_IDLE.search(files[at]) for at in innermost) or inner.function in _IDLE_FUNCTIONS:
        return Kind.IDLE, "", last
    if _LOCKS.search(files[last]):
        return Kind.LOCK, "", last
    if files[last].startswith("torch/cuda/"):
        return Kind.DEVICE, inner.function, last
    if inner.function == "wait" and not _STANDARD.search(inner.file):
        return Kind.COLLECTIVE, "wait", last  # of a handle that a backend in Python has made
    line = source(inner.file, inner.line)
    for pattern, kind in _LINES:
        if pattern.search(line):
            if kind is Kind.COLLECTIVE:
                return kind, "wait", len(frames)
            return (kind, str(kind), len(frames)) if kind in INSIDE else (kind, "", last)
    return (Kind.FILE if files[last] == "torch/serialization.py" else Kind.PYTHON), "", last


def _rpc_sync(frame: Frame) -> str:
    """Return the call with the name or rank that it is for, where py-spy writes it."""
    to = dict(frame.arguments).get("to", "")
    return f"rpc_sync({to})" if to[:1] == '"' or to.isdigit() else "rpc_sync"


def _before(files: Sequence[str], number: int) -> int:
    """Return the outermost of the wrappers right around a frame."""
    while number > 0 and files[number - 1] in _AROUND:
        number -= 1
    return number


def _for_world(frames: Sequence[Frame]) -> bool:
    """Tell whether torch's function was called for the default group: `group` is None, or no group was given."""
    if any(("group", "None") in frame.arguments for frame in frames):
        return True
    given = _given(frames)
    return not any(word in given for word in ("ProcessGroup", '"group"', "..."))  # which py-spy writes where it cuts


def _of_all(op: str, frames: Sequence[Frame]) -> bool:
    """Tell whether a call that sets a group up waits for all ranks: of a new group it waits for the members alone."""
    if op not in ("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"):
        return True
    return op == "new_group" and re.search(r"\[|range|\.\.\.", _given(frames)) is None


def _given(frames: Sequence[Frame]) -> str:
    """Return the arguments that torch's function was called with, as py-spy writes them; "..." where it does not."""
    told = [dict(frame.arguments) for frame in frames]
    return next((one["args"] + one["kwargs"] for one in told if "args" in one and "kwargs" in one), "...")


def _peer(frames: Sequence[Frame]) -> int | None:
    for frame in frames:
        for name, value in frame.arguments:
            if name in ("src", "dst") and value.isdigit():
                return int(value)
    return None
