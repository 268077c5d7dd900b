"""Who is proved is named, and nobody else: whose failure follows, whose number counts elsewhere, who reports for others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from explain_logs import timeout

from ncclguard_explain import Report

Explain = Callable[..., Report]

SERVER_GONE = [
    "requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('Remote end closed connection'))",
    "http.client.RemoteDisconnected: Remote end closed connection without response",
    "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected",
    "httpx.ConnectError: All connection attempts failed",
    "requests.exceptions.ConnectionError: HTTPConnectionPool(host='10.0.0.5', port=8000): [Errno 111] Connection refused",
]


def raised(rank: int, *text: str, prefix: str = "[rank{}]: ") -> list[str]:
    lines = ["Traceback (most recent call last):", '  File "/job/train.py", line 12, in <module>', "    train()", *text]
    return [prefix.format(rank) + line for line in lines]


@pytest.mark.parametrize("error", SERVER_GONE)
def test_who_reports_that_a_server_is_gone_is_not_the_one_that_failed(explain_lines: Explain, error: str) -> None:
    report = explain_lines(raised(0, error))
    assert report.incident and report.culprits == () and report.places == ()


ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    "error", [f"torch.AcceleratorError: {ILLEGAL}", f"RuntimeError: {ILLEGAL.replace('CUDA', 'HIP')}"]
)
@pytest.mark.parametrize("ranks, named", [((0, 1, 3, 4, 5, 7), ()), ((2,), (2,))])
def test_of_most_ranks_that_report_one_fault_of_their_devices_nobody_is_named(
    explain_lines: Explain, error: str, ranks: tuple[int, ...], named: tuple[int, ...]
) -> None:
    lines = [line for rank in ranks for line in raised(rank, error)]
    assert explain_lines(lines, world_size=8).culprits == named


@pytest.mark.parametrize("replicated", [True, False])
def test_a_rank_of_a_replica_group_is_none_of_the_job(explain_lines: Explain, replicated: bool) -> None:
    steps = ["[rank0]: torchft.manager - INFO - [llama_1:f318/0 - step 9] should_commit=True"] if replicated else []
    report = explain_lines({"replica_0.log": steps, "replica_1.log": raised(3, "ValueError: bad sample 17")})
    assert report.culprits == (() if replicated else (3,))
    assert ("rank 3 of the replica group in replica_1.log" in report.places) is replicated


@pytest.mark.parametrize(
    "said, named",
    [
        ("(pasted from both nodes, 2 x 8 GPUs)", ()),
        ("$ kubectl logs -n ml -l job=sft --prefix=false", ()),
        ("launching on 4 nodes", ()),
        ("1 x 8 GPUs", (3,)),
        ("0/16 nodes available", (3,)),
    ],
)
def test_a_local_rank_of_one_of_several_nodes_names_nobody(
    explain_lines: Explain, said: str, named: tuple[int, ...]
) -> None:
    assert explain_lines([said, *raised(3, "ValueError: bad sample", prefix="[default{}]:")]).culprits == named


# --- which rank a process, a GPU or a port is ---

KILLED = "[Tue Feb 20 08:44:10 2024] Out of memory: Killed process 4188 (python) total-vm:281337740kB"


@pytest.mark.parametrize(
    "told, named",
    [
        ("run.sh: line 12:  4188 Killed                  python train.py --rank 2", (2,)),
        ("[1]  + 4188 killed     python train.py --rank=2", (2,)),
        ("ml  4188  99.1  3.2 python train.py --global-rank 2 --world 4", (2,)),
        ("started pid=4188: python train.py --rank 2", (2,)),
        ("run.sh: line 12:  4188 Killed                  python train.py --node_rank 2", ()),
        ("run.sh: line 12:  4188 Killed                  python main.py --multiprocessing-distributed --rank 2", ()),
    ],
)
def test_a_command_line_tells_which_rank_the_kernel_killed(
    explain_lines: Explain, told: str, named: tuple[int, ...]
) -> None:
    assert explain_lines({"a.log": [told], "dmesg.txt": [KILLED]}, world_size=4).culprits == named


XID = "[Tue Feb  3 18:45:53 2026] NVRM: Xid (PCI:0000:5d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
INIT = "{}:{}:{} [3] NCCL INFO ncclCommInitRank comm 0x2e rank {} nranks 16 cudaDev 3 nvmlDev 3 busId 5d000 commId 0x7c - Init COMPLETE"


@pytest.mark.parametrize(
    "file, before, named",
    [
        ("dmesg.txt", "root@gpu-b8:~# dmesg -T | tail -24", (11,)),
        ("dmesg.txt", "[ops@gpu-b8 ~]$ sudo dmesg -T", (11,)),
        ("dmesg.txt", "$ ssh -q gpu-b8 sudo dmesg -T", (11,)),
        ("dmesg-gpu-b8.txt", "", (11,)),
        ("gpu-b8_dmesg.txt", "", (11,)),
        ("dmesg.txt", "", ()),  # two hosts have a GPU in this place
    ],
)
def test_the_host_of_a_kernels_log_tells_which_rank_has_lost_its_gpu(
    explain_lines: Explain, file: str, before: str, named: tuple[int, ...]
) -> None:
    inits = [INIT.format("gpu-b7", 71, 71, 3), INIT.format("gpu-b8", 81, 81, 11)]
    report = explain_lines({"train.log": inits, file: [before, XID]})
    assert report.culprits == named and report.decision in ("restart-without", "fix-environment")


def of_actor(pid: int, rank: int, *lines: str) -> list[str]:
    return [f"(PolicyActor pid={pid}) {line}" for line in lines or timeout(rank)]


@pytest.mark.parametrize("silent, size, named", [(2, 4, (2,)), (3, 4, (3,)), (2, 8, ())])
def test_the_actor_whose_rank_no_other_has_is_that_rank(
    explain_lines: Explain, silent: int, size: int, named: tuple[int, ...]
) -> None:
    waits = [line for rank in range(4) if rank != silent for line in of_actor(100 + rank, rank)]
    met = (
        f"[Gloo] Rank 0 is connected to {size - 1} peer ranks. Expected number of connected peer ranks is : {size - 1}"
    )
    failed = of_actor(
        999, 0, *raised(0, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", prefix="{}"[:0])
    )
    assert explain_lines([*of_actor(100, 0, met), *failed, *waits]).culprits == named


CHANNEL = "hgx-{}:{}:{} [{}] NCCL INFO Channel 00/0 : {}[{}] -> {}[{}] [{}] via NET/IB/{}/GDRDMA"


@pytest.mark.parametrize("size, named", [(4, (3,)), (8, ())])
def test_the_channels_of_the_only_communicator_tell_whose_port_is_down(
    explain_lines: Explain, size: int, named: tuple[int, ...]
) -> None:
    sends = [CHANNEL.format(2, 70 + gpu, 170 + gpu, gpu, 2 + gpu, gpu, gpu, gpu, "send", gpu) for gpu in (0, 1)]
    receives = [CHANNEL.format(1, 80 + gpu, 180 + gpu, gpu, 2 + gpu, gpu, gpu, gpu, "receive", gpu) for gpu in (0, 1)]
    lines = [
        f"world size: {size}", *sends, *receives,
        "hgx-2:71:171 [1] transport/net_ib.cc:1802 NCCL WARN NET/IB : mlx5_1:1 Got async event : port error",
        "hgx-1:81:181 [1] transport/net_ib.cc:2086 NCCL WARN NET/IB: Got completion from peer 10.0.0.2<5> with status=12 opcode=1 len=0",
    ]  # fmt: skip
    assert explain_lines(lines).culprits == named


# --- whose exception it is ---


def test_only_the_first_line_of_a_traceback_names_its_rank(explain_lines: Explain) -> None:
    """TensorRT-LLM heads a record, not each of its lines; the ranks that tell of a hang waited for this one."""
    lines = [
        "[04/14/2026-03:31:13] [TRT-LLM] [RANK 6] [E] Traceback (most recent call last):",
        *raised(6, "AttributeError: 'NoneType' object has no attribute 'py_draft_tokens'", prefix="{}"[:0])[1:],
        *(
            f"[04/14/2026-03:36:13] [TRT-LLM] [RANK {rank}] [E] Hang detected on rank {rank} in PyExecutor."
            for rank in range(6)
        ),
        "MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD",
    ]
    assert explain_lines(lines, world_size=8).culprits == (6,)


@pytest.mark.parametrize("error", ["__main__.NetzFehler: falsche Dimension", "ValueError: bad mesh"])
def test_an_exception_without_a_rank_is_of_the_only_one_that_aborts_the_job(explain_lines: Explain, error: str) -> None:
    abort = "MPI_ABORT was invoked on rank {} in communicator MPI_COMM_WORLD"
    own = raised(4, error, prefix="{}"[:0])
    assert explain_lines([*own, abort.format(4)], world_size=8).culprits == (4,)
    assert explain_lines([*own, abort.format(4), abort.format(5)], world_size=8).culprits == ()
    assert explain_lines([*own, "Hang detected after 300 seconds.", abort.format(0)], world_size=8).culprits == ()


def test_an_error_of_which_a_further_line_blames_a_peer_follows_from_that(explain_lines: Explain) -> None:
    """Intel Gaudi's bridge raises one error for everything, and says the rest in the lines below it."""
    own = raised(4, "RuntimeError: [Rank:4] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::4831838208")
    others = [
        f"[rank{rank}]: {line}"
        for rank in (0, 1, 2, 3, 5, 6, 7)
        for line in (
            f"RuntimeError: [Rank:{rank}] FATAL ERROR :: MODULE:PT_BRIDGE Exception in Lowering thread...",
            f"[Rank:{rank}] FATAL ERROR :: MODULE:PT_HCCL hcclAllReduce: remote peer closed scaleout connection",
        )
    ]
    assert explain_lines([*own, *others]).culprits == (4,)


def test_a_rank_that_aborts_on_a_node_where_nobody_waited_is_named_by_its_fault(explain_lines: Explain) -> None:
    first = ["Root Cause (first observed failure):", "[0]:", "  time      : 2026-03-01_09:09:37", "  host      : n2",
             "  rank      : 13 (local_rank: 5)", "  exitcode  : -6 (pid: 5206)", "  traceback : Signal 6 (SIGABRT)"]  # fmt: skip
    fault = "Memory access fault by GPU node-7 (Agent handle: 0x55d) on address 0x7ee4b2a00000. Reason: Unknown."
    logs = {"node2.out": [fault, *first], "node1.out": [line for rank in range(8) for line in timeout(rank)]}
    assert explain_lines(logs, world_size=16).culprits == (13,)
    logs["node2.out"] += timeout(13)
    assert explain_lines(logs, world_size=16).culprits == ()


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_watchdogs_error_of_its_device_is_of_the_only_local_rank_that_aborts(
    explain_lines: Explain, nodes: int
) -> None:
    """torch 2.1 prints the number in the group alone, and a launcher that is cut off the local rank."""
    error = "CUDA error: uncorrectable ECC error encountered"
    lines = [
        f"{nodes} nodes: torchrun --nnodes={nodes} --nproc_per_node=2 train.py",
        f"[E ProcessGroupNCCL.cpp:916] [Rank 1] NCCL watchdog thread terminated with exception: {error}",
        "[2026-07-19 22:40:19,996] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: -6) local_rank: 1 (pid: 3105) of binary: python",
    ]
    assert explain_lines(lines).culprits == ((1,) if nodes == 1 else ())


def test_the_local_rank_in_front_of_a_rank_tells_the_first_of_its_node(explain_lines: Explain) -> None:
    """Of one fault the lines that torchrun marks with the local rank alone are not another rank's."""
    error = "Process group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered"
    lines = [
        f"[default4]:[rank12]:[E817 09:22:51.480013413 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 12] {error}",
        f"[default4]:  what():  [PG 0 (default_pg) Rank 12] {error}",
    ]
    assert explain_lines(lines).culprits == (12,)


def test_actors_that_raised_what_a_collective_returned_have_not_died_first(explain_lines: Explain) -> None:
    raised = "[2026-11-02 15:40:11,227 E 4{0} 2{0}] logging.cc:97: Unhandled exception: N3c105ErrorE. what(): Collective call returned error"
    lines = [
        f"(Worker pid=4{rank}) Setting up process group for: env:// [rank={rank}, world_size=4]" for rank in range(4)
    ]
    lines += [f"(Worker pid=4{rank}) {raised.format(rank)}" for rank in range(2)]
    died = ["ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.", "\tclass_name: Worker",
            "\tactor_id: e99f", "\tpid: 40", "\tip: 172.17.0.2"]  # fmt: skip
    assert explain_lines([*lines, *died]).culprits == ()
    assert explain_lines([lines[0], *died]).culprits == (0,)


def test_who_finds_its_device_taken_is_named(explain_lines: Explain) -> None:
    lines = [
        "RuntimeError: [ERROR] HCCL error in: torch_npu/csrc/distributed/ProcessGroupHCCL.cpp:64",
        "[ERROR] 2026-05-21-14:22:19 (PID:71002, Device:5, RankID:5) ERR02200 DIST call hccl api failed.",
        "EJ0001: 2026-05-21-14:22:19.167.645 Failed to initialize the HCCP process. Reason: Maybe the last training process is running.",
        "[2026-05-21 14:22:25,640] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: 1) local_rank: 5 (pid: 71002) of binary: python",
    ]
    report = explain_lines(lines, world_size=8)
    assert (report.culprits, report.decision) == ((5,), "fix-environment")


def test_horovods_stalled_ranks_are_read_between_empty_lines(explain_lines: Explain) -> None:
    head = "[2026-01-16 09:15:44.301288: W horovod/common/stall_inspector.cc:105] One or more tensors were submitted to be reduced"
    lines = [f"[1,0]<stderr>:{line}" for line in (head, "Stalled ranks:", "3: [HorovodAllreduce_grads_12_0 ...]")]
    assert explain_lines([row for line in lines for row in (line, "")], world_size=4).culprits == (3,)


def test_behind_a_progress_bar_a_scheduler_of_sglang_says_its_place(explain_lines: Explain) -> None:
    bar = "  9%|#9        | 2/23 [00:07<01:11,  3.41s/it]"
    error = [
        '  File "/srv/sglang/srt/model_runner.py", line 397, in capture',
        "    out = run()",
        "ValueError: bad shape",
    ]
    lines = [f"{bar}[2026-02-23 10:35:12 TP1] Scheduler hit an exception: Traceback (most recent call last):", *error]
    assert explain_lines(lines, world_size=8).culprits == (1,)


def test_a_number_in_a_group_above_its_rank_is_of_a_group_of_several_jobs(explain_lines: Explain) -> None:
    """The workers of engines are each rank 0 of their own, and have other numbers in the group with the trainer."""
    work = "WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=512, NumelOut=512, Timeout(ms)=1800000)"
    lines = [
        f"(Engine pid=7{number}, ip=10.0.0.{number}) [rank0]:[E1224 13:23:02.98 ProcessGroupNCCL.cpp:542] [Rank {number}] "
        f"Collective {work} raised the following async exception: NCCL error: remote process exited"
        for number in (8, 9)
    ]
    died = ["ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
            "\tclass_name: Engine", "\tactor_id: f274", "\tpid: 78", "\tip: 10.0.0.8"]  # fmt: skip
    report = explain_lines([*lines, *died])
    assert (report.culprits, report.places) == ((), ("Engine pid 78 (10.0.0.8)",))


SECTION = "[WARNING] [RankMonitorServer:{}@n1] Section '{}' has been open for 300.0 seconds. Timeout is 300.00 seconds."
OUTSIDE = "[WARNING] [RankMonitorServer:{}@n1] Was out of section for 302.40 seconds. Timeout is 300.00 seconds."


@pytest.mark.parametrize("last", [OUTSIDE.format(5), SECTION.format(5, "checkpointing")])
def test_the_one_rank_that_is_in_another_section_than_all_the_others_is_named(
    explain_lines: Explain, last: str
) -> None:
    others = [SECTION.format(rank, "step") for rank in range(5)]
    assert explain_lines([*others, last]).culprits == (5,)
    assert explain_lines([*others[:3], last], world_size=6).culprits == ()
    assert explain_lines([*others, SECTION.format(5, "step")]).culprits == ()


# --- what a driver or the program itself tells of all ranks ---

JSON_ROW = '{{"ev": "heartbeat", "rank": {0}, "step": {1}, "stage": "x", "coll_seq": {2}}}'


@pytest.mark.parametrize("row", [JSON_ROW, "ts=07:08:20 rank={0} step={1} stage=x seq={2}"])
@pytest.mark.parametrize("numbers, named", [([100, 100, 99, 100], (2,)), ([100, 99, 99, 99], ()), ([100] * 4, ())])
def test_the_rank_that_is_behind_in_the_last_snapshot_of_all_is_named(
    explain_lines: Explain, row: str, numbers: list[int], named: tuple[int, ...]
) -> None:
    """A rank that only an earlier snapshot lists has not been looked at since."""
    before = [row.format(rank, 11, 90) for rank in range(8)]
    last = [row.format(rank, 12, number) for rank, number in enumerate(numbers)]
    assert explain_lines([*before, *last, *timeout(0), *timeout(1)], world_size=8).culprits == named


def counted(*numbers: int, of: int = 288, prefix: str = "[rank0]: ") -> list[str]:
    return [f"{prefix}consolidated {number}/{of} shards" for number in numbers]


@pytest.mark.parametrize(
    "numbers, decision", [((17, 34, 51), "raise-limit"), ((17, 17, 17), "unknown"), ((34, 17, 51), "unknown")]
)
def test_a_rank_that_comes_nearer_to_its_end_needs_a_longer_limit(
    explain_lines: Explain, numbers: tuple[int, ...], decision: str
) -> None:
    waits = [line for rank in range(1, 8) for line in timeout(rank)]
    report = explain_lines({"rank0.log": counted(*numbers), "others.log": waits}, world_size=8)
    assert (report.culprits, report.decision) == ((0,), decision)


@pytest.mark.parametrize("numbers, decision", [((17, 34, 51), "raise-limit"), ((17, 34, 288), "unknown")])
def test_a_server_that_was_still_at_work_needs_a_longer_limit(
    explain_lines: Explain, numbers: tuple[int, ...], decision: str
) -> None:
    client = ["Traceback (most recent call last):", '  File "c.py", line 2, in post', "httpx.ReadTimeout"]
    logs = {"server.log": counted(*numbers, prefix="update_weights: "), "client.log": client}
    report = explain_lines(logs)
    assert (report.culprits, report.decision) == ((), decision)


@pytest.mark.parametrize("own, cause", [(1249, "unequal_batches"), (1250, "unknown")])
@pytest.mark.parametrize("said", ["Anzahl Trainingsbatches: {}", "steps_per_epoch={}", "len(train_loader) = {}"])
def test_the_awaited_rank_that_has_another_number_of_batches(
    explain_lines: Explain, said: str, own: int, cause: str
) -> None:
    lines = [f"[rank {rank}] " + said.format(own if rank == 6 else 1250) for rank in range(8)]
    waits = [line for rank in range(8) if rank != 6 for line in timeout(rank)]
    report = explain_lines([*lines, *waits])
    assert (report.culprits, report.cause_class) == ((6,), cause)
    assert report.decision == ("fix-code" if own == 1249 else "unknown")


# --- one device that reports its own fault, and what the others report after it ---

NEURON = 'RuntimeError: Execution failed, status={} message="{}"'
GAUDI = "RuntimeError: [Rank:{}] FATAL ERROR :: MODULE:PT_{} "
DEVICES = {
    "NVIDIA": (
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "UnknownError: transfer failed",
    ),
    "Neuron": (NEURON.format(1200, "NRT_EXEC_HW_ERR_HBM_UE"), NEURON.format(5, "NRT_TIMEOUT")),
    "Gaudi": (
        GAUDI.format(5, "DEVMEM") + "Received catastrophic event: device is in hard reset. synStatus=1",
        GAUDI.format(0, "SYNHELPER") + "workspace wait failed. synStatus=26 [Generic failure].",
    ),
    "Ascend": ("HBM MULTI BIT ECC, Uncorrectable ECC. The memory address is 0x12c1", "UnknownError: 507048"),
}


@pytest.mark.parametrize("device", DEVICES)
def test_the_rank_whose_device_broke_is_named_and_not_those_whose_errors_follow(
    explain_lines: Explain, device: str
) -> None:
    own, others = DEVICES[device]
    lines = [f"[rank5]: {own}", *(f"[rank{rank}]: {others}" for rank in (0, 1, 2, 7))]
    report = explain_lines(lines, world_size=16)
    assert (report.culprits, report.cause_class) == ((5,), "gpu_hardware")
    assert (report.decision, report.without) == ("restart-without", "rank 5")


@pytest.mark.parametrize(
    "error", [NEURON.format(5, "NRT_TIMEOUT"), GAUDI.format(0, "SYNHELPER") + "workspace wait failed."]
)
def test_a_devices_own_limit_accuses_nobody(explain_lines: Explain, error: str) -> None:
    report = explain_lines([f"[rank{rank}]: {error}" for rank in range(4)], world_size=4)
    assert report.incident and report.culprits == ()


def test_a_fault_of_its_own_beside_a_broken_device_is_named_too(explain_lines: Explain) -> None:
    """One that no other rank shares, and one that came before, do not follow from the device."""
    ecc = "[rank5]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
    alike = [line for rank in (1, 2) for line in raised(rank, "ValueError: bad sample")]
    assert explain_lines([ecc, *raised(3, "ValueError: bad sample")], world_size=16).culprits == (3, 5)
    assert explain_lines([*alike, ecc], world_size=16).culprits == (1, 2, 5)
    assert explain_lines([ecc, *alike], world_size=16).culprits == (5,)


# --- numbers that count elsewhere, and whose text it is ---


@pytest.mark.parametrize("replicas, named, places", [(1, (1,), ()), (8, (), ("Worker_TP1_EP",))])
def test_a_worker_of_a_replica_that_its_name_leaves_out_is_no_rank_of_the_job(
    explain_lines: Explain, replicas: int, named: tuple[int, ...], places: tuple[str, ...]
) -> None:
    head = "(Worker_TP1_EP pid=289) ERROR 02-11 09:47:31 [multiproc_executor.py:844] "
    lines = [
        f"INFO 02-11 09:12:44 args: {{'tensor_parallel_size': 2, 'data_parallel_size': {replicas}}}",
        *(
            head + line
            for line in ["Traceback (most recent call last):", '  File "m.py", line 3, in f', "KeyError: 'w1'"]
        ),
        "(EngineCore pid=201) ERROR 02-11 09:47:32 [multiproc_executor.py:230] Worker proc VllmWorker-1 died unexpectedly",
    ]
    report = explain_lines(lines)
    assert (report.culprits, report.places) == (named, places)


def stall(*rows: str) -> list[str]:
    return [f"[1,0]<stderr>:{row}" for row in ["Missing ranks:", *rows]]


def test_of_horovods_reports_the_rank_that_all_of_them_miss_is_named(explain_lines: Explain) -> None:
    first = stall("3: [HorovodAllreduce_g_0, HorovodAllreduce_g_1 ...]", "6: [HorovodAllreduce_g_41]")
    again = stall("3: [HorovodAllreduce_g_0, HorovodAllreduce_g_1 ...]")
    end = "[1,0]<stderr>:horovod.common.exceptions.HorovodInternalError: Horovod has been shut down."
    assert explain_lines([*first, *again, *again, end], world_size=8).culprits == (3,)
    assert explain_lines([*first, *first, end], world_size=8).culprits == (3, 6)  # each lacks what the other has
    other = stall("6: [HorovodAllreduce_g_41]")
    assert explain_lines([*first, *again, *other, end], world_size=8).culprits == (6,)  # the last one lists all


def test_the_head_of_ray_trains_snippet_tells_whose_traceback_it_is(explain_lines: Explain) -> None:
    head = "(TrainController pid=3301) "
    lines = ["[Rank 4 Error Snippet]:", "Traceback (most recent call last):", '  File "t.py", line 7, in loop',
             "pyarrow.lib.ArrowInvalid: magic bytes not found"]  # fmt: skip
    assert explain_lines([head + line for line in lines], world_size=6).culprits == (4,)
    assert explain_lines([head + line for line in lines[1:]], world_size=6).culprits == ()


@pytest.mark.parametrize("level", ["ERROR", "CRITICAL"])
def test_the_rank_among_the_pairs_in_front_of_a_level_is_the_speakers(explain_lines: Explain, level: str) -> None:
    prefix = f"2026-04-02T18:51:40.118 rank={{}} host=pod-y {level} "
    waits = [f"[rank{rank}]: RuntimeError: DeepEP error: timeout (dispatch CPU)" for rank in (0, 1, 2)]
    assert explain_lines([*raised(11, "TypeError: no item", prefix=prefix), *waits], world_size=16).culprits == (11,)
    told = "2026-04-02T18:51:40.118 lost rank=11 host=pod-y "
    assert explain_lines(raised(0, "TypeError: no item", prefix=told), world_size=16).culprits == ()


def test_the_one_that_aborted_among_those_that_the_launcher_ended_is_named(explain_lines: Explain) -> None:
    ended = [f"x41c{rank}.hsn: rank {rank} died from signal 15" for rank in (0, 26, 44)]
    first = "x41c3.hsn: rank 37 died from signal 6 and dumped core"
    second = "x41c9.hsn: rank 41 died from signal 6 and dumped core"
    assert explain_lines([first, *ended], world_size=48).culprits == (37,)
    assert explain_lines([first, second, *ended], world_size=48).culprits == ()
    assert explain_lines([*timeout(37), first, *ended], world_size=48).culprits == ()  # its own watchdog


def test_a_reclaimed_spot_instance_leaves_nothing_to_mend(explain_lines: Explain) -> None:
    lines = [
        '2026-02-14T05:53:00Z [imds] spot instance-action: {"action": "terminate", "time": "2026-02-14T05:55:00Z"} on ip-9',
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 88 got signal: 15",
    ]
    report = explain_lines(lines, world_size=8)
    assert (report.culprits, report.decision) == ((), "restart")
    assert explain_lines(lines[1:], world_size=8).decision == "unknown"


# --- whose end is its own ---

CORE_DIED = "ERROR 11-02 18:25:01 [multiproc_executor.py:154] Worker proc VllmWorker-0 died unexpectedly, shutting down executor."


@pytest.mark.parametrize("before, named", [(True, (3,)), (False, (0,))])
def test_a_worker_that_dies_behind_anothers_exception_has_followed(
    explain_lines: Explain, before: bool, named: tuple[int, ...]
) -> None:
    own = raised(
        3, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", prefix="(Worker_TP{} pid=9) "
    )
    assert explain_lines([*(own if before else []), CORE_DIED], world_size=4).culprits == named


def test_ranks_whose_device_waited_for_a_collective_did_not_fail(explain_lines: Explain) -> None:
    lines = [
        line
        for rank in (2, 1, 3)
        for line in [
            f"2026-10-21 10:42:00,220 - lmdeploy - ERROR - model_agent.py:489 - Rank[{rank}] failed.",
            *raised(rank, "RuntimeError: ACL stream synchronize failed.", prefix=""),
            (
                f"EI9999: 2026-10-21-10:42:00.360.410 The error from device(chipId:{rank}, dieId:0), serial number is 9, hccl "
                "fftsplus task timeout occurred during task execution, stuck notify num:1, timeout:30min(default)."
            ),
        ]
    ]
    report = explain_lines(lines, world_size=4)
    assert report.incident and report.culprits == () and report.effective_timeout_ms == 1_800_000


def test_the_shard_that_its_launcher_says_has_failed_is_the_one_that_raised(explain_lines: Explain) -> None:
    lines = [
        *(f"INFO shard-manager: text_generation_launcher: Starting shard rank={rank}" for rank in range(4)),
        *raised(0, "OSError: Input/output error (os error 5)", prefix=""),
        "ERROR text_generation_launcher: Shard 2 failed to start",
        "INFO text_generation_launcher: Shutting down shards",
    ]
    assert explain_lines(lines).culprits == (2,)


@pytest.mark.parametrize(
    "thrown, what, named",
    [
        ("tensorrt_llm::common::TllmException", "Assertion failed: Failed to deserialize cuda engine.", (2,)),
        ("std::runtime_error", "NCCL error: unhandled system error, NCCL version 2.14.3", ()),
    ],
)
def test_who_is_aborted_by_an_exception_of_c_plus_plus_is_named_unless_that_is_about_a_peer(
    explain_lines: Explain, thrown: str, what: str, named: tuple[int, ...]
) -> None:
    lines = [
        f"terminate called after throwing an instance of '{thrown}'",
        f"  what():  {what}",
        "mpirun noticed that process rank 2 with PID 229 on node h100-07 exited on signal 6 (Aborted).",
    ]
    assert explain_lines(lines, world_size=4).culprits == named


@pytest.mark.parametrize("named", [(7,), ()])
def test_of_two_nodes_that_abort_the_one_whose_kernel_failed_is_named(
    explain_lines: Explain, named: tuple[int, ...]
) -> None:
    def ended(rank: int, pid: int) -> list[str]:
        return [
            f"ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -6) local_rank: {rank % 4} (pid: {pid}) of binary: /opt/python",
            "Root Cause (first observed failure):", "[0]:", "  time      : 2023-04-19_11:02:44", f"  host      : vision-{rank // 4}",
            f"  rank      : {rank} (local_rank: {rank % 4})", f"  exitcode  : -6 (pid: {pid})",
        ]  # fmt: skip

    torn = [
        "terminate called after throwing an instance of 'std::runtime_error'",
        "  what():  NCCL error: unhandled system error",
    ]
    fault = raised(7, "RuntimeError: CUDA error: device-side assert triggered", prefix="") if named else torn
    logs = {"node0.log": [*torn, *ended(0, 30111)], "node1.log": [*fault, *ended(7, 7744)]}
    assert explain_lines(logs, world_size=8).culprits == named


# --- which rank a pod, an actor or a host is ---


@pytest.mark.parametrize("speaking, named", [((0, 1), (2,)), ((0,), ()), ((0, 4), ())])
def test_the_rank_in_a_pods_environment_counts_where_pods_have_one_rank_each(
    explain_lines: Explain, speaking: tuple[int, ...], named: tuple[int, ...]
) -> None:
    described = [
        "$ kubectl describe pod mlm-worker-1 -n ml", "Name:             mlm-worker-1", "    State:          Terminated",
        "      Reason:       OOMKilled", "      Exit Code:    137", "    Environment:", "      WORLD_SIZE:   4", "      RANK:         2",
    ]  # fmt: skip
    logs = {f"mlm-{rank}.log": timeout(rank, seq=85613) for rank in speaking}
    assert explain_lines({**logs, "kubectl.txt": described}, world_size=8).culprits == named


def test_the_name_of_a_dead_actor_tells_whose_process_raised(explain_lines: Explain) -> None:
    lines = [
        "(main_task pid=26011) {'trainer': {'n_gpus_per_node': 4, 'nnodes': 1}}",
        ("(WorkerDict pid=27499) [2026-03-04 19:28:30,014 E 27499 27499] logging.cc:113: Unhandled exception: St12system_error. "
        "what(): thread: Resource temporarily unavailable [system:11]"),
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict", "\tpid: 27499", "\tname: 31cVuRWorkerDict_0:3",
    ]  # fmt: skip
    report = explain_lines(lines)
    assert report.culprits == (3,) and report.places == ()


@pytest.mark.parametrize("per_node, named", [("--nproc_per_node 8 ", tuple(range(16, 24))), ("", ())])
def test_a_host_that_is_lost_is_known_by_the_node_rank_that_it_printed(
    explain_lines: Explain, per_node: str, named: tuple[int, ...]
) -> None:
    lines = [
        f"+ srun bash -c 'torchrun --nnodes 4 {per_node}--node_rank $SLURM_NODEID train.py'",
        *(f"gpu-c0{5 + node} NODE_RANK={node}" for node in (1, 0, 3, 2)),
        "srun: error: Node failure on gpu-c07",
    ]
    assert explain_lines(lines).culprits == named


@pytest.mark.parametrize("logs, named", [(timeout(1, seq=288), (0,)), ([], ())])
def test_of_two_ranks_the_analyser_names_one_where_the_other_says_that_it_waits(
    explain_lines: Explain, logs: list[str], named: tuple[int, ...]
) -> None:
    told = [
        "Not all ranks joining collective, sequence number: 288", "internal record id: 19", "group info: 0:default_pg",
        "collective: nccl:all_reduce", "missing ranks: {0}", "world size: 2", "expected ranks: {0, 1}",
    ]  # fmt: skip
    report = explain_lines({"analyser.txt": told, **({"job.log": logs} if logs else {})}, world_size=2)
    assert report.culprits == named and (named or report.suspects == (0,))


# --- whose GPU, and whose traceback ---


def test_two_ranks_that_share_a_gpu_are_both_named_and_which_one_is_wrong_is_left_open(explain_lines: Explain) -> None:
    text = "Duplicate GPU detected : rank {} and rank {} both on CUDA device 2000"
    report = explain_lines([f"[rank1]: {text.format(1, 0)}", f"[rank0]: {text.format(0, 1)}"], world_size=4)
    assert (report.culprits, report.culprit_confidence) == ((0, 1), "medium")


@pytest.mark.parametrize("gpus, named", [((2, 0, 3, 1), (0, 1, 2, 3)), ((2, 0), ()), ((0, 0, 0, 0), ())])
def test_where_the_ranks_of_a_node_have_used_up_all_its_gpus_all_are_named(
    explain_lines: Explain, gpus: tuple[int, ...], named: tuple[int, ...]
) -> None:
    text = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.55 GiB (GPU {}; 39.39 GiB total capacity)"
    lines = [line for gpu in gpus for line in raised(0, text.format(gpu), prefix="")]
    head = "[2023-11-02 10:21:10,118] [INFO] [launch.py:163:main] dist_world_size=4"
    assert explain_lines([head, *lines]).culprits == named


@pytest.mark.parametrize("between, named", [([], (2,)), (["ValueError: no such file"], ())])
def test_a_traceback_without_a_rank_is_of_the_task_that_ends_next(
    explain_lines: Explain, between: list[str], named: tuple[int, ...]
) -> None:
    own = raised(0, "ImportError: libcudnn.so.8: cannot open shared object file: Stale file handle", prefix="")
    late = raised(
        0,
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 3/4 clients joined.",
        prefix="",
    )
    lines = [
        *own, *(raised(0, *between, prefix="") if between else []), "srun: error: gpu0412: task 2: Exited with exit code 1",
        *late, "srun: error: gpu0411: task 0: Exited with exit code 1",
    ]  # fmt: skip
    assert explain_lines(lines).culprits == named


@pytest.mark.parametrize("spread, named", [("", (3,)), ("running on 2 nodes", ())])
def test_torchs_barrier_counts_ranks_and_calls_them_nodes(
    explain_lines: Explain, spread: str, named: tuple[int, ...]
) -> None:
    lines = [
        "INFO | torch.distributed.distributed_c10d | Rank 0: Completed store-based barrier for 8 nodes.", spread,
        "torch.multiprocessing.spawn.ProcessExitedException: process 3 terminated with signal SIGKILL",
    ]  # fmt: skip
    assert explain_lines(lines).culprits == named


def test_nobody_advises_to_restart_who_was_killed_from_outside(explain_lines: Explain) -> None:
    end = "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 (pid: 8129) of binary: python"
    report = explain_lines(["step 7 loss 2.1", end], world_size=4)
    assert (report.culprits, report.decision) == ((3,), "unknown")


def test_the_rank_on_which_nccl_finds_no_memory_has_failed(explain_lines: Explain) -> None:
    error = (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.26.2"
    )
    last = ["[rank1]: Last error:", "[rank1]: Cuda failure 2 'out of memory'"]
    report = explain_lines([*raised(1, error), *last], world_size=2)
    assert report.culprits == (1,) and "more memory than its GPU has" in report.decision_reason


def test_the_pod_whose_log_has_one_rank_is_that_rank(explain_lines: Explain) -> None:
    barrier = "INFO:torch.distributed.distributed_c10d:Rank {}: Completed store-based barrier for key:store_based_barrier_key:1 with 4 nodes."
    closed = "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.244.48.107]:50752"
    logs = [
        line
        for rank in range(4)
        for line in (f"$ kubectl logs net-worker-{rank}", barrier.format(rank), *([closed] if rank != 2 else []))
    ]
    pods = ["NAME           READY   STATUS      RESTARTS   AGE", "net-worker-2   0/1     OOMKilled   0          52m"]
    assert explain_lines({"logs.txt": logs, "pods.txt": ["$ kubectl get pods", *pods]}).culprits == (2,)


# --- the same words where they prove nothing ---

DIED = "ERROR 11-02 18:25:01 [multiproc_executor.py:154] Worker proc VllmWorker-0 died unexpectedly, shutting down executor."
SERVED = '(APIServer pid=1) INFO:     10.0.0.4:39112 - "POST /v1/completions HTTP/1.1" 200 OK'
THROWN = ["terminate called after throwing an instance of 'trt::Failure'", "  what():  MPI size 4 does not match"]
ABORTED = "mpirun noticed that process rank 2 with PID 229 on node h100-07 exited on signal 6 (Aborted)."
IMPORT = raised(0, "ImportError: libcudnn.so.8: cannot open shared object file", prefix="")
ENDS = [f"srun: error: gpu0412: task {task}: Exited with exit code 1" for task in (2, 0, 1, 3)]
ABSENT = ["Not all ranks joining collective, sequence number: 288", "internal record id: 19", "group info: 0:default_pg",
          "collective: nccl:all_reduce", "missing ranks: {0}", "world size: 2", "expected ranks: {0, 1}"]  # fmt: skip
OTHER_HOST = [
    ("(WorkerDict pid=27499, ip=10.0.0.2) [2026-03-04 19:28:30,014 E 27499 27499] logging.cc:113: Unhandled exception: "
    "St12system_error. what(): thread: Resource temporarily unavailable [system:11]"),
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "\tpid: 27499", "\tname: 31cVuRWorkerDict_0:3", "\tip: 10.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize(
    "logs, size",
    [
        (
            {
                "a.log": [
                    *raised(3, "ValueError: prompt too long", prefix="(Worker_TP{} pid=9) "),
                    SERVED,
                    SERVED,
                    SERVED,
                    DIED,
                ]
            },
            4,
        ),
        ({"a.log": [*THROWN, *THROWN, *THROWN, ABORTED]}, 4),
        ({"a.log": THROWN, "b.log": [ABORTED]}, 4),
        ({"a.log": [*IMPORT, *IMPORT, *IMPORT, *IMPORT, *ENDS]}, 4),
        ({"a.log": [*IMPORT, "step 1 loss 2.0", "step 2 loss 1.9", ENDS[0]]}, 4),
        ({"a.log": ABSENT, "b.log": [*timeout(1, seq=288), *timeout(0, seq=300)]}, 2),
        ({"a.log": OTHER_HOST}, 8),
        ({"a.log": ["[rank7]: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 2000"]}, 8),
    ],
)
def test_who_is_only_near_by_is_not_named_for_it(explain_lines: Explain, logs: dict[str, list[str]], size: int) -> None:
    report = explain_lines(logs, world_size=size)
    assert report.incident
    assert report.culprits in ((), (0, 3))  # the worker of vLLM that died behind answers, and who had raised before


def test_files_of_the_ranks_of_one_pod_do_not_tell_which_rank_another_pod_is(explain_lines: Explain) -> None:
    described = ["$ kubectl describe pod mlm-worker-5 -n ml", "Name:             mlm-worker-5", "      Reason:       OOMKilled",
                 "      Exit Code:    137", "    Environment:", "      WORLD_SIZE:   8", "      RANK:         5"]  # fmt: skip
    logs = {f"rank{rank}.log": timeout(rank, seq=85613) for rank in range(4)}
    assert explain_lines({**logs, "kubectl.txt": described}, world_size=64).culprits == ()


def test_nodes_of_different_sizes_do_not_tell_where_a_host_begins(explain_lines: Explain) -> None:
    lines = [f"gpu-c0{5 + node} NODE_RANK={node} NPROC_PER_NODE={size}" for node, size in ((0, 8), (1, 4), (2, 8))]
    assert explain_lines([*lines, "srun: error: Node failure on gpu-c07"]).culprits == ()


def test_who_raises_because_it_was_told_to_end_is_not_named(explain_lines: Explain) -> None:
    lines = ["slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-03-01T02:00:00 DUE TO PREEMPTION ***",
             *raised(3, "lightning.pytorch.utilities.exceptions.SIGTERMException")]  # fmt: skip
    report = explain_lines(lines, world_size=8)
    assert (report.culprits, report.decision) == ((), "restart")


SPAWNED = [
    f"[2025-01-04 10:00:0{n},100] [INFO] [launch.py:253:main] process {901 + n} spawned with command: ['python', '-u', "
    f"'t.py', '--local_rank={n}']"
    for n in range(4)
]
MAPPED = [
    "[2025-01-04 10:00:00,001] [INFO] [launch.py:151:main] nnodes=1, num_local_procs=4, node_rank=0",
    "[2025-01-04 10:00:00,002] [INFO] [launch.py:162:main] global_rank_mapping=defaultdict(None, {'localhost': [0, 1, 2, 3]})",
]
CRASHED = (
    "[ 77.01] python[903]: segfault at 10 ip 00007f5b6a2e91c4 sp 00007ffd2b0e4c10 error 4 in {}[7f5b6a2d0000+31000]"
)


@pytest.mark.parametrize("library, named", [("fused_adam.so", (2,)), ("libc.so.6", (2,))])
def test_the_process_that_the_kernel_saw_crash_is_named(
    explain_lines: Explain, library: str, named: tuple[int, ...]
) -> None:
    ends = "[2025-01-04 10:20:00,1] [ERROR] [launch.py:322:sigkill_handler] ['python', '--local_rank=3'] exits with return code = -11"
    report = explain_lines({"ds.log": [*MAPPED, *SPAWNED, ends], "dmesg.txt": [CRASHED.format(library)]})
    assert report.incident and report.culprits == named


@pytest.mark.parametrize(
    "told",
    [
        [f"{n}: host gpu-h{n} node_rank={n} global ranks {4 * n}-{4 * n + 3}" for n in range(3)],
        [f"{n}: rank {n:2d}/12 on gpu-h{n // 4} SLURM_LOCALID={n % 4} ready" for n in range(12)],
    ],
)
def test_the_ranks_of_a_host_that_failed_are_named_where_a_line_tells_them(
    explain_lines: Explain, told: list[str]
) -> None:
    assert explain_lines([*told, "srun: error: Node failure on gpu-h1"]).culprits == (4, 5, 6, 7)


def test_a_rank_of_tensorrt_llm_that_aborts_all_is_named_for_its_assertion(explain_lines: Explain) -> None:
    lines = ["[TensorRT-LLM][ERROR] [rank 1] Assertion failed: Error opening engine file: /models/tp2/rank1.engine (/a/rawEngine.h:71)",
             "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD", "with errorcode 1."]  # fmt: skip
    report = explain_lines(lines, world_size=2)
    assert (report.culprits, report.decision) == ((1,), "fix-environment")


@pytest.mark.parametrize("gpus, named", [(1, (3,)), (8, ())])
def test_the_rank_of_a_pod_is_the_jobs_where_the_pod_has_one_gpu(
    explain_lines: Explain, gpus: int, named: tuple[int, ...]
) -> None:
    described = ["Name:             sft-worker-2", "      Reason:       OOMKilled", "      Exit Code:    137", "    Limits:",
                 f"      nvidia.com/gpu:  {gpus}", "    Environment:", "      WORLD_SIZE:   4", "      RANK:         3"]  # fmt: skip
    assert explain_lines({"describe.txt": described}, world_size=4 * gpus).culprits == named


@pytest.mark.parametrize("hosts, found", [(("a1", "b1"), "network_interface"), (("a1", "a1"), "unknown")])
def test_two_hosts_with_one_address_do_not_reach_each_other(
    explain_lines: Explain, hosts: tuple[str, ...], found: str
) -> None:
    logs = {
        f"{n}.log": [
            f"{host}:22{n}0:22{n}0 [{n}] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>",
            "^CTraceback (most recent call last):",
            '  File "t.py", line 31, in <module>',
            "    dist.barrier()",
            "KeyboardInterrupt",
        ]
        for n, host in enumerate(hosts)
    }
    report = explain_lines(logs, world_size=2)
    assert (report.incident, report.cause_class) == (True, found)


TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete"
)
IN_BARRIER = ['  File "/v/torch/distributed/distributed_c10d.py", line 5356, in barrier', "    work.wait()"]
IN_BACKWARD = ['  File "/v/torch/autograd/graph.py", line 979, in _engine_run_backward', "    return run_backward("]
IN_RECV = ['  File "/v/torch/distributed/distributed_c10d.py", line 2600, in recv', "    work.wait()"]


@pytest.mark.parametrize(
    "calls, named",
    [
        ([IN_BACKWARD, IN_BARRIER, IN_BACKWARD], (1,)),
        ([IN_BACKWARD, IN_BARRIER, IN_BACKWARD, IN_BARRIER], ()),
        ([IN_BACKWARD, IN_RECV, IN_BACKWARD], ()),
        ([IN_BACKWARD, IN_BARRIER], ()),
    ],
    ids=["one of three", "two of four", "a message", "one of two"],
)
def test_who_waited_alone_in_another_call_is_named(
    explain_lines: Explain, calls: list[list[str]], named: tuple[int, ...]
) -> None:
    lines = [line for rank, call in enumerate(calls) for line in raised(rank, *call, TIMED_OUT)]
    assert explain_lines(lines, world_size=len(calls)).culprits == named


def test_what_all_processes_raise_is_not_given_to_the_one_that_the_launcher_saw_first(explain_lines: Explain) -> None:
    raises = ["Traceback (most recent call last):", '  File "/w/train.py", line 38, in main', "    model = DDP(net)",
              "ValueError: Default process group has not been initialized, please make sure to call init_process_group."]  # fmt: skip
    ended = "E1129 00:25:25.764000 4762 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 4824) of binary: python"
    assert explain_lines([*raises, ended], world_size=3).culprits == (0,)
    assert explain_lines([*raises * 3, ended], world_size=3).culprits == ()


@pytest.mark.parametrize(
    "dmesg",
    [
        ["Jan  4 10:19:59 gpu-b7 kernel: " + CRASHED.format("fused_adam.so")],
        [CRASHED.format("libc.so.6").replace("903", "901"), CRASHED.format("fused_adam.so")],
        [CRASHED.format("fused_adam.so").replace("python", "ipython")],
        ["[Thu Jan  2 09:00:00 2025]" + CRASHED.format("fused_adam.so").partition("]")[2]],
    ],
    ids=["another host", "two of them", "another program", "two days before"],
)
def test_a_crash_of_another_process_names_nobody(explain_lines: Explain, dmesg: list[str]) -> None:
    ends = "[2025-01-04 10:20:00,100] [ERROR] [launch.py:322:sigkill_handler] ['python', '--local_rank=3'] exits with return code = -11"
    log = [f"gpu-a1: {line}" for line in [*MAPPED, *SPAWNED, ends]]
    report = explain_lines({"ds.log": log, "dmesg.txt": dmesg})
    assert report.incident and report.culprits == ()


@pytest.mark.parametrize(
    "told",
    [[f"{n}: {of} rank {n}/3 on gpu-h{n} ready" for n in range(3)] for of in ("node", "machine", "tp", "data parallel")]
    + [[f"(Worker pid={4320 + n}) EP rank {n}/8 on gpu-h{n}" for n in range(3)]]
    + [["group ep0: host gpu-h1 node_rank=1 ranks 0-3"]],
)
def test_a_number_in_a_group_of_something_else_is_not_the_rank_of_a_host(
    explain_lines: Explain, told: list[str]
) -> None:
    killed = "[ 99.1] Out of memory: Killed process 4321 (python) total-vm:99kB"
    report = explain_lines([*told, "srun: error: Node failure on gpu-h1", killed], world_size=12)
    assert report.incident and report.culprits == ()


def test_of_a_job_that_was_started_anew_the_last_ranks_of_a_host_count(explain_lines: Explain) -> None:
    first = [f"host gpu-h{n} node_rank={n} global ranks {8 * n}-{8 * n + 7}" for n in range(3)]
    again = [f"host gpu-h{n} node_rank={2 - n} global ranks {8 * (2 - n)}-{8 * (2 - n) + 7}" for n in (0, 2)]
    assert explain_lines([*first, *again, "srun: error: Node failure on gpu-h2"]).culprits == tuple(range(8))


@pytest.mark.parametrize(
    "changed",
    [["      nvidia.com/gpu:  8"], ["      rdma/gpu:  1"], ["      nvidia.com/gpu:  1", "      WORLD_SIZE:   2"]],
)
def test_a_pod_that_may_have_more_ranks_or_is_of_another_job_does_not_tell_its_rank(
    explain_lines: Explain, changed: list[str]
) -> None:
    limits = changed if "rdma" in changed[0] else ["      nvidia.com/gpu:  1", *changed]
    described = ["Name:             sft-worker-1", "      Reason:       OOMKilled", "      Exit Code:    137", "    Limits:",
                 *limits, "    Environment:", "      WORLD_SIZE:   4", "      RANK:         3"]  # fmt: skip
    assert explain_lines({"describe.txt": described, "job.log": timeout(7, seq=5)}, world_size=8).culprits == ()


@pytest.mark.parametrize("rank, named", [(2, (2,)), (0, ())])
@pytest.mark.parametrize("came", [3, 2])
def test_who_looks_for_the_store_under_a_wrong_name(
    explain_lines: Explain, rank: int, came: int, named: tuple[int, ...]
) -> None:
    lines = [
        (
            f"[rank{rank}]:[W1003 09:11:25 socket.cpp:755] [c10d] The IPv4 network addresses of (trainer0, 29500) cannot be "
            "retrieved (gai error: -3 - Temporary failure in name resolution)."
        ),
        f"[rank0]: torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. {came}/4 clients joined.",
        (
            f"[rank{rank}]: torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to "
            "connect to (trainer0, 29500)."
        ),
    ]
    assert explain_lines(lines).culprits == (named if came == 3 else ())


@pytest.mark.parametrize("between", ["", "NODE_RANK=3 ", "node rank 3, "])
def test_the_ranks_of_a_node_that_failed(explain_lines: Explain, between: str) -> None:
    lines = [f"gpu-a0{node}: {between.replace('3', str(node))}ranks {8 * node}-{8 * node + 7}" for node in range(4)]
    assert explain_lines([*lines, "srun: error: Node failure on gpu-a03"]).culprits == tuple(range(24, 32))
    if "3" in between:
        local = [f"gpu-a0{node}: NODE_RANK={node} ranks 0-7" for node in range(4)]
        assert explain_lines([*local, "srun: error: Node failure on gpu-a03"]).culprits == (), "each counts its own"


def test_the_rank_that_a_pods_own_lines_have_in_front(explain_lines: Explain) -> None:
    lines = [
        "bert-worker-2    0/1     OOMKilled   0          3h11m",
        "$ kubectl logs bert-worker-2 --tail 6",
        "2025-08-05 12:40:11 [RANK 3/5] step 5210 loss 2.2",
        "$ kubectl logs bert-worker-0 --tail 6",
        "2025-08-05 12:40:11 [RANK 1/5] step 5210 loss 2.2",
        "$ kubectl describe pod bert-worker-2",
    ]
    assert explain_lines(lines).culprits == (3,)
    for row in (
        "2025-08-05 12:40:11 [RANK 4/5] step 5210 loss 2.2",  # a second rank in the pod
        "2025-08-05 12:40:11 [RANK 0/2] of a group",
        "$ kubectl logs bert-worker-1\n[RANK 3/5] step 5210",  # another pod with the same one
        "$ kubectl logs bert-worker-1\n[RANK 5/5] step 5210",  # counted from 1 on
    ):
        assert explain_lines([*lines[:3], *row.split("\n"), *lines[3:]]).culprits == (), row


def test_memory_that_was_mapped_and_is_gone_is_no_fault_of_the_program(explain_lines: Explain) -> None:
    report = explain_lines(
        ["mpirun noticed that process rank 9 with PID 291 on node a exited on signal 7 (Bus error)."]
    )
    assert (report.culprits, report.decision) == ((9,), "fix-environment")


@pytest.mark.parametrize(
    "line", ["The system will power off now!", "The system will power off now! (GCE: instance is being preempted)"]
)
def test_a_machine_that_is_taken_away(explain_lines: Explain, line: str) -> None:
    lost = "[rank1]:[E409 07:28:58 ProcessGroupNCCL.cpp:1595] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: NCCL error: remote process exited or there was a network error"
    report = explain_lines(
        {"node0.log": [lost], "node1.log": [line, "Received 15 death signal, shutting down workers"]}
    )
    assert (report.culprits, report.decision) == ((), "restart")


ASKS_A_SERVER = [
    "[rank0]: Traceback (most recent call last):",
    '[rank0]:   File "/x/site-packages/trl/extras/vllm_client.py", line 178, in generate',
    "[rank0]:     response = self.session.post(",
    '[rank0]:   File "/x/site-packages/requests/adapters.py", line 682, in send',
    "[rank0]:     raise ConnectionError(err, request=request)",
    "[rank0]: requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('Remote end closed connection'))",
    "E0602 14:20:38.801000 20113 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 0 (pid: 20181) of binary: /x/bin/python",
]


def test_a_rank_that_alone_failed_for_want_of_a_server(explain_lines: Explain) -> None:
    assert explain_lines(ASKS_A_SERVER).culprits == (0,)
    assert explain_lines(["[rank2]: RuntimeError: Connection closed by peer", *ASKS_A_SERVER]).culprits == ()
    killed = "Out of memory: Killed process 7 (sglang::schedul)"
    for other in (
        ["Traceback (most recent call last):", "ValueError: of an engine"],
        [killed],
        ["x: line 3: 418 Killed  python s.py"],
    ):
        assert explain_lines({"a.log": ASKS_A_SERVER, "vllm.log": other}).culprits == (), other
    peer = [line for line in ASKS_A_SERVER if "requests/" not in line and "vllm_client" not in line]
    assert explain_lines(peer).culprits == (), "no sign of a server"


def test_an_exception_of_an_ascend_device_is_of_the_rank_with_its_process(explain_lines: Explain) -> None:
    lines = [
        (
            "[PID: 40311] 2025-07-02-09:21:09.988.140 AICORE_Error(EZ9999): The error from device(chipId:6, dieId:0), serial "
            "number is 1, there is an exception of fftsplus aivector error, core id is 15"
        ),
        "[rank6]: [ERROR] 2025-07-02-09:21:10 (PID:40311, Device:6, RankID:6) ERR00100 PTA call acl api failed",
        (
            "[rank1]: EI0002: The wait execution of the Notify register times out. Reason: The Notify register has not received "
            "the Notify record from remote rank"
        ),
    ]
    assert explain_lines(lines).culprits == (6,)


def test_all_processes_whose_port_failed_are_named(explain_lines: Explain) -> None:
    joined = "gpu-4{0}:4305{1}:43122 [{1}] NCCL INFO comm 0x5 rank {2} nranks 4 cudaDev {1} busId 1000 commId 0x5 - Init COMPLETE"
    event = "gpu-48:4305{0}:43122 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : Got async event : port error"
    lost = "gpu-46:43050:43190 [0] transport/net_ib.cc:1238 NCCL WARN NET/IB : Got completion from peer gpu-48<40122> with error 12, opcode 0, len 0, vendor err 129"
    ranks = [joined.format(host, local, rank) for rank, (host, local) in enumerate([(6, 0), (6, 1), (8, 0), (8, 1)])]
    assert explain_lines([*ranks, event.format(0), event.format(1), lost]).culprits == (2, 3)


def test_a_column_of_times_in_front_of_a_log_is_no_block_of_data(explain_lines: Explain) -> None:
    stamped = [f"  | 2024-08-23T22:22:5{rank}.648Z | {timeout(rank, 9107)[0]}" for rank in (0, 1)]
    report = explain_lines(stamped)
    assert report.collective is not None and report.collective.seq == 9107


def test_the_ranks_that_nccl_placed_on_a_node_that_failed(explain_lines: Explain) -> None:
    joined = "{2}: n{0}:220{1}:43122 [{1}] NCCL INFO comm 0x5{2} rank {2} nranks 4 cudaDev {1} busId 1000 commId 0x5 - Init COMPLETE"
    lines = [joined.format(rank // 2, rank % 2, rank) for rank in range(4)]
    failure = "srun: error: Node failure on n1"
    assert explain_lines(["WORLD_SIZE=4", *lines, failure]).culprits == (2, 3)
    assert explain_lines([*lines, failure]).culprits == (2, 3), "srun's own numbers of its tasks"
    bare = [line.partition(": ")[2] for line in lines]
    assert explain_lines([*bare, failure]).culprits == (), "a communicator of some ranks, perhaps"
    assert explain_lines(["WORLD_SIZE=8", *lines, failure]).culprits == (), "a communicator of some ranks"
    assert explain_lines(["WORLD_SIZE=4", *lines[::2], failure]).culprits == (), "some of its ranks"
    requeue = "slurmstepd: error: *** JOB 12 ON n0 CANCELLED AT 2025-02-04T03:50:54 DUE TO JOB REQUEUE ***"
    assert explain_lines(["WORLD_SIZE=4", *lines, requeue, failure]).culprits == (), "the hosts of another attempt"


@pytest.mark.parametrize(
    "line, decision",
    [
        ("402.1s: flux-shell[1]: ERROR: oom: Memory cgroup out of memory: killed 1 task on n7.", "fix-environment"),
        (
            "[Rank:3] FATAL ERROR :: MODULE:SYNHELPER Allocation failed! synStatus=8 [Device not found]",
            "restart-without",
        ),
    ],
)
def test_what_ended_a_process(explain_lines: Explain, line: str, decision: str) -> None:
    assert explain_lines([line]).decision == decision


def test_a_unit_that_ran_out_of_memory_before_the_others_waited(explain_lines: Explain) -> None:
    unit = "systemd[1]: ddp@2.service: A process of this unit has been killed by the OOM killer."
    assert explain_lines([unit, *timeout(1, 77), *timeout(0, 77)]).decision == "fix-environment"
    assert not explain_lines([unit.replace("ddp@2", "promtail"), "step 1 loss 2.0", "step 2 loss 1.9"]).incident
    raised = explain_lines([unit.replace("ddp@2", "user@1000"), "[rank3]: ValueError: bad sample"])
    assert (raised.culprits, raised.decision) == ((3,), "fix-code")


@pytest.mark.parametrize("gap, named", [(2, tuple(range(8, 12))), (3, ())])
def test_the_tasks_of_which_srun_tells_none(explain_lines: Explain, gap: int, named: tuple[int, ...]) -> None:
    """Of a node whose tasks are the last ones nobody knows how many there were."""
    ended = [f"srun: error: n{node}: tasks {4 * node}-{4 * node + 3}: Terminated" for node in range(4) if node != gap]
    assert explain_lines([f"srun: error: Node failure on n{gap}", *ended]).culprits == named
    uneven = [line.replace("tasks 0-3", "tasks 0-2") for line in ended]
    assert explain_lines([f"srun: error: Node failure on n{gap}", *uneven]).culprits == ()


def test_the_status_of_one_of_the_listed_pods(explain_lines: Explain) -> None:
    """Rows may have been joined: it is the pod beside the word that it is said of."""
    lines = [
        "x-master-0     0/1     Error       0          87m   10.244.3.18    gke-h100-pool-7c1f",
        "x-worker-0     0/1     Error       0          87m   10.244.5.22    gke-h100-pool-b02d",
        "x-worker-1     0/1     OOMKilled   0          87m   10.244.6.9     gke-h100-pool-e9aa",
        "$ kubectl logs x-master-0",
        "[rank0]:[E312 09:02:10 ProcessGroupNCCL.cpp:550] [Rank 0] Watchdog caught x",
    ]
    assert explain_lines(lines).culprits == ()


def test_the_rank_above_a_stack_is_that_of_its_process(explain_lines: Explain) -> None:
    waits = ["    wait_tensor (torch/distributed/_functional_collectives.py:155)", "    train_step (train.py:231)"]
    reads = ["    read (ssl.py:1166)", "    next_batch (train.py:199)"]
    lines = [
        line
        for rank in range(4)
        for line in (
            f"== 8841{rank} LOCAL_RANK={rank} RANK={rank} WORLD_SIZE=4",
            f"Process 8841{rank}: python3 -u train.py",
            f'Thread 8841{rank} (active): "MainThread"',
            *(reads if rank == 2 else waits),
        )
    ]
    assert explain_lines(lines).culprits == (2,)


def test_who_exited_first_stands_beside_an_exception_of_nobody_known(explain_lines: Explain) -> None:
    exited = "E1129 10:50:55.944000 9638 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 10348) of binary: /x/python"
    table = [
        line
        for rank, code in ((0, -15), (2, 1))
        for line in (f"  rank      : {rank} (local_rank: {rank})", f"  exitcode  : {code} (pid: 1034{rank})")
    ]
    raised = ["Traceback (most recent call last):", '  File "/x/train.py", line 3, in <module>', "KeyError: 'label'"]
    report = explain_lines([*raised, *raised, *raised, exited, "Failures:", *table])
    assert report.culprits == () and "which rank raised is not told: KeyError: 'label'" in report.reason
    assert "cause not shown" in explain_lines([exited, "Failures:", *table]).reason
