"""CUDA's runtime and NCCL as their C functions, for tests that need no torch.

The libraries are those that torch of this environment would load: the emulator's, or NVIDIA's where its wheels lie.
"""

from __future__ import annotations

import ctypes
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ranks import Rank

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

SUCCESS, OUT_OF_MEMORY, INITIALIZATION_ERROR, NOT_READY, ILLEGAL_ADDRESS = 0, 2, 3, 600, 700
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_MERGE, CAPTURE_UNJOINED, CAPTURE_ISOLATION, CAPTURED_EVENT = (
    900, 901, 902, 904, 905, 907)  # fmt: skip
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NON_BLOCKING_STREAM = 1

NCCL_SUCCESS, UNHANDLED_CUDA_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = (
    0, 1, 3, 4, 5, 6, 7)  # fmt: skip
FLOAT, SUM, AVERAGE = 7, 0, 4


def _library(name: str) -> ctypes.CDLL:
    (path,) = Path(sysconfig.get_paths()["purelib"]).glob(f"nvidia/*/lib/{name}.so.*")
    return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


class Api:
    """Calls functions of a library by name; `cuda.cudaFree(p)` fails the test unless it returns success."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loaded: ctypes.CDLL | None = None  # in the rank, not in the process of the tests

    def raw(self, function: str, *arguments: Any) -> int:
        """Call and return the result."""
        if self._loaded is None:
            self._loaded = _library(self._name)
        result: int = getattr(self._loaded, function)(*arguments)
        return result

    def __getattr__(self, function: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            result = self.raw(function, *arguments)
            assert result == 0, f"{function} returned {result}"

        return call


cuda, nccl = Api("libcudart"), Api("libnccl")


def set_knob(name: str, value: object) -> None:
    """Change a setting of the emulator in this process."""
    library = _library("libcudart")
    library.emulated_gpu_set.restype = ctypes.c_char_p
    refused = library.emulated_gpu_set(name.encode(), str(value).encode())
    assert refused is None, refused


def handle(function: str, *arguments: Any, of: Api = cuda) -> ctypes.c_void_p:
    """Return what a function gives out as its first parameter."""
    made = ctypes.c_void_p()
    getattr(of, function)(ctypes.byref(made), *arguments)
    return made


def stream() -> ctypes.c_void_p:
    """Return a new stream, of the kind that torch makes."""
    return handle("cudaStreamCreateWithFlags", NON_BLOCKING_STREAM)


def event() -> ctypes.c_void_p:
    """Return a new event."""
    return handle("cudaEventCreateWithFlags", 0)


class Buffer:
    """Floats in the memory of the device."""

    def __init__(self, values: Sequence[float]) -> None:
        self.count, self.bytes = len(values), 4 * len(values)
        self.pointer = handle("cudaMalloc", ctypes.c_size_t(max(self.bytes, 1)))
        self.write(values)

    def write(self, values: Sequence[float]) -> None:
        """Fill it, after everything on the default stream."""
        data = (ctypes.c_float * self.count)(*values)
        cuda.cudaMemcpy(self.pointer, data, ctypes.c_size_t(self.bytes), 1)
        cuda.cudaDeviceSynchronize()

    def read(self) -> list[float]:
        """Return the values after everything on the default stream; other streams are not waited for."""
        data = (ctypes.c_float * self.count)()
        cuda.cudaMemcpy(data, self.pointer, ctypes.c_size_t(self.bytes), 2)
        return list(data)


class Gate:
    """A piece of work that holds a stream until `open()`: a function of the host, which may wait."""

    def __init__(self, on: ctypes.c_void_p) -> None:
        self._opened, self.reached = threading.Event(), threading.Event()
        self._function = HOST_FUNCTION(self._run)
        cuda.cudaLaunchHostFunc(on, self._function, None)

    def _run(self, _: object) -> None:
        self.reached.set()
        self._opened.wait()

    def open(self) -> None:
        """Let the stream go on."""
        self._opened.set()


def note(on: ctypes.c_void_p, into: list[str], what: str) -> Any:
    """Have a stream append to a list; the returned object must be kept until it has."""
    function = HOST_FUNCTION(lambda _: into.append(what))
    cuda.cudaLaunchHostFunc(on, function, None)
    return function


def query(of: ctypes.c_void_p) -> bool:
    """Whether a stream is idle."""
    result = cuda.raw("cudaStreamQuery", of)
    assert result in (SUCCESS, NOT_READY), result
    return result == SUCCESS


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Fail unless a condition comes true in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.002)


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """The beginning of ncclConfig_t."""

    _fields_ = (
        *(
            (name, kind)
            for name, kind in (("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint))
        ),
        *((name, ctypes.c_int) for name in ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs")),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int),
        ("commName", ctypes.c_char_p),
    )


def config(blocking: bool, name: str | None = None) -> Config:
    """Return a configuration whose other members are as NCCL_CONFIG_INITIALIZER leaves them."""
    undefined = -(2**31)
    made = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 22800, int(blocking))
    for member in ("cgaClusterSize", "minCTAs", "maxCTAs", "splitShare", "trafficClass"):
        setattr(made, member, undefined)
    if name is not None:
        made.commName = name.encode()
    return made


class Communicator:
    """One rank's handle of a communicator."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self.handle = handle

    @classmethod
    def begin(cls, rank: Rank, blocking: bool = True, name: str = "world", device: int = 0) -> tuple[Communicator, int]:
        """Call ncclCommInitRankConfig and return the handle and the result."""
        cuda.cudaSetDevice(device)
        made = UniqueId()
        if rank.rank == 0:
            nccl.ncclGetUniqueId(ctypes.byref(made))
            rank.publish(f"id-{name}", ctypes.string_at(ctypes.byref(made), 128))
        ctypes.memmove(ctypes.byref(made), rank.read(f"id-{name}"), 128)
        out = ctypes.c_void_p()
        settings = config(blocking, name)
        result = nccl.raw(
            "ncclCommInitRankConfig", ctypes.byref(out), rank.size, made, rank.rank, ctypes.byref(settings)
        )
        return cls(out), result

    @classmethod
    def make(cls, rank: Rank, blocking: bool = True, name: str = "world", device: int = 0) -> Communicator:
        """Make a communicator of all ranks and wait until it is ready."""
        made, result = cls.begin(rank, blocking, name, device)
        if not blocking:
            assert result == IN_PROGRESS, result
            result = made.settle()
        assert result == NCCL_SUCCESS, result
        return made

    def error(self) -> int:
        """Return ncclCommGetAsyncError's answer."""
        answer = ctypes.c_int(-1)
        nccl.ncclCommGetAsyncError(self.handle, ctypes.byref(answer))
        return answer.value

    def settle(self, seconds: float = 20) -> int:
        """Wait until the state is not "in progress" and return it."""
        wait_until(lambda: self.error() != IN_PROGRESS, seconds)
        return self.error()

    def all_reduce(self, buffer: Buffer, on: ctypes.c_void_p | None = None, op: int = SUM) -> int:
        """Reduce in place and return the result of the call."""
        count = ctypes.c_size_t(buffer.count)
        return nccl.raw("ncclAllReduce", buffer.pointer, buffer.pointer, count, FLOAT, op, self.handle, on)

    def all_gather(self, one: Buffer, all_of_them: Buffer, on: ctypes.c_void_p | None = None) -> int:
        """Gather and return the result of the call."""
        count = ctypes.c_size_t(one.count)
        return nccl.raw("ncclAllGather", one.pointer, all_of_them.pointer, count, FLOAT, self.handle, on)

    def broadcast(self, buffer: Buffer, root: int, on: ctypes.c_void_p | None = None) -> int:
        """Broadcast in place and return the result of the call."""
        count = ctypes.c_size_t(buffer.count)
        return nccl.raw("ncclBroadcast", buffer.pointer, buffer.pointer, count, FLOAT, root, self.handle, on)

    def send(self, buffer: Buffer, peer: int, on: ctypes.c_void_p | None = None) -> int:
        """Send and return the result of the call."""
        return nccl.raw("ncclSend", buffer.pointer, ctypes.c_size_t(buffer.count), FLOAT, peer, self.handle, on)

    def receive(self, buffer: Buffer, peer: int, on: ctypes.c_void_p | None = None) -> int:
        """Receive and return the result of the call."""
        return nccl.raw("ncclRecv", buffer.pointer, ctypes.c_size_t(buffer.count), FLOAT, peer, self.handle, on)

    def split(self, color: int, key: int) -> tuple[ctypes.c_void_p, int]:
        """Call ncclCommSplit; the handle is filled when the parent is ready."""
        out = ctypes.c_void_p()
        return out, nccl.raw("ncclCommSplit", self.handle, color, key, ctypes.byref(out), None)

    def shrink(self, excluded: Sequence[int], abort: bool) -> tuple[ctypes.c_void_p, int]:
        """Call ncclCommShrink."""
        out, ranks = ctypes.c_void_p(), (ctypes.c_int * len(excluded))(*excluded)
        return out, nccl.raw("ncclCommShrink", self.handle, ranks, len(excluded), ctypes.byref(out), None, int(abort))

    def number(self, question: str) -> int:
        """Ask ncclCommCount or ncclCommUserRank."""
        answer = ctypes.c_int(-1)
        getattr(nccl, question)(self.handle, ctypes.byref(answer))
        return answer.value

    def abort(self) -> int:
        """Call ncclCommAbort."""
        return nccl.raw("ncclCommAbort", self.handle)


def connected(rank: Rank) -> tuple[Communicator, ctypes.c_void_p, Buffer]:
    """Return a communicator that has its connections, and the stream and buffer of the all-reduce that made them."""
    comm, one, buffer = Communicator.make(rank), stream(), Buffer([1.0])
    comm.all_reduce(buffer, one)
    cuda.cudaStreamSynchronize(one)
    return comm, one, buffer


def held_up(call: Callable[[], object], release: Callable[[], object]) -> tuple[bool, bool]:
    """Return whether a call, in a thread of its own, has not come back before `release()`, and whether not after it."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.4)
    before = thread.is_alive()
    release()
    thread.join(20)
    return before, thread.is_alive()
