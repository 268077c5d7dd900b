"""The likely class of cause, by rules in order of how specific their evidence is; "unknown" when none applies.

Each rule sees all facts and the verdict on the culprits and answers with a class, a confidence and the lines it rests
on. The rules speak of mechanisms, never of one incident.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclguard.explain import class_busy as busy
from ncclguard.explain import class_machines as machines
from ncclguard.explain import class_program as program
from ncclguard.explain.case import Case, Finding
from ncclguard.explain.collect import Evidence
from ncclguard.explain.verdict import Verdict
from ncclguard.explain.world import World

RULES: tuple[Callable[[Case], Finding | None], ...] = (
    machines.hardware,
    machines.shared_memory,
    program.ddp_unused,
    machines.iommu,
    machines.transport_mismatch,
    program.crash,
    program.differing,
    program.recorder,
    machines.network,
    machines.store,
    busy.long_wait,
    busy.side_work,
    busy.main_only,
    busy.unequal,
    program.divergence,
    busy.too_short,
    busy.zero_alone_missing,
    program.teardown,
    machines.first_use,
    program.peer_gone,
)


def classify(evidence: Evidence, world: World, verdict: Verdict) -> Finding:
    """Return the first class whose rule applies, else "unknown"."""
    case = Case(evidence, world, verdict)
    for rule in RULES:
        finding = rule(case)
        if finding is not None:
            return finding
    return Finding("unknown", "low", "nothing in the inputs tells the cause")
