"""Every collective of the process observed, also those that the guard does not carry; `watcher` has `watch`."""
