"""Cases in which a culprit is known by a map over several lines, and those in which the map is not proved.

`CASES`: name -> files with their lines, and the truth. tests/unit/explain/test_rank_map.py reads them.

A line names a process by its number, its pod, its host, its local rank, its place in a group or the bus of its GPU;
another line says which rank that is. Beside each kind stand controls, in which the second line is missing, belongs to
another host, or is said twice: nobody is named then. The values are invented; the lines follow what the tools print.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CASES: dict[str, tuple[dict[str, list[str]], dict[str, Any]]] = {}
Lines = list[str]


def case(name: str, lines: Lines | dict[str, Lines], culprits: Iterable[int] = (), **truth: Any) -> None:
    files = lines if isinstance(lines, dict) else {"job.log": lines}
    CASES[f"map-{name}"] = (files, {"incident": True, "culprits": list(culprits), **truth})


def control(name: str, lines: Lines | dict[str, Lines], **truth: Any) -> None:
    case(f"{name}-not", lines, **truth)


def raised(head: str = "", error: str = "ValueError: cannot reshape array of size 4096 into shape (3,17)") -> Lines:
    rows = ["Traceback (most recent call last):", '  File "/w/train.py", line 214, in <module>', "    main()"]
    return [head + row for row in [*rows, error]]


def entry(number: int, rank: int, local: int, code: int, pid: int, host: str) -> Lines:
    end = {-9: "Signal 9 (SIGKILL)", -11: "Signal 11 (SIGSEGV)", -6: "Signal 6 (SIGABRT)"}.get(code)
    trace = (
        f"{end} received by PID {pid}"
        if end
        else "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    )
    return [
        f"[{number}]:",
        "  time      : 2026-02-11_04:17:25",
        f"  host      : {host}",
        f"  rank      : {rank} (local_rank: {local})",
        f"  exitcode  : {code} (pid: {pid})",
        "  error_file: <N/A>",
        f"  traceback : {trace}",
    ]


def summary(first: tuple[int, int, int, int, str], others: Iterable[tuple[int, int, int, int, str]] = ()) -> Lines:
    rows = [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60,
        "train.py FAILED",
        "-" * 60,
        "Failures:",
    ]
    for number, (rank, local, code, pid, host) in enumerate(others, 1):
        rows += entry(number, rank, local, code, pid, host)
    rank, local, code, pid, host = first
    return [*rows, "-" * 60, "Root Cause (first observed failure):", *entry(0, rank, local, code, pid, host), "=" * 60]


def failed(local: int, pid: int, code: int = -9, head: str = "") -> str:
    return f"{head}E0211 04:17:25.512000 4071 site-packages/torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: {code}) local_rank: {local} (pid: {pid}) of binary: /opt/conda/bin/python3.11"


def rendezvous(node: int, per_node: int, nodes: int, head: str = "") -> Lines:
    here = [node * per_node + rank for rank in range(per_node)]
    total = [nodes * per_node] * per_node
    return [
        head + row
        for row in (
            "I0211 03:02:11.204000 4071 site-packages/torch/distributed/elastic/agent/server/api.py:525] [default] Rendezvous complete for workers. Result:",
            "  restart_count=0",
            "  master_addr=10.8.0.11",
            "  master_port=29401",
            f"  group_rank={node}",
            f"  group_world_size={nodes}",
            f"  local_ranks={list(range(per_node))}",
            f"  role_ranks={here}",
            f"  global_ranks={here}",
            f"  role_world_sizes={total}",
            f"  global_world_sizes={total}",
        )
    ]


def init(host: str, pid: int, rank: int, size: int, device: int, bus: str, local: int | None = None) -> str:
    more = "" if local is None else f" localRank {local} localRanks 8"
    return f"{host}:{pid}:{pid + 90} [{device}] NCCL INFO ncclCommInitRankConfig comm 0x55d0c{rank:03d} rank {rank} nranks {size} cudaDev {device} nvmlDev {device} busId {bus}{more} commId 0x9f1c22d0 - Init COMPLETE"


def oom(pid: int, name: str = "python3") -> str:
    return f"[812733.114201] Out of memory: Killed process {pid} ({name}) total-vm:211903312kB, anon-rss:188210044kB, file-rss:1024kB, UID:1000 pgtables:381204kB oom_score_adj:0"


def xid(bus: str, number: int = 79, pid: str = "'<unknown>'") -> str:
    return f"[812733.201774] NVRM: Xid (PCI:0000:{bus}:00): {number}, pid={pid}, name=<unknown>, GPU has fallen off the bus."


def dog(rank: int, seq: int = 4417, limit: int = 600000) -> str:
    return f"[rank{rank}]:[E211 04:27:1{rank % 10}.881204 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=7340032, NumelOut=7340032, Timeout(ms)={limit}) ran for {limit + 17 + rank} milliseconds before timing out."


BUS = ["1b000", "29000", "45000", "4e000", "9b000", "a7000", "c1000", "cd000"]
CLOSED = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.8.0.{}]:41122"

# --- process numbers ---
RAY = "(RayWorkerWrapper pid={}, ip={}) "
case(
    "01-ray-ip",
    [
        *(
            RAY.format(2211 + r % 4, f"10.8.0.{11 + r // 4}")
            + f"[rank{r}]:[W211 03:02:{10 + r}.118204 ProcessGroupNCCL.cpp:4718] [PG ID 0 PG GUID 0 Rank {r}] using GPU {r % 4} as device used by this process is currently unknown."
            for r in range(8)
        ),
        *raised(RAY.format(2213, "10.8.0.12")),
    ],
    [6],
)
control(
    "01-ray-ip",
    [
        *(
            RAY.format(2211 + r % 4, f"10.8.0.{11 + r // 4}")
            + f"[rank{r}]:[W211 03:02:{10 + r}.118204 ProcessGroupNCCL.cpp:4718] [PG ID 0 PG GUID 0 Rank {r}] using GPU {r % 4} as device used by this process is currently unknown."
            for r in range(8)
        ),
        *raised("(RayWorkerWrapper pid=2213) "),
    ],
)
case(
    "02-launched",
    [
        "[run.sh] world size 4",
        *(f"[launcher] started rank {r} (pid {9120 + r})" for r in range(4)),
        "step 180 loss 2.114",
        oom(9122),
    ],
    [2],
)
control(
    "02-launched",
    [
        "[run.sh] world size 4",
        *(f"[launcher] started local rank {r} (pid {9120 + r}) on a node of 2" for r in range(2)),
        "step 180 loss 2.114",
        oom(9122),
    ],
)
case(
    "03-rank-pid-table",
    [
        "world_size=4",
        *(f"gpu-a1: rank={r} local_rank={r} pid={31000 + 7 * r}" for r in range(4)),
        "step 77 loss 1.9",
        "watchman: process 31021 killed by signal 9 (SIGKILL)",
        oom(31021),
    ],
    [3],
)
control(
    "03-rank-pid-two-hosts",
    [
        "world_size=8",
        *(f"gpu-a{1 + r // 4}: rank={r} pid={31000 + 7 * (r % 4)}" for r in range(8)),
        oom(31021),
    ],
)
case(
    "04-nccl-pid",
    [init("gpu-b7", 5100 + r, r, 8, r, BUS[r]) for r in range(8)] + ["iteration 300/ 1000", oom(5105)],
    [5],
)
control(
    "04-nccl-pid-subgroup",
    [init("gpu-b7", 5100 + r, r // 2, 4, r, BUS[r]) for r in range(8)] + ["iteration 300/ 1000", oom(5105)],
)
case(
    "05-nccl-bus",
    [init("gpu-b7", 5100 + r, r, 8, r, BUS[r]) for r in range(8)]
    + ["iteration 300/ 1000", xid("c1:00")[:0] + xid("c1")],
    [6],
)
control(
    "05-nccl-bus-two-hosts",
    [init(f"gpu-b{r // 8}", 5100 + r, r, 16, r % 8, BUS[r % 8]) for r in range(16)]
    + ["iteration 300/ 1000", xid("c1")],
)
case(
    "06-nccl-bus-named-host",
    [init(f"gpu-b{r // 8}", 5100 + r, r, 16, r % 8, BUS[r % 8]) for r in range(16)]
    + [
        "iteration 300/ 1000",
        "Feb 11 04:17:20 gpu-b1 kernel: NVRM: Xid (PCI:0000:29:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    ],
    [9],
)
control(
    "06-nccl-bus-other-host",
    [init(f"gpu-b{r // 8}", 5100 + r, r, 16, r % 8, BUS[r % 8]) for r in range(16)]
    + [
        "iteration 300/ 1000",
        "Feb 11 04:17:20 login-2 kernel: NVRM: Xid (PCI:0000:29:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    ],
)
DS = "[2026-02-11 03:02:0{},331] [INFO] [launch.py:{}:main] "


def deepspeed(head: str, hosts: dict[str, int], node: int, first: int) -> Lines:
    ranks, table = 0, {}
    for host, count in hosts.items():
        table[host] = list(range(ranks, ranks + count))
        ranks += count
    count = list(hosts.values())[node]
    return [
        head + row
        for row in (
            DS.format(1, 145) + f"WORLD INFO DICT: { {host: list(range(n)) for host, n in hosts.items()} }",
            DS.format(1, 151) + f"nnodes={len(hosts)}, num_local_procs={count}, node_rank={node}",
            DS.format(1, 162) + f"global_rank_mapping=defaultdict(<class 'list'>, {table})",
            DS.format(1, 163) + f"dist_world_size={ranks}",
            *(
                DS.format(2, 256)
                + f"process {first + n} spawned with command: ['/usr/bin/python3', '-u', 'train.py', '--local_rank={n}', '--deepspeed', 'ds.json']"
                for n in range(count)
            ),
        )
    ]


case("07-deepspeed-pid", [*deepspeed("", {"localhost": 4}, 0, 7300), "step 41", oom(7301)], [1])
case(
    "08-deepspeed-two-nodes",
    [
        *deepspeed("worker-0: ", {"worker-0": 4, "worker-1": 4}, 0, 7300),
        *deepspeed("worker-1: ", {"worker-0": 4, "worker-1": 4}, 1, 8800),
        "worker-0: step 41",
        "worker-1: " + oom(8802),
    ],
    [6],
)
control(
    "08-deepspeed-pid-of-none",
    [
        *deepspeed("worker-0: ", {"worker-0": 4, "worker-1": 4}, 0, 7300),
        *deepspeed("worker-1: ", {"worker-0": 4, "worker-1": 4}, 1, 7300),
        "worker-0: step 41",
        oom(7302),
    ],
)
case(
    "09-vllm-assigned",
    [
        *(
            f"(Worker pid={640 + r}) INFO 02-11 03:02:1{r} [parallel_state.py:1208] rank {r} in world size 4 is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank {r}, EP rank N/A"
            for r in range(4)
        ),
        *raised(
            "(Worker pid=642) ",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacity of 79.11 GiB",
        ),
    ],
    [2],
)
control(
    "09-vllm-pid-alone",
    [
        "(Worker pid=640) INFO 02-11 03:02:10 [parallel_state.py:1208] rank 0 in world size 4 is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank 0, EP rank N/A",
        *raised(
            "(Worker pid=642) ",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacity of 79.11 GiB",
        ),
    ],
)
case(
    "10-logger-pid",
    [
        "2026-02-11 03:02:10,114 [pid 4411] INFO train: initialized, global rank 0 of 4",
        "2026-02-11 03:02:10,118 [pid 4412] INFO train: initialized, global rank 1 of 4",
        "2026-02-11 03:02:10,121 [pid 4413] INFO train: initialized, global rank 2 of 4",
        "2026-02-11 03:02:10,125 [pid 4414] INFO train: initialized, global rank 3 of 4",
        "2026-02-11 04:10:00,911 [pid 4413] ERROR train: ValueError: negative dimensions are not allowed",
    ],
    [2],
)
control(
    "10-logger-pid-local",
    [
        "2026-02-11 03:02:10,114 [pid 4411] INFO train: initialized, local rank 0",
        "2026-02-11 03:02:10,118 [pid 4412] INFO train: initialized, local rank 1",
        "world_size=16",
        "2026-02-11 04:10:00,911 [pid 4412] ERROR train: ValueError: negative dimensions are not allowed",
    ],
)
case(
    "11-torchrun-sigkill-dmesg",
    [
        *rendezvous(0, 8, 1),
        "step 180 loss 2.114",
        failed(5, 31877),
        "[812733.1] Memory cgroup out of memory: Killed process 31877 (python3) total-vm:1kB",
    ],
    [5],
)
case(
    "12-faulthandler-ray",
    [
        *(
            f"(RayTrainWorker pid={880 + r}, ip=10.8.0.{11 + r}) Setting up process group for: env:// [rank={r}, world_size=4]"
            for r in range(4)
        ),
        *(
            f"(RayTrainWorker pid=882, ip=10.8.0.13) {row}"
            for row in (
                "Fatal Python error: Segmentation fault",
                "",
                "Current thread 0x00007f1 (most recent call first):",
                '  File "/w/model.py", line 88 in forward',
            )
        ),
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "\tclass_name: RayTrainWorker",
        "\tactor_id: 9f22",
        "\tpid: 882",
        "\tip: 10.8.0.13",
    ],
    [2],
)
SAME_PID = [
    *(
        f"(RayTrainWorker pid=880, ip=10.8.0.{11 + r}) Setting up process group for: env:// [rank={r}, world_size=4]"
        for r in range(4)
    ),
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "\tclass_name: RayTrainWorker",
    "\tactor_id: 9f22",
    "\tpid: 880",
]
case("13-actor-same-pid", [*SAME_PID, "\tip: 10.8.0.13"], [2])
control("13-actor-same-pid", SAME_PID)
case(
    "14-train-placed",
    [
        "(TrainController pid=70) Started training worker group of size 4: ",
        *(
            f"(TrainController pid=70) - (ip=10.8.0.{11 + r // 2}, pid={880 + r % 2}) world_rank={r}, local_rank={r % 2}, node_rank={r // 2}"
            for r in range(4)
        ),
        *raised("(RayTrainWorker pid=881, ip=10.8.0.12) "),
    ],
    [3],
)
control(
    "14-train-placed-no-ip",
    [
        "(TrainController pid=70) Started training worker group of size 4: ",
        *(
            f"(TrainController pid=70) - (ip=10.8.0.{11 + r // 2}, pid={880 + r % 2}) world_rank={r}, local_rank={r % 2}, node_rank={r // 2}"
            for r in range(4)
        ),
        *raised("(RayTrainWorker pid=881) "),
    ],
)

# --- local ranks and nodes ---
case(
    "20-rendezvous-file",
    {
        "agent-a.log": [*rendezvous(0, 4, 2), "step 180 loss 2.1"],
        "agent-b.log": [*rendezvous(1, 4, 2), "step 180 loss 2.1", failed(2, 4102)],
    },
    [6],
)
case(
    "21-rendezvous-tee",
    {"agent-b.log": [*rendezvous(2, 4, 4), "[default0]:step 180 loss 2.1", *raised("[default3]:")]},
    [11],
)
control(
    "21-tee-no-rendezvous", {"agent-b.log": ["WORLD_SIZE=16", "[default0]:step 180 loss 2.1", *raised("[default3]:")]}
)
case(
    "22-rendezvous-pod",
    [
        *rendezvous(0, 2, 3, "[pod/train-x-0/main] "),
        *rendezvous(2, 2, 3, "[pod/train-x-1/main] "),
        *rendezvous(1, 2, 3, "[pod/train-x-2/main] "),
        "[pod/train-x-1/main] " + failed(1, 88),
    ],
    [5],
)
control(
    "22-rendezvous-other-pod",
    [
        *rendezvous(0, 2, 3, "[pod/train-x-0/main] "),
        *rendezvous(1, 2, 3, "[pod/train-x-2/main] "),
        "[pod/train-x-1/main] " + failed(1, 88),
    ],
)
case(
    "23-static-node-rank",
    {
        "node-c.log": [
            "+ torchrun --nnodes=4 --nproc_per_node=8 --node_rank=2 --master_addr=10.8.0.11 --master_port=29500 train.py",
            "step 10",
            failed(3, 4410, -11),
        ]
    },
    [19],
)
control(
    "23-c10d-node-rank",
    {
        "node-c.log": [
            "+ torchrun --nnodes=4 --nproc_per_node=8 --node_rank=2 --rdzv_backend=c10d --rdzv_endpoint=10.8.0.11:29400 train.py",
            "step 10",
            failed(3, 4410, -11),
        ]
    },
)
control(
    "23-no-nproc",
    {
        "node-c.log": [
            "+ torchrun --nnodes=4 --node_rank=2 --master_addr=10.8.0.11 --master_port=29500 train.py",
            "step 10",
            failed(3, 4410, -11),
        ]
    },
)
case(
    "24-node-rank-env",
    {
        "n0.log": ["NNODES=2 NPROC_PER_NODE=4 NODE_RANK=0 MASTER_ADDR=n0", "step 10"],
        "n1.log": ["NNODES=2 NPROC_PER_NODE=4 NODE_RANK=1 MASTER_ADDR=n0", "step 10", failed(0, 4410)],
    },
    [4],
)
case(
    "25-accelerate-machine-rank",
    {
        "m1.log": [
            "accelerate launch --num_processes 8 --num_machines 2 --machine_rank 1 --main_process_ip 10.8.0.11 train.py",
            "step 10",
            failed(3, 4410),
        ]
    },
    [7],
)
control(
    "25-accelerate-no-machine-rank",
    {
        "m1.log": [
            "accelerate launch --num_processes 8 --num_machines 2 --main_process_ip 10.8.0.11 train.py",
            "step 10",
            failed(3, 4410),
        ]
    },
)
case(
    "26-host-base-summary",
    [
        *summary((12, 4, 1, 771, "gpu-k3"), [(9, 1, -6, 768, "gpu-k3")]),
    ],
    [12],
)
case(
    "27-nccl-host-base",
    [init(f"gpu-k{r // 4}", 500 + r, r, 8, r % 4, BUS[r % 4]) for r in range(8)]
    + ["gpu-k1: " + row for row in raised("[default2]:")],
    [6],
)
control(
    "27-host-unknown",
    [init(f"gpu-k{r // 4}", 500 + r, r, 8, r % 4, BUS[r % 4]) for r in range(8)]
    + ["gpu-k9: " + row for row in raised("[default2]:")],
)
case(
    "28-mp-spawn",
    ["world_size: 4", "torch.multiprocessing.spawn.ProcessExitedException: process 3 terminated with signal SIGSEGV"],
    [3],
)
control(
    "28-mp-spawn-two-nodes",
    [
        "nnodes: 4, world_size: 32",
        "torch.multiprocessing.spawn.ProcessExitedException: process 3 terminated with signal SIGSEGV",
    ],
)
case(
    "29-local-file-one-node",
    {
        "attempt_0/0/stderr.log": ["step 3"],
        "attempt_0/1/stderr.log": ["step 3", *raised()],
        "launch.log": ["torchrun --standalone --nproc_per_node=2 train.py", failed(1, 501, 1)],
    },
    [1],
)
case(
    "30-local-file-rendezvous",
    {
        "node2/agent.log": rendezvous(2, 2, 3),
        "node2/attempt_0/0/stderr.log": ["step 3"],
        "node2/attempt_0/1/stderr.log": ["step 3", *raised()],
    },
    [5],
)
control(
    "30-local-file-no-map",
    {
        "node2/attempt_0/0/stderr.log": ["WORLD_SIZE=6", "step 3"],
        "node2/attempt_0/1/stderr.log": ["step 3", *raised()],
        "node1/attempt_0/1/stderr.log": ["step 3"],
    },
)
case(
    "31-global-and-local",
    [
        "world_size=16",
        *(f"gpu-z{r // 8}: Initialized: global rank {r}, local rank {r % 8}, host gpu-z{r // 8}" for r in range(16)),
        "gpu-z1: " + failed(6, 99),
    ],
    [14],
)
control(
    "31-local-only",
    [
        "world_size=16",
        *(f"gpu-z{r // 8}: Initialized: local rank {r % 8}" for r in range(16)),
        "gpu-z1: " + failed(6, 99),
    ],
)

# --- pods, tasks, containers ---
POD = "[pod/llama-worker-{}/trainer] "
case(
    "40-pod-rank-env",
    [
        *(POD.format(n) + f"RANK={n + 1} WORLD_SIZE=4 MASTER_ADDR=llama-master-0" for n in range(3)),
        *raised(POD.format(1)),
    ],
    [2],
)
control(
    "40-pod-no-env",
    [*(POD.format(n) + "WORLD_SIZE=4 MASTER_ADDR=llama-master-0" for n in range(3)), *raised(POD.format(1))],
)
case(
    "41-pod-prefix-then-kill",
    [
        *(
            POD.format(n) + f"[rank{n}]:[W211 03:02:10.1 ProcessGroupNCCL.cpp:4718] [Rank {n}] using GPU 0"
            for n in range(4)
        ),
        "3m  Warning  OOMKilling  pod/llama-worker-2  Memory cgroup out of memory: Killed process 3177 (python3)",
    ],
    [2],
)
control(
    "41-pod-two-ranks",
    [
        *(
            POD.format(n // 2) + f"[rank{n}]:[W211 03:02:10.1 ProcessGroupNCCL.cpp:4718] [Rank {n}] using GPU 0"
            for n in range(4)
        ),
        *raised(POD.format(1)),
    ],
)
COMPOSE = "worker-{}  | "
case(
    "42-compose",
    [
        *(COMPOSE.format(n) + f"RANK={3 - n} LOCAL_RANK=0 WORLD_SIZE=4" for n in range(4)),
        *raised(COMPOSE.format(3)),
        "worker-3 exited with code 1",
    ],
    [0],
)
control(
    "42-compose-no-rank",
    [
        *(COMPOSE.format(n) + "LOCAL_RANK=0 WORLD_SIZE=4" for n in range(4)),
        *raised(COMPOSE.format(3)),
        "worker-3 exited with code 1",
    ],
)
case(
    "43-lightning-pod",
    [
        *(
            POD.format(n) + f"Initializing distributed: GLOBAL_RANK: {(n + 2) % 4}, MEMBER: {(n + 2) % 4 + 1}/4"
            for n in range(4)
        ),
        *raised(POD.format(0)),
    ],
    [2],
)
control(
    "43-lightning-pod-two-gpus",
    [
        *(POD.format(n // 2) + f"Initializing distributed: GLOBAL_RANK: {n}, MEMBER: {n + 1}/4" for n in range(4)),
        *raised(POD.format(0)),
    ],
)
case(
    "44-file-rank-env",
    {
        f"pod-{n}.log": [
            f"RANK={(n + 1) % 4} WORLD_SIZE=4 LOCAL_RANK=0",
            "step 9 loss 1.0",
            *(raised() if n == 1 else []),
        ]
        for n in range(4)
    },
    [2],
)
control(
    "44-file-no-env",
    {f"pod-{n}.log": ["WORLD_SIZE=4 LOCAL_RANK=0", "step 9 loss 1.0", *(raised() if n == 1 else [])] for n in range(4)},
)
case(
    "45-job-index",
    {
        f"train-{n}-x{n}.log": [
            f"JOB_COMPLETION_INDEX={n}",
            f"RANK: {n}",
            "WORLD_SIZE: 4",
            "step 9",
            *(raised() if n == 3 else []),
        ]
        for n in range(4)
    },
    [3],
)
case(
    "46-pods-table",
    [
        *(POD.format(n) + f"RANK={n} WORLD_SIZE=4" for n in range(4)),
        "NAME             READY   STATUS      RESTARTS   AGE",
        *(
            f"llama-worker-{n}   {'0/1' if n == 3 else '1/1'}     {'OOMKilled' if n == 3 else 'Running  '}   0          41m"
            for n in range(4)
        ),
    ],
    [3],
)
control(
    "46-pods-table-no-rank",
    [
        *(POD.format(n) + "WORLD_SIZE=4" for n in range(4)),
        "NAME             READY   STATUS      RESTARTS   AGE",
        *(
            f"llama-worker-{n}   {'0/1' if n == 3 else '1/1'}     {'OOMKilled' if n == 3 else 'Running  '}   0          41m"
            for n in range(4)
        ),
    ],
)
case(
    "47-node-not-ready",
    [
        "world_size=8",
        *(f"gpu-z{r}: Initialized: global rank {r}, local rank 0, host gpu-z{r}" for r in range(8)),
        "3m  Warning  NodeNotReady  node/gpu-z5  Node gpu-z5 status is now: NodeNotReady",
        "[rank0]: " + CLOSED.format(15),
    ],
    [5],
)
case(
    "48-gloo-peer-ip",
    [
        "world_size=4",
        *(f"[rank{r}]: host=10.8.0.{11 + r} joined" for r in range(4)),
        *(line for r in (0, 1, 3) for line in (f"[rank{r}]: " + row for row in raised("", CLOSED.format(13)))),
    ],
    [2],
)
control(
    "48-gloo-peer-shared-ip",
    [
        "world_size=4",
        *(f"[rank{r}]: host=10.8.0.{11 + r // 2} joined" for r in range(4)),
        *(line for r in (0,) for line in (f"[rank{r}]: " + row for row in raised("", CLOSED.format(12)))),
    ],
)

# --- MPI, Slurm, Horovod ---
case(
    "50-mpi-name",
    [
        "mpirun detected that one or more processes exited with non-zero status, thus causing",
        "the job to be terminated. The first process to do so was:",
        "",
        "  Process name: [[29973,1],3]",
        "  Exit code:    1",
        *raised(),
    ],
    [3],
)
control(
    "50-mpi-no-name",
    [
        "mpirun detected that one or more processes exited with non-zero status, thus causing",
        "the job to be terminated.",
        *raised(),
    ],
)
case(
    "51-horovod-prefix",
    [*(f"[{r}]<stdout>:step 10" for r in range(4)), *raised("[2]<stderr>:"), "Process 2 exit with status code 1."],
    [2],
)
case(
    "52-mpi-signal",
    ["prterun noticed that process rank 6 with PID 4410 on node gpu-b2 exited on signal 11 (Segmentation fault)."],
    [6],
)
case(
    "53-prterun-tag",
    [
        *(f"[prterun-gpu-b2-8812@1,{r}]<stdout>: step 10" for r in range(4)),
        *raised("[prterun-gpu-b2-8812@1,3]<stderr>: "),
    ],
    [3],
)
case(
    "54-pals",
    [
        "x1002c0s2b0n0.hsn.cm: rank 17 died from signal 11 and dumped core",
        "x1002c0s2b0n1.hsn.cm: rank 21 died from signal 15",
    ],
    [17],
)
case(
    "55-srun-label",
    [*(f"{t}: step 10" for t in range(8)), *raised("5: "), "srun: error: gpu-b3: task 5: Exited with exit code 1"],
    [5],
)
control(
    "55-srun-one-launcher-a-node",
    [
        *(f"{t}: [default{n}]:step 10" for t in range(2) for n in range(4)),
        *raised("1: "),
        "srun: error: gpu-b3: task 1: Exited with exit code 1",
    ],
)
case(
    "56-hydra-code",
    [
        "===================================================================================",
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
        "=   RANK 5 PID 8812 RUNNING AT gpu-b4",
        "=   KILLED BY SIGNAL: 11 (Segmentation fault)",
    ],
    [5],
)
case("57-srun-tasks-node", ["srun: error: gpu-b3: tasks 24-31: Killed"], list(range(24, 32)))

# --- places in groups ---
case(
    "60-sglang-pp",
    [
        "server_args=ServerArgs(model_path='m', tp_size=4, pp_size=2, dp_size=1)",
        *raised(
            "[2026-02-11 04:10:00 PP1 TP2] ",
            "[2026-02-11 04:10:00 PP1 TP2] Scheduler hit an exception: torch.OutOfMemoryError: CUDA out of memory.",
        )[:1],
        '  File "/s/scheduler.py", line 3011, in run_scheduler_process',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
    [6],
)
case(
    "61-vllm-pp",
    [
        "non-default args: {'tensor_parallel_size': 4, 'pipeline_parallel_size': 2}",
        *raised(
            "(Worker_PP1_TP3 pid=71) ERROR 02-11 04:10:00 [multiproc_executor.py:871] ",
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
    ],
    [7],
)
control(
    "61-vllm-pp-no-sizes",
    [
        *raised(
            "(Worker_PP1_TP3 pid=71) ERROR 02-11 04:10:00 [multiproc_executor.py:871] ",
            "torch.OutOfMemoryError: CUDA out of memory.",
        )
    ],
)
control(
    "62-vllm-dp",
    [
        "--tensor-parallel-size 2 --data-parallel-size 4",
        *raised(
            "(Worker_DP3_TP1 pid=71) ERROR 02-11 04:10:00 [multiproc_executor.py:871] ",
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
    ],
)
MEGATRON = (
    "[after dist init] global rank {} | tensor-parallel rank {} | pipeline-parallel rank {} | data-parallel rank {}"
)
case(
    "63-place-listed",
    [
        *(f"(MegatronWorker_{r} pid={700 + r}) global rank {r}: dp 0 pp {r // 2} tp {r % 2}" for r in range(4)),
        *raised("(MegatronWorker_3 pid=703) "),
    ],
    [3],
)
control(
    "63-place-not-listed",
    [
        *(f"(MegatronWorker_{r} pid={700 + r}) started: dp 0 pp {r // 2} tp {r % 2}" for r in range(4)),
        *raised("(MegatronWorker_3 pid=703) "),
    ],
)
case(
    "64-name-rank-earlier",
    [
        "(train_fn pid=411) [rank1]: ready",
        "(train_fn pid=412) [rank0]: ready",
        "(train_fn pid=413) [rank2]: ready",
        *raised("(train_fn pid=413) "),
    ],
    [2],
)
control(
    "64-name-two-ranks",
    [
        "(train_fn pid=411) [rank1]: ready",
        "(train_fn pid=411) [rank0]: ready",
        "(train_fn pid=412) [rank2]: ready",
        *raised("(train_fn pid=411) "),
    ],
)
case(
    "65-jax-process",
    [
        *(
            f"{{}}I0211 03:02:1{n}.0 {100 + n} train.py:101] JAX process: {n} / 4".format(f"[pod/tpu-{n}/jax] ")
            for n in range(4)
        ),
        *raised("[pod/tpu-2/jax] "),
    ],
    [2],
)
case(
    "66-ep-listed",
    [
        *(f"[2026-02-11 03:02:11 DP{r} TP{r} EP{r}] Init torch distributed ends." for r in range(8)),
        *(
            f"[2026-02-11 04:02:11 DP{r} TP{r} EP{r}] DeepEP timeout for dispatch receive, rank {r}, local_expert_idx 2, src_rank 6"
            for r in range(8)
            if r != 6
        ),
    ],
    [6],
)

# --- who is absent can be counted ---
case("70-absent-list", ["world_size=8", "barrier timed out after 600 s: 7/8 ranks arrived: [0, 1, 2, 4, 5, 6, 7]"], [3])
control("70-absent-count-only", ["world_size=8", "barrier timed out after 600 s: 7/8 ranks arrived"])
case(
    "71-absent-store",
    [
        f"[rank{r}]: RuntimeError: Timed out initializing process group in store based barrier on rank: {r}, for key: store_based_barrier_key:1 (world_size=4, num_workers_joined=3, timeout=0:30:00)"
        for r in (0, 1, 3)
    ],
    [2],
)
control(
    "71-absent-store-two-seen",
    [
        f"[rank{r}]: RuntimeError: Timed out initializing process group in store based barrier on rank: {r}, for key: store_based_barrier_key:1 (world_size=4, num_workers_joined=3, timeout=0:30:00)"
        for r in (0, 1)
    ],
)
case(
    "72-jax-tasks",
    [
        "DEADLINE_EXCEEDED: Barrier timed out. Id: [Init]Wait_for_all_tasks_to_register::0. This usually happens because a task triggered the barrier too early or too slowly. # of tasks that reached the barrier: 6/8.",
        "The first task at the barrier: /job:jax_worker/replica:0/task:0. Some timed out task names:",
        "/job:jax_worker/replica:0/task:6",
        "/job:jax_worker/replica:0/task:2",
    ],
    [2, 6],
)
control(
    "72-jax-count-only",
    [
        "DEADLINE_EXCEEDED: Barrier timed out. Id: [Init]Wait_for_all_tasks_to_register::0. This usually happens because a task triggered the barrier too early or too slowly. # of tasks that reached the barrier: 6/8.",
        "The first task at the barrier: /job:jax_worker/replica:0/task:0.",
    ],
)
case(
    "73-dog-silent-pod",
    [
        "world_size=4",
        *(POD.format(n) + f"RANK={n} WORLD_SIZE=4" for n in range(4)),
        *(POD.format(n) + dog(n) for n in (0, 1, 3)),
        POD.format(2) + "Tokenizing split train: 41%",
    ],
    [2],
)
case(
    "74-members-listed",
    ["expected ranks: 0-7", "[rank0]: RuntimeError: timed out in gather of object list, missing ranks: [5]"],
    [5],
)

# --- two jobs, torchelastic's tables ---
control(
    "80-two-jobs", [*deepspeed("", {"localhost": 4}, 0, 7300), *deepspeed("", {"localhost": 2}, 0, 7301), oom(7302)]
)
CLOSING = "W0211 04:17:25.101000 4071 site-packages/torch/distributed/elastic/multiprocessing/api.py:900] Sending process {} closing signal SIGTERM"
case(
    "81-table-two-killed",
    [
        *(CLOSING.format(4100 + r) for r in (0, 1, 2, 3, 4, 6)),
        *summary((5, 5, -9, 4105, "gpu-b1"), [(7, 7, -9, 4107, "gpu-b1")]),
    ],
    [5, 7],
)
case(
    "82-table-first-code", summary((3, 3, 1, 4103, "gpu-b1"), [(r, r, -6, 4100 + r, "gpu-b1") for r in (0, 1, 2)]), [3]
)
case(
    "83-table-host-oom",
    [
        *summary((9, 1, -9, 4109, "gpu-b2"), [(r, r % 8, -6, 4100 + r, "gpu-b1") for r in (0, 1)]),
        "[812733.1] Memory cgroup out of memory: Killed process 4109 (python3) total-vm:1kB",
    ],
    [9],
)
control(
    "84-table-all-aborted",
    [
        *(dog(r) for r in range(4)),
        *summary((0, 0, -6, 4100, "gpu-b1"), [(r, r, -6, 4100 + r, "gpu-b1") for r in (1, 2, 3)]),
    ],
)
