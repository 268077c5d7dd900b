"""Keep `torch.compile` out of the guard: a guarded call in compiled code is a graph break, in silence."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from pathlib import Path
from typing import Any

from ncclguard._loading import AfterImport

_RULES = "torch._dynamo.trace_rules"
#: The parts of the package that hold models, or that programs are.
_COMPILED = ("integrations", "bench", "faults")


def keep_out() -> None:
    """Have Dynamo neither trace nor compile the library's own code, now or once it has been imported.

    It would warn of each cached function that it meets, and compile code that waits and talks to a store.
    """
    AfterImport(_RULES, _skip_own_code).start()


def _skip_own_code() -> None:
    rules: Any = importlib.import_module(_RULES)
    with contextlib.suppress(AttributeError):  # a torch that has no such list: what it says is only noise
        for module in pkgutil.iter_modules([str(Path(__file__).parents[1])]):
            if module.name not in _COMPILED:
                rules.add(f"ncclguard.{module.name}")
