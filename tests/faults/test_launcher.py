"""Ranks are started, watched and always ended: how they end is known, and no process is left behind."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from ncclguard import faults
from ncclguard.faults.launcher import reserve_port
from ncclguard.faults.rank import read_reports, report_file

LIMIT = 90.0  # seconds, for what must happen at some time

ENDS = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
print("out of", rank, sys.argv[1:], flush=True)
print("err of", rank, file=sys.stderr)
if rank == 1:
    sys.exit(3)
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 3:
    raise RuntimeError("broken here")
"""

HANGS = """
import os, signal, time
rank = int(os.environ["RANK"])
if rank == 1:
    if os.fork() == 0:
        os.setsid()  # beyond the reach of the rank's process group
        print("child", os.getpid(), flush=True)
        time.sleep(600)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 2:
    time.sleep(600)
"""


def script(folder: Path, text: str) -> Path:
    file = folder / "program.py"
    file.write_text(text)
    return file


def process_state(pid: int) -> str:
    """As psutil calls it; "gone" where there is no such process."""
    return psutil.Process(pid).status() if psutil.pid_exists(pid) else "gone"


def until_gone(pids: list[int]) -> None:
    """All processes are gone; fails after LIMIT seconds."""
    deadline = time.monotonic() + LIMIT
    while left := [pid for pid in pids if process_state(pid) not in ("gone", psutil.STATUS_ZOMBIE)]:
        assert time.monotonic() < deadline, f"processes {left} were left behind"
        time.sleep(0.02)


def say_who_and_where(*values: int) -> dict[str, object]:
    faults.report(world=os.environ["WORLD_SIZE"], local=os.environ["LOCAL_RANK"], early=1)
    faults.report(early=2)
    return {"sum": sum(values), "rank": int(os.environ["RANK"])}


def wait_for_the_word() -> None:
    faults.report(ready=os.getpid())
    faults.wait_until_told("go on", LIMIT)
    faults.report(went_on=True)


def test_each_ranks_exit_code_signal_output_and_end_are_known(tmp_path: Path) -> None:
    result = faults.run_ranks(script(tmp_path, ENDS), 4, args=["a", 1], timeout=LIMIT)
    assert [rank.end for rank in result] == ["exit 0", "exit 3", "SIGKILL", "exit 1"]
    assert [rank.ok for rank in result] == [True, False, False, False]
    assert [rank.exit_code for rank in result] == [0, 3, None, 1]
    assert result[2].signal is signal.SIGKILL
    for rank in result:
        assert f"out of {rank.rank} ['a', '1']" in rank.output
        assert rank.ended is not None
        assert 0 < rank.ended <= result.seconds
    assert "err of 1" in result[1].output
    assert "broken here" in result[3].output
    assert not result.ok
    assert not result.timed_out
    with pytest.raises(faults.RanksFailed, match="(?s)rank 2: SIGKILL.*broken here") as failed:
        result.check()
    assert failed.value.result is result


def test_at_the_timeout_sleeping_and_stopped_ranks_show_their_stacks_and_all_processes_end(tmp_path: Path) -> None:
    """Rank 1 stops itself and has a child in another session, rank 2 sleeps: all is over soon after the timeout."""
    before = time.monotonic()
    result = faults.run_ranks(script(tmp_path, HANGS), 3, timeout=6)
    assert time.monotonic() - before < 6 + LIMIT
    assert result.timed_out
    assert result.still_running == (1, 2)
    assert [rank.end for rank in result] == ["exit 0", "still running", "still running"]
    assert 'program.py", line 10' in result[1].output, "the line where it was stopped"
    assert 'program.py", line 12' in result[2].output, "the line where it slept"
    child = int(result[1].output.split("child ")[1].split()[0])
    assert child in result.left_running
    until_gone([child, *(rank.pid for rank in result if rank.pid is not None)])
    assert "still running at the timeout of 6 s: [1, 2]" in str(result)


def test_a_forked_child_that_outlives_its_rank_is_told_and_ended(tmp_path: Path) -> None:
    text = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)\n"
    result = faults.run_ranks(script(tmp_path, text), 1, timeout=LIMIT)
    assert result.ok
    assert len(result.left_running) == 1
    until_gone(list(result.left_running))


def leaves_a_child_behind() -> None:
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)


def test_forked_ranks_and_their_children_are_told_from_those_of_other_jobs_of_the_same_process() -> None:
    """All jobs' ranks are forks of one process, so each job's mark replaces the one that this was started with."""
    with faults.start_ranks("time:sleep", 2, args=[600], timeout=600, launcher="fork") as other:
        result = faults.run_ranks(leaves_a_child_behind, 1, timeout=LIMIT, launcher="fork")
        assert result.ok
        assert len(result.left_running) == 1
        until_gone(list(result.left_running))
        pids = [other.pid(rank) for rank in range(2)]
        assert [process_state(pid) for pid in pids] == [psutil.STATUS_SLEEPING] * 2
    until_gone(pids)


@pytest.mark.parametrize("launcher", ["processes", "fork"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_when_the_launching_process_is_ended_its_ranks_end_too(number: signal.Signals, launcher: str) -> None:
    launching = f"""
from ncclguard import faults
with faults.start_ranks("time:sleep", 2, args=[600], timeout=600, launcher={launcher!r}) as job:
    print(job.pid(0), job.pid(1), job._directory, flush=True)
    job.wait()
"""
    errors = until_all_have_ended(launching, number)
    if number is signal.SIGINT:
        assert "KeyboardInterrupt" in errors


def test_a_fork_that_begins_after_its_launching_process_was_killed_ends_too(tmp_path: Path) -> None:
    """It says too late which job it is of: everything that bears the job's name has been ended, but its file is there."""
    (tmp_path / "begins_late.py").write_text(
        "import time\nfrom ncclguard.faults import fork\n\n_run = fork._run\n\n\n"
        "def run(arguments, env, output, *others):\n    time.sleep(2)\n    _run(arguments, env, '/dev/null', *others)\n"
    )
    until_all_have_ended(
        f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import begins_late
from ncclguard import faults
faults.fork._run = begins_late.run
with faults.start_ranks("time:sleep", 2, args=[600], timeout=600, launcher="fork") as job:
    print(job.pid(0), job.pid(1), job._directory, flush=True)
    job.wait()
""",
        signal.SIGKILL,
    )


def until_all_have_ended(launching: str, number: signal.Signals) -> str:
    """Run a program that prints its ranks' pids and its directory, send it a signal; return its errors."""
    with subprocess.Popen(
        [sys.executable, "-c", launching], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            *pids, directory = parent.stdout.readline().split()
            parent.send_signal(number)
            _, errors = parent.communicate(timeout=LIMIT)
            until_gone([int(pid) for pid in pids])
            deadline = time.monotonic() + LIMIT
            while Path(directory).exists():
                assert time.monotonic() < deadline, f"{directory} was left behind"
                time.sleep(0.02)
        finally:
            parent.kill()
    return str(errors)


def test_leaving_the_block_ends_ranks_that_still_run(tmp_path: Path) -> None:
    with faults.start_ranks(script(tmp_path, "import time\ntime.sleep(600)\n"), 2, timeout=600) as job:
        pids = [job.pid(rank) for rank in range(2)]
    until_gone(pids)


def test_a_function_gets_its_arguments_and_hands_back_its_value_and_reports() -> None:
    result = faults.run_ranks(say_who_and_where, 2, args=[40, 2], timeout=LIMIT).check()
    assert result.values("returned") == {0: {"sum": 42, "rank": 0}, 1: {"sum": 42, "rank": 1}}
    assert result.values("world") == {0: "2", 1: "2"}
    assert result.values("local") == {0: "0", 1: "1"}
    assert result.values("early") == {0: 2, 1: 2}, "a later report replaces an earlier one"


def test_a_function_can_be_named_by_module_and_by_file(tmp_path: Path) -> None:
    assert faults.run_ranks("math:factorial", 1, args=[5], timeout=LIMIT).values("returned") == {0: 120}
    file = script(tmp_path, "def double(x):\n    return 2 * x\n")
    assert faults.run_ranks(f"{file}:double", 1, args=[4], timeout=LIMIT).values("returned") == {0: 8}


def test_the_parent_hears_a_running_rank_and_tells_it_to_go_on() -> None:
    with faults.start_ranks(wait_for_the_word, 2, timeout=60) as job:
        pids = job.wait_for("ready", seconds=LIMIT)
        assert pids == {0: job.pid(0), 1: job.pid(1)}
        assert "went_on" not in job.reports(0)
        job.tell("go on")
        assert job.wait().check().values("went_on") == {0: True, 1: True}


def test_waiting_for_a_report_of_a_rank_that_ended_fails_at_once_with_its_output(tmp_path: Path) -> None:
    with (
        faults.start_ranks(script(tmp_path, "print('went wrong here')\n"), 1, timeout=600) as job,
        pytest.raises(faults.RanksFailed, match=r"ranks \[0\] ended before .* 'ready'(.|\n)*went wrong here"),
    ):
        job.wait_for("ready", seconds=600)


def has_imported(module: str) -> bool:
    return module in sys.modules


@pytest.mark.parametrize(("launcher", "there"), [("fork", True), ("processes", False)])
def test_forks_have_torch_imported_before_their_function_runs(launcher: str, there: bool) -> None:
    result = faults.run_ranks("tests.faults.imported:has", 2, args=["torch"], timeout=60, launcher=launcher)
    assert result.values("returned") == {0: there, 1: there}, result


def test_a_variable_that_torch_reads_at_its_import_makes_ranks_processes_of_their_own() -> None:
    env = {"TORCH_CPP_LOG_LEVEL": "INFO"}
    result = faults.run_ranks("tests.faults.imported:has", 1, args=["torch"], env=env, timeout=60, launcher="fork")
    assert result.values("returned") == {0: False}, result


def ends(how: str) -> None:
    """End this rank in one of the ways that a program can end, with something to do at exit."""
    atexit.register(lambda: faults.report(at_exit=True))
    threading.Timer(0.2, lambda: faults.report(thread=True)).start()
    if how == "in words":
        sys.exit("in words")
    if how == "7":
        raise SystemExit(7)
    if how == "interrupted":
        raise KeyboardInterrupt
    if how == "failed":
        raise ValueError("broken here")


@pytest.mark.parametrize(
    ("how", "end", "said"),
    [
        ("returned", "exit 0", ""),
        ("in words", "exit 1", "in words"),
        ("7", "exit 7", ""),
        ("interrupted", "SIGINT", "KeyboardInterrupt"),
        ("failed", "exit 1", "ValueError: broken here"),
    ],
)
def test_forks_end_as_processes_of_their_own_do(how: str, end: str, said: str) -> None:
    for launcher in ("fork", "processes"):
        (rank,) = faults.run_ranks(ends, 1, args=[how], timeout=LIMIT, launcher=launcher)
        assert (rank.end, rank.reports) == (end, {"at_exit": True, "thread": True}), f"{launcher}: {rank}"
        assert said in rank.output, launcher


def children_are_forks() -> bool:
    child = multiprocessing.Process(target=os.getpid)
    child.start()
    child.join()
    return multiprocessing.get_start_method() == ("fork" if sys.version_info < (3, 14) else "forkserver")


def test_what_forks_start_by_multiprocessing_is_started_as_ever() -> None:
    assert faults.run_ranks(children_are_forks, 1, timeout=LIMIT, launcher="fork").values("returned") == {0: True}


def test_a_job_that_nobody_closes_does_not_keep_its_process_from_ending() -> None:
    program = """
from ncclguard import faults
job = faults.start_ranks("time:sleep", 2, args=[600], timeout=600, launcher="fork")
print(job.pid(0), job.pid(1))
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=True)
    until_gone([int(pid) for pid in done.stdout.split()])


def debug_level() -> str:
    return str(dist.get_debug_level().name)


def test_forked_ranks_have_the_debug_level_of_their_job() -> None:
    """torch reads it when it is imported, which for all jobs was long ago."""
    for level in ("DETAIL", "OFF"):
        result = faults.run_ranks(
            debug_level, 1, env={"TORCH_DISTRIBUTED_DEBUG": level}, timeout=LIMIT, launcher="fork"
        )
        assert result.values("returned") == {0: level}


def test_beneath_torchrun_each_ranks_own_end_is_known_and_the_agents_store_is_used(tmp_path: Path) -> None:
    text = """
import os, signal, sys, time
print("agent store", os.environ["TORCHELASTIC_USE_AGENT_STORE"], flush=True)
if os.environ["RANK"] == "1":
    while not os.path.exists(sys.argv[1]):  # torchrun ends the other at once
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
open(sys.argv[1], "w").close()
time.sleep(600)
"""
    result = faults.run_ranks(script(tmp_path, text), 2, args=[tmp_path / "up"], timeout=60, launcher="torchrun")
    assert not result.timed_out
    assert [rank.end for rank in result] == ["SIGTERM", "SIGKILL"], "torchrun ends the others"
    assert "agent store True" in result[0].output
    assert "exitcode  : -9" in result.launcher_output
    until_gone([rank.pid for rank in result if rank.pid is not None])


def test_beneath_torchrun_the_timeout_ends_a_stopped_rank_too(tmp_path: Path) -> None:
    text = "import os, signal, time\nprint('up', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    with faults.start_ranks(script(tmp_path, text), 2, timeout=600, launcher="torchrun") as job:
        deadline = time.monotonic() + LIMIT
        while any(process_state(job.pid(rank)) != psutil.STATUS_STOPPED for rank in range(2)):
            assert time.monotonic() < deadline, "the ranks did not get to their SIGSTOP"
            time.sleep(0.02)
        result = job.wait(timeout=0.1)
    assert result.still_running == (0, 1)
    for rank in result:
        assert 'program.py", line 3' in rank.output
    until_gone([rank.pid for rank in result if rank.pid is not None])


def test_the_master_port_is_nobody_elses_while_it_is_reserved_and_still_free_for_the_store() -> None:
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        taken = []
        for _ in range(2000):
            with socket.create_server(("127.0.0.1", 0)) as other:
                taken.append(other.getsockname()[1])
        assert port not in taken
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with socket.create_server(("127.0.0.1", port)) as store:  # create_server sets SO_REUSEADDR, as TCPStore does
            socket.create_connection(store.getsockname(), timeout=5).close()


def test_another_jobs_variables_are_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "NODE_RANK"):
        monkeypatch.setenv(name, "77")
    text = "import os\nprint([name for name in os.environ if os.environ[name] == '77'])\n"
    assert faults.run_ranks(script(tmp_path, text), 1, env={"MINE": "77"}, timeout=LIMIT)[0].output == "['MINE']\n"


def test_what_cannot_be_started_is_refused_before_anything_runs(tmp_path: Path) -> None:
    def inner() -> None: ...

    for program in (
        inner,
        lambda: None,
        "nothing",
        "not/there.py",
        "not/there.py:function",
        "module:",
        ":function",
        "m:1x",
    ):
        with pytest.raises(ValueError, match="give"):
            faults.run_ranks(program, 1)
    for world_size in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="world_size is"):
            faults.run_ranks("math:factorial", world_size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout is"):
        faults.run_ranks("math:factorial", 1, timeout=0)
    with pytest.raises(ValueError, match="launcher is"):
        faults.run_ranks("math:factorial", 1, launcher="mpi")  # type: ignore[arg-type]


def test_a_function_that_is_not_there_ends_the_rank_with_its_name() -> None:
    result = faults.run_ranks("math:nothing_like_it", 1, timeout=LIMIT)
    assert result[0].end == "exit 1"
    assert "nothing_like_it" in result[0].output


def test_a_report_that_is_still_being_written_is_read_the_next_time(tmp_path: Path) -> None:
    """A write that crosses a page of the file is seen in parts by who reads meanwhile."""
    file = report_file(tmp_path, 3)
    file.write_text('{"step": 1}\n{"step": 2, "samples": [1, 2')
    assert read_reports(tmp_path, 3) == {"step": 1}
    with file.open("a") as more:
        more.write(', 3]}\n{"step": 3}\n')
    assert read_reports(tmp_path, 3) == {"step": 3, "samples": [1, 2, 3]}
