"""Where the tests' data is."""

from __future__ import annotations

from pathlib import Path

RECORDED = Path(__file__).parents[1] / "data/upstream"
"""What upstream's kube-proxy v1.36.2 and its API server did; each folder has a README."""
