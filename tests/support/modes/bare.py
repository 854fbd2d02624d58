"""A mode without objects: every method that is not abstract is the default one."""

from __future__ import annotations

from steersman.host.worker import KernelWorker
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.base import Mode, Support
from tests.support.modes.inline import Inline


class BareMode(Mode):
    """A mode that does nothing; tests override what they are about."""

    name = "bare"
    traits = Traits()
    worker: KernelWorker = Inline()

    def probe(self) -> Support:
        return Support(usable=True)

    def render_node(self, settings: NodeSettings) -> Ruleset:
        return {}

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        return {}

    def read(self) -> Ruleset:
        return {}

    def apply(self, change: Diff) -> None:
        pass
