"""Begin `ncclguard.watch()` in the ranks of a program that does not know of it: where NCCLGUARD_OBSERVE is set.

A package of its own, because `import ncclguard` takes a second and hooks into torch: every Python process that has the
variable comes by here, launchers and data loaders' workers too, and only a rank that has called `init_process_group`
imports more. Nothing here may raise, or change what the program sees.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing's own would cost every process 10 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

VARIABLE = "NCCLGUARD_OBSERVE"
_OFF = ("", "0", "false", "no", "off")
_MODULE = "torch.distributed.distributed_c10d"


def start() -> None:
    """Wait for torch.distributed, if the variable asks for it; called at the start of the interpreter."""
    if os.environ.get(VARIABLE, "").lower() in _OFF or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _MODULE in sys.modules:  # by another hook of this kind
        _wrap(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Has torch.distributed found as ever, and wraps two of its functions once the module's body has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Ask the other finders for the one module; every other import is none of our business."""
        if fullname != _MODULE:
            return None
        try:
            return self._found(path, target)
        except Exception:  # noqa: BLE001 - who is asked next meets it too, as without this
            return None

    def _found(self, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        others = (finder for finder in tuple(sys.meta_path) if finder is not self)
        found = (finder.find_spec(_MODULE, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # the class's own again
                run(module)
                _wrap(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            loader.exec_module = exec_module  # on this object: its type is what others look at
        return spec


def _wrap(module: Any) -> None:
    """Replace the functions that begin and end a job, before the program can take them."""
    if not hasattr(module, "init_process_group") or hasattr(module.init_process_group, "_ncclguard_observed"):
        return
    _replace(module, "init_process_group", _observed(module.init_process_group, module))
    if hasattr(module, "destroy_process_group"):
        _replace(module, "destroy_process_group", _replaceable(module.destroy_process_group))


def _replace(module: Any, name: str, wrapped: Callable[..., Any]) -> None:
    original = getattr(module, name)
    for place in (module, sys.modules.get("torch.distributed")):
        if getattr(place, name, None) is original:
            setattr(place, name, wrapped)


def _observed(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    from functools import wraps

    @wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _begin(module)
        return result

    init_process_group._ncclguard_observed = True  # type: ignore[attr-defined]
    return init_process_group


def _replaceable(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that the guard, once it is imported, is called around: see ncclguard.torch_compat."""
    from functools import wraps

    @wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        around = destroy_process_group._ncclguard_around  # type: ignore[attr-defined]
        return original(*args, **kwargs) if around is None else around(original, *args, **kwargs)

    destroy_process_group._ncclguard_around = None  # type: ignore[attr-defined]
    return destroy_process_group


def _begin(module: Any) -> None:
    try:
        if module.get_world_size() > 1:
            from ncclguard.watch import observe

            observe.begin()
    except Exception as error:  # noqa: BLE001 - the program's process group is as it should be
        import logging

        logging.getLogger("ncclguard").warning(
            "ncclguard: this rank is not observed: %s: %s", type(error).__name__, error
        )
