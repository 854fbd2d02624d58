"""Resolve what operators type, such as `shop/web:http` or `pod-1.shop`, to addresses. Pure.

    shop/web  web.shop  web.shop.svc.cluster.local  web     a Service, or a pod of that name
    pod/shop/web-1  svc/web  node/node-a                    the same, with its kind in front
    10.96.0.10  [fd00::10]                                  an address
    node-a                                                  a node
    any of these, then :80 or :http, then /udp or /sctp     a port of it
    :30080                                                  a node port of this node
    pod  node  external (outside)                           a class of clients

Pods are known by the endpoints that name them; other pods can be given to `Names`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from steersman.compile.node import node_name_of
from steersman.model.addresses import canonical_ip, join_host_port, special_range
from steersman.model.findings import printable, quoted
from steersman.model.kube import Node, Pod, ServicePort, SliceEndpoint
from steersman.model.names import ObjectName, Protocol
from steersman.model.plan import SourceClass
from steersman.model.world import World
from steersman.operate.answer import QuestionError

Kind: TypeAlias = Literal["class", "address", "service", "pod", "node"]

_CLASSES = {
    **{each.value: each for each in SourceClass},
    "outside": SourceClass.EXTERNAL,
    "internet": SourceClass.EXTERNAL,
}
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("service", "services", "svc"), "service"),
    **dict.fromkeys(("pod", "pods", "po"), "pod"),
    **dict.fromkeys(("node", "nodes", "no"), "node"),
}
_NOUNS = {"service": "Service", "pod": "pod", "node": "node"}
_MOST_SIMILAR = 5
_MOST_COMPARED = 20_000
"""Names that are compared with one that is not found; more would take seconds."""


class UnknownNameError(QuestionError):
    """A name means nothing that is known; the message lists names that are similar."""

    def __init__(self, message: str, pod: ObjectName | None = None) -> None:
        super().__init__(message)
        self.pod = pod
        """The pod that it may be, which an API server could be asked for."""


class KnownPod(msgspec.Struct, frozen=True):
    """A pod, as far as its endpoints or its own object tell."""

    name: ObjectName
    ips: tuple[str, ...] = ()
    node: str = ""
    """Name of its node; "" if it is not known."""
    services: tuple[ObjectName, ...] = ()
    """The Services that have an EndpointSlice with it."""


def known_pod(pod: Pod) -> KnownPod:
    """Return what the object of a pod tells."""
    status = pod.status
    texts = [ip.ip for ip in (status.pod_ips if status else None) or ()]
    texts = texts or [(status.pod_ip if status else None) or ""]
    addresses = tuple(ip for text in texts if (ip := canonical_ip(text)))
    return KnownPod(pod.metadata.object_name, addresses, pod.spec.node_name or "")


class Target(msgspec.Struct, frozen=True):
    """The meaning of a name."""

    kind: Kind
    label: str
    """For people: `shop/web-1`, `node-a`, `10.96.0.10`, `external`."""
    name: ObjectName | None = None
    """Of a Service, pod or node."""
    addresses: tuple[str, ...] = ()
    """Canonical: clusterIPs, pod IPs, addresses of a node with the InternalIP first."""
    node: str = ""
    """The node that a pod runs on, that a node is, or that an address belongs to; "" if that is
    not known."""
    client: SourceClass | None = None
    """For a class of clients."""
    port: int = 0
    """Port number of anything but a Service; 0 if none was given."""
    ports: tuple[ServicePort, ...] = ()
    """The ports of a Service that were meant, all without a given one."""
    protocol: Protocol | None = None
    """None if none was given."""


class _Words(NamedTuple):
    """The parts of a typed name."""

    host: str
    port: str = ""
    protocol: Protocol | None = None


def split_words(text: str) -> _Words:
    """Split a typed name into host, port and protocol.

    Raises:
        QuestionError: it has no such form.
    """
    rest, protocol = text.strip(), None
    base, slash, word = rest.rpartition("/")
    # `shop/udp` is a Service called udp: a protocol follows a port or an address.
    after_port = base.rpartition("]")[2].partition(":")[1] and not canonical_ip(base)
    if slash and (after_port or canonical_ip(base.strip("[]"))):
        if word.upper() not in Protocol.__members__:
            raise QuestionError(f"{quoted(text)}: {quoted(word)} is not tcp, udp or sctp")
        rest, protocol = base, Protocol(word.upper())
    if canonical_ip(rest) is not None:  # an IPv6 address has colons, too
        return _Words(rest, "", protocol)
    host, colon, port = rest.rpartition(":")
    if not colon or rest.endswith("]"):
        host, port = rest, ""
    elif not port:
        raise QuestionError(f"{quoted(text)}: the port is missing after the colon")
    elif ":" in host and not host.startswith("["):
        raise QuestionError(
            f"{quoted(text)}: an IPv6 address with a port needs brackets, as in [fd00::1]:80"
        )
    if host.startswith("["):
        host = host[1:-1] if host.endswith("]") else host
        if canonical_ip(host) is None:
            raise QuestionError(f"{quoted(text)}: {quoted(host)} is not an IP address")
    if port.isdecimal() and not 0 < int(port) < 65536:
        raise QuestionError(f"{quoted(text)}: the port must be between 1 and 65535")
    if not host and not port:
        raise QuestionError("give a name or an address")
    return _Words(host, port, protocol)


class Names:
    """The names of a World."""

    def __init__(self, world: World, namespace: str = "", pods: Iterable[KnownPod] = ()) -> None:
        """Prepare to resolve names; indices are made when they are needed.

        Args:
            world: where to look.
            namespace: of names without one; "" for `default`.
            pods: further pods, which need not be behind an endpoint.
        """
        self.world = world
        self.namespace = namespace or "default"
        self.here = node_name_of(world.config, world.facts)
        """The name of the node that the World is about."""
        self.missed: set[str] = set()
        """Nodes and addresses that an answer needed to know more about than the World does."""
        self._more_pods = tuple(pods)

    # Known objects

    @cached_property
    def pods(self) -> dict[ObjectName, KnownPod]:
        """All known pods by name."""
        found: dict[ObjectName, KnownPod] = {}
        for service, each in self._endpoints():
            ref = each.target_ref
            if ref is not None and ref.kind == "Pod":
                name = ObjectName(ref.namespace or service.namespace, ref.name)
                ips = [ip for text in each.addresses or () if (ip := canonical_ip(text))]
                self._add_pod(found, KnownPod(name, (*ips,), each.node_name or "", (service,)))
        for pod in self._more_pods:
            self._add_pod(found, pod)
        return found

    def _endpoints(self) -> Iterator[tuple[ObjectName, SliceEndpoint]]:
        """Yield all endpoints with their Services."""
        for service, slices in self.world.snapshot.slices.items():
            for slice_ in slices:
                for each in slice_.endpoints or ():
                    yield service, each

    @staticmethod
    def _add_pod(found: dict[ObjectName, KnownPod], pod: KnownPod) -> None:
        """Add what one endpoint tells: a pod may be in several Services, with several addresses."""
        known = found.get(pod.name)
        if known is not None:
            pod = KnownPod(
                pod.name,
                tuple(dict.fromkeys((*known.ips, *pod.ips))),
                known.node or pod.node,
                tuple(dict.fromkeys((*known.services, *pod.services))),
            )
        found[pod.name] = pod

    @cached_property
    def pods_by_ip(self) -> dict[str, list[KnownPod]]:
        """The known pods by canonical address."""
        found: dict[str, list[KnownPod]] = {}
        for pod in self.pods.values():
            for ip in pod.ips:
                found.setdefault(ip, []).append(pod)
        return found

    def pods_at(self, address: str) -> tuple[KnownPod, ...]:
        """Return the known pods with a canonical address; several if they use the host's."""
        return tuple(self.pods_by_ip.get(address, ()))

    @cached_property
    def endpoint_nodes(self) -> dict[str, str]:
        """The node of each endpoint by its canonical address; "" if its slice does not say."""
        found: dict[str, str] = {}
        for _, each in self._endpoints():
            for text in each.addresses or ():
                if (address := canonical_ip(text)) is not None:
                    found[address] = each.node_name or found.get(address, "")
        return found

    @cached_property
    def nodes(self) -> dict[str, Node | None]:
        """All known nodes by name; None for one of which there is no object."""
        found: dict[str, Node | None] = {each.metadata.name: each for each in self.world.nodes}
        found.setdefault(self.here, self.world.snapshot.node)
        others = (*self.endpoint_nodes.values(), *(pod.node for pod in self.pods.values()))
        for name in others:
            if name:
                found.setdefault(name, None)
        return found

    @cached_property
    def node_by_ip(self) -> dict[str, str]:
        """The names of nodes by canonical address."""
        found: dict[str, str] = {}
        for name in self.nodes:
            for address in self.node_addresses(name):
                found.setdefault(address, name)
        settings = self.world.plan.settings
        for family in settings.families:
            for address in settings.family(family).local_addresses:
                found.setdefault(address, self.here)
        return found

    def node_at(self, address: str) -> str:
        """Return the node that has a canonical address; "" if none is known to."""
        return self.node_by_ip.get(address, "")

    def node_addresses(self, name: str) -> tuple[str, ...]:
        """Return the addresses of a node by its Node object, InternalIPs first.

        Those of this node are on its interfaces if there is no object.
        """
        node = self.nodes.get(name)
        ranked = sorted(node.addresses if node else (), key=lambda each: each.type != "InternalIP")
        texts = [each.address for each in ranked if each.type in ("InternalIP", "ExternalIP")]
        found = dict.fromkeys(ip for text in texts if (ip := canonical_ip(text)))
        if not found and name == self.here:
            settings = self.world.plan.settings
            for family in map(settings.family, settings.families):
                own = (family.node_ip, *family.local_addresses)
                found |= dict.fromkeys(ip for ip in own if not special_range(ip))
        return tuple(found)

    # Meanings

    def client(self, text: str) -> Target:
        """Return the meaning of a client: a class, an address, a pod or a node.

        Raises:
            QuestionError: it means nothing known, or several things.
        """
        word = text.strip().lower()
        if word in _CLASSES:
            client = _CLASSES[word]
            return Target("class", client.value, client=client)
        found = self.resolve(text)
        if found.kind == "service":
            raise QuestionError(
                f"{quoted(text)} is a Service: connections come from a pod, a node or an address"
            )
        return found

    def resolve_service(self, text: str) -> Target:
        """Return the Service that a text means, with the ports that it names.

        Raises:
            QuestionError: it means nothing known, several things, or no Service.
        """
        found = self.resolve(text)
        if found.kind != "service":
            raise QuestionError(f"{text!r} is not a Service ({found.kind}): give NAMESPACE/NAME")
        return found

    def resolve(self, text: str) -> Target:
        """Return the meaning of a name or address.

        Raises:
            UnknownNameError: it means nothing known.
            QuestionError: it has no valid form, or means several things.
        """
        words = split_words(text)
        if words.host.lower() in _CLASSES and not self._candidates(words.host):
            raise QuestionError(
                f"{quoted(words.host)} is a class of clients: as a destination, give a name or an "
                "address"
            )
        if not words.host:
            found = [self._node(self.here)]
        elif (address := canonical_ip(words.host)) is not None:
            pods = self.pods_at(address)
            node = pods[0].node if pods else self.endpoint_nodes.get(address, "")
            node = node or self.node_at(address)
            found = [Target("address", address, addresses=(address,), node=node)]
        else:
            found = self._candidates(words.host)
        if len(found) > 1:
            full = " or ".join(f"{each.kind}/{each.label}" for each in found)
            nouns = " and a ".join(_NOUNS[each.kind] for each in found)
            raise QuestionError(f"{quoted(words.host)} is a {nouns}: write {full}")
        if not found:
            raise self._unknown(words.host)
        return self._with_port(found[0], words, text)

    def _with_port(self, target: Target, words: _Words, text: str) -> Target:
        """Return a target with the port and protocol of the words."""
        protocol, port = words.protocol, words.port
        if target.kind != "service":
            if port and not port.isdecimal():
                raise QuestionError(
                    f"{quoted(text)}: only ports of Services have names; give the number"
                )
            return msgspec.structs.replace(target, port=int(port or 0), protocol=protocol)
        meant = [
            each
            for each in target.ports
            if (not port or port in (each.name, str(each.port)))
            and protocol in (None, each.protocol or "TCP")
        ]
        if target.ports and not meant:
            listed = ", ".join(
                f"{each.name + ' ' if each.name else ''}{each.port}/{each.protocol or 'TCP'}"
                for each in target.ports
            )
            what = f"{port}{f'/{protocol}' if protocol else ''}"
            raise QuestionError(f"Service {target.label} has no port {what}; it has {listed}")
        return msgspec.structs.replace(target, ports=tuple(meant), protocol=protocol)

    def _candidates(self, host: str) -> list[Target]:
        """Return everything that a name without a port may mean."""
        prefix, slash, rest = host.partition("/")
        kind = _KINDS.get(prefix) if slash else None
        if kind is not None and (found := list(self._named(rest, kind))):
            return found
        return list(self._named(host, None))

    def _named(self, host: str, kind: Kind | None) -> Iterator[Target]:
        """Yield the objects of a name, of one kind or of every kind."""
        if kind in (None, "node") and host in self.nodes:
            yield self._node(host)
        seen = set()
        for name, only in self._readings(host):
            if kind in (None, "service") and only in (None, "service") and name not in seen:
                service = self.world.service(name)
                if service is not None:
                    spec = service.spec
                    texts = spec.cluster_ips or [spec.cluster_ip or ""]
                    ips = dict.fromkeys(ip for text in texts if (ip := canonical_ip(text)))
                    ports = tuple(spec.ports or ())
                    yield Target("service", str(name), name, tuple(ips), ports=ports)
            if kind in (None, "pod") and only in (None, "pod") and name not in seen:
                pod = self.pods.get(name)
                if pod is not None:
                    yield Target("pod", str(name), name, pod.ips, pod.node)
            seen.add(name)

    def _readings(self, host: str) -> Iterator[tuple[ObjectName, Kind | None]]:
        """Yield the objects that a name may spell: namespace/name, or a name of cluster DNS."""
        if "/" in host:
            yield ObjectName(*host.split("/", 1)), None
            return
        yield ObjectName(self.namespace, host), None
        labels = host.rstrip(".").split(".")
        if "svc" in labels[2:]:
            at = labels.index("svc", 2)
            if at == 2:
                yield ObjectName(labels[1], labels[0]), "service"
            else:  # a pod of a StatefulSet, below its headless Service
                yield ObjectName(labels[at - 1], labels[0]), "pod"
        elif len(labels) == 2:
            yield ObjectName(labels[1], labels[0]), None

    def _node(self, name: str) -> Target:
        return Target("node", name, ObjectName("", name), self.node_addresses(name), name)

    def _unknown(self, host: str) -> UnknownNameError:
        """Return the error for a name that means nothing."""
        prefix, slash, rest = host.partition("/")
        kind = _KINDS.get(prefix) if slash else None
        bare = rest if kind else host
        spelled = [name for name, only in self._readings(bare) if only != "service"]
        # Similar names: the same in another namespace, or spelled almost like it.
        base = bare.rpartition("/")[2].split(".")[0]
        known = {
            str(each): each.name
            for each in (*self.world.snapshot.services, *self.world.unserved, *self.pods)
        } | {each: each for each in self.nodes}
        similar = [label for label, name in known.items() if name == base]
        some = list(known)[:_MOST_COMPARED]
        wanted = bare if "/" in bare else f"{self.namespace}/{bare}"
        for one, texts in ((wanted, some), (base, [known[label] for label in some])):
            close = get_close_matches(one, texts, _MOST_SIMILAR)
            similar += [label for label in some if label in close or known[label] in close]
        similar = list(dict.fromkeys(similar))[:_MOST_SIMILAR]
        text = f"no {_NOUNS.get(kind or '', 'Service, pod or node')} {quoted(host)} is known"
        if similar:
            text += f"; similar: {', '.join(map(printable, similar))}"
        limits = ["of pods, only those behind a Service are known"] if kind != "node" else []
        if self.world.origin.kind == "process" and kind in (None, "service"):
            limits.append("of headless Services, none: --kubeconfig asks the API server")
        if limits:
            text += f" ({'; '.join(limits)})"
        pod = None if kind in ("service", "node") else spelled[-1] if spelled else None
        return UnknownNameError(text, pod)


def label_of(target: Target) -> str:
    """Return a target in words, with its port: `shop/web-1:8080`."""
    if not target.port:
        return target.label
    if target.kind == "address":
        return join_host_port(target.label, target.port)
    return f"{target.label}:{target.port}"
