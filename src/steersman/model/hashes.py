"""The hash functions that names and digests are made with. Pure.

`hashlib` asks OpenSSL for each function that it knows, which takes 0.6 MB; these are CPython's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import blake2b, sha256
else:
    try:
        from _blake2 import blake2b
        from _sha256 import sha256
    except ImportError:  # other names since Python 3.12; a distribution may leave some out
        from hashlib import blake2b, sha256

__all__ = ["blake2b", "sha256"]
