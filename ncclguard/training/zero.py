"""Copies of the state that torch's `ZeroRedundancyOptimizer` has of each parameter on one rank only (ZeRO-1).

The model is whole on all ranks. Each steps the parameters that are its own and broadcasts them. After the step every
rank sends these and their state to its neighbours, in a row of bytes with a checksum behind it, and keeps its own row.
A step counts when all rows have arrived; until then those of the step before are kept, so that whatever happens in a
step, also between two broadcasts, those that are left have all rows from before it. Each row is broadcast to all of
them, who write its parameters, and keep the state of those that are theirs by the optimizer's own partition for as many
ranks. So a rank has more than its part of the state for as long as one row is in its hands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ncclguard import torch_compat
from ncclguard.errors import GuardConfigError, GuardError
from ncclguard.process_group.group import GuardedProcessGroup
from ncclguard.torch_compat import sharding, zero
from ncclguard.training import joining
from ncclguard.training.shards import PIECE, TRIES, intact, keepers, make_known, sealed, told_by_all, told_hosts
from ncclguard_explain.language import told
from ncclguard_explain.ranks import ranks_text

log = logging.getLogger("ncclguard")


class ZeroStates:
    """The state of one `ZeroRedundancyOptimizer` on one group, with `copies` copies of each rank's part.

    What steps call is what they call of `Shards`.
    """

    #: A new rank is given the model by whoever has it, and only the optimizer's state by `settle`.
    models_are_whole = True

    def __init__(
        self,
        group: GuardedProcessGroup,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        copies: int,
        load: Callable[[], object] | None,
    ) -> None:
        self._optimizer: Any = optimizers[0]
        found = zero.obstacle(self._optimizer, group)
        if len(optimizers) > 1 or load is not None or any(sharding.shards_parameters(model) for model in models):
            found = "it goes on as the only optimizer of a step, of models that are not sharded, and without load"
        elif not type(group).one_by_one:
            found = 'it has not been tried on "ncclguard-nccl": use "ncclguard"'
        if found:
            raise GuardConfigError(
                told("ZeroRedundancyOptimizer cannot go on without a rank: {obstacle}", obstacle=found)
            )
        self._group, self._copies = group, copies
        self._all = self._members = torch_compat.group_ranks(group)
        self._rank = self._members[group.rank()]
        self._hosts: dict[int, int] = {}
        self._kept_by: dict[int, tuple[int, ...]] = {}  # empty before the first rows are complete
        self._rows: dict[int, torch.Tensor] = {}  # this rank's own, and those that it keeps for others
        self._seen: object = None
        # On all ranks alike, also where one has loaded what it had, or has no parameter to step.
        self._loads = 0
        self._optimizer.register_load_state_dict_post_hook(self._loaded)
        self._anew: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that this rank has for copies now."""
        return sum(row.numel() for row in self._rows.values())

    # ------------------------------------------------------------------ what steps call

    def settle(self, members: tuple[int, ...], group: GuardedProcessGroup) -> None:
        """Have the state of the last complete step lie on `members`, of which `group` is made, before a try begins."""
        if members != self._members or self._anew:
            self._deal_out(members, group)
        elif self._seen != self._versions():  # the first time, or a checkpoint was loaded
            self.keep()

    def forget_step(self) -> None:
        """Do nothing: gradients and buffers are the model's, and `settle` brings back what a step has written."""

    def keep(self) -> None:
        """The step is complete, once all members have the rows of what it made."""
        states, parameters = zero.states(self._optimizer), zero.parameters(self._optimizer)
        own = {number: states.get(parameters[number], {}) for number in zero.own(self._optimizer)}
        self._rows, self._kept_by = self._sent(self._row(own), self._members)
        self._seen = self._versions()

    # ------------------------------------------------------------------ a new rank

    def begins_anew(self, rank: int) -> None:
        """Another process has taken this rank's place, and has none of its state until the next `settle`."""
        self._anew.add(rank)

    def state_for_newcomer(self) -> dict[str, Any]:
        """Return what a new rank needs before it takes part in a `settle`; the same on all members."""
        if not self._kept_by:
            raise GuardError(told("there are no copies yet: call settle before a rank is taken in"))
        groups = [{key: value for key, value in one.items() if key != "params"} for one in self._optimizer.param_groups]
        return {"kept_by": self._kept_by, "hosts": self._hosts, "anew": tuple(self._anew), "groups": groups}

    def take_state(self, state: Mapping[str, Any]) -> None:
        """On the new rank."""
        self._kept_by, self._hosts = dict(state["kept_by"]), dict(state["hosts"])
        self._members, self._anew = tuple(sorted(self._kept_by)), set(state["anew"])
        for own, group in zip(self._optimizer.param_groups, state["groups"], strict=True):
            own.update(group)

    # ------------------------------------------------------------------ rows

    def _row(self, states: Mapping[int, Mapping[str, Any]]) -> torch.Tensor:
        """Return these parameters as they are, with these states, in bytes."""
        parameters = zero.parameters(self._optimizer)
        state = {
            "parameters": {number: parameters[number].detach() for number in states},
            "states": {number: dict(values) for number, values in states.items()},
            # Counters of steps may lie on the host whatever device their parameter is on.
            "on host": {number: [key for key, value in values.items() if _is_on_host(value)]
                        for number, values in states.items()},
        }  # fmt: skip
        return sealed(joining.packed(state))

    def _versions(self) -> object:
        """Unlike what it was as soon as anybody has written into the state, or put other tensors there."""
        parameters, states = zero.parameters(self._optimizer), zero.states(self._optimizer)
        kept = [value for each in parameters for value in states.get(each, {}).values()]
        tensors = [*parameters, *(value for value in kept if isinstance(value, torch.Tensor))]
        return self._loads, [(id(tensor), torch_compat.version_of(tensor)) for tensor in tensors]

    def _loaded(self, _: torch.optim.Optimizer) -> None:
        self._loads += 1

    def _sent(
        self, row: torch.Tensor, members: tuple[int, ...]
    ) -> tuple[dict[int, torch.Tensor], dict[int, tuple[int, ...]]]:
        """Send this rank's row to those who keep it; returns what this rank has then, and who keeps whose."""
        if not set(members) <= set(self._hosts):
            self._hosts = told_hosts(self._group, members)
        by_rank = keepers(members, self._hosts, self._copies, len(members))
        if len(members) == 1:
            return {self._rank: row}, by_rank
        lengths = torch.empty(len(members), dtype=torch.int64)
        self._group.all_gather_single(lengths, torch.tensor([row.numel()])).wait()
        of = dict(zip(members, lengths.tolist(), strict=True))
        for _ in range(TRIES):
            others = {rank: row.new_empty(of[rank]) for rank in members if self._rank in by_rank[rank]}
            for begin in range(0, max(of.values()), PIECE):
                piece = slice(begin, begin + PIECE)
                inputs = [row[piece] if rank in by_rank[self._rank] else row[:0] for rank in members]
                outputs = [others[rank][piece] if rank in others else row[:0] for rank in members]
                self._group.alltoall(outputs, inputs).wait()
            if not self._damaged(members, others):
                return {self._rank: row, **others}, by_rank
        raise GuardError(
            told(
                "copies of the optimizer's state did not arrive as they were sent, {count} times: look at the network and "
                "the memory of the ranks that the log names",
                count=TRIES,
            )
        )

    def _damaged(self, members: tuple[int, ...], rows: Mapping[int, torch.Tensor]) -> dict[int, list[int]]:
        """Return who has whose row, and not as it was when its checksum was taken: known to all, and logged by one."""
        wrong = [rank for rank, row in rows.items() if not intact(row)]
        damaged = told_by_all(self._group, self._rank, members, max(self._all), wrong)
        if self._rank == members[0]:
            for rank, whose in damaged.items():
                log.error(
                    "ncclguard: %s",
                    told(
                        "rank {rank}'s copy of the optimizer's state of {ranks} is not as it was when it was made, and is "
                        "not used",
                        "log",
                        rank=rank,
                        ranks=ranks_text(whose),
                    ),
                )
        return damaged

    # ------------------------------------------------------------------ without those that are lost

    def _deal_out(self, members: tuple[int, ...], group: GuardedProcessGroup) -> None:
        started = time.monotonic()
        damaged = self._damaged(members, {} if self._rank in self._anew else self._rows)
        kept_by = self._kept_by or {rank: () for rank in self._members}
        holders = {}
        for rank, keeping in sorted(kept_by.items()):
            left = [one for one in (rank, *keeping) if one in members and one not in self._anew]
            left = [one for one in left if rank not in damaged.get(one, ())] if self._kept_by else []
            if left:
                holders[rank] = left[0]
        missing = tuple(rank for rank in kept_by if rank not in holders)
        if missing:
            raise GuardError(
                told(
                    "the optimizer's state of {ranks} is lost, with all copies of it (copies={copies}): start "
                    "again from a checkpoint",
                    ranks=ranks_text(missing),
                    copies=self._copies,
                )
            )
        make_known(group, members, members, self._group)
        zero.repartition(self._optimizer, group, members.index(self._rank), len(members))
        parameters, own = zero.parameters(self._optimizer), zero.own(self._optimizer)
        states: dict[int, dict[str, Any]] = {}
        for rank, holder in holders.items():
            found = self._broadcast(rank, holder, members)
            with torch.no_grad():
                for number, value in found["parameters"].items():
                    parameters[number].copy_(value)
            for number in set(own) & set(found["states"]):
                device, on_host = parameters[number].device, found["on host"][number]
                states[number] = {
                    key: value.to(device) if isinstance(value, torch.Tensor) and key not in on_host else value
                    for key, value in found["states"][number].items()
                }
        rows, kept_by = self._sent(self._row({number: states[number] for number in own}), members)
        # From here on all members have them: what follows is this rank's own doing.
        self._rows, self._kept_by, self._members = rows, kept_by, members
        self._anew.clear()
        live = zero.states(self._optimizer)
        for number, values in states.items():
            if values:
                live[parameters[number]] = values
        self._seen = self._versions()
        if self._rank == members[0]:
            taken = time.monotonic() - started
            log.warning(
                "ncclguard: %s",
                told(
                    "the optimizer's state is dealt out to {ranks} after {seconds:.1f} s",
                    "log",
                    ranks=ranks_text(members),
                    seconds=taken,
                ),
            )

    def _broadcast(self, rank: int, holder: int, members: tuple[int, ...]) -> dict[str, Any]:
        """Return what is in a rank's row, of which `holder` has a good one."""
        source = self._all.index(holder)
        for _ in range(TRIES):
            length = torch.tensor([self._rows[rank].numel() if holder == self._rank else 0])
            self._group.broadcast([length], source).wait()
            row = self._rows[rank] if holder == self._rank else torch.empty(int(length), dtype=torch.uint8)
            for piece in torch.split(row, PIECE):
                self._group.broadcast([piece], source).wait()
            if not self._damaged(members, {rank: row}):
                return joining.unpacked(row)  # type: ignore[no-any-return]
        raise GuardError(
            told(
                "the optimizer's state of rank {rank} did not arrive as rank {source} has sent it, {count} times: look at the "
                "network and the memory of the ranks that the log names",
                rank=rank,
                source=holder,
                count=TRIES,
            )
        )


def _is_on_host(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"
