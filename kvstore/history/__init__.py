"""From a REF to a state, and what happened to an agent. Nothing here writes."""
