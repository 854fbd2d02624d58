"""Virtual servers as `ipvsadm -Ln` prints them, ipset entries and rules, each with its purpose."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from steersman.model.addresses import join_host_port
from steersman.model.names import PROTOCOL_BY_NUMBER, Family
from steersman.model.plan import ServicePlan, SourceClass, Verdict
from steersman.model.ruleset import Ruleset
from steersman.modes.ipvs.objects import (
    ACCESS,
    ADDRESSES,
    ALLOWED,
    CHAINS,
    DROPS,
    FORWARD,
    GUARDED,
    HEALTH,
    HEALTH_PORTS,
    MARK_MASQ,
    PORTS,
    POSTROUTING,
    REJECTS,
    SERVICES,
    SOURCES,
    DeviceKey,
    MemberKey,
    Server,
    ServerKey,
    SetKey,
    action_set,
    role_set,
)
from steersman.modes.kernel_words import KernelWords, Words

_FLAGS = ((0x1, "persistent"), (0x8, "sched-flag-1"), (0x10, "sched-flag-2"))
_ROLES = {
    PORTS: "the address answers on this port only",
    ADDRESSES: "an address of the interface that no virtual server needs",
    GUARDED: "has source ranges",
    ALLOWED: "source range: these clients may use it",
    HEALTH_PORTS: "lets health checks of load balancers in at this port",
}
_CLIENTS = {SourceClass.POD: "local pods", SourceClass.NODE: "this node"}
_TREATED = {
    Verdict.FORWARD: "masquerades clients: {0}",
    Verdict.DROP: "drops packets of clients: {0}",
    Verdict.REJECT: "rejects connections of clients: {0}",
}
_SETS = {
    **{role_set(role, family): does for role, does in _ROLES.items() for family in Family},
    **{
        action_set(source, verdict, family): does.format(_CLIENTS.get(source, "all others"))
        for source in SourceClass
        for verdict, does in _TREATED.items()
        for family in Family
    },
}
_CHAIN_PURPOSES = {
    SERVICES: "marks connections to be masqueraded, by class of client",
    MARK_MASQ: "marks the connection: masquerade it in POSTROUTING",
    POSTROUTING: "masquerades marked connections and hairpins",
    FORWARD: "lets connections of Services through, whatever the policy is",
    DROPS: "drops, by class of client",
    SOURCES: "drops clients in no source range",
    REJECTS: "rejects, by class of client",
    ACCESS: "rejects packets to assigned addresses on ports of no Service",
    HEALTH: "lets health checks in",
}


class IpvsWords(KernelWords):
    """Virtual servers, sets and rules of the ipvs mode."""

    def kind(self, key: Any) -> str:
        """Return the kind of an object in the words of its tool."""
        plurals = {
            ServerKey: "virtual servers",
            SetKey: "ipsets",
            MemberKey: "ipset entries",
            DeviceKey: "interfaces",
        }
        return plurals.get(type(key), "iptables chains")

    def of_services(
        self, kernel: Ruleset, plans: Collection[ServicePlan]
    ) -> Iterator[ServerKey | MemberKey]:
        """Yield virtual servers and set entries by destination."""
        addresses, node_ports, health = set(), set(), set()
        for plan in plans:
            protocol = plan.key.name.protocol
            for frontend in plan.frontends:
                if frontend.address:
                    addresses.add((protocol, frontend.address, frontend.port))
                else:
                    node_ports.add((plan.key.family, protocol, frontend.port))
            health.add((role_set(HEALTH_PORTS, plan.key.family), str(plan.health_check_node_port)))

        # A node port has a virtual server at every address of the node, also at a former one.
        def is_served(key: ServerKey) -> bool:
            family = Family.IPV6 if ":" in key.address else Family.IPV4
            return tuple(key) in addresses or (family, key.protocol, key.port) in node_ports

        for key in kernel:
            if isinstance(key, ServerKey):
                if is_served(key):
                    yield key
            elif isinstance(key, MemberKey):
                server = _server_of(key.entry)
                if tuple(key) in health or (server is not None and is_served(server)):
                    yield key

    def is_on_path(self, key: Any, plans: Collection[ServicePlan]) -> bool:
        """Whether it is a rule of a family of the plans, or the interface with the addresses."""
        if type(key) is tuple:
            return any(plan.key.family == key[0] for plan in plans)
        return isinstance(key, DeviceKey)

    def rank(self, key: Any) -> int:
        """Order virtual servers, set entries, the node's rules."""
        kinds = (ServerKey, MemberKey, DeviceKey)
        return next((rank for rank, kind in enumerate(kinds) if isinstance(key, kind)), 3)

    def words(self, key: Any, value: Any) -> Iterable[Words]:
        """Print one object."""
        match key, value:
            case ServerKey(), Server():
                return _server(key, value)
            case MemberKey(), _:
                entry = key.entry
                if (server := _server_of(entry)) is not None:  # protocols by name, as ipset lists
                    number = f"{server.protocol.number}:"
                    entry = entry.replace(f",{number}", f",{server.protocol.lower()}:")
                return [Words(f"ipset {key.set}", entry, _SETS.get(key.set, ""))]
            case SetKey(), _:
                return [Words("ipset", f"create {key.set} {value}", _SETS.get(key.set, ""))]
            case DeviceKey(), _:
                text = f"{key.device}: {value}"
                return [Words("interface", text, "has the addresses of Services")]
        family, table, chain, _ = key
        tool = "iptables" if family == Family.IPV4 else "ip6tables"
        purpose = _CHAIN_PURPOSES.get(chain, "leads packets to this mode's chains")
        if (table, chain) not in CHAINS:
            purpose = "leads packets to this mode's chains"
        place = f"{tool} -t {table}, chain {chain}"
        return [Words(place, line, purpose) for line in value.split("\n")]


def _server(key: ServerKey, server: Server) -> list[Words]:
    """Print a virtual server and its real servers."""
    destination = join_host_port(key.address, key.port)
    flags = [word for bit, word in _FLAGS if server.flags & bit]
    if server.flags & 1:
        flags.insert(1, str(server.timeout))
    place = f"ipvs {key.protocol} {destination}"
    head = " ".join([f"{key.protocol}  {destination} {server.scheduler}", *flags])
    purpose = f"new connections to {key.address}, port {key.port}: scheduler {server.scheduler}"
    lines = [Words(place, head, purpose + ("" if server.targets else ", no endpoint"))]
    if server.assigned:
        lines.append(
            Words(place, f"{key.address} on the interface", "the node accepts its packets")
        )
    for (address, port), weight in server.weight_of.items():
        text = f"  -> {join_host_port(address, port)}  Masq  {weight}"
        lines.append(Words(place, text, "an endpoint"))
    return lines


def _server_of(entry: str) -> ServerKey | None:
    """Return the destination in an entry, such as `10.96.0.10,6:80`; None if it has none."""
    address, comma, rest = entry.partition(",")
    number, _, port = rest.partition(",")[0].partition(":")
    if not comma or not number.isdigit() or int(number) not in PROTOCOL_BY_NUMBER:
        return None
    return ServerKey(PROTOCOL_BY_NUMBER[int(number)], address, int(port))
