"""An Exec that answers commands from a script, and the answers of an iptables that works."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from steersman.host.exec import Result

NFT = "iptables v1.8.9 (nf_tables)"
LEGACY = "iptables v1.8.9 (legacy)"


class OnLoop:
    """The half of an Exec that runs tools in threads, for one of which nobody wants that."""

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        raise AssertionError(f"{argv[0]} is run in a thread")


class InThread:
    """The half of an Exec that runs programs on the event loop, for one of which nobody does."""

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        raise AssertionError(f"{argv[0]} is run on the event loop")


class Scripted:
    """Answers commands by the first pattern that matches; without one there is no such program."""

    def __init__(self, *answers: tuple[str, str | int | Exception]) -> None:
        self.answers = list(answers)
        self.stderr = ""
        self.ran: list[str] = []

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        return self.run_tool(argv, stdin, timeout=timeout)

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        line = " ".join(argv)
        self.ran.append(line)
        for pattern, answer in self.answers:
            if fnmatch.fnmatchcase(line, pattern):
                if isinstance(answer, Exception):
                    raise answer
                if isinstance(answer, int):
                    return Result(answer, b"", self.stderr.encode())
                return Result(0, answer.encode(), b"")
        raise FileNotFoundError(2, "No such file", argv[0])


BOTH = (
    ("iptables --version", NFT),
    ("iptables-nft --version", NFT),
    ("iptables-legacy --version", LEGACY),
)
WORKS = ("*", "")
