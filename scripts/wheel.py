"""The package as others get it: `scripts/wheel [FOLDER] [--python X.Y] [--torch VERSION ...]`.

Builds the source distributions and from them the wheels of ncclguard and ncclguard-explain. The second is used in an
empty environment without torch, and for each version of torch both are installed in another one and used: pip's own
check, every command's --help, completion, two ranks and the commands of the tour. `scripts/matrix` takes its
environments from here. The standard library alone is used.
"""

from __future__ import annotations

import argparse
import glob
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import environment

ROOT = Path(__file__).resolve().parent.parent
#: What each distribution is built from, by its folder; a copy of it, because a build leaves files beside its sources.
SOURCES = {
    "explain": ("pyproject.toml", "README.md", "LICENSE", "ncclguard_explain"),
    ".": ("pyproject.toml", "setup.py", "README.md", "LICENSE", "ncclguard", "ncclguard_observe", "integrations"),
}
#: The oldest Python of ncclguard-explain; what a job left, and the exit code that says what to do about it.
OLDEST, LOGS, FIX_CODE = "3.9", ROOT / "tests" / "unguarded_logs" / "legacy-exception", 12
#: Seconds for an installation, for a command that starts nothing, and for the ranks and the tour together.
INSTALL, COMMAND, USE = 1800, 180, 1100


class Unavailable(Exception):
    """An environment cannot be had here; the text says why."""


class Broken(Exception):
    """The installed package does not do what it has to; the text says what."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, install, use; 0 when all of it works with every torch that was named."""
    parser = argparse.ArgumentParser(prog="scripts/wheel", description="Build the wheel and use it where it is alone.")
    parser.add_argument("folder", nargs="?", type=Path, help="leave the sdist and the wheel here")
    parser.add_argument("--python", metavar="X.Y", help="default: this one")
    parser.add_argument("--torch", nargs="+", metavar="VERSION", help="such as 2.6 or 2.13.0; default: that of .venv")
    options = parser.parse_args(arguments)
    python = options.python or f"{sys.version_info[0]}.{sys.version_info[1]}"
    try:
        torches = options.torch or [torch_of_venv()]
        with tempfile.TemporaryDirectory(prefix="ncclguard-wheel-") as folder:
            wheels = build(Path(folder, "dist"))
            for version in dict.fromkeys((OLDEST, python)):
                try:
                    use_explain(empty(Path(folder, "explain"), find_python(version)), wheels[0])
                except Unavailable as error:
                    say(f"ncclguard-explain was not tried with Python {version}: {error}")
            for torch in torches:
                interpreter = make(Path(folder, "environment"), find_python(python), torch)
                install(interpreter, *map(str, wheels))
                use(interpreter)
            if options.folder is not None:
                shutil.copytree(wheels[0].parent, options.folder, dirs_exist_ok=True)
    except (Unavailable, Broken) as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    return 0


def torch_of_venv() -> str:
    """The version of torch in .venv, which is made if need be. Raises Unavailable."""
    if environment.main(["test"]) != 0:
        raise Unavailable("without .venv there is no version of torch to take: name one with --torch")
    return output(environment.PYTHON, "-c", "import torch; print(torch.__version__)")


def build(folder: Path) -> list[Path]:
    """Build into an empty folder and return the wheels, that of ncclguard-explain first. Raises Unavailable, Broken."""
    with tempfile.TemporaryDirectory(prefix="ncclguard-build-") as place:
        builder = Path(place, "builder")
        subprocess.run([sys.executable, "-m", "venv", builder], check=True)
        install(builder / "bin" / "python", "build")
        for project, names in SOURCES.items():
            source = Path(place, "source", project)
            source.mkdir(parents=True, exist_ok=True)
            for name in names:
                copy = shutil.copytree if (ROOT / project / name).is_dir() else shutil.copy
                copy(ROOT / project / name, source / name)
            done = run(builder / "bin" / "python", "-m", "build", "-q", "--outdir", folder, source, limit=INSTALL)
            if done.returncode:
                raise Broken(f"the package in {project} cannot be built:\n{done.stdout}{done.stderr}")
    say("built " + ", ".join(sorted(path.name for path in folder.iterdir())))
    return [next(folder.glob(f"{name}-*.whl")) for name in ("ncclguard_explain", "ncclguard")]


def find_python(version: str) -> str:
    """The interpreter of that version: this one, on the path or among pyenv's. Raises Unavailable."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    found = shutil.which(f"python{version}")
    if found is not None and subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode == 0:
        return found  # pyenv's shims are on the path for versions too that it refuses to run
    root = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    installed = sorted(glob.glob(f"{root}/versions/{version}.*/bin/python"))
    if not installed:
        raise Unavailable(f"there is no Python {version} here")
    return installed[-1]


def empty(folder: Path, python: str) -> Path:
    """Return the Python of a new environment. Raises Unavailable."""
    shutil.rmtree(folder, ignore_errors=True)
    if subprocess.run([python, "-m", "venv", folder], check=False, capture_output=True).returncode:
        raise Unavailable(f"{Path(python).name} makes no environments")
    return folder / "bin" / "python"


def make(folder: Path, python: str, torch: str) -> Path:
    """Return the Python of an environment with nothing but that torch. Raises Unavailable."""
    say(f"a new environment with {Path(python).name} and torch {torch}")
    interpreter = empty(folder, python)
    required = f"torch=={torch}" if torch.count(".") > 1 else f"torch=={torch}.*"
    try:
        install(interpreter, required, "--index-url", environment.CPU_INDEX, "--retries", "0", "--timeout", "10")
    except Unavailable:
        install(interpreter, required)
    return interpreter


def install(interpreter: Path, *requirements: str) -> None:
    """Install into an environment what pip finds. Raises Unavailable with pip's reason."""
    done = run(interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements, limit=INSTALL)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        raise Unavailable(f"pip: {reasons[-1].removeprefix('ERROR: ')}")


def use_explain(interpreter: Path, wheel: Path) -> None:
    """Install the wheel of ncclguard-explain alone and read a log with it. Raises Unavailable and Broken."""
    say(f"an environment with {wheel.name} alone")
    install(interpreter, str(wheel))
    command = interpreter.parent / "ncclguard-explain"
    checks: list[tuple[list[str | Path], int]] = [
        ([interpreter, "-m", "pip", "check"], 0),
        ([command, "--help"], 0),
        ([command, "--exit-code", LOGS], FIX_CODE),
    ]
    for words, code in checks:
        done = run(*words, limit=COMMAND)
        if done.returncode != code:
            raise Broken(f"`{' '.join(map(str, words))}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    for name in ("torch", "numpy", "pydantic"):
        if run(interpreter, "-c", f"import {name}", limit=COMMAND).returncode == 0:
            raise Broken(f"{wheel.name} has brought {name}")


def use(interpreter: Path) -> None:
    """Everything that must work where the package is installed and the repository is not. Raises Broken."""
    binaries = interpreter.parent
    commands = output(interpreter, "-c", "from ncclguard.__main__ import COMMANDS; print(*COMMANDS)").split()
    checks: list[list[str | Path]] = [[interpreter, "-m", "pip", "check"], [binaries / "ncclguard", "--version"]]
    checks += [[binaries / "ncclguard", name, "--help"] for name in commands]
    checks += [[binaries / "ncclguard", "completion", shell] for shell in ("bash", "zsh", "fish")]
    for command in checks:
        done = run(*command, limit=COMMAND)
        if done.returncode:
            raise Broken(f"`{' '.join(map(str, command))}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    with tempfile.TemporaryDirectory(prefix="ncclguard-use-") as folder:
        for path in (ROOT / "scripts" / "smoke.py", ROOT / "docs" / "tour.md"):
            shutil.copy(path, folder)
        done = run(interpreter, "smoke.py", "--tour", "tour.md", limit=USE, cwd=folder)
    sys.stdout.write(done.stdout)
    if done.returncode:
        raise Broken(f"scripts/smoke.py ended with {done.returncode}:\n{done.stderr}")


def run(
    program: str | Path, *arguments: str | Path, limit: float, cwd: str | Path = "/"
) -> subprocess.CompletedProcess[str]:
    """Run a program without what points to the repository; past its limit it counts as failed."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(program), *map(str, arguments)]
    try:
        return subprocess.run(
            command, check=False, cwd=cwd, env=variables, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"it did not end within {limit:g} s")


def output(program: str | Path, *arguments: str) -> str:
    """Return what a command prints. Raises Unavailable when it fails."""
    done = run(program, *arguments, limit=COMMAND)
    if done.returncode:
        raise Unavailable((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return done.stdout.strip()


def machine() -> str:
    """Describe where this runs, for a table."""
    return f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores"


def say(text: str) -> None:
    """Tell the user which step takes the time."""
    print(f"wheel: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
