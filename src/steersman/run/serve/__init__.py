"""The HTTP servers of the process."""
