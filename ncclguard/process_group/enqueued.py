"""CUDA collectives at NCCL's own speed, on the caller's tensors.

torch's own NCCL backend carries them; they are judged as `watch` judges, and a verdict is followed by a new
communicator beneath the same group.
"""

# torch's stubs list a method's forms one by one; here one signature takes them all.
# mypy: disable-error-code="override"

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.constants import default_pg_timeout

from ncclguard import lifecycle, torch_compat
from ncclguard.coordination.incidents import NOBODY_WAITS
from ncclguard.engine import runtime
from ncclguard.errors import CollectiveMismatch, GuardConfigError, GuardError, error_for
from ncclguard.groups import group_of
from ncclguard.incident.model import Incident
from ncclguard.outcome import Outcome, of_incident
from ncclguard.phases import resolve_timeout
from ncclguard.process_group.group import (
    DEVICES,
    GuardedProcessGroup,
    asked_for,
    is_made_outside,
    serve_what_is_there,
)
from ncclguard.process_group.operations import Operation, Perform
from ncclguard.process_group.operators import first_tensor, serve_cpp_callers
from ncclguard.process_group.starts import Marks, captures
from ncclguard.transport.base import TransportError
from ncclguard.transport.bounded import bounded, in_background
from ncclguard.watch import watcher
from ncclguard.watch.recorder import Pending
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import tr

#: The name of the backend for `init_process_group` and `new_group`.
NAME: Final = "ncclguard-nccl"
#: Causes after which every group of the job has to be made anew: a rank of it will not come any more.
_GONE: Final = (Cause.LOST, Cause.FAILED, Cause.EXITED)
#: Seconds that NCCL may take to connect once all ranks are there, and that an abort may take.
_CONNECT_WITHIN: Final = 60.0
#: Seconds that a collective which NCCL refuses waits for the verdict on who broke it.
_EXPLAINED_WITHIN: Final = 10.0
#: Seconds that an abort waits for the end of a capture, which it would break: nothing in one waits for the device.
_CAPTURES_WITHIN: Final = 10.0
#: The pauses between two looks at what the GPU has done.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.00005, 0.001


class Failures:
    """The communicators of this process that failed: one verdict ends all of them, and its error is raised once.

    `life` counts the verdicts of the job that ended them, so that it is the same on all ranks once they have adopted
    the same verdicts; `count` those that ended one here. `interrupts`: a thread that issued what a verdict is about,
    and the main thread, get its error at once; else with the next collective, `check`, or `commit`.
    """

    def __init__(self) -> None:
        self.life = self.count = 0
        self.pending: Outcome | None = None  # known here and not raised yet
        self.last: Outcome | None = None
        self.interrupts = True
        self.lock = threading.Lock()
        self._forgotten: set[int] = set()  # ranks that the others go on without
        self._groups: weakref.WeakSet[EnqueuedProcessGroup] = weakref.WeakSet()
        self._interrupted: tuple[int, ...] = ()  # threads that have an exception on its way

    def enroll(self, group: EnqueuedProcessGroup) -> None:
        with self.lock:
            self._groups.add(group)

    def begin(self) -> None:
        """Count the verdicts from the first again, in a new default group or a new session of it."""
        with self.lock:
            self.life, self.pending, self.last, self._interrupted = 0, None, None, ()
            self._forgotten.clear()
            groups = list(self._groups)
        for group in groups:
            group.give_up()

    def end(self, incident: Incident, life: int, pending: Sequence[Pending], seconds: float) -> None:
        """A verdict, in the watcher's thread: have everything that it ends raise its error, and abort it.

        A thread that issued what is pending here gets the error as soon as it is back in Python, and so does the main
        thread: it may be waiting for the device, which is told of an abort as of a success.
        """
        if incident.cause not in _GONE and not _is_enqueued(incident.group):
            return
        outcome = of_incident(incident, seconds, torn=True)
        threads = {one.thread for one in pending if _is_enqueued(one.channel)}
        with self.lock:
            groups = list(self._groups)
            if self._is_done_with(outcome):
                return
            self.life, self.last = max(self.life, life), outcome
            ended = [(group, group.let_go(life)) for group in groups]
            aborted = [backend for _, backend in ended if backend is not None]
            if not aborted:
                return
            self.count += 1
            self.pending = outcome
            if threads and self.interrupts:
                self._interrupted = watcher.interrupt(threads, incident, seconds, self.told)
        for group in {group.whole for group, backend in ended if backend is not None}:
            group._tell(outcome)
        for backend in aborted:
            _abort(backend)

    def without(self, lost: Sequence[int]) -> None:
        """Go on without these: their verdicts count no more, and no communicator, which some ranks have aborted."""
        with self.lock:
            self._forgotten |= {*lost}
            if self.pending is not None and self._is_done_with(self.pending):
                self.pending = None
            groups = list(self._groups)
        for group in groups:
            group.give_up()

    def _is_done_with(self, outcome: Outcome) -> bool:
        """Return whether the others go on without whoever a verdict says is gone; the lock is held.

        Where nobody waited, a culprit that is there has raised something, which an evaluation may have survived.
        """
        gone = {*outcome.culprits}
        if outcome.incident is not None and outcome.incident.group == NOBODY_WAITS:
            dead = {one.rank for one in outcome.incident.ranks if one.cause in (Cause.LOST, Cause.EXITED)}
            gone = gone & dead or gone
        return bool(gone) and gone <= self._forgotten

    def within(self, ranks: Sequence[int]) -> list[EnqueuedProcessGroup]:
        """Return the groups of this process that have no other ranks than these, in an order alike on all ranks."""
        with self.lock:
            inside = [one for one in self._groups if one.whole is one and {*one.members} <= {*ranks}]
        return sorted(inside, key=lambda one: one.group_name)

    def told(self) -> None:
        """The error has been raised."""
        self.pending = None

    def raise_pending(self) -> None:
        """Raise the error that nobody has seen; in no other thread then."""
        with self.lock:
            outcome, self.pending = self.pending, None
            interrupted, self._interrupted = self._interrupted, ()
        if outcome is not None:
            for thread in interrupted:  # else it came a second time, in the middle of what handles the first
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
            raise error_for(outcome)

    def raise_since(self, count: int) -> None:
        """Raise the error of a verdict since there were `count`, whether or not anybody has seen it."""
        self.raise_pending()
        if self.count != count and self.last is not None:
            raise error_for(self.last)

    def explain(self, text: str, rank: int) -> None:
        """NCCL has refused a collective, in words: raise the typed error of the verdict on it; return if none comes."""
        observer = runtime.current().watcher
        if isinstance(observer, watcher.Watcher) and self.pending is None:
            observer.suspect(tr("a collective broke on rank {rank}: {text}", rank=rank, text=text))
        _wait_until(lambda: self.pending is not None)
        self.raise_pending()

    def raise_coming(self, count: int) -> None:
        """Raise the error of a verdict since there were `count`, which others have; return if none comes."""
        _wait_until(lambda: self.count != count)
        self.raise_since(count)

    def raise_life(self, life: int) -> None:
        """Raise the error of the verdict that began a life, which others may have before; return if none comes."""
        _wait_until(lambda: self.life >= life)
        self.raise_pending()
        if self.life >= life and self.last is not None:
            raise error_for(self.last)


def _wait_until(known: Callable[[], bool]) -> None:
    """Wait for a verdict that is on its way; return all the same in time."""
    end = time.monotonic() + _EXPLAINED_WITHIN
    while not known() and time.monotonic() < end:
        time.sleep(0.005)


failures: Final = Failures()


def _abort(backend: Any) -> None:
    """Abort a communicator behind the captures of the program, which it would break, in a thread nobody waits for."""

    def abort() -> None:
        captures.wait(_CAPTURES_WITHIN)
        backend.abort()

    in_background("aborting NCCL", abort)


class EnqueuedProcessGroup(GuardedProcessGroup):
    """A guarded group whose CUDA collectives are torch's own NCCL's: enqueued on the caller's tensors, and no more.

    CPU tensors go as on any guarded group. All CUDA tensors of a group are on one device, that of the first one.
    `ranks`: global ranks of the group, in order.
    """

    #: Set: CUDA collectives are carried as those of any guarded group, each with its verdict.
    one_by_one = False

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        name: str,
        ranks: tuple[int, ...],
        timeout: float | None,
        stands_for: Any = None,
    ):
        super().__init__(rank, size, timeout, stands_for)
        self._store = store
        self._recorded = name
        self._ranks = ranks
        self._carrier = self  # has the communicator: this group, or the smaller one that it goes on as
        self._made: Any = None  # the communicator, also while it connects
        self._backend: Any = None  # the same, once it can be used
        self._device: torch.device | None = None
        self._marks: Marks | None = None  # of the communicator's calls
        self._plain: Any = None  # a group of torch's around the backend, for forms that a backend lacks in Python
        self._counted: tuple[torch.Tensor, torch.Tensor] | None = None  # ranks that have come, on device and host
        self._life = -1
        self._coalesces_on: Any = None
        self._connecting = threading.RLock()
        self._tries = 0  # communicators that were begun, also those that could not be made
        self._channel = name  # the flight recorder's name of the last one
        self._enqueued = 0  # collectives on this communicator, and what they were, as one number
        self._mark = 0
        self._latest = ""
        self._since = 0  # verdicts before the step in progress
        self._uncommitted = True
        self._refused: Exception | None = None  # why the step cannot count
        failures.enroll(self)

    supports_coalescing = True

    def name(self) -> str:
        return NAME

    getBackendName = _get_backend_name = name

    # ------------------------------------------------------------------ what `watch` reads

    @property
    def beneath(self) -> Any:
        """The NCCL backend that carries CUDA tensors at present, or None."""
        return self._carrier._backend

    @property
    def recorded_as(self) -> str:
        """Return what the flight recorder calls the group: another name for each communicator."""
        return self._carrier._channel

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks of those that take part."""
        return self._survivors or self._ranks

    def has_reached(self, issued: int) -> bool:
        """Return whether the device has come to what the recorder has as issued at this time; also where unknown."""
        marks = self._carrier._marks
        return marks is None or marks.reached(issued)

    # ------------------------------------------------------------------ NCCL beneath

    def nccl(self, device: torch.device) -> Any:
        """The backend to issue on. Raises the typed error of a verdict that nobody has seen.

        Connects with the first use and after each verdict: all ranks meet on the host for it.
        """
        carrier = self._carrier
        backend = carrier._backend
        if backend is None or failures.pending is not None:
            return carrier._connect(device)
        return backend

    def let_go(self, life: int) -> Any:
        """Give up the communicator of an earlier life than this, and return it; None where there is none."""
        if self._made is None or self._life >= life:
            return None
        watcher.limits.pop(self._channel, None)
        made, self._made, self._backend = self._made, None, None
        return made

    def give_up(self) -> None:
        """Abort the communicator."""
        made = self.let_go(self._life + 1)
        if made is not None:
            _abort(made)

    def _connect(self, device: torch.device) -> Any:
        failures.raise_pending()
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "the first collective of a guarded group connects the ranks, which a CUDA graph cannot capture: "
                "call one before the capture"
            )
        with self._connecting:
            if self._backend is not None:
                return self._backend
            met = self._meet(connecting=True)
            while met.committing:  # of a step that has failed here: they will come to this too
                met = self._meet(connecting=True)
            self._tries = met.tries + 1  # on all ranks: no communicator may find what one before it has left behind
            made = torch_compat.new_enqueued_group(
                torch_compat.PrefixStore(f"{self._lane}/{self._tries}", self._store),
                self._next_channel(),
                self.members,
                self._index,
            )
            with failures.lock:
                failures.life = max(failures.life, met.life)
                self._life, self._made, self._device = met.life, made, device
            try:
                self._connect_all(made, device)
                self._counted, self._marks = _counter(device), Marks(device)
                self._plain = torch_compat.plain_group(made, self._store)
            except BaseException:
                self.give_up()
                raise
            self._enqueued, self._mark, self._latest = 0, 0, ""
            with failures.lock:
                self._backend = self._made  # None after a verdict, which the others have too, or will
                if self._backend is not None:
                    watcher.limits[self._channel] = self.limit
                    return self._backend
        failures.raise_life(met.life + 1)
        raise GuardError(f"process group {self.group_name} was ended while it connected: call the collective again")

    def _next_channel(self) -> str:
        step = "" if self._survivors is None else f"/{self._lane}"
        self._channel = f"{self._recorded}{step}" if self._tries == 1 else f"{self._recorded}{step}#{self._tries}"
        return self._channel

    def _connect_all(self, made: Any, device: torch.device) -> None:
        """Connect, and agree on whether all ranks are. Raises GuardError on all ranks where one is not."""
        life, error = self._life, None
        try:
            bounded("connecting NCCL", lambda: self._join(made, device), _CONNECT_WITHIN, made.abort)
        except (TransportError, torch.OutOfMemoryError) as caught:
            error = caught
        waited = isinstance(error, TransportError) and error.__cause__ is None  # for those that could not
        met = self._meet(connecting=True, joined=True, broken=0 if error is None else 1 if waited else 2)
        if met.life > life:  # some had a verdict before they said this, and the others will have it
            failures.raise_life(met.life)
        if met.broken or met.life > life:
            here = error is not None and (met.broken == 1 or not waited)
            why = error if here else "another rank could not connect, and its log says why"
            raise GuardError(
                f"no NCCL communicator could be made for process group {self.group_name}: {why}. Set NCCL_DEBUG=WARN"
            ) from error

    @staticmethod
    def _join(made: Any, device: torch.device) -> bool:
        with torch.cuda.device(device):
            made.eager_connect_single_device(device)
        return True

    def _meet(self, *, connecting: bool = False, joined: bool = False, broken: int = 0, ended: bool = False) -> _Met:
        """Meet the other ranks on the host and return the largest of what each says; raises the error of a failure.

        Who connects and who ends a step meet in the same sequence, so that neither waits for the other in vain.
        """
        mark, tries = 0 if connecting else self._carrier._mark, self._carrier._tries
        limit = self.limit()
        if joined and limit is not None:
            limit += _CONNECT_WITHIN  # whoever could not connect is here before those that wait for it there
        said = torch.tensor([failures.life, connecting, not connecting, broken, tries, ended, mark, -mark])
        operation = self._operation(said, limit, self._queue, lane="nccl", name="meeting of the hosts")
        operation.all_reduce(said, ReduceOp.MAX)()
        life, connects, commits, failed, most, stopped, largest, smallest = said.tolist()
        return _Met(life, connects, commits, failed, most, stopped, largest == -smallest)

    def _compare(self) -> None:
        """Raise CollectiveMismatch on all ranks: what they have enqueued differs, though all of it has ended."""
        operation = self._operation(None, None, self._queue, lane="nccl", name="meeting of the hosts")
        try:
            operation.barrier(**self._carrier._enqueued_here())()
        finally:
            self._carrier.give_up()

    def _enqueued_here(self) -> dict[str, Any]:
        """Return what has to be alike on all ranks, in words and as a key; nothing without a communicator."""
        if self._backend is None:
            return {}
        said = f"{self._enqueued} collectives enqueued, the last {self._latest}, mark {self._mark:x}"
        return {"detail": said, "key": (self._enqueued, self._mark)}

    # ------------------------------------------------------------------ without ranks that are gone

    def go_on(self, survivors: tuple[int, ...], number: int) -> GuardedProcessGroup:
        smaller = super().go_on(survivors, number)
        assert isinstance(smaller, EnqueuedProcessGroup)
        self._carrier, smaller._uncommitted = smaller, True
        failures.without([rank for rank in self._ranks if rank not in survivors])
        return smaller

    def _smaller_one(self, survivors: tuple[int, ...]) -> GuardedProcessGroup:
        return EnqueuedProcessGroup(
            survivors.index(dist.get_rank()),
            len(survivors),
            self._store,
            self._recorded,
            survivors,
            self._timeout,
            stands_for=self._identity,
        )

    # ------------------------------------------------------------------ waiting

    def check(self) -> None:
        """Raise the typed error of a verdict that nobody has seen, without waiting for the device."""
        failures.raise_pending()

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """The meeting of the hosts: returns once all that was issued before is complete, and well, on all ranks.

        They compare what they have enqueued: NCCL ends collectives of different sizes too, with rubbish.
        """
        if self.whole.one_by_one:
            return super().barrier(opts, timeout)
        carrier = self._carrier
        said = carrier._enqueued_here()  # before the wait, which all ranks with a communicator come back from, or none
        self._finish()

        def plan(operation: Operation) -> Perform:
            perform = operation.barrier(**said)

            def compared() -> None:
                try:
                    perform()
                except CollectiveMismatch as error:
                    carrier.give_up()
                    raise error_for(dataclasses.replace(error.outcome, torn=True)) from None

            return compared

        return self._issue("barrier", None, asked_for(opts, timeout=timeout), [], plan)

    def begin_step(self) -> None:
        self._since, self._carrier._uncommitted, self._refused = failures.count, True, None
        failures.raise_pending()

    def commit(self) -> None:
        if self._refused is not None:
            raise self._refused
        if not self._carrier._uncommitted:
            return
        try:
            self._meet_well()
        except Exception as error:
            self._refused = error  # also where the program takes the error for none
            raise
        self._carrier._uncommitted = False

    def _meet_well(self) -> None:
        for group in failures.within(self.members):
            group._finish()
        failures.raise_since(self._since)
        met = self._meet(ended=failures.count != self._since)
        # All decide by what was said there. A verdict that comes later is raised by what comes after the step.
        if met.connecting or met.ended:
            failures.raise_coming(self._since)
            raise GuardError(
                "another rank has ended this step with an error, and no verdict has come: its log says why"
            )
        if not met.alike:
            self._compare()

    def failed_since(self) -> Outcome | None:
        return failures.last if failures.count != self._since else None

    def _finish(self) -> None:
        """Wait until what was issued on the group is complete on all ranks, or a verdict ends the wait.

        A collective behind all others says so by its result: where a connection has broken, torch takes operations for
        complete.
        """
        carrier = self._carrier
        if carrier._backend is None or carrier._device is None:
            failures.raise_pending()
            return
        with torch.cuda.device(carrier._device):
            self._await_all(self.nccl(carrier._device), carrier)

    def _await_all(self, backend: Any, carrier: EnqueuedProcessGroup) -> None:
        assert carrier._counted is not None
        counted, seen = carrier._counted
        counted.fill_(1)
        torch_compat.make_stream_wait(self._issued("allreduce", backend.allreduce, [counted]))
        seen.copy_(counted, non_blocking=True)
        copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        pause, limit = _SHORTEST_PAUSE, resolve_timeout(self.limit(), 0)
        copied.record()
        end = time.monotonic() + limit
        while not copied.query():
            failures.raise_pending()
            if time.monotonic() > end and not _is_watched():
                carrier.give_up()
                raise GuardError(
                    f"what was issued on process group {self.group_name} has not ended in {limit:g} s, and nobody judges why: "
                    "do not stop watch() while there are groups of this backend"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        failures.raise_pending()  # an abort completes it too
        if int(seen) != carrier.size():
            text = tr("a connection of its NCCL communicator has broken")
            failures.explain(text, self._index)
            raise GuardError(f"{text}, and no verdict has come: set NCCL_DEBUG=WARN")

    def _placed(
        self, name: str, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have roots and peers counted among those that take part; they are named as before ranks were lost."""
        counted = list(args)
        for number, value in enumerate(args):
            if hasattr(value, "rootRank"):
                value.rootRank = self._place(value.rootRank)
            elif name in _TAKES_RANK and number == _TAKES_RANK[name] and isinstance(value, int):
                counted[number] = self._place(value)
        found = {key: self._place(value) if key in ("root", "peer") else value for key, value in named.items()}
        for value in named.values():
            if hasattr(value, "rootRank"):
                value.rootRank = self._place(value.rootRank)
        return tuple(counted), found

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        """Count a collective, with what has to be alike on all ranks."""
        what = _WORDS[name]
        if name in _ALIKE:
            what ^= _dtype_word(tensor.dtype) ^ tensor.numel() << 8
        self._sequence += 1
        self._mark = (self._mark * 1000003 ^ what) & _LARGEST_MARK
        self._enqueued += 1
        self._uncommitted = True
        self._latest = name

    def _issued(self, name: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Issue a call. Raises the typed error of the verdict on a communicator that refuses it."""
        marks = self._carrier._marks
        if marks is not None and self._coalesces_on is None:  # what is coalesced begins with its end
            marks.mark()
        try:
            return call(*args, **named)
        except RuntimeError as error:
            if torch_compat.from_collective(error):
                failures.explain(f"{name}: {error}", self._index)
            raise

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        super().shutdown()
        backend = self._carrier.let_go(self._carrier._life + 1)
        if backend is not None:
            torch_compat.shut_nccl_group(backend)

    def abort(self) -> None:
        super().abort()
        backend = self._carrier.let_go(self._carrier._life + 1)
        if backend is not None:
            backend.abort()

    # ------------------------------------------------------------------ several as one

    def _start_coalescing(self, device: torch.device) -> None:
        if self._is_carried(device):
            super()._start_coalescing(device)
        else:
            backend = self.nccl(device)
            backend._start_coalescing()
            self._coalesces_on = backend

    def _end_coalescing(self, device: torch.device) -> Any:
        if self._is_carried(device):
            return super()._end_coalescing(device)
        failures.raise_pending()
        backend, self._coalesces_on = self._coalesces_on, None
        return self._issued("coalesced collectives", backend._end_coalescing)

    def stop_coalescing(self) -> None:
        super().stop_coalescing()
        backend, self._coalesces_on = self._coalesces_on, None
        if backend is not None:  # else all later calls of this thread went into NCCL's group, which is not ended
            with contextlib.suppress(RuntimeError):
                backend._end_coalescing()

    def _is_carried(self, device: torch.device) -> bool:
        """Return whether collectives on this device are those of a `GuardedProcessGroup`, carried by the engine."""
        joins = self._survivors is None and lifecycle.is_joining()
        return device.type != "cuda" or self.whole.one_by_one or joins


def _counter(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the places where the ranks that have come are counted, and use them.

    CUDA waits for the device to pin memory and to load a kernel: later, the device might hang.
    """
    with torch.cuda.device(device), torch.inference_mode(False):
        counted = torch.empty(1, dtype=torch.int32, device=device)
        counted.fill_(1)
        return counted, torch.empty(1, dtype=torch.int32).pin_memory()


class _Met(NamedTuple):
    """The largest of what each rank said in a meeting.

    `broken`: 1 where one has waited too long for a connection, 2 where one could not make it; `ended`: a verdict has
    ended something of the step on one; `alike`: all have enqueued the same collectives.
    """

    life: int
    connecting: int
    committing: int
    broken: int
    tries: int
    ended: int
    alike: bool


def _is_watched() -> bool:
    observer = runtime.current().watcher
    return isinstance(observer, watcher.Watcher) and observer.running


def _is_enqueued(channel: str) -> bool:
    return channel.endswith(f":{NAME}")


#: Which argument is a rank of the group.
_TAKES_RANK: Final = {"broadcast": 1, "reduce": 1, "gather": 2, "scatter": 2, "send": 1, "recv": 1}

#: What a backend calls in older versions of torch, 2.13 among them, what a group calls by another name.
_OLDER: Final = {
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
}


def _enqueue(name: str) -> Callable[..., Any]:
    guarded = getattr(GuardedProcessGroup, name)

    @functools.wraps(guarded)
    def method(self: EnqueuedProcessGroup, *args: Any, **named: Any) -> Any:
        tensor = first_tensor(args or named.values())
        if tensor is None or self._is_carried(tensor.device):
            return guarded(self, *args, **named)
        backend = self.nccl(tensor.device)
        carrier = self._carrier
        if carrier is not self:
            args, named = self._placed(name, args, named)
        if name in _WORDS:
            carrier._note(name, tensor)
        for known in (name, _OLDER.get(name, name)):
            if hasattr(backend, known):
                call = getattr(backend, known)
                break
        else:
            call = getattr(carrier._plain, name)
        return self._issued(name, call, *args, **named)

    return method


#: Collectives of which size and dtype of the first tensor are alike on all ranks.
_ALIKE: Final = frozenset(
    (
        "allreduce",
        "reduce",
        "broadcast",
        "reduce_scatter_single",
        "_reduce_scatter_base",
        "all_gather_single",
        "_allgather_base",
    )
)
_MESSAGES: Final = ("send", "recv", "recv_anysource")
_COLLECTIVES: Final = (
    *_ALIKE,
    "allreduce_coalesced",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "allgather",
    "allgather_coalesced",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "alltoall_base",
)
_WORDS: Final = {name: zlib.crc32(name.encode()) for name in _COLLECTIVES}
_LARGEST_MARK: Final = (1 << 62) - 1


@functools.cache
def _dtype_word(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode()) << 30


for _name in (*_COLLECTIVES, *_MESSAGES):
    setattr(EnqueuedProcessGroup, _name, _enqueue(_name))


def check(group: dist.ProcessGroup | None = None) -> None:
    """Raise the typed error of a failed collective that nobody has seen, without waiting for the device.

    `group` (default: all ranks) is of the backend "ncclguard-nccl", whose calls return when they are enqueued. It
    returns where no failure is known; what was issued may be on its way then, and ``dist.barrier(group)`` and
    `resilient_step` wait for it. On the backend "ncclguard" each call and each wait raises its own error, so nothing is
    left to tell. Raises GuardConfigError for a group of another backend, TypeError for what is no group.

    >>> import ncclguard as ng
    >>> ng.check()
    """
    chosen = group_of(group)
    if chosen is None or dist.get_world_size(chosen) == 1:
        return
    if not isinstance(chosen, GuardedProcessGroup):
        raise GuardConfigError(
            f"check() knows nothing of process group {torch_compat.group_name(chosen)}, which is of another backend: "
            'init_process_group("ncclguard-nccl"), or have it watched by ng.watch(on_hang="abort")'
        )
    chosen.check()


def register() -> None:
    """Make the backend known to torch; once."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
        torch_compat.records_itself(NAME)
        torch_compat.coalesce_messages()
        watcher.ending.append(failures.end)


def _create(options: Any, _: Any) -> dist.ProcessGroup:
    if is_made_outside(options):
        raise GuardConfigError(
            f'the backend "{NAME}" serves the groups of a job, and this group has a store of its own: '
            'give it the backend "ncclguard", or make it with ncclguard.join()'
        )
    serve_cpp_callers()
    serve_what_is_there(NAME)
    if not dist.is_initialized():
        failures.interrupts = True
        failures.begin()
    torch_compat.switch_recorders_on()  # which the judging reads
    watcher.ensure()
    chosen = None if options.timeout == default_pg_timeout else options.timeout.total_seconds()
    return EnqueuedProcessGroup(
        options.group_rank,
        options.group_size,
        options.store,
        options.group_id,
        tuple(options.global_ranks_in_group) or tuple(range(options.group_size)),
        chosen,
    )
