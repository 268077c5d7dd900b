"""Self-contained pages for people: no script, no outside resource, light and dark, everything escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Final

#: The page may load nothing and run nothing, so that what came from a log or another program stays text.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
#: An empty one, so that browsers do not ask the page's host for an icon.
_ICON: Final = "data:,"

STYLE: Final = """
:root{color-scheme:light dark;--fg:#1a1d21;--dim:#5b6470;--bg:#fff;--soft:#f2f4f7;--line:#d5dae1;--bad:#b3261e;
--badsoft:#fdecea;--wait:#b26a00;--ok:#3f6f9e;--okbar:#7fa6cc}
@media(prefers-color-scheme:dark){:root{--fg:#e4e7eb;--dim:#9aa4b1;--bg:#15181c;--soft:#20252b;--line:#3a424c;
--bad:#ff8a80;--badsoft:#3a1f1d;--wait:#ffb74d;--ok:#8fb4d6;--okbar:#4f7ca8}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,"DejaVu Sans",sans-serif;color:var(--fg);background:var(--bg);
max-width:80rem;margin:1.6rem auto;padding:0 1rem 3rem}
h1{font-size:1.35rem;line-height:1.35;margin:.4rem 0 .8rem;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:1.8rem 0 .5rem}
p{margin:.4rem 0;max-width:65rem;overflow-wrap:anywhere}
code,pre{font:13px/1.45 ui-monospace,"DejaVu Sans Mono",monospace}li code{overflow-wrap:anywhere}
pre{background:var(--soft);padding:.6rem .8rem;border-radius:.4rem;overflow-x:auto;margin:.4rem 0}
.wrap{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.88rem}
td,th{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td.t,th.t{text-align:left}th{color:var(--dim);font-weight:600}tr.bad td{color:var(--bad);font-weight:600}
.where,.dim{color:var(--dim)}.where{font-size:.88rem}
.facts{display:flex;flex-wrap:wrap;gap:.5rem;padding:0;margin:.6rem 0;list-style:none}
.facts li{background:var(--soft);padding:.3rem .75rem;border-radius:.4rem;overflow-wrap:anywhere}
.facts li.bad{background:var(--badsoft);color:var(--bad);font-weight:600}
details{margin:.4rem 0}summary{cursor:pointer;overflow-wrap:anywhere}summary:hover{color:var(--ok)}
@media print{details>*{display:block}}
"""


def page(title: str, body: str, style: str = "") -> str:
    """Return the whole document; `body` is HTML, `title` text.

    >>> page("a < b", "<h1>x</h1>").startswith("<!doctype html>")
    True
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="{_ICON}"><title>{escape(title)}</title><style>{STYLE}{style}</style></head>'
        f"<body>{body}</body></html>\n"
    )


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
