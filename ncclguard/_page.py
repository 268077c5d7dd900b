"""Self-contained pages for people, from the Jinja2 templates in incident/templates: light and dark, everything escaped.

Jinja2 comes with torch; on a machine without torch only pages need it (`pip install "ncclguard[html]"` or jinja2).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES: Final = Path(__file__).parent / "incident" / "templates"


class PageError(RuntimeError):
    """A page cannot be made on this machine; the text says what to install."""


def render(template: str, **values: Any) -> str:
    """The whole page that a template makes of the values, whose texts are escaped.

    Raises PageError where Jinja2 is not installed.

    >>> render("base.html.j2", title="a < b", style="", body="x").startswith("<!doctype html>")
    True
    """
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> Environment:
    try:
        import jinja2
    except ImportError as error:
        raise PageError(
            "an HTML page needs Jinja2, which is not installed here: pip install jinja2; text and JSON need nothing more"
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters["prose"] = lambda text: _markup(prose(text))
    environment.filters["percent"] = lambda part: f"{100 * part:.2f}%"
    return environment


def _markup(html: str) -> str:
    """HTML that a template puts in as it is."""
    from markupsafe import Markup  # a part of Jinja2

    return Markup(html)


def page(title: str, body: str, style: str = "") -> str:
    """The whole page with a body of HTML; `title` is text. Raises PageError where Jinja2 is not installed."""
    environment = _environment()
    return environment.get_template("base.html.j2").render(title=title, style=_markup(style), body=_markup(body))


def section(title: str, body: str) -> str:
    """A heading and HTML below it; nothing where there is no body."""
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def numbered(texts: Iterable[str]) -> str:
    """Texts as a numbered list, as `prose`; nothing where there are none."""
    rows = "".join(f"<li>{prose(text)}</li>" for text in texts)
    return f"<ol>{rows}</ol>" if rows else ""


def facts(texts: Iterable[str], bad: Iterable[str] = ()) -> str:
    """Short texts side by side; those of `bad` first and marked."""
    rows = [f'<li class="bad">{escape(text)}</li>' for text in bad] + [f"<li>{escape(text)}</li>" for text in texts]
    return f'<ul class="facts">{"".join(rows)}</ul>'


def folded(summary: str, body: str, *, opened: bool = False) -> str:
    """HTML behind a line of text that opens it."""
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>{body}</details>"


def prose(text: str) -> str:
    """Text in which `words` stand for what is typed.

    >>> prose("run `a < b`")
    'run <code>a &lt; b</code>'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def frames(lines: Iterable[str]) -> str:
    """A stack or any other lines of program text."""
    return f"<pre>{escape(chr(10).join(lines))}</pre>"
