"""What a slimmed forward returns: the model's own output type without the dropped
fields, and a length in place of a tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ncclguard._torch import register_pytree_node


class SequenceShape:
    """The shape of a tensor that was not kept: stands in for ``outputs.last_hidden_state``.

    ``size()``, ``size(dim)``, ``shape``, ``dim()`` and ``ndim`` answer as the tensor's would: (batch, sequence) or
    (batch, sequence, hidden), in elements. Whatever else is asked of it raises AttributeError with what to do.

    >>> shape = SequenceShape((8, 2048, 3584))
    >>> shape.size(1), shape.shape[1], shape.ndim
    (2048, 2048, 3)
    """

    def __init__(self, shape: Iterable[int]) -> None:
        self.shape = torch.Size(shape)

    def size(self, dim: int | None = None) -> Any:
        """The whole shape, or the elements of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __getattr__(self, name: str) -> Any:
        if name == "shape" or name.startswith("__"):  # being copied or unpickled: nothing to explain
            raise AttributeError(name)
        raise AttributeError(
            f"the tensor was dropped by slim_outputs, only its shape is here, so it has no {name!r}. "
            "Call the model with output_hidden_states=True to get the tensors, or unpatch() it."
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequenceShape) and other.shape == self.shape

    def __hash__(self) -> int:
        return hash(self.shape)

    def __repr__(self) -> str:
        return f"SequenceShape({tuple(self.shape)})"


class _Slim:
    """What `_slim_type` mixes into an output type of transformers.

    The stand-in is an attribute and a dataclass field, never an item: ``items()``, ``to_tuple()`` and with them all
    that gathers or detaches outputs see tensors only, while copies made field by field (FSDP) and through pytrees (DDP)
    keep it.
    """

    _slim_base: Any
    last_hidden_state: Any

    def __init_subclass__(cls) -> None:
        register_pytree_node(cls, _flatten, functools.partial(_unflatten, cls))

    def __post_init__(self) -> None:
        # In place of ModelOutput's: that would make the stand-in an item. It too takes one mapping for the fields.
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        first = getattr(self, names[0])
        given = dict(first) if isinstance(first, Mapping) else {name: getattr(self, name) for name in names}
        if isinstance(first, Mapping):
            self.clear()  # type: ignore[attr-defined]
            object.__setattr__(self, names[0], None)
        for name, value in given.items():
            if value is not None and not isinstance(value, SequenceShape):
                self[name] = value  # type: ignore[index]

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, SequenceShape):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # The type is made at run time, so pickle could not find it by name.
        return _restore, (self._slim_base, dict(self.items()), self.last_hidden_state)  # type: ignore[attr-defined]


def slim_output(output: Any, drop: frozenset[str], shape: Iterable[int] | None) -> Any:
    """A copy of a model's output without the fields in ``drop``; ``shape`` is stood in for a missing last_hidden_state.

    An output type of transformers becomes a subclass of itself; of a plain mapping the keys are left out; in another
    dataclass that has these fields they are None. A tuple or anything else is returned as it is.
    """
    if isinstance(output, OrderedDict) and dataclasses.is_dataclass(output):
        kept = {name: value for name, value in output.items() if name not in drop}
        last = kept.pop("last_hidden_state", None)
        if last is None and shape is not None:
            last = SequenceShape(shape)
        return _build(_slim_type(type(output)), kept, last)
    if isinstance(output, dict):
        return type(output)((name, value) for name, value in output.items() if name not in drop)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        present = {field.name for field in dataclasses.fields(output)}
        return dataclasses.replace(output, **dict.fromkeys(drop & present))
    return output


def dropped_shape(model: Any, given: Mapping[str, Any], output: Any) -> tuple[int, ...] | None:
    """The shape of the last hidden state, from the output if it is there, else from the
    inputs; None if neither says it.
    """
    fields = output if isinstance(output, Mapping) else vars(output) if dataclasses.is_dataclass(output) else {}
    last = fields.get("last_hidden_state")
    states = fields.get("hidden_states")
    if last is None and isinstance(states, (tuple, list)) and states:
        last = states[-1]
    for tensor in (last, given.get("inputs_embeds")):
        if isinstance(tensor, torch.Tensor):
            return tuple(tensor.shape)
    for name in ("input_ids", "attention_mask"):
        tensor = given.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.ndim == 2:
            config = getattr(model, "config", None)
            hidden = getattr(getattr(config, "text_config", config), "hidden_size", None)
            return (*tensor.shape, hidden) if isinstance(hidden, int) else tuple(tensor.shape)
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a type made once for each output type: nothing for a graph
def _slim_type(base: Any) -> Any:
    return _make_slim_type(getattr(base, "_slim_base", base))


@functools.cache
def _make_slim_type(base: Any) -> Any:
    # Every field may be missing, and there is one for the stand-in.
    names = [field.name for field in dataclasses.fields(base) if field.default is dataclasses.MISSING]
    if "last_hidden_state" not in base.__dataclass_fields__:
        names.append("last_hidden_state")
    added = {**dict.fromkeys(names), "__annotations__": dict.fromkeys(names, Any)}
    added |= {"__doc__": f"{base.__name__} without what slim_outputs drops.", "_slim_base": base}
    made = type(f"Slim{base.__name__}", (_Slim, base), {"__module__": __name__, **added})
    return dataclasses.dataclass(made)


def _flatten(output: Any) -> tuple[list[Any], tuple[tuple[str, ...], Any]]:
    last = output.last_hidden_state
    return list(output.values()), (tuple(output.keys()), last if isinstance(last, SequenceShape) else None)


def _unflatten(made: Any, values: Iterable[Any], context: tuple[tuple[str, ...], Any]) -> Any:
    names, last = context
    return _build(made, dict(zip(names, values, strict=True)), last)


def _restore(base: Any, items: Mapping[str, Any], last: Any) -> Any:
    return _build(_slim_type(base), items, last)


def _build(made: Any, items: Mapping[str, Any], last: Any) -> Any:
    """An output with these items, also those that are no fields of its type, as a model may add."""
    output = made(last_hidden_state=last)
    for name, value in items.items():
        output[name] = value
    return output
