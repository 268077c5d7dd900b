"""Docstrings name only what exists, and their first lines are whole sentences that begin with a verb or the thing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ncclguard", "integrations", "explain/ncclguard_explain", "ncclguard_observe")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))

#: Names of torch, gloo, NCCL, Megatron and Python that docstrings mention and the code does not use.
FOREIGN = {
    "_create_process_group_wrapper", "Accelerator", "P2POp", "add_callback", "await", "DEFINE_NCCL_PARAM", "except", "finally",
    "NCCL_PARAM", "ncclGetEnv", "rasClientEventLoop", "reduce_independent_p_g_buckets_and_remove_grads", "setBackend",
    "sockaddr_storage", "unregisterDescriptor", "unscale_", "waitRecv",
}  # fmt: skip
#: Files of torch, DeepSpeed, vLLM, Ray and verl, and of a user, that docstrings mention.
FOREIGN_FILES = re.compile(
    r"(^|/)(torch|python|single_controller)/"
    r"|^(distributed_c10d|stage_1_and_2|system_utils|multiproc_executor|scheduler)\.py$|(^|/)(train|file)\.py$"
)

#: First words of a summary that make it half a sentence.
HALF = re.compile(
    r"^(What|Who|Whom|Whose|Which|Whether|Where|When|Those|Of|The same|How|In which|That|As|Everybody|Nothing|None|Also|Not)\b"
)
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


def docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """The docstrings of a file, each with its place."""
    for node in nodes(file):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


@cache
def identifiers() -> set[str]:
    """Every name that the code has: of modules, functions, parameters and attributes, and words of its texts."""
    found: set[str] = set()
    for file in FILES:
        found |= set(file.relative_to(ROOT).with_suffix("").parts)
        documents = {
            id(node.body[0].value) for node in nodes(file) if isinstance(node, DOCUMENTED) and is_text(node.body)
        }
        for node in nodes(file):
            if isinstance(node, ast.Constant):
                if isinstance(node.value, str) and id(node) not in documents:
                    found.add(node.value)
            else:
                for field in node._fields:
                    if isinstance(value := getattr(node, field), str):
                        found.add(value)
    return FOREIGN.union(*(re.findall(r"\w+", text) for text in found))


def is_text(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)


@cache
def members() -> dict[str, set[str]]:
    """The members of each class, inherited ones too; "*" where a base is not the package's. Equal names count together."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for node in (node for file in FILES for node in nodes(file) if isinstance(node, ast.ClassDef)):
        named = own.setdefault(node.name, set())
        for part in ast.walk(node):
            named |= defined(part)
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                named.add(part.attr)
        bases.setdefault(node.name, set()).update(ast.unparse(base) for base in node.bases)

    def inherited(name: str) -> set[str]:
        return own[name].union(*(inherited(base) if base in own and base != name else {"*"} for base in bases[name]))

    return {name: inherited(name) for name in own}


def defined(node: ast.AST) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def unknown(text: str) -> list[str]:
    """The names in backticks that do not exist: `name`, `name(...)`, `Class.name`."""
    found = []
    for quoted in re.findall(r"``?([^`\n]+)``?", text):
        match = re.fullmatch(r"([A-Za-z_][\w.]*\w)(\(.*)?", quoted)
        if match is None or match[1].endswith(".py"):
            continue
        *owner, name = match[1].split(".")
        known = members().get(owner[-1]) if owner else None
        if name not in identifiers() or (known is not None and not known & {name, "*"}):
            found.append(quoted)
    return found


@pytest.mark.parametrize("text", ["See `no_such_function()`.", "See ``GuardedGroup.no_such_member``."])
def test_a_name_that_does_not_exist_is_found(text: str) -> None:
    assert unknown(text)


def test_names_in_docstrings_exist() -> None:
    wrong = {place: names for file in FILES for place, text in docstrings(file) if (names := unknown(text))}
    assert not wrong


def test_files_in_docstrings_exist() -> None:
    wrong = []
    for file in FILES:
        for place, text in docstrings(file):
            for name in re.findall(r"(?<![\w/.])[\w/]+\.py\b", text):
                folders = (ROOT, ROOT / "ncclguard", file.parent)
                if not FOREIGN_FILES.search(name) and not any((folder / name).exists() for folder in folders):
                    wrong.append((place, name))
    assert not wrong


def test_summaries_begin_with_a_verb_or_the_thing() -> None:
    wrong = [(place, text.splitlines()[0]) for file in FILES for place, text in docstrings(file) if HALF.match(text)]
    assert not wrong


def test_summaries_are_one_line() -> None:
    wrong = [
        place for file in FILES for place, text in docstrings(file) if text.partition("\n")[2][:1] not in ("", "\n")
    ]
    assert not wrong
