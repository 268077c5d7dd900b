"""The suites: what each needs, and the commands that it consists of."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

PROGRAMS: Final = Path(__file__).parent / "programs"
#: Where neither the machine nor the suite has a network to fetch models from, a test says so at once.
OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Part:
    """One command, with its limit in seconds: a file of pytest with many tests, or a program that is one test."""

    name: str
    command: tuple[str, ...]
    limit: float
    env: Mapping[str, str] = field(default_factory=dict)
    pytest: bool = False
    prefix: str = ""


@dataclass(frozen=True)
class Repository:
    """Tests that no package has: files of pytest in a checkout of `commit` that the user makes.

    `files` are patterns from the checkout's root. A test has `each` seconds, a file `limit`. `env` may have `{ranks}`.
    """

    url: str
    commit: str
    files: tuple[str, ...]
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    each: int = 120
    limit: int = 1800

    def parts(self, ranks: int, source: Path) -> list[Part]:
        """Return a part for each file; its tests are named after it."""
        env = OFFLINE | {"SUITES_LIMIT": str(self.each)}
        env |= {name: value.format(ranks=ranks) for name, value in self.env.items()}
        files = dict.fromkeys(path for pattern in self.files for path in sorted(source.glob(pattern)))
        found = []
        for path in files:
            command, name = (str(path), *self.options), path.relative_to(source).as_posix()
            found.append(Part(path.stem, command, self.limit, env, pytest=True, prefix=f"{name}::"))
        return found


@dataclass(frozen=True)
class Suite:
    """What is run, which packages it needs, and how these are installed.

    `parts` gets the number of ranks and a folder for files: that of the checkout where the suite has a repository.
    """

    about: str
    packages: tuple[str, ...]
    install: str
    parts: Callable[[int, Path], list[Part]]
    ranks: tuple[int, ...] = (2,)
    repository: Repository | None = None
    place: str = "gloo"  # torch's own backend, in whose place the other is

    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


def launched(ranks: int, *program: str) -> tuple[str, ...]:
    """Return the command that starts a program under torchrun on this machine."""
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program)


def torch_parts(ranks: int, folder: Path, place: str = "gloo") -> list[Part]:
    """torch's own tests of a backend."""
    env = {
        "BACKEND": place,
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": str(folder),
        "INIT_METHOD": f"file://{folder}/met",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "100",  # seconds of one test, where torch has no other for it
        "SUITES_PRELOADED": "benchmarks.suites.programs.preloaded",  # where the ranks are not forks of the test
    }
    return [Part("distributed_test", (str(PROGRAMS / "test_torch_distributed.py"),), 3000, env, pytest=True)]


def accelerate_parts(ranks: int, _: Path) -> list[Part]:
    """The scripts that Accelerate's own tests launch."""
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None and spec.origin is not None
    scripts = Path(spec.origin).parent / "test_utils" / "scripts"
    env = OFFLINE | {"ACCELERATE_USE_CPU": "true"}
    return [
        Part(path.stem, launched(ranks, str(path)), 150, env)
        for path in sorted((*scripts.glob("test_*.py"), *scripts.glob("external_deps/test_*.py")))
    ]


def lightning_parts(ranks: int, _: Path) -> list[Part]:
    """A training with the Trainer, by strategy."""
    program = str(PROGRAMS / "lightning_trainer.py")
    return [Part(name, (sys.executable, program, name, str(ranks)), 200) for name in ("ddp", "fsdp2")]


def ray_parts(ranks: int, _: Path) -> list[Part]:
    """A training with Ray Train."""
    return [Part("ddp", (sys.executable, str(PROGRAMS / "ray_train.py"), str(ranks)), 300)]


def transformers_parts(ranks: int, _: Path) -> list[Part]:
    """A training with transformers' Trainer."""
    return [Part("trainer", launched(ranks, str(PROGRAMS / "transformers_trainer.py")), 300)]


def nanogpt_parts(ranks: int, source: Path) -> list[Part]:
    """nanoGPT's training."""
    return [Part("train.py", launched(ranks, str(PROGRAMS / "nanogpt.py"), str(source)), 300)]


def of_repository(
    about: str, packages: tuple[str, ...], repository: Repository, ranks: tuple[int, ...] = (2,), place: str = "gloo"
) -> Suite:
    """Return the suite of a repository's tests."""
    needed = (*packages, "pytest")
    return Suite(about, needed, " ".join(needed), repository.parts, ranks, repository, place)


def of_torch(about: str, *files: str, place: str = "gloo", plugin: str = "", ranks: tuple[int, ...] = (4,)) -> Suite:
    """Return the suite of files in torch's test/distributed; without a `plugin` of pytest they start four ranks."""
    repository = Repository(
        "https://github.com/pytorch/pytorch",
        "cf30153c4c131c8164ee7798e5022d810682e2cb",  # 2.13.0; `torch.version.git_version` has another torch's
        tuple(f"test/distributed/{file}" for file in files),
        ("--noconftest", *(("-p", f"benchmarks.suites.programs.{plugin}") if plugin else ())),  # theirs is for pytest 7
        # The recorder's limit is below this one.
        {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "1000", "WORLD_SIZE": "{ranks}"},
        each=120 if place == "gloo" else 300,  # an emulated GPU takes its time
    )
    return of_repository(about, ("torch", "expecttest"), repository, ranks, place)


SUITES: Final = {
    "torch": Suite(
        "torch.testing._internal.distributed.distributed_test, with forked ranks",
        ("torch", "expecttest", "pytest"), "expecttest pytest", torch_parts, (2, 3, 4),
    ),
    "torch-nccl": Suite(
        "torch.testing._internal.distributed.distributed_test on GPUs, which asks for NCCL, with forked ranks",
        ("torch", "expecttest", "pytest"), "expecttest pytest", partial(torch_parts, place="nccl"), (2, 4), place="nccl",
    ),
    "accelerate": Suite(
        "the scripts of accelerate.test_utils.scripts under torchrun",
        ("accelerate",), "accelerate", accelerate_parts,
    ),
    "lightning": Suite(
        "Lightning's Trainer with DDPStrategy and ModelParallelStrategy (FSDP2)",
        ("lightning",), "lightning", lightning_parts,
    ),
    "ray": Suite("Ray Train with TorchConfig", ("ray", "pyarrow"), "'ray[train]'", ray_parts),
    "transformers": Suite(
        "the Trainer of transformers under torchrun: steps, an evaluation and checkpoints",
        ("transformers", "accelerate"), "'transformers[torch]'", transformers_parts,
    ),
    "nanogpt": Suite(
        "nanoGPT's train.py under torchrun, with a tiny model, on CPUs",
        ("numpy",), "numpy", nanogpt_parts, (2, 4),
        Repository("https://github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", ()),
    ),
    "torch-c10d": of_torch(
        "torch's tests of process groups and functional collectives",
        "test_c10d_common.py", "test_c10d_gloo.py", "test_c10d_logger.py", "test_c10d_object_collectives.py",
        "test_c10d_pypg.py", "test_c10d_spawn_gloo.py", "test_functional_api.py", "test_device_mesh.py",
        "test_pg_wrapper.py", "test_backends.py", "test_store.py",
    ),
    "torch-training": of_torch(
        "torch's tests of uneven inputs (`Join`), of `ZeroRedundancyOptimizer` and of what is made of collectives",
        "algorithms/test_join.py", "optim/test_zero_redundancy_optimizer.py", "test_collective_utils.py",
    ),
    "torch-dtensor": of_torch("torch's tests of DTensor", "_tensor/**/test_*.py", "tensor/**/test_*.py"),
    "torch-fsdp2": of_torch("torch's tests of FSDP2 and `replicate`", "_composable/**/test_*.py"),
    "torch-fsdp2-nccl": of_torch(
        "torch's tests of FSDP2 and `replicate` on GPUs, which ask for NCCL", "_composable/**/test_*.py", place="nccl",
    ),
    "torch-checkpoint": of_torch("torch's tests of distributed checkpoints", "checkpoint/**/test_*.py"),
    "torch-pipelining": of_torch(
        "torch's tests of pipelines between ranks, on CPUs",
        "pipelining/test_schedule_multiproc.py", "pipelining/test_stage.py", plugin="pipelining_plugin", ranks=(4, 2),
    ),
    "torch-npu-pipelining": of_repository(
        "torch's tests of pipelines as torch_npu has them, on CPUs",
        ("torch", "expecttest"),
        Repository(
            "https://github.com/Ascend/pytorch", "9e73e708ab9350d203475609f36f8a43f6a0c2ab",
            ("test/distributed/pipelining/test_schedule_multiproc.py",),
            ("--noconftest", "-p", "benchmarks.suites.programs.pipelining_plugin"),
            {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "1000", "WORLD_SIZE": "{ranks}"}, each=60,
        ), (2, 4),
    ),
    "deepspeed": of_repository(
        "DeepSpeed's unit tests of its collectives and of ZeRO, on CPUs",
        ("deepspeed",),
        Repository(
            "https://github.com/deepspeedai/DeepSpeed", "edaa7221267243c7be7fb49c5d5f5c4fb97b4641",
            ("tests/unit/comm/test_*.py", "tests/unit/runtime/comm/test_*.py",
             # Not test_offload_states and test_overlap_comm_record_stream: they measure a GPU's memory, or its streams.
             "tests/unit/v1/zero/test_[!o]*.py", "tests/unit/runtime/zero/test_*.py"),
            ("-p", "benchmarks.suites.programs.deepspeed_plugin", "-m", "not nightly and not sequential"),
            # DeepSpeed ends the whole run where a test has not ended in its time.
            {"LOCAL_SIZE": "{ranks}", "DS_UNITTEST_TIMEOUT": "1000", "DS_DISABLE_REUSE_DIST_ENV": "1"},
        ), (2, 4),
    ),
}  # fmt: skip
