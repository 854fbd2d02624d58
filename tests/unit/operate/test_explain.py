"""`explain`: connections, Services, pods and problems, as an operator reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from steersman.cli.output import plain_lines
from steersman.compile.endpoints import read_endpoints
from steersman.config import parse_command_line
from steersman.model import codes
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import DetectLocalMode
from steersman.model.node_state import NodeState
from steersman.model.plan import NodePlan
from steersman.model.world import World
from steersman.operate.answer import Answer, QuestionError
from steersman.operate.client import Client
from steersman.operate.explain import Question, answer_question, explain
from steersman.operate.explain_flow import ExplainedFlow, FlowAnswer, ReachAnswer
from steersman.operate.explain_service import PodAnswer, ServiceAnswer
from steersman.operate.list_rows import Lists
from steersman.operate.names import Names, UnknownNameError
from steersman.operate.problems import Problem, Problems
from steersman.run.pages.conditions import judge
from tests.support.apiserver.pods import answering
from tests.support.builders import kube
from tests.support.builders.asked import (
    DEMO,
    HTTP_TARGET,
    NODE_A,
    NODE_B,
    NODES,
    POD_A,
    POD_B,
    POD_C,
    PODS,
    WEB,
    WEB_SLICE,
    asked,
    pod_endpoint,
)
from tests.support.builders.objects import IPTABLES

WORLD = asked(*DEMO)
BEHIND = {f"{ip}:8080" for ip in (POD_A, POD_B, POD_C)}


def ask(world: World = WORLD, **words: Any) -> Answer:
    question = Question(**words)
    question.check()
    return answer_question(Names(world, question.namespace), question)


def flows(world: World = WORLD, **words: Any) -> tuple[ExplainedFlow, ...]:
    answer = ask(world, **words)
    assert isinstance(answer, FlowAnswer)
    return answer.flows


def flow(world: World = WORLD, **words: Any) -> ExplainedFlow:
    (only,) = flows(world, **words)
    return only


def text(answer: Answer) -> list[str]:
    return list(plain_lines(answer.blocks(False)))


def hops(explained: ExplainedFlow) -> list[tuple[str, str]]:
    return [(hop.node, hop.verdict) for hop in explained.hops]


# Connections


def test_a_connection_in_words() -> None:
    answer = ask(client="shop/web-1", to="shop/web:http")
    assert answer.exit_code == 0
    assert text(answer) == [
        f"from shop/web-1 ({POD_A}) to 10.96.0.10:80/TCP: forwarded to one of 3 endpoints",
        "  on node node-a:",
        "    1. 10.96.0.10:80/TCP is the clusterIP of shop/web:http",
        f"    2. the client {POD_A} is a pod of this cluster (pods: 10.244.0.0/16)",
        f"    3. goes to one of 3 endpoints: {POD_A}:8080, {POD_B}:8080, {POD_C}:8080",
        "    4. not masqueraded: the endpoint sees the client's own address, "
        f"except at {POD_A}:8080",
        "    5. masqueraded there, because that endpoint is the client itself (hairpin)",
        "    ENDPOINT           POD          NODE",
        "    10.244.1.11:8080   shop/web-1   node-a",
        "    10.244.1.12:8080   shop/web-2   node-a",
        "    10.244.2.13:8080   shop/web-3   node-b",
    ]


def test_a_single_endpoint_is_named_in_the_first_line() -> None:
    one = kube.endpoint_slice("web-1", "web", PODS[2], ports=[HTTP_TARGET])
    lines = text(ask(asked(WEB, one, *NODES), client="node-a", to="shop/web"))
    assert lines[0] == (
        "from node-a to 10.96.0.10:80/TCP: forwarded to 10.244.2.13:8080 (shop/web-3), masqueraded"
    )
    assert "    3. goes to 10.244.2.13:8080, the only endpoint in use" in lines
    assert not any("ENDPOINT" in line for line in lines)


def test_a_client_that_is_the_only_endpoint_is_masqueraded_in_both_lines() -> None:
    one = kube.endpoint_slice("web-1", "web", PODS[0], ports=[HTTP_TARGET])
    lines = text(ask(asked(WEB, one, *NODES), client="shop/web-1", to="shop/web"))
    assert lines[0].endswith(", masqueraded")
    assert lines[-1].startswith("    4. masqueraded, because the client itself is the endpoint")


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        ({"client": "pod", "to": "10.96.0.99:80"}, "not for a Service: it goes on unchanged", 0),
        ({"client": "pod", "to": "shop/none"}, "rejected: the client gets an error at once", 1),
        ({"client": "pod", "to": "shop/local"}, "dropped: the client gets no answer", 1),
    ],
)
def test_other_ends_of_a_connection(words: dict[str, str], says: str, code: int) -> None:
    world = asked(
        *NODES,
        kube.service("none", "10.96.0.30"),
        kube.service("local", "10.96.0.31", internalTrafficPolicy="Local"),
        kube.endpoint_slice("local-1", "local", PODS[2]),
    )
    answer = ask(world, **words)
    assert says in text(answer)[0]
    assert answer.exit_code == code


@pytest.mark.parametrize("node", ["node-a", "node-b", "laptop"])
def test_a_node_port_is_right_on_any_machine(node: str) -> None:
    found = flow(asked(*DEMO, node=node), client="external", to=f"{NODE_A}:30080")
    assert hops(found) == [("node-a", "forward")]
    assert {each.address for each in found.hops[0].endpoints} == BEHIND


def test_a_node_port_of_another_node_passes_through_this_one() -> None:
    found = flow(client="shop/web-1", to="node-b:30080")
    assert hops(found) == [("node-a", "accept"), ("node-b", "forward")]
    assert found.destination == NODE_B
    lines = text(ask(client="shop/web-1", to="node-b:30080"))
    numbers = [line.split(".")[0].strip() for line in lines if line.startswith("    ")]
    assert numbers[: len(numbers) - 4] == [str(n + 1) for n in range(len(numbers) - 4)]


@pytest.mark.parametrize(("client", "source"), [("node-a", NODE_A), ("node", NODE_A)])
def test_the_other_node_sees_the_address_of_the_first(client: str, source: str) -> None:
    found = flow(client=client, to=f"{NODE_B}:30080")
    assert f"the client {source} is no pod" in " ".join(found.hops[1].reasons)


def test_a_client_of_another_node_is_handled_there() -> None:
    assert hops(flow(client="shop/web-3", to="shop/web")) == [("node-b", "forward")]
    assert hops(flow(client="node-b", to="shop/web")) == [("node-b", "forward")]
    assert hops(flow(client="node-b", to="shop/web", node="node-a")) == [("node-a", "forward")]
    assert "the client 192.0.2.2" in " ".join(
        flow(client="node-b", to="shop/web", node="node-a").hops[0].reasons
    )


def test_a_node_without_an_object_is_said_to_be_unknown() -> None:
    world = asked(*DEMO[:2], NODES[0])
    found = flow(world, client="shop/web-3", to="shop/web")
    assert "the Node object of node-b is not known here" in found.hops[0].reasons[-1]
    with pytest.raises(QuestionError, match="no address of node-b is known"):
        ask(world, client="pod", to="node-b:30080")
    through = flow(world, client="node-b", to="node-a:30080")
    assert hops(through) == [("node-b", "accept"), ("node-a", "forward")]
    assert through.hops[1].reasons[2].startswith("the client is no pod")


def test_what_a_client_outside_uses_of_a_service() -> None:
    balanced = kube.service(
        "front",
        "10.96.0.40",
        type="LoadBalancer",
        ports=[{"port": 80, "nodePort": 30090}, {"port": 443, "name": "tls"}],
        externalIPs=["203.0.113.7"],
        ingress=[{"ip": "203.0.113.8"}],
    )
    world = asked(balanced, *NODES)
    outside = {(each.destination, each.port) for each in flows(world, to="shop/front")}
    assert outside == {
        ("203.0.113.7", 80),
        ("203.0.113.8", 80),
        (NODE_A, 30090),
        ("203.0.113.7", 443),
        ("203.0.113.8", 443),
    }
    inside = {(each.destination, each.port) for each in flows(world, client="pod", to="shop/front")}
    assert inside == {("10.96.0.40", 80), ("10.96.0.40", 443)}
    by_address = flows(world, client="198.51.100.9", to="shop/front:tls")
    assert {each.destination for each in by_address} == {"203.0.113.7", "203.0.113.8"}
    only_inside = asked(kube.service(), *NODES)
    assert [each.destination for each in flows(only_inside, to="shop/web")] == ["10.96.0.1"]


@pytest.mark.parametrize(
    ("to", "ports"),
    [("10.96.0.10", [80]), (NODE_A, [30080]), ("node-b", [30080]), (":30080", [30080])],
)
def test_without_a_port_all_are_explained(to: str, ports: list[int]) -> None:
    assert [each.port for each in flows(client="pod", to=to)] == ports
    assert all(each.verdict == "forward" for each in flows(client="pod", to=to))


@pytest.mark.parametrize(
    ("to", "says"),
    [
        ("10.96.0.99", "no Service is at 10.96.0.99: the proxies leave packets to it alone"),
        ("10.96.0.10/udp", "no Service is at 10.96.0.10"),
    ],
)
def test_nothing_is_there(to: str, says: str) -> None:
    answer = ask(client="pod", to=to)
    assert text(answer)[0].startswith(says)
    assert answer.exit_code == 0


def test_a_node_without_node_ports() -> None:
    answer = ask(asked(*NODES), client="pod", to="node-b")
    assert text(answer) == ["no Service has a node port at node-b"]


def test_a_service_without_an_address_here_is_said_to_have_none() -> None:
    world = asked(kube.service("bad", "bad"), *NODES)
    assert "has no address on this node" in text(ask(world, client="pod", to="shop/bad"))[0]


def test_a_pod_by_address_is_named() -> None:
    found = flow(client="pod", to=f"{POD_C}:8080")
    assert found.hops[0].reasons[-1] == f"{POD_C} is the address of pod shop/web-3"


def test_a_machine_that_is_no_node_has_no_node_ports() -> None:
    (elsewhere,) = flows(asked(*DEMO, node="laptop"), client="outside", to="shop/web")
    assert (elsewhere.destination, elsewhere.hops[0].node) == (NODE_A, "node-a")
    unknown = asked(*DEMO[:2], node="laptop")
    assert "has no address on this node" in text(ask(unknown, client="outside", to="shop/web"))[0]


def test_packets_from_outside_may_arrive_at_any_node() -> None:
    lines = text(ask(client="outside", to="10.96.0.10:80"))
    assert lines[1] == "  on node node-a, if the packets arrive there:"
    others: list[dict[str, Any]] = [
        {"client": "198.51.100.1", "to": NODE_B},
        {"client": "pod", "to": "shop/web"},
    ]
    for words in others:
        assert not any("if the packets" in line for line in text(ask(**words)))


def test_both_families_of_a_service() -> None:
    dual = kube.service(
        "dual",
        "10.96.0.50",
        clusterIPs=["10.96.0.50", "fd00:96::50"],
        ipFamilies=["IPv4", "IPv6"],
    )
    world = asked(dual, *DEMO)
    found = flows(world, client="pod", to="shop/dual")
    assert {each.destination for each in found} == {"10.96.0.50", "fd00:96::50"}
    assert [each.destination for each in flows(world, client="shop/web-1", to="shop/dual")] == [
        "10.96.0.50"
    ]
    six = asked(kube.service("six", "fd00:96::51", ipFamilies=["IPv6"], clusterIPs=["fd00:96::51"]))
    with pytest.raises(
        QuestionError, match=r"no address of 10\.0\.0\.1 is known in an address fam"
    ):
        ask(six, client="10.0.0.1", to="shop/six")


def test_a_node_port_in_a_family_that_the_node_lacks() -> None:
    dual = kube.service(
        "dual",
        "10.96.0.50",
        type="NodePort",
        clusterIPs=["10.96.0.50", "fd00:96::50"],
        ipFamilies=["IPv4", "IPv6"],
        ports=[{"port": 80, "nodePort": 30099}],
    )
    world = asked(dual, *NODES)
    both, one = (flows(world, to="shop/dual", node=node) for node in ("node-a", "node-b"))
    assert {each.destination for each in both} == {NODE_A, "2001:db8::1"}
    assert {each.destination for each in one} == {NODE_B}


def test_many_ports_are_cut() -> None:
    ports = [{"name": f"p{n}", "port": n + 1} for n in range(300)]
    answer = ask(asked(kube.service(ports=ports)), client="pod", to="shop/web")
    assert isinstance(answer, FlowAnswer)
    assert len(answer.flows) == 200
    assert text(answer)[-1] == "only the first 200 connections are shown: give a port"
    assert "" in text(answer)


@pytest.mark.parametrize(
    ("detect", "more"),
    [
        (DetectLocalMode.BRIDGE_INTERFACE, {"bridge_interface": "cbr0"}),
        (DetectLocalMode.INTERFACE_NAME_PREFIX, {"interface_name_prefix": "veth"}),
    ],
)
def test_a_known_pod_arrives_by_the_interface_of_pods(
    detect: DetectLocalMode, more: dict[str, Any]
) -> None:
    world = asked(*DEMO, detect=detect, **more)

    def reasons(client: str, **words: str) -> str:
        return " ".join(flow(world, client=client, to="shop/web", **words).hops[0].reasons)

    assert "is a pod of this cluster (pods: interface" in reasons("shop/web-1")
    assert "is no pod" in reasons("10.244.1.99")
    assert "is no pod" in reasons("shop/web-1", interface="eth0")
    assert "is no pod" in reasons("external")


def test_a_pod_with_the_address_of_its_node_is_the_node() -> None:
    host = kube.endpoint_slice("web-2", "web", pod_endpoint(NODE_A, "agent", "node-a"))
    detect = DetectLocalMode.BRIDGE_INTERFACE
    world = asked(*DEMO, host, detect=detect, bridge_interface="cbr0")
    found = flow(world, client="shop/agent", to="shop/web")
    assert "is this node itself" in " ".join(found.hops[0].reasons)


def test_what_a_pod_reaches() -> None:
    other = kube.service("api", "10.96.0.60", namespace="other")
    six = kube.service("six", "fd00:96::1", ipFamilies=["IPv6"], clusterIPs=["fd00:96::1"])
    many = kube.endpoint_slice(
        "web-2", "web", pod_endpoint("10.244.2.14", "web-4", "node-b"), ports=[HTTP_TARGET]
    )
    world = asked(*DEMO, other, six, many)
    answer = ask(world, client="shop/web-1")
    assert text(answer) == [
        "From shop/web-1:",
        "SERVICE         ADDRESS             VERDICT   ENDPOINTS",
        "other/api       10.96.0.60:80/TCP   reject",
        "shop/web:http   10.96.0.10:80/TCP   forward   "
        "10.244.1.11:8080 (shop/web-1), 10.244.1.12:8080 (shop/web-2), "
        "10.244.2.13:8080 (shop/web-3) and 1 more",
    ]
    only = ask(world, client="shop/web-1", namespace="shop")
    assert isinstance(only, ReachAnswer)
    assert [each.hops[0].service for each in only.flows] == ["shop/web:http"]
    assert "no Service has a clusterIP" in text(ask(asked(*NODES), client="node"))


def test_of_a_node_only_the_families_that_serve_are_shown() -> None:
    assert [each.destination for each in flows(client="pod", to="node-a:30080")] == [NODE_A]
    (neither,) = flows(client="pod", to="node-a:22")
    assert (neither.destination, neither.verdict) == (NODE_A, "accept")


# Services


def test_a_service_in_words() -> None:
    answer = ask(what="shop/web")
    assert isinstance(answer, ServiceAnswer)
    assert answer.exit_code == 0
    assert text(answer) == [
        "Service shop/web (NodePort), as node node-a serves it",
        "  port http, TCP, IPv4",
        "    clusterIP 10.96.0.10:80/TCP",
        "      from pods: to one of 3 endpoints",
        "      from this node: to one of 3 endpoints, masqueraded",
        "      from outside: to one of 3 endpoints, masqueraded",
        "    node port 30080/TCP",
        "      everyone: to one of 3 endpoints, masqueraded",
        "    ENDPOINT           POD          NODE     STATE",
        "    10.244.1.11:8080   shop/web-1   node-a   in: ready",
        "    10.244.1.12:8080   shop/web-2   node-a   in: ready",
        "    10.244.2.13:8080   shop/web-3   node-b   in: ready",
    ]


def test_all_that_a_service_may_have() -> None:
    value = kube.service(
        "front",
        "10.96.0.40",
        type="LoadBalancer",
        externalTrafficPolicy="Local",
        healthCheckNodePort=30100,
        sessionAffinity="ClientIP",
        loadBalancerSourceRanges=["203.0.113.0/24", "bad"],
        ingress=[{"ip": "192.0.2.200"}],
    )
    slice_ = kube.endpoint_slice("front-1", "front", PODS[2])
    answer = ask(asked(value, slice_, *NODES), what="shop/front")
    assert text(answer) == [
        "Service shop/front (LoadBalancer), as node node-a serves it",
        "  port (unnamed), TCP, IPv4",
        "    clusterIP 10.96.0.40:80/TCP",
        "      from pods: to 10.244.2.13:8080",
        "      from this node: to 10.244.2.13:8080, masqueraded",
        "      from outside: to 10.244.2.13:8080, masqueraded",
        "    loadBalancerIP 192.0.2.200:80/TCP",
        "      only for clients in 203.0.113.0/24; others are dropped",
        "      from pods: to 10.244.2.13:8080",
        "      from this node: to 10.244.2.13:8080, masqueraded",
        "      from outside: dropped, no endpoint is on this node",
        "    a client keeps its endpoint for 10800 s (session affinity by address)",
        "    health check node port 30100",
        "    traffic policy Local: ready endpoints are on node-b (1)",
        "    ENDPOINT           POD          NODE     STATE",
        "    10.244.2.13:8080   shop/web-3   node-b   "
        "for policy Cluster in: ready; for policy Local out: on another node",
        "  warning: Service shop/front spec.loadBalancerSourceRanges[1]: 'bad' is not a CIDR such "
        "as 192.0.2.0/24; it admits no client [SM1008]",
    ]
    there = ask(asked(value, slice_, *NODES), what="shop/front", node="node-b")
    assert "      from outside: to 10.244.2.13:8080 on this node" in text(there)


def test_with_policy_local_the_nodes_that_serve_are_listed() -> None:
    local = kube.service("near", "10.96.0.70", internalTrafficPolicy="Local")
    ends = [pod_endpoint(f"10.244.{n}.1", f"p{n}", f"node-{n:02}") for n in range(12)]
    out = pod_endpoint("10.244.99.1", "late", "node-99", ready=False)
    nameless = pod_endpoint("10.244.50.1", "", "")

    def note(*endpoints: kube.Object) -> str:
        world = asked(local, kube.endpoint_slice("near-1", "near", *endpoints), *NODES)
        (found,) = [line for line in text(ask(world, what="shop/near")) if "policy Local:" in line]
        return found.strip()

    about = "traffic policy Local: ready endpoints are on "
    assert note(*ends[:1], *PODS[:2], out) == f"{about}node-00 (1), node-a (2)"
    assert note(*ends).endswith("node-09 (1) and 2 more nodes")
    assert note(out, ends[0]) == f"{about}node-00 (1)"
    assert note(nameless) == f"{about}unknown nodes (1)"


def test_the_client_counts_also_beside_a_name_alone() -> None:
    assert [each.client for each in flows(what="shop/web", client="pod")] == ["pod"]


def test_a_service_without_endpoints_is_bad_news() -> None:
    answer = ask(asked(WEB, *NODES), what="shop/web")
    assert answer.exit_code == 1
    assert "      everyone: rejected, no endpoint can take the traffic" in text(answer)
    assert any("does its selector match any pod?" in line for line in text(answer))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (kube.service("x", "None"), "headless (clusterIP None): "),
        (
            kube.service("x", "", type="ExternalName", externalName="db.example.net"),
            "ExternalName: cluster DNS answers with db.example.net, ",
        ),
        (
            kube.service(
                "x", metadata={"labels": {"service.kubernetes.io/service-proxy-name": "other"}}
            ),
            "another proxy serves it: its label service.kubernetes.io/service-proxy-name is 'oth",
        ),
        (kube.service("x", ports=[]), "it has no port"),
        (kube.service("x", ""), "it has no clusterIP yet"),
        (kube.service("x", "bad"), "no valid clusterIP in a family that this node serves"),
    ],
)
def test_why_a_service_is_not_served(value: kube.Object, says: str) -> None:
    for words in ({"what": "shop/x"}, {"client": "pod", "to": "shop/x"}):
        lines = text(ask(asked(value, *NODES), **words))
        if "has no address on this node" not in lines[0]:
            assert any(says in line for line in lines), lines


def test_a_client_of_a_service_that_is_not_served_hears_why() -> None:
    world = asked(*DEMO, kube.service("db", "None"))
    answer = ask(world, client=POD_A, to="shop/db")
    assert isinstance(answer, ServiceAnswer)
    assert "headless" in "\n".join(text(answer))


def test_an_address_of_no_pod_is_a_destination() -> None:
    answer = ask(what="198.51.100.7")
    assert isinstance(answer, FlowAnswer)


def test_a_service_of_the_plan_that_is_gone_from_the_snapshot_is_explained() -> None:
    gone = asked(*DEMO)
    gone.snapshot.services.pop(next(iter(gone.snapshot.services)))  # type: ignore[attr-defined]
    with pytest.raises(UnknownNameError):
        ask(gone, what="shop/web")
    answer = ask(gone, what="shop/web-1", node="node-a")
    assert isinstance(answer, PodAnswer)
    assert answer.services == ()


def test_findings_of_slices_are_shown_with_their_service() -> None:
    bad = kube.endpoint_slice("web-2", "web", "nonsense", ports=[HTTP_TARGET])
    answer = ask(asked(*DEMO, bad, kube.service("other", "bad")), what="shop/web")
    assert isinstance(answer, ServiceAnswer)
    assert [each.object for each in answer.findings] == ["EndpointSlice shop/web-2"]
    other = ask(asked(kube.service("other", "bad")), what="shop/other")
    assert other.exit_code == 1
    assert text(other)[-1].startswith("  error: Service shop/other spec.clusterIP")


def test_the_view_of_a_node_without_an_object() -> None:
    lines = text(ask(asked(WEB, WEB_SLICE, node="node-z"), what="shop/web"))
    assert lines[-1] == "  the Node object of node-z is not known: its zone and addresses are not"


# Pods


@pytest.mark.parametrize("name", ["shop/web-3", "pod/shop/web-3", POD_C])
@pytest.mark.parametrize("field", ["what", "to"])
def test_which_services_use_a_pod(name: str, field: str) -> None:
    local = kube.service("near", "10.96.0.70", internalTrafficPolicy="Local")
    near = kube.endpoint_slice("near-1", "near", PODS[2])
    answer = ask(asked(*DEMO, local, near), **{field: name})
    assert isinstance(answer, PodAnswer)
    assert [(each.service, each.used) for each in answer.services] == [
        ("shop/web:http (TCP)", True),
        ("shop/near (TCP)", False),
    ]
    assert text(answer)[0].endswith(" on node node-b")
    assert answer.exit_code == 0


def test_a_pod_with_a_port_only_has_the_endpoints_of_that_port() -> None:
    answer = ask(what="shop/web-1:8080")
    assert isinstance(answer, PodAnswer)
    assert len(answer.services) == 1
    assert "connections to shop/web-1:8080 itself are for no Service" in text(answer)[-1]
    none = ask(what="shop/web-1:9")
    assert isinstance(none, PodAnswer)
    assert none.services == ()
    assert "no Service lists it as an endpoint" in text(none)[1]


def test_a_pod_that_is_out_everywhere_is_bad_news() -> None:
    out = kube.endpoint_slice(
        "web-1", "web", pod_endpoint(POD_A, "web-1", "node-a", ready=False), ports=[HTTP_TARGET]
    )
    answer = ask(asked(WEB, out, *NODES), what="shop/web-1")
    assert answer.exit_code == 1
    assert text(answer)[-1].endswith("out: not ready")


def test_a_pod_of_a_headless_service() -> None:
    quiet = kube.service("quiet", "None")
    listed = kube.endpoint_slice("quiet-1", "quiet", PODS[0])
    answer = ask(asked(quiet, listed, *NODES), what="shop/web-1")
    assert text(answer)[-1].startswith("shop/quiet: headless")


def test_a_pod_as_the_destination_of_a_client() -> None:
    assert isinstance(ask(client="pod", to="shop/web-1"), PodAnswer)
    found = flow(client="pod", to="shop/web-1:8080")
    assert (found.destination, found.verdict) == (POD_A, "accept")


def test_a_node_by_itself_is_its_node_ports() -> None:
    assert hops(flow(what="node-b")) == [("node-b", "forward")]


# Problems


def problems(world: World, namespace: str = "") -> dict[str, Problem]:
    answer = ask(world, problems=True, namespace=namespace)
    assert isinstance(answer, Problems)
    assert answer.exit_code == any(each.severity == "error" for each in answer.problems)
    return {f"{each.object} {each.field}".rstrip(): each for each in answer.problems}


def test_no_problems() -> None:
    assert problems(WORLD) == {}
    assert text(ask(problems=True)) == ["no problems on 1 node"]


def test_services_in_trouble_worst_first() -> None:
    draining = {"ready": False, "serving": True, "terminating": True}
    world = asked(
        *DEMO,
        kube.service("a-local", "10.96.1.1", internalTrafficPolicy="Local"),
        kube.endpoint_slice("a-local-1", "a-local", PODS[2]),
        kube.service("none", "10.96.1.2", ports=[{"name": "x", "port": 1}], selector={"a": "b"}),
        kube.service("unready", "10.96.1.3"),
        kube.endpoint_slice(
            "unready-1", "unready", pod_endpoint("10.244.3.1", "u", "node-a", ready=False)
        ),
        kube.service("ending", "10.96.1.4"),
        kube.endpoint_slice(
            "ending-1", "ending", pod_endpoint("10.244.3.2", "e", "node-a", **draining)
        ),
        kube.endpoint_slice("web-9", "web", "nonsense", ports=[HTTP_TARGET]),
        kube.service("portless", "10.96.1.5", ports=[]),
        findings=(
            Finding("configuration", "clusterCIDRs", "is empty"),
            Finding("Service shop/a-local", "", "the kernel refuses it", Severity.ERROR),
        ),
    )
    found = problems(world)
    assert [*map(str, found)] == [
        "Service shop/a-local",
        "Service shop/none port x/TCP IPv4",
        "Service shop/unready port TCP IPv4",
        "EndpointSlice shop/web-9 endpoints[0].addresses[0]",
        "configuration clusterCIDRs",
        "Service shop/a-local port TCP IPv4",
        "Service shop/ending port TCP IPv4",
        "Service shop/portless",
    ]
    assert found["Service shop/a-local"].text == "the kernel refuses it"
    local = found["Service shop/a-local port TCP IPv4"]
    assert local.code == codes.NO_LOCAL_ENDPOINT
    assert local.text == ("no endpoint on this node: clients of 10.96.1.1:80/TCP are dropped")
    none = found["Service shop/none port x/TCP IPv4"]
    assert (none.service, none.code, none.severity) == ("shop/none", codes.NO_ENDPOINT, "error")
    assert none.text == "no endpoint: clients are rejected"
    assert none.evidence == (
        "port x (TCP, IPv4): no EndpointSlice belongs to the Service: does its selector match any "
        "pod?",
    )
    unready = found["Service shop/unready port TCP IPv4"]
    assert unready.evidence == ("its port (TCP, IPv4): none of 1 is ready",)
    ending = found["Service shop/ending port TCP IPv4"]
    assert (ending.severity, ending.text) == ("warning", "only endpoints that terminate are left")
    assert found["Service shop/portless"].text == "it has no port"
    assert text(ask(world, problems=True))[0] == "3 errors, 5 warnings on 1 node"


def test_a_service_with_thousands_of_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slices are read once, not for each port; and it does not fill the screen."""
    ports = [{"name": f"p{number}", "port": 1 + number} for number in range(2000)]
    other = [{"name": f"other{number}", "port": 1 + number} for number in range(2000)]
    slice_ = kube.endpoint_slice("web-1", "web", "10.244.1.1", ports=other)
    world = asked(kube.service("web", ports=ports), slice_, *NODES)
    reads: list[object] = []

    def counted(*arguments: Any, **more: Any) -> Any:
        reads.append(arguments)
        return read_endpoints(*arguments, **more)

    monkeypatch.setattr("steersman.compile.explain.read_endpoints", counted)
    answer = ask(world, problems=True)
    assert len(reads) == 1
    assert isinstance(answer, Problems)
    (problem,) = answer.problems
    assert problem.field == "port p0/TCP IPv4, p1/TCP IPv4, p10/TCP IPv4 and 1997 more"
    assert len(problem.evidence) == 12
    assert "(there are: 'other0', 'other1', " in problem.evidence[0]
    assert len(text(answer)) < 10

    assert isinstance(ask(world, what="shop/web"), ServiceAnswer)
    listed = Lists(world, 0.0).services().ports
    assert len(listed) == 2000
    assert len(reads) == 3


def test_problems_beyond_those_of_which_the_plan_keeps_the_text_are_counted() -> None:
    broken = [kube.endpoint_slice(f"web-{n}", "web", "nonsense") for n in range(2, 22)]
    answer = ask(asked(*DEMO, *broken), problems=True)
    assert isinstance(answer, Problems)
    assert len(answer.problems) + answer.unlisted == 20
    assert "nodes do not list up to 4 more problems each" in text(answer)


def test_only_problems_of_a_namespace() -> None:
    world = asked(
        kube.service("none"), kube.service("gone", "10.96.0.3", namespace="other"), *NODES
    )
    assert list(problems(world, "other")) == ["Service other/gone port TCP IPv4"]
    bad = (Finding("configuration", "x", "bad"),)
    assert problems(asked(*DEMO, findings=bad), "shop") == {}


def not_synced(*objects: kube.Object) -> World:
    """The World of a process that has not served anything yet."""
    whole = asked(*objects)
    plan = NodePlan(whole.plan.settings, {})
    starting = NodeState(waiting="the EndpointSlices")
    starting = structs.replace(starting, conditions=tuple(judge(starting)))
    return structs.replace(whole, plan=plan, findings=(), process=starting)


@pytest.mark.parametrize(
    "question",
    [
        Question(client="pod", to="shop/web"),
        Question(to="10.96.0.1:80"),
        Question(what="pod/shop/web-1"),
        Question(client="node"),
    ],
)
async def test_before_the_first_sync_no_connection_is_explained(question: Question) -> None:
    assert (await explain(asked(*DEMO), question)).source == "test"
    with pytest.raises(QuestionError, match=r"not served yet: .*; ask again"):
        await explain(not_synced(*DEMO), question)


def test_before_the_first_sync_the_node_is_in_trouble_and_no_service() -> None:
    world = not_synced(*DEMO, kube.service("portless", "10.96.1.5", ports=[]))
    (waiting, unsure) = problems(world).values()
    assert (waiting.object, waiting.severity) == ("Condition Synced", "error")
    assert waiting.evidence == ("node-a: waiting for the EndpointSlices",)
    assert (unsure.object, unsure.severity) == ("Condition KernelMatches", "unknown")
    answer = ask(world, what="shop/web")
    assert isinstance(answer, ServiceAnswer)
    assert answer.exit_code == 2
    (note,) = answer.notes
    assert note == "not served yet: the process waits for the EndpointSlices"
    served = structs.replace(world, process=NodeState(synced_at=1.0))
    assert ask(served, what="shop/web").exit_code == 0
    assert problems(served).keys() == {"Service shop/web", "Service shop/portless"}


def test_pods_that_end_while_others_are_ready_are_no_problem() -> None:
    ending = pod_endpoint("10.244.3.2", "e", "node-a", ready=False, serving=True, terminating=True)
    more = kube.endpoint_slice("web-2", "web", ending, ports=[HTTP_TARGET])
    assert problems(asked(*DEMO, more)) == {}


# Questions


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({}, "give a Service such as shop/web"),
        ({"what": "shop/web", "to": "shop/web"}, "not both"),
        ({"problems": True, "client": "pod"}, "give no name with it"),
        ({"what": "shop/web", "node": "shop/web"}, "that is a service, not a node"),
        ({"client": "shop/web", "to": "shop/web"}, "is a Service: connections come from"),
    ],
)
def test_questions_without_an_answer(words: dict[str, Any], says: str) -> None:
    with pytest.raises(QuestionError, match=says):
        ask(**words)


def test_a_mode_that_serves_loopback_explains_it() -> None:
    found = flow(asked(*DEMO, traits=IPTABLES), client="node", to="127.0.0.1:30080")
    assert found.verdict == "forward"


async def test_the_origin_is_told() -> None:
    answer = await explain(WORLD, Question(what="shop/web"))
    assert answer.source == "test"
    with pytest.raises(UnknownNameError):
        await explain(WORLD, Question(what="shop/nobody"))


# More than the World has


class Process(Client):
    """A running process that knows these Nodes, or fails."""

    def __init__(self, *values: kube.Object, failure: str = "") -> None:
        super().__init__()
        self.values = values
        self.failure = failure
        self.asked: list[str] = []

    def get(self, path: str) -> bytes:
        self.asked.append(path)
        if self.failure:
            raise QuestionError(self.failure)
        return json.dumps(self.values).encode()


HELD = asked(WEB, WEB_SLICE, NODES[0], kind="process")
"""The World of a process that watches an API server: it has this node's object only."""
CONFIG = parse_command_line(["--master=http://127.0.0.1:1"]).config


@pytest.mark.parametrize("to", [f"{NODE_B}:30080", "node-b:30080", "node/node-b:30080"])
async def test_other_nodes_are_asked_for_when_an_answer_needs_them(to: str) -> None:
    process = Process(*NODES)
    answer = await explain(HELD, Question(client="shop/web-1", to=to), CONFIG, process)
    assert isinstance(answer, FlowAnswer)
    assert hops(answer.flows[0]) == [("node-a", "accept"), ("node-b", "forward")]
    assert (process.asked, answer.notes) == (["/nodes"], ())


async def test_nobody_is_asked_about_known_objects() -> None:
    process = Process(*NODES)
    await explain(HELD, Question(client="shop/web-1", to="shop/web"), CONFIG, process)
    assert process.asked == []


async def test_an_answer_without_the_other_nodes_says_so() -> None:
    process = Process(failure="403: no right to list nodes")
    question = Question(client="shop/web-1", to=f"{NODE_B}:30080")
    answer = await explain(HELD, question, CONFIG, process)
    note = "not all Nodes are known, so this may be incomplete: 403: no right to list nodes"
    assert text(answer)[-1] == note
    with pytest.raises(QuestionError, match=r"'node-x' is known.*; asking for more failed: 403"):
        await explain(HELD, Question(client="node-x", to="shop/web"), CONFIG, process)


async def test_a_pod_without_a_service_is_asked_for() -> None:
    value = {
        "metadata": {"namespace": "shop", "name": "job-1"},
        "spec": {"nodeName": "node-b"},
        "status": {"podIP": "10.244.2.50"},
    }
    async with answering(value) as (access, paths):
        config = parse_command_line([f"--master={access.servers[0]}"]).config
        question = Question(client="shop/job-1", to="shop/web")
        answer = await explain(HELD, question, config, Process(*NODES))
    assert paths == ["/api/v1/namespaces/shop/pods/job-1"]
    assert isinstance(answer, FlowAnswer)
    assert (answer.flows[0].source, answer.flows[0].hops[0].node) == ("10.244.2.50", "node-b")


async def test_who_has_no_credentials_hears_of_the_name_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = parse_command_line([]).config
    question = Question(client="shop/job-1", to="shop/web")
    with pytest.raises(QuestionError, match=r"--kubeconfig asks the API server\)$"):
        await explain(HELD, question, config, Process(NODES[0]))


async def test_a_pod_that_does_not_exist_is_unknown() -> None:
    async with answering({"message": "no such pod"}, 404) as (access, _):
        config = parse_command_line([f"--master={access.servers[0]}"]).config
        with pytest.raises(UnknownNameError, match="'shop/job-1' is known"):
            await explain(HELD, Question(what="shop/job-1"), config, Process(*NODES))


async def test_manifests_are_all_there_is() -> None:
    process = Process()
    with pytest.raises(UnknownNameError):
        await explain(WORLD, Question(what="shop/nobody"), CONFIG, process)
    assert process.asked == []
