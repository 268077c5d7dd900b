"""What people read, in Chinese: the catalogue is whole, nothing of an incident stays English, and data stays as it is."""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib
import importlib.util
import io
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from types import ModuleType, SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from ncclguard.__main__ import COMMANDS, usage
from ncclguard.config import GuardConfig, configure, reset_config
from ncclguard.errors import GuardConfigError, GuardError, error_for, headline
from ncclguard.hang.tree import groups_of, lines_of, merge
from ncclguard.incident.model import Incident, RankReport, as_text
from ncclguard.incident.page import render_html
from ncclguard.incident.report import show
from ncclguard.incident.timeline import Document
from ncclguard.outcome import of_incident
from ncclguard.process_group.work_queue import GuardedWork, Task, WorkQueue
from ncclguard.torch_compat import elastic
from ncclguard.watch.coordination import WatchCoordination
from ncclguard.watch.watcher import Watcher
from ncclguard_explain import explain, language
from ncclguard_explain.cause import ADVICE, MEANING, WORD, Cause
from ncclguard_explain.command_line import Parser, in_help
from ncclguard_explain.language import Message, entries_of, folded, joined, read, said, tr
from ncclguard_explain.ranks import FEW_RANKS, Hosts, ranks_text
from ncclguard_explain.render import print_report, render_html as explained_page

ROOT = Path(__file__).resolve().parents[2]
GALLERY = sorted((ROOT / "docs" / "gallery").glob("*/incident.json"))
UNGUARDED = sorted(path.parent for path in (ROOT / "tests" / "unguarded_logs").glob("*/logs")) + [
    ROOT / "tests" / "unguarded_logs" / "legacy-kill-torchrun"
]
PACKAGES = ("ncclguard", "ncclguard_observe", "integrations", "explain")
LOGGED = {
    f"{name}.{level}"
    for name in ("log", "_log", "logger", "_logger")
    for level in ("info", "warning", "error", "exception", "critical")
}
SPEAKER = re.compile(r"((ncclguard( (run|incident))?:? )?%s(: )?)+")
CHINESE = re.compile(r"[\u4e00-\u9fff]")


@pytest.fixture
def chinese() -> Iterator[None]:
    language.choose("zh")
    yield
    language.choose(None)


@pytest.fixture(scope="module")
def messages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("messages", ROOT / "scripts" / "messages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def document(path: Path) -> Document:
    return Document.model_validate_json(path.read_text(encoding="utf-8"))


def slots(template: str) -> set[tuple[str, str | None]]:
    return {(name, form) for _, name, form, _ in Formatter().parse(template) if name is not None}


# ------------------------------------------------------------------------------------------------------- the catalogue


def test_the_catalogue_has_every_template_of_the_source_and_no_other(messages: ModuleType) -> None:
    catalogue = messages.catalogue_of("zh")
    assert not [key for key in messages.templates() if not catalogue.get(key)], "run scripts/messages.py, and translate"
    assert not set(catalogue) - set(messages.templates()), "run scripts/messages.py: these are in the source no longer"
    file = (language.CATALOGUES / "zh.po").read_text(encoding="utf-8")
    assert file == messages.written("zh", catalogue), "run scripts/messages.py"


def test_a_translation_has_the_slots_of_its_template() -> None:
    entries = list(entries_of((language.CATALOGUES / "zh.po").read_text(encoding="utf-8")))
    assert len(entries) > 400
    assert not [one.template for one in entries if slots(one.template) != slots(one.translation)]


def test_translations_are_written_with_chinese_punctuation() -> None:
    for one in entries_of((language.CATALOGUES / "zh.po").read_text(encoding="utf-8")):
        wrong = re.search(r"[\u4e00-\u9fff][,;:?!]|[\u4e00-\u9fff]\.(?!\w)|[\u4e00-\u9fff] ?\(", one.translation)
        assert wrong is None, one.translation


def test_every_line_of_a_log_is_in_the_catalogue() -> None:
    """Its format has no words but the name of what speaks; what follows is made by `told` or `say`."""
    found = []
    for file in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in LOGGED or file.name == "language.py":
                continue
            words = "".join(str(part.value) for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
            if not isinstance(node.args[0], ast.Call) and not SPEAKER.fullmatch(words):
                found.append((str(file.relative_to(ROOT)), node.lineno, words))
    assert not found


# ------------------------------------------------------------------------------------------------- messages and reading


def test_a_message_that_is_copied_keeps_its_template_and_one_that_is_sent_is_text() -> None:
    """Reports are copied by dataclasses.asdict; and nothing but text crosses to another process."""
    late = tr("{ranks} late", ranks=ranks_text([3]))
    for message in (late, tr("was sent SIGTERM"), joined("; ", (late, tr("gone")))):
        for again in (copy.deepcopy(message), copy.copy(message)):
            assert (again, said(again, "zh")) == (message, said(message, "zh"))
        sent = pickle.loads(pickle.dumps(message))
        assert (type(sent), sent, read(sent, "zh")) == (str, str(message), said(message, "zh"))


def test_a_message_holds_no_exception() -> None:
    """It may be kept for as long as the process lives, and the frames of an exception hold tensors."""

    class Raised(Exception):
        pass

    error = Raised("broke")
    gone = weakref.ref(error)
    message = tr("the communicator could not be built: {error}", error=error)
    del error
    gc.collect()
    assert gone() is None
    assert said(message, "zh") == "communicator 建不起来：broke"


def test_a_message_is_english_text_that_can_be_said_in_chinese() -> None:
    message = tr("{ranks} held up {where}", ranks=ranks_text([0, 1]), where=tr("a collective"))
    assert (message, json.dumps(message)) == ("ranks 0-1 held up a collective", '"ranks 0-1 held up a collective"')
    assert said(message, "zh") == "rank 0-1 拖住了集合通信"
    assert said(message, "en") == message
    assert said(joined("; ", (message, "x")), "zh") == "rank 0-1 拖住了集合通信；x"
    assert said(tr("a template that no catalogue has: {x}", x=1), "zh") == "a template that no catalogue has: 1"
    assert said(message.capitalised(), "en") == "Ranks 0-1 held up a collective"
    several = joined("; ", (message, "x")).capitalised()
    assert (several, said(several, "zh")) == ("Ranks 0-1 held up a collective; x", "rank 0-1 拖住了集合通信；x")


@pytest.mark.parametrize(
    ("text", "chinese"),
    [
        ("rank 3 late; ranks 5-6 lost", "rank 3 迟到；rank 5-6 丢失"),
        ("rank 2: process 7 of rank 2 on a has ended: killed by SIGKILL", "rank 2：a 上 rank 2 的进程 7 已经结束：被 SIGKILL 杀死"),
        ("f() failed after 3 s: rank 2 was sent SIGTERM.", "f() 在 3 s 后失败：rank 2 收到 SIGTERM。"),
        (
            "f() failed after 3 s: hosts node[03-04], all 16 ranks (24-39), and ranks 20-23 on host node02 lost.",
            "f() 在 3 s 后失败：主机 node[03-04] 上的全部 16 个 rank（24-39），以及主机 node02 上的 rank 20-23 丢失。",
        ),
        (
            "f() failed after 3 s although every rank was in it: network (rank 1 (a) lost its connection with rank 2 (b)).",
            "f() 在 3 s 后失败，尽管所有 rank 都进来了：网络（rank 1（a）失去了与 rank 2（b）的连接）。",
        ),
        (
            "rank 1 (a) and rank 2 (b) lost the connection between them; the connection with rank 2 broke: closed by the peer",
            "rank 1（a）与 rank 2（b）之间的连接断了；与 rank 2 的连接断了：被对端关闭",
        ),
        (
            "f() failed: rank 1 lost; rank 1 was found gone by the others, who go on without it: end this process.",
            "f() 失败：rank 1 丢失；其余 rank 认定 rank 1 已经不在，并且不带它继续：请结束本进程。",
        ),
        ("it waits in g(x) of group 0:cpu (ranks 0-2)", "它正在等组 0:cpu（rank 0-2）的 g(x)"),
        ("it waited in g(x) of group 0:cpu (ranks 0-2) until 0.5 s before", "它曾在等组 0:cpu（rank 0-2）的 g(x)，0.5 s 前才结束等待"),
        ("g(x) of group 0:cpu (ranks 0-2)", "组 0:cpu（rank 0-2）的 g(x)"),
        ("g(number 3; it is connecting still) stood still for 3 s: rank 1 late.", "g(number 3; it is connecting still) 停滞了 3 s：rank 1 迟到。"),
        (
            "the limit of 3 s passed and a call inside it was ended; process group '0' (default_pg, gloo, 2 ranks) was stopped for that and is unusable from now on, on all ranks, and tensors that were in flight hold no defined values.",
            "时限 3 s 已过，中止了其中的一次调用；为此中止了进程组 '0'（default_pg，gloo，2 个 rank），它从现在起在所有 rank 上都不能再用，传输中的张量内容不确定。",
        ),
        ("it waits in g(x, y); its thread 'z' had ended with ValueError: a; b", "它正在等 g(x, y)；它的线程 'z' 已因 ValueError: a; b 结束"),
    ],
)  # fmt: skip
def test_what_another_process_has_sent_is_read(text: str, chinese: str) -> None:
    assert read(text, "zh") == chinese
    assert read(text, "en") == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "torch.OutOfMemoryError at train.py:3 in step: Tried to allocate 2 GiB, and rank 3 late; no more",
        "a program's own words, in no catalogue: to be left alone",
        "{ranks} late",
        "%s %d {0} {",
    ],
)
def test_what_others_have_written_is_left_alone(text: str) -> None:
    raised = f"rank 2 raised {text}" if text else text
    assert read(raised, "zh") == raised.replace("raised", "抛出")
    assert CHINESE.search(read(text.partition(": ")[0], "zh")) is None


def test_no_reading_takes_long() -> None:
    """Texts of others may be long, and full of what stands between the parts of a list."""
    import time

    text = "f() failed after 3 s: rank 2 raised ValueError: " + "a, b; c: d and " * 30
    begin = time.process_time()
    assert read(text, "zh").startswith("f() 在 3 s 后失败：rank 2 抛出 ValueError: a, b; c")
    assert time.process_time() - begin < 20


# ----------------------------------------------------------------------------------------------------------- incidents


def test_the_evidence_of_a_lost_rank_is_said_in_the_line_that_tells_of_it(
    chinese: None, caplog: pytest.LogCaptureFixture
) -> None:
    evidence = "process 7 of rank 1 on a has ended: killed by SIGKILL"
    WatchCoordination._lost(SimpleNamespace(_rank=0), 1, evidence)  # type: ignore[arg-type]
    assert caplog.messages == ["ncclguard: rank 1 丢失：a 上 rank 1 的进程 7 已经结束：被 SIGKILL 杀死（rank 0 看到）"]


def test_the_verdict_that_goes_into_records_is_english(chinese: None) -> None:
    found = SimpleNamespace(op_id="0:gloo/7", summary="f() failed after 3 s: rank 2 late.")
    watcher = SimpleNamespace(_standing=[SimpleNamespace(sequence=7)], _settings=SimpleNamespace(incidents=[found]))
    assert Watcher.verdict(watcher) == found.summary  # type: ignore[arg-type]


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.parent.name)
def test_nothing_of_a_recorded_incident_stays_english(path: Path, chinese: None) -> None:
    incident = document(path).incident
    notes = [report.note for report in incident.ranks if report.note]
    for text in (incident.summary, incident.advice, *notes):
        assert language._read(text, "zh", language._DEPTH)[1] == 0, text
        assert CHINESE.search(read(text)), text
    foreign = re.compile(r"^ {6}|^    抛出|host |^  rank [0-9、-]+ 调用了 ")
    lines = as_text(incident).splitlines()
    assert not [line for line in lines if not CHINESE.search(line) and not foreign.search(line)]
    assert lines[0].startswith(f"ncclguard incident {incident.id}: {incident.op}(")
    assert f"（{incident.cause}）" in lines[1]


def test_a_tree_of_stacks_has_chinese_punctuation(chinese: None) -> None:
    tree = merge(groups_of({0: ["a", "b"], 1: ["a", "c"], 2: ["a"]}))
    assert [*lines_of(tree, {1: "在 sleep"})] == [
        "rank 0-2：a",
        "  rank 2：停在这里",
        "  rank 0：b",
        "  rank 1：c（在 sleep）",
    ]


def test_the_panel_of_a_late_rank(chinese: None) -> None:
    """The whole text, from a run of the drill."""
    shown = io.StringIO()
    show(document(ROOT / "docs" / "gallery" / "late" / "incident.json").incident, shown)
    text = re.sub(r"│\s*\n│ ", "", shown.getvalue())
    for part in (
        "all_reduce(float32[100000], SUM, name='gradient') 在 3.02 s 后失败：rank 2 迟到。",
        "原因：迟到（late），进程活着，在跑别的代码，没有进入这次操作",
        "上一次调用：all_reduce(float32[1], SUM, name='loss')",
        "主线程，最内层在最后：",
        "rank 0-1 停在 all_reduce(float32[100000], SUM, name='gradient')，最长已等 3.02 s，调用位置 train.py:21 in",
        "时间：时限 3 s，已到期限；尝试次数：1",
        "怎么办：先看它的调用栈，弄清它当时在做什么",
    ):
        assert part in text
    assert len({cell_len(line) for line in shown.getvalue().splitlines()}) == 1, "the frame is not straight"


@pytest.mark.parametrize(
    ("encoding", "speaks"), [("ascii", "en"), ("latin-1", "en"), ("gb18030", "zh"), ("utf-8", "zh")]
)
def test_a_stream_that_has_no_chinese_characters_is_told_in_english(encoding: str, speaks: str, chinese: None) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(document(ROOT / "docs" / "gallery" / "late" / "incident.json").incident, stream)
    stream.seek(0)
    assert {"en": "rank 2 late.", "zh": "rank 2 迟到。"}[speaks] in stream.read()
    assert language.current() == "zh"


@pytest.mark.parametrize(("page", "speaks"), [("README.md", "en"), ("README.zh-CN.md", "zh")])
def test_the_panel_of_the_readme_is_what_is_shown(page: str, speaks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = "all_reduce(float32[1000], SUM)"
    stack = (
        "train.py:307 in <module>: main()",
        "train.py:260 in main: save_checkpoint(model)",
        "train.py:131 in save_checkpoint: torch.save(state, path)",
    )
    late = RankReport(
        rank=2, host="gpu-07", pid=4242, cause=Cause.LATE, state="none", operation="broadcast(int64[1], src=0)",
        call_site="train.py:90 in setup", stack=stack,
    )  # fmt: skip
    place = {"operation": operation, "call_site": "train.py:211 in step", "age": 600.0}
    incident = Incident(
        id="51ee5fcd-0-cpu-865c6391-17.0", op="all_reduce", op_id="0/17", group="0", generation=0, cause=Cause.LATE,
        culprits=(2,), deadline_expired=True, timeout=600.0, agreed=True, attempts=1, participants=(0, 1, 2, 3),
        ranks=(late, *(RankReport(rank=rank, state="running", **place) for rank in (0, 1, 3))),
        summary=f"{operation} failed after 600 s: rank 2 late.", advice=ADVICE[Cause.LATE],
    )  # fmt: skip
    monkeypatch.setattr("ncclguard.incident.report.WIDTH", 82)
    language.choose(speaks)
    shown = io.StringIO()
    try:
        show(incident, shown)
    finally:
        language.choose(None)
    *lines, _, last = shown.getvalue().splitlines()  # the page leaves the line of the group out
    assert "\n".join([*lines, last]) in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("width", range(10, 80))
def test_chinese_is_cut_between_characters_and_not_before_punctuation(width: int) -> None:
    text = (
        "它没有应答：卡住；进程 11226 被信号暂停（状态 T），要看它的调用栈，请安装 py-spy，或运行 `gdb -p 11226`。" * 2
    )
    rows = folded(text, width).split("\n")
    assert "".join(rows).replace(" ", "") == text.replace(" ", "")
    assert all(cell_len(row) <= width for row in rows)
    assert not [row for row in rows if row[0] in "，。：；）"]
    assert not [row for row in rows if row[-1] == "（"]
    plain = "a line without wide characters is left to rich, however long it is"
    assert folded(plain, width) == plain


def test_ranks_are_told_by_their_hosts() -> None:
    hosts = Hosts({rank: f"node{rank // 8:02}" for rank in range(80)}, range(FEW_RANKS + 16))
    for asked in (range(16, 40), range(20, 40), set(range(80)) - {17}, [3]):
        text = hosts.text(asked)
        assert read(str(text), "zh") == said(text, "zh") != text, text


def test_the_page_is_chinese_and_its_data_is_not(chinese: None) -> None:
    for path in GALLERY:
        told = document(path)
        page = render_html(told)
        assert '<html lang="zh">' in page
        heads = re.findall(r"<(?:h2|th|title)\b[^>]*>([^<]*)<", page)
        assert not [head for head in heads if not CHINESE.search(head) and head not in ("rank", "pid")]
        written = told.model_dump_json(indent=2)
        language.choose("en")
        assert told.model_dump_json(indent=2) == written
        assert '<html lang="en">' in render_html(told)
        language.choose("zh")


def test_errors_say_what_happened_in_chinese(chinese: None) -> None:
    incident = document(ROOT / "docs" / "gallery" / "late" / "incident.json").incident
    error = error_for(of_incident(incident, 3.0, torn=False))
    assert isinstance(error, TimeoutError)
    assert "timeout" in str(error)
    assert str(error).startswith(
        "all_reduce（0:cpu:865c6391/7）超时，timed out (collective timeout after the limit of 3 s)：all_reduce(float32[100000]"
    )
    assert "rank 2 迟到。先看它的调用栈" in str(error)


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("speaks", ["en", "zh"])
def test_an_error_says_of_each_duration_what_it_is(path: Path, speaks: str) -> None:
    """The call's own time is more than the summary's, by the time that the verdict took: two waits they are not."""
    incident = document(path).incident
    language.choose(speaks)
    try:
        head = (
            str(error_for(of_incident(incident, 4.56, torn=False))).replace(headline(incident), "|").partition("|")[0]
        )
    finally:
        language.choose(None)
    assert re.fullmatch(r"[^;]*(after the limit of|decided after|失败，)[^;]* s[^;]*", head), head


def test_a_side_that_calls_nothing_more_is_said_in_chinese(chinese: None) -> None:
    label = "evaluation evaluate() after 0 optimizer steps, try 1 of ranks 0-2"
    sides = (("all_reduce()", (0, 1)), (f"nothing more: it has finished {label}", (2,)))
    incident = document(ROOT / "docs" / "gallery" / "late" / "incident.json").incident.model_copy(
        update={"sides": sides}
    )
    said_so = "rank 2 没有再调用：它已完成 rank 0-2 的 0 次优化器更新后的评估 evaluate()，第 1 次尝试"
    assert said_so in headline(incident) and said_so in as_text(incident)


def test_a_call_that_hardly_began_is_told_the_limit_that_passed() -> None:
    incident = document(ROOT / "docs" / "gallery" / "late" / "incident.json").incident
    assert incident.timeout
    assert f"(collective timeout after the limit of {incident.timeout:.3g} s)" in str(
        error_for(of_incident(incident, 2e-4, torn=False))
    )


def test_the_line_that_a_rank_logs_of_a_failed_call_on_a_guarded_backend_is_chinese(
    chinese: None, caplog: pytest.LogCaptureFixture
) -> None:
    incident = document(ROOT / "docs" / "gallery" / "late" / "incident.json").incident
    error = error_for(of_incident(incident, 3.0, torn=False))

    def fail() -> None:
        raise error

    queue = WorkQueue("collectives", lambda outcome: None)
    work = GuardedWork("all_reduce", [], None)
    text = tr("{operation} on process group {group}", operation="all_reduce", group="0")
    with caplog.at_level(logging.ERROR, "ncclguard"), pytest.raises(type(error)):
        queue.issue(Task(text, fail, work), False)
        work.wait()
    queue.close("the test is over")
    assert caplog.messages == [f"ncclguard: 进程组 0 上的 all_reduce 失败：{error}"]


def test_str_of_an_incident_is_for_people_and_its_fields_are_data(chinese: None) -> None:
    incident = document(GALLERY[0]).incident
    assert str(incident) == as_text(incident)
    assert CHINESE.search(incident.to_json()) is None
    assert Incident.from_json(incident.to_json()) == incident


# -------------------------------------------------------------------------------------------------------------- explain


def printed(folder: Path) -> str:
    shown = io.StringIO()
    print_report(explain([str(folder)]), Console(file=shown, width=400, highlight=False, markup=False))
    return shown.getvalue()


@pytest.mark.parametrize("folder", UNGUARDED, ids=lambda path: path.name)
def test_explain_of_recorded_logs_is_chinese_and_its_json_is_not(folder: Path) -> None:
    report = explain([str(folder)])
    written = report.to_json()
    language.choose("zh")
    try:
        again = explain([str(folder)])
        assert again.to_json() == written
        prose = (again.summary, again.reason, again.decision_reason, again.next_step, *again.advice, *again.notes)
        for text in (*prose, *again.arithmetic, *again.overturned_by):
            assert isinstance(text, Message) and CHINESE.search(language.say(text)) if text else True, text
        shown, page = printed(folder), explained_page(again)
    finally:
        language.choose(None)
    assert re.match(r"(rank \d拖住了|rank \d 拖住了|卡在|发生了事故|这些输入里)", shown), shown[:80]
    for head in ("决定：", "下一步：", "还可以做什么"):
        assert head in shown
    assert '<html lang="zh">' in page
    assert not [head for head in re.findall(r"<h2>([^<]*)</h2>", page) if not CHINESE.search(head)]


def test_explain_in_chinese_word_for_word(chinese: None) -> None:
    text = printed(ROOT / "tests" / "unguarded_logs" / "legacy-mismatch-shape")
    head, _, rest = text.partition("rank  状态")
    assert head.splitlines() == [
        "rank 1 拖住了组 0 (default_pg) 的 all_reduce #10。原因：调用不一致；类别 mismatch_shape_or_op（置信度中）：操作相同，张量形状不同。",
        "决定：改代码（fix-code）。各 rank 的调用不一致；重启后还会走到同一处。",
        "下一步：比较各 rank 在这里调用了什么：张量大小不同（pad 到相同大小，或先交换大小），还是只有部分 rank 执行的调用（`if rank == 0:`）。",
        "依据（置信度高）：组 0 (default_pg)：其他 rank 在等，而 rank 1 在 #10 处是另一个集合通信。",
        "集合通信：all_reduce，seq 10，NumelIn 1,000，NumelOut 1,000，组 0 (default_pg)",
        "实际生效的时限：6 s",
        "  all_reduce [1000] Float：rank 0、2",
        "  all_reduce [999] Float：rank 1",
    ]
    assert "证据，按时间排列" in rest and "后果，不是原因" in rest


@pytest.mark.parametrize("speaks", language.LANGUAGES)
@pytest.mark.parametrize("form", ["error", "panel"])
@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.parent.name)
def test_explain_reads_what_the_guard_has_said_in_any_language(
    path: Path, form: str, speaks: str, tmp_path: Path
) -> None:
    """The logs of a guarded job: the ranks that waited say who held them up, and are not to blame for their errors."""
    incident = document(path).incident
    language.choose(speaks)
    try:
        for rank in incident.participants:
            shown = io.StringIO("step 6\n")
            shown.seek(0, io.SEEK_END)
            if rank not in incident.culprits and form == "panel":
                show(incident, shown)
            elif rank not in incident.culprits:
                try:
                    raise error_for(of_incident(incident, 3.0, torn=False))
                except GuardError:
                    shown.write(traceback.format_exc())
            (tmp_path / f"rank{rank}.log").write_text(shown.getvalue(), encoding="utf-8")
    finally:
        language.choose(None)
    report = explain([str(tmp_path)])
    assert (report.culprits, report.cause) == (incident.culprits, incident.cause)
    assert report.summary.startswith(f"Rank 2 held up {incident.op}. Cause: {incident.cause}")


def test_an_own_exception_of_another_rank_counts_more_than_an_incident_before(tmp_path: Path) -> None:
    incident = document(ROOT / "docs" / "gallery" / "late" / "incident.json").incident
    shown = io.StringIO()
    show(incident, shown)
    (tmp_path / "rank0.log").write_text(shown.getvalue())
    (tmp_path / "rank1.log").write_text(
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\nKeyError: 3\n'
    )
    (tmp_path / "rank2.log").write_text("step 6\n")
    assert explain([str(tmp_path)]).culprits == (1,)


# --------------------------------------------------------------------------------------------------------------- --help


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.available])
def test_all_of_a_help_is_chinese_and_fits(name: str, chinese: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser: Parser = importlib.import_module(COMMANDS[name].module).build_parser()
    said_by_torch = {action.dest for action in elastic.parser()._actions} - {"help"} if name == "run" else set()
    own = [action for action in parser._actions if action.help and action.dest not in said_by_torch]
    texts = [parser._get_formatter()._expand_help(action) for action in own]
    titles = [str(group.title) for group in parser._action_groups if group._group_actions]
    others = [parser.description or "", *titles, *parser.examples.values(), *parser.exit_codes.values()]
    texts += map(in_help, others)
    assert not [text for text in texts if not CHINESE.search(text)]
    shown = parser.format_help()
    words = "".join(shown.split())
    assert shown.startswith(f"用法：ncclguard {name} ")
    assert not [text for text in texts if "".join(text.split()) not in words]
    lines = [line for line in shown.splitlines() if CHINESE.search(line) and not line.startswith("用法：")]
    assert max(map(cell_len, lines)) <= 80


def test_the_list_of_commands_is_chinese(chinese: None) -> None:
    lines = list(filter(None, usage().splitlines()))
    assert len(lines) > len(COMMANDS)
    assert not [line for line in lines if not CHINESE.search(line) or cell_len(line) > 80]


ERRORS = [
    ("--late x FILE", "参数 --late：不是有效的 float 值：'x'"),
    ("--late", "参数 --late：需要一个值"),
    ("--kind b FILE", "参数 --kind：无效的选择：'b'（可选：'a'）"),
    ("--kind a --once FILE", "参数 --once：不能与参数 --kind 同时使用"),
    ("--once=1 FILE", "参数 --once：不接受值，却给了 '1'"),
    ("--l 1 FILE", "选项有歧义：--l 可以是 --late、--list"),
    ("--late 1", "缺少必需的参数：FILE"),
    ("FILE b --fast", "无法识别的参数：b --fast"),
    ("FILE --list", "参数 --list：至少需要一个值"),
]


@pytest.mark.parametrize(("line", "wrong"), ERRORS)
def test_an_error_of_argparse_is_chinese_and_what_it_was_in_english(
    line: str, wrong: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(language.VARIABLE, raising=False)
    shown = []
    for speaks, made in (("zh", Parser), ("en", Parser), ("en", argparse.ArgumentParser)):
        parser = made(prog="ncclguard try", description="Try " * 30)
        parser.add_argument("file", metavar="FILE", help="a file " * 10)
        parser.add_argument("--late", type=float)
        parser.add_argument("--list", nargs="+")
        either = parser.add_mutually_exclusive_group()
        either.add_argument("--kind", choices=["a"])
        either.add_argument("--once", action="store_true")
        parser.add_argument("--both", action=argparse.BooleanOptionalAction, default=True, help="both")
        language.choose(speaks)
        try:
            with pytest.raises(SystemExit, match="2"):
                parser.parse_args(line.split())
            shown.append(capsys.readouterr().err + parser.format_help().partition("examples:")[0].rstrip())
        finally:
            language.choose(None)
    quoted = shown[0].replace("（可选：a）", "（可选：'a'）")  # newer Pythons leave the quotes out
    assert f"ncclguard try：错误：{wrong}\n" in quoted
    assert shown[1] == shown[2]


# ----------------------------------------------------------------------------------------------------------- the setting


@pytest.mark.parametrize("value", ["zh", "zh_CN", "zh-CN", "ZH_cn.UTF-8", "zh-Hans"])
def test_the_variable_chooses_chinese(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(language.VARIABLE, value)
    assert (language.current(), GuardConfig().language) == ("zh", "zh")


def test_no_other_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(language.VARIABLE, raising=False)
    for name in ("LANG", "LANGUAGE", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.setenv(name, "zh_CN.UTF-8")
    assert (language.current(), GuardConfig().language) == ("en", "en")


def test_an_unknown_language_is_warned_of_once_and_an_error_only_where_a_program_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(language.VARIABLE, "klingon")
    with pytest.raises(GuardConfigError, match="language is 'elvish'; allowed: en or zh"):
        GuardConfig(language="elvish")
    language.of_variable.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="ncclguard"):
        assert GuardConfig().language == "en"
        assert [language.current(), language.current()] == ["en", "en"]
    (record,) = caplog.records
    assert record.getMessage() == (
        "the environment variable NCCLGUARD_LANGUAGE has no effect: 'klingon' is no language of ncclguard: "
        "set en or zh; zh_CN and zh-CN are zh too"
    )


def test_a_program_may_choose_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(language.VARIABLE, raising=False)
    try:
        configure(language="zh_CN")
        assert language.current() == "zh"
        assert str(ranks_text([1, 2])) == "ranks 1-2"
    finally:
        reset_config()
    assert language.current() == "en"


@pytest.mark.processes
def test_the_command_speaks_chinese_and_writes_the_same_json(tmp_path: Path) -> None:
    folder = "tests/unguarded_logs/legacy-skip"
    outputs = {}
    for speaks in language.LANGUAGES:
        environ = {**os.environ, language.VARIABLE: speaks, "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, "-m", "ncclguard", "explain", folder, "--json", str(tmp_path / speaks)]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=100, check=True)
        outputs[speaks] = done.stdout.decode()
    assert outputs["en"].startswith("Rank 2 held up")
    assert outputs["zh"].startswith("rank 2 拖住了")
    plain = {**os.environ, language.VARIABLE: "zh", "PYTHONIOENCODING": "ascii", "COLUMNS": "400"}
    command = [sys.executable, "-m", "ncclguard", "explain", folder]
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, timeout=100, check=True)
    assert done.stdout.startswith(b"Rank 2 held up"), "no characters for Chinese"
    assert (tmp_path / "en").read_bytes() == (tmp_path / "zh").read_bytes()


def test_every_cause_has_a_word() -> None:
    assert [str(WORD[cause]) for cause in Cause] == [cause.value for cause in Cause]
    documented = (ROOT / "docs" / "causes.zh.md").read_text(encoding="utf-8")
    for cause in Cause:
        assert f"| `{cause}` | {said(WORD[cause], 'zh')}：" in documented
        assert CHINESE.search(str(said(MEANING[cause], "zh")))


def test_two_threads_read_a_catalogue_at_once_also_where_the_collector_calls_back() -> None:
    """Not so with Python's own parser: in 3.11 `ast.parse` raised SystemError here, and a report was lost."""
    text = (language.CATALOGUES / "zh.po").read_text(encoding="utf-8")
    both, done = threading.Barrier(2), list[int]()

    def read(depth: int) -> None:
        if depth:  # the two are not equally deep in calls
            read(depth - 1)
            return
        both.wait()
        done.append(len(list(language.entries_of(text))))

    def called_back(*_: object) -> None:
        sum(1 for _ in range(50))

    before = sys.getswitchinterval(), gc.get_threshold()
    gc.callbacks.append(called_back)
    try:
        sys.setswitchinterval(1e-5)
        gc.set_threshold(50)
        for _ in range(4):
            threads = [threading.Thread(target=read, args=(depth,)) for depth in (0, 3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        gc.callbacks.remove(called_back)
        sys.setswitchinterval(before[0])
        gc.set_threshold(*before[1])
    assert len(done) == 8 and len(set(done)) == 1


def test_a_choice_that_is_misspelt_is_told_what_was_meant(chinese: None, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="ncclguard try")
    parser.add_argument("--fault", choices=("kill", "stop"))
    with pytest.raises(SystemExit):
        parser.parse_args(["--fault", "kil"])
    assert "参数 --fault：无效的选择：'kil'：是不是想写 kill？" in capsys.readouterr().err
