"""Found by every Python that has this folder in PYTHONPATH, as `ncclguard observe` sets it; then the environment's own.

Python imports one `sitecustomize`, the first on the path: the next one, which the environment may have, is run from
here, in its own name.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_next() -> None:
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


try:
    from ncclguard_observe import start
except ImportError:  # a Python of another environment
    pass
else:
    start()
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
_run_next()
