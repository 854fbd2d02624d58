"""What only some modes can do, as objects: the attributes of `Mode` that may be None.

As methods of a Mode (base.py), they are called through the mode's worker, and may raise ApplyError,
BusyError or OSError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Generic, Protocol, TypeVar

from steersman.model.conntrack import Stale
from steersman.model.ruleset import Ruleset

T = TypeVar("T")


class ConnectionTable(ABC, Generic[T]):
    """Connections that a mode keeps by itself; T is what `find_stale` finds, false if nothing."""

    @abstractmethod
    def find_stale(self, stale: Stale) -> Generator[None, None, T | None]:
        """Find connections that are stale, in steps."""

    @abstractmethod
    def delete_stale(self, found: T, stale: Stale) -> int:
        """Cut those of them that are stale still; return their number."""


class Carrier(ABC):
    """Connections that need the mode's kernel objects to continue."""

    @abstractmethod
    def connections(self) -> int:
        """Count them.

        Raises:
            BusyError: the number is not known now.
        """

    @abstractmethod
    def without_new_connections(self, have: Ruleset) -> Ruleset:
        """Return the part of a Ruleset that carries them, changed to take no new ones. Pure."""

    def hold_ports(self) -> None:  # noqa: B027 - a default
        """Keep netfilter from choosing the ports of those that this mode masquerades.

        Call it when the mode takes no new connections any more; it lasts until it is closed.
        """


class NatHooks(Protocol):
    """Keeps connections alive that netfilter translates for another mode."""

    def create(self) -> None:
        """Do so from now on, while the rules of that mode are removed."""
