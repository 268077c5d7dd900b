"""`watch_numerics`: whose gradient had the first NaN or infinity, before a reduction has spread it to all ranks.

Hooks look at each gradient as autograd makes it, before DDP or FSDP2 reduces it: it is this rank's own then. On the CPU
a number that is none is found in the hook. On a GPU the hooks enqueue one reduction for each tensor, and what these
have found is copied to the host behind the pass and read later, so that the host never waits for the device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ncclguard.coordination.nonfinite import NonFinite, NonFinites
from ncclguard.engine import runtime
from ncclguard.engine.inputs import Counted, non_finite
from ncclguard.spelling import hinted
from ncclguard_explain.language import told

#: Types of tensors that are looked at: numbers of 8 bits have no norm.
_LOOKED_AT = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_SOME = -1  # so many are not finite, of which nobody has counted


class _Tensor(NamedTuple):
    kind: str
    name: str


@dataclass
class _Pass:
    """A forward pass, and the backward pass behind it.

    `suspect`: the first input or output with a NaN, which is nothing wrong by itself: padding is computed and masked
    later. `bad`: a gradient is not finite. `scaled`: gradients carry the factor of a loss scaler, which tries out how
    large it may be and leaves out the step where it was too large.
    """

    number: int
    scaled: bool = False
    place: int = 0
    suspect: _Tensor | None = None
    bad: bool = False
    waiting: list[tuple[_Tensor, torch.Tensor]] = field(default_factory=list)  # on a GPU, with the largest magnitude


class _Copy(NamedTuple):
    """The magnitudes of one pass on their way to the host."""

    of: _Pass
    tensors: list[_Tensor]
    values: torch.Tensor
    arrived: torch.cuda.Event


class NumericsWatch:
    """The watch on a model's numbers, as `watch_numerics` returns it; ends with `close`, or as a context manager."""

    def __init__(self, model: nn.Module, on_found: Callable[[tuple[NonFinite, ...]], object] | None) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        told_to = runtime.current().monitor.nonfinite if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._findings = NonFinites() if told_to is None else told_to
        self._scope = self._findings.model()
        self._pass = _Pass(0)
        self._held: NonFinite | None = None  # the first gradient, while its step may have been left out
        self._found = False
        self._copies: list[_Copy] = []
        self._hooked: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by id
        self._last: weakref.ref[torch.Tensor] | None = None
        self._half = any(parameter.dtype is torch.float16 for parameter in model.parameters())
        self._model = model
        # Functions, not methods: whoever copies the model copies its hooks, and is not to copy what is behind them.
        self._handles: list[Any] = [
            model.register_forward_pre_hook(lambda *given: self._begin(*given), with_kwargs=True),
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._send()),
        ]
        if on_found is not None:
            self._forget = self._findings.listen(self._scope, on_found)
        else:
            self._forget = lambda: None
        for name, module in _not_compiled(model):
            if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(self._hook_gathered(name)))
            self._handles.append(module.register_forward_hook(self._look_at_outputs(module, name or "the model")))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def first(self) -> tuple[NonFinite, ...]:
        """The first NaN or infinity of all ranks, as far as this rank knows; empty while there is none.

        Several where ranks had theirs at the same tensor of the same pass. Waits for the device of this rank.
        """
        self._send()
        self._receive(wait=True)
        return self._findings.first(self._scope)

    def close(self) -> None:
        """Take the hooks away; what has been found stays in `first`."""
        self._send()
        self._receive(wait=True)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget()

    # ------------------------------------------------------------------ hooks

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if module is not self._model:
            return
        self._send()
        self._receive()
        if not (self._pass.bad or self._copies):
            self._held = None  # its step was left out, and the pass behind it was well
        self._pass = _Pass(self._pass.number + 1, self._half or _autocast_to_half())
        for name, parameter in self._model.named_parameters():
            if not isinstance(parameter, DTensor):
                self._hook(name, parameter)
                continue
            # All ranks get it in this pass from the rank whose shard it is. Autograd's is the gathered one, in forward.
            self._look(_Tensor("parameter", name), parameter)
        for tensor in _tensors((args, kwargs)):
            self._look(_Tensor("input", told("the model")), tensor)

    def _look_at_outputs(self, module: nn.Module, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(called: nn.Module, args: Any, output: Any) -> None:
            for tensor in _tensors(output) if called is module else ():
                if self._last is None or self._last() is not tensor:  # of what is handed through once
                    self._last = weakref.ref(tensor)
                    self._look(_Tensor("output", f"{name} ({type(module).__name__})"), tensor)

        return look

    def _hook_gathered(self, module_name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            for name, parameter in module.named_parameters(recurse=False):
                if not isinstance(parameter, DTensor):
                    self._hook(f"{module_name}.{name}" if module_name else name, parameter)

        return hook

    def _hook(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.requires_grad and self._hooked.get(id(parameter)) is not parameter:
            self._hooked[id(parameter)] = parameter
            tensor = _Tensor("gradient", name)
            handle = parameter.register_hook(lambda gradient: self._look(tensor, gradient))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    # ------------------------------------------------------------------ looking

    def _look(self, tensor: _Tensor, value: torch.Tensor) -> None:
        value = value.detach()
        if isinstance(value, DTensor):
            value = value.to_local()
        if value.is_sparse:
            value = value._values()
        if self._found or value.dtype not in _LOOKED_AT or not value.numel():
            return
        self._pass.place += 1
        if value.device.type == "cpu":
            found = non_finite(value)
            if found is not None:
                self._judge(self._pass, tensor, found)
        elif not _captures():
            largest = torch.linalg.vector_norm(value, float("inf"))
            if value.dtype is torch.float64:
                largest = largest / 1e300  # which leaves NaN and infinity what they are in 32 bits
            self._pass.waiting.append((tensor, largest.float()))

    def _judge(self, of: _Pass, tensor: _Tensor, found: Counted, place: int | None = None) -> None:
        """Take a tensor that is not finite for the first one, or keep it in mind."""
        if tensor.kind in ("input", "output"):
            if found.nan and of.suspect is None:
                of.suspect = tensor
            return
        of.bad = True
        finding = NonFinite(
            rank=self._rank, scope=self._scope, number=of.number, place=of.place if place is None else place,
            kind=tensor.kind, name=tensor.name, nan=found.nan, infinite=found.infinite, index=found.first or None,
            before=of.suspect,
        )  # fmt: skip
        self._held = self._held or finding
        if not self._found and (tensor.kind == "parameter" or of.suspect is not None or not of.scaled):
            self._found = True
            self._findings.tell(self._held)

    # ------------------------------------------------------------------ what a GPU has found

    def _send(self) -> None:
        """Begin to copy to the host what the device has been asked; does not wait."""
        waiting, self._pass.waiting = self._pass.waiting, []
        by_device: dict[torch.device, list[tuple[_Tensor, torch.Tensor]]] = {}
        for one in waiting:
            by_device.setdefault(one[1].device, []).append(one)
        for device, some in by_device.items():
            with torch.cuda.device(device):
                values = torch.stack([largest for _, largest in some]).to("cpu", non_blocking=True)
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record()
            self._copies.append(_Copy(self._pass, [tensor for tensor, _ in some], values, arrived))

    def _receive(self, wait: bool = False) -> None:
        """Read the copies that have arrived, in the order of their passes."""
        while self._copies and (wait or self._copies[0].arrived.query()):  # type: ignore[no-untyped-call]
            copy = self._copies.pop(0)
            copy.arrived.synchronize()
            for place, (tensor, value) in enumerate(zip(copy.tensors, copy.values.tolist(), strict=True)):
                if not math.isfinite(value):
                    counted = Counted(_SOME, 0, ()) if math.isnan(value) else Counted(0, _SOME, ())
                    self._judge(copy.of, tensor, counted, place + 1)


@hinted
def watch_numerics(
    model: nn.Module, *, on_found: Callable[[tuple[NonFinite, ...]], object] | None = None
) -> NumericsWatch:
    """Find out whose gradient has the first NaN or infinity, and tell all ranks.

    `model`: as it is trained, on all ranks: plain, DistributedDataParallel, or with FSDP2's `fully_shard`. `on_found`:
    called once on every rank, in another thread, with what `first` returns. The lowest rank and the one whose it is log
    it. Raises GuardError where the job's store cannot be reached.

    >>> import torch
    >>> import ncclguard as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> with ng.watch_numerics(model) as numerics:
    ...     (model(torch.ones(1, 2)) / 0).sum().backward()
    >>> numerics.first[0].name
    'bias'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            told(
                "model must be a torch.nn.Module, not {kind}: give the model that is trained", kind=type(model).__name__
            )
        )
    return NumericsWatch(model, on_found)


def _autocast_to_half() -> bool:
    """Return whether operations compute in 16 bits of a range that asks for a loss scaler."""
    return any(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        for device in ("cuda", "cpu")
    )


def _captures() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in what a module takes or returns: by itself, in sequences and in mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _not_compiled(module: nn.Module, name: str = "") -> Iterable[tuple[str, nn.Module]]:
    """Return the modules by name, but for those that torch.compile makes one piece of: a hook would break it up."""
    if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule":
        return
    yield name, module
    for child_name, child in module.named_children():
        yield from _not_compiled(child, f"{name}.{child_name}" if name else child_name)
