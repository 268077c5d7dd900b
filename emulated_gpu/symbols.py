"""Which functions torch's CUDA build needs of NVIDIA's libraries: read from an installed wheel, kept in `symbols/`.

`python symbols.py SITE_PACKAGES` writes `symbols/torch-X.Y.txt` for the torch that is installed there. Needs nm and readelf
(binutils, which comes with every compiler).

The file begins with `key value` lines (versions, and the folder in which torch looks for the libraries); then comes a line
`[library version-node]` for each library, with the functions that torch needs of it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "symbols"

#: Beginnings of names and the library that has them, for functions without a version that would say so. Longest first.
PREFIXES = {
    "cublasLt": "libcublasLt",
    "cublas": "libcublas",
    "cusparseLt": "libcusparseLt",
    "cusparse": "libcusparse",
    "cusolver": "libcusolver",
    "cufft": "libcufft",
    "curand": "libcurand",
    "cudnn": "libcudnn",
    "cupti": "libcupti",
    "cuFile": "libcufile",
    "nvrtc": "libnvrtc",
    "nvJitLink": "libnvJitLink",
    "nvtx": "libnvToolsExt",
    "nvshmem": "libnvshmem_host",
    "nccl": "libnccl",
    "__cuda": "libcudart",
    "cuda": "libcudart",
    "cu": "libcuda",
}


class SymbolsError(Exception):
    """The list cannot be read or written; the text says why and what to do."""


@dataclass
class Library:
    """One of NVIDIA's libraries: its file name, the version of its functions ("" for none) and their names."""

    name: str
    version: str
    functions: list[str] = field(default_factory=list)


@dataclass
class Needs:
    """What one version of torch needs."""

    torch: str
    cuda: str
    nccl: str
    cxx11_abi: str
    folder: str
    libraries: list[Library]

    @property
    def cuda_code(self) -> int:
        """CUDA's version as its functions tell it: 13000 for 13.0."""
        major, minor = self.cuda.split(".")[:2]
        return int(major) * 1000 + int(minor) * 10

    @property
    def nccl_code(self) -> int:
        """NCCL's version as ncclGetVersion tells it: 22907 for 2.29.7."""
        major, minor, patch = self.nccl.split(".")[:3]
        return int(major) * 10000 + int(minor) * 100 + int(patch)


def known_versions() -> list[str]:
    """Return the versions of torch that have a list, such as "2.13", the oldest first."""
    found = [path.stem.removeprefix("torch-") for path in FOLDER.glob("torch-*.txt")]
    return sorted(found, key=lambda version: tuple(map(int, version.split("."))))


def read(version: str) -> Needs:
    """Read the list of a version of torch, such as "2.13"; raises SymbolsError for an unknown one."""
    path = FOLDER / f"torch-{version}.txt"
    if not path.exists():
        raise SymbolsError(
            f"torch {version} is not known here, only {', '.join(known_versions())}: choose one of them, or add a list "
            "with emulated_gpu/symbols.py (emulated_gpu/README.md says how)"
        )
    values: dict[str, str] = {}
    libraries: list[Library] = []
    for line in path.read_text().splitlines():
        if line.startswith("["):
            name, _, node = line.strip("[]").partition(" ")
            libraries.append(Library(name, node))
        elif libraries and line:
            libraries[-1].functions.append(line)
        elif line and not line.startswith("#"):
            key, _, value = line.partition(" ")
            values[key] = value
    return Needs(libraries=libraries, **values)


def write(needs: Needs) -> Path:
    """Write a list and return its file."""
    version = ".".join(needs.torch.split(".")[:2])
    lines = [f"# Written by emulated_gpu/symbols.py from the CUDA wheel of torch {needs.torch}."]
    lines += [f"{key} {getattr(needs, key)}" for key in ("torch", "cuda", "nccl", "cxx11_abi", "folder")]
    for library in needs.libraries:
        lines += ["", f"[{library.name} {library.version}".rstrip() + "]", *library.functions]
    path = FOLDER / f"torch-{version}.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def find(site_packages: Path) -> Needs:
    """Look into the torch that is installed in a folder; raises SymbolsError if there is no CUDA build of it."""
    version = _values_of(site_packages / "torch" / "version.py")
    if not version.get("cuda"):
        raise SymbolsError(f"the torch in {site_packages} is not built for CUDA: install a CUDA wheel of it")
    files = sorted((site_packages / "torch" / "lib").glob("lib*.so"))
    undefined, defined, sonames, paths = set(), set(), set(), []
    for file in files:
        for line in _output("nm", "--dynamic", str(file)).splitlines():
            *_, kind, name = line.split()
            (undefined if kind in "Uwv" else defined).add(name.replace("@@", "@"))
        for line in _output("readelf", "--dynamic", str(file)).splitlines():
            if value := re.search(r"\(NEEDED\).*\[(.*)\]", line):
                sonames.add(value[1])
            if value := re.search(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", line):
                paths += value[1].split(":")
    folder = next((path for path in paths if re.search(r"nvidia/(cu\d+|cuda_runtime)/lib", path)), None)
    if folder is None:
        raise SymbolsError(f"torch {version['__version__']} does not look for NVIDIA's libraries beside itself")
    own = {name.partition("@")[0] for name in defined}
    return Needs(
        torch=version["__version__"].partition("+")[0],
        cuda=version["cuda"],
        nccl=_version_of_nccl(site_packages),
        cxx11_abi="1" if any(name.startswith("_ZN3c105ErrorC1") and "__cxx11" in name for name in defined) else "0",
        folder=folder[folder.index("nvidia/") :],
        libraries=_by_library([name for name in undefined if name.partition("@")[0] not in own], sonames),
    )


def _by_library(functions: list[str], sonames: set[str]) -> list[Library]:
    """Assign functions ("name" or "name@version") to the libraries that torch is linked with."""
    libraries: dict[str, Library] = {}
    for function in sorted(functions):
        name, _, node = function.partition("@")
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if node == "NVSHMEM":
            prefix = "nvshmem"
        if prefix is None or (prefix == "cu" and not name[2:3].isupper()):
            continue
        soname = next((soname for soname in sonames if soname.startswith(PREFIXES[prefix] + ".so")), None)
        if soname is None:
            continue
        library = libraries.setdefault(soname, Library(soname, ""))
        library.version = node or library.version
        library.functions.append(name)
    # Linked with, without a function of it being used: it must be there all the same.
    for soname in sonames:
        if soname.startswith(tuple(f"{stem}.so" for stem in PREFIXES.values())):
            libraries.setdefault(soname, Library(soname, ""))
    return sorted(libraries.values(), key=lambda library: library.name)


def _version_of_nccl(site_packages: Path) -> str:
    """Return the version of NCCL that the wheel requires."""
    for metadata in site_packages.glob("torch-*.dist-info/METADATA*"):  # the original of what environment.py changes
        if found := re.search(r"^Requires-Dist: nvidia-nccl-cu\d+ ?\(?==([\d.]+)", metadata.read_text(), re.M):
            return found[1]
    raise SymbolsError("the wheel does not say which NCCL it needs: its list of requirements was changed")


def _values_of(file: Path) -> dict[str, str]:
    """Return the strings that a generated Python file assigns."""
    if not file.exists():
        raise SymbolsError(f"there is no torch in {file.parent.parent}")
    return dict(re.findall(r"^(\w+)(?:: \w+(?:\[\w+\])?)? = '([^']*)'", file.read_text(), re.M))


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise SymbolsError(f"there is no {command[0]} here: install binutils") from None


if __name__ == "__main__":
    try:
        print(write(find(Path(sys.argv[1]))))
    except SymbolsError as error:
        sys.exit(f"symbols: {error}")
