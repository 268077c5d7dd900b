"""Which ranks there are, from the variables of torchrun, srun or nobody."""

from __future__ import annotations

import pytest
import torch

from ncclguard.bench.arguments import BenchError
from ncclguard.bench.ranks import (
    PIPE_VARIABLE,
    World,
    choose_backend,
    choose_ranks,
    detect,
    device_of,
    first_host,
    own_environment,
    ranks_sharing,
    rendezvous_variables,
)

MASTER = {"MASTER_ADDR": "h", "MASTER_PORT": "1"}
STEP = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-06]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "1",
}


def test_nobody_started_ranks() -> None:
    """No launcher; also inside an sbatch script or an salloc shell, where no step's variables are."""
    assert detect({}) is None
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None
    assert detect({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) is None


def test_torchrun_and_plain_variables_and_the_bench_itself() -> None:
    """Rank, size and local place as they are given; the launcher's name for the environment line."""
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MASTER}
    assert detect({**given, "TORCHELASTIC_RUN_ID": "x"}) == World(3, 4, 1, 2, "torchrun")
    assert detect({"RANK": "0", "WORLD_SIZE": "1", **MASTER}) == World(0, 1, 0, 1, "RANK and WORLD_SIZE")
    own = detect({**own_environment(1, 3, 555), PIPE_VARIABLE: "9"})
    assert own == World(1, 3, 1, 3, "the bench")


def test_srun_gives_rank_local_place_and_a_rendezvous() -> None:
    """Node 2 of `2(x3),1` has two tasks; the first host of the list is the master; the port follows from the job."""
    world = detect(STEP)
    assert world == World(5, 7, 1, 2, "srun")
    variables = rendezvous_variables(world, STEP)
    assert variables["MASTER_ADDR"] == "gpu03"
    assert 20000 <= int(variables["MASTER_PORT"]) < 40000
    assert rendezvous_variables(world, {**STEP, "MASTER_ADDR": "mine"})["MASTER_ADDR"] == "mine"
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("5", "7")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a1,b2", "a1"), ("gpu[003-006,9],x", "gpu003"), ("n[1,2]-ib,c", "n1-ib"), ("r-1-[07-08]", "r-1-07")],
)
def test_the_first_host_of_a_slurm_list(nodes: str, host: str) -> None:
    """With and without ranges, leading zeros kept."""
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
        ({"RANK": "x", "WORLD_SIZE": "2", **MASTER}, "not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MASTER}, "not in a world of 2"),
        ({**STEP, "SLURM_PROCID": ""}, "not a whole number"),
    ],
)
def test_a_launchers_half_told_world_is_refused(environment: dict[str, str], says: str) -> None:
    """BenchError that names the variable and what to do."""
    with pytest.raises(BenchError, match=says):
        detect(environment)


def test_ranks_and_backend_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank per GPU over NCCL where there are GPUs, else two gloo ranks; four for a rehearsal; --ranks wins."""
    assert choose_ranks(None, "gloo", fault=False) == 2
    assert choose_ranks(None, "gloo", fault=True) == 4
    assert choose_ranks(7, "gloo", fault=True) == 7
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert choose_ranks(None, "nccl", fault=False) == 8
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_backend(None) == "gloo"
    with pytest.raises(BenchError, match="leave --backend away"):
        choose_backend("nccl")


def test_ranks_beyond_the_gpus_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ranks on two GPUs: three share the first, two the second; on the CPU all share the host."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    places = [World(rank, 5, rank, 5, "torchrun") for rank in range(5)]
    devices = [device_of(place, "nccl") for place in places]
    assert [device.index for device in devices] == [0, 1, 0, 1, 0]
    assert [ranks_sharing(place, device) for place, device in zip(places, devices, strict=True)] == [3, 2, 3, 2, 3]
    assert device_of(places[0], "gloo") == torch.device("cpu")
    assert ranks_sharing(places[0], torch.device("cpu")) == 5
