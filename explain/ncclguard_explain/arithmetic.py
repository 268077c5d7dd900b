"""Say what a collective's element count is: a ZeRO gradient bucket, one parameter, a layer, a flag.

The sizes of a few well-known models are in the table, as in their published `config.json`.

DeepSpeed ZeRO-1/2 flushes its gradient bucket before adding a gradient would exceed `reduce_bucket_size`
(stage_1_and_2.py, `reduce_independent_p_g_buckets_and_remove_grads`, 0.19), so a bucket is the longest run of
gradients, in the order in which backward produces them, that fits. ZeRO-3 and FSDP gather parameters, so there the
gathered count names a parameter or layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclguard_explain.facts import Work
from ncclguard_explain.language import Message, joined, tr

DEFAULT_BUCKET = 500_000_000  # DeepSpeed's default of reduce_bucket_size, elements
MAX_LABELS = 4096


@dataclass(frozen=True)
class ModelSizes:
    """The figures of a decoder that its parameters' shapes follow from; all counts are elements."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    qkv_bias: bool = False
    tied: bool = False

    def layer_parameters(self) -> list[tuple[str, int]]:
        """Return (name, elements) of one decoder layer in the order in which its gradients become ready."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = [
            ("mlp.down_proj.weight", self.hidden * self.intermediate),
            ("mlp.up_proj.weight", self.hidden * self.intermediate),
            ("mlp.gate_proj.weight", self.hidden * self.intermediate),
            ("post_attention_layernorm.weight", self.hidden),
            ("self_attn.o_proj.weight", self.hidden * query),
        ]
        for part, size in (("v", key), ("k", key), ("q", query)):
            if self.qkv_bias:
                rows.append((f"self_attn.{part}_proj.bias", size))
            rows.append((f"self_attn.{part}_proj.weight", self.hidden * size))
        return [*rows, ("input_layernorm.weight", self.hidden)]

    @property
    def layer(self) -> int:
        return sum(size for _, size in self.layer_parameters())

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden


# name: hidden, intermediate, layers, heads, kv heads, head dim, vocabulary, bias of q, k, v, tied embedding
_TABLE: dict[str, tuple[int, int, int, int, int, int, int, bool, bool]] = {
    "qwen2.5-vl-3b": (2048, 11008, 36, 16, 2, 128, 151936, True, True),
    "qwen2.5-vl-7b": (3584, 18944, 28, 28, 4, 128, 152064, True, False),
    "qwen2.5-vl-32b": (5120, 27648, 64, 40, 8, 128, 152064, True, False),
    "qwen2.5-vl-72b": (8192, 29568, 80, 64, 8, 128, 152064, True, False),
    "qwen2-vl-2b": (1536, 8960, 28, 12, 2, 128, 151936, True, True),
    "qwen2-vl-7b": (3584, 18944, 28, 28, 4, 128, 152064, True, False),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 64, 151936, True, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 128, 151936, True, True),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, 128, 152064, True, False),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151936, False, False),
    "llama-2-7b": (4096, 11008, 32, 32, 32, 128, 32000, False, False),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 128, 32000, False, False),
    "llama-2-70b": (8192, 28672, 80, 64, 8, 128, 32000, False, False),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128, 128256, False, False),
    "llama-3-70b": (8192, 28672, 80, 64, 8, 128, 128256, False, False),
    "mistral-7b": (4096, 14336, 32, 32, 8, 128, 32000, False, False),
}


def known_models() -> list[ModelSizes]:
    return [ModelSizes(name, *figures) for name, figures in _TABLE.items()]


def sizes_from_config(name: str, config: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes of a Hugging Face `config.json`, its text part where there is one.

    Raises:
        ValueError: a figure is missing.
    """
    text = config.get("text_config")
    figures = {**config, **text} if isinstance(text, Mapping) else dict(config)
    try:
        hidden, heads = int(figures["hidden_size"]), int(figures["num_attention_heads"])
        return ModelSizes(
            name=name,
            hidden=hidden,
            intermediate=int(figures["intermediate_size"]),
            layers=int(figures["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(figures.get("num_key_value_heads") or heads),
            head_dim=int(figures.get("head_dim") or hidden // heads),
            vocab=int(figures["vocab_size"]),
            qkv_bias=bool(figures.get("attention_bias", str(figures.get("model_type", "")).startswith("qwen2"))),
            tied=bool(figures.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        refusal = tr(
            "the model config lacks a usable {error}; hidden_size, intermediate_size and the like are needed",
            error=error,
        )
        raise ValueError(refusal) from error


def find_model(argument: str) -> ModelSizes:
    """Return the sizes behind `--model`: a name of the table, a config.json, or the folder that holds one.

    Of a name only the part after the last slash counts, in any case, with any suffix such as "-instruct".

    Raises:
        ValueError: neither.

    Example:
        >>> find_model("Qwen/Qwen2.5-VL-7B-Instruct").hidden
        3584
    """
    path = Path(argument)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.is_file():
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            refusal = tr("{argument}: not a readable JSON file ({error})", argument=argument, error=error)
            raise ValueError(refusal) from error
        if not isinstance(data, Mapping):
            raise ValueError(tr("{argument}: the model config is no JSON object", argument=argument))
        return sizes_from_config(path.parent.name or argument, data)
    name = argument.rsplit("/", 1)[-1].lower()
    for model in known_models():
        if name == model.name or name.startswith(model.name + "-"):
            return model
    text = tr(
        "{argument}: no such file, and not in the built-in table: {models}",
        argument=argument,
        models=", ".join(_TABLE),
    )
    raise ValueError(text)


def read_deepspeed(path: str) -> Mapping[str, object]:
    """Return the `zero_optimization` section of a DeepSpeed config.

    Raises:
        ValueError: not readable, or no JSON object.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(tr("{path}: not a readable DeepSpeed config ({error})", path=path, error=error)) from error
    section = data.get("zero_optimization", {}) if isinstance(data, Mapping) else None
    if not isinstance(section, Mapping):
        raise ValueError(tr("{path}: the DeepSpeed config, or its zero_optimization, is no JSON object", path=path))  # noqa: TRY004
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
        >>> from ncclguard_explain.arithmetic import find_model
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
            names: Message = tr("{first} to {last}", first=last, last=last - full + 1)
            if full <= 3:
                names = joined(" and ", (str(last - index) for index in range(full)))
            values: dict[str, Any] = {"head": head, "norm": model.hidden, "names": names, "count": full * model.layer}
            bucket = tr("{head}final norm {norm:,} + decoder layers {names} ({count:,})", **values)
            if full == 1:
                bucket = tr("{head}final norm {norm:,} + decoder layer {names} ({count:,})", **values)
            if not done:
                return bucket
            return tr("{bucket} + {count} tensors of layer {layer}", bucket=bucket, count=done, layer=last - full)
    return None


def parameter(numel: int, model: ModelSizes, group: int = 1) -> str | None:
    """Return the parameter or layer of `numel` elements; up to `group` - 1 elements of padding are allowed for."""
    rows: list[tuple[str, int, str]] = [
        (tr("embedding or lm_head"), model.embedding, f"{model.vocab} x {model.hidden}")
    ]
    rows += [(name, size, "") for name, size in model.layer_parameters() if size > model.hidden]
    rows.append((tr("one whole decoder layer"), model.layer, ""))
    for name, size, shape in rows:
        if 0 <= numel - size < max(group, 1):
            return tr("{name} ({shape})", name=name, shape=shape) if shape else name
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
        what = tr("1 element") if numel == 1 else tr("{count} elements", count=numel)
        return [tr("{elements}: a flag, a metric or a barrier, not data; ask what rank 0 printed last", elements=what)]
    group = max(sizes) // min(sizes) if len(sizes) == 2 and max(sizes) % min(sizes) == 0 else 1
    if model is not None:
        one = _one_model(numel, op, group, model, zero)
        found: list[str] = [one] if one else []
    else:
        readings = ((_one_model(numel, op, group, one, zero), one.name) for one in known_models())
        matches = [(known, name) for known, name in readings if known][:2]
        found = [tr("{known} (if the model is {model})", known=known, model=name) for known, name in matches]
    if not found and "ALLREDUCE" in op.replace("_", "") and numel > 10_000_000:
        limit = bucket_limit(zero, model)
        size = tr(
            "{count:,} elements in one all-reduce has the size of a gradient bucket, under the limit of {limit:,}",
            count=numel,
            limit=limit,
        )
        if numel > limit:
            size = tr(
                "{count:,} elements in one all-reduce has the size of a gradient bucket: above the limit of {limit:,}, "
                "so one gradient that goes alone",
                count=numel,
                limit=limit,
            )
        found.append(tr("{size}: ranks were in backward; it is no activation", size=size))
    return found


def _one_model(numel: int, op: str, group: int, model: ModelSizes, zero: Mapping[str, object] | None) -> str | None:
    flat = op.replace("_", "")
    limit = bucket_limit(zero, model)
    if "ALLREDUCE" in flat:
        bucket = first_bucket(numel, model, limit)
        if bucket:
            return tr(
                "{count:,} elements is a ZeRO gradient bucket (limit {limit:,}): {bucket}. It is the first bucket of a "
                "backward pass: ranks were in backward, it is not an activation, and the rank that is awaited had not "
                "come to this backward",
                count=numel,
                limit=limit,
                bucket=bucket,
            )
    name = parameter(numel, model, group)
    if name is None:
        return None
    if "ALLREDUCE" in flat:
        return tr("{numel:,} elements is the gradient of {name}: ranks were in backward", numel=numel, name=name)
    if "REDUCESCATTER" in flat:
        return tr(
            "{numel:,} elements is the gradient of {name}, scattered over {group} ranks: ranks were in backward",
            numel=numel,
            name=name,
            group=group,
        )
    if "ALLGATHER" in flat:
        return tr(
            "{numel:,} elements is {name}, gathered from {group} ranks (ZeRO-3 or FSDP)",
            numel=numel,
            name=name,
            group=group,
        )
    return tr("{numel:,} elements has the size of {name}", numel=numel, name=name)
