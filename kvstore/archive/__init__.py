"""Agents in one file: `export.py` writes an archive, `import_agent.py` reads one, `tar.py` is its format."""
