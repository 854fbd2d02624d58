"""Marks in the ebpf mode: packets are let go by them, and never one that is of a flow."""

from __future__ import annotations

import errno
import ipaddress
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from steersman.model.names import Family
from steersman.model.plan import FamilySettings, NodeSettings
from steersman.model.ruleset import diff
from steersman.modes.ebpf import flows, layout, render
from steersman.modes.ebpf.bpf import ArrayMap
from steersman.modes.ebpf.layout import (
    L3_DEVICE_PLACES,
    OFFSETS,
    PRESENCE_BITS,
    Kind,
    pack_address,
)
from steersman.modes.ebpf.presence import PresenceFilter, places_of
from steersman.modes.ebpf.tables import Tables
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.ebpf_packets import (
    CLIENT,
    CLIENT6,
    LOOPBACK,
    NEXT,
    NODE,
    POD,
    POD6,
    SHOT,
    VIP,
    VIP6,
    Programs,
)
from tests.support.lab.frames import ACK, SYN, packet, see

pytestmark = MARKS
PLACES, MARK = 1 << PRESENCE_BITS, layout.SIZES["mark"]
AT = OFFSETS["marks"]


def serve_cidrs(programs: Programs, cidrs: tuple[str, ...]) -> Callable[[], None]:
    """Add ServiceCIDRs; return a function that removes them."""
    own = FamilySettings(service_cidrs=cidrs)
    settings = NodeSettings(families=(Family.IPV4,), ipv4=own)
    objects = render.render_node(settings, render.Programs(bytes(16)))
    prefixes = {key: value for key, value in objects.items() if key[:1] == Kind.PREFIX}
    tables = Tables(programs.loaded.maps)
    tables.write(diff({}, prefixes))
    return lambda: tables.write(diff(prefixes, {}))


@pytest.mark.parametrize("trusting", [True, False], ids=["filter", "no filter"])
@pytest.mark.parametrize("number", [1, 5])
def test_addresses_of_service_cidrs_without_a_service_are_dropped(
    number: int, trusting: bool
) -> None:
    programs = Programs(trusting=trusting)
    remove = serve_cidrs(programs, tuple(f"10.{96 + n}.0.0/16" for n in range(number)))
    inside = [packet((CLIENT, 4000), (f"10.{96 + n}.7.7", 80)) for n in range(number)]
    beside = packet((CLIENT, 4000), (f"10.{96 + number}.7.7", 80))
    assert {programs.ingress(each)[0] for each in inside} == {SHOT}
    assert programs.ingress(beside)[0] == NEXT
    remove()
    assert {programs.ingress(each)[0] for each in inside} == {NEXT}
    programs.loaded.close()


class Marked(Programs):
    """Programs that rely on marks, and the marks themselves."""

    def __init__(self) -> None:
        super().__init__(trusting=True)
        self.memory = ArrayMap(self.loaded.maps["marks"]).whole()
        self.presence = PresenceFilter(self.loaded.maps["marks"])

    def renew(self) -> None:
        for _ in self.presence.renew(lambda: flows.clients_of(self.flows)):
            pass

    def marks(self) -> set[int]:
        """Places that are marked for clients."""
        start = AT["places"]
        marks = self.memory[start : start + PLACES * MARK : MARK].tobytes()
        return {place for place, mark in enumerate(marks) if mark}

    def clients(self) -> set[bytes]:
        return set(flows.clients_of(self.flows))

    @property
    def trusted(self) -> bool:
        return bool(self.memory[AT["trusted"]])


@pytest.fixture
def marked() -> Iterator[Marked]:
    made = Marked()
    yield made
    made.loaded.close()


@contextmanager
def flow(marked: Marked, port: int, client: str = CLIENT) -> Iterator[None]:
    """A connection that still works when this ends."""
    vip, pod = (VIP6, POD6) if ":" in client else (VIP, POD)
    there = see(marked.through(packet((client, port), (vip, 80))))
    assert there[1] == (pod, 8080)
    yield
    assert see(marked.through(packet((client, port), (vip, 80), flags=ACK))) == there
    back = marked.through(packet(there[1], there[0], flags=SYN | ACK))
    assert see(back) == ((vip, 80), (client, port))


@pytest.mark.parametrize("client", [CLIENT, CLIENT6])
def test_programs_and_we_mark_the_same_places(marked: Marked, client: str) -> None:
    with flow(marked, 4000, client):
        before = marked.clients()
        assert pack_address(client) in before
        assert marked.marks() == places_of(before)


def test_addresses_spread() -> None:
    near = [pack_address(str(ipaddress.ip_address("10.244.0.0") + n)) for n in range(1000)]
    far = [secrets.token_bytes(16) for _ in range(1000)]
    for addresses in (near, far):
        assert len(places_of(addresses)) > 900


def test_an_unmarked_packet_is_not_looked_at(marked: Marked) -> None:
    """What tells it: a flow that nobody has marked is passed over, until no mark is trusted."""
    with flow(marked, 4000):
        pass
    marked.memory[AT["places"] : AT["places"] + PLACES * MARK] = bytes(PLACES * MARK)
    given = packet((CLIENT, 4000), (VIP, 80), flags=ACK)
    assert marked.ingress(given) == (NEXT, given)
    marked.presence.distrust()
    assert see(marked.ingress(given)[1])[1] == (POD, 8080)
    with flow(marked, 4000):
        marked.presence.serve([pack_address(VIP)])
        marked.presence.trust(flows.clients_of(marked.flows))


def crowd(marked: Marked) -> None:
    marked.memory[AT["places"] : AT["places"] + PLACES * MARK : MARK] = b"\1" * PLACES


def test_a_crowd_of_marks_goes_and_flows_stay(marked: Marked) -> None:
    with flow(marked, 4000), flow(marked, 4001, CLIENT6):
        marked.renew()
        before = marked.marks()
        crowd(marked)
        steps = marked.presence.renew(lambda: flows.clients_of(marked.flows))
        next(steps)
        assert not marked.trusted
        with flow(marked, 4002, "203.0.113.77"):
            assert list(steps) == []
            assert marked.trusted
            assert before < marked.marks() == places_of(marked.clients())


def test_a_renewal_that_fails_is_done_again(marked: Marked) -> None:
    def fails() -> Iterator[bytes]:
        raise OSError(errno.ENOMEM, "no memory")

    with flow(marked, 4000):
        crowd(marked)
        with pytest.raises(OSError, match="no memory"):
            list(marked.presence.renew(fails))
        with flow(marked, 4001, CLIENT6):
            assert not marked.trusted
            marked.renew()
            assert marked.trusted
            assert marked.marks() == places_of(marked.clients())


def test_marks_that_are_distrusted_meanwhile_stay_so(marked: Marked) -> None:
    """Programs of another version may be attached, which write none of them."""
    with flow(marked, 4000):
        crowd(marked)
        steps = marked.presence.renew(lambda: flows.clients_of(marked.flows))
        next(steps)
        marked.presence.distrust()
        assert list(steps) == []
        marked.renew()
        assert not marked.trusted


def test_devices_without_ethernet_share_places_with_others(marked: Marked) -> None:
    given = packet((CLIENT, 4000), (VIP, 80))
    marked.presence.set_l3_devices([LOOPBACK + L3_DEVICE_PLACES])
    assert see(marked.ingress(given)[1])[1] == (POD, 8080)
    marked.presence.set_l3_devices([])
    assert not any(marked.memory[AT["bare"] : AT["bare"] + L3_DEVICE_PLACES])
    own = layout.DEVICE.pack(pack_address(NODE), bytes(16), layout.DEVICE_NO_ETHERNET, 0)
    marked.device(own)
    marked.presence.set_l3_devices([LOOPBACK])
    assert marked.ingress(given) == (NEXT, given)  # it begins with no IP header
