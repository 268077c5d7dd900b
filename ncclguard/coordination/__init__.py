"""How the ranks of a job tell each other what happened: store, monitor thread, evidence about other processes."""
