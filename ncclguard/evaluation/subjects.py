"""What belongs to an evaluation: the models and loaders that its owner, such as a trainer, or its arguments hold, or
that its code names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader


def named_in(function: Callable[..., Any]) -> tuple[Any, ...]:
    """The objects that the function's own code names: global variables, and those of functions around it.

    Not modules, classes and functions, nor what functions name that it calls.
    """
    plain = inspect.unwrap(getattr(function, "__func__", function))
    try:
        named = inspect.getclosurevars(plain)
    except (TypeError, ValueError):  # not a Python function, or a variable around it has no value yet
        return ()
    values = [*named.nonlocals.values(), *named.globals.values()]
    return tuple(v for v in values if not isinstance(v, (ModuleType, type)) and not inspect.isroutine(v))


def models_of(holders: Iterable[Any]) -> tuple[nn.Module, ...]:
    """Every module that is one of `holders`, or an attribute of one, each once."""
    return _unique(value for value in _values(holders) if isinstance(value, nn.Module))


def loaders_of(holders: Iterable[Any]) -> tuple[Any, ...]:
    """Every DataLoader, or what has a sampler as one has, among `holders` and their attributes, each once."""
    return _unique(value for value in _values(holders) if _is_loader(value))


def _is_loader(value: Any) -> bool:
    return isinstance(value, DataLoader) or (hasattr(type(value), "__iter__") and hasattr(value, "batch_sampler"))


def _values(holders: Iterable[Any]) -> Iterator[Any]:
    for holder in holders:
        yield holder
        attributes = getattr(holder, "__dict__", None)
        if isinstance(holder, nn.Module) or not isinstance(attributes, dict):
            continue
        for value in list(attributes.values()):
            yield value
            if isinstance(value, Mapping):
                yield from list(value.values())
            elif isinstance(value, (list, tuple)):
                yield from value


def _unique(values: Iterable[Any]) -> tuple[Any, ...]:
    found: dict[int, Any] = {}
    for value in values:
        found.setdefault(id(value), value)
    return tuple(found.values())
