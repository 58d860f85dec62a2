"""Changes of a store that are killed or failed at every mutation of the file system in turn."""
