"""The kinds of objects of the ipvs mode, as ipvsadm, ipset and iptables print them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any

from steersman.model.addresses import family_of, join_host_port
from steersman.model.names import PROTOCOL_BY_NUMBER, Family
from steersman.model.plan import ServicePlan, SourceClass, Verdict
from steersman.model.ruleset import Ruleset
from steersman.modes.ipvs.objects import (
    ACCESS,
    ADDRESS_SETS,
    ADDRESSES,
    ALLOWED,
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
from steersman.modes.kinds import Kind, Words, iptables_rules
from steersman.modes.words import KernelWords

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


def _server_words(key: ServerKey, server: Server) -> list[Words]:
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


def _set_words(key: SetKey, value: str) -> list[Words]:
    return [Words("ipset", f"create {key.set} {value}", _SETS.get(key.set, ""))]


def _entry_words(key: MemberKey, _value: str) -> list[Words]:
    """Print an entry; protocols by name, as ipset lists them."""
    entry = key.entry
    if (server := _server_of(entry)) is not None:
        number = f"{server.protocol.number}:"
        entry = entry.replace(f",{number}", f",{server.protocol.lower()}:")
    return [Words(f"ipset {key.set}", entry, _SETS.get(key.set, ""))]


def _device_words(key: DeviceKey, value: str) -> list[Words]:
    return [Words("interface", f"{key.device}: {value}")]


def _server_names(key: ServerKey, _value: Server) -> tuple[Hashable, ...]:
    """Return a destination: a node port has a virtual server at every address of the node."""
    return tuple(key), (family_of(key.address), key.protocol, key.port)


def _entry_names(key: MemberKey, _value: str) -> tuple[Hashable, ...]:
    server = _server_of(key.entry)
    return (tuple(key), *(_server_names(server, Server("")) if server else ()))


_KINDS: Mapping[type, Kind] = {
    ServerKey: Kind("virtual servers", 0, "", _server_words, _server_names),
    MemberKey: Kind("ipset entries", 1, "", _entry_words, _entry_names),
    DeviceKey: Kind(
        "interfaces", 2, "has the addresses of Services", _device_words, passed_by="all"
    ),
    SetKey: Kind("ipsets", 3, "", _set_words),
}
_RULES = {
    chain: Kind("iptables chains", 3, purpose, iptables_rules, passed_by="all")
    for chain, purpose in (*_CHAIN_PURPOSES.items(), ("", "leads packets to this mode's chains"))
}


class IpvsWords(KernelWords):
    """Virtual servers, sets and rules of the ipvs mode."""

    def changed_by_others(self, key: object) -> bool:
        """Return False for the marks of addresses: they follow from the virtual servers."""
        return not (isinstance(key, MemberKey) and key.set in ADDRESS_SETS)

    def kind_of(self, key: Any) -> Kind:
        """Return the kind of an object."""
        return _KINDS.get(type(key)) or _RULES.get(key[2], _RULES[""])

    def family_of(self, key: Any) -> int:
        """Return the family of a rule."""
        return key[0] if type(key) is tuple else 0

    def names_of(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> set[Hashable]:
        """Return destinations; a node port is the same at every address, also at a former one."""
        del kernel
        names: set[Hashable] = set()
        for plan in plans:
            family, protocol = plan.key.family, plan.key.name.protocol
            for frontend in plan.frontends:
                names.add(
                    (protocol, frontend.address, frontend.port)
                    if frontend.address
                    else (family, protocol, frontend.port)
                )
            names.add((role_set(HEALTH_PORTS, family), str(plan.health_check_node_port)))
        return names
