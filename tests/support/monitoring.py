"""Every metric that the program declares, and every query of the shipped rules and boards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from scripts import monitoring
from scripts.monitoring import FOLDER


def rules() -> list[dict[str, Any]]:
    text = yaml.safe_load((FOLDER / "rules.yaml").read_text())
    return [rule for group in text["groups"] for rule in group["rules"]]


def queries() -> Iterator[str]:
    """Every expression of rules and boards."""
    yield from (rule["expr"] for rule in rules())
    for board in yaml.safe_load((FOLDER / "boards.yaml").read_text()).values():
        yield from monitoring.queries(board)


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:steersman|kubeproxy|kubernetes|process)_\w+", query))
