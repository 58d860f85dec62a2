"""What MLX runs on: the BLAS under it, memory in huge pages, products of several rows."""
