"""Digests of Services: do two nodes serve the same? Pure.

A digest depends on nothing but a Service's frontends and endpoints, so nodes with the same objects
have the same digests, whatever their mode, zone or version of the kernel. That of a node is the sum
of all of them modulo 2^64: it does not depend on the order, and one Service that changes is
subtracted and added again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from steersman.model.hashes import blake2b
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import ObjectName

_MODULUS = 1 << 64


def digest_of(name: ObjectName, service: Service, slices: Iterable[EndpointSlice]) -> int:
    """Return the digest of a Service, of 64 bits; 0 is never one."""
    spec = service.spec
    ports = {
        (port.name or "", port.protocol or "TCP", port.port, port.node_port or 0)
        for port in spec.ports or ()
    }
    endpoints = set()
    for slice_ in slices:
        numbers = [
            (port.name or "", port.protocol or "TCP", port.port or 0) for port in slice_.ports or ()
        ]
        for each in slice_.endpoints or ():
            state = each.conditions
            ready = state is None or state.ready is not False
            serving = ready if state is None or state.serving is None else state.serving
            flags = (ready, serving, bool(state and state.terminating))
            for address in each.addresses or ():
                endpoints |= {(address, *number, *flags) for number in numbers}
    facts = (
        name,
        spec.type or "ClusterIP",
        sorted(spec.cluster_ips or ([spec.cluster_ip] if spec.cluster_ip else [])),
        sorted(spec.external_ips or ()),
        sorted(ingress.ip or "" for ingress in service.ingress),
        sorted(ports),
        (spec.session_affinity, spec.internal_traffic_policy, spec.external_traffic_policy),
        sorted(endpoints),
    )
    found = blake2b(msgspec.json.encode(facts), digest_size=8).digest()
    return int.from_bytes(found) or 1


class Digests:
    """The digest of each Service, and their sum."""

    def __init__(self) -> None:
        self._known: dict[ObjectName, int] = {}
        self._sum = 0

    @property
    def total(self) -> str:
        """The digest of all Services, in hexadecimal."""
        return f"{self._sum:016x}"

    def put(self, name: ObjectName, digest: int) -> None:
        """Set the digest of a Service; 0 forgets it."""
        before = self._known.pop(name, 0)
        if digest:
            self._known[name] = digest
        self._sum = (self._sum - before + digest) % _MODULUS

    def by_name(self) -> Mapping[str, str]:
        """Return the digest of each Service by `namespace/name`, in hexadecimal."""
        return {str(name): f"{digest:016x}" for name, digest in self._known.items()}
