"""Self-contained pages for people, from the Jinja2 templates beside this module.

Light and dark, everything escaped. Jinja2 comes with torch; on a machine without torch only pages need it
(`pip install "ncclguard-explain[html]"` or jinja2).
"""

from __future__ import annotations

import functools
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ncclguard_explain import language
from ncclguard_explain.language import read, said, say, told, tr

if TYPE_CHECKING:
    from jinja2 import Environment


TEMPLATES: Final = Path(__file__).parent / "templates"


class PageError(RuntimeError):
    """A page cannot be made on this machine; the text says what to install."""


def render(template: str, folder: Path = TEMPLATES, /, **values: Any) -> str:
    """Return the whole page that a template makes of the values, whose texts are escaped.

    `folder` holds the template; those that it extends and imports may also be in `TEMPLATES`.

    Raises PageError where Jinja2 is not installed.

    >>> render("base.html.j2", title="a < b", style="", body="x").startswith("<!doctype html>")
    True
    """
    return _environment(folder).get_template(template).render(values)


@functools.cache
def _environment(folder: Path) -> Environment:
    try:
        import jinja2
    except ImportError as error:
        refusal = told(
            "an HTML page needs Jinja2, which is not installed here: pip install jinja2; text and JSON need nothing more"
        )
        raise PageError(refusal) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        finalize=said,
    )
    environment.globals.update(tr=tr, told=told, language=language.current)
    environment.filters["prose"] = lambda text: _markup(prose(say(text)))
    environment.filters["read"] = read
    environment.filters["say"] = say
    environment.filters["sentence"] = lambda message: message.capitalised()
    environment.filters["percent"] = lambda part: f"{100 * part:.2f}%"
    return environment


def _markup(html: str) -> str:
    """HTML that a template puts in as it is."""
    from markupsafe import Markup  # a part of Jinja2

    return Markup(html)


def prose(text: str) -> str:
    """Text in which `words` stand for what is typed.

    >>> prose("run `a < b`")
    'run <code>a &lt; b</code>'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
