"""The rules of a Service as iptables-save prints them, each with its purpose. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Ruleset
from steersman.modes.iptables.names import (
    BUCKET,
    CANARY,
    EXT,
    FW,
    MARK_MASQ,
    NODE_CHAINS,
    POSTROUTING,
    SEP,
    SERVICE_PREFIXES,
    SPLIT,
    SVC,
    SVL,
    TAIL,
    UNKNOWN,
    bucket_chain,
    is_shared,
    last_octet,
)
from steersman.modes.kernel_words import KernelWords, Words, purpose_of
from steersman.netfilter.iptables.names import JUMPS, WHOLE, RuleKey, chain_hash, printed_name

_BUCKET = re.compile(rf" -j ({BUCKET}\S+)")
_IS_FIRST_BUCKET = re.compile(rf"{BUCKET}[0-9a-f]").fullmatch
_LEADS_TO = re.compile(rf" -j ({SEP}\S+)")
_DESTINATION = re.compile(r"(?:^| )-d (\S+?)(?:/(?:32|128))? ")

_PURPOSES: tuple[tuple[str, re.Pattern[str], str], ...] = tuple(
    (chain, re.compile(pattern), purpose)
    for chain, pattern, purpose in (
        # Chain (or how its name begins), what the rule has, and what it is for.
        ("KUBE-FORWARD", r"INVALID", "drops packets that conntrack cannot place"),
        ("", r"-m nfacct ", "counts packets from loopback addresses"),
        (SEP, rf"-s (\S+?)(?:/\d+)? .*-j {MARK_MASQ}", "{1} calls itself: masquerade, so that "
         "the answer comes back through this node"),
        (SEP, r"-m recent --set .*--to-destination (\S+)", "sends the connection to {1}, and "
         "remembers the client for session affinity"),
        (SEP, r"--to-destination (\S+)", "sends the connection to {1}"),
        ("", r"--rcheck --seconds (\d+)", "session affinity: a client that was sent there in "
         "the last {1} s is sent there again"),
        ("", r"--probability (\S+)", "takes this endpoint with probability {1}"),
        ("", rf"-j {SEP}", "takes this endpoint if none above was taken"),
        (SVC, rf"! -[si] (\S+) .*-j {MARK_MASQ}", "masquerades clients that are not local "
         "pods ({1})"),
        (SVC, rf"-j {MARK_MASQ}", "masquerades all clients"),
        (EXT, rf"--src-type LOCAL -j {MARK_MASQ}", "masquerades clients on this node"),
        (EXT, rf"-j {MARK_MASQ}", "masquerades all clients"),
        (EXT, r"pod traffic for", "local pods: choose among the endpoints of the cluster"),
        (EXT, r"--src-type LOCAL", "this node: choose among the endpoints of the cluster"),
        (EXT, rf"-j {SVL}", "all others: choose among the endpoints on this node"),
        (EXT, rf"-j {SVC}", "chooses among the endpoints of the cluster"),
        (FW, r"-s (\S+) ", "source range: clients in {1} may use it"),
        (FW, r"will be dropped by", "clients in no source range: the filter table drops them"),
        ("KUBE-PROXY-FIREWALL", r"-j DROP", "drops clients in no source range"),
        ("", r"has no local endpoints.*-j DROP", "no endpoint on this node (policy Local): "
         "clients wait until they time out"),
        ("", r"has no endpoints.*-j REJECT", "no endpoint: clients get an error at once"),
        ("KUBE-NODEPORTS", r"health check node port.*--dport (\d+) -j ACCEPT", "lets health "
         "checks of load balancers in at port {1}"),
        ("KUBE-NODEPORTS", r"--dport (\d+) .*-j", "new connections to node port {1}"),
        ("KUBE-S", r"-d (\S+?)(?:/\d+)? .*--dport (\d+) .*-j", "new connections to {1}, port {2}"),
        ("KUBE-S", rf"-j {BUCKET}(\S+)", "addresses whose last bits are {1}, in hexadecimal"),
        ("KUBE-S", r"-j KUBE-NODEPORTS", "addresses of this node: look at the node ports"),
        (MARK_MASQ, r"-j MARK", "marks the connection: masquerade it in POSTROUTING"),
        (POSTROUTING, r"! --mark|-m mark ! ", "connections without the mark keep their source"),
        (POSTROUTING, r"-j MARK", "takes the mark off again"),
        (POSTROUTING, r"-j MASQUERADE", "replaces the source by an address of this node"),
        ("KUBE-FORWARD", r"-m mark", "lets marked connections through, whatever the policy is"),
        ("KUBE-FORWARD", r"ESTABLISHED", "lets known connections through"),
        ("", r"-j KUBE-", "leads packets to this mode's chains"),
    )
)  # fmt: skip


class IptablesWords(KernelWords):
    """Rules of the iptables mode."""

    def kind(self, key: RuleKey) -> str:
        """Return the table, and whether it is a chain of ours."""
        _, table, _, part = key
        return f"{table} chains" if part == WHOLE else f"{table} rules in shared chains"

    def of_services(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> Iterator[RuleKey]:
        """Yield chains by the hash in their names and those they lead to, and groups by name."""
        names, chains, addresses = set(), set(), set()
        for plan in plans:
            printed, family = printed_name(plan.key.name), int(plan.key.family)
            protocol = plan.key.name.protocol.lower()
            names |= {(family, f"{printed} {protocol}"), (family, f"{printed} tcp")}
            hashed = chain_hash(printed + protocol)
            chains |= {(family, prefix + hashed) for prefix in SERVICE_PREFIXES}
            addresses |= {frontend.address for frontend in plan.frontends if frontend.address}
        for (family, _, chain, _), rules in kernel.items():
            if (family, chain) in chains:
                chains = chains | {(family, found) for found in _LEADS_TO.findall(rules)}
        for key, rules in kernel.items():
            family, table, chain, part = key
            if (family, chain) in chains or (is_shared(table, chain) and (family, part) in names):
                yield key
            elif part == UNKNOWN and addresses & set(_DESTINATION.findall(rules)):
                yield key  # a rule of another program, about an address of the Service

    def is_on_path(self, key: RuleKey, plans: Collection[ServicePlan]) -> bool:
        """Whether rules are jumps into our chains, or mark and masquerade."""
        family, table, chain, part = key
        mine = [plan for plan in plans if plan.key.family == family]
        if not mine:
            return False
        if part == TAIL:
            return any(not frontend.address for plan in mine for frontend in plan.frontends)
        if part == SPLIT or _IS_FIRST_BUCKET(chain):
            return True
        return part == JUMPS or ((table, chain) in NODE_CHAINS and chain != CANARY)

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

    def rank(self, key: RuleKey) -> int:
        """Order jumps, rules by destination, chains of the Service, chains of the node."""
        _, table, chain, part = key
        if part == JUMPS:
            return 0
        if is_shared(table, chain) or _IS_FIRST_BUCKET(chain):
            return 1
        ranks = {EXT: 2, FW: 2, SVC: 3, SVL: 3, SEP: 4}
        return next((rank for start, rank in ranks.items() if chain.startswith(start)), 5)

    def words(self, key: RuleKey, value: str) -> Iterable[Words]:
        """Print the rules of a chain, or of a part of it."""
        family, table, chain, _ = key
        tool = "iptables" if family == 4 else "ip6tables"
        place = f"{tool} -t {table}, chain {chain}"
        if not value:
            return [Words(place, f":{chain} - [0:0]", "has no rule")]
        rules = [(rule, what) for start, rule, what in _PURPOSES if chain.startswith(start)]
        return [Words(place, line, purpose_of(rules, line)) for line in value.split("\n")]
