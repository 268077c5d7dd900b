"""The ways beside each other: how a program makes its collectives with each of them, set up as its documentation says.

A way is made once on each rank. `all_reduce` and `broadcast` raise whatever the way raises, or `Failed` where the way
returns its failure; `commit` says at the end of a step whether the step counts; `recover` does what the way's
documentation has a program do after a failure, before the next step. `run` is around the whole loop.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

#: The time limit that each way is given for a collective, in seconds.
LIMIT: Final = 4.0
_LIMIT: Final = timedelta(seconds=LIMIT)


class Failed(RuntimeError):
    """A failure that a way returns rather than raises; `named` are the ranks it holds responsible, None if it has no
    field for them."""

    def __init__(self, text: str, named: list[int] | None = None) -> None:
        super().__init__(text)
        self.named = named


@dataclass(frozen=True, slots=True)
class Setting:
    """What a rank is told: ports that nobody else takes, the lighthouse of torchft, and where a log record goes."""

    ports: tuple[int, int]
    lighthouse: str
    say: Callable[[str], None]


class Plain:
    """torch.distributed on gloo with a timeout; the program catches the error and calls again."""

    title = "plain torch"
    package = "torch"
    debug = dist.DebugLevel.OFF
    #: Whether every rank is a process of its own rather than a fork of one that has imported torch.
    alone = False
    #: Whether this version of the package has it.
    there = True

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.done = 0
        self.rank = int(os.environ["RANK"])

    def run(self, loop: Callable[[], None]) -> None:
        """Set up, and run the loop of the program."""
        dist.set_debug_level(self.debug)
        dist.init_process_group("gloo", timeout=_LIMIT)
        loop()

    @property
    def step(self) -> int:
        """The step that the program is in."""
        return self.done

    def begin(self) -> None:
        """Begin a step."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks, in place."""
        dist.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """What a struck rank calls in place of the all-reduce."""
        dist.broadcast(tensor, src=0)

    def commit(self) -> None:
        """End a step whose calls all succeeded. Raises `Failed` if it does not count."""
        self.done += 1

    def recover(self) -> None:
        """After a failure: leave the step out."""
        self.done += 1

    def agree(self) -> None:
        """Go on at the same step on all ranks, as a program does that loads a checkpoint."""
        step = torch.tensor(self.done)
        dist.all_reduce(step, dist.ReduceOp.MAX)
        self.done = int(step)

    def keep_ports(self) -> set[int]:
        """Ports of connections that are not those of the collectives, which the fault `reset` leaves alone."""
        return {int(os.environ["MASTER_PORT"]), *self.setting.ports}


class Detail(Plain):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL."""

    title = "DETAIL"
    debug = dist.DebugLevel.DETAIL


class Monitored(Plain):
    """torch.distributed.monitored_barrier before each collective."""

    title = "monitored_barrier"

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The barrier first."""
        dist.monitored_barrier(timeout=_LIMIT, wait_all_ranks=True)
        super().all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """The barrier first."""
        dist.monitored_barrier(timeout=_LIMIT, wait_all_ranks=True)
        super().broadcast(tensor)


class Abort(Plain):
    """torch's abort of all process groups, and a new default group of all ranks under another prefix of the store."""

    title = "torch abort"

    def run(self, loop: Callable[[], None]) -> None:
        """With a store of the program's own, which lives on when the groups are aborted."""
        self.builds = 0
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, int(os.environ["WORLD_SIZE"]), self.rank == 0)
        self._build()
        loop()

    def _build(self) -> None:
        store = dist.PrefixStore(str(self.builds), self.store)
        self.builds += 1
        # Ranks find out up to a limit apart, so those that come first have to wait for longer than one.
        size, wait = int(os.environ["WORLD_SIZE"]), _LIMIT * (2 if self.builds > 1 else 1)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size, timeout=wait)

    def recover(self) -> None:
        """Abort, and build again; raises what torch raises where a rank does not come."""
        super().recover()
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        self._build()
        self.agree()


class Reconfigure(Plain):
    """torch's `_reconfigure` of the default group (torch 2.15), with those that come to the program's rendezvous."""

    title = "torch reconfigure"
    there = hasattr(dist.distributed_c10d, "_reconfigure")

    def run(self, loop: Callable[[], None]) -> None:
        """The rendezvous is the program's affair: here over a store that lives on the first rank."""
        self.builds = 0
        address, port = os.environ["MASTER_ADDR"], self.setting.ports[0]
        self.store = dist.TCPStore(address, port, int(os.environ["WORLD_SIZE"]), self.rank == 0)
        options: dict[str, Any] = {"enable_reconfigure": True}
        dist.init_process_group("gloo", timeout=_LIMIT, **options)
        self._build()
        loop()

    def _build(self) -> None:
        """Who has come within the limit is in: the first rank says so after all have, or when the time is over."""
        c10d: Any = dist.distributed_c10d
        size, prefix = int(os.environ["WORLD_SIZE"]), f"build {self.builds}"
        self.store.set(f"{prefix}, rank {self.rank}", c10d._get_reconfigure_handle())
        if self.rank == 0:
            end = time.monotonic() + LIMIT
            keys = [f"{prefix}, rank {rank}" for rank in range(size)]
            while (here := [key for key in keys if self.store.check([key])]) != keys and time.monotonic() < end:
                time.sleep(0.05)
            self.store.set(prefix, json.dumps([self.store.get(key).decode() for key in here]))
        self.store.wait([prefix], 3 * _LIMIT)
        self.builds += 1
        handles = json.loads(self.store.get(prefix))
        c10d._reconfigure(uuid=self.builds, handles=handles, timeout=_LIMIT).wait()

    def recover(self) -> None:
        """The group again, and the same step on all its ranks."""
        super().recover()
        self._build()
        self.agree()


class Torchft(Plain):
    """torchft's Manager and a lighthouse; each rank is a replica group, as in its example of fault-tolerant DDP."""

    title = "torchft"
    package = "torchft"
    alone = True

    def run(self, loop: Callable[[], None]) -> None:
        """The manager, with the timeouts of torchft's example in the same proportion: 5 s and 10 s there."""
        from torchft import Manager, ProcessGroupGloo

        keep_log("torchft", logging.WARNING, self.setting.say)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=_LIMIT),
            min_replica_size=1,
            load_state_dict=lambda state: None,
            state_dict=dict,
            replica_id=f"rank_{self.rank}",
            timeout=2 * _LIMIT,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=self.setting.lighthouse,
        )
        # Else a rank that comes up early makes a quorum of its own, as min_replica_size allows.
        size = int(os.environ["WORLD_SIZE"])
        ready = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, self.rank == 0)
        ready.add("ready", 1)
        while ready.add("ready", 0) < size:
            time.sleep(0.05)
        try:
            loop()
        finally:
            self.manager.shutdown(wait=False)

    @property
    def step(self) -> int:
        """As the manager counts, which brings a rank that was away up to the others' step."""
        return int(self.manager.current_step())

    def begin(self) -> None:
        """What torchft's optimizer does at `zero_grad`."""
        self.manager.start_quorum()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """An error is kept by the manager until the commit."""
        self.manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
        if (error := self.manager.errored()) is not None:
            raise Failed(str(error.original_exception))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """On the manager's process group, as the manager itself has none."""
        self.manager.wait_quorum()
        self.manager._pg.broadcast_one(tensor, 0).wait()

    def commit(self) -> None:
        """What torchft's optimizer does at `step`."""
        if not self.manager.should_commit():
            raise Failed(f"should_commit() is False: {self.manager.errored()}")

    def recover(self) -> None:
        """The step is not committed, and the next quorum has who is there."""
        self.manager.should_commit()

    def keep_ports(self) -> set[int]:
        """All but those of gloo: a process may have told the kernel of no port but those of its servers."""
        from urllib.parse import urlparse

        addresses = [self.setting.lighthouse, self.manager._manager.address()]
        return {self.store.port, *(urlparse(address).port or 0 for address in addresses)}


class InProcess(Plain):
    """nvidia-resiliency-ext's in-process restart, as in its example for the CPU: the loop is the wrapped function."""

    title = "nvidia-resiliency-ext"
    package = "nvidia-resiliency-ext"
    alone = True

    def run(self, loop: Callable[[], None]) -> None:
        """The progress timeouts in seconds rather than minutes; the other intervals as they are."""
        from nvidia_resiliency_ext import inprocess

        keep_log("nvidia_resiliency_ext", logging.INFO, self.setting.say)
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            self.setting.ports[0],
            int(os.environ["WORLD_SIZE"]),
            self.rank == 0,
            multi_tenant=True,
        )

        @inprocess.Wrapper(
            store_kwargs={"port": self.setting.ports[1]},
            soft_timeout=_LIMIT,
            hard_timeout=2 * _LIMIT,
            heartbeat_timeout=_LIMIT,
            barrier_timeout=4 * _LIMIT,
            completion_timeout=4 * _LIMIT,
        )
        def train(call_wrapper: Any) -> None:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(str(call_wrapper.iteration), store),
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                timeout=_LIMIT,
            )
            self.agree()
            loop()

        train.__wrapped__.__annotations__["call_wrapper"] = inprocess.CallWrapper
        train(None)

    def recover(self) -> None:
        """Let the exception leave the wrapped function, which is then called again on all ranks."""
        raise  # noqa: PLE0704 - the loop calls this while it handles the exception


class Guarded(Plain):
    """`safe_all_reduce`; after a failure the program goes on without ranks that are gone."""

    title = "ncclguard"
    package = "ncclguard"
    on_lost: Any = "fail"

    def run(self, loop: Callable[[], None]) -> None:
        """Beside a gloo group of the program."""
        dist.init_process_group("gloo", timeout=_LIMIT)
        loop()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Raises the verdict."""
        import ncclguard as ng

        self._check(ng.safe_all_reduce(tensor, timeout=LIMIT, on_lost=self.on_lost))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Raises the verdict."""
        import ncclguard as ng

        self._check(ng.safe_broadcast(tensor, src=0, timeout=LIMIT, on_lost=self.on_lost))

    def _check(self, outcome: Any) -> None:
        if not outcome:
            raise Failed(f"{outcome.error}", list(outcome.culprits))

    def recover(self) -> None:
        """The same verdict on all ranks, so all leave the same step out."""
        super().recover()
        self.on_lost = "shrink"


class Watched(Plain):
    """Plain calls under `ncclguard.watch()`."""

    title = "ncclguard watch()"
    package = "ncclguard"

    def run(self, loop: Callable[[], None]) -> None:
        """Half of the limit for `watch`, so that it speaks before gloo gives up."""
        import ncclguard as ng
        from ncclguard import events

        say = self.setting.say

        class Heard(events.Listener):
            def incident_found(self, incident: Any) -> None:
                say(f"watch: {incident.cause} {list(incident.culprits)}: {incident.summary}")

        dist.init_process_group("gloo", timeout=_LIMIT)
        events.listen(Heard())
        ng.watch(timeout=LIMIT / 2)
        loop()


WAYS: Final[dict[str, type[Plain]]] = {
    "plain": Plain,
    "detail": Detail,
    "monitored": Monitored,
    "abort": Abort,
    "reconfigure": Reconfigure,
    "torchft": Torchft,
    "inprocess": InProcess,
    "watch": Watched,
    "guarded": Guarded,
}


def version(way: type[Plain]) -> str | None:
    """The version of the way's package here, None if it is not installed."""
    if way.package == "ncclguard":
        import ncclguard

        return ncclguard.__version__
    try:
        return importlib.metadata.version(way.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def keep_log(name: str, level: int, say: Callable[[str], None]) -> None:
    """Hand on what a package logs: it is where a way without a field for it would name a rank."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    logger = logging.getLogger(name)
    logger.setLevel(level)
    logger.addHandler(Handler(level))
