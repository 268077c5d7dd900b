"""What is wrong with what the ranks have reported about a round."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ncclguard.protocol.timing import COVERED, LONGEST_DELAY, PER_DELAY, Pace
from tests.soak.plan import GENEROUS, LONG, Call, Plan, expected

#: Seconds after its limit at which a call has to be back, and what a busy machine gets on top.
GRACE, SLACK = 2.0, 1.0
#: Results up to this many bytes have no closing round, so that a rank may learn later that its success was none.
SMALL: Final = 65536


class Pulse:
    """How long a thread of this process has waited beyond its time to wake up: what the machine's load costs."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._over.is_set():
            since = time.monotonic()
            time.sleep(0.01)
            self.worst = max(self.worst, time.monotonic() - since - 0.01)

    def close(self) -> None:
        self._over.set()


def judge(seed: int, plan: Plan, size: int, found: Mapping[int, Mapping[str, Any]], worst: float) -> list[str]:
    """What is wrong with what the live ranks have reported about a round; nothing, as a rule."""
    wrong = [f"rank {rank}: {found[rank]['changed']} patterns have changed" for rank in found if found[rank]["changed"]]
    for index, call in enumerate(plan.calls):
        told = {rank: found[rank]["calls"][index] for rank in found}
        lines = [
            *verdicts(plan, call, size, found, told),
            *names(plan, call, size, found, told),
            *fitting(plan, call, size, told),
        ]
        for rank, one in told.items():
            lines += bits(seed, plan, index, rank, size, one) + times(plan, call, rank, one, worst)
        wrong += [f"call {index}, {call}: {line}" for line in lines]
    if not (plan.fault == "kill" and plan.victim == 0):  # with rank 0 goes the store, and with it all agreement
        wrong += recovery(plan, found)
    return wrong


def away(plan: Plan) -> bool:
    """Whether a host is cut off for longer than the limit."""
    return plan.fault == "cut" and plan.seconds > plan.calls[0].timeout


def may_stay_alone(plan: Plan, rank: int, size: int) -> bool:
    """Whether the fault may keep a rank from the others' verdict: one that is stopped or cut off, without rank 0 all."""
    if plan.fault == "cut":
        return away(plan) and rank in plan.on_host(size)
    return (plan.fault == "stop" and plan.victim in (0, rank)) or (plan.fault == "kill" and plan.victim == 0)


def overruled(plan: Plan, call: Call, found: Mapping[int, Mapping[str, Any]], rank: int) -> bool:
    """Whether this rank was told a success of a small call that its being stopped made a failure, and told so later."""
    small = call.op != "reduce_scatter" and call.numel * call.element * len(found) <= SMALL
    return plan.fault == "stop" and rank == plan.victim and small and "raised" in found[rank]["after"][0]


def verdicts(
    plan: Plan, call: Call, size: int, found: Mapping[int, Mapping[str, Any]], told: Mapping[int, Mapping[str, Any]]
) -> Iterator[str]:
    different = {}
    for rank, one in told.items():
        if "raised" in one:
            yield f"rank {rank} raised {one['raised']}"
        elif one["agreed"] and not overruled(plan, call, found, rank):
            different[one["ok"], one["cause"], tuple(one["culprits"]), one["op_id"]] = rank
        elif not one["agreed"] and (one["ok"] or not may_stay_alone(plan, rank, size)):
            yield f"rank {rank} did not agree: {one}"
    if len(different) > 1:
        yield f"different verdicts, each with one of its ranks: {different}; {told}"


def names(
    plan: Plan, call: Call, size: int, found: Mapping[int, Mapping[str, Any]], told: Mapping[int, Mapping[str, Any]]
) -> Iterator[str]:
    guilty = {plan.victim} if plan.fault in ("late", "hesitant", "stop", "kill", "shape") else set()
    if away(plan):
        guilty = set(plan.on_host(size))
    lags = {rank: one["entered"] - min(one["entered"] for one in told.values()) for rank, one in told.items()}
    accused = {
        (culprit, one["cause"]): one for one in told.values() if "raised" not in one for culprit in one["culprits"]
    }
    for (culprit, cause), one in accused.items():
        if culprit in guilty:
            continue
        starved = found[culprit]["starved"] if culprit in found else 0.0
        late = plan.fault == "limit" and cause == "late" and lags[culprit] + starved >= 0.4 * call.timeout
        if not (late or (cause == "stuck" and starved >= 0.5)):
            yield f"rank {culprit} is called {cause}, having waited {starved:.3f} s for a core: {one}; it called after {lags}"


def fitting(plan: Plan, call: Call, size: int, told: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Where the fault determines what is said of it."""
    victim, before = plan.victim, plan.delay < 0
    if plan.fault == "cut":
        wanted = [(False, "unknown", plan.on_host(size))] if away(plan) else [(True, "None", [])]
        if away(plan) and any(one["seconds"] > plan.seconds for one in told.values()):
            # On a busy machine the host may be back before the verdict, and say that it was told something else.
            wanted += [(False, "unknown", [])]
        for rank, one in told.items():
            if one["agreed"] and (one["ok"], one["cause"], one["culprits"]) not in wanted:
                yield f"rank {rank} was told {one}, not {wanted}"
        return
    short = plan.fault == "stop" and call.timeout == GENEROUS
    for rank, one in told.items():
        if "raised" in one or not one["agreed"]:
            continue
        said = (one["cause"], one["culprits"])
        cause = {"late": "late", "kill": "lost", "stop": "stuck", "shape": "diverged"}.get(plan.fault, "")
        wanted = (cause, [victim] if size > 2 or plan.fault != "shape" else [])
        if one["ok"]:
            certain = plan.fault in ("late", "shape") or (plan.fault == "kill" and before)
            if certain or (plan.fault == "stop" and before and plan.seconds > LONG):
                yield f"rank {rank} was told a success"
            if one["participants"] != list(range(size)):
                yield f"rank {rank} was told that {one['participants']} took part"
        elif plan.fault in ("none", "hesitant") or short:
            yield f"rank {rank} was told a failure: {one}"
        elif cause and (plan.fault != "stop" or plan.seconds > LONG):
            if has_store(plan) and said != wanted:
                yield f"rank {rank} was told {said}, not {wanted}: {one}"
        elif plan.fault in ("reset", "half"):
            if call.atomic or call.op == "all_gather_object":
                yield f"rank {rank} was told a failure, although everything could be restored: {one}"
            elif said != ("network", []):
                yield f"rank {rank} was told {said}: {one}"
        elif plan.fault == "limit" and one["cause"] not in ("network", "late", "stuck") and said != ("unknown", []):
            # Nobody is to blame where all were there and the limit had passed before they could begin.
            yield f"rank {rank} was told {said}: {one}"


def has_store(plan: Plan) -> bool:
    """Whether the ranks can agree: rank 0 keeps the store, and nothing is certain where that is stopped or killed."""
    return plan.victim != 0 or plan.fault in ("late", "shape")


def bits(seed: int, plan: Plan, index: int, rank: int, size: int, one: Mapping[str, Any]) -> list[str]:
    if "sum" not in one:
        return []
    wrong = [] if one["read_only"] else [f"rank {rank}: what was only to be read has changed"]
    right = expected(seed, plan, index, rank, size, one["ok"]) == one["sum"]
    torn = not one["ok"] and one["torn"]
    if torn and plan.calls[index].atomic:
        wrong.append(f"rank {rank}: torn, although it was to be atomic")
    if not right and not torn:
        wrong.append(f"rank {rank} does not hold the {'result' if one['ok'] else 'input'}: {one}")
    return wrong


def times(plan: Plan, call: Call, rank: int, one: Mapping[str, Any], worst: float) -> list[str]:
    limit = call.timeout
    if plan.fault == "kill" and has_store(plan):
        limit = min(limit, 4.0)  # what is gone is known long before the limit
    elif plan.fault == "shape":
        limit = min(limit, 3.0)
    stopped = plan.seconds if plan.fault == "stop" and rank == plan.victim else 0.0
    met = 0.0
    if plan.hosts and plan.fault in ("cut", "stop"):  # what the coordinator may have met in the round before
        longest = LONGEST_DELAY * 0.5 ** (call.timeout / Pace.HALVED_AFTER)
        met = PER_DELAY * max(0.0, longest - COVERED)
    bound = limit + GRACE + SLACK + stopped + met + one["held"] + 4 * worst
    return [f"rank {rank} took {one['seconds']:.2f} s, not {bound:.2f}: {one}"] if one["seconds"] > bound else []


def recovery(plan: Plan, found: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """The next operation works: at once, unless a stopped rank has first to learn what the others have decided.

    Whom a kill in mid-round has met after that operation, has taken part.
    """
    parts = (
        [sorted(found), sorted({*found, plan.victim})] if plan.fault == "kill" and plan.delay >= 0 else [sorted(found)]
    )
    for rank, one in found.items():
        tries, last = len(one["after"]), one["after"][-1]
        took_part = last.get("participants")
        if not last["ok"] or took_part not in parts or (last["counted"], last["most"]) != (took_part, 1):
            yield f"rank {rank} afterwards: {one['after']}"
        elif took_part != next(iter(found.values()))["after"][-1]["participants"]:
            yield f"rank {rank} has seen {took_part} take part afterwards, others have not"
        elif tries > 1 and plan.fault not in ("stop", "cut"):
            yield f"rank {rank} needed {tries} calls afterwards: {one['after']}"
