"""The engine: the only code that imports MLX. A faster BLAS must be in the process before MLX is."""

from amem_cli.engine.backend.blas import preload

preload()
