"""`ncclguard hang`: name the rank that holds up a job which hangs now and which nobody prepared.

Nothing here needs torch, and nothing stops or signals a process of the job: stacks are read by py-spy out of running
processes, everything else out of /proc.
"""
