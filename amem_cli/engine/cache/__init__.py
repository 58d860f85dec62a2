"""An agent's KV cache in memory, and attention over its codes."""
