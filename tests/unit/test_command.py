"""The `ncclguard` command: what it lists, hands on and refuses."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from ncclguard import __version__, completion
from ncclguard.__main__ import COMMANDS, EXIT_CODES, Command, main
from ncclguard_explain.command_line import progress


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: ncclguard" in capsys.readouterr().err


def test_help_of_a_command_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["help", "drill"])
    assert capsys.readouterr().out.startswith("usage: ncclguard drill")


@pytest.mark.parametrize("word", ["-h", "--help", "help"])
def test_help_lists_the_commands_that_are_there(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main([word]) == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert (f"  {name} " in text) == command.available


@pytest.mark.parametrize("word", ["-V", "--version"])
def test_version(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out == f"ncclguard {__version__}\n"


@pytest.mark.processes
def test_output_that_is_ascii_only_gets_everything_else_by_its_number() -> None:
    """A narrow table is shortened with an ellipsis, and a log may say anything."""
    log = Path(__file__).parents[1] / "unguarded_logs" / "legacy-exception" / "logs"

    def explained(encoding: str) -> subprocess.CompletedProcess[bytes]:
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "50"}
        command = [sys.executable, "-m", "ncclguard", "explain", str(log)]
        return subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)

    plain, whole = explained("ascii"), explained("utf-8")
    assert "…" in whole.stdout.decode()
    assert (plain.returncode, plain.stderr) == (whole.returncode, whole.stderr)
    assert b"\\u2026" in plain.stdout


@pytest.mark.parametrize("word", ["benchmark", "missing", "--fast"])
def test_an_unknown_command_names_those_that_are_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setitem(COMMANDS, "missing", Command("ncclguard.no_such_module", "is not there"))
    monkeypatch.setitem(COMMANDS, "deeper", Command("ncclguard.no_such.module", "is not there either"))
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert f"no command '{word}'" in error
    assert "bench" in error
    assert "deeper" not in error


def test_a_misspelt_command_is_told_which_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explian"]) == 2
    assert "there is no command 'explian': did you mean explain?" in capsys.readouterr().err


def test_a_command_that_lacks_a_package_says_which(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where ncclguard was installed without its dependencies, for `ncclguard report`."""
    (tmp_path / "needy.py").write_text("import no_such_package.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "needy", Command("needy", ""))
    assert main(["needy"]) == 2
    assert capsys.readouterr().err == (
        "ncclguard: needy needs no-such-package, which is not installed: pip install no-such-package\n"
    )


TREE = Path(__file__).resolve().parents[2]
PIPED = (
    ("--help",), ("env",), ("env", "both"), ("doctor",), ("run --help",), ("completion bash",),
    (f"explain {TREE}/tests/unguarded_logs/legacy-exception/logs",), (f"report {TREE}/docs/gallery/kill/incident.json",),
)  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("called", PIPED, ids=" ".join)
def test_a_command_whose_reader_has_gone_ends_in_silence(called: tuple[str, ...], tmp_path: Path) -> None:
    """As in `ncclguard env | head -0`; with "both" what it says on stderr goes the same way."""
    line, both = called[0], called[1:]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "ncclguard", *line.split()]
        errors = writer if both else subprocess.PIPE
        done = subprocess.run(command, stdout=writer, stderr=errors, text=True, timeout=120, check=False, cwd=tmp_path)
    finally:
        os.close(writer)
    assert done.returncode == 141, done
    assert both or "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("line", ["--help", "--ranks 2 --numel 1000 --iters 2"])
def test_the_bench_as_a_module_ends_in_silence_where_its_reader_has_gone(line: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "ncclguard.bench", *line.split()]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 141, done
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("line", ["env", f"explain {TREE}/tests/unguarded_logs/legacy-exception/logs"])
def test_a_command_whose_output_cannot_be_written_says_so_and_fails(line: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ncclguard", *line.split()]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False, cwd=tmp_path
        )
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr and "No space left on device" in done.stderr, done.stderr


def test_a_broken_pipe_of_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise BrokenPipeError("of a socket")

    monkeypatch.setattr("ncclguard.environment.env_command.main", fail)
    with pytest.raises(BrokenPipeError, match="of a socket"):
        main(["env"])


def test_a_command_has_its_own_options_before_those_of_torchrun() -> None:
    text = importlib.import_module(COMMANDS["run"].module).build_parser().format_help()
    assert text.index("  --go-on-within") < text.index("  --losses-within") < text.index("  --nnodes")


def test_the_rest_of_the_line_goes_to_the_command_and_its_code_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    module = types.ModuleType("ncclguard_test_command")
    module.__spec__ = types.SimpleNamespace(name=module.__name__)  # type: ignore[assignment]
    module.main = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, "probe", Command(module.__name__, "for this test"))
    assert main(["probe", "--fast", "x"]) == 7
    assert seen == [["--fast", "x"]]


NAMES = [name for name, command in COMMANDS.items() if command.available]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_examples_of_itself_and_its_exit_codes_in_its_help(name: str) -> None:
    """The examples are calls that its own parser takes, as far as they are no pipes and name no other launcher."""
    module = importlib.import_module(COMMANDS[name].module)
    parser: argparse.ArgumentParser = module.build_parser()
    text = parser.format_help()
    examples = re.findall(r"^  (\S.*)$", text[text.index("examples:\n") : text.index("exit codes:\n")], re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        assert re.search(rf"ncclguard[ .]{name}\b", example), example
        call = re.search(rf"\bncclguard {name}\b([^|>)]*)", example)
        if call is not None and "..." not in example:
            words = shlex.split(call[1].replace("*", "x").split(" -- ")[0].replace('"', ""))
            parser.parse_args(words)
    shown = {int(code): meaning for code, meaning in re.findall(r"^ +(\d+)  (\S.*)$", text, re.MULTILINE)}
    assert shown == dict(module.EXIT_CODES)


def test_the_page_of_exit_codes_is_what_the_commands_say() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text()
    rows = re.findall(r"^\| `ncclguard ?(\w*)` \| (\d+) \| (.*) \|$", page, re.MULTILINE)
    expected = [("", code, meaning) for code, meaning in EXIT_CODES.items()]
    for name in NAMES:
        codes = importlib.import_module(COMMANDS[name].module).EXIT_CODES
        expected += [(name, code, meaning) for code, meaning in codes.items()]
    assert [(name, int(code), meaning.replace("`", "")) for name, code, meaning in rows] == expected


# ---------------------------------------------------------------------- completion


def completed(script: str, line: str) -> list[str]:
    """What bash offers where the cursor is at the end of the line."""
    words = line.split(" ")
    program = f"{script}\nCOMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}\n"
    program += '_ncclguard; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


@pytest.mark.processes
def test_bash_completes_commands_options_values_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = completion.bash(completion.syntax())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.log").touch()
    assert set(NAMES) <= set(completed(script, "ncclguard "))
    assert completed(script, "ncclguard do") == ["doctor"]
    assert completed(script, "ncclguard doctor --fail") == ["--fail-on-warnings"]
    assert completed(script, "ncclguard bench --op all_g") == ["all_gather"]
    assert completed(script, "ncclguard drill --fault st") == ["stop"]
    assert completed(script, "ncclguard explain tr") == ["train.log"]
    assert completed(script, "ncclguard explain --html tr") == ["train.log"]
    assert completed(script, "ncclguard completion f") == ["fish"]
    assert completed(script, "ncclguard bench --seconds ") == []


@pytest.mark.processes
@pytest.mark.parametrize("shell", completion.SHELLS)
def test_shells_can_read_their_scripts(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in NAMES:
        assert name in script
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here to read its script")
    (tmp_path / "script").write_text(script)
    done = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_whose_packages_are_missing_is_completed_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import ncclguard_no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(COMMANDS, "bench", Command("needs_more", "as without torch"))
    found = completion.syntax()
    assert [option.names for option in found["bench"].options] == [("-h", "--help")]
    assert len(found["explain"].options) > 5


# ---------------------------------------------------------------------- progress


def shown(terminal: bool) -> str:
    """What `progress` writes to a stream that is a terminal, or a pipe."""
    reader, writer = os.openpty() if terminal else os.pipe()
    with os.fdopen(writer, "w") as stream, progress("connecting", stream=stream) as tell:
        time.sleep(0.3)
        tell("measuring: host 2 of 8")
        time.sleep(0.5)
    parts = []
    with contextlib.suppress(OSError):  # a terminal whose other end is closed
        while part := os.read(reader, 65536):
            parts.append(part)
    os.close(reader)
    return b"".join(parts).decode()


def test_progress_is_shown_on_a_terminal_and_taken_away_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # rich animates nothing on a dumb one
    text = shown(terminal=True)
    assert "connecting" in text and "measuring: host 2 of 8" in text
    assert text.index("connecting") < text.index("measuring")
    assert "\x1b[2K" in text[text.rindex("measuring") :]


def test_nothing_of_progress_is_in_a_pipe() -> None:
    assert shown(terminal=False) == ""


@pytest.mark.processes
def test_help_comes_from_the_command_as_it_is_started() -> None:
    for name in ("bench", "explain"):
        command = [sys.executable, "-m", "ncclguard", name, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        assert "usage:" in done.stdout


@pytest.mark.processes
@pytest.mark.parametrize("command", ["env", "env --help", "report --help"])
def test_a_command_that_needs_no_torch_does_not_wait_for_it(command: str) -> None:
    """It takes seconds to import, and a login node may not have it."""
    program = (
        "import atexit, sys; from ncclguard.__main__ import main\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        f"main({command.split()})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "words",
    [
        *(["hang", "--seconds", value] for value in ("nan", "0", "-1", "inf", "soon")),
        ["hang", "--watch", "-1"],
        ["hang", "--pid", "0"],
        *(["drill", "--fault", "late", name, "0"] for name in ("--timeout", "--limit", "--ranks", "--seconds")),
        *(["drill", "--fault", "late", name, "-1"] for name in ("--rank", "--op")),
        *(["top", "--once", "--interval", value] for value in ("0", "-2", "nan")),
        *(["doctor", "--wait", value] for value in ("-3", "nan")),
        *(["set", "timeout=none", "--wait", value] for value in ("-1", "nan")),
        *(["run", name, "-1", "train.py"] for name in ("--spares", "--restart-lost", "--max-losses")),
        *(["run", name, "0", "train.py"] for name in ("--go-on-within", "--losses-within")),
    ],
    ids=" ".join,
)
def test_a_number_that_cannot_be_is_refused_in_one_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(words)
    assert refusal.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        rf"ncclguard {words[0]}: error: argument --.*: '(.*)' is no (number of seconds|whole number) from .*", last
    )
