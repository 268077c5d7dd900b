"""Each fault on real ranks with plain torch.distributed on gloo: that it strikes, and what it looks like unguarded."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ncclguard import faults

WORLD = 3
TIMEOUT = 100.0  # seconds, of each job; nothing here needs it
LARGE = 20_000_000  # elements: tens of milliseconds on loopback, so that a fault can strike in the middle


def start(seconds: float = 60.0) -> int:
    """Meet the others, however long that takes on a busy machine; from then on gloo's limit is so many seconds."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.barrier()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=seconds))
    return dist.get_rank()


def all_reduce_as(alteration: faults.Alteration | None, tensor: torch.Tensor) -> None:
    """One less, one more, or with another tensor than the peers', as an injected fault wants it."""
    if alteration is faults.Alteration.EXTRA:
        dist.all_reduce(tensor.clone())
    if alteration is faults.Alteration.OTHER_SHAPE:
        dist.all_reduce(tensor.new_zeros(tensor.numel() + 1))
    elif alteration is faults.Alteration.OTHER_DTYPE:
        dist.all_reduce(tensor.to(torch.int32))
    elif alteration is not faults.Alteration.SKIP:
        dist.all_reduce(tensor)


def operations(count: int, numel: int = 1) -> None:
    """``count`` all-reduces, each with the fault that is armed for it; their sums and durations are reported."""
    rank = dist.get_rank()
    sums: list[float] = []
    took: list[float] = []
    for sequence in range(count):
        before = time.monotonic()
        tensor = torch.full((numel,), float(rank + 1))
        all_reduce_as(faults.before_operation(rank, sequence), tensor)
        sums.append(tensor[0].item())
        took.append(time.monotonic() - before)
        faults.report(sums=sums, took=took)


def wait_for_all() -> None:
    """Return when every rank is here; over the store, so that it works with a broken group too."""
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=60))
    store.set(f"here{dist.get_rank()}", "1")
    store.wait([f"here{rank}" for rank in range(WORLD)])


def error_of(call: Callable[[], object]) -> str:
    """The text of what ``call`` raises, the empty text if it raises nothing."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def some_take_long() -> None:
    start()
    faults.at(rank=1, op=1, fault="late", seconds=3.0)
    faults.at(rank=1, op=2, fault="stop", seconds=3.0)
    faults.at(rank=1, op=3, fault="gil", seconds=3.0)
    operations(4)


def test_late_stopped_and_gil_holding_ranks_make_all_wait_and_then_the_sums_are_right() -> None:
    """Without a guard a late, a stopped and a GIL-holding rank look the same to their peers."""
    result = faults.run_ranks(some_take_long, WORLD, timeout=TIMEOUT).check()
    assert result.values("sums") == {rank: [6.0] * 4 for rank in range(WORLD)}
    for rank in range(WORLD):
        assert all(seconds > 1.0 for seconds in result[rank].reports["took"][1:])
    for fault in ("late@rank=1,op=1", "stop@rank=1,op=2", "gil@rank=1,op=3"):
        assert f"injected fault on rank 1: {fault}" in result[1].output


def one_is_killed_in_mid_transfer(children: int, seconds: float) -> None:
    rank = start(seconds)
    faults.at(rank=1, op=0, fault="kill", children=children, after_bytes=40_000_000)
    tensor = torch.ones(LARGE)
    faults.before_operation(rank, 0)
    error = error_of(lambda: dist.all_reduce(tensor))
    faults.report(error=error, values=sorted(set(tensor.unique().tolist())))


def test_a_rank_killed_in_mid_transfer_gives_peers_an_error_that_names_no_rank_and_a_torn_tensor() -> None:
    result = faults.run_ranks(one_is_killed_in_mid_transfer, WORLD, args=[0, 60.0], timeout=TIMEOUT)
    assert result[1].end == "SIGKILL"
    assert set(result.values("error")) == {0, 2}
    for text in result.values("error").values():
        assert "127.0.0.1" in text
        assert "rank 1" not in text.lower()
    assert any(len(values) > 1 for values in result.values("values").values()), "some elements are summed, some are not"


def test_forked_children_hide_a_killed_rank_from_its_peers_until_their_timeout() -> None:
    """They hold copies of its sockets, as DataLoader workers do: nothing is closed, so its peers see nothing."""
    result = faults.run_ranks(one_is_killed_in_mid_transfer, WORLD, args=[2, 4.0], timeout=TIMEOUT)
    assert result[1].end == "SIGKILL"
    assert set(result.values("error")) == {0, 2}
    assert any("Timed out" in text for text in result.values("error").values())
    assert len(result.left_running) == 2, "the children outlived their rank, and were ended with the job"


def one_leaves() -> None:
    rank = start(20.0)
    faults.at(rank=1, op=1, fault="exit")
    faults.at(rank=2, op=1, fault="late", seconds=1.0)
    dist.all_reduce(torch.ones(1))
    faults.before_operation(rank, 1)
    faults.report(error=error_of(lambda: dist.all_reduce(torch.ones(1))))


def test_a_rank_that_exits_early_ends_with_code_0_and_its_peers_get_an_error_without_its_name() -> None:
    result = faults.run_ranks(one_leaves, WORLD, timeout=TIMEOUT)
    assert result[1].end == "exit 0"
    assert "error" not in result[1].reports
    assert set(result.values("error")) == {0, 2}
    for text in result.values("error").values():
        assert text
        assert "rank 1" not in text.lower()


def one_raises(fault: str) -> None:
    rank = start(3.0)
    faults.at(rank=1, op=0, fault=fault)
    try:
        faults.before_operation(rank, 0)
    except RuntimeError as error:  # an evaluation loop that skips the batch
        faults.report(raised=type(error).__name__)
    else:
        faults.report(error=error_of(lambda: dist.all_reduce(torch.ones(1))))
    wait_for_all()


@pytest.mark.parametrize(("fault", "name"), [("oom", "OutOfMemoryError"), ("exception", "InjectedFault")])
def test_a_rank_that_raises_leaves_its_peers_waiting_until_their_timeout(fault: str, name: str) -> None:
    result = faults.run_ranks(one_raises, WORLD, args=[fault], timeout=TIMEOUT)
    assert result.check().values("raised") == {1: name}
    assert set(result.values("error")) == {0, 2}
    assert any("Timed out" in text for text in result.values("error").values())


def one_calls_otherwise(fault: str) -> None:
    start(3.0)
    faults.at(rank=1, op=1, fault=fault)
    faults.report(error=error_of(lambda: operations(3)))


@pytest.mark.parametrize("fault", ["skip", "extra"])
def test_a_skipped_or_extra_call_hangs_the_last_operation_far_from_its_cause(fault: str) -> None:
    """Of identical calls the peers' second pairs with this rank's third: nobody notices until one is left over."""
    result = faults.run_ranks(one_calls_otherwise, WORLD, args=[fault], timeout=TIMEOUT)
    waits = {0, 2} if fault == "skip" else {1}
    assert all("error" in result[rank].reports for rank in waits), str(result)
    assert all(result[rank].reports["error"] for rank in waits)
    assert len(result[min(waits)].reports["sums"]) == 2


def one_has_another_dtype() -> None:
    start(3.0)
    faults.at(rank=1, op=1, fault="mismatch", of="dtype")
    faults.report(error=error_of(lambda: operations(2)))


def test_another_dtype_of_the_same_width_goes_unnoticed_or_fails_but_names_nobody() -> None:
    result = faults.run_ranks(one_has_another_dtype, WORLD, timeout=TIMEOUT)
    for rank in result:
        assert "rank 1" not in rank.reports.get("error", "").lower()
    sums = {rank.rank: rank.reports["sums"] for rank in result if "sums" in rank.reports}
    assert any(values[1:] != [6.0] for values in sums.values()), "nobody saw a wrong sum or an error"


def connections_are_reset() -> None:
    rank = start(4.0)
    faults.at(rank=1, op=0, fault="reset", after_bytes=1_000_000)
    faults.before_operation(rank, 0)
    faults.report(error=error_of(lambda: dist.all_reduce(torch.ones(LARGE))))
    wait_for_all()
    faults.report(store_works=True)


def test_connections_reset_in_mid_transfer_break_the_group_and_leave_the_store_alone() -> None:
    result = faults.run_ranks(connections_are_reset, WORLD, timeout=TIMEOUT).check()
    own = result[1].reports["error"]  # "closed" where gloo was about to write when it was reset, and only then read
    assert "Connection reset by peer" in own or "Connection closed by peer" in own, "on its own side too"
    assert all(result.values("error").values()), "the others: at once, or at their timeout"
    assert result.values("store_works") == dict.fromkeys(range(WORLD), True)
    assert "2 connections reset" in result[1].output, "one to each peer"


def drilled_by_the_environment() -> None:
    rank = start(20.0)
    armed = faults.from_environment()
    faults.report(armed=[str(fault) for fault in armed])
    for sequence in range(3):
        faults.before_operation(rank, sequence)
        faults.report(done=sequence)


def test_the_environment_drills_a_program_that_names_no_fault() -> None:
    drill = {"NCCLGUARD_FAULT": "kill@rank=1,op=2;exit@rank=2,op=1,code=7", "NCCLGUARD_ALLOW_DRILL": "1"}
    result = faults.run_ranks(drilled_by_the_environment, WORLD, env=drill, timeout=TIMEOUT)
    assert [rank.end for rank in result] == ["exit 0", "SIGKILL", "exit 7"]
    assert result.values("armed")[0] == ["kill@rank=1,op=2", "exit@rank=2,op=1,code=7"]
    assert result.values("done") == {0: 2, 1: 1, 2: 0}
