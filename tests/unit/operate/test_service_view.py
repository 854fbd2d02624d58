"""The answer of a Service's page, also if there is nothing to show."""

from __future__ import annotations

from typing import Any

import pytest

from steersman.model.names import ObjectName
from steersman.model.world import World
from steersman.operate.names import Names
from steersman.operate.service_view import MOST_CHOICES, ServiceView, service_view
from tests.support.builders import kube
from tests.support.builders.asked import DEMO, HTTP_TARGET, NODE_A, NODES, WEB, WEB_SLICE, asked

WORLD = asked(*DEMO)


def view(world: World = WORLD, name: str = "web", **words: Any) -> ServiceView:
    return service_view(Names(world), ObjectName("shop", name), **words)


def test_a_service_with_its_first_address_and_any_pod() -> None:
    found = view()
    assert (found.service, found.node) == ("shop/web", "node-a")
    assert [(each.to, each.selected) for each in found.choices] == [
        ("10.96.0.10:80/TCP", True),
        (f"{NODE_A}:30080/TCP", False),
    ]
    assert found.choices[1].label == f"node port {NODE_A}:30080/TCP (http)"
    assert found.selected == "10.96.0.10:80/TCP"
    assert found.client == "pod"
    assert found.flow is not None
    assert found.flow.hops[0].frontend == "clusterIP"
    assert found.picture is not None


@pytest.mark.parametrize(
    ("client", "frontend", "masqueraded"),
    [
        ("external", "nodePort", True),
        (" shop/web-1 ", "clusterIP", False),
        ("node-a", "clusterIP", True),
        ("198.51.100.7", "clusterIP", True),
        ("10.244.2.13", "clusterIP", False),
    ],
)
def test_any_client_and_any_address(client: str, frontend: str, masqueraded: bool) -> None:
    choices = {"clusterIP": "10.96.0.10:80/TCP", "nodePort": f"{NODE_A}:30080/TCP"}
    found = view(client=client, to=choices[frontend])
    assert found.selected == choices[frontend]
    assert found.flow is not None
    hop = found.flow.hops[-1]
    assert (hop.frontend, hop.masquerade) == (frontend, masqueraded)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"client": "nobody"}, "no Service, pod or node 'nobody' is known"),
        ({"client": "fd00::9"}, "no address of fd00::9 is known in an address family"),
        ({"client": "svc/web"}, "no Service"),
        ({"to": "not an address"}, "no Service, pod or node 'not an address' is known"),
        ({"to": f"{NODE_A}"}, ""),
        ({"to": "10.96.0.200"}, "no Service is at 10.96.0.200"),
    ],
)
def test_a_connection_that_cannot_be_explained_says_why(words: dict[str, Any], says: str) -> None:
    found = view(**words)
    assert says in found.way_problem
    assert (found.flow is None) == bool(says)
    assert found.served is not None
    assert found.served.ports, "the rest of the page is there all the same"


def test_an_address_that_was_typed_is_among_the_choices() -> None:
    found = view(to="10.96.0.10:443/TCP")
    assert [each.to for each in found.choices if each.selected] == ["10.96.0.10:443/TCP"]
    assert found.flow is not None
    assert found.flow.verdict == "reject"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"clusterIP": "None"}, "headless"),
        (
            {"type": "ExternalName", "externalName": "db.example.com", "clusterIP": ""},
            "ExternalName",
        ),
    ],
)
def test_a_service_that_no_proxy_serves_says_so(spec: dict[str, str], says: str) -> None:
    service = kube.service("web", "")
    service["spec"] |= spec
    found = view(asked(service, *NODES))
    assert found.served is not None
    assert says in found.served.notes[0]
    assert found.choices == ()
    assert found.flow is None
    assert found.way_problem == ""


def test_a_service_without_endpoints_is_bad_news() -> None:
    found = view(asked(WEB, *NODES))
    assert found.picture is not None
    assert found.picture.stages[-1].boxes[0].kind == "reject"


def test_the_choices_are_bounded() -> None:
    ports = [{"name": f"p{n}", "port": n, "protocol": "UDP"} for n in range(1, MOST_CHOICES + 50)]
    web = kube.service("web", "10.96.0.10", ports=ports)
    assert len(view(asked(web, *NODES)).choices) == MOST_CHOICES


def test_addresses_of_other_services_are_no_choices() -> None:
    other = kube.service("other", "10.96.0.77")
    found = view(asked(other, *DEMO))
    assert "10.96.0.77:80/TCP" not in [each.to for each in found.choices]


def test_a_node_port_without_a_known_address_is_no_choice() -> None:
    found = view(asked(WEB, WEB_SLICE))
    assert [each.to for each in found.choices] == ["10.96.0.10:80/TCP"]


def test_ipv6_node_ports_are_at_an_ipv6_address() -> None:
    both = kube.service(
        "web",
        "10.96.0.10",
        type="NodePort",
        clusterIPs=["10.96.0.10", "fd00:10:96::a"],
        ipFamilies=["IPv4", "IPv6"],
        ports=[{"name": "http", "port": 80, "protocol": "TCP", "nodePort": 30080}],
    )
    slice_ = kube.endpoint_slice(
        "web-6", "web", "fd00:10:244::7", family="IPv6", ports=[HTTP_TARGET]
    )
    found = view(asked(both, WEB_SLICE, slice_, *NODES), client="external")
    assert "[2001:db8::1]:30080/TCP" in [each.to for each in found.choices]
