"""Removal of agents, snapshots and domains, and certificates of erasure."""
