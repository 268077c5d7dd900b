"""Which rank a process, a pod, a local rank or a GPU is: what proves it, and what only seems to."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclguard_explain import Report
from ncclguard_explain.rank_map import NOBODY, RankMap
from ncclguard_explain.records import Source, split_prefix

Explain = Callable[..., Report]
MAPS = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "diagnosis" / "cases_maps.py"))["CASES"]
#: Whose author took RANK of a pod for a rank's; torchrun may start several there, and nothing says that it does not.
OF_PODS = ("map-40-pod-rank-env", "map-45-job-index")
RAISED = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "ValueError: bad sample 17"]


def pods(*lines: str, name: str = "job-worker") -> list[str]:
    """Return lines of `kubectl logs --prefix`, each "0: text" from the pod of that number."""
    return [f"[pod/{name}-{line.partition(': ')[0]}/pytorch] {line.partition(': ')[2]}" for line in lines]


def raised_by(pod: int) -> list[str]:
    return [f"{pod}: {line}" for line in RAISED]


@pytest.mark.parametrize("name", MAPS)
def test_a_map_over_several_lines(name: str, explain_lines: Explain) -> None:
    files, truth = MAPS[name]
    report = explain_lines(files, world_size=truth.get("world_size"))
    assert report.incident == truth["incident"]
    assert list(report.culprits) == ([] if name in OF_PODS else truth["culprits"])


NAMED = {
    "each rank from 0 on speaks under a name of its own": pods(
        "0: [rank0] step 12", "1: [rank1] step 12", "2: [rank2] step 12", *raised_by(1)
    ),
    "RANK of every rank of the job": pods(*(f"{n}: RANK={n} WORLD_SIZE=3" for n in range(3)), *raised_by(1)),
    "RANK beside LOCAL_RANK": pods("1: env: WORLD_SIZE=5 RANK=1 LOCAL_RANK=0", "2: env: WORLD_SIZE=5 RANK=2 LOCAL_RANK=0", *raised_by(1)),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_a_pod_with_one_rank_is_that_rank(case: str, explain_lines: Explain) -> None:
    assert explain_lines(NAMED[case]).culprits == (1,)


NOBODY_NAMED = {
    "pods of which some ranks are silent": pods("0: [rank0] step 12", "1: [rank8] step 12", *raised_by(1)),
    "a pod in which two ranks speak": pods("0: [rank0] step 12", "1: [rank1] step 12", "1: [rank2] step 12", *raised_by(1)),
    "RANK of some pods of a larger job": pods("0: RANK=0 WORLD_SIZE=16", "1: RANK=1 WORLD_SIZE=16", *raised_by(1)),
    "RANK of pods whose ranks are more": pods(
        "0: RANK=0 WORLD_SIZE=2", "1: RANK=1 WORLD_SIZE=2", "1: [rank12] step 3", *raised_by(1)
    ),
    "RANK of a pod with more than one GPU": pods(
        "0: RANK=0 WORLD_SIZE=2", "1: RANK=1 WORLD_SIZE=2", "1: Traceback (most recent call last):",
        "1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 5 has a total capacity of 79.15 GiB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOBODY_NAMED)
def test_a_pod_that_may_have_more_ranks_is_none(case: str, explain_lines: Explain) -> None:
    assert explain_lines(NOBODY_NAMED[case]).culprits == ()


CLOSED = "W0813 06:19:49.801000 161210 torch/distributed/elastic/multiprocessing/api.py:897] Sending process {} closing signal SIGTERM"
TABLE = """train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2025-08-13_06:20:19
  host      : gpu1
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 161312)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 161312
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-08-13_06:19:49
  host      : gpu1
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 161313)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def test_of_those_that_torchelastic_has_not_ended_a_killed_one_died_by_itself(explain_lines: Explain) -> None:
    assert explain_lines([CLOSED.format(161311), *TABLE.splitlines()]).culprits == (1,)
    by_launcher = explain_lines([CLOSED.format(161311), CLOSED.format(161312), *TABLE.splitlines()])
    assert 1 not in by_launcher.culprits
    assert 1 not in explain_lines(TABLE.splitlines()).culprits  # who was ended is not in this excerpt


FIRST = """mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[59417,1],2]
  Exit code:    {}
"""
ABORTED = ["MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD", "with errorcode 1."]
CLOSED_BY_PEER = "[1,{}]<stderr>:RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:3412"


def test_of_mpirun_a_process_with_an_exit_code_is_named_by_more_than_that(explain_lines: Explain) -> None:
    assert explain_lines(FIRST.format(1).splitlines()).culprits == ()  # it may have raised because of another one
    assert explain_lines([CLOSED_BY_PEER.format(2), *FIRST.format(1).splitlines()]).culprits == ()
    own = [f"[1,2]<stderr>:{line}" for line in RAISED]
    assert explain_lines([*own, *FIRST.format(1).splitlines()]).culprits == (2,)


def test_who_called_mpi_abort_because_of_a_peer_is_not_named(explain_lines: Explain) -> None:
    assert explain_lines([CLOSED_BY_PEER.format(3), *ABORTED]).culprits == ()
    own = [f"[1,1]<stderr>:{line}" for line in RAISED]
    assert explain_lines([*own, CLOSED_BY_PEER.format(3), *ABORTED]).culprits == (1,)


def test_how_many_have_come_accuses_nobody_and_their_names_the_others(explain_lines: Explain) -> None:
    assert explain_lines(["barrier timed out after 600 s: 3/4 ranks arrived"]).culprits == ()
    assert explain_lines(["barrier timed out after 600 s: 3/4 ranks arrived: [0, 1, 3]"]).culprits == (2,)


def test_what_two_ranks_claim_is_nobodys() -> None:
    known = RankMap()
    known.process(100, 3, "gpu1")
    known.process(100, 4, "gpu2")
    assert (known.processes["gpu1", 100], known.processes["gpu2", 100], known.processes["", 100]) == (3, 4, NOBODY)


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        (["Starting with --node_rank=2 --nproc_per_node=4 --master_addr 10.0.0.1"], 8),
        (["torchrun --node_rank 2 --nproc_per_node 4 --rdzv_backend c10d"], None),  # the store gives the places
        (["accelerate launch --num_processes 16 --num_machines 4 --machine_rank 2 train.py"], 8),
        (["I rank=9 local_rank=1 world_size=16"], 8),
        (["I rank=9 local_rank=1 world_size=16", "I rank=5 local_rank=1 world_size=16"], NOBODY),
    ],
)
def test_the_first_rank_of_a_node_is_told_by_what_launched_it(lines: list[str], first: int | None) -> None:
    known = RankMap()
    source = Source(0, "node2.log", "text", 0)
    for line in lines:
        known.read(line, split_prefix(line), source, lambda count: ())
    assert known.first.get("#0") == first


BLOCKED = "[Wed Oct  9 16:12:41 2024] INFO: task python:{} blocked for more than 120 seconds."


def test_a_task_that_the_kernel_holds_is_the_rank_whose_process_it_is(explain_lines: Explain) -> None:
    ready = [f"[rank {rank}] pid {40110 + rank} cuda:{rank} ready" for rank in range(8)]
    assert explain_lines([*ready, BLOCKED.format(40116)]).culprits == (6,)
    assert explain_lines([*ready, BLOCKED.format(99)]).culprits == ()


def test_the_hosts_of_ranks_tell_whom_a_lost_host_takes(explain_lines: Explain) -> None:
    ranks = [f"{rank}: rank {rank} of 4 on host gpu-b{rank // 2} local {rank % 2}" for rank in range(4)]
    assert explain_lines([*ranks, "srun: error: Node failure on gpu-b1"]).culprits == (2, 3)


def test_local_ranks_of_dumps_are_ranks_where_there_are_as_many_as_the_job_has(explain_lines: Explain) -> None:
    def dumped(size: int) -> tuple[int, ...]:
        lines = [f"WORLD_SIZE={size}"]
        for rank in range(4):
            frame = "read (ssl.py:1104)" if rank == 2 else "barrier (torch/distributed/distributed_c10d.py:4635)"
            lines += [f"Process {70 + rank}: python -u train.py --local_rank={rank}", "", f'Thread {70 + rank} (idle): "MainThread"',
                      f"    {frame}", "    <module> (train.py:139)"]  # fmt: skip
        return explain_lines(lines).culprits

    assert dumped(4) == (2,)
    assert dumped(8) == ()


def test_one_whose_section_alone_was_open_is_named(explain_lines: Explain) -> None:
    lines = ["[WARNING] [RankMonitorServer:5] Section 'step' has been open for 184.31 seconds. Timeout is 180.00 seconds.",
             "torch.distributed.elastic.multiprocessing.api: failed (exitcode: -9) local_rank: 5 (pid: 70815) of binary: /usr/bin/python"]  # fmt: skip
    assert explain_lines(lines).culprits == (5,)


SPAWNED = (
    "[INFO] [launch.py:256:main] process {} spawned with command: ['/usr/bin/python3', '-u', 'a.py', '--local_rank={}']"
)
FULL = (
    "[Mon Nov  3 21:02:41 2025] Out of memory: Killed process {} (python3) total-vm:318844120kB, anon-rss:121033412kB"
)


def test_a_process_that_deepspeed_spawned_is_its_local_rank_on_an_only_node(explain_lines: Explain) -> None:
    spawned = [SPAWNED.format(48210 + rank, rank) for rank in range(4)]
    assert explain_lines([*spawned, FULL.format(48211)]).culprits == (1,)
    assert explain_lines([*spawned, "nnodes: 2", FULL.format(48211)]).culprits == ()


def test_the_pod_beside_a_rank_is_that_ranks(explain_lines: Explain) -> None:
    joined = [f"2026-01-06 07:02:20 joined: RANK={rank} pod=llama-worker-{rank - 1}" for rank in (1, 2, 3)]
    state = [
        "$ kubectl -n ml describe pod llama-worker-2",
        "    State:          Terminated",
        "      Reason:       OOMKilled",
    ]
    assert explain_lines([*joined, *state]).culprits == (3,)


def test_the_tasks_that_srun_ended_on_a_lost_host_are_lost_with_it(explain_lines: Explain) -> None:
    ended = [f"srun: error: n{host}: tasks {8 * host}-{8 * host + 7}: Terminated" for host in range(3)]
    lines = ["srun: error: Node failure on n3", *ended, "srun: error: n3: tasks 24-31: Killed"]
    assert explain_lines(lines).culprits == tuple(range(24, 32))


def test_the_pod_whose_log_tells_a_process_of_jax_is_that_rank(explain_lines: Explain) -> None:
    logs = [
        line
        for pod, number in (("jax-worker-1", 1), ("jax-worker-2", 2), ("jax-coordinator-0", 0))
        for line in (
            f"==== kubectl logs {pod} --tail=4",
            f"I0203 22:50:08.000101 17 distributed.py:106] Starting on [::]:1234 process_id={number} num_processes=3",
        )
    ]
    state = ["    Last State:     Terminated", "      Reason:       OOMKilled", "      Exit Code:    137"]
    described = [*logs, "==== kubectl describe pod jax-coordinator-0", *state]
    assert explain_lines(described).culprits == (0,)
    assert explain_lines([*logs, "==== kubectl describe pod jax-worker-7", *state]).culprits == ()
    assert explain_lines([*logs[:-1], "$ cat other.log", logs[-1], *described[-4:]]).culprits == ()


def test_the_container_that_met_an_illegal_instruction_is_named_by_its_rank(explain_lines: Explain) -> None:
    ends = [f"RANK={rank} node=pool-{rank} exit={132 if rank == 3 else 1} at=2025-04-09T13:27:03Z" for rank in range(4)]
    report = explain_lines(ends, world_size=4)
    assert (report.culprits, report.decision) == ((3,), "restart-without")
    assert explain_lines([row.replace("=132", "=1") for row in ends], world_size=4).culprits == ()


def test_slurms_tasks_on_a_lost_host_are_told_by_the_lines_of_their_ranks(explain_lines: Explain) -> None:
    hosts = ["b16", "b16", "b17", "b17"]
    tasks = [f"{n}: task {n} on gpu-{h}: RANK={n} LOCAL_RANK={n % 2} MASTER=gpu-b16" for n, h in enumerate(hosts)]
    ends = ["srun: error: Node failure on gpu-b17", "srun: error: gpu-b16: tasks 0-1: Aborted (core dumped)"]
    assert explain_lines([*tasks, *ends]).culprits == (2, 3)
    assert explain_lines(ends).culprits == ()


@pytest.mark.parametrize("host, named", [("vgpu-c", (4,)), ("vgpu-d", ())])
def test_the_process_that_broken_memory_ended_is_the_rank_that_deepspeed_spawned(
    explain_lines: Explain, host: str, named: tuple[int, ...]
) -> None:
    mapping = "defaultdict(<class 'list'>, {'vgpu-a': [0, 1], 'vgpu-b': [2, 3], 'vgpu-c': [4, 5]})"
    head = "[2024-03-08 10:00:06,221] [INFO] [launch.py:145:main] "
    lines = [
        f"vgpu-{letter}: {head}{text}"
        for node, letter in enumerate("abc")
        for text in (
            f"nnodes=3, num_local_procs=2, node_rank={node}",
            f"global_rank_mapping={mapping}",
            *(f"process {6300 + 100 * node + n} spawned with command: ['python', '--local_rank={n}']" for n in (0, 1)),
        )
    ]
    kernel = [
        f"$ ssh {host} dmesg -T | tail -4",
        "[Fri Mar  8 10:41:18 2024] Memory failure: 0x3c1f8a2: Sending SIGBUS to python3:6500 due to hardware memory corruption",
    ]
    report = explain_lines([*lines, *kernel])
    assert (report.culprits, report.cause_class) == (named, "gpu_hardware")
