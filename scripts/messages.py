"""Bring the catalogues of messages up to date with the source: `python scripts/messages.py`.

A template that `tr`, `told` or `joined` has in the source, or in a page's template, or a text of a command's `--help`,
and that the catalogues lack, comes in with an empty translation; one that is in the source no longer goes out. Those
that are still to be translated are printed, and the exit code is 1 while there are any. Entries stand in the order of
the source.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ncclguard_explain.language import CATALOGUES, LANGUAGES, entries_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "explain" / "ncclguard_explain", ROOT / "integrations", ROOT / "ncclguard")
FUNCTIONS = frozenset({"joined", "told", "tr"})
#: What is made where it is shown; the texts of all other files may come from another process, and are marked "sent".
SHOWN = (
    "ncclguard/checksum.py", "ncclguard/config.py", "ncclguard/groups.py", "ncclguard/replicas/",
    "ncclguard/environment/catalogue.py", "ncclguard/environment/doctor/", "ncclguard/environment/env_command.py", "ncclguard/environment/limits.py",
    "ncclguard/environment/network.py", "ncclguard/environment/setup.py", "ncclguard/errors.py", "explain/", "ncclguard/faults/drill",
    "ncclguard/hang/", "integrations/", "ncclguard/incident/page.py", "ncclguard/incident/templates/", "ncclguard/metrics/control.py",
    "ncclguard/metrics/top_command.py", "ncclguard/process_group/work_queue.py",
)  # fmt: skip
#: What the core's messages are made of: sent with them.
ALSO_SENT = (
    "explain/ncclguard_explain/cause.py", "explain/ncclguard_explain/command_line.py", "explain/ncclguard_explain/ranks.py",
)  # fmt: skip
#: Contexts of what is said where it stands in the source: a line of `--help`, and one of a log.
NEVER_SENT = frozenset({"help", "log"})
#: Where the texts of `--help` stand, which `command_line.in_help` says: arguments of a call, and tables of `described`.
HELP, HELP_TABLES = frozenset({"description", "help"}), re.compile(r"_?examples|exit_codes", re.IGNORECASE)
#: A call in a page's template: its text, and its context where it has one.
_CALL = re.compile(r'\b(?:tr|told)\("((?:[^"\\]|\\.)*)"(?:, "([a-z]+)")?')
HEADER = """\
# The texts of ncclguard in another language. scripts/messages.py adds what is missing and takes out what has gone.
msgid ""
msgstr ""
"Language: {language}\\n"
"Content-Type: text/plain; charset=UTF-8\\n"
"""
Key = tuple[str, str]  # context, template


def templates() -> dict[Key, str]:
    """Every template of the source with the first file that has it, in order.

    Raises ValueError for one that is no literal: it cannot be found by reading.
    """
    found: dict[Key, str] = {}
    for file in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        if file.name != "language.py":
            for key in _of_module(file):
                found.setdefault(key, str(file.relative_to(ROOT)))
    for file in sorted(path for package in PACKAGES for path in package.rglob("*.j2")):
        for text, context in _CALL.findall(file.read_text(encoding="utf-8")):
            found.setdefault((context, ast.literal_eval(f'"{text}"')), str(file.relative_to(ROOT)))
    return found


def _of_module(file: Path) -> Iterator[Key]:
    nodes = [
        node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, (ast.Call, ast.stmt))
    ]
    for call in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        yield from (("help", text) for text in _of_help(call))
        if not isinstance(call, ast.Call):
            continue
        if isinstance(call.func, ast.Name) and call.func.id in FUNCTIONS and call.args:
            literals = [one.value if isinstance(one, ast.Constant) else None for one in call.args]
            if not isinstance(literals[0], str):
                raise ValueError(
                    f"{file.relative_to(ROOT)}:{call.lineno}: the template of {call.func.id} is no literal"
                )
            context = literals[1] if len(literals) > 1 and call.func.id != "joined" else ""
            yield str(context), literals[0]


def _of_help(node: ast.AST) -> Iterator[str]:
    """The texts of `--help` that a call or an assignment has as literals."""
    texts: list[ast.expr | None] = []
    if isinstance(node, ast.Call):
        texts += [given.value for given in node.keywords if given.arg in HELP]
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Name) and HELP_TABLES.fullmatch(target.id):
            texts += node.value.values
    for text in texts:
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield text.value


def catalogue_of(language: str) -> dict[Key, str]:
    """The translations of a language, as its file has them."""
    file = CATALOGUES / f"{language}.po"
    entries = entries_of(file.read_text(encoding="utf-8")) if file.exists() else ()
    return {(one.context, one.template): one.translation for one in entries}


def written(language: str, translations: dict[Key, str]) -> str:
    """The file of a language, with all templates of the source."""
    parts = [HEADER.replace("{language}", language)]
    for (context, template), file in templates().items():
        flags = ["python-brace-format"] if "{" in template else []
        flags += ["sent"] if context not in NEVER_SENT and (file in ALSO_SENT or not file.startswith(SHOWN)) else []
        head = f"#. {file}\n" + (f"#, {', '.join(flags)}\n" if flags else "")
        head += f"msgctxt {_quoted(context)}\n" if context else ""
        translation = translations.get((context, template), "")
        parts.append(f"{head}msgid {_quoted(template)}\nmsgstr {_quoted(translation)}\n")
    return "\n".join(parts)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def main() -> int:
    """Write all catalogues; returns 1 where translations are missing."""
    missing = 0
    for language in LANGUAGES[1:]:
        translations = catalogue_of(language)
        (CATALOGUES / f"{language}.po").write_text(written(language, translations), encoding="utf-8")
        lacking = [template for (context, template) in templates() if not translations.get((context, template))]
        missing += len(lacking)
        for template in lacking:
            print(f"{language}: {template!r} is not translated yet: see explain/ncclguard_explain/locale/{language}.po")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
