"""The command `amem`. The version is repeated from pyproject.toml, since reading the metadata costs 10 ms."""

__version__ = "0.1.0"
