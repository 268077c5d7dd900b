"""Found by every Python that has this folder in PYTHONPATH: another backend is in gloo's place there, or in NCCL's.

A suite asks for SUITES_PLACE ("gloo" or "nccl") by its name, or leaves the choice to torch. `init_process_group` and
`new_group` of torch.distributed make groups of the backend that SUITES_BACKEND names instead; `get_backend` tells its
name. So does gloo's own class, of which torch's tests of gloo make groups without a job.
"""

import datetime
import functools
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

PLACE = os.environ.get("SUITES_PLACE", "gloo")
BACKEND = os.environ.get("SUITES_BACKEND", PLACE)
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
            if PLACE == "gloo":
                module.ProcessGroupGloo = class_in_its_place(module)

        spec.loader.exec_module = exec_module
        return spec


def asked_for(asked: Any, begins: bool) -> str:
    """Return what to ask for instead: the same with `BACKEND` in its place, or "" where no group of it is asked for."""
    if asked is None:
        return {"gloo": BACKEND, "nccl": f"cpu:gloo,cuda:{BACKEND}"}[PLACE] if begins else ""
    if PLACE == "gloo":  # a group that has it beside another backend is not gloo's
        return BACKEND if str(asked).lower() in ("gloo", "cpu:gloo") else ""
    parts = [part.rpartition(":") for part in str(asked).lower().split(",")]
    if PLACE not in [name for _, _, name in parts]:
        return ""
    return ",".join(f"{device}{colon}{BACKEND if name == PLACE else name}" for device, colon, name in parts)


def in_its_place(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes groups of `BACKEND` where `PLACE` is asked for, or is what a new job gets."""
    signature, begins = inspect.signature(original), original.__name__ == "init_process_group"

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if instead := asked_for(given.arguments.get("backend"), begins):
            if BACKEND != PLACE:
                given.arguments["backend"] = instead
            count()
        return original(*given.args, **given.kwargs)

    return function


def class_in_its_place(module: Any) -> Any:
    """Return a class that stands for gloo's own, which a test may make from a store, without a job."""
    gloo, numbers = module.ProcessGroupGloo, itertools.count()

    class Kind(type(gloo)):  # type: ignore[misc] # a class that only torch knows
        def __instancecheck__(cls, made: Any) -> bool:
            return isinstance(made, gloo)

    class ProcessGroupGloo(gloo, metaclass=Kind):  # type: ignore[misc]
        def __new__(cls, store: Any, rank: int, size: int, options: Any = None, **given: Any) -> Any:
            count()
            if BACKEND == "gloo":
                return gloo(store, rank, size, *[options] * (options is not None), **given)
            from ncclguard.torch_compat import new_outside_group

            timeout = getattr(options, "_timeout", given.get("timeout", module.default_pg_timeout))
            if not isinstance(timeout, datetime.timedelta):  # gloo's class takes a number of seconds too
                timeout = datetime.timedelta(seconds=timeout)
            return new_outside_group(BACKEND, store, rank, size, f"made {next(numbers)}", timeout)

    return ProcessGroupGloo


def count() -> None:
    """Count a group for the recorder."""
    with open(os.environ.get("SUITES_MADE", os.devnull), "ab") as file:
        file.write(b".")


if BACKEND != PLACE:
    importlib.import_module(BACKEND.partition("-")[0])  # waits for torch, and then registers the name
if BACKEND != PLACE or "SUITES_MADE" in os.environ:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
