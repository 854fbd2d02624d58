"""The part of a Diff that is for the listeners on loopback."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given

from steersman.model.names import PlanKey
from steersman.model.plan import (
    ServicePlan,
)
from steersman.model.ruleset import Diff, diff, patch
from steersman.modes.nftables.layout import Kind
from steersman.modes.nftables.relay import split_listeners
from steersman.modes.nftables.render import render_localhost
from tests.support.builders import nftables_plans as make
from tests.support.builders.nftables_plans import ON


@given(make.worlds(), make.worlds())
def test_a_diff_is_split_without_loss(
    before: dict[PlanKey, ServicePlan], after: dict[PlanKey, ServicePlan]
) -> None:
    have, want = (
        {b"\x03else": len(world)}
        | {k: v for plan in world.values() for k, v in render_localhost(plan, ON).items()}
        for world in (before, after)
    )
    kernel, listeners = split_listeners(diff(have, want))
    assert all(key[0] == Kind.RELAY for part in parts(listeners) for key in part)
    assert not any(key[0] == Kind.RELAY for part in parts(kernel) for key in part)
    assert patch(patch(have, kernel), listeners) == want


def parts(change: Diff) -> tuple[Mapping[bytes, object], ...]:
    return change.added, change.removed, change.changed
