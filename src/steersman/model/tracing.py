"""What the kernel did with one packet: its steps, and the connection that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from steersman.model.addresses import family_of, join_host_port
from steersman.model.names import Family, Protocol
from steersman.model.plan import Value

STEERSMAN = "steersman"
"""Owner of our own rules, in `TraceStep.owner`."""


class WatchedFlow(Value, frozen=True):
    """The packets to follow: those of one connection, or the first that matches."""

    protocol: Protocol
    destination: str
    """As the client sends it, before any translation; a canonical address."""
    port: int
    source: str = ""
    """The client's address; "" for any."""
    source_port: int = 0
    """0 for any."""

    @property
    def family(self) -> Family:
        """Family of the addresses."""
        return family_of(self.destination)

    def __str__(self) -> str:
        client = join_host_port(self.source or "any", self.source_port)
        where = join_host_port(self.destination, self.port)
        return f"{client.removesuffix(':0')} to {where}/{self.protocol}"


class TraceStep(Value, frozen=True):
    """One thing that the kernel did with the packet."""

    hook: str
    """Where in the kernel: `prerouting`, `input`, `forward`, `output`, `postrouting`, or a hook
    of another kind, such as `connect`."""
    chain: str
    """The chain, or the program, that decided."""
    rule: str
    """The rule in the words of its tool; "" for the end of a chain."""
    verdict: str
    """`accept`, `drop`, `reject`, `jump CHAIN`, `goto CHAIN`, `return`, `continue`, ..."""
    table: str = ""
    """Family and table of the chain, such as `ip kube-proxy`; "" if there is none."""
    handle: int = 0
    """Number by which the rule's tool finds it: the handle of nft, the place in the chain of
    iptables; 0 for none."""
    owner: str = STEERSMAN
    """`STEERSMAN`, or the program that most likely made the rule, such as `Docker`."""
    note: str = ""
    """What changed in the packet, such as `the destination is now 10.1.0.5:8080`."""
    endpoint: str = ""
    """The endpoint that this step chose, as `address:port`; "" if it chose none."""
    direction: Literal["original", "reply"] = "original"

    @property
    def ends(self) -> bool:
        """Whether the packet went no further."""
        return self.verdict in ("drop", "reject")


class TrackedConnection(Value, frozen=True):
    """A connection as the kernel's connection table has it."""

    source: str
    source_port: int
    destination: str
    port: int
    endpoint: str
    """Where the packets really go."""
    endpoint_port: int
    seen_source: str
    """The client that the endpoint sees."""
    seen_port: int
    state: str = ""
    """`replied` if the other side has answered, `unreplied` if not, or the table's own word."""

    @property
    def masqueraded(self) -> bool:
        """Whether the endpoint sees another address than the client's."""
        return self.seen_source != self.source

    def __str__(self) -> str:
        client = join_host_port(self.source, self.source_port)
        text = f"{client} to {join_host_port(self.destination, self.port)}"
        if (self.endpoint, self.endpoint_port) != (self.destination, self.port):
            text += f", carried to {join_host_port(self.endpoint, self.endpoint_port)}"
        if self.masqueraded:
            text += f", which sees {join_host_port(self.seen_source, self.seen_port)}"
        return f"{text} ({self.state})" if self.state else text


class Sighting(Value, frozen=True):
    """A place on this machine where a packet or its answer was seen."""

    kind: Literal["sent", "received", "dropped"]
    """`sent` by a device, after its egress programs; `received` by one, before its ingress ones."""
    netns: int
    """Inode of the network namespace; 0 if it is not known."""
    device: str
    """"" if the packet is on none."""
    source: str
    source_port: int
    destination: str
    port: int
    reply: bool = False
    """Whether it is an answer."""
    what: str = ""
    """Of an answer: `SYN-ACK`, `INIT-ACK`, `a reset`, `a datagram` or `an ICMP error`, whose
    addresses are of the packet that it quotes."""
    mark: int = 0
    """The mark of the packet (fwmark)."""
    length: int = 0
    """Bytes, with IP header."""
    reason: str = ""
    """Of a drop: the kernel's reason, such as `NETFILTER_DROP`; "" before Linux 5.17."""
    function: str = ""
    """Of a drop: the function of the kernel; "" if the kernel hides that."""


DROP_REASONS: Final[Mapping[str, str]] = {
    "NETFILTER_DROP": "a rule of netfilter drops it: a firewall, or a NetworkPolicy",
    "IP_RPFILTER": "its source is reached by another device (net.ipv4.conf.*.rp_filter)",
    "NO_SOCKET": "nothing listens there",
    "IP_INNOROUTES": "there is no route for it",
    "IP_OUTNOROUTES": "there is no route for it",
    "IP_INADDRERRORS": "its addresses may not be forwarded",
    "IP_LOCAL_SOURCE": "its source is an address of this place itself",
    "IP_LOCALNET": "it is for 127.0.0.0/8, but comes from outside",
    "NEIGH_FAILED": "the next hop does not answer ARP or neighbour discovery",
    "PKT_TOO_BIG": "it is larger than the MTU of the next link",
    "TCP_LISTEN_OVERFLOW": "the queue of the listening socket is full",
    "SOCKET_RCVBUFF": "the buffer of the receiving socket is full",
    "QDISC_DROP": "the queue of the device is full",
    "XFRM_POLICY": "an IPsec policy blocks it (ip xfrm policy)",
}
"""What the kernel's reasons for a drop mean."""
