"""A cluster of any size, as the JSON that an API server sends, and as upstream's rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from steersman.netfilter.iptables.names import chain_hash

CLUSTER_CIDR = "10.0.0.0/9"
NODE = "node-a"
ENDPOINTS = 3


def cluster_ip(number: int) -> str:
    return f"10.{128 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def pod_ip(number: int) -> str:
    return f"10.{1 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def pods(number: int, shift: int = 0) -> list[str]:
    """Addresses behind a Service; another shift replaces the last one."""
    first = number * ENDPOINTS
    addresses = [pod_ip(first + index) for index in range(ENDPOINTS)]
    return [*addresses[:-1], pod_ip(1_000_000 + shift)] if shift else addresses


def service(number: int) -> bytes:
    address = cluster_ip(number)
    return json.dumps(
        {
            "metadata": _meta(f"service-{number}"),
            "spec": {
                "type": "ClusterIP",
                "clusterIP": address,
                "clusterIPs": [address],
                "ipFamilies": ["IPv4"],
                "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080}],
                "sessionAffinity": "None",
                "internalTrafficPolicy": "Cluster",
                "selector": {"app": f"service-{number}"},
            },
            "status": {"loadBalancer": {}},
        }
    ).encode()


def endpoint_slice(
    number: int, addresses: Iterable[str], others: Mapping[str, Mapping[str, bool]] | None = None
) -> bytes:
    """Return the slice of a Service; `others`: conditions of endpoints that are not ready."""
    meta = _meta(f"service-{number}-abcde")
    meta["labels"] = {"kubernetes.io/service-name": f"service-{number}"}
    ready = {"ready": True, "serving": True, "terminating": False}
    return json.dumps(
        {
            "metadata": meta,
            "addressType": "IPv4",
            "endpoints": [
                {
                    "addresses": [address],
                    "conditions": (others or {}).get(address, ready),
                    "nodeName": NODE if _is_here(address) else f"node-{index}",
                    "targetRef": {"kind": "Pod", "namespace": "bench", "name": f"pod-{address}"},
                }
                for index, address in enumerate(addresses)
            ],
            "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        }
    ).encode()


def _is_here(address: str) -> bool:
    """One in 250 runs on this node: 120 at 10,000 Services, as many as a node has pods."""
    return address.endswith(".7")


def _meta(name: str) -> dict[str, object]:
    return {
        "name": name,
        "namespace": "bench",
        "uid": f"00000000-0000-0000-0000-{name[-12:]:>12}",
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{"manager": "kubectl", "operation": "Update", "apiVersion": "v1"}],
    }


def chain(number: int, target: str = "") -> str:
    """Name of a Service's chain, or of the chain of one of its endpoints."""
    kind = "KUBE-SEP-" if target else "KUBE-SVC-"
    return kind + chain_hash(f"bench/service-{number}:httptcp{target}")


def dispatch_rule(number: int) -> str:
    """The rule of a Service in KUBE-SERVICES."""
    return (
        f'-A KUBE-SERVICES -m comment --comment "bench/service-{number}:http cluster IP" -m tcp '
        f"-p tcp -d {cluster_ip(number)} --dport 80 -j {chain(number)}"
    )


def service_rules(number: int, addresses: Iterable[str]) -> Iterator[str]:
    """A Service's own chains in upstream's shape: declarations (`:`) and rules."""
    own = chain(number)
    said = f'-m comment --comment "bench/service-{number}:http'
    yield f":{own} - [0:0]"
    yield (
        f'-A {own} {said} cluster IP" -m tcp -p tcp -d {cluster_ip(number)} --dport 80 '
        f"! -s {CLUSTER_CIDR} -j KUBE-MARK-MASQ"
    )
    targets = [f"{address}:8080" for address in addresses]
    for index, target in enumerate(targets):
        endpoint = chain(number, target)
        rest = len(targets) - index
        chance = f"-m statistic --mode random --probability {1 / rest:.10f} " if rest > 1 else ""
        yield f":{endpoint} - [0:0]"
        yield f'-A {own} {said} -> {target}" {chance}-j {endpoint}'
        yield f'-A {endpoint} {said}" -s {target.partition(":")[0]} -j KUBE-MARK-MASQ'
        yield f'-A {endpoint} {said}" -m tcp -p tcp -j DNAT --to-destination {target}'


FIXED = (
    ":KUBE-SERVICES - [0:0]",
    ":KUBE-NODEPORTS - [0:0]",
    ":KUBE-POSTROUTING - [0:0]",
    ":KUBE-MARK-MASQ - [0:0]",
    "-A KUBE-POSTROUTING -m mark ! --mark 0x00004000/0x00004000 -j RETURN",
    "-A KUBE-POSTROUTING -j MARK --xor-mark 0x00004000",
    "-A KUBE-POSTROUTING -j MASQUERADE --random-fully",
    "-A KUBE-MARK-MASQ -j MARK --or-mark 0x00004000",
)
JUMPS = (
    "-A OUTPUT -j KUBE-SERVICES",
    "-A PREROUTING -j KUBE-SERVICES",
    "-A POSTROUTING -j KUBE-POSTROUTING",
)


def restore_text(dispatch: Iterable[int], own: Iterable[str], jumps: Iterable[str] = ()) -> str:
    """One restore as upstream writes it: KUBE-SERVICES whole, chains only of what changed."""
    lines = [*FIXED, *own, *map(dispatch_rule, dispatch), *jumps]
    lines.sort(key=lambda line: not line.startswith(":"))
    return "\n".join(("*nat", *lines, "COMMIT", ""))
