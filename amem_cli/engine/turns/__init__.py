"""Turns of agents: begin with `engine.py`; `scheduler.py` runs many turns together."""
