"""Ejections as everybody sees them: in the Store, metrics, Findings, Events and the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from msgspec.structs import replace

from steersman.compile.failover import entries_of
from steersman.model import codes
from steersman.model.addresses import join_host_port
from steersman.model.failover import Backend, Ejection
from steersman.model.findings import Finding
from steersman.model.inputs import Snapshot
from steersman.model.kube import SliceEndpoint
from steersman.model.names import ObjectName
from steersman.run.observe.events import Recorder, Regarding
from steersman.run.observe.metrics import Metrics
from steersman.source.store import Store

log = logging.getLogger(__name__)

_MOST_FINDINGS = 50


class Ejections:
    """Publishes the ejections that are in force."""

    def __init__(self, store: Store, recorder: Recorder, metrics: Metrics) -> None:
        """Publish nothing yet."""
        self._store = store
        self._recorder = recorder
        self._metrics = metrics
        self._entries: dict[ObjectName, dict[Backend, tuple[SliceEndpoint, ...]]] = {}
        """Of ejected endpoints: their entries in EndpointSlices when they were ejected."""
        self.problem = ""
        """Why connections are not seen to fail; "" if they are."""

    def of(self, name: ObjectName) -> tuple[Ejection, ...]:
        """Return the ejections of a Service."""
        return self._store.snapshot.ejected.get(name, ())

    def changed_by_kubernetes(self, name: ObjectName, snapshot: Snapshot) -> list[Backend]:
        """Return the ejected endpoints of a Service whose entries have changed since."""
        return [
            backend
            for backend, entries in self._entries.get(name, {}).items()
            if entries != _entries_of(snapshot, name, backend)
        ]

    def publish(
        self, name: ObjectName, ejections: Iterable[Ejection], snapshot: Snapshot
    ) -> set[Backend]:
        """Replace the ejections of a Service; return the endpoints that were not ejected before.

        Args:
            ejections: with times of the policy, which are those of `time.monotonic`.
        """
        before = {each.backend for each in self.of(name)}
        boot = time.time() - time.monotonic()
        found = {
            each.backend: replace(each, since=boot + each.since, until=boot + each.until)
            for each in ejections
        }
        entries = self._entries.pop(name, {})
        if found:
            self._entries[name] = {
                backend: entries.get(backend) or _entries_of(snapshot, name, backend)
                for backend in found
            }
        self._store.eject(name, tuple(found.values()))
        new = found.keys() - before
        for ejection in (found[each] for each in found if each in new):
            self._metrics.ejections(ejection.reason.value).inc()
            self._tell_of_ejection(name, ejection)
        for backend in before - found.keys():
            is_same = entries.get(backend) == _entries_of(snapshot, name, backend)
            why = "answers again" if is_same else "was changed by Kubernetes"
            self._tell_of_return(name, backend, why)
        return new

    def withdraw(self, name: ObjectName) -> None:
        """End the ejections of a Service that does not ask for them any more."""
        self._store.eject(name, ())
        self._entries.pop(name, None)

    def withdraw_all(self) -> None:
        """End all ejections."""
        for name in list(self._store.snapshot.ejected):
            self.withdraw(name)

    # Texts of Events have no times, so that the recorder drops repetitions.

    def _tell_of_ejection(self, name: ObjectName, ejection: Ejection) -> None:
        where = join_host_port(ejection.backend.ip, ejection.backend.port)
        log.warning("endpoint %s of Service %s is ejected: %s", where, name, ejection.why)
        about = Regarding("Service", name.name, name.namespace)
        note = f"endpoint {where} does not answer and gets no new connections"
        self._recorder.record(about, "Warning", "EndpointEjected", "Eject", note)

    def _tell_of_return(self, name: ObjectName, backend: Backend, why: str) -> None:
        where = join_host_port(backend.ip, backend.port)
        log.warning("endpoint %s of Service %s %s; it is not ejected any more", where, name, why)
        about = Regarding("Service", name.name, name.namespace)
        self._recorder.record(
            about, "Normal", "EndpointReturned", "Return", f"endpoint {where} {why}"
        )

    def report(self, *, checks: bool) -> None:
        """Report in metrics and Findings which endpoints are ejected, and what hides failures.

        Args:
            checks: whether checks show failing endpoints, too.
        """
        ejected = self._store.snapshot.ejected
        self._metrics.ejected().set(sum(map(len, ejected.values())))
        findings = [
            Finding(
                f"Service {name}",
                f"endpoint {join_host_port(each.backend.ip, each.backend.port)}",
                f"is ejected on this node: {each.why}",
                code=codes.EJECTED,
            )
            for name in sorted(ejected)
            for each in ejected[name]
        ]
        if len(findings) > _MOST_FINDINGS:
            more = len(findings) - _MOST_FINDINGS
            text = f"{more} more endpoints are ejected; see steersman services"
            findings[_MOST_FINDINGS:] = [Finding("the node", "failover", text, code=codes.EJECTED)]
        if self.problem:
            text = f"failing endpoints are not ejected: {self.problem}"
            if checks:
                text += "; only checks (steersman/probe) show them"
            findings.insert(0, Finding("the node", "failover", text, code=codes.FAILOVER))
        self._store.report("failover", tuple(findings))


def _entries_of(
    snapshot: Snapshot, name: ObjectName, backend: Backend
) -> tuple[SliceEndpoint, ...]:
    return entries_of(snapshot.slices.get(name, ()), backend.ip)
