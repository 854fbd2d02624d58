"""The seam between where objects come from and the Store that holds them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from steersman.model.kube import KubeObject
from steersman.model.names import ObjectName
from steersman.model.plan import Finding


class Sink(Protocol):
    """Takes what a Source reads. Calls are cheap and never fail; all come from the event loop.

    What `upsert` and `delete` return is of no use to a Source.
    """

    def replace(self, kind: str, objects: Iterable[KubeObject], keep: Container[str] = ()) -> None:
        """Take the complete list of a kind. What is not in it is gone; the rest is compared.

        `keep` has the scopes (`Service shop/cart`) of objects that could not be read now: of
        those, the last good version stays.

        The first call for a kind also says that the kind's initial list is in.
        """
        ...

    def upsert(self, obj: KubeObject) -> object:
        """Take one object that was added or changed."""
        ...

    def delete(self, kind: str, name: ObjectName) -> object:
        """Take note that one object is gone; an unknown one is no change."""
        ...

    def report(self, scope: str, findings: Sequence[Finding]) -> None:
        """Replace the Findings of a scope (an object's name or a file) by these; () clears it."""
        ...


class Source(Protocol):
    """Somewhere that Services and EndpointSlices come from."""

    async def run(self, sink: Sink) -> None:
        """Feed the sink until cancelled; faults of the outside are retried inside, for ever."""
        ...
