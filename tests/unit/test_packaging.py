"""What is installed, from a wheel and editable: `integrations/` as ncclguard.integrations, types, licence, command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

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
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("ncclguard", "integrations"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return copy


def environment(folder: Path) -> Path:
    """A virtual environment that sees the packages of this one but not its editable installs; returns its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    Path(site, "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
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
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, arguments[0], *options, *arguments[1:])


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
    assert set(settings["packages"]) == found


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
    assert "ncclguard/incident/templates/base.html.j2" in modules
    modules |= {path.relative_to(source).as_posix() for path in (source / "ncclguard" / "locale").iterdir()}
    assert "ncclguard/locale/zh.po" in modules
    assert modules <= names
    assert "ncclguard/py.typed" in names
    assert f"ncclguard-{__version__}.dist-info/licenses/LICENSE" in names
    assert not any(name.startswith(("tests", "integrations", "scripts", "benchmarks")) for name in names)
    assert f"Version: {__version__}\n" in metadata
    pip(python, "install", wheel)
    integrations, package = run(python, "-c", WHERE).splitlines()
    assert Path(package).is_relative_to(tmp_path / "environment")
    assert Path(integrations).parent == Path(package).parent / "integrations"
    assert run(tmp_path / "environment" / "bin" / "ncclguard", "--version") == f"ncclguard {__version__}"


@pytest.mark.processes
def test_an_editable_install_maps_integrations(source: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "environment")
    pip(python, "install", "--editable", source)
    for cwd in (tmp_path, source):
        integrations, package = run(python, "-c", WHERE, cwd=cwd).splitlines()
        assert Path(package) == source / "ncclguard" / "__init__.py"
        assert Path(integrations) == source / "integrations" / "__init__.py"
