"""The kinds of objects of the nftables mode as `nft list` prints them, and their chains."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable
from functools import cached_property, partial
from typing import Any

from steersman.host.listening import ListeningSocket, listening_sockets
from steersman.model.hashes import blake2b
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Diff, Ruleset, Script
from steersman.modes import kinds
from steersman.modes.kinds import Words
from steersman.modes.nftables.layout import (
    DROP,
    PROTOCOLS,
    REJECT,
    SETS,
    Form,
    Kind,
    base_name,
    base_name_of,
    family_number,
    family_of,
    fields_of,
    is_local,
    kind_of,
    name_of,
    pack_address,
    pack_port,
    prefix,
    printed_fields,
    unpack_slot,
)
from steersman.modes.nftables.render import render_node
from steersman.modes.nftables.script import script
from steersman.modes.nftables.skeleton import table_name
from steersman.modes.nftables.text import NOUNS, element_text
from steersman.modes.words import KernelWords
from steersman.proxy.listeners import ListenerPlan

_LEVELS = 4
"""Chains are followed so far: by-source, marking, lb-, try-."""
_RULE = re.compile(r"^add rule \S+ \S+ (\S+) (.*)$", re.MULTILINE)
"""The chain, and the rule as nft prints it."""
_NODE_TEXTS = (Kind.SKELETON, Kind.RULES)
_RANKED = (
    # The fixed sets in the order in which packets look them up, each with its purpose
    (Kind.NODEPORT_IPS, "address that serves node ports"),
    (Kind.SERVICE_IPS, "new connections to {0} port {2}: {to}"),
    (Kind.SERVICE_NODEPORTS, "new connections to node port {1}: {to}"),
    (Kind.POD_SERVICE_IPS, "of these, clients in local pods: {to}"),
    (Kind.NODE_SERVICE_IPS, "of these, clients on this node: {to}"),
    (Kind.EXTERNAL_SERVICE_IPS, "of these, all other clients: {to}"),
    (Kind.POD_NODEPORTS, "of these, clients in local pods: {to}"),
    (Kind.NODE_NODEPORTS, "of these, clients on this node: {to}"),
    (Kind.EXTERNAL_NODEPORTS, "of these, all other clients: {to}"),
    (Kind.SERVICE_ENDPOINTS, "slot {slot} of {0} port {2}{local}"),
    (Kind.NODEPORT_ENDPOINTS, "slot {slot} of node port {1}{local}"),
    (Kind.NO_ENDPOINT_SERVICES, "packets that were sent to no endpoint: {to}"),
    (Kind.NO_ENDPOINT_NODEPORTS, "packets that were sent to no endpoint: {to}"),
    (Kind.FIREWALL_IPS, "has source ranges: other clients are dropped"),
    (Kind.FIREWALL_ALLOWED, "source range: clients from {3} on may use it"),
    (Kind.AFFINITY_IPS, "session affinity: remembers the client's endpoint"),
    (Kind.AFFINITY_NODEPORTS, "session affinity: remembers the client's endpoint"),
    (Kind.CLUSTER_IPS, SETS[Kind.CLUSTER_IPS].comment),
    (Kind.HAIRPIN_CONNECTIONS, SETS[Kind.HAIRPIN_CONNECTIONS].comment),
)
_CHAINS = (
    # How the name of a chain begins, and what the chain is for.
    ("nat-", "new connections enter here"),
    ("by-source", "chooses by the class of the client: pod, this node, others"),
    ("np-by-source", "chooses by the class of the client: pod, this node, others"),
    ("mark-", "marks the connection to be masqueraded"),
    ("try-", "tries slots at random; some may be empty"),
    ("np-try-", "tries slots at random; some may be empty"),
    ("affinity-learn", "remembers which endpoint the client was sent to"),
    ("cluster-ip-refused", "rejects what was sent to no endpoint"),
)


def _destination(key: bytes, _value: Any) -> tuple[Hashable, ...]:
    """Return the destination that an element begins with, by address or by node port."""
    kind, family = kind_of(key), family_number(key)
    fields = SETS[Kind(kind)].fields
    if fields.startswith("apt"):
        return ((family, fields_of(key)[: Family(family).bits // 8 + 8]),)
    return ((family, fields_of(key)[:8]),) if fields.startswith("pt") else ()


def _chain_name(key: bytes, _value: Any) -> tuple[Hashable, ...]:
    return ((family_number(key), base_name_of(name_of(key))),)


def _set_name(key: bytes, _value: Any) -> tuple[Hashable, ...]:
    """Return the ServicePort of a map or set, and that of an element of one."""
    return ((family_number(key), name_of(key).partition("-")[2].removeprefix("local-")),)


def _table(key: bytes) -> str:
    return f"table {table_name(family_of(key))}"


def _text_words(key: bytes, value: Any) -> list[Words]:
    """Print a text of the node by its digest: it is the same on every node with these settings."""
    digest = blake2b(str(value).encode(), digest_size=4).hexdigest()
    is_skeleton = kind_of(key) == Kind.SKELETON
    name = "base chains, sets and maps" if is_skeleton else "rules of this node"
    return [Words(_table(key), f"{name} (digest {digest})")]


def _socket_words(_key: bytes, value: ListenerPlan) -> list[Words]:
    place = f"{value.owner.name.protocol.lower()} socket of the process"
    return [Words(place, str(value))]


def _member_words(key: bytes, _value: Any) -> list[Words]:
    return [Words(f"{_table(key)}, set {name_of(key)}", element_text(key, b""))]


def _chain_words(key: bytes, value: bytes) -> list[Words]:
    """Print a chain of a ServicePort by its value, which describes its rules (rules.py)."""
    name = name_of(key)
    rules = value.decode() if value else "# not as steersman made it"
    return [Words(f"{_table(key)}, chain {name}", rules, _chain_purpose(name))]


def _set_words(key: bytes, _value: Any) -> list[Words]:
    return [Words(_table(key), f"{NOUNS.get(Kind(kind_of(key)), 'map')} {name_of(key)}")]


def _element(purpose: str, key: bytes, value: bytes) -> list[Words]:
    """Print an element of a fixed set; fields of it are filled in the purpose."""
    spec, to, local = SETS[kind_of(key)], "", ""
    noun = "set" if spec.form in (Form.SET, Form.INTERVALS) else "map"
    if spec.form is Form.VERDICTS:
        chain = value.partition(b"\0")[0]
        to = {DROP: "drop", REJECT: "reject"}.get(chain, f"goto {chain.decode()}")
    elif spec.form is Form.ENDPOINTS:
        local = ", an endpoint on this node" if is_local(value) else ""
    slot = unpack_slot(key) if spec.fields.endswith("s") else 0
    does = purpose.format(*printed_fields(key), to=to, slot=slot, local=local)
    place = f"{_table(key)}, {noun} {spec.name}"
    return [Words(place, element_text(key, value), does)]


_LAST = len(_RANKED)
_KINDS = {
    **{
        kind: kinds.Kind(
            f"elements of {SETS[kind].name}",
            rank,
            purpose,
            partial(_element, purpose),
            _destination,
            "node ports" if kind == Kind.NODEPORT_IPS else "",
        )
        for rank, (kind, purpose) in enumerate(_RANKED)
    },
    Kind.CHAIN: kinds.Kind("chains of Services", _LAST, "", _chain_words, _chain_name),
    Kind.AFFINITY: kinds.Kind(
        "maps of session affinity",
        _LAST,
        "session affinity: endpoint of each client",
        _set_words,
        _set_name,
    ),
    Kind.MEMBERS: kinds.Kind(
        "sets of endpoints", _LAST, "endpoints that clients may stay with", _set_words, _set_name
    ),
    Kind.MEMBER: kinds.Kind(
        "elements of sets of endpoints", _LAST, "clients may stay with it", _member_words, _set_name
    ),
    Kind.STALE_AFFINITY: kinds.Kind("stale entries of session affinity", _LAST, "", _set_words),
    Kind.SKELETON: kinds.Kind(
        "tables", _LAST, "what every packet passes", _text_words, passed_by="all"
    ),
    Kind.RULES: kinds.Kind(
        "rules of the node", _LAST, "what every packet passes", _text_words, passed_by="all"
    ),
    Kind.LAZY: kinds.Kind("lazy chains", _LAST, "has its rules", _set_words),
    Kind.RELAY: kinds.Kind(
        "sockets on loopback", _LAST, "serves the node port on loopback", _socket_words
    ),
}


class NftablesWords(KernelWords):
    """Elements, maps and chains of the nftables mode."""

    are_rules = True

    async def read(self) -> Ruleset:
        """Return our objects. The sockets on loopback belong to the process that serves."""
        return {
            key: value
            for key, value in (await super().read()).items()
            if kind_of(key) != Kind.RELAY
        }

    def wanted(self, rendered: Ruleset, kernel: Ruleset) -> Ruleset:
        """Leave out sockets on loopback that some process listens on."""
        del kernel
        return {
            key: value
            for key, value in rendered.items()
            if not isinstance(value, ListenerPlan)
            or (value.owner.name.protocol, value.bind, value.port) not in self._sockets
        }

    @cached_property
    def _sockets(self) -> Collection[ListeningSocket]:
        """The sockets at the first look: there are thousands of Services, and one answer."""
        return listening_sockets()

    def changed_by_others(self, key: bytes) -> bool:
        """Return False for sockets, and for entries that packets wrote."""
        return kind_of(key) not in (Kind.RELAY, Kind.STALE_AFFINITY)

    def kind_of(self, key: bytes) -> kinds.Kind:
        """Return the kind of an object."""
        return _KINDS[Kind(kind_of(key))]

    def family_of(self, key: bytes) -> int:
        """Return the family of the table."""
        return family_number(key)

    def names_of(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> set[Hashable]:
        """Return destinations, and the names in those of chains and sets."""
        del kernel
        names: set[Hashable] = set()
        for plan in plans:
            family, protocol = int(plan.key.family), PROTOCOLS[plan.key.name.protocol]
            names.add((family, base_name(plan.key)))
            for frontend in plan.frontends:
                address = pack_address(frontend.address) if frontend.address else b""
                names.add((family, address + protocol + pack_port(frontend.port)))
        return names

    def beyond(
        self, lines: Collection[Words], plans: Collection[ServicePlan], settings: NodeSettings
    ) -> list[Words]:
        """Return the chains that elements go to, and those that these lead to, as they are loaded.

        nft is not asked: while elements change all the time, its listing never ends. If rules in
        the kernel are others, the digest of the node's rules differs.
        """
        out: list[Words] = []
        texts = render_node(settings)
        for family in sorted({plan.key.family for plan in plans}):
            table = f"table {table_name(family)}"
            chains: defaultdict[str, list[str]] = defaultdict(list)
            for kind in _NODE_TEXTS:
                for chain, rule in _RULE.findall(str(texts[prefix(kind, family)])):
                    chains[chain].append(rule)
            # A chain is led to where its name is a word.
            texts_of = (line.text for line in lines if line.place.startswith(table))
            words = ["nat-prerouting", "nat-output", *" ".join(texts_of).split()]
            seen: set[str] = set()
            for _ in range(_LEVELS):
                names = [word for word in dict.fromkeys(words) if word in chains.keys() - seen]
                seen.update(names)
                words = []
                for name in names:
                    place, purpose = f"{table}, chain {name}", _chain_purpose(name)
                    out += [Words(place, rule, purpose) for rule in chains[name]]
                    # Only what forwarding passes: the base chains lead to everything.
                    if not name.startswith("nat-"):
                        words += " ".join(chains[name]).split()
        return out


def scripts(have: Ruleset, change: Diff) -> tuple[Script, ...]:
    """Write a Diff as commands of nft; sockets are not part of it."""
    text = script(have, change)
    return (Script("nft", ("nft", "-f", "-"), text),) if text else ()


def _chain_purpose(name: str) -> str:
    for start, purpose in _CHAINS:
        if name.startswith(start):
            return purpose
    if "lb-" in name:
        what = (
            "marks, then goes on to choose" if "masquerade-" in name or "cluster-" in name else ""
        )
        pool = " on this node" if "local-" in name else ""
        size = name.rpartition("-")[2]
        among = (
            f"one of up to {size} endpoints" if size != "1" else "the endpoint of the first slot"
        )
        return f"{what or 'chooses'} {among}{pool}"
    return "session affinity: sends a known client to its endpoint" if "affinity" in name else ""
