"""Print an answer: as text or tables (in colour on a terminal), as JSON or as YAML."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, TextIO

import msgspec

from steersman.model.findings import printable
from steersman.operate.answer import Answer, Block, Cell, Line, Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

STYLES = {"good": "green", "warn": "yellow", "bad": "red", "dim": "dim", "title": "bold", "": ""}
_GAP = "   "
_CLEAR = "\x1b[H\x1b[2J"
_SHORT = 12
"""Characters of a column that is never broken."""


def print_answer(answer: Answer, output: str, out: TextIO | None = None) -> None:
    """Print an answer.

    Args:
        answer: the answer.
        output: text, wide, json or yaml.
        out: where to print; None for standard output.
    """
    out = out or sys.stdout
    match output:
        case "json":
            text = msgspec.json.format(msgspec.json.encode(answer.data), indent=2)
            out.write(f"{text.decode()}\n")
        case "yaml":
            from steersman.config.yaml_writer import yaml_lines  # noqa: PLC0415 - takes PyYAML

            out.writelines(f"{line}\n" for line in yaml_lines(msgspec.to_builtins(answer.data)))
        case _:
            blocks = chain(answer.blocks(output == "wide"), _origin(answer))
            if out.isatty():
                print_blocks(blocks, terminal(out))
            else:
                out.writelines(f"{line}\n" for line in plain_lines(blocks))


def print_next(answer: Answer, output: str) -> None:
    """Print one of several answers: as a line of JSON, a document of YAML, or on a clean screen."""
    match output:
        case "json":
            print(msgspec.json.encode(answer.data).decode())
        case "yaml":
            print("---")
            print_answer(answer, output)
        case _:
            print(_CLEAR if sys.stdout.isatty() else "", end="")
            print_answer(answer, output)
    sys.stdout.flush()


def _origin(answer: Answer) -> Iterator[Block]:
    if answer.source:
        yield Line(f"from {answer.source}", "dim")


def plain_lines(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the lines of blocks as plain text, for pipes."""
    for block in blocks:
        if isinstance(block, Line):
            yield " " * block.indent + printable(block.text)
        else:
            yield from _plain_table(block)


def _plain_table(table: Table) -> Iterator[str]:
    if table.title:
        yield table.title
    if not table.rows:
        if table.empty:
            yield table.empty
        return
    rows = [[printable(_text(cell)) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield _GAP.join(cells).rstrip()


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def terminal(out: TextIO) -> Console:
    """Return a console for a terminal."""
    from rich.console import Console  # noqa: PLC0415 - takes 30 ms, and pipes need none

    return Console(file=out, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_blocks(blocks: Iterable[Block], console: Console) -> None:
    """Print blocks on a terminal."""
    for each in renderables(blocks):
        console.print(each)


def renderables(blocks: Iterable[Block]) -> Iterator[RenderableType]:
    """Yield the blocks in the form that rich prints; control characters are shown, not sent."""
    from rich.table import Table as RichTable  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    for block in blocks:
        if isinstance(block, Line):
            yield Text(" " * block.indent + printable(block.text), STYLES[block.style])
            continue
        if not block.rows:
            if block.empty:
                yield Text(block.empty, "dim")
            continue
        table = RichTable(
            title=block.title or None,
            title_justify="left",
            box=None,
            pad_edge=False,
            padding=(0, 3, 0, 0),
            header_style="bold",
        )
        # If the terminal is too narrow, long columns are broken into lines; nothing is cut off.
        for number, column in enumerate(block.columns):
            widest = max(len(column), *(len(_text(row[number])) for row in block.rows))
            table.add_column(column, no_wrap=widest <= _SHORT, overflow="fold")
        for row in block.rows:
            cells = ((cell, "") if isinstance(cell, str) else cell for cell in row)
            table.add_row(*(Text(printable(text), STYLES[style]) for text, style in cells))
        yield table
