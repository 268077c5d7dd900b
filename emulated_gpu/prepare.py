"""Makes the environment of the emulated GPU: `python prepare.py FOLDER TORCH_VERSION STAMP [EXTRA ...]`.

`scripts/emulated-gpu` calls it when the stamp of the environment is not that of the sources. A creation that was
interrupted begins again; one that was finished only compiles what changed. The standard library alone is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

import build
import symbols

#: What torch's CUDA wheel requires and the emulator stands in for, or nothing of it runs here.
NOT_NEEDED = re.compile(r"^Requires-Dist: (nvidia-|cuda-|triton)")


class SetupError(Exception):
    """The environment cannot be made here; the text says why and what to do."""


def main() -> int:
    """Make the environment complete and return 0."""
    folder, version, stamp, *extras = Path(sys.argv[1]), *sys.argv[2:]
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two commands may be the first
        try:
            make(folder, version, stamp, extras)
        except (SetupError, build.BuildError, symbols.SymbolsError) as error:
            print(f"emulated GPU: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("emulated GPU: interrupted; the next call begins again", file=sys.stderr)
            return 130
        except subprocess.CalledProcessError as error:
            print(f"emulated GPU: `{' '.join(map(str, error.cmd))}` failed; its message is above", file=sys.stderr)
            return 1
    return 0


def make(folder: Path, version: str, stamp: str, extras: list[str]) -> None:
    """Install packages unless that was finished before, then compile what changed."""
    needs = symbols.read(version)
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        found = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(f"this is Python {found}; ncclguard needs 3.10 to 3.13: name one, as in PYTHON=python3.11")
    build.find_compiler()  # before anything is downloaded
    installed = folder / "installed"
    wanted = {f"project {project_hash()}", *extras}
    have = set(installed.read_text().splitlines()) if installed.exists() else set()
    if not have:
        shutil.rmtree(folder, ignore_errors=True)
        say(f"creating {folder.relative_to(ROOT)} with torch {needs.torch}; once, some minutes")
        try:
            venv.create(folder, with_pip=True)
        except subprocess.CalledProcessError:
            raise SetupError(
                "this Python cannot create virtual environments with pip: install its venv package (Debian, Ubuntu: "
                "apt-get install python3-venv) or set PYTHON to another one"
            ) from None
        install_torch(folder, needs)
    if not wanted <= have:
        install_project(folder, sorted({"test", *extras, *(name for name in have if not name.startswith("project "))}))
        installed.write_text(
            "\n".join(sorted(wanted | {name for name in have if not name.startswith("project ")})) + "\n"
        )
    say("compiling")
    python = folder / "bin" / "python"
    if subprocess.run([python, HERE / "build.py"], check=False).returncode:
        raise SetupError("it could not be built: the reason is above, and the next call tries again")
    if subprocess.run([python, "-c", "import torch; torch.ones(1, device='cuda').add_(1)"], check=False).returncode:
        raise SetupError("torch does not run on it: a function named above may be missing from emulated_gpu/symbols/")
    (folder / "stamp").write_text(stamp + "\n")


def install_torch(folder: Path, needs: symbols.Needs) -> None:
    """Install torch's CUDA wheel without NVIDIA's libraries, and have it say that it needs none of them."""
    say(f"installing the CUDA build of torch {needs.torch} (500 to 800 MB)")
    # "===": a build such as 2.13.0+cpu would count as 2.13.0 otherwise, and as the newer of the two.
    command: list[str | Path] = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-deps",
        f"torch==={needs.torch}",
    ]
    python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    if subprocess.run(command, check=False).returncode:
        raise SetupError(
            f"pip finds no torch {needs.torch} for {python} here: point pip to an index that has its CUDA wheels "
            "(pip config set global.index-url ...), or choose another Python with PYTHON=..."
        )
    (torch,) = folder.glob("lib/python*/site-packages/torch")
    if re.search(r"^cuda.*= None", (torch / "version.py").read_text(), re.MULTILINE):
        raise SetupError(
            f"the torch {needs.torch} that pip finds for {python} is not built for CUDA: point pip to an index that has "
            "its CUDA wheels"
        )
    (metadata,) = torch.parent.glob("torch-*.dist-info/METADATA")
    shutil.copy(metadata, metadata.with_name("METADATA.original"))
    kept = [line for line in metadata.read_text().splitlines(keepends=True) if not NOT_NEEDED.match(line)]
    metadata.write_text("".join(kept))


def install_project(folder: Path, extras: list[str]) -> None:
    """Install the project as it lies here, with what its tests need."""
    pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "install", "-qq"]
    if "deepspeed" in extras:  # as scripts/environment.py does: it names torch among what it is built with
        subprocess.run([*pip, "setuptools>=77", "wheel"], check=True)
        environment = {**os.environ, "DS_BUILD_OPS": "0"}
        subprocess.run([*pip, "--no-build-isolation", "deepspeed"], check=True, env=environment)
    say(f"installing the project with {', '.join(extras)}")
    own = ["--editable", f"{ROOT}/explain", "--editable", f"{ROOT}[{','.join(extras)}]"]
    subprocess.run([*pip, *own], check=True)


def project_hash() -> str:
    """Changes when the project's requirements may have."""
    projects = (ROOT / "pyproject.toml", ROOT / "explain" / "pyproject.toml")
    return hashlib.sha256(b"".join(file.read_bytes() for file in projects)).hexdigest()[:16]


def say(text: str) -> None:
    """Tell the user which step takes the time."""
    print(f"emulated GPU: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
