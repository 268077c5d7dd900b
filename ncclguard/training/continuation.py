"""State that the resilient steps of one process group share: who takes part, and how ranks leave and join.

Survivors meet in a sequence of calls of their own, and go on in a new sequence of collectives that has no lost ranks.
For a new process, see `joining`, they go over to its session, which the lost one is not in, and meet there.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncclguard import lifecycle, torch_compat
from ncclguard.coordination.monitor import Session
from ncclguard.engine import dispatch, runtime
from ncclguard.engine.call import terms_of
from ncclguard.engine.chunking import EMPTY
from ncclguard.engine.dispatch import Queue
from ncclguard.engine.table import BARRIER, Arguments
from ncclguard.errors import CollectiveFailed, GuardConfigError, GuardError
from ncclguard.evaluation.runner import is_gone
from ncclguard.outcome import Outcome
from ncclguard.process_group import enqueued
from ncclguard.process_group.enqueued import EnqueuedProcessGroup
from ncclguard.process_group.group import GuardedProcessGroup
from ncclguard.torch_compat import zero
from ncclguard.training import declaration, joining, places
from ncclguard.watch import watcher
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import told
from ncclguard_explain.ranks import ranks_text

if TYPE_CHECKING:
    from ncclguard.training.shards import Shards
    from ncclguard.training.zero import ZeroStates

log = logging.getLogger("ncclguard")

#: How often survivors try to meet while ranks that are still in another place end.
MEETINGS = 8
#: Seconds in which each survivor has to be known in a newcomer's session, and in which all have to meet there.
KNOWN_WITHIN, WELCOME_WITHIN = 10.0, 60.0
#: Seconds that a new rank waits to be taken in, unless `timeout` says it.
JOIN_WITHIN = 600.0


class Step(joining.Stateful, Protocol):
    """A resilient step, as far as ranks join in it."""

    completed: int

    @property
    def trains(self) -> bool:
        """Return whether a new rank may join in this step: it has something to learn."""


_steps: list[weakref.ref[Step]] = []  # in the order in which they were made, the same on all ranks


def enroll(step: Step) -> None:
    """Have a new rank be given the state of this step, as long as somebody holds it."""
    _steps.append(weakref.ref(step, _steps.remove))


def living() -> list[Step]:
    """Return the steps that somebody holds, in the order in which they were made."""
    return [step for reference in _steps if (step := reference()) is not None]


def _knows_shards() -> bool:
    """Return whether anything can be sharded here: what would tell takes a second to import."""
    return "torch.distributed.tensor" in sys.modules


def has_shards(models: Iterable[nn.Module]) -> bool:
    """Return whether one of these models is sharded already."""
    if not _knows_shards():
        return False
    from ncclguard.torch_compat import sharding

    return any(sharding.shards_parameters(model) for model in models)


def _named(outcome: Outcome, cause: Cause) -> tuple[int, ...]:
    """The culprits of this cause, by the verdict that all have; of many, an incident has not all reports."""
    reports = () if outcome.incident is None else outcome.incident.ranks
    causes = {report.rank: report.cause for report in reports}
    return tuple(rank for rank in outcome.culprits if causes.get(rank, outcome.cause) is cause)


@dataclass(frozen=True)
class GroupExchange:
    """An exchange by the collectives of a group, of which `ranks` are all members, and this one is at `index`."""

    group: GuardedProcessGroup
    ranks: tuple[int, ...]
    index: int

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors as one with a dimension more, in their order."""
        found = tensor.new_empty(len(self.ranks) * tensor.numel())
        self.group.all_gather_single(found, tensor.contiguous().view(-1)).wait()
        return found.view(len(self.ranks), *tensor.shape)

    def broadcast(self, tensor: torch.Tensor, index: int) -> None:
        """Write that of the rank at `index` over `tensor`."""
        self.group.broadcast([tensor], index).wait()


class Continuation:
    """The state that the resilient steps of one process group share: who takes part, and how it came to that."""

    def __init__(
        self, group: GuardedProcessGroup, min_ranks: int, timeout: float | None, joins_at: Step | None = None
    ) -> None:
        self.group = group
        self.rank = dist.get_rank()
        self.ranks = torch_compat.group_ranks(group)
        self.all_ranks = self.ranks
        self.lost: list[int] = []  # each rank as often as it was
        self._members = self.ranks  # of the session: those that are gone, too
        self._counted = self.ranks  # of whom half have to be left where a host is silent, the same on all ranks
        self.calls = 0  # of resilient steps, in their order, the same on all ranks
        self.running = 0  # steps that are in progress: one may call another
        self.meetings = 0
        self.failures: list[Outcome] = []
        self._min_ranks = min_ranks
        self._timeout = timeout
        self.taking_part = group  # has as many ranks as take part
        self._wrappers: list[DistributedDataParallel] = []
        self._shards: list[Shards | ZeroStates] = []
        self._vote = joining.Vote()
        self._waiting = joining.Waiting()
        self._offers = places.Offers(self._waiting)
        self._seat = [places.Seat().look] if os.environ.get(declaration.PLACE) else []
        group.enter_scope(None, self.failures.append)
        if isinstance(group, EnqueuedProcessGroup):
            enqueued.failures.interrupts = False  # a step learns of a verdict where it is committed
        self._has_begun = joins_at is not None
        if joins_at is None:
            self._meet("begin to train")  # its connections are made while all are there
            self._has_begun = True
        else:
            self._join(joins_at)
        lifecycle.going_on()
        declaration.going_on(self.rank, self.lost, ranks=self.ranks)

    def adopt(self, models: Iterable[nn.Module]) -> None:
        """These models' gradients are reduced on the group, whoever takes part."""
        for wrapper in (part for model in models for part in model.modules()):  # torch.compile wraps it again
            if not isinstance(wrapper, DistributedDataParallel) or any(wrapper is known for known in self._wrappers):
                continue
            if getattr(wrapper.process_group, "whole", wrapper.process_group) is not self.group:
                raise GuardConfigError(
                    told(
                        "a DistributedDataParallel of another process group cannot go on without a rank: make it "
                        "on the group of resilient_step, which init_process_group gives"
                    )
                )
            obstacle = torch_compat.ddp_stays(wrapper)
            if obstacle:
                raise GuardConfigError(
                    told("a DistributedDataParallel cannot go on without a rank: {obstacle}", obstacle=obstacle)
                )
            self._wrappers.append(wrapper)
            if self.taking_part is not self.group:
                torch_compat.move_ddp(wrapper, self.taking_part)

    def protect(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        copies: int,
        load: Callable[[], object] | None,
    ) -> Shards | ZeroStates | None:
        """Protect what is sharded: say what goes on with the shards of ranks that are lost."""
        kept: Shards | ZeroStates
        if any(map(zero.is_one, optimizers)):
            from ncclguard.training.zero import ZeroStates

            kept = ZeroStates(self.group, models, optimizers, copies, load)
            self._shards.append(kept)
            return kept
        if not _knows_shards():
            if copies or load is not None:
                raise GuardConfigError(told("copies and load are for sharded models (fully_shard): leave them out"))
            return None
        from ncclguard.training import shards

        if not shards.wanted(models, copies, load):
            return None
        kept = shards.Shards(self.group, models, optimizers, copies, load)
        self._shards.append(kept)
        return kept

    def exchange(self) -> GroupExchange:
        """Exchange small tensors among those that take part."""
        return GroupExchange(self.taking_part, self.ranks, self.ranks.index(self.rank))

    def settle(self) -> None:
        """Before a try: the shards of sharded models lie on those that take part."""
        for shards in self._shards:
            shards.settle(self.ranks, self.taking_part)

    def forget_step(self) -> None:
        """Have the models begin their next step as if the one that failed had not begun."""
        for wrapper in self._wrappers:
            torch_compat.move_ddp(wrapper, self.taking_part)
        for shards in self._shards:
            shards.forget_step()

    @property
    def absorbed(self) -> bool:
        """Return whether a collective has gone on without a rank that still counts here."""
        return len(self.group.participants) not in (0, len(self.ranks))

    def go_on(self, because: BaseException | None, what: str) -> None:
        """Meet the other survivors and make them the ones that take part.

        Raises `because`, or what kept the survivors from meeting, where the job cannot go on.
        """
        before = self.ranks
        self.group.on_lost = "fail"
        self.group.finish()  # what was issued has to take its place in the sequence, as it does on the others
        after = self._meet(what)
        lost = tuple(rank for rank in before if rank not in after)
        if len(after) < self._min_ranks:
            error = because if because is not None else GuardError(f"{ranks_text(lost)} gone")
            log.error(
                "ncclguard: %s",
                told(
                    "{ranks} gone, and {count} ranks are fewer than min_ranks", ranks=ranks_text(lost), count=len(after)
                ),
            )
            raise error
        if not lost:  # the verdict said that somebody is gone, but nobody is
            raise because if because is not None else GuardError("no rank is gone")
        self._move(after)
        for wrapper in self._wrappers:
            torch_compat.move_ddp(wrapper, self.taking_part)
        self._now_without(lost)

    def gives_up(self, outcome: Outcome) -> bool:
        """Go on without ranks that do not answer and are not known to be gone; False where that cannot be.

        What is there and does not run may run later, and would write what the others have gone on from: the launcher of
        its host ends it first, and the survivors' meeting waits for that. A host that nobody can reach cannot be asked.
        Its ranks can at most complete the small collective that the others were in, and end with the verdict on them,
        should they come back.
        """
        stuck, silent = _named(outcome, Cause.STUCK), _named(outcome, Cause.UNKNOWN)
        if not outcome.culprits or {*stuck, *silent} != set(outcome.culprits):
            return False
        if len(self.ranks) - len(outcome.culprits) < self._min_ranks or (stuck and not declaration.has_launcher()):
            return False
        if silent and not self._out_of_reach(outcome):
            return False
        if stuck:
            log.warning("ncclguard: %s", told("{ranks} given up: its process does not run", ranks=ranks_text(stuck)))
            runtime.given_up(stuck)
            declaration.going_on(self.rank, self.lost, stuck, ranks=self.ranks)
        return True

    def _out_of_reach(self, outcome: Outcome) -> bool:
        """Leave ranks out of the next meeting whose host nobody can reach; False where there are none, or too many.

        Half of the ranks have to be left: else it is more likely that this side is the one that is cut off.
        """
        silent = _named(outcome, Cause.UNKNOWN)
        if not self._has_begun or not silent or not outcome.agreed or self.rank in silent:
            return False  # a training does not begin without some of its ranks
        there = {*outcome.participants} & {*self._members} - {*silent}
        left = [rank for rank in self._counted if rank in there]
        if 2 * len(left) < len(self._counted):
            return False
        if self.rank == left[0]:
            log.warning(
                "ncclguard: %s",
                told("{ranks} given up: no rank can reach it, nor see its process", ranks=ranks_text(silent)),
            )
        self._meet_without(silent)
        return True

    def _meet_without(self, ranks: Sequence[int]) -> None:
        """The next meeting is one that these are not members of."""
        self._members = tuple(rank for rank in self._members if rank not in ranks)

    def _move(self, ranks: tuple[int, ...]) -> None:
        """Collectives are those of these ranks from now on, in a new sequence."""
        self.meetings += 1
        self.taking_part = self.group.go_on(ranks, self.meetings)
        self.failures.clear()
        self.ranks = self._counted = ranks

    def _now_without(self, lost: Sequence[int]) -> None:
        self.lost += lost
        self._attend(runtime.current())
        self._vote.soon(self.calls)
        declaration.going_on(self.rank, self.lost, ranks=self.ranks)

    # ------------------------------------------------------------------ a new rank takes the place of a lost one

    def admit(self, step: Step) -> tuple[int, tuple[int, ...]] | None:
        """Before each try of a step that trains: take in a new rank that waits, if it is time to tell each other.

        Returns its rank and those that were lost meanwhile; None where nobody was taken in, nor lost. Raises as a
        collective does when a rank is lost before the others have gone over to the new rank's session.
        """
        if self.ranks == self.all_ranks or not step.trains or self.calls < self._vote.due:
            return None
        ballot = torch.zeros(joining.Vote.LENGTH, dtype=torch.uint8)
        if self.rank == self.ranks[0]:
            ballot = self._vote.ballot(self.calls, self._waiting.first(step.name))
        started = time.monotonic()
        self._broadcast(ballot, self.ranks[0])
        found = self._vote.counted(self.calls, ballot, time.monotonic() - started)
        return None if found is None else self._go_over(found)

    def _go_over(self, found: joining.Newcomer) -> tuple[int, tuple[int, ...]] | None:
        """All survivors: make themselves known in the newcomer's session, agree that all have, and meet there."""
        newcomer, session, before = found.rank, found.session, self.ranks
        absent = tuple(rank for rank in self.all_ranks if rank not in before and rank != newcomer)
        prepared = None
        try:
            prepared = runtime.prepare(Session(session, absent), KNOWN_WITHIN)
        except GuardError as error:
            log.warning(
                "ncclguard: %s", told("rank {rank} cannot be taken in now: {error}", "log", rank=newcomer, error=error)
            )
        known = torch.tensor([int(prepared is not None)])
        try:
            self.group.allreduce([known], dist.ReduceOp.MIN).wait()
        except BaseException:
            known.zero_()
            raise
        finally:
            self._waiting.used(found, bool(known))
            if prepared is not None and not int(known):
                prepared.leave(Cause.EXITED, f"does not take in rank {newcomer}", job=False)
        if prepared is None or not int(known):
            return None
        members = tuple(sorted((*before, newcomer)))
        invitation = joining.Invitation(members, self.meetings, self.calls)
        old = runtime.replace(prepared)
        self._observe_anew()
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

    def _join(self, step: Step) -> None:
        """The newcomer's side."""
        end = time.monotonic() + (self._timeout or JOIN_WITHIN)
        current, invitation = runtime.current(), None
        if not current.monitor.session_ready.wait(KNOWN_WITHIN):
            raise GuardError(told("the store has not answered in {seconds:.0f} s", seconds=KNOWN_WITHIN))
        while True:
            monitor = current.monitor
            place = int(os.environ.get(declaration.PLACE, "0"))
            note = joining.Note(self.rank, monitor.nonce, step.name, current.identity.to_json(), place)
            asking = joining.Asking(note)
            monitor.above_sessions = joining.all_of([asking.look, *self._seat])
            invitation = asking.invitation(end, monitor.wake, lambda monitor=monitor: monitor.unavailable)  # type: ignore[misc]
            if invitation is not None:
                break
            current = runtime.prepare(runtime.own_session(), KNOWN_WITHIN)
            runtime.replace(current).leave(Cause.EXITED, "begins another session, to join in that", job=False)
            self._observe_anew()
        self.meetings = invitation.meetings
        self._welcome(self.rank, invitation.members, invitation.calls)
        joining.seed_newcomer(step.completed)
        lifecycle.joined()
        self.calls = invitation.calls - 1  # which its first call makes it
        self._vote.soon(invitation.calls + 1)
        self._attend(current)

    def _observe_anew(self) -> None:
        """Have the collectives of the session that begins judged, and its verdicts counted from the first."""
        watcher.observe_anew()
        enqueued.failures.begin()

    def _attend(self, current: runtime.Runtime, more: joining.Look | None = None) -> None:
        """The first rank that goes on reads who waits, and offers the places for which nobody does."""
        looks = [*self._seat, *([] if more is None else [more])]
        self._waiting.miss(set(self.all_ranks) - set(self.ranks))
        if self.rank == self.ranks[0] and (self._waiting.missing or self.lost):
            looks.append(self._waiting.look)
            if declaration.has_launcher():
                looks.append(self._offers.look)
        current.monitor.above_sessions = joining.all_of(looks)
        current.monitor.wake()

    def _welcome(self, newcomer: int, members: tuple[int, ...], calls: int) -> None:
        """All members, in the newcomer's session: meet, and give it the state of one; until nobody is lost in that."""
        self._members = self._counted = members
        for _ in range(MEETINGS):
            try:
                present = self._meet(f"take in rank {newcomer} before step {calls}", WELCOME_WITHIN)
                survivors = [rank for rank in present if rank != newcomer]
                if len(survivors) < self._min_ranks or not survivors:
                    raise GuardError(told("{ranks} are left, fewer than min_ranks", ranks=ranks_text(present)))
                self._move(present)
                for shards in self._shards:
                    shards.begins_anew(newcomer)
                if newcomer in present:
                    self.group.one_by_one = True
                    try:
                        self._hand_over(newcomer, survivors[0])
                    finally:
                        self.group.one_by_one = type(self.group).one_by_one
            except CollectiveFailed as error:
                self._leave_out(newcomer, error)
                continue
            except joining.NotGiven as error:
                if self.rank == newcomer:
                    raise
                log.error(
                    "ncclguard: %s", told("rank {rank} does not join: {error}", "log", rank=newcomer, error=error)
                )
                self._members = tuple(survivors)
                continue
            for wrapper in self._wrappers:
                torch_compat.move_ddp(wrapper, self.taking_part)
            return
        raise GuardError(
            told("the ranks could not meet rank {newcomer} in {count} tries", newcomer=newcomer, count=MEETINGS)
        )

    def _hand_over(self, newcomer: int, source: int) -> None:
        def broadcast(tensor: torch.Tensor) -> None:
            self._broadcast(tensor, source)

        state = None
        for _ in range(joining.TRIES):
            arrived = torch.ones(1, dtype=torch.int64)
            if self.rank == source:
                joining.send(self._state, broadcast)
            elif self.rank == newcomer:
                try:
                    state = joining.receive(broadcast)
                except joining.Damaged as error:
                    log.error(
                        "ncclguard: %s", told("rank {rank}, which joins: {error}", "log", rank=newcomer, error=error)
                    )
                    arrived.zero_()
            else:
                joining.stand_by(broadcast)
            self._broadcast(arrived, newcomer)
            if int(arrived):
                break
        else:
            raise joining.NotGiven(
                told(
                    "the state of rank {source} did not arrive at rank {newcomer} as it was sent, {count} times",
                    source=source,
                    newcomer=newcomer,
                    count=joining.TRIES,
                )
            )
        if state is not None:
            self.lost, self._waiting.places = list(state["lost"]), state["places"]
            own = joining.numbered(living())
            for name, said in state["steps"].items():
                if name in own:
                    own[name].take_state(said)
                elif said["models"] or said["shards"]:
                    raise GuardError(
                        told("the others train in {name}, which the new rank does not have: make it alike", name=name)
                    )
        self.group.barrier().wait()

    def _state(self) -> dict[str, Any]:
        steps = {name: one.state_for_newcomer() for name, one in joining.numbered(living()).items()}
        return {"steps": steps, "lost": self.lost, "places": self._waiting.places}

    def _leave_out(self, newcomer: int, error: CollectiveFailed) -> None:
        """Have those that are gone left out of the next meeting, and a newcomer that is silent."""
        outcome = error.outcome
        self.group.finish()
        if not outcome.agreed or self.rank in outcome.culprits:
            raise error
        if is_gone(outcome) or self._out_of_reach(outcome):
            return
        if outcome.culprits != (newcomer,):
            raise error
        log.warning("ncclguard: %s", told("rank {rank} is left out again: {error}", "log", rank=newcomer, error=error))
        self._meet_without((newcomer,))

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
            # A sequence has the same members from its beginning to its end, and in a session they only become fewer.
            queue = Queue(f"continue-{len(self._members)}", self._members)
            outcome = dispatch.run(BARRIER, Arguments(), terms, EMPTY, queue=queue)
            if outcome.ok:
                return outcome.participants
            if not outcome.agreed or not outcome.culprits or self.rank in outcome.culprits:
                break
            if is_gone(outcome):
                # It could not go on by itself, because others are silent: these are found without those that are gone.
                self._meet_without(outcome.culprits)
            elif outcome.cause is Cause.UNKNOWN:
                if not self._out_of_reach(outcome):
                    break
            elif outcome.cause is not Cause.DIVERGED:
                break  # those that are elsewhere end with this verdict, and the rest meets without them
        outcome.raise_if_failed()
        raise AssertionError("unreachable")
