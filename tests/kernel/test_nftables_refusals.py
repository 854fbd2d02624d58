"""What the nftables mode refuses when others translate, and chains that come when needed."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from steersman.model.plan import Frontend, FrontendKind
from tests.support.builders import nftables_plans as make
from tests.support.builders.plans import DROPPED, MASQUERADED, REJECTED, Actions
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.nft_cluster import ENDS, NODE, OUTSIDE, Cluster

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    pods = tuple(Pod(address, local=True) for address in ENDS)
    with Lab(Layout({"eth0": (f"{NODE}/24",)}, (OUTSIDE,), pods)) as lab:
        for address in ENDS:
            lab.serve(address, 8080, "TCP")
        yield lab


@pytest.fixture
def cluster(lab: Lab) -> Cluster:
    cluster = Cluster(lab)
    cluster.program()
    return cluster


@pytest.fixture
def foreign(lab: Lab) -> Iterator[None]:
    """Somebody else's DNAT, before ours, to a clusterIP and to a node port."""
    for number, target in enumerate(("10.96.0.10:80", f"{NODE}:30080")):
        rule = f"ip daddr 203.0.113.7{number} tcp dport 80 dnat to {target}"
        for hook in ("prerouting", "output"):
            chain = f"ip sm-foreign {hook}"
            where = f"{{ type nat hook {hook} priority -150 ; }}"
            lab.run("nft", f"add table ip sm-foreign; add chain {chain} {where}")
            lab.run("nft", f"add rule {chain} {rule}")
    yield
    lab.run("nft", "delete table ip sm-foreign")


REFUSALS = [(REJECTED, "refused", 3.0), (DROPPED, "timeout", 0.3)]


@pytest.mark.parametrize("address", ["203.0.113.70", "203.0.113.71"])
@pytest.mark.parametrize("source", [OUTSIDE, ENDS[0], NODE])
@pytest.mark.parametrize(("actions", "kind", "patience"), REFUSALS)
def test_packets_translated_by_others_are_rejected_without_endpoints(
    cluster: Cluster,
    foreign: None,
    address: str,
    source: str,
    actions: Actions,
    kind: str,
    patience: float,
) -> None:
    node_port = Frontend(FrontendKind.NODE_PORT, "", 30080, *actions)
    plan = make.port((), frontends=[make.cluster_ip(actions), node_port])
    cluster.program(plan)
    assert cluster.lab.probe(source, address, 80, timeout=patience).kind == kind


@pytest.mark.parametrize("source", [OUTSIDE, ENDS[0], NODE])
def test_packets_translated_to_a_cluster_ip_are_not_translated_again(
    cluster: Cluster, foreign: None, source: str
) -> None:
    cluster.program(make.port())
    assert cluster.lab.probe(source, "203.0.113.70", 80).kind == "refused"
    assert cluster.lab.probe(source, "10.96.0.10", 80).kind == "answered"


def test_source_ranges_hold_in_a_table_that_had_none(cluster: Cluster) -> None:
    vip = Frontend(FrontendKind.LOAD_BALANCER_IP, "198.51.100.1", 80, *MASQUERADED)
    cluster.program(make.port(frontends=[vip]))
    assert "pre-dnat" not in cluster.lab.run("nft", "list", "chains", "ip")
    assert cluster.lab.probe(OUTSIDE, vip.address, 80).kind == "answered"
    guarded = msgspec.structs.replace(vip, source_ranges=("10.244.0.0/16",))
    cluster.program(make.port(frontends=[guarded]))
    assert cluster.lab.probe(OUTSIDE, vip.address, 80, timeout=0.3).kind == "timeout"
    assert cluster.lab.probe(NODE, vip.address, 80, timeout=0.3).kind == "timeout"
    assert cluster.lab.probe(ENDS[0], vip.address, 80).kind == "answered"
