"""Logs of known faults, as lines, with the truth about each: what our own cases, and the tests of the reader, are
made of.

Written from what torch, NCCL, gloo, torchelastic, DeepSpeed, Slurm, Ray, Kubernetes and the kernel print; no text of
anybody's
report. `culprits` is a list of ranks, empty where nobody can be named from these lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """Lines of one merged log, and the truth; `values` holds op, seq, numel_in, timeout_ms, where the lines tell."""

    name: str
    lines: Sequence[str]
    culprits: Sequence[int] = ()
    classes: Sequence[str] = ()
    incident: bool = True
    values: dict[str, Any] = field(default_factory=dict)
    decisions: Sequence[str] = ()
    suspects: Sequence[int] = ()


def head(rank: int, line: int = 632, version: str = "2.8") -> str:
    if version == "1.13":
        return f"[E ProcessGroupNCCL.cpp:{line}] "
    if version == "2.3":
        return f"[rank{rank}]:[E ProcessGroupNCCL.cpp:{line}] "
    return f"[rank{rank}]:[E801 14:37:4{rank % 10}.731552721 ProcessGroupNCCL.cpp:{line}] "


def pg(rank: int, guid: str = "0", desc: str = "default_pg") -> str:
    return f"[PG ID 0 PG GUID {guid}({desc}) Rank {rank}] "


def timeout(
    rank: int,
    seq: int = 4182,
    op: str = "ALLREDUCE",
    numel: tuple[int, int] = (5164000, 5164000),
    limit: int = 600000,
    version: str = "2.8",
    guid: str = "0",
    desc: str = "default_pg",
    inner: int | None = None,
    work: str = "WorkNCCL",
) -> list[str]:
    inner = rank if inner is None else inner
    sizes = f"NumelIn={numel[0]}, NumelOut={numel[1]}, " if version != "1.13" else ""
    shown = f"SeqNum={seq}, " if version != "1.13" else ""
    text = (
        f"[Rank {inner}] {'Caught' if version == '1.13' else 'Watchdog caught'} collective operation timeout: {work}({shown}OpType={op}, {sizes}"
        f"Timeout(ms)={limit}) ran for {limit + 21 + rank} milliseconds before timing out."
    )
    tag = pg(inner, guid, desc) if version == "2.8" else ""
    return [
        f"{head(rank, 632, version)}{tag}{text}",
        (
            f"{head(rank, 683, version)}{tag}Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU "
            "operations might run on corrupted/incomplete data."
        ),
        f"{head(rank, 1895, version)}{tag}Process group watchdog thread terminated with exception: {text}",
    ]


def many(ranks: Sequence[int], **options: Any) -> list[str]:
    return [line for rank in ranks for line in timeout(rank, **options)]


ELASTIC = [
    "W0813 06:19:49.801000 161210 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 161311 closing signal SIGTERM",
    "W0813 06:19:49.802000 161210 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 161312 closing signal SIGTERM",
]


def death(rank: int, code: int, style: int = 0) -> list[str]:
    tail = f"(exitcode: {code}) local_rank: {rank} (pid: {161300 + rank}) of binary: /opt/conda/bin/python3.11"
    first = (
        f"E0813 06:19:49.809000 161210 site-packages/torch/distributed/elastic/multiprocessing/api.py:869] failed {tail}",
        f"ERROR:torch.distributed.elastic.multiprocessing.api:failed {tail}",
        f"[2024-03-07 10:00:01,544] torch.distributed.elastic.multiprocessing.api: [ERROR] failed {tail}",
        f"failed (exitcode: {code}) for binary located at /opt/conda/bin/python with local_rank: {rank} (process ID: 71)",
    )[style]
    return [*ELASTIC, first]


def store_barrier(ranks: Sequence[int], world: int, count: int, verb: str = "Waiting in") -> list[str]:
    middle = "to initialize process group for rank" if verb == "Waiting in" else "on rank"
    lead = (
        "INFO:torch.distributed.distributed_c10d:Waiting in"
        if verb == "Waiting in"
        else "RuntimeError: Timed out initializing process group in"
    )
    return [
        f"{lead} store based barrier {middle}: {rank}, key: store_based_barrier_key:1 (world_size={world}, worker_count={count}, timeout=0:30:00)"
        for rank in ranks
    ]


def print_(rank: int, own: str, other: int, theirs: str) -> str:
    return (
        f"[rank{rank}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} is running collective: {own}, but Rank {other} is "
        f"running collective: {theirs}.Collectives differ in the following aspects: \t Tensor Tensor shapes: 4vs 5"
    )


def finger(op: str, shape: str, seq: int = 12) -> str:
    return (
        f"CollectiveFingerPrint(SequenceNumber={seq}, OpType={op}, TensorShape=[{shape}], TensorDtypes=Float, "
        "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, layout=Strided (default), requires_grad=false (default), "
        "pinned_memory=false (default), memory_format=(nullopt)))"
    )


def traceback(rank: int | None, kind: str, text: str) -> list[str]:
    tag = f"[rank{rank}]: " if rank is not None else ""
    return [
        f"{tag}Traceback (most recent call last):",
        f'{tag}  File "/workspace/train.py", line 211, in <module>',
        f"{tag}    main()",
        f'{tag}  File "/workspace/train.py", line 87, in main',
        f"{tag}    loss = step(batch)",
        f"{tag}{kind}: {text}",
    ]


def status(rank: int, at: int, last: int, done: int) -> str:
    return f"{head(rank, 2241)}{pg(rank)} failure detected by watchdog at work sequence id: {at} PG status: last enqueued work: {last}, last completed work: {done}"


def ofi(rank: int) -> str:
    return f"node0:{100 + rank}:{200 + rank} [{rank}] ofi_process_cq:1205 NCCL WARN NET/OFI Request 0x7f2c completed with error. RC: 113. Error: 6 (UNDELIVERABLE). Completed length: 0"


def ib(rank: int) -> str:
    return f"node{rank // 8}:{100 + rank}:{200 + rank} [{rank % 8}] transport/net_ib.cc:1278 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4791> with error 12, opcode 0, len 0, vendor err 129 (Recv)"


def nccl2(rank: int, ms: int = 5996) -> list[str]:
    tag = f"[TC][rank={rank}][name=0]"
    return [
        f"[rank{rank}]:[E1122 11:36:09.317629544 WorkNCCL.cpp:372] {tag} Operation timed out after {ms} ms",
        f"[rank{rank}]:[E1122 11:36:09.318473477 FlightRecorderHook.cpp:600] FlightRecorderHook: dumping trace on collective failure",
        f"[rank{rank}]:[E1122 11:36:11.097133551 ProcessGroupNCCL.cpp:638] {tag} Aborting process on rank {rank} due to timeout - timeout watchdog detected operation timeout",
        f"[rank{rank}]:[E1122 11:36:11.097182918 ProcessGroupNCCL.cpp:643] {tag} Waiting 15000ms for health check and flight recorder dump before aborting",
    ]


RAS_HEAD = [
    "NCCL version 2.27.5 compiled with CUDA 12.9", "CUDA runtime version 12090, driver version 12090", "", "Job summary", "===========", "",
    "  Nodes  Processes         GPUs  Processes     GPUs", "(total)   per node  per process    (total)  (total)",
    "      1          8            1          8        8", "", "Communicators... (0.00s)", "=============", "",
    "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors", "    #  in group  per comm  per node  per comm  in group",
    "    0         1         1         8         8         8   RUNNING  MISMATCH", "",
]  # fmt: skip
CRASH = ("oom_or_crash_other_rank",)
DIVERGED = ("rank_divergence", "mismatch_shape_or_op", "unused_params")
V = {"op": "ALLREDUCE", "seq": 4182, "numel_in": 5164000, "timeout_ms": 600000}


def cases() -> list[Case]:
    """Return all of them; the names begin with the rule of formats they follow."""
    found = [
        # 1 torchelastic's death line
        *(Case(f"01-death-style{style}-{code}", death(3, code, style), (3,), CRASH) for style in range(4) for code in (-9, -11)),
        *(Case(f"01-first-exit-style{style}", death(2, 1, style), (), (), suspects=(2,)) for style in range(4)),
        Case("01-exit-with-traceback", [*traceback(None, "KeyError", "'labels'"), *death(2, 1)], (2,), CRASH, decisions=("fix-code",)),
        # 2 deaths as others tell them
        Case("02-spawn", ["torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL"], (0,), CRASH),
        Case("02-mpirun", ["mpirun noticed that process rank 1 with PID 4711 on node gpu1 exited on signal 9 (Killed)."], (1,), CRASH),
        Case("02-vllm", ["ERROR 05-01 10:00:00 [multiproc_executor.py:140] Worker proc VllmWorker-1 died unexpectedly, shutting down executor."], (1,), CRASH),
        Case("02-elastic-event", [('{"name": "torchelastic.worker.status.FAILED", "source": "WORKER", "timestamp": 0, "metadata": {"run_id": "x", "global_rank": 1, "group_rank": 0, '
             '"worker_id": "4711", "role": "default", "hostname": "a", "state": "FAILED", "raw_error": "{\\"message\\": \\"Signal 9 (SIGKILL) received by PID 4711\\"}"}}')], (1,), CRASH),
        Case("02-deepspeed", ["[2024-05-01 10:00:00,123] [INFO] [launch.py:316:sigkill_handler] Killing subprocess 4100",
             "[2024-05-01 10:00:00,124] [INFO] [launch.py:316:sigkill_handler] Killing subprocess 4101",
             "[2024-05-01 10:00:00,130] [ERROR] [launch.py:322:sigkill_handler] ['/usr/bin/python', '-u', 'train.py', '--local_rank=6'] exits with return code = -9"], (), CRASH),
        Case("02-lightning", ["[rank: 3] Child process with PID 4711 terminated with code -9. Forcefully terminating all other processes to avoid zombies"], (3,), CRASH),
        Case("02-srun-oom", ["slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed.", "srun: error: node1: task 5: Out Of Memory",
             "srun: Terminating StepId=123.0"], (5,), CRASH, decisions=("fix-environment",)),
        # 3 the store-based barrier
        Case("03-waiting", store_barrier((0, 1, 2, 3, 4, 6, 7), 8, 7), (5,), ("store_rendezvous",), values={"timeout_ms": 1800000}),
        Case("03-timed-out", store_barrier((0, 1, 3), 4, 3, "Timed out"), (2,), ("store_rendezvous",), values={"timeout_ms": 1800000}),
        Case("03-few-lines", store_barrier((0, 1), 8, 7), (), ("store_rendezvous",), values={"timeout_ms": 1800000}),
        Case("03-stale", store_barrier((0, 1, 2, 3), 4, 8), (), ("store_rendezvous",), values={"timeout_ms": 1800000}),
        # 4 the watchdog in all its versions
        *(Case(f"04-silent-{version}", many((0, 1, 2, 3, 4, 5, 7), version=version), (6,), (), values={k: v for k, v in V.items() if version != "1.13" or k in ("op", "timeout_ms")})
          for version in ("2.8", "2.3", "1.13")),
        Case("04-hccl", many((0, 1, 3), work="WorkHCCL"), (2,), (), values=V),
        Case("04-fingerprint-two-lines", ["[rank0]: RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective:", finger("ALLREDUCE", "25") + ", but Rank 1 is running collective:",
             finger("BROADCAST", "1") + ".", print_(1, finger("BROADCAST", "1"), 0, finger("ALLREDUCE", "25")), "world_size: 2"], (0, 1), DIVERGED, decisions=("fix-code",)),
        # 5 named without proof
        Case("05-one-against-one", [print_(26, finger("ALLREDUCE", "25"), 1, finger("ALLREDUCE", "26")), "world_size=32"], (), DIVERGED, decisions=("fix-code",)),
        Case("05-joined-seq-1", ["node0:103:203 [3] NCCL INFO Channel 00/0 : 3[3] -> 0[0] via P2P/IPC", *many((0, 1, 2), seq=1), "world_size: 4"], (), ()),
        Case("05-two-sides", many((0, 1)) + many((2, 3), numel=(7, 7)) + ["WORLD_SIZE=4"], (), DIVERGED, decisions=("fix-code",)),
        Case("05-retried", [*traceback(2, "ValueError", "bad sample 17"), "[rank2]: retrying the batch", *[f"[rank2]: step {n} loss 0.5" for n in range(40)]], (), (), incident=False),
        Case("05-ahead-by-one", many((0, 1, 2)) + many((3,), seq=4183), (), (), values=V),
        # 6 the union of what is said
        Case("06-union", ["[rank1]:[E ProcessGroupNCCL.cpp:523] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4182, OpType=ALLR", *many((0, 3))], (2,), (), values=V),
        Case("06-size-two", many((0,)) + many((1,), numel=(5164004, 5164004)) + ["world_size = 2"], (0, 1), (*DIVERGED,), decisions=("fix-code",)),
        Case("06-size-odd", many((0, 1, 3)) + many((2,), numel=(5164004, 5164004)), (2,), DIVERGED, values=V, decisions=("fix-code",)),
        # 7 one alone
        Case("07-alone", many((0,), op="ALLGATHER", numel=(1, 4)) + [f"[rank{r}]: Training completed" for r in (1, 2, 3)], (0,), ("rank_divergence",),
             values={"op": "ALLGATHER", "numel_in": 1}, decisions=("fix-code",)),
        Case("07-cross-wait", many((0,), op="ALLGATHER", numel=(1, 4)) + many((1, 2, 3), guid="7", desc="data_parallel", seq=90), (0,), ("rank_divergence",), decisions=("fix-code",)),
        # 8 the fabric
        Case("08-ofi", [ofi(3), *many((0, 1, 2, 3))], (), ("network_fabric",), values=V),
        Case("08-ib", [ib(3)], (), ("network_fabric",)),
        Case("08-gloo-mesh", ["RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"], (), ("network_interface",)),
        Case("08-socket", ["[W socket.cpp:601] [c10d] The client socket has failed to connect to any network address of (node0, 29500).",
             "TimeoutError: The client socket has timed out after 900s while trying to connect to (node0, 29500)."], (), ("store_rendezvous", "network_interface"), values={"timeout_ms": 900000}),
        Case("08-socket-ms", ["torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 29500)."], (), ("store_rendezvous", "network_interface"), values={"timeout_ms": 600000}),
        Case("08-ecc", ["[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered", *many((0, 1, 2))], (3,), ("gpu_hardware",), decisions=("restart-without",)),
        Case("08-xid", ["[ 5321.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=161303, name=python, GPU has fallen off the bus.", *death(3, -6), *many((0, 1, 2))], (3,), ("gpu_hardware",), decisions=("restart-without",)),
        # 9 NCCL without a watchdog
        Case("09-closed", [f"node0:{100 + r}:{200 + r} [{r}] NCCL INFO [Service thread] Connection closed by localRank 7" for r in range(7)], (7,), CRASH),
        Case("09-abort", [f"node0:{100 + r}:{200 + r} [{r}] NCCL INFO comm 0x55 rank {r} nranks 8 cudaDev {r} busId 7000 - Abort COMPLETE" for r in range(7)]
             + [f"node0:{100 + r}:{200 + r} [{r}] NCCL INFO [Service thread] Connection closed by localRank {(r + 1) % 8}" for r in range(7)], (), ()),
        # 10 Ascend
        Case("10-notify", [("EI0002: 2024-05-01-10:00:00.123 The wait execution of the Notify register times out. Reason: The Notify register has not received the Notify record from remote rank:[24]. "
             "base information: [streamID:[3], taskID[4], taskType[Notify Wait], tag[AllReduce_group_name_0]] communicator information: [group:[g], rankSize[32], rankId[5]]")], (), (), suspects=(24,)),
        Case("10-task", ["[ERROR] RUNTIME(4711,python):2024-05-01-10:00:00.123 [stream.cc:12] hccl fftsplus task timeout, device_id:0, stream_id:2, timeout:1836."], (), (), values={"timeout_ms": 1836000}),
        # 11 monitored_barrier
        *(Case(f"11-barrier-{n}", [line], (1,), (), values={"timeout_ms": 30000}) for n, line in enumerate((
            "[rank0]: RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 30000 ms",
            "RuntimeError: Rank 1 failed to pass monitoredBarrier in 30000 ms",
            "[E ProcessGroupGloo.cpp:144] [Rank 0]: Rank 1 failed to pass monitoredBarrier in 30000 ms",
            "RuntimeError: [../torch/csrc/distributed/c10d/ProcessGroupGloo.cpp:2802] [Rank 0]: Rank 1 failed to pass monitoredBarrier in 30000 ms",
        ))),
        Case("11-barrier-two", ["[rank0]: RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 2000 ms"], (1, 2), (), values={"timeout_ms": 2000}),
        Case("11-barrier-asked", ["[rank0]: RuntimeError: Rank 0 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 2. Please check rank 2 logs for faulty rank.",
             "[rank0]: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation to complete"], (2,), ()),
        # 12 torch 2.15, and NCCL's RAS
        Case("12-nccl2-silent", [line for r in (0, 1, 3) for line in nccl2(r)], (2,), (), values={"timeout_ms": 6000}),
        Case("12-nccl2-killed", ["[rank0]:[E1122 11:36:09.31 ProcessGroupNCCLUtils.cpp:333] [TC][rank=0][name=0] nccl hit async error on rank 0: remote process exited or there was a network error",
             "[rank0]:[E1122 11:36:09.31 ProcessGroupNCCL.cpp:638] [TC][rank=0][name=0] Aborting process on rank 0 due to error - nccl hit async error: remote process exited or there was a network error",
             *death(1, -9)], (1,), CRASH),
        Case("12-ras-mismatch", [*RAS_HEAD, "Warnings", "========", "", "#0-0 (27a079b828ff1a75) MISMATCH", "  Communicator ranks have different collective operation counts",
             "  7 ranks have launched up to operation 6650", "  1 rank has launched up to operation 6649", "  Rank 5 -- GPU 5 managed by process 483077 on node 172.16.64.210"], (5,), ()),
        Case("12-ras-dead", [*RAS_HEAD, "Errors", "======", "", "DEAD", "  1 job process is considered dead (unreachable via the RAS network)", "  Process 3487984 on node 172.16.64.213 managing GPU 5", "",
             "#0-0 (e6ed2a3f6cd5c0b2) INCOMPLETE", "  Missing communicator data from 1 rank", "  The missing rank: 21"], (21,), ()),
        # 13 other text around
        Case("13-desync-lost", ["[rank0]:[E ProcessGroupNCCL.cpp:523] [Rank 0] failed to retrieve NCCL_DESYNC_DEBUG report. Please file an issue. Error: Socket Timeout", *many((0, 1, 2))
             , "world size: 4"], (3,), (), values=V),
        Case("13-chinese", ["训练开始, 请稍候", "错误: 超时", *many((0, 1, 2)), "rank 3 没有响应", "world_size=4"], (3,), (), values=V),
        # the desync report, counters, dump signals, exceptions, out of memory
        Case("20-desync", ["\t - [0] Timeout at collective: ALLREDUCE, #315", "\t   - [7] finished collective #182, but didn't join collective #183 (count from 1)", *many((0, 1))], (7,), ()),
        Case("20-counters", [*many((0, 1, 2, 3, 5, 6, 7)), (f"{head(4)}{pg(4)}Received a dump signal due to a collective timeout from  rank 1 and we will try our best to dump the debug info. "
             "Last enqueued NCCL work: 4181, last completed NCCL work: 4181.This is most likely caused by incorrect usages of collectives")], (4,), (), values=V),
        Case("20-status", [*many((0, 1, 2)), status(0, 4182, 4190, 4181), status(3, 4100, 4100, 4099)], (3,), (), values=V),
        Case("20-oom", [*traceback(2, "torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of 79.15 GiB"), *many((0, 1, 3))], (2,), CRASH, values=V, decisions=("fix-code",)),
        Case("20-assert", [*traceback(1, "AssertionError", "loss is nan"), *death(1, 1)], (1,), CRASH, decisions=("fix-code",)),
        Case("20-dmesg-oom", ["[ 9912.1] Out of memory: Killed process 161302 (python) total-vm:99kB, anon-rss:9kB", *death(2, -9)], (2,), CRASH, decisions=("fix-environment",)),
        Case("20-ray", ["ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "\tclass_name: RayTrainWorker"], (), CRASH),
        Case("20-k8s-evicted", ["12m   Warning   Evicted   pod/train-worker-2   The node was low on resource: memory. Threshold quantity: 100Mi"], (), CRASH, decisions=("fix-environment",)),
        Case("20-slurm-node", ["srun: error: Node failure on gpu-07"], (), CRASH, decisions=("restart-without",)),
        Case("20-nic", ["[ 881.2] mlx5_core 0000:3b:00.0: mlx5_health_try_recover: device's health compromised - reset requested", *many((0, 1, 2, 3))], (), ("network_fabric",), values=V),
        Case("20-unused", ["[rank1]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
             "[rank1]: Parameter indices which did not receive grad for rank 1: 2 3", *many((0, 2, 3))], (1,), ("unused_params",), values=V, decisions=("fix-code",)),
        Case("20-two-faults", [*traceback(2, "ValueError", "bad sample"), *death(5, -9), *many((0, 1, 3, 4, 6, 7))], (2, 5), CRASH, values=V),
        Case("20-shm", ["node0:1:2 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-aBcD to 9637892 bytes: No space left on device"], (), ("shared_memory",), decisions=("fix-environment",)),
        # calm
        Case("30-calm", [f"step {n} loss {1 / (n + 1):.4f} lr 1e-4" for n in range(50)], (), (), incident=False),
        Case("30-calm-words", ["error rate: 0.01", "INFO timeout set to 1800 s", "NCCL INFO Connected all rings", "val/error 0.3", "connection pool ready", *[f"[rank{r}]: epoch 1 done" for r in range(4)]], (), (), incident=False),
        Case("30-calm-barrier", [*store_barrier((0, 1, 2), 4, 3), "INFO:torch.distributed.distributed_c10d:Rank 0: Completed store-based barrier for key:store_based_barrier_key:1 with 4 nodes.", "step 1"], (), (), incident=False),
        Case("30-calm-abort", [line for r in range(8) for line in (
             f"node0:{100 + r}:{200 + r} [{r}] NCCL INFO [Service thread] Connection closed by localRank {r}",
             f"node0:{100 + r}:{200 + r} [{r}] NCCL INFO comm 0x55 rank {r} nranks 8 cudaDev {r} busId 7000 - Abort COMPLETE")], (), (), incident=False),
        Case("30-calm-abort-peers", [f"node0:{100 + r}:{200 + r} [{r}] NCCL INFO comm 0x55 rank {r} nranks 8 cudaDev {r} busId 7000 - Abort COMPLETE" for r in range(8)]
             + [f"node0:{100 + r}:{200 + r} [{r}] NCCL INFO [Service thread] Connection closed by localRank {(r + 1) % 8}" for r in range(8)], (), (), incident=False),
        Case("31-duplicate-gpu", ["[rank1]: Last error:", "[rank1]: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4b000"], (0, 1), CRASH, decisions=("fix-code",)),
    ]  # fmt: skip
    return found
