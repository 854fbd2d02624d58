"""Run the loaded tc and XDP programs on single packets (BPF_PROG_TEST_RUN)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from steersman.model.addresses import family_of
from steersman.model.names import Family, Protocol
from steersman.model.plan import (
    Action,
    Endpoint,
    FamilySettings,
    Frontend,
    FrontendKind,
    NodeSettings,
    Pool,
    ServicePlan,
    Verdict,
)
from steersman.model.ruleset import diff
from steersman.modes.ebpf import layout, render
from steersman.modes.ebpf.bpf import HashMap
from steersman.modes.ebpf.loader import LoadedObject
from steersman.modes.ebpf.tables import Tables
from tests.support.builders.plans import external_ip, key, plan
from tests.support.lab.ebpf import compiled, run_packet

NEXT, SHOT, REDIRECT = -1, 2, 7


OWN_PORTS = (32768, 60999)


LOOPBACK = 1  # the device that test runs take place on


CLIENT, NODE, POD = "203.0.113.9", "192.168.0.2", "10.244.1.5"


VIP, PLAIN, LONELY = "198.51.100.1", "198.51.100.2", "198.51.100.3"


ANYWHERE, HERE, OTHER = "198.51.100.4", "198.51.100.5", "10.244.1.6"


WIDE, EITHER, SAME = "198.51.100.6", "198.51.100.7", "198.51.100.8"


CLIENT6, NODE6, POD6, VIP6 = "2001:db8:99::9", "2001:db8::2", "fd00:10:244:1::5", "2001:db8:100::1"


def at(
    address: str, name: str, endpoints: tuple[Endpoint, ...], action: Action, protocol: Protocol
) -> ServicePlan:
    """The plan of an external IP that does the same with all clients."""
    of = key(f"shop/{name}:{protocol}", protocol, family_of(address))
    return plan(of, external_ip(address, (action,) * 3), cluster=endpoints)


def plans() -> Iterator[ServicePlan]:
    hidden, plain = Action(Verdict.FORWARD, masquerade=True), Action(Verdict.FORWARD)
    for protocol in Protocol:
        yield at(VIP, "hidden", (Endpoint(POD, 8080),), hidden, protocol)
        yield at(PLAIN, "plain", (Endpoint(POD, 8081),), plain, protocol)
        yield at(LONELY, "lonely", (), Action(Verdict.REJECT), protocol)
        yield at(VIP6, "six", (Endpoint(POD6, 8080),), hidden, protocol)
        yield at("2001:db8:100::3", "lonely6", (), Action(Verdict.REJECT), protocol)
    yield sticky()
    both = (Endpoint(POD, 8081), Endpoint(OTHER, 8081))
    yield at(SAME, "same", both[:1], plain, Protocol.TCP)
    yield at(EITHER, "either", both, plain, Protocol.TCP)
    pods = tuple(Endpoint(f"10.244.2.{n}", 8080) for n in range(1, 17))
    wide = at(WIDE, "wide", pods, plain, Protocol.TCP)
    yield msgspec.structs.replace(wide, affinity_seconds=600)


def sticky() -> ServicePlan:
    """With one address that leads to one pool and one that leads to the other."""
    ways = ((ANYWHERE, Action(Verdict.FORWARD)), (HERE, Action(Verdict.FORWARD, Pool.LOCAL)))
    frontends = [Frontend(FrontendKind.EXTERNAL_IP, a, 80, *(way,) * 3) for a, way in ways]
    pools = [Endpoint(POD, 8080)], [Endpoint(OTHER, 8080)]
    return plan("shop/sticky", *frontends, cluster=pools[0], local=pools[1], affinity=600)


class Programs:
    """The two programs, on a device that masquerades as the node."""

    def __init__(self, *, trusting: bool = False) -> None:
        """Load them; where they are trusting, they let packets go whose addresses say enough."""
        self.loaded = LoadedObject(compiled(), None)
        tables = Tables(self.loaded.maps)
        settings = NodeSettings(
            families=(Family.IPV4, Family.IPV6),
            ipv4=FamilySettings(local_addresses=(NODE,), localhost_node_ports=True),
            ipv6=FamilySettings(local_addresses=(NODE6,)),
        )
        want = render.render_node(settings, render.Programs(bytes(16)))
        for each in plans():
            want.update(render.render_service(each))
        tables.write(diff({}, want))
        tables.node.identify(0, OWN_PORTS)
        own = layout.DEVICE.pack(layout.pack_address(NODE), layout.pack_address(NODE6), 0, 0)
        self.device(own)
        tables.presence.allow_new_flows(True)
        if trusting:
            tables.presence.trust(())

    @property
    def flows(self) -> HashMap:
        """The map of flows, for the calling thread."""
        return HashMap(self.loaded.maps["flows"])

    def device(self, value: bytes) -> None:
        """Say what the device is that test runs take place on."""
        devices = HashMap(self.loaded.maps["devices"])
        devices.put(LOOPBACK.to_bytes(4, layout.BYTE_ORDER), value)

    def ingress(self, frame: bytes, flags: int = 0) -> tuple[int, bytes]:
        return run_packet(self.loaded.programs["sm_ingress"], frame, flags=flags)

    def egress(self, frame: bytes, flags: int = 0) -> tuple[int, bytes]:
        return run_packet(self.loaded.programs["sm_egress"], frame, flags=flags)

    def through(self, frame: bytes, flags: int = 0) -> bytes:
        """In by one device and out by another."""
        answer, inside = self.ingress(frame, flags)
        assert answer == NEXT
        answer, out = self.egress(inside, flags)
        assert answer == NEXT
        return out

    def states(self) -> set[int]:
        return {layout.FLOW.unpack(value)[4] for _, value in self.flows.items()}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Programs]:
    made = Programs()
    yield made
    made.loaded.close()


@pytest.fixture
def programs(loaded: Programs) -> Programs:
    """The programs of `loaded`, without a connection."""
    loaded.flows.delete_all([key for key, _ in loaded.flows.items()])
    return loaded
