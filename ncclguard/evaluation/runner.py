"""`resilient_evaluate`: runs an evaluation to a result that all ranks share: try, agree, then try again, or give up.

During a try the function's collectives run on guarded groups within limits, and all ranks learn of its exception at
once. From the second try on its batches are smaller. A rank that evaluates alone has a world of one rank. What the
function records is kept as a partial result. The decorator comes last.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ncclguard import lifecycle, process_group, torch_compat
from ncclguard.collectives import broadcast_objects, gather_objects
from ncclguard.config import checked_attempts, current_config, is_time, seconds
from ncclguard.coordination.incidents import begins_evaluation
from ncclguard.coordination.sections import Sections
from ncclguard.deadlines import engine_section
from ncclguard.engine import call, runtime
from ncclguard.engine.dispatch import OWN, Queue
from ncclguard.errors import CollectiveFailed, GuardConfigError, GuardError
from ncclguard.evaluation import decision, state
from ncclguard.evaluation.decision import (
    Action,
    Decision,
    EvaluationReport,
    Failure,
    Kind,
    Meeting,
    Met,
    NotMet,
    RankResult,
    Terms,
    log_to,
    metrics_of,
)
from ncclguard.evaluation.fallback import NOT_EVALUATED
from ncclguard.evaluation.place import Place, Places, behind, described, elsewhere, start_counting, step_of
from ncclguard.groups import check_group, group_of, is_outside
from ncclguard.incident.model import Incident
from ncclguard.incident.stacks import describe_exception, traceback_frames
from ncclguard.optimizer_steps import uncounted
from ncclguard.outcome import Outcome
from ncclguard.phases import inside_section
from ncclguard.process_group.group import GuardedProcessGroup
from ncclguard.spelling import meant, no_argument
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import joined, received, say, told, tr
from ncclguard_explain.ranks import ranks_text

log = logging.getLogger("ncclguard")

#: Seconds between two lines of the countdown of ranks that wait for the one that evaluates alone.
EVERY = 10.0

#: "eval_batch_size" or "args.per_device_eval_batch_size": an attribute of the owner, a number or a DataLoader.
#: A callable is called with the divisor before each try, 1, 2, 4, ..., and with 1 after the last.
BatchSize = str | Callable[[int], object] | None


def members_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks that evaluate together, without those that the group goes on without.

    It is (0,) for a process alone, and only itself for a new process that the others of the job have not taken in yet.
    Raises as `group_of` does.
    """
    chosen = group_of(group)
    if chosen is None:
        return (0,)
    if lifecycle.is_joining():
        return (dist.get_rank(),)
    survivors = chosen.survivors if isinstance(chosen, GuardedProcessGroup) else None
    return torch_compat.group_ranks(chosen) if survivors is None else survivors


@contextmanager
def one_try(name: str, members: tuple[int, ...], timeout: float) -> Iterator[process_group.redirected]:
    """Run a block with limits, on guarded groups, whose exception all ranks learn of at once.

    Every collective in the block has `timeout` seconds. `name` is the same on all ranks and unlike that of any other
    try. The redirection that is yielded has the failed outcomes of the block's collectives, also afterwards. Call
    `settle` once all ranks have met.
    """
    redirection = process_group.redirected(timeout=timeout)
    if len(members) == 1:
        with inside_section(name, timeout):
            yield redirection
        return
    sections = _sections()
    sections.enter(
        tr("{evaluation} of {ranks}", evaluation=name, ranks=ranks_text(members)), members
    )  # who are fewer when a lost rank's try is made again
    try:
        with inside_section(name, timeout), redirection:
            yield redirection
    except BaseException as error:
        follows = failed_collective(error, redirection.failures) is not None
        sections.leave(
            describe_exception(error), follows=follows, stack=traceback_frames(error, begin=_programs_own(error))
        )
        raise
    sections.leave()


def settle(members: tuple[int, ...]) -> None:
    """Note that all ranks have met, or know that they have not: no rank waits for this one inside the try."""
    if len(members) > 1:
        _sections().settle()


def _sections() -> Sections:
    return runtime.current().monitor.sections


# ---------------------------------------------------------------------- smaller batches


@contextmanager
def divided(owner: Any, batch_size: BatchSize, divisor: int) -> Iterator[None]:
    """Run a block with batches `divisor` times smaller, and at least of size 1; afterwards they are as before.

    Call `check_batch_size` before: what `batch_size` names is there, and can be divided.
    """
    if batch_size is None or divisor == 1:
        yield
        return
    if callable(batch_size):
        batch_size(divisor)
        try:
            yield
        finally:
            batch_size(1)
        return
    holder, name = _holder_of(owner, batch_size)
    before = getattr(holder, name)
    setattr(holder, name, smaller(before, divisor))
    try:
        yield
    finally:
        setattr(holder, name, before)


def check_batch_size(owner: Any, batch_size: BatchSize, function: str) -> None:
    """Raise GuardConfigError when `batch_size` names nothing of the owner of `function`, or nothing to divide."""
    if not isinstance(batch_size, str):
        return
    what = f"batch_size={batch_size!r} of {function}"
    if owner is None:
        text = told(
            "{what} names an attribute, but {name} was called without arguments, so there is no object that could have "
            "it: give a callable that gets the divisor",
            what=what,
            name=function,
        )
        raise GuardConfigError(text)
    try:
        holder, name = _holder_of(owner, batch_size)
        value = getattr(holder, name)
    except AttributeError as error:
        hint = meant(error.name or "", dir(error.obj), "{!r}") or tr(
            "give a dotted attribute of its object, or a callable"
        )
        text = told(
            "{what} names nothing: the object that the method belongs to, or else the first argument, has no attribute "
            "{name} (it is of type {kind}); {hint}",
            what=what,
            name=repr(error.name),
            kind=type(error.obj).__name__,
            hint=hint,
        )
        raise GuardConfigError(text) from None
    try:
        check_divisible(value)
    except TypeError as error:
        raise GuardConfigError(f"{what}: {error}") from None


def _holder_of(owner: Any, batch_size: str) -> tuple[Any, str]:
    """Return the object and its attribute that a dotted name stands for. Raises AttributeError on the way."""
    *path, name = batch_size.split(".")
    return functools.reduce(getattr, path, owner), name


def check_divisible(value: Any) -> None:
    """Raise TypeError for anything but a batch size, or a DataLoader that has one."""
    if isinstance(value, DataLoader):
        if value.batch_size is None or type(value.batch_sampler) is not BatchSampler:
            text = told("this DataLoader has a batch sampler of its own: give `batch_size` as a callable instead")
            raise TypeError(text)
    elif isinstance(value, bool) or not isinstance(value, int):
        text = told(
            "a batch size is a whole number or a DataLoader, not {kind}: give a callable instead",
            kind=type(value).__name__,
        )
        raise TypeError(text)


def smaller(value: Any, divisor: int) -> Any:
    """Return a batch size, or a DataLoader, with batches `divisor` times smaller and at least 1.

    >>> smaller(32, 4), smaller(2, 8)
    (8, 1)
    """
    check_divisible(value)
    return _smaller_loader(value, divisor) if isinstance(value, DataLoader) else max(1, value // divisor)


def _smaller_loader(loader: DataLoader[Any], divisor: int) -> DataLoader[Any]:
    """Copy a loader with a smaller batch size, which torch does not let change; the sampler is shared."""
    assert loader.batch_size is not None
    options: dict[str, Any] = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    return DataLoader(
        loader.dataset,
        batch_size=max(1, loader.batch_size // divisor),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        **options,
    )


def default_batch_size(evaluate: Callable[..., Any]) -> int | None:
    """Return the default of `evaluate`'s own parameter `batch_size`, if that is a number."""
    parameter = inspect.signature(evaluate).parameters.get("batch_size")
    default = None if parameter is None else parameter.default
    return default if isinstance(default, int) and not isinstance(default, bool) else None


# ---------------------------------------------------------------------- one rank alone


@contextmanager
def alone_in_the_world(models: Iterable[nn.Module]) -> Iterator[None]:
    """Run a block in which torch.distributed has this rank only, so that collectives return at once.

    DDP sends no buffers in the block.

    Raises ValueError for a model whose parameters are spread over ranks (ZeRO-3): it cannot be evaluated on one of
    them.
    """
    models = tuple(models)
    if any(hasattr(parameter, "ds_id") for model in models for parameter in model.parameters()):
        text = told(
            "the parameters are partitioned over the ranks (ZeRO-3), so one rank cannot evaluate alone: "
            "use smaller batches, or switch the evaluation off"
        )
        raise ValueError(text)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    wrappers = [m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)]
    synced = [wrapper.require_forward_param_sync for wrapper in wrappers]
    for wrapper in wrappers:
        wrapper.require_forward_param_sync = False
    try:
        with torch_compat.world_of_one():
            yield
    finally:
        for wrapper, before in zip(wrappers, synced, strict=True):
            wrapper.require_forward_param_sync = before


@contextmanager
def countdown(what: str, seconds: float, every: float = EVERY) -> Iterator[None]:
    """Log how long this rank will wait at most, every few seconds, from a thread of its own."""
    over = threading.Event()
    deadline = time.monotonic() + seconds

    def tick() -> None:
        while not over.wait(every):
            left = max(0.0, deadline - time.monotonic())
            log.warning("ncclguard: %s", told("waiting for {what}, {seconds:.0f} s left", what=what, seconds=left))

    thread = threading.Thread(target=tick, name="ncclguard-countdown", daemon=True)
    log.warning("ncclguard: %s", told("waiting for {what}, for at most {seconds:.0f} s", what=what, seconds=seconds))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(1.0)


# ---------------------------------------------------------------------- partial results


@dataclass
class Recorder:
    """The partial results that one try has recorded on this rank."""

    results: dict[int, Any] = field(default_factory=dict)  # by count; another rank may be at any of them
    total: int = 0
    latest_only: bool = False

    @property
    def latest(self) -> Any:
        return self.results[max(self.results)] if self.results else None

    def add(self, result: Any, done: int, total: int) -> None:
        """Keep a partial result; with `latest_only`, in place of those that cover less."""
        self.total = total
        if self.latest_only:
            if done < max(self.results, default=0):
                return
            self.results.clear()
        self.results[done] = result


_current: Recorder | None = None


def record_partial(result: Any, done: int, total: int = 0) -> None:
    """Record inside an evaluation that `result` covers `done` of `total` data sets or batches.

    If the evaluation has to be given up, the result with the largest `done` that *every* rank recorded is returned in
    its place, so record what is the same on all ranks; with `combine=` the ranks' own parts are combined instead. Every
    result is kept until the evaluation ends, because another rank may have got less far: record figures, not
    predictions. With `combine=` only the latest is. Outside of a guarded evaluation it does nothing. Raises ValueError
    for a count that cannot be.

    >>> record_partial((0.31, 0.9), done=1, total=3)
    """
    if done < 0 or (total and done > total):
        text = told(
            "done is {number} of {count}: give the number of data sets or batches that are in", number=done, count=total
        )
        raise ValueError(text)
    if _current is not None:
        _current.add(result, done, total)


@contextmanager
def recorded(*, latest_only: bool = False) -> Iterator[Recorder]:
    """Keep what the block records; with `latest_only`, no result that a later one covers."""
    global _current
    _current = recorder = Recorder(latest_only=latest_only)
    try:
        yield recorder
    finally:
        _current = None


def recording() -> bool:
    """Return whether a try is in progress in this process."""
    return _current is not None


#: Meetings at the end of a try at most: a rank may still be inside, in a collective that meets those of the others.
REPEATS = 16
#: The causes of a meeting that not all ranks had come to yet. They will, because the collective fails for them as well.
_STILL_INSIDE = (Cause.DIVERGED, Cause.FAILED)
#: Exceptions that say that the program or its data is wrong. With the state as it was before, each try raises them,
#: while the reason of others, such as an OSError or a RuntimeError of torch, may be gone in the next try.
_WRONG = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError, TypeError,
    ValueError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `resilient_evaluate`, which says what each means, checked once. Times in seconds.

    Raises GuardConfigError, TypeError or ValueError for options that cannot be.
    """

    timeout: float = 1800.0
    barrier_timeout: float = 300.0
    max_attempts: int = 3
    fallback: Any = NOT_EVALUATED
    batch_size: BatchSize = None
    metric_prefix: str = "eval/"
    monitor: Any = None
    accept_partial: bool = True
    same_result: bool = False
    combine: Callable[[list[Any]], Any] | None = None
    on_lost: Literal["fail", "checkpoint"] = "fail"
    save: Callable[[], object] | None = None
    group: dist.ProcessGroup | None = None
    models: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    keepers: Sequence[state.Keeper] = ()

    def __post_init__(self) -> None:
        for name in ("timeout", "barrier_timeout"):
            value = seconds(getattr(self, name), name)
            if value is None:
                text = told("{name} must be seconds or a timedelta, not None: give for example 300", name=name)
                raise TypeError(text)
            object.__setattr__(self, name, value)
        checked_attempts(self.max_attempts)
        for name in ("models", "loaders", "keepers"):
            given = getattr(self, name)
            one = isinstance(given, (str, torch.nn.Module, DataLoader)) and not isinstance(given, torch.nn.ModuleList)
            if one or not isinstance(given, Iterable):
                text = told("{name} must be a list, not {kind}: {name}=[...]", name=name, kind=type(given).__name__)
                raise TypeError(text)
        if not (self.combine is None or callable(self.combine)):
            raise TypeError(
                told("combine must be a function of the parts, not {kind}", kind=type(self.combine).__name__)
            )
        if not (self.batch_size is None or isinstance(self.batch_size, str) or callable(self.batch_size)):
            text = told(
                "batch_size must say where it is, such as {example}, or be a function that gets the divisor, not {kind}",
                example='"args.eval_batch_size"',
                kind=type(self.batch_size).__name__,
            )
            raise TypeError(text)
        if (group := check_group(self.group)) is not None and is_outside(group):
            text = told(
                "group= is one outside the job, which cannot evaluate together: give a group of the job, or none"
            )
            raise GuardConfigError(text)
        if self.on_lost not in ("fail", "checkpoint"):
            text = told('on_lost must be "fail" or "checkpoint", got {value}', value=repr(self.on_lost))
            raise GuardConfigError(text)
        if (self.on_lost == "checkpoint") != (self.save is not None):
            text = told('on_lost="checkpoint" and save=, a function without arguments, need each other')
            raise GuardConfigError(text)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of an evaluation: what to run, and on what."""

    place: Place
    run: Callable[[int], Any]  # evaluates with batches that many times smaller
    owner: Any
    models: Sequence[torch.nn.Module]
    keepers: Iterable[state.Keeper]
    options: Options
    terms: Terms
    places: Places
    goes_on: bool = False  # the others evaluate again where a rank ends


@dataclass(frozen=True)
class Ended:
    """The end of an evaluation: the result, its report, and the rank that logs it."""

    result: Any
    report: EvaluationReport
    logging_rank: int
    error: Exception | None = None  # of the meeting that failed, where the job cannot go on
    gone: bool = False  # because a process is gone, as all know: without it the others may evaluate again


class Stopped(Exception):
    """An evaluation ended because the job cannot go on as it is; its cause is the error to raise then."""

    def __init__(self, ended: Ended, tell: Callable[[], None]) -> None:
        super().__init__(ended.report.headline)
        self.ended, self.tell = ended, tell


@dataclass(frozen=True, slots=True)
class Part:
    """The partial result that covers most so far; with `combine`, the ranks' own parts as they were sent."""

    done: int
    total: int
    result: Any


class Evaluation:
    """The tries of one evaluation on this rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._options = job.options
        self._label = job.place.label
        self._members = members_of(job.options.group)
        self._rank = dist.get_rank() if len(self._members) > 1 else self._members[0]
        self._failures: list[Failure] = []
        self._attempts = 0
        self._part: Part | None = None
        self._logging_rank = self._members[0]
        self._restore = state.keep(job.keepers)
        self._interruption: BaseException | None = None  # to be raised once the other ranks know of it
        self._traced = ""  # the last exception, of which the traceback is logged once
        self._withheld = ""  # words and traceback of one in this try that the next, with smaller batches, may not raise

    def run(self) -> Ended:
        """Try until all ranks are content, or all give up; raises only what interrupts the program itself."""
        ended = self._run()
        if self._interruption is not None:
            raise self._interruption
        return ended

    def _run(self) -> Ended:
        for attempt in range(1, self._options.max_attempts + 1):
            opening = self._open(attempt)
            decided = decision.at_opening(opening, attempt, self._members)
            if decided.action not in (Action.RUN, Action.RUN_SINGLE):
                return self._end(decided, opening)
            self._attempts, self._withheld = attempt, ""
            divisor = decided.divisor * 2 ** (attempt - 1)
            if decided.action is Action.RUN_SINGLE:
                decided, met, result = self._try_on_one(attempt, divisor, decided.single_rank)
            else:
                decided, met, result = self._try(attempt, divisor)
            if decided.action is not Action.ACCEPT:
                self._restore()
                state.release_memory()
            if decided.action is not Action.RETRY:
                return self._end(decided, met, result)
            self._note(decided)
            failed = decided.failure
            text = told(
                "ncclguard: {name}: {failed}; trying again",
                name=self._label,
                failed=failed.summary if failed is not None else "",
            )
            level = logging.WARNING if self._rank == self._members[0] else logging.INFO  # all ranks say the same
            log.log(level, "%s%s", text, failed.details if failed is not None else "")
        raise AssertionError("the last try is decided by at_end")

    # ------------------------------------------------------------------ one try

    def _open(self, attempt: int) -> Meeting:
        if attempt == 1:
            meeting = self._come_together()
        else:
            name = _beginning(self._label, attempt)
            meeting = self._gather(self._job.terms, name, self._options.barrier_timeout, repeat=False)
        if isinstance(meeting, Met):
            self._logging_rank = decision.first_with_sink(meeting.values, self._members)
        return meeting

    def _come_together(self) -> Meeting:
        """Exchange the terms with all ranks, once all are in this evaluation; those that are in one before it go on."""
        job, members, limit = self._job, self._members, self._options.barrier_timeout
        until = time.monotonic() + limit
        while True:
            mine = (job.place, job.terms, time.monotonic() > until)
            meeting = self._gather(mine, _beginning(self._label, 1), limit, repeat=False)
            if isinstance(meeting, NotMet) and meeting.elsewhere:
                meeting = self._gather(mine, "places of evaluations", limit, repeat=False)
            if isinstance(meeting, NotMet):
                return meeting
            places = [place for place, _, _ in meeting.values]
            left = behind(places)
            if not left:
                break
            job.places.miss(places, members)
            impatient = any(over for n, (_, _, over) in enumerate(meeting.values) if n not in left)
            if members.index(self._rank) in left or impatient:
                culprits = tuple(members[n] for n in sorted(elsewhere(places)))
                return NotMet(Cause.DIVERGED, culprits, errors=described(places, members))
            log.warning("%s", _waiting(self._label, [members[n] for n in left]))
        if job.places.meet(places, members) and self._rank == members[0]:
            log.warning("%s", _branches(self._label, described(places, members)))
        return Met(tuple(terms for _, terms, _ in meeting.values))

    def _try(self, attempt: int, divisor: int) -> tuple[Decision, Meeting, Any]:
        job = self._job
        shares = self._options.same_result and self._rank == self._members[0]

        def evaluate() -> tuple[Any, Any]:
            with divided(job.owner, self._options.batch_size, divisor):
                result = job.run(divisor)
            return result, self._packed(result, "the result") if shares else None

        with recorded(latest_only=self._options.combine is not None) as recorder:
            found, mine = self._inside(
                tr("{evaluation}, try {number}", evaluation=self._label, number=attempt), evaluate
            )
        result, shared = found or (None, None)
        mine = replace(self._with_part(mine, recorder), result=shared)
        decided, meeting = self._meet(mine, f"{self._label}, end of try {attempt}", attempt, self._options.max_attempts)
        self._weigh_part(decided, meeting, recorder, attempt)
        if self._options.same_result and decided.action is Action.ACCEPT and isinstance(meeting, Met):
            return self._taken(meeting.values[0].result, attempt)
        return decided, meeting, result

    def _try_on_one(self, attempt: int, divisor: int, chosen: int) -> tuple[Decision, Meeting, Any]:
        job = self._job
        sent: tuple[Any, RankResult] | None = None
        if self._rank == chosen:
            restore = state.keep(job.keepers)
            smaller = divided(job.owner, self._options.batch_size, divisor)
            try:
                with recorded(), smaller, alone_in_the_world(job.models):
                    sent = self._packed(job.run(divisor), tr("the result")), RankResult(chosen)
            except BaseException as error:  # noqa: BLE001 - whatever the evaluation raises is what this is for
                sent = None, self._ended_by(error)
            restore()  # the other ranks have not evaluated, and state that is equal on all ranks must stay equal
        what = tr("the {evaluation} on rank {rank}", evaluation=self._label, rank=chosen)
        with nullcontext() if sent is not None else countdown(what, self._options.timeout):
            meeting = self._tell(sent, chosen, f"{self._label} on rank {chosen}, try {attempt}")
        shared = None
        if isinstance(meeting, Met):
            shared, result = meeting.values[0]
            meeting = Met((result,))
        decided = decision.at_end(meeting, attempt, self._options.max_attempts)
        return self._taken(shared, attempt) if decided.action is Action.ACCEPT else (decided, meeting, None)

    def _taken(self, shared: Any, attempt: int) -> tuple[Decision, Meeting, Any]:
        """Return the result of one rank if every rank can read it; where one cannot, none returns it."""
        try:
            result, mine = self._unpacked(shared), RankResult(self._rank)
        except Exception as error:  # noqa: BLE001 - whatever reading an object of the program's own raises
            result, mine = None, self._result_of(error)
        name = f"{self._label}, result of try {attempt}"
        decided, meeting = self._meet(mine, name, attempt, self._options.max_attempts)
        return decided, meeting, result

    def _inside(self, name: str, work: Callable[[], Any]) -> tuple[Any, RankResult]:
        """Run the program's code; return its result and how the try ended, and raise none of its exceptions."""
        redirection = None
        before = runtime.unread()
        try:
            with one_try(name, self._members, self._options.timeout) as redirection:
                value = work()
                for outcome in runtime.unread():
                    if not any(outcome is other for other in before):
                        outcome.raise_if_failed()  # or the value, of tensors that were not reduced, would count
                return value, RankResult(self._rank)
        except BaseException as error:  # noqa: BLE001 - whatever the evaluation raises is what this is for
            return None, self._ended_by(error, redirection.failures if redirection is not None else ())

    def _meet(self, mine: RankResult, name: str, attempt: int, max_attempts: int) -> tuple[Decision, Meeting]:
        """Exchange with the other ranks how the try ended, and decide what all do next."""
        meeting = self._gather(mine, name, self._options.timeout, repeat=True)
        settle(self._members)
        decided = decision.at_end(meeting, attempt, max_attempts)
        if isinstance(meeting, NotMet):
            decided = decision.without_followers(decided, mine)
        return decided, meeting

    def _ended_by(self, error: BaseException, failures: Sequence[Outcome] = ()) -> RankResult:
        """Describe this rank's exception; one that ends the program waits until the others, who hear of it, come.

        That is SystemExit, too: a program that catches it goes on, and the others would wait for it.
        """
        if isinstance(error, Exception):
            return self._result_of(error, failures)
        self._interruption = error
        return RankResult(self._rank, Kind.INTERRUPTED, describe_exception(error))

    def _result_of(self, error: Exception, failures: Sequence[Outcome] = ()) -> RankResult:
        """Describe this rank's exception, whose own frames hold memory, for the other ranks."""
        outcome = failed_collective(error, failures)
        if outcome is not None:
            text = outcome.incident.summary if outcome.incident is not None else str(outcome.error)
            ended = told(
                "rank {rank}: {name} ended here: {text}", rank=self._rank, name=self._label, text=received(text)
            )
            log.info("ncclguard: %s", ended)
            return RankResult(
                self._rank, Kind.COLLECTIVE, text, outcome.cause, outcome.culprits, reported_as(outcome.incident)
            )
        text = describe_exception(error)
        exhausted = any(map(_is_out_of_memory, _with_origins(error)))
        found = told("rank {rank}: {name} failed here: {error}", rank=self._rank, name=self._label, error=text)
        in_full = f"{found}\n{_traceback_of(error)}"
        may_pass = exhausted and self._attempts < self._options.max_attempts
        log.warning("ncclguard: %s", found if may_pass or text == self._traced else in_full)  # each try may raise it
        self._withheld, self._traced = (in_full, self._traced) if may_pass else ("", text)
        if exhausted:
            return RankResult(self._rank, Kind.OUT_OF_MEMORY, text)
        wrong = isinstance(error, _WRONG) and not isinstance(error, OSError) and not failures
        return RankResult(self._rank, Kind.WRONG if wrong else Kind.RAISED, text)

    # ------------------------------------------------------------------ partial results

    def _with_part(self, mine: RankResult, recorder: Recorder) -> RankResult:
        """Add the recorded partial results; one that cannot be sent fails nothing as long as no rank needs it."""
        mine = replace(mine, done=tuple(sorted(recorder.results)), total=recorder.total)
        if self._options.combine is None or not self._options.accept_partial or not mine.done:
            return mine
        try:
            return replace(mine, part=self._packed(recorder.latest, tr("the partial result")))
        except ValueError as error:
            text = told("rank {rank}: {name}: {error}", rank=self._rank, name=self._label, error=error)
            log.warning("ncclguard: %s", text)
            return replace(mine, unsent=describe_exception(error))

    def _weigh_part(self, decided: Decision, meeting: Meeting, recorder: Recorder, attempt: int) -> None:
        """Keep the partial result that covers most; all ranks keep the same one."""
        if decided.action is Action.ACCEPT or not isinstance(meeting, Met) or not self._options.accept_partial:
            return
        best = self._part.done if self._part is not None else 0
        if self._options.combine is None:
            if decided.done > best:
                self._part = Part(decided.done, decided.total, recorder.results[decided.done])
            return
        unsent = [replace(value, kind=Kind.RAISED, error=value.unsent) for value in meeting.values if value.unsent]
        if unsent:
            self._failures.append(decision.failure_of(unsent, attempt))
            return
        done = sum(max(value.done, default=0) for value in meeting.values)
        if done > best:
            total = sum(value.total for value in meeting.values)
            self._part = Part(done, total, [value.part for value in meeting.values if value.done])

    def _combined(self, part: Part, combine: Callable[[list[Any]], Any]) -> tuple[Decision, Meeting, Any]:
        """Combine the parts of all ranks, if that goes well on every rank; else none has a partial result."""
        name = f"{self._label}, combining"
        result, mine = self._inside(name, lambda: combine([self._unpacked(each) for each in part.result]))
        decided, meeting = self._meet(mine, f"end of {name}", self._attempts, self._attempts)
        self._restore()
        return decided, meeting, result

    # ------------------------------------------------------------------ the end

    def _note(self, decided: Decision) -> None:
        if decided.failure is not None:
            self._failures.append(decided.failure)

    def _end(self, decided: Decision, meeting: Meeting, result: Any = None) -> Ended:
        self._note(decided)
        part, done, total = self._part, 0, 0
        if decided.action is Action.GIVE_UP and part is not None:
            decided = Decision(Action.ACCEPT)
            result = part.result
            if self._options.combine is not None:
                decided, meeting, result = self._combined(part, self._options.combine)
                self._note(decided)
            if decided.action is Action.ACCEPT:
                decided, done, total = Decision(Action.PARTIAL), part.done, part.total
        action = decided.action
        if self._withheld and action is not Action.ACCEPT:  # there is no other try, because of another rank
            log.warning("ncclguard: %s", self._withheld)
        if action not in (Action.ACCEPT, Action.PARTIAL):
            result = self._options.fallback
        given = self._options.fallback is not NOT_EVALUATED
        report = EvaluationReport(self._label, action, tuple(self._failures), self._attempts, done, total, given)
        if action is Action.STOP and isinstance(meeting, Met) and self._job.goes_on and self._interruption is None:
            # A rank's program ends, as it says: all others wait for that, to go on without it by one verdict.
            meeting = self._gather(None, f"{self._label}, going on", self._options.barrier_timeout, repeat=True)
        if not isinstance(meeting, NotMet) or action is not Action.STOP:
            return Ended(result, report, self._logging_rank)
        return Ended(result, report, self._logging_rank, meeting.error, meeting.gone and meeting.agreed)

    # ------------------------------------------------------------------ meeting

    def _packed(self, value: Any, what: str) -> Any:
        """Pickle an object for other ranks. Raises ValueError now, and not in the exchange where the ranks wait."""
        if len(self._members) == 1:
            return value
        try:
            return pickle.dumps(value)
        except Exception as error:  # whatever an object's own reduction raises
            text = told(
                "{what} cannot be pickled ({error}): use plain data, such as numbers, lists and tensors",
                what=what,
                error=error,
            )
            raise ValueError(text) from error

    def _unpacked(self, sent: Any) -> Any:
        return sent if len(self._members) == 1 else pickle.loads(sent)

    def _gather(self, value: Any, name: str, timeout: float, *, repeat: bool) -> Meeting:
        """Exchange an object with all ranks; with `repeat`, wait for ranks whose try has only just failed."""

        def once() -> tuple[Outcome, tuple[Any, ...]]:
            slots: list[Any] = [None] * len(self._members)
            data, (terms, queue) = call.pickled(value), self._terms(timeout, name)
            with engine_section():
                outcome = gather_objects(terms, slots, data, queue)
            return outcome, tuple(slots)

        return Met((value,)) if len(self._members) == 1 else meet(once, repeat)

    def _terms(self, timeout: float, name: str) -> tuple[call.Terms, Queue]:
        """Return what a meeting has in common with any other collective, and the sequence that it belongs to."""
        group = group_of(self._options.group)
        terms = call.terms_of(group, timeout, 0, atomic=True, on_lost="fail", name=name)
        if isinstance(group, GuardedProcessGroup) and group.survivors is not None:
            return group.among_survivors(terms, "evaluation")
        return terms, OWN

    def _tell(self, value: Any, source: int, name: str) -> Meeting:
        """Give all ranks the object of global rank `source`; the other ranks wait for it here."""

        def once() -> tuple[Outcome, tuple[Any, ...]]:
            slots = [value]
            data, (terms, queue) = call.pickled(slots), self._terms(self._options.timeout, name)
            with engine_section():
                outcome = broadcast_objects(terms, slots, data, source, queue)
            return outcome, tuple(slots)

        return Met((value,)) if len(self._members) == 1 else meet(once, repeat=True)


def _beginning(label: str, attempt: int) -> str:
    """Return the name of the call with which a try begins."""
    return f"{label}, beginning of try {attempt}"


def _waiting(label: str, ranks: Iterable[int]) -> str:
    return told(
        "ncclguard {name}: waiting for {ranks}, in an evaluation before it", name=label, ranks=ranks_text(ranks)
    )


def _branches(label: str, places: Iterable[tuple[int, str]]) -> str:
    lines = "".join(f"\n    {say(joined(': ', (ranks_text([rank]), text)))}" for rank, text in places)
    return told(
        "ncclguard {name}: the ranks called it in different places. If these are branches, it is one evaluation and all is "
        "well; if a rank has left out one of two, its value mixes both: call each on all ranks or on none.{lines}",
        name=label,
        lines=lines,
    )


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in str(error).lower()


def _with_origins(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, and those that it was raised from or while they were handled."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or current.__context__


def _traceback_of(error: BaseException) -> str:
    """Return the traceback as Python prints it, from the program's own first frame on."""
    begin = _programs_own(error) or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, begin)).rstrip()


def _programs_own(error: BaseException) -> TracebackType | None:
    """Return the traceback from the program's own first frame on; None where there is none."""
    begin = error.__traceback__
    while begin is not None and begin.tb_frame.f_globals.get("__name__", "").startswith("ncclguard."):
        begin = begin.tb_next
    return begin


def failed_collective(error: BaseException, failures: Sequence[Outcome]) -> Outcome | None:
    """Return the outcome of the failed collective behind an exception; None for an error of this rank's own."""
    for each in _with_origins(error):
        if isinstance(each, CollectiveFailed):
            return each.outcome
    if isinstance(error, RuntimeError) and not _is_out_of_memory(error) and failures:
        return failures[0]  # an error that passes through C++, such as in a hook of DDP, is a plain RuntimeError
    return None


def stopped(ended: Ended) -> Exception:
    """Return the error to raise when the job cannot go on."""
    if ended.error is not None:
        return ended.error
    return GuardError(f"{ended.report}\n({ranks_text(ended.report.culprits)})")


# ---------------------------------------------------------------------- meeting


def meet(once: Callable[[], tuple[Outcome, tuple[Any, ...]]], repeat: bool) -> Meeting:
    """Communicate once, or with `repeat` until nobody is in the try any more; a failure is returned, never raised."""
    for _ in range(REPEATS if repeat else 1):
        outcome, values = _outcome_of(once)
        if outcome.ok:
            return Met(values)
        gone = is_gone(outcome)
        if gone or not outcome.agreed or outcome.cause not in _STILL_INSIDE:
            break
    name = reported_as(outcome.incident)
    return NotMet(
        outcome.cause or Cause.UNKNOWN,
        outcome.culprits,
        agreed=outcome.agreed,
        gone=gone,
        incident=name,
        report="" if name else str(outcome.incident or ""),
        elsewhere=outcome.agreed and outcome.cause is Cause.DIVERGED and _all_begin(outcome.incident),
        error=outcome.error,
    )


def _all_begin(incident: Incident | None) -> bool:
    """Return whether those that had come were at the beginning of an evaluation each; the others may still come.

    They do not where they wait in the training's own collectives.
    """
    if incident is None:
        return False
    inside = [rank.operation or "" for rank in incident.ranks if rank.inside]
    return bool(inside) and all(begins_evaluation(text) for text in (*inside, *(text for text, _ in incident.sides)))


def reported_as(incident: Incident | None) -> str:
    """Return the incident whose report is on the terminal or in the folder; "" where reports are off."""
    config = current_config()
    if incident is None or (config.report_dir is None and not config.report_panel):
        return ""
    if incident.agreed and incident.decided_after is None and incident.repeats is None:
        return ""  # a rank's own, about what has ended before without an incident that names it
    return incident.repeats or incident.id


def _outcome_of(once: Callable[[], tuple[Outcome, tuple[Any, ...]]]) -> tuple[Outcome, tuple[Any, ...]]:
    """Return the outcome of this exchange, also where failures raise; an older call's failure is logged and skipped."""
    while True:
        try:
            return once()
        except CollectiveFailed as error:
            if current_config().on_failure == "raise":
                return error.outcome, ()
            # A failure that was only decided afterwards, raised by the next call on the group; each is raised once.
            _log_unread(error)


def _read_failures() -> None:
    """Say what the program has not looked at before an evaluation, in whose calls it would be raised on each rank."""
    for outcome in runtime.unread():
        outcome.acknowledge()
        _log_unread(outcome)


def _log_unread(failure: CollectiveFailed | Outcome) -> None:
    text = told("a failed outcome was not looked at before the evaluation: {error}", error=str(failure))
    log.error("ncclguard: %s", text)


def is_gone(outcome: Outcome) -> bool:
    """Return whether the process of a culprit has ended, and not only its try."""
    if outcome.cause in (Cause.LOST, Cause.EXITED):
        return True
    ranks = outcome.incident.ranks if outcome.incident is not None else ()
    return any(report.rank in outcome.culprits and report.state == "departed" for report in ranks)


#: Makes keepers of further state of some models, such as that of a DeepSpeed engine.
KeepersOf = Callable[[Iterable[nn.Module]], Iterable[state.Keeper]]
_keepers_of: list[KeepersOf] = []


def register_keepers(keepers_of: KeepersOf) -> None:
    """Use the keepers of `keepers_of(models)` in every guarded evaluation from now on."""
    if keepers_of not in _keepers_of:
        _keepers_of.append(keepers_of)


def _framework_keepers(models: Sequence[nn.Module]) -> list[state.Keeper]:
    """Return the keepers of the frameworks that the program has loaded; none of them is required."""
    for name in ("accelerate", "deepspeed"):
        if name in sys.modules:
            importlib.import_module(f"ncclguard.integrations.{name}")
    return [keeper for keepers_of in _keepers_of for keeper in keepers_of(models)]


class GuardedEvaluation:
    """A function that evaluates, or a method as `evaluate(self, step=None)`, made resilient by `resilient_evaluate`.

    Three attributes may be changed at any time, on any rank, and what one rank says holds for all: `enabled` (False
    returns the fallback), `divisor` (of the batch size, from the first try on), `single_rank` (evaluate on this global
    rank only). `report` is the last `EvaluationReport`, and None before the first evaluation.
    """

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, function)
        self.enabled = True
        self.divisor = 1
        self.single_rank: int | None = None
        self.report: EvaluationReport | None = None
        self._function = function
        self._owner = getattr(function, "__self__", None)  # of a bound method; else the first argument is taken for it
        self._options = options
        self._signature = _signature_of(function)
        self._places = Places(function)
        start_counting()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if recording():  # a part of another evaluation, which survives or fails as a whole
            return self._function(*args, **kwargs)
        if self._signature is not None:
            self._signature.bind(*args, **kwargs)  # raises where it is called, and not in each try
        group = group_of(self._options.group)
        again = group.again if isinstance(group, GuardedProcessGroup) else None
        inside = again is not None and again.running
        stops: list[Stopped] = []

        def evaluate() -> Any:
            ended, tell = self._evaluate(args, kwargs, again is not None)
            if ended.report.action is not Action.STOP:
                tell()
                return ended.result
            stops.append(Stopped(ended, tell))
            raise stops[-1] from stopped(ended)

        try:
            return evaluate() if again is None or inside else again(evaluate)
        except Exception as error:
            if not stops:
                raise
            if not (inside and stops[-1].ended.gone):  # else the step around it says what comes of that
                stops[-1].tell()
            self._save()
            if isinstance(error, Stopped):
                assert error.__cause__ is not None
                raise error.__cause__ from None
            raise

    def _evaluate(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], goes_on: bool
    ) -> tuple[Ended, Callable[[], None]]:
        """Return how the evaluation ended, and what tells people of that."""
        function, options = self._function, self._options
        _read_failures()
        owner = self._owner if self._owner is not None or not args else args[0]
        check_batch_size(owner, options.batch_size, f"{getattr(function, '__name__', 'evaluate')}()")
        step = step_of(function, owner, args, kwargs)
        holders = [owner, *args, *kwargs.values(), *state.named_in(function)]
        models = state.models_of([*holders, *options.models])
        loaders = state.loaders_of([*holders, *options.loaders])
        sink = options.monitor if options.monitor is not None else getattr(owner, "monitor", None)
        default = default_batch_size(function) if "batch_size" not in kwargs else kwargs["batch_size"]

        def run(divisor: int) -> Any:
            changed = {} if default is None or divisor == 1 else {"batch_size": smaller(default, divisor)}
            return function(*args, **{**kwargs, **changed})

        job = Job(
            place=self._places.next(step, members_of(options.group)),
            places=self._places,
            run=run,
            owner=owner,
            models=models,
            keepers=(
                state.modes(models),
                state.gradients(models),
                state.positions(loaders),
                state.random_numbers,
                *_framework_keepers(models),
                *options.keepers,
            ),
            options=options,
            terms=Terms(self.enabled, self.divisor, self.single_rank, sink is not None),
            goes_on=goes_on,
        )
        with uncounted():
            ended = Evaluation(job).run()
        self.report = ended.report
        return ended, functools.partial(self._tell, ended, sink, step)

    def _tell(self, ended: Ended, sink: Any, step: int | None) -> None:
        """Log on one rank the metrics and the report, and on all that the evaluation failed."""
        report = ended.report
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if report.action is Action.SKIP:
            log.warning("%s", report)
        if not report.failed:
            return
        log.error("%s", report if rank == ended.logging_rank else report.headline)
        if rank == ended.logging_rank:
            log_to(sink, metrics_of(report, self._options.metric_prefix), step)

    def _save(self) -> None:
        """Save a checkpoint before the job ends, where the program wants that."""
        if self._options.save is None:
            return
        log.error("ncclguard: %s", told("a rank is gone: saving a checkpoint on the survivors before the job ends"))
        try:
            with process_group.redirected(
                timeout=self._options.timeout
            ):  # those that need the rank that is gone end at once
                self._options.save()
        except Exception:
            log.exception(
                "ncclguard: %s", told("the checkpoint could not be saved; the job ends with the report", "log")
            )


def check_runs(function: Callable[..., Any]) -> None:
    """Raise TypeError for a function whose call runs nothing of it yet."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        kind = tr("a coroutine function")
    elif inspect.isgeneratorfunction(function):
        kind = tr("a generator function")
    else:
        return
    text = told(
        "{name} is {kind}, and its call evaluates nothing yet: decorate a function that returns the result",
        name=getattr(function, "__qualname__", "evaluate"),
        kind=kind,
    )
    raise TypeError(text)


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function; None for one of C++ that does not tell it."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


@overload
def resilient_evaluate(function: Callable[..., Any], /, **options: Any) -> GuardedEvaluation: ...
@overload
def resilient_evaluate(**options: Any) -> Callable[[Callable[..., Any]], GuardedEvaluation]: ...
def resilient_evaluate(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function that evaluates on all ranks, such as `evaluate(self, step=None)`, end with one result for all.

    `timeout`, `barrier_timeout`: seconds or timedelta, for each collective inside, and for all ranks to arrive (1800,
    300). `max_attempts`: tries, each with half the batch size of the one before (3); an exception that each try would
    raise, such as a KeyError in a metric, is the last one at once. `batch_size`: where it is, a dotted attribute of the
    owner (a number or a DataLoader), or a callable that gets the divisor; a `batch_size` parameter is found by itself.
    `fallback`: returned when all tries failed (`NOT_EVALUATED`, which is NaN, alone and as a loss and an accuracy).
    `monitor`: where metrics go, else `self.monitor`; `metric_prefix` ("eval/"). `accept_partial`, `combine(parts)`: see
    `record_partial`. `same_result`: all ranks return what the first one found. `on_lost`: "fail" raises when a process
    is gone; "checkpoint" calls `save()` on the survivors before; where a `resilient_step` goes on without it, they
    evaluate again. `group`: who evaluates together (default: all).
    `models`, `loaders`, `keepers`: whose state is kept, besides what the owner and the arguments hold and the function
    itself names.
    An evaluation that one rank leaves out is skipped on the others, which meet it again in the next one.

    Raises GuardConfigError, TypeError or ValueError for options that cannot be, and TypeError for a generator function
    or coroutine function. A call raises GuardConfigError where
    `batch_size` names nothing, and TypeError for arguments that the function does not take, before anything is sent;
    PeerLost, or another CollectiveFailed, when the job cannot go
    on; and otherwise nothing of what happened inside.

    >>> import ncclguard as ng
    >>> @ng.resilient_evaluate(max_attempts=2)
    ... def evaluate(step=None):
    ...     raise ValueError("a metric went wrong")
    >>> loss, accuracy = evaluate(step=7)
    >>> loss, loss < 0.5
    (nan, False)
    """
    unknown = [name for name in options if name not in Options.__dataclass_fields__]
    if unknown:
        raise no_argument("resilient_evaluate", unknown[0], Options.__dataclass_fields__)
    checked = Options(**options)
    if function is not None and not callable(function):
        needed = tr("resilient_evaluate takes a function that evaluates, not {kind}", kind=type(function).__name__)
        meant = tr("a limit is given by its name, timeout={value}", value=repr(function))
        raise TypeError(say(joined(": ", (needed, meant)) if is_time(function) else needed))

    def wrap(wrapped: Callable[..., Any]) -> GuardedEvaluation:
        if not callable(wrapped):
            needed = tr("resilient_evaluate takes a function that evaluates, not {kind}", kind=type(wrapped).__name__)
            raise TypeError(say(needed))
        check_runs(wrapped)
        return GuardedEvaluation(wrapped, checked)

    return wrap if function is None else wrap(function)
