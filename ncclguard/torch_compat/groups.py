"""torch's private names for process groups and their operators, its hooks, and the words in which collectives break.

Ran on torch 2.6.0, 2.8.0, 2.11.0, 2.13.0 and 2.15.0 (CPU, gloo); the versions between are declared, not run. Where a
version lacks something the function says what it does instead.

C++ raises plain RuntimeErrors in many places, so that the text has to tell. Sources: gloo's and ProcessGroupNCCL's
messages as they came out of torch 2.6, 2.13 and 2.15, gloo and NCCL (on an emulated GPU).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import logging
import numbers
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

from ncclguard.frames import frames_of_threads, local_of
from ncclguard_explain.language import Message, joined, say, told, tr
from ncclguard_explain.ranks import ranks_text

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
    """Return every process group that this process is in, in order of creation; empty before ``init_process_group``."""
    return tuple(c10d._world.pg_map)


def group_in_the_making() -> str:
    """Return the `new_group` in which a thread waits for members, "new_group(ranks 2-3)"; "" for none."""
    for frame in itertools.chain.from_iterable(frames_of_threads().values()):
        if frame.f_code.co_name == "new_group" and frame.f_globals is vars(c10d):
            ranks = local_of(frame, "ranks")
            return f"new_group({ranks_text(list(ranks)) if ranks is not None else 'all ranks'})"
    return ""


def ddp_stays(wrapper: Any) -> str:
    """Return the reason why a DistributedDataParallel cannot be given another group; "" if it can."""
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
    wrapper.reducer = None  # also removes its hooks on the parameters
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()


def group_names() -> frozenset[str]:
    return frozenset(map(str, c10d._world.pg_names.values()))


def is_member(group: Any) -> bool:
    """Return whether ``group`` is a living process group that this process belongs to.

    False for what ``new_group`` returns on ranks that are left out, and for a group that was destroyed.
    """
    return isinstance(group, dist.ProcessGroup) and group in c10d._world.pg_map


def group_name(group: dist.ProcessGroup) -> str:
    """Return the group's name in the store ("0" for the default group).

    Raises ValueError for a group that was destroyed or that this process does not belong to.
    """
    name = c10d._world.pg_names.get(group)
    if name is None:
        raise ValueError("the process group was destroyed or this rank is not in it: create it again with new_group()")
    return str(name)


def group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of the group, ordered by their rank within it. Raises ValueError as `group_name` does."""
    global _last_ranks
    ranks = c10d._world.pg_group_ranks.get(group)
    if ranks is None:
        raise ValueError("the process group was destroyed or this rank is not in it: create it again with new_group()")
    last = _last_ranks  # read once: another thread may ask for another group between
    if ranks is not last[0]:
        last = _last_ranks = ranks, tuple(ranks)
    return last[1]


def own_rank(group: dist.ProcessGroup) -> int:
    """Return the global rank of this process as the group counts: of a group outside the job its rank in the group."""
    return group_ranks(group)[group.rank()]


def new_outside_group(
    backend: str, store: Store, rank: int, size: int, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a process group of processes that need have no default group in common; it begins no communication.

    It is what projects that send weights from a trainer to engines call of torch, all of them by its private name.
    """
    create: Any = c10d._new_process_group_helper
    made = create(size, rank, [], c10d.Backend(backend), store, name, timeout=timeout)
    group: dist.ProcessGroup = made[0]
    c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


#: torch's mapping for the group of the last call, and the group's ranks: a program mostly uses one group, which may
#: have thousands of ranks.
_last_ranks: tuple[object, tuple[int, ...]] = (None, ())


def gloo_backend(group: dist.ProcessGroup) -> ProcessGroupGloo | None:
    """Return the gloo process group that serves the group's CPU tensors, or None if another backend does.

    Looks through the wrapper that ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` puts around it.
    """
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # no backend for CPU tensors, or a ProcessGroup written in Python
        return None
    while isinstance(backend, _c._ProcessGroupWrapper):
        backend = backend.wrapped_pg
    return backend if isinstance(backend, ProcessGroupGloo) else None


def time_limit(group: dist.ProcessGroup) -> float | None:
    """Seconds after which torch itself gives an operation of the group up, the shortest of its backends'.

    None where no backend says: those of torch 2.6 show no options. A group written in Python ends by itself.
    """
    found = []
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            backend: Any = group._get_backend(torch.device(device))
            if backend is not group:
                found.append(backend.options._timeout.total_seconds())
    return min(found, default=None)


def backend_options(name: str, timeout: timedelta) -> Any:
    """Return what a backend of torch's has as its `options`, for one that is written in Python."""
    return _c.Backend.Options(name, timeout)


def under_detail() -> bool:
    return bool(_c.get_debug_level() == _c.DebugLevel.DETAIL)


def abort_group(group: dist.ProcessGroup) -> None:
    """Abort what the group's backends have in flight: it is unusable then. May hang: call it in a helper thread."""
    if hasattr(group, "abort"):
        group.abort()
    else:  # torch 2.6
        c10d._abort_process_group(group)


def reduce_op_name(op: Any) -> str:
    """Return the name of a reduce op, such as "SUM", "AVG" or "PREMUL_SUM".

    Takes either form that torch accepts (``ReduceOp.SUM`` and ``ReduceOp(ReduceOp.SUM)``).

    Raises TypeError for anything else.
    """
    known = _REDUCE_OPS.get(id(op))
    if known is not None:
        return known
    # RedOpType first: torch makes its members instances of ReduceOp as well.
    kind: Any = op if isinstance(op, dist.ReduceOp.RedOpType) else getattr(op, "op", None)
    if not isinstance(kind, dist.ReduceOp.RedOpType):
        needed = tr("op must be a torch.distributed.ReduceOp such as ReduceOp.SUM, not {kind}", kind=type(op).__name__)
        meant = _meant(op)
        raise TypeError(say(joined(": ", (needed, meant)) if meant else needed))
    return str(kind.name)


def _meant(given: object) -> Message | None:
    """Return a hint at what to write in place of a wrong `op`, None where that is not clear."""
    if isinstance(given, (numbers.Real, timedelta)) and not isinstance(given, bool):
        return tr("a limit is given by its name, timeout={value}", value=repr(given))
    if isinstance(given, dist.ProcessGroup):
        return tr("a group is given by its name, group=...")
    if isinstance(given, str):
        names = list(_REDUCE_OPS.values())
        close = difflib.get_close_matches({"mean": "AVG"}.get(given.lower(), given.upper()), names, n=1)
        return tr("did you mean dist.ReduceOp.{name}?", name=close[0]) if close else None
    return None


#: The names of torch's own constants, which live as long as the process, because every call needs one.
_REDUCE_OPS = {id(op): str(op.name) for op in vars(dist.ReduceOp).values() if isinstance(op, dist.ReduceOp.RedOpType)}


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    """Make the default group have this rank only, inside a block; groups that are held as objects stay as they are."""
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

#: The modules right below a module, and its own buffers, by name: torch looks attributes up in these dictionaries.
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
    """Call ``callback(group)`` before ``destroy_process_group`` destroys a group other than the default one.

    Only groups that this process is in count; for the rest see `on_init`.
    """
    if callback not in _on_destroy_group:
        _on_destroy_group.append(callback)
    _wrap("destroy_process_group", _before_destroy)


_destroyed = False
_init_failed = False


def was_destroyed() -> bool:
    """Return whether the default process group was destroyed, and none was made since; known from `on_destroy` on."""
    return _destroyed and not dist.is_initialized()


def init_failed() -> bool:
    """Return whether the last ``init_process_group`` has raised, or has not come back; known from `on_init` on."""
    return _init_failed


def _after_init(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _destroyed, _init_failed
    _init_failed = True  # until it has come back
    result = original(*args, **kwargs)
    _destroyed = _init_failed = False
    _call_all(_on_init)
    return result


def _before_destroy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _destroyed
    group = kwargs.get("group", args[0] if args else None)
    if group is None or group is dist.group.WORLD:
        _call_all(_on_destroy)
        _destroyed = dist.is_initialized()
    elif is_member(group):
        _call_all([functools.partial(callback, group) for callback in _on_destroy_group])
    return original(*args, **kwargs)


def coalesce_messages() -> None:
    """Have ``batch_isend_irecv`` make one NCCL group of its messages on groups that have a backend of torch's beneath.

    torch 2.13 does so only where ``type(group) is ProcessGroup``, and else one by one: a ring of three deadlocks. Also
    have an exception end the coalescing on groups that are written in Python: torch goes on with it (2.13, 2.15), so
    that each later all-reduce of the group is collected, and never issued.
    """
    _wrap("batch_isend_irecv", _batch)
    _wrap("_coalescing_manager", _coalescing)


def _batch(original: Callable[..., Any], p2p_op_list: list[Any]) -> Any:
    if not p2p_op_list:
        return original(p2p_op_list)
    c10d._check_p2p_op_list(p2p_op_list)
    group, tensor = p2p_op_list[0].group, p2p_op_list[0].tensor
    if not hasattr(group or dist.group.WORLD, "beneath") or not tensor.is_cuda:
        return original(p2p_op_list)
    with c10d._coalescing_manager(group, tensor.device, async_ops=True) as manager:
        for message in p2p_op_list:
            target = "group_dst" if message.op is dist.isend else "group_src"
            message.op(message.tensor, group=message.group, tag=message.tag, **{target: message.group_peer})
    return manager.works


@contextlib.contextmanager
def _coalescing(original: Callable[..., Any], group: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
    try:
        with original(group, *args, **kwargs) as manager:
            yield manager
    except BaseException:
        chosen: Any = dist.group.WORLD if group is None else group
        if hasattr(chosen, "stop_coalescing"):
            c10d._world.pg_coalesce_state.pop(chosen, None)
            chosen.stop_coalescing()
        raise


_monitoring: list[type] = []


def open_monitored_barrier(kind: type) -> None:
    """Have ``torch.distributed.monitored_barrier`` call the method of that name on groups of this type too.

    torch's function raises ValueError for every backend whose name is not "gloo" (2.6 to 2.15).
    """
    _monitoring.append(kind)
    _wrap("monitored_barrier", _monitored_barrier)


def _monitored_barrier(
    original: Callable[..., Any],
    group: Any = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> Any:
    chosen: Any = dist.group.WORLD if group is None else group
    if not any(isinstance(chosen, kind) for kind in _monitoring):
        return original(group, timeout, wait_all_ranks)
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    return chosen.monitored_barrier(limit, wait_all_ranks)


def _wrap(name: str, around: Callable[..., Any]) -> None:
    original: Any = getattr(c10d, name)
    if getattr(original, "_ncclguard_wrapped", False):
        return
    if hasattr(original, "_ncclguard_around"):  # `ncclguard observe`, before the program could take the function
        original._ncclguard_around = around
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
        except Exception as error:  # noqa: BLE001 - nothing of ours may break the program's init or exit
            function = callback.func if isinstance(callback, functools.partial) else callback
            _log.exception(
                "ncclguard: %s",
                told(
                    "{kind}: {error}; {name}.{method} was skipped, and the process group itself is not affected",
                    "log",
                    kind=type(error).__name__,
                    error=error,
                    name=getattr(function, "__module__", ""),
                    method=getattr(function, "__qualname__", function),
                ),
            )


# --- gloo -----------------------------------------------------------------------------------------------------------

_UNUSED_TAG = 0x7FFF_FF00  # a tag of point-to-point messages that no program uses


def gloo_contexts(group: ProcessGroupGloo) -> int:
    """Return how many sets of connections the group has: one for each interface in ``GLOO_SOCKET_IFNAME``."""
    options: Any = group.options
    return len(options._devices)


def poison_gloo(group: ProcessGroupGloo) -> None:
    """Close all connections of a gloo group on this rank, so that its operations fail and peers notice.

    The group is unusable then.

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
                with contextlib.suppress(RuntimeError):  # always raised: gloo closes the connections with it
                    handle.recv([torch.empty(1)], peer, _UNUSED_TAG + context).wait(millisecond)


# --- the device -----------------------------------------------------------------------------------------------------


def emulated_device() -> str | None:
    """Return the name of this process's GPU where it is an emulated one, so that nobody takes its figures for a GPU's.

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
    """Tell torch (DDP, FSDP, torch.compile) how to flatten objects of this type and rebuild them; once per type."""
    pytree.register_pytree_node(cls, flatten, unflatten)


_BROKEN: Final = re.compile(
    r"/gloo/|Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting \d+ms for"
    r"|Application timeout caused pair closure|ProcessGroup(NCCL|Gloo)|NCCL (error|communicator was aborted)"
    r"|nccl(Remote|System)Error|DistBackendError"
    # nccl2 raises a plain RuntimeError: "NCCL Broadcast failed in all_gather: ..." (torch 2.15)
    r"|NCCL \w+ failed|NCCL operation timed out|failed to pass monitoredBarrier|remote process exited or there was a network error"
)


def broken_collective(text: str) -> bool:
    """Return whether an exception's text is that of a collective whose transport broke or was stopped."""
    return _BROKEN.search(text) is not None


_LIMIT: Final = re.compile(r"(?:Timed out waiting|failed to pass monitoredBarrier in) (\d+) ?ms")


def limit_passed(text: str) -> float | None:
    """Return the limit of torch's own, in seconds, that an exception's text says has passed; None for another text."""
    found = _LIMIT.search(text)
    return None if found is None else int(found[1]) / 1000


def is_of_limit(text: str) -> bool:
    """Return whether a limit of torch's own has ended a collective, by an exception's text, on this rank or another.

    gloo tells only rank 0 the limit of a monitored barrier and who was missing, and the other ranks to ask rank 0.
    """
    return limit_passed(text) is not None or "successfully reached monitoredBarrier" in text


def from_collective(error: BaseException) -> bool:
    """Return whether torch's C++ raised `error` for a collective: DistError, or RuntimeError in a backend's words."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and broken_collective(str(error))


_KEYS = ("CPU", "CUDA")
_SPARSE = ("SparseCPU", "SparseCUDA")
_hold_of = dist.ProcessGroup.barrier


def options(name: str) -> Any:
    return getattr(_c, f"{name}Options")()


def group_of(boxed: Any) -> dist.ProcessGroup:
    return _c.ProcessGroup.unbox(boxed)


def reduce_op_of(boxed: Any) -> dist.ReduceOp:
    return dist.ReduceOp(dist.ReduceOp.RedOpType(boxed.op()))


def tells_reduce_op() -> bool:
    """Return whether an operator can tell its reduce op: from torch 2.10 on."""
    return hasattr(torch.classes.c10d.ReduceOp(), "op")


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that an operator passes its arguments to. Raises RuntimeError for a device without one."""
    return group._get_backend(device)


class _Holder(dist.ProcessGroup):
    """Makes torch wrap a Work of Python in one of C++ that keeps it alive: only its trampolines do."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.work: Any = None

    def barrier(self, *_: Any) -> Any:
        return self.work


def boxed_work(work: dist.Work | None) -> Any:
    """Return a work as an operator returns it; one written in Python stays alive for as long as C++ holds it.

    None is what ProcessGroupNCCL returns from torch 2.8 on for a call that is not asynchronous: it has been put on the
    caller's own stream, so that there is nothing to wait for.
    """
    if work is None:
        work = _c.FakeWork()
    if type(work).__module__.startswith("ncclguard"):
        holder = _Holder()
        holder.work = work
        work = _hold_of(holder)
    return work.boxed()


def backend_has(method: str) -> bool:
    """Return whether a backend's method can be called from Python."""
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
                        # Two hooks may replace the same operator, and the later one is used until it is removed;
                        # Library.impl takes a second kernel only with `allow_override`, which torch has from 2.8 on.
                        getattr(torch.library, "_impls", set()).discard(f"c10d/{name}/{key}")
                        self._library.impl(name, kernel, key)

    def remove(self) -> None:
        """Put torch's own kernels back."""
        library, self._library = self._library, None
        if library is not None:
            library._destroy()
