"""What all tests share: settings as if nobody had set any, and property tests that are the same in every run."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest

from ncclguard import config
from ncclguard.environment import reach
from ncclguard.faults import launcher
from ncclguard.faults.forkserver import PYTHON_VARIABLE
from ncclguard.faults.prefork import QUICK_END_VARIABLE
from tests import stand_ins

hypothesis.settings.register_profile("ncclguard", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ncclguard")
launcher.DEFAULT = "fork"  # imports torch once for the ranks of all jobs
# For torchrun and other programs that tests start: faults/launcher.py says why.
os.environ.setdefault("RES_OPTIONS", reach.RES_OPTIONS)
os.environ[QUICK_END_VARIABLE] = "1"  # but in tests with `whole_end`
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: tests and their ranks send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Imports once for all tests, and for all processes of pytest-xdist, which this one starts after this."""
    if not hasattr(config, "workerinput"):
        config.add_cleanup(stand_ins.start())
    os.environ.update(stand_ins.PLAIN.variables())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start ranks, which mostly wait, by turns with those that compute: they are handed out in this order."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    computing = [name for name in files if name.startswith(("tests/unit/", "tests/protocol/"))]
    waiting = [name for name in files if name not in computing]
    place = {name: index / len(kind) for kind in (waiting, computing) for index, name in enumerate(kind)}
    items[:] = [item for name in sorted(files, key=place.__getitem__) for item in files[name]]


@pytest.fixture(autouse=True)
def default_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts from the defaults, whatever the shell exports, and leaves them and the environment behind."""
    settings = {config.PREFIX + name.upper() for name in config.GuardConfig.model_fields}
    for name in settings & set(os.environ):
        monkeypatch.delenv(name)
    config.reset_config()
    environment = dict(os.environ)
    yield
    config.reset_config()
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture
def forked_python() -> str:
    """To be used like sys.executable, by tests that are not about processes: see tests/forked_python.py."""
    return os.environ[PYTHON_VARIABLE]


@pytest.fixture(scope="module")
def whole_end() -> Iterator[None]:
    """The ranks of this file's tests end like any program: see `end_quickly` in prefork.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(QUICK_END_VARIABLE)
        yield


@pytest.fixture
def all_forked(forked_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test also what ncclguard starts in this process itself, as faults.run_ranks does with torchrun, is forked."""
    monkeypatch.setattr(sys, "executable", forked_python)


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """Every descriptor below 1024 is taken, as loaders and memory maps do: `select` works with no other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"this system allows a process {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1200 if 0 <= soft < 1200 else soft, hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < 1023:
            taken.append(os.dup(taken[0]))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
