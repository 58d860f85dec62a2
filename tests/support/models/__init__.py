"""Models for tests: two real ones, and tiny ones with random weights, all of which `folders.write` writes."""
