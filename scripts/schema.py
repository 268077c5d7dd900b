"""Write the JSON schemas of what commands and incidents leave: `python scripts/schema.py` into operations/schema/.

They are those that pydantic makes of the models, so that they cannot say anything else; with `--check` nothing is
written, and the exit code is 1 where a file is not what the model says. A file's name has the schema version of its
documents.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from ncclguard.environment.doctor import checks
from ncclguard.incident import model, timeline
from ncclguard_explain import report

FOLDER = Path(__file__).resolve().parent.parent / "operations" / "schema"
#: Name -> the model, its schema version, and where such documents come from.
DOCUMENTS: dict[str, tuple[type[object], int, str]] = {
    "incident": (model.Incident, model.SCHEMA_VERSION, "Incident.to_json(), and `incident` of an incident's report."),
    "incident-report": (timeline.Document, timeline.SCHEMA_VERSION, "incident-ID.json in the folder of incidents."),
    "explain": (report.Report, report.SCHEMA_VERSION, "`ncclguard explain --json FILE`."),
    "doctor": (checks.DoctorReport, checks.SCHEMA_VERSION, "`ncclguard doctor --json FILE`."),
}


def schemas() -> dict[str, str]:
    """File name -> the schema as it should stand there."""
    found = {}
    for name, (document, version, source) in DOCUMENTS.items():
        made = TypeAdapter(document).json_schema(mode="serialization")
        made["properties"]["schema_version"]["const"] = version
        for part in (made, *made.get("$defs", {}).values()):
            if "properties" in part:
                part["required"] = list(part["properties"])  # defaults are written too
        head = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"urn:ncclguard:schema:{name}:{version}",
            "$comment": f"Made by scripts/schema.py. Documents: {source}",
        }
        found[f"{name}-{version}.json"] = json.dumps({**head, **made}, indent=2) + "\n"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or with --check compare them."""
    check = "--check" in (sys.argv[1:] if arguments is None else arguments)
    code = 0
    for name, text in schemas().items():
        file = FOLDER / name
        if check and (not file.exists() or file.read_text() != text):
            print(f"schema: {file} is not what the model says: run python scripts/schema.py", file=sys.stderr)
            code = 1
        elif not check:
            file.write_text(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
