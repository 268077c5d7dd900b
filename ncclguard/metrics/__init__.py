"""Counters of guarded operations, sinks, the straggler table, and settings that change in a running job."""
