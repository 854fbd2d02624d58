"""The entries of the maps of a Service, each with its purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Ruleset
from steersman.modes.ebpf import dump, layout
from steersman.modes.ebpf.layout import FrontendValue, Kind, ServiceValue, service_name
from steersman.modes.ebpf.render import frontend_key
from steersman.modes.kernel_words import KernelWords, Words

_PLURALS = {
    Kind.FRONTEND: "frontends",
    Kind.SERVICE: "ServicePorts with their endpoints",
    Kind.RANGE: "source ranges",
    Kind.NODE_IP: "addresses that serve node ports",
    Kind.PREFIX: "prefixes of the node",
    Kind.CONFIG: "configurations",
    Kind.MAGLEV: "Maglev tables",
    Kind.PROGRAMS: "attached programs",
}
_NODE_KINDS = (Kind.CONFIG.value, Kind.PREFIX.value, Kind.PROGRAMS.value)


class EbpfWords(KernelWords):
    """Entries of the pinned maps, and the programs."""

    def __init__(self, pins: Path, are_attached: Callable[[], bool]) -> None:
        """Describe the maps that are pinned below a directory.

        Args:
            pins: the directory.
            are_attached: whether all programs are attached, blocking.
        """

        # The process holds the lock of the maps, which only writers need.
        def read() -> Ruleset:
            tables = dump.open_tables(pins / "maps")
            ruleset = tables.read()
            if any(tables.node.programs) and are_attached():
                ruleset[Kind.PROGRAMS.value] = tables.node.programs
            return ruleset

        super().__init__(lambda: asyncio.to_thread(read))

    def kind(self, key: bytes) -> str:
        """Return the kind of an entry."""
        return _PLURALS[Kind(layout.kind_of(key))]

    def of_services(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> Iterator[bytes]:
        """Yield entries by the name of the ServicePort, and frontends by destination."""
        names = {service_name(plan.key) for plan in plans}
        keys = {
            Kind.FRONTEND + frontend_key(plan, frontend)
            for plan in plans
            for frontend in plan.frontends
        }
        for key, value in kernel.items():
            kind, rest = layout.split_key(key)
            match kind:
                case Kind.SERVICE | Kind.MAGLEV:
                    mine = rest in names
                case Kind.FRONTEND:
                    mine = key in keys or FrontendValue.unpack(value).service in names
                case Kind.RANGE:
                    mine = layout.split_range(rest)[1] in names
                case _:
                    mine = False
            if mine:
                yield key

    def is_on_path(self, key: bytes, plans: Collection[ServicePlan]) -> bool:
        """Whether it is the configuration, or for node ports an address that serves them."""
        kind = layout.kind_of(key)
        if kind == Kind.NODE_IP.value:
            return any(not frontend.address for plan in plans for frontend in plan.frontends)
        return kind in _NODE_KINDS

    def rank(self, key: bytes) -> int:
        """Order frontends, endpoints, the rest of the ServicePort, the node."""
        kinds = (Kind.FRONTEND, Kind.SERVICE, Kind.RANGE, Kind.MAGLEV)
        kind = layout.split_key(key)[0]
        return kinds.index(kind) if kind in kinds else len(kinds)

    def words(self, key: bytes, value: bytes) -> Iterable[Words]:
        """Print one entry; of a ServicePort, each endpoint on a line of its own."""
        kind, rest = layout.split_key(key)
        match kind:
            case Kind.SERVICE:
                own, name = ServiceValue.unpack(value), rest.decode()
                affinity = f"{own.seconds} s" if own.seconds else "none"
                lines = [Words("map services", f"{name}: session affinity {affinity}", name)]
                for pool, ends in (("all nodes", own.cluster), ("this node", own.local)):
                    purpose = f"an endpoint for connections that may go to {pool}"
                    names = map(dump.endpoint_name, layout.cut(ends))
                    lines += [Words(f"map slots, endpoints on {pool}", n, purpose) for n in names]
                return lines
            case Kind.FRONTEND:
                own_name = dump.frontend_name(rest)
                actions = dump.describe((key, value)).partition(": ")[2]
                purpose = f"what happens to new connections to {own_name}, by class of client"
                return [Words("map frontends", f"{own_name}: {actions}", purpose)]
            case Kind.RANGE:
                text = dump.describe((key, value)).removeprefix("range ")
                return [Words("map prefixes", text, "source range: these clients may use it")]
            case Kind.MAGLEV:
                text = f"{rest.decode()}: {len(value) // 2} places"
                return [Words("map maglevs", text, "chooses the endpoint of clients outside")]
            case Kind.PROGRAMS:
                text = f"attached to all devices and sockets, version {value.hex()[:8]}"
                return [Words("programs", text, "what sends connections to endpoints")]
            case _:
                return [Words("maps of the node", dump.describe((key, value)))]
