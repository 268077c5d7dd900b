"""Runs one function in a rank process: ``python -m ncclguard.faults MODULE_OR_FILE FUNCTION JSON_ARGUMENTS``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ncclguard.faults.rank import PATH_VARIABLE, report


def load(module: str) -> ModuleType:
    """Import a module by its name, or by ``name=file`` where the name alone may not be importable here."""
    name, _, file = module.partition("=")
    if not file:
        return importlib.import_module(name)
    try:
        found = importlib.import_module(name)
        if found.__file__ is not None and os.path.samefile(found.__file__, file):
            return found
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module was found; something that it imports is missing
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file; give run_ranks a .py file")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def main() -> None:
    """Call the function with the arguments; what it returns, unless None, is reported as ``returned``."""
    module, name, arguments = sys.argv[1:]
    sys.path.extend(entry for entry in json.loads(os.environ.get(PATH_VARIABLE, "[]")) if entry not in sys.path)
    function: Callable[..., Any] | Any = load(module)
    for part in name.split("."):
        function = getattr(function, part)
    value = function(*json.loads(arguments))
    if value is not None:
        report(returned=value)


if __name__ == "__main__":
    main()
