"""Listeners and portals of a Service as the kernel has them, each with its purpose.

Rules do not say which portal they belong to, and a listener's port is known to its process only. So
the wanted rules are made with the port that the kernel's rule for the same destination has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple

from steersman.host.listening import ListeningSocket, listening_sockets
from steersman.host.worker import KernelWorker
from steersman.model.addresses import join_host_port
from steersman.model.names import Family
from steersman.model.plan import FrontendKind, ServicePlan
from steersman.model.ruleset import Ruleset
from steersman.modes.kinds import Kind, Words
from steersman.modes.userspace.portals import Portals
from steersman.modes.userspace.render import BaseKey, Portal, StrayKey
from steersman.modes.words import KernelWords
from steersman.netfilter.iptables.names import printed_name
from steersman.proxy.listeners import LISTENER, PORTAL, FrontendKey, ListenerPlan

_ANY_PORT = 99999
"""No port: it marks the place of the port in the text of a rule."""
_LAST_NUMBER = re.compile(r"(.*[^\d])(\d{1,5})")
_COMMENT = re.compile(r'--comment "[^"]*"')
_TOOLS6 = ("ip6tables", "ip6")
_EVERYWHERE = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}
_PURPOSES = tuple(
    (re.compile(pattern), purpose)
    for pattern, purpose in (
        (r"DNAT --to-destination (\S+)", "leads clients to the listener at {1}"),
        (r"! --ctstate DNAT -j DROP", "only clients of the portal reach the listener"),
        (r"! --src-type LOCAL -j DROP", "drops clients that are neither local pods nor this node"),
        (r"-s (\S+) .*-j RETURN", "source range: clients in {1} may use it"),
        (r"-j REJECT", "no endpoint: clients get an error at once"),
        (r"-j DROP", "drops all other clients"),
        (r" : (?:drop|goto refuse)$", "no endpoint: drops or rejects clients"),
        (r" : goto ", "checks new connections to the listener"),
        (r" : (\S+) \. (\d+)$", "leads clients to the listener at {1} port {2}"),
        (r"^to-", "drops clients that may not use the portal"),
    )
)


class SocketKey(NamedTuple):
    """A listening socket of this network namespace."""

    kind: str
    socket: ListeningSocket


def _socket_words(key: SocketKey, _value: object) -> list[Words]:
    own = key.socket
    place = f"{own.protocol.lower()} socket"
    if not own.port:
        return [Words(place, f"{own.address} port ?", "no rule tells the port")]
    return [Words(place, f"LISTEN {join_host_port(own.address, own.port)}")]


def _rule_words(key: StrayKey, _value: object) -> list[Words]:
    """Print a rule of iptables, or a rule or an element of nftables."""
    tool, table = ("iptables", "ip") if key.family is Family.IPV4 else _TOOLS6
    place = f"table {table} kube-portals, "
    place += f"map {key.where}" if key.where else "chain"
    if key.text.startswith("-A "):
        place = f"{tool} -t {key.where}, chain {key.text.split()[1]}"
    for pattern, purpose in _PURPOSES:
        if found := pattern.search(key.text):
            return [Words(place, key.text, purpose.format(key.text, *found.groups()))]
    return [Words(place, key.text)]


def _rule_names(key: StrayKey, _value: object) -> tuple[str, ...]:
    """Return the comment of a rule, and the destination of an element."""
    comment = _COMMENT.search(key.text)
    destination, colon, _ = key.text.partition(" :")
    return (f"{destination}{colon}", *((comment[0],) if comment else ()))


def _address_words(key: StrayKey, _value: object) -> list[Words]:
    return [Words(f"interface {key.where}", key.text)]


def _base_words(key: BaseKey, _value: object) -> list[Words]:
    return [Words(key.family.kubernetes, "chains and jumps")]


_KINDS = {
    "stray": Kind("rules", 0, "", _rule_words, _rule_names),
    "address": Kind("addresses", 0, "the node has the address", _address_words),
    "socket": Kind("listening sockets", 1, "the process accepts connections there", _socket_words),
    "listener": Kind("listening sockets", 2),
    "portal": Kind("portals", 2),
    "base": Kind("chains of the node", 2, "lead to the portals", _base_words, passed_by="all"),
}


class UserspaceWords(KernelWords):
    """Sockets, and the rules or addresses that lead clients to them."""

    def __init__(self, portals: Portals, worker: KernelWorker) -> None:
        """Describe what portals find in the kernel, in this thread; all of it is unknown there."""
        self._portals = portals

        def read() -> Ruleset:
            found = portals.read({})
            return {**found, **{SocketKey("socket", each): "" for each in listening_sockets()}}

        super().__init__(worker, read)

    async def leftovers(self) -> Ruleset:
        """Return the rules and addresses."""
        return await self._worker.do(self._portals.read, {})

    def changed_by_others(self, key: tuple[Any, ...]) -> bool:
        """Return False for listeners, and for sockets that were looked up."""
        return key[0] not in (LISTENER, "socket")

    def wanted(self, rendered: Ruleset, kernel: Ruleset) -> Ruleset:
        """Return the rules and sockets of rendered portals and listeners."""
        # By all that comes before it in a rule or element, the port that it ends with.
        ports: dict[str, int] = {}
        for key in kernel:
            if isinstance(key, StrayKey) and (found := _LAST_NUMBER.fullmatch(key.text)):
                ports.setdefault(found[1], int(found[2]))
        out: dict[Any, Any] = {}
        for key, value in rendered.items():
            if not isinstance(key, FrontendKey):
                out[key] = value
            elif isinstance(value, ListenerPlan):
                portal = rendered.get(key.of(PORTAL))
                port = value.port or self._port(key, portal, ports)
                bind = value.bind or _EVERYWHERE[key.family]
                out[SocketKey("socket", ListeningSocket(key.protocol, bind, port))] = ""
                if portal is None:
                    out.update(dict.fromkeys(self._portals.in_kernel(key, None, port), ""))
            else:
                port = self._port(key, value, ports)
                out.update(dict.fromkeys(self._portals.in_kernel(key, value, port), ""))
        return out

    def _port(self, key: FrontendKey, portal: Portal | None, ports: Mapping[str, int]) -> int:
        """Return the port to which the kernel's rules lead a destination; 0 if none does."""
        if portal is None or not portal.host:
            return key.port
        # The guard of a listener has its port, too, but names no destination: it could be that of
        # another frontend of the same Service.
        for part in self._portals.in_kernel(key, portal, _ANY_PORT):
            start = part.text.removesuffix(str(_ANY_PORT))
            if key.address in part.text and start != part.text and start in ports:
                return ports[start]
        return 0

    def kind_of(self, key: Any) -> Kind:
        """Return the kind of an object."""
        return _KINDS[key[0]]

    def family_of(self, key: Any) -> int:
        """Return the family of the base of the portals."""
        return key.family if isinstance(key, BaseKey) else 0

    def names_of(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> set[Hashable]:
        """Return the comments of rules, and the destinations of elements of maps."""
        del kernel
        names: set[Hashable] = set()
        for plan in plans:
            names.add(f'--comment "{printed_name(plan.key.name)}"')
            number = plan.key.name.protocol.number
            names |= {
                f"{frontend.address} . {number} . {frontend.port} :"
                for frontend in plan.frontends
                if frontend.kind is not FrontendKind.NODE_PORT
            }
        return names
