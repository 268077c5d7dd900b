"""`ncclguard report FILE.json ...`: make the page of a report again, and show its panel."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ncclguard.incident.report.document import Document
from ncclguard.incident.report.html import render_html
from ncclguard.incident.report.panel import show

UNUSABLE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page beside each file, or to `--html`; returns 0, or 2 when a file cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="ncclguard report",
        description="Make the page of an incident's report again, from its JSON, and show its panel.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE.json", type=Path)
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="where the page goes, for one file; default: beside it"
    )
    arguments = parser.parse_args(argv)
    if arguments.html is not None and len(arguments.files) > 1:
        parser.error("--html takes one page: give one FILE.json with it")
    for file in arguments.files:
        page = arguments.html or file.with_suffix(".html")
        try:
            document = Document.model_validate_json(file.read_text(encoding="utf-8"))
            page.write_text(render_html(document), encoding="utf-8", errors="backslashreplace")
        except (OSError, ValueError) as error:  # pydantic's ValidationError is a ValueError
            print(f"ncclguard report: {file}: {error}", file=sys.stderr)
            return UNUSABLE
        show(document.incident, sys.stdout)
        print(page)
    return 0
