"""One guarded call from its checked arguments to its outcome, and what a process keeps for that."""
