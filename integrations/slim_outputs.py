"""Slim model outputs: a forward that returns loss and logits alone, and inner models that do not collect the rest.

`slim_outputs` patches a model or a class, and `unpatch` undoes that. A slim forward returns the model's own output type
without the dropped fields, with a `SequenceShape` in place of a tensor whose length is all that a monitor needs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableSet
from typing import Any, TypeVar

import torch
from torch import nn

from ncclguard.errors import GuardConfigError
from ncclguard.spelling import meant
from ncclguard.torch_compat.groups import register_pytree_node
from ncclguard_explain.language import joined, say, told, tr

from .modes import unwrap

Target = TypeVar("Target")

#: The two names of one field, and of the argument that brings it: transformers says "cache" from 5.24 on.
_OLD = frozenset({"past_key_values"})
_CACHE = _OLD | {"cache"}
#: What makes a model of transformers collect which field of its output.
_FLAGS = {
    "output_hidden_states": frozenset({"hidden_states"}),
    "output_attentions": frozenset({"attentions"}),
    "use_cache": _CACHE,
}
#: The fields of the outputs of transformers that a misspelt name of `drop` may mean.
_FIELDS = (
    *(f"{prefix}{name}" for prefix in ("", "encoder_", "decoder_") for name in ("hidden_states", "attentions")),
    *("cross_attentions", "encoder_last_hidden_state", "image_hidden_states", "last_hidden_state"),
    *sorted(_CACHE),
)
#: So alike are a field and a slip of the pen; an output of a model's own may be alike too, but less.
_ALIKE = 0.9
_DROP = ("hidden_states", "attentions", "past_key_values")
#: The attribute of a model that has the handles of the hooks that `quiet` made.
_QUIETED = "_slim_handles"


def slim_outputs(model_or_class: Target, drop: Iterable[str] = _DROP, keep_sequence_length: bool = True) -> Target:
    """Make a model's forward return its output without ``drop``, in training and evaluation; returns the model.

    The inner model is told not to collect what would be dropped, whatever its config says, so the memory is never
    taken. A caller who asks in the call itself (``output_hidden_states=True``, ``output_attentions=True``,
    ``use_cache=True``, or with ``past_key_values`` or ``cache``) gets that. Decisions never look at ``training``, on
    which wrapper and inner module may disagree.

    ``model_or_class`` is a class (its present and future instances), a model, or what DDP, FSDP, DeepSpeed or
    torch.compile made of one: then the model inside is patched. ``drop`` has names of output fields; in an output of
    transformers ``past_key_values`` and ``cache`` are one field, whichever name it has. With
    ``keep_sequence_length`` an output without a ``last_hidden_state`` gets one that has ``size()`` and ``shape``, in
    elements, and no data (`SequenceShape`): of the dropped tensor if there was one, else of ``input_ids``,
    ``inputs_embeds`` or ``attention_mask``.

    A second call replaces the first. Output types of transformers, plain dicts and dataclasses are slimmed; a tuple is
    not. Raises TypeError for what is neither a model nor a class of one, ValueError for a ``drop`` with ``loss`` or
    ``logits``, and GuardConfigError for one with a field of transformers misspelt.

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
        raise TypeError(told("drop={drop} is one string: pass a tuple of names, such as ({drop},)", drop=repr(drop)))
    names = frozenset(drop)
    if names & {"loss", "logits"}:
        raise ValueError(
            told(
                "drop has {some}: a slim output consists of these; leave them out",
                some=sorted(names & {"loss", "logits"}),
            )
        )
    for name in sorted(names.difference(_FIELDS)):
        if near := meant(name, _FIELDS, alike=_ALIKE):
            text = tr("drop has {name}, which no output has", name=repr(name))
            raise GuardConfigError(say(joined(": ", (text, near))))
    target = _target(model_or_class)
    unpatch(target)
    before = vars(target).get("forward")
    is_class = isinstance(target, type)
    if is_class or before is None:
        function = _plain((target if is_class else type(target)).forward)
    else:
        function = _unbound(before, target)
    patch = _Patch(function, names, keep_sequence_length, before)
    # On a model it is a bound method, so that a copy of the model runs its own forward and not this model's.
    target.forward = patch.installed if is_class else types.MethodType(patch.installed, target)
    return model_or_class


def unpatch(model_or_class: Target) -> Target:
    """Give a class or model that `slim_outputs` patched its own forward back, and return the class or model.

    One that was not patched stays as it is. Takes what `slim_outputs` takes and raises the same TypeError. A model
    whose class was patched stays slim: unpatch the class.
    """
    target = _target(model_or_class)
    forward = vars(target).get("forward")
    patch: _Patch | None = getattr(forward, "_slim_patch", None)
    if patch is None:
        return model_or_class
    for model in (target,) if isinstance(target, nn.Module) else tuple(patch.quieted):
        unquiet(model)
    if getattr(forward, "__func__", forward) is not patch.installed:
        patch.active = False  # somebody has wrapped it since: their wrapper stays, and the patch does nothing now
    elif patch.before is None:
        del target.forward
    else:
        target.forward = patch.before
    return model_or_class


class _Patch:
    """One patched forward: what it was, and what it leaves out."""

    def __init__(self, function: Callable[..., Any], drop: frozenset[str], length: bool, before: Any) -> None:
        self.before = before  # the target's own forward, None if it inherited one
        self.active = True
        self.quieted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.installed = self._make(function, drop, length)

    def _make(self, function: Callable[..., Any], drop: frozenset[str], length: bool) -> Callable[..., Any]:
        positions, takes_any = parameters(function)
        flags = [(flag, fields) for flag, fields in _FLAGS.items() if fields & drop]

        @functools.wraps(function)
        def forward(model: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return function(model, *args, **kwargs)
            given = {**dict(zip(positions, args, strict=False)), **kwargs}
            own = passes_keywords_on(type(model))  # elsewhere `cache` may be anything
            asked = set(_CACHE) if brings_cache(given, _CACHE if own else _OLD) else set()
            for flag, fields in flags:
                if given.get(flag) is not None and given[flag] is not False:
                    asked |= fields
            passes_any = takes_any and own
            untold = []
            for flag, fields in flags:
                if flag not in positions and not passes_any:
                    untold.append(flag)
                elif not fields & asked:
                    place = positions.get(flag, len(args))
                    if place < len(args):
                        args = (*args[:place], False, *args[place + 1 :])
                    else:
                        kwargs[flag] = False
            if untold and _QUIETED not in vars(model):
                quiet(model, untold, self.quieted)
            output = function(model, *args, **kwargs)
            dropped = drop.difference(asked)
            return slim_output(output, dropped, dropped_shape(model, given, output) if length else None)

        forward._slim_patch = self  # type: ignore[attr-defined]
        return forward


def _target(model_or_class: Any) -> Any:
    """Return the class, or the model inside its wrappers."""
    if isinstance(model_or_class, type) and issubclass(model_or_class, nn.Module):
        return model_or_class
    inner = unwrap(model_or_class)
    if not isinstance(inner, nn.Module):
        raise TypeError(
            told(
                "{given} is neither a torch.nn.Module nor a class of one: pass the model, its class, or "
                "what DDP, FSDP, DeepSpeed or torch.compile made of it",
                given=repr(model_or_class),
            )
        )
    return inner


def _plain(forward: Any) -> Any:
    """Return a class's forward without the class's patch: the model's own patch says what is dropped."""
    on_top = getattr(getattr(forward, "_slim_patch", None), "installed", None) is forward
    return forward.__wrapped__ if on_top else forward


def _unbound(forward: Any, model: nn.Module) -> Callable[..., Any]:
    """Return a forward that somebody set on the model itself, as a function of the model."""
    if isinstance(forward, types.MethodType) and forward.__self__ is model:
        return forward.__func__

    @functools.wraps(forward)
    def function(_: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return function


# ---------------------------------------------------------------------- inner models that do not collect outputs


@torch.compiler.disable  # type: ignore[untyped-decorator]
def quiet(model: nn.Module, flags: list[str], done: MutableSet[nn.Module]) -> None:
    """Make flags False that calls of the transformers models inside ``model`` leave open; add ``model`` to ``done``."""
    parts = [part for part in model.modules() if part is not model and passes_keywords_on(type(part))]
    inside = {id(deeper) for part in parts for deeper in part.modules() if deeper is not part}
    vars(model)[_QUIETED] = [
        part.register_forward_pre_hook(_Quiet(part, flags), with_kwargs=True)
        for part in parts
        if id(part) not in inside
    ]
    done.add(model)


def unquiet(model: nn.Module) -> None:
    """Undo `quiet`, if it was done."""
    for handle in vars(model).pop(_QUIETED, ()):
        handle.remove()


def parameters(function: Callable[..., Any]) -> tuple[dict[str, int], bool]:
    """Return the parameters after the model by name, with their positions, and whether it takes any keyword."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if names and names[0] == "self":
        del names[0]
    return {name: place for place, name in enumerate(names)}, any(each.kind is each.VAR_KEYWORD for each in parameters)


def passes_keywords_on(kind: type) -> bool:
    """Return whether a model passes unknown keywords on to its inner models, as those of transformers and PEFT do."""
    return any(base.__module__.split(".")[0] in ("transformers", "peft") for base in kind.__mro__)


def brings_cache(given: Mapping[str, Any], names: Iterable[str] = _CACHE) -> bool:
    """Return whether the arguments of a call, by name, have a cache."""
    return any(given.get(name) is not None for name in names)


class _Quiet:
    """A hook before an inner model's forward: flags that its caller left open are False, whatever the config says."""

    def __init__(self, part: nn.Module, flags: list[str]) -> None:
        positions, takes_any = parameters(type(part).forward)
        self.places = {flag: positions.get(flag) for flag in flags if takes_any or flag in positions}

    def __call__(self, part: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        closed = dict(kwargs)
        for flag, place in self.places.items():
            by_position = place is not None and place < len(args)
            cached = flag == "use_cache" and brings_cache(kwargs)
            if not by_position and not cached and kwargs.get(flag) is None:
                closed[flag] = False
        return args, closed


# ---------------------------------------------------------------------- what a slim forward returns


class SequenceShape:
    """The shape of a tensor that was not kept, in place of ``outputs.last_hidden_state``.

    ``size()``, ``size(dim)``, ``shape``, ``dim()`` and ``ndim`` answer as the tensor's would: (batch, sequence) or
    (batch, sequence, hidden), in elements. Whatever else is asked of it raises AttributeError with what to do.

    >>> shape = SequenceShape((8, 2048, 3584))
    >>> shape.size(1), shape.shape[1], shape.ndim
    (2048, 2048, 3)
    """

    def __init__(self, shape: Iterable[int]) -> None:
        self.shape = torch.Size(shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the whole shape, or the elements of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getattr__(self, name: str) -> Any:
        if name == "shape" or name.startswith("__"):  # asked while it is copied or unpickled
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
    """A mixin that `_slim_type` adds to an output type of transformers.

    The `SequenceShape` is an attribute and a dataclass field, never an item: ``items()``, ``to_tuple()`` and with them
    all that gathers or detaches outputs see tensors only, while copies made field by field (FSDP) and through pytrees
    (DDP) keep it.
    """

    _slim_base: Any
    last_hidden_state: Any

    def __init_subclass__(cls) -> None:
        register_pytree_node(cls, _flatten, functools.partial(_unflatten, cls))

    def __post_init__(self) -> None:
        # Replaces ModelOutput's method, which would make the shape an item. Like it, takes one mapping for all fields.
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
    """Return a copy of a model's output without the fields in ``drop``.

    ``shape`` takes the place of a ``last_hidden_state`` that is not there. An output type of transformers becomes a
    subclass of itself; of a plain mapping the keys are left out; in another dataclass that has these fields they are
    None. A tuple or anything else is returned as it is.
    """
    if isinstance(output, OrderedDict) and dataclasses.is_dataclass(output):
        one_name = len(_CACHE & type(output).__dataclass_fields__.keys()) == 1  # a type with both means two things
        left_out = drop | _CACHE if drop & _CACHE and one_name else drop
        kept = {name: value for name, value in output.items() if name not in left_out}
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
    """Return the shape of the last hidden state, from the output, else from the inputs; None if neither says it."""
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
    # Every field is optional, and the shape has a field.
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
    """Make an output with these items, also those that are no fields of its type, as a model may add."""
    output = made(last_hidden_state=last)
    for name, value in items.items():
        output[name] = value
    return output
