"""The list of Services: names of a page, and a row for each."""

from __future__ import annotations

from typing import Any

from steersman.compile.planner import compile_all
from steersman.model.findings import Finding
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.names import ObjectName
from steersman.model.plan import Traits
from steersman.model.world import Origin, World
from steersman.operate.services_view import (
    matching_names,
    names_of,
    rows_of,
)
from steersman.source.objects import decode_value
from steersman.source.store import Store
from tests.support.builders import kube


def world(*objects: dict[str, Any]) -> World:
    store = Store("node-a")
    for obj in objects:
        value = decode_value(obj["kind"], obj)
        assert not isinstance(value, Finding)
        store.upsert(value)
    facts = HostFacts("node-a", {"lo": ("127.0.0.1/8",)})
    plan = compile_all(store.snapshot, NodeConfig(), facts, Traits())
    return World(
        Origin("process", ""),
        store.snapshot,
        plan,
        "a mode",
        findings=plan.findings,
        unserved=dict(store.unserved),
    )


TWO_PORTS = [
    {"name": "http", "port": 80, "protocol": "TCP"},
    {"name": "dns", "port": 53, "protocol": "UDP"},
]


def test_ports_of_a_service_are_one_row() -> None:
    ends = ("10.244.0.1", "10.244.0.2")
    ports = [{"name": name, "port": 8080, "protocol": p} for name, p in (("http", "TCP"),)]
    made = world(
        kube.service("web", ports=TWO_PORTS),
        kube.endpoint_slice("web-x", "web", *ends, ports=ports),
        kube.service("db", "None"),
        kube.service("cart", "10.96.0.2"),
        kube.endpoint_slice(
            "cart-x", "cart", {"addresses": ["10.244.0.3"], "conditions": {"ready": False}}
        ),
    )
    web, cart, db = rows_of([made], ["shop/web", "shop/cart", "shop/gone", "shop/db"], 0.0)
    assert web.frontends == ("10.96.0.1:53", "10.96.0.1:80")
    assert web.ports == ("dns/UDP", "http/TCP")
    assert (web.used, web.unused, web.type) == (2, 0, "ClusterIP")
    assert web.problem == "no endpoint: clients are rejected"
    assert (cart.used, cart.unused) == (0, 1)
    assert db.unserved.startswith("headless")
    assert rows_of([], ["shop/web"], 0.0) == ()


def test_names_that_have_each_word_of_a_text() -> None:
    names = [f"shop/web-{n}" for n in range(25)]
    assert matching_names(names, " ") == names
    assert matching_names(names, "web 7") == ["shop/web-7", "shop/web-17"]
    assert matching_names([], "x") == []


def test_names() -> None:
    assert names_of(["shop/web"]) == (ObjectName("shop", "web"),)
