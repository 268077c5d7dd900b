"""The gallery has every fault of the drill, as data that this version reads, without a path of the machine that made it;
and what the peers' texts say of ranks is read right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gallery import screenshots
from benchmarks.gallery.__main__ import FAULTS, STRUCK
from benchmarks.peers.findings import findings_of, names
from ncclguard.faults import drill
from ncclguard.faults.drill import EXPECTED
from ncclguard.faults.fault import PARAMETERS
from ncclguard.incident.page import render_html
from ncclguard.incident.timeline import Document

GALLERY = Path(__file__).resolve().parents[2] / "docs" / "gallery"


def test_there_is_a_picture_of_every_fault() -> None:
    shown = {words[words.index("--fault") + 1] for words, _ in FAULTS.values()}
    assert shown == set(PARAMETERS) - {"slow"}  # of which there is no incident: it hangs nothing
    table = (GALLERY / "README.md").read_text()
    assert all(f"| `{name}` |" in table and (GALLERY / name / "terminal.txt").exists() for name in FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_picture_is_of_the_struck_rank_and_of_no_machine(name: str) -> None:
    folder = GALLERY / name
    for file in folder.iterdir():
        text = file.read_text()
        assert len(text) < 100_000
        assert not re.search(r"/(root|home|work|usr|opt)/", text), file
    assert "drill:     passed" in (folder / "terminal.txt").read_text()
    if (folder / "incident.json").exists():
        incident = Document.model_validate_json((folder / "incident.json").read_text()).incident
        assert incident.culprits in ((STRUCK,), ())
        fault = FAULTS[name][0]
        assert str(incident.cause) in EXPECTED[fault[fault.index("--fault") + 1]]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 4000 ms", [2, 3]),
        ("Rank 1 successfully reached monitoredBarrier, but received errors. Please check rank 0 logs.", []),
        (
            "mismatch between collectives on ranks. Rank 0 is running collective: A, but Rank 2 is running collective: B",
            [2],
        ),
        ("'Interruption.EXCEPTION on ranks={1, 3}, Interruption.TERMINATED on ranks={2}'", [2]),
        ("'Interruption.EXCEPTION on ranks={0}, Interruption.SOFT_TIMEOUT on ranks={1, 3}'", [0, 1, 3]),
        ("Connection closed by peer [127.0.0.1]:24279", []),
    ],
)
def test_whom_a_text_names(text: str, found: list[int]) -> None:
    assert names([text], None) == found


def test_a_rank_that_met_nothing_after_the_strike_has_not_ended() -> None:
    def event(kind: str, at: float, **values: Any) -> dict[str, Any]:
        return {"event": kind, "at": at, **values}

    events = {
        0: [
            event("failed", 14.0, step=4, text="timed out", named=None, tensor="torn"),
            event("ok", 15.0, step=5, masks=[3]),
        ],
        1: [event("ok", 9.0, step=3, masks=[7])],
        2: [event("struck", 10.0)],
    }
    found = findings_of("plain", "late", events, {0: "exit 0", 1: "still running", 2: "exit 0"})
    assert found.met == {0: "failed", 1: "nothing, then still running"}
    assert found.seconds == {0: 4.0}
    assert found.tensors == {0: "torn"}
    assert found.went_on == {0: 5.0}
    assert found.participants == [0, 1]


#: What is done to a page, and what the check says of it then.
UGLY = {
    "as it is": ("", ""),
    "wide": (".facts{width:90rem;flex-wrap:nowrap}", "px wide"),
    "cut by a box": ("h1{width:9rem;white-space:nowrap;overflow:hidden}", "cut: "),
    "cut by a box that folds open": ("pre{white-space:nowrap;overflow:hidden!important;width:5rem}", "cut: '"),
    "cut by the window": ("body{overflow:hidden}.todo{width:90rem;max-width:none}", "cut: 'See in its stack"),
    "pale": (".where{color:#555!important}", "has a contrast of"),
    "of one scheme": (":root{--bg:#fff!important;--fg:#000!important}", "its background is"),
    "over each other": (".tl .head span.m{left:40%!important;transform:none!important}", "on top of each other"),
}


@pytest.mark.processes
@pytest.mark.skipif(screenshots.browser() is None, reason="needs a Chromium, such as Debian's")
@pytest.mark.parametrize("name", UGLY)
def test_the_check_of_the_pages_sees_what_is_ugly(name: str, tmp_path: Path) -> None:
    style, expected = UGLY[name]
    page = tmp_path / "page.html"
    page.write_text((GALLERY / "late" / "incident.html").read_text().replace("</style>", style + "</style>"))
    program = screenshots.browser()
    assert program is not None
    faults = screenshots.look(program, page, "dark", screenshots.WIDTHS["narrow"], None)
    assert (not faults) if not expected else any(expected in fault for fault in faults), faults


def test_a_drill_says_that_the_job_went_on_and_how_long_it_stood() -> None:
    """By what the ranks say of it, not by the first collective that works again, which may be the survivors' meeting."""
    text = "went on without rank 2 after 0.9 s"
    rows: list[tuple[int, str, float, dict[str, Any]]] = [(rank, "started", 1.0, {}) for rank in range(3)]
    failed = {"cause": "lost", "culprits": [2], "agreed": True, "summary": "all_reduce() failed: rank 2 lost."}
    rows.append((2, "struck", 5.0, {}))
    for rank in (0, 1):
        rows.append((rank, "failed", 5.1 + rank, failed))
        rows.append((rank, "went on", 5.2 + rank, {"participants": [0, 1], "op": "barrier"}))
        rows.append((rank, "membership", 5.5 + rank, {"change": "went on", "ranks": [2], "seconds": 0.9, "text": text}))
    found = drill.findings_of("kill", 2, [drill.Event(*row) for row in rows])
    assert found.passed
    assert found.went_on == pytest.approx({0: 0.5, 1: 1.5})
    lines = found.lines()
    assert ("went on", "yes, ranks 0-1 within 1.50 s, as ranks 0-1") in lines
    assert ("then", text) in lines


def test_the_table_of_operations_says_who_did_not_come_to_the_one_that_failed() -> None:
    page = render_html(Document.model_validate_json((GALLERY / "late" / "incident.json").read_text()))
    rows = [row for row in page.split("<tr>") if ">0:cpu:865c6391/" in row]
    assert [row for row in rows if f"rank {STRUCK} did not come" in row] == [
        row for row in rows if ">0:cpu:865c6391/7<" in row
    ]
    assert sum("after rank" in row for row in rows) == len(rows) - 1
