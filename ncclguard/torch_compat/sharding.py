"""The shards of parameters and the ranks that have them, by private names of FSDP2 (`fully_shard`) and DTensor.

Ran on torch 2.13.0 (CPU), and 2.13.0 and 2.15.0 (emulated GPU). `obstacle` says what a model, or a version of torch,
has that cannot be sharded anew.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from ncclguard.torch_compat.groups import group_ranks
from ncclguard.torch_compat.stores import PrefixStore


def is_sharded(tensor: object) -> bool:
    """Return whether each rank has a part of this tensor only."""
    return isinstance(tensor, DTensor) and any(not placement.is_replicate() for placement in tensor.placements)


def is_on_mesh(tensor: object) -> bool:
    """Return whether a tensor says how it is spread over ranks, sharded or not."""
    return isinstance(tensor, DTensor)


def shards_parameters(model: nn.Module) -> bool:
    """Return whether a lost rank takes parameters of this model with it: FSDP of either kind, or any DTensor."""
    return isinstance(model, FullyShardedDataParallel) or any(
        isinstance(module, (FSDPModule, FullyShardedDataParallel))
        or any(is_sharded(parameter) for parameter in module.parameters(recurse=False))
        for module in model.modules()
    )


def obstacle(model: nn.Module, group: dist.ProcessGroup) -> str:
    """Return why this model's shards cannot be dealt out anew among some ranks of `group`; "" if they can."""
    if not hasattr(FSDPModule, "reset_iter_state") or not hasattr(c10d, "_register_pg_in_world"):
        return f"torch {torch.__version__} has no FSDPModule.reset_iter_state: torch 2.13 has"
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return "FullyShardedDataParallel (FSDP1) keeps flat shards: use fully_shard"
    known = set()
    for each in _param_groups(model):
        mesh, kind = each.mesh_info.mesh, type(each.mesh_info).__name__
        if mesh.ndim != {"FSDPMeshInfo": 1, "HSDPMeshInfo": 2}.get(kind) or each.mesh_info.is_spmd_mesh:
            return (
                f"its mesh {mesh} has other dimensions than the one that shards, or than one that replicates and one "
                "that shards: make it of these"
            )
        if each.mesh_info.shard_mesh_dim != mesh.ndim - 1:
            return f"the first dimension of its mesh {mesh} shards: make it (replicate, shard)"
        is_all = each.mesh_info.shard_process_group is group or mesh.ndim == 2
        if not is_all or tuple(mesh.mesh.flatten().tolist()) != group_ranks(group):
            return f"its mesh {mesh} is not of the process group of the steps: use init_device_mesh over all ranks"
        if mesh != mesh_of([model]):
            return f"it is on two meshes, {mesh} and {mesh_of([model])}: use one"
        if each.post_forward_mesh_info not in (None, each.mesh_info):
            return "reshard_after_forward is a number: use True or False"
        if each.mesh_info.reduce_scatter_process_group is not None:
            return "gradients are reduced on a process group of their own"
        if type(each._all_gather_comm).__name__ != "DefaultAllGather":
            return "parameters are gathered by an object of its own (set_custom_all_gather, symmetric memory)"
        if type(each._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
            return "gradients are reduced by an object of its own (set_custom_reduce_scatter, symmetric memory)"
        for fsdp_param in each.fsdp_params:
            known.add(id(fsdp_param.sharded_param))
            if fsdp_param.is_dtensor:
                return "its parameters are also sharded otherwise (tensor or expert parallelism)"
            if fsdp_param.fsdp_placement.dim != 0:
                return f"a parameter is sharded on dimension {fsdp_param.fsdp_placement.dim}: use dimension 0"
            if fsdp_param.offload_to_cpu:
                return "CPUOffloadPolicy has not been tried with it"
            if type(fsdp_param.sharded_param._local_tensor) is not torch.Tensor:
                return f"shards are {type(fsdp_param.sharded_param._local_tensor).__name__}, of which the size is not known"
    if any(is_sharded(parameter) and id(parameter) not in known for parameter in model.parameters()):
        return "it has a parameter that is sharded, but not by fully_shard"
    return "" if known else "nothing in it is sharded, so there is nothing to copy: leave copies and load out"


def _states(model: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield state


def _param_groups(model: nn.Module) -> Iterator[Any]:
    for state in _states(model):
        if hasattr(state, "_fsdp_param_groups"):
            yield from state._fsdp_param_groups
        elif state._fsdp_param_group is not None:  # up to 2.11 a module has one, or none of its own
            yield state._fsdp_param_group


def gathered_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return what FSDP2 gathers its shards to, by name: autograd's leaves, there from the first forward pass on."""
    for group in _param_groups(model):
        for fsdp_param in group.fsdp_params:
            gathered = getattr(fsdp_param, "_unsharded_param", None)
            if gathered is not None:
                yield fsdp_param._param_fqn or fsdp_param._module_info.param_name, gathered


def parameters(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the sharded parameters of FSDP2 models, also where gathered ones replace them; each once, in order."""
    found = {id(parameter): parameter for model in models for _, parameter in named_parameters(model)}
    return list(found.values())


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model by name, the sharded ones of FSDP2 also where gathered ones replace them."""
    places = {}  # id of a parameter that may be in a sharded one's place -> the sharded one
    for each in _param_groups(model):
        for fsdp_param in each.fsdp_params:
            places[id(fsdp_param.sharded_param)] = fsdp_param.sharded_param
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            if unsharded is not None:
                places[id(unsharded)] = fsdp_param.sharded_param
    for name, parameter in model.named_parameters():
        yield name, places.get(id(parameter), parameter)


def layout(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return how a DTensor is spread over its mesh, in words alike on all ranks, and which part of it this rank has.

    None for one of which no other rank has this part, or of which parts are to be added up.
    """
    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    whole = [placement.is_replicate() for placement in placements]
    copies = math.prod(size for size, same in zip(mesh.shape, whole, strict=True) if same)
    coordinate = mesh.get_coordinate()
    if copies == 1 or coordinate is None or any(placement.is_partial() for placement in placements):
        return None
    place = [index for index, same in zip(coordinate, whole, strict=True) if not same]
    return f"{tuple(mesh.shape)} {placements}", f"{mesh.mesh.tolist()} {place}"


def offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the place of this rank's part in the whole DTensor: that of its first element."""
    assert isinstance(tensor, DTensor)
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def on_first_dimension(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is sharded over the last dimension of a mesh, by its rows, and over no other."""
    return isinstance(tensor, DTensor) and tuple(tensor.placements) == _by_rows(tensor.device_mesh)


def _by_rows(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return (*[Replicate()] * (mesh.ndim - 1), Shard(0))


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor says that every rank has all of it."""
    return isinstance(tensor, DTensor) and all(placement.is_replicate() for placement in tensor.placements)


def of_same_kind(part: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int]) -> DTensor:
    """Make a tensor of this global shape, of which this rank has `part`: rows, by the last dimension of the mesh."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(part, mesh, _by_rows(mesh), run_check=False, shape=torch.Size(shape), stride=stride)


def on_mesh(value: Any, mesh: DeviceMesh) -> Any:
    """Return a value that every rank has, placed on another mesh if it is a DTensor."""
    if not is_whole(value):
        return value
    return DTensor.from_local(value._local_tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def reset(model: nn.Module) -> None:
    """Clear the remains of a failed forward or backward in an FSDP2 model: gathered parameters, and gradients."""
    for each in _param_groups(model):
        result = each._all_gather_result
        if result is not None and result.all_gather_work is not None:
            with contextlib.suppress(Exception):  # the forward or backward has failed, and this may fail again
                result.all_gather_work.wait()
            each._all_gather_result = None
    for state in _states(model):
        if state._is_root:
            state._reset_iter_state()
    for each in _param_groups(model):
        for fsdp_param in each.fsdp_params:
            fsdp_param.sharded_param.grad = None
            if "unsharded_accumulated_grad" in vars(fsdp_param):  # before torch 2.15, which uses the parameter's
                fsdp_param.unsharded_accumulated_grad = None
            if hasattr(fsdp_param, "_unsharded_param"):
                fsdp_param._unsharded_param.grad = None


def move(models: Iterable[nn.Module], mesh: DeviceMesh, parts: dict[int, torch.Tensor]) -> None:
    """Shard FSDP2 models over `mesh`, after `reset`.

    `parts`: this rank's rows of each sharded parameter, by its id, contiguous, in memory of their own that may be
    longer: as many rows as rank 0 of the mesh has.
    """
    index, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    for model in models:
        for each in _param_groups(model):
            info = each.mesh_info
            info.mesh, info.shard_mesh_size, info.shard_mesh_rank = mesh, size, index
            info.shard_process_group = mesh.get_group(mesh.ndim - 1)
            if mesh.ndim == 2:
                info.replicate_mesh_size, info.replicate_mesh_rank = mesh.size(0), mesh.get_local_rank(0)
                info.replicate_process_group = mesh.get_group(0)
            for fsdp_param in each.fsdp_params:
                _move_parameter(fsdp_param, mesh, parts[id(fsdp_param.sharded_param)])


def _move_parameter(fsdp_param: Any, mesh: DeviceMesh, part: torch.Tensor) -> None:
    rows, *rest = fsdp_param._orig_size
    padded = torch.Size([-(-rows // mesh.size(mesh.ndim - 1)), *rest])
    flat = torch.as_strided(part, (padded.numel(),), (1,), part.storage_offset())
    fsdp_param.sharded_size, fsdp_param.padded_sharded_param_size = part.size(), padded
    fsdp_param.contiguous_sharded_stride = part.stride()
    fsdp_param._sharded_param_data = flat
    parameter = fsdp_param.sharded_param
    parameter._local_tensor = part
    parameter._spec = of_same_kind(part, mesh, fsdp_param._orig_size)._spec
    fsdp_param._sharding_spec, fsdp_param._spmd_mesh = parameter._spec, mesh
    fsdp_param._shard_mesh = fsdp_param._init_shard_mesh()  # of the mesh of `mesh_info`
    if hasattr(fsdp_param, "_sharding_spec_by_dtype"):  # torch 2.15
        fsdp_param._sharding_spec_by_dtype.clear()
    fsdp_param.all_gather_outputs = []  # made anew, with the lengths of the new mesh
    if hasattr(fsdp_param, "_unsharded_param"):
        del fsdp_param._unsharded_param


def mesh_over(groups: Sequence[dist.ProcessGroup], ranks: torch.Tensor, like: DeviceMesh) -> DeviceMesh:
    """Make the mesh of these ranks, of which `groups`, that torch knows, are this rank's groups of each dimension."""
    group: Any = list(groups) if ranks.ndim > 1 else groups[0]
    return DeviceMesh.from_group(group, like.device_type, mesh=ranks, mesh_dim_names=like.mesh_dim_names)


def replicas(model: nn.Module) -> int:
    """Return how many ranks have each shard of a model: several with HSDP, else one."""
    mesh = next((each.mesh_info.mesh for each in _param_groups(model)), None)
    return mesh.size(0) if mesh is not None and mesh.ndim > 1 else 1


def groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return this rank's groups of the dimensions of an FSDP2 model's mesh, that which shards last."""
    return mesh_of([model]).get_all_groups()


def mesh_of(models: Iterable[nn.Module]) -> DeviceMesh:
    """Return the mesh over which FSDP2 models are sharded."""
    return next(each.mesh_info.mesh for model in models for each in _param_groups(model))  # type: ignore[no-any-return]


def make_known(group: dist.ProcessGroup, name: str, ranks: Sequence[int], like: dist.ProcessGroup) -> None:
    """Register with torch a process group made by hand, as if `new_group` had made it. `ranks`: global, in order."""
    world: Any = c10d._world
    named: Any = name
    backend, store = world.pg_map[like]
    group._set_group_name(named)
    mapping = {rank: index for index, rank in enumerate(ranks)}
    register = getattr(c10d, "_register_pg_in_world", _register)
    register(group, backend, PrefixStore(name, store), named, world.pg_backend_config[like], mapping)


def _register(group: Any, backend: str, store: Any, name: Any, config: str, mapping: dict[int, int]) -> None:
    """Do what `_register_pg_in_world` does, which came with torch 2.12 or 2.13."""
    private: Any = c10d
    world = private._world
    world.pg_map[group], world.pg_names[group], world.pg_backend_config[group] = (backend, store), name, config
    world.pg_group_ranks[group] = mapping
    private._register_process_group(name, group)
    world.pg_to_tag[group] = f"ptd:{name}"
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
