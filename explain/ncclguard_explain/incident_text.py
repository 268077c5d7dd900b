"""ncclguard's own incidents in its own words, in any of its languages: an error, a log line, a panel.

What the ranks have agreed on says after how long; what one rank finds alone does not. A call that starts again went on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ncclguard_explain.cause import ALL_ADVICE, WORD, Cause
from ncclguard_explain.facts import MAX_RANK, Fact, Kind, Work
from ncclguard_explain.language import LANGUAGES, beside, said, tr
from ncclguard_explain.quotations import Following

#: A panel and a log line have this in them.
HEAD = "ncclguard incident "
#: The guard's errors, which every rank raises that waited.
ERRORS = ("CollectiveFailed", "CollectiveMismatch", "CollectiveTimeout", "PeerFailed", "PeerLost")
#: Words of an incident in which the launcher or Ctrl-C ended the job.
FROM_OUTSIDE = re.compile(
    r"were ended from outside|被(?:从)?外部|rank \d+(?: \([^()]*\))? ?(?:raised|抛出) ?KeyboardInterrupt"
)
#: Words of an incident that `watch()` tells of.
STOOD_STILL = re.compile(r"stood still for|停滞了")
#: The words between a call and how long it had taken.
ENDS_CALL = re.compile(r" ?(?:failed after|stood still for|在|停滞了) ?(?=\d)")

#: Words of an incident whose call has ended all the same, and has given what is not to be trusted.
ENDED_NEVERTHELESS = re.compile("|".join(
    re.escape(str(said(tr("{operation} has ended, and not all ranks called the same", operation=""), language)).strip())
    for language in LANGUAGES
))  # fmt: skip

_HANDED_ON = re.compile(
    rf"(?:Got the following error when running the callback: )?((?:\w+\.)*(?:{'|'.join(ERRORS)})): (.*)", re.DOTALL
)
_WORDS = {str(said(word, language)): cause for cause, word in WORD.items() for language in LANGUAGES}
_WORDS |= {"raised": Cause.FAILED, "抛出": Cause.FAILED}
_BLAMED = re.compile(rf"rank(?:s)? (\d[\d,、 -]*?) ({'|'.join(_WORDS)})(?![a-z])")
_NAMED = _BLAMED.pattern.replace(" (", " (?:")
_ADVISED = [str(said(text, language)) for text in ALL_ADVICE for language in LANGUAGES]
_CAUSES = [  # no space stands before a Chinese one
    f"{' ' * (language == 'en')}{said(tr('cause: {cause}', cause=word), language)}"
    for word in WORD.values()
    for language in LANGUAGES
]
_TIME = rf"{ENDS_CALL.pattern}[\d.e+-]+ s(?: ?后 ?失 ?败)?"
_CALL = rf"(?P<op>\w+)\((?:[^():]|\([^()]*\))*\)?(?:{_TIME}| ?(?:{ENDED_NEVERTHELESS.pattern})) ?[:：] ?"
_VERDICT = re.compile(rf"{_CALL}(?P<named>{_NAMED}(?:(?:; |；){_NAMED})*)")
#: What the ranks agreed on where they could name nobody.
_NOBODY = re.compile(rf"{HEAD}\S+:? (?P<rest>{_CALL}.*)", re.DOTALL)
_SIDES = re.compile(r"no side is a majority|nothing tells who is wrong|不占多数|没有一方占多数|无从判断哪一方错了")
_NOT_COME = re.compile(r"ranks? (\d[\d, -]*) had not come to it|rank (\d[\d、 -]*)还没有到达")
_NETWORK = [f": {said(WORD[Cause.NETWORK], language)}" for language in LANGUAGES]
_DO, _NEXT = tr("what to do: {advice}", advice=""), tr("next time: {advice}", advice="")
#: The last line of a panel; a line of prose may begin with a bracket, too, where it is wrapped.
_OPERATION = re.compile(r"[(（](?:operation|操作) ")
#: A panel's line on ranks that were in the call, and for how long.
_IN_CALL = re.compile(r"waiting[^:]*: ranks? (\d[\d, -]*)|rank (\d[\d、 -]*)停在 ")
#: A panel's line on what some ranks called that differ.
_SIDE = re.compile(r"ranks? (?P<ranks>\d[\d,、 -]*?) (?:called|调用了) (?P<call>\w+\(.*)")
_STACKS = [str(said(tr("{thread}, innermost last:", thread=""), language)).rstrip(":：") for language in LANGUAGES]


def is_from_outside(incident: Fact) -> bool:
    """Return whether an incident only tells that the job was ended."""
    return FROM_OUTSIDE.search(incident.text) is not None


def not_come(incident: Fact) -> tuple[int, ...]:
    """Return the ranks that had not come when the job was ended, as the incident says."""
    found = _NOT_COME.search(incident.detail)
    return tuple(_ranks_of(next(filter(None, found.groups())).strip(" ,、"))) if found else ()


def call_and_time(detail: str) -> tuple[str, str]:
    """Return the call that an incident tells of and the figure of the seconds it took; "" for what is not there."""
    call, *rest = ENDS_CALL.split(detail, maxsplit=1)
    found = re.match(r"[\d.e+-]+", rest[0]) if rest else None
    return call, found[0] if found else ""


def read(text: str, following: Following, make: Fact) -> Fact | None:
    """Return the incident of a log line, or of the panel that it begins; None where the line tells of none."""
    if "─" not in text:
        return _verdict(text, make)
    # A panel is cut into lines, of which some are joined, and one of a log in front of it may be joined with its top.
    head = f" {re.sub('[╭╮─]+', ' ', text[max(text.rfind(HEAD), 0) :]).strip()} "
    for body in _bodies(following, 6):
        head = beside(head, f"{' '.join(body.split())} ")
    found = _verdict(head, make)
    return None if found is None else found.clone(**_of_panel(following))


def read_error(name: str, detail: str, make: Fact) -> Fact | None:
    """Return the incident of an exception's type and text; None where it is none of the guard's.

    torch hands on in a RuntimeError what a hook of DDP's, or a wait in the backward pass, raised.
    """
    handed_on = _HANDED_ON.match(detail)
    name, detail = handed_on.groups() if handed_on else (name, detail)
    return _verdict(detail, make) if name.rsplit(".", 1)[-1] in ERRORS else None


def _verdict(text: str, make: Fact) -> Fact | None:
    found = _VERDICT.search(text[:4000])
    if found is None:
        return _of_nobody(text, make)
    stops = _CAUSES if HEAD in text else _ADVISED  # a panel says more before it says what to do
    ends = [at for advice in stops if (at := text.find(advice, found.end())) > 0]
    if not ends and HEAD in text:  # a line that one rank has written, which says no more than the sentence
        ends = [found.end() + len(re.split(r"\. |。|\.$", text[found.end() :])[0])]
    blamed = [(_ranks_of(ranks), _WORDS[what]) for ranks, what in _BLAMED.findall(found["named"])]
    return make.clone(
        kind=Kind.GUARD,
        name=blamed[0][1].value,
        peers=tuple(rank for ranks, _ in blamed for rank in ranks),
        work=Work(found["op"]),
        detail=text[found.start() : min(ends, default=found.end())].strip(" .。")[:600],
        text=text[:600],
    )


def _of_nobody(text: str, make: Fact) -> Fact | None:
    found = _NOBODY.search(text[:4000])
    if found is None:
        return None
    detail = re.split(r"\. |。| \(rank \d+ reports", found["rest"])[0].strip(" .。")[:600]
    network = any(word in detail.replace("：", ": ") for word in _NETWORK)
    name = Cause.DIVERGED if _SIDES.search(detail) else Cause.NETWORK if network else Cause.UNKNOWN
    return make.clone(kind=Kind.GUARD, name=name.value, work=Work(found["op"]), detail=detail, text=text[:600])


def _ranks_of(text: str) -> list[int]:
    """The ranks of "0-2, 5" or "0-2、5"; none where that are more than a job has."""
    runs = [[int(number) for number in part.split("-")] for part in re.split("[,、] ?", text)]
    return [rank for run in runs if run[-1] < MAX_RANK for rank in range(run[0], run[-1] + 1)]


def _begins(line: str, text: str) -> str | None:
    """Return what follows the beginning of a panel's line in any language, up to its first figure, or None."""
    heads = (str(said(text, language)).strip().partition("0")[0] for language in LANGUAGES)
    return next((line[len(head) :].strip() for head in heads if line.startswith(head)), None)


def _bodies(following: Following, count: int) -> Iterator[str]:
    """Yield the text of a panel's rows, with its indentation; a launcher may write in front of or between them."""
    for row in following(count):
        if "╰" in row:
            return
        if row.count("│") > 1:
            yield row.partition("│")[2].rpartition("│")[0][1:].rstrip()


def _of_panel(following: Following) -> dict[str, tuple[object, ...]]:
    """The rest of a panel: its advice, who waited and what each side called, and the first stack in it.

    A stack ends with a line that is indented less than its frames.
    """
    advice: list[str] = []
    frames: list[str] = []
    waiting: list[int] = []
    sides: list[tuple[str, tuple[int, ...]]] = []
    deep, open_ = 0, False
    for body in _bodies(following, 80):
        line = body.strip()
        if sides and sides[-1][0].count("(") > sides[-1][0].count(")"):  # the call is cut
            sides[-1] = f"{sides[-1][0]} {line}", sides[-1][1]
            continue
        if line.endswith((":", "：")) and any(head in line for head in _STACKS):
            deep = 0 if frames else len(body) - len(line)
        elif deep and len(body) - len(line) > deep:
            frames.append(line)
            continue
        if in_call := _IN_CALL.match(line):
            waiting += _ranks_of((in_call[1] or in_call[2]).strip(" ,、"))
        if side := _SIDE.match(line):
            sides.append((side["call"], tuple(_ranks_of(side["ranks"].strip(" ,、")))))
        begun = next((rest for head in (_DO, _NEXT) if (rest := _begins(line, head)) is not None), None)
        if begun is not None:
            advice.append(begun)
        elif open_ and not _OPERATION.match(line):
            advice[-1] = beside(f"{advice[-1]} ", line)
        open_ = bool(advice) and not _OPERATION.match(line)
    return {
        "advice": tuple(advice),
        "frames": tuple(frames[-12:]),
        "waiting": tuple(waiting),
        "sides": tuple(sides),
    }
