"""`python -m amem_cli` is `amem`."""

from amem_cli.main import run

run()
