"""The portals that this process wrote, and what each consists of in the kernel."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Set
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from steersman.model.names import Family
from steersman.modes.userspace.names import Portal
from steersman.proxy.listeners import FrontendKey

T = TypeVar("T", bound=Hashable)


class WrittenPortal(NamedTuple, Generic[T]):
    """A portal as it was written."""

    portal: Portal
    parts: Collection[T]
    """Rules, or objects of nft."""


class Written(Generic[T]):
    """What is in force as far as this process knows, by destination."""

    def __init__(self) -> None:
        self._entries: dict[FrontendKey, WrittenPortal[T]] = {}

    def note(self, key: FrontendKey, portal: Portal, parts: Collection[T]) -> None:
        """A portal was written."""
        self._entries[key] = WrittenPortal(portal, parts)

    def forget(self, keys: Iterable[FrontendKey]) -> None:
        """Portals are gone; those that never were are no matter."""
        for key in keys:
            self._entries.pop(key, None)

    def portal(self, key: FrontendKey) -> Portal | None:
        """The portal at a destination."""
        return self._entries[key].portal if key in self._entries else None

    def parts(self, key: FrontendKey) -> Collection[T]:
        """What the portal at a destination consists of; () where there is none."""
        return self._entries[key].parts if key in self._entries else ()

    def of(self, family: Family) -> list[FrontendKey]:
        """The destinations of a family."""
        return [key for key in self._entries if key.family is family]

    def parts_of(self, keys: Iterable[FrontendKey]) -> Iterator[T]:
        """What several consist of, one after the other."""
        return chain.from_iterable(self.parts(key) for key in keys)

    def compare(self, family: Family, have: Set[T]) -> tuple[dict[FrontendKey, Portal], Set[T]]:
        """Return the portals of which all is there, and what else is; the others are forgotten."""
        found, known = {}, set[T]()
        for key in self.of(family):
            entry = self._entries[key]
            if have >= set(entry.parts):
                found[key] = entry.portal
                known.update(entry.parts)
            else:  # what is left of it is a stray
                del self._entries[key]
        return found, have - known
