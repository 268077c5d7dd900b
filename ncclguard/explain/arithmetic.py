"""Say what a collective's element count is: a ZeRO gradient bucket, one parameter, a layer, a flag.

DeepSpeed ZeRO-1/2 flushes its gradient bucket before adding a gradient would exceed `reduce_bucket_size`
(stage_1_and_2.py, `reduce_independent_p_g_buckets_and_remove_grads`, 0.19), so a bucket is the longest run of
gradients, in the order in which backward produces them, that fits. ZeRO-3 and FSDP gather parameters, so there the
gathered count names a parameter or layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ncclguard.explain.facts import Work
from ncclguard.explain.model_table import ModelSizes, known_models

DEFAULT_BUCKET = 500_000_000  # DeepSpeed's default of reduce_bucket_size, elements
MAX_LABELS = 4096


def read_deepspeed(path: str) -> Mapping[str, object]:
    """Return the `zero_optimization` section of a DeepSpeed config.

    Raises:
        ValueError: not readable, or no JSON object.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable DeepSpeed config ({error})") from error
    section = data.get("zero_optimization", {}) if isinstance(data, Mapping) else None
    if not isinstance(section, Mapping):
        raise ValueError(f"{path}: the DeepSpeed config, or its zero_optimization, is no JSON object")  # noqa: TRY004
    return section


def bucket_limit(zero: Mapping[str, object] | None, model: ModelSizes | None) -> int:
    """Return reduce_bucket_size in elements; "auto" is hidden_size squared, as transformers fills it in."""
    raw = (zero or {}).get("reduce_bucket_size")
    if raw == "auto" and model is not None:
        return model.hidden**2
    return int(raw) if isinstance(raw, (int, float)) else DEFAULT_BUCKET


def _head(rest: int, model: ModelSizes) -> str | None:
    """Return what a remainder in front of the decoder's gradients is: nothing, or a linear head with so many labels."""
    if rest == 0:
        return ""
    for width, bias in ((model.hidden + 1, " with bias"), (model.hidden, "")):
        labels, left = divmod(rest, width)
        if left == 0 and 1 <= labels <= MAX_LABELS:
            return f"Linear({model.hidden} -> {labels}{', bias' if bias else ''}) {rest:,} + "
    return None


def first_bucket(numel: int, model: ModelSizes, limit: int) -> str | None:
    """Return how `numel` elements are the first gradient bucket of a backward pass, or None when they are not.

    Example:
        >>> from ncclguard.explain.model_table import find_model
        >>> first_bucket(467_019_003, find_model("qwen2.5-vl-7b"), 500_000_000)
        'Linear(3584 -> 251, bias) 899,835 + final norm 3,584 + decoder layers 27 and 26 (466,115,584)'
    """
    order = model.layer_parameters()
    layers = (numel - model.hidden) // model.layer
    for full in range(min(layers, model.layers), 0, -1):
        rest = numel - full * model.layer - model.hidden
        for done in range(len(order)):
            part = sum(size for _, size in order[:done])
            head = _head(rest - part, model) if rest >= part else None
            if head is None or numel > limit or numel + order[done][1] <= limit:
                continue
            last = model.layers - 1
            names = (
                " and ".join(str(last - index) for index in range(full))
                if full <= 3
                else f"{last} to {last - full + 1}"
            )
            some = f" + {done} tensors of layer {last - full}" if done else ""
            layer = "layers" if full > 1 else "layer"
            return f"{head}final norm {model.hidden:,} + decoder {layer} {names} ({full * model.layer:,}){some}"
    return None


def parameter(numel: int, model: ModelSizes, group: int = 1) -> str | None:
    """Return the parameter or layer of `numel` elements; up to `group` - 1 elements of padding are allowed for."""
    rows = [("embedding or lm_head", model.embedding, f"{model.vocab} x {model.hidden}")]
    rows += [(name, size, "") for name, size in model.layer_parameters() if size > model.hidden]
    rows.append(("one whole decoder layer", model.layer, ""))
    for name, size, shape in rows:
        if 0 <= numel - size < max(group, 1):
            return f"{name}{f' ({shape})' if shape else ''}"
    return None


def explain_numel(work: Work, model: ModelSizes | None = None, zero: Mapping[str, object] | None = None) -> list[str]:
    """Return sentences about what the collective carries; an empty list when arithmetic says nothing.

    With no model given the built-in table is tried, and a match is called one of several readings.
    """
    sizes = [size for size in (work.numel_in, work.numel_out) if size]
    if not sizes or work.op is None:
        return []
    numel, op = max(sizes), work.op.upper()
    if numel <= 8:
        return [
            (
                f"{numel} element{'s' if numel > 1 else ''}: a flag, a metric or a barrier, not data; ask what rank "
                f"0 printed last"
            )
        ]
    found: list[str] = []
    group = max(sizes) // min(sizes) if len(sizes) == 2 and max(sizes) % min(sizes) == 0 else 1
    for candidate in [model] if model is not None else known_models():
        known = _one_model(numel, op, group, candidate, zero)
        if known:
            found.append(known if model is not None else f"{known} (if the model is {candidate.name})")
    if model is None and len(found) > 2:
        found = found[:2]
    if not found and "ALLREDUCE" in op.replace("_", "") and numel > 10_000_000:
        limit = bucket_limit(zero, model)
        near = (
            f", under the limit of {limit:,}"
            if numel <= limit
            else f": above the limit of {limit:,}, so one gradient that goes alone"
        )
        found.append(
            f"{numel:,} elements in one all-reduce has the size of a gradient bucket{near}: ranks were in "
            f"backward; it is no activation"
        )
    return found


def _one_model(numel: int, op: str, group: int, model: ModelSizes, zero: Mapping[str, object] | None) -> str | None:
    flat = op.replace("_", "")
    limit = bucket_limit(zero, model)
    if "ALLREDUCE" in flat:
        bucket = first_bucket(numel, model, limit)
        if bucket:
            return (
                f"{numel:,} elements is a ZeRO gradient bucket (limit {limit:,}): {bucket}. It is the first "
                f"bucket of a backward pass: "
                "ranks were in backward, it is not an activation, and the rank that is awaited had not come to "
                "this backward"
            )
    name = parameter(numel, model, group)
    if name is None:
        return None
    if "ALLREDUCE" in flat:
        return f"{numel:,} elements is the gradient of {name}: ranks were in backward"
    if "REDUCESCATTER" in flat:
        return f"{numel:,} elements is the gradient of {name}, scattered over {group} ranks: ranks were in backward"
    if "ALLGATHER" in flat:
        return f"{numel:,} elements is {name}, gathered from {group} ranks (ZeRO-3 or FSDP)"
    return f"{numel:,} elements has the size of {name}"
