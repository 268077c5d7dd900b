"""The versions of torch and NCCL that this process would use, without loading either where possible."""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata

from pydantic import BaseModel

from ncclguard_explain.language import tr

#: The NCCL that the CUDA wheels of each torch bundle (metadata of the wheels).
BUNDLED_NCCL: dict[str, str] = {
    "2.2": "2.19.3",
    "2.3": "2.20.5",
    "2.4": "2.20.5",
    "2.5": "2.21.5",
    "2.6": "2.21.5",
    "2.7": "2.26.2",
    "2.8": "2.27.3",
    "2.9": "2.27.5",
    "2.10": "2.27.5",
    "2.11": "2.28.9",
    "2.12": "2.29.7",
    "2.13": "2.29.7",
    "2.15": "2.30.7",
}
#: The first torch whose "nccl" is the backend nccl2, unless TORCH_DIST_USE_NCCL2 says otherwise.
_NCCL2_SINCE = "2.15"
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers at the front of a version, for comparison.

    Raises ValueError when the text does not begin with a number.

    >>> parse_version("2.13.0+cpu")
    (2, 13, 0)
    """
    match = re.match(r"\d+(?:\.\d+)*", text.strip())
    if match is None:
        raise ValueError(f"not a version: {text!r}")
    return tuple(int(part) for part in match.group().split("."))


def within(version: str, since: str | None, until: str | None) -> bool:
    """Return whether ``since <= version <= until``, compared to the length of each bound (2.13.1 is within until 2.13).

    >>> within("2.7.1", "2.6", "2.7")
    True
    """
    numbers = parse_version(version)
    if since is not None and numbers < parse_version(since):
        return False
    if until is None:
        return True
    bound = parse_version(until)
    return numbers[: len(bound)] <= bound


class Versions(BaseModel, frozen=True):
    """The versions that decide which environment variables are read.

    ``nccl`` is None when torch has none in it and no NCCL package is installed; ``nccl_source`` says where the number
    comes from. ``nccl_assumed`` is the version the variables are written for in that case: the one which the CUDA
    wheels of the same torch bundle. ``nccl2``: "nccl" is the backend nccl2, which reads fewer of the variables.
    """

    torch: str
    nccl: str | None
    nccl_source: str
    nccl_assumed: str | None = None
    nccl2: bool = False

    @property
    def nccl_for_names(self) -> str | None:
        """Return the NCCL version by which names are chosen; None when there is no ground even for a guess."""
        return self.nccl or self.nccl_assumed


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_version() -> str:
    module = sys.modules.get("torch")
    loaded = getattr(module, "__version__", None)
    return str(loaded) if loaded is not None else metadata.version("torch")


def _nccl_of_loaded_torch() -> str | None:
    """Return the version of NCCL in the loaded torch, without initialising CUDA."""
    torch = sys.modules.get("torch")
    native = getattr(torch, "_C", None)
    ask = getattr(native, "_nccl_version", None)
    if ask is None:  # a build without NCCL has no such function
        return None
    number = int(ask())
    # torch.cuda.nccl.version() unpacks the same bits: major 32.., minor 16..31, patch 0..15.
    return f"{number >> 32}.{(number >> 16) & 0xFFFF}.{number & 0xFFFF}"


def detect_versions() -> Versions:
    """Return the versions of torch and NCCL. Raises importlib.metadata.PackageNotFoundError without torch."""
    torch = _torch_version()
    nccl2 = within(torch, _NCCL2_SINCE, None) and os.environ.get("TORCH_DIST_USE_NCCL2", "1") != "0"
    loaded = _nccl_of_loaded_torch()
    if loaded is not None:
        return Versions(torch=torch, nccl=loaded, nccl_source=tr("the loaded torch"), nccl2=nccl2)
    if "+cpu" not in torch:
        for package in _NCCL_PACKAGES:
            version = _package_version(package)
            if version is not None:
                return Versions(
                    torch=torch, nccl=version, nccl_source=tr("the package {name}", name=package), nccl2=nccl2
                )
    minor = ".".join(str(part) for part in parse_version(torch)[:2])
    assumed = BUNDLED_NCCL.get(minor)
    if assumed is None and parse_version(torch) > parse_version(max(BUNDLED_NCCL, key=parse_version)):
        assumed = BUNDLED_NCCL[max(BUNDLED_NCCL, key=parse_version)]
    source = tr("this torch has no NCCL in it")
    return Versions(torch=torch, nccl=None, nccl_source=source, nccl_assumed=assumed, nccl2=nccl2)
