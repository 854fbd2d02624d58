"""Doctor's checks of the pods of this node: what cuts an endpoint off, as read in its namespace."""

from __future__ import annotations

from typing import Any

import pytest

from steersman.host.link_state import Filter, Link, LinkState, Neighbour
from steersman.host.listening import ListeningSocket
from steersman.model.names import Protocol
from steersman.operate.doctor import pod_views
from steersman.operate.doctor.pod_views import PodView, Views
from steersman.operate.doctor.result import CheckResult, Verdict
from steersman.operate.trace_loss import Hop
from tests.support.builders.doctor import FakeNetwork, context_of, named, only, results
from tests.support.builders.objects import CONFIG, endpoint, service, slice_

PODS, DEVICES = named("pod-networks", "devices")
VIP, POD, MAC = "10.96.0.10", "10.0.0.5", "02:00:00:00:00:05"
NODE = "192.168.0.2"


def pod(
    address: str = POD,
    device: str = "pod0",
    *,
    mac: str = MAC,
    up: bool = True,
    way: Hop | None = None,
    listens: str = "0.0.0.0:8080",
    more: str = "",
    neighbours: tuple[Neighbour, ...] = (),
    tables: tuple[str, ...] = (),
) -> PodView:
    at, _, port = listens.rpartition(":")
    listening = {ListeningSocket(Protocol.TCP, at, int(port))} if port else set()
    state = LinkState({"eth0": Link("eth0", up=up, mac=mac)}, neighbours, ())
    ways = {VIP: way or Hop(device="eth0", gateway="169.254.1.1")}
    addresses = frozenset({address, more} - {""})
    return PodView(device, addresses, state, frozenset(listening), ways, tables)


def node(
    *,
    up: bool = True,
    state: str = "forwarding",
    xdp: bool = False,
    master: str = "cni0",
    isolated: bool = False,
    floods: bool = True,
    **more: Any,
) -> LinkState:
    ports = {
        "pod0": Link(
            "pod0",
            up=up,
            master=master,
            xdp=xdp,
            state=state,
            isolated=isolated,
            learns=floods,
            floods=floods,
        ),
        "pod1": Link("pod1", master="cni0", state="forwarding", isolated=isolated),
    }
    return LinkState(ports, more.get("neighbours", ()), more.get("filters", ()))


def check(
    monkeypatch: pytest.MonkeyPatch,
    *pods: PodView,
    way: Hop | None = None,
    unseen: int = 0,
    here: LinkState | None = None,
    which: Any = PODS,
) -> tuple[CheckResult, ...]:
    monkeypatch.setattr(pod_views, "_SETTLED", 0)
    monkeypatch.setattr(pod_views, "_look", lambda _: Views(pods, unseen, here or node()))
    things = service(), slice_(endpoint(POD, CONFIG.node_name))
    network = FakeNetwork(ways={POD: way or Hop(device="cni0")})
    return results(which, context_of(*things, network=network))


def test_a_connected_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = check(monkeypatch, pod(), pod("10.0.0.6", "pod1"))
    assert result.verdict is Verdict.OK


def test_a_namespace_that_is_no_pod_needs_no_way_to_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = pod("192.0.2.9", "tap0", way=Hop(trouble="gone"))
    (result,) = check(monkeypatch, pod(), machine)
    assert result.verdict is Verdict.OK


def test_an_endpoint_elsewhere_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_views, "_look", pytest.fail)
    things = service(), slice_(endpoint(POD, "elsewhere"))
    assert only(PODS, context_of(*things)).verdict is Verdict.SKIPPED


def test_a_next_hop_to_an_endpoint_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Hop(device="cni0", gateway=NEXT.address, rule="54: from all lookup 90")
    things, network = (service(), slice_(endpoint(POD, "elsewhere"))), FakeNetwork(ways={POD: way})
    monkeypatch.setattr(pod_views, "_SETTLED", 0)
    for entries, verdict in (((NEXT,), Verdict.NOTICE), ((), Verdict.SKIPPED)):
        views = Views((), 0, node(neighbours=entries))
        monkeypatch.setattr(pod_views, "_look", lambda _, views=views: views)
        result = only(PODS, context_of(*things, network=network))
        assert result.verdict is verdict
        assert ("by the policy rule '54: from all lookup 90'" in result.text) is bool(entries)


SILENT = Neighbour("cni0", POD, "", "FAILED")
OTHER = Neighbour("cni0", POD, "02:00:00:00:00:99", "PERMANENT")
STATIC = Neighbour("pod1", "", MAC, "NOARP")
NEXT = Neighbour("cni0", "192.0.2.7", "", "FAILED")
GATEWAY = Neighbour("eth0", "169.254.1.1", "", "FAILED")


@pytest.mark.parametrize(
    ("pods", "more", "words"),
    [
        ((pod(), pod(device="pod1")), {}, "two pods of this node have the address 10.0.0.5"),
        ((pod("10.0.0.6"),), {}, "no pod of this node has the address 10.0.0.5"),
        ((pod(),), {"way": Hop(device="lo", local=True)}, "is an address of this node, too"),
        ((pod(more=VIP),), {}, f"has the Service's own address {VIP}"),
        ((pod(up=False),), {}, "the device eth0 in the pod 10.0.0.5 is down"),
        ((pod(),), {"here": node(up=False)}, "the device pod0 of the pod 10.0.0.5 is down"),
        ((pod(),), {"here": node(state="blocking")}, "the port pod0 of the bridge"),
        ((pod(),), {"here": node(neighbours=(SILENT,))}, "does not answer when this node asks"),
        ((pod(),), {"here": node(neighbours=(OTHER,))}, "has the link-layer address 02:00:00:00"),
        ((pod(),), {"here": node(neighbours=(STATIC,))}, "a static entry of the bridge"),
        (
            (pod(),),
            {"here": node(neighbours=(SILENT,), master=""), "way": Hop(device="pod0")},
            "its device pod0 does not belong to cni0",
        ),
        ((pod(),), {"here": node(isolated=True)}, "the ports pod0, pod1 of a bridge are isolated"),
        ((pod(),), {"here": node(floods=False)}, "where flooding and learning are off"),
        ((pod(more=NODE),), {}, f"has {NODE}, an address of this node"),
        (
            (pod(),),
            {"here": node(neighbours=(NEXT,)), "way": Hop(device="cni0", gateway=NEXT.address)},
            "the next hop 192.0.2.7 on cni0 does not answer ARP or neighbour discovery (FAILED)",
        ),
        ((pod(),), {"way": Hop(device="eth1")}, "leave by eth1, not by pod0"),
        ((pod(way=Hop(trouble="gone")),), {}, f"no route to the Service's address {VIP}: gone"),
        ((pod(neighbours=(GATEWAY,)),), {}, "the gateway 169.254.1.1 of the pod 10.0.0.5 does"),
        ((pod(listens="127.0.0.1:8080"),), {}, "it listens only on 127.0.0.1"),
        ((pod(listens="0.0.0.0:9090"),), {}, "it listens on 9090"),
        ((pod(listens=""),), {}, "it listens on no port"),
        ((pod(tables=("table ip mesh",)),), {}, "may drop or redirect packets: table ip mesh"),
    ],
)
def test_what_cuts_a_pod_off(
    pods: tuple[PodView, ...], more: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (result,) = check(monkeypatch, *pods, **more)
    assert words in result.text
    assert result.suspect
    assert result.evidence[0].startswith("shown by: ")
    assert result.verdict in (Verdict.WARNING, Verdict.NOTICE)


def test_pods_that_cannot_be_seen_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = check(monkeypatch, unseen=3)
    assert result.verdict is Verdict.UNKNOWN
    assert "3 pods of this node cannot be seen" in result.text


def test_a_bridge_that_knows_a_pod_need_not_flood_frames_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = Neighbour("pod0", "", MAC, "REACHABLE")
    (result,) = check(monkeypatch, pod(), here=node(floods=False, neighbours=(known,)))
    assert result.verdict is Verdict.OK


def test_programs_at_devices_are_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    (fine,) = check(monkeypatch, here=node(filters=(Filter("pod0", "noqueue"),)), which=DEVICES)
    assert fine.verdict is Verdict.OK
    names = [f"pod{number}" for number in range(5)]
    programs = tuple(Filter(name, "bpf", "x", "ingress") for name in names)
    here = node(xdp=True, filters=(Filter("pod0", "tbf"), *programs))
    queue, program, xdp = check(monkeypatch, here=here, which=DEVICES)
    assert {queue.verdict, program.verdict, xdp.verdict} == {Verdict.NOTICE}
    assert queue.text == "the queueing discipline tbf at pod0 may delay or drop packets"
    assert "(bpf x) sees packets that come in by pod0, pod1, pod2 and 2 more" in program.text
    assert xdp.text == "a program of XDP sees packets that come in by pod0 first"


def test_a_queue_at_a_silent_pod_is_named_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here = node(neighbours=(SILENT,), filters=(Filter("pod0", "tbf"), Filter("pod1", "tbf")))
    (result,) = check(monkeypatch, pod(), here=here)
    assert result.text.endswith("; the queueing discipline tbf at pod0 may delay or drop packets")
