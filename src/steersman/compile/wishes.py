"""What only some modes can do: asked for by annotation, or not to be had."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from steersman.compile.notes import Notes
from steersman.compile.service import PortSpecs
from steersman.model.findings import Finding, Severity, listed, quoted
from steersman.model.kube import Annotations, Service
from steersman.model.names import SCHEDULER_FLAGS, Family, PlanKey, Protocol
from steersman.model.plan import ServicePlan

_LEAST_CONNECTIONS, _MAGLEV = "least-connections", "maglev"
_BALANCING = (None, "", "round-robin", _LEAST_CONNECTIONS, _MAGLEV)
_PROXY_PROTOCOLS = (None, "", "v2")
_SWITCH = (None, "", "true", "false")
_HASHING = ("sh", "dh", "mh", "lblc", "lblcr")
_SCHEDULERS = (None, "", "rr", "wrr", "lc", "wlc", "sed", "nq", "fo", "ovf", "twos", *_HASHING)
"""Those of net/netfilter/ipvs up to Linux 6.12; whether this kernel has one it says itself."""
_MOST_FLAGS = 16
"""More than there are, so that an annotation of 256 kB costs as little as a right one."""


def with_wishes(
    service: Service, plans: dict[PlanKey, ServicePlan]
) -> tuple[dict[PlanKey, ServicePlan], tuple[Finding, ...]]:
    """Return plans with what the Service's annotations ask of its connections, and what is wrong.

    `steersman/load-balancing`, `steersman/ipvs-scheduler`, `steersman/ipvs-scheduler-flags`,
    `steersman/proxy-protocol` and `steersman/metrics`; an unknown word is ignored.
    """
    asked = service.metadata.annotations
    if asked is None or not _asks(asked):
        return plans, ()
    notes = Notes("Service", service.metadata)
    _check("steersman/load-balancing", asked.load_balancing, _BALANCING, notes)
    _check("steersman/proxy-protocol", asked.proxy_protocol, _PROXY_PROTOCOLS, notes)
    _check("steersman/metrics", asked.metrics, _SWITCH, notes)
    _check("steersman/ipvs-scheduler", asked.ipvs_scheduler, _SCHEDULERS, notes)
    flags = _flags(asked.ipvs_scheduler_flags or "", notes)
    least = asked.load_balancing == _LEAST_CONNECTIONS
    tells = asked.proxy_protocol == "v2"
    changed = {
        key: msgspec.structs.replace(
            plan,
            least_connections=least,
            maglev=asked.load_balancing == _MAGLEV,
            proxy_protocol=tells and key.name.protocol is Protocol.TCP,
            scheduler=asked.ipvs_scheduler if asked.ipvs_scheduler in _SCHEDULERS else "",
            scheduler_flags=flags,
            metrics=asked.metrics == "true",
        )
        for key, plan in plans.items()
    }
    return changed, notes.findings


def _asks(asked: Annotations) -> bool:
    words = (asked.load_balancing, asked.proxy_protocol, asked.ipvs_scheduler, asked.metrics)
    return any(words) or bool(asked.ipvs_scheduler_flags)


def _flags(text: str, notes: Notes) -> tuple[str, ...]:
    parts = text.split(",", _MOST_FLAGS)
    words = [word for part in parts[:_MOST_FLAGS] if (word := part.strip())]
    unknown = [word for word in words if word not in SCHEDULER_FLAGS]
    field = "metadata.annotations[steersman/ipvs-scheduler-flags]"
    if unknown:
        flags = ", ".join(SCHEDULER_FLAGS)
        notes.add(field, f"{listed(unknown)}: unknown and ignored; write {flags}")
    if len(parts) > _MOST_FLAGS:
        notes.add(field, f"has more than {_MOST_FLAGS} entries; the rest is ignored")
    return tuple(word for word in words if word in SCHEDULER_FLAGS)


def _check(name: str, word: str | None, known: tuple[str | None, ...], notes: Notes) -> None:
    if word not in known:
        words = ", ".join(w for w in known if w)
        notes.add(
            f"metadata.annotations[{name}]",
            f"{quoted(word)} is unknown and was ignored; write {words}",
        )


def without_sctp(
    service: Service, by_family: Mapping[Family, PortSpecs]
) -> tuple[dict[Family, PortSpecs], tuple[Finding, ...]]:
    """Return the ServicePorts without those of SCTP, and a Finding where there are such."""
    kept = {
        family: {name: spec for name, spec in specs.items() if name.protocol is not Protocol.SCTP}
        for family, specs in by_family.items()
    }
    if all(len(kept[family]) == len(specs) for family, specs in by_family.items()):
        return kept, ()
    notes = Notes("Service", service.metadata)
    reason = "SCTP cannot be forwarded in this mode; the port is not served, use another mode"
    notes.add("spec.ports", reason, Severity.ERROR)
    return kept, notes.findings
