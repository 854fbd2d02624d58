"""Fixtures of the tests that have an API server."""

from __future__ import annotations

import pytest

from tests.support.apiserver.server import ApiServer


@pytest.fixture(params=["HTTP/1.1", "HTTP/2"])
def each_http(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The version of HTTP that is spoken with the API server: each in turn."""
    monkeypatch.setattr(ApiServer, "http2", request.param == "HTTP/2")
    return str(request.param)
