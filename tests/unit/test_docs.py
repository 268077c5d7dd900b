"""The pages and the code say the same, and the examples in docstrings run."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

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
    """The rows of the tables at the page's top, above its sections, by their first cell, without its quotes."""
    found = {}
    for line in page.read_text().split("\n## ")[0].splitlines():
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


def test_the_figures_of_the_readme_are_those_of_the_pages() -> None:
    """Its three points: the measured faults, the training that goes on, and the cost."""
    peers = (ROOT / "docs" / "peers.md").read_text()
    table = [
        re.split(r"  +", line.strip()) for line in peers.splitlines() if re.match(r"  (plain torch|ncclguard)  ", line)
    ]
    plain, guarded = ([row for row in table if row[0] == way and len(row) == 8] for way in ("plain torch", "ncclguard"))
    assert [row[3] for row in plain] == ["nobody"] * 8 and len([row for row in plain if "torn" in row[5]]) == 7
    assert len(guarded) == 8 and not [row for row in guarded if "torn" in row[5]]
    assert [row[2] for row in guarded[:2]] == ["4.3 s", "0.1 s"]  # late, with a limit of 4 s; killed
    assert "| rank 2, in forward | ncclguard, `--spares 1` | 0.4 s | 0 |" in peers
    assert "`--max-restarts 3`, checkpoints | 6.3 s | 6 |" in peers
    bench = (ROOT / "docs" / "bench.md").read_text()
    ratios = [
        float(cell)
        for row in re.findall(r"^\| \d ranks \|(.*)$", bench, re.MULTILINE)
        for cell in re.findall(r"\d\.\d+", row)
    ]
    assert (min(ratios), max(ratios)) == (0.07, 0.93)
    assert "was 0.19 % of a step on a nearly idle machine" in (ROOT / "docs" / "watch.md").read_text()
    for page in ("README.md", "README.zh-CN.md"):
        text = (ROOT / page).read_text()
        assert all(figure in text for figure in ("0.1", "0.3", "0.4", "6.3", "0.19 %", "0.07", "0.93")), page


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_has_its_point_on_one_screen(page: str) -> None:
    """What it is, three points, that no real GPU was used, the cost and the panel, before the first heading; 45 lines."""
    first = (ROOT / page).read_text().split("\n## ")[0]
    assert first.count("\n- **") == 3 and "status.md" in first and "bench.md" in first and "╭─" in first
    assert len(first.splitlines()) < 45


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_on_a_page_shows_no_backslash_that_only_a_table_needs(page: Path) -> None:
    assert not re.findall(r"`[^`\n]*\\\|[^`\n]*`", page.read_text())


def named(page: str, below: str = "") -> tuple[str, str | None]:
    """What the site makes of a page's text, and the name that it gives it."""
    file = SimpleNamespace(src_uri=page, dest_uri=below + page.replace(".md", "/index.html"))
    shown = SimpleNamespace(file=file, meta={})
    titles = {"install.md": "安装"}
    text = website.on_page_markdown("# Title", page=shown, config={"extra": {"chinese_titles": titles}})
    return text, shown.meta.get("title")


def test_a_page_of_the_chinese_site_without_a_translation_says_so_and_has_a_chinese_name() -> None:
    assert named("install.md") == ("# Title", None)
    assert named("tour.zh.md", "zh/") == ("# Title", None)
    text, title = named("install.md", "zh/")
    assert title == "安装"
    assert website.ONLY_ENGLISH in text.splitlines()[0] and text.endswith("\n\n# Title")


def test_every_page_of_the_site_without_a_translation_has_a_chinese_name() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", text, re.MULTILINE)
    titles = re.findall(r"^    (\S+\.md): .*[A-Za-z\u4e00-\u9fff]", text, re.MULTILINE)
    translated = {english.relative_to(ROOT / "docs").as_posix() for english in map(website.english_of, DOCS_IN_CHINESE)}
    assert len(listed) > 40
    assert sorted(titles) == sorted(set(listed) - translated - {"index.md"})


DOCS_IN_CHINESE = [page for page in website.chinese_pages() if page.parent != ROOT]


def test_a_chinese_panel_of_the_site_has_no_border_that_could_be_ragged() -> None:
    """Browsers draw a Chinese character as wide as two letters only with fonts that few have."""
    page = website.for_site(ROOT / "README.zh-CN.md")
    panel = next(block for block in re.findall(r"```\n(.*?)```", page, re.DOTALL) if block.startswith("╭"))
    lines = panel.splitlines()
    assert len(lines) > 10 and not [line for line in lines if line.endswith(("│", "╮", "╯"))]
    assert website.for_site(ROOT / "README.md").count("│\n") > 10  # letters of one width: as the terminal shows it


def test_pictures_of_a_page_are_found_in_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(website, "ROOT", tmp_path)
    page = tmp_path / "README.zh-CN.md"
    page.write_text("![a](docs/assets/a.zh.svg) [![b](docs/assets/b.png)](docs/tour.zh.md)")
    assert website.for_site(page) == "![a](assets/a.svg) [![b](assets/b.png)](tour.md)"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://github.com/name/ncclguard.git", "https://github.com/name/ncclguard"),
        ("https://name:password@example.org/group/ncclguard", "https://example.org/group/ncclguard"),
        ("git@example.org:group/ncclguard.git", "https://example.org/group/ncclguard"),
        ("ssh://git@example.org:2222/group/ncclguard.git", "https://example.org/group/ncclguard"),
        ("/srv/git/ncclguard.git", None),
        ("file:///srv/git/ncclguard.git", None),
        (None, None),
    ],
)
def test_the_site_links_to_where_the_clone_came_from(origin: str | None, address: str | None, tmp_path: Path) -> None:
    """And to nowhere if that is a folder; a password in it is not published."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    if origin is not None:
        subprocess.run(["git", "-C", str(tmp_path), "config", "remote.origin.url", origin], check=True)
    assert website.repository(tmp_path) == address


def test_signatures_of_the_site_are_written_a_parameter_a_line() -> None:
    """mkdocstrings does so where a formatter is installed, and clips each signature into one line otherwise."""
    extra = re.search(r"^docs = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert extra and '"ruff' in extra[1]


PICTURES = sorted(path for path in (ROOT / "docs" / "assets").iterdir() if path.suffix in (".png", ".svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_small_shown_and_takes_nothing_from_elsewhere(picture: Path) -> None:
    assert picture.stat().st_size < 200_000
    assert any(f"assets/{picture.name})" in page.read_text() for page in PAGES)
    assert picture.suffix == ".png" or set(re.findall(r"https?://[^\"]+", picture.read_text())) == {
        "http://www.w3.org/2000/svg"
    }


@pytest.mark.processes
@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
