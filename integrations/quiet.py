"""Tell the models inside not to collect what their outer model drops, where its own forward has no flag for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableSet
from typing import Any

import torch
from torch import nn

QUIETED = "_slim_handles"  # the attribute of a model that has the handles of its hooks


@torch.compiler.disable  # type: ignore[untyped-decorator]
def quiet(model: nn.Module, flags: list[str], done: MutableSet[nn.Module]) -> None:
    """Set these flags to False in all calls of the transformers models inside ``model``
    that leave them open, and note it in ``done``.
    """
    parts = [part for part in model.modules() if part is not model and passes_keywords_on(type(part))]
    inside = {id(deeper) for part in parts for deeper in part.modules() if deeper is not part}
    vars(model)[QUIETED] = [
        part.register_forward_pre_hook(_Quiet(part, flags), with_kwargs=True)
        for part in parts
        if id(part) not in inside
    ]
    done.add(model)


def unquiet(model: nn.Module) -> None:
    """Undo `quiet`, if it was done."""
    for handle in vars(model).pop(QUIETED, ()):
        handle.remove()


def parameters(function: Callable[..., Any]) -> tuple[dict[str, int], bool]:
    """The parameters after the model by name, with their positions, and whether it takes any keyword."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if names and names[0] == "self":
        del names[0]
    return {name: place for place, name in enumerate(names)}, any(each.kind is each.VAR_KEYWORD for each in parameters)


def passes_keywords_on(kind: type) -> bool:
    """Whether a model passes unknown keywords on to its inner models, as those of transformers and PEFT do."""
    return any(base.__module__.split(".")[0] in ("transformers", "peft") for base in kind.__mro__)


class _Quiet:
    """A hook before an inner model's forward: flags that its caller left open are
    False, in place of what the config says.
    """

    def __init__(self, part: nn.Module, flags: list[str]) -> None:
        positions, takes_any = parameters(type(part).forward)
        self.places = {flag: positions.get(flag) for flag in flags if takes_any or flag in positions}

    def __call__(self, part: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        closed = dict(kwargs)
        for flag, place in self.places.items():
            by_position = place is not None and place < len(args)
            cached = flag == "use_cache" and kwargs.get("past_key_values") is not None
            if not by_position and not cached and kwargs.get(flag) is None:
                closed[flag] = False
        return args, closed
