"""Where records go: one small protocol, and one file for each kind of destination."""
