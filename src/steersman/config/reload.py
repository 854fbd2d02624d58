"""Compare a changed configuration with the one in force: which changes apply without a restart.

types.py marks the fields that are read once, at the start (RESTART); all others apply at runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple, TypeVar, get_origin

import msgspec
from msgspec.structs import FieldInfo

from steersman.config.types import RESTART, ProxyConfig

_Section = TypeVar("_Section", bound=msgspec.Struct)


class ReloadPlan(NamedTuple):
    """The fields that changed, by their paths in the document, in its order."""

    applied_live: list[str]
    needs_restart: list[str]


def reload_plan(old: ProxyConfig, new: ProxyConfig) -> ReloadPlan:
    """Return which changes of a configuration take effect at runtime, and which need a restart.

    If the mode changes, everything waits for the restart: defaults and sections depend on it.
    """
    if new.mode != old.mode:
        return ReloadPlan([], ["mode"])
    plan = ReloadPlan([], [])
    for path, restart in _changed_fields(old, new):
        (plan.needs_restart if restart else plan.applied_live).append(path)
    return plan


def applied(old: ProxyConfig, new: ProxyConfig) -> ProxyConfig:
    """Return the configuration in force after a reload: `new`, but restart-only fields of `old`."""
    return old if new.mode != old.mode else _with_old_fields(old, new)


def _with_old_fields(old: _Section, new: _Section) -> _Section:
    """Return a section of `new` with the restart-only fields of `old`, at any depth."""
    kept = {}
    for field in msgspec.structs.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if needs_restart(field):
            kept[field.name] = before
        elif isinstance(before, msgspec.Struct):
            kept[field.name] = _with_old_fields(before, after)
    return msgspec.structs.replace(new, **kept)


def _changed_fields(
    old: msgspec.Struct, new: msgspec.Struct, prefix: str = "", *, restart: bool = False
) -> Iterator[tuple[str, bool]]:
    """Yield the paths of fields that differ, and whether the field or its section is marked."""
    for field in msgspec.structs.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        path, marked = prefix + field.encode_name, restart or needs_restart(field)
        if isinstance(before, msgspec.Struct):
            yield from _changed_fields(before, after, f"{path}.", restart=marked)
        elif before != after:
            yield path, marked


def needs_restart(field: FieldInfo) -> bool:
    """Return whether a field is read only at the start."""
    return get_origin(field.type) is Annotated and RESTART in field.type.__metadata__
