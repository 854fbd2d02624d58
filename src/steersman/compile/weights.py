"""Shares of endpoints, asked for by annotation of their EndpointSlices."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import msgspec

from steersman.compile.notes import PROTOCOLS, Notes
from steersman.model.addresses import canonical_ip
from steersman.model.findings import Finding, listed
from steersman.model.kube import EndpointSlice, SlicePort
from steersman.model.names import PlanKey, Protocol
from steersman.model.plan import ServicePlan

_FIELD = "metadata.annotations[steersman/weight]"
_MOST = 65535
_ENTRIES = 2000
"""Of an annotation; an EndpointSlice has at most 1,000 endpoints."""


def with_weights(
    slices: Sequence[EndpointSlice], plans: dict[PlanKey, ServicePlan], wanted: Container[object]
) -> tuple[dict[PlanKey, ServicePlan], tuple[Finding, ...]]:
    """Return plans with the weights that `steersman/weight` asks for, and what is wrong with it.

    It says `3` for all endpoints of a slice, or `10.244.0.5=3, 10.244.0.6=1` for some; 1 to 65535.
    What is malformed is ignored. Of several slices that name an endpoint the last by name counts.

    Args:
        slices: those of a Service.
        plans: the Service's plans.
        wanted: the ports of the Service; what slices say of others does not count.
    """
    if not any(slice_.metadata.annotations for slice_ in slices):
        return plans, ()  # by far the most
    known: dict[int, dict[str, int]] = {}
    findings: list[Finding] = []
    for slice_ in sorted(slices, key=lambda each: each.metadata.name):
        asked = slice_.metadata.annotations
        if asked is not None and asked.weight:
            notes = Notes("EndpointSlice", slice_.metadata)
            weights = _of_slice(slice_, _read(asked.weight, notes))
            ports = {p.port for p in slice_.ports or () if _key(p) in wanted and p.port}
            for number in ports:
                known.setdefault(number, {}).update(weights)
            findings += notes.findings
    if not known:
        return plans, tuple(findings)
    return {key: _weighed(plan, known) for key, plan in plans.items()}, tuple(findings)


def _key(port: SlicePort) -> tuple[str, Protocol | None]:
    return port.name or "", PROTOCOLS.get(port.protocol)


def _weighed(plan: ServicePlan, known: Mapping[int, Mapping[str, int]]) -> ServicePlan:
    weights = sorted(
        (end.ip, end.port, weight)
        for end in plan.reachable
        if (weight := known.get(end.port, {}).get(end.ip, 1)) != 1
    )
    return msgspec.structs.replace(plan, weights=tuple(weights)) if weights else plan


def _of_slice(slice_: EndpointSlice, by_address: Mapping[str, int]) -> dict[str, int]:
    addresses = {
        address
        for endpoint in slice_.endpoints or ()
        if (address := canonical_ip((endpoint.addresses or [""])[0])) is not None
    }
    default = by_address.get("", 1)
    return {address: by_address.get(address, default) for address in addresses}


def _read(text: str, notes: Notes) -> dict[str, int]:
    """Weights by address; by "" that of all the others."""
    found: dict[str, int] = {}
    wrong: list[str] = []
    parts = text.split(",", _ENTRIES)
    for part in parts[:_ENTRIES]:
        address, equals, number = part.strip().rpartition("=")
        where = canonical_ip(address.strip()) if equals else ""
        weight = _number(number.strip())
        if where is None or not weight:
            wrong.append(part.strip())
        else:
            found[where] = weight
    if wrong:
        hint = f"write a number from 1 to {_MOST}, or ADDRESS=NUMBER with commas between"
        notes.add(_FIELD, f"{listed(wrong)}: ignored; {hint}")
    if len(parts) > _ENTRIES:
        notes.add(_FIELD, f"has more than {_ENTRIES} entries; the rest is ignored")
    return found


def _number(text: str) -> int:
    """A weight; 0 where it is none."""
    if not text.isascii() or not text.isdigit() or len(text) > len(str(_MOST)):
        return 0
    return number if (number := int(text)) <= _MOST else 0
