"""Running an ApiServerSource against the test API server: shared by the tests here."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Container, Sized
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from steersman.model.names import ObjectName
from steersman.source.apiserver import ApiServerSource
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.pace import Timing
from steersman.source.store import Store
from tests.support.apiserver.server import ApiServer
from tests.support.apiserver.world import Object
from tests.support.builders import kube
from tests.support.waiting import until

NODE = "node-a"
FAST = Timing(
    first=0.01,
    longest=0.04,
    optional_retry=0.05,
    connect=20.0,
    answer=60.0,
    initial_idle_timeout=60.0,
    initial_total=60.0,
    idle_timeout=60.0,
    steady=0.5,
)
"""Short delays, but patience with a silent server: a machine under load is silent for seconds."""


def timing(**changes: Any) -> Timing:
    return msgspec.structs.replace(FAST, **changes)


IMPATIENT = timing(answer=1.0, initial_idle_timeout=1.0, idle_timeout=1.0)
"""For servers that stall: silence of a second is a failure."""


def service(name: str, ip: str = "10.96.0.1", **metadata: Any) -> Object:
    return kube.service(name, ip, metadata=metadata)


def slice_(name: str, owner: str, *addresses: str, **labels: str) -> Object:
    return kube.endpoint_slice(name, owner, *addresses, labels=labels)


def node(name: str = NODE) -> Object:
    return kube.node(name, podCIDR="10.244.0.0/24")


def service_cidr(cidr: str = "10.96.0.0/12") -> Object:
    return {"kind": "ServiceCIDR", "metadata": {"name": "kubernetes"}, "spec": {"cidrs": [cidr]}}


WORLD = (
    service("cart"),
    service("till", "10.96.0.2"),
    slice_("cart-x", "cart", "10.244.0.1", "10.244.0.2"),
    node(),
    service_cidr(),
)


class WatchedStore(Store):
    """A Store that notes how many objects each complete list had."""

    def __init__(self) -> None:
        super().__init__(NODE)
        self.replaced: list[tuple[str, int]] = []

    def retain(self, kind: str, names: Container[ObjectName], keep: Container[str] = ()) -> None:
        assert isinstance(names, Sized)
        self.replaced.append((kind, len(names)))
        super().retain(kind, names, keep)

    @property
    def services(self) -> set[str]:
        return {name.name for name in self.snapshot.services}

    def addresses(self, service_name: str) -> set[str]:
        slices = self.snapshot.slices.get(ObjectName("shop", service_name), ())
        endpoints = (endpoint for s in slices for endpoint in s.endpoints or ())
        return {address for endpoint in endpoints for address in endpoint.addresses or ()}


@dataclasses.dataclass
class Reading:
    source: ApiServerSource
    store: WatchedStore

    def errors(self, reason: str) -> int:
        return self.source.stats.errors().get(reason, 0)

    async def synced(self) -> None:
        """Until everything is in, and followed."""
        await until(lambda: len({kind for kind, _ in self.store.replaced}) == 4)
        await until(lambda: self.source.stats.connected)


@asynccontextmanager
async def reading(
    target: ApiServer | ClusterAccess,
    *,
    timing: Timing = FAST,
    protobuf: bool = True,
    **how: Any,
) -> AsyncIterator[Reading]:
    """Run a source while the block runs."""
    if isinstance(target, ApiServer):
        target.protobuf = target.protobuf and protobuf
        target = target.access
    source = ApiServerSource(target, NODE, timing=timing, **how)
    store = WatchedStore()
    task = asyncio.create_task(source.run(store))
    try:
        yield Reading(source, store)
        assert not task.done(), "the source ended by itself"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
