"""The last syncs, as the process remembers them and pages draw them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Refusal(msgspec.Struct, frozen=True, rename="camel"):
    """An owner of kernel objects that the kernel refused."""

    owner: str
    """A ServicePort such as `shop/cart:http (TCP, IPv4)`, or the node."""
    reason: str
    """The kernel's error."""


class SyncRecord(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One sync."""

    at: float
    """When it began, in seconds since 1970."""
    until: float
    """When it ended."""
    reason: str = "changes"
    """Why it ran: `changes`, `start`, `drift` or `retry`."""
    revision: int = 0
    """Number of the sync."""
    seconds: float = 0.0
    """Duration of all phases."""
    phases: Mapping[str, float] = {}
    """Seconds by phase, in order: plan, render, read, diff, apply."""
    lag: float | None = None
    """Seconds from the cause of a change (trigger time, or its event) until it was in force; None
    if no change of an object was among them."""
    services: int = 0
    """Services that changed, themselves or in their EndpointSlices."""
    names: tuple[str, ...] = ()
    """The first of them, as `namespace/name`."""
    node: bool = False
    """Whether the Node, the configuration or the addresses of the machine changed."""
    planned: int = 0
    """ServicePorts that were planned and rendered again."""
    added: int = 0
    """Kernel objects."""
    changed: int = 0
    removed: int = 0
    compared: bool = False
    """Whether the kernel was read and compared as a whole."""
    refused: int = 0
    """Owners that the kernel refuses, after this sync."""
    refusals: tuple[Refusal, ...] = ()
    """The first of them."""
    drift: str = ""
    """What other programs had changed, in words; "" if nothing."""
    failure: str = ""
    """Why it failed; everything stays owed, and a retry follows. "" if it did not."""


class History(msgspec.Struct, frozen=True, rename="camel"):
    """The answer of `/history`: the last syncs, as far as an hour back."""

    node: str
    """Name of the node."""
    now: float
    """Seconds since 1970, by the clock of the node, as all times here."""
    started: float = 0.0
    """When the process started."""
    since: float = 0.0
    """From when on the history is complete."""
    records: tuple[SyncRecord, ...] = ()
    """Oldest first."""
