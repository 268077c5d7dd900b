"""What an evaluation that is given up must leave as it was: modes, gradients, random numbers, positions of loaders."""

from __future__ import annotations

import gc
import logging
import pickle
import random
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from ncclguard import _torch

log = logging.getLogger("ncclguard")

Restore = Callable[[], None]


class Keeper(Protocol):
    """Something that remembers a part of the state when it is called, and gives back what restores it."""

    def __call__(self) -> Restore: ...


def keep(keepers: Iterable[Keeper]) -> Restore:
    """Remember the state now; the returned function restores it, as often as it is called, last kept first.

    Never raises: one keeper that does is logged, and the others do their part. The other ranks may be waiting for this
    one.
    """
    restores: list[Restore] = []
    for keeper in keepers:
        try:
            restores.append(keeper())
        except Exception:
            log.exception("ncclguard: a part of the state cannot be kept; an evaluation that fails may change it")

    def restore() -> None:
        for step in reversed(restores):
            try:
                step()
            except Exception:
                log.exception("ncclguard: a part of the state was not restored after an evaluation that failed")

    return restore


def modes(modules: Iterable[nn.Module]) -> Keeper:
    """The train or eval mode of every module inside the given ones, wrappers included.

    The attribute itself is set: `train()` of a wrapper may do more, or less, than its name says. DeepSpeed 0.19's
    `engine.eval()` leaves `engine.training` True.
    """
    roots = tuple(modules)

    def keeper() -> Restore:
        flags = {module: module.training for root in roots for module in root.modules()}

        def restore() -> None:
            for module, training in flags.items():
                module.training = training

        return restore

    return keeper


def gradients(modules: Iterable[nn.Module]) -> Keeper:
    """Which tensor is the gradient of each parameter, and whether gradients are computed at all.

    The tensors are not copied: an evaluation that writes into one is warned of, because that cannot be undone.
    """
    roots = tuple(modules)

    def keeper() -> Restore:
        enabled = torch.is_grad_enabled()
        parameters = {id(p): p for root in roots for p in root.parameters()}.values()
        grads = [(p, p.grad, -1 if p.grad is None else _torch.version_of(p.grad), p.requires_grad) for p in parameters]

        def restore() -> None:
            torch.set_grad_enabled(enabled)
            written = 0
            for parameter, grad, version, required in grads:
                if parameter.grad is not grad:
                    parameter.grad = grad
                written += grad is not None and _torch.version_of(grad) != version
                if parameter.requires_grad != required:
                    parameter.requires_grad_(required)
            if written:
                log.warning(
                    "ncclguard: the evaluation that failed wrote into %d gradients, which cannot be undone: "
                    "evaluate without gradients, or before backward()",
                    written,
                )

        return restore

    return keeper


def random_numbers() -> Restore:
    """The generators of python, numpy and torch, on the CPU and on every CUDA device that is in use."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if _cuda_in_use() else []

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return restore


def positions(loaders: Iterable[Any]) -> Keeper:
    """Where loaders and samplers are: their generators, `epoch`, and `state_dict()` where they have one."""
    given = tuple(loaders)

    def keeper() -> Restore:
        restores = [_position(part) for loader in given for part in _parts(loader)]

        def restore() -> None:
            for step in restores:
                step()

        return restore

    return keeper


def _parts(loader: Any) -> list[Any]:
    """The loader itself and what it draws from, each once."""
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
    """Only where it has moved: a loader in the middle of an epoch, as training's is,
    starts a new one when it is told where to be.
    """
    if pickle.dumps(part.state_dict()) != pickle.dumps(position):
        part.load_state_dict(position)


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def release_memory() -> None:
    """Give back what a failed try held, before the next one needs it."""
    gc.collect()
    if _cuda_in_use():
        torch.cuda.empty_cache()


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
