"""The tables of docs/environment.md: ``python -m ncclguard.environment.catalogue_docs docs/environment.md``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ncclguard.environment.catalogue import (
    DEEPSPEED_VARIABLES,
    NCCL_VARIABLES,
    TORCH_VARIABLES,
    UNREAD_VARIABLES,
    Variable,
)
from ncclguard.environment.nccl_names import NCCL_NAMES, NEWEST_READ
from ncclguard.environment.versions import BUNDLED_NCCL

#: What is written by hand ends with this line; what follows it is made from the catalogue.
MARK = "<!-- Below: `python -m ncclguard.environment.catalogue_docs docs/environment.md`; a test compares. -->"

_HINT = """
## The catalogue

Versions are those of the reader, both inclusive. "torch with NCCL" means that ProcessGroupNCCL reads the variable. The
CUDA wheels of torch bring: """


def _versions(variable: Variable) -> str:
    since = variable.since or ""
    if variable.until:
        return f"{since} to {variable.until}".strip()
    return f"{since} on" if since else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(variable: Variable) -> str:
    unit = f" {variable.unit}" if variable.unit and variable.default else ""
    default = f"{variable.default}{unit}"
    sentence = variable.sentence
    if variable.replaced_by:
        sentence += f" Deprecated since {variable.deprecated_since}; use `{variable.replaced_by}`."
    cells = (f"`{variable.name}`", _versions(variable), variable.reader.value, default, variable.allowed)
    return "| " + " | ".join(_cell(cell) for cell in (*cells, variable.read_at, sentence, variable.source)) + " |"


def _table(title: str, variables: Sequence[Variable]) -> list[str]:
    return [
        "",
        f"### {title}",
        "",
        "| name | versions | reader | default | values | read at | meaning | source |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(variable) for variable in variables),
    ]


def with_tables(page: str) -> str:
    """The page with its tables made anew: what stands above `MARK` is kept.

    Raises ValueError for a text without the mark.
    """
    bundled = ", ".join(f"{torch}: NCCL {nccl}" for torch, nccl in BUNDLED_NCCL.items())
    head = page[: page.index(MARK)] + MARK
    lines = [f"{head}\n{_HINT}{bundled}."]
    lines += [
        "",
        "### Names that nothing reads",
        "",
        "| name | what is known | use instead | source |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{entry.name}` | {entry.sentence} | {_cell(entry.instead or '')} | {entry.source} |"
        for entry in UNREAD_VARIABLES
    ]
    lines += _table("torch and gloo", TORCH_VARIABLES)
    lines += _table("NCCL", NCCL_VARIABLES)
    lines += _table("DeepSpeed", DEEPSPEED_VARIABLES)
    described = {variable.name for variable in NCCL_VARIABLES}
    lines += [
        "",
        "### All other NCCL variables",
        "",
        f"Found in the source of NCCL 2.3.5 to {NEWEST_READ}: name, first version, and last one where it is gone.",
        "",
    ]
    lines += [
        f"- `{name}` {since}{f' to {until}' if until else ''}"
        for name, (since, until) in NCCL_NAMES.items()
        if name not in described
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_tables(file.read_text()))
