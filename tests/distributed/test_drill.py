"""`ncclguard drill`: a real run is struck, the right rank is found, and nothing is struck without permission."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ncclguard.faults.drill import build_parser, chosen, main
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("preforked_programs")

PROGRAM = """
import torch, torch.distributed as dist, ncclguard as ng
dist.init_process_group("gloo")
for step in range(6):
    ng.safe_all_reduce(torch.ones(100), timeout=60).raise_if_failed()
dist.destroy_process_group()
"""


VARIABLES = {"NCCLGUARD_ALLOW_DRILL": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """The end of a drill."""

    code: int
    out: str
    errors: str

    def findings(self, folder: Path) -> dict[str, Any]:
        """Return the drill's JSON, which has to agree with its exit code."""
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        assert found["passed"] == (self.code == 0)
        return {**found, "text": self.out, "errors": self.errors}


@pytest.fixture
def drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command in this process, in `tmp_path`: one of its own would import torch, and so would what forks its ranks."""
    monkeypatch.chdir(tmp_path)
    for name, value in {**VARIABLES, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> Done:
        code = main(["--timeout", "90", *arguments])
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture
def findings(drill: Callable[..., Done], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*arguments: str, code: int = 0) -> dict[str, Any]:
        done = drill("--json", "found.json", *arguments)
        assert done.code == code, done.out + done.errors
        return done.findings(tmp_path)

    return run


@pytest.mark.parametrize("value", ["", "0", "yes"])
def test_without_permission_nothing_is_run(
    value: str, drill: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCLGUARD_ALLOW_DRILL", value)
    done = drill("--fault", "kill", "--rank", "1", "--", "touch", "was_run")
    assert done.code == 2
    assert "NCCLGUARD_ALLOW_DRILL is not 1; set NCCLGUARD_ALLOW_DRILL=1 where that may happen" in done.errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--fault", "late", "--rank", "1", "--", "true"], "give --seconds, longer than the job's limit"),
        (["--fault", "kill", "--", "true"], "give --rank R with a command"),
        (["--fault", "kill", "--rank", "9"], "--rank 9 is not one of the 4 ranks"),
        (["--fault", "kill", "--rank", "1", "--", "/no/such/program"], "cannot be run"),
        (["--fault", "kill", "--rank", "1", "--seconds", "3"], "kill takes no seconds"),
        (["--fault", "kill", "--engine", "engine 4"], "it has engine 1, engine 2, engine 3, each with a worker 0"),
        (["--fault", "stop", "--engine", "A", "--", "true"], "give --seconds, longer than a third of the limit"),
        (["--fault", "slow", "--engine", "engine 1"], "slow cannot strike an engine"),
        (
            ["--fault", "skip", "--rank", "1", "--raw"],
            "skip changes a guarded call, so it cannot be raw; leave raw out",
        ),
    ],
)
def test_a_drill_that_cannot_be_is_refused(arguments: list[str], told: str, drill: Callable[..., Done]) -> None:
    done = drill(*arguments)
    assert done.code == 2
    assert told in done.errors


def test_a_killed_rank_of_the_built_in_job_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    """Started as users start it: nothing is forked from a process that the tests keep."""
    fault = ["--fault", "kill", "--rank", "2", "--op", "3", "--limit", "20", "--timeout", "90", "--json", "found.json"]
    ended = subprocess.run(
        [sys.executable, "-m", "ncclguard", "drill", *fault], cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env={**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    found = Done(0, ended.stdout, ended.stderr).findings(tmp_path)
    assert (found["named"], found["cause"]) == ([2], "lost"), found["text"]
    assert sorted(found["known_by"]) == ["0", "1", "3"]
    assert max(found["known_by"].values()) < 10
    assert sorted(found["went_on"]) == ["0", "1", "3"]
    assert found["participants"] == [0, 1, 3]
    assert found["torn"] == []
    assert "SIGKILL: 2" in found["ended"]
    assert [Path(page).parent.name for page in found["reports"]] == ["ncclguard-incidents"]
    assert "named:     rank 2, lost: right" in found["text"]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("kill", "lost"),
        pytest.param("stop", "stuck", marks=pytest.mark.thorough),
        pytest.param("mismatch", "diverged", marks=pytest.mark.thorough),
        pytest.param("late", "late", marks=pytest.mark.thorough),
        pytest.param("gil", "stuck", marks=pytest.mark.thorough),
        pytest.param("exception", "exited", marks=pytest.mark.thorough),
        pytest.param("exit", "exited", marks=pytest.mark.thorough),
    ],
)
def test_a_struck_engine_of_the_built_in_channel_is_left_out_and_comes_back(
    fault: str, cause: str, findings: Callable[..., dict[str, Any]]
) -> None:
    found = findings("--fault", fault, "--engine", "engine 2")
    assert (found["version"], found["left_out"]) == (1, {"engine 2": cause}), found["text"]
    assert found["engines"] == found["others"] == ["engine 1", "engine 3"]
    assert found["took"] < found["limit"] + 2
    assert found["back"] is not None and "went on:   yes, version 1 is on engine 1, engine 3" in found["text"]


def test_an_engine_of_another_shape_is_named_also_where_there_is_no_other(
    findings: Callable[..., dict[str, Any]],
) -> None:
    found = findings("--fault", "mismatch", "--engine", "engine 1", "--ranks", "2")
    assert (found["left_out"], found["engines"]) == ({"engine 1": "diverged"}, []), found["text"]


CHANNEL = """
import sys, time, torch
from ncclguard.weights import Receiver, Sender
address = "tcp://127.0.0.1:" + sys.argv[1]
if sys.argv[2] == "trainer":
    with Sender(address, name="mine", timeout=30) as sender:
        sender.wait_for(2, within=60)
        for version in range(4):
            sender.publish({"weight": torch.ones(9)}, version)
            time.sleep(0.3)
else:
    with Receiver(address, name="mine", engine=sys.argv[2]) as receiver:
        while receiver.version != 3:
            update = receiver.next(timeout=20)
            if update is None:
                break
            update.commit()
"""


def test_a_channel_of_ones_own_is_struck_without_a_change(
    findings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "channel.py").write_text(CHANNEL)
    (tmp_path / "run.sh").write_text(
        f"{sys.executable} channel.py $1 trainer & trainer=$!\n"
        f"{sys.executable} channel.py $1 A & {sys.executable} channel.py $1 B &\n"
        "wait $trainer\n"
    )
    command = ["sh", "run.sh", str(free_port())]
    found = findings("--fault", "kill", "--engine", "B", "--op", "2", "--", *command)
    assert (found["version"], found["left_out"], found["engines"]) == (2, {"B": "lost"}, ["A"]), found["text"]
    assert found["limit"] == 30 and found["publishes"] == 4
    assert found["back"] is None and "nothing has started it again in time" in found["text"]


def test_a_rank_that_is_cut_off_is_named_by_all_others(findings: Callable[..., dict[str, Any]]) -> None:
    """Its connections, the store's too, are silent for 12 s; tests/faults/test_isolation.py shows that they live on."""
    fault = ["--fault", "partition", "--rank", "1", "--op", "2", "--seconds", "12", "--limit", "5", "--ranks", "3"]
    found = findings(*fault)
    assert found["named"] == [1], found["text"]
    assert found["cause"] in ("stuck", "unknown")
    assert sorted(found["known_by"]) == ["0", "2"]
    assert found["torn"] == []


@pytest.mark.slow
def test_a_slow_rank_is_named_by_all_others(findings: Callable[..., dict[str, Any]]) -> None:
    """It hangs in nothing: `watch` finds it in the shares of time that the ranks wait, after 43 s at the earliest."""
    found = findings("--fault", "slow", "--rank", "2", "--limit", "60", "--timeout", "240")
    assert (found["named"], found["cause"]) == ([2], "slow"), found["text"]
    assert sorted(found["known_by"]) == ["0", "1", "3"]
    assert "slow: rank 2 on" in found["summary"]


def test_an_unchanged_program_under_torchrun(findings: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Out of memory in rank 1; the program gives up, as it raises a failed outcome."""
    (tmp_path / "train.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py"]
    found = findings("--fault", "oom", "--rank", "1", "--op", "4", "--", *launcher)
    assert (found["named"], found["cause"]) == ([1], "failed"), found["text"]
    assert "rank 1 raised torch.OutOfMemoryError" in found["summary"]
    assert sorted(found["known_by"]) == ["0", "2"]
    assert found["went_on"] == {}
    assert "exit code 1" in found["ended"]


def test_a_fault_that_strikes_nowhere_fails_the_drill(findings: Callable[..., dict[str, Any]]) -> None:
    command = ["--fault", "kill", "--rank", "1", "--", sys.executable, "-c", "pass"]
    found = findings(*command, code=1)
    assert "no rank came up with ncclguard" in found["text"]


def test_the_seed_chooses_the_same_again() -> None:
    def fault(seed: int) -> str:
        return str(chosen(build_parser().parse_args(["--fault", "late", "--seed", str(seed)]), has_command=False))

    assert fault(7) == fault(7)
    assert len({fault(seed) for seed in range(20)}) > 5


@pytest.mark.parametrize(("fault", "cause"), [("late", "late"), ("oom", "failed")])
def test_a_job_under_watch_is_struck_by_the_number_of_its_collectives(
    fault: str, cause: str, findings: Callable[..., dict[str, Any]]
) -> None:
    """DistributedDataParallel makes no guarded call; what the struck rank does in its main thread is asked of it from another."""
    found = findings("--fault", fault, "--rank", "2", "--raw", "--limit", "12")
    assert (found["named"], found["cause"]) == ([2], cause), found["text"]
    assert sorted(found["known_by"]) == ["0", "1", "3"]
    assert sorted(found["went_on"]) == (["0", "1", "2", "3"] if fault == "late" else [])
    if fault == "oom":
        assert "rank 2 raised torch.OutOfMemoryError at ncclguard/faults/drill_job.py" in found["summary"]


WATCHED = """
import time, torch, torch.distributed as dist, ncclguard as ng
dist.init_process_group("gloo")
{watch}
store = dist.distributed_c10d._get_default_store()  # no collective has to wait for a rank that is slow to start
store.set(f"here {{dist.get_rank()}}", "")
store.wait([f"here {{rank}}" for rank in range(dist.get_world_size())])
for step in range({steps}):
    time.sleep(0.02)
    dist.all_reduce(torch.ones(100))
dist.destroy_process_group()
"""


def watched_job(folder: Path, watch: str = "ng.watch(timeout=4)", steps: int = 40, ranks: int = 3) -> list[str]:
    (folder / "train.py").write_text(WATCHED.format(watch=watch, steps=steps))
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "train.py",
    ]
    return ["--", *launcher]


def test_a_job_that_only_calls_watch_is_struck_without_being_told_so(
    findings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """As the how-to for torchrun has it: the rank is named by the incident of `watch`, and the job goes on."""
    found = findings("--fault", "late", "--rank", "2", "--seconds", "10", *watched_job(tmp_path))
    assert (found["named"], found["cause"], found["raw"]) == ([2], "late", True), found["text"]
    assert sorted(found["known_by"]) == ["0", "1"]
    assert "named:     rank 2, late: right" in found["text"]
    assert "exit code 0" in found["ended"]


@pytest.mark.parametrize(
    ("arguments", "watch", "told"),
    [
        (["--fault", "oom", "--op", "90"], "ng.watch(timeout=60)", "issued up to 5 collectives in the default group"),
        (["--fault", "skip"], "ng.watch(timeout=60)", "skip changes a guarded call, and this job only has watch()"),
        (["--fault", "oom"], "", "makes no guarded call and does not call watch()"),
    ],
)
def test_a_fault_that_struck_nothing_says_why(
    arguments: list[str], watch: str, told: str, findings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    found = findings(*arguments, "--rank", "1", *watched_job(tmp_path, watch, 5, ranks=2), code=1)
    assert told in found["text"], found["text"]
