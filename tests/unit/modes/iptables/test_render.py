from __future__ import annotations

from msgspec.structs import replace

from steersman.model.names import Family, Protocol
from steersman.model.plan import FamilySettings, LocalDetector, NodeSettings, ServicePlan
from steersman.modes.iptables.render import (
    Features,
    local_source,
    render_service,
)
from steersman.modes.iptables.render_node import render_node
from steersman.netfilter.iptables.names import chain_hash
from steersman.netfilter.iptables.saved import probability
from tests.support.builders.plans import (
    DROPPED,
    EXTERNAL_LOCAL,
    INTERNAL_LOCAL,
    MASQUERADED,
    NONE_HERE,
    PLAIN,
    REJECTED,
    SETTINGS,
    cluster_ip,
    endpoints,
    external_ip,
    key,
    load_balancer,
    node_port,
    plan,
)

PODS = endpoints("10.244.0.1", "10.244.0.2")
HTTP = key("shop/cart:http")
HASH = chain_hash("shop/cart:httptcp")
FEATURES = Features()


def chains(
    service: ServicePlan, settings: NodeSettings = SETTINGS, features: Features = FEATURES
) -> dict[str, list[str]]:
    """Chain name to rules without the `-A CHAIN `, this Service's hash shown as #."""
    out: dict[str, list[str]] = {}
    for (_, table, chain, part), text in render_service(service, settings, features).items():
        assert not part or part.startswith("shop/cart")
        rules = [rule.removeprefix("-A ").partition(" ")[2] for rule in text.split("\n")]
        out[(f"{table} {chain}" if part else chain).replace(HASH, "#")] = [
            rule.replace(HASH, "#") for rule in rules
        ]
    return out


def test_a_cluster_ip_leads_to_its_endpoints() -> None:
    found = chains(plan(HTTP, cluster_ip("10.96.0.1"), cluster=PODS))
    first, second = (f"KUBE-SEP-{chain_hash(f'shop/cart:httptcp{pod}')}" for pod in PODS)
    match = (
        '-d 10.96.0.1/32 -p tcp -m comment --comment "shop/cart:http cluster IP" -m tcp --dport 80'
    )
    comment = '-m comment --comment "shop/cart:http'
    assert found == {
        "nat KUBE-SERVICES": [f"{match} -j KUBE-SVC-#"],
        "KUBE-SVC-#": [
            f"! -s 10.244.0.0/16 {match} -j KUBE-MARK-MASQ",
            f'{comment} -> 10.244.0.1:8080" -m statistic --mode random --probability 0.50000000000'
            f" -j {first}",
            f'{comment} -> 10.244.0.2:8080" -j {second}',
        ],
        first: [
            f'-s 10.244.0.1/32 {comment}" -j KUBE-MARK-MASQ',
            f'-p tcp {comment}" -m tcp -j DNAT --to-destination 10.244.0.1:8080',
        ],
        second: [
            f'-s 10.244.0.2/32 {comment}" -j KUBE-MARK-MASQ',
            f'-p tcp {comment}" -m tcp -j DNAT --to-destination 10.244.0.2:8080',
        ],
    }


def test_chains_come_after_those_they_lead_to() -> None:
    service = plan(
        HTTP,
        cluster_ip("10.96.0.1"),
        load_balancer("192.0.2.1", EXTERNAL_LOCAL, ("198.51.100.0/24",)),
        cluster=PODS,
        local=PODS[:1],
    )
    seen: set[str] = {"KUBE-MARK-MASQ"}
    for (_, _, chain, part), text in render_service(service, SETTINGS, FEATURES).items():
        if not part:
            targets = {rule.rpartition(" -j ")[2] for rule in text.split("\n") if " -j " in rule}
            assert {t for t in targets if t.startswith("KUBE-")} <= seen
            seen.add(chain)
    assert len(seen) == 7


def test_whether_cluster_ip_traffic_is_masqueraded() -> None:
    for actions, detector, expected in (
        (
            PLAIN,
            LocalDetector(cidr="10.244.0.0/16"),
            "! -s 10.244.0.0/16 -d 10.96.0.1/32 -p tcp",
        ),
        (PLAIN, LocalDetector(interface="br0"), "-d 10.96.0.1/32 ! -i br0 -p tcp"),
        (PLAIN, LocalDetector(interface_prefix="veth"), "-d 10.96.0.1/32 ! -i veth+ -p tcp"),
        (MASQUERADED, LocalDetector(cidr="10.244.0.0/16"), "-d 10.96.0.1/32 -p tcp"),
        ((PLAIN[0],) * 3, LocalDetector(), '-m comment --comment "shop/cart:http -> 10.244.0.1'),
    ):
        settings = replace(SETTINGS, ipv4=FamilySettings(detector=detector))
        service = plan(HTTP, cluster_ip("10.96.0.1", actions), cluster=PODS)
        assert chains(service, settings)["KUBE-SVC-#"][0].startswith(expected)


def test_local_endpoints_have_a_list_of_their_own() -> None:
    found = chains(plan(HTTP, cluster_ip("10.96.0.1", INTERNAL_LOCAL), local=PODS))
    assert found["nat KUBE-SERVICES"][0].endswith("-j KUBE-SVL-#")
    assert len(found["KUBE-SVL-#"]) == 3
    assert "KUBE-SVC-#" not in found


def test_a_cluster_ip_without_endpoints_is_refused_in_the_filter_table() -> None:
    for actions, why, target in (
        (REJECTED, "no endpoints", "REJECT --reject-with icmp-port-unreachable"),
        (DROPPED, "no local endpoints", "DROP"),
    ):
        assert chains(plan(HTTP, cluster_ip("10.96.0.1", actions))) == {
            "filter KUBE-SERVICES": [
                f'-d 10.96.0.1/32 -p tcp -m comment --comment "shop/cart:http has {why}"'
                f" -m tcp --dport 80 -j {target}"
            ]
        }


def test_ipv6() -> None:
    name = key("shop/cart:http", Protocol.UDP, Family.IPV6)
    found = chains(plan(name, cluster_ip("fd00::1", REJECTED)))
    assert found["filter KUBE-SERVICES"] == [
        '-d fd00::1/128 -p udp -m comment --comment "shop/cart:http has no endpoints"'
        " -m udp --dport 80 -j REJECT --reject-with icmp6-port-unreachable"
    ]
    pods = endpoints("fd00::2")
    found = chains(plan(name, cluster_ip("fd00::1"), cluster=pods, affinity=60))
    endpoint = next(rules for chain, rules in found.items() if "SEP" in chain)
    assert endpoint[1].endswith("-j DNAT --to-destination [fd00::2]:8080")
    assert "--mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource" in endpoint[1]


def test_external_traffic_all_alike() -> None:
    frontends = (
        cluster_ip("10.96.0.1"),
        external_ip("192.0.2.1"),
        load_balancer("192.0.2.2"),
        node_port(30080),
    )
    found = chains(plan(HTTP, *frontends, cluster=PODS))
    what = '-m comment --comment "masquerade traffic for shop/cart:http external destinations"'
    assert found["KUBE-EXT-#"] == [f"{what} -j KUBE-MARK-MASQ", "-j KUBE-SVC-#"]
    assert [rule.rpartition(" ")[2] for rule in found["nat KUBE-SERVICES"]] == [
        "KUBE-SVC-#",
        "KUBE-EXT-#",
        "KUBE-EXT-#",
    ]
    assert found["nat KUBE-NODEPORTS"] == [
        '-p tcp -m comment --comment "shop/cart:http" -m tcp --dport 30080 -j KUBE-EXT-#'
    ]


def test_external_traffic_with_short_circuits() -> None:
    frontends = (cluster_ip("10.96.0.1"), node_port(30080, EXTERNAL_LOCAL))
    service = plan(HTTP, *frontends, cluster=PODS, local=PODS[:1])
    found = chains(service)
    local = "-m addrtype --src-type LOCAL"
    end = 'for shop/cart:http external destinations"'
    rest = [
        f'-m comment --comment "masquerade LOCAL traffic {end} {local} -j KUBE-MARK-MASQ',
        f'-m comment --comment "route LOCAL traffic {end} {local} -j KUBE-SVC-#',
        "-j KUBE-SVL-#",
    ]
    pods = f'-s 10.244.0.0/16 -m comment --comment "pod traffic {end} -j KUBE-SVC-#'
    assert found["KUBE-EXT-#"] == [pods, *rest]
    assert "filter KUBE-EXTERNAL-SERVICES" not in found
    settings = replace(SETTINGS, ipv4=FamilySettings())
    assert chains(service, settings)["KUBE-EXT-#"] == rest


def test_external_traffic_that_only_short_circuits_survive() -> None:
    frontends = (
        cluster_ip("10.96.0.1"),
        load_balancer("192.0.2.2", NONE_HERE),
        node_port(30080, NONE_HERE),
    )
    found = chains(plan(HTTP, *frontends, cluster=PODS))
    assert len(found["KUBE-EXT-#"]) == 3
    comment = '-m comment --comment "shop/cart:http has no local endpoints"'
    assert found["filter KUBE-EXTERNAL-SERVICES"] == [
        f"-d 192.0.2.2/32 -p tcp {comment} -m tcp --dport 80 -j DROP",
        f"-p tcp {comment} -m addrtype --dst-type LOCAL -m tcp --dport 30080 -j DROP",
    ]


def test_nothing_leads_to_a_service_without_endpoints() -> None:
    frontends = (cluster_ip("10.96.0.1", REJECTED), external_ip("192.0.2.1", REJECTED))
    found = chains(plan(HTTP, *frontends, node_port(30080, REJECTED), health=32000))
    assert {chain: len(rules) for chain, rules in found.items()} == {
        "filter KUBE-SERVICES": 1,
        "filter KUBE-EXTERNAL-SERVICES": 2,
        "filter KUBE-NODEPORTS": 1,
    }


def test_pods_and_nodes_need_not_be_served() -> None:
    actions = (DROPPED[0], DROPPED[0], MASQUERADED[0])
    found = chains(plan(HTTP, cluster_ip("10.96.0.1"), node_port(30080, actions), cluster=PODS))
    assert found["KUBE-EXT-#"] == ["-j KUBE-SVC-#"]


def test_a_node_may_go_unmasqueraded() -> None:
    actions = (PLAIN[0], PLAIN[0], EXTERNAL_LOCAL[2])
    service = plan(HTTP, node_port(30080, actions), cluster=PODS, local=PODS)
    assert ["MARK-MASQ" in rule for rule in chains(service)["KUBE-EXT-#"]] == [False] * 3
    same = (PLAIN[0],) * 3
    assert chains(plan(HTTP, node_port(30080, same), cluster=PODS))["KUBE-EXT-#"] == [
        "-j KUBE-SVC-#"
    ]


def test_source_ranges() -> None:
    ranges = ("198.51.100.0/24", "192.0.2.2/32")
    frontends = [load_balancer(vip, MASQUERADED, ranges) for vip in ("192.0.2.2", "192.0.2.3")]
    found = chains(plan(HTTP, cluster_ip("10.96.0.1"), *frontends, cluster=PODS))
    comment = '-m comment --comment "shop/cart:http loadbalancer IP"'
    assert found["KUBE-FW-#"] == [
        f"-s 198.51.100.0/24 {comment} -j KUBE-EXT-#",
        f"-s 192.0.2.2/32 {comment} -j KUBE-EXT-#",
        '-m comment --comment "other traffic to shop/cart:http will be dropped by'
        ' KUBE-PROXY-FIREWALL"',
    ]
    assert found["nat KUBE-SERVICES"][1].endswith("-j KUBE-FW-#")
    assert found["filter KUBE-PROXY-FIREWALL"] == [
        f"-d {vip}/32 -p tcp -m comment --comment"
        ' "shop/cart:http traffic not accepted by KUBE-FW-#" -m tcp --dport 80 -j DROP'
        for vip in ("192.0.2.2", "192.0.2.3")
    ]


def test_affinity() -> None:
    found = chains(plan(HTTP, cluster_ip("10.96.0.1"), cluster=PODS, affinity=300))
    first = f"KUBE-SEP-{chain_hash('shop/cart:httptcp10.244.0.1:8080')}"
    mask = "--mask 255.255.255.255 --rsource"
    comment = '-m comment --comment "shop/cart:http -> 10.244.0.1:8080"'
    rules = found["KUBE-SVC-#"]
    assert len(rules) == 5
    assert rules[1] == (
        f"{comment} -m recent --rcheck --seconds 300 --reap --name {first} {mask} -j {first}"
    )
    assert f"-m recent --set --name {first} {mask} -m tcp -j DNAT" in found[first][1]


def test_a_large_cluster_goes_without_comments() -> None:
    settings = replace(SETTINGS, large_cluster=True)
    found = chains(plan(HTTP, cluster_ip("10.96.0.1"), cluster=PODS, affinity=300), settings)
    for chain, rules in found.items():
        for rule in rules:
            assert ("--comment" in rule) == ("cluster IP" in rule or chain.startswith("nat"))


def test_health_checks_are_let_in_by_tcp_whatever_the_port_is() -> None:
    udp = key("shop/cart:dns", Protocol.UDP)
    rendered = render_service(
        plan(udp, cluster_ip("10.96.0.1", REJECTED), health=32000), SETTINGS, FEATURES
    )
    assert rendered[4, "filter", "KUBE-NODEPORTS", "shop/cart:dns tcp"] == (
        "-A KUBE-NODEPORTS -p tcp -m comment --comment"
        ' "shop/cart:dns health check node port" -m tcp --dport 32000 -j ACCEPT'
    )


def test_localhost_node_ports_are_counted_where_the_kernel_can() -> None:
    service = plan(HTTP, cluster_ip("10.96.0.1"), node_port(30080), cluster=PODS)
    counted = chains(service, features=Features(nfacct=True))["nat KUBE-NODEPORTS"]
    assert len(counted) == 2
    assert counted[0].startswith("-d 127.0.0.0/8 -p tcp")
    settings = replace(SETTINGS, ipv4=FamilySettings(localhost_node_ports=False))
    assert len(chains(service, settings, Features(nfacct=True))["nat KUBE-NODEPORTS"]) == 1


def test_a_split_list() -> None:
    settings = replace(SETTINGS, split_dispatch=True)
    service = plan(HTTP, cluster_ip("10.96.0.7"), external_ip("192.0.2.171"), cluster=PODS)
    found = chains(service, settings)
    assert "nat KUBE-SERVICES" not in found
    assert found["nat KUBE-SVC-BYADDR-07"][0].startswith("-d 10.96.0.7/32")
    assert found["nat KUBE-SVC-BYADDR-ab"][0].startswith("-d 192.0.2.171/32")


def test_probabilities_are_what_the_kernel_keeps() -> None:
    assert probability(3) == "0.33333333349"
    assert probability(2) == "0.50000000000"


def test_a_cidr_of_everyone_is_no_match() -> None:
    assert local_source(LocalDetector(cidr="0.0.0.0/0")) == ("", "")
    assert local_source(LocalDetector(cidr="0.0.0.0/0"), negate=True) == (" ! -s 0.0.0.0/0", "")


# The node's part


def tail(settings: FamilySettings, family: Family = Family.IPV4) -> list[str]:
    node = NodeSettings(families=(family,), ipv4=settings, ipv6=settings)
    text = render_node(node, FEATURES).get((int(family), "nat", "KUBE-SERVICES", "node ports"), "")
    comment = (
        '-m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in'
        ' this chain"'
    )
    return [
        rule.removeprefix("-A KUBE-SERVICES ").replace(comment, "#") for rule in text.split("\n")
    ]


def test_the_tail_follows_the_addresses_of_node_ports() -> None:
    everywhere = "-m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"
    assert tail(FamilySettings(localhost_node_ports=True)) == [f"# {everywhere}"]
    assert tail(FamilySettings()) == [f"! -d 127.0.0.0/8 # {everywhere}"]
    assert tail(FamilySettings(), Family.IPV6) == [f"! -d ::1/128 # {everywhere}"]
    some = FamilySettings(
        node_port_addresses=("192.0.2.1", "192.0.2.2"), local_addresses=("127.0.0.1", "192.0.2.1")
    )
    assert tail(some) == [
        "-d 192.0.2.1/32 # -j KUBE-NODEPORTS",
        "-d 192.0.2.2/32 # -j KUBE-NODEPORTS",
    ]
    assert tail(replace(some, localhost_node_ports=True))[2:] == [
        "-d 127.0.0.1/32 # -j KUBE-NODEPORTS"
    ]
    assert tail(FamilySettings(node_port_addresses=())) == [""]


def test_kubelets_firewall_closes_localhost_only_where_it_is_open() -> None:
    node = render_node(SETTINGS, FEATURES)
    assert (4, "filter", "KUBE-FIREWALL", "kubelet") in node
    assert (6, "filter", "KUBE-FIREWALL", "kubelet") not in node
    assert (6, "filter", "INPUT", "kubelet") in node
    closed = replace(SETTINGS, ipv4=FamilySettings())
    assert (4, "filter", "KUBE-FIREWALL", "kubelet") not in render_node(closed, FEATURES)


def test_features_show_in_the_fixed_rules() -> None:
    old = render_node(SETTINGS, Features(random_fully=False, tcp_liberal=True))
    assert "--random-fully" not in old[4, "nat", "KUBE-POSTROUTING", ""]
    assert "INVALID" not in old[4, "filter", "KUBE-FORWARD", ""]
    new = render_node(SETTINGS, Features(nfacct=True))
    assert new[4, "nat", "KUBE-POSTROUTING", ""].endswith("--random-fully")
    assert "--nfacct-name  ct_state_invalid_dropped_pkts" in new[4, "filter", "KUBE-FORWARD", ""]
    assert "nfacct" not in render_node(SETTINGS, FEATURES)[4, "filter", "KUBE-FORWARD", ""]


def test_the_mark_is_the_configured_bit() -> None:
    node = render_node(replace(SETTINGS, masquerade_bit=15), FEATURES)
    assert node[4, "nat", "KUBE-MARK-MASQ", ""] == (
        "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x8000/0x8000"
    )


def test_a_split_node_has_every_part() -> None:
    node = render_node(replace(SETTINGS, split_dispatch=True), FEATURES)
    for family in (4, 6):
        assert sum(key[0] == family and "BYADDR" in key[2] for key in node) == 272
    jumps = node[4, "nat", "KUBE-SERVICES", "split"].split("\n")
    assert jumps[1] == "-A KUBE-SERVICES -d 0.0.0.16/0.0.0.240 -j KUBE-SVC-BYADDR-1"
    assert node[6, "nat", "KUBE-SVC-BYADDR-a", ""].split("\n")[11] == (
        "-A KUBE-SVC-BYADDR-a -d ::ab/::ff -j KUBE-SVC-BYADDR-ab"
    )
    assert not any("BYADDR" in key[2] for key in render_node(SETTINGS, FEATURES))
