"""`resilient_step`: a training step that is done again by the others when a rank is lost in it.

Every failed collective has one verdict on all ranks, so all survivors leave the step at the same place. They meet in a
sequence of their own, restore what the step had changed, and go on in a new sequence of collectives that has no lost
ranks. A new process may take a lost rank's place between two steps, see `joining`. From the moment the optimizer's step
begins nothing can be done again: a collective behind it goes on without ranks that are lost, in place, and the step
stands on all ranks that go on. Where collectives are only enqueued, all ranks meet before that moment, and agree that
all of them are complete.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn

from ncclguard import lifecycle, torch_compat
from ncclguard.config import is_time, seconds
from ncclguard.engine import runtime
from ncclguard.errors import GuardConfigError, GuardError
from ncclguard.evaluation import place, state
from ncclguard.evaluation.runner import failed_collective, is_gone
from ncclguard.groups import check_group, group_of
from ncclguard.incident.model import MembershipChange
from ncclguard.outcome import Outcome
from ncclguard.process_group.group import GuardedProcessGroup
from ncclguard.replicas import ReplicaReport
from ncclguard.replicas.check import OnDifference, Options, PeriodicCheck, SafeExchange, check_on_difference
from ncclguard.replicas.tensors import several
from ncclguard.spelling import no_argument
from ncclguard.torch_compat import zero
from ncclguard.training import declaration, joining
from ncclguard.training.continuation import Continuation, enroll, has_shards, living
from ncclguard.training.loader import ElasticLoader
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import say, told
from ncclguard_explain.ranks import ranks_text

if TYPE_CHECKING:
    from ncclguard.training.shards import Shards
    from ncclguard.training.zero import ZeroStates

log = logging.getLogger("ncclguard")

#: Told how many ranks took part before, and how many do now, on each survivor before the step is done again.
OnChange = Callable[[int, int], object]

_continuations: dict[int, Continuation] = {}  # by id of the group, which they hold
#: Those of sharded models that have not been called yet: the first call of any has the shards of all copied.
_uncalled: list[weakref.ref[ResilientStep]] = []


def refuse_foreign(*given: Any, copies: int = 0) -> None:
    """Raises GuardConfigError for what shards state in a way of its own, or counts ranks in one.

    `copies`: of the optimizer's state, which ZeRO-1 of torch goes on from.
    """
    for each in (one for some in given for one in (some if isinstance(some, (list, tuple)) else (some,))):
        kinds = type(each).__mro__
        if zero.is_one(each) and not copies:
            raise GuardConfigError(
                told(
                    "ZeroRedundancyOptimizer has each parameter's state on one rank only, and a rank that is "
                    "lost takes it with it: give copies=1 to resilient_step, so that its neighbour has a copy, "
                    'or on_lost="fail"'
                )
            )
        if any(kind.__module__.partition(".")[0] == "deepspeed" for kind in kinds):
            raise GuardConfigError(
                told(
                    "DeepSpeed's {name} keeps the number of ranks, its partitions and a process group of its own "
                    'from when it was made: use fully_shard with copies=1, or on_lost="fail"',
                    name=kinds[0].__name__,
                )
            )
        if any(kind.__module__.partition(".")[0] == "accelerate" for kind in kinds):
            raise GuardConfigError(
                told(
                    "{name}: Accelerate counts the ranks itself, and has to learn of a lost one: decorate with "
                    "resilient_step(accelerator, model, optimizer) of ncclguard.integrations.accelerate",
                    name=kinds[0].__name__,
                )
            )


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise GuardConfigError(
            told(
                "{name} is {value}: it must be a whole number, at least {least}",
                name=name,
                value=repr(value),
                least=least,
            )
        )


class ResilientStep:
    """The callable that `resilient_step` makes of a function.

    Attributes: `ranks`, global ranks that take part now, in order; `made_by`, those that made the last completed step,
    of which some may have been lost behind the optimizer's step; `completed`, how many steps are done, which a new rank
    learns with its first one, and which may be set before that, from a checkpoint; `losses`, for each time that ranks
    were lost, which ones and the seconds from the beginning of the step to the beginning of the try without them;
    `joins`, for each rank that took a lost one's place, which one, after how many completed steps, and the seconds that
    the others waited for it; `replicas`, the report of the last comparison of the replicas, None before the first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        model: nn.Module | Sequence[nn.Module] = (),
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        loader: ElasticLoader | None = None,
        keep: Any = (),
        on_change: OnChange | None = None,
        on_lost: Literal["continue", "fail"] = "continue",
        min_ranks: int = 1,
        accumulates: bool = False,
        group: dist.ProcessGroup | None = None,
        timeout: float | timedelta | None = None,
        copies: int = 0,
        load: Callable[[], object] | None = None,
        check_every: int = 0,
        on_difference: OnDifference = "report",
        ignore: Sequence[str] = (),
    ) -> None:
        _check_whole("copies", copies, 0)
        _check_whole("min_ranks", min_ranks, 1)
        check_on_difference(on_difference)
        for name, called in (("on_change", on_change), ("load", load)):
            if called is not None and not callable(called):
                raise GuardConfigError(told("{name} is {value}: it must be a function", name=name, value=repr(called)))
        if accumulates and (copies or load is not None):
            raise GuardConfigError(
                told(
                    "a lost rank's part of accumulated gradients cannot be had: have all backwards of an "
                    "optimizer's step in the function, without accumulates"
                )
            )
        if on_lost not in ("continue", "fail"):
            raise GuardConfigError(told('on_lost must be "continue" or "fail", got {value}', value=repr(on_lost)))
        if on_lost == "continue":
            refuse_foreign(model, optimizer, copies=copies)
        functools.update_wrapper(self, function)
        self._function = function
        self._models = several(model, nn.Module, "model", "resilient_step")
        self._optimizers = several(optimizer, torch.optim.Optimizer, "optimizer", "resilient_step")
        if loader is not None and not hasattr(loader, "take"):
            raise GuardConfigError(
                told(
                    "loader is a {kind}: make it an ncclguard.ElasticLoader of its data set", kind=type(loader).__name__
                )
            )
        self._loader = loader
        several_kept = isinstance(keep, Iterable) and not hasattr(keep, "state_dict")
        self._kept = tuple(keep) if several_kept else (keep,)
        for kept in self._kept:
            if not hasattr(kept, "state_dict") or not hasattr(kept, "load_state_dict"):
                raise GuardConfigError(
                    told(
                        "keep has a {kind}: it takes what has a state_dict, one or several, such as a scheduler",
                        kind=type(kept).__name__,
                    )
                )
        self._on_change = on_change
        self._continues = on_lost == "continue"
        self._min_ranks = min_ranks
        self._accumulates = accumulates
        self._group = check_group(group)
        self._timeout = seconds(timeout, "timeout")
        self._copies, self._load = copies, load
        if isinstance(check_every, bool) or not isinstance(check_every, int) or check_every < 0:
            text = told(
                "check_every must be a number of steps, or 0 for no checks, got {value}", value=repr(check_every)
            )
            raise GuardConfigError(text)
        compared = tuple(one for one in self._optimizers if not zero.is_one(one))  # whose state has no replicas
        self._check = (
            PeriodicCheck(Options(self._models, compared, ignore, on_difference), check_every) if check_every else None
        )
        self.replicas: ReplicaReport | None = None
        self._shards: Shards | ZeroStates | None = None
        self._given: dict[str, Any] | None = None  # what a new rank was told of them
        self._continuation: Continuation | None = None
        self._inside = self._stepped = False
        self._unit: GuardedProcessGroup | None = None  # its collectives since a step began are committed together
        self.made_by: tuple[int, ...] = ()
        self.losses: list[tuple[tuple[int, ...], float]] = []
        self.joins: list[tuple[int, int, float]] = []
        self.completed = 0
        self.name = str(getattr(function, "__qualname__", type(function).__qualname__))
        enroll(self)
        declaration.watch_end()
        self._keepers = self._what_a_try_may_change()
        for one in self._optimizers:  # that of Accelerate has no hooks of its own, and in it the one that steps
            getattr(one, "optimizer", one).register_step_pre_hook(self._before_optimizer)
        if copies or load is not None or has_shards(self._models):
            _uncalled.append(weakref.ref(self))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """A process group of those that take part, for what counts ranks itself, such as a checkpoint of shards."""
        return None if self._continuation is None else self._continuation.taking_part

    @property
    def ranks(self) -> tuple[int, ...]:
        return (0,) if self._continuation is None else self._continuation.ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; with a loader, the function gets the next batch as its first argument, in each try anew."""
        going = self._continuation
        if going is None or going.group not in torch_compat.known_groups():
            going = self._continuation = self._begin()
        if self._inside:
            raise GuardError(told("a resilient step cannot contain itself: call the function that it was made of"))
        if going is not None and going.running and not self.trains:
            return self._function(*args, **kwargs)  # a part of a step that survives or fails as a whole
        self._inside = True
        if going is not None:
            going.running += 1
        try:
            return self._run(going, args, kwargs)
        finally:
            self._inside = False
            if going is not None:
                going.running -= 1

    def _run(self, going: Continuation | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        started = time.monotonic()
        if going is not None:
            going.calls += 1
            going.failures.clear()
        restore = state.keep(self._keepers)
        while True:
            self._stepped, taking_part = False, self.ranks
            try:
                if self._unit is not None:
                    self._unit.begin_step()
                if going is not None:
                    going.settle()  # of those that were there, before a new one is given its part
                    if self._admit(going):
                        taking_part = self.ranks
                        going.settle()
                self._check_replicas(going)
                batch = (
                    () if self._loader is None else (self._loader.take(self.ranks, 0 if going is None else going.rank),)
                )
                result = self._function(*batch, *args, **kwargs)
                self._commit()
                if self._shards is not None and self._stepped:
                    self._shards.keep()
            except Exception as error:
                if going is None:
                    raise
                outcome = self._outcome_of(error, going)
                if outcome is None or not self._goes_on_after(outcome, going):
                    if outcome is not None and outcome.agreed and not self._stepped:
                        going.forget_step()  # it has failed on all ranks, which may call it again
                        restore()
                    raise
                self._without_lost(going, error, started)
                restore()
                continue
            finally:
                if going is not None:
                    going.group.on_lost, going.group.one_by_one = "fail", type(going.group).one_by_one
            if going is not None and going.absorbed:
                self._without_lost(going, None, started)
            if self._loader is not None:
                self._loader.done()
            self.completed += 1
            self.made_by = taking_part
            return result

    def _check_replicas(self, going: Continuation | None) -> None:
        """Compare a part of what the last step has made; one rank tells of a difference."""
        if self._check is None or not self.completed:
            return
        exchange = SafeExchange(self._group, self._timeout) if going is None else going.exchange()
        report = self._check.step(exchange, None if going is None else going.meetings)
        if report is None:
            return
        self.replicas = report
        if report.first is not None and exchange.index == 0:
            log.error("ncclguard: %s", told("before step {step}: {text}", "log", step=self.completed + 1, text=report))

    def _begin(self) -> Continuation | None:
        """The others are met for the first time; None where this process is alone."""
        group = group_of(self._group)
        self._unit = group if isinstance(group, GuardedProcessGroup) else None
        if group is None or dist.get_world_size(group) == 1:
            return None
        if not self._continues:
            return None
        if not isinstance(group, GuardedProcessGroup):
            raise GuardConfigError(
                told(
                    'resilient_step goes on without a rank on groups of the backends "ncclguard" and '
                    '"ncclguard-nccl": call init_process_group("ncclguard"), or "ncclguard-nccl" where all '
                    "tensors are on GPUs"
                )
            )
        if self._min_ranks > dist.get_world_size(group):
            raise GuardConfigError(
                told(
                    "min_ranks is {min_ranks}, and there are {count} ranks, so that the first loss would end the "
                    "job: give the fewest that it is to go on with",
                    min_ranks=self._min_ranks,
                    count=dist.get_world_size(group),
                )
            )
        going = _continuations.get(id(group))
        if going is None or going.group is not group:
            joins = lifecycle.is_joining()
            going = Continuation(group, self._min_ranks, self._timeout, self if joins else None)
            _continuations[id(group)] = going
            if (
                os.environ.get("TORCHELASTIC_RUN_ID")
                and not os.environ.get(declaration.FOLDER)
                and dist.get_rank() == 0
            ):
                text = told(
                    "ncclguard: torchrun ends all ranks when one is lost, so that resilient_step cannot go on: start this "
                    "program with `ncclguard run`, which takes torchrun's arguments"
                )
                log.warning("%s", text)
            group.again = _Again(going, group)
            if joins:
                self._changed(going, len(going.ranks) - 1)
        going.adopt(self._models)
        self._shards = going.protect(self._models, self._optimizers, self._copies, self._load)
        if self._shards is not None and self._given is not None:
            self._shards.take_state(self._given)
        self._given = None
        while _uncalled:
            other = _uncalled.pop()()
            if other is not None and other is not self and other._continuation is None:
                other._continuation = other._begin()
        return going

    @staticmethod
    def _outcome_of(error: Exception, going: Continuation) -> Outcome | None:
        """Return the outcome of the failed collective that an exception came from, if it came from one."""
        outcome = failed_collective(error, going.failures)
        return outcome if outcome is not None else going.group.failed_since()

    def _goes_on_after(self, outcome: Outcome, going: Continuation) -> bool:
        if not outcome.agreed:
            return False
        if going.rank in outcome.culprits:
            if outcome.cause in (Cause.STUCK, Cause.UNKNOWN):
                log.error(
                    "ncclguard: %s",
                    told("this rank was given up, and the others go on without it: its process has to end"),
                )
            return False
        stands = self._stepped and self._shards is None
        if not is_gone(outcome) and (stands or not going.gives_up(outcome)):
            return False
        if stands:
            text = told(
                "{ranks} is gone, and the optimizer had begun its step, which cannot be done again: have what needs all "
                "ranks done before it",
                ranks=ranks_text(outcome.culprits),
            )
            log.error("ncclguard: %s", text)
            return False
        return True

    def _without_lost(self, going: Continuation, error: BaseException | None, started: float) -> None:
        before, known = going.ranks, going.calls
        going.go_on(error, f"{'after' if error is None else 'again'} step {known}")
        lost = tuple(rank for rank in before if rank not in going.ranks)
        taken = time.monotonic() - started
        self.losses.append((lost, taken))
        self._tell("went on", lost, taken, going, going.ranks[0])
        self._changed(going, len(before))

    def _admit(self, going: Continuation) -> bool:
        started, before = time.monotonic(), going.ranks
        changed = going.admit(self)
        if changed is None:
            return False
        newcomer, lost = changed
        taken = time.monotonic() - started
        came = newcomer in going.ranks
        speaker = min(set(before) & set(going.ranks))
        if lost:
            self.losses.append((lost, taken))
            self._tell("went on", lost, taken, going, speaker)
        if came:
            self.joins.append((newcomer, self.completed, taken))
            self._tell("rejoined", (newcomer,), taken, going, speaker, self.completed + 1)
        elif going.rank == speaker:
            log.warning(
                "ncclguard: %s",
                told(
                    "rank {rank} was lost again while it joined, {seconds:.1f} s", "log", rank=newcomer, seconds=taken
                ),
            )
        if len(going.ranks) != len(before):
            self._changed(going, len(before))
        return True

    def _changed(self, going: Continuation, before: int) -> None:
        """Have all steps of the group count the ranks that take part now, whichever of them was in progress."""
        steps = [one for one in living() if isinstance(one, ResilientStep) and one._is_of(going)]
        told: list[OnChange] = []
        for step in steps:
            step.count_ranks()
        for step in steps:
            if step._on_change is not None and step._on_change not in told:
                told.append(step._on_change)
                step._on_change(before, len(going.ranks))

    def _is_of(self, going: Continuation) -> bool:
        if self._continuation is None:  # not called yet
            return self._continues and (self._group or group_of(None)) is going.group
        return self._continuation is going

    def count_ranks(self) -> None:
        """Tell what counts ranks itself, such as an Accelerator, of those that take part now."""

    def _tell(
        self,
        kind: Literal["went on", "rejoined"],
        ranks: tuple[int, ...],
        taken: float,
        going: Continuation,
        speaker: int,
        step: int | None = None,
    ) -> None:
        """Reports and metrics learn of it on every rank; one logs it."""
        change = MembershipChange(
            kind=kind, ranks=ranks, participants=len(going.ranks), seconds=round(taken, 3), step=step
        )
        runtime.membership_changed(change, going.ranks)
        if going.rank == speaker:
            log.warning("ncclguard: %s", say(change.text))

    # ------------------------------------------------------------------ what a new rank is given

    @property
    def trains(self) -> bool:
        """Return whether a new rank may join in this step: it has something to learn."""
        return bool(self._models or self._optimizers or self._loader is not None)

    def state_for_newcomer(self) -> dict[str, Any]:
        """All that a new rank needs of this step: read between two steps, with tensors in it.

        Sharded models and their optimizers are dealt out behind that, among all.
        """
        whole = self._shards is None
        models_are_whole = self._shards is None or self._shards.models_are_whole
        return {
            "completed": self.completed,
            "evaluations": place.position(),
            "models": [joining.model_state(model) for model in self._models] if models_are_whole else [],
            "modes": [[module.training for module in model.modules()] for model in self._models],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers] if whole else [],
            "shards": None if self._shards is None else self._shards.state_for_newcomer(),
            "kept": [kept.state_dict() for kept in self._kept],
            "loader": None if self._loader is None else (self._loader.batch_size, self._loader.state_dict()),
        }

    def take_state(self, state: dict[str, Any]) -> None:
        """On the new rank; its random numbers are made of its own seed and the number of completed steps."""
        self.completed, self._given = state["completed"], state["shards"]
        place.take_position(state["evaluations"])
        whole = self._given is None
        for model, values in zip(self._models if state["models"] else (), state["models"], strict=True):
            joining.take_model_state(model, values)
        for model, modes in zip(self._models, state["modes"], strict=True):
            for module, training in zip(model.modules(), modes, strict=True):
                module.training = training
        for optimizer, values in zip(self._optimizers if whole else (), state["optimizers"], strict=True):
            joining.take_optimizer_state(optimizer, values)
        for kept, values in zip(self._kept, state["kept"], strict=True):
            kept.load_state_dict(values)
        if self._loader is not None:
            self._loader.batch_size, position = state["loader"]
            self._loader.load_state_dict(position)

    def _before_optimizer(self, *_: Any) -> None:
        """From here on nothing is done again: what follows goes on without ranks that are lost, in place."""
        if self._inside:
            self._commit()
        self._stepped = True
        if self._inside and self._continuation is not None and self._shards is None:
            self._continuation.group.on_lost = "shrink"

    def _commit(self) -> None:
        """Wait until what was reduced is complete, and well, on all ranks; what follows has verdicts of its own."""
        if self._unit is not None:
            self._unit.commit()
            if self._continuation is not None:
                self._unit.one_by_one = True

    def _what_a_try_may_change(self) -> list[state.Keeper]:
        gradients = state.gradient_values if self._accumulates else state.no_gradients
        return [
            state.random_numbers,
            state.buffers(self._models),
            state.modes(self._models),
            gradients(self._models),
            state.hyperparameters(self._optimizers),
            state.states_of(self._kept),
        ]


class _Again:
    """A step for parts of the program that are none, such as an evaluation that survives."""

    def __init__(self, going: Continuation, group: GuardedProcessGroup) -> None:
        self._going = going
        self._step = ResilientStep(_call, group=group)

    @property
    def running(self) -> bool:
        return bool(self._going.running)

    def __call__(self, part: Callable[[], Any], /) -> Any:
        return self._step(part)


def _call(part: Callable[[], Any]) -> Any:
    return part()


@overload
def resilient_step(model: Callable[..., Any], /) -> ResilientStep: ...
@overload
def resilient_step(*models: Any, **options: Any) -> Callable[[Callable[..., Any]], ResilientStep]: ...
def resilient_step(*models: Any, **options: Any) -> Any:
    """Make a function that trains for one step go on when a rank is lost: all others do the step again without it.

    `model`, `optimizer`: one or several; DistributedDataParallel on a guarded group divides by those
    that take part. `loader`: an `ElasticLoader`; the function then gets the batch as its first argument, in each try
    anew. `keep`: what else is restored, by its `state_dict`, one or several: scheduler, scaler.
    `on_change(before, now)`: called with the numbers of ranks on each survivor before the step is done again:
    the place for a rule for learning rate or batch size. `copies`: of sharded models (FSDP2) and
    ZeroRedundancyOptimizer, how many other ranks have each rank's part: its replicas (HSDP), or else neighbours, which
    keep a copy in host memory; and `load()`: loads the newest checkpoint on all ranks alike, where a shard is lost with
    its copies; one of the two is needed where something is sharded and has no replica. `check_every`: compare the
    replicas once in so many steps, a part of them in each (0: never); `on_difference`, `ignore`: as of
    `check_replicas`. `on_lost`: "continue", or "fail": raise as without this. `min_ranks`: the job ends when fewer are
    left (1). `accumulates`: gradients that are there when a step begins are copied, and brought back; by default they
    are cleared, as the function does itself. `group` (default: all ranks), `timeout` (seconds or timedelta, of the
    survivors' meeting).

    Restored are gradients, buffers, modes, random numbers, the optimizer's hyperparameters, and what is in `keep`. Once
    the optimizer's step has begun the step stands: collectives behind it go on without lost ranks. With `copies` or
    `load` it stands when all copies are there, and until then parameters and the optimizer's state are restored too.

    Raises GuardConfigError for options that cannot be, or a group of another backend. A call raises what the function
    raises, unless a rank was lost; PeerLost when fewer than `min_ranks` are left or the survivors cannot agree.

    >>> import torch, ncclguard as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> @ng.resilient_step(model, optimizer)
    ... def train(inputs):
    ...     optimizer.zero_grad()
    ...     loss = model(inputs).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss.item() >= 0
    >>> train(torch.ones(3, 2))
    True
    """
    if len(models) == 1 and not options and callable(models[0]) and not isinstance(models[0], (nn.Module, type)):
        return ResilientStep(models[0])
    for given in filter(is_time, models):
        raise TypeError(
            told(
                "resilient_step takes models and optimizers, not {given}: a limit is given by its name, "
                "timeout={given}",
                given=repr(given),
            )
        )
    check_options(options)
    for given in models:
        if isinstance(given, type):
            text = told(
                "resilient_step takes models and optimizers, not the class {name}: give what it makes, {name}(...)",
                name=given.__name__,
            )
            raise TypeError(text)

    def wrap(function: Callable[..., Any]) -> ResilientStep:
        return ResilientStep(function, *models, **options)

    return wrap


def check_options(options: Iterable[str], without: Collection[str] = ()) -> None:
    """Raise TypeError for an option that `resilient_step` does not have, or that is not for the caller."""
    known = [name for name, one in inspect.signature(ResilientStep).parameters.items() if one.kind is one.KEYWORD_ONLY]
    known = [name for name in known if name not in without]
    for name in options:
        if name not in known:
            raise no_argument("resilient_step", name, known)
