"""CUDA tensors over NCCL: communicators of the guard's own, built, used and aborted within bounds."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from ncclguard import torch_compat
from ncclguard.transport import memory
from ncclguard.transport.base import Agreement, Communicator, Kind, Pending, Save, TransportError, live
from ncclguard.transport.bounded import Background, bounded, in_background, keep_for_ever
from ncclguard.transport.streams import StreamBuilder, StreamCommunicator
from ncclguard_explain.language import told

T = TypeVar("T")


class Launch(Generic[T]):
    """One call for `Launcher.submit`; once ``finished``, it has a ``result`` or the ``error`` that it raised."""

    __slots__ = ("_call", "_running", "error", "finished", "result")

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._running = threading.Lock()  # cheaper than an Event, and there is one for each piece of a large tensor
        self._running.acquire()
        self.finished = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def ended(self, seconds: float) -> bool:
        """Wait up to ``seconds`` and return whether the call has come back."""
        if not self.finished and self._running.acquire(timeout=max(0.0, seconds)):
            self._running.release()
        return self.finished

    def run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            self.result = call()
        except BaseException as error:  # noqa: BLE001 - for whoever waits for it
            self.error = error
        finally:
            del call
            self.finished = True
            self._running.release()


class Launcher:
    """The thread that runs the launches, until `close`.

    A call that never comes back keeps it, and interpreter exit waits for it with a bound.
    """

    def __init__(self, what: str) -> None:
        self._queue: queue.SimpleQueue[Launch[object] | None] = queue.SimpleQueue()
        calls = self._queue  # the thread must not keep its owner alive
        if in_background(what, lambda: _run_all(calls), self.close) is None:
            raise TransportError(f"{what} cannot begin: the program has ended")

    def submit(self, launch: Launch[T]) -> None:
        """Run a launch after all that were submitted before; returns at once."""
        self._queue.put(launch)  # type: ignore[arg-type]

    def close(self) -> None:
        """Accept no more launches: the thread ends after those that were submitted."""
        self._queue.put(None)


def _run_all(calls: queue.SimpleQueue[Launch[object] | None]) -> None:
    with torch.inference_mode():  # in which results that are inference tensors may be written, and all others too
        while (launch := calls.get()) is not None:
            launch.run()
            del launch  # frees its tensors while the thread waits for the next launch


_LAUNCH_SLICE = 0.05  # seconds between two checks of the communicator while a launch does not come back
_LONGEST_PAUSE = 0.001  # seconds between two queries of a CUDA event
_ASK_EVERY = 0.1  # seconds between two questions for errors of the communicator
# Seconds for which torch may count an operation as complete whose event the GPU has not reached. An error that torch
# cannot hand over (`torch_compat.error_of`) shows in nothing else; on a busy machine a second is also a healthy delay.
_REACHED_WITHIN = 5.0

#: An operation, the event behind what NCCL does for it, and the event behind all of it.
Launched = tuple[dist.Work, torch.cuda.Event, torch.cuda.Event]


class Owner(Protocol):
    """The communicator, as its operations see it."""

    @property
    def aborted(self) -> bool:
        """Return whether it was aborted, and that has ended."""

    def check(self) -> None:
        """Raise TransportError once it was stopped."""

    def ask(self, work: dist.Work) -> bool:
        """Return whether torch counts an operation as complete; raises TransportError if NCCL has an error."""

    def complete(self, pending: NcclPending) -> None:
        """Forget an operation that is complete, with the tensors that were kept for it."""


class NcclPending(Pending):
    """One operation of an NCCL group; complete when the GPU has reached its event and nobody has aborted."""

    __slots__ = ("_ask_at", "_complete_at", "_done", "_owner", "launch")

    def __init__(self, owner: Owner, launch: Launch[Launched]) -> None:
        self.launch = launch
        self._owner = owner
        self._done = False
        self._ask_at = 0.0
        self._complete_at = math.inf

    def wait(self, seconds: float) -> bool:
        """Wait as `Pending.wait` says, by polling.

        torch's own ``wait`` would block, and with a timeout abort the communicator when that is over.
        """
        if self._done:
            return True
        end = time.monotonic() + seconds
        self._owner.check()
        while not self.launch.ended(min(_LAUNCH_SLICE, end - time.monotonic())):
            self._owner.check()
            if time.monotonic() >= end:
                return False
        launched = self._launched()
        pause = 0.00002
        while not self._poll(*launched):
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._done = True
        self._owner.complete(self)
        return True

    def _launched(self) -> Launched:
        """Return the result of the launch, or raise its error as `failure` translates it."""
        error = self.launch.error
        if error is not None:
            self._owner.check()  # first: "communicator was aborted" is only the consequence of a stop
            raise failure(error) from error
        assert self.launch.result is not None
        return self.launch.result

    def _poll(self, work: dist.Work, arrived: torch.cuda.Event, event: torch.cuda.Event) -> bool:
        self._owner.check()
        try:
            reached = bool(event.query())  # type: ignore[no-untyped-call]
            ended = reached or bool(arrived.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise failure(error) from error
        self._owner.check()  # an abort completes the event as well, and sets its flag before
        now = time.monotonic()
        if self._ask_at == 0.0:
            self._ask_at = now + _ASK_EVERY
        if reached or now >= self._ask_at:
            self._complete_at = min(self._complete_at, now) if self._owner.ask(work) and not ended else math.inf
            if now - self._complete_at > _REACHED_WITHIN:
                raise TransportError(
                    f"NCCL has ended an operation with an error that torch {torch.__version__} cannot hand over: it is in "
                    "what ProcessGroupNCCL has written to this rank's standard error"
                )
            self._ask_at = now + _ASK_EVERY
        return reached

    def over(self) -> bool:
        """Return whether nothing of the operation can touch its tensors any more, for whatever reason."""
        if self._done:
            return True
        if not self.launch.finished:
            return False
        if self.launch.error is not None:
            # RuntimeError is torch's: NCCL may have queued a part of the operation, which only an abort ends for sure.
            return self._owner.aborted or not isinstance(self.launch.error, RuntimeError)
        assert self.launch.result is not None
        try:
            return bool(self.launch.result[2].query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # CUDA itself is broken, so the state is unknown
            return False


def failure(error: BaseException) -> BaseException:
    """Translate an error of torch into the guard's terms.

    A RuntimeError is the communicator's; out of memory and a broken device are this rank's; others stay as they are.
    """
    if isinstance(error, torch.OutOfMemoryError):  # a RuntimeError too
        return MemoryError(str(error))
    if torch_compat.of_own_device(error):  # a RuntimeError too
        return error
    return TransportError(str(error)) if isinstance(error, RuntimeError) else error


_log = logging.getLogger("ncclguard")

_STOP_WAIT = 0.08  # seconds that stop() itself waits: its contract is 100 ms
_ABORT_WITHIN = 10.0  # seconds after which an abort counts as hung
_CLOSE_WAIT = 1.0  # seconds that close() waits
_PAUSE = 0.001  # seconds between two checks of an operation that is to end
_ASK_SLICE = 0.05  # seconds between two checks of the communicator while another thread asks NCCL or aborts
_LAUNCHED_WITHIN = 0.2  # seconds that an abort waits for a launch to come back
_ASKED_WITHIN = 1.0  # seconds that an abort waits for an answer of NCCL in another thread


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
        # Set once for the thread: on leaving, the context of a stream sets the device that was current before, and the
        # process would begin to use GPU 0.
        self._launcher.submit(Launch(functools.partial(torch.cuda.set_device, device)))
        # Operations with the tensors they use: neither may be freed while a kernel can still touch them.
        self._flying: dict[NcclPending, tuple[torch.Tensor, ...]] = {}
        live.add(self)

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
        options.reduceOp = memory.NCCL.wire_op(op, tensor.dtype)  # type: ignore[assignment]
        wire = memory.reducible_view(tensor, self.device.type)
        return self._start((wire,), lambda group: group.allreduce([wire], options))

    def broadcast(self, tensor: torch.Tensor, source_index: int, save: Save | None = None) -> NcclPending:
        options = dist.BroadcastOptions()
        options.rootRank = source_index
        options.rootTensor = 0
        wire = memory.movable_view(tensor, self.device.type)
        return self._start((wire,), lambda group: group.broadcast([wire], options))

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> NcclPending:
        wire = memory.movable_view(tensor, self.device.type).reshape(-1)
        wires = [memory.movable_view(output, self.device.type).reshape(-1) for output in outputs]
        with _errors_of_torch():
            flat = wire.new_empty(wire.numel() * self.size)

        def distribute() -> None:
            for part, output in zip(flat.chunk(self.size), wires, strict=True):
                output.copy_(part)

        return self._start((wire, flat, *wires), lambda group: group._allgather_base(flat, wire), distribute)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp.RedOpType) -> Pending:
        """Reduce and scatter as `Communicator.reduce_scatter` says, with one difference.

        ``output`` is written on the GPU before `Pending.wait` returns True.
        """
        options = dist.ReduceScatterOptions()
        options.reduceOp = memory.NCCL.wire_op(op, output.dtype)  # type: ignore[assignment]
        wire = memory.reducible_view(output, self.device.type).reshape(-1)
        with _errors_of_torch():
            flat = torch.cat([memory.reducible_view(tensor, self.device.type).reshape(-1) for tensor in inputs])
        return self._start((wire, flat), lambda group: group._reduce_scatter_base(wire, flat, options))

    def reduce(self, tensor: torch.Tensor, root_index: int, op: ReduceOp.RedOpType) -> NcclPending:
        options = dist.ReduceOptions()
        options.reduceOp = memory.NCCL.wire_op(op, tensor.dtype)  # type: ignore[assignment]
        options.rootRank = root_index
        wire = memory.reducible_view(tensor, self.device.type)
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
        """Queue an operation behind the caller's current stream, and then ``afterwards()``, which queues more of it."""
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
                    torch_compat.make_stream_wait(work)  # the probe stream, not this thread
                    arrived = event = _recorded(probe)
                    if afterwards is not None:
                        afterwards()
                        event = _recorded(probe)
            return work, arrived, event

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

    def ask(self, work: dist.Work) -> bool:
        """See `Owner.ask`; during an abort NCCL is not asked, which may hang."""
        while not self._asking.acquire(timeout=_ASK_SLICE):
            self.check()
        try:
            self.check()
            complete = bool(work.is_completed())
            error = torch_compat.error_of(work) if complete else None
        except RuntimeError as raised:
            raise failure(raised) from raised
        finally:
            self._asking.release()
        if error is not None:
            raise TransportError(str(error))
        return complete

    def complete(self, pending: NcclPending) -> None:
        """Forget an operation that is over, so that its tensors may be freed."""
        with self._lock:
            self._flying.pop(pending, None)

    @property
    def aborted(self) -> bool:
        """Return whether an abort has come back: NCCL frees the memory in it, so that no kernel can still run."""
        return self._aborted.is_set()

    # --- ending ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        end = time.monotonic() + _STOP_WAIT
        with self._lock:
            first = not self._stopped
            self._stopped = True  # before the abort: from then on operations may look complete that are not
            if first and self._group is not None and self._pid == os.getpid():
                # None at interpreter exit, when there are no threads: an abort that hangs must not hang the exit.
                self._aborter = in_background(
                    "abort", functools.partial(self._abort, self._group), exit_within=_ENDS_WITHIN
                )
        self._votes.stop()
        if self._aborter is not None:
            self._aborter.ended(end - time.monotonic())

    def _abort(self, group: Any) -> None:
        warn = threading.Timer(_ABORT_WITHIN, self._report_hung)
        warn.daemon = True
        with contextlib.suppress(RuntimeError):  # interpreter exit: no threads any more
            warn.start()
        # The abort is made between two launches: a launch whose communicator is taken away polls a null handle, whose
        # state NCCL does not write, until TORCH_NCCL_NONBLOCKING_TIMEOUT (NCCLUtils.hpp, C10D_NCCL_CHECK_TIMEOUT_BASE;
        # torch 2.13: 11 of 20 aborts during launches). A launch that waits for a missing peer polls it all the same.
        if self._launching.acquire(timeout=_LAUNCHED_WITHIN):
            self._launching.release()
        asked = self._asking.acquire(timeout=_ASKED_WITHIN)
        try:
            abort_group(group, self.device)
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread; "Future for ProcessGroup abort timed out"
            _log.error(
                "ncclguard: %s",
                told(
                    "aborting the NCCL communicator of generation {generation} failed: {error}",
                    "log",
                    generation=self.generation,
                    error=error,
                ),
            )
        else:
            self._aborted.set()
        finally:
            if asked:
                self._asking.release()
            warn.cancel()

    def _report_hung(self) -> None:
        _log.error(
            "ncclguard: %s",
            told(
                "aborting the NCCL communicator of generation {generation} has not returned for {seconds:g} s (ncclCommAbort hangs in some "
                "versions: 2.25.1, 2.18.1). It is left behind with its staging memory; if the next one cannot be built, restart "
                "this process.",
                "log",
                generation=self.generation,
                seconds=_ABORT_WITHIN,
            ),
        )

    def quiet(self, seconds: float) -> bool:
        """Wait as `Communicator.quiet` says, for all launches and kernels; False for good if an abort hangs."""
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
            closer = in_background("close", functools.partial(_shut, [group]), exit_within=_ENDS_WITHIN)
            del group
            if closer is not None:
                closer.ended(_CLOSE_WAIT)
            return
        aborted = self._aborted.wait(_CLOSE_WAIT if self._aborter is not None else 0)
        if not (aborted and all(pending.over() for pending in flying)):
            # The destructor would wait for the kernels, which use the memory as long as they run.
            keep_for_ever(group)
            keep_for_ever(flying)

    def leave_to_parent(self) -> None:
        """Leave everything to the parent, in a forked child: the CUDA context is the parent's."""
        self._lock = threading.RLock()
        self._stopped = True
        keep_for_ever((self._group, self._flying))
        self._group, self._flying = None, {}


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def abort_group(group: Any, device: torch.device) -> None:
    """Abort an NCCL group; blocks for as long as NCCL does."""
    with torch.cuda.device(device):
        group.abort()


def _shut(last: list[Any]) -> None:
    """Release a healthy group of which this is the only reference, so that its destructor runs here."""
    try:
        torch_compat.shut_nccl_group(last[0])
    except RuntimeError as error:
        _log.warning(
            "ncclguard: %s",
            told("releasing an NCCL communicator failed, its memory may stay in use: {error}", "log", error=error),
        )
    last.clear()


@contextlib.contextmanager
def _errors_of_torch() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise failure(error) from error


#: Seconds that interpreter exit waits for an abort that hangs: one that comes back while the interpreter is being torn
#: down ends the process with SIGABRT (seen with aborts of 6 and 9 s), and a launcher would blame this rank.
_ENDS_WITHIN = 10.0
#: The limit of torch's own watchdog, where one must run: beyond any deadline of the guard.
_WATCHDOG_AFTER = timedelta(days=7)
#: The group's own timeout, by which torch bounds its wait for NCCL in abort(), and nothing else.
_ABORT_LIMIT = timedelta(seconds=60)


class NcclBuilder:
    """Builds `NcclCommunicator` on the ``device`` of the tensors, which need not be the current device."""

    # Enough to keep the GPU busy; a collective of lists needs memory of the size of all its parts for each of them.
    max_in_flight = 8
    shares = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def check_supported(self, kind: Kind, dtype: torch.dtype, op: object = None) -> None:
        memory.NCCL.check(kind, dtype, op)

    def build(
        self,
        store: torch_compat.Store,
        prefix: str,
        ranks: tuple[int, ...],
        index: int,
        generation: int,
        seconds: float,
        wanted: Callable[[], bool] | None = None,
    ) -> NcclCommunicator:
        end = time.monotonic() + seconds
        # The votes are connected first: they show in bounded time who is there, while NCCL's start may hang.
        votes = StreamBuilder(disconnects=False).build(
            store, f"{prefix}/votes", ranks, index, generation, seconds, wanted
        )
        attempt = _Attempt(self.device, votes, end)
        what = f"connecting rank {ranks[index]} with {len(ranks) - 1} peers over NCCL"

        def give_up() -> None:
            torch_compat.disconnect(store)
            attempt.give_up()

        try:
            communicator = bounded(
                what, lambda: attempt.connect(store, f"{prefix}/nccl"), end - time.monotonic(), give_up, wanted
            )
            torch_compat.disconnect(store)  # as after building over gloo: NCCL has exchanged its id
            return communicator
        except BaseException as error:
            votes.stop()
            votes.close()
            if error.__cause__ is not None and torch_compat.of_own_device(error.__cause__):
                raise error.__cause__ from None  # not the network's fault: another try on this device ends alike
            raise


class _Attempt:
    """One try to connect. It clears up after itself in the thread that it runs in, however late that comes back."""

    def __init__(self, device: torch.device, votes: StreamCommunicator, end: float) -> None:
        self._device = device
        self._votes = votes
        self._end = end
        self._lock = threading.Lock()
        self._given_up = self._left_behind = False
        self._group: Any = None  # while it is connecting
        self._communicator: NcclCommunicator | None = None

    def connect(self, store: torch_compat.Store, prefix: str) -> NcclCommunicator:
        torch.cuda.set_device(self._device)
        keys = torch_compat.PrefixStore(prefix, store)
        group = torch_compat.new_nccl_group(keys, prefix, self._votes.ranks, self._votes.index, _WATCHDOG_AFTER)
        with self._lock:
            self._group = group
        try:
            group.eager_connect_single_device(self._device)
            with self._lock:
                self._check()
                communicator = self._communicator = NcclCommunicator(group, self._votes, self._device)
                self._group = None
        except BaseException:
            with self._lock:
                self._group = None
            self._leave_behind(group)
            raise
        try:
            self._try_out(communicator)
        except BaseException:
            communicator.close()
            raise
        return communicator

    def _try_out(self, communicator: NcclCommunicator) -> None:
        """Run one operation, to find out now what cannot be connected at all; later ones connect more."""
        first = communicator.all_reduce(torch.zeros(1, device=self._device), ReduceOp.SUM)
        while not first.wait(0.1):
            if time.monotonic() >= self._end:
                raise TransportError("the first NCCL operation did not complete")
        with self._lock:
            self._check()

    def _check(self) -> None:
        if self._given_up:
            raise TransportError("NCCL has connected after this was given up")

    def give_up(self) -> None:
        """End the attempt, as far as that is possible, from another thread."""
        with self._lock:
            self._given_up = True
            communicator, group = self._communicator, self._group
        if communicator is not None:
            communicator.stop()
        elif group is not None:
            self._leave_behind(group)

    def _leave_behind(self, group: Any) -> None:
        """Abort a group that is not connected, in the background, and keep it: its destructor may block.

        A communicator that is being connected is out of the abort's reach: torch knows it only afterwards, or holds its
        lock until TORCH_NCCL_NONBLOCKING_TIMEOUT. So it is aborted again when the connecting thread comes back.
        """
        with self._lock:
            first, self._left_behind = not self._left_behind, True
        if first:
            keep_for_ever(group)
            self._report()
        in_background("abort", lambda: abort_group(group, self._device), exit_within=_ENDS_WITHIN)

    def _report(self) -> None:
        _log.warning(
            "ncclguard: %s",
            told(
                "a try to connect over NCCL failed and is left behind; what it holds on {device} is released when NCCL itself "
                "gives up, which it may never do. If the next try fails as well, restart this process.",
                "log",
                device=self._device,
            ),
        )
