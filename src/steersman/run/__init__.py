"""The running daemon: the sync loop, its State, and the observers of it."""
