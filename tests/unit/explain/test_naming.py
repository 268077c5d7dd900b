"""Who is named, and above all who is not: a healthy rank named is worse than none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from explain_logs import pg, prefix, status, timeout

from ncclguard.outcome import Cause
from ncclguard_explain import Report, explain
from ncclguard_explain.render import render_html

Explain = Callable[..., Report]


def waiting(*ranks: int, **options: object) -> list[str]:
    return [line for rank in ranks for line in timeout(rank, **options)]  # type: ignore[arg-type]


def fingerprint(op: str, shape: str, seq: int = 12, dtype: str = "Float") -> str:
    return (
        f"CollectiveFingerPrint(SequenceNumber={seq}, OpType={op}, TensorShape=[{shape}], TensorDtypes={dtype}, "
        "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, memory_format=(nullopt)))"
    )


def mismatch(rank: int, own: str, other: int, theirs: str) -> str:
    return (
        f"[rank{rank}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} is running "
        f"collective: {own}, "
        f"but Rank {other} is running collective: {theirs}.Collectives differ in the following aspects: \t "
        f"Tensor Tensor shapes: 4vs 5"
    )


def test_silent_rank_of_a_merged_log_is_named(explain_lines: Explain) -> None:
    report = explain_lines(waiting(0, 1, 3, 4, 5, 6, 7))
    assert report.culprits == (2,)
    assert report.collective is not None and (report.collective.seq, report.collective.op) == (100, "ALLREDUCE")
    assert report.effective_timeout_ms == 600000


def test_timeout_printed_three_times_is_one_row_per_rank(explain_lines: Explain) -> None:
    report = explain_lines(waiting(0, 1, 3))
    assert [(row.rank, row.seq) for row in report.ranks if row.state == "waiting"] == [(0, 100), (1, 100), (3, 100)]
    assert sum(event.kind == "watchdog_timeout" for event in report.events) == 3


def test_all_ranks_waiting_names_nobody(explain_lines: Explain) -> None:
    assert explain_lines(waiting(0, 1, 2, 3), world_size=4).culprits == ()


def test_logs_of_one_node_of_two_never_name_the_other_node(explain_lines: Explain) -> None:
    files = {f"rank{rank}.log": waiting(rank) for rank in range(4)}
    report = explain_lines(files, world_size=8)
    assert report.culprits == () and set(report.logs_cover) == {0, 1, 2, 3}


def test_one_node_of_two_with_a_silent_rank_on_it_names_that_rank(explain_lines: Explain) -> None:
    files = {f"rank{rank}.log": waiting(rank) if rank != 2 else ["step 17"] for rank in range(8)}
    assert explain_lines(files, world_size=16).culprits == (2,)


def test_merged_log_of_one_node_of_two_names_nobody_elsewhere(explain_lines: Explain) -> None:
    assert explain_lines({"node0.log": waiting(*range(8))}, world_size=16).culprits == ()
    assert explain_lines({"node0.log": waiting(0, 1, 2, 3)}, world_size=8).culprits == ()


def test_one_ranks_own_log_names_nobody_by_silence(explain_lines: Explain) -> None:
    assert explain_lines({"rank_0.log": waiting(0)}, world_size=2).culprits == ()


def test_many_silent_ranks_name_nobody(explain_lines: Explain) -> None:
    assert explain_lines(waiting(0, 1, 2, 3, 4), world_size=8).culprits == ()


def test_folded_ray_lines_make_silence_worthless(explain_lines: Explain) -> None:
    lines = waiting(0, 1, 3)
    lines[0] += " [repeated 2x across cluster]"
    assert explain_lines(lines, world_size=4).culprits == ()


def test_silent_member_of_a_smaller_group_is_named_by_its_global_rank(explain_lines: Explain) -> None:
    lines: list[str] = []
    for inner, rank in ((0, 1), (1, 3), (3, 7)):
        lines += timeout(rank, group=pg(inner, "9", "DATA_PARALLEL_GROUP", 2), inner=inner)
    assert explain_lines(lines, world_size=8).culprits == (5,)


def test_minority_at_another_sequence_number_is_named_behind_or_ahead(explain_lines: Explain) -> None:
    assert explain_lines(waiting(0, 1, 2) + waiting(3, seq=96)).culprits == (3,)
    assert explain_lines(waiting(0, 1, 2) + waiting(3, seq=103)).culprits == (3,)


def test_minority_in_another_operation_or_size_is_named(explain_lines: Explain) -> None:
    report = explain_lines(waiting(1, 2, 3) + waiting(0, op="_ALLGATHER_BASE", numel=(16, 128)))
    assert report.culprits == (0,) and report.cause is Cause.DIVERGED and report.cause_class == "rank_divergence"
    assert explain_lines(waiting(1, 2, 3) + waiting(0, numel=(2048, 2048))).culprits == (0,)


def test_two_against_two_names_nobody_and_shows_both_sides(explain_lines: Explain) -> None:
    report = explain_lines(waiting(0, 1) + waiting(2, 3, numel=(7, 7)), world_size=4)
    assert report.culprits == ()
    assert {side.ranks for side in report.sides} == {(0, 1), (2, 3)}


def test_root_of_a_gather_and_uneven_all_to_all_are_no_divergence(explain_lines: Explain) -> None:
    lines = waiting(0, op="GATHER", numel=(8, 32)) + waiting(1, 2, 3, op="GATHER", numel=(8, 0))
    assert explain_lines(lines, world_size=4).culprits == ()
    lines = [line for rank in range(4) for line in timeout(rank, op="ALLTOALL_BASE", numel=(100 + rank, 90 - rank))]
    assert explain_lines(lines, world_size=4).culprits == ()


def test_dump_signal_reply_with_a_lower_counter_names_the_rank_and_not_the_sender(explain_lines: Explain) -> None:
    lines = waiting(0, 1, 2, 3, 5, 6, 7)
    lines.append(
        f"{prefix(4)}{pg(4)}Received a dump signal due to a collective timeout from  rank 1 and we will try our "
        f"best to dump the debug "
        "info. Last enqueued NCCL work: 99, last completed NCCL work: 99.This is most likely caused by incorrect usages"
    )
    assert explain_lines(lines, world_size=8).culprits == (4,)


def test_dump_signal_reply_of_a_rank_inside_the_collective_names_nobody(explain_lines: Explain) -> None:
    lines = waiting(0, 1, 2)
    lines.append(
        f"{prefix(3)}{pg(3)}Received a dump signal due to a collective timeout from  rank 1 and we will try our "
        f"best to dump the debug "
        "info. Last enqueued NCCL work: 100, last completed NCCL work: 99.This is most likely"
    )
    assert explain_lines(lines, world_size=4).culprits == ()


def test_desync_report_names_its_lagging_rank_whatever_its_own_counter(explain_lines: Explain) -> None:
    lines = [
        *timeout(0, seq=241),
        "\t - [0] Timeout at collective: ALLREDUCE, #315",
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:",
        "\t   - [7] finished collective #182, but didn't join collective #183 (count from 1)",
        "\t - Snapshot of ranks' latest states:",
        "\t   #182 finished ranks:",
        "\t     [7] finished ALLREDUCE",
        "\t   #317 started ranks:",
        "\t     [3, 4, 5, 6] started _ALLGATHER_BASE",
    ]
    report = explain_lines(lines, world_size=8)
    assert report.culprits == (7,)
    assert any(
        event.peers == (3, 4, 5, 6) and event.op == "_ALLGATHER_BASE" and event.number == 317 for event in report.events
    )


def test_fingerprints_of_a_pair_name_both_when_the_pair_is_the_world(explain_lines: Explain) -> None:
    a, b = fingerprint("ALLREDUCE", "25"), fingerprint("BROADCAST", "1", dtype="Long")
    report = explain_lines([mismatch(0, b, 1, a), mismatch(1, a, 0, b)])
    assert report.culprits == (0, 1) and report.cause is Cause.DIVERGED and len(report.sides) == 2


def test_fingerprints_in_one_ranks_log_alone_name_nobody(explain_lines: Explain) -> None:
    a, b = fingerprint("ALLREDUCE", "25"), fingerprint("ALLREDUCE", "26")
    report = explain_lines({"rank0.log": [mismatch(0, a, 1, b)]})
    assert report.culprits == () and len(report.sides) == 2


def test_ranks_before_the_first_difference_count_as_agreeing(explain_lines: Explain) -> None:
    """Rank 0 compares itself with 1, 2, 3 and stops at 3: ranks 1 and 2 agree with it, so rank 3 is the odd one."""
    a, b = fingerprint("ALLREDUCE", "25"), fingerprint("ALLREDUCE", "26")
    assert explain_lines([mismatch(0, a, 3, b), "[rank1]: step 3", "[rank2]: step 3"]).culprits == (3,)


def test_ranks_that_are_not_in_the_log_make_no_majority(explain_lines: Explain) -> None:
    a, b = fingerprint("ALLREDUCE", "25"), fingerprint("ALLREDUCE", "26")
    assert explain_lines([mismatch(0, a, 3, b)]).culprits == ()
    assert explain_lines([mismatch(26, a, 1, b)]).culprits == ()


def test_two_of_four_fingerprints_known_name_nobody(explain_lines: Explain) -> None:
    a, b = fingerprint("ALLREDUCE", "25"), fingerprint("ALLREDUCE", "26")
    assert explain_lines([mismatch(2, a, 0, b)], world_size=4).culprits == ()


def test_zeroed_fingerprint_is_an_absent_peer(explain_lines: Explain) -> None:
    zero = "CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)"
    report = explain_lines([mismatch(1, fingerprint("ALLGATHER", "1", 101), 7, zero)], world_size=8)
    assert report.culprits == (7,)


def test_exception_of_a_rank_names_it_and_the_timeouts_are_consequences(explain_lines: Explain) -> None:
    lines = [
        "[rank2]: Traceback (most recent call last):",
        '[rank2]:   File "train.py", line 211, in step',
        "[rank2]:     loss = model(batch)",
        "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        *waiting(0, 1, 3),
    ]
    report = explain_lines(lines)
    assert report.culprits == (2,) and report.cause is Cause.FAILED and report.cause_class == "oom_or_crash_other_rank"
    assert "train.py:211 in step" in report.stacks[0].frames
    assert {one.kind for one in report.consequences} >= {"watchdog_timeout"}


def test_exception_after_the_limit_is_no_cause(explain_lines: Explain) -> None:
    lines = [
        *waiting(0, 1, 3),
        "[rank2]: Traceback (most recent call last):",
        '[rank2]:   File "a.py", line 1, in f',
        "[rank2]: KeyError: 'x'",
    ]
    report = explain_lines(lines)
    assert report.cause is not Cause.FAILED and report.cause_class != "oom_or_crash_other_rank"


def test_same_exception_on_all_ranks_names_them_all(explain_lines: Explain) -> None:
    lines = [
        line
        for rank in range(4)
        for line in (
            f"[rank{rank}]: Traceback (most recent call last):",
            f'[rank{rank}]:   File "a.py", line 3, in f',
            f"[rank{rank}]: ValueError: bad config",
        )
    ]
    report = explain_lines(lines, world_size=4)
    assert report.culprits == (0, 1, 2, 3) and report.cause_class == "oom_or_crash_other_rank"


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4040",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 2.",
        "torch.distributed.DistStoreError: Socket Timeout",
    ],
)
def test_exception_that_follows_from_a_peer_names_nobody(explain_lines: Explain, text: str) -> None:
    lines = [
        "[rank2]: Traceback (most recent call last):",
        '[rank2]:   File "a.py", line 3, in f',
        f"[rank2]: {text}",
        *waiting(0, 1, 3),
    ]
    assert explain_lines(lines, world_size=4).culprits == ()


def test_launchers_first_observed_failure_is_no_culprit(explain_lines: Explain) -> None:
    lines = [
        *waiting(0, 1, 2, 3),
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-05-01_10:00:00",
        "  host      : a",
        "  rank      : 3 (local_rank: 3)",
        "  exitcode  : -6 (pid: 4100)",
        "  error_file: <N/A>",
        "  traceback : Signal 6 (SIGABRT) received by PID 4100",
    ]
    report = explain_lines(lines, world_size=4)
    assert report.culprits == () and "launcher_summary" in {one.kind for one in report.consequences}


def test_rank_ended_by_sigkill_is_lost(explain_lines: Explain) -> None:
    lines = [
        *waiting(0, 2, 3),
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : x",
        "  host      : a",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : -9 (pid: 4100)",
        "  error_file: <N/A>",
        "  traceback : Signal 9 (SIGKILL) received by PID 4100",
    ]
    report = explain_lines(lines)
    assert report.culprits == (1,) and report.cause is Cause.LOST


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("srun: error: node1: task 5: Out Of Memory", 5),
        ("mpirun noticed that process rank 3 with PID 12345 on node gpu1 exited on signal 9 (Killed).", 3),
        ("ERROR:  One or more process (first noticed rank 7) terminated with signal 9", 7),
        ("##### Command execution on worker 2 failed with exit status 139. Continuing.", 2),
        ("Container rank 3 status failed cmd ['/usr/bin/python3', '-u', 'run.py'] code -9 log log/workerlog.3", 3),
        ("flux-shell[0]: FATAL: doom: python3: rank 3 on host node1 exited and exit-timeout=30s has expired", 3),
    ],
)
def test_other_launchers_name_the_killed_rank(explain_lines: Explain, line: str, rank: int) -> None:
    report = explain_lines([line], world_size=8)
    assert report.culprits == (rank,) and report.cause is Cause.LOST


DEEPSPEED = (
    "[ERROR] [launch.py:322:sigkill_handler] ['python', '-u', 'a.py', '--local_rank={}'] exits with return code = {}"
)


@pytest.mark.parametrize("before", [[], ["Traceback (most recent call last):", "KeyError: 'labels'"]])
@pytest.mark.parametrize("code", [-9, -11, 1])
def test_deepspeed_prints_the_command_it_started_last(explain_lines: Explain, before: list[str], code: int) -> None:
    report = explain_lines([*before, DEEPSPEED.format(3, code)], world_size=4)
    assert report.incident and report.culprits == () and 3 not in report.suspects


def test_deepspeed_names_an_only_process(explain_lines: Explain) -> None:
    assert explain_lines([DEEPSPEED.format(0, -9)]).culprits == (0,)


def test_heartbeat_alone_names_nobody(explain_lines: Explain) -> None:
    lines = [
        f"{prefix(r)}{pg(r)}ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"
        for r in (2, 4)
    ]
    report = explain_lines(lines, world_size=8)
    assert report.culprits == () and report.incident


def test_first_collective_that_never_completed_is_transport_and_names_nobody(explain_lines: Explain) -> None:
    lines = [line for rank in range(4) for line in (*timeout(rank, seq=1, numel=(1, 1)), status(rank, 1, 1, 0))]
    report = explain_lines(lines, world_size=4)
    assert report.culprits == () and report.cause_class == "p2p_acs_iommu" and report.cause is Cause.NETWORK


def test_monitored_barrier_names_who_did_not_come(explain_lines: Explain) -> None:
    lines = [
        "[rank0]: RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 2000 ms",
        (
            "[rank3]: RuntimeError: Rank 3 successfully reached monitoredBarrier, but received errors while waiting "
            "for send/recv from rank 0. Please check rank 0 logs for faulty rank."
        ),
    ]
    assert explain_lines(lines).culprits == (1, 2)


def test_unique_id_that_was_never_set_names_its_owner(explain_lines: Explain) -> None:
    text = (
        "is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key "
        "'0', but store->get('0') got error: Timeout waiting for key: default_pg/0/0 after 1800000 ms"
    )
    report = explain_lines([f"[rank{rank}]: RuntimeError: [{rank}] {text}" for rank in (1, 2, 3)])
    assert report.culprits == (0,) and report.cause_class == "slow_rank_side_work"


def test_unused_parameters_error_of_one_rank_names_it(explain_lines: Explain) -> None:
    lines = [
        "[rank1]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
        "[rank1]: Parameter indices which did not receive grad for rank 1: 2 3",
    ]
    report = explain_lines(lines, world_size=4)
    assert report.culprits == (1,) and report.cause_class == "unused_params"


def test_progress_that_goes_on_after_the_timeout_means_unequal_batches(explain_lines: Explain) -> None:
    bar = "Epoch 0:  {p}%|#####| {n}/9188 [40:00<02:00,  3.6it/s]"
    lines = [
        bar.format(p=94, n=8600),
        *waiting(1, op="BROADCAST", numel=(1, 1)),
        bar.format(p=95, n=8700),
        bar.format(p=96, n=8800),
    ]
    report = explain_lines(lines, world_size=2)
    assert report.culprits == (0,) and report.cause_class == "unequal_batches" and report.cause is Cause.LATE


def test_quiet_log_is_no_incident(explain_lines: Explain) -> None:
    report = explain_lines(["step 1 loss 0.5", "step 2 loss 0.4", "[rank0]: all good"])
    assert (
        not report.incident and report.culprits == () and report.collective is None and report.cause_class == "unknown"
    )


def test_next_rank_is_mentioned_but_not_named_when_the_size_is_only_assumed(explain_lines: Explain) -> None:
    report = explain_lines(waiting(0, 1, 2))
    assert report.culprits == () and any("if the job has 4 ranks, rank 3" in note for note in report.notes)


def test_saving_by_rank_0_says_nothing_about_another_culprit(explain_lines: Explain) -> None:
    report = explain_lines(["Saving model checkpoint to out/checkpoint-500", *waiting(0, 1, 3)])
    assert report.culprits == (2,) and report.cause_class == "unknown" and report.cause is Cause.UNKNOWN
    report = explain_lines(["Saving model checkpoint to out/checkpoint-500", *waiting(1, 2, 3)])
    assert report.culprits == (0,) and report.cause_class == "checkpoint_io" and report.cause is Cause.LATE


def test_the_silent_one_of_4300_ranks_in_one_log_is_named_and_the_page_stays_small(
    explain_lines: Explain,
) -> None:
    """No rank is taken for silent because more than 4,096 others printed the same before it."""
    line = (
        "[rank{r}]:[E709 17:05:38.162555850 ProcessGroupNCCL.cpp:632] [PG ID 0 PG GUID 0(default_pg) Rank {r}] [Rank {r}] "
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, "
        "Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    )
    report = explain_lines([line.format(r=rank) for rank in range(4300) if rank != 77], 4300)
    assert report.culprits == (77,)
    assert len(report.ranks) == 4300
    html = render_html(report)
    assert len(html) < 200_000
    assert "0-76, 78-4299" in html


ENTERED = "INFO:torch.distributed.distributed_c10d:Added key: store_based_barrier_key:{} to store for rank: {}"
WAITS = (
    "INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process group for rank: 0, key: "
    "store_based_barrier_key:1 (world_size=6, worker_count=5, timeout=0:30:00)"
)


def test_who_has_not_entered_the_stores_barrier_is_named(explain_lines: Explain) -> None:
    assert explain_lines([*(ENTERED.format(1, rank) for rank in (0, 1, 2, 4, 5)), WAITS]).culprits == (3,)
    another = [ENTERED.format(2, rank) for rank in (1, 2, 4, 5)]  # of a group that was made later
    assert explain_lines([*another, WAITS]).culprits == ()


def test_whose_heartbeats_stopped_with_all_others_was_killed_by_its_monitor(explain_lines: Explain) -> None:
    silent = [
        f"[WARNING] [RankMonitorServer:{rank}] Did not get subsequent heartbeat. Waited 171.92 seconds."
        for rank in range(4)
    ]
    ends = [f"Sending process {pid} closing signal SIGTERM" for pid in (10, 11, 13)]
    ends += [
        "torch.distributed.elastic.multiprocessing.api: failed (exitcode: -9) local_rank: 2 (pid: 12) of binary: /usr/bin/python"
    ]
    assert explain_lines([*silent, *ends]).culprits == ()
    assert explain_lines(ends).culprits == (2,)


THROWN = ["[1,6]<stderr>:terminate called after throwing an instance of '{}'", "[1,6]<stderr>:  what():  {}"]


def test_an_exception_that_nobody_caught_in_cpp_names_its_rank_unless_it_follows(explain_lines: Explain) -> None:
    def named(name: str, text: str) -> tuple[int, ...]:
        return explain_lines([THROWN[0].format(name), THROWN[1].format(text)], world_size=8).culprits

    assert named("tensorrt_llm::common::TllmException", "Assertion failed: Block pool exhausted: free 0") == (6,)
    assert (
        named(
            "tensorrt_llm::common::TllmException", "Failed, NCCL error allreducePlugin.cpp:291 'remote process exited'"
        )
        == ()
    )
    assert named("c10::DistBackendError", "[Rank 6] Process group watchdog thread terminated") == ()


def test_a_lost_daemon_of_mpirun_is_a_lost_host(explain_lines: Explain) -> None:
    lines = ["PRTE has lost communication with a remote daemon.", "", "  HNP daemon   : [prterun-n1-19@0,0] on node n1",
             "  Remote daemon: [prterun-n1-19@0,3] on node n4"]  # fmt: skip
    report = explain_lines(lines)
    assert report.incident and report.culprits == () and "n4" in report.summary + report.next_step + report.without


STRAGGLER = "STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected ranks: Rank=11 (score 0.41 < threshold 0.7)"


def test_who_a_job_was_stopped_for_is_named_and_who_is_only_slow_is_not(explain_lines: Explain) -> None:
    assert explain_lines([STRAGGLER, "Detected stragglers. Terminating training..."], world_size=16).culprits == (11,)
    assert not explain_lines([STRAGGLER], world_size=16).incident


def test_an_exceptions_own_message_is_no_sign_that_the_training_went_on(explain_lines: Explain) -> None:
    raised = ["[rank3]: Traceback (most recent call last):", '[rank3]:   File "/w/t.py", line 7, in step', "[rank3]:     check(loss)",
              "[rank3]: RuntimeError: Rank 3, node gpu-01, device 6, iteration 48211: Unexpected result nan (message='found NaN')"]  # fmt: skip
    assert explain_lines(raised, world_size=8).culprits == (3,)


@pytest.mark.parametrize("day, named", [("Oct 30", ()), ("Aug  1", (2,)), ("Jul 31", (2,))])
def test_the_kernels_line_of_another_day_names_nobody(explain_lines: Explain, day: str, named: tuple[int, ...]) -> None:
    inits = [
        f"h1:{70 + r}:{80 + r} [{r}] NCCL INFO ncclCommInitRank comm 0x5 rank {r} nranks 4 cudaDev {r} busId {r + 1}b000"
        for r in range(4)
    ]
    kernel = f"{day} 15:00:00 h1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus."
    waits = [line for r in range(4) for line in timeout(r)]
    report = explain_lines({"job.log": [*inits, *waits], "journal.txt": [kernel]})
    assert report.culprits == named and report.incident


@pytest.mark.parametrize("counts, named", [((199, 199, 211, 199), (2,)), ((199, 211), ()), ((199, 199, 211, 211), ())])
def test_the_minority_has_another_number_of_parameters(
    explain_lines: Explain, counts: tuple[int, ...], named: tuple[int, ...]
) -> None:
    other = {r: next(n for n, count in enumerate(counts) if count != own) for r, own in enumerate(counts)}
    report = explain_lines(
        [
            f"[rank{r}]: RuntimeError: DDP expects same model across all ranks, but Rank {r} has {own} params, "
            f"while rank {other[r]} has inconsistent {counts[other[r]]} params."
            for r, own in enumerate(counts)
        ]
    )
    assert report.culprits == named and report.decision == "fix-code"


@pytest.mark.parametrize("first, named", [("10:00:13", (5,)), ("10:04:55", ())])
def test_a_heartbeat_that_stopped_long_before_the_others(
    explain_lines: Explain, first: str, named: tuple[int, ...]
) -> None:
    lines = [
        f"2025-05-19 {first if r == 5 else '10:05:11'},1 [WARNING] [RankMonitorServer:{r}] Did not get subsequent "
        "heartbeat. Waited 300.00 seconds."
        for r in (5, 0, 1, 2, 3, 4, 6, 7)
    ]
    assert explain_lines(lines).culprits == named


def test_who_left_no_dump_and_waits_like_the_others_is_not_missing(explain_lines: Explain) -> None:
    told = ["Not all ranks joining collective 100 at entry 1999", "collective: nccl:all_reduce", "missing ranks: {3}"]
    assert explain_lines([line for r in range(4) for line in timeout(r)] + told).culprits == ()
    assert explain_lines([line for r in range(3) for line in timeout(r)] + told).culprits == (3,)


def test_ranks_of_torchfts_replica_groups_are_not_those_of_the_job(explain_lines: Explain) -> None:
    exit_ = "failed (exitcode: -9) local_rank: 1 (pid: 91) of binary: python"
    lines = [f"{text}torch/distributed/elastic/multiprocessing/api.py:882] {exit_}" for text in ("[titan_2] E1102 ",)]
    assert explain_lines(lines).culprits == (1,)
    assert explain_lines(["INFO:torchft.manager:[titan_2:9f5b/0 - step 522] reconfiguring", *lines]).culprits == ()


@pytest.mark.parametrize(
    "told, refused, named", [("docker0", "train-a", (2, 3)), ("ens7", "train-a", ()), ("docker0", "train-b", ())]
)
def test_an_address_that_only_one_host_has(
    explain_lines: Explain, told: str, refused: str, named: tuple[int, ...]
) -> None:
    lines = [
        "train-a: ranks 0-1, train-b: ranks 2-3",
        f"train-b:22:22 [0] NCCL INFO Bootstrap : Using {told}:172.17.0.1<0>",
        f"{refused}:9:15 [1] misc/socket.cc:538 NCCL WARN socketStartConnect: Connect to 172.17.0.1<4> failed : Connection refused",
    ]
    assert explain_lines(lines).culprits == named


@pytest.mark.parametrize("hosts, named", [(("w2",), (19,)), (("w2", "w1"), ()), ((), ())])
def test_the_port_of_one_host_is_down_and_others_get_no_answer(
    explain_lines: Explain, hosts: tuple[str, ...], named: tuple[int, ...]
) -> None:
    ranks = {"w0": 3, "w1": 11, "w2": 19}
    lines = ["w0:1200:1400 [0] NCCL INFO comm 0x55 rank 0 nranks 24 cudaDev 0 busId 18000 - Init COMPLETE"]
    for host, rank in ranks.items():
        start = f"{host}:{1200 + rank}:1403 [3] "
        lines += [f"{start}NCCL INFO Channel 00/0 : {(rank - 8) % 24}[3] -> {rank}[3] [receive] via NET/IB/3"]
        if host in hosts:
            lines += [f"{start}transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error"]
        else:
            lines += [f"{start}NCCL WARN NET/IB : Got completion from peer 10.0.3.12<5> with error 12, vendor err 129"]
    assert explain_lines(lines).culprits == named


@pytest.mark.parametrize("came, named", [(24, tuple(range(24, 32))), (23, ())])
def test_tasks_that_ended_before_the_others_had_met(explain_lines: Explain, came: int, named: tuple[int, ...]) -> None:
    lines = [
        "srun: error: dgx-08: tasks 24-31: Exited with exit code 1",
        f"[rank0]: torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. {came}/32 clients joined.",
    ]
    assert explain_lines(lines).culprits == named
    assert explain_lines(lines[::-1]).culprits == ()


CUT_OFF = "coordination_service_agent.cc:421] Failed to send heartbeat to coordination service"


@pytest.mark.parametrize(
    "accused, cut, named", [((1, 2, 3), (1, 2), (0,)), ((1, 3), (1, 3), ()), ((1, 2, 3), (1,), ())]
)
def test_a_coordinator_that_hears_nobody_while_they_live(
    explain_lines: Explain, accused: tuple[int, ...], cut: tuple[int, ...], named: tuple[int, ...]
) -> None:
    head = "E0224 19:20:58.1 41 coordination_service.cc:14] UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):"
    files = {"zero.log": [head, *(f"/job:jax_worker/replica:0/task:{n}" for n in accused), "The tasks have crashed."]}
    for n in cut:
        files[f"host-{'abcd'[n]}.log"] = [
            f"W0224 19:18:1{n}.1 42 {CUT_OFF}: DEADLINE_EXCEEDED [10.4.0.10:1234]; will retry."
        ]
    assert explain_lines(files).culprits == named


@pytest.mark.parametrize(
    "frame, named", [("match_spans (scan.py:88)", (2,)), ("synchronize (torch/cuda/streams.py:5)", ())]
)
def test_a_watchdog_that_alone_is_stuck(explain_lines: Explain, frame: str, named: tuple[int, ...]) -> None:
    beat = "[rank2]:[E828 07:45:19.3 ProcessGroupNCCL.cpp:15] ProcessGroupNCCL's watchdog got stuck for 480 seconds without"
    first = ["Root Cause (first observed failure):", "[0]:", "  host      : c4", "  rank      : 2 (local_rank: 2)",
             "  exitcode  : -6 (pid: 41202)", "  traceback : Signal 6 (SIGABRT) received by PID 41202"]  # fmt: skip
    spied = ['Thread 41202 (active+gil): "MainThread"', f"    {frame}", "    train (train.py:199)"]
    assert explain_lines({"job.log": [beat, *first], "spy.txt": spied}).culprits == named


@pytest.mark.parametrize("size, named", [(1, (3,)), (2, ())])
def test_the_number_of_a_worker_is_a_rank_where_there_is_one_engine(
    explain_lines: Explain, size: int, named: tuple[int, ...]
) -> None:
    lines = [
        f"(APIServer pid=1) INFO non-default args: {{'tensor_parallel_size': 4, 'data_parallel_size': {size}}}",
        "(Worker_TP0 pid=331) INFO 10-03 08:11:40 [gpu_model_runner.py:26] Starting to load model on rank 0, tensor_parallel_size=4",
        "(EngineCore_DP0 pid=288) ERROR 10-03 08:14:37 [multiproc_executor.py:154] Worker proc VllmWorker-3 died unexpectedly, shutting down executor.",
    ]
    assert explain_lines(lines).culprits == named


@pytest.mark.parametrize("option, named", [(" --enable-expert-parallel", (3,)), ("", ())])
def test_an_engine_of_one_gpu_is_its_rank_where_the_engines_share_one_world(
    explain_lines: Explain, option: str, named: tuple[int, ...]
) -> None:
    head = "(EngineCore_DP3 pid=553) ERROR 02-18 11:04:12 [core.py:946]"
    lines = [f"vllm serve x --data-parallel-size 8 --tensor-parallel-size 1{option}", f"{head} Traceback (most recent call last):",
             f'{head}   File "/v/core.py", line 37, in step', f"{head} ValueError: bad block table"]  # fmt: skip
    assert explain_lines(lines).culprits == named


def test_what_a_host_is_called_in_a_table(explain_lines: Explain) -> None:
    table = [f"i-0ab{n}  p5-{n}  system: ok  ranks {8 * n}-{8 * n + 7}" for n in range(4)]
    lost = "srun: error: Node failure on p5-3"
    assert explain_lines({"hosts.txt": table, "job.out": ["step 3 loss 2", lost]}).culprits == tuple(range(24, 32))
    assert explain_lines({"hosts.txt": table[:3], "job.out": ["step 3 loss 2", lost]}).culprits == ()


#: What torchrun printed of two ranks on gloo, of which rank 1 called `sys.exit(0)` between two all-reduces (torch 2.13).
LEFT = """\
terminate called without an active exception
[rank0]: Traceback (most recent call last):
[rank0]:   File "/job/train.py", line 6, in <module>
[rank0]:     dist.all_reduce(t)
[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:59561.
W1126 07:49:05.313000 6383 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 6394 closing signal SIGTERM
E1126 07:49:05.329000 6383 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -6) local_rank: 1 (pid: 6395) of binary: /usr/bin/python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
======================================================
train.py FAILED
------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6394)  (SIGTERM)
------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -6 (pid: 6395)  (SIGABRT)
======================================================"""


def test_a_rank_that_left_and_was_aborted_by_its_own_end_has_exited(explain_lines: Explain) -> None:
    report = explain_lines(LEFT.splitlines())
    assert (report.culprits, report.cause) == ((1,), Cause.EXITED)
    report = explain_lines(LEFT.splitlines()[1:])  # an abort for a reason that is not shown
    assert report.cause is not Cause.EXITED


def test_the_log_that_was_given_is_not_asked_for(tmp_path: Path) -> None:
    """The folder of torchrun has the empty log of the rank that left."""
    for rank, text in enumerate((LEFT.splitlines()[1:5], [])):
        file = tmp_path / "none_x" / "attempt_0" / str(rank) / "stderr.log"
        file.parent.mkdir(parents=True)
        file.write_text("\n".join(text))
    report = explain([str(tmp_path)])
    assert report.culprits == ()
    assert report.next_step.startswith("Read the end of the log of rank 1")
    assert "add the logs that are missing here" in report.advice[0]


def waited_in(rank: int, op: str) -> list[str]:
    """What a rank prints whose call of gloo has run into its limit (torch 2.13)."""
    return [f"[rank{rank}]: {line}" for line in (
        "Traceback (most recent call last):", '  File "/job/train.py", line 12, in <module>', f"    dist.{op}(x)",
        f'  File "/lib/torch/distributed/distributed_c10d.py", line 3151, in {op}', "    work.wait()",
        "RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete",
    )]  # fmt: skip


def test_a_rank_whose_traceback_is_in_another_collective_than_the_others_is_named(explain_lines: Explain) -> None:
    """Gloo prints no collective: the tracebacks tell. Of two ranks both are named, for which one strayed is not shown."""
    report = explain_lines([*waited_in(1, "broadcast"), *waited_in(0, "all_reduce"), *waited_in(2, "all_reduce")])
    assert (report.culprits, report.cause) == ((1,), Cause.DIVERGED)
    assert report.cause_class == "rank_divergence"
    assert explain_lines([*waited_in(1, "broadcast"), *waited_in(0, "all_reduce")]).culprits == (0, 1)
    assert explain_lines([line for rank in range(3) for line in waited_in(rank, "all_reduce")]).culprits == ()


@pytest.mark.parametrize("op", ["broadcast", "reduce", "gather", "scatter"])
def test_a_rank_that_is_ahead_of_a_call_that_ends_early_is_not_named(explain_lines: Explain, op: str) -> None:
    """Rank 2 has had its part of it, and ranks 0 and 1 have given other sources: a fault of theirs."""
    report = explain_lines([*waited_in(0, op), *waited_in(1, op), *waited_in(2, "all_reduce")])
    assert report.incident and report.culprits == ()
    assert "ends on some ranks before" in str(report.reason)


def ended_first(rank: int, local: int, host: str) -> list[str]:
    """What torchrun prints at its end about the process that it saw abort first."""
    return ["Root Cause (first observed failure):", "[0]:", "  time      : 2025-11-20_06:11:26", f"  host      : {host}",
            f"  rank      : {rank} (local_rank: {local})", f"  exitcode  : -6 (pid: {8800 + rank})",
            "  error_file: <N/A>", f"  traceback : Signal 6 (SIGABRT) received by PID {8800 + rank}"]  # fmt: skip


GONE = (
    "[rank{0}]:[E1120 06:11:19.326228595 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Process group "
    "watchdog thread terminated with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.26.6"
)


@pytest.mark.parametrize("fault", ["Memory access fault by GPU node-5 on address 0x7f18c4e00000. Reason: Unknown.",
                                   "HIP error: an illegal memory access was encountered"])  # fmt: skip
def test_who_aborts_because_a_peer_is_gone_is_not_named_beside_the_fault(explain_lines: Explain, fault: str) -> None:
    """Each node's torchrun calls one of its own ranks the first to fail."""
    victims = [GONE.format(0), GONE.format(4), *ended_first(0, 0, "n6")]
    assert explain_lines({"n6.log": victims}, world_size=16).culprits == ()
    report = explain_lines({"n6.log": victims, "n7.log": [fault, *ended_first(11, 3, "n7")]}, world_size=16)
    assert report.culprits == (11,)


def test_an_exception_at_which_the_log_is_cut_is_no_fault_of_its_rank(explain_lines: Explain, tmp_path: Path) -> None:
    """The others' text is the same, and goes on to say that they waited."""
    head = [
        "Traceback (most recent call last):",
        '  File "/e/buffer.py", line 581, in dispatch',
        "    x = self.runtime.dispatch(",
    ]
    raised = [
        f"[rank{rank}]: {line}" for rank in (0, 1, 2) for line in (*head, "RuntimeError: DeepEP error: timeout (CPU)")
    ]
    file = tmp_path / "job.log"
    file.write_text("\n".join(raised).removesuffix("EP error: timeout (CPU)"))
    report = explain([str(file)], world_size=4)
    assert report.incident and report.culprits == ()
    file.write_text("\n".join(raised[:8] + [*raised[8:-1], "[rank2]: RuntimeError: bad expert 7"]) + "\n")
    assert explain([str(file)], world_size=4).culprits == (2,)


def monitor(rank: int, section: str, host: str) -> str:
    return (
        f"[2026-07-07 01:07:15,455] [WARNING] [RankMonServer70{rank}@{host}:{rank}] Section '{section}' has been open for "
        "301.10 seconds. Timeout is 300.00 seconds."
    )


def test_a_section_of_nvrx_is_told_by_the_number_behind_the_host(explain_lines: Explain) -> None:
    lines = [monitor(rank, "dataload" if rank == 2 else "step", f"n{rank // 2}") for rank in range(4)]
    report = explain_lines(lines)
    assert (report.culprits, report.cause) == ((2,), Cause.LATE)
    local = [
        monitor(rank, "dataload" if (rank, host) == (1, "b") else "step", host) for host in "ab" for rank in range(4)
    ]
    assert explain_lines(local).culprits == ()  # rank 1 of host b is another than rank 1 of host a


def stack(rank: int, *frames: str) -> list[str]:
    return [f"### rank {rank}: py-spy dump --pid {9000 + rank}", f"Process {9000 + rank}: python train.py",
            "Python v3.11.9 (/opt/venv/bin/python3.11)", "", f'Thread {9000 + rank} (active): "MainThread"',
            *(f"    {frame}" for frame in frames), "    main (train.py:61)", "    <module> (train.py:77)", ""]  # fmt: skip


@pytest.mark.parametrize(
    "end, named",
    [
        ("^CReceived SIGINT, exiting", (3,)),
        ("caught SIGINT", (3,)),
        ('Traceback (most recent call last):\n  File "t.py", line 6, in f\n    g()\nKeyboardInterrupt', (3,)),
        ("step 7 loss 2", ()),
    ],
)
def test_stacks_of_a_job_that_somebody_gave_up(explain_lines: Explain, end: str, named: tuple[int, ...]) -> None:
    reads = ("readinto (socket.py:705)", "urlopen (urllib3/connectionpool.py:787)", "load_shard (data/stream.py:143)")
    dumps = [line for rank in range(4) for line in (stack(rank, *reads) if rank == 3 else
             stack(rank, "all_reduce (torch/distributed/distributed_c10d.py:2501)", "step (loop.py:204)"))]  # fmt: skip
    steps = [f"step {number} loss 2" for number in range(5)]
    assert explain_lines({"stacks.txt": dumps, "job.log": [*steps, end]}, world_size=4).culprits == named


@pytest.mark.parametrize("line", ["960.2s: job.exception type=node-failure severity=0 node failure on tuo1187 (shell rank 5)",
                                  "960.3s: flux-shell[0]: ERROR: output: shell rank 5 (on tuo1187): lost contact"])  # fmt: skip
def test_a_host_that_flux_has_lost_is_no_rank(explain_lines: Explain, line: str) -> None:
    report = explain_lines(["0: iter 10 loss=2.9", "0: iter 20 loss=2.8", line])
    assert report.incident and report.culprits == ()
    assert report.decision == "restart-without" and "tuo1187" in report.without


@pytest.mark.parametrize("text", ["ACL stream synchronize failed, error code is 507053 HBM MULTI BIT ECC ERROR.",
                                  "aclrtSynchronizeStream: [HBM multi-bit ECC uncorrectable]"])  # fmt: skip
def test_memory_of_a_device_that_is_broken_is_left_out(explain_lines: Explain, text: str) -> None:
    report = explain_lines([f"[rank5]: RuntimeError: {text}"], world_size=8)
    assert (report.culprits, report.decision) == ((5,), "restart-without")


@pytest.mark.parametrize(
    "text, decision",
    [
        ("RuntimeError: PytorchStreamWriter failed writing file data/118: file write failed", "fix-environment"),
        ("RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 412029 vs 412028", "fix-environment"),
        ("RuntimeError: the size of tensor a must match", "fix-code"),
        ("torch.OutOfMemoryError: CUDA out of memory. Process 902 has 11.40 GiB memory in use. Including non-PyTorch memory, this process has 66.87 GiB memory in use.",
         "fix-environment"),
        ("torch.OutOfMemoryError: CUDA out of memory. Process 902 has 61.40 GiB memory in use. Process 977 has 12.1 GiB memory in use. Of the allocated memory 11 GiB is",
         "fix-environment"),
        ("torch.OutOfMemoryError: CUDA out of memory. Process 902 has 72.68 GiB memory in use. Of the allocated memory 66.9 GiB is", "fix-code"),
    ],
)  # fmt: skip
def test_what_a_rank_lacks_and_what_its_code_does(explain_lines: Explain, text: str, decision: str) -> None:
    """In a container a process is not known by its own number: then torch shows it as another one."""
    report = explain_lines([f"[rank1]: {text}"], world_size=4)
    assert (report.culprits, report.decision) == ((1,), decision)


FULL = "[rank{0}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {1} GiB. GPU {2} has a total capacity of 79.15 GiB of which 1.00 GiB is free. {3}"
OF_OTHER = (
    "Process 99887 has {} GiB memory in use. Including non-PyTorch memory, this process has {} GiB memory in use."
)
SMI = [
    "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |",
    "|=========================================================================================|",
    "|    2   N/A  N/A           99887      C   /opt/x/bin/python                      70112MiB |",
    "+-----------------------------------------------------------------------------------------+",
]


@pytest.mark.parametrize(
    "lines",
    [
        [FULL.format(2, "2.00", 2, OF_OTHER.format("68.00", "8.00"))],
        [FULL.format(2, "2.00", 2, "Including non-PyTorch memory, this process has 8.00 GiB memory in use."), "$ nvidia-smi", *SMI],
        ["preflight: GPU 2: pid 99887 of another user holds 70112 MiB", FULL.format(2, "2.00", 2, "")],
        [FULL.format(2, "2.00", 2, ""), "GPU 2 was occupied by PID 99887 (of bob), 70 GiB; not a process of this job"],
        ["ops: a zombie process 99887 of yesterday still held 71 GiB on GPU 2", FULL.format(2, "2.00", 2, "")],
        ["stale process 99887 on cuda:2 still uses 61.2 GiB", FULL.format(2, "2.00", 2, "")],
        ["[rank2]: pid=4102 up", "rank 2 pid 4102", FULL.format(2, "2.00", 2, "Process 99887 has 68.00 GiB memory in use. Of the")],
    ],
)  # fmt: skip
def test_who_lacks_memory_that_another_job_holds_is_where_to_look(explain_lines: Explain, lines: list[str]) -> None:
    """It alone has raised; the fault is its machine's."""
    waits = [line for rank in (0, 1, 3) for line in timeout(rank)]
    for report in (explain_lines(lines, world_size=4), explain_lines([*lines, *waits], world_size=4)):
        assert (report.culprits, report.decision) == ((2,), "fix-environment")
        assert "another process holds memory" in str(report.decision_reason)


@pytest.mark.parametrize(
    "lines, named",
    [
        ([FULL.format(2, "4.64", 2, "Process 99887 has 76.04 GiB memory in use. Of the allocated memory 71.77 GiB is allocated by PyTorch, and 2.61 GiB is reserved by PyTorch but unallocated."), "rank 2 pid 12"], (2,)),
        ([FULL.format(2, "9.00", 2, OF_OTHER.format("0.50", "76.00"))], (2,)),
        (["rank 3 pid 99887", "rank 2 pid 4102", FULL.format(2, "2.00", 2, OF_OTHER.format("68.00", "8.00"))], (2,)),
        ([FULL.format(rank, "2.00", 0, OF_OTHER.format("38.00", "38.00")) for rank in (1, 2)], (1, 2)),
        ([FULL.format(5, "2.00", 5, "Including non-PyTorch memory, this process has 77.00 GiB memory in use."), *SMI], (5,)),
        (["rank 2 pid 99887", FULL.format(2, "2.00", 2, ""), *SMI], (2,)),
        ([FULL.format(2, "2.00", 2, "Including non-PyTorch memory, this process has 68.47 GiB memory in use."), *SMI], (2,)),
        (["rank 2 pid 99887", "another process 99887 holds 61 GiB of the GPU", FULL.format(2, "2.00", 2, "")], (2,)),
        (["GPU 7: pid 99887 of another user holds 70112 MiB", FULL.format(2, "2.00", 2, "")], (2,)),
    ],
)  # fmt: skip
def test_who_uses_up_the_memory_itself_or_beside_its_own_job_is_named(
    explain_lines: Explain, lines: list[str], named: tuple[int, ...]
) -> None:
    report = explain_lines(lines, world_size=8)
    assert (report.culprits, report.decision) == (named, "fix-code")


@pytest.mark.parametrize("library, decision", [("libnvjpeg.so.12.4", "fix-environment"), ("libc.so.6", "unknown")])
def test_the_library_in_which_a_rank_crashed(explain_lines: Explain, library: str, decision: str) -> None:
    worker = "(Worker_TP{0} pid={1}) INFO 03-11 02:14:05 [parallel_state.py:1208] rank {0} in world size 4 is assigned as DP rank 0, PP rank 0, TP rank {0}, EP rank {0}"
    log = [worker.format(rank, 1400 + rank) for rank in range(4)]
    log += [
        "ERROR 03-11 02:21:46 [multiproc_executor.py:246] Worker proc VllmWorker-3 died unexpectedly, shutting down executor."
    ]
    kernel = [
        f"[812900.4] python3[1403]: segfault at 7f3a00000018 ip 00007f52c1d0a33b sp 00007ffe6c1b7d10 error 4 in {library}[7f52c1c00000+3a1000]"
    ]
    report = explain_lines({"job.log": log, "dmesg.txt": kernel})
    assert (report.culprits, report.decision) == ((3,), decision)


@pytest.mark.parametrize(
    "text, named", [(": Compressed file ended before the end-of-stream marker was reached", (4,)), ("", ())]
)
def test_a_file_that_ends_too_early_is_a_fault_of_its_reader_and_a_closed_pipe_is_none(
    explain_lines: Explain, text: str, named: tuple[int, ...]
) -> None:
    lines = [
        "[rank: 4] Child process with PID 51207 terminated with code 1. Forcefully terminating all other processes to avoid zombies",
        "Traceback (most recent call last):",
        '  File "/usr/lib/python3.9/gzip.py", line 300, in read',
        f"EOFError{text}",
    ]
    assert explain_lines(lines, world_size=6).culprits == named


def test_a_node_that_failed_and_is_not_named_is_left_out_by_the_scheduler(explain_lines: Explain) -> None:
    line = "slurmstepd: error: *** JOB 90121 ON c5-01 CANCELLED AT 2026-02-02T02:02:02 DUE TO NODE FAILURE ***"
    report = explain_lines(["8 nodes x 4", line])
    assert (report.culprits, report.decision) == ((), "restart")


def test_a_device_of_habana_that_was_reset_is_left_out(explain_lines: Explain) -> None:
    line = "[1,7]<stderr>:synStatus=26 [Generic failure] Device reset has occurred. No more device activity can be done"
    report = explain_lines(["[1,0]<stdout>:step 600", line])
    assert (report.culprits, report.decision) == ((7,), "restart-without")


SYNCHRONIZE = ["    synchronize (torch/cuda/__init__.py:954)", "    train (train.py:158)"]
LOADS = ["    wait (threading.py:320)", "    __next__ (torch/utils/data/dataloader.py:708)", "    train (train.py:141)"]


@pytest.mark.parametrize(
    "stacks, named",
    [
        ([SYNCHRONIZE, LOADS, SYNCHRONIZE, SYNCHRONIZE], (1,)),
        ([SYNCHRONIZE, LOADS, SYNCHRONIZE, [SYNCHRONIZE[0], "    train (train.py:160)"]], ()),
        ([SYNCHRONIZE, LOADS, SYNCHRONIZE], ()),
    ],
)
def test_who_is_elsewhere_while_all_others_wait_for_their_devices_at_one_place(
    explain_lines: Explain, stacks: list[list[str]], named: tuple[int, ...]
) -> None:
    lines = []
    for rank, stack in enumerate(stacks):
        lines += [f"Process {600 + rank}: python train.py   # RANK={rank}", ""]
        lines += [f'Thread {600 + rank} (active): "MainThread"', *stack, ""]
    assert explain_lines(lines).culprits == named


@pytest.mark.parametrize(
    "place", ["[Worker 4/8] ", "Worker 4/8: ", "[partition 3 of 16] ", "[4/8] ", "shard 1 of 2 | ", "worker-1/4: "]
)
def test_a_place_among_partitions_is_no_rank(explain_lines: Explain, place: str) -> None:
    raised = ["Traceback (most recent call last):", '  File "prep.py", line 4, in run', "ValueError: bad sample 17"]
    lines = [
        "torchrun --nproc_per_node=16 prep.py",
        "[rank0]: step 1",
        f"{place}starts",
        *(place + row for row in raised),
    ]
    report = explain_lines(lines)
    assert report.incident and report.culprits == () and report.suspects == ()
    assert explain_lines([*lines, *("[rank5]: " + row for row in raised[:2]), "[rank5]: KeyError: 3"]).culprits == (5,)
    ended = explain_lines(["torchrun --nproc_per_node=16 prep.py", f"{place}was killed by signal 9", *raised])
    assert ended.culprits == ()


def test_workers_that_start_one_after_the_other_are_no_progress(explain_lines: Explain) -> None:
    waits = [line for rank in range(3) for line in timeout(rank)]
    for who, decision in (("Worker {}/8 starts", "unknown"), ("wrote {}/8 shards", "raise-limit")):
        report = explain_lines([*(f"[rank3]: {who.format(n)}" for n in range(1, 6)), *waits], world_size=4)
        assert (report.culprits, report.decision) == ((3,), decision), who


def _raised_before_init(words: str, times: int) -> list[str]:
    rows = ["Traceback (most recent call last):", '  File "/home/u/t.py", line 7, in main', "    cfg = load(folder)"]
    return [row for at in range(times) for row in [*rows, words.format(at)]]


def _torchruns_table(ranks: list[int], first: int) -> list[str]:
    def entry(rank: int) -> list[str]:
        told = [f"  rank      : {rank} (local_rank: {rank})", f"  exitcode  : 1 (pid: {4001 + rank})"]
        return ["[0]:", "  host      : box1", *told, "  error_file: <N/A>"]

    others = [row for rank in ranks if rank != first for row in entry(rank)]
    ended = f"torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: {first} (pid: 4005) of binary: python"
    return [
        f"E1129 10:00:02.1 4000 {ended}",
        "t.py FAILED",
        "Failures:",
        *others,
        "Root Cause (first observed failure):",
        *entry(first),
    ]


@pytest.mark.parametrize(
    ("words", "times", "ranks", "named"),
    [
        ("KeyError: 'DATA'", 3, [0, 1, 2], (0, 1, 2)),  # a traceback of each
        ("KeyError: 'DATA'", 2, [1], ()),  # the other one had raised, too, when it was ended
        ("KeyError: 'DATA'", 3, [0, 1], ()),
        ("ValueError: no shard {}", 3, [1], ()),  # one place, and other words in each
        ("KeyError: 'DATA'", 1, [1], (1,)),
    ],
)
def test_of_ranks_that_raise_alike_torchruns_first_one_is_any(
    explain_lines: Explain, words: str, times: int, ranks: list[int], named: tuple[int, ...]
) -> None:
    report = explain_lines(
        [*_raised_before_init(words, times), *_torchruns_table(ranks, 1)], world_size=3 if times > 2 else 2
    )
    assert report.incident and report.culprits == named
    assert "held up" not in report.summary


PEER_EXITED = "NCCL error: remote process exited or there was a network error"
EVICTED = "4m  Warning  Evicted  pod/sft-worker-2  Pod ephemeral local storage usage exceeds the total limit of containers 9Gi."


@pytest.mark.parametrize("process", ["NPROC=1", "NPROC=8"])
def test_the_rank_of_an_evicted_pod_is_told_by_the_head_of_its_log(explain_lines: Explain, process: str) -> None:
    def head(pod: str, rank: int) -> str:
        return f"[entrypoint] {pod} RANK={rank} WORLD_SIZE=4 MASTER_ADDR=sft-master-0 {process}"

    report = explain_lines(
        {
            "events.txt": [EVICTED],
            "master-0.log": [head("sft-master-0", 0), f"[rank0]: torch.distributed.DistBackendError: {PEER_EXITED}"],
            "worker-1.log": [head("sft-worker-1", 2), f"[rank2]: torch.distributed.DistBackendError: {PEER_EXITED}"],
            "worker-2.log": [head("sft-worker-2", 3), "cache size 94 GiB"],
        }
    )
    assert report.incident and report.culprits == ((3,) if process == "NPROC=1" else ())


@pytest.mark.parametrize("by_program", [True, False])
def test_a_container_without_an_address_of_the_store_is_named_by_its_rank(
    explain_lines: Explain, by_program: bool
) -> None:
    def log(rank: int, *rows: str) -> list[str]:
        return [f"RANK={rank} WORLD_SIZE=4 MASTER_ADDR=exp-master-0 MASTER_PORT=23456", *rows]

    place = (
        'rendezvous.py", line 273, in _env_rendezvous_handler'
        if by_program
        else 'static_tcp_rendezvous.py", line 66, in next_rendezvous'
    )
    waited = ["Traceback (most recent call last):", f'  File "/x/{place}', "    store = TCPStore(",
              "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 3/4 clients joined."]  # fmt: skip
    c10d = "[W130 03:02:11.5 socket.cpp:755] [c10d] The IPv4 network addresses of (exp-master-0, 23456) cannot be retrieved"
    lost = [f"{c10d} (gai error: -3 - Temporary failure in name resolution).",
            "[E130 03:30:03.5 socket.cpp:1019] [c10d] The client socket has timed out after 1800000ms while trying to connect to (exp-master-0, 23456)."]  # fmt: skip
    report = explain_lines(
        {
            "exp-master-0.log": log(0, *waited),
            "exp-worker-1.log": log(2, "store connected"),
            "exp-worker-2.log": log(3, *lost),
        }
    )
    assert report.incident and report.culprits == ((3,) if by_program else ())


@pytest.mark.parametrize(("signal", "named"), [(9, (1,)), (15, ())])
def test_a_shard_of_a_server_that_a_signal_killed_is_named(
    explain_lines: Explain, signal: int, named: tuple[int, ...]
) -> None:
    def row(message: str, rank: int) -> str:
        told = f'"fields":{{"message":"{message}"}},"span":{{"rank":{rank},"name":"shard-manager"}}'
        return f'{{"timestamp":"2025-03-27T07:36:51.2Z","level":"ERROR",{told},"target":"text_generation_launcher"}}'

    report = explain_lines(
        [row("Shard ready in 409.1s", 0), row(f"Shard process was signaled to shutdown with signal {signal}", 1)]
    )
    assert report.culprits == named


def _tried(rank: int) -> str:
    return f"{rank}: WARNING reader: s3://corpus/shard-0{rank} attempt 9/∞: ClientError: An error occurred (503) when calling GetObject"


LIMIT = "slurmstepd: error: *** STEP 7.0 ON g12 CANCELLED AT 2026-07-02T09:00:12 DUE TO TIME LIMIT ***"


def test_ranks_that_all_try_the_same_until_the_jobs_limit_are_not_at_fault(explain_lines: Explain) -> None:
    report = explain_lines(["0: [it 10] loss 7.8", *map(_tried, range(4)), LIMIT])
    assert (report.incident, report.culprits, report.decision) == (True, (), "fix-environment")
    report = explain_lines(["0: [it 10] loss 7.8", *map(_tried, range(4)), "0: [it 20] loss 7.7", LIMIT])
    assert (report.culprits, report.decision) == ((), "restart")


def test_who_had_no_more_batches_makes_the_numbers_unequal(explain_lines: Explain) -> None:
    missed = "[E ProcessGroupGloo.cpp:2880] [Rank 0]: Rank 3 failed to pass monitoredBarrier in 300000 ms"
    report = explain_lines(["loop: rank 3: StopIteration after 148 batches, leaving epoch", missed], world_size=4)
    assert (report.culprits, report.cause_class, report.decision) == ((3,), "unequal_batches", "fix-code")
    report = explain_lines(["loop: rank 2: StopIteration after 148 batches, leaving epoch", missed], world_size=4)
    assert (report.culprits, report.cause_class) == ((3,), "unknown")


@pytest.mark.parametrize(("who", "decision"), [("main process only", "fix-code"), ("all 400 samples", "raise-limit")])
def test_an_evaluation_on_one_rank_only_is_the_programs_fault(explain_lines: Explain, who: str, decision: str) -> None:
    bars = [
        f"[rank0] Evaluating: {at:3}%|#    | {at}/100 [{at // 10:02}:00<09:00,  6.00s/it]" for at in range(10, 110, 10)
    ]
    report = explain_lines([f"[rank0] step 8: running validation ({who})", *bars, *waiting(1, 2, 3)], world_size=4)
    assert (report.culprits, report.decision) == ((0,), decision)


def test_a_quota_that_forbids_a_pod_and_a_driver_too_old_are_the_environments(explain_lines: Explain) -> None:
    waited = "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 3/4 clients joined."
    quota = 'level=warning msg="Error creating: pods \\"sft-worker-2\\" is forbidden: exceeded quota: gpu-quota, requested: requests.nvidia.com/gpu=8"'
    assert explain_lines({"operator.log": [quota], "sft-master-0.log": [waited]}).decision == "fix-environment"
    old = "[rank1]: RuntimeError: The NVIDIA driver on your system is too old (found version 12000)."
    assert explain_lines({"sft-master-0.log": [old], "operator.log": ["ready"]}).decision == "fix-environment"


@pytest.mark.parametrize("error", [["compute.instances.hostError  DONE  2025-06-05T18:19:02.1-00:00"], []])
def test_a_host_whose_machine_failed_is_started_again(explain_lines: Explain, error: list[str]) -> None:
    lost = "E0605 18:20:44.1 140120 coordination_service.cc:1211] /job:jax_worker/replica:0/task:11 has been set to ERROR in coordination service: UNAVAILABLE: Task /job:jax_worker/replica:0/task:11 heartbeat timeout."
    report = explain_lines([lost, *error])
    assert (report.culprits, report.decision) == ((11,), "restart" if error else "unknown")


def test_the_rank_whose_port_is_taken_is_named_and_its_machine_is_to_be_mended(explain_lines: Explain) -> None:
    """It hosts the store; the others time out for want of it."""
    taken = (
        "The server socket has failed to listen on any local network address. port: 29500, code: -98, name: EADDRINUSE"
    )
    lines = ["[rank0]: Traceback (most recent call last):", '[rank0]:   File "t.py", line 20, in <module>',
             f"[rank0]: torch.distributed.DistNetworkError: {taken}, message: address already in use"]  # fmt: skip
    others = [
        f"[rank{rank}]: torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (n1, 29500)."
        for rank in (1, 2, 3)
    ]
    for log in (lines, [*lines, *others], [*others, *lines]):
        report = explain_lines(log, world_size=4)
        assert (report.culprits, report.decision) == ((0,), "fix-environment")
    assert explain_lines(others, world_size=4).culprits == ()


def test_a_traceback_of_another_rank_that_is_printed_again_is_still_that_ranks(explain_lines: Explain) -> None:
    """The rank that could not write, and the first rank, which prints what it was sent of that."""
    full = "OSError: [Errno 28] No space left on device"
    own = ["[rank3]: Traceback (most recent call last):", '[rank3]:   File "/x/w.py", line 3, in w', f"[rank3]: {full}"]
    sent = [line.replace("rank3", "rank0").replace("last):", "last): (RANK 3)") for line in own]
    told = ["[rank0]: torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([3])"]
    for lines in ([*own, *told, *sent], [*own, *sent], [*told, *sent]):
        assert explain_lines(lines, world_size=4).culprits == (3,)
    also = [line.replace("rank3", "rank0") for line in own]
    assert explain_lines([*own, *also], world_size=4).culprits == (0, 3)
    assert explain_lines([*own, *sent[:1], "[rank1]: x", *also], world_size=4).culprits == (0, 3)


def test_the_launchers_table_says_that_a_file_is_of_a_node(explain_lines: Explain) -> None:
    table = [
        "Root Cause (first observed failure):",
        "[0]:",
        "  rank      : 11 (local_rank: 3)",
        "  exitcode  : 1 (pid: 7)",
    ]
    raised = ["Traceback (most recent call last):", '  File "t.py", line 3, in f', "AssertionError: bad"]
    assert explain_lines({"log_rank_15.txt": [*raised, *table]}).culprits != (15,)
    assert explain_lines({"log_rank_15.txt": raised, "log_rank_3.txt": ["step 1"]}, world_size=16).culprits == (15,)


def test_hosts_beside_ranges_of_ranks_in_other_words(explain_lines: Explain) -> None:
    lost = "srun: error: Node failure on {}"
    for told, host in (
        ("nodes: rank 0-3 ip-10-0-2-19, rank 4-7 ip-10-0-2-44", "ip-10-0-2-44"),
        ("driver 10.4.0.11 ranks 0-3, worker 10.4.0.12 ranks 4-7", "10.4.0.12"),
        ("hosts: a-1 slots=4 (ranks 0-3), a-2 slots=4 (ranks 4-7)", "a-2"),
        ("1: SLURM_PROCID=1 host=a-2 -> global ranks 4-7", "a-2"),
    ):
        assert explain_lines([told, "world_size=8", lost.format(host)]).culprits == (4, 5, 6, 7), told


def test_tasks_of_mpirun_say_where_they_are(explain_lines: Explain) -> None:
    told = [f"[1,{n}]<stdout>:hvd rank {n}/4 local {n % 2} on node0{n // 2 + 1}" for n in range(4)]
    lost = [
        "ORTE has lost communication with a remote daemon.",
        "",
        "  HNP daemon   : [[41,0],0] on node node01",
        "  Remote daemon: [[41,0],1] on node node02",
    ]
    assert explain_lines([*told, *lost]).culprits == (2, 3)


def test_a_host_and_its_task_in_front_of_lines(explain_lines: Explain) -> None:
    port = "RuntimeError: The server socket has failed to listen on any local network address. (errno: 98 - Address already in use)."
    lines = [f"a100-0{1 + n // 2}:{n}: | init (rank {n}): env://" for n in range(4)]
    raised = [
        "a100-01:0: Traceback (most recent call last):",
        'a100-01:0:   File "t.py", line 9, in init',
        f"a100-01:0: {port}",
    ]
    assert explain_lines([*lines, *raised, "a100-02:3: RuntimeError: Connection reset by peer"]).culprits == (0,)


def test_who_is_silent_beside_one_that_is_at_work(explain_lines: Explain) -> None:
    late = [line for rank in range(1, 7) for line in timeout(rank, 1)]
    begun, bar = (f"Running tokenizer: {n}%|####| {n}/100 [30:15<01:31, 5.02 examples/s]" for n in (92, 95))
    report = explain_lines([begun, *late, bar], world_size=8)
    assert report.culprits == (0,) and report.suspects == (7,)
    assert explain_lines(late, world_size=8).culprits == (0, 7)


@pytest.mark.parametrize(
    "after",
    [
        "Training:  42%|####| 841/2000 [26:51<37:01, 1.2s/it]",
        "wandb: uploading:  61%|####| 61/100 [01:01<00:39, 1.0it/s]",
    ],
    ids=["the same bar, closed", "another one"],
)
def test_a_bar_that_does_not_go_on_tells_of_no_rank_at_work(explain_lines: Explain, after: str) -> None:
    """The log of the other host is missing, so that half of the ranks are never heard."""
    late = [line for rank in (1, 2, 3) for line in timeout(rank, 1)]
    before = "Training:  42%|####| 841/2000 [16:49<23:11, 1.2s/it]"
    assert explain_lines([before, *late, after], world_size=8).culprits == ()


@pytest.mark.parametrize(("silent", "named"), [((1,), (1,)), ((4, 5, 6, 7), (4, 5, 6, 7))])
def test_a_link_that_was_down_at_boot_accuses_only_a_host_that_nobody_hears(
    explain_lines: Explain, silent: tuple[int, ...], named: tuple[int, ...]
) -> None:
    """A second port is unused on most hosts."""
    hosts = ["gpu-01 ranks 0-3", "gpu-02 ranks 4-7"]
    boot = "Oct 18 08:01:12 gpu-02 kernel: [   22.114523] mlx5_core 0000:3b:00.1 enp59s0f1np1: Link down"
    late = [line for rank in range(8) if rank not in silent for line in timeout(rank, 4412)]
    assert explain_lines([*hosts, boot, *late], world_size=8).culprits == named


def test_logs_of_hosts_in_one_file_are_told_apart_by_their_times(explain_lines: Explain) -> None:
    waited = "[rank1]:[E801 14:37:42.7 ProcessGroupNCCL.cpp:632] " + timeout(1)[0].split("] ", 1)[1]
    own = "[rank4]: 2026-08-01 14:2{}:42 ValueError: bad"
    assert explain_lines([waited, own.format(7)]).culprits == (4,)
    assert explain_lines([waited, own.format(7).replace("14:27", "14:39")]).culprits == ()


def test_a_card_of_one_rank_whose_transfers_fail(explain_lines: Explain) -> None:
    head = "n1:3{}:7 [{}] transport/net_ib.cc:199 NCCL WARN NET/IB : mlx5_3:1 "
    joined = [
        f"n1:3{n}:3{n} [{n}] NCCL INFO comm 0x1 rank {n} nranks 3 cudaDev {n} busId {n}000 - Init COMPLETE"
        for n in range(3)
    ]
    failed = [
        head.format(2, 2) + "Got async event : port error",
        head.format(2, 2) + "Got completion from peer 10.0.0.2<47> with status=12 opcode=1",
    ]
    other = (
        "[rank1]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
    )
    assert explain_lines([*joined, *failed, other]).culprits == (2,)
    assert explain_lines([*joined, failed[1], other]).culprits == ()


def test_an_actor_that_died_in_its_creation_may_have_followed(explain_lines: Explain) -> None:
    died = "ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task, ray::W.__init__() (pid=9, ip=10.0.0.2, repr=W[rank=0])"
    waited = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/8 clients joined."
    assert (
        explain_lines(
            [
                "Traceback (most recent call last):",
                '  File "t.py", line 3, in f',
                died,
                '  File "u.py", line 3, in g',
                waited,
            ]
        ).culprits
        == ()
    )


def test_a_kernel_that_is_still_compiled(explain_lines: Explain) -> None:
    compiles = [
        "[2026-04-17 21:06:02 TP4] DeepGEMM JIT code generation <gemm>",
        "DeepGEMM warmup:  61%|###   | 99/163 [02:55<01:52, 57.0it/s]",
    ]
    gave_up = [f"[2026-04-17 21:09:0{n} TP{n}] RuntimeError: DeepEP error: timeout (dispatch CPU)" for n in range(3)]
    head = "server_args=ServerArgs(tp_size=8, ep_size=8)"
    report = explain_lines({"a.log": [head, *gave_up], "b.log": [head, *compiles]}, world_size=8)
    assert report.culprits == (4,) and report.decision == "raise-limit"
    done = compiles[1].replace("61%", "100%")
    assert explain_lines({"a.log": [head, *gave_up], "b.log": [head, compiles[0], done]}, world_size=8).culprits == ()


def test_two_stacks_of_a_pair(explain_lines: Explain) -> None:
    def stack(rank: int, *frames: str) -> list[str]:
        head = [f"[2026-01-12 09:19:24 TP{rank}] Watchdog timeout (self.watchdog_timeout=300.0, self.soft=False)",
                f"[2026-01-12 09:19:24 TP{rank}] Pyspy dump for PID 118{rank}:", f"Process 118{rank}: sglang::scheduler_TP{rank}",
                f'Thread 118{rank} (active): "MainThread"']  # fmt: skip
        return [*head, *(f"    {frame}" for frame in frames)]

    inside = stack(0, "all_reduce (torch/distributed/distributed_c10d.py:39)", "forward (m.py:4)")
    report = explain_lines(
        ["tp_size=2 world_size=2", *inside, *stack(1, "walk (outlines/fsm.py:3)", "forward (m.py:4)")]
    )
    assert report.culprits == (1,)


def test_somebody_says_that_a_job_stands_still(explain_lines: Explain) -> None:
    stacks = [
        row
        for pid in (41, 42)
        for row in (
            f"Process {pid}: python t.py",
            f'Thread {pid} (active): "MainThread"',
            "    item (m.py:3)",
            "    step (t.py:9)",
        )
    ]
    assert explain_lines(["the 4 gpu run froze again at the end, no error at all", "```", *stacks]).incident


def test_nodes_whose_launcher_was_not_found(explain_lines: Explain) -> None:
    lines = ["srun -N2 bash -c 'torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$SLURM_NODEID t.py'", "n2: bash: line 1: torchrun: command not found",
             "srun: error: n2: task 1: Exited with exit code 127", "n1: torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined."]  # fmt: skip
    assert explain_lines(lines).culprits == (4, 5, 6, 7)


def test_the_kernels_line_behind_lines_of_one_length_is_no_part_of_them(explain_lines: Explain) -> None:
    late = [timeout(rank)[0] for rank in (0, 1, 2)]
    killed = "dmesg: [ 99.1] Out of memory: Killed process 4711 (python) total-vm:99kB"
    report = explain_lines([*late, killed], world_size=16)
    assert report.culprits == ()
    started = [f"rank {n} pid {4700 + n} world_size=16" for n in range(16)]
    assert explain_lines([*started, *late, killed]).culprits == (11,)


def test_ranks_in_front_of_the_lines_of_loggers(explain_lines: Explain) -> None:
    for head in (
        "2026-01-01 10:00:0{0}.1 | ERROR | train:run:50 - [rank {0}/4] ",
        "2026-01-01 10:00:0{0},123 ERROR [rank {0}/4] ",
    ):
        lines = [head.format(n) + "collective timed out" for n in range(3)]
        assert explain_lines(
            [*lines, head.format(3) + "FileNotFoundError: [Errno 2] No such file: '/d/7.bin'"]
        ).culprits == (3,)


def test_the_host_whose_kernel_speaks(explain_lines: Explain) -> None:
    table = [f"rank {8 + n}: cuda:{n} PCI 0000:{n + 10:02d}:00.0 host gpu-b" for n in range(8)]
    lost = "[Mon Jan  5 10:00:00 2026] gpu-b kernel: NVRM: Xid (PCI:0000:15:00): 79, GPU has fallen off the bus."
    assert explain_lines(["world_size=16", *table, timeout(0)[0], lost]).culprits == (13,)
    assert explain_lines(["world_size=16", *table, timeout(0)[0], lost.replace("gpu-b", "gpu-a")]).culprits == ()


def test_the_one_host_whose_link_is_down(explain_lines: Explain) -> None:
    told = ["gpu-c1: ranks 0-7", "gpu-c2: ranks 8-15", "gpu-c3: ranks 16-23"]
    down = "[Mon Jan  5 10:00:00 2026] gpu-c3 kernel: mlx5_core 0000:3b:00.0 ens1: Link down"
    late = [timeout(rank)[0] for rank in range(16)]
    assert explain_lines([*told, down, *late]).culprits == tuple(range(16, 24))
    assert explain_lines([*told, down, down.replace("down", "up"), *late]).culprits == ()
    assert explain_lines([*told, down, down.replace("c3", "c2"), *late]).culprits == ()


def test_processes_and_pods_that_have_ended(explain_lines: Explain) -> None:
    lines = [
        "worker[1] global_rank=10 local_rank=2 host=h1 pid=3302",
        "worker[1] pid 3302 exited: signal 9 (SIGKILL)",
        timeout(0)[0],
    ]
    assert explain_lines(lines).culprits == (10,)
    assert explain_lines(["shell: rank 3 (pid 77) on n1 exited with signal 11"]).culprits == (3,)
    pods = [
        "$ kubectl get pods",
        "job-worker-0 1/1 Running 0",
        "job-worker-2 0/1 OOMKilled 0",
        "$ kubectl logs job-worker-2",
        "RANK=2 WORLD_SIZE=4 LOCAL_RANK=0",
        "$ ls",
        timeout(0)[0],
    ]
    assert explain_lines(pods).culprits == (2,)


def _entry(rank: int, local: int, code: int, first: bool = False) -> list[str]:
    head = ["Root Cause (first observed failure):"] if first else []
    return [
        *head,
        "[0]:",
        "  host      : n2",
        f"  rank      : {rank} (local_rank: {local})",
        f"  exitcode  : {code} (pid: {50 + rank})",
        "  error_file: <N/A>",
        "  traceback : To enable traceback see: x",
    ]


def test_the_ranks_of_a_host_that_lacks_something(explain_lines: Explain) -> None:
    raised = [
        row
        for rank in (4, 6)
        for row in (
            f"[rank{rank}]: Traceback (most recent call last):",
            f'[rank{rank}]:   File "t.py", line 3, in f',
            f"[rank{rank}]: FileNotFoundError: [Errno 2] No such file or directory: '/nvme/d'",
        )
    ]
    table = ["Failures:", *_entry(5, 1, 1), *_entry(6, 2, 1), *_entry(7, 3, -15), *_entry(4, 0, 1, first=True)]
    assert explain_lines([*raised, *table], world_size=8).culprits == (4, 5, 6)
    bad = [row.replace("FileNotFoundError: [Errno 2] No such file or directory", "ValueError: bad") for row in raised]
    assert explain_lines([*bad, *table], world_size=8).culprits == (4, 6), "no fault of a host"
    alone = [row for row in table if "rank      : 6" not in row]
    assert 5 not in explain_lines([*raised, *alone], world_size=8).culprits


def test_one_rank_alone_in_a_call_that_the_others_have_not_come_to(explain_lines: Explain) -> None:
    def heard(rank: int, enqueued: int, completed: int) -> str:
        return f"{prefix(rank)}{pg(rank)}Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."

    assert explain_lines([*timeout(0, 100), *(heard(rank, 99, 99) for rank in (2, 3, 5))], world_size=8).culprits == (
        0,
    )
    assert explain_lines([*timeout(0, 100), *(heard(rank, 99, 98) for rank in (2, 3, 5))], world_size=8).culprits == ()
    assert explain_lines([*timeout(0, 100), heard(2, 99, 99)], world_size=8).culprits != (0,)


def test_a_server_beside_a_job_has_ranks_of_its_own(explain_lines: Explain) -> None:
    trainer = [*timeout(0), *_entry(0, 0, -6, first=True)]
    assigned = "rank {0} in world size 2 is assigned as DP rank 0, PP rank 0, TP rank {0}, EP rank {0}"
    server = [f"(Worker_TP{n} pid=7{n}) INFO {assigned.format(n)}" for n in range(2)]
    server += [
        "(Worker_TP1 pid=71) ERROR 05-06 22:44:02 [w.py:1] Traceback (most recent call last):",
        '(Worker_TP1 pid=71) ERROR 05-06 22:44:02 [w.py:1]   File "m.py", line 3, in load',
        "(Worker_TP1 pid=71) ERROR 05-06 22:44:02 [w.py:1] ValueError: no such parameter",
    ]
    assert explain_lines({"server.log": server}).culprits == (1,)
    report = explain_lines({"trainer.log": trainer, "server.log": server}, world_size=4)
    assert 1 not in report.culprits


def test_stacks_of_processes_whose_environment_was_printed(explain_lines: Explain) -> None:
    def stack(pid: int, frame: str) -> list[str]:
        return [
            f"Process {pid}: python t.py",
            f'Thread {pid} (active): "MainThread"',
            f"    {frame}",
            "    fit (t.py:9)",
        ]

    listed = [row for n in range(1, 4) for row in (f"LOCAL_RANK={n}", f"pid {40 + n}")]
    inside = "all_reduce (torch/distributed/distributed_c10d.py:39)"
    stacks = [*stack(40, inside), *stack(41, inside), *stack(42, inside), *stack(43, "_get_data (data.py:8)")]
    said = "the 4 gpu run froze again at the end, no error at all"
    assert explain_lines([said, "nnodes=1 nproc_per_node=4", *listed, *stacks]).culprits == (3,)
    steps = "# job stuck at step 31 since 02:40, 4 procs on one box, what next"
    ranks = [f"== {40 + n} LOCAL_RANK={n} RANK={n} WORLD_SIZE=4" for n in range(4)]
    assert explain_lines([steps, *ranks, *stacks]).culprits == (3,)


def test_numbers_behind_hosts_that_each_counts_are_no_ranks(explain_lines: Explain) -> None:
    raised = [
        "a-02:0: Traceback (most recent call last):",
        'a-02:0:   File "t.py", line 9, in f',
        "a-02:0: ValueError: bad",
    ]
    both = [f"a-0{host}:{n}: | init" for host in (1, 2) for n in range(2)]
    assert explain_lines([*both, *raised]).culprits == ()
    assert explain_lines(["world_size=8 nnodes=2", *raised]).culprits == ()
    told = [f"a-0{1 + n // 2}:{n}: | init" for n in range(4)]
    assert explain_lines([*told, *(row.replace(":0:", ":3:") for row in raised)]).culprits == (3,)


@pytest.mark.parametrize(
    "told",
    ["tensor-parallel ranks 0-3 of gpu-2 ready", "gpu-2: local ranks 0-3", "data parallel group ranks 4-7 gpu-2 built"],
)
def test_ranges_of_other_numbers_are_no_ranks_of_a_host(explain_lines: Explain, told: str) -> None:
    assert explain_lines([told, "srun: error: Node failure on gpu-2", "world_size=16"]).culprits == ()


def test_several_ranks_that_compile(explain_lines: Explain) -> None:
    bar = "DeepGEMM warmup:  61%|###   | 99/163 [02:55<01:52, 57.0it/s]"
    compiles = [
        row for n in (4, 5) for row in (f"[2026-04-17 21:06:02 TP{n}] DeepGEMM JIT code generation <gemm>", bar)
    ]
    gave_up = [f"[2026-04-17 21:09:0{n} TP{n}] RuntimeError: DeepEP error: timeout (dispatch CPU)" for n in range(3)]
    logs = {"a.log": ["server_args=ServerArgs(tp_size=8)", *gave_up], "b.log": compiles}
    assert explain_lines(logs, world_size=8).culprits == ()


def test_who_says_that_others_did_not_finish_accuses_them(explain_lines: Explain) -> None:
    other = "TP rank 1 could finish the model loading, but there are other ranks that didn't finish loading."
    report = explain_lines(
        [
            "[2025-03-18 08:16:33 TP3] Scheduler hit an exception: Traceback (most recent call last):",
            '  File "loader.py", line 9, in read',
            "OSError: [Errno 5] Input/output error",
            "[2025-03-18 08:22:52 TP1] Scheduler hit an exception: Traceback (most recent call last):",
            '  File "runner.py", line 9, in load',
            f"ValueError: {other} It is likely due to unexpected failures (e.g., OOM) or a slow node.",
        ],
        world_size=4,
    )
    assert report.culprits == (3,), report.summary
