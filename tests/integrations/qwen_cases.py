"""A tiny random Qwen2.5-VL and generated inputs for it, shared by the tests and usable in ranks."""

from __future__ import annotations

from typing import Any

import torch

IMAGE, VIDEO, START, END, PAD = 90, 91, 92, 93, 0
PATCH = 3 * 2 * 14 * 14  # channels x temporal patch x patch x patch


def name_of_cache() -> str:
    """What the installed transformers calls the cache in its outputs."""
    from transformers.modeling_outputs import SequenceClassifierOutputWithPast

    return "cache" if "cache" in SequenceClassifierOutputWithPast.__dataclass_fields__ else "past_key_values"


def fat() -> list[str]:
    """The items of an output where the configuration says to return everything."""
    return ["loss", "logits", name_of_cache(), "hidden_states"]


def config(num_labels: int = 3, output_hidden_states: bool = False, attention: str = "", **settings: Any) -> Any:
    """Two layers, 32 wide; two layers of vision. Hidden states are asked of the text model, the one that has them."""
    from transformers import Qwen2_5_VLConfig

    text = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "rope_theta": 10000.0,
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "output_hidden_states": output_hidden_states,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    }
    made = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        **({"attn_implementation": attention} if attention else {}),
    )
    for name, value in {"num_labels": num_labels, **settings}.items():  # transformers 4.57 loses them if passed above
        setattr(made, name, value)
    return made


def classifier(num_labels: int = 3, seed: int = 0, **settings: Any) -> Any:
    """The classifier with random weights, equal in every process."""
    from ncclguard.integrations.qwen2_5_vl import Qwen2_5_VLForSequenceClassification

    torch.manual_seed(seed)
    return Qwen2_5_VLForSequenceClassification(config(num_labels, **settings)).eval()


def checkpointed(model: Any) -> Any:
    """With gradient checkpointing on, under the name that this version of transformers has for it."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def text_batch(batch: int = 2, length: int = 9, seed: int = 1) -> dict[str, torch.Tensor]:
    """Token ids without padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 89, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def image_ids(grid: torch.Tensor, token: int = IMAGE) -> torch.Tensor:
    """Text around one image or video of ``grid`` (1, 3) patches: a merged token for each 2 x 2 of them."""
    tokens = int(grid.prod()) // 4
    return torch.tensor([[7, 8, START, *[token] * tokens, END, 9, 10]])


def vision_batch(kind: str, seed: int = 1) -> dict[str, torch.Tensor]:
    """One example with an image of 4 x 6 patches, or with a video of 2 x 4 x 4."""
    image = kind == "image"
    grid = torch.tensor([[1, 4, 6] if image else [2, 4, 4]])
    pixels = torch.randn(int(grid.prod()), PATCH, generator=torch.Generator().manual_seed(seed))
    ids = image_ids(grid, IMAGE if image else VIDEO)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if image:
        return batch | {"pixel_values": pixels, "image_grid_thw": grid}
    return batch | {
        "pixel_values_videos": pixels,
        "video_grid_thw": grid,
        "second_per_grid_ts": torch.tensor([1.0]),
    }
