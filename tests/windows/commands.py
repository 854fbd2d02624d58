"""Runs on Windows: several commands of steersman in one process, since a start takes seconds there.

They are separated by "then" among the arguments; after the output of each is its exit status.
"""

from __future__ import annotations

import sys
from itertools import groupby

from steersman.cli.main import main

if __name__ == "__main__":
    for separates, words in groupby(sys.argv[1:], lambda word: word == "then"):
        if not separates:
            print(f"exit status {main([*words])}", flush=True)
