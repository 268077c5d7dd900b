"""Inference engines, expert parallelism, RL, JAX and Ascend: who is named, by which name, and who is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from explain_logs import pg, timeout

from ncclguard.outcome import Cause
from ncclguard_explain import Report, explain
from ncclguard_explain.places import coordinates, is_parent, rank_of, rank_of_actor

Explain = Callable[..., Report]
CASES = Path(__file__).parents[3] / "benchmarks" / "diagnosis" / "cases"


@pytest.mark.parametrize("folder", sorted(CASES.glob("b26-*")), ids=lambda folder: folder.name)
def test_case_of_2026(folder: Path) -> None:
    truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    report = explain(
        [str(folder / "job.log" if (folder / "job.log").exists() else folder / "node1.log")],
        world_size=truth.get("world_size"),
    )
    assert report.incident == truth["incident"]
    assert list(report.culprits) == truth["culprits"]
    assert list(report.places) == truth.get("places", list(report.places))
    assert report.decision in truth.get("decisions", [report.decision])
    assert report.effective_timeout_ms == truth.get("timeout_ms", report.effective_timeout_ms)
    for name in ("op", "seq", "numel_in"):
        assert name not in truth or getattr(report.collective, name) == truth[name]


def worker(name: str, *lines: str, pid: int = 812) -> list[str]:
    head = f"({name} pid={pid}) ERROR 11-20 10:02:11 [multiproc_executor.py:981]"
    return [f"{head} {line}" for line in lines]


def raised(name: str, error: str) -> list[str]:
    return worker(name, "Traceback (most recent call last):", '  File "/v/a.py", line 9, in loop', "    f()", error)


def test_rank_inside_one_of_several_dense_engines_is_no_rank_of_the_job(explain_lines: Explain) -> None:
    report = explain_lines(raised("Worker_DP1_TP2", "ValueError: bad"))
    assert (report.culprits, report.places) == ((), ("Worker_DP1_TP2",))
    assert report.summary.startswith("Worker_DP1_TP2 held up")


def test_place_becomes_a_rank_by_the_sizes_that_the_log_states(explain_lines: Explain) -> None:
    sizes = "(EngineCore pid=7) INFO [core.py:9] config: tensor_parallel_size=4, pipeline_parallel_size=2"
    assert explain_lines([sizes, *raised("Worker_PP1_TP2", "ValueError: bad")]).culprits == (6,)


def test_parents_exception_is_a_consequence(explain_lines: Explain) -> None:
    report = explain_lines(raised("EngineCore_DP0", "ValueError: bad"))
    assert report.incident and report.culprits == () and report.decision != "fix-code"


def test_wait_of_an_rpc_is_no_exception_of_its_own(explain_lines: Explain) -> None:
    report = explain_lines(raised("EngineCore", "TimeoutError: RPC call to sample_tokens timed out."))
    assert (report.culprits, report.decision, report.cause_class) == ((), "unknown", "unknown")
    assert "accuses nobody" in report.summary and "confidence" not in report.summary


def test_one_task_without_heartbeats_is_named_and_surely_beside_a_death_and_not_if_it_speaks_later(
    explain_lines: Explain,
) -> None:
    told = [
        "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):",
        "/job:jax_worker/replica:0/task:3",
    ]
    report = explain_lines(told)
    assert report.culprits == (3,) and report.culprit_confidence == "medium"  # its network may be what failed
    two = explain_lines([*told, "/job:jax_worker/replica:0/task:4"])
    assert two.culprits == () and two.suspects == (3, 4)  # the coordinator's network, as likely as theirs
    killed = "[ 99.1] Out of memory: Killed process 4100 (python3) total-vm:99kB, anon-rss:99kB"
    dead = explain_lines([*told, killed])
    assert dead.culprits == (3,) and dead.culprit_confidence == "high"
    alive = "[rank3]: RuntimeError: Polled nothing: timed out waiting for the barrier"
    assert explain_lines([*told, killed, alive]).culprits == ()


def test_jax_names_all_that_are_missing_or_nobody(explain_lines: Explain) -> None:
    def barrier(come: str) -> list[str]:
        return [
            f"DEADLINE_EXCEEDED: Barrier timed out. Id: b.1. # of tasks that reached the barrier: {come}.",
            "Some timed out task names:",
            "/job:jax_worker/replica:0/task:6",
            "/job:jax_worker/replica:0/task:2",
        ]

    assert explain_lines(barrier("6/8")).culprits == (2, 6)
    assert explain_lines(barrier("5/8")).culprits == ()


def test_expert_rank_is_a_rank_where_a_process_name_proves_it(explain_lines: Explain) -> None:
    waits = [f"DeepEP timeout for dispatch receive, rank {r}, local_expert_idx 2, src_rank 6" for r in (0, 1, 2)]
    report = explain_lines(waits)
    assert (report.culprits, report.places) == ((), ("EP rank 6",))
    mapped = "(Worker_DP6_EP6 pid=8) ERROR 11-20 10:00:00 [a.py:1] Timed out waiting for nothing, retrying"
    assert explain_lines([mapped, *waits]).culprits == (6,)


def test_awaited_that_waits_itself_is_not_named(explain_lines: Explain) -> None:
    ring = [
        f"DeepEP timeout for dispatch receive, rank {r}, local_expert_idx 0, src_rank {(r + 1) % 4}" for r in range(4)
    ]
    report = explain_lines(ring)
    assert report.incident and (report.culprits, report.places) == ((), ())


def test_one_rank_in_an_excerpt_proves_nothing_about_the_other(explain_lines: Explain) -> None:
    for numel in ((1, 2), (1, 4)):
        report = explain_lines(timeout(1, op="ALLGATHER", numel=numel))
        assert report.culprits == ()
    assert explain_lines(timeout(1, op="ALLGATHER", numel=(1, 2))).suspects == (0,)
    assert explain_lines(timeout(1, op="ALLGATHER", numel=(1, 4))).world_size == 4


def test_silent_one_of_a_pair_that_speaks_elsewhere_is_named(explain_lines: Explain) -> None:
    lines = ["[rank0]: loading the shards, timeout=none", *timeout(1)]
    assert explain_lines(lines, world_size=2).culprits == (0,)


def test_two_ranks_at_different_numbers_name_nobody(explain_lines: Explain) -> None:
    report = explain_lines([*timeout(0, seq=7), *timeout(1, seq=9)], world_size=2)
    assert report.culprits == () and report.suspects == (0, 1)
    assert "which one strayed is not shown" in report.reason


def test_tasks_of_srun_that_were_killed_together_are_named_unless_one_ended_before(explain_lines: Explain) -> None:
    killed = "srun: error: node2: tasks 4-7: Killed"
    waits = [line for rank in range(16) if rank not in (4, 5, 6, 7) for line in timeout(rank)]
    assert explain_lines([killed, *waits]).culprits == (4, 5, 6, 7)
    first = "srun: error: node1: task 2: Segmentation fault (core dumped)"
    assert explain_lines([first, killed]).culprits == (2,)


def test_connection_that_failed_does_not_accuse_its_reporter(explain_lines: Explain) -> None:
    lines = ["[rank3]: Traceback (most recent call last):", '[rank3]:   File "a.py", line 3, in f',
             "[rank3]: RuntimeError: Failed to connect to tcp://10.0.0.1:3999"]  # fmt: skip
    assert explain_lines(lines).culprits == ()


def test_low_confidence_is_no_headline(explain_lines: Explain, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from ncclguard_explain.render import print_report

    report = explain_lines([line for rank in (1, 2, 3) for line in timeout(rank)], world_size=4)
    assert report.culprits == (0,) and report.confidence == "low"
    assert "confidence" not in report.summary and "class" not in report.summary
    print_report(report, Console(file=sys.stdout, width=200))
    text = capsys.readouterr().out
    assert "A common reading of so little evidence: slow_rank_side_work" in text and "Why (medium confidence)" in text


def test_columns_without_a_value_are_left_out(explain_lines: Explain, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from ncclguard_explain.render import print_report

    print_report(explain_lines(raised("Worker_TP2", "ValueError: bad")), Console(file=sys.stdout, width=200))
    text = capsys.readouterr().out
    assert "NumelIn" not in text and "state" in text


def test_group_of_a_worker_is_kept_apart_from_its_process_name(explain_lines: Explain) -> None:
    lines = [
        f"(Worker_TP{rank} pid=8{rank}) {line}"
        for rank in (0, 1, 3)
        for line in timeout(rank, group=pg(rank, "2", "tp"))
    ]
    report = explain_lines(lines)
    assert {row.rank for row in report.ranks if row.state == "waiting"} == {0, 1, 3}


def test_names_of_processes() -> None:
    assert coordinates("DP1 TP3 EP3") == {"DP": 1, "TP": 3, "EP": 3}
    assert is_parent("EngineCore_DP1") and not is_parent("Worker_DP1")
    assert rank_of("EngineCore_DP1", {}) is None and rank_of("WorkerDict", {}) is None
    assert rank_of("PP1 TP2", {"tp": 8}) == 10 and rank_of("PP1 TP2", {}) is None
    assert rank_of("Worker_DP1_PP1_TP0_EP2", {"tp": 2, "pp": 2}) == 6
    assert rank_of_actor("abcdefWorkerDict_0:3", None) == 3 and rank_of_actor("reward", 8) is None


def test_ranks_own_numbers_come_before_those_of_the_launcher(explain_lines: Explain) -> None:
    lines = [
        f"{31 + rank}: 2026-11-20 10:02:11,113 [WARNING] [n7] [workload:{rank}({rank}) infra:{31 + rank}({rank})] m.py:498 "
        "Did not get subsequent heartbeat. Waited 300.00 seconds."
        for rank in range(2)
    ]
    assert {event.rank for event in explain_lines(lines).events if event.kind == "engine_wait"} == {0, 1}


def test_nan_is_the_fault_of_the_rank_that_found_it_in_its_own_values(explain_lines: Explain) -> None:
    report = explain_lines(
        ["[rank5]: AssertionError: Rank 5: found NaN in local forward loss calculation. Device: 5, node: n7"]
    )
    assert report.culprits == (5,) and report.cause is Cause.FAILED and report.decision == "fix-code"


def test_ranks_of_a_lost_host_are_those_that_its_lines_name(explain_lines: Explain) -> None:
    """Also without lines of its own: srun tells the tasks of all the other hosts."""
    lost = [
        "srun: error: Node failure on gpu-a12",
        "slurmstepd: error: *** STEP 7.0 ON gpu-a10 CANCELLED AT 2026-02-21T01:08:40 DUE TO NODE FAILURE ***",
    ]
    killed = ["srun: error: gpu-a10: tasks 0-7: Killed", "srun: error: gpu-a11: tasks 8-15: Killed"]
    placed = [f"{rank}: host=gpu-a{10 + rank // 8} SLURM_PROCID={rank} MASTER_ADDR=gpu-a10" for rank in range(24)]
    assert explain_lines([*placed, *lost, *killed]).culprits == tuple(range(16, 24))
    assert explain_lines(["WORLD_SIZE=24", *lost, *killed]).culprits == tuple(range(16, 24))
    assert explain_lines([*lost, *killed]).culprits == ()


def test_what_torchs_analyser_prints_names_who_is_missing_everywhere(explain_lines: Explain) -> None:
    def missing(seq: int, ranks: str) -> list[str]:
        head = [
            f"Not all ranks joining collective, sequence number: {seq}",
            "internal record id: 7",
            "group info: 0:default_pg",
        ]
        tail = [
            "input sizes: [[8]]",
            "output sizes: [[8]]",
            "world size: 8",
            "expected ranks: {0, 1, 2, 3, 4, 5, 6, 7}",
        ]
        return [
            *head,
            "collective: nccl:all_reduce",
            f"missing ranks: {{{ranks}}}",
            *tail,
            "collective state: scheduled",
        ]

    report = explain_lines(missing(31, "3, 6"))
    assert report.culprits == (3, 6) and report.collective.op == "ALLREDUCE" and report.collective.seq == 31
    assert explain_lines([*missing(31, "3, 6"), *missing(33, "3, 5")]).culprits == (3,)
    assert explain_lines(missing(31, "0, 1, 2, 3, 6")).culprits == ()


def test_job_that_says_it_succeeded_had_no_incident(explain_lines: Explain) -> None:
    failed = [
        "[rank1]: ValueError: bad sample",
        "E0813 06:19:49.809000 1 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 1 (pid: 9) of binary: /x",
    ]
    well = "I0213 12:05:30.002000 8 torch/distributed/elastic/agent/server/api.py:879] [default] worker group successfully finished."
    assert explain_lines(failed).culprits == (1,)
    assert not explain_lines([*failed, "[rank0]: step 4 loss 0.1", well]).incident
    assert explain_lines([well, *failed]).culprits == (1,)  # the job before it


def test_earlier_attempt_in_the_same_log_is_not_the_failure(explain_lines: Explain) -> None:
    again = "I0915 01:01:24.0 33 torch/distributed/elastic/agent/server/api.py:525] [default] Rendezvous complete for workers. Result: restart_count=1 group_rank=0"
    log = ["[rank1]: ValueError: first", again, "[rank6]: KeyError: 'second'"]
    assert explain_lines(log).culprits == (6,) and explain_lines(log[:2]).culprits == (1,)


def test_stacks_of_all_ranks_name_the_one_that_stands_elsewhere(explain_lines: Explain) -> None:
    def dump(rank: int, *frames: str) -> list[str]:
        head = [
            f"[2025-10-29 11:17:28 TP{rank}] Pyspy dump for PID {300 + rank}:",
            f'Thread {300 + rank} (active): "MainThread"',
        ]
        tail = ["", f"[2025-10-29 11:17:28 TP{rank}] Watchdog timeout (self.watchdog_timeout=300)"]
        return [*head, *(f"    {frame}" for frame in frames), *tail]

    def job(odd: int) -> list[str]:
        wait = ("broadcast (torch/distributed/distributed_c10d.py:2830)", "recv_requests (scheduler.py:1021)")
        return [
            line for rank in range(4) for line in dump(rank, *(("fill_mask (xgrammar.py:9)",) if rank < odd else wait))
        ]

    assert explain_lines(job(1)).culprits == (0,)
    assert explain_lines(job(0)).culprits == explain_lines(job(2)).culprits == ()


def test_the_rank_beside_a_command_is_that_of_the_process_it_looks_at(explain_lines: Explain) -> None:
    def look(rank: int, frame: str) -> list[str]:
        return [f"$ py-spy dump --pid {700 + rank}   # RANK={rank}", f"Process {700 + rank}: python -u train.py", "",
                f'Thread {700 + rank} (idle): "MainThread"', f"    {frame}", "    <module> (train.py:307)"]  # fmt: skip

    wait, lustre = (
        "all_reduce (torch/distributed/distributed_c10d.py:2937)",
        "LustreError: 11-0: operation ost_read failed: rc = -107",
    )
    lines = [line for rank in range(4) for line in look(rank, "read (mmap.py:140)" if rank == 1 else wait)]
    assert explain_lines([*lines, lustre]).culprits == (1,)


def test_dumps_that_were_made_because_a_job_hangs_name_the_one_that_stands_elsewhere(tmp_path: Path) -> None:
    """With nothing else in the inputs, as `py-spy dump` writes them; the pin-memory thread is no place of the rank."""
    wait = ("all_reduce (torch/distributed/distributed_c10d.py:2937)", "step (train.py:211)", "<module> (train.py:307)")
    save = ("save_checkpoint (train.py:260)", "<module> (train.py:307)")

    def dumped(*stacks: tuple[str, ...], more: str = "") -> tuple[int, ...]:
        for rank, stack in enumerate(stacks):
            lines = [f"Process {100 + rank}: python -u train.py", "Python v3.11.7 (/usr/bin/python3.11)", ""]
            lines += [f'Thread {100 + rank} (idle): "MainThread"', *(f"    {frame}" for frame in stack)]
            lines += ['Thread 9 (idle): "Thread-1 (_pin_memory_loop)"', "    wait (threading.py:327)", more]
            with (tmp_path / f"rank{rank}.txt").open("a") as file:
                file.write("\n".join(lines) + "\n")
        return explain([str(tmp_path)]).culprits

    def cleared() -> None:
        for file in tmp_path.iterdir():
            file.unlink()

    assert dumped(wait, wait, save, wait) == (2,)
    assert dumped(wait, wait, save, wait) == (2,)  # a second look, the same
    moved = (wait[0].replace("2937", "2940"), "step (train.py:215)", wait[2])
    assert dumped(moved, wait, save, wait) == ()
    cleared()
    assert dumped(wait, save, save, wait) == ()
    cleared()
    device = ("synchronize (torch/cuda/__init__.py:985)", *wait[1:])
    assert dumped(wait, device, save, wait) == (2,)  # who waits for its device has come, or waits for the same
    cleared()
    assert dumped(wait, device, wait, wait) == ()
    cleared()
    assert dumped(wait, wait, save, wait, more="step 12 loss 0.31") == ()  # a log of a job that may go on


def test_of_tensorrt_llms_stacks_the_one_outside_of_the_collective_is_named(explain_lines: Explain) -> None:
    def stack(rank: int, *frames: str) -> list[str]:
        head = f"[TRT-LLM] [E] [RANK {rank}]"
        return [f"{head} Hang detected after 300 seconds.", f"{head} Thread MainThread stack:",
                *(f'  File "/app/tensorrt_llm/{frame}' for frame in frames)]  # fmt: skip

    wait = ('py_executor.py", line 2101, in _executor_loop', 'communicator.py", line 318, in tp_allgather')
    other = ('py_executor.py", line 2088, in _executor_loop', 'kv_cache_transceiver.py", line 141, in check_context')
    lines = [line for rank in range(4) for line in stack(rank, *(other if rank == 3 else wait))]
    assert explain_lines(lines).culprits == (3,)


NO_RESPONSE = "W20260502 10:14:16.1 3202 mooncake_worker.cu:311] Rank {}: no response from peer rank {} within 10000000 us, marking it broken"


def test_who_answers_none_of_the_others_is_named_and_what_follows_is_not(explain_lines: Explain) -> None:
    follows = "[2026-05-02 10:14:20 DP2 TP2 EP2] Scheduler hit an exception: RuntimeError: no live replica for experts [117, 118]"
    report = explain_lines([NO_RESPONSE.format(2, 5), NO_RESPONSE.format(0, 5), follows], world_size=8)
    assert report.culprits == (5,) and report.effective_timeout_ms == 10_000
    assert explain_lines([NO_RESPONSE.format(2, 5), NO_RESPONSE.format(5, 2)], world_size=8).culprits == ()


def test_a_line_of_another_process_is_no_rest_of_the_one_above(explain_lines: Explain) -> None:
    """Although all lines end at one column, as those of a terminal do."""
    decode = "[2026-03-17 17:30:{:02} DP{} TP{}] Decode batch, #running-req: 12, #token: 768, token usage: 0.00, #queue-req: 0"
    lines = [decode.format(at, 11, 11) for at in range(10)] + [decode.format(11, 12, 12)]
    lines += ["[2026-03-17 17:31:52 DP11 TP11] Scheduler hit an exception: Traceback (most recent call last):",
              '  File "/s/radix_cache.py", line 310, in cache', "    assert new <= old", "AssertionError"]  # fmt: skip
    assert explain_lines(lines, world_size=16).culprits == (11,)


def test_an_exception_that_ray_repeats_says_on_which_rank_it_was(explain_lines: Explain) -> None:
    lines = ["Traceback (most recent call last):",
             "ray.exceptions.RayTaskError(ValueError): ray::WorkerDict.log_prob() (pid=9117, ip=10.0.0.2, actor_id=9f2b)",
             '  File "/verl/workers/dp_actor.py", line 290, in _check', "ValueError: NaN in log_probs on rank 13 (uid=3f1a)"]  # fmt: skip
    assert explain_lines(lines, world_size=16).culprits == (13,)


def test_mpi_abort_says_whose_memory_was_full(explain_lines: Explain) -> None:
    full = "[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMallocAsync(ptr, n, pool, stream): out of memory (/src/t.h:72)"
    abort = "MPI_ABORT was invoked on rank 4 in communicator MPI_COMM_WORLD"
    assert explain_lines([full, abort], world_size=8).culprits == (4,)
    assert explain_lines([abort], world_size=8).culprits == ()


def test_a_core_of_an_npu_that_failed_names_its_rank_and_not_those_that_wait(explain_lines: Explain) -> None:
    waits = "[rank{}]: EI0006: [PID: 12] 2025-04-08-18:27:22.444 Getting socket times out. Reason: Remote Rank did not send the data in time."
    failed = "[rank5]: EZ9999: The error from device(chipId:5, dieId:0), there is an exception of fftsplus aivector error, core id is 17"
    assert explain_lines([waits.format(0), waits.format(2), failed], world_size=8).culprits == (5,)


def test_the_rank_in_the_name_of_a_worker_of_nemo_rl(explain_lines: Explain) -> None:
    head = "(MegatronPolicyWorker[rank=8] pid=3294808, ip=10.1.9.209)"
    lines = ["Traceback (most recent call last):", '  File "train.py", line 7, in step', "    x.cpu()",
             "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"]  # fmt: skip
    assert explain_lines([f"{head} {line}" for line in lines], world_size=16).culprits == (8,)


def test_the_name_of_a_remote_call_is_no_exception(explain_lines: Explain) -> None:
    line = "{}: Additional GRPC error information while calling /tensorflow.CoordinationService/PollForError: :UNKNOWN:Error received from peer"
    assert explain_lines([line.format(rank) for rank in (1, 2, 3)], world_size=4).culprits == ()


@pytest.mark.parametrize(
    "line, limit",
    [
        ("coordination_service.cc:1000] Barrier sync:ckpt_7 timed out after 10m0s, 7/8 tasks at the barrier", 600_000),
        ("[process=0] barrier 'save.12' DEADLINE_EXCEEDED after 300 seconds", 300_000),
        ("W tensorflow coordination_service.cc:712] Barrier 5 of 'train_sync' has timed out (90s)", 90_000),
        ("RuntimeError: timed out waiting in barrier /sync", None),
        ("XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: x::0. A task failed to reach the barrier.", None),
    ],
)
def test_a_barrier_that_only_a_service_names(explain_lines: Explain, line: str, limit: int | None) -> None:
    report = explain_lines(["[rank0]: step 3", f"[rank0]: {line}"])
    assert report.collective is not None and (report.collective.op, report.effective_timeout_ms) == ("barrier", limit)
    assert report.culprits == (), "who waits in it"
    beside = explain_lines([f"[rank0]: {line}", *timeout(1)])
    assert beside.collective is not None and beside.collective.op == "ALLREDUCE"


@pytest.mark.parametrize(
    "line",
    ["barrier timeout: 600 s", "barrier timed out, retrying", "barrier passed in time, no timeout", "barriers: 7 in 3 s", "DEADLINE_EXCEEDED of one request; barrier-free"],
)  # fmt: skip
def test_a_barrier_that_did_not_run_out_of_time(explain_lines: Explain, line: str) -> None:
    assert explain_lines(["[rank0]: step 3", line, "[rank0]: step 4"]).collective is None


@pytest.mark.parametrize(
    "lines, limit",
    [
        (["torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined."], 600_000),
        (["DistStoreError: Timed out after 1801s waiting for clients."], 1_800_000),
        (["  rdzv_configs     : {'join_timeout': 120}", "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"], 120_000),
        (["torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError: not complete within 45.5 s"], 45_500),
        (["torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"], None),
    ],
)  # fmt: skip
def test_the_limit_of_a_rendezvous(explain_lines: Explain, lines: list[str], limit: int | None) -> None:
    report = explain_lines(lines)
    assert report.collective is not None and (report.collective.op, report.effective_timeout_ms) == (
        "rendezvous",
        limit,
    )


def test_the_limit_of_a_rendezvous_that_came_about_is_none_of_a_collective(explain_lines: Explain) -> None:
    report = explain_lines(["torchrun --rdzv_conf=join_timeout=120 t.py", *timeout(1)])
    assert report.collective is not None and report.collective.op == "ALLREDUCE"
    assert report.effective_timeout_ms == 600_000
    assert explain_lines(["RendezvousClosedError: x", "torchrun --rdzv_conf=join_timeout=120 t.py"]).collective is None


def test_a_job_that_goes_on_behind_a_barrier_is_none(explain_lines: Explain) -> None:
    steps = [f"2026-11-20 10:00:0{n} [rank0]: step {n} loss 1.{n}" for n in range(6)]
    late = "2026-11-20 10:00:03 [rank0]: barrier 'log' timed out after 30 s"
    assert not explain_lines([*steps[:3], late, *steps[3:]]).incident
    assert explain_lines([*steps, late]).incident
