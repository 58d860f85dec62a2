"""Generators of project files: `python -m tools` writes the man pages and the shell completions."""
