"""The fields of a Service that all its ports share, read leniently (behaviour 3)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from steersman.compile.notes import Notes, port_number
from steersman.model.addresses import canonical_cidr, canonical_ip, special_range
from steersman.model.findings import Severity, quoted
from steersman.model.kube import Service, ServiceSpec
from steersman.model.plan import Value

MAX_DESTINATIONS = 50_000
"""External IPs of a Service, times its ports; the same for load balancer IPs, and for those times
the source ranges (docs/limits.md)."""
DEFAULT_AFFINITY_SECONDS = 10800
MAX_AFFINITY_SECONDS = 86400
_TYPES = (None, "", "ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
_AFFINITIES = (None, "", "None", "ClientIP")
_POLICIES = (None, "", "Cluster", "Local")


class Shared(Value, frozen=True):
    """What all ports of a Service share, both families together where addresses are meant."""

    external_ips: tuple[str, ...] = ()
    vips: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    health_check_node_port: int = 0
    session_affinity: str = ""
    affinity_seconds: int = 0
    external_policy_local: bool = False
    internal_policy_local: bool = False


_NO_AFFINITY = (None, "", "None")
_CLUSTER = (None, "", "Cluster")
_PLAIN = {word: Shared(session_affinity=word or "") for word in _NO_AFFINITY}


def read_shared(service: Service, allow_external_ips: bool, notes: Notes) -> Shared:
    """Read what all ports share; what is malformed is noted and left out."""
    spec = service.spec
    if spec.type != "ClusterIP" or spec.external_ips or spec.session_affinity not in _NO_AFFINITY:
        return _all_shared(service, allow_external_ips, notes)
    if spec.load_balancer_source_ranges or spec.external_traffic_policy or _has_ingress(service):
        return _all_shared(service, allow_external_ips, notes)
    if spec.internal_traffic_policy not in _CLUSTER:
        return _all_shared(service, allow_external_ips, notes)
    return _PLAIN[spec.session_affinity]  # most Services: worth a short cut


def _has_ingress(service: Service) -> bool:
    balancer = service.status.load_balancer if service.status else None
    return bool(balancer and balancer.ingress)


def _all_shared(service: Service, allow_external_ips: bool, notes: Notes) -> Shared:
    spec = service.spec
    _check_word("spec.type", spec.type, _TYPES, notes)
    external_local = _external_policy_local(spec, notes)
    return Shared(
        external_ips=_external_ips(spec, notes) if allow_external_ips else (),
        vips=_vips(service, notes),
        ranges=_ranges(spec.load_balancer_source_ranges, notes),
        health_check_node_port=_health_check_node_port(spec, external_local, notes),
        session_affinity=spec.session_affinity or "",
        affinity_seconds=_affinity_seconds(spec, notes),
        external_policy_local=external_local,
        internal_policy_local=_policy_local(
            "spec.internalTrafficPolicy", spec.internal_traffic_policy, notes
        ),
    )


def within_limits(shared: Shared, ports: int, notes: Notes) -> Shared:
    """Return what of the fields a Service with so many ports may ask for; note what is cut."""
    each = max(1, MAX_DESTINATIONS // max(1, ports))
    external_ips = _first(each, shared.external_ips, "spec.externalIPs", notes)
    vips = _first(each, shared.vips, "status.loadBalancer.ingress", notes)
    most = max(1, each // max(1, len(vips)))
    ranges = _first(most, shared.ranges, "spec.loadBalancerSourceRanges", notes)
    return msgspec.structs.replace(shared, external_ips=external_ips, vips=vips, ranges=ranges)


def _first(most: int, listed: tuple[str, ...], field: str, notes: Notes) -> tuple[str, ...]:
    if len(listed) > most:
        reason = f"has {len(listed)} entries, of which {most} are served with so many ports"
        notes.add(field, f"{reason}; divide the Service", Severity.ERROR)
    return listed[:most]


def _check_word(field: str, word: str | None, known: Sequence[str | None], notes: Notes) -> None:
    if word not in known:
        words = ", ".join(w for w in known if w)
        notes.add(field, f"{quoted(word)} is unknown and was ignored; write one of {words}")


def _policy_local(field: str, word: str | None, notes: Notes) -> bool:
    _check_word(field, word, _POLICIES, notes)
    return word == "Local"


def _external_policy_local(spec: ServiceSpec, notes: Notes) -> bool:
    """Whether the policy is Local and the Service is accessible by its spec (behaviour 3)."""
    accessible = spec.type in ("LoadBalancer", "NodePort") or (
        spec.type == "ClusterIP" and bool(spec.external_ips)
    )
    word = spec.external_traffic_policy
    return _policy_local("spec.externalTrafficPolicy", word, notes) and accessible


def _affinity_seconds(spec: ServiceSpec, notes: Notes) -> int:
    if spec.session_affinity != "ClientIP":
        _check_word("spec.sessionAffinity", spec.session_affinity, _AFFINITIES, notes)
        return 0
    config = spec.session_affinity_config
    given = config.client_ip.timeout_seconds if config and config.client_ip else None
    seconds = affinity_timeout(given)
    if given is not None and given != seconds:
        field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
        limits = f"must be 1 to {MAX_AFFINITY_SECONDS}"
        notes.add(field, f"{given} {limits}; {DEFAULT_AFFINITY_SECONDS} is used")
    return seconds


def _external_ips(spec: ServiceSpec, notes: Notes) -> tuple[str, ...]:
    out = []
    for i, text in enumerate(spec.external_ips or ()):
        address = canonical_ip(text.strip())
        word = special_range(address) if address else ""
        if word:
            reason = f"{address} is {word}, which no external IP may be; ignored"
            notes.add(f"spec.externalIPs[{i}]", reason)
        elif address is not None:
            out.append(address)
        elif text.strip():
            notes.add(f"spec.externalIPs[{i}]", f"{quoted(text)} is not an IP address; ignored")
    return tuple(dict.fromkeys(out))


def _vips(service: Service, notes: Notes) -> tuple[str, ...]:
    balancer = service.status.load_balancer if service.status else None
    out = []
    for i, ingress in enumerate((balancer.ingress if balancer else None) or ()):
        field = f"status.loadBalancer.ingress[{i}]"
        _check_word(f"{field}.ipMode", ingress.ip_mode, (None, "VIP", "Proxy"), notes)
        if not ingress.ip or ingress.ip_mode not in (None, "VIP"):
            continue
        address = canonical_ip(ingress.ip)
        if address is None:
            notes.add(f"{field}.ip", f"{quoted(ingress.ip)} is not an IP address; ignored")
        else:
            out.append(address)
    return tuple(dict.fromkeys(out))


def _ranges(texts: Sequence[str] | None, notes: Notes) -> tuple[str, ...]:
    out = []
    for i, text in enumerate(texts or ()):
        cidr = canonical_cidr(text.strip())
        if cidr is not None:
            out.append(cidr)
        elif text.strip():
            reason = f"{quoted(text)} is not a CIDR such as 192.0.2.0/24; nobody is let in by it"
            notes.add(f"spec.loadBalancerSourceRanges[{i}]", reason)
    if texts and not out:
        reason = "no valid CIDR is left: everyone may use the load balancer; correct the list"
        notes.add("spec.loadBalancerSourceRanges", reason)
    return tuple(dict.fromkeys(out))


def _health_check_node_port(spec: ServiceSpec, external_local: bool, notes: Notes) -> int:
    if spec.type != "LoadBalancer" or not external_local or not spec.health_check_node_port:
        return 0
    return port_number("spec.healthCheckNodePort", spec.health_check_node_port, notes)


def affinity_timeout(seconds: int | None) -> int:
    """Seconds of ClientIP affinity; upstream's default where absent or out of range."""
    if seconds is None or not 0 < seconds <= MAX_AFFINITY_SECONDS:
        return DEFAULT_AFFINITY_SECONDS
    return seconds
