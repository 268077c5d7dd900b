"""Calls that are wrong on some ranks only: none returns success, and what is said names the mistake."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from ncclguard.engine import runtime
from ncclguard.watch import watcher


def meet(what: str, among: int) -> None:
    """Wait until so many ranks are here; over the store, because the groups are not in order."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{what} {dist.get_rank()}", "")
    store.wait([f"{what} {rank}" for rank in range(among)])


def told(group: dist.ProcessGroup | None, among: int, timeout: float = 4) -> None:
    """One call on a group; reports how it ended, once all of `among` ranks have ended."""
    meet("begins", among)  # their limits pass at the same time
    try:
        outcome = ng.safe_all_reduce(torch.ones(2), group=group, timeout=timeout)
        faults.report(ok=outcome.ok, cause=str(outcome.cause), culprits=outcome.culprits, text=str(outcome.incident))
    except (ValueError, ng.GuardError) as error:
        faults.report(ok=False, cause=type(error).__name__, text=str(error))
    meet("told", among)


def forgotten() -> None:
    for call in (lambda: ng.safe_all_reduce(torch.ones(2)), ng.safe_barrier):
        try:
            faults.report(ok=call().ok)
        except ng.GuardConfigError as error:
            faults.report(ok=False, text=str(error))


def test_a_job_without_a_process_group_is_told_of_it_on_every_rank() -> None:
    result = faults.run_ranks(forgotten, 2, timeout=60).check()
    for rank in result:
        assert rank.reports["ok"] is False
        assert "started 2 ranks (WORLD_SIZE=2)" in rank.reports["text"]


def outsider() -> None:
    dist.init_process_group("gloo")
    told(dist.new_group([0, 1]), 3, timeout=30)


def test_a_rank_that_is_not_in_the_group_is_refused_and_the_members_go_on() -> None:
    result = faults.run_ranks(outsider, 3, timeout=60)
    assert result.values("ok") == {0: True, 1: True, 2: False}, result
    assert "rank 2 is not a member of the group that was given" in result[2].reports["text"]


def different_groups() -> None:
    dist.init_process_group("gloo")
    some = dist.new_group([0, 1])
    told(some if dist.get_rank() == 0 else None, 3)


def test_ranks_that_pass_different_groups_are_told_which() -> None:
    """All call the same; rank 0 on a group of two, which its peer of that group never calls."""
    result = faults.run_ranks(different_groups, 3, timeout=60)
    for rank in result:
        assert rank.reports["cause"] == "diverged", rank
    for rank in (1, 2):
        assert result[rank].reports["culprits"] == [0], result
        # "waits", or "waited" where its own limit passed a moment before theirs
        assert " in all_reduce(float32[2], SUM) of group 1:cpu (ranks 0-1)" in result[rank].reports["text"], result
    assert "all_reduce(float32[2], SUM) of group 0:cpu (ranks 0-2)" in result[0].reports["text"], result


def of_another_version(what: str) -> None:
    """Rank 1 has another version, or was told of one rank more; the backend connects with the first call."""
    if os.environ["RANK"] == "1":
        if what == "torch":
            torch.__version__ = "2.6.0"  # type: ignore[assignment]
        elif what == "ncclguard":
            runtime.__version__ = "0.0.1"  # type: ignore[attr-defined]
        else:
            os.environ["WORLD_SIZE"] = "3"
    dist.init_process_group("ncclguard", timeout=timedelta(seconds=20))
    runtime.current().monitor.session_ready.wait(30)
    meet("ready", 2)
    os._exit(0)


@pytest.mark.parametrize(
    ("what", "said"), [("torch", "torch 2.6.0"), ("ncclguard", "ncclguard 0.0.1"), ("ranks", "it has 3 ranks")]
)
def test_a_rank_that_was_not_started_like_the_first_says_so_loudly(what: str, said: str) -> None:
    result = faults.run_ranks(of_another_version, 2, args=[what], timeout=60)
    line = next((line for line in result[1].output.splitlines() if "was not started like rank 0" in line), "")
    assert said in line, result
    assert "it has" in line and "and rank 0 has 2 ranks" in line, line
    assert "was not started like" not in result[0].output, result


def made_in_another_order() -> None:
    """On the backend "ncclguard", which connects with the first call, so that no new_group hangs."""
    dist.init_process_group("ncclguard")
    first, second = ([0, 1], [0, 1, 2]) if dist.get_rank() == 0 else ([0, 1, 2], [0, 1])
    made = {len(ranks): dist.new_group(ranks) for ranks in (first, second)}
    if dist.get_rank() < 2:
        told(made[2], 2)


def test_groups_made_in_another_order_are_shown_as_what_they_are() -> None:
    result = faults.run_ranks(made_in_another_order, 3, timeout=60)
    for rank, other in ((0, 2), (1, 1)):
        said = result[rank].reports
        assert (said["cause"], said["culprits"]) == ("diverged", []), result
        assert f"all_reduce(float32[2], SUM) of group {other}:cpu (ranks 0-1)" in said["text"], result


def unread() -> None:
    dist.init_process_group("gloo")
    ng.safe_barrier().raise_if_failed()
    if dist.get_rank() == 1:
        time.sleep(7)
    ng.safe_all_reduce(torch.ones(2), timeout=3)  # its failure is not looked at
    try:
        ng.safe_all_reduce(torch.ones(2), timeout=20)
    except ng.CollectiveTimeout as error:
        faults.report(culprits=error.outcome.culprits)
    meet("raised", 3)


def test_a_failure_that_nobody_looked_at_is_reported_once_and_raised_by_the_next_call(tmp_path: Path) -> None:
    result = faults.run_ranks(unread, 3, timeout=60, env={"NCCLGUARD_REPORT_DIR": str(tmp_path)}).check()
    assert result.values("culprits") == {rank: [1] for rank in range(3)}
    reports = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert [report["incident"]["culprits"] for report in reports] == [[1]]


def fewer_batches(watched: float, delivered_after: float) -> None:
    """The README's pattern; rank 1 has fewer batches, so that it waits in the barrier and the others in DDP's C++."""
    deliver = watcher.Watcher._deliver

    def deliver_late(self: watcher.Watcher) -> None:
        if self._state.verdicts:
            time.sleep(delivered_after)
        deliver(self)

    watcher.Watcher._deliver = deliver_late  # type: ignore[method-assign]
    ng.watch(timeout=60)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    model(torch.ones(8, 16)).sum().backward()
    ng.watch(timeout=watched)  # only now: on a busy machine the ranks come to the first step seconds apart
    for _ in range(6 if dist.get_rank() == 1 else 20):
        model(torch.ones(8, 16)).sum().backward()
    ng.safe_barrier(timeout=8).raise_if_failed()


@pytest.mark.parametrize(("watched", "delivered_after"), [(30, 0), (30, 5), (3, 0)])
def test_ranks_that_wait_in_ddp_for_one_with_fewer_batches_are_not_late(
    watched: float, delivered_after: float, tmp_path: Path
) -> None:
    """Both sides are shown, and rank 1 is named, by whoever comes first to its limit, and once.

    Rank 1's end breaks what the others wait in, also before a watch has told of the verdict on that end.
    """
    args, env = [watched, delivered_after], {"NCCLGUARD_REPORT_DIR": str(tmp_path)}
    result = faults.run_ranks(fewer_batches, 3, args=args, timeout=90, env=env)
    assert "CollectiveMismatch" in result[1].output and "rank 1 diverged" in result[1].output, result
    assert "Ranks 0, 2 called all_reduce(" in result[1].output and "rank 1 called barrier()" in result[1].output, result
    (incident,) = [json.loads(file.read_text())["incident"] for file in tmp_path.glob("*.json")]
    assert (incident["cause"], incident["culprits"]) == ("diverged", [1]), result
    assert {tuple(ranks) for _, ranks in incident["sides"]} == {(0, 2), (1,)}, result


def torchs_own() -> None:
    dist.init_process_group("gloo")
    tensor = torch.ones(2)
    meet("begins", 2)  # the limit is no time to wait for a rank that is not here yet
    if dist.get_rank() == 0:
        faults.report(text=str(ng.safe_all_reduce(tensor, timeout=4).incident))
    else:
        dist.all_reduce(tensor)


def test_a_collective_of_torchs_own_beside_a_guarded_one_is_told_apart_from_work_that_takes_long() -> None:
    result = faults.run_ranks(torchs_own, 2, timeout=60)
    text = result[0].reports["text"]
    assert "rank 1 called all_reduce(Float [2], group 0 default_pg, number 1)" in text, result
    assert "no side is a majority" in text and "Compare what the ranks called" in text, result
    assert "saving, metrics" not in text


def by_number(ends: bool) -> None:
    """Evaluations without a step, of which the last rank leaves out the second."""
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=60).raise_if_failed()  # on a busy machine the ranks come here seconds apart

    @ng.resilient_evaluate(barrier_timeout=5, max_attempts=1)
    def evaluate(value: float) -> float:
        total = torch.tensor([value])
        dist.all_reduce(total)
        return float(total)

    last = dist.get_rank() == dist.get_world_size() - 1
    values = [evaluate(value) for value in (1.0, 2.0, 3.0, 4.0) if not (last and value == 2.0)]
    faults.report(values=values)
    if last and not ends:
        time.sleep(12)


@pytest.mark.parametrize("ends", [True, False])
def test_evaluations_that_only_their_number_tells_apart_are_doubted_where_one_is_missing(
    ends: bool, tmp_path: Path
) -> None:
    """Two of three values mix two evaluations: the report of the last, to which a rank does not come, says so."""
    result = faults.run_ranks(by_number, 2, args=[ends], timeout=60, env={"NCCLGUARD_REPORT_DIR": str(tmp_path)})
    assert result[1].reports["values"] == [2.0, 5.0, 7.0], result
    (report,) = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert report["incident"]["culprits"] == [1], report
    assert "the values since then mix different evaluations" in report["incident"]["advice"]


def unlike_lists() -> None:
    dist.init_process_group("gloo")
    outcome = ng.safe_broadcast_object_list([0] * (2 if dist.get_rank() == 0 else 3), src=0, timeout=20)
    faults.report(text=str(outcome.incident), culprits=outcome.culprits)


def test_lists_of_objects_of_another_length_are_told_by_their_lengths() -> None:
    result = faults.run_ranks(unlike_lists, 3, timeout=60)
    for rank in result:
        assert rank.reports["culprits"] == [0], result
        assert "size of 2 objects, src=0" in rank.reports["text"] and "size of 3 objects" in rank.reports["text"], rank


def configured_late() -> None:
    """What decides whether operations close differs by rank, once the ranks have agreed on it; then an evaluation raises."""
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=20).raise_if_failed()
    ng.configure(closing_nbytes=0 if dist.get_rank() else 65536)
    tries = []

    @ng.resilient_evaluate(timeout=20, barrier_timeout=20, fallback=None)
    def evaluate() -> float:
        tries.append(1)
        if dist.get_rank() == 1:
            raise KeyError("labels")
        return 1.0

    sums = []
    for _ in range(3):
        tensor = torch.ones(2)
        ng.safe_all_reduce(tensor, timeout=20).raise_if_failed()
        sums.append(float(tensor.sum()))
    evaluate()
    faults.report(sums=sums, tries=len(tries))


def test_what_the_ranks_have_agreed_on_holds_whatever_configure_says_later() -> None:
    result = faults.run_ranks(configured_late, 2, timeout=60).check()
    for rank in result:
        assert rank.reports == {"sums": [4.0] * 3, "tries": 1}, result
    assert not any("╭─ ncclguard incident" in rank.output for rank in result), result


def raises_deep_down() -> None:
    dist.init_process_group("gloo")

    def metric() -> float:
        return float(json.loads("no number"))

    @ng.resilient_evaluate(timeout=20, barrier_timeout=20, fallback=None, max_attempts=3)
    def evaluate() -> float:
        return metric() if dist.get_rank() == 1 else 1.0

    evaluate()


def test_where_an_exception_came_from_that_an_evaluation_has_survived_is_shown_once() -> None:
    result = faults.run_ranks(raises_deep_down, 2, timeout=60).check()
    assert "Traceback" not in result[0].output, result
    trace = result[1].output.partition("Traceback (most recent call last):\n")[2]
    assert trace.startswith("  File ") and trace.splitlines()[0].endswith("in evaluate"), result
    assert trace.count("Traceback") == 0 and "in metric" in trace and "JSONDecodeError: " in trace, result
