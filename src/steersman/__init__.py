"""steersman: kube-proxy for every node."""

from typing import Final

__all__ = ["__version__"]

__version__: Final = "1.0.0"
