"""Every case of the conformance suites that are about pure values."""

from __future__ import annotations

import pytest

from tests.conformance.suites_pure import SUITES
from tests.conformance.world import Case, load

FILES = {
    "topology_categorize": "topology_categorize",
    "service_tracker": "service_tracker",
    "endpoints_tracker": "endpoints_tracker",
    "local_detectors": "local_detectors",
    "packetflow_iptables": "packetflow",
    "packetflow_nftables": "packetflow",
    "packetflow_common": "packetflow",
}
CASES = [
    pytest.param(suite, case, id=f"{name}:{case['id']}")
    for name, suite in FILES.items()
    for case in load(name)
]


@pytest.mark.skipif(not CASES, reason="the conformance data is not beside the project")
@pytest.mark.parametrize(("suite", "case"), CASES)
def test_case(suite: str, case: Case) -> None:
    SUITES[suite](case)
