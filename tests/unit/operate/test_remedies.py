from __future__ import annotations

import re
from pathlib import Path

import pytest

from steersman.model.findings import Finding
from steersman.model.node_state import Condition
from steersman.operate.remedies import (
    REMEDIES,
    about,
    remedy_for_condition,
    remedy_for_finding,
    remedy_named,
)

ROOT = Path(__file__).parents[3]
CASES = {
    "defect": Finding("Service a/b", "", "cannot be planned (X): a defect, please report it"),
    "refused-by-the-kernel": Finding(
        "Service a/b", "port a/b (TCP, IPv4)", "m: the kernel refuses"
    ),
    "destination-held": Finding("Service a/b", "spec.clusterIP", "x belongs to the older Service"),
    "address-of-the-node": Finding(
        "Service a/b", "spec.externalIPs", "x is an address of this node"
    ),
    "limit": Finding("Findings", "", "12 more Findings are not listed"),
    "sctp": Finding("Service a/b", "spec.ports", "SCTP cannot be forwarded in this mode"),
    "health-check-port": Finding("Service a/b", "spec.healthCheckNodePort", "30000 is also"),
    "source-ranges": Finding("Service a/b", "spec.loadBalancerSourceRanges[0]", "x is not a CIDR"),
    "annotation": Finding(
        "Service a/b", "metadata.annotations[steersman/metrics]", "'x' is unknown"
    ),
    "cluster-ip": Finding("Service a/b", "spec.clusterIPs[0]", "'x' is not an IP address"),
    "slice-of-no-service": Finding("EndpointSlice a/b", "metadata.labels[x]", "is missing"),
    "endpoint": Finding("EndpointSlice a/b", "endpoints[0].addresses[0]", "'x' is not an IPv4"),
    "endpoints-object": Finding("Endpoints a/b", "", "Endpoints are not read"),
    "service-field": Finding("Service a/b", "spec.type", "'Foo' is unknown and was ignored"),
    "rewritten-rules": Finding("the node", "rules", "another program rewrites our rules"),
    "fallback-mode": Finding("the node", "mode", "mode m cannot run here; n serves instead."),
    "mode-of-a-switch": Finding("the node", "mode", "m serves since a switch; a restart brings n"),
    "leftovers": Finding("leftovers", "", "m: the kernel refuses its rules (busy)"),
    "unknown-node": Finding("Node worker-1", "", "is not among the Nodes"),
    "configuration": Finding("KubeProxyConfiguration", "mode", "Invalid value"),
    "file": Finding("/etc/x y.yaml", "", "cannot be read"),
}


@pytest.mark.parametrize("name", CASES)
def test_findings_have_a_remedy(name: str) -> None:
    assert remedy_for_finding(CASES[name]).name == name


@pytest.mark.parametrize(
    ("condition", "name"),
    [
        (Condition("Synced", "False", "Waiting", "waiting for Services"), "waiting"),
        (Condition("Synced", "False", "SyncFailed", "timed out"), "sync-failed"),
        (
            Condition("SourceConnected", "False", "NotConnected", "x is not reached"),
            "not-connected",
        ),
        (Condition("Healthy", "False", "Late", "a change waits"), "not-healthy"),
        (Condition("Novel", "False", "X", "y"), "other-condition"),
    ],
)
def test_conditions_have_a_remedy(condition: Condition, name: str) -> None:
    assert remedy_for_condition(condition).name == name


def test_every_remedy_is_reached() -> None:
    others = {"waiting", "sync-failed", "not-connected", "not-healthy", "other-condition"}
    others |= {"unreachable", "disagreement", "drift"}
    assert CASES.keys() | others == {each.name for each in REMEDIES}
    assert {remedy_named(name).name for name in others} == others


@pytest.mark.parametrize("text", ["Service in /etc/x.yaml", "/etc/x.yaml", "Service a/b c/d"])
def test_other_texts_are_files(text: str) -> None:
    assert remedy_for_finding(Finding(text, "", "x")).name == "file"


def test_only_names_of_objects_become_commands() -> None:
    good = about(Finding("EndpointSlice shop/cart-x1.y", "", ""))
    assert good
    assert good.command == "kubectl -n shop get endpointslice cart-x1.y -o yaml"
    assert good.service == ""
    bad = about(Finding("Service shop/$(reboot)", "", ""))
    assert bad
    assert (bad.command, bad.service) == ("", "shop/$(reboot)")
    assert about(Finding("the node", "", "")) is None


def test_the_documentation_has_every_row_and_page() -> None:
    text = (ROOT / "docs/problems.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| .* \| (.*) \|$", text, re.MULTILINE)
    assert dict(rows) == {each.name: each.remedy for each in REMEDIES}
    for each in REMEDIES:
        page, _, section = each.docs.partition(", section ")
        file = ROOT / page if page == "CONTRIBUTING.md" else ROOT / "docs" / page
        assert file.is_file(), each.docs
        assert not section or f"\n## {section}. " in file.read_text()
