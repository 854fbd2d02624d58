"""What a test process removes when it ends.

Workers of pytest-xdist end without `atexit`, so the end of their session closes this, too.
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from typing import Final

ENDING: Final = ExitStack()
"""Callbacks of things that many tests of a process share; the last one is called first."""
atexit.register(ENDING.close)
