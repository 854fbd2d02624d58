"""Facts of this machine that plans depend on: hostname, interfaces, addresses. Read, never changed.

linux.py and windows.py ask the system; only the one in use is imported.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec

from steersman.model.inputs import HostFacts

if sys.platform == "win32":
    from steersman.host.windows import address_changes, read_network
else:
    from steersman.host.linux import address_changes, read_network


def hostname() -> str:
    """Return the name of this machine as a node name: trimmed, in lower case (behaviour 1.1)."""
    return socket.gethostname().strip().lower()


def has_interface(name: str) -> bool:
    """Return whether there is an interface of this name, in our network namespace."""
    return any(name == each for _, each in socket.if_nameindex())


async def read_facts() -> HostFacts:
    """Read all facts.

    Raises:
        OSError: the system does not answer (rtnetlink), or netsh cannot be run.
    """
    return msgspec.structs.replace(await read_network(), hostname=hostname())


async def watch_addresses() -> AsyncIterator[HostFacts]:
    """Yield the facts now and whenever they differ from the last ones yielded.

    Raises:
        OSError: see `read_facts`; or no socket can be opened.
    """
    facts = None
    async with aclosing(address_changes()) as changes:
        async for _ in changes:
            latest = await read_facts()
            if latest != facts:
                facts = latest
                yield facts
