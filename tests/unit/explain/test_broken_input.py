"""What is no plain log is said for what it is: empty, binary, in another encoding, compressed, cut off, still growing."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from explain_logs import timeout

from ncclguard_explain import UnusableInput, command, explain, records
from ncclguard_explain.command import main

LOG = "\n".join(line for rank in (0, 1, 3) for line in timeout(rank)) + "\n"


def noise(size: int) -> bytes:
    return random.Random(1).randbytes(size)


@pytest.mark.parametrize("content", [b"", b"\n\n  \r\n"], ids=["empty", "blank"])
def test_an_empty_log_is_not_calm(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(content)
    assert main(["--exit-code", str(path)]) == 2
    assert f"{path}: empty" in capsys.readouterr().err


def test_an_empty_log_beside_another_is_silent(tmp_path: Path) -> None:
    (tmp_path / "rank_2.err").touch()
    (tmp_path / "train.log").write_text(LOG)
    report = explain([str(tmp_path)])
    assert report.incident
    assert not any("empty" in note for note in report.notes)


def test_an_empty_pipe_is_not_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(UnusableInput, match="<stdin>: empty"):
        explain(["-"])


def test_a_binary_file_is_no_calm_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "core"
    path.write_bytes(b"\x7fELF" + noise(300_000))
    assert main(["--exit-code", str(path)]) == 2
    assert f"{path}: binary, no log and no dump" in capsys.readouterr().err


def test_text_in_a_binary_file_is_read_and_the_note_says_so(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(noise(300_000) + b"\n" + LOG.encode() + noise(10_000))
    report = explain([str(path)])
    assert report.incident
    assert f"{path}: binary, no log and no dump; only the text in it was read" in report.notes


def test_a_hole_at_the_beginning_makes_no_log_binary(tmp_path: Path) -> None:
    """logrotate's copytruncate leaves one where the writer goes on at its old place."""
    path = tmp_path / "train.log"
    path.write_bytes(bytes(200_000) + b"\n" + LOG.encode())
    assert explain([str(tmp_path)]).notes == explain([str(path)]).notes
    assert not any("binary" in note for note in explain([str(path)]).notes)


@pytest.mark.parametrize(
    ("encoding", "said", "words"),
    [
        ("utf-16", "utf-16", "training: epoch 1"),
        ("utf-16-le", "utf-16-le", "training: epoch 1"),
        ("utf-16-be", "utf-16-be", "training: epoch 1"),
        ("gbk", "gb18030", "训练开始：加载数据集，节点无响应"),
        ("cp932", "cp932", "学習を開始します：データセットを読み込み、タイムアウト"),
    ],
)
def test_other_encodings_are_read_as_what_they_are(tmp_path: Path, encoding: str, said: str, words: str) -> None:
    path = tmp_path / "train.log"
    text = f"{words}\n" * 30 + LOG + f"RuntimeError: {words}\n"
    path.write_bytes(text.encode(encoding))
    report = explain([str(path)])
    assert f"{path}: not UTF-8; read as {said}" in report.notes
    assert any(words in event.detail for event in report.events)
    (tmp_path / "utf8.log").write_text(text)
    plain = explain([str(tmp_path / "utf8.log")])
    assert (plain.culprits, plain.summary, len(plain.events)) == (report.culprits, report.summary, len(report.events))
    assert [event.line for event in plain.events] == [event.line for event in report.events]


@pytest.mark.parametrize("encoding", ["gbk", "cp932", "utf-16"])
def test_a_character_across_the_edge_of_a_block_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr(records, "BLOCK", 999)
    path = tmp_path / "train.log"
    path.write_bytes(
        (("データの読み込み a " if encoding == "cp932" else "加载数据集 a ") * 400 + "\n" + LOG).encode(encoding)
    )
    recode = records.Recoder()
    (source,) = records.find_sources([str(path)])
    text = b"".join(recode(data) for data, _ in records.blocks(source))
    assert "\ufffd" not in text.decode()


def test_utf8_with_some_broken_characters_stays_utf8(tmp_path: Path) -> None:
    """Processes that write at once cut each other's characters."""
    path = tmp_path / "train.log"
    path.write_bytes("训练开始：加载数据集\n".encode() * 20 + b"\xe8\xae\n\xbb\x83\n" * 3 + LOG.encode())
    assert not any("UTF-8" in note for note in explain([str(path)]).notes)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress], ids=["gzip", "bzip2", "xz"])
def test_compressed_logs_are_read(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "train.log.packed"
    path.write_bytes(compress(LOG.encode()))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.log").write_text(LOG)
    assert explain([str(path)]).summary == explain([str(tmp_path / "plain" / "train.log")]).summary


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress], ids=["gzip", "bzip2", "xz"])
def test_all_that_a_cut_off_file_holds_is_read(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    """The last lines are those that matter, and a block of a megabyte was lost."""
    path = tmp_path / "train.log.packed"
    text = noise(200_000).hex().encode() + b"\n" + LOG.encode() + b"\n" + noise(600_000).hex().encode()
    packed = compress(text)
    path.write_bytes(packed[: len(packed) * 3 // 4])
    report = explain([str(path)])
    assert report.incident
    assert f"{path}: truncated; read as far as it goes" in report.notes


ZSTD = bytes.fromhex("28b52ffd0458590000 68656c6c6f20776f726c640a 00000000".replace(" ", ""))


def test_what_this_python_cannot_decompress_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("compression", "compression.zstd"):  # which Python 3.14 has
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "train.log.zst"
    path.write_bytes(ZSTD)
    assert main(["--exit-code", str(path)]) == 2
    words = f"{path}: compressed with zstd, which this Python cannot read; decompress it first"
    assert words in capsys.readouterr().err
    assert main(["--exit-code", str(tmp_path)]) == 2  # the only file of a folder
    assert words in capsys.readouterr().err
    (tmp_path / "rank_1.log").write_text(LOG)
    assert words in explain([str(tmp_path)]).notes


@pytest.mark.parametrize(
    "names", [[], ["model.safetensors", "figure.png"], ["core"]], ids=["empty", "others", "binary"]
)
def test_a_folder_without_logs(tmp_path: Path, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(noise(10_000))
    assert main(["--exit-code", str(tmp_path)]) == 2
    assert f"{tmp_path}: no log and no flight-recorder dump in this folder" in capsys.readouterr().err


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(LOG)

    def write_on(source: records.Source, count: int) -> None:
        if path.stat().st_size == len(LOG):
            with path.open("a") as log:
                log.write("step 1\n")

    written = command.explain([str(path)], progress=write_on)
    assert f"{path}: it grew while it was read; --follow reads on" in written.notes


@pytest.mark.processes
@pytest.mark.parametrize("program", [["ncclguard", "explain"], ["ncclguard_explain"]], ids=["ncclguard", "alone"])
def test_a_reader_that_ends_before_the_report_ends_the_command_in_silence(tmp_path: Path, program: list[str]) -> None:
    path = tmp_path / "train.log"
    path.write_text(LOG)
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", *program, str(path)], stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")
