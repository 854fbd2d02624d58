"""CPython's own hash functions are those of `hashlib`, which stands in where they are missing."""

from __future__ import annotations

import hashlib
import runpy
import sys

import pytest

from steersman.model import hashes


@pytest.mark.parametrize("text", [b"", b"default/web:http", bytes(1000)])
def test_they_are_those_of_hashlib(text: bytes) -> None:
    assert hashes.sha256(text).digest() == hashlib.sha256(text).digest()
    sums = (module.blake2b(text, digest_size=8).digest() for module in (hashes, hashlib))
    assert len({*sums}) == 1


@pytest.mark.parametrize("missing", ["_sha256", "_blake2"])
def test_those_that_python_lacks_are_of_openssl(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    found = runpy.run_path(hashes.__file__)
    assert (found["sha256"], found["blake2b"]) == (hashlib.sha256, hashlib.blake2b)
