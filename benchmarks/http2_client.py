"""The client of `benchmarks.http2`: a process of its own, which has imported no more than a node's.

    python -m benchmarks.http2_client URL EVENTS

Each byte that it writes asks for so many events. After a zero it says what it spent.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from steersman.model.findings import Finding
from steersman.run.process.memory import freeze_live_objects, tune_at_start
from steersman.source.framing import CONTENT_TYPE
from steersman.source.http import HttpClient
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.objects import decode_object
from steersman.source.store import Store
from steersman.source.tls import TlsContexts
from steersman.source.wire import decode_event, splitter_for

BURST = 20
"""Events at a time."""
_WATCHES = ("services", "nodes", "servicecidrs", "endpointslices")
"""The last one has events."""


class Cost(msgspec.Struct, frozen=True):
    """What the client spent; CPU in microseconds for an event."""

    memory: float
    """kB for the four watches, with what has to be imported."""
    single: float
    """CPU until the bytes of the body are there."""
    burst: float
    single_stored: float
    """CPU until the object is in the Store."""
    burst_stored: float


async def be_client(url: str, events: int) -> Cost:
    """Open the watches and take events."""
    tune_at_start()  # as the daemon
    tls = TlsContexts(ClusterAccess(servers=(url,), insecure=True)).current(None)
    client = HttpClient()
    before = _memory()
    answers = [
        await client.request(f"{url}/{name}?watch=true", patience=600.0, tls=tls)
        for name in _WATCHES
    ]
    memory = _memory() - before
    freeze_live_objects()
    chunks = answers[-1].chunks()
    costs = [
        await _cost(chunks, events, burst, store)
        for store in (None, Store("node"))
        for burst in (1, BURST)
    ]
    os.write(1, bytes(1))
    sys.stdin.read()  # until the server has looked at its connections
    return Cost(memory, *costs)


async def _cost(
    chunks: AsyncIterator[bytes], events: int, burst: int, store: Store | None
) -> float:
    splitter = splitter_for(CONTENT_TYPE)
    ask = bytes([burst])
    begun = time.process_time()
    for _ in range(events // burst):
        os.write(1, ask)
        taken = 0
        while taken < burst:
            for frame in splitter.feed(await anext(chunks)):
                taken += 1
                if store is not None:
                    obj = decode_object("EndpointSlice", decode_event(frame).object)
                    assert not isinstance(obj, Finding), obj
                    store.upsert(obj)
    return (time.process_time() - begun) / (events // burst * burst) * 1e6


def _memory() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e3


if __name__ == "__main__":
    print(msgspec.json.encode(asyncio.run(be_client(sys.argv[1], int(sys.argv[2])))).decode())
