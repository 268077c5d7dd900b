"""What a job survived is no incident, what ended it is one, and a host that is not set up is no fault of the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from explain_logs import timeout

from ncclguard_explain import Report, explain

Explain = Callable[..., Report]

CAUGHT = ["Traceback (most recent call last):", '  File "io.py", line 10, in fetch', "    answer.raise_for_status()",
          "requests.exceptions.HTTPError: 503 Server Error"]  # fmt: skip
RETRY = "WARNING: retrying with backoff"
OOM = "CUDA out of memory. Tried to allocate 4.00 GiB; the batch size is 32 from here on"


@pytest.mark.parametrize(
    "lines",
    [
        [*CAUGHT, RETRY, "step 300 loss 1.9", "{'train_runtime': 600.1, 'train_loss': 0.6}"],
        [OOM, "step 300 loss 1.9", "Training finished, total time 0:33:11"],
        [OOM, "step 300 loss 1.9", "finished training"],
        [
            "botocore.exceptions.ReadTimeoutError: Read timeout on endpoint URL",
            "[rank0] upload failed (attempt 1/5), retrying in 4s",
            "step 300 loss 1.9",
        ],
        ["[rank0] torch.OutOfMemoryError: " + OOM, "step 300 loss 1.9", "{'train_runtime': 600.1, 'train_loss': 0.6}"],
        ["[rank1] torch.OutOfMemoryError: " + OOM, "step 300 loss 1.9", "finished: errors=0 exit_code=0"],
    ],
)
def test_survived_exception_is_no_incident(explain_lines: Explain, lines: list[str]) -> None:
    report = explain_lines(lines)
    assert not report.incident and report.culprits == ()


@pytest.mark.parametrize("ended", [False, True])
def test_a_log_without_an_incident_points_to_hang_unless_the_job_is_over(explain_lines: Explain, ended: bool) -> None:
    report = explain_lines(["step 300 loss 1.9", *(["Training finished, total time 0:33:11"] if ended else [])])
    assert not report.incident
    assert ("`ncclguard hang` on its hosts" in report.summary) is not ended


def test_what_was_survived_is_listed(explain_lines: Explain) -> None:
    report = explain_lines([*CAUGHT, RETRY, *(f"step {n} loss 1.9" for n in range(9))])
    assert not report.incident and report.decision == "unknown"
    assert [one.line for one in report.survived] == [1]
    assert "HTTPError" in report.summary


def _abort(rank: int, size: int, closed: int) -> list[str]:
    place = f"h1:{rank + 5}:{rank + 50} [{rank}] NCCL INFO"
    return [
        f"{place} [Service thread] Connection closed by localRank {closed}",
        f"{place} comm 0x7f rank {rank} nranks {size} cudaDev {rank} busId 1000 - Abort COMPLETE",
    ]


def test_aborts_of_all_ranks_with_nothing_before_are_the_end_of_a_job(explain_lines: Explain) -> None:
    assert not explain_lines([line for rank in range(4) for line in _abort(rank, 4, rank)]).incident


def test_aborts_of_some_ranks_are_an_incident(explain_lines: Explain) -> None:
    assert explain_lines([line for rank in range(3) for line in _abort(rank, 4, rank + 1)]).incident


def test_aborts_of_some_ranks_behind_a_test_that_passed_are_its_end(explain_lines: Explain) -> None:
    lines = [line for rank in range(3) for line in _abort(rank, 4, rank + 1)]
    assert not explain_lines([*lines, "--- PASS: TestTraining (184.11s)", "PASS"]).incident
    assert explain_lines([*lines, "--- FAIL: TestTraining (184.11s)", "FAIL"]).incident


@pytest.mark.parametrize("quoted", ['when it is not, you will see "{}" and the process is killed', "[rank1]: {}"])
def test_a_message_that_somebody_says_one_will_see_has_not_been_seen(explain_lines: Explain, quoted: str) -> None:
    text = "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"
    assert explain_lines([quoted.format(text)]).incident is not quoted.startswith("when")


def test_a_trace_of_zero_3_that_changed_is_no_incident_by_itself(explain_lines: Explain) -> None:
    changed = "Invalidate trace cache @ step 7: expected module 12, but got module 5"
    assert not explain_lines([changed, "step 510 loss 1.9", "saving the final model ..."]).incident
    assert explain_lines(["step 6 loss 2.0", changed]).incident, "it is the last that was heard"
    report = explain_lines([changed, *timeout(0)])
    assert (report.incident, report.cause_class) == (True, "rank_divergence")


def test_a_port_of_nccls_ras_that_is_taken_keeps_nobody_out(explain_lines: Explain) -> None:
    warned = "n1:23:23 [0] ras/client_support.cc:160 NCCL WARN Call to bind failed: Address already in use"
    assert not explain_lines([warned]).incident


def test_a_store_that_is_gone_before_anybody_finished_is_an_incident(explain_lines: Explain) -> None:
    gone = "[rank3]:[W611 02:40:13.0 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=71): Failed to recv, got 0 bytes"
    assert explain_lines(["step 1 loss 2.0", gone]).incident
    assert not explain_lines(["[rank0]: finished training", gone]).incident


@pytest.mark.parametrize("name", ["RuntimeError: [Ran", "RuntimeError: Detected mis"])
def test_an_exception_that_is_cut_in_its_text_names_nobody(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.log").write_text(f"[rank0]: {name}")
    report = explain([str(tmp_path / "a.log")])
    assert report.incident and report.culprits == ()


@pytest.mark.parametrize(
    "lines",
    [
        [*CAUGHT, RETRY],  # it may hang in the second try
        [RETRY, *CAUGHT],
        ["[rank3]: ValueError: bad sample 17", "[rank0]: finished training"],
        ["Training finished, total time 0:33:11", *CAUGHT],
        [*CAUGHT, RETRY, "failed (exitcode: 1) local_rank: 3 (pid: 812917) of binary: /usr/bin/python"],
        [OOM, "finished training", "failed (exitcode: 1) local_rank: 3 (pid: 812917) of binary: /usr/bin/python"],
    ],
)
def test_exception_that_nothing_follows_is_an_incident(explain_lines: Explain, lines: list[str]) -> None:
    assert explain_lines(lines).incident


def test_a_retry_counts_where_an_earlier_one_stood_before_the_exception(explain_lines: Explain) -> None:
    raised = ["[rank2]: Traceback (most recent call last):", "[rank2]: ValueError: bad sample 17"]
    report = explain_lines(["[rank2]: retrying the batch", *raised, "[rank2]: retrying the batch"], world_size=4)
    assert report.culprits == ()


def test_closed_connection_at_the_end_is_no_incident(explain_lines: Explain) -> None:
    lines = [
        "h1:5:60 [0] NCCL INFO comm 0x7f rank 0 nranks 2 - Destroy COMPLETE",
        "h1:5:70 [0] NCCL INFO [Service thread] Connection closed by localRank 0",
    ]
    assert not explain_lines(lines).incident


@pytest.mark.parametrize("end", ["is killed by signal: Killed. ", "is killed by signal: Bus error. "])
def test_killed_loader_names_its_rank_without_a_traceback(explain_lines: Explain, end: str) -> None:
    report = explain_lines([f"[rank1]: RuntimeError: DataLoader worker (pid 20655) {end}"], world_size=4)
    assert report.culprits == (1,) and report.decision == "fix-environment"


def test_loader_that_exits_is_an_incident(explain_lines: Explain) -> None:
    report = explain_lines(
        ["[rank1]: RuntimeError: DataLoader worker (pid(s) 20655) exited unexpectedly"], world_size=4
    )
    assert report.incident and report.culprits == (1,)


def test_loader_that_a_launcher_ended_names_nobody(explain_lines: Explain) -> None:
    report = explain_lines(
        ["[rank1]: RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated. "], world_size=4
    )
    assert report.culprits == ()


def test_one_gpu_for_two_ranks_is_the_code(explain_lines: Explain) -> None:
    lines = [
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, invalid usage",
        "[rank0]: Last error:",
        "[rank0]: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
    ]
    report = explain_lines(lines)
    assert report.culprits == (0, 1) and report.decision == "fix-code"


@pytest.mark.parametrize(
    "line",
    [
        "node1:9:9 [0] enqueue.cc:200 NCCL WARN Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'",
        "[rank1]: RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "[rank1]: RuntimeError: CUDA error: system not yet initialized",
        "3m12s  Warning  Evicted  pod/w-2  The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi",
    ],
)
def test_host_that_is_not_set_up(explain_lines: Explain, line: str) -> None:
    assert explain_lines([line]).decision == "fix-environment"


STEPS = [f"step {n} loss 1.9" for n in range(300, 310)]
STALL = [
    (
        "[1,0]<stderr>:[2021-06-01 10:00:00.1: W horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be "
        "reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds."
    ),
    "[1,0]<stderr>:Missing ranks:",
    "[1,0]<stderr>:2: [HorovodAllreduce_grad_0, HorovodAllreduce_grad_1]",
]
SHUTDOWN = [
    ('[1,0]<stderr>:[2021-06-01 10:05:00.1: E stall_inspector.cc:139] One or more rank (marked by "!") is stalled for longer than '
    "300 seconds. Will shutdown."),
    *(f"[1,{rank}]<stderr>:tensorflow.python.framework.errors_impl.UnknownError: Horovod has been shut down. This was caused by an "
      "exception on one of the ranks" for rank in (0, 1, 3)),
]  # fmt: skip


def test_a_stall_that_ended_is_no_incident_and_one_that_ended_the_job_names_its_rank(explain_lines: Explain) -> None:
    assert not explain_lines([*STALL, *STEPS]).incident
    assert explain_lines([*STALL, *STEPS, *STALL]).culprits == (2,)
    ended = explain_lines([*STALL, *STALL, *SHUTDOWN])
    assert ended.culprits == (2,) and ended.effective_timeout_ms == 300_000
    assert ended.collective is not None and ended.collective.op == "ALLREDUCE"


UNHEALTHY = (
    "[2025-12-03 10:01:24] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
)
PROBE = 'INFO:     10.1.7.7:50230 - "GET /health_generate HTTP/1.1" {}'


def test_a_probe_that_was_answered_later_is_no_incident(explain_lines: Explain) -> None:
    assert explain_lines([UNHEALTHY, PROBE.format("503 Service Unavailable")]).incident
    assert not explain_lines([UNHEALTHY, PROBE.format("503 Service Unavailable"), PROBE.format("200 OK")]).incident


PREEMPTED = "slurmstepd: error: *** JOB 7781 ON n9 CANCELLED AT 2025-02-11T04:00:00 DUE TO PREEMPTION ***"
EVICTED = "3m   Warning  Evicted             pod/llm-worker-1   maintenance drain by ops"
KILLED = "mpirun noticed that process rank 3 with PID 12345 on node gpu1 exited on signal 9 (Killed)."


@pytest.mark.parametrize("event", [PREEMPTED, EVICTED])
def test_a_job_that_began_again_where_it_was_survived_its_planned_end(explain_lines: Explain, event: str) -> None:
    resumed = "Restored all states from the checkpoint at /ck/hpc_ckpt_3.ckpt"
    assert not explain_lines([*STEPS, event, resumed, *STEPS]).incident
    assert explain_lines([*STEPS, event]).incident
    assert explain_lines([*STEPS, event, resumed]).incident  # no step since
    assert explain_lines([*STEPS, event, resumed, *STEPS, KILLED]).incident


LINK = "[Mon Nov  3 04:01:00 2025] mlx5_core 0000:3b:00.0 ens1: Link down"
CORRECTED = "[Mon May  5 02:00:00 2025] NVRM: Xid (PCI:0000:41:00): 63, pid=0, name=<unknown>, Row Remapper: New row marked for remapping"


@pytest.mark.parametrize("event", [LINK, CORRECTED])
def test_what_the_kernel_says_is_survived_where_the_job_is_seen_to_go_on(explain_lines: Explain, event: str) -> None:
    assert not explain_lines([*STEPS, event, *STEPS[:5]]).incident
    assert explain_lines([*STEPS, event]).incident
    assert explain_lines({"dmesg.txt": [event], "train.log": STEPS}).incident  # it may have stopped there
    assert not explain_lines({"dmesg.txt": [event], "train.log": [*STEPS, "finished training"]}).incident


def test_code_that_a_program_was_given_and_ran_raises_for_itself(explain_lines: Explain) -> None:
    sandbox = ["(SandboxWorker pid=918) Traceback (most recent call last):", '(SandboxWorker pid=918)   File "<sandbox>", line 3, in <module>',
               "(SandboxWorker pid=918) MemoryError"]  # fmt: skip
    assert not explain_lines([*sandbox, *STEPS]).incident


STEPS = [f"step {n} loss 1.{n}" for n in range(300, 303)]
RANK_3 = "[rank3]: ValueError: bad sample 17"


@pytest.mark.parametrize(
    "rest", [STEPS[:1] + ["Training complete"], STEPS, ["Training complete"], [*STEPS, "[rank0] Training complete"]]
)
def test_another_ranks_exception_is_survived_only_where_the_job_steps_on_and_ends(
    explain_lines: Explain, rest: list[str]
) -> None:
    assert not explain_lines([RANK_3, *STEPS, "`Trainer.fit` stopped: `max_epochs=2` reached."]).incident
    assert explain_lines([RANK_3, *rest]).culprits == (3,)


REFUSED = (
    "(APIServer pid=1) ERROR 11-21 09:01:44 [serving_chat.py:250] ValidationError: 41022 input tokens are too many"
)


def _served(rate: float) -> list[str]:
    return [
        f"INFO 11-21 09:0{n}:00 [loggers.py:118] Engine 000: Avg prompt throughput: 9.9 tokens/s, Avg generation "
        f"throughput: {rate:.1f} tokens/s, Running: 9 reqs, Waiting: 1 reqs"
        for n in range(2, 6)
    ]


def test_an_engine_that_serves_on_survived_a_refused_request(explain_lines: Explain) -> None:
    assert not explain_lines([REFUSED, *_served(959.8)]).incident
    assert explain_lines([REFUSED, *_served(0.0)]).incident


def _committed(replica: str, step: int) -> str:
    return f"INFO:torchft.manager:[{replica}:aa1f-{replica[-1]}/0 - step {step}] should_commit=True errored=None"


RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:538] Read error [10.32.80.130]:60313: Connection reset by peer"


def test_torchft_replicas_that_all_commit_again_have_healed(explain_lines: Explain) -> None:
    before, after = ([_committed(f"ddp_{n}", step) for n in (0, 1)] for step in (19, 30))
    assert not explain_lines([*before, RESET, *after]).incident
    assert explain_lines([*before, RESET, *after[:1]]).incident


def test_a_quoted_block_is_data_and_an_exception_group_is_not(explain_lines: Explain) -> None:
    quoted = [
        "  | [rank1]: ValueError: bad sample 17",
        "  | NVRM: Xid (PCI:0000:4e:00): 79, GPU has fallen off the bus.",
    ]
    assert not explain_lines(["prompt: summarise", *quoted, *STEPS]).incident
    assert explain_lines(["  + Exception Group Traceback (most recent call last):", *quoted[:1]]).culprits == (1,)


def test_what_comes_again_at_the_end_was_not_survived(explain_lines: Explain) -> None:
    commits = [_committed(f"ddp_{n}", 30) for n in (0, 1)]
    assert explain_lines([RESET, *commits, *STEPS, RESET]).incident
    assert explain_lines([REFUSED, *_served(959.8), REFUSED]).incident


PORT = "n3:5520:5777 [4] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_4:1 Got async event : port error"


def test_a_link_that_came_up_again_is_survived_where_the_jobs_own_log_goes_on_after_the_fault(
    explain_lines: Explain,
) -> None:
    up, other = LINK.replace("Link down", "Link up"), LINK.replace("Link down", "Link up").replace("3b:00", "5d:00")
    assert not explain_lines({"dmesg.txt": [LINK, up], "train.log": [PORT, *STEPS]}).incident
    assert explain_lines({"dmesg.txt": [LINK], "train.log": [PORT, *STEPS]}).incident
    assert explain_lines({"dmesg.txt": [LINK, other], "train.log": [PORT, *STEPS]}).incident
    assert explain_lines({"dmesg.txt": [LINK, up], "train.log": [*STEPS, PORT]}).incident
    assert explain_lines({"dmesg.txt": [LINK, up], "train.log": STEPS}).incident  # it may have stopped there


def test_a_fault_that_is_corrected_by_its_own_words_stops_no_job(explain_lines: Explain) -> None:
    told = CORRECTED.replace("Row Remapper: New row marked for remapping", "correctable, remapped, no action needed")
    assert not explain_lines({"dmesg.txt": [told], "train.log": STEPS}).incident
    assert explain_lines({"dmesg.txt": [told.replace("63", "79")], "train.log": STEPS}).incident


def test_a_scheduler_that_says_that_the_job_is_completed(explain_lines: Explain) -> None:
    ended = "State: COMPLETED (exit code 0)"
    assert not explain_lines([*STEPS, PREEMPTED, *STEPS, ended]).incident
    assert explain_lines([*STEPS, PREEMPTED, *STEPS, ended.replace("COMPLETED", "PREEMPTED")]).incident


def test_a_sample_that_the_loader_left_out(explain_lines: Explain) -> None:
    left_out = [f'WARNING:root:Handling webdataset error ({CAUGHT[-1].split(":")[0]}("x")). Ignoring.', *CAUGHT]
    assert not explain_lines([*left_out, *STEPS[:1], *left_out, *STEPS]).incident
    assert explain_lines([*CAUGHT, *STEPS[:1], *CAUGHT, *STEPS]).incident


WATCHDOG_LINE = "    [rank7]:[E ProcessGroupNCCL.cpp:563] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)"


@pytest.mark.parametrize(
    "lines",
    [
        ["+ cat docs/TROUBLESHOOTING.md", WATCHDOG_LINE, "then a rank did not join.", "+ torchrun train.py", *STEPS],
        ["$ less README.md", "If you see", WATCHDOG_LINE, "$ torchrun train.py", *STEPS],
        ["typical: `CUDA error: out of memory` or a `NCCL WARN NET/IB : Got completion with error 12` (`NVRM: Xid (PCI:0000:3b:00): 79, pid=1`)", *STEPS],
        ["Exception ignored in: <function Pool.__del__ at 0x7f>", "Traceback (most recent call last):", '  File "p.py", line 2, in __del__', "OSError: [Errno 9] Bad file descriptor"],
        ["Error in atexit._run_exitfuncs:", "Traceback (most recent call last):", '  File "p.py", line 2, in f', "ValueError: I/O operation on closed file"],
        [*CAUGHT, "All 8 workers exited with code 0"],
        [*CAUGHT, "srun: job 5512 completed, exit code 0:0"],
        [*CAUGHT, "done, wrote ./out/model.safetensors (exit 0)"],
    ],
)  # fmt: skip
def test_quoted_text_and_what_nobody_sees_are_no_incident(explain_lines: Explain, lines: list[str]) -> None:
    assert not explain_lines(lines).incident


@pytest.mark.parametrize(
    "lines",
    [
        ["+ cat docs/run.log", WATCHDOG_LINE.strip(), "+ exit 1"],
        ["+ cat docs/TROUBLESHOOTING.md", "Good luck.", "+ torchrun train.py", WATCHDOG_LINE.strip()],
        ["Exception ignored in: <function Pool.__del__ at 0x7f>", "OSError: [Errno 9] Bad file descriptor", *CAUGHT],
        ["ValueError: `model_type` of `config.json` is not known"],
        ["[rank1]: ValueError: bad sample", "[rank0]: saved everything (exit 0)"],
        ["[rank1]: ValueError: bad sample", "srun: job 5512 completed, exit code 1:0"],
        ["[rank1]: ValueError: bad sample", "all other ranks finished with exit code 0"],
        ["[rank1]: ValueError: bad sample", "worker 3 is done (exit 0)"],
        ["[rank1]: ValueError: bad sample", "process 3 completed with exit code 0"],
    ],
)
def test_what_stands_beside_a_quotation_counts(explain_lines: Explain, lines: list[str]) -> None:
    assert explain_lines(lines).incident


POLL = "[rank60]:[W1111 11:01:02.110300331 socket.cpp:489] [c10d] waitForInput: poll for socket SocketImpl(fd=60) returned 0, likely a timeout"


@pytest.mark.parametrize("end, calm", [([*STEPS, "[after training is done] datetime: 2025-11-11"], True), ([], False)])
def test_a_poll_of_the_store_that_was_late_is_survived_with_the_job(
    explain_lines: Explain, end: list[str], calm: bool
) -> None:
    assert explain_lines([*STEPS[:1], POLL, *end]).incident is not calm


@pytest.mark.parametrize("last", [0, 1])
def test_a_killed_replica_that_commits_again_is_survived(explain_lines: Explain, last: int) -> None:
    commit = "[{0}] 2026-02-14 14:00:0{1},000 - torchft.manager - INFO - [ddp_{0}:1c2d/0 - step {1}] should_commit=True enough_replicas=True, errored=None"
    killed = "./launch.sh: line 9: 7711 Killed                  torchrun --nproc-per-node 1 train_ddp.py"
    again = [commit.format(number, 5) for number in range(1, 1 + last)]
    report = explain_lines([commit.format(0, 1), commit.format(1, 2), killed, commit.format(0, 4), *again])
    assert report.incident is not bool(last)


TABLE = ["$ sacct -j 90211 -o JobID,State,ExitCode -D", "JobID             State ExitCode", "------------ ---------- --------",
         "90211         PREEMPTED      0:0"]  # fmt: skip


@pytest.mark.parametrize(
    "end, calm",
    [
        (["90211         COMPLETED      0:0", "90211.0       COMPLETED      0:0"], True),
        (["90211   ft    COMPLETED      0:0"], True),
        (["90211|COMPLETED|0:0"], True),  # with -P
        (["90211         FAILED         1:0"], False),
        (["90212         COMPLETED      0:0"], False),  # another job
        ([], False),
    ],
)
def test_a_preempted_job_that_slurm_has_run_again_to_its_end(
    explain_lines: Explain, end: list[str], calm: bool
) -> None:
    taken = ["slurmstepd: error: *** JOB 90211 ON nid01 CANCELLED AT 2025-07-01T20:07:30 DUE TO PREEMPTION ***",
             "srun: error: nid01: tasks 0-3: Terminated"]  # fmt: skip
    report = explain_lines(["0: step 1300 loss 2.4", *taken, "0: step 1400 loss 1.7", "0: done", *TABLE, *end])
    assert report.incident is not calm


LOST = "[2026-04-20 13:03:07 TP{}] Losing connection with prefill instance (bootstrap_addr: 10.1.1.23:8998), 4 requests affected"
BREAKER = "WARN sglang_router_rs::core::circuit_breaker: Circuit breaker state transition: worker=http://10.1.1.23:8000 from={} to={}"
SERVES = "[2026-04-20 13:03:{} TP0] Decode batch, #running-req: 22, #token: 49262, token usage: 0.14, gen throughput (token/s): 818.84, #queue-req: 0"


@pytest.mark.parametrize(
    "lines, calm",
    [
        ([SERVES.format("05"), LOST.format(0), LOST.format(2)], False),
        ([BREAKER.format("Closed", "Open")], False),
        ([LOST.format(0), LOST.format(2), SERVES.format("09")], True),
        ([BREAKER.format("Closed", "Open"), BREAKER.format("Open", "HalfOpen"), BREAKER.format("HalfOpen", "Closed")], True),
        ([BREAKER.format("Closed", "Open"), BREAKER.format("Open", "HalfOpen"), BREAKER.format("HalfOpen", "Open")], False),
    ],
)  # fmt: skip
def test_an_instance_that_only_the_others_tell_of_is_an_incident_until_they_go_on(
    explain_lines: Explain, lines: list[str], calm: bool
) -> None:
    report = explain_lines(lines)
    assert report.incident is not calm and report.culprits == ()
    assert calm or "10.1.1.23" in report.reason


def test_errors_in_samples_of_a_language_model_are_no_incident(explain_lines: Explain) -> None:
    errors = ["srun: error: node17: task 9: Killed", "[rank3]: ValueError: bad sample 17"]
    steps = [f"step {step} | train loss 2.{step} | 8 ranks" for step in (300, 350)]
    assert not explain_lines([steps[0], *(f"  >>>   {row}" for row in errors), steps[1]]).incident
    assert explain_lines([steps[0], *errors, steps[1]]).incident


def test_a_node_that_ray_removed_is_survived_where_its_command_says_that_the_job_succeeded(
    explain_lines: Explain,
) -> None:
    gone = (
        "(raylet) The node with node id: 4d5e and address: 10.1.0.4 and node name: 10.1.0.4 has been marked dead because the "
        "detector has missed too many heartbeats from it."
    )
    end = "2026-01-10 09:40:00,000 {} cli.py:65 -- Job 'raysubmit_81aa' {}"
    assert not explain_lines(["epoch=0 rank=1 loss=0.17", gone, end.format("SUCC", "succeeded")]).incident
    assert explain_lines(["epoch=0 rank=1 loss=0.17", gone, end.format("ERR", "failed")]).incident


SERVER = "(APIServer pid=1) INFO 07-01 1{}:00:10 [loggers.py:236] Engine 000: Avg generation throughput: 8{}.0 tokens/s"
ANSWER = 'INFO:     10.0.0.9:0 - "GET /health HTTP/1.1" 200 OK'


def test_a_server_that_answers_a_probe_and_serves_on_survived_an_error(explain_lines: Explain) -> None:
    refused = "(APIServer pid=1) ERROR 07-01 10:00:05 [serving_chat.py:290] RuntimeError: the request was cut off"
    assert not explain_lines([refused, SERVER.format(0, 1), ANSWER, SERVER.format(1, 2)]).incident
    assert explain_lines([refused]).incident


@pytest.mark.parametrize("after, calm", [([SERVES.format(20)], True), ([], False)])
def test_a_transfer_between_engines_that_was_not_complete_in_time(
    explain_lines: Explain, after: list[str], calm: bool
) -> None:
    line = "E0707 10:00:10.1 transfer_engine_py.cpp:401] Failed to complete transfers after 30 seconds"
    report = explain_lines([SERVES.format("05"), line, *after])
    assert report.incident is not calm and report.culprits == ()


GOES_ON = [f"2026-03-03 10:00:{at}0 step {100 + 10 * at} loss 2.1" for at in range(6)]
CORRUPT = "2026-03-03 10:00:{}5 [rank3] OSError: broken data stream when reading image file"


@pytest.mark.parametrize(
    "at, calm",
    [(2, True), (3, False), (5, False)],  # after the third step but last, one may be in flight
)
def test_a_rank_that_raised_while_the_job_steps_on_has_caught_it(explain_lines: Explain, at: int, calm: bool) -> None:
    report = explain_lines([*GOES_ON[: at + 1], CORRUPT.format(at), *GOES_ON[at + 1 :]])
    assert report.incident is not calm and report.culprits == (() if calm else (3,))


@pytest.mark.parametrize("before, calm", [([0, 1], True), ([], False), ([5], False)])
def test_steps_without_a_time_are_later_where_they_go_on_from_those_above(
    explain_lines: Explain, before: list[int], calm: bool
) -> None:
    steps = [row.partition(" step")[2] for row in GOES_ON]
    lines = [f"[rank3] step{steps[at]}" for at in before] + ["[rank3] OSError: broken data stream"]
    report = explain_lines([*lines, *(f"[rank0] step{row}" for row in steps[2:])])
    assert report.incident is not calm


def test_what_others_wrote_of_their_changes_is_no_incident(explain_lines: Explain) -> None:
    log = [
        "$ git log --oneline",
        "b2c3d4e handle torch.distributed.DistBackendError: NCCL error, unhandled system error",
    ]
    assert not explain_lines([*log, "$ torchrun train.py", *GOES_ON]).incident
    assert explain_lines([*log, "$ torchrun train.py", "[rank1]: ValueError: bad sample"]).culprits == (1,)


@pytest.mark.parametrize("steps, calm", [(6, True), (4, False)])
def test_the_end_of_a_rank_that_the_job_steps_over_is_survived(explain_lines: Explain, steps: int, calm: bool) -> None:
    end = "2026-03-03 10:00:25 [launcher] rank 3 (pid 812) was killed by signal 9"
    report = explain_lines([*GOES_ON[:3], end, *GOES_ON[3:steps]])
    assert report.incident is not calm and report.culprits == (() if calm else (3,))


PROBED = "CUDA out of memory. Tried to allocate 7.81 GiB. GPU 0 has a total capacity of 39.39 GiB"


@pytest.mark.parametrize("bars, incident", [(2, False), (0, True)])
def test_memory_that_a_search_for_a_batch_size_lacks_is_no_incident_where_the_epochs_go_on(
    explain_lines: Explain, bars: int, incident: bool
) -> None:
    epochs = [
        f"      {n + 1}/100      19.9G      1.32   412   640: 100%|████| 370/370 [01:11<00:00,  5.18it/s]"
        for n in range(bars)
    ]
    run = ["DDP: debug command python -m torch.distributed.run --nproc_per_node 4 _temp.py"]
    assert explain_lines([PROBED, "AutoBatch: Using batch-size 80", *run, *epochs]).incident is incident


@pytest.mark.parametrize("told", [True, False])
def test_an_engine_that_its_server_shuts_down_has_not_failed(explain_lines: Explain, told: bool) -> None:
    lines = [
        '(APIServer pid=11) INFO:     10.0.4.1:39112 - "GET /health HTTP/1.1" 200 OK',
        *(["(APIServer pid=11) INFO:     Shutting down"] if told else []),
        (
            "(EngineCore_DP0 pid=81) (Worker_TP1 pid=92) INFO 03-02 05:00:03 [multiproc_executor.py:558] Parent process exited, "
            "terminating worker"
        ),
    ]
    assert explain_lines(lines).incident is not told


def test_an_exception_inside_of_code_that_a_program_runs_as_text_is_none_of_the_job(explain_lines: Explain) -> None:
    lines = [
        "[rank2] HumanEval/18 sample 7: failed", "Traceback (most recent call last):", '  File "execute.py", line 118, in unsafe_execute',
        "    exec(check_program, exec_globals)", '  File "<string>", line 22, in check', "IndexError: string index out of range",
    ]  # fmt: skip
    assert not explain_lines(["Running humaneval on 8 ranks", *lines]).incident
    assert explain_lines(["Running humaneval on 8 ranks", *lines[:4], lines[5]]).incident


def test_a_connection_that_is_tried_again_is_no_incident_where_steps_follow(explain_lines: Explain) -> None:
    gone = ["Traceback (most recent call last):", '  File "client.py", line 287, in _read_status', "    raise RemoteDisconnected()",
            "http.client.RemoteDisconnected: Remote end closed connection without response"]  # fmt: skip
    steps = [f"step {n}00 loss 2.1 tok/s 41233" for n in (1, 2, 3)]
    retry = "wandb: Network error (ConnectionError), entering retry loop."
    assert not explain_lines(["8 ranks", *gone, retry, *steps]).incident


@pytest.mark.parametrize(
    "last, incident",
    [("iter 50000/50000 done, test acc 0.77", False), ("finished, cleaning up", False), ("iter 300/50000 done", True)],
)
def test_a_store_that_is_gone_behind_the_last_step_is_no_incident(
    explain_lines: Explain, last: str, incident: bool
) -> None:
    lost = (
        '[rank{0}]:[W611 21:40:18.1 ProcessGroupNCCL.cpp:1662] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Failed to check the "should dump" '
        "flag on TCPStore, (maybe TCPStore server has shut down too early), with error: failed to recv, got 0 bytes"
    )
    assert explain_lines([f"[rank0]: {last}", *(lost.format(rank) for rank in (1, 2, 3))]).incident is incident


WRITTEN = ["[rank2]: Traceback (most recent call last):", '[rank2]:   File "/app/train.py", line 10, in <module>', "[rank2]:     Config(lrr=1)",
           '[rank2]:   File "<string>", line 9, in __init__', "[rank2]: TypeError: Config.__init__() got an unexpected keyword argument 'lrr'"]  # fmt: skip
STEPPED = ["torchrun --nproc_per_node 4 train.py", "step 1 loss 2.1", "step 2 loss 2.1", "step 3 loss 2.0", "ValueError: bad", "step 4 loss 2.0", "step 5 loss 2.0"]  # fmt: skip
ENGINE = ["(ProxyActor pid=44) INFO:     Shutting down", "(EngineCore_DP0 pid=81) ERROR 03-02 05:09:02 [core.py:700] EngineCore encountered a fatal error.",
          "(EngineCore_DP0 pid=81) TimeoutError: RPC call to sample_tokens timed out."]  # fmt: skip


@pytest.mark.parametrize("lines", [WRITTEN, STEPPED, ENGINE])
def test_what_only_looks_survived_is_an_incident(explain_lines: Explain, lines: list[str]) -> None:
    assert explain_lines(lines).incident


STEPS = [f"[2025-02-03 04:1{n}:00] iteration {n + 10}/ 500 | lm loss: 2.{n}" for n in range(6)]
KERNEL = {
    "a row of memory to be remapped": "[Mon Feb  3 04:12:10 2025] NVRM: Xid (PCI:0000:b1:00): 63, pid='<unknown>', "
    "name=<unknown>, Row Remapper: New row marked for remapping, reset gpu to activate.",
    "a notebook": "[Mon Feb  3 04:12:10 2025] Memory cgroup out of memory: Killed process 771 (jupyter-lab) total-vm:4kB",
}


@pytest.mark.parametrize("told", KERNEL.values(), ids=KERNEL)
def test_what_the_kernel_tells_of_others_is_no_incident_of_a_job_that_steps_on(
    explain_lines: Explain, told: str
) -> None:
    assert not explain_lines({"train.log": STEPS, "dmesg.txt": [told]}).incident
    assert explain_lines(
        {"train.log": STEPS, "dmesg.txt": [told.replace("jupyter-lab", "python3").replace("63,", "79,")]}
    ).incident


def test_a_node_that_cannot_close_the_rendezvous_at_its_end_is_no_incident(explain_lines: Explain) -> None:
    lines = [
        *STEPS,
        "I0618 16:10:01.000000 21 torch/distributed/elastic/agent/server/api.py:879] [default] worker group successfully finished.",
        "W0618 16:10:03.000000 21 dynamic_rendezvous.py:1267] The node 'n02_21_0' has failed to shutdown the rendezvous 'none' due to an error of type RendezvousConnectionError.",
    ]
    assert not explain_lines(lines).incident


def test_a_torch_that_lacks_libuv_is_a_fault_of_the_environment(explain_lines: Explain) -> None:
    lines = ["Traceback (most recent call last):", '  File "run.py", line 66, in next_rendezvous', "    self._store = TCPStore(",
             "torch.distributed.DistStoreError: use_libuv was requested but PyTorch was built without libuv support, run with USE_LIBUV=0 to disable it."]  # fmt: skip
    report = explain_lines(lines)
    assert (report.incident, report.culprits, report.decision) == (True, (), "fix-environment")


@pytest.mark.parametrize("end", ["Killed", "Segmentation fault (core dumped)", "Bus error (core dumped)"])
def test_a_program_that_its_shell_saw_die_has_not_gone_on(explain_lines: Explain, end: str) -> None:
    logs = {"train.log": [*STEPS, end], "dmesg.txt": [KERNEL["a row of memory to be remapped"]]}
    assert explain_lines(logs).incident


@pytest.mark.parametrize("steps", [True, False])
def test_hosts_with_one_address_of_their_own_are_no_incident_where_the_job_steps(
    explain_lines: Explain, steps: bool
) -> None:
    logs = {f"{host}.log": [f"{host}:7:7 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>", *(STEPS if steps else [])]
            for host in ("a1", "b1")}  # fmt: skip
    assert not explain_lines(logs).incident


def test_a_requeue_that_the_job_asked_for_is_over_once_it_steps_again(explain_lines: Explain) -> None:
    before = ["INFO resume from /ck/step_061500 (requeue #3)", "INFO step 61500 loss 2.3", "INFO step 62200 loss 2.2"]
    requeue = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2025-02-04T03:50:54 DUE TO JOB REQUEUE ***"
    after = ["INFO resume from /ck/step_062300 (requeue #4)", "INFO step 62310 loss 2.1", "INFO step 62320 loss 2.1"]
    assert not explain_lines([*before, requeue, *after]).incident
    assert explain_lines([*before, requeue, after[0]]).incident


def test_a_server_of_engines_that_was_interrupted(explain_lines: Explain) -> None:
    ends = "(Worker_TP{0} pid=46{0}) INFO 11-20 18:05:40 [multiproc_executor.py:558] Parent process exited, terminating worker"
    shuts = "(APIServer pid=4) INFO 11-20 18:05:40 [launcher.py:110] Shutting down FastAPI HTTP server."
    load = "INFO 11-20 18:00:12 [loggers.py:127] Engine 000: Avg generation throughput: 12.2 tokens/s, Running: {} reqs, Waiting: 0 reqs"
    after = [shuts, ends.format(0), ends.format(1)]
    assert not explain_lines([load.format(0), *after]).incident
    assert explain_lines([load.format(3), *after]).incident, "it may have hung"
    assert explain_lines([load.format(3), load.format(0), load.format(3), *after]).incident
    assert explain_lines([load.format(3), load.format(0).replace("000", "001"), *after]).incident, "one of two engines"
    assert not explain_lines([load.format(3), f"^C{shuts[21:]}", *after[1:]]).incident
    assert explain_lines(after).incident


def test_a_microbatch_that_composer_finds_by_trying(explain_lines: Explain) -> None:
    raised = "rank3[208868][MainThread]: INFO: composer.trainer.trainer: Train microbatch size 32 raised: CUDA out of memory. Tried to allocate 5.66 GiB."
    smaller = "rank0[208865][MainThread]: WARNING: composer.trainer.trainer: CUDA out of memory detected. Train microbatch size will be decreased from 32 -> 16."
    assert not explain_lines([raised, smaller, "[batch=13/39]:", "[batch=17/39]:"]).incident
    assert explain_lines(["[rank2]: Train microbatch size 8 raised: IndexError: list index out of range"]).incident


def test_exceptions_of_a_service_in_java(explain_lines: Explain) -> None:
    assert not explain_lines(["rank 3 of 4 candidates scored", "java.util.concurrent.TimeoutException: null"]).incident


ENDED = [
    "W1120 10:00:00.000000 100 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 101 closing signal SIGTERM",
    "Traceback (most recent call last):", '  File "/x/api.py", line 3, in run',
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 100 got signal: 15",
]  # fmt: skip
RAY_KILLS = "2026-11-20 18:16:01 INFO tune_controller.py -- actor of a_1: The actor is dead because it was killed by `ray.kill`."
WORKER_DIED = "2026-11-20 10:20:04 WARNING worker.py:1072 -- A worker died or was killed while executing task ffff{}."
PRUNED = "[rank{0}]: Traceback (most recent call last):|[rank{0}]:   File 't.py', line 3, in fit|[rank{0}]: optuna.exceptions.TrialPruned"


@pytest.mark.parametrize(
    "lines",
    [
        ["2026-11-20 INFO -- Trial train_1 terminated after iteration 3 by ASHAScheduler", *ENDED],
        [*ENDED, "Trial 7: PRUNED (median rule)"],
        ["wandb: Sweep Agent: run 7 early stopped", *ENDED],
        ["[hpo] run 17: loss 3.1 > median 2.2 -> stopping early", *ENDED, "[hpo] run 18 started"],
        ["DEBUG async_hyperband.py:203 -- ASHA decision for a1: STOP", *ENDED],
        ["Trial 12 interrupted: below the median", "[rank0]: Received SIGTERM: 15", *ENDED],
        ["scheduler: stopping trial t9 at rung 2", "srun: error: gpu-3: tasks 0-3: Terminated"],
        [row for rank in (0, 1) for row in PRUNED.format(rank).split("|")],
        [
            "Trial a_1 completed after 2 iterations at 2026-11-20 18:16:00. (stopped by scheduler)",
            RAY_KILLS,
            WORKER_DIED.format(""),
        ],
        [WORKER_DIED.format(""), "Trial status: 24 TERMINATED"],
        ["trial_7 STOPPED", "[rank0]: lightning.fabric.utilities.exceptions.SIGTERMException: stop"],
    ],
)
def test_a_trial_that_a_tuner_stops_on_purpose_is_no_incident(explain_lines: Explain, lines: list[str]) -> None:
    assert not explain_lines(["[rank0]: epoch 1", *lines]).incident
    raised = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "t.py", line 3, in f',
        "[rank1]: ValueError: x",
    ]
    assert explain_lines([*lines, *raised]).culprits == (1,), "another trial fails"
    assert explain_lines([*lines, WORKER_DIED.format(" by an unexpected system error: exit code 139")]).incident
    assert explain_lines([*lines, "srun: error: gpu-3: task 2: Killed"]).incident
    assert explain_lines([*lines, *timeout(0)]).incident


@pytest.mark.parametrize(
    "line",
    ["Trial train_1 errored after 3 iterations", "Trial 3 stopped: its worker crashed", "Trial 4 terminated: out of memory",
     "model pruned to 50 % sparsity", "Trial 4 finished with value: 0.3", "Trial 4 was stopped because of preemption"],
)  # fmt: skip
def test_what_tells_of_no_purpose_excuses_no_end(explain_lines: Explain, line: str) -> None:
    assert explain_lines([line, *ENDED]).incident


def test_a_trial_stopped_long_ago_excuses_no_end(explain_lines: Explain) -> None:
    assert explain_lines(["Trial 1 pruned", *["x y"] * 300, *ENDED]).incident
    assert explain_lines([*ENDED, *["x y"] * 80, "Trial 9 pruned"]).incident
    assert explain_lines(ENDED).incident


TRAINED = [f"step {n}: reward=0.4{n} sync=3.2s rollout_engines=8/8" for n in range(70, 79)]
BROKEN_ENGINE = (
    "(SGLangEngine pid=88) [2026-04-01 03:00:00] Scheduler hit an exception: torch.AcceleratorError: CUDA error: an "
    "illegal memory access was encountered"
)


@pytest.mark.parametrize("steps_behind", [0, 1, 5])
def test_an_engine_that_breaks_is_no_incident_when_the_trainer_steps_on(
    explain_lines: Explain, steps_behind: int
) -> None:
    report = explain_lines([*TRAINED[:4], BROKEN_ENGINE, *TRAINED[4 : 4 + steps_behind]])
    assert report.incident is (steps_behind < 3)


BEGUN_AGAIN = ["resuming from /data/run9/it4100", *(f"it={n} loss=2.1" for n in range(4100, 4104))]
TAKEN = "slurmstepd: error: *** STEP 77.0 ON a01 CANCELLED AT 2026-01-30T02:00:00 DUE TO PREEMPTION ***"
TOLD_TO_END = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4410 got signal: 15"


@pytest.mark.parametrize("end", [TAKEN, TOLD_TO_END])
def test_a_planned_end_is_no_incident_once_the_job_has_resumed(explain_lines: Explain, end: str) -> None:
    assert not explain_lines(["it=4000 loss=2.2", end, *BEGUN_AGAIN]).incident
    assert explain_lines(["it=4000 loss=2.2", end]).incident
    assert explain_lines([*BEGUN_AGAIN, end]).incident


def test_a_signal_that_says_a_fault_is_no_planned_end(explain_lines: Explain) -> None:
    assert explain_lines(["it=4000 loss=2.2", TOLD_TO_END.replace("15", "11"), *BEGUN_AGAIN[:2]]).incident


TOO_LARGE = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.00 GiB."
STATISTICS = ["Study statistics: ", "  Number of finished trials:  24", "  Number of failed trials:  {}"]


@pytest.mark.parametrize(
    ("end", "incident"),
    [
        ([line.format(0) for line in STATISTICS], False),
        ([line.format(1) for line in STATISTICS], True),
        (["Trial status: 16 TERMINATED"], False),
        (["Trial status: 15 TERMINATED | 1 ERROR"], True),
        (["sweep finished, exit code 0"], False),
        (["sweep finished, exit code 1"], True),
    ],
)
def test_a_study_that_ends_well_has_survived_its_trials(explain_lines: Explain, end: list[str], incident: bool) -> None:
    assert explain_lines([TOO_LARGE, "[sweep] next trial", *end]).incident is incident


@pytest.mark.parametrize("asked", ["^C", ""])
def test_a_busy_server_that_is_interrupted_has_ended_in_order(explain_lines: Explain, asked: str) -> None:
    report = explain_lines(
        [
            "(APIServer pid=1) INFO 05-20 07:54:12 [loggers.py:236] Engine 000: Avg prompt throughput: 697.1 tokens/s, Running: 32 reqs, Waiting: 2 reqs",
            f"{asked}(APIServer pid=1) INFO 05-20 08:00:00 [launcher.py:110] Shutting down FastAPI HTTP server.",
            "(Worker_TP1 pid=141) INFO 05-20 08:00:00 [multiproc_executor.py:739] Parent process exited, terminating worker",
        ]
    )
    assert report.incident is not bool(asked)


BARS = [f"Epoch 3:  {n}%|#####     | {n}/100 [00:{n:02d}<00:09,  1.00it/s]" for n in (10, 20, 30, 40, 50, 60, 70, 80)]
SENT = [
    "[rank2]: Traceback (most recent call last):",
    '[rank2]:   File "m.py", line 3, in send',
    "[rank2]: OSError: no route",
]


def test_bars_tell_of_steps_too(explain_lines: Explain) -> None:
    assert not explain_lines([*BARS[:2], *SENT, *BARS[2:]]).incident
    assert explain_lines([*BARS, *SENT]).culprits == (2,)
    assert explain_lines(["\r".join(BARS), *SENT, "srun: error: n1: task 2: Exited with exit code 1"]).incident


def test_what_a_warning_tells_of_is_caught(explain_lines: Explain) -> None:
    told = "2026-03-01 10:00:00 WARNING ckpt: cannot read step_90: RuntimeError: bad magic number"
    on = [f"step {n} loss 1.1" for n in (80, 90, 99)]
    assert not explain_lines([told, *on]).incident
    assert explain_lines([told, on[0]]).incident, "a step may be in flight"
    assert explain_lines([told.replace("WARNING", "ERROR"), *on]).incident
    assert explain_lines([told]).incident, "nothing goes on"


@pytest.mark.parametrize(
    "end", ["scaling deployment a from 3 to 1 replicas", "received SIGTERM (rolling update), shutting down gracefully"]
)
def test_an_end_that_was_planned(explain_lines: Explain, end: str) -> None:
    rest = [
        "asyncio.exceptions.CancelledError",
        "[rank1]:[W1 TCPStore.cpp:125] recvValue failed on SocketImpl(fd=3): Failed to recv, got 0 bytes.",
    ]
    assert not explain_lines([f"INFO {end}", *rest]).incident
    assert explain_lines([f"INFO {end}", *rest, "[rank1]: ValueError: bad"]).incident
    assert explain_lines([*timeout(3), f"INFO {end}", *rest]).incident
    assert explain_lines([f"INFO spot node lost: {end}", "torch.OutOfMemoryError: CUDA out of memory"]).incident


def test_scenarios_that_pass(explain_lines: Explain) -> None:
    assert not explain_lines(["inject: kill rank 3", *timeout(1), "2 scenarios passed, 0 failed"]).incident
    assert explain_lines(["inject: kill rank 3", *timeout(1), "1 scenarios passed, 1 failed"]).incident


def test_a_program_that_is_interrupted_while_it_steps(explain_lines: Explain) -> None:
    ended = [
        "^CTraceback (most recent call last):",
        '  File "t.py", line 9, in main',
        "    step()",
        "KeyboardInterrupt",
    ]
    steps = [f"step {n} loss 1.{n}" for n in range(5)]
    assert not explain_lines([*steps, *ended], world_size=4).incident
    waits = [ended[0], '  File "/x/ray/_private/worker.py", line 2, in get_objects', ended[3]]
    assert explain_lines([*steps, *waits], world_size=4).incident
    assert explain_lines(ended, world_size=4).incident


def test_the_first_lines_of_a_log_without_ranks_are_its_earliest(explain_lines: Explain) -> None:
    tried = ["trying batch size 64", "CUDA out of memory. Tried to allocate 20.00 GiB", "ok: batch size 32"]
    steps = [f"step {n} loss 1.{n}" for n in range(9)]
    assert not explain_lines([*tried, *steps]).incident
    assert explain_lines([*tried, *steps[:3]]).incident
    assert explain_lines(["[rank2]: ValueError: bad", *steps]).culprits == (2,)


def test_a_connection_that_is_tried_anew(explain_lines: Explain) -> None:
    read = "S3 read s3://d/7.tar failed: Connection reset by peer, retry 1/8 in 0.5s"
    oom = "CUDA out of memory. Tried to allocate 4.88 GiB"
    steps = ["epoch 0 loss 2.1", "epoch 1 loss 1.8", "epoch 2 loss 1.6", "training complete"]
    ranks = [f"[rank{n}]: torch.OutOfMemoryError: {oom}" for n in range(2)]
    assert not explain_lines(
        [*ranks, "[rank0]: batch 64 does not fit on all ranks, retrying with 32", read, *steps]
    ).incident
    assert explain_lines([*ranks, "[rank0]: retrying with 32", read]).incident


def test_a_job_that_begins_again_where_it_was_and_steps_on(explain_lines: Explain) -> None:
    waited = "[RankMonitorServer:3] Did not get subsequent heartbeat. Waited 300.00 seconds."
    steps = [f"step {n} loss 1.{n}" for n in range(900, 909)]
    assert not explain_lines([waited, "resuming from step 900", *steps]).incident
    assert explain_lines([waited, "resuming from step 900", *steps[:3]]).incident
    assert explain_lines([waited, "resuming from step 900", *steps, *timeout(3)]).incident


def test_the_whole_traceback_that_nobody_sees(explain_lines: Explain) -> None:
    ignored = [
        "Exception ignored in: <function S.__del__ at 0x7f>",
        "Traceback (most recent call last):",
        '  File "z.py", line 3, in __del__',
        "zmq.error.ZMQError: not a socket",
    ]
    assert not explain_lines(["step 1 loss 2", *ignored]).incident
    assert explain_lines(["step 1 loss 2", *ignored[1:]]).incident


def test_nccl_warns_of_what_it_does_instead(explain_lines: Explain) -> None:
    said = "gpu01:7003:7425 [2] graph/search.cc:1140 NCCL WARN Could not find a path for pattern 4{}"
    assert not explain_lines(
        [said.format(", falling back to simple order"), "# Avg bus bandwidth    : 187.114"]
    ).incident
    assert explain_lines([said.format("")]).incident
