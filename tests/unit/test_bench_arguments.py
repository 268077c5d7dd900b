"""The bench's command line: good defaults, and a typed error with the way out for what contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclguard.bench.__main__ import main
from ncclguard.bench.arguments import DEFAULT_NUMELS, BenchError, parse_arguments
from ncclguard.errors import GuardConfigError


def test_without_arguments_there_are_good_defaults() -> None:
    """float32 all_reduce at several sizes, both guarded variants, with rounds."""
    settings = parse_arguments([])
    assert (settings.op, settings.dtype, settings.numels) == ("all_reduce", "float32", DEFAULT_NUMELS)
    assert settings.atomics == (False, True)
    assert settings.rounds
    assert (settings.iters, settings.ranks, settings.backend, settings.fault) == (None, None, None, None)


def test_sizes_in_bytes_follow_the_element_type() -> None:
    """--numel in bytes and a sweep in bytes are counted in elements of --dtype."""
    assert parse_arguments(["--numel", "1MiB", "5", "--dtype", "bfloat16"]).numels == (524288, 5)
    assert parse_arguments(["--numel", "5e8", "--numel", "6", "7"]).numels == (500_000_000, 6, 7)
    assert parse_arguments(["--min", "8B", "--max", "800B", "--dtype", "float64"]).numels == (1, 10, 100)
    assert parse_arguments(["--min", "1", "--max", "8", "--factor", "2"]).numels == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("option", "atomics"), [([], (False, True)), (["--atomic"], (True,)), (["--no-atomic"], (False,))]
)
def test_atomic_chooses_the_guarded_variants(option: list[str], atomics: tuple[bool, ...]) -> None:
    """Both by default, else the one that was asked for."""
    assert parse_arguments(option).atomics == atomics


def test_a_barrier_has_no_size() -> None:
    """One run without elements; a size with it is refused."""
    assert parse_arguments(["--op", "barrier"]).numels == (0,)
    with pytest.raises(BenchError, match="moves no elements"):
        parse_arguments(["--op", "barrier", "--numel", "5"])


def test_a_rehearsal_has_its_own_defaults() -> None:
    """One size, rank 2, a short limit where the fault lasts until the deadline."""
    late, kill, reset = (parse_arguments(["--fault", name]) for name in ("late", "kill", "reset"))
    assert (late.fault, late.fault_rank, late.timeout) == ("late", 2, 5.0)
    assert kill.timeout > late.timeout
    assert len(late.numels) == 1
    assert reset.numels[0] > late.numels[0]
    assert parse_arguments(["--fault", "stop", "--rank", "0", "--timeout", "2", "--numel", "9"]).fault_rank == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--numel", "5", "--max", "7"], "use one of them"),
        (["--min", "5"], "both --min and --max"),
        (["--factor", "3"], "add --min and --max"),
        (["--min", "5", "--max", "2"], "swap"),
        (["--min", "5", "--max", "20", "--factor", "1"], "above 1"),
        (["--numel", "5K"], "5KiB"),
        (["--numel", "0"], "at least one"),
        (["--numel", "3B"], "less than one element"),
        (["--dtype", "float3"], "invalid choice"),
        (["--op", "scan"], "invalid choice"),
        (["--iters", "0"], "no whole number from 1"),
        (["--iters", "x"], "no whole number from 1"),
        (["--warmup", "-1"], "no whole number from 0"),
        (["--ranks", "0"], "no whole number from 1"),
        (["--timeout", "0"], "no number of seconds from 0.001 to 1e9"),
        (["--timeout", "inf"], "no number of seconds from 0.001 to 1e9"),
        (["--timeout", "1e-9"], "no number of seconds from 0.001 to 1e9"),
        (["--timeout", "1e10"], "no number of seconds from 0.001 to 1e9"),
        (["--timeout", "1e300"], "no number of seconds from 0.001 to 1e9"),
        (["--min", "1", "--max", "1e9", "--factor", "1.0000001"], "more than 1,000 sizes"),
        (["--seconds", "-1"], "no number of seconds"),
        (["--rank", "1"], "needs --fault"),
        (["--fault", "late", "--op", "broadcast"], "leave --op away"),
        (["--fault", "late", "--json", "x"], "measures nothing"),
        (["--fault", "late", "--numel", "1", "2"], "one size"),
        (["--fault", "late", "--numel", "1", "--numel", "2"], "one size"),
        (["--fault", "late", "--seconds", "3"], "measures nothing"),
        (["--fault", "late", "--no-atomic"], "leave --no-atomic away"),
        (["--fault", "explode"], "invalid choice"),
        (["--frobnicate"], "unrecognized"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_way_out(argv: list[str], says: str) -> None:
    """BenchError, which is also a GuardConfigError and a ValueError."""
    with pytest.raises(BenchError, match=says) as caught:
        parse_arguments(argv)
    assert isinstance(caught.value, (GuardConfigError, ValueError))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--fault", "late", "--ranks", "2"], "at least 3 ranks"),
        (["--fault", "late", "--ranks", "3", "--rank", "3"], "only ranks 0 to 2"),
        (["--numel", "1e15"], "GiB are free"),
        (["--dtype", "bfloat16", "--ranks", "100000", "--numel", "1"], "use --dtype float32"),
    ],
)
def test_main_refuses_before_it_starts_anything(
    argv: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one sentence on stderr; no rank process is started (Popen is not reached)."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("subprocess.Popen", None)
    assert main(argv) == 2
    assert says in capsys.readouterr().err


def test_an_existing_file_is_refused_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--json on a file that exists: exit code 2 before any work, the file as it was."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("subprocess.Popen", None)
    file = tmp_path / "result.json"
    file.write_text("mine")
    assert main(["--json", str(file)]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_help_names_every_option_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """--help ends with 0 and has what a user looks for."""
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in ("--numel", "--fault", "--no-atomic", "--no-rounds", "--json", "--plot", "exit codes:"):
        assert word in text
