"""`resilient_step`: a training step that is done again by the others when a rank is lost in it.

Every failed collective has one verdict on all ranks, so all survivors leave the step at the same place. They meet in a
sequence of their own, restore what the step had changed, and go on in a new sequence of collectives that has no lost
ranks. A new process may take a lost rank's place between two steps, see `joining`. From the moment the optimizer's step
begins nothing can be done again: a collective behind it goes on without ranks that are lost, in place, and the step
stands on all ranks that go on.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncclguard import lifecycle, torch_compat
from ncclguard.cause import Cause
from ncclguard.config import seconds
from ncclguard.coordination.monitor import Session
from ncclguard.engine import dispatch, runtime
from ncclguard.engine.call import terms_of
from ncclguard.engine.chunking import EMPTY
from ncclguard.engine.dispatch import Queue
from ncclguard.engine.table import BARRIER, Arguments
from ncclguard.errors import CollectiveFailed, GuardConfigError, GuardError
from ncclguard.evaluation import state
from ncclguard.evaluation.runner import failed_collective, is_gone
from ncclguard.incident.model import MembershipChange, ranks_text
from ncclguard.outcome import Outcome
from ncclguard.process_group.group import GuardedProcessGroup
from ncclguard.training import declaration, joining
from ncclguard.training.loader import ElasticLoader

if TYPE_CHECKING:
    from ncclguard.training.shards import Shards

log = logging.getLogger("ncclguard")

#: How often survivors try to meet while ranks that are still in another place end.
MEETINGS = 8
#: Seconds in which each survivor has to be known in a newcomer's session, and in which all have to meet there.
KNOWN_WITHIN, WELCOME_WITHIN = 10.0, 60.0
#: Seconds that a new rank waits to be taken in, unless `timeout` says it.
JOIN_WITHIN = 600.0
#: Told how many ranks took part before, and how many do now, on each survivor before the step is done again.
OnChange = Callable[[int, int], object]


class Continuation:
    """What the resilient steps of one process group share: who takes part, and how it came to that."""

    def __init__(
        self, group: GuardedProcessGroup, min_ranks: int, timeout: float | None, joins_at: ResilientStep | None = None
    ) -> None:
        self.group = group
        self.rank = dist.get_rank()
        self.ranks = torch_compat.group_ranks(group)
        self.all_ranks = self.ranks
        self.lost: list[int] = []  # each rank as often as it was
        self._members = self.ranks  # of the session: those that are gone, too
        self.calls = 0  # of resilient steps, in their order, the same on all ranks
        self.meetings = 0
        self.failures: list[Outcome] = []
        self._min_ranks = min_ranks
        self._timeout = timeout
        self.taking_part = group  # has as many ranks as take part
        self._wrappers: list[DistributedDataParallel] = []
        self._shards: list[Shards] = []
        self._vote = joining.Vote()
        self._waiting = joining.Waiting()
        group.enter_scope(None, self.failures.append)
        if joins_at is None:
            self._meet("begin to train")  # its connections are made while all are there
        else:
            self._join(joins_at)
        declaration.going_on(self.rank, self.lost, ranks=self.ranks)

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
            if self.taking_part is not self.group:
                torch_compat.move_ddp(model, self.taking_part)

    def protect(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        copies: int,
        load: Callable[[], object] | None,
    ) -> Shards | None:
        """Where these are sharded: what goes on with the shards of ranks that are lost."""
        if "torch.distributed.tensor" not in sys.modules:  # then nothing is sharded; its import takes a second
            if copies or load is not None:
                raise GuardConfigError("copies and load are for sharded models (fully_shard): leave them out")
            return None
        from ncclguard.training import shards

        if not shards.wanted(models, copies, load):
            return None
        kept = shards.Shards(self.group, models, optimizers, copies, load)
        self._shards.append(kept)
        return kept

    def settle(self) -> None:
        """Before a try: the shards of sharded models lie on those that take part."""
        for shards in self._shards:
            shards.settle(self.ranks, self.taking_part)

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
        self._move(after)
        for wrapper in self._wrappers:
            torch_compat.move_ddp(wrapper, self.taking_part)
        self._now_without(lost)
        return len(before), len(after)

    def gives_up(self, outcome: Outcome) -> bool:
        """Have the launchers end processes that are there and do not run; False where they cannot be asked.

        What does not run now may run later, and would write what the others have gone on from: so it is gone first.
        """
        if not declaration.has_launcher() or len(self.ranks) - len(outcome.culprits) < self._min_ranks:
            return False
        log.warning("ncclguard: %s given up: its process does not run", ranks_text(outcome.culprits))
        declaration.going_on(self.rank, self.lost, outcome.culprits, ranks=self.ranks)
        return True  # the survivors' meeting waits for its end

    def _move(self, ranks: tuple[int, ...]) -> None:
        """Collectives are those of these ranks from now on, in a new sequence."""
        self.meetings += 1
        self.taking_part = self.group.go_on(ranks, self.meetings)
        self.failures.clear()
        self.ranks = ranks

    def _now_without(self, lost: Sequence[int]) -> None:
        self.lost += lost
        self._attend(runtime.current())
        self._vote.soon(self.calls)
        declaration.going_on(self.rank, self.lost, ranks=self.ranks)

    # ------------------------------------------------------------------ a new rank takes the place of a lost one

    def admit(self, step: ResilientStep) -> tuple[int, tuple[int, ...]] | None:
        """Before each try of a step that trains: take in a new rank that waits, if it is time to tell each other.

        Returns its rank and those that were lost meanwhile; None where nobody was taken in, nor lost. Raises as a
        collective does when a rank is lost before the others have gone over to the new rank's session.
        """
        if self.ranks == self.all_ranks or not step.trains or self.calls < self._vote.due:
            return None
        ballot = torch.zeros(joining.Vote.LENGTH, dtype=torch.uint8)
        if self.rank == self.ranks[0]:
            missing = set(self.all_ranks) - set(self.ranks)
            ballot = self._vote.ballot(self.calls, self._waiting.first(missing, step.name))
        started = time.monotonic()
        self._broadcast(ballot, self.ranks[0])
        found = self._vote.counted(self.calls, ballot, time.monotonic() - started)
        return None if found is None else self._go_over(*found)

    def _go_over(self, newcomer: int, session: str) -> tuple[int, tuple[int, ...]] | None:
        """All survivors: make themselves known in the newcomer's session, agree that all have, and meet there."""
        before = self.ranks
        absent = tuple(rank for rank in self.all_ranks if rank not in before and rank != newcomer)
        prepared = None
        try:
            prepared = runtime.prepare(Session(session, absent), KNOWN_WITHIN)
        except GuardError as error:
            log.warning("ncclguard: rank %d cannot be taken in now: %s", newcomer, error)
        known = torch.tensor([int(prepared is not None)])
        try:
            self.group.allreduce([known], dist.ReduceOp.MIN).wait()
        except BaseException:
            known.zero_()
            raise
        finally:
            self._waiting.used(session, bool(known))
            if prepared is not None and not int(known):
                prepared.leave(Cause.EXITED, f"does not take in rank {newcomer}", job=False)
        if prepared is None or not int(known):
            return None
        members = tuple(sorted((*before, newcomer)))
        invitation = joining.Invitation(members, self.meetings, self.calls)
        old = runtime.replace(prepared)
        self._attend(prepared, joining.invite(session, invitation))
        try:
            self._welcome(newcomer, members, self.calls)
        finally:
            why = f"goes on in another session, which the process of rank {newcomer} that was lost is not in"
            old.leave(Cause.EXITED, why, job=False)
        lost = tuple(rank for rank in before if rank not in self.ranks)
        self._now_without(lost)
        self._vote.soon(self.calls + 1)
        return newcomer, lost

    def _join(self, step: ResilientStep) -> None:
        """The newcomer's side."""
        end = time.monotonic() + (self._timeout or JOIN_WITHIN)
        current, invitation = runtime.current(), None
        if not current.monitor.session_ready.wait(KNOWN_WITHIN):
            raise GuardError(f"the store has not answered in {KNOWN_WITHIN:.0f} s")
        while True:
            monitor = current.monitor
            note = joining.Note(self.rank, monitor.nonce, step.name, current.identity.to_json())
            asking = joining.Asking(note)
            monitor.above_sessions = asking.look
            invitation = asking.invitation(end, monitor.wake, lambda monitor=monitor: monitor.unavailable)  # type: ignore[misc]
            if invitation is not None:
                break
            current = runtime.prepare(runtime.own_session(), KNOWN_WITHIN)
            runtime.replace(current).leave(Cause.EXITED, "begins another session, to join in that", job=False)
        self.meetings = invitation.meetings
        self._welcome(self.rank, invitation.members, invitation.calls)
        joining.seed_newcomer(step.completed)
        lifecycle.joined()
        self.calls = invitation.calls - 1  # which its first call makes it
        self._vote.soon(invitation.calls + 1)
        self._attend(current)

    def _attend(self, current: runtime.Runtime, more: joining.Look | None = None) -> None:
        """The first rank that goes on reads who waits."""
        looks = [more] if more is not None else []
        if self.rank == self.ranks[0] and self.ranks != self.all_ranks:
            looks.append(self._waiting.look)
        current.monitor.above_sessions = joining.all_of(looks)
        current.monitor.wake()

    def _welcome(self, newcomer: int, members: tuple[int, ...], calls: int) -> None:
        """All members, in the newcomer's session: meet, and give it the state of one; until nobody is lost in that."""
        self._members = members
        for _ in range(MEETINGS):
            try:
                present = self._meet(f"take in rank {newcomer} before step {calls}", WELCOME_WITHIN)
                survivors = [rank for rank in present if rank != newcomer]
                if len(survivors) < self._min_ranks or not survivors:
                    raise GuardError(f"{ranks_text(present)} are left, fewer than min_ranks")
                self._move(present)
                for shards in self._shards:
                    shards.begins_anew(newcomer)
                if newcomer in present:
                    self._hand_over(newcomer, survivors[0])
            except CollectiveFailed as error:
                self._leave_out(newcomer, error)
                continue
            except joining.NotGiven as error:
                if self.rank == newcomer:
                    raise
                log.error("ncclguard: rank %d does not join: %s", newcomer, error)
                self._members = tuple(survivors)
                continue
            for wrapper in self._wrappers:
                torch_compat.move_ddp(wrapper, self.taking_part)
            return
        raise GuardError(f"the ranks could not meet rank {newcomer} in {MEETINGS} tries")

    def _hand_over(self, newcomer: int, source: int) -> None:
        def broadcast(tensor: torch.Tensor) -> None:
            self._broadcast(tensor, source)

        if self.rank == source:
            joining.send(self._state, broadcast)
        elif self.rank == newcomer:
            state = joining.receive(broadcast)
            self.lost = list(state["lost"])
            own = joining.numbered(_living())
            for name, said in state["steps"].items():
                if name in own:
                    own[name].take_state(said)
                elif said["models"] or said["shards"]:
                    raise GuardError(f"the others train in {name}, which the new rank does not have: make it alike")
        else:
            joining.stand_by(broadcast)
        self.group.barrier().wait()

    def _state(self) -> dict[str, Any]:
        steps = {name: one.state_for_newcomer() for name, one in joining.numbered(_living()).items()}
        return {"steps": steps, "lost": self.lost}

    def _leave_out(self, newcomer: int, error: CollectiveFailed) -> None:
        """Have those that are gone left out of the next meeting, and a newcomer that is silent."""
        outcome = error.outcome
        self.group.finish()
        if not outcome.agreed or self.rank in outcome.culprits:
            raise error
        if is_gone(outcome):
            return
        if outcome.culprits != (newcomer,):
            raise error
        log.warning("ncclguard: rank %d is left out again: %s", newcomer, error)
        self._members = tuple(rank for rank in self._members if rank != newcomer)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self.group.broadcast([tensor], self.all_ranks.index(source)).wait()

    def _meet(self, what: str, within: float | None = None) -> tuple[int, ...]:
        """Wait for all that are still there; returns who they are, global ranks in order."""
        name = f"{what}, at least {self._min_ranks} ranks"
        for _ in range(MEETINGS):
            terms = terms_of(self.group, within or self._timeout, 0, atomic=True, on_lost="shrink", name=name)
            terms = terms._replace(ranks=self._members, solo=len(self._members) == 1)
            if terms.solo:
                return terms.ranks
            outcome = dispatch.run(BARRIER, Arguments(), terms, EMPTY, queue=Queue("continue", self._members))
            if outcome.ok:
                return outcome.participants
            others = outcome.cause is Cause.DIVERGED and outcome.culprits and self.rank not in outcome.culprits
            if not others or not outcome.agreed:
                break  # else those that are elsewhere end with this verdict, and the rest meets without them
        outcome.raise_if_failed()
        raise AssertionError("unreachable")


_steps: list[weakref.ref[ResilientStep]] = []  # in the order in which they were made, the same on all ranks


def _living() -> list[ResilientStep]:
    return [step for reference in _steps if (step := reference()) is not None]


_continuations: dict[int, Continuation] = {}  # by id of the group, which they hold
#: Those of sharded models that have not been called yet: the first call of any has the shards of all copied.
_uncalled: list[weakref.ref[ResilientStep]] = []


def refuse_foreign(*given: Any) -> None:
    """Raises GuardConfigError for what shards state in a way of its own: a rank that is lost takes a part with it."""
    for each in (one for some in given for one in (some if isinstance(some, (list, tuple)) else (some,))):
        kinds = type(each).__mro__
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in kinds):
            raise GuardConfigError(
                "ZeroRedundancyOptimizer has each parameter's state on one rank only, and that rank broadcasts it within "
                'the optimizer\'s step: use fully_shard with copies=1, a plain optimizer, or on_lost="fail"'
            )
        if any(kind.__module__.partition(".")[0] == "deepspeed" for kind in kinds):
            raise GuardConfigError(
                f"DeepSpeed's {kinds[0].__name__} keeps the number of ranks, its partitions and a process group of its "
                'own from when it was made: use fully_shard with copies=1, or on_lost="fail"'
            )


class ResilientStep:
    """What `resilient_step` makes of a function.

    Attributes: `ranks`, global ranks that take part now, in order; `made_by`, those that made the last completed step,
    of which some may have been lost behind the optimizer's step; `completed`, how many steps are done, which a new rank
    learns with its first one, and which may be set before that, from a checkpoint; `losses`, for each time that ranks
    were lost, which ones and the seconds from the beginning of the step to the beginning of the try without them;
    `joins`, for each rank that took a lost one's place, which one, after how many completed steps, and the seconds that
    the others waited for it.
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
        copies: int = 0,
        load: Callable[[], object] | None = None,
    ) -> None:
        if copies < 0:
            raise GuardConfigError(f"copies is {copies}: it must be at least 0")
        if accumulates and (copies or load is not None):
            raise GuardConfigError(
                "a lost rank's part of accumulated gradients cannot be had: have all backwards of an optimizer's step "
                "in the function, without accumulates"
            )
        if on_lost not in ("continue", "fail"):
            raise GuardConfigError(f'on_lost is {on_lost!r}: it must be "continue" or "fail"')
        if min_ranks < 1:
            raise GuardConfigError(f"min_ranks is {min_ranks}: it must be at least 1")
        if on_lost == "continue":
            refuse_foreign(model, optimizer)
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
        self._copies, self._load = copies, load
        self._shards: Shards | None = None
        self._given: dict[str, Any] | None = None  # what a new rank was told of them
        self._continuation: Continuation | None = None
        self._inside = self._stepped = False
        self.made_by: tuple[int, ...] = ()
        self.losses: list[tuple[tuple[int, ...], float]] = []
        self.joins: list[tuple[int, int, float]] = []
        self.completed = 0
        self.name = str(getattr(function, "__qualname__", type(function).__qualname__))
        _steps.append(weakref.ref(self, _steps.remove))
        declaration.watch_end()
        self._keepers = self._what_a_try_may_change()
        for one in self._optimizers:
            one.register_step_pre_hook(self._before_optimizer)
        if copies or load is not None:
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
        restore = state.keep(self._keepers)
        while True:
            self._stepped, taking_part = False, self.ranks
            try:
                if going is not None:
                    going.settle()  # of those that were there, before a new one is given its part
                    if self._admit(going):
                        taking_part = self.ranks
                        going.settle()
                batch = (
                    () if self._loader is None else (self._loader.take(self.ranks, 0 if going is None else going.rank),)
                )
                result = self._function(*batch, *args, **kwargs)
                if self._shards is not None and self._stepped:
                    self._shards.keep()
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
            self.completed += 1
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
            joins = lifecycle.is_joining()
            going = Continuation(group, self._min_ranks, self._timeout, self if joins else None)
            _continuations[id(group)] = going
            if joins and self._on_change is not None:
                self._on_change(len(going.ranks) - 1, len(going.ranks))
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

    def _goes_on_after(self, error: Exception, going: Continuation) -> bool:
        outcome = failed_collective(error, going.failures)
        if outcome is None or not outcome.agreed or going.rank in outcome.culprits:
            return False
        if not is_gone(outcome) and (outcome.cause is not Cause.STUCK or self._stepped or not going.gives_up(outcome)):
            return False
        if self._stepped and self._shards is None:
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
        self._tell("went on", lost, taken, going, going.ranks[0])
        if self._on_change is not None:
            self._on_change(*counts)

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
            log.warning("ncclguard: rank %d was lost again while it joined, %.1f s", newcomer, taken)
        if self._on_change is not None and len(going.ranks) != len(before):
            self._on_change(len(before), len(going.ranks))
        return True

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
            log.warning("ncclguard: %s", change)

    # ------------------------------------------------------------------ what a new rank is given

    @property
    def trains(self) -> bool:
        """Whether a new rank may join in this step: it has something to learn."""
        return bool(self._models or self._optimizers or self._loader is not None)

    def state_for_newcomer(self) -> dict[str, Any]:
        """All that a new rank needs of this step: read between two steps, with tensors in it.

        Sharded models and their optimizers are dealt out behind that, among all.
        """
        whole = self._shards is None
        return {
            "completed": self.completed,
            "models": [joining.model_state(model) for model in self._models] if whole else [],
            "modes": [[module.training for module in model.modules()] for model in self._models],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers] if whole else [],
            "shards": None if self._shards is None else self._shards.state_for_newcomer(),
            "kept": [kept.state_dict() for kept in self._kept],
            "loader": None if self._loader is None else (self._loader.batch_size, self._loader.state_dict()),
        }

    def take_state(self, state: dict[str, Any]) -> None:
        """On the new rank; its random numbers are made of its own seed and the number of completed steps."""
        self.completed, self._given = state["completed"], state["shards"]
        whole = self._given is None
        for model, values in zip(self._models if whole else (), state["models"], strict=True):
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
        self._stepped = True
        if self._inside and self._continuation is not None and self._shards is None:
            self._continuation.group.on_lost = "shrink"

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
    size. `copies`: of sharded models (FSDP2), how many neighbours keep a copy of each rank's shard, in host memory; and
    `load()`: loads the newest checkpoint on all ranks alike, where a shard is lost with its copies; one of the two is
    needed where something is sharded. `on_lost`: "continue", or "fail": raise as without this. `min_ranks`: the job
    ends when fewer are left (1). `accumulates`: gradients that are there when a step begins are copied, and brought
    back; by default they are cleared, as the function does itself. `group` (default: all ranks), `timeout` (seconds or
    timedelta, of the survivors' meeting).

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
    if len(models) == 1 and not options and callable(models[0]) and not isinstance(models[0], nn.Module):
        return ResilientStep(models[0])

    def wrap(function: Callable[..., Any]) -> ResilientStep:
        return ResilientStep(function, *models, **options)

    return wrap
