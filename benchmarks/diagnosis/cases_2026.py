"""Write the cases of 2026 under cases/: 60 incidents, 20 calm logs, and a second set of 36 incidents.

    python benchmarks/diagnosis/cases_2026.py

Half of the incidents are of inference engines, expert parallelism, reinforcement learning, JAX, Ascend, AMD and
Horovod. The values are invented; the lines follow what the tools print (their rows in ncclguard/explain/patterns.py
name the sources).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "cases"


def dog(
    rank: int,
    seq: int,
    op: str,
    nin: int,
    nout: int | None = None,
    limit: int = 600000,
    pg: str = "0(default_pg)",
    inner: int | None = None,
) -> list[str]:
    nout, inner = nin if nout is None else nout, rank if inner is None else inner
    where = f"[PG ID {pg.split('(')[0]} PG GUID {pg} Rank {inner}]"
    work = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={nin}, NumelOut={nout}, Timeout(ms)={limit}) ran for {limit + 11 + rank} milliseconds before timing out."
    return [
        f"[rank{rank}]:[E1120 10:02:{11 + rank % 40}.113004 ProcessGroupNCCL.cpp:685] {where} Watchdog caught collective operation timeout: {work}",
        f"[rank{rank}]:[E1120 10:02:{11 + rank % 40}.113104 ProcessGroupNCCL.cpp:2252] {where}  failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {seq}, last completed work: {seq - 1}",
    ]


def dogs(ranks: Any, *args: Any, **more: Any) -> list[str]:
    return [line for rank in ranks for line in dog(rank, *args, **more)]


def tb(rank: int | str, error: str, frame: str = 'File "/w/train.py", line 88, in step') -> list[str]:
    head = f"[rank{rank}]: " if isinstance(rank, int) else rank
    return [f"{head}Traceback (most recent call last):", f"{head}  {frame}", f"{head}    out = f(x)", f"{head}{error}"]


def vw(name: str, pid: int, text: str, level: str = "ERROR", at: str = "multiproc_executor.py:981") -> str:
    return f"({name} pid={pid}) {level} 11-20 10:02:11 [{at}] {text}"


def vtb(name: str, pid: int, error: str) -> list[str]:
    rows = [
        "WorkerProc hit an exception.",
        "Traceback (most recent call last):",
        '  File "/v/multiproc_executor.py", line 970, in worker_busy_loop',
        "    output = func(*args, **kwargs)",
        error,
    ]
    return [vw(name, pid, row) for row in rows]


CASES: dict[str, tuple[dict[str, list[str]], dict[str, Any]]] = {}


def case(name: str, lines: list[str] | dict[str, list[str]], **truth: Any) -> None:
    truth.setdefault("incident", True)
    if truth["incident"]:
        truth.setdefault("culprits", [])
    else:
        truth["culprits"] = []
    CASES[f"b26-{name}"] = (lines if isinstance(lines, dict) else {"job.log": lines}, truth)


RPC = "TimeoutError: RPC call to {} timed out."
DEAD = "(APIServer pid=70) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."

# --- engines ---
case(
    "01-vllm-rpc",
    [
        vw(
            "EngineCore",
            71,
            "No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization).",
            "INFO",
            "shm_broadcast.py:501",
        ),
        vw(
            "EngineCore",
            71,
            "Dumping input data for V1 LLM engine (v0.11.0) with config: model='x', tensor_parallel_size=4, pipeline_parallel_size=1",
            "ERROR",
            "dump_input.py:69",
        ),
        vw("EngineCore", 71, "EngineCore encountered a fatal error.", "ERROR", "core.py:710"),
        *[
            vw("EngineCore", 71, row, "ERROR", "core.py:710")
            for row in (
                "Traceback (most recent call last):",
                '  File "/v/shm_broadcast.py", line 505, in acquire_read',
                "    raise TimeoutError",
                "TimeoutError",
                "The above exception was the direct cause of the following exception:",
                "Traceback (most recent call last):",
                '  File "/v/core.py", line 701, in run_engine_core',
                "    engine_core.run_busy_loop()",
                RPC.format("execute_model"),
            )
        ],
        DEAD,
    ],
    decisions=["unknown"],
    classes=["unknown"],
)
case(
    "02-vllm-worker-keyerror",
    [
        *vtb("Worker_TP2", 812, "KeyError: 'layers.7.mlp.experts.w13'"),
        vw(
            "EngineCore",
            71,
            "RuntimeError: Worker failed with error ''layers.7.mlp.experts.w13'', please check the stack trace above for the root cause",
            at="core.py:710",
        ),
        DEAD,
    ],
    culprits=[2],
    decisions=["fix-code"],
)
case(
    "03-vllm-pp-sizes",
    [
        vw(
            "EngineCore",
            71,
            "Initializing a V1 LLM engine (v0.11.2) with config: model='m', tensor_parallel_size=4, pipeline_parallel_size=2, data_parallel_size=1",
            "INFO",
            "core.py:93",
        ),
        *vtb("Worker_PP1_TP3", 818, "AssertionError: expected 3 mm items, got 2"),
        DEAD,
    ],
    culprits=[7],
    decisions=["fix-code"],
)
case(
    "04-vllm-pp-no-sizes",
    [*vtb("Worker_PP1_TP3", 818, "AssertionError: expected 3 mm items, got 2"), DEAD],
    culprits=[],
    places=["Worker_PP1_TP3"],
    decisions=["fix-code"],
)
case(
    "05-vllm-moe-dp-ep",
    [
        *vtb("Worker_DP5_EP5", 905, "RuntimeError: CUDA error: device-side assert triggered"),
        *[
            vw(
                f"Worker_DP{d}_EP{d}",
                900 + d,
                f"[rank{d}]:[E1120 10:12:11 ProcessGroupNCCL.cpp:685] [PG ID 2 PG GUID 3 Rank {d}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=412, OpType=ALLGATHER, NumelIn=1, NumelOut=8, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.",
            )
            for d in (0, 1, 2, 3, 4, 6, 7)
        ],
    ],
    culprits=[5],
    op="ALLGATHER",
    seq=412,
    timeout_ms=600000,
    decisions=["fix-code"],
)
case(
    "06-vllm-died-9",
    [
        vw(
            "EngineCore",
            71,
            "Worker proc VllmWorker-3 died unexpectedly (exit code: -9), shutting down executor.",
            at="multiproc_executor.py:250",
        ),
        vw("EngineCore", 71, "RuntimeError: Executor failed.", at="core.py:710"),
        DEAD,
    ],
    culprits=[3],
    decisions=["unknown", "fix-environment", "restart"],
)
case(
    "07-vllm-died-dense-dp",
    [
        vw(
            "EngineCore_DP1",
            72,
            "Worker proc VllmWorker-1 died unexpectedly (exit code: -11), shutting down executor.",
            at="multiproc_executor.py:250",
        ),
        vw("EngineCore_DP0", 71, "step done", "INFO", "core.py:1"),
    ],
    culprits=[],
    places=["worker 1 of EngineCore_DP1"],
    decisions=["unknown"],
)
case(
    "08-vllm-all-oom",
    [
        line
        for t in range(4)
        for line in vtb(
            f"Worker_TP{t}",
            800 + t,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.30 GiB. GPU 0 has a total capacity of 79.11 GiB",
        )
    ]
    + [
        vw("EngineCore", 71, "EngineCore failed to start.", at="core.py:700"),
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ],
    culprits=[0, 1, 2, 3],
    decisions=["fix-code", "fix-environment"],
)
case(
    "09-vllm-echo-only",
    [
        vw(
            "EngineCore",
            71,
            "RuntimeError: Worker failed with error 'CUDA out of memory. Tried to allocate 2.30 GiB.', please check the stack trace above for the root cause",
            at="core.py:710",
        ),
        DEAD,
    ],
    decisions=["fix-code", "fix-environment"],
)
case(
    "10-vllm-shm",
    tb(
        "(EngineCore pid=71) ",
        "RuntimeError: Insufficient space in /dev/shm for ring buffer: 64 MiB required, 12 MiB free. Increase /dev/shm (e.g. --shm-size or --ipc=host).",
    ),
    classes=["shared_memory"],
    decisions=["fix-environment"],
)
case(
    "11-vllm-core-died",
    ["Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP3': -9}"],
    places=["EngineCore_DP3"],
    decisions=["unknown"],
)
case(
    "12-sglang-watchdog-all",
    [
        f"[2026-11-20 10:02:{10 + t} TP{t}] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"
        for t in (3, 0, 1, 2)
    ]
    + ["[2026-11-20 10:02:20] SIGQUIT received. signum=3, frame=<frame>. It usually means one child failed."],
    timeout_ms=300000,
    decisions=["unknown"],
)
case(
    "13-sglang-tp26",
    [
        "[2026-11-20 10:02:11 TP26] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/s/scheduler.py", line 3381, in run_scheduler_process',
        "    scheduler.event_loop_overlap()",
        "IndexError: list index out of range",
        "",
        "[2026-11-20 10:02:11] Received sigquit from a child proces. It usually means the child failed.",
        "Killed",
    ],
    culprits=[26],
    decisions=["fix-code"],
)
case(
    "14-sglang-child",
    [
        "[2026-11-20 10:02:11] Subprocess scheduler_1 (pid=812) crashed with exit code -11. Triggering SIGQUIT for cleanup...",
        "[2026-11-20 10:02:12] SIGQUIT received. signum=3, frame=<f>. It usually means one child failed.",
    ],
    culprits=[1],
    decisions=["unknown"],
)
case(
    "15-sglang-unbalanced",
    [
        line
        for t in range(2)
        for line in (
            f"[2026-11-20 10:02:11 TP{t}] Scheduler hit an exception: Traceback (most recent call last):",
            '  File "/s/model_runner.py", line 700, in init_torch_distributed',
            "    raise ValueError(",
            f"ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=77.{t}, local_gpu_memory=60.1",
            "",
        )
    ],
    decisions=["fix-environment"],
    culprits=[],
)
case(
    "16-sglang-start",
    [
        "Rank 3 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."
    ],
    culprits=[3],
    decisions=["fix-environment", "restart", "unknown"],
)
case(
    "17-trtllm-hang",
    [
        "[11/20/2026-10:02:11] [TRT-LLM] [E] Hang detected after 300 seconds.",
        "[11/20/2026-10:02:11] [TRT-LLM] [RANK 2] [E] Hang detected on rank 2 in PyExecutor; hard-killing and propagating to peer ranks.",
        "HangDetector: propagating hard-kill to all ranks via MPI_Abort.",
        "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD",
        "with errorcode 137.",
    ],
    timeout_ms=300000,
    decisions=["unknown"],
)
case(
    "18-ray-channel",
    [
        "(EngineCore pid=71) ray.exceptions.RayChannelTimeoutError: System error: Timed out waiting for object available to read. ObjectID: 00fcd3",
        "compiled_dag_node.py:2173 -- Cancelling compiled worker on actor: Actor(RayWorkerWrapper, 8a01)",
    ],
    decisions=["unknown"],
)
# --- expert parallelism ---
case(
    "19-deepep-cpu",
    tb(3, "RuntimeError: DeepEP error: timeout (dispatch CPU)")
    + tb(1, "RuntimeError: DeepEP error: timeout (dispatch CPU)"),
    decisions=["unknown"],
)
case(
    "20-deepep-ll-unmapped",
    [
        f"Warning: DeepEP timeout for dispatch receive, rank {r}, local_expert_idx {r % 4}, src_rank 11"
        for r in (0, 1, 2, 3, 5, 8, 9, 10, 12)
    ]
    + ["CUDA error: unspecified launch failure"],
    places=["EP rank 11"],
    decisions=["unknown"],
)
case(
    "21-deepep-ll-mapped",
    [
        vw(f"Worker_DP{r}_EP{r}", 700 + r, "model loaded", "INFO", "gpu_model_runner.py:1")
        + ("" if r else " timeout set")
        for r in range(0)
    ]
    + [
        f"(Worker_DP{r}_EP{r} pid={700 + r}) Warning: DeepEP timeout for combine receive, rank {r}, local_expert_idx 1, src_rank 6"
        for r in (0, 1, 2, 3, 4, 5, 7)
    ]
    + ["(Worker_DP6_EP6 pid=706) ERROR 11-20 10:00:01 [gpu_worker.py:1] retrying the health probe after a timeout"],
    culprits=[6],
    decisions=["unknown"],
)
case(
    "22-deepep-nvl",
    [
        f"DeepEP dispatch NVL receiver timeout, channel: {c}, RDMA: {r}, nvl: {n}, src RDMA: 0, src nvl: 5, start: 0, end: 0"
        for c, r, n in ((1, 0, 2), (4, 1, 2), (9, 1, 7), (2, 0, 0))
    ],
    places=["EP rank 5"],
    decisions=["unknown"],
)
case(
    "23-deepep-barrier",
    [f"DeepEP timeout check failed: rank = {r}, thread = 4, value = 1024)" for r in (0, 1, 2, 3)]
    + ["DeepEP timeout check failed: rank = 2, thread = 6, value = 0)"],
    places=["number 4 of its node"],
    decisions=["unknown"],
)
# --- RL ---
case(
    "24-mesh",
    [
        f"[rank0]: RuntimeError: Timed out building the global mesh communicator for c0{r} (rank={r}, world_size=6)"
        for r in (0, 1, 2, 4, 5)
    ],
    culprits=[3],
    decisions=["restart", "unknown"],
)
case(
    "25-ray-actor-name",
    [
        "n_gpus_per_node=8 nnodes=2",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict",
        "\tactor_id: 8a01",
        "\tpid: 61204",
        "\tname: k3PzQxWorkerDict_1:3",
        "\tnamespace: 0f",
        "\tip: 10.0.3.7",
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called.",
    ],
    culprits=[11],
    decisions=["unknown"],
)
case(
    "26-ray-v2",
    [
        "(EngineCore pid=71) ERROR 11-20 10:02:11 [ray_executor_v2.py:310] RayWorkerProc rank=[5] died unexpectedly, shutting down executor."
    ],
    culprits=[5],
    decisions=["unknown", "restart"],
)
case(
    "27-ray-node",
    [
        "The node with node id: 0f2a11 and address: 10.0.3.7 and node name: 10.0.3.7 has been marked dead because the detector has missed too many heartbeats from it. This can happen when a raylet crashes.",
        "ray.exceptions.ActorDiedError: The actor died because its node has died. Node Id: 0f2a11",
    ],
    decisions=["restart-without"],
)
case(
    "28-ray-oom",
    [
        "(raylet) 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons at node (ID: 3f, IP: 10.0.3.7) over the last time period."
    ],
    decisions=["fix-environment"],
)
case(
    "29-trl-server",
    tb(
        "",
        "ConnectionError: The vLLM server can't be reached at http://10.0.3.9:8000 after 240.0 seconds. Make sure the server is running by running `trl vllm-serve`.",
    ),
    decisions=["fix-environment"],
)
case(
    "30-nemo-stall",
    [
        "RolloutStall: no rollout committed and no train step completed in 1800s (12 rollouts in flight, 3 queued, stall_timeout_s=1800)"
    ],
    decisions=["unknown"],
)
case(
    "31-get-timeout",
    tb("", "ray.exceptions.GetTimeoutError: Get timed out: some object(s) not ready."),
    decisions=["unknown"],
)
# --- JAX, Ascend, AMD, Horovod ---
case(
    "32-jax-heartbeats",
    [
        "E1120 10:02:11.1 71 coordination_service_agent.cc:332] UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):",
        "/job:jax_worker/replica:0/task:3",
        "/job:jax_worker/replica:0/task:12",
        "The tasks have crashed. Check the task logs for an earlier error, or scheduler events (e.g. preemption, eviction) to debug further.",
        "Polled an error from coordination service (this can be an error from this or another task).",
    ],
    suspects=[3, 12],
    decisions=["unknown"],
)
case(
    "33-jax-barrier",
    [
        "jax.errors.JaxRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: ckpt_commit.4.0. This usually happens because a task triggered the barrier too early or too slowly. # of tasks that reached the barrier: 6/8.",
        "The first task at the barrier: /job:jax_worker/replica:0/task:5. Some timed out task names:",
        "/job:jax_worker/replica:0/task:6",
        "/job:jax_worker/replica:0/task:2",
    ],
    culprits=[2, 6],
    decisions=["unknown"],
)
case(
    "34-jax-barrier-some",
    [
        "DEADLINE_EXCEEDED: Barrier timed out. Id: [Init]Wait_for_all_tasks_to_register. # of tasks that reached the barrier: 55/64.",
        "The first task at the barrier: /job:jax_worker/replica:0/task:5. Some timed out task names:",
        "/job:jax_worker/replica:0/task:6",
        "/job:jax_worker/replica:0/task:2",
    ],
    decisions=["unknown"],
)
case(
    "35-megascale",
    [
        "Megascale detects a hang that is likely caused by bad TPU chips on the following hosts. Please remove the hosts from the fleet and restart the workload.",
        "  Potential cause: Bad TPU chips",
        "  Potential culprit workers: job/3:host-a",
    ],
    places=["job/3:host-a"],
    decisions=["restart-without"],
)
case(
    "36-hccl-unconnected",
    [
        '[ERROR] HCCL(4711,python):2026-11-20-10:32:11.113.004 [topoinfo_detect.cc:411] Communication_Error_Ranktable_Detect(EI0015): [PID: 4711] No rank in the communicator can connect to the root node within the timeout period. List of unconnected ranks: "[2,6,]".'
    ],
    culprits=[2, 6],
    decisions=["fix-environment"],
)
case(
    "37-hccl-cluster",
    [
        "EI0002: [PID: 71] 2026-11-20-10:02:11 The wait execution of the Notify register times out. Reason: The Notify register has not received the Notify record from remote rank [unknown]. there are(is) 1 abnormal device(s): Cluster Exception Location[IP/ID]:[10.0.3.7/1], Arrival Time:[Fri Nov 20 10:02:11 2026], Discoverer:[10.0.3.8/0], ExceptionType:[Heartbeat Lost Occurred], Possible Reason:1. Process has exited, 2. Network Disconnected"
    ],
    places=["device 1 of 10.0.3.7"],
    decisions=["unknown", "restart-without"],
)
case(
    "38-hccl-link",
    ["| dest_ip(user_rank) | dest_port | src_ip(user_rank) | src_port | MyRole | Status | TlsStatus |"]
    + [
        f"| 192.0.2.9(0) | 16666 | 192.0.3.{r}(${r}) | 3234{r} | client | time out | DISABLE |".replace("$", "")
        for r in (1, 2, 3)
    ],
    culprits=[0],
    decisions=["unknown"],
)
case(
    "39-horovod",
    [
        "[1,0]<stderr>:One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds. This may indicate that different ranks are trying to submit different tensors or that only subset of ranks is submitting tensors, which will cause deadlock.",
        "[1,0]<stderr>:Missing ranks:",
        "[1,0]<stderr>:3: [allreduce.g0, allreduce.g1, allreduce.g2 ...]",
    ],
    culprits=[3],
    decisions=["unknown"],
)
case(
    "40-rocm-hang",
    ["HW Exception by GPU node-3 (Agent handle: 0x55d0) reason :GPU Hang"] * 3 + dogs((0, 2), 91, "ALLREDUCE", 4096),
    places=["GPU node-3"],
    decisions=["restart-without"],
    op="ALLREDUCE",
    seq=91,
)
case(
    "41-megatron-nan",
    ["[rank5]: AssertionError: Rank 5: found NaN in local forward loss calculation. Device: 5, node: n7"]
    + dogs((0, 1, 2, 3, 4, 6, 7), 88, "ALLREDUCE", 1),
    culprits=[5],
    decisions=["fix-code"],
    op="ALLREDUCE",
    seq=88,
)
case(
    "42-dcp",
    [
        "[rank0]: torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([3, 7])",
        "[rank0]: Traceback (most recent call last): (RANK 3)",
        '[rank0]:   File "/t/filesystem.py", line 410, in write_data',
        "[rank0]: OSError: [Errno 28] No space left on device",
    ],
    culprits=[3, 7],
    decisions=["fix-environment"],
)
# --- training: the rules that were broken ---
case(
    "43-one-rank-of-four",
    dogs([1], 77, "ALLGATHER", 1, 4),
    op="ALLGATHER",
    seq=77,
    timeout_ms=600000,
    decisions=["unknown"],
)
case(
    "44-one-rank-of-two",
    dogs([1], 78, "BROADCAST", 1),
    op="BROADCAST",
    seq=78,
    timeout_ms=600000,
    decisions=["unknown"],
)
case(
    "45-two-different",
    dogs([0], 122, "_REDUCE_SCATTER_BASE", 2048, 1024) + dogs([1], 122, "_ALLGATHER_BASE", 1024, 2048),
    culprits=[0, 1],
    decisions=["fix-code"],
    world_size=2,
)
case(
    "46-eight-one-silent",
    dogs((0, 1, 2, 3, 4, 6, 7), 500, "ALLREDUCE", 8388608, limit=1800000),
    culprits=[5],
    op="ALLREDUCE",
    seq=500,
    numel_in=8388608,
    timeout_ms=1800000,
)
case(
    "47-connect",
    tb(
        3,
        "torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to connect to (10.0.3.7, 29500).",
    ),
    decisions=["fix-environment"],
    timeout_ms=300000,
)
case(
    "48-file-missing-all",
    [
        line
        for r in range(4)
        for line in tb(r, "FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-0003.bin'")
    ],
    culprits=[0, 1, 2, 3],
    decisions=["fix-environment"],
    world_size=4,
)
case(
    "49-srun-range",
    ["srun: error: node2: tasks 4-7: Segmentation fault (core dumped)"]
    + [x for r in (0, 1, 2, 3) for x in dog(r, 31, "ALLREDUCE", 99)],
    culprits=[4, 5, 6, 7],
    op="ALLREDUCE",
    seq=31,
    decisions=["unknown"],
)
case(
    "50-elastic-first",
    tb("", "ValueError: could not broadcast input array")
    + [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "============================================================",
        "train.py FAILED",
        "------------------------------------------------------------",
        "Failures:",
        "[1]:",
        "  time      : 2026-11-20_10:02:12",
        "  host      : n7",
        "  rank      : 9 (local_rank: 1)",
        "  exitcode  : -6 (pid: 812)",
        "  error_file: <N/A>",
        "  traceback : Signal 6 (SIGABRT) received by PID 812",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-20_10:02:11",
        "  host      : n7",
        "  rank      : 11 (local_rank: 3)",
        "  exitcode  : 1 (pid: 814)",
        "  error_file: /tmp/e.json",
        "  traceback : Traceback (most recent call last):",
        '    File "/w/train.py", line 7, in main',
        "    ValueError: could not broadcast input array",
        "============================================================",
    ],
    culprits=[11],
    decisions=["fix-code"],
)
case(
    "51-assert-watchdog",
    [
        "[rank3]:[E1120 10:02:11.1 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: CUDA error: device-side assert triggered",
        *dogs((0, 1, 2, 4, 5, 6, 7), 12, "ALLREDUCE", 77),
    ],
    culprits=[3],
    op="ALLREDUCE",
    seq=12,
    decisions=["fix-code"],
)
case(
    "52-nccl2-all",
    [
        f"[rank{r}]:[E1120 10:02:11.3 WorkNCCL.cpp:372] [TC][rank={r}][name=0] Operation timed out after 600012 ms"
        for r in range(4)
    ],
    timeout_ms=600000,
    world_size=4,
    decisions=["unknown"],
)
case(
    "53-barrier-two",
    tb(0, "RuntimeError: [Rank 0]: Ranks 3, 5 failed to pass monitoredBarrier in 30000 ms"),
    culprits=[3, 5],
    timeout_ms=30000,
)
case(
    "54-subgroup-silent",
    [line for i, r in enumerate((0, 2, 4, 6)) if r != 4 for line in dog(r, 9, "ALLREDUCE", 64, pg="3(dp)", inner=i)]
    + ["[rank4]:[W1120 10:00:00 x.cpp:1] hello timeout"],
    culprits=[4],
    op="ALLREDUCE",
    seq=9,
)
case(
    "55-lightning",
    [
        "pytorch_lightning.utilities.exceptions.DeadlockDetectedException: DeadLock detected from rank: 2 ",
        " Traceback (most recent call last):",
        '  File "/w/t.py", line 3, in f',
        "ZeroDivisionError: division by zero",
    ],
    culprits=[2],
    decisions=["fix-code"],
)
case(
    "56-nvrx",
    [
        f"{r}: 2026-11-20 10:02:1{r},113 [WARNING] [node7] [workload:{r}({r}) infra:{r}({r})] rank_monitor_server.py:498 [Cycle 2] Did not get subsequent heartbeat. Waited 300.00 seconds."
        for r in range(4)
    ],
    timeout_ms=300000,
    decisions=["unknown"],
)
case(
    "57-store-key",
    [
        f"[rank{r}]: RuntimeError: [{r}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Timeout waiting for key: 0 after 600000 ms"
        for r in (1, 2, 3)
    ],
    culprits=[0],
    timeout_ms=600000,
)
case(
    "58-ecc",
    tb(6, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    + dogs((0, 1, 2, 3, 4, 5, 7), 5, "ALLREDUCE", 6),
    culprits=[6],
    decisions=["restart-without"],
    op="ALLREDUCE",
    seq=5,
)
case(
    "59-sizes-differ",
    dogs((0, 1, 2, 3, 4, 5, 7), 66, "ALLREDUCE", 1024) + dogs([6], 66, "ALLREDUCE", 1000),
    culprits=[6],
    decisions=["fix-code"],
    op="ALLREDUCE",
    seq=66,
    numel_in=1024,
)
case(
    "60-nvshmem",
    [
        "/src/modules/transport/ibgda/ibgda.cpp:2234: NULL value Unable to create ah.",
        "/src/init/init.cu:1047: non-zero status: 7 nvshmem setup connections failed",
        "CUDA error: an illegal instruction was encountered",
    ],
    decisions=["fix-environment"],
)

# --- calm ---
bar = "Training:  {p}%|####| {n}/1000 [10:00<05:00,  1.7it/s, loss=0.7]"
calm = lambda name, lines: case(f"calm-{name}", lines, incident=False)
calm(
    "01-shm-then-progress",
    [
        vw(
            "EngineCore",
            71,
            "No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work",
            "INFO",
            "shm_broadcast.py:501",
        ),
        vw("Worker_TP0", 80, "Graph capturing finished in 43 secs, took 1.1 GiB", "INFO", "gpu_model_runner.py:3000"),
        "(APIServer pid=70) INFO:     Application startup complete.",
    ],
)
calm(
    "02-custom-allreduce",
    [
        vw(
            "Worker_TP1",
            81,
            "Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed. To silence this warning, specify disable_custom_all_reduce=True explicitly.",
            "WARNING",
            "custom_all_reduce.py:151",
        ),
        "INFO:     Uvicorn running on http://0.0.0.0:8000",
    ],
)
calm(
    "03-unbatched-p2p",
    [
        "[rank2]:[W1120 10:02:11.1 ProcessGroupNCCL.cpp:3900] Warning: An unbatched P2P op (send/recv) was called on this ProcessGroup with size 2.  In lazy initialization mode, this will result in a new 2-rank NCCL communicator to be created. (function operator())",
        bar.format(p=90, n=900),
    ],
)
calm(
    "04-gloo-mesh",
    [
        "[Gloo] Rank 3 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7",
        "step 100 loss 0.1",
        "step 200 loss 0.1",
    ],
)
calm(
    "05-destroy",
    [
        "[rank0]:[W1120 10:02:11.1 ProcessGroupNCCL.cpp:1479] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources. (function operator())",
        "training finished",
    ],
)
calm(
    "06-kv-request",
    [
        "[2026-11-20 10:02:11 TP1] Decode transfer failed for request rank=1 decode_req.req.rid='9f' decode_req.req.bootstrap_room=7310 with exception KVTransferError(bootstrap_room=7310): Aborted by AbortReq.",
        "[2026-11-20 10:02:13 TP0] Decode batch, #running-req: 12, #token: 3121, gen throughput (token/s): 441.1",
    ],
)
calm(
    "07-torchtitan-limit",
    [
        "[rank0]:2026-11-20 10:02:11,1 - root - INFO - Synchronizing and adjusting timeout for all ProcessGroups to 0:01:40",
        "step: 20 loss: 7.1 memory: 21.1GiB",
    ],
)
calm(
    "08-xla-unstuck",
    [
        "[id=1] This thread has been waiting for `acquire clique for rank 2; clique=devices=[8,9,10,11]; run_id=-155` for 10 seconds and may be stuck. Expected 4 threads to join the rendezvous, but not all of them arrived on time.",
        "Thread is unstuck! Warning above was a false-positive. Perhaps the timeout is too short.",
        "step 41 loss 3.1",
    ],
)
calm(
    "09-retry-store",
    [
        "[W1120 10:02:11.1 socket.cpp:767] [c10d] The IPv6 network addresses of (node0, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
        "step 10 loss 2.0",
        "step 20 loss 1.0",
    ],
)
calm(
    "10-exit-barrier",
    [
        "INFO 2026-11-20 torch.distributed.elastic.agent.server.api: Local worker group finished (SUCCEEDED). Waiting 300 seconds for other agents to finish",
        "INFO torch.distributed.elastic.agent.server.api: Done waiting for other agents. Elapsed: 0.001 seconds",
    ],
)
calm(
    "11-nccl-info",
    [
        f"node1:{4000 + r}:{4100 + r} [{r}] NCCL INFO comm 0x5{r} rank {r} nranks 4 cudaDev {r} nvmlDev {r} busId {r}000 commId 0x9 - Init COMPLETE"
        for r in range(4)
    ]
    + ["step 3 loss 1.1"],
)
calm(
    "12-reward-timeout",
    [
        "[Timeout] Task timeout: sandbox 17, reward set to 0",
        "API Request Error: Gateway Timeout (504), retrying 1/3",
        "step 55 reward 0.31",
        "step 56 reward 0.33",
    ],
)
calm(
    "13-soft-watchdog",
    [
        "[2026-11-20 10:02:11 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)",
        "[2026-11-20 10:02:15 TP0] Decode batch, #running-req: 3, gen throughput (token/s): 99.1",
    ],
)
calm("14-xccl", ["ProcessGroupXCCL does not support aborting comms", "epoch 1 step 100 loss 0.4"])
calm(
    "15-http",
    [
        'INFO:     10.0.0.1:3222 - "POST /v1/completions HTTP/1.1" 503 Service Unavailable',
        'INFO:     10.0.0.1:3222 - "POST /v1/completions HTTP/1.1" 200 OK',
    ],
)
calm(
    "16-barrier-done",
    [
        f"INFO:torch.distributed.distributed_c10d:Rank {r}: Completed store-based barrier for key:store_based_barrier_key:1 with 4 nodes."
        for r in range(4)
    ]
    + ["step 1 loss 9.1"],
)
calm(
    "17-lease",
    [
        "(raylet) 0 Workers (tasks / actors) killed due to memory pressure (OOM), 1 Workers crashed due to other reasons at node (ID: 3f, IP: 10.0.3.7) over the last time period.",
        "(TaskRunner pid=12) step:17 - critic/score/mean:0.4",
    ],
)
calm(
    "18-rendezvous-info",
    [
        "I1120 10:02:11.1 dynamic_rendezvous.py:1100] The node 'h_12_0' has joined round 0 of the rendezvous 'j1' as rank 0 in a world of size 2.",
        "loss 0.2 at step 4",
    ],
)
calm(
    "19-mooncake-list",
    [
        "[2026-11-20 10:02:11 TP0] Prefill batch. #new-seq: 1, #new-token: 1024, timeout_s=300",
        "[2026-11-20 10:02:12 TP0] Decode batch. #running-req: 2",
    ],
)
calm(
    "20-jax-fine",
    [
        "I1120 10:02:11 distributed.py:121] Connecting to JAX distributed service on 10.0.0.1:1234 (initialization_timeout=300s)",
        "I1120 coordination_service_agent.cc:304] Coordination agent has successfully connected.",
        "step 10 loss 4.1",
    ],
)


# --- a second set, written when the first had been mended ---
def second(name: str, lines: list[str] | dict[str, list[str]], **truth: Any) -> None:
    case(f"second-{name}", lines, **truth)


def worker(r: int) -> str:
    return f"(VllmWorker rank={r} pid={800 + r})"


second(
    "01-vllmworker-silent",
    [f"{worker(r)} {l}" for r in (0, 1, 3) for l in dog(r, 9, "ALLREDUCE", 64)]
    + [
        f"{worker(r)} INFO 11-20 10:00:00 [parallel_state.py:957] rank {r} in world size 4 is assigned as DP rank 0"
        for r in range(4)
    ],
    culprits=[2],
    op="ALLREDUCE",
    seq=9,
)
second(
    "02-sglang-7of8",
    [f"[2026-11-20 10:02:{10 + t} TP{t}] Watchdog timeout (self.watchdog_timeout=300)" for t in range(8) if t != 5],
    timeout_ms=300000,
    decisions=["unknown"],
)
second(
    "03-deepep-all",
    [l for r in range(8) for l in tb(r, "RuntimeError: DeepEP error: timeout (dispatch CPU)")],
    decisions=["unknown", "fix-environment"],
)
second(
    "04-died-6-victim",
    [f"(Worker_TP1 pid=801) {l}" for l in dog(1, 9, "ALLREDUCE", 64)]
    + [
        "(EngineCore pid=71) ERROR 11-20 10:02:11 [multiproc_executor.py:250] Worker proc VllmWorker-1 died unexpectedly (exit code: -6), shutting down executor."
    ],
    decisions=["unknown"],
    op="ALLREDUCE",
)
second(
    "05-died-noexit-victim",
    [f"(VllmWorker rank=1 pid=801) {l}" for l in dog(1, 9, "ALLREDUCE", 64)]
    + [
        "ERROR 11-20 10:02:11 [multiproc_executor.py:250] Worker proc VllmWorker-1 died unexpectedly, shutting down executor."
    ],
    decisions=["unknown"],
    op="ALLREDUCE",
)
second(
    "06-elastic-2nodes",
    {
        "node1.log": [
            "nnodes=2 nproc_per_node=4",
            "E0813 06:19:49.809000 161210 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 3 (pid: 9) of binary: /x",
        ]
    },
    decisions=["restart", "unknown", "fix-environment"],
)
second(
    "07-intended",
    [
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "\tclass_name: W",
        "\tpid: 61204",
        "\tname: abcDEFWorkerDict_0:3",
        "\tip: 10.0.3.7",
        "The actor is dead because its worker process has died. Worker exit type: INTENDED_SYSTEM_EXIT Worker exit detail: Worker exits by request.",
    ],
    decisions=["unknown"],
)
second(
    "08-raytask-wrapped",
    [
        "ray.exceptions.RayTaskError(RuntimeError): ray::WorkerDict.actor_rollout_update_actor() (pid=9120, ip=10.0.3.7, actor_id=01)",
        '  File "/w/a.py", line 3, in f',
        "RuntimeError: CUDA error: out of memory",
    ],
    decisions=["fix-code", "fix-environment", "unknown"],
)
second(
    "09-raytask-own",
    [
        "(WorkerDict pid=9120, ip=10.0.3.7) [rank3]: Traceback (most recent call last):",
        '(WorkerDict pid=9120, ip=10.0.3.7) [rank3]:   File "/w/a.py", line 3, in f',
        "(WorkerDict pid=9120, ip=10.0.3.7) [rank3]: ValueError: prompt too long",
        "ray.exceptions.RayTaskError(ValueError): ray::WorkerDict.update() (pid=9120, ip=10.0.3.7, actor_id=01)",
    ],
    culprits=[3],
    decisions=["fix-code"],
)
second(
    "10-ei0006",
    [
        "[rank4]: EI0006: [PID: 71] 2026-11-20-10:02:11 Getting socket times out. Reason: Remote Rank did not send the data in time. Please check the reason for the rank being stuck",
        "Solution: 1. check TLS ... HCCL_CONNECT_TIMEOUT 1800 s",
    ],
    decisions=["fix-environment", "unknown"],
)
second(
    "11-npu",
    [
        "[ERROR] 2026-11-20-10:02:11 (PID:4711, Device:3, RankID:11) ERR02200 DIST call hccl api failed.",
        "RuntimeError: NPU function error: synchronize, error code is 507018",
    ],
    decisions=["unknown", "fix-environment"],
)
second(
    "12-jax-set-error",
    [
        "E1120 10:02:11.1 71 coordination_service.cc:1] /job:jax_worker/replica:0/task:3 has been set to ERROR in coordination service: UNAVAILABLE: Task /job:jax_worker/replica:0/task:3 heartbeat timeout. This indicates that the remote task has failed, got preempted, or crashed unexpectedly. Check the task logs for an earlier error to debug further."
    ],
    suspects=[3],
    decisions=["unknown"],
)
second(
    "13-lmdeploy",
    [
        "2026-11-20 10:02:11 - lmdeploy - ERROR - model_agent.py:512 - Rank[1] failed.",
        "Traceback (most recent call last):",
        '  File "/l/model_agent.py", line 500, in run',
        "    x()",
        "ValueError: bad block",
        "Ray worker exited.",
        "Task <EngineMainLoop> failed",
    ],
    culprits=[1],
    decisions=["fix-code"],
)
second(
    "14-horovod-inline",
    [
        "[1,0]<stderr>:[2026-11-20 10:02:11.1: W /tmp/horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds. This may indicate that different ranks are trying to submit different tensors or that only subset of ranks is submitting tensors, which will cause deadlock. ",
        "[1,0]<stderr>:Stalled ops:",
        "[1,0]<stderr>:HorovodAllreduce_g_0 [missing ranks: 3, 5]",
        "[1,0]<stderr>:HorovodAllreduce_g_1 [missing ranks: 3, 5]",
    ],
    culprits=[3, 5],
    decisions=["unknown"],
)
second(
    "15-horovod-diverged",
    ["[1,0]<stderr>:g_0 [missing ranks: 3]", "[1,0]<stderr>:g_1 [missing ranks: 0, 1, 2]"],
    decisions=["fix-code"],
)
second(
    "16-k8s-pod",
    [f"[pod/wide-ep-2/vllm] {l}" for l in vtb("Worker_DP7_EP7", 801, "ValueError: bad")],
    culprits=[7],
    decisions=["fix-code"],
)
second(
    "17-two-groups",
    [l for r in (1, 2, 3) for l in dog(r, 40, "_ALLGATHER_BASE", 64, 256)]
    + dog(0, 3, "BROADCAST", 99, pg="5(weights)", inner=0),
    decisions=["unknown"],
    culprits=[],
)
second(
    "18-repeated",
    [f"(WorkerDict pid=9120, ip=10.0.3.7) {dog(3, 9, 'ALLREDUCE', 64)[0]} [repeated 6x across cluster]"],
    world_size=8,
    op="ALLREDUCE",
)
second(
    "19-dense-dp-rank0",
    [f"(Worker_DP{d}_TP0 pid=80{d}) {l}" for d in (0, 1) for l in dog(0, 9, "ALLREDUCE", 64)],
    op="ALLREDUCE",
)
second(
    "20-gloo-save",
    [
        l
        for r in (1, 2, 3)
        for l in [
            f"[rank{r}]: Traceback (most recent call last):",
            f'[rank{r}]:   File "/t/distributed_c10d.py", line 3400, in gather_object',
            f"[rank{r}]:     work.wait()",
            f"[rank{r}]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        ]
    ],
    timeout_ms=1800000,
    op="gather_object",
    world_size=8,
)
second(
    "21-srun-all-killed",
    ["srun: error: node1: tasks 0-3: Killed"],
    world_size=4,
    decisions=["unknown", "restart", "fix-environment"],
)
second(
    "22-srun-after",
    [
        "srun: error: node1: task 2: Segmentation fault (core dumped)",
        "srun: Terminating StepId=12.0",
        "srun: error: node1: tasks 0-1,3: Killed",
    ],
    culprits=[2],
    decisions=["unknown"],
)
second("23-ratio4", dogs([0, 1], 77, "ALLGATHER", 1, 4), op="ALLGATHER")
second("24-both-pair-wait", dogs([0, 1], 77, "ALLREDUCE", 4), op="ALLREDUCE")
second("25-pair-seq", dogs([0], 77, "ALLREDUCE", 4) + dogs([1], 78, "ALLREDUCE", 4), op="ALLREDUCE", world_size=2)
second(
    "26-prime",
    dogs((1, 2, 3), 9, "_ALLGATHER_BASE", 8, 32)
    + ["[rank0]: Waiting for path /o/broadcasts/step_7/NCCL_READY timeout none"],
    decisions=["unknown", "raise-limit"],
)
second(
    "27-keyerror-many",
    [l for r in (0, 1, 2, 4, 5, 6) for l in tb(r, "KeyError: 'optimizer'")],
    world_size=8,
    culprits=[0, 1, 2, 4, 5, 6],
    decisions=["fix-code"],
)
second(
    "28-segv-same-second",
    ["train.py FAILED", "Failures:"]
    + [
        x
        for r in (1, 2)
        for x in (
            f"[{r}]:",
            "  time      : 2026-11-20_10:02:12",
            "  host      : n7",
            f"  rank      : {r} (local_rank: {r})",
            f"  exitcode  : -11 (pid: 81{r})",
            "  error_file: <N/A>",
            f"  traceback : Signal 11 (SIGSEGV) received by PID 81{r}",
        )
    ]
    + [
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-20_10:02:12",
        "  host      : n7",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : -11 (pid: 810)",
        "  error_file: <N/A>",
        "  traceback : Signal 11 (SIGSEGV) received by PID 810",
    ],
    culprits=[0, 1, 2],
    decisions=["unknown"],
)
second(
    "29-rdzv",
    [
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details."
    ],
    decisions=["fix-environment"],
)
second(
    "30-keepalive",
    [
        "[W] The node 'h_12_0' has failed to send a keep-alive heartbeat to the rendezvous 'j1' due to an error of type RendezvousConnectionError."
    ],
    decisions=["unknown", "fix-environment"],
)
second(
    "31-mesh-2",
    [
        f"[rank{r}]: RuntimeError: Timed out building the global mesh communicator for c0{r} (rank={r}, world_size=4)\n"
        for r in range(4)
    ],
    decisions=["unknown"],
)
second(
    "32-deepep-intranode",
    [
        f"DeepEP timeout for dispatch receivers, rank {r}, responsible_channel = 4, tokens remained: 12"
        for r in (0, 1, 2)
    ],
    decisions=["unknown"],
)
second(
    "33-ray-train",
    [
        "A worker health check has been hanging for 601.20 seconds. Marking the worker as dead.",
        "Worker info: Worker(rank=3)",
    ],
    decisions=["unknown"],
)
second(
    "34-cpu-wait-v2",
    ["EPException: Dispatch CPU wait timeout: CPU side received count (scaleup: 4): -13 -1 0 -9 # -4 0"],
    decisions=["unknown"],
)
second(
    "35-memfault",
    ["[rank2]: Memory access fault by GPU node-7 (Agent handle: 0x55) on address (nil). Reason: Unknown."]
    + dogs((0, 1, 3), 9, "ALLREDUCE", 4),
    culprits=[2],
    decisions=["fix-code", "unknown"],
)
second(
    "36-ray-pid-map",
    [
        "(RayTrainWorker pid=61204, ip=10.0.3.7) [rank5]:[W1120 x.cpp:1] timeout set",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "\tclass_name: RayTrainWorker",
        "\tpid: 61204",
        "\tip: 10.0.3.7",
        "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits",
    ],
    culprits=[5],
    decisions=["unknown"],
)


def main() -> None:
    for name, (files, truth) in CASES.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file, lines in files.items():
            (folder / file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        (folder / "truth.json").write_text(json.dumps(truth, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
