"""How a state gets to disk: a transaction stages new files, and the move of one ref commits them."""
