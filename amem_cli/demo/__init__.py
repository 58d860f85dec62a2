"""What `amem demo` is made of: a text of its own, and a runner of commands."""
