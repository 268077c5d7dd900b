"""Names of processes in the logs of inference engines, and the ranks of the job that they are, where it is proved.

An engine numbers its processes by their places in groups: data, pipeline, tensor and expert parallel. These are no
ranks of the job; they become ones only by the engine's own formula, with the sizes that the log states.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_COORDINATE = re.compile(r"(ATTN_CP|MOE_DP|PCP|DCP|DP|PP|TP|EP|CP|SP)(\d{1,6})(?!\d)")
#: Processes that only hand work out: schedulers, servers, drivers. What they raise follows from another process.
_PARENT = re.compile(
    r"(?:EngineCore|API_?Server|ApiServer|AsyncLLM|DPCoordinator|Detokenizer|TokenizerManager|MainTaskRunner|TaskRunner|"
    r"LLMEngine|raylet|gcs_server)"
)
_SIZE = re.compile(
    r"(?<![A-Za-z])(?:--?)?(?:(?P<name>tensor|pipeline|data|expert|prefill_context)[_-](?:model[_-])?parallel[_-]size|"
    r"(?P<short>tp|pp|dp|ep|pcp)[_-]size|--(?P<option>tp|pp|dp|ep))"
    r"['\"]?[\s=:]+['\"]?(?P<size>\d{1,6})\b"
)
_NAMES = {"tensor": "tp", "pipeline": "pp", "data": "dp", "expert": "ep", "prefill_context": "pcp"}


def coordinates(place: str) -> dict[str, int]:
    """Return the places in groups that a process name holds.

    Example:
        >>> coordinates("Worker_DP1_PP0_TP3_EP11")
        {'DP': 1, 'PP': 0, 'TP': 3, 'EP': 11}
    """
    return {found[1]: int(found[2]) for found in _COORDINATE.finditer(place)}


def is_parent(place: str) -> bool:
    """Return whether a process of this name only hands work out, so that what it raises follows from another one."""
    return _PARENT.match(place) is not None


def sizes_in(text: str) -> dict[str, int]:
    """Return the sizes of groups that a line states.

    Example:
        >>> sizes_in("config: tensor_parallel_size=4, pipeline_parallel_size=2"), sizes_in("--tp 8")
        ({'tp': 4, 'pp': 2}, {'tp': 8})
    """
    found = {}
    for one in _SIZE.finditer(text):
        name = _NAMES.get(one["name"] or "") or one["short"] or one["option"]
        found[name] = int(one["size"])
    return found


#: NeMo-RL's workers (nemo_rl/distributed/worker_groups.py, 0.3 to 0.5): MegatronPolicyWorker[rank=8].
_TOLD = re.compile(r"\[rank=(\d{1,6})\]")


#: A scheduler of SGLang that Ray runs behind an actor's name, as trainers do with many engines.
_IN_ACTOR = re.compile(r"\w*[a-z]\w* (?:ATTN_CP|MOE_DP|DP|PP|CP|TP|EP)\d")


def rank_of(place: str, sizes: Mapping[str, int]) -> int | None:
    """Return the rank of the job behind a process name, None where the name and the sizes do not prove it.

    vLLM (system_utils.py, multiproc_executor.py) leaves out what has the size 1. With data parallelism the engines of a
    mixture of experts, which name their place in the expert group, share one world; dense ones have a world each.
    SGLang (scheduler.py) counts the places in its tensor group over all nodes and replicas.

    Example:
        >>> rank_of("Worker_TP3", {}), rank_of("Worker_DP1_TP3", {}), rank_of("Worker_DP1_TP3_EP11", {})
        (3, None, 11)
        >>> rank_of("Worker_PP1_TP3", {"tp": 4}), rank_of("DP1 TP3 EP3", {}), rank_of("Worker_TP1", {"dp": 8})
        (7, 3, None)
        >>> rank_of("SGLangEngine TP1", {}) is None
        True
    """
    if told := _TOLD.search(place):
        return int(told[1])
    at = coordinates(place)
    if not at.keys() & {"TP", "PP", "DP"} or is_parent(place) or _IN_ACTOR.match(place):
        return None
    if place.startswith("Worker") and "DP" not in at and sizes.get("dp", 1) > 1:
        return None  # of a replica that its name leaves out
    inner: int | None = at.get("TP", 0)
    if "PP" in at or "PCP" in at:
        tensor = 1 if "TP" not in at else sizes.get("tp")
        context = 1 if "PCP" not in at else sizes.get("pcp")
        known = tensor is not None and context is not None
        inner = (at.get("PP", 0) * context + at.get("PCP", 0)) * tensor + at.get("TP", 0) if known else None  # type: ignore[operator]
    if not place.startswith("Worker") or "DP" not in at:
        return inner if at.keys() & {"TP", "PP"} or place.startswith("Worker") else None
    if "EP" not in at:
        return None
    if "PP" not in at:
        return at["EP"]
    world = _product(sizes, [name.lower() for name in ("PP", "PCP", "TP") if name in at])
    return None if inner is None or world is None else at["DP"] * world + inner


_ACTOR = re.compile(r"\w*WorkerDict_(\d+):(\d+)(?!\d)")


def rank_of_actor(name: str, per_node: int | None) -> int | None:
    """Return the rank of an actor of verl (single_controller/ray/base.py), named after its node and place there.

    Example:
        >>> rank_of_actor("k3PzQxWorkerDict_1:3", 8), rank_of_actor("k3PzQxWorkerDict_1:3", None)
        (11, None)
    """
    found = _ACTOR.match(name)
    if found is None:
        return None
    node, place = int(found[1]), int(found[2])
    if node == 0:
        return place
    return None if per_node is None else node * per_node + place


def _product(sizes: Mapping[str, int], names: list[str]) -> int | None:
    total = 1
    for name in names:
        if name not in sizes:
            return None
        total *= sizes[name]
    return total
