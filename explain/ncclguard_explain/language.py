"""The language in which people are told what happened: English, or Simplified Chinese with `NCCLGUARD_LANGUAGE=zh`.

The source says everything in English. `tr` makes a `Message`: an English text that remembers its template and what was
put in, so that data, JSON and rules see English, and `said` can say it in the reader's language where it is shown.
What comes from another process, such as an incident's summary, has lost its template: `read` finds it again.

`locale/zh.po` holds the translations, by template; tests/unit/test_language.py compares it with the source.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("ncclguard")

VARIABLE: Final = "NCCLGUARD_LANGUAGE"
ENGLISH: Final = "en"
LANGUAGES: Final = (ENGLISH, "zh")
CATALOGUES: Final = Path(__file__).parent / "locale"

_NOTHING: Mapping[str, object] = {}
_chosen: str | None = None


# ------------------------------------------------------------------------------------------------------ which language


def parsed(value: str) -> str:
    """The language that a value of `NCCLGUARD_LANGUAGE` stands for: "zh" also for zh_CN, zh-CN and zh_CN.UTF-8.

    Raises ValueError for a language that there is no catalogue of.

    >>> parsed("zh_CN"), parsed("EN"), parsed("")
    ('zh', 'en', 'en')
    """
    name = value.strip().lower().partition(".")[0].replace("_", "-")
    if name in ("", "c", "en", "en-us", "en-gb"):
        return ENGLISH
    if name in ("zh", "zh-cn", "zh-hans", "zh-hans-cn", "zh-sg", "cn"):
        return "zh"
    raise ValueError(f"{value!r} is no language of ncclguard: set {' or '.join(LANGUAGES)}; zh_CN and zh-CN are zh too")


def choose(language: str | None) -> None:
    """Set the language of this process; None: what `NCCLGUARD_LANGUAGE` says."""
    global _chosen
    _chosen = language


def current() -> str:
    """The language of this process: the one that was chosen, else that of the variable; no other variable counts."""
    return _spoken.get() or _chosen or of_variable(os.environ.get(VARIABLE, ""))


_spoken: ContextVar[str | None] = ContextVar("spoken", default=None)


@contextlib.contextmanager
def speaking_to(stream: TextIO) -> Iterator[None]:
    """Inside, English is spoken where the encoding of a stream has no characters for the language of this process."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    english = False
    with contextlib.suppress(LookupError):
        try:
            tr("waiting").said(current()).encode(encoding)
        except UnicodeError:
            english = True
    token = _spoken.set(ENGLISH if english else None)
    try:
        yield
    finally:
        _spoken.reset(token)


@functools.cache
def of_variable(value: str) -> str:
    """Return the language that the variable asks for; an unknown one is warned of, once, and English is used."""
    try:
        return parsed(value)
    except ValueError as error:
        log.warning("the environment variable %s has no effect: %s", VARIABLE, error)
        return ENGLISH


# ------------------------------------------------------------------------------------------------------------ messages


class Message(str):
    """An English text with the template and the values it was made of."""

    __slots__ = ("context", "template", "values")

    template: str
    values: Mapping[str, object]
    context: str

    def __new__(cls, text: str, template: str = "", values: Mapping[str, object] = _NOTHING, context: str = "") -> Self:
        made = super().__new__(cls, text)
        made.template, made.values, made.context = template or text, values, context
        return made

    def __copy__(self) -> Message:
        return self

    def __deepcopy__(self, memo: object) -> Message:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # in another process it is a text as any other

    def capitalised(self) -> Message:
        """Return the text as the beginning of an English sentence."""
        return Message(f"{self[:1].upper()}{self[1:]}", self.template, self.values, self.context)

    def said(self, language: str) -> str:
        """The text in a language; in English where its catalogue lacks the template."""
        template = _catalogue(language).get((self.context, self.template))
        if template is None:
            return str(self)
        return _filled(template, {name: said(value, language) for name, value in self.values.items()})


class _List(Message):
    """Texts with a separator between them, which has its own translation."""

    __slots__ = ("parts",)

    parts: Sequence[str]

    def said(self, language: str) -> str:
        between = _catalogue(language).get(("", self.template), self.template)
        return functools.reduce(beside, _between(between, (str(said(part, language)) for part in self.parts)), "")

    def capitalised(self) -> Message:
        first, *rest = self.parts or ("",)
        first = first.capitalised() if isinstance(first, Message) else f"{first[:1].upper()}{first[1:]}"
        return joined(self.template, (first, *rest))


class _Received(Message):
    """A text of another process."""

    __slots__ = ()

    def said(self, language: str) -> str:
        return read(str(self), language)


def tr(template: str, /, context: str = "", **values: object) -> Message:
    """An English text out of a template, which `str.format` fills; `context` tells templates of one wording apart.

    The template stands in the source as a literal, so that it can be found there.

    >>> tr("{ranks} raised {text}", ranks="rank 3", text="ValueError")
    'rank 3 raised ValueError'
    """
    # Of anything else its text: a message is kept for longer than, say, an exception with all that its frames hold.
    kept = {name: value if isinstance(value, (str, int, float)) else str(value) for name, value in values.items()}
    return Message(template.format(**kept) if kept else template, template, kept, context)


def received(text: str) -> Message:
    """A text that another process has made, which is said as far as `read` knows it; a message of this one as it is."""
    return text if isinstance(text, Message) else _Received(text)


def joined(separator: str, parts: Iterable[str]) -> Message:
    """Texts as one, as `str.join` makes it; the separator is a template of its own."""
    kept = tuple(parts)
    made = _List(separator.join(kept), separator)
    made.parts = kept
    return made


def packed(text: str) -> object:
    """A text as JSON for another process, which can say it in its own language; see `unpacked`."""
    if isinstance(text, _List):
        return [text.template, *map(packed, text.parts)]
    if isinstance(text, Message) and not isinstance(text, _Received):
        values = {name: packed(value) if isinstance(value, str) else value for name, value in text.values.items()}
        return {"template": text.template, "context": text.context, "values": values}
    return str(text)


def unpacked(data: Any) -> Any:
    """The text that `packed` has sent; anything else as it is.

    >>> unpacked(packed(joined("; ", (tr("rank {rank}", rank=3), "late"))))
    'rank 3; late'
    """
    if isinstance(data, list):
        return joined(data[0], map(unpacked, data[1:]))
    if isinstance(data, dict):
        values = {name: unpacked(value) for name, value in data["values"].items()}
        return tr(data["template"], data["context"], **values)
    return data


def said(value: object, language: str | None = None) -> object:
    """A message in the language of this process, or in another; anything else as it is."""
    return value.said(language or current()) if isinstance(value, Message) else value


def told(template: str, /, context: str = "", **values: object) -> str:
    """Return what `tr` makes, in the language of this process: for what is shown at once."""
    return tr(template, context, **values).said(current())


def say(text: str) -> str:
    """A text in the language of this process: a message by its template, any other text as far as `read` knows it."""
    return text.said(current()) if isinstance(text, Message) else read(text)


# --------------------------------------------------------------------------------------------------------- catalogues


class Entry(NamedTuple):
    """One template of a .po file; `sent`: processes send each other texts that are made of it."""

    context: str
    template: str
    translation: str
    sent: bool


@functools.cache
def _entries(language: str) -> tuple[Entry, ...]:
    if language == ENGLISH:
        return ()
    return tuple(entries_of((CATALOGUES / f"{language}.po").read_text(encoding="utf-8")))


@functools.cache
def _catalogue(language: str) -> Mapping[tuple[str, str], str]:
    """Translations by context and template; nothing for English."""
    return {(one.context, one.template): one.translation for one in _entries(language) if one.translation}


#: A string of a .po file. Its escapes are JSON's, whose reader, unlike Python's own, may run in two threads at once: in
#: Python 3.11 `ast.parse` raises SystemError where the other thread runs in a callback of the garbage collector.
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')


def entries_of(text: str) -> Iterator[Entry]:
    """The entries of a .po file, without its header.

    >>> list(entries_of('#, sent\\nmsgid "rank {rank}"\\nmsgstr "" "rank {rank}"\\n'))
    [Entry(context='', template='rank {rank}', translation='rank {rank}', sent=True)]
    """
    for block in re.split(r"\n\s*\n", text):
        fields = {"msgctxt": "", "msgid": "", "msgstr": ""}
        field, sent = "", False
        for line in map(str.strip, block.splitlines()):
            sent = sent or (line.startswith("#,") and "sent" in line)
            if line.startswith("#"):
                continue
            word, _, rest = line.partition(" ")
            field, line = (word, rest) if word in fields else (field, line)
            fields[field] += "".join(map(json.loads, _STRING.findall(line)))
        if fields["msgid"]:
            yield Entry(fields["msgctxt"], fields["msgid"], fields["msgstr"], sent)


#: Characters that no space separates from each other; one stands between them and Latin letters or figures.
_WIDE: Final = re.compile(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef\u201c\u201d]")
_STOPS: Final = frozenset("，。；：、！？（）「」")


#: Slots of ranks and hosts with commas between them, for which Chinese has a mark of its own.
_ENUMERATED: Final = frozenset(["choices", "numbers", "some"])


def _filled(template: str, values: Mapping[str, object]) -> str:
    """Fill the slots as `str.format` does, without the spaces around a value with a wide character at its end."""
    text = ""
    for literal, name, form, conversion in Formatter().parse(template):
        text = beside(text, literal)
        if name is not None:
            value = repr(values[name]) if conversion == "r" else values[name]
            filled = format(value, form or "")
            text = beside(text, filled.replace(", ", "、") if name in _ENUMERATED else filled)
    return text


def _between(separator: str, parts: Iterable[str]) -> Iterator[str]:
    """The parts with a separator between each two."""
    for number, part in enumerate(parts):
        if number:
            yield separator
        yield part


def beside(left: str, right: str) -> str:
    """Return both as one text, without the space between them where both are Chinese there, or one such a stop."""
    if left.endswith(" ") and _closed_up(left[-2:-1], right[:1]):
        return left[:-1] + right
    if right.startswith(" ") and _closed_up(left[-1:], right[1:2]):
        return left + right[1:]
    return left + right


def _closed_up(before: str, after: str) -> bool:
    stops = bool(before and after) and (before in _STOPS or after in _STOPS)
    return stops or bool(_WIDE.match(before) and _WIDE.match(after))


#: What a line does not begin with, and not end with.
_NOT_FIRST: Final = "，。：；、）」』！？”"
_NOT_LAST: Final = "（「『“"
_PIECES: Final = re.compile(r"\s+|[^\s\u2e80-\u9fff\uff00-\uffef]+|.", re.DOTALL)


def folded(line: str, width: int) -> str:
    """A line cut for so many columns, also between wide characters; rich cuts only at spaces, which Chinese has few of.

    A line that has no wide characters is left to rich.

    >>> folded("看它的调用栈。", 10)
    '看它的调用\\n栈。'
    """
    from rich.cells import cell_len

    if cell_len(line) <= width or cell_len(line) == len(line):
        return line
    rows: list[str] = []
    row: list[str] = []
    for piece in _PIECES.findall(line):
        if cell_len("".join(row)) + cell_len(piece) > width and "".join(row).strip():
            carried: list[str] = []
            while len(row) > 1 and (carried or [piece])[0] in _NOT_FIRST:
                carried.insert(0, row.pop())
            while len(row) > 1 and row[-1] in _NOT_LAST:
                carried.insert(0, row.pop())
            rows.append("".join(row).rstrip())
            row = carried
        if row or not rows or not piece.isspace():
            row.append(piece)
    return "\n".join([*rows, "".join(row)])


# --------------------------------------------------------------------------------- texts that have lost their template

#: Slots of templates by what they hold. What others have written stays as it is, unless it is a message as a whole;
#: names have no spaces, numbers are figures; of texts a part may stay as it is. All of any other slot must be known.
_FOREIGN: Final = frozenset(["choices", "error", "exception", "given", "kind", "marker", "operation", "place", "said"])
_NAMES: Final = frozenset(["address", "host", "letter", "name", "signal", "some"])
_NUMBERS: Final = frozenset(
    ["age", "budget", "code", "count", "generation", "limit", "minutes", "missing", "number", "numbers", "peer", "pid"]
    + ["port", "rank", "seconds", "step", "stuck_timeout", "waited"]
)
_WHO: Final = frozenset(["hosts", "one", "other", "others", "part", "ranks"])
_TEXTS: Final = frozenset(["advice", "because", "details", "failed", "text", "why"])
_DEPTH: Final = 6
_Reading = tuple[str, int]  # a text, and how many of its letters stay as they are


def read(text: str, language: str | None = None) -> str:
    """An English text of this library's in the language of this process, or in another; unknown parts as they are.

    For what another process has made and sent as plain text. Of several readings the one counts that leaves the fewest
    letters as they are.
    """
    language = language or current()
    return text if language == ENGLISH else _read(text, language, _DEPTH)[0]


@functools.lru_cache(maxsize=4096)
def _read(text: str, language: str, depth: int) -> _Reading:
    """The best reading."""
    catalogue = _catalogue(language)
    exact = catalogue.get(("", text)) or catalogue.get(("cause", text))
    if exact is not None and "{" not in text:
        return exact, 0
    best = text, sum(map(str.isalpha, text))
    if depth == 0 or best[1] == 0:
        return best
    for literals, names, template in _patterns(language):
        values = _slots(text, literals) if best[1] else None
        if values is not None:
            slots = [_slot(name, value, language, depth - 1) for name, value in zip(names, values)]
            unread = sum(slot[1] for slot in slots)
            if unread < best[1]:
                best = _filled(template, {name: slot[0] for name, slot in zip(names, slots)}), unread
    if best[1]:
        best = min([best, *_lists(text, language, depth)], key=lambda reading: reading[1])
    return best


#: More letters than any text has: a template does not fit.
_NOT: Final = 1 << 30


def _slot(name: str, value: str, language: str, depth: int) -> _Reading:
    """Read what stands in a slot, or tell that it cannot be this slot."""
    if name in _NUMBERS:
        return value, 0 if re.fullmatch(r"[-+.,e\d ]+", value) else _NOT
    if name == "time":
        return value, 0 if re.fullmatch(r"[-+.,e\d]+ s", value) else _NOT
    if name in _NAMES:
        return value, _NOT if " " in value.replace(", ", "") else 0
    catalogue = _catalogue(language)
    if (name, value) in catalogue or name == "cause":
        return catalogue.get((name, value), value), 0 if (name, value) in catalogue else _NOT
    if name == "operation":
        return _operation(value, language, depth)
    if name in _FOREIGN:
        whole = catalogue.get(("", value)) if "{" not in value else None
        return whole or value, 0
    reading = _read(value, language, depth)
    if name in _TEXTS:
        return reading
    known = reading[1] == 0 and any(map(str.isalpha, value)) and "; " not in value
    if name in _WHO:
        known = known and ": " not in value and (name != "hosts" or "rank" not in value)
        known = known and (name != "part" or "host" not in value)
    return reading if known else (value, _NOT)


def _operation(value: str, language: str, depth: int) -> _Reading:
    """Read a call, `all_reduce(float32[3], SUM)`, maybe with its group; of words before one, each letter counts.

    So "it waits in barrier() of group 0 (ranks 0-1)" is no call that begins with "it waits in".
    """
    if "; " in re.sub(r"\([^()]*\)", "", value):
        return value, _NOT
    exact = _catalogue(language).get(("", value)) if "{" not in value else None
    *before, _ = value.partition("(")[0].split(" ")
    if exact is not None or before:
        return exact or value, 0 if exact is not None else sum(map(str.isalpha, "".join(before)))
    whole = _read(value, language, depth)
    return whole if whole[1] == 0 else (value, 0)


def _lists(text: str, language: str, depth: int) -> Iterator[_Reading]:
    """The text as a list, cut at each place where it may be one.

    Of parts with a semicolon between them any may be known; before a colon stands something known; with commas all are.
    """
    for separator in ("; ", ": ", ", and ", ", ", " and "):
        between = _catalogue(language).get(("", separator), separator)
        at = text.find(separator)
        while at > 0:
            first, rest = text[:at], text[at + len(separator) :]
            left = _read(first, language, depth - 1)
            if separator == "; " or left[1] == 0:
                right = _read(rest, language, depth - 1)
                if separator in ("; ", ": ") or right[1] == 0:
                    yield beside(beside(left[0], between), right[0]), left[1] + right[1]
            at = text.find(separator, at + 1)


@functools.cache
def _patterns(language: str) -> list[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """Templates as the literals around their slots, the names of the slots, and the translation without formats.

    Those with the most literal text come first, because the first of equal readings counts.
    """
    found = []
    for one in _entries(language):
        literals, names = [""], []
        for literal, name, _, _ in Formatter().parse(one.template):
            literals[-1] += literal
            if name is not None:
                names.append(name)
                literals.append("")
        if one.sent and names and one.translation:
            plain = "".join(
                literal.replace("{", "{{").replace("}", "}}") + (f"{{{name}}}" if name is not None else "")
                for literal, name, _, _ in Formatter().parse(one.translation)
            )
            found.append((tuple(literals), tuple(names), plain))
    return sorted(found, key=lambda entry: -len("".join(entry[0])))


def _slots(text: str, literals: Sequence[str]) -> list[str] | None:
    """Return what stands between the literals, each found as early as it can be; None where they are not all there."""
    first, *between, last = literals
    if not text.startswith(first) or not text.endswith(last) or len(text) <= len(first) + len(last):
        return None
    end, at, found = len(text) - len(last), len(first), []
    for literal in between:
        place = text.find(literal, at + 1, end)
        if place < 0:
            return None
        found.append(text[at:place])
        at = place + len(literal)
    found.append(text[at:end])
    return found if all(found) else None
