"""How tests run commands and other processes: begin with `amem`, then `children`."""
