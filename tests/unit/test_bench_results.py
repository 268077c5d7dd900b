"""From the samples of all ranks to rows, verdict, table, JSON and plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ncclguard.bench.arguments import BenchError, parse_arguments
from ncclguard.bench.machine import describe
from ncclguard.bench.measure import LEAST_CYCLES, Samples, plan_for, shape_for, variants_for
from ncclguard.bench.ranks import World
from ncclguard.bench.results import (
    BenchResult,
    Screen,
    SizeResult,
    check_outputs,
    header,
    judge,
    row,
    summarize,
    write_json,
    write_plot,
)

SHAPE = shape_for("all_reduce", 250_000_000, torch.float32, 2)
VARIANTS = variants_for("all_reduce", (False, True))


def samples(scale: float, wrong: int = 0) -> dict[str, Samples]:
    """One rank: plain takes `scale` seconds, the guarded calls 1.1 and 1.2 times that, in three cycles."""
    factors = dict(zip((variant.name for variant in VARIANTS), (1.0, 1.1, 1.2), strict=True))
    return {
        name: Samples([[scale * factor]] * 3, [0.5 - 0.1 * scale] * 3, wrong if name == "plain" else 0, 750_000_000)
        for name, factor in factors.items()
    }


def size_result(wrong: int = 0) -> SizeResult:
    """Two ranks, the second slower and later."""
    found = summarize(SHAPE, VARIANTS, [samples(1.0), samples(2.0, wrong)], complete=True)
    assert found is not None
    return found


def bench_result(sizes: tuple[SizeResult, ...]) -> BenchResult:
    """A run with these rows."""
    ok, verdict = judge(sizes, interrupted=False, failure=None)
    return BenchResult(
        started_at="2026-01-01T00:00:00+00:00",
        command=("python", "-m", "ncclguard.bench"),
        environment=describe(World(0, 2, 0, 2, "torchrun"), "gloo", torch.device("cpu"), ["a", "b", "a"]),
        op="all_reduce",
        dtype="float32",
        rounds=True,
        timeout=300.0,
        sizes=sizes,
        peak_resident_bytes=(1, None),
        interrupted=False,
        failure=None,
        ok=ok,
        verdict=verdict,
    )


def test_figures_by_the_book() -> None:
    """1 GB in 2 s on the slower of two ranks: algbw = busbw = 0.5 GB/s, ratios 1.1 and 1.2, rank 1 lags by 0.1 s."""
    plain, guarded, atomic = size_result().variants
    assert plain.seconds_p50 == 2.0
    assert plain.algbw == pytest.approx(0.5e9)
    assert plain.busbw == pytest.approx(0.5e9)
    assert plain.ratio is None
    assert guarded.ratio is not None
    assert atomic.ratio is not None
    assert (guarded.ratio.median, atomic.ratio.median) == (pytest.approx(1.1), pytest.approx(1.2))
    assert (plain.slowest_rank, plain.lag_seconds) == (1, pytest.approx(0.1))
    assert (plain.calls, plain.cycles, plain.checked) == (3, 3, 1_500_000_000)


@pytest.mark.parametrize(
    ("op", "factor"), [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("broadcast", 1.0)]
)
def test_bus_bandwidth_factors_of_four_ranks(op: str, factor: float) -> None:
    """nccl-tests' factors; gathered and scattered sizes are rounded up to equal parts."""
    shape = shape_for(op, 9, torch.float32, 4)
    assert shape.bus_factor == factor
    assert shape.numel == (12 if op in ("all_gather", "reduce_scatter") else 9)


def test_nothing_measured_gives_no_row() -> None:
    """Ctrl-C before the first whole cycle."""
    empty = {variant.name: Samples() for variant in VARIANTS}
    assert summarize(SHAPE, VARIANTS, [empty, empty], complete=False) is None


def test_one_wrong_element_on_one_rank_is_the_verdict() -> None:
    """Not ok, with the count, the variant and the size; a failure or Ctrl-C does not hide it."""
    for interrupted, failure in ((False, None), (True, None), (False, "rank 1 is gone")):
        ok, verdict = judge([size_result(wrong=1)], interrupted, failure)
        assert not ok
        assert verdict.startswith("WRONG: 1 elements in 1 rows, first in plain at 250,000,000 elements")


def test_verdicts_say_what_happened() -> None:
    """OK with the overhead, FAILED with the reason, INTERRUPTED with what there is."""
    ok, verdict = judge([size_result()], interrupted=False, failure=None)
    assert ok
    assert verdict.startswith("OK: 1 size, 4,500,000,000 result elements checked, none wrong")
    assert "guarded atomic=True 1.20 (1.20 to 1.20)" in verdict
    assert judge([], interrupted=False, failure="rank 1 is gone")[1].startswith("FAILED: rank 1 is gone")
    assert judge([size_result()], interrupted=True, failure=None) == (False, judge([size_result()], True, None)[1])
    assert judge([], interrupted=True, failure=None)[1].startswith("INTERRUPTED: 0 sizes")


def test_the_table_has_the_environment_and_a_row_per_variant(capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe: plain lines without control characters, columns under their names, nothing from other ranks."""
    result = bench_result((size_result(),))
    lines = header(parse_arguments([]), result.environment)
    assert "torch" in lines[0]
    assert "2 hosts (a, ...)" in lines[1]
    with Screen(1) as screen, Screen(1, enabled=False) as silent:
        for target in (screen, silent):
            target.begin("x", 0)
            target.advance(0.5)
            target.size(result.sizes[0])
    printed = capsys.readouterr().out
    assert printed.count("\n") == 3
    assert "\x1b" not in printed
    names = next(line for line in lines if line.startswith("#       bytes"))
    first = row(result.sizes[0], result.sizes[0].variants[1])
    end = names.index("busbw") + len("busbw")
    assert first[:end].split()[-1] == "0.455"
    assert "1.100 (1.100-1.100)" in first


def test_json_has_a_schema_version_and_is_never_overwritten(tmp_path: Path) -> None:
    """Readable back into the same result; a second write fails and leaves the first."""
    result = bench_result((size_result(),))
    file = tmp_path / "r.json"
    write_json(result, file)
    assert json.loads(file.read_text())["schema_version"] == 1
    assert BenchResult.model_validate_json(file.read_text()) == result
    with pytest.raises(FileExistsError):
        write_json(bench_result(()), file)
    assert BenchResult.model_validate_json(file.read_text()) == result


@pytest.mark.processes  # matplotlib, where it has no cache yet, asks fc-list for fonts
def test_the_plot_is_a_png_and_is_never_overwritten(tmp_path: Path) -> None:
    """Also of a barrier, which has no bytes."""
    file = tmp_path / "r.png"
    barrier = shape_for("barrier", 0, torch.float32, 2)
    found = summarize(barrier, VARIANTS, [samples(1.0), samples(2.0)], complete=True)
    assert found is not None
    write_plot(bench_result((found, size_result())), file)
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileExistsError):
        write_plot(bench_result((size_result(),)), file)


@pytest.mark.parametrize(
    ("option", "name", "says"),
    [
        ("--json", "there", "never overwritten"),
        ("--plot", "there", "never overwritten"),
        ("--json", "link", "never overwritten"),
        ("--json", "no/such/r.json", "does not exist"),
        ("--plot", "r.jpg", "name the file r.png"),
    ],
)
def test_files_that_cannot_be_written_are_refused_first(tmp_path: Path, option: str, name: str, says: str) -> None:
    """BenchError before any work."""
    (tmp_path / "there").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BenchError, match=says):
        check_outputs(parse_arguments([option, str(tmp_path / name)]))


def test_one_name_for_both_files_is_refused_first(tmp_path: Path) -> None:
    """Also where it is written in two ways."""
    there, other = tmp_path / "r.png", tmp_path / "folder" / ".." / "r.png"
    (tmp_path / "folder").mkdir()
    with pytest.raises(BenchError, match="both name"):
        check_outputs(parse_arguments(["--json", str(there), "--plot", str(other)]))


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BenchError with the command, before any work."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"pip install 'ncclguard\[plot\]'"):
        check_outputs(parse_arguments(["--plot", str(tmp_path / "r.png")]))


def test_cycles_follow_iters_or_time() -> None:
    """--iters 100 is at least 100 calls in batches; without it by time; a long call needs one warm-up."""
    plan = plan_for(4, 32, iters=100, warmup=None, seconds=3.0)
    assert plan.cycles is not None
    assert plan.slots * plan.cycles >= 100
    assert [plan_for(4, 32, n, 0, 3.0).slots for n in (1, 2, 10, 100, 1000)] == [1, 1, 2, 20, 32]
    assert plan_for(4, 32, None, None, 3.0).cycles is None
    assert plan_for(4, 32, None, None, 3.0).most >= LEAST_CYCLES
    assert (plan_for(4, 32, None, None, 3.0).warmup, plan_for(2**31, 1, None, None, 3.0).warmup) == (3, 1)


def test_a_barrier_has_one_guarded_variant() -> None:
    """It has no tensor, so atomic makes no difference."""
    assert [variant.name for variant in variants_for("barrier", (False, True))] == ["plain", "guarded"]
