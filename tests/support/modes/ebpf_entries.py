"""Walks through the entries of the ebpf mode's maps, as the programs do for a new connection."""

from __future__ import annotations

from collections import defaultdict

from steersman.model.addresses import family_of
from steersman.model.names import Protocol
from steersman.model.plan import NodeSettings, SourceClass, Verdict
from steersman.model.ruleset import Ruleset
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.layout import FrontendValue, Kind, ServiceValue, pack_address
from tests.support.modes.flows import Answer, FlowCase

_ORDER = (SourceClass.POD, SourceClass.NODE, SourceClass.EXTERNAL)
_VERDICTS = {number: verdict for verdict, number in layout.VERDICTS.items()}


class Entries:
    """The rendered objects of a node, sorted as the maps have them."""

    def __init__(self, ruleset: Ruleset, settings: NodeSettings) -> None:
        self._settings = settings
        found = layout.by_kind(ruleset)
        self._frontends = {k: FrontendValue.unpack(v) for k, v in found[Kind.FRONTEND.value]}
        self._services = {k: ServiceValue.unpack(v) for k, v in found[Kind.SERVICE.value]}
        self._served = {
            layout.address_of(key)
            for key, value in self._frontends.items()
            if value.flags & layout.FRONTEND_CLUSTER_IP
        }
        self._node_ips = {key for key, _ in found[Kind.NODE_IP.value]}
        self._ranges: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for key, _ in found[Kind.RANGE.value]:
            cidr, name = layout.split_range(key)
            self._ranges[name].append(cidr)
        self._prefixes: defaultdict[int, list[bytes]] = defaultdict(list)
        for key, _ in found[Kind.PREFIX.value]:
            number, cidr = layout.split_node_prefix(key)
            self._prefixes[number].append(cidr)
        ((_, value),) = found[Kind.CONFIG.value]
        *_, self._flags, interface, prefix = layout.NODE_VALUE.unpack(value)
        self._interface, self._interface_prefix = (
            name.rstrip(b"\0").decode() for name in (interface, prefix)
        )

    def answer(self, flow: FlowCase) -> Answer:
        """Return what becomes of a connection."""
        client = self._class_of(flow)
        own = client is SourceClass.NODE
        address = pack_address(flow.address)
        number = Protocol(flow.protocol).number
        found = self._frontends.get(layout.FRONTEND_KEY.pack(address, flow.port, number))
        if found is None and self._has_node_ports(flow.address, address, own=own):
            unspecified = layout.UNSPECIFIED[family_of(flow.address)]
            found = self._frontends.get(layout.FRONTEND_KEY.pack(unspecified, flow.port, number))
        if found is None:
            if address in self._served:
                return Answer("reject")
            unassigned = _within(address, self._prefixes[layout.PREFIXES_SERVICE_CIDRS])
            return Answer("drop" if unassigned else "untouched")
        source = pack_address(flow.source)
        if found.flags & layout.FRONTEND_RANGES and not _within(
            source, self._ranges[found.service]
        ):
            return Answer("drop")
        action = found.actions >> 4 * _ORDER.index(client) & 15
        masquerade, local = action & layout.ACTION_MASQUERADE, action & layout.ACTION_LOCAL
        verdict = _VERDICTS[action & ~layout.ACTION_MASQUERADE & ~layout.ACTION_LOCAL]
        if verdict is not Verdict.FORWARD:
            return Answer(str(verdict))
        service = self._services[found.service]
        names = map(layout.print_endpoint, layout.cut(service.local if local else service.cluster))
        return Answer(
            "forward",
            frozenset((name, bool(masquerade) or flow.calls_itself(name)) for name in names),
        )

    def _class_of(self, flow: FlowCase) -> SourceClass:
        own = self._settings.family(family_of(flow.source)).local_addresses
        if flow.source in own and not flow.interface:
            return SourceClass.NODE
        pods = self._prefixes[layout.PREFIXES_PODS]
        if self._flags & layout.CONFIG_DETECTOR_CIDR and _within(pack_address(flow.source), pods):
            return SourceClass.POD
        known = flow.interface and (
            flow.interface == self._interface
            or (self._interface_prefix and flow.interface.startswith(self._interface_prefix))
        )
        if self._flags & layout.CONFIG_DETECTOR_DEVICE and known:
            return SourceClass.POD
        return SourceClass.EXTERNAL

    def _has_node_ports(self, text: str, address: bytes, *, own: bool) -> bool:
        if text.startswith("127."):
            if not own:
                return False
            if self._flags & layout.CONFIG_LOCALHOST_NODE_PORTS:
                return True
        return address in self._node_ips


def _within(address: bytes, cidrs: list[bytes]) -> bool:
    number = int.from_bytes(address, "big")
    return any(
        (number ^ int.from_bytes(cidr[1:], "big")) >> (8 * layout.ADDRESS_SIZE - cidr[0]) == 0
        for cidr in cidrs
    )
