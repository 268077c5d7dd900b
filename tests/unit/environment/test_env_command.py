"""``ncclguard env``: every format, read back by what reads it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from io import StringIO
from pathlib import Path

import pytest
from dotenv import dotenv_values

from ncclguard.config import reset_config
from ncclguard.environment.catalogue import CATALOGUE, WATCHED_PREFIXES
from ncclguard.environment.env_command import FORMATS, main, render

pytestmark = pytest.mark.processes

_ODD = {
    "NCCL_SOCKET_IFNAME": "=eth0",
    "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
    "NCCL_DEBUG_FILE": '/tmp/it\'s $HOME/%h "x" `id`;#',
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known environment: one host, nothing set."""
    for name in list(os.environ):
        if name in CATALOGUE or name.startswith((*WATCHED_PREFIXES, "NCCLGUARD_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    reset_config()


@pytest.mark.parametrize("shell", [shell for shell in ("sh", "bash", "dash", "zsh") if shutil.which(shell)])
def test_a_shell_reads_back_what_was_written(shell: str) -> None:
    """Quotes, dollars, and a leading = (a path in zsh)."""
    assert "='=eth0'" in render(_ODD, "shell")
    script = f'eval "$1"; printf "%s\\0" {" ".join(f"${{{name}}}".join(chr(34) * 2) for name in _ODD)}'
    done = subprocess.run(
        [shell, "-c", script, shell, render(_ODD, "shell")], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split("\0")[:-1] == list(_ODD.values()), done.stderr


def test_dotenv_reads_back_what_was_written() -> None:
    """By python-dotenv, which pydantic-settings brings."""
    assert dict(dotenv_values(stream=StringIO(render(_ODD, "dotenv")))) == _ODD


def test_json_is_one_object_and_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with --explain and with something wrong: that goes to stderr."""
    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    assert main(["--format", "json", "--explain"]) == 0
    captured = capsys.readouterr()
    values = json.loads(captured.out)
    assert values["NCCL_SOCKET_IFNAME"] == "=lo" and values["GLOO_SOCKET_IFNAME"] == "lo"
    assert all(isinstance(value, str) for value in values.values())
    assert "NCCL_TIMEOUT" not in values and "no effect" in captured.err
    assert "gloo/transport/tcp/device.cc" in captured.err


def test_deepspeed_reads_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Its launcher splits each line at the first "=": a comment or an empty line would end it with an error."""
    assert main(["--format", "deepspeed", "--explain"]) == 0
    pairs = [line.split("=", maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert all(len(pair) == 2 and re.fullmatch(r"[A-Z0-9_]+", pair[0]) for pair in pairs)
    assert dict(pairs)["DEEPSPEED_TIMEOUT"] == "32"


def test_kubernetes_gets_a_list_of_names_and_quoted_values() -> None:
    """Every value is a string: an unquoted 1 would be refused."""
    lines = render(_ODD, "k8s").splitlines()
    assert lines[0] == "env:"
    assert lines[1::2] == [f"- name: {name}" for name in _ODD]
    assert [json.loads(line.partition("value: ")[2]) for line in lines[2::2]] == list(_ODD.values())


def test_slurm_gets_exports_and_no_comma_list() -> None:
    """`--export=A=x,y` would be two entries."""
    text = render(_ODD, "slurm")
    assert "#SBATCH --export=ALL\n" in text and "export NCCL_IB_HCA='=mlx5_0:1,mlx5_1:1'" in text


@pytest.mark.parametrize("format_name", FORMATS)
def test_comments_and_warnings_are_chinese_where_that_is_asked_for(
    format_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    monkeypatch.setenv("NCCLGUARD_LANGUAGE", "zh")
    assert main(["--format", format_name]) == 0
    printed = capsys.readouterr()
    comments = [line for line in printed.out.splitlines() if line.startswith("#") and not line.startswith("#SBATCH")]
    said = [line.removeprefix("ncclguard env: ") for line in (*comments, *printed.err.splitlines())]
    assert said
    assert not [
        line for line in said if not re.search("[\u4e00-\u9fff]", line) or re.search("[a-z]{2,} [a-z]{2,}", line)
    ]


@pytest.mark.parametrize("format_name", ["slurm", "k8s", "deepspeed"])
def test_one_block_for_all_hosts_warns_of_what_differs(format_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Interface names are those of this host."""
    assert main(["--format", format_name]) == 0
    assert "GLOO_SOCKET_IFNAME" in capsys.readouterr().err


@pytest.mark.parametrize("format_name", FORMATS)
def test_its_own_output_is_a_fixed_point(
    format_name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run again in an environment that has it all, it prints the same."""
    assert main(["--format", "json"]) == 0
    for name, value in json.loads(capsys.readouterr().out).items():
        monkeypatch.setenv(name, value)
    main(["--format", format_name])
    first = capsys.readouterr().out
    for name in list(CATALOGUE):
        if name != "DEEPSPEED_TIMEOUT":
            monkeypatch.delenv(name, raising=False)
    main(["--format", format_name])
    assert capsys.readouterr().out == first


def test_a_value_of_the_user_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a file made of the output has it."""
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    main([])
    assert "export NCCL_DEBUG=TRACE" in capsys.readouterr().out


def test_explain_gives_a_sentence_and_a_source_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    """As comments, so that the block still works."""
    main(["--explain"])
    lines = capsys.readouterr().out.splitlines()
    exports = [index for index, line in enumerate(lines) if line.startswith("export ")]
    assert exports and all(re.fullmatch(r"# .+\. .*\[.+\]", lines[index - 1]) for index in exports)


def test_profile_and_master_are_taken_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A profile without its hardware is said."""
    assert main(["--profile", "infiniband", "--master-addr", "127.0.0.1"]) == 0
    captured = capsys.readouterr()
    assert "NCCL_IB_TIMEOUT=22" in captured.out and "no InfiniBand port is active" in captured.err


@pytest.mark.parametrize("arguments", [["--profile", "token-ring"], ["--format", "xml"]])
def test_a_wrong_argument_ends_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's own."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


def limits(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    assert main(["--limits", "--format", "json"]) == 0
    return {limit["name"]: limit for limit in json.loads(capsys.readouterr().out)}


def test_the_limits_are_those_in_force_and_say_where_they_are_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = limits(capsys)
    call = "timeout= of a call, else NCCLGUARD_TIMEOUT"
    assert (plain[call]["now"], plain[call]["origin"].partition(":")[0]) == ("300 s, 900 s, 1800 s", "default")
    assert plain["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]["now"] == "480 s"
    assert plain["init_process_group(timeout=)"]["origin"].startswith("torch's defaults, no variable; give it 1920 s")
    monkeypatch.setenv("NCCLGUARD_TIMEOUT", "120")
    monkeypatch.setenv("NCCLGUARD_TIMEOUT_EVAL", "3600")
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "900")
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "45")
    reset_config()
    given = limits(capsys)
    assert (given[call]["now"], given[call]["origin"]) == ("120 s", "NCCLGUARD_TIMEOUT")
    assert given["watch(timeout=)"]["now"] == "as a guarded call: 120 s"
    evaluation = given['phase("eval"), NCCLGUARD_TIMEOUT_EVAL']
    assert (evaluation["now"], evaluation["origin"]) == ("3600 s", "NCCLGUARD_TIMEOUT_EVAL")
    assert given["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]["now"] == "900 s"
    assert given["init_process_group(timeout=)"]["now"] == "2700 s"
    assert main(["--limits"]) == 0
    shown = capsys.readouterr()
    assert "3600 s  [NCCLGUARD_TIMEOUT_EVAL]" in shown.out
    assert "the process-group timeout (2700 s, DEEPSPEED_TIMEOUT=45 min) must exceed the guard deadline" in shown.err


def test_the_page_has_every_limit_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = page[page.index("## Which limit governs what") :]
    for name in limits(capsys):
        for word in re.findall(r'[\w]+\(timeout=\)|phase\("\w+"\)|[A-Z_]{8,}|launcher', name):
            assert word in table or f"`_{word.rpartition('_')[2]}`" in table, name


@pytest.mark.parametrize(
    "given", [{}, {"DEEPSPEED_TIMEOUT": "45", "NCCLGUARD_TIMEOUT": "3600"}, {"TORCH_NCCL_BLOCKING_WAIT": "1"}]
)
def test_the_limits_are_told_in_chinese_and_their_json_is_english(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCLGUARD_LANGUAGE", "zh")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    reset_config()
    assert main(["--limits"]) == 0
    shown = capsys.readouterr()
    assert "阶段之外的受保护调用" in shown.out
    assert ("必须大于" in shown.err) == ("DEEPSPEED_TIMEOUT" in given)
    text = re.sub(r"`[^`]*`|ncclguard env", "", shown.out + shown.err)
    assert not re.findall(r"\b[a-z]{2,} [a-z]{2,}\b", text)
    assert all(letter < "\u4e00" for letter in json.dumps(limits(capsys), ensure_ascii=False))
