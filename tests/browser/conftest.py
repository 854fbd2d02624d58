"""One browser for all tests of this folder, on one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.support.browser import browser, chromium

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        if pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
        if not chromium():
            reason = "no Chromium is installed: `FULL=1 make test` as root installs it"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def chrome() -> AsyncIterator[Browser]:
    async with browser() as running:
        yield running
