"""Ways for ranks to tell each other what happened: store, monitor thread, evidence about other processes."""
