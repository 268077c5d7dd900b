"""The rehearsal's own judgement: it passes only when every live rank saw what the guard promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ncclguard.bench.arguments import BenchError, parse_arguments
from ncclguard.bench.rehearsal import EXPECTED, Record, check_fault, judge_records


def record(rank: int, **changes: Any) -> Record:
    """What a rank saw when rank 2 was late and all went well."""
    good = Record(
        rank=rank,
        ok=False,
        agreed=True,
        cause="late",
        culprits=(2,),
        op_id="0/5",
        attempts=1,
        seconds=5.2,
        tensor_right=True,
        next_ok=True,
        next_right=True,
        participants=(0, 1, 2),
    )
    return replace(good, **changes)


def test_one_verdict_on_all_live_ranks_passes() -> None:
    """Late with three ranks; a reset that was recovered from."""
    assert judge_records([record(rank) for rank in range(3)], "late", 2, 3) is None
    recovered = [record(rank, ok=True, cause=None, culprits=(), attempts=2) for rank in range(3)]
    assert judge_records(recovered, "reset", 2, 3) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"op_id": "0/6"}, "disagree"),
        ({"culprits": (1,)}, "disagree"),
        ({"ok": True, "cause": None, "culprits": ()}, "disagree"),
        ({"agreed": False}, "not agreed"),
        ({"tensor_right": False}, "tensor"),
        ({"next_ok": False}, "next call"),
        ({"next_right": False}, "next call"),
    ],
)
def test_one_odd_rank_fails_it(changes: dict[str, Any], says: str) -> None:
    """Whatever differs on one rank is the complaint."""
    complaint = judge_records([record(0), record(1, **changes), record(2)], "late", 2, 3)
    assert complaint is not None
    assert says in complaint


@pytest.mark.parametrize(
    ("fault", "changes", "says"),
    [
        ("late", {"cause": "unknown"}, "expected late, rank 2"),
        ("late", {"culprits": (0, 2)}, "expected late, rank 2"),
        ("late", {"ok": True, "cause": None}, "expected late, rank 2"),
        ("reset", {}, "did not recover"),
        ("reset", {"ok": True, "cause": None, "culprits": ()}, "larger --numel"),
    ],
)
def test_an_agreed_verdict_that_is_wrong_fails_it(fault: str, changes: dict[str, Any], says: str) -> None:
    """Agreement alone is not enough: the cause and the culprit have to be those that were injected."""
    complaint = judge_records([record(rank, **changes) for rank in range(3)], fault, 2, 3)
    assert complaint is not None
    assert says in complaint


def test_a_rank_that_tells_nothing_fails_it() -> None:
    """Two of three."""
    complaint = judge_records([record(0), record(1)], "late", 2, 3)
    assert complaint is not None
    assert "only 2 of 3" in complaint


def test_every_fault_has_an_expectation() -> None:
    """Each choice of --fault is judged."""
    for fault in EXPECTED:
        check_fault(parse_arguments(["--fault", fault]), 4, None)


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_launcher_that_ends_everything_is_no_place_to_kill(launcher: str) -> None:
    """torchrun and srun end the job with the first death, so nothing could be shown."""
    settings = parse_arguments(["--fault", "kill"])
    with pytest.raises(BenchError, match="run python -m ncclguard.bench"):
        check_fault(settings, 4, launcher)
    check_fault(settings, 4, None)
    check_fault(parse_arguments(["--fault", "late"]), 4, launcher)
