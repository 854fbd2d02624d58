"""Read the annotations that choose options of single modes; other modes ignore them.

An unknown word or malformed value is ignored with a Finding. Annotations are 256 kB at most, so
the number of entries is limited: a hostile annotation costs as little as a valid one.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from steersman.compile.failover import read_check
from steersman.compile.findings import FindingCollector
from steersman.compile.service import PROTOCOLS
from steersman.model import codes
from steersman.model.addresses import canonical_ip
from steersman.model.findings import Finding, listed, quoted
from steersman.model.kube import Annotations, EndpointSlice, Service
from steersman.model.names import SCHEDULER_FLAGS, PlanKey, Protocol
from steersman.model.plan import ServicePlan

Plans: TypeAlias = dict[PlanKey, ServicePlan]

MAX_WEIGHT_ENTRIES = 2000
"""Entries of `steersman/weight` that are read; a slice has at most 1,000 endpoints."""
MAX_FLAGS = 16
"""Entries of `steersman/ipvs-scheduler-flags` that are read; there are fewer flags."""
_MAX_WEIGHT = 65535
_LEAST_CONNECTIONS, _MAGLEV = "least-connections", "maglev"
_BALANCING = (None, "", "round-robin", _LEAST_CONNECTIONS, _MAGLEV)
_PROXY_PROTOCOLS = (None, "", "v2")
_SWITCH = (None, "", "true", "false")
_HASHING = ("sh", "dh", "mh", "lblc", "lblcr")
_SCHEDULERS = (None, "", "rr", "wrr", "lc", "wlc", "sed", "nq", "fo", "ovf", "twos", *_HASHING)
"""The schedulers of net/netfilter/ipvs up to Linux 6.12; the kernel rejects one that it lacks."""


def with_options(
    service: Service, given: Annotations, plans: Plans
) -> tuple[Plans, tuple[Finding, ...]]:
    """Return plans with the options of the Service's annotations, and the problems of those.

    `steersman/load-balancing`, `steersman/ipvs-scheduler`, `steersman/ipvs-scheduler-flags`,
    `steersman/proxy-protocol`, `steersman/metrics`, and `steersman/eject` and `steersman/probe`,
    which are only checked here.
    """
    _, wrong = read_check(service)
    if not (
        given.load_balancing
        or given.proxy_protocol
        or given.ipvs_scheduler
        or given.ipvs_scheduler_flags
        or given.metrics
        or given.eject
    ):
        return plans, wrong
    problems = FindingCollector("Service", codes.ANNOTATION, service.metadata)
    for name, word, known in (
        ("load-balancing", given.load_balancing, _BALANCING),
        ("proxy-protocol", given.proxy_protocol, _PROXY_PROTOCOLS),
        ("metrics", given.metrics, _SWITCH),
        ("eject", given.eject, _SWITCH),
        ("ipvs-scheduler", given.ipvs_scheduler, _SCHEDULERS),
    ):
        if word not in known:
            words = ", ".join(w for w in known if w)
            reason = f"{quoted(word)} is unknown and was ignored; write {words}"
            problems.add(f"metadata.annotations[steersman/{name}]", reason)
    # Unknown flags are ignored one by one.
    field = "metadata.annotations[steersman/ipvs-scheduler-flags]"
    parts = (given.ipvs_scheduler_flags or "").split(",", MAX_FLAGS)
    flags = [flag for part in parts[:MAX_FLAGS] if (flag := part.strip())]
    if unknown := [flag for flag in flags if flag not in SCHEDULER_FLAGS]:
        words = ", ".join(SCHEDULER_FLAGS)
        problems.add(field, f"{listed(unknown)}: unknown and ignored; write {words}")
    if len(parts) > MAX_FLAGS:
        problems.add(
            field, f"has more than {MAX_FLAGS} entries; the rest is ignored", code=codes.LIMIT
        )
    scheduler = given.ipvs_scheduler or ""
    if scheduler not in _SCHEDULERS:
        scheduler = ""
    out: Plans = {}
    for key, plan in plans.items():
        is_tcp = key.name.protocol is Protocol.TCP  # the proxy sends no header to others
        out[key] = replace(
            plan,
            least_connections=given.load_balancing == _LEAST_CONNECTIONS,
            maglev=given.load_balancing == _MAGLEV,
            metrics=given.metrics == "true",
            scheduling=replace(
                plan.scheduling,
                scheduler=scheduler,
                scheduler_flags=tuple(flag for flag in flags if flag in SCHEDULER_FLAGS),
            ),
            proxy=replace(plan.proxy, proxy_protocol=given.proxy_protocol == "v2" and is_tcp),
        )
    return out, (*problems.findings, *wrong)


def with_weights(
    slices: Sequence[EndpointSlice], plans: Plans, wanted: Container[tuple[str, Protocol | None]]
) -> tuple[Plans, tuple[Finding, ...]]:
    """Return plans with the endpoint weights of `steersman/weight`, and the problems of those.

    The annotation is `3` for all endpoints of a slice, or `10.244.0.5=3, 10.244.0.6=1` for some;
    1 to 65535. If several slices name an endpoint, the last one by name counts.

    Args:
        wanted: the ports of the Service; other ports of the slices do not count.
    """
    by_port: dict[int, dict[str, int]] = {}
    findings: list[Finding] = []
    # 1. Weights by port number, as the slices of the Service give them.
    for slice_ in sorted(slices, key=lambda each: each.metadata.name):
        given = slice_.metadata.annotations
        if given is None or not given.weight:
            continue
        problems = FindingCollector("EndpointSlice", codes.ANNOTATION, slice_.metadata)
        by_address = _parse_weights(given.weight, problems)
        default = by_address.get("", 1)
        weights = {
            address: by_address.get(address, default)
            for endpoint in slice_.endpoints or ()
            if (address := canonical_ip((endpoint.addresses or [""])[0])) is not None
        }
        for port in slice_.ports or ():
            if port.port and (port.name or "", PROTOCOLS.get(port.protocol)) in wanted:
                by_port.setdefault(port.port, {}).update(weights)
        findings += problems.findings
    # 2. Weights of the endpoints that each plan reaches.
    out = dict(plans)
    for key, plan in plans.items() if by_port else ():
        weighed = sorted(
            (end.ip, end.port, weight)
            for end in plan.reachable
            if (weight := by_port.get(end.port, {}).get(end.ip, 1)) != 1
        )
        if weighed:
            out[key] = replace(plan, scheduling=replace(plan.scheduling, weights=tuple(weighed)))
    return out, tuple(findings)


def _parse_weights(text: str, problems: FindingCollector) -> Mapping[str, int]:
    """Return the weights by address; that of all other addresses by ""."""
    field = "metadata.annotations[steersman/weight]"
    found: dict[str, int] = {}
    wrong: list[str] = []
    parts = text.split(",", MAX_WEIGHT_ENTRIES)
    for part in parts[:MAX_WEIGHT_ENTRIES]:
        address, equals, number = part.strip().rpartition("=")
        where, digits = canonical_ip(address.strip()) if equals else "", number.strip()
        # int() accepts other digits, and takes long for very many of them
        is_number = digits.isascii() and digits.isdigit() and len(digits) <= len(str(_MAX_WEIGHT))
        if where is not None and is_number and 0 < int(digits) <= _MAX_WEIGHT:
            found[where] = int(digits)
        else:
            wrong.append(part.strip())
    if wrong:
        hint = f"write a number from 1 to {_MAX_WEIGHT}, or ADDRESS=NUMBER with commas between"
        problems.add(field, f"{listed(wrong)}: ignored; {hint}")
    if len(parts) > MAX_WEIGHT_ENTRIES:
        problems.add(
            field,
            f"has more than {MAX_WEIGHT_ENTRIES} entries; the rest is ignored",
            code=codes.LIMIT,
        )
    return found
