"""Create `.venv` with ncclguard in it: `python3 scripts/environment.py [EXTRA ...]`; `scripts/test` does.

torch comes first, chosen so that a machine without an NVIDIA GPU does not get several GB of CUDA packages. In this
order:

1. a torch that the Python running this script has already (a cluster image): the environment is built to see it;
2. with an NVIDIA GPU: whatever pip is configured to find;
3. without one: a wheel from the find-links folders of pip's configuration, then whatever pip is configured to find,
   then torch's own index of CPU builds. Each is resolved on trial first, and taken only if no CUDA package comes along.

`--allow-cuda` takes what pip finds. The standard library alone is used: nothing is installed yet when this runs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv"
PYTHON = FOLDER / "bin" / "python"
#: ncclguard, and what it stands on.
PROJECTS = (ROOT / "pyproject.toml", ROOT / "explain" / "pyproject.toml")
TORCH = "torch>=2.6"
RECENT_TORCH = "import sys, torch; sys.exit(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 6))"
#: https://pytorch.org/get-started/locally names it for CPU builds.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_PACKAGES = ("nvidia-", "nvidia_", "cuda-", "cuda_", "triton")
#: The first pip with `--report`, which came after `--dry-run`.
PIP = (22, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environment complete and return 0; what is there already is left alone."""
    parser = argparse.ArgumentParser(prog="scripts/environment.py", description="Create .venv with ncclguard in it.")
    parser.add_argument("extras", nargs="*", help="optional dependencies of the package, such as: test lint plot")
    parser.add_argument(
        "--allow-cuda", action="store_true", help="take CUDA builds of torch on a machine without a GPU too"
    )
    options = parser.parse_args(arguments)
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        found = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return fail(
            f"this is Python {found}; ncclguard needs 3.10 to 3.13: name one, as in PYTHON=python3.11 scripts/test"
        )
    stamp = FOLDER / "ncclguard-installed"
    wanted = {hash_of_project(), *options.extras}
    if stamp.exists() and wanted <= set(stamp.read_text().split()):
        return 0
    try:
        create()
        install_torch(options.allow_cuda)
        if "deepspeed" in options.extras:
            install_deepspeed()
        name = ROOT.as_posix() + (f"[{','.join(options.extras)}]" if options.extras else "")
        say(f"installing ncclguard {'with ' + ', '.join(options.extras) if options.extras else ''}".rstrip())
        pip("install", "-qq", "--editable", str(ROOT / "explain"), "--editable", name)
        if "deepspeed" in options.extras:
            build_deepspeed_extension()
    except subprocess.CalledProcessError as error:
        return fail(f"`{' '.join(map(str, error.cmd))}` ended with {error.returncode}; its own message is above")
    except SetupError as error:
        return fail(str(error))
    earlier = set(stamp.read_text().split()) if stamp.exists() else set()
    stamp.write_text("\n".join(sorted(wanted | (earlier if hash_of_project() in earlier else set()))) + "\n")
    return 0


class SetupError(Exception):
    """The environment cannot be made here; the text says why and what to do."""


def create() -> None:
    """Create the virtual environment, unless it is there, with a pip that can resolve on trial."""
    if not PYTHON.exists():
        has_torch = importlib.util.find_spec("torch") is not None
        say(f"creating {FOLDER}" + (" on top of this Python, which has torch" if has_torch else ""))
        try:
            venv.create(FOLDER, with_pip=True, clear=FOLDER.exists(), system_site_packages=has_torch)
        except subprocess.CalledProcessError:
            shutil.rmtree(FOLDER, ignore_errors=True)
            raise SetupError(
                "this Python cannot create virtual environments with pip: install its venv package (Debian, Ubuntu: "
                "apt-get install python3-venv) or set PYTHON to another one"
            ) from None
    version = output(PYTHON, "-c", "import pip; print(pip.__version__)").split(".")
    if (int(version[0]), int(version[1])) < PIP:
        pip("install", "-qq", "--upgrade", "pip")


def install_torch(allow_cuda: bool) -> None:
    """Install torch, unless the environment has it."""
    if subprocess.run([PYTHON, "-c", RECENT_TORCH], check=False, capture_output=True).returncode == 0:
        return
    if allow_cuda or has_gpu():
        say("installing torch")
        pip("install", "-qq", TORCH)
        return
    for choice in choices():
        if resolves_without_cuda(choice):
            say(f"installing {choice[0]} (no NVIDIA GPU here: without CUDA packages)")
            pip("install", "-qq", *choice)
            return
    raise SetupError(
        "there is no NVIDIA GPU here, and every torch that pip finds brings CUDA packages of several GB. Point pip "
        f"to a CPU wheel (pip config set global.find-links FOLDER), install one yourself "
        f"({PYTHON} -m pip install ...), or run scripts/environment.py --allow-cuda"
    )


def install_deepspeed() -> None:
    """Install it as Python code without compiled operators, which are built when they are used.

    It names torch among what it is built with: pip would download another one for that, with all of CUDA.
    """
    say("installing deepspeed")
    pip("install", "-qq", "setuptools>=77", "wheel")
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    command = [str(PYTHON), "-m", "pip", "install", "-qq", "--no-build-isolation", "deepspeed"]
    subprocess.run(command, check=True, env=environment)


def build_deepspeed_extension() -> None:
    """Build what DeepSpeed on CPUs compiles at its first use, into the folder that tests/conftest.py names.

    A process that is killed while it builds leaves a lock for which every later one waits without a limit, and tests
    kill processes. Without a compiler DeepSpeed does without the extension.
    """
    folder = FOLDER / "torch_extensions"
    say("building the extension that DeepSpeed uses on CPUs")
    shutil.rmtree(folder, ignore_errors=True)  # older than DeepSpeed's sources, which were just installed
    # The environment's own ninja, which tests/conftest.py finds first too: another one would build it again.
    path = os.pathsep.join([str(PYTHON.parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "PATH": path}
    code = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    done = subprocess.run([PYTHON, "-c", code], check=False, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        say(
            "DeepSpeed's extension could not be built: " + (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        )
        shutil.rmtree(folder, ignore_errors=True)


def choices() -> list[tuple[str, ...]]:
    """Return what to ask pip for on a machine without a GPU, the best first."""
    found: list[tuple[str, ...]] = []
    if local := trial(TORCH, "--no-index", "--no-deps"):
        found.append((f"torch=={local[0][1]}",))
    return [*found, (TORCH,), (TORCH, "--index-url", CPU_INDEX, "--retries", "1", "--timeout", "20")]


def resolves_without_cuda(choice: Sequence[str]) -> bool:
    """Return whether pip would find the requirement, and no CUDA package with it."""
    packages = trial(*choice)
    return bool(packages) and not any(name.lower().startswith(CUDA_PACKAGES) for name, _ in packages)


def trial(*requirement: str) -> list[tuple[str, str]]:
    """Return name and version of what pip would install; nothing when it finds no way."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = ["pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        command += requirement
        done = subprocess.run([PYTHON, "-m", *command], check=False, capture_output=True, text=True)
        if done.returncode != 0:
            why = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
            if "--no-index" not in requirement:  # most machines have no wheels of their own
                say(f"pip finds no {' '.join(requirement)}: {why[-1].removeprefix('ERROR: ')}")
            return []
        packages = json.loads(report.read_text())["install"]
    return [(package["metadata"]["name"], package["metadata"]["version"]) for package in packages]


def has_gpu() -> bool:
    """Return whether the driver of an NVIDIA GPU is there."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def hash_of_project() -> str:
    """Changes when the dependencies may have."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in PROJECTS) + str(ROOT).encode()).hexdigest()


def pip(*arguments: str) -> None:
    """Run the environment's pip; raises subprocess.CalledProcessError."""
    subprocess.run([PYTHON, "-m", "pip", *arguments], check=True)


def output(*command: str | Path) -> str:
    """Return what a command prints; raises subprocess.CalledProcessError."""
    return subprocess.run(list(command), check=True, capture_output=True, text=True).stdout.strip()


def say(text: str) -> None:
    """Tell the user which step takes the time."""
    print(f"environment: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> int:
    """Tell the user what to do, and return the exit code."""
    print(f"environment: {text}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
