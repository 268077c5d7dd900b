"""Explain a hang after the fact, from whatever the job left behind: logs and flight-recorder dumps.

The way from a file to a report, each module resting only on those above it:

    language    what people are told, in their language; `cause`, `ranks`, `page` and `command_line` say it
    quotations  what somebody quotes, and no job prints
    records     find the inputs, stream them; the lines that matter, without prefixes, wrapped ones joined
    facts       what a line says (`Fact`), what the rules make of all of them (`Verdict`)
    patterns    the table of formats: one row for each thing that a line can say
    passages    what is longer than a line: tracebacks, reports, JSON documents, progress
    recorder    flight-recorder dumps, and what they prove
    ras         one question to NCCL's RAS of a running job
    evidence    all facts together: which rank each speaks of, how many ranks there are
    failures    rules for ranks that failed; `connections`, `witnesses`, `divergence` and `silence` for those that are
                out of reach, named by others, behind or different, and absent
    culprits    the order of all rules
    causes      the class of cause
    decision    what to do
    arithmetic  what an element count tells about the tensor
    report      the report as data, and how it is put together; `render` shows it
    command     the command line

Nothing here needs torch, and all of it runs on Python 3.9. ncclguard itself stands on `language`, `cause`, `ranks`,
`page` and `ras`, so the names below are loaded when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclguard_explain.command import explain, follow
    from ncclguard_explain.records import UnusableInput
    from ncclguard_explain.report import Report

__version__ = "0.1.0"

__all__ = ["Report", "UnusableInput", "explain", "follow"]

_MODULES = {"Report": "report", "UnusableInput": "records", "explain": "command", "follow": "command"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ncclguard_explain' has no attribute {name!r}")
    return getattr(import_module(f"ncclguard_explain.{_MODULES[name]}"), name)
