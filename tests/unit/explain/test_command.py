"""The command: without torch, within half a second, with the decision as exit code, on pipes and on logs that still grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from explain_logs import timeout

from ncclguard_explain import explain, follow
from ncclguard_explain.command import main
from ncclguard_explain.decision import EXIT_CODES
from tests.ports import free_port
from tests.unit.ras_server import answering, serving

LOG = "".join(f"{line}\n" for rank in (0, 1, 3) for line in timeout(rank))
ROOT = Path(__file__).parents[3]


def run(*arguments: str, code: str = "", stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "ncclguard", "explain", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=60, env=environment, check=False
    )


@pytest.mark.processes
def test_no_torch_is_imported_not_even_for_a_dump(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(LOG)
    (tmp_path / "comm_lib_trace_rank_0").write_bytes(b"\x80\x02}q\x00X\x07\x00\x00\x00entriesq\x01]q\x02s.")
    done = run(
        code=f"import sys; sys.modules['torch'] = None; import ncclguard_explain as e; print(e.explain([{str(tmp_path)!r}]).culprits)"
    )
    assert done.stdout.strip() == "(2,)", done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    "first", ["import ncclguard", "import torch", "from ncclguard import faults", "import ncclguard.watch.watcher"]
)
def test_the_guard_hooks_itself_in_when_torch_is_imported(first: str) -> None:
    """Whichever comes first; a name that is also a package stays the function."""
    code = f"{first}\nimport torch, ncclguard\nfrom ncclguard.engine import runtime\nprint(runtime._installed, callable(ncclguard.watch))"
    done = run(code=code)
    assert done.stdout.split() == ["True", "True"], done.stderr
    done = run(code="import ncclguard, sys; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False"


def test_decision_as_exit_code(tmp_path: Path) -> None:
    for name, lines, decision in (
        ("calm", "step 1\n", None),
        (
            "assert",
            '[rank2]: Traceback (most recent call last):\n[rank2]:   File "a.py", line 1, in f\n[rank2]: AssertionError: nan\n'
            + LOG,
            "fix-code",
        ),
        ("ecc", "[rank2]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n" + LOG, "restart-without"),
        ("mesh", "RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error\n", "fix-environment"),
        ("unknown", LOG, "unknown"),
    ):
        path = tmp_path / f"{name}.log"
        path.write_text(lines)
        assert main([str(path), "--exit-code"]) == (EXIT_CODES[decision] if decision else 0), name
        assert main([str(path)]) == 0
        report = explain([str(path)])
        assert report.decision == (decision or "unknown")
        assert bool(report.next_step) == report.incident


@pytest.mark.processes
def test_pipe_is_followed_to_its_end(tmp_path: Path) -> None:
    done = run("-", "--follow", "--json", "-", stdin=LOG)
    assert json.loads(done.stdout)["culprits"] == [2], done.stderr


def test_growing_log_is_reported_when_the_answer_changes(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("step 1\n")
    told: list[tuple[int, ...]] = []

    class Enough(Exception):
        pass

    def tell(report: object) -> None:
        told.append(report.culprits)  # type: ignore[attr-defined]
        if told[-1]:
            raise Enough

    def grow() -> None:
        while not told:
            time.sleep(0.01)
        with path.open("a") as stream:
            stream.write(LOG)

    writer = threading.Thread(target=grow)
    writer.start()
    with pytest.raises(Enough):
        follow([str(path)], tell)
    writer.join()
    assert told == [(), (2,)]


RAS = """NCCL version 2.27.5 compiled with CUDA 12.9

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  7 ranks have launched up to operation 6650
  1 ranks have launched up to operation 6649
  Rank 5 -- GPU 5 managed by process 483077 on node 172.16.64.210

"""


def test_running_job_is_asked_twice_by_its_ras_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that do not move between two answers are a hang."""
    monkeypatch.setattr("ncclguard_explain.command.RAS_PAUSE", 0.01)
    asked: list[str] = []
    with serving(answering(RAS, asked=asked)) as address:
        report = explain([], ras=address)
    assert report.culprits == (5,) and report.culprit_confidence == "high"
    assert [command.split(" ")[0] for command in asked] == ["CLIENT", "TIMEOUT", "VERBOSE"] * 2


def test_without_an_address_ras_is_asked_where_nccl_would_listen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ncclguard_explain.command.RAS_PAUSE", 0.01)
    with serving(answering(RAS)) as address:
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        assert main(["--ras"]) == 0
    assert "rank 5" in capsys.readouterr().out
    monkeypatch.setenv("NCCL_RAS_ENABLE", "0")
    assert main(["--ras"]) == 2
    assert "switched off by NCCL_RAS_ENABLE=0" in capsys.readouterr().err


def test_nobody_at_the_ras_address_is_unusable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ras", f"127.0.0.1:{free_port()}"]) == 2
    assert "RAS" in capsys.readouterr().err
