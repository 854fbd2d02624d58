"""Doctor's checks of the way to the endpoints, on fake routes, interfaces and echo requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from steersman.host.echo import EchoRefusedError
from steersman.host.link_state import Link
from steersman.modes.base import Requirements
from steersman.operate.doctor import node_path, pod_views
from steersman.operate.doctor.check import Check
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.result import Verdict
from steersman.operate.places import Pods
from steersman.operate.trace_loss import Hop
from tests.support.builders.doctor import FakeNetwork, context_of, named, results
from tests.support.builders.objects import endpoint, service, slice_

ROUTES, OVERLAYS, MTU = named("route", "overlay", "path-mtu")
THINGS = service(), slice_(endpoint("10.0.0.5"))
POD = Link("pod1", 1400, driver="veth")


def said(check: Check, way: Hop, *links: Link) -> list[tuple[Verdict, str]]:
    network = FakeNetwork(*links, ways={"10.0.0.5": way, "10.96.0.10": Hop(device="eth0")})
    found = results(check, context_of(*THINGS, network=network))
    return [(result.verdict, result.text) for result in found]


def test_endpoints_need_a_route() -> None:
    assert said(ROUTES, Hop(device="pod1"), POD) == [(Verdict.OK, "every endpoint has a route (1)")]
    assert said(ROUTES, Hop(trouble="Network is unreachable")) == [
        (
            Verdict.ERROR,
            "this node has no route to the endpoint 10.0.0.5: Network is unreachable",
        )
    ]
    down = said(ROUTES, Hop(device="pod1"), Link("pod1", up=False))
    assert down == [(Verdict.ERROR, "the interface pod1 to the endpoint 10.0.0.5 is down")]
    empty = FakeNetwork(ways={"10.96.0.10": Hop(device="eth0")})
    assert [each.verdict for each in results(ROUTES, context_of(service(), network=empty))] == [
        Verdict.SKIPPED
    ]


def test_a_policy_rule_of_another_program_is_noted() -> None:
    way = Hop("10.0.0.5", "tun0", rule="50: from all to 10.0.0.0/16 lookup 90")
    assert said(ROUTES, way) == [
        (
            Verdict.NOTICE,
            "packets to the endpoint 10.0.0.5 leave by tun0, as the policy rule "
            "'50: from all to 10.0.0.0/16 lookup 90' says",
        )
    ]


def test_this_node_needs_a_route_to_the_service() -> None:
    (result,) = results(ROUTES, context_of(service(), network=FakeNetwork()))
    assert result.verdict is Verdict.ERROR
    assert result.text.startswith("this node has no route to 10.96.0.10, the Service's own address")


def test_no_route_is_needed_if_sockets_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def of_mode(_: Context) -> Requirements:
        return Requirements(delivery="translated")

    monkeypatch.setattr(node_path, "requirements", of_mode)
    (result,) = results(ROUTES, context_of(service(), network=FakeNetwork()))
    assert result.verdict is Verdict.SKIPPED


def test_overlays_must_fit() -> None:
    wire = Link("eth0", 1500)
    overlay = Link("flannel.1", 1500, driver="vxlan", below="eth0")
    way = Hop(device="flannel.1")
    ((verdict, text),) = said(OVERLAYS, way, overlay, wire)
    assert verdict is Verdict.WARNING
    assert text.endswith("at most 1450 fit")
    fitting = Link("flannel.1", 1450, driver="vxlan", below="eth0")
    assert said(OVERLAYS, way, fitting, wire)[0][0] is Verdict.OK
    alone = Link("flannel.1", 1450, driver="vxlan")
    assert said(OVERLAYS, way, alone, wire)[0][0] is Verdict.UNKNOWN
    assert said(OVERLAYS, Hop(device="pod1"), POD)[0][0] is Verdict.SKIPPED


def answers(
    monkeypatch: pytest.MonkeyPatch,
    largest: int,
    *,
    mtus: Sequence[int] = (1400,),
    refuse: bool = False,
    stalls: bool = False,
) -> list[int]:
    """Let echo requests of up to this many bytes of data be answered.

    Args:
        monkeypatch: replaces what would send.
        largest: bytes of data.
        mtus: of the path as the kernel knows it, one after the other.
        refuse: larger ones cannot be sent.
        stalls: a connection that sends much stalls.

    Returns:
        The sizes that were asked for.
    """
    sizes: list[int] = []
    known = iter([*mtus, *[mtus[-1]] * 9])

    async def take(*_: object) -> bool:
        return not stalls

    async def answer(address: str, size: int, *, netns: Path | None) -> bool:
        assert (address, netns) == ("10.0.0.5", None)
        sizes.append(size)
        if refuse and size > largest:
            raise EchoRefusedError("this machine cannot send them")
        return size <= largest

    monkeypatch.setattr(node_path, "answers_echo", answer)
    monkeypatch.setattr(node_path, "known_mtu", lambda *_: next(known))
    monkeypatch.setattr(node_path, "takes_data", take)
    monkeypatch.setattr(pod_views, "find_pods", lambda: Pods((), 0))
    return sizes


def test_large_packets_must_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = answers(monkeypatch, 1500)
    fine = "packets of 1400 bytes from this node reach 10.0.0.5"
    assert said(MTU, Hop(device="pod1"), POD) == [(Verdict.OK, fine)]
    assert sizes == [56, 1372]
    answers(monkeypatch, 1300)
    ((verdict, text),) = said(MTU, Hop(device="pod1"), POD)
    assert verdict is Verdict.WARNING
    assert text.endswith("they vanish; small ones do")
    answers(monkeypatch, 1300, refuse=True)
    assert said(MTU, Hop(device="pod1"), POD)[0][1].endswith("cannot send them; small ones do")


def test_a_connection_that_stalls_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, 1300, stalls=True)
    ((verdict, text),) = said(MTU, Hop(device="pod1"), Link("pod1", 1200, driver="veth"))
    assert verdict is Verdict.ERROR
    assert text == (
        "packets of 1400 bytes from this node do not reach the endpoint 10.0.0.5: they vanish; the"
        " MTU of pod1 is 1200; small ones do, and connections stall"
    )


def test_a_size_that_a_router_asks_for_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = answers(monkeypatch, 1272, mtus=(1400, 1300))
    assert said(MTU, Hop(device="pod1"), POD)[0][0] is Verdict.OK
    assert sizes == [56, 1372, 1272]


def test_silent_endpoints_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, 0)
    assert said(MTU, Hop(device="pod1"), POD)[0][0] is Verdict.UNKNOWN
    assert said(MTU, Hop(device="lo", local=True), POD)[0][0] is Verdict.SKIPPED
    assert said(MTU, Hop(trouble="no route"), POD)[0][0] is Verdict.SKIPPED
