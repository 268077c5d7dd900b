"""The page on which a log is dropped: its Python runs as it stands there, and the browser is told to talk to nobody."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ncclguard_explain import language

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "drop.html").read_text(encoding="utf-8")
LOGS = ROOT / "tests" / "unguarded_logs" / "legacy-kill"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """The function that the page's worker calls, with the working folder and language as they were afterwards."""
    monkeypatch.chdir(ROOT)
    program = re.search(r'<script type="text/python" id="program">(.*?)</script>', PAGE, re.DOTALL)
    assert program is not None
    names: dict[str, Any] = {}
    exec(program[1], names)  # noqa: S102 - what the page itself runs
    yield names["report"]
    language.choose(None)


def test_it_makes_the_page_of_the_report(report: Callable[..., Any]) -> None:
    names = [path.relative_to(LOGS).as_posix() for path in sorted(LOGS.rglob("*")) if path.is_file()]
    found, page = report(LOGS, [name for name in names if name != "truth.json"], False)
    assert found and page.startswith("<!doctype html>") and "culprits: " in page


def test_it_says_in_chinese_why_nothing_could_be_read(report: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.log").touch()
    assert report(tmp_path, ["train.log"], True) == (False, "train.log：空文件；请给出作业进程写入的日志")


def test_the_browser_may_send_nothing_to_anybody() -> None:
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', PAGE)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules["default-src"] == "'none'" and rules["form-action"] == "'none'"
    hosts = {word for rule in rules.values() for word in rule.split() if "//" in word}
    assert hosts == {"https://cdn.jsdelivr.net"}, "where Pyodide comes from"
    assert re.search(r"<iframe [^>]*\bsandbox[ >]", PAGE), "a log's text runs nothing"
