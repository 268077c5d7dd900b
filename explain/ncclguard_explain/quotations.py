"""Tell what somebody quotes from what a job prints: sources, pages, conversations, tests, the text of a model.

A message that is quoted is no incident. That is told by an input as a whole (`what_it_is`), by the command that prints
it (`is_printed`), by the lines around it (`is_in_talk`, `is_introduced`), or by the line itself (`is_data`, `spans`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from ncclguard_explain.language import Message, tr

#: Returns so many raw lines behind a message, or fewer.
Following = Callable[[int], Sequence[str]]

# --- whole inputs ---

#: What ranks, launchers and trainers print, anywhere in a line: an input with it is no quotation as a whole.
_RANKS = re.compile(rb"\[rank ?(\d+)\]:|\[Rank (\d+)\] |:\d{1,9}:\d{1,9} \[(\d+)\] NCCL")
_TABLE = re.compile(
    rb"\bsrun: error: [^\n]{0,80}\btasks? [\d,\-]+: |\bpdsh@[^\n]{0,120} exited with exit code|\.ChildFailedError|"
    rb"failed \(exitcode: -?[1-9]|exits with return code = -?[1-9]|mpirun noticed"
)
_STEP = re.compile(rb"(?im)^[^\n\"'`]{0,80}\bstep\W{0,3}\d+\b[^\n]{0,40}\bloss\b")
#: What a chat prints above each message, or before it: who, and when.
_SPEAKER = re.compile(
    rb"(?m)^(?:(?:[*_]{1,2})?@?((?!(?i:.*\b(?:time|elapsed|eta|epoch|step|loss|took|duration)\b))[A-Za-z][A-Za-z.\-]*(?: [A-Za-z.\-]+){0,2})"
    rb"(?:[*_]{1,2})?(?: {1,4}|, |\t| \xe2\x80\x94 )\[?(?:(?:[Tt]oday|[Yy]esterday)(?: at)? )?"
    rb"([01]?\d|2[0-3]):([0-5]\d)(?: ?[AaPp][Mm])?\]?:?\r?$"
    rb"|\[([01]?\d|2[0-3]):([0-5]\d)(?: ?[AaPp][Mm])?\] (?!INFO|WARN|ERROR|DEBUG)@?([A-Za-z][A-Za-z.\- ]{1,30}?)(?:: | {2,}(?=\S)))"
)
#: The same without a time, before what somebody says in words.
_SAYS = re.compile(rb"(?m)^@?([A-Za-z][a-z.\-]{1,14}): (?=(?:\S+ ){2})(?!\[|\d|error|warning|info)[^\n]*$")
_PERSONS = re.compile(rb"\?(?:\s|$)|\bI\b|\bI'|(?i:\b(?:we|you)\b)", re.MULTILINE)
#: The title of a page that quotes what one may see, and any heading.
_TITLE = re.compile(
    rb"\s*(?:---\n(?:[\w\-]+:.*\n)+---\s+)?(?:#{1,3} |(?=[^\n]{3,80}\n[=\-]{3,}\s*\n))(?:[A-Za-z\-]+ ){0,3}?"
    rb"(?i:troubleshooting|FAQ|frequently asked questions|runbook|playbook|known (?:issues|errors)|release notes|changelog|"
    rb"common (?:errors|problems))(?![^\s:])(?:[A-Za-z ,:&/\-]|v?\d{1,2}\b(?!-)){0,60}(?:\([^)\n]{0,40}\))?[ ]*\n"
)
#: Words of people on what is over, on a job that is well, and on one that is not.
_OVER = re.compile(
    rb"(?i)\b(?:last|previous) (?:week|month|quarter|year)\b|\bold (?:logs?|runs?|incidents?|jobs?|tickets?|issues?|threads?)\b|\bpost-?mortem\b|\brunbook\b|\bcheat ?sheet\b|\bfaq\b|\bwhat (?:this|these|that|it|they) (?:one )?means?\b|\barchived?\b|"
    rb"\bsince (?:then|fixed)\b|\bnot (?:been )?seen (?:again )?since\b|\bclosing (?:the|this|it)\b|\b(?:ticket|issue|incident|case)\b[^\n]{0,40}\b(?:closed|resolved|fixed)\b"
)
_WELL = re.compile(
    rb"(?i)\b(?:run|runs|job|training|ranks?|nodes?|gpus?|replicas|everything|all|still|yes|it)\b[^\n?]{0,60}\b(?:green|healthy|fine)\b|\b(?:0|no) (?:restarts|pages|alerts)\b"
)
_UNWELL = re.compile(
    rb"(?i)\b(?:stuck|hung|hangs?|hanging|crash(?:ed|es|ing)?|died|dies|down|fail(?:s|ed|ing)?) (?:again|now|right now|here|this morning|tonight)\b|"
    rb"\b(?:it|job|run|training|cluster|node|gpu|rank ?\d*)(?:'s| is| are) (?:down|dead|gone|stuck|hung|broken|unhealthy)\b|\bany ideas?\b|\b(?:please|pls|need|can \w+|could \w+|any) help\b|\bhelp\?|\bwhat (?:should|do|can) (?:i|we) do\b|\bjust (?:died|crashed|hung|failed)\b"
)
#: A ticket that is closed, or a report on what is over, by its head; and a mail.
_CLOSED = re.compile(
    rb"(?im)(?:^|[ \t]{2}|\|)[ \t*|>\-]*(?:(?:ticket|issue|case|incident) )?(?:status|state|resolution)[ \t*|]*:[ \t*|]*(?:done|closed|resolved|fixed)\b(?![^\n]*(?:->|re-?open|not planned|\bauto))|\b(?:post-?mortem|incident (?:report|review)|retrospective)\b[^\n]{0,80}\b(?:closed|resolved|done|final)\b"
)
_NEW = re.compile(
    rb"(?i)\bre-?open(?:ed|ing|s)?\b|\b(?:not|never|isn't|wasn't) (?:yet |really )?(?:resolved|closed|fixed|solved|the same)\b|\bevery (?:day|night|run)\b|"
    rb"\b(?:still|again|today|this morning|since (?:then|the|that))\b[^\n]{0,60}\b(?:end(?:s|ed)|stop(?:s|ped)|dies|died|hangs?|hung|crash(?:es|ed)?|fail(?:s|ed)?|abort(?:s|ed)?|times? out|timed out|not get)\b|"
    rb"\b(?:fine|well|worked|ok) (?:last|until|before|till)\b|\b(?:problem|error|issue) is (?:still )?(?:there|back)\b"
)
_MAIL = re.compile(rb"(?m)^(?:From|To|Subject|Date|Cc): \S")
_HYPERTEXT = re.compile(rb"(?i)\s*(?:<!doctype html|<html\b)[\s\S]{0,2000}?<(?:title|h1)\b")
#: A change of sources.
_CHANGE = re.compile(rb"\s*(?:diff --git a/|Index: \S+\r?\n={10}|--- a/\S+\r?\n\+\+\+ b/|From [0-9a-f]{40} )")
_OF_A_CHANGE = re.compile(
    rb"(?m)^(?:[+\- \\@]|diff |index |Index: |={20}|(?:new|old|deleted) (?:file )?mode |similarity |rename |copy |Binary )[^\n]*(?:\n|\Z)"
)
#: What somebody cites of others in a chat.
_CITED = re.compile(rb"(?m)^(?:\[[\d: ]{4,12}\] [^\n>]{2,40})?> [^\n]*$")
_ASIDE = re.compile(rb"\"[^\"\n]*\"")
#: A search engine's count, what it shows of where a page is, and lines of a program that works.
_RESULTS = re.compile(rb"(?i)\b(?:about |of )?[\d,.]+ results\b")
_IN_FILES = re.compile(rb"\s*\d+ results? (?:-|in) \d+ files?\b")
_PAGES = re.compile(rb"(?m)^\s*(?:https?://)?(?:[\w\-]+\.)+[a-z]{2,}(?: \xe2\x80\xba \S+)+\s*$|^\s*https?://\S+\s*$")
_PROGRAM = re.compile(rb"(?m)^(?:\[rank\d+\]|\S{1,200}:\d+:\d+ \[\d+\] NCCL)|Traceback \(most")
_HEADINGS = re.compile(rb"(?m)^#{1,4} \S|^[=\-]{3,}\s*$")
#: What launchers and programs print, and pages and people do not.
_LAUNCHES = re.compile(
    rb"\bsrun: |slurmstepd: |mpirun noticed|elastic/(?:agent|multiprocessing)|\.ChildFailedError|\btorchrun --|"
    rb"exits with return code"
)
_PRINTS = re.compile(_LAUNCHES.pattern + rb"|Traceback \(most recent call last\)")
#: unittest and GoogleTest: the head of a test, and the end of a run in which all have passed.
_TEST = re.compile(
    rb"(?m)^test\w* \([\w.]+\)(?: \.\.\. |\r?$)|^test[\w:]* \.\.\. |^\[={10}\] Running \d+ tests? from |^running \d+ tests?\r?$|^(?:PASS|FAIL) +\S+\.(?:test|spec)\.\w+|^\s*Start +1: "
)
_PASSED = re.compile(
    rb"\nRan \d+ tests? in [\d.]+s\r?\n\s*OK(?: \((?:skipped|expected failures)=[^)\n]*\))?\s*\Z|"
    rb"\n\[  PASSED  \] \d+ tests?\.\s*(?:YOU HAVE \d+ DISABLED TESTS?\s*)?\Z|\ntest result: ok\. \d+ passed; 0 failed;[^\n]*\s*\Z|"
    rb"\nTests: +(?:\d+ (?:skipped|todo), )?\d+ passed, \d+ total\b[^\n]*\n*(?:(?:Snapshots|Time|Ran all)[^\n]*\n*)*\Z|"
    rb"\n100% tests passed, 0 tests failed out of \d+\r?\n*(?:(?:Total Test|Label Time)[^\n]*\n*)*\Z"
)
_FAILED = re.compile(rb"\bFAILED\b|\b[1-9]\d* (?:tests? )?failed\b")
#: A list under a heading of Markdown, and nothing else: release notes, a plan; one of things to do; and of commits.
_LIST = re.compile(
    rb"\s*#+ .*(?:\r?\n(?:#+ .*|[*+\-] .*|\d+\. .*|[ \t].*|))*\r?\n?|(?:[*+\-] \[[ xX]\] .*(?:\r?\n(?:[ \t].*)?|$))+|"
    rb"(?:[0-9a-f]{7,40} (?![0-9a-f]{2} |\[rank).*(?:\r?\n|$))+"
)
_COMMIT = re.compile(rb"[0-9a-f]{7,40} ")
#: Names of documents that quote messages; a text of any name may be a log where its end does not say what it is.
_NAMED = re.compile(
    r"(?:.*/)?(?:[\w\-]*[_\-.])?(?i:readme|runbook|playbook|troubleshoot(?:ing)?|faq|known[_\-]?(?:issues|errors)|how-?to|handbook|change-?log|release[_\-]?notes|"
    r"cheat[_\-]?sheet|post-?mortem|changes|news)(?:[_\-][\w\-]*)?\.(?i:md|rst|adoc|html?|ya?ml|txt)"
)

_SOURCES = re.compile(rb"(?m)^(?:import|from|def|class|if|@)\b|^(?:#!|\"\"\")|^(?:async def) ")


def _is_conversation(data: bytes) -> bool:
    """Return whether people speak, quote and say what they think, a few lines each, and no program or launcher does."""
    said = [
        (found[1] or found[6], int(found[2] or found[4]), int(found[3] or found[5]))
        for found in _SPEAKER.finditer(data)
    ]
    if not said and _PERSONS.search(data) is not None:  # programs ask nothing, and speak of nobody
        said = [(found[1], 0, 0) for found in _SAYS.finditer(data)]
    names = {name for name, _, _ in said}
    if len(said) < 4 or data.count(b"\n") >= 10 * len(said):
        return False
    over = _is_over(data)
    times = [(hour + 12 * (hour < said[0][1]), minute) for _, hour, minute in said]  # it may become one o'clock
    return (
        (over or any(hour or minute for _, hour, minute in said))
        and 1 < len(names) < len(said)
        and times == sorted(times)
        and (b"\n> " in data or b"`" in data or over)
        and not _is_new(data)
        and not _ranks_speak(data)
        and _PRINTS.search(
            _ASIDE.sub(b"", _CITED.sub(b"", data)) if over else _CITED.sub(b"", data) if _goes_on(data) else data
        )
        is None
    )


def _ranks_speak(data: bytes) -> bool:
    """Return whether ranks of a job speak in an input: two of them in lines next to each other, or three anywhere."""
    ranks: set[bytes] = set()
    last, end = b"", -1
    for found in _RANKS.finditer(data):
        rank = found[1] or found[2] or found[3]
        ranks.add(rank)
        if len(ranks) > 2 or (rank != last and end >= 0 and data.count(b"\n", end, found.start()) == 1):
            return True
        last, end = rank, found.end()
    return False


def _of_a_job(data: bytes) -> bool:
    """Return whether the ranks of a job speak in an input, its launcher tells who failed, or a training makes steps."""
    if _ranks_speak(data) or len(_STEP.findall(data)) > 1:
        return True
    return _TABLE.search(_BLOCK.sub(b"", _CITED.sub(b"", data))) is not None


def _is_change(data: bytes) -> bool:
    """Return whether an input is a change of sources, and nothing but that."""
    if _CHANGE.match(data) is None:
        return False
    rest = _OF_A_CHANGE.sub(b"", data)
    return _RANKS.search(rest) is None and _PRINTS.search(rest) is None and _STEP.search(rest) is None


def _is_over(data: bytes) -> bool:
    """Return whether people speak of what is over, beside a job that is well, and of none that is not."""
    return _OVER.search(data) is not None and _WELL.search(data) is not None and not _is_new(data)


def _is_new(data: bytes) -> bool:
    """Return whether people speak of what is not over: it happens, or does so again."""
    return _UNWELL.search(data) is not None or _NEW.search(data) is not None


def _is_closed(data: bytes) -> bool:
    """Return whether an input is a ticket that is closed, and no program or launcher prints in it."""
    mail = len(_MAIL.findall(data[:600])) > 1 and _CITED.search(data) is not None and _is_over(data)
    over = mail or (_CLOSED.search(data[:400]) is not None and _OVER.search(data) is not None)
    return over and not _is_new(data) and _LAUNCHES.search(data) is None and _PROGRAM.search(data) is None


def _goes_on(data: bytes) -> bool:
    """Return whether a job is seen to work behind the last line that somebody cites."""
    last = max((found.end() for found in _CITED.finditer(data)), default=len(data))
    return len(_WORKS.findall(data, last)) > 1


def _is_search(data: bytes) -> bool:
    """Return whether an input is what a search has found: how many results, and in how many files or on what pages."""
    head = data[:400]
    if _IN_FILES.match(head) is not None:
        return _LAUNCHES.search(data) is None
    found = _RESULTS.search(head) is not None and len(_PAGES.findall(data[: 1 << 16])) > 1
    return found and _LAUNCHES.search(data) is None and _PROGRAM.search(data) is None


def _is_page(data: bytes) -> bool:
    """Return whether a page with headings explains errors, and no program or launcher prints any."""
    return _TITLE.match(data) is not None and len(_HEADINGS.findall(data)) > 1 and _PRINTS.search(data) is None


#: Fenced and indented blocks, the words of who explains to a reader, and of who asks about a job of their own.
_BLOCK = re.compile(rb"(?ms)^[ \t]*```.*?^[ \t]*```[ \t]*$|^(?: {3,}|\t)\S[^\n]*$")
_EXPLAINS = re.compile(
    rb"(?i)\b(?:usually|typically|often|means|indicates|(?:is|are) caused by|(?:common|possible|likely|typical) causes?)\b"
)
_ASKS = re.compile(
    rb"\bI\b|(?i:\b(?:we|my|our)\b)|(?i:^#+ (?:describe|versions|environment|steps|expected|reproduc|bug|issue)\b)",
    re.MULTILINE,
)
_ITEM = re.compile(rb"\s*(?:#{1,4} |\d+[.)] |[-*] |\*\*)")
_WORDS = re.compile(rb"(?<![\w./:\-])[A-Za-z]?[a-z']+(?=[ ,.;:!?)]|$)")


def _is_explanation(data: bytes) -> bool:
    """Return whether a short text says in sentences and lists what errors mean, and quotes them in blocks."""
    if len(data) > 1 << 16 or _PRINTS.search(_BLOCK.sub(b"", data)) is not None:
        return False
    rows = [row for row in _BLOCK.sub(b"", data).split(b"\n") if row.strip()]
    items = sum(_ITEM.match(row) is not None for row in rows)
    prose = [row for row in rows if len(_WORDS.findall(row)) > 3]
    said = b"\n".join(rows)
    told = _EXPLAINS.search(said) and re.search(rb"(?i)\byour?\b", said) and not _ASKS.search(said)
    others = [row for row in rows if row not in prose and not _ITEM.match(row)]
    return bool(told) and items > 1 and len(prose) > 2 and 4 * len(others) <= len(rows)


def _are_tests(data: bytes) -> bool:
    """Return whether unittest runs tests from the beginning on, all of which pass, and nobody else prints."""
    passed = _TEST.search(data[:1000]) is not None and _PASSED.search(data) is not None
    if passed and b"\ntest result: ok" in data and _ranks_speak(data):  # cargo's tests start no ranks
        return False
    return passed and _FAILED.search(data) is None and _LAUNCHES.search(data) is None


def _is_hypertext(data: bytes) -> bool:
    """Return whether an input is a page of the web, or a notebook without what its cells have printed."""
    if _HYPERTEXT.match(data) is not None:
        return _LAUNCHES.search(data) is None and _PROGRAM.search(data) is None and b"[rank" not in data
    return b'"cell_type"' in data[:400] and b'"output_type"' not in data


def _is_list(data: bytes) -> bool:
    if not data or b"\n" not in data.strip() or _LIST.fullmatch(data) is None:
        return False
    heads = [row.split(b" ", 1)[0] for row in data.split(b"\n") if _COMMIT.match(row)]
    return len(set(heads)) == len(heads)  # a container's lines begin alike


def what_it_is(name: str, data: bytes) -> Message | None:
    """Return what an input is that quotes messages and is no log, by its name or its first bytes; None for a log."""
    told = name.endswith((".py", ".patch", ".diff")) and _RANKS.search(_OF_A_CHANGE.sub(b"", data)) is None
    if told or (name.endswith(".py") and _SOURCES.search(data)) or _is_change(data):
        return tr("{name}: a program, and no log", name=name)
    if name.endswith((".po", ".pot")) and b"msgid " in data:
        return tr("{name}: a catalogue of translations, and no log", name=name)
    if _is_hypertext(data):
        return tr("{name}: a page about errors, and no log", name=name)
    if _are_tests(data):
        return tr("{name}: tests, which have passed", name=name)
    if _is_conversation(data):
        return tr("{name}: people quote messages in it: give the log that they speak of", name=name)
    if _of_a_job(data):
        return None
    if _NAMED.fullmatch(name) or _is_page(data) or _is_explanation(data) or _is_search(data):
        return tr("{name}: a page about errors, and no log", name=name)
    return tr("{name}: a document, and no log", name=name) if _is_list(data) or _is_closed(data) else None


# --- what a command prints ---

#: A shell (`set -x`, a session) prints a document or what others have written of their changes, up to its next command.
_SEARCH = r"(?:git (?:-C \S+ )?)?(?:[efz]?grep|rg|ag|ack)"
_PROMPT = r"(?:(?:\(\w+\) )?(?:\[?\w[\w.\-]*@[\w.\-]+[^\n$#%]{0,40}|[~/][^\s$#%]*(?: \([\w/.\-]+\))?) ?[$#%]|[+$]+) *"
_DOCUMENT = (
    r"\S*(?:\.(?:md|rst|adoc)\b|(?i:readme|runbook|playbook|troubleshoot|faq\b|known[_\-]?(?:issues|errors)|how-?to|handbook|manual|"
    r"change-?log|cheat[_\-]?sheet))[^\s/]*(?!\S)(?<!\.log)(?<!\.out)(?<!\.err)"
)
#: Folders of what is no log of this job.
_ELSEWHERE = r"(?:tests?|testdata|fixtures?|docs?|examples?(?=/(?!\S*(?:\blogs?/|\.(?:log|out|err)\b)))|golden|archived?|notes|(?:old|previous|past)[\w\-]*)/"
_PRINTS_DOCUMENT = re.compile(
    rf"{_PROMPT}(?:(?:cat|less|more|head|tail|bat|sed)(?: (?:-\S+|'[^']*'|\d+))* {_DOCUMENT}|man |git (?:log|show|diff|blame)\b|gh (?:issue|pr) view\b|"
    rf"(?:{_SEARCH})\b.* (?:\S*/)?{_ELSEWHERE}\S*(?: \| [\w \-]*)?\s*$|"
    r"(?:promtool|amtool|vmalert-tool|mimirtool)\b|(?:llm|ollama run|sgpt|aichat|mods|chatgpt|claude|gemini|tldr)(?!\S)|"
    r"curl\b.*/(?:completions|generate|messages|responses|api/chat)\b)"
)
_NEXT_COMMAND = re.compile(rf"{_PROMPT}\S")
#: A job that the same line starts.
_LAUNCHES_TOO = re.compile(
    r"(?:&&|;|\|\|) *(?:\w+=\S* )*(?:\S*python\S*|torchrun|srun|mpirun|accelerate|deepspeed|bash|sh|\./\S+|make)\b"
)


#: Lines behind a message in which the next command is looked for.
_PRINTED = 400
_WORKS = re.compile(rb"(?i)\b(?:step|iter(?:ation)?|epoch|loss)\b\W{0,3}\d")


def is_printed(before: Sequence[str], following: Following) -> bool:
    """Return whether a line stands in what somebody has written, by the last command before it: a page, an answer.

    The next command is seen, or the end of the input, before which no job works.
    """
    at = next((at for at in range(len(before) - 1, -1, -1) if _NEXT_COMMAND.match(before[at])), None)
    if at is None or _PRINTS_DOCUMENT.match(before[at]) is None or _LAUNCHES_TOO.search(before[at]) is not None:
        return False
    after = following(_PRINTED)
    if any(map(_NEXT_COMMAND.match, after)):
        return True
    rest = "\n".join([*before[at:], *after]).encode()
    return len(after) < _PRINTED and _LAUNCHES.search(rest) is None and _WORKS.search(rest) is None


# --- talks: what is asked and what a model answers, over several lines ---

#: Who asks and who answers, in front of what is said or above it, and what ends a message of a model.
_TURN = re.compile(
    r"\W{0,40}(?:<\|(?:im_start|start_header_id)\|>|[Rr]ole['\"]?: ?['\"]?)?(?i:(?P<asks>user|human|(?:system )?prompt|question|instruction|query|q)|"
    r"(?P<answers>assistant|completion|answer|response|reply|generated(?: text)?|generation|prediction|reference|chosen|rejected|model|gold|target|label|a))"
    r"(?: ?#?\d+)?(?: ?\([^)]{0,40}\))?(?:\s*$| ?:|<\|| ?[\])}>=\-*#]{1,40}\s*$)"
)
#: A setting of YAML: a word for a name, and a word or nothing for its value.
_SETTING = re.compile(r"\s*[a-z_]\w*:(?: \S+)?\s*$")
_ENDS_MESSAGE = re.compile(r"\s*(?:<\|(?:im_end|eot_id|end)\|>|</s>|\[/INST\])")
_LINE = re.compile(r"\s*([=\-*#~_─━═])\1{3,}")
_DIGITS = re.compile(r"\d+")
#: Lines of a talk, before and behind a message that is quoted in it.
_TALK = 40
#: Characters of a line that are looked at for a heading.
_SHOWN = 400


def is_in_talk(before: Sequence[str], following: Following) -> bool:
    """Return whether a line stands within a talk with a model: both sides speak around it, and it is seen to go on.

    Somebody speaks behind it, or a message or the talk ends, or the program does what it did before; no command and,
    where nobody speaks behind it, no launcher stands between.
    """
    before = before[-_TALK:]
    turns = [
        (at, found)
        for at, row in enumerate(before)
        if (found := _TURN.match(row)) and not _is_setting(before[max(0, at - 1) : at + 2], row)
    ]
    if not turns:
        return False
    after = following(_TALK)
    first, last = turns[0][0], turns[-1][0]
    head = [row for row in before[max(0, first - 3) : first + 1] if row.strip()]
    lines = {found[1] for row in head if (found := _LINE.match(row))}
    own = {_DIGITS.sub("", row)[:14] for row in head if not _LINE.match(row) and not _TURN.match(row)}
    kinds = {found.lastgroup for _, found in turns}
    end = None
    for at, row in enumerate(after):
        found = _TURN.match(row)
        if (found and (row[found.end() :].strip() or any(map(str.strip, after[at + 1 :])))) or _ENDS_MESSAGE.match(row):
            kinds |= {found.lastgroup} if found else set()
            end = at if end is None else end
            if len(kinds) > 1:
                break
        elif end is None and len(kinds) > 1:
            line = _LINE.match(row)
            if (line and line[1] in lines) or _DIGITS.sub("", row)[:14] in own:
                between = "\n".join([*before[last:], *after[:at]]).encode()
                end = at if _LAUNCHES.search(between) is None else None
                break
    within = [*before[last:], *after[:end]]
    return (
        len(kinds) > 1
        and end is not None
        and not any(map(_NEXT_COMMAND.match, within))
        and len({found[1] or found[2] for found in _RANKS.finditer("\n".join(within).encode())}) < 3
    )


def _is_setting(around: Sequence[str], row: str) -> bool:
    """Return whether a line that looks like a turn of a talk is a setting beside others, and no role."""
    return "role" not in row and _SETTING.match(row) is not None and sum(map(bool, map(_SETTING.match, around))) > 1


#: How a text introduces messages that one may see, or a list of them, and what stands in such a list or behind it.
_INTRODUCES = re.compile(
    r"(?-i:(?!.*\bI\b))(?!.*\b(?:we|my|our)\b)(?i:.*\b(?:if|when(?:ever)?|in case|you|users?|they|people)\b.{0,60}\b(?:see|get|find|encounter|hit|meet)s?\b[^.]{0,60}$)"
)
_LISTS = re.compile(
    r"(?i)(?!.*\b(?:traceback|raised|caught)\b).*\b(?:known|examples?|signatures?|typical|common|patterns?|symptoms?|look(?:s|ing)? for|runbook|such as|e\.g\.|hints?|FAQ|cheat ?sheet)\b[^.]{0,60}$"
)
#: Above a text that a program shows of its data or its model, in a frame.
_SHOWS = re.compile(
    r"(?i)(?:[^\w\n]*|.*\b)(?:samples?|examples?|generated(?: text)?|generations?|decoded(?: text)?|completions?|predictions?|rollouts?)"
    r"(?: ?#?\d+)?(?: \([^)]{0,40}\)| (?:of|at|for|from) .{0,40})?\W*$"
)
_FRAME = re.compile(r"\s*(?:[=\-*#~>]{2,}|<{2,}) ?[A-Za-z]")
_TAG = re.compile(r"\[[\w.\- ]+\]:? ?")
_ENTRY = re.compile(r"\s|[-*•'\"]|\d+[.)] |[<>=]")


def is_introduced(before: Sequence[str], row: str, following: Following) -> bool:
    """Return whether a line stands in a list with such a heading, in a frame, or between sentences that explain."""
    above = [_TAG.sub("", one[:_SHOWN], 1) for one in before[-_TALK:] if one.strip()]
    if above and _INTRODUCES.match(above[-1]):
        below = next((one for one in following(3) if one.strip()), "").encode()
        return len(_WORDS.findall(below)) > 3 and _PRINTS.search(below) is None
    frame = next(
        (at for at in range(len(above) - 1, -1, -1) if _LINE.match(above[at]) or _FRAME.match(above[at])), None
    )
    if frame is not None and any(map(_SHOWS.match, above[max(0, frame - 1) : frame + 1])):
        return any(_LINE.match(one) or _FRAME.match(one) for one in following(_TALK))
    if not _ENTRY.match(_TAG.sub("", row, 1)):
        return False
    head = next((one for one in reversed(above) if not _ENTRY.match(one)), "")
    return _LISTS.match(head) is not None


# --- single lines, and those around them ---

#: A record of Python's logging below the level of a warning that holds a line of torch in quotation marks: a test, say.
_LOGGED = re.compile(r"(?:INFO|DEBUG)\b[^'\"`]*['\"`](?:\[rank\d+\]:)?\s?\[[EWF]")
#: A line within data that a program prints: in a block indented behind bars or >>>, or in a dictionary of Python.
_DATA = re.compile(r"\s+>>> |\s+\| (?!.*\|\s*$|\d{4}-\d\d-\d\d[T ])|\{'\w+': .*\[rank\d+\]:\s?\[[EWF]")
#: Python 3.11 and newer indent the exceptions of a group the same way.
_GROUP = b"Exception Group Traceback"
#: Keys of rules for alerts and of their tests, before a text.
_OF_RULES = re.compile(
    r"\W{0,4}RESOLVED(?::\d+)?\]|\s*(?:- )?(?:(?:alert|expr|annotations|summary|description|runbook_url|exp_\w+): *['\"]|(?:(?:exp|got) ?: ?\[ ?)?(?:Labels|Annotations): ?\{)"
)
#: What a search prints of sources and documents, and the command: a formatter of logs may begin its lines alike.
_FOUND = re.compile(
    rf"[~.]?/?(?:[\w.\-]+/)*{_ELSEWHERE}[\w./\-]*[:\-]\d+[:\-]|"
    r"[\w./\-]+\.(?:py|pyi|c|cc|cpp|cu|cuh|h|hpp|go|rs|java|js|ts|md|rst|adoc|tex|ipynb)[:\-]\d+[:\-]"
)
#: The same where the name of the file stands above its lines.
_NUMBERED = re.compile(r"\d+[:\-]")
_CHAINED = re.compile(r" ?(?:&&|;) ?")
_FILE = re.compile(r"[\w./~\-]+\.(?:py|pyi|c|cc|cpp|cu|cuh|h|hpp|go|rs|java|js|ts|md|rst|adoc|tex|ipynb)\s*$")
_COMMAND = re.compile(r"[^\n]{0,80}?[$#%>] (\S[^\n]*)")
_SEARCHES = re.compile(rf"(?:cd \S+ && )?(?:{_SEARCH})\b")
#: A check of a health test that has passed, by the name of what it looks for.
_PASSES = re.compile(
    r"(?!.*(?:\[rank\d|\[[EWF]\d{3,4} ))[^\n]*(?:['\"].*\b(?:hits|matches)=0\b|\sPASS(?:ED)?(?: \([^)\n]*\))?\s*$|(?<!node)(?<!rank)(?<!worker)(?<!host)(?<!task)(?<!gpu)(?<!GPU)(?<!device)(?<!replica)(?<!pod)(?<!Rank)(?<!Node)\s0\s+['\"].*['\"]\s*$|\b(?:0|no|none) (?:found|matches|hits|errors|events)\b.*\b(?:ok|OK|PASS\w*|passed)\s*$)"
)
#: What a model was given or has written, as trainers, evaluations and servers print it.
_OF_A_MODEL = re.compile(
    r"(?:\{?['\"]|\[\w+\] )?(?:(?:step|sample|example|case|item|row|request) ?#?\d* )?"
    r"(?i:prompt|completion|question|answer|instruction|generated[ _]text)(?: ?#?\d+)?['\"]? ?[:=](?![^\n]*\"error\"| ?(?:\w+ )?(?:failed|raised|died)\b)"
)
_BETWEEN = re.compile(r"\[INST\].*?(?:\[/INST\]|$)|<\|im_start\|>.*?(?:<\|im_end\|>|$)")
_STRING = r"(?P<mark>\\?[\"'])(?:(?!(?P=mark))(?:\\.|[^\\]))*(?:(?P=mark)|$)"
_KEY = r"(?P<key>(?<![\w.])\\?[\"']?(?:{})\\?[\"']? ?[:=] ?)" + _STRING
_VALUE = re.compile(_KEY.format("prompt|completion|question|answer|generated_text|output_text"))
_RESPONSE = re.compile(r"(?P<key>\bGenerated response [\w\-]+.{0,30}?: output: )" + _STRING)
_MESSAGE = re.compile(_KEY.format("prompt|completion|content|reasoning_content|text"))
#: A row of a table of Markdown, and the line below its head: what stands in one is quoted.
_CELLS = re.compile(r"\s*\|.*\|\s*$")
_CHANGED = re.compile(r"[+\- @\\]")
_HUNK = re.compile(r"@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@")
_RULE = re.compile(r"(?m)^\s*\|(?:\s*:?-{3,}:?\s*\|)+\s*$")
#: What stands in backticks, and what somebody says that one will see.
_QUOTED = re.compile(
    r"`[^`]{12,}`|(?i:\b(?:message|error|line|warning|text|string|phrase)s?) [\"“][^\"”]{12,}[\"”](?= (?i:means?|indicates?|says?|appears?|comes?|usually|typically|is (?:printed|logged|raised|shown))\b)|(?i:\b(?:you|we|users?|they)\b (?:\w+ ){0,3}?(?:see|get|find|read)s? (?:\w+ ){0,4})[\"“][^\"”]{12,}[\"”]"
)


def is_in_table(row: str, above: Sequence[str]) -> bool:
    """Return whether a line is a row of a table of Markdown or of a change of sources, by the lines above it."""
    if row.startswith(("+", "-")):
        return any(map(_HUNK.match, itertools.takewhile(_CHANGED.match, above[::-1])))
    return _CELLS.match(row) is not None and any(map(_RULE.match, itertools.takewhile(_CELLS.match, above[::-1])))


def is_data(text: str, around: bytes) -> bool:
    """Return whether a record is quoted by a logger, or stands in data that a program prints."""
    return _LOGGED.match(text) is not None or (_DATA.match(text) is not None and _GROUP not in around)


def is_of_rules(text: str) -> bool:
    """Return whether a line is of rules for alerts, or of their tests, which quote what they tell of."""
    return _OF_RULES.match(text) is not None


def may_be_found(before: bytes) -> bool:
    """Return whether a search may have printed the last one of these lines."""
    return b"grep " in before or b"rg " in before or b"ack " in before or b"ag " in before


def are_found(rows: Sequence[str]) -> bool:
    """Return whether a search has found the last lines: mostly such lines stand between them and its command."""
    found = numbered = headed = 0
    for at in range(len(rows) - 1, -1, -1):
        row = rows[at]
        found += _FOUND.match(row) is not None
        numbered += _NUMBERED.match(row) is not None
        headed += _FILE.fullmatch(row) is not None  # the name of a file above lines that have their numbers alone
        command = _COMMAND.match(row) if not (_FOUND.match(row) or _NUMBERED.match(row)) else None
        if command is not None and at == len(rows) - 1:  # what somebody looks for
            return any(map(_SEARCHES.match, _CHAINED.split(command[1])))
        if command is not None:
            last = _CHAINED.split(command[1])[-1]
            named = headed or _FILE.search(last.partition(" | ")[0]) is not None
            found += headed + (numbered if named else 0)
            return _SEARCHES.match(last) is not None and found > 0 and 4 * found >= len(rows) - at - 1
    return False


def passes(row: str) -> bool:
    """Return whether a line is a check that has passed."""
    return (
        ("=0" in row or "PASS" in row or " 0 " in row or " no" in row)
        and len(row) < 1000
        and _PASSES.match(row) is not None
    )


#: Keys of a row of data, and of a record of a log.
_OF_DATA = re.compile(
    r"""['"](?:text|inputs?|question|prompt|sentence|document|passage|instruction|answer|target|response|pred\w*|reference|choices|query)['"] ?:"""
)
#: A value that a program prints on its way, which no key makes data.
_PRINTED_VALUE = re.compile(
    r"""['"](?!(?:text|inputs?|question|prompt|sentence|document|passage|instruction|answer|target|response|pred\w*|reference|choices|query)['"])[\w.@\-]+['"] ?: ?\\?['"](?:\[rank\d+\]|\[[EWF]\d{4} |Traceback \(most|\S{1,80}:\d+:\d+ \[\d+\] NCCL)"""
)
_OF_LOG = re.compile(
    r"""['"]_{0,2}(?:@?timestamp|ts|time|level|lvl|levelname|severity|logger|log|msg|message|error|err|exception|reason|rank|pid|event|ev|kind|name|status|exit_?code|pod|host|hostname|node|stderr|stdout|container|source|stream|text_?payload|json_?payload|body|line|(?:pod|container|host|node)_?(?:name|ip)|namespace|topic|tag|path)_{0,2}['"] ?:""",
    re.IGNORECASE,
)


def without_talk(text: str) -> str:
    """Return a line without what a model was given or has written: values of such keys, and between its tokens."""
    if "[INST]" in text or "<|im_start|>" in text:
        text = _BETWEEN.sub("", text)
    if "Generated response" in text:  # vLLM, with --enable-log-outputs
        text = _RESPONSE.sub(r"\g<key>", text)
    if text.startswith("{") and _OF_DATA.search(text) and not (_OF_LOG.search(text) or _PRINTED_VALUE.search(text)):
        return "{}"
    if "prompt" not in text and "role" not in text and "_text" not in text and "completion" not in text:
        return text
    return (_MESSAGE if "role" in text else _VALUE).sub(r"\g<key>", text)


def is_of_a_model(message: str) -> bool:
    """Return whether a line begins with what a model was given or has written."""
    return _OF_A_MODEL.match(message) is not None


def spans(text: str) -> list[tuple[int, int]]:
    """Return where a text quotes: in backticks, or what somebody says that one will see."""
    return [found.span() for found in _QUOTED.finditer(text)] if any(mark in text for mark in '`"“') else []
