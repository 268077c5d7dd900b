"""What two backends have made of the same tests: who fails where, and the table of it.

The first of the two is torch's own, gloo or NCCL, and the second was in its place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent
REASONS: Final = FOLDER / "reasons.json"
#: What can be said of a test, as the columns of the table say it.
COLUMNS: Final = {
    "passed": "passed on both",
    "theirs": "failed on both",
    "ours": "passed on torch's own, not here",
    "only here": "passed here, not on torch's own",
    "skipped": "skipped on both",
}
#: The class of programs/test_torch_distributed.py, under which torch's tests stand.
FORKED: Final = "TestForked::"
Results = dict[str, Any]


def kind_of(plain: str, guarded: str) -> str:
    """Say what the two ends of one test come to, as a key of `COLUMNS`; a test may also have been "not run"."""
    if plain == guarded == "skipped":
        return "skipped"
    if "passed" not in (plain, guarded):
        return "theirs" if "skipped" not in (plain, guarded) else "ours"
    if plain == guarded:
        return "passed"
    return "ours" if plain == "passed" else "only here"


def kinds(results: Results) -> dict[str, str]:
    """Return the kind of each test; tests that ended well on both with different results are ours."""
    plain, guarded = results["backends"]
    found = {}
    for name, ends in results["tests"].items():
        found[name] = kind_of(ends[plain]["end"], ends[guarded]["end"])
        if found[name] == "passed" and ends[plain].get("result") != ends[guarded].get("result"):
            found[name] = "ours"
    return found


def reasons() -> dict[str, dict[str, str]]:
    """Return why a test is ours, by suite and test."""
    found: dict[str, dict[str, str]] = json.loads(REASONS.read_text(encoding="utf-8"))
    return found


def ours(results: Results) -> list[str]:
    """Return the tests that did worse here than on torch's own backend."""
    return [name for name, kind in kinds(results).items() if kind == "ours"]


def without_reason(results: Results) -> list[str]:
    """Return those of them that have no reason in `reasons.json`."""
    known = reasons().get(results["suite"], {})
    return [name for name in ours(results) if name not in known]


def row(results: Results) -> str:
    """Return the row of one run in the table of all of them."""
    counted = Counter(kinds(results).values())
    counted["skipped"] += sum(len(names) for names in results["skipped"].values())
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if name != "ncclguard")
    cells = [
        results["suite"],
        str(results["ranks"]),
        " for ".join(reversed(results["backends"])),
        versions,
        *(str(counted[kind]) for kind in COLUMNS),
    ]
    return "| " + " | ".join(cells) + " |"


def header() -> list[str]:
    """Return the two first lines of the table."""
    names = ["suite", "ranks", "backend", "versions", *COLUMNS.values()]
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def rendered(results: Results) -> str:
    """Return one run as a page: the row, what fails and why, and what was skipped."""
    lines = [f"# {results['suite']}, {results['ranks']} ranks", "", f"`{results['command']}`", ""]
    lines += [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    seconds = ", ".join(f"{value:.0f} s on {backend}" for backend, value in results["seconds"].items())
    lines += [
        f"The tests took {seconds}, one backend after the other, with whatever else the machine did meanwhile.",
        "",
    ]
    lines += [*header(), row(results), ""]
    known, of = reasons().get(results["suite"], {}), kinds(results)
    for kind in ("ours", "only here", "theirs"):
        names = [name for name in of if of[name] == kind]
        lines += [f"## {COLUMNS[kind].capitalize()}", ""] if names else []
        for name in names:
            said = {b: results["tests"][name][b].get("said", "") for b in results["backends"]}
            why = known.get(name, "NO REASON IS GIVEN") if kind == "ours" else ""
            lines += [
                f"- `{name}`: {why}".removesuffix(": "),
                *(f"    - {b}: `{_code(text)}`" for b, text in said.items() if text),
            ]
        lines += [""] if names else []
    again = [name for name, ends in results["tests"].items() if any(end.get("tries", 1) > 1 for end in ends.values())]
    if again:
        lines += ["Failed at first on one of the backends and run once more, alone: " + _listed(again) + ".", ""]
    lines += ["## Skipped", ""] if results["skipped"] else []
    lines += [f"- {why}: {len(names)}" for why, names in results["skipped"].items()]
    return "\n".join(lines).rstrip() + "\n"


def newest(folder: Path = FOLDER / "results") -> list[Results]:
    """Return the committed results: the newest of each suite, number of ranks, backend and version of torch."""
    found: dict[tuple[Any, ...], Results] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: json.loads(path.read_text())["machine"]["day"]):
        results = json.loads(path.read_text(encoding="utf-8"))
        if is_broken_off(results):
            continue
        found[results["suite"], results["ranks"], results["backends"][1], results["versions"]["torch"]] = results
    return [found[key] for key in sorted(found)]


def is_broken_off(results: Results) -> bool:
    """Return whether a run had not done all of its parts."""
    done, of = results.get("parts", (1, 1))
    return bool(done < of)


def continued(earlier: Results, results: Results) -> Results:
    """Add what a run has done before it was broken off; what it is about is that of the end."""
    seconds = {backend: round(earlier["seconds"][backend] + took, 1) for backend, took in results["seconds"].items()}
    skipped = dict(earlier["skipped"])
    for said, names in results["skipped"].items():
        skipped[said] = [*skipped.get(said, ()), *names]
    return {**results, "seconds": seconds, "tests": {**earlier["tests"], **results["tests"]}, "skipped": skipped}


def merged(ends: Mapping[str, Mapping[str, dict[str, Any]]]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Bring the ends of all tests by backend together, and apart those that were skipped on all, by what was said."""
    tests: dict[str, Any] = {}
    skipped: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for by_name in ends.values() for name in by_name):
        both = {backend: by_name.get(name, {"end": "not run"}) for backend, by_name in ends.items()}
        if all(end["end"] == "skipped" for end in both.values()):
            said = next(iter(both.values())).get("said", "").removeprefix("Skipped: ")
            skipped.setdefault(said, []).append(name.removeprefix(FORKED))
        else:
            tests[name.removeprefix(FORKED)] = both
    return tests, dict(sorted(skipped.items(), key=lambda item: -len(item[1])))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _code(text: str) -> str:
    return text.replace("`", "'").replace("\n", " ")
