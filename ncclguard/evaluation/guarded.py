"""`resilient_evaluate`: the decorator, what it makes of a function, and the names by which ranks know an evaluation."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ncclguard import process_group
from ncclguard.evaluation import runner, state
from ncclguard.evaluation.decision import Action, EvaluationReport, Terms, log_to, metrics_of
from ncclguard.evaluation.runner import Ended, Evaluation, Job, Options, stopped

log = logging.getLogger("ncclguard")

#: What keeps more of the state of some models, such as a DeepSpeed engine's.
KeepersOf = Callable[[Iterable[nn.Module]], Iterable[state.Keeper]]
_keepers_of: list[KeepersOf] = []


def register_keepers(keepers_of: KeepersOf) -> None:
    """Have what `keepers_of(models)` gives kept in every guarded evaluation from now on."""
    if keepers_of not in _keepers_of:
        _keepers_of.append(keepers_of)


def _framework_keepers(models: Sequence[nn.Module]) -> list[state.Keeper]:
    """What the frameworks that the program has loaded need kept; none of them is required."""
    for name in ("accelerate", "deepspeed"):
        if name in sys.modules:
            importlib.import_module(f"ncclguard.integrations.{name}")
    return [keeper for keepers_of in _keepers_of for keeper in keepers_of(models)]


class GuardedEvaluation:
    """What `resilient_evaluate` makes of a function that evaluates, or of a method as `evaluate(self, step=None)`.

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
        self._labels = Labels(f"evaluation {getattr(function, '__name__', 'evaluate')}()")
        start_counting()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function, options = self._function, self._options
        if runner.recording():  # a part of another evaluation, which survives or fails as a whole
            return function(*args, **kwargs)
        owner = self._owner if self._owner is not None or not args else args[0]
        step = step_of(function, owner, args, kwargs)
        holders = [owner, *args, *kwargs.values(), *state.named_in(function)]
        models = state.models_of([*holders, *options.models])
        loaders = state.loaders_of([*holders, *options.loaders])
        sink = options.monitor if options.monitor is not None else getattr(owner, "monitor", None)
        default = runner.default_batch_size(function) if "batch_size" not in kwargs else kwargs["batch_size"]

        def run(divisor: int) -> Any:
            smaller = {} if default is None or divisor == 1 else {"batch_size": runner.smaller(default, divisor)}
            return function(*args, **{**kwargs, **smaller})

        job = Job(
            label=self._labels.next(step),
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
        )
        ended = Evaluation(job).run()
        self.report = ended.report
        self._tell(ended, sink, step)
        if ended.report.action is Action.STOP:
            self._stop(ended)
        return ended.result

    def _tell(self, ended: Ended, sink: Any, step: int | None) -> None:
        """One rank logs the metrics; all log that the evaluation failed, one of them the whole story."""
        report = ended.report
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if report.action is Action.SKIP:
            log.warning("%s", report)
        if not report.failed:
            return
        if rank in (ended.logging_rank, *report.culprits):
            log.error("%s", report)
        else:
            log.error("%s", str(report).splitlines()[0])
        if rank == ended.logging_rank:
            log_to(sink, metrics_of(report, self._options.metric_prefix), step)

    def _stop(self, ended: Ended) -> None:
        if self._options.save is not None:
            log.error("ncclguard: a rank is gone: saving a checkpoint on the survivors before the job ends")
            try:
                with process_group.redirected(
                    timeout=self._options.timeout
                ):  # those that need the rank that is gone end at once
                    self._options.save()
            except Exception:
                log.exception("ncclguard: the checkpoint could not be saved; the job ends with the report")
        raise stopped(ended)


@overload
def resilient_evaluate(function: Callable[..., Any], /, **options: Any) -> GuardedEvaluation: ...
@overload
def resilient_evaluate(**options: Any) -> Callable[[Callable[..., Any]], GuardedEvaluation]: ...
def resilient_evaluate(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function that evaluates on all ranks, such as `evaluate(self, step=None)`, end with one result for all.

    `timeout`, `barrier_timeout`: seconds or timedelta, for each collective inside, and for all ranks to arrive (1800,
    300). `max_attempts`: tries, each with half the batch size of the one before (3); an exception that each try would
    raise, such as a KeyError in a metric, is the last one at once. `batch_size`: where it is, a
    dotted attribute of the owner (a number or a DataLoader), or a callable that gets the divisor; a `batch_size`
    parameter is found by itself. `fallback`: returned when all tries failed ((0.0, 0.0)). `monitor`: where metrics go,
    else `self.monitor`; `metric_prefix` ("eval/"). `accept_partial`, `combine(parts)`: see `record_partial`.
    `same_result`: all ranks return what the first one found. `on_lost`: "fail" raises when a process is gone;
    "checkpoint" calls `save()` on the survivors before. `group`: who evaluates together (default: all). `models`,
    `loaders`, `keepers`: whose state is kept, besides what the owner and the arguments hold and the function itself
    names.

    Raises GuardConfigError, TypeError or ValueError for options that cannot be. A call raises PeerLost, or another
    CollectiveFailed, when the job cannot go on, and otherwise nothing of what happened inside.

    >>> import ncclguard as ng
    >>> @ng.resilient_evaluate(fallback=(0.0, 0.0), max_attempts=2)
    ... def evaluate(step=None):
    ...     raise ValueError("a metric went wrong")
    >>> evaluate(step=7)
    (0.0, 0.0)
    """
    checked = Options(**options)

    def wrap(wrapped: Callable[..., Any]) -> GuardedEvaluation:
        return GuardedEvaluation(wrapped, checked)

    return wrap if function is None else wrap(function)


# ---------------------------------------------------------------------- which evaluation this is

_lock = threading.Lock()
_updates = 0
_counting = False


def start_counting() -> None:
    """Count the steps of all optimizers of this process from now on; once."""
    global _counting
    with _lock:
        if not _counting:
            _counting = True
            register_optimizer_step_post_hook(_count)


def _count(*_: Any) -> None:
    global _updates
    _updates += 1


def step_of(evaluate: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The argument `step` or `global_step` of a call, else what the owner or its `state` has under `global_step`."""
    try:
        given = inspect.signature(evaluate).bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself will say what is wrong with it
        return None
    state = getattr(owner, "state", None)
    candidates = (
        given.get("step"),
        given.get("global_step"),
        *(getattr(o, "global_step", None) for o in (owner, state)),
    )
    return next((step for step in candidates if isinstance(step, int) and not isinstance(step, bool)), None)


class Labels:
    """Names of evaluations that are the same on all ranks, also after a rank has skipped some evaluations.

    Where no step is given, the count of optimizer steps says how far training is.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: tuple[int | None, int] = (None, -1)
        self._repeated = 0

    def next(self, step: int | None) -> str:
        """The name of the evaluation that begins now."""
        place = (step, _updates if step is None else 0)
        self._repeated = self._repeated + 1 if place == self._last else 0
        self._last = place
        at = f"at step {step}" if step is not None else f"after {_updates} optimizer steps"
        again = f", number {self._repeated + 1} there" if self._repeated else ""
        return f"{self._name} {at}{again}"
