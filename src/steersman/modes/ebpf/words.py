"""The kinds of entries of the maps, each with its purpose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from pathlib import Path

from steersman.host.worker import KernelWorker
from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Ruleset
from steersman.modes import kinds
from steersman.modes.ebpf import dump, layout
from steersman.modes.ebpf.layout import FrontendValue, Kind, ServiceValue, service_name
from steersman.modes.ebpf.render import frontend_key
from steersman.modes.kinds import Words
from steersman.modes.words import KernelWords


def _service_words(key: bytes, value: bytes) -> list[Words]:
    """Print a ServicePort, with each endpoint on a line of its own."""
    own, name = ServiceValue.unpack(value), layout.split_key(key)[1].decode()
    affinity = f"{own.seconds} s" if own.seconds else "none"
    lines = [Words("map services", f"{name}: session affinity {affinity}", name)]
    for pool, ends in (("all nodes", own.cluster), ("this node", own.local)):
        purpose = f"an endpoint for connections that may go to {pool}"
        names = map(layout.print_endpoint, layout.cut(ends))
        lines += [Words(f"map slots, endpoints on {pool}", name, purpose) for name in names]
    return lines


def _frontend_words(key: bytes, value: bytes) -> list[Words]:
    name = dump.frontend_name(layout.split_key(key)[1])
    actions = dump.print_frontend(FrontendValue.unpack(value))
    purpose = f"what happens to new connections to {name}, by class of client"
    return [Words("map frontends", f"{name}: {actions}", purpose)]


def _maglev_words(key: bytes, value: bytes) -> list[Words]:
    name = layout.split_key(key)[1].decode()
    return [Words("map maglevs", f"{name}: {len(value) // 2} places")]


def _program_words(_key: bytes, value: bytes) -> list[Words]:
    text = f"attached to all devices and sockets, version {value.hex()[:8]}"
    return [Words("programs", text)]


def _range_words(key: bytes, _value: bytes) -> list[Words]:
    return [Words("map prefixes", dump.print_range(layout.split_key(key)[1]))]


def _node_words(key: bytes, value: bytes) -> list[Words]:
    return [Words("maps of the node", dump.describe((key, value)))]


def _name(key: bytes, _value: bytes) -> tuple[bytes, ...]:
    """Return the ServicePort that a key begins with."""
    return (layout.split_key(key)[1],)


_KINDS = {
    Kind.FRONTEND: kinds.Kind(
        "frontends",
        0,
        "",
        _frontend_words,
        lambda key, value: (key, FrontendValue.unpack(value).service),
    ),
    Kind.SERVICE: kinds.Kind("ServicePorts with their endpoints", 1, "", _service_words, _name),
    Kind.RANGE: kinds.Kind(
        "source ranges",
        2,
        "source range: these clients may use it",
        _range_words,
        lambda key, _: (layout.split_range(layout.split_key(key)[1])[1],),
    ),
    Kind.MAGLEV: kinds.Kind(
        "Maglev tables", 3, "chooses the endpoint of clients outside", _maglev_words, _name
    ),
    Kind.NODE_IP: kinds.Kind(
        "addresses that serve node ports", 4, "", _node_words, passed_by="node ports"
    ),
    Kind.PREFIX: kinds.Kind("prefixes of the node", 4, "", _node_words, passed_by="all"),
    Kind.CONFIG: kinds.Kind("configurations", 4, "", _node_words, passed_by="all"),
    Kind.PROGRAMS: kinds.Kind(
        "attached programs",
        4,
        "what sends connections to endpoints",
        _program_words,
        passed_by="all",
    ),
}


class EbpfWords(KernelWords):
    """Entries of the pinned maps, and the programs."""

    def __init__(self, worker: KernelWorker, pins: Path, are_attached: Callable[[], bool]) -> None:
        """Describe the maps that are pinned below a directory.

        Args:
            worker: the thread that reads them.
            pins: the directory.
            are_attached: whether all programs are attached.
        """

        # The process holds the lock of the maps, which only writers need.
        def read() -> Ruleset:
            tables = dump.open_tables(pins / "maps")
            ruleset = tables.read()
            if any(tables.node.programs) and are_attached():
                ruleset[Kind.PROGRAMS.value] = tables.node.programs
            return ruleset

        super().__init__(worker, read)

    def kind_of(self, key: bytes) -> kinds.Kind:
        """Return the kind of an entry."""
        return _KINDS[Kind(layout.kind_of(key))]

    def names_of(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> set[Hashable]:
        """Return the names of ServicePorts, and the keys of frontends."""
        del kernel
        names: set[Hashable] = {service_name(plan.key) for plan in plans}
        for plan in plans:
            names |= {Kind.FRONTEND + frontend_key(plan, each) for each in plan.frontends}
        return names
