"""The winuserspace mode on Windows' own Python, which Wine runs (scripts/windows.py)."""
