"""Wait for torch: the guard's hooks go in as soon as a program has imported it, and `ncclguard explain` never needs it.

`import ncclguard` alone must stay cheap (a log is read on login nodes without torch), and a program that imports
ncclguard before torch must still be hooked before its `init_process_group`: a rank that is late for the very first
guarded operation can only be asked where it is when its monitor runs. So an entry of `sys.meta_path` waits for torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Announcing(Loader):
    """A loader that says when the module's body has run."""

    def __init__(self, inner: Loader, waiting: AfterImport) -> None:
        self._inner = inner
        self._waiting = waiting

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)  # runpy asks for get_code, pkgutil for get_data

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        waiting = self._waiting
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner  # what pkgutil, inspect and pickle ask is the real one
        module.__loader__ = self._inner
        waiting.depth += 1
        try:
            self._inner.exec_module(module)
        finally:
            waiting.depth -= 1
        waiting.try_now()


class AfterImport(MetaPathFinder):
    """Calls `load` once: when a module, and whatever module of ncclguard was importing it, has been imported."""

    def __init__(self, module: str, load: Callable[[], None]) -> None:
        self.depth = 0
        self._module = module
        self._load = load

    def start(self) -> None:
        """Call `load` now when the module is there, else when it comes."""
        if sys.modules.get(self._module) is not None and not _being_imported(self._module):
            self._load()
        else:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Look at no further import."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def try_now(self) -> None:
        """Call `load` if no import is under way that it could run into."""
        if self.depth == 0 and self in sys.meta_path and sys.modules.get(self._module) is not None:
            self.stop()
            self._load()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Wrap the loader of the module and of ncclguard's own; every other import is none of our business."""
        if fullname != self._module and not fullname.startswith("ncclguard."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Announcing(spec.loader, self)
        return spec


def _being_imported(name: str) -> bool:
    spec = getattr(sys.modules[name], "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
