"""Sizes of a few well-known models, as in their published `config.json`, for naming a parameter by its size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
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
    """Return the built-in table."""
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
        raise ValueError(
            f"the model config lacks a usable {error}; hidden_size, intermediate_size and the like are needed"
        ) from error


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
            raise ValueError(f"{argument}: not a readable JSON file ({error})") from error
        if not isinstance(data, Mapping):
            raise ValueError(f"{argument}: the model config is no JSON object")
        return sizes_from_config(path.parent.name or argument, data)
    name = argument.rsplit("/", 1)[-1].lower()
    for model in known_models():
        if name == model.name or name.startswith(model.name + "-"):
            return model
    raise ValueError(f"{argument}: no such file, and not in the built-in table: {', '.join(_TABLE)}")
