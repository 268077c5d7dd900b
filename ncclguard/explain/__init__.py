"""Explain a hang after the fact, from whatever the job left behind: logs and flight-recorder dumps."""

from __future__ import annotations

from ncclguard.explain.command import explain, follow, main
from ncclguard.explain.report import Report
from ncclguard.explain.sources import UnusableInput

__all__ = ["Report", "UnusableInput", "explain", "follow", "main"]
