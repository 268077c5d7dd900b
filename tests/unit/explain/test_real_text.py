"""The answer does not depend on what terminals, launchers and shippers did to the lines, and nothing makes the reader fail.

The cases and what is done to them are those of benchmarks/diagnosis.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ncclguard_explain import Report, explain

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "diagnosis"))
from base_cases import Case, cases
from variants import CALM, VARIANTS

pytestmark = pytest.mark.slow  # hundreds of texts in all forms

Explain = Callable[..., Report]
CASES = {case.name: case for case in cases()}
#: A break inside the one word that a short message is known by: "died u" / "nexpectedly" is uncertain, and no more.
SHORT = {("wrapped", "02-spawn"), ("wrapped", "02-vllm"), ("wrapped", "10-task"), ("wrapped", "20-k8s-evicted")}


def report_on(tmp_path: Path, lines: list[str]) -> Report:
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return explain([str(path)])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CASES)
def test_case_in_each_form(tmp_path: Path, name: str, variant: str) -> None:
    case: Case = CASES[name]
    for seed in range(3 if variant.startswith("wrapped") else 1):
        report = report_on(tmp_path, VARIANTS[variant](case.lines, random.Random(seed)))
        assert set(report.culprits) <= set(case.culprits), "a healthy rank is named"
        assert report.incident == case.incident
        if (variant, name) in SHORT:
            continue
        assert list(report.culprits) == sorted(case.culprits), report.reason
        assert not case.classes or report.cause_class in case.classes
        assert not case.decisions or report.decision in case.decisions
        assert set(case.suspects) <= set(report.suspects)
        for field, value in case.values.items():
            got = report.effective_timeout_ms if field == "timeout_ms" else getattr(report.collective, field)
            assert got == value, field


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if name.startswith(("04-silent", "12-nccl2-silent", "13"))]
)
def test_cut_anywhere_at_its_end_a_log_still_says_who_waits(tmp_path: Path, name: str) -> None:
    """What a paste leaves off may hide the answer; a rank whose line is cut is not taken for silent."""
    text = "\n".join(CASES[name].lines)
    for share in (0.97, 0.9, 0.8, 0.7):
        kept = text[: int(len(text) * share)]
        report = report_on(tmp_path, [kept])
        assert report.incident
        assert all(f"[rank{rank}]" not in kept for rank in report.culprits)


@pytest.mark.parametrize("share", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.incident])
def test_cut_inside_the_line_that_shows_it_is_no_calm_log(tmp_path: Path, name: str, share: float) -> None:
    """What begins like a line of an incident and breaks off is "uncertain", and its beginning accuses nobody."""
    lines = CASES[name].lines
    shows = next(n for n in range(1, len(lines) + 1) if report_on(tmp_path, lines[:n]).incident)
    kept = "\n".join([*lines[: shows - 1], lines[shows - 1][: int(len(lines[shows - 1]) * share)]])
    path = tmp_path / "cut.log"
    path.write_text(kept, encoding="utf-8")
    report = explain([str(path)])
    assert report.incident, kept[-80:]
    assert set(report.culprits) <= set(CASES[name].culprits)


FOLDERS = sorted(Path(__file__).parents[3].glob("benchmarks/diagnosis/cases/blind-*"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_logs_that_found_a_defect(folder: Path) -> None:
    truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    report = explain([str(path) for path in folder.iterdir() if path.name != "truth.json"])
    assert report.incident == truth["incident"]
    assert list(report.culprits) == truth["culprits"]
    if "timeout_ms" in truth:
        assert report.effective_timeout_ms == truth["timeout_ms"]


PIECES = st.one_of(
    st.sampled_from([line for case in CASES.values() for line in case.lines if line]),
    st.sampled_from(CALM),
    st.text(max_size=60),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES, max_size=25), st.sampled_from(sorted(VARIANTS)), st.integers(0, 1000), st.integers(0, 400))
def test_no_mixture_of_lines_makes_it_fail(tmp_path: Path, lines: list[str], variant: str, seed: int, cut: int) -> None:
    text = "\n".join(VARIANTS[variant](lines, random.Random(seed)))
    path = tmp_path / "train.log"
    path.write_bytes(text.encode("utf-8", "replace")[cut:] + b"\n[rank0]: step 1 loss 0.5\n")  # an empty log is refused
    report = explain([str(path)])
    assert report.decision in ("restart", "restart-without", "fix-code", "fix-environment", "raise-limit", "unknown")
    report.to_json()


CALM_LINES = st.one_of(
    st.sampled_from(CALM),
    st.from_regex(r"\[rank[0-7]\]: step \d{1,4} loss 0\.\d{1,4}", fullmatch=True),
    st.sampled_from(
        [
            "INFO timeout set to 1800 s",
            "val/error 0.31, error rate 0.02",
            "node0:1:2 [0] NCCL INFO Connected all rings",
            "node0:1:2 [3] NCCL INFO Channel 00/0 : 3[3] -> 4[4] via P2P/IPC",
            "[I ProcessGroupNCCL.cpp:502] [Rank 2] NCCL watchdog thread started!",
            "Retrying download of shard 7",
            "signal handler installed, SIGTERM saves a checkpoint",
            "Saving model checkpoint to out/checkpoint-500",
        ]
    ),
    st.text(max_size=80),
    st.integers(0, 10**12).map(str),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CALM_LINES, max_size=40), st.sampled_from(sorted(VARIANTS)), st.integers(0, 1000))
def test_calm_log_names_nobody(tmp_path: Path, lines: list[str], variant: str, seed: int) -> None:
    path = tmp_path / "train.log"
    lines = ["[rank0]: step 1 loss 0.5", *lines]  # an empty log is refused
    path.write_bytes("\n".join(VARIANTS[variant](lines, random.Random(seed))).encode("utf-8", "replace"))
    report = explain([str(path)])
    assert report.culprits == () and not report.incident
