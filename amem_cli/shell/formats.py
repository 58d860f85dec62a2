"""The file formats that `export` writes and `import` reads."""

from enum import Enum
from typing import Annotated

import typer

from kvstore.errors import UsageError


class Format(Enum):
    """amem's own archive, or a prompt cache of mlx-lm."""

    AMEM = "amem"
    MLX_LM = "mlx-lm"


FormatName = Annotated[str, typer.Option("--format", metavar="FORMAT", help="amem, or mlx-lm: a prompt cache.")]


def check_format(text: str) -> Format:
    """The format of that name. Raises UsageError."""
    try:
        return Format(text)
    except ValueError as error:
        raise UsageError(f"unknown format {text!r}", "use amem or mlx-lm") from error
