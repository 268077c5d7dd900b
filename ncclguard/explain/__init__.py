"""Explain a hang after the fact, from whatever the job left behind: logs and flight-recorder dumps.

The way from a file to a report, each module resting only on those above it:

    sources     find the inputs and stream them
    records     the lines that matter, without prefixes, wrapped ones joined
    facts       what a line says (`Fact`), what the rules make of all of them (`Verdict`)
    patterns    the table of formats: one row for each thing that a line can say
    passages    what is longer than a line: tracebacks, reports, JSON documents, progress
    recorder    flight-recorder dumps, and what they prove
    evidence    all facts together: which rank each speaks of, how many ranks there are
    culprits    rules for ranks that failed, are absent, behind or different, and the order of all rules
    causes      the class of cause
    decision    what to do
    arithmetic  what an element count tells about the tensor
    report      the report as data, and how it is put together; `render` shows it
    command     the command line
"""

from __future__ import annotations

from ncclguard.explain.command import explain, follow, main
from ncclguard.explain.records import UnusableInput
from ncclguard.explain.report import Report

__all__ = ["Report", "UnusableInput", "explain", "follow", "main"]
