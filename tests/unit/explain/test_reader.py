"""Any input is read in bounded memory and none crashes the command; unusable input ends with exit code 2."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
from explain_logs import timeout
from hypothesis import HealthCheck, given, settings, strategies as st

from ncclguard_explain import UnusableInput, explain, records
from ncclguard_explain.command import main

NEEDLES = (*records.GENERAL, *records.NEEDLES[:40], b"code is 507", b"EI0013:", b"EI0019:")
LOG = "".join(f"{line}\n" for rank in (0, 1, 3) for line in timeout(rank))


def test_gzip_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log.gz"
    path.write_bytes(gzip.compress(LOG.encode()))
    assert explain([str(path)]).culprits == (2,)


def test_truncated_gzip_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "train.log.gz"
    data = gzip.compress(LOG.encode() + os.urandom(4 << 20).hex().encode(), compresslevel=1)
    path.write_bytes(data[: len(data) // 2])
    report = explain([str(path)])
    assert report.culprits == (2,) and any("truncated" in note for note in report.notes)


def test_half_a_last_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(LOG + timeout(2)[0][:150])
    assert explain([str(path)]).incident


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-8"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(LOG.encode(encoding))
    assert explain([str(path)]).culprits == (2,)


def test_stdin_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for data in (LOG.encode(), gzip.compress(LOG.encode())):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert main(["-", "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["culprits"] == [2]


@pytest.mark.parametrize("block", [300, 1000, 4097, 70_000])
def test_incident_across_the_edges_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Whatever the block size, the facts are the same and the line numbers right."""
    filler = "".join(f"step {number} loss 0.5\n" for number in range(4000))
    trace = (
        "[rank2]: Traceback (most recent call last):\n"
        + "".join(f'[rank2]:   File "m.py", line {n}, in f{n}\n' for n in range(40))
        + "[rank2]: ValueError: bad\n"
    )
    path = tmp_path / "train.log"
    path.write_text(filler + trace + filler + LOG)
    monkeypatch.setattr(records, "BLOCK", block)
    report = explain([str(path)])
    assert report.culprits == (2,)
    assert next((event.name, event.line) for event in report.events if event.kind == "python_exception") == (
        "ValueError",
        4001,
    )
    assert next(event.line for event in report.events if event.kind == "watchdog_timeout") == 4000 + 42 + 4000 + 1


def test_one_line_without_an_end_and_one_bar_of_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("x" * (3 << 20) + "\r".join(f" {n}%|# | {n}/100 [00:01<00:01]" for n in range(100)) + "\n" + LOG)
    assert explain([str(path)]).culprits == (2,)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([*NEEDLES, b"\n", b"\n\n", b"step 12", b"code is 4", b"EI001", b"3:", b"\r"]), max_size=60)
)
def test_lines_that_differ_in_figures_only_are_searched_as_all_others(pieces: list[bytes]) -> None:
    for data in (b"".join(pieces), b"\n".join(pieces) + b"\n"):
        for begin, end in ((0, len(data)), (len(data) // 3, len(data)), (0, data.rfind(b"\n") + 1)):
            found = list(records._places_by_shape(data, NEEDLES, begin, end))
            assert found == sorted(hit for needle in NEEDLES for hit in records._finds(data, needle, begin, end))


def test_of_a_log_whose_lines_all_differ_no_shape_is_remembered() -> None:
    def letters(number: int) -> str:
        return "".join(chr(ord("a") + int(figure)) for figure in str(number))

    data = (
        "".join(f"{letters(number)} came with {letters(7 * number)}\n" for number in range(20_000)).encode()
        + LOG.encode()
    )
    records._shapes.cache_clear()
    found = list(records._places_by_shape(data, NEEDLES, 0, len(data)))
    assert found == records._places(data, NEEDLES, 0, len(data))
    assert found
    assert not records._shapes(NEEDLES)
    for number in range(5):  # as the needles change that are asked for
        list(records._places_by_shape(data, NEEDLES[number:], 0, len(data)))
    assert records._shapes.cache_info().currsize == 2


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*NEEDLES, b" ", b"\n", b"x", b"7", b"timed out\n", b"\xe5\x8f"]), max_size=60))
def test_needles_are_found_by_the_words_of_a_block(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    found = sorted(hit for needle in NEEDLES for hit in records._finds(data, needle, 0, len(data)))
    assert records._places(data, NEEDLES, 0, len(data)) == found


_AROUND_HEADS = (
    "[rank3]: ", "[rank3]:", "[E801 14:37:42.731 x.cpp:1]", " [E a.cc:3]", "h1:40:41 [0] NCCL INFO", "a:4:4 [1] x.cc:8 NCCL WARN", "]",
    "[2025-01-01 10:00:00 TP0] ", "Traceback (most recent call last):", " ERROR:torch.x:", "step 7", ".", " ", "]["
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(_AROUND_HEADS), max_size=8).map("".join))
def test_a_line_without_the_words_of_a_head_holds_one_record(text: str) -> None:
    starts = [found.start() for found in records._HEAD.finditer(text) if found.start() > 0]
    bounds = [0, *starts, len(text)]
    cut = [piece for a, b in itertools.pairwise(bounds) if (piece := text[a:b]).strip()]
    assert records.pieces(text) == (cut if starts else [text])


@pytest.mark.parametrize("width", [5, 255, 256, 257, 3000])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_lines_behind_a_hit_are_whole_however_long_they_are(width: int, end: str) -> None:
    rows = [f"INFO: {number}" + "é" * (width * (1 + number % 3)) for number in range(500)]
    data = end.join(["Watchdog caught collective", *rows]).encode()
    scanner = records.Scanner(records.Source(0, "train.log", "text", 0))
    first = next(record for record in scanner.feed(data, final=True) if not record.context)
    within = data[len("Watchdog caught collective") :][: records.FOLLOW_BYTES].decode(errors="replace").split(end)[1:]
    for count in (1, 2, 6, 60, 400):
        assert list(first.following(count)) == within[:count]


def test_needles_by_the_million_do_not_take_memory(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("an error in a timeout\n" * 300_000 + LOG)
    report = explain([str(path)])
    assert len(report.events) < 6000


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.sampled_from([*records.GENERAL, *records.NEEDLES]),
            st.sampled_from(LOG.encode().splitlines()),
        ),
        max_size=40,
    )
)
def test_binary_garbage_never_crashes(tmp_path: Path, pieces: list[bytes]) -> None:
    path = tmp_path / "train.log"
    for joint in (b"\n", b"", b"\r"):
        path.write_bytes(joint.join(pieces))
        with contextlib.suppress(UnusableInput):  # empty, or binary without a line that says anything
            explain([str(path)])


def test_truncated_and_foreign_dumps_leave_a_note(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(b"\x80\x02}q\x00(X\x07\x00\x00")
    (tmp_path / "nccl_trace_rank_1").write_bytes(b"\x80\x02cos\nsystem\n(S'true'\ntR.")
    (tmp_path / "train.log").write_text(LOG)
    report = explain([str(tmp_path)])
    assert report.culprits == (2,)
    assert sum("flight-recorder" in note for note in report.notes) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.log"],
        ["EMPTY"],
        ["LOG", "missing"],
        ["LOG", "--model", "no-such-model"],
        ["LOG", "--deepspeed", "LOG"],
        ["LOG", "--world-size", "0"],
    ],
)
def test_unusable_input_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.log").write_text(LOG)
    names = {"EMPTY": str(tmp_path / "empty"), "LOG": str(tmp_path / "a.log")}
    assert main([names.get(argument, argument) for argument in arguments]) == 2
    assert "ncclguard explain:" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["step 1\n", LOG])
def test_usable_input_ends_with_0_with_or_without_an_incident(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "a.log"
    path.write_text(text)
    assert main([str(path)]) == 0
    assert capsys.readouterr().out


def test_json_and_html_are_written_and_markup_in_a_log_stays_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_text(LOG + "[rank2]: ValueError: <script>alert(1)</script> [bold]x[/nope]\n")
    assert main([str(path), "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]) == 0
    data = json.loads((tmp_path / "r.json").read_text())
    wanted = {
        "schema_version",
        "culprits",
        "cause",
        "cause_class",
        "confidence",
        "collective",
        "ranks",
        "evidence",
        "consequences",
        "advice",
    }
    assert wanted <= set(data)
    assert set(data["collective"]) >= {"op", "seq", "numel_in", "numel_out", "group", "timeout_ms"}
    assert set(data["evidence"][0]) >= {"file", "line", "text"}
    page = (tmp_path / "r.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page and "://" not in page.split("<body>")[0]


def test_torchrun_folder_of_two_attempts_explains_the_last(tmp_path: Path) -> None:
    for attempt, silent in ((0, 1), (1, 2)):
        for rank in range(4):
            folder = tmp_path / "none_abc" / f"attempt_{attempt}" / str(rank)
            folder.mkdir(parents=True)
            lines = [] if rank == silent else timeout(rank)
            (folder / "stderr.log").write_text("".join(f"{line}\n" for line in lines))
            (folder / "stdout.log").write_text("up\n")
    report = explain([str(tmp_path)])
    assert report.culprits == (2,) and any("attempt 1" in note for note in report.notes)
