"""An NCCL communicator for CUDA tensors. Written from the sources of torch and NCCL, not yet run on a GPU.

Three things differ from gloo. An abort may hang, so it runs in a thread of its own with a limit, and a communicator whose
abort hangs is left behind for good, together with the memory it was given: callers hand over staging memory, never the
user's, and must not reuse it unless `NcclCommunicator.quiet` says so. An aborted operation looks completed (its kernel has
exited, and errors of an aborted communicator are not looked at any more), so that this rank aborted is remembered here and
looked at first. And a rank that comes late would leave kernels of all others spinning on their GPUs, so votes go over gloo:
an NCCL kernel starts only when every rank has passed the opening round.

A second communicator beside collectives in flight on other streams can deadlock when ranks launch the two in different
orders (NCCL user guide, "Using multiple NCCL communicators concurrently"). `safe_*` calls belong at synchronisation points.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from .. import _torch, _torch_stores
from . import dtypes
from .base import Agreement, Communicator, Kind, Pending, Reduction, TransportError
from .bounded import bounded
from .gloo import GlooBuilder, GlooCommunicator, keep_for_ever

_log = logging.getLogger("ncclguard")

_STOP_WAIT = 0.08  # seconds that stop() itself waits: its contract is 100 ms
_ABORT_WITHIN = 10.0  # seconds after which an abort counts as hung
_CLOSE_WAIT = 1.0  # seconds that close() waits
_LONGEST_PAUSE = 0.001  # seconds between two looks at a CUDA event

_live: weakref.WeakSet[NcclCommunicator] = weakref.WeakSet()


class NcclPending(Pending):
    """One operation of an NCCL group; complete when ``event`` has been reached on the GPU and nobody has aborted."""

    __slots__ = ("_communicator", "_done", "_event", "_work")

    def __init__(self, communicator: NcclCommunicator, work: dist.Work, event: torch.cuda.Event) -> None:
        self._communicator = communicator
        self._work = work
        self._event = event
        self._done = False

    def wait(self, seconds: float) -> bool:
        """See `Pending.wait`. Polls: ``Work.wait(timedelta)`` would abort the communicator when the slice is over."""
        end = time.monotonic() + seconds
        pause = 0.00002
        while not self._done:
            self._communicator.check()
            reached = self.reached()
            self._communicator.check()  # an abort makes the event come too, and sets its flag before
            if self._work.is_completed():  # also asks NCCL for errors of the communicator
                error = self._work.exception()
                if error is not None:
                    raise TransportError(str(error))
            if reached:
                self._done = True
                break
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def reached(self) -> bool:
        """Whether the kernel has ended, for whatever reason. Raises TransportError when CUDA itself is broken."""
        try:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise TransportError(str(error)) from error


class NcclCommunicator(Communicator):
    """See `Communicator`. Made by `NcclBuilder.build`."""

    device_type = "cuda"
    max_in_flight = 64  # pieces are queued on the GPU, not waited for one by one
    payload_nbytes = 0  # the data is on the GPU

    def __init__(self, group: Any, votes: GlooCommunicator, device: torch.device) -> None:
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
        self._aborter: threading.Thread | None = None
        self._probe = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Operations with the tensors they use: neither may be freed while a kernel can still touch them.
        self._flying: list[tuple[NcclPending, tuple[torch.Tensor, ...]]] = []
        _live.add(self)

    # --- operations -----------------------------------------------------------------------------------------------

    @property
    def host(self) -> GlooCommunicator:
        return self._votes

    def agree(self, value: int, payload: torch.Tensor | None = None) -> Agreement:
        """See `Communicator.agree`; over the host's network, where waiting for a late rank can be ended reliably."""
        self.check()
        return self._votes.agree(value)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> NcclPending:
        options = dist.AllreduceOptions()
        options.reduceOp = dtypes.NCCL.wire_op(op, tensor.dtype)  # type: ignore[assignment]
        wire = dtypes.reducible_view(tensor, "cuda")
        return self._start((wire,), lambda group: group.allreduce([wire], options))

    def broadcast(self, tensor: torch.Tensor, source_index: int) -> NcclPending:
        options = dist.BroadcastOptions()
        options.rootRank = source_index
        options.rootTensor = 0
        wire = dtypes.movable_view(tensor, "cuda")
        return self._start((wire,), lambda group: group.broadcast([wire], options))

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> NcclPending:
        wire = dtypes.movable_view(tensor, "cuda")
        wires = [dtypes.movable_view(output, "cuda") for output in outputs]
        return self._start((wire, *wires), lambda group: group.allgather([wires], [wire]))

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp.RedOpType) -> Pending:
        """See `Communicator.reduce_scatter`, with one difference: ``output`` is written on the GPU, before `Pending.wait` says so."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = dtypes.NCCL.wire_op(op, output.dtype)  # type: ignore[assignment]
        wire = dtypes.reducible_view(output, "cuda")
        wires = [dtypes.reducible_view(tensor, "cuda") for tensor in inputs]
        return self._start((wire, *wires), lambda group: group.reduce_scatter([wire], [wires], options))

    def native(self, tensors: tuple[torch.Tensor, ...], call: Callable[[Any], dist.Work]) -> NcclPending:
        return self._start(tensors, call)

    def reduction(self, op: ReduceOp.RedOpType) -> Reduction:
        return dtypes.NCCL.reduction(op, self.size)

    def set_backstop(self, seconds: float) -> None:
        """See `Communicator.set_backstop`: of the votes. An NCCL operation has none, its watchdog only reports here."""
        self._votes.set_backstop(seconds)

    def _start(self, tensors: tuple[torch.Tensor, ...], call: Callable[[Any], dist.Work]) -> NcclPending:
        """Queue an operation behind the caller's current stream."""
        for tensor in tensors:
            if tensor.device != self.device:
                raise ValueError(
                    f"this communicator is on {self.device}, the tensor on {tensor.device}: use one device a process"
                )
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a guarded collective cannot be captured into a CUDA graph: call it outside of the capture"
            )
        self.check()
        # Not under the lock: launching can block on a peer, and stop() must get through to abort it then.
        with torch.cuda.device(self.device):
            work = call(self._group)
            with torch.cuda.stream(self._probe):
                work.wait()  # makes the probe stream wait, not this thread
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._probe)
        pending = NcclPending(self, work, event)
        with self._lock:
            self._flying = [entry for entry in self._flying if not entry[0].reached()]
            self._flying.append((pending, tensors))
        return pending

    def check(self) -> None:
        """Raise TransportError once the communicator was stopped."""
        if self._stopped:
            raise TransportError(f"the communicator (generation {self.generation}) was stopped: build the next one")

    # --- ending ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        with self._lock:
            first = not self._stopped
            self._stopped = True  # before the abort: from here on "completed" means nothing
            if first and self._group is not None and self._pid == os.getpid():
                self._aborter = threading.Thread(
                    target=self._abort, args=(self._group,), name="ncclguard-abort", daemon=True
                )
                try:
                    self._aborter.start()
                except (
                    RuntimeError
                ):  # interpreter exit: no threads any more, and an abort that hangs must not hang the exit
                    self._aborter = None
        self._votes.stop()
        if self._aborter is not None:
            self._aborter.join(_STOP_WAIT)

    def _abort(self, group: Any) -> None:
        warn = threading.Timer(_ABORT_WITHIN, self._report_hung)
        warn.daemon = True
        warn.start()
        try:
            with torch.cuda.device(self.device):
                group.abort()
        except RuntimeError as error:  # "Future for ProcessGroup abort timed out"
            _log.error("ncclguard: aborting the NCCL communicator of generation %d failed: %s", self.generation, error)
        else:
            self._aborted.set()
        finally:
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
        """See `Communicator.quiet`: every kernel has ended. False for good if an abort hangs."""
        end = time.monotonic() + seconds
        if not self._votes.quiet(seconds):
            return False
        with self._lock:
            flying = tuple(pending for pending, _ in self._flying)
        for pending in flying:
            while not pending.reached():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                time.sleep(min(_LONGEST_PAUSE, left))
        return True

    def close(self) -> None:
        with contextlib.suppress(TransportError):  # CUDA itself is broken: nothing left to wait for
            if not self.quiet(0):
                self.stop()
            self.quiet(_CLOSE_WAIT)
        self._votes.close()
        with self._lock:
            healthy, self._stopped = not self._stopped, True
            group, self._group = self._group, None
            flying, self._flying = self._flying, []
        if group is None:
            return
        if healthy and self._pid == os.getpid():
            last = [group]
            del group

            def shut() -> None:
                try:
                    _torch.shut_nccl_group(last[0])
                except RuntimeError as error:
                    _log.warning(
                        "ncclguard: releasing an NCCL communicator failed, its memory may stay in use: %s", error
                    )
                last.clear()

            closer = threading.Thread(target=shut, name="ncclguard-close", daemon=True)
            with contextlib.suppress(RuntimeError):  # interpreter exit: no threads any more
                closer.start()
                closer.join(_CLOSE_WAIT)
        elif not self._aborted.wait(_CLOSE_WAIT if self._aborter is not None else 0):
            # The destructor would wait for the kernels, and the memory is theirs as long as they run.
            keep_for_ever(group)
            keep_for_ever(flying)

    def leave_to_parent(self) -> None:
        """In a forked child: the CUDA context is the parent's."""
        self._lock = threading.RLock()
        self._stopped = True
        keep_for_ever(self._group)


class NcclBuilder:
    """Builds `NcclCommunicator`, see `Builder`.

    On ``device``; by default the one that ``init_process_group`` was bound to, else the current one of the calling thread.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device | None = None) -> None:
        if device is None:
            default = dist.group.WORLD
            device = default.bound_device_id if default is not None else None
        self.device = device if device is not None else torch.device("cuda", torch.cuda.current_device())

    def check_supported(self, kind: Kind, dtype: torch.dtype, op: object = None) -> None:
        dtypes.NCCL.check(kind, dtype, op)

    def build(
        self,
        store: _torch.Store,
        prefix: str,
        ranks: tuple[int, ...],
        index: int,
        generation: int,
        backstop: float,
        seconds: float,
    ) -> NcclCommunicator:
        end = time.monotonic() + seconds
        # Gloo first: it shows in bounded time whether everybody is there, and NCCL's start cannot be ended as surely.
        votes = GlooBuilder().build(store, f"{prefix}/votes", ranks, index, generation, backstop, seconds)
        groups: list[Any] = []

        def connect() -> NcclCommunicator:
            torch.cuda.set_device(self.device)
            keys = _torch.PrefixStore(f"{prefix}/nccl", store)
            group = _torch.new_nccl_group(keys, index, len(ranks), timedelta(seconds=backstop))
            groups.append(group)
            group.eager_connect_single_device(self.device)
            communicator = NcclCommunicator(group, votes, self.device)
            # The first operation makes the connections: it belongs to building.
            first = communicator.all_reduce(torch.zeros(1, device=self.device), ReduceOp.SUM)
            while not first.wait(0.1):
                if time.monotonic() >= end:
                    raise TransportError("the first NCCL operation did not complete")
            return communicator

        def give_up() -> None:
            _torch_stores.disconnect(store)
            for group in groups:
                threading.Thread(target=group.abort, name="ncclguard-abort", daemon=True).start()

        what = f"connecting rank {ranks[index]} with {len(ranks) - 1} peers over NCCL"
        try:
            return bounded(what, connect, end - time.monotonic(), give_up)
        except BaseException:
            votes.stop()
            votes.close()
            raise


def _close_all() -> None:
    for communicator in tuple(_live):
        communicator.close()


def _leave_to_parent() -> None:
    for communicator in tuple(_live):
        communicator.leave_to_parent()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_to_parent)
