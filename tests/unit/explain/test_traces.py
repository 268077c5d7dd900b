"""Flight-recorder dumps: the ranks that are behind, idle, different or whose dump is absent; plain data only."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ncclguard.outcome import Cause
from ncclguard_explain import Report, UnusableInput, explain
from ncclguard_explain.recorder import load_plain

Group = tuple[str, str, Sequence[int]]
WORLD: Group = ("0", "default_pg", range(8))


def entry(
    group: Group,
    seq: int,
    op: str = "nccl:all_reduce",
    shape: Sequence[int] = (1024,),
    state: str = "scheduled",
    p2p: bool = False,
    when: int = 1000,
) -> dict[str, Any]:
    """Return one record as torch 2.9 writes it."""
    return {
        "frames": [{"name": "step", "filename": "train.py", "line": 211}],
        "record_id": seq,
        "pg_id": 0,
        "process_group": (group[0], group[1]),
        "collective_seq_id": 0 if p2p else seq,
        "p2p_seq_id": seq if p2p else 0,
        "op_id": seq,
        "profiling_name": op,
        "time_created_ns": when + seq,
        "input_sizes": [list(shape)],
        "input_dtypes": ["Float"],
        "output_sizes": [list(shape)],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1 if state == "completed" else None,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": p2p,
    }


def write(
    folder: Path,
    ranks: Mapping[int, Sequence[dict[str, Any]]],
    groups: Sequence[Group] = (WORLD,),
    form: str = "pickle",
) -> None:
    for rank, entries in ranks.items():
        config = {name: {"name": name, "desc": text, "ranks": str(list(of))} for name, text, of in groups if rank in of}
        data = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries)}
        path = folder / f"comm_lib_trace_rank_{rank}"
        if form == "pickle":
            path.write_bytes(pickle.dumps(data, protocol=2))
        else:
            path.with_suffix(".json").write_text(json.dumps(data))


def named(folder: Path) -> Report:
    return explain([str(folder)])


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_rank_with_nothing_pending_while_peers_wait_is_named(tmp_path: Path, form: str) -> None:
    done = entry(WORLD, 9, state="completed")
    write(tmp_path, {rank: [done] if rank == 5 else [done, entry(WORLD, 10)] for rank in range(8)}, form=form)
    report = named(tmp_path)
    assert report.culprits == (5,)
    assert report.collective is not None and (report.collective.op, report.collective.seq) == ("all_reduce", 10)
    assert report.collective.numel_in == 1024 and report.collective.timeout_ms == 600000
    assert report.stacks[0].frames == ("train.py:211 in step",)


def test_rank_behind_and_minority_ahead_are_named(tmp_path: Path) -> None:
    for seq in (8, 12):
        write(tmp_path, {rank: [entry(WORLD, seq if rank == 3 else 10)] for rank in range(8)})
        assert named(tmp_path).culprits == (3,)


def test_majority_decides_which_shape_is_odd_whichever_rank_comes_first(tmp_path: Path) -> None:
    for odd in (0, 4):
        write(tmp_path, {rank: [entry(WORLD, 10, shape=(1025,) if rank == odd else (262144,))] for rank in range(8)})
        report = named(tmp_path)
        assert (
            report.culprits == (odd,)
            and report.cause is Cause.DIVERGED
            and report.cause_class == "mismatch_shape_or_op"
        )


def test_half_and_half_name_nobody_and_show_both_sides(tmp_path: Path) -> None:
    write(tmp_path, {rank: [entry(WORLD, 10, shape=(1 + rank % 2,))] for rank in range(8)})
    report = named(tmp_path)
    assert report.culprits == () and {side.ranks for side in report.sides} == {(0, 2, 4, 6), (1, 3, 5, 7)}


def test_source_of_a_broadcast_that_went_on_is_no_culprit(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            rank: [entry(WORLD, 10, "nccl:broadcast", state="completed" if rank == 0 else "scheduled")]
            for rank in range(8)
        },
    )
    assert 0 not in named(tmp_path).culprits


def test_single_absent_dump_is_named_when_all_present_members_wait(tmp_path: Path) -> None:
    write(tmp_path, {rank: [entry(WORLD, 10)] for rank in range(8) if rank != 6})
    report = named(tmp_path)
    assert report.culprits == (6,) and report.culprit_confidence == "medium" and report.cause is Cause.UNKNOWN


def test_absent_dumps_of_a_whole_node_name_nobody(tmp_path: Path) -> None:
    write(tmp_path, {rank: [entry(WORLD, 10)] for rank in range(4)})
    report = named(tmp_path)
    assert report.culprits == () and report.world_size == 8


def test_absent_dump_of_a_healthy_rank_is_not_named(tmp_path: Path) -> None:
    """Two pipeline stages of two groups; rank 5 idles. Whichever healthy dump is missing, only rank 5 is named."""
    first, second = ("1", "TP", range(4)), ("2", "TP", range(4, 8))
    everyone: dict[int, list[dict[str, Any]]] = {}
    for rank in range(4):
        everyone[rank] = [entry(WORLD, 3, f"nccl:recv {rank}<-{rank + 4}", p2p=True, when=0), entry(first, 20)]
    for rank in (4, 6, 7):
        everyone[rank] = [entry(second, 30)]
    everyone[5] = []
    for missing in [(), *((rank,) for rank in everyone), *itertools.combinations((0, 1, 4), 2)]:
        folder = tmp_path / str(missing)
        folder.mkdir()
        write(
            folder,
            {rank: rows for rank, rows in everyone.items() if rank not in missing},
            groups=(WORLD, first, second),
        )
        assert named(folder).culprits == (5,), missing


def test_gloo_dump_of_torch_2_13_with_an_empty_group_name(tmp_path: Path) -> None:
    for rank in range(3):
        entries = [entry(("0", "", range(3)), 4, "gloo:all_reduce")] if rank != 2 else []
        data = {
            "version": "2.10",
            "pg_config": {"": {"name": "", "desc": "", "ranks": "[0, 1, 2]"}},
            "pg_status": {"0": {"last_enqueued_collective": "4"}},
            "entries": entries,
        }
        (tmp_path / f"comm_lib_trace_rank_{rank}").write_bytes(pickle.dumps(data, protocol=2))
    assert named(tmp_path).culprits == (2,)


def test_gloo_records_that_are_retired_without_a_state_count_by_what_peers_recorded(tmp_path: Path) -> None:
    """gloo retires both completed and timed-out operations: #4 is in every dump, #5 not in rank 2's, so #5 cannot be
    complete.
    """
    group = ("0", "default_pg", range(3))
    for late in (None, 2):
        for rank in range(3):
            entries = [entry(group, seq, "gloo:all_reduce") for seq in ((4,) if rank == late else (4, 5))]
            for one in entries:
                one["retired"] = True
            data = {
                "version": "2.10",
                "pg_config": {"": {"name": "", "desc": "", "ranks": "[0, 1, 2]"}},
                "entries": entries,
            }
            (tmp_path / f"comm_lib_trace_rank_{rank}").write_bytes(pickle.dumps(data, protocol=2))
        assert named(tmp_path).culprits == (() if late is None else (2,))


def test_exception_in_a_log_says_why_the_dumps_culprit_is_absent(tmp_path: Path) -> None:
    write(tmp_path, {rank: [entry(WORLD, 10)] if rank != 5 else [] for rank in range(8)})
    (tmp_path / "train.log").write_text(
        '[rank5]: Traceback (most recent call last):\n[rank5]:   File "a.py", line 3, in f\n[rank5]: ValueError: bad\n'
    )
    report = named(tmp_path)
    assert report.culprits == (5,) and report.cause is Cause.FAILED


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_dump_that_asks_for_a_function_is_refused(capsys: pytest.CaptureFixture[str], protocol: int) -> None:
    for value in (Evil(), {"entries": [Evil()]}, print, Path("x"), complex(1, 2)):
        with pytest.raises(UnusableInput, match="refused"):
            load_plain(pickle.dumps(value, protocol=protocol))
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "value",
    [
        [],
        7,
        {"entries": 3, "pg_config": [1]},
        {"entries": [{"state": 5}, 3]},
        {"entries": [{"input_sizes": [["x"]], "process_group": 3}]},
    ],
)
def test_dump_of_a_strange_shape_never_crashes(tmp_path: Path, value: object) -> None:
    (tmp_path / "trace_rank_0").write_bytes(pickle.dumps(value, protocol=2))
    (tmp_path / "trace_rank_1").write_bytes(pickle.dumps(value, protocol=2))
    assert named(tmp_path).culprits == ()


NCCL2 = "nccl2:all_reduce"


def test_second_backend_what_a_peer_completed_is_not_pending(tmp_path: Path) -> None:
    """Dumps of different moments: rank 0's is older and still has #9 pending; nobody may be convicted for that."""
    late = [entry(WORLD, 9, NCCL2, state="completed"), entry(WORLD, 10, NCCL2)]
    write(
        tmp_path, {rank: [entry(WORLD, 9, NCCL2), entry(WORLD, 10, NCCL2)] if rank == 0 else late for rank in range(8)}
    )
    assert named(tmp_path).culprits == ()


def test_second_backend_rank_that_never_recorded_the_call_is_named(tmp_path: Path) -> None:
    done = entry(WORLD, 9, NCCL2, state="completed")
    write(tmp_path, {rank: [done] if rank == 5 else [done, entry(WORLD, 10, NCCL2)] for rank in range(8)})
    assert named(tmp_path).culprits == (5,)


def test_rank_that_came_after_most_of_the_limit_is_late(tmp_path: Path) -> None:
    """All are in it when they dump; the time from the call before says who came last, without comparing clocks."""
    for rank in range(4):
        rows = [entry(WORLD, 9, state="completed", when=rank * 10**12), entry(WORLD, 10, when=rank * 10**12)]
        if rank == 2:
            rows[1]["time_created_ns"] += 601 * 10**9
        write(tmp_path, {rank: rows}, groups=[("0", "default_pg", range(4))])
    report = named(tmp_path)
    assert report.culprits == (2,) and report.cause is Cause.LATE


def test_absent_dump_is_a_suspect_beside_the_rank_that_the_others_convict(tmp_path: Path) -> None:
    write(tmp_path, {rank: [] if rank == 5 else [entry(WORLD, 10)] for rank in range(8) if rank != 3})
    report = named(tmp_path)
    assert report.culprits == (5,) and report.suspects == (3,) and "rank 3" in " ".join(report.overturned_by)


def test_absent_dump_in_a_group_of_its_own_is_a_second_culprit(tmp_path: Path) -> None:
    """Two tensor-parallel groups, a fault in each: rank 5 idles, and of rank 2 there is no dump."""
    first, second = ("1", "TP", range(4)), ("2", "TP", range(4, 8))
    rows = (
        {rank: [entry(first, 20)] for rank in (0, 1, 3)} | {rank: [entry(second, 30)] for rank in (4, 6, 7)} | {5: []}
    )
    write(tmp_path, rows, groups=(WORLD, first, second))
    assert named(tmp_path).culprits == (2, 5)


def test_dtypes_are_compared(tmp_path: Path) -> None:
    rows = {rank: [entry(WORLD, 10)] for rank in range(8)}
    rows[4][0]["input_dtypes"] = ["Double"]
    write(tmp_path, rows)
    assert named(tmp_path).culprits == (4,)
