"""A communicator for CPU tensors over TCP connections of the guard's own, which the caller's own thread drives.

No other thread reads or writes the memory it is given, nothing is under way between two calls of `Pending.wait`, and
stopping it is closing its sockets: an operation that was given up cannot touch memory any more, and no error can arise
where nobody catches it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch.distributed import ReduceOp

from ncclguard import torch_compat
from ncclguard.config import current_config
from ncclguard.environment.network import job_address
from ncclguard.transport import memory
from ncclguard.transport.base import Agreement, Communicator, Disagreement, Kind, Pending, Save, TransportError, live
from ncclguard.transport.bounded import bounded
from ncclguard.transport.links import LinkError, Links, Steps, advance, connect
from ncclguard.transport.memory import Arithmetic, view_of
from ncclguard.transport.ring import Mismatch, Ring
from ncclguard.transport.votes import Exchange
from ncclguard_explain.language import tr

_CONNECT_SHARE = 0.9  # of the time for a build; the rest is for saying which rank has not come
_CLOSE_WAIT = 0.5  # seconds that close() waits for a thread that is still in an operation


class StreamCommunicator(Communicator):
    """See `Communicator`. Made by `StreamBuilder.build`."""

    device_type = "cpu"
    compares_marks = True

    def __init__(self, links: Links, ranks: tuple[int, ...], generation: int) -> None:
        self.ranks = ranks
        self.index = links.index
        self.size = len(ranks)
        self.generation = generation
        self._links = links
        self._exchange = Exchange(ranks, links)
        self._ring = Ring(links)
        self._begun = 0
        self._broken_off = ""  # the reason why nothing more can be carried
        self._pid = os.getpid()
        self.payload_nbytes = self._exchange.payload_nbytes
        live.add(self)

    @property
    def host(self) -> StreamCommunicator:
        return self

    # --- operations -------------------------------------------------------------------------------------------------

    def agree(self, value: int, payload: torch.Tensor | None = None) -> Agreement:
        self._check()
        return self._exchange.start(value, payload)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType, save: Save | None = None) -> Pending:
        return self._start(self._ring.all_reduce(*_operand(tensor, op), save or _nothing), tensor)

    def broadcast(self, tensor: torch.Tensor, source_index: int, save: Save | None = None) -> Pending:
        wire = memory.movable_view(tensor, "cpu")
        return self._start(self._ring.broadcast(view_of(wire), source_index, save or _nothing), tensor)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Pending:
        own, *parts = [view_of(memory.movable_view(each, "cpu")) for each in (tensor, *outputs)]
        return self._start(self._ring.all_gather(parts, own), tensor, *outputs)

    def all_gather_uneven(self, sizes: Sequence[int], data: torch.Tensor) -> tuple[Pending, list[torch.Tensor]]:
        parts = [torch.empty(nbytes, dtype=torch.uint8, device="cpu") for nbytes in sizes]
        return self.all_gather(parts, data), parts

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp.RedOpType) -> Pending:
        result, itemsize, arithmetic = _operand(output, op)
        views = [view_of(memory.reducible_view(tensor, "cpu")) for tensor in inputs]
        return self._start(self._ring.reduce_scatter(result, views, itemsize, arithmetic), output, *inputs)

    def reduce(self, tensor: torch.Tensor, root_index: int, op: ReduceOp.RedOpType) -> Pending:
        return self._start(self._ring.reduce(*_operand(tensor, op), root_index), tensor)

    def gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor], root_index: int) -> Pending:
        views = [view_of(output) for output in outputs]
        return self._start(self._ring.gather(view_of(tensor), views, root_index), tensor, *outputs)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root_index: int) -> Pending:
        views = [view_of(tensor) for tensor in inputs]
        return self._start(self._ring.scatter(view_of(output), views, root_index), output, *inputs)

    def all_to_all(self, output: torch.Tensor, sizes: Sequence[int], inputs: Sequence[torch.Tensor]) -> Pending:
        received = [view_of(part) for part in torch.split(output, list(sizes))]
        return self._start(self._ring.all_to_all(received, [view_of(part) for part in inputs]), output, *inputs)

    def _start(self, steps: Steps, *tensors: torch.Tensor) -> Moving:
        self._check()
        self._begun += 1
        return Moving(self, steps, (self.mark + self._begun) & _MARKS, self.closes, tensors)

    def _check(self) -> None:
        if self._links.stopped:
            raise TransportError(f"the communicator (generation {self.generation}) was stopped: build the next one")

    # --- what operations ask ----------------------------------------------------------------------------------------

    def move(self, steps: Steps, mark: int, closes: bool, seconds: float) -> tuple[bool, float]:
        """Go on with an operation for up to ``seconds``; return whether it is complete, and `Pending.met`."""
        end = time.monotonic() + seconds
        ring, mine = self._ring, False
        try:
            mine = self._links.using.acquire(timeout=max(0.0, seconds))
            if not mine:
                return False, 0.0
            if self._broken_off:
                raise TransportError(f"an operation before it has failed: {self._broken_off}")
            ring.mark, ring.direct, ring.met = mark, closes, 0.0
            return advance(steps, end, self._links.turns), ring.met
        except Mismatch as mismatch:
            self._broken_off = "the ranks were in different ones"
            raise Disagreement(tr("rank {rank} is in another operation", rank=self.ranks[mismatch.peer])) from None
        except LinkError as error:
            self._broken_off = str(error)
            raise self._broken(error) from None
        except BaseException as error:  # a signal handler's, in the middle of a stream
            self._broken_off = self._broken_off or f"{type(error).__name__} has interrupted it"
            raise
        finally:
            if mine:
                self._links.using.release()

    def _broken(self, error: LinkError) -> TransportError:
        if self._links.stopped:
            return TransportError(
                tr("stopped on this rank (generation {generation}): {error}", generation=self.generation, error=error)
            )
        rank = self.ranks[error.peer]
        if error.error.errno == errno.EFAULT:
            # The call and its memory have ended: the other ranks have failed this operation.
            return TransportError(tr("rank {rank} has left the operation: {error}", rank=rank, error=error), peer=rank)
        return TransportError(tr("the connection with rank {rank} broke: {error}", rank=rank, error=error), peer=rank)

    # --- ending -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self._links.stop()

    def quiet(self, seconds: float) -> bool:
        """Wait as `Communicator.quiet` says, until no thread moves bytes any more; `stop` makes a thread notice."""
        if self._links.using.acquire(timeout=max(0.0, seconds)):
            self._links.using.release()
            return True
        return False

    def close(self) -> None:
        if not self.quiet(0.0):
            self.stop()
            self.quiet(_CLOSE_WAIT)
        self._links.close()

    def leave_to_parent(self) -> None:
        """Leave the connections to the parent, in a forked child: they must end when the parent does."""
        self._links.using = threading.Lock()
        self._links.close()


_MARKS = (1 << 63) - 1


class Moving(Pending):
    """One operation, which moves while it is waited for. It keeps its tensors."""

    __slots__ = ("_closes", "_communicator", "_done", "_mark", "_steps", "_tensors", "met")

    def __init__(
        self, communicator: StreamCommunicator, steps: Steps, mark: int, closes: bool, tensors: tuple[torch.Tensor, ...]
    ) -> None:
        self._communicator = communicator
        self._steps = steps
        self._mark = mark
        self._closes = closes
        self._tensors = tensors
        self._done = False
        self.met = 0.0

    def wait(self, seconds: float) -> bool:
        if not self._done:
            self._done, met = self._communicator.move(self._steps, self._mark, self._closes, seconds)
            self.met = self.met or met
            if self._done:
                self._tensors = ()
        return self._done


def _operand(tensor: torch.Tensor, op: ReduceOp.RedOpType) -> tuple[memoryview, int, Arithmetic]:
    """Return a tensor as an operand: its bytes, the size of an element, and the arithmetic that combines two."""
    wire = memory.reducible_view(tensor, "cpu")
    return view_of(wire), wire.element_size(), Arithmetic(memory.CPU.wire_op(op, wire.dtype), wire.dtype)


def _nothing(start: int, stop: int) -> None:
    """Keep no copy of the part that is overwritten."""


class StreamBuilder:
    """Builds `StreamCommunicator`, as `Builder` says.

    ``disconnects``: whether the store is disconnected afterwards, which it never is with ``shares``. ``towards``: a
    host that the peers reach, where that is not MASTER_ADDR.
    """

    max_in_flight = 1  # the caller's thread is the only one that moves bytes, and keeps both directions busy

    def __init__(self, disconnects: bool = True, shares: bool = False, towards: str = "") -> None:
        self.device = torch.device("cpu")
        self.shares = shares
        self._towards = towards
        self._disconnects = disconnects and not shares

    def check_supported(self, kind: Kind, dtype: torch.dtype, op: object = None) -> None:
        memory.CPU.check(kind, dtype, op)

    def build(
        self,
        store: torch_compat.Store,
        prefix: str,
        ranks: tuple[int, ...],
        index: int,
        generation: int,
        seconds: float,
        wanted: Callable[[], bool] | None = None,
    ) -> StreamCommunicator:
        end = time.monotonic() + seconds * _CONNECT_SHARE
        direct = current_config().cross_memory
        given_up = threading.Event()

        def build() -> StreamCommunicator:
            keys = torch_compat.PrefixStore(prefix, store)
            links = connect(keys, job_address(self._towards), len(ranks), index, end, direct, given_up=given_up)
            if self._disconnects:
                torch_compat.disconnect(store)  # saves a descriptor on the store's host
            return StreamCommunicator(links, ranks, generation)

        def give_up() -> None:
            given_up.set()
            if not self.shares:
                torch_compat.disconnect(store)

        return bounded(f"connecting rank {ranks[index]} with {len(ranks) - 1} peers", build, seconds, give_up, wanted)
