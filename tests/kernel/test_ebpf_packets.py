"""The programs of devices, packet in and packet out (PROG_TEST_RUN), every checksum verified."""

from __future__ import annotations

import errno
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import HashMap
from steersman.modes.ebpf.flows import (
    CLOSING,
    EGRESS,
    ESTABLISHED,
    INGRESS,
    MASQUERADE,
    RESET,
    TO_CLIENT,
    TO_ENDPOINT,
)
from tests.support.lab.ebpf import CHECKSUM_COMPLETE
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.ebpf_packets import (
    ANYWHERE,
    CLIENT,
    CLIENT6,
    EITHER,
    HERE,
    LONELY,
    NEXT,
    NODE,
    NODE6,
    OTHER,
    OWN_PORTS,
    PLAIN,
    POD,
    POD6,
    REDIRECT,
    SAME,
    SHOT,
    VIP,
    VIP6,
    WIDE,
    Programs,
)
from tests.support.lab.frames import (
    ACK,
    ETHERNET,
    FIN,
    RST,
    SCTP,
    SYN,
    TCP,
    UDP,
    complement,
    ip,
    packet,
    pseudo,
    see,
    transport,
    unwrap,
    with_checksum,
)

pytestmark = MARKS


@pytest.fixture(scope="module", params=[True, False], ids=["trusting", "looking"])
def loaded(request: pytest.FixtureRequest) -> Iterator[Programs]:
    made = Programs(trusting=request.param)
    yield made
    made.loaded.close()


@pytest.fixture
def programs(loaded: Programs) -> Programs:
    for learned in (loaded.flows, HashMap(loaded.loaded.maps["fragments"])):
        learned.delete_all([key for key, _ in learned.items()])
    return loaded


FORWARDED = [
    pytest.param((CLIENT, 4000), VIP, (POD, 8080), (NODE, 4000), id="ipv4"),
    pytest.param((CLIENT6, 4000), VIP6, (POD6, 8080), (NODE6, 4000), id="ipv6"),
    pytest.param((CLIENT, 4000), PLAIN, (POD, 8081), (CLIENT, 4000), id="not-masqueraded"),
    pytest.param((POD, 4000), PLAIN, (POD, 8081), (NODE, 4000), id="hairpin"),
]


@pytest.mark.parametrize("protocol", [TCP, UDP, SCTP], ids=["tcp", "udp", "sctp"])
@pytest.mark.parametrize(("client", "vip", "endpoint", "seen_from"), FORWARDED)
def test_there_and_back(
    programs: Programs,
    protocol: int,
    client: tuple[str, int],
    vip: str,
    endpoint: tuple[str, int],
    seen_from: tuple[str, int],
) -> None:
    for payload in (b"", b"four", b"five!", b"x" * 1200):
        there = programs.through(packet(client, (vip, 80), protocol, SYN, payload))
        assert see(there) == (seen_from, endpoint)
        back = programs.through(packet(endpoint, seen_from, protocol, SYN | ACK, payload))
        assert see(back) == ((vip, 80), client)


@pytest.mark.parametrize(("client", "vip", "endpoint", "seen_from"), FORWARDED)
def test_the_sum_that_a_device_has_computed_of_a_packet_stays_right(
    programs: Programs,
    client: tuple[str, int],
    vip: str,
    endpoint: tuple[str, int],
    seen_from: tuple[str, int],
) -> None:
    """The kernel sums up each packet before and after a program (EBADMSG: they differ)."""
    for protocol in (TCP, UDP):
        there, back = (client, (vip, 80)), (endpoint, seen_from)
        try:
            sent = programs.through(packet(*there, protocol), CHECKSUM_COMPLETE)
        except OSError as error:
            if error.errno == errno.EINVAL:
                pytest.skip("this kernel does not sum up the packets of test runs")
            raise
        programs.through(packet(*back, protocol, SYN | ACK), CHECKSUM_COMPLETE)
        icmp, head = (58, MTU6) if ":" in vip else (1, MTU4)
        message = with_checksum(endpoint[0], seen_from[0], icmp, head + sent[14:])
        programs.through(ip(endpoint[0], seen_from[0], icmp, message), CHECKSUM_COMPLETE)


def test_a_udp_datagram_without_checksum_stays_without(programs: Programs) -> None:
    data = transport(UDP, (4000, 80), 0, b"hello")
    out = programs.through(ip(CLIENT, VIP, UDP, data))
    assert see(out) == ((NODE, 4000), (POD, 8080))
    assert unwrap(out)[3][6:8] == b"\0\0"


def test_ip_options_are_stepped_over(programs: Programs) -> None:
    out = programs.through(packet((CLIENT, 4000), (VIP, 80), options=b"\x01" * 8))
    assert see(out) == ((NODE, 4000), (POD, 8080))


def test_two_clients_with_one_port_are_told_apart(programs: Programs) -> None:
    first = see(programs.through(packet((CLIENT, 4000), (VIP, 80))))
    second = see(programs.through(packet(("203.0.113.10", 4000), (VIP, 80))))
    assert first[0] == (NODE, 4000)
    assert second[0][0] == NODE
    assert second[0][1] != 4000
    back = programs.through(packet((POD, 8080), second[0], flags=SYN | ACK))
    assert see(back) == ((VIP, 80), ("203.0.113.10", 4000))


def test_two_connections_with_one_pair_of_ends_are_told_apart(programs: Programs) -> None:
    """By two Services a client's port must not lead to one endpoint: whose answer would it be?"""
    for port in range(4000, 4020):
        client = (CLIENT, port)
        assert see(programs.through(packet(client, (PLAIN, 80)))) == (client, (POD, 8081))
        assert see(programs.through(packet(client, (EITHER, 80)))) == (client, (OTHER, 8081))
        for endpoint, address in ((POD, PLAIN), (OTHER, EITHER)):
            back = programs.through(packet((endpoint, 8081), client, flags=SYN | ACK))
            assert see(back) == ((address, 80), client)


def test_where_there_is_no_other_endpoint_the_second_has_to_wait(programs: Programs) -> None:
    client = (CLIENT, 4000)
    programs.through(packet(client, (PLAIN, 80)))
    assert programs.ingress(packet(client, (SAME, 80)))[0] == SHOT
    programs.through(packet(client, (PLAIN, 80), flags=RST))
    assert see(programs.through(packet(client, (SAME, 80)))) == (client, (POD, 8081))


PORTS = [port for port in range(10_000, 65_536) if not OWN_PORTS[0] <= port <= OWN_PORTS[1]]


def occupy(programs: Programs, state: int, *, client: tuple[str, int] | None = None) -> None:
    """Let connections of other clients, or former ones of one, have all ports to an endpoint."""
    endpoint, node = layout.pack_address(POD), layout.pack_address(NODE)
    for port in PORTS:
        address, own = client or ("203.0.113.77", port)
        ends = layout.pack_address(address), own.to_bytes(2, "big")
        here, there, now = port.to_bytes(2, "big"), (8080).to_bytes(2, "big"), time.monotonic_ns()
        back = layout.FLOW_KEY.pack(endpoint, node, there, here, TCP, INGRESS)
        programs.flows.put(back, layout.FLOW.pack(ends[0], now, ends[1], TO_CLIENT, state, 1))
        if not client:
            forth = layout.FLOW_KEY.pack(ends[0], endpoint, ends[1], there, TCP, EGRESS)
            programs.flows.put(forth, layout.FLOW.pack(node, now, here, MASQUERADE, state, 1))


@pytest.mark.parametrize("state", [CLOSING, RESET])
def test_ports_of_connections_that_are_over_are_taken_again(programs: Programs, state: int) -> None:
    occupy(programs, state)
    ports = set()
    for client in range(33_000, 33_050):
        (node, port), endpoint = see(programs.through(packet((CLIENT, client), (VIP, 80))))
        assert (node, endpoint) == (NODE, (POD, 8080))
        back = programs.through(packet((POD, 8080), (NODE, port), flags=SYN | ACK))
        assert see(back) == ((VIP, 80), (CLIENT, client))
        former = packet(("203.0.113.77", port), (POD, 8080), flags=ACK)
        assert programs.egress(former) == (NEXT, former)  # its entry is gone, too
        ports.add(port)
    assert len(ports) == 50


def test_ports_of_connections_that_go_on_are_not_taken(programs: Programs) -> None:
    occupy(programs, ESTABLISHED)
    answer, inside = programs.ingress(packet((CLIENT, 33_000), (VIP, 80)))
    assert answer == NEXT
    assert programs.egress(inside)[0] == SHOT


def test_a_port_of_an_old_connection_is_taken_and_its_client_keeps_the_new_one(
    programs: Programs,
) -> None:
    assert see(programs.through(packet((CLIENT, 4000), (VIP, 80))))[0] == (NODE, 4000)
    occupy(programs, CLOSING, client=(CLIENT, 4000))
    assert see(programs.through(packet(("203.0.113.77", 33_000), (VIP, 80))))[0][1] in PORTS
    assert see(programs.through(packet((CLIENT, 4000), (VIP, 80), flags=ACK)))[0] == (NODE, 4000)


def test_ports_that_the_node_may_take_itself_are_left_to_it(programs: Programs) -> None:
    first, last = OWN_PORTS
    seen = set()
    for number in range(200):
        source = (CLIENT, first + 100 * number)
        (address, port), _ = see(programs.through(packet(source, (VIP, 80))))
        assert address == NODE
        assert 10000 <= port < first or last < port
        seen.add(port < first)
        back = programs.through(packet((POD, 8080), (NODE, port), flags=SYN | ACK))
        assert see(back) == ((VIP, 80), source)
    assert seen == {True, False}


def test_affinity_leads_nowhere_where_its_frontend_does_not(programs: Programs) -> None:
    for number, (address, endpoint) in enumerate([(ANYWHERE, POD), (HERE, OTHER)] * 2):
        out = programs.through(packet((CLIENT, 4000 + number), (address, 80)))
        assert see(out)[1] == (endpoint, 8080)


def test_affinity_outlives_clocks_that_differ(programs: Programs) -> None:
    """Another CPU, or an older version with another clock, may have used it later than now."""
    affinities = HashMap(programs.loaded.maps["affinities"])
    found = set()
    for port in range(4000, 4008):
        out = programs.through(packet((CLIENT, port), (WIDE, 80)))
        found.add(see(out)[1][0])
        for key, value in affinities.items():
            address, _, end = layout.AFFINITY.unpack(value)
            later = time.monotonic_ns() + 10**9
            affinities.put(key, layout.AFFINITY.pack(address, later, end))
    affinities.delete_all([key for key, _ in affinities.items()])
    assert len(found) == 1


@pytest.mark.parametrize("flags", [ACK, SYN | ACK, FIN | ACK, RST])
@pytest.mark.parametrize("protocol", [TCP, SCTP])
def test_only_a_syn_opens_a_connection(programs: Programs, protocol: int, flags: int) -> None:
    given = packet((CLIENT, 4000), (VIP, 80), protocol, flags)
    assert programs.ingress(given) == (NEXT, given)


@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_nobody_reaches_loopback_over_the_wire(programs: Programs, protocol: int) -> None:
    for flags in (SYN, ACK):
        for port in (80, 7070):
            given = packet((CLIENT, 4000), ("127.0.0.1", port), protocol, flags)
            assert programs.ingress(given)[0] == SHOT


def test_what_is_for_nobody_is_left_alone(programs: Programs) -> None:
    for given in (
        packet((CLIENT, 4000), ("198.51.100.77", 80)),
        packet((CLIENT, 4000), (VIP, 81)),
        ETHERNET + b"\x08\x06" + bytes(28),
        ETHERNET + b"\x08\x00" + b"\x45" + bytes(30),
        ETHERNET + b"\x86\xdd" + b"\x60" + bytes(50),
    ):
        assert programs.ingress(given) == (NEXT, given)
        assert programs.egress(given) == (NEXT, given)


@pytest.mark.parametrize("protocol", [TCP, SCTP])
def test_an_end_is_noticed(programs: Programs, protocol: int) -> None:
    programs.through(packet((CLIENT, 4000), (VIP, 80), protocol))
    programs.through(packet((POD, 8080), (NODE, 4000), protocol, SYN | ACK))
    programs.through(packet((CLIENT, 4000), (VIP, 80), protocol, ACK))
    # The endpoint has sent no more than a SYN: opening, and for TCP "answered".
    assert programs.states() == ({0, 1, 6} if protocol == TCP else {0, 1})
    programs.through(packet((CLIENT, 4000), (VIP, 80), protocol, RST))
    assert programs.states() == {2, 7}


def test_an_association_that_was_never_made_is_given_up(programs: Programs) -> None:
    programs.through(packet((CLIENT, 4000), (VIP, 80), SCTP))
    before = dict(programs.flows.items())
    programs.through(packet((CLIENT, 4000), (VIP, 80), SCTP))
    for key, value in before.items():
        address, last, port, kind, state, service = layout.FLOW.unpack(value)
        elsewhere = layout.pack_address(OTHER) if kind == TO_ENDPOINT else address
        old = layout.FLOW.pack(elsewhere, last - 4 * 10**9, port, kind, state, service)
        programs.flows.put(key, old)
    out = programs.through(packet((CLIENT, 4000), (VIP, 80), SCTP))
    assert see(out)[1] == (POD, 8080)


def test_what_begins_after_an_end_is_another_connection(programs: Programs) -> None:
    programs.through(packet((CLIENT, 4000), (PLAIN, 80)))
    programs.through(packet((CLIENT, 4000), (PLAIN, 80), flags=RST))
    direct = packet((CLIENT, 4000), (POD, 8081))
    assert programs.through(direct) == direct
    answer = packet((POD, 8081), (CLIENT, 4000), flags=SYN | ACK)
    assert programs.through(answer) == answer


@pytest.mark.parametrize("protocol", [TCP, UDP, SCTP])
@pytest.mark.parametrize(
    ("client", "vip", "number", "kind"),
    [(CLIENT, LONELY, 1, b"\x03\x03"), (CLIENT6, "2001:db8:100::3", 58, b"\x01\x04")],
)
@pytest.mark.parametrize("length", [0, 300])
def test_refusal(
    programs: Programs,
    protocol: int,
    client: str,
    vip: str,
    number: int,
    kind: bytes,
    length: int,
) -> None:
    given = packet((client, 4000), (vip, 80), protocol, payload=b"x" * length)
    answer, out = programs.ingress(given)
    source, destination, found, data = unwrap(out)
    assert answer == REDIRECT
    assert (source, destination, found) == (vip, client, number)
    assert data[:2] == kind
    head = b"" if number == 1 else pseudo(vip, client, 58, len(data))
    assert complement(head + data) == 0
    start = 8 + (40 if number == 58 else 20)  # of the quoted transport header
    meant = 6 if protocol == UDP else 8
    assert given[14:].startswith(data[8 : start + meant])
    assert out[:12] == given[6:12] + given[:6]
    if protocol != SCTP:  # a checksum that is left to a device, which stores it there (or 0xFFFF)
        total = complement(data[start:]) or 0xFFFF
        place = start + (16 if protocol == TCP else 6)
        assert complement(head + data[:place] + total.to_bytes(2, "big") + data[place + 2 :]) == 0


@pytest.mark.parametrize(("client", "address"), [(CLIENT, LONELY), (CLIENT6, "2001:db8:100::3")])
def test_refusals_are_limited(client: str, address: str) -> None:
    """Whoever forges the sender could have answers sent anywhere."""
    programs = Programs()
    began = time.monotonic()
    given = packet((client, 4000), (address, 80), UDP)
    answers = Counter(programs.ingress(given)[0] for _ in range(5000))
    seconds = time.monotonic() - began
    programs.loaded.close()
    assert answers.keys() == {REDIRECT, SHOT}
    assert answers[REDIRECT] <= 1000 * (2 + seconds)


def test_a_node_address_that_ends_in_zeros_masquerades(programs: Programs) -> None:
    whole = layout.pack_address(NODE), layout.pack_address(NODE6)
    zeros = "2001:db8:0:1::"
    try:
        programs.device(layout.DEVICE.pack(whole[0], layout.pack_address(zeros), 0, 0))
        out = programs.through(packet((CLIENT6, 4000), (VIP6, 80)))
        assert see(out) == ((zeros, 4000), (POD6, 8080))
        programs.device(layout.DEVICE.pack(bytes(16), bytes(16), 0, 0))
        for client, address in ((CLIENT, VIP), (CLIENT6, VIP6)):
            _, inside = programs.ingress(packet((client, 4001), (address, 80)))
            assert programs.egress(inside)[0] == SHOT
    finally:
        programs.device(layout.DEVICE.pack(*whole, 0, 0))


MTU4 = b"\x03\x04\0\0\0\0\x05\x14"  # fragmentation needed, RFC 1191
MTU6 = b"\x02\x00\0\0\0\0\x05\x14"  # packet too big, RFC 4443
ERRORS = [
    pytest.param(
        CLIENT, VIP, POD, NODE, "192.168.7.1", 1, b"\x03\x04\0\0\0\0\x05\x14", id="mtu-ipv4"
    ),
    pytest.param(CLIENT6, VIP6, POD6, NODE6, "fd00::1", 58, MTU6, id="mtu-ipv6"),
]


@pytest.mark.parametrize(("client", "vip", "pod", "node", "router", "icmp", "head"), ERRORS)
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_an_error_about_what_a_client_sent_reaches_it(
    programs: Programs,
    protocol: int,
    client: str,
    vip: str,
    pod: str,
    node: str,
    router: str,
    icmp: int,
    head: bytes,
) -> None:
    sent = packet((client, 4000), (vip, 80), protocol)
    quoted = programs.through(sent)[14:]
    error = with_checksum(router, node, icmp, head + quoted)
    source, destination, _, data = unwrap(programs.through(ip(router, node, icmp, error)))
    assert (source, destination) == (router, client)
    check = b"" if icmp == 1 else pseudo(router, client, 58, len(data))
    assert complement(check + data) == 0
    inner = ETHERNET + (b"\x08\x00" if icmp == 1 else b"\x86\xdd") + data[8:]
    ends = unwrap(inner)
    assert (ends[0], ends[1]) == (client, vip)
    assert struct.unpack_from("!HH", ends[3]) == (4000, 80)


def test_an_error_about_an_answer_reaches_the_endpoint(programs: Programs) -> None:
    programs.through(packet((CLIENT, 4000), (VIP, 80)))
    quoted = programs.through(packet((POD, 8080), (NODE, 4000), flags=SYN | ACK))[14:]
    error = with_checksum(CLIENT, VIP, 1, b"\x03\x03\0\0\0\0\0\0" + quoted)
    source, destination, _, data = unwrap(programs.through(ip(CLIENT, VIP, 1, error)))
    assert (source, destination) == (NODE, POD)
    assert complement(data) == 0
    inner = unwrap(ETHERNET + b"\x08\x00" + data[8:])
    assert (inner[0], inner[1]) == (POD, NODE)
    assert struct.unpack_from("!HH", inner[3]) == (8080, 4000)


Cut = Callable[[bytes], list[bytes]]


def cut(source: str, destination: str, data: bytes) -> list[bytes]:
    """A datagram of IPv4 in three fragments."""
    more, size = 0x2000, 64
    parts = [data[n : n + size] for n in range(0, len(data), size)]
    last = len(parts) - 1
    return [
        ip(source, destination, UDP, part, fragment=(more if n < last else 0) | n * size // 8)
        for n, part in enumerate(parts)
    ]


def test_fragments_follow_the_first(programs: Programs) -> None:
    data = transport(UDP, (4000, 80), 0, b"y" * 180)
    data = with_checksum(CLIENT, VIP, UDP, data)
    out = [unwrap(programs.through(part)) for part in cut(CLIENT, VIP, data)]
    assert {(source, destination) for source, destination, _, _ in out} == {(NODE, POD)}
    whole = b"".join(part for _, _, _, part in out)
    assert struct.unpack_from("!HH", whole) == (4000, 8080)
    assert complement(pseudo(NODE, POD, UDP, len(whole)) + whole) == 0


def test_a_later_fragment_alone_is_left_alone(programs: Programs) -> None:
    lone = cut(CLIENT, VIP, transport(UDP, (4000, 80), 0, b"y" * 180))[1]
    assert programs.ingress(lone) == (NEXT, lone)
