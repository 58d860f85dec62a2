"""The entry point of `amem`, and of `python -m amem_cli`.

A shell requests names at every TAB. That is answered before Typer is loaded, which takes longer than all the rest.
"""

import sys


def run() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["__complete"]:
        from amem_cli.shell.completion import complete

        complete(sys.argv[2:])
    else:
        from amem_cli.main import run as run_command

        run_command()


if __name__ == "__main__":
    run()
