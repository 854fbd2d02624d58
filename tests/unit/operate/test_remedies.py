from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from steersman.model import codes
from steersman.model.findings import Finding
from steersman.model.node_state import Condition
from steersman.operate.remedies import about, code_of_condition

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("condition", "name"),
    [
        (Condition("Synced", "False", "Waiting", "waiting for Services"), "waiting"),
        (Condition("Synced", "False", "SyncFailed", "timed out"), "sync-failed"),
        (Condition("KernelMatches", "Unknown", "NotSynced", "no sync"), "sync-failed"),
        (
            Condition("SourceConnected", "False", "NotConnected", "x is not reached"),
            "not-connected",
        ),
        (Condition("Healthy", "False", "Late", "a change waits"), "not-healthy"),
        (Condition("Novel", "False", "X", "y"), "other-condition"),
    ],
)
def test_conditions_have_a_remedy(condition: Condition, name: str) -> None:
    assert codes.remedy_of(code_of_condition(condition)).name == name


def test_codes_and_names_are_unique() -> None:
    assert all(re.fullmatch(r"SM[1-9][0-9]{3}", each.code) for each in codes.REMEDIES)
    assert len({each.code for each in codes.REMEDIES}) == len(codes.REMEDIES)
    assert len({each.name for each in codes.REMEDIES}) == len(codes.REMEDIES)
    constants = {v for k, v in vars(codes).items() if k.isupper() and isinstance(v, str)}
    assert constants == {each.code for each in codes.REMEDIES}
    assert codes.remedy_of("SM0000").name == codes.remedy_of("").name == "unknown"


def calls() -> Iterator[tuple[str, str]]:
    """Every call in the program that makes a Finding: where, and its arguments."""
    for path in sorted((ROOT / "src/steersman").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                yield f"{path.name}:{node.lineno}", ast.unparse(node)


def test_every_finding_has_a_code() -> None:
    found = dict(calls())
    assert len(found) > 20
    kept = "Finding(printable("  # a copy of a Finding
    without = [
        f"{where} {text}"
        for where, text in found.items()
        if not (re.search(r"\bcodes\.[A-Z_]+|code\)$", text) or text.startswith(kept))
    ]
    assert not without


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
    rows = re.findall(r"^\| `([a-z-]+)` \| `(SM\d+)` \| .* \| (.*) \|$", text, re.MULTILINE)
    assert rows == [(each.name, each.code, each.remedy) for each in codes.REMEDIES]
    for each in codes.REMEDIES:
        page, _, section = each.docs.partition(", section ")
        file = ROOT / page if page == "CONTRIBUTING.md" else ROOT / "docs" / page
        assert file.is_file(), each.docs
        assert not section or f"\n## {section}. " in file.read_text()
