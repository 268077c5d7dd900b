"""The channel from a trainer to engines: all have a version or nobody serves it, and who held it up is left out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ncclguard as ng
from ncclguard import faults, torch_compat
from ncclguard.coordination.store import AgreementStore
from ncclguard.weights import Receiver, Sender
from ncclguard.weights.board import Board
from ncclguard.weights.buckets import Digest, Header, Piece, arriving, bucketed
from tests.ports import free_port

#: Of a `publish`, of which the first of three tries has a third.
TIMEOUT = 6.0
#: Of one in which nobody is struck: the first, in which all connect, takes long on a busy machine.
UNHURRIED = 60.0
#: The processes: a trainer, an engine of one worker, and one of two. What is struck is the last.
RANKS, STRUCK = 4, 3
WORKERS = {1: ("A", 0, 1), 2: ("B", 0, 2), 3: ("B", 1, 2)}
VERSIONS = 5


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """The address of a store in a process of its own."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "ncclguard", "store", "--listen", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "listening" in process.stdout.readline()
        yield f"tcp://{address}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def weights(version: int) -> dict[str, torch.Tensor]:
    """Three buckets of a megabyte; small tensors of several kinds, one of them without elements."""
    large = {f"layer{n}.weight": torch.full((500, 400), float(version)) for n in range(3)}
    return {
        **large, "bias": torch.full((7,), version, dtype=torch.bfloat16), "none": torch.empty(0, 3),
        "steps": torch.tensor(version), "mask": torch.tensor([True, False, True]),
    }  # fmt: skip


def strike(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":  # until the others have gone on
        subprocess.Popen(["sh", "-c", f"sleep {TIMEOUT}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "late":
        time.sleep(TIMEOUT / 3 + 2)


def trains(sender: Sender, moment: str, fault: str, first: int = 0) -> None:
    sent = []
    for version in range(first, first + VERSIONS):
        state = weights(version)

        def gathered(
            state: dict[str, torch.Tensor] = state, version: int = version
        ) -> Iterable[tuple[str, torch.Tensor]]:
            for number, item in enumerate(state.items()):
                if (moment, version, number) == ("gather", 1, 2):
                    strike(fault)
                yield item

        if version == first + VERSIONS - 1 and fault in ("late", "stop"):
            sender.wait_for(2, within=UNHURRIED)  # who was struck asks again when it is back
        published = sender.publish(gathered, version)
        sender._timeout = TIMEOUT
        sent.append([bool(published), published.engines, {k: cause(why) for k, why in published.left_out.items()}])
        faults.report(sent=sent, longest=max(published.seconds, 0.0))
        time.sleep(1.0)
    faults.report(slowest=True)


def cause(why: Any) -> str:
    return str(getattr(why, "cause", why))


def serves(address: str, name: str, moment: str, fault: str) -> None:
    """Report each version that was committed, and whether all of it was right."""
    rank = int(os.environ["RANK"])
    engine, worker, workers = WORKERS[rank]
    served: list[list[Any]] = []
    faults.report(served=served, failed=0)
    failed = 0
    with Receiver(address, name=name, engine=engine, worker=worker, workers=workers) as receiver:
        struck = rank == STRUCK
        if struck and moment == "asked":
            time.sleep(1)
            strike(fault)
            struck = False
        while True:
            if struck and moment == "idle" and receiver.version == 0:
                strike(fault)
                struck = False
            waits = receiver.version is None or fault in ("late", "stop")  # for who starts, or comes back
            update = receiver.next(timeout=UNHURRIED if waits else 3 * TIMEOUT)
            if update is None:
                break
            staged = {}
            if struck and moment == "start" and update.version == 1:
                strike(fault)
                struck = False
            for tensor_name, tensor in update:
                staged[tensor_name] = tensor
                if struck and moment == "middle" and update.version == 1:
                    strike(fault)
                    struck = False
            if struck and moment == "vote" and update.version == 1:
                strike(fault)
                struck = False
            if update.commit():
                assert isinstance(update.version, int)
                right = weights(update.version)
                equal = staged.keys() == right.keys() and all(
                    torch.equal(staged[key], right[key]) and staged[key].dtype == right[key].dtype for key in right
                )
                served.append([update.version, equal])
                if struck and moment == "committed" and update.version == 1:
                    faults.report(served=served)
                    strike(fault)
                    struck = False
            else:
                failed += 1
            faults.report(served=served, failed=failed)
            if update.version == VERSIONS - 1 and served and served[-1][0] == VERSIONS - 1:
                break


def channel(address: str, moment: str, fault: str) -> None:
    name = f"{moment} {fault}"
    if int(os.environ["RANK"]):
        serves(address, name, moment, fault)
        return
    with Sender(address, name=name, timeout=UNHURRIED, bucket_mb=1.0) as sender:
        sender.wait_for(2, within=60)
        trains(sender, moment, fault)


CELLS = [
    (moment, fault) for moment in ("idle", "start", "middle", "vote", "committed") for fault in ("kill", "late", "stop")
]
OFTEN = {
    ("idle", "stop"),
    ("start", "late"),
    ("middle", "kill"),
    ("middle", "stop"),
    ("vote", "kill"),
    ("committed", "kill"),
}
CAUSES = {"kill": "lost", "late": "late", "stop": "stuck"}


@pytest.mark.parametrize(
    ("moment", "fault"),
    [pytest.param(*cell, marks=() if cell in OFTEN else pytest.mark.thorough) for cell in CELLS],
)
def test_an_engine_that_is_struck_is_left_out_whole_and_the_others_have_the_version(
    store: str, moment: str, fault: str
) -> None:
    result = faults.run_ranks(channel, RANKS, args=[store, moment, fault], timeout=120)
    sent = result[0].reports["sent"]
    assert sent[0] == [True, ["A", "B"], {}], result
    at = 2 if moment == "committed" else 1  # the version that has no B
    assert all(one == [True, ["A", "B"], {}] for one in sent[:at]), result
    assert sent[at] == [True, ["A"], {"B": CAUSES[fault]}], result
    assert result[0].reports["longest"] < TIMEOUT + 2, result
    assert [one[0] for one in sent] == [True] * VERSIONS, result
    served = {rank: dict(result[rank].reports["served"]) for rank in WORKERS}
    assert served[1] == dict.fromkeys(range(VERSIONS), True), result
    for rank in (2, 3):  # the healthy worker of the engine that was left out serves no version that its engine lacks
        assert served[rank] == {version: True for version in range(VERSIONS) if "B" in sent[version][1]} or (
            fault == "kill" and rank == STRUCK and set(served[rank]) == set(range(at))
        ), result
    if fault == "kill":
        assert all(one[1] == ["A"] for one in sent[at:]), result
    else:
        assert sent[-1] == [True, ["A", "B"], {}], result  # it has come back by itself
    assert not result.left_running


def in_flight() -> dict[str, torch.Tensor]:
    """Three buckets, each of two parts: one is in flight, and one behind it, when the next header is sent."""
    return {
        name: tensor
        for n in range(3)
        for name, tensor in ((f"bias{n}", torch.ones(7)), (f"weight{n}", torch.ones(600, 600)))
    }


def stops_in_the_middle(address: str) -> None:
    """Engine 2 is stopped when the first bucket of version 1 has arrived, and goes on once the others have it."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        with Sender(address, name="one report", timeout=UNHURRIED, bucket_mb=1.0) as sender:
            sender.wait_for(2, within=60)
            sender.publish(in_flight(), 0)
            sender._timeout = TIMEOUT
            published = sender.publish(in_flight(), 1)
            faults.report(engines=published.engines, left_out={k: cause(w) for k, w in published.left_out.items()})
        return
    with Receiver(address, name="one report", engine=f"engine {rank}") as receiver:
        while receiver.version != 1 and (update := receiver.next(timeout=UNHURRIED)) is not None:
            for _ in update:
                if rank == 2 and update.version == 1:
                    strike("stop")
            if not update.commit() and rank == 2:
                return


def test_one_stopped_engine_has_one_report_and_giving_the_group_up_none(store: str, tmp_path: Path) -> None:
    """Neither the broadcasts in flight that end with the group, nor the broadcast of objects that fails beside them."""
    result = faults.run_ranks(
        stops_in_the_middle, 3, args=[store], env={"NCCLGUARD_REPORT_DIR": str(tmp_path)}, timeout=90
    )
    assert result[0].reports == {"engines": ["engine 1"], "left_out": {"engine 2": "stuck"}}, result
    log = "".join(rank.output for rank in result)
    assert [rank.output.count("╭─ ncclguard incident") for rank in result] == [1, 0, 0], log
    assert len(list(tmp_path.glob("incident-*.html"))) == 1, log
    assert "has left the job" not in log, log


def restarts(address: str, how: str) -> None:
    """The first trainer ends in the middle of version 1; another sends from 10 on."""
    name, rank = f"restart {how}", int(os.environ["RANK"])
    if rank == 0:
        sender = Sender(address, name=name, timeout=UNHURRIED, bucket_mb=1.0)
        sender.wait_for(2, within=60)
        trains(sender, "gather", how)
    elif rank == 4:
        faults.wait_until_told("again", seconds=100)
        with Sender(address, name=name, timeout=UNHURRIED, bucket_mb=1.0) as sender:
            faults.report(engines=sender.wait_for(2, within=20))
            faults.report(again=str(sender.publish(weights(4), VERSIONS - 1)))
    else:
        serves(address, name, "", "")


def test_engines_keep_their_version_when_the_trainer_is_killed_and_follow_the_next(store: str) -> None:
    with faults.start_ranks(restarts, 5, args=[store, "kill"], timeout=100) as job:
        job.wait_for("sent", [0], seconds=60)
        time.sleep(4)
        job.tell("again")
        result = job.wait()
    assert result[4].reports["engines"] == ["A", "B"] and "is on A, B" in result[4].reports["again"], result
    for rank in WORKERS:
        assert result[rank].reports["served"] == [[0, True], [VERSIONS - 1, True]], result
        assert result[rank].reports["failed"] >= 1, result


def refuses(address: str, how: str) -> None:
    rank = int(os.environ["RANK"])
    if rank == 0:
        monitoring = ng.setup_nccl_monitoring(lambda record: None, serve=False)
        with monitoring, Sender(address, name=how, timeout=UNHURRIED, bucket_mb=1.0) as sender:
            sender.wait_for(2, within=60)
            published = sender.publish(weights(1), 1)
            faults.report(engines=published.engines, left_out={k: cause(why) for k, why in published.left_out.items()})
            (seen,) = monitoring.snapshot().channels
            faults.report(seen=[seen.end, seen.version, seen.versions, seen.failed, seen.engines, dict(seen.left_out)])
        assert monitoring.snapshot().channels == ()
        return
    monitoring = ng.setup_nccl_monitoring(lambda record: None, serve=False)
    with monitoring, Receiver(address, name=how, engine=f"engine {rank}") as receiver:
        committed = []
        for within in (60, 8):  # the others have to start first
            update = receiver.next(timeout=within)
            if update is None:
                break
            if rank == 2 and how == "raises":
                try:
                    with update:
                        raise RuntimeError("size mismatch for bias")
                except RuntimeError:
                    committed.append(False)
                continue
            if rank == 2 and how == "refuses":
                update.refuse("size mismatch for bias")
            for number, (_, tensor) in enumerate(update):
                if rank == 2 and how == "differs" and number == 0:
                    update._digest.add(Header((), 1), [tensor.view(torch.uint8).flatten()[:1]])
            committed.append(update.commit())
        (seen,) = monitoring.snapshot().channels
        faults.report(committed=committed, seen=[seen.end, seen.version, seen.versions, seen.failed])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("refuses", "worker 0 refused it: size mismatch for bias"),
        ("differs", "worker 0 has other bytes than were sent"),
        ("raises", "exited"),
    ],
)
def test_an_engine_that_does_not_take_a_version_is_left_out_and_the_others_get_it_again(
    store: str, how: str, said: str
) -> None:
    result = faults.run_ranks(refuses, 3, args=[store, how], timeout=90).check()
    told = result[0].reports
    assert (told["engines"], told["left_out"]) == (["engine 1"], {"engine 2": said}), result
    assert told["seen"] == ["trainer", 1, 1, 0, ["engine 1"], {"engine 2": 1}], result
    assert result[1].reports == {"committed": [False, True], "seen": ["engine 1", 1, 1, 1]}, result
    assert result[2].reports["committed"][0] is False, result


def raises_again(address: str) -> None:
    """Engine 3 raises in the middle of each second version, with the next bucket in flight."""
    rank, versions = int(os.environ["RANK"]), 16
    if rank == 0:
        with Sender(address, name="again", timeout=20.0, bucket_mb=1.0) as sender:
            left_out: list[dict[str, str]] = []
            for version in range(versions):
                sender.wait_for(3, within=20)
                published = sender.publish(weights(version), version)
                left_out.append({name: cause(why) for name, why in published.left_out.items()})
            faults.report(left_out=left_out)
        return
    with Receiver(address, name="again", engine=f"engine {rank}") as receiver:
        while receiver.version != versions - 1:
            update = receiver.next(timeout=20)
            assert update is not None
            try:
                with update:
                    for _ in update:
                        if rank == 3 and int(update.version) % 2:
                            raise RuntimeError("size mismatch for bias")
                    update.commit()
            except RuntimeError:
                if update.version == versions - 1:
                    break


def test_who_gives_the_group_up_for_one_that_has_raised_is_not_left_out(store: str) -> None:
    said = faults.run_ranks(raises_again, 4, args=[store], timeout=90).check()[0].reports["left_out"]
    assert said == [{}, {"engine 3": "exited"}] * 8, said


def differs(address: str) -> None:
    """Engines 1 and 2 call another shape than the trainer and engine 3."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        with Sender(address, name="shapes", timeout=20.0) as sender:
            sender.wait_for(3, within=60)
            published = sender.publish(weights(0), 0)
            faults.report(engines=published.engines, left_out={k: cause(why) for k, why in published.left_out.items()})
        return
    if rank < 3:
        faults.at(rank=0, op=0, fault="mismatch", engine=f"engine {rank}")
    with Receiver(address, name="shapes", engine=f"engine {rank}") as receiver:
        within = 60.0  # the others have to start first
        while (update := receiver.next(timeout=within)) is not None:
            if update.commit():
                break
            within = 5.0


def test_who_calls_another_shape_than_the_trainer_is_left_out_also_where_they_are_as_many(store: str) -> None:
    said = faults.run_ranks(differs, 4, args=[store], timeout=90).check()[0].reports
    assert said == {"engines": ["engine 3"], "left_out": dict.fromkeys(["engine 1", "engine 2"], "diverged")}, said


def leaves(address: str) -> None:
    """Engine 2 closes its end after the first version."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        monitoring = ng.setup_nccl_monitoring(lambda record: None, serve=False)
        with monitoring, Sender(address, name="leaves", timeout=20.0) as sender:
            sender.wait_for(2, within=60)
            first = sender.publish(weights(0), 0)
            time.sleep(1)
            second = sender.publish(weights(1), 1)
            faults.report(
                engines=[first.engines, second.engines], seconds=second.seconds, left_out=list(second.left_out),
                groups=sorted({series.group for series in monitoring.snapshot().series}),
            )  # fmt: skip
        return
    with Receiver(address, name="leaves", engine=f"engine {rank}") as receiver:
        for _ in range(2 if rank == 1 else 1):
            update = receiver.next(timeout=20)
            assert update is not None and update.commit()


def test_an_engine_that_leaves_is_not_waited_for(store: str) -> None:
    said = faults.run_ranks(leaves, 3, args=[store], timeout=60).check()[0].reports
    assert said["engines"] == [["engine 1", "engine 2"], ["engine 1"]], said
    assert said["seconds"] < 10 and said["left_out"] == [], said
    assert {group.partition(":")[0] for group in said["groups"]} == {"channel leaves"}, said  # of both epochs


def listening(address: str) -> subprocess.Popen[str]:
    """A store in a process of its own, which listens already."""
    command = [sys.executable, "-m", "ncclguard", "store", "--listen", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and "listening" in process.stdout.readline()
    process.stdout.close()
    return process


def goes_on(address: str, how: str) -> None:
    """Version 0 before the store is gone, or its connections are, and version 1 after it is back."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        with Sender(address, timeout=20.0) as sender:
            sender.wait_for(2, within=60)
            sent = [sender.publish(weights(0), 0)]
            faults.report(first=sent[0].engines)
            faults.wait_until_told("again", seconds=60)
            if how == "cut":
                torch_compat.disconnect(sender._board._clone)
                time.sleep(0.2)
            sent.append(sender.publish(weights(1), 1))
            faults.report(engines=[one.engines for one in sent], left_out=[list(one.left_out) for one in sent])
        return
    with Receiver(address, engine=f"engine {rank}") as receiver:
        had = []
        while receiver.version != 1:
            update = receiver.next(timeout=60)
            assert update is not None
            if update.commit():
                had.append(receiver.version)
                if how == "cut":
                    torch_compat.disconnect(receiver._board._clone)
        faults.report(had=had)


@pytest.mark.parametrize("how", ["restart", "cut"])
def test_both_ends_go_on_when_the_store_or_their_connections_to_it_are_back(how: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    store = listening(address)
    try:
        with faults.start_ranks(goes_on, 3, args=[f"tcp://{address}", how], timeout=100) as job:
            job.wait_for("first", [0], seconds=60)
            if how == "restart":
                store.kill()
                store.wait()
                time.sleep(2)  # that all see it
                store = listening(address)
                time.sleep(2)  # in which they look once a second
            job.tell("again")
            result = job.wait()
    finally:
        store.kill()
        store.wait()
    said = result[0].reports
    assert said["engines"] == [["engine 1", "engine 2"]] * 2 and said["left_out"] == [[], []], result
    assert result.values("had") == {1: [0, 1], 2: [0, 1]}, result
    if how == "restart":
        assert "once a store listens at its address again" in result[1].output, result
        assert "the store of the weights answers again" in result[1].output, result


#: Seconds for which the store is silent: as long as the first try has; almost as long as `publish`, whose last try then
#: has no time to connect, which its engines are still in when the next version comes; and longer.
SILENCES = (TIMEOUT / 3, TIMEOUT - 0.3, TIMEOUT + 1.0)


def then(owner: Any, name: str, before: bool, call: Callable[[], object]) -> None:
    """Have `call` called once: before the next call of the method, or after it."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **named: Any) -> Any:
        setattr(owner, name, original)
        if before:
            call()
        result = original(*args, **named)
        if not before:
            call()
        return result

    setattr(owner, name, wrapped)


def in_silence(address: str, pid: int, moment: str) -> None:
    """Each second version is sent while the store is stopped."""
    rank, last = int(os.environ["RANK"]), 2 * len(SILENCES)
    if rank:
        with Receiver(address, name=moment, engine=f"engine {rank}") as receiver:
            had = []
            while receiver.version != last and (update := receiver.next(timeout=UNHURRIED)) is not None:
                if update.commit():
                    had.append(receiver.version)
                    faults.report(had=had)
        return
    with Sender(address, name=moment, timeout=UNHURRIED, bucket_mb=1.0) as sender:
        sender.wait_for(2, within=60)
        sent = [sender.publish(weights(0), 0)]
        sender._timeout = TIMEOUT
        stopped: list[subprocess.Popen[bytes]] = []
        for number, seconds in enumerate(SILENCES):

            def stop(seconds: float = seconds) -> None:
                os.kill(pid, signal.SIGSTOP)
                stopped.append(subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"]))

            if moment == "before":
                stop()
            elif moment == "told":  # some engines have read of the version, and some have not
                then(sender._board, "_write", False, stop)
            else:
                sender._drop_group()
                then(sender, "_open_group", True, stop)
            sent.append(sender.publish(weights(0), 2 * number + 1))
            stopped[-1].wait()
            sent.append(sender.publish(weights(0), 2 * number + 2))
            faults.report(
                engines=[one.engines for one in sent], left_out=[list(one.left_out) for one in sent],
                reasons=[one.reason for one in sent], longest=max(one.seconds for one in sent[1:]),
            )  # fmt: skip


@pytest.mark.parametrize("moment", ["before", "told", "meets"])
def test_nobody_is_left_out_for_a_store_that_does_not_answer(moment: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    store = listening(address)
    try:
        result = faults.run_ranks(in_silence, 3, args=[f"tcp://{address}", store.pid, moment], timeout=120).check()
    finally:
        store.kill()
        store.wait()
    said, both = result[0].reports, ["engine 1", "engine 2"]
    assert said["left_out"] == [[]] * len(said["left_out"]), result
    assert said["engines"][::2] == [both] * (1 + len(SILENCES)), result  # once the store answers
    assert said["longest"] < TIMEOUT + 3, result
    for engines, reason in zip(said["engines"], said["reasons"], strict=True):
        assert engines == both or (engines == [] and "the store of" in reason), result
    published = [version for version, engines in enumerate(said["engines"]) if engines]
    assert result.values("had") == {1: published, 2: published}, result


def test_what_cannot_be_written_holds_up_nothing_that_is_written_after_it(caplog: pytest.LogCaptureFixture) -> None:
    board = Board(torch.distributed.HashStore(), lambda store: None, lambda store: None)
    tries: list[int] = []
    written = threading.Event()

    def raises(store: AgreementStore) -> None:
        tries.append(1)
        raise ValueError("no JSON")

    board.post(raises)
    board.post(lambda store: written.set())
    assert written.wait(10)
    board.close()
    assert len(tries) == 1 and "cannot be written to the store of the weights" in caplog.text


def looks_often(address: str) -> None:
    """An engine that does not wait for a version, but looks whether there is one between other work."""
    if int(os.environ["RANK"]) == 0:
        with Sender(address, name="often", timeout=20.0) as sender:
            sender.wait_for(1, within=60)
            faults.report(left_out=[list(sender.publish(weights(version), version).left_out) for version in range(2)])
        return
    with Receiver(address, name="often", engine="A") as receiver:
        while receiver.version != 1:
            update = receiver.next(timeout=0.001)
            assert update is None or update.commit()


def test_an_engine_that_only_looks_for_a_version_gets_it_too(store: str) -> None:
    said = faults.run_ranks(looks_often, 2, args=[store], timeout=90).check()[0].reports
    assert said["left_out"] == [[], []], said


def serves_two(address: str) -> None:
    """One process has the ends of two engines."""
    if int(os.environ["RANK"]) == 0:
        with Sender(address, name="two", timeout=20.0) as sender:
            sender.wait_for(2, within=60)
            faults.report(engines=[sender.publish(weights(version), version).engines for version in range(2)])
        return
    had: dict[str, list[Any]] = {}

    def serve(engine: str) -> None:
        with Receiver(address, name="two", engine=engine) as receiver:
            while receiver.version != 1:
                update = receiver.next(timeout=60)
                if update is None:
                    return
                if update.commit():
                    had.setdefault(engine, []).append(receiver.version)

    threads = [threading.Thread(target=serve, args=[engine]) for engine in ("A", "B")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    faults.report(had=had)


def test_one_process_may_have_the_ends_of_two_engines(store: str) -> None:
    result = faults.run_ranks(serves_two, 2, args=[store], timeout=90).check()
    assert result[0].reports["engines"] == [["A", "B"]] * 2, result
    assert result[1].reports["had"] == {"A": [0, 1], "B": [0, 1]}, result


def chooses(address: str) -> None:
    """Version 0 is for engine 2 alone, though both have asked."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        with Sender(address, name="chooses", timeout=20.0) as sender:
            came = sender.wait_for(["engine 2", "engine 1"], within=60)
            faults.report(absent=sender.wait_for(["engine 3"], within=0.2) == came)
            sent = [sender.publish(weights(0), 0, ["engine 2"]), sender.publish(weights(1), 1)]
            faults.report(engines=[one.engines for one in sent], left_out=[list(one.left_out) for one in sent])
        return
    with Receiver(address, name="chooses", engine=f"engine {rank}") as receiver:
        had = []
        while receiver.version != 1:
            update = receiver.next(timeout=60)
            assert update is not None and update.commit()
            had.append(receiver.version)
        faults.report(had=had)


def test_a_version_is_for_the_engines_that_are_named(store: str) -> None:
    result = faults.run_ranks(chooses, 3, args=[store], timeout=90).check()
    said = result[0].reports
    assert said["engines"] == [["engine 2"], ["engine 1", "engine 2"]] and said["left_out"] == [[], []], result
    assert said["absent"] and result.values("had") == {1: [1], 2: [0, 1]}, result


#: A try of a `publish` in the test below: long enough that one without a fault is done in less.
TRY = 5.0


def hangs(address: str) -> None:
    """Engine 2 hangs for good after version 0; engine 3 comes after that, so that a new group is made."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        with Sender(address, name="hangs", timeout=UNHURRIED, bucket_mb=1.0) as sender:
            sender.wait_for(2, within=60)
            sent = [sender.publish(weights(0), 0)]
            sender._timeout = 3 * TRY
            faults.report(first=True)
            sender.wait_for(3, within=60)
            sent += [sender.publish(weights(version), version) for version in (1, 2, 3)]
            faults.report(
                engines=[one.engines for one in sent], left_out=[list(one.left_out) for one in sent],
                seconds=[one.seconds for one in sent],
            )  # fmt: skip
        return
    if rank == 3:
        faults.wait_until_told("come", seconds=60)
    with Receiver(address, name="hangs", engine=f"engine {rank}") as receiver:
        for _ in range(6):
            update = receiver.next(timeout=UNHURRIED)
            if update is None or (update.commit() and update.version == 3):
                break
            if rank == 2 and receiver.version == 0:
                time.sleep(300)


def test_an_engine_that_hangs_for_good_costs_one_try_and_no_version_after_it(store: str) -> None:
    with faults.start_ranks(hangs, 4, args=[store], timeout=90) as job:
        job.wait_for("first", [0], seconds=60)
        job.tell("come")
        job.wait_for("engines", [0], seconds=60)
        os.kill(job.pid(2), signal.SIGKILL)
        result = job.wait()
    said = result[0].reports
    assert said["engines"] == [["engine 1", "engine 2"], *[["engine 1", "engine 3"]] * 3], result
    assert said["left_out"] == [[], ["engine 2"], [], []], result
    assert said["seconds"][1] < 3 * TRY + 2 and max(said["seconds"][2:]) < TRY, result


def comes_back(address: str) -> None:
    """The only engine refuses a version, and is there for the next one."""
    if int(os.environ["RANK"]) == 0:
        with Sender(address, name="back", timeout=UNHURRIED) as sender:
            sender.wait_for(1, within=60)
            first = sender.publish(weights(0), 0)
            again = sender.wait_for(1, within=20)
            second = sender.publish(weights(1), 1)
            faults.report(ok=[bool(first), bool(second)], again=again, joined=second.joined)
        return
    with Receiver(address, name="back", engine="A") as receiver:
        first = receiver.next(timeout=20)
        assert first is not None
        first.refuse("not now")
        assert not first.commit()
        second = receiver.next(timeout=20)
        assert second is not None and second.commit()


def test_the_only_engine_comes_back_after_it_was_left_out(store: str) -> None:
    said = faults.run_ranks(comes_back, 2, args=[store], timeout=60).check()[0].reports
    assert said == {"ok": [False, True], "again": ["A"], "joined": ["A"]}


def test_tensors_at_any_place_of_a_storage_are_sent_and_arrive_where_they_fit() -> None:
    flat = torch.arange(1 << 21, dtype=torch.int16)
    odd = flat[1 : 1 + (1 << 20)]
    state = {"odd": odd, "small": torch.ones(3), "turned": torch.randn(600, 600).t()}
    device = torch.device("cpu")
    digests = Digest(), Digest()
    for header, parts in bucketed(state.items(), 1 << 20, device):
        into = {"odd": flat[3 : 3 + (1 << 20)].clone(), "turned": torch.empty(600, 600)}
        memory = arriving(header, device, into)
        for part, sent in zip(memory.parts, parts, strict=True):
            part.copy_(sent)
        for digest, moved in zip(digests, (parts, memory.parts), strict=True):
            digest.add(header, moved)
        for name, tensor in memory.tensors.items():
            assert torch.equal(tensor, state[name]), name
            assert name == "small" or tensor.data_ptr() == into[name].data_ptr()
    assert digests[0].text() == digests[1].text()


@pytest.mark.parametrize("place", [0, 4096 * 8 * 16 - 1, 4096 * 8 * 35 + 7, 4096 * 8 * 37 - 1, 4096 * 8 * 37 + 4])
def test_a_digest_changes_with_any_byte_and_any_exchange_of_two(place: int) -> None:
    sent = torch.arange(4096 * 8 * 37 + 5, dtype=torch.int64).mul_(7).to(torch.uint8)  # 37 rows and a rest
    other, moved = sent.clone(), sent.clone()
    other[place] ^= 1
    moved[[place, 4096 * 8 * 20 + 9]] = sent[[4096 * 8 * 20 + 9, place]]
    header = Header((Piece("a", tuple(sent.shape), "uint8", sent.numel(), -1),), 0)
    texts = []
    for part in (sent, sent.clone(), other, moved):
        digest = Digest()
        digest.add(header, [part])
        texts.append(digest.text())
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert (texts[0] == texts[3]) == torch.equal(sent, moved)


def wrong() -> None:
    store = torch.distributed.HashStore()
    said = {}
    with Sender(store, timeout=5) as sender:
        for what, tensors in {
            "one shot": iter(()), "empty": {}, "no tensor": {"a": 1.0}, "sparse": {"a": torch.eye(2).to_sparse()},
        }.items():  # fmt: skip
            try:
                sender._asked = {}  # nobody: it is refused all the same where it can be seen
                sender.publish(tensors, 1)  # type: ignore[arg-type]
            except (TypeError, ValueError) as error:
                said[what] = str(error)
        said["nobody"] = str(sender.publish({"a": torch.ones(1)}, 7))
    for what, call in {
        "engine": lambda: Receiver(store, engine="", worker=0), "worker": lambda: Receiver(store, engine="A", worker=2, workers=2),
        "timeout": lambda: Sender(store, timeout=0), "device": lambda: Sender(store, device="tpu"),
    }.items():  # fmt: skip
        try:
            call()
        except ValueError as error:
            said[what] = str(error)
    faults.report(said=said)


def test_wrong_use_is_told_of() -> None:
    said = faults.run_ranks(wrong, 1, timeout=60).check()[0].reports["said"]
    assert "must be a mapping or a function" in said["one shot"]
    assert "tensors has none: give what" in said["empty"]
    assert said["nobody"].startswith("version 7 is on no engine")
    assert "give the engine a name" in said["engine"] and "the numbers 0 to 1" in said["worker"], said
    assert "must be a positive" in said["timeout"] and "correct these" in said["device"], said


def test_a_channel_ends_with_its_process_although_its_store_is_stopped(tmp_path: Path) -> None:
    """Nobody who waits depends on the store, the end of the interpreter included."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "ncclguard", "store", "--listen", address]
    program = (
        "import os, signal, sys, time\n"
        "from ncclguard.weights import Receiver\n"
        f"receiver = Receiver('tcp://{address}', engine='A')\n"
        "print(receiver.next(timeout=1))\n"
        "os.kill(int(sys.argv[1]), signal.SIGSTOP)\n"
        "began = time.monotonic()\n"
        "print(receiver.next(timeout=2), time.monotonic() - began < 4)\n"
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "listening" in process.stdout.readline()
        try:
            ended = subprocess.run(
                [sys.executable, "-c", program, str(process.pid)],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        finally:
            process.kill()
    assert (ended.returncode, ended.stdout.split("\n")[:2]) == (0, ["None", "None True"]), ended
