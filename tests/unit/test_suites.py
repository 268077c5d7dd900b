"""Other people's suites: nothing that fails here and not on gloo is without a reason, and the page has the table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks.suites.__main__ as suites
from benchmarks.suites import recorder, table
from benchmarks.suites.catalogue import SUITES, Part
from benchmarks.suites.job import Ended

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((table.FOLDER / "results").glob("*.json"))
PAGE = (ROOT / "docs" / "compatibility.md").read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_whatever_is_ours_has_a_reason(file: Path) -> None:
    results = json.loads(file.read_text())
    assert results["tests"] and table.without_reason(results) == []
    assert results["machine"]["day"] and results["versions"]["torch"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_page_beside_the_results_says_the_same(file: Path) -> None:
    assert file.with_suffix(".md").read_text() == table.rendered(json.loads(file.read_text()))


def test_the_page_has_the_table_of_the_committed_results() -> None:
    rows = [table.row(results) for results in table.newest()]
    assert rows
    shown = PAGE.partition("## What came out")[2].partition("\n## ")[0]
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    assert lines == [*table.header(), *rows], "print it with: python -m benchmarks.suites --table"


def test_the_page_says_what_each_suite_is() -> None:
    assert [name for name in SUITES if f"\n| {name} | " not in PAGE.partition("## What came out")[0]] == []


def test_each_reason_is_of_a_test_that_is_ours_and_stands_on_the_page() -> None:
    ours = {(results["suite"], name) for results in table.newest() for name in table.ours(results)}
    reasons = {(suite, name): why for suite, known in table.reasons().items() for name, why in known.items()}
    assert set(reasons) == ours
    assert [name for (_, name), why in reasons.items() if f"`{name}`" not in PAGE or why not in PAGE] == []


@pytest.mark.parametrize(
    ("plain", "guarded", "kind"),
    [
        ("passed", "passed", "passed"),
        ("passed", "failed", "ours"),
        ("passed", "skipped", "ours"),
        ("passed", "not run", "ours"),
        ("skipped", "failed", "ours"),
        ("failed", "failed", "theirs"),
        ("failed", "not run", "theirs"),
        ("failed", "passed", "only here"),
        ("skipped", "skipped", "skipped"),
    ],
)
def test_a_test_counts_as_ours_wherever_it_does_worse_here(plain: str, guarded: str, kind: str) -> None:
    assert table.kind_of(plain, guarded) == kind


def test_another_result_is_ours_though_both_end_well() -> None:
    ends = {"gloo": {"end": "passed", "result": "0.1"}, "ncclguard": {"end": "passed", "result": "0.2"}}
    results: dict[str, Any] = {"backends": ["gloo", "ncclguard"], "tests": {"ddp": ends}}
    assert table.kinds(results) == {"ddp": "ours"}


def test_a_failure_is_told_by_the_last_exception_of_its_report() -> None:
    report = "E   RuntimeError: Process 0 exited\nE   torch.distributed.DistStoreError: wait timeout\nE   \nmore"
    assert recorder.RAISED.findall(report)[-1] == "torch.distributed.DistStoreError: wait timeout"


def test_a_result_has_no_folders_of_the_machine_that_it_is_from() -> None:
    said = "ImportError: cannot import name 'a' from 'b.c' (/opt/b/c.py), in '/tmp/x1/y'; see https://a.b/c/d"
    short = "ImportError: cannot import name 'a' from 'b.c' (c.py), in 'y'; see https://a.b/c/d"
    assert recorder.of_any_machine(said) == short


def test_a_file_that_cannot_be_imported_has_failed_with_the_exception_behind_it() -> None:
    text = "ImportError while importing test module '/opt/test_a.py'.\nE   ImportError: cannot import name 'a'\n"
    assert suites.last_words(Ended(2, 1.0, text)) == "ImportError: cannot import name 'a'"


def test_torchs_tests_of_a_backend_ask_for_the_one_in_whose_place_another_is(tmp_path: Path) -> None:
    asked = {name: SUITES[name].parts(2, tmp_path)[0].env["BACKEND"] for name in ("torch", "torch-nccl")}
    assert asked == {name: SUITES[name].place for name in asked} == {"torch": "gloo", "torch-nccl": "nccl"}


@pytest.mark.parametrize(
    ("place", "asked", "begins", "instead"),
    [
        ("gloo", None, True, "ours"),
        ("gloo", None, False, ""),  # new_group: of the job's backend
        ("gloo", "cpu:gloo", False, "ours"),
        ("gloo", "cpu:gloo,cuda:nccl", True, ""),
        ("nccl", None, True, "cpu:gloo,cuda:ours"),
        ("nccl", "nccl", False, "ours"),
        ("nccl", "cpu:gloo,cuda:nccl", True, "cpu:gloo,cuda:ours"),
        ("nccl", "gloo", True, ""),
    ],
)
def test_a_suite_gets_another_backend_where_it_asks_for_the_one_in_whose_place_that_is(
    place: str, asked: str | None, begins: bool, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: Any = importlib.util.spec_from_file_location("place", table.FOLDER / "place" / "sitecustomize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PLACE", place)
    monkeypatch.setattr(module, "BACKEND", "ours")
    assert module.asked_for(asked, begins) == instead


@pytest.mark.processes
def test_a_test_that_hangs_is_ended_with_its_ranks_and_one_that_makes_no_group_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(THEIRS)
    part = Part(
        "theirs", (str(tmp_path / "test_theirs.py"),), 500, {"SUITES_LIMIT": "10"}, pytest=True, prefix="theirs::"
    )
    ends = suites.run(part, "ncclguard", tmp_path)
    assert {name: end["end"] for name, end in ends.items()} == {
        "theirs::test_makes_no_group": "skipped",
        "theirs::test_makes_one": "passed",
        "theirs::test_makes_one_of_gloos_class": "passed",
        "theirs::test_hangs": "failed",
    }
    assert ends["theirs::test_hangs"]["said"] == "had not ended after 10 s"


THEIRS = """
import multiprocessing, time
import torch
import torch.distributed as dist

def test_makes_no_group():
    pass

def test_makes_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_backend() == "ncclguard"
    dist.destroy_process_group()

def test_makes_one_of_gloos_class():
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=50.0)  # torch's wrapper gives it seconds
    assert group.name() == "ncclguard" and group.allreduce(torch.ones(1)).wait()

def test_hangs():
    rank = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    rank.start()
    rank.join()
"""


@pytest.mark.processes
def test_pipelines_of_ranks_that_want_gpus_run_on_cpus_and_one_that_fails_leaves_the_next_alone(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's classes of tests need it")
    (tmp_path / "test_pipelines.py").write_text(PIPELINES)
    command = (str(tmp_path / "test_pipelines.py"), "-p", "benchmarks.suites.programs.pipelining_plugin")
    part = Part("pipelines", command, 500, {"SUITES_LIMIT": "60", "WORLD_SIZE": "2"}, pytest=True)
    ends = suites.run(part, "ncclguard", tmp_path)
    assert {name: end["end"] for name, end in ends.items()} == {
        "Pipelines::test_1_fails": "failed",
        "Pipelines::test_2_passes": "passed",
    }
    assert "this one fails" in ends["Pipelines::test_1_fails"]["said"]


PIPELINES = """
import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed
from torch.testing._internal.common_distributed import requires_nccl
from torch.testing._internal.common_utils import skip_but_pass_in_sandcastle_if

Continuous = getattr(common_distributed, "MultiProcContinuousTest", None) or common_distributed.MultiProcContinousTest

class Pipelines(Continuous):
    @classmethod
    def backend_str(cls):
        return "nccl"

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.device = torch.device(f"cuda:{cls.rank % torch.cuda.device_count()}")

    @requires_nccl()
    @skip_but_pass_in_sandcastle_if(torch.cuda.device_count() < 2, "2 GPUs are needed")
    def test_1_fails(self):
        raise ValueError("this one fails")

    @requires_nccl()
    @skip_but_pass_in_sandcastle_if(torch.cuda.device_count() < 2, "2 GPUs are needed")
    def test_2_passes(self):
        total = torch.ones(1, device=self.device)
        dist.all_reduce(total)
        assert total.item() == self.world_size == dist.get_world_size() == 2 and dist.get_rank() == self.rank
"""


def test_a_suite_of_a_repository_says_how_to_get_it(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["suites", "nanogpt"])
    with pytest.raises(SystemExit):
        suites.main()
    repository = SUITES["nanogpt"].repository
    assert repository is not None
    assert f"git clone {repository.url} FOLDER && git -C FOLDER checkout {repository.commit}" in capsys.readouterr().err


def test_the_page_has_the_newest_table_of_fault_kits() -> None:
    newest = max((table.FOLDER / "results").glob("fault-kits-*.md"))
    assert newest.read_text() in PAGE, "run it anew with: python -m benchmarks.suites.fault_kits --out FILE"


def test_a_run_that_was_broken_off_goes_on_and_is_no_result_before(tmp_path: Path) -> None:
    def results(done: int, tests: dict[str, Any], skipped: dict[str, list[str]], seconds: float) -> dict[str, Any]:
        return {
            "suite": "deepspeed", "ranks": 2, "backends": ["gloo", "ncclguard"], "versions": {"torch": "2.13.0"}, "parts": [done, 3],
            "machine": {"day": "2026-11-28"}, "seconds": {"gloo": seconds, "ncclguard": seconds}, "tests": tests, "skipped": skipped,
        }  # fmt: skip

    passed = {"gloo": {"end": "passed"}, "ncclguard": {"end": "passed"}}
    first, rest = (
        results(1, {"a": passed}, {"no GPU": ["b"]}, 2.5),
        results(3, {"c": passed}, {"no GPU": ["d"], "slow": ["e"]}, 4.0),
    )
    file = tmp_path / "run.json"
    file.write_text(json.dumps(first))
    assert table.is_broken_off(first) and table.newest(tmp_path) == []
    whole = table.continued(first, rest)
    file.write_text(json.dumps(whole))
    assert not table.is_broken_off(whole) and table.newest(tmp_path) == [whole]
    assert (list(whole["tests"]), whole["seconds"]["gloo"]) == (["a", "c"], 6.5)
    assert whole["skipped"] == {"no GPU": ["b", "d"], "slow": ["e"]}
