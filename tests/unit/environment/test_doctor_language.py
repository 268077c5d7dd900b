"""What `ncclguard doctor` says in Chinese: all that its checks can say, also of other hosts; its data is English."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ncclguard.environment.doctor
from ncclguard.environment.doctor import survey
from ncclguard.environment.doctor.checks import Check, Measured, error, merge
from ncclguard.environment.doctor.command import _NAMES, main
from ncclguard_explain import language
from ncclguard_explain.language import joined, say, tr
from ncclguard_explain.ras import NoWitness
from tests.ports import free_port

#: Two English words in a row; commands stand in backticks or behind a colon.
SENTENCE = re.compile(r"\b[a-z]{2,} [a-z]{2,}\b")
FOLDER = Path(ncclguard.environment.doctor.__file__).parent
MODULES = [*sorted(FOLDER.glob("*.py")), *(FOLDER.parent / name for name in ("network.py", "ras.py", "setup.py"))]
#: What is no text of a check: `--help`, what is printed to a log, plans, and errors of the program itself.
ELSEWHERE = {
    "build_parser", "EXIT_CODES", "EXAMPLES", "plot", "_all_reduce_rank", "_receive", "_NAMES",
}  # fmt: skip


@pytest.fixture
def chinese(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NCCLGUARD_LANGUAGE", "zh")
    language.choose("zh")
    yield
    language.choose(None)


def spoken(node: ast.AST) -> Iterator[ast.Constant]:
    """The texts under a node that neither `tr` nor `told` has, and that are no docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in ("tr", "told"):
            for given in (*child.args[1:], *child.keywords):
                yield from spoken(given)
        elif isinstance(child, ast.Constant):
            if isinstance(child.value, str) and not isinstance(node, ast.Expr):
                yield child
        elif not any(getattr(name, "id", getattr(child, "name", "")) in ELSEWHERE for name in targets(child)):
            yield from spoken(child)


def targets(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Assign):
        return list(node.targets)
    return [node.target] if isinstance(node, ast.AnnAssign) else [node]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_every_sentence_of_a_check_is_in_the_catalogue(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = {*_NAMES, "bold red", "import deepspeed", "ncclguard doctor: "}
    texts = [(node.lineno, str(node.value)) for node in spoken(tree) if node.value not in known]
    assert not [(line, text) for line, text in texts if SENTENCE.search(text)]


@pytest.mark.processes
def test_no_sentence_of_the_table_stays_english(
    chinese: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # the usual one may be held by a program whose name is English
    main([])
    table, _, pasted = capsys.readouterr().out.partition("```text")
    assert "检查项" in table and "共享内存" in table and "时限，单位 s" in table
    assert not SENTENCE.findall(re.sub(r"`[^`]*`|：(top|ps aux|dmesg)[^│]*", "", table))
    assert all(letter < "\u3000" for letter in pasted), "what goes into an issue is English"


@pytest.mark.processes
def test_the_json_stays_english(chinese: None, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--json", "-"])
    shown = capsys.readouterr().out
    assert all(letter < "\u3000" for letter in shown)
    checks = {check["name"]: check for check in json.loads(shown)["checks"]}
    assert checks["limits"]["detail"].startswith("limits in s (guard < process group < heartbeat < launcher): 1800 < ")


def test_what_another_host_has_found_is_said_in_the_language_of_rank_0(chinese: None) -> None:
    """A check crosses the store as JSON, with the template of its text."""
    why = NoWitness(joined(": ", ("localhost:28028", tr("no whole answer within {seconds:g} s", seconds=6.0))))
    found = error("ras", why.reason, tr("remove {name}", name="NCCL_RAS_ADDR"))
    fields = json.loads(json.dumps(survey._sent(found)))
    again = Check.model_validate(survey._received(fields))
    assert (again.detail, again.status) == ("localhost:28028: no whole answer within 6 s", "error")
    (merged,) = merge([("a", [again]), ("b", [Check(name="ras", status="ok", detail="")])])
    assert say(merged.detail) == "a：localhost:28028：6 s 内没有完整的应答"
    assert say(merged.advice) == "去掉 NCCL_RAS_ADDR"
    way = Measured(source=0, target=1, fault=tr("no route to the host"), round_trip=0.1)
    sent = json.loads(json.dumps(survey._sent(way)))
    assert say(Measured.model_validate(survey._received(sent)).fault or "") == "没有到主机的路由"


@pytest.mark.parametrize("arguments", [["--json", "no/such/folder/x.json"], ["--json", "."], ["--plot", "x.xyz"]])
def test_a_file_that_cannot_be_written_is_refused_before_the_checks(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert f"{arguments[0]}: " in said.err and not said.out, said
