"""Try Services of our own on the nodes of a cluster, with pods that the API server is asked for.

    server-N   one for each node: answers; and asks its own Service   (pod.py is the program of all)
    pod-N      asks from a pod; also a server itself, without a Service
    node-N     asks from the network of the node

    Service plain    leads to one server, by its cluster IP and node ports
            sticky   to all servers, with session affinity
            local    to the servers of the node only, with policies Local

The results are the termination messages of the containers, which the kubelet reports: so the API
server need not reach the pods. All objects are in a namespace of their own, which is deleted at the
end; if this process was killed, the pods end by themselves, and the next run deletes the rest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from steersman.model.addresses import family_of
from steersman.model.kube import ObjectMeta, Pod, Service
from steersman.model.names import Family
from steersman.operate.answer import QuestionError
from steersman.operate.connectivity import pod
from steersman.operate.connectivity.answer import NAMESPACE, Connectivity, Result, Tried
from steersman.operate.connectivity.objects import (
    Namespace,
    Node,
    has_ended,
    state_of,
    trouble_of,
)
from steersman.operate.connectivity.pod import TIMES, Check
from steersman.operate.names import known_pod
from steersman.source.client import ApiClient, Connections
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.pace import Timing
from steersman.source.stats import SourceStats
from steersman.source.wire import ApiError

SELECTOR = "app.kubernetes.io/name=steersman"
"""Label of steersman's pods, in the chart and in the kustomization."""
_MOST_NODES = 20
"""Nodes that are tried if none are named."""
_PORT, _TARGET_PORT = 80, 8080
_START_SECONDS, _END_SECONDS, _SERVED_SECONDS = 180.0, 120.0, 30.0
"""Until pods run (images are pulled), until they end, and until a node serves a new Service."""
_POD_SECONDS = 600
"""After that the kubelet ends a pod, whatever became of this process."""
_LOOK = 1.0  # seconds between two looks at the pods
_NAMESPACES, _NODES = "/api/v1/namespaces", "/api/v1/nodes"
_INSIDE = f"{_NAMESPACES}/{NAMESPACE}"
_OWNER = {"app.kubernetes.io/managed-by": "steersman"}
_APP, _POD, _LOCAL = (f"steersman.io/{word}" for word in ("connectivity", "pod", "local"))
_decode_namespace = msgspec.json.Decoder(Namespace).decode
_decode_service = msgspec.json.Decoder(Service).decode
_NODE_LIST = msgspec.json.Decoder(list[Node])
_POD_LIST = msgspec.json.Decoder(list[Pod])


class _Ask(NamedTuple):
    """A check, as the answer shows it."""

    what: str
    family: Family
    check: Check | None
    impossible: str = ""
    """Why it is not tried, without a check."""


class _Client(NamedTuple):
    """A pod of ours that asks."""

    name: str
    node: str
    asks: Sequence[_Ask]

    @property
    def words(self) -> list[str]:
        """The arguments of its program."""
        checks = [ask.check for ask in self.asks if ask.check is not None]
        return ["ask", json.dumps(checks), f"{_SERVED_SECONDS:g}", "/dev/termination-log"]


async def try_cluster(
    access: ClusterAccess, names: Sequence[str] = (), image: str = "", timing: Timing | None = None
) -> Connectivity:
    """Make pods and Services in a cluster, and have the pods connect.

    Args:
        access: the API server, and the operator's credentials.
        names: nodes to try; without any, the first ones that are ready.
        image: of the pods, with python3 (3.11 or later); "" for that of steersman's pods.
        timing: clock, sleep and periods.

    Raises:
        QuestionError: the API server cannot be asked or refuses, or no pod runs.
    """
    timing = timing or Timing()
    async with aclosing(Connections(access, timing)) as connections:
        client, left = ApiClient(connections, SourceStats(), timing), ""
        try:
            nodes, tried = await _find_nodes(client, names)
            run = _Run(client, timing, image or await _image_of_ours(client))
            if nodes:
                await _make_namespace(client, timing)
                try:
                    tried += await run.try_nodes(nodes)
                finally:
                    left = await _remove_namespace(client)
        except ApiError as error:
            need = "; see `steersman connectivity --help` for the rights that this needs"
            raise QuestionError(f"{error}{need if error.status in (401, 403) else ''}") from error
    source = f"the API server {access.servers[0]}"
    return Connectivity(source=source, tried=tuple(tried), left=left)


async def _find_nodes(client: ApiClient, names: Sequence[str]) -> tuple[list[Node], list[Tried]]:
    """Return the nodes to try, and results of those that cannot be tried."""
    known = {node.metadata.name: node for node in await client.list_all("Node", _NODES, _NODE_LIST)}
    if missing := [name for name in names if name not in known]:
        raise QuestionError(f"the cluster has no Node {missing[0]}")
    chosen = [known[name] for name in dict.fromkeys(names) or sorted(known)]
    tried = [
        Tried("all", "", "not tried", node.unfit, node.metadata.name)
        for node in chosen
        if node.unfit
    ]
    fit = [node for node in chosen if not node.unfit]
    return (fit if names else fit[:_MOST_NODES]), tried


async def _image_of_ours(client: ApiClient) -> str:
    """Return the image of steersman's pods, which nodes have already."""
    params = {"labelSelector": SELECTOR}
    for each in await client.list_all("Pod", "/api/v1/pods", _POD_LIST, params):
        if each.spec.containers and each.spec.containers[0].image:
            return each.spec.containers[0].image
    raise QuestionError(
        f"no pod with the label {SELECTOR} runs, whose image could be used: give --image, such as "
        "python:3.13-alpine"
    )


async def _make_namespace(client: ApiClient, timing: Timing) -> None:
    """Make a namespace; one that a killed run left is deleted first.

    Raises:
        QuestionError: the old one is not ours, or does not go away.
    """
    if (old := await _found(client)) is not None:
        if not _OWNER.items() <= (old.metadata.labels or {}).items():
            raise QuestionError(f"namespace {NAMESPACE} exists, and is not one of ours")
        await client.delete(_INSIDE)
    end = timing.now() + _END_SECONDS
    while await _found(client) is not None:
        if timing.now() > end:
            raise QuestionError(f"namespace {NAMESPACE} of an earlier run is not yet deleted")
        await timing.sleep(_LOOK)
    # Pods in the network of a node are allowed in privileged namespaces only.
    labels = {**_OWNER, "pod-security.kubernetes.io/enforce": "privileged"}
    try:
        await client.post(_NAMESPACES, _object("Namespace", NAMESPACE, labels, {}))
    except asyncio.CancelledError:
        await _remove_namespace(client)  # it may have been made
        raise


async def _remove_namespace(client: ApiClient) -> str:
    """Delete the namespace; return what is left if that fails, and why."""
    try:
        await client.delete(_INSIDE)
    except ApiError as error:
        return f"namespace {NAMESPACE} could not be deleted: {error}"
    return ""


async def _found(client: ApiClient) -> Namespace | None:
    try:
        async with client.get(_INSIDE, {}, 30.0) as response:
            return _decode_namespace(await response.read())
    except ApiError as error:
        if error.status == 404:
            return None
        raise


class _Run:
    """A test of some nodes, in the namespace."""

    def __init__(self, client: ApiClient, timing: Timing, image: str) -> None:
        self._client = client
        self._timing = timing
        self._image = image
        self._program = Path(pod.__file__).read_text(encoding="utf-8")

    async def try_nodes(self, nodes: Sequence[Node]) -> list[Tried]:
        """Make Services, servers and clients; return all results."""
        sticky = await self._service("sticky", {_APP: "server"}, sessionAffinity="ClientIP")
        policies = {"internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local"}
        local = await self._service("local", {_LOCAL: "yes"}, type="NodePort", **policies)
        families = [family for family in Family if _cluster_ip(local, family)]

        # A server on each node, which asks itself.
        asks = _asks_of_server(local, families)
        servers = [
            _Client(f"server-{number}", node.metadata.name, asks)
            for number, node in enumerate(nodes)
        ]
        for server in servers:
            await self._pod(server, {_APP: "server", _LOCAL: "yes"}, serves=True)
        if len(nodes) == 1:  # session affinity needs two
            other = _Client("server-1", nodes[0].metadata.name, ())
            await self._pod(other, {_APP: "server"}, serves=True)
        pods = await self._wait(
            servers,
            lambda pod: state_of(pod, "server").running or has_ended(pod, "server"),
            _START_SECONDS,
        )
        asking, up, tried = list[_Client](), list[Node](), list[Tried]()
        for server, node in zip(servers, nodes, strict=True):
            if state_of(found := pods[server.name], "server").running:
                asking.append(server)
                up.append(node)
            else:
                reason = f"no pod runs: {trouble_of(found, 'server')}"
                tried.append(Tried("all", "", "failed", reason, server.node))
        if not up:
            return tried

        # Clients in a pod and in the network of each node.
        first = asking[0].name
        plain = await self._service("plain", {_POD: first}, type="NodePort")
        services = _Services(plain, sticky, local, first, known_pod(pods[first]).ips)
        for number, node in enumerate(up):
            name, another = node.metadata.name, up[(number + 1) % len(up)]
            asks = tuple(_asks_of_pod(services, name, families))
            inside = _Client(f"pod-{number}", name, asks)
            await self._pod(inside, {_APP: "client"})
            asking.append(inside)
            asks = tuple(_asks_of_node(services, node, another, families))
            outside = _Client(f"node-{number}", name, asks)
            try:
                await self._pod(outside, {_APP: "client"}, hostNetwork=True)
            except ApiError as error:
                if not 400 <= error.status < 500:
                    raise
                # Policies of a cluster may forbid the network of nodes.
                tried.append(Tried("all from the node", "", "not tried", str(error), name))
            else:
                asking.append(outside)
        pods = await self._wait(asking, lambda pod: has_ended(pod, "client"), _END_SECONDS)
        for client in asking:
            tried += _results(client, pods[client.name])
        return sorted(tried, key=lambda each: each.node)

    async def _service(self, name: str, selector: Mapping[str, str], **spec: Any) -> Service:
        ports = [
            {"name": each.lower(), "port": _PORT, "targetPort": _TARGET_PORT, "protocol": each}
            for each in ("TCP", "UDP")
        ]
        spec |= {"selector": selector, "ports": ports, "ipFamilyPolicy": "PreferDualStack"}
        # A pod is not ready any more once the container that asks has ended.
        spec["publishNotReadyAddresses"] = True
        body = _object("Service", name, _OWNER, spec)
        return _decode_service(await self._client.post(f"{_INSIDE}/services", body))

    async def _pod(
        self, client: _Client, labels: Mapping[str, str], serves: bool = False, **spec: Any
    ) -> None:
        """Make a pod that asks, and serves beside that."""
        containers = {"client": client.words} if client.asks else {}
        if serves:
            containers["server"] = ["serve", client.name, client.node, str(_TARGET_PORT)]
        spec |= {
            "nodeName": client.node,
            "tolerations": [{"operator": "Exists"}],
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _POD_SECONDS,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65534,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": name,
                    "image": self._image,
                    # Nodes have that of our own pods; for a tag `latest`, the default is to ask a
                    # registry all the same.
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python3", "-c", self._program, *words],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    # Where a quota counts limits, pods without any are refused.
                    "resources": {
                        "requests": {"cpu": "10m", "memory": "32Mi"},
                        "limits": {"cpu": "500m", "memory": "128Mi"},
                    },
                }
                for name, words in containers.items()
            ],
        }
        body = _object("Pod", client.name, {**_OWNER, _POD: client.name, **labels}, spec)
        end = self._timing.now() + _SERVED_SECONDS
        while True:
            try:
                await self._client.post(f"{_INSIDE}/pods", body)
                return
            except ApiError as error:
                # A new namespace has no service account for a moment.
                if "serviceaccount" not in str(error) or self._timing.now() > end:
                    raise
            await self._timing.sleep(_LOOK)

    async def _wait(
        self, clients: Sequence[_Client], done: Callable[[Pod], object], seconds: float
    ) -> dict[str, Pod]:
        """Return our pods once all of these are done, or the time is over."""
        end = self._timing.now() + seconds
        while True:
            found = await self._client.list_all("Pod", f"{_INSIDE}/pods", _POD_LIST)
            pods = {client.name: Pod(ObjectMeta(client.name)) for client in clients}
            pods |= {each.metadata.name: each for each in found}
            if all(done(pods[client.name]) for client in clients) or self._timing.now() > end:
                return pods
            await self._timing.sleep(_LOOK)


def _object(
    kind: str, name: str, labels: Mapping[str, str], spec: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": dict(spec),
    }


# The checks


class _Services(NamedTuple):
    """The Services of a run."""

    plain: Service
    sticky: Service
    local: Service
    server: str
    """The pod that `plain` leads to."""
    server_ips: Sequence[str]
    """Its addresses."""


def _address(addresses: Iterable[str], family: Family) -> str:
    """Return the first address of a family; "" if there is none."""
    return next((each for each in addresses if family_of(each) is family), "")


def _cluster_ip(service: Service, family: Family) -> str:
    """Return the cluster IP of a family; "" if the cluster has none."""
    return _address(service.spec.cluster_ips or (), family)


def _node_port(service: Service, protocol: str) -> int:
    """Return the node port of TCP or UDP."""
    ports = (p.node_port for p in service.spec.ports or () if p.protocol == protocol)
    return next(ports) or 0


def _asks_of_server(local: Service, families: Sequence[Family]) -> tuple[_Ask, ...]:
    """Return what a server asks: itself, as it is the only one on its node."""
    what = "pod to itself by its Service"
    return tuple(
        _Ask(what, family, Check(_cluster_ip(local, family), _PORT)) for family in families
    )


def _asks_of_pod(own: _Services, node: str, families: Sequence[Family]) -> Iterator[_Ask]:
    """Yield what a pod on a node asks."""
    for family in families:
        address = _address(own.server_ips, family)
        without = "" if address else f"{own.server} has no {family.kubernetes} address"
        for protocol in ("TCP", "UDP"):
            check = Check(address, _TARGET_PORT, protocol, server=own.server)
            yield _Ask(f"pod to pod, {protocol}", family, None if without else check, without)
            check = Check(_cluster_ip(own.plain, family), _PORT, protocol, server=own.server)
            yield _Ask(f"pod to cluster IP, {protocol}", family, check)
        sticky = Check(_cluster_ip(own.sticky, family), _PORT, times=TIMES, same=True)
        local = Check(_cluster_ip(own.local, family), _PORT, times=TIMES, node=node)
        yield _Ask("session affinity", family, sticky)
        yield _Ask("internal policy Local", family, local)


def _asks_of_node(
    own: _Services, node: Node, other: Node, families: Sequence[Family]
) -> Iterator[_Ask]:
    """Yield the checks from a node's network, partly at the node ports of another one."""
    for family in families:
        address = other.address(family)
        without = f"{other.metadata.name} has no {family.kubernetes} address" if not address else ""
        for protocol in ("TCP", "UDP"):
            check = Check(_cluster_ip(own.plain, family), _PORT, protocol, server=own.server)
            yield _Ask(f"node to cluster IP, {protocol}", family, check)
            check = Check(address, _node_port(own.plain, protocol), protocol, server=own.server)
            yield _Ask(
                f"node to node port, {protocol}", family, None if without else check, without
            )
        if node is other:
            without = "this needs two nodes"
        number = _node_port(own.local, "TCP")
        local = Check(address, number, times=TIMES, node=other.metadata.name, seen=True)
        what = "external policy Local, client seen"
        yield _Ask(what, family, None if without else local, without)


def _results(client: _Client, found: Pod) -> Iterator[Tried]:
    """Yield what a pod found out."""
    ended, reasons = state_of(found, "client").terminated, None
    if ended is not None and ended.exit_code == 0:
        with suppress(msgspec.DecodeError):
            reasons = iter(msgspec.json.decode(ended.message, type=list[str]))
    for what, family, check, impossible in client.asks:
        result: Result = "not tried"
        reason = impossible
        if check is not None:
            if reasons is None:
                reason = f"pod {client.name} has no result: {trouble_of(found, 'client')}"
            else:
                reason = next(reasons, "its pod says nothing about it")
            result = "failed" if reason else "ok"
        yield Tried(what, family.kubernetes, result, reason, client.node)
