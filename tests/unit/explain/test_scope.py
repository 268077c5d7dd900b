"""Numbers that count in a node, ends by a watch's own hand, and inputs in which there is no distributed job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ncclguard_explain import Report

Explain = Callable[..., Report]

# --- srun's tasks are nodes where a launcher on each starts the ranks ---

ABORTED = "srun: error: gpu-c: task 2: Killed"
DOWN = "[2026-02-01T03:10:00.100] error: Nodes gpu-c not responding, setting DOWN"
STARTS = "{}: torchrun --nnodes 4 --nproc-per-node 4 --node-rank {} --master-addr gpu-b train.py"


@pytest.mark.parametrize(
    "lines, named",
    [
        ([STARTS.format(host, node) for host, node in (("gpu-a1", 2), ("gpu-c1", 1), ("gpu-b1", 0))], (4, 5, 6, 7)),
        ([f"[gpu-c1] NODE_RANK=3 {STARTS[4:].replace('--node-rank {} ', '')}"], (12, 13, 14, 15)),
        (["+ ssh gpu-c1 'accelerate launch --num_processes 16 --num_machines 4 --machine_rank 3 t.py'"], ()),
        (["srun torchrun --nnodes 4 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint gpu-a1:29400 train.py"], ()),
        (["srun -l python train.py", "1: [rank1]: step 3", "2: [rank2]: step 3"], (2,)),
    ],
)
def test_a_task_of_srun_is_a_node_where_a_launcher_starts_its_ranks(
    explain_lines: Explain, lines: list[str], named: tuple[int, ...]
) -> None:
    end = [line.replace("gpu-c", "gpu-c1") for line in (DOWN, ABORTED)]
    end = end if named != (2,) else end[1:]
    assert explain_lines([*lines, *end]).culprits == named


LOCAL = "E0110 10:55:07.771000 {} torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -11) local_rank: 3 (pid: {}) of binary: /usr/bin/python"


@pytest.mark.parametrize(
    "before, agents, named",
    [
        ("$ python -m torch.distributed.run train.py", (88,), (3,)),
        ("$ kubectl logs sft-worker-2", (88,), ()),
        ("PyTorchJob with 3 pods, one log is left", (88,), ()),
        ("共4台机器，这是其中一台的日志", (88,), ()),
        ("torchrun --nnodes=1:4 train.py", (88,), ()),
        ("two agents:", (88, 91), ()),
    ],
)
def test_a_local_rank_is_the_jobs_only_where_nothing_tells_of_another_node(
    explain_lines: Explain, before: str, agents: tuple[int, ...], named: tuple[int, ...]
) -> None:
    assert explain_lines([before, *(LOCAL.format(agent, agent + 40) for agent in agents)]).culprits == named


# --- whom a watch ended itself ---

FIRST = "mpirun noticed that process rank 2 with PID 4202 on node c17 exited on signal 9 (Killed)."


@pytest.mark.parametrize(
    "told, named",
    [
        ("[rank2]: step watchdog: no progress for 900 s, killing this process", ()),
        ("[rank1]: step watchdog: no progress for 900 s, killing this process", (2,)),
        ("[TRT-LLM] [RANK 1] [E] Hang detected on rank 1 in PyExecutor; hard-killing and propagating to peer ranks.", ()),
        ("monitor: worker process (pid=4202) will be terminated with signal SIGKILL: no heartbeat", ()),
        ("monitor: worker process (pid=4203) will be terminated with signal SIGKILL: no heartbeat", (2,)),
        ("[health] terminating all ranks: stuck for 600 s", ()),
        ("connection retry after a timeout of 3 s", (2,)),
    ],
)  # fmt: skip
def test_who_was_ended_by_a_watch_that_had_announced_it_is_not_named(
    explain_lines: Explain, told: str, named: tuple[int, ...]
) -> None:
    lines = ["mpirun -np 4 python serve.py", told, FIRST]
    assert explain_lines(lines, world_size=4).culprits == named
    assert explain_lines([lines[0], FIRST, told], world_size=4).culprits == (2,)  # a watch speaks of it afterwards


def test_monitors_that_say_the_same_at_once_name_nobody_whatever_stands_before_them(explain_lines: Explain) -> None:
    steps = [
        f"[NeMo I 2026-05-20 03:0{at}:00 nemo_logging:393] epoch 0, iteration {at} | loss: 6.0{at}" for at in range(9)
    ]
    waits = [
        f"2026-05-20 03:21:3{rank},500 [WARNING] [RankMonitorServer:{rank}] Did not get subsequent heartbeat. Waited 450.00 seconds."
        for rank in range(4)
    ]
    kills = [
        f"2026-05-20 03:21:36,50{rank} [INFO] [RankMonitorServer:{rank}] Rank process (pid=441{rank}) will be terminated with signal SIGKILL"
        for rank in range(4)
    ]
    ends = ["[2026-05-20 03:21:37,551] [ERROR] failed (exitcode: -9) local_rank: 0 (pid: 4410) of binary: /usr/bin/python",
            "[2026-05-20 03:22:38,100] [ERROR] RendezvousTimeoutError"]  # fmt: skip
    report = explain_lines(["ft_launcher --nproc-per-node 4 train.py", *steps, *waits, *kills, *ends])
    assert report.incident and report.culprits == () and report.decision == "unknown"


# --- devices and the fabric ---


def test_the_process_of_a_message_of_cann_is_the_rank_that_torch_npu_calls_so(explain_lines: Explain) -> None:
    lines = [
        "[rank8]: [ERROR] 2026-03-03-22:47:52 (PID:71, Device:0, RankID:8) ERR02005 DIST internal error.",
        "[ERROR] RUNTIME(77,python3):2026-03-03-22:17:41.110.632 [engine.cc:1263]Task exception! device_id=6, [HBM multi-bit ECC error].",
        "[rank14]: [ERROR] 2026-03-03-22:17:42 (PID:77, Device:6, RankID:14) ERR00100 PTA call acl api failed.",
        "[rank6]: [ERROR] 2026-03-03-22:47:52 (PID:77001, Device:6, RankID:6) ERR02005 DIST internal error.",
    ]
    report = explain_lines(lines)
    assert report.culprits == (14,) and report.decision == "restart-without"


@pytest.mark.parametrize("peers, decision", [((1, 2), "restart"), ((7, 7), "fix-environment")])
def test_transfers_that_fail_from_every_host_to_several_peers_are_the_fabrics(
    explain_lines: Explain, peers: tuple[int, int], decision: str
) -> None:
    failed = "host{}:88{}:99 [{}] NCCL WARN NET/IB: Got completion from peer 10.8.{}.{}<52537> with status=12 opcode=0 len=0 vendor err 129 (Recv)"
    lines = [
        failed.format(host, number, number, host if peers[0] != 7 else 0, peer)
        for host in range(3)
        for number, peer in enumerate(peers)
    ]
    assert explain_lines(lines).decision == decision


# --- no job ---

RAISED = [
    "Traceback (most recent call last):",
    '  File "/home/x/convert.py", line 4, in <module>',
    "    main()",
    "KeyError: 'url'",
]
KERNEL = "[4012.10] Out of memory: Killed process 9013 ({}) total-vm:1186400kB, anon-rss:881220kB"


@pytest.mark.parametrize(
    "lines, incident",
    [
        (["x@ws:~$ python convert.py", *RAISED], False),
        (["INFO gunicorn: GET /items 500", *RAISED], False),
        (["In [3]: %run convert.py", *RAISED, "step 3 loss 0.2"], False),
        (["Step 4/9 : RUN pip install -r requirements.txt", *RAISED], False),
        (RAISED, True),
        (["x@ws:~$ python train.py", *RAISED[:3], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."], False),
        (["x@ws:~$ torchrun --nproc-per-node 2 convert.py", *RAISED], True),
        (["x@ws:~$ python convert.py", "NCCL version 2.21.5", *RAISED], True),
        (["step 3 loss 0.2", *RAISED], True),
        ([KERNEL.format("chrome")], False),
        ([KERNEL.format("mysqld"), KERNEL.format("Web Content")], False),
        ([KERNEL.format("python3")], True),
        ([KERNEL.format("pt_main_thread")], True),
        (["slurmstepd: start", KERNEL.format("chrome")], True),
        (["[12.3] NVRM: Xid (PCI:0000:3b:00): 79, pid=41, GPU has fallen off the bus."], True),
    ],
)  # fmt: skip
def test_what_tells_of_no_job_is_no_incident(explain_lines: Explain, lines: list[str], incident: bool) -> None:
    report = explain_lines(lines)
    assert report.incident is incident
    assert any("nothing here tells of a distributed job" in note for note in report.notes) is not incident


def test_files_of_several_ranks_are_of_a_job_whatever_they_say(explain_lines: Explain) -> None:
    assert explain_lines({"worker_0.log": ["started"], "worker_1.log": RAISED}).incident


@pytest.mark.parametrize("beside, incident", [([], False), (["[rank3] waits"], True), (["epoch 3, loss 0.2"], True)])
def test_a_rank_that_is_a_place_in_a_servers_list_is_no_rank_of_a_job(
    explain_lines: Explain, beside: list[str], incident: bool
) -> None:
    lines = [
        'INFO:     172.17.0.1:40122 - "POST /queue/join HTTP/1.1" 200 OK',
        "Traceback (most recent call last):",
        '  File "/app/hotels.py", line 88, in search',
        "ValueError: 'Brno' is not in list",
        "rank 3 of the hotels is always empty",
    ]
    assert explain_lines([*lines, *beside]).incident is incident


# --- whose error it is ---


def test_what_a_rank_prints_of_another_ranks_traceback_is_that_ranks(explain_lines: Explain) -> None:
    lines = [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/srv/train.py", line 77, in load',
        "[rank0]:     dcp.load(state)",
        "[rank0]: torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([5])",
        "[rank0]: Traceback (most recent call last): (RANK 5)",
        '[rank0]:   File "/opt/torch/distributed/checkpoint/utils.py", line 239, in all_gather',
        "[rank0]:     result = map_fun()",
        "[rank0]: storage.client.SlowDown: reduce your request rate",
        "[rank1]: torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([5])",
    ]
    assert explain_lines(lines).culprits == (5,)


@pytest.mark.parametrize(
    "follows",
    [
        "RuntimeError: The Inner error is reported as above. The process exits for this inner error",
        "mpi4py.MPI.Exception: MPI_ERR_OTHER: known error not in list",
        "RuntimeError: FATAL ERROR :: MODULE:PT_SYNHELPER synEventSynchronize timeout",
    ],
)
def test_what_follows_from_another_ranks_end_names_nobody_beside_it(explain_lines: Explain, follows: str) -> None:
    lines = [f"[rank0]: {follows}", "[rank3]: ValueError: no such shard", f"[rank4]: {follows}"]
    assert explain_lines(lines).culprits == (3,)


# --- documents, and engines that wait for work ---

RELEASE = ["## 4.2.1", "* Fix: NCCL watchdog timeout on rank 0", '- Fix: "CUDA error: an illegal memory access was encountered"', ""]  # fmt: skip


@pytest.mark.parametrize("more, incident", [([], False), (["  (see #811)"], False), (["[rank1]: ValueError: x"], True)])
def test_a_list_under_a_heading_is_no_log(explain_lines: Explain, more: list[str], incident: bool) -> None:
    assert explain_lines([*RELEASE, *more]).incident is incident


@pytest.mark.parametrize("elsewhere, incident", [([], False), (["    forward (sglang/srt/model_runner.py:88)"], True)])
def test_an_engine_whose_stacks_all_wait_for_requests_is_idle(
    explain_lines: Explain, elsewhere: list[str], incident: bool
) -> None:
    first = elsewhere or ["    recv_requests (sglang/srt/managers/scheduler.py:1102)"]
    lines = [
        *("Process 71: sglang::scheduler_TP0", 'Thread 71 (active): "MainThread"', *first),
        *("Process 72: sglang::scheduler_TP1", 'Thread 72 (active): "MainThread"'),
        "    broadcast (torch/distributed/distributed_c10d.py:2730)",
        "    recv_requests (sglang/srt/managers/scheduler.py:1130)",
    ]
    assert explain_lines(lines).incident is incident


@pytest.mark.parametrize("beside, named", [([], (5,)), (["rank 5: cuda:4 PCI 0000:9d:00.0"], ())])
def test_a_table_of_ranks_and_buses_tells_whose_gpu_was_lost(
    explain_lines: Explain, beside: list[str], named: tuple[int, ...]
) -> None:
    table = [f"rank {rank}: cuda:{rank} PCI 0000:{bus}:00.0" for rank, bus in ((3, "61"), (4, "9d"), (5, "9b"))]
    lost = "[814422.1] NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    assert explain_lines({"train.log": [*table, *beside], "dmesg.log": [lost]}).culprits == named


def test_the_process_behind_the_number_of_an_ascend_error_is_the_rank_that_torch_npu_calls_so(
    explain_lines: Explain,
) -> None:
    lost = "The Notify register has not received the Notify record from remote rank [3]."
    lines = [
        line
        for rank in (0, 1, 2)
        for line in (
            f"[ERROR] 2026-02-27-21:34:00 (PID:5610{rank}, Device:{rank}, RankID:{rank}) ERR02200 DIST call hccl api failed.",
            f"EI0002: [PID: 5610{rank}] 2026-02-27 The wait execution of the Notify register times out. Reason: {lost}",
        )
    ]
    assert explain_lines(lines).culprits == (3,)


# --- what a blind set of sixty logs showed ---


@pytest.mark.parametrize("place, named", [("TP1", (1,)), ("(SGLangEngine pid=8803, ip=172.20.9.4) TP1", ())])
def test_the_place_in_an_engine_that_is_an_actor_of_ray_is_no_rank_of_the_job(
    explain_lines: Explain, place: str, named: tuple[int, ...]
) -> None:
    actor, _, tensor = place.rpartition(" ")
    head = f"{actor} [2026-11-04 01:44:21 {tensor}]".strip()
    lines = [f"{head} Scheduler hit an exception: Traceback (most recent call last):", '  File "m.py", line 3, in run',
             "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB."]  # fmt: skip
    report = explain_lines(lines, world_size=16)
    assert report.incident and report.culprits == named and bool(report.places) is not bool(named)


WAITS = "[WARNING] [RankMonitorServer:{0}@n14] Did not get subsequent heartbeat. Waited 181.02 seconds."
LOCK = ["    _flock_acquire (filelock/_unix.py:43)", "    compile (triton/compiler/compiler.py:288)"]
REDUCE = ["    all_reduce (torch/distributed/distributed_c10d.py:3011)"]


@pytest.mark.parametrize("stack, others, named", [(LOCK, [], (9,)), (REDUCE, [], ()), (LOCK, [10], ())])
def test_one_rank_alone_without_heartbeats_is_named_where_its_stack_is_in_no_collective(
    explain_lines: Explain, stack: list[str], others: list[int], named: tuple[int, ...]
) -> None:
    lines = ["[ft_launcher9921@n14] Starting worker group: nproc=4, group_rank=2, rank_offset=8"]
    lines += [WAITS.format(rank) for rank in (9, *others)]
    lines += [
        "[WARNING] [RankMonitorServer:9@n14] Shutting down training process pid=10043 rank=9",
        "py-spy dump of pid 10043:",
    ]
    lines += ['Thread 10043 (active): "MainThread"', *stack, ""]
    lines += ["[ERROR] [ft_launcher9921@n14] failed (exitcode: -9) local_rank: 1 (pid: 10043) of binary: python"]
    assert explain_lines(lines).culprits == named


def test_a_local_rank_of_a_node_that_is_not_the_first_is_no_rank_of_the_job(explain_lines: Explain) -> None:
    end = LOCAL.format(88, 128)
    assert explain_lines(["Starting worker group: nproc=4, group_rank=0", end]).culprits == (3,)
    assert explain_lines(["Starting worker group: nproc=4, group_rank=2", end]).culprits == ()


def test_threads_that_were_stuck_several_times_and_came_free_are_no_incident(explain_lines: Explain) -> None:
    stuck = "rendezvous.cc:102] This thread has been waiting for `initialize clique for rank {}` for 10 seconds and may be stuck."
    free = "rendezvous.cc:83] Thread is unstuck! Warning above was a false-positive."
    assert not explain_lines([stuck.format(0), free, stuck.format(1), free]).incident
    assert explain_lines([stuck.format(0), free, stuck.format(1)]).incident


def test_tasks_of_a_lost_host_are_told_by_an_end_of_whatever_kind(explain_lines: Explain) -> None:
    ends = [f"srun: error: c{host}: tasks {8 * host}-{8 * host + 7}: Terminated" for host in range(3)]
    lines = ["srun: error: Node failure on c3", *ends, "srun: error: c3: tasks 24-31: Unspecified error"]
    assert explain_lines(lines).culprits == tuple(range(24, 32))


@pytest.mark.parametrize("world, named", [(None, ()), (3, (1,))])
def test_of_two_that_wait_nobody_is_told_absent_unless_the_jobs_size_is_known(
    explain_lines: Explain, world: int | None, named: tuple[int, ...]
) -> None:
    lines = [
        f"[E ProcessGroupNCCL.cpp:566] [Rank {rank}] Watchdog caught collective operation timeout: "
        "WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1801819 milliseconds before timing out."
        for rank in (0, 2)
    ]
    report = explain_lines(lines, world_size=world)
    assert report.incident and report.culprits == named


def test_a_result_that_only_the_first_gpu_gets_wrong_is_the_gpus(explain_lines: Explain) -> None:
    head = "WARNING:megatron.core.rerun_state_machine:"
    lines = [f"{head}Unexpected result nan on rank 37 at iteration #31593 invocation #1 (message='found NaN in local forward loss')",
             f"{head}Second rerun: result is not the same, persistent hardware fault suspected on initial GPU, rank 37"]  # fmt: skip
    report = explain_lines(lines, world_size=64)
    assert (report.culprits, report.decision) == ((37,), "restart-without")
