"""torch's private names for process groups and their operators, its hooks, and the words in which collectives break.

Ran on torch 2.6.0, 2.13.0 and 2.15.0 (CPU, gloo); the versions between are declared, not run. Where a version lacks
something the function says what it does instead.

C++ raises plain RuntimeErrors in many places, so that the text has to tell. Sources: gloo's and ProcessGroupNCCL's
messages as they came out of torch 2.6, 2.13 and 2.15, gloo and NCCL (on an emulated GPU).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c
from torch.distributed import distributed_c10d as c10d
from torch.utils import _pytree as pytree

_log = logging.getLogger("ncclguard")

Store = _c.Store
PrefixStore = _c.PrefixStore
ProcessGroupGloo = _c.ProcessGroupGloo

VERSION: tuple[int, int] = (int(torch.__version__.split(".")[0]), int(torch.__version__.split(".")[1]))
"""Major and minor version of the torch that runs, such as (2, 13)."""
CPP_KEEPS_WORKS: bool = VERSION >= (2, 7)
"""Whether C++ code that holds a work of a Python process group keeps its Python object too (`PyWorkHolder`).

Before, a work whose Python object was gone fell back to C++'s own `Work::wait`, which nothing ends: DDP's broadcast of
buffers hung there (2.6.0) when the collective had ended before C++ waited for it.
"""

# --- groups ---------------------------------------------------------------------------------------------------------


def known_groups() -> tuple[dist.ProcessGroup, ...]:
    """Every process group this process is a member of, in order of creation; empty before ``init_process_group``."""
    return tuple(c10d._world.pg_map)


def ddp_stays(wrapper: Any) -> str:
    """Why a DistributedDataParallel cannot be given another group; empty where it can."""
    if not hasattr(wrapper, "_update_process_group") or not hasattr(wrapper.reducer, "_reset_state"):
        return f"torch {torch.__version__} has no DistributedDataParallel._update_process_group: torch 2.13 has"
    if getattr(wrapper, "_comm_hooks", None):
        return "its communication hook would go on with the group, and the number of ranks, as they were"
    return ""


def move_ddp(wrapper: Any, group: dist.ProcessGroup) -> None:
    """Have a DistributedDataParallel reduce on another group, also after a backward that failed half-way.

    From then on it divides by that group's size. It has the buckets that a new one begins with: one that has made steps
    has them in the order of its gradients, one that was made a moment ago in another process has not, and both have to
    reduce the same. It needs a wrapper that `ddp_stays` has nothing against.
    """
    wrapper._update_process_group(group)
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper.reducer = None  # its hooks on the parameters go with it
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()


def is_member(group: Any) -> bool:
    """Whether ``group`` is a living process group that this process belongs to.

    False for what ``new_group`` returns on ranks that are left out, and for a group that was destroyed.
    """
    return isinstance(group, dist.ProcessGroup) and group in c10d._world.pg_map


def group_name(group: dist.ProcessGroup) -> str:
    """The group's name in the store ("0" for the default group).

    Raises ValueError for a group that was destroyed or that this process does not belong to.
    """
    name = c10d._world.pg_names.get(group)
    if name is None:
        raise ValueError("the process group was destroyed or this rank is not in it: create it again with new_group()")
    return str(name)


def group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks of the group, ordered by their rank within it. Raises ValueError as `group_name` does."""
    global _last_ranks
    ranks = c10d._world.pg_group_ranks.get(group)
    if ranks is None:
        raise ValueError("the process group was destroyed or this rank is not in it: create it again with new_group()")
    if ranks is not _last_ranks[0]:
        _last_ranks = ranks, tuple(ranks)
    return _last_ranks[1]


#: The mapping that torch keeps of the group that was asked for last, and its ranks: a program mostly uses one, which
#: may have thousands.
_last_ranks: tuple[object, tuple[int, ...]] = (None, ())


def gloo_backend(group: dist.ProcessGroup) -> ProcessGroupGloo | None:
    """The gloo process group that serves the group's CPU tensors, or None if another backend does.

    Looks through the wrapper that ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` puts around it.
    """
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # no backend for CPU tensors, or a ProcessGroup written in Python
        return None
    while isinstance(backend, _c._ProcessGroupWrapper):
        backend = backend.wrapped_pg
    return backend if isinstance(backend, ProcessGroupGloo) else None


def under_detail() -> bool:
    """Whether ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps the process groups."""
    return bool(_c.get_debug_level() == _c.DebugLevel.DETAIL)


def abort_group(group: dist.ProcessGroup) -> None:
    """Abort what the group's backends have in flight; the group is unusable then. May
    hang: call it from a helper thread.
    """
    if hasattr(group, "abort"):
        group.abort()
    else:  # torch 2.6
        c10d._abort_process_group(group)


def reduce_op_name(op: Any) -> str:
    """ "SUM", "AVG", "PREMUL_SUM", ... for either form that torch accepts
    (``ReduceOp.SUM`` and ``ReduceOp(ReduceOp.SUM)``).

    Raises TypeError for anything else.
    """
    known = _REDUCE_OPS.get(id(op))
    if known is not None:
        return known
    # RedOpType first: torch makes its members instances of ReduceOp as well.
    kind: Any = op if isinstance(op, dist.ReduceOp.RedOpType) else getattr(op, "op", None)
    if not isinstance(kind, dist.ReduceOp.RedOpType):
        raise TypeError(f"op must be a torch.distributed.ReduceOp such as ReduceOp.SUM, not a {type(op).__name__}")
    return str(kind.name)


#: What `reduce_op_name` says of torch's own constants, which live as long as the process: on every call's path.
_REDUCE_OPS = {id(op): str(op.name) for op in vars(dist.ReduceOp).values() if isinstance(op, dist.ReduceOp.RedOpType)}


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    """Within it the default group has this rank only; groups that are held as objects stay as they are."""
    world, update = c10d._get_default_group(), c10d._update_default_pg
    backend = dist.get_backend_config(world)
    alone: Any = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    update(alone)
    try:
        yield
    finally:
        update(world)
        dist.destroy_process_group(alone)


#: How often a tensor was written into, as autograd counts it.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")

#: The modules right below a module, and its own buffers, by name: what its attributes are looked up in.
children_of: Callable[[torch.nn.Module], Mapping[str, Any]] = operator.attrgetter("_modules")
buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = operator.attrgetter("_buffers")


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each tensor into its own target; those of one device and type in one call, as torch's optimizers do.

    Raises RuntimeError where one does not fit.
    """
    torch._foreach_copy_(list(targets), list(sources))


def keep_scaler(scaler: torch.amp.GradScaler) -> Callable[[], None]:
    """Remember a scaler's state on its device, without waiting for that; the returned function restores it.

    `state_dict()` waits, and leaves out which optimizers' gradients are unscaled already: `load_state_dict()` alone
    would have the next `unscale_()` raise.
    """
    handle: Any = scaler
    names = ("_scale", "_growth_tracker")
    tensors = {name: None if (now := getattr(handle, name, None)) is None else now.clone() for name in names}
    plain = ("_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval", "_init_growth_tracker")
    numbers = {name: getattr(handle, name) for name in plain if hasattr(handle, name)}
    states = {number: _scaler_state(state) for number, state in handle._per_optimizer_states.items()}

    def restore() -> None:
        for name, value in numbers.items():
            setattr(handle, name, value)
        for name, kept in tensors.items():
            now = getattr(handle, name, None)
            if kept is None or now is None:
                setattr(handle, name, None if kept is None else kept.clone())
            else:
                now.copy_(kept)  # in place: CUDA graphs may read it
        handle._per_optimizer_states.clear()
        handle._per_optimizer_states.update({number: _scaler_state(state) for number, state in states.items()})

    return restore


def _scaler_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}


# --- init and destroy -----------------------------------------------------------------------------------------------

_on_init: list[Callable[[], None]] = []
_on_destroy: list[Callable[[], None]] = []
_on_destroy_group: list[Callable[[dist.ProcessGroup], None]] = []


def on_init(callback: Callable[[], None]) -> None:
    """Call ``callback()`` after every successful ``init_process_group``.

    torch's function is wrapped once, in ``torch.distributed`` and in ``torch.distributed.distributed_c10d``; a program
    that took it with ``from torch.distributed import init_process_group`` before is not seen. Giving the same callback
    again does nothing. An exception in a callback is logged and goes no further.
    """
    if callback not in _on_init:
        _on_init.append(callback)
    _wrap("init_process_group", _after_init)


def on_destroy(callback: Callable[[], None]) -> None:
    """Call ``callback()`` before ``destroy_process_group`` takes the default group down; else as `on_init`."""
    if callback not in _on_destroy:
        _on_destroy.append(callback)
    _wrap("destroy_process_group", _before_destroy)


def on_destroy_group(callback: Callable[[dist.ProcessGroup], None]) -> None:
    """Call ``callback(group)`` before ``destroy_process_group`` takes any other group
    down that this process is in; else as `on_init`.
    """
    if callback not in _on_destroy_group:
        _on_destroy_group.append(callback)
    _wrap("destroy_process_group", _before_destroy)


def _after_init(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    _call_all(_on_init)
    return result


def _before_destroy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    group = kwargs.get("group", args[0] if args else None)
    if group is None or group is dist.group.WORLD:
        _call_all(_on_destroy)
    elif is_member(group):
        _call_all([functools.partial(callback, group) for callback in _on_destroy_group])
    return original(*args, **kwargs)


def _wrap(name: str, around: Callable[..., Any]) -> None:
    original: Any = getattr(c10d, name)
    if getattr(original, "_ncclguard_wrapped", False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapped._ncclguard_wrapped = True  # type: ignore[attr-defined]
    for module in (dist, c10d):
        if getattr(module, name, None) is original:
            setattr(module, name, wrapped)


def _call_all(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in tuple(callbacks):
        try:
            callback()
        except Exception:  # noqa: BLE001 - nothing of ours may break the program's init or exit
            _log.exception("ncclguard: %s failed and was skipped; the process group itself is not affected", callback)


# --- gloo -----------------------------------------------------------------------------------------------------------

_UNUSED_TAG = 0x7FFF_FF00  # of point-to-point messages: no program uses it


def gloo_contexts(group: ProcessGroupGloo) -> int:
    """How many sets of connections the group has: one for each interface in ``GLOO_SOCKET_IFNAME``."""
    options: Any = group.options
    return len(options._devices)


def poison_gloo(group: ProcessGroupGloo) -> None:
    """Close all connections of a gloo group on this rank, so that its operations fail
    and peers notice; the group is unusable then.

    A receive that runs into its timeout makes gloo close every connection of its context
    (gloo/transport/tcp/unbound_buffer.cc, ``waitRecv``). One is tried with each peer, because with a peer that is gone
    already it fails without touching the others. Takes up to 10 ms for each peer (gloo/transport/tcp/loop.cc,
    ``unregisterDescriptor``), whatever state the peers are in. Not reached (seen on torch 2.13): ``recv`` from any
    source.
    """
    handle: Any = group  # torch's stub has none of the operations
    index, size, millisecond = handle.rank(), handle.size(), timedelta(milliseconds=1)
    for context in range(gloo_contexts(group)):  # gloo picks the context by tag modulo their number
        for peer in range(size):
            if peer != index:
                with contextlib.suppress(RuntimeError):  # always raised: that is the purpose
                    handle.recv([torch.empty(1)], peer, _UNUSED_TAG + context).wait(millisecond)


# --- the device -----------------------------------------------------------------------------------------------------


def emulated_device() -> str | None:
    """The name of this process's GPU where it is an emulated one, so that nobody takes its figures for a GPU's.

    None also before CUDA is in use: looking would begin that.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    name = str(torch.cuda.get_device_name())
    return name if "emulated" in name else None


# --- outputs --------------------------------------------------------------------------------------------------------


def register_pytree_node(
    cls: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[Any, Any], Any]
) -> None:
    """Tell torch (DDP, FSDP, torch.compile) how to take objects of this type apart and
    put them together; once for each type.
    """
    pytree.register_pytree_node(cls, flatten, unflatten)


_BROKEN: Final = re.compile(
    r"/gloo/|Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting \d+ms for"
    r"|Application timeout caused pair closure|ProcessGroup(NCCL|Gloo)|NCCL (error|communicator was aborted)"
    r"|nccl(Remote|System)Error|DistBackendError"
    # nccl2 raises a plain RuntimeError: "NCCL Broadcast failed in all_gather: ..." (torch 2.15)
    r"|NCCL \w+ failed|NCCL operation timed out|failed to pass monitoredBarrier|remote process exited or there was a network error"
)


def broken_collective(text: str) -> bool:
    """Whether an exception's text is that of a collective whose transport broke or was stopped."""
    return _BROKEN.search(text) is not None


def from_collective(error: BaseException) -> bool:
    """Whether torch's C++ raised `error` for a collective: a DistError, or a RuntimeError in a backend's words."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and broken_collective(str(error))


_KEYS = ("CPU", "CUDA")
_SPARSE = ("SparseCPU", "SparseCUDA")
_hold_of = dist.ProcessGroup.barrier


def options(name: str) -> Any:
    """A new `name`Options object, such as "Allgather"."""
    return getattr(_c, f"{name}Options")()


def group_of(boxed: Any) -> dist.ProcessGroup:
    """The process group that an operator was given."""
    return _c.ProcessGroup.unbox(boxed)


def reduce_op_of(boxed: Any) -> dist.ReduceOp:
    """The reduce op that an operator was given."""
    return dist.ReduceOp(dist.ReduceOp.RedOpType(boxed.op()))


def tells_reduce_op() -> bool:
    """Whether an operator that was given a reduce op can tell which: not in torch 2.6 and 2.9, but in 2.13 and 2.15."""
    return hasattr(torch.classes.c10d.ReduceOp(), "op")


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What an operator of torch's own hands its arguments to. Raises RuntimeError for a
    device the group does not serve.
    """
    return group._get_backend(device)


class _Holder(dist.ProcessGroup):
    """Makes torch wrap a Work of Python in one of C++ that keeps it alive: only its trampolines do."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.work: Any = None

    def barrier(self, *_: Any) -> Any:
        return self.work


def boxed_work(work: dist.Work) -> Any:
    """A work as an operator returns it. One that is written in Python stays alive for as long as C++ holds it."""
    if type(work).__module__.startswith("ncclguard"):
        holder = _Holder()
        holder.work = work
        work = _hold_of(holder)
    return work.boxed()


def backend_has(method: str) -> bool:
    """Whether a backend's method can be called from Python."""
    return hasattr(_c.Backend, method)


class Hook:
    """Kernels in the place of torch's own, until `remove`. `kernels`: by the operator's name without its namespace."""

    def __init__(self, kernels: Mapping[str, Callable[..., Any]]) -> None:
        library: Any = torch.library.Library  # untyped
        self._library: Any = library("c10d", "IMPL")  # noqa: TOR901 - ended by remove()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a kernel is replaced
            for name, kernel in kernels.items():
                if hasattr(torch.ops.c10d, name):
                    for key in (*_KEYS, *_SPARSE) if name == "allreduce_" else _KEYS:
                        # Two hooks may have one operator, and the later one counts until it is removed; Library.impl
                        # takes a second kernel for it only with `allow_override`, which torch has from 2.8 on.
                        getattr(torch.library, "_impls", set()).discard(f"c10d/{name}/{key}")
                        self._library.impl(name, kernel, key)

    def remove(self) -> None:
        """Torch's own kernels again."""
        library, self._library = self._library, None
        if library is not None:
            library._destroy()
