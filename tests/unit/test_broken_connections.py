"""Whose connection broke: from the transport's words to one line that all ranks read."""

from __future__ import annotations

import pytest

from ncclguard.coordination import incidents
from ncclguard.coordination.group_state import GroupState
from ncclguard.incident.model import Incident
from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Operation, Phase, Report, Trouble, TroubleKind, decide

TEXT = "all_reduce(float32[1000], SUM)"
BOTH = (
    "(rank 2 (node2) and rank 3 (node3) lost the connection between them, "
    "rank 0 (node0) lost its connection with rank 2 (node2); Connection"
)


def failed(ends: dict[int, tuple[int, str] | None]) -> Incident:
    """The incident where each rank reports the end (rank, host) of its broken connection, or none."""

    def report(rank: int, end: tuple[int, str] | None) -> Report:
        trouble = None if end is None else Trouble(TroubleKind.TRANSPORT, "Connection reset by peer", *end)
        operation = Operation(1, 7, TEXT, max_attempts=1)
        return Report(rank, 0, 0, operation, Phase.RUNNING, trouble=trouble, details={"host": f"node{rank}"})

    reports = {rank: report(rank, end) for rank, end in ends.items()}
    verdict = decide(0, tuple(ends), reports, {}, {})
    assert (verdict.cause, verdict.culprits) == (Cause.NETWORK, ())
    return Incident.from_json(incidents.summarise(verdict, reports, {}, {}, GroupState("0:cpu", 0, tuple(ends))))


@pytest.mark.parametrize(
    ("ends", "line"),
    [
        (
            {0: (2, ""), 1: None, 2: (3, ""), 3: (2, "")},
            BOTH,
        ),
        ({0: (-1, "10.0.0.7"), 1: None}, "(rank 0 (node0) lost its connection with a rank at 10.0.0.7; Connection"),
        ({0: (5, ""), 1: None}, "(rank 0 (node0) lost its connection with rank 5; Connection"),
        ({0: (-1, ""), 1: None}, "network (Connection reset by peer)"),
        (
            {rank: (0, "") for rank in range(1, 7)},
            "rank 4 (node4) lost its connection with rank 0, 2 further: see to_json()",
        ),
    ],
)
def test_the_summary_says_what_each_side_lost(ends: dict[int, tuple[int, str] | None], line: str) -> None:
    incident = failed(ends)
    assert line in incident.summary
    assert {report.rank: report.peer for report in incident.ranks} == {
        rank: end[0] if end is not None and end[0] >= 0 else None for rank, end in ends.items()
    }


def test_ranks_that_have_chosen_one_gpu_are_told_so() -> None:
    text = "the communicator could not be built: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
    trouble = Trouble(TroubleKind.TRANSPORT, text)
    operation = Operation(1, 7, TEXT, max_attempts=1)
    reports = {rank: Report(rank, 0, 0, operation, Phase.RUNNING, trouble=trouble) for rank in (0, 1)}
    verdict = decide(0, (0, 1), reports, {}, {})
    incident = Incident.from_json(incidents.summarise(verdict, reports, {}, {}, GroupState("0:cuda", 0, (0, 1))))
    assert 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))' in incident.advice
