"""What a Sink is told of one kind: decodes, and sees that the last good version stays in force."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from steersman.model.findings import Finding
from steersman.model.kube import KubeObject
from steersman.model.names import ObjectName
from steersman.source.base import Sink, upsert_in_slices
from steersman.source.decode import decode_object, scope_of
from steersman.source.stats import KindStats
from steersman.source.wire import RelistError, outline


class Mirror:
    """Passes one kind's objects on to a Sink."""

    def __init__(self, kind: str, sink: Sink, stats: KindStats) -> None:
        self._kind = kind
        self._sink = sink
        self._stats = stats
        self._malformed: set[str] = set()

    def empty(self) -> None:
        """Say that there are no such objects, so that nobody waits for their list."""
        self._sink.retain(self._kind, ())

    async def replace(self, objects: Iterable[KubeObject], findings: Iterable[Finding]) -> None:
        """Hand a complete list over; of what is malformed in it, the last good version stays."""
        bad = {finding.object: finding for finding in findings}
        names = await upsert_in_slices(self._sink, objects)
        self._sink.retain(self._kind, names, bad)
        for scope in self._malformed - bad.keys():
            self._sink.report(scope, ())
        for scope, finding in bad.items():
            self._sink.report(scope, (finding,))
        self._malformed = set(bad)
        stats = self._stats
        stats.relists += stats.lists > 0
        stats.lists += 1
        stats.malformed += len(bad)

    def upsert(self, raw: msgspec.Raw) -> str:
        """Take one object that was added or changed; return its resourceVersion, "" if unknown."""
        self._stats.events += 1
        obj = decode_object(self._kind, raw)
        if isinstance(obj, Finding):
            self._stats.malformed += 1
            self._malformed.add(obj.object)
            self._sink.report(obj.object, (obj,))
            return outline(raw).resource_version
        self._sink.upsert(obj)
        if self._malformed:
            self._mended(scope_of(self._kind, obj))
        return obj.metadata.resource_version

    def delete(self, raw: msgspec.Raw) -> str:
        """Take a deletion, likewise; the name is enough, whatever else is wrong with the object."""
        self._stats.events += 1
        meta = outline(raw)
        if not meta.name:
            raise RelistError(f"a {self._kind} without a name was deleted")
        name = ObjectName(meta.namespace, meta.name)
        self._sink.delete(self._kind, name)
        self._mended(f"{self._kind} {name}")
        return meta.resource_version

    def _mended(self, scope: str) -> None:
        if scope in self._malformed:
            self._malformed.remove(scope)
            self._sink.report(scope, ())
