"""Runs on Windows: steersman, in which Ctrl-Break arrives with the first line of standard input.

Wine has no console to press it on.
"""

from __future__ import annotations

import signal
import sys
import threading

from steersman.cli.main import main


def press() -> None:
    sys.stdin.readline()
    signal.raise_signal(vars(signal)["SIGBREAK"])


if __name__ == "__main__":
    threading.Thread(target=press, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
