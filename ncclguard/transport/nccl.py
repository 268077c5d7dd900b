"""An NCCL communicator for CUDA tensors. Run on an emulated GPU, not yet on a real one.

Four things differ from the transport of CPU tensors.

- An abort may hang, so it runs in a thread of its own with a limit, and a communicator whose abort hangs is left behind
  for good, together with the memory it was given: callers hand over staging memory, never the user's, and must not
  reuse it unless `NcclCommunicator.quiet` says so.
- An aborted operation looks completed (its kernel has exited, and errors of an aborted communicator are not looked at
  any more), so that this rank aborted is remembered here and looked at first.
- A launch may block on a peer as well: NCCL connects ranks when an algorithm is first used (NCCL_RUNTIME_CONNECT), and
  torch then spins in C++ where no abort reaches it. So another thread launches, and an operation that is not launched
  yet is one that is not complete yet.
- A rank that comes late would leave kernels of all others spinning on their GPUs, so votes go over the host's
  network: an NCCL kernel starts only when every rank has passed the opening round.

Collectives of lists are done on one flat tensor: torch's own keep a hidden one, which goes back to the allocator as
soon as any stream waits for the operation (torch 2.8 on, ``synchronizeStream``), while the kernel may still use it.

A second communicator beside collectives in flight on other streams can deadlock when ranks launch the two in different
orders (NCCL user guide, "Using multiple NCCL communicators concurrently"). `safe_*` calls belong at synchronisation
points. Its stream and the one it is waited for on are from torch's pool, which hands out the same 32 streams to
everybody in turn: what the program has queued on the same one is waited for too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from .. import _torch_nccl
from . import dtypes
from .base import Agreement, Communicator, Pending, Save, TransportError
from .bounded import Background, in_background, keep_for_ever
from .launching import Launch, Launcher
from .nccl_pending import Launched, NcclPending, failure
from .streams import StreamCommunicator

_log = logging.getLogger("ncclguard")

_STOP_WAIT = 0.08  # seconds that stop() itself waits: its contract is 100 ms
_ABORT_WITHIN = 10.0  # seconds after which an abort counts as hung
_CLOSE_WAIT = 1.0  # seconds that close() waits
_PAUSE = 0.001  # seconds between two looks at what is to become quiet
_ASK_SLICE = 0.05  # seconds between two looks at the communicator while another thread asks NCCL or aborts
_LAUNCHED_WITHIN = 0.2  # seconds that an abort waits for a launch to come back
_ASKED_WITHIN = 1.0  # seconds that an abort waits for an answer of NCCL in another thread

_live: weakref.WeakSet[NcclCommunicator] = weakref.WeakSet()


class NcclCommunicator(Communicator):
    """See `Communicator`. Made by `NcclBuilder.build`."""

    device_type = "cuda"
    payload_nbytes = 0  # the data is on the GPU

    def __init__(self, group: Any, votes: StreamCommunicator, device: torch.device) -> None:
        self.ranks = votes.ranks
        self.index = votes.index
        self.size = votes.size
        self.generation = votes.generation
        self.device = device
        self._group = group
        self._votes = votes
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._stopped = False
        self._aborted = threading.Event()
        self._aborter: Background | None = None
        # An abort holds torch's own lock of the communicator, which a question for errors needs too.
        self._asking = threading.Lock()
        self._launching = threading.Lock()  # held during each launch; see _abort
        self._probe = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._launcher = Launcher(f"launching on generation {self.generation}")
        # Once for the thread: leaving the context of a stream sets the device of before,
        # which would begin to use GPU 0.
        self._launcher.submit(Launch(functools.partial(torch.cuda.set_device, device)))
        # Operations with the tensors they use: neither may be freed while a kernel can still touch them.
        self._flying: dict[NcclPending, tuple[torch.Tensor, ...]] = {}
        _live.add(self)

    # --- operations -----------------------------------------------------------------------------------------------

    @property
    def host(self) -> StreamCommunicator:
        return self._votes

    def agree(self, value: int, payload: torch.Tensor | None = None) -> Agreement:
        """See `Communicator.agree`; over the host's network, where waiting for a late rank can be ended reliably."""
        self.check()
        return self._votes.agree(value)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType, save: Save | None = None) -> NcclPending:
        options = dist.AllreduceOptions()
        options.reduceOp = dtypes.NCCL.wire_op(op, tensor.dtype)  # type: ignore[assignment]
        wire = dtypes.reducible_view(tensor, self.device.type)
        return self._start((wire,), lambda group: group.allreduce([wire], options))

    def broadcast(self, tensor: torch.Tensor, source_index: int, save: Save | None = None) -> NcclPending:
        options = dist.BroadcastOptions()
        options.rootRank = source_index
        options.rootTensor = 0
        wire = dtypes.movable_view(tensor, self.device.type)
        return self._start((wire,), lambda group: group.broadcast([wire], options))

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> NcclPending:
        wire = dtypes.movable_view(tensor, self.device.type).reshape(-1)
        wires = [dtypes.movable_view(output, self.device.type).reshape(-1) for output in outputs]
        with _errors_of_torch():
            flat = wire.new_empty(wire.numel() * self.size)

        def distribute() -> None:
            for part, output in zip(flat.chunk(self.size), wires, strict=True):
                output.copy_(part)

        return self._start((wire, flat, *wires), lambda group: group._allgather_base(flat, wire), distribute)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp.RedOpType) -> Pending:
        """See `Communicator.reduce_scatter`, with one difference: ``output`` is written on
        the GPU, before `Pending.wait` says so.
        """
        options = dist.ReduceScatterOptions()
        options.reduceOp = dtypes.NCCL.wire_op(op, output.dtype)  # type: ignore[assignment]
        wire = dtypes.reducible_view(output, self.device.type).reshape(-1)
        with _errors_of_torch():
            flat = torch.cat([dtypes.reducible_view(tensor, self.device.type).reshape(-1) for tensor in inputs])
        return self._start((wire, flat), lambda group: group._reduce_scatter_base(wire, flat, options))

    def reduce(self, tensor: torch.Tensor, root_index: int, op: ReduceOp.RedOpType) -> NcclPending:
        options = dist.ReduceOptions()
        options.reduceOp = dtypes.NCCL.wire_op(op, tensor.dtype)  # type: ignore[assignment]
        options.rootRank = root_index
        wire = dtypes.reducible_view(tensor, self.device.type)
        return self._start((wire,), lambda group: group.reduce([wire], options))

    def gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor], root_index: int) -> NcclPending:
        options = dist.GatherOptions()
        options.rootRank = root_index
        gathered = [list(outputs)] if outputs else []
        return self._start((tensor, *outputs), lambda group: group.gather(gathered, [tensor], options))

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root_index: int) -> NcclPending:
        options = dist.ScatterOptions()
        options.rootRank = root_index
        sent = [list(inputs)] if inputs else []
        return self._start((output, *inputs), lambda group: group.scatter([output], sent, options))

    def all_to_all(self, output: torch.Tensor, sizes: Sequence[int], inputs: Sequence[torch.Tensor]) -> NcclPending:
        with _errors_of_torch():
            sent = torch.cat(list(inputs))
        received_sizes, sent_sizes = list(sizes), [part.numel() for part in inputs]
        return self._start((output, sent), lambda group: group.alltoall_base(output, sent, received_sizes, sent_sizes))

    def all_gather_uneven(self, sizes: Sequence[int], data: torch.Tensor) -> tuple[Pending, list[torch.Tensor]]:
        return self._votes.all_gather_uneven(sizes, data)

    def _start(
        self,
        tensors: tuple[torch.Tensor, ...],
        call: Callable[[Any], dist.Work],
        afterwards: Callable[[], None] | None = None,
    ) -> NcclPending:
        """Have an operation queued behind the caller's current stream, and then
        ``afterwards()``, which queues more of it.
        """
        for tensor in tensors:
            if tensor.device != self.device:
                raise ValueError(
                    f"this communicator is on {self.device}, the tensor on {tensor.device}: use one device a process"
                )
        with torch.cuda.device(self.device):
            capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            raise ValueError(
                "a guarded collective cannot be captured into a CUDA graph: call it outside of the capture"
            )
        self.check()
        group, stream, probe = self._group, torch.cuda.current_stream(self.device), self._probe

        def launch() -> Launched:
            with self._launching, torch.cuda.stream(stream):
                self.check()  # stopped while it waited for its turn
                work = call(group)
                with torch.cuda.stream(probe):
                    work.synchronize()  # makes the probe stream wait, not this thread
                    if afterwards is not None:
                        afterwards()
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record(probe)
            return work, event

        pending = NcclPending(self, Launch(launch))
        with self._lock:
            self._flying[pending] = tensors
            for earlier in tuple(itertools.takewhile(NcclPending.over, self._flying)):  # they end in order
                del self._flying[earlier]
        self._launcher.submit(pending.launch)
        return pending

    # --- what operations ask ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise TransportError once the communicator was stopped."""
        if self._stopped:
            raise TransportError(f"the communicator (generation {self.generation}) was stopped: build the next one")

    def ask(self, work: dist.Work) -> None:
        """Raise TransportError for an error that NCCL has seen. Never while the
        communicator is aborted, which may hang.
        """
        while not self._asking.acquire(timeout=_ASK_SLICE):
            self.check()
        try:
            self.check()
            error = work.exception() if work.is_completed() else None
        except RuntimeError as raised:
            raise TransportError(str(raised)) from raised
        finally:
            self._asking.release()
        if error is not None:
            raise TransportError(str(error))

    def complete(self, pending: NcclPending) -> None:
        """An operation is over; its tensors may be freed."""
        with self._lock:
            self._flying.pop(pending, None)

    @property
    def aborted(self) -> bool:
        """Whether an abort has come back. NCCL frees the communicator's memory in it, so
        that no kernel can still run.
        """
        return self._aborted.is_set()

    # --- ending ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        end = time.monotonic() + _STOP_WAIT
        with self._lock:
            first = not self._stopped
            self._stopped = True  # before the abort: from here on "completed" means nothing
            if first and self._group is not None and self._pid == os.getpid():
                # None at interpreter exit, when there are no threads: an abort that hangs must not hang the exit.
                self._aborter = in_background("abort", functools.partial(self._abort, self._group))
        self._votes.stop()
        if self._aborter is not None:
            self._aborter.ended(end - time.monotonic())

    def _abort(self, group: Any) -> None:
        warn = threading.Timer(_ABORT_WITHIN, self._report_hung)
        warn.daemon = True
        with contextlib.suppress(RuntimeError):  # interpreter exit: no threads any more
            warn.start()
        # Between two launches: one that is under way when its communicator is taken away polls a null handle, whose
        # state NCCL does not write, until TORCH_NCCL_NONBLOCKING_TIMEOUT (NCCLUtils.hpp, C10D_NCCL_CHECK_TIMEOUT_BASE;
        # torch 2.13: 11 of 20 aborts during launches). One that waits for a missing peer does that all the same.
        if self._launching.acquire(timeout=_LAUNCHED_WITHIN):
            self._launching.release()
        asked = self._asking.acquire(timeout=_ASKED_WITHIN)
        try:
            abort_group(group, self.device)
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread; "Future for ProcessGroup abort timed out"
            _log.error("ncclguard: aborting the NCCL communicator of generation %d failed: %s", self.generation, error)
        else:
            self._aborted.set()
        finally:
            if asked:
                self._asking.release()
            warn.cancel()

    def _report_hung(self) -> None:
        _log.error(
            "ncclguard: aborting the NCCL communicator of generation %d has not returned for %g s (ncclCommAbort hangs in some "
            "versions: 2.25.1, 2.18.1). It is left behind with its staging memory; if the next one cannot be built, restart "
            "this process.",
            self.generation,
            _ABORT_WITHIN,
        )

    def quiet(self, seconds: float) -> bool:
        """See `Communicator.quiet`: no launch is outstanding and every kernel has ended.
        False for good if an abort hangs.
        """
        end = time.monotonic() + seconds
        if not self._votes.quiet(seconds):
            return False
        with self._lock:
            flying = tuple(self._flying)
        for pending in flying:
            while not pending.over():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                time.sleep(min(_PAUSE, left))
        return True

    def close(self) -> None:
        if not self.quiet(0):
            self.stop()
        self.quiet(_CLOSE_WAIT)
        self._votes.close()
        self._launcher.close()
        with self._lock:
            healthy, self._stopped = not self._stopped, True
            group, self._group = self._group, None
            flying, self._flying = self._flying, {}
        if group is None:
            return
        if healthy and self._pid == os.getpid():
            closer = in_background("close", functools.partial(_shut, [group]))
            del group
            if closer is not None:
                closer.ended(_CLOSE_WAIT)
            return
        aborted = self._aborted.wait(_CLOSE_WAIT if self._aborter is not None else 0)
        if not (aborted and all(pending.over() for pending in flying)):
            # The destructor would wait for the kernels, and the memory is theirs as long as they run.
            keep_for_ever(group)
            keep_for_ever(flying)

    def leave_to_parent(self) -> None:
        """In a forked child: the CUDA context is the parent's."""
        self._lock = threading.RLock()
        self._stopped = True
        keep_for_ever((self._group, self._flying))
        self._group, self._flying = None, {}


def abort_group(group: Any, device: torch.device) -> None:
    """Abort an NCCL group; blocks for as long as NCCL does."""
    with torch.cuda.device(device):
        group.abort()


def _shut(last: list[Any]) -> None:
    """Release a healthy group, of which this is the only reference: its destructor is to run here."""
    try:
        _torch_nccl.shut_nccl_group(last[0])
    except RuntimeError as error:
        _log.warning("ncclguard: releasing an NCCL communicator failed, its memory may stay in use: %s", error)
    last.clear()


@contextlib.contextmanager
def _errors_of_torch() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise failure(error) from error


def _close_all() -> None:
    for communicator in tuple(_live):
        communicator.close()


def _leave_to_parent() -> None:
    for communicator in tuple(_live):
        communicator.leave_to_parent()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_to_parent)
