"""What ranks say of themselves stays small in a job of thousands, and whole in a small one."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from torch.distributed import HashStore

from ncclguard.coordination import incidents
from ncclguard.coordination.group_state import GroupState
from ncclguard.coordination.store import LONG, AgreementStore
from ncclguard.engine.description import report_bytes, shortened
from ncclguard.incident import model
from ncclguard.incident.model import Incident, RankReport
from ncclguard.outcome import Cause
from ncclguard.protocol import codec
from ncclguard.protocol.decision import Operation, Phase, Report, Trouble, TroubleKind

OPERATION = Operation(sequence=7, fingerprint=1, text="barrier()")


def text(draw: random.Random, length: int) -> str:
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz/._:=() ", k=length))


def maximal(draw: random.Random, lines: list[str]) -> dict[str, object]:
    """Details as large as they get: 64 frames of the main thread, 16 more threads of 16, 20 operations."""
    return {
        "host": text(draw, 60),
        "pid": draw.randrange(4_000_000),
        "stack": draw.sample(lines, 64),
        "threads": [[text(draw, 20), draw.sample(lines, 16)] for _ in range(16)],
        "history": {
            "groups": ["0"],
            "texts": draw.sample(lines, 20),
            "rows": [[0, n, n, 1.0, 0.5, 1] for n in range(20)],
        },
        "last": draw.choice(lines),
        "call_site": "",
        "dead_threads": text(draw, 400),
    }


@pytest.mark.parametrize("size", [8, 1000, 4000, 20_000])
def test_a_report_fits_its_share_and_keeps_the_innermost_frames(size: int) -> None:
    draw = random.Random(size)
    details = maximal(draw, [text(draw, 200) for _ in range(100)])
    kept = shortened(details, size)
    assert len(json.dumps(kept)) <= report_bytes(size) + 400  # keys, commas
    assert kept["stack"][-1] == details["stack"][-1]  # type: ignore[index]
    assert (kept == details) == (size == 8)


@pytest.mark.parametrize("kind", ["late", "raised"])
def test_the_verdict_on_4000_culprits_is_far_below_what_a_store_takes(kind: str) -> None:
    """Each with another stack, thread list and exception, all as long as they can be."""
    size, draw = 4000, random.Random(1)
    lines = [text(draw, 200) for _ in range(5000)]
    group = GroupState("0:cpu", 0, tuple(range(size)))
    reports = {
        rank: Report(rank, 0, 6, details=shortened(maximal(draw, lines), size), trouble=Trouble(TroubleKind.RAISED, text(draw, 1000)))
        for rank in range(1, size)
    }  # fmt: skip
    if kind == "late":
        reports = {rank: replace(report, trouble=None) for rank, report in reports.items()}
    waits = Trouble(TroubleKind.DEADLINE, "not complete")
    reports[0] = Report(0, 0, 6, OPERATION, Phase.RUNNING, age=300.0, budget=0.0, trouble=waits)
    verdict = group.judge(0, tuple(range(size)), reports, {}, {}, 0, incidents.summarise)
    assert len(verdict.culprits) == size - 1
    written = codec.dumps(verdict)
    assert len(written) < 600_000
    store = HashStore()
    AgreementStore(store, "here").first("verdict", written)
    assert len(store.get("here/verdict")) < 200_000
    assert codec.loads_verdict(AgreementStore(store, "here").read("verdict") or "") == verdict
    assert len(incidents.histories(reports, {}, verdict.culprit_ranks)) < 3 << 20
    incident = Incident.from_json(verdict.incident)
    assert [report.rank for report in incident.ranks] == list(range(size))
    assert all(report.cause for report in incident.ranks[1:])
    assert sum(bool(report.stack) for report in incident.ranks) > 8
    assert len(incident.summary) < 1000
    assert str(incident).count("main thread, innermost last") == 8


def test_a_mismatch_with_4000_sides_shows_the_largest() -> None:
    size = 4000
    group = GroupState("0:cpu", 0, tuple(range(size)))
    called = {rank: Operation(7, min(rank, 3990), f"all_gather({min(rank, 3990)})") for rank in range(size)}
    reports = {rank: Report(rank, 0, 6, operation, Phase.RUNNING) for rank, operation in called.items()}
    verdict = group.judge(0, tuple(range(size)), reports, {}, {}, 0, incidents.summarise)
    assert verdict.sides[0] == ("all_gather(3990)", tuple(range(3990, 4000)))
    assert len(verdict.sides) == len(Incident.from_json(verdict.incident).sides) == model.PLACES


def test_nothing_is_left_out_of_a_small_job() -> None:
    stack = tuple(f"train.py:{line} in step" for line in range(64))
    threads = tuple((f"loader-{n}", stack[:16]) for n in range(16))
    reports = [
        RankReport(rank=rank, host="gpu-1", pid=7, cause=Cause.LATE, state="none", stack=stack, threads=threads)
        for rank in range(8)
    ]
    assert model.bounded(reports, range(8)) == tuple(reports)


def test_many_culprits_at_one_place_have_one_stack() -> None:
    reports = [
        RankReport(rank=rank, cause=Cause.LATE, state="none", stack=("a.py:1 in f", "odd" if rank == 70 else "same"))
        for rank in range(1, 100)
    ]
    kept = {report.rank: report for report in model.bounded(reports, range(1, 100))}
    assert [rank for rank, report in kept.items() if report.stack] == [1, 70]
    assert kept[99].note == "its stack is that of rank 1"
    incident = Incident(
        id="1", op="barrier", op_id="0/7", group="0", generation=0, cause=Cause.LATE, culprits=tuple(range(1, 100)),
        deadline_expired=True, agreed=True, attempts=1, participants=tuple(range(100)), ranks=tuple(kept.values()),
        summary="it failed", advice="look",
    )  # fmt: skip
    shown = str(incident)
    assert "      odd" in shown and "      same" in shown
    assert "  and ranks 8-69, 71-99, each at the same place as a rank above: see to_json()" in shown
    assert "the rank sent none" not in shown


def test_a_long_value_is_compressed_in_the_store_and_read_as_it_was() -> None:
    store = HashStore()
    agreement = AgreementStore(store, "here")
    for key, value in {"long": "x" * LONG, "short": "x", "odd": "zlib:"}.items():
        assert agreement.first(key, value) == value
        assert agreement.first(key, "other") == value
        assert agreement.read(key) == value
        assert agreement.read_many([key]) == {key: value}
    assert len(store.get("here/long")) < 100


@given(st.lists(st.integers(0, 5000), max_size=20))
def test_ranks_come_back_in_their_order(ranks: list[int]) -> None:
    assert codec.ranks_of(codec.ranges(ranks)) == tuple(ranks)


def test_all_ranks_but_one_take_a_few_characters() -> None:
    assert codec.ranges(rank for rank in range(4000) if rank != 7) == "0-6,8-3999"
