from __future__ import annotations

import json
from pathlib import Path

import pytest

from steersman.modes.iptables.names import bucket_chain, is_kubelets, is_ours, is_shared, last_octet
from steersman.netfilter.names import FILTER, NAT, chain_hash, printed_name
from steersman.netfilter.rule_text import probability
from tests.support.builders.plans import key

CONFORMANCE = Path(__file__).parents[4] / "../shared/conformance/chain_names.json"


def test_the_hashes_that_the_specification_gives() -> None:
    assert chain_hash("ns1/svc1:p80tcp") == "XPGD46QRK7WJZT7O"
    assert chain_hash("ns1/svc1:p80tcp10.180.0.1:80") == "SXIVWICOYRO3J4NJ"


def test_conformance_probabilities() -> None:
    if not CONFORMANCE.exists():
        pytest.skip("no conformance data beside the project")
    cases = json.loads(CONFORMANCE.read_text())["cases"]
    rows = [case for case in cases if case["sourceTest"] == "TestComputeProbability"]
    assert rows
    for row in rows:  # the kernel keeps 31 bits of it
        assert abs(float(probability(int(row["key"]))) - float(row["case"])) < 2**-31


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("ns/svc:http", "ns/svc:http"),
        ("ns/svc", "ns/svc"),
        ('ns/s"\n-A INPUT', "ns/s%22%0A-A%20INPUT"),
        ("ns/ü", "ns/%C3%BC"),
        (f"{'n' * 63}/{'s' * 63}:{'p' * 63}",) * 2,
        (f"ns/{'s' * 200}", f"ns/{'s' * 171}/73FPES2O4GPNQRHR"),
    ],
)
def test_a_name_cannot_leave_its_comment(name: str, printed: str) -> None:
    assert printed_name(key(name).name) == printed


@pytest.mark.parametrize(
    ("address", "octet"),
    [("10.96.1.7", 7), ("10.96.0.255", 255), ("fd00::1:203", 3), ("fd00::", 0), ("::ff", 255)],
)
def test_last_octet(address: str, octet: int) -> None:
    assert last_octet(address) == octet


def test_upstream_collects_the_buckets_of_a_split_list() -> None:
    assert bucket_chain(7) == "KUBE-SVC-BYADDR-07"
    assert bucket_chain(7).startswith("KUBE-SVC-")


@pytest.mark.parametrize(
    ("table", "chain", "ours", "shared"),
    [
        (NAT, "KUBE-SERVICES", True, True),
        (FILTER, "KUBE-SERVICES", True, True),
        (NAT, "KUBE-SVC-BYADDR-07", True, True),
        (NAT, "KUBE-SVC-BYADDR-0", True, False),
        (NAT, "KUBE-SVC-XPGD46QRK7WJZT7O", True, False),
        (FILTER, "KUBE-SVC-XPGD46QRK7WJZT7O", False, False),
        (NAT, "KUBE-MARK-MASQ", True, False),
        (NAT, "KUBE-MARK-DROP", False, False),
        (FILTER, "KUBE-FIREWALL", False, False),
        ("mangle", "KUBE-KUBELET-CANARY", False, False),
        ("mangle", "KUBE-PROXY-CANARY", True, False),
    ],
)
def test_whose_a_chain_is(table: str, chain: str, ours: bool, shared: bool) -> None:
    assert is_ours(table, chain) is ours
    assert is_shared(table, chain) is shared


def test_what_is_shared_with_kubelet() -> None:
    assert is_kubelets((4, "filter", "KUBE-FIREWALL", ""))
    assert is_kubelets((4, "filter", "INPUT", "kubelet"))
    assert not is_kubelets((4, "filter", "INPUT", "jumps"))
