"""Every format of torch 2.0 to 2.13 and of the launchers around it is read, figure by figure."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from explain_logs import timeout

from ncclguard_explain import Report
from ncclguard_explain.facts import Fact, Kind
from ncclguard_explain.patterns import ROWS, Row, _rows_of, group_of, parse_text, warning_class
from ncclguard_explain.records import GENERAL, NEEDLES, STARTING, pieces, split_prefix

Explain = Callable[..., Report]


def facts_of(line: str) -> list[Fact]:
    """What one line says, as a log of it alone would be read."""
    prefix = split_prefix(line)
    found = []
    for piece in pieces(prefix.text):
        own = split_prefix(piece)
        known = own if own.rank is not None else prefix
        make = Fact(Kind.NOTE, "train.log", 1, piece, rank=known.rank, rank_basis=known.basis, node=prefix.node)
        found += parse_text(piece, make)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind.value}: {row.source[:40]}")
def test_row_of_the_table(row: Row) -> None:
    """Each example is read as the row says, is found by the search that precedes the reading, and no counterexample is."""
    assert row.yes
    # A space stands for any number of them: repeated, Python before 3.11 refuses the pattern.
    assert not re.search(r" [+*{]", row.regex), row.regex
    for line, values in row.yes:
        assert any(needle in line.encode() for needle in (*GENERAL, *NEEDLES, *STARTING)), line
        found = [fact for fact in facts_of(line) if fact.kind is row.kind]
        assert any(all(getattr(fact, name) == value for name, value in values.items()) for fact in found), line
    for line in row.no:
        assert not any(fact.kind is row.kind for fact in facts_of(line)), line


def test_no_row_is_passed_over_whose_words_and_pattern_fit_a_line() -> None:
    lines = [line for row in ROWS for line in (*(line for line, _ in row.yes), *row.no)]
    for line in dict.fromkeys([*lines, *(line.replace(" ", "") for line in lines)]):
        tried = _rows_of(line)
        assert tried == [row for row in ROWS if row in tried]
        for row in ROWS:
            if any(needle in line for needle in row.needles) and row.pattern.search(line):
                assert row in tried, (line, row.regex)


@pytest.mark.parametrize(
    ("text", "seq", "op", "sizes", "shape", "ran"),
    [
        (
            "WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802246 milliseconds",
            None,
            "ALLREDUCE",
            (None, None),
            None,
            1802246,
        ),
        (
            "WorkNCCL(SeqNum=143, OpType=BROADCAST, TensorShape=[1], Timeout(ms)=3600000) ran for 3600089 milliseconds",
            143,
            "BROADCAST",
            (None, None),
            (1,),
            3600089,
        ),
        (
            "WorkNCCL(SeqNum=7, OpType=_ALLGATHER_BASE, NumelIn=2, NumelOut=16, Timeout(ms)=600000)",
            7,
            "_ALLGATHER_BASE",
            (2, 16),
            None,
            None,
        ),
        (
            "WorkHCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=3121908768, NumelOut=1, Timeout(ms)=600000)",
            7,
            "ALLREDUCE",
            (3121908768, 1),
            None,
            None,
        ),
    ],
)
def test_work_of_every_version(
    text: str,
    seq: int | None,
    op: str,
    sizes: tuple[int | None, int | None],
    shape: tuple[int, ...] | None,
    ran: int | None,
) -> None:
    make = Fact(Kind.NOTE, "train.log", 1, "")
    work = next(parse_text(f"[Rank 1] Watchdog caught collective operation timeout: {text}", make)).work
    assert work is not None
    assert (work.seq, work.op, (work.numel_in, work.numel_out), work.shape, work.ran_ms) == (seq, op, sizes, shape, ran)


@pytest.mark.parametrize(
    ("text", "key", "description", "rank"),
    [
        ("[PG ID 0 PG GUID 0(default_pg) Rank 3]  failure", "0", "default_pg", 3),
        ("[PG ID 2 PG GUID 9 Rank 1] x", "9", None, 1),
        ("[PG ID 12 PG GUID 99(EXPERT_MODEL_PARALLEL_GROUP) Rank 4] x", "99", "EXPERT_MODEL_PARALLEL_GROUP", 4),
        ("[PG 0 (default_pg) Rank 1] x", "0", "default_pg", 1),
        ("[PG 1 Rank 0] x", "1", None, 0),
    ],
)
def test_group_of_every_version(text: str, key: str, description: str | None, rank: int) -> None:
    group, inner = group_of(text)
    assert group is not None and (group.key, group.description, inner) == (key, description, rank)


@pytest.mark.parametrize(
    ("line", "enqueued", "started", "completed"),
    [
        (("[PG 1 Rank 0] Timeout at NCCL work: 100, last enqueued NCCL work: 103, last completed NCCL work: "
            "99."), 103, None, 99),
        (("[PG 1 Rank 0] Exception (either an error or timeout) detected by watchdog at work: 100, last enqueued "
            "NCCL work: 103, last completed NCCL work: 99."), 103, None, 99),
        (("[PG ID 0 PG GUID 0(default_pg) Rank 0]  failure detected by watchdog at work sequence id: 100 PG "
            "status: last enqueued work: 103, last completed work: 99"), 103, None, 99),
        (("[PG ID 0 PG GUID 0(default_pg) Rank 0]  failure detected by watchdog at work sequence id: 100 PG "
            "status: last enqueued work: 103, last started work: 100 (ALLREDUCE), last completed work: 99"),
            103, 100, 99),
    ],
)  # fmt: skip
def test_status_line_of_every_version(
    explain_lines: Explain, line: str, enqueued: int, started: int | None, completed: int
) -> None:
    report = explain_lines([*timeout(0, version=2.03), f"[rank0]:[E ProcessGroupNCCL.cpp:1] {line}"])
    row = next(row for row in report.ranks if row.rank == 0)
    assert (row.seq, row.enqueued, row.started, row.completed) == (100, enqueued, started, completed)


def test_garbage_in_last_completed_is_dropped_from_the_table(explain_lines: Explain) -> None:
    line = (
        "[rank0]:[E x.cpp:1] [PG 0 Rank 0] Timeout at NCCL work: 100, last enqueued NCCL work: 100, last "
        "completed NCCL work: 910344404."
    )
    assert next(row for row in explain_lines([line]).ranks if row.rank == 0).completed is None


WORK = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=9, "
    "NumelOut=9, Timeout(ms)=600000) ran for 600001 milliseconds before timing out."
)


@pytest.mark.parametrize(
    "head",
    [
        "[rank3]:[E ProcessGroupNCCL.cpp:563] ",
        "[rank3]:[E801 14:37:42.731552721 ProcessGroupNCCL.cpp:607] ",
        "[rank3]:[E801 14:37:42.731552721kProcessGroupNCCL.cpp:607] ",
        "3: [rank3]:[E617 14:37:42.731552721 ProcessGroupNCCL.cpp:607] ",
        " 3: [rank3]:[E617 14:37:42.7 ProcessGroupNCCL.cpp:607] ",
        "1: [rank3]:[E617 14:37:42.7 ProcessGroupNCCL.cpp:607] ",  # one srun task a node
        "[1,3]<stdout>:[E ProcessGroupNCCL.cpp:475] ",
        "[1,3]<stderr>:[rank3]:[E801 14:37:42.7 ProcessGroupNCCL.cpp:607] ",
        "[host:3]: [rank3]:[E801 14:37:42.7 ProcessGroupNCCL.cpp:607] ",
        "[default3]:[rank3]:[E801 14:37:42.7 ProcessGroupNCCL.cpp:607] ",
        "\x1b[36m(RayWorkerWrapper pid=4009)\x1b[0m [rank3]:[E801 14:37:42.7 ProcessGroupNCCL.cpp:607] ",
        "(ActorModelRayActor pid=744, ip=10.1.59.27) [rank3]:[E416 14:37:42.7 ProcessGroupNCCL.cpp:607] ",
        " 24%|##4       | 24/100 [00:10<00:30,  1.0it/s][rank3]:[E801 14:37:42.7 ProcessGroupNCCL.cpp:607] ",
        (
            " 23%|##3 | 23/100 [00:10<00:30]\r 24%|##4 | 24/100 [00:10<00:30][rank3]:[E801 14:37:42.7 "
            "ProcessGroupNCCL.cpp:607] "
        ),
        "2026-05-01T10:00:00.000000Z stderr F [rank3]:[E801 14:37:42.7 ProcessGroupNCCL.cpp:607] ",
        "[E ProcessGroupNCCL.cpp:475] ",
        "E0709 17:05:38.123456 4100 ProcessGroupNCCL.cpp:475] ",
    ],
)
def test_prefix_of_every_launcher_gives_the_rank(explain_lines: Explain, head: str) -> None:
    report = explain_lines([head + WORK])
    rows = [
        (row.rank, row.seq, row.numel_in, row.timeout_ms, row.ran_ms) for row in report.ranks if row.seq is not None
    ]
    assert rows == [(3, 5, 9, 600000, 600001)]


def test_prefix_is_the_global_rank_and_the_text_the_rank_in_the_group(explain_lines: Explain) -> None:
    line = "[rank8]:[E801 14:37:42.7 ProcessGroupNCCL.cpp:607] [PG ID 11 PG GUID 117 Rank 0] " + WORK.replace(
        "[Rank 3]", "[Rank 0]"
    )
    report = explain_lines([line, "  what():  [PG ID 11 PG GUID 117 Rank 0] " + WORK.replace("[Rank 3]", "[Rank 0]")])
    assert [row.rank for row in report.ranks if row.seq is not None] == [8]
    assert report.events[0].group_rank == 0 and report.events[0].group == "117"


def test_folded_ray_line_keeps_its_count() -> None:
    assert split_prefix("(Actor pid=1) [rank9]:[E1 10:00:00.5 x.cpp:1] text [repeated 6x across cluster]").hidden == 6


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129", "ib"),
        (
            (
                "NET/IB : Got completion from peer 10.0.0.2<4791> with status=12 opcode=129 len=65536 vendor err "
                "129 (Recv) localGid ::ffff:a remoteGids::ffff:b"
            ),
            "ib",
        ),
        (
            (
                "NET/IB: Got completion from peer 10.0.0.2<4791> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=X(0) "
                "vendor_err=129 hca mlx5_0"
            ),
            "ib",
        ),
        ("NET/IB : mlx5_0:1 async fatal event on QP (0x1): local work queue catastrophic error", "ib_async"),
        ("Call to connect timeout : Connection refused", "connect"),
        ("socketStartConnect: Connect to 10.0.0.1<4000> failed : No route to host", "connect"),
        (
            (
                "ncclSocketConnect: connect to 10.0.0.1<1> returned Connection refused, exceeded error retry count "
                "after 35 attempts"
            ),
            "connect",
        ),
        ("socketProgress: Connection closed by remote peer h<4000>", "closed"),
        ("Net : Connection closed by remote peer", "closed"),
        ("Bootstrap : no socket interface found", "no_interface"),
        ("Error while creating shared memory segment /dev/shm/nccl-XXXX (size 7340384)", "shm"),
        (
            "NET/IB : collective mismatch error local size 32768 remote 1048576 addr 0 rkey 3beac3 seq adf/adf",
            "size_mismatch",
        ),
        ("NET/Socket : peer 10.0.0.1<1> message truncated : receiving 8 bytes instead of 4", "size_mismatch"),
        ("Cuda failure 'out of memory'", "oom"),
        ("Cuda failure 710 'device-side assert triggered'", "cuda"),
        ("Mismatched NCCL version detected : rank 3", "version"),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 17000", "duplicate_gpu"),
    ],
)
def test_nccl_warning_of_every_wording(text: str, family: str) -> None:
    assert warning_class(text) == family


@pytest.mark.parametrize(
    ("lines", "cause_class"),
    [
        ([("node1:1:2 [0] transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len "
            "0, vendor err 129")], "network_fabric"),
        ([("node1:1:2 [2] include/socket.h:361 NCCL WARN Call to connect timeout : Connection "
            "refused")], "network_interface"),
        ([("[rank0]: torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.hpp:268, unhandled system "
            "error, NCCL version 2.21.5"), ("Error while creating shared memory segment /dev/shm/nccl-XXXX (size "
                "7340384), NCCL error")], "shared_memory"),
        (["[ 5321.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=4100, GPU has fallen off the bus."], "gpu_hardware"),
        (["[ 5321.1] NVRM: Xid (PCI:0000:3b:00): 31, pid=4100, name=python"], "oom_or_crash_other_rank"),
        (["[ 99.1] Out of memory: Killed process 4100 (python) total-vm:99kB"], "oom_or_crash_other_rank"),
        ([("[rank2]: torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 3/4 "
            "clients joined.")], "store_rendezvous"),
        ([("[rank1]: torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while "
            "trying to connect to (10.0.0.1, 29500).")], "store_rendezvous"),
        (["Invalidate trace cache @ step 3: expected module 2, but got module 1"], "rank_divergence"),
        ([("[rank1]:[E801 1] Process group watchdog thread terminated with exception: CUDA error: an illegal "
            "memory access was encountered")], "oom_or_crash_other_rank"),
    ],
)  # fmt: skip
def test_class_of_lines_that_speak_for_themselves(explain_lines: Explain, lines: list[str], cause_class: str) -> None:
    report = explain_lines(lines, world_size=4)
    assert report.incident and report.cause_class == cause_class


def test_flushes_after_an_ib_error_are_consequences(explain_lines: Explain) -> None:
    head = (
        "n:1:2 [0] transport/net_ib.cc:1 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4791> with "
        "status={s} opcode=1 len=0 vendor err {v}"
    )
    report = explain_lines([head.format(s=12, v=129), head.format(s=5, v=249), head.format(s=5, v=244)])
    assert [one.text[-3:] for one in report.evidence] == ["129"]
    assert sum(one.count for one in report.consequences) == 2


def test_exception_that_torch_prints_for_a_peer_is_not_followed_into_other_ranks_lines(explain_lines: Explain) -> None:
    """Interleaved tracebacks: each is read along its own rank's lines."""
    lines = [
        "[rank0]: Traceback (most recent call last):",
        "[rank1]: Traceback (most recent call last):",
        '[rank0]:   File "a.py", line 1, in f',
        '[rank1]:   File "b.py", line 2, in g',
        "[rank1]: KeyError: 'y'",
        "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4527.",
    ]
    report = explain_lines(lines, world_size=4)
    assert report.culprits == (1,)
    assert any(event.name == "KeyError" and event.frames == ("b.py:2 in g",) for event in report.events)
