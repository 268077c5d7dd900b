"""Ranks with the same program are interchangeable: of all states that differ only in who is called what, one is explored.

Sound because nothing in the model or in the production code asks for the number of a rank, except to sort; so a renamed state has
the renamed steps. Ranks whose programs differ are never exchanged.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations, product
from typing import TYPE_CHECKING

from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Verdict
from tests.protocol.process import Snapshot, mask

if TYPE_CHECKING:
    from tests.protocol.fabric import Fabric
    from tests.protocol.steps import State

Naming = tuple[int, ...]  # old rank -> new rank


class Symmetry:
    """Renames the ranks of states of one fabric."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._ranks = fabric.members
        self._kind = [fabric.job.programs.index(program) for program in fabric.job.programs]
        self._signatures: dict[int, int] = {}
        self._numbers: dict[object, int] = {}
        self._processes: dict[tuple[int, Naming], int] = {}
        self._shareds: dict[tuple[int, Naming], int] = {}
        self._profiles: dict[int, tuple[tuple[int, ...], ...]] = {}

    def canonical(self, state: State) -> State:
        """The representative of all states that are this one up to the names of ranks."""
        profiles = self._profiles.get(state[-1]) or self._profile(state[-1])
        keys = []
        for rank in self._ranks:
            number = state[rank]
            signature = self._signatures.get(number)
            if signature is None:
                signature = self._signature(number)
            keys.append((self._kind[rank], signature, profiles[rank]))
        order = sorted(self._ranks, key=keys.__getitem__)
        if all(keys[a] < keys[b] for a, b in pairwise(order)):
            return self._named(state, order)
        groups: list[list[int]] = []
        for rank in order:
            if groups and keys[groups[-1][0]] == keys[rank]:
                groups[-1].append(rank)
            else:
                groups.append([rank])
        choices = product(*(permutations(group) for group in groups))
        return min(self._named(state, [rank for group in choice for rank in group]) for choice in choices)

    def _named(self, state: State, order: list[int]) -> State:
        naming = tuple(order.index(rank) for rank in self._ranks)
        if naming == self._ranks:
            return state
        processes = [self._process(state[old], naming) for old in order]
        return (*processes, self._shared(state[-1], naming))

    # ------------------------------------------------------------------ what does not depend on names

    def _number(self, value: object) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _signature(self, number: int) -> int:
        process = self._fabric.processes[number]
        member = process.member
        sums = tuple(total.bit_count() if total > 0 else total for total in process.content)
        blind = (
            process.at, process.call, process.generation, len(process.group), process.logs, process.piece, sums,
            process.slots, process.keep.bit_count(), len(member.participants), member.generation, member.next_sequence,
            member.completed, member.kept, member.operation, member.phase, member.first_incomplete, member.attempt,
            member.frozen, member.trouble, len(member.settled), member.committed_through, member.abandoned,
            len(member.lost), member.fenced,
        )  # fmt: skip
        self._signatures[number] = signature = self._number(blind)
        return signature

    def _profile(self, number: int) -> tuple[tuple[int, ...], ...]:
        shared = self._fabric.shareds[number]
        masks = (shared.crashed, shared.stopped, shared.left, shared.gave_up, shared.raised)
        profiles = []
        for rank in self._ranks:
            report = shared.reports[rank]
            seen = -1
            if report >= 0:
                r = self._fabric.reports[report]
                seen = self._number((r.done, r.operation, r.phase, r.first_incomplete, r.attempt, r.trouble))
            profiles.append((seen, *(bits >> rank & 1 for bits in masks)))
        self._profiles[number] = tuple(profiles)
        return self._profiles[number]

    # ------------------------------------------------------------------ renaming

    def _process(self, number: int, naming: Naming) -> int:
        known = self._processes.get((number, naming))
        if known is None:
            process = self._fabric.processes[number]
            rank = naming[process.member.rank]
            member = replace(
                process.member,
                rank=rank,
                participants=_ranks(process.member.participants, naming),
                settled=tuple(_verdict(verdict, naming) for verdict in process.member.settled),
                lost=_causes(process.member.lost, naming),
                left=_causes(process.member.left, naming),
                fenced_for=_causes(process.member.fenced_for, naming),
            )
            renamed = process._replace(
                snapshot=Snapshot.of(member),
                group=_ranks(process.group, naming),
                content=tuple(_sum(total, naming) for total in process.content),
                keep=_sum(process.keep, naming),
            )
            known = self._processes[number, naming] = self._fabric.process_id(renamed, rank)
        return known

    def _shared(self, number: int, naming: Naming) -> int:
        known = self._shareds.get((number, naming))
        if known is None:
            fabric = self._fabric
            shared = fabric.shareds[number]
            reports = [-1] * len(naming)
            for rank, report in enumerate(shared.reports):
                if report >= 0:
                    reports[naming[rank]] = fabric.report_id(replace(fabric.reports[report], rank=naming[rank]))
            renamed = shared._replace(
                crashed=_sum(shared.crashed, naming),
                stopped=_sum(shared.stopped, naming),
                left=_sum(shared.left, naming),
                gave_up=_sum(shared.gave_up, naming),
                raised=_sum(shared.raised, naming),
                reports=tuple(reports),
                verdicts=tuple(
                    (generation, fabric.verdict_id(_verdict(fabric.verdicts[verdict], naming)))
                    for generation, verdict in shared.verdicts
                ),
                results=tuple((sequence, _sum(total, naming)) for sequence, total in shared.results),
                records=tuple(
                    (
                        sequence,
                        record._replace(
                            culprits=_ranks(record.culprits, naming),
                            total=_sum(record.total, naming),
                            ranks=_sum(record.ranks, naming),
                        ),
                    )
                    for sequence, record in shared.records
                ),
            )
            known = self._shareds[number, naming] = fabric.shared_id(renamed)
        return known


def _ranks(ranks: tuple[int, ...], naming: Naming) -> tuple[int, ...]:
    return tuple(sorted(naming[rank] for rank in ranks))


def _sum(total: int, naming: Naming) -> int:
    return total if total <= 0 else mask([new for old, new in enumerate(naming) if total >> old & 1])


def _causes(causes: tuple[tuple[int, Cause], ...], naming: Naming) -> tuple[tuple[int, Cause], ...]:
    return tuple(sorted((naming[rank], cause) for rank, cause in causes))


def _verdict(verdict: Verdict, naming: Naming) -> Verdict:
    return replace(
        verdict,
        culprits=_causes(verdict.culprits, naming),
        participants=_ranks(verdict.participants, naming),
        departed=_causes(verdict.departed, naming),
    )
