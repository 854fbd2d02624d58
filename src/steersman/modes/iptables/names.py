"""Names of tables and chains, and the keys under which their contents are kept. Text only."""

from __future__ import annotations

from steersman.netfilter.names import FILTER, MANGLE, NAT, RuleKey

SERVICES = "KUBE-SERVICES"
EXTERNAL_SERVICES = "KUBE-EXTERNAL-SERVICES"
NODE_PORTS = "KUBE-NODEPORTS"
FORWARD = "KUBE-FORWARD"
PROXY_FIREWALL = "KUBE-PROXY-FIREWALL"
POSTROUTING = "KUBE-POSTROUTING"
MARK_MASQ = "KUBE-MARK-MASQ"
CANARY = "KUBE-PROXY-CANARY"
KUBELET_FIREWALL = "KUBE-FIREWALL"

INVALID_DROPPED, LOCALHOST_ACCEPTED = "ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts"
"""Packet counters of rules with `-m nfacct` (accounting.py)."""

SVC, SVL, EXT, FW, SEP = "KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-", "KUBE-SEP-"
SERVICE_PREFIXES = (SEP, SVC, SVL, EXT, FW)
"""Prefixes of chains that belong to one ServicePort; a chain only leads to ones further left."""

BY_ADDRESS = "KUBE-SVC-BYADDR-"
"""Prefix of the parts of a split KUBE-SERVICES. It begins with KUBE-SVC- on purpose: upstream
collects unknown chains of that prefix as stale, so these vanish when an operator goes back."""

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
"""Chains in which every ServicePort has rules of its own."""

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
"""Chains that belong to the node, rules and all."""

TAIL_COMMENT = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"
LOCALNET_RULE = (
    f"-A {KUBELET_FIREWALL} ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment"
    ' "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT'
    " -j DROP"
)
"""Closes what route_localnet opens (behaviour 15); kubelet may have written it already."""


def last_octet(address: str) -> int:
    """Low eight bits of a canonical address: the part of a split list that it belongs to."""
    if ":" in address:
        return int(address.rpartition(":")[2] or "0", 16) & 255
    return int(address.rpartition(".")[2])


def part_chain(octet: int) -> str:
    """Return the chain that holds the rules of addresses with these low eight bits."""
    return f"{BY_ADDRESS}{octet:02x}"


def is_shared(table: str, chain: str) -> bool:
    """Whether ServicePorts share this chain, so that its rules are kept in groups."""
    if (table, chain) in SHARED_CHAINS:
        return True
    return chain.startswith(BY_ADDRESS) and len(chain) == len(BY_ADDRESS) + 2


def is_ours(table: str, chain: str) -> bool:
    """Whether a chain is made and removed by this mode (behaviour 8.5); KUBE-FIREWALL is not."""
    place = (table, chain)
    if place in SHARED_CHAINS or place in NODE_CHAINS:
        return True
    return table == NAT and chain.startswith(SERVICE_PREFIXES)


def is_kubelets(key: RuleKey) -> bool:
    """Whether an object is shared with kubelet: added if missing, never removed (behaviour 8.1)."""
    return key[3] == KUBELET or key[2] == KUBELET_FIREWALL
