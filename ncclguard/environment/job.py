"""What the launcher's environment says about the job: rank, size, hosts, master."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

_DEFAULT_PORT = 29500  # torch/distributed/run.py, DeepSpeed's TORCH_DISTRIBUTED_DEFAULT_PORT


class Job(BaseModel):
    """The job as its launcher describes it; None where it says nothing."""

    model_config = ConfigDict(frozen=True)

    launcher: str | None = None
    rank: int | None = None
    world_size: int | None = None
    hosts: int | None = None
    master_addr: str | None = None
    master_port: int = _DEFAULT_PORT

    @property
    def single_host(self) -> bool:
        """Whether all ranks are known to run on this host."""
        if self.hosts is not None:
            return self.hosts == 1
        return self.master_addr is not None and is_loopback_name(self.master_addr)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process speaks for the job (also when no launcher says otherwise)."""
        return self.rank in (None, 0)


def is_loopback_name(address: str) -> bool:
    """Whether a master address means "this host" by itself (127.0.1.1, which Debian gives to the host's own name,
    does not)."""
    return address.lower() in ("localhost", "127.0.0.1", "::1", "[::1]", "localhost.localdomain", "ip6-localhost")


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        text = environ.get(name, "").strip()
        if text.isdigit():
            return int(text)
    return None


def _launcher(environ: Mapping[str, str]) -> str | None:
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if "CROSS_SIZE" in environ and "LOCAL_SIZE" in environ:
        return "deepspeed"
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return "mpirun"
    if "SLURM_PROCID" in environ:
        return "srun"
    return None


def _hosts(environ: Mapping[str, str], world_size: int | None) -> int | None:
    if world_size == 1:
        return 1
    told = _number(environ, "GROUP_WORLD_SIZE", "CROSS_SIZE")
    if told is not None:
        return told
    local = _number(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    if world_size is not None and local:
        return -(-world_size // local)  # hosts with fewer ranks than this one still count as one each, at least
    return _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def read_job(environ: Mapping[str, str]) -> Job:
    """The job that torchrun, DeepSpeed's launcher, mpirun, srun or a hand-written script describes.

    >>> read_job({"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}).hosts
    2
    """
    world_size = _number(environ, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return Job(
        launcher=_launcher(environ),
        rank=_number(environ, "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
        world_size=world_size,
        hosts=_hosts(environ, world_size),
        master_addr=environ.get("MASTER_ADDR", "").strip() or None,
        master_port=_number(environ, "MASTER_PORT") or _DEFAULT_PORT,
    )
