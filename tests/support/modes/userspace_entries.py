"""Asks the portals and listeners of the userspace mode what becomes of a connection."""

from __future__ import annotations

from collections.abc import Iterator

from steersman.model.addresses import family_of, in_cidr
from steersman.model.names import Protocol
from steersman.model.plan import NodeSettings, SourceClass, Verdict
from steersman.model.ruleset import Ruleset
from steersman.modes.userspace.render import Portal
from steersman.proxy.listeners import LISTENER, PORTAL, FrontendKey, ListenerPlan
from tests.support.modes.flows import Answer, FlowCase


class Destinations:
    """The rendered objects of a node, in the style with rules."""

    def __init__(self, ruleset: Ruleset, settings: NodeSettings) -> None:
        self._ruleset = ruleset
        self._settings = settings

    def answer(self, flow: FlowCase) -> Answer:
        """Return what becomes of a connection."""
        for key in _keys(flow):
            portal = self._ruleset.get(key)
            if isinstance(portal, Portal):
                break
        else:
            return Answer("untouched")
        if not self._lets_in(portal, flow):
            return Answer("drop")
        if portal.verdict is not Verdict.FORWARD:
            return Answer(str(portal.verdict))
        listener = self._ruleset[key.of(LISTENER)]
        assert isinstance(listener, ListenerPlan)
        choice = listener.decide(flow.source, flow.interface)
        if choice.verdict is not Verdict.FORWARD:
            return Answer(str(choice.verdict))
        return Answer("forward", frozenset((str(each), True) for each in choice.endpoints))

    def _lets_in(self, portal: Portal, flow: FlowCase) -> bool:
        if portal.source_ranges and not any(
            in_cidr(flow.source, cidr) for cidr in portal.source_ranges
        ):
            return False
        sources = self._settings.family(family_of(flow.address)).sources
        client = sources.classify(flow.source, flow.interface)
        return portal.internal_only is None or client is not SourceClass.EXTERNAL


def _keys(flow: FlowCase) -> Iterator[FrontendKey]:
    """Yield the keys of a destination: a Service's address, and a node port."""
    family, protocol = family_of(flow.address), Protocol(flow.protocol)
    for node_port in (False, True):
        yield FrontendKey(PORTAL, family, protocol, flow.address, flow.port, node_port)
