"""The backend "ncclguard-nccl" without a GPU: what a verdict ends, and what the ranks agree on; NCCL is a fake here."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import torch_compat
from ncclguard.errors import CollectiveFailed, GuardError
from ncclguard.incident.model import Incident, RankReport
from ncclguard.outcome import Cause
from ncclguard.process_group import enqueued
from ncclguard.process_group.enqueued import EnqueuedProcessGroup, Failures, _Met
from ncclguard.watch import watcher

DEVICE = torch.device("cuda", 0)


class Communicator:
    """Stands for ProcessGroupNCCL."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect."""


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Failures:
    """Nothing has failed, and nobody is interrupted."""
    own = Failures()
    own.interrupts = False
    monkeypatch.setattr(enqueued, "failures", own)
    monkeypatch.setattr(enqueued, "_EXPLAINED_WITHIN", 0.2)
    return own


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Communicator]]:
    """The communicators that were made."""
    found: list[Communicator] = []

    def make(store: Any, name: str, ranks: tuple[int, ...], index: int) -> Communicator:
        found.append(Communicator(name))
        return found[-1]

    monkeypatch.setattr(torch_compat, "new_enqueued_group", make)
    monkeypatch.setattr(torch_compat, "plain_group", lambda backend, store: None)
    monkeypatch.setattr(enqueued, "_counter", lambda device: (torch.empty(1), torch.empty(1)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(EnqueuedProcessGroup, "_join", staticmethod(lambda made, device: True))
    before = dict(watcher.limits)
    yield found
    assert watcher.limits == before, "a limit is left behind"


def group_of(failures: Failures, *ranks: int, connected: bool = True, name: str = "7") -> EnqueuedProcessGroup:
    group = EnqueuedProcessGroup(0, len(ranks), dist.HashStore(), name, ranks, 5.0)
    group._name = name
    if connected:
        group._made = group._backend = Communicator()
        group._life = failures.life
    return group


def verdict(*culprits: int, cause: Cause = Cause.LATE) -> Incident:
    return Incident(
        id="5e-0-3.0", op="all_reduce", op_id="7:ncclguard-nccl/1", group="7:ncclguard-nccl", generation=0, cause=cause,
        culprits=culprits, agreed=True, deadline_expired=True, attempts=1, participants=(0, 1, 2), ranks=(),
        summary="late", advice="look",
    )  # fmt: skip


def meeting(monkeypatch: pytest.MonkeyPatch, *answers: Callable[[dict[str, Any]], _Met | None]) -> list[dict[str, Any]]:
    """Each meeting ends as the next of these says, given what this rank has said."""
    said: list[dict[str, Any]] = []
    left = list(answers)

    def meet(self: EnqueuedProcessGroup, **words: Any) -> _Met:
        said.append(words | {"life": enqueued.failures.life, "tries": self._tries})
        answer = left.pop(0)(said[-1])
        return alike(said[-1]) if answer is None else answer

    monkeypatch.setattr(EnqueuedProcessGroup, "_meet", meet)
    return said


def alike(said: dict[str, Any], **other: int) -> _Met:
    """What comes of a meeting in which the others say the same, but for `other`."""
    found = {
        "life": said["life"], "connecting": int(said.get("connecting", False)),
        "committing": int(not said.get("connecting", False)), "broken": said.get("broken", 0),
        "tries": said["tries"], "ended": int(said.get("ended", False)),
    }  # fmt: skip
    return _Met(**(found | other), alike=True)


# ------------------------------------------------------------------ what a verdict ends


def test_a_rank_that_has_no_group_with_the_culprit_is_told_and_gives_its_groups_up(failures: Failures) -> None:
    """The others abort all their groups, also those that they share with this one."""
    group = group_of(failures, 1, 2)
    communicator = group.beneath
    failures.end(verdict(0), 1, (), 3.0)
    assert group.beneath is None
    assert communicator.aborted.wait(5.0)
    assert failures.life == 1
    with pytest.raises(CollectiveFailed):
        failures.raise_pending()


@pytest.mark.parametrize("first", ["verdict", "without"])
def test_a_verdict_without_waiters_is_done_with_where_its_dead_are_gone_on_without(
    failures: Failures, first: str
) -> None:
    """It also named a rank that had only run out of memory, in an evaluation that survived it."""
    reports = tuple(
        RankReport(rank=rank, state="departed", cause=cause) for rank, cause in ((0, Cause.LOST), (1, Cause.FAILED))
    )
    incident = verdict(0, 1, cause=Cause.LOST).model_copy(update={"group": "job", "ranks": reports})
    group_of(failures, 1, 2)
    steps = [lambda: failures.end(incident, 1, (), 0.0), lambda: failures.without([0])]
    for step in steps if first == "verdict" else reversed(steps):
        step()
    failures.raise_pending()
    failures.end(verdict(0, 1), 2, (), 3.0)  # of a collective that waits: rank 1 is one more that it is about
    assert failures.life == 2


def test_a_late_verdict_on_ranks_that_the_others_go_on_without_ends_nothing(failures: Failures) -> None:
    group = group_of(failures, 1, 2)
    failures.without([0])
    assert group.beneath is None, "some ranks have aborted it, and some not"
    group._made = group._backend = Communicator()
    failures.end(verdict(0, cause=Cause.LOST), 1, (), 3.0)
    assert group.beneath is not None
    failures.raise_pending()
    failures.begin()  # another session, in which a new process has the place of rank 0
    group._made = group._backend = Communicator()
    failures.end(verdict(0, cause=Cause.LOST), 1, (), 3.0)
    assert group.beneath is None


def test_an_exception_ends_coalescing_so_that_later_collectives_are_issued(
    failures: Failures, made: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(failures, 0, 1)
    calls: list[str] = []
    group.beneath._start_coalescing = lambda: calls.append("start")
    group.beneath._end_coalescing = lambda: calls.append("end")
    with pytest.raises(ValueError, match="within"), dist._coalescing_manager(group, DEVICE):
        raise ValueError("within")
    assert calls == ["start", "end"]
    failures.end(verdict(1), 1, (), 3.0)
    with pytest.raises(CollectiveFailed), dist._coalescing_manager(group, DEVICE):
        pass
    assert calls == ["start", "end"]
    assert group not in dist.distributed_c10d._world.pg_coalesce_state


def test_messages_that_torch_refuses_are_refused_in_its_words_and_a_batch_may_be_given_by_name() -> None:
    with pytest.raises(ValueError, match="^Invalid ``p2p_op_list``"):
        dist.batch_isend_irecv([1, 2])  # type: ignore[list-item]
    messages = [object.__new__(dist.P2POp) for _ in range(2)]  # else they ask for a job
    for number, message in enumerate(messages):
        vars(message).update(op=dist.isend, tensor=torch.ones(1), group=dist.ProcessGroup(0, number + 2))
    with pytest.raises(ValueError, match="^All ops need to use the same group"):
        dist.batch_isend_irecv(p2p_op_list=messages)


def test_no_verdict_of_a_former_session_is_delivered_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors go over to a newcomer's session, where verdicts are counted from the first again."""
    events: list[str] = []

    class Former:
        def close(self) -> None:
            events.append("closed")

    class Next(Former):
        def __init__(self, *_: Any) -> None:
            """As a Watcher is made."""

        def start(self) -> None:
            events.append("started")

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(watcher, "Watcher", Next)
    monkeypatch.setattr(watcher.runtime, "current", lambda: types.SimpleNamespace(watcher=None, monitor=None))
    watch = watcher.Watch(watcher.Settings(None, False, None, None, None))
    watch._watcher = cast("Any", Former())
    monkeypatch.setattr(watcher, "_current", watch)
    watcher.observe_anew()
    assert events == ["closed", "started"]


# ------------------------------------------------------------------ connecting


def test_a_verdict_while_the_ranks_connect_is_raised_and_what_it_aborts_is_not_used(
    failures: Failures, made: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(failures, 0, 1, connected=False)
    meeting(monkeypatch, lambda _: None, lambda _: failures.end(verdict(1), 1, (), 3.0))
    with pytest.raises(CollectiveFailed):
        group.nccl(DEVICE)
    assert made[0].aborted.wait(5.0)
    assert group.beneath is None


def test_a_verdict_that_another_rank_has_first_fails_the_connection_on_all(
    failures: Failures, made: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(failures, 0, 1, connected=False)
    arrival = threading.Timer(0.05, lambda: failures.end(verdict(1), 1, (), 3.0))
    meeting(monkeypatch, lambda _: None, lambda said: arrival.start() or alike(said, life=1))
    with pytest.raises(CollectiveFailed):
        group.nccl(DEVICE)
    assert made[0].aborted.wait(5.0)
    failures.raise_pending()  # its error is raised once
    meeting(monkeypatch, lambda _: None, lambda _: None)
    assert group.nccl(DEVICE) is made[1]
    group.give_up()


def test_what_was_made_is_aborted_where_the_ranks_cannot_agree_on_it(
    failures: Failures, made: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: dict[str, Any]) -> None:
        raise GuardError("the meeting failed")

    group = group_of(failures, 0, 1, connected=False)
    meeting(monkeypatch, lambda _: None, fails)
    with pytest.raises(GuardError, match="the meeting failed"):
        group.nccl(DEVICE)
    assert made[0].aborted.wait(5.0)


def test_every_communicator_has_a_name_of_its_own_also_after_a_new_beginning(
    failures: Failures, made: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(failures, 0, 1, connected=False)
    for _ in range(3):
        meeting(monkeypatch, lambda _: None, lambda _: None)
        group.nccl(DEVICE)
        assert group.recorded_as == made[-1].name
        failures.begin()
    assert len({one.name for one in made}) == 3


def test_the_ranks_agree_on_the_number_of_tries(
    failures: Failures, made: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has joined has made none; another was the only one that could not."""
    group = group_of(failures, 0, 1, connected=False)
    meeting(monkeypatch, lambda said: alike(said, tries=4), lambda _: None)
    group.nccl(DEVICE)
    assert made[0].name == "7#5"
    group.give_up()


def test_no_limit_is_left_of_a_communicator_when_the_others_go_on(
    failures: Failures, made: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    group = group_of(failures, 0, 1, 2, connected=False)
    meeting(monkeypatch, lambda _: None, lambda _: None)
    group.nccl(DEVICE)
    assert "7" in watcher.limits
    group.go_on((0, 1), 1)
    assert "7" not in watcher.limits


# ------------------------------------------------------------------ the end of a step


@pytest.fixture
def committing(failures: Failures, monkeypatch: pytest.MonkeyPatch) -> EnqueuedProcessGroup:
    monkeypatch.setattr(EnqueuedProcessGroup, "_finish", lambda self: None)
    group = group_of(failures, 0, 1)
    group.begin_step()
    return group


def test_a_verdict_that_comes_when_all_have_said_well_does_not_undo_the_step_on_one_rank(
    failures: Failures, committing: EnqueuedProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting(monkeypatch, lambda _: failures.end(verdict(1), 1, (), 3.0))
    committing.commit()
    with pytest.raises(CollectiveFailed):
        committing.begin_step()


def test_a_step_that_a_verdict_has_ended_on_one_rank_fails_on_all(
    failures: Failures, committing: EnqueuedProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrival = threading.Timer(0.05, lambda: failures.end(verdict(1), 1, (), 3.0))
    meeting(monkeypatch, lambda said: arrival.start() or alike(said, ended=1))
    with pytest.raises(CollectiveFailed):
        committing.commit()


def test_what_a_second_optimizer_needs_is_committed_too(
    committing: EnqueuedProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = meeting(monkeypatch, *[lambda _: None] * 3)
    committing.commit()
    committing.commit()
    assert len(said) == 1, "nothing was issued between"
    committing._note("allreduce", torch.ones(1))
    committing.commit()
    assert len(said) == 2


def test_a_commit_waits_for_the_groups_within_its_own(failures: Failures, monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[str] = []
    monkeypatch.setattr(EnqueuedProcessGroup, "_finish", lambda self: finished.append(self._recorded))
    groups = [group_of(failures, *ranks, name=name) for name, ranks in (("0", (0, 1)), ("2", (0,)), ("3", (0, 2)))]
    meeting(monkeypatch, lambda _: None)
    groups[0].begin_step()
    groups[0].commit()
    assert finished == ["0", "2"]


def test_a_step_forgets_the_group_of_a_job_that_has_ended() -> None:
    step = ng.resilient_step(lambda: 7)
    step._unit = cast("Any", "a group that was destroyed")
    assert step() == 7
