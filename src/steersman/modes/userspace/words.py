"""Listeners and portals of a Service as the kernel has them, each with its purpose.

Rules do not say which portal they belong to, and a listener's port is known to its process only. So
the wanted rules are made with the port that the kernel's rule for the same destination has.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from steersman.host.listening import ListeningSocket, listening_sockets
from steersman.model.addresses import join_host_port
from steersman.model.names import Family
from steersman.model.plan import FrontendKind, ServicePlan
from steersman.model.ruleset import Ruleset
from steersman.modes.kernel_words import KernelWords, Words, purpose_of
from steersman.modes.userspace.render import STRAY, BaseKey, Portal, StrayKey
from steersman.netfilter.iptables.names import printed_name
from steersman.proxy.listeners import PORTAL, FrontendKey, ListenerPlan

if TYPE_CHECKING:
    from steersman.modes.userspace.core import Portals

_ANY_PORT = 99999
"""No port: it marks the place of the port in the text of a rule."""
_LAST_NUMBER = re.compile(r"(.*[^\d])(\d{1,5})")
_COMMENT = re.compile(r'--comment "[^"]*"')
_TOOLS6 = ("ip6tables", "ip6")
_PLURALS = {
    "listener": "listening sockets",
    "socket": "listening sockets",
    "portal": "portals",
    "base": "chains of the node",
    "stray": "rules",
    "address": "addresses",
}
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


class UserspaceWords(KernelWords):
    """Sockets, and the rules or addresses that lead clients to them."""

    def __init__(self, portals: Portals) -> None:
        """Describe what portals find in the kernel; to them all of it is unknown."""
        self._portals = portals

        async def read() -> Ruleset:
            found = dict(await portals.read({}))
            sockets = await asyncio.to_thread(listening_sockets)
            return {**found, **{SocketKey("socket", each): "" for each in sockets}}

        super().__init__(read)

    async def leftovers(self) -> Ruleset:
        """Return the rules and addresses."""
        return await self._portals.read({})

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
        # The key of a rule has all of it; its value is what the tool printed.
        return {k: kernel.get(k, v) if isinstance(k, StrayKey) else v for k, v in out.items()}

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

    def kind(self, key: Any) -> str:
        """Return the kind of an object."""
        return _PLURALS[key[0]]

    def of_services(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> Iterator[StrayKey]:
        """Yield rules by the name in their comments, and elements of maps by destination."""
        words = set()
        for plan in plans:
            words.add(f'--comment "{printed_name(plan.key.name)}"')
            number = plan.key.name.protocol.number
            words |= {
                f"{frontend.address} . {number} . {frontend.port} :"
                for frontend in plan.frontends
                if frontend.kind is not FrontendKind.NODE_PORT
            }
        for key in kernel:
            if not isinstance(key, StrayKey) or key.kind != STRAY:
                continue
            named = _COMMENT.search(key.text)
            destination, colon, _ = key.text.partition(" :")
            if (named and named[0] in words) or f"{destination}{colon}" in words:
                yield key

    def is_on_path(self, key: Any, plans: Collection[ServicePlan]) -> bool:
        """Whether it is the base of the portals, in a family of the plans."""
        return isinstance(key, BaseKey) and any(plan.key.family == key.family for plan in plans)

    def rank(self, key: Any) -> int:
        """Order rules and addresses, sockets, the base."""
        return 0 if isinstance(key, StrayKey) else 1 if isinstance(key, SocketKey) else 2

    def words(self, key: Any, value: Any) -> Iterable[Words]:
        """Print one object."""
        match key:
            case SocketKey():
                own = key.socket
                where = f"{own.protocol.lower()} socket"
                if not own.port:
                    return [Words(where, f"{own.address} port ?", "no rule tells the port")]
                text = f"LISTEN {join_host_port(own.address, own.port)}"
                return [Words(where, text, "the process accepts connections there")]
            case StrayKey(kind="address"):
                return [Words(f"interface {key.where}", key.text, "the node has the address")]
            case StrayKey():
                tool, table = ("iptables", "ip") if key.family is Family.IPV4 else _TOOLS6
                where = f"table {table} kube-portals, "
                where += f"map {key.where}" if key.where else "chain"
                if key.text.startswith("-A "):
                    where = f"{tool} -t {key.where}, chain {key.text.split()[1]}"
                return [Words(where, key.text, purpose_of(_PURPOSES, key.text))]
            case BaseKey():
                return [Words(key.family.kubernetes, "chains and jumps", "lead to the portals")]
        return super().words(key, value)
