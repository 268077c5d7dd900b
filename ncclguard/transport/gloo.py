"""A gloo communicator for CPU tensors that can be stopped from any thread.

gloo offers no abort (``ProcessGroupGloo.abort`` does nothing), and its timeout counts per step, not per operation. What
does end an operation at once is a receive that nobody will answer, timed out after a millisecond: gloo then closes
every connection of the group (gloo/transport/tcp/unbound_buffer.cc, ``waitRecv``). `GlooCommunicator.stop` does that
first and shuts the connections down after it, so that peers notice although a forked child holds a copy of the
descriptors. The order matters: gloo does not tell a message that is under way about the end of its connection
(gloo/transport/tcp/pair.cc, ``signalException``, leaves out the unbound buffers in ``tx_`` and ``rx_``), and then waits
for it until its own timeout. Measured, 2 ranks stopping in the middle of traffic: shutting down first left an operation
waiting in 28 of 320 cases, this order in 1 of 720. Such an operation cannot write any more all the same; see
`GlooCommunicator.quiet`.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from .. import _sockets, _threads, _torch
from . import dtypes, exchange
from .base import Agreement, Communicator, Pending, TransportError
from .gloo_pending import Copied, GlooPending

_log = logging.getLogger("ncclguard")

_STOP_WAIT = 0.08  # seconds that stop() itself waits: its contract is 100 ms
_PARKED_AFTER = 0.1  # seconds: an operation ends at most 15 ms after its connections are closed, if it ends
_ROUNDS = 0.1  # seconds: ten times what a thread that moves data sleeps at most
_CLOSE_WAIT = 1.0  # seconds that close() waits, for operations to end and for the group's destructor
_GLOO_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:(\d+)")

_live: weakref.WeakSet[GlooCommunicator] = weakref.WeakSet()


class GlooCommunicator(Communicator):
    """See `Communicator`. Made by `GlooBuilder.build`."""

    device_type = "cpu"

    def __init__(
        self,
        group: _torch.ProcessGroupGloo,
        ranks: tuple[int, ...],
        index: int,
        generation: int,
        connections: Sequence[_sockets.Connection],
        listening: Mapping[_sockets.Address, int],
        workers: frozenset[int],
        movers: frozenset[int],
        votes: exchange.Exchange,
    ) -> None:
        self.ranks = ranks
        self.index = index
        self.size = len(ranks)
        self.generation = generation
        self._group: Any = group  # torch's stub of ProcessGroupGloo has none of the operations; None once closed
        self._connections = tuple(connections)
        self._listening = listening  # address that a rank accepts connections at -> global rank
        self._workers = workers
        self._movers = movers
        self._exchange = votes
        self.payload_nbytes = votes.payload_nbytes
        self._pid = os.getpid()
        # Reentrant, because a signal handler may call stop() while this thread is submitting.
        self._lock = threading.RLock()
        self._stopper: threading.Thread | None = None
        self._stopped = False
        self._ended_at: float | None = None  # when all connections were closed
        self._works: list[dist.Work] = []
        self._reduce_options = {op: _allreduce_options(op) for op in dtypes.GLOO.wire_ops}
        _live.add(self)

    # --- operations -----------------------------------------------------------------------------------------------

    @property
    def host(self) -> GlooCommunicator:
        return self

    def agree(self, value: int, payload: torch.Tensor | None = None) -> Agreement:
        return self._exchange.start(value, payload)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> GlooPending:
        options = self._reduce_options[dtypes.GLOO.wire_op(op, tensor.dtype)]
        wire = dtypes.reducible_view(tensor, "cpu")
        with self._lock:
            work = self._open().allreduce([wire], options)
            self._works.append(work)
        return GlooPending(self, work)

    def broadcast(self, tensor: torch.Tensor, source_index: int) -> GlooPending:
        options = dist.BroadcastOptions()
        options.rootRank = source_index
        options.rootTensor = 0
        wire = dtypes.movable_view(tensor, "cpu")
        with self._lock:
            work = self._open().broadcast([wire], options)
            self._works.append(work)
        return GlooPending(self, work)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> GlooPending:
        wire = dtypes.movable_view(tensor, "cpu")
        wires = [dtypes.movable_view(output, "cpu") for output in outputs]
        with self._lock:
            work = self._open().allgather([wires], [wire])
            self._works.append(work)
        return GlooPending(self, work)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp.RedOpType) -> Pending:
        """See `Communicator.reduce_scatter`: one all-reduce of a copy of all inputs.

        torch's own (an all-reduce for each rank; not there at all in 2.6) returns a work whose wait ignores its
        timeout. gloo's reduce to each rank in turn moves less, and takes several times as long.
        """
        numel = output.numel()
        try:
            copy = output.new_empty(numel * len(inputs))
        except RuntimeError as error:
            raise MemoryError(f"no memory for a copy of {numel * len(inputs)} elements: {error}") from error
        torch.cat([tensor.reshape(-1) for tensor in inputs], out=copy)
        own = copy[self.index * numel : (self.index + 1) * numel].view(output.shape)
        return Copied(self.all_reduce(copy, op), own, output)

    def native(self, tensors: tuple[torch.Tensor, ...], call: Callable[[Any], dist.Work]) -> GlooPending:
        with self._lock:
            work = call(self._open())
            self._works.append(work)
        return GlooPending(self, work)

    def set_backstop(self, seconds: float) -> None:
        """See `Communicator.set_backstop`. Without effect in torch 2.6, where the limit given to `build` stays."""
        with self._lock:
            if self._group is not None:
                _torch.set_gloo_timeout(self._group, timedelta(seconds=max(seconds, 0.001)))

    def _open(self) -> Any:
        """The group, with the lock held; also forgets operations that have ended."""
        group = self._group
        if self._stopped or group is None:
            raise TransportError(f"the communicator (generation {self.generation}) was stopped: build the next one")
        if len(self._works) > 8:
            self._works = [work for work in self._works if not work.is_completed()]
        return group

    def broken(self, error: RuntimeError) -> TransportError:
        if self._stopped:
            return TransportError(f"stopped on this rank (generation {self.generation}): {error}")
        match = _GLOO_ADDRESS.search(str(error))
        if match is None:
            return TransportError(str(error))
        # gloo prints the port without ntohs (gloo/transport/tcp/address.cc, Address::str), so its bytes are swapped on
        # little-endian machines. It is taken as it would be right, unless only the printed number is one of our
        # connections.
        host, printed = match[1], int(match[2])
        known = {connection.remote for connection in self._connections}
        port = printed if (host, printed) in known else socket.ntohs(printed & 0xFFFF)
        return TransportError(str(error), (host, port), self._peer_at(host, port))

    def _peer_at(self, host: str, port: int) -> int | None:
        """The rank at the other end: by where it listens if this rank has connected to it,
        else if only one on its host can it be.
        """
        if (host, port) in self._listening:
            return self._listening[host, port]
        reached = {self._listening.get(connection.remote) for connection in self._connections}
        there = {rank for (at, _), rank in self._listening.items() if at == host}
        candidates = there - reached if len(there) > 1 else there
        return candidates.pop() if len(candidates) == 1 else None

    # --- ending ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            group = self._group
            if self._pid == os.getpid():
                self._exchange.stop()
            if self._stopper is None and group is not None and self.size > 1 and self._pid == os.getpid():
                stopper = threading.Thread(target=self._end, args=(group,), name="ncclguard-stop", daemon=True)
                try:
                    stopper.start()
                except RuntimeError:  # interpreter exit: no threads any more
                    self._end(group)
                else:
                    self._stopper = stopper
        if self._stopper is not None:
            self._stopper.join(_STOP_WAIT)

    def _end(self, group: Any) -> None:
        """Have gloo close all connections, at up to 10 ms each, then shut them down for forked children too."""
        held = _sockets.hold(self._connections)
        _torch.poison_gloo(group)
        _sockets.shut_held(held)
        self._ended_at = time.monotonic()

    def check_parked(self) -> None:
        """Raise for an operation that gloo has not given back although all connections are closed."""
        if self._ended_at is not None and time.monotonic() - self._ended_at > _PARKED_AFTER:
            raise TransportError(f"stopped on this rank (generation {self.generation}): gloo waits for its own timeout")

    def quiet(self, seconds: float) -> bool:
        """See `Communicator.quiet`.

        gloo marks an operation complete after its buffers are gone, and they wait for whoever is writing into them
        (gloo/common/memory.h, ``ShareableNonOwningPtr``). An operation that stays incomplete after `stop` is quiet when
        all connections are closed and the group's workers sleep: nothing can arrive, and all that can wake them is
        their timeout, which only raises. So it is when the threads that move the data do not wake either: see
        `_deadlocked`.
        """
        end = time.monotonic() + seconds
        with self._lock:
            works = tuple(self._works)
        for work in works:
            while not work.is_completed():
                if self._ended_at is not None and _threads.asleep(self._workers):
                    return True
                left = end - time.monotonic()
                if left <= 0 or self._deadlocked(left):
                    return left > 0
                time.sleep(min(0.001, left))
        return True

    def _deadlocked(self, left: float) -> bool:
        """Whether gloo waits for itself for ever, so that nothing of this group moves any more.

        Seen in 1 of 10 resets of all connections at once: a worker whose write fails holds the context's lock and waits
        for the thread that moves the data to come round (gloo/transport/tcp/loop.cc, ``unregisterDescriptor``), and
        that one waits for the lock. A healthy one sleeps for 10 ms at most.
        """
        if self._ended_at is not None or self._stopper is None or not self._stopper.is_alive() or left < _ROUNDS:
            return False
        if not self._movers or not _threads.asleep(self._movers | self._workers, _ROUNDS):
            return False
        _sockets.shut(self._connections)  # which the stopper does not come to
        return True

    def close(self) -> None:
        if not self.quiet(0):
            self.stop()
        quiet = self.quiet(_CLOSE_WAIT)
        with self._lock:
            self._stopped = True
            group, self._group = self._group, None
        if self._pid == os.getpid():
            self._exchange.stop()
            if self._stopper is not None:
                self._stopper.join(_CLOSE_WAIT)  # it is in C++: interpreter exit would end the process with SIGABRT
        self._exchange.close()
        if group is None:
            return
        if not quiet or not all(work.is_completed() for work in self._works) or self._pid != os.getpid():
            # The destructor waits for operations in flight, and in a forked child for threads that are not there.
            keep_for_ever(group)
            return
        # The destructor closes one connection after the other, at up to 10 ms each.
        last = [group]
        del group
        closer = threading.Thread(target=last.clear, name="ncclguard-close", daemon=True)
        try:
            closer.start()
        except RuntimeError:  # interpreter exit: no threads any more
            last.clear()
        else:
            closer.join(_CLOSE_WAIT)


def _allreduce_options(op: ReduceOp.RedOpType) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    return options


def keep_for_ever(group: object) -> None:
    """Never run the destructor, not even at interpreter exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _close_all() -> None:
    """Before the interpreter is torn down: a worker of gloo that drops the last
    reference to a tensor then ends the process.

    It asks for the GIL, is told to exit instead, and the C++ it is in cannot be unwound: SIGABRT (seen in 1 of 30 exits
    right after a collective, torch 2.13). Closing joins the workers.
    """
    for communicator in tuple(_live):
        communicator.close()


def _leave_to_parent() -> None:
    """In a forked child the connections are the parent's, and the threads of the group do not exist."""
    for communicator in tuple(_live):
        communicator._lock = threading.RLock()
        communicator._stopped = True
        if communicator._group is not None:
            keep_for_ever(communicator._group)


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_to_parent)
