"""The state that a failed evaluation or training step must leave as it was, and how to restore it.

The state is the modes and gradients of models, random numbers, and the positions of loaders. The models and loaders
are those that the evaluation's owner, such as a trainer, or its arguments hold, or that its code names.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import logging
import operator
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ncclguard import torch_compat
from ncclguard_explain.language import told

log = logging.getLogger("ncclguard")

Restore = Callable[[], None]


class Keeper(Protocol):
    """A function that remembers a part of the state, and returns a function that restores that part."""

    def __call__(self) -> Restore: ...


def keep(keepers: Iterable[Keeper]) -> Restore:
    """Remember the state now; the returned function restores it, as often as it is called, last kept first.

    Never raises, because the other ranks may be waiting for this one: a keeper that raises is logged, and the other
    keepers do their part.
    """
    restores: list[Restore] = []
    for keeper in keepers:
        try:
            restores.append(keeper())
        except Exception:
            log.exception(
                "ncclguard: %s", told("a part of the state cannot be kept; a try that fails may change it", "log")
            )

    def restore() -> None:
        for step in reversed(restores):
            try:
                step()
            except Exception:
                log.exception(
                    "ncclguard: %s", told("a part of the state was not restored after a try that failed", "log")
                )

    return restore


def modes(modules: Iterable[nn.Module]) -> Keeper:
    """Return a keeper of the train or eval mode of every module inside the given ones, wrappers included.

    The attribute itself is set: `train()` of a wrapper may do more, or less, than its name says. DeepSpeed 0.19's
    `engine.eval()` leaves `engine.training` True.
    """
    inside = _Inside(modules)

    def keeper() -> Restore:
        found = inside.modules()
        flags = [module.training for module in found]

        def restore() -> None:
            for module, training in zip(found, flags, strict=True):
                module.training = training

        return restore

    return keeper


class _Inside:
    """All modules inside the given ones, which are walked again only when one was added, taken away or replaced."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._roots = tuple(roots)
        self._found: list[nn.Module] = []
        self._children: list[Mapping[str, nn.Module]] = []
        self._known: list[tuple[nn.Module, ...]] = []

    def modules(self) -> list[nn.Module]:
        """Return each module once; the list is never changed, but replaced."""
        if not self._found or [tuple(named.values()) for named in self._children] != self._known:
            self._found = list(dict.fromkeys(module for root in self._roots for module in root.modules()))
            self._children = [torch_compat.children_of(module) for module in self._found]
            self._known = [tuple(named.values()) for named in self._children]
        return self._found


def gradients(modules: Iterable[nn.Module]) -> Keeper:
    """Return a keeper of the gradients: the tensor of each parameter, and whether gradients are computed at all.

    The tensors are not copied: an evaluation that writes into one is warned of, because that cannot be undone.
    """
    roots = tuple(modules)

    def keeper() -> Restore:
        enabled = torch.is_grad_enabled()
        parameters = {id(p): p for root in roots for p in root.parameters()}.values()
        grads = [
            (p, p.grad, -1 if p.grad is None else torch_compat.version_of(p.grad), p.requires_grad) for p in parameters
        ]

        def restore() -> None:
            torch.set_grad_enabled(enabled)
            written = 0
            for parameter, grad, version, required in grads:
                if parameter.grad is not grad:
                    parameter.grad = grad
                written += grad is not None and torch_compat.version_of(grad) != version
                if parameter.requires_grad != required:
                    parameter.requires_grad_(required)
            if written:
                log.warning(
                    "ncclguard: %s",
                    told(
                        "the evaluation that failed wrote into {count} gradients, which cannot be undone: "
                        "evaluate without gradients, or before backward()",
                        "log",
                        count=written,
                    ),
                )

        return restore

    return keeper


def random_numbers() -> Restore:
    """Remember the random generators of python, numpy and torch, on the CPU and on every CUDA device in use."""
    python, numpy = random.getstate(), _numpy.state()
    generators = (torch.default_generator, *(torch.cuda.default_generators if _cuda_in_use() else ()))
    states = [(generator, generator.get_state()) for generator in generators]

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in states:
            generator.set_state(state)

    return restore


class _NumpyState:
    """The state of numpy's global generator, asked of numpy only when it has changed.

    numpy copies its 624 words one by one, which takes 60 to 130 us, the longest of all that a step keeps. Its generator
    tells where they are in memory (`BitGenerator.ctypes.state_address`, the interface for numba): the words, then the
    position among them, in all versions since 1.17 (`mt19937.h`); whether that is so is looked at before it is used.
    """

    _SIZE = 624 * 4 + ctypes.sizeof(ctypes.c_int)

    def __init__(self) -> None:
        self._of: Any = None
        self._address: int | None = None
        self._words = b""
        self._state: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """Return the state of numpy's global generator, as `np.random.set_state` takes it."""
        generator = np.random.get_bit_generator() if hasattr(np.random, "get_bit_generator") else None
        if generator is not self._of:
            self._of, self._address, self._state = generator, self._found(generator), {}
        if self._address is None:
            return self._asked()
        words = ctypes.string_at(self._address, self._SIZE)
        # numpy can use up a normal variate that it has in reserve without changing the words.
        if words != self._words or not self._state or self._state["has_gauss"]:
            self._words, self._state = words, self._asked()
        return self._state

    def _found(self, generator: Any) -> int | None:
        if not isinstance(generator, np.random.MT19937):
            return None
        address = generator.ctypes.state_address
        words, known = ctypes.string_at(address, self._SIZE), self._asked()["state"]
        return address if words == known["key"].tobytes() + bytes(ctypes.c_int(known["pos"])) else None

    @staticmethod
    def _asked() -> dict[str, Any]:
        return dict(np.random.get_state(legacy=False))


_numpy = _NumpyState()


def positions(loaders: Iterable[Any]) -> Keeper:
    """Return a keeper of the positions of loaders and samplers: generators, `epoch`, and any `state_dict()`."""
    given = tuple(loaders)

    def keeper() -> Restore:
        restores = [_position(part) for loader in given for part in _parts(loader)]

        def restore() -> None:
            for step in restores:
                step()

        return restore

    return keeper


def _parts(loader: Any) -> list[Any]:
    """Return a loader and the objects that it draws from, each once."""
    parts: list[Any] = []
    queue = [loader]
    while queue:
        part = queue.pop()
        if part is None or any(part is known for known in parts):
            continue
        parts.append(part)
        queue += [getattr(part, name, None) for name in ("sampler", "batch_sampler", "base_dataloader")]
    return parts


def _position(part: Any) -> Restore:
    steps: list[Restore] = []
    generator = getattr(part, "generator", None)
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        steps.append(lambda: _set_generator(generator, state))
    epoch = getattr(part, "epoch", None)
    if isinstance(epoch, int):
        steps.append(lambda: setattr(part, "epoch", epoch))
    if (
        not isinstance(part, nn.Module)
        and callable(getattr(part, "state_dict", None))
        and hasattr(part, "load_state_dict")
    ):
        try:
            position = part.state_dict()
        except Exception as error:  # noqa: BLE001 - a loader's own code; some need an iteration in progress
            log.debug("ncclguard: the position of %s is not kept: %s", type(part).__name__, error)
        else:
            steps.append(lambda: _move_back(part, position))

    def restore() -> None:
        for step in steps:
            step()

    return restore


def _move_back(part: Any, position: Any) -> None:
    """Move a loader back if it has moved: one in the middle of an epoch would start a new epoch when it is moved."""
    if pickle.dumps(part.state_dict()) != pickle.dumps(position):
        part.load_state_dict(position)


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def release_memory() -> None:
    """Give back the memory that a failed try held, before the next try needs it."""
    gc.collect()
    if _cuda_in_use():
        torch.cuda.empty_cache()


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call] # `is_available` asks the driver each time


# ---------------------------------------------------------------------- whose state


def named_in(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the objects that a function's own code names: global variables, and variables of the functions around it.

    Modules, classes and functions are left out, and so is what the functions that it calls name.
    """
    plain = inspect.unwrap(getattr(function, "__func__", function))
    try:
        named = inspect.getclosurevars(plain)
    except (TypeError, ValueError):  # not a Python function, or a variable around it has no value yet
        return ()
    values = [*named.nonlocals.values(), *named.globals.values()]
    return tuple(v for v in values if not isinstance(v, (ModuleType, type)) and not inspect.isroutine(v))


def models_of(holders: Iterable[Any]) -> tuple[nn.Module, ...]:
    """Return every module that is one of `holders`, or an attribute of one, each once."""
    return _unique(value for value in _values(holders) if isinstance(value, nn.Module))


def loaders_of(holders: Iterable[Any]) -> tuple[Any, ...]:
    """Return every DataLoader, or object with a sampler like one, among `holders` and their attributes, each once."""
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


# ---------------------------------------------------------------------- what a training step changes


def no_gradients(modules: Iterable[nn.Module]) -> Keeper:
    """Return a keeper that clears gradients: a step that is done again begins by clearing them."""
    roots = tuple(modules)

    def restore() -> None:
        for root in roots:
            root.zero_grad(set_to_none=True)

    return lambda: restore


def gradient_values(modules: Iterable[nn.Module]) -> Keeper:
    """Return a keeper of copies of the gradients."""
    roots = tuple(modules)

    def keeper() -> Restore:
        kept = [(p, None if p.grad is None else p.grad.clone()) for root in roots for p in root.parameters()]

        def restore() -> None:
            for parameter, grad in kept:
                parameter.grad = None if grad is None else grad.clone()

        return restore

    return keeper


def buffers(modules: Iterable[nn.Module]) -> Keeper:
    """Return a keeper of buffers, which forward changes, such as running means; the memory of its copies is reused."""
    inside, copies = _Inside(modules), _Copies()

    def keeper() -> Restore:
        tables = [torch_compat.buffers_of(module) for module in inside.modules()]
        before = [(table, dict(table)) for table in tables]
        copies.take({id(b): b for _, named in before for b in named.values() if b is not None}.values())

        def restore() -> None:
            for table, named in before:
                table.clear()  # forward may have put another tensor in its place
                table.update(named)
            copies.bring_back()

        return restore

    return keeper


class _Copies:
    """Copies of tensors, of those of one kind with one call; taken again and again into the same memory."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._alike: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # tensors, copies

    def take(self, given: Iterable[torch.Tensor]) -> None:
        """Copy these tensors and forget the copies taken before."""
        tensors = list(given)
        if len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors)):
            try:
                with torch.no_grad():
                    for originals, copies in self._alike:
                        torch_compat.copy_all(copies, originals)
            except RuntimeError:  # a tensor has another size now
                pass
            else:
                return
        self._tensors, kinds = tensors, dict[object, list[torch.Tensor]]()
        for tensor in tensors:
            kinds.setdefault((tensor.device, tensor.dtype, tensor.layout, type(tensor)), []).append(tensor)
        self._alike = [(same, [tensor.detach().clone() for tensor in same]) for same in kinds.values()]

    def bring_back(self) -> None:
        with torch.no_grad():
            for originals, copies in self._alike:
                torch_compat.copy_all(originals, copies)


def hyperparameters(optimizers: Iterable[torch.optim.Optimizer]) -> Keeper:
    """Return a keeper of the optimizers' hyperparameters, such as learning rates, which a scheduler may change."""
    given = tuple(optimizers)

    def keeper() -> Restore:
        kept = [(group, dict(group)) for optimizer in given for group in optimizer.param_groups]
        tensors = [(v, v.clone()) for _, before in kept for v in before.values() if isinstance(v, torch.Tensor)]

        def restore() -> None:
            for group, before in kept:
                group.update(before)
            with torch.no_grad():
                for tensor, value in tensors:  # a CUDA graph reads its learning rate from the same tensor
                    tensor.copy_(value)

        return restore

    return keeper


def states_of(objects: Iterable[Any]) -> Keeper:
    """Return a keeper of objects that have `state_dict()` and `load_state_dict()`, such as schedulers and scalers."""
    given = tuple(objects)

    def keeper() -> Restore:
        scalers = [torch_compat.keep_scaler(holder) for holder in given if isinstance(holder, torch.amp.GradScaler)]
        kept = [
            (holder, _copy(holder.state_dict())) for holder in given if not isinstance(holder, torch.amp.GradScaler)
        ]

        def restore() -> None:
            for holder, before in kept:
                holder.load_state_dict(_copy(before))
            for bring_back in scalers:
                bring_back()

        return restore

    return keeper


def _copy(value: Any) -> Any:
    """Copy a state, so that nothing written into its tensors and lists later changes it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if type(value) is list else value
