"""How many rules there are, by table and family: for metrics (behaviour 8.5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from steersman.model.names import Family
from steersman.model.ruleset import Diff
from steersman.modes.iptables.names import RuleKey

Rules = Counter[tuple[str, Family]]


def count_rules(objects: Iterable[tuple[RuleKey, str]]) -> Rules:
    """Count the rules of a Ruleset's items."""
    counts: Rules = Counter()
    for key, text in objects:
        counts[key[1], Family(key[0])] += text.count("\n-A ") + text.startswith("-A ")
    return counts


def count_written(change: Diff) -> tuple[Rules, Rules]:
    """Return how many rules a Diff writes, and by how many it changes the totals."""
    new = {key: value for key, (_, value) in change.changed.items()}
    old = {key: value for key, (value, _) in change.changed.items()}
    written = count_rules(change.added.items()) + count_rules(new.items())
    gone = count_rules(change.removed.items()) + count_rules(old.items())
    growth = Counter(written)
    growth.subtract(gone)
    return written, growth
