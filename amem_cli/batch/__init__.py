"""Many agents' turns in one process: request lines, the order in which they run, and their results."""
