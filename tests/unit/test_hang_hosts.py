"""`ncclguard hang` on many hosts and again and again, by stubs of kubectl, ssh and Slurm: what each host says is one file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ncclguard.hang import command, hosts
from ncclguard.hang.command import main
from ncclguard.hang.report import EndedRow, HangReport, JobReport, NothingToReport, RankRow, judged
from ncclguard.hang.stacks import Kind, Motion

#: Prints what stands in the file of a host, and else says on stderr what a program says that has none; notes its words.
STUB = """#!{python}
import pathlib, sys, time
folder, words = pathlib.Path({folder!r}), sys.argv[1:]
with open(folder / "calls", "a") as calls:
    print(pathlib.Path(sys.argv[0]).name, *words, file=calls)
if words[:1] == ["get"]:
    print((folder / "pods").read_text(), end="")
    sys.exit()
host = next(word for word in words if word.startswith("gpu-"))
if host == "gpu-hangs":
    time.sleep(60)
answer = folder / host
if not answer.exists():
    sys.exit("ncclguard hang: no job runs here" if host == "gpu-empty" else f"{{host}}: Connection timed out")
print("Welcome to", host)
print(answer.read_text())
"""
pytestmark = pytest.mark.processes
Answers = Callable[..., None]


def seen(host: str, *ranks: int, asleep: int = 3, stack: str = "train.py:2 step") -> HangReport:
    """What one host reports: ranks that wait for rank `asleep`."""
    rows = []
    for rank in ranks:
        told = {"kind": Kind.SLEEP, "stack": ("train.py:9 pause",)} if rank == asleep else {
            "kind": Kind.COLLECTIVE, "op": "all_reduce", "world": True, "stack": (stack, "all_reduce")}  # fmt: skip
        rows.append(RankRow(rank=rank, host=host, pid=100 + rank, state="S", motion=Motion.STILL, **told))  # type: ignore[arg-type]
    return HangReport(hosts=(host,), jobs=(judged("gpu-01:29500", 4, rows, [], 2.5, []),))


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("kubectl", "ssh"):
        (programs / name).write_text(STUB.format(python=sys.executable, folder=str(tmp_path)))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")

    def write(**reports: HangReport) -> None:
        for name, report in reports.items():
            (tmp_path / name.replace("_", "-")).write_text(report.model_dump_json(indent=2))

    return write


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_each_host_is_asked_by_ssh_and_one_verdict_is_given(
    answers: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(gpu_01=seen("gpu-01", 0, 1), gpu_02=seen("gpu-02", 2, 3))
    assert main(["--ssh", "gpu-01,gpu-02", "--call", "/opt/ncclguard", "--json", "-", "--exit-code"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["hosts"], report["silent"]) == (["gpu-01", "gpu-02"], [])
    assert [(job["culprits"], job["unseen"]) for job in report["jobs"]] == [([3], [])]
    assert "ssh -o BatchMode=yes -o ConnectTimeout=10 -- gpu-01 /opt/ncclguard hang --json - --seconds 2.5" in calls(
        tmp_path
    )


def test_a_host_that_does_not_answer_is_a_finding(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks may be what the others wait for: nobody is named."""
    monkeypatch.setattr(hosts, "ANSWER_WITHIN", 2.0)
    answers(gpu_01=seen("gpu-01", 0, 1))
    assert main(["--ssh", "gpu-01,gpu-hangs,gpu-gone,gpu-empty", "--seconds", "1"]) == 0
    said = capsys.readouterr().out
    assert "No ranks from gpu-hangs: did not answer within 3 s" in said
    assert "No ranks from gpu-gone: gpu-gone: Connection timed out" in said
    assert "No ranks from gpu-empty: no job runs here" in said
    assert "ranks 2-3: not seen on these hosts" in said
    assert "held up the job" not in said


def test_where_no_host_has_seen_a_rank_it_says_why(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ssh", "gpu-gone"]) == 2
    assert "none of 1 hosts has seen a rank; gpu-gone: gpu-gone: Connection timed out" in capsys.readouterr().err


def test_each_pod_of_a_selector_is_asked(answers: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(gpu_0=seen("gpu-0", 0, 1), gpu_1=seen("gpu-1", 2, 3))
    (tmp_path / "pods").write_text("gpu-0 Running\ngpu-1 Running\ngpu-2 Pending\n")
    assert main(["--kubectl", "job-name=train -n training", "--environ", "RUN=7"]) == 0
    said = capsys.readouterr().out
    assert "Rank 3 held up the job: late." in said
    assert "No ranks from gpu-2: the pod is Pending" in said
    assert calls(tmp_path)[0].startswith("kubectl get pods -l job-name=train -n training -o jsonpath=")
    assert "kubectl exec gpu-0 -n training -- ncclguard hang --json - --seconds 2.5 --environ RUN=7" in calls(tmp_path)


#: As much of Ray as is asked: `ADDRESS` is a file with its nodes, each a name with how it is.
RAY = """
import json, os, pathlib
def init(address, **_):
    global table
    if address == "nowhere":
        raise ConnectionError("Could not find any running Ray instance.")
    table = json.loads(pathlib.Path(address).read_text())
def nodes():
    return [{"NodeID": name, "NodeManagerHostname": name, "NodeManagerAddress": name, "Alive": how != "dead" and how != "removed",
             "DeathReason": {"dead": 2, "removed": 1}.get(how, 0), "DeathReasonMessage": "health check failed"}
            for name, how in table.items()]
class remote:
    def __init__(self, call): self.call = call
    def options(self, num_cpus, max_retries, scheduling_strategy): self.node = scheduling_strategy.node; return self
    def remote(self, command, within):
        os.environ["HERE"] = self.node
        answer = self.call(command, within) if table[self.node] == "answers" else table[self.node]
        return self.node, answer
def wait(asked, num_returns, timeout):
    return [one for one in asked if one[1] != "hangs"], []
def get(one):
    if isinstance(one[1], str):
        raise RuntimeError(one[1])
    return one[1]
"""


def test_each_node_of_a_ray_cluster_is_asked_by_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strategies = "class NodeAffinitySchedulingStrategy:\n    def __init__(self, node, soft): self.node = node\n"
    for file, text in {"__init__": RAY, "util/__init__": "", "util/scheduling_strategies": strategies}.items():
        (tmp_path / "ray" / file).with_suffix(".py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ray" / file).with_suffix(".py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    for host, report in {"gpu-0": seen("gpu-0", 0, 1), "gpu-1": seen("gpu-1", 2, 3)}.items():
        (tmp_path / host).write_text(report.model_dump_json())
    nodes = {
        "gpu-0": "answers",
        "gpu-1": "answers",
        "gpu-2": "hangs",
        "gpu-3": "dead",
        "gpu-4": "removed",
        "gpu-5": "refuses",
    }
    (tmp_path / "nodes").write_text(json.dumps(nodes))
    call = f"sh -c 'cat {tmp_path}/$HERE'"
    assert main(["--ray", str(tmp_path / "nodes"), "--call", call, "--exit-code"]) == 1
    said = capsys.readouterr().out
    assert "Rank 3 held up the job: late." in said
    assert said.count("No ranks from") == 3
    assert "No ranks from gpu-2: did not answer within 32 s" in said
    assert "No ranks from gpu-3: its node of Ray is dead: health check failed" in said
    assert "No ranks from gpu-5: refuses" in said
    assert main(["--ray", "nowhere"]) == 2
    assert "ncclguard hang: Ray: ConnectionError: Could not find any running Ray instance." in capsys.readouterr().err


def test_jobs_of_two_hosts_that_are_called_by_a_process_are_two(tmp_path: Path) -> None:
    """Containers number their processes from 1."""
    for host, ranks in (("a", (0, 1)), ("b", (2, 3))):
        (job,) = seen(host, *ranks).jobs
        job = job.model_copy(update={"name": "Ray Trainer (57)"})
        (tmp_path / f"{host}.json").write_text(HangReport(hosts=(host,), jobs=(job,)).model_dump_json())
    assert [len(job.ranks) for job in command.merged([tmp_path]).jobs] == [2, 2]


def test_no_pod_with_these_labels(answers: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pods").write_text("")
    assert main(["--kubectl", "job-name=none"]) == 2
    assert "no pod has the labels job-name=none" in capsys.readouterr().err


def test_without_the_program_it_says_which(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["--slurm", "42"]) == 2
    assert "squeue cannot be started: No such file or directory" in capsys.readouterr().err


def test_what_was_collected_is_not_asked_for_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["somewhere", "--ssh", "gpu-01"])
    assert "give either PATH, or where to look" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--pid", "17", "--slurm", "42"])
    assert "--pid is a process of this host" in capsys.readouterr().err


def moving() -> HangReport:
    return HangReport(hosts=("a",), jobs=(JobReport(name="gpu-01:29500", world_size=4),))


def ended() -> HangReport:
    waits = seen("a", 0, 1).jobs[0].ranks
    return HangReport(hosts=("a",), jobs=(judged("j", 3, waits, [EndedRow(rank=2, host="a", exit_code=-9)], 2.5, []),))


WATCHED: dict[str, tuple[Sequence[HangReport], int, str]] = {
    "at the second look at the same place": ([moving(), seen("a", *range(4)), seen("a", *range(4))], 3, "Rank 3 held up"),
    "not while the places change": (
        [seen("a", *range(4)), seen("a", *range(4), stack="train.py:7 evaluate"), moving()], 4, ""
    ),
    "not while another rank is awaited": ([seen("a", *range(4), asleep=n) for n in (1, 2, 3)], 4, ""),
    "at once where a rank has ended": ([ended()], 1, "Rank 2 held up the job: lost."),
}  # fmt: skip


@pytest.mark.parametrize("case", WATCHED)
def test_a_job_that_is_watched_is_reported(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports, looks, text = WATCHED[case]
    left, taken = iter(reports), []

    def look(*_: object) -> HangReport:
        taken.append(1)
        report = next(left, None)
        if report is None:
            raise NothingToReport("no job runs here")
        return report

    monkeypatch.setattr(command, "look_here", look)
    assert main(["--watch", "0.01"]) == 0
    said = capsys.readouterr()
    assert len(taken) == looks
    assert text in said.out if text else not said.out
    assert text or "the job has ended, or has left this host" in said.err
