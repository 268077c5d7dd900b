"""``setup_env()``: what it sets, keeps, translates, refuses to do."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import types
from datetime import timedelta
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from ncclguard.config import reset_config
from ncclguard.environment import setup
from ncclguard.environment.catalogue import CATALOGUE, WATCHED_PREFIXES
from ncclguard.environment.network import InterfaceChoice, Link
from ncclguard.environment.setup import (
    EnvironmentReport,
    check_interfaces,
    plan_environment,
    setup_env,
    setup_nccl_timeout_env,
)

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of ours or of a launcher is set, and none is left behind."""
    for name in list(os.environ):
        if name in CATALOGUE or name.startswith((*WATCHED_PREFIXES, "NCCLGUARD_", "SLURM_", "MASTER_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in CATALOGUE:  # monkeypatch takes back what setup_env() adds, as these were known to be absent
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)  # for which one more variable would be set too late
    monkeypatch.setattr(setup, "_written", {})  # another test's values are not ours
    monkeypatch.setattr("ncclguard_explain.host.SYSTEM_FILE", Path("/nonexistent/nccl.conf"))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def wrong(report: EnvironmentReport, name: str) -> str:
    """The findings about one variable, as text."""
    return " | ".join(str(finding) for finding in report.wrong if finding.name == name)


def test_what_the_recipe_asks_for_is_set_in_names_that_are_read() -> None:
    """On one host: loopback, recorder, error handling, limits; NCCL_TIMEOUT is not, as nothing reads it."""
    report = setup_env()
    expected = {
        "NCCL_SOCKET_IFNAME": "=lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "0",
        "NCCL_P2P_DISABLE": "0",
        "NCCL_BUFFSIZE": "8388608",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_FR_BUFFER_SIZE": "16384",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2040",
        "NCCL_DEBUG": "WARN",
    }
    assert {name: os.environ.get(name) for name in expected} == expected
    assert expected.items() <= {setting.name: setting.value for setting in report.set}.items()
    assert "NCCL_TIMEOUT" not in os.environ
    assert report.ok and report.kept == () and report.wrong == ()
    assert all(CATALOGUE[setting.name].is_read(report.versions) is not False for setting in report.set)


def test_the_name_of_the_original_recipe_is_the_same_function() -> None:
    """Users of the recipe call it under this name."""
    assert setup_nccl_timeout_env is setup_env


def test_a_second_call_returns_the_same_and_changes_nothing() -> None:
    """Its own values are not taken for the user's."""
    first = setup_env()
    before = dict(os.environ)
    assert setup_env() == first
    assert dict(os.environ) == before


def test_a_second_call_follows_what_has_become_known_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call came before MASTER_ADDR was set."""
    monkeypatch.delenv("MASTER_ADDR")
    setup_env()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    setup_env()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_BUFFSIZE", "NCCL_DEBUG"])
def test_what_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also when it is another value, or a wrong one."""
    monkeypatch.setenv(name, "lo")
    report = setup_env()
    assert os.environ[name] == "lo"
    assert [(entry.value, entry.origin) for entry in report.kept if entry.name == name] == [("lo", "environment")]


def test_what_a_file_of_nccl_sets_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment would take precedence over the file, so nothing is put there."""
    file = tmp_path / "nccl.conf"
    file.write_text("# comment\nNCCL_P2P_DISABLE=1\nNCCL_DEBUG=INFO\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(file))
    report = setup_env()
    assert "NCCL_P2P_DISABLE" not in os.environ
    assert ("NCCL_P2P_DISABLE", "1", str(file)) in [(entry.name, entry.value, entry.origin) for entry in report.kept]


def test_a_name_that_nothing_reads_is_reported_with_what_to_use() -> None:
    """NCCL_TIMEOUT, recommended everywhere."""
    report = plan_environment({"NCCL_TIMEOUT": "1800"})
    assert "no effect" in wrong(report, "NCCL_TIMEOUT")
    assert "init_process_group(timeout=" in wrong(report, "NCCL_TIMEOUT")


def test_a_deprecated_name_is_translated_and_said() -> None:
    """The value of the old name is carried over; the old name stays."""
    environ = {"NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "500"}
    report = plan_environment(environ)
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert environ["TORCH_FR_BUFFER_SIZE"] == "500"
    assert environ["NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING") in report.translated
    assert "deprecated since torch 2.2" in wrong(report, "NCCL_ASYNC_ERROR_HANDLING")


def test_a_deprecated_name_beside_the_new_one_with_another_value_is_said() -> None:
    """torch takes the new one."""
    environ = {"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"}
    report = plan_environment(environ)
    assert "takes precedence" in wrong(report, "NCCL_BLOCKING_WAIT")
    assert report.translated == ()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("NCCL_SOCKET_IFNAME", "nosuch0", "matches no interface"),
        ("GLOO_SOCKET_IFNAME", "=lo", "takes exact names only"),
        ("TORCH_NCCL_BLOCKING_WAIT", "maybe", "takes 1/0"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "switches watchdog"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "never ended"),
        ("TORCH_NCCL_EXTRA_DUMP_ON_EXEC", "1", "tells all ranks to write a dump and end their process"),
        ("NCCL_P2P_DISABLE", "1", "through its memory"),
        ("NCCL_IB_TIMEOUT", "40", "at most 31"),
        ("NCCL_SOCKT_IFNAME", "lo", "did you mean NCCL_SOCKET_IFNAME"),
        ("TORCH_NCCL_ABORT_IN_DESTROY_PG", "1", "only 2.3 to 2.3 read it"),
        ("NCCL_TREE_THRESHOLD", "0", "does not read it"),
    ],
)
def test_what_is_wrong_is_found(name: str, value: str, text: str) -> None:
    """Each with what to do; nothing is overwritten."""
    environ = {name: value, "MASTER_ADDR": "127.0.0.1"}
    report = plan_environment(environ)
    assert text in wrong(report, name)
    assert environ[name] == value


@pytest.mark.parametrize("value", ["lo", "=lo", "lo,eth", "^docker0,eth,veth,ifb"])
def test_right_interfaces_are_not_found_wrong(value: str) -> None:
    """All forms that NCCL takes."""
    assert (
        wrong(plan_environment({"NCCL_SOCKET_IFNAME": value, "MASTER_ADDR": "127.0.0.1"}), "NCCL_SOCKET_IFNAME") == ""
    )


@pytest.mark.parametrize(("kind", "found"), [("ethernet", True), ("loopback", False)])
def test_an_interface_beside_the_masters_is_wrong_only_between_hosts(kind: str, found: bool) -> None:
    """Ranks of one host reach each other at each of its addresses: Lightning's child has what its parent chose."""
    links = [
        Link("near", kind, up=True, running=True, addresses=("127.0.0.1" if kind == "loopback" else "192.0.2.1",)),
        Link("other", "ethernet", up=True, running=True, addresses=("198.51.100.1",)),
    ]
    choice = InterfaceChoice(name="near", address=links[0].addresses[0], kind=kind, evidence="a route")
    texts = [str(each) for each in check_interfaces({"NCCL_SOCKET_IFNAME": "=other"}, choice, links)]
    assert ["leads to the master" in text for text in texts] == [True] * found


def test_limits_in_the_wrong_order_are_found() -> None:
    """The monitor would end the process before the watchdog, and before the guard."""
    report = plan_environment({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "120"})
    assert "heartbeat monitor (120 s" in wrong(report, "limits") and "must exceed" in wrong(report, "limits")
    assert not report.ok
    report = plan_environment({}, process_group_timeout=600.0)
    assert "process-group timeout (600 s" in wrong(report, "limits")


def test_the_guards_longest_deadline_comes_from_its_configuration() -> None:
    """NCCLGUARD_TIMEOUT_EVAL moves the whole ladder; in a process of its own, as the configuration is read once."""
    program = "from ncclguard.environment.setup import setup_env; print(setup_env().limits.one_line)"
    environ = {**os.environ, "NCCLGUARD_TIMEOUT_EVAL": "7200"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert "7200 < 7320 < 7440" in done.stdout, done.stderr


def test_deepspeeds_variable_is_in_minutes() -> None:
    """Set where DeepSpeed is installed; a user's value is the process-group rung of the ladder."""
    environ: dict[str, str] = {}
    plan_environment(environ, deepspeed=True)
    assert environ["DEEPSPEED_TIMEOUT"] == "32"
    report = plan_environment({"DEEPSPEED_TIMEOUT": "30"})
    assert report.limits.process_group_timeout == timedelta(minutes=30)
    assert "must exceed the guard deadline" in wrong(report, "limits")


def test_after_init_process_group_nothing_is_set_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group of one rank exists; in a process of its own, so that no other test meets it."""
    program = """
import os, torch.distributed as dist
from ncclguard.environment.setup import setup_env
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = dict(os.environ)
report = setup_env()
assert dict(os.environ) == before and report.set == () and not report.ok
print(report.one_line)
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "too late, init_process_group has been called, for NCCL_SOCKET_IFNAME" in done.stdout


def test_after_the_import_of_deepspeed_its_own_variable_is_too_late_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deepspeed = types.ModuleType("deepspeed")
    deepspeed.__spec__ = ModuleSpec("deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    report = plan_environment({}, deepspeed=True, written={})
    assert [setting.name for setting in report.too_late] == ["DEEPSPEED_TIMEOUT"]
    assert "too late, deepspeed has been imported, for DEEPSPEED_TIMEOUT" in report.one_line
    assert "init_process_group has been called" not in f"{report.one_line} {report}"


def test_after_a_call_in_time_a_second_one_is_not_too_late() -> None:
    """Frameworks call it again, after the program did."""
    program = """
import torch.distributed as dist
from ncclguard.environment.setup import setup_env
first = setup_env()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert setup_env() == first and first.ok
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0), (None, 1)])
def test_one_line_is_logged_on_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: str | None, lines: int
) -> None:
    """Where no launcher says which rank this is, it is logged too."""
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.INFO, logger="ncclguard.environment"):
        setup_env()
    assert len(caplog.records) == lines
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_nccl_debug_levels() -> None:
    """warn by default; all is the recipe's."""
    environ: dict[str, str] = {}
    plan_environment(environ, nccl_debug="all")
    assert (environ["NCCL_DEBUG"], environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "ALL")


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_time_that_is_none_is_refused(value: float) -> None:
    """Before anything is set."""
    with pytest.raises(ValueError):
        setup_env(process_group_timeout=value)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    """A misspelling."""
    with pytest.raises(ValueError, match="infiniband, roce, ethernet"):
        setup_env("infinband")


def test_an_argument_that_there_is_not_is_refused_with_what_there_is() -> None:
    setup: Any = setup_env
    with pytest.raises(TypeError, match=r"setup_env has no argument 'nccl_debugs': did you mean nccl_debug=\?"):
        setup(nccl_debugs="info")
    with pytest.raises(TypeError, match="there are profile, process_group_timeout"):
        setup(interface="eth9")


def test_the_report_is_chinese_where_that_is_asked_for_and_its_data_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With something wrong of each kind, and something too late."""
    theirs = {"NCCL_DEBUGG": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth99", "NCCL_IB_TIMEOUT": "99"}
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(setup, "process_group_exists", lambda: True)
    monkeypatch.setenv("NCCLGUARD_LANGUAGE", "zh")
    reset_config()
    with caplog.at_level(logging.INFO, logger="ncclguard.environment"):
        report = setup_env(launcher_timeout=60.0)
    for text in (str(report), str(report.limits), *map(str, report.wrong), caplog.messages[-1]):
        assert not re.findall(r"[A-Za-z]{2,} [a-z]{2,}", text.replace("flight recorder", "")), text
        assert re.search("[\u4e00-\u9fff]", text)
    assert all(letter < "\u2e80" for letter in report.model_dump_json())
