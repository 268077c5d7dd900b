"""Makes `tests.protocol` importable also where pytest is not started as `python -m pytest`: the import mode is importlib."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
