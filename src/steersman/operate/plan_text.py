"""What pasted manifests or a pasted configuration would change on a node, from its World alone.

    manifests       are laid over the Services and EndpointSlices of the node, as `kubectl apply`
                    would; fields that the API server keeps or assigns are kept or assumed
    configuration   a KubeProxyConfiguration: what a node that starts with it would do
    mode            another mode, with the node's other settings

Nothing is read but the World, and nothing is written. The work is that of `plan_change.py`: compile
both states, render both, compare.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from steersman.config import parse_command_line
from steersman.config.errors import ConfigError, Invalid
from steersman.model import codes
from steersman.model.addresses import canonical_ip, family_of
from steersman.model.findings import Finding, clipped, printable
from steersman.model.inputs import Snapshot
from steersman.model.kube import EndpointSlice, Service, ServicePort
from steersman.model.names import ObjectName
from steersman.model.world import World
from steersman.modes.specs import SPECS
from steersman.operate.answer import QuestionError
from steersman.operate.plan_answer import PlanAnswer
from steersman.operate.plan_change import (
    Wanted,
    find_change,
    summarize,
    wanted_settings,
)
from steersman.source.documents import BrokenFileError
from steersman.source.manifests import Manifest, combine_manifests, read_manifest

MOST_BYTES = 1 << 20
"""Length of a text."""
MOST_LINES = 500
"""Lines of kernel objects in an answer."""
_PLACE = "the text"
# Not indented, because a ConfigMap may contain a configuration as text.
_IS_CONFIGURATION = re.compile(
    r"""^["']?kind["']?\s*:\s*["']?KubeProxyConfiguration"""
    r"""|\A\s*\{(?s:.*?)"kind"\s*:\s*"KubeProxyConfiguration\"""",
    re.MULTILINE,
)
_IS_MANIFEST = re.compile(r"""^["']?kind["']?\s*:\s*["']?(Service|EndpointSlice|List)\b""", re.M)
_NODE_PORTS = range(32767, 29999, -1)
"""Node ports that are assumed, the first one first."""
_SHOWN_FINDINGS = 20
_MOST_NOTES = 20


class PlanQuestion(msgspec.Struct, frozen=True):
    """A change that is asked about; empty fields change nothing."""

    text: str = ""
    """Manifests or a KubeProxyConfiguration, YAML or JSON."""
    mode: str = ""
    whole: bool = False
    """The manifests are all Services that there will be: others are taken to be deleted."""
    lines: bool = False
    """List the kernel objects."""


async def plan_text(world: World, asked: PlanQuestion) -> PlanAnswer:
    """Return what a change would do on the node of a World.

    Raises:
        QuestionError: the text cannot be understood; it names the object and the field.
    """
    check_question(asked)
    configuration = _IS_CONFIGURATION.search(asked.text) is not None
    if configuration and _IS_MANIFEST.search(asked.text):
        raise QuestionError("the text has a configuration and manifests: plan one after the other")
    notes: list[str] = []
    wanted = _wanted(world, asked.text if configuration else "", asked.mode, notes)
    if asked.text.strip() and not configuration:
        overlay = _Overlay(world, asked.whole)
        snapshot, findings = overlay.apply(_read(asked.text))
        wanted = wanted._replace(snapshot=snapshot, findings=findings)
        notes += overlay.notes
    change = await find_change(wanted, before=world, before_mode=world.mode, read_kernel=False)
    answer = await summarize(change, world)
    node = world.config.node_name
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"{len(notes) - _MOST_NOTES} more notes of this kind are left out"]
    lines = change.lines if asked.lines else ()
    if (more := len(lines) - MOST_LINES) > 0:
        lines = (*lines[:MOST_LINES], f"# and {more:,} more lines: steersman plan --objects")
    return msgspec.structs.replace(
        answer,
        source=world.origin.text,
        compared_with=f"the rules as the process on {node or 'the node'} wrote them",
        notes=(*answer.notes, *notes),
        details=lines,
    )


def check_question(asked: PlanQuestion) -> None:
    """Raise QuestionError if there is nothing to plan, or too much."""
    size = len(asked.text.encode())
    if size > MOST_BYTES:
        raise QuestionError(f"the text has {size:,} bytes, more than {MOST_BYTES:,}: divide it")
    if asked.mode and asked.mode not in SPECS:
        known = ", ".join(SPECS)
        raise QuestionError(f"there is no mode {clipped(asked.mode, 40)}; known: {known}")
    if not asked.text.strip() and not asked.mode:
        raise QuestionError("nothing to plan: give manifests, a configuration or another mode")


# The configuration


def _wanted(world: World, configuration: str, mode: str, notes: list[str]) -> Wanted:
    """Return the state with another configuration or mode, and the objects that there are."""
    flags = ["--config", "the configuration"] if configuration else ["--proxy-mode", world.mode]
    if mode:
        flags = [*flags[: 2 * bool(configuration)], "--proxy-mode", mode]
    try:
        parsed = parse_command_line(flags, read=lambda _: configuration.encode())
    except Invalid as error:
        raise QuestionError(f"the configuration is invalid: {_one_line(error)}") from error
    except ConfigError as error:
        raise QuestionError(f"the configuration cannot be read: {_one_line(error)}") from error
    notes += parsed.warnings
    config = msgspec.structs.replace(parsed.config, hostname_override=world.config.node_name or "?")
    parsed = msgspec.structs.replace(parsed, config=config)
    config, node, options = wanted_settings(parsed, world)
    node = msgspec.structs.replace(node, node_name=world.config.node_name)
    if configuration:
        notes.append("only settings that shape rules are compared; a restart may need more")
    return Wanted(config.mode, options, node, world.snapshot, world.facts, world.origin.text)


def _one_line(error: Exception) -> str:
    return clipped(printable(" ".join(str(error).split())), 2000)


# The manifests


def _read(text: str) -> Manifest:
    """Return the objects of a text; raise QuestionError that names malformed ones."""
    try:
        manifest = read_manifest(_PLACE, text.encode())
    except BrokenFileError as error:
        raise QuestionError(f"the text cannot be read: {_one_line(error)}") from error
    if not any(located.kind in ("Service", "EndpointSlice") for located in manifest.objects):
        found = [str(each) for each in manifest.findings[:_SHOWN_FINDINGS]]
        raise QuestionError(
            "; ".join(map(printable, found))
            or "the text has no Service, EndpointSlice or KubeProxyConfiguration"
        )
    return manifest


class _Overlay:
    """Lays manifests over the objects of a World, as the API server would keep them."""

    def __init__(self, world: World, whole: bool) -> None:
        self.notes: list[str] = []
        self._world = world
        self._whole = whole
        self._services = dict(world.snapshot.services)
        self._known = {**world.unserved, **world.snapshot.services}
        self._slices = {
            owner: {each.metadata.name: each for each in slices}
            for owner, slices in world.snapshot.slices.items()
        }
        self._addresses: set[str] = set()
        self._ports: set[int] = set()
        for service in self._services.values():
            self._addresses.update(service.spec.cluster_ips or (), (service.spec.cluster_ip or "",))
            self._ports.update(port.node_port or 0 for port in service.spec.ports or ())

    def apply(self, manifest: Manifest) -> tuple[Snapshot, tuple[Finding, ...]]:
        """Return the objects after the change, and the Findings about the text."""
        combined = combine_manifests({_PLACE: manifest})
        services: Mapping[ObjectName, Any] = combined.objects["Service"]
        slices: Mapping[ObjectName, Any] = combined.objects["EndpointSlice"]
        if self._whole:
            for name in self._services.keys() - services.keys():
                del self._services[name]
                self._slices.pop(name, None)
        for name, service in services.items():
            applied = self.as_applied(name, service, self._known.get(name))
            if not applied.is_served:
                self._services.pop(name, None)
                self.notes.append(f"Service {name} is not served: it has no cluster IP")
            else:
                self._services[name] = applied
        for slice_ in slices.values():
            self.put_slice(slice_)
        for name in services:
            if name in self._services and not self._slices.get(name):
                text = f"Service {name} has no EndpointSlice here yet: give one to see its traffic"
                self.notes.append(text)
        findings = combined.findings.get(_PLACE, ())
        # The API server assigns what a file would lack for ever.
        findings = tuple(
            f for f in findings if f.code != codes.CLUSTER_IP and not f.field.endswith(".nodePort")
        )
        by_owner = {owner: tuple(group.values()) for owner, group in self._slices.items()}
        snapshot = msgspec.structs.replace(
            self._world.snapshot, services=self._services, slices=by_owner
        )
        return snapshot, findings

    def put_slice(self, slice_: EndpointSlice) -> None:
        """Add a slice to its Service."""
        meta = slice_.metadata
        for name, group in self._slices.items():  # it may have belonged to another Service
            if name.namespace == meta.namespace:
                group.pop(meta.name, None)
        if meta.labels and meta.labels.service_name:
            owner = ObjectName(meta.namespace, meta.labels.service_name)
            self._slices.setdefault(owner, {})[meta.name] = slice_

    def as_applied(self, name: ObjectName, new: Service, old: Service | None) -> Service:
        """Return a Service with the fields that the API server keeps or assigns."""
        meta = new.metadata
        if old is not None and meta.creation_timestamp is None:
            stamp = old.metadata.creation_timestamp
            meta = msgspec.structs.replace(meta, creation_timestamp=stamp)
        status = new.status or (old.status if old else None)
        spec = new.spec
        if spec.type == "ExternalName" or spec.cluster_ip == "None":
            return msgspec.structs.replace(new, metadata=meta, status=status)
        before = old.spec if old and old.spec.cluster_ip not in (None, "", "None") else None
        if not spec.cluster_ip and before is not None:
            families = spec.ip_families or before.ip_families
            spec = msgspec.structs.replace(
                spec,
                cluster_ip=before.cluster_ip,
                cluster_ips=before.cluster_ips,
                ip_families=families,
            )
        elif not spec.cluster_ip and (address := next(self.free_addresses(), None)):
            self._addresses.add(address)
            family = family_of(address).kubernetes
            spec = msgspec.structs.replace(
                spec, cluster_ip=address, cluster_ips=[address], ip_families=[family]
            )
            self.notes.append(f"Service {name}: the cluster IP {address} is assumed")
        elif not spec.cluster_ip:
            self.notes.append(f"Service {name}: give spec.clusterIP, no range is known for it")
        if spec.type in ("NodePort", "LoadBalancer"):
            numbers = {
                (port.name or "", port.protocol or "TCP"): port.node_port
                for port in (old.spec.ports if old else None) or ()
            }
            ports = [self.with_node_port(name, port, numbers) for port in spec.ports or ()]
            spec = msgspec.structs.replace(spec, ports=ports)
        return msgspec.structs.replace(new, metadata=meta, status=status, spec=spec)

    def with_node_port(
        self,
        name: ObjectName,
        port: ServicePort,
        numbers: Mapping[tuple[str, str], int | None],
    ) -> ServicePort:
        """Return a port with its node port, an earlier or an assumed one if it names none."""
        if port.node_port:
            return port
        number = numbers.get((port.name or "", port.protocol or "TCP"))
        if not number:
            number = next((each for each in _NODE_PORTS if each not in self._ports), 0)
            self._ports.add(number)
            self.notes.append(f"Service {name}: the node port {number} is assumed")
        return msgspec.structs.replace(port, node_port=number)

    def free_addresses(self) -> Iterator[str]:
        """Yield cluster IPs that no Service has, from the end of the range of the first family."""
        cidrs = [*self._world.snapshot.service_cidrs]
        if not cidrs:  # near those that are known
            known = min((ip for text in self._addresses if (ip := canonical_ip(text))), default="")
            if known:
                cidrs = [f"{known}/{24 if family_of(known) == 4 else 120}"]
        for cidr in cidrs[:1]:
            network = ipaddress.ip_network(cidr, strict=False)
            first, last = int(network.network_address) + 1, int(network.broadcast_address) - 1
            for number in range(last, first, -1):
                address = str(ipaddress.ip_address(number))
                if address not in self._addresses:
                    yield address
