# ruff: noqa: E501  (rules are one line each, as iptables has them)
"""The iptables mode against real kernels: both variants, both families."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import count
from random import Random

import pytest
from msgspec.structs import replace

from steersman.compile.planner import Planner
from steersman.host.exec import SubprocessExec
from steersman.model.errors import ApplyError
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.names import Family, PlanKey, ServicePortName
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Diff, Ruleset, diff
from steersman.modes.iptables.mode import IptablesMode, create
from steersman.modes.iptables.names import is_kubelets
from steersman.modes.specs import ModeOptions
from steersman.netfilter.iptables.restore import LIMITS, Limits
from steersman.run.sync.sync import Sync
from steersman.source.store import Store
from tests.support.builders.plans import (
    SETTINGS,
    cluster_ip,
    endpoints,
    key,
    plan,
    random_plan,
    simple,
)
from tests.support.builders.store import replace_objects, service, slice_
from tests.support.lab.iptables import KilledError, Namespace, Recorder, namespace
from tests.support.lab.namespace import in_namespace, sh
from tests.support.modes.iptables_rules import without_comments

pytestmark = pytest.mark.kernel

FOREIGN = """
*filter
:DOCKER - [0:0]
-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT
-A FORWARD -j DOCKER
-A DOCKER -s 192.0.2.0/24 -j DROP
COMMIT
*nat
:CNI-HOSTPORT-SETMARK - [0:0]
-A POSTROUTING -s 192.0.2.0/24 -j MASQUERADE
-A CNI-HOSTPORT-SETMARK -j RETURN
COMMIT
"""


@pytest.fixture(params=["nft", "legacy"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def inside() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


@pytest.fixture
def execute(inside: Namespace) -> Recorder:
    return Recorder(inside)


@pytest.fixture
def mode(execute: Recorder, variant: str) -> IptablesMode:
    return IptablesMode(execute, ModeOptions(iptables_variant=variant))


def rendered(mode: IptablesMode, settings: NodeSettings = SETTINGS, *plans: ServicePlan) -> Ruleset:
    want = dict(mode.render_node(settings))
    for one in plans:
        want.update(mode.render_service(one, settings))
    return want


def some_plans(seed: int, count: int = 25) -> list[ServicePlan]:
    rng = Random(seed)
    return [random_plan(rng, n, family) for n in range(count) for family in Family]


def start(mode: IptablesMode, want: Ruleset) -> Diff:
    """What a start does; returns what it found to do."""
    mode.probe()
    change = diff(mode.read(), want)
    mode.apply(change)
    return change


def saved(inside: Namespace, variant: str) -> str:
    """Everything in the kernel, without what changes by itself."""
    texts = [inside.sh(f"{command}-{variant}-save") for command in ("iptables", "ip6tables")]
    return without_comments("".join(texts))


@pytest.mark.parametrize("split", [False, True])
def test_what_was_applied_is_read_back(mode: IptablesMode, split: bool) -> None:
    want = rendered(mode, replace(SETTINGS, split_dispatch=split), *some_plans(1))
    assert start(mode, want)
    assert mode.read() == want


@pytest.mark.parametrize(
    "name",
    [
        f"{'n' * 63}/{'s' * 63}:{'p' * 63}",  # the longest that Kubernetes lets be
        f"shop/{'s' * 400}:http",
        f"{'n' * 400}/web:http",
        f"shop/{'ü' * 60}:http",
    ],
    ids=["longest", "service", "namespace", "encoded"],
)
def test_long_names_are_read_back(mode: IptablesMode, name: str) -> None:
    """iptables cuts comments of more than 255 characters."""
    for each in some_plans(1, 2):
        named = replace(each, key=PlanKey(key(name).name, each.key.family))
        want = rendered(mode, SETTINGS, named)
        start(mode, want)
        assert mode.read() == want


def test_a_restart_with_nothing_changed_writes_nothing(
    mode: IptablesMode, execute: Recorder
) -> None:
    want = rendered(mode, SETTINGS, *some_plans(2))
    start(mode, want)
    execute.restores.clear()
    again = IptablesMode(execute, ModeOptions(iptables_variant=mode.variant))
    assert not start(again, want)
    assert not execute.restores


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_changes_one_by_one_end_as_a_fresh_start_does(
    mode: IptablesMode, variant: str, seed: int
) -> None:
    rng = Random(seed)
    settings = SETTINGS
    plans: dict[PlanKey, ServicePlan] = {}
    have: Ruleset = rendered(mode)
    start(mode, have)
    for _ in range(25):
        for _ in range(rng.randint(1, 4)):
            new = random_plan(rng, rng.randrange(12), rng.choice(list(Family)))
            name = next((k for k in plans if _same_port(k, new.key)), None)
            if name:
                del plans[name]
            if rng.random() < 0.8:
                plans[new.key] = new
        if rng.random() < 0.2:
            settings = replace(settings, split_dispatch=not settings.split_dispatch)
        want = rendered(mode, settings, *plans.values())
        mode.apply(diff(have, want))
        have = want
    assert mode.read() == have
    with namespace() as other:
        fresh = IptablesMode(Recorder(other), ModeOptions(iptables_variant=variant))
        start(fresh, have)
        assert fresh.read() == have


def _same_port(one: PlanKey, other: PlanKey) -> bool:
    return (one.family, one.name.service) == (other.family, other.name.service)


def test_cleanup_leaves_what_is_foreign_and_nothing_of_ours(
    mode: IptablesMode, inside: Namespace, variant: str
) -> None:
    for command in ("iptables", "ip6tables"):
        text = (
            FOREIGN if command == "iptables" else FOREIGN.replace("192.0.2.0/24", "2001:db8::/64")
        )
        inside.sh(f"{command}-{variant}-restore", stdin=text)
        inside.sh(f"{command}-{variant}", "-t", "mangle", "-N", "KUBE-KUBELET-CANARY")
        inside.sh(f"{command}-{variant}", "-N", "KUBE-FIREWALL")
        inside.sh(
            f"{command}-{variant}",
            "-A",
            "KUBE-FIREWALL",
            "-m",
            "mark",
            "--mark",
            "0x8000",
            "-j",
            "DROP",
        )
    before = saved(inside, variant)
    want = rendered(mode, SETTINGS, *some_plans(3))
    start(mode, want)
    assert mode.read() == want
    mode.apply(diff(mode.read(), {}))
    assert not mode.read()
    after = saved(inside, variant)
    kubelets = {want[k] for k in want if is_kubelets(k)} - {""}
    assert set(after.split("\n")) - set(before.split("\n")) <= kubelets
    assert [line for line in after.split("\n") if line not in kubelets] == before.split("\n")


def test_after_a_cleanup_everything_can_come_back(mode: IptablesMode) -> None:
    want = rendered(mode, SETTINGS, simple(1))
    start(mode, want)
    mode.apply(diff(mode.read(), {}))
    mode.apply(diff(mode.read(), want))
    assert mode.read() == want


def test_chains_that_foreign_rules_lead_to_survive_a_cleanup(
    mode: IptablesMode, inside: Namespace, variant: str
) -> None:
    want = rendered(mode)
    start(mode, want)
    inside.sh(f"iptables-{variant}", "-t", "nat", "-N", "CNI-MARK")
    inside.sh(f"iptables-{variant}", "-t", "nat", "-A", "CNI-MARK", "-j", "KUBE-MARK-MASQ")
    mode.apply(diff(mode.read(), {}))
    assert mode.read() == {(4, "nat", "KUBE-MARK-MASQ", ""): ""}
    assert "-A CNI-MARK -j KUBE-MARK-MASQ" in saved(inside, variant)
    mode.apply(diff(mode.read(), want))
    assert mode.read() == want


FLUSHES = {
    "flush": ["iptables -F", "iptables -t nat -F"],
    "flush and delete": ["iptables -F", "iptables -X", "iptables -t nat -F", "iptables -t nat -X"],
    "flush nat": ["iptables -t nat -F"],
    "flush dispatch": ["iptables -t nat -F KUBE-SERVICES"],
    "jumps gone": ["iptables -F INPUT", "iptables -F FORWARD"],
    "canary": ["iptables -t mangle -X KUBE-PROXY-CANARY"],
    "one rule": ["iptables -t nat -D KUBE-SERVICES 1"],
    "tail no longer last": ["iptables -t nat -A KUBE-SERVICES -d 192.0.2.1 -j RETURN"],
    "jump doubled": ["iptables -I INPUT -m comment --comment 'kubernetes health check service ports' -j KUBE-NODEPORTS"],
    "stale chain": ["iptables -t nat -N KUBE-SEP-AAAAAAAAAAAAAAAA"],
    "rule of our own chain changed": ["iptables -t nat -A KUBE-MARK-MASQ -j RETURN"],
}  # fmt: skip


@pytest.mark.parametrize("what", FLUSHES)
def test_what_others_break_is_repaired(
    mode: IptablesMode, inside: Namespace, variant: str, what: str
) -> None:
    want = rendered(mode, SETTINGS, *some_plans(4, 8))
    start(mode, want)
    for command in FLUSHES[what]:
        inside.sh("sh", "-c", command.replace("iptables", f"iptables-{variant}"))
    change = diff(mode.read(), want)
    assert change
    mode.apply(change)
    assert mode.read() == want
    tail = [r for r in saved(inside, variant).split("\n") if r.startswith("-A KUBE-SERVICES")][-1]
    assert "NOTE: this must be the last rule" in tail


def test_a_firewall_loaded_over_ours_is_repaired_around(
    mode: IptablesMode, inside: Namespace, variant: str
) -> None:
    want = rendered(mode, SETTINGS, *some_plans(5, 8))
    start(mode, want)
    inside.sh(f"iptables-{variant}-restore", stdin=FOREIGN)
    mode.apply(diff(mode.read(), want))
    assert mode.read() == want
    for line in FOREIGN.split("\n"):
        if line.startswith("-A"):
            assert line in saved(inside, variant)


def poison() -> ServicePlan:
    """A Service that every iptables refuses: an affinity that `-m recent` cannot keep."""
    return plan(
        key("ns/poison"), cluster_ip("10.96.9.9"), cluster=endpoints("10.200.9.9"), affinity=-1
    )


def test_a_refused_batch_changes_nothing(
    mode: IptablesMode, inside: Namespace, variant: str
) -> None:
    start(mode, rendered(mode, SETTINGS, simple(1)))
    before = saved(inside, variant)
    want = rendered(mode, SETTINGS, simple(1), simple(2), poison())
    with pytest.raises(ApplyError, match="KUBE-"):
        mode.apply(diff(mode.read(), want))
    assert saved(inside, variant) == before


def test_any_part_of_a_diff_can_be_applied(mode: IptablesMode) -> None:
    plans = some_plans(6, 10)
    start(mode, rendered(mode))
    for one in plans[1::2] + plans[::2]:
        mode.apply(diff({}, mode.render_service(one, SETTINGS)))
    assert mode.read() == rendered(mode, SETTINGS, *plans)


def test_a_rule_that_somebody_else_deleted_is_refused_and_then_healed(
    mode: IptablesMode, inside: Namespace, variant: str
) -> None:
    want = rendered(mode, SETTINGS, simple(1))
    start(mode, want)
    inside.sh(f"iptables-{variant}", "-t", "nat", "-D", "KUBE-SERVICES", "1")
    with pytest.raises(ApplyError, match="line"):
        mode.apply(diff(want, rendered(mode)))
    mode.apply(diff(mode.read(), rendered(mode)))
    assert mode.read() == rendered(mode)


@pytest.mark.slow(seconds=60)
def test_killed_between_any_two_commands_the_next_start_repairs(
    mode: IptablesMode, execute: Recorder, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, families=(Family.IPV4,))
    plans = [one for seed in (7, 8) for one in some_plans(seed, 8) if one.key.family == 4]
    first = rendered(mode, settings, *plans[:8])
    second = rendered(mode, replace(settings, split_dispatch=True), *plans[8:])
    mode.probe()
    before: Ruleset = {}
    for want in (first, second, {}):
        for allowed in count():
            start(mode, before)
            execute.allowed = allowed
            try:
                with monkeypatch.context() as patch:
                    patch.setitem(LIMITS, variant, Limits(whole=5, run=60))
                    mode.apply(diff(mode.read(), want))
                break
            except KilledError:
                execute.allowed = None
                again = IptablesMode(execute, ModeOptions(iptables_variant=variant))
                start(again, want)
                left = {k: v for k, v in (again.read()).items() if want or not is_kubelets(k)}
                assert left == want
        assert allowed > 2, "it was never cut"
        execute.allowed = None
        before = want


class Poisoned(IptablesMode):
    """Renders rules of some Services so that every kernel refuses them."""

    poisoned: frozenset[str] = frozenset()

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        if plan.key.name.service in self.poisoned:
            plan = replace(plan, affinity_seconds=-1)
        return super().render_service(plan, settings)


async def test_the_culprits_stand_alone_and_the_others_go_in(
    inside: Namespace, variant: str
) -> None:
    mode = Poisoned(Recorder(inside), ModeOptions(iptables_variant=variant))
    mode.poisoned = frozenset({"s5", "s11"})
    facts = HostFacts("me", {"eth0": ("192.0.2.1/24",)}, ipv6=False)
    store = Store("me", facts=facts)
    names = [f"s{number}" for number in range(1, 20)]
    replace_objects(store, "Service", [service(n, clusterIP=f"10.96.0.{n[1:]}") for n in names])
    replace_objects(
        store, "EndpointSlice", [slice_(f"{n}-x", n, (f"10.1.0.{n[1:]}",)) for n in names]
    )
    sync = Sync(store, Planner(NodeConfig(node_name="me"), mode.traits), mode)
    report = await sync.run()
    assert report
    result = report.result
    assert result
    assert result.refused == 2
    refused = [f for f in sync.state.findings if "the kernel refuses its rules" in f.reason]
    assert sorted(f.object for f in refused) == ["Service shop/s11", "Service shop/s5"]
    served = {n for n in names if f"shop/{n} cluster IP" in saved(inside, variant)}
    assert served == set(names) - mode.poisoned
    mode.poisoned = frozenset()
    for name in ("s5", "s11"):
        store.upsert(service(name, clusterIP=f"10.96.1.{name[1:]}"))
    report = await sync.run()
    assert report
    assert report.result is not None
    assert not sync.state.findings
    assert saved(inside, variant).count("-d 10.96.1.") >= 2


def test_upstreams_own_rules_are_taken_over(
    mode: IptablesMode, inside: Namespace, variant: str
) -> None:
    """The order and the spelling of upstream's restore input, as it is before iptables prints it."""
    inside.sh(f"iptables-{variant}-restore", stdin=UPSTREAM)
    service = plan(
        PlanKey(ServicePortName("ns", "a", "http", key("ns/a").name.protocol), Family.IPV4),
        cluster_ip("10.96.0.1"),
        cluster=endpoints("10.200.0.1"),
    )
    want = rendered(mode, SETTINGS, service)
    change = start(mode, want)
    assert (4, "nat", "KUBE-SERVICES", "ns/a:http tcp") not in change.changed
    assert (4, "nat", "KUBE-MARK-MASQ", "") not in {*change.added, *change.changed}
    assert mode.read() == want


UPSTREAM = """
*nat
:KUBE-SERVICES - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SVC-STALE - [0:0]
:KUBE-SVC-PDNTG4S5GI55M4RT - [0:0]
-A KUBE-MARK-MASQ -j MARK --or-mark 0x00004000
-A KUBE-SERVICES -m comment --comment "ns/a:http cluster IP" -m tcp -p tcp -d 10.96.0.1 --dport 80 -j KUBE-SVC-PDNTG4S5GI55M4RT
-A KUBE-SERVICES -m comment --comment "ns/gone cluster IP" -m tcp -p tcp -d 10.96.0.2 --dport 80 -j KUBE-SVC-STALE
COMMIT
"""


def test_no_namespace_is_left_behind() -> None:
    with namespace() as made:
        name = made.name
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert name not in listed.stdout.split()


@pytest.mark.parametrize("variant", ["nft", "legacy"], indirect=True)
def test_only_others_change_the_fingerprint_of_iptables_nft(variant: str) -> None:
    """And with iptables-legacy, which cannot tell, everybody does; time and counters never."""

    async def body() -> None:
        mode = create(SubprocessExec(), ModeOptions(iptables_variant=variant))
        assert (mode.probe()).usable
        have: Ruleset = {}
        tokens = [mode.fingerprint()]
        for services in (3, 2, 4):
            want = rendered(mode, SETTINGS, *some_plans(1, services))
            mode.apply(diff(have, want))
            have = want
            tokens.append(mode.fingerprint())
        assert len(set(tokens)) == (1 if variant == "nft" else 4)
        sh("ping -c 1 127.0.0.1 || true")
        assert mode.fingerprint() == tokens[-1]
        sh(f"iptables-{variant} -A INPUT -j ACCEPT")
        assert mode.fingerprint() != tokens[-1]

    in_namespace(body)
