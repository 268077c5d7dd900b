"""Whose connection broke: from the transport's words to one line that all ranks read."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import HashStore

from ncclguard._sockets import Connection
from ncclguard.agreement import incidents
from ncclguard.agreement.decision import Operation, Phase, Report, Trouble, TroubleKind, decide
from ncclguard.agreement.seat import Seat
from ncclguard.incident.model import Incident
from ncclguard.outcome import Cause
from ncclguard.transport.gloo_builder import GlooBuilder

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
    return Incident.from_json(incidents.summarise(verdict, reports, {}, {}, Seat("0:cpu", 0, tuple(ends))))


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


def test_the_peer_is_told_by_its_port_or_because_no_other_can_be_meant() -> None:
    """Ranks 1 and 2 share a host with this one, 3 has its own. This rank has connected to 1; 2 and 3 have connected to this one."""
    communicator = GlooBuilder().build(HashStore(), "one", (0,), 0, 1, 30.0, 5.0)
    here, there = "10.0.0.1", "10.0.0.3"
    communicator._listening = {(here, 4001): 1, (here, 4002): 2, (there, 4003): 3}
    ends = ((here, 4001), (here, 50_002), (there, 50_003))
    communicator._connections = tuple(Connection(0, 0, (here, 6000), end) for end in ends)

    def peer(host: str, port: int) -> int | None:
        error = communicator.broken(RuntimeError(f"Read error [{host}]:{socket.htons(port)}: Connection reset by peer"))
        assert error.address == (host, port)
        return error.peer

    assert [peer(*end) for end in ends] == [1, 2, 3]
    communicator._listening[here, 4004] = 4  # has connected to this rank as well, so 50002 may be either's
    assert [peer(*end) for end in ends] == [1, None, 3]
    communicator.close()
