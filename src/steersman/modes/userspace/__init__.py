"""The userspace mode: a proxy that really proxies, with or without rules that lead to it."""
