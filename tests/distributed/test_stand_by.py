"""`ncclguard run --stand-by`: a host without ranks takes the places of those that are lost with theirs."""

from __future__ import annotations

import itertools
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ncclguard.faults.hosts import Hosts, namespaces_available
from ncclguard.training import places
from tests.distributed.hosts_cases import FSDP, Job

REASON = namespaces_available()
pytestmark = [
    pytest.mark.usefixtures("preforked_programs"),
    pytest.mark.skipif(REASON is not None, reason=f"network namespaces are not available: {REASON}"),
    pytest.mark.timeout(600),
]

STEPS = 100_000  # more than are made: each test says when it has seen what it waits for


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


def joined(job: Job, index: int, rank: int, times: int = 1) -> bool:
    """Whether processes of this host have made steps as this rank, so often anew."""
    lines = re.findall(rf"takes the place of rank {rank}|step \d+ of rank {rank}", job.said(index))
    return sum(now[:4] == "step" and before[:5] == "takes" for before, now in itertools.pairwise(lines)) == times


def check(job: Job) -> list[str]:
    """Each step was made once, with one loss and one opinion of who took part; returns who, in their order."""
    steps = max(int(step) for step in re.findall(r"^step (\d+) of", job.said(0), re.MULTILINE))
    made = [job.made_by(step) for step in range(1, steps + 1)]
    assert all(len(said) == 1 for said in made), [(step, said) for step, said in enumerate(made, 1) if len(said) != 1]
    who = [said.pop().split(", by ")[1] for said in made]
    return [members for index, members in enumerate(who) if index == 0 or members != who[index - 1]]


def codes(job: Job) -> list[int]:
    """The exit codes of all launchers; the job ends with its next step."""
    job.finish()
    return [job.code(index) for index in range(3)]


@pytest.mark.parametrize(
    ("fault", "way"), [("killed", "ddp"), pytest.param("cut off", "fsdp", marks=[FSDP, pytest.mark.thorough])]
)
def test_a_host_that_stands_by_takes_the_place_of_one_that_is_lost(
    hosts: Hosts, tmp_path: Path, way: str, fault: str
) -> None:
    job = Job.begun(hosts, tmp_path, way, standing_by=1, steps=STEPS)
    if fault == "killed":
        job.kill(1, launcher=True)
    else:
        hosts.partition("host1")
    job.wait_until(lambda: joined(job, 2, 2) and joined(job, 2, 3))
    ended = codes(job)
    assert (ended[0], ended[1] != 0, ended[2]) == (0, True, 0), job.said(0)[-3000:] + job.said(2)[-3000:]
    who = check(job)
    assert who[0] == who[-1] == "(0, 1, 2, 3)", who
    assert "(0, 1)" in who
    assert sorted(re.findall(r"takes the place of rank (\d)", job.said(2))) == ["2", "3"]


@pytest.mark.thorough
def test_ranks_that_are_started_again_have_no_second_training_beside_them(hosts: Hosts, tmp_path: Path) -> None:
    """All of the job's own ranks were lost, and one that had joined from elsewhere would go on alone.

    The host that it had joined from stands by for the new ones.
    """
    options = {0: ["--max-restarts", "1"], 1: ["--nproc-per-node", "1"], 2: ["--nproc-per-node", "1"]}
    job = Job.begun(hosts, tmp_path, "ddp", standing_by=2, steps=STEPS, options=options)
    job.ranks(0)[1].kill()
    job.wait_until(lambda: joined(job, 1, 1) or joined(job, 2, 1))
    there, other = (1, 2) if joined(job, 1, 1) else (2, 1)
    job.launchers[other].terminate()
    job.ranks(0)[0].kill()
    job.wait_until(lambda: "started again; this one ends" in job.said(there))
    job.wait_until(lambda: job.said(0).count("step 10 of rank 0") == 2)
    job.ranks(0)[1].kill()
    job.wait_until(lambda: joined(job, there, 1, times=2))
    ended = codes(job)
    assert (ended[0], ended[there], ended[other]) == (0, 0, 128 + signal.SIGTERM), job.said(there)[-3000:]
    anew = [job.said(0).split("step 10 of rank 0")[2], job.said(there).split("another process stands by")[1]]
    made = re.findall(r"^step (\d+) of rank \d: (\S+, by .*)$", "\n".join(anew), re.MULTILINE)
    assert made
    assert len(dict(made)) == len(set(made))


@pytest.mark.thorough
def test_a_job_that_ends_while_they_import_is_not_waited_for(hosts: Hosts, tmp_path: Path) -> None:
    job = Job.begun(hosts, tmp_path, "ddp", standing_by=1, steps=STEPS)
    job.launchers[2].terminate()
    job.start_again(2)
    job.wait_until(lambda: job.said(2).count("2 processes stand by") == 2)
    assert codes(job) == [0, 0, 0], job.said(2)[-3000:]


@pytest.mark.thorough
def test_a_process_that_is_stopped_before_it_joins_is_replaced_and_ended(hosts: Hosts, tmp_path: Path) -> None:
    env = {2: {"STARTS_AFTER": "4"}}
    job = Job.begun(hosts, tmp_path, "ddp", standing_by=1, steps=STEPS, env=env)
    job.ranks(1)[3].kill()
    job.wait_until(lambda: "takes the place of rank 3" in job.said(2))
    job.ranks(2)[3].suspend()
    job.wait_until(lambda: joined(job, 2, 3))
    assert re.search(r"rank 3 \(process \d+\) does not run, and its place is taken; it is ended", job.said(2))
    assert codes(job) == [0, 0, 0], job.said(2)[-3000:]
    assert check(job)[-1] == "(0, 1, 2, 3)"


@pytest.mark.thorough
def test_a_launcher_that_did_not_run_for_a_while_ends_no_rank_that_has_joined_since(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Nobody vouched for the first that took the place, a second one takes it too, and comes too late."""
    env = {2: {"STARTS_AFTER": str(places.VOUCHED_FOR + 6)}}
    job = Job.begun(hosts, tmp_path, "ddp", standing_by=1, steps=STEPS, env=env)
    job.ranks(1)[3].kill()
    job.wait_until(lambda: "takes the place of rank 3" in job.said(2))
    launcher = psutil.Process(job.launchers[2].pid)
    launcher.suspend()
    job.wait_until(lambda: joined(job, 2, 3))
    launcher.resume()
    job.wait_until(lambda: "is not needed; another process stands by" in job.said(2))
    assert codes(job) == [0, 0, 0], job.said(2)[-3000:]
    assert check(job) == ["(0, 1, 2, 3)", "(0, 1, 2)", "(0, 1, 2, 3)"]
    assert job.said(2).count("takes the place of rank 3") == 2
    assert "it is ended" not in job.said(2)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["cut off", "reset"])
def test_a_host_whose_connection_was_broken_stands_by_still(hosts: Hosts, tmp_path: Path, how: str) -> None:
    job = Job.begun(hosts, tmp_path, "ddp", standing_by=1, steps=STEPS)
    if how == "cut off":
        hosts.partition("host2")
        time.sleep(20)
        hosts.heal()
    else:
        for _ in range(2):
            job.wait_until(lambda: hosts.reset_connections("host2") > 0)
            time.sleep(3)
    job.ranks(1)[3].kill()
    job.wait_until(lambda: joined(job, 2, 3))
    assert codes(job) == [0, 0, 0], job.said(2)[-3000:]


@pytest.mark.thorough
def test_the_launcher_does_not_wait_for_a_rank_that_is_stopped_when_the_job_has_ended(
    hosts: Hosts, tmp_path: Path
) -> None:
    """It is alone on its host, so that nobody there could give it up."""
    job = Job.begun(hosts, tmp_path, "ddp", standing_by=1, steps=STEPS)
    job.ranks(1)[3].kill()
    job.wait_until(lambda: joined(job, 2, 3))
    job.ranks(2)[3].suspend()
    assert [job.code(index) for index in range(3)] == [1, 1, 1]


@pytest.mark.thorough
def test_a_launcher_whose_own_ranks_live_on_is_not_waited_for(hosts: Hosts, tmp_path: Path) -> None:
    """It was killed and started again, and stands by; its ranks end by themselves."""
    job = Job.begun(hosts, tmp_path, "ddp", steps=STEPS)
    ranks = list(job.ranks(1).values())
    job.launchers[1].kill()
    job.start_again(1)
    job.wait_until(lambda: "2 processes stand by" in job.said(1))
    assert codes(job) == [0, 0, 0], job.said(1)[-3000:]
    assert check(job) == ["(0, 1, 2, 3, 4, 5)"]
    assert not psutil.wait_procs(ranks, timeout=30)[1]


def test_a_store_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    """Something else listens at the port."""
    program = """
import sys
from ncclguard.training import stand_by
stand_by.SILENT_FOR = 3.0
sys.exit(stand_by.run(("127.0.0.1", int(sys.argv[1])), ["true"], 2, sys.argv[2], print))
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", program, str(server.getsockname()[1]), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done
    assert done.stdout.count("has not answered") == 2


def test_who_stands_by_and_is_not_needed_ends_with_the_job(hosts: Hosts, tmp_path: Path) -> None:
    job = Job.begun(hosts, tmp_path, "ddp", standing_by=1, steps=STEPS)
    assert codes(job) == [0, 0, 0], job.said(2)[-3000:]
    assert check(job) == ["(0, 1, 2, 3)"]
    assert job.said(2).splitlines()[1:] == []  # no word of torch's about a store that is gone
    assert "2 processes stand by" in job.said(2)


@pytest.mark.thorough
def test_a_rank_that_is_lost_there_too_is_taken_over_again(hosts: Hosts, tmp_path: Path) -> None:
    """Another rank there is left alone, and a process that nobody needs keeps nobody waiting at the end."""
    options = {2: ["--nproc-per-node", "4", "--restart-lost", "1"]}
    job = Job.begun(hosts, tmp_path, "ddp", standing_by=1, steps=STEPS, options=options)
    job.kill(1, launcher=True)
    job.wait_until(lambda: joined(job, 2, 2) and joined(job, 2, 3))
    job.ranks(2)[3].kill()
    job.wait_until(lambda: joined(job, 2, 3, times=2))
    ended = codes(job)
    assert (ended[0], ended[2]) == (0, 0), job.said(2)[-3000:]
    assert check(job)[-1] == "(0, 1, 2, 3)"
    assert "rank 2 (process" not in job.said(2).split("takes the place of rank 2 (process")[1]


@pytest.mark.thorough
def test_a_spare_of_the_same_host_comes_first(hosts: Hosts, tmp_path: Path) -> None:
    patient = {"OWN_HOST_FIRST": "30"}  # seconds: on a busy machine the launcher is slow to see that a rank has ended
    env, options = dict.fromkeys(range(2), patient), {1: ["--spares", "1"]}
    job = Job.begun(hosts, tmp_path, "ddp", standing_by=1, steps=STEPS, options=options, env=env)
    job.ranks(1)[3].kill()
    job.wait_until(lambda: "rank 3 rejoined" in job.said(0))
    assert codes(job) == [0, 0, 0], job.said(1)[-3000:]
    assert check(job)[-1] == "(0, 1, 2, 3)"  # it may be there before the others have made a step without it
    assert "takes the place" not in job.said(2)


@pytest.mark.thorough
def test_who_comes_too_late_for_its_own_place_is_not_started_again(hosts: Hosts, tmp_path: Path) -> None:
    place_is_taken = tmp_path / "taken"
    options, env = {1: ["--restart-lost", "3"]}, {1: {"STARTS_WHEN": str(place_is_taken)}}
    job = Job.begun(hosts, tmp_path, "ddp", standing_by=1, steps=STEPS, options=options, env=env)
    job.ranks(1)[3].kill()
    job.wait_until(lambda: joined(job, 2, 3))
    place_is_taken.touch()
    job.wait_until(lambda: "not started again" in job.said(1))
    assert codes(job) == [0, 0, 0], job.said(1)[-3000:]
    assert check(job) == ["(0, 1, 2, 3)", "(0, 1, 2)", "(0, 1, 2, 3)"]
    assert job.said(1).count("rank 3 is started again (process") == 1
    assert "rank 3 is not started again: a process of another host has its place" in job.said(1)


@pytest.mark.thorough
def test_who_is_not_started_again_on_its_own_host_is_not_on_another_either(hosts: Hosts, tmp_path: Path) -> None:
    """The second one raises what has ended another one there."""
    own_host_first = 15  # seconds: on a busy machine a process that has raised ends slowly, and only then it is refused
    patient = {"OWN_HOST_FIRST": str(own_host_first)}
    env = {0: patient, 1: {**patient, "RAISES_5_AFTER": "20", "RAISES_4_AFTER": "60"}}
    job = Job.begun(hosts, tmp_path, "ddp", ranks=3, standing_by=1, steps=STEPS, env=env)
    job.wait_until(lambda: re.search("rank 4 is not started again: .* as one before", job.said(1)) is not None)
    job.wait_until(lambda: joined(job, 2, 5))
    time.sleep(own_host_first + 3)
    assert codes(job) == [0, 0, 0], job.said(1)[-3000:]
    assert check(job)[-1] == "(0, 1, 2, 3, 5)"
    assert "takes the place of rank 4" not in job.said(2)


@pytest.mark.thorough
def test_a_host_that_is_started_again_stands_by_for_its_own_places(hosts: Hosts, tmp_path: Path) -> None:
    """As a pod is: with the same command."""
    job = Job.begun(hosts, tmp_path, "ddp", steps=STEPS)
    job.kill(2, launcher=True)
    job.start_again(2)
    job.wait_until(lambda: joined(job, 2, 4) and joined(job, 2, 5))
    assert codes(job) == [0, 0, 0], job.said(2)[-3000:]
    assert check(job)[-1] == "(0, 1, 2, 3, 4, 5)"
    assert "2 processes stand by" in job.said(2)


def test_it_ends_when_it_is_told_to_and_leaves_nothing_behind(hosts: Hosts, tmp_path: Path) -> None:
    job = Job.begun(hosts, tmp_path, "ddp", standing_by=1, steps=STEPS)
    job.ranks(1)[3].kill()
    job.wait_until(lambda: joined(job, 2, 3))
    there = psutil.Process(job.launchers[2].pid).children(recursive=True)
    job.launchers[2].terminate()
    assert job.code(2) == 128 + signal.SIGTERM
    assert not psutil.wait_procs(there, timeout=10)[1]
    assert codes(job)[:2] == [0, 0], job.said(0)[-3000:]
    assert check(job) == ["(0, 1, 2, 3)", "(0, 1, 2)", "(0, 1, 2, 3)", "(0, 1, 2)"]
