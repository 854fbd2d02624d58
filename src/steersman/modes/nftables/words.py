"""The elements of a Service as `nft list` prints them, each with its purpose, and their chains."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from steersman.host.exec import Exec, run_program
from steersman.host.listening import listening_sockets
from steersman.model.errors import BusyError
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Ruleset
from steersman.modes.kernel_words import KernelWords, Words
from steersman.modes.nftables.layout import (
    DROP,
    PROTOCOLS,
    REJECT,
    SETS,
    TABLE,
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
    split_element,
    unpack_address,
    unpack_endpoint,
    unpack_slot,
)
from steersman.modes.nftables.render import render_node
from steersman.modes.nftables.skeleton import HEADER
from steersman.netfilter.trace.reader import list_family, table_of
from steersman.proxy.listeners import ListenerPlan

NFT_SECONDS = 5.0
"""Seconds in which nft must have listed the chains."""
_LEVELS = 4
"""Chains are followed so far: by-source, marking, lb-, try-."""
_BLOCK = re.compile(r"^\tchain (\S+) \{\n(.*?)^\t\}", re.MULTILINE | re.DOTALL)
_TARGETS = re.compile(r"\b(?:goto|jump) ([\w./-]+)")
_NODE_TEXTS = (Kind.SKELETON, Kind.RULES)
_BY_ADDRESS = frozenset(kind for kind, spec in SETS.items() if spec.fields.startswith("apt"))
_BY_PORT = frozenset(kind for kind, spec in SETS.items() if spec.fields.startswith("pt"))
_ORDER = (
    Kind.NODEPORT_IPS,
    Kind.SERVICE_IPS,
    Kind.SERVICE_NODEPORTS,
    Kind.POD_SERVICE_IPS,
    Kind.NODE_SERVICE_IPS,
    Kind.EXTERNAL_SERVICE_IPS,
    Kind.POD_NODEPORTS,
    Kind.NODE_NODEPORTS,
    Kind.EXTERNAL_NODEPORTS,
    Kind.SERVICE_ENDPOINTS,
    Kind.NODEPORT_ENDPOINTS,
    Kind.CHAIN,
    Kind.NO_ENDPOINT_SERVICES,
    Kind.NO_ENDPOINT_NODEPORTS,
)
_PURPOSES = {
    Kind.NODEPORT_IPS: "address that serves node ports",
    Kind.SERVICE_IPS: "new connections to {0} port {2}: {to}",
    Kind.SERVICE_NODEPORTS: "new connections to node port {1}: {to}",
    Kind.SERVICE_ENDPOINTS: "slot {slot} of {0} port {2}{local}",
    Kind.NODEPORT_ENDPOINTS: "slot {slot} of node port {1}{local}",
    Kind.POD_SERVICE_IPS: "of these, clients in local pods: {to}",
    Kind.NODE_SERVICE_IPS: "of these, clients on this node: {to}",
    Kind.EXTERNAL_SERVICE_IPS: "of these, all other clients: {to}",
    Kind.POD_NODEPORTS: "of these, clients in local pods: {to}",
    Kind.NODE_NODEPORTS: "of these, clients on this node: {to}",
    Kind.EXTERNAL_NODEPORTS: "of these, all other clients: {to}",
    Kind.NO_ENDPOINT_SERVICES: "packets that were sent to no endpoint: {to}",
    Kind.NO_ENDPOINT_NODEPORTS: "packets that were sent to no endpoint: {to}",
    Kind.FIREWALL_IPS: "has source ranges: other clients are dropped",
    Kind.FIREWALL_ALLOWED: "source range: clients from {3} on may use it",
    Kind.AFFINITY_IPS: "session affinity: remembers the client's endpoint",
    Kind.AFFINITY_NODEPORTS: "session affinity: remembers the client's endpoint",
}
_PLURALS = {
    Kind.CHAIN: "chains of Services",
    Kind.AFFINITY: "maps of session affinity",
    Kind.MEMBERS: "sets of endpoints",
    Kind.MEMBER: "elements of sets of endpoints",
    Kind.SKELETON: "tables",
    Kind.RULES: "rules of the node",
    Kind.STALE_AFFINITY: "stale entries of session affinity",
    Kind.RELAY: "sockets on loopback",
}
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


class NftablesWords(KernelWords):
    """Elements, maps and chains of the nftables mode."""

    def __init__(self, read: Any, execute: Exec) -> None:
        """Describe what `read` returns; `execute` runs nft."""
        super().__init__(read)
        self._exec = execute

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
        sockets = listening_sockets()
        return {
            key: value
            for key, value in rendered.items()
            if not isinstance(value, ListenerPlan)
            or (value.owner.name.protocol, value.bind, value.port) not in sockets
        }

    def kind(self, key: bytes) -> str:
        """Return the set or map that has an element, or the kind of another object."""
        kind = kind_of(key)
        return f"elements of {SETS[kind].name}" if kind in SETS else _PLURALS[Kind(kind)]

    def of_services(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> Iterator[bytes]:
        """Yield elements by destination, and the chains and sets of session affinity by name."""
        destinations, names = set(), set()
        for plan in plans:
            family, protocol = int(plan.key.family), PROTOCOLS[plan.key.name.protocol]
            names.add((family, base_name(plan.key)))
            for frontend in plan.frontends:
                address = pack_address(frontend.address) if frontend.address else b""
                destinations.add((family, address + protocol + pack_port(frontend.port)))
        for key in kernel:
            kind, family = kind_of(key), family_number(key)
            if kind in _BY_ADDRESS:
                size = Family(family).bits // 8 + 8
                if (family, fields_of(key)[:size]) in destinations:
                    yield key
            elif kind in _BY_PORT:
                if (family, fields_of(key)[:8]) in destinations:
                    yield key
            elif kind in (Kind.CHAIN, Kind.AFFINITY, Kind.MEMBERS, Kind.MEMBER):
                name = name_of(key)
                if kind == Kind.CHAIN:
                    base = base_name_of(name)
                else:
                    base = name.partition("-")[2].removeprefix("local-")
                if (family, base) in names:
                    yield key

    def is_on_path(self, key: bytes, plans: Collection[ServicePlan]) -> bool:
        """Whether it is a text of the node in a family of the plans, or a node port's address."""
        kind, family = kind_of(key), family_number(key)
        mine = [plan for plan in plans if plan.key.family == family]
        if kind == Kind.NODEPORT_IPS:
            return any(not frontend.address for plan in mine for frontend in plan.frontends)
        return bool(mine) and kind in _NODE_TEXTS

    def rank(self, key: bytes) -> int:
        """Order dispatch by destination and client, endpoints by slot, affinity, the rest."""
        kind = kind_of(key)
        return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)

    def words(self, key: bytes, value: Any) -> Iterable[Words]:
        """Print one object."""
        kind = Kind(kind_of(key))
        table = f"table {HEADER[family_of(key)]} {TABLE}"
        if isinstance(value, ListenerPlan):
            place = f"{value.owner.name.protocol.lower()} socket of the process"
            return [Words(place, str(value), "serves the node port on loopback")]
        if kind in _NODE_TEXTS:
            digest = blake2b(str(value).encode(), digest_size=4).hexdigest()
            what = "base chains, sets and maps" if kind == Kind.SKELETON else "rules of this node"
            return [Words(table, f"{what} (digest {digest})", "what every packet passes")]
        if kind in SETS:
            return [_element(kind, key, value, table)]
        if kind == Kind.MEMBER:
            members, endpoint = split_element(key)
            text = " . ".join(map(str, unpack_endpoint(endpoint)))
            return [Words(f"{table}, set {name_of(members)}", text, "clients may stay with it")]
        does = {
            Kind.CHAIN: value.decode() if value else "",
            Kind.AFFINITY: "session affinity: endpoint of each client",
            Kind.MEMBERS: "endpoints that clients may stay with",
        }
        noun = {Kind.CHAIN: "chain", Kind.MEMBERS: "set"}.get(kind, "map")
        return [Words(table, f"{noun} {name_of(key)}", does.get(kind, ""))]

    async def beyond(
        self, lines: Collection[Words], plans: Collection[ServicePlan], settings: NodeSettings
    ) -> list[Words]:
        """List the chains that elements go to, and those that these lead to.

        nft begins again whenever a transaction comes (0.2 s with 5,000 chains): beside a process
        that writes all the time it never ends. Then the chains are printed as they were loaded.
        """
        out: list[Words] = []
        for family in sorted({plan.key.family for plan in plans}):
            table = f"{HEADER[family]} {TABLE}"
            try:
                chains = await self._chains(HEADER[family])
            except BusyError as error:
                text = f"# {error}: these are the chains of all Services as steersman loads them"
                out.append(Words(f"table {table}", text))
                chains = _loaded_chains(family, table, settings)
            names = ["nat-prerouting", "nat-output"]
            for line in lines:
                if line.place.startswith(f"table {table}, "):
                    names += _TARGETS.findall(line.text)
            seen: set[str] = set()
            for _ in range(_LEVELS):
                wanted = [name for name in dict.fromkeys(names) if name not in seen]
                seen.update(wanted)
                names = []
                for name in wanted:
                    body = chains.get(name, "")
                    place, purpose = f"table {table}, chain {name}", _chain_purpose(name)
                    rules = [rule for each in body.splitlines() if (rule := each.strip())]
                    out += [Words(place, rule, purpose) for rule in rules]
                    # Only what forwarding passes: the base chains lead to everything.
                    if not name.startswith("nat-"):
                        names += _TARGETS.findall(body)
        return out

    async def _chains(self, family: str) -> Mapping[str, str]:
        """Return the rules of each chain of our table, as nft lists them."""
        argv = list_family(family, "--stateless")
        result = await run_program(self._exec, argv, package="nftables", timeout=NFT_SECONDS)
        listing = result.stdout.decode(errors="replace")
        return dict(_BLOCK.findall(table_of(listing, family, TABLE)))


def _loaded_chains(family: Family, table: str, settings: NodeSettings) -> Mapping[str, str]:
    """Return the rules of each chain in the texts that are loaded."""
    chains: defaultdict[str, str] = defaultdict(str)
    texts = render_node(settings)
    for kind in _NODE_TEXTS:
        for line in str(texts[prefix(kind, family)]).splitlines():
            if line.startswith(start := f"add rule {table} "):
                chain, _, rule = line.removeprefix(start).partition(" ")
                chains[chain] += f"{rule}\n"
    return chains


def _element(kind: Kind, key: bytes, value: bytes, table: str) -> Words:
    """Print an element of a fixed set."""
    spec, fields = SETS[kind], printed_fields(key)
    text, to, local = " . ".join(fields), "", ""
    noun = "set" if spec.form in (Form.SET, Form.INTERVALS) else "map"
    match spec.form:
        case Form.VERDICTS:
            chain, _, comment = value.partition(b"\0")
            to = {DROP: "drop", REJECT: "reject"}.get(chain, f"goto {chain.decode()}")
            verdict = "continue" if chain == REJECT else to
            text += (f' comment "{comment.decode()}"' if comment else "") + f" : {verdict}"
        case Form.ENDPOINTS:
            address, port = unpack_endpoint(value)
            text += f" : {address} . {port}"
            local = ", an endpoint on this node" if is_local(value) else ""
        case Form.INTERVALS:
            text += f"-{unpack_address(value)}"
        case _:
            text += f' comment "{value.decode()}"' if value else ""
    slot = unpack_slot(key) if spec.fields.endswith("s") else 0
    purpose = _PURPOSES.get(kind, spec.comment).format(*fields, to=to, slot=slot, local=local)
    return Words(f"{table}, {noun} {spec.name}", text, purpose)


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
