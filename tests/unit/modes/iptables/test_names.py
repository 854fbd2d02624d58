from __future__ import annotations

import pytest

from steersman.modes.iptables.names import bucket_chain, is_kubelets, is_ours, is_shared, last_octet
from steersman.netfilter.iptables.names import FILTER, NAT


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
