"""Imports nothing that takes time: what a rank finds imported is what its launcher gave it."""

from __future__ import annotations

import sys


def has(module: str) -> bool:
    """Whether this process has imported it."""
    return module in sys.modules
