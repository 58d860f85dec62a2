"""The command `amem`. The version stands here as well as in pyproject.toml, since asking for it costs 10 ms."""

__version__ = "0.1.0"
