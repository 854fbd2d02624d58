"""Bring the kernel to the plan: the sync loop, what it owes, and the engine that runs it."""
