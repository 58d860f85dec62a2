"""What makes the project's generated files: `python -m tools` writes the man pages and the shells' completions."""
