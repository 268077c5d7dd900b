"""Found by every Python that has this folder in PYTHONPATH: another backend is in gloo's place there.

A suite asks for gloo by its name, or leaves the choice to torch. Where SUITES_BACKEND names a backend,
`init_process_group` and `new_group` of torch.distributed make groups of that one instead; `get_backend` tells its name.
"""

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

BACKEND = os.environ.get("SUITES_BACKEND", "gloo")
MODULE = "torch.distributed.distributed_c10d"


class Finder:
    """Has one module of torch's found as ever, and wraps two of its functions once its body has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own spec, whose loader then also wraps."""
        if name != MODULE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec: Any = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            for function in ("init_process_group", "new_group"):
                setattr(module, function, in_its_place(getattr(module, function)))

        spec.loader.exec_module = exec_module
        return spec


def in_its_place(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes groups of `BACKEND` where gloo is asked for, or would be what a new job gets."""
    signature, begins = inspect.signature(original), original.__name__ == "init_process_group"

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        asked = given.arguments.get("backend")
        if (asked is None and begins) or str(asked).lower() in ("gloo", "cpu:gloo"):
            if BACKEND != "gloo":
                given.arguments["backend"] = BACKEND
            with open(os.environ.get("SUITES_MADE", os.devnull), "ab") as file:
                file.write(b".")  # the recorder counts them
        return original(*given.args, **given.kwargs)

    return function


if BACKEND != "gloo":
    importlib.import_module(BACKEND.partition("-")[0])  # waits for torch, and then registers the name
if BACKEND != "gloo" or "SUITES_MADE" in os.environ:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
