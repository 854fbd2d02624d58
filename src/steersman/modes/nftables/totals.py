"""From counts by element to counts by ServicePort, which never fall. Pure.

Frontends of a ServicePort come and go while its endpoints stay: so what an element counts more
than last time is added up, by endpoint and by frontend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from steersman.model.addresses import join_host_port
from steersman.model.names import Family, ServicePortName
from steersman.model.plan import Frontend, ServicePlan
from steersman.modes.base import Made
from steersman.modes.nftables.layout import PROTOCOLS, Kind, pack_address, pack_port, prefix
from steersman.modes.nftables.text import address

Name: TypeAlias = tuple[ServicePortName, str]
_ENDPOINTS_OF = {
    Kind.SERVICE_ENDPOINTS: Kind.SERVICE_IPS,
    Kind.NODEPORT_ENDPOINTS: Kind.SERVICE_NODEPORTS,
}


class Totals:
    """What was counted so far."""

    def __init__(self) -> None:
        """Begin at zero."""
        self._last: Mapping[bytes, int] = {}
        self._made = Made({}, {})

    def update(self, counts: Mapping[bytes, int], plans: Iterable[ServicePlan]) -> Made:
        """Add what is new in the counts (counters.py says by which keys); forget who is gone."""
        owners, frontends, endpoints = self._known(plans)
        for key, count in counts.items():
            before = self._last.get(key, 0)
            more = count - before if count >= before else count  # it was away, and began anew
            size = _size(key)
            owner = owners.get(_frontend(key, size))
            if owner is None:
                continue
            name = (owner[0], _endpoint(key, size)) if size else owner
            totals = endpoints if size else frontends
            if name in totals:
                totals[name] += more
        self._last = counts
        self._made = Made(frontends, endpoints)
        return self._made

    def _known(
        self, plans: Iterable[ServicePlan]
    ) -> tuple[dict[bytes, Name], dict[Name, int], dict[Name, int]]:
        """Frontends by their keys, and the totals of before of all that there is now."""
        owners: dict[bytes, Name] = {}
        endpoints: dict[Name, int] = {}
        for plan in plans:
            for frontend in plan.frontends:
                owners[_key(plan, frontend)] = (plan.key.name, _label(frontend))
            for endpoint in plan.reachable:
                name = (plan.key.name, str(endpoint))
                endpoints[name] = self._made.endpoints.get(name, 0)
        frontends = {name: self._made.frontends.get(name, 0) for name in owners.values()}
        return owners, frontends, endpoints


def _key(plan: ServicePlan, frontend: Frontend) -> bytes:
    name, family = plan.key
    rest = PROTOCOLS[name.protocol] + pack_port(frontend.port)
    if not frontend.address:
        return prefix(Kind.SERVICE_NODEPORTS, family) + rest
    return prefix(Kind.SERVICE_IPS, family) + pack_address(frontend.address) + rest


def _label(frontend: Frontend) -> str:
    if not frontend.address:
        return f"nodePort:{frontend.port}"
    return join_host_port(frontend.address, frontend.port)


def _size(key: bytes) -> int:
    """Length of the endpoint at the end of a key; 0 for a frontend's."""
    return Family(key[1]).bits // 8 + 4 if key[0] in _ENDPOINTS_OF else 0


def _frontend(key: bytes, size: int) -> bytes:
    return prefix(_ENDPOINTS_OF[Kind(key[0])], Family(key[1])) + key[2 : -size - 4] if size else key


def _endpoint(key: bytes, size: int) -> str:
    data = key[-size:]
    return join_host_port(address(data[:-4]), int.from_bytes(data[-4:-2], "big"))
