"""The site beside docs/: pages of the repository and pages made from the code, their links, and what lags behind.

mkdocs.yml names this file as a hook. Before a build it writes `.site/docs`: a copy of docs/, the pages of the
repository that are elsewhere (`PAGES`), the reference of commands (from argparse) and of names (for mkdocstrings), with
links as the site needs them. What is in docs/ stays readable, with its links, where the repository is browsed. Below
/zh/ a page that is there in English only says so, and has its Chinese name of mkdocs.yml (`chinese_titles`).

    python scripts/website.py check            every link of the built site leads somewhere in it
    python scripts/website.py renew PAGE ...   after a Chinese page was brought up to its English one
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any
from urllib.parse import unquote, urlsplit


def optional(name: str) -> Any:
    """A module of the packages that build the site, or None: `renew` and the tests need none of them."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def early(function: Callable[..., Any]) -> Any:
    """Have a hook of MkDocs run before the plugins' own."""
    plugins = optional("mkdocs.plugins")
    return plugins.event_priority(100)(function) if plugins else function


griffe = optional("griffe")
Extension: Any = griffe.Extension if griffe else object
ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / ".site" / "docs"
API = ROOT / ".site" / "api"
SITE = ROOT / ".site" / "html"
#: Pages of the repository outside of docs/ and where the site has them.
PAGES = {"README.md": "index.md", "README.zh-CN.md": "index.zh.md"} | {
    path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).as_posix().replace("README.md", "index.md").lower()
    for pattern in ("*.md", "[a-z]*/README.md", "[a-z]*/[a-z]*/README.md")
    for path in sorted(ROOT.glob(pattern))
    if not path.name.startswith("README.")
    or path.relative_to(ROOT).parts[0] not in (path.name, "docs", "explain", "tests")
}
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
MARK = re.compile(r"^<!-- english: (\S+) sha256:([0-9a-f]{64}) -->$", re.MULTILINE)
#: What a page below /zh/ says where there is no translation.
ONLY_ENGLISH = "此页暂无中文版，以下为英文原文。"
#: Public names that are not in `ncclguard` itself.
FURTHER = {
    "Evaluation": ["ncclguard.evaluation.record_partial"],
    "Process groups": ["ncclguard.process_group.redirected"],
    "Reading what a job left": ["ncclguard_explain.explain"],
    "Integrations": [
        "ncclguard.integrations.deepspeed",
        "ncclguard.integrations.transformers",
        "ncclguard.integrations.accelerate",
        "ncclguard.integrations.verl",
        "ncclguard.integrations.verl_manager",
        "ncclguard.integrations.vllm",
        "ncclguard.integrations.vllm_engines",
        "ncclguard.integrations.trl",
        "ncclguard.integrations.openrlhf",
        "ncclguard.integrations.plugins",
        "ncclguard.integrations.slim_outputs",
        "ncclguard.integrations.modes",
        "ncclguard.integrations.qwen2_5_vl",
    ],
}
#: What the names of a module are about, by the module that `ncclguard._public` takes them from.
SUBJECTS = {
    "ncclguard.collectives": "Collectives",
    "ncclguard.outcome": "Outcomes",
    "ncclguard_explain.cause": "Outcomes",
    "ncclguard.incident.model": "Outcomes",
    "ncclguard.phases": "Time limits",
    "ncclguard.deadlines": "Time limits",
    "ncclguard.config": "Settings",
    "ncclguard.evaluation": "Evaluation",
    "ncclguard.watch.watcher": "Observing",
    "ncclguard.metrics.monitoring": "Observing",
    "ncclguard.environment.setup": "Environment",
    "ncclguard.errors": "Errors",
}


@early  # before the plugin that sorts the languages looks at the folder
def on_config(config: Any) -> Any:
    """Write the folder from which MkDocs builds, point it there, and list the pages that the nav does not name."""
    if Path(config["docs_dir"]) != SOURCE:
        assemble()
        config["docs_dir"] = str(SOURCE)
        config["watch"] = [*config["watch"], str(DOCS)]
        config["repo_url"] = repository(ROOT)
        config["repo_name"] = config["repo_url"] and urlsplit(config["repo_url"]).path.strip("/")
        listed = set(pages_of(config["nav"]))
        pages = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.md"))
        further = [page for page in pages if page not in listed and not page.endswith(".zh.md")]
        if further:
            config["nav"] = [*config["nav"], {"Further pages": further}]
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Say on a page below /zh/ that it has no translation, and give it a Chinese name in the sidebar."""
    if not page.file.dest_uri.startswith("zh/") or page.file.src_uri.endswith(".zh.md"):
        return markdown
    page.meta["title"] = config["extra"]["chinese_titles"][page.file.src_uri]
    return f'!!! note "{ONLY_ENGLISH}"\n\n{markdown}'


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Relative links between the languages' first pages, so that the site can lie in any folder."""
    if page.url not in ("", "./", "zh/"):
        return output
    return re.sub(
        r'href="/(zh/)?"', lambda match: f'href="{"../" * (page.url == "zh/")}{match[1] or ""}index.html"', output
    )


def repository(folder: Path) -> str | None:
    """The address at which a clone's origin is browsed, without a user's name or password; None if it has none."""
    command = ["git", "-C", str(folder), "config", "--get", "remote.origin.url"]
    origin = subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
    found = re.fullmatch(r"(?:(?:https?|ssh|git)://)?(?:[^@/]+@)?([\w.-]+\.\w+)(?::\d+/|[:/])(.+?)(?:\.git)?/?", origin)
    return f"https://{found[1]}/{found[2]}" if found else None


def pages_of(nav: Any) -> Iterator[str]:
    """Every page that a nav names."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from pages_of(value)
    elif nav:
        for entry in nav:
            yield from pages_of(entry)


def assemble() -> None:
    """Write `.site/docs` and the sources that mkdocstrings reads."""
    for folder in (SOURCE, API):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, SOURCE)
    for page in DOCS.rglob("*.md"):
        (SOURCE / page.relative_to(DOCS)).write_text(for_site(page))
    for name, place in PAGES.items():
        if (ROOT / name).exists():
            (SOURCE / place).parent.mkdir(parents=True, exist_ok=True)
            (SOURCE / place).write_text(for_site(ROOT / name))
    only_code = shutil.ignore_patterns("__pycache__", "*.j2")
    shutil.copytree(ROOT / "ncclguard", API / "ncclguard", ignore=only_code)
    shutil.copytree(ROOT / "integrations", API / "ncclguard" / "integrations", ignore=only_code)
    shutil.copytree(ROOT / "explain" / "ncclguard_explain", API / "ncclguard_explain", ignore=only_code)
    shutil.copy(wheel_of_explain(), SOURCE / "assets" / "ncclguard_explain.whl")
    (SOURCE / "reference").mkdir(exist_ok=True)
    (SOURCE / "reference" / "api.md").write_text(api_page())
    (SOURCE / "reference" / "cli.md").write_text(command_page())


@cache
def wheel_of_explain() -> Path:
    """Build the wheel that docs/drop.html loads, out of a copy: a build leaves files beside its sources."""
    folder = ROOT / ".site" / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        ROOT / "explain", folder / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(folder / "source"),
    ]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def place_of(path: str) -> str | None:
    """Return where the site has a path of the repository; None where it does not."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path) or PAGES.get(f"{path.rstrip('/')}/README.md")


def for_site(page: Path) -> str:
    """The text of a page with links that hold in the site; a link to a file that the site lacks becomes its text."""
    path = page.relative_to(ROOT).as_posix()
    here = place_of(path) or path

    def renewed(match: re.Match[str]) -> str:
        text, target, anchor = LINK.sub(renewed, match[1]), match[2], match[3] or ""
        place = place_of(normpath(f"{Path(path).parent.as_posix()}/{target}"))
        if place is None:
            return text
        place = re.sub(r"\.zh(\.\w+)$", r"\1", place)  # by which the languages' plugin finds the translation
        if place == here.replace(".zh.md", ".md") and not anchor:
            return ""  # the same page in the other language: the site has a switch for that
        return f"[{text}]({relpath(place, Path(here).parent.as_posix() or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```$)", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return "".join(open_panel(part) if part.startswith("```") else LINK.sub(renewed, part) for part in parts)


def open_panel(block: str) -> str:
    """Leave out the right border of a panel in Chinese.

    A terminal draws a Chinese character as wide as two letters; few browsers have a font that does, and there the
    border is ragged.
    """
    if "╭" not in block or block.isascii() or not re.search(r"[\u4e00-\u9fff]", block):
        return block
    return re.sub(r"[╮╯]$", "─", re.sub(r" +│$", "", block, flags=re.MULTILINE), flags=re.MULTILINE)


def api_page() -> str:
    """The page of every public name, by subject, for mkdocstrings to fill in."""
    subjects: dict[str, list[str]] = {subject: [] for subject in SUBJECTS.values()}
    tree = ast.parse((ROOT / "ncclguard" / "_public.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module in SUBJECTS]
    for node in imports:
        subjects[SUBJECTS[str(node.module)]] += [f"{node.module}.{alias.name}" for alias in node.names]
    for subject, names in FURTHER.items():
        subjects.setdefault(subject, []).extend(names)
    lines = [
        "# Python API",
        "",
        "Made from the docstrings. `import ncclguard as ng`; errors and their meaning are in",
        "",
    ]
    lines[2] += " [errors](../errors.md), settings in [configuration](../configuration.md)."
    for subject, names in subjects.items():
        lines += ["", f"## {subject}"]
        for name in names:
            lines += ["", f"::: {name}"]
            if name.endswith("GuardConfig"):
                lines += ["    options: {members: false}"]
    return "\n".join(lines) + "\n"


@cache
def command_page() -> str:
    """The page of the commands, from what each prints for `--help`."""
    import ncclguard.__main__ as command  # here, because `renew` and the tests need no installed package

    lines = ["# Command line", "", "What `ncclguard COMMAND --help` prints.", "", *fenced(helped())]
    for name, entry in command.COMMANDS.items():
        lines += [
            "",
            f"## ncclguard {name}",
            "",
            f"{entry.help[0].upper()}{entry.help[1:]}.",
            "",
            *fenced(helped(name)),
        ]
    return "\n".join(lines) + "\n"


def helped(*words: str) -> str:
    """Return what a command prints for `--help`."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "ncclguard", *words, "--help"]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT).stdout


def fenced(text: str) -> list[str]:
    """A block of text as it is."""
    return ["```text", *text.rstrip().splitlines(), "```"]


class Examples(Extension):  # type: ignore[misc]
    """Examples in docstrings become blocks of code: in Markdown, which docstrings are, `>>>` is a quotation."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = re.sub(
                r"(?:^|(?<=\n\n))(>>> (?:.|\n(?!\n))*)", r"```pycon\n\1\n```", obj.docstring.value
            )


class _Links(HTMLParser):
    """The links of a page, and what can be linked to on it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and ((name == "href" and tag != "base") or name == "src"):
                self.targets.append(value)
            elif value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)


def dead_links(site: Path) -> list[str]:
    """The links of a built site that lead nowhere in it; other hosts are not asked."""
    pages = {path: _Links(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            path = page if not parts.path else (page.parent / unquote(parts.path)).resolve()
            path = path / "index.html" if path.is_dir() else path
            anchor = unquote(parts.fragment)
            if not path.exists() or (anchor and path in pages and anchor not in pages[path].anchors | {"__top"}):
                found.append(f"{page.relative_to(site)}: {target}")
    return found


def english_of(page: Path) -> Path:
    """The English page of which a Chinese one is the translation."""
    return page.with_name(page.name.replace(".zh-CN.md", ".md").replace(".zh.md", ".md"))


def chinese_pages() -> list[Path]:
    """Every page in Chinese."""
    return [ROOT / "README.zh-CN.md", *sorted(DOCS.rglob("*.zh.md"))]


def lagging() -> list[str]:
    """The Chinese pages whose English page has changed since they were written from it."""
    found = []
    for page in chinese_pages():
        mark = MARK.search(page.read_text())
        if mark is None or mark[1] != english_of(page).name or mark[2] != digest(english_of(page)):
            found.append(page.relative_to(ROOT).as_posix())
    return found


def digest(page: Path) -> str:
    """Return a digest that changes when the words of a page do; line breaks and spaces do not count."""
    return hashlib.sha256(" ".join(page.read_text().split()).encode()).hexdigest()


def renew(page: Path) -> None:
    """Note in a Chinese page that it says what its English page says now."""
    english = english_of(page)
    text = MARK.sub("", page.read_text()).rstrip()
    page.write_text(f"{text}\n\n<!-- english: {english.name} sha256:{digest(english)} -->\n")


def main(arguments: Sequence[str]) -> int:
    """Run one of the two commands and return its exit code."""
    match list(arguments):
        case ["check"]:
            found = dead_links(SITE)
            print("\n".join([*found, f"{len(found)} links lead nowhere"]), file=sys.stderr if found else sys.stdout)
            return int(bool(found))
        case ["renew", *names] if names:
            pages = [Path(name).resolve() for name in names]
            others = [name for name, page in zip(names, pages, strict=True) if page not in chinese_pages()]
            if others:
                print(f"no Chinese page: {', '.join(others)}; renew one that ends in .zh.md", file=sys.stderr)
                return 2
            for page in pages:
                renew(page)
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
