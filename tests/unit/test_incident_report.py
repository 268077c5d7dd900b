"""The report of an incident: lanes aligned without clocks, a page that is safe to open, files that never hurt the job."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import re
import resource
import sys
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ncclguard.incident import model, timeline
from ncclguard.incident.model import Incident, MembershipChange, RankReport
from ncclguard.incident.page import GIVEN_UP, Scale, render_html
from ncclguard.incident.report import AT_MOST, Sequels, Writer, main, show, write_all
from ncclguard.incident.timeline import Document
from ncclguard.outcome import Cause
from ncclguard_explain import page as explain_page
from ncclguard_explain.ranks import hosts_text

TEXT = "all_reduce(float32[1000], SUM)"
GROUP = "0:cpu:ab"
EVIL = '<script>alert(1)</script>"><img src=x onerror=alert(2)>\x1b[31m'


def histories(ranks: int, offsets: dict[int, float], late: int = 2, silent: tuple[int, ...] = ()) -> dict[int, Any]:
    """Ten common operations a second apart; then all but `late` are 5 s in the eleventh. `offsets` shift the ranks' clocks."""
    found = {}
    for rank in range(ranks):
        if rank in silent:
            continue
        at = offsets.get(rank, 0.0)
        past = [timeline.Past(n, TEXT, at + n + 0.1 * (rank % 3), at + n + 0.5, True) for n in range(1, 11)]
        inside = [] if rank == late else [(GROUP, 11, TEXT, at + 11.0)]
        found[rank] = json.loads(json.dumps(timeline.snapshot({GROUP: past}, inside, at + 16.0)))
    return found


def incident(ranks: int = 4, **changes: Any) -> Incident:
    """Rank 2 is late to operation 11; the others have waited for 5 s."""
    reports = [
        RankReport(rank=rank, host=f"gpu-{rank // 8}", pid=100 + rank, state="running", operation=TEXT, age=5.0)
        for rank in range(ranks)
        if rank != 2
    ]
    reports.append(RankReport(rank=2, cause=Cause.LATE, state="none", stack=("train.py:8 in save: torch.save(x)",)))
    values: dict[str, Any] = {
        "id": "ab-0-cpu-ab-11.0", "op": "all_reduce", "op_id": f"{GROUP}/11", "group": GROUP, "generation": 0,
        "cause": Cause.LATE, "culprits": (2,), "deadline_expired": True, "timeout": 5.0, "agreed": True, "attempts": 1,
        "participants": tuple(range(ranks)), "ranks": tuple(reports), "advice": "See its stack, then `py-spy`.",
        "summary": f"{TEXT} failed after 5 s: rank 2 late.",
    }  # fmt: skip
    return Incident(**{**values, **changes})


def document(ranks: int = 4, **changes: Any) -> Document:
    found = incident(ranks, **changes)
    return Document(
        written_at="2026-01-01T00:00:00+00:00",
        written_by=0,
        host="gpu-0",
        job="ab",
        world_size=ranks,
        ncclguard="0",
        torch="2",
        incident=found,
        timeline=timeline.build(found, histories(ranks, {})),
    )


class TestTimeline:
    @given(st.dictionaries(st.integers(0, 3), st.floats(-1e6, 1e6), max_size=4))
    def test_how_far_the_clocks_of_the_ranks_are_apart_changes_nothing(self, offsets: dict[int, float]) -> None:
        one = timeline.build(incident(), histories(4, offsets))
        other = timeline.build(incident(), histories(4, {}))
        assert one is not None
        assert other is not None
        for mine, theirs in zip(one.lanes, other.lanes, strict=True):
            for bar, expected in zip(mine.bars, theirs.bars, strict=True):
                assert bar.start == pytest.approx(expected.start, abs=1e-4)
                assert (bar.end is None) == (expected.end is None)

    def test_zero_is_the_first_entry_into_the_operation_that_failed(self) -> None:
        found = timeline.build(incident(), histories(4, {1: 1e5}))
        assert found is not None
        inside = [bar for lane in found.lanes for bar in lane.bars if bar.end is None]
        assert [bar.start for bar in inside] == pytest.approx([0.0] * 3, abs=1e-4)
        assert found.given_up == pytest.approx(5.0, abs=1e-3)
        assert found.lanes[2].bars[-1].sequence == 10
        assert found.lanes[1].clock == "operations"
        assert found.lanes[1].common == 10

    def test_a_rank_without_a_common_operation_is_laid_by_its_answer(self) -> None:
        data = histories(4, {})
        data[3] = timeline.snapshot({"1:cpu:x": [timeline.Past(1, "barrier()", 0.0, 1.0, True)]}, [], 2.0)
        found = timeline.build(incident(), data)
        assert found is not None
        assert found.lanes[3].clock == "answer"
        assert "had none in common" in render_html(document().model_copy(update={"timeline": found}))

    @pytest.mark.parametrize("bad", [None, [], {}, {"groups": [], "texts": [], "rows": [[0, 1, 0, 1.0, 1.0, 1]]}, "x"])
    def test_a_history_of_another_kind_is_left_out(self, bad: Any) -> None:
        found = timeline.build(incident(), {**histories(4, {}), 1: bad})
        assert found is not None
        assert [lane.rank for lane in found.lanes] == [0, 2, 3]
        assert timeline.build(incident(), {0: bad}) is None

    def test_the_scale_never_goes_back_and_long_pauses_are_marked(self) -> None:
        data = histories(4, {})
        for rank, one in data.items():
            for row in one["rows"]:
                if row[1] < 5:
                    row[3] += 1000.0
                    row[4] += 1000.0
            assert rank in data
        found = timeline.build(incident(), data)
        assert found is not None
        scale = Scale(found)
        places = [scale.place(-1100 + 0.5 * step) for step in range(2300)]
        assert places == sorted(places)
        assert 0 < places[0]
        assert places[-1] == GIVEN_UP
        assert [round(seconds) for _, _, seconds in scale.cuts] == [1000]

    def test_a_snapshot_keeps_the_latest_and_stays_small(self) -> None:
        past = {
            f"{g}:cpu:abcdefgh": [timeline.Past(n, TEXT * 9, n + g / 10, n + 0.5, True) for n in range(500)]
            for g in range(3)
        }
        data = timeline.snapshot(past, [], 501.0)
        assert len(data["rows"]) == timeline.KEPT
        assert len(json.dumps(data)) < 2000


class TestPage:
    def test_the_legend_has_the_colour_of_another_group_and_the_text_its_next_step(self) -> None:
        found = document(further="Try `watch()`.")
        assert found.timeline is not None
        assert "completed, in another group" not in render_html(found)
        lane = found.timeline.lanes[0]
        bars = [bar.model_copy(update={"group": "1:cpu:cd"}) for bar in lane.bars if bar.ok]
        lanes = [lane.model_copy(update={"bars": bars}), *found.timeline.lanes[1:]]
        text = render_html(found.model_copy(update={"timeline": found.timeline.model_copy(update={"lanes": lanes})}))
        assert '<i class="g1"></i>completed, in another group</span>' in text
        assert "Next time: Try <code>watch()</code>." in text
        assert "  next time: Try `watch()`." in str(found.incident)

    @pytest.mark.parametrize("ranks", [4, 64, 1000])
    def test_it_holds_who_why_what_to_do_and_loads_nothing(self, ranks: int) -> None:
        page = render_html(document(ranks))
        for text in (
            "rank 2: late",
            "See its stack",
            "<code>py-spy</code>",
            "train.py:8 in save",
            "here the ranks part",
        ):
            assert text in page
        assert "://" not in page
        assert "<script" not in page
        assert not re.search(r"\bon\w+=|url\(|@import|<link[^>]+href=\"(?!data:)", page)
        assert "default-src 'none'" in page
        assert "prefers-color-scheme:dark" in page
        assert page.count('class="row') == {4: 5, 64: 65, 1000: 3}[ranks]
        assert len(page) < 1_000_000

    def test_markup_in_what_programs_said_stays_text(self) -> None:
        ranks = tuple(
            RankReport(
                rank=rank, host=EVIL, cause=Cause.FAILED if rank == 2 else None, state="none" if rank == 2 else "running",
                operation=EVIL, call_site=EVIL, exception=EVIL, stack=(EVIL,), note=EVIL,
                threads=((EVIL, (EVIL,)),),
            )
            for rank in range(4)
        )  # fmt: skip
        made = document(ranks=4, summary=EVIL, advice=EVIL, op=EVIL, group=EVIL, sides=((EVIL, (0, 1)),))
        page = render_html(made.model_copy(update={"incident": made.incident.model_copy(update={"ranks": ranks})}))
        assert "<script" not in page
        assert "<img" not in page
        assert "&lt;script&gt;" in page

    def test_without_a_history_and_without_a_culprit_it_says_so(self) -> None:
        made = document(cause=Cause.NETWORK, culprits=()).model_copy(update={"timeline": None})
        page = render_html(made)
        assert "Nobody is named" in page
        assert "No rank could say what it did before" in page

    def test_a_silent_rank_has_a_lane_of_what_the_others_completed_with_it(self) -> None:
        found = incident(ranks=4, cause=Cause.STUCK)
        silent = RankReport(rank=2, cause=Cause.STUCK, state="silent", note="it did not answer: stuck")
        found = found.model_copy(update={"ranks": (*found.ranks[:2], silent, found.ranks[3])})
        lanes = timeline.build(found, histories(4, {}, silent=(2,)))
        page = render_html(document().model_copy(update={"incident": found, "timeline": lanes}))
        assert page.count('class="guess"') == 10 + 1  # with its entry in the legend
        assert "stuck: it did not answer<" in page

    def test_json_gives_an_equal_document_back_and_refuses_another_version(self) -> None:
        made = document()
        assert Document.model_validate_json(made.model_dump_json()) == made
        with pytest.raises(ValueError, match="schema version 9, this ncclguard reads 1"):
            Document.model_validate_json(made.model_dump_json().replace('"schema_version":1', '"schema_version":9', 1))


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return False


class TestPanel:
    def shown(self, encoding: str) -> str:
        raw = io.BytesIO()
        stream = Terminal(raw, encoding=encoding)
        show(incident(), stream)
        return raw.getvalue().decode(encoding)

    def test_it_is_framed_and_has_the_whole_text(self) -> None:
        text = self.shown("utf-8")
        assert "ncclguard incident ab-0-cpu-ab-11.0" in text
        assert "rank 2 late" in text
        assert "what to do: See its stack" in text
        assert text.count("╭") == 1

    def test_a_stream_that_cannot_take_the_frame_gets_plain_text(self) -> None:
        assert "rank 2 late" in self.shown("ascii")

    def test_without_rich_it_is_plain_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "rich", None)
        assert "rank 2 late" in self.shown("utf-8")


class TestFiles:
    def report(self, folder: Path | str | None, found: Incident | None = None) -> None:
        writer = Writer(None if folder is None else str(folder), False, 0, 4)
        writer.submit(incident() if found is None else found, "ab", histories(4, {}))
        assert writer.wait(30)

    def test_a_page_and_its_data_in_a_new_folder(self, tmp_path: Path) -> None:
        self.report(tmp_path / "a" / "b")
        names = sorted(file.name for file in (tmp_path / "a" / "b").iterdir())
        assert names == ["incident-ab-0-cpu-ab-11.0.html", "incident-ab-0-cpu-ab-11.0.json"]
        data = Document.model_validate_json((tmp_path / "a" / "b" / names[1]).read_text())
        assert data.incident == incident()
        assert data.timeline is not None
        assert (tmp_path / "a" / "b" / names[0]).read_text() == render_html(data)

    @pytest.mark.processes
    @pytest.mark.parametrize("kind", ["full_disk", "read_only"])
    def test_where_nothing_can_be_written_it_goes_to_the_folder_for_temporary_files(
        self,
        kind: str,
        tmp_path: Path,
        request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        folder: Path = request.getfixturevalue(kind)
        before = sorted(folder.iterdir())
        spare = tmp_path / "spare"
        spare.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(spare))
        with caplog.at_level(logging.WARNING):
            self.report(folder)
        assert sorted(folder.iterdir()) == before  # nothing half written
        assert len(list(spare.rglob("incident-*.html"))) == 1
        assert ("No space left" if kind == "full_disk" else "Read-only file system") in caplog.text
        assert str(spare) in caplog.text

    @pytest.mark.processes
    def test_with_no_room_anywhere_it_says_what_to_set(
        self, full_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(full_disk))
        with caplog.at_level(logging.WARNING):
            self.report(full_disk)
        assert "set NCCLGUARD_REPORT_DIR to a folder that can be written" in caplog.text

    def test_a_limit_on_file_sizes_leaves_no_half_file(self, tmp_path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                write_all(tmp_path, {"small": "x", "large": "x" * 100_000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(tmp_path.iterdir()) == []

    def test_an_incident_is_reported_once_and_a_loop_of_failures_fills_no_disk(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer = Writer(str(tmp_path), False, 0, 4)
        with caplog.at_level(logging.WARNING):
            for number in [0, 0, *range(AT_MOST + 20)]:
                writer.submit(incident(id=f"ab-{number}"), "ab", {})
        assert writer.wait(60)
        assert len(list(tmp_path.glob("*.html"))) == AT_MOST
        assert caplog.text.count("no more are reported") == 1

    def test_it_is_written_when_no_thread_can_be_started(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in Python 3.12 when the program has ended."""

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        Writer(str(tmp_path), False, 0, 4).submit(incident(), "ab", {})
        assert len(list(tmp_path.glob("*.html"))) == 1

    def test_without_jinja2_the_data_are_written_and_the_log_says_what_the_page_needs(
        self, tmp_path: Path, without_jinja2: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            self.report(tmp_path)
        assert [file.suffix for file in tmp_path.iterdir()] == [".json"]
        assert "pip install jinja2" in caplog.text

    def test_none_writes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        self.report(None)
        assert list(tmp_path.iterdir()) == []

    def test_the_panel_goes_to_the_stderr_of_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch replaces sys.stderr while it prints an uncaught exception, and what is written to that may be lost."""
        usual, replaced = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stderr", usual)
        writer = Writer(None, True, 0, 4)
        monkeypatch.setattr(sys, "stderr", replaced)
        writer.submit(incident(), "ab", {})
        assert writer.wait(30)
        assert "rank 2 late" in usual.getvalue()
        assert replaced.getvalue() == ""

    def test_a_terminal_that_is_gone_does_not_keep_the_files_from_being_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed = io.StringIO()
        closed.close()
        monkeypatch.setattr(sys, "stderr", closed)
        monkeypatch.setattr(logging, "raiseExceptions", False)
        writer = Writer(str(tmp_path), True, 0, 4)
        writer.submit(incident(), "ab", histories(4, {}))
        assert writer.wait(30)
        assert len(list(tmp_path.glob("*.html"))) == 1


@pytest.fixture
def without_jinja2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that has no torch and so no Jinja2."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    explain_page._environment.cache_clear()
    yield
    explain_page._environment.cache_clear()


def test_without_jinja2_the_command_shows_the_panel_and_says_what_the_page_needs(
    tmp_path: Path, without_jinja2: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(document().model_dump_json())
    assert main([str(tmp_path / "a.json")]) == 2
    told = capsys.readouterr()
    assert "rank 2 late" in told.out
    assert "pip install jinja2" in told.err
    assert not (tmp_path / "a.html").exists()


def test_the_command_makes_the_page_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = document()
    (tmp_path / "a.json").write_text(made.model_dump_json())
    assert main([str(tmp_path / "a.json")]) == 0
    assert (tmp_path / "a.html").read_text() == render_html(made)
    assert "rank 2 late" in capsys.readouterr().out
    (tmp_path / "b.json").write_text("{}")
    assert main([str(tmp_path / "b.json")]) == 2
    assert "b.json: " in capsys.readouterr().err


def test_the_history_of_a_thousand_ranks_is_laid_out_in_order() -> None:
    """Whatever the order in which the answers came."""
    data = list(histories(1000, {rank: random.Random(rank).uniform(-1e5, 1e5) for rank in range(1000)}).items())
    random.Random(1).shuffle(data)
    found = timeline.build(incident(1000), dict(data))
    assert found is not None
    assert [lane.rank for lane in found.lanes] == list(range(1000))


def of_many(ranks: int, blamed: range, cause: Cause = Cause.LATE, host: str = "node{:04}") -> Incident:
    """Hosts of 8; of those that are lost nobody has a word, and where they were stands beside the reports."""
    lost = cause is Cause.LOST
    reports = [
        RankReport(
            rank=rank, cause=cause if rank in blamed else None, state="departed" if lost else "none",
            note=f"process {rank} does not exist any more" if lost else None, stack=() if lost else ("train.py:8 in save",),
        )
        if rank in blamed
        else RankReport(rank=rank, state="running", operation=TEXT, age=5.0, call_site="train.py:7 in step")
        for rank in range(ranks)
    ]  # fmt: skip
    hosts = model.unsaid_hosts({rank: host.format(rank // 8) for rank in range(ranks)}, reports)
    changes = {"participants": tuple(range(ranks)), "ranks": tuple(reports), "culprits": tuple(blamed), "cause": cause}
    return Incident.from_json(incident().model_copy(update={**changes, "hosts": hosts}).to_json())


class TestManyRanks:
    """Ten thousand ranks are told by their hosts, in a text and on a page that do not grow with them."""

    @pytest.mark.parametrize("ranks", [512, 10_000, 16_384])
    def test_one_late_rank_and_where_it_is(self, ranks: int) -> None:
        stream = io.StringIO()
        found = of_many(ranks, range(77, 78))
        show(found, stream)
        text = stream.getvalue()
        assert "rank 77 (host node0009): late" in text
        assert f"waiting for up to 5 s: {ranks - 1:,} ranks, all but rank 77 on host node0009, in all_reduce(" in text
        assert len(text.splitlines()) < 16
        made = document(4).model_copy(
            update={"incident": found, "timeline": timeline.build(found, histories(min(ranks, 1000), {}, late=77))}
        )
        html = render_html(made)
        assert "rank 77 on host node0009" in html
        assert "train.py:8 in save" in html
        assert len(html) < 30_000
        assert html.count("<tr") < 30

    def test_a_host_that_is_gone_is_one_entry(self) -> None:
        text = str(of_many(10_000, range(4712, 4720), Cause.LOST))
        assert "  host node0589, all 8 ranks (4712-4719): lost; the first, rank 4712:" in text
        assert "process 4712 does not exist any more" in text
        assert "9,992 ranks, all but host node0589, all 8 ranks (4712-4719), in" in text
        assert "process 4713" not in text

    def test_half_of_the_job_on_hosts_without_a_pattern(self) -> None:
        found = of_many(512, range(256))
        letters = str.maketrans("0123456789", "abcdefghij")
        found = found.model_copy(update={"hosts": tuple((name.translate(letters), text) for name, text in found.hosts)})
        text = str(found)
        assert "  hosts nodeaaaa, nodeaaab, nodeaaac, nodeaaad, ... (32 in all), all 256 ranks (0-255): late" in text
        assert len(text.splitlines()) < 16

    def test_each_of_500_culprits_elsewhere_is_bounded(self) -> None:
        found = of_many(10_000, range(500))
        reports = tuple(
            report.model_copy(update={"stack": tuple(f"a.py:{report.rank} in f{n}" for n in range(30))})
            if report.cause
            else report
            for report in found.ranks
        )
        found = found.model_copy(update={"ranks": reports})
        assert len(str(found).splitlines()) < 110
        assert len(render_html(document(4).model_copy(update={"incident": found, "timeline": None}))) < 100_000

    def test_in_a_job_of_few_ranks_nothing_is_told_by_hosts(self) -> None:
        found = incident(16)
        assert model.unsaid_hosts({rank: "a" for rank in range(16)}, found.ranks) == ()
        assert "waiting for up to 5 s: ranks 0-1, 3-15 in all_reduce" in str(found)
        assert '"hosts":[]' in found.to_json()

    @pytest.mark.parametrize(
        ("names", "text"),
        [
            (["n9", "n10", "n11"], "hosts n[9-11]"),
            (["gpu-a-7", "gpu-a-8", "gpu-b-7"], "hosts gpu-a-[7-8], gpu-b-7"),
            (["node08.x1.org", "node09.x1.org", "node11.x1.org"], "hosts node[08-09,11].x1.org"),
            (["ip-10-0-1-7", "ip-10-0-2-7", "ip-10-0-2-8"], "hosts ip-10-0-1-7, ip-10-0-2-[7-8]"),
            ([f"n{n:02}" for n in range(0, 60, 2)], "hosts n[00,02,04,06,08,10,12,14,...] (30 in all)"),
            (["a", "b", "c", "d", "e"], "hosts a, b, c, d, ... (5 in all)"),
            (["09", "9"], "hosts [09,9]"),
        ],
    )  # fmt: skip
    def test_names_of_hosts_become_ranges(self, names: list[str], text: str) -> None:
        assert hosts_text(names) == text

    @pytest.mark.parametrize("text", ["", "x", "5-", "-5", "0-99999999999", "1-x,4"])
    def test_hosts_that_cannot_be_read_are_not_known(self, text: str) -> None:
        found = of_many(512, range(77, 78)).model_copy(update={"hosts": (("node1", text),)})
        assert "ranks 0-76, 78-511" in str(found)


class Job:
    """Some ranks, each with its record of what became of the job, its writer, and one folder for all."""

    def __init__(self, folder: Path, ranks: int = 4) -> None:
        self.folder = folder
        self.now = set(range(ranks))
        self.writers = {rank: Writer(str(folder), False, rank, ranks) for rank in self.now}
        self.sequels = {rank: self._sequel(rank) for rank in self.now}
        self.wrote: list[int] = []

    def _sequel(self, rank: int) -> Sequels:
        def complete(found: Incident, session: str) -> None:
            self.wrote.append(rank)
            self.writers[rank].complete(found, session)

        return Sequels(rank, complete)

    def lost(self, rank: int, number: int, writer: int, reported: bool = True) -> Incident:
        """All ranks but the lost one have the verdict; `writer` is to report it, and maybe has no time to."""
        said = [RankReport(rank=one, state="departed" if one == rank else "running") for one in sorted(self.now)]
        found = incident(id=f"ab-{number}.0", cause=Cause.LOST, culprits=(rank,)).model_copy(
            update={"ranks": tuple(said)}
        )
        self.now.discard(rank)
        if reported:
            self.writers[writer].submit(found, "ab", histories(4, {}))
        for one in self.now:
            self.sequels[one].found(found, writer, "ab")
        self.writers[writer].wait(10.0)
        return found

    def change(self, kind: str, ranks: tuple[int, ...], **values: Any) -> None:
        self.now = self.now - set(ranks) if kind == "went on" else self.now | set(ranks)
        change = MembershipChange(kind=kind, ranks=ranks, participants=len(self.now), seconds=1.84, **values)
        for one in sorted(self.now):
            if kind == "rejoined" and one in ranks:
                self.sequels[one] = self._sequel(one)  # a new process
            else:
                self.sequels[one].changed(change, self.now)
        for one in self.now:
            self.writers[one].wait(10.0)

    def said(self, found: Incident) -> list[str]:
        text = (self.folder / f"incident-{found.id}.json").read_text()
        return [str(change) for change in Document.model_validate_json(text).incident.afterwards]


class TestAfterwards:
    """What became of the job, in the report that was written before that."""

    @pytest.fixture
    def job(self, tmp_path: Path) -> Job:
        return Job(tmp_path)

    def test_the_rank_that_wrote_the_report_completes_it(self, job: Job) -> None:
        found = job.lost(3, 1, writer=1)
        assert job.said(found) == []
        job.change("went on", (3,))
        job.change("rejoined", (3,), step=1204)
        assert job.said(found) == ["went on without rank 3 after 1.8 s", "rank 3 rejoined at step 1,204, 1.8 s"]
        assert job.wrote == [1, 1]
        text = (job.folder / f"incident-{found.id}.html").read_text()
        assert "<li>Went on without rank 3 after 1.8 s.</li><li>Rank 3 rejoined at step 1,204, 1.8 s.</li>" in text
        assert "went on without rank 3 after 1.8 s; rank 3 rejoined" in text  # below the lanes
        document = Document.model_validate_json((job.folder / f"incident-{found.id}.json").read_text())
        assert document.timeline is not None
        assert (document.written_by, len(document.timeline.lanes)) == (1, 4)  # what it had is kept

    def test_the_advice_is_that_for_a_job_that_has_gone_on(self, job: Job) -> None:
        found = job.lost(3, 1, writer=1)
        job.change("went on", (3,))
        told = Document.model_validate_json((job.folder / f"incident-{found.id}.json").read_text()).incident
        assert told.advice.startswith("The others go on without it. See the launcher's")
        assert "on_lost" not in str(told)
        assert "next time" not in str(told)

    @pytest.mark.parametrize("reported", [True, False])
    def test_another_rank_completes_it_where_the_writer_is_gone(self, job: Job, reported: bool) -> None:
        """Killed before the others went on, also before it had written anything: one file, by one rank."""
        found = job.lost(3, 1, writer=0, reported=reported)
        job.lost(0, 2, writer=1)
        job.change("went on", (0, 3))
        assert job.said(found) == ["went on without ranks 0, 3 after 1.8 s"]
        assert job.wrote == [1, 1]
        assert len(list(job.folder.glob("*.json"))) == 2

    def test_what_a_writer_did_not_come_to_is_made_up_for(self, job: Job) -> None:
        """It went on, and was killed before its thread had written that."""
        found = job.lost(3, 1, writer=0)
        job.writers[0].complete = lambda *_: None  # type: ignore[method-assign]
        job.change("went on", (3,))
        assert job.said(found) == []
        job.lost(0, 2, writer=1)
        job.change("went on", (0,))
        assert job.said(found) == ["went on without rank 3 after 1.8 s"]

    def test_the_second_loss_of_a_rank_is_another_one(self, job: Job) -> None:
        """And a rank that came back completes no report of what was before."""
        first = job.lost(0, 1, writer=1)
        job.change("went on", (0,))
        job.change("rejoined", (0,), step=7)
        second = job.lost(0, 2, writer=1)
        job.change("went on", (0,))
        assert job.said(first) == ["went on without rank 0 after 1.8 s", "rank 0 rejoined at step 7, 1.8 s"]
        assert job.said(second) == ["went on without rank 0 after 1.8 s"]
        job.change("rejoined", (0,), step=9)
        third = job.lost(1, 3, writer=0)
        job.change("went on", (1,))
        assert job.said(third) == ["went on without rank 1 after 1.8 s"]
        assert job.said(second) == ["went on without rank 0 after 1.8 s", "rank 0 rejoined at step 9, 1.8 s"]
        assert job.wrote.count(0) == 1

    def test_a_loss_is_known_once_it_was_found_until_the_rank_is_back(self, job: Job) -> None:
        """So an operation that only goes on without the rank, as the survivors' meeting does, is no further incident."""
        sequel = job.sequels[1]
        found = job.lost(0, 1, writer=1)
        assert sequel.known(found)
        both = found.model_copy(update={"culprits": (0, 3)})
        assert not sequel.known(both)
        assert not sequel.known(incident(culprits=(0,)))  # late, not gone
        job.lost(3, 2, writer=1)
        assert sequel.known(both)
        job.change("rejoined", (0,), step=7)
        assert not sequel.known(found)  # now it would be the loss of its new process

    @pytest.mark.parametrize("heard_late", [False, True])
    def test_the_end_of_a_stuck_rank_by_its_launcher_is_no_loss_of_its_own(self, heard_late: bool, job: Job) -> None:
        sequel = job.sequels[1]
        stuck = incident(id="ab-1.0", cause=Cause.STUCK, culprits=(3,), participants=(0, 1, 2, 3))
        ended = stuck.model_copy(update={"id": "ab-2.0", "cause": Cause.LOST, "participants": (0, 1, 2)})
        if heard_late:
            sequel.given_up((3,))
        sequel.found(stuck, 0, "ab")
        assert sequel.known(ended) is heard_late
        sequel.given_up((3,))
        assert sequel.known(ended)
        job.change("rejoined", (3,), step=7)
        assert not sequel.known(ended)

    def test_an_incident_that_is_heard_of_late_says_it_too(self, job: Job) -> None:
        """The monitor may hear of the survivors' own verdict after they have gone on."""
        job.change("went on", (3,))
        found = job.lost(3, 1, writer=0)
        assert job.said(found) == ["went on without rank 3 after 1.8 s"]

    def test_a_rank_that_was_only_late_once_was_not_lost_then(self, job: Job) -> None:
        late = incident(id="ab-0.0", culprits=(3,))
        for sequel in job.sequels.values():
            sequel.found(late, 0, "ab")
        job.writers[0].submit(late, "ab", {})
        job.writers[0].wait(10.0)
        job.lost(3, 1, writer=0)
        job.change("went on", (3,))
        assert job.said(late) == []

    def test_a_report_of_before_is_read(self) -> None:
        old = json.loads(document().model_dump_json())
        del old["incident"]["afterwards"]
        assert Document.model_validate(old) == document()

    def test_a_torn_or_foreign_file_is_no_report(self, job: Job) -> None:
        found = job.lost(3, 1, writer=0, reported=False)
        (job.folder / f"incident-{found.id}.json").write_text('{"schema_version": 1, "inci')
        job.lost(0, 2, writer=1)
        job.change("went on", (0, 3))
        assert job.said(found) == ["went on without ranks 0, 3 after 1.8 s"]


def test_a_file_that_is_not_there_is_told_without_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err == f"ncclguard report: {tmp_path / 'none.json'}: no such file or folder\n"


def test_of_a_folder_its_newest_report_is_proposed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"ncclguard report: {tmp_path}: this is a folder: give a file\n"
    for number in (2, 1):
        report = tmp_path / f"incident-{number}.json"
        report.touch()
        os.utime(report, (0, 9 - number))
    assert main([str(tmp_path)]) == 2
    assert f"give a file, such as its newest report, {tmp_path / 'incident-1.json'}\n" in capsys.readouterr().err


def test_the_stack_of_a_thread_is_shown_with_its_name() -> None:
    found = incident()
    late = found.ranks[2].model_copy(update={"thread": "train", "threads": (("MainThread", ("ray.py:3 in loop",)),)})
    told = document(ranks=4).model_copy(
        update={"incident": found.model_copy(update={"ranks": (*found.ranks[:2], late)})}
    )
    assert "thread 'train', innermost last:" in str(told.incident)
    assert "thread train: stack, innermost: train.py:8 in save" in render_html(told)
    assert "thread MainThread: ray.py:3 in loop" in render_html(told)


@pytest.mark.parametrize(("inner", "first"), [(8, "train.py:67 in main"), (9, "train.py:67 in main ...")])
def test_the_programs_own_innermost_frame_is_shown_however_deep_the_libraries_are(inner: int, first: str) -> None:
    stack = ("train.py:9 in <module>", "train.py:67 in main", *[f"torch/nn/f.py:{n} in f" for n in range(inner)])
    found = incident()
    late = found.ranks[2].model_copy(update={"stack": stack})
    lines = str(found.model_copy(update={"ranks": (*found.ranks[:2], late)})).splitlines()
    at = next(number for number, line in enumerate(lines) if "innermost last" in line)
    assert [line.strip() for line in lines[at + 1 : at + 10]] == [first, *stack[-8:]]
    assert f"({inner - 7} outer frames left out)" in lines[at]


def test_long_texts_of_a_table_may_be_cut_into_lines() -> None:
    """At 1,280 pixels nothing of the ranks' table is out of sight; short ones are never cut."""
    page = render_html(document())
    cells = re.findall(r'<td class="t([^"]*)">([^<]*)<', page)
    assert cells and all((len(unescape(text)) > 16) == (kind == " long") for kind, text in cells)
