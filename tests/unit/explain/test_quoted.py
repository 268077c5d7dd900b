"""Messages that somebody quotes are no incident: sources that are searched, pages, conversations, samples of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from explain_logs import timeout

from ncclguard_explain import Report, explain

Explain = Callable[..., Report]

LATE = timeout(1, 77)[0]
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."
MEMORY = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


HEADED = "[rank3]:[E303 11:20:41.3 ProcessGroupNCCL.cpp:633] "


@pytest.mark.parametrize(
    "place",
    [
        "torch/ProcessGroupNCCL.cpp:812:    // ",
        "docs/gpu.md:14:",
        "test_c10d.py-31-    # ",
        "tools/testing/fixtures/xid.txt:4:",
    ],
)
@pytest.mark.parametrize("line", [LATE, XID, MEMORY])
def test_a_search_in_sources_is_no_incident(explain_lines: Explain, place: str, line: str) -> None:
    assert not explain_lines(["$ grep -rn Watchdog .", place + line, "docs/a.rst:3:" + line]).incident
    assert explain_lines(["$ grep -n Watchdog train.log", f"train.log:14:{line}"]).incident, "a search in a log"
    assert explain_lines([f"/opt/x/train.py:14:{line}"]).incident, "a formatter of logs"
    session = ["$ grep -n lr train.py", "train.py:3:lr = 1", "$ torchrun train.py", f"train.py:14:{line}"]
    assert explain_lines(session).incident, "the program that was started then"


@pytest.mark.parametrize(
    "title",
    [
        "# Troubleshooting hangs (wiki, v7)",
        "# On-call runbook: GPUs (last reviewed 2026-01-14)",
        "---\ntitle: x\n---\n\n## FAQ",
        "Known issues\n============",
    ],
)
def test_a_page_on_errors_is_no_incident(explain_lines: Explain, title: str) -> None:
    page = [*title.split("\n"), "", "You may see", "", f"    {LATE}", "", "# Hardware", "", f"    {XID}", ""]
    report = explain_lines(page)
    assert not report.incident and "a page about errors, and no log" in report.notes[0]
    for other in (
        "# Run of Tuesday",
        "# Troubleshooting a hang in job 8812",
        "# Incident (none of the known issues: new)",
    ):
        assert explain_lines([other, *page[-8:]]).incident, other
    assert explain_lines([*page, "srun: error: gpu-03: task 5: Killed"]).incident, "a launcher speaks in it"


@pytest.mark.parametrize(
    "head", ["{}  10:0{}", "**{}** 14:0{}", "{} — Today at 9:0{} AM", "@{}, 10:0{}", "[12:0{1}] {0}: well"]
)
def test_a_conversation_is_no_log(explain_lines: Explain, head: str) -> None:
    said = ["what do we say of", f"> {LATE}", "that rank waits", f"> {XID}", "and a GPU that is lost"]
    talk = [line for at, text in enumerate(said) for line in (head.format("ann" if at % 2 else "Bob K", at), text, "")]
    report = explain_lines(talk)
    assert not report.incident and "give the log that they speak of" in report.notes[0]
    assert explain_lines([*talk, "Traceback (most recent call last):", MEMORY]).incident, "a program's output"
    assert explain_lines([*talk[:6], *[f"[rank1]: step {n}" for n in range(60)], LATE]).incident, "mostly a log"


@pytest.mark.parametrize("row", ["Validation time 01:1{}", "epoch loss time 00:4{}", "gpu-01  10:0{}"])
def test_times_in_a_log_are_no_conversation(explain_lines: Explain, row: str) -> None:
    assert explain_lines(
        [line for n in range(5) for line in (row.format(n), f"step {n} `x`", "> ok")] + [MEMORY]
    ).incident


@pytest.mark.parametrize(
    "name", ["prompt", "completion 12", "sample 13 answer", '{"question"', "[eval] Generated text"]
)
def test_what_a_model_was_given_or_wrote_is_no_incident(explain_lines: Explain, name: str) -> None:
    lines = [
        "[rank0]: step 1 loss 2.5",
        f'{name}: "My job died with {MEMORY}',
        f"[rank0]: {name}: {XID}",
        f"{name}: {HEADED}x",
    ]
    assert not explain_lines(lines).incident
    assert explain_lines([*lines, MEMORY]).culprits == (2,)


@pytest.mark.parametrize(
    "line",
    [
        "[rank2]: Error during generation: CUDA out of memory. Tried to allocate 2.00 GiB",
        "Failed to process prompt: RuntimeError: CUDA error: device-side assert triggered",
        "[rank2]: prompt 17: generation failed: torch.OutOfMemoryError: CUDA out of memory.",
        '{"prompt": "hello", "status": "error", "error": "torch.OutOfMemoryError: CUDA out of memory."}',
        f"[eval] answer: 4{LATE}",
    ],
)
def test_an_error_beside_a_models_text_stays_one(explain_lines: Explain, line: str) -> None:
    assert explain_lines(["step 1 loss 2.5", line]).incident


TEST = "test_timeout (__main__.Errors) ... "


@pytest.mark.parametrize(
    "name, lines, what",
    [
        ("de.po", ["#: a.ts:4", f'msgid "{LATE}"', 'msgstr ""'], "a catalogue of translations"),
        ("plan.md", ["# Week 12", f"- look at {LATE}", "- ask for a node"], "a document"),
        ("nccl.md", ["# Known issues", LATE, "", "# Others", XID], "a page about errors"),
    ],
)
def test_an_input_that_is_no_log_is_told_for_what_it_is(
    explain_lines: Explain, name: str, lines: list[str], what: str
) -> None:
    report = explain_lines({name: lines})
    assert not report.incident and report.notes[0].endswith(f"{name}: {what}, and no log")
    assert explain_lines({"de.log": [LATE]}).incident
    assert explain_lines({"issue.md": ["# Run 7", "", LATE]}).incident


@pytest.mark.parametrize("end, calm", [("[  PASSED  ] 9 tests.", True), ("[  FAILED  ] 1 test, listed below:", False)])
def test_death_tests_of_googletest(explain_lines: Explain, end: str, calm: bool) -> None:
    lines = [
        "[==========] Running 9 tests from 3 test suites.",
        "[ RUN      ] Comm.Abort",
        LATE,
        "[       OK ] Comm.Abort",
        end,
    ]
    assert explain_lines(lines).incident is not calm


def test_tests_whose_names_stand_on_a_line_of_their_own(explain_lines: Explain) -> None:
    lines = ["test_x (__main__.A.test_x)", "Say what it tests ... " + LATE, "ok", "Ran 4 tests in 128.114s", "", "OK"]
    assert not explain_lines(lines).incident


@pytest.mark.parametrize("end, calm", [("OK", True), ("OK (skipped=1)", True), ("FAILED (failures=1)", False)])
def test_tests_that_fail_a_job_on_purpose(explain_lines: Explain, end: str, calm: bool) -> None:
    lines = [TEST, LATE, "ok", "-" * 70, "Ran 4 tests in 128.114s", "", end]
    assert explain_lines(lines).incident is not calm
    assert explain_lines([LATE, "OK"]).incident, "no count of tests"
    assert explain_lines(["srun: error: gpu-03: task 3: Segmentation fault", *lines]).incident, "a launcher's word"
    assert explain_lines([*[f"step {n} loss 2.0 of a job before them" for n in range(60)], LATE, *lines]).incident


@pytest.mark.parametrize("end", ["hits=0  PASS", "PASS", "PASSED", "PASS (self-test)"])
def test_a_check_that_has_passed_names_what_it_looks_for(explain_lines: Explain, end: str) -> None:
    assert not explain_lines([f"[n1] dmesg '{XID}'   {end}"]).incident
    assert explain_lines([f"[n1] dmesg '{XID}'   FAIL"]).incident
    assert explain_lines([f"{LATE} {end}"]).incident, "glued behind a rank's record"


def test_the_name_of_a_page_in_a_programs_words_begins_no_page(explain_lines: Explain) -> None:
    said = "[rank0]: RuntimeWarning: fused trunk + head sharding failed to compile, Error 17, see docs/ERRORS.md"
    assert explain_lines([said, LATE, "+ exit 1"]).incident
    for prompt in ("$ ", "+ ", "~/src (main) $ ", "(env) ann@host:~/src$ "):
        assert not explain_lines([f"{prompt}sed -n '3,9p' docs/ERRORS.md", LATE, XID, "$ exit"]).incident, prompt


@pytest.mark.parametrize("key", ["exp:[Labels:", "got:[Labels:", "        exp:[Labels:", "got: [ Labels:"])
def test_what_a_test_of_alerts_expects_is_no_incident(explain_lines: Explain, key: str) -> None:
    """Make prints the command without a prompt."""
    row = key + '{alertname="GPUXid79", gpu="5"} Annotations:{summary="' + XID + '"}]'
    assert not explain_lines(["promtool test rules tests/gpu_test.yaml --debug", row, "  SUCCESS"]).incident
    assert explain_lines([row.replace(key, ""), XID]).incident


TIMED_OUT = timeout(3)[0]


@pytest.mark.parametrize("behind", ["", " | head -3"])
def test_what_a_search_in_old_logs_finds_is_no_incident(explain_lines: Explain, behind: str) -> None:
    found = f"/home/ana/old_logs/2025-11/job7.err:88:{TIMED_OUT}"
    report = explain_lines(
        [f"$ grep -rn 'Watchdog' ~/old_logs/2025-11/{behind}", found, "$ tail -1 run/train.log", "step 41020 loss 1.8"]
    )
    assert not report.incident
    report = explain_lines(
        [f"$ grep -rn 'Watchdog' ~/runs/now/{behind}", found.replace("old_logs/2025-11", "runs/now")]
    )
    assert report.incident


def test_a_page_of_search_results_is_no_log(explain_lines: Explain) -> None:
    head = ['Search: "watchdog timeout"      About 41 results (page 1)', ""]
    first = ["1. Stuck job", "   forum.example.org › distributed › 7", f'   ... "{TIMED_OUT}" ... Solved', ""]
    second = ["2. What a watchdog is", "   blog.example.dev › debug", "   A guide."]
    assert not explain_lines([*head, *first, *second]).incident
    assert explain_lines([*head, *first, *second, *timeout(3), "srun: error: n1: task 3: Aborted"]).incident
    assert explain_lines(["scored 41 results", *timeout(3)]).incident


def test_what_is_cited_in_a_chat_is_no_incident_while_the_job_goes_on(explain_lines: Explain) -> None:
    said = ["[09:12] mina   did you ever see this?", f"[09:13] mina   > {TIMED_OUT}",
            "[09:13] mina   > torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
            "[09:15] hana   that was November, and is mended"]  # fmt: skip
    tail = ["[09:16] hana   ```", "step 611: loss 0.2", "step 612: loss 0.2", "```", "[09:17] mina   good"]
    assert not explain_lines([*said, *tail]).incident
    assert explain_lines([*said, "[09:17] mina   no idea", "[09:18] hana   me neither"]).incident


def test_the_response_of_a_model_that_a_server_logs_is_quoted(explain_lines: Explain) -> None:
    server = "(APIServer pid=1) INFO 11-12 07:03:19 [logger.py:71] "
    answer = f"{server}Generated response chatcmpl-8a1: output: 'Like this:\\n{TIMED_OUT}\\nThat\\'s it', finish_reason: stop"
    assert not explain_lines(
        [answer, '(APIServer pid=1) INFO: 10.2.0.41:51 - "POST /v1/completions HTTP/1.1" 200 OK']
    ).incident
    assert explain_lines([answer, *timeout(3)]).incident


CHAT = [
    "[11:02] ida: found it in an old log of last year:",
    f"[11:02] ida: > {TIMED_OUT}",
    "[11:03] ida: > torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
    "[11:04] tom: that ticket is closed",
]
WELL = ["[11:05] ida: good, the current run is healthy", "[11:06] tom: nice, thank you"]


def test_a_chat_on_what_is_over_beside_a_job_that_is_well_is_no_log(explain_lines: Explain) -> None:
    assert not explain_lines([*CHAT, *WELL]).incident
    untimed = [row.split("] ", 1)[1].replace("ida: >", ">") for row in [*CHAT, *WELL]]
    assert not explain_lines(untimed).incident, "without times"
    indented = [CHAT[0], "    " + TIMED_OUT, CHAT[3], *WELL]
    assert not explain_lines(indented).incident, "what is quoted is indented"
    assert explain_lines([*CHAT, "[11:05] ida: now it hangs again", *WELL]).incident
    assert explain_lines([*CHAT, *WELL, "srun: error: gpu-03: task 5: Killed"]).incident


@pytest.mark.parametrize(
    "head, rest, calm",
    [
        ("JOB-7  Stuck in eval   Status: Done", "Comment: not seen since 2.4", True),
        ("JOB-7  Stuck in eval   Resolution: Fixed", "closing this", True),
        ("JOB-7  Stuck in eval   Status: Open", "closing this", False),
        ("JOB-7  Stuck in eval   Status: Done", "it hangs again", False),
    ],
)
def test_a_ticket_that_is_closed_is_no_log(explain_lines: Explain, head: str, rest: str, calm: bool) -> None:
    assert explain_lines([head, "Description", f"  {TIMED_OUT.replace('[rank3]:', '')}", rest]).incident is not calm


@pytest.mark.parametrize(
    "lines",
    [
        [f"- [ ] look at {LATE}", "- [x] less memory", "- [ ] docs"],
        [f"1a2b3c4 fix: {MEMORY}", "2b3c4d5 docs: rank 3 exited with code -11", "3c4d5e6 tests"],
    ],
)
def test_lists_of_things_to_do_and_of_commits(explain_lines: Explain, lines: list[str]) -> None:
    assert not explain_lines(lines).incident
    assert explain_lines([*lines, LATE]).incident


@pytest.mark.parametrize("name, calm", [("runbook.md", True), ("gpu_FAQ.rst", True), ("runbook.log", False)])
def test_a_document_is_known_by_its_name(explain_lines: Explain, name: str, calm: bool) -> None:
    assert explain_lines({name: ["# Engine lost", LATE], "run.log": ["step 3 loss 1.1"]}).incident is not calm


@pytest.mark.parametrize(
    "command, rows",
    [
        ("$ rg -n 'Watchdog' torch/csrc", ["torch/csrc/NCCL.cpp", f'688:   "{LATE}"', "701:  x"]),
        ("~/src$ cd torch && git describe && grep -rn 'Watchdog' . | head", ["v2.9", "csrc/a.cpp:3: x", f"csrc/a.cpp:4: {LATE}"]),
        ("$ grep -n Watchdog docs/errors.rst", [f"1131:  {LATE}"]),
    ],
)  # fmt: skip
def test_other_forms_of_a_search_in_sources(explain_lines: Explain, command: str, rows: list[str]) -> None:
    assert not explain_lines([command, *rows]).incident
    assert explain_lines([command, *rows[:1], "$ torchrun t.py", f"t.py:3: {LATE}"]).incident
    assert explain_lines(["$ grep -n Watchdog train.log", f"1131:{LATE}"]).incident


def test_a_message_that_a_sentence_speaks_of(explain_lines: Explain) -> None:
    assert not explain_lines([f'The message "{LATE[9:]}" means that a rank did not come.', "step 1 loss 2"]).incident
    assert explain_lines([f'The message "{LATE[9:]}" came with {XID}']).incident


def test_a_count_of_none_names_what_it_counts(explain_lines: Explain) -> None:
    assert not explain_lines(["class   count   example", f'xid   0   "{XID}"']).incident
    assert explain_lines(["class   count   example", f'xid   2   "{XID}"']).incident


@pytest.mark.parametrize(
    "head, end, calm",
    [
        ("test_late ... ", "Ran 2 tests in 12.101s\n\nOK", True),
        ("running 2 tests", "test result: ok. 2 passed; 0 failed; 0 ignored", True),
        ("running 2 tests", "test result: FAILED. 1 passed; 1 failed; 0 ignored", False),
        ("PASS src/watch.test.ts", "Tests:       5 passed, 5 total", True),
    ],
)
def test_runners_of_tests_in_other_languages(explain_lines: Explain, head: str, end: str, calm: bool) -> None:
    assert explain_lines([head, LATE, *end.split("\n")]).incident is not calm


@pytest.mark.parametrize(
    "lines",
    [
        ["diff --git a/t.py b/t.py", "@@ -1,2 +1,3 @@", f"+    # {LATE}"],
        ["4 results - 2 files", "", "src/t.py:", f"  41,9:   raise RuntimeError({MEMORY!r})"],
        [f"[RESOLVED] GpuLost node=gpu-3: {XID}", "current: 0 firing"],
        ["From: a@b.c", "Subject: Re: last week", f"> {MEMORY}", "Fixed; the run since then is healthy."],
        ["Post-mortem of run 41 (closed)", f"03:12 {TIMED_OUT}", "Status: resolved, not seen since"],
        [f'{{"id": 1, "input": "{MEMORY}", "label": "oom"}}', "accuracy 1.0"],
        [f"{{'text': '{MEMORY}'}}", *[f"step {n} loss 1.{n}" for n in range(4)]],
        ["check xid ... 0 found (looking for 'fallen off the bus')   ok", "ECC error counters: volatile 0"],
    ],
)
def test_what_is_quoted_in_other_ways(explain_lines: Explain, lines: list[str]) -> None:
    assert not explain_lines(lines).incident
    assert explain_lines([*lines, *timeout(3), "srun: error: gpu-03: task 3: Aborted"]).incident or lines[0][:4] in (
        "diff",
        "From",
    )


@pytest.mark.parametrize(
    "line",
    [
        '{"level": "ERROR", "text": "[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered"}',
        "3f2a9c1b7d0e [rank3]: RuntimeError: CUDA error: an illegal memory access was encountered",
        "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_what_only_looks_like_a_quotation(explain_lines: Explain, line: str) -> None:
    assert explain_lines([line, "3f2a9c1b7d0e ok"]).culprits == (3,)


@pytest.mark.parametrize(
    "name, lines",
    [
        ("changes.yml", ["- version: 2.1", f'  fixed: "{LATE}"']),
        ("page.html", ["<html><head><title>Errors</title></head>", f"<pre>{MEMORY[9:]}</pre>"]),
        ("a.ipynb", ['{"cells":[{"cell_type":"markdown","source":["RuntimeError: CUDA out of memory"]}]}']),
    ],
)
def test_other_documents(explain_lines: Explain, name: str, lines: list[str]) -> None:
    assert not explain_lines({name: lines, "run.log": ["step 3 loss 1.1"]}).incident


def test_a_page_that_holds_the_output_of_a_job_is_a_log(explain_lines: Explain) -> None:
    page = ["<html><head><title>Console</title></head><pre>", LATE, "</pre>"]
    assert explain_lines({"console.html": page}).incident
    cells = '{"cells":[{"cell_type":"code","outputs":[{"output_type":"stream","text":["RuntimeError: CUDA error: misaligned address"]}]}]}'
    assert explain_lines({"a.ipynb": [cells, "import torch.distributed"]}).incident


STEPPED = [f"step {n} | loss 2.{n}" for n in range(3)]
SPOKEN = [*timeout(0), *timeout(1), MEMORY]
CHANGE = ["diff --git a/t.py b/t.py", "@@ -1 +1 @@", "-batch = 4", "+batch = 8"]


@pytest.mark.parametrize(
    "lines",
    [
        [*CHANGE, *STEPPED, *SPOKEN],
        ["prolog: scratch state: done", *(f"[1,1]<stderr>:{row}" for row in SPOKEN), "epilog: scratch archived"],
        ["image resolution: fixed 448x448", "data of the previous year", *(f"10:00:01 {row}" for row in SPOKEN)],
        ["From: a@b.c", "Subject: Re: a hang", "> was it so before?", "It was fine last week, today it ends:", *SPOKEN],
        ["JOB-7  hang", "Status: Resolved -> Reopened", "not the same as the old ticket", f"  {TIMED_OUT}"],
        ["State: closed (auto)", "the case was closed, but the problem is there every day:", f"  {MEMORY}"],
        ["[10:21] ida: it was fine last week, now:", *(f"    {row}" for row in SPOKEN), "[10:22] tom: and memory?",
         "[10:23] ida: the same", "[10:24] tom: less of a batch"],
        ["ida: it was fine last week, no restarts", f'ida: today it ends with "{TIMED_OUT}"', "tom: who says it?",
         "ida: all but rank 2", "tom: then look at rank 2"],
        ["launcher: all ranks are healthy after 31 s", "trainer: restored from archive s3://c/old-1",
         "trainer: wrote metrics of 2140", "launcher: rank 2 raised torch.OutOfMemoryError: CUDA out of memory.",
         f"monitor: rank 3 says {TIMED_OUT}", "launcher: ending the other processes"],
        ["      Start  1: test_norm", "100% tests passed, 0 tests failed out of 1", "", *STEPPED, *SPOKEN],
        ["PASS src/ui.test.ts", "Tests:       5 passed, 5 total", *STEPPED, *SPOKEN],
        ["running 2 tests", "test a ... ok", *SPOKEN, "test result: ok. 2 passed; 0 failed; 0 ignored"],
        ["# Troubleshooting a hang", "## Log", "```", *STEPPED, *SPOKEN, "```"],
        ["3 results - 3 files", "", *(f"logs/rank_{n}.log:\n  8: {row}\n" for n, row in enumerate(SPOKEN))],
        ["# Job 7: hang", "- started 09:31", "", *(f"    {row}" for row in [*STEPPED, *SPOKEN])],
    ],
)  # fmt: skip
def test_no_form_hides_the_ranks_of_a_job(explain_lines: Explain, lines: list[str]) -> None:
    assert explain_lines(lines).incident


@pytest.mark.parametrize("name", ["known_issues_run.md", "rank_5.diff", "rank_5.patch", "t.py"])
def test_a_name_alone_makes_no_document(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("\n".join([*STEPPED, *SPOKEN]) + "\n")
    assert explain([str(path)]).incident


@pytest.mark.parametrize(
    "record",
    [
        '{{"__time__":"1762","_pod_name_":"w-0","_source_":"stderr","content":"{}"}}',
        '{{"content":"{}","label":"train","__path__":"/var/log/a.log"}}',
        '{{"textPayload":"{}","labels":{{"job":"a"}}}}',
        '{{"labels":{{"app":"a"}},"body":"{}"}}',
        '{{"out":"{}","response":"none"}}',
    ],
)
def test_records_of_those_who_ship_logs_are_no_data(explain_lines: Explain, record: str) -> None:
    assert explain_lines([record.format(row) for row in SPOKEN]).incident


@pytest.mark.parametrize("who", ["node", "rank", "worker"])
def test_a_number_behind_a_name_is_no_count(explain_lines: Explain, who: str) -> None:
    assert explain_lines([f"launcher: a child ended on {who} 0 'torch.OutOfMemoryError: CUDA out of memory.'"]).incident


def test_only_the_change_that_a_job_shows_is_left_out(explain_lines: Explain) -> None:
    shown = [*CHANGE, f"+# {MEMORY}", *STEPPED]
    assert not explain_lines(shown).incident
    assert explain_lines([*shown, MEMORY.replace("rank2", "rank5")]).culprits == (5,)
