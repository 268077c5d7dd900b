"""The pages and the code say the same, and the examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import ncclguard
from ncclguard import errors
from ncclguard.config import PREFIX, GuardConfig, allowed_values
from ncclguard.outcome import Cause

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(ncclguard.__path__, "ncclguard.")
    if not module.name.endswith("__main__")
)


def has_examples(module: str) -> bool:
    """Whether its docstrings have an example that is run."""
    source = inspect.getsource(importlib.import_module(module))
    return any(line.lstrip().startswith(">>> ") and "+SKIP" not in line for line in source.splitlines())


EXAMPLES = [module for module in MODULES if has_examples(module)]


def rows(page: Path) -> dict[str, list[str]]:
    """The rows of the page's tables by their first cell, without its quotes."""
    found = {}
    for line in page.read_text().splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            found[cells[0].strip("`")] = [cell.strip() for cell in cells[1:]]
    return found


def shown(default: object) -> str:
    """A default as the page writes it."""
    if default is None or isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_the_page_of_settings_has_every_field_and_no_other() -> None:
    assert list(rows(ROOT / "docs" / "configuration.md")) == list(GuardConfig.model_fields)


@pytest.mark.parametrize("name", list(GuardConfig.model_fields))
def test_the_page_of_settings_agrees_with_the_model(name: str) -> None:
    field = GuardConfig.model_fields[name]
    assert isinstance(field.json_schema_extra, dict)
    variable, unit, default, allowed, what = rows(ROOT / "docs" / "configuration.md")[name]
    assert variable == f"`{PREFIX}{name.upper()}`"
    assert unit == (field.json_schema_extra["unit"] or "-")
    assert default == shown(field.default)
    assert allowed == allowed_values(name)
    assert what == field.description


def test_the_page_of_errors_has_every_exception_and_no_other() -> None:
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert set(rows(ROOT / "docs" / "errors.md")) == kinds
    tree = "\n".join(line for line in (errors.__doc__ or "").splitlines() if "──" in line)
    assert all(kind in tree for kind in kinds - {"GuardError"})


def test_the_readme_has_every_cause() -> None:
    assert {cause.value for cause in Cause} <= set(rows(ROOT / "README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_links_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for name in set(re.findall(r"\bng\.(\w+)", text)):
        assert hasattr(ncclguard, name), name
    for target in set(re.findall(r"\]\((?!https?:)([^)#]+)", text)):
        assert (page.parent / target).exists(), target


@pytest.mark.processes
@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
