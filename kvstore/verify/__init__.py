"""Verification of a store. Begin with `verify.py`."""
