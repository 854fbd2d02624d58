"""Doctor's checks of the way to the endpoints, on fake routes, interfaces and echo requests."""

from __future__ import annotations

import pytest

from steersman.host.echo import EchoRefusedError
from steersman.operate.doctor import node_path
from steersman.operate.doctor.check import Check, Verdict
from steersman.operate.doctor.network import Link, Way
from tests.support.builders.doctor import FakeNetwork, context_of, results
from tests.support.builders.objects import endpoint, service, slice_

ROUTES, _, OVERLAYS, MTU = node_path.PATH_CHECKS
THINGS = service(), slice_(endpoint("10.0.0.5"))
POD = Link("pod1", 1400, driver="veth")


def said(check: Check, way: Way, *links: Link) -> list[tuple[Verdict, str]]:
    network = FakeNetwork(*links, ways={"10.0.0.5": way, "10.96.0.10": Way("eth0")})
    found = results(check, context_of(*THINGS, network=network))
    return [(result.verdict, result.text) for result in found]


def test_endpoints_need_a_route() -> None:
    assert said(ROUTES, Way("pod1"), POD) == [(Verdict.OK, "all 1 endpoints have a route")]
    assert said(ROUTES, Way(trouble="Network is unreachable")) == [
        (
            Verdict.ERROR,
            "this node has no route to the endpoint 10.0.0.5: Network is unreachable",
        )
    ]
    down = said(ROUTES, Way("pod1"), Link("pod1", up=False))
    assert down == [(Verdict.ERROR, "the interface pod1 to the endpoint 10.0.0.5 is down")]
    empty = FakeNetwork(ways={"10.96.0.10": Way("eth0")})
    assert [each.verdict for each in results(ROUTES, context_of(service(), network=empty))] == [
        Verdict.SKIPPED
    ]


def test_this_node_needs_a_route_to_the_service() -> None:
    (result,) = results(ROUTES, context_of(service(), network=FakeNetwork()))
    assert result.verdict is Verdict.ERROR
    assert result.text.startswith("this node has no route to 10.96.0.10, the Service's own address")


def test_overlays_must_fit() -> None:
    wire = Link("eth0", 1500)
    overlay = Link("flannel.1", 1500, driver="vxlan", below="eth0")
    way = Way("flannel.1")
    ((verdict, text),) = said(OVERLAYS, way, overlay, wire)
    assert verdict is Verdict.WARNING
    assert text.endswith("at most 1450 fit")
    fitting = Link("flannel.1", 1450, driver="vxlan", below="eth0")
    assert said(OVERLAYS, way, fitting, wire)[0][0] is Verdict.OK
    alone = Link("flannel.1", 1450, driver="vxlan")
    assert said(OVERLAYS, way, alone, wire)[0][0] is Verdict.UNKNOWN
    assert said(OVERLAYS, Way("pod1"), POD)[0][0] is Verdict.SKIPPED


def answers(monkeypatch: pytest.MonkeyPatch, largest: int, *, refuse: bool = False) -> list[int]:
    """Let echo requests of up to this many bytes of data be answered."""
    sizes: list[int] = []

    async def answer(address: str, size: int) -> bool:
        assert address == "10.0.0.5"
        sizes.append(size)
        if refuse and size > largest:
            raise EchoRefusedError("this machine cannot send them")
        return size <= largest

    monkeypatch.setattr(node_path, "answers_echo", answer)
    return sizes


def test_large_packets_must_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = answers(monkeypatch, 1500)
    assert said(MTU, Way("pod1"), POD) == [(Verdict.OK, "packets of 1400 bytes reach 10.0.0.5")]
    assert sizes == [56, 1372]
    answers(monkeypatch, 1300)
    ((verdict, text),) = said(MTU, Way("pod1"), POD)
    assert verdict is Verdict.WARNING
    assert text.endswith("they vanish; small ones do")
    answers(monkeypatch, 1300, refuse=True)
    assert said(MTU, Way("pod1"), POD)[0][1].endswith("cannot send them; small ones do")
    # The MTU of the route counts, not that of the interface.
    sizes = answers(monkeypatch, 1300)
    assert said(MTU, Way("pod1", mtu=1300), POD)[0][0] is Verdict.OK
    assert sizes[-1] == 1272


def test_silent_endpoints_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, 0)
    assert said(MTU, Way("pod1"), POD)[0][0] is Verdict.UNKNOWN
    assert said(MTU, Way("lo", local=True), POD)[0][0] is Verdict.SKIPPED
    assert said(MTU, Way("gone"), POD)[0][0] is Verdict.SKIPPED
