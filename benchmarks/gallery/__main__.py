"""Make the gallery of incidents anew: each fault of `ncclguard drill` in a real run of train.py, 3 ranks on this host.

    python -m benchmarks.gallery [FAULT ...]

For each fault docs/gallery/FAULT gets what the terminal showed, and the JSON and the page of its first incident; the
table of docs/gallery/README.md is written anew. The runs are made in /tmp/job on a host that is called gpu-07 (a UTS
namespace: as root, or where users may make namespaces), with a copy of ncclguard beside the program, so nothing of the
machine is in what they leave.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from ncclguard_explain.ranks import ranks_text

REPOSITORY: Final = Path(__file__).resolve().parents[2]
GALLERY: Final = REPOSITORY / "docs" / "gallery"
JOB: Final = Path("/tmp/job")
HOST: Final = "gpu-07"
RANKS, STRUCK, CALL = 3, 2, 6
#: Longer than the limit of train.py, shorter than two of it: who is away that long misses one call.
AWAY: Final = "5"

#: The words of the drill for each picture, and what happens to the rank.
FAULTS: Final[dict[str, tuple[list[str], str]]] = {
    "late": (["--fault", "late", "--seconds", AWAY], f"sleeps for {AWAY} s before the call"),
    "kill": (["--fault", "kill"], "is killed by SIGKILL"),
    "stop": (["--fault", "stop", "--seconds", AWAY], f"is stopped by SIGSTOP for {AWAY} s"),
    "gil": (["--fault", "gil", "--seconds", AWAY], f"is in a C call that holds the GIL for {AWAY} s"),
    "exception": (["--fault", "exception"], "raises an exception"),
    "oom": (["--fault", "oom"], "raises torch.OutOfMemoryError"),
    "exit": (["--fault", "exit"], "ends normally, early"),
    "mismatch": (["--fault", "mismatch"], "calls with another shape"),
    "mismatch-dtype": (["--fault", "mismatch", "--of", "dtype"], "calls with another dtype"),
    "skip": (["--fault", "skip"], "leaves one call out"),
    "extra": (["--fault", "extra"], "makes one call more"),
    "reset": (["--fault", "reset"], "has its connections reset"),
    "partition": (["--fault", "partition", "--seconds", AWAY], f"sends and receives nothing for {AWAY} s, in silence"),
    "watch-late": (
        ["--fault", "late", "--seconds", AWAY, "--raw"],
        "the first fault again, of plain calls under `watch()`",
    ),
}

#: Starts the ranks as a launcher does that ends nobody because another ended.
LAUNCH: Final = f"""
import sys
from ncclguard import faults
for rank in faults.run_ranks("train.py", {RANKS}, timeout=60):
    sys.stderr.write(rank.output)
"""


def drill(name: str) -> dict[str, Any]:
    """One run; leaves its files in the gallery and returns the findings of the drill."""
    shutil.rmtree(JOB, ignore_errors=True)
    JOB.mkdir()
    shutil.copy(Path(__file__).with_name("train.py"), JOB)
    shutil.copytree(REPOSITORY / "ncclguard", JOB / "site" / "ncclguard", ignore=shutil.ignore_patterns("__pycache__"))
    (JOB / "launch.py").write_text(LAUNCH)
    words = [*FAULTS[name][0], "--rank", str(STRUCK), "--op", str(CALL), "--json", "drill.json"]
    command = [sys.executable, "-m", "ncclguard", "drill", *words, "--timeout", "90", "--", "python", "launch.py"]
    namespace = ["unshare", "--uts", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NCCLGUARD_")}
    environment |= {
        "NCCLGUARD_ALLOW_DRILL": "1",
        "PYTHONPATH": str(JOB / "site"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONIOENCODING": "utf-8",
    }
    if "--raw" in words:
        environment["WATCHED"] = "1"
    done = subprocess.run(
        [*namespace, "sh", "-c", f'hostname {HOST} && exec "$@"', "sh", *command],
        cwd=JOB,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    findings: dict[str, Any] = json.loads((JOB / "drill.json").read_text())
    if done.returncode != 0:
        raise SystemExit(f"{name}: the drill failed, so the gallery is left as it is:\n{done.stdout}")
    reports = sorted((JOB / "ncclguard-incidents").glob("incident-*.json"), key=lambda file: file.stat().st_mtime_ns)
    shutil.rmtree(JOB / "site")
    files = {"terminal.txt": f"$ ncclguard {' '.join(command[3:])}\n{done.stdout}"}
    if reports:
        files |= {"incident.json": reports[0].read_text(), "incident.html": reports[0].with_suffix(".html").read_text()}
    for file, text in files.items():
        if found := [word for word in (str(REPOSITORY), sys.prefix, str(Path.home()) + "/") if word in text]:
            raise SystemExit(f"{name}: {file} has {found[0]} in it, a path of this machine")
    folder = GALLERY / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text)
    return findings


def row(name: str) -> str:
    """A line of the table, from the files that the run left."""
    folder = GALLERY / name
    terminal = (folder / "terminal.txt").read_text()
    said = {
        line[2:13].strip(" :"): line[13:].strip() for line in terminal.splitlines() if line[2:13].strip().endswith(":")
    }
    if (folder / "incident.json").exists():
        incident = json.loads((folder / "incident.json").read_text())["incident"]
        verdict = ", ".join(filter(None, [ranks_text(incident["culprits"]), incident["cause"]]))
        links = f"[page]({name}/incident.html), [JSON]({name}/incident.json)"
    else:
        verdict, links = "no call failed", "none"
    went_on = said.get("went on", "").split(",")[0] or "all calls succeeded"
    return f"| `{name}` | {FAULTS[name][1]} | {verdict} | {went_on} | [terminal]({name}/terminal.txt) | {links} |"


def write_table() -> None:
    """Put the table between its marks in the README."""
    file = GALLERY / "README.md"
    begin, end = "<!-- table: python -m benchmarks.gallery -->\n", "<!-- end of table -->"
    text = file.read_text()
    heads = "| | rank 2 ... | verdict | went on | | incident |\n|---|---|---|---|---|---|\n"
    rows = "\n".join(row(name) for name in FAULTS if (GALLERY / name).exists())
    before, after = text.split(begin)[0], text.split(end)[1]
    file.write_text(f"{before}{begin}{heads}{rows}\n{end}{after}")


def main() -> int:
    """Make the pictures that are asked for, all by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    chosen = parser.parse_args().faults or list(FAULTS)
    if unknown := set(chosen) - set(FAULTS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(FAULTS)}")
    for name in chosen:
        findings = drill(name)
        print(f"{name}: {findings['cause'] or 'absorbed'}, {findings['seconds']:.1f} s", flush=True)
    write_table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
