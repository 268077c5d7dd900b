"""The ladder guard deadline < process group < heartbeat monitor < launcher."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ncclguard.environment.setup import compute_ladder
from ncclguard.environment.versions import Versions, detect_versions, parse_version, within

_NEW = Versions(torch="2.13.0", nccl="2.29.7", nccl_source="test")


@pytest.mark.parametrize("guard", [5.0, 300.0, 1800.0, 5400.5])
@pytest.mark.parametrize("dump", [None, "250", "60000"])
def test_the_computed_limits_grow(guard: float, dump: str | None) -> None:
    """For any deadline, also where the watchdog sleeps long before it ends the process."""
    environ = {} if dump is None else {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": dump}
    ladder = compute_ladder(guard, _NEW, environ, launcher_timeout=86400.0)
    figures = [rung.seconds or 0.0 for rung in ladder.rungs]
    assert figures == sorted(figures) and len(set(figures)) == 4
    assert ladder.problems == ()
    sleeping = 4 * float(dump or 15000) / 1000
    assert figures[2] > figures[1] + sleeping


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"TORCH_NCCL_ENABLE_MONITORING": "0"}, "TORCH_NCCL_ENABLE_MONITORING=0"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT is set"),
    ],
)
def test_a_monitor_that_is_off_is_no_rung(environ: dict[str, str], text: str) -> None:
    """And so nothing can be in the wrong order with it."""
    ladder = compute_ladder(1800, _NEW, environ)
    assert ladder.heartbeat.seconds is None and text in ladder.heartbeat.origin
    assert ladder.problems == ()


def test_each_pair_in_the_wrong_order_is_named_with_its_figures() -> None:
    """Two neighbours are wrong at once; a missing rung between two does not hide them."""
    ladder = compute_ladder(1800, _NEW, {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}, process_group_timeout=600)
    assert len(ladder.problems) == 2
    assert "(600 s" in ladder.problems[0] and "(1800 s" in ladder.problems[0]
    ladder = compute_ladder(1800, _NEW, {"TORCH_NCCL_ENABLE_MONITORING": "0"}, launcher_timeout=600)
    assert ladder.problems and "launcher" in ladder.problems[0]


def test_the_time_limit_of_a_slurm_job_is_the_launchers() -> None:
    """Slurm tells start and end in seconds since 1970."""
    ladder = compute_ladder(1800, _NEW, {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "2800"})
    assert ladder.launcher.seconds == 1800
    assert ladder.problems


def test_it_is_printed_with_figures_and_origins() -> None:
    """One line a limit, and one for the log."""
    ladder = compute_ladder(1800, _NEW, {"DEEPSPEED_TIMEOUT": "45"})
    assert "2700 s  DEEPSPEED_TIMEOUT=45 min" in str(ladder)
    assert "1800 < 2700 < 2820 < none" in ladder.one_line
    assert ladder.process_group_timeout == timedelta(minutes=45)


@pytest.mark.parametrize(
    ("version", "since", "until", "expected"),
    [
        ("2.13.0+cpu", "2.8", None, True),
        ("2.10.0", "2.9", None, True),
        ("2.7.1", None, "2.7", True),
        ("2.8.0", None, "2.7", False),
        ("2.2.0a0+git1234", "2.2", "2.2", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, since: str | None, until: str | None, expected: bool) -> None:
    """2.10 comes after 2.9, and 2.7.1 is within "until 2.7"."""
    assert within(version, since, until) == expected


def test_the_installed_versions_are_known() -> None:
    """Whatever build of torch it is."""
    versions = detect_versions()
    assert parse_version(versions.torch) >= (2,)
    assert versions.nccl_for_names is not None
