"""What tests share: running commands, making models and stores, damaging them, and reading what is left."""
