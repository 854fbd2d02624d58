"""What commands say of the kernel objects of a mode, and which of them concern a Service.

All of it follows from the kinds of objects (kinds.py). Nothing here compares: operate/dump.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

from steersman.host.worker import KernelWorker
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Diff, Ruleset, Script
from steersman.modes.kinds import Kind, Words

_OBJECTS = Kind("objects")


class KernelWords:
    """Describes the kernel objects of a mode; this class does so for modes without a tool."""

    are_rules = False
    """Whether nft or iptables-save prints all of the objects."""

    def __init__(
        self,
        worker: KernelWorker,
        read: Callable[[], Ruleset],
        scripts: Callable[[Ruleset, Diff], tuple[Script, ...]] = lambda _have, _change: (),
    ) -> None:
        """Describe what `read` returns.

        Args:
            worker: the thread of the mode, in which it runs.
            read: returns the objects.
            scripts: writes a Diff of them as the input of programs, if there are any.
        """
        self._worker = worker
        self._read = read
        self._scripts = scripts

    async def read(self) -> Ruleset:
        """Return all objects of the mode, and change nothing.

        Raises:
            BusyError: they cannot be read now.
            FileNotFoundError: the mode does not run here.
            PermissionError: this process may not look.
        """
        return await self._worker.do(self._read)

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

    def scripts(self, have: Ruleset, change: Diff) -> tuple[Script, ...]:
        """Write a Diff as the input of programs, in the order in which they are to run.

        For people who want to check or read it; `Mode.apply` does not use it. () if there is no
        program for the objects of this mode.

        Args:
            have: the objects in the kernel.
            change: not empty.
        """
        return self._scripts(have, change)

    # What a mode says of its objects

    def changed_by_others(self, key: Any) -> bool:
        """Return whether only another program can make an object differ from what was written.

        False for sockets of a process, and for what the data path itself writes.
        """
        del key
        return True

    def kind_of(self, key: Any) -> Kind:
        """Return the kind of an object."""
        del key
        return _OBJECTS

    def family_of(self, key: Any) -> int:
        """Return the family of an object; 0 if it serves both."""
        del key
        return 0

    def names_of(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> set[Hashable]:
        """Return all by which an object in the kernel tells that it belongs to these plans."""
        del kernel, plans
        return set()

    def is_relevant(self, line: Words, plans: Collection[ServicePlan]) -> bool:
        """Whether a line that is as planned tells anything about the traffic of these plans."""
        del line, plans
        return True

    def beyond(
        self, lines: Collection[Words], plans: Collection[ServicePlan], settings: NodeSettings
    ) -> list[Words]:
        """Return lines that those of a Service lead to and no plan describes."""
        del lines, plans, settings
        return []

    # What follows from that

    def of_services(self, kernel: Ruleset, plans: Collection[ServicePlan]) -> Iterator[Any]:
        """Yield the keys of objects that belong to these plans by name or destination.

        They are all that can be there beside the wanted ones: left over, or made by others.
        """
        names = self.names_of(kernel, plans)
        for key, value in kernel.items():
            if not names.isdisjoint(self.kind_of(key).names(key, value)):
                yield key

    def is_on_path(self, key: Any, plans: Collection[ServicePlan]) -> bool:
        """Whether an object of the node is one that the traffic of these plans passes."""
        passed_by = self.kind_of(key).passed_by
        if not passed_by:
            return False
        family = self.family_of(key)
        passing = [plan for plan in plans if family in (0, plan.key.family)]
        if passed_by == "node ports":
            return any(not frontend.address for plan in passing for frontend in plan.frontends)
        return bool(passing)

    def rank(self, key: Any) -> int:
        """Return the place of an object in a list: packets pass those of lower rank first."""
        return self.kind_of(key).rank

    def words(self, key: Any, value: Any) -> Iterable[Words]:
        """Print one object."""
        kind = self.kind_of(key)
        return [
            line if line.purpose else line._replace(purpose=kind.purpose)
            for line in kind.words(key, value)
        ]

    def describe(self, change: Diff) -> str:
        """Print a Diff: a line for each line of an object, marked `+` or `-`."""
        lines: list[str] = []
        for mark, objects in (("-", change.removed), ("+", change.added)):
            for key in self._sorted(objects):
                lines += [f"{mark} {text}" for text in self._texts(key, objects[key])]
        for key in self._sorted(change.changed):
            old, new = (self._texts(key, value) for value in change.changed[key])
            lines += [f"- {text}" for text in old if text not in new]
            lines += [f"+ {text}" for text in new if text not in old]
        return "\n".join(lines)

    def _sorted(self, keys: Iterable[Any]) -> list[Any]:
        return sorted(keys, key=lambda key: (self.rank(key), str(key)))

    def _texts(self, key: Any, value: Any) -> list[str]:
        return [f"{line.place}: {line.text}" for line in self.words(key, value)]
