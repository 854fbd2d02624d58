"""The running daemon: the sync loop, its State, and what is reported about it."""
