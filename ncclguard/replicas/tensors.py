"""The tensors of a replica that other ranks have too: parameters, buffers, and what an optimizer keeps for them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncclguard.checksum import checksum, obstacle
from ncclguard.errors import GuardConfigError
from ncclguard.spelling import meant
from ncclguard_explain.language import Message, joined, say, told, tr

#: Ways in which tensors are spread over ranks that are compared: on all ranks alike, and three meshes.
KINDS: Final = 4
_SEPARATELY: Final = (
    ("FullyShardedDataParallel", tr("FSDP1 has its shards in plain tensors: use fully_shard")),
    ("ZeroRedundancyOptimizer", tr("it has each parameter's state on one rank only: check the model alone")),
)


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor, or this rank's part of one.

    A number of an optimizer is a tensor made of it, and `write` puts another one in its place. `kind`: in which of the
    ways it is spread, see `State.parts`. `buffer`: of a model. `offset`: the place of its first element in the whole.
    """

    name: str
    tensor: torch.Tensor
    kind: int
    buffer: bool
    offset: tuple[int, ...] = ()
    write: Callable[[Any], None] | None = None


@dataclass
class State:
    """All that is compared of a replica.

    `lines`: what has to be alike besides the values: names, each with its dtype and shape, or its word. `parts`:
    for each kind, a number for the part that this rank has: ranks of one number have the same. `left_out`: what is not
    compared, and why. `sums`: the checksums of the first items, on their devices.
    """

    items: list[Item] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    parts: list[int] = field(default_factory=lambda: [0])
    left_out: dict[str, Message] = field(default_factory=dict)
    sums: list[torch.Tensor] = field(default_factory=list)
    _layouts: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(item.tensor.numel() * item.tensor.element_size() for item in self.items)

    def sum_up_to(self, count: int, skipped: Iterable[str] = ()) -> None:
        """Have the checksums of the first `count` items; those whose names are `skipped` count as 0."""
        for item in self.items[len(self.sums) : count]:
            nothing = torch.zeros(2, dtype=torch.int64)
            self.sums.append(nothing if item.name in skipped else checksum(item.tensor))

    def summed(self, skipped: Iterable[str] = ()) -> torch.Tensor:
        """Return the checksums of all items, int64[items, 2] in host memory; waits once for each device."""
        self.sum_up_to(len(self.items), skipped)
        found = torch.zeros(len(self.items), 2, dtype=torch.int64)
        for device in {total.device for total in self.sums}:
            places = [place for place, total in enumerate(self.sums) if total.device == device]
            found[places] = torch.stack([self.sums[place] for place in places]).cpu()
        return found

    def structure(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Return 128 bits of some lines, int64[2]."""
        return _hashed("\n".join(f"{name} {text}" for name, text in self.lines[first:last]))

    def add(self, name: str, value: Any, *, buffer: bool = False, write: Callable[[Any], None] | None = None) -> None:
        """Add a tensor, a number, or what is made of such; anything else is compared as a word, or not at all."""
        if isinstance(value, torch.Tensor):
            self._add_tensor(name, value, buffer)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
            dtype = torch.int64 if isinstance(value, int) else torch.float64
            made = torch.tensor(value, dtype=dtype)
            self.lines.append((name, type(value).__name__))
            self.items.append(Item(name, made, 0, False, write=write))
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                self.add(f"{name}.{key}", value[key], write=_putter(value, key))
        elif isinstance(value, (list, tuple)):
            parts, kind = list(value), type(value)
            for place, part in enumerate(value):

                def put(new: Any, place: int = place) -> None:
                    parts[place] = new
                    if write is not None:
                        write(kind(parts))

                self.add(f"{name}.{place}", part, write=put)
        elif value is None or isinstance(value, (bool, int, float, str)):
            self.lines.append((name, repr(value)))
        else:
            self.left_out[name] = tr("a {kind} is no tensor and no number", kind=type(value).__name__)

    def _add_tensor(self, name: str, tensor: torch.Tensor, buffer: bool) -> None:
        shape = () if torch.nn.parameter.is_lazy(tensor) else tensor.shape
        text, kind, offset = f"{str(tensor.dtype).removeprefix('torch.')}{list(shape)}", 0, (0,) * len(shape)
        self.lines.append((name, text))
        if "torch.distributed.tensor" in sys.modules:  # else nothing is sharded; its import takes a second
            from ncclguard.torch_compat import sharding

            if sharding.is_on_mesh(tensor):
                layout = sharding.layout(tensor)
                if layout is None:
                    self.left_out[name] = tr("it is sharded, and no other rank has this part")
                    return
                offset, tensor = sharding.offset(tensor), sharding.local(tensor)
                kind = self._kind(*layout)
                self.lines[-1] = name, f"{text} {layout[0]}"
        why = tr("there are more than {count} meshes", count=KINDS - 1) if kind >= KINDS else obstacle(tensor)
        if why is not None:
            self.left_out[name] = why
            return
        self.items.append(Item(name, tensor.detach(), kind, buffer, offset))

    def _kind(self, layout: str, part: str) -> int:
        kind = self._layouts.setdefault(layout, len(self._layouts) + 1)
        if kind == len(self.parts):
            self.parts.append(int(_hashed(part)[0]))
        return kind


Kind = TypeVar("Kind")


def several(given: object, kind: type[Kind], word: str, function: str) -> tuple[Kind, ...]:
    """Return one or several as a tuple. Raises GuardConfigError for what is of another kind."""
    some = (given,) if isinstance(given, kind) or not isinstance(given, Iterable) else tuple(given)
    for one in some:
        if not isinstance(one, kind):
            found = {"found": type(one).__name__, "kind": kind.__name__, "function": function}
            text = tr(
                "{word} is a {found}, not a {kind}: {function}(model, optimizer) takes them in this order",
                word=word,
                **found,
            )
            raise GuardConfigError(say(text))
    return some


def _hashed(text: str) -> torch.Tensor:
    digest = hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.int64)


def refuse_partitioned(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise GuardConfigError for what has different values on each rank by its nature, and does not say so."""
    for each in (*(module for model in models for module in model.modules()), *optimizers):
        names = [kind.__name__ for kind in type(each).__mro__]
        why = next((why for name, why in _SEPARATELY if name in names), None)
        if why is None and type(each).__module__.partition(".")[0] == "deepspeed" and each in optimizers:
            why = tr("DeepSpeed partitions an optimizer's state: check the model alone")
        if why is None and any(hasattr(parameter, "ds_id") for parameter in _own_parameters(each)):
            why = tr("its parameters are partitioned over the ranks (ZeRO-3)")
        if why is not None:
            raise GuardConfigError(told("{name} has no replicas to compare: {why}", name=names[0], why=why))


def _own_parameters(module: Any) -> Iterable[nn.Parameter]:
    return module.parameters(recurse=False) if isinstance(module, nn.Module) else ()


def collect(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], ignore: Sequence[str] = ()
) -> State:
    """Return what is compared of models and their optimizers, in an order that is the same on all ranks.

    `ignore`: names, or patterns of them with `*`. Raises GuardConfigError for one that is of nothing.
    """
    state = State()
    known: dict[int, str] = {}  # of parameters, by which an optimizer's state is named
    ddp_ignores = set[str]()
    for number, model in enumerate(models):
        before = f"{number}." if len(models) > 1 else ""
        if isinstance(model, DistributedDataParallel):
            ddp_ignores |= {f"{before}{name}" for name in model.parameters_to_ignore}
            model = model.module
        for name, parameter in _named_parameters(model):
            known[id(parameter)] = f"{before}{name}"
            state.add(f"{before}{name}", parameter)
        for name, buffer in model.named_buffers():
            state.add(f"{before}{name}", buffer, buffer=True)
    for number, optimizer in enumerate(optimizers):
        before = f"optimizer.{number}" if len(optimizers) > 1 else "optimizer"
        for place, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter in optimizer.state:
                    name = known.get(id(parameter), f"param_groups.{place}.params.{index}")
                    state.add(f"{before}.{name}", optimizer.state[parameter])
            for key in sorted(key for key in group if key != "params"):
                put = _putter(group, key)
                state.add(f"{before}.param_groups.{place}.{key}", group[key], write=put)
    for name in ddp_ignores:
        _leave_out(state, lambda one, name=name: one == name, tr("DistributedDataParallel ignores it"))  # type: ignore[misc]
    for pattern in ignore:
        _leave_out_matching(state, pattern)
    return state


def _putter(owner: dict[str, Any], key: str) -> Callable[[Any], None]:
    return lambda new: owner.update({key: new})


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    if "torch.distributed.fsdp" not in sys.modules:
        return model.named_parameters()
    from ncclguard.torch_compat import sharding

    return sharding.named_parameters(model)


def _leave_out(state: State, chosen: Callable[[str], bool], why: Message) -> bool:
    """Leave out what has such a name; returns whether there is any."""
    found = {name for name in (*dict(state.lines), *state.left_out) if chosen(name)}
    state.items = [item for item in state.items if item.name not in found]
    state.lines = [line for line in state.lines if line[0] not in found]
    state.left_out.update(dict.fromkeys(sorted(found), why))
    return bool(found)


def _leave_out_matching(state: State, pattern: str) -> None:
    if _leave_out(state, lambda name: name == pattern or fnmatchcase(name, pattern), tr("ignore has it")):
        return
    names = [name for name, _ in state.lines]
    nothing = tr("ignore: there is no {name}", name=repr(pattern))
    some = tr("there are {some}", some=", ".join(names[:8]))
    raise GuardConfigError(say(joined(": ", (nothing, meant(pattern, names, "{!r}") or some))))
