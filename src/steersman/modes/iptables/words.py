"""The kinds of rules of the iptables mode; what each chain is for. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable

from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Ruleset
from steersman.modes.iptables.names import (
    BUCKET,
    EXT,
    EXTERNAL_SERVICES,
    FORWARD,
    FW,
    KUBELET,
    KUBELET_FIREWALL,
    MARK_MASQ,
    NODE_PORTS,
    POSTROUTING,
    PROXY_FIREWALL,
    SEP,
    SERVICE_PREFIXES,
    SERVICES,
    SPLIT,
    SVC,
    SVL,
    TAIL,
    UNKNOWN,
    bucket_chain,
    is_shared,
    last_octet,
)
from steersman.modes.kinds import Kind, PassedBy, Words, iptables_rules
from steersman.modes.words import KernelWords
from steersman.netfilter.iptables.names import (
    FILTER,
    JUMPS,
    NAT,
    RuleKey,
    chain_hash,
    printed_name,
)

_BUCKET = re.compile(rf" -j ({BUCKET}\S+)")
_LEADS_TO = re.compile(rf" -j ({SEP}\S+)")
_DESTINATION = re.compile(r"(?:^| )-d (\S+?)(?:/(?:32|128))? ")


def _names(key: RuleKey, value: str) -> Collection[Hashable]:
    """Return the chain or the group of rules; of foreign rules, their destinations."""
    family, table, chain, part = key
    if part == UNKNOWN:
        return _DESTINATION.findall(value)
    return ((family, part) if is_shared(table, chain) else (family, chain),)


def _rules(rank: int, name: str, purpose: str, passed_by: PassedBy = "") -> Kind:
    return Kind(name, rank, purpose, iptables_rules, _names, passed_by)


_DISPATCH, _OF_SERVICES, _NODE = "rules by destination", "chains of Services", "chains of the node"
_KINDS = {
    # By table and chain, or how the name of a chain begins
    (NAT, SERVICES): _rules(1, _DISPATCH, "new connections by address and port"),
    (NAT, NODE_PORTS): _rules(1, _DISPATCH, "new connections by node port"),
    (NAT, BUCKET): _rules(1, _DISPATCH, "new connections by the last bits of the address"),
    (FILTER, SERVICES): _rules(1, _DISPATCH, "drops or rejects: no endpoint"),
    (FILTER, EXTERNAL_SERVICES): _rules(1, _DISPATCH, "drops or rejects: no endpoint"),
    (FILTER, NODE_PORTS): _rules(1, _DISPATCH, "lets health checks of load balancers in"),
    (FILTER, PROXY_FIREWALL): _rules(1, _DISPATCH, "drops clients in no source range"),
    (NAT, EXT): _rules(2, _OF_SERVICES, "clients outside: chooses the pool of endpoints"),
    (NAT, FW): _rules(2, _OF_SERVICES, "source ranges: only these clients go on"),
    (NAT, SVC): _rules(3, _OF_SERVICES, "chooses among the endpoints of the cluster"),
    (NAT, SVL): _rules(3, _OF_SERVICES, "chooses among the endpoints on this node"),
    (NAT, SEP): _rules(4, _OF_SERVICES, "sends the connection to an endpoint"),
    (NAT, MARK_MASQ): _rules(5, _NODE, "marks connections to be masqueraded", "all"),
    (NAT, POSTROUTING): _rules(5, _NODE, "replaces the source of marked connections", "all"),
    (FILTER, FORWARD): _rules(
        5, _NODE, "lets connections of Services through, whatever the policy is", "all"
    ),
    (FILTER, KUBELET_FIREWALL): _rules(5, _NODE, "closes what route_localnet opens"),
}
_PARTS = {
    # By the part of a chain
    JUMPS: _rules(0, "jumps", "leads packets to this mode's chains", "all"),
    KUBELET: _rules(5, "jumps", "leads packets to a chain that kubelet has, too"),
    SPLIT: _rules(1, _DISPATCH, "looks at the last bits of the address", "all"),
    TAIL: _rules(1, _DISPATCH, "addresses of this node: look at the node ports", "node ports"),
}
_FIRST_BUCKET = _KINDS[NAT, BUCKET]._replace(passed_by="all")
_CANARY = _rules(5, _NODE, "is gone if another program has flushed the table")


class IptablesWords(KernelWords):
    """Rules of the iptables mode."""

    are_rules = True

    def kind_of(self, key: RuleKey) -> Kind:
        """Return the kind of a chain, or of a part of it."""
        _, table, chain, part = key
        if chain.startswith(BUCKET):
            return _FIRST_BUCKET if len(chain) == len(BUCKET) + 1 else _KINDS[NAT, BUCKET]
        start = chain[:-16] if chain[:-16] in SERVICE_PREFIXES else chain
        return _PARTS.get(part) or _KINDS.get((table, start), _CANARY)

    def family_of(self, key: RuleKey) -> int:
        """Return the family that a key begins with."""
        return key[0]

    def names_of(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> set[Hashable]:
        """Return groups by name, chains by the hash in their names, those they lead to."""
        names: set[Hashable] = set()
        for plan in plans:
            printed, family = printed_name(plan.key.name), int(plan.key.family)
            protocol = plan.key.name.protocol.lower()
            names |= {(family, f"{printed} {protocol}"), (family, f"{printed} tcp")}
            hashed = chain_hash(printed + protocol)
            names |= {(family, prefix + hashed) for prefix in SERVICE_PREFIXES}
            names |= {frontend.address for frontend in plan.frontends if frontend.address}
        for (family, _, chain, _), rules in kernel.items():
            if (family, chain) in names:
                names = names | {(family, found) for found in _LEADS_TO.findall(rules)}
        return names

    def is_relevant(self, line: Words, plans: Collection[ServicePlan]) -> bool:
        """Leave out the rules of a split KUBE-SERVICES that lead to other addresses."""
        found = _BUCKET.search(line.text)
        if found is None:
            return True
        octets = {
            last_octet(frontend.address)
            for plan in plans
            for frontend in plan.frontends
            if frontend.address
        }
        return any(bucket_chain(octet).startswith(found[1]) for octet in octets)
