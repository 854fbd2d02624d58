"""A full-screen view on a terminal: keys in, lines of styled text out."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from steersman.cli.output import on_terminal
from steersman.operate.answer import Span

_ESCAPE = 0.05
"""Seconds until a lone escape byte is a key and not the beginning of a sequence."""
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The alternate screen without a cursor, and the usual one with it."""
_HOME, _ERASE_LINE = "\x1b[H", "\x1b[K"

_QUIT = b"\x03"  # as Ctrl-C
_ENDS = (signal.SIGTERM, signal.SIGHUP)


class Screen:
    """The alternate screen of a terminal; the usual one is back when the block ends."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[bytes] = asyncio.Queue()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        return shutil.get_terminal_size()

    def draw(self, lines: Sequence[Sequence[Span]]) -> None:
        """Show these lines, which must not be more or longer than `size`."""
        # Erased before it is written: behind a line that fills the screen, its end would go, too.
        shown = "\n".join(_ERASE_LINE + on_terminal(line) for line in lines)
        sys.stdout.write(_HOME + shown)
        sys.stdout.flush()

    def wake(self) -> None:
        """Let `keys` yield b"" now: something else has to be drawn."""
        self._events.put_nowait(b"")

    async def keys(self) -> AsyncIterator[bytes]:
        """Yield each input; b"" after a change of the size or a `wake`."""
        loop, number = asyncio.get_running_loop(), sys.stdin.fileno()

        def read() -> None:
            data = os.read(number, 1024)
            if not data:  # the terminal is gone
                loop.remove_reader(number)
            self._events.put_nowait(data or _QUIT)

        loop.add_reader(number, read)
        try:
            while True:
                data = await self._events.get()
                if data == b"\x1b":  # the rest of a sequence may come in another packet
                    await asyncio.sleep(_ESCAPE)
                    while not self._events.empty():
                        data += self._events.get_nowait()
                yield data
        finally:
            loop.remove_reader(number)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Turn signals into input: SIGWINCH wakes, and those that end a process are Ctrl-C."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self.wake)
        for number in _ENDS:  # so that the terminal is given back
            loop.add_signal_handler(number, self._events.put_nowait, _QUIT)
        try:
            yield
        finally:
            for number in (signal.SIGWINCH, *_ENDS):
                loop.remove_signal_handler(number)


@contextmanager
def full_screen() -> Iterator[Screen]:
    """Take the terminal of standard input and output; give it back whatever happens.

    Call it on the event loop: signals are handled as long as the screen is ours.
    """
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    screen = Screen()
    with screen.signals():
        try:
            tty.setcbreak(number)
            sys.stdout.write(_ENTER)
            yield screen
        finally:
            termios.tcsetattr(number, termios.TCSADRAIN, before)
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
