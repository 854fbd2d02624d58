"""The kernel's table of connections, over ctnetlink."""
