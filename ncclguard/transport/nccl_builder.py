"""Builds NCCL communicators, the one for votes first. Run on an emulated GPU, not yet on a real one."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp

from .. import _torch, _torch_nccl, _torch_stores
from . import dtypes
from .base import Kind, TransportError
from .bounded import bounded, in_background, keep_for_ever
from .nccl import NcclCommunicator, abort_group
from .streams import StreamBuilder, StreamCommunicator

_log = logging.getLogger("ncclguard")

#: Of torch's own watchdog, where it cannot be done without: beyond any deadline of the guard.
_WATCHDOG_AFTER = timedelta(days=7)
#: That torch waits for NCCL in abort(); nothing else is bounded by the group's own timeout.
_ABORT_LIMIT = timedelta(seconds=60)


class NcclBuilder:
    """Builds `NcclCommunicator`, see `Builder`, on ``device``: that of the tensors,
    which need not be the current one.
    """

    # Enough to keep the GPU busy; collectives of lists need memory for each, of the size of all its parts.
    max_in_flight = 8

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def check_supported(self, kind: Kind, dtype: torch.dtype, op: object = None) -> None:
        dtypes.NCCL.check(kind, dtype, op)

    def build(
        self,
        store: _torch.Store,
        prefix: str,
        ranks: tuple[int, ...],
        index: int,
        generation: int,
        seconds: float,
    ) -> NcclCommunicator:
        end = time.monotonic() + seconds
        # The votes first: they show in bounded time who is there, and NCCL's start cannot be ended as surely.
        votes = StreamBuilder(disconnects=False).build(store, f"{prefix}/votes", ranks, index, generation, seconds)
        attempt = _Attempt(self.device, votes, end)
        what = f"connecting rank {ranks[index]} with {len(ranks) - 1} peers over NCCL"

        def give_up() -> None:
            _torch_stores.disconnect(store)
            attempt.give_up()

        try:
            communicator = bounded(
                what, lambda: attempt.connect(store, f"{prefix}/nccl"), end - time.monotonic(), give_up
            )
            _torch_stores.disconnect(store)  # as after building over gloo: NCCL has exchanged its id
            return communicator
        except BaseException:
            votes.stop()
            votes.close()
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

    def connect(self, store: _torch.Store, prefix: str) -> NcclCommunicator:
        torch.cuda.set_device(self._device)
        keys = _torch.PrefixStore(prefix, store)
        group = _torch_nccl.new_nccl_group(keys, prefix, self._votes.ranks, self._votes.index, _WATCHDOG_AFTER)
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
        """One operation: what cannot be connected at all is to show here. Others connect
        more, for the algorithms they use.
        """
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
        """From another thread: end what can be ended."""
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
        in_background("abort", lambda: abort_group(group, self._device))

    def _report(self) -> None:
        _log.warning(
            "ncclguard: a try to connect over NCCL failed and is left behind; what it holds on %s is released when NCCL itself "
            "gives up, which it may never do. If the next try fails as well, restart this process.",
            self._device,
        )
