"""Hashes and printed names, as upstream has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steersman.netfilter.iptables.names import chain_hash, printed_name
from steersman.netfilter.iptables.saved import probability
from tests.support.builders.plans import key

CONFORMANCE = Path(__file__).parents[3] / "../shared/conformance/chain_names.json"


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
