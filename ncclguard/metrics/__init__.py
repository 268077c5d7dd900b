"""What guarded operations cost and how they end: counters, sinks, the straggler
table, and settings that change in a running job.
"""
