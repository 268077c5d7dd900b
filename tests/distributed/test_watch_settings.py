"""A variable that is wrong: `watch` refuses it by its name, and does not go on without observing."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

import ncclguard
from ncclguard import faults


def wrong_variable() -> None:
    dist.init_process_group("gloo")
    with pytest.raises(ncclguard.GuardConfigError, match=r"^the environment variable NCCLGUARD_TIMEOUT is 'abc'"):
        ncclguard.watch()
    os.environ["NCCLGUARD_TIMEOUT"] = "30"
    assert ncclguard.watch().active
    dist.destroy_process_group()


def test_watch_refuses_a_variable_that_is_wrong() -> None:
    faults.run_ranks(wrong_variable, 2, timeout=60, env={"NCCLGUARD_TIMEOUT": "abc"}).check()


def longer_than_torchs() -> None:
    dist.init_process_group("gloo")
    ncclguard.watch()
    dist.destroy_process_group()


def test_a_limit_above_torchs_own_is_warned_of_also_where_a_variable_sets_it() -> None:
    result = faults.run_ranks(longer_than_torchs, 2, timeout=60, env={"NCCLGUARD_TIMEOUT": "99999"}).check()
    assert "with NCCLGUARD_TIMEOUT=99999 watch() reports nothing before torch itself gives up" in result[0].output
