"""Qwen2.5-VL for classification, with slim outputs and modes that agree, in one place.

transformers is imported when `Qwen2_5_VLForSequenceClassification` is first asked for, and by no other name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .modes import set_eval_mode, set_train_mode
from .slim_outputs import SequenceShape, slim_outputs, unpatch

if TYPE_CHECKING:
    from .qwen2_5_vl_classifier import Qwen2_5_VLForSequenceClassification

__all__ = [
    "Qwen2_5_VLForSequenceClassification",
    "SequenceShape",
    "set_eval_mode",
    "set_train_mode",
    "slim_outputs",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    if name != "Qwen2_5_VLForSequenceClassification":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .qwen2_5_vl_classifier import Qwen2_5_VLForSequenceClassification
    except ImportError as error:
        raise ImportError(
            f"{name} needs transformers 4.52 or newer with Qwen2.5-VL ({error}): pip install 'ncclguard[transformers]'"
        ) from error
    return Qwen2_5_VLForSequenceClassification
