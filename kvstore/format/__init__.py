"""What each file of a store holds, and the tables of its kinds. Nothing here changes a file."""
