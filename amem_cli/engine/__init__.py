"""The engine: the only code that imports MLX. A faster BLAS must be loaded before MLX."""

from amem_cli.engine.backend.blas import preload

preload()
