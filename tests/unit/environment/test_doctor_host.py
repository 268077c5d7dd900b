"""Each check of one host, on a host made for it: what is fine, what is not, and what is said."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ncclguard.environment.doctor import checks, command
from ncclguard.environment.doctor.checks import Check, Context, Status, error, exit_code, merge, ok, skipped, warning
from ncclguard.environment.network import read_job, read_links
from ncclguard.environment.setup import Gid, Port, plan_environment
from tests.ports import free_port

pytestmark = pytest.mark.processes

_IB = Port("mlx5_0", 1, "ACTIVE", "LinkUp", "InfiniBand", 400.0)


def make_context(environ: Mapping[str, str] | None = None, root: Path = Path("/"), **changes: Any) -> Context:
    """This host with another environment, other ports, or another root of its files."""
    environ = {"MASTER_ADDR": "127.0.0.1", **(environ or {})}
    fields: dict[str, Any] = {
        "job": read_job(environ),
        "host": "node0",
        "environ": environ,
        "report": plan_environment(dict(environ)),
        "links": read_links(),
        "ports": (),
        "root": root,
    }
    return Context(**{**fields, **changes})


def put(root: Path, name: str, text: str) -> None:
    """A file under another root."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def assert_says(check: Check, status: Status, text: str) -> None:
    """Status and a part of the text; what is wrong comes with advice."""
    assert check.status == status, check
    assert text in check.detail + check.advice, check
    assert bool(check.advice) == (status in ("warning", "error"))


@pytest.mark.parametrize(("pauses", "status"), [((0.0,), "ok"), ((0.0, 0.4), "warning"), ((60.0,), "warning")])
def test_name_lookup(monkeypatch: pytest.MonkeyPatch, pauses: tuple[float, ...], status: Status) -> None:
    """A name server that loses one question of two, or answers none, holds the store up; asked for as the store does."""
    asked: list[str] = []
    done = threading.Event()

    def looked_up(address: tuple[str, int, int, int], flags: int) -> tuple[str, str]:
        asked.append(address[0])
        done.wait(pauses[(len(asked) - 1) % len(pauses)])
        return address[0], "1"

    monkeypatch.setattr(socket, "getnameinfo", looked_up)
    took: list[float] = []
    name_seconds = checks.network.name_seconds

    def measured(address: str) -> float:  # it may be more than the pause
        took.append(name_seconds(address, 0.5))
        return took[-1]

    monkeypatch.setattr(checks.network, "name_seconds", measured)
    check = checks.check_name_lookup(make_context())
    done.set()
    assert_says(check, status, "at most" if status == "ok" else f"took {max(took):.1f} s")
    assert max(took) > 0.9 * min(max(pauses), 0.5)
    assert all(address == f"::ffff:{make_context().choice.address}" for address in asked)
    assert len(asked) == (checks.NAME_LOOKUPS if status == "ok" else len(pauses))


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's 64 MiB are too little; none at all is an error."""
    assert_says(checks.check_shared_memory(make_context(root=tmp_path)), "error", "does not exist")
    (tmp_path / "dev/shm").mkdir(parents=True)
    for size, status in ((64 << 20, "warning"), (8 << 30, "ok")):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path, size=size: SimpleNamespace(total=size, used=0, free=size)
        )
        check = checks.check_shared_memory(make_context(root=tmp_path))
        assert check.status == status, check


@pytest.mark.parametrize(
    ("limit", "ports", "status"),
    [(8 << 20, (_IB,), "error"), (8 << 20, (), "ok"), (resource.RLIM_INFINITY, (_IB,), "ok")],
)
def test_locked_memory(monkeypatch: pytest.MonkeyPatch, limit: int, ports: tuple[Port, ...], status: Status) -> None:
    """RDMA needs it unlimited."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    assert_says(checks.check_locked_memory(make_context(ports=ports)), status, "ulimit -l")


@pytest.mark.parametrize(("soft", "status"), [(1024, "warning"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, status: Status) -> None:
    """More for more ranks."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, soft))
    assert_says(checks.check_open_files(make_context({"WORLD_SIZE": "8"})), status, f"ulimit -n is {soft}")


@pytest.mark.parametrize(("free", "status"), [(0.01, "warning"), (0.5, "ok")])
def test_memory(monkeypatch: pytest.MonkeyPatch, free: float, status: Status) -> None:
    """A host that is nearly full."""
    total = 64 << 30
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total, available=int(free * total)))
    assert_says(checks.check_memory(make_context()), status, "of 64.0 GiB available")


@pytest.mark.parametrize(("load", "status"), [(1000.0, "warning"), (0.1, "ok")])
def test_load(monkeypatch: pytest.MonkeyPatch, load: float, status: Status) -> None:
    """Ten times more work than processors."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    assert_says(checks.check_load(make_context()), status, f"load {load:.1f}")


@pytest.mark.parametrize(
    ("maximum", "current", "processors", "status", "text"),
    [
        ("max", "1000", "max 100000", "ok", "memory unlimited, processors unlimited"),
        (str(8 << 30), str(1 << 30), "800000 100000", "ok", "memory limit 8.0 GiB, 8 processors"),
        (str(8 << 30), str(int(7.9 * (1 << 30))), "800000 100000", "warning", "in use"),
        ("max", "1000", "200000 100000", "warning", "2 processors for 4 ranks"),
    ],
)
def test_cgroup(tmp_path: Path, maximum: str, current: str, processors: str, status: Status, text: str) -> None:
    """The limits of a container or batch job."""
    put(tmp_path, "proc/self/cgroup", "0::/job\n")
    for name, value in (("memory.max", maximum), ("memory.current", current), ("cpu.max", processors)):
        put(tmp_path, f"sys/fs/cgroup/job/{name}", value)
    environ = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    assert_says(checks.check_cgroup(make_context(environ, root=tmp_path)), status, text)


def test_cgroup_that_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    """Not a guess."""
    assert_says(checks.check_cgroup(make_context(root=tmp_path)), "skipped", "no cgroup limits")


@pytest.mark.parametrize(
    ("speed", "duplex", "status", "text"),
    [
        ("100000", "full", "ok", "100000 Mbit/s"),
        ("1000", "full", "warning", "1000 Mbit/s"),
        ("1000", "half", "error", "half duplex"),
        ("-1", "unknown", "ok", "speed unknown"),
    ],
)
def test_link(tmp_path: Path, speed: str, duplex: str, status: Status, text: str) -> None:
    """As sysfs tells of the interface that reaches the outside."""
    context = make_context({"MASTER_ADDR": ""}, root=tmp_path)
    link = next(entry for entry in context.links if not entry.loopback)
    choice = context.report.interface.model_copy(update={"name": link.name})
    context = make_context(root=tmp_path, report=context.report.model_copy(update={"interface": choice}))
    put(tmp_path, f"sys/class/net/{link.name}/speed", speed)
    put(tmp_path, f"sys/class/net/{link.name}/duplex", duplex)
    assert_says(checks.check_link(context), status, text)


@pytest.mark.parametrize(
    ("port", "status", "text"),
    [
        (_IB, "ok", "mlx5_0:1 ACTIVE"),
        (Port("mlx5_0", 1, "INIT", "LinkUp", "InfiniBand", 400.0), "warning", "subnet manager"),
        (Port("mlx5_0", 1, "DOWN", "Disabled", "InfiniBand", 400.0), "warning", "no port is active"),
        (Port("mlx5_0", 1, "ACTIVE", "LinkUp", "Ethernet", 200.0, "eth2"), "warning", "give eth2 one"),
        (
            Port(
                "mlx5_0",
                1,
                "ACTIVE",
                "LinkUp",
                "Ethernet",
                200.0,
                "eth2",
                (Gid(3, "RoCE v2", "0000:0000:0000:0000:0000:ffff:0a00:0002"),),
            ),
            "ok",
            "200 Gbit/s",
        ),
    ],
)
def test_infiniband(port: Port, status: Status, text: str) -> None:
    """States of a port, and the address that RoCE needs."""
    assert_says(checks.check_infiniband(make_context(ports=(port,))), status, text)


def test_pci(tmp_path: Path) -> None:
    """An IOMMU that translates, one that passes through, none."""
    assert_says(checks.check_pci(make_context(root=tmp_path)), "ok", "no IOMMU")
    put(tmp_path, "sys/kernel/iommu_groups/0/type", "DMA")
    put(tmp_path, "proc/cmdline", "quiet")
    assert_says(checks.check_pci(make_context(root=tmp_path)), "warning", "iommu=pt")
    put(tmp_path, "proc/cmdline", "quiet intel_iommu=on iommu=pt")
    assert_says(checks.check_pci(make_context(root=tmp_path)), "ok", "passes through")


@pytest.mark.parametrize(
    ("environ", "status", "text"),
    [
        ({}, "ok", "lo (127.0.0.1)"),
        ({"NCCL_SOCKET_IFNAME": "nosuch0"}, "error", "matches no interface"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "error", "the job has 2 hosts"),
    ],
)
def test_interface(environ: dict[str, str], status: Status, text: str) -> None:
    """The choice of setup_env(), and what contradicts it."""
    assert_says(checks.check_interface(make_context(environ)), status, text)


@pytest.mark.parametrize(
    ("environ", "status", "text"),
    [
        ({}, "ok", "127.0.0.1 is 127.0.0.1"),
        ({"MASTER_ADDR": "nosuchhost.invalid"}, "error", "does not resolve"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "error", "on each of 2 hosts itself"),
        ({"MASTER_ADDR": "", "WORLD_SIZE": "4"}, "error", "is not set"),
        ({"MASTER_ADDR": ""}, "skipped", "is not set"),
    ],
)
def test_master(environ: dict[str, str], status: Status, text: str) -> None:
    """Its name and its address."""
    assert_says(checks.check_master(make_context(environ)), status, text)


@pytest.mark.parametrize(
    ("environ", "status", "text"),
    [
        ({"NCCL_DEBUG": "INFO"}, "ok", "NCCL_DEBUG=INFO (environment)"),
        ({"NCCL_TIMEOUT": "1800"}, "warning", "no effect"),
        ({"NCCL_IB_TIMEOUT": "99"}, "error", "at most 31"),
    ],
)
def test_variables(environ: dict[str, str], status: Status, text: str) -> None:
    """Effective values with their origin; wrong ones."""
    assert_says(checks.check_variables(make_context(environ)), status, text)


def test_variables_of_a_file_are_shown_with_it(tmp_path: Path) -> None:
    """NCCL reads them though no environment has them."""
    put(tmp_path, "nccl.conf", "NCCL_ALGO=Ring\n")
    check = checks.check_variables(make_context({"NCCL_CONF_FILE": str(tmp_path / "nccl.conf")}))
    assert_says(check, "ok", f"NCCL_ALGO=Ring ({tmp_path / 'nccl.conf'})")


def test_limits() -> None:
    """The ladder, and one in the wrong order."""
    assert_says(checks.check_limits(make_context()), "ok", "1800 < 1920 < 2040")
    wrong = make_context({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"})
    assert_says(checks.check_limits(wrong), "error", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=2040")


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on which a process, this one, listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield int(sock.getsockname()[1])


def test_a_stale_process_on_the_masters_port_is_named(listener: int) -> None:
    """By its pid and command line, with another port to take."""
    check = checks.check_master_port(make_context({"MASTER_PORT": str(listener)}))
    assert_says(check, "error", f"held by process {os.getpid()}")
    assert f"MASTER_PORT={listener + 1}" in check.advice
    launched = make_context({"MASTER_PORT": str(listener), "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert_says(checks.check_master_port(launched), "ok", "held by the launcher")


def test_a_free_master_port() -> None:
    assert_says(checks.check_master_port(make_context({"MASTER_PORT": str(free_port())})), "ok", "is free")


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        ("echo '0, NVIDIA H200, 570.1, 0'; echo '1, NVIDIA H200, 570.1, 0'", "ok", "2 x NVIDIA H200, driver 570.1"),
        ("echo '0, NVIDIA H200, 570.1, 3'", "error", "GPU 0: 3 uncorrected ECC errors"),
        ("echo 'Failed to initialize NVML'; exit 9", "error", "Failed to initialize NVML"),
    ],
)
def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, status: Status, text: str) -> None:
    """What nvidia-smi prints; a program of that name stands in for it, as does a kernel log without errors."""
    for name, body in (("nvidia-smi", script), ("dmesg", "echo boot")):
        put(tmp_path, name, f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert_says(checks.check_gpus(make_context()), status, text)


def test_an_xid_in_the_kernels_log_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one."""
    log = "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus."
    for name, body in (("nvidia-smi", "echo '0, NVIDIA H200, 570.1, 0'"), ("dmesg", f"echo '{log}'")):
        put(tmp_path, name, f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert_says(checks.check_gpus(make_context()), "warning", "Xid (PCI:0000:3b:00): 79")


def test_a_host_without_nvidia_smi_skips_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing to look at is not a warning."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_says(checks.check_gpus(make_context()), "skipped", "not installed")


def test_gpu_links_are_skipped_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a pair without direct access is named."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_says(checks.check_gpu_links(make_context()), "skipped", "no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a < b)
    assert_says(checks.check_gpu_links(make_context()), "warning", "1->0")


def test_the_same_said_by_all_hosts_is_one_line_and_differences_are_named() -> None:
    """Only what is worst is shown."""
    merged = merge(
        [
            ("a", [ok("x", "fine"), ok("y", "fine"), skipped("z", "none")]),
            ("b", [ok("x", "fine"), warning("y", "slow", "do it"), error("z", "broken", "mend it")]),
        ]
    )
    assert [(check.name, check.status, check.detail) for check in merged] == [
        ("x", "ok", "fine"),
        ("y", "warning", "b: slow"),
        ("z", "error", "b: broken"),
    ]


@pytest.mark.parametrize(
    ("checks", "strict", "code"),
    [
        ([ok("x", "")], True, 0),
        ([warning("x", "", "do")], False, 0),
        ([warning("x", "", "do")], True, 1),
        ([warning("x", "", "do"), error("y", "", "do")], False, 2),
        ([skipped("x", "")], True, 0),
    ],
)
def test_exit_codes(checks: list[Check], strict: bool, code: int) -> None:
    """0, 1 for warnings as asked, 2."""
    assert exit_code(checks, fail_on_warnings=strict) == code


def test_the_command_on_one_host_prints_a_table_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON alone on stdout; the table and the block to paste go to stderr then."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    code = command.main(["--json", "-"])
    captured = capsys.readouterr()
    checks = [Check.model_validate(entry) for entry in json.loads(captured.out)["checks"]]
    assert code == exit_code(checks, fail_on_warnings=False)
    assert {"interface", "variables", "limits", "shared memory", "connections"} <= {check.name for check in checks}
    assert "To paste into an issue" in captured.err and "check" in captured.err


def test_a_master_whose_name_has_no_address_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch tries for a minute, and the store's row said then to open a port on a host that there is not."""
    for name, value in (
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "nosuchhost.invalid"),
        ("MASTER_PORT", "29555"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "Exchange", None)
    assert command.main([]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "see the row of the master above" in shown and "allow TCP port" not in shown


def test_a_check_that_fails_by_itself_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It becomes an error of its own."""

    def check_broken(context: Context) -> Check:
        raise OSError("no such device")

    monkeypatch.setattr(command, "HOST_CHECKS", (check_broken, checks.check_load))
    monkeypatch.setattr(command, "JOB_CHECKS", ())
    first, second = command.run_local_checks(make_context())
    assert first.name == "broken" and first.status == "error" and "no such device" in first.detail
    assert second.name == "load"
