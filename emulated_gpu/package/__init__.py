"""An emulated GPU under torch: this package is only importable in an environment of the emulator.

`set("EMULATED_...", value)` changes a setting of this process while it runs; README.md of the emulator has the list.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_FOLDER = Path(__file__).parent


def set(name: str, value: object) -> None:  # noqa: A001 - emulated_gpu.set(...) is how it reads
    """Change a setting of the emulator in this process; raises ValueError for one that it does not know or take."""
    (runtime,) = (_FOLDER.parent / "nvidia").glob("*/lib/libcudart.so.*")
    library = ctypes.CDLL(str(runtime))
    library.emulated_gpu_set.restype = ctypes.c_char_p
    refused = library.emulated_gpu_set(name.encode(), str(value).encode())
    if refused is not None:
        raise ValueError(f"{name}={value}: it {refused.decode()}")


def load() -> None:
    """Have ATen's operations on CUDA tensors computed by the CPU: torch calls this when it is imported."""
    ctypes.CDLL(str(_FOLDER / "libemulated_aten.so"), ctypes.RTLD_GLOBAL)
    # The shapes of results come from meta kernels, many of them written in Python: the first would import this, in the
    # middle of an operation, for a second or more (torch/_compile.py).
    import torch._dynamo  # noqa: F401
