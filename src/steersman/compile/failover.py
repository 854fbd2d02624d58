"""Which endpoints failover watches: the ready ones of the Services that ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from steersman.compile.endpoints import limited_slices, read_endpoints
from steersman.compile.service import service_ports
from steersman.model.addresses import canonical_ip
from steersman.model.failover import Backend
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import Family, PlanKey


def ejects(service: Service, default: bool) -> bool:
    """Whether a Service's endpoints are ejected: as its annotation says, else the default."""
    annotations = service.metadata.annotations
    word = annotations.eject if annotations is not None else None
    return word == "true" if word in ("true", "false") else default


def watched_pools(
    service: Service,
    slices: Iterable[EndpointSlice],
    families: Sequence[Family],
    node_name: str,
) -> dict[PlanKey, dict[Backend, str]]:
    """Return the ready endpoints of each ServicePort, with the names of their nodes ("": unknown).

    Args:
        service: a Service that is served.
        slices: its EndpointSlices.
        families: the families that this node serves.
        node_name: this node.
    """
    kept, _ = limited_slices(slices)
    nodes = {
        canonical_ip(end.addresses[0]): end.node_name or ""
        for slice_ in kept
        for end in slice_.endpoints or ()
        if end.addresses
    }
    pools: dict[PlanKey, dict[Backend, str]] = {}
    for family in families:
        ports = service_ports(service, family)
        wanted = {(name.port, name.protocol) for name in ports}
        found, _ = read_endpoints(kept, family, node_name, wanted)
        for name in ports:
            states = found.get((name.port, name.protocol), ())
            pools[PlanKey(name, family)] = {
                Backend(state.endpoint.ip, state.endpoint.port, name.protocol): nodes.get(
                    state.endpoint.ip, ""
                )
                for state in states
                if state.ready
            }
    return pools
