from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from steersman.compile.conntrack import ServedPort, stale
from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint
from tests.support.stale import Entry, contains_entry

_addresses = st.sampled_from(["10.96.0.1", "10.96.0.2", "192.0.2.1"])
_sources = st.sampled_from(["10.244.0.1", "10.244.0.2", "10.96.0.1"])
_numbers = st.integers(1, 4)
_ports = st.builds(
    ServedPort,
    protocol=st.sampled_from(Protocol),
    port=_numbers,
    addresses=st.lists(_addresses, max_size=2).map(tuple),
    node_port=st.integers(0, 4),
    endpoints=st.lists(st.builds(Endpoint, _sources, _numbers), max_size=3).map(tuple),
    close_connections=st.booleans(),
)
_entries = st.builds(
    Entry, st.sampled_from([6, 17, 132, 1]), _addresses, _numbers, _sources, _numbers
)


def _is_stale(entry: Entry, ports: list[ServedPort]) -> bool:
    """The rule of behaviour 12, said at length."""
    taking_part = [
        port
        for port in ports
        if port.protocol.number == entry.protocol
        and (port.endpoints if port.protocol is Protocol.UDP else port.close_connections)
    ]
    claims = [
        port
        for port in taking_part
        if entry.destination in port.addresses and entry.destination_port == port.port
    ]
    answering = (entry.source, entry.source_port)
    if not claims:
        claims = [port for port in taking_part if port.node_port == entry.destination_port]
        untouched = answering == (entry.destination, entry.destination_port)
        if untouched and entry.protocol != Protocol.UDP.number:
            return False  # beyond upstream (behaviour 12): it is another program's port
    return bool(claims) and all(
        answering != (endpoint.ip, endpoint.port) for port in claims for endpoint in port.endpoints
    )


@given(st.lists(_ports, max_size=5), _entries)
@example(
    [ServedPort(Protocol.TCP, 80, ("10.96.0.1",), 3, close_connections=True)],
    Entry(6, "10.96.0.1", 3, "10.96.0.1", 3),
)
def test_what_is_stale_is_what_the_rule_says(ports: list[ServedPort], entry: Entry) -> None:
    assert contains_entry(stale(Family.IPV4, ports), entry) is _is_stale(entry, ports)


@given(st.lists(_ports, max_size=5), _entries)
def test_the_protocols_asked_for_cover_all_that_is_stale(
    ports: list[ServedPort], entry: Entry
) -> None:
    found = stale(Family.IPV4, ports)
    assert entry.protocol in found.protocols or not contains_entry(found, entry)


@given(st.lists(_ports, max_size=5), _entries)
def test_the_order_of_services_does_not_matter(ports: list[ServedPort], entry: Entry) -> None:
    one, other = stale(Family.IPV4, ports), stale(Family.IPV4, ports[::-1])
    assert contains_entry(one, entry) == contains_entry(other, entry)
