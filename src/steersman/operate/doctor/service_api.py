"""Doctor's checks that ask the API server for more than a proxy may read: pods, NetworkPolicies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import quote

from steersman.model.addresses import canonical_ip
from steersman.model.findings import printable
from steersman.model.names import ObjectName
from steersman.operate.doctor.context import ApiReply, Context
from steersman.operate.doctor.result import CheckResult, Found, error, ok, unknown, warning

_FORBIDDEN = 403
Object = Mapping[str, Any]


class _UnansweredError(Exception):
    """The API server did not give the objects; the message says why."""


async def _ask(context: Context, path: str, what: str) -> Any:
    """Return an object of the API server, decoded.

    Raises:
        _UnansweredError: it has no such object, or these credentials may not read it.
    """
    assert context.ask_api is not None
    reply: ApiReply = await context.ask_api(path)
    if reply.status == _FORBIDDEN:
        raise _UnansweredError(
            f"these credentials may not read {what} (HTTP 403): give --kubeconfig of a user who may"
        )
    if reply.status != 200 or not isinstance(reply.body, dict):
        raise _UnansweredError(f"{what} cannot be read: the API server answers {reply.status}")
    return reply.body


async def _pods(context: Context) -> list[Object]:
    """Return the pods of the Service's namespace (a fact of the Context)."""
    name = _name(context)
    path = f"/api/v1/namespaces/{quote(name.namespace)}/pods"
    return _items(await _ask(context, path, f"pods of {name.namespace}"))


def _items(reply: Any) -> list[Object]:
    items = reply.get("items")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _name(context: Context) -> ObjectName:
    assert context.question.service is not None
    return context.question.service


def _get(value: Any, *path: str) -> Any:
    """Return a field of nested mappings; None if anything on the way is missing or malformed."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


# The selector


async def matching_pods(context: Context) -> Found:
    """Compare the Service's selector with the labels of the pods."""
    name = _name(context)
    path = f"/api/v1/namespaces/{quote(name.namespace)}/services/{quote(name.name)}"
    try:
        service = await _ask(context, path, f"Service {name}")
        pods = await context.once(_pods)
    except _UnansweredError as reason:
        return unknown(str(reason))
    selector = _get(service, "spec", "selector")
    if not isinstance(selector, dict) or not selector:
        return ok(f"{name} has no selector: its EndpointSlices are written by someone else")
    words = printable(",".join(f"{key}={value}" for key, value in selector.items()))
    matching = [pod for pod in pods if selects({"matchLabels": selector}, pod)]
    if not matching:
        return near_misses(name, words, selector, pods)
    running = [pod for pod in matching if _get(pod, "status", "phase") == "Running"]
    if not running:
        phases = [f"{_pod_name(pod)}: {_get(pod, 'status', 'phase')}" for pod in matching]
        return error(
            f"none of the {len(matching)} pods that match {words} runs",
            *map(printable, phases),
            remedy=f"see `kubectl -n {name.namespace} describe pod {_pod_name(matching[0])}`",
        )
    return ok(f"the selector {words} matches {len(matching)} pods", *map(_pod_name, matching))


def near_misses(
    name: ObjectName, words: str, selector: Mapping[str, Any], pods: Sequence[Object]
) -> CheckResult:
    """Say which pods the selector may have meant: those that match in most labels."""
    near: list[tuple[int, str]] = []
    for pod in pods:
        labels = _get(pod, "metadata", "labels") or {}
        have = {key: labels.get(key) for key in selector}
        same = sum(have[key] == value for key, value in selector.items())
        if same or any(have.values()):
            shown = ",".join(f"{key}={value}" for key, value in have.items() if value)
            near.append((-same, printable(f"pod {_pod_name(pod)} has {shown}")))
    return error(
        f"the selector {words} of {name} matches none of the {len(pods)} pods of the namespace",
        *(line for _, line in sorted(near)[:5]),
        remedy="correct spec.selector of the Service, or the labels of the pods' template",
    )


def _pod_name(pod: Object) -> str:
    return str(_get(pod, "metadata", "name"))


def _addresses(pod: Object) -> set[str | None]:
    """Return the addresses of a pod, of each family."""
    listed = _get(pod, "status", "podIPs") or [{"ip": _get(pod, "status", "podIP")}]
    return {canonical_ip(str(_get(each, "ip"))) for each in listed} - {None}


# NetworkPolicies


async def network_policies(context: Context) -> Found:
    """Find NetworkPolicies that keep everyone, or the client, from the endpoints."""
    name = _name(context)
    path = f"/apis/networking.k8s.io/v1/namespaces/{quote(name.namespace)}/networkpolicies"
    try:
        policies = _items(await _ask(context, path, f"NetworkPolicies of {name.namespace}"))
        pods = await context.once(_pods)
    except _UnansweredError as reason:
        return unknown(str(reason))
    # One number may be a port of TCP and of UDP, as that of DNS.
    endpoints = dict.fromkeys(
        (endpoint.ip, endpoint.port, plan.key.name.protocol.value)
        for plan in context.plans
        for endpoint in plan.reachable
    )
    out = []
    for pod in pods:
        addresses = _addresses(pod)
        selecting = [
            policy
            for policy in policies
            if "Ingress" in (_get(policy, "spec", "policyTypes") or ["Ingress"])
            and selects(_get(policy, "spec", "podSelector"), pod)
        ]
        for address, port, protocol in endpoints:
            if address in addresses and selecting:
                out.append(admission(context, pod, (port, protocol), selecting, pods))
    return out or ok(f"no NetworkPolicy of {name.namespace} selects an endpoint for ingress")


def selects(selector: Any, pod: Object) -> bool:
    """Whether a label selector with matchLabels and matchExpressions selects a pod."""
    labels = _get(pod, "metadata", "labels") or {}
    for key, value in (_get(selector, "matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    return all(
        holds(expression, labels.get(_get(expression, "key")))
        for expression in _get(selector, "matchExpressions") or ()
    )


def holds(expression: Any, value: Any) -> bool:
    """Whether an entry of matchExpressions is true for the value of its label (None: no label)."""
    among = _get(expression, "values") or ()
    match _get(expression, "operator"):
        case "In":
            return value in among
        case "NotIn":
            return value not in among
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return False


def admission(
    context: Context,
    pod: Object,
    port: tuple[int, str],
    policies: Sequence[Object],
    pods: Sequence[Object],
) -> CheckResult:
    """Judge the NetworkPolicies that select a pod for ingress, at one of its ports."""
    names = ", ".join(printable(_pod_name(policy)) for policy in policies)
    rules = [
        rule
        for policy in policies
        for rule in _get(policy, "spec", "ingress") or ()
        if covers_port(rule, pod, *port)
    ]
    what = f"port {port[0]}/{port[1]} of pod {printable(_pod_name(pod))}"
    if not rules:
        return error(
            f"NetworkPolicy {names} lets nobody in at {what}",
            remedy=f"add an ingress rule for port {port[0]} to it",
        )
    peers: list[Any] = []
    for rule in rules:
        peers += _get(rule, "from") or [{}]
    if not all(peers):
        return ok(f"NetworkPolicy {names} lets everyone in at {what}")
    flow = context.question.flow
    client = canonical_ip(str(flow.source)) if flow else None
    listed = [f"from {printable(str(peer))}" for peer in peers]
    if client is None:
        return ok(f"NetworkPolicy {names} lets only some clients in at {what}", *listed)
    here = next((other for other in pods if client in _addresses(other)), None)
    if any(lets_in(peer, client, here) for peer in peers):
        return ok(f"NetworkPolicy {names} lets {client} in at {what}", *listed)
    return warning(
        f"NetworkPolicy {names} lets only some clients in at {what}, and {client} is not seen to "
        "be one of them",
        *listed,
        remedy="see that the client is among them; a masqueraded client is seen as a node",
    )


def lets_in(peer: Object, client: str, pod: Object | None) -> bool:
    """Whether a peer of a rule contains a client; `pod` is the client if it is of the namespace."""
    if isinstance(block := peer.get("ipBlock"), dict):
        return _in_block(client, block)
    if peer.get("namespaceSelector") is not None or pod is None:
        return False  # not known
    return selects(peer.get("podSelector"), pod)


def covers_port(rule: Object, pod: Object, port: int, protocol: str) -> bool:
    """Whether an ingress rule covers a port of a pod; without ports it covers all."""
    ports = rule.get("ports")
    if not ports:
        return True
    containers = _get(pod, "spec", "containers") or ()
    named = {
        each.get("name"): each.get("containerPort")
        for container in containers
        for each in container.get("ports") or ()
    }
    for each in ports:
        if (each.get("protocol") or "TCP") != protocol:
            continue
        first = each.get("port")
        number = named.get(first) if isinstance(first, str) else first
        if first is None:
            return True
        if isinstance(number, int) and number <= port <= int(each.get("endPort") or number):
            return True
    return False


def _in_block(client: str, block: Mapping[str, Any]) -> bool:
    try:
        address = ip_address(client)
        inside = address in ip_network(str(block.get("cidr")), strict=False)
        excepted = [ip_network(str(each), strict=False) for each in block.get("except") or ()]
    except ValueError:
        return False
    return inside and not any(address in network for network in excepted)
