"""The change log: which names changed, and how far each consumer has followed them. Pure.

Theory. Whoever changes something touches its name; nobody is handed the change itself. A consumer
has a Cursor, and works on the present:

    names, revision = cursor.changed()    # names touched since, oldest first
    ...                                   # plan, render or write them as they are now
    cursor.move(revision)                 # only after that succeeded

A failure, a cancellation or a crash in between leaves the cursor where it was, so the same names
come again: nothing is lost, and no code says so. A name that is touched a hundred times has one
entry, and is dropped once every cursor has passed it. So a log is never longer than what it is
about, and mostly empty. A new consumer is behind: it looks at everything that there is, and
follows the log from there. What it costs: something that changed and changed back is looked at for
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import takewhile
from typing import Generic, TypeVar
from weakref import ref

Name = TypeVar("Name", bound=Hashable)


class ChangeLog(Generic[Name]):
    """The names that changed and that somebody still has to look at, each once."""

    def __init__(self) -> None:
        self.revision = 0
        """Grows with each touch."""
        self._revisions: dict[Name, int] = {}
        """The revision of the last change of each name, in its order."""
        self._cursors: list[ref[Cursor[Name]]] = []

    def __len__(self) -> int:
        return len(self._revisions)

    def touch(self, name: Name) -> None:
        """Record that something changed: it moves to the end."""
        self.revision += 1
        self._revisions.pop(name, None)
        self._revisions[name] = self.revision

    def revision_of(self, name: Name) -> int:
        """Return the revision of the last change; 0 if every cursor has passed it."""
        return self._revisions.get(name, 0)

    def cursor(self) -> Cursor[Name]:
        """Return the place of a new consumer, at the beginning."""
        cursor = Cursor(self)
        alive = [each for each in self._cursors if each() is not None]
        self._cursors = [*alive, ref(cursor)]
        return cursor

    def drop_passed(self) -> None:
        """Drop the names that no cursor needs any more; `Cursor.move` calls it."""
        oldest = next(iter(self._revisions.values()), math.inf)
        passed = self.revision
        for each in self._cursors:
            if (cursor := each()) is not None and cursor.at < passed:
                passed = cursor.at
            if passed < oldest:  # of many followers, all but the last one end here
                return
        if passed == self.revision:
            self._revisions = {}  # an emptied one would keep its size
            return
        for name, _ in [*takewhile(lambda each: each[1] <= passed, self._revisions.items())]:
            del self._revisions[name]


class Cursor(Generic[Name]):
    """A consumer's place in a ChangeLog; it counts as long as somebody holds it."""

    def __init__(self, log: ChangeLog[Name]) -> None:
        """Start at the beginning; use `ChangeLog.cursor`."""
        self._log = log
        self.at = 0
        """The revision up to which everything is done."""

    @property
    def behind(self) -> bool:
        """Whether something changed since."""
        return self.at < self._log.revision

    def changed(self, until: int | None = None) -> tuple[list[Name], int]:
        """Return what changed since, oldest first, and where to move to once it is done.

        Costs as much as there are names.

        Args:
            until: leave out names that changed after this revision.
        """
        if until is None:
            until = self._log.revision
        names = []
        for name, touched in reversed(self._log._revisions.items()):
            if touched <= self.at:
                break
            if touched <= until:
                names.append(name)
        names.reverse()
        return names, until

    def move(self, revision: int) -> None:
        """Record that everything up to a revision is done."""
        self.at = max(self.at, revision)
        self._log.drop_passed()
