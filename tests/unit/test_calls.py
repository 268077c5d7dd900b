"""Wrong calls alone: refused with the same sentences as in a job, although there would be nobody to send to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch.distributed import ReduceOp

import ncclguard as ng
from ncclguard.engine.call import check_tensor, terms_of
from ncclguard.process_group import redirected

T = torch.ones(4)
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a misspelt argument": (
        lambda: ng.safe_barrier(timout=3), TypeError, r"safe_barrier has no argument 'timout': did you mean timeout=\?",  # type: ignore[call-arg]
    ),
    "an argument of nothing": (
        lambda: ng.watch(xyz=3), TypeError, "watch has no argument 'xyz': there are group, timeout, on_hang, on_incident",  # type: ignore[call-arg]
    ),
    "no function": (
        lambda: ng.watch(on_incident=5), TypeError, "on_incident must be a function that takes an Incident, not int",  # type: ignore[arg-type]
    ),
    "a misspelt phase": (lambda: ng.phase("evel"), ng.GuardConfigError, r"no phase 'evel': did you mean 'eval'\?"),
    "a phase of nothing": (lambda: ng.phase("x"), ng.GuardConfigError, "no phase 'x': there are 'train', 'eval', 'small'"),
    "a limit of a phase": (
        lambda: ng.phase("eval", 30), TypeError, r"phase takes a name and no more, not 30: the limit inside is a setting, configure\(timeout_eval=",  # type: ignore[call-arg]
    ),
    "a named limit of a phase": (
        lambda: ng.phase("small", timeout=30), TypeError, "not timeout=30: .*NCCLGUARD_TIMEOUT_SMALL; a call has one of its own by timeout=",  # type: ignore[call-arg]
    ),
    "op as text": (lambda: ng.safe_all_reduce(T, "sum"), TypeError, r"not str: did you mean dist\.ReduceOp\.SUM\?"),
    "op as another word": (lambda: ng.safe_all_reduce(T, "mean"), TypeError, r"did you mean dist\.ReduceOp\.AVG\?"),
    "no limit as group": (lambda: ng.safe_all_reduce(T, group=0), TypeError, "not int: give what dist.new_group"),  # type: ignore[arg-type]
    "a limit as op": (lambda: ng.safe_all_reduce(T, 300), TypeError, "not int: a limit is given by its name, timeout=300"),
    "a group as op": (
        lambda: ng.safe_all_reduce(T, dist.ProcessGroup(0, 1)), TypeError, r"not ProcessGroup: a group is given by its name, group=",
    ),
    "a group as source": (
        lambda: ng.safe_broadcast(T, dist.ProcessGroup(0, 1)), TypeError, r"not ProcessGroup: give a number, and the group by",  # type: ignore[arg-type]
    ),
    "no source": (lambda: ng.safe_broadcast(T), TypeError, r"safe_broadcast needs src: call safe_broadcast\(tensor, src\)$"),  # type: ignore[call-arg]
    "a limit for a function": (
        lambda: ng.resilient_evaluate(300), TypeError, "function that evaluates, not int: a limit is given by its name, timeout=300",  # type: ignore[call-overload]
    ),
    "a class of models": (
        lambda: ng.resilient_step(torch.nn.Linear), TypeError, r"not the class Linear: give what it makes, Linear\(\.\.\.\)",
    ),
    "a misspelt option of a step": (
        lambda: ng.resilient_step(torch.nn.Linear(1, 1), loaders=1), TypeError, r"resilient_step has no argument 'loaders': did you mean loader=",
    ),
    "no function for numbers": (
        lambda: ng.watch_numerics(torch.nn.Linear(1, 1), on_found="x"), TypeError, "on_found must be a function .*, not str: give one",  # type: ignore[arg-type]
    ),
    "op as a list": (lambda: ng.safe_all_reduce(T, [1]), TypeError, "op must be a torch.distributed.ReduceOp"),
    "op for the dtype": (lambda: ng.safe_all_reduce(T, ReduceOp.BAND), ValueError, "BAND needs an integer"),
    "PREMUL_SUM": (
        lambda: ng.safe_reduce_scatter(T, [T], ReduceOp.PREMUL_SUM), ValueError, "PREMUL_SUM is not supported",
    ),
    "chunk below 1": (lambda: ng.safe_all_reduce(T, chunk_numel=-1), ValueError, "at least 1, got -1"),
    "chunk as text": (lambda: ng.safe_broadcast(T, 0, chunk_numel="x"), TypeError, "elements, not str"),  # type: ignore[arg-type]
    "chunk as truth": (lambda: ng.safe_all_gather([T], T, chunk_numel=True), TypeError, "elements, not bool"),
    "chunk not whole": (lambda: ng.safe_all_reduce(T, chunk_numel=2.5), ValueError, "whole number .* got 2.5"),
    "chunk not a number": (lambda: ng.safe_all_reduce(T, chunk_numel=float("nan")), ValueError, "got nan"),
    "chunk without end": (lambda: ng.safe_all_reduce(T, chunk_numel=float("inf")), ValueError, "got inf"),
    "atomic": (lambda: ng.safe_all_reduce(T, atomic="maybe"), ValueError, "atomic must be"),  # type: ignore[arg-type]
    "source as text": (lambda: ng.safe_broadcast(T, "zero"), TypeError, "src must be a global rank"),  # type: ignore[arg-type]
    "source": (lambda: ng.safe_broadcast(T, 3), ValueError, "src 3 is not a global rank"),
    "source of objects": (lambda: ng.safe_broadcast_object_list([1], 3), ValueError, "src 3 is not a global rank"),
    "objects in a tuple": (lambda: ng.safe_all_gather_object((None,), 1), TypeError, "must be a list"),  # type: ignore[arg-type]
    "objects in nothing": (lambda: ng.safe_all_gather_object(None, 1), TypeError, "must be a list"),  # type: ignore[arg-type]
    "nested": (
        lambda: ng.safe_all_reduce(torch.nested.nested_tensor([T, T[:2]])), ValueError, "nested tensor",
    ),
    "expanded": (lambda: ng.safe_all_reduce(T[:1].expand(4)), ValueError, "share memory"),
    "expanded source": (lambda: ng.safe_broadcast(T[:1].expand(4), 0), ValueError, "share memory"),
    "expanded slot": (lambda: ng.safe_all_gather([T[:1].expand(4)], T), ValueError, r"tensor_list\[0\] .* share memory"),
    "one slot for all": (lambda: ng.safe_all_gather([T] * 2, T), ValueError, "the same memory more than once"),
    "expanded output": (lambda: ng.safe_reduce_scatter(T[:1].expand(4), [T]), ValueError, "output .* share memory"),
    "sliding window": (lambda: ng.safe_all_reduce(T.unfold(0, 2, 1)), ValueError, "share memory"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused_alone(name: str) -> None:
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call()
    assert T.tolist() == [1.0] * 4


@pytest.mark.processes
def test_a_call_after_the_end_of_the_jobs_process_group_says_so() -> None:
    program = (
        "import torch.distributed as dist, ncclguard as ng; from ncclguard.engine import runtime; runtime.install();"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); dist.destroy_process_group();"
        "ng.safe_barrier()"
    )
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, env=env, capture_output=True, text=True, timeout=120
    )
    assert "GuardConfigError: the process group of the job was destroyed in this process" in done.stderr, done.stderr


#: Everything that takes a group or, by mistake, a limit in its place.
GROUPED: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: ng.safe_all_reduce(T, ReduceOp.SUM, group),
    "barrier": lambda group: ng.safe_barrier(group),
    "broadcast": lambda group: ng.safe_broadcast(T, 0, group),
    "all_gather": lambda group: ng.safe_all_gather([T], T, group),
    "reduce_scatter": lambda group: ng.safe_reduce_scatter(T, [T], ReduceOp.SUM, group),
    "all_gather_object": lambda group: ng.safe_all_gather_object([None], 1, group),
    "broadcast_object_list": lambda group: ng.safe_broadcast_object_list([1], 0, group),
    "watch": lambda group: ng.watch(group),
    "nccl_timeout_handler": lambda group: ng.nccl_timeout_handler(30, group),
    "redirected": lambda group: redirected(group),
    "resilient_evaluate": lambda group: ng.resilient_evaluate(lambda: 1, group=group),
    "resilient_step": lambda group: ng.resilient_step(group=group)(lambda: 1),
}
LIMITED = {name: call for name, call in GROUPED.items() if not name.startswith("resilient")} | {
    "resilient_evaluate": lambda limit: ng.resilient_evaluate(limit),
    "resilient_step": lambda limit: ng.resilient_step(torch.nn.Linear(1, 1), limit),
}


@pytest.mark.parametrize("name", LIMITED)
@pytest.mark.parametrize("limit", [30, 1800.0, timedelta(minutes=5)])
def test_a_limit_that_is_given_by_position_is_told_where_it_goes(name: str, limit: object) -> None:
    with pytest.raises(TypeError, match=re.escape(f"a limit is given by its name, timeout={limit!r}")):
        LIMITED[name](limit)


class LikeAMesh:
    """As torch's DeviceMesh, which needs ranks."""

    def get_group(self, dimension: str) -> None: ...


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(
    ("group", "error", "text"),
    [("WORLD", TypeError, "must be a torch.distributed.ProcessGroup or None, not str"),
     (True, TypeError, "ProcessGroup or None, not bool"),
     (LikeAMesh(), TypeError, r"not LikeAMesh: give the group of one of its dimensions, get_group\("),
     (dist.GroupMember.NON_GROUP_MEMBER, ValueError, "not a member of the group that was given")],
)  # fmt: skip
def test_what_is_no_group_is_refused(name: str, group: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        GROUPED[name](group)


def test_a_rank_that_is_not_in_the_group_is_refused_under_the_name_of_its_argument() -> None:
    terms = terms_of(None, None, 1)
    for wrong, error in ((3, ValueError), ("zero", TypeError)):
        with pytest.raises(error, match="^dst "):
            terms.member(wrong, "dst")  # type: ignore[arg-type]


LAUNCHED = {
    "torchrun": ({"WORLD_SIZE": "2", "RANK": "0"}, "started 2 ranks (WORLD_SIZE=2)"),
    "mpirun": ({"OMPI_COMM_WORLD_SIZE": "3"}, "started 3 ranks (OMPI_COMM_WORLD_SIZE=3)"),
    "srun": ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "started 4 ranks (SLURM_STEP_NUM_TASKS=4)"),
}


@pytest.mark.parametrize("launcher", LAUNCHED)
@pytest.mark.parametrize("name", [name for name in GROUPED if name not in ("watch", "nccl_timeout_handler")])
def test_no_call_succeeds_alone_in_a_job_of_several_ranks(
    name: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would keep its own values and be told that all is well."""
    variables, text = LAUNCHED[launcher]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ng.GuardConfigError, match=re.escape(text) + ".*call torch.distributed.init_process_group"):
        made = GROUPED[name](None)
        made()  # what the functions have made of theirs


def test_a_shell_of_slurm_and_a_launcher_of_one_rank_start_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert ng.safe_barrier()


@pytest.mark.parametrize("chunk", [2, 2.0, 5e7])
def test_whole_floats_are_numbers_of_elements(chunk: float) -> None:
    assert ng.safe_all_reduce(T.clone(), chunk_numel=chunk)


def test_inputs_may_share_memory() -> None:
    slots, output = [torch.zeros(4)], torch.zeros(4)
    assert ng.safe_all_gather(slots, T[:1].expand(4))
    assert ng.safe_reduce_scatter(output, [T[:1].expand(4)])
    assert slots[0].tolist() == output.tolist() == [1.0] * 4


def test_results_alone_are_written_into_inference_tensors() -> None:
    with torch.inference_mode():
        slot, output = torch.zeros(4), torch.zeros(4)
    assert ng.safe_all_gather([slot], T)
    assert ng.safe_reduce_scatter(output, [T])
    assert slot.tolist() == output.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [({}, {"atomic": False, "on_lost": "shrink"}), ({"atomic": False}, {"on_lost": "shrink"}),
     ({"on_lost": "shrink"}, {"atomic": False})],
)  # fmt: skip
def test_shrinking_needs_the_copy(settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    """What GuardConfig refuses as a pair of settings, also where an argument is half of it."""
    ng.configure(**settings)
    for call in (
        lambda: ng.safe_all_reduce(T, **arguments),
        lambda: ng.safe_broadcast(T, 0, **arguments),
        lambda: ng.safe_all_gather([T], T, **arguments),
        lambda: ng.safe_reduce_scatter(T, [T], **arguments),
    ):
        with pytest.raises(ValueError, match="contradict each other"):
            call()


def test_what_has_no_input_to_keep_shrinks_without_the_copy() -> None:
    ng.configure(atomic=False)
    assert ng.safe_barrier(on_lost="shrink")
    assert ng.safe_all_gather_object([None], 1, on_lost="shrink")


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), min_size=1, max_size=2),
    st.booleans(),
)
def test_an_output_is_refused_exactly_when_two_elements_share_memory(
    dimensions: list[tuple[int, int]], with_one: bool
) -> None:
    """Up to two dimensions, and one of a single element between them."""
    dimensions = [dimensions[0], (1, 0), *dimensions[1:]] if with_one else dimensions
    shape, strides = zip(*dimensions, strict=True)
    view = torch.arange(64).as_strided(shape, strides)
    shared = view.unique().numel() < view.numel()
    if not shared:
        check_tensor(view, "output", written=True)
        return
    with pytest.raises(ValueError, match="share memory"):
        check_tensor(view, "output", written=True)
