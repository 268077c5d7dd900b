"""Evaluation that survives for programs around an `Accelerator`, whose gathers and barriers then end as well.

And training that goes on when a rank is lost, with the process counts of Accelerate. This module works on Accelerate's
objects without importing the package. Run with Accelerate 1.15 on CPU (gloo, and "ncclguard").
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from ncclguard.collectives import safe_barrier
from ncclguard.config import seconds
from ncclguard.environment.network import launched_ranks
from ncclguard.errors import GuardConfigError
from ncclguard.evaluation import GuardedEvaluation, resilient_evaluate as _resilient_evaluate
from ncclguard.evaluation.runner import register_keepers
from ncclguard.evaluation.state import Keeper, Restore
from ncclguard.process_group import redirected
from ncclguard.process_group.redirection import is_redirecting
from ncclguard.spelling import hinted, refuse_other
from ncclguard.training import ResilientStep
from ncclguard.training.step import check_options
from ncclguard_explain.language import say, told, tr

log = logging.getLogger("ncclguard")

_PATCHED = ("gather_for_metrics", "wait_for_everyone")


@hinted
def patch_accelerator(
    accelerator: Any, *, timeout: float | timedelta = 1800, barrier_timeout: float | timedelta = 300
) -> None:
    """Make `gather_for_metrics` and `wait_for_everyone` of an accelerator end within limits, wherever they are called.

    `timeout` is for each collective of a gather, `barrier_timeout` until all ranks have arrived; seconds or timedelta.
    In a resilient evaluation a gather has the evaluation's limit. When the two fail they raise CollectiveTimeout,
    PeerFailed or another CollectiveFailed on all ranks, which names the rank at fault; the process groups of training
    are untouched, so the program may go on. Patching again replaces the limits. Raises TypeError or ValueError for
    limits that cannot be.

    >>> class Alone:  # as an Accelerator in a single process
    ...     def gather_for_metrics(self, data, use_gather_object=False):
    ...         return data
    ...     def wait_for_everyone(self):
    ...         pass
    >>> accelerator = Alone()
    >>> patch_accelerator(accelerator, timeout=600)
    >>> accelerator.wait_for_everyone()
    >>> accelerator.gather_for_metrics([1, 2])
    [1, 2]
    """
    _check(accelerator, "patch_accelerator(accelerator)", *_PATCHED)
    gathering = seconds(timeout, "timeout")
    waiting = seconds(barrier_timeout, "barrier_timeout")
    unpatch_accelerator(accelerator)
    accelerator.gather_for_metrics = _gathering(accelerator.gather_for_metrics, gathering)
    accelerator.wait_for_everyone = _waiting(accelerator.wait_for_everyone, waiting)


def unpatch_accelerator(accelerator: Any) -> None:
    """Give an accelerator its own methods back; one that was not patched stays as it is."""
    for name in _PATCHED:
        if hasattr(vars(accelerator).get(name), "__ncclguard__"):
            delattr(accelerator, name)


def resilient_evaluate(accelerator: Any, **options: Any) -> Callable[[Callable[..., Any]], GuardedEvaluation]:
    """The decorator `ncclguard.resilient_evaluate` with `accelerator.log` as the place for metrics; the same options.

    Every collective inside is guarded: `gather_for_metrics`, `wait_for_everyone`, `reduce`, those of the dataloaders.
    When an evaluation ends in the middle, Accelerate is made to forget that its dataloader was being iterated.

    >>> class Alone:
    ...     def log(self, values, step=None):
    ...         print(values["eval/evaluation_failed"], step)
    >>> @resilient_evaluate(Alone(), max_attempts=1, fallback=None)
    ... def evaluate(model, step=None):
    ...     raise ValueError("a metric went wrong")
    >>> evaluate(None, step=7)
    1.0 7
    """
    _check(accelerator, "@resilient_evaluate(accelerator)", "log")
    return _resilient_evaluate(**{"monitor": accelerator, **options})


def _check(accelerator: Any, call: str, *needed: str) -> None:
    """Refuse what is no accelerator; warn of one that takes each of several started ranks for its own program."""
    refuse_other(accelerator, "Accelerator", call, *needed)
    started = launched_ranks(os.environ)
    alone = not dist.is_initialized() or dist.get_world_size() == 1  # others may have been lost since
    if alone and getattr(accelerator, "num_processes", None) == 1 and started is not None and started[1] > 1:
        text = told(
            "ncclguard: a launcher started {count} ranks, and this Accelerator knows of one, so that each rank "
            "evaluates and trains by itself: set ACCELERATE_USE_CPU=true on a host without GPUs, or see "
            "`accelerate env`",
            count=started[1],
        )
        log.warning("%s", text)


def _gathering(original: Callable[..., Any], timeout: float | None) -> Callable[..., Any]:
    @functools.wraps(original)
    def gather_for_metrics(*args: Any, **kwargs: Any) -> Any:
        if is_redirecting():  # in a resilient evaluation, which has limits of its own
            return original(*args, **kwargs)
        with redirected(timeout=timeout):
            return original(*args, **kwargs)

    gather_for_metrics.__ncclguard__ = True  # type: ignore[attr-defined]
    return gather_for_metrics


def _waiting(original: Callable[..., Any], timeout: float | None) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait_for_everyone() -> None:
        safe_barrier(timeout=timeout, name="wait_for_everyone").raise_if_failed()

    wait_for_everyone.__ncclguard__ = True  # type: ignore[attr-defined]
    return wait_for_everyone


# ---------------------------------------------------------------------- training that goes on without lost ranks


def resilient_step(accelerator: Any, *models: Any, **options: Any) -> Callable[[Callable[..., Any]], ResilientStep]:
    """The decorator `ncclguard.resilient_step` for what `accelerator.prepare` has made; the same options.

    The accelerator counts the ranks that take part: `num_processes`, `process_index` and with it the main process,
    `gather`, `reduce`, prepared schedulers, and prepared dataloaders from their next iteration on. `loader`, an
    `ElasticLoader` that is not prepared, puts its batches on the accelerator's device. With gradient accumulation the
    function has all micro-batches of an optimizer's step in it. `init_process_group("ncclguard")` comes before
    `Accelerator()`, which takes the group that is there.

    Raises GuardConfigError, before a rank waits for another, for what cannot go on: DeepSpeed, FSDP and other kinds of
    sharding by Accelerate, and a step inside an iteration over a prepared dataloader.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> state = SimpleNamespace(in_dataloader=False)
    >>> alone = SimpleNamespace(distributed_type="NO", step=0, scaler=None, sync_gradients=True, gradient_state=state)
    >>> model = torch.nn.Linear(2, 1)
    >>> @resilient_step(alone, model)
    ... def train(inputs):
    ...     model(inputs).sum().backward()
    >>> train(torch.ones(3, 2))
    >>> train.completed
    1
    """
    _check(accelerator, "@resilient_step(accelerator, model, optimizer)", "distributed_type")
    refuse_sharded(accelerator)
    check_options(options)
    if options.get("accumulates"):
        raise GuardConfigError(say(_BETWEEN))
    kept = options.get("keep", ())
    kept = [kept] if hasattr(kept, "state_dict") else [*kept]
    scaler = [] if accelerator.scaler is None else [accelerator.scaler]
    options["keep"] = [*kept, *scaler, _MicroBatch(accelerator)]
    return lambda function: _Step(accelerator, function, *map(_inside, models), **options)


def refuse_sharded(accelerator: Any) -> None:
    """Raise GuardConfigError for an accelerator that does anything but DDP, such as shards of the model."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU") or getattr(accelerator, "torch_device_mesh", None) is not None:
        raise GuardConfigError(
            told(
                "Accelerate has made this {kind}, or on a device mesh, and of what it has made only DDP goes on "
                "without a rank: use that, or fully_shard and ncclguard.resilient_step(copies=1) without "
                "Accelerate's plugin",
                kind=kind,
            )
        )


_BETWEEN = tr(
    "a step ended between two micro-batches of an optimizer's step, of which a lost rank's part cannot be had: have all "
    "of them in the function, `for part in parts: with accelerator.accumulate(model): ...`"
)


def _inside(given: Any) -> Any:
    """Return the optimizers inside prepared ones, which have no hooks of their own."""
    if isinstance(given, (list, tuple)):
        return [*map(_inside, given)]
    return given.optimizer if type(given).__name__ == "AcceleratedOptimizer" else given


class _MicroBatch:
    """The number of the micro-batch an accelerator is at: restored for another try, and given to a new rank."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]


class _Step(ResilientStep):
    """A resilient step whose accelerator counts the ranks that take part in each try, and behind it."""

    def __init__(self, accelerator: Any, function: Callable[..., Any], *models: Any, **options: Any) -> None:
        self._accelerator = accelerator

        @functools.wraps(function)
        def attempt(*args: Any, **kwargs: Any) -> Any:
            take_part(accelerator, self)
            if self._loader is not None:
                from accelerate.utils import send_to_device

                args = (send_to_device(args[0], accelerator.device), *args[1:])
            result = function(*args, **kwargs)
            if self.trains and not accelerator.sync_gradients:
                raise GuardConfigError(say(_BETWEEN))
            return result

        super().__init__(attempt, *models, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.trains and self._loader is None and self._accelerator.gradient_state.in_dataloader:
            raise GuardConfigError(
                told(
                    "a step inside an iteration over a prepared dataloader, or behind one that was left by "
                    "`break`: it deals the samples of a lost rank to nobody. Give resilient_step a "
                    "loader=ncclguard.ElasticLoader(dataset, batch_size), which is not prepared"
                )
            )
        return super().__call__(*args, **kwargs)

    def count_ranks(self) -> None:
        take_part(self._accelerator, self)


def take_part(accelerator: Any, step: ResilientStep) -> None:
    """Have an accelerator count the ranks that take part in a step: their number, and the place of this one."""
    if step.group is None:
        return
    from accelerate import PartialState

    count, place = len(step.ranks), step.ranks.index(dist.get_rank())
    if (accelerator.num_processes, accelerator.process_index) == (count, place):
        return
    for state in (PartialState(), accelerator.state):
        state.num_processes, state.process_index = count, place
    for loader in accelerator._dataloaders:
        for part in (loader.batch_sampler, loader.dataset):
            if type(part).__name__ in ("BatchSamplerShard", "IterableDatasetShard"):
                part.num_processes, part.process_index = count, place


# ---------------------------------------------------------------------- what Accelerate remembers


def keepers_of(models: Iterable[nn.Module]) -> Iterator[Keeper]:
    """Yield the keeper of Accelerate's gradient state, which is one for the process, whatever the models."""
    yield _gradient_state


def _gradient_state() -> Restore:
    """Remember Accelerate's `GradientState`, which has the active dataloaders and whether gradients are synchronised.

    An iteration that an exception ended stays the active one, and training would synchronise gradients by its end.
    """
    kind = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    shared = getattr(kind, "_shared_state", None)
    if not shared:
        return lambda: None
    before = {name: list(value) if isinstance(value, list) else value for name, value in dict(shared).items()}

    def restore() -> None:
        for name, value in before.items():
            shared[name] = list(value) if isinstance(value, list) else value

    return restore


register_keepers(keepers_of)
