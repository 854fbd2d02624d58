"""Nodes that look odd and are healthy: nothing of this breaks a connection."""

from __future__ import annotations

from typing import NamedTuple

from tests.kernel.faults.cluster import LOCAL
from tests.kernel.faults.plants import Plant, bpf, ip, iptables, nft, shell, sysctl, together
from tests.support.lab.faulty_node import ENDS, VIP

_PODS = "10.244.0.0/16"


class Oddity(NamedTuple):
    """Something that is odd."""

    name: str
    plant: Plant


def _large(where: str, *devices: str) -> Plant:
    return together(
        *(
            shell(f"ip link set {each} mtu 9000", f"ip link set {each} mtu 1500", where)
            for each in devices
        )
    )


ODDITIES = (
    Oddity("input drops echo requests", iptables("-I INPUT -p icmp --icmp-type 8 -j DROP")),
    Oddity(
        "forward drops echo requests",
        nft("filter hook forward priority 0", "icmp type echo-request drop"),
    ),
    Oddity(
        "another mode left chains that lead nowhere",
        iptables("-t nat -N KUBE-SERVICES", "-t nat -A PREROUTING -j KUBE-SERVICES"),
    ),
    Oddity(
        "docker has its chains",
        iptables(
            "-t nat -N DOCKER",
            "-t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER",
            "-t nat -A DOCKER ! -i docker0 -p tcp --dport 8443 -j DNAT --to-destination 172.17.0.2",
            "-t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
            "-N DOCKER-USER",
            "-A FORWARD -j DOCKER-USER",
            "-A DOCKER-USER -j RETURN",
            "-A FORWARD -i docker0 ! -o docker0 -j ACCEPT",
        ),
    ),
    Oddity("the node has more addresses", ip("addr add 192.0.2.99/24 dev eth0")),
    Oddity("the node has the cluster IP", ip(f"addr add {VIP}/32 dev eth0")),
    Oddity(
        "a policy rule is about other sources",
        together(
            ip("route add blackhole default table 200"),
            ip("rule add from 100.64.0.0/10 lookup 200 pref 60"),
        ),
    ),
    Oddity(
        "a policy rule is about other marks",
        together(
            ip("route add blackhole default table 201"),
            ip("rule add fwmark 0x77/0xff lookup 201 pref 61"),
        ),
    ),
    Oddity(
        "the MTU is 9000 everywhere",
        together(
            _large("192.0.2.1", "cni0", "pod0", "pod1", "pod3"),
            *(_large(address, "eth0") for address in LOCAL),
        ),
    ),
    Oddity("IPv6 is off", sysctl("ipv6/conf/all/disable_ipv6", "1")),
    Oddity(
        "ufw allows what comes",
        iptables(
            "-N ufw-user-input",
            "-A INPUT -j ufw-user-input",
            "-A ufw-user-input -p tcp --dport 22 -j ACCEPT",
            "-A ufw-user-input -p tcp --dport 23 -j DROP",
        ),
    ),
    Oddity(
        "forward drops all but pods",
        together(
            iptables(
                f"-A FORWARD -s {_PODS} -j ACCEPT",
                f"-A FORWARD -d {_PODS} -j ACCEPT",
            ),
            shell("iptables -P FORWARD DROP", "iptables -P FORWARD ACCEPT"),
        ),
    ),
    Oddity(
        "packets of no connection are dropped",
        nft("filter hook forward priority 0", "ct state invalid drop"),
    ),
    Oddity(
        "a network plugin has marks of its own",
        iptables("-t mangle -I PREROUTING -j MARK --set-xmark 0x10000/0xf0000"),
    ),
    Oddity(
        "a hostPort takes another port",
        iptables(
            "-t nat -N CNI-HOSTPORT-DNAT",
            "-t nat -I PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
            "-t nat -A CNI-HOSTPORT-DNAT -p tcp --dport 8443 -j DNAT --to-destination 10.244.0.9",
        ),
    ),
    Oddity(
        "what leaves the pods' network is masqueraded",
        iptables(f"-t nat -A POSTROUTING -s {_PODS} ! -d {_PODS} -j MASQUERADE"),
    ),
    Oddity(
        "a local DNS cache is not tracked",
        iptables("-t raw -I PREROUTING -d 169.254.20.10/32 -p udp --dport 53 -j CT --notrack"),
    ),
    Oddity(
        "another network has a zone",
        nft("filter hook prerouting priority -300", 'iifname "docker0" ct zone set 5'),
    ),
    Oddity("strict reverse path filters", sysctl("ipv4/conf/all/rp_filter", "1")),
    Oddity("other networks have a black hole", ip("route add blackhole 10.244.7.0/24")),
    Oddity(
        "the MSS of connections is clamped",
        iptables(
            "-t mangle -I FORWARD -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"
        ),
    ),
    Oddity(
        "new connections to SSH are limited",
        nft("filter hook input priority 0", "tcp dport 22 limit rate over 3/minute drop"),
    ),
    Oddity("a program of tc lets packets pass", bpf("pod0", "ingress", passes=True)),
    Oddity("a program of XDP lets packets pass", bpf("eth0", "xdp", passes=True)),
    Oddity(
        "a neighbour is permanent, and right",
        shell(
            f"ip neigh replace {ENDS[0]} lladdr 02:00:00:01:00:10 dev cni0 nud permanent",
            f"ip neigh del {ENDS[0]} dev cni0",
        ),
    ),
    Oddity("ephemeral ports overlap node ports", sysctl("ipv4/ip_local_port_range", "30000 60999")),
)
