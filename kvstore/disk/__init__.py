"""The file system: every change of it, locks, canonical JSON, hashes of files."""
