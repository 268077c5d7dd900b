"""One runtime per process and life of the default process group: the monitor, the guards, and a clean departure.

It starts by itself after `init_process_group` (so that a rank that is late for the very first guarded operation can
still be asked where it is), or with the first guarded call when ncclguard was imported later than that. A group of
processes that met outside the default group has a runtime of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import secrets
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from ncclguard import __version__, events, lifecycle, optimizer_steps, torch_compat
from ncclguard.config import GuardConfig, current_config
from ncclguard.coordination import incidents
from ncclguard.coordination.group_state import GroupState
from ncclguard.coordination.host_page import open_page
from ncclguard.coordination.incidents import summarise
from ncclguard.coordination.inquiry import Patience
from ncclguard.coordination.liveness import Identity, Liveness
from ncclguard.coordination.monitor import Monitor, MonitorSettings, Session
from ncclguard.coordination.revocation import Revocation
from ncclguard.coordination.store import AgreementStore, StoreUnavailable
from ncclguard.engine.communicators import Communicators
from ncclguard.engine.description import Description, History, shortened
from ncclguard.engine.group import GuardedGroup
from ncclguard.engine.world import World
from ncclguard.environment.ras import Witness
from ncclguard.errors import GuardConfigError, GuardError, repeats
from ncclguard.faults.injection import from_environment
from ncclguard.groups import is_outside
from ncclguard.incident.model import Incident, MembershipChange
from ncclguard.incident.report import AT_MOST, Sequels, Writer
from ncclguard.incident.stacks import describe_exception, main_thread_stack, offer, traceback_frames
from ncclguard.metrics import exchange
from ncclguard.metrics.settings import config_of
from ncclguard.outcome import Outcome
from ncclguard.protocol.decision import Action, Report
from ncclguard.protocol.group_key import GroupKey
from ncclguard.protocol.timing import Timing
from ncclguard.transport.base import Builder, TransportError
from ncclguard.transport.bounded import bounded
from ncclguard.transport.nccl import NcclBuilder
from ncclguard.transport.streams import StreamBuilder
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import read, told, tr

log = logging.getLogger("ncclguard")

_PYTHON = ".".join(platform.python_version_tuple()[:2])
#: Seconds in which the store has to take a connection, at most.
CONNECT_WITHIN = 30.0
#: Seconds that `init_process_group` waits, at most, until the others can find out what becomes of this process.
KNOWN_WITHIN = 0.25
#: Seconds that the end of the monitor may take.
STOP_WITHIN = 1.0
#: Seconds that a report in the making may hold the exit up.
REPORT_WITHIN = 5.0
#: The lowest ranks of an operation, one of which writes its report unless several of them are gone or to blame.
WRITERS = 2
#: What a call gets that comes too late, from another thread.
LEFT = "this process has left the job: its default process group is being destroyed, or its program has ended"


class Watcher(Protocol):
    """The observer of the collectives of this process that the guard does not carry: see `ncclguard.watch`."""

    def close(self) -> None:
        """Stop, after a verdict that is on its way."""

    def uncaught(self, error: BaseException, text: str) -> str:
        """An exception ends the program; returns `text`, that exception in words, with what more is known of it."""

    def terminated(self) -> None:
        """Wait, within a bound, for the verdict on who is gone: SIGTERM is about to end this process."""

    def compare_last_calls(self, reports: Mapping[int, Report]) -> None:
        """Tell where the ranks, which have all left, did not call the same last."""

    def finish_callbacks(self) -> None:
        """Give the program's functions that have been begun a moment to return."""


class Runtime:
    """The monitor and the guards of this process in the job, or in a group outside it; ended by `leave`."""

    def __init__(self, config: GuardConfig, within: float, world: World, session: Session | None = None) -> None:
        self.world = world
        self.rank = world.rank
        self.world_size = world.size
        self._config = config
        base = world.store
        self._connection = bounded(
            "connecting to the store",
            lambda: torch_compat.clone_store(base),
            within,
            lambda: torch_compat.cut_clone(base),
        )
        self._liveness = Liveness(self.rank, towards=world.host, label=world.label)
        witness = Witness(torch.cuda.is_initialized, self._known)
        self._writer = Writer(config.report_dir, config.report_panel, self.rank, self.world_size, witness)
        self._sequels = Sequels(self.rank, self._writer.complete if world.group else _complete)
        self._faults: deque[Incident] = deque(maxlen=AT_MOST)  # agreed, each reported; used by the monitor's thread
        versions = "" if world.group else f", torch {torch.__version__}, Python {_PYTHON}"
        here = "" if world.group else os.environ.get("LOCAL_WORLD_SIZE", "")
        settings = MonitorSettings(
            timing=Timing.of(self.world_size, config.poll_active, config.poll_idle),
            patience=_patience,
            describe=lambda state, report: self._description.describe(state, report),
            summarise=functools.partial(summarise, reported=self._faults),
            revoked=self._revoked,
            publish=self._publish,
            publish_alone=self._publish_alone,
            offer_stacks=lambda thread: offer(config.stack_signal, thread),
            open_page=lambda session: open_page(
                session, self._liveness.identity.host_key, int(here) if here.isdigit() else 0
            ),
            about=f"{self.world_size} ranks, ncclguard {__version__}{versions}",
            has_store=self.rank == 0 and world.has_store,
        )
        self.monitor = Monitor(
            AgreementStore(self._connection), self.rank, self.world_size, self._liveness, settings, session
        )
        optimizer_steps.start_counting()
        self._history = History()
        events.listen(self._history)
        job = () if world.group else tuple(range(self.world_size))
        self._description = Description(self.monitor, self._liveness.identity.host, self._history, job)
        self.watcher: Watcher | None = None  # of watch(), when the program called it
        self._groups: dict[tuple[str, str, str], tuple[dist.ProcessGroup, GuardedGroup]] = {}
        self._released: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._left = False
        self.termination = lifecycle.Termination(_terminate)
        self.monitor.start()

    def take_sigterm(self) -> None:
        """This runtime has the other ranks of all of this process told of a SIGTERM from here on."""
        if self._config.announce_sigterm:
            self.termination.install()

    @property
    def identity(self) -> Identity:
        """This process, as others see it."""
        return self._liveness.identity

    def group(
        self, group: dist.ProcessGroup, device: torch.device, queue: str = "", ranks: tuple[int, ...] | None = None
    ) -> GuardedGroup:
        """Return the guarded group of a process group for one kind of device, made with the first operation on it.

        A `queue` is a guarded group beside that one, with a sequence of its own, for all of the process group or for
        some `ranks` (global) of it.
        """
        name = torch_compat.group_name(group)
        key = (name, device.type, queue)
        entry = self._groups.get(key)
        if entry is not None and entry[0] is group:
            return entry[1]
        with self._lock:
            if self._left:
                raise GuardError(LEFT)
            if group in self._released:
                raise GuardError(f"process group {name} is being destroyed: create it again with new_group()")
            entry = self._groups.get(key)
            if entry is None or entry[0] is not group:
                members = ranks or torch_compat.group_ranks(group)
                made = self.key(group, device, queue, ranks)
                entry = self._groups[key] = (group, self._make(made, members, device))
            return entry[1]

    def unread(self) -> list[Outcome]:
        """Return the failures that the program has not looked at yet."""
        with self._lock:
            groups = [guarded for _, guarded in self._groups.values()]
        return [unread for guarded in groups if (unread := guarded.unread) is not None]

    def key(
        self, group: dist.ProcessGroup, device: torch.device, queue: str, ranks: tuple[int, ...] | None = None
    ) -> GroupKey:
        """Return the name of a guarded group in the job, alike on all its ranks."""
        name, members = torch_compat.group_name(group), ranks or torch_compat.group_ranks(group)
        outside = self.world.group
        return GroupKey.of(outside or name, device.type, members, queue, 0 if outside else _destroyed[name])

    def misplaced(self, within: float) -> str:
        """Return what is wrong with this process's place in a group outside the job, in words; "" for nothing.

        Another process may have it, or have come with another number of ranks. Raises TransportError where the store
        does not answer `within` so many seconds.
        """
        keys = AgreementStore(self._connection).below(f"{self.monitor.nonce}/places")
        mine = self._liveness.identity.to_json()

        def claim() -> tuple[str, str]:
            return keys.first("size", str(self.world_size)), keys.first(str(self.rank), mine)

        size, holder = bounded("taking a place in a group", claim, within, lambda: None)
        if size != str(self.world_size):
            return told(
                "world_size is {own} here and {other} where the group began: give the same on all",
                own=self.world_size,
                other=size,
            )
        if holder != mine:
            other = Identity.from_json(holder)
            return told(
                "process {pid} on {host} has joined as rank {rank} already: give each process a rank of its own",
                pid=other.pid,
                host=other.host,
                rank=self.rank,
            )
        return ""

    def is_replaced(self) -> bool:
        """Return whether another process has begun the group anew as rank 0, as far as the store answers at once."""
        store = AgreementStore(self._connection)
        try:
            hello = bounded("asking who is rank 0", lambda: store.read("hello"), 1.0, lambda: None)
        except (TransportError, StoreUnavailable):
            return False
        return self.rank == 0 and (hello or "").partition(" ")[0] != self.monitor.nonce

    def release(self, group: dist.ProcessGroup) -> None:
        """Give connections and threads of a group back that is about to be destroyed; its states stay for questions."""
        with self._lock:
            self._released.add(group)
            keys = [key for key, (owner, _) in self._groups.items() if owner is group]
            closing = [self._groups.pop(key)[1] for key in keys]
        for guarded in closing:
            guarded.close(tr("its process group was destroyed"))

    def _make(self, key: GroupKey, ranks: tuple[int, ...], device: torch.device) -> GuardedGroup:
        state = self.monitor.state(str(key), ranks)
        state.outside = bool(self.world.group)
        config = current_config()  # not the one of the start: configure() may have been called since
        statistics = None if self.world.group else exchange.of_group(key, config, self.monitor.awaited)
        state.member.exchange_every = 0 if statistics is None else statistics.every
        communicators = Communicators(
            state,
            self.monitor,
            builder(device, self.world.host),
            self._connection,
            lambda: torch_compat.clone_store(self.world.store),
            {"rounds": config.rounds, "closing_nbytes": config.closing_nbytes, **exchange.terms(config)},
            config.build_slice,
        )
        return GuardedGroup(state, communicators, self.monitor.wake, config, statistics)

    def leave(self, cause: Cause, text: str, job: bool = True) -> None:
        """Say goodbye, end the monitor and release the communicators, each within a bound; raises nothing.

        `job`: it leaves the job, and not only this session of it.
        """
        with self._lock:
            if self._left:
                return
            self._left = True
            _leaving.append(self)
            closing, self._groups = [group for _, group in self._groups.values()], {}
        try:
            if job:
                self.monitor.nonfinite.settle()
            if self.watcher is not None:
                self.watcher.close()
            said = self._description.process()
            self.monitor.depart(cause, text, self.monitor.timing.leave, said, follows=self._follows)
            if self.rank == 0 and job and self.world.has_store:
                self._linger()
            if not self.monitor.stop(STOP_WITHIN):
                torch_compat.disconnect(self._connection)  # a store call that does not answer holds the thread: cut it
                self.monitor.stop(STOP_WITHIN)
            elif self.rank == 0 and job and self.watcher is not None:
                self._compare_last_calls(self.watcher)
            for group in closing:
                group.close(tr("this process has left the job") if job else text)
            if job and not self.world.group:
                exchange.forget()
            events.leave(self._history)
            self._liveness.close()
            if job and self.world.group and not _exiting:  # this process goes on, and may join the next group at once
                _writers.append(self._writer)
            elif job:
                self._writer.wait(REPORT_WITHIN)
        except Exception:
            log.exception("ncclguard: %s", told("leaving failed; the process goes on to its end", "log"))
        finally:
            # Not before: a launcher sends SIGTERM as soon as one rank is gone, and the report is still being written.
            self.termination.uninstall()
            _leaving.remove(self)

    def announce(self, cause: Cause, text: str, stack: tuple[str, ...] = (), terminated: bool = False) -> None:
        """Tell the others at once that this process is about to end; `told` when others made it."""
        details = shortened({**self._description.identity(), "stack": list(stack)}, self.world_size)
        self.monitor.depart(cause, text, self.monitor.timing.leave, details, terminated=terminated)

    def terminate(self) -> None:
        """Go on SIGTERM, once the verdict in progress, which may be on what has led to it, has ended."""
        if self.watcher is not None:  # before: the launcher may have seen that a rank is gone before the watch has
            self.watcher.terminated()
        self.monitor.settle(self.monitor.timing.leave)
        self.announce(Cause.LOST, lifecycle.SENT_SIGTERM, main_thread_stack(), terminated=True)
        if self.rank == 0 and self.world.has_store:  # which the others need for their verdict
            self.monitor.settle(self.monitor.timing.leave, self.monitor.timing.linger)
        self._writer.wait(REPORT_WITHIN)
        if self.watcher is not None:
            self.watcher.finish_callbacks()

    def _follows(self) -> bool:
        """Return whether this process gives a group outside the job up because of a fault of others."""
        faults = tuple(self._faults) if self.world.group else ()
        return bool(faults) and not any(self.rank in incident.culprits for incident in faults)

    @property
    def first_fault(self) -> Incident | None:
        """The first agreed incident that tells who it was, or who called what; those after it may follow from it."""
        return next((incident for incident in tuple(self._faults) if incident.culprits or incident.sides), None)

    def _linger(self) -> None:
        """Rank 0 usually hosts the store: give the others a moment to finish with it."""
        until = time.monotonic() + self._config.exit_linger
        while time.monotonic() < until and not self.monitor.unavailable:
            if self.monitor.goodbyes >= self.world_size:
                return
            time.sleep(0.02)

    def _compare_last_calls(self, watcher: Watcher) -> None:
        """Compare what the ranks have called last, in a job of a moment also first: nobody has yet."""
        if self.monitor.goodbyes < self.world_size or self.monitor.unavailable or self._faults:
            return
        release = functools.partial(torch_compat.disconnect, self._connection)
        with contextlib.suppress(TransportError, StoreUnavailable):
            within = self.monitor.timing.leave
            reports = bounded("reading what all have called", self.monitor.read_last_calls, within, release)
            watcher.compare_last_calls(reports)

    # ------------------------------------------------------------------ the report of an incident

    def _revoked(self, state: GroupState) -> None:
        """Have RAS asked by those who will probably write the report: each question has all processes answer."""
        if self.rank in state.member.participants[:WRITERS]:
            self._writer.expect()

    def _known(self, incident: Incident) -> tuple[dict[str, tuple[int, ...]], dict[int, int]]:
        """The ranks of this process's groups, and the processes of ranks."""
        pids = {peer.rank: peer.pid for peer in self.monitor.neighbours.here} | {self.rank: os.getpid()}
        pids |= {report.rank: report.pid for report in incident.ranks if report.pid}
        groups = {}
        for group in torch_compat.known_groups():
            with contextlib.suppress(RuntimeError, ValueError, LookupError):  # destroyed meanwhile
                groups[torch_compat.group_name(group)] = torch_compat.group_ranks(group)
        return groups, pids

    def _publish(self, revocation: Revocation) -> None:
        """Write the report if it is for this rank to do, by the agreed incident."""
        verdict = revocation.verdict
        if verdict is None or not (verdict.action is Action.FAIL or verdict.culprits):
            return  # committed, or tried again on all ranks
        incident = incidents.from_json(verdict.incident)
        if incident is None or (verdict.action is Action.RESUME and self._sequels.known(incident)):
            return  # the loss has its report: this operation has only gone on without the rank
        writer = incidents.writer(incident)
        if self._left and writer == self.rank and incident.cause is Cause.EXITED and incident.culprits == (self.rank,):
            return  # that it leaves is all there is, and nobody else is there who waits for it
        first = incident.repeats
        if first is None and writer == self.rank:
            # Another rank has decided this one at the same time, and did not know of that one yet. Only what this rank
            # reports itself: ranks hear of the two in any order, and one of them has to have its report.
            own = [known for known in self._faults if incidents.writer(known) == self.rank]
            guarded = revocation.state.guarded
            first = next((one.id for one in own if incidents.has_no_report_beside(one, incident, guarded)), None)
        if first is not None:
            if writer == self.rank:
                text = told(
                    "ncclguard: the fault of incident {first} goes on: {summary}",
                    first=first,
                    summary=read(incident.summary),
                )
                log.warning("%s", text)
            return
        self._faults.append(incident)
        if writer == self.rank:
            said = json.loads(revocation.histories() or "{}")
            self._writer.submit(incident, self.monitor.nonce, {int(rank): history for rank, history in said.items()})
        self._sequels.found(incident, writer, self.monitor.nonce)

    def membership_changed(self, change: MembershipChange, participants: Collection[int]) -> None:
        """Whoever listens hears of it, and the reports of the ranks' losses say it; raises nothing."""
        for listener in events.listeners:
            try:
                listener.membership_changed(change)
            except Exception:
                log.exception(
                    "ncclguard: %s", told("a listener failed when {change}; the job goes on", "log", change=change)
                )
        try:
            self._sequels.changed(change, participants)
        except Exception:
            log.exception(
                "ncclguard: %s", told("no report will say that the job {change}; it goes on", "log", change=change)
            )

    def _publish_alone(self, incident: Incident) -> None:
        """No agreement: one rank of each host reports what it sees."""
        if self.monitor.neighbours.first_here():
            self._writer.submit(incident, self.monitor.nonce, {self.rank: self._description.history()})


def _patience(state: GroupState) -> Patience:
    config = config_of(GroupKey.parse(state.key).process_group, current_config())
    return Patience(config.warn_after, config.stuck_timeout)


_runtime: Runtime | None = None
#: Those of groups outside the job.
_outside: dict[dist.ProcessGroup, Runtime] = {}
_ended: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # of these, so that what is queued begins no other
#: The default group that this process has said goodbye to: a thread that comes late must not start the runtime again.
_left: weakref.ref[object] | None = None
_exiting = False
_forked = False
#: Groups of each name that were destroyed since the default group was made: torch gives some names again.
_destroyed: Counter[str] = Counter()
#: Writers of groups outside the job that have ended, whose reports may still be in the making.
_writers: deque[Writer] = deque(maxlen=AT_MOST)
#: Those that are in `leave`.
_leaving: list[Runtime] = []
_starting = threading.Lock()
_beginning = threading.Lock()  # the runtime of a group outside the job


def current(within: float = CONNECT_WITHIN) -> Runtime:
    """Return the runtime of the default process group that is initialised now, starting it if need be.

    Raises GuardError when the store cannot be reached `within` so many seconds.
    """
    global _runtime
    runtime = _runtime
    if runtime is not None:
        return runtime
    if _forked:
        raise GuardError("this process was forked from a rank: the guard works in the rank itself only")
    with _starting:
        if _runtime is None:
            if _exiting or (_left is not None and _left() is dist.group.WORLD):
                raise GuardError(LEFT)
            from_environment()
            config = current_config()  # a wrong setting is an error of its own, not one of the store
            try:
                own = own_session() if lifecycle.is_joining() else None
                _runtime = Runtime(config, max(0.001, min(within, CONNECT_WITHIN)), World.of_job(), own)
                _runtime.take_sigterm()
            except (TransportError, RuntimeError, ValueError, OSError) as error:
                raise GuardError(
                    f"the store of the default process group cannot be reached: {error}. "
                    "Check that rank 0 (or the launcher's agent) is alive and that this host can connect to it."
                ) from error
            lifecycle.watch_multiprocessing(_announce)
        return _runtime


def of(group: dist.ProcessGroup, within: float = CONNECT_WITHIN) -> Runtime:
    """Return the runtime of a process group: the job's, or that of a group outside it, which is started if need be.

    Raises GuardError when the store cannot be reached `within` so many seconds, or the group has been destroyed.
    """
    if _outside and (found := _outside.get(group)) is not None:
        return found
    if not is_outside(group):
        return current(within)
    if group in _ended:
        raise GuardError(told("the process group was destroyed"))
    name = torch_compat.group_name(group)
    return begin_outside(group, World(torch_compat.store_of(group), group.rank(), group.size(), name), within)


def begin_outside(group: dist.ProcessGroup, world: World, within: float = CONNECT_WITHIN) -> Runtime:
    """Start the runtime of a group outside the job. Raises GuardError as `of` does."""
    if _forked:
        raise GuardError("this process was forked from a rank: the guard works in the rank itself only")
    with _beginning:
        if _exiting:
            raise GuardError(LEFT)
        made = _outside.get(group)
        if made is None:
            try:
                made = Runtime(current_config(), max(0.001, min(within, CONNECT_WITHIN)), world)
            except (TransportError, RuntimeError, ValueError, OSError) as error:
                text = told(
                    "the store of group {name} cannot be reached: {error}. Check that the process that has it is alive and "
                    "that this host can connect to it.",
                    name=repr(world.group),
                    error=error,
                )
                raise GuardError(text) from error
            _outside[group] = made
            made.take_sigterm()
            lifecycle.watch_multiprocessing(_announce)
    return made


def end_outside(group: dist.ProcessGroup, cause: Cause, text: str) -> None:
    """End the runtime of a group outside the job, if there is one: the others are told why; raises nothing."""
    if group in _outside:
        _ended.add(group)
    runtime = _outside.pop(group, None)
    if runtime is not None:
        runtime.leave(cause, text)
        for other in _all():
            other.take_sigterm()  # which the one that has left may have had


def _all() -> list[Runtime]:
    """Return the runtimes of this process, the job's first."""
    return [*filter(None, [_runtime]), *_outside.values()]


def unread() -> list[Outcome]:
    """Return the failures that the program has not looked at yet, of all groups of this process."""
    return [unread for runtime in _all() for unread in runtime.unread()]


def own_session() -> Session:
    """A session that nobody knows yet."""
    return Session(f"joins-{secrets.token_hex(6)}")


def prepare(session: Session, within: float) -> Runtime:
    """Return a runtime of another session beside the current one, once this rank can be found in it.

    Raises GuardError when the store cannot be reached `within` so many seconds.
    """
    end = time.monotonic() + within
    try:
        made = Runtime(current_config(), within, World.of_job(), session)
    except (TransportError, RuntimeError, ValueError, OSError) as error:
        raise GuardError(f"the store of the default process group cannot be reached: {error}") from error
    if not made.monitor.session_ready.wait(max(0.0, end - time.monotonic())):
        made.leave(Cause.EXITED, "could not begin the session in time", job=False)
        raise GuardError(f"the store of the default process group has not answered in {within:.0f} s")
    return made


def replace(prepared: Runtime) -> Runtime:
    """From now on all calls of this process are in the session of `prepared`; returns the runtime before.

    That one still answers the others until it is told to `leave`.
    """
    global _runtime
    with _starting:
        before = _runtime
        if before is None:
            raise GuardError(LEFT)
        _runtime = prepared
        before.termination.uninstall()
        prepared.monitor.take_over(before.monitor.nonfinite)
        prepared._sequels = before._sequels  # what becomes of the job after earlier losses is still to be told
        prepared.take_sigterm()
        _destroyed.clear()
    return before


def _complete(incident: Incident, session: str) -> None:
    runtime = _runtime
    if runtime is not None:
        runtime._writer.complete(incident, session)


def membership_changed(change: MembershipChange, participants: Collection[int]) -> None:
    """Tell whoever listens, and the reports of these ranks' losses, what became of the job; raises nothing.

    Called on all ranks that take part from now on (`participants`, global), once they have agreed on it.
    """
    runtime = _runtime
    if runtime is not None:
        runtime.membership_changed(change, participants)


def given_up(ranks: Collection[int]) -> None:
    """These ranks, which do not run, are about to be ended by their launcher: their loss is no incident of its own."""
    runtime = _runtime
    if runtime is not None:
        runtime._sequels.given_up(ranks)


def builder(device: torch.device, towards: str = "") -> Builder:
    """The builder of communicators for tensors on this device. Raises GuardConfigError for a device without one.

    `towards`: a host that the peers reach, where that is not MASTER_ADDR.
    """
    if device.type == "cpu":
        return StreamBuilder(shares=True, towards=towards)
    if device.type == "cuda":
        return NcclBuilder(device)
    raise GuardConfigError(
        f"tensors on {device.type!r} cannot be guarded: ncclguard carries CPU tensors itself and CUDA tensors over NCCL. "
        "Move the tensor to one of these."
    )


# ---------------------------------------------------------------------- start and end with the process group


def _after_init() -> None:
    try:
        wanted = current_config().autostart and dist.get_world_size() > 1
    except GuardConfigError as error:
        text = told(
            "nothing is guarded in this process, whose process group itself is not affected: {error}", error=error
        )
        log.error("ncclguard: %s", text)
        return
    if wanted:
        # Of a process that ends before it is known, nobody could say that it is gone.
        current().monitor.session_ready.wait(KNOWN_WITHIN)


def _before_destroy() -> None:
    """Torch destroys all groups with the default one, those outside of it too."""
    _end(Cause.EXITED, tr("called destroy_process_group()"))
    lifecycle.reach(lifecycle.End.QUEUES)


def _before_destroy_group(group: dist.ProcessGroup) -> None:
    if group in _outside:
        end_outside(group, Cause.EXITED, tr("destroyed its process group"))
        return
    if _runtime is not None:
        _runtime.release(group)
    _destroyed[torch_compat.group_name(group)] += 1


def _end(cause: Cause, text: str) -> None:
    global _runtime, _left
    _destroyed.clear()
    with _starting:
        runtime, _runtime = _runtime, None
        _left = weakref.ref(dist.group.WORLD) if dist.is_initialized() else None
    if runtime is not None:
        runtime.leave(cause, text)
    for group in tuple(_outside):
        end_outside(group, cause, text)


_failure = ""


def _at_exit() -> None:
    global _exiting
    _exiting = True
    if _failure:
        _end(Cause.FAILED, _failure)
    else:
        _end(Cause.EXITED, tr("ended its program"))
    for writer in _writers:
        writer.wait(REPORT_WITHIN / max(1, len(_writers)))


def _announce(error: BaseException) -> None:
    """An uncaught exception is about to end the program."""
    global _failure
    _failure = repeats(error) or describe_exception(error)
    runtime = _runtime
    if runtime is not None and runtime.watcher is not None:
        _failure = runtime.watcher.uncaught(error, _failure)
    for each in _all():
        each.announce(Cause.FAILED, _failure, traceback_frames(error))
        each.monitor.nonfinite.settle()


def _terminate() -> None:
    for each in (*_all(), *_leaving):
        each.terminate()


def _before_fork() -> None:
    for each in _all():
        each.termination.before_fork()


def _after_fork() -> None:
    for each in _all():
        each.termination.after_fork()


def _forget_in_child() -> None:
    """A child of a rank has neither the threads nor the right to speak for it: the guard is off there.

    A child of a process that was in no job may become a rank itself: a notebook's launcher forks all of them.
    """
    global _runtime, _starting, _beginning, _forked
    for each in _all():
        each.termination.forget_in_child()
    _forked = _forked or bool(_all()) or dist.is_initialized()
    _runtime = None
    _outside.clear()
    _writers.clear()
    _starting, _beginning = threading.Lock(), threading.Lock()


_installed = False


def install() -> None:
    """Hook into `init_process_group`, interpreter exit, uncaught exceptions and fork; once."""
    global _installed
    if _installed:
        return
    _installed = True
    torch_compat.on_init(_after_init)
    torch_compat.on_destroy(_before_destroy)
    torch_compat.on_destroy_group(_before_destroy_group)
    lifecycle.watch_uncaught(_announce)
    lifecycle.watch_threads()
    lifecycle.at_end(lifecycle.End.JOB, _at_exit)
    lifecycle.around_fork(_before_fork, _after_fork)
    lifecycle.in_child(_forget_in_child)
    if dist.is_available() and dist.is_initialized():
        _try(_after_init)


def _try(function: Callable[[], None]) -> None:
    try:
        function()
    except (GuardError, RuntimeError) as error:
        log.warning(
            "%s",
            told("ncclguard could not start with the process group that exists already: {error}", "log", error=error),
        )
