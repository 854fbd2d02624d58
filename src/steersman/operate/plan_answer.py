"""The answer of `steersman plan`: a summary first, the objects on request."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from steersman.compile.compare import Treatment
from steersman.operate.answer import Answer, Block, Line, Table

_NAMED, _NAMED_WIDE = 3, 20


class ObjectCount(msgspec.Struct, frozen=True, rename="camel"):
    """Kernel objects of one kind that a change adds, changes and removes."""

    mode: str
    kind: str
    added: int = 0
    changed: int = 0
    removed: int = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """The three numbers."""
        return self.added, self.changed, self.removed


class Effort(msgspec.Struct, frozen=True, rename="camel"):
    """The time and memory that a change takes, estimated by measured costs of single objects."""

    seconds: float = 0.0
    """Until everything is written, on two cores of the measured machine."""
    kilobytes: int = 0
    """Growth of the kernel's memory; negative if it shrinks."""
    how: str = ""
    """The estimate in words."""


class PlanAnswer(Answer, frozen=True, kw_only=True):
    """What a change would do."""

    before: str
    """The present state, such as `iptables mode`."""
    after: str
    """The state after the change."""
    compared_with: str
    """Where the present objects are from: the kernel, or what a process wrote."""
    objects: tuple[ObjectCount, ...] = ()
    treatments: tuple[Treatment, ...] = ()
    compared: bool = True
    """Whether the present treatment of Services is known."""
    cut: tuple[str, ...] = ()
    """Sentences about connections that end; () if all continue."""
    effort: Effort = Effort()
    findings: tuple[str, ...] = ()
    """Problems that the change brings."""
    notes: tuple[str, ...] = ()
    """What could not be found out, and why."""
    details: tuple[str, ...] = ()
    """The objects in the words of the mode's tool, if they were asked for."""

    @property
    def exit_code(self) -> int:
        """0 if there is nothing to do, 1 if something changes, as `diff`."""
        return int(bool(self.objects or self.treatments))

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield the summary, then the objects."""
        same = self.before == self.after
        yield Line(self.after if same else f"from {self.before} to {self.after}", "title")
        yield Line(f"compared with {self.compared_with}", "dim")
        for note in self.notes:
            yield Line(f"note: {note}", "warn", hang=2)
        if not self.objects and not self.treatments:
            yield Line("nothing to change", "good")
        if self.objects:
            rows = [
                (each.mode, each.kind, *(f"{n or '-'}" for n in each.counts))
                for each in self.objects
            ]
            yield Table(("MODE", "KERNEL OBJECTS", "ADDED", "CHANGED", "REMOVED"), rows)
        # Traffic: the reason once, then the Services that it concerns.
        if self.treatments:
            yield Line("what changes for traffic:", "title")
        elif self.objects and self.compared:
            yield Line("no Service is treated differently", "good")
        most = _NAMED_WIDE if wide else _NAMED
        for treatment in self.treatments:
            yield Line(treatment.reason, "warn", indent=2)
            number, rest = len(treatment.services), len(treatment.places) - most
            more = f" and {rest} more" if rest > 0 else ""
            if shown := ", ".join(treatment.places[:most]):
                yield Line(f"{number} Service{'s' * (number != 1)}: {shown}{more}", indent=4)
        for finding in self.findings:
            yield Line(f"finding: {finding}", "warn", hang=2)
        if self.objects:
            if not self.cut and self.compared:
                yield Line("no established connection is cut", "good")
            for sentence in self.cut:
                yield Line(f"connections: {sentence}", "bad", hang=2)
            yield Line(f"takes about {self.effort.how}", hang=2)
        for line in self.details:
            yield Line(line)


class ScriptAnswer(Answer, frozen=True, kw_only=True):
    """The input of one tool, and nothing else: it can be piped into the tool."""

    tool: str
    script: str

    @property
    def exit_code(self) -> int:
        """0 if there is nothing to do for the tool, 1 otherwise."""
        return int(bool(self.script))

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield the lines of the script."""
        del wide
        yield from map(Line, self.script.splitlines())
