"""`resilient_step`: a training step that is done again by the others when a rank is lost in it.

Every failed collective has one verdict on all ranks, so all survivors leave the step at the same place. They meet in a
sequence of their own, restore what the step had changed, and go on in a new sequence of collectives that has no lost
ranks. From the moment the optimizer's step begins nothing can be done again: a collective behind it goes on without
ranks that are lost, in place, and the step stands on all ranks that go on.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncclguard import torch_compat
from ncclguard.cause import Cause
from ncclguard.config import seconds
from ncclguard.engine import dispatch
from ncclguard.engine.call import terms_of
from ncclguard.engine.chunking import EMPTY
from ncclguard.engine.dispatch import Queue
from ncclguard.engine.table import BARRIER, Arguments
from ncclguard.errors import GuardConfigError, GuardError
from ncclguard.evaluation import state
from ncclguard.evaluation.runner import failed_collective, is_gone
from ncclguard.incident.model import ranks_text
from ncclguard.outcome import Outcome
from ncclguard.process_group.group import GuardedProcessGroup
from ncclguard.training import declaration
from ncclguard.training.loader import ElasticLoader

log = logging.getLogger("ncclguard")

#: How often survivors try to meet while ranks that are still in another place end.
MEETINGS = 8
#: Told how many ranks took part before, and how many do now, on each survivor before the step is done again.
OnChange = Callable[[int, int], object]


class Continuation:
    """What the resilient steps of one process group share: who takes part, and how it came to that."""

    def __init__(self, group: GuardedProcessGroup, min_ranks: int, timeout: float | None) -> None:
        self.group = group
        self.rank = dist.get_rank()
        self.ranks = torch_compat.group_ranks(group)
        self.all_ranks = self.ranks
        self.calls = 0  # of resilient steps, in their order, the same on all ranks
        self.meetings = 0
        self.failures: list[Outcome] = []
        self._min_ranks = min_ranks
        self._timeout = timeout
        self._wrappers: list[DistributedDataParallel] = []
        group.enter_scope(None, self.failures.append)
        self._meet("begin to train")  # its connections are made while all are there
        declaration.going_on(self.rank, ())

    def adopt(self, models: Iterable[nn.Module]) -> None:
        """These models' gradients are reduced on the group, whoever takes part."""
        for model in models:
            if not isinstance(model, DistributedDataParallel) or any(model is known for known in self._wrappers):
                continue
            if getattr(model.process_group, "whole", model.process_group) is not self.group:
                raise GuardConfigError(
                    "a DistributedDataParallel of another process group cannot go on without a rank: make it on the "
                    'group of resilient_step, which init_process_group("ncclguard") gives'
                )
            obstacle = torch_compat.ddp_stays(model)
            if obstacle:
                raise GuardConfigError(f"a DistributedDataParallel cannot go on without a rank: {obstacle}")
            self._wrappers.append(model)

    @property
    def absorbed(self) -> bool:
        """Whether a collective has gone on without a rank that still counts here."""
        return len(self.group.participants) not in (0, len(self.ranks))

    def go_on(self, because: BaseException | None, what: str) -> tuple[int, int]:
        """Meet the other survivors and make them the ones that take part; returns how many there were, and are.

        Raises `because`, or what kept the survivors from meeting, where the job cannot go on.
        """
        before = self.ranks
        self.group.on_lost = "fail"
        self.group.finish()  # what was issued has to take its place in the sequence, as it does on the others
        after = self._meet(what)
        lost = tuple(rank for rank in before if rank not in after)
        if len(after) < self._min_ranks:
            error = because if because is not None else GuardError(f"{ranks_text(lost)} gone")
            log.error("ncclguard: %s gone, and %d ranks are fewer than min_ranks", ranks_text(lost), len(after))
            raise error
        if not lost:  # the verdict said that somebody is gone, but nobody is
            raise because if because is not None else GuardError("no rank is gone")
        self.ranks = after
        self.meetings += 1
        smaller = self.group.go_on(after, self.meetings)
        for wrapper in self._wrappers:
            torch_compat.move_ddp(wrapper, smaller)
        self.failures.clear()
        gone = tuple(rank for rank in self.all_ranks if rank not in after)
        declaration.going_on(self.rank, gone)
        return len(before), len(after)

    def _meet(self, what: str) -> tuple[int, ...]:
        """Wait for all that are still there; returns who they are, global ranks in order."""
        name = f"{what}, at least {self._min_ranks} ranks"
        for _ in range(MEETINGS):
            terms = terms_of(self.group, self._timeout, 0, atomic=True, on_lost="shrink", name=name)
            if terms.solo:
                return terms.ranks
            outcome = dispatch.run(BARRIER, Arguments(), terms, EMPTY, queue=Queue("continue"))
            if outcome.ok:
                return outcome.participants
            others = outcome.cause is Cause.DIVERGED and outcome.culprits and self.rank not in outcome.culprits
            if not others or not outcome.agreed:
                break  # else those that are elsewhere end with this verdict, and the rest meets without them
        outcome.raise_if_failed()
        raise AssertionError("unreachable")


_continuations: dict[int, Continuation] = {}  # by id of the group, which they hold


class ResilientStep:
    """What `resilient_step` makes of a function.

    Attributes: `ranks`, global ranks that take part now, in order; `made_by`, those that made the last completed step,
    of which some may have been lost behind the optimizer's step; `losses`, for each time that ranks were lost, which
    ones and the seconds from the beginning of the step to the beginning of the try without them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        model: nn.Module | Sequence[nn.Module] = (),
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        loader: ElasticLoader | None = None,
        keep: Sequence[Any] = (),
        on_change: OnChange | None = None,
        on_lost: Literal["continue", "fail"] = "continue",
        min_ranks: int = 1,
        accumulates: bool = False,
        group: dist.ProcessGroup | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        if on_lost not in ("continue", "fail"):
            raise GuardConfigError(f'on_lost is {on_lost!r}: it must be "continue" or "fail"')
        if min_ranks < 1:
            raise GuardConfigError(f"min_ranks is {min_ranks}: it must be at least 1")
        functools.update_wrapper(self, function)
        self._function = function
        self._models = (model,) if isinstance(model, nn.Module) else tuple(model)
        self._optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
        self._loader = loader
        self._kept = tuple(keep)
        self._on_change = on_change
        self._continues = on_lost == "continue"
        self._min_ranks = min_ranks
        self._accumulates = accumulates
        self._group = group
        self._timeout = seconds(timeout, "timeout")
        self._continuation: Continuation | None = None
        self._inside = self._stepped = False
        self.made_by: tuple[int, ...] = ()
        self.losses: list[tuple[tuple[int, ...], float]] = []
        for one in self._optimizers:
            one.register_step_pre_hook(self._before_optimizer)

    @property
    def ranks(self) -> tuple[int, ...]:
        return (0,) if self._continuation is None else self._continuation.ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; with a loader, the function gets the next batch as its first argument, in each try anew."""
        going = self._continuation
        if going is None or going.group not in torch_compat.known_groups():
            going = self._continuation = self._begin()
        if self._inside:  # called by itself, or from another resilient step that survives or fails as a whole
            raise GuardError("a resilient step cannot contain itself: call the function that it was made of")
        self._inside = True
        try:
            return self._run(going, args, kwargs)
        finally:
            self._inside = False

    def _run(self, going: Continuation | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        started = time.monotonic()
        if going is not None:
            going.calls += 1
            going.failures.clear()
        restore = state.keep(self._keepers())
        while True:
            self._stepped, taking_part = False, self.ranks
            try:
                batch = (
                    () if self._loader is None else (self._loader.take(self.ranks, 0 if going is None else going.rank),)
                )
                result = self._function(*batch, *args, **kwargs)
            except Exception as error:
                if going is None or not self._goes_on_after(error, going):
                    raise
                self._without_lost(going, error, started)
                restore()
                continue
            finally:
                if going is not None:
                    going.group.on_lost = "fail"
            if going is not None and going.absorbed:
                self._without_lost(going, None, started)
            if self._loader is not None:
                self._loader.done()
            self.made_by = taking_part
            return result

    def _begin(self) -> Continuation | None:
        """The others are met for the first time; None where this process is alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if self._group is None else self._group
        if not self._continues or dist.get_world_size(group) == 1:
            return None
        if not isinstance(group, GuardedProcessGroup):
            raise GuardConfigError(
                'resilient_step goes on without a rank on groups of the backend "ncclguard": '
                'call init_process_group("ncclguard")'
            )
        going = _continuations.get(id(group))
        if going is None or going.group is not group:
            going = _continuations[id(group)] = Continuation(group, self._min_ranks, self._timeout)
        going.adopt(self._models)
        return going

    def _goes_on_after(self, error: Exception, going: Continuation) -> bool:
        outcome = failed_collective(error, going.failures)
        if outcome is None or not outcome.agreed or not is_gone(outcome) or going.rank in outcome.culprits:
            return False
        if self._stepped:
            log.error(
                "ncclguard: %s is gone, and the optimizer had begun its step, which cannot be done again: have what "
                "needs all ranks done before it",
                ranks_text(outcome.culprits),
            )
            return False
        return True

    def _without_lost(self, going: Continuation, error: BaseException | None, started: float) -> None:
        before, known = going.ranks, going.calls
        counts = going.go_on(error, f"{'after' if error is None else 'again'} step {known}")
        lost = tuple(rank for rank in before if rank not in going.ranks)
        taken = time.monotonic() - started
        self.losses.append((lost, taken))
        if going.rank == going.ranks[0]:
            log.warning("ncclguard: went on without %s after %.1f s", ranks_text(lost), taken)
        if self._on_change is not None:
            self._on_change(*counts)

    def _before_optimizer(self, *_: Any) -> None:
        """From here on nothing is done again: what follows goes on without ranks that are lost, in place."""
        self._stepped = True
        if self._inside and self._continuation is not None:
            self._continuation.group.on_lost = "shrink"

    # ------------------------------------------------------------------ what a try may change

    def _keepers(self) -> list[state.Keeper]:
        gradients = state.gradient_values if self._accumulates else state.no_gradients
        return [
            state.random_numbers,
            state.buffers(self._models),
            state.modes(self._models),
            gradients(self._models),
            state.hyperparameters(self._optimizers),
            state.states_of(self._kept),
        ]


@overload
def resilient_step(model: Callable[..., Any], /) -> ResilientStep: ...
@overload
def resilient_step(*models: Any, **options: Any) -> Callable[[Callable[..., Any]], ResilientStep]: ...
def resilient_step(*models: Any, **options: Any) -> Any:
    """Make a function that trains for one step go on when a rank is lost: all others do the step again without it.

    `model`, `optimizer`: one or several; DistributedDataParallel on a group of the backend "ncclguard" divides by those
    that take part. `loader`: an `ElasticLoader`; the function then gets the batch as its first argument, in each try
    anew. `keep`: what else is restored, by its `state_dict`: scheduler, scaler. `on_change(before, now)`: called with
    the numbers of ranks on each survivor before the step is done again: the place for a rule for learning rate or batch
    size. `on_lost`: "continue", or "fail": raise as without this. `min_ranks`: the job ends when fewer are left (1).
    `accumulates`: gradients that are there when a step begins are copied, and brought back; by default they are
    cleared, as the function does itself. `group` (default: all ranks), `timeout` (seconds or timedelta, of the
    survivors' meeting).

    Restored are gradients, buffers, modes, random numbers, the optimizer's hyperparameters, and what is in `keep`. Once
    the optimizer's step has begun the step stands: collectives behind it go on without lost ranks.

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
    if len(models) == 1 and not options and callable(models[0]) and not isinstance(models[0], nn.Module):
        return ResilientStep(models[0])

    def wrap(function: Callable[..., Any]) -> ResilientStep:
        return ResilientStep(function, *models, **options)

    return wrap
