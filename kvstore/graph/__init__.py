"""States, the objects that they need, and the refs from which they are reachable."""
