"""What is installed, from a wheel and editable: `integrations/` as ncclguard.integrations, types, licence, command."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import ncclguard_explain
from ncclguard import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest there

ROOT = Path(__file__).resolve().parents[2]
WHERE = "import ncclguard.integrations as i, ncclguard as n; print(i.__file__); print(n.__file__)"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads: a build leaves files beside its sources."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(
        ROOT / "explain", copy / "explain", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    )
    for name in ("ncclguard", "ncclguard_observe", "integrations"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return copy


def environment(folder: Path, *packages: str) -> Path:
    """A virtual environment that sees the packages of this one but not its editable installs; returns its Python.

    With names it sees only these.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    if not packages:
        (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in packages:
        (site / name).symlink_to(Path(importlib.import_module(name).__file__ or "").parent)
    return python


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command outside this repository and return what it prints."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(command), cwd=cwd or "/", env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def pip(python: Path, *arguments: str | Path) -> None:
    options = ("--no-deps", "--no-index", "--no-build-isolation") if arguments[0] != "uninstall" else ()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, arguments[0], *options, *arguments[1:])


def test_every_folder_with_python_files_is_a_listed_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "ncclguard").rglob("*.py")
        if not any(part.startswith(".") for part in path.parts)
    }
    found |= {
        ".".join(("ncclguard", *path.parent.relative_to(ROOT).parts)) for path in (ROOT / "integrations").rglob("*.py")
    }
    assert set(settings["packages"]) == found | {"ncclguard_observe"}


def test_what_vllm_and_sglang_find_of_this_package_are_functions() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(groups) == {"vllm.general_plugins", "sglang.srt.plugins"}
    for value in (value for entries in groups.values() for value in entries.values()):
        module, name = value.split(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.processes
def test_a_wheel_has_everything(source: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "environment")
    pip(python, "wheel", "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"ncclguard-{__version__}.dist-info/METADATA").decode()
    modules = {path.relative_to(source).as_posix() for path in (source / "ncclguard").rglob("*.py")}
    modules |= {f"ncclguard/{path.relative_to(source).as_posix()}" for path in (source / "integrations").rglob("*.py")}
    modules |= {path.relative_to(source).as_posix() for path in (source / "ncclguard").rglob("templates/*")}
    assert "ncclguard/incident/templates/incident.html.j2" in modules
    assert modules <= names
    assert "ncclguard/py.typed" in names
    assert {"ncclguard_observe.pth", "ncclguard_observe/__init__.py", "ncclguard_observe/sitecustomize.py"} <= names
    assert f"ncclguard-{__version__}.dist-info/licenses/LICENSE" in names
    assert not any(name.startswith(("tests", "integrations", "scripts", "benchmarks")) for name in names)
    assert f"Version: {__version__}\n" in metadata
    pip(python, "install", wheel, source / "explain")
    integrations, package = run(python, "-c", WHERE).splitlines()
    assert Path(package).is_relative_to(tmp_path / "environment")
    assert Path(integrations).parent == Path(package).parent / "integrations"
    assert run(tmp_path / "environment" / "bin" / "ncclguard", "--version") == f"ncclguard {__version__}"
    look = "import os, sys; print('ncclguard_observe' in sys.modules, os.environ.get('PYTHONPATH'))"
    observe = ("env", "NCCLGUARD_OBSERVE=1")
    assert run(python, "-c", look) == "False None"
    for options in ([], ["-I"], ["-E"]):
        assert run(*observe, python, *options, "-c", look) == "True None", "Python reads the .pth file by itself"
    assert run(*observe, python, "-S", "-c", look) == "False None"
    command = (tmp_path / "environment" / "bin" / "ncclguard", "observe", "--", python, "-c", look)
    assert run(*command) == "True None", "nobody's sitecustomize has to stand back"
    pip(python, "uninstall", "--yes", "ncclguard")
    assert run(*observe, python, "-c", look) == "False None"


@pytest.mark.processes
def test_the_wheel_of_explain_has_everything_and_reads_a_log_without_torch(source: Path, tmp_path: Path) -> None:
    pip(environment(tmp_path / "builder"), "wheel", "--wheel-dir", tmp_path, source / "explain")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = source / "explain" / "ncclguard_explain"
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    assert {"ncclguard_explain/locale/zh.po", "ncclguard_explain/templates/base.html.j2"} < files
    assert files <= names
    assert f"ncclguard_explain-{__version__}.dist-info/licenses/LICENSE" in names
    python = environment(tmp_path / "environment", "rich", "markdown_it", "mdurl", "pygments")
    pip(python, "install", wheel)
    command = tmp_path / "environment" / "bin" / "ncclguard-explain"
    assert run(command, ROOT / "tests" / "unguarded_logs" / "legacy-kill").startswith("Rank ")
    for name in ("torch", "numpy", "pydantic"):
        with pytest.raises(AssertionError, match=name):
            run(python, "-c", f"import {name}")


def test_both_distributions_have_one_version() -> None:
    assert ncclguard_explain.__version__ == __version__
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"ncclguard-explain=={__version__}" in dependencies


@pytest.mark.processes
def test_an_editable_install_maps_integrations(source: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "environment")
    pip(python, "install", "--editable", source / "explain", "--editable", source)
    for cwd in (tmp_path, source):
        integrations, package = run(python, "-c", WHERE, cwd=cwd).splitlines()
        assert Path(package) == source / "ncclguard" / "__init__.py"
        assert Path(integrations) == source / "integrations" / "__init__.py"
    look = "import os; print(os.environ.get('PYTHONPATH'))"
    command = (tmp_path / "environment" / "bin" / "ncclguard", "observe", "--", python, "-c", look)
    assert run(*command) == str(source / "ncclguard_observe"), "there is no .pth file of ours"
