"""What all tests share: settings as if nobody had set any, how ranks are started, and which tests may start processes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from ncclguard import config
from ncclguard.environment import network
from ncclguard.faults import fork, launcher
from tests import preforked

hypothesis.settings.register_profile("ncclguard", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ncclguard")
# A second thread would save nothing with the small tensors of tests, and beside other tests the first one waits, spinning,
# until it is given a core: a training that takes 0.2 s took 10 s of both cores.
torch.set_num_threads(1)
# For torchrun and other programs that tests start: faults/launcher.py says why.
os.environ.setdefault("RES_OPTIONS", network.RES_OPTIONS)
# A test that kills a rank while DeepSpeed builds an extension leaves a lock for which all later tests would wait:
# scripts/environment.py has built it.
if (Path(sys.prefix) / "torch_extensions").is_dir():
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
# The environment's own programs before the system's, as where it is activated: another ninja would build that again.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)])
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: tests and their ranks send it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks are forks of a process that has imported torch once: faults/fork.py says what that saves. And what the first step
# of DistributedDataParallel, the files of the tests and the text of an incident import.
launcher.DEFAULT = "fork"
PRELOADED = ("torch._dynamo", "pytest", "rich.panel")

#: Ten minutes of waiting in one file: it begins first, or the run would end with it alone.
LONGEST = "tests/distributed/test_stand_by.py"

#: What Python reports (sys.addaudithook) before it starts a process.
STARTS_A_PROCESS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system")
#: What the running test has started, if it is one of the fast tier, and so may not.
forbidden: list[str] | None = None


def note_process(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: a test of the fast tier gets this error instead of a process, and fails also if it catches it."""
    if forbidden is not None and event in STARTS_A_PROCESS:
        forbidden.append(f"{event} {arguments[:1]}")
        raise AssertionError("the fast tier starts no process: mark the test with pytest.mark.processes")


sys.addaudithook(note_process)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the fast tier; give out files that start ranks, which mostly wait, by turns with those that compute."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    computing = [name for name in files if name.startswith(("tests/unit/", "tests/protocol/"))]
    for item in items:
        marked = item.get_closest_marker("processes") is not None or item.get_closest_marker("slow") is not None
        if item.nodeid.startswith("tests/unit/") and not marked:
            item.add_marker("fast")
    waiting = [name for name in files if name not in computing]
    place = {name: index / len(kind) for kind in (waiting, computing) for index, name in enumerate(kind)}
    if LONGEST in place:
        place[LONGEST] = -1.0
    items[:] = [item for name in sorted(files, key=place.__getitem__) for item in files[name]]


@pytest.fixture(autouse=True)
def no_process_in_the_fast_tier(request: pytest.FixtureRequest) -> Iterator[list[str] | None]:
    """What a test of the fast tier has started, which is to be nothing; None in the other tests."""
    global forbidden
    forbidden = [] if request.node.get_closest_marker("fast") is not None else None
    yield forbidden
    started, forbidden = forbidden, None
    assert not started, f"the fast tier starts no process, and this test did: {started}; mark it with processes"


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """What the process has imported that the ranks of this file's tests are forks of."""
    fork.preload(PRELOADED)


@pytest.fixture(scope="module")
def own_processes() -> Iterator[None]:
    """The ranks of this file's tests are processes of their own, which end like any program's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "DEFAULT", "processes")
        yield


@pytest.fixture(scope="module")
def preforked_programs() -> Iterator[None]:
    """The programs that this file's tests start, and what these start, are forks too: preforked.py says how."""
    with preforked.programs():
        yield


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
