"""How NCCL groups are made and given up, with torch's own group faked."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c

from ncclguard import torch_compat
from ncclguard.torch_compat import groups, nccl as torch_nccl
from ncclguard.transport import nccl
from ncclguard.transport.base import TransportError
from ncclguard.transport.nccl import NcclBuilder
from tests.unit.transport.nccl_fakes import CPU, FakeGroup, FakeVotes, Gpu, pretend_cuda

WITHOUT_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_CUDA_EVENT_CACHE": "1"}
HARMLESS = {"TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
SPINS = "TORCH_NCCL_NONBLOCKING_TIMEOUT"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return pretend_cuda(monkeypatch)


# --- the group ------------------------------------------------------------------------------------------------------


class Seen:
    """Stands for ProcessGroupNCCL: keeps what it was made with, and the environment at that moment."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)

    def __init__(self, store: object, index: int, size: int, options: Any) -> None:
        self.place = index, size
        self.options = options
        self.environment = dict(os.environ)
        self.debug = c.get_debug_level()


@pytest.fixture
def without_spin_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(SPINS, "")  # so that what the test leaves is undone
    monkeypatch.delenv(SPINS)
    for name in (*WITHOUT_WATCHDOG, *HARMLESS, "TORCH_NCCL_USE_COMM_NONBLOCKING"):
        monkeypatch.delenv(name, raising=False)
    yield


def make(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], counted: bool = False) -> Seen:
    monkeypatch.setattr(c, "ProcessGroupNCCL", Seen, raising=False)
    monkeypatch.setattr(groups, "VERSION", version)
    monkeypatch.setattr(torch_nccl, "graphs_count_operations", lambda: counted)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    made: Seen = torch_compat.new_nccl_group(store, "ncclguard/x/0", (4, 6), 1, timedelta(days=7))
    return made


@pytest.mark.usefixtures("without_spin_limit")
@pytest.mark.parametrize(("counted", "variables"), [(False, WITHOUT_WATCHDOG), (True, HARMLESS)])
def test_the_variables_are_set_while_the_group_is_made_and_the_programs_own_stay(
    monkeypatch: pytest.MonkeyPatch, counted: bool, variables: dict[str, str]
) -> None:
    """Without a watchdog, but where captures wait for it: there it is harmless, also under DETAIL."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "maybe")
    c.set_debug_level(c.DebugLevel.DETAIL)
    try:
        made = make(monkeypatch, (2, 13), counted)
        assert c.get_debug_level() == c.DebugLevel.DETAIL
    finally:
        c.set_debug_level(c.DebugLevel.OFF)
    assert {name: made.environment[name] for name in variables} == variables
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "maybe"
    assert not (set(os.environ) & {*WITHOUT_WATCHDOG, *HARMLESS} - {"TORCH_NCCL_BLOCKING_WAIT"})
    assert (made.debug == c.DebugLevel.DETAIL) is not counted


@pytest.mark.usefixtures("without_spin_limit")
@pytest.mark.parametrize(("counted", "limit"), [(False, timedelta(seconds=60)), (True, timedelta(days=7))])
def test_the_flight_recorder_gets_name_and_global_ranks_and_an_abort_its_limit(
    monkeypatch: pytest.MonkeyPatch, counted: bool, limit: timedelta
) -> None:
    made = make(monkeypatch, (2, 13), counted)
    assert made.place == (1, 2)
    assert (made.options.group_name, made.options.global_ranks_in_group) == ("ncclguard/x/0", [4, 6])
    assert made.options._timeout == limit


@pytest.mark.usefixtures("without_spin_limit")
@pytest.mark.parametrize(("version", "blocking", "spins"), [((2, 9), None, None), ((2, 10), False, "20")])
def test_non_blocking_communicators_from_torch_2_10_on_spin_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], blocking: bool | None, spins: str | None
) -> None:
    assert make(monkeypatch, version).options.config.blocking is blocking
    assert os.environ.get(SPINS) == spins


@pytest.mark.usefixtures("without_spin_limit")
@pytest.mark.parametrize(("name", "value"), [(SPINS, "900"), ("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")])
def test_the_limit_of_a_program_with_non_blocking_communicators_of_its_own_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    make(monkeypatch, (2, 13))
    assert os.environ.get(SPINS) == ("900" if name == SPINS else None)


# --- building -------------------------------------------------------------------------------------------------------


class Attempt:
    """The builder with a fake group, and what becomes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group = FakeGroup()
        self.kept: list[object] = []
        monkeypatch.setattr(nccl, "StreamBuilder", lambda disconnects: SimpleNamespace(build=self.vote))
        monkeypatch.setattr(torch_compat, "new_nccl_group", lambda *_: self.group)
        monkeypatch.setattr(nccl, "keep_for_ever", self.kept.append)

    def vote(self, *_: object) -> FakeVotes:
        return FakeVotes()

    def build(self, seconds: float) -> Any:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        return NcclBuilder(CPU).build(store, "prefix", (0,), 0, 7, seconds)


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Attempt:
    return Attempt(monkeypatch)


def test_a_group_that_connects_is_tried_out_and_handed_over(attempt: Attempt, gpu: Gpu) -> None:
    gpu.idle.set()
    communicator = attempt.build(30.0)
    assert len(attempt.group.works) == 1
    communicator.close()
    assert (attempt.group.aborts, attempt.kept) == (0, [])


@pytest.mark.usefixtures("gpu")
def test_a_group_that_cannot_connect_is_aborted(attempt: Attempt) -> None:
    def fail() -> None:
        raise RuntimeError("ncclSystemError")

    attempt.group.launch = fail
    with pytest.raises(TransportError, match="ncclSystemError"):
        attempt.build(30.0)
    until(lambda: attempt.group.aborts == 1)
    assert attempt.kept == [attempt.group]


def test_a_group_whose_first_operation_does_not_complete_is_aborted(attempt: Attempt, gpu: Gpu) -> None:
    with pytest.raises(TransportError, match=r"did not complete|given up"):
        attempt.build(0.5)
    until(lambda: attempt.group.aborts == 1)
    gpu.idle.set()


@pytest.mark.usefixtures("gpu")
def test_a_group_that_connects_after_it_was_given_up_is_aborted_again(
    attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    """The first abort cannot reach a communicator that is being connected."""
    connected = threading.Event()
    attempt.group.launch = lambda: connected.wait(60)
    with pytest.raises(TransportError, match="given up"):
        attempt.build(0.2)
    until(lambda: attempt.group.aborts == 1)
    assert attempt.kept == [attempt.group]
    connected.set()
    until(lambda: attempt.group.aborts == 2)
    assert attempt.group.works == []
    assert caplog.text.count("is left behind") == 1


def test_the_votes_leave_the_store_connected_for_nccl_and_it_is_disconnected_in_the_end(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu
) -> None:
    gpu.idle.set()
    seen: list[bytes] = []

    def group(keys: Any, *_: object) -> FakeGroup:
        keys.set("id", "x")
        seen.append(keys.get("id"))
        return FakeGroup()

    monkeypatch.setattr(torch_compat, "new_nccl_group", group)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store: Any = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30), wait_for_workers=False)  # type: ignore[attr-defined]
    connection = torch_compat.clone_store(store)
    communicator = NcclBuilder(CPU).build(connection, "prefix", (0,), 0, 7, 30.0)
    assert seen == [b"x"]
    with pytest.raises(RuntimeError):
        connection.get("prefix/nccl/id")
    assert store.get("prefix/nccl/id") == b"x"
    communicator.close()
