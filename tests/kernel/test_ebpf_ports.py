"""Ports of masqueraded connections, which the programs and netfilter must not both choose.

test_switch.py shows with connections what becomes of them otherwise.
"""

from __future__ import annotations

import pytest

from steersman.host.netlink import NETLINK_NETFILTER, Netlink
from steersman.model.names import Family
from steersman.modes.ebpf import flows, layout, ports
from steersman.netfilter.conntrack.ports import hold_ports
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.ebpf_packets import (
    CLIENT,
    CLIENT6,
    NODE,
    NODE6,
    POD,
    POD6,
    VIP,
    VIP6,
    Programs,
    loaded,
    programs,
)
from tests.support.lab.frames import ACK, FIN, RST, SYN, TCP, UDP, packet, see
from tests.support.lab.namespace import in_namespace, sh

__all__ = ["loaded", "programs"]  # fixtures
pytestmark = MARKS
ENDS = {
    Family.IPV4: (CLIENT, VIP, POD, NODE),
    Family.IPV6: (CLIENT6, VIP6, POD6, NODE6),
}
NAMES = {TCP: "tcp", UDP: "udp"}
PORT = 20000


def masquerade(
    protocol: int, family: Family, *, state: str = "ESTABLISHED", seconds: int = 600
) -> None:
    """An entry as netfilter makes it for a client of a Service that it masquerades."""
    client, address, pod, node = ENDS[family]
    of_node, of_pod = (f"[{a}]" if ":" in a else a for a in (node, pod))
    sh(
        f"conntrack -I -p {NAMES[protocol]} -s {client} -d {address} --sport {PORT} --dport 80"
        f" --src-nat {of_node}:{PORT} --dst-nat {of_pod}:8080 -t {seconds} -u SEEN_REPLY,ASSURED"
        + (f" --state {state}" if protocol == TCP else "")
        + " 2>/dev/null"
    )


def reserve(programs: Programs) -> None:
    with Netlink(NETLINK_NETFILTER) as netlink:
        ports.reserve_ports(programs.flows, netlink)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_a_connection_of_netfilter_keeps_its_port(
    programs: Programs, protocol: int, family: Family
) -> None:
    client, address, pod, node = ENDS[family]

    async def body() -> None:
        masquerade(protocol, family)
        reserve(programs)
        # Its packets stay as they are, in both directions.
        answer = packet((pod, 8080), (node, PORT), protocol, ACK)
        assert programs.through(answer) == answer
        request = packet((node, PORT), (pod, 8080), protocol, ACK)
        assert programs.through(request) == request
        # A connection of a client with the same port gets another one.
        sent = see(programs.through(packet((client, PORT), (address, 80), protocol, SYN)))
        assert sent[0][0] == node
        assert sent[0][1] != PORT
        back = packet((pod, 8080), sent[0], protocol, SYN | ACK)
        assert see(programs.through(back)) == ((address, 80), (client, PORT))
        assert programs.through(answer) == answer

    in_namespace(body)


def test_a_connection_of_netfilter_that_ends_gives_its_port_back(programs: Programs) -> None:
    async def body() -> None:
        masquerade(TCP, Family.IPV4)
        reserve(programs)
        assert programs.states() == {flows.ESTABLISHED}
        programs.through(packet((POD, 8080), (NODE, PORT), TCP, FIN | ACK))
        assert programs.states() == {flows.CLOSING}

    in_namespace(body)


def test_a_silent_connection_of_netfilter_keeps_its_port_as_long_as_there(
    programs: Programs,
) -> None:
    async def body() -> None:
        masquerade(UDP, Family.IPV4, seconds=20)
        reserve(programs)
        (flow,) = programs.flows.items()
        timeouts = flows.Timeouts()
        _, last, *_ = layout.FLOW.unpack(flow[1])
        for seconds, expired in ((18, {}), (22, dict([flow]))):
            now = last + (timeouts.udp_stream - 20 + seconds) * 10**9
            find = dict([flow]).get
            assert flows.expired_entries(*flow, find, timeouts, now) == expired

    in_namespace(body)


@pytest.mark.parametrize("state", ["TIME_WAIT", "CLOSE"])
def test_an_ended_connection_of_netfilter_keeps_no_port(programs: Programs, state: str) -> None:
    async def body() -> None:
        masquerade(TCP, Family.IPV4, state=state)
        reserve(programs)
        assert not dict(programs.flows.items())

    in_namespace(body)


def test_an_own_connection_is_not_replaced(programs: Programs) -> None:
    async def body() -> None:
        client = (CLIENT, PORT)
        sent = see(programs.through(packet(client, (VIP, 80), TCP, SYN)))
        assert sent[0] == (NODE, PORT)
        masquerade(TCP, Family.IPV4)
        reserve(programs)
        answer = packet((POD, 8080), (NODE, PORT), TCP, SYN | ACK)
        assert see(programs.through(answer)) == ((VIP, 80), client)

    in_namespace(body)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_netfilter_is_kept_from_the_port_of_a_connection(
    programs: Programs, protocol: int, family: Family
) -> None:
    client, address, pod, node = ENDS[family]
    name = f"-f {family.kubernetes.lower()} -p {NAMES[protocol]}"

    def entries() -> list[str]:
        return sh(f"conntrack -L {name} 2>/dev/null").splitlines()

    async def body() -> None:
        programs.through(packet((client, PORT), (address, 80), protocol, SYN))
        with Netlink(NETLINK_NETFILTER) as netlink:
            hold_ports(netlink, ports.ports_in_use(programs.flows.items()), 60)
            (entry,) = entries()
            assert f"src={node} dst={pod} sport={PORT} dport=8080" in entry
            assert f"src={pod} dst={node} sport=8080 dport={PORT}" in entry
            assert "[ASSURED]" in entry
            hold_ports(netlink, ports.ports_in_use(programs.flows.items()), 3600)
        (entry,) = entries()
        seconds = next(int(word) for word in entry.split()[2:] if word.isdigit())
        assert 60 < seconds <= 3600, "prolonged"

    in_namespace(body)


def test_ports_of_ended_and_of_other_connections_are_free(programs: Programs) -> None:
    async def body() -> None:
        masquerade(TCP, Family.IPV4)
        reserve(programs)
        assert not list(ports.ports_in_use(programs.flows.items())), "netfilter's own"
        sent = see(programs.through(packet((CLIENT, 4000), (VIP, 80), TCP, SYN)))
        (held,) = ports.ports_in_use(programs.flows.items())
        assert held[0] == TCP
        programs.through(packet((POD, 8080), sent[0], TCP, RST))
        assert not list(ports.ports_in_use(programs.flows.items()))

    in_namespace(body)


def test_an_entry_with_the_port_is_as_good() -> None:
    """Another program may have made it, from the other side."""

    async def body() -> None:
        masquerade(TCP, Family.IPV4)
        node, pod = (
            layout.without_prefix(layout.pack_address(address)) + port.to_bytes(2, "big")
            for address, port in ((NODE, PORT), (POD, 8080))
        )
        with Netlink(NETLINK_NETFILTER) as netlink:
            hold_ports(netlink, [(TCP, node, pod)], 60)
        assert len(sh("conntrack -L 2>/dev/null").splitlines()) == 1

    in_namespace(body)
