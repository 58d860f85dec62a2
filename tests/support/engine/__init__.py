"""Engines on stores, their turns, and caches filled without a model."""
