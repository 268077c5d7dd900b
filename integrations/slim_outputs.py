"""A forward that returns loss and logits alone, and an inner model that does not collect what would be dropped."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from .modes import unwrap
from .quiet import QUIETED, parameters, passes_keywords_on, quiet, unquiet
from .slim_types import dropped_shape, slim_output

Target = TypeVar("Target")

#: What makes a model of transformers collect a field of its output.
_FLAGS = {"hidden_states": "output_hidden_states", "attentions": "output_attentions", "past_key_values": "use_cache"}
_DROP = tuple(_FLAGS)


def slim_outputs(model_or_class: Target, drop: Iterable[str] = _DROP, keep_sequence_length: bool = True) -> Target:
    """Make a model's forward return its output without ``drop``, in training and in
    evaluation alike, and return the model.

    The inner model is told not to collect what would be dropped, whatever its config says, so the memory is never
    taken. A caller who asks in the call itself (``output_hidden_states=True``, ``output_attentions=True``,
    ``use_cache=True``, or with ``past_key_values``) gets that. Decisions never look at ``training``, on which wrapper
    and inner module may disagree.

    ``model_or_class`` is a class (its present and future instances), a model, or what DDP, FSDP, DeepSpeed or
    torch.compile made of one: then the model inside is patched. ``drop`` has names of output fields. With
    ``keep_sequence_length`` an output without a ``last_hidden_state`` gets one that has ``size()`` and ``shape``, in
    elements, and no data (`SequenceShape`): of the dropped tensor if there was one, else of ``input_ids``,
    ``inputs_embeds`` or ``attention_mask``.

    A second call replaces the first. Output types of transformers, plain dicts and dataclasses are slimmed; a tuple is
    not. Raises TypeError for what is neither a model nor a class of one, and ValueError for a ``drop`` with ``loss`` or
    ``logits``.

    >>> import torch
    >>> class Classifier(nn.Module):
    ...     def forward(self, input_ids, output_hidden_states=True):
    ...         states = torch.zeros(*input_ids.shape, 4)
    ...         return {"logits": states[:, -1], **({"hidden_states": (states,)} if output_hidden_states else {})}
    >>> model = slim_outputs(Classifier())
    >>> list(model(torch.ones(2, 7)))
    ['logits']
    >>> list(unpatch(model)(torch.ones(2, 7)))
    ['logits', 'hidden_states']
    """
    if isinstance(drop, str):
        raise TypeError(f"drop={drop!r} is one string: pass a tuple of names, such as ({drop!r},)")
    names = frozenset(drop)
    if names & {"loss", "logits"}:
        raise ValueError(
            f"drop has {sorted(names & {'loss', 'logits'})}: a slim output consists of these; leave them out"
        )
    target = _target(model_or_class)
    unpatch(target)
    before = vars(target).get("forward")
    is_class = isinstance(target, type)
    if is_class or before is None:
        function = _plain((target if is_class else type(target)).forward)
    else:
        function = _unbound(before, target)
    patch = _Patch(function, names, keep_sequence_length, before)
    # To a model a bound method, because a copy of the model then runs its own forward and not this one's.
    target.forward = patch.installed if is_class else types.MethodType(patch.installed, target)
    return model_or_class


def unpatch(model_or_class: Target) -> Target:
    """Give a class or model that `slim_outputs` patched its own forward back, and
    return it; harmless if it was not patched.

    Takes what `slim_outputs` takes and raises the same TypeError. A model whose class was patched stays slim: unpatch
    the class.
    """
    target = _target(model_or_class)
    forward = vars(target).get("forward")
    patch: _Patch | None = getattr(forward, "_slim_patch", None)
    if patch is None:
        return model_or_class
    for model in (target,) if isinstance(target, nn.Module) else tuple(patch.quieted):
        unquiet(model)
    if getattr(forward, "__func__", forward) is not patch.installed:
        patch.active = (
            False  # somebody wrapped it since and took the mark along: theirs has to stay, ours does nothing now
        )
    elif patch.before is None:
        del target.forward
    else:
        target.forward = patch.before
    return model_or_class


class _Patch:
    """One patched forward: what it was, and what it leaves out."""

    def __init__(self, function: Callable[..., Any], drop: frozenset[str], length: bool, before: Any) -> None:
        self.before = before  # what the target itself had, None if it inherited its forward
        self.active = True
        self.quieted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.installed = self._make(function, drop, length)

    def _make(self, function: Callable[..., Any], drop: frozenset[str], length: bool) -> Callable[..., Any]:
        positions, takes_any = parameters(function)
        flags = [(field, flag) for field, flag in _FLAGS.items() if field in drop]

        @functools.wraps(function)
        def forward(model: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return function(model, *args, **kwargs)
            given = {**dict(zip(positions, args, strict=False)), **kwargs}
            asked = [field for field, flag in flags if given.get(flag) is not None and given[flag] is not False]
            if given.get("past_key_values") is not None:
                asked.append("past_key_values")
            passes_any = takes_any and passes_keywords_on(type(model))
            untold = []
            for field, flag in flags:
                if flag not in positions and not passes_any:
                    untold.append(flag)
                elif field not in asked:
                    place = positions.get(flag, len(args))
                    if place < len(args):
                        args = (*args[:place], False, *args[place + 1 :])
                    else:
                        kwargs[flag] = False
            if untold and QUIETED not in vars(model):
                quiet(model, untold, self.quieted)
            output = function(model, *args, **kwargs)
            dropped = drop.difference(asked)
            return slim_output(output, dropped, dropped_shape(model, given, output) if length else None)

        forward._slim_patch = self  # type: ignore[attr-defined]
        return forward


def _target(model_or_class: Any) -> Any:
    """The class, or the model inside its wrappers."""
    if isinstance(model_or_class, type) and issubclass(model_or_class, nn.Module):
        return model_or_class
    inner = unwrap(model_or_class)
    if not isinstance(inner, nn.Module):
        raise TypeError(
            f"{model_or_class!r} is neither a torch.nn.Module nor a class of one: "
            "pass the model, its class, or what DDP, FSDP, DeepSpeed or torch.compile made of it"
        )
    return inner


def _plain(forward: Any) -> Any:
    """A class's forward, without the patch that the class may have: the model's own patch says what is dropped."""
    on_top = getattr(getattr(forward, "_slim_patch", None), "installed", None) is forward
    return forward.__wrapped__ if on_top else forward


def _unbound(forward: Any, model: nn.Module) -> Callable[..., Any]:
    """A forward that somebody set on the model itself, as a function of the model."""
    if isinstance(forward, types.MethodType) and forward.__self__ is model:
        return forward.__func__

    @functools.wraps(forward)
    def function(_: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return function
