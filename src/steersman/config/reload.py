"""Compare a changed configuration with the one in force: which changes apply without a restart.

types.py marks the fields that are read once, at the start (RESTART); all others apply at runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Annotated, NamedTuple, get_origin

import msgspec
from msgspec.structs import FieldInfo

from steersman.config.commandline import assign
from steersman.config.types import RESTART, ProxyConfig


class ReloadPlan(NamedTuple):
    """What a reload does."""

    applied_live: list[str]
    """Paths in the document of changed fields, in its order."""
    needs_restart: list[str]
    """Paths of those that wait for a restart."""
    config: ProxyConfig
    """The configuration in force after it: the new one, but the old values of fields that wait."""


def reload_plan(old: ProxyConfig, new: ProxyConfig) -> ReloadPlan:
    """Return which changes of a configuration take effect at runtime, and which need a restart.

    If the mode changes, everything waits for the restart: defaults and sections depend on it.
    """
    if new.mode != old.mode:
        return ReloadPlan([], ["mode"], old)
    plan = ReloadPlan([], [], new)
    for path, shown, waits in _changed_fields(old, new):
        if waits:
            plan.needs_restart.append(shown)
            plan = plan._replace(config=assign(plan.config, path, attrgetter(path)(old)))
        else:
            plan.applied_live.append(shown)
    return plan


def _changed_fields(
    old: msgspec.Struct, new: msgspec.Struct, *, restart: bool = False
) -> Iterator[tuple[str, str, bool]]:
    """Yield fields that differ: path, path in the document, and whether it waits for a restart."""
    for field in msgspec.structs.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        waits = restart or needs_restart(field)
        if isinstance(before, msgspec.Struct):
            for path, shown, inner in _changed_fields(before, after, restart=waits):
                yield f"{field.name}.{path}", f"{field.encode_name}.{shown}", inner
        elif before != after:
            yield field.name, field.encode_name, waits


def needs_restart(field: FieldInfo) -> bool:
    """Return whether a field is read only at the start."""
    return get_origin(field.type) is Annotated and RESTART in field.type.__metadata__
