"""Benchmarks of amem beside what else there is. The engine comes first: its BLAS must be in the process before MLX."""

import amem_cli.engine  # noqa: F401 (imported for its effect)
