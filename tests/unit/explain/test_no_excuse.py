"""No step, no end of one process and no word on an end excuses what several ranks, or their launcher, have told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from explain_logs import timeout

from ncclguard_explain import Report

Explain = Callable[..., Report]

STEPS = [f"step {n} loss 1.{n}" for n in range(40, 44)]
ON = [f"step {n} loss 1.{n}" for n in range(44, 53)]
LATE = [row for rank in (0, 1, 2) for row in timeout(rank, 44)]
RAISED = [
    "[rank3]: Traceback (most recent call last):",
    '[rank3]:   File "/app/train.py", line 20, in save',
    "[rank3]: OSError: [Errno 122] Disk quota exceeded",
]
IN_BARRIER = [
    "[rank{0}]: Traceback (most recent call last):",
    '[rank{0}]:   File "/opt/x/torch/distributed/distributed_c10d.py", line 4551, in barrier',
    "[rank{0}]: KeyboardInterrupt",
]
TABLE = "E1103 10:12:09.3 418 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: {}) local_rank: 3 (pid: 4188) of binary: /x"
CLOSED = "[rank{}]: RuntimeError: [/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.2.4.1]:4188"


@pytest.mark.parametrize("rest", [ON, ["exit code: 0"], ["[rank3]: WARNING skipping batch", *ON]])
def test_limits_of_several_ranks_are_not_survived(explain_lines: Explain, rest: list[str]) -> None:
    assert explain_lines([*STEPS, *LATE, *rest]).incident
    assert explain_lines([*STEPS, *RAISED, "exit code: 0"]).culprits == (3,), "of tee, perhaps"
    assert not explain_lines([*STEPS, *LATE, "All 4 workers exited with code 0"]).incident, "of all ranks"


@pytest.mark.parametrize(
    "told",
    [
        "^C",
        "Detected KeyboardInterrupt, attempting graceful shutdown ...",
        "server: received SIGINT, shutting down gracefully",
    ],
)
def test_an_interrupt_in_a_collective_is_an_incident(explain_lines: Explain, told: str) -> None:
    assert explain_lines([*STEPS, told, *(row.format(n) for n in (1, 3) for row in IN_BARRIER)]).incident


@pytest.mark.parametrize(
    "word",
    [
        "INFO trainer: graceful shutdown on SIGTERM enabled",
        "signal handler: graceful stop at the next step",
        "motd: planned maintenance of the login servers on 2026-01-12",
        "controller: draining connections of service chat-v1",
        "loader: prefetch queue drained",
    ],
)
def test_a_word_on_ends_that_tells_the_job_nothing_excuses_none(explain_lines: Explain, word: str) -> None:
    ended = ["srun: error: g7: tasks 0-3: Terminated"]
    assert explain_lines([word, *ended]).incident
    assert explain_lines(["INFO received SIGTERM, shutting down gracefully", *STEPS, *ended]).incident, "steps between"
    assert explain_lines([*STEPS, word, CLOSED.format(1), CLOSED.format(2)]).incident


def test_a_program_that_gives_up_has_not_been_told_to_end(explain_lines: Explain) -> None:
    told = "INFO received SIGTERM, shutting down gracefully"
    for end, incident in (("loss is nan at step 41", True), ("143", False)):
        assert explain_lines([told, *RAISED[:2], f"[rank3]: SystemExit: {end}"]).incident is incident


@pytest.mark.parametrize(
    "check",
    [
        "epilog g7: node health: 14 checks passed, 0 failed",
        "dcgmi diag -r 1: 9 tests passed, 0 failed, 0 skipped",
        "lint: 212 files passed, 0 failed",
        "9 tests passed, 0 failed",
    ],
)
def test_a_check_behind_a_job_that_failed_says_nothing_of_it(explain_lines: Explain, check: str) -> None:
    assert explain_lines([*STEPS, *RAISED, TABLE.format(1), check]).culprits == (3,)
    assert explain_lines([*STEPS, *LATE, check]).incident


DONE = "{}: [2025-11-03 10:02:3{},100] [INFO] [launch.py:347:main] Process 8811{} exits successfully."


def test_the_good_end_of_one_process_is_its_own(explain_lines: Explain) -> None:
    there = ["w0: [2025-11-03 09:31:00,100] [INFO] [launch.py:164:main] nnodes=1, num_local_procs=4, node_rank=0"]
    raised = [f"w0: {row}" for row in RAISED]
    done = [DONE.format("w0", n, n) for n in range(4)]
    assert explain_lines([*there, *raised, done[0]]).culprits == (3,)
    assert explain_lines([*RAISED, *(row[4:] for row in done[:2])]).culprits == (3,), "two of four or more"
    failed = "w0: [2025-11-03 10:02:11,700] [ERROR] [launch.py:325:sigkill_handler] ['python', 't.py'] exits with return code = 1"
    assert explain_lines([*there, *raised, failed, *done]).culprits == (3,)
    assert explain_lines([*there, *(f"w1: {row}" for row in RAISED), *done]).culprits == (3,), "another host's"


def test_the_good_end_of_one_host_is_its_own(explain_lines: Explain) -> None:
    agent = "0: I1103 10:03:09.3 418 torch/distributed/elastic/agent/server/api.py:879] [default] worker group successfully finished."
    assert explain_lines(["0: nnodes=2", *(f"1: {row}" for row in RAISED), agent]).incident
    toolkit = "algo-{} 2025-11-03 10:02:1{},114 sagemaker-training-toolkit {}"
    failed = [toolkit.format(2, 1, "ERROR    Reporting training FAILURE"),
              toolkit.format(2, 2, "ERROR    ExecuteUserScriptError: ExitCode 1")]  # fmt: skip
    well = toolkit.format(1, 3, "INFO     Reporting training SUCCESS")
    assert explain_lines([*(f"algo-2 {row}" for row in RAISED), *failed, well]).incident
    assert explain_lines([*(f"algo-2 {row}" for row in RAISED), well]).culprits == (3,)


@pytest.mark.parametrize("level", ["INFO", "DEBUG", "WARNING"])
@pytest.mark.parametrize(
    "told",
    [
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled system error",
        "RuntimeError: DataLoader worker (pid 4188) is killed by signal: Killed.",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    ],
)
def test_the_level_of_a_line_makes_no_error_good(explain_lines: Explain, level: str, told: str) -> None:
    lines = [f"2026-03-01 10:00:0{n} [INFO] w-0: step {n} loss 2.1" for n in range(5)]
    assert explain_lines([*lines[:4], f"2026-03-01 10:00:03 [{level}] w-1: {told}", lines[4]]).incident


@pytest.mark.parametrize(
    "rows",
    [
        ['  File "t.py", line 9, in main', "    total += float(loss)"],
        ['  File "/x/torch/_tensor.py", line 1009, in __format__', "    return self.item().__format__(spec)"],
        ['  File "/x/torch/nn/utils/clip_grad.py", line 209, in clip_grad_norm_', "    norm = total(grads)"],
    ],
)
def test_a_program_interrupted_where_it_waits_for_its_gpu_may_have_hung(
    explain_lines: Explain, rows: list[str]
) -> None:
    report = explain_lines([*STEPS, "^CTraceback (most recent call last):", *rows, "KeyboardInterrupt"], world_size=8)
    assert report.incident and (report.culprits, report.decision) == ((), "unknown")


@pytest.mark.parametrize(
    "what, calm", [("Epoch 3", True), ("", False), ("scoring docs", False), ("Tokenizing train dataset", False)]
)
def test_a_bar_of_one_rank_is_no_step_of_all(explain_lines: Explain, what: str, calm: bool) -> None:
    bars = [f"{what}: {n}0%|####  | {n}0/100 [01:1{n}<03:48,  1.11it/s]" for n in range(1, 9)]
    assert explain_lines([*bars[:2], *RAISED, *bars[2:]]).incident is not calm
    assert explain_lines([*bars[:2], *LATE, *bars[2:]]).incident


def test_a_connection_that_is_tried_for_the_last_time(explain_lines: Explain) -> None:
    tried = [
        f"[rank3]: [W] RuntimeError: Connection closed by peer [10.2.4.15]:4100. Retrying ({n}/3)" for n in (1, 2, 3)
    ]
    assert explain_lines([*tried, "[rank3]: giving up on peer 10.2.4.15"]).incident


def test_an_error_in_front_of_what_was_buffered(explain_lines: Explain) -> None:
    rows = [
        "Traceback (most recent call last):",
        '  File "t.py", line 9, in main',
        "torch.OutOfMemoryError: CUDA out of memory.",
    ]
    assert explain_lines([*rows, *STEPS, *ON], world_size=8).incident


@pytest.mark.parametrize("at, calm", [("09:04:20", True), ("20:12:11", False)])
def test_a_time_limit_that_came_hours_after_the_last_step(explain_lines: Explain, at: str, calm: bool) -> None:
    limit = f"slurmstepd: error: *** JOB 88 ON g7 CANCELLED AT 2025-11-03T{at} DUE TO TIME LIMIT ***"
    before = [f"2025-11-03 09:0{n}:00 step {n}0 loss 2.1" for n in range(4)]
    after = [
        "2025-11-03 20:20:00 resumed from checkpoint step 30",
        *(f"2025-11-03 20:3{n}:00 step {n + 3}1 loss 2.1" for n in range(4)),
    ]
    assert explain_lines([*before, limit, *after]).incident is not calm


@pytest.mark.parametrize(
    "failed",
    [
        TABLE.format(1),
        "W1103 10:02:09.300000 418 torch/distributed/elastic/agent/server/api.py:887] [default] Worker group FAILED. 1/1 attempts left; will restart worker group",
    ],
)
def test_what_an_earlier_start_of_a_job_failed_by_is_not_what_the_last_one_did(
    explain_lines: Explain, failed: str
) -> None:
    last = [
        "[rank1]: RuntimeError: CUDA error: uncorrectable ECC error encountered",
        TABLE.format(1).replace("k: 3", "k: 1"),
    ]
    again = ["resumed from step 40", *STEPS, *ON]
    assert explain_lines([*STEPS, *RAISED, failed, *again, *last]).culprits == (1,)
    assert 3 in explain_lines([*STEPS, *RAISED, failed, again[0], *last]).culprits, "it had not begun again"
    assert explain_lines([*STEPS, *RAISED, failed, "Sending process 4182 closing signal SIGTERM"]).culprits == (3,)


def test_a_rank_that_leaves_out_a_step_for_which_the_others_wait(explain_lines: Explain) -> None:
    raised = [
        *RAISED[:2],
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory.",
        "[rank3]: OOM at step 44, skipping batch",
    ]
    report = explain_lines([*STEPS, *raised, *LATE], world_size=4)
    assert (report.culprits, report.cause_class) == ((3,), "oom_or_crash_other_rank")
    on = explain_lines([*STEPS, *raised, *ON, *LATE], world_size=4)
    assert on.cause_class != "oom_or_crash_other_rank", "the job went on after it"


@pytest.mark.parametrize(
    "raised",
    [
        ["[rank2]: RuntimeError: CUDA error: an illegal memory access was encountered"],
        [
            "Traceback (most recent call last):",
            '  File "t.py", line 3, in step',
            "RuntimeError: NCCL error: unhandled system error",
        ],
    ],
)
def test_a_rank_that_can_go_on_no_more_is_not_survived_by_steps_of_others(
    explain_lines: Explain, raised: list[str]
) -> None:
    assert explain_lines([*STEPS, *raised, *ON], world_size=4).incident
