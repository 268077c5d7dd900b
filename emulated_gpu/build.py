"""Compiles the emulator's libraries and puts them where torch looks for NVIDIA's: `python build.py` in its environment.

Only what changed is compiled again: an object is kept under a hash of its source, all headers, the flags and the compiler.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import symbols

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
OBJECTS = Path(sys.prefix) / "emulated-gpu-objects"

#: The sources of each library that does something; the rest of what torch needs is refused by name.
LIBRARIES = {
    "libcudart": ["settings.cpp", *(f"cuda/{name}.cpp" for name in (
        "device", "entry", "entry_points", "events", "graphs", "kernels", "memory", "streams"))],
    "libcuda": ["cuda/driver.cpp"],
    "libnccl": [f"nccl/{name}.cpp" for name in ("arithmetic", "collectives", "communicator", "group", "log", "transport")],
}  # fmt: skip
FLAGS = ["-O1", "-fPIC", "-Wall", "-fvisibility=hidden", f"-I{HERE / 'include'}"]

#: What a function that is not emulated returns: each library's "not supported", or just an error.
REFUSALS = {"libcudart": 801, "libcuda": 801, "libnccl": 5, "libcupti": 999}

STUBS = """\
#include <stdio.h>
static int refuse(const char* function, int told, int result) {{
  if (!told)
    fprintf(stderr, "emulated GPU: %s of {library} was called and is not emulated; do this part on the CPU, or see "
                    "'Adding a function' in emulated_gpu/README.md\\n", function);
  return result;
}}
#define STUB(function) \\
  __attribute__((visibility("default"))) int function(void) {{ \\
    static int told = {told}; \\
    return refuse(#function, told++, {result}); \\
  }}
"""


class BuildError(Exception):
    """The emulator cannot be built here; the text says why and what to do."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler and the versions that the sources are compiled for."""

    compiler: str
    identity: str
    needs: symbols.Needs

    def compile(self, source: Path, *flags: str) -> Path:
        """Compile one file, unless its object is kept from before, and return the object."""
        define = [f"-DEMULATED_CUDA_VERSION={self.needs.cuda_code}", f"-DEMULATED_NCCL_VERSION={self.needs.nccl_code}"]
        command = [*FLAGS, *define, *flags]
        headers = sorted([*SOURCES.rglob("*.h"), *(HERE / "include").glob("*.h")])
        content = b"".join(file.read_bytes() for file in [source, *headers])
        key = hashlib.sha256(content + "\0".join([self.identity, self.needs.torch, *command]).encode()).hexdigest()[:16]
        made = OBJECTS / f"{source.stem}-{key}.o"
        if not made.exists():
            partial = made.with_suffix(".partial")  # an interrupted compiler leaves no object
            self.run([*command, "-c", str(source), "-o", str(partial)], source.name)
            partial.rename(made)
        return made

    def run(self, arguments: Sequence[str], what: str) -> None:
        """Run the compiler; raises BuildError with the beginning of what it said."""
        done = subprocess.run([self.compiler, *arguments], check=False, capture_output=True, text=True)
        if done.returncode:
            said = "\n".join(done.stderr.splitlines()[:20])
            raise BuildError(f"{self.compiler} failed on {what}; it said:\n{said}")


def build() -> None:
    """Make and install everything; raises BuildError or symbols.SymbolsError."""
    found = symbols.find(SITE_PACKAGES) if (SITE_PACKAGES / "torch").exists() else None
    if found is None:
        raise BuildError(f"there is no torch in {SITE_PACKAGES}: scripts/emulated-gpu makes an environment with it")
    needs = symbols.read(".".join(found.torch.split(".")[:2]))
    check_list(needs, found)
    toolchain = Toolchain(*find_compiler(), needs)
    OBJECTS.mkdir(exist_ok=True)
    folder = SITE_PACKAGES / needs.folder
    folder.mkdir(parents=True, exist_ok=True)
    # The slowest first: with ATen's headers one file takes as long as all the others.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        operations = pool.submit(toolchain.compile, SOURCES / "aten" / "operations.cpp", *torch_flags(needs))
        objects = {
            stem: [pool.submit(toolchain.compile, SOURCES / source, "-std=c++17") for source in sources]
            for stem, sources in LIBRARIES.items()
        }
        done = {stem: [future.result() for future in futures] for stem, futures in objects.items()}
        runtime = next(library for library in needs.libraries if library.name.startswith("libcudart."))
        make_library(toolchain, runtime, done["libcudart"], folder, [])
        others = [library for library in needs.libraries if library is not runtime]
        links = [pool.submit(make_library, toolchain, library, done.get(stem_of(library), []), folder, [runtime])
                 for library in others]  # fmt: skip
        for link in links:
            link.result()
        make_operations(toolchain, operations.result(), folder / runtime.name)


def check_list(needs: symbols.Needs, found: symbols.Needs) -> None:
    """Raise if the installed torch needs a function that the list has not, so that it could not be loaded."""
    known = {function for library in needs.libraries for function in library.functions}
    missing = sorted({function for library in found.libraries for function in library.functions} - known)
    if missing:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise BuildError(
            f"torch {found.torch} needs {names}, which symbols/torch-{needs.torch.rpartition('.')[0]}.txt has not: "
            f"write the list anew with `python emulated_gpu/symbols.py {SITE_PACKAGES}`"
        )


def find_compiler() -> tuple[str, str]:
    """Return the C++ compiler and what it says it is."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for name in wanted:
        if compiler := shutil.which(name):
            said = subprocess.run([compiler, "--version"], check=False, capture_output=True, text=True).stdout
            return compiler, said.partition("\n")[0]
    raise BuildError(
        f"there is no C++ compiler here ({', '.join(wanted)}): install one (Debian, Ubuntu: apt-get install g++) or set CXX"
    )


def torch_flags(needs: symbols.Needs) -> list[str]:
    """Return what it takes to compile against torch's headers."""
    include = SITE_PACKAGES / "torch" / "include"
    return [
        "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={needs.cxx11_abi}",
        f"-isystem{include}",
        f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}",
    ]


def stem_of(library: symbols.Library) -> str:
    """Return "libnccl" for libnccl.so.2."""
    return library.name.partition(".")[0]


def make_library(
    toolchain: Toolchain, library: symbols.Library, objects: list[Path], folder: Path, linked: list[symbols.Library]
) -> None:
    """Link one library: its own objects, and a refusal for each other function that torch needs of it."""
    stem = stem_of(library)
    present = functions_in(objects)
    source = OBJECTS / f"{library.name}.c"
    text = STUBS.format(library=library.name, told=int(stem == "libcupti"), result=REFUSALS.get(stem, 1))
    if stem == "libcudnn":  # torch asks for it when it is imported, and compares
        present.add("cudnnGetVersion")
        text += '__attribute__((visibility("default"))) unsigned long cudnnGetVersion(void) { return 92000; }\n'
    text += "".join(f"STUB({function})\n" for function in library.functions if function not in present)
    source.write_text(text)
    versions = OBJECTS / f"{library.name}.map"
    versions.write_text(f"{library.version} {{ global: *; }};\n".lstrip())
    stubs = toolchain.compile(source, "-xc", "-w")
    partial = folder / f".{library.name}.partial"
    toolchain.run(
        ["-shared", "-Wl,-z,defs", f"-Wl,-soname,{library.name}", f"-Wl,--version-script,{versions}", "-Wl,-rpath,$ORIGIN",
         "-o", str(partial), str(stubs), *map(str, objects),
         *(str(folder / other.name) for other in linked if objects), "-lpthread", "-ldl"],
        library.name,
    )  # fmt: skip
    partial.rename(folder / library.name)


def functions_in(objects: list[Path]) -> set[str]:
    """Return the names that objects define."""
    if not objects:
        return set()
    said = subprocess.run(["nm", "--defined-only", "--extern-only", *map(str, objects)],
                          check=True, capture_output=True, text=True).stdout  # fmt: skip
    return {line.split()[-1] for line in said.splitlines() if " T " in line}


def make_operations(toolchain: Toolchain, compiled: Path, runtime: Path) -> None:
    """Link ATen's operations and install the package that has torch load them."""
    package = SITE_PACKAGES / "emulated_gpu"
    package.mkdir(exist_ok=True)
    shutil.copy(HERE / "package" / "__init__.py", package)
    torch = SITE_PACKAGES / "torch" / "lib"
    partial = package / ".libemulated_aten.partial"
    toolchain.run(
        ["-shared", "-o", str(partial), str(compiled), f"-L{torch}", "-lc10", "-lc10_cuda", "-ltorch_cpu",
         "-ltorch_cuda", str(runtime)],
        "ATen's operations",
    )  # fmt: skip
    partial.rename(package / "libemulated_aten.so")
    # torch loads what is registered under "torch.backends" whenever it is imported: in forked and spawned ranks too.
    metadata = SITE_PACKAGES / "emulated_gpu-1.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-gpu\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nemulated_gpu = emulated_gpu:load\n")


if __name__ == "__main__":
    try:
        build()
    except (BuildError, symbols.SymbolsError) as error:
        sys.exit(f"emulated GPU: {error}")
