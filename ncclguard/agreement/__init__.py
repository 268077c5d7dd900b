"""How ranks agree on what happened: a pure protocol, the store it runs over, and the monitor thread."""
