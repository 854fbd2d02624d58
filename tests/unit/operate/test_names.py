"""What operators type, and what it means."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steersman.compile.planner import compile_all
from steersman.model.inputs import HostFacts
from steersman.model.kube import Pod
from steersman.model.names import ObjectName, Protocol
from steersman.model.plan import SourceClass
from steersman.operate.answer import QuestionError
from steersman.operate.names import Names, UnknownNameError, known_pod, label_of, split_words
from tests.support.builders import kube
from tests.support.builders.asked import (
    DEMO,
    NODE_A,
    NODE_B,
    POD_A,
    POD_C,
    asked,
    pod_endpoint,
)
from tests.support.builders.objects import NFTABLES

SAME = (
    kube.service("both", "10.96.0.20", ports=[{"name": "a", "port": 1}, {"port": 2}]),
    kube.endpoint_slice("both-1", "both", pod_endpoint("10.244.9.9", "both", "node-c")),
)
UNSERVED = (
    kube.service("quiet", "None"),
    kube.service("db", "", type="ExternalName", externalName="db.example.net", ports=[]),
)
WORLD = asked(*DEMO, *SAME, *UNSERVED)
NAMES = Names(WORLD)


# Form


@pytest.mark.parametrize(
    ("text", "host", "port", "protocol"),
    [
        ("shop/web", "shop/web", "", None),
        ("shop/web:http", "shop/web", "http", None),
        ("shop/web:80/udp", "shop/web", "80", Protocol.UDP),
        ("shop/udp", "shop/udp", "", None),
        ("10.0.0.1", "10.0.0.1", "", None),
        ("10.0.0.1/sctp", "10.0.0.1", "", Protocol.SCTP),
        ("10.0.0.1:53/UDP", "10.0.0.1", "53", Protocol.UDP),
        ("fd00::1", "fd00::1", "", None),
        ("fd00::1/udp", "fd00::1", "", Protocol.UDP),
        ("[fd00::1]", "fd00::1", "", None),
        ("[fd00::1]/udp", "fd00::1", "", Protocol.UDP),
        ("[fd00::1]:80", "fd00::1", "80", None),
        ("[fd00::1]:80/udp", "fd00::1", "80", Protocol.UDP),
        (":30080", "", "30080", None),
        (":30080/udp", "", "30080", Protocol.UDP),
        ("svc/shop/web", "svc/shop/web", "", None),
        (" web.shop.svc.cluster.local:80 ", "web.shop.svc.cluster.local", "80", None),
    ],
)
def test_words_are_split(text: str, host: str, port: str, protocol: Protocol | None) -> None:
    assert split_words(text) == (host, port, protocol)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "give a name"),
        ("shop/web:", "port is missing"),
        ("10.0.0.1:0", "between 1 and 65535"),
        ("10.0.0.1:70000", "between 1 and 65535"),
        ("10.0.0.1:80/icmp", "'icmp' is not tcp, udp or sctp"),
        ("fd00::zz:80", "needs brackets"),
        ("[fd00::zz]:80", "'fd00::zz' is not an IP address"),
        ("[fd00::1", "is not an IP address"),
    ],
)
def test_what_has_no_form_is_refused(text: str, says: str) -> None:
    with pytest.raises(QuestionError, match=says):
        split_words(text)


# Meaning


@pytest.mark.parametrize(
    "text",
    [
        "shop/web",
        "web.shop",
        "web.shop.svc",
        "web.shop.svc.cluster.local",
        "web.shop.svc.cluster.local.",
        "svc/shop/web",
        "service/web.shop",
    ],
)
def test_a_service_by_its_names(text: str) -> None:
    found = NAMES.resolve(text)
    assert (found.kind, found.name) == ("service", ObjectName("shop", "web"))
    assert found.addresses == ("10.96.0.10",)
    assert [port.name for port in found.ports] == ["http"]


@pytest.mark.parametrize("text", ["web", "svc/web", "web:80", "web:http/tcp"])
def test_a_name_alone_is_in_the_namespace_of_the_question(text: str) -> None:
    assert Names(WORLD, "shop").resolve(text).label == "shop/web"
    with pytest.raises(UnknownNameError, match="similar: shop/web"):
        NAMES.resolve(text)


@pytest.mark.parametrize(
    "text",
    ["shop/web-3", "web-3.shop", "pod/shop/web-3", "po/web-3.shop", "web-3.web.shop.svc.local"],
)
def test_a_pod_by_its_names(text: str) -> None:
    found = NAMES.resolve(text)
    assert (found.kind, found.label, found.addresses) == ("pod", "shop/web-3", (POD_C,))
    assert found.node == "node-b"


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("node-a", (NODE_A, "2001:db8::1")),
        ("node/node-b", (NODE_B,)),
        ("node-b:30080", (NODE_B,)),
        ("node-c", ()),
        (":30080", (NODE_A, "2001:db8::1")),
    ],
)
def test_a_node(text: str, addresses: tuple[str, ...]) -> None:
    found = NAMES.resolve(text)
    assert (found.kind, found.addresses) == ("node", addresses)


@pytest.mark.parametrize(
    ("text", "node"),
    [("10.96.0.10", ""), (POD_A, "node-a"), (NODE_B, "node-b"), ("198.51.100.1", "")],
)
def test_an_address_and_its_node(text: str, node: str) -> None:
    found = NAMES.resolve(f"{text}:80/udp")
    assert (found.kind, found.addresses, found.node) == ("address", (text,), node)
    assert (found.port, found.protocol) == (80, Protocol.UDP)


def test_the_addresses_of_this_node_count_also_without_an_object() -> None:
    lonely = asked(node="lonely")
    assert Names(lonely).resolve("lonely").addresses == ()
    assert Names(lonely).node_at("127.0.0.1") == "lonely"
    interfaces = {"lo": ("127.0.0.1/8",), "eth0": ("198.51.100.7/24", "fe80::1/64")}
    facts = HostFacts("lonely", interfaces)
    plan = compile_all(lonely.snapshot, lonely.config, facts, NFTABLES)
    here = msgspec.structs.replace(lonely, facts=facts, plan=plan)
    assert Names(here).resolve(":30080").addresses == ("198.51.100.7",)


def test_host_names_of_services_that_are_not_served_are_known() -> None:
    assert NAMES.resolve("quiet.shop").addresses == ()
    assert NAMES.resolve("shop/db:5432").label == "shop/db"


@pytest.mark.parametrize(
    ("text", "ports"),
    [("shop/both", [1, 2]), ("shop/web", [80]), ("svc/shop/both:a", [1]), ("svc/shop/both:2", [2])],
)
def test_ports_of_a_service(text: str, ports: list[int]) -> None:
    found = Names(WORLD).resolve(text if text != "shop/both" else "svc/shop/both")
    assert [each.port for each in found.ports] == ports


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("shop/web:81", "Service shop/web has no port 81; it has http 80/TCP"),
        ("shop/web:80/udp", "has no port 80/UDP"),
        ("svc/shop/both:b", "it has a 1/TCP, 2/TCP"),
        ("10.96.0.10:http", "only ports of Services have names"),
        ("shop/both", "is a Service and a pod: write service/shop/both or pod/shop/both"),
        ("outside", "'outside' is a class of clients"),
    ],
)
def test_what_is_unclear_is_refused(text: str, says: str) -> None:
    with pytest.raises(QuestionError, match=says):
        NAMES.resolve(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("shop/wbe", "no Service, pod or node 'shop/wbe' is known; similar: shop/web"),
        ("web.other", "similar: shop/web"),
        ("svc/shop/wbe", "no Service 'svc/shop/wbe' is known"),
        ("node/nodea", "no node 'node/nodea' is known; similar: node-a"),
        ("pod/shop/zzzzzz", "no pod 'pod/shop/zzzzzz' is known .of pods, only those behind"),
        ("a.b.c", "of pods, only those behind"),
    ],
)
def test_what_is_unknown_names_what_is_similar(text: str, says: str) -> None:
    with pytest.raises(UnknownNameError, match=says):
        NAMES.resolve(text)


def test_similar_names_are_printable() -> None:
    world = asked(kube.service("checkout\x1b[m\n"))
    with pytest.raises(UnknownNameError) as error:
        Names(world).resolve("shop/checkout")
    assert "similar: shop/checkout\\x1b[m\\n (" in str(error.value)


@pytest.mark.parametrize(
    ("text", "pod"),
    [
        ("pod/shop/x", ObjectName("shop", "x")),
        ("x.shop", ObjectName("shop", "x")),
        ("x", ObjectName("default", "x")),
        ("svc/shop/x", None),
        ("x.shop.svc", ObjectName("default", "x.shop.svc")),
    ],
)
def test_the_pod_that_an_unknown_name_may_be(text: str, pod: ObjectName | None) -> None:
    with pytest.raises(UnknownNameError) as error:
        NAMES.resolve(text)
    assert error.value.pod == pod


def test_the_running_process_does_not_know_everything() -> None:
    with pytest.raises(UnknownNameError, match="of headless Services, none: --kubeconfig"):
        Names(asked(*DEMO, kind="process")).resolve("shop/quiet")


def test_further_pods_are_known() -> None:
    value: dict[str, Any] = {
        "metadata": {"namespace": "shop", "name": "job-1"},
        "spec": {"nodeName": "node-b"},
        "status": {"podIP": "10.244.2.50", "podIPs": [{"ip": "10.244.2.50"}, {"ip": "fd00::50"}]},
    }
    known = {"metadata": {"namespace": "shop", "name": "web-1"}, "status": {"podIP": POD_A}}
    fresh = {"metadata": {"namespace": "shop", "name": "new"}}
    pods = [known_pod(msgspec.convert(each, Pod)) for each in (value, known, fresh)]
    names = Names(WORLD, pods=pods)
    found = names.resolve("shop/job-1")
    assert (found.addresses, found.node) == (("10.244.2.50", "fd00::50"), "node-b")
    assert names.resolve("shop/web-1").node == "node-a"
    assert names.resolve("shop/new").addresses == ()
    assert [str(pod.name) for pod in names.pods_at(POD_A)] == ["shop/web-1"]


@pytest.mark.parametrize(
    ("word", "client"),
    [
        ("pod", SourceClass.POD),
        ("Node", SourceClass.NODE),
        ("outside", SourceClass.EXTERNAL),
        ("external", SourceClass.EXTERNAL),
    ],
)
def test_classes_of_clients(word: str, client: SourceClass) -> None:
    found = NAMES.client(word)
    assert (found.kind, found.client) == ("class", client)


def test_a_client_is_no_service() -> None:
    assert NAMES.client("shop/web-1").addresses == (POD_A,)
    with pytest.raises(QuestionError, match="is a Service: connections come from"):
        NAMES.client("shop/web")


def test_a_service_that_is_called_like_a_class_can_be_named() -> None:
    names = Names(asked(kube.service("pod", namespace="default")))
    assert names.resolve("pod").label == "default/pod"


def test_endpoints_that_are_no_pods_have_no_names() -> None:
    other = {"addresses": ["10.244.5.5", "bad"], "targetRef": {"kind": "Node", "name": "x"}}
    names = Names(asked(kube.service(), kube.endpoint_slice("web-1", "web", other)))
    assert not names.pods
    assert names.endpoint_nodes == {"10.244.5.5": ""}


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("10.96.0.10:80", "10.96.0.10:80"),
        ("[fd00::1]:80", "[fd00::1]:80"),
        ("node-a:30080", "node-a:30080"),
        ("node-a", "node-a"),
    ],
)
def test_a_target_in_words(text: str, label: str) -> None:
    assert label_of(NAMES.resolve(text)) == label
