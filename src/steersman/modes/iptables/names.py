"""Names of the mode's tables and chains, and the keys under which rules are kept. Pure."""

from __future__ import annotations

from steersman.netfilter.iptables.names import FILTER, MANGLE, NAT, RuleKey

SERVICES = "KUBE-SERVICES"  # nat: by destination address; filter: cluster IPs without endpoints
EXTERNAL_SERVICES = "KUBE-EXTERNAL-SERVICES"  # filter: other destinations without endpoints
NODE_PORTS = "KUBE-NODEPORTS"  # nat: by port; filter: health check node ports
FORWARD = "KUBE-FORWARD"
PROXY_FIREWALL = "KUBE-PROXY-FIREWALL"  # filter: drops by source ranges
POSTROUTING = "KUBE-POSTROUTING"
MARK_MASQ = "KUBE-MARK-MASQ"
CANARY = "KUBE-PROXY-CANARY"  # empty; its absence shows that tables were flushed
KUBELET_FIREWALL = "KUBE-FIREWALL"

INVALID_DROPPED, LOCALHOST_ACCEPTED = "ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts"
"""Packet counters of rules with `-m nfacct` (mode.py)."""

SVC, SVL, EXT, FW, SEP = "KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-", "KUBE-SEP-"
SERVICE_PREFIXES = (SEP, SVC, SVL, EXT, FW)
"""Prefixes of chains that belong to one ServicePort; a chain leads only to ones further left."""

BUCKET = "KUBE-SVC-BYADDR-"
"""Prefix of the buckets of a split KUBE-SERVICES. It begins with KUBE-SVC- on purpose: upstream
removes unknown chains of that prefix as stale, so these vanish if an operator returns to it."""

# Parts of a chain beside WHOLE and JUMPS. A printed name with a protocol is the group of rules of
# one ServicePort; these belong to the node:
TAIL = "node ports"
SPLIT = "split"
UNKNOWN = "unknown"
KUBELET = "kubelet"

SHARED_CHAINS = frozenset(
    {
        (FILTER, SERVICES),
        (FILTER, EXTERNAL_SERVICES),
        (FILTER, NODE_PORTS),
        (FILTER, PROXY_FIREWALL),
        (NAT, SERVICES),
        (NAT, NODE_PORTS),
    }
)
"""Chains that contain rules of every ServicePort."""

NODE_CHAINS = frozenset(
    {
        (FILTER, FORWARD),
        (NAT, POSTROUTING),
        (NAT, MARK_MASQ),
        (FILTER, CANARY),
        (NAT, CANARY),
        (MANGLE, CANARY),
    }
)
"""Chains that belong to the node, with all their rules."""

OWN_CHAINS = (
    *sorted({chain for _, chain in SHARED_CHAINS | NODE_CHAINS}),
    *(KUBELET_FIREWALL, *SERVICE_PREFIXES),
)
"""What the names of the mode's chains begin with. Others use `KUBE-` as well: kube-router has its
network policies in KUBE-ROUTER-* and KUBE-POD-FW-*, CRI-O its host ports in KUBE-HOSTPORTS."""

TAIL_COMMENT = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"
LOCALNET_RULE = (
    f"-A {KUBELET_FIREWALL} ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment"
    ' "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT'
    " -j DROP"
)
"""Closes the hole that route_localnet opens (behaviour 15); kubelet may have written it already."""


def last_octet(address: str) -> int:
    """Return the low eight bits of a canonical address: the bucket that it belongs to."""
    if ":" in address:
        return int(address.rpartition(":")[2] or "0", 16) & 255
    return int(address.rpartition(".")[2])


_BUCKETS = tuple(f"{BUCKET}{octet:02x}" for octet in range(256))


def bucket_chain(octet: int) -> str:
    """Return the chain that holds the rules of addresses with these low eight bits."""
    return _BUCKETS[octet]


def is_shared(table: str, chain: str) -> bool:
    """Return whether ServicePorts share a chain, so that its rules are kept in groups."""
    if (table, chain) in SHARED_CHAINS:
        return True
    return chain.startswith(BUCKET) and len(chain) == len(BUCKET) + 2


def is_ours(table: str, chain: str) -> bool:
    """Return whether this mode makes and removes a chain (behaviour 8.5); not KUBE-FIREWALL."""
    place = (table, chain)
    if place in SHARED_CHAINS or place in NODE_CHAINS:
        return True
    return table == NAT and chain.startswith(SERVICE_PREFIXES)


def is_kubelets(key: RuleKey) -> bool:
    """Return whether kubelet has an object too: added if missing, never removed (behaviour 8.1)."""
    return key[3] == KUBELET or key[2] == KUBELET_FIREWALL
