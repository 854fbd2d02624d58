"""Print the modules with full branch coverage, as patterns for `coverage report --include`.

They are listed in pyproject.toml: the pure ones, which tests/test_architecture.py keeps pure, and
`covered`, which touch the kernel or the clock, but have every branch tested all the same.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    listed = project["tool"]["steersman"]
    print(",".join(f"*/steersman/{pattern}" for pattern in (*listed["pure"], *listed["covered"])))
