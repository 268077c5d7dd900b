"""Qwen2.5-VL with a classification head: transformers has none."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLModel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPreTrainedModel

_MODEL_PARAMETERS = frozenset(inspect.signature(Qwen2_5_VLModel.forward).parameters)
#: What transformers calls the cache, as an argument and in outputs: from 5.24 on, and before.
_CACHE = "cache" if "cache" in _MODEL_PARAMETERS else "past_key_values"


class Qwen2_5_VLForSequenceClassification(Qwen2_5_VLPreTrainedModel):  # type: ignore[misc]
    """Qwen2.5-VL for sequence classification: text, images and videos in, logits out.

    The last token that is no padding goes through a linear layer. ``config.num_labels`` is the number of logits L;
    ``config.problem_type`` chooses the loss as everywhere in transformers (``"regression"``,
    ``"single_label_classification"``, ``"multi_label_classification"``). Where it is None, one logit means regression,
    labels of an integer type with one number an example single label, and other labels multi label.

    ``from_pretrained`` takes a checkpoint of this class, or of Qwen2.5-VL as published: then the head is new.

    >>> from transformers import Qwen2_5_VLConfig
    >>> text = dict(vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...             num_key_value_heads=2, rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]})
    >>> vision = dict(depth=1, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=16)
    >>> config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    >>> config.num_labels = 3
    >>> model = Qwen2_5_VLForSequenceClassification(config)
    >>> model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([2])).logits.shape
    torch.Size([1, 3])
    """

    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]  # noqa: RUF012, as transformers declares it
    _checkpoint_conversion_mapping = getattr(
        Qwen2_5_VLForConditionalGeneration, "_checkpoint_conversion_mapping", {}
    )  # of transformers 4: names in published checkpoints
    accepts_loss_kwargs = False  # the loss is the mean over the batch given, not over accumulated ones

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = Qwen2_5_VLModel(config)
        self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        self.model.set_input_embeddings(value)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        second_per_grid_ts: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Logits of a batch, and its loss if there are labels.

        Shapes: ``input_ids`` (batch, sequence) of token ids, padded left or right; ``attention_mask`` the same, 0 at
        padding (by default padding is where the id is ``pad_token_id``); ``inputs_embeds`` (batch, sequence, hidden) in
        place of ids; ``pixel_values`` (patches, channels x temporal patch x patch x patch) of all images,
        ``image_grid_thw`` (images, 3) in patches, ``second_per_grid_ts`` in seconds, and the same for videos, as the
        processor gives them. ``past_key_values`` and ``cache`` are two names of one argument. ``labels``: (batch,)
        class indices, -100 to leave one out; (batch, L) of 0 and 1; (batch,) or (batch, L) numbers.

        Returns ``SequenceClassifierOutputWithPast`` with ``logits`` (batch, L), or a tuple if ``return_dict`` is False.
        Raises ValueError unless exactly one of ``input_ids`` and ``inputs_embeds`` is given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds has to be given")
        if mm_token_type_ids is None and input_ids is not None:
            image, video = input_ids == self.config.image_token_id, input_ids == self.config.video_token_id
            mm_token_type_ids = image.int() + 2 * video.int()
        optional: dict[str, Any] = {
            _CACHE: past_key_values if cache is None else cache,
            "use_cache": use_cache,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        if "mm_token_type_ids" in _MODEL_PARAMETERS:  # of transformers 5; before, the model looked at the ids itself
            optional["mm_token_type_ids"] = mm_token_type_ids
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            pixel_values=pixel_values,
            pixel_values_videos=pixel_values_videos,
            image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw,
            second_per_grid_ts=second_per_grid_ts,
            return_dict=True,
            **{name: value for name, value in optional.items() if value is not None},
            **kwargs,
        )
        states = outputs.last_hidden_state
        rows = torch.arange(states.shape[0], device=states.device)
        # The head sees one token of each example, not all of them.
        logits = self.score(states[rows, self._last_token(states, input_ids, attention_mask)])
        result = SequenceClassifierOutputWithPast(
            loss=None if labels is None else self._loss(logits, labels.to(logits.device)),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{_CACHE: getattr(outputs, _CACHE)},
        )
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return result if as_dict else result.to_tuple()

    def _last_token(self, states: torch.Tensor, input_ids: Any, attention_mask: Any) -> torch.Tensor:
        """Return the position of each example's last token that is no padding, whichever side the padding is on."""
        length = states.shape[1]
        real = attention_mask if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 else None
        pad = self.config.get_text_config().pad_token_id
        if real is None and input_ids is not None and pad is not None:
            real = input_ids != pad
        if real is None:
            return torch.full(states.shape[:1], length - 1, device=states.device)
        # With a cache the mask is longer: it covers what went before.
        places = torch.arange(length, device=states.device)
        return (places * (real[:, -length:].to(states.device) != 0)).argmax(-1)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch, in float32."""
        logits = logits.float()
        kind = self.config.problem_type
        if kind is None and self.num_labels == 1:
            kind = "regression"
        elif kind is None:
            one_each = labels.numel() == logits.shape[0] and not labels.is_floating_point()
            kind = "single_label_classification" if one_each else "multi_label_classification"
        if kind == "regression":
            return functional.mse_loss(logits, labels.to(logits.dtype).view_as(logits))
        if kind == "single_label_classification":
            return functional.cross_entropy(logits, labels.view(-1))
        if kind == "multi_label_classification":
            return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        raise ValueError(
            f"config.problem_type={kind!r} is unknown: "
            "use regression, single_label_classification or multi_label_classification"
        )


def _know_published_names() -> None:
    """Have transformers 5 map the older names of parameters in published checkpoints, which it does by class name."""
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError:  # transformers 4: `_checkpoint_conversion_mapping` above
        return
    mapping = get_checkpoint_conversion_mapping(Qwen2_5_VLForConditionalGeneration.__name__)
    if mapping is not None:
        register_checkpoint_conversion_mapping(Qwen2_5_VLForSequenceClassification.__name__, mapping, overwrite=True)


_know_published_names()
