"""Write the cases: each base case as one of its variants, and each public incident as the log that its facts leave.

    python benchmarks/diagnosis/make_cases.py [incidents.jsonl]

The incidents are facts about public reports (figures and causes, no text of theirs); the logs are rendered from them in
the format of their torch version by benchmarks/explain_render.py.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from base_cases import cases
from explain_render import render
from variants import VARIANTS


def write(name: str, text: str, truth: dict[str, object]) -> None:
    """Write one case: a folder with a log and the truth."""
    folder = HERE / "cases" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.log").write_text(text, encoding="utf-8")
    (folder / "truth.json").write_text(json.dumps(truth, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    names = list(VARIANTS)
    for number, case in enumerate(cases()):
        variant = names[number % len(names)]
        lines = VARIANTS[variant](case.lines, random.Random(number))
        truth = {
            "incident": case.incident,
            "culprits": sorted(case.culprits),
            "classes": list(case.classes),
            "decisions": list(case.decisions),
            **case.values,
        }
        write(f"{case.name}-{variant}", "\n".join(lines) + "\n", truth)
    for row in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines() if len(sys.argv) > 1 else ():
        entry = json.loads(row)
        text = render(entry)
        use = set(entry["use_for"])
        if text.count("\n") < 2 or not use & {"missing_or_divergent_rank", "cause_class"}:
            continue
        truth = {"incident": True}
        if entry["world_size_source"] == "stated":
            truth["world_size"] = entry["world_size"]
        if "missing_or_divergent_rank" in use:
            truth["culprits"] = entry["missing_or_divergent_ranks"]
        if "cause_class" in use:
            truth["classes"] = [entry["root_cause_class"]]
        name = entry["id"].replace("rank", "r")  # a folder called rank0 holds the files of rank 0
        write(f"public-{name}", text, truth)


if __name__ == "__main__":
    main()
