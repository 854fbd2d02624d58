"""Which endpoints failover watches: the ready ones of the Services that ask for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain

from msgspec import structs

from steersman.compile.endpoints import limited_slices, read_endpoints
from steersman.compile.findings import FindingCollector
from steersman.compile.service import port_names
from steersman.model import codes
from steersman.model.addresses import canonical_ip
from steersman.model.failover import Backend, Check
from steersman.model.findings import Finding, quoted
from steersman.model.kube import EndpointSlice, Service, SliceEndpoint
from steersman.model.names import Family, PlanKey, Protocol

_PATH = re.compile(r"/[!-~]{0,999}")
_INTERVAL = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(ms|s|m|h)", re.ASCII)
_COUNT = re.compile(r"[1-9][0-9]?", re.ASCII)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_INTERVAL = 3600.0


def ejects(service: Service, default: bool) -> bool:
    """Whether a Service's endpoints are ejected: as its annotation says, else the default.

    One that asks for checks asks for this, too.
    """
    annotations = service.metadata.annotations
    word = annotations.eject if annotations is not None else None
    if word in ("true", "false"):
        return word == "true"
    return default or read_check(service)[0] is not None


def read_check(service: Service) -> tuple[Check | None, tuple[Finding, ...]]:
    """Return the check that a Service asks for by its annotations, and their problems.

    Without a valid `steersman/probe` there is no check; another malformed one counts as absent.
    """
    given = service.metadata.annotations
    if given is None or not (
        given.probe or given.probe_interval or given.probe_failures or given.probe_successes
    ):
        return None, ()
    problems = FindingCollector("Service", codes.ANNOTATION, service.metadata)

    def refuse(name: str, word: str, hint: str) -> None:
        field = f"metadata.annotations[steersman/{name}]"
        problems.add(field, f"{quoted(word)} is malformed and was ignored; write {hint}")

    word = given.probe or ""
    path = word.removeprefix("http:") if word.startswith("http:") else ""
    if not (word == "tcp" or _PATH.fullmatch(path)):
        refuse("probe", word, "tcp, or http:/PATH with at most 1000 printable characters")
        return None, problems.findings
    text = given.probe_interval or ""
    match = _INTERVAL.fullmatch(text)
    interval = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if text and not 1 <= interval <= _LONGEST_INTERVAL:
        refuse("probe-interval", text, "a time from 1s to 1h, such as 10s")
        interval = 0.0
    counts: dict[str, int] = {}
    for name, number in (
        ("failures", given.probe_failures or ""),
        ("successes", given.probe_successes or ""),
    ):
        if _COUNT.fullmatch(number):
            counts[name] = int(number)
        elif number:
            refuse(f"probe-{name}", number, "a number from 1 to 99")
    ports = chain.from_iterable(port_names(service, tuple(Family)).values())
    if all(name.protocol is not Protocol.TCP for name in ports):
        problems.add(
            "metadata.annotations[steersman/probe]", "the Service has no TCP port to check"
        )
    return Check(path, interval, **counts), problems.findings


def entries_of(slices: Iterable[EndpointSlice], ip: str) -> tuple[SliceEndpoint, ...]:
    """Return all that slices say about an address, except for hints: these depend on others."""
    return tuple(
        structs.replace(end, hints=None)
        for slice_ in slices
        for end in slice_.endpoints or ()
        if end.addresses and canonical_ip(end.addresses[0]) == ip
    )


def watched_pools(
    service: Service, slices: Iterable[EndpointSlice], families: Sequence[Family], node_name: str
) -> dict[PlanKey, dict[Backend, str]]:
    """Return the ready endpoints of each ServicePort, with their nodes ("" for an unknown one)."""
    kept, _ = limited_slices(slices)
    nodes = {
        canonical_ip(end.addresses[0]): end.node_name or ""
        for slice_ in kept
        for end in slice_.endpoints or ()
        if end.addresses
    }
    pools: dict[PlanKey, dict[Backend, str]] = {}
    for family, ports in port_names(service, families).items():
        wanted = {(name.port, name.protocol) for name in ports}
        found, _ = read_endpoints(kept, family, node_name, wanted)
        for name in ports:
            states = found.get((name.port, name.protocol), ())
            pools[PlanKey(name, family)] = {
                Backend(state.endpoint.ip, state.endpoint.port, name.protocol): nodes.get(
                    state.endpoint.ip, ""
                )
                for state in states
                if state.ready
            }
    return pools
