"""Between an agent's cache and files: the store's blocks, and mlx-lm's prompt caches."""
