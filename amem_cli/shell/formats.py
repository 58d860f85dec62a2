"""What `export` and `import` share: the formats."""

from enum import Enum

from kvstore.errors import UsageError


class Format(Enum):
    """How an agent travels: as amem's archive, or as mlx-lm's prompt cache."""

    AMEM = "amem"
    MLX_LM = "mlx-lm"


def check_format(text: str) -> Format:
    """Raises UsageError for an unknown format."""
    try:
        return Format(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a format", "use amem or mlx-lm") from error
