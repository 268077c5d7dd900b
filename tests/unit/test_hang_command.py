"""`ncclguard hang` where it cannot do all: one clear sentence each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ncclguard.hang import command, looks, processes
from ncclguard.hang.command import main
from ncclguard.hang.environment import environ_now
from ncclguard.hang.processes import NO_RANKS, Process, find_jobs, hidden_ranks, with_ranks
from ncclguard.hang.report import HangReport, JobReport
from ncclguard.hang.stacks import Kind, Place
from ncclguard.hang.tree import groups_of, lines_of, merge

RANKS = {"MASTER_ADDR": "gpu-01", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


def process(pid: int, parent: int = 1, environ: Mapping[str, str] | None = None, **more: object) -> Process:
    told = {"state": "S", "ticks": 0, "started": pid, "uid": os.geteuid(), "command": "python\0train.py", **more}
    return Process(pid, parent, environ=environ, **told)  # type: ignore[arg-type]


def rank(pid: int, number: int, parent: int = 1, **more: str) -> Process:
    return process(pid, parent, {**RANKS, "RANK": str(number), "LOCAL_RANK": str(number), **more})


#: Numbers that no process has, so that /proc says nothing of them.
FIRST = 2**22 + 1


def jobs_of(*some: Process) -> list[processes.Job]:
    return find_jobs({one.pid: one for one in some})


def test_what_a_rank_has_started_is_no_rank() -> None:
    (job,) = jobs_of(*(rank(FIRST + n, n) for n in range(4)), rank(FIRST + 9, 2, FIRST + 2))
    assert [(one.rank, one.process.pid) for one in job.members] == [(n, FIRST + n) for n in range(4)]
    assert job.members[2].helpers == (FIRST + 9,)
    assert (job.name, job.world_size, job.ended) == ("gpu-01:29500", 4, [])


def test_a_rank_without_a_process_is_counted_and_its_exit_code_read() -> None:
    ended = process(FIRST + 2, FIRST, state="Z", command="", exit_status=9)
    launcher = process(FIRST, command="python\0/bin/torchrun\0train.py")
    (job,) = jobs_of(launcher, *(rank(FIRST + 1 + n, n, FIRST) for n in (0, 2, 3)), ended)
    assert [(one.rank, one.code) for one in job.ended] == [(1, -9)]


def test_two_jobs_with_one_port_are_told_apart_by_what_started_them() -> None:
    both = [rank(FIRST + 10 * parent + n, n, FIRST + parent) for parent in (1, 2) for n in range(4)]
    jobs = jobs_of(process(FIRST + 1, command="bash"), process(FIRST + 2, command="bash"), *both)
    assert [job.name for job in jobs] == [f"gpu-01:29500 ({FIRST + 1})", f"gpu-01:29500 ({FIRST + 2})"]
    assert all(len(job.members) == 4 and "one address" in job.notes[0] for job in jobs)


@pytest.mark.parametrize("words", ["python\0-m\0torch.distributed.run\0train.py", "python\0/bin/deepspeed\0train.py"])
def test_a_launcher_with_a_rank_of_slurm_is_no_rank(words: str) -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "MASTER_ADDR": "gpu-01"}
    (job,) = jobs_of(process(FIRST, 1, environ, command=words), *(rank(FIRST + 1 + n, n, FIRST) for n in range(4)))
    assert [one.process.pid for one in job.members] == [FIRST + 1 + n for n in range(4)]


@pytest.mark.parametrize(
    "words",
    ["python\0/bin/accelerate\0launch\0train.py", "python\0-m\0accelerate.commands.launch\0train.py",
     "python\0-u\0-m\0deepspeed.launcher.launch\0train.py", "python\0-X\0dev\0/bin/ray\0start", "mpirun\0-n\0004"],
)  # fmt: skip
def test_a_launcher_is_known_by_the_program_that_it_runs(words: str) -> None:
    assert processes._launches(process(FIRST, command=words))


@pytest.mark.parametrize(
    "words",
    ["python\0-u\0train.py\0--deepspeed\0ds.json", "python\0-m\0models.deepspeed_train", "python\0/home/torchrun/train.py",
     "python\0-c\0import torchrun", "python\0train.py\0torchrun"],
)  # fmt: skip
def test_a_rank_is_no_launcher_whatever_its_arguments_are(words: str) -> None:
    (job,) = jobs_of(*(process(FIRST + n, 1, rank(FIRST, n).environ, command=words) for n in range(4)))
    assert len(job.members) == 4


#: What one host of several sees, with rank 1 of its launcher's local ranks missing: environments without the rank.
MANY_HOSTS = {
    "mpirun deals ranks out by node": [
        {"OMPI_COMM_WORLD_RANK": str(2 * n), "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": str(n),
         "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_ADDR": "gpu-01"} for n in (0, 2, 3)
    ],
    "mpirun, and a master that was left at its default": [
        {"OMPI_COMM_WORLD_RANK": str(n), "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": str(n),
         "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_ADDR": "localhost"} for n in (0, 2, 3)
    ],
    "Slurm on two nodes, and a master that was left at its default": [
        {"SLURM_PROCID": str(n), "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "MASTER_ADDR": "127.0.0.1"} for n in (0, 2)
    ],
    "Slurm, and local variables of the script": [
        {"RANK": str(2 * n), "WORLD_SIZE": "8", "LOCAL_RANK": str(n), "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu-01"} for n in (0, 3)
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", MANY_HOSTS)
def test_nothing_is_said_of_ranks_that_may_be_on_other_hosts(case: str) -> None:
    some = [process(FIRST + n, FIRST - 1, environ) for n, environ in enumerate(MANY_HOSTS[case])]
    ended = process(FIRST + 9, FIRST - 1, state="Z", command="", exit_status=9, name="python")
    (job,) = jobs_of(process(FIRST - 1, command="mpirun"), *some, ended)
    assert job.ended == []


def test_torchs_agent_gives_a_host_ranks_that_follow_one_another() -> None:
    more = {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    (job,) = jobs_of(rank(FIRST, 2, FIRST - 1, LOCAL_RANK="0", **more))
    assert [one.rank for one in job.ended] == [3]


def test_a_process_whose_environment_is_hidden_may_be_the_missing_rank() -> None:
    (job,) = jobs_of(process(FIRST), *(rank(FIRST + 1 + n, n, FIRST) for n in (0, 2, 3)), process(FIRST + 9, FIRST))
    assert job.ended == []


def test_what_else_a_launcher_has_not_collected_tells_no_exit_code() -> None:
    other = process(FIRST + 9, FIRST, state="Z", command="", exit_status=9, name="nvidia-smi")
    (job,) = jobs_of(process(FIRST), *(rank(FIRST + 1 + n, n, FIRST) for n in (0, 2, 3)), other)
    assert [(one.rank, one.code) for one in job.ended] == [(1, None)]


@pytest.mark.parametrize("which", ["launcher", "rank", "helper"])
def test_a_job_is_chosen_by_its_launcher_or_by_what_a_rank_has_started(which: str) -> None:
    launcher = process(FIRST, command="python\0/bin/accelerate\0launch\0train.py")
    some = [launcher, *(rank(FIRST + 1 + n, n, FIRST) for n in range(4)), rank(FIRST + 9, 2, FIRST + 3)]
    (job,) = jobs_of(*some)
    chosen = {"launcher": FIRST, "rank": FIRST + 1, "helper": FIRST + 9}[which]
    assert chosen in command._around(job, {one.pid: one for one in some})


TITLES = {
    "by their place in the tensor group": (["VLLM::Worker_DP0_TP1", "VLLM::Worker_DP0_TP0"], [(2, [(0, 1), (1, 0)])]),
    "by pipeline and tensor": (
        ["VLLM::Worker_PP1_TP0", "VLLM::Worker_PP0_TP1", "VLLM::Worker_PP0_TP0", "VLLM::Worker_PP1_TP1"],
        [(4, [(0, 2), (1, 1), (2, 0), (3, 3)])],
    ),
    "of the second of two hosts": (["sglang::scheduler_TP2", "sglang::scheduler_TP3"], [(4, [(2, 0), (3, 1)])]),
    "one of which has ended": ([f"sglang::scheduler_TP{n}" for n in (0, 2, 3)], [(4, [(0, 0), (2, 1), (3, 2)])]),
    "of two replicas": (
        [f"sglang::scheduler_DP{d}_TP{t}" for d in (0, 1) for t in (0, 1)], [(2, [(0, 0), (1, 1)]), (2, [(0, 2), (1, 3)])]
    ),
    "that tell no place": (["sglang::scheduler", "sglang::scheduler"], []),
    "idle workers of Ray": (["ray::IDLE", "ray::IDLE", "ray::IDLE_SpillWorker"], []),
}  # fmt: skip


@pytest.mark.parametrize("case", TITLES)
def test_workers_of_an_inference_server_are_known_by_their_titles(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    titles, expected = TITLES[case]
    monkeypatch.setattr(processes, "_has_torch", lambda pid: True)
    jobs = jobs_of(*(process(FIRST + n, 2, {}, command=title) for n, title in enumerate(titles)))
    found = [(job.world_size, [(one.rank, one.process.pid - FIRST) for one in job.members]) for job in jobs]
    assert found == expected


def test_actors_of_ray_are_told_apart_by_class_and_by_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_has_torch", lambda pid: True)
    titles = ["ray::IDLE", "ray::Buffer.get", "ray::Trainer.fit()", "ray::Trainer"]
    (job,) = jobs_of(*(process(FIRST + n, 2, {}, command=title) for n, title in enumerate(titles)))
    assert [(one.rank, one.process.pid) for one in job.members] == [(FIRST + 2, FIRST + 2), (FIRST + 3, FIRST + 3)]
    assert job.notes == [NO_RANKS]


def test_actors_of_ray_that_have_a_name_are_told_apart_by_class_and_what_one_forks_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_has_torch", lambda pid: True)
    titles = ["ray::aBcWorkerDict_0:0:WorkerDict.step", "ray::aBcWorkerDict_0:1:WorkerDict.step"]
    actors = [process(FIRST + n, 2, {}, command=title) for n, title in enumerate(titles)]
    (job,) = jobs_of(*actors, *(process(FIRST + 5 + n, FIRST, {}, command=titles[0]) for n in range(2)))
    assert (job.name, [one.process.pid for one in job.members]) == ("Ray WorkerDict (2)", [FIRST, FIRST + 1])
    assert job.members[0].helpers == (FIRST + 5, FIRST + 6)


@pytest.mark.processes
@pytest.mark.parametrize(
    "command", ["ray::RayTrainWorker", "python\0-c\0from multiprocessing.spawn import spawn_main; spawn_main()"]
)
def test_a_rank_that_a_process_was_told_after_its_start_is_read_out_of_it(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Train and programs that spawn their ranks write it to `os.environ`; those of two parents are one job then."""
    monkeypatch.setattr(processes, "_has_torch", lambda pid: True)
    text = "import os, sys; os.environ.update(eval(sys.argv[1])); print(flush=True); sys.stdin.read()"
    told = [{**RANKS, "WORLD_SIZE": "2", "RANK": str(number)} for number in (1, 0)]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", text, str(one)], stdin=-1, stdout=-1, env=os.environ)
            )
            for one in told
        ]
        for one in started:
            assert one.stdout is not None and one.stdout.readline()
        (job,) = jobs_of(*(process(one.pid, FIRST + n, {}, command=command) for n, one in enumerate(started)))
        for one in started:
            one.communicate()
    assert (job.name, job.world_size, job.counted) == ("gpu-01:29500", 2, False)
    assert [(one.rank, one.process.pid) for one in job.members] == [(0, started[1].pid), (1, started[0].pid)]


@pytest.mark.processes
def test_a_spare_is_no_rank_until_it_has_the_place_of_a_lost_one(tmp_path: Path) -> None:
    """What Slurm told its launcher is no rank of its own; its place is in /proc, so that no right to its memory is needed."""
    (tmp_path / "train.py").write_text("import sys; print(flush=True); sys.stdin.read()")
    reader, writer = os.pipe()
    command = [sys.executable, "-u", "-m", "ncclguard.training.spare", str(reader), "train.py"]
    launcher = {**os.environ, "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "NCCLGUARD_PLACE": " " * 512}
    place = {**RANKS, "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=launcher, pass_fds=[reader]) as spare:
        os.close(reader)
        beside = [rank(FIRST + n, n, os.getpid(), TORCHELASTIC_RUN_ID="none", SLURM_PROCID="0") for n in (0, 2, 3)]
        read = processes.read_process(spare.pid)
        end = time.monotonic() + 30
        while (read is None or "NCCLGUARD_PLACE" not in (read.environ or {})) and time.monotonic() < end:
            read = processes.read_process(spare.pid)
        assert read is not None
        (waiting,) = jobs_of(*beside, read)
        script = [sys.executable, "-u", str(tmp_path / "train.py")]
        with os.fdopen(writer, "w") as pipe:
            json.dump({"env": place, "command": script, "stdout": None, "stderr": None}, pipe)
        assert spare.stdout is not None and spare.stdout.readline()
        read = processes.read_process(spare.pid)
        assert read is not None
        (job,) = jobs_of(*beside, read)
        spare.communicate()
    assert [one.rank for one in waiting.members] == [0, 2, 3]
    assert waiting.ended == [processes.Ended(1)]
    assert [(one.rank, one.process.pid) for one in job.members][1] == (1, spare.pid)
    assert (job.name, len(job.members), job.ended) == ("gpu-01:29500", 4, [])


def test_of_a_process_that_may_not_be_read_the_environment_is_not_known() -> None:
    assert environ_now(FIRST) == {}


SPAWNED = range(FIRST, FIRST + 3)
PROOFS = {
    "all by their groups": ([(2, 3), (1, 3), (0, 3)], {}, [2, 1, 0]),
    "the last one, as the others are known": ([(2, 3), None, (0, 3)], {}, [2, 1, 0]),
    "by a variable that is right for one": ([(2, 3), None, None], {0: 2, 1: 0, 2: 1}, [2, 0, 1]),
    "a job on several hosts": ([(5, 6), (3, 6), (4, 6)], {}, [5, 3, 4]),
    "not by a variable alone": ([None, None, None], {0: 2, 1: 1, 2: 0}, None),
    "not by a variable that is wrong for one": ([(2, 3), None, None], {0: 0, 1: 1, 2: 2}, None),
    "not by a group of some ranks": ([(1, 2), (0, 2), None], {}, None),
    "not where two have one rank": ([(2, 3), None, None], {0: 2, 1: 1, 2: 1}, None),
}


@pytest.mark.parametrize("case", PROOFS)
def test_processes_that_tell_no_rank_have_those_that_are_proved(case: str) -> None:
    groups, variables, ranks = PROOFS[case]
    members = [processes.Member(pid, process(pid)) for pid in SPAWNED]
    job = with_ranks(
        processes.Job("spawn", 3, members, notes=[NO_RANKS], counted=True),
        {pid: group for pid, group in zip(SPAWNED, groups, strict=True) if group is not None},
        {FIRST + number: rank for number, rank in variables.items()},
    )
    assert job.counted == (ranks is None)
    told = {one.process.pid: one.rank for one in job.members}
    assert [told[pid] for pid in SPAWNED] == (list(SPAWNED) if ranks is None else ranks)


ASLEEP = Place(Kind.SLEEP, stack=("train.py:8 pause",))
REDUCE = Place(Kind.COLLECTIVE, "all_reduce", True, stack=("train.py:2 step", "all_reduce"))


def found(monkeypatch: pytest.MonkeyPatch, *some: Process) -> None:
    monkeypatch.setattr(command, "read_processes", lambda: {one.pid: one for one in some})
    monkeypatch.setattr(command, "BETWEEN", 0.1)


def test_no_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found(monkeypatch, process(FIRST, environ={}))
    assert main(["--json", "-"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ncclguard hang: no job runs here: no process has a rank")


def test_a_number_that_is_no_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found(monkeypatch, rank(FIRST, 0))
    assert main(["--pid", "17"]) == 2
    assert "no rank of a job: 17" in capsys.readouterr().err


def test_hidden_ranks_are_what_a_launcher_has_started() -> None:
    some = [process(FIRST, command="python\0/bin/torchrun"), process(FIRST + 1, FIRST), process(FIRST + 2, FIRST, {})]
    assert [one.pid for one in hidden_ranks({one.pid: one for one in some})] == [FIRST + 1]


@pytest.mark.parametrize("fails", [(0,), (1,), (2,), (0, 1)])
def test_a_look_that_fails_on_a_busy_host_costs_no_verdict(
    fails: Sequence[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 2 sleeps; of ranks 2 and 3 some looks find no stack."""
    found(monkeypatch, *(rank(FIRST + n, n) for n in range(4)))
    counted = looks.Counters("S", {1: (0, 5)}, None, 0)
    taken: list[int] = []

    def look(pids: Sequence[int], *_: object) -> dict[int, looks.Look]:
        taken.append(len(taken))
        places = {pid: ASLEEP if pid == FIRST + 2 else REDUCE for pid in pids}
        failed = {FIRST + 2, FIRST + 3} if taken[-1] in fails else set()
        return {
            pid: looks.Look(time.monotonic(), counted, None if pid in failed else place, 1, (1,))
            for pid, place in places.items()
        }

    monkeypatch.setattr(command, "look", look)
    assert main(["--seconds", "0.2", "--exit-code"]) == 1
    assert "Rank 2 held up the job: late." in capsys.readouterr().out
    assert len(taken) == (3 if fails == (1,) else 4)


@pytest.mark.processes
def test_ranks_that_end_while_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, *(rank(FIRST + n, n) for n in range(4)))
    assert main(["--seconds", "0.2", "--exit-code"]) == 0
    said = capsys.readouterr().out
    assert "ranks 0-3: no process" in said
    assert "All its ranks have ended, some of them while they were looked at." in said


def itself() -> Process:
    return rank(os.getpid(), 0)


@pytest.mark.processes
def test_without_py_spy_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, itself())
    monkeypatch.setattr(command, "find_spy", lambda: None)
    assert main([]) == 0
    assert "Without py-spy no stack can be read" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize(
    ("says", "note"),
    [
        ("Permission Denied: Try running again with elevated permissions", "kernel.yama.ptrace_scope=0"),
        ("Error: Failed to find python version from target process", "Failed to find python version"),
    ],
)
def test_what_py_spy_cannot_do_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, says: str, note: str
) -> None:
    """A stub, because no right is missing here: it says what py-spy 0.4 says."""
    spy = tmp_path / "py-spy"
    spy.write_text(f"#!{sys.executable}\nimport sys\nsys.exit({says!r})\n")
    spy.chmod(0o755)
    found(monkeypatch, itself())
    monkeypatch.setattr(command, "find_spy", lambda: str(spy))
    monkeypatch.setattr(looks, "SPY_TRIES", 1)
    assert main([]) == 0
    said = capsys.readouterr().out
    assert note in said
    assert "No stack could be read" in said


def test_a_folder_without_anything_and_a_file_of_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "nothing has been collected there" in capsys.readouterr().err
    (tmp_path / "a.json").write_text('{"jobs": 3}')
    assert main([str(tmp_path)]) == 2
    assert "a.json: not what `ncclguard hang --collect` writes" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json")]) == 2
    assert "none.json: cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_report_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(
        HangReport(hosts=("a",), jobs=(JobReport(name="j", world_size=1),)).model_dump_json()
    )
    assert main([str(tmp_path), "--json", str(tmp_path / "no" / "where.json")]) == 2
    assert "cannot write the report" in capsys.readouterr().err


def test_jobs_of_two_hosts_with_one_loopback_address_are_two(tmp_path: Path) -> None:
    for host in "ab":
        part = JobReport(name="127.0.0.1:29500", world_size=4)
        (tmp_path / f"{host}.json").write_text(HangReport(hosts=(host,), jobs=(part,)).model_dump_json())
    assert len(command.merged([tmp_path]).jobs) == 2


def test_stacks_of_a_deep_recursion_are_merged() -> None:
    """Each rank has gone down another number of calls."""
    stacks = {n: ("train.py:1 main", *["train.py:2 walk"] * (1200 + n)) for n in range(1200)}
    lines = list(lines_of(merge(groups_of(stacks)), {}))
    assert lines[0].startswith("ranks 0-1199: train.py:1 main -> ... -> ")
    assert len(lines) == 2 * 1200 - 1
    assert {line.strip().partition(":")[0] for line in lines if line.endswith(": here")} == {
        f"rank {n}" for n in range(1199)
    }


def test_thousands_of_ranks_are_a_few_lines() -> None:
    stacks = {n: ("train.py:1 main", "train.py:2 step", "all_reduce") for n in range(10_000)}
    stacks[4321] = ("train.py:1 main", "train.py:9 save")
    lines = list(lines_of(merge(groups_of(stacks)), {4321: "asleep"}))
    assert lines == [
        "ranks 0-9999: train.py:1 main",
        "  ranks 0-4320, 4322-9999: train.py:2 step -> all_reduce",
        "  rank 4321: train.py:9 save (asleep)",
    ]


def test_a_branch_that_ends_in_libraries_shows_the_programs_line() -> None:
    waits = [f"torch/utils/data/dataloader.py:{n} get" for n in range(5)] + ["selectors.py:415 select"]
    stacks = {0: ("train.py:105 <module>", "train.py:70 main", "backward")}
    stacks[1] = ("train.py:105 <module>", "train.py:67 main", *waits)
    assert list(lines_of(merge(groups_of(stacks)), {}))[2] == (
        "  rank 1: train.py:67 main -> ... -> torch/utils/data/dataloader.py:3 get -> "
        "torch/utils/data/dataloader.py:4 get -> selectors.py:415 select"
    )
