"""The kernel objects of a mode in the words of its tool, each with its purpose (`steersman dump`).

Only reads, also beside the process that serves. Nothing here compares: operate/dump.py does.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Ruleset


class Words(NamedTuple):
    """One line of a kernel object."""

    place: str
    """Where it is: `table nat, chain KUBE-SERVICES`."""
    text: str
    """The line as the tool prints it."""
    purpose: str = ""
    """What it does for traffic, in a few words."""


def purpose_of(purposes: Iterable[tuple[re.Pattern[str], str]], line: str) -> str:
    """Return the purpose whose pattern is found first, its groups filled in; "" if none is."""
    for pattern, purpose in purposes:
        if found := pattern.search(line):
            return purpose.format(line, *found.groups())
    return ""


class KernelWords:
    """Describes the kernel objects of a mode; this class does so for modes without a tool."""

    def __init__(self, read: Callable[[], Awaitable[Ruleset]]) -> None:
        """Describe what `read` returns."""
        self._read = read

    async def read(self) -> Ruleset:
        """Return all objects of the mode, and change nothing.

        Raises:
            BusyError: they cannot be read now.
            FileNotFoundError: the mode does not run here.
            PermissionError: this process may not look.
        """
        return await self._read()

    async def leftovers(self) -> Ruleset:
        """Return the objects that stay if the process ends: sockets do not. Raises as `read`."""
        return await self.read()

    def wanted(self, rendered: Ruleset, kernel: Ruleset) -> Ruleset:
        """Return rendered objects as `read` returns them if they are in force.

        Most modes read what they render. In others an object has a part that the process chose when
        it wrote it, such as a port; it is taken from the kernel.
        """
        del kernel
        return rendered

    def kind(self, key: Any) -> str:
        """Return the kind of an object in the plural, for counts."""
        del key
        return "objects"

    def of_services(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> Iterator[Any]:
        """Yield the keys of objects that belong to these plans by name or destination.

        They are all that can be there beside the wanted ones: left over, or made by others.
        """
        del kernel, plans
        yield from ()

    def is_on_path(self, key: Any, plans: Collection[ServicePlan]) -> bool:
        """Whether an object of the node is one that the traffic of these plans passes."""
        del key, plans
        return False

    def is_relevant(self, line: Words, plans: Collection[ServicePlan]) -> bool:
        """Whether a line that is as planned tells anything about the traffic of these plans."""
        del line, plans
        return True

    def rank(self, key: Any) -> int:
        """Return the place of an object in a list: packets pass those of lower rank first."""
        del key
        return 0

    def words(self, key: Any, value: Any) -> Iterable[Words]:
        """Print one object."""
        # As `format_diff` prints an object, so that both read alike.
        parts = key if isinstance(key, tuple) else (key,)
        place = " ".join(str(part) for part in parts if part != "")
        return [Words(place, line) for line in str(value).splitlines() or [""]]

    async def beyond(
        self, lines: Collection[Words], plans: Collection[ServicePlan], settings: NodeSettings
    ) -> list[Words]:
        """Return lines that those of a Service lead to and no plan describes. Raises as `read`."""
        del lines, plans, settings
        return []
