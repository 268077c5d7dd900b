"""`watch_numerics`: whose gradient had the first NaN or infinity, before a reduction has spread it to all ranks.

Hooks look at each gradient as autograd makes it, before DDP or FSDP2 reduces it: it is this rank's own then. On the CPU
a number that is none is found in the hook. On a GPU the hooks enqueue one reduction for each tensor, and what these
have found is copied to the host behind the pass and read later, so that the host never waits for the device.
"""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from ncclguard import lifecycle
from ncclguard.coordination.nonfinite import NO_SIGN, NonFinite, NonFinites, Tensor
from ncclguard.engine import runtime
from ncclguard.engine.inputs import Counted, non_finite
from ncclguard.spelling import hinted
from ncclguard.torch_compat import autograd
from ncclguard_explain.language import told

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

log = logging.getLogger("ncclguard")

#: Types of numbers that are looked at: those of 8 bits have no norm.
_LOOKED_AT = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})
_SOME = -1  # so many are not finite, of which nobody has counted


@dataclass
class _Pass:
    """A backward pass, and what was computed forward since the one before it.

    `sign`: the first input or output with a NaN, and its place, which is nothing wrong by itself: padding is computed
    and masked later. `scaled`: gradients carry the factor of a loss scaler, which tries out how large it may be and
    leaves out the step where it was too large.
    """

    number: int
    place: int = 0
    scaled: bool = False
    sign: tuple[Tensor, int] | None = None
    seen: set[str] = field(default_factory=set)  # whose gradients were looked at
    waiting: list[tuple[Tensor, int, torch.Tensor]] = field(default_factory=list)  # on a GPU: its place and magnitude


class _Copy(NamedTuple):
    """The magnitudes of one pass on their way to the host."""

    of: _Pass
    tensors: list[tuple[Tensor, int]]
    values: torch.Tensor
    arrived: torch.cuda.Event


class NumericsWatch:
    """The watch on a model's numbers, as `watch_numerics` returns it; ends with `close`, or as a context manager."""

    def __init__(self, model: nn.Module, on_found: Callable[[tuple[NonFinite, ...]], object] | None) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._rank = dist.get_rank() if several else 0
        # The passes of a rank that joins later have other numbers than those of the ranks that were there.
        alone = not several or lifecycle.is_joining()
        self._findings = NonFinites((self._rank,), self._rank) if alone else runtime.current().monitor.nonfinite
        self._scope = self._findings.model()
        self._pass = _Pass(1)
        self._held: NonFinite | None = None  # the first gradient, while its step may have been left out
        self._stepped = 0  # the version of the parameters then
        self._found = False
        self._copies: list[_Copy] = []
        self._hooked: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by id
        self._last: weakref.ref[torch.Tensor] | None = None
        self._handles: list[Any] = []
        self._forgets: list[Callable[[], None]] = []
        self._parameters = dict(model.named_parameters())
        self._shards = {name: one for name, one in self._parameters.items() if _is_dtensor(one)}
        self._half = any(one.dtype is torch.float16 for one in self._parameters.values())
        if on_found is not None:
            self._forgets.append(self._findings.listen(self._scope, on_found))
        self._hook_all()
        # Functions, not methods: whoever copies the model copies its hooks, and is not to copy what is behind them.
        for name, module in _not_compiled(model):
            self._handles.append(module.register_forward_hook(self._look_at_outputs(module, name)))
        if getattr(model, "_compiled_call_impl", None) is None:  # a hook would be a piece of what is compiled

            def begin(called: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
                if called is model:
                    self._carefully(self._begin, args, kwargs)

            def end(called: nn.Module, args: Any, output: Any) -> None:
                if called is model:
                    self._carefully(self._hook_gathered, model)

            # Before FSDP2's own hook, which gathers what this rank has a shard of.
            self._handles.append(model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
            self._handles.append(model.register_forward_hook(end))
        watch = weakref.ref(self)
        self._forgets.append(self._findings.before_end(lambda: None if (one := watch()) is None else one._end()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def first(self) -> tuple[NonFinite, ...]:
        """The first NaN or infinity of all ranks, as far as this rank knows; empty while there is none.

        Several where ranks had theirs in the same pass, and none has a sign of it before the others. Waits for the
        device of this rank. Ranks hear of each other within two seconds.
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
        for forget in self._forgets:
            forget()
        self._forgets.clear()

    # ------------------------------------------------------------------ hooks

    def _carefully(self, look: Callable[..., None], *arguments: Any) -> None:
        """Look while nothing is found, and end nothing: tensors may be of kinds that nobody has thought of."""
        if self._found:
            return
        try:
            look(*arguments)
        except Exception:
            self._found = True
            log.warning(
                "ncclguard: %s", told("watch_numerics cannot look at this model's numbers", "log"), exc_info=True
            )

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward pass begins: the first one after a backward pass begins a pass."""
        if not torch.is_grad_enabled() or autograd.in_backward() or _captures():
            return
        if self._pass.seen:
            self._next()
        self._pass.scaled = self._pass.scaled or self._half or _autocast_to_half()
        self._hook_all()
        for name, shard in self._shards.items():  # which all ranks are given in this pass, from the rank whose it is
            self._look(Tensor("parameter", name), shard)
        for tensor in _tensors((args, kwargs)):
            self._look(Tensor("input", ""), tensor)

    def _next(self) -> None:
        self._send()
        self._receive()
        if self._held is not None and self._versions() != self._stepped and not self._copies:
            self._decide(self._held)
        self._pass = _Pass(self._pass.number + 1)

    def _look_at_outputs(self, module: nn.Module, name: str) -> Callable[[nn.Module, Any, Any], None]:
        tensor = Tensor("output", f"{name} ({type(module).__name__})" if name else "")

        def look(output: Any) -> None:
            for value in _tensors(output) if torch.is_grad_enabled() else ():
                if self._last is None or self._last() is not value:  # of what is handed through once
                    self._last = weakref.ref(value)
                    self._pass.scaled = self._pass.scaled or value.dtype is torch.float16
                    self._look(tensor, value)

        return lambda called, args, output: self._carefully(look, output) if called is module else None

    def _hook_gathered(self, model: nn.Module) -> None:
        if "torch.distributed.fsdp" not in sys.modules:
            return
        from ncclguard.torch_compat import sharding

        for name, parameter in sharding.gathered_parameters(model):
            self._hook(name, parameter)

    def _hook_all(self) -> None:
        for name, parameter in self._parameters.items():
            self._hook(name, parameter)

    def _hook(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.requires_grad and self._hooked.get(id(parameter)) is not parameter:
            self._hooked[id(parameter)] = parameter
            tensor = Tensor("gradient", name)

            def hook(gradient: torch.Tensor) -> None:
                self._carefully(self._look_at_gradient, tensor, gradient)

            self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ looking

    def _look_at_gradient(self, tensor: Tensor, gradient: torch.Tensor) -> None:
        if gradient.is_cuda and _captures():
            return  # nothing of a capture may be asked, or ask
        if tensor.name in self._pass.seen:
            self._next()  # the model was called by another way than by `model(...)`
        self._pass.seen.add(tensor.name)
        self._look(tensor, gradient)

    def _look(self, tensor: Tensor, value: torch.Tensor) -> None:
        value = value.detach()
        if _is_dtensor(value):
            value = value.to_local()
        if value.layout is torch.sparse_coo:
            value = value._values()
        self._pass.place += 1
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
        if not plain or value.dtype not in _LOOKED_AT or not value.numel():
            return
        if value.device.type == "cpu":
            found = non_finite(value)
            if found is not None:
                self._judge(self._pass, tensor, self._pass.place, found)
        elif value.is_cuda and not _captures():
            largest = torch.linalg.vector_norm(value, float("inf"))
            if largest.dtype is torch.float64:
                largest = largest / 1e300  # which leaves NaN and infinity what they are in 32 bits
            self._pass.waiting.append((tensor, self._pass.place, largest.float()))

    def _judge(self, of: _Pass, tensor: Tensor, place: int, found: Counted) -> None:
        """Take a tensor that is not finite for the first one, or keep it in mind."""
        if tensor.kind in ("input", "output"):
            if found.nan and of.sign is None:
                of.sign = tensor, place
            return
        before = None if of.sign is None else of.sign[0]
        sign = 0 if tensor.kind == "parameter" else NO_SIGN if of.sign is None else of.sign[1]
        finding = NonFinite(
            rank=self._rank, scope=self._scope, number=of.number, place=sign, tensor=tensor,
            nan=found.nan, infinite=found.infinite, index=found.first or None, before=before,
        )  # fmt: skip
        if tensor.kind == "parameter" or not of.scaled:
            self._tell(self._held or finding)
        elif self._held is None:
            self._held, self._stepped = finding, self._versions()

    def _decide(self, held: NonFinite) -> None:
        """The optimizer has written since: if what it wrote is finite, the step of that gradient was left out."""
        if all(non_finite(_local(one)) is None for one in self._parameters.values()):
            self._held = None
        else:
            self._tell(held)

    def _tell(self, finding: NonFinite) -> None:
        if not self._found:
            self._found = True
            self._findings.tell(finding)

    def _versions(self) -> int:
        """Return a number that is another one once the optimizer has written."""
        return sum(_local(one)._version for one in self._parameters.values() if one.requires_grad)

    def _end(self) -> None:
        """The program ends, maybe because it has seen by itself that its loss is none, before a backward pass."""
        self._send()
        self._receive(wait=True)
        last = self._pass
        if self._held is not None:
            self._decide(self._held)
        if last.sign is not None and not last.seen:
            tensor, place = last.sign
            sign = NonFinite(
                rank=self._rank,
                scope=self._scope,
                number=last.number,
                place=place,
                tensor=tensor,
                nan=_SOME,
                infinite=0,
            )
            self._tell(sign)

    # ------------------------------------------------------------------ what a GPU has found

    def _send(self) -> None:
        """Begin to copy to the host what the device has been asked; does not wait."""
        waiting, self._pass.waiting = self._pass.waiting, []
        by_device: dict[torch.device, list[tuple[Tensor, int, torch.Tensor]]] = {}
        for one in waiting:
            by_device.setdefault(one[2].device, []).append(one)
        for device, some in by_device.items():
            with torch.cuda.device(device):
                values = torch.stack([largest for *_, largest in some]).to("cpu", non_blocking=True)
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record()
            self._copies.append(_Copy(self._pass, [(tensor, place) for tensor, place, _ in some], values, arrived))

    def _receive(self, wait: bool = False) -> None:
        """Read the copies that have arrived, in the order of their passes."""
        while self._copies and (wait or self._copies[0].arrived.query()):  # type: ignore[no-untyped-call]
            copy = self._copies.pop(0)
            copy.arrived.synchronize()
            for (tensor, place), value in zip(copy.tensors, copy.values.tolist(), strict=True):
                if not math.isfinite(value):
                    counted = Counted(_SOME, 0, ()) if math.isnan(value) else Counted(0, _SOME, ())
                    self._judge(copy.of, tensor, place, counted)


@hinted
def watch_numerics(
    model: nn.Module, *, on_found: Callable[[tuple[NonFinite, ...]], object] | None = None
) -> NumericsWatch:
    """Find out whose gradient has the first NaN or infinity, and tell all ranks.

    `model`: as it is trained, on all ranks: plain, DistributedDataParallel, or with FSDP2's `fully_shard`. `on_found`:
    called on every rank, in a thread of its own, with what `first` returns; again where an earlier one is heard of
    late. The lowest rank and the one whose it is log it. Raises GuardError where the job's store cannot be reached.

    >>> import torch
    >>> import ncclguard as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> with ng.watch_numerics(model) as numerics:
    ...     (model(torch.ones(1, 2)) / 0).sum().backward()
    >>> str(numerics.first[0].tensor)
    'the gradient of bias'
    """
    if not isinstance(model, nn.Module):
        text = told(
            "model must be a torch.nn.Module, not {kind}: give the model that is trained", kind=type(model).__name__
        )
        raise TypeError(text)
    if on_found is not None and not callable(on_found):
        text = told(
            "on_found must be a function that takes a tuple of NonFinite, not {kind}: give one, or none",
            kind=type(on_found).__name__,
        )
        raise TypeError(text)
    return NumericsWatch(model, on_found)


def _is_dtensor(tensor: torch.Tensor) -> TypeIs[DTensor]:
    """Return whether a tensor is spread over a mesh; none is without that module, whose import takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = parameter.to_local() if _is_dtensor(parameter) else parameter
    return found.detach()


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


def _not_compiled(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Return the modules by name, but for those that torch.compile makes one piece of: a hook would break it up."""
    if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule":
        return
    yield name, module
    for child_name, child in module.named_children():
        yield from _not_compiled(child, f"{name}.{child_name}" if name else child_name)
