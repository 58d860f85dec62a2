"""Models: where they are, how they are identified, loaded, and what their agents take."""
