"""The pages and the code say the same, and the examples in docstrings run."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import ncclguard
from ncclguard import errors
from ncclguard.config import PREFIX, GuardConfig, allowed_values
from ncclguard.outcome import Cause

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    """A program of scripts/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


website = script("website")
PAGES = [
    *(ROOT / name for name in ("README.md", "README.zh-CN.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
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


@pytest.mark.parametrize("page", ["causes.md", "causes.zh.md"])
def test_the_page_of_causes_has_every_cause_and_what_to_do(page: str) -> None:
    causes = [cause.value for cause in Cause]
    assert list(rows(ROOT / "docs" / page)) == causes
    assert re.findall(r"^## (\w+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE) == causes


def test_the_page_of_names_has_every_public_name() -> None:
    text = (ROOT / "docs" / "names.md").read_text() + (ROOT / "docs" / "errors.md").read_text()
    assert [name for name in ncclguard.__all__ if name != "__version__" and f"`{name}" not in text] == []


def anchors(page: Path) -> set[str]:
    """The names under which the headings of a page can be linked to where the repository is browsed."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_links_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for name in set(re.findall(r"\bng\.(\w+)", text)):
        assert hasattr(ncclguard, name), name
    for target, anchor in set(re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)", text)):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


def test_chinese_pages_say_what_the_english_ones_say_now() -> None:
    """A changed English page makes its Chinese one lag: bring it up to date, and then renew what it notes of the English text."""
    pages = website.lagging()
    assert not pages, (
        f"these Chinese pages lag behind their English ones: {', '.join(pages)}. Bring them up to date, then run: "
        f"python scripts/website.py renew {' '.join(pages)}"
    )


def test_an_english_page_is_not_marked_as_a_translation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "tour.md"
    page.write_text("A page.\n")
    assert website.main(["renew", str(page)]) == 2
    assert page.read_text() == "A page.\n"
    assert "no Chinese page" in capsys.readouterr().err


@pytest.mark.parametrize("page", website.chinese_pages(), ids=lambda page: page.name)
def test_a_chinese_page_has_the_commands_and_code_of_the_english_one(page: Path) -> None:
    assert code(page) == code(website.english_of(page))


def code(page: Path) -> list[list[str]]:
    """The blocks of a page without comments, which are translated in places, and without what is printed in Chinese."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [
        [re.sub(r"(^|\s+)#.*", "", line) for line in block.splitlines() if line.split("#")[0].strip() != IN_CHINESE]
        for kind, block in blocks
        if kind not in ("", "text")
    ]


#: What a Chinese page sets before its commands.
IN_CHINESE = "export NCCLGUARD_LANGUAGE=zh"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "how-to").glob("*.md")), ids=lambda page: page.name)
def test_python_on_a_page_of_how_to_compiles(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        ast.parse(block)


@pytest.mark.processes
@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
