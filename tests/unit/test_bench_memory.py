"""What a run needs is compared with what the host and its control groups leave, before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from ncclguard.bench.machine import PROCESS_BYTES, free_host_bytes, need, peak_resident_bytes, shortage
from ncclguard.bench.measure import shape_for

GIB = 2**30


def group(folder: Path, limit: str, usage: int, cache: int = 0, version: int = 2) -> None:
    """A control group's files as the kernel shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 1 TiB available, so that only control groups bind."""
    real = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(available=2**40))


@pytest.mark.usefixtures("roomy")
def test_the_tightest_group_above_this_process_counts(tmp_path: Path) -> None:
    """Version 2, nested: the parent's 8 GiB bind below the child's 100; unused file cache counts as free."""
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    root = tmp_path / "fs"
    group(root, "max", 0)
    group(root / "outer", str(8 * GIB), 3 * GIB, cache=GIB)
    group(root / "outer" / "inner", str(100 * GIB), 0)
    assert free_host_bytes(root, own) == 6 * GIB


@pytest.mark.usefixtures("roomy")
def test_version_1_groups_count(tmp_path: Path) -> None:
    """The memory controller's folder; other controllers are passed over."""
    own = tmp_path / "cgroup"
    own.write_text("5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/x\n")
    group(tmp_path / "fs" / "memory" / "job", str(4 * GIB), GIB, version=1)
    assert free_host_bytes(tmp_path / "fs", own) == 3 * GIB


@pytest.mark.usefixtures("roomy")
def test_a_path_of_the_host_that_is_not_mounted_here_falls_back_to_the_mount(tmp_path: Path) -> None:
    """Inside a container: the folder of the path is absent, the limit is at the mounted root."""
    own = tmp_path / "cgroup"
    own.write_text("0::/kubepods/pod1\n")
    group(tmp_path / "fs", str(2 * GIB), 0)
    assert free_host_bytes(tmp_path / "fs", own) == 2 * GIB


def test_without_groups_the_host_counts(tmp_path: Path) -> None:
    """No /proc/self/cgroup, no limit: what psutil calls available."""
    assert 0 < free_host_bytes(tmp_path / "none", tmp_path / "none") <= psutil.virtual_memory().total


def test_the_need_of_the_main_job() -> None:
    """5e8 float32 all_reduce: 2 GB of buffer, 2 GB of copy on each rank, and the process."""
    found = need(shape_for("all_reduce", 500_000_000, torch.float32, 2), 1, guarded=True, on_cuda=False)
    assert (found.buffers, found.backup, found.process) == (2_000_000_000, 2_000_000_000, PROCESS_BYTES)
    assert found.total == 4_000_000_000 + PROCESS_BYTES


def test_a_shortage_says_how_much_is_needed_and_how_much_is_free() -> None:
    """One sentence with both figures and what to do; None when all fits."""
    required = need(shape_for("all_reduce", GIB, torch.float32, 2), 1, guarded=True, on_cuda=False)
    text = shortage(required, 2, 10 * GIB, "host1")
    assert text is not None
    assert "16.6 GiB are needed for 2 ranks on host1" in text
    assert "10.0 GiB are free" in text
    assert "Nothing was allocated" in text
    assert shortage(required, 1, 10 * GIB, "host1") is None


def test_the_peak_of_this_process_is_known() -> None:
    """At least what is resident now, on Linux."""
    peak = peak_resident_bytes()
    assert peak is not None
    assert peak >= psutil.Process().memory_info().rss * 0.5
