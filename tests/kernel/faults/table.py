"""The faults: how each is planted, which connection breaks, and the words of its cause."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import NamedTuple

from tests.kernel.faults import cluster as ways
from tests.kernel.faults.cluster import LOCAL, Cluster, Way
from tests.kernel.faults.plants import (
    Plant,
    bpf,
    ip,
    iptables,
    nft,
    objects,
    shell,
    silent,
    stopped,
    sysctl,
    together,
)
from tests.support.lab.faulty_node import (
    CLIENT,
    ENDS,
    NODE,
    NODE_PORT,
    VIP,
    Object,
    endpoint,
)

NOBODY = "10.244.0.99"
ELSEWHERE = "198.51.100.77"
"""Where remote pods are; the namespace of an address that nobody has."""
NFTABLES, IPTABLES = ("nftables",), ("iptables",)
BOTH = (*NFTABLES, *IPTABLES)
BRIDGE_ROUTES = "; ".join(f"ip route replace {address}/32 dev cni0" for address in LOCAL)


class Fault(NamedTuple):
    """Something that goes wrong, and what doctor must name as the cause."""

    name: str
    plant: Plant
    breaks: Way
    cause: str
    """A regular expression that the named cause matches: it has the object."""
    modes: tuple[str, ...] = BOTH


# Objects


def wrong_target_port(_: Object, slice_: Object) -> None:
    slice_["ports"][0]["port"] = 8090


def a_dead_address(_: Object, slice_: Object) -> None:
    slice_["endpoints"].append(endpoint(NOBODY))


def no_node_port_for_clients(service: Object, slice_: Object) -> None:
    service["spec"]["externalTrafficPolicy"] = "Local"
    slice_["endpoints"] = [endpoint(ENDS[2])]


@contextlib.contextmanager
def loopback_only(cluster: Cluster) -> Iterator[None]:
    """The program of a pod listens on 127.0.0.1 instead of all addresses."""
    with silent(ENDS[0])(cluster):
        lo = cluster.lab.netns(ENDS[0])
        cluster.lab.servers.listen(lo, "127.0.0.1", 8080, "TCP")
        try:
            yield
        finally:
            cluster.lab.servers.silence("127.0.0.1")


@contextlib.contextmanager
def stopped_with_changes(cluster: Cluster) -> Iterator[None]:
    """steersman is stopped, and a pod has ended since."""
    with stopped(cluster), silent(ENDS[0])(cluster):
        yield


@contextlib.contextmanager
def full_backlog(cluster: Cluster) -> Iterator[None]:
    """The program of a pod accepts no connection, and its queue is full."""

    def listen() -> list[socket.socket]:
        server = socket.create_server((ENDS[0], 8080), backlog=0)
        clients = [socket.socket() for _ in range(3)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex((ENDS[0], 8080))
        return [server, *clients]

    with silent(ENDS[0])(cluster):
        pod = cluster.lab.netns(ENDS[0])
        cluster.lab.serve(ENDS[0], 8081, "UDP")
        opened = pod.call(listen)
        try:
            yield
        finally:
            for each in opened:
                each.close()
            cluster.lab.servers.silence(ENDS[0])


def _drop(chain: str, rule: str) -> Plant:
    return nft(f"filter hook {chain} priority 0", rule)


FAULTS = (
    # NAT of others
    Fault(
        "a foreign nat chain before ours takes the cluster IP",
        nft("nat hook prerouting priority -110", f"ip daddr {VIP} dnat to {NOBODY}", family="ip"),
        ways.FROM_POD,
        "table ip other",
    ),
    Fault(
        "a foreign nat chain takes the node's own connections",
        nft("nat hook output priority -110", f"ip daddr {VIP} dnat to {NOBODY}", family="ip"),
        ways.FROM_NODE,
        "table ip other",
    ),
    Fault(
        "a hostPort rule takes the node port",
        iptables(
            "-t nat -N CNI-HOSTPORT-DNAT",
            "-t nat -I PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
            f"-t nat -A CNI-HOSTPORT-DNAT -p tcp --dport {NODE_PORT}"
            f" -j DNAT --to-destination {CLIENT}:9999",
        ),
        ways.FROM_OUTSIDE,
        "CNI-HOSTPORT-DNAT",
    ),
    Fault(
        "a foreign rule masquerades what pods send to endpoints",
        nft("nat hook postrouting priority 90", f"ip saddr {CLIENT} masquerade", family="ip"),
        ways.FROM_POD,
        "table ip other",
    ),
    Fault(
        "a foreign rule gives a wrong source",
        nft(
            "nat hook postrouting priority 90",
            f"ip saddr {CLIENT} snat to 192.0.2.200",
            family="ip",
        ),
        ways.FROM_POD,
        "table ip other",
        modes=("nftables",),
    ),
    Fault(
        "a rule in the client's pod redirects to a proxy that does not run",
        nft(
            "nat hook output priority -100",
            "tcp dport 80 redirect to :15001",
            family="ip",
            where=CLIENT,
        ),
        ways.FROM_POD,
        "table ip other",
    ),
    Fault(
        "an earlier rule of iptables returns the cluster IP untranslated",
        iptables(f"-t nat -I PREROUTING -d {VIP} -j ACCEPT"),
        ways.FROM_POD,
        f"chain PREROUTING.* -d {VIP}/32 -j ACCEPT",
        modes=("iptables",),
    ),
    # Marks, tracking
    Fault(
        "a foreign rule clears the masquerade mark",
        nft("filter hook postrouting priority -10", "meta mark set 0"),
        ways.FROM_OUTSIDE,
        "table inet other",
    ),
    Fault(
        "a foreign rule stops tracking",
        nft("filter hook prerouting priority -300", f"ip daddr {VIP} notrack"),
        ways.FROM_POD,
        "table inet other",
    ),
    Fault(
        "raw of iptables stops tracking",
        iptables(f"-t raw -I PREROUTING -d {VIP} -j CT --notrack"),
        ways.FROM_POD,
        "-d 10.96.0.10/32 -j (CT --notrack|NOTRACK)",
    ),
    Fault(
        "a foreign rule gives one direction a zone of its own",
        nft("filter hook prerouting priority -300", 'iifname "cni0" ct zone set 5'),
        ways.FROM_POD,
        "table inet other",
    ),
    # Filters
    Fault(
        "a policy drops forwarded packets",
        shell("iptables -P FORWARD DROP", "iptables -P FORWARD ACCEPT"),
        ways.FROM_POD,
        "FORWARD.*(policy|-P FORWARD) drop|policy of chain FORWARD",
    ),
    Fault(
        "a rule drops what root sends",
        iptables("-I OUTPUT -p tcp --dport 8080 -m owner --uid-owner 0 -j DROP"),
        ways.FROM_NODE,
        "--uid-owner 0 -j DROP",
    ),
    Fault(
        "a limit of new connections",
        _drop(
            "forward",
            "tcp flags & (syn | ack) == syn limit rate over 1/minute burst 1 packets drop",
        ),
        ways.FROM_POD,
        "table inet other.*limit rate over 1/minute",
    ),
    Fault(
        "a quota is used up",
        _drop("forward", "quota over 1 bytes drop"),
        ways.FROM_POD,
        "table inet other.*quota over 1 bytes",
    ),
    Fault(
        "a limit of connections of one address",
        iptables("-I FORWARD -p tcp -m connlimit --connlimit-above 0 -j REJECT"),
        ways.FROM_POD,
        "connlimit-above 0",
    ),
    Fault(
        "a rule lets packets die of their TTL",
        iptables(f"-t mangle -I PREROUTING -d {VIP} -j TTL --ttl-set 1"),
        ways.FROM_POD,
        "TTL --ttl-set 1",
    ),
    Fault(
        "a rule drops the answers",
        _drop(
            "forward",
            "ip saddr 10.244.0.0/16 tcp sport 8080 tcp flags & (syn | ack) == (syn | ack) drop",
        ),
        ways.FROM_OUTSIDE,
        "table inet other",
    ),
    Fault(
        "a rule drops large packets",
        _drop("forward", "meta length > 1000 drop"),
        ways.LARGE_FROM_POD,
        "table inet other",
    ),
    Fault(
        "a filter in the endpoint's pod",
        nft("filter hook input priority 0", "tcp dport 8080 drop", where=ENDS[0]),
        ways.FROM_POD,
        f"{ENDS[0]}.*table inet other|table inet other.*{ENDS[0]}",
    ),
    Fault(
        "a filter in the client's pod",
        nft("filter hook output priority 0", f"ip daddr {VIP} drop", where=CLIENT),
        ways.FROM_POD,
        f"{CLIENT}.*table inet other|table inet other.*{CLIENT}",
    ),
    Fault(
        "a filter of UDP only",
        _drop("forward", "udp dport 8081 drop"),
        ways.UDP_FROM_POD,
        "table inet other",
    ),
    # Devices
    Fault(
        "a program at tc drops what a pod sends",
        bpf("pod3", "ingress"),
        ways.FROM_POD,
        "tc.*pod3|pod3.*tc",
    ),
    Fault(
        "a program at tc drops what goes to a pod",
        bpf("pod0", "egress"),
        ways.FROM_POD,
        "tc.*pod0|pod0.*tc",
    ),
    Fault(
        "a queueing discipline drops everything",
        shell("tc qdisc add dev pod0 root blackhole", "tc qdisc del dev pod0 root"),
        ways.FROM_POD,
        "pod0.*(blackhole|qdisc)|(blackhole|qdisc).*pod0",
    ),
    Fault(
        "a netdev hook drops what a pod sends",
        nft("filter hook ingress device pod3 priority 0", "drop", family="netdev"),
        ways.FROM_POD,
        "table netdev other",
    ),
    Fault(
        "a chain of the bridge family drops",
        nft(
            "filter hook prerouting priority 0",
            f'iifname "pod3" ip daddr {VIP} drop',
            family="bridge",
        ),
        ways.FROM_POD,
        "table bridge other",
    ),
    Fault(
        "the device of a pod is down",
        shell("ip link set pod0 down", "ip link set pod0 up"),
        ways.FROM_POD,
        # Its pod is a place to try from, too: that packets stop there is the other end of it.
        "pod0.* down|down.* pod0|no carrier: it or the device at its other end is down",
    ),
    Fault(
        "the device in a pod is down",
        shell(
            "ip link set eth0 down",
            "ip link set eth0 up; ip route add default via 169.254.1.1 dev eth0 onlink",
            ENDS[0],
        ),
        ways.FROM_POD,
        f"{ENDS[0]}|pod0",
    ),
    Fault(
        "the port of a pod is blocked on the bridge",
        shell("bridge link set dev pod0 state 0", "bridge link set dev pod0 state 3"),
        ways.FROM_POD,
        "pod0.*(disabled|state|blocked)",
    ),
    Fault(
        "the bridge neither learns where a pod is nor floods frames to it",
        shell(
            "bridge link set dev pod0 learning off flood off; "
            "bridge fdb del 02:00:00:01:00:10 dev pod0 master",
            "bridge link set dev pod0 learning on flood on",
        ),
        ways.FROM_POD,
        "pod0, where flooding and learning are off",
    ),
    Fault(
        "a static entry of the bridge leads to another pod",
        shell(
            "bridge fdb replace 02:00:00:01:00:10 dev pod1 master static sticky",
            "bridge fdb del 02:00:00:01:00:10 dev pod1 master static",
        ),
        ways.FROM_POD,
        f"02:00:00:01:00:10|pod1.*{ENDS[0]}|{ENDS[0]}.*pod1",
    ),
    Fault(
        "the network drops large packets to a pod elsewhere",
        nft("filter hook forward priority 0", "meta length > 1000 drop", where=ELSEWHERE),
        ways.LARGE_FROM_POD,
        f"packets of 1500 bytes.*{ENDS[2]}",
    ),
    # Neighbours, addresses
    Fault(
        "a pod does not answer ARP",
        together(
            shell("ip link set eth0 arp off", "ip link set eth0 arp on", ENDS[0]),
            shell("ip neigh flush dev cni0", ""),
        ),
        ways.FROM_POD,
        f"(neighbour|ARP).*{ENDS[0]}|{ENDS[0]}.*(neighbour|ARP)",
    ),
    Fault(
        "a permanent neighbour is wrong",
        shell(
            f"ip neigh replace {ENDS[0]} lladdr 02:00:00:00:de:ad dev cni0 nud permanent",
            f"ip neigh del {ENDS[0]} dev cni0; ip neigh flush dev cni0",
        ),
        ways.FROM_POD,
        f"(neighbour|02:00:00:00:de:ad).*{ENDS[0]}|{ENDS[0]}.*(neighbour|02:00:00:00:de:ad)",
    ),
    Fault(
        "two pods have one address",
        together(
            shell(
                f"ip addr add {ENDS[0]}/32 dev eth0", f"ip addr del {ENDS[0]}/32 dev eth0", ENDS[1]
            ),
            shell(
                f"ip neigh replace {ENDS[0]} lladdr 02:00:00:01:00:11 dev cni0 nud reachable",
                f"ip neigh del {ENDS[0]} dev cni0",
            ),
        ),
        ways.FROM_POD,
        f"two pods.*{ENDS[0]}|{ENDS[0]} is an address of 2 pods|{ENDS[0]}.*(two|both|another)",
    ),
    Fault(
        "a client's pod has the cluster IP itself",
        ip(f"addr add {VIP}/32 dev lo", CLIENT),
        ways.FROM_POD,
        VIP,
    ),
    Fault(
        "the node has the address of an endpoint",
        ip(f"addr add {ENDS[0]}/32 dev lo"),
        ways.FROM_POD,
        f"{ENDS[0]}.*address of this node|this node.*{ENDS[0]}",
    ),
    # Routes
    Fault(
        "the pod has no route back",
        shell(
            "ip route del default",
            "ip route add default via 169.254.1.1 dev eth0 onlink",
            ENDS[0],
        ),
        ways.FROM_POD,
        f"{ENDS[0]}.*(route|Network is unreachable)",
    ),
    Fault(
        "the gateway of the pod is wrong",
        shell(
            "ip route replace default via 169.254.1.2 dev eth0 onlink",
            "ip route replace default via 169.254.1.1 dev eth0 onlink",
            ENDS[0],
        ),
        ways.FROM_POD,
        f"{ENDS[0]}.*169.254.1.2|169.254.1.2.*{ENDS[0]}",
    ),
    Fault(
        "the route to a pod leads to another device",
        shell(
            f"ip route replace {ENDS[0]}/32 via 169.254.1.1 dev eth1 onlink",
            f"ip route replace {ENDS[0]}/32 dev cni0",
        ),
        ways.FROM_POD,
        f"{ENDS[0]}.*eth1|eth1.*{ENDS[0]}",
    ),
    Fault(
        "an endpoint has an unreachable route",
        shell(
            f"ip route replace unreachable {ENDS[0]}/32",
            f"ip route del unreachable {ENDS[0]}/32; ip route replace {ENDS[0]}/32 dev cni0",
        ),
        ways.FROM_POD,
        f"no route to the endpoint {ENDS[0]}",
    ),
    Fault(
        "a black hole for Service addresses",
        ip("route add blackhole 10.96.0.0/12"),
        ways.FROM_NODE,
        f"no route to {VIP}",
    ),
    Fault(
        "a policy rule sends marked packets into a black hole",
        together(
            ip("route add blackhole default table 99"),
            ip("rule add fwmark 0x4000/0x4000 lookup 99 pref 50"),
        ),
        ways.FROM_OUTSIDE,
        "fwmark 0x4000/0x4000.*99",
    ),
    Fault(
        "a policy rule sends packets of a pod into a black hole",
        together(
            ip("route add blackhole default table 98"),
            ip(f"rule add from {CLIENT} lookup 98 pref 51"),
        ),
        ways.FROM_POD,
        f"from {CLIENT}.*98",
    ),
    Fault(
        "a policy rule prohibits what comes from the bridge",
        ip("rule add iif cni0 prohibit pref 52"),
        ways.FROM_POD,
        "iif cni0.*prohibit",
    ),
    Fault(
        "an unreachable route in the client's pod",
        ip(f"route add unreachable {VIP}/32", CLIENT),
        ways.FROM_POD,
        f"{CLIENT}.*{VIP}|{VIP}.*{CLIENT}",
    ),
    Fault(
        "the reverse path filter is strict, and the way back to a pod is another",
        together(
            sysctl("ipv4/conf/cni0/rp_filter", "1"),
            ip("route add default via 169.254.1.1 dev eth1 onlink table 97"),
            ip(f"rule add to {CLIENT} lookup 97 pref 53"),
        ),
        ways.FROM_POD,
        f"rp_filter.*cni0|cni0.*rp_filter|to {CLIENT}/32 lookup 97",
    ),
    # Settings
    Fault(
        "forwarding is off",
        sysctl("ipv4/ip_forward", "0"),
        ways.FROM_POD,
        "ip_forward is 0",
    ),
    Fault(
        "forwarding is off for the bridge of the pods",
        sysctl("ipv4/conf/cni0/forwarding", "0"),
        ways.FROM_POD,
        "come in by cni0 are not forwarded",
    ),
    # The uplink
    Fault(
        "a rule drops what comes by the uplink",
        iptables("-I FORWARD -i eth0 -j DROP"),
        ways.FROM_OUTSIDE,
        "-i eth0 -j DROP",
        NFTABLES,
    ),
    Fault(
        "a program of XDP drops what comes by the uplink",
        bpf("eth0", "xdp"),
        ways.FROM_OUTSIDE,
        "XDP.*eth0|eth0.*XDP",
        IPTABLES,
    ),
    Fault(
        "a program of tc drops what comes by the uplink",
        bpf("eth0", "ingress"),
        ways.FROM_OUTSIDE,
        "tc.*eth0|eth0.*tc",
        NFTABLES,
    ),
    Fault(
        "forwarding is off for the uplink",
        sysctl("ipv4/conf/eth0/forwarding", "0"),
        ways.FROM_OUTSIDE,
        "come in by eth0 are not forwarded",
        IPTABLES,
    ),
    # More kinds of rules
    Fault(
        "a limit of new connections by address",
        iptables(
            "-I FORWARD -p tcp --syn -m hashlimit --hashlimit-above 1/hour --hashlimit-burst 1"
            " --hashlimit-name sm -j DROP"
        ),
        ways.FROM_POD,
        "hashlimit-above 1/hour",
        IPTABLES,
    ),
    Fault(
        "a rule looks at bytes of the header",
        iptables('-I FORWARD -m u32 --u32 "6&0xFF=6" -j DROP'),
        ways.FROM_POD,
        "-m u32",
        NFTABLES,
    ),
    Fault(
        "a set of iptables has the client",
        together(
            shell(f"ipset create bad hash:ip; ipset add bad {CLIENT}", "ipset destroy bad"),
            iptables("-I FORWARD -m set --match-set bad src -j DROP"),
        ),
        ways.FROM_POD,
        "match-set bad src -j DROP",
        NFTABLES,
    ),
    Fault(
        "half of the connections are dropped by chance",
        _drop("forward", "tcp flags syn numgen random mod 2 == 0 drop"),
        ways.FROM_POD,
        "table inet other",
        NFTABLES,
    ),
    Fault(
        "a rule of iptables-legacy drops what a pod sends",
        shell(
            f"iptables-legacy -I FORWARD -s {CLIENT} -j DROP",
            f"iptables-legacy -D FORWARD -s {CLIENT} -j DROP",
        ),
        ways.FROM_POD,
        f"-s {CLIENT}.* -j DROP",
        IPTABLES,
    ),
    Fault(
        "a foreign rule redirects to a program that does not run",
        nft(
            "nat hook prerouting priority -150",
            "iifname cni0 tcp dport 80 redirect to :15001",
            family="ip",
        ),
        ways.FROM_POD,
        "table ip other",
        NFTABLES,
    ),
    Fault(
        "a rule accepts packets before they are masqueraded",
        iptables("-t nat -I POSTROUTING -j ACCEPT"),
        ways.FROM_OUTSIDE,
        "POSTROUTING.* -j ACCEPT",
        IPTABLES,
    ),
    Fault(
        "a rule resets connections",
        iptables("-I FORWARD -p tcp --dport 8080 -j REJECT --reject-with tcp-reset"),
        ways.FROM_POD,
        "reject-with tcp-reset",
        NFTABLES,
    ),
    Fault(
        "a rule drops by the address before translation",
        iptables(f"-t mangle -I POSTROUTING -m conntrack --ctorigdst {VIP} -j DROP"),
        ways.FROM_POD,
        f"ctorigdst {VIP}",
        IPTABLES,
    ),
    Fault(
        "the node's own packets are not tracked",
        nft("filter hook output priority -300", f"ip daddr {VIP} notrack"),
        ways.FROM_NODE,
        "table inet other",
        NFTABLES,
    ),
    Fault(
        "a netdev hook drops what goes to a pod",
        nft("filter hook egress device pod0 priority 0", "drop", family="netdev"),
        ways.FROM_POD,
        "table netdev other",
        NFTABLES,
    ),
    Fault(
        "a netdev hook sends what comes from a pod to another one",
        nft("filter hook ingress device pod3 priority 0", "fwd to pod1", family="netdev"),
        ways.FROM_POD,
        "table netdev other",
        IPTABLES,
    ),
    # More of devices, addresses and routes
    Fault(
        "the bridge of the pods is down",
        shell("ip link set cni0 down", f"ip link set cni0 up; {BRIDGE_ROUTES}"),
        ways.FROM_POD,
        "cni0.* is down",
        NFTABLES,
    ),
    Fault(
        "a pod has lost its address",
        shell(
            f"ip addr del {ENDS[0]}/32 dev eth0",
            f"ip addr add {ENDS[0]}/32 dev eth0;"
            " ip route replace default via 169.254.1.1 dev eth0 onlink",
            ENDS[0],
        ),
        ways.FROM_POD,
        f"no pod of this node has the address {ENDS[0]}",
        NFTABLES,
    ),
    Fault(
        "the client's network mask is too large",
        ip("addr add 10.96.3.1/12 dev eth0", CLIENT),
        ways.FROM_POD,
        f"next hop {VIP} on eth0",
        IPTABLES,
    ),
    Fault(
        "packets of the client have a TTL of 1",
        sysctl("ipv4/ip_default_ttl", "1", CLIENT),
        ways.FROM_POD,
        "TTL",
        IPTABLES,
    ),
    Fault(
        "a route to one pod is prohibited",
        shell(
            f"ip route replace prohibit {ENDS[0]}/32",
            f"ip route del prohibit {ENDS[0]}/32; ip route replace {ENDS[0]}/32 dev cni0",
        ),
        ways.FROM_POD,
        f"no route .*{ENDS[0]}",
        NFTABLES,
    ),
    Fault(
        "a policy rule prohibits packets to one pod",
        ip(f"rule add to {ENDS[0]} prohibit pref 53"),
        ways.FROM_NODE,
        f"{ENDS[0]}: .*policy rule '53: from all to {ENDS[0]}/32 prohibit'",
        NFTABLES,
    ),
    Fault(
        "a mark of another program leads into a black hole",
        together(
            nft("route hook output priority -150", f"ip daddr {VIP} meta mark set 0x33"),
            ip("route add blackhole default table 133"),
            ip("rule add fwmark 0x33 lookup 133 pref 45"),
        ),
        ways.FROM_NODE,
        "table inet other|fwmark 0x33",
        IPTABLES,
    ),
    Fault(
        "the MTU of the way is small, and nobody is told",
        together(
            shell("ip link set eth1 mtu 1000", "ip link set eth1 mtu 1500"),
            nft("filter hook output priority 0", "icmp type destination-unreachable drop"),
        ),
        ways.LARGE_FROM_POD,
        "the MTU of eth1 is 1000|table inet other",
        NFTABLES,
    ),
    Fault(
        "a route of type throw leaves a pod without one",
        shell(
            f"ip route replace throw {ENDS[0]}/32",
            f"ip route del throw {ENDS[0]}/32; ip route replace {ENDS[0]}/32 dev cni0",
        ),
        ways.FROM_POD,
        f"no route .*{ENDS[0]}.* throw {ENDS[0]}",
        IPTABLES,
    ),
    Fault(
        "a policy rule of a tunnel takes packets to pods elsewhere",
        together(
            ip("route add default via 203.0.113.1 dev eth0 onlink table 90"),
            ip("rule add to 10.244.1.0/24 lookup 90 pref 54"),
        ),
        ways.FROM_POD,
        "to 10.244.1.0/24 lookup 90",
        IPTABLES,
    ),
    Fault(
        "the next hop to a pod elsewhere does not answer",
        shell(
            f"ip route add {ENDS[2]} via 192.0.2.77 dev eth0 onlink table 91;"
            f" ip rule add to {ENDS[2]} lookup 91 pref 55",
            f"ip rule del to {ENDS[2]} lookup 91; ip route flush table 91",
        ),
        ways.FROM_NODE,
        f"next hop 192.0.2.77 on eth0 .*{ENDS[2]}",
        NFTABLES,
    ),
    Fault(
        "the device of a pod does not belong to the bridge",
        shell(
            "ip link set pod0 nomaster",
            "ip link set pod0 master cni0; bridge link set dev pod0 hairpin on",
        ),
        ways.FROM_POD,
        "pod0 does not belong to cni0",
        NFTABLES,
    ),
    Fault(
        "a pod has the address of the node",
        ip(f"addr add {NODE}/32 dev lo", ENDS[0]),
        ways.FROM_NODE,
        f"{ENDS[0]} .*{NODE}, an address of this node",
        IPTABLES,
    ),
    Fault(
        "a pod has the address of the client",
        ip(f"addr add {CLIENT}/32 dev lo", ENDS[0]),
        ways.FROM_POD,
        f"two pods of this node have the address {CLIENT}|{CLIENT} is an address of 2 pods"
        f"|namespace of {ENDS[0]}.* its source is an address of this place itself",
        NFTABLES,
    ),
    Fault(
        "a firewall lets only the node's own clients in",
        nft("filter hook input priority 0; policy drop", "iifname lo accept"),
        ways.FROM_NODE,
        "policy of chain c of table inet other|table inet other, chain c: policy drop",
        IPTABLES,
    ),
    # Endpoints
    Fault(
        "the queue of a pod's program is full",
        full_backlog,
        ways.FROM_POD,
        f"{ENDS[0]}:8080.* does not answer",
        IPTABLES,
    ),
    Fault("the program of one pod has ended", silent(ENDS[0]), ways.FROM_POD, f"{ENDS[0]}:8080"),
    Fault(
        "the program of a pod listens on loopback only",
        loopback_only,
        ways.FROM_POD,
        f"{ENDS[0]}.*127.0.0.1",
    ),
    Fault(
        "the target port is not the one of the program",
        objects(wrong_target_port),
        ways.FROM_POD,
        "8090",
    ),
    Fault(
        "an endpoint has an address of nobody",
        objects(a_dead_address),
        ways.FROM_POD,
        NOBODY,
    ),
    Fault(
        "the network drops packets to a pod elsewhere",
        nft("filter hook forward priority 0", f"ip daddr {ENDS[2]} drop", where=ELSEWHERE),
        ways.FROM_POD,
        f"{ENDS[2]}|table inet other",  # doctor can look into this network
    ),
    # The process
    Fault(
        "steersman is stopped and does not know of a pod's end",
        stopped_with_changes,
        ways.FROM_POD,
        "the running process .* is stopped",
    ),
)


def fault_named(name: str) -> Fault:
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    return fault
