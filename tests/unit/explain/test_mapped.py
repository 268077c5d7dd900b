"""What the log itself announces: processes, hosts, local ranks; and ends in order that look like faults."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from ncclguard_explain.report import Report

Explain = Callable[..., Report]


@pytest.mark.parametrize(
    "text",
    ["Collective call returned error", "Collective operation failed on stream 3", "the collective op was aborted"],
)
def test_who_reports_that_a_collective_broke_is_no_second_culprit(explain_lines: Explain, text: str) -> None:
    lines = ["[rank5]: Traceback (most recent call last):", '[rank5]:   File "/w/t.py", line 9, in step']
    lines += [
        "[rank5]: ValueError: negative length",
        f"[rank1]: RuntimeError: {text}",
        f"[rank3]: RuntimeError: {text}",
    ]
    assert explain_lines(lines, world_size=8).culprits == (5,)


@pytest.mark.parametrize(
    "line",
    ["init: global_rank={rank} on card {rank} pid={pid}", "worker up pid={pid} world_rank={rank}",
     "GLOBAL_RANK: {rank} pid: {pid}"],
)  # fmt: skip
def test_a_process_that_announced_its_global_rank(explain_lines: Explain, line: str) -> None:
    lines = [line.format(rank=rank, pid=7700 + 13 * rank) for rank in range(4)]
    lines += [
        "[rank: 0] Child process with PID 7739 terminated with code -11. Forcefully terminating all other processes"
    ]
    assert explain_lines(lines).culprits == (3,)


def gloo(rank: int, size: int, host: str) -> str:
    return (
        f"(WorkerDict pid={900 + rank}, ip={host}) [Gloo] Rank {rank} is connected to {size - 1} peer ranks. "
        f"Expected number of connected peer ranks is : {size - 1}"
    )


DIED = [
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict",
    "\tpid: 906",
    "\tip: 10.9.0.2",
]


def test_a_dead_actor_that_said_its_number_in_gloos_group_of_all(explain_lines: Explain) -> None:
    lines = [gloo(rank, 8, f"10.9.0.{1 + rank // 4}") for rank in range(8)]
    assert explain_lines([*lines, *DIED]).culprits == (6,)


def test_a_number_in_several_groups_of_one_size_is_no_rank_of_the_job(explain_lines: Explain) -> None:
    lines = [gloo(rank, 4, "10.9.0.2").replace(f"pid={900 + rank}", f"pid={900 + 4 * part + rank}")
             for part in range(2) for rank in range(4)]  # fmt: skip
    assert explain_lines([*lines, *DIED]).culprits == ()


@pytest.mark.parametrize("number, named", [(9, (3, 4, 5)), (15, ())])
def test_a_host_whose_launcher_was_killed_and_the_ranks_that_were_placed_there(
    explain_lines: Explain, number: int, named: tuple[int, ...]
) -> None:
    lines = ["mpiexec -n 9 -ppn 3 python t.py", *(f"[map] x10{host}c0: ranks {3 * host},{3 * host + 1},{3 * host + 2}" for host in range(3))]  # fmt: skip
    lines += [
        f"x101c0.hsn.site.org: shepherd died from signal {number}",
        "x100c0.hsn.site.org: rank 1 died from signal 15",
    ]
    assert explain_lines(lines).culprits == named


def test_a_rank_table_gives_the_ranks_of_devices(explain_lines: Explain) -> None:
    servers = [
        {
            "server_id": f"10.4.0.{host}",
            "device": [{"device_id": str(at), "rank_id": str(4 * host + at)} for at in range(4)],
        }
        for host in range(2)
    ]
    text = (
        "[rank0]: EI0002: [PID: 71] The wait execution of the Notify register times out. there are(is) 1 abnormal device(s): "
        "Cluster Exception Location[IP/ID]:[10.4.0.1/2], Arrival Time:[x], Discoverer:[10.4.0.0/1], "
        "ExceptionType:[Heartbeat Lost Occurred]"
    )
    table = json.dumps({"version": "1.0", "server_list": servers}, indent=1).splitlines()
    assert explain_lines({"table.json": table, "job.log": ["step 4", text]}).culprits == (6,)


@pytest.mark.parametrize("says", ["unhandled exception on local_rank=1", "worker crashed (local rank 1)"])
def test_the_local_rank_that_a_program_tells_behind_its_traceback(explain_lines: Explain, says: str) -> None:
    mapping = "{'n-0': [0, 1], 'n-1': [2, 3], 'n-2': [4, 5]}"
    lines = [
        f"n-1: [INFO] [launch.py:155:main] global_rank_mapping=defaultdict(<class 'list'>, {mapping})",
        "n-1: Traceback (most recent call last):",
        'n-1:   File "/w/t.py", line 3, in main',
        "n-1: RuntimeError: CUDA error: uncorrectable ECC error encountered",
        f"n-1: [t.py] {says}, exiting",
    ]
    report = explain_lines(lines)
    assert (report.culprits, report.decision) == ((3,), "restart-without")


@pytest.mark.parametrize("differ, named", [((1, 2, 3), (0,)), ((2,), (2,)), ((1, 3), ())])
def test_who_is_elsewhere_than_jaxs_process_0(
    explain_lines: Explain, differ: tuple[int, ...], named: tuple[int, ...]
) -> None:
    logs = {}
    for rank in range(4):
        logs[f"proc{rank}.txt"] = [f"I0817 06:00:14.000 139 train.py:88] JAX process: {rank} / 4"]
        if rank in differ:
            logs[f"proc{rank}.txt"] += [
                "Traceback (most recent call last):",
                '  File "/app/jax/experimental/multihost_utils.py", line 151, in assert_equal',
                "AssertionError: sync_global_devices name mismatch ('load_7'). Expected: 11; got: 12.",
            ]
    assert explain_lines(logs, world_size=4).culprits == named


def test_what_an_engines_processes_say_after_its_end_in_order(explain_lines: Explain) -> None:
    died = (
        "ERROR 05-12 11:36:41 [core_client.py:704] Engine core proc EngineCore died unexpectedly, shutting down client."
    )
    end = "(EngineCore pid=9) INFO 05-12 11:36:40 [core.py:1201] Shutdown initiated (timeout=0)"
    assert not explain_lines(["vllm offline", end, died]).incident
    assert explain_lines(["vllm offline", died, end]).incident


@pytest.mark.parametrize("note, incident", [("stacks at 09:01, still training?", False), ("py-spy dumped 09:14", True)])
def test_stacks_of_a_job_that_steps_on_behind_them(explain_lines: Explain, note: str, incident: bool) -> None:
    logs = {"note.txt": [note], "steps.log": [f"09:0{at}:00 step {70 + at} loss 2.0" for at in range(8)]}
    for rank in range(3):
        frame = "    all_reduce (torch/distributed/distributed_c10d.py:2937)" if rank else "    forward (net.py:18)"
        logs[f"stack_rank{rank}.txt"] = [f"Process {rank + 10}: python t.py", "", f'Thread {rank + 10} (active): "MainThread"', frame, "    main (t.py:4)"]  # fmt: skip
    assert explain_lines(logs).incident == incident


def test_a_nan_that_a_second_run_did_not_reproduce(explain_lines: Explain) -> None:
    lines = [" iteration   11/  50 | lm loss: 1.9 |", "ERROR:megatron.core.rerun_state_machine:Rank 13, node b-2, device 5: Possible transient error!!"]  # fmt: skip
    assert explain_lines([*lines, "exiting program at iteration 12"], world_size=16).culprits == (13,)


@pytest.mark.parametrize(
    "lines, decision",
    [
        (["torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 6/8 clients joined."], "unknown"),
        (["STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected ranks: {StragglerId(rank=5, node='d')}",
          "Detected stragglers. Terminating training..."], "restart-without"),
        (["mpirun noticed that process rank 2 with PID 81 on node c1 exited on signal 7 (Bus error).", "$ df /dev/shm",
          "tmpfs  67108864  67108864  0 100% /dev/shm"], "fix-environment"),
    ],
)  # fmt: skip
def test_decisions(explain_lines: Explain, lines: list[str], decision: str) -> None:
    assert explain_lines(lines, world_size=8).decision == decision


def nccl(task: int, host: str, pid: int | None = None) -> str:
    """Return a line of NCCL behind a task's number of `srun --label`."""
    return f"{task}: {host}:{pid or 1000 + task}:{1000 + task} [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>"


DOWN = "slurmctld: node gpu2 state set to DOWN"
BY_TASKS = {
    "all tasks of each host": ([nccl(n, f"gpu{n // 4}") for n in range(16)], range(8, 12)),
    "the first of each host, and how many": (["GPUS_PER_NODE=4", *(nccl(n, f"gpu{n // 4}") for n in range(0, 16, 4))], range(8, 12)),
    "some of each host, and how many": (["LOCAL_WORLD_SIZE=4", *(nccl(n, f"gpu{n // 4}") for n in (0, 1, 5, 8, 9, 10, 15))], range(8, 12)),
    "the first of each host alone": ([nccl(n, f"gpu{n // 4}") for n in range(0, 16, 4)], ()),
    "one task of a launcher on each host": ([nccl(n, f"gpu{n}", 10 * n + k) for n in range(4) for k in range(1, 9)], ()),
    "one line of each launcher": (["GPUS_PER_NODE=4", *(nccl(n, f"gpu{n}") for n in range(4))], ()),
    "tasks in turn": ([nccl(n, f"gpu{n % 4}") for n in range(16)], ()),
    "unlike numbers": ([nccl(n, f"gpu{n // 4}") for n in range(15)], ()),
    "another size than is told": (["GPUS_PER_NODE=8", *(nccl(n, f"gpu{n // 4}") for n in range(16))], ()),
    "another host": ([nccl(n, f"node{n // 4}") for n in range(16)], ()),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_TASKS)
def test_the_tasks_of_srun_on_a_host_that_nccl_names(explain_lines: Explain, case: str) -> None:
    lines, named = BY_TASKS[case]
    assert explain_lines([*lines, DOWN]).culprits == tuple(named)


def rendezvous(pod: int, place: int, size: int = 4, first: int | None = None) -> list[str]:
    first = size * place if first is None else first
    rows = [
        "I1120 10:00:00.000000 1 torch/distributed/elastic/agent/server/api.py:525] [default] Rendezvous complete for workers. Result:",
        "  restart_count=0", f"  group_rank={place}", f"  local_ranks={[*range(size)]}",
        f"  global_ranks={[*range(first, first + size)]}", f"  global_world_sizes={[8] * size}",
    ]  # fmt: skip
    return [f"[pod/job-worker-{pod}/pytorch] {row}" for row in rows]


def test_the_global_ranks_that_torchelastic_tells_of_a_pod(explain_lines: Explain) -> None:
    lines = [*rendezvous(0, 1), *rendezvous(1, 0)]  # the pods came in another order
    lost = "12m   Warning   Evicted   pod/job-worker-{}   The node was low on resource: memory."
    assert explain_lines([*lines, lost.format(1)]).culprits == (0, 1, 2, 3)
    assert explain_lines([*lines, lost.format(0)]).culprits == (4, 5, 6, 7)
    assert explain_lines([*lines, lost.format(7)]).culprits == ()
    again = [row.replace("restart_count=0", "restart_count=1") for row in (*rendezvous(0, 0), *rendezvous(1, 1))]
    assert explain_lines([*lines, *again, lost.format(1)]).culprits == (4, 5, 6, 7), "the last try"


def table(*entries: tuple[int, str, int]) -> list[str]:
    """Return torchelastic's table: (rank, what it raised, exit code), the first one that was seen at its end."""
    rows = [
        [
            f"[{at}]:", "  time      : 2025-08-13_06:20:19", "  host      : gpu1", f"  rank      : {rank} (local_rank: {rank})",
            f"  exitcode  : {code} (pid: {7000 + rank})", "  error_file: /tmp/x",
            *(["  traceback : Traceback (most recent call last):", '    File "t.py", line 3, in main', "      load()", f"  {text}"]
              if text else [f"  traceback : Signal {-code} received by PID {7000 + rank}"]), "",
        ]
        for at, (rank, text, code) in enumerate(entries)
    ]  # fmt: skip
    head = ["train.py FAILED", "-" * 60, "Failures:", *(row for entry in rows[1:] for row in entry)]
    return [*head, "-" * 60, "Root Cause (first observed failure):", *rows[0]]


BAD = "FileNotFoundError: [Errno 2] No such file or directory: '/data/x'"
GONE = "torch.distributed.DistBackendError: NCCL error: remote process exited"


@pytest.mark.parametrize(
    "entries, named",
    [
        ([(0, BAD, 1), (1, BAD, 1), (3, BAD, 1)], (0, 1, 3)),
        ([(2, BAD, 1), (0, BAD, 1), (1, BAD, 1), (3, BAD, 1)], (0, 1, 2, 3)),
        ([(0, BAD, 1), (1, BAD, 1), (3, "", -15)], (0, 1)),
        ([(0, BAD, 1), (1, "KeyError: 'x'", 1), (3, "KeyError: 'x'", 1)], (0,)),
        ([(0, BAD, 1), (1, GONE, 1), (3, GONE, 1)], (0,)),
        ([(0, GONE, 1), (1, GONE, 1)], ()),
    ],
)
def test_ranks_of_a_table_that_all_raised_the_same(
    explain_lines: Explain, entries: list[tuple[int, str, int]], named: tuple[int, ...]
) -> None:
    assert explain_lines(["torchrun --nproc_per_node=4 t.py", *table(*entries)]).culprits == named


def test_the_place_of_a_pod_is_no_rank_of_its_processes(explain_lines: Explain) -> None:
    raised = ["Traceback (most recent call last):", '  File "t.py", line 3, in main', BAD]
    lines = [f"[pod/job-worker-{pod}/pytorch] RANK={pod} WORLD_SIZE=2" for pod in (0, 1)]
    lines += [f"[pod/job-worker-1/pytorch] {row}" for row in raised]
    assert explain_lines(["torchrun --nproc_per_node=8 t.py", *lines]).culprits == ()
    assert explain_lines(lines).culprits == (1,), "each pod is one rank: RANK of all of them, and no more"
