"""What a log announces or lists of all ranks tells who is meant later; what only reports, quotes or has passed does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from explain_logs import timeout

from ncclguard_explain import Report

Explain = Callable[..., Report]


# --- processes and hosts that a launcher lists ---

DIED = "[rank: 0] Child process with PID 5103 terminated with code -11. Forcefully terminating all other processes"


@pytest.mark.parametrize(
    "row",
    [
        "[{n}] launched pid={pid}",
        "worker {n} started as PID {pid}",
        "child {n} -> pid {pid}",
        "10:00:01 INFO process {n}: pid={pid}",
    ],
)
@pytest.mark.parametrize("numbers, named", [((0, 1, 2, 3), (3,)), ((0, 1, 3), ()), ((4, 5, 6, 7), ())])
def test_a_process_of_a_launchers_list_is_the_rank_of_its_number(
    explain_lines: Explain, row: str, numbers: tuple[int, ...], named: tuple[int, ...]
) -> None:
    lines = [row.format(n=number, pid=5100 + at) for at, number in enumerate(numbers)]
    assert explain_lines(["world_size=4", *lines, DIED]).culprits == named


def test_who_reports_the_end_of_a_child_is_not_the_child(explain_lines: Explain) -> None:
    assert explain_lines([DIED]).culprits == ()
    assert explain_lines([DIED.replace("rank: 0", "rank: 2")]).culprits == (2,)  # a place among the children
    assert explain_lines(["0: step 1 loss 2", "0: " + DIED.replace("rank: 0", "rank: 2")]).culprits == (2,)
    assert explain_lines(["pasted from both nodes", DIED.replace("rank: 0", "rank: 2")]).culprits == ()


GONE = [
    "error: Nodes n07 not responding, setting DOWN",
    "slurmstepd: error: *** STEP 7.0 ON n06 CANCELLED AT 2025-03-01T10:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***",
]


@pytest.mark.parametrize(
    "row",
    ["{rank}: {host}", "[1,{rank}]<stdout>:{host}", "rank {rank} on {host}", "{host} SLURM_PROCID={rank} SLURM_LOCALID=0",
     "SLURM_PROCID={rank} SLURM_NTASKS=6 SLURMD_NODENAME={host}", "{host}: RANK={rank} LOCAL_RANK=0 MASTER_ADDR=n06"],
)  # fmt: skip
def test_the_ranks_on_a_lost_host_are_those_of_a_list(explain_lines: Explain, row: str) -> None:
    lines = [row.format(rank=rank, host=f"n0{6 + rank // 2}") for rank in (3, 0, 5, 1, 4, 2)]
    assert explain_lines([*lines, *GONE]).culprits == (2, 3)


@pytest.mark.parametrize(
    "row", ["{}: ranks {}-{}", "{} -> ranks {}..{}", "host {} ranks {}-{}", "node {} holds global ranks {}-{}"]
)
def test_the_ranks_on_a_lost_host_are_those_of_a_range(explain_lines: Explain, row: str) -> None:
    lines = [row.format(host, first, first + 3) for host, first in (("n06", 0), ("n07", 4), ("n08", 8))]
    assert explain_lines([*lines, *GONE]).culprits == (4, 5, 6, 7)


def test_deepspeeds_mapping_tells_the_ranks_of_the_hosts_that_it_names(explain_lines: Explain) -> None:
    head = "h-{}: [2025-01-02 10:00:00,1] [INFO] [launch.py:{}:main] "
    lines = [head.format(1, 151) + "global_rank_mapping=defaultdict(<class 'list'>, {'h-0': [0, 1], 'h-1': [2, 3]})"]
    lines += [
        head.format(1, 253) + f"process {4400 + n} spawned with command: ['python', 't.py', '--local_rank={n}']"
        for n in (0, 1)
    ]
    killed = "[ 812.2] Out of memory: Killed process 4401 (python) total-vm:41kB, anon-rss:40kB"
    assert explain_lines({"all.log": lines, "h-1.dmesg": [killed]}).culprits == (3,)


def test_lines_of_one_width_with_other_figures_are_lines_of_their_own(explain_lines: Explain) -> None:
    rows = [f"(Controller pid=9) - (ip=10.1.2.{30 if rank < 8 else 9}, pid={7000 + rank}) world_rank={rank}, local_rank={rank % 8}"
            for rank in range(16)]  # fmt: skip
    dead = "The node with node id: c930 and address: 10.1.2.9 and node name: 10.1.2.9 has been marked dead because the detector has missed"
    assert explain_lines([*rows, dead]).culprits == tuple(range(8, 16))


def test_a_pod_that_never_started_is_the_client_that_misses(explain_lines: Explain) -> None:
    pod = ["Name:   enc-a1", "    State:          Waiting", "      Reason:       {}", "    Environment:", "      WORLD_SIZE:  8",
           "      RANK:        5"]  # fmt: skip
    late = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. {}/8 clients joined."

    def told(reason: str, came: int) -> tuple[int, ...]:
        files = {"pod.txt": [row.format(reason) for row in pod], "master.log": [late.format(came)]}
        return explain_lines(files).culprits

    assert told("ImagePullBackOff", 7) == (5,)
    assert told("CreateContainerConfigError", 7) == (5,)
    assert told("ErrImagePull", 6) == ()  # two are missing
    assert told("Completed", 7) == ()


# --- tables that one rank prints of all ---

REFUSED = ["Traceback (most recent call last):", '  File "/job/t.py", line 9, in check', "    raise ValueError(text)"]
TABLES = [
    ["weights sha256 of all ranks:", "  rank 0: 9fe1a2b3  rank 1: 9fe1a2b3", "  rank 2: 11d0c4aa  rank 3: 9fe1a2b3"],
    ["digest per rank: {0: '9fe1a2b3', 1: '9fe1a2b3', 2: '11d0c4aa', 3: '9fe1a2b3'}"],
    ["checksums: 9fe1a2b3 on ranks 0-1,3; 11d0c4aa on ranks 2"],
    ["hash [0]=0x9fe1a2 [1]=0x9fe1a2 [2]=0x11d0c4 [3]=0x9fe1a2"],
]


@pytest.mark.parametrize("table", TABLES)
def test_a_table_of_checksums_names_who_differs_and_its_last_state_counts(
    explain_lines: Explain, table: list[str]
) -> None:
    def raised(*before: str, text: str = "ValueError: weights differ between ranks") -> Report:
        return explain_lines([*before, *(f"[rank{rank}]: {row}" for rank in range(4) for row in [*REFUSED, text])])

    agrees = [row.replace("11d0c4aa", "9fe1a2b3").replace("11d0c4", "9fe1a2") for row in table]
    assert raised(*table).culprits == (2,)
    assert raised(*agrees, "step 1", *table).culprits == (2,)
    assert raised(*table, "step 1", *agrees).culprits != (2,)
    assert raised(*table, text="ValueError: bad sample 9").culprits != (2,)


def test_a_table_of_a_part_of_the_job_names_nobody_of_it(explain_lines: Explain) -> None:
    lines = [
        *TABLES[0],
        *(f"[rank{rank}]: {row}" for rank in range(4) for row in [*REFUSED, "ValueError: weights differ"]),
    ]
    assert explain_lines(lines, world_size=16).culprits != (2,)


def test_the_shapes_that_each_rank_prints_of_all_name_the_odd_one(explain_lines: Explain) -> None:
    shapes = [f"  - Process {n}: [4, {77 if n == 1 else 80}]" for n in range(4)]
    text = [
        "lib.OperationException: Cannot apply due to shape mismatches.",
        "Operation: `gather`",
        "Input shapes:",
        *shapes,
    ]
    lines = [f"[rank{rank}]: {row}" for rank in range(4) for row in [*REFUSED[:2], *text]]
    report = explain_lines(lines)
    assert report.culprits == (1,) and report.decision == "fix-code"


def test_of_processes_that_all_raise_the_same_the_launchers_first_is_any_one(explain_lines: Explain) -> None:
    raised = [row for n in (5, 1, 3) for row in [*REFUSED, f"RuntimeError: [{n}] replicas differ"]]
    failures = [
        row
        for n in (1, 2)
        for row in (f"[{n}]:", f"  rank      : {n} (local_rank: {n})", f"  exitcode  : 1 (pid: {70 + n})")
    ]
    first = [
        "Root Cause (first observed failure):",
        "[0]:",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : 1 (pid: 70)",
    ]
    assert explain_lines([*raised, *failures, *first]).culprits == ()
    assert explain_lines([*REFUSED, "RuntimeError: replicas of a tensor", *first]).culprits == (0,)


@pytest.mark.parametrize("counts, named", [((0, 90, 90), ()), ((88, 90, 90), (0,)), ((0, 88, 90), ())])
def test_no_parameters_is_a_place_that_nobody_filled(
    explain_lines: Explain, counts: tuple[int, ...], named: tuple[int, ...]
) -> None:
    text = "[rank{}]: RuntimeError: DDP expects same model across all ranks, but Rank {} has {} params, while rank 0 has inconsistent {} params."
    assert explain_lines([text.format(r, r, counts[r], counts[0]) for r in (1, 2)], world_size=3).culprits == named


# --- who only carries out, reports, or counts in a copy of the engine ---

ABORT = ["MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD", "with errorcode 1."]


def test_who_calls_abort_after_another_rank_has_announced_the_end_is_not_named(explain_lines: Explain) -> None:
    lines = [*REFUSED, "ValueError: no block"]
    assert explain_lines([*lines, *ABORT]).culprits == (0,)
    assert (
        explain_lines([*lines, "[TRT-LLM] [RANK 5] [E] hard-killing and propagating to peer ranks.", *ABORT]).culprits
        == ()
    )
    own = "[TRT-LLM] [E] [executor][RANK 5] Error in event loop: Assertion failed: block not found"
    assert explain_lines([own, *ABORT]).culprits == (5,)


@pytest.mark.parametrize(
    "said", ["$ kubectl logs -n ml -l app=rm --prefix", "replicas: 4", "(there are three identical replicas)", ""]
)
def test_a_place_in_one_of_several_copies_of_an_engine_is_no_rank(explain_lines: Explain, said: str) -> None:
    line = "(Worker_TP1 pid=88) ERROR 10-02 17:45:31 [e.py:7] "
    report = explain_lines([said, *(line + row for row in [*REFUSED, "ValueError: bad video"])])
    assert report.culprits == (() if said else (1,)) and ("Worker_TP1" in report.places) is bool(said)


def test_memory_that_cpp_cannot_get_is_an_own_fault_and_what_torch_throws_is_not(explain_lines: Explain) -> None:
    for name, named in (
        ("std::bad_alloc", (2,)),
        ("std::out_of_range", (2,)),
        ("std::runtime_error", ()),
        ("c10::Error", ()),
    ):
        lines = [f"terminate called after throwing an instance of '{name}'", f"  what():  {name}"]
        assert explain_lines([f"[rank2]:{line}" for line in lines], world_size=4).culprits == named, name


def test_the_accelerator_that_its_driver_resets_is_the_one_of_the_rank_on_its_bus(explain_lines: Explain) -> None:
    buses = [f"rank {rank} hpu:{rank} bus 0000:{bus}:00.0" for rank, bus in enumerate(("19", "b3", "4d"))]
    kernel = (
        "[ 91.2] habanalabs hl1 0000:b3:00.0 accel4: H/W error interrupt HBM_0_DERR, device is going to be hard-reset"
    )
    others = "RuntimeError: [Rank:{}] FATAL ERROR :: MODULE:PT_BRIDGE Exception in Launch thread..."
    assert explain_lines([*map(others.format, (0, 2))]).culprits == ()
    report = explain_lines({"train.log": [*buses, *map(others.format, (0, 2))], "dmesg.txt": [kernel]})
    assert report.culprits == (1,) and report.decision == "restart-without"


# --- what has passed, or is quoted ---

STALLS = [
    "[1,0]<stderr>:W horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be reduced by subset of ranks.",
    "[1,0]<stderr>:Missing ranks:",
    "[1,0]<stderr>:{}: [HorovodAllreduce_g_0, HorovodAllreduce_g_1]",
]
STALLED = [row.format(2) for row in STALLS]


@pytest.mark.parametrize(
    "row",
    ["{} mAP=0.4{}", "upd {} | wer 3.{}", "[{}] lr 5e-4 gnorm {}", "Schritt {} Verlust 1,{}", "samples seen: {}000"],
)
def test_a_stall_after_which_a_log_counts_on_is_no_incident(explain_lines: Explain, row: str) -> None:
    steps = [row.format(300 + 10 * n, 7 - n) for n in range(5)]
    assert not explain_lines([*steps[:2], *STALLED, *steps[2:]]).incident
    assert explain_lines([*steps, *STALLED]).culprits == (2,)


@pytest.mark.parametrize("row", ["still waiting, {} s", "10:0{}:00 rank 0 alive", "[{}] retry", "elapsed {}"])
def test_a_log_that_counts_a_wait_does_not_go_on(explain_lines: Explain, row: str) -> None:
    assert explain_lines([*STALLED, *(row.format(n) for n in range(1, 6))]).culprits == (2,)


def test_of_stalls_of_different_ranks_the_last_report_counts(explain_lines: Explain) -> None:
    other = [row.format(5) for row in STALLS]
    end = "[1,0]<stderr>:horovod.common.exceptions.HorovodInternalError: Horovod has been shut down."
    assert explain_lines([*other, "step 1", *STALLED, *STALLED, end], world_size=8).culprits == (2,)
    marked = [*STALLS[:2], STALLS[2].format("!2"), STALLS[2].format("5")]
    assert explain_lines([*other, *marked, end], world_size=8).culprits == (2,)
    inline = [STALLS[0].replace("reduced", "reduced.") + f" Stalled ops: g_{n} [missing ranks: {n}]" for n in (5, 2)]
    assert explain_lines([*inline, end], world_size=8).culprits == (2,)


def test_a_requeue_after_which_the_job_goes_on_from_its_checkpoint_is_no_incident(explain_lines: Explain) -> None:
    for to in ("TO", "to"):
        end = f"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-07-20T05:45:10 DUE {to} JOB REQUEUE ***"
        assert not explain_lines(["step 1 loss 2", end, "resuming from /ck/iter_9000", "step 9001 loss 1"]).incident
        assert explain_lines(["step 1 loss 2", end]).incident


def test_what_stands_in_a_table_of_a_document_is_quoted(explain_lines: Explain) -> None:
    line = timeout(3)[0]
    cells = [
        f"| {line} | compare the ranks |",
        "| CUDA out of memory | smaller batch |",
        "| torch.OutOfMemoryError: x | same |",
    ]
    assert not explain_lines(
        {"page.md": ["# Handbook", "", "| message | do |", "|:---|---|", *cells, "", "Nothing is wrong now."]}
    ).incident
    assert explain_lines({"page.md": ["# It hangs", "", "| a | b |", "|---|---|", "| 1 | 2 |", "", line]}).incident
    assert explain_lines({"page.md": [f"| {line} |"]}).incident  # a box that a program prints


def test_a_pod_of_the_cluster_tells_nothing_about_the_job(explain_lines: Explain) -> None:
    event = "12m  Warning  NodeNotReady  pod/{}  Node is not ready"
    assert not explain_lines([event.format("fluentbit-x7")]).incident
    assert explain_lines([event.format("train-worker-3")]).incident


def test_a_call_in_which_all_ranks_are_by_torchs_table_is_an_incident_of_nobody(explain_lines: Explain) -> None:
    def row(number: int, *states: str) -> str:
        return "  ".join(f"all_gather(seq={number},state={state})" for state in states)

    done = ["  ".join(f"Rank {rank}" for rank in range(3)), row(7, *["completed"] * 3)]
    report = explain_lines([*done, row(8, *["started"] * 3)])
    assert report.incident and report.culprits == ()
    assert report.collective is not None and (report.collective.op, report.collective.seq) == ("ALLGATHER", 8)
    assert not explain_lines(done).incident
