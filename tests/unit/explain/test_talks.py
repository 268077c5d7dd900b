"""Messages over several lines that a model was given or wrote, that a page explains or a command prints: quoted or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from explain_logs import timeout

from ncclguard_explain import Report

Explain = Callable[..., Report]

LATE = timeout(1, 77)[0]
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."
MEMORY = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
RAISED = ["[rank2]: Traceback (most recent call last):", '[rank2]:   File "t.py", line 3, in step', MEMORY]
STEPS = [f"2026-11-20 10:00:0{n} INFO trainer: step {n} reward 0.{n}" for n in range(3)]

TALKS = {
    "rules around it": ["==== sample ====", "User: it printed", LATE, "why?", "Assistant: rank 1 waits:", MEMORY, "===="],
    "special tokens": ["<|im_start|>user", "see", XID, "<|im_end|>", "<|im_start|>assistant", "RMA it.", "<|im_end|>"],
    "heads of an evaluation": ["--- prompt ---", "fix", *RAISED, "--- completion ---", "less memory", "--- reference ---"],
    "questions": ["Q: what is", f"  {MEMORY}", "A: too large a batch", "Q: next", "A: yes"],
    "markdown": ["**Instruction:**", "explain", XID, "", "**Response:**", "a lost GPU", "", "**Instruction:**"],
    "numbered": ["[Prompt 3]", LATE, "[Answer 3]", "wait", "[Prompt 4]"],
    "roles": ["role: user", f"content: see {XID}", "  or", f"  {LATE}", "role: assistant", "content: RMA it."],
    "a panel": ["╭──── Step 4 ────╮", "│ Prompt: it printed", f"│ {MEMORY}", "│ Completion: less memory", "╰──────╯"],
    "it ends with the program": ["Human: hi", "AI: x", "Assistant: it may print", MEMORY, STEPS[0]],
}  # fmt: skip


@pytest.mark.parametrize("talk", TALKS)
def test_what_is_said_in_a_talk_with_a_model_is_no_incident(explain_lines: Explain, talk: str) -> None:
    report = explain_lines([*STEPS, *TALKS[talk], *STEPS])
    assert not report.incident and "talks with a model" in report.notes[0]
    beside = explain_lines([*STEPS, *TALKS[talk], *STEPS, LATE.replace("rank1", "rank5")])
    assert beside.incident, "a message outside of the talk"


STOPS = {
    "it ends in an answer": ["User: hi", "Assistant: hello", "User: and now", *RAISED],
    "a rule of the script": ["User: hi", "Assistant: hello", *RAISED, "=======", "job ended"],
    "a launcher": ["=== talk", "User: hi", "Assistant: hello", *RAISED, "E1120 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 2 (pid: 9)", "==="],
    "nothing is answered": ["Prompt: hello", *RAISED, "Response:"],
    "started anew": ["User: hi", "Assistant: hello", *RAISED, "$ python chat.py", "User: hi", "Assistant: hello"],
    "the owner of a job": ["Job: 17", "User: alice", *RAISED, "Job: 17", "User: alice", "State: FAILED"],
    "samples of a trainer, and it hangs": ["prompt: a", "answer: b", *RAISED, "prompt: c", "answer: d", LATE],
    "an error beside a prompt": ['{"prompt": "hi", "error": "torch.OutOfMemoryError: CUDA out of memory."}'],
    "an engine on its request": ["ERROR request 7: prompt: 'x' failed: torch.OutOfMemoryError: CUDA out of memory."],
}  # fmt: skip


@pytest.mark.parametrize("case", STOPS)
def test_what_stops_a_program_that_talks_stays_one(explain_lines: Explain, case: str) -> None:
    assert explain_lines([*STEPS, *STOPS[case]]).incident


@pytest.mark.parametrize(
    "line",
    [
        f"INFO [logger.py:43] Received request cmpl-1: prompt: '<|im_start|>user\\nwhy {MEMORY}<|im_end|>', params: x",
        f'{{"choices":[{{"message":{{"role":"assistant","content":"The line {LATE} says"}}}}]}}',
        f"decoded: <s>[INST] why {MEMORY} [/INST] too large a batch</s>",
        f'INFO eval: sample 7 completion="it is {MEMORY}" score=0.4',
    ],
)
def test_the_text_of_a_model_within_a_line(explain_lines: Explain, line: str) -> None:
    assert not explain_lines([*STEPS, line]).incident
    assert explain_lines([*STEPS, f"{line} {MEMORY}"]).incident, "behind it"


@pytest.mark.parametrize(
    "command",
    [
        "cat /opt/RUNBOOK", "less docs/troubleshooting.txt", "head -40 HOWTO-nccl", "promtool test rules gpu.yml", "git diff",
        "llm 'what is an Xid'", "ollama run llama3 'explain'", "curl -s http://h:8000/v1/chat/completions -d @q.json",
        "grep -rn Xid tests/data/", "rg Watchdog old_runs/ ", "gh issue view 77", "zgrep -h Xid /var/log/archive/kern.log.1.gz",
        "grep -rn Failed notes/*.txt",
    ],
)  # fmt: skip
def test_what_a_command_prints_of_others_is_no_incident(explain_lines: Explain, command: str) -> None:
    printed = ["It may look like", f"   {LATE}", "   or", f"Annotations:{{description='{XID}'}}"]
    for prompt in ("$ ", "+ ", "ann@host:~$ "):
        assert not explain_lines([f"{prompt}{command}", *printed, f"{prompt}squeue"]).incident, prompt
        assert not explain_lines([f"{prompt}{command}", *printed]).incident, "to its end"
        assert explain_lines([f"{prompt}{command}", *printed, f"{prompt}torchrun t.py", *RAISED]).culprits == (2,)
        assert explain_lines([f"{prompt}{command}", *STEPS, *RAISED]).incident, "no prompt, and a job"


@pytest.mark.parametrize(
    "command", ["cat err.txt", "tail -5 train.log", "grep -n Watchdog train.log", "dmesg", "git pull"]
)
def test_what_a_command_prints_of_the_job_is_one(explain_lines: Explain, command: str) -> None:
    assert explain_lines([f"$ {command}", LATE, "$ squeue"]).incident


EXPLAINED = [
    "A timeout of a collective usually means that one rank did not come. Your line", "", "```", LATE, "```", "",
    "says who waited and not who is late.", "", "1. **Data**: one rank has more batches than the others.",
    "2. **Memory**, as in", "", f"    {MEMORY}", "", "Look at the logs of your other ranks.",
]  # fmt: skip


def test_an_answer_on_errors_is_no_log(explain_lines: Explain) -> None:
    report = explain_lines(EXPLAINED)
    assert not report.incident and "a page about errors, and no log" in report.notes[0]
    assert explain_lines(["My job hangs:", *EXPLAINED]).incident, "who tells of a job of their own"
    assert explain_lines([row.replace("Your", "The").replace("your", "the") for row in EXPLAINED]).incident
    assert explain_lines([*EXPLAINED, "srun: error: gpu-03: task 5: Killed"]).incident, "a launcher speaks"
    assert explain_lines([*EXPLAINED, *[f"[rank1]: x{n}" for n in range(9)], LATE]).incident, "mostly a log"


def test_a_sentence_that_introduces_a_message_before_a_job_that_works(explain_lines: Explain) -> None:
    news = [
        "Welcome. If you see",
        f"  {MEMORY}",
        "take a smaller batch. When you find",
        f"  {XID}",
        "open a ticket with us, please.",
    ]
    assert not explain_lines([*news, *STEPS]).incident
    assert explain_lines(news).incident, "of a report without a job"
    assert explain_lines([*STEPS, *news]).incident, "behind the job"
    assert explain_lines([row.replace("you see", "I see") for row in news] + STEPS).incident, "who tells of a job"
    assert explain_lines([*news, *STEPS, XID]).incident


SHOWN = {
    "a text of the model": ["Generated text (step 100):", "-----", "The log said", LATE, "and it died.", "-----"],
    "examples of the data": ["First examples of the dataset", "--- example 0 ---", *RAISED, "--- example 1 ---", "sort it"],
    "a sample between arrows": [">>> sample 0:", "Logs often have", MEMORY, "<<< end"],
    "known messages": ["Known failure signatures:", f"  late  {LATE}", f"  xid79 {XID}"],
    "what to look for": ["[entrypoint] see the runbook:", f"[entrypoint]   1. '{XID}': drain the node"],
}  # fmt: skip


@pytest.mark.parametrize("case", SHOWN)
def test_what_a_program_shows_before_it_works_is_no_incident(explain_lines: Explain, case: str) -> None:
    assert not explain_lines([*SHOWN[case], *STEPS]).incident
    assert explain_lines([*STEPS, *SHOWN[case]]).incident, "nothing works behind it"
    assert explain_lines([*SHOWN[case], *STEPS, *RAISED]).incident
    assert explain_lines([*SHOWN[case][1:3], *STEPS[:1], *RAISED]).incident, "no heading"


@pytest.mark.parametrize(
    "lines",
    [
        ["=== sample 3 ===", "hello", "=== end ===", *RAISED],
        ["Known hosts:", "  gpu1", f"{XID}"],
        ["Failures:", *(f"  {row}" for row in RAISED)],
        ["33 examples per second", *RAISED],
        ["=== Training examples: 1000 ===", "loading", *RAISED, "=== end ==="],
        ["Root Cause (first observed failure):", "-----", *RAISED, "-----"],
    ],
)
def test_no_frame_and_no_list_of_known_messages(explain_lines: Explain, lines: list[str]) -> None:
    assert explain_lines([*lines, *STEPS[:2]]).incident


def test_rules_for_alerts_quote_what_they_tell_of(explain_lines: Explain) -> None:
    rules = ["groups:", "- alert: GpuLost", "  annotations:", f"    summary: '{XID}'", f'    description: "{LATE}"']
    assert not explain_lines(["$ ls", *rules]).incident
    assert explain_lines([*rules, XID]).incident
    assert explain_lines([f"summary: {XID}", LATE]).incident, "no text in quotation marks"


@pytest.mark.parametrize(
    "lines",
    [
        ["user: ida", "model: llama", "data: pile", *RAISED, "user: ida"],
        ["columns:", "  prompt: question", "  chosen: good", "model: llama", STEPS[0], *RAISED, STEPS[1]],
        ["Question: which rank was it?", "Model: llama, 8 GPUs", *timeout(0), *timeout(1), *RAISED, "User: ida", "x"],
        ["$ git log -1 --oneline && python -m train", "91be07c batch", *RAISED, "$ ls"],
        ["$ tail -n 40 ~/alignment-handbook/runs/a.out", *RAISED, "$ ls"],
        ["$ grep -h Error: examples/grpo/logs/rank_*.log", MEMORY, "$ ls"],
        ["$ llm-train --gpus 8", *RAISED, "$ ls"],
    ],
)
def test_what_is_neither_a_talk_nor_a_page(explain_lines: Explain, lines: list[str]) -> None:
    assert explain_lines(lines).incident
