"""The modes under test, by name: how to make one, and how to read what it renders.

A later mode joins with one entry in MODES; every case and conformance flow then runs in it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from steersman.host.exec import Exec, SubprocessExec
from steersman.model.addresses import family_of
from steersman.model.plan import NodePlan, Traits
from steersman.model.ruleset import Ruleset
from steersman.modes.base import Mode
from steersman.modes.iptables.mode import IptablesMode
from steersman.modes.nftables.text import ruleset_text
from steersman.modes.specs import ModeOptions
from tests.support.lab import ebpf
from tests.support.lab.nft import mode_behind
from tests.support.lab.userspace import userspace_behind
from tests.support.modes.ebpf_entries import Entries
from tests.support.modes.flows import Answer, FlowCase, by_rules
from tests.support.modes.iptables_rules import Rules, parse
from tests.support.modes.nft_rules import NftRules
from tests.support.modes.userspace_entries import Destinations

Ask: TypeAlias = Callable[[FlowCase], Answer]


@dataclass(frozen=True)
class ModeUnderTest:
    """What tests need to know of a mode."""

    name: str
    variants: Sequence[str]
    """Names of what it can be run on, the usual one first."""
    make: Callable[[Exec, str], Mode]
    """From a door to programs and a variant to the mode."""
    evaluator: Callable[[NodePlan], Ask] | None
    """Evaluates the rendered objects of a plan; None if that takes a kernel."""
    golden: Callable[[NodePlan], str]
    """The rendered objects of a plan's Services, as text."""
    stays: bool = False
    """Whether `make` returns one mode for a lab, which serves for as long as the lab is there."""
    like: str = ""
    """For a mode of which the conformance data knows nothing: whose expectations hold for it."""

    def __str__(self) -> str:
        return self.name

    def offline(self) -> Mode:
        """The mode, for its pure half only."""
        return self.make(SubprocessExec(), self.variants[0])

    @property
    def traits(self) -> Traits:
        """Where it differs from others."""
        return self.offline().traits


def answered(plan: NodePlan, flows: Iterable[FlowCase]) -> list[FlowCase]:
    """Flows without those in which an endpoint elsewhere may be given itself, and is spared."""
    elsewhere = {
        str(end) for each in plan.services.values() for end in each.reachable if not end.local
    }
    return [
        flow
        for flow in flows
        if not plan.settings.traits.spares_hairpins_elsewhere
        or flow.masquerade
        or not any(flow.calls_itself(end) for end in flow.endpoints & elsewhere)
    ]


def render(plan: NodePlan, mode: Mode) -> Ruleset:
    """Everything that a mode makes of a plan."""
    ruleset = dict(mode.render_node(plan.settings))
    for service in plan.services.values():
        ruleset.update(mode.render_service(service, plan.settings))
    return ruleset


def _iptables(exec_: Exec, variant: str) -> Mode:
    return IptablesMode(exec_, ModeOptions(iptables_variant=variant))


_PART_ORDER = {"kubelet": 0, "jumps": 1, "split": 1, "node ports": 3}


def iptables_save(ruleset: Ruleset, family: int) -> str:
    """One family of a Ruleset of the iptables mode as iptables-save would print it."""
    tables: dict[str, dict[str, list[str]]] = {}
    order = sorted(ruleset, key=lambda key: (_PART_ORDER.get(key[3], 2), key))
    for key in order:
        if key[0] == family:
            lines = tables.setdefault(key[1], {}).setdefault(key[2], [])
            lines.extend(ruleset[key].splitlines())
    out = []
    for table, chains in sorted(tables.items()):
        out += [f"*{table}", *(f":{chain} - [0:0]" for chain in sorted(chains))]
        out += [line for _, lines in sorted(chains.items()) for line in lines]
        out.append("COMMIT")
    return "\n".join(out) + "\n"


def _iptables_evaluator(plan: NodePlan) -> Ask:
    ruleset = render(plan, IPTABLES.offline())
    rules = {
        family: Rules(
            parse(iptables_save(ruleset, int(family))),
            frozenset(plan.settings.family(family).local_addresses),
        )
        for family in plan.settings.families
    }
    return lambda flow: by_rules(rules, flow)


def _iptables_golden(plan: NodePlan) -> str:
    mode, out = IPTABLES.offline(), []
    rulesets = [mode.render_service(s, plan.settings) for s in plan.services.values()]
    ruleset = {key: value for each in rulesets for key, value in each.items()}
    for family in plan.settings.families:
        if text := iptables_save(ruleset, int(family)):
            out.append(f"# {family.kubernetes}\n{text}")
    return "\n".join(out)


IPTABLES = ModeUnderTest(
    "iptables", ("nft", "legacy"), _iptables, _iptables_evaluator, _iptables_golden
)


def _nftables_golden(plan: NodePlan) -> str:
    mode, out = NFTABLES.offline(), dict[Any, Any]()
    for service in plan.services.values():
        out.update(mode.render_service(service, plan.settings))
    # A socket on loopback is no object of the kernel's tables.
    return ruleset_text({key: value for key, value in out.items() if isinstance(value, bytes)})


def _nftables_evaluator(plan: NodePlan) -> Ask:
    ruleset = render(plan, NFTABLES.offline())
    rules = {family: NftRules(ruleset, plan, family) for family in plan.settings.families}
    return lambda flow: rules[family_of(flow.address)].answer(flow)


NFTABLES = ModeUnderTest(
    "nftables",
    ("nft",),
    lambda exec_, _: mode_behind(exec_),
    _nftables_evaluator,
    _nftables_golden,
)


def _userspace_golden(plan: NodePlan) -> str:
    mode, ruleset = USERSPACE.offline(), dict[Any, Any]()
    for service in plan.services.values():
        ruleset.update(mode.render_service(service, plan.settings))
    return "".join(f"{key}: {ruleset[key]}\n" for key in sorted(ruleset))


def _userspace_evaluator(plan: NodePlan) -> Ask:
    return Destinations(render(plan, USERSPACE.offline()), plan.settings).answer


USERSPACE = ModeUnderTest(
    "userspace",
    ("nft", "legacy", "nftables"),
    userspace_behind,
    _userspace_evaluator,
    _userspace_golden,
    stays=True,
)


def _ebpf_evaluator(plan: NodePlan) -> Ask:
    return Entries(render(plan, EBPF.offline()), plan.settings).answer


EBPF = ModeUnderTest(
    "ebpf",
    ("tcx",),
    lambda exec_, _: ebpf.mode_behind(exec_),
    _ebpf_evaluator,
    ebpf.golden,
    stays=True,
    like="nftables",
)

MODES = {mode.name: mode for mode in (IPTABLES, NFTABLES, USERSPACE, EBPF)}
