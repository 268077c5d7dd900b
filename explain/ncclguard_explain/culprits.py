"""Name the ranks that held the others up, by rules in the order of how much they prove; an empty answer is an answer.

The rank that prints a timeout is a victim. The rules look for the rank that is dead (an exception of its own, a broken
GPU, a signal, a connection that closed), or absent from, behind, ahead of or different from what the victims wait in;
silence counts last, and only for ranks whose log would be among the inputs. Each verdict carries the facts it rests on
and says what would overturn it. `causes` and `decision` use the functions that select the facts of a failure too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ncclguard_explain import engines
from ncclguard_explain.connections import by_clients, by_gone_peer, by_link, by_peer_closed, by_port, by_unreachable
from ncclguard_explain.divergence import by_alone, by_counters, by_divergence, by_fingerprint, by_tracebacks
from ncclguard_explain.evidence import Evidence, World
from ncclguard_explain.facts import Fact, Verdict
from ncclguard_explain.failures import by_failure, by_first_exit, first_to_exit
from ncclguard_explain.language import joined, tr
from ncclguard_explain.ranks import ranks_text
from ncclguard_explain.silence import by_silence, by_silence_in_group
from ncclguard_explain.witnesses import (
    by_analyser,
    by_barrier,
    by_desync_report,
    by_guard,
    by_hccl,
    by_heartbeats,
    by_inquiry,
    by_lost_host,
    by_parameters,
    by_ras,
    by_section,
    by_stacks,
    by_store_barrier,
    by_store_key,
    by_table,
    by_traces,
    by_watchdog,
)

Rule = Callable[[Evidence, World], "Verdict | None"]

RULES: tuple[Rule, ...] = (
    by_guard, by_inquiry, by_traces, by_table, by_failure, by_section, by_heartbeats, by_lost_host, engines.by_unfinished, engines.by_tool, by_fingerprint, by_parameters, by_desync_report, by_barrier,
    by_store_barrier, by_clients, by_watchdog, by_peer_closed, by_unreachable, by_port, by_link, by_ras, by_hccl, by_counters, by_store_key, by_analyser, by_stacks,
)  # fmt: skip
#: Weaker ones, which also say what the ranks differ in.
LAST_RULES: tuple[Rule, ...] = (
    by_alone,
    by_tracebacks,
    by_divergence,
    by_silence,
    by_silence_in_group,
    by_gone_peer,
    by_first_exit,
)


def find_culprits(evidence: Evidence, world: World) -> Verdict:
    """Return the first verdict that names somebody, else the most telling one that does not.

    torchrun counts the ranks of each of torchft's replica groups from 0 on: such a number names nobody in the job.
    """
    verdict = _first_verdict(evidence, world)
    if verdict.rule == "silence" and (end := _end_of(evidence, verdict.culprits)) is not None:
        ended = tr("{ranks} ended first, with exit code {code}", ranks=ranks_text(verdict.culprits), code=end.number)
        verdict.reason, verdict.facts = joined("; ", (ended, verdict.reason)), [end, *verdict.facts]
    own = [fact for fact in verdict.facts if fact.rank in verdict.culprits]
    if evidence.replicated and own and not any(fact.rank_basis in ("launcher", "name", "pid") for fact in own):
        where = {tr("rank {rank} of the replica group in {file}", rank=fact.rank, file=fact.file.rpartition("/")[2]): 0
                 for fact in own}  # fmt: skip
        verdict.culprits, verdict.places = (), tuple(where)[:4]
    return verdict


def _end_of(evidence: Evidence, ranks: Sequence[int]) -> Fact | None:
    """Return what a launcher says of the end of the one rank that is named, if it noticed that first."""
    return next((fact for fact in first_to_exit(evidence) if len(ranks) == 1 and fact.rank in ranks), None)


def _first_verdict(evidence: Evidence, world: World) -> Verdict:
    unnamed: list[Verdict] = []
    for rule in RULES:
        verdict = rule(evidence, world)
        if verdict is not None and (verdict.culprits or verdict.places):
            return _beside(verdict, evidence, world)
        if verdict is not None:
            unnamed.append(verdict)
    agreed = next((verdict for verdict in unnamed if verdict.rule == "ncclguard incident"), None)
    if agreed is not None:  # while they lived they could name nobody: no silence afterwards can
        return agreed
    for rule in LAST_RULES:
        verdict = rule(evidence, world)
        if verdict is not None and verdict.culprits:
            divergence = by_divergence(evidence, world) if not verdict.sides else None
            verdict.sides = divergence.sides if divergence is not None else verdict.sides
            return verdict
        if verdict is not None:
            unnamed.append(verdict)
    return unnamed[0] if unnamed else Verdict()


def _beside(verdict: Verdict, evidence: Evidence, world: World) -> Verdict:
    """Add the ranks that are silent beside a rank that failed: a second fault may be theirs, which is no proof."""
    if verdict.rule in ("failure", "counters", "desync report") and not verdict.suspects:
        silence = by_silence(evidence, world)
        if silence is not None and silence.culprits:
            verdict.suspects = tuple(sorted(set(silence.culprits) - set(verdict.culprits)))
    return verdict
