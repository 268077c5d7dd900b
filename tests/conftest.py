"""What all tests share: settings as if nobody had set any, and property tests that are the same in every run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest

from ncclguard import config
from ncclguard.faults import launcher
from ncclguard.faults.forkserver import PRELOAD_VARIABLE

hypothesis.settings.register_profile("ncclguard", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ncclguard")
launcher.DEFAULT = "fork"  # imports torch once for the ranks of all jobs
os.environ[PRELOAD_VARIABLE] = "torch._dynamo"  # which the first step of DistributedDataParallel imports
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: tests and their ranks send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def default_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts from the defaults, whatever the shell exports, and leaves them behind."""
    settings = {config.PREFIX + name.upper() for name in config.GuardConfig.model_fields}
    for name in settings & set(os.environ):
        monkeypatch.delenv(name)
    config.reset_config()
    yield
    config.reset_config()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without a free byte."""
    with mounted(tmp_path / "full", "size=16k") as folder:
        with pytest.raises(OSError, match="No space left"), open(folder / "filler", "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        yield folder


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A read-only file system: root may write into any other folder."""
    with mounted(tmp_path / "read_only", "ro") as folder:
        yield folder


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own on a new `folder`; the test is skipped where none can be mounted."""
    if os.getuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False, capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
