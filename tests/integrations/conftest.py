"""What the tests with frameworks need before their ranks start."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclguard.faults.forkserver import PRELOAD_VARIABLE

#: Imported once for the ranks of all jobs: it takes each of them ten seconds and more.
SLOW = ("torch._dynamo", "torch.distributed.fsdp", "accelerate", "deepspeed.runtime.engine", "transformers.trainer")
BUILD = """
import deepspeed
from deepspeed.comm.torch import build_shm_op
build_shm_op()
"""


@pytest.fixture(scope="session", autouse=True)
def frameworks() -> Iterator[None]:
    """Ranks are forked from a process that has imported the frameworks which are installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv(PRELOAD_VARIABLE, " ".join(name for name in SLOW if importlib.util.find_spec(name.split(".")[0])))
        yield


@pytest.fixture(scope="session", autouse=True)
def deepspeed_operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile once, and in a folder of this run, what `deepspeed.init_distributed` otherwise compiles in the first rank.

    There it takes longer than a job with a limit may take, and the lock that a killed job leaves in the user's cache makes all later
    starts wait without end.
    """
    if importlib.util.find_spec("deepspeed") is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        base = tmp_path_factory.getbasetemp()
        # One folder for all workers of a run: one builds, the others wait for it.
        folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "torch_extensions"))
        patch.setenv(
            "PATH", str(Path(sys.executable).parent), prepend=os.pathsep
        )  # where ninja is, installed with DeepSpeed
        built = subprocess.run(
            [sys.executable, "-c", BUILD],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert built.returncode == 0, built.stdout + built.stderr
        yield
