"""Look at the gallery's pages in a headless Chromium: light and dark, wide and narrow; a picture and a check of each.

    python -m benchmarks.gallery.screenshots [--pictures FOLDER] [PAGE ...]

Checked, with what folds closed and open: that nothing is wider than the window, that no text is cut (where it ends in
an ellipsis its title has all of it, and what goes further can be scrolled to), that the words above the timeline do not
lie on each other, that the background follows the colour scheme, and that text is readable on it (a contrast of 4.5 at
least, as WCAG 2 asks for). Exit code 1 where a page fails, 2 without a browser.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

GALLERY: Final = Path(__file__).resolve().parents[2] / "docs" / "gallery"
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
SCHEMES: Final = {"dark": 0, "light": 1}  # Blink's numbers of preferred colour schemes
WIDTHS: Final = {"wide": 1280, "narrow": 375}
_HEIGHT: Final = 1600
_CONTRAST: Final = 4.5

# The page in a frame of the window's width: its own policy forbids scripts, and this one looks in from outside.
_FRAME: Final = """<!doctype html><meta charset="utf-8"><style>*{margin:0;border:0}</style>
<iframe id="page" style="width:WIDTHpx;height:HEIGHTpx" srcdoc="PAGE"></iframe><pre id="found"></pre><script>
document.getElementById("page").onload = event => {
  const root = event.target.contentDocument.documentElement, body = root.querySelector("body");
  const back = e => { for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor; if (colour !== "rgba(0, 0, 0, 0)") return colour; }
    return getComputedStyle(body).backgroundColor; };
  const pixel = 1.5;  // glyphs and roundings may stand out that far
  const cut = node => {  // by the window, or by an element that neither scrolls nor says the text in another way
    const range = document.createRange(), text = node.textContent.trim();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect(), inside = node.parentElement.closest("[title]");
    const told = inside && inside.title.includes(text.slice(0, 200));
    for (let e = node.parentElement; e !== root; e = e.parentElement) {
      const style = getComputedStyle(e), frame = e.getBoundingClientRect();
      const out = box.right > frame.right + pixel || box.left < frame.left - pixel;
      if (/auto|scroll/.test(style.overflowX)) return frame.right > WIDTH + pixel ? text : null;
      if (/hidden|clip/.test(style.overflowX) && out && !(told && style.textOverflow === "ellipsis")) return text;
      if (/hidden|clip/.test(style.overflowX) && out) return null;
      if (/hidden|clip/.test(style.overflowY) && box.bottom > frame.bottom + 3 * pixel) return text;
    }
    return box.right > WIDTH + pixel || box.left < -pixel ? text : null; };
  const look = () => {
    const seen = {width: root.scrollWidth, pairs: [], over: [], cut: []};
    for (const e of root.querySelectorAll("body *")) {
      const own = [...e.childNodes].filter(n => n.nodeType === 3 && n.textContent.trim());
      if (!own.length || !e.checkVisibility()) continue;
      seen.pairs.push([e.tagName, getComputedStyle(e).color, back(e), e.textContent.slice(0, 40)]);
      seen.cut.push(...own.map(cut).filter(text => text !== null));
    }
    const heads = [...root.querySelectorAll(".head span")].filter(e => e.checkVisibility());
    heads.forEach((one, n) => heads.slice(n + 1).forEach(other => {
      const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
      const pixels = 3;  // of the lines' own spacing
      if (a.left < b.right && b.left < a.right && a.top + pixels < b.bottom && b.top + pixels < a.bottom)
        seen.over.push(one.textContent + " / " + other.textContent); }));
    return seen; };
  const folds = [...root.querySelectorAll("details:not([open])")], closed = look();
  folds.forEach(e => e.open = true);
  const open = look();
  folds.forEach(e => e.open = false);  // the picture is of the page as it opens
  document.getElementById("found").textContent = JSON.stringify({
    looks: [closed, open], dark: matchMedia("(prefers-color-scheme: dark)").matches,
    background: getComputedStyle(body).backgroundColor });
};
</script>"""


def browser() -> str | None:
    """The first Chromium on the path."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def look(program: str, page: Path, scheme: str, width: int, picture: Path | None) -> list[str]:
    """What is wrong with a page at this width and in this scheme."""
    with tempfile.TemporaryDirectory(prefix="screenshots-") as folder:
        frame = Path(folder, "frame.html")
        text = _FRAME.replace("WIDTH", str(width)).replace("HEIGHT", str(_HEIGHT))
        frame.write_text(text.replace("PAGE", html.escape(page.read_text(encoding="utf-8"))), encoding="utf-8")
        common = [program, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
        common += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--window-size={width},{_HEIGHT}"]
        common += ["--no-sandbox"] if os.geteuid() == 0 else []
        if picture is not None:
            _run([*common, f"--screenshot={picture}", frame.as_uri()])
        dumped = _run([*common, "--virtual-time-budget=2000", "--dump-dom", frame.as_uri()])
    match = re.search(r'<pre id="found">(\{.*?)</pre>', dumped, re.DOTALL)
    if match is None:
        return ["the browser did not show the page"]
    return wrong(json.loads(html.unescape(match[1])), scheme, width)


def wrong(found: dict[str, Any], scheme: str, width: int) -> list[str]:
    """What of the findings is not as it should be."""
    faults = []
    if found["dark"] != (scheme == "dark") or (luminance(found["background"]) < 0.2) != (scheme == "dark"):
        faults.append(f"its background is {found['background']}")
    for look in found["looks"]:
        if look["width"] > width:
            faults.append(f"it is {look['width']} px wide")
        faults += [f"on top of each other: {texts}" for texts in look["over"]]
        faults += [f"cut: {text[:60]!r}" for text in look["cut"]]
        for tag, colour, behind, text in look["pairs"]:
            if (ratio := contrast(colour, behind)) < _CONTRAST:
                faults.append(f"{tag} {text!r} has a contrast of {ratio:.1f}")
        faults += [] if look["pairs"] else ["it has no text"]
    return list(dict.fromkeys(faults))


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2 of `rgb(...)`."""
    parts = [int(float(part)) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast by WCAG 2, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def main() -> int:
    """Look at the pages; returns 0, 1 where something is wrong, 2 where there is no browser."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="default: all of docs/gallery")
    parser.add_argument("--pictures", type=Path, help="write a PNG of each here")
    options = parser.parse_args()
    program = browser()
    if program is None:
        print(f"none of {', '.join(BROWSERS)} is here; install one, such as Debian's chromium", file=sys.stderr)
        return 2
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
    failed = 0
    for page in options.pages or sorted(GALLERY.glob("*/incident.html")):
        for scheme in SCHEMES:
            for name, width in WIDTHS.items():
                title = f"{page.parent.name}-{scheme}-{name}"
                picture = options.pictures / f"{title}.png" if options.pictures is not None else None
                faults = look(program, page, scheme, width, picture)
                failed += bool(faults)
                print(f"{title}: {'; '.join(faults) or 'right'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
