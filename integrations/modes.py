"""Train and evaluation mode that wrapper and inner module agree on, whatever the wrapping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from ncclguard_explain.language import told

Model = TypeVar("Model")

#: Where a wrapper keeps what it wraps: DDP, FSDP 1 and DeepSpeed's engine;
#: torch.compile; Accelerate's holder of an engine.
_INNER = ("module", "_orig_mod", "engine")


def set_eval_mode(model: Model) -> Model:
    """Put a model into evaluation mode, the wrapper as well as what it wraps, and return it.

    ``model.eval()`` is not enough everywhere: DeepSpeed's engine (0.19) passes it on and leaves its own ``training``
    True, and an object that is no ``nn.Module`` may not pass it on at all. Each layer's own ``train()`` is called, so a
    model that overrides it to keep a frozen part in evaluation mode keeps it there.

    Raises TypeError if neither ``model`` nor anything it wraps is an ``nn.Module``.

    >>> from torch import nn
    >>> set_eval_mode(nn.Sequential(nn.Dropout())).training
    False
    """
    return _set_mode(model, False)


def set_train_mode(model: Model) -> Model:
    """Put a model into training mode, the wrapper as well as what it wraps, and return it: see `set_eval_mode`.

    >>> from torch import nn
    >>> set_train_mode(nn.Sequential(nn.Dropout()).eval()).training
    True
    """
    return _set_mode(model, True)


def unwrap(model: Any) -> Any:
    """Return the model inside DDP, FSDP 1, DeepSpeed's engine, torch.compile or several of them, or the model itself.

    >>> from torch import nn
    >>> inner = nn.Linear(2, 2)
    >>> unwrap(nn.DataParallel(inner)) is inner
    True
    """
    *_, inner = _layers(model)
    return inner


def _layers(model: Any) -> Iterator[Any]:
    """The model, what it wraps, what that wraps, and so on."""
    seen: set[int] = set()
    layer: Any = model
    while layer is not None and id(layer) not in seen:
        seen.add(id(layer))
        yield layer
        layer = _inner(layer)


def _inner(layer: Any) -> Any:
    """Return the module inside a wrapper, or None; a child of a module that is no wrapper does not count."""
    if not isinstance(layer, nn.Module):  # a holder, such as Accelerate's of an engine
        found = (getattr(layer, name, None) for name in (*_INNER, "model"))
        return next((inner for inner in found if isinstance(inner, nn.Module)), None)
    known = type(layer).__module__.split(".")[0] in ("torch", "deepspeed", "accelerate")
    for name in _INNER:
        inner = getattr(layer, name, None)
        if isinstance(inner, nn.Module) and (known or [*layer.children()] == [inner]):
            return inner
    return None


def _set_mode(model: Model, training: bool) -> Model:
    layers = [layer for layer in _layers(model) if isinstance(layer, nn.Module)]
    if not layers:
        raise TypeError(
            told(
                "{name} is no torch.nn.Module and wraps none under {some}. Pass the model, or what DDP, FSDP, "
                "DeepSpeed or torch.compile made of it.",
                name=type(model).__name__,
                some=", ".join((*_INNER, "model")),
            )
        )
    for layer in layers:
        layer.train(training)
    # From the inside out, each wrapper takes over the mode that its inner module really
    # took. A wrapper that some other module holds as a part is among them.
    for module in (*reversed([*layers[0].modules()]), *reversed([*_layers(model)])):
        inner = _inner(module)
        if inner is not None and hasattr(module, "training"):
            module.training = inner.training
    return model
