"""The shell's own tests use the environment and the store of the commands' tests."""

from tests.commands.conftest import environment, store

__all__ = ["environment", "store"]
