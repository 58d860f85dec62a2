"""Garbage collection: mark, plan, sweep, evict. Begin with `collect.py`."""
