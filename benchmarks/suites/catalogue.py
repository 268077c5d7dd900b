"""The suites: what each needs, and the commands that it consists of."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Suite:
    """What is run, which packages it needs, and how these are installed.

    `parts` gets the number of ranks and a folder for files.
    """

    about: str
    packages: tuple[str, ...]
    install: str
    parts: Callable[[int, Path], list[Part]]
    ranks: tuple[int, ...] = (2,)

    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


def launched(ranks: int, *program: str) -> tuple[str, ...]:
    """Return the command that starts a program under torchrun on this machine."""
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program)


def torch_parts(ranks: int, folder: Path) -> list[Part]:
    """torch's own tests of a backend."""
    env = {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": str(folder),
        "INIT_METHOD": f"file://{folder}/met",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "100",  # seconds of one test, where torch has no other for it
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


SUITES: Final = {
    "torch": Suite(
        "torch.testing._internal.distributed.distributed_test, with forked ranks",
        ("torch", "expecttest", "pytest"), "expecttest pytest", torch_parts, (2, 3, 4),
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
}  # fmt: skip
