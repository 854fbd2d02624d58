"""Every case of the configuration and host suites, where the conformance data is at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import suites_config, suites_host

SUITES = {**suites_config.SUITES, **suites_host.SUITES}
DATA = Path(__file__).parents[2] / "../shared/conformance"


def _cases() -> list[Any]:
    found = []
    for suite in SUITES:
        path = DATA / f"{suite}.json"
        if not path.exists():
            reason = pytest.mark.skip(reason=f"no conformance data {path.name}")
            found.append(pytest.param(suite, {}, id=suite, marks=reason))
            continue
        cases = json.loads(path.read_text())["cases"]
        found += [pytest.param(suite, case, id=case["id"]) for case in cases]
    return found


@pytest.mark.parametrize(("suite", "case"), _cases())
def test_case(suite: str, case: dict[str, Any]) -> None:
    SUITES[suite](case)
