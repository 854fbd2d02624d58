"""Print an answer: as text or tables (in colour on a terminal), as JSON or as YAML."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TextIO

import msgspec

from steersman.model.findings import printable
from steersman.operate.answer import Answer, Block, Cell, Line, Span, Style, Table

_CODES: dict[Style, str] = {"good": "32", "warn": "33", "bad": "31", "dim": "2", "title": "1"}
"""Parameters of SGR, by style."""
_GAP = "   "
_CLEAR = "\x1b[H\x1b[2J"
_NARROWEST = 16
"""Columns that the last column of a table needs; what is longer goes below its row otherwise."""
_COMMAND = re.compile(r"`[^`]+`")
_INDENT = 4
"""Of what goes there."""


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
            print_blocks(chain(answer.blocks(output == "wide"), _origin(answer)), out)


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


def print_blocks(blocks: Iterable[Block], out: TextIO) -> None:
    """Print blocks; on a terminal in colour, and with lines that fit."""
    if not out.isatty():
        out.writelines(f"{line}\n" for line in plain_lines(blocks))
        return
    for spans in lines_of(blocks, shutil.get_terminal_size().columns):
        out.write(f"{on_terminal(spans)}\n")


def on_terminal(spans: Iterable[Span]) -> str:
    """Return a line as a terminal takes it: in colour, unless the user wants none."""
    # https://no-color.org
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return "".join(text for text, _ in spans)
    return "".join(
        f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style and text else text for text, style in spans
    )


def plain_lines(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the lines of blocks as plain text, for pipes."""
    for spans in lines_of(blocks):
        yield "".join(text for text, _ in spans)


def lines_of(blocks: Iterable[Block], width: int = 0) -> Iterator[list[Span]]:
    """Yield the lines of blocks; control characters are shown, not sent.

    Args:
        blocks: the blocks.
        width: columns of a terminal, to which tables are fitted; 0 for none.
    """
    for block in blocks:
        if isinstance(block, Line):
            text = " " * block.indent + printable(block.text)
            hang = " " * block.hang
            pieces = _wrap(text, width, hang) if width and hang else [text]
            yield from ([(piece, block.style)] for piece in pieces)
            continue
        if block.title:
            yield [(block.title, "title")]
        if block.rows:
            yield from _table_lines(block, width)
        elif block.empty:
            yield [(block.empty, "dim")]


def _table_lines(table: Table, width: int) -> Iterator[list[Span]]:
    """Yield the lines of a table that has rows.

    On a narrow terminal, the last column is broken into lines. That is where tables have sentences;
    a name or an address that is broken could not be copied.
    """
    head: list[Cell] = [(column, "title") for column in table.columns]
    rows = [[_span(cell) for cell in row] for row in (head, *table.rows)]
    widths = [max(len(text) for text, _ in column) for column in zip(*rows, strict=True)]
    before = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    is_below = width - before < _NARROWEST
    start = _INDENT if is_below else before
    for *cells, (last, style) in rows:
        pieces = [last]
        if width and len(last) > max(_NARROWEST, width - before):
            pieces = _wrap(last, max(_NARROWEST, width - start))
            if is_below:
                pieces.insert(0, "")
        spans = [
            (text.ljust(size) + _GAP, look)
            for (text, look), size in zip(cells, widths[:-1], strict=True)
        ]
        yield _stripped([*spans, (pieces[0], style)])
        yield from ([(" " * start, ""), (piece, style)] for piece in pieces[1:])


def _wrap(text: str, width: int, hang: str = "") -> list[str]:
    """Break a text into lines, but no name and no `command`: it could not be copied."""
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        whole, width, subsequent_indent=hang, break_on_hyphens=False, break_long_words=False
    )
    return [line.replace("\0", " ") for line in lines]


def _span(cell: Cell) -> Span:
    if isinstance(cell, str):
        return printable(cell), ""
    return printable(cell[0]), cell[1]


def _stripped(spans: list[Span]) -> list[Span]:
    """Return a line without spaces at its end."""
    while spans and not spans[-1][0].strip():
        spans.pop()
    if spans:
        text, style = spans[-1]
        spans[-1] = text.rstrip(), style
    return spans
