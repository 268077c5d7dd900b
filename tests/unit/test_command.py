"""The `ncclguard` command: what it lists, hands on and refuses."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from ncclguard import __version__
from ncclguard.__main__ import COMMANDS, Command, main


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: ncclguard" in capsys.readouterr().err


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


@pytest.mark.processes
@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.available])
def test_every_command_that_is_listed_has_help(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ncclguard", name, "--help"], capture_output=True, text=True, timeout=100, check=False
    )
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
