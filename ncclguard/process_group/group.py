"""A process group whose every collective ends, and whose communicator is rebuilt beneath it after a failure."""

# torch's stubs list a method's forms one by one; here one signature takes them all, and the older names are aliases.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.constants import default_pg_timeout

from ncclguard import lifecycle, torch_compat
from ncclguard.config import current_config
from ncclguard.coordination.envelopes import Box, Envelope
from ncclguard.engine import dispatch, runtime
from ncclguard.engine.call import Terms, terms_of
from ncclguard.engine.chunking import ChunkPlan
from ncclguard.engine.dispatch import Queue
from ncclguard.engine.execution import divided
from ncclguard.engine.table import Arguments, Collective
from ncclguard.engine.world import World
from ncclguard.errors import CollectiveFailed, GuardError
from ncclguard.groups import is_outside
from ncclguard.metrics.settings import config_of
from ncclguard.outcome import Outcome
from ncclguard.phases import current_phase
from ncclguard.process_group.any_source import Waiting
from ncclguard.process_group.operations import Operation, PartOperation, Perform
from ncclguard.process_group.operators import serve_cpp_callers
from ncclguard.process_group.work_queue import GuardedWork, Task, WorkQueue
from ncclguard_explain.language import told, tr
from ncclguard_explain.ranks import ranks_text


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of one call: `root` within the group, `timeout` in s or None for its own, `blocking`: to its end."""

    op: Any = ReduceOp.SUM
    root: int = 0
    timeout: float | None = None
    blocking: bool = False


def asked_for(
    options: Any = None, *, op: Any = None, root: int | None = None, timeout: timedelta | None = None
) -> Asked:
    """Read an options object, or the arguments of the forms without one: a reduce op, a root, a timeout."""
    if isinstance(options, timedelta):
        options, timeout = None, options
    elif isinstance(options, int) and not isinstance(options, (bool, ReduceOp.RedOpType)):
        options, root = None, options
    elif isinstance(options, (ReduceOp, ReduceOp.RedOpType)):
        options, op = None, options
    limit = timeout if timeout is not None else getattr(options, "timeout", None)
    seconds = limit.total_seconds() if limit is not None else 0.0
    return Asked(
        op=op if op is not None else getattr(options, "reduceOp", ReduceOp.SUM),
        root=root if root is not None else getattr(options, "rootRank", 0),
        timeout=seconds if seconds > 0 else None,  # torch's own word for "not given" is minus one millisecond
        blocking=not getattr(
            options, "asyncOp", True
        ),  # before torch 2.8 there is no such field: the caller waits itself
    )


def first(tensors: Tensors) -> torch.Tensor:
    """The first of several tensors, of which there must be one."""
    if not tensors:
        raise ValueError("a coalesced collective requires non-empty tensor lists: give at least one tensor")
    return tensors[0]


def gathered(outputs: Tensors) -> Any:
    """Return what the future of a gather holds: tensors on the CPU, as gloo's; one row of them on a GPU, as NCCL's."""
    return outputs if not outputs or outputs[0].device.type == "cpu" else [outputs]


def only(tensors: Any) -> Any:
    """The one tensor, or list of tensors, of a method that takes a list of one for each device."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(
            f"one tensor for each process is taken, not {len(tensors)}: use the coalesced form for several"
        )
    return tensors[0]


log = logging.getLogger("ncclguard")

#: The source of a receive from any, and the least limit of a call in seconds.
ANY, SHORTEST = -1, 0.001
Tensors = Sequence[torch.Tensor]


class Again(Protocol):
    """A way to run parts of the program that the other ranks do again when one is lost."""

    @property
    def running(self) -> bool:
        """Return whether such a part runs now, which an exception of it has to reach."""

    def __call__(self, part: Callable[[], Any], /) -> Any:
        """Return what `part` returns; where it raises because a rank is lost, all others call it once more."""


class GuardedProcessGroup(dist.ProcessGroup):
    """A `torch.distributed.ProcessGroup` over the engine.

    Every collective is bounded, and names who held it up when it fails.

    Made by `init_process_group("ncclguard")` or `new_group(backend="ncclguard")`; carries CPU tensors itself and
    CUDA tensors over NCCL. `timeout`: seconds of one collective; an enclosing `phase` goes before it. Blocking calls
    raise the typed errors of `ncclguard.errors`; asynchronous ones run in issue order in a thread of the group and
    raise at their `wait`. After a failure the next collective works again on the same object, unless a rank is gone.

    >>> import ncclguard
    >>> torch.distributed.is_backend_available("ncclguard")
    True
    """

    #: What a collective does that finds a rank gone: "fail", or "shrink": go on without it, with a smaller group.
    on_lost: Literal["fail", "shrink"] = "fail"
    #: Global ranks that took part in the last collective that succeeded; empty before the first.
    participants: tuple[int, ...] = ()
    #: What does a part of the program again without ranks that are lost in it; None where nothing does.
    again: Again | None = None

    def __init__(self, rank: int, size: int, timeout: float | None = None, stands_for: Any = None) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # torch's stub lacks the form for subclasses
        self._index = rank
        self._count = size
        self._timeout = timeout
        self._identity = self if stands_for is None else stands_for
        self._name = ""
        self.whole = self  # the group that this one stands for while it goes on without some ranks
        self._survivors: tuple[int, ...] | None = None  # global ranks, once it goes on without some
        self._smaller: dict[tuple[int, ...], GuardedProcessGroup] = {}  # by survivors, made by `go_on`
        self._parts: dict[tuple[int, ...], GuardedProcessGroup] = {}  # by ranks, made by `part`
        self._part_of: tuple[GuardedProcessGroup, tuple[int, ...]] | None = None  # of a part, with the part's ranks
        self._lane = "backend"  # the sequence of collectives among those that take part
        self._limits: list[float | None] = []  # of the scopes that this group is in
        self._observers: list[Callable[[Outcome], None]] = []
        self._queue = self._own_queue = WorkQueue("collectives", self._tell)
        self._sequence = 0  # collectives that were issued
        self._pairs: dict[tuple[int, int], WorkQueue] = {}
        self._begun: Counter[tuple[str, str, int, int]] = Counter()  # messages, by lane, device, source and target
        self._boxes: dict[tuple[str, str, int], Box] = {}
        self._waiting: dict[str, Waiting] = {}
        self._coalescing: list[GuardedWork] | None = None

    # ------------------------------------------------------------------ who it is

    def rank(self) -> int:
        return self._index

    def size(self) -> int:
        return self._count

    getRank, getSize = rank, size

    def name(self) -> str:
        return "ncclguard"

    getBackendName = _get_backend_name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)  # type: ignore[arg-type]

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]

    # What torch asks of the backends of a group, of which this one has none but itself.
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """The limit of collectives that are issued from now on."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    @property
    def options(self) -> Any:
        """The limit of a collective, as torch's backends tell it."""
        limit = self.limit()
        return torch_compat.backend_options(NAME, default_pg_timeout if limit is None else timedelta(seconds=limit))

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives were issued: torch's words for it, and gloo's count."""
        return self._sequence

    def shutdown(self) -> None:
        """Take no more collectives; what has not started is dropped."""
        for queue in self.queues():
            queue.close("its process group was destroyed")

    def abort(self) -> None:
        """Fail what runs, for all ranks, and take no more collectives."""
        for queue in self.queues():
            queue.drop("its process group was aborted")
            queue.close("its process group was aborted")

    def queues(self) -> list[WorkQueue]:
        """The sequences of collectives on this group: its own, and one for each pair of ranks that sends messages."""
        return [self._own_queue, *self._pairs.values()]

    # ------------------------------------------------------------------ without ranks that are gone

    def go_on(self, survivors: tuple[int, ...], number: int) -> GuardedProcessGroup:
        """From now on its collectives are those of `survivors`, global ranks in order, in a sequence of their own.

        All survivors call this at the same place, `number` times so far, with nothing pending. `rank()` and `size()`
        stay, and a root is named as before. Returns a group that has as many ranks as survivors, for what divides by
        the size or counts on rank 0, such as DDP; it shares this one's sequence of collectives. For the same survivors
        it is the same group again, because torch keeps what it has once worked out for a mesh, its group included.
        """
        self._survivors, self._lane = survivors, f"backend-{number}"
        self.participants = survivors
        smaller = self._smaller.get(survivors)
        if smaller is None:
            smaller = self._smaller_one(survivors)
            smaller._survivors, smaller.whole = survivors, self
            smaller._queue, smaller._pairs, smaller._begun = self._queue, self._pairs, self._begun
            smaller._own_queue = self._own_queue
            smaller._limits, smaller._observers = self._limits, self._observers
            self._smaller[survivors] = smaller
        smaller._lane = self._lane
        self._pairs.clear()
        return smaller

    @property
    def survivors(self) -> tuple[int, ...] | None:
        """The global ranks that go on, in order; None before it went on without one."""
        return self._survivors

    def among_survivors(self, terms: Terms, lane: str = "") -> tuple[Terms, Queue]:
        """Return the terms of a collective of those that go on, and its sequence: the group's, or one beside it."""
        if self._survivors is not None:
            terms = terms._replace(ranks=self._survivors, solo=len(self._survivors) == 1)
        return terms, Queue(f"{lane}-{self._lane}" if lane else self._lane, self._survivors)

    def _smaller_one(self, survivors: tuple[int, ...]) -> GuardedProcessGroup:
        return GuardedProcessGroup(
            survivors.index(dist.get_rank()), len(survivors), self._timeout, stands_for=self._identity
        )

    # ------------------------------------------------------------------ all parts of a group at once

    def part(self, ranks: tuple[int, ...]) -> GuardedProcessGroup:
        """Return the group of some ranks of this one, global and in order, made for `become_part`; always the same."""
        made = self._parts.get(ranks)
        if made is None:
            place = ranks.index(dist.get_rank())
            made = GuardedProcessGroup(place, len(ranks), self._timeout, stands_for=self._identity)
            made.become_part(self, ranks)
            self._parts[ranks] = made
        return made

    @property
    def is_part(self) -> bool:
        return self._part_of is not None

    def become_part(self, whole: GuardedProcessGroup, ranks: tuple[int, ...]) -> None:
        """Have collectives of this group, of the global `ranks`, carried by `whole`: a failure has one verdict on all.

        All ranks of `whole` are in a part of the same length, and call the same at the same place. Messages between two
        ranks stay as they are, and the end of this group is not that of `whole`.
        """
        self._part_of, self._queue = (whole, ranks), whole._queue

    # ------------------------------------------------------------------ a step of a training as the unit

    #: Each collective has its verdict when it has ended. Where a subclass only enqueues them, it says so here, and has
    #: them carried one by one where this is set.
    one_by_one = True

    def check(self) -> None:
        """Raise the typed error of a failure that nobody has seen."""

    def begin_step(self) -> None:
        """Begin what `commit` ends. Raises the typed error of a failure that nobody has seen."""

    def commit(self) -> None:
        """Return once all that was issued since `begin_step` is complete, and well, on all ranks."""

    def failed_since(self) -> Outcome | None:
        """Return the outcome of a failure since `begin_step` which an exception of another kind may come from."""
        return None

    def _place(self, root: int) -> int:
        """Return where a root is among those that take part; raises GuardError for one that is gone."""
        if self._survivors is None or self.whole is not self or not 0 <= root < self._count:
            return root
        rank = torch_compat.group_ranks(self._identity)[root]
        if rank not in self._survivors:
            raise GuardError(
                f"rank {rank} is gone, and {ranks_text(self._survivors)} go on without it: "
                "broadcast from, or collect on, one of these"
            )
        return self._survivors.index(rank)

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, **named: Any) -> GuardedWork:
        asked, tensor = asked_for(opts, timeout=timeout, **named), only(tensors)
        return self._issue("all_reduce", tensor, asked, [tensor], lambda o: o.all_reduce(tensor, asked.op))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> GuardedWork:
        asked = asked_for(opts)
        return self._issue("all_reduce", first(tensors), asked, tensors, lambda o: o.all_reduce_many(tensors, asked.op))

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, **named: Any
    ) -> GuardedWork:
        asked, tensor = asked_for(opts, op=op, timeout=timeout, **named), only(tensors)
        return self._issue(
            "reduce", tensor, asked, [tensor], lambda o: o.reduce(tensor, self._place(asked.root), asked.op)
        )

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, **named: Any
    ) -> GuardedWork:
        asked, output = asked_for(opts, timeout=timeout, **named), only(outputs)
        sent = inputs if isinstance(outputs, torch.Tensor) else only(inputs)
        return self._issue(
            "reduce_scatter", output, asked, [output], lambda o: o.reduce_scatter(output, sent, asked.op)
        )

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> GuardedWork:
        asked = asked_for(opts)
        return self._issue(
            "reduce_scatter", output, asked, [output], lambda o: o.reduce_scatter_flat(output, tensor, asked.op)
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GuardedWork:
        asked = asked_for(opts)
        return self._issue(
            "reduce_scatter", first(outputs), asked, outputs, lambda o: o.reduce_scatter_many(outputs, inputs, asked.op)
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ------------------------------------------------------------------ moving data

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, **named: Any) -> GuardedWork:
        asked, tensor = asked_for(opts, timeout=timeout, **named), only(tensors)
        return self._issue("broadcast", tensor, asked, [tensor], lambda o: o.broadcast(tensor, self._place(asked.root)))

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> GuardedWork:
        asked, tensor = asked_for(opts, timeout=timeout), only(tensors)
        slots = outputs if isinstance(tensors, torch.Tensor) else only(outputs)
        return self._issue("all_gather", tensor, asked, gathered(slots), lambda o: o.all_gather(slots, tensor))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> GuardedWork:
        return self._issue("all_gather", tensor, asked_for(opts), [output], lambda o: o.all_gather_flat(output, tensor))

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> GuardedWork:
        """`outputs[i][k]` is `tensors[k]` of the i-th rank of the group."""
        by_tensor = [list(own) for own in zip(*outputs, strict=True)]
        return self._issue(
            "all_gather", first(tensors), asked_for(opts), outputs, lambda o: o.all_gather_many(by_tensor, tensors)
        )

    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> GuardedWork:
        return self._issue(
            "all_gather", first(tensors), asked_for(opts), outputs, lambda o: o.all_gather_flat_many(outputs, tensors)
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None, **named: Any
    ) -> GuardedWork:
        asked, tensor = asked_for(opts, timeout=timeout, **named), only(tensors)
        slots = outputs if isinstance(tensors, torch.Tensor) else only(outputs) if outputs else []
        return self._issue(
            "gather", tensor, asked, gathered(slots), lambda o: o.gather(slots, tensor, self._place(asked.root))
        )

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, **named: Any
    ) -> GuardedWork:
        asked, output = asked_for(opts, timeout=timeout, **named), only(outputs)
        sent = inputs if isinstance(outputs, torch.Tensor) else only(inputs) if inputs else []
        return self._issue(
            "scatter", output, asked, [output], lambda o: o.scatter(output, sent, self._place(asked.root))
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GuardedWork:
        return self._issue("all_to_all", inputs[0], asked_for(opts), outputs, lambda o: o.all_to_all(outputs, inputs))

    def exchange(self, outputs: Tensors, inputs: Tensors, sizes: object) -> GuardedWork:
        """An all-to-all where every rank knows what all of them send: `sizes` stands for that, alike on all ranks."""
        return self._issue("all_to_all", inputs[0], Asked(), outputs, lambda o: o.all_to_all(outputs, inputs, sizes))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> GuardedWork:
        """Split along the first dimension, evenly where no splits are given."""
        received, sent = _split(output, output_splits, self._count), _split(tensor, input_splits, self._count)
        return self._issue("all_to_all", tensor, asked_for(opts), [output], lambda o: o.all_to_all(received, sent))

    alltoall_base = all_to_all_single

    def send(self, tensors: Any, peer: int, tag: int = 0) -> GuardedWork:
        return self._message(only(tensors), self._index, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> GuardedWork:
        work = self._message(only(tensors), peer, self._index, tag)
        work.sources.append(peer)
        return work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> GuardedWork:
        """Receive the first message with this tag that some rank waits to be rid of; `source_rank` tells whose."""
        tensor, sources = only(tensors), list[int]()
        if self._is_joining():
            return self._message(tensor, self._index, self._index, tag)
        # Failures of the message itself are told by the queue of its pair.
        queue = self._pairs.get((ANY, self._index))
        if queue is None:
            queue = self._pairs[(ANY, self._index)] = WorkQueue("messages-any", lambda outcome: None)
        terms, waiting = self._operation(tensor, None, queue).terms, self._messages(tensor.device)
        text = f"recv({tensor.numel()} elements, from any source, tag {tag})"

        def perform() -> None:
            queue.running(waiting)
            try:
                source = self._global_ranks().index(
                    waiting.next(runtime.of(self._identity).monitor, text, tag, terms.deadline)
                )
            except CollectiveFailed as error:
                self._tell(error.outcome)
                raise
            finally:
                queue.running(None)
            left = max(terms.deadline - time.monotonic(), SHORTEST)
            self._message(tensor, source, self._index, tag, left).wait()
            sources.append(source)

        work = self._start(queue, "recv", tensor, [tensor], perform, False)
        work.sources = sources
        return work

    # ------------------------------------------------------------------ waiting

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> GuardedWork:
        return self._issue("barrier", None, asked_for(opts, timeout=timeout), [], lambda o: o.barrier())

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A blocking barrier; like every collective of this group it names who did not come, on all ranks.

        Its error says so in torch's words too: of the first, or with `wait_all_ranks` of all of them.
        """
        limit = None if timeout is None or timeout < timedelta(0) else max(timeout.total_seconds(), SHORTEST)
        try:
            self._issue("barrier", None, Asked(timeout=limit, blocking=True), [], lambda o: o.barrier())
        except CollectiveFailed as error:
            absent = error.outcome.culprits[: None if wait_all_ranks else 1]
            words = [f"Rank {torch_compat.own_rank(self._identity)} timed out in monitoredBarrier"] * isinstance(
                error, TimeoutError
            )
            if absent:
                ranks = f"Rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
                words.append(f"{ranks} failed to pass monitoredBarrier in {1000 * error.outcome.seconds:.0f} ms")
            error.args = (" ".join((str(error), *(f"{sentence}." for sentence in words))),)
            raise

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> GuardedWork:
        """All collectives since `_start_coalescing` as one work, which has ended when they have."""
        together, self._coalescing = self._coalescing or [], None
        work = GuardedWork("the coalesced collectives", None, None)
        return self._queue.issue(Task("the coalesced collectives", lambda: _wait_for(together), work), False)

    def stop_coalescing(self) -> None:
        """End what `_start_coalescing` began, after an exception."""
        self._coalescing = None

    # ------------------------------------------------------------------ the way to the engine

    def limit(self, argument: float | None = None) -> float | None:
        """Seconds of one collective that is issued here and now; None where the enclosing phase says it."""
        given = [seconds for seconds in (argument, *reversed(self._limits)) if seconds is not None]
        if given:
            return given[0]
        if current_phase() is not None:
            return None
        if self._timeout is not None:
            return self._timeout
        config = config_of(torch_compat.group_name(self._identity), current_config())
        return config.timeout or config.timeout_eval

    def _issue(
        self,
        op: str,
        tensor: torch.Tensor | None,
        asked: Asked,
        results: Any,
        plan: Callable[[Operation], Perform],
    ) -> GuardedWork:
        self._sequence += 1
        if self._is_joining():
            return self._start(self._queue, op, tensor, results, lambda: _fill(tensor, results), asked.blocking)
        operation = self._operation(tensor, asked.timeout, self._queue)
        return self._start(self._queue, op, tensor, results, plan(operation), asked.blocking)

    def _is_joining(self) -> bool:
        """Return whether this process has not joined the others of the job yet."""
        return self._survivors is None and lifecycle.is_joining() and not is_outside(self._identity)

    def _operation(
        self,
        tensor: torch.Tensor | None,
        timeout: float | None,
        issued: WorkQueue,
        pair: tuple[int, int] | None = None,
        lane: str = "",
        name: str | None = None,
    ) -> Operation:
        if self._part_of is not None and pair is None:
            return self._part_operation(*self._part_of, tensor, timeout)
        numel, whole = 0 if tensor is None else tensor.numel(), self.whole
        on_lost = whole.on_lost if pair is None else "fail"
        terms = terms_of(self._identity, self.limit(timeout), numel, atomic=True, on_lost=on_lost, name=name)
        terms, queue = self.among_survivors(terms, lane)
        index = self._index if self._survivors is None else self._survivors.index(dist.get_rank())
        if pair is not None:
            source, target = (terms.ranks[self._place(place)] for place in pair)
            queue = Queue(f"{self._lane}:{source}>{target}", tuple(sorted((source, target))))

        def run(collective: Collective, arguments: Arguments, cut: ChunkPlan, **said: Any) -> None:
            like = said.get("like", arguments.tensor)
            device = like.device
            here = runtime.of(self._identity)
            guarded = here.group(self._identity, device, queue.name, queue.ranks)
            issued.running(guarded)
            try:
                outcome = dispatch.run(collective, arguments, terms, cut, queue=queue, **said).raise_if_failed()
            except CollectiveFailed as error:
                by_itself = not error.outcome.agreed or error.outcome.culprits == (here.rank,)
                error._given_up = guarded.given_up and by_itself
                raise
            finally:
                issued.running(None)
            if pair is None:
                whole.participants = outcome.participants

        return Operation(terms, index, run)

    def _part_operation(
        self, carrier: GuardedProcessGroup, ranks: tuple[int, ...], tensor: torch.Tensor | None, timeout: float | None
    ) -> Operation:
        carried = carrier._operation(tensor, timeout, self._queue)
        there = carried.terms.ranks
        if len(there) != carrier.size():
            raise GuardError(
                told(
                    "process group {name} is a part of a group of which {ranks} go on without the others: use the groups "
                    "of the mesh that the model is on now",
                    name=self._name,
                    ranks=ranks_text(there),
                )
            )
        return PartOperation(carried, [there.index(rank) for rank in ranks])

    def _start(
        self, queue: WorkQueue, op: str, tensor: torch.Tensor | None, results: Any, perform: Perform, blocking: bool
    ) -> GuardedWork:
        device = None if tensor is None else tensor.device
        name = self._name or torch_compat.group_name(self._identity)
        text = tr("{operation} on process group {group}", operation=op, group=name)
        work = GuardedWork(text, results, device)
        stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None
        together = self._coalescing
        nbytes = 0 if tensor is None else tensor.numel() * tensor.element_size()
        queue.issue(Task(text, perform, work, stream, nbytes), blocking and together is None)
        if together is not None:
            together.append(work)
        return work

    def _message(
        self,
        tensor: torch.Tensor,
        source: int,
        target: int,
        tag: int,
        timeout: float | None = None,
    ) -> GuardedWork:
        """One message from `source` to `target`, in a sequence of its own for each direction of each pair."""
        for peer in (source, target):
            if not 0 <= peer < self._count:
                raise ValueError(f"rank {peer} is not in the group, which has {self._count} ranks")
        if self._is_joining():
            return self._start(self._queue, "send_recv", None, [tensor], lambda: None, False)
        if source == target:
            raise ValueError(f"rank {source} cannot send to itself: copy the tensor")
        pair = (source, target)
        queue = self._pairs.get(pair)
        if queue is None:
            queue = self._pairs[pair] = WorkQueue(f"messages-{source}-{target}", self._tell)
        operation = self._operation(tensor, timeout, queue, pair)
        places = self._place(source), self._place(target)
        message = operation.message(tensor, *places, tag)
        ranks = operation.terms.ranks[places[0]], operation.terms.ranks[places[1]]

        def perform() -> None:
            number = self._begun[(self._lane, device, *ranks)]
            self._begun[(self._lane, device, *ranks)] += 1
            if source == self._index:
                envelope = Envelope(ranks[0], number, tag)
                with runtime.of(self._identity).monitor.envelopes.sending(self._box(tensor.device, ranks[1]), envelope):
                    message()
            else:
                message()

        device = tensor.device.type
        return self._start(queue, "send_recv", tensor, [tensor], perform, False)

    def _global_ranks(self) -> tuple[int, ...]:
        """Return the global ranks in the order in which this object counts them."""
        whole = self._survivors is None or self.whole is self
        return torch_compat.group_ranks(self._identity) if whole else self._survivors or ()

    def _box(self, device: torch.device, owner: int) -> Box:
        """Return where the messages to a rank are told, for its receives from any source."""
        place = (self._lane, device.type, owner)
        if place not in self._boxes:
            key = runtime.of(self._identity).key(self._identity, device, f"{self._lane}:any>{owner}", self._survivors)
            senders = tuple(rank for rank in self._survivors or self._global_ranks() if rank != owner)
            self._boxes[place] = Box(f"any/{key}", senders)
        return self._boxes[place]

    def _messages(self, device: torch.device) -> Waiting:
        """Return the messages that wait for this rank, for its receives from any source."""
        own, ranks, lane = torch_compat.own_rank(self._identity), self._global_ranks(), self._lane
        box = self._box(device, own)

        def received(source: int) -> int | None:
            queue = self._pairs.get((ranks.index(source), self._index))
            busy = queue is not None and queue.busy
            return None if busy else self._begun[(lane, device.type, source, own)]

        return self._waiting.setdefault(box.name, Waiting(box, received))

    # ------------------------------------------------------------------ scopes

    def enter_scope(self, limit: float | None, observer: Callable[[Outcome], None]) -> None:
        """Inside, collectives have `limit` seconds (None: as before) and `observer` is told of every failed outcome."""
        self._limits.append(limit)
        self._observers.append(observer)

    def finish(self, raised: str = "") -> None:
        """Return when nothing is pending; `raised` drops what has not started and fails what runs, for all ranks."""
        for queue in self.queues():
            if raised:
                queue.drop(raised)
        for queue in self.queues():
            queue.drain(raised)

    def leave_scope(self) -> None:
        self._limits.pop()
        self._observers.pop()

    def _tell(self, outcome: Outcome) -> None:
        for observer in tuple(self._observers):
            observer(outcome)


def _wait_for(works: Sequence[GuardedWork]) -> None:
    """Wait for all before the first error is raised: none may go on when the work says it has ended."""
    errors = []
    for work in works:
        try:
            work.wait()
        except Exception as error:  # noqa: BLE001 - the first of them is raised below
            errors.append(error)
    if errors:
        raise errors[0]


def _fill(tensor: torch.Tensor | None, results: Any) -> None:
    """Return what a rank gets that has not joined the others yet: what it gave, in every place."""
    for result in results or ():
        if isinstance(result, torch.Tensor):
            if tensor is not None and result is not tensor:
                whole = result.data.reshape(-1)
                given = tensor.detach().reshape(-1)[: whole.numel()]
                whole.copy_(given.repeat(-(-whole.numel() // max(given.numel(), 1)))[: whole.numel()])
        else:
            _fill(tensor, result)


def _split(tensor: torch.Tensor, sizes: Sequence[int], count: int) -> list[torch.Tensor]:
    """Views of contiguous parts along the first dimension, one for each rank."""
    if not tensor.is_contiguous() or tensor.dim() == 0:
        # torch's words first: its own tests look for them.
        raise ValueError(
            "Tensors must be contiguous, with a first dimension to split, for all_to_all_single: reshape it"
        )
    rows = tensor.size(0)
    if not sizes and rows % count:
        raise ValueError(f"{rows} rows cannot be split evenly among {count} ranks: give the split sizes")
    sizes = list(sizes) or [rows // count] * count
    if len(sizes) != count or sum(sizes) != rows:
        raise ValueError(f"split sizes {sizes} do not add up to {rows} rows for {count} ranks: give one for each rank")
    return divided(tensor.detach(), sizes)


#: The name of the backend for `init_process_group` and `new_group`.
NAME = "ncclguard"
#: Those whose tensors a group carries: with one more that this torch lacks, torch's ShardedTensor gathers on that.
DEVICES: Final = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]  # type: ignore[no-untyped-call]
#: What is told of a group outside the job that is being made: fields of its `World`, and `within` how many seconds.
told_of_world: ContextVar[dict[str, Any]] = ContextVar("told_of_world", default={})  # noqa: B039 - it is never changed


def register() -> None:
    """Make the backend known to torch; once. Other groups, and the defaults of torch, are not touched."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
        torch_compat.records_itself(NAME)
        torch_compat.open_monitored_barrier(GuardedProcessGroup)


def serve_what_is_there(name: str) -> None:
    """Have torch know of no CUDA of a backend where there is no GPU: its ShardedTensor would be gathered on that.

    Asked where a group is made, and by NVML where it is there: a process that imports this may yet fork.
    """
    if not torch.cuda.device_count():
        dist.Backend.backend_capability[name] = ["cpu"]


def _create(options: Any, _: Any) -> dist.ProcessGroup:
    serve_cpp_callers()
    serve_what_is_there(NAME)
    # torch's default is nobody's choice: the guard's own settings come before it.
    chosen = None if options.timeout == default_pg_timeout else options.timeout.total_seconds()
    group = GuardedProcessGroup(options.group_rank, options.group_size, chosen)
    if is_made_outside(options) and options.group_size > 1:
        told = dict(told_of_world.get())
        within = told.pop("within", min(options.timeout.total_seconds(), runtime.CONNECT_WITHIN))
        given = {"store": options.store, "group": options.group_id, **told}
        world = World(rank=options.group_rank, size=options.group_size, **given)
        runtime.begin_outside(group, world, within)
    return group


def is_made_outside(options: Any) -> bool:
    """Return whether this is neither the default group nor one of new_group(), but has a store of its own."""
    return not options.global_ranks_in_group and options.group_id != "0"
