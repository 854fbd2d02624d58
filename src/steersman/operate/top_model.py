"""The screen of `steersman top`: what it shows, and what keys do. Pure.

    keys --key--> TopModel --frame--> lines of a screen of any size
                    ^  |
    samples --show--+  +--question--> what to ask the process for next

operate/top.py asks the process, cli/top_view.py reads keys and draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from steersman.model.findings import Finding, Severity, printable
from steersman.model.top import TopRow, TopSample
from steersman.operate.answer import Span, Style
from steersman.operate.process_lines import process_lines
from steersman.run.pages.conditions import count_words

T = TypeVar("T")
Shown: TypeAlias = "list[Span]"
"""A line of the screen."""
View: TypeAlias = Literal["services", "endpoints", "findings", "text", "help"]

SORTS = ("rate", "connections", "failures", "latency", "endpoints", "name")
_KEYS = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x03": "quit",
}
_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1}
_FEET = {
    "services": "q quit  s sort  / filter  Enter open  d doctor  f Findings  ? help",
    "endpoints": "Escape back  s sort  d doctor  f Findings  ? help  q quit",
    "text": "Escape back  up, down move  q quit",
}
_HELP = (
    "up, down, page up, page down, j, k   move",
    "Enter    open a Service: its endpoints",
    "Escape   back",
    "/        filter by name; Enter keeps the filter, Escape removes it",
    "s, S     sort by the next or the last column: " + ", ".join(SORTS),
    "d        run doctor on the Service",
    "f        all Findings, and Services in trouble",
    "space    refresh now",
    "q        quit",
    "",
    "set-up is the time until an endpoint answered. Modes in which the kernel makes the",
    "connections do not know it, nor failed connections: there is a - then.",
)


def keys_of(data: bytes) -> list[str]:
    """Return the keys that a terminal sent; unknown ones are left out."""
    keys: list[str] = []
    left = data.decode(errors="ignore")
    while left:
        size = 1
        if left[0] == "\x1b" and left[1:2] in ("[", "O"):
            # An escape sequence ends with its first letter or ~.
            ends = (n for n in range(2, len(left)) if "@" <= left[n] <= "~")
            size = next(ends, len(left) - 1) + 1
        one, left = left[:size], left[size:]
        key = _KEYS.get(one, one)
        keys += [key] if key.isprintable() and (key is not one or size == 1) else []
    return keys


def number(value: float | None) -> str:
    """Return a count or a rate in few characters; - if it is not known."""
    if value is None:
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def duration(seconds: float | None) -> str:
    """Return a duration in few characters; - if it is not known."""
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


class Column(NamedTuple):
    """A column of numbers."""

    title: str
    sort: str
    """The order that it stands for, one of SORTS."""
    width: int
    text: Callable[[TopRow], str]
    from_width: int = 0
    """Columns of the screen from which on it is shown."""


COLUMNS = (
    Column("PER S", "rate", 8, lambda row: number(row.rate)),
    Column("CONNECTIONS", "connections", 12, lambda row: number(row.connections), 60),
    Column("FAILED/S", "failures", 9, lambda row: number(row.failure_rate), 50),
    Column("SET-UP", "latency", 8, lambda row: duration(row.latency), 76),
    Column("ENDPOINTS", "endpoints", 9, lambda row: str(row.endpoints), 40),
)


def summary(sample: TopSample, now: float) -> Iterator[Shown]:
    """Yield the lines about the process as a whole, and about all its traffic."""
    status, total = sample.status, sample.total
    for line in process_lines(status, now):
        yield [(" " * line.indent + line.text, line.style)]
    if not sample.counted:
        why = sample.problem or f"the {status.mode} mode does not count connections"
        yield [(f"  traffic   unknown: {why}", "dim")]
    else:
        open_ = "" if sample.open_connections is None else f"  {sample.open_connections} open"
        yield [
            (f"  traffic   {number(total.rate)} connections/s{open_}", ""),
            (f"  {number(total.failure_rate)} failed/s", "bad" if total.failure_rate else ""),
            (f"  set-up {duration(total.latency)}", ""),
            (f"  over {duration(sample.interval)}" if sample.interval else "  counting...", "dim"),
            (f"  {sample.problem}", "warn"),
        ]
    yield []


def _listed(sample: TopSample) -> tuple[Finding, ...]:
    """Return the Findings, and the Services in trouble."""
    return (*sample.status.findings, *sample.status.troubled)


class Question(NamedTuple):
    """What to ask the process for."""

    sort: str = "rate"
    filter: str = ""
    service: str = ""
    """The Service whose endpoints are shown; "" for the list of ServicePorts."""


class Command(NamedTuple):
    """Something that a key asks for and the model cannot do."""

    kind: Literal["quit", "ask", "doctor"]
    service: str = ""


class TopModel:
    """The state of the screen."""

    def __init__(self, filter: str = "", sort: str = "rate") -> None:
        """Begin with the list of ServicePorts.

        Args:
            filter: part of the names to show.
            sort: one of SORTS.
        """
        self.view: View = "services"
        self.question = Question(sort, filter)
        self.typing = False
        """The filter is being typed."""
        self.sample: TopSample | None = None
        self.message = ""
        """A line above the keys, such as a failure."""
        self._text: tuple[str, list[str]] = ("", [])
        """Title and lines of the text view."""
        self._at = 0
        """Position of the selected row, or of the first line of a text."""
        self._page = 10
        """Rows of the last frame."""
        self._chosen: tuple[str, str] | None = None
        """Name and protocol of the selected ServicePort: rows change places all the time."""

    def show(self, sample: TopSample) -> None:
        """Show another sample; the ServicePort that was selected still is, if it is among them."""
        self.sample = sample
        self._find_chosen()

    def _find_chosen(self) -> None:
        """Move to the row of the selected ServicePort; where it is gone, select another one."""
        if self.view == "services" and self.sample is not None:
            names = [(row.name, row.protocol) for row in self.sample.rows]
            if self._chosen in names:
                self._at = names.index(self._chosen)
        self._move_to(self._at)

    def _move_to(self, place: int) -> None:
        """Move to a row or line, or to the next one that there is."""
        self._at = max(0, min(place, self._lines - 1))
        if self.view == "services" and self.sample is not None and self.sample.rows:
            row = self.sample.rows[self._at]
            self._chosen = row.name, row.protocol

    def show_text(self, title: str, lines: Iterable[str]) -> None:
        """Show a text, such as what doctor found."""
        self._text = (title, [printable(line.expandtabs()) for line in lines])
        self.view, self._at = "text", 0

    @property
    def selected(self) -> str:
        """The Service that keys are about, as NAMESPACE/NAME; "" if there is none."""
        if self.question.service:
            return self.question.service
        if self.view != "services" or self.sample is None or not self.sample.rows:
            return ""
        return self.sample.rows[min(self._at, len(self.sample.rows) - 1)].name.partition(":")[0]

    @property
    def _lines(self) -> int:
        """The number of rows or lines that can be moved over."""
        if self.view in ("text", "help"):
            return len(_HELP if self.view == "help" else self._text[1])
        if self.sample is None:
            return 0
        return len(_listed(self.sample) if self.view == "findings" else self.sample.rows)

    # Keys

    def key(self, key: str) -> Command | None:
        """Take a key; return what to do about it; None if drawing is enough."""
        self.message = ""
        if key == "quit":
            return Command("quit")
        if self.typing:
            return self._typed(key)
        if key in _MOVES or key in ("page up", "page down", "home", "end"):
            step = {"page up": -self._page, "page down": self._page, "home": -self._lines}
            self._move_to(self._at + (_MOVES.get(key) or step.get(key, self._lines)))
            return None
        match key:
            case "q":
                return Command("quit")
            case " ":
                return Command("ask")
            case "s" | "S" if self.view in ("services", "endpoints"):
                step_ = 1 if key == "s" else -1
                sort = SORTS[(SORTS.index(self.question.sort) + step_) % len(SORTS)]
                self.question = self.question._replace(sort=sort)
                return Command("ask")
            case "/" if self.view == "services":
                self.typing = True
            case "f":
                self.view, self._at = "findings", 0
            case "?" | "h":
                self.view, self._at = "help", 0
            case "enter" if self.view == "services" and self.selected:
                self.question = self.question._replace(service=self.selected)
                self.view, self._at = "endpoints", 0
                return Command("ask")
            case "d" if self.selected:
                return Command("doctor", self.selected)
            case "escape" | "backspace":
                return self._back()
        return None

    def _back(self) -> Command | None:
        if self.view in ("text", "help", "findings"):
            self.view, self._at = "endpoints" if self.question.service else "services", 0
            self._find_chosen()
            return None
        if self.question.service:
            self.question = self.question._replace(service="")
            self.view = "services"
        else:
            self.question = self.question._replace(filter="")
        return Command("ask")

    def _typed(self, key: str) -> Command | None:
        """Change the filter."""
        text = self.question.filter
        match key:
            case "enter":
                self.typing = False
            case "escape":
                self.typing, text = False, ""
            case "backspace":
                text = text[:-1]
            case _ if len(key) == 1:
                text += key
        self.question = self.question._replace(filter=text)
        self._chosen, self._at = None, 0
        return Command("ask")

    # The screen

    def frame(self, width: int, height: int, now: float) -> list[Shown]:
        """Return exactly `height` lines of at most `width` columns.

        Args:
            width: columns of the terminal.
            height: its lines.
            now: seconds since 1970.
        """
        head = list(summary(self.sample, now)) if self.sample else [[("waiting...", "dim")]]
        foot: list[Shown] = [[(self.message, "warn")]] if self.message else []
        if self.typing:
            foot.append([("filter: ", "title"), (f"{self.question.filter}_", "")])
        else:
            foot.append([(_FEET.get(self.view, _FEET["text"]), "dim")])
        room = max(1, height - len(head) - len(foot))
        body: list[Shown] = []
        if self.view in ("text", "help"):
            title, texts = ("keys", list(_HELP)) if self.view == "help" else self._text
            body = [[(title, "title")]]
            body += [[(text, "")] for text in self._window(texts, room - 1)]
        elif self.sample is not None and self.view == "findings":
            body = [[(f"Findings: {count_words(self.sample.status.finding_counts)}", "title")]]
            for each in self._window(_listed(self.sample), room - 1):
                style: Style = "bad" if each.severity is Severity.ERROR else "warn"
                body.append([(f"{each.severity}  ", style), (printable(str(each)), "")])
        elif self.sample is not None:
            body = self._table(self.sample, width, room)
        lines = [*head, *body[:room], *([[]] * (room - len(body))), *foot]
        out: list[Shown] = []
        for line in lines[:height]:  # leave out what does not fit
            left, fitting = width, list[Span]()
            for text, look in line:
                if text and left > 0:
                    fitting.append((text[:left], look))
                left -= len(text)
            out.append(fitting)
        return out

    def _table(self, sample: TopSample, width: int, room: int) -> list[Shown]:
        columns = [column for column in COLUMNS if width >= column.from_width]
        name = "SERVICE" if self.view == "services" else f"ENDPOINTS of {self.question.service}"
        wide = max(12, width - sum(column.width + 2 for column in columns))
        title: Shown = [(name.ljust(wide), "title")]
        for column in columns:
            mark = "*" if column.sort == self.question.sort else ""
            title.append((f"{mark + column.title:>{column.width + 2}}", "title"))
        lines = [title]
        # The selected row is on the screen, in the middle if possible.
        self._page = max(1, room - 2)
        first = max(0, min(self._at - self._page // 2, len(sample.rows) - self._page))
        for place, row in enumerate(sample.rows[first : first + room - 2], first):
            style: Style = "bad" if row.failure_rate or not row.endpoints else ""
            mark = ">" if place == self._at and self.view == "services" else " "
            text = f"{mark}{printable(row.name)}"
            if len(text) > wide:
                text = f"{text[: wide - 2]}.."
            line: Shown = [(text.ljust(wide), "title" if mark == ">" else style)]
            line += [(f"{column.text(row):>{column.width + 2}}", style) for column in columns]
            lines.append(line)
        if not sample.rows:
            of = f" whose name has {self.question.filter!r}" if self.question.filter else ""
            lines.append([(f"nothing{of}", "dim")])
        elif (shown := len(lines) - 1) < sample.matching:
            lines.append([(f" {shown} of {sample.matching}", "dim")])
        return lines

    def _window(self, lines: Sequence[T], room: int) -> Sequence[T]:
        first = max(0, min(self._at, len(lines) - room))
        self._at, self._page = first, max(1, room)
        return lines[first : first + max(0, room)]
