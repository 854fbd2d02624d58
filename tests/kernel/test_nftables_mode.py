"""The nftables mode against the kernel: objects are read as written, damage is repaired."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from steersman.compile.planner import Planner
from steersman.host.exec import SubprocessExec
from steersman.model.errors import ApplyError
from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import Frontend, FrontendKind, NodeSettings, ServicePlan
from steersman.model.ruleset import Diff, Ruleset, diff, diff_of_owners
from steersman.modes.base import release
from steersman.modes.nftables.layout import Kind, is_local, kind_of, prefix, without_locality
from steersman.modes.nftables.mode import NftablesMode
from steersman.run.process.daemon import external_change
from steersman.run.sync.sync import Sync
from steersman.source.store import Store
from tests.support.builders import nftables_plans as make
from tests.support.builders import objects
from tests.support.builders.plans import (
    DROPPED,
    EXTERNAL_LOCAL,
    INTERNAL_LOCAL,
    MASQUERADED,
    NONE_HERE,
    PLAIN,
    REJECTED,
    Actions,
)
from tests.support.builders.store import replace_objects
from tests.support.lab import namespace
from tests.support.lab.namespace import sh
from tests.support.lab.nft import elements, listing, nft, program, render

pytestmark = pytest.mark.kernel
V4 = Family.IPV4


_made: list[NftablesMode] = []


def new_mode() -> NftablesMode:
    mode = NftablesMode(SubprocessExec())
    _made.append(mode)
    return mode


def in_namespace(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in a namespace, and release the modes that it has made."""

    async def whole() -> None:
        try:
            await body()
        finally:
            while _made:
                await release(_made.pop())

    namespace.in_namespace(whole)


def frontends(actions: Actions, port: int = 80) -> list[Frontend]:
    """One of each kind."""
    return [
        Frontend(FrontendKind.CLUSTER_IP, "10.96.0.10", port, *PLAIN),
        Frontend(FrontendKind.EXTERNAL_IP, "192.0.2.80", port, *actions),
        Frontend(FrontendKind.LOAD_BALANCER_IP, "192.0.2.81", port, *actions, ("10.0.0.0/8",)),
        Frontend(FrontendKind.NODE_PORT, "", 30000 + port, *actions),
    ]


FORMS = {
    "plain": make.port(),
    "one": make.port([1]),
    "many": make.port(range(40)),
    "thousands": make.port(range(5000)),
    "masquerade": make.port(frontends=frontends(MASQUERADED)),
    "external local": make.port(frontends=frontends(EXTERNAL_LOCAL)),
    "none here": make.port(frontends=frontends(NONE_HERE)),
    "internal local": make.port(frontends=[make.cluster_ip(INTERNAL_LOCAL)]),
    "rejected": make.port((), frontends=frontends(REJECTED)),
    "dropped": make.port((), frontends=frontends(DROPPED)),
    "affinity": make.port(frontends=frontends(EXTERNAL_LOCAL), affinity=60),
    "affinity masqueraded": make.port(frontends=frontends(MASQUERADED), affinity=10800),
    "sctp": make.port(of=make.key(protocol=Protocol.SCTP), affinity=60),
    "udp": make.port(of=make.key(protocol=Protocol.UDP), affinity=60),
    "ipv6": make.port(
        of=make.key(family=Family.IPV6),
        frontends=[
            make.cluster_ip(address="fd00:96::a"),
            Frontend(FrontendKind.NODE_PORT, "", 30080, *EXTERNAL_LOCAL),
            Frontend(FrontendKind.LOAD_BALANCER_IP, "2001:db8::1", 80, *MASQUERADED, ("fd00::/8",)),
        ],
        affinity=60,
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of", [make.SETTINGS, make.NO_DETECTOR, make.INTERFACES])
def test_every_form_is_read_back_and_listed(form: str, of: NodeSettings) -> None:
    async def body() -> None:
        await program(new_mode(), [FORMS[form]], of)
        assert "chain nat-prerouting" in listing()

    in_namespace(body)


def test_parts_make_what_one_batch_makes() -> None:
    """Also objects that several Services share: cluster IPs, endpoints on this node."""

    async def body() -> None:
        plans = [
            make.port(
                range(4),
                of=make.key(name=f"s{number}"),
                frontends=[
                    make.cluster_ip(address=f"10.96.1.{number}"),
                    Frontend(FrontendKind.CLUSTER_IP, "10.96.0.10", 1000 + number, *PLAIN),
                    Frontend(FrontendKind.NODE_PORT, "", 30100 + number, *EXTERNAL_LOCAL),
                ],
                affinity=60 if number % 3 == 0 else 0,
            )
            for number in range(9)
        ]
        whole = await program(new_mode(), plans)
        nft("flush ruleset")
        mode = new_mode()
        node = dict(mode.render_node(make.SETTINGS))
        each = [dict(mode.render_service(plan, make.SETTINGS)) for plan in plans]
        parts = [Diff({**node, **each[0]}), *map(Diff, each[1:])]
        await mode.worker.do(mode.fill, parts)
        other = new_mode()
        other.render_node(make.SETTINGS)  # it tells texts by their hashes
        assert await other.worker.do(other.read) == await mode.worker.do(mode.read) == whole
        # The mode knows what it has: a shared object stays until its last Service goes.
        for number in range(9):
            assert "10.96.0.10" in elements("cluster-ips")
            await mode.worker.do(mode.apply, Diff(removed=each[number]))
        assert "10.96.0.10" not in elements("cluster-ips")
        slots = [key for key in each[1] if kind_of(key) == Kind.SERVICE_ENDPOINTS]
        refused = Diff({**each[2], slots[0]: each[1][slots[1]]})  # the slot has another endpoint
        with pytest.raises(ApplyError):
            await mode.worker.do(mode.fill, [Diff(each[0]), Diff(each[1]), refused])
        assert await mode.worker.do(mode.read) == {**node, **each[0], **each[1]}

    in_namespace(body)


NAMES = {"wide": "漢" * 90, "words": 'a"b { }\n', "long": "x" * 400, "NUL": "\0", "half": "\ud800"}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("table", ["", "add table ip kube-proxy"], ids=["fresh", "taken over"])
def test_a_manifest_may_hold_any_name(name: str, table: str) -> None:
    async def body() -> None:
        nft(table)
        of = PlanKey(ServicePortName(name, name, name, Protocol.TCP), V4)
        await program(new_mode(), [make.port(of=of, affinity=60)])
        assert "goto cluster-affinity-" in listing()

    in_namespace(body)


def test_listed_elements_name_their_service() -> None:
    async def body() -> None:
        await program(new_mode(), [make.port()])
        assert "goto cluster-lb-4" in listing()
        assert 'comment "shop/web:http cluster IP"' in listing()

    in_namespace(body)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # shrinking takes a namespace for each attempt
)
@given(worlds=st.tuples(make.worlds(), make.worlds(), make.worlds()))
def test_changes_lead_where_a_fresh_start_leads(
    worlds: tuple[dict[Any, ServicePlan], ...],
) -> None:
    async def body() -> None:
        mode = new_mode()
        have: dict[Any, Any] = {None: await program(mode, [])}
        for world in worlds:
            want = {None: have[None]} | {
                owner: mode.render_service(plan, make.SETTINGS) for owner, plan in world.items()
            }
            owners = have.keys() | want.keys()
            await mode.worker.do(
                mode.apply, diff_of_owners((have.get(o, {}), want.get(o, {})) for o in owners)
            )
            have = want
            kernel = await mode.worker.do(mode.read)
            assert kernel == {k: v for part in want.values() for k, v in part.items()}
        known = {f.address for p in worlds[-1].values() for f in p.frontends[:1]}
        listed = {*elements("cluster-ips"), *elements("cluster-ips", "ip6")}
        assert listed == known
        listing()
        again = new_mode()
        assert (await again.worker.do(again.probe)).usable
        restarted = render(again, worlds[-1].values())
        change = diff(await again.worker.do(again.read), restarted)
        assert not change, change

    in_namespace(body)


def itself(number: int) -> list[Any]:
    """Addresses of an element of `hairpin-connections`, as nft lists it."""
    address = f"10.244.0.{number}"
    return [address, address, "tcp", 8080]


def hairpins() -> list[Any]:
    return [each["concat"] for each in elements("hairpin-connections")]


def test_only_endpoints_on_this_node_can_call_themselves() -> None:
    async def body() -> None:
        mode = new_mode()
        plan = make.port([0, 1])
        want = await program(mode, [plan])
        assert hairpins() == [itself(0)]
        assert ": 10.244.0.0 . 8080," in listing()  # nft looks no farther than the port, either
        other = render(mode, [make.moved(plan)])
        await mode.worker.do(mode.apply, diff(want, other))
        assert hairpins() == [itself(1)]
        assert await mode.worker.do(mode.read) == other

    in_namespace(body)


def test_a_table_of_the_version_before_is_corrected() -> None:
    """It had hairpins of all endpoints, and did not say which are local."""

    async def body() -> None:
        mode = new_mode()
        want = await program(mode, [make.port(range(6))])
        slots = {k: v for k, v in want.items() if k[0] == Kind.SERVICE_ENDPOINTS and is_local(v)}
        await mode.worker.do(
            mode.apply,
            Diff(changed={key: (value, without_locality(value)) for key, value in slots.items()}),
        )
        for number in range(6):
            end = f"10.244.0.{number}"
            nft(f"add element ip kube-proxy hairpin-connections {{ {end} . {end} . tcp . 8080 }}")
        again = new_mode()
        assert (await again.worker.do(again.probe)).usable
        assert render(again, [make.port(range(6))]) == want
        change = diff(await again.worker.do(again.read), want)
        assert change.changed.keys() == slots.keys()
        assert len(change.removed) == 6
        assert not change.added
        await again.worker.do(again.apply, change)
        assert await again.worker.do(again.read) == want
        assert sorted(hairpins()) == [itself(0), itself(2), itself(4)]

    in_namespace(body)


def test_an_endpoint_of_a_thousand_costs_two_slots() -> None:
    async def body() -> None:
        mode = new_mode()
        want = await program(mode, [make.port(range(1000))])
        fewer = render(mode, [make.port([n for n in range(1000) if n != 10])])
        change = diff(want, fewer)
        assert {key[0] for key in (*change.removed, *change.changed)} == {Kind.SERVICE_ENDPOINTS}
        assert len(change) == 2
        await mode.worker.do(mode.apply, change)
        assert await mode.worker.do(mode.read) == fewer

    in_namespace(body)


def test_a_refused_transaction_changes_nothing_and_names_the_object() -> None:
    async def body() -> None:
        mode = new_mode()
        want = await program(mode, [make.port()])
        start = prefix(Kind.SERVICE_IPS, V4)
        good = make.port(of=make.key("other"), frontends=[make.cluster_ip(address="10.96.0.11")])
        bad = start + bytes((10, 96, 0, 12, 6, 0, 0, 0, 0, 80, 0, 0))
        change = Diff({**mode.render_service(good, make.SETTINGS), bad: b"no-such-chain\0x"})
        with pytest.raises(ApplyError, match=r"element 10.96.0.12 . tcp . 80 of service-ips in"):
            await mode.worker.do(mode.apply, change)
        assert await mode.worker.do(mode.read) == want
        assert elements("cluster-ips") == ["10.96.0.10"]

    in_namespace(body)


def test_a_refused_switch_leaves_the_old_way_only() -> None:
    async def body() -> None:
        mode = new_mode()
        old = make.port()
        want = await program(mode, [old])
        change = diff(
            mode.render_service(old, make.SETTINGS),
            mode.render_service(make.port(affinity=60), make.SETTINGS),
        )
        bad = prefix(Kind.SERVICE_IPS, V4) + bytes((10, 96, 0, 12, 6, 0, 0, 0, 0, 80, 0, 0))
        change.added[bad] = b"no-such-chain\0x"
        with pytest.raises(ApplyError, match=r"element 10.96.0.12 . tcp . 80 of service-ips in"):
            await mode.worker.do(mode.apply, change)
        assert await mode.worker.do(mode.read) == want

    in_namespace(body)


class Poisoned(NftablesMode):
    """Renders something that the kernel refuses, for one Service."""

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        words = super().render_service(plan, settings)
        if plan.key.name.service != "web-3":
            return words
        return {k: b"no-such-chain\0" if k[0] == Kind.SERVICE_IPS else v for k, v in words.items()}


def test_a_finding_names_the_service_whose_rules_are_refused() -> None:
    async def body() -> None:
        store, mode = Store("here", facts=objects.FACTS), Poisoned(SubprocessExec())
        assert (await mode.worker.do(mode.probe)).usable
        names = [f"web-{n}" for n in range(6)]
        replace_objects(
            store,
            "Service",
            [objects.service(name, clusterIP=f"10.96.1.{n}") for n, name in enumerate(names)],
        )
        end = objects.endpoint("10.0.0.1")
        replace_objects(
            store, "EndpointSlice", [objects.slice_(end, name=n, owner=n) for n in names]
        )
        sync = Sync(store, Planner(objects.CONFIG, mode.traits), mode)
        report = await sync.run()
        assert report
        result = report.result
        assert result
        assert result.refused == 1
        (finding,) = sync.state.findings
        assert finding.object == "Service shop/web-3"
        assert "element 10.96.1.3 . tcp . 80 of service-ips" in finding.reason
        assert len(elements("cluster-ips")) == 5

    in_namespace(body)


DAMAGE = {
    "everything": "flush ruleset",
    "table": "delete table ip kube-proxy",
    "rules": "flush chain ip kube-proxy nat-output",
    "foreign rule": "add rule ip kube-proxy nat-input drop",
    "fixed rules": "flush chain ip kube-proxy lb-4",
    "base chain": "flush chain ip kube-proxy filter-forward",
    "element": "delete element ip kube-proxy service-ips { 10.96.0.10 . tcp . 80 }",
    "foreign element": "add element ip kube-proxy no-endpoint-nodeports { tcp . 80 : drop }",
    "cluster IP": "delete element ip kube-proxy cluster-ips { 10.96.0.10 }",
    "foreign cluster IP": "add element ip kube-proxy cluster-ips { 10.96.0.99 }",
    "hairpin": "delete element ip kube-proxy hairpin-connections "
    "{ 10.244.0.0 . 10.244.0.0 . tcp . 8080 }",
    "foreign hairpin": "add element ip kube-proxy hairpin-connections "
    "{ 10.244.0.9 . 10.244.0.9 . tcp . 8080 }",
    "source ranges": "flush chain ip kube-proxy firewall-check",
    "sources": "flush chain ip kube-proxy firewall",
    "hook of source ranges": "delete chain ip kube-proxy filter-output-pre-dnat",
    "foreign source ranges": "insert rule ip kube-proxy firewall-check accept",
    "learning": "flush chain ip kube-proxy affinity-learn",
    "hook of learning": "flush chain ip kube-proxy affinity-postrouting",
    "foreign learning": "add rule ip kube-proxy affinity-learn accept",
    "service chain": "",
    "policy": "add chain ip kube-proxy filter-forward { policy drop ; }",
    "policy of source ranges": "add chain ip kube-proxy filter-output-pre-dnat { policy drop ; }",
    "foreign chain": "add chain ip kube-proxy mine { type filter hook input priority 5 ; "
    "policy drop ; }",
}


def ranged(address: str, source: str) -> Frontend:
    return Frontend(FrontendKind.LOAD_BALANCER_IP, address, 80, *PLAIN, (source,))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen_and_healed(damage: str) -> None:
    async def body() -> None:
        mode = new_mode()
        vip = ranged("192.0.2.80", "198.51.100.0/24")
        plan = make.port(frontends=[make.cluster_ip(), vip], affinity=60)
        want = await program(mode, [plan])
        token = await mode.worker.do(mode.fingerprint)
        command = DAMAGE[damage]
        if damage == "service chain":
            words = sh("nft list chains ip").split()
            (name,) = (w for w in words if w.startswith("affinity-learn-") and "/" in w)
            command = f"flush chain ip kube-proxy {name}"
        nft(command)
        assert await mode.worker.do(mode.fingerprint) != token
        change = diff(await mode.worker.do(mode.read), want)
        assert change
        await mode.worker.do(mode.apply, change)
        assert await mode.worker.do(mode.read) == want
        assert "10.96.0.10" in elements("cluster-ips")
        assert "10.96.0.99" not in elements("cluster-ips")

    in_namespace(body)


@pytest.mark.parametrize(
    "what", ["set ip kube-proxy firewall-allowed", "chain ip kube-proxy firewall"]
)
def test_a_removed_unused_object_is_noticed(what: str) -> None:
    async def body() -> None:
        mode = new_mode()
        want = await program(mode, [make.port()])
        nft(f"delete {what}")
        await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))
        assert await mode.worker.do(mode.read) == want
        await program(mode, [make.port(frontends=[ranged("192.0.2.80", "198.51.100.0/24")])])

    in_namespace(body)


def test_own_transactions_are_not_mistaken_for_damage() -> None:
    async def body() -> None:
        mode = new_mode()
        want = await program(mode, [make.port()])
        token = await mode.worker.do(mode.fingerprint)
        more = render(mode, [make.port(range(5), affinity=60)])
        await mode.worker.do(mode.apply, diff(want, more))
        await mode.worker.do(mode.apply, diff(more, render(mode, [], make.NO_DETECTOR)))
        assert await mode.worker.do(mode.fingerprint) == token

    in_namespace(body)


UPSTREAM = """
add table ip kube-proxy
add map ip kube-proxy service-ips { type ipv4_addr . inet_proto . inet_service : verdict ; }
add set ip kube-proxy cluster-ips { type ipv4_addr ; }
add chain ip kube-proxy service-x
add rule ip kube-proxy service-x meta l4proto tcp dnat to 10.244.0.9:80
add chain ip kube-proxy services
add rule ip kube-proxy services ip daddr . meta l4proto . th dport vmap @service-ips
add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }
add rule ip kube-proxy nat-prerouting jump services
add element ip kube-proxy service-ips { 10.96.0.10 . tcp . 80 : goto service-x }
add element ip kube-proxy cluster-ips { 10.96.0.10 }
"""
FOREIGN = "add table ip other; add chain ip other mine; add rule ip other mine drop\n"


def test_a_table_of_upstreams_is_replaced_at_once() -> None:
    async def body() -> None:
        nft(UPSTREAM + FOREIGN)
        mode = new_mode()
        nft(
            UPSTREAM.replace("ip kube", "ip6 kube")
            .replace("ipv4_addr", "ipv6_addr")
            .split("add rule")[0]
        )
        sticky = [make.cluster_ip(address="10.96.0.7")]
        plans = [
            make.port(),
            make.port(of=make.key("s"), frontends=sticky, affinity=60),
            make.port(of=make.key("r"), frontends=[ranged("192.0.2.80", "198.51.100.0/24")]),
            make.port(
                of=make.key("r", Family.IPV6), frontends=[ranged("2001:db8::80", "2001:db8:1::/48")]
            ),
        ]
        want = await program(mode, plans)
        assert await mode.worker.do(mode.read) == want
        assert sorted(elements("cluster-ips")) == ["10.96.0.10", "10.96.0.7"]
        assert sorted(hairpins()) == [itself(0), itself(2)]
        assert "service-x" not in listing()
        assert "chain mine" in listing()

    in_namespace(body)


def test_a_table_that_came_since_the_kernel_was_read_is_replaced() -> None:
    async def body() -> None:
        mode = new_mode()
        assert (await mode.worker.do(mode.probe)).usable
        want = render(mode, [make.port()])
        change = diff(await mode.worker.do(mode.read), want)
        nft("add table ip kube-proxy")
        nft("add chain ip kube-proxy filter-input { type filter hook input priority -110 ; }")
        nft("add rule ip kube-proxy filter-input drop")
        await mode.worker.do(mode.apply, change)
        assert await mode.worker.do(mode.read) == want
        assert "chain filter-input" not in listing()

    in_namespace(body)


def test_cleanup_leaves_only_what_is_not_ours() -> None:
    async def body() -> None:
        nft(FOREIGN)
        mode = new_mode()
        await program(mode, [make.port(affinity=60)])
        await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), {}))
        assert "kube-proxy" not in listing()
        assert "chain mine" in listing()
        assert await mode.worker.do(mode.read) == {}

    in_namespace(body)


def test_a_family_can_go() -> None:
    async def body() -> None:
        mode = new_mode()
        want = await program(mode, [make.port()])
        only = NodeSettings(families=(Family.IPV4,), ipv4=make.SETTINGS.ipv4)
        less = render(mode, [make.port()], only)
        await mode.worker.do(mode.apply, diff(want, less))
        assert await mode.worker.do(mode.read) == less
        assert "table ip6 kube-proxy" not in listing()

    in_namespace(body)


@pytest.mark.parametrize("script", ["flush ruleset", "delete table ip kube-proxy"])
def test_a_flush_by_others_is_noticed(script: str) -> None:
    async def body() -> None:
        mode = new_mode()
        want = await program(mode, [make.port()])
        changes = await mode.worker.do(mode.changes)
        assert changes is not None
        assert not await mode.worker.do(changes.judge)
        more = render(mode, [make.port(range(5), affinity=60)])
        await mode.worker.do(mode.apply, diff(want, more))  # not by others
        nft(FOREIGN)  # not ours
        assert not await mode.worker.do(changes.judge)
        waiting = asyncio.create_task(mode.worker.wait_for(changes))
        nft(script)
        await asyncio.wait_for(waiting, 60)
        await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), more))
        assert await mode.worker.do(mode.read) == more
        await release(mode)

    in_namespace(body)


def test_changes_between_two_waits_are_noticed() -> None:
    async def body() -> None:
        mode = new_mode()
        await program(mode, [make.port()])
        nft("delete element ip kube-proxy cluster-ips { 10.96.0.10 }")  # before the first
        await asyncio.wait_for(external_change(mode), 60)
        nft("flush ruleset")
        await asyncio.wait_for(external_change(mode), 60)
        waiting = asyncio.create_task(external_change(mode))
        nft(FOREIGN)
        nft("add table ip kube-proxy")
        await asyncio.wait_for(waiting, 60)
        await release(mode)

    in_namespace(body)
